"""What would help a traced job: each remedy with the step it is predicted to give.

    nothing        the step as traced
    schedule       another order of the same work: by a rule, or planned for the measured costs
    microbatches   fewer microbatches for the replica with a slow rank; no restart
    layers         fewer layers for a slow rank or a stage that carries more than layers; restart
    order          short microbatches first and last, long ones between, where lengths differ
    drain          the slow rank replaced by a rank like its peers
    helper         ranks outside the pipeline that run forwards; tried where some are offered

No order of work makes up for a slow rank, but moved work does; so remedies that move work are tried
with several schedules. Peak activations are counted in the activations of one microbatch on one
rank as traced, and only what stays within the limit is recommended.

Microbatches by replica and layers by stage that make ranks end together are found by moving one at
a time: from where most time goes to where it costs least, as long as that helps. Predictions of the
whole pipeline decide, not sums of work: how a slow rank delays other ranks depends on the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from megascan.errors import ConfigError
from training.pipeline.disaggregation import MOST_AHEAD, best_share
from training.pipeline.generators import GENERATORS, recompute_ahead, zero_bubble_h1
from training.pipeline.guided import guided_ratio
from training.pipeline.measured import (
    AS_TRACED,
    Circumstances,
    MakePlan,
    PredictedStep,
    Predictor,
    Scales,
)
from training.pipeline.plan import PipelineShape, Plan
from training.pipeline.planner import Found, Problem, search
from training.pipeline.rebalance import HILL, hill_order
from training.pipeline.simulator import Prediction, predict

_LIMIT_ROUNDING = 1e-9
"""Share by which sums of activations may pass the limit of memory."""
_FASTER_RATIO = 0.999
"""A plan that holds more activations is shown only if it takes less than this part of the time."""
_WORTH_RATIO = 0.98
"""A remedy that predicts a step above this part of the traced one is not worth a restart."""


class RemedyKind(StrEnum):
    """What a remedy changes."""

    NOTHING = "nothing"
    SCHEDULE = "schedule"
    MICROBATCHES = "microbatches"
    LAYERS = "layers"
    ORDER = "order"
    DRAIN = "drain"
    HELPER = "helper"


class Effort(StrEnum):
    """What it takes to apply a remedy."""

    NONE = "none"
    BOUNDARY = "next step"
    RESTART = "restart"
    HARDWARE = "new hardware"


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to do, and the iteration time that it is predicted to give.

    `flags` are the trainer's flags that bring `circumstances` about. A `plan` must be written to a
    file that --pipeline-schedule names. `numerics` says what becomes of losses.
    """

    kind: RemedyKind
    what: str
    effort: Effort
    step_s: float
    peak: tuple[float, ...]
    flags: tuple[str, ...] = ()
    plan: Plan | None = None
    circumstances: Circumstances = AS_TRACED
    numerics: str = "identical"
    is_disaggregated: bool = False
    """Whether forwards run on ranks outside the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All remedies, the traced step first, then by predicted step; and which to take.

    `best` is the fastest remedy within the limit that needs no new hardware, or the traced step
    itself where nothing is worth a restart. `memory_limit` is in activations of a microbatch.
    `guided_ratio` is the time with guided choice over the time of the best remedy's plan, when
    passes spread as in the trace; None where the best remedy has no plan.
    """

    remedies: tuple[Remedy, ...]
    best: Remedy
    memory_limit: float
    guided_ratio: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def now(self) -> Remedy:
        """Return the step as traced."""
        return self.remedies[0]


@dataclass(frozen=True, kw_only=True)
class HelperOffer:
    """Ranks that could run forwards; `speed_ratio` is over the speed of a pipeline rank."""

    num_helpers: int = 1
    speed_ratio: float = 1.0


def advise(
    model: Predictor, *, memory_limit: float | None = None, helpers: HelperOffer | None = None
) -> Advice:
    """Return what would help a job.

    `memory_limit` is how many microbatches' activations a rank may hold (default: as traced).
    """
    limit = max(model.traced.peak) if memory_limit is None else memory_limit
    adviser = _Adviser(model, limit, helpers)
    now = Remedy(
        kind=RemedyKind.NOTHING,
        what="as traced",
        effort=Effort.NONE,
        step_s=model.job.step_s,
        peak=model.traced.peak,
    )
    others = sorted(adviser.remedies(), key=lambda remedy: remedy.step_s)
    usable = [
        remedy
        for remedy in others
        if remedy.effort is not Effort.HARDWARE
        and max(remedy.peak) <= limit * (1 + _LIMIT_ROUNDING)
        and remedy.step_s < now.step_s * _WORTH_RATIO
    ]
    best = usable[0] if usable else now
    return Advice(
        remedies=(now, *others),
        best=best,
        memory_limit=limit,
        guided_ratio=_guided_ratio(model, best),
        notes=tuple(_notes(model, others, helpers)),
    )


def _notes(model: Predictor, others: list[Remedy], helpers: HelperOffer | None) -> Iterator[str]:
    """Yield sentences: what could not be tried and why, and what to expect of helpers."""
    job = model.job
    if job.layers is None:
        yield (
            "layers of the stages are not in the trace, so none are moved; trace with "
            "--trace-granularity full, or give --num-layers"
        )
    if job.replicas_coupled and job.num_replicas > 1:
        yield "experts are spread over replicas, so these run equal numbers of microbatches"
    if helpers is None:
        return
    if job.shape.num_chunks > 1 or job.num_replicas > 1:
        yield (
            f"helpers were not tried: the job has {job.shape.num_chunks} chunk(s) a rank and "
            f"{job.num_replicas} replica(s), helpers serve one pipeline of one chunk a rank"
        )
        return
    if not job.recomputes:
        yield (
            "the job does not recompute: stages would run each helped forward a second time, "
            "which they do not do now"
        )
    with_helper = min(
        r.step_s for r in others if r.kind is RemedyKind.HELPER and r.is_disaggregated
    )
    without = min(r.step_s for r in others if r.effort is not Effort.HARDWARE)
    if with_helper >= without:
        yield (
            f"a helper loses: {with_helper * 1e3:.1f} ms, where {without * 1e3:.1f} ms are to be "
            "had without one"
        )


def _guided_ratio(model: Predictor, best: Remedy) -> float | None:
    if best.plan is None:
        return None
    costs = model.costs(model.slowest_replica(), best.circumstances)
    return guided_ratio(best.plan, costs.table(best.plan.shape), model.job.spread_ratio)


def predicted_best(advice: Advice, model: Predictor) -> Prediction:
    """Return, to be drawn, the best remedy's plan on the replica that the step waits for."""
    plan = advice.best.plan
    assert plan is not None
    costs = model.costs(model.slowest_replica(), advice.best.circumstances)
    return predict(plan, costs.table(plan.shape), model.memory(advice.best.circumstances))


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """A schedule with the trainer's flags that select it."""

    name: str
    make: MakePlan
    flags: tuple[str, ...]
    plan: Plan | None = None


class _Adviser:
    def __init__(self, model: Predictor, limit: float, helpers: HelperOffer | None) -> None:
        self._model = model
        self._limit = limit
        self._helpers = helpers

    def remedies(self) -> Iterator[Remedy]:
        """Yield every remedy that applies to this job."""
        schedules = list(self._schedules(AS_TRACED))
        for schedule in schedules:
            yield self._remedy(RemedyKind.SCHEDULE, schedule, AS_TRACED, schedule.name)
        yield from self._more_chunks()
        by_rule = [schedule for schedule in schedules if schedule.plan is None]
        if self._model.job.recomputes:
            yield from self._repeated_ahead(by_rule)
        yield from self._microbatches(by_rule)
        yield from self._layers()
        yield from self._order(by_rule)
        yield from self._drain()
        if self._helpers is not None:
            yield from self._helped(self._helpers)

    def _schedules(self, circumstances: Circumstances) -> Iterator[_Schedule]:
        """Yield the rules that fit this pipeline and, where all replicas run equally many
        microbatches, planned schedules.
        """
        shape = self._model.shape(circumstances, self._model.job.microbatches[0])
        for name, generate in GENERATORS.items():
            try:
                generate(shape)
            except ConfigError:
                continue
            if shape.num_chunks > 1 or name in ("1f1b", "zb-h1"):
                yield _Schedule(name=name, make=generate, flags=("--pipeline-schedule", name))
        counts = circumstances.microbatches or self._model.job.microbatches
        if len(set(counts)) > 1:
            return
        yield from self._planned_schedules(circumstances)

    def _planned_schedules(self, circumstances: Circumstances) -> Iterator[_Schedule]:
        """Yield the plan searched for within the limit, then for one microbatch more if faster.

        Plans of a rule are left out.
        """
        best_s = float("inf")
        for limit in (self._limit, self._limit + 1):
            found = self._planned(circumstances, limit)
            if found is None or found.prediction.step_s >= best_s * _FASTER_RATIO:
                continue
            best_s = found.prediction.step_s
            if found.plan.name not in GENERATORS:
                yield _planned_schedule(found.plan, limit)

    def _planned(self, circumstances: Circumstances, limit: float) -> Found | None:
        """Search a plan for the replica that the step waits for; None where none fits `limit`."""
        model = self._model
        shape = model.shape(circumstances, model.job.microbatches[0])
        problem = Problem(
            shape=shape,
            table=model.costs(model.slowest_replica(), circumstances).table(shape),
            memory=model.memory(circumstances),
            memory_limit=limit,
        )
        try:
            return search(problem)
        except ConfigError:
            return None

    def _remedy(
        self,
        kind: RemedyKind,
        schedule: _Schedule,
        circumstances: Circumstances,
        what: str,
        *,
        flags: tuple[str, ...] = (),
        effort: Effort = Effort.RESTART,
        numerics: str = "identical",
    ) -> Remedy:
        outcome = self._model.outcome(schedule.make, circumstances)
        return Remedy(
            kind=kind,
            what=what,
            effort=effort,
            step_s=self._model.step_s(outcome),
            peak=outcome.peak,
            flags=(*flags, *schedule.flags),
            plan=schedule.plan,
            circumstances=circumstances,
            numerics=numerics,
        )

    def _more_chunks(self) -> Iterator[Remedy]:
        """Try two chunks a rank where the job has one and all stages can be halved by layers."""
        job = self._model.job
        if job.layers is None or job.shape.num_chunks > 1 or any(n % 2 for n in job.layers):
            return
        half = tuple(count // 2 for count in job.layers)
        circumstances = Circumstances(layers=half + half)
        is_even = len(set(half)) == 1
        flags = (
            ("--num-virtual-stages-per-pipeline-rank", "2")
            if is_even
            else ("--pipeline-model-parallel-layout", layout_text(half + half))
        )
        for schedule in self._schedules(circumstances):
            what = f"{schedule.name}, 2 chunks a rank"
            yield self._remedy(
                RemedyKind.SCHEDULE, schedule, circumstances, what, flags=flags, numerics=_ROUNDED
            )

    def _repeated_ahead(self, schedules: list[_Schedule]) -> Iterator[Remedy]:
        """Try forwards repeated while a rank waits for the gradient, not when it has come."""
        for schedule in schedules:
            ahead = replace(
                schedule,
                make=partial(_ahead, schedule.make),
                flags=(*schedule.flags, "--recompute-ahead"),
            )
            yield self._remedy(
                RemedyKind.SCHEDULE,
                ahead,
                Circumstances(recompute_ahead=True),
                f"{schedule.name}, forwards repeated ahead (leave --recompute-granularity out)",
            )

    def _microbatches(self, schedules: list[_Schedule]) -> Iterator[Remedy]:
        """Try shares of microbatches that make the replicas end together."""
        job = self._model.job
        if job.num_replicas == 1 or job.replicas_coupled or not self._model.slow_ranks:
            return
        for schedule in schedules:
            counts = balanced_microbatches(self._model, schedule.make)
            if counts == job.microbatches:
                continue
            text = ",".join(map(str, counts))
            yield self._remedy(
                RemedyKind.MICROBATCHES,
                schedule,
                Circumstances(microbatches=counts),
                f"{text} microbatches by replica, {schedule.name}",
                flags=("--dpp-microbatches", text),
                effort=Effort.BOUNDARY
                if schedule.name == _traced_name(job.shape)
                else Effort.RESTART,
                numerics=_ROUNDED,
            )

    def _layers(self) -> Iterator[Remedy]:
        """Try layers by stage that make the ranks end together: with the rules for the number of
        chunks, and with planned schedules.
        """
        job = self._model.job
        if job.layers is None:
            return
        for name in ("1f1b", "zb-h1") if job.shape.num_chunks == 1 else ("dfc",):
            make = GENERATORS[name]
            layers = balanced_layers(self._model, make)
            if layers == job.layers:
                continue
            schedules = [_Schedule(name=name, make=make, flags=("--pipeline-schedule", name))]
            if name != "1f1b":
                schedules += self._planned_schedules(Circumstances(layers=layers))
            for schedule in schedules:
                yield self._remedy(
                    RemedyKind.LAYERS,
                    schedule,
                    Circumstances(layers=layers),
                    f"{','.join(map(str, layers))} layers by stage, {schedule.name}",
                    flags=("--pipeline-model-parallel-layout", layout_text(layers)),
                    numerics=_ROUNDED,
                )

    def _order(self, schedules: list[_Schedule]) -> Iterator[Remedy]:
        """Try short microbatches first and last, where lengths differ."""
        if not len(self._model.job.scales):
            return
        for schedule in schedules:
            yield self._remedy(
                RemedyKind.ORDER,
                schedule,
                Circumstances(reorder=hill),
                f"microbatches short, long, short, {schedule.name}",
                flags=("--order-microbatches", HILL),
                numerics=_ROUNDED,
            )

    def _drain(self) -> Iterator[Remedy]:
        """Try the job unchanged, but with its slow ranks replaced."""
        slow = self._model.slow_ranks
        if not slow:
            return
        name = _traced_name(self._model.job.shape)
        schedule = _Schedule(name=name, make=GENERATORS[name], flags=())
        ranks = ", ".join(map(str, slow[:8])) + (", …" if len(slow) > 8 else "")
        yield self._remedy(
            RemedyKind.DRAIN,
            schedule,
            Circumstances(healthy_ranks=frozenset(slow)),
            f"rank {ranks} like its peers, {name}",
            effort=Effort.HARDWARE,
        )

    def _helped(self, offer: HelperOffer) -> Iterator[Remedy]:
        """Try forwards on the offered helpers, and for comparison the same GPUs as more pipeline
        ranks.
        """
        model = self._model
        job = model.job
        if job.shape.num_chunks > 1 or job.num_replicas > 1:
            return
        stages = model.costs(0, AS_TRACED).stages
        for splits in (False, True):
            found = best_share(
                stages,
                job.microbatches[0],
                speeds=(offer.speed_ratio,) * offer.num_helpers,
                splits_backward=splits,
            )
            how = ", backward split" if splits else ""
            flags = ["--forward-backward-disaggregating", "--fbd-helpers", str(offer.num_helpers)]
            if splits:
                flags += ["--pipeline-schedule", "zb-h1"]
            yield Remedy(
                kind=RemedyKind.HELPER,
                what=f"{offer.num_helpers} helper(s) of speed {offer.speed_ratio:g} run "
                f"{found.share:.0%} of the forwards{how}",
                effort=Effort.HARDWARE,
                step_s=model.step_s(PredictedStep(pipeline_s=found.pipeline_s, peak=())),
                peak=(float(MOST_AHEAD),) * job.shape.num_ranks,
                flags=tuple(flags),
                is_disaggregated=True,
            )
        yield self._one_rank_more(offer)

    def _one_rank_more(self, offer: HelperOffer) -> Remedy:
        """Predict the offered GPUs as additional pipeline ranks, with even stages."""
        model = self._model
        costs = model.costs(0, AS_TRACED)
        ranks = len(costs.stages) + offer.num_helpers
        total = sum(costs.stages[1:], costs.stages[0])
        shape = PipelineShape(num_ranks=ranks, num_microbatches=model.job.microbatches[0])
        spread = replace(
            costs,
            stages=(total.scaled(1 / ranks),) * ranks,
            message_s=(max(costs.message_s),) * (ranks - 1),
        )
        prediction = predict(zero_bubble_h1(shape), spread.table(shape))
        return Remedy(
            kind=RemedyKind.HELPER,
            what=f"the same GPU(s) as pipeline ranks, {ranks} even stages, zb-h1 (if equal GPUs)",
            effort=Effort.HARDWARE,
            step_s=model.step_s(PredictedStep(pipeline_s=prediction.step_s, peak=())),
            peak=tuple(peak * (ranks - offer.num_helpers) / ranks for peak in prediction.peak),
            flags=("--pipeline-model-parallel-size", str(ranks), "--pipeline-schedule", "zb-h1"),
            numerics=_ROUNDED,
        )


_ROUNDED = "same up to the order of sums"


def _ahead(make: MakePlan, shape: PipelineShape) -> Plan:
    return recompute_ahead(make(shape))


def _planned_schedule(plan: Plan, limit: float) -> _Schedule:
    return _Schedule(
        name=f"planned for {limit:.3g} microbatches",
        make=lambda shape: plan,
        flags=("--pipeline-schedule", "plan.csv"),
        plan=plan,
    )


def _traced_name(shape: PipelineShape) -> str:
    """Return the name of Megatron-Core's own schedule for a pipeline."""
    return "1f1b" if shape.num_chunks == 1 else "dfc"


def hill(scales: Scales) -> Scales:
    """Return a step's relative costs by microbatch in the order of --order-microbatches hill."""
    return tuple(scales[position] for position in hill_order(scales))


_LEAST_GAIN_S = 1e-12
_NUM_DONORS = 2
"""How many of the busiest ranks are tried as givers of a layer."""


def balanced_microbatches(model: Predictor, make_plan: MakePlan) -> tuple[int, ...]:
    """Return the microbatches by replica that give the shortest step, in all as many as traced."""
    counts = list(model.job.microbatches)
    times = _ReplicaTimes(model, make_plan)
    while True:
        now = [times.at(replica, count) for replica, count in enumerate(counts)]
        giver = max(range(len(counts)), key=now.__getitem__)
        takers = [replica for replica in range(len(counts)) if replica != giver]
        taker = min(takers, key=lambda replica: times.at(replica, counts[replica] + 1))
        bound_s = max(now[giver] - _LEAST_GAIN_S, 0.0)
        if counts[giver] == 1 or times.at(taker, counts[taker] + 1) >= bound_s:
            return tuple(counts)
        counts[giver] -= 1
        counts[taker] += 1


class _ReplicaTimes:
    """Predicted pipeline times by replica and number of microbatches, each predicted once."""

    def __init__(self, model: Predictor, make_plan: MakePlan) -> None:
        self._model = model
        self._make_plan = make_plan
        self._costs = [model.costs(r, AS_TRACED) for r in range(model.job.num_replicas)]
        self._known: dict[tuple[object, int], float] = {}

    def at(self, replica: int, count: int) -> float:
        """Return the predicted seconds of a replica that runs `count` microbatches."""
        costs = self._costs[replica]
        if (costs, count) not in self._known:
            prediction = self._model.predict(self._make_plan, AS_TRACED, costs, count)
            self._known[costs, count] = prediction.step_s
        return self._known[costs, count]


def balanced_layers(model: Predictor, make_plan: MakePlan) -> tuple[int, ...]:
    """Return the layers by stage, at least 1 each and in all as many as traced, that give the
    shortest step.
    """
    assert model.job.layers is not None
    layers = model.job.layers
    best_s = _pipeline_s(model, make_plan, layers)
    while True:
        moves = [(_pipeline_s(model, make_plan, moved), moved) for moved in _moves(model, layers)]
        if not moves or min(moves)[0] >= best_s - _LEAST_GAIN_S:
            return layers
        best_s, layers = min(moves)


def _pipeline_s(model: Predictor, make_plan: MakePlan, layers: tuple[int, ...]) -> float:
    return model.outcome(make_plan, Circumstances(layers=layers)).pipeline_s


def _moves(model: Predictor, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all layouts that move one layer from a stage of the busiest ranks to a stage of
    another rank.
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
    """Return layers as Megatron's `--pipeline-model-parallel-layout`, as in Ettt|ttt|tttL."""
    stages = ["t" * count for count in layers]
    return f"E{'|'.join(stages)}L"
