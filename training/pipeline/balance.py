"""Shares that make ranks end together: microbatches by replica, layers by stage.

Both move one unit at a time from where most time goes to where it costs least, as long as that
helps. Predictions of the whole pipeline decide, not sums of work: how a slow rank delays the others
depends on the schedule.
"""

from __future__ import annotations

from training.pipeline.job_model import AS_TRACED, Circumstances, JobModel, MakePlan

_ROUNDING = 1e-12
_NUM_DONORS = 2
"""Ranks that are tried as givers of a layer: the busiest ones."""


def balanced_microbatches(model: JobModel, make_plan: MakePlan) -> tuple[int, ...]:
    """Return microbatches by replica, as many in all as traced, with the shortest step."""
    counts = list(model.job.microbatches)
    times = _ReplicaTimes(model, make_plan)
    while True:
        now = [times.at(replica, count) for replica, count in enumerate(counts)]
        giver = max(range(len(counts)), key=now.__getitem__)
        takers = [replica for replica in range(len(counts)) if replica != giver]
        taker = min(takers, key=lambda replica: times.at(replica, counts[replica] + 1))
        worse = max(now[giver] - _ROUNDING, 0.0)
        if counts[giver] == 1 or times.at(taker, counts[taker] + 1) >= worse:
            return tuple(counts)
        counts[giver] -= 1
        counts[taker] += 1


class _ReplicaTimes:
    """Predicted pipeline of a replica with a number of microbatches, each predicted once."""

    def __init__(self, model: JobModel, make_plan: MakePlan) -> None:
        self._model = model
        self._make_plan = make_plan
        self._costs = [model.costs(r, AS_TRACED) for r in range(model.job.num_replicas)]
        self._known: dict[tuple[object, int], float] = {}

    def at(self, replica: int, count: int) -> float:
        """Return the seconds."""
        costs = self._costs[replica]
        if (costs, count) not in self._known:
            prediction = self._model.predict(self._make_plan, AS_TRACED, costs, count)
            self._known[costs, count] = prediction.step_s
        return self._known[costs, count]


def balanced_layers(model: JobModel, make_plan: MakePlan) -> tuple[int, ...]:
    """Return layers by stage, as many in all as traced, with the shortest step; at least 1 each."""
    assert model.job.layers is not None
    layers = model.job.layers
    best_s = _pipeline_s(model, make_plan, layers)
    while True:
        moves = [(_pipeline_s(model, make_plan, moved), moved) for moved in _moves(model, layers)]
        if not moves or min(moves)[0] >= best_s - _ROUNDING:
            return layers
        best_s, layers = min(moves)


def _pipeline_s(model: JobModel, make_plan: MakePlan, layers: tuple[int, ...]) -> float:
    return model.outcome(make_plan, Circumstances(layers=layers)).pipeline_s


def _moves(model: JobModel, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return layouts one layer away: from a stage of the busiest ranks to any stage of another
    rank.
    """
    shape = model.shape(Circumstances(layers=layers), 1)
    work = [0.0] * shape.num_ranks
    for replica in range(model.job.num_replicas):
        busy = [0.0] * shape.num_ranks
        for stage, cost in enumerate(model.costs(replica, Circumstances(layers=layers)).stages):
            busy[shape.rank_of(stage)] += cost.total_s
        work = [max(pair) for pair in zip(work, busy, strict=True)]
    donors = sorted(range(shape.num_ranks), key=work.__getitem__, reverse=True)[:_NUM_DONORS]
    moves = []
    for giver in range(shape.num_stages):
        for taker in range(shape.num_stages):
            rank = shape.rank_of(giver)
            if rank in donors and rank != shape.rank_of(taker) and layers[giver] > 1:
                moved = list(layers)
                moved[giver] -= 1
                moved[taker] += 1
                moves.append(tuple(moved))
    return moves


def layout_text(layers: tuple[int, ...]) -> str:
    """Return Megatron's `--pipeline-model-parallel-layout`, as in Ettt|ttt|tttL."""
    stages = ["t" * count for count in layers]
    return f"E{'|'.join(stages)}L"
