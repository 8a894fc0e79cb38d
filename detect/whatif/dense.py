"""From rows of an op table to a Replay: dense arrays (node, lane, step), weights, ideals."""

from __future__ import annotations

import numpy as np

from detect.whatif.cells import Singles, Steps, scatter, template
from detect.whatif.graph import Floats, Graph, Ints
from detect.whatif.optable import OpTable
from detect.whatif.replay import Replay
from detect.whatif.template import MEAN_TYPES, TYPES, build_graph
from megascan.errors import InputError

_CLOCK_GUARD_S = -0.010
"""A transfer that would have ended this long before its last member began is a clock error."""


def replay_of_op_table(table: OpTable) -> Replay:
    """Graph and weights of an op table.

    Steps in which an operation of some rank is missing are left out and `notes` says so. Raises
    InputError when no step is complete or the table names an operation type that is not known.
    """
    used = np.flatnonzero(np.bincount(table.optype, minlength=len(table.optypes)))
    unknown = sorted({table.optypes[code] for code in used} - TYPES)
    if unknown:
        raise InputError(
            f"{table.source} has operations of type {', '.join(unknown)}, known are "
            f"{', '.join(sorted(TYPES))}; rename them in the op table"
        )
    steps = Steps.of(table.step)
    operations, lookup = template(table, steps.usual)
    num_lanes = int(table.dp_rank.max()) + 1
    shape = (len(operations), num_lanes, len(steps.ids))
    complete, start, duration = scatter(table, lookup, steps, shape)
    if not complete.any():
        raise InputError(
            f"{table.source} has no step with all {shape[0]} operations of all {num_lanes} "
            "replicas; record at least one complete step"
        )
    if not complete.all():
        start, duration = start[:, :, complete], duration[:, :, complete]
    end = start + duration
    graph = build_graph(operations, num_lanes, reduces_gradients=table.has_data_parallelism)
    ranks = _ranks(table, graph.num_stages, num_lanes)
    weights = traced_weights(graph, start, duration)
    dropped = int((~complete).sum())
    return Replay(
        graph=graph,
        weights=weights,
        ideal=ideal_weights(graph, weights),
        ranks=ranks,
        steps=steps.ids[complete],
        measured=(end.max(axis=(0, 1)) - start.min(axis=(0, 1))).astype(np.float64),
        gpus_per_worker=table.gpus_per_worker,
        layout_text=f"DP {num_lanes} PP {graph.num_stages}, "
        f"{_gpus(table.gpus_per_worker)} to a recorded rank",
        labels=_labels(ranks),
        columns=np.arange(num_lanes),
        row_labels=("",) * num_lanes,
        notes=(f"{dropped} incomplete steps left out",) if dropped else (),
    )


def traced_weights(graph: Graph, start: Singles, duration: Singles) -> Floats:
    """Transfer time of communication, duration of all else, (node, lane, step).

    transfer = own end - last start of the group; what lies before it is waiting. Computed in
    float32, the resolution of the data, as the source does.
    """
    weights = duration.copy()
    for group in graph.groups:
        if graph.nodes[group.nodes[0]].is_local:
            continue
        last = start[list(group.nodes)].max(axis=0)
        if group.partition:
            last = last.max(axis=0, keepdims=True)  # op tables know all lanes or none
        for node in group.nodes:
            weights[node] = start[node] + duration[node] - last
    weights[weights <= _CLOCK_GUARD_S] = 0.0
    return weights.astype(np.float64)


def ideal_weights(graph: Graph, weights: Floats) -> Floats:
    """What each operation would take were all of its type alike, (node,).

    The mean over stages, microbatches, replicas and steps for what computes, the median for
    communication (and the layer norm's all-reduce), which a few late peers would distort.
    """
    ideal = np.zeros(len(graph.nodes))
    for optype in graph.optypes:
        nodes = graph.of_type(optype)
        pool = weights[nodes]
        ideal[nodes] = pool.mean() if optype in MEAN_TYPES else np.median(pool)
    return ideal


def _ranks(table: OpTable, num_stages: int, num_lanes: int) -> Ints:
    ranks = np.full((num_stages, num_lanes), -1, dtype=np.int64)
    ranks[table.stage, table.dp_rank] = table.rank
    return ranks


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _labels(ranks: Ints) -> dict[int, str]:
    return {
        int(rank): f"DP{lane} PP{stage}"
        for stage, lanes in enumerate(ranks)
        for lane, rank in enumerate(lanes)
    }
