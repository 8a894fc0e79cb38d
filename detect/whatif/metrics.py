"""The figures of a what-if analysis: what slowness costs, and where it sits.

Definitions after "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI 2025), with T(...) the mean over steps of the replayed step time:

    S     = T(traced) / T(ideal)                                    waste = 1 - 1/S
    S_t   = T(ideal, but type t as traced) / T(ideal)
    S_w   = T(ideal, but rank w as traced) / T(ideal)               exact, one scenario a rank
    M_X   = (T(traced) - T(traced, but X ideal)) / (T(traced) - T(ideal))        share X explains

Not in that source: S = random x worker x stage, exact by construction. Each factor is what
averaging away that level gains: the mean over steps and microbatches of a rank, the median over the
ranks of a stage (which one slow rank does not move), the mean over all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from detect.whatif.graph import Bools, Floats
from detect.whatif.replay import Replay
from detect.whatif.scenarios import keep_each_rank, keep_nodes, keep_places
from detect.whatif.sweep import sweep

TOP_SHARE = 0.03
"""M_W replaces this share of the ranks, at least one."""

_MERGED_TYPES = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}


@dataclass(frozen=True, kw_only=True)
class Share:
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
    top_ranks: Share
    last_stage: Share
    factors: Factors

    @property
    def slowdown(self) -> float:
        """S."""
        return self.traced_s / self.ideal_s

    @cached_property
    def peer_ratio(self) -> Floats:
        """Median S_w of each rank's stage without it, (stage, lane); 1 where it is alone."""
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
        """Share of all GPU time that the ideal job would not have used."""
        return 1.0 - self.ideal_s / self.traced_s

    @property
    def launch_slowdown(self) -> float:
        """Measured over replayed step time: what the replay does not explain."""
        return self.measured_s / self.traced_s

    @property
    def step_slowdown(self) -> Floats:
        """S of every step, (step,)."""
        return np.asarray(self.replay.traced_s / self.ideal_s)

    @property
    def error_ratio(self) -> float:
        """Median over steps of |replayed / measured - 1|."""
        return float(np.median(np.abs(self.replay.error_ratio)))


def analyze(replay: Replay) -> WhatIf:
    """All figures of a replay, in four sweeps over its graph."""
    ideal_s, traced_s = replay.ideal_s, float(replay.traced_s.mean())
    names, kept = _kept_nodes(replay)
    by_set = keep_nodes(replay, kept).mean(axis=1)
    num_types = len(names)
    stage_s = by_set[num_types:]
    rank_s, lane_s = (times.mean(axis=-1) for times in keep_each_rank(replay))
    approximate_s = np.minimum(stage_s[:, None], lane_s[None, :])
    top = _top(replay, approximate_s)
    last = np.zeros(replay.ranks.shape, dtype=np.bool_)
    last[-1] = True
    removed = keep_places(replay, np.stack([~top, ~last, top])).mean(axis=1)
    added = removed[2], stage_s[-1]
    return WhatIf(
        replay=replay,
        measured_s=float(replay.measured.mean()),
        traced_s=traced_s,
        ideal_s=ideal_s,
        type_ratio={
            name: float(seconds / ideal_s)
            for name, seconds in sorted(
                zip(names, by_set[:num_types], strict=True), key=lambda pair: -pair[1]
            )
        },
        stage_ratio=tuple((stage_s / ideal_s).tolist()),
        lane_ratio=tuple((lane_s / ideal_s).tolist()),
        rank_ratio=rank_s / ideal_s,
        approximate_rank_ratio=approximate_s / ideal_s,
        top_ranks=_share(replay, top, float(removed[0]), float(added[0])),
        last_stage=_share(replay, last, float(removed[1]), float(added[1])),
        factors=_factors(replay),
    )


def _kept_nodes(replay: Replay) -> tuple[list[str], Bools]:
    """(type names, scenarios): each type of operation kept, then each stage, (scenario, node)."""
    graph = replay.graph
    types = np.array([_MERGED_TYPES.get(node.optype, node.optype) for node in graph.nodes])
    names = list(dict.fromkeys(types.tolist()))
    scenarios = [types == name for name in names]
    scenarios += [graph.stage == number for number in range(graph.num_stages)]
    return names, np.stack(scenarios)


def _top(replay: Replay, slowness: Floats) -> Bools:
    """Places of the slowest ranks, ties by lower rank, (stage, lane)."""
    count = math.ceil(replay.ranks.size * TOP_SHARE)
    order = np.lexsort((replay.ranks.ravel(), -slowness.ravel()))
    top = np.zeros(replay.ranks.size, dtype=np.bool_)
    top[order[:count]] = True
    return replay.mask(replay.with_shared_work(replay.ranks.ravel()[top].tolist()))


def _share(replay: Replay, places: Bools, removed_s: float, added_s: float) -> Share:
    traced_s = float(replay.traced_s.mean())
    slow_s = traced_s - replay.ideal_s
    return Share(
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
        pool = replay.weights[nodes]
        local = replay.graph.nodes[nodes[0]].is_local
        average = np.mean if local else np.median
        by_lane = average(pool, axis=(0, 2))
        ranks[nodes] = by_lane
        stages[nodes] = np.median(by_lane)
    rank_s = float(sweep(replay.graph, lambda n: ranks[n][:, None, None])[0, 0])
    stage_s = float(sweep(replay.graph, lambda n: stages[n : n + 1, None, None])[0, 0])
    traced_s = float(replay.traced_s.mean())
    return Factors(
        random=traced_s / rank_s, worker=rank_s / stage_s, stage=stage_s / replay.ideal_s
    )


def _roles(replay: Replay) -> list[list[int]]:
    """Nodes that do the same work: same stage, type, chunk, part and size."""
    roles: dict[tuple[int, str, int, int, int], list[int]] = {}
    for number, node in enumerate(replay.graph.nodes):
        key = (node.stage, node.optype, node.chunk, node.part, node.size_bytes)
        roles.setdefault(key, []).append(number)
    return list(roles.values())
