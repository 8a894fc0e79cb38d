"""A traced job: what its stages cost, and how long it would take under other circumstances.

**Costs.** A pass on a stage takes as long as on the slowest of the ranks that carry it out together
(tensor and context parallelism). A stage's cost is the median over iterations and microbatches;
passes of one iteration compared with each other say how much microbatches differ. Whole backward
passes are split by the usual ratio.

    trace of PP2 DP2, rank 2 (replica 0, pipeline rank 1) 1.4x slow, forwards in ms
        replica 0: 24 34       replica 1: 24 24

**Other schedules, shares, layers, healthy ranks** (`Predictor`). A stage takes what it would take
on a healthy rank, times the slowness of its rank. On a healthy rank it takes the cost of its layers
and of the rest on the stage (embedding, output layer, loss):

    stage of replica r  =  slowness of its rank in r  ·  (layers · a layer's cost + the rest)

Slowness is measured against the other replicas where there are any; otherwise the verdict gives it.
The slowest replica determines the step; what the trace shows outside the pipeline (data, gradients,
optimizer) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from megascan.errors import ConfigError, InputError
from megascan.schema import Kind, Phase
from megascan.timeline import Timeline, codes, equals, numbers
from megascan.vocabulary import BACKWARD, BACKWARD_WEIGHTS, FORWARD, TRANSFORMER_LAYER, backward_of
from training.pipeline.costs import (
    INPUT_GRADIENT_RATIO,
    WEIGHT_GRADIENT_RATIO,
    ActivationMemory,
    Costs,
    StageCost,
)
from training.pipeline.generators import depth_first
from training.pipeline.plan import Action, ActionKind, PipelineShape, Plan
from training.pipeline.simulator import Prediction, check, predict, predict_megatron

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PASSES = (FORWARD, BACKWARD, BACKWARD_WEIGHTS)
"""Names of passes. Where a microbatch has the last, its second is the gradient of inputs alone."""
_FORWARD, _WEIGHT_GRADIENT, _REPEATED = 0, 2, 3
_KINDS = (
    ActionKind.FORWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
    ActionKind.RECOMPUTE,
)
"""Kinds of passes by number; the last is a second forward of a microbatch on the same stage."""
_NS = 1e-9
_NUM_WARMUP_ITERATIONS = 2
_UNEVEN_RATIO = 0.05
"""Microbatches whose costs spread by less than this share count as alike: that much is noise."""


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """What a trace says about the pipeline of a job.

    `ranks` (replica, pipeline rank) are the global ranks that carry stages out together; `stages`
    (replica, stage) are the costs of stages; `microbatches` (replica) is how many microbatches each
    replica ran in a step. `scales` (step, replica, microbatch) are the relative costs of
    microbatches, empty when alike. `layers` (stage) is the number of transformer layers of each
    stage and `layer` the cost of a layer, None where modules were not traced. `spread_ratio` is a
    robust measure of how much equal passes differ.
    """

    shape: PipelineShape
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    stages: tuple[tuple[StageCost, ...], ...]
    microbatches: tuple[int, ...]
    message_s: tuple[float, ...]
    overhead_s: float
    step_s: float
    pipeline_s: float
    spread_ratio: float
    as_traced: Plan | None
    replicas_coupled: bool
    recomputes: bool
    splits_backward: bool
    scales: Floats = field(default_factory=lambda: np.empty((0, 0, 0)))
    layers: tuple[int, ...] | None = None
    layer: StageCost | None = None

    @property
    def num_replicas(self) -> int:
        """Return the number of data-parallel replicas."""
        return len(self.stages)

    def costs(self, replica: int, scales: tuple[float, ...] = ()) -> Costs:
        """Return the costs of one replica; `scales` are the relative costs of its microbatches."""
        return Costs(
            stages=self.stages[replica],
            message_s=self.message_s,
            microbatch_scales=scales,
            microbatch_sizes=scales,
            overhead_s=self.overhead_s,
        )

    def shape_of(self, num_microbatches: int) -> PipelineShape:
        """Return the pipeline with another number of microbatches."""
        return PipelineShape(
            num_ranks=self.shape.num_ranks,
            num_chunks=self.shape.num_chunks,
            num_microbatches=num_microbatches,
        )

    def predict_as_traced(self, scales: Sequence[tuple[float, ...]] = ()) -> tuple[Prediction, ...]:
        """Return the model's prediction of the traced step, by replica.

        Compared with `pipeline_s` the prediction shows how far to trust the model for this job.
        `scales` (replica) are the relative costs of the microbatches of one step.
        """
        return tuple(
            self._predict_replica(replica, scales[replica] if scales else ())
            for replica in range(self.num_replicas)
        )

    def _predict_replica(self, replica: int, scales: tuple[float, ...]) -> Prediction:
        shape = self.shape_of(self.microbatches[replica])
        table = self.costs(replica, scales).table(shape)
        plan = self.as_traced
        if plan is None or plan.shape != shape or plan.actions == depth_first(shape).actions:
            try:
                return predict_megatron(shape, table)
            except ConfigError:  # microbatches no multiple of the ranks: never Megatron-Core's own
                return predict(depth_first(shape), table)
        return predict(plan, table)


def measure(timeline: Timeline) -> MeasuredJob:
    """Return the costs of a traced job.

    Raises InputError for a trace without a pipeline or without passes that can be told apart.
    """
    if timeline.layout.pp < 2:
        raise InputError(
            f"the traced job has pipeline size {timeline.layout.pp}; there is nothing to plan "
            "below 2"
        )
    passes = _Passes(timeline)
    seconds = passes.seconds
    stages, recomputes = _stage_costs(timeline, seconds)
    layers, layer = _layers(timeline, passes, recomputes=recomputes)
    scales = _scales(seconds)
    return MeasuredJob(
        shape=passes.shape,
        ranks=passes.ranks,
        stages=stages,
        microbatches=passes.microbatches,
        message_s=_messages(timeline, passes),
        overhead_s=passes.overhead_s(),
        step_s=_step_s(timeline, passes),
        pipeline_s=passes.pipeline_s(),
        spread_ratio=_spread(seconds, scales),
        as_traced=passes.plan(),
        replicas_coupled=timeline.layout.ep > 1,
        recomputes=recomputes,
        splits_backward=bool(np.isfinite(seconds[_WEIGHT_GRADIENT]).any()),
        scales=scales,
        layers=layers,
        layer=layer,
    )


def with_layers(job: MeasuredJob, num_layers: int) -> MeasuredJob:
    """Return the job with `num_layers` spread evenly over stages; the stages give a layer's cost.

    The cost is taken from a middle stage of median cost. With two stages it is taken from the
    first, whose embedding then counts as part of its layers. Raises ConfigError for a number that
    is no multiple of the stages.
    """
    num_stages = job.shape.num_stages
    if num_layers < num_stages or num_layers % num_stages:
        raise ConfigError(
            f"--num-layers is {num_layers}, expected a multiple of the {num_stages} stages; where "
            "stages differ, trace with --trace-granularity full"
        )
    each = num_layers // num_stages
    chosen = range(1, num_stages - 1) if num_stages > 2 else range(1)
    costs = sorted(
        (costs[stage] for costs in job.stages for stage in chosen),
        key=lambda cost: cost.total_s,
    )
    usual = costs[(len(costs) - 1) // 2]
    return replace(job, layers=(each,) * num_stages, layer=usual.scaled(1 / each))


class _Passes:
    """Pass spans of the traced iterations, as rows and as a dense array.

    `seconds` is (pass, replica, iteration, stage, microbatch), nan where there is none.
    """

    def __init__(self, timeline: Timeline) -> None:
        table = timeline.spans
        name_codes, names = codes(table, "name")
        wanted = np.array([_PASSES.index(n) if n in _PASSES else -1 for n in names] or [-1])
        iteration = numbers(table, "iteration")
        chosen = equals(table, "kind", Kind.COMPUTE) & (wanted[name_codes] >= 0) & (iteration > 0)
        chosen &= numbers(table, "microbatch") >= 0
        rows = np.flatnonzero(chosen)
        later = iteration[rows] > _NUM_WARMUP_ITERATIONS
        rows = rows[later] if later.any() else rows
        if not len(rows):
            raise InputError(
                "the trace holds no forward and backward passes of microbatches, so there are no "
                "costs to plan with; trace a training job with a pipeline"
            )
        self._timeline = timeline
        self.rows = rows
        self.kind = wanted[name_codes][rows]
        self.rank = numbers(table, "rank")[rows]
        self.start_ns = numbers(table, "start_ns")[rows]
        self.end_ns = self.start_ns + numbers(table, "duration_ns")[rows]
        self.microbatch = numbers(table, "microbatch")[rows]
        self.chunk = np.maximum(numbers(table, "chunk")[rows], 0)
        self.iterations, self.iteration = np.unique(iteration[rows], return_inverse=True)
        self._place()
        self._tell_repeated_forwards()
        self.seconds = self._dense()

    def _place(self) -> None:
        """Set the replica and stage of every row, the pipeline's shape, and the ranks by stage."""
        layout = self._timeline.layout
        known = np.unique(self.rank)
        places = {int(rank): layout.coordinates(int(rank)) for rank in known}
        self.replica = np.array([places[int(rank)].dp for rank in self.rank])
        self.pp_rank = np.array([places[int(rank)].pp for rank in self.rank])
        self.stage = self.chunk * layout.pp + self.pp_rank
        counts = tuple(
            int(self.microbatch[self.replica == replica].max(initial=-1)) + 1
            for replica in range(layout.dp)
        )
        if min(counts) == 0:
            raise InputError(
                f"replica {counts.index(0)} of the job has no traced pass; trace all ranks"
            )
        self.microbatches = counts
        self.shape = PipelineShape(
            num_ranks=layout.pp,
            num_chunks=int(self.chunk.max()) + 1,
            num_microbatches=max(counts),
        )
        self.ranks = tuple(
            tuple(
                tuple(r for r, at in places.items() if at.dp == replica and at.pp == pp_rank)
                for pp_rank in range(layout.pp)
            )
            for replica in range(layout.dp)
        )

    def _tell_repeated_forwards(self) -> None:
        keys = (self.kind, self.microbatch, self.stage, self.iteration, self.rank)
        order = np.lexsort((self.start_ns, *keys))
        same = np.logical_and.reduce([np.diff(key[order], prepend=-1) == 0 for key in keys])
        again = np.zeros(len(order), dtype=np.bool_)
        again[order] = same
        self.kind = np.where(again & (self.kind == _FORWARD), _REPEATED, self.kind)

    def _dense(self) -> Floats:
        shape = (
            len(_KINDS),
            len(self.ranks),
            len(self.iterations),
            self.shape.num_stages,
            self.shape.num_microbatches,
        )
        seconds = np.full(shape, np.nan)
        where = (self.kind, self.replica, self.iteration, self.stage, self.microbatch)
        np.fmax.at(seconds, where, (self.end_ns - self.start_ns) * _NS)
        return seconds

    def pipeline_s(self) -> float:
        """Return the time from the first pass's begin to the last pass's end on the slowest
        replica, median over iterations.
        """
        size = (len(self.ranks), len(self.iterations))
        first = np.full(size, np.iinfo(np.int64).max)
        last = np.zeros(size, dtype=np.int64)
        np.minimum.at(first, (self.replica, self.iteration), self.start_ns)
        np.maximum.at(last, (self.replica, self.iteration), self.end_ns)
        return float(np.median((last - first).max(axis=0)) * _NS)

    def overhead_s(self) -> float:
        """Return the median pause of a rank between a pass and what ended last before it."""
        gaps = [self._gaps(int(rank)) for rank in np.unique(self.rank)]
        return float(np.median(np.concatenate(gaps)) * _NS) if gaps else 0.0

    def _gaps(self, rank: int) -> Ints:
        """Return the pauses in ns before each pass of a rank but an iteration's first."""
        table = self._timeline.spans
        mine = self.rank == rank
        transfers = equals(table, "kind", Kind.P2P) & (numbers(table, "rank") == rank)
        start_ns = numbers(table, "start_ns")[transfers]
        end_ns = start_ns + numbers(table, "duration_ns")[transfers]
        begins = np.concatenate([self.start_ns[mine], start_ns])
        ends = np.concatenate([self.end_ns[mine], end_ns])
        is_pass = np.arange(len(begins)) < mine.sum()
        iteration = np.concatenate([self.iteration[mine], np.full(len(start_ns), -1)])
        order = np.argsort(begins, kind="stable")
        ended_ns = np.maximum.accumulate(ends[order])
        gap_ns = begins[order][1:] - ended_ns[:-1]
        passes = is_pass[order][1:]
        changed = np.diff(iteration[order][is_pass[order]], prepend=-1) != 0
        first = np.zeros(len(order), dtype=np.bool_)
        first[np.flatnonzero(is_pass[order])[changed]] = True
        return np.asarray(np.maximum(gap_ns[passes & ~first[1:]], 0))

    def hand_over_s(self) -> Floats:
        """Return the pauses, (case,), from a forward's end to the begin of the next stage's forward
        of the same microbatch, where the next stage was free and waited.

        Where messages are asynchronous and their ends unknown, only these pauses show them.
        """
        order = np.lexsort((self.start_ns, self.rank))
        same_rank = np.diff(self.rank[order], prepend=-1) == 0
        free_ns = np.zeros(len(order), dtype=np.int64)
        free_ns[order] = np.where(same_rank, np.roll(self.end_ns[order], 1), 0)
        size = self.seconds.shape[1:]
        made_ns = np.zeros(size, dtype=np.int64)
        forward = self.kind == _FORWARD
        where = (self.replica, self.iteration, self.stage, self.microbatch)
        np.maximum.at(made_ns, tuple(index[forward] for index in where), self.end_ns[forward])
        fed = forward & (self.stage > 0)
        before = (self.replica, self.iteration, self.stage - 1, self.microbatch)
        made_ns = made_ns[tuple(index[fed] for index in before)]
        waited = (free_ns[fed] < made_ns) & (made_ns > 0)
        return np.asarray(np.maximum(self.start_ns[fed] - made_ns, 0)[waited] * _NS)

    def plan(self) -> Plan | None:
        """Return the order of replica 0 in the last iteration; None where passes are missing."""
        shape = PipelineShape(
            num_ranks=self.shape.num_ranks,
            num_chunks=self.shape.num_chunks,
            num_microbatches=self.microbatches[0],
        )
        split = bool(np.isfinite(self.seconds[_WEIGHT_GRADIENT]).any())
        lists = []
        for members in self.ranks[0]:
            chosen = (self.rank == min(members, default=-1)) & (
                self.iteration == len(self.iterations) - 1
            )
            rows = np.flatnonzero(chosen)[np.argsort(self.start_ns[chosen], kind="stable")]
            lists.append(tuple(self._action(int(row), split=split) for row in rows))
        plan = Plan(name="as traced", shape=shape, actions=tuple(lists))
        try:
            check(plan)
        except ConfigError:
            return None
        return plan

    def _action(self, row: int, *, split: bool) -> Action:
        kind = _KINDS[self.kind[row]]
        if kind is ActionKind.INPUT_GRADIENT and not split:
            kind = ActionKind.BACKWARD
        return Action(kind, int(self.stage[row]), int(self.microbatch[row]))


def _stage_costs(
    timeline: Timeline, seconds: Floats
) -> tuple[tuple[tuple[StageCost, ...], ...], bool]:
    """Return costs by (replica, stage), and whether the job repeats forwards."""
    finite = np.isfinite(seconds)
    by_stage = _median(seconds, axis=(2, 4))
    missing = ~finite[:2].any(axis=(2, 4))
    if missing.any():
        _, replica, stage = np.argwhere(missing)[0]
        raise InputError(
            f"stage {stage} of replica {replica} has no traced forward or backward pass; trace all "
            "ranks, or leave --allow-missing-ranks out"
        )
    repeats = bool(equals(timeline.spans, "phase", Phase.RECOMPUTE).any())
    costs = tuple(
        tuple(
            _cost(*map(float, by_stage[:, replica, stage]), repeats=repeats)
            for stage in range(seconds.shape[3])
        )
        for replica in range(seconds.shape[1])
    )
    return costs, repeats or bool(finite[_REPEATED].any())


def _cost(
    forward_s: float,
    backward_s: float,
    weight_s: float,
    recompute_s: float,
    *,
    repeats: bool,
) -> StageCost:
    """Return a stage's cost from its passes; nan: not recorded as a pass of its own.

    `repeats` says that a backward pass includes the repeated forward.
    """
    if np.isnan(recompute_s):
        recompute_s = min(forward_s, 0.5 * backward_s) if repeats else 0.0
        backward_s -= recompute_s
    if np.isnan(weight_s):
        whole = INPUT_GRADIENT_RATIO + WEIGHT_GRADIENT_RATIO
        weight_s = backward_s * WEIGHT_GRADIENT_RATIO / whole
        backward_s -= weight_s
    return StageCost(
        forward_s=float(forward_s),
        input_gradient_s=float(backward_s),
        weight_gradient_s=float(weight_s),
        recompute_s=float(recompute_s),
    )


def _median(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """Return the median of finite values; nan, without a warning, where there are none."""
    there = np.isfinite(values).any(axis=axis)
    filled = np.where(np.expand_dims(there, axis), values, 0.0)
    return np.asarray(np.where(there, np.nanmedian(filled, axis=axis), np.nan))


def _scales(seconds: Floats) -> Floats:
    """Return relative costs of microbatches, (iteration, replica, microbatch); empty when alike.

    Each stage compares its passes of an iteration with their median. A microbatch's scale is the
    median of what the stages say; the rest is noise.
    """
    work = np.nansum(seconds, axis=0)
    work = np.where(work > 0, work, np.nan)
    relative = work / _median(work, axis=3)[..., None]
    scales = _median(relative, axis=2).transpose(1, 0, 2)
    complete = np.isfinite(scales).all(axis=(1, 2))
    scales = scales[complete]
    if not len(scales) or float(np.median(scales.std(axis=2))) < _UNEVEN_RATIO:
        return np.empty((0, 0, 0))
    return np.asarray(scales)


def _spread(seconds: Floats, scales: Floats) -> float:
    """Return half the range of the middle 68 % of equal passes, relative to their median.

    Differences between microbatches (`scales`) are taken out.
    """
    relative = seconds[:2] / _median(seconds[:2], axis=(2, 4))[:, :, None, :, None]
    if len(scales) == relative.shape[2]:
        relative = relative / scales.transpose(1, 0, 2)[None, :, :, None, :]
    low, high = np.nanpercentile(relative, [16, 84])
    return float((high - low) / 2)


def _messages(timeline: Timeline, passes: _Passes) -> tuple[float, ...]:
    """Return the median seconds of a message over each boundary of stages, in either direction."""
    shape = passes.shape
    table = timeline.spans
    received = equals(table, "kind", Kind.P2P) & equals(table, "op", "recv")
    transfer_ns = numbers(table, "transfer_ns")
    rows = np.flatnonzero(received & (transfer_ns >= 0) & (numbers(table, "iteration") > 0))
    forward = equals(table, "direction", "forward")[rows]
    rank = numbers(table, "rank")[rows]
    layout = timeline.layout
    pp_of = {int(r): layout.coordinates(int(r)).pp for r in np.unique(rank)}
    pp_rank = np.array([pp_of[int(r)] for r in rank], dtype=np.int64)
    link = np.where(forward, pp_rank - 1, pp_rank) % shape.num_ranks
    seconds = transfer_ns[rows] * _NS
    seen = seconds if len(seconds) else passes.hand_over_s()
    usual = float(np.median(seen)) if len(seen) else 0.0
    by_link = [
        float(np.median(seconds[link == number])) if (link == number).any() else usual
        for number in range(shape.num_ranks)
    ]
    return tuple(by_link[boundary % shape.num_ranks] for boundary in range(shape.num_stages - 1))


def _step_s(timeline: Timeline, passes: _Passes) -> float:
    """Return the median iteration time of the rank that takes longest."""
    table = timeline.spans
    iteration = numbers(table, "iteration")
    rows = np.flatnonzero(
        equals(table, "kind", Kind.ITERATION) & np.isin(iteration, passes.iterations)
    )
    if not len(rows):
        return passes.pipeline_s()
    longest = np.zeros(len(passes.iterations))
    number = np.searchsorted(passes.iterations, iteration[rows])
    np.maximum.at(longest, number, numbers(table, "duration_ns")[rows] * _NS)
    return float(np.median(longest[longest > 0]))


def _layers(
    timeline: Timeline, passes: _Passes, *, recomputes: bool
) -> tuple[tuple[int, ...] | None, StageCost | None]:
    """Return the layers of each stage and the median cost of a layer, from spans of modules."""
    table = timeline.spans
    layer = numbers(table, "layer")
    forward = np.flatnonzero(equals(table, "name", TRANSFORMER_LAYER) & (layer > 0))
    backward = np.flatnonzero(equals(table, "name", backward_of(TRANSFORMER_LAYER)) & (layer > 0))
    if not len(forward) or not len(backward):
        return None, None
    rank = numbers(table, "rank")[forward]
    chunk = np.maximum(numbers(table, "chunk")[forward], 0)
    layout = timeline.layout
    pp_of = {int(r): layout.coordinates(int(r)).pp for r in np.unique(rank)}
    stage = chunk * layout.pp + np.array([pp_of[int(r)] for r in rank])
    found = np.unique(np.stack([stage, layer[forward]]), axis=1)
    counts = np.bincount(found[0], minlength=passes.shape.num_stages)
    duration_s = numbers(table, "duration_ns") * _NS
    cost = _cost(
        float(np.median(duration_s[forward])),
        float(np.median(duration_s[backward])),
        np.nan,
        np.nan,
        repeats=recomputes,
    )
    return tuple(int(count) for count in counts), cost


MakePlan = Callable[[PipelineShape], Plan]
Scales = tuple[float, ...]

_HEALTHY_RATIO = 1.03
"""A rank that is slower than its peers by less than this counts as healthy, as in the detector."""
_RECOMPUTED_RATIO = 17.0
"""Activations of a layer over what checkpointing keeps of it: 34 over 2 bytes · s·b·h (fused
attention). A chunk that is repeated as a whole keeps less, only its first layer's input; every
layer's input is counted, to be on the safe side."""
_MOST_SAMPLES = 3
"""Number of traced steps to predict, each with its own microbatches' costs, where these differ."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What is different from the traced job; all else is as traced.

    `layers` (stage) also gives the number of chunks. `microbatches` is by replica. `healthy_ranks`
    are global ranks that count as mended. `reorder` puts a step's microbatches, given as relative
    costs, into another order. `recompute_ahead` repeats forwards as actions of their own, except on
    the last stage, which then keeps its activations.
    """

    layers: tuple[int, ...] | None = None
    microbatches: tuple[int, ...] | None = None
    healthy_ranks: frozenset[int] = frozenset()
    reorder: Callable[[Scales], Scales] | None = None
    recompute_ahead: bool = False


AS_TRACED = Circumstances()


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Predicted pipeline of a step: its time, and the most activations by pipeline rank.

    The unit of activations is what one microbatch holds on one rank of the traced job.
    """

    pipeline_s: float
    peak: tuple[float, ...]


class Predictor:
    """Predicts a measured job under other circumstances.

    `slowdowns` are the verdict's, by global rank; they count where there are no replicas to compare
    with.
    """

    def __init__(self, job: MeasuredJob, slowdowns: Mapping[int, float]) -> None:
        self.job = job
        self._slowness = _slowness(job, slowdowns)
        self._healthy = _healthy_stages(job, self._slowness)

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """Return the global ranks whose pipeline rank is slow (slowness above 1)."""
        return tuple(
            rank
            for replica, ratios in enumerate(self._slowness)
            for pp_rank, ratio in enumerate(ratios)
            for rank in self.job.ranks[replica][pp_rank]
            if ratio > 1.0
        )

    @cached_property
    def traced(self) -> PredictedStep:
        """Return the model's prediction of the traced step."""
        samples = [self.job.predict_as_traced(sample) for sample in self._samples()]
        return _mean_of_worst(samples)

    def step_s(self, outcome: PredictedStep) -> float:
        """Return the seconds of the whole iteration with the predicted pipeline `outcome`."""
        return self.job.step_s + outcome.pipeline_s - self.traced.pipeline_s

    def outcome(self, make_plan: MakePlan, circumstances: Circumstances) -> PredictedStep:
        """Predict the job with a schedule under these circumstances."""
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
        """Predict one pipeline of `count` microbatches with these costs."""
        shape = self.shape(circumstances, count)
        memory = self.memory(circumstances, costs.microbatch_sizes)
        return predict(make_plan(shape), costs.table(shape), memory)

    def shape(self, circumstances: Circumstances, count: int) -> PipelineShape:
        """Return the pipeline's shape for `count` microbatches."""
        shape = self.job.shape_of(count)
        if circumstances.layers is None:
            return shape
        return replace(shape, num_chunks=len(circumstances.layers) // shape.num_ranks)

    def costs(self, replica: int, circumstances: Circumstances) -> Costs:
        """Return a replica's costs under circumstances; all microbatches are alike."""
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
        """Return what stages hold, in units of a microbatch's activations on a rank as traced."""
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
        """Return healthy costs of stages with other layers.

        The rest of a stage stays where it is; where the number of stages changes, the rest of the
        first and of the last stage go to the new first and last.
        """
        job = self.job
        assert job.layers is not None
        assert job.layer is not None
        rests = [
            _minus(cost, job.layer.scaled(count))
            for cost, count in zip(self._healthy, job.layers, strict=True)
        ]
        stages = [job.layer.scaled(count) for count in layers]
        if len(layers) == len(rests):
            return tuple(stage + rest for stage, rest in zip(stages, rests, strict=True))
        stages[0] += rests[0]
        stages[-1] += rests[-1]
        return tuple(stages)

    def _samples(self) -> list[list[Scales]]:
        """Return microbatches' relative costs in a few traced steps, (step) → [replica].

        Where microbatches are alike, return one step without costs.
        """
        scales = self.job.scales[:_MOST_SAMPLES]
        if not len(scales):
            return [[]]
        return [[tuple(map(float, row)) for row in step] for step in scales]


def _slowness(job: MeasuredJob, slowdowns: Mapping[int, float]) -> tuple[tuple[float, ...], ...]:
    """Return how many times as long as a healthy rank each takes, (replica) → (pipeline rank)."""
    ranks = range(job.shape.num_ranks)
    if job.num_replicas == 1:
        said = [max(slowdowns.get(rank, 1.0) for rank in job.ranks[0][p]) for p in ranks]
        return (tuple(max(1.0, ratio) for ratio in said),)
    work = [[_work_s(job, replica, p) for p in ranks] for replica in range(job.num_replicas)]
    usual = [_usual([row[p] for row in work]) for p in ranks]
    ratios = [[row[p] / usual[p] for p in ranks] for row in work]
    return tuple(tuple(r if r > _HEALTHY_RATIO else 1.0 for r in row) for row in ratios)


def _usual(values: list[float]) -> float:
    """Return what a healthy replica takes: the median; of two replicas, the shorter time."""
    return min(values) if len(values) == 2 else median(values)


def _work_s(job: MeasuredJob, replica: int, pp_rank: int) -> float:
    return sum(job.stages[replica][stage].total_s for stage in job.shape.stages_of(pp_rank))


def _healthy_stages(
    job: MeasuredJob, slowness: tuple[tuple[float, ...], ...]
) -> tuple[StageCost, ...]:
    """Return the costs of stages on healthy ranks: means over replicas, with slowness taken out.

    The means make all replicas equal, because small differences between replicas are noise.
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
    """Return what a stage takes beyond a part of it, at least 0."""
    return StageCost(
        forward_s=max(0.0, cost.forward_s - part.forward_s),
        input_gradient_s=max(0.0, cost.input_gradient_s - part.input_gradient_s),
        weight_gradient_s=max(0.0, cost.weight_gradient_s - part.weight_gradient_s),
        recompute_s=max(0.0, cost.recompute_s - part.recompute_s),
    )


def _with_scales(costs: Costs, scales: Scales, count: int, circumstances: Circumstances) -> Costs:
    """Return costs with the relative costs of a step's microbatches.

    The latter are repeated or cut where a replica runs another number of microbatches.
    """
    repeated = tuple(scales[number % len(scales)] for number in range(count))
    if circumstances.reorder:
        repeated = circumstances.reorder(repeated)
    return replace(costs, microbatch_scales=repeated, microbatch_sizes=repeated)


def _mean_of_worst(samples: Sequence[Sequence[Prediction]]) -> PredictedStep:
    """Return the slowest replica's time, as the mean over steps, and the highest peaks by rank."""
    peaks = [prediction.peak for predictions in samples for prediction in predictions]
    return PredictedStep(
        pipeline_s=fmean(max(p.step_s for p in predictions) for predictions in samples),
        peak=tuple(max(by_rank) for by_rank in zip(*peaks, strict=True)),
    )
