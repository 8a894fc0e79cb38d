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

Where the compiled part of the reader is in use, `Scanner` converts digits in the place of
`split_digits` and `Filler`, to the same columns.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import finalize

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Bytes, Flags, Floats, Integers, Words
from megascan.reader.lines import GeneralParser, address, compiled
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import distinct, first_rows, number_type

MOST_DIGITS = 18
"""Longer runs of digits have no value."""
_DIGITS = b"0123456789"
_MARK = b"\1"
_END_MARK = b"\2"
"""Marks in the place of digits and of needless ends; bytes that no JSON contains."""
_WORD_BYTES = 8
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
    """Return a block's digits, and the block's lines with a mark in place of each run of digits.

    The text does not end with a digit, and none is among its first seven bytes.
    """
    view = np.frombuffer(text, dtype=np.uint8)
    is_digit = (view - _ZERO) < _NUM_DIGITS
    edges = np.flatnonzero(is_digit[1:] != is_digit[:-1])
    edges += 1
    begin, end = edges[::2], edges[1::2]
    length = (end - begin).astype(np.int32)
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
        dtype = number_type(kind)
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
        return _dictionary(codes, texts)

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


def _dictionary(codes: npt.NDArray[np.int32], texts: Iterable[str]) -> pa.DictionaryArray:
    indices = pa.Array.from_buffers(pa.int32(), len(codes), [None, pa.py_buffer(codes)])
    return pa.DictionaryArray.from_arrays(indices, pa.array(list(texts), pa.string()), safe=False)


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


_INTEGER, _WHOLE, _FRACTION, _TEXT = 1, 2, 3, 4
_IS_NEGATIVE, _BEGINS_NUMBER, _BEGINS_TEXT, _ENDS_TEXT = 1, 2, 4, 8
"""What becomes of a run of digits, as lines.c has it."""


class _Column(ctypes.Structure):
    """Column of lines.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("most_whole", ctypes.c_uint64),
        ("most_decimals", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("samples", ctypes.c_void_p),
        ("num_samples", ctypes.c_int64),
    )


class _Block(ctypes.Structure):
    """Block of lines.c."""

    _fields_ = (
        ("text", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("bounds", ctypes.c_void_p),
        ("num_lines", ctypes.c_int64),
        ("columns", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("num_kinds", ctypes.c_int64),
    )


class Scanner:
    """Reads lines into columns by lines.c, and holds the kinds of line that it has learned.

    It does what `split_digits` and `Filler` do, for one thread at a time.
    """

    def __init__(self, library: ctypes.CDLL, columns: Sequence[pa.DataType]) -> None:
        self._library, self._columns = library, columns
        self._kinds = library.new_kinds()
        if not self._kinds:
            raise MemoryError
        finalize(self, library.free_kinds, self._kinds)
        self._shapes: list[Shape] = []

    @property
    def has_room(self) -> bool:
        """Return whether it can learn all kinds that a block may have."""
        return len(self._shapes) <= _MOST_SHAPES

    def columns(
        self, text: bytes | bytearray, bounds: Integers, learned: Callable[[int], Shape]
    ) -> list[pa.Array]:
        """Return the columns of lines; `learned` returns the shape of a line of an unknown kind.

        The text does not end with a digit, and none is among its first seven bytes. Raises
        UnfitError for lines that only the general parser can read.
        """
        num = len(bounds) - 1
        view = np.frombuffer(text, dtype=np.uint8)
        bounds = np.ascontiguousarray(bounds, dtype=np.int64)
        code, order = np.empty(num, dtype=np.int32), np.empty(num, dtype=np.int32)
        rooms = [_Room(kind, num) for kind in self._columns]
        columns = (_Column * len(rooms))(*(room.record() for room in rooms))
        lines = (address(view), len(view), address(bounds), num)
        block = _Block(*lines, ctypes.addressof(columns), address(code), address(order), 0)
        line = 0
        while (line := self._library.scan(self._kinds, ctypes.byref(block), line)) < num:
            if line < 0:
                raise UnfitError
            self._learn(bytes(text[bounds[line] : bounds[line + 1]]), learned(line))
        if block.num_kinds > _MOST_SHAPES:
            raise UnfitError
        shapes = [self._shapes[kind] for kind in order[: block.num_kinds].tolist()]
        found = []
        for place, (room, column) in enumerate(zip(rooms, columns, strict=True)):
            if not self._library.is_exact(ctypes.byref(column)):
                raise UnfitError
            texts = [shape.texts[place] for shape in shapes]
            samples = room.samples[: column.num_samples].tolist()
            words = [text[begin:end].decode() for begin, end in samples]
            found.append(room.array(code, texts, words))
        return found

    def _learn(self, line: bytes, shape: Shape) -> None:
        num_runs = len(_RUN.findall(line))
        roles = np.ascontiguousarray(self._roles(shape)[:num_runs])
        if self._library.learn(self._kinds, line, len(line), address(roles), num_runs):
            raise UnfitError
        self._shapes.append(shape)

    def _roles(self, shape: Shape) -> npt.NDArray[np.int32]:
        """Return what becomes of each run of digits, (run, 5): the Role of lines.c."""
        roles = np.zeros((len(shape.is_whole), 5), dtype=np.int32)
        roles[:, 1] = shape.is_whole * _BEGINS_NUMBER
        for column, kind in enumerate(self._columns):
            whole = _WHOLE if pa.types.is_floating(kind) else _INTEGER
            sign = shape.negative[column] * _IS_NEGATIVE
            for run, action in ((shape.whole[column], whole), (shape.fraction[column], _FRACTION)):
                if run > NONE:
                    roles[run] += (action, sign, column, 0, 0)
            text = shape.texts[column]
            if isinstance(text, Pattern):
                before, after = (len(text.pieces[end].encode()) for end in (0, -1))
                roles[list(text.places)] = (_TEXT, 0, column, before, after)
                roles[text.places[0], 1] |= _BEGINS_TEXT
                roles[text.places[-1], 1] |= _ENDS_TEXT
        return roles


class _Room:
    """Room for a column that lines.c fills: its values by line, absent at first, and its texts."""

    def __init__(self, kind: pa.DataType, num_lines: int) -> None:
        self._kind = kind
        self._is_text = pa.types.is_string(kind)
        self._values: npt.NDArray[np.integer | np.float64]
        if self._is_text:
            self._values = np.empty(num_lines, dtype=np.int32)
        else:
            absent = np.nan if pa.types.is_floating(kind) else NOT_APPLICABLE
            self._values = np.full(num_lines, absent, dtype=number_type(kind))
        self._slots = np.zeros(2 << num_lines.bit_length() if self._is_text else 0, dtype=np.int32)
        self.samples = np.empty((num_lines if self._is_text else 0, 2), dtype=np.int64)
        """Begin and end in the block of each text with digits, in the order of first appearance."""

    def record(self) -> _Column:
        """Return the column as lines.c sees it; it is of use as long as this room is held."""
        values = (address(self._values), self._values.itemsize, 0, 0)
        return _Column(*values, address(self._slots), len(self._slots), address(self.samples), 0)

    def array(
        self,
        code: npt.NDArray[np.int32],
        texts: Sequence[str | Pattern],
        words: Sequence[str],
    ) -> pa.Array:
        """Return the column. `texts` are those of each line's kind by `code`; `words` are texts
        with digits.
        """
        if not self._is_text:
            values = self._values
            return pa.Array.from_buffers(self._kind, len(values), [None, pa.py_buffer(values)])
        number: dict[str, int] = {}
        of_kind = [
            number.setdefault(text, len(number)) if isinstance(text, str) else NONE
            for text in texts
        ]
        codes = np.array(of_kind, dtype=np.int32).take(code)
        if words:
            lines = np.flatnonzero(codes == NONE)
            of_word = [number.setdefault(word, len(number)) for word in words]
            codes[lines] = np.array(of_word, dtype=np.int32)[self._values[lines]]
        return _dictionary(codes, number)


_MOST_BYTES = 2**31 - 1
_MOST_SHAPES = 4096
"""With more kinds of line (texts full of other characters), templates are not worth it."""
_RUN, _DIGIT = re.compile(rb"[0-9]+"), re.compile(rb"[0-9]")
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
        self._scanners: list[Scanner] = []

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
        if b"\\" in text or _MARK in text or len(text) > _MOST_BYTES:
            raise UnfitError
        needed, edges = self._needed(text, bounds)
        if _DIGIT.search(needed, 0, _WORD_BYTES - 1) or needed[-1] in _DIGITS:
            raise UnfitError  # a word of digits would begin before the block
        library = compiled()
        if library is None:
            columns = self._filled(needed, edges, text, bounds)
        else:
            columns = self._scanned(library, needed, edges, text, bounds)
        return pa.Table.from_arrays(columns, [".".join(path) for path, _ in self._columns])

    def _filled(
        self, needed: bytes | bytearray, edges: Integers, text: bytes | bytearray, bounds: Integers
    ) -> list[pa.Array]:
        """Return the columns of lines by numpy; their kinds are learned from the whole lines."""
        digits, bare = split_digits(needed, edges)
        encoded = bare.dictionary_encode()
        code = encoded.indices.to_numpy().astype(np.int64)
        kinds = encoded.dictionary.to_pylist()
        if len(kinds) > _MOST_SHAPES:
            raise UnfitError
        shapes = self._shapes_of(kinds, code, text, bounds)
        filler = Filler(shapes, code, digits)
        return [filler.column(place, kind) for place, (_, kind) in enumerate(self._columns)]

    def _scanned(
        self,
        library: ctypes.CDLL,
        needed: bytes | bytearray,
        edges: Integers,
        text: bytes | bytearray,
        bounds: Integers,
    ) -> list[pa.Array]:
        """Return the same columns by compiled code."""

        def learned(line: int) -> Shape:
            kind = _RUN.sub(_MARK, needed[edges[line] : edges[line + 1]])
            return self._shape_of(kind, bytes(text[bounds[line] : bounds[line + 1]]))

        try:
            scanner = self._scanners.pop()
        except IndexError:  # other threads have all of them
            scanner = Scanner(library, [kind for _, kind in self._columns])
        try:
            return scanner.columns(needed, edges, learned)
        finally:
            if scanner.has_room:
                self._scanners.append(scanner)

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
        if any(kind not in self._shapes for kind in kinds):
            for kind, line in zip(kinds, first_rows(code, len(kinds)).tolist(), strict=True):
                self._shape_of(kind, bytes(text[bounds[line] : bounds[line + 1]]))
        return [self._shapes[kind] for kind in kinds]

    def _shape_of(self, kind: bytes, line: bytes) -> Shape:
        """Return the shape of a kind of line, learned from this line of it if it is new."""
        shape = self._shapes.get(kind)
        return shape or self._shapes.setdefault(kind, self._learned(line))

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
