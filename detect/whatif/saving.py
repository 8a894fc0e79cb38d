"""What it would bring if single ranks ran like their peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detect.report import Cause
from detect.whatif.graph import Bools, Floats, Ints
from detect.whatif.metrics import WhatIf
from detect.whatif.replay import Replay
from detect.whatif.sweep import sweep
from megascan.errors import InputError
from megascan.header import Json

_HOURS_A_DAY = 24.0


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Step time now and if `ranks` ran like their peers, seconds, both replayed.

    `compared_with` says who the peers were: "peers" are ranks of the same stage, "stages" the
    other stages where there are none, "nobody" when the job has one rank (and nothing is saved).
    """

    ranks: tuple[int, ...]
    step_s: float
    fixed_step_s: float
    num_gpus: int
    num_steps: int
    compared_with: str
    causes: tuple[Cause, ...] = ()
    """Why findings name these ranks; none when somebody else chose them."""

    @property
    def saved_s(self) -> float:
        """Seconds less a step."""
        return self.step_s - self.fixed_step_s

    @property
    def speedup(self) -> float:
        """Step time now over step time then: 1.1 makes the job 10 % faster."""
        return self.step_s / self.fixed_step_s

    @property
    def gpu_hours(self) -> float:
        """GPU-hours lost to these ranks in the traced steps."""
        return self.saved_s * self.num_steps * self.num_gpus / 3600.0

    @property
    def gpu_hours_per_hour(self) -> float:
        """GPU-hours that an hour of this job loses to these ranks."""
        return self.saved_s / self.step_s * self.num_gpus

    @property
    def gpu_hours_per_day(self) -> float:
        """GPU-hours a day of this job that are lost to these ranks."""
        return self.gpu_hours_per_hour * _HOURS_A_DAY

    def to_json(self) -> dict[str, Json]:
        """One element of the JSON's `savings`."""
        return {
            "ranks": list(self.ranks),
            "step_time_s": self.step_s,
            "fixed_step_time_s": self.fixed_step_s,
            "saved_s": self.saved_s,
            "step_time_cost_ratio": self.speedup,
            "gpu_hours": self.gpu_hours,
            "gpu_hours_per_hour": self.gpu_hours_per_hour,
            "gpu_hours_per_day": self.gpu_hours_per_day,
            "compared_with": self.compared_with,
            "causes": [cause.value for cause in self.causes],
        }


def saved_by_fixing(replay: Replay, ranks: Sequence[int], *, links: bool = False) -> Saving:
    """Replay with the work of `ranks` brought to what their peers take, step by step.

    For every operation type and step the rank's own times are scaled so that their sum is the
    median of its peers' sums; what is left is its own scatter, as a healthy rank has it. With
    `links` the transfers that `ranks` take part in (between them, when there are several) are
    brought to those of the other lanes as well. Ranks whose work cannot be told from theirs are
    fixed with them. Raises InputError for a rank that was not recorded.

        one rank computing 1.5x slower in a TP group of two: its group's passes take 1/1.5
    """
    unknown = sorted(set(ranks) - set(replay.ranks.ravel().tolist()))
    if unknown:
        raise InputError(
            f"rank {unknown[0]} is not in this trace, which has ranks {replay.ranks.min()} to "
            f"{replay.ranks.max()}"
        )
    chosen = replay.with_shared_work(ranks)
    places = replay.mask(chosen)
    weights = replay.weights.copy()
    compared_with = _fix_work(replay, places, weights)
    if links:
        _fix_links(replay, places, weights)
    fixed = sweep(replay.graph, lambda node: weights[node][:, None, :])
    return Saving(
        ranks=chosen,
        step_s=float(replay.traced_s.mean()),
        fixed_step_s=float(fixed.mean()),
        num_gpus=replay.num_gpus,
        num_steps=len(replay.steps),
        compared_with=compared_with,
    )


def _fix_work(replay: Replay, places: Bools, weights: Floats) -> str:
    graph = replay.graph
    stages = np.flatnonzero(places.any(axis=1))
    have_peers = not places[stages].all(axis=1).any()
    if not have_peers and len(stages) == graph.num_stages:
        return "nobody"
    types = np.array([node.optype for node in graph.nodes])
    for optype in np.unique(types[graph.is_local]):
        sums = _sums(replay, types == optype)  # (stage, lane, step)
        for stage in stages:
            nodes = np.flatnonzero((types == optype) & (graph.stage == stage))
            own, others = places[stage], sums[stage, ~places[stage]]
            if not have_peers:
                others = sums[~places.any(axis=1)].reshape(-1, sums.shape[2])
            _scale(weights, nodes, own, sums[stage], np.median(others, axis=0))
    return "peers" if have_peers else "stages"


def _sums(replay: Replay, chosen: Bools) -> Floats:
    """Time a rank spends in the chosen nodes, (stage, lane, step)."""
    stage = replay.graph.stage
    return np.stack(
        [
            replay.weights[chosen & (stage == number)].sum(axis=0)
            for number in range(replay.graph.num_stages)
        ]
    )


def _scale(weights: Floats, nodes: Ints, own: Bools, sums: Floats, goal: Floats) -> None:
    """Bring the sums of the `own` lanes to the goal (step,)."""
    factor = np.ones_like(sums)
    scaled = own[:, None] & (sums > 0)
    factor[scaled] = (np.broadcast_to(goal, sums.shape) / np.maximum(sums, 1e-30))[scaled]
    weights[nodes] *= factor


def _fix_links(replay: Replay, places: Bools, weights: Floats) -> None:
    graph = replay.graph
    several = int(places.sum()) > 1
    for group in graph.groups:
        if graph.nodes[group.nodes[0]].is_local:
            continue
        stages = [graph.nodes[node].stage for node in group.nodes]
        hit = places[stages]
        lanes = hit.any(axis=0)
        if several and not group.partition:
            lanes = hit.sum(axis=0) > 1
        elif group.partition:
            labels = graph.partitions[group.partition].labels
            counts = np.bincount(labels, weights=hit.sum(axis=0))
            lanes = (counts > (1 if several else 0))[labels]
        if not lanes.any():
            continue
        for node in group.nodes:
            others = weights[node, ~lanes]
            weights[node, lanes] = np.median(others, axis=0) if len(others) else replay.ideal[node]


def savings_of_standouts(result: WhatIf) -> list[Saving]:
    """What the ranks that cost most save, and each stage that is heavy on its median rank."""
    replay = result.replay
    fixed = [(rank,) for rank in worst_ranks(result)]
    fixed += [tuple(replay.ranks[stage].tolist()) for stage in heavy_stages(result)]
    return [saved_by_fixing(replay, ranks) for ranks in fixed]


def heavy_stages(result: WhatIf, least: float = 1.05) -> tuple[int, ...]:
    """Stages whose median rank costs at least `least` times that of the others' median stage.

    Of the median rank, because one slow rank makes no stage heavy.
    """
    cost = np.median(result.rank_ratio, axis=1)
    return tuple(
        stage
        for stage in range(len(cost))
        if len(cost) > 1 and cost[stage] >= least * np.median(np.delete(cost, stage))
    )


def worst_ranks(result: WhatIf, least: float = 1.02, most: int = 3) -> tuple[int, ...]:
    """Ranks that cost more than their peers, the worst first, ties by lower rank.

    Their exact S_w is at least `least` times the median of their stage's other ranks: the ranks of
    a heavy stage all cost much, and none of them is to blame. Candidates for `saved_by_fixing`.
    """
    excess, ranks = (result.rank_ratio / result.peer_ratio).ravel(), result.replay.ranks.ravel()
    order = np.lexsort((ranks, -excess))[:most]
    return tuple(int(ranks[number]) for number in order if excess[number] >= least)
