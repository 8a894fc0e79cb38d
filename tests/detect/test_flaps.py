"""A network that is slow now and then is told by what all slow connections have in common."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.flaps import search_flaps
from detect.detector import _inquiry, judge
from megascan.topology import Layout

MESSAGES = tuple((rank, rank + 8) for rank in range(8))
RINGS = tuple((rank, rank + 4) for rank in (*range(4), *range(8, 12)))
UNITS = MESSAGES + RINGS
HOST_C = {8, 9, 10, 11}


def flapping_job(job, exchanging, is_slow, at=(8,), factor=15.0, units=UNITS):
    """Observe two stages of eight replicas on hosts A, B, C and D, connections (`units`) of which
    take `factor` times as long in iterations `at`, if `is_slow` says so.
    """
    timeline = job(layout=Layout(dp=8, pp=2), hosts=4).timeline()
    sent = [(one, 10**7, 10.0) if one in MESSAGES else (one, 10**9, 20.0) for one in units]
    seen = exchanging(timeline, sent)
    now = np.isin(seen.iterations, at)
    slow = np.array([bool(is_slow(unit)) for unit in seen.transfers.members])
    longer = np.where(slow[:, None] & now, factor, 1.0)
    transfers = replace(
        seen.transfers,
        transfer_ns=seen.transfers.transfer_ns * longer,
        sum_ns=seen.transfers.sum_ns * longer,
    )
    longest_ns = (transfers.sum_ns.max(axis=0) - seen.transfers.sum_ns.max(axis=0)) * now
    iteration_ns = seen.iteration_ns + longest_ns
    return replace(seen, transfers=transfers, iteration_ns=iteration_ns, costs=None)


def flapping(*args, **settings):
    """Return what is named of such a job."""
    found = judge(flapping_job(*args, **settings), DetectorSettings()).findings
    return [one for one in found if one.cause is Cause.LINK and one.owner is Owner.NODE]


def test_the_host_that_all_slow_connections_share_is_named(job, exchanging):
    (finding,) = flapping(job, exchanging, lambda unit: set(unit) & HOST_C)
    assert finding.ranks == (8, 9, 10, 11)
    assert "host n02's network" in finding.headline
    assert (finding.first_iteration, finding.last_iteration) == (8, 8)
    assert "it alone is in all 8 connections between hosts that are slow" in finding.evidence[0]


def test_a_nic_may_be_that_of_two_of_a_hosts_gpus(job, exchanging):
    (finding,) = flapping(job, exchanging, lambda unit: set(unit) & {8, 9})
    assert finding.ranks == (8, 9)


def test_whose_messages_stay_quick_is_not_named_for_its_ring(job, exchanging):
    rings = (tuple(range(8)), tuple(range(8, 16)))

    def is_slow(unit):
        return unit == rings[1] or (unit in MESSAGES and set(unit) & {8, 9})

    (finding,) = flapping(job, exchanging, is_slow, units=MESSAGES + rings)
    assert finding.ranks == (8, 9)


def test_a_host_in_all_connections_that_there_are_is_not_named(job, exchanging):
    """All of the network may be busy: none stays quick."""
    touching = tuple(unit for unit in UNITS if set(unit) & HOST_C)
    assert flapping(job, exchanging, lambda unit: True, units=touching) == []


@pytest.mark.parametrize(
    "is_slow",
    [
        lambda unit: unit in MESSAGES and set(unit) & HOST_C,  # messages A-C: A or C
        lambda unit: unit == (8, 12),  # one pair
        lambda unit: True,  # all of the network
        lambda unit: unit in ((0, 8), (5, 13), (9, 13)),  # nothing in common
        lambda unit: unit in ((0, 8), (8, 12)),  # two connections
    ],
    ids=["two hosts", "pair", "all", "nothing", "two connections"],
)
def test_what_several_or_none_share_is_nobodys(job, exchanging, is_slow):
    assert flapping(job, exchanging, is_slow) == []


@pytest.mark.parametrize(("at", "names"), [((5, 8, 13), [(12,)]), ((5, 8), [])])
def test_two_connections_that_are_slow_again_and_again_have_a_rank_in_common(
    job, exchanging, at, names
):
    """All of rank 12: its messages with 4, and its ring with 8."""
    found = flapping(job, exchanging, lambda unit: 12 in unit, at)
    assert [one.ranks for one in found] == names


def test_a_few_slow_ones_of_many_are_not_their_hosts(job, exchanging):
    """Three of the host's eight connections, which no rank shares."""
    few = ((0, 8), (9, 13), (10, 14))
    assert flapping(job, exchanging, lambda unit: unit in few) == []


def test_the_rank_that_several_groups_share_is_named(job, exchanging):
    """Three of its connections, of two kinds; its neighbours' are as quick as ever."""
    timeline = job(layout=Layout(dp=16), hosts=4).timeline()
    groups = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    pairs = [(0, 5), (1, 6), (2, 7), (3, 4), (8, 13), (9, 14), (10, 15), (11, 12), (5, 10)]
    at = np.isin(np.arange(20), [7])
    units = [
        (unit, 10**9 if len(unit) > 2 else 10**8, 20.0 * np.where(at & (5 in unit), 12.0, 1.0))
        for unit in groups + pairs
    ]
    seen = exchanging(timeline, units)
    longer_ns = np.where(at[: len(seen.iterations)], 400e6, 0.0)
    longer = replace(seen, iteration_ns=seen.iteration_ns + longer_ns)
    found = judge(longer, DetectorSettings()).findings
    (finding,) = [one for one in found if one.cause is Cause.LINK and one.owner is Owner.NODE]
    assert finding.ranks == (5,) and finding.headline.startswith("the network of rank 5 (")


def test_what_costs_next_to_nothing_is_not_spoken_of(job, exchanging):
    assert flapping(job, exchanging, lambda unit: set(unit) & HOST_C, factor=1.9) == []


def stages(job, exchanging, longer):
    """Return who flaps of three stages on hosts A, B and C, ten messages of which take
    `longer(members)` times as long in an iteration, (iteration,), in every second one most of them.
    """
    timeline = job(layout=Layout(dp=4, pp=3), hosts=4).timeline()
    units = [((rank, rank + 4), 10**7, 10.0) for rank in range(8)]
    seen = exchanging(timeline, units)
    factor = np.array([longer(unit) * np.ones(20) for unit in seen.transfers.members])
    sum_ns = 10.0 * seen.transfers.transfer_ns * factor
    quick = seen.iterations % 2 == 0
    transfers = replace(
        seen.transfers,
        sum_ns=sum_ns,
        transfer_ns=seen.transfers.transfer_ns * np.where(quick, 1.0, factor),
    )
    iteration_ns = seen.iteration_ns + sum_ns.max(axis=0) - 1e8
    longer_seen = replace(seen, transfers=transfers, iteration_ns=iteration_ns, costs=None)
    return [one.ranks for one in search_flaps(_inquiry(longer_seen, DetectorSettings())).findings]


NOW_AND_THEN = np.where(np.isin(np.arange(20), (7, 13)), 15.0, 1.0)


def test_a_host_whose_other_messages_are_quick_is_not_the_slow_one(job, exchanging):
    """Messages of A and B take 15 times as long now and then, those of B and C never: A. If these
    do as well, it may be B or all of the network.
    """
    a_and_b = stages(job, exchanging, lambda unit: NOW_AND_THEN if unit[0] < 4 else 1.0)
    assert a_and_b == [(0, 1, 2, 3)]
    assert stages(job, exchanging, lambda unit: NOW_AND_THEN) == []


@pytest.mark.parametrize(("most", "named"), [(6.0, [(0, 1, 2, 3)]), (1.5, [])])
def test_a_port_that_is_slow_for_a_part_of_each_iteration(job, exchanging, most, named):
    """Some messages of each iteration take far longer, in every second one most of them."""
    often = np.where(np.arange(20) % 2, most, most / 2 + 0.5)
    assert stages(job, exchanging, lambda unit: often if unit[0] < 4 else 1.0) == named


def test_quick_iterations_are_no_quicker_than_by_one_clock(job, exchanging):
    """Clocks that are off make transfers of host C short until one half of the window."""
    timeline = job(layout=Layout(dp=8, pp=2), hosts=4).timeline()
    drifting = np.where(np.arange(20) < 12, 0.2, 1.0)
    units = [
        (unit, 10**9, 20.0 * (drifting if set(unit) & HOST_C else np.ones(20))) for unit in UNITS
    ]
    seen = exchanging(timeline, units)
    slow = replace(seen, iteration_ns=seen.iteration_ns * np.where(drifting == 1.0, 1.3, 1.0))
    by_one_clock = replace(
        slow,
        transfers=replace(slow.transfers, shortest_ns=np.full(slow.transfers.sum_ns.shape, 2e7)),
    )
    named = [
        [one.ranks for one in search_flaps(_inquiry(each, DetectorSettings())).findings]
        for each in (slow, by_one_clock)
    ]
    assert named == [[(8, 9, 10, 11)], []]


def test_a_network_that_is_named_already_is_not_named_for_its_flaps(job, exchanging):
    seen = flapping_job(job, exchanging, lambda unit: set(unit) & HOST_C)
    inquiry = _inquiry(seen, DetectorSettings())
    (finding,) = search_flaps(inquiry).findings
    for owner, num_found in ((Owner.NODE, 0), (Owner.UNDECIDED, 1)):
        known = replace(finding, ranks=(9,), owner=owner)
        assert len(search_flaps(replace(inquiry, found=(known,))).findings) == num_found
