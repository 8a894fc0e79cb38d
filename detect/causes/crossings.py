"""What crosses hosts, and what stays inside: connections by kind, with their hosts and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from detect.observe.observations import Observations
from detect.observe.transfers import Transfers
from detect.stats import robust
from detect.thresholds.networks import NETWORKS
from megascan.arrays import Flags, Floats, Integers

RING_AXES = ("dp", "dp_cp")
"""Axes along which replicas reduce their gradients."""


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """All transfers, and the hosts that each of them touches."""

    transfers: Transfers
    level: Floats
    """(unit,): log of the mean time, ns. A median would not do: of messages that share a NIC some
    are alone on it and some are not, and the median falls on either kind by chance."""
    hosts: tuple[frozenset[str], ...]
    """The hosts of each unit; more than one where the unit crosses a border."""
    device_of: Mapping[int, tuple[str, int]]
    """Host and device number of each recorded rank."""

    @property
    def crosses(self) -> Flags:
        """Flag the units that cross a border, (unit,)."""
        return np.array([len(hosts) > 1 for hosts in self.hosts], dtype=bool)

    @property
    def are_rings(self) -> Flags:
        """Flag the large collectives between hosts in which replicas reduce their gradients,
        (unit,); of unknown sizes as well.
        """
        transfers = self.transfers
        axes = [transfers.kinds[int(kind)].partition(" ")[0] for kind in transfers.kind]
        size = transfers.size_bytes
        is_large = (size < 0) | (size >= NETWORKS.min_scaled_bytes)
        return np.array([axis in RING_AXES for axis in axes], dtype=bool) & is_large & self.crosses

    @property
    def are_unsized_rings(self) -> Flags:
        """Flag the rings whose sizes were not recorded, (unit,)."""
        return self.are_rings & (self.transfers.size_bytes < 0)

    def by_quickest(self) -> Crossings:
        """Return them with the time of each unit's quickest iteration as its level: messages that
        share a NIC take twice or three times as long where they meet, now and then.

        Example: four messages that leave a host together take 5.3 ms alone and up to 15.3 together,
        those of another host 2.7 and up to 7.6: means lie between 5.3 and 10.4, and 2.7 and 4.9.
        """
        quickest_ns = self.transfers.transfer_ns.min(axis=1)
        return replace(self, level=np.log(np.where(quickest_ns > 0, quickest_ns, np.nan)))

    def hosts_of(self, ranks: Collection[int]) -> frozenset[str]:
        """Return the hosts of those of the ranks that were recorded."""
        return frozenset(self.device_of[one][0] for one in ranks if one in self.device_of)

    def touches(self, *names: str) -> Flags:
        """Flag the units that have a member on one of the hosts, (unit,)."""
        return np.array([not hosts.isdisjoint(names) for hosts in self.hosts], dtype=bool)

    def touches_ranks(self, ranks: Collection[int]) -> Flags:
        """Flag the units that have one of the ranks as a member, (unit,)."""
        some = set(ranks)
        return np.array([not some.isdisjoint(unit) for unit in self.transfers.members], dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Equals:
    """Units that all cross borders, or all do not, and should be equally quick."""

    name: str
    units: Integers
    level: Floats
    """(unit,) for all units of the trace: log ns, or log ns per byte."""
    floor: float
    """Log ratio below which a difference does not count."""

    def split(self, touches: Flags) -> tuple[Integers, Integers]:
        """Return the kind's units that touch a host, and the kind's other units."""
        return self.units[touches[self.units]], self.units[~touches[self.units]]


def crossings_of(seen: Observations, transfers: Transfers) -> Crossings:
    """Return all transfers, with the hosts that each of them touches."""
    members = seen.members
    device_of = {rank: members.device_of(rank) for rank in members.recorded}
    mean_ns = robust.mean(transfers.transfer_ns, axis=1)
    return Crossings(
        transfers=transfers,
        level=np.log(np.where(mean_ns > 0, mean_ns, np.nan)),
        hosts=tuple(
            frozenset(device_of[rank][0] for rank in unit if rank in device_of)
            for unit in transfers.members
        ),
        device_of=device_of,
    )


def kinds_inside(crossings: Crossings, floor: float) -> list[Equals]:
    """Return the transfers that stay inside a host by kind; none where a host is not known."""
    if any("" in hosts for hosts in crossings.hosts):
        return []
    return kinds_of(crossings, ~crossings.crosses, floor)


def kinds_of(crossings: Crossings, use: Flags, floor: float) -> list[Equals]:
    """Return the transfers that are of `use` by kind, and large kinds that differ in size only once
    more, put together.
    """
    transfers, level = crossings.transfers, crossings.level
    use, is_large = use & np.isfinite(level), transfers.is_large
    found = []
    for kind in np.unique(transfers.kind[use]).tolist():
        units = np.flatnonzero(use & (transfers.kind == kind))
        if is_large[units[0]]:
            found.append(Equals(name=transfers.kinds[kind], units=units, level=level, floor=floor))
    return [*found, *_by_the_byte(crossings, use, floor)]


def _by_the_byte(crossings: Crossings, use: Flags, floor: float) -> Iterator[Equals]:
    """Yield large transfers that differ in size only, put together, with levels per byte."""
    transfers, size = crossings.transfers, crossings.transfers.size_bytes
    large = np.flatnonzero(use & (size >= NETWORKS.min_scaled_bytes))
    alike: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for unit in large.tolist():
        what = transfers.kinds[int(transfers.kind[unit])].partition(" of ")[0]
        width, num_hosts = len(transfers.members[unit]), len(crossings.hosts[unit])
        alike[what, width, num_hosts].append(unit)
    level = crossings.level - np.log(np.maximum(size, 1))
    for (what, _, _), found in alike.items():
        units = np.array(found)[np.argsort(size[found], kind="stable")]
        apart = np.diff(np.log(size[units])) > np.log(NETWORKS.max_size_ratio)
        for together in np.split(units, np.flatnonzero(apart) + 1):
            if len(np.unique(size[together])) > 1:
                least = max(floor, float(np.log(NETWORKS.min_scaled_slowdown)))
                yield Equals(name=f"{what} of 100 MB", units=together, level=level, floor=least)
