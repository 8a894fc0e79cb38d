"""A host that launches slowly is at fault, whoever shares its stage."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.hosts import WANDERS
from detect.detector import judge
from detect.observe.extract import observe
from detect.stats.host_tests import PACE, keeps_its_pace
from megascan.topology import Layout


def lost_by(ranks, time_ms):
    return lambda slot: time_ms if slot.rank in ranks else 8.0


@pytest.fixture
def stages(job):
    """Four stages on four hosts, of which one has gaps of 5 % more than the others."""
    return observe(
        job(layout=Layout(pp=4, dp=4), hosts=4, gap_ms=lost_by(range(4, 8), 23.0)).timeline()
    )


def paced(seen, ranks, ratio):
    """Return the observations with hosts of `ranks` that launch slower by a ratio."""
    noise = np.random.default_rng(3).normal(0.0, 0.03, seen.busy_ns.shape)
    slow = np.isin(seen.members.ranks, list(ranks))[:, None]
    return replace(seen, launch_pace=noise + np.where(slow, np.log(ratio), 0.0))


def owners(seen):
    """Return cause, owner and ranks of what is found."""
    report = judge(seen, DetectorSettings())
    return [(one.cause, one.owner, one.ranks) for one in report.findings]


def test_slow_launching_decides_that_lost_time_is_the_hosts(stages):
    assert owners(stages) == [(Cause.HOST, Owner.UNDECIDED, (4, 5, 6, 7))]
    slow = judge(paced(stages, range(4, 8), 1.8), DetectorSettings())
    (finding,) = slow.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    assert "from launch to launch 1.8" in finding.evidence[0]


def test_equal_launching_leaves_it_open(stages):
    assert owners(paced(stages, (), 1.0)) == [(Cause.HOST, Owner.UNDECIDED, (4, 5, 6, 7))]


def scaled(seen, ranks, shares):
    """The same observations, whose slow launching has such shares of itself, by iteration."""
    slow = np.isin(seen.members.ranks, list(ranks))[:, None]
    lead = np.log(1.8) * np.resize(shares, len(seen.iterations))
    return replace(seen, launch_pace=paced(seen, (), 1.0).launch_pace + np.where(slow, lead, 0.0))


@pytest.mark.parametrize(
    ("shares", "owner"),
    [
        ([1.0, 0.8, 1.2, 1.1, 0.9], Owner.NODE),
        ([0.0] * 5 + [1.0] * 15, Owner.NODE),  # since the sixth iteration
        ([1.7, 0.3, 0.2, 1.4, 1.8, 0.9, 0.1, 1.6], Owner.UNDECIDED),
        ([1.0] * 15 + [0.0] * 5, Owner.UNDECIDED),  # it has ended
        ([0.5, 0.2, 0.3, 0.4] * 2 + [1.6] * 12, Owner.UNDECIDED),  # it was there before
    ],
    ids=["steady", "since", "wanders", "until", "more"],
)
def test_launching_that_comes_and_goes_is_the_load_of_others(job, shares, owner):
    """Gaps of 4.7 % more: so little is the host's for its launching only."""
    seen = observe(
        job(layout=Layout(pp=4, dp=4), hosts=4, gap_ms=lost_by(range(4, 8), 20.0)).timeline()
    )
    report = judge(scaled(seen, range(4, 8), shares), DetectorSettings())
    (finding,) = report.findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, owner, (4, 5, 6, 7))
    assert (WANDERS in finding.evidence) == (owner == Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("lost_ms", "shares", "owner"),
    [
        (20.0, [1.0, 0.8, 1.2, 1.1, 0.9], Owner.NODE),
        (20.0, [1.7, 0.3, 0.2, 1.4, 1.8, 0.9, 0.1, 1.6], Owner.UNDECIDED),
        (32.0, [1.7, 0.3, 0.2, 1.4, 1.8, 0.9, 0.1, 1.6], Owner.NODE),
    ],
    ids=["steady", "wanders", "costs more"],
)
def test_what_a_host_loses_that_launches_slowly_now_and_then_may_be_the_load_of_others(
    job, lost_ms, shares, owner
):
    """Its gaps are longer by 4.5 % of the iteration, or by 9 %."""
    gaps = lost_by(range(4, 8), lost_ms)
    seen = observe(job(layout=Layout(dp=16), hosts=4, gap_ms=gaps).timeline())
    assert (Cause.HOST, owner, (4, 5, 6, 7)) in owners(scaled(seen, range(4, 8), shares))


@pytest.mark.parametrize(
    ("lead", "is_kept"),
    [
        ([0.5, 0.6, 0.5, 0.4, 0.5], True),
        ([0.0, 0.1, 0.6, 0.5, 0.5, 0.4], True),
        ([0.0, 0.43, 0.63, 0.68, 1.03, 0.5], False),
    ],
    ids=["throughout", "since the third iteration", "one iteration before it is no history"],
)
def test_a_lead_in_launching_is_a_hosts_if_it_stays(lead, is_kept):
    value = np.array([lead, lead, np.zeros(len(lead)), np.zeros(len(lead))])
    own = np.array([True, True, False, False])
    sides = SimpleNamespace(own=own, control=~own, over={PACE: SimpleNamespace(value=value)})
    assert keeps_its_pace(sides) == is_kept


def test_slow_launching_of_one_rank_is_not_the_hosts(stages):
    named = [one for one in owners(paced(stages, (5,), 2.0)) if one[1] == Owner.NODE]
    assert named == []


def test_slow_launching_that_no_device_waits_for_is_not_named(job):
    seen = observe(job(layout=Layout(dp=16), hosts=4).timeline())
    assert owners(paced(seen, range(4, 8), 1.8)) == []


def test_pace_is_the_time_from_launch_to_launch(job, slow):
    """Rank 3 takes twice as long; rank 5 is 20 ms ahead, where a full queue may hold it back."""
    seen = observe(
        job(
            layout=Layout(dp=8), work=slow(3, 2.0),
            launch_lead_ns=lambda rank: 20_000_000 if rank == 5 else 10_000,
        ).timeline()
    )  # fmt: skip
    pace = seen.launch_pace
    assert pace.shape == (8, 20)
    assert np.exp(np.median(pace[3])) == pytest.approx(2.0, rel=0.03)
    assert np.exp(np.median(pace[[0, 1, 2, 4, 6, 7]])) == pytest.approx(1.0, rel=0.02)
    assert np.isnan(pace[5]).all()


@pytest.mark.parametrize(
    ("pass_ns", "optimizer", "owner"),
    [
        (60e3, 1.0, Owner.UNDECIDED),
        (60e3, 1.3, Owner.NODE),  # the optimizer is slow by as much
        (10e6, 1.0, Owner.NODE),
    ],
)
def test_passes_as_short_as_their_launching_may_wait_for_it(job, pass_ns, optimizer, owner):
    """Nothing tells whether rank 3's host is late, of two ranks on the same data."""

    def work(slot):
        factor = optimizer if slot.name == "optimizer" else 1.3
        return factor if slot.rank == 3 else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), work=work).timeline())
    shift = np.log(pass_ns) - np.median(seen.work.log_ns)
    seen = replace(seen, work=replace(seen.work, log_ns=seen.work.log_ns + shift))
    assert seen.starved_share is None
    found = [one for one in owners(seen) if one[0] == Cause.COMPUTE]
    assert found == [(Cause.COMPUTE, owner, (3,))]
    told = replace(seen, starved_share=np.zeros_like(seen.busy_ns))
    assert [one[1] for one in owners(told) if one[0] == Cause.COMPUTE] == [Owner.NODE]


@pytest.mark.parametrize(
    ("slow", "owner"),
    [({2: 1.6}, Owner.NODE), ({2: 1.6, 0: 1.5, 4: 1.5, 6: 1.5}, Owner.UNDECIDED)],
    ids=["alone at its place", "like those at its place"],
)
def test_far_slower_than_its_place_is_the_device_or_its_host(job, slow, owner):
    """Passes of 60 us; launches were not recorded. Hosts of one model differ by less than 1.6."""

    def work(slot):
        return 1.0 if slot.name == "optimizer" else slow.get(slot.rank, 1.0)

    seen = observe(job(layout=Layout(tp=2, dp=4), work=work).timeline())
    shift = np.log(60e3) - np.median(seen.work.log_ns)
    seen = replace(seen, work=replace(seen.work, log_ns=seen.work.log_ns + shift))
    found = [one for one in judge(seen, DetectorSettings()).findings if one.ranks == (2,)]
    assert [one.owner for one in found] == [owner]
    assert any("a host that is late shows the same" in one for one in found[0].evidence)


def test_no_pace_without_launches(job):
    assert observe(job(layout=Layout(dp=2)).timeline()).launch_pace is None


@pytest.mark.parametrize(("ratio", "owner"), [(1.5, Owner.UNDECIDED), (1.8, Owner.NODE)])
def test_a_stage_has_operations_of_its_own_to_launch(stages, ratio, owner):
    """Where the host is a stage, a pace that would be a host's beside its like need not be."""
    found = owners(paced(stages, range(4, 8), ratio))
    assert found == [(Cause.HOST, owner, (4, 5, 6, 7))]


@pytest.mark.parametrize(("launching_ms", "cause"), [(2.0, Cause.COMPUTE), (120.0, Cause.HOST)])
def test_a_device_whose_work_is_launched_in_no_time_does_not_wait_for_launches(
    job, slow, launching_ms, cause
):
    """Hosts of a pipeline wait for each message: all of the work comes just in time, on all."""
    seen = observe(job(layout=Layout(dp=4, pp=2), work=slow(5, 1.3)).timeline())
    shape = seen.busy_ns.shape
    told = replace(
        seen,
        starved_share=np.full(shape, 0.75),
        launching_ns=np.full(shape, 1e6 * launching_ms),
        held_pace=np.zeros(shape),
    )
    finding = judge(told, DetectorSettings()).findings[0]
    assert (finding.cause, finding.ranks) == (cause, (5,))
    assert finding.owner == (Owner.NODE if cause == Cause.COMPUTE else Owner.JOB)
