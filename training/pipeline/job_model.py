"""A measured job under other circumstances: other schedules, shares, layers, healthy ranks.

What a stage takes is what it would take on a healthy rank, times how slow its rank is. The first
is that of its layers and what else lies on it (embedding, output layer, loss):

    stage of replica r  =  slowness of its rank in r  ·  (layers · a layer's cost + the rest)

Slowness is measured against the other replicas where there are any, otherwise it is what the
verdict says. A step is that of the slowest replica; what the trace shows beside the pipeline (data,
gradients, optimizer) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

from training.pipeline.costs import ActivationMemory, Costs, StageCost
from training.pipeline.measured import MeasuredJob
from training.pipeline.plan import PipelineShape, Plan
from training.pipeline.simulator import Prediction, predict

MakePlan = Callable[[PipelineShape], Plan]
Scales = tuple[float, ...]

_HEALTHY_RATIO = 1.03
"""A rank that is slower than its peers by less counts as healthy; so it does for the detector."""
_RECOMPUTED_RATIO = 17.0
"""Activations of a layer over what checkpointing keeps of it: 34 over 2 bytes · s·b·h (fused
attention). A chunk repeated as a whole keeps less in between, its first layer's input alone; as
much as of every layer is counted, which is the careful side."""
_MOST_SAMPLES = 3
"""Traced steps whose microbatches' costs are played, where these differ."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What is different from the traced job; what is not named is as it was.

    `layers` (stage) also says the number of chunks, `microbatches` is by replica, `healthy_ranks`
    are global ranks taken as mended, `reorder` puts a step's microbatches, given as their costs,
    into another order. `recompute_ahead` repeats forwards as actions of their own, but those of the
    last stage, which then keeps its activations.
    """

    layers: tuple[int, ...] | None = None
    microbatches: tuple[int, ...] | None = None
    healthy_ranks: frozenset[int] = frozenset()
    reorder: Callable[[Scales], Scales] | None = None
    recompute_ahead: bool = False


AS_TRACED = Circumstances()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Predicted pipeline of a step: its time, and the most activations by pipeline rank.

    Activations are counted in those of one microbatch on one rank of the traced job.
    """

    pipeline_s: float
    peak: tuple[float, ...]


class Predictor:
    """Predicts a measured job.

    `slowdowns` is what the verdict says, by global rank; it counts where there are no replicas to
    compare with.
    """

    def __init__(self, job: MeasuredJob, slowdowns: Mapping[int, float]) -> None:
        self.job = job
        self._slowness = _slowness(job, slowdowns)
        self._healthy = _healthy_stages(job, self._slowness)

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Return global ranks whose pipeline rank is slower than it ought to be."""
        return tuple(
            rank
            for replica, ratios in enumerate(self._slowness)
            for pp_rank, ratio in enumerate(ratios)
            for rank in self.job.ranks[replica][pp_rank]
            if ratio > 1.0
        )

    @cached_property
    def traced(self) -> Outcome:
        """Return the traced step as the model sees it."""
        samples = [self.job.predict_as_traced(sample) for sample in self._samples()]
        return _mean_of_worst(samples)

    def step_s(self, outcome: Outcome) -> float:
        """Return the whole iteration when its pipeline is another one."""
        return self.job.step_s + outcome.pipeline_s - self.traced.pipeline_s

    def outcome(self, make_plan: MakePlan, circumstances: Circumstances) -> Outcome:
        """Return what a schedule makes of the job under these circumstances."""
        counts = circumstances.microbatches or self.job.microbatches
        known: dict[tuple[Costs, int], Prediction] = {}
        samples = []
        for sample in self._samples():
            predictions = []
            for replica, count in enumerate(counts):
                costs = self.costs(replica, circumstances)
                if sample:
                    costs = _with_scales(costs, sample[replica], count, circumstances)
                if (costs, count) not in known:
                    known[costs, count] = self.predict(make_plan, circumstances, costs, count)
                predictions.append(known[costs, count])
            samples.append(predictions)
        return _mean_of_worst(samples)

    def predict(
        self, make_plan: MakePlan, circumstances: Circumstances, costs: Costs, count: int
    ) -> Prediction:
        """Return one pipeline of `count` microbatches with these costs."""
        shape = self.shape(circumstances, count)
        memory = self.memory(circumstances, costs.microbatch_sizes)
        return predict(make_plan(shape), costs.table(shape), memory)

    def shape(self, circumstances: Circumstances, count: int) -> PipelineShape:
        """Return the pipeline for a number of microbatches."""
        shape = self.job.shape_of(count)
        if circumstances.layers is None:
            return shape
        return replace(shape, num_chunks=len(circumstances.layers) // shape.num_ranks)

    def costs(self, replica: int, circumstances: Circumstances) -> Costs:
        """Return a replica's costs under circumstances, microbatches all alike."""
        shape = self.shape(circumstances, 1)
        stages = self._healthy
        if circumstances.layers is not None:
            stages = self._rearranged(circumstances.layers)
        slowness = self._slowness[replica]
        scaled = []
        for stage, cost in enumerate(stages):
            pp_rank = shape.rank_of(stage)
            mended = circumstances.healthy_ranks.issuperset(self.job.ranks[replica][pp_rank])
            scaled.append(cost if mended else cost.scaled(slowness[pp_rank]))
        if circumstances.recompute_ahead:
            scaled[-1] = replace(scaled[-1], recompute_s=0.0)
        num_links = shape.num_ranks
        messages = [self.job.message_s[link % len(self.job.message_s)] for link in range(num_links)]
        return replace(
            self.job.costs(replica),
            stages=tuple(scaled),
            message_s=tuple(messages[b % num_links] for b in range(shape.num_stages - 1)),
        )

    def memory(self, circumstances: Circumstances, sizes: Scales = ()) -> ActivationMemory:
        """Return what stages hold, in activations of a microbatch on a rank as traced."""
        layers = circumstances.layers
        if layers is None or self.job.layers is None:
            chunks = self.job.shape.num_chunks
            by_stage = (1.0 / chunks,) * self.job.shape.num_stages
        else:
            usual = sum(self.job.layers) / self.job.shape.num_ranks
            by_stage = tuple(count / usual for count in layers)
        if not circumstances.recompute_ahead:
            return ActivationMemory(by_stage=by_stage, sizes=sizes)
        return ActivationMemory(
            by_stage=tuple(share * _RECOMPUTED_RATIO for share in by_stage),
            sizes=sizes,
            kept_for_recompute_ratio=1 / _RECOMPUTED_RATIO,
        )

    def slowest_replica(self) -> int:
        """Return the replica that the traced step waited for."""
        times = [prediction.step_s for prediction in self.job.predict_as_traced()]
        return max(range(len(times)), key=times.__getitem__)

    def _rearranged(self, layers: tuple[int, ...]) -> tuple[StageCost, ...]:
        """Return healthy costs of stages with other layers; what else a rank has stays at its
        end.
        """
        job = self.job
        assert job.layers is not None
        assert job.layer is not None
        first, *_, last = rests = [
            _minus(cost, job.layer.scaled(count))
            for cost, count in zip(self._healthy, job.layers, strict=True)
        ]
        stages = [job.layer.scaled(count) for count in layers]
        if len(layers) == len(rests):
            return tuple(stage + rest for stage, rest in zip(stages, rests, strict=True))
        stages[0] += first
        stages[-1] += last
        return tuple(stages)

    def _samples(self) -> list[list[Scales]]:
        """Return costs of the microbatches of a few traced steps, (step) → [replica]; or one of
        none.
        """
        scales = self.job.scales[:_MOST_SAMPLES]
        if not len(scales):
            return [[]]
        return [[tuple(map(float, row)) for row in step] for step in scales]


def _slowness(job: MeasuredJob, slowdowns: Mapping[int, float]) -> tuple[tuple[float, ...], ...]:
    """Return how many times as long a pipeline rank takes as it ought to, (replica) → (pipeline
    rank).
    """
    ranks = range(job.shape.num_ranks)
    if job.num_replicas == 1:
        said = [max(slowdowns.get(rank, 1.0) for rank in job.ranks[0][p]) for p in ranks]
        return (tuple(max(1.0, ratio) for ratio in said),)
    work = [[_work_s(job, replica, p) for p in ranks] for replica in range(job.num_replicas)]
    usual = [_usual([row[p] for row in work]) for p in ranks]
    ratios = [[row[p] / usual[p] for p in ranks] for row in work]
    return tuple(tuple(r if r > _HEALTHY_RATIO else 1.0 for r in row) for row in ratios)


def _usual(values: list[float]) -> float:
    """Return what healthy replicas take: the median, of two the shorter."""
    return min(values) if len(values) == 2 else median(values)


def _work_s(job: MeasuredJob, replica: int, pp_rank: int) -> float:
    return sum(job.stages[replica][stage].total_s for stage in job.shape.stages_of(pp_rank))


def _healthy_stages(
    job: MeasuredJob, slowness: tuple[tuple[float, ...], ...]
) -> tuple[StageCost, ...]:
    """Return costs of the stages on healthy ranks: means over replicas after their slowness is
    taken out.

    So small differences between replicas, which are noise, do not make them unequal.
    """
    stages = []
    for stage in range(job.shape.num_stages):
        pp_rank = job.shape.rank_of(stage)
        mended = [
            costs[stage].scaled(1 / slowness[replica][pp_rank])
            for replica, costs in enumerate(job.stages)
        ]
        stages.append(
            StageCost(
                forward_s=fmean(cost.forward_s for cost in mended),
                input_gradient_s=fmean(cost.input_gradient_s for cost in mended),
                weight_gradient_s=fmean(cost.weight_gradient_s for cost in mended),
                recompute_s=fmean(cost.recompute_s for cost in mended),
            )
        )
    return tuple(stages)


def _minus(cost: StageCost, part: StageCost) -> StageCost:
    """Return what a stage takes beside a part of it, nothing below 0."""
    return StageCost(
        forward_s=max(0.0, cost.forward_s - part.forward_s),
        input_gradient_s=max(0.0, cost.input_gradient_s - part.input_gradient_s),
        weight_gradient_s=max(0.0, cost.weight_gradient_s - part.weight_gradient_s),
        recompute_s=max(0.0, cost.recompute_s - part.recompute_s),
    )


def _with_scales(costs: Costs, scales: Scales, count: int, circumstances: Circumstances) -> Costs:
    """Return costs with a step's microbatches, repeated or cut where a replica runs another
    number.
    """
    repeated = tuple(scales[number % len(scales)] for number in range(count))
    if circumstances.reorder:
        repeated = circumstances.reorder(repeated)
    return replace(costs, microbatch_scales=repeated, microbatch_sizes=repeated)


def _mean_of_worst(samples: Sequence[Sequence[Prediction]]) -> Outcome:
    """Return the slowest replica's time, mean over steps, and the highest peaks of all."""
    peaks = [prediction.peak for predictions in samples for prediction in predictions]
    return Outcome(
        pipeline_s=fmean(max(p.step_s for p in predictions) for predictions in samples),
        peak=tuple(max(by_rank) for by_rank in zip(*peaks, strict=True)),
    )
