"""Keys and values of all tokens that rows have seen, and attention to them.

Megatron-Core's inference needs all rows of a batch to be equally long, keeps keys unrotated and
rotates all of them again for every token. Here a layer's `core_attention` is ours: it rotates the
new queries and keys by their own positions, writes the cache, and lets each row see its own places.
Everything else of a layer stays Megatron-Core's, hooks included.

In the cache every row has a slot of `max_length` places in one tensor a layer, of shape (slot,
place, group, channel). Memory is taken once and never grows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from training.generation.layout import Decoding, Piece, StepTokens
from training.generation.lightening import caller


class KeyValueCache:
    """Keys and values of one rank's layers, for `num_slots` rows of up to `max_length` tokens."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        num_groups: int,
        num_channels: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self._shape = (num_slots, max_length, num_groups, num_channels)
        self._dtype, self._device = dtype, device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The same memory as `(place, group, channel)`."""

    def add_layer(self, layer_number: int) -> None:
        """Take the memory of a layer.

        It begins as zeros: a place that was never written is hidden by a weight of 0, and 0 times
        whatever lay there before may be NaN.
        """
        keys = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        values = torch.zeros_like(keys)
        self._layers[layer_number] = (keys, values)
        self._places[layer_number] = (keys.flatten(0, 1), values.flatten(0, 1))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all layers that were added."""
        return sum(2 * keys.nbytes for keys, _ in self._layers.values())

    def read(
        self, layer_number: int, slots: slice | torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some slots `(row, group, place, channel)` up to a length."""
        keys, values = self._layers[layer_number]
        if isinstance(slots, torch.Tensor):
            return keys[slots, :length].transpose(1, 2), values[slots, :length].transpose(1, 2)
        # One view instead of three: for one token of one row these are a good part of the time.
        _, max_length, groups, channels = self._shape
        size = (slots.stop - slots.start, groups, length, channels)
        strides = (max_length * groups * channels, channels, groups * channels, 1)
        start = slots.start * strides[0]
        return keys.as_strided(size, strides, start), values.as_strided(size, strides, start)

    def write(
        self, layer_number: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put new keys and values `(token, group, channel)` where `places` say.

        A place counts over all slots: slot * `max_length` + position.
        """
        kept_keys, kept_values = self._places[layer_number]
        kept_keys.index_copy_(0, places, keys)
        kept_values.index_copy_(0, places, values)

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of a slot over those of another."""
        for pair in self._layers.values():
            for kept in pair:
                kept[target, :length] = kept[source, :length]


Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines."""


class Rotation:
    """Cosines and sines of a rotary embedding for all positions, from its frequencies."""

    def __init__(self, frequencies: torch.Tensor, max_length: int, dtype: torch.dtype) -> None:
        positions = torch.arange(max_length, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies.float())
        cosines = torch.cat((angles.cos(), angles.cos()), dim=-1)
        # The sign that the first of a pair has is put into the table.
        sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
        self._table = torch.stack((cosines, sines)).to(dtype)

    def at(self, positions: torch.Tensor) -> Turns:
        """Return cosines and sines, `(token, 1, channel)` each, of the positions `(token,)`."""
        cosines, sines = self._table[:, positions, None]
        return cosines, sines


def rotate(states: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn the first channels of `states` `(token, head, channel)`, each pair half a head apart."""
    cosines, sines = turns
    num_turned = cosines.shape[-1]
    if num_turned < states.shape[-1]:
        turned = rotate(states[..., :num_turned], turns)
        return torch.cat((turned, states[..., num_turned:]), dim=-1)
    half = num_turned // 2
    turned = states * cosines
    # Half by half: a copy with the halves swapped takes a GPU longer than the products.
    turned[..., :half].addcmul_(states[..., half:], sines[..., :half])
    turned[..., half:].addcmul_(states[..., :half], sines[..., half:])
    return turned


class StepState:
    """What the attention modules of one rank share: the cache, and the step that is under way."""

    def __init__(self) -> None:
        self.cache: KeyValueCache
        self.layout: StepTokens
        self.turns: Turns | None = None
        """Of this step's tokens; None without rotary embedding."""
        self.wanted: torch.Tensor | None = None
        """The only tokens that are needed behind the last layer's attention; None: all."""


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the context `(row, head, token, channel)` of queries of that shape.

    Keys and values are `(row, group, place, channel)`. `visible` says which places are seen (None:
    all, or causally when the row begins here).
    """
    shares_keys = queries.shape[1] != keys.shape[1]
    if queries.shape[2] == 1 and shares_keys:
        # The heads of a group as if they were tokens: no key is read twice.
        rows, heads, _, channels = queries.shape
        grouped = queries.view(rows, keys.shape[1], -1, channels)
        context = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible, scale=scale
        )
        return context.reshape(rows, heads, 1, channels)
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=is_causal, scale=scale,
        enable_gqa=shares_keys,
    )  # fmt: skip


class Heads(torch.nn.Module):
    """Queries, keys and values of a step's tokens as they are used: normalized and rotated.

    A module of its own so that hooks see them, `(token, head, channel)`, and may change them before
    they go into the cache.
    """

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give back what is given."""
        return queries, keys, values


class CachedAttention(torch.nn.Module):
    """The attention of one layer to the cache, in the place of its `core_attention`."""

    def __init__(
        self, state: StepState, *, layer_number: int, num_channels: int, is_last: bool
    ) -> None:
        super().__init__()
        self._is_last = is_last
        self.heads = Heads()
        self._pass = caller(self.heads)
        self._scale = num_channels**-0.5
        self._layer_number = layer_number
        self._state = state

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **options: object,
    ) -> torch.Tensor:
        """Return context `(token, 1, heads * channels)` of queries `(token, 1, head, channel)`."""
        del attention_mask, options
        state = self._state
        layout = state.layout
        queries, keys, values = query[:, 0], key[:, 0], value[:, 0]
        if state.turns is not None:
            num_heads = queries.shape[1]
            turned = rotate(torch.cat((queries, keys), dim=1), state.turns)
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
        queries, keys, values = self._pass(queries, keys, values)
        state.cache.write(self._layer_number, layout.places, keys, values)
        parts = []
        if layout.decoding is not None:
            parts.append(self._decode(queries, layout.decoding))
        parts += [self._read(queries, piece) for piece in layout.pieces]
        context = self.select(parts[0] if len(parts) == 1 else torch.cat(parts))
        return context.reshape(context.shape[0], 1, -1)

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """Keep of `states` `(token, …)` what is needed behind this layer's attention."""
        wanted = self._state.wanted if self._is_last else None
        return states if wanted is None else states.index_select(0, wanted)

    def _decode(self, queries: torch.Tensor, decoding: Decoding) -> torch.Tensor:
        """Attend with one token of each row; return `(row, head, channel)`."""
        cache = self._state.cache
        keys, values = cache.read(self._layer_number, decoding.slots, decoding.length)
        context = attend(
            queries[: decoding.num_rows, :, None],
            keys,
            values,
            visible=decoding.visible,
            is_causal=False,
            scale=self._scale,
        )
        return context[:, :, 0]

    def _read(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Attend with pieces of prompts; return `(token, head, channel)`."""
        slots = slice(piece.first_slot, piece.first_slot + piece.num_rows)
        length = piece.start + piece.num_tokens
        keys, values = self._state.cache.read(self._layer_number, slots, length)
        num_tokens = piece.num_rows * piece.num_tokens
        own = queries[piece.first_token : piece.first_token + num_tokens]
        own = own.view(piece.num_rows, piece.num_tokens, *own.shape[1:])
        context = attend(
            own.transpose(1, 2),
            keys,
            values,
            visible=piece.visible,
            is_causal=piece.visible is None,
            scale=self._scale,
        )
        return context.transpose(1, 2).flatten(0, 1)
