"""Tell which layers of a model are alike, so that stages of a pipeline can be compared.

Problem: a stage that is one rank, or one host, has no peer that does the same work. Its layers may
be compared with layers of other stages, but only if they are of the same kind: in a hybrid model
every eighth layer may be different, and a device with such a layer is not slow.

Idea: a layer's kind is a digest of its modules: the place of each module, its class, the shapes and
types of its parameters, and its plain settings (window of attention, dropout, an activation's
name). Numbers of layers (`layer_number`, `layer_idx`) are left out, and so are attributes that
change while the model runs (private attributes).

    layer 1  self_attention: Attention, qkv (3072, 1024) …; mlp: MLP, fc1 (4096, 1024) …   5f1c09ab
    layer 2  equal to layer 1                                                              5f1c09ab
    layer 3  self_attention: …, window_size (128, 0); mlp: …                               c07d51e2

A layer of experts has no kind: how long it takes depends on the tokens that a router sends there,
and these differ between layers. Equal modules may also run different code, so for a verdict layers
of one kind are only evidence.
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
"""Kind of a layer whose work depends on the data."""
_COUNTS = re.compile(r"layer|idx|index|number|name$|(^|_)id$")
_EXPERTS = re.compile(r"moe|router|expert|mixture", re.IGNORECASE)


def kinds_of(layers: Iterable[tuple[int, torch.nn.Module]]) -> dict[int, str]:
    """Return the kind of each numbered layer, `UNLIKE` for a layer with experts."""
    return {number: kind_of(layer) for number, layer in layers}


def numbered_layers(model: object) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the layers of a chunk of a Megatron model by their numbers in the whole model."""
    decoder = getattr(model, "decoder", None)
    for layer in getattr(decoder, "layers", ()):
        number = getattr(layer, "layer_number", None)
        if isinstance(number, int):
            yield number, layer


def kind_of(layer: torch.nn.Module) -> str:
    """Return a digest of a layer's modules, `UNLIKE` if a router feeds any of them."""
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
