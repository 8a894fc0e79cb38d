"""Connections by their members, what each carries, and which member of a slow one is to blame.

Three things tell more than the slow pair or group itself. Its other connections: who is in several
slow groups, or whose partner has others that are fine. Its rings without transfer times, beside
equal ones. And, inside a host, passes in which the TP group of just one member exchanges unseen, if
they are longer than its peers': what slows both is the member that both share. Between hosts they
tell nothing: a NIC carries no TP.

Example: the TP group of ranks 0 to 3 and the ring of 1, 5, 9 and 13 take three times as long as
their equals: rank 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers, bus_factors, log_residuals, usual_total
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import Suspect
from detect.thresholds.networks import LINKS, NETWORKS
from megascan.arrays import Flags, Floats, Integers, lower_medians


@dataclass(frozen=True, kw_only=True)
class Units:
    """Edges and groups: the rows of transfers, put together by their members."""

    members: tuple[tuple[int, ...], ...]
    unit: Integers
    """(transfer row,)"""
    transfers: Transfers
    crosses: Flags
    """(unit,): whether the unit goes over the network, or stays inside one host."""
    way: Integers
    """(unit,): a number for network or inside a host; where hosts are not known, for the axis."""
    place: Integers | None = None
    """(unit,): a number for the hosts of its members; None where nobody knows."""

    def of_rank(self, rank: int, like: int) -> list[int]:
        """Return the edges and groups of a rank that take the same way as `like`: GPUs are linked
        inside a host, hosts by their network, and either may be slow while the other is not.
        """
        return [
            unit
            for unit, ranks in enumerate(self.members)
            if rank in ranks and self.crosses[unit] == self.crosses[like]
        ]

    def witnesses(self, rank: int, like: int) -> list[int]:
        """Return the edges and groups of a rank that surely take the same way as `like`."""
        return [unit for unit in self.of_rank(rank, like) if self.way[unit] == self.way[like]]

    @cached_property
    def _carried_bytes(self) -> Floats:
        """Return the bytes that each row's links carry, (row,); NaN of unknown sizes."""
        transfers = self.transfers
        factors = bus_factors(transfers.kinds, transfers.kind, transfers.members)
        sizes = np.where(transfers.size_bytes > 0, transfers.size_bytes, np.nan)
        return np.asarray(factors * sizes, dtype=np.float64)

    @cached_property
    def _row_rates(self) -> Floats:
        """Return the bytes per ns that each row's links carry, (row,); NaN of unknown sizes."""
        return self._carried_bytes / _typical_ns(self.transfers.transfer_ns)

    @cached_property
    def rates(self) -> Floats:
        """Return the most bytes per ns that each unit's links carry, (unit,); NaN where no size is
        known.

        A unit that carries less than a slow link is fine whatever its ends can do. Example: a
        reduce-scatter of 1.8 GB in a slow pair takes 46 ms, 20 bytes per ns; messages of 0.2 GB
        that copies limit to 19 bytes per ns say nothing about either end.
        """
        return _most_by(self.unit, self._row_rates, len(self.members))

    @cached_property
    def _shows_bandwidth(self) -> Flags:
        """Flag the rows whose kind usually carries about what the unit's best kind does, (row,).

        Example: messages between stages take 67 us, 125 bytes per ns, and 226 us at a slow NVLink;
        the embedding's reduction between the same ranks takes 6.7 ms, 39 bytes per ns, everywhere.
        """
        kind, rates = self.transfers.kind, self._row_rates
        typical = np.full(len(self.transfers.kinds), np.nan)
        kinds, medians = lower_medians(kind, rates)
        typical[kinds] = medians
        best = _most_by(self.unit, typical[kind], len(self.members))[self.unit]
        return ~np.asarray(typical[kind] < LINKS.bandwidth_share * best)

    def beside_siblings(self, over: Floats, but: tuple[int, ...]) -> Floats:
        """Return log residuals, (unit,), less the median of the unit's siblings without the ranks
        `but`, where there are enough: units of the same kinds whose members are on the same hosts.

        Example: of ranks 0 to 11 rings of three take 10 ms, but for 18 ms of (0, 4, 8); on other
        hosts all take 19, where as many rings share fewer ports.
        """
        if self.place is None:
            return over
        kinds = [frozenset(self.transfers.kind[self.unit == one]) for one in range(len(over))]
        own = np.array([{*ranks}.isdisjoint(but) for ranks in self.members])
        beside = over.copy()
        for unit, (kind, place) in enumerate(zip(kinds, self.place.tolist(), strict=True)):
            alike = own & (self.place == place) & np.array([one == kind for one in kinds])
            alike[unit] = False
            if alike.sum() >= NETWORKS.min_connections:
                beside[unit] -= robust.median(over[alike])
        return beside

    def least_of_witness(self, slow: Suspect) -> float:
        """Return how many bytes per ns a unit must carry to show that its ends are not what makes
        the `slow` one slow, more than that carries while it is; NaN where its size is not known.

        Example: a NIC that carries 6.6 bytes per ns instead of 21 holds its messages, which others
        send at 9, at 6.9: they are hardly slower, and acquit it of nothing.
        """
        mine = self.unit == slow.row
        took_ns = _typical_ns(self.transfers.transfer_ns[mine][:, slow.course.active])
        return LINKS.witness_rate_ratio * float(np.fmax.reduce(self._carried_bytes[mine] / took_ns))

    @cached_property
    def carry_little(self) -> Flags:
        """Flag the units that carry only a few bytes at a time, which show no bandwidth."""
        largest = np.full(len(self.members), -1)
        np.maximum.at(largest, self.unit, self.transfers.size_bytes)
        little: Flags = (largest >= 0) & (largest < NETWORKS.min_bytes)
        return little

    def values(self, excluded: Flags) -> Floats:
        """Return the log residual, (unit, iteration): the mean over the unit's kinds, each weighted
        by the time that it usually takes.

        Short transfers say little about bandwidth: 4 bytes that take 191 µs where a host launches
        late and 10 µs elsewhere must not count as much as 64 all-reduces of 146 µs.
        """
        residual = log_residuals(self.transfers, excluded[self.unit])
        weight = np.where(np.isfinite(residual), self._weights[:, None], 0.0)
        weight *= self._shows_bandwidth[:, None]
        sums = np.zeros((2, len(self.members), residual.shape[1]))
        np.add.at(sums[0], self.unit, weight * np.nan_to_num(residual))
        np.add.at(sums[1], self.unit, weight)
        with np.errstate(invalid="ignore"):
            return np.asarray(sums[0] / sums[1], dtype=np.float64)

    @cached_property
    def _weights(self) -> Floats:
        """Return the time that each row's kind usually takes in an iteration, ns; at least 1, since
        clock errors may leave nothing of it.
        """
        kind, total = self.transfers.kind, self.transfers.total_ns
        usual = usual_total(kind, len(self.transfers.kinds), total)[kind]
        return np.maximum(usual, 1.0)


def _typical_ns(transfer_ns: Floats) -> Floats:
    """Return the median of transfer times (row, iteration), (row,); NaN where clock errors leave
    nothing.
    """
    typical_ns = robust.median(transfer_ns, axis=1)
    return np.where(typical_ns > 0, typical_ns, np.nan)


def _most_by(unit: Integers, values: Floats, num_units: int) -> Floats:
    """Return the largest value of each unit's rows, (unit,); NaN where none is known."""
    most = np.full(num_units, np.nan)
    np.fmax.at(most, unit, values)
    return most


def units_of(transfers: Transfers, members: Members) -> Units:
    """Return the edges and groups of all transfers."""
    names = sorted(set(transfers.members))
    place = {name: number for number, name in enumerate(names)}
    unit = np.array([place[name] for name in transfers.members], dtype=np.int64)
    hosts = {
        rank: host for ranks, host in zip(members.workers, members.hosts, strict=True)
        for rank in ranks
    }  # fmt: skip
    axes = {place[name]: transfers.kinds[int(kind)].split()[0]
            for name, kind in zip(transfers.members, transfers.kind, strict=True)}  # fmt: skip
    crosses = np.array([len({hosts.get(rank) for rank in ranks}) > 1 for ranks in names])
    ways = [
        str(crosses[number]) if all(hosts.get(rank) for rank in ranks) else axes[number]
        for number, ranks in enumerate(names)
    ]
    way = np.unique(ways, return_inverse=True)[1].reshape(-1)
    on_hosts = [" ".join(sorted(hosts.get(rank) or "" for rank in ranks)) for ranks in names]
    number = np.unique(on_hosts, return_inverse=True)[1].reshape(-1)
    return Units(
        members=tuple(names), unit=unit, transfers=transfers, crosses=crosses, way=way, place=number
    )


def typical_times(units: Units, suspect: Suspect) -> tuple[float, float]:
    """Return how long a transfer of a suspect takes while it is slow, and would otherwise, ns."""
    row = row_of(units, suspect)
    actual = float(robust.median(units.transfers.transfer_ns[row][suspect.course.active]))
    return actual, actual / float(np.exp(suspect.course.effect))


def row_of(units: Units, suspect: Suspect) -> int:
    """Return the transfers' row of the suspect's kind that takes most time."""
    rows = np.flatnonzero(units.unit == suspect.row)
    return int(rows[np.argmax(units.transfers.total_ns[rows])])


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
    least_rate = units.least_of_witness(worst)
    carries_no_more = units.rates < least_rate
    # a collective has no equal at times, and its members may share it among as many ports
    ports = np.array([max(1, len(ranks) // 2) for ranks in units.members])
    carries_far_more = np.isnan(over) & (units.rates >= ports * least_rate)
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
    worst = slow[0]
    groups = [set(units.members[one.row]) for one in slow]
    counts = {rank: sum(rank in group for group in groups) for rank in units.members[worst.row]}
    most = max(counts.values())
    met = [rank for rank, count in counts.items() if count == most]
    if most < 2 or len(met) > 1:
        return ()
    others = {rank for group in groups if met[0] in group for rank in group}
    clear = fine & (units.rates >= units.least_of_witness(worst))
    is_cleared = len(others) < 3 or clear[units.of_rank(met[0], worst.row)].any()
    return () if is_cleared else (met[0],)


def told_by_elimination(units: Units, fine: Flags, slow: list[Suspect]) -> tuple[int, ...]:
    """Return the ranks that are each the only one left of a slow unit, once all are acquitted that
    have a connection of the same way that is `fine` and carries more than the slowest; () unless
    each of the `slow` units, the worst first, of that way has one of them.

    Example: the messages (0, 8) and (1, 9) and the ring of 0 to 7 take four times as long as
    others; the ring of 8 to 15 and messages of 2 to 7 do not: 0 and 1, which share a NIC.
    """
    worst = slow[0].row
    alike = [one for one in slow if units.way[one.row] == units.way[worst]]
    least = np.nanmin([np.inf, *(units.least_of_witness(one) for one in alike)])
    clear = fine & (units.way == units.way[worst]) & (units.rates >= least) & ~units.carry_little
    acquitted = {rank for unit in np.flatnonzero(clear).tolist() for rank in units.members[unit]}
    left = [set(units.members[one.row]) - acquitted for one in alike]
    told = set().union(*(ranks for ranks in left if len(ranks) == 1))
    return tuple(sorted(told)) if told and all(ranks & told for ranks in left) else ()
