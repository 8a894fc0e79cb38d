"""Which member of a slow pair or group is to blame, told by what else its members do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes import connections
from detect.causes.connections import (
    Units,
    guilty_end,
    lost_in_rings,
    met_by_mates,
    told_by_elimination,
    where_groups_meet,
)
from detect.causes.slow_links import links_at_fault
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.transfers import Transfers, UntimedIn
from detect.observe.warmup import steady
from detect.stats.search import Suspect
from detect.stats.stretches import Course
from megascan.topology import Layout


def units_of(members, times, sizes, untimed=()):
    """Return connections between hosts, of a kind each where sizes differ."""
    kinds = tuple(dict.fromkeys((len(ranks), size) for ranks, size in zip(members, sizes)))  # noqa: B905
    num = len(members)
    transfers = Transfers(
        members=members,
        kinds=tuple("dp all_reduce of 9 MB" for _ in kinds),
        kind=np.array([kinds.index((len(r), s)) for r, s in zip(members, sizes)]),  # noqa: B905
        size_bytes=np.array(sizes),
        transfer_ns=np.array(times)[:, None] * np.ones(4),
        sum_ns=np.ones((num, 4)),
        late_ns=np.zeros((16, 4)),
        quick_ns=np.zeros((16, 4)),
        untimed=untimed,
    )
    return Units(
        members=members,
        unit=np.arange(num),
        transfers=transfers,
        crosses=np.ones(num, bool),
        way=np.ones(num, dtype=np.int64),
    )


def suspect(row, factor=3.0):
    course = Course(np.ones(4, bool), float(np.log(factor)), 0.01, 1.0, ((0, 3),))
    return Suspect(row=row, course=course, q_value=1e-6)


GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7), (1, 5, 9, 13), (2, 6, 10, 14))


def test_the_rank_in_which_two_slow_groups_meet():
    units = units_of(GROUPS, [3e6, 1e6, 3e6, 1e6], [9_000_000] * 4)
    fine = np.array([False, True, False, True])
    assert where_groups_meet(units, fine, [suspect(0), suspect(2)]) == (1,)
    assert where_groups_meet(units, fine, [suspect(0)]) == ()  # one group tells of no member


def test_groups_that_share_two_ranks_or_none_meet_nowhere():
    members = ((0, 1, 2, 3), (1, 2, 9, 13), (8, 9, 10, 11))
    units = units_of(members, [3e6] * 3, [9_000_000] * 3)
    nobody = np.zeros(3, bool)
    assert where_groups_meet(units, nobody, [suspect(0), suspect(1)]) == ()
    assert where_groups_meet(units, nobody, [suspect(0), suspect(2)]) == ()


def test_a_rank_with_a_quick_connection_is_not_where_groups_meet():
    members = ((0, 1, 2, 3), (1, 5, 9, 13), (1, 8))
    units = units_of(members, [3e6, 3e6, 0.1e6], [9_000_000] * 3)
    fine = np.array([False, False, True])
    assert where_groups_meet(units, fine, [suspect(0), suspect(1)]) == ()


def ring(members, ms, what="dp_cp reduce_scatter", size=485_490_688):
    return UntimedIn(members, what, size, crosses=True, shortest_ns=ms * 1e6)


RINGS = (
    ring((0, 4, 8, 12), 27.3),
    ring((1, 5, 9, 13), 9.5),
    ring((2, 6, 10, 14), 9.5),
    ring((16, 20, 24, 28), 9.6),
)


def test_rings_without_transfer_times_tell_the_end_of_a_pair():
    """Messages of (12, 28) take 2.9 times as long; so does the ring with 12, not that with 28."""
    units = units_of(((12, 28), (13, 29)), [1.26e6, 0.43e6], [16_777_216] * 2, RINGS)
    over = np.array([1.07, 0.0])
    worst = suspect(0, 2.9)
    assert lost_in_rings(units, 12, (12, 28), worst) == pytest.approx(17.8e6)
    assert lost_in_rings(units, 28, (12, 28), worst) == 0.0
    assert guilty_end(units, over, (12, 28), worst) == (12,)
    # rings that are a little longer, or have no equals, tell nothing
    little = replace(units.transfers, untimed=(ring((0, 4, 8, 12), 11.0), *RINGS[1:]))
    alone = replace(units.transfers, untimed=RINGS[:1])
    for transfers in (little, alone):
        assert guilty_end(replace(units, transfers=transfers), over, (12, 28), worst) == (12, 28)


def test_a_ring_without_equals_acquits_an_end_if_it_carries_far_more():
    """Messages of (3, 9) carry 10.6 bytes a ns; the ring of 9 and five others 76, or too few."""
    members, sizes = ((3, 9), (2, 8), (6, 7, 8, 9, 10, 11)), [167_772_160] * 2 + [3_903_324_160]
    over = np.array([1.4, 0.0, np.nan])
    quick = units_of(members, [15.8e6, 4.0e6, 85e6], sizes)
    assert guilty_end(quick, over, (3, 9), suspect(0, 4.0)) == (3,)
    slow = units_of(members, [15.8e6, 4.0e6, 300e6], sizes)
    assert guilty_end(slow, over, (3, 9), suspect(0, 4.0)) == (3, 9)


@pytest.mark.parametrize(
    ("slow_ms", "places", "ends"),
    [
        (18.0, (0, 1), (0,)),  # beside 9 ms of its siblings
        (10.0, (0, 1), (0, 12)),
        (18.0, (0, 0), (0, 12)),  # no siblings: the equals are on the same hosts as all others
        (18.0, None, (0, 12)),  # nobody knows who is
    ],
)
def test_a_ring_that_is_slow_beside_those_on_the_same_hosts_tells_the_end(slow_ms, places, ends):
    """All rings of the other hosts take as long, where they share fewer ports."""
    firsts = [(first, first + 4, first + 8) for first in (0, 1, 2, 3, 12, 13, 14, 15)]
    members = ((0, 12), (1, 13), *firsts)
    times = [9e6, 4.4e6, slow_ms * 1e6, *[9e6] * 3, *[18.5e6] * 4]
    units = units_of(members, times, [167_772_160] * 2 + [500_000_000] * 8)
    over = np.log([9 / 4.4, 1.0, *[one / 18e6 for one in times[2:]]])
    if places is not None:
        place = np.array([5, 5, *[places[0]] * 4, *[places[1]] * 4])
        units = replace(units, place=place)
    assert guilty_end(units, over, (0, 12), suspect(0, 2.0)) == ends


@pytest.mark.parametrize(
    ("num_pairs", "usual_ms", "slow_ms", "owner"),
    [
        (8, 30.0, 120.0, Owner.NODE),
        (2, 30.0, 120.0, Owner.NODE),
        (2, 30.0, 48.0, Owner.UNDECIDED),
        (8, 1.0, 4.0, Owner.UNDECIDED),
    ],
)
def test_a_pair_inside_a_host_names_that_host(job, exchanging, num_pairs, usual_ms, slow_ms, owner):
    """Beside several equal pairs, or far slower than the only one; one of its ends is sound, so not
    where it costs little.
    """
    timeline = job(layout=Layout(dp=2 * num_pairs), hosts=8).timeline()
    pairs = [
        ((rank, rank + 1), 10**8, slow_ms if rank == 2 else usual_ms)
        for rank in range(0, 2 * num_pairs, 2)
    ]
    found = judge(exchanging(timeline, pairs), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found if one.cause is Cause.LINK] == [((2, 3), owner)]


RINGS_OF_TWO_HOSTS = tuple(tuple(range(first, first + 8, 2)) for first in (0, 1, 8, 9))


@pytest.mark.parametrize(
    ("longer", "named", "left"),
    [
        ((4, 5), (5,), []),  # of ring and passes together it is the only rank
        ((), (1, 3, 5, 7), []),
        ((4, 5, 6, 7), (1, 3, 5, 7), [(4, 5), (6, 7)]),  # two of the ring
        ((12, 13), (1, 3, 5, 7), [(12, 13)]),  # none of it
    ],
)
def test_passes_in_which_mates_exchange_unseen_tell_the_rank_of_a_slow_ring(
    job, exchanging, longer, named, left
):
    """The ring of ranks 1, 3, 5 and 7 takes five times as long, and passes of some TP pairs 1.4."""

    def work(slot):
        return 1.4 if slot.name != "optimizer" and slot.rank in longer else 1.0

    timeline = job(layout=Layout(tp=2, dp=8), hosts=8, work=work).timeline()
    rings = [(ring, 10**9, 20.0 if ring[0] == 1 else 4.0) for ring in RINGS_OF_TWO_HOSTS]
    seen = replace(exchanging(timeline, rings), splits_tensor_groups=False)
    found = judge(seen, DetectorSettings()).findings
    (link,) = [one for one in found if one.cause is Cause.LINK]
    assert link.ranks == named
    assert link.owner is (Owner.NODE if len(named) == 1 else Owner.UNDECIDED)
    assert sorted(one.ranks for one in found if one is not link) == left


@pytest.mark.parametrize(
    ("groups", "met"),
    [
        (((12, 13),), ((13,), (12, 13))),
        (((12, 13), (14, 15)), ((), ())),
        (((2, 3),), ((), ())),
        ((), ((), ())),
    ],
)
def test_one_member_alone_is_met_by_mates(groups, met):
    assert met_by_mates((9, 11, 13, 15), groups) == met


@pytest.mark.parametrize(
    ("group_ms", "owner"), [(5.0, Owner.NODE), (20.0, Owner.UNDECIDED)], ids=["wire", "port"]
)
def test_a_pair_in_a_slow_group_is_the_port_of_one_of_them(job, exchanging, group_ms, owner):
    """Messages of ranks 4 and 5 take four times as long; so do those of 4 to 7, or not."""
    timeline = job(layout=Layout(dp=16), hosts=8).timeline()
    pairs = [((rank, rank + 1), 10**9, 20.0 if rank == 4 else 5.0) for rank in range(0, 16, 2)]
    groups = [
        (tuple(range(first, first + 4)), 10**9, group_ms if first == 4 else 5.0)
        for first in range(0, 16, 4)
    ]
    found = judge(exchanging(timeline, [*pairs, *groups]), DetectorSettings()).findings
    (link,) = [one for one in found if one.cause is Cause.LINK]
    assert (link.ranks, link.owner) == ((4, 5), owner)


@pytest.mark.parametrize(
    ("first", "ends"), [(0.7, (8,)), (2.6, (4, 8))], ids=["0.7 ms", "as slow in these iterations"]
)
def test_an_end_is_acquitted_by_what_is_fine_while_its_pair_is_slow(job, first, ends):
    """Of eight iterations messages 4-8 take ten times as long in three; mostly both are quick."""
    members = ((0, 4), (4, 8), (1, 5), (5, 9))
    timeline = job(layout=Layout(dp=4, pp=3), hosts=4).timeline()
    seen = steady(observe(timeline), DetectorSettings())
    slow = np.arange(len(seen.iterations)) % 3 == 0
    times = np.full((4, len(slow)), 0.7e6)
    times[:2, slow] = np.array([[first], [7.0]]) * 1e6
    transfers = Transfers(
        members=members, kinds=("p2p message of 13 MB",), kind=np.zeros(4, dtype=np.int64),
        size_bytes=np.full(4, 12_600_000), transfer_ns=times, sum_ns=times,
        late_ns=np.zeros((12, len(slow))), quick_ns=np.zeros((12, len(slow))),
    )  # fmt: skip
    units = connections.units_of(transfers, seen.members)
    course = Course.of(slow, float(np.log(10.0)), 0.01)
    worst = Suspect(row=units.members.index((4, 8)), course=course, q_value=1e-6)
    (link,) = links_at_fault(seen, units, np.ones(4, bool), (worst,))
    assert link.ranks == ends


@pytest.mark.parametrize(
    ("others", "owner"),
    [((), Owner.NODE), ((((0, 1, 2, 3, 4, 5, 6, 7), 10**9, 20.0),), Owner.UNDECIDED)],
    ids=["alone", "beside a ring"],
)
def test_a_pair_between_hosts_is_named_where_its_ports_serve_nothing_else(
    job, exchanging, others, owner
):
    """What else runs through either port and has no equal may be slow as well, or not."""
    timeline = job(layout=Layout(dp=8), hosts=4).timeline()
    sent = [((rank, rank + 4), 10**8, 80.0 if rank == 2 else 20.0) for rank in range(4)]
    found = judge(exchanging(timeline, [*sent, *others]), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found if one.cause is Cause.LINK] == [((2, 6), owner)]


TWO_RINGS = (tuple(range(8)), tuple(range(8, 16)))
EIGHT_MESSAGES = tuple((rank, rank + 8) for rank in range(8))


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        ((0, 2, 3), (0, 1)),  # the first ring, and messages of 0 and 1
        ((0,), ()),  # all are acquitted by their messages
        ((2, 3), ()),  # and by their rings
        ((0, 1, 2, 3), ()),  # both rings: either end
    ],
    ids=["ring and messages", "ring", "messages", "both rings"],
)
def test_who_is_left_when_all_with_a_fine_connection_are_acquitted(slow, told):
    members = (*TWO_RINGS, *EIGHT_MESSAGES)
    times = np.array([16e6] * 2 + [1.8e6] * 8)
    times[list(slow)] *= 4.0
    units = units_of(members, times.tolist(), [172_000_000] * 2 + [33_600_000] * 8)
    fine = np.ones(10, bool)
    fine[list(slow)] = False
    found = told_by_elimination(units, fine, [suspect(one, 4.0) for one in slow])
    assert found == told


@pytest.mark.parametrize(
    ("slow", "names"),
    [((0, 1), [((0, 1), "everything that ranks 0 and 1 (host n00) send")]), ((), [])],
)
def test_two_ranks_of_a_host_that_are_each_told_are_one_finding(job, exchanging, slow, names):
    """Their messages and the ring of their stage; mending one gains nothing beside the other."""
    timeline = job(layout=Layout(dp=8, pp=2), hosts=4, iterations=12).timeline()
    rings = [(one, 10**9, 80.0 if {*slow} & {*one} else 20.0) for one in TWO_RINGS]
    messages = [(one, 10**8, 8.0 if {*slow} & {*one} else 2.0) for one in EIGHT_MESSAGES]
    found = judge(exchanging(timeline, [*rings, *messages]), DetectorSettings()).findings
    links = [one for one in found if one.cause is Cause.LINK]
    assert [one.ranks for one in links] == [ranks for ranks, _ in names]
    assert all(one.owner is Owner.NODE and not one.is_pair for one in links)
    assert all(words in one.headline for one, (_, words) in zip(links, names, strict=True))
