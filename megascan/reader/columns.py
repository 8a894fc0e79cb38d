"""Event columns to span columns: microseconds to nanoseconds, gaps filled, text encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascan.schema import NOT_APPLICABLE, Column
from megascan.timeline import arrow_schema

_JSON_TYPES = {"int8": pa.int8(), "int32": pa.int32(), "int64": pa.int64(), "text": pa.string()}
_TIMES = ("ts", "dur")
LARGEST_MICROS = 2.0**50
"""About 35 years; times beyond it are damage and could not be told apart to the nanosecond."""


def event_schema(columns: Sequence[Column]) -> pa.Schema:
    """What the JSON parser is to take from events that carry these columns."""
    top = [("ph", pa.string())]
    arguments = []
    for column in columns:
        place, _, argument = column.event_key.partition(".")
        if argument:
            arguments.append((argument, _JSON_TYPES[column.type]))
        else:
            kind = pa.float64() if place in _TIMES else _JSON_TYPES[column.type]
            top.append((place, kind))
    return pa.schema([*top, ("args", pa.struct(arguments))])


def span_columns(events: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Span events, as `Templates` reads them, as a table of declared columns.

    `start_ns` is still relative to the origin.

    Start and end are rounded to whole ns each, so that spans which nest in the file nest in the
    table. A missing or non-finite time becomes a duration of NOT_APPLICABLE.
    """
    start, duration = _times(events)
    arrays = []
    for column in columns:
        if column.event_key == "ts":
            arrays.append(pa.array(start))
        elif column.event_key == "dur":
            arrays.append(pa.array(duration))
        else:
            arrays.append(events.column(column.event_key))
    return pa.Table.from_arrays(arrays, schema=arrow_schema(tuple(columns)))


def rows_of(table: pa.Table, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Some rows, ascending; a slice without copies where they follow one another."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return table.slice(int(rows[0]), len(rows))
    return table.take(pa.array(rows))


def true_rows(mask: pa.ChunkedArray) -> pa.Array:
    """Row numbers where a mask is true; null counts as false.

    Stands for `pyarrow.compute.indices_nonzero`, which crashes the process on an array without
    chunks (an empty slice) in pyarrow before 26.
    """
    return pa.array(np.flatnonzero(pc.fill_null(mask, False).to_numpy()))


def _times(events: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    start = events.column("ts").to_numpy()
    end = start + events.column("dur").to_numpy()
    usable = (np.abs(start) < LARGEST_MICROS) & (np.abs(end) < LARGEST_MICROS)
    start_ns = np.rint(np.where(usable, start, 0.0) * 1000.0).astype(np.int64)
    end_ns = np.rint(np.where(usable, end, 0.0) * 1000.0).astype(np.int64)
    return start_ns, np.where(usable, end_ns - start_ns, NOT_APPLICABLE)
