"""Run host threads, streams and communicators of the ranks of a stage; note spans.

A host launches kernels one after the other and runs ahead of its device; the device runs them in
order, none before it was launched. With host time h, device time d, n kernels of l to launch and D
to run:

    d' = max(max(d, h + l) + D, h + n l + D / n)         h' = h + n l

(the second term: the last kernel cannot begin before it is there). The queue between them is finite
(CUDA holds about a thousand launches): a host that is further ahead waits. Times of all variants
and all ranks of a stage are arrays (variant, place); what differs between variants is what was
planted, and nothing is decided by a time, so that one order of steps serves all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.grounds.rack.hardware import Floats, Mask, Places
from benchmarks.grounds.rack.network import Network
from benchmarks.grounds.rack.places import Groups
from megascan.schema import Kind, Track

_QUEUE = 1000
"""Launches that fit between host and device."""
_MARK_S = 1.2e-6
"""What recording an event takes a host."""
_READ_S = 2e-6
"""From recording an event until the host has read its own clock."""
LAUNCHES_A_COLLECTIVE = 3
_SYNC_S = 8e-6
"""From the end of a kernel until the host that waits for it goes on."""

Arguments = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the device, and when the host asked for it; of the first variant, by place."""

    at: Floats
    launched: Floats


@dataclass(slots=True, eq=False)
class Row:
    """The same span of several ranks; `places` count those of the job."""

    kind: Kind
    name: str
    track: Track
    begin: Floats
    end: Floats
    launched: Floats | None
    arguments: Arguments
    places: Places
    groups: tuple[str, ...] | None = None  # by the row's place, as the others
    peers: Places | None = None
    sizes: Floats | None = None  # times the size in the arguments

    def keep(self, chosen: Mask) -> None:
        """Keep the span of some of its places only."""
        self.begin, self.end, self.places = (
            self.begin[chosen],
            self.end[chosen],
            self.places[chosen],
        )


@dataclass(slots=True, eq=False)
class Pending:
    """Communication under way beside the stream."""

    row: Row
    done: Floats  # (variant, place)


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """How much more than its nominal size a collective moves, where microbatches differ.

    `carried` is what its time depends on, (variant, place), `handed` what a span says that a place
    has handed in; None: the nominal size.
    """

    carried: Floats | None = None
    handed: Floats | None = None


ALIKE = Scale()


@dataclass(eq=False)
class Lane:
    """Times of the ranks of one stage, and what was noted of them."""

    stage: int
    places: Places
    network: Network
    host: Floats
    dev: Floats
    groups: Mapping[str, Groups]
    is_full: bool
    rows: list[Row] = field(default_factory=list)
    busy: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    streams: dict[str, Floats] = field(default_factory=dict)
    moment: int = 0
    _numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    _queue: deque[tuple[int, Floats]] = field(default_factory=deque)
    _launched: int = 0

    def begin_iteration(self) -> None:
        """Begin to count anew."""
        self._numbers.clear()
        self.rows = []

    def number(self, axis: str, name: str) -> int:
        """Return the running number of an operation of an axis within this iteration."""
        found = self._numbers.get((axis, name), 0)
        self._numbers[axis, name] = found + 1
        return found

    def mark(self) -> Mark:
        """Record an event on the stream."""
        self.host = self.host + _MARK_S
        return Mark(np.maximum(self.dev[0], self.host[0]), self.host[0] + _READ_S)

    def run(self, seconds: Floats, num_kernels: int, launch_s: Floats) -> None:
        """Launch kernels that take so long together."""
        host, self.host = self.host, self.host + num_kernels * launch_s
        begun = np.maximum(self.dev, host + launch_s)
        self.dev = np.maximum(begun + seconds, self.host + seconds / num_kernels)
        self._enqueue(num_kernels)

    def _enqueue(self, num_launches: int) -> None:
        self._launched += num_launches
        queue = self._queue
        queue.append((self._launched, self.dev))
        while queue[0][0] < self._launched - _QUEUE:
            self.host = np.maximum(self.host, queue.popleft()[1])

    def sync(self) -> None:
        """Let the host wait for the device."""
        self.host = np.maximum(self.host, self.dev + _SYNC_S)
        self._queue.clear()

    def stall(self, seconds: Floats) -> None:
        """Let the host do something else."""
        self.host = self.host + seconds

    def meet(
        self,
        axis: str,
        op: str,
        size_bytes: int,
        launch_s: Floats,
        arguments: Arguments,
        *,
        scale: Scale = ALIKE,
    ) -> None:
        """Run a collective that the stream waits for."""
        groups = self.groups[axis]
        begin, ready = self._launch_collective(launch_s)
        seconds = self._seconds(groups, op, size_bytes, scale)
        if op == "broadcast":
            came = np.maximum(ready, ready[:, groups.index[:, 0]][:, groups.of])
            self.dev = came + groups.spread(seconds) + self.network.jitter(self.dev.shape[1])
        else:
            self.dev = self._ends(groups, groups.latest(ready) + seconds)
        self._enqueue(LAUNCHES_A_COLLECTIVE)
        row = self._note_collective(axis, op, size_bytes, arguments, (begin, self.mark()))
        row.sizes = scale.handed

    def _launch_collective(self, launch_s: Floats) -> tuple[Mark, Floats]:
        """Launch a collective; return the mark before it, and when each rank is ready for it."""
        begin = self.mark()
        self.host = self.host + LAUNCHES_A_COLLECTIVE * launch_s
        return begin, np.maximum(self.dev, self.host)

    def _seconds(self, groups: Groups, op: str, size_bytes: int, scale: Scale) -> Floats:
        """Return what a collective takes when all are there, (variant, group)."""
        most = None if scale.carried is None else groups.latest(scale.carried)
        at = self.stage, self.moment
        return self.network.collective(groups, op, size_bytes, at, scale=most)

    def _ends(self, groups: Groups, by_group: Floats) -> Floats:
        return groups.spread(by_group) + self.network.jitter(self.dev.shape[1])

    def start(
        self,
        axis: str,
        op: str,
        size_bytes: int,
        launch_s: Floats,
        arguments: Arguments,
        *,
        scale: Scale = ALIKE,
    ) -> Pending:
        """Start a collective beside the stream, behind those of its communicator."""
        groups = self.groups[axis]
        begin, ready = self._launch_collective(launch_s)
        before = self.streams.get(axis)
        if before is not None:
            ready = np.maximum(ready, before)
        seconds = self._seconds(groups, op, size_bytes, scale)
        done = self._ends(groups, groups.latest(ready) + seconds)
        self.streams[axis] = done
        end = Mark(done[0], begin.launched)
        row = self._note_collective(
            axis, op, size_bytes, arguments, (begin, end), track=Track.OVERLAPPED
        )
        row.sizes = scale.handed
        return Pending(row, done)

    def wait(self, pending: Pending, *, is_bound: bool) -> None:
        """Let the stream wait; where nobody else sees the end, this is where the span ends."""
        self.dev = np.maximum(self.dev, pending.done)
        if is_bound:
            pending.row.end = self.mark().at
            pending.row.arguments["end_is_bound"] = 1

    def _note_collective(
        self,
        axis: str,
        op: str,
        size_bytes: int,
        arguments: Arguments,
        marks: tuple[Mark, Mark],
        *,
        track: Track = Track.COMMUNICATION,
    ) -> Row:
        described: Arguments = {
            **arguments,
            "op": op,
            "sequence": self.number(axis, op),
            "size_bytes": size_bytes,
        }
        row = self.row(Kind.COLLECTIVE, op, track, marks, described)
        row.groups = self.groups[axis].ids
        if self.is_full or axis in ("dp", "dp_cp", "expt_dp"):
            self.rows.append(row)
        return row

    def row(
        self,
        kind: Kind,
        name: str,
        track: Track,
        marks: tuple[Mark, Mark],
        arguments: Arguments,
    ) -> Row:
        """Return a span of all places of the stage, not noted yet."""
        begin, end = marks
        launched = begin.launched if self.is_full else None
        return Row(kind, name, track, begin.at, end.at, launched, arguments, self.places)

    def note(self, kind: Kind, name: str, begin: Mark, arguments: Arguments) -> None:
        """Note a span of the stream that ends now."""
        self.rows.append(self.row(kind, name, Track.COMPUTE, (begin, self.mark()), arguments))

    def note_on_host(
        self, kind: Kind, name: str, times: tuple[Floats, Floats], arguments: Arguments
    ) -> Row:
        """Note a span of the host."""
        begin, end = times
        row = Row(kind, name, Track.HOST, begin[0], end[0], None, arguments, self.places)
        self.rows.append(row)
        return row
