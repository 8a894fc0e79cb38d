"""Ideal weights of a job whose passes are cut into pieces by the collectives inside them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from detect.whatif.graph import Floats, Graph
from detect.whatif.stage_program import BACKWARD, DATA, FORWARD, GC, OPTIMIZER


def traced_ideal(graph: Graph, weights: Floats) -> Floats:
    """What each operation would take were all of its sort alike, (node,) seconds.

    A forward takes the mean over stages, chunks, microbatches, ranks and steps, and so do backward
    and optimizer; the pieces of one keep their shares of it. Communication takes the median of its
    type and size, loading and gaps the median of the same place in their own stage. A collection
    of garbage takes nothing.
    """
    ideal = np.zeros(len(graph.nodes))
    for optype in graph.optypes:
        if optype in (FORWARD, BACKWARD, OPTIMIZER):
            _pooled(graph, weights, ideal, optype)
        elif optype != GC:
            _medians(graph, weights, ideal, optype)
    return ideal


def _pooled(graph: Graph, weights: Floats, ideal: Floats, optype: str) -> None:
    pieces: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number in graph.of_type(optype).tolist():
        node = graph.nodes[number]
        pieces[node.stage, node.chunk][node.part].append(number)
    means = {
        place: {part: float(weights[nodes].mean()) for part, nodes in parts.items()}
        for place, parts in pieces.items()
    }
    totals = {place: sum(parts.values()) for place, parts in means.items()}
    pooled = float(np.mean(list(totals.values())))
    for place, parts in pieces.items():
        for part, nodes in parts.items():
            share = means[place][part] / totals[place] if totals[place] else 0.0
            ideal[nodes] = pooled * share


def _medians(graph: Graph, weights: Floats, ideal: Floats, optype: str) -> None:
    pools: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for number in graph.of_type(optype).tolist():
        node = graph.nodes[number]
        if node.is_local:
            single = -1 if node.microbatch >= 0 else number
            pools[node.stage, node.chunk, node.part, single].append(number)
        else:
            pools[-1, -1, -1, node.size_bytes].append(number)
    for nodes in pools.values():
        pool = weights[nodes]
        if optype == DATA and pool.any():
            pool = pool[pool > 0]  # one rank of a TP group loads for all of it
        ideal[nodes] = float(np.median(pool))
