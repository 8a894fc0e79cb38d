"""Tell which layers of a model are alike, so that stages of a pipeline can be compared.

Problem: a stage that is one rank, or one host, has no peer that does the same work. Its layers may
be compared with those of other stages, but only if they are of one kind: in a hybrid model every
eighth layer may be another one, and no device is slow for that.

Idea: a layer's kind is a digest of what its modules are: where each stands, its class, the shapes
and types of its parameters, and its plain settings (window of attention, dropout, an activation's
name). What counts layers (`layer_number`, `layer_idx`) is left out, and so is what changes while it
runs (private attributes).

    layer 1  self_attention: Attention, qkv (3072, 1024) …; mlp: MLP, fc1 (4096, 1024) …   5f1c09ab
    layer 2  the same                                                                      5f1c09ab
    layer 3  self_attention: …, window_size (128, 0); mlp: …                               c07d51e2

How long a layer of experts takes depends on the tokens that a router sends there, on each layer
others: it has no kind. Nobody knows either what code makes of an equal module, so a verdict calls
layers of one kind evidence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

UNLIKE = ""
"""The kind of a layer whose work the data decide."""
_COUNTS = re.compile(r"layer|idx|index|number|name$|(^|_)id$")
_EXPERTS = re.compile(r"moe|router|expert|mixture", re.IGNORECASE)


def kinds_of(layers: Iterable[tuple[int, torch.nn.Module]]) -> dict[int, str]:
    """Return the kind of each numbered layer, `UNLIKE` where it has experts."""
    return {number: kind_of(layer) for number, layer in layers}


def numbered_layers(model: object) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the layers of a chunk of a Megatron model by their numbers in the whole model."""
    decoder = getattr(model, "decoder", None)
    for layer in getattr(decoder, "layers", ()):
        number = getattr(layer, "layer_number", None)
        if isinstance(number, int):
            yield number, layer


def kind_of(layer: torch.nn.Module) -> str:
    """Return a digest of what a layer's modules are, `UNLIKE` where a router feeds any of them."""
    digest = hashlib.sha256()
    for name, module in layer.named_modules():
        if _EXPERTS.search(type(module).__name__):
            return UNLIKE
        digest.update("\n".join(_lines(name, module)).encode())
    return digest.hexdigest()[:8]


def _lines(name: str, module: torch.nn.Module) -> Iterator[str]:
    yield f"{name}: {type(module).__module__}.{type(module).__qualname__}"
    for title, parameter in module.named_parameters(recurse=False):
        yield f"{title} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for title, value in sorted(vars(module).items()):
        if not title.startswith("_") and not _COUNTS.search(title) and _is_plain(value):
            yield f"{title} = {value}"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str | Enum)
