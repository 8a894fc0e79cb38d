"""Run passes: what a rank does for one microbatch of one chunk, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from benchmarks.grounds.rack.conditions import Conditions
from benchmarks.grounds.rack.data import Loader
from benchmarks.grounds.rack.engine import ALIKE, Arguments, Lane, Mark, Pending, Scale
from benchmarks.grounds.rack.hardware import Floats, Mask
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.noise import tails
from benchmarks.grounds.rack.parts import (
    EXPERTS,
    HEAD,
    Await,
    Begin,
    Compute,
    End,
    HostWaits,
    Needs,
    Plan,
    Planner,
    Reduces,
    Step,
    Talk,
)
from benchmarks.grounds.rack.places import Map
from benchmarks.grounds.rack.roofline import BYTES
from megascan.schema import Kind
from megascan.vocabulary import BACKWARD, BATCH_GENERATOR, FORWARD, collection_of

_TAKES_S = 3e-4
"""What unpickling and collating a prepared batch takes the training thread."""
_SMALL_COLLECTION_S = 1.2e-4
_BESIDE = 1.03
"""Kernels take longer beside NCCL's, which hold some multiprocessors and move bytes."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a stage."""

    microbatch: int
    chunk: int
    is_forward: bool
    is_first: bool = False  # of its chunk in this iteration
    is_last: bool = False

    @property
    def arguments(self) -> Arguments:
        """Return what its spans carry."""
        phase = FORWARD if self.is_forward else BACKWARD
        return {"microbatch": self.microbatch, "chunk": self.chunk, "phase": phase}


@dataclass(eq=False)
class Stage:
    """Runs the passes of one stage; `lane` has its times."""

    job: Job
    number: int
    lane: Lane
    conditions: Conditions
    where: Map
    plans: dict[tuple[int, bool], Plan]
    loader: Loader | None
    num_parameters: tuple[float, ...]  # of each chunk, on one rank
    iteration: int = 0
    recorded: frozenset[int] | None = None  # layers whose modules are recorded; None: all
    reducing: list[Pending] = field(default_factory=list)
    gathering: dict[tuple[int, int], Pending] = field(default_factory=dict)
    moment: int = 0
    _noise: Floats = field(default_factory=lambda: np.zeros(0))
    _beside: list[Pending] = field(default_factory=list)
    _open: list[tuple[Begin, Mark | None]] = field(default_factory=list)
    _first_small: int = 0

    def begin_iteration(self, iteration: int) -> None:
        """Go to a traced iteration, counted from 0; its noise is that of its number alone."""
        self.iteration, self.moment = iteration, 0
        draws = np.random.default_rng([self.job.seed, 4, iteration, self.number])
        most = max(len(plan.kernels) for plan in self.plans.values())
        shape = (self.job.num_slices, most, self.job.ranks_a_stage)
        self._noise = tails(draws, shape, self.job.weather.kernel_tail)
        self._first_small = int(draws.integers(0, self.job.num_slices - 1))
        self.lane.begin_iteration()
        self.reducing = []

    @property
    def places(self) -> slice:
        """Return which places of the job are this stage's."""
        return self.where.of_stage(self.number)

    def now(self, values: Floats) -> Floats:
        """Return what holds in this slice, (variant, place)."""
        found: Floats = values[:, self.places, self.iteration, self.moment]
        return found

    def run(self, one: Pass) -> None:
        """Run a pass and note its spans."""
        lane = self.lane
        lane.moment = self.moment
        self._host_is_elsewhere()
        begin = lane.mark()
        if one.is_forward:
            self._load(one)
        if one.is_first and one.is_forward:
            self._gather_ahead(one.chunk)
        plan = self.plans[one.chunk, one.is_forward]
        seconds = self._seconds(plan, one)
        launch_s = self.now(self.conditions.launch_s)
        for step in plan.steps:
            _STEPS[type(step)](self, step, one, (plan, seconds, launch_s))
        lane.note(Kind.COMPUTE, FORWARD if one.is_forward else BACKWARD, begin, one.arguments)
        self.moment += 1

    def _host_is_elsewhere(self) -> None:
        """Let the thread be descheduled, and collect garbage."""
        lane = self.lane
        lane.stall(self.now(self.conditions.host_stall_s))
        pauses = self.now(self.conditions.collection_s)
        is_small = self.moment == self._first_small
        if not is_small and not pauses.any():
            return
        begin = lane.host
        lane.stall(np.maximum(pauses, _SMALL_COLLECTION_S) if is_small else pauses)
        if lane.is_full:
            self._note_collections(pauses[0] > 0.0, is_small, begin)

    def _note_collections(self, large: Mask, is_small: bool, begin: Floats) -> None:
        """Note pauses: of everything on some ranks, of the youngest on the others."""
        for generation, chosen in ((2, large), (0, ~large)):
            if chosen.any() and (generation or is_small):
                times = begin, self.lane.host
                self.lane.note_on_host(Kind.GC, collection_of(generation), times, {}).keep(chosen)

    def _load(self, one: Pass) -> None:
        """Take the next batch from the loader and hand it on to the tensor-parallel neighbours."""
        lane, layout = self.lane, self.job.layout
        if self.loader is None or not self._takes_data(one.chunk):
            return
        begin = lane.host
        loads = self.where.tp == 0
        ready = self.loader.take(self.iteration, one.microbatch, lane.host)
        lane.host = np.where(loads, np.maximum(lane.host, ready) + _TAKES_S, lane.host)
        row = lane.note_on_host(
            Kind.DATA,
            BATCH_GENERATOR,
            (begin, lane.host),
            {"microbatch": one.microbatch, "chunk": one.chunk},
        )
        row.keep(loads)
        if layout.tp > 1:
            size = 3 * 8 * self.job.model.tokens
            launch_s = self.now(self.conditions.launch_s)
            lane.meet("tp", "broadcast", size, launch_s, one.arguments)

    def _takes_data(self, chunk: int) -> bool:
        """Tell whether a chunk needs tokens or labels: the first and the last one do."""
        is_first = self.number == 0 and chunk == 0
        return is_first or (
            self.number == self.job.num_stages - 1 and chunk == self.job.num_chunks - 1
        )

    def _seconds(self, plan: Plan, one: Pass) -> Floats:
        """Return what each row of a plan takes, (row, variant, place); notes it as busy."""
        conditions, places, at = self.conditions, self.places, (self.iteration, one.microbatch)
        clock, memory = self.now(conditions.clock), self.now(conditions.memory)
        tokens = conditions.tokens[:, places, at[0], at[1]]
        squares = conditions.squares[:, places, at[0], at[1]]
        work = conditions.stage[:, self.number, None]
        scales = np.stack([clock * tokens * work, clock * squares * work, memory * tokens * work])
        found = np.tensordot(plan.seconds, scales, axes=1)
        found *= self._noise[self.moment, : len(found), None, :]
        for row, tag, layer in plan.tagged:
            if tag == HEAD:
                found[row] *= conditions.head
            elif tag == EXPERTS and self.job.layout.ep > 1:
                found[row] *= conditions.load[:, layer, :, at[0], at[1]]
        found[0] += self.now(conditions.chip_stall_s)
        if self.reducing:
            found *= _BESIDE
        self.lane.busy = self.lane.busy + found.sum(axis=0)
        return np.asarray(found, dtype=np.float64)

    def _gather_ahead(self, chunk: int) -> None:
        """Start to gather the parameters of a chunk bucket by bucket, as its first pass begins."""
        habits = self.job.habits
        if not habits.overlap_param_gather or self.job.tracing.iterations[self.iteration] == 1:
            return
        buckets = self.buckets_of(chunk)
        size = round(BYTES * self.num_parameters[chunk] / buckets / self.lane.groups["dp_cp"].size)
        arguments = Pass(microbatch=0, chunk=chunk, is_forward=True).arguments
        for bucket in range(buckets):
            self.gathering[chunk, bucket] = self.lane.start(
                "dp_cp", "all_gather", size, self.now(self.conditions.launch_s), {**arguments}
            )

    def buckets_of(self, chunk: int) -> int:
        """Return the buckets of a chunk's gradients."""
        return min(self.job.habits.num_buckets, len(self.job.model.layers[self.number][chunk]))

    def gradient_bytes(self, chunk: int) -> int:
        """Return the bytes of one bucket."""
        return round(
            self.job.habits.gradient_bytes * self.num_parameters[chunk] / self.buckets_of(chunk)
        )

    def on_compute(self, step: Compute, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Launch and run kernels."""
        plan, seconds, launch_s = times
        self.lane.run(seconds[step.row], plan.kernels[step.row], launch_s)

    def on_begin(self, step: Begin, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Open a module."""
        wanted = self.lane.is_full or step.name == "loss"
        if step.layer and self.recorded is not None and step.layer not in self.recorded:
            wanted = False
        self._open.append((step, self.lane.mark() if wanted else None))

    def on_end(self, step: End, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Close the innermost module."""
        opened, begin = self._open.pop()
        if begin is None:
            return
        arguments: Arguments = {"microbatch": one.microbatch, "chunk": one.chunk}
        if opened.layer:
            arguments["layer"] = opened.layer
        self.lane.note(Kind.COMPUTE, opened.name, begin, {**arguments, "phase": opened.phase})

    def on_talk(self, step: Talk, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Communicate."""
        arguments: Arguments = {"microbatch": one.microbatch, "chunk": one.chunk}
        if step.layer:
            arguments["layer"] = step.layer
        arguments["phase"] = step.phase
        scale = self._scale(step, one)
        if step.beside:
            self._beside.append(
                self.lane.start(
                    step.axis, step.op, step.size_bytes, times[2], arguments, scale=scale
                )
            )
        else:
            self.lane.meet(step.axis, step.op, step.size_bytes, times[2], arguments, scale=scale)

    def _scale(self, step: Talk, one: Pass) -> Scale:
        """Return how much more than nominal is moved: by the router, or with longer sequences."""
        at = self.iteration, one.microbatch
        if step.by == EXPERTS:
            load = self.conditions.load[:, step.layer or 1, :, at[0], at[1]]
            return Scale(load, load[0] if step.returns else None)
        if not self.varies or step.axis == "dp_cp":
            return ALIKE
        tokens = self.conditions.tokens[:, self.places, at[0], at[1]]
        return Scale(tokens, tokens[0])

    @cached_property
    def varies(self) -> bool:
        """Tell whether microbatches differ in tokens."""
        return bool((self.conditions.tokens != 1.0).any())

    def on_await(self, step: Await, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Wait for what was started beside."""
        for pending in self._beside:
            self.lane.wait(pending, is_bound=self.job.habits.ends_are_bounds)
        self._beside.clear()

    def on_host_waits(self, step: HostWaits, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Let the host read from the device."""
        self.lane.sync()

    def on_reduces(self, step: Reduces, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Start to reduce a bucket, in the last microbatch of its chunk."""
        habits = self.job.habits
        groups = self.lane.groups["dp_cp"]
        if not (habits.overlap_grad_reduce and one.is_last and groups.size > 1):
            return
        op = "reduce_scatter" if habits.distributed_optimizer else "all_reduce"
        size = self.gradient_bytes(one.chunk)
        self.reducing.append(self.lane.start("dp_cp", op, size, times[2], one.arguments))

    def on_needs(self, step: Needs, one: Pass, times: tuple[Plan, Floats, Floats]) -> None:
        """Wait until a bucket's parameters are there."""
        pending = self.gathering.pop((one.chunk, step.bucket), None)
        if pending is not None:
            self.lane.wait(pending, is_bound=self.job.habits.ends_are_bounds)


_STEPS: dict[type[Step], Callable[..., None]] = {
    Compute: Stage.on_compute,
    Begin: Stage.on_begin,
    End: Stage.on_end,
    Talk: Stage.on_talk,
    Await: Stage.on_await,
    HostWaits: Stage.on_host_waits,
    Reduces: Stage.on_reduces,
    Needs: Stage.on_needs,
}


def plans_of(job: Job, stage: int) -> dict[tuple[int, bool], Plan]:
    """Return the plans of a stage by chunk, forward and backward."""
    planner = Planner(job)
    return {
        (chunk, is_forward): (planner.forward if is_forward else planner.backward)(stage, chunk)
        for chunk in range(job.num_chunks)
        for is_forward in (True, False)
    }
