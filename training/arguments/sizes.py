"""Check that the flags fit together, and derive every size that was not given.

    check_flags     rules over the flags as they were given
    resolve_sizes   the divisions that make the sizes: data-parallel size, microbatches, chunks
    check_fit       rules between the finished sizes: model, parallel axes, schedule, experts
    idle_flags      flags that do nothing, because the flag that would use them is not given

A broken rule raises a ConfigError of one sentence. An idle flag is only noted: scripts of other
trainers pass `--split` next to `--mock-data`, or the flags of `--fp16` to a run in bf16.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

from megascan.errors import ConfigError
from training.arguments.settings import (
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Settings,
    check_layout,
    option_of,
    stages_of,
)


def check_flags(settings: Settings) -> None:
    """Raise ConfigError, one sentence, for the first rule over flags that is broken."""
    _require_given(settings)
    _require_positive(settings)
    _check_switches(settings)
    _check_recompute_flags(settings)
    _check_checkpoint(settings)


# Generators are seeded with the seed plus small offsets; numpy takes 32 bits.
_LARGEST_SEED = 2**31


def _require_given(settings: Settings) -> None:
    required: tuple[tuple[object, str], ...] = (
        (settings.model, "num_layers"),
        (settings.model, "hidden_size"),
        (settings.model, "num_attention_heads"),
        (settings.model, "seq_length"),
        (settings.batch, "micro_batch_size"),
        (settings.batch, "train_iters"),
        (settings.optimizer, "lr"),
    )
    missing = [option_of(type(group), name) for group, name in required
               if getattr(group, name) is None]  # fmt: skip
    if missing:
        raise ConfigError(f"required and not given: {' '.join(missing)}; add them")


_MAY_BE_ZERO = frozenset(
    {
        "eval_iters", "hidden_dropout", "attention_dropout", "weight_decay", "clip_grad",
        "lr", "min_lr", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init",
        "timing_log_level",
        "moe_aux_loss_coeff", "seed", "adam_beta1", "adam_beta2", "sgd_momentum", "init_method_std",
        "optimizer_offload_fraction", "fbd_port", "fbd_helpers",
    }
)  # fmt: skip


def _require_positive(settings: Settings) -> None:
    """Check that numbers are finite and above 0, or at least 0 where 0 has a meaning."""
    for part in fields(settings):
        group = getattr(settings, part.name)
        for entry in fields(group):
            value = getattr(group, entry.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = entry.name in _MAY_BE_ZERO
            option = option_of(type(group), entry.name)
            if not math.isfinite(value):
                raise ConfigError(f"{option} is {value}, but must be a finite number")
            if value < 0 or (value == 0 and not may_be_zero):
                bound = "0 or more" if may_be_zero else "more than 0"
                raise ConfigError(f"{option} is {value}, but must be {bound}")


def _check_switches(settings: Settings) -> None:
    """Check flags that exclude or need one another."""
    parallel, precision = settings.parallel, settings.precision
    if precision.bf16 and precision.fp16:
        raise ConfigError("--bf16 and --fp16 exclude each other; keep one")
    if precision.loss_scale is not None and not precision.fp16:
        raise ConfigError("--loss-scale has a meaning with --fp16 only; add it or leave it out")
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        raise ConfigError("--overlap-param-gather needs --use-distributed-optimizer")
    if settings.optimizer.optimizer_cpu_offload and not parallel.use_distributed_optimizer:
        # megatron.core 0.16.1 fails in its first step (KeyError) for weights of half precision.
        raise ConfigError("--optimizer-cpu-offload needs --use-distributed-optimizer; add it")
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        raise ConfigError("--overlap-param-gather needs --overlap-grad-reduce")
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        raise ConfigError("--sequence-parallel needs --tensor-model-parallel-size 2 or more")
    if parallel.context_parallel_size > 1 and settings.model.transformer_impl == "local":
        raise ConfigError(
            f"--context-parallel-size {parallel.context_parallel_size} needs the attention of "
            "Transformer Engine; add --transformer-impl transformer_engine (on GPUs)"
        )
    if settings.model.openai_gelu and settings.model.swiglu:
        raise ConfigError("--openai-gelu and --swiglu exclude each other; keep one")
    if settings.batch.seed > _LARGEST_SEED:
        raise ConfigError(f"--seed is {settings.batch.seed}, but must be at most {_LARGEST_SEED}")
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(settings.model, name)
        if value >= 1:
            option = option_of(ModelSettings, name)
            raise ConfigError(f"{option} is {value}, but must be below 1")


# Modules that Megatron-Core recomputes without Transformer Engine, and with it.
_LOCAL_MODULES = ("core_attn", "mlp", "moe")
_ALL_MODULES = (*_LOCAL_MODULES, "layernorm", "mla_up_proj", "moe_act", "shared_experts")


def _check_recompute_flags(settings: Settings) -> None:
    recompute = settings.recompute
    is_local = settings.model.transformer_impl == "local"
    known = _LOCAL_MODULES if is_local else _ALL_MODULES
    unknown = [name for name in recompute.recompute_modules or () if name not in known]
    if unknown:
        raise ConfigError(
            f"--recompute-modules {' '.join(unknown)} cannot be recomputed with "
            f"--transformer-impl {settings.model.transformer_impl}; choose from {' '.join(known)}"
        )
    if recompute.recompute_granularity == "full":
        if recompute.recompute_method is None or recompute.recompute_num_layers is None:
            raise ConfigError(
                "--recompute-granularity full needs --recompute-method (uniform or block) and "
                "--recompute-num-layers"
            )
    elif recompute.recompute_method is not None or recompute.recompute_num_layers is not None:
        raise ConfigError(
            "--recompute-method and --recompute-num-layers need --recompute-granularity full"
        )
    if recompute.recompute_modules and recompute.recompute_granularity != "selective":
        raise ConfigError("--recompute-modules needs --recompute-granularity selective")
    if "mlp" in (recompute.recompute_modules or ()) and settings.model.add_bias_linear:
        # In megatron.core 0.16.1 the checkpointed MLP returns its bias, which so becomes a result
        # of the checkpoint: a microbatch's backward then runs through all earlier microbatches.
        raise ConfigError(
            "--recompute-modules mlp needs --disable-bias-linear: with a bias Megatron-Core's "
            "backward pass repeats every earlier microbatch and never ends; add it"
        )


def _check_checkpoint(settings: Settings) -> None:
    checkpoint = settings.checkpoint
    if checkpoint.save_interval is not None and checkpoint.save is None:
        raise ConfigError("--save-interval needs --save, the folder to write to")
    if checkpoint.load is None and (checkpoint.finetune or checkpoint.exit_on_missing_checkpoint):
        raise ConfigError("--finetune and --exit-on-missing-checkpoint need --load")


def check_fit(settings: Settings, sizes: Sizes, *, is_trained: bool = True) -> None:
    """Raise ConfigError, one sentence, for the first rule over sizes that is broken."""
    _check_width(settings, sizes)
    _check_lengths(settings, sizes)
    _check_rotation(settings, sizes)
    _check_recompute(settings, sizes)
    _check_experts(settings, sizes)
    if is_trained:
        _check_training_of_experts(settings, sizes)
        _check_schedule(settings, sizes)


def _check_width(settings: Settings, sizes: Sizes) -> None:
    """Check that heads and hidden sizes divide by each other and by the tensor-parallel size."""
    heads, tensor = sizes.num_attention_heads, sizes.tensor_size
    if settings.model.kv_channels is None and sizes.hidden_size % heads:
        raise ConfigError(
            f"--hidden-size {sizes.hidden_size} is not divisible by --num-attention-heads {heads}; "
            "change one of them or give --kv-channels"
        )
    if heads % tensor:
        raise ConfigError(
            f"--num-attention-heads {heads} is not divisible by --tensor-model-parallel-size "
            f"{tensor}; change one of them"
        )
    groups = sizes.num_query_groups
    # With fewer groups than ranks Megatron-Core gathers the rows, and ranks share a group's key.
    if heads % groups or (groups % tensor and tensor % groups):
        raise ConfigError(
            f"--num-query-groups {groups} must divide --num-attention-heads {heads} and be a "
            f"multiple or a divisor of --tensor-model-parallel-size {tensor}"
        )
    rows = (heads + 2 * groups) * sizes.kv_channels
    if rows % tensor:
        raise ConfigError(
            f"{heads} attention heads and {groups} query groups of {sizes.kv_channels} channels "
            f"make {rows} rows, which --tensor-model-parallel-size {tensor} does not divide; "
            "change one of them"
        )
    for option, size in (
        ("--hidden-size", sizes.hidden_size),
        ("--ffn-hidden-size", sizes.ffn_hidden_size),
    ):
        if size % tensor:
            raise ConfigError(
                f"{option} {size} is not divisible by --tensor-model-parallel-size {tensor}; "
                "change one of them"
            )


def _check_lengths(settings: Settings, sizes: Sizes) -> None:
    """Check that sequences and microbatches divide by the parallel axes that share them."""
    tensor = sizes.tensor_size
    if sizes.max_position_embeddings < sizes.seq_length:
        raise ConfigError(
            f"--max-position-embeddings {sizes.max_position_embeddings} is less than --seq-length "
            f"{sizes.seq_length}; raise it or leave it out"
        )
    if settings.parallel.sequence_parallel and sizes.seq_length % tensor:
        raise ConfigError(
            f"--seq-length {sizes.seq_length} is not divisible by --tensor-model-parallel-size "
            f"{tensor}, which --sequence-parallel needs; change one of them"
        )
    pieces = 2 * sizes.context_size
    if sizes.context_size > 1 and sizes.seq_length % pieces:
        raise ConfigError(
            f"--seq-length {sizes.seq_length} is not divisible by 2 x --context-parallel-size "
            f"{sizes.context_size}; change one of them"
        )
    if sizes.virtual_pipeline_size and sizes.num_microbatches % sizes.pipeline_size:
        raise ConfigError(
            f"the {sizes.num_microbatches} microbatches (global batch {sizes.global_batch_size} / "
            f"micro-batch {sizes.micro_batch_size} / data-parallel {sizes.data_size}) are not "
            f"divisible by --pipeline-model-parallel-size {sizes.pipeline_size}, which the "
            "interleaved schedule needs; "
            "change --global-batch-size"
        )


def _check_rotation(settings: Settings, sizes: Sizes) -> None:
    model = settings.model
    if model.position_embedding_type != "rope":
        return
    if model.rotary_percent > 1:
        raise ConfigError(f"--rotary-percent is {model.rotary_percent}, but must be at most 1")
    if int(sizes.kv_channels * model.rotary_percent) % 2:
        raise ConfigError(
            f"--position-embedding-type rope rotates pairs of channels, and {model.rotary_percent} "
            f"of {sizes.kv_channels} channels of a head are an odd number; change --kv-channels "
            "or --rotary-percent"
        )


def _check_recompute(settings: Settings, sizes: Sizes) -> None:
    recompute = settings.recompute
    unit = recompute.recompute_num_layers
    if unit is None:
        return
    in_chunk = sizes.num_layers // (sizes.pipeline_size * sizes.model_chunks)
    layout = settings.pipeline.pipeline_model_parallel_layout
    if layout is not None:  # uniform units must divide all chunks; block: the smallest chunk counts
        counts = [stage.count("t") for stage in stages_of(layout) if "t" in stage]
        in_chunk = math.gcd(*counts) if recompute.recompute_method == "uniform" else min(counts)
    if recompute.recompute_method == "uniform" and in_chunk % unit:
        raise ConfigError(
            f"the {in_chunk} layers of a model chunk are not divisible by "
            f"--recompute-num-layers {unit}, which --recompute-method uniform needs; change it"
        )
    if unit > in_chunk:
        raise ConfigError(
            f"--recompute-num-layers {unit} is more than the {in_chunk} layers of a model chunk; "
            "lower it"
        )


def _check_experts(settings: Settings, sizes: Sizes) -> None:
    experts, moe = sizes.expert_size, settings.moe
    if moe.num_experts is None:
        if experts > 1:
            raise ConfigError(f"--expert-model-parallel-size {experts} needs --num-experts")
        return
    if moe.num_experts % experts:
        raise ConfigError(
            f"--num-experts {moe.num_experts} is not divisible by --expert-model-parallel-size "
            f"{experts}; change one of them"
        )
    if moe.moe_router_topk > moe.num_experts:
        raise ConfigError(
            f"--moe-router-topk {moe.moe_router_topk} is more than --num-experts {moe.num_experts}"
        )
    if moe.moe_router_topk == 1 and not moe.moe_router_pre_softmax:
        raise ConfigError("--moe-router-topk 1 needs --moe-router-pre-softmax; add it")
    if moe.moe_router_load_balancing_type == "sinkhorn" and moe.moe_aux_loss_coeff > 0:
        raise ConfigError(
            f"--moe-aux-loss-coeff {moe.moe_aux_loss_coeff} has no meaning with "
            "--moe-router-load-balancing-type sinkhorn; leave it out"
        )
    # Experts keep the tensor-parallel size, so expert parallelism divides the rest of a stage.
    ranks = sizes.world_size // sizes.pipeline_size
    if ranks % (experts * sizes.tensor_size):
        raise ConfigError(
            f"the {ranks} ranks of a pipeline stage are not divisible by expert size {experts} x "
            f"tensor size {sizes.tensor_size}; change --expert-model-parallel-size"
        )


def _check_training_of_experts(settings: Settings, sizes: Sizes) -> None:
    """Check rules for experts that only the backward pass needs."""
    if settings.moe.num_experts is None:
        return
    if sizes.tensor_size > 1 and not settings.parallel.sequence_parallel:
        raise ConfigError("--num-experts with tensor parallelism needs --sequence-parallel")
    if settings.model.add_bias_linear and (sizes.tensor_size > 1 or sizes.expert_size == 1):
        # megatron.core adds an expert's bias in place to a tensor that may be a view of another
        # function's result, which autograd forbids; with expert parallelism alone it is no view.
        raise ConfigError(
            "--num-experts needs --disable-bias-linear with tensor parallelism, and without "
            "--expert-model-parallel-size 2 or more; add it"
        )


def _check_schedule(settings: Settings, sizes: Sizes) -> None:
    """Check the learning-rate schedule."""
    optimizer = settings.optimizer
    decay = optimizer.lr_decay_iters or sizes.train_iters
    if optimizer.min_lr > sizes.lr:
        raise ConfigError(f"--min-lr {optimizer.min_lr} is above --lr {sizes.lr}; lower it")
    if optimizer.lr_warmup_init > sizes.lr:
        raise ConfigError(
            f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {sizes.lr}; lower it"
        )
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_iters:
        raise ConfigError("--lr-warmup-fraction and --lr-warmup-iters exclude each other; keep one")
    if optimizer.lr_warmup_fraction is not None and optimizer.lr_warmup_fraction >= 1:
        raise ConfigError(
            f"--lr-warmup-fraction is {optimizer.lr_warmup_fraction}, but must be below 1"
        )
    if optimizer.lr_warmup_iters >= decay:
        raise ConfigError(
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} is not less than --lr-decay-iters "
            f"{decay}; lower it"
        )
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        if getattr(optimizer, name) >= 1:
            option = option_of(OptimizerSettings, name)
            raise ConfigError(f"{option} is {getattr(optimizer, name)}, but must be below 1")
    if optimizer.lr_decay_style == "WSD" and optimizer.lr_wsd_decay_iters is None:
        option = option_of(OptimizerSettings, "lr_wsd_decay_iters")
        raise ConfigError(f"--lr-decay-style WSD needs {option}")
    if optimizer.optimizer_offload_fraction > 1:
        raise ConfigError(
            f"--optimizer-offload-fraction is {optimizer.optimizer_offload_fraction}, "
            "but must be at most 1"
        )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of model, batch and parallel axes, complete and consistent.

    `virtual_pipeline_size` is the number of chunks on a rank (2 or more), None without
    interleaving.
    """

    world_size: int
    tensor_size: int
    pipeline_size: int
    virtual_pipeline_size: int | None
    context_size: int
    expert_size: int
    data_size: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    train_iters: int
    lr: float

    @property
    def model_chunks(self) -> int:
        """Return the number of model chunks on one rank."""
        return self.virtual_pipeline_size or 1


def resolve_sizes(settings: Settings, world_size: int, *, is_trained: bool = True) -> Sizes:
    """Check all settings for a job of `world_size` ranks, and return complete sizes.

    Raises ConfigError for the first rule that is broken. Without `is_trained` the rules of the
    backward pass and of the learning rate do not apply.
    """
    check_flags(settings)
    model, parallel = settings.model, settings.parallel
    hidden, heads = _given(model.hidden_size), _given(model.num_attention_heads)
    layers, seq_length = _given(model.num_layers), _given(model.seq_length)
    data_size = _data_size(settings, world_size)
    groups = model.num_query_groups if model.group_query_attention else heads
    micro_batch = _given(settings.batch.micro_batch_size)
    global_batch = settings.batch.global_batch_size or micro_batch * data_size
    sizes = Sizes(
        world_size=world_size,
        tensor_size=parallel.tensor_model_parallel_size,
        pipeline_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_size=_virtual_pipeline_size(settings, layers),
        context_size=parallel.context_parallel_size,
        expert_size=parallel.expert_model_parallel_size,
        data_size=data_size,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=model.ffn_hidden_size or _default_ffn_size(hidden, model.swiglu),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=model.kv_channels or hidden // heads,
        seq_length=seq_length,
        max_position_embeddings=model.max_position_embeddings or seq_length,
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        num_microbatches=_num_microbatches(global_batch, micro_batch, data_size),
        train_iters=_given(settings.batch.train_iters),
        lr=settings.optimizer.lr or 0.0,
    )
    check_fit(settings, sizes, is_trained=is_trained)
    return sizes


def _given(value: int | None) -> int:
    if value is None:
        raise ConfigError("a required size is missing")  # check_flags has named it already
    return value


def _data_size(settings: Settings, world_size: int) -> int:
    parallel = settings.parallel
    axes = (
        ("tensor", parallel.tensor_model_parallel_size),
        ("pipeline", parallel.pipeline_model_parallel_size),
        ("context", parallel.context_parallel_size),
    )
    product = math.prod(size for _, size in axes)
    if world_size % product:
        spelled = " x ".join(f"{name} {size}" for name, size in axes if size > 1)
        raise ConfigError(
            f"the world size {world_size} is not divisible by the model-parallel size {product} "
            f"({spelled}); start a multiple of {product} ranks or change the parallel sizes"
        )
    return world_size // product


def _default_ffn_size(hidden_size: int, swiglu: bool) -> int:
    """Return Megatron's default: 4 h, or with SwiGLU 8/3 h, as a multiple of 64."""
    if not swiglu:
        return 4 * hidden_size
    return max(64, int(4 * hidden_size * 2 / 3 / 64) * 64)


def _virtual_pipeline_size(settings: Settings, num_layers: int) -> int | None:
    parallel = settings.parallel
    stages = parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    layout = settings.pipeline.pipeline_model_parallel_layout
    if layout is not None:
        return _chunks_of_layout(layout, num_layers, parallel)
    if per_chunk is not None and chunks is not None:
        raise ConfigError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "exclude each other; keep one"
        )
    if num_layers % stages:
        raise ConfigError(
            f"--num-layers {num_layers} is not divisible by --pipeline-model-parallel-size "
            f"{stages}; change one of them"
        )
    if per_chunk is None and chunks is None:
        return None
    if stages == 1:
        raise ConfigError("the interleaved schedule needs --pipeline-model-parallel-size 2 or more")
    on_rank = num_layers // stages
    if per_chunk is not None and on_rank % per_chunk:
        raise ConfigError(
            f"the {on_rank} layers of a pipeline stage are not divisible by "
            f"--num-layers-per-virtual-pipeline-stage {per_chunk}; change one of them"
        )
    if chunks is not None and on_rank % chunks:
        raise ConfigError(
            f"the {on_rank} layers of a pipeline stage are not divisible by "
            f"--num-virtual-stages-per-pipeline-rank {chunks}; change one of them"
        )
    size = chunks or on_rank // (per_chunk or 1)
    if size > 1 and stages == 2 and not parallel.overlap_p2p_comm:
        # With 2 ranks both neighbours are the same rank; one batch would mix up their messages.
        raise ConfigError(
            "--no-overlap-p2p-communication with the interleaved schedule needs "
            "--pipeline-model-parallel-size 3 or more; leave it out"
        )
    return size if size > 1 else None


def _chunks_of_layout(layout: str, num_layers: int, parallel: ParallelSettings) -> int | None:
    """Return the number of chunks on a rank (None: 1) of a --pipeline-model-parallel-layout."""
    if (
        parallel.num_layers_per_virtual_pipeline_stage is not None
        or parallel.num_virtual_stages_per_pipeline_rank is not None
    ):
        raise ConfigError(
            "--pipeline-model-parallel-layout says itself how many chunks a rank has; leave "
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank out"
        )
    ranks = parallel.pipeline_model_parallel_size
    if ranks == 1:
        raise ConfigError(
            "--pipeline-model-parallel-layout needs --pipeline-model-parallel-size 2 or more"
        )
    size = len(check_layout(layout, num_layers, ranks)) // ranks
    return size if size > 1 else None


def _num_microbatches(global_batch: int, micro_batch: int, data_size: int) -> int:
    if global_batch % (micro_batch * data_size):
        raise ConfigError(
            f"--global-batch-size {global_batch} is not divisible by --micro-batch-size "
            f"{micro_batch} x data-parallel size {data_size}; change one of them"
        )
    return global_batch // (micro_batch * data_size)


Condition: TypeAlias = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True)
class _Rule:
    """The flags `names` have an effect only when `used` is true; `needed` says so in words."""

    needed: str
    used: Condition
    names: tuple[str, ...]


def _is(name: str, value: object) -> Condition:
    return lambda given: bool(getattr(given, name) == value)


def _has(name: str) -> Condition:
    return lambda given: bool(getattr(given, name))


def _is_interleaved(given: argparse.Namespace) -> bool:
    chunks = given.num_virtual_stages_per_pipeline_rank
    layout = given.pipeline_model_parallel_layout
    return bool(chunks or given.num_layers_per_virtual_pipeline_stage or layout)


_MOE = (
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_grouped_gemm",
)  # fmt: skip
_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_SWITCHED_OFF = {
    "load_optim": "--no-load-optim",
    "load_rng": "--no-load-rng",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
}
_TRACING = (
    "trace_dir", "trace_interval", "continuous_trace_iterations", "trace_granularity",
    "trace_compress", "trace_max_bytes", "trace_budget",
)  # fmt: skip

_RULES = (
    _Rule("--group-query-attention", _has("group_query_attention"), ("num_query_groups",)),
    _Rule(
        "--position-embedding-type rope",
        _is("position_embedding_type", "rope"),
        (
            "rotary_base",
            "rotary_percent",
            "rotary_seq_len_interpolation_factor",
            "use_rope_scaling",
        ),
    ),
    _Rule("--use-rope-scaling", _has("use_rope_scaling"), ("rope_scaling_factor",)),
    _Rule("--num-experts", _has("num_experts"), _MOE),
    _Rule("--fp16", _has("fp16"), _SCALING),
    _Rule("a dynamic loss scale (--loss-scale left out)", _is("loss_scale", None), _SCALING),
    _Rule("--overlap-grad-reduce", _has("overlap_grad_reduce"), ("ddp_bucket_size",)),
    _Rule("an interleaved pipeline", _is_interleaved, ("overlap_p2p_comm",)),
    _Rule(
        "--lr-decay-style WSD",
        _is("lr_decay_style", "WSD"),
        ("lr_wsd_decay_style", "lr_wsd_decay_iters"),
    ),
    _Rule(
        "a learning rate that falls",
        lambda given: bool(given.lr_decay_style != "constant"),
        ("min_lr",),
    ),
    _Rule("--optimizer sgd", _is("optimizer", "sgd"), ("sgd_momentum",)),
    _Rule("--optimizer adam", _is("optimizer", "adam"), ("adam_beta1", "adam_beta2", "adam_eps")),
    _Rule(
        "--optimizer-cpu-offload", _has("optimizer_cpu_offload"), ("optimizer_offload_fraction",)
    ),
    _Rule("--load", _has("load"), ("load_optim", "load_rng")),
    _Rule("--tensorboard-dir", _has("tensorboard_dir"), ("tensorboard_log_interval",)),
    _Rule("--eval-iters of 1 or more", _has("eval_iters"), ("eval_interval",)),
    _Rule("--data-path", _has("data_path"), ("split", "data_cache_path")),
    _Rule("--trace", _has("trace"), _TRACING),
)


def idle_flags(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Iterator[str]:
    """Yield a sentence for every flag that is given, differs from its default and has no effect."""
    for rule in _RULES:
        if rule.used(given):
            continue
        for name in rule.names:
            if getattr(given, name) != parser.get_default(name):
                option = _SWITCHED_OFF.get(name) or "--" + name.replace("_", "-")
                yield f"{option} has no effect without {rule.needed}"
