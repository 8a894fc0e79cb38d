"""The connections of a job: pairs of ranks and process groups, with what each of them carries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from detect.observe.observations import Members, Transfers
from detect.observe.transfers import bus_factors, log_residuals, usual_total
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
    def _row_rates(self) -> Floats:
        """Return the bytes per ns that each row's links carry, (row,); NaN of unknown sizes."""
        transfers = self.transfers
        factors = bus_factors(transfers.kinds, transfers.kind, transfers.members)
        sizes = np.where(transfers.size_bytes > 0, transfers.size_bytes, np.nan)
        typical_ns = robust.median(transfers.transfer_ns, axis=1)
        known_ns = np.where(typical_ns > 0, typical_ns, np.nan)  # clock errors may leave nothing
        return np.asarray(factors * sizes / known_ns, dtype=np.float64)

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

    def least_of_witness(self, slow: int) -> float:
        """Return how many bytes per ns a unit must carry to show that its ends are not what makes
        the `slow` one slow; NaN where the slow one's size is not known.

        Example: a NIC that carries 6.6 bytes per ns instead of 21 holds its messages, which others
        send at 9, at 6.9: they are hardly slower, and acquit it of nothing.
        """
        return LINKS.witness_rate_ratio * float(self.rates[slow])

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
