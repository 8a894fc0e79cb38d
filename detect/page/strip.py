"""Cut one iteration out of a timeline: the rank at fault, and the ranks that wait for it.

The iteration is the longest one in which the finding is active. In each operation that the culprit
reaches last, it causes the other members' waiting; the ranks that wait most are its victims.

    rank 5   ├──── forward ────┤├transfer┤       culprit: arrives last
    rank 1   ├─ forward ─┤░wait░├transfer┤       victim: waits until rank 5 is there

Where the step can be replayed, the iteration's critical path lies over the lanes, and the ranks
that have most of it have lanes, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from detect.observe.observations import Observations
from detect.report import Finding
from detect.text import ranks_text
from detect.whatif.graph import Replay
from detect.whatif.path import CriticalPath, StepPath, critical_path
from detect.whatif.render import made_of
from megascan.arrays import Flags, Integers, group_starts, new_parts
from megascan.errors import listed
from megascan.header import Json
from megascan.schema import COMMUNICATION_KINDS, Kind, Track
from megascan.timeline import Timeline, codes, equals, numbers
from megascan.vocabulary import CountsAs, names_of

MOST_CULPRITS = 2
MOST_VICTIMS = 5
MOST_PIECES = 400
"""Most pieces of a lane; if there are more, neighbours are joined over the smallest gaps."""
MOST_ARRIVALS = 12
MOST_ON_PATH = 2
"""Ranks that have a lane because they have most of the critical path."""
WORTH_AN_ARRIVAL = 0.01
"""Share of the iteration that a victim must wait for an arrival to be marked."""
PASSES = names_of(CountsAs.PASS)
HOST_KINDS = (Kind.DATA, Kind.GC, Kind.CHECKPOINT, Kind.HOST)


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Columns of the spans of one iteration; times are relative to its begin."""

    table: pa.Table
    begin_ns: int
    rank: Integers
    start: Integers
    end: Integers
    wait: Integers
    match: Integers
    communication: Flags

    @classmethod
    def of(cls, timeline: Timeline, iteration: int) -> _Spans:
        table = timeline.spans.filter(pa.array(numbers(timeline.spans, "iteration") == iteration))
        start = numbers(table, "start_ns")
        begin = int(start.min()) if len(start) else 0
        return cls(
            table=table,
            begin_ns=begin,
            rank=numbers(table, "rank"),
            start=start - begin,
            end=start - begin + numbers(table, "duration_ns"),
            wait=numbers(table, "wait_ns"),
            match=numbers(table, "match"),
            communication=equals(table, "kind", *COMMUNICATION_KINDS),
        )


def critical_strip(
    timeline: Timeline, seen: Observations, finding: Finding | None, replay: Replay | None = None
) -> Json:
    """Return the strip of the finding's longest iteration; None where nothing can be shown.

    Without a finding the lanes are the ranks that wait least and most in the longest iteration.
    `replay` gives the critical path.
    """
    iteration = _longest_iteration(seen, finding)
    if iteration is None:
        return None
    spans = _Spans.of(timeline, iteration)
    if not len(spans.rank):
        return None
    culprits = [rank for rank in finding.ranks if rank in timeline.headers] if finding else []
    chosen = culprits[:MOST_CULPRITS]
    victims = _victims(spans, culprits)
    shown = [*chosen, *(rank for rank in victims if rank not in chosen)]
    found = None
    if replay is not None and iteration in replay.steps:
        path = critical_path(replay)
        found = path, next(step for step in path.steps if step.iteration == iteration)
    on_path = _most_on_path(*found) if found else []
    shown += [rank for rank in on_path if rank not in shown]
    chosen_by = ["at fault", "waiting most for them"] if chosen else ["waiting least or most"]
    chosen_by += ["longest on the critical path"] if on_path else []
    lanes: list[Json] = [
        {
            "rank": rank,
            "place": timeline.layout.label(rank),
            "role": "named" if rank in culprits else "waits" if rank in victims else "path",
            "pieces": _pieces(spans, rank),
        }
        for rank in shown
    ]
    return {
        "iteration": iteration,
        "length_us": _microseconds(spans.end.max()),
        "num_ranks": len(timeline.headers),
        "chosen_by": listed(chosen_by),
        "who": ranks_text(tuple(chosen)) if chosen else "",
        "at": f"{shown[0]}:{iteration}",
        "lanes": lanes,
        "arrivals": _arrivals(spans, shown, set(culprits)),
        "path": _path_lines(*found, shown, spans) if found else [],
        "made_of": made_of(*found) if found else "",
    }


def _most_on_path(path: CriticalPath, step: StepPath) -> list[int]:
    """Return the ranks that have most of the path."""
    ranks, number = np.unique(path.ranks(step), return_inverse=True)
    total = np.bincount(number, weights=step.work_ns, minlength=len(ranks))
    return [int(rank) for rank in ranks[np.argsort(-total, kind="stable")][:MOST_ON_PATH]]


def _path_lines(path: CriticalPath, step: StepPath, shown: list[int], spans: _Spans) -> list[Json]:
    """Return [lane, start µs, length µs] of where the path is, in the order of time.

    Consecutive hops of one rank are one line. Hops of ranks without a lane are left out, and if
    there are too many lines, the shortest.
    """
    ranks = path.ranks(step)
    first = group_starts(ranks)
    ends = step.ends_ns[np.append(first[1:], len(ranks)) - 1] - spans.begin_ns
    starts = step.starts_ns[first] - spans.begin_ns
    rows = np.flatnonzero(np.isin(ranks[first], shown) & (ends > starts))
    longest = np.argsort(starts[rows] - ends[rows], kind="stable")[:MOST_PIECES]
    return [
        [
            shown.index(int(ranks[first[row]])),
            _microseconds(starts[row]),
            _microseconds(ends[row] - starts[row]),
        ]
        for row in rows[np.sort(longest)].tolist()
    ]


def _longest_iteration(seen: Observations, finding: Finding | None) -> int | None:
    active = np.full(len(seen.iterations), finding is None)
    if finding is not None:
        active = seen.within(finding.stretches)
    if not active.any():
        return None
    longest = np.argmax(np.nan_to_num(seen.iteration_ns[active]))
    return int(seen.iterations[active][longest])


def _victims(spans: _Spans, culprits: list[int]) -> list[int]:
    """Return the ranks that wait longest for the culprits, then those that wait longest at all."""
    rows = np.flatnonzero(spans.communication & (spans.wait > 0))
    ranks = np.unique(spans.rank)
    if culprits:
        rows = rows[~np.isin(spans.rank[rows], culprits)]
        own = np.isin(spans.rank, culprits) & spans.communication & (spans.match >= 0)
        reached_last = spans.match[own & (spans.wait <= 0)]
        caused = rows[np.isin(spans.match[rows], reached_last)]
        order = [*_by_wait(spans, caused), *_by_wait(spans, rows)]
        return list(dict.fromkeys(order))[:MOST_VICTIMS]
    waited = dict.fromkeys(ranks.tolist(), 0.0) | _wait_of(spans, rows)
    order = sorted(waited, key=lambda rank: (waited[rank], rank))
    return list(dict.fromkeys([*order[:2], *order[-MOST_VICTIMS:]]))


def _wait_of(spans: _Spans, rows: Integers) -> dict[int, float]:
    ranks, number = np.unique(spans.rank[rows], return_inverse=True)
    total = np.bincount(number, weights=spans.wait[rows], minlength=len(ranks))
    return dict(zip(ranks.tolist(), total.tolist(), strict=True))


def _by_wait(spans: _Spans, rows: Integers) -> list[int]:
    waited = _wait_of(spans, rows)
    return sorted(waited, key=lambda rank: (-waited[rank], rank))


def _arrivals(spans: _Spans, shown: list[int], culprits: set[int]) -> list[Json]:
    """Return [culprit's lane, victim's lane, µs]: where a victim's waiting for a culprit ends."""
    least = WORTH_AN_ARRIVAL * float(spans.end.max())
    chosen = spans.communication & np.isin(spans.rank, shown)
    is_culprit = np.isin(spans.rank, sorted(culprits))
    last = chosen & is_culprit & (spans.match >= 0) & (spans.wait <= 0)
    reached = dict(zip(spans.match[last].tolist(), spans.rank[last].tolist(), strict=True))
    waits = chosen & ~is_culprit & (spans.wait >= least) & np.isin(spans.match, list(reached))
    waiting = np.flatnonzero(waits)
    waiting = waiting[np.argsort(-spans.wait[waiting], kind="stable")][:MOST_ARRIVALS]
    return [
        [
            shown.index(reached[int(spans.match[row])]),
            shown.index(int(spans.rank[row])),
            _microseconds(spans.start[row] + spans.wait[row]),
        ]
        for row in waiting.tolist()
    ]


def _pieces(spans: _Spans, rank: int) -> list[Json]:
    """Return [share, name, start µs, length µs, is overlapped] of everything a rank does.

    Later pieces lie over earlier ones: compute, then communication, then the host's work.
    """
    own = spans.rank == rank
    name, names = codes(spans.table, "name")
    microbatch = numbers(spans.table, "microbatch")
    overlapped = numbers(spans.table, "track") == Track.OVERLAPPED
    compute = own & equals(spans.table, "kind", Kind.COMPUTE, Kind.OPTIMIZER)
    passes = compute & (
        equals(spans.table, "name", *PASSES) | equals(spans.table, "kind", Kind.OPTIMIZER)
    )
    pieces: list[Json] = []
    if passes.any():
        for row in np.flatnonzero(passes).tolist():
            text = names[name[row]]
            number = int(microbatch[row])
            text += f", microbatch {number}" if number >= 0 and text in PASSES else ""
            pieces.append(_piece("compute", text, (spans.start[row], spans.end[row])))
    else:
        pieces += _joined(spans, np.flatnonzero(compute), "compute")
    talking = np.flatnonzero(own & spans.communication)
    if len(talking) > MOST_PIECES:
        pieces += _joined(spans, talking, "transfer")
    else:
        for row in talking.tolist():
            pieces += _communication(spans, row, names[name[row]], bool(overlapped[row]))
    for row in np.flatnonzero(own & equals(spans.table, "kind", *HOST_KINDS))[:MOST_PIECES]:
        pieces.append(_piece("host", names[name[row]], (spans.start[row], spans.end[row])))
    return pieces


def _communication(spans: _Spans, row: int, name: str, overlapped: bool) -> list[Json]:
    start, end, wait = int(spans.start[row]), int(spans.end[row]), int(spans.wait[row])
    if wait < 0:
        return [_piece("unsplit", name, (start, end), overlapped)]
    there = min(start + wait, end)
    pieces = [_piece("wait", name, (start, there), overlapped)] if there > start else []
    return [*pieces, _piece("transfer", name, (there, end), overlapped)]


def _joined(spans: _Spans, rows: Integers, share: str) -> list[Json]:
    """Return the union of spans as at most MOST_PIECES pieces: the smallest gaps are closed."""
    rows = rows[np.argsort(spans.start[rows], kind="stable")]
    low, high = new_parts(spans.start[rows], spans.end[rows])
    low, high = low[high > low], high[high > low]
    if not len(low):
        return []
    gaps = low[1:] - high[:-1]
    least = 0
    if len(low) > MOST_PIECES:
        least = int(np.sort(gaps)[len(gaps) - MOST_PIECES])
    starts = group_starts(np.r_[0, np.cumsum(gaps > least)])
    ends = np.r_[starts[1:], len(low)] - 1
    return [
        _piece(share, "", (low[first], high[last]))
        for first, last in zip(starts, ends, strict=True)
    ]


def _piece(
    share: str, name: str, times: tuple[np.int64 | int, np.int64 | int], overlapped: bool = False
) -> list[Json]:
    start, end = times
    return [share, name, _microseconds(start), _microseconds(end - start), int(overlapped)]


def _microseconds(time_ns: np.int64 | int) -> float:
    """Return a time as the page's script gets it: µs, to a tenth."""
    return round(int(time_ns) / 1e3, 1)
