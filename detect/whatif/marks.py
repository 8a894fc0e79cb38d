"""What happens on a rank in an iteration, as a row of marks that all replicas of a stage share.

A mark is the begin or end of a pass or of the optimizer, or a communication. Between two marks lies
local work. Ranks of one stage run the same program, so their rows are equal and
stack to arrays (lane, iteration, mark); an iteration in which a span was lost, or that ran other
microbatches, has another row and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from detect.whatif.graph import Bools, Ints
from megascan.schema import COMMUNICATION_KINDS, Kind, Track
from megascan.timeline import Timeline, codes, equals, numbers

PASS_NAMES = ("forward", "backward")
END, BEGIN, COMMUNICATION = range(3)
"""Order of marks at the same instant."""
_ROW_COLUMNS = ("rank", "iteration", "start_ns", "duration_ns", "microbatch", "chunk")


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks of all ranks, sorted by (rank, iteration, time); arrays (mark,).

    `row` is the mark's span in the timeline's table, `edge` one of the constants above, `key` is
    equal for marks that mean the same. `bounds` (rank, iteration, 2) are the first and last
    instants of each iteration, 0 where a rank has none.
    """

    row: Ints
    edge: Ints
    time_ns: Ints
    end_ns: Ints
    key: Ints
    segment: Ints
    """rank number x iterations + iteration number, ascending."""
    ranks: Ints
    iterations: Ints
    bounds: Ints


def marks_of(timeline: Timeline) -> Marks:
    """Marks of a timeline's traced iterations."""
    table = timeline.spans
    columns = {name: numbers(table, name) for name in _ROW_COLUMNS}
    ranks, rank = np.unique(columns["rank"], return_inverse=True)
    counts = columns["iteration"] > 0
    iterations = np.unique(columns["iteration"][counts])
    segment = rank * len(iterations) + np.searchsorted(iterations, columns["iteration"])
    start, end = columns["start_ns"], columns["start_ns"] + columns["duration_ns"]
    bounds = _bounds(table, counts, segment, (start, end), (len(ranks), len(iterations)))
    row, edge = (np.concatenate(parts) for parts in zip(*_selected(timeline, counts), strict=True))
    time = np.where(edge == END, end[row], start[row])
    until = np.where(edge == COMMUNICATION, end[row], time)
    flat = bounds.reshape(-1, 2)[segment[row]]
    inside = (time >= flat[:, 0]) & (until <= flat[:, 1])
    row, edge, time, until = row[inside], edge[inside], time[inside], until[inside]
    key = _keys(table, columns, row, edge)
    order = np.lexsort((key, edge, time, segment[row]))
    return Marks(
        row=row[order],
        edge=edge[order],
        time_ns=time[order],
        end_ns=until[order],
        key=key[order],
        segment=segment[row][order],
        ranks=ranks,
        iterations=iterations,
        bounds=bounds,
    )


def _bounds(
    table: pa.Table, counts: Bools, segment: Ints, times: tuple[Ints, Ints], shape: tuple[int, int]
) -> Ints:
    """First and last instant by (rank, iteration): of its iteration span, else of all its spans."""
    rows = equals(table, "kind", Kind.ITERATION) & counts
    if not rows.any():
        rows = counts
    size = shape[0] * shape[1]
    first = np.full(size, np.iinfo(np.int64).max)
    last = np.zeros(size, dtype=np.int64)
    np.minimum.at(first, segment[rows], times[0][rows])
    np.maximum.at(last, segment[rows], times[1][rows])
    first[last == 0] = 0
    return np.stack([first, last], axis=-1).reshape(*shape, 2)


def _selected(timeline: Timeline, counts: Bools) -> Iterator[tuple[Ints, Ints]]:
    """(rows, edge) of every sort of mark."""
    table = timeline.spans
    brackets = (
        equals(table, "kind", Kind.COMPUTE) & equals(table, "name", *PASS_NAMES),
        equals(table, "kind", Kind.OPTIMIZER),
    )
    for chosen in brackets:
        rows = np.flatnonzero(chosen & counts)
        yield rows, np.full(len(rows), BEGIN)
        yield rows, np.full(len(rows), END)
    has_partner = (numbers(table, "peer") >= 0) | ~equals(table, "group", "")
    communication = equals(table, "kind", *COMMUNICATION_KINDS) & has_partner
    rows = np.flatnonzero(communication & counts)
    yield rows, np.full(len(rows), COMMUNICATION)


def _keys(table: pa.Table, columns: dict[str, Ints], row: Ints, edge: Ints) -> Ints:
    """A number for what a mark means, the same on every rank of a stage."""
    communication = edge == COMMUNICATION
    group, groups = codes(table, "group")
    axes = np.array([name.partition("@")[0] for name in groups] or [""])
    axis = np.unique(axes, return_inverse=True)[1][group[row]]
    overlapped = numbers(table, "track")[row] == Track.OVERLAPPED
    parts = [
        np.where(communication, COMMUNICATION + overlapped, edge),
        np.where(communication, axis, 0),
        codes(table, "name")[0][row],
        np.where(communication, codes(table, "direction")[0][row], 0),
        np.where(communication, 0, columns["microbatch"][row] + 1),
        np.where(communication, 0, columns["chunk"][row] + 1),
    ]
    key = np.zeros(len(row), dtype=np.int64)
    for part in parts:
        key = key * (int(part.max(initial=0)) + 1) + part
    return key


Words = npt.NDArray[np.uint64]


def programs(marks: Marks) -> Words:
    """A fingerprint of the row of marks of every (rank, iteration); 0 where there is none."""
    size = len(marks.ranks) * len(marks.iterations)
    lengths = np.bincount(marks.segment, minlength=size)
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    place = np.arange(len(marks.segment)) - first[marks.segment]
    seed = np.random.default_rng(0)
    odd = seed.integers(0, 2**63, int(lengths.max(initial=0)) + 1, dtype=np.uint64) * 2 + 1
    word = (marks.key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)) * odd[place]
    total = np.zeros(size, dtype=np.uint64)
    filled = lengths > 0
    total[filled] = np.add.reduceat(word, first[filled])
    return (total ^ lengths.astype(np.uint64)).reshape(len(marks.ranks), len(marks.iterations))
