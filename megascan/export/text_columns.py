"""Text of whole columns at once, for writers of JSON.

Numbers come from orjson, which prints a numpy array ten times faster than a cast to strings: the
printed array is taken as the data of an Arrow string column whose entries end behind each comma.
Columns with few values become fragments: the text of each combination of values that occurs is
made once and then taken by code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from megascan.schema import NOT_APPLICABLE, Column
from megascan.timeline import codes, distinct, numbers

Integers = npt.NDArray[np.int64]

_MOST_CODES = 1 << 16
"""Combined columns have at most this many codes, so that counting them stays cheap."""


def number_texts(values: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> pa.StringArray:
    """Numbers as JSON, each followed by a comma. Floats must be finite."""
    printed = bytearray(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))
    if not len(values):
        return pa.array([], pa.string())
    printed[-1] = ord(",")
    data = np.frombuffer(printed, dtype=np.uint8)
    offsets = np.empty(len(values) + 1, dtype=np.int32)
    offsets[0] = 1  # behind the opening bracket
    offsets[1:] = np.flatnonzero(data == ord(",")) + 1
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(printed))


def microsecond_texts(values_ns: Integers) -> pa.StringArray:
    """Nanoseconds as microseconds with up to three decimals, exact below 50 days."""
    return number_texts(values_ns / 1000.0)


@dataclass(frozen=True)
class Coded:
    """A column of few values: `codes` in 0…num_codes-1, and the text of a code."""

    codes: Integers
    num_codes: int
    text_of: Callable[[int], str]


def coded_numbers(values: Integers, text_of: Callable[[int], str]) -> Coded:
    """Code a column of integers by its distance from the smallest, or by its distinct values."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low < _MOST_CODES:
        return Coded(values - low, high - low + 1, lambda code: text_of(code + low))
    code, found = distinct(values)
    known = found.tolist()
    return Coded(code, len(known), lambda code: text_of(known[code]))


def coded_texts(table: pa.Table, name: str, template: str) -> Coded:
    """A text column as JSON strings, each put into the template's braces."""
    code, texts = codes(table, name)
    quoted = [template.format(orjson.dumps(text).decode()) for text in texts]
    return Coded(code, max(len(texts), 1), lambda number: quoted[number])


def coded_argument(table: pa.Table, column: Column) -> Coded:
    """A column of few values as `"name":value,`; nothing where it does not apply."""
    if column.type == "text":
        code, texts = codes(table, column.name)
        quoted = [
            f'"{column.name}":{orjson.dumps(text).decode()},' if text else "" for text in texts
        ]
        return Coded(code, max(len(texts), 1), lambda number: quoted[number])
    return coded_numbers(
        numbers(table, column.name),
        lambda value: "" if value == NOT_APPLICABLE else f'"{column.name}":{value},',
    )


@dataclass(frozen=True)
class Fragments:
    """A text a row: `texts` of those that occur, `code` of each row."""

    texts: pa.StringArray
    code: Integers

    def of(self, rows: Integers | slice = slice(None)) -> pa.StringArray:
        """Texts of some rows."""
        return self.texts.take(pa.array(self.code[rows]))


def fragments(columns: Sequence[Coded]) -> list[Fragments]:
    """Texts of the columns in their order, as few columns of texts as sensible."""
    texts: list[Fragments] = []
    pending: list[Coded] = []
    for column in columns:
        product = column.num_codes
        for other in pending:
            product *= other.num_codes
        if pending and product > _MOST_CODES:
            texts.append(_combined(pending))
            pending = []
        pending.append(column)
    if pending:
        texts.append(_combined(pending))
    return texts


def row_texts(columns: Sequence[Coded]) -> list[pa.StringArray]:
    """Texts of the columns in their order, a text a row."""
    return [found.of() for found in fragments(columns)]


def _combined(columns: Sequence[Coded]) -> Fragments:
    key = columns[0].codes
    for column in columns[1:]:
        key = key * column.num_codes + column.codes
    used, place = _used_codes(key)
    parts: list[list[str]] = []
    rest = used
    for column in reversed(columns):
        rest, code = np.divmod(rest, column.num_codes)
        parts.append(_texts_of(column, code))
    texts = ["".join(reversed(pieces)) for pieces in zip(*parts, strict=True)]
    return Fragments(pa.array(texts, pa.string()), place)


def _texts_of(column: Coded, code: Integers) -> list[str]:
    made = {each: column.text_of(each) for each in set(code.tolist())}
    return [made[each] for each in code.tolist()]


def _used_codes(key: Integers) -> tuple[Integers, Integers]:
    if not len(key) or int(key.max()) >= 2 * _MOST_CODES:
        used, place = np.unique(key, return_inverse=True)
        return used, place.astype(np.int64)
    present = np.zeros(int(key.max()) + 1, dtype=np.bool_)
    present[key] = True
    renumber = np.cumsum(present) - 1
    return np.flatnonzero(present), renumber[key]
