"""Whether a checkpoint belongs to the model and layout of this run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from megascan.errors import InputError
from training.arguments import Settings, Sizes

_MODEL_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
_MODEL_FLAGS = (
    "normalization", "position_embedding_type", "qk_layernorm", "swiglu", "add_bias_linear",
    "add_qkv_bias", "untie_embeddings_and_output_weights",
)  # fmt: skip
_LAYOUT_SIZES = ("tensor_size", "pipeline_size", "virtual_pipeline_size", "expert_size")
_ORDER_SIZES = ("train_iters", "global_batch_size")


def flags_of(settings: Settings) -> dict[str, object]:
    """Flags that decide which weights there are, how optimizer state and data are cut."""
    return {
        **{name: getattr(settings.model, name) for name in _MODEL_FLAGS},
        "num_experts": settings.moe.num_experts,
        "use_distributed_optimizer": settings.parallel.use_distributed_optimizer,
        "overlap_grad_reduce": settings.parallel.overlap_grad_reduce,
        "ddp_bucket_size": settings.parallel.ddp_bucket_size,
        "optimizer": settings.optimizer.optimizer,
        "seed": settings.batch.seed,
    }


def check_model(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]], folder: Path
) -> None:
    """The weights must be those of this run's model; raises InputError."""
    flags = flags_of(settings)
    pairs = [(name, common["sizes"][name], getattr(sizes, name)) for name in _MODEL_SIZES]
    pairs += [(name, common["flags"][name], flags[name]) for name in (*_MODEL_FLAGS, "num_experts")]
    for name, there, here in pairs:
        if there != here:
            raise InputError(
                f"the checkpoint {folder} has {name.replace('_', ' ')} {there} and this run "
                f"{here}; give the model's flags as they were when it was saved"
            )


def check_layout(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]], folder: Path
) -> None:
    """Optimizer state can be loaded only in the form it was saved in."""
    flags, saved = flags_of(settings), common["flags"]
    names = ["use_distributed_optimizer", "optimizer"]
    pairs = [(name, saved[name], flags[name]) for name in names]
    if settings.parallel.use_distributed_optimizer and saved["use_distributed_optimizer"]:
        buckets = ("overlap_grad_reduce", "ddp_bucket_size")
        pairs += [(name, saved[name], flags[name]) for name in buckets]
        layout = common["sizes"]
        pairs += [(name, layout[name], getattr(sizes, name)) for name in _LAYOUT_SIZES]
    for name, there, here in pairs:
        if there != here:
            raise InputError(
                f"the optimizer state of {folder} was saved with {name.replace('_', ' ')} {there} "
                f"and this run has {here}; use the same, or --no-load-optim to load weights only"
            )


def warn_about_order(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]]
) -> None:
    """Say on rank 0 what keeps the run from going on as the one that was saved."""
    pairs = [(name, common["sizes"][name], getattr(sizes, name)) for name in _ORDER_SIZES]
    pairs.append(("seed", common["flags"]["seed"], settings.batch.seed))
    for name, there, here in pairs:
        if there != here:
            warn(
                f"{name.replace('_', ' ')} was {there} in the checkpoint and is {here} now: the "
                "order of samples or the learning rate differs from an uninterrupted run"
            )


def warn(text: str) -> None:
    """Print a warning on rank 0."""
    if dist.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
