"""Simulate the threads and devices of a job's ranks, operation by operation.

Each rank has a thread that launches its operations in order and a device that does them in order.
Kernels start when those before are done and they have been launched; where a thread is slower
than its device, kernels end as they are launched. A thread waits for its device where the trainer
reads a value and behind blocking messages, and it can be only so many kernels ahead. The rank whose
device is furthest back goes on first, so that what runs beside its kernels is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from benchmarks.grounds.quarry.conditions import Conditions, Drawer
from benchmarks.grounds.quarry.estimates import usual_pass_s
from benchmarks.grounds.quarry.faults import stretched
from benchmarks.grounds.quarry.jobs import Job
from benchmarks.grounds.quarry.machines import Floats
from benchmarks.grounds.quarry.programs import (
    BEGIN,
    CLOSE,
    END,
    LOAD,
    OPEN,
    SYNC,
    WORK,
    Place,
    Program,
)  # fmt: skip

LATENCY_S = 4e-6  # from a launch to the start of its kernel on an idle device
PASSES = ("forward", "backward")

COMPUTE, COMMUNICATION, HOST, OVERLAPPED = 1, 2, 3, 4

Span = tuple[str, str, int, float, float, float | None, int, dict[str, Any]]
"""(kind, name, track, start, end, launch, turn, arguments), seconds; no launch: none is known."""


@dataclass(frozen=True)
class Run:
    """What a simulation gave: times of iterations, times of passes (rank, turn), and the spans."""

    iteration_s: Floats
    own_s: Floats
    spans: list[list[Span]]
    ends_s: Floats
    """When each iteration ended, (rank, turn), by the simulation's clock."""


class Rank:
    """The state of one rank: what its thread, its device and its streams have come to."""

    def __init__(self, number: int, program: Program, drawer: Drawer, conditions: Conditions):
        self.number = number
        self.operations = program.operations
        layout = drawer.job.layout
        place = layout.coordinates(number)
        self.products = conditions.products[number]
        self.memory = conditions.memory[number]
        self.threads = conditions.threads[number]
        self.passes = conditions.passes[number]
        self.bursts = conditions.bursts[number]
        self.burst_shares = conditions.burst_shares[number]
        self.stops = conditions.device_stops[number]
        self.pauses = conditions.pauses[number]
        self.lengths = conditions.lengths[place.dp].tolist()
        self.experts = conditions.experts[place.ep]
        self.batch_s = conditions.batch_s[number].tolist()
        self.copy_s = conditions.copy_s[number]
        every_s = float(conditions.batch_s[number].mean()) / drawer.job.num_workers
        self.prefetched = drawer.job.first_iteration > 1 and every_s < usual_pass_s(drawer.job)
        kernels = sum(each[0] == WORK for each in self.operations) * drawer.turns
        rng, ratio = drawer.rng("kernels", number), conditions.noise_ratio[number]
        noise = np.exp(ratio * rng.normal(size=kernels) - ratio**2 / 2)
        host_ratio = drawer.job.machines.host_noise_ratio
        hosts = np.exp(host_ratio * rng.normal(size=kernels) - host_ratio**2 / 2)
        self.noise = iter(zip(noise.tolist(), hosts.tolist(), strict=True))
        self.ready = self.thread = 0.0
        self.turn = self.place = 0
        self.issued = 0
        self.queue: deque[tuple[int, float]] = deque()
        self.counts: dict[int, int] = {}
        self.sequences: dict[object, int] = {}
        self.streams: dict[int, deque[Any]] = {}
        self.stream_ends: dict[int, float] = {}
        self.done: dict[object, float] = {}
        self.awaited: object = None
        self.beside, self.beside_until = 0, 0.0
        self.open: list[tuple[Any, ...]] = []
        self.not_own = 0.0
        self.made: list[float] = []
        self.taken: list[float] = []
        self.left, self.exchange_end = 0, 0.0
        self.finished = self.blocked = False
        self.spans: list[Span] = []

    def sequence(self, *key: object) -> int:
        """Count something within the iteration, from 0."""
        found = self.sequences.get(key, 0)
        self.sequences[key] = found + 1
        return found


class Devices:
    """The threads and devices of all ranks; who talks to others is told what to do then."""

    def __init__(
        self,
        drawer: Drawer,
        programs: Sequence[Program],
        conditions: Conditions,
        *,
        recording: bool,
    ) -> None:
        self.job: Job = drawer.job
        self.conditions, self.recording = conditions, recording
        self.machines = drawer.job.machines
        self.ranks = [Rank(n, each, drawer, conditions) for n, each in enumerate(programs)]
        shape = (len(self.ranks), drawer.turns)
        self.own_s, self.iteration_s = np.zeros(shape), np.zeros(shape)
        self.ends_s = np.zeros(shape)
        self.saved: dict[int, list[tuple[Rank, float]]] = {}
        self.heap: list[tuple[float, int]] = []
        self.current: Rank | None = None
        self.handlers: dict[int, Callable[[Rank, Any], None]] = {
            OPEN: self._open, CLOSE: self._close, WORK: self._work, LOAD: self._load,
            SYNC: self._sync, BEGIN: self._begin, END: self._end,
        }  # fmt: skip

    def run(self) -> Run:
        """Simulate until all ranks have finished."""
        heap, handlers = self.heap, self.handlers
        for rank in self.ranks:
            heappush(heap, (0.0, rank.number))
        while heap:
            _, number = heappop(heap)
            self.current = rank = self.ranks[number]
            operations = rank.operations
            while not (rank.blocked or rank.finished):
                if heap and rank.ready > heap[0][0]:
                    heappush(heap, (rank.ready, number))
                    break
                operation = operations[rank.place]
                rank.place += 1
                handlers[operation[0]](rank, operation)
        if not all(rank.finished for rank in self.ranks):
            stuck = [(r.number, r.operations[r.place - 1]) for r in self.ranks if not r.finished]
            raise RuntimeError(f"ranks wait for one another: {stuck[:4]}")
        spans = [rank.spans for rank in self.ranks]
        return Run(self.iteration_s.mean(axis=0), self.own_s, spans, self.ends_s)

    def resume(self, rank: Rank, at: float) -> None:
        """Let a rank go on that has waited for others."""
        rank.ready = max(rank.ready, at)
        rank.blocked = False
        if rank is not self.current:
            heappush(self.heap, (rank.ready, rank.number))

    # --- threads and kernels -------------------------------------------------------------------

    def launch(self, rank: Rank, kernels: int, noise: float) -> float:
        """Launch kernels; return when the first of them can start at the earliest."""
        begin = rank.thread
        pause = rank.pauses.get((rank.turn, rank.place)) if rank.pauses else None
        if pause:
            begin += pause[0]
            if self.recording and pause[1]:
                where = (rank.thread, begin, None, rank.turn)
                rank.spans.append(("gc", pause[1], HOST, *where, {}))
        rank.issued += kernels
        queue, behind = rank.queue, rank.issued - self.machines.queue
        while queue and queue[0][0] < behind:
            begin = max(begin, queue.popleft()[1])
        rank.thread = begin + kernels * self.machines.launch_s * rank.threads[rank.turn] * noise
        return begin + LATENCY_S

    def _work(self, rank: Rank, operation: Any) -> None:
        _, work, microbatch, has_experts = operation
        noise, host_noise = next(rank.noise)
        turn = rank.turn
        products, attention, memory = work.products_s, work.attention_s, work.memory_s
        if microbatch >= 0:
            tokens, squares = rank.lengths[turn][microbatch]
            tokens *= rank.passes * (rank.experts[turn] if has_experts else 1.0)
            products, memory = products * tokens, memory * tokens
            attention *= squares * rank.passes
        products = (products + attention) * rank.products[turn]
        memory *= rank.memory[turn]
        taken = (products + memory) * noise
        start = max(rank.ready, self.launch(rank, work.kernels, host_noise))
        if rank.bursts:
            shares = rank.burst_shares
            share = (shares[0] * products + shares[1] * memory) / max(products + memory, 1e-12)
            taken = stretched(start, taken, rank.bursts, share)
        if rank.beside:
            taken *= 1 + self.machines.interference_ratio
        elif rank.beside_until > start:
            taken += self.machines.interference_ratio * min(taken, rank.beside_until - start)
        if rank.stops:
            taken += rank.stops.get((turn, rank.place), 0.0)
        rank.queue.append((rank.issued, start))
        last = rank.thread + LATENCY_S + taken / work.kernels
        rank.ready = max(start + taken, last)

    def _sync(self, rank: Rank, operation: Any) -> None:
        rank.thread = max(rank.thread, rank.ready)
        rank.queue.clear()

    def _load(self, rank: Rank, operation: Any) -> None:
        """Take a batch that workers have made ahead, two each; wait for it where there is none."""
        _, microbatch, chunk = operation
        workers, number = self.job.num_workers, len(rank.made)
        make = rank.batch_s[min(number, len(rank.batch_s) - 1)]
        if number < 2 * workers and rank.prefetched:
            begin = -make  # workers have been ahead since long
        elif number < workers:
            begin = -make * (1 - (number + 1) / workers)
        else:
            begin = rank.made[number - workers]
            if number >= 2 * workers:
                begin = max(begin, rank.taken[number - 2 * workers])
        rank.made.append(begin + make)
        asked, idle = rank.thread, max(rank.ready, rank.thread + LATENCY_S)
        rank.thread = max(asked, rank.made[number])
        rank.taken.append(rank.thread)
        rank.thread += rank.copy_s
        rank.not_own += max(rank.ready, rank.thread + LATENCY_S) - idle
        if self.recording:
            where = (asked, rank.thread, None, rank.turn)
            at = {"microbatch": microbatch, "chunk": chunk}
            rank.spans.append(("data", "batch-generator", HOST, *where, at))

    # --- spans ---------------------------------------------------------------------------------

    def _open(self, rank: Rank, operation: Any) -> None:
        at = max(rank.ready, rank.thread + LATENCY_S)
        rank.open.append((operation, at, rank.thread))
        if operation[1] in PASSES:
            rank.not_own = 0.0

    def _close(self, rank: Rank, operation: Any) -> None:
        (_, name, kind, at), begin, launch = rank.open.pop()
        end = max(rank.ready, rank.thread + LATENCY_S)
        if name in PASSES:
            self.own_s[rank.number, rank.turn] += end - begin - rank.not_own
        elif name == "iteration":
            self.iteration_s[rank.number, rank.turn] = end - begin
            self.ends_s[rank.number, rank.turn] = end
        if self.recording:
            where = (begin, end, launch, rank.turn)
            rank.spans.append((kind, name, COMPUTE, *where, arguments_of(at)))

    def _begin(self, rank: Rank, operation: Any) -> None:
        rank.sequences.clear()
        rank.done.clear()

    def _end(self, rank: Rank, operation: Any) -> None:
        """End an iteration; where a save or an evaluation follows, all go on together from it."""
        turn = rank.turn
        pause_s = self.conditions.between_s[turn]
        if pause_s:
            rank.thread = max(rank.thread, rank.ready)
            waiting = self.saved.setdefault(turn, [])
            waiting.append((rank, rank.thread))
            rank.blocked = True
            if len(waiting) == len(self.ranks):
                self._pass_pause(waiting, pause_s, self.conditions.saves[turn])
            return
        self._next(rank)

    def _pass_pause(self, waiting: list[tuple[Rank, float]], pause_s: float, saves: bool) -> None:
        until = max(begin for _, begin in waiting) + pause_s
        for each, begin in waiting:
            if self.recording and saves:
                where = (begin, until, None, each.turn)
                each.spans.append(("checkpoint", "save-checkpoint", HOST, *where, {}))
            each.thread = until
            self._next(each)
            if not each.finished:
                self.resume(each, until)

    def _next(self, rank: Rank) -> None:
        rank.turn += 1
        rank.place = 0
        rank.finished = rank.turn == self.ends_s.shape[1]


def arguments_of(at: Place) -> dict[str, Any]:
    """Return the arguments that say where in the iteration a span belongs."""
    phase, microbatch, chunk, layer = at
    found: dict[str, Any] = {}
    if microbatch >= 0:
        found |= {"microbatch": microbatch, "chunk": chunk}
    if layer >= 0:
        found["layer"] = layer
    if phase:
        found["phase"] = phase
    return found
