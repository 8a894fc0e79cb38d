"""Short and noisy windows: who is three times slower is named, and for whom all wait is no health.

The first tests write rank files of four ranks that only mark iterations and all-reduces, as a
trainer does that traces its communication alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Finding, Owner, Report, Verdict, detect
from detect.causes.awaited import AWAITED
from detect.causes.finding import OTHERS_WAIT, Inquiry
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.launches import Pauses
from detect.observe.warmup import steady
from detect.text import render_text
from megascan.reader import read_trace
from megascan.topology import Layout

MS = 1000.0  # µs, the unit of rank files
RANKS, ITERATIONS = 4, 6
TP2_DP2 = Layout(tp=2, dp=2)


def rank_file(rank: int, busy_ms: Mapping[int, float], folder: Path, pp: int) -> None:
    """One rank that is busy for `busy_ms` of each iteration, and then reduces with the others."""
    header = {
        "schema": 1, "run_id": "test", "rank": rank, "world_size": RANKS,
        "layout": {"tp": 1, "cp": 1, "ep": 1, "dp": RANKS // pp, "pp": pp, "vpp": 1, "etp": 1,
                   "order": "tp-cp-ep-dp-pp"},
        "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": rank % (RANKS // pp),
                        "pp": rank // (RANKS // pp)},
        "groups": {"dp@0": list(range(RANKS))}, "host": "n0", "process_id": 1,
        "device": {"kind": "cpu", "name": "cpu", "index": 0, "uuid": ""}, "backend": "gloo",
        "clock": {"domain": "n0", "source": "monotonic", "origin_unix_ns": 0},
        "trace": {"granularity": "full", "interval": 1, "window": ITERATIONS, "compress": False,
                  "max_bytes": 0, "budget_ratio": 0.0},
        "versions": {}, "num_windows_dropped": 0, "last_iteration_dropped": 0,
    }  # fmt: skip
    lines = [{"name": "megascan", "ph": "M", "pid": rank, "tid": 0, "args": header}]
    for number in range(ITERATIONS):
        begin, iteration = 200 * MS * number, number + 3
        arrives, leaves = begin + busy_ms[rank] * MS, begin + 105 * MS
        lines += [
            {"name": "iteration", "cat": "iteration", "ph": "X", "ts": begin, "dur": 106 * MS,
             "pid": rank, "tid": 0, "args": {"iteration": iteration}},
            {"name": "all_reduce", "cat": "collective", "ph": "X", "ts": arrives,
             "dur": leaves - arrives, "pid": rank, "tid": 1,
             "args": {"iteration": iteration, "op": "all_reduce", "group": "dp@0",
                      "sequence": number}},
        ]  # fmt: skip
    window = {
        "run_id": "test", "window": 0, "first_iteration": 3, "last_iteration": 2 + ITERATIONS,
        "num_spans": len(lines) - 1, "num_dropped": 0, "granularity": "full", "interval": 1,
    }  # fmt: skip
    lines.append({"name": "megascan_window", "ph": "M", "pid": rank, "tid": 0, "args": window})
    (folder / f"benchmark-data-{rank}-pipeline-0-tensor-0.json").write_text(json.dumps(lines))


def report_of(busy_ms: Mapping[int, float], folder: Path, pp: int = 2) -> Report:
    for rank in range(RANKS):
        rank_file(rank, busy_ms, folder, pp)
    return detect(build_timeline(read_trace(folder)))


def test_the_rank_for_whom_all_wait_is_suspected_without_any_passes(tmp_path):
    report = report_of({0: 48.0, 1: 53.0, 2: 72.0, 3: 100.0}, tmp_path)
    (finding,) = report.findings
    assert report.verdict == Verdict.UNDECIDED
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.UNKNOWN, Owner.UNDECIDED)
    assert "all others wait for it" in finding.headline
    assert any("wait for 26% to 49% of an iteration" in sentence for sentence in finding.evidence)
    assert any("decides" in step for step in finding.next_steps)


@pytest.mark.parametrize(
    ("busiest", "stopped_ms", "cause"),
    [(2, [30.0] * 6, Cause.HOST), (2, [30.0, 50.0, 30.0, 22.0, 50.0, 30.0], Cause.HOST),
     (2, [60.0, 30.0, 60.0, 60.0, 30.0, 0.0], Cause.UNKNOWN),
     (2, [3.0] * 6, Cause.UNKNOWN), (3, [30.0] * 6, Cause.UNKNOWN)],
    ids=["in all iterations", "more and less", "a collection in most", "too little",
         "who may log for all"],
)  # fmt: skip
def test_a_host_that_stops_between_launches_is_why_all_wait(tmp_path, busiest, stopped_ms, cause):
    for rank in range(RANKS):
        rank_file(rank, {0: 50.0, 1: 53.0, 2: 60.0, 3: 60.0} | {busiest: 100.0}, tmp_path, pp=2)
    settings = DetectorSettings()
    seen = steady(observe(build_timeline(read_trace(tmp_path))), settings)
    stopped_ns = np.zeros((RANKS, ITERATIONS))
    stopped_ns[busiest] = np.array(stopped_ms) * 1e6
    (finding,) = judge(replace(seen, stopped_ns=stopped_ns), settings).findings
    assert (finding.ranks, finding.cause) == ((busiest,), cause)
    assert (finding.owner is Owner.NODE) == (cause is Cause.HOST)
    assert ("undecided why" in finding.headline) == (cause is Cause.UNKNOWN)
    assert any("stopped between launches for 30 ms" in one for one in finding.evidence) == (
        cause is Cause.HOST
    )


@pytest.mark.parametrize(
    ("ending_ms", "is_said", "does"),
    [(30.0, True, "stands still for 30 ms at the end of each 106 ms iteration"),
     (8.0, True, "waits for 0% of an iteration"), (1.0, False, "waits for 0% of an iteration")],
)  # fmt: skip
def test_what_the_awaited_rank_does_at_the_end_is_said(tmp_path, ending_ms, is_said, does):
    """Nobody knows whether that is a slow disk or the loop's own doing: it stays undecided."""
    for rank in range(RANKS):
        rank_file(rank, {0: 50.0, 1: 53.0, 2: 100.0, 3: 60.0}, tmp_path, pp=2)
    settings = DetectorSettings()
    seen = steady(observe(build_timeline(read_trace(tmp_path))), settings)
    ending_ns = np.zeros((RANKS, ITERATIONS))
    ending_ns[2] = ending_ms * 1e6
    (finding,) = judge(replace(seen, ending_ns=ending_ns), settings).findings
    assert (finding.ranks, finding.owner) == ((2,), Owner.UNDECIDED)
    words = f"at the end of an iteration it stands still for {ending_ms:.0f} ms"
    assert any(words in one for one in finding.evidence) == is_said
    assert does in finding.headline
    assert any("py-spy" in one for one in finding.next_steps) == does.startswith("stands")


def awaited_on_gpus(folder: Path, **changes: object) -> Finding:
    """What is said of rank 2, which takes 45 ms longer than its peer, on GPUs that tell more."""
    for rank in range(RANKS):
        rank_file(rank, {0: 50.0, 1: 53.0, 2: 100.0, 3: 55.0}, folder, pp=2)
    settings = DetectorSettings()
    seen = steady(observe(build_timeline(read_trace(folder))), settings)
    members = replace(seen.members, device_kind="cuda")
    (finding,) = judge(replace(seen, members=members, **changes), settings).findings
    assert (finding.ranks, finding.owner) == ((2,), Owner.UNDECIDED)
    return finding


def of_rank_2(time_ms: float, others_ms: float = 0.0) -> np.ndarray:
    time_ns = np.full((RANKS, ITERATIONS), others_ms * 1e6)
    time_ns[2] = time_ms * 1e6
    return time_ns


@pytest.mark.parametrize(
    ("gap_ms", "stalled_ms", "opening_ms", "does"),
    [
        (40.0, 0.0, 0.0, "stands still between its operations for 40 ms of each 106 ms iteration"),
        (40.0, 0.0, 35.0, "stands still for 35 ms at the begin of each 106 ms iteration"),
        (1.0, 30.0, 0.0, "stands still inside its passes for 30 ms of each 106 ms iteration"),
        (15.0, 15.0, 0.0, "stands still for 30 ms of each 106 ms iteration"),
        (5.0, 5.0, 0.0, "waits for 0% of an iteration, its only peer for 42%"),
    ],
    ids=["between operations", "at the begin", "inside passes", "here and there", "unknown"],
)
def test_a_rank_that_stands_still_is_not_called_busy(
    tmp_path, gap_ms, stalled_ms, opening_ms, does
):
    nothing = of_rank_2(0.0)
    pauses = Pauses(
        opening_ns=of_rank_2(opening_ms), idle_opening_ns=of_rank_2(opening_ms),
        between_ns=nothing, idle_between_ns=nothing,
    )  # fmt: skip
    finding = awaited_on_gpus(
        tmp_path, host_gap_ns=of_rank_2(gap_ms), stalled_ns=of_rank_2(stalled_ms), pauses=pauses,
        lost_ns={Cause.HOST: nothing},
    )  # fmt: skip
    assert does in finding.headline and "all others wait for it" in finding.headline
    assert "is busy" not in finding.headline


def test_a_rank_that_computes_for_longer_is_busy(tmp_path):
    finding = awaited_on_gpus(tmp_path, busy_ns=of_rank_2(90.0, 50.0))
    assert "is busy for 100% of an iteration, its only peer for 58%" in finding.headline
    assert "it computes for 90 ms of an iteration of 106 ms, its only peer for 50 ms" in (
        finding.evidence
    )


@pytest.mark.parametrize("tells_passes", [True, False])
def test_advice_for_a_profile_names_no_option_of_tracing(tmp_path, tells_passes):
    advice = " ".join(awaited_on_gpus(tmp_path, tells_passes=tells_passes).next_steps)
    assert ("--continuous-trace-iterations" in advice) == tells_passes
    assert ("granularity full" in advice) == tells_passes
    assert ("torch.profiler.schedule" in advice) != tells_passes


@pytest.mark.parametrize("busy_ms", [{rank: 95.0 + rank for rank in range(4)},
                                     {0: 60.0, 1: 60.0, 2: 98.0, 3: 100.0}])  # fmt: skip
def test_nobody_is_suspected_where_two_are_as_busy(tmp_path, busy_ms):
    assert not report_of(busy_ms, tmp_path).findings


def test_without_passes_silence_is_no_health(tmp_path):
    report = report_of(dict.fromkeys(range(4), 95.0), tmp_path)
    assert report.verdict == Verdict.UNDECIDED
    assert any("no forward and backward passes" in note for note in report.notes)


def test_what_lies_between_communications_is_compared_where_no_passes_are_marked(tmp_path):
    busy_ms = {0: 60.0, 1: 60.2, 2: 60.1, 3: 90.0}
    (finding,) = report_of(busy_ms, tmp_path, pp=1).findings
    assert (finding.ranks, finding.cause) == ((3,), Cause.COMPUTE)
    assert finding.slowdown == pytest.approx(1.5, rel=0.02)


def wandering(seed: int, sigma: float):
    """Slows each rank's iterations by noise that repeats itself, as neighbours on its cores do."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((4, ITERATIONS))
    for number in range(1, ITERATIONS):
        noise[:, number] = 0.8 * noise[:, number - 1] + 0.6 * noise[:, number]
    return lambda slot: float(np.exp(sigma * noise[slot.rank, slot.iteration - 3]))


@pytest.mark.parametrize("seed", range(6))
def test_three_times_slower_in_six_noisy_iterations_is_named(job, slow, together, seed):
    """A t law of three sound ranks had one degree of freedom: q 0.02, and HEALTHY."""
    noisy = job(layout=TP2_DP2, iterations=ITERATIONS, seed=seed, device="cpu", noise=0.1)
    report = noisy.but(work=together(slow(3, 3.0), wandering(seed, 0.08))).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((3,), Owner.NODE)]
    assert report.findings[0].slowdown == pytest.approx(3.0, rel=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_noise_alone_names_nobody(job, seed):
    noisy = job(layout=TP2_DP2, iterations=ITERATIONS, seed=seed, device="cpu", noise=0.1)
    assert noisy.but(work=wandering(seed, 0.08)).report().verdict != Verdict.DEGRADED


@pytest.mark.parametrize("iterations", [2, 3])
def test_three_times_slower_in_a_window_of_two_iterations_is_named(job, slow, iterations):
    short = job(layout=Layout(dp=8), iterations=iterations)
    assert not short.report().findings
    report = short.but(work=slow(5, 3.0)).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((5,), Owner.NODE)]


def test_a_window_that_shows_nothing_below_a_factor_says_so_and_claims_no_health(job):
    loud = job(layout=TP2_DP2, iterations=4, device="cpu", noise=0.02)
    report = loud.but(work=wandering(1, 1.2)).report()
    text = render_text(report)
    assert report.verdict != Verdict.HEALTHY
    assert "can be seen here: " in text
    assert not any(len(word) > 4 and word.isdigit() for word in text.split())


@pytest.mark.parametrize(
    ("cause", "owner", "is_said"),
    [(Cause.COMPUTE, Owner.UNDECIDED, True), (Cause.UNKNOWN, Owner.UNDECIDED, True),
     (Cause.LINK, Owner.UNDECIDED, False), (Cause.COMPUTE, Owner.NODE, False)],
)  # fmt: skip
def test_what_is_open_of_a_rank_that_waits_for_another_says_so(tmp_path, cause, owner, is_said):
    finding = awaited_on_gpus(tmp_path)
    seen = steady(observe(build_timeline(read_trace(tmp_path))), DetectorSettings())
    other = replace(finding, ranks=(0,), cause=cause, owner=owner, evidence=("its passes",))
    answer = AWAITED.search(
        Inquiry(
            seen=seen, settings=DetectorSettings(), num_tests=1, found=(other,),
            slow=np.zeros(RANKS, dtype=bool),
        )
    )  # fmt: skip
    awaited, *others = answer.findings
    assert awaited.ranks == (2,)
    assert [(one.ranks, one.evidence) for one in others] == (
        [((0,), ("its passes", OTHERS_WAIT))] * is_said
    )
    assert answer.explains(other) == is_said
