"""Find ranks and hosts whose network is slow now and then, by what all slow paths have in common.

Problem: a NIC that loses its link for seconds slows a few messages and rings by ten times, in one
or two iterations of eight. On the mean of all iterations that is little, and the median message of
an iteration may not show it. And a slow ring, or pair, does not say which of its members it is.

Idea: compare what each connection between hosts transfers in an iteration with its own quick
iterations. Whoever is in all that is slow then, and is the only one, is at fault:

    slow     sum of its transfers >= slow_ratio · that of its quick iterations
    shown    nearly all connections of these ranks, of these kinds, are slow in these iterations
    common   the rank in all slow connections; if several are, the host
    alone    without each other one that is shown a good part of what is lost stays unexplained

A rank goes before its host: where a NIC is one GPU's, its neighbours' connections stay quick.

Example: PP2 x DP2 x TP4 on hosts A, B (first stage), C and D (second). In iteration 5 of 6 messages
A-C take 23 ms instead of 1.6, reductions C-D 310 instead of 19; B-D and A-B are as ever. A is in
none of the slow reductions and D in none of the slow messages: C.

Where no connection between hosts stays quick nobody is named: all of the network may be busy then.

Limits: of one ring, or of pairs between the same two hosts, nobody tells which member it is. What
is slow in all iterations has no quick ones to be compared with, and is other searches'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from detect.causes.crossings import Crossings, crossings_of
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
)
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, place, times
from detect.thresholds.networks import FLAPS, LINKS, NETWORKS
from megascan.arrays import Flags, Floats
from megascan.errors import listed


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """What is slow now and then between hosts."""

    crossings: Crossings
    lost_ns: Floats
    """(unit, iteration): beside the unit's quick iterations; 0 where it is not slow."""
    usual_ns: Floats
    """(unit,): sum of the transfers of a quick iteration."""

    @property
    def units(self) -> Flags:
        """Flag the units that are slow in some iteration, (unit,)."""
        return np.asarray((self.lost_ns > 0).any(axis=1))

    def left_by(self, touches: Flags) -> float:
        """Return the share of what is lost that units without a candidate lose; `touches` are the
        units with it, (unit,).
        """
        return float(self.lost_ns[~touches].sum() / self.lost_ns.sum())


def search_flaps(inquiry: Inquiry) -> Answer:
    """Report the rank or host that all connections between hosts have in common that are slow now
    and then; nothing on CPUs, whose transfers wait for the system.
    """
    seen = inquiry.seen
    if seen.transfers is None or seen.members.device_kind == "cpu":
        return Answer()
    slow = _slow_now_and_then(seen, crossings_of(seen, seen.transfers))
    members = [seen.transfers.members[unit] for unit in np.flatnonzero(slow.units).tolist()]
    if not _are_enough(slow, members):
        return Answer()
    ranks = _common_rank(slow) or _common_host(slow)
    if not ranks or _is_known(inquiry, ranks) or not _are_others_quick(slow):
        return Answer()
    lost_ns = _lost_by(seen, slow, ranks)
    if float(lost_ns.mean()) < FLAPS.least_share * float(np.mean(seen.iteration_ns)):
        return Answer()
    touched = set().union(*members)

    def explains(finding: Finding) -> bool:
        is_undecided = finding.owner is Owner.UNDECIDED and finding.cause is Cause.LINK
        return is_undecided and set(finding.ranks) <= touched

    return Answer(findings=(_finding(seen, slow, ranks, lost_ns),), explains=explains)


def _are_enough(slow: _Slow, members: list[tuple[int, ...]]) -> bool:
    """Return whether so many connections, those with these `members`, are slow that what they share
    is no accident: three, or two that are slow again and again.

    Example: a ring of eight and a pair, slow in nine and in eleven of 31 iterations: rank 24 alone
    is in both.
    """
    names = sorted(set(members))
    if len(names) >= FLAPS.least_connections:
        return True
    hits = (slow.lost_ns > 0)[slow.units]
    own = [hits[[one == name for one in members]].any(axis=0) for name in names]
    return len(names) > 1 and all(one.sum() >= FLAPS.least_times for one in own)


def _slow_now_and_then(seen: Observations, crossings: Crossings) -> _Slow:
    """Return what large transfers between hosts lose in iterations in which they take far longer
    than in their quick ones, or than as many transfers as quick as the quick ones' typical one: a
    port that is slow for a tenth of a second, a few times a second, slows some of each iteration.
    """
    transfers = crossings.transfers
    use = crossings.crosses & (transfers.size_bytes >= NETWORKS.min_bytes)
    usual_ns = _usual(transfers)
    lost_ns = transfers.sum_ns - usual_ns[:, None]
    least_ns = NETWORKS.min_step_share * seen.iteration_ns
    is_far = transfers.sum_ns >= FLAPS.slow_ratio * usual_ns[:, None]
    is_slow = (use & (usual_ns > 0))[:, None] & is_far & (lost_ns >= least_ns)
    return _Slow(crossings=crossings, lost_ns=np.where(is_slow, lost_ns, 0.0), usual_ns=usual_ns)


def _usual(transfers: Transfers) -> Floats:
    """Return the sum of each unit's transfers in a quick iteration, ns; no less than as many spans
    of whoever comes last, by one clock: errors between clocks shorten some transfers.
    """
    num = _num_of(transfers)
    typical_ns = _quick(np.where(transfers.transfer_ns > 0, transfers.transfer_ns, np.inf))
    usual_ns = np.minimum(_quick(transfers.sum_ns), typical_ns * num)
    if transfers.shortest_ns is None:
        return usual_ns
    return np.fmax(usual_ns, _quick(transfers.shortest_ns) * num)


def _num_of(transfers: Transfers) -> Floats:
    """Return how many transfers each unit has in an iteration, (unit,), or so: by the kind, whose
    units are mostly quick, or by the unit's own iterations if these have more.
    """
    known = transfers.transfer_ns > 0
    num = np.divide(
        transfers.sum_ns, transfers.transfer_ns, out=np.full(known.shape, np.inf), where=known
    )
    found = _quick(num)
    for kind in np.unique(transfers.kind):
        rows = transfers.kind == kind
        found[rows] = np.maximum(found[rows], robust.median(num[rows]))
    return found


def _quick(values: Floats) -> Floats:
    """Return the value of a quick iteration of each unit, (unit,), of (unit, iteration)."""
    return np.quantile(values, NETWORKS.outer_share, axis=1, method="lower")


def _common_rank(slow: _Slow) -> tuple[int, ...]:
    """Return the only rank that is in all that is slow, (rank,); () where none or several are."""
    only = _only(slow, [(rank,) for rank in _ranks_in(slow)])
    return only if set(only) <= set(slow.crossings.device_of) else ()


def _common_host(slow: _Slow) -> tuple[int, ...]:
    """Return the ranks, with slow connections, of the only host that is in all that is slow; ()
    where none or several are. A NIC may be that of some of a host's GPUs: whose connections of the
    kinds that are slow include a quick one are asked last.

    Example: rings of all four ranks of a host are slow, but of its messages those of 2 and 3 only.
    """
    place = slow.crossings.device_of
    of_host: dict[str, list[int]] = defaultdict(list)
    for rank in _ranks_in(slow):
        if rank in place and place[rank][0]:
            of_host[place[rank][0]].append(rank)
    hosts = [tuple(ranks) for _, ranks in sorted(of_host.items())]
    spared = _spared(slow)
    without = [tuple(rank for rank in ranks if rank not in spared) for ranks in hosts]
    return _only(slow, [ranks for ranks in without if ranks]) or _only(slow, hosts)


def _spared(slow: _Slow) -> set[int]:
    """Return the ranks with a connection that is quick throughout, of a kind that is slow."""
    transfers = slow.crossings.transfers
    quick = np.isin(transfers.kind, transfers.kind[slow.units]) & ~slow.units
    quick &= slow.crossings.crosses
    return {rank for unit in np.flatnonzero(quick) for rank in transfers.members[unit]}


def _only(slow: _Slow, candidates: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the only candidate that is in nearly all that is slow; () where another one is in
    nearly as much. Whose connections of the same kinds are quick is no candidate.

    Example: the messages of hosts A and B take 14 ms now and then, those of B and C never: A.
    """
    shown = [ranks for ranks in candidates if _are_shown(slow, ranks)]
    if not shown:
        return ()
    left = np.array([slow.left_by(slow.crossings.touches_ranks(ranks)) for ranks in shown])
    first = int(np.argmin(left))
    is_alone = np.delete(left, first).min(initial=1.0) >= FLAPS.least_left_share
    return shown[first] if is_alone and left[first] <= FLAPS.most_left_share else ()


def _are_shown(slow: _Slow, ranks: tuple[int, ...]) -> bool:
    """Return whether nearly all connections of the ranks, of the kinds that are slow, are slow."""
    kind = slow.crossings.transfers.kind
    alike = np.isin(kind, kind[slow.units]) & slow.crossings.crosses
    alike &= slow.crossings.touches_ranks(ranks)
    return bool(np.mean(slow.units[alike]) >= LINKS.all_of_a_rank_share)


def _are_others_quick(slow: _Slow) -> bool:
    """Return whether a large connection between hosts stays quick: where none does, all of the
    network may be busy, and whoever is in all connections that there are is in the slow ones.
    """
    crossings = slow.crossings
    use = crossings.crosses & (crossings.transfers.size_bytes >= NETWORKS.min_bytes)
    return bool((use & ~slow.units).any())


def _ranks_in(slow: _Slow) -> list[int]:
    members = slow.crossings.transfers.members
    return sorted({rank for unit in np.flatnonzero(slow.units) for rank in members[unit]})


def _is_known(inquiry: Inquiry, ranks: Iterable[int]) -> bool:
    """Return whether a connection of one of these ranks is named already."""
    rows = list(inquiry.seen.members.rows_with(ranks))
    return bool(inquiry.named_for(Cause.LINK)[rows].any())


def _lost_by(seen: Observations, slow: _Slow, ranks: tuple[int, ...]) -> Floats:
    """Return what one of the ranks loses at most, (iteration,): no more than iterations are longer
    than quick ones.
    """
    by_rank = np.array([
        slow.lost_ns[slow.crossings.touches_ranks((rank,))].sum(axis=0) for rank in ranks
    ])  # fmt: skip
    quick_ns = np.quantile(seen.iteration_ns, NETWORKS.outer_share, method="lower")
    longer_ns = np.maximum(seen.iteration_ns - quick_ns, 0.0)
    return np.asarray(np.minimum(by_rank.max(axis=0), longer_ns))


def _finding(seen: Observations, slow: _Slow, ranks: tuple[int, ...], lost_ns: Floats) -> Finding:
    """Name the rank, or the ranks of the host, whose network is slow now and then."""
    transfers, units = slow.crossings.transfers, slow.units
    active = np.asarray((slow.lost_ns > 0).any(axis=0))
    worst, at = np.unravel_index(int(np.argmax(slow.lost_ns)), slow.lost_ns.shape)
    factor = 1.0 + float(slow.lost_ns[worst, at] / slow.usual_ns[worst])
    over = np.log1p(slow.lost_ns[units] / slow.usual_ns[units, None])
    effect, error = float(np.median(over[over > 0])), float(np.std(over[over > 0]))
    rows = seen.members.rows_with(ranks)
    others = int((slow.crossings.crosses & ~units).sum())
    subject = f"the network of rank {ranks[0]} ({place(seen.members, rows[0])})"
    if len(ranks) > 1:
        subject = f"host {seen.members.hosts[rows[0]]}'s network (ranks {listed(ranks)})"
    kinds = sorted({transfers.kinds[int(one)] for one in transfers.kind[units]})
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE,
            slowdown=float(np.exp(effect)),
            interval=interval_of_ratio(effect, error / float(np.sqrt(units.sum()))),
            course=Course.of(active, effect, error),
            q_value=0.0,
            num_peers=others,
            saved_ns=lost_ns,
            subject=subject,
            predicate=f"transfers {times(float(np.exp(effect)))} slower than in other iterations",
            evidence=(
                f"in iterations {listed(seen.iterations[active].tolist())} it alone is in all "
                f"{counted(int(units.sum()), 'connection')} between hosts that are slow, of "
                f"{counted(len(kinds), 'kind')}; {counted(others, 'other')} are not",
                f"one kind, {transfers.kinds[int(transfers.kind[worst])]}, takes "
                f"{milliseconds(float(slow.lost_ns[worst, at] + slow.usual_ns[worst]))} of "
                f"iteration {seen.iterations[at]}, {times(factor)} what it takes in a quick one",
            ),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
        ),
    )
