"""The gradients of weights on their own: a backward pass in two halves.

A linear layer's backward computes the gradient of its input, for which the stage before waits, and
the gradient of its weight, for which nobody waits. Here the local layers of megatron.core put off
the weight gradient: the backward notes down what the weight gradient needs, and `WeightGradients`
computes it when the schedule has nothing more urgent.

    backward, whole   |── input ──── weight ──|── input ──── weight ──|
    split             |── input ──|── input ──|── weight ──|── weight ──|

No code of megatron.core is copied or replaced: each linear layer of a chunk gets an attribute with
the name of the method that multiplies (`_forward_impl`), which hides the method. Sums are the same
to the last bit, because microbatches keep their order. Parameters outside linear layers' weights
(embedding, norms, biases, grouped experts) get their gradients in the first half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

_Hook = Callable[[], None]


class _Context(Protocol):
    """What autograd keeps of a forward for its backward."""

    saved_tensors: tuple[torch.Tensor, torch.Tensor]
    product: _Product
    has_bias: bool

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors for the backward."""


class _Linear(Protocol):
    """A parallel linear layer of megatron.core."""

    weight: torch.nn.Parameter | None
    tp_group: dist.ProcessGroup
    _forward_impl: Callable[..., torch.Tensor]
    register_wgrad_accumulation_and_reduce_hooks: Callable[[_Hook], None]


@dataclass(frozen=True, slots=True)
class _Product:
    """How a layer multiplies; `owner` notes down what the layer's weight gradient needs."""

    group: dist.ProcessGroup
    sequence_parallel: bool
    reduces_input_gradient: bool
    owner: WeightGradients


@dataclass(frozen=True, slots=True)
class _Share:
    """What is needed to compute one weight's gradient for one microbatch."""

    weight: torch.nn.Parameter
    inputs: torch.Tensor
    output_gradient: torch.Tensor
    product: _Product

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the weight."""
        inputs = self.inputs
        if self.product.sequence_parallel:
            inputs = _gather_sequence(inputs, self.product.group)
        gradient, flat = prepare_input_tensors_for_wgrad_compute(self.output_gradient, inputs)
        return cast(torch.Tensor, gradient.t().matmul(flat))


class WeightGradients:
    """The weight gradients of one chunk that are still to be computed, microbatch by microbatch."""

    def __init__(self) -> None:
        self._open: list[_Share] = []
        self._waiting: dict[int, list[_Share]] = {}
        self._hooks: dict[torch.nn.Parameter, _Hook] = {}

    def note_down(self, share: _Share) -> None:
        """Keep what a weight gradient of the backward pass under way needs."""
        self._open.append(share)

    def end_pass(self, microbatch: int) -> None:
        """End a backward pass: what was noted down since the last call is of `microbatch`."""
        self._waiting[microbatch] = self._open
        self._open = []

    def drop(self) -> None:
        """Forget everything noted down, which an iteration that failed may have left."""
        self._open = []
        self._waiting.clear()

    def remember(self, weight: torch.nn.Parameter, hook: _Hook) -> None:
        """Remember to call `hook` after the gradient of `weight`, to add it up and reduce it."""
        self._hooks[weight] = hook

    @torch.no_grad()
    def compute(self, microbatch: int, chunk: int) -> None:
        """Compute and add the weight gradients of a microbatch; the tracer reads `chunk`."""
        del chunk
        for share in self._waiting.pop(microbatch):
            weight, gradient = share.weight, share.gradient()
            hook = self._hooks.get(weight)
            if hook is None:
                weight.main_grad.add_(gradient)  # type: ignore[attr-defined]
                continue
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
            hook()


class _DeferredProduct(torch.autograd.Function):
    """A linear layer whose backward gives the gradient of the input only."""

    @staticmethod
    def forward(
        context: _Context,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: _Product,
    ) -> torch.Tensor:
        """Multiply exactly as the layer does."""
        context.save_for_backward(inputs, weight)
        context.product, context.has_bias = product, bias is not None
        if product.sequence_parallel:
            inputs = _gather_sequence(inputs, product.group)
        output = torch.matmul(inputs, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(
        context: _Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        """Return the gradient of the input; note down what the weight gradient needs."""
        inputs, weight = context.saved_tensors
        product, handle = context.product, None
        input_gradient = gradient.matmul(weight)
        if product.reduces_input_gradient:
            handle = dist.all_reduce(input_gradient, group=product.group, async_op=True)
        if product.sequence_parallel:
            own = torch.empty_like(inputs)
            handle = layers.dist_reduce_scatter_func(
                own, input_gradient, group=product.group, async_op=True
            )
            input_gradient = own
        parameter = cast(torch.nn.Parameter, weight)
        product.owner.note_down(_Share(parameter, inputs, gradient, product))
        bias_gradient = None
        if context.has_bias:
            bias_gradient = gradient.reshape(-1, gradient.shape[-1]).sum(dim=0)
        if handle is not None:
            handle.wait()
        return input_gradient, None, bias_gradient, None


def split_backward(chunk: torch.nn.Module) -> WeightGradients:
    """Have the linear layers of a chunk leave their weight gradients to the returned object.

    Call this before the chunk is wrapped for data parallelism, and wrap the chunk with
    `delay_wgrad_compute`: then the reduction of gradients waits for `WeightGradients.compute`.
    """
    owner = WeightGradients()
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    for module in chunk.modules():
        if isinstance(module, kinds):
            _defer(cast(_Linear, module), owner)
    return owner


def _defer(layer: _Linear, owner: WeightGradients) -> None:
    whole, own_group = layer._forward_impl, layer.tp_group

    def multiply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **options: object,
    ) -> torch.Tensor:
        if not weight.requires_grad:
            return whole(
                input=input, weight=weight, bias=bias, allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel, tp_group=tp_group, **options,
            )  # fmt: skip
        product = _Product(tp_group or own_group, sequence_parallel, allreduce_dgrad, owner)
        output: torch.Tensor = _DeferredProduct.apply(input, weight, bias, product)  # type: ignore[no-untyped-call]
        return output

    layer._forward_impl = multiply
    weight = layer.weight
    if weight is None:  # the output layer shares the embedding's weight and gets it at each call
        return
    weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
    layer.register_wgrad_accumulation_and_reduce_hooks = lambda hook: owner.remember(weight, hook)


def _gather_sequence(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole sequence, gathered from the shares of a tensor-parallel group.

    The result has its own memory: megatron.core's shared buffer may be in use at that time.
    """
    shape = (own.shape[0] * group.size(), *own.shape[1:])
    whole = torch.empty(shape, dtype=own.dtype, device=own.device)
    layers.dist_all_gather_func(whole, own, group=group)
    return whole
