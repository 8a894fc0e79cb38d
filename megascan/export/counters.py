"""Figures per rank and iteration that viewers draw as curves over the slices.

    wait share            Σ wait of synchronous communication / duration of the iteration, 0…100 %
    collective bandwidth  Σ size / Σ transfer of the iteration's collectives, in GB/s (decimal)
    p2p bandwidth         the same of its sends and receives

One value an iteration, standing at the iteration's start. Only iterations with an iteration span
have a wait share; bandwidth counts communication with a known size and a transfer above 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.schema import COMMUNICATION_KINDS, Kind, Track
from megascan.timeline import equals, numbers

WAIT_SHARE = "wait share"

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


_COLUMNS = [
    "rank",
    "kind",
    "track",
    "start_ns",
    "duration_ns",
    "iteration",
    "size_bytes",
    "wait_ns",
    "transfer_ns",
]


@dataclass(frozen=True)
class Counter:
    """A named curve on every rank: arrays of shape (value,), all values finite."""

    name: str
    unit: str
    rank: Integers
    iteration: Integers
    time_ns: Integers
    value: Reals


@dataclass(frozen=True)
class _Iterations:
    """Iteration spans, one a (rank, iteration), in the order of their keys."""

    key: Integers
    rank: Integers
    iteration: Integers
    start_ns: Integers
    duration_ns: Integers


def make_counters(spans: pa.Table) -> tuple[Counter, ...]:
    """Curves of a timeline's span table; those without a value are left out."""
    spans = spans.select(_COLUMNS)
    iterations = _iteration_spans(spans)
    talk = spans.filter(pa.array(equals(spans, "kind", *map(str, COMMUNICATION_KINDS))))
    place = _place(talk, iterations)
    curves = [_wait_share(talk, place, iterations)]
    curves += [_bandwidth(talk, place, iterations, kind) for kind in COMMUNICATION_KINDS]
    return tuple(curve for curve in curves if len(curve.value))


def _keys(spans: pa.Table) -> Integers:
    return (numbers(spans, "rank") << 32) + numbers(spans, "iteration")


def _iteration_spans(spans: pa.Table) -> _Iterations:
    table = spans.filter(pa.array(equals(spans, "kind", str(Kind.ITERATION))))
    key, first = np.unique(_keys(table), return_index=True)
    table = table.take(pa.array(first))
    return _Iterations(
        key,
        numbers(table, "rank"),
        numbers(table, "iteration"),
        numbers(table, "start_ns"),
        numbers(table, "duration_ns"),
    )


def _place(talk: pa.Table, iterations: _Iterations) -> Integers:
    """Row of the iteration each span belongs to, -1 for none."""
    if not len(iterations.key):
        return np.full(talk.num_rows, -1, dtype=np.int64)
    key = _keys(talk)
    place = np.minimum(np.searchsorted(iterations.key, key), len(iterations.key) - 1)
    return np.where(iterations.key[place] == key, place, -1)


def _wait_share(talk: pa.Table, place: Integers, iterations: _Iterations) -> Counter:
    waits = numbers(talk, "wait_ns")
    counted = (place >= 0) & (waits > 0) & (numbers(talk, "track") != Track.OVERLAPPED)
    total = np.bincount(place[counted], waits[counted], minlength=len(iterations.key))
    lasting = iterations.duration_ns > 0
    share = total[lasting] / iterations.duration_ns[lasting]
    return _counter(WAIT_SHARE, "%", iterations, lasting, 100 * np.minimum(share, 1.0))


def _bandwidth(talk: pa.Table, place: Integers, iterations: _Iterations, kind: Kind) -> Counter:
    size, transfer = numbers(talk, "size_bytes"), numbers(talk, "transfer_ns")
    counted = (place >= 0) & (size > 0) & (transfer > 0) & equals(talk, "kind", str(kind))
    count = len(iterations.key)
    moved = np.bincount(place[counted], size[counted], minlength=count)
    spent = np.bincount(place[counted], transfer[counted], minlength=count)
    known = spent > 0  # bytes a nanosecond are GB/s
    return _counter(f"{kind} bandwidth", "GB/s", iterations, known, moved[known] / spent[known])


def _counter(
    name: str, unit: str, iterations: _Iterations, chosen: npt.NDArray[np.bool_], value: Reals
) -> Counter:
    return Counter(
        name,
        unit,
        iterations.rank[chosen],
        iterations.iteration[chosen],
        iterations.start_ns[chosen],
        value,
    )
