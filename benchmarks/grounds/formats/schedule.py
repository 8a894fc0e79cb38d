"""Order the passes of a pipeline: none, one forward one backward, and interleaved chunks.

One forward, one backward, as Megatron has it: a stage warms up with as many forward passes as
stages follow, then exchanges with one neighbour at a time (a batch of a send and a receive), and
cools down. With several chunks a stage messages travel beside computation: each is received while
the pass before it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.grounds.formats.hardware import Chip
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.model import Costing
from benchmarks.grounds.formats.program import Code, Communication, Message, Program
from benchmarks.grounds.formats.trainer import Trainer

Note = tuple[str, str, int, int]
"""A message from a rank's own view: send or recv, direction, microbatch, chunk."""


def program_of(job: Job, chip: Chip) -> Program:
    """Return what all ranks of a job do in one iteration."""
    program, costing = Program(), Costing(job, chip)
    for rank in range(job.shape.world):
        trainer = Trainer(program, job, costing, rank)
        begin = trainer.begin_iteration()
        if job.shape.pp == 1:
            _alone(trainer)
        elif job.shape.vpp == 1:
            _Pipeline(trainer).one_by_one()
        else:
            _Pipeline(trainer).interleaved()
        trainer.finish_iteration(begin)
    return program


def _alone(trainer: Trainer) -> None:
    count = trainer.job.num_microbatches
    for microbatch in range(count):
        trainer.forward(microbatch, 0)
        trainer.backward(microbatch, 0, is_last=microbatch == count - 1)


class _Pipeline:
    """Lets one rank run its passes and messages."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._job = trainer, trainer.job
        shape = self._job.shape
        self._stage, self._count = trainer.stage, shape.pp
        self._ring = shape.members("pp", trainer.rank)
        self._batches: Counter[tuple[int, ...]] = Counter()
        self._sent: list[int] = []

    def _peer(self, step: int) -> int:
        return self._ring[(self._stage + step) % self._count]

    def _exchange(self, step: int, notes: Sequence[Note]) -> None:
        """Send and receive with one neighbour in one batch; end when both are through."""
        peer, rank = self._peer(step), self._trainer.rank
        pair = tuple(sorted((peer, rank)))
        key = ("batch", pair, self._batches[pair])
        self._batches[pair] += 1
        self._join(key, pair, peer, notes, stream=f"pp {pair}", synchronous=True)
        if self._batched_sync:
            self._trainer.sync()

    @property
    def _batched_sync(self) -> bool:
        return not self._job.overlap

    def _join(
        self, key: object, pair: tuple[int, ...], peer: int, notes: Sequence[Note], *, stream: str,
        synchronous: bool,
    ) -> int:  # fmt: skip
        trainer = self._trainer
        size = trainer.costing.activation_bytes
        group = self._job.shape.group_of("pp", trainer.rank)
        made = Communication(group, "send", size, pair)
        number = trainer.program.communication(key, made)
        operation = trainer._add(
            Code.JOIN, "send_recv", host_ns=2.5e3 * self._job.launch_us, communication=number,
            stream=stream, synchronous=synchronous,
        )  # fmt: skip
        for op, direction, microbatch, chunk in notes:
            trainer.program.messages.append(
                Message(operation, op, direction, peer, size, microbatch, chunk)
            )
        return number

    def one_by_one(self) -> None:
        """Run 1F1B without interleaving."""
        trainer, total = self._trainer, self._job.num_microbatches
        first, last = self._stage == 0, self._stage == self._count - 1
        warmup = min(self._count - 1 - self._stage, total)
        steady = total - warmup

        def talk(step: int, *notes: tuple[str, str, int]) -> None:
            if not (last if step > 0 else first):
                self._exchange(step, [(*note, 0) for note in notes])

        for number in range(warmup):
            talk(-1, ("recv", "forward", number))
            trainer.forward(number, 0)
            talk(1, ("send", "forward", number))
        if steady:
            talk(-1, ("recv", "forward", warmup))
        for number in range(steady):
            trainer.forward(warmup + number, 0)
            talk(1, ("send", "forward", warmup + number), ("recv", "backward", number))
            trainer.backward(number, 0, is_last=number == total - 1)
            back = ("send", "backward", number)
            if number == steady - 1:
                talk(-1, back)
            else:
                talk(-1, back, ("recv", "forward", warmup + number + 1))
        for number in range(steady, total):
            talk(1, ("recv", "backward", number))
            trainer.backward(number, 0, is_last=number == total - 1)
            talk(-1, ("send", "backward", number))

    def interleaved(self) -> None:
        """Run 1F1B over several chunks a stage."""
        passes = self._interleaved_passes()
        pending: dict[int, int] = {0: self._receive(passes[0])}
        done_backward: Counter[int] = Counter()
        for place, (direction, microbatch, chunk) in enumerate(passes):
            if place + 1 < len(passes):
                pending[place + 1] = self._receive(passes[place + 1])
            self._trainer.wait(pending.pop(place))
            if direction == "forward":
                self._trainer.forward(microbatch, chunk)
            else:
                done_backward[chunk] += 1
                is_last = done_backward[chunk] == self._job.num_microbatches
                self._trainer.backward(microbatch, chunk, is_last=is_last)
            self._send(direction, microbatch, chunk)
        for number in self._sent:
            self._trainer.wait(number)

    def _interleaved_passes(self) -> list[tuple[str, int, int]]:
        chunks, stages = self._job.shape.vpp, self._count
        total = self._job.num_microbatches * chunks

        def place(number: int, *, backward: bool) -> tuple[str, int, int]:
            chunk = number // stages % chunks
            microbatch = number // (stages * chunks) * stages + number % stages
            return (
                ("backward", microbatch, chunks - 1 - chunk)
                if backward
                else ("forward", microbatch, chunk)
            )

        warmup = min(total, (stages - self._stage - 1) * 2 + (chunks - 1) * stages)
        passes = [place(number, backward=False) for number in range(warmup)]
        for number in range(total - warmup):
            passes.append(place(warmup + number, backward=False))
            passes.append(place(number, backward=True))
        passes += [place(number, backward=True) for number in range(total - warmup, total)]
        return passes

    def _receive(self, one: tuple[str, int, int]) -> int:
        direction, microbatch, chunk = one
        is_forward = direction == "forward"
        job, stage = self._job, self._stage
        if job.is_first(stage, chunk) if is_forward else job.is_last(stage, chunk):
            return -1
        peer = self._peer(-1 if is_forward else 1)
        rank = self._trainer.rank
        key = ("message", peer, rank, direction, microbatch, self._depth(chunk))
        stream = f"pp {peer}>{rank} {direction}"
        note = ("recv", direction, microbatch, chunk)
        pair = tuple(sorted((peer, rank)))
        return self._join(key, pair, peer, [note], stream=stream, synchronous=False)

    def _depth(self, chunk: int) -> int:
        return chunk * self._count + self._stage

    def _send(self, direction: str, microbatch: int, chunk: int) -> None:
        is_forward = direction == "forward"
        job, stage = self._job, self._stage
        if job.is_last(stage, chunk) if is_forward else job.is_first(stage, chunk):
            return
        step = 1 if is_forward else -1
        peer, rank = self._peer(step), self._trainer.rank
        key = ("message", rank, peer, direction, microbatch, self._depth(chunk) + step)
        stream = f"pp {rank}>{peer} {direction}"
        note = ("send", direction, microbatch, chunk)
        pair = tuple(sorted((peer, rank)))
        self._sent.append(self._join(key, pair, peer, [note], stream=stream, synchronous=False))
