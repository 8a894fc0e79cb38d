"""Replay one training step from its dependency graph, under any choice of operation times.

A **node** is one operation of one pipeline stage (say, the third forward of stage 2). It exists on
every **lane** of the stage; a lane is a rank's place within its stage (its DP, CP and TP rank), so
lane 3 of all stages is one replica. Nodes that leave together, a send and its receive or one
collective, form a group; its `partition` says which lanes wait for one another.

    stage 0:  forward ── send ─┐              nodes 0, 1      groups (0,), (1, 2), (3,)
    stage 1:            recv ──┴─ forward     nodes 2, 3      dependencies 1←0, 3←2

`sweep` visits every group once, for many scenarios (choices of weights) at once:

    start(o) = latest end of what o waits for, or 0      maximum over o's group and its lanes
    end(o)   = start(o) + weight(o)

Example: forward 10 ms, transfer 2 ms on both ends, forward 12 ms gives a step of 24 ms; were the
second forward 10 ms as well, 22 ms. All times are arrays (lane, scenario, step), so the cost is one
visit a group whatever their number. The recurrence is that of "Understanding Stragglers in Large
Model Training Using What-if Analysis", OSDI 2025.

`Replay` is a graph with its traced and its ideal weights: what every figure of this package needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Protocol

import numpy as np

from megascan.arrays import Flags, Floats, Integers, group_starts
from megascan.errors import InputError

NS_PER_S = 1e9
EACH_LANE = ""
"""Partition of an operation in which lanes do not wait for one another."""
FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
DATA, GC, HOST = "data-loading", "gc", "host"
"""Types of local work. HOST is the time between spans: the host does something else, or is late."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation of a stage. `optype` is its class in S_t; `is_local` if it waits for no rank.

    `part` numbers the pieces of one pass that collectives cut it into.
    """

    stage: int
    optype: str
    is_local: bool
    microbatch: int = -1
    chunk: int = -1
    part: int = 0
    size_bytes: int = -1

    @property
    def is_message(self) -> bool:
        """Return whether this is one end of a message between stages."""
        return self.optype.endswith(("-send", "-recv"))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that leave together; `partition` names the lanes that wait for one another."""

    nodes: tuple[int, ...]
    partition: str = EACH_LANE


def partition_of(keys: Sequence[object]) -> Integers:
    """Return the number of each lane's set, (lane,), from 0: lanes of the same key are one set.

    >>> partition_of(["b", "a", "b"])
    array([0, 1, 0])
    """
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes, what each waits for (`dependencies`, by node), groups, and the lane partitions.

    A partition is the number of each lane's set, (lane,), from 0; lanes of a set wait for each
    other.
    `finish` are the nodes whose latest end is the end of the step. Raises InputError from `visits`
    for operations that wait for one another in a circle.
    """

    nodes: tuple[Node, ...]
    dependencies: tuple[tuple[int, ...], ...]
    groups: tuple[Group, ...]
    partitions: dict[str, Integers]
    finish: tuple[int, ...]
    visits: tuple[tuple[Group, tuple[int, ...]], ...] = field(init=False)
    """Groups in the order of a sweep, each with the nodes that are not needed after it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "visits", _visits(self))

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return 1 + max(node.stage for node in self.nodes)

    @property
    def stage(self) -> Integers:
        """Return the stage of each node, (node,)."""
        return np.array([node.stage for node in self.nodes])

    @property
    def is_local(self) -> Flags:
        """Return whether each node waits for no other rank, (node,)."""
        return np.array([node.is_local for node in self.nodes])

    @property
    def optypes(self) -> tuple[str, ...]:
        """Return operation types in order of first appearance."""
        return tuple(dict.fromkeys(node.optype for node in self.nodes))

    def of_type(self, optype: str) -> Integers:
        """Return the nodes of one operation type."""
        return np.array([n for n, node in enumerate(self.nodes) if node.optype == optype])

    def lane_sets(self, partition: str, num_lanes: int) -> Integers:
        """Return the number of each lane's set, (lane,): lanes of a set wait for one another."""
        return np.arange(num_lanes) if partition == EACH_LANE else self.partitions[partition]


def _visits(graph: Graph) -> tuple[tuple[Group, tuple[int, ...]], ...]:
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
    return tuple(zip(order, map(tuple, released), strict=True))


def _topological_order(graph: Graph) -> list[Group]:
    """Return the groups, each after all that its nodes wait for (Kahn's algorithm)."""
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


Weigh = Callable[[int], Floats]
"""Weight of a node, broadcastable to (lane, scenario, step), seconds."""
Observer = Callable[[int, Floats, Floats], None]
"""Called with (node, start, end) of every node, in the order of the replay."""


def sweep(
    graph: Graph,
    weigh: Weigh,
    *,
    partitions: Mapping[str, Integers] | None = None,
    observe: Observer | None = None,
) -> Floats:
    """Return the length of the step, (scenario, step) seconds.

    `partitions` replaces the graph's own where lanes stand for something else, such as classes of
    equal lanes. `observe` sees every node's times, for those who want more than the total.
    """
    lanes = {name: _reducer(one) for name, one in (partitions or graph.partitions).items()}
    nothing = np.zeros((1, 1, 1))
    ends: dict[int, Floats] = {}
    for group, released in graph.visits:
        waits_for = [graph.dependencies[node] for node in group.nodes]
        before = [ends[one] for of_node in waits_for for one in of_node]
        before += [] if all(waits_for) else [nothing]  # who waits for nothing may begin at 0
        ready = reduce(np.maximum, before)
        if group.partition != EACH_LANE:
            ready = lanes[group.partition](ready)
        for node in group.nodes:
            ends[node] = ready + weigh(node)
            if observe is not None:
                observe(node, ready, ends[node])
        for node in released:
            del ends[node]
    total = reduce(np.maximum, [ends[node] for node in graph.finish], nothing)
    return np.asarray(total.max(axis=0))


def _reducer(labels: Integers) -> Callable[[Floats], Floats]:
    """Return a function that gives every lane the maximum over its set."""
    if labels.max(initial=0) + 1 == len(labels):  # each lane by itself
        return lambda times: times
    if not labels.any():
        return lambda times: times.max(axis=0, keepdims=True)
    order = np.argsort(labels, kind="stable")
    first = group_starts(labels[order])

    def reduce_sets(times: Floats) -> Floats:
        if times.shape[0] == 1:  # the same on every lane
            return times
        return np.maximum.reduceat(times[order], first, axis=0)[labels]

    return reduce_sets


class Instants(Protocol):
    """When the operations of a replay took place, ns on one clock.

    `step` is the place of a step among those of the replay. Nodes and lanes are arrays (hop,), and
    so are the results; -1 where nothing was recorded.
    """

    def begin_ns(self, node: int, lane: int, step: int) -> int:
        """Return when the rank that ran a node began the step."""

    def ends_ns(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return when operations ended."""

    def rows(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return the spans in which operations lie, as rows of the timeline's table."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A traced job in the form that scenarios are replayed on. Times in seconds.

    `weights` (node, lane, step) is the time an operation takes without waiting for others, `ideal`
    (node,) what it would take were all alike. `ranks` (stage, lane) are global ranks, `steps` the
    iteration numbers, `measured` (step,) the step times in the trace. One recorded rank stands for
    `gpus_per_worker` GPUs.
    """

    graph: Graph
    weights: Floats
    ideal: Floats
    ranks: Integers
    steps: Integers
    measured: Floats
    recorded: Flags
    """(stage, lane): whether the rank ran what its stage usually runs. The weights of any other are
    those of a typical rank."""
    instants: Instants
    mates: Integers
    """Number of the set of lanes that TP, CP and EP groups join, (lane,)."""
    gpus_per_worker: int = 1
    layout_text: str = ""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Speaking name of each rank."""
    columns: Integers = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """DP rank of each lane, (lane,): its column in a heat map."""
    row_labels: tuple[str, ...] = ()
    """Name of each lane's place on the other axes (TP1), "" where there is none."""
    shared_work: tuple[tuple[int, ...], ...] = ()
    """Ranks whose compute cannot be told apart in this trace (a TP group without its collectives
    traced); replacing one of them replaces all."""
    entangled: Mapping[str, Integers] = field(default_factory=dict)
    """Types of work that hold unrecorded waiting for other ranks, and the lanes that wait for each
    other: if one of these lanes is slow in such work, all are."""
    notes: tuple[str, ...] = ()

    @property
    def num_lanes(self) -> int:
        """Return the number of ranks of one stage."""
        return int(self.ranks.shape[1])

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of the job."""
        return self.ranks.size * self.gpus_per_worker

    def traced_row(self, node: int) -> Floats:
        """Return a node's traced weights, (lane, 1 scenario, step)."""
        row: Floats = self.weights[node][:, None, :]
        return row

    def ideal_row(self, node: int) -> Floats:
        """Return a node's ideal weight, (1 lane, 1 scenario, 1 step)."""
        return self.ideal[node : node + 1, None, None]

    @cached_property
    def traced_s(self) -> Floats:
        """Return the replayed step times with the traced weights, (step,)."""
        times: Floats = sweep(self.graph, self.traced_row)[0]
        return times

    @cached_property
    def ideal_s(self) -> float:
        """Return the replayed step time with the ideal weights; the same for every step."""
        return float(sweep(self.graph, self.ideal_row)[0, 0])

    @cached_property
    def error_ratio(self) -> Floats:
        """Return replayed over measured step time, minus 1, (step,): how well the model holds."""
        return np.asarray(self.traced_s / self.measured - 1.0)

    def with_shared_work(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return these ranks, and those whose compute cannot be told from theirs, sorted."""
        chosen = set(ranks)
        for members in self.shared_work:
            if chosen & set(members):
                chosen |= set(members)
        return tuple(sorted(chosen))

    def mask(self, ranks: tuple[int, ...]) -> Flags:
        """Return the places of these ranks, (stage, lane)."""
        return np.isin(self.ranks, ranks)


def keep_nodes(replay: Replay, kept: Flags) -> Floats:
    """Replay with traced weights where `kept` (scenario, node); return (scenario, step) seconds."""
    choice = kept.T[:, None, :, None]  # (node, lane, scenario, step)

    def weigh(node: int) -> Floats:
        if not kept[:, node].any():
            return replay.ideal_row(node)
        if kept[:, node].all():
            return replay.traced_row(node)
        return np.where(choice[node], replay.traced_row(node), replay.ideal[node])

    return over_all_steps(replay, sweep(replay.graph, weigh))


def over_all_steps(replay: Replay, times: Floats) -> Floats:
    """Spread scenarios that are ideal throughout, and so have one step, over all steps."""
    return np.broadcast_to(times, (times.shape[0], len(replay.steps)))
