"""Turn lines of events into columns by templates: a trace has only a few kinds of line.

A tracer's lines differ in little but their numbers:

    {"name":"mlp","ts":12.5,"dur":3.25,"args":{"layer":7,"group":"tp@0"}}
    {"name":"mlp","ts":99.125,"dur":3.0,"args":{"layer":8,"group":"tp@0"}}
    {"name":"mlp","ts":#.#,"dur":#.#,"args":{"layer":#,"group":"tp@#"}}    both with digits marked

Lines that are equal but for their digits hold the same keys, texts and types of number. So one line
of each kind is parsed as JSON, with its digits replaced by numbers that tell which digits became
which value (`Shape`); of all other lines only the digits are converted, in bulk (`split_digits`,
`Filler`). That is exact: lines with values that are not an integer, a decimal or a text of the
declared type, or that could be read in two ways, go to the general parser.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Bytes, Flags, Floats, Integers, Words
from megascan.reader.lines import GeneralParser
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import distinct, first_rows

MOST_DIGITS = 18
"""Longer runs of digits have no value."""
_DIGITS = b"0123456789"
_MARK = b"\1"
_END_MARK = b"\2"
"""Marks in the place of digits and of needless ends; bytes that no JSON contains."""
_WORD_BYTES = 8
_LONGEST_WORDS = 24
"""Bytes of the memory words that hold one value. Fewer runs fit into that many bytes, so only the
first so many runs can have words that begin before the block."""
_DIGIT_BITS = np.array(
    [0x0F0F0F0F0F0F0F0F << 8 * (8 - length) & 2**64 - 1 for length in range(9)], dtype=np.uint64
)
_PAIRINGS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
_ZERO, _NUM_DIGITS = np.uint8(48), np.uint8(10)
_NOTHING = np.zeros(1, dtype=np.int32)


class UnfitError(Exception):
    """Lines that only the general parser can read."""


@dataclass(frozen=True)
class Digits:
    """All runs of digits in a block, (run,) each, and the first run of each line, (line + 1,)."""

    value: Integers
    """Value of each run, and NOT_APPLICABLE at the end, where index -1 finds it: (run + 1,)."""
    length: npt.NDArray[np.int32]
    leading_zero: Integers
    """Numbers of the runs of several digits that begin with a zero."""
    first: Integers
    has_long: bool
    """Whether a run is too long to have a value."""


def split_digits(text: bytes | bytearray, bounds: Integers) -> tuple[Digits, pa.BinaryArray]:
    """Return a block's digits, and the block's lines with a mark in place of each run of digits."""
    view = np.frombuffer(text, dtype=np.uint8)
    is_digit = (view - _ZERO) < _NUM_DIGITS
    if is_digit[0] or is_digit[-1] or _MARK in text:
        raise UnfitError
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1])
    edges += 1
    begin, end = edges[::2], edges[1::2]
    length = (end - begin).astype(np.int32)
    if (end < -(-length // _WORD_BYTES) * _WORD_BYTES)[:_LONGEST_WORDS].any():
        raise UnfitError  # a word would begin before the block
    first = np.searchsorted(begin, bounds)
    marked = bytearray(text)
    np.frombuffer(marked, dtype=np.uint8)[end - 1] = _MARK[0]
    removed = np.concatenate((_NOTHING, np.cumsum(length - 1, dtype=np.int32)))
    digits = Digits(
        value=_values(view, end, length),
        length=length,
        leading_zero=np.flatnonzero((view.take(begin) == _ZERO) & (length > 1)),
        first=first,
        has_long=bool(length.max(initial=0) > MOST_DIGITS),
    )
    bare_bounds = bounds.astype(np.int32) - removed.take(first)
    return digits, _pieces(marked.translate(None, _DIGITS), bare_bounds)


def _values(view: Bytes, end: Integers, length: npt.NDArray[np.int32]) -> Integers:
    """Turn runs of digits into integers; values of runs of more than 18 digits have no meaning.

    Eight digits are one word of memory whose bytes are added up in pairs, fours and eights.
    """
    value = np.empty(len(end) + 1, dtype=np.uint64)
    value[-1:].view(np.int64)[:] = NOT_APPLICABLE
    if not len(end):
        return value.view(np.int64)
    words = np.ndarray((len(view) - _WORD_BYTES + 1,), "<u8", view, strides=(1,))
    value[:-1] = _word_values(words[end - _WORD_BYTES], np.minimum(length, _WORD_BYTES))
    for nth in range(1, -(-MOST_DIGITS // _WORD_BYTES)):
        rows = np.flatnonzero(length > nth * _WORD_BYTES)
        if not len(rows):
            break
        left = np.minimum(length[rows] - nth * _WORD_BYTES, _WORD_BYTES)
        word = words[end[rows] - (nth + 1) * _WORD_BYTES]
        value[rows] += _word_values(word, left) * np.uint64(10 ** (nth * _WORD_BYTES))
    return value.view(np.int64)


def _word_values(words: Words, length: npt.NDArray[np.int32]) -> Words:
    """Return the value of the last `length` of eight digits; the first digit is the lowest byte."""
    value = words & _DIGIT_BITS.take(length)
    for bits, mask in _PAIRINGS:
        value = value * np.uint64(10 ** (bits // 8)) + (value >> np.uint64(bits))
        value &= np.uint64(mask)
    return value


NONE = -1
_LARGEST_EXACT = 2**53
_LARGEST_KEY = 2**62
_MOST_DECIMALS = 15
_POWERS = 10 ** np.arange(_MOST_DECIMALS + 1, dtype=np.int64)


@dataclass(frozen=True)
class Pattern:
    """A text with digits: its pieces around the runs of digits that stand at `places`."""

    pieces: tuple[str, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """One kind of line: which of the line's runs of digits make the values of its columns.

    `whole` and `fraction` are the runs of each column's number (NONE: no number, no decimals);
    `texts` are the texts of text columns, "" if absent.
    """

    is_whole: Flags
    """(run,) whether the run begins a number, so that it must have no leading zero."""
    whole: Integers
    fraction: Integers
    negative: Flags
    texts: tuple[str | Pattern, ...]


class Filler:
    """Fills columns from the digits of all lines of a block.

    Absent values are NOT_APPLICABLE among integers, NaN among decimals and "" among texts. Raises
    UnfitError for lines that only the general parser can read.
    """

    def __init__(self, shapes: Sequence[Shape], code: Integers, digits: Digits) -> None:
        self._shapes, self._code, self._digits = shapes, code, digits
        self._first = digits.first[:-1]
        self._whole = np.stack([shape.whole for shape in shapes], axis=1)
        self._fraction = np.stack([shape.fraction for shape in shapes], axis=1)
        self._negative = np.stack([shape.negative for shape in shapes], axis=1)
        self._check_zeros()

    def _check_zeros(self) -> None:
        """Check that no number begins with a zero that another digit follows."""
        runs = self._digits.leading_zero
        line = np.searchsorted(self._digits.first, runs, side="right") - 1
        place = runs - self._digits.first[line]
        size = max(len(shape.is_whole) for shape in self._shapes)
        is_whole = np.zeros((len(self._shapes), size), dtype=np.bool_)
        for number, shape in enumerate(self._shapes):
            is_whole[number, : len(shape.is_whole)] = shape.is_whole
        if is_whole[self._code[line], place].any():
            raise UnfitError

    def column(self, column: int, kind: pa.DataType) -> pa.Array:
        """Return a column of the schema, of type `kind`."""
        if pa.types.is_string(kind):
            return self._texts(column)
        dtype = np.dtype(kind.to_pandas_dtype())
        values: npt.NDArray[np.integer | np.float64]
        if pa.types.is_floating(kind):
            values = self._decimals(column)
        else:
            values = _narrowed(self._integers(column), dtype)
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])

    def _runs(self, place: Integers, lines: Integers | None = None) -> Integers:
        """Return the run of each line; `place` (shape,) is its place in a line, NONE for no run."""
        code, first = self._code, self._first
        if lines is not None:
            code, first = code[lines], first[lines]
        run = place.take(code)
        if place.min() > NONE:
            run += first
            return run
        return np.where(run == NONE, NONE, run + first)

    def _checked(self, runs: Integers) -> Integers:
        """Return `runs`; raise UnfitError if any of them has too many digits."""
        if self._digits.has_long:
            length = self._digits.length[runs]
            if (length[runs > NONE] > MOST_DIGITS).any():
                raise UnfitError
        return runs

    def _integers(self, column: int) -> Integers:
        place = self._whole[column]
        if place.max() == NONE:
            return np.full(len(self._code), NOT_APPLICABLE)
        values: Integers = self._digits.value.take(self._checked(self._runs(place)))
        return self._signed(column, values)

    def _signed(self, column: int, values: Integers, lines: Integers | None = None) -> Integers:
        negative = self._negative[column]
        if negative.any():
            code = self._code if lines is None else self._code[lines]
            values *= (1 - 2 * negative.astype(np.int64)).take(code)
        return values

    def _decimals(self, column: int) -> Floats:
        present = self._whole[column] > NONE
        if present.all():
            return self._fractions(column)
        values = np.full(len(self._code), np.nan)
        lines = np.flatnonzero(present.take(self._code))
        if len(lines):
            values[lines] = self._fractions(column, lines)
        return values

    def _fractions(self, column: int, lines: Integers | None = None) -> Floats:
        """Compute whole.fraction as (whole · 10^n + fraction) / 10^n: exact integers and one
        rounding. Every line, or each of `lines`, has a number.
        """
        scaled = self._digits.value.take(self._checked(self._runs(self._whole[column], lines)))
        decimals = self._checked(self._runs(self._fraction[column], lines))
        length = self._digits.length[decimals]
        fraction = self._digits.value.take(decimals)
        if self._fraction[column].min() == NONE:
            whole_only = decimals == NONE
            length[whole_only], fraction[whole_only] = 0, 0
        most = int(length.max())
        if most > _MOST_DECIMALS or int(scaled.max()) >= _LARGEST_EXACT // 10**most - 1:
            raise UnfitError
        power = _POWERS.take(length)
        scaled *= power
        scaled += fraction
        return self._signed(column, scaled, lines) / power

    def _texts(self, column: int) -> pa.DictionaryArray:
        """Return a text column: by shape, and for texts with digits by these digits, too."""
        texts: dict[str, int] = {}
        patterns: dict[tuple[str, ...], int] = {}
        of_shape = np.array(
            [
                texts.setdefault(text, len(texts))
                if isinstance(text, str)
                else NONE - patterns.setdefault(text.pieces, len(patterns))
                for text in (shape.texts[column] for shape in self._shapes)
            ],
            dtype=np.int32,
        )
        codes = of_shape.take(self._code)
        if patterns:
            lines = np.flatnonzero(codes < 0)
            codes[lines] = self._numbered(column, lines, NONE - codes[lines].astype(int), texts)
        indices = pa.Array.from_buffers(pa.int32(), len(codes), [None, pa.py_buffer(codes)])
        words = pa.array(list(texts), pa.string())
        return pa.DictionaryArray.from_arrays(indices, words, safe=False)

    def _numbered(
        self, column: int, lines: Integers, pattern: Integers, texts: dict[str, int]
    ) -> npt.NDArray[np.int32]:
        """Return codes of the texts with digits in some lines; new texts are added to `texts`."""
        places = [
            text.places if isinstance(text, Pattern) else ()
            for text in (shape.texts[column] for shape in self._shapes)
        ]
        key = pattern
        for nth in range(max(map(len, places))):
            place = np.array([each[nth] if len(each) > nth else NONE for each in places])
            runs = self._checked(self._runs(place, lines))
            length = np.where(runs == NONE, 0, self._digits.length[runs])
            key = _combined(key, self._digits.value[runs] + 1)
            key = _combined(key, length.astype(np.int64))
        code, keys = distinct(key)
        samples = lines[first_rows(code, len(keys))]
        words = [self._text(column, line) for line in samples.tolist()]
        found = [texts.setdefault(word, len(texts)) for word in words]
        return np.array(found, dtype=np.int32)[code]

    def _text(self, column: int, line: int) -> str:
        """Return the text of one line, with its digits."""
        text = self._shapes[self._code[line]].texts[column]
        if isinstance(text, str):
            return text
        runs = [int(self._first[line]) + place for place in text.places]
        digits = [f"{self._digits.value[run]:0{self._digits.length[run]}d}" for run in runs]
        return "".join(map("".join, zip(text.pieces, [*digits, ""], strict=True)))


def _narrowed(values: Integers, dtype: np.dtype[np.integer]) -> npt.NDArray[np.integer]:
    if dtype == np.int64 or not len(values):
        return values.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise UnfitError
    return values.astype(dtype)


def _combined(key: Integers, values: Integers) -> Integers:
    """Return one number for each pair of numbers ≥ 0."""
    most = int(values.max()) + 1
    if int(key.max()) + 1 >= _LARGEST_KEY // most:
        key, values = distinct(key)[0], distinct(values)[0]
        most = int(values.max()) + 1
    return key * most + values


_MOST_BYTES = 2**31 - 1
_MOST_SHAPES = 4096
"""With more kinds of line (texts full of other characters), templates are not worth it."""
_RUN = re.compile(rb"[0-9]+")
_DIGITS_IN_TEXT = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"(-?)([0-9]+)(?:\.([0-9]+))?")
_CONTINUES = re.compile(rb"(\.|[eE][+-]?)\Z")


class Templates:
    """Line parser that learns the shapes of lines as it meets them. Any thread may use it.

    Tables are flat (`args.layer` is a column), and texts dictionary-encoded. Nothing is null:
    absent values are "" among texts, NOT_APPLICABLE among integers and NaN among decimals. Lines
    that fit no template go to Arrow's parser. `needless` may describe JSON at the end of lines,
    from a comma on, that no column needs and that most lines of a block share to the byte: it is
    read in the lines from which shapes are learned, and left out of all others.
    """

    def __init__(self, schema: pa.Schema, needless: re.Pattern[bytes] | None = None) -> None:
        self._columns = tuple(_flat(schema))
        self._needless = needless
        self._general = GeneralParser(schema)
        self._shapes: dict[bytes, Shape] = {}

    def table(self, text: bytes | bytearray, bounds: Integers) -> pa.Table | None:
        """Return columns of lines, as LineParser says."""
        try:
            return self._parsed(text, bounds)
        except (UnfitError, pa.ArrowInvalid, orjson.JSONDecodeError):
            table = self._general.table(text, bounds)
            return None if table is None else self._flattened(table)

    def empty(self) -> pa.Table:
        """Return columns without rows."""
        return self._flattened(self._general.empty())

    def _flattened(self, table: pa.Table) -> pa.Table:
        flat = table.flatten()
        names = flat.column_names
        return pa.Table.from_arrays([_without_nulls(column) for column in flat.columns], names)

    def _parsed(self, text: bytes | bytearray, bounds: Integers) -> pa.Table:
        if b"\\" in text or len(text) > _MOST_BYTES:
            raise UnfitError
        digits, bare = split_digits(*self._needed(text, bounds))
        encoded = bare.dictionary_encode()
        code = encoded.indices.to_numpy().astype(np.int64)
        kinds = encoded.dictionary.to_pylist()
        if len(kinds) > _MOST_SHAPES:
            raise UnfitError
        shapes = self._shapes_of(kinds, code, text, bounds)
        filler = Filler(shapes, code, digits)
        columns = [filler.column(place, kind) for place, (_, kind) in enumerate(self._columns)]
        return pa.Table.from_arrays(columns, [".".join(path) for path, _ in self._columns])

    def _needed(
        self, text: bytes | bytearray, bounds: Integers
    ) -> tuple[bytes | bytearray, Integers]:
        """Return the text of a block, and the bounds of its lines, with a mark in the place of what
        is needless in most lines.
        """
        end = None if self._needless is None else _common_end(text, bounds, self._needless)
        if end is None:
            return text, bounds
        if _END_MARK in text:
            raise UnfitError
        edges = bounds.astype(np.int32)
        lines = _pieces(text, edges)
        has_end = pc.ends_with(lines, end).to_numpy(zero_copy_only=False)
        cuts = np.empty(2 * len(lines) + 1, dtype=np.int32)
        cuts[::2] = edges
        cuts[1::2] = edges[1:] - has_end * np.int32(len(end) - 1)
        needed = _pieces(text, cuts).take(pa.array(np.arange(0, len(cuts) - 1, 2, dtype=np.int32)))
        _, offsets, content = needed.buffers()
        edges = np.frombuffer(offsets, dtype=np.int32)[: len(bounds)]
        rest = bytearray(memoryview(content)[: edges[-1]])
        np.frombuffer(rest, dtype=np.uint8)[edges[1:][has_end] - 1] = _END_MARK[0]
        return rest, edges.astype(np.int64)

    def _shapes_of(
        self, kinds: Sequence[bytes], code: Integers, text: bytes | bytearray, bounds: Integers
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
        """Return the shape of a line's kind, learned from one line."""
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


_MOST_LINES_SEARCHED = 4


def _common_end(
    text: bytes | bytearray, bounds: Integers, pattern: re.Pattern[bytes]
) -> bytes | None:
    """Return what a pattern finds at the end of one of the first lines; None if it finds nothing.

    Only the first line that it finds something in is looked at: other lines may end in another way.
    """
    for begin, end in pairwise(bounds[: _MOST_LINES_SEARCHED + 1].tolist()):
        found = pattern.search(text, begin, end)
        if found is not None:
            return found[0]
    return None


def _pieces(text: bytes | bytearray, bounds: npt.NDArray[np.int32]) -> pa.BinaryArray:
    """Return text[bounds[i]:bounds[i + 1]], without copies."""
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


@dataclass(frozen=True)
class _Number:
    """The runs of digits before and after a number's decimal point; NONE if absent."""

    whole: int = NONE
    fraction: int = NONE
    negative: bool = False


class _Marks:
    """Replaces run i of digits by i + 1 and a digit 1, so that no decimal ends in a zero."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, _: re.Match[bytes]) -> bytes:
        self._count += 1
        return b"%d1" % self._count


def _place(mark: str) -> int:
    return int(mark[:-1]) - 1


def _begins_number(line: bytes, begin: int) -> bool:
    """Return whether digits begin a number: not in a text, not after a point or exponent."""
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
    """Return how a column's value is made of marks."""
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
    """Return the paths and types of all columns; fields of a struct take the struct's place."""
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
