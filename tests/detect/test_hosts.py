"""A host whose ranks lose time together is one finding; what single ranks or stages lose is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.together import gathered
from detect.detector import judge
from detect.observe.extract import observe
from detect.stats.host_tests import _is_one_pause_each
from megascan.topology import Layout


def lost_by(ranks, time_ms):
    return lambda slot: time_ms if slot.rank in ranks else 0.0


def test_host_that_holds_up_its_ranks_is_one_finding(job):
    report = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(range(4, 8), 15.0)).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    assert "host n01" in finding.headline and finding.host == "n01"


@pytest.mark.parametrize(("hosts", "owner"), [(4, Owner.UNDECIDED), (2, Owner.NODE)])
def test_of_two_hosts_the_one_that_loses_a_little_more_is_undecided(job, hosts, owner):
    """9 ms of 255 an iteration: 4 % of it. `hosts` is the number of ranks on each."""
    report = job(
        layout=Layout(dp=8), hosts=hosts, gap_ms=lost_by(range(hosts), 10.0), iterations=10
    ).report()
    finding = next(one for one in report.findings if len(one.ranks) == hosts)
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert any("the noisier one" in one for one in finding.evidence) == (owner != Owner.NODE)


@pytest.mark.parametrize(
    ("share", "pace", "owner"),
    [(0.8, 1.1, Owner.UNDECIDED), (0.3, 1.1, Owner.NODE), (0.8, 1.5, Owner.NODE)],
    ids=["hardly slower", "mostly ahead", "slower"],
)
def test_of_two_hosts_that_launch_most_of_the_time_one_always_loses_more(job, share, pace, owner):
    """17 ms of 260 an iteration; launching takes them a `share` of it."""
    made = job(layout=Layout(dp=8), hosts=4, gap_ms=lost_by(range(4), 17.0), iterations=10)
    seen = observe(made.timeline())
    launching = np.full_like(seen.busy_ns, share * float(np.median(seen.iteration_ns)))
    paces = np.zeros_like(launching)
    paces[:4] = np.log(pace)
    told = replace(seen, launching_ns=launching, held_pace=paces)
    report = judge(told, DetectorSettings())
    assert [one.owner for one in report.findings if len(one.ranks) == 4] == [owner]


def test_host_that_is_a_stage_is_found_from_five_per_cent_on(job):
    stages = Layout(pp=4, dp=4)
    slow = job(layout=stages, hosts=4, gap_ms=lost_by(range(4, 8), 25.0)).report()
    assert [(one.cause, one.ranks) for one in slow.findings] == [(Cause.HOST, (4, 5, 6, 7))]
    slight = job(layout=stages, hosts=4, gap_ms=lost_by(range(4, 8), 5.0)).report()
    assert slight.findings == ()


@pytest.mark.parametrize(
    ("late", "named"),
    [((5,), (5,)), ((5, 6), (5, 6)), ((4, 5, 6), (4, 5, 6, 7)), ((5, 9), None)],
)
def test_ranks_that_lose_time_one_by_one_are_one_finding_on_their_host(job, late, named):
    """Most of its ranks: the whole host. `named` is None where each is on another host."""
    report = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(late, 15.0)).report()
    if named is None:
        assert sorted(one.ranks for one in report.findings) == [(rank,) for rank in late]
        return
    (finding,) = report.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, named)
    assert finding.host == "n01" and finding.step_time_cost_ratio > 1.04
    assert finding.to_json()["num_peers"] == (15 if len(late) == 1 else 16 - len(named))
    if len(late) > 1:
        assert f"host n01 makes {len(late)} of its 4 ranks" in finding.headline
        assert finding.evidence[0].startswith("one by one: rank ")


def test_of_one_host_ranks_are_named_and_not_the_host(job):
    report = job(layout=Layout(dp=8), hosts=8, gap_ms=lost_by((1, 2, 3, 4), 30.0)).report()
    assert all("makes" not in one.headline for one in report.findings)
    assert {rank for one in report.findings for rank in one.ranks} <= {1, 2, 3, 4}


def test_two_findings_on_all_ranks_of_a_host_are_one(job):
    """The same ranks lose time throughout and pause now and then: the second is evidence."""
    lost = job(layout=Layout(dp=16), hosts=4, gap_ms=lost_by(range(4, 8), 15.0))
    (whole,) = lost.report().findings
    again = replace(whole, step_time_cost_ratio=1.01, statement="pauses")
    seen = observe(lost.timeline())
    (one,) = gathered(seen, [again, whole])
    assert one.headline == whole.headline and one.step_time_cost_ratio > 1.01
    assert "no fault apart" in one.evidence[-1]
    undecided = replace(again, owner=Owner.UNDECIDED)
    assert len(gathered(seen, [undecided, whole])) == 2


@pytest.mark.parametrize(("other_ms", "owner"), [(1.0, Owner.NODE), (38.0, Owner.UNDECIDED)])
def test_a_host_that_is_a_stage_is_not_blamed_where_another_stage_loses_as_much(
    job, other_ms, owner
):
    """The first stage embeds, the last one computes the loss: both may have many gaps."""
    gaps_ms = {0: 40.0, 3: other_ms}
    made = job(
        layout=Layout(dp=4, pp=4), hosts=4, gap_ms=lambda slot: gaps_ms.get(slot.rank // 4, 1.0)
    )
    found = {one.ranks: one.owner for one in made.report().findings if one.cause == Cause.HOST}
    assert found[0, 1, 2, 3] == owner
    assert Owner.NODE not in {one for ranks, one in found.items() if ranks != (0, 1, 2, 3)}


def test_host_that_is_a_stage_may_have_gaps_of_its_own(job):
    """Gaps of 8 % where others have 3 % are a stage's; where others have none, a host's."""

    def gaps(slot):
        return 25.0 if slot.rank in range(4, 8) else 8.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, gap_ms=gaps).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.UNDECIDED)


def test_one_slow_rank_of_a_hosts_only_tp_group_is_no_slow_host(job):
    """Its mates wait for it, between passes and inside them, where nobody records that."""

    def slower(slot):
        if slot.name == "optimizer" or not 4 <= slot.rank < 8:
            return 1.0
        return 1.5 if slot.rank == 5 else 1.4

    gaps = lost_by(range(4, 8), 20.0)
    report = job(layout=Layout(tp=4, dp=4), hosts=4, work=slower, gap_ms=gaps).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE and len(one.ranks) > 1]


@pytest.mark.parametrize(
    ("pace", "held", "longer", "named"),
    [
        (1.47, 1.47, 0.12, True),
        (1.47, 1.0, 0.12, False),
        (1.47, 1.47, 0.0, False),
        (1.1, 1.1, 0.12, False),
    ],
    ids=["slow and waited for", "not by all launches", "nobody waits", "as hosts differ"],
)
def test_a_host_that_launches_slowly_is_named_for_what_others_wait(job, pace, held, longer, named):
    """What it costs lies in no single place: in TP mates, the optimizer, loading, collections."""
    seen = observe(job(layout=Layout(tp=2, dp=8), hosts=8).timeline())
    own, noise = np.arange(16)[:, None] < 8, np.random.default_rng(5)
    spread = 0.02 * noise.standard_normal((16, len(seen.iterations)))
    waiting = np.where(own, 0.02, 0.02 + longer) * seen.iteration_ns
    slow = replace(
        seen, launch_pace=np.where(own, np.log(pace), 0.0) + spread, waiting_ns=waiting,
        held_pace=np.where(own, np.log(held), 0.0) + spread, split_wait_ns=None, costs=None,
    )  # fmt: skip
    found = judge(slow, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [tuple(range(8))] * named


@pytest.mark.parametrize(("slower", "named"), [(1.0, True), (1.3, False)])
def test_ranks_that_wait_for_a_slow_one_do_not_wait_for_its_host(job, slower, named):
    """Its host launches slowly, too, which harms nobody."""

    def work(slot):
        return slower if slot.rank == 3 else 1.0

    seen = observe(job(layout=Layout(dp=16), hosts=8, work=work).timeline())
    own, noise = np.arange(16)[:, None] < 8, np.random.default_rng(5)
    spread = 0.02 * noise.standard_normal((16, len(seen.iterations)))
    waits_least = own if named else np.arange(16)[:, None] == 3
    waiting = np.where(waits_least, 0.02, 0.2) * seen.iteration_ns
    slow = replace(
        seen, launch_pace=np.where(own, np.log(1.7), 0.0) + spread, waiting_ns=waiting,
        split_wait_ns=None, costs=None,
    )  # fmt: skip
    found = judge(slow, DetectorSettings()).findings
    ranks = tuple(range(8)) if named else (3,)
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [ranks]


@pytest.mark.parametrize(("pace", "owner"), [(1.0, Owner.NODE), (1.6, Owner.UNDECIDED)])
def test_steady_gaps_of_a_stage_that_launches_more_are_its_own(job, pace, owner):
    made = job(layout=Layout(dp=4, pp=4), hosts=4, gap_ms=lost_by(range(4), 60.0))
    seen, own = observe(made.timeline()), np.arange(16)[:, None] < 4
    paces = np.where(own, np.log(pace), 0.0) + np.zeros(seen.busy_ns.shape)
    (finding,) = judge(replace(seen, launch_pace=paces), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((0, 1, 2, 3), owner)


def test_one_pause_of_each_rank_is_no_slow_host():
    at_once, apart = np.zeros((2, 4, 10))
    at_once[:, 3] = 0.3
    apart[np.arange(4), np.arange(4)] = 0.3
    assert _is_one_pause_each(apart, 0.03) and not _is_one_pause_each(at_once, 0.03)
    apart[:, 5:] = 0.03
    assert not _is_one_pause_each(apart, 0.04)
    one_pauses_again = np.zeros((2, 6))
    one_pauses_again[0, :4], one_pauses_again[1] = (9.0, 0, 0, 0.5), (0, 0.8, 0.1, 0.7, 2.1, 1.2)
    assert not _is_one_pause_each(one_pauses_again, 1.2)
