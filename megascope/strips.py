"""Strips: one number, or some, of each token and layer at some places, many tensors at once.

For one token an operation takes as long as it takes to begin it. So the tensors of all steps that
wait, of all layers and of all places of one shape are put together and reduced as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from megascope.capture import in_order
from megascope.frames import Array
from megascope.places import ATTENTION_INPUTS, Share
from megascope.reductions import reduce, width_of


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
