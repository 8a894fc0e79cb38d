"""Strips: one number, or some, of each token and layer at some places, many steps at once.

    notes = Notes(spots)
    model(…); model(…)
    for spot, tensors in notes.take():      # one tensor a pass
        …                                   # a Strip of each spot
    tables_of(reduction, strips)            # all of one shape reduced as one
    notes.close()

For one token of a small model each operation is short, and whatever Python does between two of them
empties caches: looking on the spot costs several times as much as looking afterwards at all that
passed. Nobody writes to a step's tensors again, so they may wait. An operation on a device takes as
long as it takes to begin it: what waits is put together, over steps, layers and places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from megascope.capture import Output, in_order, value_of
from megascope.frames import Array
from megascope.places import ATTENTION_INPUTS, Share, Side, Spot
from megascope.reductions import reduce, width_of

_Pass: TypeAlias = tuple[tuple[Any, ...], Output | None]


@dataclass
class _Noted:
    """One module's spots, and what it was given and put out since they were last looked at."""

    spots: list[Spot]
    passed: list[_Pass] = field(default_factory=list)


class Notes:
    """Hooks on some spots, at most one a module, until `close`."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        by_module: dict[torch.nn.Module, _Noted] = {}
        for spot in spots:
            by_module.setdefault(spot.module, _Noted([])).spots.append(spot)
        self._noted = list(by_module.values())
        self._handles = [_watch(module, noted) for module, noted in by_module.items()]

    def take(self) -> Iterator[tuple[Spot, list[torch.Tensor]]]:
        """Yield each spot with its tensors since the last time, one a pass, as the model had them:
        put them in order (`capture.in_order`) when they are one.
        """
        for noted in self._noted:
            passed = noted.passed.copy()
            noted.passed.clear()
            for spot in noted.spots:
                yield spot, _tensors(spot, passed)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()


def _watch(module: torch.nn.Module, noted: _Noted) -> RemovableHandle:
    passed = noted.passed

    def note(
        module: torch.nn.Module, inputs: tuple[Any, ...], output: Output | None = None
    ) -> None:
        passed.append((inputs, output))

    if any(spot.place.side is Side.OUT for spot in noted.spots):
        return module.register_forward_hook(note)
    return module.register_forward_pre_hook(note)


def _tensors(spot: Spot, passed: Sequence[_Pass]) -> list[torch.Tensor]:
    if spot.place.side is Side.IN:
        index = spot.place.index
        return [inputs[index] for inputs, _ in passed]
    return [value_of(output) for _, output in passed if output is not None]


@dataclass(frozen=True)
class Strip:
    """One place of one layer: what each step that waits has computed there."""

    share: Share
    tensors: list[torch.Tensor]


Strips: TypeAlias = Mapping[str, Mapping[int, Strip]]
"""By place and layer."""


def tables_of(reduction: str, strips: Strips) -> tuple[list[dict[str, object]], dict[str, Array]]:
    """Return a frame's items and arrays: partial numbers `(layer, 1, token, row, number)`.

    They leave the device by one transfer, which waits for it.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for place, layers in strips.items():
        tensor = next(iter(layers.values())).tensors[0]
        key = (place in ATTENTION_INPUTS, tensor.shape[1:], tensor.dtype)
        alike.setdefault(key, []).append(place)
    made: dict[str, Array] = {}
    tables = [_of_all(reduction, strips, places) for places in alike.values()]
    for places, numbers in zip(alike.values(), _on_host(tables), strict=True):
        first = 0
        for place in places:
            made[place] = numbers[first : first + len(strips[place])]
            first += len(strips[place])
    items = [_item_of(place, reduction, strips[place]) for place in strips]
    return items, {str(number): made[place] for number, place in enumerate(strips)}


def _item_of(place: str, reduction: str, layers: Mapping[int, Strip]) -> dict[str, object]:
    """Return the entry of a frame's header that describes the table of one place."""
    first = next(iter(layers.values()))
    tensor = in_order(place, first.tensors[0])
    return {
        "place": place, "reduction": reduction, "gradient": False, "share": first.share.value,
        "width": width_of(reduction, tensor, per_token=True), "layers": list(layers),
        "microbatches": [0],
    }  # fmt: skip


def _of_all(reduction: str, strips: Strips, places: Sequence[str]) -> torch.Tensor:
    """Return `(place and layer, 1, token, row, number)`: partial numbers of tensors alike."""
    layers = [strip for place in places for strip in strips[place].values()]
    together = torch.cat([tensor for strip in layers for tensor in strip.tensors])
    made = reduce(reduction, in_order(places[0], together))
    return made.view(len(layers), 1, -1, *made.shape[1:])


def _on_host(tables: Sequence[torch.Tensor]) -> list[Array]:
    """Return tables as arrays, by one transfer from the device."""
    if not tables:
        return []
    flat = torch.cat([one.view(-1) for one in tables]).cpu().numpy()
    made, first = [], 0
    for one in tables:
        made.append(flat[first : first + one.numel()].reshape(one.shape))
        first += one.numel()
    return made
