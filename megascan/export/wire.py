"""Protobuf bytes of many equal messages at once, as columns of a byte matrix.

Messages with the same fields have the same length if their numbers have: a varint may be padded
with continuation bits, so every column gets the width of its largest number. A batch of messages
is then a matrix of shape (message, byte) that numpy fills column by column, and the lengths of
nested messages are constants. Encoding: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Integers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Part = bytes | Bytes
"""Bytes that all messages share, or a matrix of shape (message, byte)."""

VARINT, FIXED64, LENGTH = 0, 1, 2
_LONGEST_VARINT = 10


def varint(value: int) -> bytes:
    """One number, unpadded."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(field: int, wire_type: int) -> bytes:
    """What stands before a field's value."""
    return varint(field << 3 | wire_type)


def varints(values: Integers) -> Bytes:
    """Numbers as varints of one width; negative ones take ten bytes, as protobuf wants."""
    numbers = values.view(np.uint64)
    top = int(numbers.max(initial=0))
    width = min(max(-(-top.bit_length() // 7), 1), _LONGEST_VARINT)
    out = np.empty((len(values), width), dtype=np.uint8)
    for place in range(width):
        septet = (numbers >> np.uint64(7 * place)).astype(np.uint8)
        last = place == width - 1
        out[:, place] = septet & np.uint8(0x7F) if last else septet | np.uint8(0x80)
    return out


def fixed64(values: Integers | npt.NDArray[np.float64]) -> Bytes:
    """Numbers as eight bytes each."""
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(len(values), 8)


def length_of(parts: Sequence[Part]) -> int:
    """Bytes of a message of these parts."""
    return sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in parts)


def nested(field: int, parts: Sequence[Part]) -> list[Part]:
    """A length-delimited field that holds the parts."""
    return [tag(field, LENGTH) + varint(length_of(parts)), *parts]


def matrix(num_messages: int, parts: Sequence[Part]) -> Bytes:
    """Parts side by side, shape (message, byte)."""
    out = np.empty((num_messages, length_of(parts)), dtype=np.uint8)
    place = 0
    for part in parts:
        width = len(part) if isinstance(part, bytes) else part.shape[1]
        source = np.frombuffer(part, dtype=np.uint8) if isinstance(part, bytes) else part
        out[:, place : place + width] = source
        place += width
    return out


def interleaved(pieces: Sequence[tuple[Integers, Bytes]]) -> bytes | memoryview:
    """Messages of several matrices in the order of their row numbers."""
    if len(pieces) == 1:
        return pieces[0][1].tobytes()
    arrays = [_binary(piece) for _, piece in pieces]
    rows = np.concatenate([rows for rows, _ in pieces]) if pieces else np.empty(0, np.int64)
    if not len(rows):
        return b""
    order = pa.array(np.argsort(rows, kind="stable"))
    whole = pa.concat_arrays(arrays).take(order)
    end = int(np.frombuffer(whole.buffers()[1], dtype=np.int32)[len(whole)])
    return memoryview(whole.buffers()[2])[:end]


def _binary(piece: Bytes) -> pa.BinaryArray:
    count, width = piece.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(piece.reshape(-1))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)
