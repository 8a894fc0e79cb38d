"""Run a stage's host threads and devices: queues of launches, streams, groups and messages.

All ranks of a stage run the same operations, so each operation is one step for all of them, in all
variants of the job: times are (variant, lane) arrays of seconds. A host launches ahead of its
device; a device begins an operation when it is launched and the one before is done:

    host    |l1|l2|l3|            waits for nobody but at its own synchronisations
    device     |--- 1 ---|-- 2 --|- 3 -|      a late launch leaves a gap before it

A collective lasts from its own begin until its last member has come, and the transfer after that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.grounds.incidents.hardware import NIC_LATENCY_S, NVLINK_LATENCY_S, Floats, Integers
from benchmarks.grounds.incidents.jobs import Job
from benchmarks.grounds.incidents.model import Work, total
from benchmarks.grounds.incidents.schedule import Message
from benchmarks.grounds.incidents.troubles import Conditions

Program = Generator[None, None, None]

_BLOCK = 2048
"""Draws of jitter that are made at once."""
_GRIDS_OF_TOKENS = 256
"""Kernels with at least so many blocks have some for every few tokens; products' are persistent."""
_FULL_COLLECTION = "gc-generation-2"
_SMALL_COLLECTIONS = 0.15
"""Share of passes in which Python collects its youngest objects."""
_LEAVE_S = 2e-6
"""How far apart the members of a collective leave it."""
_MARK_S = 3e-6  # an event holds its stream up for that long


class Spec(NamedTuple):
    """What a span is, the same on all ranks of a stage."""

    kind: str
    name: str
    track: int
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    phase: str = ""
    op: str = ""
    axis: str = ""
    sequence: int = -1
    size: int = -1
    peer_stage: int = -1
    direction: str = ""
    grid: int = 0
    block: int = 0
    stream: str = ""


class Span(NamedTuple):
    """A span of all ranks of a stage: begin, end and launch (lane,), of the job as it was."""

    spec: Spec
    iteration: int
    begin: Floats
    end: Floats
    launch: Floats | None
    sizes: Integers | None = None
    whom: Floats | None = None  # not 0 on lanes that have it; None: all


class Mark(NamedTuple):
    """A moment on the device, and when the host launched it, (lane,)."""

    at: Floats
    launch: Floats


class Hub:
    """Hold what stages have posted for each other until the counterpart has."""

    def __init__(self, job: Job, rng: np.random.Generator) -> None:
        self._job = job
        self._rng = rng
        self._posted: dict[tuple[object, ...], tuple[Floats, Floats]] = {}
        self._ends: dict[object, Floats] = {}
        domains, lanes = job.cluster.domains, job.lanes
        stages = job.layout.pp
        self._near = {
            (a, b): np.array(
                [domains[a * lanes + lane] == domains[b * lanes + lane] for lane in range(lanes)]
            )
            for a in range(stages)
            for b in range(stages)
        }

    def clear(self) -> None:
        """Forget an iteration."""
        self._posted.clear()
        self._ends.clear()

    def near(self, one: int, other: int) -> Floats:
        """Return which lanes of two stages NVLink joins, 1 or 0."""
        return self._near[one, other].astype(float)

    def post(self, key: tuple[object, ...], begin: Floats, slow: Floats) -> None:
        """Note that a side has come at `begin`, with links that are `slow` times slower."""
        self._posted[key] = begin, slow

    def has(self, *keys: tuple[object, ...]) -> bool:
        """Tell whether all of these have been posted."""
        return all(key in self._posted for key in keys)

    def posted(self, key: tuple[object, ...]) -> tuple[Floats, Floats]:
        """Return what was posted."""
        return self._posted[key]

    def end_of(self, message: Message, num_bytes: float) -> Floats:
        """Return when a message is done, whose both ends have been posted."""
        if message not in self._ends:
            (one, slow), (other, slower) = self._posted[message, "s"], self._posted[message, "r"]
            near = self._near[message.sender, message.receiver]
            cluster = self._job.cluster
            rate = np.where(near, cluster.nvlink_bytes_per_s, cluster.nic_bytes_per_s)
            latency = np.where(near, NVLINK_LATENCY_S, NIC_LATENCY_S)
            noise = np.exp(self._job.noise.link_sigma * self._rng.standard_normal(len(near)))
            seconds = latency + num_bytes / rate * np.maximum(slow, slower) * noise
            self._ends[message] = np.maximum(one, other) + seconds
        return self._ends[message]


class Groups:
    """The process groups of a stage's lanes: members of each axis, and what links they use."""

    def __init__(self, job: Job, stage: int) -> None:
        layout, lanes = job.layout, job.lanes
        grid = np.arange(lanes)
        cube = grid.reshape(layout.dp, layout.cp, layout.tp)
        self.members: dict[str, Integers] = {
            "tp": grid.reshape(-1, layout.tp),
            "cp": cube.transpose(0, 2, 1).reshape(-1, layout.cp),
            "dp": cube.transpose(1, 2, 0).reshape(-1, layout.dp),
            "dp_cp": grid.reshape(-1, layout.tp).T,
            "ep": grid.reshape(-1, layout.ep),
            "expt_dp": grid.reshape(-1, layout.ep).T,
            "all": grid[None, :],
        }
        own = list(job.ranks_of(stage))
        hosts, domains = job.cluster.hosts[own], job.cluster.domains[own]
        if job.trainer == "hsdp":
            shard = max(int((hosts == hosts[0]).sum()), 2)
            self.members["shard"] = grid.reshape(-1, shard)
            self.members["replicate"] = grid.reshape(-1, shard).T
        self.group_of: dict[str, Integers] = {}
        self.crosses: dict[str, bool] = {}
        self.per_host: dict[str, int] = {}
        for axis, members in self.members.items():
            place = np.zeros(lanes, dtype=np.int64)
            place[members] = np.arange(len(members))[:, None]
            self.group_of[axis] = place
            counts = [np.unique(domains[row], return_counts=True)[1] for row in members]
            self.crosses[axis] = any(len(count) > 1 for count in counts)
            self.per_host[axis] = max(1, min(int(count.min()) for count in counts))

    def size(self, axis: str) -> int:
        """Return how many members a group of an axis has."""
        return int(self.members[axis].shape[1])

    def most(self, values: Floats, axis: str) -> Floats:
        """Return the largest value among each lane's group, (…, lane)."""
        if axis == "all":
            return np.broadcast_to(values.max(-1, keepdims=True), values.shape)
        largest: Floats = values[..., self.members[axis]].max(-1)
        return largest[..., self.group_of[axis]]


class Stage:
    """The hosts and devices of one stage's ranks, and what they have done."""

    def __init__(
        self, job: Job, number: int, hub: Hub, conditions: Conditions, num_variants: int
    ) -> None:
        self.job, self.number, self.hub = job, number, hub
        self.conditions = conditions
        self.ranks = np.array(job.ranks_of(number))
        self.groups = Groups(job, number)
        shape = num_variants, job.lanes
        self.host, self.device, self.busy = np.zeros((3, *shape))
        self.loaded = np.zeros(shape)
        self.streams: dict[str, Floats] = {}
        self.spans: list[Span] = []
        self.keeps = True
        self.iteration = 0
        self.rates: dict[str, Floats] = {}
        self._whole: dict[str, Floats] = {}
        self._slow: dict[tuple[str, str], Floats] = {}
        self._rng = np.random.default_rng([job.seed, 7, number])
        self._blocks: dict[str, tuple[Floats, int]] = {}
        self._totals: dict[int, tuple[float, float, Work]] = {}
        self._sequences: dict[tuple[str, ...], int] = {}
        self._late: list[tuple[Message, str, Spec, Floats, Floats, int]] = []
        self.congestion = 1.0
        self.extra = 1.0

    def begin(self, iteration: int) -> None:
        """Begin an iteration: sequence numbers start again."""
        self.iteration = iteration
        self._sequences.clear()
        self.busy = np.zeros_like(self.busy)

    def enter(self, place: int, number: int) -> None:
        """Take the rates of a pass, and stop what stops at its begin."""
        whole = self.conditions.rates(place, number)
        if whole is not self._whole:
            self._whole = whole
            self.rates = {name: values[:, self.ranks] for name, values in whole.items()}
            self._slow.clear()
        for trouble, whom in self.conditions.stops(place, number):
            own = whom[:, self.ranks]
            length = np.exp(0.2 * self._draws("stop", 1.0))
            if trouble.freeze_s:
                self.device = self.device + own * trouble.freeze_s * length
                self.busy += own * trouble.freeze_s * length
            if trouble.pause_s and own.any():
                name = _FULL_COLLECTION if trouble.cause == "gc" else ""
                self.pause(own * trouble.pause_s * length, name)
        if self._rng.random() < _SMALL_COLLECTIONS:
            self.pause(np.full(self.job.lanes, 1.5e-4), "gc-generation-0")

    def pause(self, seconds: Floats, name: str) -> None:
        """Stop hosts for some time; a collection of garbage leaves a span of this name."""
        begin, seconds = self.host, np.broadcast_to(seconds, self.host.shape)
        self.host = self.host + seconds
        if name and self.keeps:
            spec = Spec("gc", name, 3)
            self.spans.append(
                Span(spec, self.iteration, begin[0], self.host[0], None, None, seconds[0])
            )

    def _draws(self, name: str, sigma: float) -> Floats:
        """Return the next standard-normal draws of a kind, (lane,), times sigma."""
        block, at = self._blocks.get(name, (None, _BLOCK))
        if block is None or at >= len(block):
            block, at = self._rng.standard_normal((_BLOCK // 4, self.job.lanes)), 0
        self._blocks[name] = block, at + 1
        return np.asarray(block[at] * sigma)

    def jitter(self) -> Floats:
        """Return factors of the next kernels, (lane,): log-normal, with a heavy tail."""
        block, at = self._blocks.get("kernel", (None, _BLOCK))
        if block is None or at >= len(block):
            noise, shape = self.job.noise, (_BLOCK // 4, self.job.lanes)
            block, at = np.exp(noise.sigma * self._rng.standard_normal(shape)), 0
            tails = self._rng.random(shape) < noise.tail_share
            block = block * np.where(tails, 1 + noise.tail * self._rng.exponential(1, shape), 1.0)
        self._blocks["kernel"] = block, at + 1
        return np.asarray(block[at])

    def mark(self) -> Mark:
        """Return this moment of the device's stream, as an event would."""
        return Mark(np.maximum(self.device, self.host)[0], self.host[0])

    def keep(self, spec: Spec, since: Mark) -> None:
        """Keep a span that began at a mark and ends now."""
        if self.keeps:
            end = self.mark().at
            self.spans.append(Span(spec, self.iteration, since.at, end, since.launch))

    def add_host(self, spec: Spec, begin: Floats, whom: Floats | None = None) -> None:
        """Keep a span of the host's own time that ends now."""
        if self.keeps:
            self.spans.append(Span(spec, self.iteration, begin[0], self.host[0], None, None, whom))

    def launch(self, seconds: float) -> Floats:
        """Spend the host's time of a launch; return when the device may begin."""
        noise = np.exp(self._draws("host", self.job.noise.host_sigma))
        self.host = self.host + seconds * noise * self.rates["host"]
        return np.maximum(self.device, self.host)

    def compute(self, work: Work, launch_s: float, scale: Floats | float, spec: Spec) -> None:
        """Launch a module's kernels and run them; `scale` is how much work the data make of it."""
        if self.job.tracing.profile:
            for kernel in work:
                single = spec._replace(
                    kind="kernel", name=kernel.name, grid=kernel.grid, block=kernel.block
                )
                self._run((kernel.flop_s, kernel.memory_s), launch_s, 1, scale, single)
                if kernel.grid >= _GRIDS_OF_TOKENS and isinstance(scale, np.ndarray) and self.keeps:
                    grid = np.rint(kernel.grid * np.broadcast_to(scale, self.host.shape)[0])
                    self.spans[-1] = self.spans[-1]._replace(sizes=grid.astype(np.int64))
            return
        known = self._totals.get(id(work))
        if known is None:
            known = self._totals[id(work)] = (*total(work), work)
        self._run(known[0:2], launch_s, len(work), scale, None)

    def _run(
        self,
        costs: tuple[float, float],
        launch_s: float,
        num_kernels: int,
        scale: Floats | float,
        spec: Spec | None,
    ) -> None:
        seconds = costs[0] * self.rates["flop"] + costs[1] * self.rates["memory"]
        seconds = seconds * (scale * self.jitter() * self.extra)
        if self.job.noise.interference and self.streams:
            begin = np.maximum(self.device, self.host)
            beside = np.max([end > begin for end in self.streams.values()], axis=0)
            seconds = seconds * (1 + self.job.noise.interference * beside)
        begin = self.launch(launch_s)
        if num_kernels > 1:  # the last kernel cannot begin before it is launched
            self.launch(launch_s * (num_kernels - 1))
            end = np.maximum(begin + seconds, self.host + seconds / num_kernels)
        else:
            end = begin + seconds
        self.device = end + _MARK_S
        self.busy += seconds
        if spec is not None and self.keeps:
            self.spans.append(Span(spec, self.iteration, begin[0], end[0], self.host[0]))

    def _slowness(self, axis: str, link: str) -> Floats:
        """Return how much slower the links of each lane's group are, by its slowest member."""
        key = axis, link
        if key not in self._slow:
            self._slow[key] = self.groups.most(self.rates[link], axis)
        return self._slow[key]

    def transfer_s(self, op: str, axis: str, num_bytes: float) -> Floats:
        """Return how long a collective's transfer takes, (variant, lane).

        Rings of `num_bytes` (the whole tensor) over n members move (n - 1) / n of it per link,
        twice to reduce and gather. Rings over several hosts use all NICs of the members' GPUs.
        """
        size, crosses = self.groups.size(axis), self.groups.crosses[axis]
        cluster = self.job.cluster
        moved = num_bytes * (size - 1) / size * (2 if op == "all_reduce" else 1)
        link = "nic" if crosses else "nvlink"
        rate = cluster.nvlink_bytes_per_s
        if crosses:
            per_host = 1 if op == "all_to_all" else self.groups.per_host[axis]
            rate = min(rate, per_host * cluster.nic_bytes_per_s)
        latency = (NIC_LATENCY_S if crosses else NVLINK_LATENCY_S) * (1 + np.log2(size) / 2)
        noise = np.exp(self._draws("link", self.job.noise.link_sigma))
        noise = noise[self.groups.members[axis][:, 0]][self.groups.group_of[axis]]
        seconds = latency + moved / rate * self._slowness(axis, link) * noise
        if crosses:
            seconds = seconds * self.congestion
        share, stall_s = self.job.noise.stalls
        if share and self._rng.random() < share:
            seconds = seconds + stall_s * self._rng.exponential()
        return np.asarray(seconds)

    def sequence(self, op: str, axis: str) -> int:
        """Return the running number of an operation of a group in this iteration."""
        number = self._sequences.get((op, axis), 0)
        self._sequences[op, axis] = number + 1
        return number

    def collective(
        self,
        spec: Spec,
        num_bytes: float,
        *,
        stream: str = "",
        after: str = "",
        sizes: Integers | None = None,
    ) -> None:
        """Run a collective on the compute stream, or beside it on a stream of its own.

        `num_bytes` is the whole tensor; `after`: not before what this stream has done so far.
        """
        if self.groups.size(spec.axis) < 2:
            return
        begin = self.launch(self.job.cluster.chip.launch_us * 4e-6)
        launch = self.host[0]
        if stream:
            begin = np.maximum(begin, self.streams.get(stream, begin))
        if after:
            begin = np.maximum(begin, self.streams.get(after, begin))
        end = self.groups.most(begin, spec.axis) + self.transfer_s(spec.op, spec.axis, num_bytes)
        end = end + np.abs(self._draws("leave", _LEAVE_S))
        if stream:
            self.streams[stream] = end
        else:
            self.device = end
        if self.keeps:
            numbered = spec._replace(sequence=self.sequence(spec.op, spec.axis), stream=stream)
            if sizes is not None:
                numbered = numbered._replace(size=-1)
            self.spans.append(Span(numbered, self.iteration, begin[0], end[0], launch, sizes))

    def wait(self, stream: str) -> None:
        """Let the compute stream wait for another one."""
        if stream in self.streams:
            self.device = np.maximum(self.device, self.streams[stream])

    def synchronise(self) -> None:
        """Let the host wait for its device."""
        self.host = np.maximum(self.host, self.device)

    def _link_to(self, other: int) -> Floats:
        near = self.hub.near(self.number, other)
        return near * self.rates["nvlink"] + (1 - near) * self.rates["nic"] * self.congestion

    def _message_spec(self, message: Message, track: int, num_bytes: int) -> Spec:
        sends = message.is_sent_by(self.number)
        peer = message.receiver if sends else message.sender
        role = "send" if sends else "recv"
        return Spec(
            "p2p",
            f"{role}_{message.direction}",
            track,
            microbatch=message.microbatch,
            op=role,
            axis="pp",
            sequence=self.sequence(f"{role}{peer}", message.direction),
            size=num_bytes,
            peer_stage=peer,
            direction=message.direction,
        )

    def exchange(self, messages: Sequence[Message], num_bytes: int, chunk: int) -> Program:
        """Send and receive in one batch, for which the device (and the host) waits."""
        if not messages:
            return
        begin = self.launch(self.job.cluster.chip.launch_us * 8e-6)
        launch = self.host[0]
        for one in messages:
            side = "s" if one.is_sent_by(self.number) else "r"
            self.hub.post((one, side), begin, self._link_to(self._peer(one)))
        while not self.hub.has(*((one, side) for one in messages for side in "sr")):
            yield
        for one in messages:
            self.device = np.maximum(self.device, self.hub.end_of(one, num_bytes))
        if self.job.syncs_messages:
            self.synchronise()
        for one in messages:
            spec = self._message_spec(one, 2, num_bytes)._replace(chunk=chunk)
            if self.keeps:
                self.spans.append(Span(spec, self.iteration, begin[0], self.device[0], launch))

    def _peer(self, message: Message) -> int:
        return message.receiver if message.is_sent_by(self.number) else message.sender

    def post(self, message: Message | None, num_bytes: int, chunk: int) -> None:
        """Send, or get ready to receive, beside computing."""
        if message is None:
            return
        side = "s" if message.is_sent_by(self.number) else "r"
        begin = self.launch(self.job.cluster.chip.launch_us * 4e-6)
        self.hub.post((message, side), begin, self._link_to(self._peer(message)))
        spec = self._message_spec(message, 4, num_bytes)._replace(chunk=chunk)
        self._late.append((message, side, spec, begin[0], self.host[0], num_bytes))

    def receive(self, message: Message | None, num_bytes: int) -> Program:
        """Wait for what was posted before."""
        if message is None:
            return
        while not self.hub.has((message, "s"), (message, "r")):
            yield
        self.device = np.maximum(self.device, self.hub.end_of(message, num_bytes))

    def meet(
        self, spec: Spec, key: str, stages: Sequence[int], axis: str, seconds: float
    ) -> Program:
        """Run a small collective over stages, and over a group of each stage's lanes."""
        begin = self.launch(self.job.cluster.chip.launch_us * 4e-6)
        launch = self.host[0]
        self.hub.post((key, self.number), begin, begin)
        while not self.hub.has(*((key, stage) for stage in stages)):
            yield
        come = np.max([self.hub.posted((key, stage))[0] for stage in stages], axis=0)
        self.device = self.groups.most(come, axis) + seconds if axis else come + seconds
        if self.keeps:
            numbered = spec._replace(sequence=self.sequence(spec.op, spec.axis))
            self.spans.append(Span(numbered, self.iteration, begin[0], self.device[0], launch))

    def finish(self) -> None:
        """Keep the spans of messages that ran beside computing, when all stages are done."""
        for message, _, spec, begin, launch, num_bytes in self._late:
            end = self.hub.end_of(message, num_bytes)[0]
            if self.keeps:
                self.spans.append(Span(spec, self.iteration, begin, end, launch))
        self._late.clear()
