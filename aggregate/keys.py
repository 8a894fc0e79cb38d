"""Composite keys: several integer columns as one, so that one sort groups by all of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_LARGEST = 2**62


def combine(*columns: IntArray) -> IntArray:
    """One int64 a row that orders rows as the columns do, the first being the most significant.

    The columns become digits of one number; where the number would not fit in 62 bits, what has
    been combined so far is replaced by its rank among the values that occur.

    >>> combine(np.array([0, 1, 1]), np.array([7, 5, 6]))
    array([2, 3, 4])
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    if not len(key):
        return key
    size = 1
    for column in columns:
        digits, base = _digits(column)
        if size * base > _LARGEST:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
        key = key * base + digits
        size *= base
    return key


def _digits(column: IntArray) -> tuple[IntArray, int]:
    """The column as numbers from 0, and how many there may be."""
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < _LARGEST // len(column):
        return column - lowest, highest - lowest + 1
    values, digits = np.unique(column, return_inverse=True)
    return digits.astype(np.int64), len(values)


def group_starts(sorted_keys: IntArray) -> IntArray:
    """Index of the first row of each run of equal keys."""
    if not len(sorted_keys):
        return np.zeros(0, dtype=np.int64)
    changes: IntArray = np.flatnonzero(np.r_[True, sorted_keys[1:] != sorted_keys[:-1]])
    return changes


def group_lengths(starts: IntArray, num_rows: int) -> IntArray:
    """Number of rows of each run, given where the runs start."""
    lengths: IntArray = np.diff(np.r_[starts, num_rows])
    return lengths


def by_name(row_codes: IntArray, texts: list[str]) -> IntArray:
    """Codes renumbered by the alphabetic order of their texts.

    A key made of these does not depend on the order in which a reader met the texts.
    """
    position: IntArray = np.zeros(max(len(texts), 1), dtype=np.int64)
    position[np.argsort(np.array(texts, dtype=np.str_))] = np.arange(len(texts))
    renumbered: IntArray = position[row_codes]
    return renumbered
