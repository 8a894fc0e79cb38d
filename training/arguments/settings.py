"""All flags of the trainer, in groups: model, parallel axes, batches, optimizer, outputs.

A group is a frozen, keyword-only dataclass whose fields are made by `flag`. The option string is
the field's name with dashes, unless `option` says otherwise; the type comes from the annotation; a
boolean becomes a switch that turns its default around.

    @dataclass(frozen=True, kw_only=True)
    class Example:
        num_layers: int | None = flag(None, "transformer layers")
        add_bias: bool = flag(True, "leave the bias away", option="--disable-bias")

`Settings` holds all groups as they were given, unchecked; `training.arguments.sizes` checks them.

`--pipeline-model-parallel-layout` has Megatron's notation: one letter a layer, `|` between stages.
E is the embedding, t a transformer layer, L the loss; ``x*4`` and ``(tt|)*3`` repeat, commas are
ignored. Stages are in the order in which a microbatch passes them; V chunks on each of P ranks make
P·V stages.
"""
# ruff: noqa: RUF009 - `flag` makes an immutable field, as dataclasses.field does

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import NoReturn, TypeVar

from megascan.errors import ConfigError, UsageError

Value = TypeVar("Value")
Group = TypeVar("Group")

_METADATA_KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class _Flag:
    text: str
    option: str
    choices: tuple[str | int, ...]


def flag(
    default: Value, text: str, *, option: str = "", choices: Sequence[str | int] = ()
) -> Value:
    """Declare one field of a settings dataclass together with its command-line flag."""
    declared = _Flag(text=text, option=option, choices=tuple(choices))
    made: Value = field(default=default, metadata={_METADATA_KEY: declared})
    return made


def add_group(parser: argparse.ArgumentParser, title: str, group: type) -> None:
    """Add a flag to the parser for every field of the dataclass `group`."""
    section = parser.add_argument_group(title)
    hints = typing.get_type_hints(group)
    for entry in fields(group):
        _add_flag(section, entry, hints[entry.name])


def read_group(group: type[Group], values: Mapping[str, object]) -> Group:
    """Build the dataclass `group` from parsed values (``vars(namespace)``)."""
    names = [entry.name for entry in fields(group)]  # type: ignore[arg-type]
    return group(**{name: values[name] for name in names})


def option_of(group: type, name: str) -> str:
    """Return the option string of a field, for messages: ``num_layers`` -> ``--num-layers``."""
    entry = next(entry for entry in fields(group) if entry.name == name)
    return _option(entry)


def _option(entry: Field[object]) -> str:
    declared: _Flag = entry.metadata[_METADATA_KEY]
    return declared.option or "--" + entry.name.replace("_", "-")


def _add_flag(section: argparse._ArgumentGroup, entry: Field[object], hint: object) -> None:
    declared: _Flag = entry.metadata[_METADATA_KEY]
    assert entry.default is not MISSING  # `flag` always gives one
    if hint is bool:
        section.add_argument(
            _option(entry),
            dest=entry.name,
            action="store_false" if entry.default else "store_true",
            help=declared.text,
        )
        return
    kind, repeated = _value_type(hint)
    section.add_argument(
        _option(entry),
        dest=entry.name,
        type=kind,
        nargs="+" if repeated else None,
        default=entry.default,
        choices=declared.choices or None,
        help=f"{declared.text} (default: {entry.default})",
    )


def _value_type(hint: object) -> tuple[type, bool]:
    """Return the type of a flag's value, and whether the flag takes several (a tuple)."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    repeated = typing.get_origin(hint) is tuple
    if repeated:
        hint = typing.get_args(hint)[0]
    assert isinstance(hint, type)
    return hint, repeated


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The pipeline's schedule; without these flags it is the schedule of Megatron-Core."""

    pipeline_schedule: str | None = flag(
        None,
        "order of the pipeline's work: 1f1b, dfc (depth-first, interleaved), bfc (breadth-first), "
        "zb-h1 (weight gradients on their own), auto (the fastest plan found within "
        "--dpp-memory-limit), or a file that holds a plan; left out: Megatron-Core's schedule",
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of each stage, as in 'Ettt|ttt|t|tL': E embedding, t layer, L loss, | between "
        "stages, x*4 and (tt|)*3 repeat; left out: the same number on each",
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "interleaved schedule: microbatches that pass one chunk before the next; left out: the "
        "pipeline size",
        option="--microbatch-group-size-per-virtual-pipeline-stage",
    )
    recompute_ahead: bool = flag(
        False,
        "keep no activations but a chunk's input, and repeat its forward before the gradient "
        "comes; with --pipeline-schedule or --use-dpp, in place of --recompute-granularity",
    )
    plan_from: Path | None = flag(
        None,
        "a timeline of this job (aggregate.py -o), whose measured costs --pipeline-schedule auto "
        "or --use-dpp plans for; left out: even stages",
    )
    dpp_microbatches: str | None = flag(
        None,
        "microbatches of a step by replica, as in 18,14; auto: moved between replicas while the "
        "job runs, from what each replica takes; left out: equal shares",
    )
    dpp_memory_limit: float | None = flag(
        None,
        "microbatches whose activations a rank may hold at most: plans that hold more are refused, "
        "auto and guided use what is allowed; left out: as many as with Megatron-Core's schedule",
    )
    order_microbatches: str | None = flag(
        None,
        "order of a step's microbatches by their tokens before padding: hill runs short ones first "
        "and last, long ones in the middle; left out: as the data has them",
        choices=("hill",),
    )
    use_dpp: bool = flag(
        False, "plan the pipeline's work: --pipeline-schedule auto where none is given"
    )
    forward_backward_disaggregating: bool = flag(
        False,
        "let helpers come (python -m training.helper), which run forwards beside the pipeline; "
        "forwards are repeated before their backward, by plans of --pipeline-schedule 1f1b "
        "(default), zb-h1 or auto",
    )
    fbd_port: int = flag(
        0, "where rank 0 waits for helpers; 0: any free port; the address is printed"
    )
    fbd_helpers: int = flag(
        0, "helpers that rank 0 starts on its host and waits for; others may come at any time"
    )
    dpp_choice: str = flag(
        "static",
        "with --use-dpp: follow the plan (static), or leave it while the job runs where its next "
        "input is neither there nor about to come (guided)",
        choices=("static", "guided"),
    )


_OF_THE_ORIGINAL = {
    "node_ips": "torchrun brings the nodes together",
    "workload": "messages have the size of the model's activations",
    "num_gpus": "torchrun starts the ranks",
    "multi_node": "torchrun knows how many nodes there are",
}
"""Flags of the first MegaDPP, which had its own transport, and why each has no effect here."""

_REFUSED = "ignore_forward_tensor_parallel"
"""Flag of the first MegaFBD: it allowed another tensor-parallel size for forward ranks."""


def add_original_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the first MegaDPP, so that its command lines still run."""
    group = parser.add_argument_group("flags of the first MegaDPP, without effect")
    for name in _OF_THE_ORIGINAL:
        group.add_argument(
            "--" + name.replace("_", "-"),
            nargs="?",
            const="",
            help="without effect",
        )
    group.add_argument(
        "--" + _REFUSED.replace("_", "-"), action="store_true", help="refused: see docs/helpers.md"
    )


def notes_on_original(given: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for each flag of the first MegaDPP that is given and has no effect.

    Raise ConfigError for --ignore-forward-tensor-parallel, which would change sums.
    """
    if getattr(given, _REFUSED):
        raise ConfigError(
            "--ignore-forward-tensor-parallel is refused: forwards with another tensor-parallel "
            "size add up in another order than those that backward passes repeat; leave it out, "
            "helpers run whole stages"
        )
    for name, reason in _OF_THE_ORIGINAL.items():
        if getattr(given, name) is not None:
            yield f"--{name.replace('_', '-')} has no effect: {reason}"


_REPEATED = re.compile(r"\(([^()]+)\)\*(\d{1,4})|([EtmL|])\*(\d{1,4})")
_OPTION = "--pipeline-model-parallel-layout"
_MOST_LETTERS = 100_000


def stages_of(layout: str) -> list[str]:
    """Return the letters of each stage of a layout; ConfigError for what is no layout."""
    text = layout.replace(",", "").replace(" ", "")
    while (found := _REPEATED.search(text)) is not None:
        letters = found[1] or found[3]
        text = text[: found.start()] + letters * int(found[2] or found[4]) + text[found.end() :]
        if len(text) > _MOST_LETTERS:
            raise ConfigError(f"{_OPTION} {layout} is too long; give fewer layers")
    if not re.fullmatch(r"[EtL|]+", text):
        raise ConfigError(
            f"{_OPTION} {layout} is no layout; write E for the embedding, t for each layer, L for "
            "the loss and | between stages, as in 'Ett|ttL'"
        )
    return text.split("|")


def check_layout(layout: str, num_layers: int, pipeline_size: int) -> list[str]:
    """Return the letters of each stage of a layout that fits the job; ConfigError otherwise."""
    stages = stages_of(layout)
    whole = "".join(stages)
    if whole != f"E{'t' * num_layers}L":
        raise ConfigError(
            f"{_OPTION} {layout} has {whole.count('t')} layers, and it must be E, the "
            f"--num-layers {num_layers} layers as t, then L"
        )
    if len(stages) % pipeline_size:
        raise ConfigError(
            f"{_OPTION} {layout} has {len(stages)} stages, expected a multiple of "
            f"--pipeline-model-parallel-size {pipeline_size}"
        )
    return stages


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes and options of the GPT model; sizes that are None must be given or are derived."""

    num_layers: int | None = flag(None, "transformer layers")
    hidden_size: int | None = flag(None, "size of the hidden states")
    ffn_hidden_size: int | None = flag(
        None, "inner size of the MLP; left out: 4 x hidden size, with --swiglu 8/3 of it"
    )
    num_attention_heads: int | None = flag(None, "attention heads")
    kv_channels: int | None = flag(None, "size of one head; left out: hidden size / heads")
    group_query_attention: bool = flag(False, "grouped-query attention")
    num_query_groups: int = flag(1, "key-value groups with --group-query-attention")
    seq_length: int | None = flag(None, "tokens in one sample")
    max_position_embeddings: int | None = flag(
        None, "longest sequence the position embedding knows; left out: --seq-length"
    )
    model_vocab_size: int | None = flag(
        None, "ids that the embedding knows, before padding; left out: the tokenizer's"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the vocabulary is padded to a multiple of this times the tensor-parallel size"
    )
    position_embedding_type: str = flag(
        "learned_absolute", "position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(10000, "base period of the rotary embedding")
    rotary_percent: float = flag(1.0, "share of a head that is rotated")
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "rotate as if positions were this many times closer together"
    )
    use_rope_scaling: bool = flag(False, "stretch the slow rotations as Llama 3.1 does")
    rope_scaling_factor: float = flag(8.0, "how far, with --use-rope-scaling")
    normalization: str = flag("LayerNorm", "normalization", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "epsilon of the normalization")
    qk_layernorm: bool = flag(False, "normalize queries and keys")
    swiglu: bool = flag(False, "gated linear units with SiLU instead of GELU")
    openai_gelu: bool = flag(False, "the tanh form of GELU, as GPT-2 was trained with")
    add_bias_linear: bool = flag(
        True, "leave the bias of linear layers away", option="--disable-bias-linear"
    )
    add_qkv_bias: bool = flag(False, "bias of the query-key-value projection only")
    untie_embeddings_and_output_weights: bool = flag(
        False, "give the output layer weights of its own"
    )
    hidden_dropout: float = flag(0.1, "dropout of hidden states")
    attention_dropout: float = flag(0.1, "dropout of attention weights")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    transformer_impl: str = flag(
        "local",
        "layers of Megatron-Core itself, or those of Transformer Engine (GPU only)",
        choices=("local", "transformer_engine"),
    )


@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """Mixture of experts; without ``--num-experts`` the model is dense."""

    num_experts: int | None = flag(None, "experts of a mixture-of-experts layer")
    moe_router_topk: int = flag(2, "experts that each token is sent to")
    moe_router_pre_softmax: bool = flag(
        False, "softmax before the choice of experts; needed with --moe-router-topk 1"
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "how the router balances its load",
        choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    )
    moe_aux_loss_coeff: float = flag(0.0, "weight of the balancing loss")
    moe_token_dispatcher_type: str = flag(
        "allgather", "how tokens reach their experts", choices=("allgather", "alltoall")
    )
    moe_grouped_gemm: bool = flag(False, "one grouped matrix product for all local experts")


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings:
    """Activations that are computed again in the backward pass instead of kept."""

    recompute_granularity: str | None = flag(
        None, "what is computed again", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "which layers, with granularity full", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(None, "layers of one recomputed unit, or how many")
    recompute_modules: tuple[str, ...] | None = flag(
        None, "modules that selective recomputes; left out: core_attn"
    )


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Sizes of the parallel axes; data parallelism is what remains of the world size."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one chunk of the interleaved pipeline schedule"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "chunks on one rank; another way to ask for the interleaved schedule"
    )
    context_parallel_size: int = flag(1, "ranks that share each sequence")
    expert_model_parallel_size: int = flag(1, "ranks that share the experts")
    sequence_parallel: bool = flag(
        False, "split norms and dropout along the sequence over the tensor-parallel ranks"
    )
    use_distributed_optimizer: bool = flag(
        False, "split the optimizer state over the data-parallel ranks"
    )
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = flag(
        False, "gather parameters while the forward pass goes on (distributed optimizer)"
    )
    ddp_bucket_size: int | None = flag(None, "parameters in one gradient bucket")
    overlap_p2p_comm: bool = flag(
        True,
        "interleaved schedule: do not overlap pipeline communication with compute",
        option="--no-overlap-p2p-communication",
    )
    distributed_backend: str | None = flag(
        None,
        "nccl trains on GPUs, gloo on the CPU; left out: nccl where there are GPUs",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: int = flag(10, "longest wait for a collective")
    use_cpu_initialization: bool = flag(
        False, "make the initial weights on the CPU; then they do not depend on the TP size"
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Batch sizes, the length of the run and its seed."""

    micro_batch_size: int | None = flag(None, "samples of one microbatch on one rank")
    global_batch_size: int | None = flag(
        None, "samples of one iteration; left out: micro-batch size x data-parallel size"
    )
    train_iters: int | None = flag(None, "iterations to train, counted from the very first run")
    exit_interval: int | None = flag(None, "end after the first iteration divisible by this")
    eval_interval: int = flag(1000, "iterations between two evaluations on the validation set")
    eval_iters: int = flag(100, "iterations of one evaluation; 0: never evaluate")
    seed: int = flag(1234, "seed of weights, dropout and the order of the data")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Adam or SGD and its learning-rate schedule."""

    optimizer: str = flag("adam", "optimizer", choices=("adam", "sgd"))
    lr: float | None = flag(None, "highest learning rate")
    min_lr: float = flag(0.0, "lowest learning rate after warm-up")
    lr_decay_style: str = flag(
        "linear",
        "how the learning rate falls",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "iterations over which it falls; left out: --train-iters"
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        "shape of the last phase with WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "iterations of the last phase with WSD")
    lr_warmup_fraction: float | None = flag(
        None, "share of --lr-decay-iters in which the learning rate rises"
    )
    lr_warmup_iters: int = flag(0, "iterations in which the learning rate rises")
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    weight_decay: float = flag(0.01, "weight decay")
    clip_grad: float = flag(1.0, "largest norm of the gradient; 0: no limit")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment")
    adam_eps: float = flag(1e-8, "Adam's epsilon")
    sgd_momentum: float = flag(0.9, "momentum of SGD")
    optimizer_cpu_offload: bool = flag(False, "keep optimizer state and step on the CPU")
    optimizer_offload_fraction: float = flag(1.0, "share of it that is offloaded")


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Number formats; without a switch everything is float32."""

    bf16: bool = flag(False, "train in bfloat16")
    fp16: bool = flag(False, "train in float16 with loss scaling")
    loss_scale: float | None = flag(None, "constant loss scale; left out: dynamic (fp16)")
    initial_loss_scale: float = flag(2**32, "first dynamic loss scale")
    min_loss_scale: float = flag(1.0, "lowest dynamic loss scale")
    loss_scale_window: float = flag(1000, "iterations after which the loss scale is raised")
    hysteresis: int = flag(2, "overflows until the loss scale is lowered")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "sum gradients in float32 (always so with --bf16)"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where and when the state of the training is written and read."""

    save: Path | None = flag(None, "folder to write checkpoints to, also at the end of the run")
    save_interval: int | None = flag(None, "iterations between two checkpoints")
    load: Path | None = flag(None, "folder to resume from; empty or missing: start at 1")
    load_hf: Path | None = flag(
        None, "Hugging Face folder to start from: its model, weights and tokenizer"
    )
    use_checkpoint_args: bool = flag(
        False, "take the model's and the tokenizer's flags from the checkpoint in --load"
    )
    exit_on_missing_checkpoint: bool = flag(False, "end when --load holds no checkpoint")
    finetune: bool = flag(False, "take only the weights from --load and start at iteration 1")
    load_optim: bool = flag(
        True, "do not load the optimizer and its schedule", option="--no-load-optim"
    )
    load_rng: bool = flag(True, "do not load random states", option="--no-load-rng")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is reported while training."""

    log_interval: int = flag(100, "iterations between two log lines")
    timing_log_level: int = flag(
        0,
        "Megatron-Core's timers: 0 none, 1 coarse, 2 fine (they synchronize the device)",
        choices=(0, 1, 2),
    )
    tensorboard_dir: Path | None = flag(None, "folder for TensorBoard events")
    tensorboard_log_interval: int = flag(1, "iterations between two TensorBoard points")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All flags as given on the command line, unchecked; `sizes.resolve_sizes` checks them."""

    model: ModelSettings
    moe: MoeSettings
    recompute: RecomputeSettings
    parallel: ParallelSettings
    pipeline: PipelineSettings
    batch: BatchSettings
    optimizer: OptimizerSettings
    precision: PrecisionSettings
    checkpoint: CheckpointSettings
    log: LogSettings


_GROUPS: tuple[tuple[str, str, type], ...] = (
    ("model", "model", ModelSettings),
    ("moe", "mixture of experts", MoeSettings),
    ("recompute", "activation recomputation", RecomputeSettings),
    ("parallel", "parallelism", ParallelSettings),
    ("pipeline", "pipeline schedule", PipelineSettings),
    ("batch", "batches and length", BatchSettings),
    ("optimizer", "optimizer", OptimizerSettings),
    ("precision", "precision", PrecisionSettings),
    ("checkpoint", "checkpoints", CheckpointSettings),
    ("log", "reports", LogSettings),
)


class TrainerParser(argparse.ArgumentParser):
    """A parser that raises UsageError for a wrong command line, so that one rank can report it."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage on every rank."""
        raise UsageError(f"{message}; see --help")


def build_parser(prog: str, description: str) -> TrainerParser:
    """Return a parser with the trainer's own flags; other rooms add their flags to it."""
    parser = TrainerParser(prog=prog, description=description, allow_abbrev=False)
    for _, title, group in _GROUPS:
        add_group(parser, title, group)
    return parser


def read_settings(namespace: argparse.Namespace) -> Settings:
    """Return the trainer's own flags of a parsed command line."""
    values = vars(namespace)
    return Settings(**{name: read_group(group, values) for name, _, group in _GROUPS})


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse the trainer's own flags alone (tests, tools)."""
    return read_settings(build_parser("training", "trainer flags").parse_args(arguments))
