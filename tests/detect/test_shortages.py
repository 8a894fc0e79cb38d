"""Ranks that stand still for memory or a disk: it is no longer open, but for what they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Finding, Owner, Report
from detect.causes.finding import Inquiry
from detect.causes.shortages import search_shortages
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Observations
from megascan.simulate import Fault, FaultKind, JobModel, compute_bound, simulate_trace
from megascan.topology import Layout


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def job(layout: Layout, *faults: Fault, hosts: int = 1) -> Observations:
    model = JobModel(
        layout=layout, costs=compute_bound(layout), ranks_per_host=layout.world_size // hosts
    )
    return observe(build_timeline(simulate_trace(model, [*faults], seed=1)))


@pytest.fixture(scope="module")
def slow_stage() -> Observations:
    """Two stages of one rank each; rank 1 is 1.3 times slower, and nobody can tell why."""
    return job(Layout(pp=2), Fault(rank=1, kind=FaultKind.COMPUTE, factor=1.3), hosts=2)


@pytest.fixture(scope="module")
def late_host() -> Observations:
    """One of two replicas loses a good part of the step to its host."""
    return job(Layout(dp=2), Fault(rank=1, kind=FaultKind.HOST, factor=1.3), hosts=2)


def told(seen: Observations, *of_ranks: Mapping[str, float]) -> Observations:
    """Let ranks tell the same after each second iteration: percentages of memory and disk, GB of
    memory that they hold, MB/s that they read and write.
    """
    names = {
        "memory": "memory_waited_percent",
        "disk": "disk_waited_percent",
        "holds": "memory_own_gbytes",
        "swapped": "memory_swapped_gbytes",
        "reads": "disk_read_mbytes_per_s",
        "writes": "disk_written_mbytes_per_s",
    }
    usual = {"memory": 0.0, "disk": 0.0, "holds": 4.0, "swapped": 0.0, "reads": 20.0, "writes": 0.1}
    windows = seen.iterations.tolist()[::2]
    pressure = {
        rank: {
            window: {names[key]: value for key, value in {**usual, **one}.items()}
            for window in windows
        }
        for rank, one in enumerate(of_ranks)
    }
    return replace(seen, pressure=pressure)


def judged(seen: Observations) -> Report:
    return judge(seen, DetectorSettings())


def settled(seen: Observations) -> list[Finding]:
    """Return what becomes of a finding on rank 1 and its host, if it was open until then."""
    (finding,) = judged(replace(seen, pressure={})).findings
    members = seen.members
    inquiry = Inquiry(
        seen=seen,
        settings=DetectorSettings(),
        num_tests=1,
        slow=np.zeros(len(members), dtype=bool),
        found=(replace(finding, owner=Owner.UNDECIDED),),
    )
    return [*search_shortages(inquiry).findings]


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


NOTHING: Mapping[str, float] = {}
OPEN_STAGE = [((1,), Cause.STAGE_IMBALANCE, Owner.UNDECIDED)]
NAMED = [((1,), Cause.HOST, Owner.NODE)]


def test_a_stage_that_waits_for_memory_is_on_a_host_that_is_short_of_it(slow_stage):
    assert owners(judged(slow_stage)) == OPEN_STAGE
    short = told(slow_stage, {"memory": 0.1}, {"memory": 30.0})
    numbers = slow_stage.iterations.tolist()
    report = judged(replace(short, page_reads={1: dict.fromkeys(numbers, 5_210)}))
    assert owners(report) == NAMED
    (finding,) = report.findings
    assert finding.host == "n01"
    assert "waits for memory of its host, 30% of the time" in finding.headline
    assert any("5,210 pages an iteration read back" in one for one in finding.evidence)
    assert any("elsewhere for 0.1% at most" in one for one in finding.evidence)
    assert any("left open: last stage PP1" in one for one in finding.evidence)
    assert any("memory.max" in one for one in finding.next_steps)


def test_a_host_that_waits_for_a_slow_disk_is_named(late_host):
    assert settled(told(late_host, {"disk": 2.0}, {"disk": 2.0})) == []
    (finding,) = settled(told(late_host, {"disk": 2.0}, {"disk": 40.0, "reads": 21.0}))
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.HOST, Owner.NODE)
    assert "waits for disks of its host, 40% of the time" in finding.headline
    assert any("the others read and write as much" in one for one in finding.evidence)
    assert any("iostat" in one for one in finding.next_steps)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (({"memory": 30.0}, {"memory": 30.0}), "both wait"),
        (({"memory": 15.0}, {"memory": 30.0}), "the other one waits for half as long"),
        (({"memory": 30.0}, {"memory": 0.0}), "the other one waits"),
        (({}, {"memory": 4.0}), "so little is lost behind other work"),
        (({}, {"memory": 6.0}), "less than half of what the finding costs"),
        (({}, {"disk": 60.0}), "no disk makes passes longer"),
    ],
)
def test_a_stage_stays_open_where_waiting_does_not_tell(slow_stage, ranks, why):
    assert owners(judged(told(slow_stage, *ranks))) == OPEN_STAGE, why


def test_it_stays_open_where_a_rank_does_not_tell(slow_stage):
    short = told(slow_stage, NOTHING, {"memory": 30.0})
    assert owners(judged(replace(short, pressure={1: short.pressure[1]}))) == OPEN_STAGE


def test_it_stays_open_where_nobody_tells_what_is_read(late_host):
    seen = told(late_host, {"disk": 2.0}, {"disk": 40.0})
    for of_rank in seen.pressure.values():
        for reading in of_rank.values():
            del reading["disk_read_mbytes_per_s"]
    assert settled(seen) == []


def test_two_readings_are_a_checkpoint(slow_stage):
    short = told(slow_stage, NOTHING, {"memory": 0.0})
    long = {"memory_waited_percent": 100.0, "memory_own_gbytes": 4.0}
    windows = [*short.pressure[1]]
    few = dict.fromkeys(windows[-2:], long) | {
        window: short.pressure[1][window] for window in windows[:-2]
    }
    assert owners(judged(replace(short, pressure={0: short.pressure[0], 1: few}))) == OPEN_STAGE


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"writes": 5.0}, "writes 5 MB/s, the others 0.1"),
        ({"reads": 60.0}, "reads 60 MB/s, the others 20"),
    ],
)
def test_who_reads_or_writes_more_may_wait_for_what_it_does_itself(late_host, own, words):
    (finding,) = settled(told(late_host, NOTHING, {"disk": 40.0, **own}))
    assert finding.owner is Owner.UNDECIDED
    assert any(words in one and "its own doing" in one for one in finding.evidence)


@pytest.mark.parametrize(
    ("swapped", "pages", "owner"),
    [
        (0.5, 20_000, Owner.NODE),
        (0.5, 6_000, Owner.UNDECIDED),  # 60 ms at least, of 350
        (0.0, 20_000, Owner.UNDECIDED),  # a file that is mapped
    ],
)
def test_pages_that_are_read_back_are_no_waiting_but_take_time(slow_stage, swapped, pages, owner):
    seen = told(slow_stage, {"swapped": 0.0}, {"swapped": swapped, "memory": 0.5})
    numbers = slow_stage.iterations.tolist()
    reads = {1: dict.fromkeys(numbers, pages), 0: {numbers[3]: 12}}
    (finding,) = judged(replace(seen, page_reads=reads)).findings
    assert finding.owner is owner
    said = any("a page that is read back takes 10 µs and more" in one for one in finding.evidence)
    assert said is (owner is Owner.NODE)


def test_who_holds_more_memory_may_be_short_of_it_by_itself(slow_stage):
    report = judged(told(slow_stage, NOTHING, {"memory": 30.0, "holds": 6.0}))
    assert owners(report) == OPEN_STAGE
    (finding,) = report.findings
    assert any("holds 6 GB of memory of its own, the others 4" in one for one in finding.evidence)


@pytest.fixture(scope="module")
def late_of_four() -> Observations:
    """Four replicas on two hosts; rank 3 is late by its host, which is named without its pages."""
    return job(Layout(dp=4), Fault(rank=3, kind=FaultKind.HOST, factor=1.3), hosts=2)


def test_a_host_that_is_named_already_is_told_why(late_of_four):
    (before,) = judged(late_of_four).findings
    assert (before.cause, before.owner) == (Cause.HOST, Owner.NODE)
    short = told(late_of_four, NOTHING, NOTHING, {"memory": 30.0}, {"memory": 30.0})
    numbers = late_of_four.iterations.tolist()
    (finding,) = judged(
        replace(short, page_reads={3: dict.fromkeys(numbers, 900), 2: {numbers[0]: 5}})
    ).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.HOST, Owner.NODE)
    assert finding.evidence[0].startswith("Linux counts")
    assert any("900 pages an iteration" in one for one in finding.evidence)
    assert finding.step_time_cost_ratio == before.step_time_cost_ratio


def test_a_host_s_waiting_is_not_that_of_a_rank_without_pages(late_of_four):
    """Of the two that share the reading the other one has pages read back."""
    short = told(late_of_four, NOTHING, NOTHING, {"memory": 30.0}, {"memory": 30.0})
    numbers = late_of_four.iterations.tolist()
    (finding,) = judged(replace(short, page_reads={2: dict.fromkeys(numbers, 900)})).findings
    assert not finding.evidence[0].startswith("Linux counts")


def test_waiting_that_costs_nothing_is_a_note():
    sound = job(Layout(dp=4), hosts=4)
    report = judged(told(sound, NOTHING, {"disk": 25.0, "writes": 9.0}, NOTHING, NOTHING))
    assert not report.findings
    (note,) = [note for note in report.notes if "disks" in note]
    assert note.startswith("rank 1 (DP1, host n01")
    assert "25% of the time, and writes 9 MB/s, the others 0.1" in note
    assert note.endswith("whether that costs the step anything is not seen")
    assert not any("disks" in one for one in judged(told(sound, *4 * [{"disk": 25.0}])).notes)
