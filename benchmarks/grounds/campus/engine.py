"""Simulate all traced iterations of a job, in several variants at once.

An iteration ends for everybody with one communication in which, directly or by way of others, all
ranks take part: the norm of the gradients, or the last reduction. What a rank does alone after it,
its update, makes it begin the next iteration later. So iterations can be computed side by side: the
updates first, which wait for nobody, then all the rest, from one such moment to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.grounds.campus.crew import Crew, Mark, Rare, Span
from benchmarks.grounds.campus.faults import Fault
from benchmarks.grounds.campus.habits import adam, unscale
from benchmarks.grounds.campus.hardware import Floats
from benchmarks.grounds.campus.job import MEGATRON, Job
from benchmarks.grounds.campus.links import START_ACROSS_S, message_s
from benchmarks.grounds.campus.megatron import WEIGHT_BYTES, Stage
from benchmarks.grounds.campus.model import EXPERTS
from benchmarks.grounds.campus.plain import Replicas
from benchmarks.grounds.campus.world import World
from megascan.schema import Track

READING_S = 15e-6  # of a number that the host waits for
BETWEEN_S = 6e-4  # what a trainer does between iterations: it logs, it steps its schedules


@dataclass(kw_only=True)
class Section:
    """Spans of some iterations, by stage; `places` are those of the iterations among all."""

    places: list[int]
    spans: list[list[Span]]
    rare: list[Rare]


@dataclass(kw_only=True)
class Outcome:
    """What has come out: times of iterations and passes by variant, and the spans of the first."""

    iteration_s: Floats  # (variant, iteration)
    own_s: Floats  # (variant, rank, iteration): of passes, without waiting and communication
    start_s: Floats  # (iteration, rank), of the first variant, as all of the following
    end_s: Floats
    clock_ratio: Floats  # (rank, iteration): by how much clocks are low at the end
    sections: list[Section] = field(default_factory=list)


def simulate(
    job: Job,
    seed: int,
    chips: Floats,
    *,
    faults: tuple[Fault, ...] = (),
    variants: tuple[frozenset[int], ...] = (frozenset(),),
    keeps: bool = True,
) -> Outcome:
    """Return what comes out on these chips, (variant, rank), with the faults of each variant."""
    given: dict[str, Any] = {
        "job": job, "seed": seed, "chips": chips, "faults": faults, "variants": variants,
        "keeps": keeps,
    }  # fmt: skip
    numbers = job.tracing.iterations
    whole = World(numbers=numbers, num_microbatches=job.microbatches_of(0), **given)
    tails, updates = _updates(whole)
    starts = np.concatenate([tails[:, :1], tails[:, :-1]], axis=1)
    starts = starts + BETWEEN_S * whole.launchers * whole.rng(61).uniform(
        0.8, 1.3, starts.shape[1:]
    )
    starts += _savers(job, whole)
    over = np.empty(starts.shape[:2])
    own = np.empty(starts.shape)
    sections = []
    for count in sorted(set(job.microbatches)):
        places = [p for p in range(len(numbers)) if job.microbatches_of(p) == count]
        world = World(numbers=tuple(numbers[p] for p in places), num_microbatches=count, **given)
        crews, synced = _passes(world, starts[:, places])
        over[:, places] = synced
        own[:, places] = np.concatenate([crew.own for crew in crews], axis=-1)
        sections.append(_section(places, crews))
    sections.append(_shifted(_section(list(range(len(numbers))), updates), over[0]))
    return Outcome(
        iteration_s=over, own_s=own.transpose(0, 2, 1), start_s=starts[0],
        end_s=over[0][:, None] + tails[0], clock_ratio=_clock_ratio(whole), sections=sections,
    )  # fmt: skip


def _clock_ratio(world: World) -> Floats:
    every = range(world.job.num_ranks)
    stretched = world.effects.factor("clock", world.num_passes, every)
    ratio = world.chips[:, None] * world.drift * stretched
    return np.asarray(ratio[0].T)


def _section(places: list[int], crews: list[Crew]) -> Section:
    return Section(
        places=places, spans=[crew.spans for crew in crews],
        rare=[one for crew in crews for one in crew.rare],
    )  # fmt: skip


def _shifted(section: Section, by: Floats) -> Section:
    """Return the updates behind what they follow."""
    spans = [[span.shifted(by) for span in own] for own in section.spans]
    return Section(places=section.places, spans=spans, rare=section.rare)


def _savers(job: Job, world: World) -> Floats:
    """Return (iteration, rank): by how much those begin later that have just saved."""
    late = np.zeros((len(world.numbers), job.num_ranks))
    habits = job.habits
    if habits.save_every:
        after = [number > 1 and not (number - 1) % habits.save_every for number in world.numbers]
        rng = world.rng(62)
        skew = rng.exponential(0.004, late.shape)
        if habits.saves_alone:
            skew = np.zeros(late.shape)
            skew[:, 0] = habits.save_s * rng.uniform(0.8, 1.2, len(late))
        late[after] = skew[after]
    return late


# Updates


def _updates(world: World) -> tuple[Floats, list[Crew]]:
    """Return when each rank has updated, from the common moment on; and the spans of it."""
    job = world.job
    zero = np.zeros((*world.shape, job.ranks_a_stage))
    crews = []
    for stage in range(job.layout.pp):
        crew = Crew(world=world, stage=stage, start=zero, salt=1)
        crew.begin_pass(world.num_passes)
        if job.trainer == MEGATRON:
            _update(crew)
        else:
            Replicas(crew).finish()
        crews.append(crew)
    return np.concatenate([crew.mark().at for crew in crews], axis=-1), crews


def _update(crew: Crew) -> None:
    """Update, and gather what others have updated where the optimizer is distributed.

    The span of the optimizer begins before the common moment: only its end is known here.
    """
    job = crew.world.job
    parameters, experts = job.parameters_of(crew.stage)
    crew.host = crew.host + READING_S * crew.launching
    if not job.habits.distributed_optimizer:
        adam(crew, parameters)
        return
    layout = job.layout
    crew.sequences["dp_cp", "all_gather"] = crew.sequences["expt_dp", "all_gather"] = 0
    replicas = layout.dp * layout.cp
    adam(crew, (parameters - experts) / replicas + experts / max(1, replicas // layout.ep))
    crew.collective("dp_cp", "all_gather", WEIGHT_BYTES * (parameters - experts))
    if experts:
        crew.collective("expt_dp", "all_gather", WEIGHT_BYTES * experts)


# Passes


def _passes(world: World, starts: Floats) -> tuple[list[Crew], Floats]:
    """Return the stages after all passes, and when all ranks have met (variant, iteration)."""
    job = world.job
    crews = [
        Crew(world=world, stage=stage, start=starts[..., slice(ranks.start, ranks.stop)])
        for stage in range(job.layout.pp)
        for ranks in [world.ranks(stage)]
    ]
    if job.trainer != MEGATRON:
        Replicas(crews[0]).run()
        return crews, np.asarray(crews[0].lanes["dp"].max(axis=-1))
    loads = _expert_loads(world)
    stages = [Stage(crew, loads) for crew in crews]
    running = [stage.run() for stage in stages]
    while running:
        running = [one for one in running if next(one, "over") != "over"]
    for stage in stages:
        stage.finish_messages()
    return crews, _meet(stages)


def _expert_loads(world: World) -> dict[int, Floats]:
    """Return by layer how many times its even share of tokens each rank's experts get.

    What some get more, others get less.
    """
    job = world.job
    if not job.has_experts:
        return {}
    found: dict[int, Floats] = {}
    mates, sharers = world.axes["tp"], world.axes["ep"]
    for stage in range(job.layout.pp):
        ranks = world.ranks(stage)
        planted = world.effects.factor("experts", 0, ranks)
        for chunk in range(job.layout.vpp):
            for number, kind in job.layers_of(stage, chunk):
                if kind == EXPERTS:
                    rng = world.rng(63, number)
                    lasting = rng.standard_normal(len(ranks)) * 0.7
                    passing = rng.standard_normal((world.shape[1], len(ranks))) * 0.7
                    drawn = np.exp(job.habits.expert_spread * (lasting + passing))
                    loads = np.asarray(mates.shared(drawn) * planted)
                    found[number] = loads / sharers.mean(loads)
    return found


def _meet(stages: list[Stage]) -> Floats:
    """Reduce what is left of the gradients, and their norm; return when that is over."""
    job, crews = stages[0].job, [stage.crew for stage in stages]
    begins: list[Mark] = []
    for stage, crew in zip(stages, crews, strict=True):
        crew.where = {}
        crew.begin_pass(crew.world.num_passes)
        begins.append(crew.mark())
        _reduce(stage)
    if job.habits.tied_embeddings and job.layout.pp > 1:
        _meet_ends(crews[0], crews[-1])
    for crew, begin in zip(crews, begins, strict=True):
        crew.keep_compute("grad-sync", begin, kind="optimizer", module=False)
        began = crew.mark()
        unscale(crew, job.parameters_of(crew.stage)[0])
        _open_optimizer(crew, began)
    latest = np.maximum.reduce([crew.mark().at.max(axis=-1) for crew in crews])
    over = np.asarray(latest + 2 * START_ACROSS_S)
    axis = "intra_dist_opt" if job.habits.distributed_optimizer else "mp"
    for crew in crews:
        _keep_norm(crew, axis, over)
    return over


def _reduce(stage: Stage) -> None:
    crew, job = stage.crew, stage.job
    ends = ((crew.stage == 0) + (crew.stage == job.layout.pp - 1)) * job.parts.parameters[
        "embedding"
    ]
    if job.habits.overlap_gradients:
        if ends:
            stage.reduce_layers([], beside=True, ends=ends)
        for lane in ("dp_cp", "expt_dp"):
            crew.device = np.maximum(crew.device, crew.lanes.get(lane, crew.device))
        return
    kinds = [
        kind for chunk in range(job.layout.vpp) for _, kind in job.layers_of(crew.stage, chunk)
    ]
    stage.reduce_layers(kinds, beside=False, ends=ends)


def _meet_ends(first: Crew, last: Crew) -> None:
    """Reduce the embeddings that the first stage and the last one share."""
    job = first.world.job
    num_bytes = 4 * job.parts.parameters["embedding"]
    seconds, leaves = message_s(job.site, first.ranks[0], last.ranks[0], num_bytes)
    paces = [crew.nic if leaves else crew.nvlink for crew in (first, last)]
    marks = [crew.mark() for crew in (first, last)]
    both = np.maximum(marks[0].at, marks[1].at)
    end = both + seconds * np.maximum(*paces) * first.noise()[2]
    args = {"op": "all_reduce", "sequence": 0, "size_bytes": round(num_bytes)}
    for crew, mark in zip((first, last), marks, strict=True):
        crew.device = end
        if job.records("embd"):
            track = Track.COMMUNICATION
            crew.keep(
                "collective", "all_reduce", mark, end, args=dict(args), track=track, axis="embd"
            )


def _open_optimizer(crew: Crew, began: Mark) -> None:
    """Record where the span of the optimizer begins; its end is that of the iteration."""
    crew.keep("optimizer", "optimizer", began, began.at, args={}, track=Track.COMPUTE)


def _keep_norm(crew: Crew, axis: str, over: Floats) -> None:
    if not crew.world.job.records(axis):
        return
    mark = crew.mark()
    end = np.broadcast_to(over[..., None], mark.at.shape)
    args = {"op": "all_reduce", "sequence": 0, "size_bytes": 4}
    track = Track.COMMUNICATION
    crew.keep("collective", "all_reduce", mark, end, args=args, track=track, axis=axis)
