"""Models with random weights to look into: one that trains, one that speaks; on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from training.generation.scope import Lent


def join(device: str) -> None:
    """Make this process a job of one rank."""
    from training.arguments import resolve_sizes
    from training.distributed import Launch, initialize, seed_everything

    settings = settings_of(2, 64, device)
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    initialize(settings, resolve_sizes(settings, 1, is_trained=False), launch, device)
    seed_everything(1)


def settings_of(num_layers: int, hidden: int, device: str = "cpu") -> Any:
    """A model of Llama's kind with eight heads."""
    from training.checkpoint_folder import settings_to_use

    return settings_to_use(
        {"num_layers": num_layers, "hidden_size": hidden, "num_attention_heads": 8,
         "max_position_embeddings": 128, "position_embedding_type": "rope",
         "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
        "float32" if device == "cpu" else "bfloat16", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def model_to_train(num_layers: int, hidden: int, vocab_size: int = 1000) -> Any:
    """A model on the CPU, ready for gradients."""
    from training.arguments import resolve_sizes
    from training.model import build_bare_model

    settings = settings_of(num_layers, hidden)
    sizes = resolve_sizes(settings, 1, is_trained=False)
    (model,) = build_bare_model(settings, sizes, vocab_size, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.05 if parameter.dim() > 1 else 1 + drawn * 0.05)
    return model


def model_that_speaks(num_layers: int, hidden: int, vocab_size: int, device: str) -> Lent:
    """What a server of one row lends a session, with a cache of 128 tokens."""
    from training.arguments import resolve_sizes
    from training.generation.engine import Engine
    from training.generation.request import Limits
    from training.generation.scope import Lent
    from training.generation.stage import Stage

    settings = settings_of(num_layers, hidden, device)
    limits = Limits(num_rows=1, max_length=128, max_prompt_tokens=128)
    sizes = resolve_sizes(settings, 1, is_trained=False)
    stage = Stage(settings, sizes, vocab_size, device, limits, num_extra_slots=1)
    for parameter in stage.model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return Lent(Engine(stage, limits))
