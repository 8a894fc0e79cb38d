"""Keep host, device and streams of a stage's ranks, and take single steps on them.

Every step makes new arrays, so that what was recorded before stays as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.pod.faults import Law
from benchmarks.grounds.pod.job import Floats, Ints, Job
from benchmarks.grounds.pod.load import Load
from benchmarks.grounds.pod.machine import Machine, Noise
from benchmarks.grounds.pod.recording import Entry, Recording
from benchmarks.grounds.pod.wires import Groups, Mail
from benchmarks.grounds.pod.work import Costs, Piece, layer_parameters
from megascan.schema import Kind, Track

COLLECTIVE_LAUNCH_S = 18e-6
TAIL_S = 3e-6  # from the last launch to the end of its kernel
LEAVE_S = 1.5e-6  # by how much members end a collective one after the other
OVERLAP_TAX = 0.05  # what a collective beside it takes from a kernel

Opened = tuple[str, Floats, Floats]
"""The name of a span, when it began, and when the host launched that."""
Times = tuple[Floats, Floats, Floats]
"""Start, end and launch of a communication."""


@dataclass(frozen=True)
class World:
    """Join what all stages of a job share."""

    job: Job
    machine: Machine
    load: Load
    mail: Mail
    costs: Costs
    recording: Recording | None


class Ranks:
    """State of the ranks of one stage; arrays are (variant, place)."""

    def __init__(self, world: World, number: int) -> None:
        job, machine = world.job, world.machine
        self.job, self.number, self.machine = job, number, machine
        self.layout, self.load, self.costs = job.layout, world.load, world.costs
        self.recording = world.recording
        self.size = job.stage_size
        self.host = np.zeros((machine.num_variants, self.size))
        self.device = self.host
        self.streams: dict[str, Floats] = {}
        self.context: dict[str, int | str] = {}
        self.passes_s = self.host
        self.clock_ratio = np.ones_like(self.host)
        self._in_pass = False
        self._noise = Noise(job, number)
        self._network = np.random.default_rng([job.seed, 43, number])
        self._counter: Counter[tuple[str, str]] = Counter()
        self._connected: set[str] = set()
        self.groups = _groups_of(job, number)
        self.replicas = self.layout.dp * self.layout.cp
        self.parameters = self._parameters()

    def _parameters(self) -> dict[str, int]:
        """Return the parameters of a rank by the axis over which their gradients travel."""
        job, dense, experts = self.job, 0, 0
        for chunk in range(self.layout.vpp):
            first = job.model.first_layer(self.number, chunk)
            for layer in range(first, first + job.model.layers[self.number][chunk]):
                own = layer_parameters(job, self.costs, layer)
                dense, experts = dense + own[0], experts + own[1]
        if self.number in (0, self.layout.pp - 1):
            dense += self.costs.end_parameters
        return {"dp_cp": dense, "expt_dp": experts}

    def begin(self, number: int) -> None:
        """Begin an iteration."""
        self.context = {"iteration": number}
        self._counter.clear()
        self.passes_s = np.zeros_like(self.host)
        self.clock_ratio = self.machine.factor(Law.CLOCK, self.number, self.host)

    def launched(self) -> Floats:
        """Return when what is launched now can begin."""
        return np.maximum(self.device, self.host)

    def opened(self, name: str) -> Opened:
        """Begin a span."""
        return name, self.launched(), self.host

    def closed(
        self, opened: Opened, kind: Kind, arguments: Mapping[str, int | str], suffix: str = ""
    ) -> None:
        """End a span, and record it."""
        self.device = self.launched()
        if self.recording is not None:
            name, start, launch = opened
            name += suffix
            self.recording.add(
                self.number,
                Entry(kind, name, Track.COMPUTE, arguments, start[0], self.device[0], launch[0]),
            )

    def traffic(self, num_bytes: float) -> float:
        """Return the seconds in which memory reads and writes so much."""
        return num_bytes / (self.job.cluster.chip.memory_tbps * 1e12)

    def seconds_of(self, piece: Piece, scale: Floats | float, linear: Floats | float) -> Floats:
        """Return how long kernels take: `scale` times their products, `linear` times all."""
        begin = self.launched()
        clock = self.machine.factor(Law.CLOCK, self.number, begin)
        memory = self.machine.factor(Law.MEMORY, self.number, begin)
        matrix_s = piece.matrix_s * clock * scale
        seconds = (matrix_s + piece.memory_s * memory) * linear * self._noise.next()
        for end in self.streams.values():
            seconds = seconds * (1 + OVERLAP_TAX * (end > begin))
        return np.asarray(seconds)

    def launch(self, num_kernels: int) -> None:
        """Spend the host's time for launching."""
        slow = self.machine.factor(Law.LAUNCH, self.number, self.host)
        self.host = self.host + num_kernels * self.job.trainer.launch_us * 1e-6 * slow

    def kernels(
        self, piece: Piece, scale: Floats | float = 1.0, linear: Floats | float = 1.0
    ) -> None:
        """Run kernels one after another."""
        seconds = self.seconds_of(piece, scale, linear)
        begin = self.launched()
        self.launch(piece.num_kernels)
        self.device = np.maximum(begin + seconds, self.host + TAIL_S)
        if self._in_pass:
            self.passes_s = self.passes_s + seconds

    def collective(
        self,
        axis: str,
        op: str,
        num_bytes: float,
        *,
        handed: float = 0,
        skew: Floats | float = 1.0,
        own: Floats | None = None,
    ) -> None:
        """Communicate on the compute stream; `num_bytes` in all, `handed` by each rank, or by each
        its `own` part of that.
        """
        if not self._takes_part(axis):
            return
        start, launch = self.launched(), self.host
        self.host = self.host + COLLECTIVE_LAUNCH_S
        self.device = self._meet(axis, op, num_bytes, start, skew)
        share = None if own is None else np.asarray(own * num_bytes, dtype=np.int64)
        self.note_collective(
            (axis, op, int(handed or num_bytes)),
            Track.COMMUNICATION,
            (start, self.device, launch),
            self.of_pass(),
            None if share is None else np.broadcast_to(share, start.shape)[0],
        )

    def overlapped(self, axis: str, op: str, num_bytes: float, handed: float) -> Floats:
        """Communicate beside the kernels that follow; return when it has ended."""
        if not self._takes_part(axis):
            return self.device
        ready, launch = self.launched(), self.host
        self.host = self.host + COLLECTIVE_LAUNCH_S
        start = np.maximum(ready, self.streams.get(axis, ready))
        end = self._meet(axis, op, num_bytes, start, 1.0)
        self.streams[axis] = end
        what, times = (axis, op, int(handed)), (start, end, launch)
        self.note_collective(what, Track.OVERLAPPED, times, self.of_pass())
        return end

    def broadcast(self, axis: str, num_bytes: int) -> None:
        """Hand what the first member has to the others, who wait for nobody else."""
        if not self._takes_part(axis):
            return
        start, launch, groups = self.launched(), self.host, self.groups[axis]
        self.host = self.host + COLLECTIVE_LAUNCH_S
        begin = np.maximum(start, groups.from_root(start))
        slow = groups.slowness(self.machine, begin)
        self.device = begin + groups.seconds("broadcast", num_bytes) * slow
        what, times = (axis, "broadcast", num_bytes), (start, self.device, launch)
        self.note_collective(what, Track.COMMUNICATION, times, self.of_pass())

    def _takes_part(self, axis: str) -> bool:
        return self.groups[axis].size > 1

    def _meet(
        self, axis: str, op: str, num_bytes: float, start: Floats, skew: Floats | float
    ) -> Floats:
        groups = self.groups[axis]
        last = groups.most(start)
        noise = np.exp(self.job.disorder.network_sigma * self._network.standard_normal(self.size))
        seconds = groups.seconds(op, num_bytes) * groups.most(np.atleast_2d(noise * skew))
        end = last + seconds * groups.slowness(self.machine, last)
        if self.machine.iteration == 1 and axis not in self._connected:
            self._connected.add(axis)
            end = end + self.job.disorder.connect_s
        return np.asarray(end + self._network.exponential(LEAVE_S, self.size))

    def note_collective(
        self,
        what: tuple[str, str, int],
        track: Track,
        times: Times,
        arguments: Mapping[str, int | str],
        sizes: Ints | None = None,
    ) -> None:
        """Record a collective: its axis, operation and bytes."""
        axis, op, num_bytes = what
        if self.recording is None or not self.recording.wants_collective(axis):
            return
        sequence = self._counter[axis, op]
        self._counter[axis, op] += 1
        own = {**arguments, "op": op, "sequence": sequence, "size_bytes": num_bytes}
        start, end, launch = (each[0] for each in times)
        entry = Entry(Kind.COLLECTIVE, op, track, own, start, end, launch, axis, size_bytes=sizes)
        self.recording.add(self.number, entry)

    def of_pass(self) -> dict[str, int | str]:
        """Return the arguments of the pass, or of the iteration outside of any."""
        return self.context


def _groups_of(job: Job, stage: int) -> dict[str, Groups]:
    layout, size = job.layout, job.stage_size
    splits = {
        "tp": (size // layout.tp, layout.tp, 1),
        "cp": (layout.dp, layout.cp, layout.tp),
        "dp_cp": (1, layout.dp * layout.cp, layout.tp),
        "ep": (size // layout.ep, layout.ep, 1),
        "tp_ep": (size // layout.ep, layout.ep, 1),
        "expt_dp": (1, size // layout.ep, layout.ep),
    }
    return {axis: Groups(job, stage, axis, split) for axis, split in splits.items()}
