"""Compile what each stage does in an iteration: instructions, spans, and rows of costs.

Every instruction acts on all ranks of the stage at once. Compute and transfer costs are numbered
rows; `megascan.simulate.execution` gives each row a value per rank and iteration. Modules, their
order and names are those that `megascan.instrument` sees in Megatron-Core's local transformer
layers.

    compile_job      one StageProgram a stage, from the order of `megascan.simulate.stage_order`
    Passes           forward and backward of a microbatch through the layers of a stage
    Communications   collectives: which groups exist, and which are recorded
    Grid             ranks as arrays. Within a stage they are the digits of a number
                     (`Layout.order` without pp), so the members of a group lie at a fixed stride,
                     and a maximum over a group is one reshape and one reduction
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np

from megascan.arrays import Floats, Integers
from megascan.schema import NOT_APPLICABLE, Granularity, Kind, Phase, Track
from megascan.simulate.job import JobModel
from megascan.simulate.stage_order import Exchange, Pass, stage_steps
from megascan.topology import Layout
from megascan.vocabulary import (
    ATTENTION,
    BACKWARD,
    BATCH_GENERATOR,
    EMBEDDING,
    FORWARD,
    GRAD_SYNC,
    ITERATION,
    LOSS,
    MESSAGES,
    MLP,
    MOE,
    OPTIMIZER,
    OUTPUT_LAYER,
    RECV,
    SAVE_CHECKPOINT,
    TRANSFORMER_LAYER,
    backward_of,
    collection_of,
    group_id,
    message_name,
)

STAGE_AXES = ("tp", "cp", "ep", "dp", "dp_cp")
CROSS_STAGE_AXES = ("mp", "embd", "intra_dist_opt", "pp")
"""Axes across stages, named as by `megascan.instrument`; intra_dist_opt has all ranks."""
_WITHIN_STAGE = {
    **{axis: (axis,) for axis in ("tp", "cp", "ep", "dp")},
    "dp_cp": ("dp", "cp"),
    "mp": ("tp",),
    "embd": (),
    "intra_dist_opt": ("tp", "cp", "dp"),
    "pp": (),
}
"""Axes over which the members of a group lie within each of its stages."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a layout as a matrix (stage, place), places ascending by rank."""

    layout: Layout

    @cached_property
    def ranks(self) -> Integers:
        """Return global ranks, shape (stage, place)."""
        layout = self.layout
        stages: list[list[int]] = [[] for _ in range(layout.pp)]
        for rank in range(layout.world_size):
            stages[layout.coordinates(rank).pp].append(rank)
        return np.array(stages, dtype=np.int64)

    @property
    def num_places(self) -> int:
        """Return the number of ranks of one stage."""
        return self.layout.world_size // self.layout.pp

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        """Return stride and size of each axis among the places of a stage."""
        own = self.layout.strides("tp", "cp", "dp")
        return {axis: (stride, size) for axis, stride, size in own} | {"ep": (1, self.layout.ep)}

    def size(self, axis: str) -> int:
        """Return the number of members of a group on an axis."""
        of_stage = math.prod(self._strides[one][1] for one in _WITHIN_STAGE[axis])
        return of_stage * len(self.stages_of(axis)) if axis in CROSS_STAGE_AXES else of_stage

    def group_max(self, values: Floats, axis: str) -> Floats:
        """Return the largest value of each place's group, over the last dimension of `values`."""
        return self._for_groups(
            values, axis, lambda groups: np.maximum.reduce(groups, axis=-2, keepdims=True)
        )

    def first_member(self, values: Floats, axis: str) -> Floats:
        """Give every member the value of its group's first member (one draw a group)."""
        return self._for_groups(values, axis, lambda groups: groups[..., :1, :])

    def _for_groups(self, values: Floats, axis: str, choose: Callable[[Floats], Floats]) -> Floats:
        """Give all members the value that `choose` keeps of the second-last dimension, members."""
        for single in _WITHIN_STAGE[axis]:
            stride, size = self._strides[single]
            if size > 1:
                groups = values.reshape(*values.shape[:-1], -1, size, stride)
                chosen = choose(groups).repeat(size, axis=-2)  # far quicker than `broadcast_to`
                values = chosen.reshape(values.shape)
        return values

    def stages_of(self, axis: str) -> tuple[int, ...]:
        """Return the stages that a cross-stage axis joins."""
        last = self.layout.pp - 1
        if axis == "embd" and last:
            return 0, last
        return tuple(range(last + 1))

    def smallest_members(self, axis: str) -> Integers:
        """Return the smallest rank of each rank's group, shape (stage, place)."""
        ranks = self.ranks
        if axis in CROSS_STAGE_AXES:
            ranks = np.broadcast_to(ranks[list(self.stages_of(axis))].min(axis=0), ranks.shape)
        smallest = -self.group_max(-ranks.astype(np.float64), axis)
        return smallest.astype(np.int64)

    def members(self, axis: str) -> dict[str, tuple[int, ...]]:
        """Return all groups of an axis by id (`tp@4`), their members in ascending order."""
        smallest = self.smallest_members(axis)
        stages = list(self.stages_of(axis)) if axis in CROSS_STAGE_AXES else slice(None)
        groups: dict[str, list[int]] = {}
        for rank, first in zip(
            self.ranks[stages].ravel().tolist(), smallest[stages].ravel().tolist(), strict=True
        ):
            groups.setdefault(group_id(axis, [first]), []).append(rank)
        return {name: tuple(sorted(ranks)) for name, ranks in groups.items()}


class Code(IntEnum):
    """Instructions of a stage."""

    OPEN = 0
    """A span starts."""
    CLOSE = 1
    COMPUTE = 2
    """The host launches, the device computes; a leaf span, if any, starts at the same time."""
    COLLECTIVE = 3
    """A communication within the stage, with its span."""
    POST = 4
    """The stage reaches an exchange or a collective across stages."""
    WAIT = 5
    """The stage leaves an exchange, as all its transfers are done."""
    JOIN = 6
    """The stage leaves a collective across stages."""
    PAUSE = 7
    """The host stands still (garbage collection)."""
    SYNCHRONIZE = 8
    """Host and device wait for each other."""
    SAVE = 9
    """A checkpoint is written, in some iterations."""
    LAUNCH = 10
    """An overlapped collective begins; computation goes on."""
    FINISH = 11
    """Computation needs the result of an overlapped collective, and waits for it."""
    HOST_OPEN = 12
    """A span starts by the host's time, which on a GPU is ahead of the device's."""
    HOST_CLOSE = 13


class Work(StrEnum):
    """Type of a compute row, which decides which faults and imbalances affect it."""

    DEVICE = "device"
    LOAD = "load"
    HOST = "host"


NO_SPAN = -1


@dataclass(frozen=True, kw_only=True)
class SpanTemplate:
    """One span of a stage's ranks in every iteration; fields are columns of a trace.

    `axis` becomes the group id and `peer_stage` the peer's rank.
    """

    kind: Kind
    name: str
    track: Track = Track.COMPUTE
    microbatch: int = NOT_APPLICABLE
    chunk: int = NOT_APPLICABLE
    layer: int = NOT_APPLICABLE
    phase: str = ""
    op: str = ""
    axis: str = ""
    sequence: int = NOT_APPLICABLE
    size_bytes: int = NOT_APPLICABLE
    peer_stage: int = NOT_APPLICABLE
    direction: str = ""

    def placed(self, step: Pass) -> SpanTemplate:
        """Return the span with the microbatch, chunk and phase of a pass."""
        return replace(self, microbatch=step.microbatch, chunk=step.chunk, phase=str(step.phase))


@dataclass(frozen=True)
class ComputeRow:
    """Cost of one computation, which grows with the length of its `microbatch`."""

    nominal_ns: float
    work: Work
    microbatch: int


@dataclass(frozen=True)
class TransferRow:
    """Cost of one communication; a message's row is the receiver's and names the peer's stage."""

    nominal_ns: float
    axis: str
    peer_stage: int = NOT_APPLICABLE


@dataclass(frozen=True)
class Instruction:
    """An instruction, the first of its `num_spans` spans, its row of costs, and its post's slot."""

    code: Code
    span: int = NO_SPAN
    num_spans: int = 1
    row: int = 0
    axis: str = ""
    slot: int = 0

    @property
    def spans(self) -> range:
        """Return its spans; NO_SPAN alone if it has none."""
        return range(self.span, self.span + self.num_spans)


@dataclass(frozen=True)
class ExchangeEnd:
    """One transfer of an exchange, seen from one side; `row` is set on the receiving side."""

    peer_stage: int
    op: str
    direction: Phase
    sequence: int
    row: int


@dataclass
class StageProgram:
    """Instructions of a stage and what they refer to; built by `_StageCompiler`, then only read."""

    stage: int
    instructions: list[Instruction] = field(default_factory=list)
    spans: list[SpanTemplate] = field(default_factory=list)
    compute_rows: list[ComputeRow] = field(default_factory=list)
    transfer_rows: list[TransferRow] = field(default_factory=list)
    exchanges: dict[int, tuple[ExchangeEnd, ...]] = field(default_factory=dict)
    """Ends of each exchange, by slot of its post."""
    num_slots: int = 0

    def add_span(self, template: SpanTemplate | None) -> int:
        """Add a span and return its number; NO_SPAN without a template."""
        if template is None:
            return NO_SPAN
        self.spans.append(template)
        return len(self.spans) - 1

    def new_slot(self) -> int:
        """Return the number of a new post."""
        self.num_slots += 1
        return self.num_slots - 1

    def open(self, template: SpanTemplate) -> int:
        """Start a span; returns its number for `close`."""
        span = self.add_span(template)
        on_host = template.track == Track.HOST
        self.instructions.append(Instruction(Code.HOST_OPEN if on_host else Code.OPEN, span))
        return span

    def close(self, span: int) -> None:
        """End a span; NO_SPAN stands for a span that is not recorded."""
        if span != NO_SPAN:
            on_host = self.spans[span].track == Track.HOST
            self.instructions.append(Instruction(Code.HOST_CLOSE if on_host else Code.CLOSE, span))

    def compute(
        self,
        nominal_ns: float,
        microbatch: int = NOT_APPLICABLE,
        work: Work = Work.DEVICE,
        leaf: SpanTemplate | None = None,
    ) -> int:
        """Add a computation and `leaf`, a span that starts with it; return the span's number."""
        span = self.add_span(leaf)
        self.compute_rows.append(ComputeRow(nominal_ns, work, microbatch))
        row = len(self.compute_rows) - 1
        self.instructions.append(Instruction(Code.COMPUTE, span, row=row))
        return span

    def exchange(self, ends: tuple[ExchangeEnd, ...], templates: list[SpanTemplate]) -> None:
        """Add a batch of sends and receives; their spans share start and end."""
        span, slot = len(self.spans), self.new_slot()
        self.spans.extend(templates)
        self.exchanges[slot] = ends
        for code in (Code.POST, Code.WAIT):
            self.instructions.append(Instruction(code, span, len(templates), slot=slot))

    def simple(self, code: Code, template: SpanTemplate | None = None) -> None:
        """Add an instruction without a row (PAUSE, SYNCHRONIZE, SAVE)."""
        self.instructions.append(Instruction(code, self.add_span(template)))


class Communications:
    """Adds collectives to a program; an axis of size 1 has no collectives."""

    def __init__(self, job: JobModel, program: StageProgram) -> None:
        self._costs, self._grid, self._program = job.costs, Grid(job.layout), program
        self._full = job.granularity == Granularity.FULL
        self._sequences: Counter[tuple[str, str]] = Counter()

    def _add(
        self,
        op: str,
        axis: str,
        nominal_ns: float,
        size_bytes: int,
        *,
        step: Pass | None = None,
        layer: int = NOT_APPLICABLE,
        track: Track = Track.COMMUNICATION,
    ) -> tuple[int, int]:
        """Add a collective's span and row of costs; return their numbers.

        It is NO_SPAN if the span is not recorded (`base` records only data parallelism).
        """
        program, span = self._program, NO_SPAN
        if self._full or axis == "dp_cp":
            template = SpanTemplate(
                kind=Kind.COLLECTIVE,
                name=op,
                track=track,
                layer=layer,
                op=op,
                axis=axis,
                sequence=self._sequences[axis, op],
                size_bytes=size_bytes,
            )
            self._sequences[axis, op] += 1
            span = program.add_span(template if step is None else template.placed(step))
        program.transfer_rows.append(TransferRow(nominal_ns, axis))
        return span, len(program.transfer_rows) - 1

    def collective(
        self,
        op: str,
        axis: str,
        nominal_ns: float,
        size_bytes: int,
        *,
        step: Pass | None = None,
        layer: int = NOT_APPLICABLE,
    ) -> None:
        """Add a collective within the stage; `step` and `layer` are its place in the iteration."""
        if self._grid.size(axis) > 1:
            span, row = self._add(op, axis, nominal_ns, size_bytes, step=step, layer=layer)
            self._program.instructions.append(
                Instruction(Code.COLLECTIVE, span, row=row, axis=axis)
            )

    def tensor_all_reduce(self, step: Pass, layer: int = NOT_APPLICABLE) -> None:
        """Add the sum of partial activations over tensor parallelism."""
        costs = self._costs
        self.collective(
            "all_reduce", "tp", costs.tensor_ns, costs.activation_bytes, step=step, layer=layer
        )

    def launch_tensor_all_reduce(self, step: Pass) -> list[Instruction]:
        """Begin the sum of partial gradients next to the weights' gradients.

        Returns the instruction that waits for it; none without TP.
        """
        if self._grid.size("tp") < 2:
            return []
        costs, program = self._costs, self._program
        span, row = self._add(
            "all_reduce",
            "tp",
            costs.tensor_ns,
            costs.activation_bytes,
            step=step,
            track=Track.OVERLAPPED,
        )
        begin = Instruction(Code.LAUNCH, span, row=row, axis="tp", slot=program.new_slot())
        program.instructions.append(begin)
        return [replace(begin, code=Code.FINISH)]

    def join(self, axis: str, nominal_ns: float, size_bytes: int) -> None:
        """Add an all_reduce across stages."""
        if self._grid.size(axis) > 1:
            span, row = self._add("all_reduce", axis, nominal_ns, size_bytes)
            slot = self._program.new_slot()
            self._program.instructions += [
                Instruction(Code.POST, span, slot=slot),
                Instruction(Code.JOIN, span, row=row, axis=axis, slot=slot),
            ]


_ROUTER_SHARE = 0.05
"""Part of an expert layer's computation that comes before its first all_to_all."""
_WEIGHT_SHARE = 0.25
"""Part of a module's backward for the weight gradients of its first linear layer, which come last;
Megatron-Core overlaps the all_reduce of the input's gradients with this part."""
_LOSS_FUNCTION_SHARE = 0.1
"""Part of the loss outside the model, in the trainer's loss function."""
_EXTRA_BACKWARD_RATIO = 0.83
"""Ratio of backward to forward excess of a heavy last stage, measured on a production job (60 to
73 ms)."""


class Passes:
    """Adds the passes of one stage to its program."""

    def __init__(self, job: JobModel, program: StageProgram) -> None:
        self.job, self.program, self.costs = job, program, job.costs
        self.stage = program.stage
        self.full = job.granularity == Granularity.FULL
        self.communications = Communications(job, program)
        self.layers_extra_ns, self.ends_extra_ns = self._stage_extra()

    def _stage_extra(self) -> tuple[float, float]:
        """Return extra forward time: (of each layer, of embedding or output layer)."""
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
        if name not in (FORWARD, BACKWARD) and step.phase == Phase.BACKWARD:
            name = backward_of(name)
        return SpanTemplate(kind=Kind.COMPUTE, name=name, layer=layer).placed(step)

    def forward(self, step: Pass) -> None:
        """Add a forward pass: load, embedding, layers, output layer and loss of the stage."""
        program = self.program
        whole = program.open(self._compute_span(step, FORWARD))
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
        """Add a backward pass: output layer, layers in reverse, and embedding of the stage."""
        program = self.program
        whole = program.open(self._compute_span(step, BACKWARD))
        if self._is_last(step):
            self._output_layer(step)
        for layer in reversed(self._layers(step)):
            self._layer(step, layer)
        if self._is_first(step):
            self._embedding(step)
        program.close(whole)

    def _layers(self, step: Pass) -> list[int]:
        """Return the global numbers, from 1, of the layers of a chunk."""
        per_chunk = self.job.layers_per_chunk
        first = (step.chunk * self.job.layout.pp + self.stage) * per_chunk + 1
        return list(range(first, first + per_chunk))

    def _scaled(self, step: Pass, forward_ns: float) -> float:
        return forward_ns * (self.costs.backward_ratio if step.phase == Phase.BACKWARD else 1.0)

    def _load(self, step: Pass) -> None:
        """Add the load: TP rank 0 loads a microbatch, its TP peers wait for it."""
        program, costs = self.program, self.costs
        template = SpanTemplate(
            kind=Kind.DATA,
            name=BATCH_GENERATOR,
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
        """Add a module's compute and return its span, which stays open; NO_SPAN at `base`."""
        leaf = self._compute_span(step, name, layer) if self.full else None
        if step.phase == Phase.BACKWARD:
            extra_ns *= _EXTRA_BACKWARD_RATIO
        cost_ns = self._scaled(step, forward_ns) + extra_ns
        return self.program.compute(cost_ns, step.microbatch, leaf=leaf)

    def _embedding(self, step: Pass) -> None:
        extra = self.ends_extra_ns if self.job.layout.pp > 1 and not self._is_last(step) else 0.0
        span = self._module(step, EMBEDDING, self.costs.embedding_ns, extra_ns=extra)
        if step.phase == Phase.FORWARD:
            self.communications.tensor_all_reduce(step)
        self.program.close(span)

    def _output_layer(self, step: Pass) -> None:
        cost, extra = self.costs.output_layer_ns, self.ends_extra_ns
        if step.phase == Phase.FORWARD:
            self.program.close(self._module(step, OUTPUT_LAYER, cost, extra_ns=extra))
        else:
            self._split_backward(step, OUTPUT_LAYER, cost, extra_ns=extra, weight_share=0.5)

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
        """Add a module's backward, whose last weight gradients hide the TP all_reduce."""
        early = 1.0 - weight_share
        span = self._module(step, name, forward_ns * early, layer, extra_ns * early)
        pending = self.communications.launch_tensor_all_reduce(step)
        late = extra_ns * _EXTRA_BACKWARD_RATIO * weight_share
        self.program.compute(self._scaled(step, forward_ns * weight_share) + late, step.microbatch)
        self.program.instructions += pending
        self.program.close(span)

    def _loss(self, step: Pass) -> None:
        """Add cross entropy over the split vocabulary, then the trainer's own loss function."""
        program, costs = self.program, self.costs
        program.compute(costs.loss_ns * (1 - _LOSS_FUNCTION_SHARE), step.microbatch)
        for _ in range(3):  # largest logit, the label's logit, sum of exponentials
            self.communications.collective("all_reduce", "tp", costs.norm_sync_ns, 4, step=step)
        leaf = self._compute_span(step, LOSS)
        span = program.compute(costs.loss_ns * _LOSS_FUNCTION_SHARE, step.microbatch, leaf=leaf)
        program.close(span)

    def _layer(self, step: Pass, layer: int) -> None:
        program, costs = self.program, self.costs
        extra = self.layers_extra_ns
        whole = NO_SPAN
        if self.full:
            whole = program.open(self._compute_span(step, TRANSFORMER_LAYER, layer))
        norm_ns = self._scaled(step, costs.norm_ns + extra / 2)
        modules = [self._attention, self._mlp]
        for module in modules if step.phase == Phase.FORWARD else reversed(modules):
            program.compute(norm_ns, step.microbatch)
            module(step, layer)
        program.close(whole)

    def _attention(self, step: Pass, layer: int) -> None:
        costs = self.costs
        if step.phase == Phase.BACKWARD and self.job.layout.cp == 1:
            self._split_backward(step, ATTENTION, costs.attention_ns, layer)
            return
        span = self._module(step, ATTENTION, costs.attention_ns, layer)
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
            self._split_backward(step, MLP, self.costs.mlp_ns, layer)
        else:
            span = self._module(step, MLP, self.costs.mlp_ns, layer)
            self.communications.tensor_all_reduce(step, layer)
            self.program.close(span)

    def _experts(self, step: Pass, layer: int) -> None:
        """Add the router, all_to_all to the experts, the experts, and all_to_all back."""
        costs = self.costs
        span = self._module(step, MOE, costs.mlp_ns * _ROUTER_SHARE, layer)
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


def compile_job(job: JobModel) -> list[StageProgram]:
    """Compile one program for each stage. Raises ConfigError for sizes that no schedule allows."""
    layout = job.layout
    orders = stage_steps(layout.pp, layout.vpp, job.num_microbatches)
    programs = []
    for stage, order in enumerate(orders):
        compiler = _StageCompiler(job, stage)
        compiler.iteration(order)
        programs.append(compiler.program)
    return programs


class _StageCompiler:
    """Writes the program of one stage."""

    def __init__(self, job: JobModel, stage: int) -> None:
        self.job, self.stage, self.costs = job, stage, job.costs
        self.full = job.granularity == Granularity.FULL
        self.program = StageProgram(stage)
        self.passes = Passes(job, self.program)
        self.communications = self.passes.communications

    def iteration(self, order: tuple[Pass | Exchange, ...]) -> None:
        """Write the whole iteration, from the first load to the checkpoint."""
        program = self.program
        whole = program.open(SpanTemplate(kind=Kind.ITERATION, name=ITERATION))
        pause = SpanTemplate(kind=Kind.GC, name=collection_of(2), track=Track.HOST)
        for number, step in enumerate(order):
            if number == len(order) // 2:
                program.simple(Code.PAUSE, pause if self.full else None)
            if isinstance(step, Exchange):
                self._exchange(step)
            elif step.phase == Phase.FORWARD:
                self.passes.forward(step)
            else:
                self.passes.backward(step)
        self._gradient_sync()
        self._optimizer()
        program.simple(Code.SYNCHRONIZE)
        program.close(whole)
        if self.job.imbalance.checkpoint_interval:
            save = SpanTemplate(kind=Kind.CHECKPOINT, name=SAVE_CHECKPOINT, track=Track.HOST)
            program.simple(Code.SAVE, save if self.full else None)
        program.compute(self.costs.between_iterations_ns, work=Work.HOST)
        program.simple(Code.SYNCHRONIZE)

    def _exchange(self, step: Exchange) -> None:
        """Add a batch of messages in the tracer's order: previous stage first, sends first."""
        ends, templates = [], []
        names = {one: message_name(one.op, one.direction) for one in step.transfers}
        for transfer in sorted(names, key=lambda one: MESSAGES.index(names[one])):
            if transfer.op == RECV:
                self.program.transfer_rows.append(
                    TransferRow(self.costs.pipeline_ns, "pp", transfer.peer_stage)
                )
            row = len(self.program.transfer_rows) - 1
            ends.append(
                ExchangeEnd(
                    transfer.peer_stage, transfer.op, transfer.direction, transfer.sequence, row
                )
            )
            templates.append(
                SpanTemplate(
                    kind=Kind.P2P,
                    name=names[transfer],
                    track=Track.COMMUNICATION,
                    microbatch=transfer.microbatch,
                    chunk=transfer.chunk,
                    op=transfer.op,
                    direction=str(transfer.direction),
                    peer_stage=transfer.peer_stage,
                    axis="pp",
                    sequence=transfer.sequence,
                    size_bytes=self.costs.activation_bytes,
                )
            )
        self.program.exchange(tuple(ends), templates)

    def _gradient_sync(self) -> None:
        program, costs, layout = self.program, self.costs, self.job.layout
        last = self.stage == layout.pp - 1
        span = program.open(SpanTemplate(kind=Kind.OPTIMIZER, name=GRAD_SYNC))
        op = "reduce_scatter" if self.job.distributed_optimizer else "all_reduce"
        ratio = 1 if self.job.distributed_optimizer else 2
        self.communications.collective(op, "dp_cp", costs.gradient_ns * ratio, costs.gradient_bytes)
        if self.job.tied_embeddings and layout.pp > 1 and (last or self.stage == 0):
            self.communications.join("embd", costs.embedding_sync_ns, costs.embedding_bytes)
        program.close(span)
        if last:  # the trainer averages the loss of its replicas
            self.communications.collective("all_reduce", "dp_cp", costs.norm_sync_ns, 8)

    def _optimizer(self) -> None:
        """Add gradient norm, update, and the gathering of sharded parameters."""
        program, costs = self.program, self.costs
        span = program.open(SpanTemplate(kind=Kind.OPTIMIZER, name=OPTIMIZER))
        axis = "intra_dist_opt" if self.job.distributed_optimizer else "mp"
        self.communications.join(axis, costs.norm_sync_ns, 4)
        program.compute(costs.optimizer_ns)
        if self.job.distributed_optimizer:
            self.communications.collective(
                "all_gather", "dp_cp", costs.parameter_ns, costs.parameter_bytes
            )
        program.close(span)
