"""What several slow ranks cost: each by itself, and all of them together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from aggregate import build_timeline
from detect import Cause, detect
from detect.causes.finding import _falls_short, cost_ratio, counted_window, gain
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.warmup import steady
from detect.text import render_text
from detect.thresholds.adjustable import DetectorSettings
from detect.whatif.marks import BEGIN, END, ROUNDING_NS, marks_of, programs
from detect.whatif.savings import ReplayedCosts
from detect.whatif.traced import replay_of_timeline
from megascan.schema import Track
from megascan.simulate import Fault, FaultKind, JobModel, Noise, compute_bound, simulate_trace
from megascan.timeline import equals, numbers
from megascan.topology import Layout


def reported(layout, ranks, **changes):
    """Return the report on a job whose ranks compute 1.3 times slower, and the true cost."""
    job = JobModel(
        layout=layout, costs=compute_bound(layout), iterations=8, num_microbatches=4,
        num_layers=4, noise=Noise(device_ratio=0.003), **changes,
    )  # fmt: skip
    faults = [Fault(rank=rank, kind=FaultKind.COMPUTE, factor=1.3) for rank in ranks]
    slow, sound = simulate_trace(job, faults, 1), simulate_trace(job, (), 1)
    steps = [
        numbers(one.spans.filter(pa.array(equals(one.spans, "name", "iteration"))), "duration_ns")
        for one in (slow, sound)
    ]
    return detect(build_timeline(slow)), float(steps[0].mean() / steps[1].mean())


def test_a_cost_is_a_number_where_the_estimate_exceeds_the_iteration():
    job = JobModel(layout=Layout(dp=2), costs=compute_bound(Layout(dp=2)), iterations=5)
    seen = steady(observe(build_timeline(simulate_trace(job, (), 1))), DetectorSettings())
    saved_ns = 2.0 * seen.iteration_ns
    assert cost_ratio(seen, saved_ns, (0, 99)) == pytest.approx(20.0)


def test_two_ranks_that_hide_behind_each_other_cost_what_both_cost():
    report, true = reported(Layout(dp=8), (2, 5))
    assert sorted(one.ranks for one in report.findings) == [(2,), (5,)]
    for finding in report.findings:
        assert finding.step_time_cost_ratio < 1.02
        assert finding.joint_ranks == (2, 5)
        assert finding.joint_cost_ratio == pytest.approx(true, abs=0.02)
    text = render_text(report)
    assert "next to nothing" not in text.splitlines()[0]
    assert f"without it and rank {7 - report.findings[0].ranks[0]} the job would be" in text


def test_one_slow_rank_has_no_joint_cost():
    report, true = reported(Layout(dp=8), (2,))
    (finding,) = report.findings
    assert finding.joint_ranks == ()
    assert finding.step_time_cost_ratio == pytest.approx(true, abs=0.02)
    assert "what is found on" not in render_text(report)
    assert finding.to_json()["joint_cost_ratio"] == 1.0


def test_ranks_of_several_stages_are_mended_together_where_only_that_helps():
    report, true = reported(Layout(tp=2, pp=2, dp=4), (2, 3, 6))
    joint = {one.ranks: one.joint_cost_ratio for one in report.findings if one.cause == "compute"}
    assert joint == {ranks: pytest.approx(true, abs=0.02) for ranks in ((2,), (3,), (6,))}


def test_the_cost_is_that_of_the_iterations_in_which_it_holds():
    """Slow from iteration 9 of 16 on: mean over all, it would cost half."""
    layout = Layout(dp=4, tp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout), iterations=16, num_layers=4)
    fault = Fault(rank=3, kind=FaultKind.COMPUTE, factor=1.4, first_iteration=9)
    traces = simulate_trace(job, [fault], 1), simulate_trace(job, (), 1)
    steps = [one.spans.filter(pa.array(equals(one.spans, "name", "iteration"))) for one in traces]
    slow_ns, sound_ns = (
        numbers(one, "duration_ns")[numbers(one, "iteration") >= 9].mean() for one in steps
    )
    (finding,) = detect(build_timeline(traces[0])).findings
    assert (finding.first_iteration, finding.last_iteration) == (9, 16)
    assert finding.step_time_cost_ratio == pytest.approx(slow_ns / sound_ns, abs=0.02)
    assert finding.lost_share == pytest.approx(1 - sound_ns / slow_ns, abs=0.02)


def test_the_first_iterations_of_a_run_do_not_count(job, slow):
    """Of a short window all iterations are judged; the first takes long for everybody."""
    seen = observe(job(layout=Layout(dp=4), iterations=3, first_iteration=1).timeline())
    assert seen.iterations.tolist() == [1, 2, 3]
    assert counted_window(seen, 1, 3) == (3, 3)
    assert counted_window(seen, 1, 2) == (1, 2)
    warms_for_one = DetectorSettings(num_warmup_iterations=1)
    assert counted_window(steady(seen, warms_for_one), 1, 3) == (2, 3)


def test_what_no_replay_tells_is_not_said_to_cost_nothing():
    assert "does not show" in gain("the job", 1.0, is_replayed=False)
    assert "next to nothing" in gain("the job", 1.0, is_replayed=True)
    assert gain("the job", 1.2, is_replayed=False).endswith("the job would be about 20.0 % faster")


@pytest.mark.parametrize(("first", "slowed"), [(0, "the job"), (12, "these iterations")])
def test_what_holds_for_a_while_slows_the_iterations_of_then(job, slow, first, slowed):
    report = job(layout=Layout(dp=4), work=slow(3, 1.5, first)).report()
    assert f"without it {slowed} would be" in report.findings[0].headline


def passes_of(timeline, rank=0):
    marks = marks_of(timeline)
    names = timeline.spans.column("name").to_pandas().to_numpy()
    mine = marks.segment // len(marks.iterations) == rank
    return [(int(e), str(names[r])) for e, r in zip(marks.edge[mine], marks.row[mine], strict=True)]


def test_ends_that_rounding_puts_behind_the_next_begin_do_not_change_the_program(job):
    timeline = job(layout=Layout(dp=2), noise=0.0).timeline()
    expected = passes_of(timeline)
    spans = timeline.spans
    longer = numbers(spans, "duration_ns") + equals(spans, "name", "forward") * (ROUNDING_NS - 1)
    place = spans.schema.get_field_index("duration_ns")
    object.__setattr__(timeline, "spans", spans.set_column(place, "duration_ns", pa.array(longer)))
    assert passes_of(timeline) == expected
    assert expected[:2] == [(BEGIN, "forward"), (END, "forward")]


def test_collectives_beside_compute_stand_where_they_begin_at_the_earliest():
    layout = Layout(dp=4)
    job = JobModel(
        layout=layout, costs=compute_bound(layout), iterations=6, num_microbatches=2, num_layers=2
    )
    timeline = build_timeline(simulate_trace(job, (), 2))
    spans = timeline.spans
    reductions = equals(spans, "kind", "collective") & equals(
        spans, "op", "reduce_scatter", "all_reduce"
    )
    assert reductions.any()
    track = np.where(reductions, int(Track.OVERLAPPED), numbers(spans, "track"))
    start, iteration = numbers(spans, "start_ns"), numbers(spans, "iteration")
    backward = equals(spans, "name", "backward")
    # of rank 0, iteration 5: the stream was free before its last backward pass had ended
    mine = (numbers(spans, "rank") == 0) & (iteration == 5)
    ends = (start + numbers(spans, "duration_ns"))[mine & backward].max()
    moved = np.where(mine & reductions & (start >= ends), ends - 1000, start)
    for name, values in (("track", track), ("start_ns", moved)):
        place = spans.schema.get_field_index(name)
        spans = spans.set_column(
            place, spans.schema.field(place), pa.array(values, spans.schema.field(place).type)
        )
    object.__setattr__(timeline, "spans", spans)
    found = programs(marks_of(timeline))
    assert len(np.unique(found[:, 2:])) == 1


def test_a_late_loader_costs_no_more_than_its_loading(job, slow):
    """The rank computes slowly as well, which a replay without both would mend, too."""
    late = job(
        layout=Layout(dp=4), work=slow(2, 1.3),
        loading_ms=lambda slot: 25.0 if slot.rank == 2 else 1.0,
    ).timeline()  # fmt: skip
    found = {one.cause: one for one in detect(late).findings if one.ranks == (2,)}
    assert set(found) == {"compute", "loader"}
    step_ns = numbers(late.spans, "duration_ns")[equals(late.spans, "name", "iteration")].mean()
    most = step_ns / (step_ns - 8 * 24e6)  # eight microbatches, 24 ms longer each
    assert 1.0 < found["loader"].step_time_cost_ratio <= most + 0.01
    assert found["loader"].step_time_cost_ratio < found["compute"].step_time_cost_ratio


def settled_ms(trace):
    rows = trace.spans.filter(pa.array(equals(trace.spans, "name", "iteration")))
    return float(numbers(rows, "duration_ns")[numbers(rows, "iteration") > 2].mean()) / 1e6


@pytest.mark.parametrize(
    ("layout", "rank"), [(Layout(dp=8), 3), (Layout(tp=2, pp=2, dp=2), 4), (Layout(tp=2, dp=4), 4)]
)
def test_late_loads_cost_what_they_cost_although_they_scatter(layout, rank):
    job = JobModel(
        layout=layout, costs=compute_bound(layout), iterations=10, num_layers=4,
        noise=Noise(device_ratio=0.003),
    )  # fmt: skip
    late = simulate_trace(job, [Fault(rank=rank, kind=FaultKind.LOADER, factor=200.0)], 1)
    true = settled_ms(late) / settled_ms(simulate_trace(job, (), 1))
    (finding,) = [one for one in detect(build_timeline(late)).findings if one.cause == "loader"]
    assert finding.ranks == (rank,) and finding.cost_is_replayed
    assert finding.step_time_cost_ratio == pytest.approx(true, abs=0.02)


@pytest.fixture
def slow_replay():
    layout = Layout(dp=4, pp=2)
    job = JobModel(layout=layout, costs=compute_bound(layout), iterations=8, num_layers=4)
    fault = Fault(rank=6, kind=FaultKind.COMPUTE, factor=1.4)
    return build_timeline(simulate_trace(job, [fault], 1))


def cost_of_six(replay):
    return ReplayedCosts(lambda: replay).ratio((6,), (Cause.COMPUTE,), (1, 99), slowdown=1.4)


def test_a_replay_tells_nothing_of_a_rank_whose_program_it_did_not_trace(slow_replay):
    replay = replay_of_timeline(slow_replay)
    assert replay.recorded.all() and cost_of_six(replay) > 1.2
    spans = slow_replay.spans
    own = (numbers(spans, "rank") == 6) & equals(spans, "name", "forward")
    kept = pa.array(~(own & (numbers(spans, "microbatch") == 0)))
    object.__setattr__(slow_replay, "spans", spans.filter(kept))
    of_others = replay_of_timeline(slow_replay)
    assert of_others.ranks[~of_others.recorded].tolist() == [6]
    assert cost_of_six(of_others) is None
    assert ReplayedCosts(lambda: of_others).ratio((7,), (Cause.COMPUTE,), (1, 99)) is not None


@pytest.mark.parametrize(("times", "tells"), [(1.0, True), (1.04, True), (1.1, False)])
def test_a_replay_that_is_longer_than_the_step_tells_nothing(slow_replay, times, tells):
    replay = replay_of_timeline(slow_replay)
    longer = replace(replay, measured=replay.traced_s / times)
    assert (cost_of_six(longer) is not None) is tells


@pytest.mark.parametrize("waits", [False, True])
def test_in_passes_that_wait_for_sharded_parameters_a_replay_falls_short(waits):
    """The passes of all others are as long as the slow rank's, and stay so in the replay."""

    class OfPasses(ReplayedCosts):
        def ratio(self, *_: object) -> float:
            return 1.01

    job = JobModel(
        layout=Layout(dp=4), costs=compute_bound(Layout(dp=4)), iterations=8, num_layers=4
    )
    fault = Fault(rank=2, kind=FaultKind.COMPUTE, factor=1.4)
    timeline = build_timeline(simulate_trace(job, [fault], 1))
    seen = replace(
        steady(observe(timeline), DetectorSettings()),
        costs=OfPasses(lambda: replay_of_timeline(timeline)),
        waits_between_layers=waits,
    )
    (finding,) = judge(seen, DetectorSettings()).findings
    assert finding.ranks == (2,) and finding.cost_is_replayed is not waits
    assert finding.step_time_cost_ratio == pytest.approx(1.26 if waits else 1.01, abs=0.03)


@pytest.mark.parametrize(
    ("cause", "axes", "replayed", "short"),
    [
        (Cause.LINK, ("tp",), 1.0, True),
        (Cause.LINK, ("tp",), 1.01, False),  # a replay tells
        (Cause.LINK, (), 1.0, False),  # all waiting was recorded
        (Cause.HOST, ("tp",), 1.0, False),
    ],
)
def test_where_mates_wait_unseen_for_a_slow_link_a_replay_that_gains_nothing_falls_short(
    cause, axes, replayed, short
):
    seen = SimpleNamespace(
        hidden_axes=axes, waits_between_layers=False, entangled_phases=(), splits_tensor_groups=True
    )
    claim = SimpleNamespace(cause=cause, is_in_part=False)
    assert _falls_short(seen, claim, replayed, 1.05) is short


@pytest.mark.parametrize("cause", [Cause.COMPUTE, Cause.HOST, Cause.LOADER, Cause.GC])
def test_where_passes_wait_between_layers_the_larger_figure_counts_of_all_that_is_late(cause):
    seen = SimpleNamespace(hidden_axes=(), waits_between_layers=True)
    claim = SimpleNamespace(cause=cause)
    assert _falls_short(seen, claim, 1.34, 2.66)
    assert not _falls_short(seen, claim, 2.66, 1.34)
    assert not _falls_short(SimpleNamespace(waits_between_layers=False), claim, 1.34, 2.66)


def test_collections_now_and_then_cost_the_job_what_they_cost_it_on_the_mean(job):
    """Rank 5 stands still for 60 ms in 3 of 10 iterations: the job does not lose what these do."""

    def collects(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    late, sound = (
        job(layout=Layout(dp=16), iterations=10, gc_ms=gc_ms) for gc_ms in (collects, lambda _: 0.0)
    )
    seen = [observe(one.timeline()).iteration_ns.mean() for one in (late, sound)]
    (finding,) = late.report().findings
    assert finding.step_time_cost_ratio == pytest.approx(seen[0] / seen[1], abs=0.02)
    assert "without it the job would be" in finding.statement
