"""Number the process groups of a job, and name them as its rank files do."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.grounds.quarry.jobs import Job
from megascan.topology import Coordinates, Layout

AXES = ("tp", "cp", "dp", "dp_cp", "ep", "expt_dp", "embd", "mp")
"""Axes over which these jobs communicate."""


def members(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Return the ranks of a rank's group along an axis, none where it is in no such group."""
    if axis == "embd":
        line = layout.group(rank, "pp")
        return (line[0], line[-1]) if rank in (line[0], line[-1]) and len(line) > 1 else ()
    if axis not in _ALIKE:
        return layout.group(rank, axis)
    same = _ALIKE[axis]
    places = [layout.coordinates(each) for each in range(layout.world_size)]
    here = same(places[rank])
    return tuple(each for each, place in enumerate(places) if same(place) == here)


_ALIKE: dict[str, Callable[[Coordinates], tuple[int, int]]] = {
    "dp_cp": lambda place: (place.tp, place.pp),
    "expt_dp": lambda place: (place.ep, place.pp),
    "mp": lambda place: (place.dp, place.cp),
}
"""What members of a group have in common, where groups are not along one axis."""


class Groups:
    """The process groups of a job: their members by number, and the number by rank and axis."""

    def __init__(self, job: Job) -> None:
        self._layout = job.layout
        self.members: list[tuple[int, ...]] = []
        self.names: list[str] = []
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self._by_rank = [
            {axis: self._number(axis, rank) for axis in AXES} for rank in range(job.num_ranks)
        ]
        self.by_rank = [
            {
                f"{axis}@{min(everyone)}": everyone
                for axis in ((*AXES, "pp") if job.style == "megatron" else ("dp",))
                if (everyone := members(job.layout, rank, axis))
            }
            for rank in range(job.num_ranks)
        ]
        """All groups of a rank by name, as its header has them."""

    def of(self, rank: int, axis: str) -> int | None:
        """Return the number of a rank's group, None where the rank is alone in it."""
        return self._by_rank[rank][axis]

    def size(self, rank: int, axis: str) -> int:
        """Return how many members a rank's group has."""
        number = self._by_rank[rank][axis]
        return 1 if number is None else len(self.members[number])

    def _number(self, axis: str, rank: int) -> int | None:
        everyone = members(self._layout, rank, axis)
        if len(everyone) < 2:
            return None
        if (axis, everyone) not in self._numbers:
            self._numbers[axis, everyone] = len(self.members)
            self.members.append(everyone)
            self.names.append(f"{axis}@{min(everyone)}")
        return self._numbers[axis, everyone]
