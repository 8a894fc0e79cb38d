"""Columns from the digits of all lines of a block, by the shape of each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.reader.digits import MOST_DIGITS, Digits, Flags, Integers, UnfitError
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import distinct, first_rows

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
    """One sort of line: which of its runs of digits make the values of its columns.

    `whole` and `fraction` are runs by column (NONE: no number, no decimals), `texts` is what a
    column says where it is a text, "" where there is none.
    """

    is_whole: Flags
    """Which runs begin a number, so that no zero may lead."""
    whole: Integers
    fraction: Integers
    negative: Flags
    texts: tuple[str | Pattern, ...]


class Filler:
    """Fills columns from the digits of all lines of a block.

    What is absent is NOT_APPLICABLE among integers, NaN among decimals and "" among texts. Raises
    UnfitError for what only the general parser can tell.
    """

    def __init__(self, shapes: Sequence[Shape], code: Integers, digits: Digits) -> None:
        self._shapes, self._code, self._digits = shapes, code, digits
        self._first = digits.first[:-1]
        self._whole = np.stack([shape.whole for shape in shapes], axis=1)
        self._fraction = np.stack([shape.fraction for shape in shapes], axis=1)
        self._negative = np.stack([shape.negative for shape in shapes], axis=1)
        self._check_zeros()

    def _check_zeros(self) -> None:
        """No number begins with a zero that another digit follows."""
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
        """A column of the schema."""
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
        """Each line's run at the place that its shape says, NONE where it says none."""
        code, first = self._code, self._first
        if lines is not None:
            code, first = code[lines], first[lines]
        run = place.take(code)
        if place.min() > NONE:
            run += first
            return run
        return np.where(run == NONE, NONE, run + first)

    def _checked(self, runs: Integers) -> Integers:
        """The same runs, none of which has too many digits."""
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

    def _signed(self, column: int, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        negative = self._negative[column]
        if negative.any():
            values *= (1 - 2 * negative.astype(np.int64)).take(self._code)
        return values

    def _decimals(self, column: int) -> npt.NDArray[np.float64]:
        """whole.fraction as (whole · 10^n + fraction) / 10^n: exact integers and one rounding."""
        place = self._whole[column]
        if place.max() == NONE:
            return np.full(len(self._code), np.nan)
        runs = self._checked(self._runs(place))
        scaled = self._digits.value.take(runs)
        decimals = self._checked(self._runs(self._fraction[column]))
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
        values = self._signed(column, scaled) / power
        if place.min() == NONE:
            values[runs == NONE] = np.nan
        return values

    def _texts(self, column: int) -> pa.DictionaryArray:
        """Texts without digits are as many as shapes; those with digits are told apart by them."""
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
        """Codes of texts that hold digits, new ones added to `texts`."""
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
        """The text of one line, which has digits."""
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
    """One number for each pair of numbers ≥ 0."""
    most = int(values.max()) + 1
    if int(key.max()) + 1 >= _LARGEST_KEY // most:
        key, values = distinct(key)[0], distinct(values)[0]
        most = int(values.max()) + 1
    return key * most + values
