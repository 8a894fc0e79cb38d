"""A rank that computes slowly: every operation takes ``factor`` times as long.

Wrapped are classes of Megatron-Core, before any object is made and before a tracer wraps its own
places around them, so that traced spans contain the added time: the model, its layers, attention,
MLP, embedding, output layer, and the optimizer's step; in the backward pass the way between
the outputs and inputs of these. Communication is not slowed: see `slowness` for what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from training.faults.slowness import Slowness
from training.faults.wrap import Function, wrap_attribute


def install(slowness: Slowness) -> None:
    """Slow the computing of this process by `slowness`, for good."""
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    output_layers: set[int] = set()
    for module in (TransformerLayer, Attention, MLP, MoELayer, LanguageModelEmbedding):
        wrap_attribute(module, "forward", lambda original: _slow_forward(original, slowness))
    wrap_attribute(
        GPTModel, "forward", lambda original: _slow_model(original, slowness, output_layers)
    )
    wrap_attribute(
        ColumnParallelLinear,
        "forward",
        lambda original: _slow_output_layer(original, slowness, output_layers),
    )
    wrap_attribute(ChainedOptimizer, "step", lambda original: _slow_step(original, slowness))
    wrap_attribute(schedules, "backward_step", lambda original: _slow_backward(original, slowness))


def _slow_forward(original: Function, slowness: Slowness) -> Function:
    def forward(module: torch.nn.Module, *arguments: object, **options: object) -> object:
        key = id(module)
        _mark_boundary(slowness, (key, "in"), (*arguments, *options.values()))
        result = slowness.run(key, lambda: original(module, *arguments, **options))
        _mark_boundary(slowness, (key, "out"), (result,))
        return result

    return forward


def _slow_model(original: Function, slowness: Slowness, output_layers: set[int]) -> Function:
    """What a model does besides its modules: the loss, above all; and notes its output layer."""
    slow = _slow_forward(original, slowness)

    def forward(model: torch.nn.Module, *arguments: object, **options: object) -> object:
        output_layers.add(id(getattr(model, "output_layer", None)))
        return slow(model, *arguments, **options)

    return forward


def _slow_output_layer(original: Function, slowness: Slowness, output_layers: set[int]) -> Function:
    """Of the linear layers only the output layer: the others belong to a module that is slow."""
    slow = _slow_forward(original, slowness)

    def forward(layer: torch.nn.Module, *arguments: object, **options: object) -> object:
        chosen = slow if id(layer) in output_layers else original
        return chosen(layer, *arguments, **options)

    return forward


def _mark_boundary(slowness: Slowness, key: tuple[int, str], values: tuple[object, ...]) -> None:
    """Hook the first activation that gets a gradient: when it has one, a boundary is passed."""
    tensor = next(_activations(values), None)
    if tensor is None:
        return

    def passed(gradient: torch.Tensor) -> None:
        del gradient
        slowness.boundary(key)

    tensor.register_hook(passed)  # type: ignore[no-untyped-call]


def _activations(values: tuple[object, ...]) -> Iterator[torch.Tensor]:
    """Tensors that get a gradient and live for one microbatch.

    Parameters live on, and a hook on one would stay: modules return their bias beside the output,
    and under ``no_grad``, in the first pass of recomputed layers, it alone has a gradient. What a
    stage received is a leaf as a parameter is, but none, and new in each microbatch.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad and not isinstance(value, torch.nn.Parameter):
                yield value
        elif isinstance(value, tuple | list):
            yield from _activations(tuple(value))


def _slow_step(original: Function, slowness: Slowness) -> Function:
    def step(*arguments: object, **options: object) -> object:
        return slowness.run("optimizer", lambda: original(*arguments, **options))

    return step


def _slow_backward(original: Function, slowness: Slowness) -> Function:
    def backward_step(*arguments: object, **options: object) -> object:
        return slowness.run_backward(lambda: original(*arguments, **options))

    return backward_step
