"""Run a job: threads that launch, devices that follow, collectives and messages that wait.

A stage's ranks are simulated at once, under several worlds at once: the same draws with and without
faults. All times of operations are (world, rank of the stage).

    host    launches an operation after the one before, at most `queue` ahead of the device
    device  begins it when it is launched and the one before has ended; a fast device ends no
            sooner than its last kernel has been launched
    others  a collective ends when its last member has come and its bytes have passed the slowest
            way of its members; a message when both ends are there and so have its bytes
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.mill.draws import Draws, Integers
from benchmarks.grounds.mill.job import Job
from benchmarks.grounds.mill.program import (
    LATENCY_S,
    TIED,
    Code,
    Key,
    Operation,
    Program,
    groups_of,
    merged,
)
from benchmarks.grounds.mill.troubles import RATES, Bursts, Fault, Floats, Timeline, World

_DEPTH = 3  # batches fetched ahead
_COPY_S = 1.5e-4
Lines = list[tuple[int, int, Timeline, Fault]]
"""(world, rank of the stage, rate over time, whose)."""


@dataclass
class Turn:
    """What one iteration was in the first world: times are (operation, rank of the stage)."""

    number: int
    window: int
    programs: Sequence[Program]
    tokens: Floats  # how many times more, fewest and most: (2, rank)
    starts: list[Floats] = field(default_factory=list)
    ends: list[Floats] = field(default_factory=list)
    launched: list[Floats] = field(default_factory=list)
    collections: list[tuple[int, int, float, float]] = field(default_factory=list)
    """Rank, generation, start, length."""
    saves: list[tuple[int, float, float]] = field(default_factory=list)  # rank, start, length


@dataclass
class Run:
    """What came of it."""

    iteration_s: Floats  # (world, iteration)
    own_s: Floats  # of passes, without waiting: (world, rank, iteration)
    turns: list[Turn]


class Stage:
    """One stage's ranks: how they belong together, and where they are in time."""

    def __init__(self, job: Job, number: int, num_worlds: int) -> None:
        places = [job.layout.coordinates(rank) for rank in range(job.num_ranks)]
        ranks = [rank for rank, place in enumerate(places) if place.pp == number]
        ranks.sort(key=lambda rank: (places[rank].dp, places[rank].cp, places[rank].tp))
        self.ranks = np.array(ranks)
        self.place_of = {rank: at for at, rank in enumerate(ranks)}
        self.replica = np.array([places[rank].dp for rank in ranks])
        self.expert = np.array([places[rank].ep for rank in ranks])
        self.loads = np.array([places[r].tp == 0 or job.loads_everywhere for r in ranks])
        self.members: dict[str, tuple[Integers, Integers]] = {}
        for axis, groups in groups_of(job).items():
            parts = [[self.place_of[r] for r in one if r in self.place_of] for one in groups]
            members = np.array([part for part in parts if part])
            if members.size:
                inverse = np.empty(len(ranks), dtype=np.int64)
                inverse[members] = np.arange(len(members))[:, None]
                self.members[axis] = members, inverse
        shape = (num_worlds, len(ranks))
        self.host, self.dev, self.free = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.produced = np.zeros(shape)
        self.consumed: deque[Floats] = deque([np.zeros(shape)] * _DEPTH, maxlen=_DEPTH)

    def latest(self, axis: str, times: Floats) -> Floats:
        """Return the latest of each rank's group."""
        members, inverse = self.members[axis]
        latest: Floats = times[:, members].max(-1)[:, inverse]
        return latest

    def roots(self, axis: str, values: Floats) -> Floats:
        """Return the value of the first member of each rank's group."""
        members, inverse = self.members[axis]
        first: Floats = values[..., members[:, 0]][..., inverse]
        return first


class Engine:
    """Simulate a job under worlds; the first of them is recorded."""

    def __init__(self, job: Job, worlds: Sequence[World]) -> None:
        self.job, self.worlds, self.num_worlds = job, worlds, len(worlds)
        self.stages = [Stage(job, at, len(worlds)) for at in range(job.layout.pp)]
        self.plans: dict[int, tuple[list[Program], list[tuple[int, int]]]] = {}
        self.groups = groups_of(job)
        rng = np.random.default_rng((job.seed, 1))
        chips = np.clip(rng.normal(size=job.num_ranks), -2, 2) / 2
        spreads = [job.chip_spread if w.chip_spread is None else w.chip_spread for w in worlds]
        self.chips = np.exp(np.array(spreads)[:, None] * chips)
        unlike = np.exp(job.unlike_hosts * rng.normal(size=job.num_hosts))
        self.unlike = unlike[[job.host_of(rank) for rank in range(job.num_ranks)]]
        self.phase = rng.uniform(0, max(job.collects_every, 1.0), job.num_ranks)
        self.bursts = Bursts.of(worlds)
        self.own = np.zeros((len(worlds), job.num_ranks, len(job.iterations)))

    def run(self) -> Run:
        """Simulate all windows."""
        job, turns, times = self.job, list[Turn](), list[Floats]()
        previous = np.zeros(self.num_worlds)
        for window, numbers in enumerate(job.windows):
            if window and job.interval > job.window:
                previous = self._meet((job.interval - job.window) * times[-1])
            num = job.microbatches(window)
            if num not in self.plans:
                programs = [Program(job, at, num) for at in range(job.layout.pp)]
                self.plans[num] = programs, merged(programs)
            for number in numbers:
                iteration = Iteration(self, number, window)
                iteration.run(self.plans[num][1])
                for stage, own in zip(self.stages, iteration.own(), strict=True):
                    self.own[:, stage.ranks, len(times)] = own
                end = np.max([stage.dev.max(-1) for stage in self.stages], axis=0)
                times.append(end - previous)
                turns.append(iteration.turn)
                previous = self._between(iteration.turn, end, times[-1])
        return Run(np.array(times).T, self.own, turns)

    def _meet(self, later_s: Floats | float = 0.0) -> Floats:
        """Let all ranks go on together, some time later."""
        latest = [np.maximum(it.dev, it.host).max(-1) for it in self.stages]
        common: Floats = np.max(latest, axis=0) + later_s
        for stage in self.stages:
            stage.host[:] = stage.dev[:] = common[:, None]
        return common

    def _between(self, turn: Turn, end: Floats, took: Floats) -> Floats:
        """Do what stands between iterations; return from when on the next one counts."""
        job, rng = self.job, np.random.default_rng((self.job.seed, 2, turn.number))
        if job.logger >= 0:
            self._keep_busy(job.logger, job.log_s * float(rng.lognormal(0, 0.3)))
        if job.saves_every and turn.number % job.saves_every == 0:
            lengths = job.save_s * rng.lognormal(0, 0.15, job.num_ranks)
            for rank in (0,) if job.saves_alone else range(job.num_ranks):
                length = float(lengths[rank])
                turn.saves.append((rank, self._keep_busy(rank, length), length))
            return self._meet()
        if job.evaluates_every and turn.number % job.evaluates_every == 0:
            return self._meet(5 * took)
        return end

    def _keep_busy(self, rank: int, seconds: float) -> float:
        """Keep a rank's thread busy; return from when on, in the first world."""
        stage = next(it for it in self.stages if rank in it.place_of)
        at = stage.place_of[rank]
        start = float(stage.host[0, at])
        stage.host[:, at] += seconds
        return start


class Iteration:
    """One iteration of all stages."""

    def __init__(self, engine: Engine, number: int, window: int) -> None:
        self.engine, self.job, self.stages = engine, engine.job, engine.stages
        self.programs = engine.plans[self.job.microbatches(window)][0]
        rates = [world.rates(self.job, number) for world in engine.worlds]
        self.rates = {name: np.array([it[name] for it in rates]) for name in RATES}
        self.ways = {axis: self._way(groups) for axis, groups in engine.groups.items()}
        self.draws = [
            Draws(engine, stage, program, self.rates, number)
            for stage, program in zip(self.stages, self.programs, strict=True)
        ]
        tokens = np.ones((2, self.job.num_ranks))
        for stage, draws in zip(self.stages, self.draws, strict=True):
            tokens[:, stage.ranks] = draws.tokens
        self.turn = Turn(number, window, self.programs, tokens)
        self.starts, self.ends, self.launched = (
            [list[Floats]() for _ in self.stages] for _ in range(3)
        )
        self.extra = [np.zeros_like(stage.dev) for stage in self.stages]
        self.posts: dict[tuple[str, Key], list[tuple[int, int]]] = {}
        self.done: dict[Key, Floats] = {}
        self.lines: dict[tuple[str, int], Lines] = {}
        for name, every in engine.bursts.by_rate.items():
            for at, stage in enumerate(self.stages):
                self.lines[name, at] = [
                    (world, stage.place_of[rank], line, fault)
                    for world, rank, line, fault in every
                    if rank in stage.place_of and fault.holds(number)
                ]

    def run(self, order: Sequence[tuple[int, int]]) -> None:
        """Simulate all operations in an order in which nothing is asked for too early."""
        handlers = {
            Code.WORK: self._work, Code.GROUP: self._group, Code.ASYNC: self._async,
            Code.AWAIT: self._await, Code.POST: self._post, Code.ARRIVE: self._post,
            Code.TAKE: self._take, Code.JOIN: self._join, Code.LOAD: self._load,
            Code.SYNC: self._sync,
        }  # fmt: skip
        for at, place in order:
            stage, op = self.stages[at], self.programs[at].operations[place]
            begin = self._launch(at, place, op)
            start = np.maximum(stage.dev, begin)
            self.starts[at].append(begin if op.code == Code.LOAD else start)
            self.launched[at].append(begin)
            self.ends[at].append(handlers[op.code](at, place, op, start))
        self.turn.starts, self.turn.ends, self.turn.launched = (
            [np.stack([it[0] for it in one]) for one in every]
            for every in (self.starts, self.ends, self.launched)
        )

    def own(self) -> list[Floats]:
        """Return what devices worked in passes, by stage."""
        return [draws.own + extra for draws, extra in zip(self.draws, self.extra, strict=True)]

    def _launch(self, at: int, place: int, op: Operation) -> Floats:
        """Let the thread launch an operation; return when it began to."""
        stage, draws = self.stages[at], self.draws[at]
        begin = stage.host
        for local, seconds, generation, worlds in draws.pauses.get(place, ()):
            if worlds[0] == 0:
                since = float(begin[0, local])
                self.turn.collections.append((int(stage.ranks[local]), generation, since, seconds))
            begin = begin.copy()
            begin[worlds, local] += seconds
        after = begin + draws.launch[place]
        for world, local, line, _ in self.lines.get(("host", at), ()):
            work = float(draws.launch[place, world, local])
            after[world, local] = line.end_of(float(begin[world, local]), work)
        if place >= self.job.queue and op.code != Code.LOAD:
            after = np.maximum(after, np.minimum(self.ends[at][place - self.job.queue], stage.dev))
        stage.host = after
        return begin

    def _work(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        stage, draws = self.stages[at], self.draws[at]
        length = draws.clock[place] + draws.memory[place]
        for world, local, line, fault in self.lines.get(("clock", at), ()):
            moved = 0.0 if fault.stops else draws.memory[place, world, local]
            work, since = float(length[world, local] - moved), float(start[world, local])
            took = line.end_of(since, work) - since - work
            length[world, local] += took
            self.extra[at][world, local] += took * op.in_pass
        stage.dev = np.maximum(start + length, stage.host + length / max(op.kernels, 1.0))
        return stage.dev

    def _group(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        stage = self.stages[at]
        come = stage.roots(op.axis, start) if op.rooted else stage.latest(op.axis, start)
        stage.dev = self._moved(at, place, op, np.maximum(start, come))
        return stage.dev

    def _async(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        stage = self.stages[at]
        self.starts[at][-1] = start = np.maximum(start, stage.free)
        stage.free = self._moved(at, place, op, stage.latest(op.axis, start))
        return stage.free

    def _await(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        self.stages[at].dev = np.maximum.reduce([start, *(self.ends[at][it] for it in op.others)])
        return self.stages[at].dev

    def _post(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        for key in op.keys:
            self.posts.setdefault((op.axis, key), []).append((at, place))
        return start

    def _take(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        stage = self.stages[at]
        for key in op.keys:
            if key not in self.done:
                self.done[key] = self._message(key)
            start = np.maximum(start, self.done[key])
        stage.dev = start
        if op.blocks:
            stage.host = np.maximum(stage.host, start)
        return start

    def _join(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        stage = self.stages[at]
        come = np.max([self.starts[s][p] for s, p in self.posts[op.axis, op.keys[0]]], axis=0)
        within = {TIED: (), "mp": ("tp",)}.get(op.axis, ("dp_cp", "tp"))
        for axis in within:
            come = stage.latest(axis, come)
        costs, latency = self.ways[op.axis]
        took = costs[:, stage.ranks] * op.wire_bytes + latency[stage.ranks]
        stage.dev = np.maximum(come, start) + took
        return stage.dev

    def _load(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        """Let the thread take its batch, which workers fetch ahead."""
        stage = self.stages[at]
        since, took = np.maximum(stage.produced, stage.consumed[0]), self.draws[at].batches[place]
        ready = since + took
        for world, local, line, _ in self.lines.get(("loader", at), ()):
            ready[world, local] = line.end_of(float(since[world, local]), float(took[world, local]))
        stage.produced = ready
        waited = np.maximum(stage.host, ready) + _COPY_S
        stage.host = np.where(stage.loads, waited, self.starts[at][-1])
        stage.consumed.append(stage.host)
        return stage.host

    def _sync(self, at: int, place: int, op: Operation, start: Floats) -> Floats:
        self.stages[at].host = np.maximum(self.stages[at].host, self.stages[at].dev)
        return start

    # links

    def _seconds_per_byte(self, crosses: Integers, together: Integers, ranks: Integers) -> Floats:
        """Return what the slowest way of some members costs, (world, group)."""
        job = self.job
        share = job.gpus_per_host / job.num_nics
        nic = self.rates["nic"][:, ranks] * (job.congestion * share / job.nic_bytes_s)
        near = self.rates["nvlink"][:, ranks] / job.nvlink_bytes_s
        slowest: Floats = np.maximum(nic * crosses[:, None], near * together[:, None]).max(-1)
        return slowest

    def _way(self, groups: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """Return for each rank of these groups the seconds per byte (world, rank), and latency."""
        members = np.array(groups)
        hosts = members // self.job.gpus_per_host
        crosses = (hosts != hosts[:, :1]).any(-1)
        together = np.array([len(set(it)) < len(it) for it in hosts.tolist()])
        found, latency = np.zeros_like(self.rates["nic"]), np.zeros(self.job.num_ranks)
        found[:, members] = self._seconds_per_byte(crosses, together, members)[:, :, None]
        latency[members] = (LATENCY_S * (1 + crosses))[:, None]
        return found, latency

    def _moved(self, at: int, place: int, op: Operation, come: Floats) -> Floats:
        """Return when a collective's bytes have moved; flapping links stop some of them."""
        stage, (costs, latency) = self.stages[at], self.ways[op.axis]
        took = costs[:, stage.ranks] * op.wire_bytes + latency[stage.ranks]
        took = took * stage.roots(op.axis, self.draws[at].links[place])
        end: Floats = come + took
        members, inverse = stage.members[op.axis]
        for world, local, line, _ in self.lines.get(("nic", at), ()):
            own = members[inverse[local]]
            if len({self.job.host_of(int(rank)) for rank in stage.ranks[own]}) > 1:
                last = own[come[world, own].argmax()]
                late = line.end_of(float(come[world, last]), float(took[world, last]))
                end[world, own] = np.maximum(end[world, own], late)
        return end

    def _message(self, key: Key) -> Floats:
        """Return when a message has arrived, at both ends."""
        ends = self.posts["", key]
        come = np.maximum.reduce([self.starts[stage][place] for stage, place in ends])
        sender, place = next(it for it in ends if it[0] == key.sender)
        pair = np.stack([self.stages[it].ranks for it in (key.sender, key.receiver)], axis=1)
        far = np.diff(pair // self.job.gpus_per_host)[:, 0] != 0
        took = self._seconds_per_byte(far, ~far, pair) * self.programs[sender].operations[
            place
        ].wire_bytes + LATENCY_S * (1 + far)
        took *= self.draws[sender].links[place]
        done: Floats = come + took
        for stage, _ in ends:
            for world, local, line, _ in self.lines.get(("nic", stage), ()):
                if far[local]:
                    late = line.end_of(float(come[world, local]), float(took[world, local]))
                    done[world, local] = max(float(done[world, local]), late)
        for stage, own in ends:
            if not self.programs[stage].operations[own].blocks:
                self.ends[stage][own] = done
        return done
