"""Let all ranks of a job run: threads that launch, devices that compute, talks that meet.

Each rank is a generator that walks through its program with two times, of its thread (`host`) and
of its compute stream (`device`). An operation begins when it has been launched and the stream has
come to it; a collective when its last member has come. A rank that needs the end of a talk which is
not known yet is set aside until it is. Transfers between hosts share cards, so they are handled in
order of time; all else follows from who waits for whom.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from benchmarks.grounds.foundry.draws import Draws, Floats, Pause
from benchmarks.grounds.foundry.hardware import OUTSIDE_LATENCY_S, PCIE_BYTES
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.network import Network, route_of
from benchmarks.grounds.foundry.programs import (
    BEGIN,
    CHECKPOINT,
    COMMUNICATION_HOST_S,
    COMPUTE,
    END,
    EXCHANGE,
    HOST,
    LOAD,
    STALL,
    START,
    SYNC,
    TOGETHER,
    WAIT,
    Operation,
    Program,
    Talk,
    Talks,
)

Recorded = tuple[int, int, float, float, float]
"""Template, iteration from 0, start, end, launch (not a number of what the host does itself)."""
Burst = tuple[float, float, float]
"""Begin, end, and how many times slower a device is meanwhile (endlessly: it stands still)."""
QUEUE_DEPTH = 60  # operations a thread is ahead at most: some 1,000 launches
LOADER_HOST_S = 0.0004
_LEAVING_S = 1.5e-6  # members do not leave a collective in the same microsecond
_NO_LAUNCH = float("nan")
_MEET, _CHANGE, _FLOW, _FREE = range(4)


@dataclass
class Effects:
    """What faults do to a job, in the form that the simulation applies."""

    clock: Floats  # (rank, iteration), how many times slower
    memory: Floats
    threads: Floats
    loading: Floats
    nvlink: Floats
    pairs: dict[tuple[int, int], Floats] = field(default_factory=dict)
    bursts: dict[int, list[Burst]] = field(default_factory=lambda: defaultdict(list))
    feels_all: set[int] = field(default_factory=set)  # ranks whose bursts slow memory as well
    pauses: dict[int, list[Pause]] = field(default_factory=lambda: defaultdict(list))
    cards: list[tuple[float, tuple[int, int], str, float]] = field(default_factory=list)

    @classmethod
    def none(cls, job: Job) -> Effects:
        """Return those of a sound job."""
        clock, memory, threads, loading, nvlink = np.ones((5, job.num_ranks, job.num_iterations))
        return cls(clock, memory, threads, loading, nvlink)


@dataclass
class Run:
    """What came of it; times in seconds from the job's begin."""

    ends_s: Floats  # (iteration,), of the slowest rank
    own_s: Floats  # (rank, iteration), kernels in passes
    recorded: list[list[Recorded]]
    bursts: dict[int, list[Burst]]

    @property
    def iteration_s(self) -> Floats:
        """Return how long each iteration took."""
        return np.diff(self.ends_s, prepend=0.0)


class Simulation:
    """One run of a job."""

    def __init__(
        self, draws: Draws, talks: Talks, effects: Effects, chips: Floats, *, recording: bool
    ) -> None:
        self.job, self.draws, self.talks, self.effects = draws.job, draws, talks, effects
        self.chips, self.recording = chips, recording
        self.network = Network(self.job.machines)
        self.routes = [route_of(talk, self.job.machines) for talk in talks.all]
        self.needed = [len(talk.members) for talk in talks.all]
        self.slow_links = [self._slow_nvlink_of(talk) for talk in talks.all]
        self.loads = draws.loads.max(axis=-1).tolist() if self.job.experts else []
        self.run = Run(
            np.zeros(self.job.num_iterations),
            np.zeros((self.job.num_ranks, self.job.num_iterations)),
            [[] for _ in range(self.job.num_ranks)],
            effects.bursts,
        )
        self.arrived: dict[int, int] = {}
        self.latest: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.beside: set[int] = set()
        self.waiting: dict[int, list[Generator[int, float, None]]] = defaultdict(list)
        self.ready: deque[tuple[Generator[int, float, None], float]] = deque()
        self.lane_free: dict[str, float] = {}
        self.lane_queue: dict[str, deque[int]] = {}
        self.heap: list[tuple[float, int, int, Any]] = []
        self._order = count()

    # -- the run as a whole

    def result(self) -> Run:
        """Run to the end."""
        for when, card, why, slow in self._changes_of_cards():
            self._schedule(when, _CHANGE, (card, why, slow))
        ranks = [self._rank(program) for program in self.draws.programs]
        num_left = len(ranks)
        for each in ranks:
            num_left -= self._go_on(each, None)
        while self.ready or self.heap:
            while self.ready:
                num_left -= self._go_on(*self.ready.popleft())
            if not num_left or not self.heap:
                break
            self._handle(*heapq.heappop(self.heap))
        if self.waiting:
            raise RuntimeError("ranks wait for each other for ever")
        return self.run

    def _go_on(self, rank: Generator[int, float, None], end_s: float | None) -> bool:
        """Let a rank run until it needs a talk that has not ended; return whether it is done."""
        try:
            key = next(rank) if end_s is None else rank.send(end_s)
        except StopIteration:
            return True
        self.waiting[key].append(rank)
        return False

    def _schedule(self, when: float, what: int, details: object) -> None:
        heapq.heappush(self.heap, (when, next(self._order), what, details))

    def _handle(self, now_s: float, _: int, what: int, details: Any) -> None:
        if what == _MEET:
            self._begin_outside(details, now_s)
        elif what == _CHANGE:
            card, why, slow = details
            self.network.change(card, why, slow, now_s)
            self._watch_flows()
        elif what == _FREE:
            self._free_lane(details, now_s)
        elif details == self.network.version:
            for key in self.network.take_finished(now_s):
                end_s = now_s + OUTSIDE_LATENCY_S
                self._finish(key, end_s)
                if key in self.beside:
                    self._schedule(end_s, _FREE, self.talks.all[key % len(self.needed)].lane)
            self._watch_flows()

    def _changes_of_cards(self) -> list[tuple[float, tuple[int, int], str, float]]:
        """Return faults of cards, and the times at which others take half of all."""
        changes = list(self.effects.cards)
        share = self.job.machines.congestion_share
        if share:
            stream, now_s = self.draws.stream(11), 0.0
            mean_s = 0.6 * self.draws.nominal_s
            while now_s < 3 * self.draws.nominal_s * self.job.num_iterations:
                now_s += stream.exponential(mean_s * (1 - share) / share)
                end_s = now_s + stream.exponential(mean_s)
                slow = 1.5 + stream.exponential(1.0)
                for host in self.job.ranks_of_host:
                    for number in range(self.job.machines.num_nics):
                        changes.append((now_s, (host, number), "others", slow))
                        changes.append((end_s, (host, number), "others", 1.0))
                now_s = end_s
        return changes

    # -- talks

    def _post(self, key: int, when: float, is_beside: bool = False) -> None:
        """Let a member come to a talk; the last one makes it begin."""
        num = self.arrived[key] = self.arrived.get(key, 0) + 1
        latest = self.latest[key] = max(when, self.latest.get(key, 0.0))
        if is_beside:
            self.beside.add(key)
        number = key % len(self.needed)
        if num < self.needed[number]:
            return
        del self.arrived[key]
        if not self.routes[number].is_inside:
            self._schedule(latest, _MEET, key)
            return
        begin = latest
        if key in self.beside:
            lane = self.talks.all[number].lane
            begin = max(latest, self.lane_free.get(lane, 0.0))
        end = begin + self._noise(key) * self.network.inside_s(
            self.routes[number], self._load(key), self._slow_nvlink(key)
        )
        if key in self.beside:
            self.lane_free[lane] = end
        self._finish(key, end)

    def _begin_outside(self, key: int, now_s: float) -> None:
        number = key % len(self.needed)
        if key in self.beside:
            lane = self.talks.all[number].lane
            if lane in self.lane_queue:
                self.lane_queue[lane].append(key)
                return
            self.lane_queue[lane] = deque()
        self._begin_flow(key, now_s)

    def _begin_flow(self, key: int, now_s: float) -> None:
        load = self._load(key) * self._noise(key)
        route = self.routes[key % len(self.needed)]
        self.network.begin(key, route, load, self._slow_nvlink(key), now_s)
        self._watch_flows()

    def _free_lane(self, lane: str, now_s: float) -> None:
        """Begin what came to a lane first while it was busy."""
        if self.lane_queue[lane]:
            self._begin_flow(self.lane_queue[lane].popleft(), now_s)
        else:
            del self.lane_queue[lane]

    def _watch_flows(self) -> None:
        end = self.network.next_end_s()
        if end < float("inf"):
            self._schedule(end, _FLOW, self.network.version)

    def _finish(self, key: int, end_s: float) -> None:
        self.ends[key] = end_s
        for rank in self.waiting.pop(key, ()):
            self.ready.append((rank, end_s))

    def _noise(self, key: int) -> float:
        return self.draws.transfers[key * 2654435761 % 4096]

    def _load(self, key: int) -> float:
        """Return how many times its even size the talk's largest part is."""
        layer = self.talks.all[key % len(self.needed)].layer
        return self.loads[key // len(self.needed)][layer] if layer >= 0 else 1.0

    def _slow_nvlink(self, key: int) -> float:
        slow = self.slow_links[key % len(self.needed)]
        return slow[key // len(self.needed)] if slow else 1.0

    def _slow_nvlink_of(self, talk: Talk) -> list[float]:
        """Return by iteration how many times slower a talk's worst NVLink is; nothing if never."""
        effects, members = self.effects, list(talk.members)
        slow = effects.nvlink[members].max(axis=0)
        for pair, factors in effects.pairs.items():
            if set(pair) <= set(members):
                slow = np.maximum(slow, factors)
        worst = self.job.machines.gpu.nvlink_bytes / PCIE_BYTES
        return np.minimum(slow, worst).tolist() if (slow > 1).any() else []

    # -- a rank

    def _operations_of(self, program: Program) -> list[list[Operation]]:
        """Return the operations of each iteration, with the moments at which the thread stalls."""
        pauses: dict[int, list[Pause]] = defaultdict(list)
        both = self.draws.pauses(program.rank) + self.effects.pauses[program.rank]
        for pause in both:
            pauses[pause.iteration].append(pause)
        generations = [program.collection(generation) for generation in range(3)]
        result = []
        for iteration in range(self.job.num_iterations):
            operations = program.operations
            if pauses[iteration]:
                operations = list(operations)
                for pause in sorted(pauses[iteration], key=lambda each: -each.place):
                    place = 1 + int(pause.place * (len(program.operations) - 3))
                    template = generations[pause.generation] if pause.generation >= 0 else -1
                    operations.insert(place, (STALL, pause.duration_s, template))
            result.append(operations)
        return result

    def _rank(self, program: Program) -> Generator[int, float, None]:  # noqa: PLR0912, PLR0915
        """Walk through a rank's program; yield talks whose end is needed, get the ends.

        One loop with plain numbers: most of a run's time is spent here.
        """
        job, rank, draws, effects = self.job, program.rank, self.draws, self.effects
        clock = self.chips[rank] * draws.clocks[rank] * effects.clock[rank]
        seconds = draws.seconds_of(rank, clock, effects.memory[rank])
        bursts = deque(sorted(effects.bursts.get(rank, ())))
        shares = (
            np.ones(len(program.costs)) if rank in effects.feels_all else draws.share_of_clock(rank)
        ).tolist()
        threads = (draws.threads[rank] * effects.threads[rank]).tolist()
        batches = _Batches(draws.loading[rank] * effects.loading[rank][:, None], job.prefetch)
        leaving = (_LEAVING_S * draws.stream(16).exponential(size=64)).tolist()
        saving_s = float(job.checkpoint_s * np.exp(0.1 * draws.stream(12, rank).standard_normal()))
        records = self.run.recorded[rank]
        stack: list[tuple[float, float]] = []
        posted: dict[int, tuple[int, float, float]] = {}
        before: dict[str, float] = {}
        begun: list[float] = [0.0] * QUEUE_DEPTH
        ends, num_talks, post = self.ends, len(self.needed), self._post
        host = device = 0.0
        for iteration, operations in enumerate(self._operations_of(program)):
            traced = self.recording and job.is_traced(job.all_iterations[iteration])
            durations = seconds[iteration].tolist()
            thread, base, own = threads[iteration], iteration * num_talks, 0.0
            for operation in operations:
                code = operation[0]
                if code == COMPUTE:
                    _, place, first_s, launches_s, is_in_pass = operation
                    host = max(host, begun[-QUEUE_DEPTH])
                    launched = host + first_s * thread
                    host += launches_s * thread
                    start = device if device > launched else launched
                    taken = durations[place]
                    while bursts and bursts[0][1] <= start:
                        bursts.popleft()
                    if bursts:
                        taken = _stretched(start, taken, bursts, shares[place])
                    device = start + taken
                    device = max(device, host)
                    begun.append(start)
                    if is_in_pass:
                        own += device - start
                elif code == BEGIN:
                    stack.append((device if device > host else host, host))
                elif code == END:
                    start, launched = stack.pop()
                    if traced:
                        end = device if device > host else host
                        records.append((operation[1], iteration, start, end, launched))
                elif code == TOGETHER:
                    key, launched = base + operation[1], host
                    host += COMMUNICATION_HOST_S * thread
                    start = device if device > host else host
                    post(key, start)
                    device = ends[key] if key in ends else (yield key)
                    device += leaving[(key + rank) % 64]
                    if traced and operation[2] >= 0:
                        records.append((operation[2], iteration, start, device, launched))
                elif code == START:
                    key, launched = base + operation[1], host
                    host += COMMUNICATION_HOST_S * thread
                    start = device if device > host else host
                    posted[key] = (operation[2], start, launched)
                    post(key, start, True)
                elif code == WAIT:
                    key = base + operation[1]
                    end = ends[key] if key in ends else (yield key)
                    device = max(device, end)
                elif code == EXCHANGE:
                    launched = host
                    host += 2 * COMMUNICATION_HOST_S * thread
                    start = max(device, host)
                    for number, _ in operation[1]:
                        post(base + number, start)
                    for number, _ in operation[1]:
                        key = base + number
                        device = max(device, ends[key] if key in ends else (yield key))
                    if traced:
                        for _, template in operation[1]:
                            records.append((template, iteration, start, device, launched))
                    host = max(host, device) + COMMUNICATION_HOST_S
                elif code == LOAD:
                    start = host
                    host = batches.next_s(host) + LOADER_HOST_S * thread
                    if traced:
                        records.append((operation[2], iteration, start, host, _NO_LAUNCH))
                elif code == SYNC:
                    host = max(host, device)
                elif code == HOST:
                    host += operation[1] * thread
                elif code == STALL:
                    start = host
                    host += operation[1]
                    if traced and operation[2] >= 0 and job.granularity == "full":
                        records.append((operation[2], iteration, start, host, _NO_LAUNCH))
                elif code == CHECKPOINT and job.saves_after(iteration):
                    start = max(host, device)
                    host = start + saving_s
                    if traced and job.granularity == "full":
                        records.append((operation[1], iteration, start, host, _NO_LAUNCH))
            for key, (template, came, launched) in posted.items():
                lane = self.talks.all[key - base].lane
                if traced:  # not before the one before it in its lane has ended
                    start = max(came, before.get(lane, 0.0))
                    records.append((template, iteration, start, ends[key], launched))
                before[lane] = ends[key]
            posted.clear()
            self.run.own_s[rank, iteration] = own
            self.run.ends_s[iteration] = max(self.run.ends_s[iteration], device, host)


class _Batches:
    """Microbatches that a worker prepares ahead of the training thread."""

    def __init__(self, seconds: Floats, prefetch: int) -> None:
        self.seconds, self.prefetch = seconds.ravel().tolist(), prefetch
        self.taken: list[float] = []
        self.made_s = 0.0

    def next_s(self, now_s: float) -> float:
        """Return when the next one is there for a thread that asks now."""
        number = len(self.taken)
        room = self.taken[number - self.prefetch] if number >= self.prefetch else 0.0
        self.made_s = max(self.made_s, room) + self.seconds[number % len(self.seconds)]
        self.taken.append(max(now_s, self.made_s))
        return self.taken[-1]


def _stretched(start: float, work: float, bursts: Iterable[Burst], share: float) -> float:
    """Return how long work takes from `start` on, of which a share is slower during bursts.

    5 ms of work from 0 on, all of it twice as slow from 2 to 4 ms: 2 + 2 + 2 = 6 ms.
    """
    now, left = start, work
    for begin, end, factor in bursts:
        if end <= now:
            continue
        if now + left <= begin:
            break
        if begin > now:
            left -= begin - now
            now = begin
        slow = 1 + (factor - 1) * share if factor < float("inf") else float("inf")
        if left * slow <= end - now:
            return now + left * slow - start
        left -= (end - now) / slow
        now = end
    return now + left - start
