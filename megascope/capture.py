"""Hooks that show what a model computes, there only while somebody looks.

    with Capture(find_spots(chunks, ["residual"]), take):
        model(tokens, positions, None)      # take(Sight) is called on the spot, on the device

A hook looks and changes nothing: what the model computes is the same bits with and without. What is
computed again in the backward pass (activation recomputation) is not shown twice. Each sight says
which call of its module it was: in training the microbatch, for every chunk computes its
microbatches in order, whatever the pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from megascope.places import ATTENTION_INPUTS, Share, Side, Spot

Output: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]


class Sight(NamedTuple):
    """One tensor as the model had it; in a training it may be looked at only until `take` returns.

    A tuple, for thousands are made each second.
    """

    spot: Spot
    call: int
    """How often the spot was computed before, since the capture began or was told `restart`."""
    tensor: torch.Tensor
    """(token, row, feature), or (token, row, head, channel)."""
    share: Share
    is_gradient: bool = False
    """Whether it is the loss's gradient in this tensor, not the tensor."""
    counts: torch.Tensor | None = None
    """At `experts`: how many of the tokens, which stand in order, each expert of this rank had."""


Take = Callable[[Sight], None]


def is_repeated() -> bool:
    """Return whether the forward pass that is under way repeats an earlier one.

    Only recomputation runs modules inside a backward pass.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class Calls:
    """Counts the calls of each spot, those of recomputation apart, so that both count alike."""

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], int] = {}

    def next(self, *key: object) -> int:
        """Return how often a key was counted in this kind of pass before."""
        key = (*key, is_repeated())
        before = self._counts.get(key, 0)
        self._counts[key] = before + 1
        return before

    def restart(self) -> None:
        """Begin at 0 again."""
        self._counts.clear()


class Capture:
    """Hooks on some spots; `close`, or leaving the `with`, takes every one away.

    With `gradients` the gradients of what modules put out are shown as well.
    """

    def __init__(self, spots: Sequence[Spot], take: Take, *, gradients: bool = False) -> None:
        self._take = take
        self._gradients = gradients
        self._calls = Calls()
        self._handles: list[RemovableHandle] = [self._watch(spot) for spot in spots]

    def _watch(self, spot: Spot) -> RemovableHandle:
        def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            del module
            self._show(spot, inputs[spot.place.index])

        def after(module: torch.nn.Module, inputs: tuple[Any, ...], output: Output) -> None:
            del module
            if spot.place.name == "loss" and not _is_loss(output):
                return
            counts = inputs[1] if spot.place.name == "experts" else None
            self._show(spot, _value(output), counts)

        if spot.place.side is Side.IN:
            return spot.module.register_forward_pre_hook(before)
        return spot.module.register_forward_hook(after)

    def _show(self, spot: Spot, tensor: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        if self._gradients and tensor.requires_grad:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self._show_gradient(spot, gradient, counts)
            )
        if is_repeated():
            return
        self._take(self._sight(spot, tensor.detach(), counts, is_gradient=False))

    def _show_gradient(
        self, spot: Spot, gradient: torch.Tensor, counts: torch.Tensor | None
    ) -> None:
        if self._handles:  # closed since: nobody looks any more
            self._take(self._sight(spot, gradient.detach(), counts, is_gradient=True))

    def _sight(
        self, spot: Spot, tensor: torch.Tensor, counts: torch.Tensor | None, *, is_gradient: bool
    ) -> Sight:
        call = self._calls.next(spot.chunk, spot.layer, spot.place.name, is_gradient)
        share = spot.share
        if spot.place.name == "logits" and tensor.shape[-1] != _num_own_rows(spot.module):
            share = Share.WHOLE  # gathered already
        return Sight(spot, call, in_order(spot, tensor), share, is_gradient, counts)

    def restart(self) -> None:
        """Count calls from 0 again: a new iteration begins."""
        self._calls.restart()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _value(output: Output) -> torch.Tensor:
    """The value of a module's output; a bias that Megatron-Core adds later is part of it."""
    if isinstance(output, torch.Tensor):
        return output
    first, *rest = output
    assert first is not None
    bias = rest[0] if rest else None
    if isinstance(bias, torch.Tensor) and bias.dim() == 1 and first.dim() > 1:
        return first + bias
    return first


def _is_loss(output: object) -> bool:
    """Whether a model has returned losses `(row, token)` and neither logits nor hidden states."""
    return isinstance(output, torch.Tensor) and output.dim() == 2


def _num_own_rows(module: torch.nn.Module) -> int:
    """The features that this rank's part of a column-parallel layer puts out."""
    return int(getattr(module, "output_size_per_partition", 0))


def in_order(spot: Spot, tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor into the order (token, row, …).

    Losses are (row, token); routers and experts flatten their tokens, and the generating engine's
    heads have no row: (token, head, channel).
    """
    if spot.place.name in ATTENTION_INPUTS:
        return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
    if spot.place.name == "loss":
        return tensor.t().unsqueeze(-1)
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor
