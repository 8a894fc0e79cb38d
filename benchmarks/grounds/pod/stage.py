"""Run the ranks of one pipeline stage: schedule, messages, passes, update.

See `engine` for what an event is. Layers are run by `modules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.grounds.pod.faults import Law
from benchmarks.grounds.pod.job import Floats
from benchmarks.grounds.pod.modules import Modules
from benchmarks.grounds.pod.ranks import LEAVE_S, Times, World
from benchmarks.grounds.pod.recording import Entry, on_host
from benchmarks.grounds.pod.schedule import Message, Pass, passes_of, received, sent
from benchmarks.grounds.pod.work import OPTIMIZER_BYTES, Piece
from megascan.schema import Kind, Track
from megascan.vocabulary import collection_of, message_name

BETWEEN_S = 1.5e-3  # of Python between iterations
LOG_S = 12e-3
SAVING_S = 0.35


class Stage(Modules):
    """The ranks of one stage, through all iterations."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        job, self._mail = world.job, world.mail
        self._pause_rng = np.random.default_rng([job.seed, 31, number])
        self._host_rng = np.random.default_rng([job.seed, 37, number])
        places = np.arange(job.stage_size)
        self._loads = places % job.layout.tp == 0
        self._is_first, self._is_last = number == 0, number == job.layout.pp - 1
        self._is_zero = job.ranks[number] == 0
        self._messages: list[tuple[Entry, Message]] = []
        self._mail_counter: Counter[tuple[int, int, bool]] = Counter()
        self.length_s = self.host

    def rest(self, seconds: Floats) -> None:
        """Let time go by between iterations, all alike."""
        self.host = self.host + seconds[:, None]
        self.device = np.maximum(self.device, self.host)

    def iteration(self, number: int) -> Iterator[None]:
        """Run one iteration; yield wherever another stage must go first."""
        self.begin(number)
        self._mail_counter.clear()
        self._between(number)
        opened = self.opened("iteration")
        if self.layout.vpp > 1:
            yield from self._interleaved()
        else:
            yield from self._one_by_one()
        yield from self._update()
        self.closed(opened, Kind.ITERATION, {"iteration": number})
        self.length_s = self.device - opened[1]
        self.host = np.maximum(self.host, self.device)
        self._save(number)

    def _between(self, number: int) -> None:
        """Spend what the trainer does between iterations: logging on rank 0, mostly."""
        seconds = BETWEEN_S * np.exp(0.3 * self._host_rng.standard_normal(self.size))
        if self.job.trainer.logs_every and (number - 1) % self.job.trainer.logs_every == 0:
            seconds = seconds + self._is_zero * LOG_S * (1 + self._host_rng.exponential(0.3))
        self.host = self.host + seconds * self.machine.factor(Law.LAUNCH, self.number, self.host)

    def _save(self, number: int) -> None:
        """Copy the state for a checkpoint that is written in the background."""
        every = self.job.trainer.saves_every
        if every and number % every == 0:
            begin = self.host
            self.host = begin + SAVING_S * np.exp(0.1 * self._host_rng.standard_normal(self.size))
            if self.recording is not None and self.recording.wants("save-checkpoint"):
                arguments = {"iteration": number}
                entry = on_host("save-checkpoint", Kind.CHECKPOINT, arguments, begin, self.host)
                self.recording.add(self.number, entry)

    def _order(self) -> list[Pass]:
        layout, count = self.layout, self.job.trainer.num_microbatches
        return passes_of(self.number, layout.pp, layout.vpp, count)

    def _ends_of(self, one: Pass) -> tuple[Message | None, Message | None]:
        place = (self.number, self.layout.pp, self.layout.vpp)
        return received(one, *place), sent(one, *place)

    def _one_by_one(self) -> Iterator[None]:
        """Run 1F1B: what is sent after a pass and what the next one needs are one exchange where
        forward and backward follow each other.
        """
        order = self._order()
        yield from self._exchange([], [self._ends_of(order[0])[0]], (order[0], order[0]))
        for place, one in enumerate(order):
            self._pass(one)
            following = order[place + 1] if place + 1 < len(order) else None
            gives = self._ends_of(one)[1]
            needs = self._ends_of(following)[0] if following else None
            around = (one, following or one)
            if following and following.forward != one.forward:
                yield from self._exchange([gives], [needs], around)
            else:
                yield from self._exchange([gives], [], around)
                yield from self._exchange([], [needs], around)

    def _exchange(
        self,
        gives: Sequence[Message | None],
        needs: Sequence[Message | None],
        around: tuple[Pass, Pass],
    ) -> Iterator[None]:
        """Send and receive at once; the host waits until both are done."""
        messages = [(one, True) for one in gives if one] + [(one, False) for one in needs if one]
        if not messages:
            return
        start, launch = self.launched(), self.host
        for message, sends in messages:
            self._mail.post(message, start, sends=sends)
        while not all(self._mail.is_known(message) for message, _ in messages):
            yield
        ends = [self._mail.end_of(message, self.costs.activation_bytes) for message, _ in messages]
        end = np.maximum.reduce(ends) + self._network.exponential(LEAVE_S, self.size)
        for message, sends in messages:
            own = around[0] if sends else around[1]
            self._note(
                message, own, sends=sends, track=Track.COMMUNICATION, times=(start, end, launch)
            )
        self.device = end
        self.host = np.maximum(self.host, end) + 4e-6

    def _note(
        self, message: Message, own: Pass, *, sends: bool, track: Track, times: Times
    ) -> Entry | None:
        """Record one end of a message."""
        key = (message.sender, message.receiver, message.forward)
        sequence = self._mail_counter[key]
        self._mail_counter[key] += 1
        if self.recording is None:
            return None
        direction = "forward" if message.forward else "backward"
        op = "send" if sends else "recv"
        start, end, launch = (each[0] for each in times)
        entry = Entry(
            Kind.P2P,
            message_name(op, direction),
            track,
            {
                **self.context,
                "microbatch": own.microbatch,
                "chunk": own.chunk,
                "op": op,
                "direction": direction,
                "sequence": sequence,
                "size_bytes": self.costs.activation_bytes,
            },
            start,
            end,
            launch,
            axis="pp",
            peer=message.receiver if sends else message.sender,
        )
        self.recording.add(self.number, entry)
        return entry

    def _interleaved(self) -> Iterator[None]:
        """Run several chunks in turns; messages travel beside the passes."""
        order = self._order()
        size = self.costs.activation_bytes
        self._messages = []
        self._post_need(order[0])
        for place, one in enumerate(order):
            if place + 1 < len(order):
                self._post_need(order[place + 1])
            needs, gives = self._ends_of(one)
            if needs:
                while not self._mail.is_known(needs):
                    yield
                self.device = np.maximum(self.device, self._mail.end_of(needs, size))
            self._pass(one)
            if gives:
                self._post(gives, one, sends=True)
        while not all(self._mail.is_known(message) for _, message in self._messages):
            yield
        for entry, message in self._messages:
            entry.end_s = np.maximum(self._mail.end_of(message, size)[0], entry.start_s)

    def _post_need(self, one: Pass) -> None:
        needs = self._ends_of(one)[0]
        if needs:
            self._post(needs, one, sends=False)

    def _post(self, message: Message, one: Pass, *, sends: bool) -> None:
        start, launch = self.launched(), self.host
        self._mail.post(message, start, sends=sends)
        entry = self._note(
            message, one, sends=sends, track=Track.OVERLAPPED, times=(start, start, launch)
        )
        if entry is not None:
            self._messages.append((entry, message))

    def _pass(self, one: Pass) -> None:
        """Run a microbatch through a chunk, forward or backward."""
        self.enter(one)
        self._collect(one)
        name = "forward" if one.forward else "backward"
        opened = self.opened(name)
        place = one.chunk * self.layout.pp + self.number
        begins, ends = place == 0, place == self.layout.pp * self.layout.vpp - 1
        if one.forward:
            if begins or ends:
                self._load_batch(one, begins=begins)
            self.forward(one, begins=begins, ends=ends)
        else:
            last = one.microbatch == self.job.trainer.num_microbatches - 1
            self.backward(one, begins=begins, ends=ends, last=last)
        self.closed(opened, Kind.COMPUTE, self.of_pass())
        self.leave()

    def _load_batch(self, one: Pass, *, begins: bool) -> None:
        """Take the next batch on the first rank of each TP group, and hand it to the others."""
        trainer = self.job.trainer
        noise = np.exp(trainer.loading_sigma * self._host_rng.standard_normal(self.size))
        begin = self.host
        slow = self.machine.factor(Law.LOADER, self.number, begin)
        seconds = trainer.loading_ms * 1e-3 * noise * slow * self._loads
        self.host = begin + seconds
        if self.recording is not None:
            arguments = {**self.context, "microbatch": one.microbatch, "chunk": one.chunk}
            entry = on_host("batch-generator", Kind.DATA, arguments, begin, self.host)
            self.recording.add(self.number, entry)
        if self.layout.tp > 1:
            for _ in range(2 if begins else 1):
                self.broadcast("tp", 8 * self.job.tokens)

    def _collect(self, one: Pass) -> None:
        """Stop the host where it is not scheduled, and where Python collects garbage."""
        rng = self._pause_rng
        self.host = self.host + self.machine.pauses(Law.STALL, self.number, rng)
        chance, tail = rng.random(self.size), rng.exponential(1.0, self.size)
        begin = self.host
        pauses = self.machine.pauses(Law.COLLECTOR, self.number, rng)
        own = self._collections(chance, tail)
        self.host = begin + np.where(pauses > 0, pauses, sum(own))
        if self.recording is None or not self.recording.wants("gc"):
            return
        large = pauses[0] > 0
        for generation, seconds in enumerate(own):
            seen = np.where(large, pauses[0] * (generation == 2), seconds)
            if seen.any():
                name, end = collection_of(generation), begin + seen
                entry = on_host(name, Kind.GC, self.context, begin, end)
                self.recording.add(self.number, entry)

    def _collections(self, chance: Floats, tail: Floats) -> list[Floats]:
        """Return how long each rank's collector pauses by itself, for each generation."""
        trainer, none = self.job.trainer, np.zeros(self.size)
        num_passes = 2 * trainer.num_microbatches * self.layout.vpp
        full = chance > 1 - 0.4 / num_passes
        second = np.where(full, trainer.collector_ms * 1e-3 * (1 + 0.2 * tail), none)
        if not trainer.collects_garbage:
            return [none, none, second]
        return [
            np.where((chance < 0.12) & (chance >= 0.006), 9e-5 * (1 + tail), none),
            np.where(chance < 0.006, 2e-3 * (1 + tail), none),
            second,
        ]

    def _update(self) -> Iterator[None]:
        """Finish gradients, and step."""
        opened = self.opened("grad-sync")
        self.finish_gradients()
        if self.job.model.tied and self.layout.pp > 1 and (self.is_first_or_last()):
            stages = (0, self.layout.pp - 1)
            num_bytes = self.costs.end_parameters * self.job.trainer.gradient_bytes
            yield from self._together("embd", stages, num_bytes)
        self.closed(opened, Kind.OPTIMIZER, self.context)
        opened = self.opened("optimizer")
        held = sum(self.parameters.values())
        shares = self.replicas if self.job.trainer.distributed_optimizer else 1
        self.kernels(Piece(0.0, self.traffic(4 * held / shares), 6))
        axis = "intra_dist_opt" if self.job.trainer.distributed_optimizer else "mp"
        if axis == "intra_dist_opt" or self.layout.tp * self.layout.pp > 1:
            yield from self._together(axis, range(self.layout.pp), 4)
        self.host = np.maximum(self.host, self.device)
        self.kernels(Piece(0.0, self.traffic(OPTIMIZER_BYTES * held / shares), 24))
        self.gather_parameters()
        self.closed(opened, Kind.OPTIMIZER, self.context)

    def is_first_or_last(self) -> bool:
        """Tell whether the stage holds the embedding or the output layer."""
        return self._is_first or self._is_last

    def _together(self, axis: str, stages: Sequence[int], num_bytes: int) -> Iterator[None]:
        """Reduce over ranks of several stages."""
        start, launch = self.launched(), self.host
        self._mail.arrive(axis, self.number, start)
        while not self._mail.arrived(axis, stages):
            yield
        over = {"intra_dist_opt": "world", "mp": "mp"}.get(axis, "place")
        last = self._mail.last_of(axis, over)
        end = last + self._mail.slowest(last, num_bytes, stages)
        if over == "world":
            end = np.broadcast_to(end.max(axis=1, keepdims=True), end.shape)
        what, times = (axis, "all_reduce", num_bytes), (start, end, launch)
        self.note_collective(what, Track.COMMUNICATION, times, self.context)
        self.device = end
