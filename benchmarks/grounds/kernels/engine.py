"""Run a job's traced iterations on paper: every rank's device, host thread and communication
stream.

A stage's ranks go through one list of operations; each operation moves arrays of times over
(iteration, expert replica, expert member, tensor member) at once, traced iterations being
independent of each other but for conditions that last. A kernel starts when the device is free and
its launch has been made; a collective ends for all members a transfer after the last has come; a
message needs both ends. Stages advance until one waits for a message that has not been posted, as
in any discrete-event simulation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from benchmarks.grounds.kernels.cluster import Conditions, Flags, Noise, Numbers
from benchmarks.grounds.kernels.job import Exchange, Job, Kernels, Message, Pass, schedule
from megascan.schema import Kind, Track

LAUNCH_LATENCY_NS = 4000.0  # from the launch call to the kernel's start on an idle device
STAMP_NS = 2000.0  # the host's stamp of a launch is taken this much after it
QUEUE_OPERATIONS = 48  # how far the host can run ahead of the device
COLLECTIVE_ALPHA_NS = 9000.0
NETWORK_ALPHA_NS = 22000.0
MESSAGE_ALPHA_NS = 12000.0
BATCH_NS = 2.5e5
YOUNG_COLLECTION_NS = 1e5
YOUNG_COLLECTION_PROBABILITY = 0.05  # of a pass

Key: TypeAlias = tuple[int, int, str, int]
"""(own stage, peer, what, running number) of one half of a message."""

Labels = Mapping[str, int | str]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Hold one span of all ranks of a stage; times are from the iteration's zero, (iteration,
    rank…).
    """

    stage: int
    kind: Kind
    name: str
    track: Track
    start_ns: Numbers
    end_ns: Numbers
    labels: Labels
    axis: str = ""  # of the group, where the span is communication
    launch_ns: Numbers | None = None
    present: Flags | None = None  # where only some iterations and ranks have it


@dataclass(kw_only=True)
class Stage:
    """Keep where the ranks of one stage are in time."""

    number: int
    device: Numbers
    host: Numbers
    stream: Numbers  # of asynchronous collectives
    history: deque[Numbers] = field(default_factory=lambda: deque(maxlen=QUEUE_OPERATIONS))
    sequences: Counter[tuple[str, ...]] = field(default_factory=Counter)


AXES = {
    "tp": (3,),
    "ep": (2,),
    "dp": (1, 2),
    "dp_cp": (1, 2),
    "expt_dp": (1,),
    "tp_ep": (2, 3),
}
"""Which dimensions of a stage's arrays the members of a group differ in."""


class Engine:
    """Executes one job under given conditions; `operations` are its spans, `begins_ns` its
    iterations.
    """

    def __init__(
        self, job: Job, noise: Noise, now: Conditions, seed: int, begins_ns: Numbers
    ) -> None:
        self.job, self.noise, self.now = job, noise, now
        self.draw = np.random.default_rng([seed, 2])
        self.pause_draw = np.random.default_rng([seed, 3])
        self.begins_ns = begins_ns[:, None, None, None]
        self.shape = (len(job.iterations), *job.grid[1:])
        self.operations: list[Operation] = []
        self.transfers_ns: dict[Key, Numbers] = {}
        self.hosts = np.reshape(job.hosts, job.grid)
        self.passes_ns = np.zeros((len(job.iterations), *job.grid))
        self._in_pass = False
        self.stages = [self._begin(number) for number in range(job.pp)]
        self.start_ns = np.stack([stage.device for stage in self.stages], axis=1)
        self.iteration_ns = self._run()

    def _begin(self, number: int) -> Stage:
        """Start where the optimizer of the iteration before has ended, each rank by itself."""
        own = self.job.optimizer.memory_ns * self.now.memory[:, number]
        start = own + 2e5 * np.exp(0.3 * self.draw.standard_normal(self.shape))
        return Stage(number=number, device=start, host=start.copy(), stream=start.copy())

    def _run(self) -> Numbers:
        """Run all passes, then what follows them; return (iteration, stage, …) iteration times."""
        begins = [stage.device.copy() for stage in self.stages]
        self._run_passes()
        self._finish()
        for stage, begin in zip(self.stages, begins, strict=True):
            times = (begin, stage.device)
            self._add(stage, Kind.ITERATION, "iteration", times, {})
        ends = np.stack([stage.device for stage in self.stages], axis=1)
        return np.asarray(ends - np.stack(begins, axis=1), dtype=np.float64)

    def _run_passes(self) -> None:
        waiting = [deque(schedule(self.job, stage.number)) for stage in self.stages]
        posted: dict[Key, Numbers] = {}
        open_exchanges: list[list[tuple[Message, Key]] | None]
        open_exchanges = [None] * self.job.pp
        while any(waiting):
            moved = False
            for stage, actions in zip(self.stages, waiting, strict=True):
                while actions:
                    action = actions[0]
                    if isinstance(action, Pass):
                        self._pass(stage, action)
                    else:
                        halves = open_exchanges[stage.number]
                        if halves is None:
                            halves = self._post(stage, action, posted)
                            open_exchanges[stage.number] = halves
                            moved = True
                        if not all(_other_end(key) in posted for _, key in halves):
                            break
                        self._complete(stage, halves, posted)
                        open_exchanges[stage.number] = None
                    actions.popleft()
                    moved = True
            if not moved:
                raise RuntimeError(f"the schedule of {self.job.name} cannot go on")

    def _post(
        self,
        stage: Stage,
        exchange: Exchange,
        posted: dict[Key, Numbers],
    ) -> list[tuple[Message, Key]]:
        """Put both halves' times down under (own stage, peer, what, running number)."""
        stage.host = stage.host + 3 * self.job.launch_ns * self.now.launch[:, stage.number]
        start = np.maximum(stage.device, stage.host + LAUNCH_LATENCY_NS)
        halves = []
        for message in exchange:
            what = f"{message.direction} {'send' if message.sends else 'recv'}"
            running = (what, str(message.peer))
            key = (stage.number, message.peer, what, stage.sequences[running])
            stage.sequences[running] += 1
            posted[key] = start
            halves.append((message, key))
        return halves

    def _complete(
        self,
        stage: Stage,
        halves: list[tuple[Message, Key]],
        posted: dict[Key, Numbers],
    ) -> None:
        """End an exchange when all its messages have gone over; the trainer then waits for the
        device.
        """
        start = posted[halves[0][1]]
        end = start
        for message, key in halves:
            arrived = np.maximum(start, posted[_other_end(key)])
            sender = key if message.sends else _other_end(key)
            if sender not in self.transfers_ns:
                self.transfers_ns[sender] = self._message_ns(stage, message)
            end = np.maximum(end, arrived + self.transfers_ns[sender])
        launch = stage.host.copy()
        stage.device = end
        stage.host = end + 15000.0 * self.now.launch[:, stage.number]
        for message, key in halves:
            op = "send" if message.sends else "recv"
            labels: dict[str, int | str] = {
                "microbatch": message.microbatch,
                "chunk": message.chunk,
                "op": op,
                "peer_stage": message.peer,
                "direction": message.direction,
                "sequence": key[3],
                "size_bytes": self.job.activation_bytes,
            }
            name = f"{op}_{message.direction}"
            self._add(
                stage, Kind.P2P, name, (start, end), labels,
                axis="pp", launch=launch,
            )  # fmt: skip

    def _message_ns(self, stage: Stage, message: Message) -> Numbers:
        """Return how long a message takes over the slower of both ends' links."""
        here, there = stage.number, message.peer
        inside = self.hosts[here] == self.hosts[there]
        nvlink = np.minimum(self.now.nvlink[:, here], self.now.nvlink[:, there]) * 0.5
        nic = np.minimum(self.now.nic[:, here], self.now.nic[:, there])
        speed = np.where(inside, nvlink, nic)
        wobble = np.exp(self.noise.link_ratio * self.draw.standard_normal(self.shape))
        return np.asarray(MESSAGE_ALPHA_NS + self.job.activation_bytes / speed * wobble)

    def _pass(self, stage: Stage, work: Pass) -> None:
        self._strike_host(stage)
        self._in_pass = True
        if work.direction == "forward":
            Passes(self, stage, work).forward()
        else:
            Passes(self, stage, work).backward()
        self._in_pass = False

    def _strike_host(self, stage: Stage) -> None:
        """Take the core from the host threads: jitter of a healthy host, and pauses of an ailing
        one.
        """
        shape = self.shape
        hit = self.draw.random(shape) < self.noise.jitter_probability
        stage.host = stage.host + hit * self.draw.exponential(self.noise.jitter_ns, shape)
        small = self.draw.random(shape) < YOUNG_COLLECTION_PROBABILITY
        self._stop(stage, "gc", small, YOUNG_COLLECTION_NS * self.draw.gamma(9, 1 / 9, shape))
        for pauses in self.now.pauses:
            struck = self.pause_draw.random(shape) < pauses.probability
            length = pauses.pause_ns * self.pause_draw.gamma(3, 1 / 3, shape)
            self._stop(stage, pauses.kind, pauses.where[:, stage.number] & struck, length)

    def _stop(self, stage: Stage, kind: str, struck: Flags, length_ns: Numbers) -> None:
        """Stop some host threads; the interpreter's garbage collector says that it was the one."""
        times = (stage.host, stage.host + struck * length_ns)
        if kind == "gc":
            generation = 2 if length_ns.mean() > 10 * YOUNG_COLLECTION_NS else 0
            name = f"gc-generation-{generation}"
            self._add(stage, Kind.GC, name, times, {}, present=struck)
        stage.host = times[1]

    def _finish(self) -> None:
        """Reduce gradients, agree on their norm, update the parameters."""
        marks = []
        for stage in self.stages:
            begin = stage.device.copy()
            launch = stage.host.copy()
            self._reduce_gradients(stage)
            marks.append((begin, launch))
        self._tied_embeddings()
        for stage, (begin, launch) in zip(self.stages, marks, strict=True):
            times = (begin, stage.device)
            self._add(stage, Kind.OPTIMIZER, "grad-sync", times, {}, launch=launch)
        begins = [stage.device + 3000.0 for stage in self.stages]
        launches = [stage.host.copy() for stage in self.stages]
        self._agree_on_norm()
        for stage, begin, launch in zip(self.stages, begins, launches, strict=True):
            self.kernels(stage, self.job.optimizer)
            if self.job.distributed_optimizer and not self.job.fsdp:
                self._gather_parameters(stage)
            times = (begin, stage.device)
            self._add(stage, Kind.OPTIMIZER, "optimizer", times, {}, launch=launch)

    def _reduce_gradients(self, stage: Stage) -> None:
        if not (self.job.overlap_gradients or self.job.fsdp):
            self.kernels(stage, Kernels(memory_ns=2e5, launches=6))
            self.reduce(stage, self.job.dense_parameters * 4, "dp_cp", overlapped=False, labels={})
            if self.job.experts:
                self.reduce(
                    stage, self.job.expert_parameters * 4, "expt_dp", overlapped=False, labels={}
                )
        stage.device = np.maximum(stage.device, stage.stream)

    def reduce(
        self, stage: Stage, size: float, axis: str, *, overlapped: bool, labels: Labels
    ) -> None:
        """Reduce gradients over a group; shares of them with a distributed optimizer."""
        scatter = self.job.distributed_optimizer or self.job.fsdp
        op = "reduce_scatter" if scatter else "all_reduce"
        self.collective(stage, op, axis, size, labels, overlapped=overlapped)

    def _gather_parameters(self, stage: Stage) -> None:
        self.collective(
            stage, "all_gather", "dp_cp", self.job.dense_parameters * 2 / self.job.dp, {}
        )
        if self.job.experts:
            share = self.job.expert_parameters * 2 / (self.job.dp // self.job.ep)
            self.collective(stage, "all_gather", "expt_dp", share, {})

    def _tied_embeddings(self) -> None:
        if self.job.pp > 1:
            ends = (self.stages[0], self.stages[-1])
            size = self.job.vocabulary * self.job.hidden * 4 // self.job.tp
            self._across(ends, "all_reduce", "embd", size, each_rank=True)

    def _agree_on_norm(self) -> None:
        for stage in self.stages:
            self.kernels(stage, Kernels(memory_ns=4e5, launches=8))
        axis = "world" if self.job.fsdp or self.job.pp == 1 else "intra_dist_opt"
        self._across(tuple(self.stages), "all_reduce", axis, 4, each_rank=False)
        for stage in self.stages:
            stage.host = np.maximum(stage.host, stage.device + 8000.0)

    def _across(
        self, stages: tuple[Stage, ...], op: str, axis: str, size: int, *, each_rank: bool
    ) -> None:
        """Run a collective of several stages: of all ranks, or of each with its counterparts."""
        starts = np.stack([self._launched(stage, 4) for stage in stages])
        arrived = starts.max(axis=0 if each_rank else (0, 2, 3, 4), keepdims=True)[0]
        first, last = stages[0].number, stages[-1].number
        inside = (self.hosts[first] == self.hosts[last]) if each_rank else self.hosts.max() == 0
        links = [np.where(inside, self.now.nvlink[:, stage.number], self.now.nic[:, stage.number])
                 for stage in stages]  # fmt: skip
        speed = np.min(links, axis=0)
        alpha = NETWORK_ALPHA_NS * np.log2(1 + self.hosts.max() + len(stages))
        end = arrived + alpha + 2 * size / speed * (1 - 1 / len(stages))
        if not each_rank:
            end = np.broadcast_to(end.max(axis=(1, 2, 3), keepdims=True), self.shape)
        for stage, start in zip(stages, starts, strict=True):
            own_end = end + self.draw.exponential(800.0, self.shape)
            self._communicate(stage, (op, axis), size, (start, own_end), {})
            stage.device = own_end

    def kernels(
        self,
        stage: Stage,
        work: Kernels,
        tokens: Numbers | float = 1.0,
    ) -> tuple[Numbers, Numbers]:
        """Run kernels on the device; return their start there and their launch on the host."""
        number = stage.number
        launch = stage.host
        start = np.maximum(stage.device, launch + LAUNCH_LATENCY_NS)
        noise = self.draw.standard_normal((3, *self.shape))
        clock = self.now.compute[:, number]
        for bursts in self.now.bursts:
            if bursts.where[number].any():
                clock = clock * bursts.now(number, self.begins_ns + start)
        products = (work.products_ns + work.core_ns * tokens) * tokens
        length = products * clock * np.exp(self.noise.kernel_ratio * noise[0])
        bound = work.memory_ns * tokens * self.now.memory[:, number]
        length = length + bound * np.exp(0.7 * self.noise.kernel_ratio * noise[1])
        spike = self.draw.random(self.shape) < self.noise.spike_probability
        length = np.where(spike, length * (1 + np.abs(noise[1])), length)
        one_ns = self.job.launch_ns * self.now.launch[:, number]
        one_ns = one_ns * np.exp(self.noise.launch_ratio * noise[2])
        stage.host = launch + work.launches * one_ns
        last_ns = length / work.launches
        end = np.maximum(start + length, stage.host - one_ns + LAUNCH_LATENCY_NS + last_ns)
        if self._in_pass:
            self.passes_ns[:, number] += end - stage.device
        stage.device = end
        if len(stage.history) == QUEUE_OPERATIONS:
            stage.host = np.maximum(stage.host, stage.history[0])
        stage.history.append(end)
        return start, launch

    def _launched(self, stage: Stage, launches: int, *, overlapped: bool = False) -> Numbers:
        """Return when a collective starts on the device, and let the host pay for its launch."""
        begin = np.maximum(
            stage.stream if overlapped else stage.device, stage.host + LAUNCH_LATENCY_NS
        )
        if overlapped:
            begin = np.maximum(begin, stage.device)
        cost = launches * self.job.launch_ns * self.now.launch[:, stage.number]
        stage.host = stage.host + cost
        return begin

    def collective(
        self,
        stage: Stage,
        op: str,
        axis: str,
        size: float,
        labels: Labels,
        *,
        overlapped: bool = False,
        ahead: Numbers | None = None,
        load: Numbers | None = None,
    ) -> None:
        """Run a collective within a stage, on the device's order of work or on a stream beside it.

        `ahead` is when it may start at the earliest where it does not wait for the device (a
        prefetch); `load` makes the bytes of some members more.
        """
        axes = AXES[axis]
        if all(self.shape[each] == 1 for each in axes):
            return
        launch = stage.host.copy()
        start = self._launched(stage, 3, overlapped=overlapped and ahead is None)
        if ahead is not None:
            start = np.maximum(stage.stream, np.maximum(ahead, launch + LAUNCH_LATENCY_NS))
        arrived = start.max(axis=axes, keepdims=True)
        moved = self._moved_ns(stage, op, axes, size, load)
        end = arrived + moved + self.draw.exponential(700.0, self.shape)
        self._communicate(
            stage, (op, axis), size, (start, end), labels, launch=launch, overlapped=overlapped
        )
        if overlapped:
            stage.stream = end
        else:
            stage.device = end

    def _moved_ns(
        self, stage: Stage, op: str, axes: tuple[int, ...], size: float, load: Numbers | None
    ) -> Numbers:
        """Return how long a transfer takes: latency, and bytes over the slowest member's link."""
        members = int(np.prod([self.shape[each] for each in axes]))
        hosts = self.hosts[stage.number][None]
        crosses = hosts.max(axis=axes, keepdims=True) != hosts.min(axis=axes, keepdims=True)
        nvlink = self.now.nvlink[:, stage.number]
        nic = np.minimum(self.now.nic[:, stage.number], nvlink)
        speed = np.where(crosses, nic, nvlink)
        if load is not None:
            speed = speed / load
        slowest = speed.min(axis=axes, keepdims=True)
        share = (members - 1) / members
        total = {"all_gather": size * members, "all_reduce": 2 * size}.get(op, size)
        steps = np.log2(members) + 1
        alpha = np.where(crosses, NETWORK_ALPHA_NS, COLLECTIVE_ALPHA_NS) * steps
        wobble = self.draw.standard_normal(self.shape).mean(axis=axes, keepdims=True)
        wobble = wobble * np.sqrt(members) * np.where(crosses, 1.0, 0.5) * self.noise.link_ratio
        return np.asarray((alpha + total * share / slowest) * np.exp(wobble))

    def _communicate(
        self,
        stage: Stage,
        what: tuple[str, str],
        size: float,
        times: tuple[Numbers, Numbers],
        labels: Labels,
        *,
        launch: Numbers | None = None,
        overlapped: bool = False,
    ) -> None:
        """Add the span of an operation over the groups of an axis, with its running number."""
        op, axis = what
        labels = {
            **labels,
            "op": op,
            "sequence": stage.sequences[what],
            "size_bytes": int(size),
        }
        stage.sequences[what] += 1
        track = Track.OVERLAPPED if overlapped else None
        self._add(stage, Kind.COLLECTIVE, op, times, labels, axis=axis, launch=launch, track=track)

    def compute_span(
        self, stage: Stage, name: str, start: Numbers, launch: Numbers, labels: Labels
    ) -> None:
        """Add a module or a pass that has just ended on the device."""
        end = stage.device + 1500.0
        stage.device = end + 500.0
        self._add(stage, Kind.COMPUTE, name, (start, end), labels, launch=launch)

    def begin_span(self, stage: Stage) -> tuple[Numbers, Numbers]:
        """Return when a span that begins now starts on the device, and its launch on the host."""
        launch = stage.host
        start = np.maximum(stage.device, launch + LAUNCH_LATENCY_NS)
        stage.device = start + 1000.0
        return start, launch

    def _add(
        self,
        stage: Stage,
        kind: Kind,
        name: str,
        times: tuple[Numbers, Numbers],
        labels: Labels,
        *,
        axis: str = "",
        launch: Numbers | None = None,
        present: Flags | None = None,
        track: Track | None = None,
    ) -> None:
        """Add a span of all ranks of a stage; `times` are its start and its end."""
        start, end = times
        self.operations.append(
            Operation(
                stage=stage.number, kind=kind, name=name, track=track or _TRACKS[kind],
                start_ns=start, end_ns=end,
                labels=labels, axis=axis, launch_ns=launch, present=present,
            )
        )  # fmt: skip

    def load_batch(self, stage: Stage, labels: Labels) -> None:
        """Fetch a batch on the host of each replica's first tensor member, and hand it to the
        others.
        """
        begin = stage.host.copy()
        loads = np.exp(0.25 * self.draw.standard_normal(self.shape))
        length = BATCH_NS * loads * self.now.loader[:, stage.number]
        length[..., 1:] = 0.05 * BATCH_NS * loads[..., 1:]
        stage.host = begin + length
        if not self.job.pinned:
            stage.host = np.maximum(stage.host, stage.device) + 9e4 * loads
        self._add(stage, Kind.DATA, "batch-generator", (begin, stage.host), labels)
        self.collective(
            stage, "broadcast", "tp", self.job.sequence * 16, {**labels, "phase": "forward"}
        )


def _other_end(key: Key) -> Key:
    own, peer, what, number = key
    direction, op = what.split()
    return peer, own, f"{direction} {'recv' if op == 'send' else 'send'}", number


_TRACKS = {
    Kind.ITERATION: Track.COMPUTE,
    Kind.COMPUTE: Track.COMPUTE,
    Kind.OPTIMIZER: Track.COMPUTE,
    Kind.COLLECTIVE: Track.COMMUNICATION,
    Kind.P2P: Track.COMMUNICATION,
    Kind.DATA: Track.HOST,
    Kind.GC: Track.HOST,
}
"""Where spans of a kind stand, but for collectives beside compute."""


class Passes:
    """One forward or backward of a stage, module by module."""

    def __init__(self, engine: Engine, stage: Stage, work: Pass) -> None:
        self.engine, self.stage, self.work = engine, stage, work
        self.job = engine.job
        self.place: dict[str, int | str] = {
            "microbatch": work.microbatch,
            "chunk": work.chunk,
        }
        self.tokens = engine.now.tokens[:, 0, ..., work.microbatch]
        depth = work.chunk * self.job.pp + stage.number
        self.first = depth == 0
        self.last = depth == self.job.pp * self.job.vpp - 1
        self.layers = range(depth * self.job.layers, (depth + 1) * self.job.layers)
        self.weight = float(engine.now.stage_weight[stage.number])
        self.output = self.job.output_layer.times(engine.now.output_weight)
        self.layer_name = "layer" if self.job.fsdp else "transformer_layer"

    def forward(self) -> None:
        """Load a batch where the model begins or ends, then go through the chunk's layers."""
        engine, stage = self.engine, self.stage
        labels = {**self.place, "phase": "forward"}
        begin = engine.begin_span(stage)
        if self.first or self.last:
            engine.load_batch(stage, self.place)
        if self.first:
            self._module("embedding", self.job.embedding, labels)
        for layer in self.layers:
            self._gather_layer(layer, stage.device)
            self._layer(layer, "forward")
        if self.last:
            self._module("output_layer", self.output, labels)
            self._module("loss", Kernels(memory_ns=3e4, launches=12), labels)
        engine.compute_span(stage, "forward", *begin, labels)

    def backward(self) -> None:
        """Go back through the layers, each recomputed first where activations are not kept."""
        engine, stage = self.engine, self.stage
        labels = {**self.place, "phase": "backward"}
        begin = engine.begin_span(stage)
        if self.last:
            self._module("output_layer-backward", self.output.times(2), labels)
        for layer in reversed(self.layers):
            self._gather_layer(layer, stage.device)
            if self.job.recompute:
                self._layer(layer, "recompute")
            self._layer(layer, "backward")
            self._reduce_layer(labels)
        if self.first:
            self._module("embedding-backward", self.job.embedding.times(2), labels)
        engine.compute_span(stage, "backward", *begin, labels)

    def _gather_layer(self, layer: int, ahead: Numbers) -> None:
        """With sharded parameters: fetch the layer's, beside the compute of the layer before."""
        if not self.job.fsdp:
            return
        stage = self.stage
        size = 12 * self.job.hidden**2 * 2 / self.job.dp
        earlier = stage.history[-2] if len(stage.history) > 1 else ahead
        self.engine.collective(
            stage, "all_gather", "dp", size, {**self.place}, overlapped=True, ahead=earlier
        )
        stage.device = np.maximum(stage.device, stage.stream)

    def _reduce_layer(self, labels: Labels) -> None:
        """Reduce a layer's gradients beside the backward of the next ones."""
        dense = 12 * self.job.hidden**2 // self.job.tp
        if self.job.fsdp:
            self.engine.reduce(self.stage, dense * 4, "dp", overlapped=True, labels=labels)
        elif self.job.overlap_gradients and self.work.microbatch == self.job.microbatches - 1:
            self.engine.reduce(self.stage, dense * 4, "dp_cp", overlapped=True, labels=labels)

    def _module(self, name: str, work: Kernels, labels: Labels) -> None:
        begin = self.engine.begin_span(self.stage)
        self.engine.kernels(self.stage, work, self.tokens)
        self.engine.compute_span(self.stage, name, *begin, labels)

    def _layer(self, layer: int, phase: str) -> None:
        """Run attention and the feed-forward part, each between its tensor-parallel collectives."""
        engine, stage = self.engine, self.stage
        labels = {**self.place, "layer": layer + 1, "phase": phase}
        suffix = "" if phase == "forward" else f"-{phase}"
        factor = self.weight * (2.0 if phase == "backward" else 1.0)
        begin = engine.begin_span(stage)
        first, second = self._attention, self._experts if self.job.experts else self._mlp
        for part in (second, first) if phase == "backward" else (first, second):
            part(layer, suffix, factor, labels)
        engine.compute_span(stage, f"{self.layer_name}{suffix}", *begin, labels)

    def _attention(self, layer: int, suffix: str, factor: float, labels: Labels) -> None:
        self._between(f"attention{suffix}", self.job.attention.times(factor), labels)

    def _mlp(self, layer: int, suffix: str, factor: float, labels: Labels) -> None:
        self._between(f"mlp{suffix}", self.job.mlp.times(factor), labels)

    def _between(self, name: str, work: Kernels, labels: Labels) -> None:
        """Run a module that gathers its input over the tensor members and scatters its output."""
        engine, stage = self.engine, self.stage
        begin = engine.begin_span(stage)
        size = self.job.sequence * self.job.hidden * 2
        engine.collective(stage, "all_gather", "tp", size / self.job.tp, labels)
        engine.kernels(stage, work, self.tokens)
        engine.collective(stage, "reduce_scatter", "tp", size, labels)
        engine.compute_span(stage, name, *begin, labels)

    def _experts(self, layer: int, suffix: str, factor: float, labels: Labels) -> None:
        """Route tokens to experts, compute, bring them back; a hot expert has more of them."""
        engine, stage = self.engine, self.stage
        load = engine.now.experts[:, None, :, None, layer]
        begin = engine.begin_span(stage)
        engine.kernels(stage, Kernels(memory_ns=4e4, launches=14), self.tokens)
        engine.collective(stage, "all_gather", "tp_ep", 256, labels)
        size = 2 * self.job.sequence * self.job.hidden * 2 / self.job.tp
        engine.collective(stage, "all_to_all", "ep", size, labels, load=load)
        inner = engine.begin_span(stage)
        engine.kernels(stage, self.job.mlp.times(factor), self.tokens * load)
        engine.compute_span(stage, f"mlp{suffix}", *inner, labels)
        engine.collective(stage, "all_to_all", "ep", size, labels, load=load)
        engine.compute_span(stage, f"moe{suffix}", *begin, labels)
