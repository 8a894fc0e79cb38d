"""Devices that are slow now and then: told from late hosts, slow mates, longer data and experts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes import burst_owner
from detect.causes.bursts import _beside_mates, _is_usual_there, _mirror_each_other, _undecided
from detect.causes.hits import Burst
from detect.causes.launching import WANDERS
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout


def test_few_throttled_passes_are_one_finding(job):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 5 and hit else 1.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, work=throttled).report().findings
    assert (finding.cause, finding.ranks) == (Cause.COMPUTE, (5,))
    assert 1.02 < finding.slowdown < 1.06


class _Cost:
    """A replay that always says the same."""

    def __init__(self, ratio):
        self.ratio = lambda *_: ratio


@pytest.mark.parametrize(("ratio", "owner"), [(1.0, Owner.UNDECIDED), (1.02, Owner.NODE)])
def test_throttling_that_nobody_waits_for_may_be_waiting(job, ratio, owner):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 5 and hit else 1.0

    seen = observe(job(layout=Layout(dp=16), iterations=10, work=throttled).timeline())
    (finding,) = judge(replace(seen, costs=_Cost(ratio)), DetectorSettings()).findings
    assert (finding.cause, finding.ranks, finding.owner) == (Cause.COMPUTE, (5,), owner)


def test_short_throttling_is_found_by_what_its_hits_show(job):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return 1.25 if slot.rank == 5 and hit else 1.0

    findings = job(layout=Layout(dp=16), iterations=14, work=throttled).report().findings
    assert [(one.cause, one.ranks) for one in findings] == [(Cause.COMPUTE, (5,))]


def test_passes_slow_now_and_then_on_a_device_that_waits_for_launches_may_show_its_host(job):
    """Half of them are launched just in time on all ranks; fewer on none."""

    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return 1.25 if slot.rank == 5 and hit else 1.0

    seen = observe(job(layout=Layout(dp=16), iterations=14, work=throttled).timeline())
    for share, owner in ((0.3, Owner.NODE), (0.6, Owner.UNDECIDED)):
        told = replace(seen, starved_share=np.full(seen.busy_ns.shape, share))
        (finding,) = judge(told, DetectorSettings()).findings
        assert (finding.ranks, finding.owner) == ((5,), owner)


def test_a_device_whose_host_launches_late_now_and_then_names_no_host(job):
    """Load that comes and goes, on any host, looks like this."""
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        return 1.3 if slot.rank == 5 and hits[slot.iteration - 3] else 1.0

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    starved = np.full(seen.busy_ns.shape, 0.05)
    starved[5] = 0.9
    told = replace(seen, starved_share=starved)
    (finding,) = [one for one in judge(told, DetectorSettings()).findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.HOST, Owner.UNDECIDED)
    assert any(WANDERS in one for one in finding.evidence)


@pytest.mark.parametrize(("ep", "owner"), [(1, Owner.NODE), (4, Owner.UNDECIDED)])
def test_a_late_host_now_and_then_is_not_told_from_busy_experts(job, monkeypatch, ep, owner):
    """The device is starved in all iterations, and slow in some: by its experts?"""
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True
    monkeypatch.setattr(burst_owner, "starvation", lambda *_: (Owner.NODE, "launched just in time"))

    def work(slot):
        is_hit = slot.rank == 5 and hits[slot.iteration - 3]
        return 1.3 if is_hit and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=8, ep=ep), work=work).report()
    (finding,) = [one for one in report.findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert (burst_owner.EXPERTS in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize("idle_share", [0.8, 0.2])
def test_who_stands_idle_in_its_slow_passes_may_be_launched_late(job, idle_share):
    """Passes 1.3 times as long in five of twenty iterations, in which the device stands idle: it is
    the node, by its device or by its host.
    """
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        return 1.3 if slot.rank == 5 and hits[slot.iteration - 3] else 1.0

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    longer_ns = seen.busy_ns[5][hits].mean() * 0.3 / 1.3
    lost = np.zeros((8, 20))
    lost[:, hits] = idle_share * longer_ns  # of one rank alone it would be a pause
    told = replace(seen, lost_ns={**seen.lost_ns, Cause.HOST: lost})
    (finding,) = [one for one in judge(told, DetectorSettings()).findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, Owner.NODE)
    assert any("had nothing to do" in one for one in finding.evidence) == (idle_share > 0.5)


@pytest.mark.parametrize(
    ("then", "otherwise", "of_peers", "owner"),
    [
        (0.4, 0.0, 0.0, Owner.UNDECIDED),
        (0.4, 0.4, 0.0, Owner.NODE),
        (0.4, 0.0, 0.4, Owner.NODE),
        (0.03, 0.0, 0.0, Owner.NODE),
    ],
    ids=["then only", "as ever", "as its peers'", "hardly"],
)
def test_passes_that_were_launched_late_now_and_then_are_not_surely_the_devices(
    job, then, otherwise, of_peers, owner
):
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        hit = hits[slot.iteration - 3] and slot.microbatch < 4
        return 1.3 if slot.rank == 5 and hit and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=Layout(dp=16), noise=0.004, work=work).timeline())
    starved = np.zeros(seen.busy_ns.shape)
    starved[:, hits] = of_peers
    starved[5] = np.where(hits, then, otherwise)
    report = judge(replace(seen, starved_share=starved), DetectorSettings())
    (finding,) = [one for one in report.findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, owner)
    assert (burst_owner.LATE_THEN in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(("usual", "is_usual"), [(0.2, False), (0.5, True)])
def test_a_row_with_slow_passes_in_all_iterations_has_them_more_often_than_its_others(
    usual, is_usual
):
    """By its iterations it has hits in one of ten alone, as its level there is already high."""
    hits = np.zeros((4, 10), dtype=bool)
    hits[1:, : int(10 * usual)] = True
    hits[0, 0] = True
    burst = Burst(
        row=0, hits=np.ones(10, dtype=bool), excess=np.full(10, 0.05), q_value=0.0,
        others=np.arange(4) > 0, other_hits=0,
    )  # fmt: skip
    assert _is_usual_there(hits, np.ones(4, dtype=bool), burst) == is_usual


def test_experts_may_get_more_tokens_now_and_then(job):
    def busy(slot):
        is_hit = slot.rank == 5 and slot.iteration in (4, 7, 11)
        return 1.3 if is_hit and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=Layout(dp=16, ep=2), iterations=10, work=busy).timeline())
    (finding,) = judge(seen, DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.UNDECIDED)
    attention = np.full(seen.busy_ns.shape, 1e7)  # no routing of tokens lengthens it
    (finding,) = judge(replace(seen, attention_ns=attention), DetectorSettings()).findings
    assert finding.owner == Owner.UNDECIDED
    attention[5, np.isin(seen.iterations, (4, 7, 11))] *= 1.3
    (finding,) = judge(replace(seen, attention_ns=attention), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.NODE)


@pytest.mark.parametrize(
    ("mate", "owner"),
    [
        ((1.0, 1.0), Owner.NODE),
        ((1.0, 1.3), Owner.NODE),
        ((1.2, 1.2), Owner.UNDECIDED),
    ],
    ids=["as quick", "waits in backward passes", "slow, too"],
)
def test_mates_on_the_same_microbatches_tell_a_throttled_device_from_long_ones(job, mate, owner):
    """Lengths vary by microbatch and replica; now and then passes of rank 2 take 1.3 times as long,
    forward passes of its TP mate 3, with the same documents, as long as ever.
    """
    random = np.random.default_rng(5)
    length = random.lognormal(0.0, 0.08, (24, 8, 4))

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        hit = slot.iteration in (4, 7, 11, 13, 16, 18) and slot.rank in (2, 3)
        by_rank = {2: 1.3, 3: mate[slot.phase == "backward"]} if hit else {}
        return by_rank.get(slot.rank, 1.0) * length[slot.iteration, slot.microbatch, slot.rank // 2]

    findings = job(layout=Layout(tp=2, dp=4), work=work).report().findings
    found = {one.ranks: one.owner for one in findings if one.cause == Cause.COMPUTE}
    assert found.get((2,)) == owner


def test_bursts_of_most_ranks_of_a_stage_name_no_node(job):
    def throttled(slot):
        return 1.3 if slot.stage == 0 and slot.rank != 7 and slot.iteration in (4, 9, 15) else 1.0

    report = job(layout=Layout(pp=2, dp=8), iterations=18, work=throttled).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE]


def test_which_of_two_mates_waits_for_the_other_is_not_told(job):
    """Nobody recorded the reductions in which one of ranks 2 and 3, a TP group, waits."""

    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return {3: 1.5, 2: 1.3}.get(slot.rank, 1.0) if hit else 1.0

    findings = job(layout=Layout(tp=2, dp=8), iterations=14, work=throttled).report().findings
    assert {one.ranks: one.owner for one in findings} == {
        (3,): Owner.UNDECIDED,
        (2,): Owner.UNDECIDED,
    }


def test_a_mate_that_is_slow_for_long_may_be_who_is_waited_for(job):
    """Rank 3 is 1.2 times slower in the second half, in some of which its mate has bursts."""

    def slowed(slot):
        if slot.rank == 3 and slot.iteration >= 10:
            return 1.2
        hit = slot.iteration in (11, 13, 14, 16) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 2 and hit else 1.0

    findings = job(layout=Layout(tp=2, dp=8), iterations=14, work=slowed).report().findings
    assert {one.ranks: one.owner for one in findings}[2,] is Owner.UNDECIDED


def test_a_mate_that_recorded_nothing_may_be_who_is_waited_for(job):
    """Rank 3 is throttled; then its TP mate's file lacks the same iterations."""
    hit = (4, 7, 11, 13)

    def throttled(slot):
        return 1.5 if slot.rank == 3 and slot.iteration in hit and slot.microbatch in (2, 5) else 1

    seen = observe(job(layout=Layout(tp=2, dp=8), iterations=14, work=throttled).timeline())
    log_ns = seen.work.log_ns.copy()
    log_ns[2, np.isin(seen.iterations, hit)] = np.nan
    lacking = replace(seen, work=replace(seen.work, log_ns=log_ns))
    owners = [judge(one, DetectorSettings()).findings[0].owner for one in (seen, lacking)]
    assert owners == [Owner.NODE, Owner.UNDECIDED]


def test_a_second_speed_of_one_of_two_is_no_noise(job):
    """Two passes of every third iteration 1.2 times slower; then by anything from 1.1 to 1.5, and
    the other rank's once as well.
    """
    random = np.random.default_rng(5)
    sizes = 1.0 + random.uniform(0.1, 0.5, (64, 8))

    def at_times(slot, size):
        is_hit = slot.rank == 1 and slot.iteration % 3 == 0 and slot.microbatch in (2, 5)
        return size if is_hit and slot.name != "optimizer" else 1.0

    pair = job(layout=Layout(dp=2), iterations=30, noise=0.005)
    (finding,) = pair.but(work=lambda slot: at_times(slot, 1.2)).report().findings
    assert (finding.cause, finding.ranks, finding.owner) == (Cause.COMPUTE, (1,), Owner.NODE)

    def uneven(slot):
        is_others = slot.rank == 0 and slot.iteration == 16 and slot.microbatch == 4
        return 1.3 if is_others else at_times(slot, sizes[slot.iteration, slot.microbatch])

    assert not [one for one in pair.but(work=uneven).report().findings if one.owner == Owner.NODE]


@pytest.mark.parametrize(("dp", "is_judged"), [(2, False), (3, True)])
def test_one_of_a_pair_that_was_left_undecided_is_nobodys_peer_now_and_then(job, dp, is_judged):
    """Its only peer would seem slow in the iterations in which it is not."""
    made = job(layout=Layout(pp=2, dp=dp), work=lambda slot: 1.2 if slot.rank == 0 else 1.0)
    (finding,) = made.report().findings
    open_one = replace(finding, owner=Owner.UNDECIDED)
    seen = observe(made.timeline())
    left = _undecided(seen, [open_one]) & ~_mirror_each_other(seen)
    assert left.tolist() == [is_judged, *[False] * (2 * dp - 1)]


@pytest.mark.parametrize(
    ("starved", "owner"), [(0.9, Owner.UNDECIDED), (0.3, Owner.NODE)], ids=["host-bound", "fed"]
)
def test_where_all_devices_wait_for_their_hosts_an_idle_one_is_no_slow_node(
    monkeypatch, starved, owner
):
    """A device stands idle in its bursts: in a host-bound job some host is always the latest."""
    monkeypatch.setattr(burst_owner, "starvation", lambda *_: None)
    monkeypatch.setattr(burst_owner, "_doubt", lambda *_: "")
    monkeypatch.setattr(burst_owner, "_stands_idle", lambda *_: True)
    seen = SimpleNamespace(lost_ns={Cause.GC: None}, starved_share=np.full((4, 9), starved))
    burst = SimpleNamespace(row=1, hits=np.arange(9) < 4, is_stops=False)
    cause, blamed, _ = burst_owner.cause_and_owner(seen, burst, Cause.COMPUTE)
    assert (cause, blamed) == (Cause.COMPUTE, owner)


@pytest.mark.parametrize(
    ("losses", "outstanding"),
    [((0.3, 0.1), [True, False]), ((0.1, 0.1), [False, False]), ((0.3, 0.0), [True])],
    ids=["the one that loses more", "neither of two alike", "alone"],
)
def test_of_two_mates_with_bursts_the_one_that_loses_more_stands_out(job, losses, outstanding):
    seen = observe(job(layout=Layout(tp=2, dp=2)).timeline())
    hits = np.arange(len(seen.iterations)) == 2
    found = [
        Burst(
            row=row, hits=hits, excess=np.where(hits, loss, 0.0), q_value=1e-6,
            others=np.ones(4, dtype=bool), other_hits=0, stands_out=True,
        )
        for row, loss in enumerate(losses)
        if loss
    ]  # fmt: skip
    assert [one.stands_out for one in _beside_mates(seen, found)] == outstanding


def _by_turns(ranks):
    """Two microbatches of some iterations take 1.4 times as long, of each rank in its own ones."""

    def work(slot):
        hits = {4 + slot.rank, 7 + slot.rank, 10 + 2 * slot.rank % 3}
        is_hit = slot.rank in ranks and slot.iteration in hits and slot.microbatch in (2, 5)
        return 1.4 if is_hit and slot.name != "optimizer" else 1.0

    return work


@pytest.mark.parametrize(
    ("ranks", "owner"), [((0, 1, 2), Owner.UNDECIDED), ((2,), Owner.NODE)], ids=["most", "one"]
)
def test_ranks_of_a_stage_that_are_slow_by_turns_may_wait_for_each_other(job, ranks, owner):
    """Those of the three other stages never are."""
    made = job(layout=Layout(pp=4, dp=4), iterations=14, noise=0.004, work=_by_turns(ranks))
    found = made.report().findings
    assert {one.ranks: one.owner for one in found} == {(rank,): owner for rank in ranks}


def test_a_mate_of_a_far_slower_rank_is_not_named_for_its_bursts(job):
    """Both mates take 1.3 times as long, whoever waits, and one 1.5 times that now and then."""

    def work(slot):
        if slot.name == "optimizer" or slot.rank not in (2, 3):
            return 1.0
        is_hit = slot.iteration in (4, 6, 7, 9, 12) and slot.microbatch in (2, 5)
        return 1.3 * (1.5 if is_hit and slot.rank == 2 else 1.0)

    found = job(layout=Layout(tp=2, dp=4), iterations=14, noise=0.004, work=work).report().findings
    assert {(one.ranks, one.owner) for one in found} == {
        ((2,), Owner.UNDECIDED),
        ((3,), Owner.UNDECIDED),
    }


@pytest.mark.parametrize(("dp", "owner"), [(3, Owner.UNDECIDED), (4, Owner.NODE)])
def test_of_few_ranks_one_may_only_be_the_noisiest(job, dp, owner):
    """Passes of any length in three iterations, which no other rank has."""
    longer = 1.2 + 0.5 * np.random.default_rng(1).random((30, 8))

    def work(slot):
        is_hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        if slot.rank != 1 or not is_hit or slot.name == "optimizer":
            return 1.0
        return longer[slot.iteration, slot.microbatch + (slot.phase == "backward")]

    made = job(
        layout=Layout(dp=dp), iterations=14, noise=0.01, work=work, tokens=lambda rank: (4096, 4096)
    )
    (finding,) = made.report().findings
    assert (finding.ranks, finding.owner) == ((1,), owner)
    assert (burst_owner.FEW_OTHERS in finding.evidence) == (owner is Owner.UNDECIDED)


def test_who_is_slow_in_both_kinds_of_passes_stands_out_from_a_mate_slow_in_one(job):
    """By so little that only whole iterations tell: 1.08 times, in passes that vary by 2 %."""

    def work(slot):
        if slot.name == "optimizer" or slot.iteration not in (4, 5, 8, 9, 12, 14):
            return 1.0
        return 1.08 if slot.rank == 2 or (slot.rank == 3 and slot.phase == "forward") else 1.0

    found = job(layout=Layout(tp=2, dp=4), iterations=20, work=work).report().findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [(2,)]
