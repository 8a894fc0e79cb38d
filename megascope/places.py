"""What can be looked at in a GPT of Megatron-Core: the table of places, and where they are here.

A place is named once for all layers; a spot is a place in one layer of this rank. Shapes are those
that hooks hand over, (token, row, feature); queries, keys and values have (token, row, head,
channel). Tensor-parallel ranks hold contiguous shares of features or heads, or of the tokens with
sequence parallelism, so that who has all shares can join them by concatenation.

To add a place: a line in `PLACES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Side(StrEnum):
    """Which of a module's tensors is meant."""

    IN = "in"
    OUT = "out"


class Share(StrEnum):
    """What a tensor-parallel rank holds of a place."""

    WHOLE = "whole"
    FEATURES = "features"
    """A contiguous part of the features, or of the heads."""
    GATED = "gated"
    """A contiguous part of the gates, then the same part of the values they gate."""
    TOKENS = "tokens"
    """A contiguous part of the tokens (sequence parallelism)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One kind of tensor, in every layer or once in the model."""

    name: str
    meaning: str
    reach: Callable[[Any], object]
    """From a layer, or from the model, to the module; None where it has none."""
    side: Side = Side.OUT
    index: int = 0
    """Of the tensor among the module's inputs or outputs."""
    share: Share = Share.WHOLE
    is_layered: bool = True
    follows_sequence: bool = False
    """Whether sequence parallelism cuts it by tokens."""


def _path(dotted: str) -> Callable[[Any], object]:
    """Follow attributes from an object; return None as soon as one is missing."""

    def reach(start: Any) -> object:
        for name in dotted.split("."):
            start = getattr(start, name, None)
        return start

    return reach


def _attention(layer: Any) -> object:
    """Return the module whose inputs are queries, keys and values as they are used.

    The generating engine's attention rotates them itself and shows them in a module `heads`, before
    they go into its cache.
    """
    core = _path("self_attention.core_attention")(layer)
    return getattr(core, "heads", core)


PLACES: tuple[Place, ...] = (
    Place(
        name="embedding", meaning="what enters the first layer", reach=_path("embedding"),
        is_layered=False, follows_sequence=True,
    ),
    Place(
        name="qkv", meaning="queries, keys, values as projected, by group",
        reach=_path("self_attention.linear_qkv"), share=Share.FEATURES,
    ),
    Place(
        name="query", meaning="queries as used: normalized, rotated", reach=_attention,
        side=Side.IN, index=0, share=Share.FEATURES,
    ),
    Place(
        name="key", meaning="keys as used", reach=_attention, side=Side.IN, index=1,
        share=Share.FEATURES,
    ),
    Place(
        name="value", meaning="values as used", reach=_attention, side=Side.IN, index=2,
        share=Share.FEATURES,
    ),
    Place(
        name="context", meaning="what each head has gathered", side=Side.IN,
        reach=_path("self_attention.linear_proj"), share=Share.FEATURES,
    ),
    Place(
        name="attention_out", meaning="what attention adds to the stream",
        reach=_path("self_attention.linear_proj"), follows_sequence=True,
    ),
    Place(
        name="fc1", meaning="neurons before their activation function",
        reach=_path("mlp.linear_fc1"), share=Share.FEATURES,
    ),
    Place(
        name="neurons", meaning="neurons after it", reach=_path("mlp.linear_fc2"), side=Side.IN,
        share=Share.FEATURES,
    ),
    Place(
        name="fc2", meaning="what the MLP adds to the stream", reach=_path("mlp.linear_fc2"),
        follows_sequence=True,
    ),
    Place(
        name="router", meaning="weights of the experts that each token is sent to",
        reach=_path("mlp.router"), follows_sequence=True,
    ),
    Place(
        name="experts", meaning="what each expert of this rank returns", reach=_path("mlp.experts"),
    ),
    Place(
        name="residual", meaning="the stream after the layer", reach=lambda layer: layer,
        follows_sequence=True,
    ),
    Place(
        name="logits", meaning="scores of the next token", reach=_path("output_layer"),
        is_layered=False, share=Share.FEATURES,
    ),
    Place(
        name="loss", meaning="loss of each token, where the model is given labels",
        reach=lambda model: model if getattr(model, "post_process", False) else None,
        is_layered=False,
    ),
)  # fmt: skip
BY_NAME = {place.name: place for place in PLACES}
ATTENTION_INPUTS = frozenset({"query", "key", "value"})


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A place in one layer of this rank."""

    place: Place
    layer: int
    """Counted from 1 over the whole model; 0 for what the model has once."""
    chunk: int
    """Of this rank's model chunks (interleaved schedules)."""
    module: torch.nn.Module
    share: Share

    @property
    def name(self) -> str:
        """Return how the spot is called: ``layer 3 fc1``."""
        return f"layer {self.layer} {self.place.name}" if self.layer else self.place.name


def find_spots(
    chunks: Sequence[torch.nn.Module],
    places: Sequence[str] | None = None,
    layers: Sequence[int] = (),
) -> list[Spot]:
    """Return the spots of the model chunks of this rank, in the order in which they are computed.

    `places` are names out of the table, all if None; `layers` count from 1, none means all. Wrapped
    chunks (data parallelism, half precision) are looked into. A place that the model does not have
    is left out.
    """
    from megatron.core.utils import unwrap_model

    wanted = set(BY_NAME if places is None else places)
    return [
        spot
        for number, chunk in enumerate(unwrap_model(list(chunks)))
        for spot in _spots_of(chunk, number)
        if spot.place.name in wanted and (not layers or not spot.layer or spot.layer in layers)
    ]


def _spots_of(model: GPTModel, chunk: int) -> Iterator[Spot]:
    once = [place for place in PLACES if not place.is_layered]
    layered = [place for place in PLACES if place.is_layered]
    first = [place for place in once if place.name == "embedding"]
    last = [place for place in once if place.name != "embedding"]
    owners = [(0, model, first)]
    owners += [(int(layer.layer_number), layer, layered) for layer in model.decoder.layers]
    owners += [(0, model, last)]
    config = model.config
    for number, owner, places in owners:
        for place in places:
            module = place.reach(owner)
            if isinstance(module, torch.nn.Module):
                share = _share(place, config)
                yield Spot(place=place, layer=number, chunk=chunk, module=module, share=share)


def _share(place: Place, config: Any) -> Share:
    if config.tensor_model_parallel_size == 1:
        return Share.WHOLE
    if place.follows_sequence and config.sequence_parallel:
        return Share.TOKENS
    if place.name == "fc1" and config.gated_linear_unit:
        return Share.GATED
    return place.share
