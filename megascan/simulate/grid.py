"""Ranks of a layout as arrays: a stage's ranks in ascending order, and groups as reshapes.

Within a stage, ranks are the digits of a number (`Layout.order` less pp), so the members of a
group lie at a fixed stride. A maximum over a group is then one reshape and one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megascan.topology import Layout

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

STAGE_AXES = ("tp", "cp", "ep", "dp", "dp_cp")
CROSS_STAGE_AXES = ("mp", "embd", "intra_dist_opt", "pp")
"""Names as `megascan.instrument` gives them; intra_dist_opt is everybody."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a layout as a matrix (stage, place), places ascending by rank."""

    layout: Layout

    @cached_property
    def ranks(self) -> Integers:
        """Global ranks, shape (stage, place)."""
        layout = self.layout
        stages = [[] for _ in range(layout.pp)]  # type: list[list[int]]
        for rank in range(layout.world_size):
            stages[layout.coordinates(rank).pp].append(rank)
        return np.array(stages, dtype=np.int64)

    @property
    def num_places(self) -> int:
        """Ranks of one stage."""
        return self.layout.world_size // self.layout.pp

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """Stride and size of an axis among the places of a stage."""
        strides: dict[str, tuple[int, int]] = {}
        stride = 1
        for axis in self.layout.order.split("-"):
            if axis in ("tp", "cp", "dp"):
                size = getattr(self.layout, axis)
                strides[axis] = (stride, size)
                stride *= size
        return strides | {"ep": (1, self.layout.ep)}

    def size(self, axis: str) -> int:
        """Members of a group on an axis."""
        sizes = {
            "dp_cp": self.layout.dp * self.layout.cp,
            "mp": self.layout.tp * self.layout.pp,
            "embd": min(self.layout.pp, 2),
            "intra_dist_opt": self.layout.world_size,
            "pp": self.layout.pp,
        }
        return sizes[axis] if axis in sizes else self._strides[axis][1]

    @staticmethod
    def _axes(axis: str) -> tuple[str, ...]:
        """Axes within a stage that a group spans."""
        spanned = {
            "dp_cp": ("dp", "cp"),
            "mp": ("tp",),
            "embd": (),
            "pp": (),
            "intra_dist_opt": ("tp", "cp", "dp"),
        }
        return spanned.get(axis, (axis,))

    def group_max(self, values: Floats, axis: str) -> Floats:
        """Largest value of each place's group within the stage, on the last dimension of
        `values`."""
        for single in self._axes(axis):
            stride, size = self._strides[single]
            if size > 1:
                values = self._spread_max(values, stride, size)
        return values

    @staticmethod
    def _spread_max(values: Floats, stride: int, size: int) -> Floats:
        shape = values.shape
        blocks = values.reshape(*shape[:-1], -1, size, stride)
        largest = blocks.max(axis=-2, keepdims=True)
        spread: Floats = np.broadcast_to(largest, blocks.shape).reshape(shape)
        return spread

    def first_member(self, values: Floats, axis: str) -> Floats:
        """Each group's first member's value for all its members (one draw a group)."""
        for single in self._axes(axis):
            stride, size = self._strides[single]
            if size > 1:
                shape = values.shape
                blocks = values.reshape(*shape[:-1], -1, size, stride)
                values = np.broadcast_to(blocks[..., :1, :], blocks.shape).reshape(shape)
        return values

    def stages_of(self, axis: str) -> tuple[int, ...]:
        """Stages that a cross-stage axis joins."""
        last = self.layout.pp - 1
        return (0, last) if axis == "embd" else tuple(range(last + 1))

    def smallest_members(self, axis: str) -> Integers:
        """Smallest rank of each rank's group, shape (stage, place)."""
        ranks = self.ranks
        if axis in CROSS_STAGE_AXES:
            ranks = np.broadcast_to(ranks[list(self.stages_of(axis))].min(axis=0), ranks.shape)
        smallest = -self.group_max(-ranks.astype(np.float64), axis)
        return smallest.astype(np.int64)

    def members(self, axis: str) -> dict[str, tuple[int, ...]]:
        """All groups of an axis by id (`tp@4`), their members in ascending order."""
        smallest = self.smallest_members(axis)
        stages = list(self.stages_of(axis)) if axis in CROSS_STAGE_AXES else slice(None)
        groups: dict[str, list[int]] = {}
        for rank, first in zip(
            self.ranks[stages].ravel().tolist(), smallest[stages].ravel().tolist(), strict=True
        ):
            groups.setdefault(f"{axis}@{first}", []).append(rank)
        return {name: tuple(sorted(ranks)) for name, ranks in groups.items()}
