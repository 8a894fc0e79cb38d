"""Columns from the digits of all lines of a block, by the shape of each line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.reader.digits import MOST_DIGITS, Digits, Flags, Integers, Positions, UnfitError

NONE = -1
_LARGEST_EXACT = 2**53
_MOST_DECIMALS = 15
_POWERS = 10 ** np.arange(_MOST_DECIMALS + 1, dtype=np.int64)


@dataclass(frozen=True)
class Leaf:
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
class Shape:
    """One sort of line: where its digits stand among its other characters, and its columns."""

    place: Positions
    is_whole: Flags
    """Which of its digits begin a number, so that no zero may lead."""
    leaves: tuple[Leaf | None, ...]


def check_places(digits: Digits, shapes: Sequence[Shape], code: Positions) -> None:
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


class Filler:
    """Fills columns from the digits of all lines of a block."""

    def __init__(self, shapes: Sequence[Shape], code: Positions, digits: Digits) -> None:
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

    def _wholes(self, leaves: Sequence[Leaf | None]) -> tuple[Integers, Flags | None]:
        place = np.array([leaf.whole if leaf else NONE for leaf in leaves], dtype=np.int32)
        row, missing = self._runs(place)
        values = self._digits.value[row]
        if ((values < 0) & ~missing).any():
            raise UnfitError
        return values, missing if missing.any() else None

    def _decimals(self, leaves: Sequence[Leaf | None], whole: Integers) -> npt.NDArray[np.float64]:
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

    def _texts(self, leaves: Sequence[Leaf | None]) -> pa.DictionaryArray:
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
        leaves: Sequence[Leaf | None],
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
            if length.max() > MOST_DIGITS:
                raise UnfitError
            key = _dense((_dense(key) * len(lines) + value) * (MOST_DIGITS + 1) + length)
        _, sample, code = np.unique(key, return_index=True, return_inverse=True)
        found = [texts.setdefault(self._text(leaves, line), len(texts)) for line in lines[sample]]
        return np.array(found, dtype=np.int32)[code]

    def _text(self, leaves: Sequence[Leaf | None], line: int) -> str:
        """The text of one line."""
        leaf = leaves[self._code[line]] or Leaf(pieces=("",))
        rows = [self._digits.first[line] + place for place in leaf.places]
        digits = [f"{self._digits.value[row]:0{self._digits.length[row]}d}" for row in rows]
        return "".join(map("".join, zip(leaf.pieces, [*digits, ""], strict=True)))


def _dense(values: npt.NDArray[np.integer]) -> Integers:
    """Numbered from 0 in the order of their first use."""
    return np.asarray(pa.array(values).dictionary_encode().indices, dtype=np.int64)
