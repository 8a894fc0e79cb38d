"""Compute what slowness costs a step and where it sits.

Definitions after "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025), with T(...) the mean over steps of the replayed step time:

    S     = T(traced) / T(ideal)                                    waste = 1 - 1/S
    S_t   = T(ideal, but type t as traced) / T(ideal)
    S_w   = T(ideal, but rank w as traced) / T(ideal)               exact, one scenario a rank
    M_X   = (T(traced) - T(traced, but X ideal)) / (T(traced) - T(ideal))        share X explains

Example: T(traced) 120 ms, T(ideal) 100 ms, 105 ms with rank 5 made ideal: S = 1.2, 16.7 % of the
GPU time is wasted, rank 5 explains M = 15/20 = 75 % of the slowness.

Not in that source: S = random x worker x stage, exact by construction. Each factor is what
averaging away that level gains: the mean over steps and microbatches of a rank, the median over the
ranks of a stage (which one slow rank does not move), the mean over all.

Scenarios are replayed in families, a whole family in one sweep. Those that keep one lane as traced
need not replay all lanes: lanes that relate to the kept one in the same way (same TP group, same
DP group, neither) are equal, and one row stands for each such class. So one scenario for every rank
costs time linear in the number of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from detect.whatif.graph import Replay, keep_nodes, over_all_steps, partition_of, sweep
from detect.whatif.savings import Saving, saved_by_fixing
from megascan.arrays import Flags, Floats, Integers


def keep_places(replay: Replay, kept: Flags) -> Floats:
    """Replay with traced weights where `kept` (scenario, stage, lane); return (scenario, step)."""
    stage = replay.graph.stage

    def weigh(node: int) -> Floats:
        chosen = kept[:, stage[node]].T[:, :, None]  # (lane, scenario, 1)
        return np.where(chosen, replay.traced_row(node), replay.ideal[node])

    return over_all_steps(replay, sweep(replay.graph, weigh))


def keep_each_rank(replay: Replay) -> tuple[Floats, Floats]:
    """Replay with each rank alone as traced, and with each lane as traced on all stages.

    Return the step times of both, (stage, lane, step) and (lane, step) seconds.
    """
    graph, num_stages = replay.graph, replay.graph.num_stages
    classes, partitions = lane_classes(graph.partitions, replay.num_lanes)
    stage = graph.stage
    shape = (len(classes), num_stages + 1, replay.num_lanes, len(replay.steps))

    def weigh(node: int) -> Floats:
        weight = np.full(shape, replay.ideal[node])
        weight[0, [stage[node], num_stages]] = replay.weights[node]
        return weight.reshape(len(classes), -1, len(replay.steps))

    times = sweep(graph, weigh, partitions=partitions).reshape(shape[1:])
    return times[:num_stages], times[num_stages]


def lane_classes(
    partitions: Mapping[str, Integers], num_lanes: int
) -> tuple[Integers, dict[str, Integers]]:
    """Put lanes into classes that replay alike when one lane alone differs from the rest.

    Returns (size of each class, partitions over classes); class 0 is the one lane. Two lanes are
    equal when in every partition their sets hold the same classes; classes are split until that
    is true. Partitions come from a regular grid of ranks, so that it is the same for every lane.
    """
    classes = np.minimum(np.arange(num_lanes), 1)
    while True:
        sets = {name: _classes_in_sets(p, classes) for name, p in partitions.items()}
        signatures = [
            (int(classes[lane]), *(sets[name][p[lane]] for name, p in partitions.items()))
            for lane in range(num_lanes)
        ]
        refined = partition_of(signatures)
        if refined.max() == classes.max():
            break
        classes = refined
    first = [int(np.argmax(classes == number)) for number in range(int(classes.max()) + 1)]
    merged = {
        name: partition_of([sets[name][p[lane]] for lane in first])
        for name, p in partitions.items()
    }
    return np.bincount(classes), merged


def _classes_in_sets(partition: Integers, classes: Integers) -> list[tuple[int, ...]]:
    """Return the classes present in each set of a partition."""
    present = np.zeros((int(partition.max()) + 1, int(classes.max()) + 1), dtype=np.bool_)
    present[partition, classes] = True
    return [tuple(np.flatnonzero(row).tolist()) for row in present]


TOP_SHARE = 0.03
"""M_W replaces this share of the ranks, at least one."""

_MERGED_TYPES = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}


@dataclass(frozen=True, kw_only=True)
class Explained:
    """How much of all slowness a set of ranks explains.

    `removal` is M as defined above; `addition` is the same from the other side, (T(ideal, but X as
    traced) - T(ideal)) / (T(traced) - T(ideal)). Not a number when nothing is slow. The times
    are those of the two scenarios, seconds.
    """

    ranks: tuple[int, ...]
    removal: float
    addition: float
    removed_s: float
    added_s: float


@dataclass(frozen=True, kw_only=True)
class Factors:
    """S as a product: random (per step and microbatch) x worker x stage."""

    random: float
    worker: float
    stage: float


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The result; every S is a ratio of step times, 1.2 means a step 20 % longer than ideal.

    `rank_ratio` (stage, lane) is the exact S_w, `approximate_rank_ratio` the source's
    min(S_stage, S_lane); a lane is a DP rank where TP and CP are 1.
    """

    replay: Replay
    measured_s: float
    traced_s: float
    ideal_s: float
    type_ratio: Mapping[str, float]
    stage_ratio: tuple[float, ...]
    lane_ratio: tuple[float, ...]
    rank_ratio: Floats
    approximate_rank_ratio: Floats
    top_ranks: Explained
    last_stage: Explained
    factors: Factors

    @property
    def slowdown(self) -> float:
        """Return S, traced over ideal step time."""
        return self.traced_s / self.ideal_s

    @cached_property
    def peer_ratio(self) -> Floats:
        """Return the median S_w of each rank's stage without it, (stage, lane); 1 if alone."""
        lanes = self.rank_ratio.shape[1]
        if lanes == 1:
            return np.ones_like(self.rank_ratio)
        ordered = np.sort(self.rank_ratio, axis=1)
        place = np.argsort(np.argsort(self.rank_ratio, axis=1, kind="stable"), axis=1)
        low, high = (lanes - 2) // 2, (lanes - 1) // 2  # of the others, in order
        rows = np.arange(len(ordered))[:, None]
        lower, upper = low + (place <= low), high + (place <= high)
        return np.asarray((ordered[rows, lower] + ordered[rows, upper]) / 2)

    @property
    def waste_ratio(self) -> float:
        """Return the share of all GPU time that the ideal job would not have used."""
        return 1.0 - self.ideal_s / self.traced_s

    @property
    def launch_slowdown(self) -> float:
        """Return the measured over the replayed step time: what the replay does not explain."""
        return self.measured_s / self.traced_s

    @property
    def step_slowdown(self) -> Floats:
        """Return S of every step, (step,)."""
        return np.asarray(self.replay.traced_s / self.ideal_s)

    @property
    def error_ratio(self) -> float:
        """Return the median over steps of |replayed / measured - 1|."""
        return float(np.median(np.abs(self.replay.error_ratio)))


def analyze(replay: Replay) -> WhatIf:
    """Return all figures of a replay, in four sweeps over its graph."""
    graph, ideal_s, traced_s = replay.graph, replay.ideal_s, float(replay.traced_s.mean())
    types = np.array([_MERGED_TYPES.get(node.optype, node.optype) for node in graph.nodes])
    names = list(dict.fromkeys(types.tolist()))
    kept = [types == name for name in names]
    kept += [graph.stage == number for number in range(graph.num_stages)]
    by_set = keep_nodes(replay, np.stack(kept)).mean(axis=1)
    type_s, stage_s = by_set[: len(names)], by_set[len(names) :]
    rank_s, lane_s = (times.mean(axis=-1) for times in keep_each_rank(replay))
    approximate_s = np.minimum(stage_s[:, None], lane_s[None, :])
    top = _slowest_places(replay, approximate_s)
    last = np.zeros(replay.ranks.shape, dtype=np.bool_)
    last[-1] = True
    removed = keep_places(replay, np.stack([~top, ~last, top])).mean(axis=1)
    return WhatIf(
        replay=replay,
        measured_s=float(replay.measured.mean()),
        traced_s=traced_s,
        ideal_s=ideal_s,
        type_ratio={
            names[number]: float(type_s[number] / ideal_s)
            for number in np.argsort(-type_s, kind="stable").tolist()
        },
        stage_ratio=tuple((stage_s / ideal_s).tolist()),
        lane_ratio=tuple((lane_s / ideal_s).tolist()),
        rank_ratio=rank_s / ideal_s,
        approximate_rank_ratio=approximate_s / ideal_s,
        top_ranks=_explained_by(replay, top, float(removed[0]), float(removed[2])),
        last_stage=_explained_by(replay, last, float(removed[1]), float(stage_s[-1])),
        factors=_factors(replay),
    )


def _slowest_places(replay: Replay, slowness: Floats) -> Flags:
    """Flag the places of the slowest ranks, ties by lower rank, (stage, lane)."""
    count = math.ceil(replay.ranks.size * TOP_SHARE)
    order = np.lexsort((replay.ranks.ravel(), -slowness.ravel()))
    top = np.zeros(replay.ranks.size, dtype=np.bool_)
    top[order[:count]] = True
    return replay.mask(replay.with_shared_work(replay.ranks.ravel()[top].tolist()))


def _explained_by(replay: Replay, places: Flags, removed_s: float, added_s: float) -> Explained:
    traced_s = float(replay.traced_s.mean())
    slow_s = traced_s - replay.ideal_s
    return Explained(
        ranks=tuple(sorted(replay.ranks[places].tolist())),
        removal=(traced_s - removed_s) / slow_s if slow_s else math.nan,
        addition=(added_s - replay.ideal_s) / slow_s if slow_s else math.nan,
        removed_s=removed_s,
        added_s=added_s,
    )


def _factors(replay: Replay) -> Factors:
    """Replay with weights averaged over (ordinals, steps) of a rank, then those of its stage."""
    ranks = np.empty((len(replay.ideal), replay.num_lanes))
    stages = np.empty(len(replay.ideal))
    for nodes in _roles(replay):
        average = np.mean if replay.graph.nodes[nodes[0]].is_local else np.median
        by_lane = average(replay.weights[nodes], axis=(0, 2))
        ranks[nodes] = by_lane
        stages[nodes] = np.median(by_lane)
    rank_s = float(sweep(replay.graph, lambda n: ranks[n][:, None, None])[0, 0])
    stage_s = float(sweep(replay.graph, lambda n: stages[n : n + 1, None, None])[0, 0])
    traced_s = float(replay.traced_s.mean())
    return Factors(
        random=traced_s / rank_s, worker=rank_s / stage_s, stage=stage_s / replay.ideal_s
    )


def _roles(replay: Replay) -> list[list[int]]:
    """Return sets of nodes that do the same work: same stage, type, chunk, part and size."""
    roles = defaultdict(list)
    for number, node in enumerate(replay.graph.nodes):
        roles[node.stage, node.optype, node.chunk, node.part, node.size_bytes].append(number)
    return list(roles.values())


def savings_of_standouts(result: WhatIf) -> list[Saving]:
    """Return the savings of the ranks that cost most and of each heavy stage."""
    replay = result.replay
    fixed = [(rank,) for rank in worst_ranks(result)]
    fixed += [tuple(replay.ranks[stage].tolist()) for stage in heavy_stages(result)]
    return [saved_by_fixing(replay, ranks) for ranks in fixed]


HEAVY_RATIO = 1.05
"""A stage whose median rank costs so many times that of the other stages is heavy."""


def heavy_stages(result: WhatIf) -> tuple[int, ...]:
    """Return the heavy stages. The median rank counts: one slow rank makes no stage heavy."""
    cost = np.median(result.rank_ratio, axis=1)
    return tuple(
        stage
        for stage in range(len(cost))
        if len(cost) > 1 and cost[stage] >= HEAVY_RATIO * np.median(np.delete(cost, stage))
    )


def worst_ranks(result: WhatIf, least: float = 1.02, most: int = 3) -> tuple[int, ...]:
    """Return ranks that cost more than their peers, the worst first, ties by lower rank.

    Their exact S_w is at least `least` times the median of their stage's other ranks: the ranks of
    a heavy stage all cost much, and none of them is to blame. Candidates for `saved_by_fixing`.
    """
    excess, ranks = (result.rank_ratio / result.peer_ratio).ravel(), result.replay.ranks.ravel()
    order = np.lexsort((ranks, -excess))[:most]
    return tuple(int(ranks[number]) for number in order if excess[number] >= least)
