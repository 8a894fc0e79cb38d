"""Forward and backward of one microbatch through the layers of a stage.

Modules, their order and names are those of Megatron-Core's local transformer layers as
`megascan.instrument` sees them.
"""

from __future__ import annotations

from megascan.schema import Granularity, Kind, Phase, Track
from megascan.simulate.communications import Communications
from megascan.simulate.job import JobModel
from megascan.simulate.program import NO_SPAN, SpanTemplate, StageProgram, Work
from megascan.simulate.schedule import Pass

_ROUTER_SHARE = 0.05
"""Part of an expert layer's computation that comes before its first all_to_all."""
_WEIGHT_SHARE = 0.25
"""Part of a module's backward in the weight gradients of its first linear layer, the last thing it
does; Megatron-Core overlaps the all_reduce of the input's gradients with it."""
_LOSS_FUNCTION_SHARE = 0.1
"""Part of the loss outside the model, in the trainer's loss function."""
_EXTRA_BACKWARD_RATIO = 0.83
"""Backward / forward excess of a heavy last stage, measured on a production job (60 to 73 ms)."""


class Passes:
    """Adds the passes of one stage to its program."""

    def __init__(self, job: JobModel, program: StageProgram) -> None:
        self.job, self.program, self.costs = job, program, job.costs
        self.stage = program.stage
        self.full = job.granularity == Granularity.FULL
        self.communications = Communications(job, program)
        self.layers_extra_ns, self.ends_extra_ns = self._stage_extra()

    def _stage_extra(self) -> tuple[float, float]:
        """Uneven stage: extra forward time a chunk, (in its layers, in embedding or output)."""
        ratio = self.job.imbalance.stage_ratio.get(self.stage, 1.0)
        costs = self.costs
        layer = 2 * costs.norm_ns + costs.attention_ns + costs.mlp_ns
        extra = (ratio - 1.0) * layer * self.job.layers_per_chunk * self.job.layout.vpp
        if self.stage in (0, self.job.layout.pp - 1):
            return 0.0, extra
        return extra / self.job.num_layers * self.job.layout.pp, 0.0

    def _is_first(self, step: Pass) -> bool:
        return self.stage == 0 and step.chunk == 0

    def _is_last(self, step: Pass) -> bool:
        layout = self.job.layout
        return self.stage == layout.pp - 1 and step.chunk == layout.vpp - 1

    def _compute_span(self, step: Pass, name: str, layer: int = -1) -> SpanTemplate:
        suffix = "-backward" if step.phase == Phase.BACKWARD and name != "backward" else ""
        return SpanTemplate(
            kind=Kind.COMPUTE,
            name=name + suffix,
            microbatch=step.microbatch,
            chunk=step.chunk,
            layer=layer,
            phase=str(step.phase),
        )

    def forward(self, step: Pass) -> None:
        """Load, embedding, layers, output layer, loss; as far as the stage has them."""
        program = self.program
        whole = program.open(self._compute_span(step, "forward"))
        if self._is_first(step) or self._is_last(step):
            self._load(step)
        if self._is_first(step):
            self._embedding(step)
        for layer in self._layers(step):
            self._layer(step, layer)
        if self._is_last(step):
            self._output_layer(step)
            self._loss(step)
        program.close(whole)

    def backward(self, step: Pass) -> None:
        """The same in reverse."""
        program = self.program
        whole = program.open(self._compute_span(step, "backward"))
        if self._is_last(step):
            self._output_layer(step)
        for layer in reversed(self._layers(step)):
            self._layer(step, layer)
        if self._is_first(step):
            self._embedding(step)
        program.close(whole)

    def _layers(self, step: Pass) -> list[int]:
        """Global numbers, from 1, of the layers of a chunk."""
        per_chunk = self.job.layers_per_chunk
        first = (step.chunk * self.job.layout.pp + self.stage) * per_chunk
        return [first + index + 1 for index in range(per_chunk)]

    def _scaled(self, step: Pass, forward_ns: float) -> float:
        return forward_ns * (self.costs.backward_ratio if step.phase == Phase.BACKWARD else 1.0)

    def _load(self, step: Pass) -> None:
        """TP rank 0 loads a microbatch and hands it to its TP peers, who wait for it."""
        program, costs = self.program, self.costs
        template = SpanTemplate(
            kind=Kind.DATA,
            name="batch-generator",
            track=Track.HOST,
            microbatch=step.microbatch,
            chunk=step.chunk,
        )
        span = program.open(template)
        program.compute(costs.load_ns, step.microbatch, Work.LOAD)
        self.communications.collective(
            "broadcast", "tp", costs.broadcast_ns, costs.batch_bytes, step=step
        )
        program.close(span)

    def _module(
        self, step: Pass, name: str, forward_ns: float, layer: int = -1, extra_ns: float = 0.0
    ) -> int:
        """Compute of a module and its span, which stays open; NO_SPAN at base granularity."""
        leaf = self._compute_span(step, name, layer) if self.full else None
        if step.phase == Phase.BACKWARD:
            extra_ns *= _EXTRA_BACKWARD_RATIO
        cost_ns = self._scaled(step, forward_ns) + extra_ns
        return self.program.compute(cost_ns, step.microbatch, leaf=leaf)

    def _embedding(self, step: Pass) -> None:
        extra = self.ends_extra_ns if self.job.layout.pp > 1 and not self._is_last(step) else 0.0
        span = self._module(step, "embedding", self.costs.embedding_ns, extra_ns=extra)
        if step.phase == Phase.FORWARD:
            self.communications.tensor_all_reduce(step)
        self.program.close(span)

    def _output_layer(self, step: Pass) -> None:
        cost, extra = self.costs.output_layer_ns, self.ends_extra_ns
        if step.phase == Phase.FORWARD:
            self.program.close(self._module(step, "output_layer", cost, extra_ns=extra))
        else:
            self._split_backward(step, "output_layer", cost, extra_ns=extra, weight_share=0.5)

    def _split_backward(
        self,
        step: Pass,
        name: str,
        forward_ns: float,
        layer: int = -1,
        *,
        extra_ns: float = 0.0,
        weight_share: float = _WEIGHT_SHARE,
    ) -> None:
        """A module's backward; its first layer's weight gradients hide the TP all_reduce."""
        early = 1.0 - weight_share
        span = self._module(step, name, forward_ns * early, layer, extra_ns * early)
        pending = self.communications.launch_tensor_all_reduce(step)
        late = extra_ns * _EXTRA_BACKWARD_RATIO * weight_share
        self.program.compute(self._scaled(step, forward_ns * weight_share) + late, step.microbatch)
        if pending is not None:
            self.program.finish(pending)
        self.program.close(span)

    def _loss(self, step: Pass) -> None:
        """Cross entropy over the split vocabulary, then the trainer's own loss function."""
        program, costs = self.program, self.costs
        program.compute(costs.loss_ns * (1 - _LOSS_FUNCTION_SHARE), step.microbatch)
        for _ in range(3):  # largest logit, the label's logit, sum of exponentials
            self.communications.collective("all_reduce", "tp", costs.norm_sync_ns, 4, step=step)
        leaf = self._compute_span(step, "loss")
        span = program.compute(costs.loss_ns * _LOSS_FUNCTION_SHARE, step.microbatch, leaf=leaf)
        program.close(span)

    def _layer(self, step: Pass, layer: int) -> None:
        program, costs = self.program, self.costs
        extra = self.layers_extra_ns
        whole = NO_SPAN
        if self.full:
            whole = program.open(self._compute_span(step, "transformer_layer", layer))
        norm_ns = self._scaled(step, costs.norm_ns + extra / 2)
        modules = [self._attention, self._mlp]
        for module in modules if step.phase == Phase.FORWARD else reversed(modules):
            program.compute(norm_ns, step.microbatch)
            module(step, layer)
        program.close(whole)

    def _attention(self, step: Pass, layer: int) -> None:
        costs = self.costs
        if step.phase == Phase.BACKWARD and self.job.layout.cp == 1:
            self._split_backward(step, "attention", costs.attention_ns, layer)
            return
        span = self._module(step, "attention", costs.attention_ns, layer)
        op = "all_gather" if step.phase == Phase.FORWARD else "reduce_scatter"
        self.communications.collective(
            op, "cp", costs.context_ns, costs.activation_bytes, step=step, layer=layer
        )
        self.communications.tensor_all_reduce(step, layer)
        self.program.close(span)

    def _mlp(self, step: Pass, layer: int) -> None:
        if self.job.layout.ep > 1:
            self._experts(step, layer)
        elif step.phase == Phase.BACKWARD:
            self._split_backward(step, "mlp", self.costs.mlp_ns, layer)
        else:
            span = self._module(step, "mlp", self.costs.mlp_ns, layer)
            self.communications.tensor_all_reduce(step, layer)
            self.program.close(span)

    def _experts(self, step: Pass, layer: int) -> None:
        """Router, all_to_all to the experts, experts, all_to_all back."""
        costs = self.costs
        span = self._module(step, "moe", costs.mlp_ns * _ROUTER_SHARE, layer)
        self.communications.collective(
            "all_to_all", "ep", costs.expert_ns, costs.activation_bytes, step=step, layer=layer
        )
        self.program.compute(
            self._scaled(step, costs.mlp_ns * (1 - _ROUTER_SHARE)), step.microbatch
        )
        self.communications.collective(
            "all_to_all", "ep", costs.expert_ns, costs.activation_bytes, step=step, layer=layer
        )
        self.program.close(span)
