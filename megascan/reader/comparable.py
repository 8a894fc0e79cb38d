"""What all ranks of a run recorded alike: like is compared with like.

Two things make ranks or windows differ on purpose. A bound on the size of files takes the oldest
windows off, on some ranks more than on others; and a budget lowers the granularity in mid-run. What
remains here are the iterations that every rank still has, at the one granularity that most of them
were traced with. The rank files keep the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from megascan.header import RankHeader, WindowRecord
from megascan.reader.segments import Segment
from megascan.schema import Granularity


@dataclass(frozen=True)
class Comparable:
    """Segments by rank, cut to what can be compared, and sentences about what was left out."""

    by_rank: Mapping[int, Segment]
    notes: tuple[str, ...] = ()


def comparable(by_rank: Mapping[int, Segment]) -> Comparable:
    """Cut the segments of one run; the headers then say what granularity is left."""
    after_limit = _since_last_drop(by_rank)
    at_one = _at_one_granularity(after_limit.by_rank)
    notes = (*after_limit.notes, *at_one.notes, *_interval_notes(at_one.by_rank))
    return Comparable(at_one.by_rank, notes)


def _since_last_drop(by_rank: Mapping[int, Segment]) -> Comparable:
    """Without the iterations that some rank's file no longer holds."""
    headers = [segment.header for segment in by_rank.values()]
    last = max(header.last_iteration_dropped for header in headers)
    if not last:
        return Comparable(by_rank)
    dropped = {
        iteration
        for segment in by_rank.values()
        for window in segment.windows
        for iteration in _iterations(window)
        if iteration <= last
    }
    most_bytes = max(header.trace.max_bytes for header in headers)
    note = (
        f"begins after iteration {last}: earlier windows were dropped to keep each rank's file "
        f"within --trace-max-bytes {most_bytes:,}"
    )
    return Comparable(_without(by_rank, dropped), (note,))


def _at_one_granularity(by_rank: Mapping[int, Segment]) -> Comparable:
    """Without the iterations that some rank traced at another granularity than most were."""
    counts: Counter[Granularity] = Counter()
    at: dict[Granularity, set[int]] = {}
    for segment in by_rank.values():
        for window in segment.windows:
            granularity = _granularity(window, segment.header)
            counts[granularity] += window.last_iteration - window.first_iteration + 1
            at.setdefault(granularity, set()).update(_iterations(window))
    if not counts:
        return Comparable(by_rank)
    chosen = max(counts, key=lambda granularity: (counts[granularity], granularity))
    others = {i for granularity in at if granularity is not chosen for i in at[granularity]}
    kept = _without(by_rank, others) if others else by_rank
    notes = (_granularity_note(chosen, others, at[chosen] - others),) if others else ()
    return Comparable({rank: _at(segment, chosen) for rank, segment in kept.items()}, notes)


def _granularity_note(chosen: Granularity, others: set[int], kept: set[int]) -> str:
    return (
        f"granularity changed during the run (--trace-budget): {len(kept)} iterations of "
        f"{chosen} are analysed, {len(others)} of another granularity ({min(others)} to "
        f"{max(others)}) are left out, so that like is compared with like"
    )


def _interval_notes(by_rank: Mapping[int, Segment]) -> list[str]:
    """Where windows became fewer; nothing is left out for that."""
    first = next(iter(by_rank.values()))
    return [
        f"a window every {after.interval} instead of {before.interval} iterations from iteration "
        f"{after.first_iteration} on (--trace-budget)"
        for before, after in pairwise(first.windows)
        if before.interval and after.interval > before.interval
    ]


def _granularity(window: WindowRecord, header: RankHeader) -> Granularity:
    return Granularity(window.granularity) if window.granularity else header.trace.granularity


def _at(segment: Segment, granularity: Granularity) -> Segment:
    if segment.header.trace.granularity is granularity:
        return segment
    settings = replace(segment.header.trace, granularity=granularity)
    return replace(segment, header=replace(segment.header, trace=settings))


def _iterations(window: WindowRecord) -> Iterable[int]:
    return range(window.first_iteration, window.last_iteration + 1)


def _without(by_rank: Mapping[int, Segment], iterations: set[int]) -> dict[int, Segment]:
    return {rank: _cut(segment, iterations) for rank, segment in by_rank.items()}


def _cut(segment: Segment, iterations: set[int]) -> Segment:
    """A segment less some iterations; a window goes when nothing of it is left."""
    column = segment.spans.column("iteration")
    out = pc.is_in(column, value_set=pa.array(sorted(iterations), type=column.type))
    windows = tuple(
        window for window in segment.windows if not iterations.issuperset(_iterations(window))
    )
    return replace(segment, spans=segment.spans.filter(pc.invert(out)), windows=windows)
