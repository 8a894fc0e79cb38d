"""Protobuf bytes of many messages at once, as columns: the counterpart of `megascan.export.wire`.

Numbers are taken at an array of places, eight bytes at a time. Encoding:
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

VARINT, FIXED64, LENGTH = 0, 1, 2
_PACKET_TAG = 0x0A
_LARGEST_PACKET = 1 << 30
_LONGEST_VARINT = 10
_PAD = bytes(_LONGEST_VARINT + 8)

_CONTINUES = np.uint64(0x8080808080808080)
_SEPTETS = np.uint64(0x7F7F7F7F7F7F7F7F)
_STEPS = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)
"""Septets move together pair by pair: masks of the lower and the upper one, and how far."""


class Wire:
    """Bytes to read numbers from, at many places at once."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        padded = data + _PAD
        self._words: Words = np.ndarray(
            (len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,)
        )

    def varints(self, at: Integers) -> tuple[Integers, Integers]:
        """(value, where the next field stands) of the varints at some places.

        A varint that never ends has no next field: -1.
        """
        word = self._words[at]
        stop = ~word & _CONTINUES
        stop &= np.negative(stop)  # the lowest byte that does not continue
        num_bytes = (np.frexp(stop.astype(np.float64))[1] >> 3).astype(np.int64)
        value = word & ((stop << np.uint64(1)) - np.uint64(1)) & _SEPTETS
        for low, high, shift in _STEPS:
            value = (value & low) | ((value & high) >> shift)
        following = at + num_bytes
        rows = np.flatnonzero(num_bytes == 0)
        if len(rows):
            value[rows], following[rows] = self._long_varints(at[rows], value[rows])
        return value.view(np.int64), following

    def _long_varints(self, at: Integers, value: Words) -> tuple[Words, Integers]:
        """The ninth and tenth byte, as negative numbers have them."""
        more = self._words[at + 8]
        ninth, tenth = more & np.uint64(0xFF), more >> np.uint64(8) & np.uint64(0xFF)
        ends = ninth < 0x80
        value = value | (ninth & np.uint64(0x7F)) << np.uint64(56)
        value = np.where(ends, value, value | (tenth & np.uint64(1)) << np.uint64(63))
        following = np.where(ends, at + 9, np.where(tenth <= 1, at + 10, -1))
        return value, following

    def packets(self) -> Packets | None:
        """Bounds of the packets that stand whole in the data; None where no packet can be."""
        if not self.size:
            none = np.empty(0, dtype=np.int64)
            return Packets(none, none, 0)
        tags = np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) == _PACKET_TAG)
        if not len(tags) or tags[0] != 0:
            return None
        length, body = self.varints(tags + 1)
        good = (body > 0) & (length >= 0) & (length <= _LARGEST_PACKET)
        end = np.where(good, body + length, -1)
        chain = _chain(tags, end)
        last = int(chain[-1])
        if end[last] < 0 or (end[last] < self.size and self.data[int(end[last])] != _PACKET_TAG):
            return None
        whole = chain if end[last] <= self.size else chain[:-1]
        rest = int(end[last]) if end[last] <= self.size else int(tags[last])
        return Packets(body[whole], end[whole], rest)


@dataclass(frozen=True)
class Packets:
    """Bounds of packets, (packet,) each, and where the first one begins that is not whole."""

    start: Integers
    end: Integers
    rest: int


def _chain(tags: Integers, end: Integers) -> Integers:
    """Places in `tags` that are reached from the first when each leads to the one at its `end`.

    Where a packet ends is known only once its own begin is; so the steps are doubled: who is
    reached by 1, 2, 4, … of them.
    """
    stop = len(tags)
    place = np.searchsorted(tags, end)
    found = np.append(tags, -1)[place] == end
    step = np.append(np.where(found, place, stop), stop)
    reached = np.zeros(stop + 1, dtype=np.bool_)
    reached[0] = True
    while not reached[stop]:
        reached[step[np.flatnonzero(reached)]] = True
        step = step[step]
    return np.flatnonzero(reached[:stop])
