"""Changes to what a model computes, as data: where, what kind, how much, from which seed.

    with Intervening(chunks, [Intervention(place="context", kind="zero", layers=(3,), units=(7,))],
                     shares=TensorShares(rank=0, size=1)):
        model(tokens, positions, None)      # layer 3 computes without what its head 7 has gathered

A change does the same on every layout: units count over all tensor-parallel ranks, and noise is
drawn for the whole tensor, from a seed that names layer, place and call, and then cut. Afterwards
the model is bit for bit what it was: hooks are removed, flipped bits of weights are flipped back.

The original MegaScope perturbs storage, calculation and system. Here these are bits of weights that
flip (`flip`), values that are computed wrongly (`noise`, `scale_noise`, `offset`, `scale`), and
parts that fail (`zero` of heads, neurons, layers).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from megascope.capture import (
    ATTENTION_INPUTS,
    Calls,
    Output,
    Share,
    Side,
    Spot,
    find_spots,
    in_order,
)
from megascope.request import Intervention, Kind


@dataclass(frozen=True, kw_only=True)
class TensorShares:
    """This rank's number among the tensor-parallel ranks, and how many there are."""

    rank: int
    size: int


Replacements = Mapping[tuple[str, int], torch.Tensor]
"""Tensors (token, row, …) of an earlier run, by place and layer: whole, or this rank's share. The
index of a token is its position."""


class Intervening:
    """Changes to what is computed inside the `with`.

    `moment` is the iteration, or the position of the first token that is computed. Call `restart`
    with it before each iteration in training and each pass in generation.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        interventions: Sequence[Intervention],
        *,
        shares: TensorShares,
        replacements: Replacements | None = None,
    ) -> None:
        self.moment = 0
        self._chunks = list(chunks)
        self._interventions = tuple(interventions)
        self._shares = shares
        self._replacements = replacements or {}
        self._calls = Calls()
        self._open = ExitStack()
        self._flipped: dict[Intervention, ExitStack] = {}

    def __enter__(self) -> Intervening:
        for spot in find_spots(self._chunks):
            mine = [
                one
                for one in self._interventions
                if one.place == spot.place.name and one.kind != Kind.FLIP and spot.is_in(one.layers)
            ]
            if mine:
                self._open.callback(self._change(spot, mine).remove)
        self.update_weights()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stack in self._flipped.values():
            stack.close()
        self._flipped.clear()
        self._open.close()

    def restart(self, moment: int) -> None:
        """Begin an iteration, or a pass that begins at a token's position."""
        self.moment = moment
        self._calls.restart()
        self.update_weights()

    def update_weights(self) -> None:
        """Flip the bits whose interventions hold now, and flip back the bits of all others."""
        for one in self._interventions:
            if one.kind != Kind.FLIP:
                continue
            holds, is_flipped = one.holds_at(self.moment), one in self._flipped
            if holds and not is_flipped:
                self._flipped[one] = flip_weights(self._chunks, one, self._shares)
            elif is_flipped and not holds:
                self._flipped.pop(one).close()

    def _change(self, spot: Spot, mine: Sequence[Intervention]) -> RemovableHandle:
        def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            del module
            index = spot.place.index
            changed = self._apply(spot, inputs[index], mine)
            return (*inputs[:index], changed, *inputs[index + 1 :])

        def after(module: torch.nn.Module, inputs: object, output: Output) -> Output:
            del module, inputs
            if isinstance(output, torch.Tensor):
                return self._apply(spot, output, mine)
            return self._apply_to_first(spot, output, mine)

        if spot.place.side is Side.IN:
            return spot.module.register_forward_pre_hook(before)
        return spot.module.register_forward_hook(after)

    def _apply_to_first(
        self, spot: Spot, output: tuple[torch.Tensor | None, ...], mine: Sequence[Intervention]
    ) -> tuple[torch.Tensor | None, ...]:
        """Change the first part of an output; a bias that is returned next to it is added first."""
        first, *rest = output
        assert first is not None
        bias = rest[0] if rest else None
        if isinstance(bias, torch.Tensor) and bias.dim() == 1:
            if any(one.holds_at(self.moment) for one in mine):
                return self._apply(spot, first + bias, mine), torch.zeros_like(bias), *rest[1:]
            return output
        return self._apply(spot, first, mine), *rest

    def _apply(
        self, spot: Spot, tensor: torch.Tensor, mine: Sequence[Intervention]
    ) -> torch.Tensor:
        call = self._calls.next(spot.chunk, spot.layer, spot.place.name)
        active = [one for one in mine if one.holds_at(self.moment)]
        if not active:
            return tensor
        ordered = in_order(spot.place.name, tensor)
        grid = _Grid(spot, ordered, self._shares, self.moment)
        changed = ordered
        for one in active:
            changed = self._carry_out(one, spot, changed, grid, call)
        return changed.view(tensor.shape)

    def _carry_out(
        self, one: Intervention, spot: Spot, x: torch.Tensor, grid: _Grid, call: int
    ) -> torch.Tensor:
        key = f"{one.seed}/{spot.layer}/{spot.place.name}/{self.moment}/{call}"
        match one.kind:
            case Kind.NOISE:
                y = x + one.amount * grid.noise(key, is_uniform=False)
            case Kind.SCALE_NOISE:
                y = x * (1 + one.amount * grid.noise(key, is_uniform=True))
            case Kind.SCALE:
                y = x * one.amount
            case Kind.OFFSET:
                y = x + one.amount
            case Kind.ZERO:
                y = torch.zeros_like(x)
            case _:
                y = grid.replaced(x, self._replacements.get((spot.place.name, spot.layer)))
        return torch.where(grid.chosen(one), y, x)


class _Grid:
    """Where this rank's tensor lies within the whole tensor of all tensor-parallel ranks."""

    def __init__(
        self, spot: Spot, tensor: torch.Tensor, shares: TensorShares, first_token: int
    ) -> None:
        self._tensor = tensor
        self._first_token = first_token
        width = tensor.shape[2:].numel()
        size, rank = shares.size, shares.rank
        columns = torch.arange(width)
        match spot.share:
            case Share.FEATURES:
                columns = columns + rank * width
            case Share.GATED:
                half = width // 2
                side, within = columns // half, columns % half
                columns = side * half * size + rank * half + within
        is_cut = spot.share in (Share.FEATURES, Share.GATED)
        self._width = width * (size if is_cut else 1)
        self._columns = columns
        num_tokens = tensor.shape[0]
        self._tokens = torch.arange(num_tokens)
        self._num_tokens = num_tokens
        if spot.share is Share.TOKENS:
            self._tokens = self._tokens + rank * num_tokens
            self._num_tokens = num_tokens * size
        self._unit = _unit_width(spot, tensor)

    def noise(self, key: str, *, is_uniform: bool) -> torch.Tensor:
        """Return this rank's part of noise for the whole tensor, drawn from the seed `key`."""
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        shape = (self._num_tokens, self._tensor.shape[1], self._width)
        if is_uniform:
            drawn = torch.rand(shape, generator=generator) * 2 - 1
        else:
            drawn = torch.randn(shape, generator=generator)
        return self._fit(drawn[self._tokens])

    def replaced(self, x: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """Return `x` with the values that an earlier run had at the same positions.

        Positions that the earlier run did not have keep their values.
        """
        if source is None:
            return x
        at = self._tokens + self._first_token
        known = at < source.shape[0]
        if not bool(known.any()):
            return x
        there = source.flatten(2)[at.clamp(max=source.shape[0] - 1)]
        is_share = source.shape[2:] == self._tensor.shape[2:]
        taken = there.reshape(x.shape).to(x) if is_share else self._fit(there)
        return torch.where(_over_tokens(known, x), taken, x)

    def chosen(self, one: Intervention) -> torch.Tensor:
        """Return which numbers an intervention changes, as a mask to broadcast over the tensor."""
        by_unit = torch.ones(len(self._columns), dtype=torch.bool)
        if one.units:
            by_unit = torch.isin(self._columns // self._unit, torch.tensor(one.units))
        by_token = torch.ones(len(self._tokens), dtype=torch.bool)
        if one.tokens:
            by_token = torch.isin(self._tokens + self._first_token, torch.tensor(one.tokens))
        over_units = by_unit.view(1, 1, *self._tensor.shape[2:]).to(self._tensor.device)
        return over_units & _over_tokens(by_token, self._tensor)

    def _fit(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of `whole` (token, row, column), in the tensor's own shape."""
        own = whole[..., self._columns.to(whole.device)]
        rows = self._tensor.shape[1]
        return own.expand(-1, rows, -1).reshape(self._tensor.shape).to(self._tensor)


def _over_tokens(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of tokens in a shape that broadcasts over `tensor` (token, row, …)."""
    other_axes = [1] * (tensor.dim() - 1)
    return mask.view(-1, *other_axes).to(tensor.device)


def _unit_width(spot: Spot, tensor: torch.Tensor) -> int:
    """Return the features of one unit: the channels of a head where units are heads, else 1."""
    if spot.place.name in ATTENTION_INPUTS:
        return int(tensor.shape[-1])
    if spot.place.name == "context":
        return int(spot.module.config.kv_channels)  # type: ignore[union-attr,arg-type]
    return 1


def flip_bits(parameter: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> ExitStack:
    """Flip one bit at each place (flat index) of a tensor; closing the result flips them back."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[parameter.element_size()]
    view = parameter.detach().view(-1).view(kind)
    one = torch.ones((), dtype=torch.int64)
    # The highest bit has no positive number in its own type: shift in 64 bits, then narrow.
    masks = (one << bits.to(torch.int64)).to(kind).to(view.device)
    places = places.to(view.device)

    def flip() -> None:
        for place, mask in zip(places, masks, strict=True):  # the same place may come twice
            view[place] ^= mask

    flip()
    undo = ExitStack()
    undo.callback(flip)
    return undo


def flip_weights(
    chunks: Sequence[torch.nn.Module], one: Intervention, shares: TensorShares
) -> ExitStack:
    """Flip bits of a place's weights in some layers; closing the result flips them back.

    Indices and bits are drawn over the whole weight of all tensor-parallel ranks; each rank flips
    the bits in its own share.
    """
    undo = ExitStack()
    for spot in find_spots(chunks, [one.place], one.layers):
        weight = cast(torch.Tensor, spot.module.weight)
        total = weight.numel() * shares.size
        seed = zlib.crc32(f"{one.seed}/{spot.layer}/{one.place}/weight".encode())
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, total, (int(one.amount),), generator=generator)
        width = 8 * weight.element_size()
        bits = torch.randint(0, width - 1, (int(one.amount),), generator=generator)
        if one.bit >= 0:
            bits = bits.fill_(min(one.bit, width - 1))
        owners, indices = _located(drawn, weight, spot, shares.size)
        is_own = owners == shares.rank
        undo.enter_context(flip_bits(weight, indices[is_own], bits[is_own]))
    return undo


def _located(
    drawn: torch.Tensor, weight: torch.Tensor, spot: Spot, num_shares: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rank holds each drawn number of the whole weight, and its index there.

    `weight` is one rank's share; `drawn` and the result are flat indices.
    """
    rows, columns = weight.shape
    if spot.place.share is Share.WHOLE:  # row parallel: the layer reads shares of features
        row, column = drawn // (columns * num_shares), drawn % (columns * num_shares)
        return column // columns, row * columns + column % columns
    row, column = drawn // columns, drawn % columns
    if spot.share is Share.GATED:
        half = rows // 2
        side, within = row // (half * num_shares), row % (half * num_shares)
        return within // half, (side * half + within % half) * columns + column
    return row // rows, row % rows * columns + column
