"""A device that its host starves: whose fault it is, and who else may make it wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.launching import half_starved, mate_starves, starvation
from detect.detector import judge
from detect.observe.axes import cut
from detect.observe.extract import observe
from megascan.topology import Layout


def slow_of_three(slot):
    return 1.3 if slot.rank == 3 else 1.0


def test_a_mate_of_one_that_waits_for_launches_may_take_turns_with_it(job):
    """Rank 4 waits for launches: whether 5 or 4 is behind may change. Rank 7 has no such mate."""
    seen = observe(job(layout=Layout(tp=2, dp=4), launch_lead_ns=lambda rank: 10**8).timeline())
    starved = np.zeros((8, 20))
    starved[[0, 2, 4]] = 0.9
    told, active = replace(seen, starved_share=starved), np.ones(20, dtype=bool)
    assert "90% of a TP mate's operations" in mate_starves(told, 5, active)
    assert not mate_starves(told, 7, active)
    assert not mate_starves(told, 4, active), "it starves itself, which other rules judge"
    assert not mate_starves(seen, 5, active)


def test_a_starved_rank_beside_groups_that_lack_ranks_is_undecided(job):
    """Rank 3's device waits for launches; of the other TP group one rank is missing."""
    seen = observe(
        job(
            layout=Layout(tp=2, dp=2), launch_lead_ns=lambda rank: 1000 if rank == 3 else 10**8
        ).timeline()
    )  # fmt: skip
    active = np.ones(20, dtype=bool)
    assert starvation(seen, 3, active)[0] == Owner.NODE
    assert starvation(cut(seen, "row", np.array([0, 2, 3])), 2, active)[0] == Owner.UNDECIDED


def test_a_starved_rank_whose_host_is_hardly_slower_is_undecided(job):
    """Its peers' hosts are ahead, and would not be for long if its own were twice as slow."""
    seen = observe(
        job(
            layout=Layout(dp=4), launch_lead_ns=lambda rank: 1000 if rank == 3 else 10**8
        ).timeline()
    )  # fmt: skip
    active, effect = np.ones(20, dtype=bool), np.log(3.0)
    pace = np.zeros((4, 20))
    pace[3] = np.log(1.05)
    owner, why = starvation(replace(seen, held_pace=pace), 3, active, effect)
    assert owner is Owner.UNDECIDED and "1.05x as long as its peers'" in why
    pace[3] = np.log(2.5)
    assert starvation(replace(seen, held_pace=pace), 3, active, effect)[0] is Owner.NODE
    pace[3] = np.nan  # nobody knows
    assert starvation(replace(seen, held_pace=pace), 3, active, effect)[0] is Owner.NODE
    assert starvation(replace(seen, held_pace=None), 3, active, effect)[0] is Owner.NODE


@pytest.mark.parametrize(("starved", "named"), [(0.57, True), (0.0, False)])
def test_a_host_that_is_late_in_forward_passes_alone_is_named(job, starved, named):
    """Their kernels are shorter than those of backward passes; it began after three iterations."""

    def work(slot):
        is_late = slot.rank == 2 and slot.iteration > 5
        return {"forward": 2.4, "backward": 1.05}.get(slot.phase, 1.0) if is_late else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), iterations=8, work=work).timeline())
    own = (np.arange(8) == 2)[:, None] & (seen.iterations > 5)
    told = replace(seen, starved_share=np.where(own, starved, 0.0))
    found = judge(told, DetectorSettings()).findings
    hosts = [one for one in found if one.owner is Owner.NODE and one.cause is Cause.HOST]
    assert [one.ranks for one in hosts] == [(2,)] * named


@pytest.mark.parametrize(("pace", "owner"), [(1.06, Owner.UNDECIDED), (1.5, Owner.NODE)])
def test_where_all_of_a_stage_wait_for_launches_one_host_is_the_last(job, pace, owner):
    """88 % of rank 7's operations come just in time, of its stage's others 78 %, of others none."""
    seen = observe(job(layout=Layout(pp=2, dp=4)).timeline())
    starved, paces = np.zeros_like(seen.busy_ns), np.zeros_like(seen.busy_ns)
    starved[4:], starved[7], paces[7] = 0.78, 0.88, np.log(pace)
    told = replace(seen, starved_share=starved, held_pace=paces)
    assert starvation(told, 7, np.ones(20, dtype=bool), 0.06)[0] is owner


@pytest.mark.parametrize(
    ("pace", "owner"), [(1.2, Owner.UNDECIDED), (2.0, Owner.NODE)], ids=["little", "twice"]
)
def test_a_host_that_takes_twice_as_long_is_no_little_slower_however_slow_its_device(
    job, pace, owner
):
    """Its device stands still for most of passes that seem 16 times as long."""
    lead = lambda rank: 1000 if rank == 3 else 10**8  # noqa: E731
    seen = observe(job(layout=Layout(dp=4), launch_lead_ns=lead).timeline())
    paces = np.log(pace) * (np.arange(4) == 3)[:, None] * np.ones(20)
    active = np.ones(20, dtype=bool)
    found = starvation(replace(seen, held_pace=paces), 3, active, np.log(16.0))
    assert found is not None and found[0] is owner


@pytest.mark.parametrize(("factor", "owner"), [(1.2, Owner.JOB), (3.0, Owner.NODE)])
def test_in_a_host_bound_job_one_rank_far_behind_all_others_is_its_hosts(job, factor, owner):
    """Each TP group has a starved rank; the work of rank 3 takes longer than that of the others."""
    made = job(
        layout=Layout(tp=2, dp=4),
        work=lambda slot: factor if slot.rank == 3 else 1.0,
        launch_lead_ns=lambda rank: 1000 if rank % 2 else 10**8,
    )
    seen, active = observe(made.timeline()), np.ones(20, dtype=bool)
    found = starvation(replace(seen, held_pace=None), 3, active, np.log(factor))
    assert found is not None and found[0] is owner


@pytest.mark.parametrize(
    ("idle_ms", "launching_ms", "owner"),
    [(8.0, 30.0, Owner.UNDECIDED), (100.0, 30.0, Owner.NODE), (100.0, 14.0, Owner.NODE),
     (8.0, 14.0, None)],
    ids=["little", "much", "much of short launching", "short launching is not why"],
)  # fmt: skip
def test_a_device_idle_for_longer_than_all_launching_takes_is_its_hosts(
    job, idle_ms, launching_ms, owner
):
    """Its host launches as quickly as those of its peers, and does something else; passes of 240 ms
    take 1.15 times as long.
    """
    seen, active = observe(job(layout=Layout(dp=4)).timeline()), np.ones(20, dtype=bool)
    starved = np.where(np.arange(4) == 3, 0.9, 0.0)[:, None] * np.ones(20)
    lost = np.full((4, 20), 2e6)
    lost[3] += idle_ms * 1e6
    told = replace(seen, starved_share=starved, held_pace=np.zeros((4, 20)),
                   launching_ns=np.full((4, 20), launching_ms * 1e6),
                   lost_ns={**seen.lost_ns, Cause.HOST: lost})  # fmt: skip
    found, why = starvation(told, 3, active, np.log(1.15)) or (None, "")
    assert found is owner
    assert ("100 ms an iteration longer than theirs" in why) == (owner is Owner.NODE)


@pytest.mark.parametrize(
    ("own", "theirs", "is_doubtful"),
    [
        (0.65, 0.4, True),
        (0.65, 0.5, False),
        (0.4, 0.3, False),
        (0.75, 0.4, False),
        (0.65, 0.1, False),
    ],
)
def test_who_waits_for_a_host_a_little_more_than_peers_that_wait_too(job, own, theirs, is_doubtful):
    """All hosts can hardly keep up; beside peers that are well fed half is enough to be starved."""
    seen = observe(job(layout=Layout(dp=4), launch_lead_ns=lambda rank: 10**8).timeline())
    starved = np.full((4, 20), theirs)
    starved[3] = own
    seen = replace(seen, starved_share=starved)
    assert bool(half_starved(seen, 3, np.ones(20, dtype=bool))) == is_doubtful
    pace = np.zeros((4, 20))
    pace[3] = np.log(2.0)  # its host is slow, whoever waits
    assert not half_starved(replace(seen, launch_pace=pace), 3, np.ones(20, dtype=bool))
    slow = job(layout=Layout(dp=4), work=slow_of_three, launch_lead_ns=lambda rank: 10**8)
    report = judge(replace(observe(slow.timeline()), starved_share=starved), DetectorSettings())
    named = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert named == ([] if is_doubtful else [(3,)])


@pytest.mark.parametrize(
    ("own", "pace", "is_doubtful"),
    [
        (0.65, 0.25, True),
        (0.65, 0.05, False),  # its host is hardly slower than its device's work
        (0.4, 0.25, False),  # its host is mostly ahead
    ],
)
def test_work_that_a_slow_host_launches_late_may_be_as_slow_as_the_host(
    job, own, pace, is_doubtful
):
    """1.1 times the work of its peers, half of which come just in time as well."""

    def longer(slot):
        return 1.1 if slot.rank == 3 else 1.0

    made = job(layout=Layout(dp=4), work=longer, launch_lead_ns=lambda rank: 10**8)
    starved, paces = np.full((4, 20), 0.5), np.zeros((4, 20))
    starved[3], paces[3] = own, pace
    told = replace(observe(made.timeline()), starved_share=starved, held_pace=paces)
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause) == ((3,), Cause.COMPUTE)
    assert finding.owner is (Owner.UNDECIDED if is_doubtful else Owner.NODE)
    assert any("from launch to launch" in one for one in finding.evidence) == is_doubtful
