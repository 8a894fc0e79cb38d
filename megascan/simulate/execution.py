"""Compute when every instruction of every stage begins and ends.

Problem: from durations of single operations, find all times. Idea: a rank runs its program in
order, so an operation begins when the operation before has ended and, on a GPU, when the host has
launched it; a communication ends for all members one transfer after the last member has arrived.
Waits are not written down; they follow as differences of times.

    host         launch += duration            (loading, collecting; on a CPU: time += duration)
    compute      begin = max(time, launch);  launch += dispatch
                 time = max(begin + duration, launch + duration of the last kernel)
    collective   time = max over the group of arrival  + transfer + own jitter
                 launch += dispatch
    overlapped   as a collective, but time goes on; later time = max(time, end of the collective)
    exchange     time = max over its transfers of max(own post, peer's post) + transfer

Each step acts on all ranks of a stage. The order in which the steps of the stages run does not
depend on durations: it is found once a job and used for every iteration. Everything random or
faulty is in the durations, which come from one generator, so that a seed fixes a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megascan.arrays import Flags, Floats, Integers
from megascan.schema import NOT_APPLICABLE
from megascan.simulate.job import Fault, JobModel, rank_factors
from megascan.simulate.program import (
    CROSS_STAGE_AXES,
    NO_SPAN,
    Code,
    Grid,
    Instruction,
    StageProgram,
    Work,
)
from megascan.vocabulary import FaultKind

PostKey = tuple[int, int]
"""(stage, slot) of a post."""


@dataclass(frozen=True)
class Partner:
    """One transfer of an exchange: the other side's post, and the stage and row of its duration."""

    post: PostKey
    row_stage: int
    row: int


@dataclass(frozen=True)
class Join:
    """A collective across stages: the posts of all its stages, and the row that they share."""

    posts: list[PostKey]
    first_stage: int
    row: int


def partners(programs: list[StageProgram]) -> dict[PostKey, tuple[Partner, ...]]:
    """Return the other ends of every exchange, by (stage, slot)."""
    where = {
        (program.stage, end.peer_stage, end.op, end.direction, end.sequence): (slot, end)
        for program in programs
        for slot, ends in program.exchanges.items()
        for end in ends
    }
    found: dict[PostKey, tuple[Partner, ...]] = {}
    for program in programs:
        for slot, ends in program.exchanges.items():
            others = []
            for end in ends:
                other_op = "recv" if end.op == "send" else "send"
                key = (end.peer_stage, program.stage, other_op, end.direction, end.sequence)
                other_slot, other = where[key]
                receiver = end.peer_stage if end.op == "send" else program.stage
                row = other.row if end.op == "send" else end.row
                others.append(Partner((end.peer_stage, other_slot), receiver, row))
            found[program.stage, slot] = tuple(others)
    return found


def joins(programs: list[StageProgram]) -> dict[str, Join]:
    """Return the collectives across stages by axis, one for each axis in an iteration."""
    found: dict[str, Join] = {}
    for program in programs:
        for instruction in program.instructions:
            if instruction.code == Code.JOIN:
                first = Join([], program.stage, instruction.row)
                join = found.setdefault(instruction.axis, first)
                join.posts.append((program.stage, instruction.slot))
    return found


@dataclass(frozen=True)
class Dependencies:
    """What exchanges and collectives across stages wait for."""

    partners: dict[PostKey, tuple[Partner, ...]]
    joins: dict[str, Join]

    @classmethod
    def of(cls, programs: list[StageProgram]) -> Dependencies:
        """Find the dependencies of programs."""
        return cls(partners(programs), joins(programs))

    def needs(self, stage: int, instruction: Instruction) -> list[PostKey]:
        """Return the posts that must be made before an instruction can run."""
        if instruction.code == Code.WAIT:
            return [partner.post for partner in self.partners[stage, instruction.slot]]
        if instruction.code == Code.JOIN:
            return self.joins[instruction.axis].posts
        return []


def feasible_order(
    programs: list[StageProgram], dependencies: Dependencies
) -> list[tuple[int, Instruction]]:
    """Find an order of instructions in which posts precede what needs them: each stage in turn runs
    as far as it can.
    """
    order: list[tuple[int, Instruction]] = []
    posted: set[PostKey] = set()
    position = [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while position[stage] < len(program.instructions):
                instruction = program.instructions[position[stage]]
                if not posted.issuperset(dependencies.needs(stage, instruction)):
                    break
                if instruction.code == Code.POST:
                    posted.add((stage, instruction.slot))
                order.append((stage, instruction))
                position[stage] += 1
                progress = True
    if len(order) < sum(len(program.instructions) for program in programs):
        raise RuntimeError("the pipeline schedule deadlocks: a fault of the simulator")
    return order


_CPU_SHARE_OF_TRANSFER = 0.3
"""Part of a transfer that the thread spends copying rather than asleep, in CPU runs."""


@dataclass(frozen=True)
class StageDraws:
    """Drawn values of one stage in one iteration, shapes (row, place) unless noted."""

    compute: Floats
    compute_cpu: Floats
    dispatch: Floats
    transfer: Floats
    transfer_dispatch: Floats
    jitter: Floats
    """(slot or row, place): how long after a communication's end a member sees the end."""
    pause: Floats
    """(place): collector pause, 0 without a pause."""
    save: Floats | None
    """(place): time to write a checkpoint; None in iterations without a checkpoint."""
    on_device: Flags
    """(row): whether the device computes the row, so that the host may run ahead."""


class Draws:
    """Draws the values of a job's iterations, in their order."""

    def __init__(
        self, job: JobModel, programs: list[StageProgram], faults: tuple[Fault, ...], seed: int
    ) -> None:
        self.job, self.programs, self.faults = job, programs, faults
        self.grid = Grid(job.layout)
        self.generator = np.random.default_rng(seed)
        self.tables = [_RowTable(program) for program in programs]
        world = job.layout.world_size
        self.device = np.exp(job.noise.device_ratio * self.generator.standard_normal(world))
        self.warmup = self.generator.uniform(0.5, 1.5, world)
        places = [job.layout.coordinates(int(rank)) for rank in self.grid.ranks[0]]
        self.replica = np.array([place.dp for place in places])
        self.loader = np.array([place.tp == 0 for place in places])

    def iteration(self, iteration: int) -> list[StageDraws]:
        """Draw the values of every stage for an iteration (from 1)."""
        lengths = self._lengths()
        pauses = self._pauses(iteration)
        saves = self._saves(iteration)
        return [self._stage(table, iteration, lengths, pauses, saves) for table in self.tables]

    def _factors(self, kind: FaultKind, iteration: int) -> Floats:
        return rank_factors(self.faults, kind, iteration, self.job.layout.world_size)

    def _lengths(self) -> Floats:
        """Draw the work in each microbatch against the mean, shape (microbatch + 1, place).

        The last row is 1, for rows without a microbatch, which have index -1.
        """
        ratio = self.job.imbalance.sequence_ratio
        shape = (self.job.num_microbatches + 1, self.job.layout.dp)
        lengths = np.ones(shape)
        if ratio:
            lengths = np.exp(ratio * self.generator.standard_normal(shape) - ratio**2 / 2)
            lengths[-1] = 1.0
        return lengths[:, self.replica]

    def _pauses(self, iteration: int) -> Floats:
        """Draw the collector pause of every rank in an iteration, ns."""
        imbalance = self.job.imbalance
        compute = np.zeros(self.job.layout.world_size)
        for ranks, table in zip(self.grid.ranks, self.tables, strict=True):
            compute[ranks] = table.device_ns
        pauses = (self._factors(FaultKind.GC, iteration) - 1.0) * compute
        if imbalance.gc_interval:
            due = self.generator.integers(0, imbalance.gc_interval, len(pauses)) == 0
            pauses[due] += imbalance.gc_ns * self.generator.uniform(0.7, 1.3, int(due.sum()))
        return pauses

    def _saves(self, iteration: int) -> Floats | None:
        imbalance = self.job.imbalance
        interval = imbalance.checkpoint_interval
        if not interval or iteration % interval:
            return None
        spread = self.generator.standard_normal(self.job.layout.world_size)
        return imbalance.checkpoint_ns * np.exp(0.1 * spread)

    def _noise(self, ratio: float, shape: tuple[int, int]) -> Floats:
        if ratio == 0.0:
            return np.ones(shape)
        return np.exp(ratio * self.generator.standard_normal(shape))

    def _stage(
        self,
        table: _RowTable,
        iteration: int,
        lengths: Floats,
        pauses: Floats,
        saves: Floats | None,
    ) -> StageDraws:
        ranks = self.grid.ranks[table.program.stage]
        compute = self._compute(table, ranks, iteration, lengths)
        host = self._factors(FaultKind.HOST, iteration)[ranks]
        cpu_time = compute
        if self.job.device == "cpu":
            compute = np.where(table.device[:, None], compute * host, compute)
        transfer = self._transfers(table, ranks, iteration)
        slots = max(len(table.axes), table.program.num_slots)
        noise = self.job.noise
        return StageDraws(
            compute=compute,
            compute_cpu=cpu_time,
            dispatch=self._launches(np.where(table.device, table.nominal, 0.0), host),
            transfer=transfer,
            transfer_dispatch=self._launches(table.transfer_nominal, host),
            jitter=self.generator.uniform(0.0, noise.end_jitter_ns, (slots, len(ranks))),
            pause=pauses[ranks],
            save=None if saves is None else saves[ranks],
            on_device=table.device,
        )

    def _launches(self, nominal: Floats, host: Floats) -> Floats:
        """Draw the host time to launch each row, shape (row, place); none on the CPU."""
        shape = (len(nominal), len(host))
        if self.job.device == "cpu":
            return np.zeros(shape)
        ratio = self.job.costs.dispatch_ratio
        needed = np.where(host > 1.0, max(ratio, 1.0) * host, ratio)
        return nominal[:, None] * needed * self._noise(self.job.noise.compute_ratio, shape)

    def _compute(
        self, table: _RowTable, ranks: Integers, iteration: int, lengths: Floats
    ) -> Floats:
        """Draw the computation, with faults, noise and imbalance."""
        noise, imbalance = self.job.noise, self.job.imbalance
        shape = (len(table.nominal), len(ranks))
        values: Floats = table.nominal[:, None] * self._noise(noise.compute_ratio, shape)
        if noise.spike_probability:
            spikes = self.generator.random(shape) < noise.spike_probability
            values += spikes * table.device[:, None] * noise.spike_ns
        speed = self._factors(FaultKind.COMPUTE, iteration)[ranks] * self.device[ranks]
        if imbalance.warmup_ratio:
            fading = imbalance.warmup_ratio / 5.0 ** (iteration - 1)
            speed = speed * (1.0 + fading * self.warmup[ranks])
        load = self._factors(FaultKind.LOADER, iteration)[ranks] * self.loader
        touched = np.where(table.load[:, None], load, 1.0)
        touched = np.where(table.device[:, None], lengths[table.microbatch] * speed, touched)
        return values * touched

    def _transfers(self, table: _RowTable, ranks: Integers, iteration: int) -> Floats:
        """Draw transfers, one a group, slowed by the worst link inside the group."""
        noise = self._noise(self.job.noise.transfer_ratio, (len(table.axes), len(ranks)))
        links = _Links(self.grid, self.faults, iteration)
        values = table.transfer_nominal[:, None] * noise
        for axis in sorted(set(table.axes)):
            rows = np.flatnonzero(table.axes == axis)
            if axis == "pp":
                for peer in np.unique(table.peers[rows]):
                    chosen = rows[table.peers[rows] == peer]
                    values[chosen] *= links.between(table.program.stage, int(peer))
            else:
                values[rows] = self.grid.first_member(values[rows], axis)
                values[rows] *= links.within(table.program.stage, axis)
        return values


class _RowTable:
    """A program's rows as arrays."""

    def __init__(self, program: StageProgram) -> None:
        rows, transfers = program.compute_rows, program.transfer_rows
        self.program = program
        self.nominal = np.array([row.nominal_ns for row in rows], dtype=np.float64)
        self.microbatch = np.array([row.microbatch for row in rows], dtype=np.int64)
        self.device = np.array([row.work == Work.DEVICE for row in rows], dtype=np.bool_)
        self.load = np.array([row.work == Work.LOAD for row in rows], dtype=np.bool_)
        self.device_ns = float(self.nominal[self.device].sum())
        self.transfer_nominal = np.array([row.nominal_ns for row in transfers], dtype=np.float64)
        self.axes = np.array([row.axis for row in transfers], dtype=np.str_)
        self.peers = np.array([row.peer_stage for row in transfers], dtype=np.int64)


class _Links:
    """Slowness of connections in one iteration."""

    def __init__(self, grid: Grid, faults: tuple[Fault, ...], iteration: int) -> None:
        self.grid = grid
        world = grid.layout.world_size
        self.ranks = rank_factors(faults, FaultKind.LINK, iteration, world)
        self.pairs = [
            (fault.rank, fault.peer, fault.factor)
            for fault in faults
            if fault.peer is not None and fault.active(iteration)
        ]

    def between(self, stage: int, peer_stage: int) -> Floats:
        """Return the factor on messages between two stages, shape (place)."""
        ours, theirs = self.grid.ranks[stage], self.grid.ranks[peer_stage]
        factors: Floats = np.maximum(self.ranks[ours], self.ranks[theirs])
        for rank, peer, factor in self.pairs:
            there = (ours == rank) & (theirs == peer) | (ours == peer) & (theirs == rank)
            factors = np.where(there, factors * factor, factors)
        return factors

    def within(self, stage: int, axis: str) -> Floats:
        """Return the factor on a collective, shape (place): that of its slowest member or pair."""
        grid = self.grid
        factors = self.ranks[grid.ranks]
        for rank, peer, factor in self.pairs:
            if self._together(rank, peer, axis):
                factors = np.where(grid.ranks == rank, factors * factor, factors)
        if axis in CROSS_STAGE_AXES:
            factors = factors[list(grid.stages_of(axis))].max(axis=0, keepdims=True)
            slowest: Floats = grid.group_max(factors, axis)[0]
            return slowest
        return grid.group_max(factors[stage], axis)

    def _together(self, rank: int, peer: int, axis: str) -> bool:
        """Return whether two ranks are in one group of an axis; `embd` joins two stages only."""
        grid, pair = self.grid, [rank, peer]
        if axis == "embd" and not np.isin(pair, grid.ranks[list(grid.stages_of(axis))]).all():
            return False
        groups = grid.smallest_members(axis)[np.isin(grid.ranks, pair)]
        return bool(groups[0] == groups[1])


NUM_KERNELS = 100
"""Kernels of one computation; at least the last kernel cannot run before the host launches it."""


@dataclass(frozen=True)
class Recording:
    """Times of one stage's spans in an iteration: arrays (span, place), NaN for absent spans."""

    start: Floats
    end: Floats
    launch: Floats
    cpu: Floats


class Engine:
    """Advances the whole job one iteration at a time.

    Where `host_is_device` (on a CPU), the host computes itself, and so has the device's time.
    """

    def __init__(self, grid: Grid, programs: list[StageProgram], *, host_is_device: bool) -> None:
        self.grid = grid
        self.dependencies = Dependencies.of(programs)
        self.order = feasible_order(programs, self.dependencies)
        shape = (grid.layout.pp, grid.num_places)
        self.time: Floats = np.zeros(shape)
        self.launch: Floats = np.zeros(shape)
        self.cpu: Floats = np.zeros(shape)
        self.host = self.time if host_is_device else self.launch
        self.draws: list[StageDraws] = []
        self.recordings: list[Recording] = []
        self.posts: dict[PostKey, Floats] = {}
        self.steps: dict[Code, Callable[[int, Instruction], None]] = {
            Code.OPEN: lambda stage, instruction: self._start(stage, instruction.span),
            Code.CLOSE: lambda stage, instruction: self._end(stage, instruction.span),
            Code.COMPUTE: self._compute,
            Code.COLLECTIVE: self._collective,
            Code.POST: self._post,
            Code.WAIT: self._wait,
            Code.JOIN: self._join,
            Code.PAUSE: self._pause,
            Code.SYNCHRONIZE: lambda stage, instruction: self._synchronize(stage),
            Code.SAVE: self._save,
            Code.LAUNCH: self._post,
            Code.FINISH: self._finish,
            Code.HOST_OPEN: self._host_start,
            Code.HOST_CLOSE: self._host_end,
        }

    def run(self, draws: list[StageDraws], recordings: list[Recording]) -> None:
        """Advance every rank by one iteration and write its spans."""
        self.draws, self.recordings, self.posts = draws, recordings, {}
        for stage, instruction in self.order:
            self.steps[instruction.code](stage, instruction)

    def _start(self, stage: int, span: int) -> None:
        if span != NO_SPAN:
            recording = self.recordings[stage]
            np.maximum(self.time[stage], self.launch[stage], out=recording.start[span])
            recording.launch[span] = self.launch[stage]
            recording.cpu[span] = self.cpu[stage]
            self.time[stage] = recording.start[span]

    def _end(self, stage: int, span: int) -> None:
        if span != NO_SPAN:
            recording = self.recordings[stage]
            recording.end[span] = self.time[stage]
            recording.cpu[span] = self.cpu[stage] - recording.cpu[span]

    def _host_start(self, stage: int, instruction: Instruction) -> None:
        recording, span = self.recordings[stage], instruction.span
        recording.start[span] = self.host[stage]
        recording.cpu[span] = self.cpu[stage]

    def _host_end(self, stage: int, instruction: Instruction) -> None:
        recording, span = self.recordings[stage], instruction.span
        recording.end[span] = self.host[stage]
        recording.cpu[span] = self.cpu[stage] - recording.cpu[span]

    def _synchronize(self, stage: int) -> None:
        self.time[stage] = np.maximum(self.time[stage], self.launch[stage])
        self.launch[stage] = self.time[stage]

    def _compute(self, stage: int, instruction: Instruction) -> None:
        """Let the device work through a train of kernels while the host launches them."""
        draws, row = self.draws[stage], instruction.row
        time, launch, duration = self.time[stage], self.launch[stage], draws.compute[row]
        if draws.on_device[row]:
            self._start(stage, instruction.span)
            np.maximum(time, launch, out=time)
            time += duration
            launch += draws.dispatch[row]
            np.maximum(time, launch + duration / NUM_KERNELS, out=time)
        else:
            self.host[stage] += duration
        self.cpu[stage] += draws.compute_cpu[row]

    def _collective(self, stage: int, instruction: Instruction) -> None:
        draws, row = self.draws[stage], instruction.row
        arrival = np.maximum(self.time[stage], self.launch[stage])
        self._start(stage, instruction.span)
        last = self.grid.group_max(arrival, instruction.axis)
        self.time[stage] = last + draws.transfer[row] + draws.jitter[row]
        self.launch[stage] += draws.transfer_dispatch[row]
        self.cpu[stage] += draws.transfer[row] * _CPU_SHARE_OF_TRANSFER
        self._end(stage, instruction.span)

    def _finish(self, stage: int, instruction: Instruction) -> None:
        draws, row, span = self.draws[stage], instruction.row, instruction.span
        last = self.grid.group_max(self.posts[stage, instruction.slot], instruction.axis)
        done = last + draws.transfer[row] + draws.jitter[row]
        self.launch[stage] += draws.transfer_dispatch[row]
        self.time[stage] = np.maximum(self.time[stage], done)
        if span != NO_SPAN:
            self.recordings[stage].end[span] = done
            self.recordings[stage].cpu[span] = NOT_APPLICABLE

    def _post(self, stage: int, instruction: Instruction) -> None:
        for span in instruction.spans:
            self._start(stage, span)
        self.posts[stage, instruction.slot] = np.maximum(self.time[stage], self.launch[stage])

    def _wait(self, stage: int, instruction: Instruction) -> None:
        done = own = self.posts[stage, instruction.slot]
        for partner in self.dependencies.partners[stage, instruction.slot]:
            transfer = self.draws[partner.row_stage].transfer[partner.row]
            done = np.maximum(done, np.maximum(own, self.posts[partner.post]) + transfer)
            self.cpu[stage] += transfer * _CPU_SHARE_OF_TRANSFER
        self._leave(stage, instruction, done)
        self.launch[stage] = self.time[stage]

    def _join(self, stage: int, instruction: Instruction) -> None:
        join = self.dependencies.joins[instruction.axis]
        last = np.maximum.reduce([self.posts[key] for key in join.posts])
        transfer = self.draws[join.first_stage].transfer[join.row]
        self.cpu[stage] += transfer * _CPU_SHARE_OF_TRANSFER
        self._leave(stage, instruction, self.grid.group_max(last, instruction.axis) + transfer)

    def _leave(self, stage: int, instruction: Instruction, done: Floats) -> None:
        self.time[stage] = done + self.draws[stage].jitter[instruction.slot]
        for span in instruction.spans:
            self._end(stage, span)

    def _pause(self, stage: int, instruction: Instruction) -> None:
        """Let the host stand still; the device goes on with launched work."""
        pauses, span, recording = self.draws[stage].pause, instruction.span, self.recordings[stage]
        if pauses.any() and span != NO_SPAN:
            absent, host = pauses <= 0, self.host[stage]
            recording.start[span] = np.where(absent, np.nan, host)
            recording.end[span] = np.where(absent, np.nan, host + pauses)
            recording.cpu[span] = pauses
        self.host[stage] += pauses

    def _save(self, stage: int, instruction: Instruction) -> None:
        save = self.draws[stage].save
        if save is not None:
            self._start(stage, instruction.span)
            self.time[stage] += save
            self._synchronize(stage)
            self._end(stage, instruction.span)


def empty_recording(num_spans: int, num_places: int) -> Recording:
    """Make a recording in which all spans are absent."""
    return Recording(*np.full((4, num_spans, num_places), np.nan))
