"""Tell which connections make the slow edges and groups slow, by elimination.

A rank is named alone only if at least two of its edges or groups are slow and next to none of its
others is fine; otherwise the ranks that all the slow groups share, otherwise the smallest slow
group. Example: of {0,4}, {1,5}, {4,8}, {5,9} the edges {0,4} and {4,8} are slow: rank 4.

    links_at_fault    the slow connections (`SlowLink`), the worst first
    _blamed           the ranks that slow units share, or less by what `connections.py` tells
    _whole_host, _several_of_a_host   all inside a host, or several of its ranks
    _is_isolated, _is_inside   whether nothing else than these ranks, or their host, is left
    _exceeds_clock_errors, clock_error_ns   whether clocks that are off may feign the loss
    _waits_for, _is_settled   groups that lose time only for another stage's group
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.connections import (
    Units,
    guilty_end,
    lost_in_rings,
    met_by_mates,
    row_of,
    told_by_elimination,
    typical_times,
    where_groups_meet,
)
from detect.observe.observations import Observations
from detect.report import ClockAgreement
from detect.stats import robust
from detect.stats.search import Suspect
from detect.stats.stretches import Course
from detect.thresholds.networks import LINKS, NETWORKS
from megascan.arrays import Flags, Floats, mask_of


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """One bad connection: `ranks` is one (its NIC or host), two (a pair) or a group."""

    ranks: tuple[int, ...]
    course: Course
    q_value: float
    units: tuple[tuple[int, ...], ...]
    """Members of the edges and groups that are slow because of it."""
    num_peers: int
    kind: str
    size_bytes: int
    """Of one transfer of that kind; -1 where it was not recorded."""
    normal_ns: float
    actual_ns: float
    excess_ns: Floats
    """(iteration,): transfer time lost."""
    is_isolated: bool
    """Whether other connections, which are fine, leave these ranks alone to blame."""
    is_deduced: bool = False
    """Whether no other connection of these ranks leaves them alone to blame: they are where slow
    groups meet."""
    is_inside: bool = False
    """Whether they are a pair inside a host of which nothing tells the end."""
    rings_ns: float = 0.0
    """What collectives that have no transfer time lose besides in an iteration."""
    mates: tuple[int, ...] = ()
    """The group of the only rank named, where longer passes of that group told which it is."""
    are_told: bool = False
    """Whether there are several ranks, of one host, each of which is told by itself."""

    @property
    def is_pair(self) -> bool:
        """Return whether it is the connection of two ranks."""
        return len(self.ranks) == 2 and not self.are_told


def links_at_fault(
    seen: Observations,
    units: Units,
    compared: Flags,
    suspects: tuple[Suspect, ...],
    mates: tuple[tuple[int, ...], ...] = (),
) -> list[SlowLink]:
    """Return the connections that make the suspected units slow, the worst unit's first. `mates`
    are groups whose ranks all have longer passes, in which they exchange unseen.

    Of two groups that lose the same, one of which waits for the other, neither tells which end of
    another connection is slow, unless one of the two alone has a member in what else is slow.
    Example: of the slow pair (5, 13) each end is in a ring of its stage that lasts 94 ms longer
    than an equal one, of unknown size, and nobody knows which ring waits.
    """
    left = [one for one in suspects if _exceeds_clock_errors(seen, units, one)]
    # what loses too little to be named tells where a slow group meets it, by one clock
    beside = [one for one in suspects if one not in left and _is_long_by_one_clock(units, one)]
    waiting = [(one, other) for one in left for other in left if _waits_for(units, one, other)]
    left = [one for one in left if not any(one is waits for waits, _ in waiting)]
    slow = mask_of([one.row for one in suspects], len(units.members))
    values = units.values(slow)
    unsettled = [pair for pair in waiting if not _is_settled(units, suspects, waiting, *pair)]
    tell_nothing = mask_of([one.row for pair in unsettled for one in pair], len(slow))
    found = []
    while left:
        worst = left[0]
        over = np.nan_to_num(robust.median(values[:, worst.course.active], axis=1))
        over[tell_nothing] = np.nan
        known = np.where(compared, over, np.nan)
        fine = compared & ~slow & (over < LINKS.fine_share * worst.course.effect)
        whole_host = _whole_host(seen, units, compared, left)
        blamed = _Blamed(whole_host or units.members[worst.row])
        if not whole_host and not tell_nothing[worst.row]:
            telling = [one for one in left if not tell_nothing[one.row]]
            blamed = _several_of_a_host(seen, units, fine, telling) or _blamed(
                seen, units, fine, known, slow=telling, beside=beside, mates=mates
            )
        explained = [one for one in left if blamed.explains(units.members[one.row], whole_host)]
        is_isolated = blamed.are_told or _is_isolated(seen, units, fine, blamed.ranks, worst)
        is_inside = not is_isolated and _is_inside(seen, units, fine, blamed.ranks, worst)
        link = _link(units, blamed, explained, compared, is_isolated=is_isolated or is_inside)
        found.append(replace(link, is_deduced=blamed.is_met, is_inside=is_inside))
        left = [one for one in left if one not in explained]
    return found


@dataclass(frozen=True)
class _Blamed:
    """The ranks whose connection is slow, as far as is known."""

    ranks: tuple[int, ...]
    is_met: bool = False
    """Whether they are where slow groups meet."""
    rings_ns: float = 0.0
    """As `SlowLink.rings_ns`."""
    mates: tuple[int, ...] = ()
    """As `SlowLink.mates`."""
    are_told: bool = False
    """As `SlowLink.are_told`."""

    def explains(self, members: tuple[int, ...], whole_host: tuple[int, ...]) -> bool:
        """Return whether a slow unit with these members is slow because of them, or lies inside a
        host that is slow as a whole.
        """
        own, unit = set(self.ranks), set(members)
        return own <= unit or unit <= set(whole_host) or (self.are_told and bool(own & unit))


def _blamed(
    seen: Observations,
    units: Units,
    fine: Flags,
    over: Floats,
    *,
    slow: list[Suspect],
    beside: list[Suspect],
    mates: tuple[tuple[int, ...], ...],
) -> _Blamed:
    """Return what the `slow` units, the worst first, have in common, or less of it where what is
    slow `beside` them, longer passes of `mates`, or the other connections of a pair's ends tell.
    """
    ranks = _shared_ranks(units, np.isfinite(over), slow)
    met = where_groups_meet(units, fine, slow + beside) if len(ranks) > 1 else ()
    group: tuple[int, ...] = ()
    if not met and seen.members.are_inside_a_host(ranks):
        met, group = met_by_mates(ranks, mates)
    if met or len(ranks) != 2 or not set(seen.members.recorded).issuperset(ranks):
        return _Blamed(met or ranks, is_met=bool(met), mates=group)
    ends = guilty_end(units, over, ranks, slow[0])
    rings_ns = lost_in_rings(units, ends[0], ranks, slow[0]) if len(ends) == 1 else 0.0
    return _Blamed(ends, rings_ns=rings_ns)


def _several_of_a_host(
    seen: Observations, units: Units, fine: Flags, slow: list[Suspect]
) -> _Blamed | None:
    """Return several ranks of one host whose connections with others are slow, each told by
    elimination: neighbours share a NIC. One by one, mending them gains nothing.
    """
    ranks = told_by_elimination(units, fine, slow) if units.crosses[slow[0].row] else ()
    are_known = set(seen.members.recorded).issuperset(ranks)
    if len(ranks) < 2 or not are_known or not seen.members.are_inside_a_host(ranks):
        return None
    return _Blamed(ranks, are_told=True)


def _whole_host(
    seen: Observations, units: Units, compared: Flags, slow: list[Suspect]
) -> tuple[int, ...]:
    """Return the ranks of the worst unit's host if all connections inside the host are slow; () if
    one is fine, or if one rank is in all of them.

    Connections that are not slow but carry less than the worst unit do not count as fine.
    """
    worst, rates = slow[0].row, units.rates
    are_slow = mask_of([one.row for one in slow], len(rates))
    host, _ = seen.members.device_of(units.members[worst][0])
    inside = [
        unit for unit in np.flatnonzero(compared & (are_slow | ~(rates < rates[worst]))).tolist()
        if seen.members.are_inside_a_host(units.members[unit])
        and seen.members.device_of(units.members[unit][0])[0] == host
    ]  # fmt: skip
    ranks = [set(units.members[unit]) for unit in inside]
    if worst not in inside or set.intersection(*ranks) or not are_slow[inside].all():
        return ()
    return tuple(sorted(set.union(*ranks)))


def _is_isolated(
    seen: Observations, units: Units, fine: Flags, ranks: tuple[int, ...], worst: Suspect
) -> bool:
    """Return whether the connection of these ranks alone is to blame; `fine` units are not slow.

    A single rank's connection is. A pair's is if each end has another connection of the same way as
    the `worst` unit that is fine and carries more, or if the ports of two hosts serve nothing else
    that would tell. A larger group's never is, inside a host as on a rail: nobody can tell which
    member is slow.
    """
    if len(ranks) == 1:
        return True
    if len(ranks) > 2 or not set(seen.members.recorded).issuperset(ranks):
        return False
    clear = fine & (units.rates >= units.least_of_witness(worst))
    if all(clear[units.witnesses(rank, worst.row)].any() for rank in ranks):
        return True
    others = {
        unit
        for rank in ranks
        for unit in units.of_rank(rank, worst.row)
        if units.members[unit] != ranks and not units.carry_little[unit]
    }
    return bool(units.crosses[worst.row]) and not others


def _is_inside(
    seen: Observations, units: Units, fine: Flags, ranks: tuple[int, ...], worst: Suspect
) -> bool:
    """Return whether a pair lies inside one host, which is the one to drain whichever end it is,
    and is slower than two equal pairs that are `fine`, or far slower than the only one.

    Example: the TP pairs of a job of two take 178 us for an all-reduce, and 703.
    """
    is_pair = len(ranks) == 2 and set(seen.members.recorded).issuperset(ranks)
    if not is_pair or seen.hidden_axes or not seen.members.are_inside_a_host(ranks):
        return False  # of what else either end sends its mates nobody knows
    kind = units.transfers.kind
    num_equal = int(fine[np.unique(units.unit[kind == kind[row_of(units, worst)]])].sum())
    least = LINKS.named_in_few if num_equal > 1 else LINKS.named_beside_one
    return num_equal > 0 and worst.course.effect >= float(np.log(least))


def _exceeds_clock_errors(seen: Observations, units: Units, suspect: Suspect) -> bool:
    """Return whether the lost time exceeds what clock errors could feign.

    A transfer is never longer than the span of its shortest member, which one clock measures; but
    clock errors may make the transfers that it is compared with too short. The error is the typical
    one inside a host, where members meet hundreds of times an iteration, otherwise the p99. Where a
    slow link is all that joins two clocks, their error is as long as the link's transfers: then
    spans measured by one clock decide, if the loss matters to the step.
    """
    if seen.alignment is None:
        return True
    actual, normal = typical_times(units, suspect)
    error_ns = clock_error_ns(seen.alignment, seen, units.members[suspect.row])
    if actual - normal > LINKS.clock_errors * error_ns:  # each end has its own error
        return not _are_others_quicker(units, suspect)
    if actual <= 0.0:  # clocks are off by more than a transfer takes
        return False
    lost_ns = float(units.transfers.total_ns[row_of(units, suspect)]) * (1.0 - normal / actual)
    if lost_ns < NETWORKS.min_step_share * float(np.median(seen.iteration_ns)):
        return False
    return _is_long_by_one_clock(units, suspect)


def _are_others_quicker(units: Units, suspect: Suspect) -> bool:
    """Return whether a suspect takes as long while it is slow as before or after, or by one clock
    as long as others: then the times of those are too short, as clocks drift.

    Example: all-reduces of a pair take 65 us in each iteration, those of three others 65, and 27 to
    35 in some iterations in a row; the span of whoever comes last is 65 us everywhere.
    """
    row, active = row_of(units, suspect), suspect.course.active
    actual, normal = typical_times(units, suspect)
    longer, least = _longer_by_one_clock(units, suspect), LINKS.fine_share * (actual - normal)
    is_as_quick = np.isfinite(longer) and longer < least
    if is_as_quick or active.all():
        return bool(is_as_quick)
    before = float(robust.median(units.transfers.transfer_ns[row][~active]))
    return actual - before < least


def clock_error_ns(clocks: ClockAgreement, seen: Observations, ranks: tuple[int, ...]) -> float:
    """Return by how much the clocks of some ranks may be off: typically so inside a host, else the
    p99.
    """
    is_inside = seen.members.are_inside_a_host(ranks)
    return clocks.residual_median_ns if is_inside else clocks.residual_p99_ns


def _longer_by_one_clock(units: Units, suspect: Suspect) -> float:
    """Return how much longer the suspect's shortest member spans last than those of units of the
    same kind, ns; -inf where that is not known.

    The member that comes last to an operation is in it for as long as the transfer lasts, by its
    own clock. Example: messages take 1.1 ms, and one 4.5 ms: 3.4 ms, however far clocks are off.
    """
    row, transfers = row_of(units, suspect), units.transfers
    if transfers.shortest_ns is None:
        return -np.inf
    alike = (transfers.kind == transfers.kind[row]) & (units.unit != suspect.row)
    if not alike.any():
        return -np.inf
    typical_ns = robust.median(transfers.shortest_ns[:, suspect.course.active], axis=1)
    return float(typical_ns[row] - robust.median(typical_ns[alike]))


def _is_long_by_one_clock(units: Units, suspect: Suspect) -> bool:
    """Return whether a suspect's shortest member spans show half of what it loses, and more."""
    actual, normal = typical_times(units, suspect)
    return actual > 0.0 and _longer_by_one_clock(units, suspect) >= 0.5 * (actual - normal)


def _waits_for(units: Units, suspect: Suspect, other: Suspect) -> bool:
    """Return whether a group loses what another stage's group of the same operation loses.

    Where sizes were not recorded, an operation may include what follows it: a stage's reduction
    that ends with a reduction over stages includes the wait for the slow stage. The waiting group
    then loses the same time, but is slower by a smaller ratio.
    """
    mine, its = (units.transfers.kind[row_of(units, one)] for one in (suspect, other))
    kinds, members = units.transfers.kinds, units.members
    if mine == its or kinds[mine] != kinds[its] or suspect.course.effect >= other.course.effect:
        return False
    if set(members[suspect.row]) & set(members[other.row]):
        return False
    lost, others = (actual - normal for actual, normal in
                    (typical_times(units, one) for one in (suspect, other)))  # fmt: skip
    return abs(lost / others - 1.0) <= LINKS.same_loss_share


def _is_settled(
    units: Units,
    suspects: tuple[Suspect, ...],
    waiting: list[tuple[Suspect, Suspect]],
    waits: Suspect,
    other: Suspect,
) -> bool:
    """Return whether of a group that `waits` and the `other` one the latter alone has a member in
    further slow connections: then it is known which of the two waits.

    Example: rings (2, 6) and (10, 14) of two stages lose 20 ms each, and the TP group of ranks 4 to
    7 is four times as slow as others: (10, 14) waits, and what is slow is rank 6.
    """
    rows = {one.row for pair in waiting for one in pair}
    further = {
        rank for one in suspects if one.row not in rows for rank in units.members[one.row]
    }  # fmt: skip
    own, its = (set(units.members[one.row]) for one in (waits, other))
    return bool(its & further) and not own & further


def _shared_ranks(units: Units, compared: Flags, slow: list[Suspect]) -> tuple[int, ...]:
    """Return what the `slow` units, the worst first, have in common: one rank or two of which
    nearly all units are slow; else those ranks of the worst unit that other slow units share with
    it, by twos and more.
    """
    worst, slow_units = slow[0].row, {one.row for one in slow}
    counts = {
        rank: _num_slow_of(units, compared, slow_units, rank, worst)
        for rank in units.members[worst]
    }
    most = max(counts.values())
    ranks = tuple(sorted(rank for rank, count in counts.items() if count == most))
    if most and len(ranks) <= 2:
        return ranks
    shared = set(units.members[worst])
    for members in sorted((set(units.members[one.row]) for one in slow), key=len):
        if len(shared & members) >= 2:
            shared &= members
    return tuple(sorted(shared))


def _num_slow_of(units: Units, compared: Flags, slow_units: set[int], rank: int, worst: int) -> int:
    """Return how many units of a rank are slow, if nearly all are: of all its units, or of those
    that take the same way as the `worst`; otherwise 0.
    """
    of_rank = [unit for unit, ranks in enumerate(units.members) if rank in ranks]
    for candidates in (of_rank, units.of_rank(rank, worst)):
        mine = [unit for unit in candidates if compared[unit]]
        num_slow = sum(unit in slow_units for unit in mine)
        if num_slow >= 2 and num_slow >= LINKS.all_of_a_rank_share * len(mine):
            return num_slow
    return 0


def _link(
    units: Units,
    blamed: _Blamed,
    explained: list[Suspect],
    compared: Flags,
    *,
    is_isolated: bool,
) -> SlowLink:
    transfers, slow = units.transfers, [one.row for one in explained]
    best = min(explained, key=lambda one: (one.q_value, -one.course.effect))
    share = 1.0 - float(np.exp(-best.course.effect))
    lost_ns: dict[int, float] = {}  # by rank: units of different ranks transfer at the same time
    for one in np.flatnonzero(np.isin(units.unit, slow)).tolist():
        for rank in transfers.members[one]:
            lost_ns[rank] = lost_ns.get(rank, 0.0) + float(transfers.total_ns[one]) * share
    actual, normal = typical_times(units, best)
    row = row_of(units, best)
    peers = set(units.unit[transfers.kind == transfers.kind[row]].tolist()).difference(slow)
    return SlowLink(
        ranks=blamed.ranks,
        course=best.course,
        q_value=best.q_value,
        units=tuple(units.members[one.row] for one in explained),
        num_peers=sum(bool(compared[one]) for one in peers),
        kind=transfers.kinds[int(transfers.kind[row])],
        size_bytes=int(transfers.size_bytes[row]),
        normal_ns=normal,
        actual_ns=actual,
        excess_ns=np.where(best.course.active, max(lost_ns.values(), default=0.0), 0.0),
        is_isolated=is_isolated,
        rings_ns=blamed.rings_ns,
        mates=blamed.mates,
        are_told=blamed.are_told,
    )
