"""Let a job run: hosts launch ahead, streams keep order, collectives wait for the last to arrive.

Times are float microseconds of true time. All numbers are drawn from streams of the seed that do
not depend on what is planted: a job with its cause and the same job without it meet the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.profiles.job import CHIPS, LOADER, Job, Kind, Op, program_of

Floats = NDArray[np.float64]
Times = tuple[float, float, float, float]  # host begins, host ends, GPU begins, GPU ends

_NOISE, _CHIPS, _HOSTS, _LINKS, _DATA, _BURSTS, _STARTS = range(7)
_AXES = {"dp": 0, "tp": 1, "ep": 2, "prev": 3, "next": 4}
_SCALES = {"": 0, "tokens": 1, "attention": 2, "expert": 3}
_VOLUME = {"all_reduce": 2.0, "send_recv": 0.6}  # of a message on a rank's link, times (n - 1) / n
_QUEUE_RATIO = 0.6  # of an iteration's launches may wait in the GPU's queue
_SPIKES = 0.002  # share of launches that something interrupts
_PCIE = 2e4  # bytes per microsecond
_CLOCKED_MEMORY = 0.15  # caches run at the clock that is low: a part of it reaches memory's time


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State one cause physically: what it hits, how hard, and in which profiled iterations."""

    kind: str  # gpu_clock, throttling, gpu_memory, neighbour, host_cpu, loader, nvlink or nic
    ranks: tuple[int, ...]
    factor: float = 1.0  # of a loader: by how much of an iteration it is late, plus 1
    iterations: tuple[int, ...] = ()  # empty: all
    share_of_time: float = 1.0  # of bursts

    def active(self, iteration: int) -> bool:
        """Tell whether it lasts in this iteration; the unprofiled one before has number 0."""
        return not self.iterations or iteration in self.iterations


class Meeting:
    """Hold one collective: who has come, and when it ends (below 0: not known yet)."""

    __slots__ = ("arrived", "end", "latest", "size_bytes")

    def __init__(self) -> None:
        self.arrived, self.latest, self.end, self.size_bytes = 0, 0.0, -1.0, 0.0


@dataclass(kw_only=True)
class Recorded:
    """Hold what one rank did: an entry an iteration, the unprofiled one first."""

    programs: list[list[Op]] = field(default_factory=list)
    times: list[list[Times]] = field(default_factory=list)
    meetings: list[dict[int, Meeting]] = field(default_factory=list)  # by place in the program
    ends: list[float] = field(default_factory=list)  # when the GPU has finished it
    works: list[dict[str, float]] = field(default_factory=list)  # how much of each kind of data


@dataclass(kw_only=True)
class _State:
    """Hold where one rank's simulation stands."""

    rank: int
    host: float
    ready: float  # when the compute stream is free
    iteration: int = 0
    place: int = 0
    program: list[Op] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # of all kernels so far
    last: list[Meeting | None] = field(default_factory=lambda: [None] * len(_AXES))  # by stream
    beside: Meeting | None = None  # the last collective that nobody has waited for
    counts: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Hold a program's work as arrays: microseconds on a sound chip, one number an operation."""

    compute: Floats
    memory: Floats
    fixed: Floats
    scales: NDArray[np.int64]
    launches: Floats  # host time in launches
    host: Floats  # host time in microseconds


class Engine:
    """Simulate one job on its GPUs, with or without troubles."""

    def __init__(self, job: Job, seed: int, troubles: tuple[Trouble, ...] = ()) -> None:
        self.job, self.seed, self.troubles = job, seed, troubles
        self._draw_machines()
        self._plain = [program_of(job, stage) for stage in range(job.pp)]
        self._tables: dict[int, _Table] = {}
        table = self._table(self._plain[0])
        self.nominal_us = float(np.maximum(table.compute, table.memory).sum() + table.fixed.sum())
        launches = float(table.launches.sum())
        self._launch_us = float(np.clip(job.launch_ratio * self.nominal_us / launches, 4, 400))
        self._queue = max(int(_QUEUE_RATIO * launches), 8)
        self._meetings: dict[tuple[object, ...], Meeting] = {}
        self._link_noise: dict[tuple[str, tuple[int, ...]], Floats] = {}
        self._groups = [
            {axis: job.members(rank, axis) for axis in job.axes(rank)}
            for rank in range(job.num_ranks)
        ]
        self.kernel_times_us = np.zeros((job.num_ranks, job.iterations))
        self.recorded = [Recorded() for _ in range(job.num_ranks)]

    def _draw_machines(self) -> None:
        """Draw chips, hosts, data and when each process began."""
        job, seed = self.job, self.seed
        chips = np.random.default_rng([seed, _CHIPS])
        spread = chips.random((2, job.num_ranks)) * job.chip_spread
        self._clock, self._memory = 1 + spread[0], 1 + 0.3 * spread[1]
        steps = chips.normal(size=(job.iterations + 1, job.num_ranks)) * job.wander
        self._wander = np.exp(0.7 * np.cumsum(steps, axis=0))
        hosts = np.random.default_rng([seed, _HOSTS])
        num_hosts = job.host(job.num_ranks - 1) + 1
        self._load = np.exp(hosts.normal(0, 0.05, (job.iterations + 1, num_hosts)))
        data = np.random.default_rng([seed, _DATA])
        noise = data.normal(0, 1, (job.iterations + 1, job.dp)) * job.token_noise
        self._tokens = np.exp(noise)
        if job.long_replica[0] >= 0:
            self._tokens[:, job.long_replica[0]] *= job.long_replica[1]
        starts = np.random.default_rng([seed, _STARTS])
        self._begins = starts.lognormal(7.0, 0.8, job.num_ranks)
        self._profiler_starts = starts.lognormal(7.3, 0.6, job.num_ranks)

    def run(self) -> float:
        """Run to the end; return the mean time of a profiled iteration."""
        states = [
            _State(rank=rank, host=float(begin), ready=float(begin))
            for rank, begin in enumerate(self._begins)
        ]
        for state in states:
            self._prepare(state)
        while states:
            moved = [self._advance(state) for state in states]
            if not any(moved):
                raise RuntimeError("ranks wait for each other: their programs do not fit")
            states = [state for state in states if state.iteration <= self.job.iterations]
        ends = np.array([recorded.ends for recorded in self.recorded]).max(axis=0)
        return float((ends[-1] - ends[0]) / self.job.iterations)

    # -- what an iteration takes

    def _table(self, program: list[Op]) -> _Table:
        if id(program) not in self._tables:
            self._tables[id(program)] = _table_of(program, self.job)
        return self._tables[id(program)]

    def _program(self, rank: int, iteration: int) -> list[Op]:
        """Return what a rank runs in an iteration: rank 0 may log or save at its end."""
        job = self.job
        saves = job.checkpoint[0] == iteration and not rank
        if rank or not (job.log_us or saves):
            return self._plain[job.stage(rank)]
        self._plain.append(program_of(job, 0, logs=bool(job.log_us), saves=saves))
        return self._plain[-1]

    def _prepare(self, state: _State) -> None:
        """Draw how long everything takes in the iteration that a rank begins."""
        rank, iteration = state.rank, state.iteration
        program = state.program = self._program(rank, iteration)
        shapes = (self.job.kernel_noise, self.job.host_noise)
        gpu, host = (
            np.exp(shape * np.random.default_rng(
                [self.seed, _NOISE, rank, iteration, which]
            ).normal(size=len(program)))
            for which, shape in enumerate(shapes)
        )  # fmt: skip
        spikes = np.random.default_rng([self.seed, _NOISE, rank, iteration, 2])
        host = np.where(spikes.random(len(program)) < _SPIKES, 15 * host, host)
        durations = self._gpu_times(program, rank, iteration) * gpu
        state.durations = durations.tolist()
        state.host_times = (self._host_times(program, rank, iteration) * host).tolist()
        state.place, state.beside = 0, None
        recorded = self.recorded[rank]
        recorded.programs.append(program)
        recorded.times.append([])
        recorded.meetings.append({})
        tokens, sent = self._data(rank, iteration)
        recorded.works.append({"tokens": tokens, "attention": tokens, "expert": sent})
        if iteration:
            kernels = np.array([op.kind == Kind.KERNEL for op in program])
            self.kernel_times_us[rank, iteration - 1] = durations[kernels].sum()

    def _factor(self, kinds: tuple[str, ...], rank: int, iteration: int) -> float:
        factors = (
            each.factor
            for each in self.troubles
            if each.kind in kinds and rank in each.ranks and each.active(iteration)
        )
        return float(np.prod([*factors]))

    def _data(self, rank: int, iteration: int) -> tuple[float, float]:
        """Return how many tokens a rank has, and how many its experts are sent, as ratios."""
        job = self.job
        tokens = float(self._tokens[iteration, job.replica(rank)])
        return tokens, tokens * (job.hot_expert[1] if rank == job.hot_expert[0] else 1.0)

    def _gpu_times(self, program: list[Op], rank: int, iteration: int) -> Floats:
        """Return microseconds of each kernel and copy by roofline: compute or memory, the longer
        one.
        """
        job, table = self.job, self._table(program)
        slower = self._factor(("gpu_clock", "throttling"), rank, iteration)
        if 0 < iteration <= job.warm_up[0]:
            slower *= 1 + 0.3 * (job.warm_up[1] - 1)
        clock = self._clock[rank] * self._wander[iteration, rank] * slower
        worn = self._factor(("gpu_memory",), rank, iteration)
        memory = self._memory[rank] * (1 + _CLOCKED_MEMORY * (slower - 1)) * worn
        tokens, sent = self._data(rank, iteration)
        work = np.array([1.0, tokens, tokens**2, sent])[table.scales]
        times: Floats = np.maximum(table.compute * clock, table.memory * memory) * work
        times = times + table.fixed
        for number, each in enumerate(self.troubles):
            if each.kind == "neighbour" and rank in each.ranks and each.active(iteration):
                draws = np.random.default_rng([self.seed, _BURSTS, number, rank, iteration])
                shared = _bursts(draws, len(program), each.share_of_time)
                times = np.where(shared, times * each.factor, times)
        return times

    def _host_times(self, program: list[Op], rank: int, iteration: int) -> Floats:
        job, table = self.job, self._table(program)
        busy = self._load[iteration, job.host(rank)] * self._factor(("host_cpu",), rank, iteration)
        if 0 < iteration <= job.warm_up[0]:
            busy *= job.warm_up[1]
        times: Floats = (table.launches * self._launch_us + table.host) * busy
        late = self._factor(("loader",), rank, iteration) - 1
        if late:
            place = next(i for i, op in enumerate(program) if op.names == (LOADER,))
            times[place] += late * self.nominal_us
        if iteration == 1:
            times[0] += self._profiler_starts[rank]
            if rank == job.late_start[0]:
                first = next(i for i, op in enumerate(program) if op.kind == Kind.KERNEL)
                times[first] += job.late_start[1] * self.nominal_us
        return times

    # -- the run of one rank

    def _advance(self, state: _State) -> bool:
        """Go on until the rank needs to know what depends on others; tell whether it got on."""
        moved = False
        while state.iteration <= self.job.iterations:
            while state.place < len(state.program):
                op = state.program[state.place]
                if not self._step(state, op):
                    return moved
                state.place += 1
                moved = True
            self.recorded[state.rank].ends.append(state.ready)
            state.iteration += 1
            if state.iteration <= self.job.iterations:
                self._prepare(state)
        return moved

    def _step(self, state: _State, op: Op) -> bool:
        if op.kind <= Kind.COPY:
            return self._kernel(state)
        if op.kind == Kind.COLLECTIVE:
            return self._collective(state, op)
        if op.kind == Kind.WAIT:
            return self._wait(state, op)
        begin = state.host
        state.host += state.host_times[state.place]
        if op.kind == Kind.SYNC:
            state.host = max(state.host, state.ready + 8.0)
        self.recorded[state.rank].times[-1].append((begin, state.host, 0.0, 0.0))
        return True

    def _kernel(self, state: _State) -> bool:
        """Launch a kernel; a collective that runs beside it takes some of its processors."""
        beside = state.beside
        if beside is not None and beside.end < 0:
            return False  # how long the collective runs beside it is not known yet
        begin, place = state.host, state.place
        end = begin + state.host_times[place]
        if len(state.starts) >= self._queue:
            end = max(end, state.starts[-self._queue])
        start = max(end + 3.0, state.ready + 0.8)
        duration = state.durations[place]
        if beside is not None:
            shared = min(beside.end, start + duration) - start
            if shared > 0:
                duration += self.job.contention * shared
            else:
                state.beside = None
        state.starts.append(start)
        state.host, state.ready = end, start + duration
        self.recorded[state.rank].times[-1].append((begin, end, start, state.ready))
        return True

    def _collective(self, state: _State, op: Op) -> bool:
        """Come to a collective: its kernel spins until the last of the group has come."""
        stream = _AXES[op.axis]
        last = state.last[stream]
        if last is not None and last.end < 0:
            return False
        begin, members = state.host, self._groups[state.rank][op.axis]
        state.host += state.host_times[state.place]
        start = max(state.host + 4.0, last.end if last is not None else 0.0)
        if op.after_compute:
            start = max(start, state.ready)
        key = ("p2p" if op.axis in ("prev", "next") else op.axis, members)
        count = state.counts[key] = state.counts.get(key, 0) + 1
        meeting = self._meetings.setdefault((*key, count), Meeting())
        meeting.arrived += 1
        meeting.latest = max(meeting.latest, start)
        size_bytes = op.size_bytes * self._message_ratio(op, state)
        meeting.size_bytes = max(meeting.size_bytes, size_bytes)
        if meeting.arrived == len(members):
            slower = self._link_factor(members, state.iteration)
            meeting.end = meeting.latest + slower * self._transfer_us(op, key, meeting, count)
        state.last[stream] = state.beside = meeting
        recorded = self.recorded[state.rank]
        recorded.meetings[-1][state.place] = meeting
        recorded.times[-1].append((begin, state.host, start, 0.0))
        return True

    def _wait(self, state: _State, op: Op) -> bool:
        meeting = self.recorded[state.rank].meetings[-1][op.ref]
        if meeting.end < 0:
            return False
        if meeting is state.beside:
            state.beside = None
        begin = state.host
        state.host += state.host_times[state.place]
        state.ready = max(state.ready, meeting.end)
        self.recorded[state.rank].times[-1].append((begin, state.host, 0.0, 0.0))
        return True

    # -- links

    def _message_ratio(self, op: Op, state: _State) -> float:
        if not op.scales:
            return 1.0
        return float(self._tokens[state.iteration, self.job.replica(state.rank)])

    def _transfer_us(
        self, op: Op, key: tuple[str, tuple[int, ...]], meeting: Meeting, count: int
    ) -> float:
        chip, members, num = CHIPS[self.job.chip], key[1], len(key[1])
        across = self.job.host(members[0]) != self.job.host(members[-1])
        latency = 25.0 + 4.0 * num if across else 10.0 + 1.5 * num
        share = 1.0 if op.kernel == "send_recv" else (num - 1) / num
        volume = meeting.size_bytes * _VOLUME.get(op.kernel, 1.0) * share
        if key not in self._link_noise:
            name = sum(ord(letter) for letter in key[0])
            draws = np.random.default_rng([self.seed, _LINKS, name, *members])
            self._link_noise[key] = np.exp(0.03 * draws.normal(size=512))
        noise = float(self._link_noise[key][count % 512])
        return (latency + volume / (chip.nic if across else chip.nvlink)) * noise

    def _link_factor(self, members: tuple[int, ...], iteration: int) -> float:
        """Return how many times slower this group's slowest link has become."""
        slower = [1.0]
        for each in self.troubles:
            if each.active(iteration) and is_crossed(self.job, each, members):
                slower.append(each.factor)
        return max(slower)


def is_crossed(job: Job, trouble: Trouble, members: tuple[int, ...]) -> bool:
    """Tell whether a group's traffic goes over the link in trouble: a pair's, or a host's NIC."""
    hosts = {job.host(rank) for rank in members}
    if trouble.kind == "nvlink":
        return len(hosts) == 1 and set(trouble.ranks) <= set(members)
    return trouble.kind == "nic" and len(hosts) > 1 and job.host(trouble.ranks[0]) in hosts


def _table_of(program: list[Op], job: Job) -> _Table:
    chip = CHIPS[job.chip]
    launches = {Kind.KERNEL: 1.0, Kind.COPY: 1.0, Kind.COLLECTIVE: 2.5}
    works = [op if op.kind == Kind.KERNEL else None for op in program]
    copies = [op.size_bytes / _PCIE + 1.0 if op.kind == Kind.COPY else 0.0 for op in program]
    return _Table(
        compute=np.array([op.flops / chip.flops if op else 0.0 for op in works]),
        memory=np.array([op.size_bytes / chip.memory if op else 0.0 for op in works]),
        fixed=np.array([1.5 if op else 0.0 for op in works]) + np.array(copies),
        scales=np.array([_SCALES[op.scales] if op else 0 for op in works]),
        launches=np.array([launches.get(op.kind, 0.0) for op in program]),
        host=np.array([op.host_us if op.kind == Kind.HOST else 2.0 for op in program]),
    )


def _bursts(draws: np.random.Generator, count: int, share: float) -> NDArray[np.bool_]:
    """Return where along a program a neighbour is at work: a few stretches, `share` of it all."""
    num, shared = 4, np.zeros(count, dtype=bool)
    for begin in draws.integers(0, count, num):
        length = int(count * share / num * draws.uniform(0.6, 1.4)) + 1
        shared[np.arange(begin, begin + length) % count] = True
    return shared
