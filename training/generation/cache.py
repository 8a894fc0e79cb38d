"""The keys and values of all tokens that the rows of a batch have seen.

Every row has a slot of `max_length` places in one tensor a layer, of shape (slot, place, group,
channel). Memory is taken once and never grows. Keys are kept as attention uses them, rotated.
"""

from __future__ import annotations

import torch


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
