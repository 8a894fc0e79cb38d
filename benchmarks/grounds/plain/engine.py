"""Hosts that launch, devices that compute, communicators that transfer: times of one run.

Every rank has a host thread, which runs ahead, and a stream, which works off what was launched:

    host    | launch launch launch ············| reads the loss
    stream      | layer | layer |  waits  | layer ···|
    lane                | all_gather ──── | reduce_scatter ── |

A lane is a communicator: one collective after the other, each ending for all members at once, when
the last has come and the transfer is done. All values are arrays over ranks, in seconds of true
time; what is random is drawn in an order that no time changes, so that runs of one job with and
without a trouble have the same draws.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.plain.job import Job
from benchmarks.grounds.plain.machine import Floats, GroupSet, transfer_s
from benchmarks.grounds.plain.trouble import Conditions, Hits
from megascan.schema import Kind, Track

REACH_S = 5e-6
"""From a launch until an idle device begins, at least."""
MARK_S = 2.5e-6
"""What an event costs the host."""
_JITTER_S = 1.2e-6
_BLOCK = 256
_WARM_UP = (2.4, 1.15)
"""How much longer launches take in the first iterations, which allocate."""
_TUNING = (1.6, 0.25)
"""How much longer kernels take at most in them, where they are tuned."""

Arguments: TypeAlias = dict[str, int | str]
At: TypeAlias = slice
"""Which ranks: those of a stage lie side by side."""
EVERYBODY: At = slice(None)


class Draws:
    """Random rows over ranks, in an order that depends on nothing but the job."""

    def __init__(self, seed: int, num_ranks: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._num_ranks = num_ranks
        self._normal, self._even = np.empty((0, 0)), np.empty((0, 0))
        self._places = [0, 0]

    def normal(self) -> Floats:
        """Return standard normal values (rank,)."""
        if self._places[0] == len(self._normal):
            self._normal = self._generator.standard_normal((_BLOCK, self._num_ranks))
            self._places[0] = 0
        self._places[0] += 1
        return np.asarray(self._normal[self._places[0] - 1], dtype=np.float64)

    def even(self) -> Floats:
        """Return values between 0 and 1 (rank,)."""
        if self._places[1] == len(self._even):
            self._even = self._generator.random((_BLOCK, self._num_ranks))
            self._places[1] = 0
        self._places[1] += 1
        return np.asarray(self._even[self._places[1] - 1], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the stream, and when the host launched it; that of a host has no launch."""

    at_s: Floats
    launched_s: Floats | None


@dataclass(slots=True, eq=False)
class Row:
    """One span of each of several ranks; arrays are over them. An end may be found out later."""

    kind: Kind
    name: str
    track: Track
    at: At
    begin: Mark
    end_s: Floats
    arguments: Arguments
    groups: GroupSet | None = None
    sizes: Floats | None = None
    peers: tuple[int, ...] = ()
    present: tuple[bool, ...] | None = None
    """Ranks that have it; None: all."""


@dataclass(slots=True)
class Recorder:
    """Keeps the rows of traced iterations."""

    is_on: bool = False
    iteration: int = 0
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep a row, if the iteration is traced."""
        if self.is_on:
            row.arguments["iteration"] = self.iteration
            self.rows.append(row)


class Engine:
    """State of all ranks, and what moves it on."""

    def __init__(self, job: Job, conditions: Conditions, recorder: Recorder) -> None:
        self.job, self.conditions, self.recorder = job, conditions, recorder
        self.draws = Draws(job.seed, job.num_ranks)
        self.device = np.zeros(job.num_ranks)
        self.host = np.zeros(job.num_ranks)
        self.pass_s = np.zeros(job.num_ranks)
        """What the kernels of passes took in this iteration."""
        self.groups = job.groups()
        self.iteration = 0
        self.lengths = np.ones(job.num_ranks)
        self._lanes: dict[str, Floats] = {}
        self._has_beside = False
        """Whether anything was transferred beside the stream so far."""
        self._beside_begin = np.zeros(job.num_ranks)
        self._beside_end = np.zeros(job.num_ranks)
        self._wander = np.ones(job.num_ranks)
        self._tuning = np.ones(job.num_ranks)
        self._hosts = 1.0 + job.noise.host_spread_ratio * self.draws.normal()
        self._unwatched: list[Row] = []
        self._numbers: dict[tuple[str, str, int], int] = {}

    def begin_iteration(self, iteration: int) -> None:
        """Count anew; let every rank's speed wander on."""
        self.iteration = iteration
        self.recorder.iteration = iteration
        self.recorder.is_on = self.job.tracing.is_traced(iteration)
        self.conditions.begin_iteration(iteration)
        self.pass_s = np.zeros(self.job.num_ranks)
        self._numbers.clear()
        step = self.job.noise.rank_ratio * self.draws.normal()
        self._wander = 1.0 + 0.8 * (self._wander - 1.0) + step
        self._tuning = np.ones(self.job.num_ranks)
        if self.job.habits.tunes and iteration <= len(_TUNING):
            self._tuning += _TUNING[iteration - 1] * self.draws.even()
        if iteration == 1:
            self.host += self.job.habits.first_s * (0.8 + 0.4 * self.draws.even())

    def number(self, group: str, operation: str, stage: int = 0) -> int:
        """Return the running number of an operation within (iteration, group)."""
        key = (group, operation, stage)
        self._numbers[key] = self._numbers.get(key, -1) + 1
        return self._numbers[key]

    # Streams

    def mark(self, at: At = EVERYBODY) -> Mark:
        """Return when the stream gets to a mark that the host launches now."""
        launched = self.host[at].copy()
        reach_s = REACH_S * (1.0 + 0.8 * self.draws.even()[at])
        moment = np.maximum(self.device[at], launched + reach_s)
        self.device[at] = moment
        self.host[at] = launched + MARK_S
        return Mark(moment, launched)

    def mark_host(self, at: At = EVERYBODY) -> Mark:
        """Return where the host is."""
        return Mark(self.host[at].copy(), None)

    def compute(
        self,
        typical_s: float,
        *,
        kernels: int,
        at: At = EVERYBODY,
        memory_share: float | None = None,
        weights: Floats | None = None,
        is_of_pass: bool = True,
    ) -> None:
        """Launch kernels that take so long on a typical chip, times `weights` (rank,)."""
        noise, model = self.job.noise, self.job.model
        launch_s = kernels * model.launch_s * self._launch_noise()[at]
        begun = self.host[at]
        start = np.maximum(self.device[at], begun + REACH_S)
        share = model.memory_share if memory_share is None else memory_share
        moments = self.device if at == EVERYBODY else self._moments(start, at)
        slowness = self.conditions.slowness(moments, share)[at]
        kernel_noise = np.exp(noise.kernel_ratio * self.draws.normal()[at])
        took = typical_s * slowness * kernel_noise
        is_outlier = self.draws.even()[at] < noise.outlier_share
        if is_outlier.any():
            took = took * np.where(is_outlier, 1.0 + noise.outlier_ratio, 1.0)
        took = took * self._wander[at]
        if self.job.habits.tunes:
            took = took * self._tuning[at]
        if weights is not None:
            took = took * weights[at]
        stretched = took
        if self._has_beside:
            beside = np.minimum(self._beside_end[at], start + took) - np.maximum(
                self._beside_begin[at], start
            )
            stretched = took + self.job.habits.interference_ratio * np.maximum(beside, 0.0)
        last = begun + launch_s + REACH_S + took / max(kernels, 1)
        self.device[at] = np.maximum(start + stretched, last)
        self.host[at] = begun + launch_s
        if is_of_pass:
            self.pass_s[at] += took

    def _moments(self, start: Floats, at: At) -> Floats:
        moments = np.zeros(self.job.num_ranks)
        moments[at] = start
        return moments

    def _launch_noise(self) -> Floats:
        """Return by how much launches take longer, stalls of hosts among it."""
        noise = self.job.noise
        factor = self._hosts * np.exp(noise.host_ratio * self.draws.normal())
        factor = factor * self.conditions.factor(Hits.LAUNCHES, self.host)
        if self.iteration <= len(_WARM_UP):
            factor = factor * _WARM_UP[self.iteration - 1]
        return factor

    def stall(self, at: At = EVERYBODY) -> None:
        """Let hosts be held up, once in a pass: by others on the machine, or by a trouble."""
        noise, chance = self.job.noise, self.draws.even()
        if noise.stall_share:
            held = np.where(chance < noise.stall_share, noise.stall_s * (0.5 + chance), 0.0)
            self.host[at] += held[at]
        self.host[at] += self.conditions.added_s(Hits.LAUNCHES, chance)[at]

    def waited(self, count: int) -> None:
        """End the spans of the oldest works whose ends nobody sees: the stream has waited now."""
        for row in self._unwatched[:count]:
            row.end_s = np.maximum(row.end_s, self.device)
        del self._unwatched[:count]

    def wait(self, until: Floats, at: At = EVERYBODY) -> None:
        """Let the stream wait."""
        self.device[at] = np.maximum(self.device[at], until[at])

    def synchronize(self, at: At = EVERYBODY) -> None:
        """Let the host wait for the stream."""
        self.host[at] = np.maximum(self.host[at], self.device[at]) + 8e-6

    # Communication

    def lane(self, groups: GroupSet) -> Floats:
        """Return from when on a communicator is free."""
        return self._lanes.setdefault(groups.axis, np.zeros(self.job.num_ranks))

    def collective(
        self,
        op: str,
        groups: GroupSet,
        size_bytes: float,
        ready: Floats,
        *,
        sizes: Floats | None = None,
        rows: slice = EVERYBODY,
    ) -> tuple[Floats, Floats]:
        """Return when it began and ended on each rank (rank,); `rows` are the groups that do it."""
        lane, machine, noise = self.lane(groups), self.job.machine, self.job.noise
        members = groups.members[rows]
        begin = np.maximum(ready, lane)
        payload = np.full(len(groups.members), size_bytes)
        if sizes is not None:
            payload = sizes[groups.members].max(axis=1)
        random = self.draws.normal()[groups.members[:, 0]]
        tail = -np.log(1.0 - self.draws.even()[0] * 0.999)
        link = self.conditions.link_factor(machine, groups, begin)
        ratio = np.exp(noise.transfer_ratio * random) * link
        if groups.crosses_hosts:
            ratio = ratio * (1.0 + noise.congestion_ratio * tail)
        empty_s = transfer_s(machine, groups, op, 0.0)
        full_s = transfer_s(machine, groups, op, 1e9) - empty_s
        took = (empty_s + full_s * payload / 1e9 * ratio)[rows]
        end = begin.copy()
        jitter = _JITTER_S * self.draws.even()[members]
        end[members] = (begin[members].max(axis=1) + took)[:, None] + jitter
        lane[members] = end[members]
        return begin, end

    def beside(self, begin: Floats, end: Floats) -> None:
        """Let a transfer slow down what is computed meanwhile."""
        self._has_beside = True
        self._beside_begin = np.where(begin <= self._beside_end, self._beside_begin, begin)
        self._beside_end = np.maximum(self._beside_end, end)

    # Spans

    def span(
        self,
        kind: Kind,
        name: str,
        begin: Mark,
        end_s: Floats,
        arguments: Arguments,
        *,
        at: At = EVERYBODY,
        present: tuple[bool, ...] | None = None,
    ) -> None:
        """Record what a rank's own thread or stream did."""
        on_host = kind in (Kind.DATA, Kind.GC, Kind.HOST, Kind.CHECKPOINT)
        track = Track.HOST if on_host else Track.COMPUTE
        self.recorder.add(Row(kind, name, track, at, begin, end_s, arguments, present=present))

    def transfer_span(
        self,
        op: str,
        groups: GroupSet,
        begin: Mark,
        end_s: Floats,
        arguments: Arguments,
        *,
        size_bytes: float,
        at: At = EVERYBODY,
        track: Track = Track.OVERLAPPED,
        sizes: Floats | None = None,
        stage: int = 0,
    ) -> None:
        """Record a collective, if granularity wants it."""
        described: Arguments = {
            **arguments,
            "op": op,
            "sequence": self.number(groups.axis, op, stage),
            "size_bytes": int(size_bytes),
        }
        if self._is_wanted(groups):
            row = Row(Kind.COLLECTIVE, op, track, at, begin, end_s, described, groups, sizes)
            self.recorder.add(row)
            if "end_is_bound" in described:
                self._unwatched.append(row)

    def _is_wanted(self, groups: GroupSet) -> bool:
        """Base records what travels over data-parallel groups."""
        is_full = self.job.tracing.granularity == "full"
        return is_full or not self.job.mesh or groups.axis.startswith("dp")

    def blocking(
        self,
        op: str,
        groups: GroupSet,
        size_bytes: float,
        arguments: Arguments,
        *,
        at: At = EVERYBODY,
        rows: slice = EVERYBODY,
        sizes: Floats | None = None,
        shown: Floats | None = None,
        stage: int = 0,
    ) -> None:
        """Communicate on the stream itself; a group of one member does nothing.

        `sizes` (rank,) are the payloads where they differ, `shown` what the ranks say they are.
        """
        if groups.size < 2:
            return
        begin = self.mark(at)
        ready = self.device.copy()
        ready[at] = begin.at_s
        self.host[at] += 2 * self.job.model.launch_s
        _, end = self.collective(op, groups, size_bytes, ready, sizes=sizes, rows=rows)
        self.wait(end, at)
        self.transfer_span(
            op,
            groups,
            begin,
            end[at],
            arguments,
            size_bytes=size_bytes,
            at=at,
            track=Track.COMMUNICATION,
            sizes=None if shown is None else shown[at],
            stage=stage,
        )

    def beside_stream(
        self, op: str, groups: GroupSet, size_bytes: float, ready: Mark, arguments: Arguments
    ) -> Floats:
        """Communicate next to the stream, from when `ready` is reached; return the ends."""
        if groups.size < 2:
            return ready.at_s
        self.host += 2 * self.job.model.launch_s
        begin, end = self.collective(op, groups, size_bytes, ready.at_s)
        self.beside(begin, end)
        self.transfer_span(
            op, groups, Mark(begin, ready.launched_s), end, arguments, size_bytes=size_bytes
        )
        return end
