"""Optimizer and learning-rate schedule out of the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.arguments import Settings, Sizes
from training.model import parameter_dtype

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def build_optimizer(
    settings: Settings, sizes: Sizes, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Megatron-Core's optimizer over the chunks of this rank."""
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(_optimizer_config(settings, sizes), chunks)


def _optimizer_config(settings: Settings, sizes: Sizes) -> OptimizerConfig:
    from megatron.core.optimizer import OptimizerConfig

    wanted, precision, parallel = settings.optimizer, settings.precision, settings.parallel
    return OptimizerConfig(
        optimizer=wanted.optimizer,
        lr=sizes.lr,
        min_lr=wanted.min_lr,
        weight_decay=wanted.weight_decay,
        clip_grad=wanted.clip_grad,
        adam_beta1=wanted.adam_beta1,
        adam_beta2=wanted.adam_beta2,
        adam_eps=wanted.adam_eps,
        sgd_momentum=wanted.sgd_momentum,
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=parameter_dtype(settings),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
        optimizer_cpu_offload=wanted.optimizer_cpu_offload,
        optimizer_offload_fraction=wanted.optimizer_offload_fraction,
    )


def build_schedule(
    settings: Settings, sizes: Sizes, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; it counts in samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wanted, batch = settings.optimizer, sizes.global_batch_size
    decay_samples = (wanted.lr_decay_iters or sizes.train_iters) * batch
    warmup_samples = wanted.lr_warmup_iters * batch
    if wanted.lr_warmup_fraction is not None:
        warmup_samples = int(wanted.lr_warmup_fraction * decay_samples)
    wsd_iters = wanted.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=wanted.lr_warmup_init,
        max_lr=sizes.lr,
        min_lr=wanted.min_lr,
        lr_warmup_steps=warmup_samples,
        lr_decay_steps=decay_samples,
        lr_decay_style=wanted.lr_decay_style,
        start_wd=wanted.weight_decay,
        end_wd=wanted.weight_decay,
        wd_incr_steps=sizes.train_iters * batch,
        wd_incr_style="constant",
        # The flags of the present run decide, not those a checkpoint was written with.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=None if wsd_iters is None else wsd_iters * batch,
        lr_wsd_decay_style=wanted.lr_wsd_decay_style,
    )
