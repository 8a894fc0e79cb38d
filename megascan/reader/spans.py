"""Checks and order of span tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.reader.columns import LARGEST_MICROS
from megascan.schema import HEADER_EVENT, WINDOW_EVENT, Kind
from megascan.timeline import equals, numbers


def faulty_rows(spans: pa.Table, events: pa.Table, rank: int | None) -> list[tuple[int, str]]:
    """Rows that cannot be used and why (a predicate: "has no name"), in order.

    `events` are the rows as parsed, `rank` the file's rank (None for files of many ranks).
    """
    micros = events.column("ts").to_numpy() + events.column("dur").to_numpy()
    ranks = numbers(spans, "rank")
    sorts = {
        "has no usable ts and dur": ~(np.abs(micros) < LARGEST_MICROS),
        "has a negative duration": numbers(spans, "duration_ns") < 0,
        "has no rank": ranks < 0,
        "is of an unknown kind": ~equals(spans, "kind", *Kind),
        "has no name": equals(spans, "name", ""),
    }
    if rank is not None:
        sorts[f"is a span of another rank than the file's rank {rank}"] = ranks != rank
    reasons: dict[int, str] = {}
    for reason, is_bad in sorts.items():
        for row in np.flatnonzero(is_bad).tolist():
            reasons.setdefault(row, reason)
    return sorted(reasons.items())


def is_mark(events: pa.Table) -> npt.NDArray[np.bool_]:
    """Events of a rank file that open a run or close a window."""
    return equals(events, "ph", "M") & equals(events, "name", HEADER_EVENT, WINDOW_EVENT)


def in_order(spans: pa.Table) -> pa.Table:
    """Rows by (rank, start_ns, -duration_ns); untouched when they already are."""
    if _is_in_order(spans):
        return spans
    order = pa.array(_order(spans))
    spans = spans.unify_dictionaries()
    columns = [_taken(column, order) for column in spans.columns]  # one after the other: memory
    return pa.Table.from_arrays(columns, schema=spans.schema)


def _order(spans: pa.Table) -> npt.NDArray[np.int64]:
    """Rows in order; those that are alike stay as they stand.

    A rank's rows take one sort by start, and one of the few that start together.
    """
    rank, start = numbers(spans, "rank"), numbers(spans, "start_ns")
    longest_first = -numbers(spans, "duration_ns")
    if np.diff(rank).any():
        return np.lexsort((longest_first, start, rank)).astype(np.int64)
    order = np.argsort(start, kind="stable")
    together = np.diff(start[order]) == 0
    places = np.flatnonzero(np.r_[False, together] | np.r_[together, False])
    rows = order[places]
    order[places] = rows[np.lexsort((longest_first[rows], start[rows]))]
    return order


def _is_in_order(spans: pa.Table) -> bool:
    """Looks at one batch after the other, so that no column is copied as a whole."""
    previous: list[int] = []
    for batch in spans.select(["rank", "start_ns", "duration_ns"]).to_batches():
        if not batch.num_rows:
            continue
        rank, start, duration = (np.asarray(column) for column in batch.columns)
        first = [int(rank[0]), int(start[0]), -int(duration[0])]
        ranks, steps = np.diff(rank), np.diff(start)
        follows = (steps > 0) | ((steps == 0) & (np.diff(duration) <= 0))
        if first < previous or not np.all((ranks > 0) | ((ranks == 0) & follows)):
            return False
        previous = [int(rank[-1]), int(start[-1]), -int(duration[-1])]
    return True


def _taken(column: pa.ChunkedArray, order: pa.Array) -> pa.Array:
    return column.combine_chunks().take(order)
