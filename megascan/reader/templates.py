"""Lines of events to columns by template: the few sorts of line that a trace is made of.

A tracer's lines differ in little but their numbers:

    {"name":"mlp","ts":12.5,"dur":3.25,"args":{"layer":7,"group":"tp@0"}}
    {"name":"mlp","ts":99.125,"dur":3.0,"args":{"layer":8,"group":"tp@0"}}
    {"name":"mlp","ts":#.#,"dur":#.#,"args":{"layer":#,"group":"tp@#"}}    both with digits marked

Lines that are equal but for their digits hold the same keys, texts and kinds of number. So one
line of each sort is parsed as JSON, with its numbers replaced by others that tell which number of
the line became which value; all other lines are columns of digits that are converted in bulk. That
is exact: what is not an integer, a decimal or a text of the declared type, or could be read in two
ways, is left to the general parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa

from megascan.reader.digits import Integers, UnfitError, split_digits
from megascan.reader.filling import NONE, Filler, Pattern, Shape
from megascan.reader.lines import Bounds, GeneralParser
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import first_rows

_MOST_BYTES = 2**31 - 1
_MOST_SHAPES = 4096
"""Lines of more sorts than this (texts full of other characters) are not worth templates."""
_RUN = re.compile(rb"[0-9]+")
_DIGITS_IN_TEXT = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?")
_CONTINUES = re.compile(rb"(\.|[eE][+-]?)\Z")


class Templates:
    """Line parser that learns the shapes of lines as it meets them. Any thread may use it.

    Its tables are flat (`args.layer` is a column), their texts dictionary-encoded. Nothing is null:
    what is absent is "" among texts, NOT_APPLICABLE among integers and NaN among decimals. What
    fits no template goes to Arrow's parser.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = tuple(_flat(schema))
        self._general = GeneralParser(schema)
        self._shapes: dict[bytes, Shape] = {}

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
        return pa.Table.from_arrays([_without_nulls(column) for column in flat.columns], names)

    def _parsed(self, text: bytes | bytearray, bounds: Bounds) -> pa.Table:
        if b"\\" in text or len(text) > _MOST_BYTES:
            raise UnfitError
        digits, bare = split_digits(text, bounds)
        encoded = bare.dictionary_encode()
        code = encoded.indices.to_numpy().astype(np.int64)
        kinds = encoded.dictionary.to_pylist()
        if len(kinds) > _MOST_SHAPES:
            raise UnfitError
        shapes = self._shapes_of(kinds, code, text, bounds)
        filler = Filler(shapes, code, digits)
        columns = [filler.column(place, kind) for place, (_, kind) in enumerate(self._columns)]
        return pa.Table.from_arrays(columns, [".".join(path) for path, _ in self._columns])

    def _shapes_of(
        self, kinds: Sequence[bytes], code: Integers, text: bytes | bytearray, bounds: Bounds
    ) -> list[Shape]:
        known = [self._shapes.get(kind) for kind in kinds]
        if None in known:
            first = first_rows(code, len(kinds))
            for place, kind in enumerate(kinds):
                if known[place] is None:
                    line = bytes(text[bounds[first[place]] : bounds[first[place] + 1]])
                    known[place] = self._shapes.setdefault(kind, self._learned(line))
        return [shape for shape in known if shape is not None]

    def _learned(self, line: bytes) -> Shape:
        """A sort of line from one that is of it."""
        runs = [run.span() for run in _RUN.finditer(line)]
        marked = _RUN.sub(_Marks(), line)
        record = orjson.loads(marked)
        if not isinstance(record, dict):
            raise UnfitError
        leaves = [_leaf(_value(record, path), kind) for path, kind in self._columns]
        numbers = [leaf if isinstance(leaf, _Number) else _Number() for leaf in leaves]
        return Shape(
            is_whole=np.array([_begins_number(line, begin) for begin, _ in runs], dtype=np.bool_),
            whole=np.array([number.whole for number in numbers]),
            fraction=np.array([number.fraction for number in numbers]),
            negative=np.array([number.negative for number in numbers]),
            texts=tuple("" if isinstance(leaf, _Number) else leaf for leaf in leaves),
        )


@dataclass(frozen=True)
class _Number:
    """The runs of digits that make a number; NONE where there is none."""

    whole: int = NONE
    fraction: int = NONE
    negative: bool = False


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


def _leaf(value: object, kind: pa.DataType) -> _Number | str | Pattern:
    """How a value came from marks."""
    if value is None:
        return "" if pa.types.is_string(kind) else _Number()
    if pa.types.is_string(kind):
        if not isinstance(value, str):
            raise UnfitError
        places = tuple(_place(mark) for mark in _DIGITS_IN_TEXT.findall(value))
        return Pattern(tuple(_DIGITS_IN_TEXT.split(value)), places) if places else value
    number = _NUMBER.fullmatch(repr(value)) if isinstance(value, int | float) else None
    if number is None or (number[3] and not pa.types.is_floating(kind)):
        raise UnfitError
    return _Number(
        whole=_place(number[2]),
        fraction=_place(number[3]) if number[3] else NONE,
        negative=bool(number[1]),
    )


def _flat(schema: pa.Schema | pa.StructType) -> list[tuple[tuple[str, ...], pa.DataType]]:
    """Columns with their paths, those of structs in the place of the struct."""
    found: list[tuple[tuple[str, ...], pa.DataType]] = []
    for field in schema:
        if pa.types.is_struct(field.type):
            found += [((field.name, *path), kind) for path, kind in _flat(field.type)]
        else:
            found.append(((field.name,), field.type))
    return found


def _without_nulls(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # an empty table keeps its chunks
        array = pa.array([], column.type)
    if pa.types.is_string(array.type):
        return array.fill_null("").dictionary_encode()
    return array.fill_null(np.nan if pa.types.is_floating(array.type) else NOT_APPLICABLE)
