"""The ground of pods: what its cases are, that its files hold, that its truth is one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds import pod
from benchmarks.grounds.ground import Case, Variation
from benchmarks.grounds.pod.catalogue import plans
from benchmarks.grounds.pod.draws import drawn
from benchmarks.grounds.pod.engine import simulate
from benchmarks.grounds.pod.faults import Fault, Law
from benchmarks.grounds.pod.job import Disorder, Job
from benchmarks.grounds.pod.rank_files import members_of, write_rank_files
from benchmarks.grounds.pod.schedule import Message, passes_of, received, sent
from megascan.reader import read_trace
from tests.benchmarks.catalogues import assert_alike_in_each_process
from tests.benchmarks.nesting import assert_nested

CASES = list(pod.cases())
FAMILIES = (
    "gpu_clock: experts", "gpu_clock: one replica", "gpu_clock: base", "throttling: for iterations",
    "nic", "rail", "host_cpu", "storage", "gc", "two faults", "healthy: sharded",
    "look_alike: long documents", "look_alike: MTP stage", "look_alike: hot expert",
    "look_alike: checkpoints", "look_alike: warm-up", "look_alike: curriculum",
    "look_alike: ranks missing", "look_alike: clock steps",
)  # fmt: skip
RIGHT_CLOCKS = Disorder(clock_offset_ms=0.0, clock_drift_ppm=0.0, clock_wander_us=0.0)
SLACK_NS = 60_000  # by which devices are tied to their hosts
MOST_ITERATIONS = 6  # of jobs that are made here


def job_of(case: Case) -> Job:
    return plans(case.draw)[case.name][1][0]


def case_of(family: str) -> Case:
    """The smallest case of a family."""
    return min((one for one in CASES if one.family == family), key=lambda one: one.num_ranks)


def some_job(seed: int, **layout: int) -> Job:
    """A job of few ranks whose layout is as wanted."""
    wanted = layout.items()
    job = drawn(
        np.random.default_rng(seed), seed,
        lambda job: job.num_ranks <= 16 and job.tracing.granularity == "full"
        and all(getattr(job.layout, axis) == size for axis, size in wanted),
    )  # fmt: skip
    numbers = job.tracing.iterations[:MOST_ITERATIONS]
    return replace(job, tracing=replace(job.tracing, iterations=numbers))


def times_of(job: Job, *faults: Fault) -> tuple[np.ndarray, np.ndarray]:
    """Iteration times with all of some faults, and with none."""
    chips = np.ones((2, job.num_ranks))
    variants = [frozenset(range(len(faults))), frozenset[int]()]
    found = simulate(job, faults, variants, chips, keeps=False).iteration_s
    return found[0], found[1]


def test_cases_are_many_and_four_in_ten_have_no_fault_of_a_node() -> None:
    assert 280 <= len(CASES) <= 350
    assert len({case.name for case in CASES}) == len({case.seed for case in CASES}) == len(CASES)
    assert 0.4 <= sum(not case.at_fault for case in CASES) / len(CASES) <= 0.6
    sizes = Counter(case.num_ranks for case in CASES)
    assert min(sizes) == 4 and max(sizes) == 128
    lengths = [len(job_of(case).tracing.iterations) for case in CASES]
    assert min(lengths) >= 3 and max(lengths) <= 40


def test_cases_are_the_same_in_each_process_and_others_in_other_draws() -> None:
    assert_alike_in_each_process("pod")
    other = list(pod.cases(1))
    assert not {case.name for case in CASES} & {case.name for case in other}
    assert [case.family for case in CASES] == [case.family for case in other]


def test_what_looks_alike_has_no_fault_of_a_node() -> None:
    for case in CASES:
        sound = case.family.startswith(("healthy", "look_alike")) or case.family == "gc"
        assert bool(case.at_fault) != sound, case.name
        assert case.at_fault <= set(range(case.num_ranks))
        assert not (case.family.startswith("healthy") and case.planted)
        assert all(one.ranks for one in case.planted)


def test_a_case_is_written_alike_each_time(tmp_path: Path) -> None:
    case = case_of("gpu_clock: later")
    for name in "ab":
        pod.write(case, tmp_path / name)
    first = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_read_and_costs_are_consistent(family: str, tmp_path: Path) -> None:
    case = case_of(family)
    planted = pod.write(case, tmp_path)
    assert [replace(one, cost_ratio=1.0, held_cost_ratio=1.0) for one in planted] == list(
        case.planted
    )
    for one in planted:
        assert 0.99 < one.cost_ratio < 30
        assert 0.99 < one.held_cost_ratio < 30
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60e6
    timeline = build_timeline(read_trace(tmp_path, allow_missing_ranks=True))
    if not job_of(case).tracing.missing:
        assert len(timeline.completeness.ranks) == case.num_ranks
        assert not any(timeline.completeness.num_unmatched.values())


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "vpp": 1}, {"pp": 2, "vpp": 2}, {"pp": 4, "tp": 1}, {"ep": 4, "pp": 2},
        {"cp": 2, "dp": 2}, {"tp": 1, "pp": 1, "dp": 8},
    ],
)  # fmt: skip
def test_nobody_leaves_a_communication_before_all_have_come(
    layout: dict[str, int], tmp_path: Path
) -> None:
    job = replace(some_job(5, **layout), disorder=RIGHT_CLOCKS)
    outcome = simulate(job, (), [frozenset()], np.ones((1, job.num_ranks)), keeps=True)
    write_rank_files(job, outcome, tmp_path)
    spans = read_trace(tmp_path).spans.to_pandas()
    assert_nested(spans)
    spans["end_ns"] = spans["start_ns"] + spans["duration_ns"]
    meetings = spans[(spans["kind"] == "collective") & (spans["op"] != "broadcast")]
    both = meetings.groupby(["iteration", "group", "op", "sequence"])
    assert (both["end_ns"].min() >= both["start_ns"].max() - SLACK_NS).all()
    messages = spans[spans["kind"] == "p2p"]
    sends, receives = (messages[messages["op"] == op] for op in ("send", "recv"))
    other = receives.rename(columns={"rank": "peer", "peer": "rank"})
    pairs = sends.merge(other, on=["rank", "peer", "iteration", "direction", "sequence"])
    assert len(pairs) == len(sends) == len(receives)
    assert (pairs["end_ns_y"] >= pairs["start_ns_x"] - SLACK_NS).all()


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_each_message_has_two_ends(num_stages: int, num_chunks: int) -> None:
    given, taken = Counter[Message](), Counter[Message]()
    for stage in range(num_stages):
        order = passes_of(stage, num_stages, num_chunks, 2 * num_stages)
        assert len(set(order)) == len(order) == 4 * num_stages * num_chunks
        given.update(filter(None, (sent(one, stage, num_stages, num_chunks) for one in order)))
        taken.update(filter(None, (received(one, stage, num_stages, num_chunks) for one in order)))
    assert given == taken
    assert set(given.values()) == {1}


def test_groups_part_the_ranks() -> None:
    job = some_job(7, ep=4, pp=2)
    by_axis: dict[str, list[int]] = {}
    for name, members in members_of(job).items():
        by_axis.setdefault(name.partition("@")[0], []).extend(members)
    ends = [*job.ranks[0], *job.ranks[-1]]
    for axis, ranks in by_axis.items():
        assert sorted(ranks) == (sorted(ends) if axis == "embd" else list(range(job.num_ranks)))


def fault(law: Law, *ranks: int, **given: float | int) -> Fault:
    values: dict[str, object] = {"factor": 2.0, **given}
    return Fault(kind="x", cause="x", owner="node", law=law, ranks=ranks, **values)  # type: ignore[arg-type]


def test_a_slow_clock_costs_most_where_all_wait_for_it() -> None:
    job = some_job(9, tp=1, pp=1, dp=8)
    with_it, without = times_of(job, fault(Law.CLOCK, 3, factor=1.5))
    assert 1.2 < with_it.mean() / without.mean() <= 1.5
    late = job.tracing.iterations[3]
    with_it, without = times_of(job, fault(Law.CLOCK, 3, factor=1.5, first=late))
    assert np.allclose(with_it[:3], without[:3])
    assert (with_it[3:] > 1.1 * without[3:]).all()


@pytest.mark.parametrize("law", [Law.MEMORY, Law.NVLINK])
def test_other_faults_cost_in_the_right_direction(law: Law) -> None:
    with_it, without = times_of(some_job(9, tp=2, pp=1), fault(law, 1, factor=4.0))
    assert (with_it > without).all()


def test_a_nic_matters_between_domains_only() -> None:
    inside = some_job(11, tp=1, pp=1, dp=4)
    assert inside.num_ranks <= inside.cluster.domain
    with_it, without = times_of(inside, fault(Law.NIC, 1, factor=4.0))
    assert np.array_equal(with_it, without)
    across = replace(inside, cluster=replace(inside.cluster, domain=2))
    with_it, without = times_of(across, fault(Law.NIC, 1, factor=4.0))
    assert (with_it > without).all()


def test_a_loader_that_is_late_holds_all_up() -> None:
    job = some_job(13, tp=2, pp=2)
    with_it, without = times_of(job, fault(Law.LOADER, 0, factor=1000.0))
    assert (with_it > without + 0.2).all()
    with_it, without = times_of(job, fault(Law.LOADER, 1, factor=1000.0))  # it loads nothing
    assert np.array_equal(with_it, without)


def test_bursts_cover_their_share_of_the_time() -> None:
    burst = fault(Law.CLOCK, 0, share=0.2, period_s=0.7, phase=0.3)
    on = burst.is_on(np.linspace(0, 700, 200_001))
    assert float(on.mean()) == pytest.approx(0.2, abs=0.03)


def test_clocks_are_wrong_and_a_timeline_mends_them(tmp_path: Path) -> None:
    pod.write(case_of("healthy: experts"), tmp_path)
    spans = build_timeline(read_trace(tmp_path)).spans.to_pandas()
    meetings = spans[(spans["kind"] == "collective") & (spans["op"] != "broadcast")]
    ends = (meetings["start_ns"] + meetings["duration_ns"]).groupby(meetings["match"])
    assert float((ends.max() - ends.min()).median()) < 50_000


def test_slowness_tells_who_is_slow() -> None:
    case = case_of("gpu_clock")
    slowness = pod.slowness(case)
    assert slowness.shape == (case.num_ranks, len(job_of(case).tracing.iterations))
    (slow,) = case.planted[0].ranks
    others = np.delete(slowness, slow, axis=0)
    factor = case.planted[0].factor
    assert 1 + 0.5 * (factor - 1) < float(np.median(slowness[slow])) < 1.12 * factor
    assert 0.9 < others.min() <= others.max() < 1.12


def test_a_variation_has_one_slow_chip_and_no_trouble(tmp_path: Path) -> None:
    case = case_of("host_cpu")
    alike = Variation(chip_spread_ratio=0.0)
    slow = Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.5)
    sound = pod.write_varied(case, alike, None)
    ratio = np.median(pod.write_varied(case, slow, tmp_path) / sound, axis=1)
    assert 1.2 < ratio[1] <= 1.51
    assert np.allclose(np.delete(ratio, 1), 1.0, atol=0.05)
    assert len(read_trace(tmp_path).headers) == case.num_ranks
