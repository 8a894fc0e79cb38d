"""Write down what the ranks of a stage do in an iteration, as Megatron-Core has them do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.grounds.depot.costs import BYTES, Cost, Costs
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.operations import (
    Collect,
    Join,
    Load,
    Mark,
    Meet,
    Operation,
    Program,
    Swap,
    Synchronize,
    Talk,
    Think,
    Traced,
    Work,
)
from benchmarks.grounds.depot.places import size_of
from benchmarks.grounds.depot.schedule import Exchange, Pass, turns_of
from megascan.schema import Track

BASE_AXES = ("dp_cp", "dp_cp_ag", "expt_dp")
"""Whose collectives are traced at granularity base."""


def program_of(job: Job, stage: int) -> Program:
    """Return the program of one stage."""
    return _Author(job, stage).written()


class _Author:
    """Writes one program: operations in their order, spans as they close."""

    def __init__(self, job: Job, stage: int) -> None:
        self.job, self.stage, self.costs = job, stage, Costs(job)
        self.is_full = job.granularity == "full"
        self.operations: list[Operation] = []
        self.spans: list[Traced] = []
        self.works: list[Work] = []
        self.talks: list[Talk] = []
        self.marks = self.thoughts = self.collects = self.swaps = self.meets = 0
        self.heavy = dict(job.heavy)
        self.sequences: Counter[tuple[str, str]] = Counter()
        self.where: dict[str, int | str] = {}
        self.microbatch = -1

    # --- single operations -------------------------------------------------------------------

    def slot(self) -> int:
        """Return the number of a new mark."""
        self.marks += 1
        return self.marks - 1

    def mark(self) -> int:
        """Put an event on the stream."""
        slot = self.slot()
        self.operations.append(Mark(slot))
        return slot

    def work(self, cost: Cost, *, experts: bool = False, in_pass: bool = True) -> None:
        """Launch the kernels of a module."""
        one = Work(
            len(self.works), cost.linear_s, cost.square_s, cost.memory_s,
            cost.launches, self.microbatch, experts, in_pass,
        )  # fmt: skip
        self.works.append(one)
        self.operations.append(one)

    def think(self, seconds: float) -> None:
        """Keep the thread busy."""
        self.operations.append(Think(self.thoughts, seconds))
        self.thoughts += 1

    @contextmanager
    def span(self, kind: str, name: str, *, full: bool = False, **more: int) -> Iterator[None]:
        """Put what is written meanwhile into a span."""
        if full and not self.is_full:
            yield
            return
        begin = self.mark()
        yield
        self._trace(Traced(kind, name, Track.COMPUTE, begin, self.mark(), {**self.where, **more}))

    def _trace(self, span: Traced) -> None:
        self.spans.append(span)

    def talk(
        self, op: str, axis: str, size_bytes: float, *, lane: str = "", experts: bool = False
    ) -> None:
        """Talk within groups of the stage; nothing where they have one member."""
        if size_of(self.job, axis) == 1:
            return
        one = Talk(
            len(self.talks), op, axis, size_bytes, self.microbatch, self.slot(), self.slot(),
            lane, experts,
        )  # fmt: skip
        self.talks.append(one)
        self.operations.append(one)
        if self.is_full or axis in BASE_AXES:
            self._trace_talk(one)

    def _trace_talk(self, one: Talk) -> None:
        sequence = self.sequences[one.axis, one.op]
        self.sequences[one.axis, one.op] += 1
        where = dict(self.where)
        if where.get("phase") == "backward":
            where.pop("layer", None)
        arguments = where | {"op": one.op, "group": "", "sequence": sequence, "size_bytes": 0}
        track = Track.OVERLAPPED if one.lane else Track.COMMUNICATION
        span = Traced(
            "collective", one.op, track, one.begin, one.end, arguments, one.axis, -1,
            one.size_bytes, one.microbatch, one.is_of_experts, lane=one.lane,
        )  # fmt: skip
        self._trace(span)

    def meet(self, axis: str, size_bytes: float) -> None:
        """Reduce across stages; the stages in between have no part in that of the ends."""
        if axis == "embd" and (self.job.pp == 1 or self.stage not in (0, self.job.pp - 1)):
            return
        size = self.job.num_ranks if axis == "intra_dist_opt" else self.job.tp * self.job.pp
        if size == 1:
            return
        one = Meet(0 if axis == "embd" else 1, axis, size_bytes, self.slot(), self.slot())
        self.operations.append(one)
        if self.is_full:
            arguments: dict[str, int | str] = {
                "op": "all_reduce", "group": "", "sequence": 0, "size_bytes": 0,
            }  # fmt: skip
            track = Track.COMMUNICATION
            span = Traced(
                "collective", "all_reduce", track, one.begin, one.end, arguments, axis, -1,
                size_bytes,
            )  # fmt: skip
            self._trace(span)

    def join(self, lane: str) -> None:
        """Let the stream wait for a lane."""
        self.operations.append(Join(lane))

    # --- the iteration -----------------------------------------------------------------------

    def written(self) -> Program:
        """Write an iteration."""
        begin = self.mark()
        self.think(0.0006)
        self.work(Cost(memory_s=2e-5, launches=12), in_pass=False)
        for turn in turns_of(self.job, self.stage):
            if isinstance(turn, Exchange):
                self._swap(turn)
            elif turn.forward:
                self._forward(turn)
            else:
                self._backward(turn)
        self.where, self.microbatch = {}, -1
        self._finish_gradients()
        self._update()
        end = self.mark()
        self._trace(Traced("iteration", "iteration", Track.COMPUTE, begin, end))
        return Program(
            self.stage, tuple(self.operations), tuple(self.spans), self.marks, tuple(self.works),
            tuple(self.talks), self.thoughts, self.collects, self.swaps, (begin, end),
        )  # fmt: skip

    def _swap(self, turn: Exchange) -> None:
        one = Swap(self.swaps, turn.messages, self.slot(), self.slot())
        self.swaps += 1
        self.operations.append(one)
        size = self.costs.hidden_bytes / (self.job.tp if self.job.sequence_parallel else 1)
        for message in turn.messages:
            direction = "forward" if message.forward else "backward"
            verb = "send" if message.sends else "recv"
            key = (f"{verb} {message.peer}", direction)
            arguments: dict[str, int | str] = {
                "op": verb, "direction": direction, "peer": 0, "group": "",
                "sequence": self.sequences[key], "size_bytes": 0,
                "microbatch": message.microbatch, "chunk": message.chunk,
            }  # fmt: skip
            self.sequences[key] += 1
            track = Track.COMMUNICATION
            span = Traced(
                "p2p", f"{verb}_{direction}", track, one.begin, one.end, arguments, "pp",
                message.peer, size, message.microbatch,
            )  # fmt: skip
            self._trace(span)

    def _part(self, chunk: int) -> int:
        return chunk * self.job.pp + self.stage

    def _is_end(self, chunk: int, *, last: bool) -> bool:
        return self._part(chunk) == (self.job.pp * self.job.vpp - 1 if last else 0)

    def _scaled(self, cost: Cost, chunk: int) -> Cost:
        return cost.times(self.heavy.get(self._part(chunk), 1.0))

    # --- forward -----------------------------------------------------------------------------

    def _forward(self, turn: Pass) -> None:
        chunk, self.microbatch = turn.chunk, turn.microbatch
        self.where = {"microbatch": turn.microbatch, "chunk": chunk, "phase": "forward"}
        with self.span("compute", "forward"):
            self.operations.append(Collect(self.collects))
            self.collects += 1
            if self._is_end(chunk, last=False) or self._is_end(chunk, last=True):
                self._batch()
            self._gather_first(turn)
            if self._is_end(chunk, last=False):
                with self.span("compute", "embedding", full=True):
                    self.work(self.costs.embedding(True))
                    self.talk("all_reduce", "tp", self.costs.hidden_bytes)
            layers = self.job.layers_of(self._part(chunk))
            for layer in layers:
                self._gather_next(turn, layer, layers)
                self._layer(chunk, layer, "")
            if self._is_end(chunk, last=True):
                self._output()

    def _batch(self) -> None:
        one = Load(self.microbatch, self.slot(), self.slot())
        self.operations.append(one)
        where = {name: value for name, value in self.where.items() if name != "phase"}
        self.talk("broadcast", "tp", 32 * self.costs.tokens)
        self.work(Cost(memory_s=8e-6, launches=6), in_pass=True)
        span = Traced(
            "data", "batch-generator", Track.HOST, one.begin, one.end, where, is_on_host=True
        )
        self._trace(span)

    def _layer(self, chunk: int, layer: int, suffix: str) -> None:
        """Write a layer's forward, or its repetition for the backward pass."""
        self.where["layer"] = layer
        with self.span("compute", f"transformer_layer{suffix}", full=True):
            with self.span("compute", f"attention{suffix}", full=True):
                self._open_parallel()
                cost = self._scaled(self.costs.attention(True), chunk)
                self.talk("all_to_all", "cp", 3 * self.costs.hidden_bytes / self.job.tp)
                self.work(cost)
                self.talk("all_to_all", "cp", self.costs.hidden_bytes / self.job.tp)
                self._close_parallel()
            if self.job.experts:
                with self.span("compute", f"moe{suffix}", full=True):
                    self._experts(chunk, suffix)
            else:
                with self.span("compute", f"mlp{suffix}", full=True):
                    self._open_parallel()
                    self.work(self._scaled(self.costs.mlp(True), chunk))
                    self._close_parallel()
        self.where.pop("layer")

    def _open_parallel(self) -> None:
        if self.job.sequence_parallel:
            self.talk("all_gather", "tp", self.costs.hidden_bytes / self.job.tp)

    def _close_parallel(self) -> None:
        op = "reduce_scatter" if self.job.sequence_parallel else "all_reduce"
        self.talk(op, "tp", self.costs.hidden_bytes)

    def _experts(self, chunk: int, suffix: str) -> None:
        tokens_bytes = self.costs.hidden_bytes * self.job.top_k
        self.work(self._scaled(self.costs.router(True), chunk))
        self.talk("all_gather", "tp_ep", 8.0 * self.job.experts)
        self.operations.append(Synchronize())
        self.talk("all_to_all", "ep", tokens_bytes)
        self.talk("all_to_all", "ep", tokens_bytes / self.job.hidden)
        self._local_experts(chunk, f"mlp{suffix}", forward=True)
        self.talk("all_to_all", "ep", tokens_bytes, experts=True)
        self.work(self._scaled(self.costs.router(True).times(0.4), chunk))

    def _local_experts(self, chunk: int, name: str, *, forward: bool) -> None:
        num_local = max(1, self.job.experts // self.job.ep)
        for _ in range(num_local):
            with self.span("compute", name, full=True):
                cost = self._scaled(self.costs.mlp(forward), chunk)
                self.work(cost.times(1 / num_local), experts=True)

    def _output(self) -> None:
        with self.span("compute", "output_layer", full=True):
            if self.job.sequence_parallel:
                self.talk("all_gather", "tp", self.costs.hidden_bytes / self.job.tp)
            self.work(self.costs.output(True))
        for _ in range(3):
            self.talk("all_reduce", "tp", 4 * self.costs.tokens)
        with self.span("compute", "loss"):
            self.work(self.costs.loss())

    # --- backward ----------------------------------------------------------------------------

    def _backward(self, turn: Pass) -> None:
        chunk, self.microbatch = turn.chunk, turn.microbatch
        self.where = {"microbatch": turn.microbatch, "chunk": chunk, "phase": "backward"}
        with self.span("compute", "backward"):
            if self._is_end(chunk, last=True):
                with self.span("compute", "output_layer-backward", full=True):
                    self._halves(self.costs.output(False))
                self._reduce(turn, self.costs.end_parameters())
            layers = self.job.layers_of(self._part(chunk))
            if self.job.gather == "pass":
                self._gather(self._part(chunk))
            for layer in reversed(layers):
                if self.job.gather == "pass":
                    self._gather_next(turn, layer, layers[::-1])
                if self.job.recompute:
                    self.where["phase"] = "recompute"
                    self._layer(chunk, layer, "-recompute")
                    self.where["phase"] = "backward"
                self._layer_backward(chunk, layer)
                num_layers = self.job.layers[self._part(chunk)]
                dense = self.costs.dense_parameters(self._part(chunk)) / num_layers
                experts = self.costs.expert_parameters(self._part(chunk)) / num_layers
                self._reduce(turn, dense, experts)
            if self._is_end(chunk, last=False):
                with self.span("compute", "embedding-backward", full=True):
                    if self.job.sequence_parallel:
                        self.talk("all_gather", "tp", self.costs.hidden_bytes / self.job.tp)
                    self.work(self.costs.embedding(False))
                self._reduce(turn, self.costs.end_parameters())

    def _layer_backward(self, chunk: int, layer: int) -> None:
        self.where["layer"] = layer
        with self.span("compute", "transformer_layer-backward", full=True):
            if self.job.experts:
                with self.span("compute", "moe-backward", full=True):
                    self._experts_backward(chunk)
            else:
                with self.span("compute", "mlp-backward", full=True):
                    self._halves(self._scaled(self.costs.mlp(False), chunk))
            with self.span("compute", "attention-backward", full=True):
                self.talk("all_to_all", "cp", self.costs.hidden_bytes / self.job.tp)
                self._halves(self._scaled(self.costs.attention(False), chunk))
                self.talk("all_to_all", "cp", 3 * self.costs.hidden_bytes / self.job.tp)
        self.where.pop("layer")

    def _halves(self, cost: Cost) -> None:
        """Write a backward pass: the gradient of the input, then that of the weights, which hides
        what the TP group has to say.
        """
        half = Cost(cost.linear_s / 2, cost.square_s / 2, cost.memory_s / 2, cost.launches / 2)
        if self.job.tp == 1:
            self.work(cost)
            return
        hidden = self.costs.hidden_bytes
        if self.job.sequence_parallel:
            self.talk("all_gather", "tp", hidden / self.job.tp)
            self.work(Cost(half.linear_s, half.square_s, half.memory_s, half.launches))
            self.talk("all_gather", "tp", hidden / self.job.tp, lane="tp")
            self.talk("reduce_scatter", "tp", hidden, lane="tp")
        else:
            self.work(half)
            self.talk("all_reduce", "tp", hidden, lane="tp")
        self.work(half)
        self.join("tp")

    def _experts_backward(self, chunk: int) -> None:
        tokens_bytes = self.costs.hidden_bytes * self.job.top_k
        self.work(self._scaled(self.costs.router(False).times(0.4), chunk))
        self.talk("all_to_all", "ep", tokens_bytes)
        self._local_experts(chunk, "mlp-backward", forward=False)
        self.talk("all_to_all", "ep", tokens_bytes / self.job.hidden, experts=True)
        self.talk("all_to_all", "ep", tokens_bytes, experts=True)
        self.work(self._scaled(self.costs.router(False), chunk))

    # --- parameters and gradients ------------------------------------------------------------

    def _gather(self, part: int) -> None:
        """Fetch the parameters of one layer, beside the computing."""
        numbers = self.costs.dense_parameters(part) / self.job.layers[part]
        share = numbers * BYTES / (self.job.dp * self.job.cp)
        self.talk_plain("all_gather", share, self._gathering)

    @property
    def _gathering(self) -> str:
        """Return the axis whose communicator fetches parameters."""
        return "dp_cp_ag" if self.job.gather == "pass" else "dp_cp"

    def talk_plain(self, op: str, size_bytes: float, axis: str = "dp_cp") -> None:
        """Talk about parameters or gradients: as many bytes whatever the data are."""
        kept, self.microbatch = self.microbatch, -1
        self.talk(op, axis, size_bytes, lane=axis)
        self.microbatch = kept

    def _gather_first(self, turn: Pass) -> None:
        if self.job.gather == "pass" or (self.job.gather == "ahead" and turn.microbatch == 0):
            self._gather(self._part(turn.chunk))

    def _gather_next(self, turn: Pass, layer: int, layers: range) -> None:
        """Wait for this layer's parameters; ask for those of the next."""
        if self.job.gather == "pass" or (self.job.gather == "ahead" and turn.microbatch == 0):
            self.join(self._gathering)
            if layer != layers[-1]:
                self._gather(self._part(turn.chunk))

    def _reduce(self, turn: Pass, dense: float, experts: float = 0.0) -> None:
        """Hand gradients that are complete to the reduction beside the computing."""
        is_due = turn.microbatch == self.job.microbatches - 1 or self.job.gather == "pass"
        if not (self.job.overlap_grads and is_due):
            return
        op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        if experts:
            self.talk_plain(op, 4 * experts, "expt_dp")
        self.talk_plain(op, 4 * dense)

    def _own_parts(self) -> list[int]:
        return [self._part(chunk) for chunk in range(self.job.vpp)]

    def _numbers(self) -> tuple[float, float]:
        """Return how many parameters a rank holds: dense ones, and of experts."""
        parts = self._own_parts()
        ends = sum(part in (0, self.job.pp * self.job.vpp - 1) for part in parts)
        if len(parts) == 1 and self.job.pp == 1:
            ends = 2
        dense = sum(map(self.costs.dense_parameters, parts)) + ends * self.costs.end_parameters()
        return dense, sum(map(self.costs.expert_parameters, parts))

    def _finish_gradients(self) -> None:
        dense, experts = self._numbers()
        with self.span("optimizer", "grad-sync"):
            self.think(0.0002)
            if self.job.overlap_grads:
                self.join("expt_dp")
                self.join("dp_cp")
            else:
                op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
                if experts:
                    self.talk(op, "expt_dp", 4 * experts)
                self.talk(op, "dp_cp", 4 * dense)
            if self.job.sequence_parallel:
                layers = sum(self.job.layers[part] for part in self._own_parts())
                self.talk("all_reduce", "tp", 16.0 * self.job.hidden * layers)
            self.meet("embd", 4 * self.costs.end_parameters())
            self.talk("all_reduce", "dp_cp", 8)

    def _update(self) -> None:
        dense, experts = self._numbers()
        with self.span("optimizer", "optimizer"):
            self.think(0.0008)
            self.work(Cost(memory_s=2e-5, launches=10), in_pass=False)
            self.meet("intra_dist_opt" if self.job.distributed_optimizer else "mp", 4)
            self.operations.append(Synchronize())
            self.work(self.costs.update(dense + experts), in_pass=False)
            if self.job.distributed_optimizer and self.job.gather == "after":
                members = self.job.dp * self.job.cp
                self.talk("all_gather", "dp_cp", dense * BYTES / members)
                if experts:
                    share = experts * BYTES / max(1, members * self.job.tp // self.job.ep)
                    self.talk("all_gather", "expt_dp", share)
