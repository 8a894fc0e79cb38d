"""The forward pass of Megatron-Core's linear layers without what only training needs.

Its own goes through two autograd functions and a dozen checks for each layer, which for one token
take longer than the product of a small model. These compute the same from the same weights; module
and hooks stay in their places.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.nn.functional import linear

_Output = tuple[torch.Tensor, torch.Tensor | None]


def lighten(model: torch.nn.Module) -> None:
    """Let all linear layers of a model run without the needs of training."""
    for layer in model.modules():
        if type(layer) is ColumnParallelLinear:
            layer.forward = partial(_column, layer)
        elif type(layer) is RowParallelLinear:
            layer.forward = partial(_row, layer)


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
