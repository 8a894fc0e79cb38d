"""Say what the ranks of each stage do in one iteration: operations in order, and spans over them.

All ranks of a stage run the same operations, on their own data. `Program` lists those of a stage;
`merged` finds an order of all stages' operations in which nothing is asked for before it is known.
Messages of 1F1B block both ends; with chunks (interleaved) they travel beside the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from benchmarks.grounds.mill.job import Job
from megascan.schema import Kind, Track

TOKENS, ATTENTION, EXPERTS = 1, 2, 3
"""What of the data decides how long an operation takes."""
LATENCY_S = 2.5e-5
TIED = "embd"
FIXED_BY_AXIS = {
    "tp": ("cp", "dp", "pp"),
    "cp": ("tp", "dp", "pp"),
    "dp": ("tp", "cp", "pp"),
    "dp_cp": ("tp", "pp"),
    "expt_dp": ("tp", "ep", "pp"),
    "pp": ("tp", "cp", "dp"),
    "mp": ("cp", "dp"),
    TIED: ("tp", "cp", "dp"),
    "intra_dist_opt": (),
    "world": (),
}


class Code(IntEnum):
    """What an operation does."""

    WORK = 0
    GROUP = 1  # a collective on the stream of the passes
    ASYNC = 2  # a collective beside them
    AWAIT = 3  # the passes wait for those
    POST = 4  # an end of some messages is there
    TAKE = 5  # wait for messages
    ARRIVE = 6  # at a collective of several stages
    JOIN = 7  # and leave it
    LOAD = 8  # the launching thread takes a batch
    SYNC = 9  # the launching thread waits for the device


class Key(NamedTuple):
    """Name a message, the same at both ends."""

    direction: str
    number: int  # of the receiving chunk, over all stages
    microbatch: int
    sender: int
    receiver: int


@dataclass(slots=True)
class Operation:
    """State an operation of all ranks of a stage, and what it costs on a sound device."""

    code: Code
    kernels: float = 1.0
    clock_s: float = 0.0
    memory_s: float = 0.0
    microbatch: int = -1
    data: int = 0
    layer: int = 0
    in_pass: bool = False
    axis: str = ""
    wire_bytes: float = 0.0
    rooted: bool = False
    others: tuple[int, ...] = ()
    keys: tuple[Key, ...] = ()
    blocks: bool = False


@dataclass(slots=True)
class Span:
    """State what is recorded, from the start of one operation to the end of another."""

    kind: Kind
    name: str
    track: Track
    first: int
    last: int = -1
    args: dict[str, int | str] = field(default_factory=dict)
    axis: str = ""
    peer: int = -1  # stage
    layer: int = 0  # recorded only where this layer is
    is_base: bool = True
    key: Key | None = None


def groups_of(job: Job) -> dict[str, list[tuple[int, ...]]]:
    """Return the groups of each axis that has a communicator."""
    layout, found = job.layout, {}
    places = [layout.coordinates(rank) for rank in range(job.num_ranks)]
    names = FIXED_BY_AXIS if job.is_megatron else {"dp": ("tp", "cp", "pp"), "world": ()}
    for axis, fixed in names.items():
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            if axis != TIED or place.pp in (0, layout.pp - 1):
                parts.setdefault(tuple(getattr(place, it) for it in fixed), []).append(rank)
        found[axis] = [tuple(part) for part in parts.values()]
    if job.is_megatron:
        ranks = range(job.num_ranks)
        found["ep"] = sorted({tuple(sorted(layout.group(rank, "ep"))) for rank in ranks})
    return found


class Program:
    """One iteration of one stage with a number of microbatches."""

    def __init__(self, job: Job, stage: int, num_microbatches: int) -> None:
        self.job, self.stage, self.num_microbatches = job, stage, num_microbatches
        self.operations: list[Operation] = []
        self.spans: list[Span] = []
        self.sizes = {axis: len(groups[0]) for axis, groups in groups_of(job).items()}
        self._microbatch, self._chunk, self._layer, self._phase = -1, 0, 0, ""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open: list[int] = []  # reductions beside passes that nobody has awaited
        self._gathered = 0  # where parameters were asked for last
        self.tokens = job.tokens / job.layout.cp
        self.dp = "dp_cp" if job.is_megatron else "dp"
        extra = job.stage_extra[stage] if job.stage_extra else 1.0
        self.product_s = extra / job.product_flops / job.layout.tp
        self.byte_s = extra / job.memory_bytes_s
        with self._span(Kind.ITERATION, "iteration"):
            self._mark()
            if job.layout.vpp > 1:
                self._interleaved()
            elif job.layout.pp > 1:
                self._one_forward_one_backward()
            else:
                for microbatch in range(num_microbatches):
                    self._forward(microbatch)
                    self._backward(microbatch)
            self._update()

    # building blocks

    def _add(self, code: Code, kernels: float = 1.0, **more: object) -> int:
        in_pass = bool(self._phase)
        more = {"microbatch": self._microbatch, "layer": self._layer, "in_pass": in_pass} | more
        self.operations.append(Operation(code, kernels, **more))  # type: ignore[arg-type]
        return len(self.operations) - 1

    def _mark(self) -> None:
        self._add(Code.WORK, 0.5)

    def _work(self, flops: float, moved: float, kernels: float, data: int = TOKENS) -> None:
        clock_s, memory_s = flops * self.product_s, moved * self.byte_s
        self._add(Code.WORK, kernels, clock_s=clock_s, memory_s=memory_s, data=data)

    @contextmanager
    def _span(self, kind: Kind, name: str, *, module: bool = False) -> Iterator[None]:
        args: dict[str, int | str] = {}
        if self._phase:
            args = {"microbatch": self._microbatch, "chunk": self._chunk, "phase": self._phase}
            args |= {"layer": self._layer} if self._layer else {}
        track = Track.HOST if kind is Kind.DATA else Track.COMPUTE
        span = Span(kind, name, track, len(self.operations), args=args, is_base=not module)
        span.layer = self._layer
        self.spans.append(span)
        yield
        span.last = len(self.operations) - 1
        while self.operations[span.last].code is Code.ASYNC:  # these end beside it
            span.last -= 1

    def _collective(self, axis: str, op: str, size: float, *, is_async: bool = False) -> None:
        num = self.sizes.get(axis, 1)
        if num < 2:
            return
        wire = {
            "all_reduce": 2 * (num - 1) / num,
            "all_gather": num - 1.0,
            "broadcast": 1.0,
        }.get(op, (num - 1) / num)
        code = Code.ASYNC if is_async else Code.GROUP
        place = self._add(
            code, 1.5, axis=axis, wire_bytes=size * wire, rooted=op == "broadcast", in_pass=False
        )
        if is_async:
            self._open.append(place)
        self._record(axis, op, size, place, Track.OVERLAPPED if is_async else Track.COMMUNICATION)

    def _record(self, axis: str, op: str, size: float, first: int, track: Track) -> None:
        args: dict[str, int | str] = {"op": op, "sequence": self._counts[axis, op]}
        self._counts[axis, op] += 1
        if self._phase:
            args |= {"microbatch": self._microbatch, "chunk": self._chunk, "phase": self._phase}
        if self._layer:
            args["layer"] = self._layer
        if self.job.has_sizes:
            args["size_bytes"] = int(size)
        is_base, last = axis in {"dp", "dp_cp", "expt_dp"}, len(self.operations) - 1
        self.spans.append(
            Span(Kind.COLLECTIVE, op, track, first, last, args, axis=axis, is_base=is_base)
        )

    def _joined(self, axis: str, size: float) -> None:
        """Add an all-reduce over ranks of several stages."""
        num = self.sizes[axis]
        if num < 2:
            return
        key = Key("join", self._counts[axis, "all_reduce"], 0, 0, 0)
        first = self._add(Code.ARRIVE, 1.5, axis=axis, keys=(key,))
        wire = size * 2 * (num - 1) / num
        self._add(Code.JOIN, 0.0, axis=axis, keys=(key,), wire_bytes=wire)
        self._record(axis, "all_reduce", size, first, Track.COMMUNICATION)

    # passes

    @property
    def _is_first(self) -> bool:
        return self.stage == 0 and self._chunk == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.job.layout.pp - 1 and self._chunk == self.job.layout.vpp - 1

    def _number(self, chunk: int) -> int:
        """Return the number of a chunk over all stages."""
        return chunk * self.job.layout.pp + self.stage

    def _layers(self, chunk: int) -> list[tuple[int, str]]:
        """Return the layers of a chunk, with their numbers in the model."""
        number = self._number(chunk)
        before = sum(map(len, self.job.chunks[:number]))
        return [(before + at, it) for at, it in enumerate(self.job.chunks[number], start=1)]

    def _forward(self, microbatch: int, chunk: int = 0) -> None:
        job = self.job
        self._microbatch, self._chunk, self._phase = microbatch, chunk, "forward"
        with self._span(Kind.COMPUTE, "forward"):
            self._mark()
            if self._is_first or self._is_last:
                with self._span(Kind.DATA, "batch-generator"):
                    self._add(Code.LOAD, in_pass=False)
                self.spans[-1].args.pop("phase")
                if not job.loads_everywhere:
                    self._collective("tp", "broadcast", 8.0 * job.tokens)
            if self._is_first:
                self._end_of_model("embedding", 1)
            layers = self._layers(chunk)
            self._gather(layers, 0)
            for at, (layer, letter) in enumerate(layers):
                self._await_parameters()
                self._gather(layers, at + 1)
                self._one_layer(layer, letter, "", 1)
            if self._is_last:
                self._end_of_model("output_layer", 1)
                with self._span(Kind.COMPUTE, "loss"):
                    self._work(0, 6.0 * self.tokens * job.vocabulary / job.layout.tp, 8)
        self._phase = ""

    def _backward(self, microbatch: int, chunk: int = 0) -> None:
        job = self.job
        self._microbatch, self._chunk, self._phase = microbatch, chunk, "backward"
        is_final = microbatch == self.num_microbatches - 1
        with self._span(Kind.COMPUTE, "backward"):
            self._mark()
            if self._is_last:
                self._end_of_model("output_layer", 2)
            layers = self._layers(chunk)[::-1]
            self._gather(layers, 0)
            for at, (layer, letter) in enumerate(layers):
                self._await_parameters()
                self._gather(layers, at + 1)
                if job.recompute:
                    self._phase = "recompute"
                    self._one_layer(layer, letter, "-recompute", 1)
                    self._phase = "backward"
                self._one_layer(layer, letter, "-backward", 2)
                if job.style == "fsdp" or (self._overlaps and is_final):
                    self._reduce(letter, is_async=True)
            if self._is_first:
                self._end_of_model("embedding", 2)
        self._phase = ""

    @property
    def _overlaps(self) -> bool:
        return self.job.style == "ddp" or (self.job.is_megatron and self.job.overlap_grads)

    def _end_of_model(self, name: str, times: int) -> None:
        job, tokens = self.job, self.tokens
        flops = 2.0 * tokens * job.hidden * job.vocabulary if name == "output_layer" else 0.0
        moved = 2.0 * tokens * (job.hidden * 4 + (job.vocabulary / job.layout.tp if flops else 0))
        suffix = "-backward" if times == 2 else ""
        if job.is_megatron:
            with self._span(Kind.COMPUTE, name + suffix, module=True):
                self._work(flops * times, moved * times, 5)
                if name == "embedding" and times == 1:
                    self._collective("tp", "all_reduce", 2 * tokens * job.hidden)
        else:
            self._work(flops * times, moved * times, 5)

    def _one_layer(self, layer: int, letter: str, suffix: str, times: int) -> None:
        job, self._layer = self.job, layer
        hidden, tokens, tp = job.hidden, self.tokens, job.layout.tp
        act = 2.0 * tokens * hidden
        local = act / (tp if job.sequence_parallel else 1)
        projections, scores = 8 * tokens * hidden**2, 2 * tokens * job.sequence * hidden
        flops = projections + scores if letter != "m" else 1.4 * projections
        mixing = 24 * tokens * hidden**2 if letter != "m" else 0.0
        name = "transformer_layer" if job.is_megatron else "layer"
        with self._span(Kind.COMPUTE, name + suffix, module=True):
            if not job.is_megatron or letter == "m":
                self._work((flops + mixing) * times, 30 * act * times, 24 * times, ATTENTION)
            else:
                with self._span(Kind.COMPUTE, "attention" + suffix, module=True):
                    self._between_tensors(act, True)
                    self._contexts(act / tp)
                    self._work(flops * times, 7 * act / tp * times, 11 * times, ATTENTION)
                    self._between_tensors(act, False)
                self._work(0, 6 * local * times, 3 * times)
                with self._span(
                    Kind.COMPUTE, ("moe" if letter == "e" else "mlp") + suffix, module=True
                ):
                    self._between_tensors(act, True)
                    if letter == "e":
                        self._experts(mixing * times, act, times)
                    else:
                        self._work(mixing * times, 9 * act / tp * times, 7 * times)
                    self._between_tensors(act, False)
                self._work(0, 5 * local * times, 2 * times)
        self._layer = 0

    def _experts(self, flops: float, act: float, times: int) -> None:
        routed = act * self.job.experts_per_token / self.job.layout.tp
        self._work(0, 5 * act, 12)
        self._collective("ep", "all_to_all", routed)
        share = self.job.experts_per_token / 2
        self._work(flops * share, 9 * routed * times, 14 * times, EXPERTS)
        self._collective("ep", "all_to_all", routed)

    def _between_tensors(self, act: float, is_begin: bool) -> None:
        if self.job.sequence_parallel and is_begin:
            self._collective("tp", "all_gather", act / self.job.layout.tp)
        elif self.job.sequence_parallel:
            self._collective("tp", "reduce_scatter", act)
        elif not is_begin:
            self._collective("tp", "all_reduce", act)

    def _contexts(self, act: float) -> None:
        op = "all_to_all" if self.job.ulysses else "all_gather"
        self._collective("cp", op, act * 3 if self.job.ulysses else act / 2)

    # parameters and gradients

    def _params(self, letter: str) -> tuple[float, float]:
        """Return the parameters of a layer on a rank: dense ones, and those of its experts."""
        square = self.job.hidden**2 / self.job.layout.tp
        if letter == "e":
            return 4 * square, 24 * square
        return (12 if letter == "d" else 6) * square, 0.0

    def _gather(self, layers: Sequence[tuple[int, str]], at: int) -> None:
        """Ask for the parameters of a layer where they lie in pieces on all ranks."""
        if self.job.style == "fsdp" and at < len(layers):
            dense, _ = self._params(layers[at][1])
            own_bytes = 2 * dense / self.sizes[self.dp]
            self._collective(self.dp, "all_gather", own_bytes, is_async=True)
            self._gathered = self._open.pop()

    def _await_parameters(self) -> None:
        """Wait for the parameters asked for last; gradients may still be on their way."""
        if self.job.style == "fsdp":
            self._add(Code.AWAIT, 0.0, others=(self._gathered,), in_pass=False)

    def _reduce(self, letter: str, *, is_async: bool) -> None:
        is_sharded = self.job.style == "fsdp" or self.job.distributed_optimizer
        op = "reduce_scatter" if is_sharded and self.job.style != "ddp" else "all_reduce"
        dense, experts = self._params(letter)
        self._collective(self.dp, op, 4 * dense, is_async=is_async)
        if experts:
            self._collective("expt_dp", op, 4 * experts, is_async=is_async)

    def _update(self) -> None:
        job, self._microbatch = self.job, -1
        chunks = range(job.layout.vpp)
        letters = [letter for chunk in chunks for _, letter in self._layers(chunk)]
        params = sum(sum(self._params(letter)) for letter in letters)
        if self.stage in (0, job.layout.pp - 1):
            params += job.vocabulary * job.hidden / job.layout.tp
        if job.is_megatron:
            with self._span(Kind.OPTIMIZER, "grad-sync"):
                self._add(Code.AWAIT, 1.0, others=tuple(self._open), in_pass=False)
                if not job.overlap_grads:
                    op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
                    self._collective("dp_cp", op, 4 * params)
                if job.tied and self.stage in (0, job.layout.pp - 1):
                    self._joined(TIED, 4 * job.vocabulary * job.hidden / job.layout.tp)
                self._collective("dp_cp", "all_reduce", 8)
        else:
            self._add(Code.AWAIT, 0.0, others=tuple(self._open), in_pass=False)
        shards = self.sizes[self.dp] if job.style == "fsdp" else 1
        if job.is_megatron and job.distributed_optimizer:
            shards = self.sizes["dp_cp"]
        with self._span(Kind.OPTIMIZER, "optimizer"):
            self._work(0, 4 * params / shards, 6, 0)
            if job.is_megatron:
                self._joined("intra_dist_opt" if job.distributed_optimizer else "mp", 4)
                self._add(Code.SYNC, 0.0)
            self._work(0, 28 * params / shards, 12, 0)
            if job.is_megatron and job.distributed_optimizer:
                self._collective("dp_cp", "all_gather", 2 * params / shards)
        self._add(Code.SYNC, 0.0)

    # schedules

    def _key(self, direction: str, chunk: int, microbatch: int, *, is_send: bool) -> Key | None:
        """Return the message that a pass sends or receives; None at the ends of the model."""
        pp, step = self.job.layout.pp, 1 if direction == "forward" else -1
        number = self._number(chunk) + (step if is_send else 0)
        sender = number - step
        if not (0 <= number < pp * self.job.layout.vpp and 0 <= sender < pp * self.job.layout.vpp):
            return None
        return Key(direction, number, microbatch, sender % pp, number % pp)

    def _post(self, keys: Sequence[Key | None], chunk: int, *, blocks: bool) -> None:
        """Begin messages; wait for them where they block."""
        real = tuple(key for key in keys if key)
        if not real:
            return
        first = last = self._add(Code.POST, 2.0, keys=real, in_pass=False, blocks=blocks)
        if blocks:
            last = self._add(Code.TAKE, 0.0, keys=real, in_pass=False, blocks=True)
        for key in real:
            is_send, own = key.sender == self.stage, key.number
            if is_send:
                own -= 1 if key.direction == "forward" else -1
            op = "send" if is_send else "recv"
            size = 2 * self.tokens * self.job.hidden
            size /= self.job.layout.tp if self.job.sequence_parallel else 1
            self.operations[first].wire_bytes = self.operations[last].wire_bytes = size
            args: dict[str, int | str] = {"op": op, "direction": key.direction}
            args |= {"microbatch": key.microbatch, "chunk": own // self.job.layout.pp}
            if self.job.has_sizes:
                args["size_bytes"] = int(size)
            track = Track.COMMUNICATION if blocks else Track.OVERLAPPED
            span = Span(Kind.P2P, f"{op}_{key.direction}", track, first, last, args, axis="pp")
            self.spans.append(replace(span, peer=key.receiver if is_send else key.sender, key=key))

    def _one_forward_one_backward(self) -> None:
        num, pp = self.num_microbatches, self.job.layout.pp
        warm = min(pp - self.stage - 1, num)

        def key(direction: str, microbatch: int, *, is_send: bool) -> Key | None:
            return self._key(direction, 0, microbatch, is_send=is_send)

        for it in range(warm):
            self._post([key("forward", it, is_send=False)], 0, blocks=True)
            self._forward(it)
            self._post([key("forward", it, is_send=True)], 0, blocks=True)
        if warm < num:
            self._post([key("forward", warm, is_send=False)], 0, blocks=True)
        for it in range(num - warm):
            ahead = warm + it
            self._forward(ahead)
            exchange = [key("forward", ahead, is_send=True), key("backward", it, is_send=False)]
            self._post(exchange, 0, blocks=True)
            self._backward(it)
            exchange = [key("backward", it, is_send=True)]
            if ahead + 1 < num:
                exchange.append(key("forward", ahead + 1, is_send=False))
            self._post(exchange, 0, blocks=True)
        for it in range(num - warm, num):
            self._post([key("backward", it, is_send=False)], 0, blocks=True)
            self._backward(it)
            self._post([key("backward", it, is_send=True)], 0, blocks=True)

    def _interleaved(self) -> None:
        pp, vpp, num = self.job.layout.pp, self.job.layout.vpp, self.num_microbatches
        total = num * vpp
        warm = min((pp - self.stage - 1) * 2 + (vpp - 1) * pp, total)
        steps = [("forward", it) for it in range(warm)]
        for it in range(total - warm):
            steps += [("forward", warm + it), ("backward", it)]
        steps += [("backward", it) for it in range(total - warm, total)]
        passes = []
        for direction, it in steps:
            chunk = it % (pp * vpp) // pp
            chunk = chunk if direction == "forward" else vpp - 1 - chunk
            passes.append((direction, chunk, it // (pp * vpp) * pp + it % pp))
        for at, (direction, chunk, microbatch) in enumerate(passes):
            for ahead in passes[at : at + 2] if at == 0 else passes[at + 1 : at + 2]:
                self._post([self._key(*ahead, is_send=False)], ahead[1], blocks=False)
            awaited = self._key(direction, chunk, microbatch, is_send=False)
            if awaited:
                self._add(Code.TAKE, 0.0, keys=(awaited,), in_pass=False)
            (self._forward if direction == "forward" else self._backward)(microbatch, chunk)
            self._post([self._key(direction, chunk, microbatch, is_send=True)], chunk, blocks=False)


def merged(programs: Sequence[Program]) -> list[tuple[int, int]]:
    """Return (stage, place of the operation) of all stages, nothing before what it waits for."""
    _number_messages(programs)
    ends: Counter[tuple[str, Key]] = Counter()
    wanted = Counter(
        (it.axis, key) for one in programs for it in one.operations
        for key in it.keys if it.code in (Code.POST, Code.ARRIVE)
    )  # fmt: skip
    order: list[tuple[int, int]] = []
    places = [0] * len(programs)
    while True:
        before = len(order)
        for stage, program in enumerate(programs):
            while places[stage] < len(program.operations):
                each = program.operations[places[stage]]
                ids = [(each.axis, key) for key in each.keys]
                if each.code in (Code.POST, Code.ARRIVE):
                    ends.update(ids)
                elif any(ends[it] < wanted[it] for it in ids):
                    break
                order.append((stage, places[stage]))
                places[stage] += 1
        if len(order) == before:
            break
    if any(place < len(one.operations) for place, one in zip(places, programs, strict=True)):
        raise ValueError("stages wait for each other for ever")
    return order


def _number_messages(programs: Sequence[Program]) -> None:
    """Write the running numbers of messages, in the order in which they are sent."""
    counts: Counter[tuple[str, int, int]] = Counter()
    numbers: dict[Key, int] = {}
    for program in programs:
        for span in program.spans:
            if span.key and span.args["op"] == "send":
                way = (span.key.direction, span.key.sender, span.key.receiver)
                numbers[span.key] = counts[way]
                counts[way] += 1
    for program in programs:
        for span in program.spans:
            if span.key:
                span.args["sequence"] = numbers[span.key]
