"""A slow device is named, alone, with its factor; equal ones are not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.compute import _unsaid
from detect.causes.compute_owner import _is_estimated_in_one
from detect.causes.device import waits_beside
from detect.causes.searches import search_compute
from detect.causes.spells import _finding, _Spell
from detect.detector import IN_ALL_PASSES, ONE_ITERATION, _inquiry, judge
from detect.observe.extract import observe
from detect.observe.spans import SpanIndex, waiting_beside
from detect.observe.warmup import steady
from detect.stats.stretches import Course
from detect.thresholds.statistics import POWER
from megascan.timeline import TIMELINE_SCHEMA
from megascan.topology import Layout

LAYOUTS = {
    "dp2-tp2": Layout(dp=2, tp=2),
    "dp4": Layout(dp=4),
    "tp4": Layout(tp=4),
    "tp2-pp2": Layout(tp=2, pp=2),
    "pp2-dp2": Layout(pp=2, dp=2),
    "tp2-pp2-dp2": Layout(tp=2, pp=2, dp=2),
}


@pytest.mark.parametrize("factor", [1.05, 1.08, 1.2, 1.5])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_names_the_slow_rank_alone(job, slow, layout, factor):
    rank = layout.world_size - 2
    report = job(layout=layout, work=slow(rank, factor), seed=rank).report()
    assert [finding.ranks for finding in report.findings] == [(rank,)]
    finding = report.findings[0]
    # two stages of two ranks show too little of what sound devices differ by
    are_pairs = layout.world_size == 2 * layout.pp
    owner = Owner.UNDECIDED if are_pairs and factor < 1.06 else Owner.NODE
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, owner)
    assert finding.slowdown == pytest.approx(factor, rel=0.02)
    low, high = finding.slowdown_interval
    assert low < finding.slowdown < high
    assert finding.q_value < 0.01


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_healthy_is_silent(job, layout, seed):
    report = job(layout=layout, seed=seed).report()
    assert report.verdict == Verdict.HEALTHY
    assert report.findings == ()


def test_three_at_once(job, slow, together):
    planted = {1: 1.5, 4: 1.1, 6: 1.2}
    effects = together(*(slow(rank, factor) for rank, factor in planted.items()))
    report = job(layout=Layout(dp=4, pp=2), work=effects).report()
    found = {finding.ranks[0]: finding.slowdown for finding in report.findings}
    assert found == {rank: pytest.approx(factor, rel=0.02) for rank, factor in planted.items()}


def test_two_slow_ranks_among_four_peers_do_not_blame_the_sound_ones(job, slow, together):
    effects = together(slow(0, 1.3), slow(1, 1.3))
    report = job(layout=Layout(dp=4), work=effects).report()
    assert sorted(finding.ranks[0] for finding in report.findings) == [0, 1]


def test_below_the_floor_is_not_reported(job, slow):
    quiet = job(layout=Layout(dp=4), work=slow(1, 1.015), noise=0.002)
    assert quiet.report().findings == ()


def test_floor_is_a_setting(job, slow):
    from detect import DetectorSettings

    shown = job(layout=Layout(dp=4), work=slow(1, 1.015), noise=0.002)
    report = shown.report(DetectorSettings(min_slowdown=1.01))
    assert [finding.ranks for finding in report.findings] == [(1,)]


def test_a_position_that_is_slow_in_every_replica_is_the_jobs(job):
    report = job(
        layout=Layout(dp=4, tp=2), work=lambda slot: 1.1 if slot.rank % 2 == 0 else 1.0
    ).report()
    assert not [finding for finding in report.findings if finding.owner == Owner.NODE]


def test_pipeline_alone_compares_transformer_layers_across_stages(job, slow):
    report = job(layout=Layout(pp=4), layers=2, work=slow(2, 1.3)).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.COMPUTE, Owner.UNDECIDED)
    assert any("layers of one kind may be heavier" in sentence for sentence in finding.evidence)


def test_what_changes_inside_the_trace_is_no_heavier_stage(job):
    def since_ten(slot):
        return 1.3 if slot.rank == 2 and slot.iteration >= 10 else 1.0

    finding = job(layout=Layout(pp=4), layers=2, work=since_ten).report().findings[0]
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.COMPUTE, Owner.NODE)


def test_pipeline_alone_without_layers_cannot_be_judged(job, slow):
    report = job(layout=Layout(pp=4)).report()
    assert report.verdict == Verdict.UNDECIDED
    assert report.minimum_detectable_slowdown is None
    assert any("granularity full" in note for note in report.notes)


def test_one_pass_alone_is_not_a_slow_device(job):
    def forward_only(slot):
        return 1.3 if slot.rank == 1 and slot.phase == "forward" else 1.0

    report = job(layout=Layout(dp=4), work=forward_only).report()
    assert [(finding.cause, finding.owner) for finding in report.findings] == [
        (Cause.UNKNOWN, Owner.UNDECIDED)
    ]


def test_cost_is_what_the_suspect_is_above_the_next_busiest(job, slow):
    report = job(layout=Layout(dp=4), work=slow(3, 1.5), noise=0.001).report()
    assert report.findings[0].step_time_cost_ratio == pytest.approx(1.5, rel=0.02)


def test_a_slow_rank_that_hides_behind_a_heavier_stage_costs_nothing(job, slow, together):
    heavy = together(slow(0, 1.1), lambda slot: 2.0 if slot.stage == 1 else 1.0)
    report = job(layout=Layout(dp=4, pp=2), work=heavy).report()
    fault = next(finding for finding in report.findings if finding.cause == Cause.COMPUTE)
    assert fault.step_time_cost_ratio == pytest.approx(1.0, abs=0.002)
    assert "next to nothing" in fault.headline


def test_starved_device_is_the_hosts(job, slow):
    def lead(rank: int) -> int:
        return 1_000 if rank == 2 else 50_000_000

    report = job(layout=Layout(dp=4), work=slow(2, 1.4), launch_lead_ns=lead).report()
    finding = report.findings[0]
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, Owner.NODE)


def test_host_bound_job_is_said_and_nobody_named(job):
    report = job(layout=Layout(dp=4), launch_lead_ns=lambda rank: 1_000).report()
    assert report.verdict == Verdict.UNDECIDED and not report.findings
    assert report.minimum_detectable_slowdown == POWER.blind_ratio
    assert report.limited_by["compute"].startswith("the devices wait for their hosts")
    assert any("host-bound" in note for note in report.notes)


def test_counters_corroborate(job, slow):
    clocks = {rank: {"sm_clock_mhz": 900.0 if rank == 1 else 1410.0} for rank in range(4)}
    report = job(layout=Layout(dp=4), work=slow(1, 1.5), counters=clocks).report()
    assert any("900 against its peers' 1410" in line for line in report.findings[0].evidence)


def test_counters_contradict(job, slow):
    clocks = {rank: {"sm_clock_mhz": 1410.0} for rank in range(4)}
    report = job(layout=Layout(dp=4), work=slow(1, 1.5), counters=clocks).report()
    assert any("equal its peers'" in line for line in report.findings[0].evidence)


@pytest.mark.parametrize("warms_up", [True, False])
def test_the_first_iterations_of_a_run_that_gets_quicker_name_nobody(job, warms_up):
    """Rank 5 takes 1.3 times as long in both; the job takes 1.6 times as long in the first."""

    def work(slot):
        first = 1.6 if warms_up and slot.iteration == 1 else 1.0
        return first * (1.3 if slot.rank == 5 else 1.0)

    report = job(layout=Layout(dp=8), iterations=2, first_iteration=1, work=work).report()
    (finding,) = report.findings
    assert finding.ranks == (5,)
    assert finding.owner == (Owner.UNDECIDED if warms_up else Owner.NODE)


@pytest.mark.parametrize("second", [1.0, 1.5], ids=["settled", "warming up as well"])
def test_iterations_after_those_that_are_slow_for_all_are_enough(job, second):
    def work(slot):
        early = {1: 1.6, 2: second}.get(slot.iteration, 1.0)
        return early * (1.3 if slot.rank == 5 else 1.0)

    made = job(layout=Layout(dp=8), iterations=3, first_iteration=1, work=work)
    (finding,) = made.report().findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.NODE)
    judged = steady(observe(made.timeline()), DetectorSettings()).iterations.tolist()
    assert judged == ([2, 3] if second == 1.0 else [1, 2, 3])
    assert (IN_ALL_PASSES in finding.evidence) is (second > 1.0)


def test_eight_slow_ranks_are_found_in_a_short_window(job, together, slow):
    """Each of a host's ranks looks usual as long as the other seven are among its peers."""
    hot = together(*(slow(rank, 1.4) for rank in range(8, 16)))
    short = job(layout=Layout(tp=8, dp=4), iterations=3, microbatches=2, noise=0.01, work=hot)
    found = search_compute(_inquiry(observe(short.timeline()), DetectorSettings()))
    assert np.flatnonzero(found.slow_rows).tolist() == list(range(8, 16))


@pytest.mark.parametrize(
    ("factor", "device", "is_told"),
    [(1.3, "cuda", True), (1.05, "cuda", False), (1.0, "cuda", False), (1.3, "cpu", False)],
)
def test_one_iteration_tells_who_is_far_slower(job, slow, factor, device, is_told):
    report = job(
        layout=Layout(dp=8), work=slow(5, factor), iterations=1, device=device
    ).report()  # fmt: skip
    found = [(one.ranks, one.cause, one.owner) for one in report.findings]
    assert found == ([((5,), Cause.COMPUTE, Owner.NODE)] if is_told else [])
    assert report.verdict == (Verdict.DEGRADED if is_told else Verdict.UNDECIDED)


@pytest.mark.parametrize(
    ("is_slow", "owner"),
    [
        (lambda slot: slot.microbatch < 5 and slot.name != "optimizer", Owner.UNDECIDED),
        (lambda slot: slot.name != "optimizer", Owner.UNDECIDED),
        (lambda slot: True, Owner.NODE),
    ],
    ids=["in most passes", "not in its optimizer step", "in all"],
)
def test_one_iteration_names_who_is_slow_in_all_that_it_does(job, is_slow, owner):
    """Passes alone may have longer documents; what a rank compiles lengthens some of them."""
    report = job(
        layout=Layout(dp=8), iterations=1,
        work=lambda slot: 1.3 if slot.rank == 5 and is_slow(slot) else 1.0,
    ).report()  # fmt: skip
    assert [(one.ranks, one.owner) for one in report.findings] == [((5,), owner)]


@pytest.mark.parametrize(("others", "named"), [(0.2, [(5,)]), (0.9, [])])
def test_one_iteration_names_whose_host_is_late_in_all_that_it_does(job, slow, others, named):
    """Rank 5's work comes just in time; where that of others does as well, the job's hosts do."""
    seen = observe(job(layout=Layout(dp=8), iterations=1, work=slow(5, 1.2)).timeline())
    starved = np.full(seen.busy_ns.shape, others)
    starved[5] = 1.0
    report = judge(replace(seen, starved_share=starved), DetectorSettings())
    found = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert found == named and all(one.cause is Cause.HOST for one in report.findings)


def test_who_is_slow_in_one_iteration_is_told_which(job):
    """Iteration 1 takes each rank another time to compile."""

    def work(slot):
        compiles = 2.0 + slot.rank if slot.iteration == 1 else 1.0
        return compiles * (1.3 if slot.rank == 5 else 1.0)

    made = job(layout=Layout(dp=8), work=work, iterations=2, first_iteration=1)
    (finding,) = made.report().findings
    assert "in iteration 2;" in finding.headline and ONE_ITERATION in finding.evidence


@pytest.mark.parametrize(
    ("by_phase", "optimizer", "is_estimated"),
    [
        ((np.nan, 2.0), 0.001, True),
        ((np.nan, 2.0), 1.5, False),  # the optimizer, which waits for nobody, is slow as well
        ((0.0, 2.0), 0.001, False),  # known in both: `_one_sided` looks at that
        ((2.0, np.nan), 0.001, False),  # forward is no estimate here
    ],
)
def test_one_estimated_pass_with_a_quick_optimizer_tells_nothing(by_phase, optimizer, is_estimated):
    """Backward 7.8 times as long on a mate of a slow NVLink, its forward unknown."""
    seen = SimpleNamespace(entangled_phases=(1,))
    suspect = SimpleNamespace(course=SimpleNamespace(effect=2.0))
    slow = SimpleNamespace(by_phase=by_phase, optimizer=optimizer, suspect=suspect)
    assert _is_estimated_in_one(seen, slow) is is_estimated


@pytest.mark.parametrize(
    ("beside_ms", "is_profile", "waits"),
    [(80.0, True, True), (20.0, True, False), (80.0, False, False)],
    ids=["longer than it is slow", "shorter", "as long as its peers', in rank files"],
)
def test_kernels_of_a_profile_may_be_slow_beside_collectives_that_wait(
    job, beside_ms, is_profile, waits
):
    """Rank 1 takes 1.3 times the time of its peers; of 240 ms of work that is 55."""
    seen = observe(job(layout=Layout(dp=4)).timeline())
    shape = seen.busy_ns.shape
    told = replace(
        seen,
        tells_passes=not is_profile,
        busy_ns=np.full(shape, 240e6),
        beside_ns=np.full(shape, beside_ms * 1e6),
    )
    course = Course.of(np.ones(shape[1], dtype=bool), float(np.log(1.3)), 0.01)
    own = np.arange(4) == 1
    why = waits_beside(told, own, ~own, course.active, course.effect)
    assert ("80 ms an iteration" in why) == waits and bool(why) == waits


@pytest.mark.parametrize(
    ("beside_ms", "waits"), [(80.0, True), (35.0, False)], ids=["longer than it is slow", "shorter"]
)
def test_passes_may_be_slow_beside_collectives_that_wait_longer_than_peers(job, beside_ms, waits):
    """Rank 1 takes 1.3 times the time of its peers, 55 of 240 ms; its collectives wait beside its
    passes, those of its peers for 15 ms.
    """
    seen = observe(job(layout=Layout(dp=4)).timeline())
    shape = seen.busy_ns.shape
    beside_ns = np.full(shape, 15e6)
    beside_ns[1] = beside_ms * 1e6
    told = replace(seen, busy_ns=np.full(shape, 240e6), beside_ns=beside_ns)
    own, active = np.arange(4) == 1, np.ones(shape[1], dtype=bool)
    assert bool(waits_beside(told, own, ~own, active, float(np.log(1.3)))) is waits


@pytest.mark.parametrize(("beside_ms", "owner"), [(30.0, Owner.UNDECIDED), (5.0, Owner.NODE)])
def test_a_rank_that_comes_last_from_some_iteration_on_was_not_slow_before(job, beside_ms, owner):
    """Its kernels take 1.25 times as long in two of six iterations, in which its collectives wait
    beside them; in the others it is the last, and waits for nobody.
    """
    seen = observe(job(layout=Layout(dp=4), iterations=6).timeline())
    shape, active = seen.busy_ns.shape, np.arange(6) < 2
    told = replace(
        seen,
        tells_passes=False,
        busy_ns=np.full(shape, 80e6),
        beside_ns=np.where(active, beside_ms * 1e6, 0.0) * np.ones(shape),
    )
    spell = _Spell(
        row=3, active=active, effect=float(np.log(1.25)), error=0.01, optimizer=0.0,
        optimizer_noise=0.0, q_value=1e-4,
    )  # fmt: skip
    finding = _finding(told, spell)
    assert finding.owner is owner
    assert "in 2 of 6 iterations the same kernels take 1.25x the time" in finding.evidence[0]


@pytest.mark.parametrize(
    ("models", "slower", "owner"),
    [
        (("H100", "A100"), {}, Owner.JOB),
        (("H100", "H100"), {}, Owner.NODE),
        (("H100", ""), {}, Owner.NODE),
        (("H100", "A100"), {6: 1.5}, Owner.NODE),
    ],
    ids=["others", "the same", "not known", "slower than others of its model"],
)
def test_gpus_of_another_model_are_the_choice_of_whoever_placed_the_job(job, models, slower, owner):
    """Ranks 5 to 7 take 1.2 times as long; in the last case rank 6 takes 1.8 times."""

    def work(slot):
        return 1.2 * slower.get(slot.rank, 1.0) if slot.rank > 4 else 1.0

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    devices = tuple(models[rank > 4] for rank in range(8))
    told = replace(seen, members=replace(seen.members, devices=devices))
    owners = {one.ranks[0]: one.owner for one in judge(told, DetectorSettings()).findings}
    assert owners[6] is owner
    if owner is Owner.JOB:
        assert set(owners.values()) == {Owner.JOB}


@pytest.mark.parametrize(
    ("kind", "track", "beside_ms"),
    [("collective", 4, 7.0), ("p2p", 4, 0.0), ("collective", 2, 0.0)],
    ids=["overlapped", "a message", "nothing beside it"],
)
def test_computing_beside_a_collective_that_waits_is_measured(job, kind, track, beside_ms):
    """Rank 0's collectives wait for 5 ms from the begin of its backward pass on, and for 2 ms
    shortly before its end.
    """
    timeline = job(layout=Layout(dp=2), iterations=1, microbatches=1, noise=0.0).timeline()
    spans = timeline.spans.filter(pc.equal(timeline.spans["rank"], 0))
    (backward,) = spans.filter(pc.equal(spans["phase"], "backward")).to_pylist()
    end_ns = backward["start_ns"] + backward["duration_ns"]
    rows = [
        {"start_ns": end_ns - 3_000_000, "duration_ns": 20_000_000, "wait_ns": 2_000_000},
        {"start_ns": backward["start_ns"], "duration_ns": 9_000_000, "wait_ns": 5_000_000},
    ]
    row = dict.fromkeys(timeline.spans.column_names, -1) | {
        name: "" for name, kind_of in zip(timeline.spans.column_names, TIMELINE_SCHEMA.types,
                                          strict=True) if pa.types.is_dictionary(kind_of)
    }  # fmt: skip
    row |= {"rank": 0, "kind": kind, "name": "all_gather", "op": "all_gather", "group": "dp@0",
            "track": track, "iteration": backward["iteration"], "match": 1}  # fmt: skip
    added = pa.Table.from_pylist([row | one for one in rows])
    added = added.select(timeline.spans.column_names).cast(TIMELINE_SCHEMA)
    whole = pa.concat_tables([timeline.spans, added]).unify_dictionaries().combine_chunks()
    found = waiting_beside(SpanIndex.of(replace(timeline, spans=whole)))
    assert found[:, 0].tolist() == [pytest.approx(beside_ms * 1e6), 0.0]


@pytest.mark.parametrize(("slowdown", "unsaid"), [(1.004, True), (1.2, False)])
def test_a_stage_that_is_too_little_slow_for_a_word_may_have_bursts(slowdown, unsaid):
    """What is slow, and said to be, is left out where bursts are searched."""
    course = Course.of(np.ones(8, dtype=bool), float(np.log(slowdown)), 0.001)
    suspect = SimpleNamespace(row=1, course=course, q_value=1e-12)
    slow = SimpleNamespace(across_stages=True, suspect=suspect)
    assert _unsaid([SimpleNamespace(slow=slow, row=1)], 2).tolist() == [False, unsaid]
