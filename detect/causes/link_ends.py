"""Find which member of a slow pair or group is to blame, where more than the group tells.

Three things do. Its other connections: who is in several slow groups, or whose partner has others
that are fine. Its rings without transfer times, beside equal ones. And, inside a host, passes in
which the TP group of just one member exchanges unseen, if they are longer than its peers': what
slows both is the member that both share. Between hosts they tell nothing: a NIC carries no TP.

Example: the TP group of ranks 0 to 3 and the ring of 1, 5, 9 and 13 take three times as long as
their equals: rank 1.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from detect.causes.connections import Units
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats.search import Suspect
from detect.thresholds.networks import LINKS, NETWORKS
from megascan.arrays import Flags, Floats


def guilty_end(
    units: Units, over: Floats, ranks: tuple[int, ...], worst: Suspect
) -> tuple[int, ...]:
    """Return the one end of a pair that is to blame, or both ends where that is not shown.

    An end is to blame if it alone has another connection that is as slow beside its siblings, or a
    ring without transfer times that is. So it is if the other end has another connection of the
    same way that is fine, while its own others are slower, though too little to be suspects, or
    carry no more. Between hosts it need not have others: all connections of the fine end run
    through the one port that it has. A ring without equals acquits its members if it carries as
    much as their ports could not, were one of them as slow: at 76 bytes per ns, with 6 members,
    beside messages at 10.6.
    Connections that carry a few bytes say nothing (all-reduces of 8 bytes are as quick over a slow
    NIC). `over` is the log residual of each unit, NaN where nothing is comparable.
    """
    beside = units.beside_siblings(over, ranks)
    least = LINKS.fine_share * worst.course.effect
    tells = np.isfinite(over) & ~units.carry_little
    carries_no_more = units.rates < units.least_of_witness(worst.row)
    # a collective has no equal at times, and its members may share it among as many ports
    ports = np.array([max(1, len(ranks) // 2) for ranks in units.members])
    carries_far_more = np.isnan(over) & (units.rates >= ports * units.least_of_witness(worst.row))
    acquits = (tells & (over < least) & ~carries_no_more) | carries_far_more
    others = [
        [unit for unit in units.of_rank(rank, worst.row)
         if not set(ranks) <= set(units.members[unit]) and (tells[unit] or carries_far_more[unit])]
        for rank in ranks
    ]  # fmt: skip
    shown = (1.0 - LINKS.fine_share) * worst.course.effect
    is_slow = [
        lost_in_rings(units, rank, ranks, worst) > 0 or bool((beside[mine] >= shown).any())
        for rank, mine in zip(ranks, others, strict=True)
    ]
    if is_slow[0] != is_slow[1]:
        return (ranks[is_slow.index(True)],)
    is_fine = [bool(acquits[mine].any()) for mine in others]
    if is_fine[0] != is_fine[1] and (others[is_fine.index(False)] or units.crosses[worst.row]):
        return (ranks[is_fine.index(False)],)
    return ranks


def lost_in_rings(units: Units, rank: int, pair: tuple[int, ...], worst: Suspect) -> float:
    """Return what collectives of a rank that have no transfer time lose against those of equal
    groups, ns of an iteration; 0 unless they are slower by about as much as the messages of a slow
    pair that the rank is in.

    Example: messages of ranks 12 and 28 take 2.9 times as long as others; gradients are reduced in
    27.3 ms by the ring with rank 12 and in 9.5 by three others, by the ring with rank 28 in 8.9.
    """
    over, lost_ns = [], 0.0
    untimed = [
        one for one in units.transfers.untimed if one.crosses == units.crosses[worst.row]
    ]  # fmt: skip
    for own in untimed:
        if rank not in own.members or set(pair) <= set(own.members):
            continue
        equal = [
            one.shortest_ns for one in untimed
            if (one.what, one.size_bytes) == (own.what, own.size_bytes)
            and len(one.members) == len(own.members)
            and not set(pair) & set(one.members)
        ]  # fmt: skip
        if len(equal) >= NETWORKS.min_connections:
            usual_ns = float(np.median(equal))
            over.append(float(np.log(own.shortest_ns / usual_ns)))
            lost_ns += own.shortest_ns - usual_ns
    least = (1.0 - LINKS.fine_share) * worst.course.effect
    return lost_ns if over and float(np.median(over)) >= least else 0.0


def waiting_mates(seen: Observations, found: Collection[Finding]) -> tuple[tuple[int, ...], ...]:
    """Return the groups whose ranks exchange unseen inside their passes, and have all longer ones
    than their peers, as an earlier search found, which could not say of whom.
    """
    workers = {ranks for ranks in seen.members.workers if len(ranks) > 1}
    return tuple(
        one.ranks
        for one in found
        if one.ranks in workers
        and one.cause in (Cause.COMPUTE, Cause.UNKNOWN)
        and one.owner is Owner.UNDECIDED
        and seen.members.are_inside_a_host(one.ranks)
    )


def met_by_mates(
    ranks: tuple[int, ...], groups: Collection[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the only one of some slow `ranks` that is in one of the `groups` of `waiting_mates`,
    and its group; nothing where none is, or several are.

    Example: reductions of ranks 9, 11, 13 and 15 take 7.9 times as long as others inside their
    host, and the passes of the TP pair (12, 13) 1.38 times: rank 13.
    """
    met = [(rank, group) for group in groups for rank in ranks if rank in group]
    if len(met) != 1 or len(ranks) < 2:
        return (), ()
    rank, group = met[0]
    return (rank,), group


def where_groups_meet(units: Units, fine: Flags, slow: list[Suspect]) -> tuple[int, ...]:
    """Return the only rank of the worst unit that most other `slow` units have in common with it;
    () where several are, or one of its connections of the same way is `fine` and carries more.

    Example: of a TP group and a ring across hosts, both slow, rank 1 alone is in both.
    """
    worst = slow[0].row
    groups = [set(units.members[one.row]) for one in slow]
    counts = {rank: sum(rank in group for group in groups) for rank in units.members[worst]}
    most = max(counts.values())
    met = [rank for rank, count in counts.items() if count == most]
    if most < 2 or len(met) > 1:
        return ()
    others = {rank for group in groups if met[0] in group for rank in group}
    clear = fine & (units.rates >= units.least_of_witness(worst))
    is_cleared = len(others) < 3 or clear[units.of_rank(met[0], worst)].any()
    return () if is_cleared else (met[0],)
