"""What a trainer on Megatron-Core does on one stage: passes, messages, reduction of gradients."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from benchmarks.grounds.campus.crew import Crew, Mark
from benchmarks.grounds.campus.habits import Chance, set_lengths
from benchmarks.grounds.campus.hardware import Floats
from benchmarks.grounds.campus.links import message_s
from benchmarks.grounds.campus.model import EXPERTS, MAMBA, Cost
from benchmarks.grounds.campus.schedule import (
    BACKWARD,
    FORWARD,
    Message,
    Pass,
    exchanges,
    order,
    received,
    sent,
)
from benchmarks.grounds.campus.world import Mail
from megascan.schema import Track

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
LAYERS_A_BUCKET = 2
BESIDE_COMPUTE = 1.03  # how much longer kernels take beside a collective


class Stage:
    """One stage's ranks at work on an iteration."""

    def __init__(self, crew: Crew, expert_loads: dict[int, Floats]) -> None:
        job = crew.world.job
        self.crew, self.job, self.parts = crew, job, job.parts
        self.stage, self.num_stages, self.num_chunks = crew.stage, job.layout.pp, job.layout.vpp
        self.passes = order(
            crew.stage, self.num_stages, crew.world.num_microbatches, self.num_chunks
        )
        self.chance = Chance(crew)
        self.expert_loads = expert_loads
        local = np.arange(crew.size)
        self.loads = (local % job.layout.tp == 0).astype(float)
        self._posted: dict[tuple[str, int, int], Mark] = {}
        self._on_the_way: list[tuple[Message, Mark, Mail]] = []

    # The iteration

    def run(self) -> Generator[None, None, None]:
        """Do all passes; yields where another stage must get on first."""
        if self.num_chunks == 1:
            for messages, one in exchanges(self.passes, self.stage, self.num_stages):
                if messages:
                    yield from self._exchange(messages)
                if one:
                    self._pass(one)
        else:
            yield from self._interleaved()

    def _interleaved(self) -> Generator[None, None, None]:
        place = self.stage, self.num_stages, self.num_chunks
        for number, one in enumerate(self.passes):
            for ahead in self.passes[number : number + 2]:
                needed = received(ahead, *place)
                if needed and needed.key not in self._posted:
                    self._post(needed)
            needed = received(one, *place)
            if needed:
                mail = self.crew.world.mail[needed.key]
                while not mail.is_complete:
                    yield
                self.crew.device = np.maximum(self.crew.device, mail.arrival())
                self._on_the_way.append((needed, self._posted[needed.key], mail))
            self._pass(one)
            leaving = sent(one, *place)
            if leaving:
                self._post(leaving)
                mail = self.crew.world.mail[leaving.key]
                self._on_the_way.append((leaving, self._posted[leaving.key], mail))

    def _pass(self, one: Pass) -> None:
        crew = self.crew
        self.chance.begin(self.passes.index(one))
        set_lengths(crew, one.microbatch)
        crew.where = {"microbatch": one.microbatch, "chunk": one.chunk, "phase": one.phase}
        begin = crew.mark()
        if one.phase == FORWARD:
            self._forward(one)
        else:
            self._backward(one)
        crew.where.pop("layer", None)
        crew.keep_compute(one.phase, begin, module=False)

    # Messages

    def _post(self, message: Message) -> Mark:
        """Tell the mail that this end is ready, and how long the message travels."""
        crew, world = self.crew, self.crew.world
        mail = world.mail.setdefault(message.key, Mail())
        begin = crew.mark()
        self._posted[message.key] = begin
        if message.operation == "recv":
            mail.posted = begin.at
            return begin
        mail.sent = begin.at
        peers = world.ranks(message.peer)
        seconds, leaves = message_s(
            self.job.site, crew.ranks[0], peers[0], self.job.message_bytes()
        )
        own = crew.nic if leaves else crew.nvlink
        number = min(self.passes.index(Pass(message.direction, message.microbatch, message.chunk)),
                     world.num_passes)  # fmt: skip
        name = "nic" if leaves else "nvlink"
        others = world.effects.factor(name, number, peers)
        busy = world.busy[:, None] if leaves else 1.0
        mail.transfer = np.asarray(
            seconds * np.maximum(own, others) * busy * crew.noise()[2] * np.ones(begin.at.shape)
        )
        mail.number = crew.sequences[f"to {message.peer}", message.direction]
        crew.sequences[f"to {message.peer}", message.direction] += 1
        return begin

    def _exchange(self, messages: list[Message]) -> Generator[None, None, None]:
        crew = self.crew
        launch = 2 * self.job.site.launch_s * crew.launching
        crew.host = crew.host + launch
        begin, *_ = [self._post(one) for one in messages]
        mails = [crew.world.mail[one.key] for one in messages]
        while not all(mail.is_complete for mail in mails):
            yield
        end = np.maximum.reduce([mail.arrival() for mail in mails])
        crew.device = np.maximum(crew.device, end)
        crew.waits_for_device()
        for message, mail in zip(messages, mails, strict=True):
            self._keep_message(message, mail, begin, end, Track.COMMUNICATION)

    def _keep_message(
        self, message: Message, mail: Mail, begin: Mark, end: Floats, track: int
    ) -> None:
        args: dict[str, Any] = {
            "op": message.operation, "direction": message.direction, "sequence": mail.number,
            "size_bytes": self.job.message_bytes(), "microbatch": message.microbatch,
            "chunk": message.chunk,
        }  # fmt: skip
        name = f"{message.operation}_{message.direction}"
        self.crew.keep(
            "p2p", name, begin, end, args=args, track=track, axis="pp", peer=message.peer
        )

    def finish_messages(self) -> None:
        """Record the messages that were beside passes, now that all ends are known.

        Those of a name are one behind the other.
        """
        lanes: dict[str, Floats] = {}
        for message, begin, mail in self._on_the_way:
            name = message.operation + message.direction
            end = mail.arrival()
            at = np.minimum(np.maximum(begin.at, lanes.get(name, begin.at)), end)
            lanes[name] = end
            mark = Mark(at, begin.launched)
            self._keep_message(message, mail, mark, end, Track.OVERLAPPED)

    # Passes

    def _forward(self, one: Pass) -> None:
        crew, place = self.crew, one.chunk * self.num_stages + self.stage
        is_last = place == self.num_stages * self.num_chunks - 1
        if place == 0 or is_last:
            self.chance.fetch(self.passes.index(one), self.loads)
            self._share_batch()
        if place == 0:
            begin = crew.mark()
            crew.compute(self.parts.embedding)
            self._after_tensor_parallel()
            crew.keep_compute("embedding", begin)
        for number, kind in self.job.layers_of(self.stage, one.chunk):
            crew.where["layer"] = number
            self._layer(number, kind, "")
        crew.where.pop("layer", None)
        if is_last:
            begin = crew.mark()
            self._before_tensor_parallel()
            crew.compute(self.parts.output)
            if not self.job.is_hybrid:
                crew.keep_compute("output_layer", begin)
            begin = crew.mark()
            crew.collective("tp", "all_reduce", 4.0 * self.job.model.tokens)
            crew.compute(self.parts.loss)
            crew.collective("tp", "all_reduce", 4.0 * self.job.model.tokens)
            crew.keep_compute("loss", begin, module=False)

    def _share_batch(self) -> None:
        """Broadcast a batch from the first tensor rank, which alone has loaded it."""
        crew, lines = self.crew, self.crew.world.axes["tp"]
        if lines.size == 1:
            return
        crew.host = crew.host + 2 * self.job.site.launch_s * crew.launching
        begin = crew.mark()
        root = np.asarray(lines.shared(begin.at))
        seconds = crew.world.route(self.stage, "tp").seconds("broadcast", 16e3, lines.size)
        end = np.maximum(begin.at, root) + seconds * crew.pace("tp")
        crew.device = end
        crew.keep_collective("tp", "broadcast", begin.at, end, num_bytes=16e3)

    def _backward(self, one: Pass) -> None:
        crew, place = self.crew, one.chunk * self.num_stages + self.stage
        last_one = one.microbatch == crew.world.num_microbatches - 1
        reduces = last_one and self.job.habits.overlap_gradients
        crew.contention = BESIDE_COMPUTE if reduces else 1.0
        if place == self.num_stages * self.num_chunks - 1:
            begin = crew.mark()
            crew.compute(self.parts.loss, 0.5)
            self._linear_backward(self.parts.output)
            if not self.job.is_hybrid:
                crew.keep_compute("output_layer-backward", begin)
        bucket: list[str] = []
        layers = self.job.layers_of(self.stage, one.chunk)
        for number, kind in reversed(layers):
            crew.where["layer"] = number
            if self.job.habits.recompute:
                crew.where["phase"] = "recompute"
                self._layer(number, kind, "-recompute")
                crew.where["phase"] = BACKWARD
            self._layer_backward(number, kind)
            bucket.append(kind)
            if reduces and (len(bucket) == LAYERS_A_BUCKET or number == layers[0][0]):
                self.reduce_layers(bucket, beside=True)
                bucket = []
        crew.where.pop("layer", None)
        if place == 0:
            begin = crew.mark()
            crew.compute(self.parts.embedding)
            crew.keep_compute("embedding-backward", begin)
        crew.contention = 1.0

    # Layers

    def _plane(self) -> float:
        """Return the bytes of an activation of all tensor ranks together."""
        return self.job.model.tokens * self.job.model.hidden * 2 / self.job.layout.cp

    def _before_tensor_parallel(self) -> None:
        if self.job.habits.sequence_parallel:
            self.crew.collective("tp", "all_gather", self._plane())

    def _after_tensor_parallel(self, lane: str = "") -> Floats:
        split = self.job.habits.sequence_parallel
        operation = "reduce_scatter" if split else "all_reduce"
        return self.crew.collective("tp", operation, self._plane(), lane=lane)

    def _layer(self, number: int, kind: str, suffix: str) -> None:
        crew = self.crew
        begin = crew.mark()
        crew.compute(self.parts.norm)
        inner = crew.mark()
        self._before_tensor_parallel()
        self._share_context(1.0)
        crew.compute(self.parts.mixers[kind])
        self._after_tensor_parallel()
        if kind == MAMBA:  # a layer of its own, of a class that the tracer does not know
            begin = crew.mark()
        else:
            crew.keep_compute(f"attention{suffix}", inner)
        crew.compute(self.parts.norm)
        inner = crew.mark()
        if kind == EXPERTS:
            self._experts(number, 1.0)
        else:
            self._before_tensor_parallel()
            crew.compute(self.parts.feeds[kind])
            self._after_tensor_parallel()
        crew.keep_compute(f"{'moe' if kind == EXPERTS else 'mlp'}{suffix}", inner)
        crew.keep_compute(f"transformer_layer{suffix}", begin)

    def _layer_backward(self, number: int, kind: str) -> None:
        crew = self.crew
        begin = inner = crew.mark()
        if kind == EXPERTS:
            self._experts(number, 2.0)
        else:
            self._linear_backward(self.parts.feeds[kind])
        crew.keep_compute("moe-backward" if kind == EXPERTS else "mlp-backward", inner)
        crew.compute(self.parts.norm, 1.5)
        if kind == MAMBA:
            crew.keep_compute("transformer_layer-backward", begin)
        inner = crew.mark()
        self._share_context(2.0)
        self._linear_backward(self.parts.mixers[kind])
        if kind != MAMBA:
            crew.keep_compute("attention-backward", inner)
        crew.compute(self.parts.norm, 1.5)
        if kind != MAMBA:
            crew.keep_compute("transformer_layer-backward", begin)

    def _linear_backward(self, cost: Cost) -> None:
        """Compute gradients of the input, and those of the weights while the former travel."""
        crew = self.crew
        self._before_tensor_parallel()
        crew.compute(cost)
        if self.job.layout.tp == 1:
            crew.compute(cost)
            return
        end = self._after_tensor_parallel(lane="tp")
        crew.compute(cost)
        crew.device = np.maximum(crew.device, end)

    def _share_context(self, times: float) -> None:
        """Exchange keys and values of the ranks that share a sequence.

        In a ring all but the first exchange hide behind scores; nothing of it is recorded.
        """
        layout, crew = self.job.layout, self.crew
        if layout.cp == 1:
            return
        num_bytes = times * 2 * self._plane() * layout.cp / layout.tp
        if not self.job.habits.context_by_ring:
            crew.collective("cp", "all_gather", num_bytes)
            return
        lines = crew.world.axes["cp"]
        seconds = crew.world.route(self.stage, "cp").seconds("all_gather", num_bytes, lines.size)
        hidden = times * self.parts.mixers["dense"].square_s * 0.8
        exposed = np.maximum(seconds * crew.pace("cp") - hidden, seconds / lines.size)
        crew.device = lines.latest(crew.mark().at) + exposed

    def _experts(self, number: int, times: float) -> None:
        """Send tokens to their experts and back; how many go where, the host must wait to know."""
        crew, model = self.crew, self.job.model
        num_bytes = times * self._plane() / self.job.layout.tp * model.top_k / 2
        load = self.expert_loads[number]
        crew.compute(Cost(memory_s=self.parts.norm.memory_s, kernels=6), times)
        crew.waits_for_device()
        crew.collective("ep", "all_to_all", num_bytes)
        crew.compute(self.parts.feeds[EXPERTS], times, load=load)
        crew.collective("ep", "all_to_all", num_bytes)
        crew.compute(Cost(memory_s=self.parts.norm.memory_s, kernels=3), times)

    # Gradients

    def reduce_layers(self, kinds: list[str], *, beside: bool, ends: float = 0.0) -> None:
        """Reduce the gradients of some layers, and of so many parameters at the model's ends."""
        crew, table = self.crew, self.parts.parameters
        of_experts = sum(self._parameters_of_experts(kind) for kind in kinds)
        rest = sum(table[kind] for kind in kinds) + ends - of_experts
        operation = "reduce_scatter" if self.job.habits.distributed_optimizer else "all_reduce"
        kept, crew.where = crew.where, crew.where if beside else {}
        for axis, amount in (("dp_cp", rest), ("expt_dp", of_experts)):
            if amount:
                lane = axis if beside else ""
                crew.collective(axis, operation, GRADIENT_BYTES * amount, lane=lane)
        crew.where = kept

    def _parameters_of_experts(self, kind: str) -> float:
        if kind != EXPERTS:
            return 0.0
        return self.parts.parameters[kind] - 4.0 * self.job.model.hidden**2 / self.job.layout.tp
