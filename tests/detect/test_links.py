"""Slow connections: the pair, the rank whose connections are all slow, or nobody."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.connections import Units, guilty_end
from detect.causes.hits import FEW
from detect.causes.links import (
    IN_DOUBT_BETWEEN,
    IN_DOUBT_HOST,
    IN_DOUBT_INSIDE,
    IN_DOUBT_PLACE,
    _is_at_its_end,
    _is_told_twice,
    _subject,
    _undecided_beside_heavier,
    _waits_behind,
)
from detect.causes.slow_links import _exceeds_clock_errors, _is_isolated
from detect.detector import judge
from detect.observe.axes import cut
from detect.observe.extract import observe
from detect.observe.groups import one_row_a_worker
from detect.observe.transfers import Transfers, _worth_comparing, usual_total
from detect.observe.warmup import steady
from detect.stats.search import Suspect
from detect.stats.stretches import Course
from megascan.topology import Layout


def test_half_bandwidth_names_the_pair(job):
    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 5) else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((1, 5), Cause.LINK)]
    assert report.findings[0].slowdown == pytest.approx(2.0, rel=0.05)


def test_all_connections_of_a_rank_name_the_rank(job):
    def transfer(rank, peer, iteration):
        return 2.0 if 5 in (rank, peer) else 1.0

    report = job(layout=Layout(dp=4, pp=3), transfer=transfer).report()
    assert [(one.ranks, one.cause) for one in report.findings] == [((5,), Cause.LINK)]


def test_two_slow_pairs_are_two_findings(job):
    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) in ((0, 4), (2, 6)) else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert sorted(one.ranks for one in report.findings) == [(0, 4), (2, 6)]


@pytest.mark.parametrize(
    ("pairs", "owner"),
    [
        (((8, 16),), Owner.NODE),
        (((8, 16), (9, 17)), Owner.UNDECIDED),  # both between the same two hosts
        (((8, 16), (13, 21)), Owner.NODE),
    ],
)
def test_several_slow_pairs_between_two_hosts_share_what_is_slow(job, pairs, owner):
    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) in pairs else 1.0

    report = job(
        layout=Layout(dp=8, pp=4), transfer=transfer, hosts=4, message_bytes=1 << 20
    ).report()
    assert sorted(one.ranks for one in report.findings) == list(pairs)
    assert {one.owner for one in report.findings} == {owner}
    shared = [one for one in report.findings if IN_DOUBT_BETWEEN in one.evidence]
    assert len(shared) == (2 if owner is Owner.UNDECIDED else 0)


@pytest.mark.parametrize(
    ("pairs", "owner"),
    [
        (((2, 10), (3, 11)), Owner.NODE),
        (((2, 10), (3, 11), (5, 13)), Owner.UNDECIDED),
        (((2, 10), (3, 11), (21, 29)), Owner.NODE),  # not of one host
    ],
)
def test_many_slow_pairs_inside_a_host_share_what_is_slow(job, exchanging, pairs, owner):
    """Of eight pairs inside each of two hosts with 16 devices."""
    timeline = job(layout=Layout(tp=8, dp=4), hosts=16, iterations=12).timeline()
    every = [(rank, rank + 8) for host in (0, 16) for rank in range(host, host + 8)]
    sent = [(pair, 10**9, 40.0 if pair in pairs else 10.0) for pair in every]
    found = judge(exchanging(timeline, sent), DetectorSettings()).findings
    links = [one for one in found if one.cause is Cause.LINK]
    assert sorted(one.ranks for one in links) == list(pairs)
    assert {IN_DOUBT_HOST in one.evidence for one in links} == {owner is Owner.UNDECIDED}


@pytest.mark.parametrize(
    ("slow", "owner"),
    [
        ((6, 7), Owner.NODE),  # one NIC: one finding
        ((5, 6), Owner.UNDECIDED),  # two
        ((4, 5, 6, 7), Owner.UNDECIDED),
    ],
)
def test_slow_pairs_of_two_neighbours_share_their_nic(job, exchanging, slow, owner):
    """Of eight pairs between two hosts with 8 devices each."""
    timeline = job(layout=Layout(tp=8, dp=2), hosts=8, iterations=12).timeline()
    pairs = [((rank, rank + 8), 10**9, 40.0 if rank in slow else 10.0) for rank in range(8)]
    found = judge(exchanging(timeline, pairs), DetectorSettings()).findings
    links = [one for one in found if one.cause is Cause.LINK]
    pairs_of = [(rank, rank + 8) for rank in slow]
    units = [tuple(sorted(sum(pairs_of, ())))] if owner is Owner.NODE else pairs_of
    assert sorted(one.ranks for one in links) == units
    assert {one.owner for one in links} == {owner}
    assert {IN_DOUBT_BETWEEN in one.evidence for one in links} == {owner is Owner.UNDECIDED}


def test_a_rank_at_the_end_of_a_slow_link_is_no_second_fault(job):
    """Rank 5's network is slow; its partner in a slow message leaves it late as well."""

    def transfer(rank, peer, iteration):
        return 2.0 if 5 in (rank, peer) else 1.0

    (link,) = job(layout=Layout(dp=4, pp=3), transfer=transfer).report().findings
    found = SimpleNamespace(units=((1, 5), (5, 9)), ranks=(5,), is_isolated=True)
    partner = replace(link, ranks=(9,))
    assert _is_at_its_end(partner, found)
    for other in (
        link,  # the slow rank itself
        replace(partner, ranks=(10,)),
        replace(partner, cause=Cause.COMPUTE),
    ):
        assert not _is_at_its_end(other, found)
    assert not _is_at_its_end(partner, SimpleNamespace(**vars(found) | {"is_isolated": False}))


def test_a_link_that_breaks_down_inside_the_trace(job):
    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 5) and iteration >= 12 else 1.0

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert report.findings[0].first_iteration == 12


def test_equal_links_are_silent(job):
    report = job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).report()
    assert report.verdict == Verdict.HEALTHY
    assert report.minimum_detectable["link"] == pytest.approx(1.25)


def test_messages_across_hosts_are_not_compared_with_those_inside(job):
    """Ranks 0-3 on a host, 4-5 on another: stages 0-1 talk inside it, 1-2 across."""

    def transfer(rank, peer, iteration):
        return 4.0 if rank // 4 != peer // 4 else 1.0

    report = job(layout=Layout(dp=2, pp=3), transfer=transfer, hosts=4).report()
    assert report.verdict == Verdict.HEALTHY


def test_losses_below_the_clocks_error_are_not_links(job):
    """2 µs of error; transfers of 1 µs that double cannot be told from it."""

    def transfer(rank, peer, iteration):
        return 0.002 if (rank, peer) == (1, 5) else 0.001

    report = job(layout=Layout(dp=4, pp=2), transfer=transfer).report()
    assert report.verdict == Verdict.HEALTHY


def _pair_of_two_groups(other_ms, size=9_000_000):
    """Return the pair 0-4, which takes twice as long, with a group of rank 0 and one of rank 4."""
    members = ((0, 1, 2, 3), (0, 4), (4, 5, 6, 7))
    transfers = Transfers(
        members=members, kinds=("ep all_to_all of 9 MB", "dp all_reduce of 9 MB"),
        kind=np.array([0, 1, 0]), size_bytes=np.array([size, 9_000_000, 9_000_000]),
        transfer_ns=np.array([[1.0], [2.0], [other_ms]]) * np.ones(4), sum_ns=np.ones((3, 4)),
        late_ns=np.zeros((8, 4)), quick_ns=np.zeros((8, 4)),
    )  # fmt: skip
    nowhere = np.zeros(3, bool)
    return Units(
        members=members, unit=np.arange(3), transfers=transfers, crosses=nowhere,
        way=nowhere.astype(np.int64),
    )  # fmt: skip


def test_one_end_of_a_pair_is_told_by_what_its_other_connections_do():
    """Of 4's other group a little more than usual, of 0's not."""
    course = Course(np.ones(4, bool), float(np.log(2.0)), 0.01, 1.0, ((0, 3),))
    worst = Suspect(row=1, course=course, q_value=1e-6)
    units, fine = _pair_of_two_groups(1.3), _pair_of_two_groups(1.0)
    assert guilty_end(units, np.array([0.0, 0.7, 0.3]), (0, 4), worst) == (4,)
    assert guilty_end(fine, np.array([0.0, 0.7, 0.0]), (0, 4), worst) == (0, 4)
    assert guilty_end(fine, np.array([0.0, 0.7, np.nan]), (0, 4), worst) == (0, 4)
    # what carries less than the slow pair is as quick whatever its end can do
    few_bytes = _pair_of_two_groups(1.3, size=8)
    assert guilty_end(few_bytes, np.array([0.0, 0.7, 0.3]), (0, 4), worst) == (0, 4)


def test_what_carries_no_more_than_a_slow_port_acquits_it_of_nothing():
    """Messages that others send at 9 bytes a ns: a port of 6.6 holds them at 6.9, 1.3 times as
    long, while its ring takes three times as long.
    """
    over = np.array([0.0, 1.1, 0.26])
    course = Course(np.ones(4, bool), 1.1, 0.01, 1.0, ((0, 3),))
    worst = Suspect(row=1, course=course, q_value=1e-6)
    quick, held = _pair_of_two_groups(1.0), _pair_of_two_groups(1.45)
    assert guilty_end(quick, over, (0, 4), worst) == (0, 4)
    assert guilty_end(held, over, (0, 4), worst) == (4,)


def test_a_kind_that_is_slow_everywhere_does_not_hide_a_slow_connection():
    """A reduction between the ranks of an edge waits for all others: 39 bytes a ns wherever it is,
    and messages of 125, at the slow edge 39, take a fifth of its time.
    """
    members = ((0, 4), (1, 5), (2, 6))
    transfers = Transfers(
        members=(*members, *members), kinds=("p2p message of 8 MB", "embd all_reduce of 262 MB"),
        kind=np.repeat([0, 1], 3), size_bytes=np.repeat([8_000_000, 262_000_000], 3),
        transfer_ns=np.array([67e3, 226e3, 67e3, 6.7e6, 6.7e6, 6.7e6])[:, None] * np.ones(4),
        sum_ns=np.array([1e6, 3.4e6, 1e6, 6.7e6, 6.7e6, 6.7e6])[:, None] * np.ones(4),
        late_ns=np.zeros((7, 4)), quick_ns=np.zeros((7, 4)),
    )  # fmt: skip
    nowhere = np.zeros(3, bool)
    units = Units(
        members=members, unit=np.tile(np.arange(3), 2), transfers=transfers, crosses=nowhere,
        way=nowhere.astype(np.int64),
    )  # fmt: skip
    assert units.values(nowhere)[1] == pytest.approx(np.log(226 / 67))


def test_an_end_without_other_connections_between_hosts_is_to_blame_beside_a_fine_one():
    """Stages 1, 2 and 3 on a host each: what rank 4 sends to rank 0 is fine, rank 8 is the last."""
    members = ((0, 4), (4, 8), (1, 5), (5, 9))
    transfers = Transfers(
        members=members, kinds=("p2p message of 9 MB",), kind=np.zeros(4, dtype=np.int64),
        size_bytes=np.full(4, 9_000_000), sum_ns=np.ones((4, 4)),
        transfer_ns=np.array([1.0, 4.0, 1.0, 1.0])[:, None] * np.ones(4),
        late_ns=np.zeros((10, 4)), quick_ns=np.zeros((10, 4)),
    )  # fmt: skip
    units = Units(
        members=members, unit=np.arange(4), transfers=transfers, crosses=np.ones(4, bool),
        way=np.ones(4, dtype=np.int64),
    )  # fmt: skip
    course = Course(np.ones(4, bool), float(np.log(4.0)), 0.01, 1.0, ((0, 3),))
    worst = Suspect(row=1, course=course, q_value=1e-6)
    over = np.array([0.0, 1.4, 0.0, 0.0])
    assert guilty_end(units, over, (4, 8), worst) == (8,)
    inside = replace(units, crosses=np.zeros(4, bool))
    assert guilty_end(inside, over, (4, 8), worst) == (4, 8)


@pytest.mark.parametrize(("other_ms", "names"), [(1.1, [(4, 8)]), (4.0, [])])
def test_a_slow_link_that_alone_joins_two_clocks_is_shown_by_one_clock(job, other_ms, names):
    """Clocks agree within 5 ms: by them a message of 4.5 ms may be as quick as those of 1.1."""

    def transfer(rank, peer, iteration):
        return 4.5 if (rank, peer) == (4, 8) else 1.1

    seen = observe(job(layout=Layout(dp=4, pp=4), hosts=4, transfer=transfer).timeline())
    bad = replace(seen.alignment, residual_median_ns=2e6, residual_p99_ns=5e6)
    shortest_ns = np.where(seen.transfers.shortest_ns > 4e6, 4.5e6, other_ms * 1e6)
    blurred = replace(
        seen, alignment=bad, transfers=replace(seen.transfers, shortest_ns=shortest_ns)
    )
    found = judge(blurred, DetectorSettings()).findings
    assert [one.ranks for one in found if one.cause == Cause.LINK] == names


def test_one_slow_rail_of_two_hosts_names_both_ends(job):
    """The same GPU of both hosts; their neighbours' rails are fine."""

    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (1, 9) else 1.0

    stages = job(layout=Layout(tp=2, dp=4, pp=2), hosts=8, transfer=transfer)
    (finding,) = stages.report().findings
    assert finding.ranks == (1, 9) and finding.owner == Owner.NODE


@pytest.mark.parametrize(
    ("size", "owner"), [(8, Owner.UNDECIDED), (900_000, Owner.NODE)], ids=["8 bytes", "0.9 MB"]
)
def test_so_few_bytes_show_launches_that_come_late(job, size, owner):
    """A message takes 75 us on one connection and 15 on the others."""

    def transfer(rank, peer, iteration):
        return 0.075 if (rank, peer) == (1, 9) else 0.015

    report = job(
        layout=Layout(tp=2, dp=4, pp=2), hosts=8, transfer=transfer, message_bytes=size
    ).report()
    assert [one.owner for one in report.findings if one.ranks == (1, 9)] == [owner]


SOME_QUICK = np.where((np.arange(20) >= 8) & (np.arange(20) < 13), 1.0, 3.0)


@pytest.mark.parametrize(
    ("own_ms", "others_ms", "by_one_clock_ms", "names"),
    [
        (np.full(20, 3.0), SOME_QUICK, (3.0, 3.0), []),
        (np.full(20, 3.0), 1.0, (3.0, 3.0), []),
        (np.full(20, 3.0), 1.0, (3.0, 1.0), [(4, 5)]),
        (np.where(np.arange(20) >= 8, 3.0, 1.0), 1.0, (3.0, 1.0), [(4, 5)]),
    ],
    ids=["others seem quicker at times", "others seem quicker", "slow", "slow since the eighth"],
)
def test_clocks_that_make_others_quicker_make_no_link_slow(
    job, exchanging, own_ms, others_ms, by_one_clock_ms, names
):
    """Clocks drift, and feign shorter transfers. By one clock they are as long as ever."""
    timeline = job(layout=Layout(tp=2, dp=4), hosts=8).timeline()
    pairs = [
        ((rank, rank + 1), 10**8, own_ms if rank == 4 else others_ms) for rank in range(0, 8, 2)
    ]
    seen = exchanging(timeline, pairs)
    own_ns, others_ns = (1e6 * one for one in by_one_clock_ms)
    shortest_ns = np.array([[own_ns if 4 in one else others_ns] for one, _, _ in pairs])
    shortest_ns = np.broadcast_to(shortest_ns, seen.transfers.transfer_ns.shape)
    clocks = replace(seen.alignment, residual_median_ns=1e3, residual_p99_ns=1e3)
    transfers = replace(seen.transfers, shortest_ns=shortest_ns)
    found = judge(replace(seen, alignment=clocks, transfers=transfers), DetectorSettings()).findings
    assert [one.ranks for one in found if one.cause is Cause.LINK] == names


def _three_units(members, rates, crosses=False):
    """Units of a transfer each, that move so many bytes a ns."""
    transfers = Transfers(
        members=members, kinds=("p2p message of 9 MB",), kind=np.zeros(3, dtype=np.int64),
        size_bytes=np.full(3, 9_000_000), sum_ns=np.ones((3, 4)), late_ns=np.zeros((8, 4)),
        transfer_ns=9e6 / np.array(rates)[:, None] * np.ones((3, 4)), quick_ns=np.zeros((8, 4)),
    )  # fmt: skip
    return Units(
        members=members, unit=np.arange(3), transfers=transfers, crosses=np.full(3, crosses),
        way=np.zeros(3, dtype=np.int64),
    )  # fmt: skip


FIRST_SLOW = Suspect(
    row=0, course=Course(np.ones(4, bool), float(np.log(4.0)), 0.01, 1.0, ((0, 3),)), q_value=1e-6
)


def test_which_member_of_a_group_is_slow_one_group_does_not_tell(job):
    seen = observe(job(layout=Layout(tp=2, dp=4), hosts=2, transfer=lambda *_: 1.0).timeline())
    units = _three_units(((1, 3, 5, 7), (1, 3), (5, 7)), (10.0, 40.0, 40.0))
    fine = np.array([False, True, True])
    assert not _is_isolated(seen, units, fine, (1, 3, 5, 7), FIRST_SLOW)
    assert _is_isolated(seen, units, fine, (1,), FIRST_SLOW)


def test_without_host_names_only_the_same_axis_is_a_witness(job):
    """Links 1-5 and 5-9 are slow: rank 5 has no other message, and fine reductions say nothing."""
    seen = observe(job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).timeline())
    members = replace(seen.members, hosts=("",) * 8, device_index=(-1,) * 8)
    units = _three_units(((1, 5), (1, 2), (5, 6)), (10.0, 40.0, 40.0))
    fine = np.array([False, True, True])
    unknown = replace(seen, members=members)
    other_axis = replace(units, way=np.array([0, 1, 1]))
    assert not _is_isolated(unknown, other_axis, fine, (1, 5), FIRST_SLOW)
    assert _is_isolated(unknown, units, fine, (1, 5), FIRST_SLOW)


@pytest.mark.parametrize(("rate", "is_shown"), [(9.0, False), (40.0, True), (np.inf, False)])
def test_what_carries_less_than_a_slow_link_clears_nobody(job, rate, is_shown):
    """A fine message of rank 5 that moves 9 bytes a ns is bound by something else; of unknown size
    it says nothing either.
    """
    seen = observe(job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).timeline())
    units = _three_units(((1, 5), (1, 2), (5, 6)), (10.0, 40.0, 40.0 if rate == np.inf else rate))
    if rate == np.inf:
        sizes = np.array([9_000_000, 9_000_000, -1])
        units = replace(units, transfers=replace(units.transfers, size_bytes=sizes))
    fine = np.array([False, True, True])
    assert _is_isolated(seen, units, fine, (1, 5), FIRST_SLOW) == is_shown


@pytest.mark.parametrize("is_fine", [False, True])
def test_a_host_all_of_whose_connections_are_slow_is_one_finding(job, exchanging, is_fine):
    """Both pairs of the second of four hosts: it may be built without NVLink."""
    timeline = job(layout=Layout(dp=16), hosts=4).timeline()
    slow = {4} if is_fine else {4, 6}
    pairs = [((rank, rank + 1), 10**8, 16.0 if rank in slow else 2.0) for rank in range(0, 16, 2)]
    (finding,) = judge(exchanging(timeline, pairs), DetectorSettings()).findings
    # one host holds both ends of the pair, and is to be drained whichever it is
    assert finding.owner == (Owner.NODE if is_fine else Owner.UNDECIDED)
    assert finding.ranks == ((4, 5) if is_fine else (4, 5, 6, 7))
    assert any(IN_DOUBT_INSIDE in one for one in finding.evidence) == (not is_fine)


def test_a_pair_with_an_end_that_was_not_recorded_is_undecided(job):
    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) == (5, 9) else 1.0

    pairs = job(layout=Layout(dp=4, pp=4), hosts=16, transfer=transfer, message_bytes=1 << 20)
    seen = observe(pairs.timeline())
    owners = [
        [(one.ranks, one.owner) for one in judge(some, DetectorSettings()).findings]
        for some in (seen, cut(seen, "row", np.delete(np.arange(16), 5)))
    ]
    assert owners == [[((5, 9), Owner.NODE)], [((5, 9), Owner.UNDECIDED)]]


def _groups_of_four(slow_ms):
    return [
        (tuple(range(first, first + 4)), 10**8, slow_ms if first == 8 else 2.0)
        for first in range(0, 16, 4)
    ]


def test_slow_group_inside_a_host_stays_undecided_and_names_its_host(job, exchanging):
    """Which of the four GPUs, one group cannot tell."""
    timeline = job(layout=Layout(tp=4, dp=4), hosts=8).timeline()
    (finding,) = judge(exchanging(timeline, _groups_of_four(6.0)), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((8, 9, 10, 11), Owner.UNDECIDED)
    assert finding.host == "n01" and "host n01" in finding.headline
    assert any("which of its GPUs" in one for one in finding.evidence)


def test_a_slow_group_across_rows_that_stand_for_groups_has_a_name(job):
    """Ranks 1, 3, 5 and 7 share one host, and none of them has a row of its own."""
    seen = observe(job(layout=Layout(tp=2, dp=4)).timeline())
    merged = one_row_a_worker(replace(seen, splits_tensor_groups=False))
    link = SimpleNamespace(ranks=(1, 3, 5, 7), are_told=False, is_pair=False)
    assert _subject(merged, link, ()) == "the group of ranks 1, 3, 5 and 7 (host n00)"


@pytest.mark.parametrize(("large_ms", "named"), [(9.0, []), (20.0, [(0, 1)])])
def test_what_takes_no_time_says_nothing_of_a_link(job, exchanging, large_ms, named):
    """A few bytes take 20 times as long where a host launches late: no connection is slow."""
    timeline = job(layout=Layout(tp=2, dp=4), hosts=1).timeline()
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    large = [(pair, 33_554_432, large_ms if pair == (0, 1) else 9.0) for pair in pairs]
    small = [(pair, 4, 0.2 if pair == (0, 1) else 0.01) for pair in pairs]
    report = judge(exchanging(timeline, [*large, *small]), DetectorSettings())
    assert [one.ranks for one in report.findings] == named


def test_small_messages_that_are_late_in_one_group_are_not_compared():
    """131 kB beside 9.3 ms of 33.6 MB take 0.15 ms in one group, and 3 ms in the other."""
    kinds = ("tp all_reduce of 33 MB", "tp broadcast of 131 kB", "mp all_reduce of 4 bytes")
    kind, total = np.array([0, 0, 1, 1, 2]), np.array([9.3e6, 9.3e6, 3.0e6, 0.15e6, 1e4])
    assert _worth_comparing(kind, kinds, total).tolist() == [True, True, False, False, True]
    assert usual_total(kind, 3, total).tolist() == [9.3e6, 0.15e6, 1e4]


def test_rings_that_move_much_are_compared_however_short_they_are_beside_slow_ones(job, exchanging):
    """The rings of stage 0 take four times as long by the byte; those of stage 1, 5 % of all time
    and 38 % of all bytes, show it.
    """
    timeline = job(layout=Layout(tp=4, pp=2, dp=2), hosts=4).timeline()
    slow = [((rank, rank + 4), 793_000_000, 144.0) for rank in range(4)]
    quick = [((rank, rank + 4), 478_000_000, 11.0) for rank in range(8, 12)]
    kinds = ("dp reduce_scatter of 793 MB", "dp reduce_scatter of 478 MB")
    kind = np.repeat([0, 1], 4)
    time_ns = np.array([one[2] for one in slow + quick])
    moved = np.array([float(one[1]) for one in slow + quick])
    assert _worth_comparing(kind, kinds, time_ns).tolist() == [True] * 4 + [False] * 4
    assert _worth_comparing(kind, kinds, moved).all()
    seen = exchanging(timeline, [*slow, *quick]).transfers
    assert set(seen.size_bytes.tolist()) == {793_000_000, 478_000_000}


def test_slow_group_of_two_hosts_stays_undecided(job, exchanging):
    timeline = job(layout=Layout(tp=4, dp=4), hosts=2).timeline()
    (finding,) = judge(exchanging(timeline, _groups_of_four(6.0)), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((8, 9, 10, 11), Owner.UNDECIDED)


def test_processes_on_cpus_have_no_link_inside_their_host(job, exchanging):
    timeline = job(layout=Layout(tp=4, dp=4), hosts=8, device="cpu").timeline()
    (finding,) = judge(exchanging(timeline, _groups_of_four(12.0)), DetectorSettings()).findings
    assert finding.owner == Owner.UNDECIDED


def test_clocks_that_agree_badly_elsewhere_do_not_excuse_a_group_of_one_host(job, exchanging):
    """4 ms lost, clocks within 5 ms in the worst hundredth and 1 us typically."""
    timeline = job(layout=Layout(tp=4, dp=4), hosts=8).timeline()
    seen = exchanging(timeline, _groups_of_four(6.0))
    bad = replace(seen.alignment, residual_median_ns=1e3, residual_p99_ns=5e6)
    (finding,) = judge(replace(seen, alignment=bad), DetectorSettings()).findings
    assert finding.ranks == (8, 9, 10, 11)


def test_devices_that_all_differ_are_those_of_one_host(job):
    members = observe(job(layout=Layout(tp=4, dp=2)).timeline()).members
    nameless = replace(members, hosts=("",) * 8)
    assert nameless.are_inside_a_host((0, 1, 2, 3))
    twice = replace(nameless, device_index=(0, 1, 2, 3) * 2)
    assert not twice.are_inside_a_host((0, 1, 2, 3))


class _Cost:
    """Every finding costs the same."""

    def __init__(self, ratio):
        self.ratio = lambda *_, **__: ratio
        self.ratio_of_transfers = lambda ranks, slowdown, within: ratio


@pytest.mark.parametrize(
    ("factor", "size", "num", "owner"),
    [
        (1.3, 1 << 20, 20, Owner.UNDECIDED),
        (1.6, 1 << 20, 20, Owner.NODE),
        (1.6, 1 << 20, 8, Owner.UNDECIDED),
        (1.9, 1 << 20, 8, Owner.NODE),
        (1.9, 8, 20, Owner.UNDECIDED),  # costs nothing, and 8 bytes show when they were launched
    ],
)
def test_a_link_that_is_slower_by_a_third_may_always_meet_others(job, factor, size, num, owner):
    def transfer(rank, peer, iteration):
        return factor if (rank, peer) == (5, 9) else 1.0

    stages = job(
        layout=Layout(dp=4, pp=4), hosts=4, transfer=transfer, message_bytes=size, iterations=num
    )
    (finding,) = stages.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((5, 9), Cause.LINK, owner)


@pytest.mark.parametrize(("often", "owner"), [(3, Owner.UNDECIDED), (20, Owner.NODE)])
def test_a_link_as_slow_as_others_are_now_and_then_may_share_their_port(job, often, owner):
    """All other pairs take as long in one iteration of three, or of twenty, each in its own."""

    def transfer(rank, peer, iteration):
        meets = (iteration + rank) % often == 0
        return 2.0 if (rank, peer) == (5, 9) or meets else 1.0

    stages = job(
        layout=Layout(dp=4, pp=4), hosts=4, transfer=transfer, message_bytes=1 << 20, iterations=20
    )
    (finding,) = [one for one in stages.report().findings if one.ranks == (5, 9)]
    assert (finding.cause, finding.owner) == (Cause.LINK, owner)
    shared = [one for one in finding.evidence if "find it free or taken" in one]
    assert bool(shared) == (owner is Owner.UNDECIDED)


def test_link_that_comes_and_goes_and_costs_nothing_is_undecided(job):
    """Messages that share a NIC find it free or taken."""

    def transfer(rank, peer, iteration):
        return 2.0 if (rank, peer) == (5, 9) and iteration % 10 < 5 else 1.0

    seen = observe(job(layout=Layout(dp=4, pp=4), hosts=4, transfer=transfer).timeline())
    owners = [
        [one.owner for one in judge(replace(seen, costs=_Cost(ratio)), DetectorSettings()).findings]
        for ratio in (1.0, 1.05)
    ]
    assert owners == [[Owner.UNDECIDED], [Owner.NODE]]


def test_group_that_loses_what_another_stages_loses_waits_for_it(job, exchanging):
    """Sizes are unknown: the last stage's reductions end with one over the stages. That of rail 3
    loses 12 of 39 ms there, the 12 ms that it loses in the first stage.
    """
    ms = {0: 5.0, 1: 27.0}
    units = [
        ((8 * stage + rail, 8 * stage + 4 + rail), -1, ms[stage] + 12.0 * (rail == 3))
        for stage in range(2) for rail in range(4)
    ]  # fmt: skip
    timeline = job(layout=Layout(tp=4, dp=2, pp=2), hosts=8).timeline()
    seen = exchanging(timeline, units)
    by_stage = replace(
        seen.transfers, kind=np.repeat([0, 1], 4), kinds=("dp all_reduce of unknown size",) * 2
    )
    found = judge(replace(seen, transfers=by_stage), DetectorSettings()).findings
    assert [one.ranks for one in found] == [(3, 7)]


def test_rings_one_of_which_waits_for_the_other_tell_no_end_of_a_pair(job, exchanging):
    """Messages (1, 5) take three times as long. The odd ring of either stage, of unknown size,
    lasts 90 ms longer, and one of them waits for the other: nobody knows which.
    """
    timeline = job(layout=Layout(tp=2, dp=2, pp=2), hosts=1).timeline()
    messages = [((one, one + 4), 10**8, 6.0 if one == 1 else 2.0) for one in range(4)]
    rings = [((0, 2), -1, 150.0), ((1, 3), -1, 240.0), ((4, 6), -1, 190.0), ((5, 7), -1, 280.0)]
    seen = exchanging(timeline, messages + rings)
    kinds = ("p2p message of 100 MB", *["dp all_reduce of unknown size"] * 2)
    by_stage = replace(seen.transfers, kind=np.repeat([0, 1, 2], [4, 2, 2]), kinds=kinds)
    found = judge(replace(seen, transfers=by_stage), DetectorSettings()).findings
    assert (1, 5) in [one.ranks for one in found]
    assert not any(one.owner is Owner.NODE for one in found)


def test_the_ring_whose_member_is_slow_elsewhere_is_not_the_one_that_waits(job, exchanging):
    """The TP group of ranks 4 to 7 is four times as slow as others. The rings (2, 6) and (10, 14)
    of two stages, of unknown sizes, lose 20 ms each: 6 is slow, and the other stage waits.
    """
    timeline = job(layout=Layout(tp=4, dp=2, pp=2), hosts=8).timeline()
    groups = [
        (tuple(range(first, first + 4)), 10**8, 1.6 if first == 4 else 0.4)
        for first in range(0, 16, 4)
    ]
    rings = [
        ((8 * stage + rail, 8 * stage + 4 + rail), -1, own + 20.0 * (rail == 2))
        for stage, own in ((0, 8.5), (1, 42.0)) for rail in range(4)
    ]  # fmt: skip
    seen = exchanging(timeline, groups + rings)
    kinds = ("tp all_reduce of 100 MB", *["dp all_reduce of unknown size"] * 2)
    by_stage = replace(seen.transfers, kind=np.repeat([0, 1, 2], 4), kinds=kinds)
    found = judge(replace(seen, transfers=by_stage), DetectorSettings()).findings
    named = [one.ranks for one in found if one.owner is Owner.NODE]
    assert named == [(6,)]


def _slow_from_1_to_5(job):
    """Four stages of four replicas, and the finding that the link between ranks 1 and 5 is slow."""

    def transfer(rank, peer, iteration):
        return 3.0 if (rank, peer) == (1, 5) else 1.0

    run = job(layout=Layout(dp=4, pp=4), transfer=transfer)
    (link,) = [one for one in run.report().findings if one.cause == Cause.LINK]
    return observe(run.timeline()), link


@pytest.mark.parametrize(
    ("cost", "slow_row", "owner"),
    [
        (1.002, 9, Owner.UNDECIDED),  # another stage of the same replica
        (1.002, 10, Owner.NODE),  # another replica
        (1.02, 9, Owner.NODE),  # that is no wait for others
    ],
)
def test_a_link_that_costs_nothing_beside_a_slow_rank_of_its_pipeline(job, cost, slow_row, owner):
    """Messages that are posted together end together."""
    seen, link = _slow_from_1_to_5(job)
    slow = np.arange(16) == slow_row
    known = replace(link, owner=Owner.NODE, step_time_cost_ratio=cost)
    assert _undecided_beside_heavier(seen, known, [known], slow).owner is owner
    heavier = replace(known, ranks=(slow_row,), step_time_cost_ratio=1.01)
    assert _undecided_beside_heavier(seen, known, [known, heavier], slow & False).owner is owner


@pytest.mark.parametrize(
    ("rank", "cost", "is_explained"), [(13, 1.05, True), (14, 1.05, False), (13, 1.3, False)]
)
def test_who_leaves_late_behind_a_slow_link_of_its_pipeline(job, rank, cost, is_explained):
    seen, link = _slow_from_1_to_5(job)
    link = replace(link, step_time_cost_ratio=1.2)
    late = replace(link, ranks=(rank,), step_time_cost_ratio=cost)
    assert _waits_behind(seen, late, link) == is_explained
    assert not _waits_behind(seen, replace(late, cause=Cause.COMPUTE), link)


@pytest.mark.parametrize(
    ("slow_ms", "starved", "owner"),
    [
        (0.15, 0.8, Owner.UNDECIDED),
        (0.15, 0.6, Owner.UNDECIDED),  # it costs nothing
        (0.15, 0.05, Owner.NODE),
        (1.5, 0.8, Owner.NODE),
    ],
    ids=["late launches", "half of them late", "fed", "far slower"],
)
def test_what_late_launches_explain_is_no_links_fault(job, exchanging, slow_ms, starved, owner):
    """80 us more a message, to a device that waits for its host."""
    timeline = job(layout=Layout(dp=8), hosts=8).timeline()
    pairs = [((rank, other), 10**6, slow_ms if (rank, other) == (0, 1) else 0.07)
             for rank in range(8) for other in range(rank + 1, 8)]  # fmt: skip
    share = np.where(np.arange(8)[:, None] == 1, starved, 0.05) * np.ones((8, 20))
    seen = exchanging(timeline, pairs, starved_share=share)
    (link,) = [one for one in judge(seen, DetectorSettings()).findings if one.cause is Cause.LINK]
    assert (link.ranks, link.owner) == ((0, 1), owner)


def test_pairs_at_one_place_are_the_place_whatever_else_is_slow_with_them(job, exchanging):
    """Broadcasts within the TP groups of the last stage take longer than those of the first; a
    larger group that holds one of the two pairs is slow as well.
    """
    timeline = job(layout=Layout(tp=2, dp=2, pp=2), hosts=8).timeline()
    slow = {(4, 5): 64.0, (6, 7): 58.0}
    pairs = [((rank, rank + 1), 10**8, slow.get((rank, rank + 1), 13.0)) for rank in (0, 2, 4, 6)]
    seen = exchanging(timeline, pairs)
    links = [one for one in judge(seen, DetectorSettings()).findings if one.cause is Cause.LINK]
    assert links
    assert all(one.owner is Owner.UNDECIDED for one in links)


def _messages_of_stages(slow_ms):
    """Messages between four stages of four ranks (TP2, DP2) of one host, 10 ms each; those of the
    first TP ranks from the first stage to the second take `slow_ms`, by replica.
    """
    slow = {(0, 4): slow_ms[0], (2, 6): slow_ms[1]}
    pairs = [(rank, rank + 4) for rank in range(12)]
    return [(pair, 10**8, slow.get(pair, 10.0)) for pair in pairs]


@pytest.mark.parametrize(("slow_ms", "is_place"), [((32.0, 33.0), True), ((32.0, 10.0), False)])
def test_pairs_at_one_place_of_all_replicas_are_rather_the_place(
    job, exchanging, slow_ms, is_place
):
    """The first TP ranks load and log, as the others need not."""
    timeline = job(layout=Layout(tp=2, dp=2, pp=4), hosts=16).timeline()
    seen = exchanging(timeline, _messages_of_stages(slow_ms))
    links = [one for one in judge(seen, DetectorSettings()).findings if one.cause is Cause.LINK]
    assert {one.ranks for one in links} == ({(0, 4), (2, 6)} if is_place else {(0, 4)})
    assert all((IN_DOUBT_PLACE in one.evidence) == is_place for one in links)


@pytest.mark.parametrize(
    ("num_slow", "num", "is_few"), [(3, 4, True), (4, 4, False), (9, 12, False)]
)
def test_a_pair_that_is_not_slow_in_each_of_few_iterations_may_have_met_others(
    job, exchanging, num_slow, num, is_few
):
    timeline = job(layout=Layout(dp=8), hosts=8, iterations=num).timeline()
    slow_ms = np.where(np.arange(num) < num_slow, 20.0, 10.0)
    pairs = [((rank, other), 10**8, slow_ms if (rank, other) == (0, 1) else 10.0)
             for rank in range(8) for other in range(rank + 1, 8)]  # fmt: skip
    found = judge(exchanging(timeline, pairs), DetectorSettings()).findings
    (link,) = [one for one in found if one.cause is Cause.LINK]
    assert link.ranks == (0, 1)
    assert (FEW in link.evidence, link.owner is Owner.UNDECIDED) == (is_few, is_few)


@pytest.mark.parametrize(
    ("ranks", "units", "rings_ns", "mates", "is_told"),
    [
        ((2,), ((2, 10),), 0.0, (), False),
        ((2,), ((2, 10), (2, 3)), 0.0, (), True),
        ((2,), ((2, 10),), 18e6, (), True),  # and a ring without transfer times
        ((2,), ((2, 10),), 0.0, (2, 3), True),  # and passes of its TP pair
        ((2, 10), ((2, 10), (2, 10)), 0.0, (), False),
    ],
)
def test_two_connections_that_share_one_rank_tell_it_twice(ranks, units, rings_ns, mates, is_told):
    link = SimpleNamespace(ranks=ranks, units=units, rings_ns=rings_ns, mates=mates, are_told=False)
    assert _is_told_twice(link) is is_told


@pytest.mark.parametrize(
    ("factor", "size", "owner"),
    [(1.3, 10**9, Owner.NODE), (1.3, 10**8, Owner.UNDECIDED), (1.8, 10**8, Owner.NODE)],
)
def test_a_rank_told_twice_may_be_slower_by_a_third(job, exchanging, factor, size, owner):
    """By what a port might do to one connection, if that costs something."""
    timeline = job(layout=Layout(dp=8), hosts=8, iterations=12).timeline()
    usual_ms = size / 10**8
    pairs = [
        ((rank, other), size, usual_ms * (factor if 1 in (rank, other) else 1.0))
        for rank in range(8)
        for other in range(rank + 1, 8)
    ]
    found = judge(exchanging(timeline, pairs), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found if one.cause is Cause.LINK] == [((1,), owner)]


def test_links_are_judged_where_no_ranks_computing_can_be_compared(job, exchanging):
    """Ranks that all launch other kernels than the others, as on data of their own."""
    timeline = job(layout=Layout(dp=8), hosts=8, iterations=12).timeline()
    seen = exchanging(timeline, [((rank, rank + 1), 10**9, 40.0 if rank == 4 else 10.0)
                                 for rank in range(0, 8, 2)])  # fmt: skip
    nothing = replace(seen.work, log_ns=np.full_like(seen.work.log_ns, np.nan))
    report = judge(replace(seen, work=nothing, layers=None, history=None), DetectorSettings())
    assert [(one.ranks, one.cause) for one in report.findings] == [((4, 5), Cause.LINK)]
    quick = [((rank, rank + 1), 10**9, 10.0) for rank in range(0, 8, 2)]
    seen = exchanging(timeline, quick)
    report = judge(replace(seen, work=nothing, layers=None, history=None), DetectorSettings())
    assert not report.findings
    assert report.verdict is Verdict.UNDECIDED


def test_transfers_of_the_warm_up_are_no_part_of_what_transfers_take(job):
    """The first message of two ranks sets up their connection, for a second and more."""

    def first_is_long(one, other, iteration):
        return 1000.0 if iteration <= 2 else 1.0

    pair = job(layout=Layout(pp=2), first_iteration=1, noise=0.0)
    totals = [
        steady(observe(one.timeline()), DetectorSettings()).transfers.total_ns
        for one in (pair.but(transfer=first_is_long), pair.but(transfer=lambda *_: 1.0))
    ]
    assert totals[0] == pytest.approx(totals[1])


def test_transfers_that_take_no_time_by_clocks_that_are_off_are_not_slow(monkeypatch):
    """Clocks are off by more than a transfer takes, so the typical one ends when it begins."""
    monkeypatch.setattr("detect.causes.slow_links.typical_times", lambda units, suspect: (0.0, 5e4))
    seen = SimpleNamespace(
        alignment=SimpleNamespace(residual_median_ns=1e5, residual_p99_ns=1e6),
        members=SimpleNamespace(are_inside_a_host=lambda ranks: True),
    )
    units, suspect = SimpleNamespace(members=[(0, 1)]), SimpleNamespace(row=0)
    assert not _exceeds_clock_errors(seen, units, suspect)
