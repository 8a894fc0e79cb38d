"""Say how long a transfer takes, and in whose transfers a fault would show alike.

A collective goes round in rings: within a host over NVLink, between hosts over the NICs of its
members there, each of which carries its part of the bytes; the slowest of them decides:

    seconds = hops * latency + max(bytes / NVLink, bytes / members per host / slowest NIC)

NICs that several GPUs of a host share are shared evenly, since those GPUs talk at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

from benchmarks.grounds.yard.hardware import Site
from benchmarks.grounds.yard.jobs import Job
from megascan.topology import Layout

Ranks = tuple[int, ...]

_LOCAL_LATENCY_S = 3.5e-6
_MESSAGE_SHARE = 0.75  # of NVLink's bus bandwidth, that one message reaches
_PROBE_BYTES = 64_000_000


@lru_cache(maxsize=4096)
def groups_of(layout: Layout, rank: int) -> dict[str, Ranks]:
    """Return the process groups of a rank by axis, as Megatron-Core makes them."""
    places = [layout.coordinates(other) for other in range(layout.world_size)]
    place, everybody = places[rank], range(layout.world_size)

    def alike(*axes: str) -> Ranks:
        of_axes = attrgetter(*axes)
        own = of_axes(place)
        return tuple(other for other in everybody if of_axes(places[other]) == own)

    line = alike("tp", "cp", "dp")
    groups = {
        "tp": alike("cp", "dp", "pp"),
        "pp": line,
        "dp": alike("tp", "cp", "pp"),
        "dp_cp": alike("tp", "pp"),
        "cp": alike("tp", "dp", "pp"),
        "ep": layout.group(rank, "ep"),
        "expt_dp": alike("pp", "ep") if layout.ep > 1 else alike("tp", "pp"),
        "expt_tp": (rank,) if layout.ep > 1 else alike("cp", "dp", "pp"),
        "tp_ep": layout.group(rank, "ep") if layout.ep > 1 else alike("cp", "dp", "pp"),
        "mp": alike("cp", "dp"),
        "tp_dp": alike("cp", "pp"),
        "tp_dp_cp": alike("pp"),
        "tp_cp": alike("dp", "pp"),
        "intra_dist_opt": tuple(everybody),
        "dp_gloo": alike("tp", "cp", "pp"),
        "dp_cp_gloo": alike("tp", "pp"),
        "world": tuple(everybody),
    }
    if rank in (line[0], line[-1]):
        groups["embd"] = (line[0], line[-1]) if len(line) > 1 else line
    if place.pp == 0:
        groups["pos_embd"] = (rank,)
    return groups


@dataclass(kw_only=True)
class Network:
    """The links of a job in one iteration: how many times slower each rank's are than sound."""

    site: Site
    nvlink: Sequence[float]  # (rank,)
    nic: Sequence[float]  # (rank,)
    congestion: float = 1.0
    _known: dict[tuple[str, Ranks], tuple[float, float]] = field(default_factory=dict)

    @property
    def _nic_bytes_per_s(self) -> float:
        """Return what one rank gets of its NIC while its neighbours talk, too."""
        shared = self.site.nic_bytes_per_s * self.site.num_nics / self.site.ranks_per_host
        return min(shared, self.site.nic_bytes_per_s) / self.congestion

    def _line(self, op: str, members: Ranks) -> tuple[float, float]:
        """Return latency, and seconds a byte of payload."""
        num = len(members)
        hosts = Counter(map(self.site.host_of, members))
        hops = math.ceil(math.log2(num)) + 1
        volume = {
            "all_reduce": 2 * (num - 1) / num,
            "all_gather": num - 1.0,
            "broadcast": 1.0,
        }.get(op, (num - 1) / num)
        local = volume / self.site.gpu.nvlink_bytes_per_s * max(self.nvlink[m] for m in members)
        if len(hosts) == 1:
            return hops * _LOCAL_LATENCY_S, local
        abroad = max(self.nic[m] for m in members) / self._nic_bytes_per_s
        per_host = max(hosts.values())
        outside = (num - per_host) / num if op == "all_to_all" else volume / per_host
        return hops * self.site.latency_s, max(local, outside * abroad)

    def seconds(self, op: str, members: Ranks, size_bytes: float) -> float:
        """Return how long a collective takes once all members are there."""
        line = self._known.get((op, members))
        if line is None:
            line = self._known[op, members] = self._line(op, members)
        return line[0] + line[1] * size_bytes

    def message_s(self, one: int, other: int, size_bytes: float) -> float:
        """Return how long a message takes once both ends are there."""
        if self.site.host_of(one) == self.site.host_of(other):
            slow = max(self.nvlink[one], self.nvlink[other])
            bandwidth = self.site.gpu.nvlink_bytes_per_s * _MESSAGE_SHARE
            return _LOCAL_LATENCY_S + size_bytes * slow / bandwidth
        slow = max(self.nic[one], self.nic[other])
        return self.site.latency_s + size_bytes * slow / self._nic_bytes_per_s


def _routes(job: Job) -> Iterator[Ranks]:
    """Yield every group and pair of stages whose transfers a trace holds."""
    axes = ["dp_cp", "tp", "cp"]
    if job.experts:
        axes += ["ep", "expt_dp"]
    if job.pp > 1:
        axes.append("embd")
    if job.granularity == "base":
        axes = [axis for axis in axes if axis in ("dp_cp", "expt_dp")]
    for rank in range(job.num_ranks):
        groups = groups_of(job.layout, rank)
        for axis in axes:
            members = groups.get(axis, (rank,))
            if members[0] == rank and len(members) > 1:
                yield members
        line = groups["pp"]
        place = line.index(rank)
        if len(line) > 1 and (place + 1 < len(line) or job.vpp > 1):
            yield (rank, line[(place + 1) % len(line)])


def _shown_in(
    job: Job, unit: Ranks, kind: str, routes: Iterable[Ranks], before: Network
) -> frozenset[Ranks]:
    """Return the routes that a link five times slower than `before` would slow."""
    sound = [1.0] * job.num_ranks
    slow = [5.0 if rank in unit else 1.0 for rank in range(job.num_ranks)]
    within = kind == "nvlink"
    after = Network(site=job.site, nvlink=slow if within else sound, nic=sound if within else slow)

    def takes(network: Network, route: Ranks) -> float:
        return network.seconds("reduce_scatter", route, _PROBE_BYTES)

    through = (route for route in routes if not set(unit).isdisjoint(route))
    return frozenset(each for each in through if takes(after, each) > 1.02 * takes(before, each))


def units_of(job: Job, kind: str) -> list[Ranks]:
    """Return the ranks of each unit of a kind: NICs, hosts' NICs, rails, or single GPUs."""
    site = job.site
    found: dict[object, list[int]] = {}
    for rank in range(job.num_ranks):
        of: dict[str, object] = {
            "nic": site.nic_of(rank),
            "host_nic": site.host_of(rank),
            "rail": site.nic_of(rank)[1],
        }
        found.setdefault(of.get(kind, rank), []).append(rank)
    return [tuple(each) for each in found.values()]


def suspects(job: Job, kind: str, unit: Ranks) -> Ranks:
    """Return the ranks of the unit at fault, or of both ends of a lone pair.

    Nothing in a trace tells two units apart whose faults would slow the very same transfers, and a
    link has two ends. Of more than two, whoever names a wrong one has guessed.
    """
    sound = [1.0] * job.num_ranks
    routes, before = set(_routes(job)), Network(site=job.site, nvlink=sound, nic=sound)
    shown = _shown_in(job, unit, kind, routes, before)
    alike = [
        each for each in units_of(job, kind)
        if _shown_in(job, each, kind, routes, before) == shown
    ]  # fmt: skip
    if not shown or len(alike) != 2:
        return unit
    return tuple(sorted(rank for each in alike for rank in each))
