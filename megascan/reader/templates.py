"""Lines of events to columns by template: the few sorts of line that a trace is made of.

A tracer's lines differ in little but their numbers:

    {"name":"mlp","ts":12.5,"dur":3.25,"args":{"layer":7,"group":"tp@0"}}
    {"name":"mlp","ts":99.125,"dur":3.0,"args":{"layer":8,"group":"tp@0"}}
    {"name":"mlp","ts":.,"dur":.,"args":{"layer":,"group":"tp@"}}          both without digits

Lines that are equal without their digits, and have their digits in the same places, hold the same
keys, texts and kinds of number. So one line of each sort is parsed as JSON, with its numbers
replaced by marks that tell which number of the line became which value; all other lines are
columns of digits that Arrow converts in bulk. That is exact: what is not an integer, a decimal or
a text of the declared type, or could be read in two ways, is left to the general parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from megascan.reader.lines import Bounds, GeneralParser

Integers = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

_DIGITS = b"0123456789"
_MOST_BYTES = 2**31 - 1
_MOST_SHAPES = 4096
"""Lines of more sorts than this (texts full of other characters) are not worth templates."""
_LARGEST_EXACT = 2**53
_MOST_DIGITS = 18
_NO_VALUE = np.uint64(2**64 - 1)
_WORD_BYTES = 8
_LONGEST_WORDS = 24
"""Bytes of the words that hold a value, and more than the runs that can stand in so many bytes."""
_DIGIT_BITS = np.array(
    [0x0F0F0F0F0F0F0F0F << 8 * (8 - length) & 2**64 - 1 for length in range(9)], dtype=np.uint64
)
_PAIRINGS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
_MOST_DECIMALS = 15
_POWERS = 10 ** np.arange(_MOST_DECIMALS + 1, dtype=np.int64)
_RUN = re.compile(rb"[0-9]+")
_DIGITS_IN_TEXT = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?")
_CONTINUES = re.compile(rb"(\.|[eE][+-]?)\Z")
_ZERO, _NUM_DIGITS = np.uint8(48), np.uint8(10)
_NOTHING = np.zeros(1, dtype=np.int32)
NONE = -1


class UnfitError(Exception):
    """These lines are for the general parser."""


@dataclass(frozen=True)
class _Leaf:
    """Where a column's value stands in lines of one shape.

    A number has the place of its digits, and of those behind the point; a text has `pieces`
    around the places of digits inside it.
    """

    whole: int = NONE
    fraction: int = NONE
    negative: bool = False
    pieces: tuple[str, ...] = ()
    places: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Shape:
    """One sort of line: where its digits stand among its other characters, and its columns."""

    place: Positions
    is_whole: Flags
    """Which of its digits begin a number, so that no zero may lead."""
    leaves: tuple[_Leaf | None, ...]


@dataclass(frozen=True)
class _Digits:
    """All runs of digits in a block, (run,) each, and the first run of each line, (line + 1,)."""

    value: Integers
    length: Positions
    place: Positions
    """Characters of its line, digits left out, before the run."""
    leads_with_zero: Flags
    first: Positions


class Templates:
    """Line parser that learns the shapes of lines as it meets them. Any thread may use it.

    Its tables are flat (`args.layer` is a column), their texts dictionary-encoded and "" where
    absent; absent numbers are null. What fits no template goes to Arrow's parser.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = tuple(_flat(schema))
        self._general = GeneralParser(schema)
        self._shapes: dict[bytes, _Shape] = {}

    def table(self, text: bytes | bytearray, bounds: Bounds) -> pa.Table | None:
        """Columns of lines, as LineParser says."""
        try:
            return self._parsed(text, bounds)
        except (UnfitError, pa.ArrowInvalid, orjson.JSONDecodeError):
            table = self._general.table(text, bounds)
            return None if table is None else self._flattened(table)

    def empty(self) -> pa.Table:
        """Columns without rows."""
        return self._flattened(self._general.empty())

    def _flattened(self, table: pa.Table) -> pa.Table:
        flat = table.flatten()
        names = flat.column_names
        return pa.Table.from_arrays([_encoded(column) for column in flat.columns], names)

    def _parsed(self, text: bytes | bytearray, bounds: Bounds) -> pa.Table:
        if b"\\" in text or len(text) > _MOST_BYTES:
            raise UnfitError
        digits, bare = _split(text, bounds.astype(np.int32))
        encoded = bare.dictionary_encode()
        code = np.asarray(encoded.indices)
        kinds = encoded.dictionary.to_pylist()
        if len(kinds) > _MOST_SHAPES:
            raise UnfitError
        shapes = self._shapes_of(kinds, code, text, bounds)
        _check(digits, shapes, code)
        filler = _Filler(shapes, code, digits)
        columns = [filler.column(place, kind) for place, (_, kind) in enumerate(self._columns)]
        return pa.Table.from_arrays(columns, [".".join(path) for path, _ in self._columns])

    def _shapes_of(
        self, kinds: Sequence[bytes], code: Positions, text: bytes | bytearray, bounds: Bounds
    ) -> list[_Shape]:
        known = [self._shapes.get(kind) for kind in kinds]
        if None in known:
            first = np.zeros(len(kinds), dtype=np.int64)
            first[code[::-1]] = np.arange(len(code))[::-1]
            for place, kind in enumerate(kinds):
                if known[place] is None:
                    line = bytes(text[bounds[first[place]] : bounds[first[place] + 1]])
                    known[place] = self._shapes.setdefault(kind, self._learned(line))
        return [shape for shape in known if shape is not None]

    def _learned(self, line: bytes) -> _Shape:
        """A sort of line from one that is of it."""
        runs = [run.span() for run in _RUN.finditer(line)]
        marked = _RUN.sub(_Marks(), line)
        record = orjson.loads(marked)
        if not isinstance(record, dict):
            raise UnfitError
        length = np.array([end - begin for begin, end in runs], dtype=np.int32)
        begin = np.array([begin for begin, _ in runs], dtype=np.int32)
        return _Shape(
            place=begin - (np.cumsum(length) - length).astype(np.int32),
            is_whole=np.array([_begins_number(line, begin) for begin, _ in runs], dtype=np.bool_),
            leaves=tuple(_leaf(_value(record, path), kind) for path, kind in self._columns),
        )


class _Marks:
    """Replaces the digits at place i by the number (i + 1)1, which as a decimal loses no zero."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, _: re.Match[bytes]) -> bytes:
        self._count += 1
        return b"%d1" % self._count


def _place(mark: str) -> int:
    return int(mark[:-1]) - 1


def _begins_number(line: bytes, begin: int) -> bool:
    """Whether digits are the first of a number: not in a text, not behind a point or exponent."""
    before = line[:begin]
    return before.count(b'"') % 2 == 0 and _CONTINUES.search(before) is None


def _value(record: dict[str, object], path: Sequence[str]) -> object:
    value: object = record
    for key in path:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UnfitError
        value = value.get(key)
    return value


def _leaf(value: object, kind: pa.DataType) -> _Leaf | None:
    """How a value came from marks; None where there is none."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        if not isinstance(value, str):
            raise UnfitError
        return _Leaf(
            pieces=tuple(_DIGITS_IN_TEXT.split(value)),
            places=tuple(_place(mark) for mark in _DIGITS_IN_TEXT.findall(value)),
        )
    number = _NUMBER.fullmatch(repr(value))
    if number is None or (number[3] and not pa.types.is_floating(kind)):
        raise UnfitError
    return _Leaf(
        whole=_place(number[2]),
        fraction=_place(number[3]) if number[3] else NONE,
        negative=bool(number[1]),
    )


def _split(text: bytes | bytearray, bounds: Positions) -> tuple[_Digits, pa.BinaryArray]:
    """A block's digits, and its lines without them."""
    view = np.frombuffer(text, dtype=np.uint8)
    is_digit = (view - _ZERO) < _NUM_DIGITS
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1]).astype(np.int32) + 1
    if is_digit[0] or is_digit[-1]:
        raise UnfitError
    begin, end = edges[::2], edges[1::2]
    length = end - begin
    if (end < -(-length // _WORD_BYTES) * _WORD_BYTES)[:_LONGEST_WORDS].any():
        raise UnfitError  # a word would begin before the block
    removed = np.concatenate((_NOTHING, np.cumsum(length, dtype=np.int32)))
    first = np.searchsorted(begin, bounds).astype(np.int32)
    bare_bounds = bounds - removed[first]
    digits = _Digits(
        value=_values(view, end, length),
        length=length,
        place=begin - removed[:-1] - np.repeat(bare_bounds[:-1], np.diff(first)),
        leads_with_zero=(view[begin] == _ZERO) & (length > 1),
        first=first,
    )
    buffers = [None, pa.py_buffer(bare_bounds), pa.py_buffer(text.translate(None, _DIGITS))]
    return digits, pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def _values(view: npt.NDArray[np.uint8], end: Positions, length: Positions) -> Integers:
    """Runs of digits as integers, NONE for those of more than 18 digits.

    Eight digits are one word of memory whose bytes are added up in pairs, fours and eights.
    """
    if not len(end):
        return np.zeros(0, dtype=np.int64)
    words = np.ndarray((len(view) - _WORD_BYTES + 1,), "<u8", view, strides=(1,))
    value = _word_values(words[end - _WORD_BYTES], np.minimum(length, _WORD_BYTES))
    for nth in range(1, -(-_MOST_DIGITS // _WORD_BYTES)):
        rows = np.flatnonzero(length > nth * _WORD_BYTES)
        if not len(rows):
            break
        left = np.minimum(length[rows] - nth * _WORD_BYTES, _WORD_BYTES)
        word = words[end[rows] - (nth + 1) * _WORD_BYTES]
        value[rows] += _word_values(word, left) * np.uint64(10 ** (nth * _WORD_BYTES))
    value[length > _MOST_DIGITS] = _NO_VALUE
    return value.view(np.int64)


def _word_values(words: npt.NDArray[np.uint64], length: Positions) -> npt.NDArray[np.uint64]:
    """Value of the last `length` of eight digits, the first one in the lowest byte."""
    value = words & _DIGIT_BITS[length]
    for bits, mask in _PAIRINGS:
        value = value * np.uint64(10 ** (bits // 8)) + (value >> np.uint64(bits))
        value &= np.uint64(mask)
    return value


def _check(digits: _Digits, shapes: Sequence[_Shape], code: Positions) -> None:
    """Raise UnfitError unless every line has its digits where its shape has them."""
    count = np.array([len(shape.place) for shape in shapes], dtype=np.int32)
    expected = count[code]
    if not np.array_equal(np.diff(digits.first), expected):
        raise UnfitError
    start = np.cumsum(count, dtype=np.int32) - count
    row = np.repeat(start[code] - digits.first[:-1], expected)
    row += np.arange(digits.first[0], digits.first[-1], dtype=np.int32)
    if not np.array_equal(np.concatenate([shape.place for shape in shapes])[row], digits.place):
        raise UnfitError
    if np.concatenate([shape.is_whole for shape in shapes])[row[digits.leads_with_zero]].any():
        raise UnfitError


class _Filler:
    """Fills columns from the digits of all lines of a block."""

    def __init__(self, shapes: Sequence[_Shape], code: Positions, digits: _Digits) -> None:
        self._shapes, self._code, self._digits = shapes, code, digits

    def column(self, number: int, kind: pa.DataType) -> pa.Array:
        """A column of the schema; null, or "", where a line has no value."""
        leaves = [shape.leaves[number] for shape in self._shapes]
        if pa.types.is_string(kind):
            return self._texts(leaves)
        if not any(leaves):
            return pa.nulls(len(self._code), kind)
        whole, missing = self._wholes(leaves)
        values: npt.NDArray[np.int64 | np.float64] = whole
        if pa.types.is_floating(kind):
            values = self._decimals(leaves, whole)
        negative = np.array([leaf is not None and leaf.negative for leaf in leaves])
        if negative.any():
            values = np.where(negative[self._code], -values, values)
        return pa.array(values, mask=missing).cast(kind)

    def _runs(
        self, place: Positions, lines: Integers | slice = slice(None)
    ) -> tuple[Positions, Flags]:
        """Row of `digits` of each line, given its place by shape; 0 where the place is NONE."""
        row = place[self._code[lines]]
        missing = row < 0
        row += self._digits.first[:-1][lines]
        row[missing] = 0
        return row, missing

    def _wholes(self, leaves: Sequence[_Leaf | None]) -> tuple[Integers, Flags | None]:
        place = np.array([leaf.whole if leaf else NONE for leaf in leaves], dtype=np.int32)
        row, missing = self._runs(place)
        values = self._digits.value[row]
        if ((values < 0) & ~missing).any():
            raise UnfitError
        return values, missing if missing.any() else None

    def _decimals(self, leaves: Sequence[_Leaf | None], whole: Integers) -> npt.NDArray[np.float64]:
        """whole.fraction as (whole · 10^n + fraction) / 10^n: exact integers and one rounding."""
        place = np.array([leaf.fraction if leaf else NONE for leaf in leaves], dtype=np.int32)
        row, missing = self._runs(place)
        length = np.where(missing, 0, self._digits.length[row])
        if length.max(initial=0) > _MOST_DECIMALS:
            raise UnfitError
        power = _POWERS[length]
        scaled = whole * power + np.where(missing, 0, self._digits.value[row])
        if (whole > _LARGEST_EXACT // power - 1).any():
            raise UnfitError
        return scaled / power

    def _texts(self, leaves: Sequence[_Leaf | None]) -> pa.DictionaryArray:
        """Texts without digits are as many as shapes; those with digits are told apart by them."""
        texts: dict[str, int] = {}
        patterns: dict[tuple[str, ...], int] = {}
        of_shape = np.zeros(len(leaves), dtype=np.int32)
        for shape, leaf in enumerate(leaves):
            if leaf is not None and leaf.places:
                of_shape[shape] = NONE - patterns.setdefault(leaf.pieces, len(patterns))
            else:
                text = "".join(leaf.pieces) if leaf else ""
                of_shape[shape] = texts.setdefault(text, len(texts))
        codes = of_shape[self._code]
        if patterns:
            lines = np.flatnonzero(codes < 0)
            codes[lines] = self._numbered(leaves, lines, NONE - codes[lines], texts)
        return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(list(texts), pa.string()))

    def _numbered(
        self,
        leaves: Sequence[_Leaf | None],
        lines: Integers,
        pattern: Positions,
        texts: dict[str, int],
    ) -> Positions:
        """Codes of texts that hold digits, new ones added to `texts`."""
        key: npt.NDArray[np.integer] = pattern
        most = max(len(leaf.places) for leaf in leaves if leaf is not None)
        for nth in range(most):
            place = np.array(
                [leaf.places[nth] if leaf and len(leaf.places) > nth else NONE for leaf in leaves],
                dtype=np.int32,
            )
            row, missing = self._runs(place, lines)
            value = _dense(np.where(missing, NONE, self._digits.value[row]))
            length = np.where(missing, 0, self._digits.length[row])
            if length.max() > _MOST_DIGITS:
                raise UnfitError
            key = _dense((_dense(key) * len(lines) + value) * (_MOST_DIGITS + 1) + length)
        _, sample, code = np.unique(key, return_index=True, return_inverse=True)
        found = [texts.setdefault(self._text(leaves, line), len(texts)) for line in lines[sample]]
        return np.array(found, dtype=np.int32)[code]

    def _text(self, leaves: Sequence[_Leaf | None], line: int) -> str:
        """The text of one line."""
        leaf = leaves[self._code[line]] or _Leaf(pieces=("",))
        rows = [self._digits.first[line] + place for place in leaf.places]
        digits = [f"{self._digits.value[row]:0{self._digits.length[row]}d}" for row in rows]
        return "".join(map("".join, zip(leaf.pieces, [*digits, ""], strict=True)))


def _dense(values: npt.NDArray[np.integer]) -> Integers:
    """Numbered from 0 in the order of their first use."""
    return np.asarray(pa.array(values).dictionary_encode().indices, dtype=np.int64)


def _flat(schema: pa.Schema | pa.StructType) -> list[tuple[tuple[str, ...], pa.DataType]]:
    """Columns with their paths, those of structs in the place of the struct."""
    found: list[tuple[tuple[str, ...], pa.DataType]] = []
    for field in schema:
        if pa.types.is_struct(field.type):
            found += [((field.name, *path), kind) for path, kind in _flat(field.type)]
        else:
            found.append(((field.name,), field.type))
    return found


def _encoded(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty table keeps its chunks
        array = pa.array([], column.type)
    return array.fill_null("").dictionary_encode() if pa.types.is_string(array.type) else array
