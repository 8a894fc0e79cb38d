"""The forward passes of Megatron-Core's modules without what only training needs.

Its own go through autograd functions, contexts and checks, which for one token of a small model
take longer than the products. These compute the same from the same weights. Each module is still
called in its place, so hooks see what they see in training: layers, attention, MLP, linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import linear

_Output = tuple[torch.Tensor, torch.Tensor | None]


def lighten(model: torch.nn.Module) -> None:
    """Let the modules of a model run without the needs of training, those of known kinds."""
    for module in model.modules():
        forward = _FORWARD.get(type(module))
        if forward is not None:
            module.forward = partial(forward, module)


def _column(
    layer: Any,
    inputs: torch.Tensor,
    weight: torch.Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> _Output:
    """Features cut over the tensor-parallel ranks, or gathered when the caller wants them all."""
    bias = layer.bias
    weight = layer.weight if weight is None else weight
    output = linear(inputs, weight, None if layer.skip_bias_add else bias)
    if layer.gather_output if runtime_gather_output is None else runtime_gather_output:
        output = _gather(output, layer.tp_group)
    return output, bias if layer.skip_bias_add else None


def _row(layer: Any, inputs: torch.Tensor) -> _Output:
    """A sum over the tensor-parallel ranks, each of which has a part of the features."""
    output = linear(inputs, layer.weight)
    if layer.tp_group.size() > 1 and not layer.explicit_expert_comm:
        dist.all_reduce(output, group=layer.tp_group)
    if layer.skip_bias_add:
        return output, layer.bias
    return (output if layer.bias is None else output + layer.bias), None


def _gather(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Join the features of all ranks along the last dimension."""
    if group.size() == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(group.size())]
    dist.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _layer(
    layer: Any, hidden_states: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, None]:
    """Attention and MLP, each behind its norm and added to what came in."""
    output, bias = layer.self_attention(layer.input_layernorm(hidden_states))
    hidden_states = layer.self_attention.core_attention.select(hidden_states)
    hidden_states = hidden_states + (output if bias is None else output + bias)
    output, bias = layer.mlp(layer.pre_mlp_layernorm(hidden_states))
    return hidden_states + (output if bias is None else output + bias), None


def _attention(attention: Any, hidden_states: torch.Tensor, *_: object, **__: object) -> _Output:
    """Queries, keys and values, the attention of this project to its cache, and the projection."""
    if attention.config.num_query_groups < attention.world_size:  # ranks share a group
        heads = attention.get_query_key_value_tensors(hidden_states)
    else:
        heads = _heads(attention, hidden_states)
    output: _Output = attention.linear_proj(attention.core_attention(*heads))
    return output


def _heads(
    attention: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `(token, 1, head, channel)`, keys and values `(token, 1, group, channel)`."""
    mixed = attention.linear_qkv(hidden_states)[0]
    groups = attention.num_query_groups_per_partition
    channels = attention.hidden_size_per_attention_head
    mixed = mixed.view(*mixed.shape[:2], groups, -1, channels)
    query = mixed[:, :, :, :-2].flatten(2, 3)
    key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
    if attention.q_layernorm is not None:
        query = attention.q_layernorm(query)
    if attention.k_layernorm is not None:
        key = attention.k_layernorm(key)
    return query, key, value


def _mlp(
    mlp: Any, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: object
) -> _Output:
    """The two linear layers with the activation, gated or not, between them."""
    output: _Output
    if per_token_scale is not None:  # an expert, whose tokens are weighted
        output = MLP.forward(mlp, hidden_states, per_token_scale)
        return output
    inner, bias = mlp.linear_fc1(hidden_states)
    if bias is not None:
        inner = inner + bias
    if mlp.config.gated_linear_unit:
        gate, up = inner.chunk(2, dim=-1)
        inner = mlp.activation_func(gate).mul_(up)
    else:
        inner = mlp.activation_func(inner)
    output = mlp.linear_fc2(inner)
    return output


_FORWARD: dict[type, Callable[..., Any]] = {
    ColumnParallelLinear: _column,
    RowParallelLinear: _row,
    TransformerLayer: _layer,
    SelfAttention: _attention,
    MLP: _mlp,
}
