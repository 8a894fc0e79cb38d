"""Iterations of ranks and of whole groups, for the rows that stay visible when collapsed.

A rank's row repeats its iterations with their wait share. A group's row spans from its first
member's start to its last member's end, cut at its next iteration, and names the member that
waited least: the one the others waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.export.counters import WAIT_SHARE
from megascan.export.drawing import Drawing
from megascan.export.perfetto_tracks import TrackTree
from megascan.schema import NOT_APPLICABLE, Kind
from megascan.timeline import equals, numbers

Integers = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SummarySlices:
    """Slices of one iteration on one track each, every array of shape (slice,).

    `wait_ratio` is the mean wait share of `num_ranks` ranks, and `least_waiting_rank` the one with
    the smallest; -1 both where waits are unknown.
    """

    track_uuid: Integers
    iteration: Integers
    start_ns: Integers
    end_ns: Integers
    num_ranks: Integers
    wait_ratio: Reals
    least_waiting_rank: Integers


def summarise(drawing: Drawing, tree: TrackTree) -> SummarySlices:
    """Summary slices of every rank and group of a drawing."""
    ranks = _rank_iterations(drawing)
    parts = [_grouped(*ranks, level) for level in (*tree.levels, tree.ranks)]
    return SummarySlices(
        **{
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(SummarySlices)
        }
    )


def _rank_iterations(drawing: Drawing) -> tuple[pa.Table, Reals]:
    """Iteration spans and the wait share of each, -1 where it is unknown."""
    spans = drawing.spans
    spans = spans.filter(pa.array(equals(spans, "kind", str(Kind.ITERATION))))
    shares = np.full(spans.num_rows, float(NOT_APPLICABLE))
    for curve in drawing.counters:
        if curve.name == WAIT_SHARE and len(curve.value):
            known = (curve.rank << 32) + curve.iteration
            wanted = (numbers(spans, "rank") << 32) + numbers(spans, "iteration")
            place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            shares = np.where(known[place] == wanted, curve.value[place] / 100, shares)
    return spans, shares


def _grouped(spans: pa.Table, shares: Reals, uuid_of_rank: Mapping[int, int]) -> SummarySlices:
    """One slice a (track, iteration): rows sorted so that a group's least waiting rank is first."""
    rank, iteration = numbers(spans, "rank"), numbers(spans, "iteration")
    ranks = np.array(sorted(uuid_of_rank), dtype=np.int64)
    uuids = np.array([uuid_of_rank[each] for each in ranks.tolist()], dtype=np.int64)
    track = uuids[np.searchsorted(ranks, rank)]
    order = np.lexsort((shares, iteration, track))
    rank, iteration, track = (each[order] for each in (rank, iteration, track))
    shares = shares[order]
    start_ns = numbers(spans, "start_ns")[order]
    end_ns = start_ns + numbers(spans, "duration_ns")[order]
    changed = (np.diff(track, prepend=-1) != 0) | (np.diff(iteration, prepend=-1) != 0)
    first = np.flatnonzero(changed)
    if not len(first):
        none = np.empty(0, dtype=np.int64)
        return SummarySlices(
            track_uuid=none, iteration=none, start_ns=none, end_ns=none, num_ranks=none,
            wait_ratio=none.astype(np.float64), least_waiting_rank=none,
        )  # fmt: skip
    num_ranks = np.diff(first, append=len(rank))
    known = shares[first] != NOT_APPLICABLE
    begin = np.minimum.reduceat(start_ns, first)
    return SummarySlices(
        track_uuid=track[first],
        iteration=iteration[first],
        start_ns=begin,
        end_ns=_cut(track[first], begin, np.maximum.reduceat(end_ns, first)),
        num_ranks=num_ranks,
        wait_ratio=np.where(known, np.add.reduceat(shares, first) / num_ranks, NOT_APPLICABLE),
        least_waiting_rank=np.where(known, rank[first], NOT_APPLICABLE),
    )


def _cut(track: Integers, begin: Integers, end: Integers) -> Integers:
    """Ends such that each slice is over when the next of its track begins."""
    limit = np.append(np.where(np.diff(track) == 0, begin[1:], end[:-1]), end[-1:])
    cut: Integers = np.maximum(np.minimum(end, limit), begin)
    return cut
