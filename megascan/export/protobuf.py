"""Make the bytes of many equal protobuf messages at once, and of Perfetto's packets.

Messages with the same fields have the same length if their numbers have the same length. A varint
may be padded with continuation bits, so every column gets the width of its largest number. A batch
of messages is then a matrix of shape (message, byte) that numpy fills column by column, and the
lengths of nested messages are constants:

    name 5     0x50 0x85 0x00        both as wide as 300 needs: 7 bits a byte, the lowest first,
    name 300   0x50 0xac 0x02        bit 8 of all but the last byte set

Encoding: protobuf.dev/programming-guides/encoding. Field numbers: perfetto's trace_packet.proto,
track_event.proto and debug_annotation.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.arrays import Bytes, Floats, Integers
from megascan.schema import NOT_APPLICABLE

VARINT, FIXED64, LENGTH = 0, 1, 2
_LONGEST_VARINT = 10


@cache
def varint(value: int) -> bytes:
    """Encode one number, unpadded."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@cache
def tag(field: int, wire_type: int) -> bytes:
    """Return the tag that stands before a field's value."""
    return varint(field << 3 | wire_type)


Unsigned = npt.NDArray[np.unsignedinteger[Any]]
"""A column of numbers from 0 up; negative numbers are two's complement in eight bytes."""
Whole = Integers | Unsigned
"""A column of whole numbers, before or after `unsigned`."""


def unsigned(values: Integers) -> Unsigned:
    """Return numbers in the fewest bytes that hold them, which makes taking rows for packets fast.

    -1 means no number and may become any number; any number below -1 keeps all in eight bytes.
    """
    if values.min(initial=0) < NOT_APPLICABLE:
        return values.view(np.uint64)
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


@dataclass(frozen=True)
class Varints:
    """A column of numbers as varints of one width."""

    values: Unsigned
    width: int

    def fill(self, out: Bytes) -> None:
        """Write the column into (message, width) bytes."""
        rest = self.values
        for place in range(self.width - 1):
            out[:, place] = rest.astype(np.uint8) | np.uint8(0x80)
            rest = rest >> rest.dtype.type(7)
        out[:, self.width - 1] = rest


@dataclass(frozen=True)
class Fixed64:
    """A column of numbers as eight bytes each."""

    values: Integers | Floats
    width: int = 8

    def fill(self, out: Bytes) -> None:
        """Write the column into (message, width) bytes."""
        out.view(self.values.dtype.newbyteorder("<"))[:, 0] = self.values


Part = bytes | Varints | Fixed64
"""A part of messages: bytes that all messages share, or a column of numbers."""


def varints(values: Whole) -> Varints:
    """Encode numbers as varints; negative numbers take ten bytes, as protobuf requires."""
    numbers: Unsigned = values.view(f"u{values.itemsize}")
    top = int(numbers.max(initial=0))
    width = min(max(-(-top.bit_length() // 7), 1), _LONGEST_VARINT)
    if numbers.dtype == np.uint64 and top < 2**32:
        numbers = numbers.astype(np.uint32)
    return Varints(numbers, width)


def length_of(parts: Sequence[Part]) -> int:
    """Count the bytes of a message of these parts."""
    return sum(len(part) if isinstance(part, bytes) else part.width for part in parts)


def nested(field: int, parts: Sequence[Part]) -> list[Part]:
    """Return a length-delimited field that holds the parts."""
    return [tag(field, LENGTH) + varint(length_of(parts)), *parts]


def matrix(num_messages: int, parts: Sequence[Part]) -> Bytes:
    """Put parts next to each other, shape (message, byte): shared bytes in one go, then columns."""
    shared = b"".join(part if isinstance(part, bytes) else bytes(part.width) for part in parts)
    out = np.empty((num_messages, len(shared)), dtype=np.uint8)
    out[:] = np.frombuffer(shared, dtype=np.uint8)
    place = 0
    for part in parts:
        if isinstance(part, bytes):
            place += len(part)
        else:
            part.fill(out[:, place : place + part.width])
            place += part.width
    return out


def interleaved(pieces: Sequence[tuple[Integers, Bytes]]) -> bytes | memoryview:
    """Put messages of several matrices in the order of their row numbers, 0, 1, 2, …"""
    if len(pieces) == 1:
        return pieces[0][1].tobytes()
    arrays = [_binary(piece) for _, piece in pieces]
    rows = np.concatenate([rows for rows, _ in pieces]) if pieces else np.empty(0, np.int64)
    if not len(rows):
        return b""
    order = np.empty_like(rows)
    order[rows] = np.arange(len(rows))
    whole = pa.concat_arrays(arrays).take(pa.array(order))
    end = int(np.frombuffer(whole.buffers()[1], dtype=np.int32)[len(whole)])
    return memoryview(whole.buffers()[2])[:end]


def _binary(piece: Bytes) -> pa.BinaryArray:
    count, width = piece.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(piece.reshape(-1))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


SEQUENCE = 1
"""Number of the only packet sequence; its first packet has all texts that packets refer to."""
STARTS_STATE, NEEDS_STATE = 3, 2


class EventType(IntEnum):
    """TrackEvent.Type."""

    BEGIN = 1
    END = 2
    COUNTER = 4


_PACKET, _TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _SEQUENCE_FLAGS = 1, 8, 10, 11, 13
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK = 3, 4, 9, 10, 11
_COUNTER_VALUE, _FLOW, _TERMINATING_FLOW = 44, 47, 48
_ANNOTATION_NAME, _INT, _DOUBLE, _TEXT = 1, 4, 5, 17

_IN_SEQUENCE = (
    tag(_SEQUENCE_ID, VARINT)
    + varint(SEQUENCE)
    + tag(_SEQUENCE_FLAGS, VARINT)
    + varint(NEEDS_STATE)
)


def packets(time_ns: Integers, event: Sequence[Part]) -> Bytes:
    """Make packets of one track event each, shape (packet, byte)."""
    body: list[Part] = [tag(_TIMESTAMP, VARINT), varints(time_ns), _IN_SEQUENCE]
    body += nested(_TRACK_EVENT, event)
    return matrix(len(time_ns), nested(_PACKET, body))


def begin(track: Whole, name: Whole, category: Whole) -> list[Part]:
    """Return a slice's begin on a track, by the numbers of its interned name and category."""
    parts = _event(EventType.BEGIN, track)
    parts += [tag(_NAME, VARINT), varints(name), tag(_CATEGORY, VARINT), varints(category)]
    return parts


def end(track: Whole) -> list[Part]:
    """Return the end of the innermost open slice of a track."""
    return _event(EventType.END, track)


def counter(track: Whole, value: Floats) -> list[Part]:
    """Return a curve's value."""
    return [*_event(EventType.COUNTER, track), tag(_COUNTER_VALUE, FIXED64), Fixed64(value)]


def _event(kind: EventType, track: Whole) -> list[Part]:
    return [tag(_TYPE, VARINT) + varint(kind) + tag(_TRACK, VARINT), varints(track)]


def int_argument(name: int, value: Whole) -> list[Part]:
    """Return an argument with whole numbers; `name` is the number of its interned name."""
    return _argument(name, tag(_INT, VARINT), varints(value))


def real_argument(name: int, value: Floats) -> list[Part]:
    """Return an argument with finite floats."""
    return _argument(name, tag(_DOUBLE, FIXED64), Fixed64(value))


def text_argument(name: int, value: Whole) -> list[Part]:
    """Return an argument with texts, by their interned numbers."""
    return _argument(name, tag(_TEXT, VARINT), varints(value))


def _argument(name: int, wire_tag: bytes, value: Part) -> list[Part]:
    label = tag(_ANNOTATION_NAME, VARINT) + varint(name) + wire_tag
    return nested(_ANNOTATION, [label, value])


def leaving_flow(ids: Integers) -> list[Part]:
    """Return an arrow that leaves the event's slice."""
    return [tag(_FLOW, FIXED64), Fixed64(ids)]


def arriving_flow(ids: Integers) -> list[Part]:
    """Return an arrow that ends in the event's slice."""
    return [tag(_TERMINATING_FLOW, FIXED64), Fixed64(ids)]
