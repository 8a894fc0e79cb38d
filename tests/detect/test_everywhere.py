"""What slows a whole job, so that nobody stands out: said with its cost, blamed on no node."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.everywhere import _TRANSFERS, _WORK, _is_of_no_host, _take_turns, _uneven_finding
from detect.detector import judge
from detect.observe.extract import observe
from detect.text import render_text
from detect.whatif.savings import Unevenness
from megascan.topology import Layout

EIGHT = Layout(dp=8)


def by_turns(length_ms, others_ms=1.0, one_in=8):
    """Each iteration one rank of `one_in` takes long, the next one another."""
    return lambda slot: (
        length_ms if (slot.rank + 3 * slot.iteration) % one_in == 0 else others_ms
    )  # fmt: skip


def true_cost(job, **lost):
    """How much longer an iteration is than without what is lost."""
    with_ns = observe(job(layout=EIGHT, hosts=2, **lost).timeline()).iteration_ns
    without_ns = observe(job(layout=EIGHT, hosts=2).timeline()).iteration_ns
    return float(with_ns.mean() / without_ns.mean())


def test_hosts_that_wait_for_their_data_by_turns_are_the_jobs(job):
    lost = {"loading_ms": by_turns(12.0)}
    (finding,) = job(layout=EIGHT, hosts=2, **lost).report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.LOADER, Owner.JOB)
    assert finding.step_time_cost_ratio == pytest.approx(true_cost(job, **lost), rel=0.03)
    assert finding.slowdown_interval[0] < finding.slowdown < finding.slowdown_interval[1]
    assert any("several hosts take turns" in sentence for sentence in finding.evidence)
    assert finding.evidence[1].startswith("8 of 8 ranks lose most of it"), finding.evidence


def test_ranks_of_one_host_that_wait_by_turns_are_undecided(job):
    (finding,) = job(layout=EIGHT, loading_ms=by_turns(12.0)).report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.LOADER, Owner.UNDECIDED)
    assert any("the host on which they run" in one for one in finding.evidence)


@pytest.mark.parametrize("hosts", [2, 8])
def test_ranks_that_all_wait_alike_are_undecided(job, hosts):
    report = job(layout=EIGHT, hosts=hosts, loading_ms=lambda slot: 20.0).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.LOADER, Owner.UNDECIDED)
    first = render_text(report).splitlines()[0]
    assert first.startswith("UNDECIDED: the whole job waits for its data for ")
    assert "without it the job would be" in first


@pytest.mark.parametrize("loading", [by_turns(2.0, 0.2), lambda slot: 6.0, lambda slot: 0.0])
def test_jobs_that_wait_little_are_healthy(job, loading):
    assert job(layout=EIGHT, hosts=2, loading_ms=loading).report().verdict is Verdict.HEALTHY


def test_one_slow_loader_is_not_the_jobs(job):
    slow = lambda slot: 12.0 if slot.rank == 3 else 0.5  # noqa: E731
    report = job(layout=EIGHT, hosts=2, loading_ms=slow).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((3,), Owner.NODE)]


def test_one_host_of_slow_loaders_is_not_the_jobs(job):
    slow = lambda slot: by_turns(12.0, 2.0, 2)(slot) if slot.rank < 2 else 0.5  # noqa: E731
    report = job(layout=EIGHT, hosts=2, loading_ms=slow).report()
    assert report.findings
    assert all(one.owner is not Owner.JOB for one in report.findings)


def test_storage_takes_the_place_of_loaders_that_it_may_explain(job):
    """A rank waits more often than others, all of whom wait now and then."""
    due = np.random.default_rng(5).random((8, 64)) < 0.15
    due[2] |= np.random.default_rng(6).random(64) < 0.3

    def loading(slot):
        return 12.0 if due[slot.rank, slot.iteration] else 0.5

    report = job(layout=EIGHT, hosts=2, iterations=30, loading_ms=loading).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((), Cause.LOADER, Owner.JOB)
    ]
    assert report.verdict is Verdict.JOB


@pytest.mark.parametrize("interval", [2, 4, 8])
def test_collectors_that_run_now_and_then_are_the_jobs(job, interval):
    due = np.random.default_rng(interval).integers(0, interval, (64, 64)) == 0
    lost = {"gc_ms": lambda slot: 60.0 if due[slot.rank, slot.iteration] else 0.0}
    (finding,) = job(layout=EIGHT, hosts=2, **lost).report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.GC, Owner.JOB)
    assert finding.step_time_cost_ratio == pytest.approx(true_cost(job, **lost), rel=0.03)


def test_one_collection_is_chance(job):
    once = lambda slot: 400.0 if (slot.rank, slot.iteration) == (3, 9) else 0.0  # noqa: E731
    assert not [one for one in job(layout=EIGHT, gc_ms=once).report().findings if not one.ranks]


def test_collector_of_one_rank_is_that_ranks(job):
    report = job(layout=EIGHT, gc_ms=lambda slot: 40.0 if slot.rank == 2 else 0.0).report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((2,), Cause.GC)]


def test_passes_that_are_longer_now_here_and_now_there_are_no_health(job):
    uneven = job(layout=EIGHT, hosts=2, work=by_turns(1.4))
    (finding,) = uneven.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.UNKNOWN, Owner.UNDECIDED)
    assert 1.25 < finding.slowdown < 1.4  # the optimizer is as quick as ever
    asked = uneven.report(DetectorSettings(min_slowdown=1.6))
    assert not asked.findings


@pytest.mark.parametrize(("computing", "transfers", "words"), [
    (1.3, 1.02, "the passes of the job are uneven"),
    (1.02, 1.3, "the transfers of the job are uneven"),
    (1.1, 1.1, ""),
])  # fmt: skip
def test_uneven_work_is_told_by_replay(job, computing, transfers, words):
    seen = observe(job(layout=EIGHT).timeline())
    uneven = Unevenness(computing=np.full(20, computing), transfers=np.full(20, transfers))
    costs = SimpleNamespace(unevenness=lambda within: uneven)
    findings = judge(replace(seen, costs=costs), DetectorSettings()).findings
    assert [one.headline[: len(words)] for one in findings] == [words] * bool(words)


@pytest.mark.parametrize(("level", "who"), [(1.15, (5,)), (1.03, ())])
def test_uneven_passes_say_whose_are_nearly_always_the_longest(job, level, who):
    """By half of what they make the step longer; less is what sound ranks differ by."""
    seen = observe(job(layout=EIGHT, work=lambda slot: level if slot.rank == 5 else 1.0).timeline())
    uneven = Unevenness(computing=np.full(20, 1.3), transfers=np.full(20, 1.0))
    finding = _uneven_finding(seen, uneven.computing, _WORK)
    assert (finding.ranks, finding.owner) == (who, Owner.UNDECIDED)
    longest = "those of rank 5 longer than its peers' in 20 of 20 iterations (1.15x)"
    assert (longest in finding.headline) == bool(who)
    assert ("none of a rank's are always the longest" in finding.headline) != bool(who)
    assert not _uneven_finding(seen, uneven.computing, _TRANSFERS).ranks


def test_a_slow_rank_is_not_called_uneven_work(job):
    slow = lambda slot: 1.5 if slot.rank == 3 else 1.0  # noqa: E731
    assert [one.ranks for one in job(layout=EIGHT, work=slow).report().findings] == [(3,)]


@pytest.mark.parametrize(("lost", "in_turn"), [
    ([[9, 0, 0, 9], [0, 9, 0, 0], [0, 0, 9, 0]], True),
    ([[9, 9, 9, 9], [0, 9, 0, 9], [9, 0, 9, 0]], False),  # one loses always
    ([[9, 8, 9, 8], [8, 9, 8, 9], [9, 9, 9, 8]], False),  # all alike
    ([[9, 0, 9, 0], [0, 1, 0, 1], [0, 0, 0, 0]], False),  # one has nearly all
])  # fmt: skip
def test_who_takes_turns(lost, in_turn):
    assert _take_turns(np.array(lost, dtype=float)) is in_turn


def test_what_is_left_without_any_one_host():
    lost = np.array([[9, 0, 9, 0], [0, 0, 0, 9], [0, 9, 0, 0]], dtype=float)
    spread, one, alone = (
        SimpleNamespace(hosts=hosts) for hosts in (["a", "b", "b"], ["a"] * 3, ["a", "a", "b"])
    )
    assert _is_of_no_host(spread, lost)
    assert not _is_of_no_host(one, lost)
    assert not _is_of_no_host(alone, lost)


def stops(*iterations, ranks=range(8), length_ms=150.0):
    """Those ranks have nothing to do for so long in these iterations."""
    return lambda slot: (
        length_ms if slot.iteration in iterations and slot.rank in ranks else 0.5
    )  # fmt: skip


@pytest.mark.parametrize("hosts", [8, 4])
def test_hosts_that_stop_all_together_are_undecided(job, hosts):
    """In 4 of 20 iterations every device has nothing to do for 150 ms beside 125 of work."""
    lost = {"gap_ms": stops(3, 4, 9, 17)}
    report = job(layout=EIGHT, hosts=hosts, **lost).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.cause, finding.owner) == ((), Cause.HOST, Owner.UNDECIDED)
    assert finding.step_time_cost_ratio == pytest.approx(true_cost(job, **lost), rel=0.03)
    assert "stands still in 4 of 20 iterations" in finding.headline
    assert "in iterations 3, 4, 9 and 17, beyond the " in " ".join(finding.evidence)
    assert any(one.startswith("all stand still together") for one in finding.evidence)
    assert "the whole job stands still" in render_text(report).splitlines()[0]


@pytest.mark.parametrize(
    "gaps",
    [stops(3), stops(3, 9, length_ms=10.0), lambda slot: 30.0],
    ids=["once", "a little", "in every iteration alike"],
)
def test_hosts_that_hardly_stop_are_no_news(job, gaps):
    findings = job(layout=EIGHT, hosts=4, gap_ms=gaps).report().findings
    assert not [one for one in findings if not one.ranks and one.cause is Cause.HOST]


def test_one_rank_that_stops_is_not_the_whole_job(job):
    findings = job(layout=EIGHT, hosts=4, gap_ms=stops(3, 4, 9, 17, ranks=(5,))).report().findings
    assert findings
    assert all(one.ranks == (5,) for one in findings)


@pytest.mark.parametrize(("share", "hides"), [(0.4, True), (0.001, False)])
def test_where_waiting_cannot_be_told_from_transfer_a_slow_link_may_hide(job, share, hides):
    seen = observe(job(layout=EIGHT).timeline())
    unsplit_ns = share * np.broadcast_to(seen.iteration_ns, seen.busy_ns.shape)
    report = judge(replace(seen, unsplit_ns=unsplit_ns), DetectorSettings())
    assert not report.findings
    assert any("waiting cannot be told from transfer takes 40%" in one for one in report.hides) == (
        hides
    )
