"""The forward passes of Megatron-Core's modules without what only training needs.

Its own go through autograd functions, contexts and checks, which for one token of a small model
take longer than the products. These compute the same from the same weights. What a module needs is
looked up once, when its light forward pass is made; a module that has hooks is called as torch
calls it, so hooks see what they see in training: layers, attention, MLP, linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import linear

_Forward = Callable[..., Any]
# Of a step, from which on a product cut in two costs no more than the whole.
_MANY_TOKENS = 512
_Output = tuple[torch.Tensor, torch.Tensor | None]


def lighten(model: torch.nn.Module) -> None:
    """Give each module of a known kind (`_MAKERS`) a forward pass that serves generation alone.

    Call it when the model has its modules and their number format; weights may be filled later.
    """
    for module in model.modules():
        make = _MAKERS.get(type(module))
        if make is not None:
            module.forward = make(module)


def caller(module: torch.nn.Module) -> _Forward:
    """Call a module with those hooks that change or show values, as torch calls them.

    Torch's own way, and that of Megatron-Core's layers around it, looks for much else: for one
    token it takes longer than the hooks.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    is_special = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs

    def call(*inputs: object) -> Any:
        if not (before or after):
            return module.forward(*inputs)
        if any(is_special):
            return module(*inputs)
        for enter in before.values():
            changed = enter(module, inputs)
            if changed is not None:
                inputs = changed if isinstance(changed, tuple) else (changed,)
        output = module.forward(*inputs)
        for leave in after.values():
            changed = leave(module, inputs, output)
            output = output if changed is None else changed
        return output

    return call


def _block(block: Any) -> _Forward:
    """Run all layers of a stage and, on the last one, the norm behind them."""
    layers = [caller(layer) for layer in block.layers]
    normalize = None if block.final_layernorm is None else caller(block.final_layernorm)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if not block.pre_process:
            hidden_states = block.input_tensor
        for layer in layers:
            hidden_states = layer(hidden_states)[0]
        return hidden_states if normalize is None else normalize(hidden_states)

    return forward


def _layer(layer: Any) -> _Forward:
    """Run attention and MLP, each behind its norm and added to what came in."""
    normalize_first, normalize_second = map(
        caller, (layer.input_layernorm, layer.pre_mlp_layernorm)
    )
    attend, transform = caller(layer.self_attention), caller(layer.mlp)
    select = layer.self_attention.core_attention.select

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        output, bias = attend(normalize_first(hidden_states))
        hidden_states = select(hidden_states)
        hidden_states = hidden_states + (output if bias is None else output + bias)
        output, bias = transform(normalize_second(hidden_states))
        return hidden_states + (output if bias is None else output + bias), None

    return forward


def _attention(attention: Any) -> _Forward:
    """Queries, keys and values, the attention of this project to its cache, and the projection."""
    shares_groups = attention.config.num_query_groups < attention.world_size
    heads = attention.get_query_key_value_tensors if shares_groups else _heads(attention)
    attend, project = caller(attention.core_attention), caller(attention.linear_proj)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> _Output:
        output: _Output = project(attend(*heads(hidden_states)))
        return output

    return forward


def _heads(attention: Any) -> _Forward:
    """Return queries `(token, 1, head, channel)`, keys and values `(token, 1, group, channel)`."""
    mix = caller(attention.linear_qkv)
    groups = attention.num_query_groups_per_partition
    channels = attention.hidden_size_per_attention_head
    norms = attention.q_layernorm, attention.k_layernorm
    of_queries, of_keys = (None if norm is None else caller(norm) for norm in norms)

    def heads(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = mix(hidden_states)[0]
        mixed = mixed.view(*mixed.shape[:2], groups, -1, channels)
        query = mixed[:, :, :, :-2].flatten(2, 3)
        key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
        return (
            query if of_queries is None else of_queries(query),
            key if of_keys is None else of_keys(key),
            value,
        )

    return heads


def _mlp(mlp: Any) -> _Forward:
    """Run the two linear layers with the activation, gated or not, between them."""
    widen, narrow = caller(mlp.linear_fc1), caller(mlp.linear_fc2)
    activate, is_gated = mlp.activation_func, mlp.config.gated_linear_unit
    first = mlp.linear_fc1
    hooks = first._forward_pre_hooks, first._forward_hooks

    def widened(hidden_states: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor
        inner, bias = widen(hidden_states)
        return inner if bias is None else inner + bias

    def halves(hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Compute gate and values; of many tokens in two products, which leave each in one piece,
        so that the activation runs at the memory's speed.
        """
        if hidden_states.shape[0] < _MANY_TOKENS or first.bias is not None or any(hooks):
            return widened(hidden_states).chunk(2, dim=-1)
        return [linear(hidden_states, weight) for weight in first.weight.chunk(2)]

    def forward(
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **_: object,
    ) -> _Output:
        output: _Output
        if per_token_scale is not None:  # an expert, whose tokens are weighted
            output = MLP.forward(mlp, hidden_states, per_token_scale)
            return output
        gate, up = halves(hidden_states) if is_gated else (widened(hidden_states), None)
        inner = activate(gate)
        output = narrow(inner if up is None else inner.mul_(up))
        return output

    return forward


def _column(layer: Any) -> _Forward:
    """Return features cut over the tensor-parallel ranks, or gathered when the caller wants them
    all.
    """
    own, group, gathers = layer.weight, layer.tp_group, layer.gather_output
    added, given = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)

    def forward(
        inputs: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> _Output:
        output = linear(inputs, own if weight is None else weight, added)
        if gathers if runtime_gather_output is None else runtime_gather_output:
            output = _gather(output, group)
        return output, given

    return forward


def _gather(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Join the features of all ranks along the last dimension."""
    if group.size() == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(group.size())]
    dist.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _row(layer: Any) -> _Forward:
    """Return a sum over the tensor-parallel ranks, each of which has a part of the features."""
    weight, bias, group = layer.weight, layer.bias, layer.tp_group
    sums = group.size() > 1 and not layer.explicit_expert_comm
    added, given = (None, bias) if layer.skip_bias_add else (bias, None)

    def forward(inputs: torch.Tensor) -> _Output:
        output = linear(inputs, weight)
        if sums:
            dist.all_reduce(output, group=group)
        return output if added is None else output + added, given

    return forward


def _rms_norm(norm: Any) -> _Forward:
    """Divide features by the root of their mean square, and multiply by the weight.

    On the CPU torch computes it in twice as many operations; GPUs have one for all, and in two
    bytes the mean is not exact enough.
    """
    weight = norm.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or norm.eps is None:
        original: _Forward = norm.forward
        return original
    (size,) = norm.normalized_shape
    root_eps = torch.tensor(norm.eps**0.5)

    def forward(states: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scaled: torch.Tensor = states / length.mul_(size**-0.5).hypot_(root_eps)
        return scaled.mul_(weight)

    return forward


_MAKERS: dict[type, Callable[[Any], _Forward]] = {
    ColumnParallelLinear: _column,
    RowParallelLinear: _row,
    TransformerBlock: _block,
    TransformerLayer: _layer,
    SelfAttention: _attention,
    MLP: _mlp,
    torch.nn.RMSNorm: _rms_norm,
}
