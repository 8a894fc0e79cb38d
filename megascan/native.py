"""Call the compiled part, `native.c`, where there is one; everything has another way without it.

It is built when MegaScan is installed and a C compiler is there (`hatch_build.py`), and loaded by
ctypes, so it fits any Python and lets other threads run. A library that is missing, does not load,
or was made of another text of `native.c` than the one beside it is passed over without a word, and
so is any with MEGASCAN_NATIVE=0.

Each function here is one of C, its arrays allocated and its addresses taken; it returns None for
what it leaves to the other way. Which results both give alike stands in tests/native.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megascan.arrays import Bytes, Flags, Floats, Integers, Words

SWITCH = "MEGASCAN_NATIVE"
SOURCE = Path(__file__).with_suffix(".c")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = SOURCE.with_name(f"libmegascan{SUFFIX}")
"""Not `native.so`: Python would take that for the module of this name."""
_COUNTING = ("count", "room", "join")
"""Functions that return a number of 64 bits; the others return 0 for success."""
_NONE = -1
_MOST_KINDS = 4096
_USUAL_BYTES_A_RUN, _FEWEST_BYTES_A_RUN = 8, 2
Codes = npt.NDArray[np.int32]
_Array = npt.NDArray[Any]


def source_number(source: Path = SOURCE) -> int:
    """Return the number by which a library says which text it was made of."""
    return zlib.crc32(source.read_bytes())


@cache
def library() -> ctypes.CDLL | None:
    """Return the library beside this file: of this version, and not switched off; else None."""
    return None if os.environ.get(SWITCH) == "0" else loaded(LIBRARY)


def loaded(path: Path) -> ctypes.CDLL | None:
    """Load a library; None for one that is not made of the text beside this file."""
    try:
        found = ctypes.CDLL(str(path))
        said = found.megascan_source
        said.restype = ctypes.c_uint32
        if said() != source_number():
            return None
        found.megascan_pack.restype, found.megascan_top.restype = None, ctypes.c_uint64
        for name in _COUNTING:
            getattr(found, f"megascan_{name}").restype = ctypes.c_int64
    except (OSError, AttributeError):
        return None
    return found


def _at(array: _Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.__array_interface__["data"][0])


class _Held(list[_Array]):
    """Arrays that C is to see, laid out as it wants them, for as long as this list is held."""

    def at(self, array: _Array, kind: npt.DTypeLike) -> ctypes.c_void_p:
        """Return the address of an array, or of a copy if it is of another type or has gaps."""
        self.append(np.ascontiguousarray(array, dtype=kind))
        return _at(self[-1])


def _size(number: int) -> ctypes.c_int64:
    return ctypes.c_int64(number)


def blank_separators(text: bytearray) -> tuple[range, Integers] | None:
    """Do what `megascan.reader.lines` says of lines of an array: which hold events, and bounds."""
    if (native := library()) is None:
        return None
    view = np.frombuffer(text, dtype=np.uint8)
    num_lines = native.megascan_count(_at(view), _size(len(view)))
    bounds = np.empty(num_lines + 1, dtype=np.int64)
    rows = np.empty(2, dtype=np.int64)
    sizes = (_size(len(view)), _size(num_lines))
    if native.megascan_lines(_at(view), sizes[0], _at(bounds), sizes[1], _at(rows)):
        return None
    found = range(int(rows[0]), int(rows[1]))
    return found, bounds[found.start : found.stop + 1]


@dataclass(frozen=True)
class Scanned:
    """Lines as digits and what stands around them.

    Lines: `code`, the kind of each, and `first`, its first run of digits, (line + 1,). Runs: their
    `value`, one longer with -1 at the end, and `length`; `zero_run` are those of several digits
    that begin with a zero, in the lines `zero_line`. Kinds, numbered by first appearance: the
    line of each with a mark for every run, and the first such line.
    """

    code: Codes
    first: Integers
    value: Integers
    length: Codes
    zero_run: Integers
    zero_line: Integers
    kinds: list[bytes]
    kind_line: Integers


def scan(text: bytes | bytearray, bounds: Integers) -> Scanned | None:
    """Take the lines text[bounds[i]:bounds[i + 1]] apart."""
    if (native := library()) is None:
        return None
    few = _scanned(native, text, bounds, _USUAL_BYTES_A_RUN)
    return few or _scanned(native, text, bounds, _FEWEST_BYTES_A_RUN)


def _scanned(
    native: ctypes.CDLL, text: bytes | bytearray, bounds: Integers, bytes_a_run: int
) -> Scanned | None:
    """Scan with room for so many runs of digits: what is seldom needed is memory to be cleared."""
    view = np.frombuffer(text, dtype=np.uint8)
    size, num_lines = len(view), len(bounds) - 1
    code, first = np.empty(num_lines, np.int32), np.empty(num_lines + 1, np.int64)
    room = size // bytes_a_run + 2 * num_lines + 4
    value, zero_run, zero_line = (np.empty(room, np.int64) for _ in range(3))
    length, pieces = (np.empty(room, np.int32) for _ in range(2))
    bare, counts = np.empty(size + 8, np.uint8), np.empty(3, np.int64)
    bare_end, kind_line = np.empty((2, _MOST_KINDS), np.int64)
    bounds = np.ascontiguousarray(bounds, dtype=np.int64)
    inputs = (_at(view), _size(size), _at(bounds), _size(num_lines), _size(room))
    lines: tuple[_Array, ...] = (code, first, value, length, zero_run, zero_line)
    kinds: tuple[_Array, ...] = (bare, bare_end, kind_line, pieces, counts)
    if native.megascan_scan(*inputs, *map(_at, (*lines, *kinds))):
        return None
    num_kinds, num_runs, num_zeros = counts.tolist()
    value[num_runs] = _NONE
    ends = bare_end[:num_kinds].tolist()
    words = bare[: ends[-1] if ends else 0].tobytes()
    return Scanned(
        code=code,
        first=first,
        value=value[: num_runs + 1],
        length=length[:num_runs],
        zero_run=zero_run[:num_zeros],
        zero_line=zero_line[:num_zeros],
        kinds=[words[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)],
        kind_line=kind_line[:num_kinds],
    )


class _Lines(ctypes.Structure):
    _fields_ = (
        ("num_lines", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("code", "first", "value", "length")),
    )


class Runs:
    """Lines whose digits become columns; None where only the general parser can tell a value.

    Tables by kind say which run of a line is meant, -1 for none.
    """

    def __init__(self, native: ctypes.CDLL, lines: Scanned) -> None:
        self._native, self._lines = native, lines
        self._num = len(lines.code)
        arrays: tuple[_Array, ...] = (lines.code, lines.first, lines.value, lines.length)
        self._pointer = ctypes.byref(_Lines(self._num, *map(_at, arrays)))

    def integers(
        self, place: Integers, negative: Flags, dtype: np.dtype[np.integer]
    ) -> npt.NDArray[np.integer] | None:
        """Return a column of integers, -1 for none."""
        out, held = np.empty(self._num, dtype), _Held()
        tables = (held.at(place, np.int64), held.at(negative, np.bool_))
        width = ctypes.c_int32(dtype.itemsize)
        unfit = self._native.megascan_integers(self._pointer, *tables, width, _at(out))
        return None if unfit else out

    def decimals(self, whole: Integers, fraction: Integers, negative: Flags) -> Floats | None:
        """Return a column of decimals, NaN for none."""
        out, held = np.empty(self._num, np.float64), _Held()
        tables = (
            *(held.at(each, np.int64) for each in (whole, fraction)),
            held.at(negative, np.bool_),
        )
        missing = ctypes.c_double(np.nan)
        unfit = self._native.megascan_decimals(self._pointer, *tables, missing, _at(out))
        return None if unfit else out

    def texts(
        self, of_kind: Codes, places: Sequence[Sequence[int]]
    ) -> tuple[Codes, Integers] | None:
        """Number a column of texts; those with digits by -1, -2, … and of each its first line.

        `of_kind` is the text of a kind, or where it is < 0 its pattern, whose digits stand at
        `places`.
        """
        begin = np.cumsum([0, *map(len, places)], dtype=np.int64)
        place = np.array([run for each in places for run in each], dtype=np.int64)
        slots = np.zeros(1 << self._num.bit_length() + 1 if len(place) else 1, np.int32)
        out, sample = np.empty(self._num, np.int32), np.empty(self._num + 1, np.int64)
        num, held = np.empty(1, np.int64), _Held()
        tables = (held.at(of_kind, np.int32), _at(begin), _at(place))
        patterns = (ctypes.c_void_p * 3)(*(each.value for each in tables))
        unfit = self._native.megascan_texts(
            self._pointer, patterns, _at(slots), _size(len(slots)), _at(out), _at(sample), _at(num)
        )
        return None if unfit else (out, sample[: num[0]])


def runs_of(lines: Scanned) -> Runs | None:
    """Return what makes columns of lines that `scan` took apart."""
    native = library()
    return None if native is None else Runs(native, lines)


class _Part(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("data", "ends", "values")),
        ("size", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Part:
    """What a row's text is made of: a constant, a fragment, a number or microseconds.

    `values` are by row: which of `fragments` (their texts joined, and where each begins and the
    last ends), or the number, printed with a comma; nanoseconds as microseconds.
    """

    text: bytes = b""
    values: Integers | None = None
    fragments: tuple[Bytes, Codes] | None = None
    in_microseconds: bool = False

    def of_c(self, held: _Held) -> _Part:
        """Return the part as C sees it; it holds while this part and what is held do."""
        if self.values is None:
            data = ctypes.cast(ctypes.c_char_p(self.text), ctypes.c_void_p)
            return _Part(0, data, None, None, len(self.text))
        values = held.at(self.values, np.int64)
        if self.fragments is None:
            return _Part(3 if self.in_microseconds else 2, None, None, values, 0)
        texts, ends = self.fragments
        addresses = (held.at(texts, np.uint8), held.at(ends, np.int32))
        return _Part(1, *addresses, values, len(ends) - 1)


def join(groups: Sequence[tuple[Integers, Sequence[Part]]]) -> memoryview | None:
    """Return the texts of some rows, made of the same parts each, behind those of others."""
    if (native := library()) is None:
        return None
    held = _Held()
    calls = []
    for rows, parts in groups:
        array = (_Part * len(parts))(*(part.of_c(held) for part in parts))
        calls.append((array, _size(len(parts)), held.at(rows, np.int64), _size(len(rows))))
    rooms = [native.megascan_room(*call) for call in calls]
    if _NONE in rooms:
        return None
    out = np.empty(sum(rooms), np.uint8)
    size = 0
    for call in calls:
        size += native.megascan_join(*call, _at(out[size:]))
    return out[:size].data


class _Column(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "at", "width")),
        ("values", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Column:
    """A column of numbers of 64 bits in messages, at a place of some bytes: varint or fixed.

    `rows` say which of the values each message has, if not one after the other.
    """

    values: Words
    rows: Integers | None
    at: int
    width: int
    is_fixed: bool

    def of_c(self, held: _Held) -> _Column:
        """Return the column as C sees it; it holds while what is held does."""
        rows = None if self.rows is None else held.at(self.rows, np.int64)
        values = held.at(self.values, np.uint64)
        return _Column(int(self.is_fixed), self.at, self.width, values, rows)


def top(values: Words, rows: Integers) -> int | None:
    """Return the largest of the values in some rows, 0 of none."""
    if (native := library()) is None:
        return None
    held = _Held()
    addresses = (held.at(values, np.uint64), held.at(rows, np.int64))
    return int(native.megascan_top(*addresses, _size(len(rows))))


def pack(
    shared: bytes, columns: Sequence[Column], num_messages: int, out: Bytes, place: Integers | None
) -> bool:
    """Write messages that are `shared` but for columns of numbers, at places or in a row.

    Returns whether it was done.
    """
    if (native := library()) is None:
        return False
    held = _Held()
    native.megascan_pack(
        (_Column * len(columns))(*(column.of_c(held) for column in columns)),
        _size(len(columns)),
        ctypes.c_char_p(shared),
        _size(len(shared)),
        _size(num_messages),
        None if place is None else held.at(place, np.int64),
        _at(out),
    )
    return True
