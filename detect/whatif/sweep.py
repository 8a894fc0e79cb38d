"""One pass over the graph that replays many scenarios at once.

    start(o) = latest end of what o waits for, or 0
    end(o)   = latest start in o's group + weight(o)

Every quantity is an array (lane, scenario, step); a scenario is another choice of weights. The
pass costs one visit a group whatever the number of scenarios, lanes and steps. Source of the
recurrence: "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from detect.whatif.graph import EACH_LANE, Floats, Graph, Partition

Weigh = Callable[[int], Floats]
"""Weight of a node, broadcastable to (lane, scenario, step), seconds."""


Observer = Callable[[int, Floats, Floats], None]
"""Is told (node, start, end) of every node, in the order of the replay."""


def sweep(
    graph: Graph,
    weigh: Weigh,
    *,
    partitions: Mapping[str, Partition] | None = None,
    observe: Observer | None = None,
) -> Floats:
    """Length of the step, seconds, (scenario, step).

    `partitions` replaces the graph's own where lanes stand for something else, such as classes of
    equal lanes. `observe` sees every node's times, for those who want more than the total.
    """
    lanes = _reducers(partitions or graph.partitions)
    nothing = np.zeros((1, 1, 1))
    ends: dict[int, Floats] = {}
    for visit in graph.visits:
        ready = _latest(ends, graph.dependencies[visit.nodes[0]], nothing)
        for node in visit.nodes[1:]:
            ready = np.maximum(ready, _latest(ends, graph.dependencies[node], nothing))
        if visit.partition != EACH_LANE:
            ready = lanes[visit.partition](ready)
        for node in visit.nodes:
            ends[node] = ready + weigh(node)
            if observe is not None:
                observe(node, ready, ends[node])
        for node in visit.released:
            del ends[node]
    total = nothing
    for node in graph.finish:
        total = np.maximum(total, ends[node])
    return np.asarray(total.max(axis=0))


def _latest(ends: Mapping[int, Floats], nodes: tuple[int, ...], nothing: Floats) -> Floats:
    if not nodes:
        return nothing
    latest = ends[nodes[0]]
    for node in nodes[1:]:
        latest = np.maximum(latest, ends[node])
    return latest


def _reducers(partitions: Mapping[str, Partition]) -> dict[str, Callable[[Floats], Floats]]:
    return {name: _reducer(partition) for name, partition in partitions.items()}


def _reducer(partition: Partition) -> Callable[[Floats], Floats]:
    """The maximum over each set of lanes, for every lane of it."""
    if partition.is_trivial:
        return lambda times: times
    if partition.is_whole:
        return lambda times: times.max(axis=0, keepdims=True)
    labels = partition.labels
    order = np.argsort(labels, kind="stable")
    first = np.flatnonzero(np.diff(labels[order], prepend=-1))

    def reduce(times: Floats) -> Floats:
        if times.shape[0] == 1:  # the same on every lane
            return times
        return np.maximum.reduceat(times[order], first, axis=0)[labels]

    return reduce
