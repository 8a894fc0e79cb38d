"""The dependency graph of one training step: what must end before what may start.

A **node** is one operation of one pipeline stage (the third forward of stage 2). It exists on
every **lane** of the stage: a lane is a rank's place within its stage (its DP, CP and TP rank),
the same number on every stage. Times of a node are therefore arrays by lane. Nodes that can only
leave together, a send and its receive or the collective of several stages, form one group; a
`partition` says which lanes of it wait for one another.

    stage 0:  forward ── send ─┐              nodes 0, 1      groups (0,), (1, 2), (3,)
    stage 1:            recv ──┴─ forward     nodes 2, 3      dependencies 1←0, 3←2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megascan.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

EACH_LANE = ""
"""Partition of an operation in which lanes do not wait for one another."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation of a stage. `optype` is its class in S_t; `is_local` when it waits for none.

    `part` numbers the pieces of one pass that collectives cut it into.
    """

    stage: int
    optype: str
    is_local: bool
    microbatch: int = -1
    chunk: int = -1
    part: int = 0
    size_bytes: int = -1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that leave together; `partition` names the lanes that wait for one another."""

    nodes: tuple[int, ...]
    partition: str = EACH_LANE


@dataclass(frozen=True)
class Partition:
    """Lanes in sets. `labels` (lane,) numbers the set of each lane from 0."""

    labels: Ints

    @property
    def is_whole(self) -> bool:
        """All lanes are one set."""
        return not self.labels.any()

    @property
    def is_trivial(self) -> bool:
        """Every lane is a set of its own."""
        return bool(self.labels.max(initial=0) + 1 == len(self.labels))


def partition_of(keys: Sequence[object]) -> Partition:
    """Sets of lanes that have the same key, numbered in order of first appearance."""
    numbers: dict[object, int] = {}
    return Partition(np.array([numbers.setdefault(key, len(numbers)) for key in keys]))


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One group in the order of a sweep; `released` nodes are not needed after it."""

    nodes: tuple[int, ...]
    partition: str
    released: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes, what each waits for (`dependencies`, by node), groups, and the lane partitions.

    `finish` are the nodes whose latest end is the end of the step. Raises InputError from `visits`
    for operations that wait for one another in a circle.
    """

    nodes: tuple[Node, ...]
    dependencies: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    partitions: dict[str, Partition]
    finish: tuple[int, ...]
    visits: tuple[Visit, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "visits", _visits(self))

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return 1 + max(node.stage for node in self.nodes)

    @property
    def stage(self) -> Ints:
        """Stage of each node, (node,)."""
        return np.array([node.stage for node in self.nodes])

    @property
    def is_local(self) -> Bools:
        """Whether each node waits for no other rank, (node,)."""
        return np.array([node.is_local for node in self.nodes])

    @property
    def optypes(self) -> tuple[str, ...]:
        """Operation types in order of first appearance."""
        return tuple(dict.fromkeys(node.optype for node in self.nodes))

    def of_type(self, optype: str) -> Ints:
        """Nodes of one operation type."""
        return np.array([n for n, node in enumerate(self.nodes) if node.optype == optype])


def _visits(graph: Graph) -> tuple[Visit, ...]:
    order = _topological_order(graph)
    last_use = list(range(len(graph.nodes)))
    for position, group in enumerate(order):
        for node in group.nodes:
            last_use[node] = position
            for earlier in graph.dependencies[node]:
                last_use[earlier] = position
    released: list[list[int]] = [[] for _ in order]
    for node in set(range(len(graph.nodes))) - set(graph.finish):
        released[last_use[node]].append(node)
    return tuple(
        Visit(nodes=group.nodes, partition=group.partition, released=tuple(done))
        for group, done in zip(order, released, strict=True)
    )


def _topological_order(graph: Graph) -> list[Group]:
    """Groups such that each comes after all that its nodes wait for (Kahn's algorithm)."""
    group_of = {node: number for number, group in enumerate(graph.groups) for node in group.nodes}
    followers: list[set[int]] = [set() for _ in graph.groups]
    num_open = [0] * len(graph.groups)
    for number, group in enumerate(graph.groups):
        before = {group_of[d] for node in group.nodes for d in graph.dependencies[node]}
        for earlier in before:
            followers[earlier].add(number)
        num_open[number] = len(before)
    ready = [number for number, count in enumerate(num_open) if not count]
    order: list[Group] = []
    while ready:
        number = ready.pop()
        order.append(graph.groups[number])
        for later in sorted(followers[number], reverse=True):
            num_open[later] -= 1
            if not num_open[later]:
                ready.append(later)
    if len(order) < len(graph.groups):
        stuck = next(number for number, count in enumerate(num_open) if count)
        node = graph.nodes[graph.groups[stuck].nodes[0]]
        raise InputError(
            f"{len(graph.groups) - len(order)} operations wait for one another in a circle, among "
            f"them {node.optype} of stage {node.stage}; the trace is not that of one training step"
        )
    return order
