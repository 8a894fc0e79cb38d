"""The digits of a block of lines as numbers, and the lines with a mark in the place of digits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.schema import NOT_APPLICABLE

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MOST_DIGITS = 18
"""Longer runs of digits have no value."""
_DIGITS = b"0123456789"
_MARK = b"\1"
"""Stands in no JSON."""
_WORD_BYTES = 8
_LONGEST_WORDS = 24
"""Bytes of the words that hold a value, and more than the runs that can stand in so many bytes."""
_DIGIT_BITS = np.array(
    [0x0F0F0F0F0F0F0F0F << 8 * (8 - length) & 2**64 - 1 for length in range(9)], dtype=np.uint64
)
_PAIRINGS = ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF))
_ZERO, _NUM_DIGITS = np.uint8(48), np.uint8(10)
_NOTHING = np.zeros(1, dtype=np.int32)


class UnfitError(Exception):
    """These lines are for the general parser."""


@dataclass(frozen=True)
class Digits:
    """All runs of digits in a block, (run,) each, and the first run of each line, (line + 1,)."""

    value: Integers
    """One longer: NOT_APPLICABLE stands at the end, where index -1 finds it."""
    length: npt.NDArray[np.int32]
    leading_zero: Integers
    """Runs of several digits that begin with a zero."""
    first: Integers
    has_long: bool
    """Whether a run is too long to have a value."""


def split_digits(text: bytes | bytearray, bounds: Integers) -> tuple[Digits, pa.BinaryArray]:
    """A block's digits, and its lines with one mark in the place of each run of digits."""
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
    buffers = [None, pa.py_buffer(bare_bounds), pa.py_buffer(marked.translate(None, _DIGITS))]
    return digits, pa.Array.from_buffers(pa.binary(), len(bounds) - 1, buffers)


def _values(view: npt.NDArray[np.uint8], end: Integers, length: npt.NDArray[np.int32]) -> Integers:
    """Runs of digits as integers, without meaning for those of more than 18 digits.

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


def _word_values(
    words: npt.NDArray[np.uint64], length: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint64]:
    """Value of the last `length` of eight digits, the first one in the lowest byte."""
    value = words & _DIGIT_BITS.take(length)
    for bits, mask in _PAIRINGS:
        value = value * np.uint64(10 ** (bits // 8)) + (value >> np.uint64(bits))
        value &= np.uint64(mask)
    return value
