"""Write down what a rank does in an iteration: its operations, in the order of its schedule.

An operation is a tuple whose first element says what it is:

    (OPEN, name, kind, at)        a span begins on the compute track
    (CLOSE,)                      the innermost one ends
    (WORK, work, microbatch, has_experts)           kernels
    (TALK, 0, group, op, bytes, at)                 a collective, waited for
    (START, label, group, op, bytes, at)            one that runs beside
    (FINISH, label)               the compute stream waits for it
    (EXCHANGE, messages)          messages of one call, waited for
    (POST, message), (AWAIT, key) a message that runs beside
    (LOAD, microbatch, chunk), (SYNC,), (BEGIN,), (END,)

`at` is (phase, microbatch, chunk, layer). A message is (key, is_send, peer, direction, microbatch,
chunk, bytes); both ends have its key. Schedules are Megatron-Core's: 1F1B with blocking exchanges,
interleaved 1F1B with messages beside compute, gradients reduced in buckets behind the last backward
pass, or at the end.
"""

from __future__ import annotations

from typing import Any

from benchmarks.grounds.quarry.costs import Costs, Work
from benchmarks.grounds.quarry.groups import Groups
from benchmarks.grounds.quarry.jobs import Job

OPEN, CLOSE, WORK, TALK, START, FINISH, EXCHANGE, POST, AWAIT, LOAD, SYNC, BEGIN, END = range(13)

LAUNCHED = {WORK, TALK, START, EXCHANGE, POST}

Operation = tuple[Any, ...]
"""The fields behind the code differ by code, as said above."""
Message = tuple[tuple[int | str, ...], bool, int, str, int, int, int]

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
NONE = -1

Place = tuple[str, int, int, int]
NOWHERE: Place = ("", NONE, NONE, NONE)


class Program:
    """The operations of one rank, the same in each iteration."""

    def __init__(self, job: Job, costs: Costs, groups: Groups, rank: int) -> None:
        self.job, self.costs, self.groups, self.rank = job, costs, groups, rank
        place = job.layout.coordinates(rank)
        self.stage, self.num_stages = place.pp, job.layout.pp
        self.is_first, self.is_last = place.pp == 0, place.pp == job.layout.pp - 1
        self.loads = job.loads_everywhere or place.tp == 0
        self.line = job.layout.group(rank, "pp")
        self.operations: list[Operation] = []
        self.message_bytes = int(costs.tokens * costs.width / costs.shared)
        self.axis = "dp_cp" if self._has_modules() else "dp"
        """Along which replicas lie."""
        self.layer_name = "transformer_layer" if job.style == "megatron" else "layer"
        self._label = 0
        self._gathers: dict[int, int] = {}
        """Labels of gathered weights by layer, which the first passes wait for."""
        self._reductions: list[int] = []
        self._write()

    # --- the iteration -------------------------------------------------------------------------

    def _write(self) -> None:
        self._add(BEGIN)
        self._open("iteration", "iteration")
        if self._gathers_beside:
            self._start_gather()
        if self.num_stages == 1:
            for microbatch in range(self.job.num_microbatches):
                self._forward(microbatch, 0)
                self._backward(microbatch, 0)
        elif self.job.num_chunks == 1:
            self._one_forward_one_backward()
        else:
            self._interleaved()
        self._finish_gradients()
        self._update()
        self._close()
        self._add(END)

    @property
    def _gathers_beside(self) -> bool:
        job = self.job
        return job.overlap_gather and job.distributed_optimizer and job.style == "megatron"

    def _add(self, *operation: Any) -> None:
        self.operations.append(operation)

    def _open(self, name: str, kind: str = "compute", at: Place = NOWHERE) -> None:
        self._add(OPEN, name, kind, at)

    def _close(self) -> None:
        self._add(CLOSE)

    def _talk(self, axis: str, op: str, size: float, at: Place = NOWHERE) -> None:
        group = self.groups.of(self.rank, axis)
        if group is not None:
            self._add(TALK, 0, group, op, int(size), at)

    def _begin_talk(self, axis: str, op: str, size: float, at: Place = NOWHERE) -> int:
        """Start a collective beside compute; return its label, 0 where there is nobody to talk."""
        group = self.groups.of(self.rank, axis)
        if group is None:
            return 0
        self._label += 1
        self._add(START, self._label, group, op, int(size), at)
        return self._label

    def _finish(self, label: int) -> None:
        if label:
            self._add(FINISH, label)

    # --- schedules -----------------------------------------------------------------------------

    def _one_forward_one_backward(self) -> None:
        count = self.job.num_microbatches
        warm = min(self.num_stages - self.stage - 1, count)
        for turn in range(warm):
            self._exchange(self._input(turn, 0))
            self._forward(turn, 0)
            self._exchange(self._output(turn, 0))
        if count > warm:
            self._exchange(self._input(warm, 0))
        for turn in range(count - warm):
            self._forward(warm + turn, 0)
            self._exchange(self._output(warm + turn, 0), self._gradient(turn, 0))
            self._backward(turn, 0)
            following = self._input(warm + turn + 1, 0) if turn < count - warm - 1 else None
            self._exchange(self._input_gradient(turn, 0), following)
        for turn in range(count - warm, count):
            self._exchange(self._gradient(turn, 0))
            self._backward(turn, 0)
            self._exchange(self._input_gradient(turn, 0))

    def _interleaved(self) -> None:
        """Write the interleaved schedule: the next input is asked for one turn ahead."""
        size, chunks = self.num_stages, self.job.num_chunks
        total = self.job.num_microbatches * chunks
        warm = min((size - self.stage - 1) * 2 + (chunks - 1) * size, total)

        def place(turn: int, forward: bool) -> tuple[int, int]:
            chunk = turn % (size * chunks) // size
            microbatch = turn // (size * chunks) * size + turn % size
            return microbatch, chunk if forward else chunks - 1 - chunk

        def ask(turn: int, forward: bool) -> None:
            if turn < total:
                at = place(turn, forward)
                self._post(self._input(*at) if forward else self._gradient(*at))

        def work(turn: int, forward: bool) -> None:
            at = place(turn, forward)
            coming = self._input(*at) if forward else self._gradient(*at)
            if coming is not None:
                self._add(AWAIT, coming[0])
            ask(turn + 1, forward)
            (self._forward if forward else self._backward)(*at)
            self._post(self._output(*at) if forward else self._input_gradient(*at))

        ask(0, True)
        for turn in range(warm):
            work(turn, True)
        ask(0, False)
        for turn in range(total - warm):
            work(warm + turn, True)
            work(turn, False)
        for turn in range(total - warm, total):
            work(turn, False)

    def _exchange(self, *messages: Message | None) -> None:
        there = tuple(each for each in messages if each is not None)
        if there:
            self._add(EXCHANGE, there)

    def _post(self, message: Message | None) -> None:
        if message is not None:
            self._add(POST, message)

    def _message(self, is_send: bool, step: int, microbatch: int, chunk: int, tag: int) -> Message:
        """Return a message; `tag` is the virtual stage that makes what is sent."""
        peer = self.line[(self.stage + step) % self.num_stages]
        direction = FORWARD if is_send == (step > 0) else BACKWARD
        key = (direction, self.line[0], microbatch, tag)
        return key, is_send, peer, direction, microbatch, chunk, self.message_bytes

    def _virtual(self, chunk: int) -> int:
        return chunk * self.num_stages + self.stage

    @property
    def _last_virtual(self) -> int:
        return self.job.num_chunks * self.num_stages - 1

    def _input(self, microbatch: int, chunk: int) -> Message | None:
        tag = self._virtual(chunk)
        if tag == 0:
            return None
        return self._message(False, -1, microbatch, chunk, tag - 1)

    def _output(self, microbatch: int, chunk: int) -> Message | None:
        tag = self._virtual(chunk)
        if tag == self._last_virtual:
            return None
        return self._message(True, 1, microbatch, chunk, tag)

    def _gradient(self, microbatch: int, chunk: int) -> Message | None:
        tag = self._virtual(chunk)
        if tag == self._last_virtual:
            return None
        return self._message(False, 1, microbatch, chunk, tag + 1)

    def _input_gradient(self, microbatch: int, chunk: int) -> Message | None:
        tag = self._virtual(chunk)
        if tag == 0:
            return None
        return self._message(True, -1, microbatch, chunk, tag)

    # --- passes --------------------------------------------------------------------------------

    def _layers(self, chunk: int) -> list[tuple[int, str]]:
        """Return (global number, letter) of the layers of a chunk."""
        row = self.job.chunks[chunk]
        before = self.job.layers_before(chunk, self.stage)
        return list(enumerate(row[self.stage], start=before + 1))

    def _forward(self, microbatch: int, chunk: int) -> None:
        at = (FORWARD, microbatch, chunk, NONE)
        ends = (self._virtual(chunk) == 0, self._virtual(chunk) == self._last_virtual)
        if not self._has_modules():  # the trainer's loop asks for a batch, no pass does
            self._add(LOAD, microbatch, chunk)
        self._open("forward", at=at)
        if any(ends) and self._has_modules():
            if self.loads:
                self._add(LOAD, microbatch, chunk)
            if not self.job.loads_everywhere:
                self._talk("tp", "broadcast", 16 * self.costs.tokens, at)
        if ends[0]:
            self._module("embedding", self.costs.embedding(), at, (None, "reduce"))
        gathered = self._prefetch(chunk, None, at)
        for number, letter in self._layers(chunk):
            self._finish(gathered.pop(number, 0))
            gathered.update(self._prefetch(chunk, number, at))
            if microbatch == 0 and number in self._gathers:
                self._finish(self._gathers[number])
            self._layer(letter, FORWARD, microbatch, chunk, number)
        if ends[1]:
            self._module("output_layer", self.costs.output(), at, ("gather", None))
            loss = self.costs.embedding().times(0.02)
            self._module("loss", loss, at, (None, None))
        self._close()

    def _backward(self, microbatch: int, chunk: int) -> None:
        at = (BACKWARD, microbatch, chunk, NONE)
        self._open("backward", at=at)
        if self._virtual(chunk) == self._last_virtual:
            self._module(
                "output_layer-backward", self.costs.output().times(2, 1.6), at, (None, "reduce")
            )
        is_last = microbatch == self.job.num_microbatches - 1
        gathered = self._prefetch(chunk, None, at)
        for number, letter in reversed(self._layers(chunk)):
            self._finish(gathered.pop(number, 0))
            gathered.update(self._prefetch(chunk, number, at))
            if self.job.recompute:
                self._layer(letter, RECOMPUTE, microbatch, chunk, number)
            self._layer(letter, BACKWARD, microbatch, chunk, number)
            if self.job.style == "fsdp" or (self.job.overlap_grads and is_last):
                self._reduce(letter, at)
        if self._virtual(chunk) == 0:
            work = self.costs.embedding().times(2, 1.5)
            self._module("embedding-backward", work, at, ("gather", None))
        self._close()

    def _module(self, name: str, work: Work, at: Place, around: tuple[Any, Any]) -> None:
        """Write a module between an all-gather and a reduction over the tensor-parallel group."""
        if self._has_modules():
            self._open(name, at=at)
        self._around(around[0] is not None, at)
        self._add(WORK, work, at[1], False)
        if around[1] is not None:
            self._reduction(at)
        if self._has_modules():
            self._close()

    def _around(self, gathers: bool, at: Place) -> None:
        if gathers and self.job.sequence_parallel:
            self._talk("tp", "all_gather", self.message_bytes, at)

    def _reduction(self, at: Place) -> None:
        whole = self.costs.tokens * self.costs.width
        op = "reduce_scatter" if self.job.sequence_parallel else "all_reduce"
        self._talk("tp", op, whole, at)

    def _layer(self, letter: str, phase: str, microbatch: int, chunk: int, number: int) -> None:
        at = (phase, microbatch, chunk, number)
        suffix = "" if phase == FORWARD else f"-{phase}"
        self._open(self.layer_name + suffix, at=at)
        parts = {"d": (self._attention, self._mlp), "e": (self._attention, self._moe)}
        for part in parts.get(letter, (self._mixer,))[:: -1 if phase == BACKWARD else 1]:
            part(suffix, at)
        self._close()

    def _scaled(self, work: Work, phase: str) -> Work:
        return work.times(2, 1.7) if phase == BACKWARD else work

    def _has_modules(self) -> bool:
        """Tell whether modules of a layer are recorded: not those of plain PyTorch models."""
        return self.job.style == "megatron"

    def _attention(self, suffix: str, at: Place) -> None:
        if self._has_modules():
            self._open("attention" + suffix, at=at)
        self._around(True, at)
        keys = 2 * self.costs.tokens * self.costs.width * self.job.kv_ratio / self.job.layout.tp
        if at[0] != BACKWARD:
            self._talk("cp", "all_gather", keys, at)
        self._add(WORK, self._scaled(self.costs.attention(), at[0]), at[1], False)
        if at[0] == BACKWARD:
            self._talk("cp", "reduce_scatter", keys * self.job.layout.cp, at)
        self._reduction(at)
        if self._has_modules():
            self._close()

    def _mlp(self, suffix: str, at: Place) -> None:
        if self._has_modules():
            self._open("mlp" + suffix, at=at)
        self._around(True, at)
        self._add(WORK, self._scaled(self.costs.mlp(), at[0]), at[1], False)
        self._reduction(at)
        if self._has_modules():
            self._close()

    def _mixer(self, suffix: str, at: Place) -> None:
        self._around(True, at)
        self._add(WORK, self._scaled(self.costs.mixer(), at[0]), at[1], False)
        self._reduction(at)

    def _moe(self, suffix: str, at: Place) -> None:
        self._open("moe" + suffix, at=at)
        sent = self.costs.tokens / self.job.layout.tp * self.costs.width
        sent *= self.job.experts_per_token
        router, experts = self.costs.router(), self.costs.experts()
        first, last = (router.times(0.6), router.times(0.4))
        self._add(WORK, self._scaled(first, at[0]), at[1], False)
        if at[0] != BACKWARD:
            self._add(SYNC)  # how many tokens each expert gets is read on the host
        self._talk("ep", "all_to_all", sent, at)
        self._add(WORK, self._scaled(experts, at[0]), at[1], True)
        self._talk("ep", "all_to_all", sent, at)
        self._add(WORK, self._scaled(last, at[0]), at[1], False)
        self._close()

    # --- weights and gradients -----------------------------------------------------------------

    def _prefetch(self, chunk: int, number: int | None, at: Place) -> dict[int, int]:
        """Start to gather the weights of the layer that comes after `number`; FSDP only."""
        if self.job.style != "fsdp":
            return {}
        order = [each for each, _ in self._layers(chunk)][:: -1 if at[0] == BACKWARD else 1]
        place = 0 if number is None else order.index(number) + 1
        if place == len(order):
            return {}
        size = 2 * self.costs.layer_weights("d") / self.job.layout.dp
        return {order[place]: self._begin_talk(self.axis, "all_gather", size, (*at[:3], NONE))}

    def _start_gather(self) -> None:
        """Start to gather the updated weights of all layers, which first passes wait for."""
        share = 2 / self.groups.size(self.rank, self.axis)
        for chunk in range(self.job.num_chunks):
            for number, letter in self._layers(chunk):
                size = share * self.costs.layer_weights(letter)
                self._gathers[number] = self._begin_talk(self.axis, "all_gather", size)

    def _reduce(self, letter: str, at: Place) -> None:
        """Start to reduce the gradients of a layer, as soon as they are there."""
        ddp = self.job.style == "ddp" or not (
            self.job.distributed_optimizer or self.job.style == "fsdp"
        )
        size = (2 if self.job.style == "fsdp" else 4) * self.costs.layer_weights(letter)
        op = "all_reduce" if ddp else "reduce_scatter"
        self._reductions.append(self._begin_talk(self.axis, op, size, at))
        if letter == "e":
            size = 4 * self.costs.expert_weights()
            self._reductions.append(self._begin_talk("expt_dp", op, size, at))

    def _weights(self) -> tuple[float, float]:
        """Return how many weights the rank holds: dense ones, and those of experts."""
        letters = [each for row in self.job.chunks for each in row[self.stage]]
        dense = sum(self.costs.layer_weights(each) for each in letters)
        dense += (int(self.is_first) + int(self.is_last)) * self.costs.end_weights()
        return dense, letters.count("e") * self.costs.expert_weights()

    def _finish_gradients(self) -> None:
        job = self.job
        self._open("grad-sync", "optimizer")
        dense, experts = self._weights()
        op = "reduce_scatter" if job.distributed_optimizer else "all_reduce"
        if job.style == "fsdp" or job.overlap_grads:
            for label in self._reductions:
                self._finish(label)
            ends = (int(self.is_first) + int(self.is_last)) * self.costs.end_weights()
            dense, experts = ends, 0.0
        if dense:
            op = "reduce_scatter" if job.style == "fsdp" else op
            self._add(WORK, self.costs.update(dense).times(0.25, 0.1), NONE, False)
            self._talk(self.axis, op, 4 * dense)
        if experts:
            self._talk("expt_dp", op, 4 * experts)
        if job.tied and (self.is_first or self.is_last) and self.num_stages > 1:
            self._talk("embd", "all_reduce", 4 * self.costs.end_weights())
        if job.sequence_parallel:
            self._talk("tp", "all_reduce", 8 * job.hidden)
        self._close()

    def _update(self) -> None:
        job = self.job
        dense, experts = self._weights()
        divided = (job.distributed_optimizer and job.style == "megatron") or job.style == "fsdp"
        share = 1 / self.groups.size(self.rank, self.axis) if divided else 1.0
        self._open("optimizer", "optimizer")
        self._add(WORK, self.costs.update(dense * share + experts).times(0.2, 0.5), NONE, False)
        if job.style == "megatron":
            self._talk("mp", "all_reduce", 4)
            self._add(SYNC)
        self._add(WORK, self.costs.update(dense * share + experts), NONE, False)
        if divided and job.style == "megatron" and not self._gathers_beside:
            self._talk(self.axis, "all_gather", 2 * dense * share)
        self._close()
        if job.syncs:
            self._add(SYNC)
