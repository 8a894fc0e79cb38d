"""Frames: a JSON header and raw arrays, in files and on the way to the page.

    u32 size of what follows, u32 size of the header, header (UTF-8, blanks up to 8 bytes), arrays

All numbers are little-endian. The header's `arrays` names each array with shape and type (f2, f4,
i4). A file is frames one after the other; a last frame that is cut short was not finished.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megascan.errors import InputError

Array = npt.NDArray[Any]
_SIZES = struct.Struct("<II")
_TYPES: Mapping[str, np.dtype[Any]] = {
    "f2": np.dtype("<f2"),
    "f4": np.dtype("<f4"),
    "i4": np.dtype("<i4"),
}
LARGEST_FRAME = 1 << 28
LARGEST_HEADER = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame that was read: the header, and the arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, Array]


def encode(header: Mapping[str, object], arrays: Mapping[str, Array] | None = None) -> bytes:
    """Return a frame's bytes. Arrays of floats become f4 unless they are f2; all others i4."""
    described, blobs = [], []
    with np.errstate(over="ignore"):
        for name, array in (arrays or {}).items():
            kind = _type_for(array)
            made = np.ascontiguousarray(array, dtype=_TYPES[kind])
            described.append({"name": name, "shape": list(array.shape), "type": kind})
            blobs.append(made.tobytes() + b"\0" * (-made.nbytes % 8))
    text = orjson.dumps({**header, "arrays": described}, option=orjson.OPT_NON_STR_KEYS)
    text += b" " * (-len(text) % 8)
    return _SIZES.pack(4 + len(text) + sum(map(len, blobs)), len(text)) + text + b"".join(blobs)


def _type_for(array: Array) -> str:
    if array.dtype == np.float16:
        return "f2"
    return "f4" if array.dtype.kind == "f" else "i4"


def decode(content: bytes | memoryview) -> Frame:
    """Read one whole frame; InputError when it is damaged."""
    if len(content) < _SIZES.size:
        raise InputError("a frame is cut short")
    size, header_size = _SIZES.unpack_from(content)
    if size + 4 != len(content) or not 0 < header_size <= min(size - 4, LARGEST_HEADER):
        raise InputError("a frame's sizes do not fit together")
    try:
        header = json.loads(bytes(content[8 : 8 + header_size]))
        arrays = dict(_arrays(header, memoryview(content)[8 + header_size :]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"a frame is damaged ({error})") from error
    return Frame(header=header, arrays=arrays)


def _arrays(header: Mapping[str, Any], body: memoryview) -> Iterator[tuple[str, Array]]:
    start = 0
    for described in header["arrays"]:
        kind, shape = _TYPES[described["type"]], [int(size) for size in described["shape"]]
        if min(shape, default=1) < 0:
            raise ValueError("a negative size")
        size = math.prod(shape) * kind.itemsize
        if start + size > len(body):
            raise ValueError("an array goes beyond the frame")
        yield described["name"], np.frombuffer(body[start : start + size], kind).reshape(shape)
        start += size + (-size % 8)


def whole_frames(content: bytes, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the whole frames in a file's bytes; InputError for other bytes."""
    while start + _SIZES.size <= len(content):
        size, header_size = _SIZES.unpack_from(content, start)
        if not 4 < size <= LARGEST_FRAME or header_size + 4 > size:
            raise InputError(f"byte {start} begins no frame")
        if start + 4 + size > len(content):
            return
        yield start, start + 4 + size
        start += 4 + size
