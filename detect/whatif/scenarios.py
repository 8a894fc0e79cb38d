"""The families of scenarios, each replayed in one sweep whatever its number of scenarios.

"keep X" means: X has its traced weights, everything else is ideal; the longer the step, the more
X costs. Scenarios that keep one lane need not replay all lanes: those that differ from the kept
lane in the same way (same TP group, same DP group, neither) are equal, and one row stands for each
such class. That makes one scenario for every rank linear in the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from detect.whatif.graph import Bools, Floats, Ints, Partition, partition_of
from detect.whatif.replay import Replay
from detect.whatif.sweep import sweep


def keep_nodes(replay: Replay, kept: Bools) -> Floats:
    """Step times, (scenario, step), with traced weights where `kept` (scenario, node)."""
    choice = kept.T[:, None, :, None]  # (node, lane, scenario, step)

    def weigh(node: int) -> Floats:
        if not kept[:, node].any():
            return replay.ideal[node : node + 1, None, None]
        if kept[:, node].all():
            return replay.row(node)
        return np.where(choice[node], replay.row(node), replay.ideal[node])

    return _steps(replay, sweep(replay.graph, weigh))


def keep_places(replay: Replay, kept: Bools) -> Floats:
    """Step times, (scenario, step), with traced weights where `kept` (scenario, stage, lane)."""
    stage = replay.graph.stage

    def weigh(node: int) -> Floats:
        chosen = kept[:, stage[node]].T[:, :, None]  # (lane, scenario, 1)
        return np.where(chosen, replay.row(node), replay.ideal[node])

    return _steps(replay, sweep(replay.graph, weigh))


def keep_each_rank(replay: Replay, *, whole_lanes: bool = True) -> tuple[Floats, Floats]:
    """(keep each rank alone, keep each lane on all stages).

    Step times of shape (stage, lane, step) and (lane, step). With `whole_lanes` False the second
    is empty and costs nothing.
    """
    graph, num_stages = replay.graph, replay.graph.num_stages
    classes, partitions = lane_classes(graph.partitions, replay.num_lanes)
    num_classes = len(classes)
    stage = graph.stage
    shape = (num_classes, num_stages + whole_lanes, replay.num_lanes, len(replay.steps))

    def weigh(node: int) -> Floats:
        weight = np.full(shape, replay.ideal[node])
        weight[0, stage[node]] = replay.weights[node]
        if whole_lanes:
            weight[0, num_stages] = replay.weights[node]
        return weight.reshape(num_classes, -1, shape[3])

    times = sweep(graph, weigh, partitions=partitions).reshape(shape[1:])
    return times[:num_stages], times[num_stages] if whole_lanes else times[:0, 0]


def lane_classes(
    partitions: Mapping[str, Partition], num_lanes: int
) -> tuple[Ints, dict[str, Partition]]:
    """Classes of lanes that are equal when one lane alone differs, and the partitions of classes.

    Returns (size of each class, partitions over classes); class 0 is the one lane. Two lanes are
    equal when in every partition their sets hold the same classes; classes are split until that
    is true. Partitions come from a regular grid of ranks, so that it is the same for every lane.
    """
    classes = np.minimum(np.arange(num_lanes), 1)
    while True:
        sets = {name: _classes_in_sets(p, classes) for name, p in partitions.items()}
        signatures = [
            (int(classes[lane]), *(sets[name][p.labels[lane]] for name, p in partitions.items()))
            for lane in range(num_lanes)
        ]
        refined = partition_of(signatures).labels
        if refined.max() == classes.max():
            break
        classes = refined
    first = [int(np.argmax(classes == number)) for number in range(int(classes.max()) + 1)]
    merged = {
        name: partition_of([sets[name][p.labels[lane]] for lane in first])
        for name, p in partitions.items()
    }
    return np.bincount(classes), merged


def _classes_in_sets(partition: Partition, classes: Ints) -> list[tuple[int, ...]]:
    """Classes present in each set of a partition."""
    present = np.zeros((int(partition.labels.max()) + 1, int(classes.max()) + 1), dtype=np.bool_)
    present[partition.labels, classes] = True
    return [tuple(np.flatnonzero(row).tolist()) for row in present]


def _steps(replay: Replay, times: Floats) -> Floats:
    """Scenarios that are ideal throughout have one step for all; spread it."""
    return np.broadcast_to(times, (times.shape[0], len(replay.steps)))
