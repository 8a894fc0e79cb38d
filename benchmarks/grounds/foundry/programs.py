"""What each rank's thread does in an iteration, in order: the schedule as Megatron-Core writes it.

A program is a list of operations; its order is all it says. When each of them runs, and who waits
for whom, is found out by `simulation`. One forward and one backward alternate (1F1B), a stage's
messages of one moment travel as one exchange, after which Megatron waits for the device; with
several chunks a stage (interleaving), messages are asynchronous and received one step ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.grounds.foundry.jobs import Cost, Job
from megascan.vocabulary import group_id

# codes of operations; the integers are compared some 100,000 times a job
COMPUTE, BEGIN, END, TOGETHER, START, WAIT, EXCHANGE, LOAD, SYNC, HOST, STALL, CHECKPOINT = range(
    12
)
COMPUTE_TRACK, COMMUNICATION_TRACK, HOST_TRACK, OVERLAPPED_TRACK = 1, 2, 3, 4
BACKWARD_LAUNCH_SHARE = 0.6  # autograd launches from C++
CROWDING = 1.04  # what collectives beside a kernel take of its multiprocessors
PASS_HOST_S = 120e-6  # Python between two passes
COMMUNICATION_HOST_S = 25e-6

Operation = tuple[Any, ...]
Arguments = dict[str, int | str]
Reduce = Callable[..., None]
Template = tuple[str, str, int, Arguments]
"""Kind, name, track, arguments of a span."""


@dataclass(frozen=True)
class Talk:
    """A collective or a message, known by the same number on all its members."""

    op: str
    members: tuple[int, ...]
    num_bytes: int
    lane: str  # talks of a lane that run beside computing follow one another
    layer: int = -1  # where a router decides how much travels


@dataclass
class Talks:
    """All collectives and messages of an iteration of a job, numbered."""

    numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    all: list[Talk] = field(default_factory=list)

    def number(self, key: tuple[object, ...], talk: Talk) -> int:
        """Return the number of a talk, a new one where its first member names it."""
        known = self.numbers.get(key)
        if known is None:
            known = self.numbers[key] = len(self.all)
            self.all.append(talk)
        return known


@dataclass
class Program:
    """Operations of one rank in an iteration, its spans, and costs by compute operation."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    templates: list[Template] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    def collection(self, generation: int) -> int:
        """Return the template of a pause of Python's collector."""
        name = f"gc-generation-{generation}"
        self.templates.append(("gc", name, HOST_TRACK, {}))
        return len(self.templates) - 1


def groups_of(job: Job, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the members of a rank's process groups by axis."""
    layout = job.layout
    place = layout.coordinates(rank)
    groups = {axis: layout.group(rank, axis) for axis in ("tp", "cp", "pp", "dp", "ep")}
    ranks = [(each, layout.coordinates(each)) for each in range(job.num_ranks)]
    groups["dp_cp"] = tuple(r for r, at in ranks if (at.tp, at.pp) == (place.tp, place.pp))
    groups["expt_dp"] = tuple(
        r for r, at in ranks if (at.tp, at.pp, at.ep) == (place.tp, place.pp, place.ep)
    )
    groups["mp"] = tuple(r for r, at in ranks if (at.dp, at.cp) == (place.dp, place.cp))
    ends = groups["pp"]
    if job.is_tied and rank in (ends[0], ends[-1]):
        groups["embd"] = tuple(dict.fromkeys((ends[0], ends[-1])))
    groups["intra_dist_opt"] = tuple(range(job.num_ranks))
    return groups


class Writer:
    """Write down the program of one rank."""

    def __init__(self, job: Job, rank: int, talks: Talks) -> None:
        self.job, self.rank, self.talks = job, rank, talks
        self.place = job.layout.coordinates(rank)
        self.groups = groups_of(job, rank)
        self.program = Program(rank)
        self.is_full = job.granularity == "full"
        self.crowding = 1.0
        self._sequences: dict[tuple[object, ...], int] = defaultdict(int)
        self._pending: list[int] = []

    # -- the words of a program

    def add(self, *operation: object) -> None:
        """Append an operation."""
        self.program.operations.append(operation)

    def template(self, kind: str, name: str, track: int, **arguments: int | str) -> int:
        """Return the number of a new span."""
        self.program.templates.append((kind, name, track, arguments))
        return len(self.program.templates) - 1

    @contextmanager
    def span(self, kind: str, name: str, at: Arguments, *, recorded: bool = True) -> Iterator[None]:
        """Enclose operations in a span of the compute stream."""
        if recorded:
            self.add(BEGIN)
        yield
        if recorded:
            self.add(END, self.template(kind, name, COMPUTE_TRACK, **at))

    def part(self, name: str, at: Arguments) -> AbstractContextManager[None]:
        """Enclose operations in the span of a part of the model."""
        name = name if at["phase"] == "forward" else f"{name}-{at['phase']}"
        return self.span("compute", name, at, recorded=self.is_full or name == "loss")

    def compute(self, cost: Cost, at: Arguments) -> None:
        """Append kernels: a backward is two forwards, and its launches are cheaper."""
        program = self.program
        launch_s = self.job.machines.launch_us * 1e-6
        if at.get("phase") == "backward":
            cost = cost.times(2.0 * self.crowding, int(1.6 * cost.num_kernels))
            launch_s *= BACKWARD_LAUNCH_SHARE
        host_s = cost.num_kernels * launch_s
        self.add(COMPUTE, len(program.costs), launch_s, host_s, "phase" in at)
        program.costs.append(cost)
        program.microbatches.append(int(at.get("microbatch", -1)))
        program.layers.append(int(at.get("layer", -1)))

    def _talk(
        self, axis: str, op: str, num_bytes: int, arguments: Arguments, by_router: bool
    ) -> tuple[int, Arguments]:
        members = self.groups[axis]
        name = group_id(axis, members)
        sequence = self._sequences[name, op]
        self._sequences[name, op] += 1
        layer = int(arguments.get("layer", -1)) if by_router else -1
        talk = Talk(op, members, num_bytes, name, layer)
        number = self.talks.number((name, op, sequence), talk)
        told = {**arguments, "op": op, "group": name, "sequence": sequence, "size_bytes": num_bytes}
        return number, told

    def together(
        self,
        axis: str,
        op: str,
        num_bytes: int,
        at: Arguments | None = None,
        *,
        by_router: bool = False,
    ) -> None:
        """Append a collective for which the compute stream waits."""
        if len(self.groups[axis]) == 1:
            return
        number, told = self._talk(axis, op, num_bytes, at or {}, by_router)
        recorded = self.is_full or axis in ("dp_cp", "expt_dp")
        template = self.template("collective", op, COMMUNICATION_TRACK, **told) if recorded else -1
        self.add(TOGETHER, number, template)

    def start(self, axis: str, op: str, num_bytes: int, at: Arguments) -> None:
        """Append a collective beside computing."""
        if len(self.groups[axis]) > 1:
            number, told = self._talk(axis, op, num_bytes, at, False)
            self.add(START, number, self.template("collective", op, OVERLAPPED_TRACK, **told))
            self._pending.append(number)

    def wait_for_all(self) -> None:
        """Append a wait for all that runs beside."""
        for number in self._pending:
            self.add(WAIT, number)
        self._pending.clear()

    def message(
        self, op: str, peer: int, direction: str, what: tuple[int, int], chunk: int
    ) -> tuple[int, int]:
        """Return number and span of a message; `what` is the virtual stage that gets it, and which
        microbatch it is of.
        """
        track = OVERLAPPED_TRACK if self.job.vpp > 1 else COMMUNICATION_TRACK
        sender, receiver = (self.rank, peer) if op == "send" else (peer, self.rank)
        sequence = self._sequences[sender, receiver, direction]
        self._sequences[sender, receiver, direction] += 1
        size = self.job.activation_bytes
        number = self.talks.number(
            ("message", sender, receiver, direction, what),
            Talk("message", (sender, receiver), size, f"{sender} {receiver} {direction}"),
        )
        template = self.template(
            "p2p",
            f"{op}_{direction}",
            track,
            microbatch=what[1],
            chunk=chunk,
            op=op,
            group=group_id("pp", self.groups["pp"]),
            sequence=sequence,
            size_bytes=size,
            peer=peer,
            direction=direction,
        )
        return number, template

    # -- parts of the model

    def attention(self, at: Arguments) -> None:
        """Append a layer's attention in one phase."""
        job, cost = self.job, self.job.attention()
        is_backward = at["phase"] == "backward"
        with self.part("attention", at):
            self._enter_tensor_parallel(at)
            op, count = ("reduce_scatter", job.cp) if is_backward else ("all_gather", 1)
            self.together("cp", op, job.activation_bytes // 4 * count, at)  # keys and values
            if is_backward and job.recompute == "selective":
                with self.part("core_attention", {**at, "phase": "recompute"}):
                    self.compute(Cost(attention_s=cost.attention_s), {**at, "phase": "recompute"})
            self.compute(cost, at)
            self._leave_tensor_parallel(at)

    def mlp(self, at: Arguments) -> None:
        """Append a layer's MLP, or its router and experts."""
        job, cost = self.job, self.job.mlp()
        size = 2 * job.activation_bytes  # two experts a token
        with self.part("moe" if job.experts else "mlp", at):
            self._enter_tensor_parallel(at)
            if job.experts:
                self.compute(Cost(memory_s=0.3 * cost.memory_s, num_kernels=30), at)
                self.together("ep", "all_to_all", size, at, by_router=True)
            self.compute(cost, at)
            if job.experts:
                self.together("ep", "all_to_all", size, at, by_router=True)
            self._leave_tensor_parallel(at)

    def _enter_tensor_parallel(self, at: Arguments) -> None:
        if self.job.sequence_parallel:
            self.together("tp", "all_gather", self.job.activation_bytes, at)

    def _leave_tensor_parallel(self, at: Arguments) -> None:
        job = self.job
        op, factor = ("reduce_scatter", job.tp) if job.sequence_parallel else ("all_reduce", 1)
        self.together("tp", op, factor * job.activation_bytes, at)

    def layer(self, at: Arguments) -> None:
        """Append a layer in one phase."""
        parts = (self.attention, self.mlp)
        if at["phase"] == "backward" and self.job.recompute == "full":
            self.layer({**at, "phase": "recompute"})
        with self.part("transformer_layer", at):
            for part in parts[::-1] if at["phase"] == "backward" else parts:
                part(at)

    def end_of_model(self, name: str, cost: Cost, at: Arguments) -> None:
        """Append embedding, output layer or loss."""
        with self.part(name, at):
            self.compute(cost, at)

    def layers_of(self, chunk: int) -> range:
        """Return the numbers of a chunk's layers, from 1."""
        layers, stage = self.job.layers, self.stage_of(chunk)
        before = sum(layers[:stage])
        return range(before + 1, before + layers[stage] + 1)

    def stage_of(self, chunk: int) -> int:
        """Return the virtual stage of a chunk."""
        return chunk * self.job.pp + self.place.pp

    def forward(self, microbatch: int, chunk: int) -> None:
        """Append a forward pass."""
        job, stage = self.job, self.stage_of(chunk)
        at: Arguments = {"microbatch": microbatch, "chunk": chunk, "phase": "forward"}
        self.add(HOST, PASS_HOST_S)
        with self.span("compute", "forward", at):
            if stage in (0, job.pp * job.vpp - 1):
                self._load(microbatch, chunk)
            if stage == 0:
                self.end_of_model("embedding", job.embedding(), at)
            for layer in self.layers_of(chunk):
                self.layer({**at, "layer": layer})
            if stage == job.pp * job.vpp - 1:
                self.end_of_model("output_layer", job.output_layer(), at)
                self.end_of_model("loss", job.loss(), at)

    def _load(self, microbatch: int, chunk: int) -> None:
        at: Arguments = {"microbatch": microbatch, "chunk": chunk}
        if self.place.tp == 0:
            self.add(LOAD, microbatch, self.template("data", "batch-generator", HOST_TRACK, **at))
        self.together("tp", "broadcast", 8 * self.job.tokens, at)

    def backward(self, microbatch: int, chunk: int, *, is_last: bool) -> None:
        """Append a backward pass; reductions start behind each layer of a chunk's last one, whose
        kernels leave some of the device to them.
        """
        job, stage = self.job, self.stage_of(chunk)
        at: Arguments = {"microbatch": microbatch, "chunk": chunk, "phase": "backward"}
        reduces = is_last and job.overlap_grads
        self.crowding = CROWDING if reduces and len(self.groups["dp_cp"]) > 1 else 1.0
        self.add(HOST, PASS_HOST_S)
        with self.span("compute", "backward", at):
            if stage == job.pp * job.vpp - 1:
                self.end_of_model("output_layer", job.output_layer(), at)
                if reduces and (stage or not job.is_tied):
                    self._reduce_end(self.start, 1, at)
            for layer in reversed(self.layers_of(chunk)):
                self.layer({**at, "layer": layer})
                if reduces:
                    self._reduce_layer(self.start, 1, at)
            if stage == 0:
                self.end_of_model("embedding", job.embedding(), at)
                if reduces:
                    self._reduce_end(self.start, 1, at)
        self.crowding = 1.0

    @property
    def _reducing(self) -> str:
        return "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"

    @property
    def _num_ends(self) -> int:
        """Return how many matrices of the vocabulary this rank has: first and last stages do."""
        at_ends = (self.place.pp == 0) + (self.place.pp == self.job.pp - 1)
        return min(at_ends, 1) if self.job.is_tied else at_ends

    def _reduce_end(self, reduce: Reduce, count: int, at: Arguments) -> None:
        num_bytes = 4 * self.job.vocabulary * self.job.hidden // self.job.tp
        if count:
            reduce("dp_cp", self._reducing, count * num_bytes, at)

    def _reduce_layer(self, reduce: Reduce, num_layers: int, at: Arguments) -> None:
        job, op = self.job, self._reducing
        dense = job.attention_parameters + (0 if job.experts else job.mlp_parameters)
        reduce("dp_cp", op, 4 * dense * num_layers, at)
        if job.experts:
            experts = job.experts // job.ep * job.mlp_parameters
            reduce("expt_dp", op, 4 * experts * num_layers, at)

    # -- the end of an iteration

    def finish(self) -> None:
        """Append what follows the passes: reductions, the update, logging."""
        job = self.job
        num_layers = sum(len(self.layers_of(chunk)) for chunk in range(job.vpp))
        with self.span("optimizer", "grad-sync", {}):
            self.wait_for_all()
            if not job.overlap_grads:
                self._reduce_layer(self.together, num_layers, {})
                self._reduce_end(self.together, self._num_ends, {})
            if "embd" in self.groups:
                self.together("embd", "all_reduce", 4 * job.vocabulary * job.hidden // job.tp)
            self.together("tp", "all_reduce", 8 * job.hidden * num_layers)
        if self.place.pp == job.pp - 1:
            self.together("dp_cp", "all_reduce", 8)
        with self.span("optimizer", "optimizer", {}):
            self._update(num_layers)
        if job.logging_s and self.rank == job.num_ranks - 1:
            self.add(SYNC)
            self.add(HOST, job.logging_s)

    def _update(self, num_layers: int) -> None:
        job = self.job
        dense = job.attention_parameters + (0 if job.experts else job.mlp_parameters)
        experts = job.experts // job.ep * job.mlp_parameters if job.experts else 0
        matrices = self._num_ends * job.vocabulary * job.hidden // job.tp
        num_dense = num_layers * dense + matrices
        cost = job.update(num_dense + num_layers * experts)
        self.compute(cost.times(0.15, 20), {})
        self.together("intra_dist_opt" if job.distributed_optimizer else "mp", "all_reduce", 4)
        self.add(SYNC)
        self.compute(cost.times(0.85, 60), {})
        if job.distributed_optimizer:
            shards = len(self.groups["dp_cp"])
            self.together("dp_cp", "all_gather", 2 * num_dense // shards)
            if experts:
                shards = len(self.groups["expt_dp"])
                self.together("expt_dp", "all_gather", 2 * num_layers * experts // shards)

    # -- schedules

    def write(self) -> Program:
        """Return the whole program."""
        self.add(BEGIN)
        self.add(HOST, 2 * PASS_HOST_S)
        if self.job.pp == 1:
            self._without_stages()
        elif self.job.vpp == 1:
            self._one_chunk()
        else:
            self._interleaved()
        self.finish()
        self.add(CHECKPOINT, self.template("checkpoint", "save-checkpoint", HOST_TRACK))
        self.add(END, self.template("iteration", "iteration", COMPUTE_TRACK))
        return self.program

    def _without_stages(self) -> None:
        last = self.job.num_microbatches - 1
        for microbatch in range(last + 1):
            self.forward(microbatch, 0)
            self.backward(microbatch, 0, is_last=microbatch == last)

    def _exchange(self, *messages: tuple[str, str, int]) -> None:
        """Append messages of one moment: (send or recv, direction, microbatch)."""
        stage, peers = self.place.pp, self.groups["pp"]
        batch = []
        for op, direction, microbatch in messages:
            is_next = (op == "send") == (direction == "forward")
            if not 0 <= stage + (1 if is_next else -1) < self.job.pp:
                continue
            peer = peers[stage + 1] if is_next else peers[stage - 1]
            target = stage if op == "recv" else stage + (1 if is_next else -1)
            batch.append(self.message(op, peer, direction, (target, microbatch), 0))
        if batch:
            self.add(EXCHANGE, tuple(batch))

    def _one_chunk(self) -> None:
        num, exchange = self.job.num_microbatches, self._exchange
        num_ahead = min(self.job.pp - self.place.pp - 1, num)
        for k in range(num_ahead):
            exchange(("recv", "forward", k))
            self.forward(k, 0)
            exchange(("send", "forward", k))
        if num_ahead < num:
            exchange(("recv", "forward", num_ahead))
        for k in range(num - num_ahead):
            self.forward(k + num_ahead, 0)
            exchange(("send", "forward", k + num_ahead), ("recv", "backward", k))
            self.backward(k, 0, is_last=k == num - 1)
            if k == num - num_ahead - 1:
                exchange(("send", "backward", k))
            else:
                exchange(("send", "backward", k), ("recv", "forward", k + num_ahead + 1))
        for k in range(num - num_ahead, num):
            exchange(("recv", "backward", k))
            self.backward(k, 0, is_last=k == num - 1)
            exchange(("send", "backward", k))

    def _steps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
        """Return (microbatch, chunk) of forwards and backwards in order, and forwards ahead."""
        job = self.job
        forwards = [
            (block + k, chunk)
            for block in range(0, job.num_microbatches, job.pp)
            for chunk in range(job.vpp)
            for k in range(job.pp)
        ]
        backwards = [(mb, job.vpp - 1 - chunk) for mb, chunk in forwards]
        ahead = (job.pp - self.place.pp - 1) * 2 + (job.vpp - 1) * job.pp
        return forwards, backwards, min(ahead, len(forwards))

    def _interleaved(self) -> None:
        forwards, backwards, ahead = self._steps()
        order = [("forward", *step) for step in forwards[:ahead]]
        for one, other in zip(forwards[ahead:], backwards, strict=False):
            order += [("forward", *one), ("backward", *other)]
        order += [("backward", *step) for step in backwards[len(forwards) - ahead :]]
        received = dict.fromkeys(("forward", "backward"), -1)
        done = dict.fromkeys(("forward", "backward"), 0)
        steps = {"forward": forwards, "backward": backwards}
        waits: dict[tuple[str, int], int] = {}
        for direction, microbatch, chunk in order:
            number = done[direction]
            while received[direction] < min(number + 1, len(forwards) - 1):  # one step ahead
                received[direction] += 1
                got = self._receive(direction, *steps[direction][received[direction]])
                if got >= 0:
                    waits[direction, received[direction]] = got
            if (direction, number) in waits:
                self.add(WAIT, waits[direction, number])
            if direction == "forward":
                self.forward(microbatch, chunk)
            else:
                is_last = all(each != chunk for _, each in backwards[number + 1 :])
                self.backward(microbatch, chunk, is_last=is_last)
            self._send(direction, microbatch, chunk)
            done[direction] += 1

    def _neighbour(self, direction: str, chunk: int, *, is_source: bool) -> tuple[int, int]:
        """Return rank and virtual stage of whom a chunk gets from or gives to; -1: nobody."""
        forth = 1 if direction == "forward" else -1
        stage = self.stage_of(chunk) + (-forth if is_source else forth)
        if not 0 <= stage < self.job.pp * self.job.vpp:
            return -1, -1
        return self.groups["pp"][stage % self.job.pp], stage

    def _receive(self, direction: str, microbatch: int, chunk: int) -> int:
        peer, _ = self._neighbour(direction, chunk, is_source=True)
        if peer < 0:
            return -1
        what = (self.stage_of(chunk), microbatch)
        number, template = self.message("recv", peer, direction, what, chunk)
        self.add(START, number, template)
        return number

    def _send(self, direction: str, microbatch: int, chunk: int) -> None:
        peer, stage = self._neighbour(direction, chunk, is_source=False)
        if peer >= 0:
            what = (stage, microbatch)
            number, template = self.message("send", peer, direction, what, chunk)
            self.add(START, number, template)
            self._pending.append(number)


def programs_of(job: Job) -> tuple[list[Program], Talks]:
    """Return the programs of all ranks, and what they tell each other in an iteration."""
    talks = Talks()
    return [Writer(job, rank, talks).write() for rank in range(job.num_ranks)], talks
