"""Say which ranks talk to each other: process groups as arrays of places.

Ranks are kept stage by stage, in the order of `Job.ranks_of_stage`: place p of stage s is rank
`ranks[s * n + p]`. Groups within a stage count places of that stage, groups across stages count
places of the whole job. Their ids are those of docs/format.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.grounds.rack.hardware import Floats, Places
from benchmarks.grounds.rack.job import Job
from megascan.topology import Layout
from megascan.vocabulary import group_id


@dataclass(frozen=True, eq=False)
class Groups:
    """All groups of one axis among some places; places in none of them are not `inside`."""

    axis: str
    index: Places  # (group, member)
    of: Places  # (place,): which group; 0 for places in none
    inside: Places  # places that are in one
    ids: tuple[str, ...]  # by place
    spans_hosts: np.ndarray[tuple[int], np.dtype[np.bool_]]
    members_a_host: Floats  # of a group, on the host that has most of it

    @property
    def size(self) -> int:
        """Return the members of a group."""
        return int(self.index.shape[1])

    def latest(self, times: Floats) -> Floats:
        """Return when the last member of each group comes, (variant, group)."""
        found: Floats = times[:, self.index].max(axis=-1)
        return found

    def spread(self, by_group: Floats) -> Floats:
        """Return what holds for each group for each place."""
        found: Floats = by_group[..., self.of]
        return found


def _groups(
    job: Job, axis: str, ranks: tuple[int, ...], parts: Iterable[tuple[int, ...]]
) -> Groups:
    place_of = {rank: place for place, rank in enumerate(ranks)}
    groups = [part for part in parts if all(rank in place_of for rank in part)]
    index = np.array([[place_of[rank] for rank in part] for part in groups], dtype=np.int64)
    of = np.zeros(len(ranks), dtype=np.int64)
    ids = [""] * len(ranks)
    for number, part in enumerate(groups):
        for rank in part:
            of[place_of[rank]] = number
            ids[place_of[rank]] = group_id(axis, part)
    hosts = [[job.rack.host_of(rank) for rank in part] for part in groups]
    return Groups(
        axis=axis,
        index=index,
        of=of,
        inside=np.unique(index),
        ids=tuple(ids),
        spans_hosts=np.array([len(set(each)) > 1 for each in hosts]),
        members_a_host=np.array([max(map(each.count, each)) for each in hosts], dtype=np.float64),
    )


_ALL = "all"


def _key_of(layout: Layout, axis: str) -> Callable[[int], tuple[object, ...]]:
    """Return what members of a group of this axis have in common."""

    def key(rank: int) -> tuple[object, ...]:
        at = layout.coordinates(rank)
        return {
            "tp": (at.cp, at.dp, at.pp),
            "cp": (at.tp, at.dp, at.pp),
            "dp": (at.tp, at.cp, at.pp),
            "pp": (at.tp, at.cp, at.dp),
            "dp_cp": (at.tp, at.pp),
            "tp_cp": (at.dp, at.pp),
            "tp_dp": (at.cp, at.pp),
            "mp": (at.cp, at.dp),
            "embd": (at.tp, at.cp, at.dp),
            "expt_dp": (at.ep, at.pp),
            "intra_dist_opt": (_ALL,),
            "world": (_ALL,),
        }[axis]

    return key


WITHIN_STAGE = ("tp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp", "ep", "expt_dp")
ACROSS_STAGES = ("pp", "mp", "embd", "intra_dist_opt", "world")


@lru_cache(maxsize=512)
def members(layout: Layout, axis: str) -> tuple[tuple[int, ...], ...]:
    """Return all groups of an axis, each in the order of its ranks."""
    ranks = range(layout.world_size)
    if axis == "ep":
        return tuple(dict.fromkeys(layout.group(rank, "ep") for rank in ranks))
    if axis == "embd":
        ends = (0, layout.pp - 1)
        ranks_of_ends = [rank for rank in ranks if layout.coordinates(rank).pp in ends]
    else:
        ranks_of_ends = list(ranks)
    key = _key_of(layout, axis)
    parts: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks_of_ends:
        parts.setdefault(key(rank), []).append(rank)
    return tuple(map(tuple, parts.values()))


def header_groups(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the groups of a rank by id, as its header names them."""
    found = {}
    for axis in (*WITHIN_STAGE, *ACROSS_STAGES):
        for part in members(layout, axis):
            if rank in part:
                found[group_id(axis, part)] = part
    return found


class Map:
    """The groups of a job, by axis."""

    def __init__(self, job: Job) -> None:
        self.job = job
        stages = [job.ranks_of_stage(stage) for stage in range(job.num_stages)]
        self.ranks = tuple(rank for stage in stages for rank in stage)
        self.hosts = np.array([job.rack.host_of(rank) for rank in self.ranks], dtype=np.int64)
        self.place_of = {rank: place for place, rank in enumerate(self.ranks)}
        self.within = [
            {axis: _groups(job, axis, ranks, members(job.layout, axis)) for axis in WITHIN_STAGE}
            for ranks in stages
        ]
        self.across = {
            axis: _groups(job, axis, self.ranks, members(job.layout, axis))
            for axis in ACROSS_STAGES
        }
        at = [job.layout.coordinates(rank) for rank in stages[0]]
        self.tp = np.array([one.tp for one in at], dtype=np.int64)
        self.dp = np.array([one.dp for one in at], dtype=np.int64)
        self.ep = np.array([one.ep for one in at], dtype=np.int64)

    def of_stage(self, stage: int) -> slice:
        """Return where the places of a stage are."""
        size = self.job.ranks_a_stage
        return slice(stage * size, (stage + 1) * size)
