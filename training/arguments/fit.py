"""Rules between sizes: does the model fit the parallel axes, the schedule the length of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascan.errors import ConfigError
from training.arguments.flags import option_of
from training.arguments.schedule import OptimizerSettings
from training.arguments.settings import Settings

if TYPE_CHECKING:
    from training.arguments.sizes import Sizes


def check_fit(settings: Settings, sizes: Sizes) -> None:
    """Raise ConfigError, one sentence, for the first rule that is broken."""
    _check_model(settings, sizes)
    _check_rotation(settings, sizes)
    _check_recompute(settings, sizes)
    _check_experts(settings, sizes)
    _check_schedule(settings, sizes)


def _check_model(settings: Settings, sizes: Sizes) -> None:
    """Rules between the model's sizes and the parallel axes."""
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
    if heads % sizes.num_query_groups or sizes.num_query_groups % tensor:
        raise ConfigError(
            f"--num-query-groups {sizes.num_query_groups} must divide --num-attention-heads "
            f"{heads} and be divisible by --tensor-model-parallel-size {tensor}"
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
    in_chunk = sizes.num_layers // (sizes.pipeline_size * sizes.model_chunks)
    unit = recompute.recompute_num_layers
    if unit is None:
        return
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
    # Experts keep the tensor-parallel size, so what they share is the rest of a pipeline stage.
    ranks = sizes.world_size // sizes.pipeline_size
    if ranks % (experts * sizes.tensor_size):
        raise ConfigError(
            f"the {ranks} ranks of a pipeline stage are not divisible by expert size {experts} x "
            f"tensor size {sizes.tensor_size}; change --expert-model-parallel-size"
        )
    if sizes.tensor_size > 1 and not settings.parallel.sequence_parallel:
        raise ConfigError("--num-experts with tensor parallelism needs --sequence-parallel")
    if settings.model.add_bias_linear and (sizes.tensor_size > 1 or experts == 1):
        # megatron.core adds an expert's bias in place to what may be a view of another function's
        # result, which autograd forbids; with expert parallelism alone it is no view.
        raise ConfigError(
            "--num-experts needs --disable-bias-linear with tensor parallelism, and without "
            "--expert-model-parallel-size 2 or more; add it"
        )


def _check_schedule(settings: Settings, sizes: Sizes) -> None:
    """Rules of the learning-rate schedule."""
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
