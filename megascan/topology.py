"""Lay ranks out on a grid: the place of each rank on the parallel axes, and its name.

Megatron-Core lays ranks out like digits of a number: `order` names the axes from the
fastest-changing to the slowest (default "tp-cp-ep-dp-pp", so TP neighbours are consecutive
ranks). The whole grid is one reshape:

    tp=2, dp=2, pp=2, order tp-dp-pp:   rank 5 = 1 + 0·2 + 1·4  →  TP1 DP0 PP1

Expert parallelism splits the ranks of a stage a second time, by a separate grid in the same order
(expert tensor parallel × expert parallel × replicas), and therefore appears as a coordinate, not as
a factor of the world size:

    tp=2, dp=2, ep=2, etp=2:   rank 1 = TP1 DP0 and EP0, rank 2 = TP0 DP1 and EP1
    tp=2, dp=2, ep=2, etp=1:   rank 1 = TP1 DP0 and EP1, rank 2 = TP0 DP1 and EP0

Source: megatron.core.parallel_state.RankGenerator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache

from megascan.errors import ConfigError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Place of one rank on every axis, each from 0."""

    tp: int = 0
    cp: int = 0
    ep: int = 0
    dp: int = 0
    pp: int = 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes of a job; `vpp` is the number of model chunks a stage holds.

    `etp` is the size of tensor parallelism inside experts, of importance with expert parallelism
    only. Megatron takes that of the rest of the model unless told otherwise.

    Raises ConfigError for a size below 1 or an order that does not name every axis above 1.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    etp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "ep", "dp", "pp", "vpp", "etp"):
            if getattr(self, axis) < 1:
                size = getattr(self, axis)
                raise ConfigError(f"parallel size {axis} is {size}, expected 1 or more")
        named = self.order.split("-")
        missing = [axis for axis in ("tp", "cp", "dp", "pp") if axis not in named]
        if missing or len(set(named)) != len(named) or set(named) - {"tp", "cp", "ep", "dp", "pp"}:
            raise ConfigError(
                f"rank order is {self.order!r}, expected tp, cp, ep, dp and pp once "
                f"each, for example {DEFAULT_ORDER}"
            )
        experts = f"{self.ep}" if self.etp == 1 else f"{self.ep} x expert tensor size {self.etp}"
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise ConfigError(
                f"expert parallel size {experts} does not divide TP×CP×DP = "
                f"{self.tp * self.cp * self.dp}"
            )

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self.tp * self.cp * self.dp * self.pp

    def strides(self, *axes: str) -> Iterator[tuple[str, int, int]]:
        """Yield (axis, stride, size) of the digits of a rank's number, for `axes` or for all."""
        stride = 1
        for axis in self.order.split("-"):
            if axis in (axes or ("tp", "cp", "dp", "pp")):
                size = getattr(self, axis)
                yield axis, stride, size
                stride *= size

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a global rank. Raises ConfigError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside a world of {self.world_size} ranks")
        return _coordinates(self, rank)

    def _place(self, rank: int) -> Coordinates:
        place = {axis: rank // stride % size for axis, stride, size in self.strides()}
        return Coordinates(**place, ep=self._local(place) // self._expert_stride() % self.ep)

    def _local(self, place: Mapping[str, int]) -> int:
        """Return the number of a rank within its stage."""
        return sum(place[axis] * stride for axis, stride, _ in self.strides("tp", "cp", "dp"))

    def _expert_stride(self) -> int:
        """Return the distance within a stage between neighbours of an expert-parallel group."""
        replicas = self.tp * self.cp * self.dp // (self.ep * self.etp)
        sizes = {"tp": self.etp, "cp": 1, "dp": replicas, "pp": 1}
        axes = self.order.split("-")
        before = axes[: axes.index("ep")] if "ep" in axes else ["tp"]
        return math.prod(sizes[axis] for axis in before)

    def rank_of(self, place: Coordinates) -> int:
        """Return the global rank at a place: the inverse of `coordinates`."""
        return sum(getattr(place, axis) * stride for axis, stride, _ in self.strides())

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on one axis only, including `rank`, in the order
        of that axis.
        """
        if axis == "ep":
            return self._expert_group(rank)
        for name, stride, size in self.strides():
            if name == axis:
                first = rank - rank // stride % size * stride
                return tuple(first + step * stride for step in range(size))
        raise ConfigError(f"axis {axis!r} is not part of the rank order {self.order!r}")

    def _expert_group(self, rank: int) -> tuple[int, ...]:
        place = asdict(self.coordinates(rank))
        stride = self._expert_stride()
        first = self._local(place) - place["ep"] * stride
        members = []
        for local in range(first, first + self.ep * stride, stride):
            for axis, own_stride, size in self.strides("tp", "cp", "dp"):
                place[axis] = local // own_stride % size
            members.append(self.rank_of(Coordinates(**place)))
        return tuple(members)

    def used(self, *axes: str) -> tuple[str, ...]:
        """Return those of the given axes, in their order, that are larger than 1."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def to_json(self) -> dict[str, int | str]:
        """Return the layout as it stands in a rank file's header."""
        return asdict(self)

    def label(self, rank: int) -> str:
        """Return a rank's name from every axis above 1, DP first: `DP1 PP0 TP1`."""
        place = self.coordinates(rank)
        axes = self.used("dp", "pp", "cp", "ep", "tp")
        return " ".join(f"{axis.upper()}{getattr(place, axis)}" for axis in axes) or "single rank"


_MOST_KNOWN = 1 << 15


@lru_cache(maxsize=_MOST_KNOWN)
def _coordinates(layout: Layout, rank: int) -> Coordinates:
    """Return a rank's place, cached: titles, orders and groups of a large job ask for it often."""
    return layout._place(rank)


RANK_FILE_PATTERNS = ("benchmark-data-*.json", "benchmark-data-*.json.gz")
"""Patterns of the names of rank files, plain or compressed."""
PROBE_FILE_PATTERN = "scope-probe-*.jsonl"
"""Pattern of the names of files with probes (`megascan.probes`), often in the same folder."""


def rank_file_name(layout: Layout, place: Coordinates) -> str:
    """Return the name of a rank's file in the trace folder.

    CP and EP parts appear only where those axes are used.
    """
    name = f"benchmark-data-{place.dp}-pipeline-{place.pp}-tensor-{place.tp}"
    if layout.cp > 1:
        name += f"-context-{place.cp}"
    if layout.ep > 1:
        name += f"-expert-{place.ep}"
    return name + ".json"
