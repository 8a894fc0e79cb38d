"""Let a host thread launch, and a device compute and talk to others; record what a tracer would.

The host runs ahead of its device; a module takes as long as its kernels, or as their launches where
those come too late. Times are seconds of the true clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.yard.engine import Exchange, Meeting, Running
from benchmarks.grounds.yard.jobs import Cost, Job
from benchmarks.grounds.yard.network import groups_of
from benchmarks.grounds.yard.trouble import Condition

Arguments: TypeAlias = dict[str, int | str]
Span: TypeAlias = tuple[str, str, int, float, float, Arguments]
"""kind, name, track, start and end in seconds, arguments"""

BEGIN_S = 1.0  # of the first iteration, when workers have read for a moment
_COMPUTE, _BESIDE = 1, 4
_TRACKS = {"collective": 2, "p2p": 2, "data": 3, "gc": 3}  # where they do not go on beside compute
LAUNCH_LATENCY_S = 4e-6
_MARK_S = 2e-6  # the host needs to record an event
_NOISE_OF_KERNELS = 0.004
_NOISE_OF_ITERATIONS = 0.0015
_NUM_DRAWS = 1 << 12


class Launcher:
    """The host thread and the device of one rank: how far each has come, and what was recorded."""

    def __init__(self, job: Job, rank: int, seed: int, *, recording: bool) -> None:
        self.job, self.rank = job, rank
        self.groups = groups_of(job.layout, rank)
        self.dev = self.host = BEGIN_S
        self.busy_s = 0.0  # of the device in this iteration
        self.spans: list[Span] = []
        self._seed = seed
        self._recording, self._full = recording, job.granularity == "full"

    def _begin(self, number: int, condition: Condition, meet: Exchange) -> None:
        """Begin an iteration."""
        rng = np.random.default_rng([self._seed, self.rank, number, 5])
        self._draws = rng.normal(size=_NUM_DRAWS).tolist()
        self._next_draw = 0
        self._luck = 1 + self.job.noise * _NOISE_OF_ITERATIONS * float(rng.normal())
        self._number, self._at, self._meet = number, condition, meet
        self._joined: Counter[tuple[object, ...]] = Counter()
        self._sequences: Counter[tuple[object, ...]] = Counter()
        self._beside: list[tuple[Meeting, float, str, Arguments]] = []
        self._paused_s = self.busy_s = 0.0

    def _draw(self) -> float:
        self._next_draw = (self._next_draw + 1) % _NUM_DRAWS
        return float(self._draws[self._next_draw])

    def _open(self) -> tuple[float, float]:
        """Mark a start; return it with the host's time then."""
        self.host += _MARK_S
        self.dev = max(self.dev, self.host + LAUNCH_LATENCY_S)
        return self.dev, self.host

    def _close(
        self, kind: str, name: str, opened: tuple[float, float], arguments: Arguments | None = None,
        *, base: bool = True,
    ) -> None:  # fmt: skip
        """Record what began at `opened` and ends now on the device."""
        self.host += _MARK_S
        self.dev = max(self.dev, self.host + LAUNCH_LATENCY_S)
        if self._recording and (base or self._full):
            self._record(kind, name, opened, self.dev, dict(arguments or {}))

    def _record(
        self, kind: str, name: str, opened: tuple[float, float], end: float, arguments: Arguments,
        *, track: int = 0,
    ) -> None:  # fmt: skip
        start, launched = opened
        arguments["iteration"] = self._number
        if self._full and launched >= 0:
            arguments["launch_ns"] = round((launched - start) * 1e9)
        track = track or _TRACKS.get(kind, _COMPUTE)
        self.spans.append((kind, name, track, start, end, arguments))

    def _note_host(self, kind: str, name: str, begin: float, arguments: Arguments) -> None:
        if self._recording and (self._full or kind != "gc"):
            self._record(kind, name, (begin, -1.0), self.host, dict(arguments))

    def _compute(self, cost: Cost, tokens: float = 1.0, scores: float = 1.0) -> None:
        """Launch the kernels of a module, and let the device do them."""
        at = self._at
        products = tokens * cost.clock_s + scores * cost.scores_s
        seconds = products * at.clock + tokens * cost.memory_s * at.memory
        seconds *= at.work * self._luck * (1 + self.job.noise * _NOISE_OF_KERNELS * self._draw())
        seconds += self._paused_s
        self._paused_s = 0.0
        begin = max(self.dev, self.host + LAUNCH_LATENCY_S)
        jitter = 1 + 0.1 * abs(self._draw())
        self.host += cost.num_kernels * self.job.site.launch_s * at.launch * jitter
        last = self.host + LAUNCH_LATENCY_S + seconds / (cost.num_kernels + 1)
        self.dev = max(begin + seconds, last)
        self.busy_s += seconds

    def _arrive(self, op: str, axis: str, size_bytes: float, moment: float) -> Meeting:
        members = self.groups[axis]
        name = (axis, members[0])
        self._joined[name] += 1
        return self._meet.join(
            name, self._joined[name], self.rank, members, op=op,
            size_bytes=size_bytes, arrival=moment, noise=self._draw(),
        )  # fmt: skip

    def _described(self, op: str, axis: str, size_bytes: float, within: Arguments) -> Arguments:
        group = f"{axis}@{self.groups[axis][0]}"
        sequence = self._sequences[group, op]
        self._sequences[group, op] += 1
        return within | {
            "op": op, "group": group, "sequence": sequence, "size_bytes": int(size_bytes),
        }  # fmt: skip

    def _talk(
        self, op: str, axis: str, size_bytes: float, within: Arguments | None = None,
        *, carried: float = 0.0,
    ) -> Running:  # fmt: skip
        """Take part in a collective that the device waits for; groups of one are left out.

        `carried` are the bytes of the busiest member, where they differ from this one's.
        """
        if len(self.groups[axis]) < 2:
            return
        opened = self._open()
        meeting = self._arrive(op, axis, carried or size_bytes, opened[0])
        arguments = self._described(op, axis, size_bytes, within or {})
        yield from self._wait(meeting)
        self.dev += 1e-6 * abs(self._draw())
        is_base = axis in ("dp", "dp_cp", "expt_dp")
        self._close("collective", op, opened, arguments, base=is_base)

    def _talk_beside(
        self, op: str, axis: str, size_bytes: float, within: Arguments
    ) -> Meeting | None:
        """Start a collective next to what the device computes; None for groups of one."""
        if len(self.groups[axis]) < 2:
            return None
        self.host += _MARK_S + 6e-6 * self._at.launch
        launched = self.host
        moment = max(self.dev, launched + LAUNCH_LATENCY_S)
        meeting = self._arrive(op, axis, size_bytes, moment)
        arguments = self._described(op, axis, size_bytes, within)
        arguments["launch_ns"] = round((launched - moment) * 1e9)
        if self._full or axis in ("dp_cp", "expt_dp"):
            self._beside.append((meeting, moment, op, arguments))
        return meeting

    def _wait(self, *meetings: Meeting | None) -> Running:
        """Let the device wait for meetings, where there are any."""
        for meeting in meetings:
            if meeting is None:
                continue
            if not meeting.end:
                yield meeting
            self.dev = max(self.dev, meeting.end_for(self.rank))

    def _finish_beside(self) -> Running:
        """Record what went on next to computing, each from when its communicator was free."""
        busy: dict[object, float] = {}
        for meeting, moment, name, arguments in self._beside:
            if not meeting.end:
                yield meeting
            if not self._recording:
                continue
            is_message = "direction" in arguments
            keys = ("group", "peer", "op", "direction") if is_message else ("group",)
            lane = tuple(arguments[key] for key in keys)
            start = max(moment, busy.get(lane, 0.0))
            busy[lane] = meeting.end
            opened = start, moment + int(arguments.pop("launch_ns")) * 1e-9
            kind = "p2p" if is_message else "collective"
            self._record(kind, name, opened, meeting.end, arguments, track=_BESIDE)
