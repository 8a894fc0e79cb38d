"""Run the modules of a chunk, forward and backward, as Megatron-Core's layers do.

sequence parallel      all-gather | products | reduce-scatter, of attention and MLP each
otherwise              products | all-reduce
experts                router, counts (host reads them), all-to-all, experts, all-to-all
fully sharded          the parameters of a layer are gathered one layer ahead, its gradients
                       scattered behind it, in every pass
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.pod.faults import Law
from benchmarks.grounds.pod.job import Floats, Job
from benchmarks.grounds.pod.ranks import Opened, Ranks, World
from benchmarks.grounds.pod.schedule import Pass
from benchmarks.grounds.pod.work import (
    BYTES,
    Piece,
    layer_parameters,
)
from megascan.config import TraceConfig
from megascan.schema import Kind, Phase

RING_OVERHEAD_S = 12e-6


class Modules(Ranks):
    """Ranks that run the layers of their chunks."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        job = world.job
        self._phase = Phase.FORWARD
        self._layer = 0
        self._of_pass: dict[str, int | str] = {}
        self._core: Floats = np.ones(self.size)
        self._linear: Floats | float = 1.0
        self._gathered: dict[int, Floats] = {}
        self._recorded: frozenset[int] | None = None
        self._sharded = job.trainer.fully_sharded

    def layers_of(self, chunk: int) -> range:
        """Return the numbers of a chunk's layers."""
        first = self.job.model.first_layer(self.number, chunk)
        return range(first, first + self.job.model.layers[self.number][chunk])

    def begin(self, number: int) -> None:
        """Begin an iteration, and choose the layers whose modules are recorded."""
        super().begin(number)
        self._of_pass = self.context
        self.streams.clear()
        self._recorded = recorded_layers(self.job, self.number, number)

    def enter(self, one: Pass) -> None:
        """Begin a pass: its data."""
        self._in_pass = True
        self._phase = Phase.FORWARD if one.forward else Phase.BACKWARD
        self._of_pass = {
            **self.context, "microbatch": one.microbatch, "chunk": one.chunk, "phase": self._phase,
        }  # fmt: skip
        length = self.machine.factor(Law.LENGTH, self.number, self.host)
        self._core = self.load.quadratic(one.microbatch) * length
        if not self.job.data.packed:  # all of the pass is longer, not only its documents
            self._core = self._core * length
            self._linear = self.load.tokens * length
        else:
            self._linear = self.load.tokens
        self._core = self._core / self._linear

    def leave(self) -> None:
        """End a pass."""
        self._in_pass = False
        self._of_pass = self.context

    def of_pass(self) -> dict[str, int | str]:
        """Return the arguments of the pass, with the layer in forward passes."""
        if self._layer and self._phase == Phase.FORWARD:
            return {**self._of_pass, "layer": self._layer}
        return self._of_pass

    def run(self, piece: Piece, extra: Floats | float = 1.0) -> None:
        """Run a piece of this pass."""
        scale = self._core if piece.core else 1.0
        self.kernels(piece, scale, self._linear * extra)

    def _ended(self, opened: Opened, phase: Phase) -> None:
        """End a module; record it if its layer has its turn."""
        recording = self.recording
        inside = self._layer and self._recorded is not None and self._layer not in self._recorded
        if recording is None or inside or not recording.wants(opened[0]):
            self.device = self.launched()
            return
        suffix = {Phase.FORWARD: "", Phase.BACKWARD: "-backward"}.get(phase, "-recompute")
        own: dict[str, int | str] = {**self._of_pass, "phase": phase}
        if self._layer:
            own["layer"] = self._layer
        self.closed(opened, Kind.COMPUTE, own, suffix)

    def forward(self, one: Pass, *, begins: bool, ends: bool) -> None:
        """Run a chunk's layers, what is before the first and what is behind the last."""
        if begins:
            opened = self.opened("embedding")
            self._gather_on_demand(0, one)
            self.run(self.costs.embedding)
            self._scattered("tp")
            self._ended(opened, Phase.FORWARD)
        layers = self.layers_of(one.chunk)
        for layer in layers:
            self._gather_on_demand(layer, one, layer + 1 if layer + 1 in layers else 0)
            self._run_layer(layer, Phase.FORWARD)
        if ends:
            self._head(Phase.FORWARD)

    def _head(self, phase: Phase) -> None:
        """Run MTP layer, output layer and loss of the last stage."""
        back = phase == Phase.BACKWARD
        heavy = self.machine.factor(Law.HEAD, self.number, self.host)
        self._output(back, heavy)
        if self.job.model.mtp:
            further = self.machine.factor(Law.FURTHER, self.number, self.host)
            costs = self.costs
            for piece in (costs.qkv, costs.core, costs.projection, costs.mlp_first):
                self.run(piece.backward() if back else piece, further)
            self._output(back, heavy * further)

    def _output(self, back: bool, extra: Floats) -> None:
        """Run the output layer, and in forward passes the loss."""
        opened, piece = self.opened("output_layer"), self.costs.output
        self._gathered_first("tp", back)
        self.run(piece.backward() if back else piece, extra)
        self._ended(opened, Phase.BACKWARD if back else Phase.FORWARD)
        if not back:
            opened = self.opened("loss")
            self.run(self.costs.loss, extra)
            self.collective("tp", "all_reduce", 8 * self.job.tokens)
            self.closed(opened, Kind.COMPUTE, self._of_pass)

    def backward(self, one: Pass, *, begins: bool, ends: bool, last: bool) -> None:
        """Run a chunk's layers backward; hand gradients on behind the last microbatch."""
        if ends:
            self._head(Phase.BACKWARD)
            self._reduce(self.costs.end_parameters, 0, last=last)
        layers = self.layers_of(one.chunk)
        for layer in reversed(layers):
            if self._sharded:
                self._gather_on_demand(layer, one, layer - 1 if layer - 1 in layers else 0)
            if self.job.trainer.recomputes:
                self._run_layer(layer, Phase.RECOMPUTE)
            self._run_layer(layer, Phase.BACKWARD)
            self._reduce(*layer_parameters(self.job, self.costs, layer), last=last)
        if begins:
            opened = self.opened("embedding")
            self._gathered_first("tp", True)
            self.run(self.costs.embedding.backward())
            self._ended(opened, Phase.BACKWARD)
            if not ends:
                self._reduce(self.costs.end_parameters, 0, last=last)

    def _run_layer(self, layer: int, phase: Phase) -> None:
        self._layer = layer
        opened = self.opened("transformer_layer")
        parts = [self._attention, self._moe if self.job.model.has_experts(layer) else self._mlp]
        for part in parts if phase != Phase.BACKWARD else reversed(parts):
            part(phase)
        self._ended(opened, phase)
        self._layer = 0

    def _gathered_first(self, axis: str, needed: bool) -> None:
        if needed and self.job.trainer.sequence_parallel:
            num_bytes = self.costs.gathered_bytes
            self.collective(axis, "all_gather", num_bytes, handed=num_bytes // self.layout.tp)

    def _scattered(self, axis: str) -> None:
        op = "reduce_scatter" if self.job.trainer.sequence_parallel else "all_reduce"
        self.collective(axis, op, self.costs.gathered_bytes)

    def _attention(self, phase: Phase) -> None:
        costs, opened = self.costs, self.opened("attention")
        self._gathered_first("tp", True)
        if phase == Phase.BACKWARD:
            self.run(costs.projection.backward())
            self._core_attention(costs.core.backward(), back=True)
            self.run(costs.qkv.backward())
        else:
            self.run(costs.qkv)
            self._core_attention(costs.core, back=False)
            self.run(costs.projection)
        self._scattered("tp")
        self._ended(opened, phase)

    def _core_attention(self, piece: Piece, *, back: bool) -> None:
        """Attend, with the keys of the other members of a context-parallel group."""
        num_bytes = self.costs.keys_bytes * (2 if back else 1)
        count = self.layout.cp
        if count == 1:
            self.run(piece)
        elif not self.job.trainer.ring_attention:
            self.collective("cp", "all_gather", num_bytes * count, handed=num_bytes)
            self.run(piece)
            if back:
                self.collective("cp", "reduce_scatter", num_bytes * count)
        else:
            self._ring(piece, num_bytes)

    def _ring(self, piece: Piece, num_bytes: int) -> None:
        """Attend to one part of the keys while the next one travels; nobody records that."""
        groups, count = self.groups["cp"], self.layout.cp
        part = Piece(piece.matrix_s / count, piece.memory_s / count, piece.num_kernels, core=True)
        for step in range(count):
            begin = self.launched()
            travel = groups.seconds("all_to_all", num_bytes * 2) + RING_OVERHEAD_S
            slow = groups.slowness(self.machine, begin)
            arrives = groups.most(begin) + travel * slow
            self.run(part)
            if step + 1 < count:
                self.device = np.maximum(self.device, arrives)

    def _mlp(self, phase: Phase) -> None:
        costs, opened = self.costs, self.opened("mlp")
        self._gathered_first("tp", True)
        if phase == Phase.BACKWARD:
            self.run(costs.mlp_second.backward())
            self.run(costs.mlp_first.backward())
        else:
            self.run(costs.mlp_first)
            self.run(costs.mlp_second)
        self._scattered("tp")
        self._ended(opened, phase)

    def _moe(self, phase: Phase) -> None:
        opened = self.opened("moe")
        groups = self.groups["ep"]
        bend = self.machine.factor(Law.EXPERT, self.number, self.host)
        tokens = self.load.experts(self._layer) * bend
        tokens = tokens / groups.mean(np.atleast_2d(tokens))
        skew = groups.most(np.atleast_2d(tokens))
        if phase == Phase.BACKWARD:
            self._moe_backward(tokens, skew)
        else:
            self._moe_forward(tokens, skew, phase)
        self._ended(opened, phase)

    def _moe_forward(self, tokens: Floats, skew: Floats, phase: Phase) -> None:
        costs, model = self.costs, self.job.model
        self.run(costs.router)
        self.collective("tp_ep", "all_gather", 8 * model.num_experts * self.layout.ep, handed=8)
        if self.job.trainer.experts_sync:
            self.host = np.maximum(self.host, self.device) + 8e-6
        num_bytes = costs.dispatched_bytes
        self.collective("ep", "all_to_all", num_bytes, skew=skew)
        self.collective("ep", "all_to_all", num_bytes / model.hidden * 2, skew=skew)
        self._shared(phase)
        self.run(costs.experts, tokens)
        self.collective("ep", "all_to_all", num_bytes, skew=skew, own=tokens)
        self.run(costs.combination)

    def _moe_backward(self, tokens: Floats, skew: Floats) -> None:
        costs, num_bytes = self.costs, self.costs.dispatched_bytes
        self.run(costs.combination.backward())
        self.collective("ep", "all_to_all", num_bytes, skew=skew)
        self.run(costs.experts.backward(), tokens)
        self._shared(Phase.BACKWARD)
        few = num_bytes / self.job.model.hidden * 2
        self.collective("ep", "all_to_all", few, skew=skew, own=tokens)
        self.collective("ep", "all_to_all", num_bytes, skew=skew, own=tokens)
        self.run(costs.router.backward())

    def _shared(self, phase: Phase) -> None:
        if self.job.model.shared_ffn:
            opened, piece = self.opened("mlp"), self.costs.shared
            self.run(piece.backward() if phase == Phase.BACKWARD else piece)
            self._ended(opened, phase)

    def _gather_on_demand(self, layer: int, one: Pass, ahead: int = 0) -> None:
        """Wait for a layer's parameters, and ask for the next one's; of the first microbatch only
        where each rank keeps what it has gathered.
        """
        first = one.microbatch == 0 and self._phase == Phase.FORWARD
        if not (self._sharded or (first and self.job.trainer.overlaps_parameters)):
            return
        self._layer = layer
        for wanted in (layer, ahead):
            if wanted and wanted not in self._gathered:
                dense, _ = layer_parameters(self.job, self.costs, wanted)
                num_bytes = dense * BYTES
                end = self.overlapped("dp_cp", "all_gather", num_bytes, num_bytes // self.replicas)
                self._gathered[wanted] = end
        self._layer = 0
        if layer in self._gathered:
            self.device = np.maximum(self.device, self._gathered.pop(layer))

    def _reduce(self, dense: int, experts: int, *, last: bool) -> None:
        """Send the gradients of a layer on their way."""
        trainer = self.job.trainer
        if not (self._sharded or (last and trainer.overlaps_gradients)):
            return
        op = "reduce_scatter" if trainer.distributed_optimizer or self._sharded else "all_reduce"
        for axis, held in (("dp_cp", dense), ("expt_dp", experts)):
            if held:
                num_bytes = held * trainer.gradient_bytes
                self.overlapped(axis, op, num_bytes, num_bytes)

    def finish_gradients(self) -> None:
        """Reduce what was not reduced beside the passes, or wait for what was."""
        trainer = self.job.trainer
        if self._sharded or trainer.overlaps_gradients:
            for end in self.streams.values():
                self.device = np.maximum(self.device, end)
        else:
            op = "reduce_scatter" if trainer.distributed_optimizer else "all_reduce"
            for axis, held in self.parameters.items():
                if held:
                    num_bytes = held * trainer.gradient_bytes
                    self.collective(axis, op, num_bytes)
        self.collective("dp_cp", "all_reduce", 8)

    def gather_parameters(self) -> None:
        """Gather what the replicas have updated, unless the next forward pass does."""
        trainer = self.job.trainer
        if self._sharded or trainer.overlaps_parameters or not trainer.distributed_optimizer:
            return
        for axis, held in self.parameters.items():
            if held:
                num_bytes = held * BYTES
                handed = num_bytes // self.groups[axis].size
                self.collective(axis, "all_gather", num_bytes, handed=handed)


def recorded_layers(job: Job, stage: int, iteration: int) -> frozenset[int] | None:
    """Return the layers of a stage whose modules are recorded in an iteration; None: all."""
    tracing = job.tracing
    if iteration == tracing.iterations[0]:
        return None
    config = TraceConfig(
        interval=tracing.interval, window=tracing.window, layer_stride=tracing.layer_stride
    )
    chunks = {}
    for chunk, count in enumerate(job.model.layers[stage]):
        first = job.model.first_layer(stage, chunk)
        chunks[chunk] = range(first, first + count)
    return config.layers_in_turn(iteration, chunks)
