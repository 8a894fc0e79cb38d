"""The ground of a fleet: what is claimed of a case is so, and its files are those of a tracer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.fleet import cases, slowness, write, write_varied
from benchmarks.grounds.fleet.engine import Exchange
from benchmarks.grounds.fleet.files import write_files
from benchmarks.grounds.fleet.hardware import Network, Trouble, host_clocks
from benchmarks.grounds.fleet.jobs import CPU, Job, kernels_of, taken
from benchmarks.grounds.fleet.scenario import (
    indistinguishable_by_link,
    indistinguishable_hosts,
)
from benchmarks.grounds.fleet.trainer import Run
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.kinds import EXPERTS
from benchmarks.grounds.outcome import judge_case
from megascan.reader import read_trace

QUIET = Job(
    layers=("dense",) * 2, num_microbatches=2, num_traced=3, first_traced=5, noise=0.001,
    chip_spread=0.001, host_jitter=0.01,
)  # fmt: skip


def run_of(job, *troubles):
    return Run(job, 5, troubles, recorded=True)


def mean_ms(run, rank, *names, group=""):
    spans = [span for window in run.ranks[rank].spans for span in window]
    return float(
        np.mean(
            [
                (span.end - span.start) / 1e6
                for span in spans
                if span.name in names and str(span.args.get("group", "")).startswith(group)
            ]
        )
    )


def step_ms(run):
    return run.iteration_times().mean() / 1e6


@pytest.mark.parametrize(
    "job",
    [
        replace(QUIET, tp=2, pp=2, vpp=2, dp=2, layers=("dense",) * 4),
        replace(QUIET, pp=4, layers=("dense",) * 4, num_microbatches=6, overlap=False),
        replace(QUIET, dp=4, ep=2, layers=("moe",), recompute=True, sequence_parallel=False),
    ],
)
def test_files_are_read_without_complaint(job, tmp_path):
    write_files(run_of(job), 3, tmp_path / "traces")
    timeline = build_timeline(read_trace(tmp_path / "traces"))
    spans = timeline.spans.to_pandas()
    assert set(spans["rank"]) == set(range(job.num_ranks))
    talks = spans["kind"].isin(("collective", "p2p")) & (spans["op"] != "broadcast")
    assert talks.any() and (spans.loc[talks, "match"] >= 0).all()


def test_what_was_planted_is_what_was_listed(tmp_path):
    case = next(case for case in cases(9) if case.family == "cpu job")
    planted = write(case, tmp_path)
    assert planted[0].cost_ratio > 1.05
    unpriced = [replace(each, cost_ratio=1.0, held_cost_ratio=1.0) for each in planted]
    assert unpriced == list(case.planted)


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases() if case.family == "cpu job")
    assert write(case, tmp_path / "once") == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_missing_ranks_leave_no_file_and_others_are_judged(tmp_path):
    case = next(case for case in cases() if case.family == "healthy: missing ranks")
    planted = write(case, tmp_path)
    assert len(list(tmp_path.iterdir())) == case.num_ranks - 1
    assert not judge_case(case, planted, tmp_path, with_baselines=False).error


def test_spans_of_compute_nest_within_their_pass():
    run = run_of(replace(QUIET, tp=2, pp=2, vpp=2, layers=("dense",) * 4))
    for window in run.ranks[3].spans:
        passes = [s for s in window if s.name in ("forward", "backward")]
        inner = [s for s in window if s.name.startswith(("attention", "mlp", "transformer_layer"))]
        for span in inner:
            assert any(p.start <= span.start and span.end <= p.end for p in passes)
    assert len([s for s in window if s.name == "forward"]) == 4  # microbatches times chunks


def test_mates_wait_for_the_slow_gpu():
    job = replace(QUIET, tp=2, dp=2)
    run = run_of(job, Trouble(kind="gpu_clock", ranks=(3,), factor=1.5))
    mate, culprit, other = (
        mean_ms(run, rank, "all_gather", "reduce_scatter", group="tp") for rank in (2, 3, 0)
    )
    assert mate > 1.5 * culprit and mate > 1.5 * other
    assert 1.3 < step_ms(run) / step_ms(run_of(job)) < 1.5


def test_slow_memory_leaves_products_alone():
    job = Job(sequence=4096)
    fast, slow_memory, slow_clock = (
        taken(kernels_of(job, "mlp", 1.0), *each) for each in ((1, 1), (1, 2), (2, 1))
    )
    assert fast < slow_memory < 1.3 * fast
    assert 1.6 * fast < slow_clock < 2 * fast


def test_attention_grows_with_the_square_of_a_length():
    job = replace(QUIET, packed=True)
    mlp = [taken(kernels_of(job, "mlp", length), 1, 1) for length in (1.0, 2.0)]
    attention = [taken(kernels_of(job, "attention", length), 1, 1) for length in (1.0, 2.0)]
    assert mlp[0] == mlp[1] and attention[1] > 1.2 * attention[0]


def test_a_slow_host_costs_what_its_launches_take():
    job = replace(QUIET, dp=2, ranks_per_host=1)
    trouble = Trouble(kind="host_cpu", ranks=(1,), factor=6.0)
    for hidden, least, most in ((4096, 0.99, 1.1), (512, 1.5, 6.0)):
        sized = replace(job, hidden=hidden, sequence=2048)
        assert least < step_ms(run_of(sized, trouble)) / step_ms(run_of(sized)) < most


def test_a_loader_that_keeps_up_costs_nothing():
    job = replace(QUIET, dp=2, num_microbatches=4)
    sound = step_ms(run_of(job))
    for factor, dear in ((1.05, False), (20.0, True)):
        slow = step_ms(run_of(job, Trouble(kind="loader", ranks=(0,), factor=factor)))
        assert bool(slow > 1.2 * sound) is dear


def test_a_slow_nic_delays_what_goes_through_it():
    job = replace(QUIET, tp=2, dp=2, ranks_per_host=2, overlap=False)
    trouble = Trouble(kind="nic", ranks=(1,), factor=4.0)
    run, sound = run_of(job, trouble), run_of(job)
    slow, other = (mean_ms(run, rank, "reduce_scatter", group="dp_cp") for rank in (1, 0))
    assert slow > 2.5 * other
    assert other == pytest.approx(mean_ms(sound, 0, "reduce_scatter", group="dp_cp"), rel=0.05)


def test_a_nic_sends_and_receives_at_the_same_time():
    def takes(*pairs):
        exchange = Exchange(replace(QUIET, pp=3, ranks_per_host=1), 0)
        meetings = [
            exchange.join(
                (pair,), pair, "message", size=1e8, arrival=0.0, demand=1.0
            ) for pair in pairs for _ in pair
        ]  # fmt: skip
        exchange.let(())
        return max(meeting.end for meeting in meetings)

    assert takes((0, 1), (1, 0)) == pytest.approx(takes((0, 1)), rel=0.1)
    assert takes((0, 1), (2, 1)) > 1.8 * takes((0, 1))


@pytest.mark.parametrize(
    ("kind", "reasons", "is_hot"), [("hot_host", 0x40, True), ("power_brake", 0x80, False)]
)
def test_what_holds_a_clock_down_is_read(tmp_path, kind, reasons, is_hot):
    job = replace(QUIET, dp=2, granularity="base")
    write_files(run_of(job, Trouble(kind=kind, ranks=(1,), factor=1.5)), 3, tmp_path)
    windows = read_trace(tmp_path).windows
    held, free = (windows[rank][0].counters for rank in (1, 0))
    assert (held["clock_event_reasons"], free["clock_event_reasons"]) == (reasons, 0.0)
    assert held["sm_clock_mhz"] < 0.8 * free["sm_clock_mhz"]
    assert (held["temperature_c"] > 75) is is_hot


def test_flows_share_what_both_go_through():
    network, ends = Network(), {}
    network.start(0.0, [(1, 10.0)], lambda time: ends.setdefault("one", time))
    network.start(5.0, [(1, 10.0), (2, 2.0)], lambda time: ends.setdefault("two", time))
    network.start(100.0, [(1, 10.0)], lambda time: ends.setdefault("three", time))
    while network.advance():
        pass
    assert ends == {"one": 15.0, "two": 20.0, "three": 110.0}


@pytest.mark.parametrize(
    ("trouble", "held"),
    [
        (Trouble(kind="", ranks=(), factor=2, first_iteration=3), (0, 0, 1, 1, 1, 1)),
        (Trouble(kind="", ranks=(), factor=2, last_iteration=2), (1, 1, 0, 0, 0, 0)),
        (Trouble(kind="", ranks=(), factor=2, on_iterations=1, of_iterations=3),
         (1, 0, 0, 1, 0, 0)),
    ],
)  # fmt: skip
def test_troubles_hold_when_they_say(trouble, held):
    assert tuple(trouble.strength(each, 0.0) == 2 for each in range(1, 7)) == held


def test_troubles_ramp_up_burst_and_take_turns():
    ramp = Trouble(kind="", ranks=(), factor=3, ramp_iterations=4)
    assert [ramp.strength(each, 0) for each in (1, 2, 4, 9)] == [1.5, 2.0, 3.0, 3.0]
    burst = Trouble(kind="", ranks=(), factor=3, period_ns=1000, share=0.3)
    hit = np.mean([burst.strength(1, time) > 1 for time in range(100_000)])
    assert hit == pytest.approx(0.3, abs=0.01)
    turns = [Trouble(kind="", ranks=(), factor=3, turn=turn, turns=4) for turn in range(4)]
    assert all(sum(t.strength(each, 0) > 1 for t in turns) == 1 for each in range(1, 20))


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (Job(tp=2), (0, 1)),  # one link, whose ends nothing tells apart
        (Job(tp=2, dp=2), (1,)),
        (Job(pp=4), (1,)),
    ],
)
def test_ranks_that_share_all_slow_links_may_be_named(job, named):
    assert indistinguishable_by_link(job, (1,), remote=False) == named


def test_two_hosts_have_one_path():
    two, three = Job(dp=4, ranks_per_host=2), Job(pp=3, ranks_per_host=1)
    assert indistinguishable_hosts(two, (0, 1)) == (0, 1, 2, 3)
    assert indistinguishable_hosts(three, (1,)) == (1,)


def test_clocks_are_corrected_slowly():
    clocks = [clock for seed in range(20) for clock in host_clocks(Job(dp=8), seed)]
    corrected = [clock for clock in clocks if clock.correction_ns]
    assert 0 < len(corrected) < len(clocks) / 2
    for clock in corrected:
        at = clock.corrected_at_ns
        gained = clock.shown(at + 1e6) - clock.shown(at) - 1e6 * (1 + clock.drift_ppm * 1e-6)
        assert abs(gained) <= 501


def test_a_varied_job_has_the_slow_gpu_that_was_asked_for(tmp_path):
    case = next(case for case in cases() if case.family == "healthy" and case.num_ranks == 4)
    sound = write_varied(case, Variation(), None)
    slow = write_varied(case, Variation(slow_rank=1, factor=1.5), tmp_path)
    assert slow[1].sum() > 1.3 * sound[1].sum()
    assert slow[0].sum() == pytest.approx(sound[0].sum(), rel=0.02)
    assert slowness(case).shape == sound.shape


def test_a_job_on_cores_waits_where_it_computes():
    job = replace(QUIET, dp=2, chip=CPU, hidden=64, sequence=64, vocabulary=500, loader_ms=0.1)
    run = run_of(job)
    spans = [span for window in run.ranks[0].spans for span in window]
    assert all("launch_ns" not in span.args for span in spans)
    assert all(span.args["cpu_ns"] >= 0 for span in spans if span.track != 4)


def kinds_of(folder, job):
    """Return the kinds of each rank's layers: the same in all windows, of the layers in spans."""
    write_files(run_of(job), 3, folder)
    trace = read_trace(folder)
    spans = trace.spans.to_pandas()
    for rank, own in trace.windows.items():
        assert all(window.kinds == own[0].kinds for window in own)
        seen = set(spans["layer"][(spans["rank"] == rank) & (spans["layer"] > 0)])
        if own[0].kinds and job.granularity == "full":
            assert seen == {layer for numbers in own[0].kinds.values() for layer in numbers}
    return [trace.windows[rank][0].kinds for rank in range(job.num_ranks)]


@pytest.mark.parametrize("granularity", ["full", "base"])
def test_all_layers_of_an_even_model_are_of_one_kind(tmp_path, granularity):
    job = replace(QUIET, tp=2, pp=2, vpp=2, layers=("dense",) * 4, granularity=granularity)
    kinds = kinds_of(tmp_path, job)
    (kind,) = kinds[0]
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert kinds == [{kind: (1, 3)}] * 2 + [{kind: (2, 4)}] * 2


def test_more_layers_and_more_words_make_no_other_kind(tmp_path):
    job = replace(QUIET, pp=2, layers=("dense",) * 4, split=(1, 3), vocabulary=256_000)
    first, last = kinds_of(tmp_path, job)
    assert list(first) == list(last)
    assert [*first.values(), *last.values()] == [(1,), (2, 3, 4)]


def test_dense_layers_have_a_digest_and_those_with_experts_none(tmp_path):
    layers = ("dense", "moe", "moe")
    job = replace(QUIET, dp=2, ep=2, layers=layers, sequence_parallel=False)
    one, other = kinds_of(tmp_path, job)
    (kind,) = one.keys() - {EXPERTS}
    assert one == other == {kind: (1,), EXPERTS: (2, 3)}


def test_nothing_is_known_of_a_hybrid_model(tmp_path):
    assert kinds_of(tmp_path, replace(QUIET, pp=2, layers=("mamba", "dense"))) == [{}] * 2
    assert not any("kinds" in path.read_text() for path in tmp_path.iterdir())
