"""Rules over flags as they were given, before any size is derived from them."""

from __future__ import annotations

import math
from dataclasses import fields

from megascan.errors import ConfigError
from training.arguments.flags import option_of
from training.arguments.model import ModelSettings
from training.arguments.settings import Settings


def check_flags(settings: Settings) -> None:
    """Raise ConfigError, one sentence, for the first rule that is broken."""
    _require_given(settings)
    _require_positive(settings)
    _check_switches(settings)
    _check_recompute(settings)
    _check_checkpoint(settings)


# Generators are seeded with this and small offsets; numpy takes 32 bits.
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
        "optimizer_offload_fraction",
    }
)  # fmt: skip


def _require_positive(settings: Settings) -> None:
    """Numbers are above zero, or at least not below it where zero has a meaning."""
    for part in fields(settings):
        group = getattr(settings, part.name)
        for entry in fields(group):
            value = getattr(group, entry.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = entry.name in _MAY_BE_ZERO
            if not math.isfinite(value):
                option = option_of(type(group), entry.name)
                raise ConfigError(f"{option} is {value}, but must be a finite number")
            if value < 0 or (value == 0 and not may_be_zero):
                bound = "0 or more" if may_be_zero else "more than 0"
                option = option_of(type(group), entry.name)
                raise ConfigError(f"{option} is {value}, but must be {bound}")


def _check_switches(settings: Settings) -> None:
    """Flags that exclude or need one another."""
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
    if settings.batch.seed > _LARGEST_SEED:
        raise ConfigError(f"--seed is {settings.batch.seed}, but must be at most {_LARGEST_SEED}")
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(settings.model, name)
        if value >= 1:
            option = option_of(ModelSettings, name)
            raise ConfigError(f"{option} is {value}, but must be below 1")


# Those that Megatron-Core recomputes without Transformer Engine, and all.
_LOCAL_MODULES = ("core_attn", "mlp", "moe")
_ALL_MODULES = (*_LOCAL_MODULES, "layernorm", "mla_up_proj", "moe_act", "shared_experts")


def _check_recompute(settings: Settings) -> None:
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
        # megatron.core 0.16.1 lets the checkpointed MLP return its bias, which thereby becomes a
        # result of that checkpoint: the next microbatch's backward runs through all earlier ones.
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
