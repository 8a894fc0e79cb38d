"""Declare every name that a trace can have, and what it counts as in the analysis.

Instrumentation, the readers of other formats, the simulator and the detector take names from here.
To trace something new, add one line to the table to which it belongs:

    WORDS         names of spans that are not communication: passes, layers, modules, optimizer, ...
    COLLECTIVES   operations of process groups, and what their members wait for
    MESSAGES      names of point-to-point messages between pipeline stages
    GROUP_AXES    process groups: the axis that joins members, and Megatron-Core's names for it

How compute spans contain each other (`>`), and what the detector does with each:

    forward > transformer_layer > attention, mlp, moe > core_attention-recompute
            > embedding, output_layer, loss
    PASS      compared between peers; in the time that its modules do not explain, the device
              stood still
    LAYER     compared where a stage has no peer; stands for its modules if none are traced
    MODULE    tells what is typical of a pass, and whether the host kept its device fed

A MODULE may lie inside another MODULE (`mlp` in `moe`): then the outer one counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final

from megascan.schema import Kind, Phase


class FaultKind(StrEnum):
    """What a planted fault slows, named as the detector's causes.

    COMPUTE: every computation of the rank. LINK: its communications, or those with one peer. HOST:
    the thread that launches operations, which starves the device. LOADER: the loading of each
    microbatch. GC: pauses of Python's collector.
    """

    COMPUTE = "compute"
    LINK = "link"
    HOST = "host"
    LOADER = "loader"
    GC = "gc"


class CountsAs(StrEnum):
    """What a span counts as in the analysis; all members are shown in docs/format.md.

    The analysis reads three members (PASS, LAYER, MODULE). All other members are only shown: the
    analysis finds their spans by kind or name, as said with each member.
    """

    ITERATION = "iteration"
    """Shown only: iterations are found by their kind."""
    PASS = "pass"
    """Forward or backward of one microbatch through one model chunk. Read by `detect.observe.spans`
    (what is compared between peers) and `detect.whatif.marks` (the passes of the replay)."""
    BLOCK = "block"
    """All layers of a chunk as one span. Shown only: the analysis does not use it."""
    LAYER = "layer"
    """A layer of the model. Read by `detect.observe.work` (layers compared where a stage has no
    peer) and `detect.comparison.measures`."""
    MODULE = "module"
    """Part of a layer; the modules of a layer follow each other. Read by `detect.observe.spans`
    (what is typical of a pass, how far a host launches ahead) and `detect.comparison.measures`."""
    MODEL_END = "model_end"
    """Before the first layer or after the last layer. Shown only: `detect.observe.work` finds the
    output layer by its name."""
    LOSS = "loss"
    """Shown only: `detect.observe.spans` finds the loss by its name."""
    PART = "part"
    """Inside a module: a kernel, an operator, a part that is recomputed alone. Shown only: compute
    spans that count as nothing else."""
    OPTIMIZER = "optimizer"
    """Shown only: `detect.observe.facts` finds the optimizer by its name."""
    GRADIENT_SYNC = "gradient_sync"
    """Shown only: `detect.observe.spans` finds gradient synchronisation by its name."""
    LOADER = "loader"
    """Shown only: loading is found by its kind."""
    COLLECTOR = "collector"
    """Shown only: collections of garbage are found by their kind."""
    CHECKPOINT = "checkpoint"
    """Shown only: checkpoints are found by their kind."""
    HOST = "host"
    """Shown only: the host's spans are found by their kind or their track."""
    COLLECTIVE = "collective"
    """Shown only: collectives are found by their kind."""
    MESSAGE = "message"
    """Shown only: messages are found by their kind."""


@dataclass(frozen=True)
class Word:
    """The name of a span, and properties of spans with this name.

    `contains_spans`: the span is a bracket around other compute spans (a pass, a layer), which
    includes the device's waits between them. It is false for modules, although parts may lie in a
    module. `contains_communication`: some of the span's time may be communication.
    """

    name: str
    kind: Kind
    counts_as: CountsAs
    phase: Phase | None = None
    _: KW_ONLY
    contains_spans: bool = False
    contains_communication: bool = False


ITERATION: Final = "iteration"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
BACKWARD_WEIGHTS: Final = "backward-weights"  # the second half of a backward pass that a plan split
DECODER: Final = "decoder"
TRANSFORMER_LAYER: Final = "transformer_layer"
PLAIN_LAYER: Final = "layer"
ATTENTION: Final = "attention"
MLP: Final = "mlp"
MOE: Final = "moe"
CORE_ATTENTION: Final = "core_attention"
RECOMPUTED_OUTPUT: Final = "output"
EMBEDDING: Final = "embedding"
OUTPUT_LAYER: Final = "output_layer"
LOSS: Final = "loss"
LOSS_SYNC: Final = "loss-sync"
OPTIMIZER: Final = "optimizer"
GRAD_SYNC: Final = "grad-sync"
BATCH_GENERATOR: Final = "batch-generator"
SAVE_CHECKPOINT: Final = "save-checkpoint"
SEND_RECV: Final = "send_recv"
_COLLECTION = "gc-generation-"
_GENERATIONS = range(3)


def backward_of(name: str) -> str:
    """Return the name of a module's backward: `mlp-backward`."""
    return f"{name}-backward"


def recompute_of(name: str) -> str:
    """Return the name of a module's repeated forward: `mlp-recompute`."""
    return f"{name}-recompute"


def collection_of(generation: int) -> str:
    """Return the name of a pause of Python's garbage collector."""
    return f"{_COLLECTION}{generation}"


_communicating = partial(Word, contains_communication=True)
_container = partial(_communicating, contains_spans=True)


def _of_model(name: str, counts_as: CountsAs, *, contains_spans: bool = False) -> tuple[Word, ...]:
    """Return the words of a part of the model: forward, backward, and forward repeated."""
    forward = _communicating(
        name, Kind.COMPUTE, counts_as, Phase.FORWARD, contains_spans=contains_spans
    )
    return (
        forward,
        replace(forward, name=backward_of(name), phase=Phase.BACKWARD),
        replace(forward, name=recompute_of(name), phase=Phase.RECOMPUTE),
    )


def _repeated_part(name: str) -> Word:
    return Word(recompute_of(name), Kind.COMPUTE, CountsAs.PART, Phase.RECOMPUTE)


WORDS: Final = (
    _container(ITERATION, Kind.ITERATION, CountsAs.ITERATION),
    _container(FORWARD, Kind.COMPUTE, CountsAs.PASS, Phase.FORWARD),
    _container(BACKWARD, Kind.COMPUTE, CountsAs.PASS, Phase.BACKWARD),
    _container(BACKWARD_WEIGHTS, Kind.COMPUTE, CountsAs.PASS, Phase.BACKWARD),
    _container(DECODER, Kind.COMPUTE, CountsAs.BLOCK, Phase.FORWARD),
    *_of_model(TRANSFORMER_LAYER, CountsAs.LAYER, contains_spans=True),
    *_of_model(PLAIN_LAYER, CountsAs.LAYER),
    *_of_model(ATTENTION, CountsAs.MODULE),
    *_of_model(MLP, CountsAs.MODULE),
    *_of_model(MOE, CountsAs.MODULE),
    *_of_model(EMBEDDING, CountsAs.MODEL_END),
    *_of_model(OUTPUT_LAYER, CountsAs.MODEL_END),
    _repeated_part(CORE_ATTENTION),
    _repeated_part(RECOMPUTED_OUTPUT),
    _communicating(LOSS, Kind.COMPUTE, CountsAs.LOSS, Phase.FORWARD),
    _communicating(LOSS_SYNC, Kind.COLLECTIVE, CountsAs.LOSS, Phase.FORWARD),
    _communicating(OPTIMIZER, Kind.OPTIMIZER, CountsAs.OPTIMIZER),
    _communicating(GRAD_SYNC, Kind.OPTIMIZER, CountsAs.GRADIENT_SYNC),
    _communicating(BATCH_GENERATOR, Kind.DATA, CountsAs.LOADER),
    *(Word(collection_of(each), Kind.GC, CountsAs.COLLECTOR) for each in _GENERATIONS),
    Word(SAVE_CHECKPOINT, Kind.CHECKPOINT, CountsAs.CHECKPOINT),
)
"""All names of spans that are not communication.

A compute span of any other name is a PART: a kernel or operator of a profile. `loss-sync` is the
loss together with its reduction over the replicas, which the original MegaScan records as one span.
"""

_UNDECLARED: Final = {
    Kind.COMPUTE: CountsAs.PART,
    Kind.OPTIMIZER: CountsAs.OPTIMIZER,
    Kind.HOST: CountsAs.HOST,
    Kind.DATA: CountsAs.LOADER,
    Kind.GC: CountsAs.COLLECTOR,
}
"""What spans of other names count as, for kinds with open names: operations of other tools."""

COPIES: Final = ("Memcpy", "Memset")
"""Begins of the names that profiles give to copies and fills on a device, which are no compute."""


MATRIX_KERNELS: Final = (
    "gemm", "cutlass", "xmma", "nvjet", "cijk", "convol", "winograd", "fprop", "dgrad", "wgrad",
    "flash", "fmha", "attention", "triton_tem",
)  # fmt: skip
"""Parts of the names of kernels that multiply matrices (of cuBLAS, cuDNN, attention)."""

MEMORY_KERNELS: Final = (
    "elementwise", "reduce_kernel", "norm", "bn_fw", "bn_bw", "softmax", "dropout", "embedding",
    "index", "gather", "scatter", "batchedcopy", "nll_loss", "cross_entropy", "multi_tensor_apply",
    "adam", "triton_poi", "triton_red", "triton_per",
)  # fmt: skip
"""Parts of the lower-case names of kernels that read and write but hardly compute."""


def is_copy(name: str) -> bool:
    """Return whether a profile's span is a copy or a fill: `Memcpy HtoD`."""
    return name.startswith(COPIES)


def multiplies_matrices(kernel: str) -> bool:
    """Return whether a kernel computes more than it moves: `ampere_bf16_s16816gemm`."""
    return any(part in kernel.lower() for part in MATRIX_KERNELS)


def is_bound_by_memory(kernel: str) -> bool:
    """Return whether a kernel takes as long as its bytes: `vectorized_layer_norm_kernel`."""
    name = kernel.lower()
    return not multiplies_matrices(kernel) and any(part in name for part in MEMORY_KERNELS)


class Waiting(StrEnum):
    """Whom the members of a collective wait for."""

    EVERYBODY = "everybody"
    """No member leaves before all members have arrived."""
    ROOT = "root"
    """The root may leave early or wait for all; all other members need only the root."""


COLLECTIVES: Final = {
    "all_reduce": Waiting.EVERYBODY,
    "all_gather": Waiting.EVERYBODY,
    "reduce_scatter": Waiting.EVERYBODY,
    "all_to_all": Waiting.EVERYBODY,
    "barrier": Waiting.EVERYBODY,
    "all_gather_object": Waiting.EVERYBODY,
    "broadcast": Waiting.ROOT,
    "reduce": Waiting.ROOT,
    "gather": Waiting.ROOT,
    "scatter": Waiting.ROOT,
    "broadcast_object_list": Waiting.ROOT,
}
"""Operations of process groups, by the name of both the span and `op`."""

ROOTED_OPS: Final = tuple(op for op, waits in COLLECTIVES.items() if waits is Waiting.ROOT)
MUTUAL_OPS: Final = tuple(op for op, waits in COLLECTIVES.items() if waits is Waiting.EVERYBODY)

SEND: Final = "send"
RECV: Final = "recv"


def message_name(op: str, direction: str) -> str:
    """Return the name of a message's span: `send_forward` hands activations to the next stage."""
    return f"{op}_{direction}"


MESSAGES: Final = (
    message_name(SEND, Phase.BACKWARD),
    message_name(RECV, Phase.FORWARD),
    message_name(SEND, Phase.FORWARD),
    message_name(RECV, Phase.BACKWARD),
)
"""Messages in the order in which an exchange is recorded: previous stage first, sends first."""
UNDIRECTED_MESSAGES: Final = (SEND, RECV, SEND_RECV)
"""Messages of profiles, which name no direction; `send_recv` is a batch of several messages."""


@dataclass(frozen=True)
class GroupAxis:
    """The axis that joins the members of a process group, the first part of the group's id.

    `variable` is the variable of `megatron.core.parallel_state`, by which profiles describe groups,
    too. `within_pass`: members wait for each other inside a pass. `is_data_parallel`: gradients and
    parameters travel over the group.
    """

    name: str
    variable: str = ""
    _: KW_ONLY
    within_pass: bool = False
    is_data_parallel: bool = False


GROUP_AXES: Final = (
    GroupAxis("tp", "_TENSOR_MODEL_PARALLEL_GROUP", within_pass=True),
    GroupAxis("pp", "_PIPELINE_MODEL_PARALLEL_GROUP"),
    GroupAxis("dp", "_DATA_PARALLEL_GROUP", is_data_parallel=True),
    GroupAxis("dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP", is_data_parallel=True),
    GroupAxis("dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG", is_data_parallel=True),
    GroupAxis("cp", "_CONTEXT_PARALLEL_GROUP", within_pass=True),
    GroupAxis("ep", "_EXPERT_MODEL_PARALLEL_GROUP", within_pass=True),
    GroupAxis("expt_dp", "_EXPERT_DATA_PARALLEL_GROUP", is_data_parallel=True),
    GroupAxis("expt_tp", "_EXPERT_TENSOR_PARALLEL_GROUP", within_pass=True),
    GroupAxis("tp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", within_pass=True),
    GroupAxis("tp_ep_pp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    GroupAxis("mp", "_MODEL_PARALLEL_GROUP"),
    GroupAxis("embd", "_EMBEDDING_GROUP"),
    GroupAxis("pos_embd", "_POSITION_EMBEDDING_GROUP"),
    GroupAxis("tp_dp", "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    GroupAxis("tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    GroupAxis("tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", within_pass=True),
    GroupAxis("intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", is_data_parallel=True),
    GroupAxis("intra_expt_dp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", is_data_parallel=True),
    GroupAxis("inter_expt_dp", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"),
    GroupAxis("intra_dist_opt", "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"),
    GroupAxis("dp_gloo", "_DATA_PARALLEL_GROUP_GLOO"),
    GroupAxis("dp_cp_gloo", "_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    GroupAxis("expt_dp_gloo", "_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    GroupAxis("intra_dp_cp_gloo", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
    GroupAxis("intra_expt_dp_gloo", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO"),
    GroupAxis("world"),
)
"""Megatron-Core's groups; a group in two variables gets the first axis of this table. Groups that a
trainer makes itself keep their own descriptions."""

AXIS_OF_VARIABLE: Final = {axis.variable: axis.name for axis in GROUP_AXES if axis.variable}
MODEL_AXES: Final = tuple(axis.name for axis in GROUP_AXES if axis.within_pass)
"""Axes over which ranks of one stage and replica wait for each other inside a pass."""
_DATA_PARALLEL_AXES: Final = tuple(axis.name for axis in GROUP_AXES if axis.is_data_parallel)


MESH_AXES: Final = dict.fromkeys(
    ("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "replicate", "shard"), "dp"
) | {"tp": "tp", "cp": "cp", "pp": "pp"}
"""Axes by the names that torch's own examples and torchtitan give to dimensions of a mesh."""


def group_id(axis: str, members: Iterable[int]) -> str:
    """Return the id of a process group, the same on every member: `tp@4`."""
    return f"{axis}@{min(members)}"


def axis_of_group(group: str) -> str:
    """Return the axis of a process group's id: `tp` of `tp@4`."""
    return group.partition("@")[0]


def is_data_parallel(group: str) -> bool:
    """Return whether gradients and parameters travel over a group.

    If several mesh dimensions are one axis, each has a name of its own: `dp-dp_shard@0`.
    """
    axis = axis_of_group(group)
    return axis in _DATA_PARALLEL_AXES or axis.startswith("dp-")


_DECLARED: Final = {(word.kind, word.name): word for word in WORDS}


def word_of(kind: Kind, name: str) -> Word | None:
    """Return the word for a span's kind and name; None if the name is not known."""
    declared = _DECLARED.get((kind, name))
    if declared is not None:
        return declared
    if kind in _UNDECLARED:
        return Word(name, kind, _UNDECLARED[kind])
    if kind is Kind.COLLECTIVE and name in COLLECTIVES:
        return Word(name, kind, CountsAs.COLLECTIVE)
    if kind is Kind.P2P and name in (*MESSAGES, *UNDIRECTED_MESSAGES):
        return Word(name, kind, CountsAs.MESSAGE)
    return None


def names_of(*wanted: CountsAs, phases: Iterable[Phase] = tuple(Phase)) -> tuple[str, ...]:
    """Return the names of compute spans that count as any of `wanted`, in some phases.

    names_of(CountsAs.MODULE, phases=[Phase.BACKWARD]) is attention-backward, mlp-backward, ...
    """
    within = tuple(phases)
    return tuple(
        word.name
        for word in WORDS
        if word.kind is Kind.COMPUTE and word.counts_as in wanted and word.phase in within
    )


CONTAINERS: Final = tuple(
    word.name for word in WORDS if word.kind is Kind.COMPUTE and word.contains_spans
)
"""Compute spans that contain other spans, and the device's waits between these."""
