"""Span tables out of numpy columns: what importers of other formats end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.schema import NOT_APPLICABLE
from megascan.timeline import TRACE_SCHEMA

Integers = npt.NDArray[np.int64]


def span_table(
    num_rows: int,
    integers: Mapping[str, Integers | int],
    texts: Mapping[str, tuple[Integers, Sequence[str]]],
) -> pa.Table:
    """Table of TRACE_SCHEMA; `texts` are (code of each row, text of each code).

    Columns that are not given do not apply.
    """
    arrays = []
    for field in TRACE_SCHEMA:
        if pa.types.is_dictionary(field.type):
            row_codes, values = texts.get(field.name, (np.zeros(num_rows, np.int64), [""]))
            arrays.append(encoded(row_codes, values))
        else:
            value = integers.get(field.name, NOT_APPLICABLE)
            column = np.broadcast_to(np.asarray(value, dtype=np.int64), (num_rows,))
            arrays.append(pa.array(column).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=TRACE_SCHEMA)


def encoded(row_codes: Integers, values: Sequence[str]) -> pa.DictionaryArray:
    """Dictionary column in which every text stands once."""
    unique = list(dict.fromkeys(values)) or [""]
    position = {text: place for place, text in enumerate(unique)}
    renumbered = np.array([position[text] for text in values] or [0], dtype=np.int32)
    return pa.DictionaryArray.from_arrays(
        pa.array(renumbered[row_codes], type=pa.int32()), pa.array(unique, type=pa.string())
    )


def running_numbers(keys: Integers) -> Integers:
    """For each row, how many earlier rows have the same key: [5, 7, 5, 5] → [0, 0, 1, 2]."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order[:0]
    lengths = np.diff(np.r_[starts, len(keys)])
    numbers = np.empty(len(keys), dtype=np.int64)
    numbers[order] = np.arange(len(keys)) - np.repeat(starts, lengths)
    return numbers
