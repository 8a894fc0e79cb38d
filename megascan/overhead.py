"""Measure what tracing costs a run from the run itself: traced against untraced iterations.

A cycle is one interval: traced iterations first, then untraced iterations. Within a cycle the
machine is the same, so each cycle gives ratios of its own, and drift between cycles cancels:

    traced ratio   median of the traced / median of the untraced
    run ratio      time of the whole cycle / time if every iteration had been like the untraced

Iterations during which the writer's thread turned a window into lines are neither traced nor
untraced: the writer may have slowed them. They count in the run ratio, and replace untraced
iterations only in cycles without any.

The result is the median over cycles with the sign test's interval: two order statistics that
contain the true median with the given confidence, whatever the distribution. The first cycle of a
run (allocation, warm-up) is left out.

Example: 7 cycles give ratios 1.001 1.002 1.002 1.003 1.004 1.004 1.9; the median is 1.003, and with
confidence 95 % it lies within 1.001 … 1.9, since 7 values leave out none at either end.

Limits: windows begin at fixed iterations. Other events at multiples of the interval (an evaluation,
a checkpoint that leaves the next iteration cold) are mistaken for a cost of tracing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megascan.header import Activity, WindowRecord

Timing: TypeAlias = tuple[int, int, int]
"""(iteration, activity, duration in ns), as in WindowRecord.timings."""

CONFIDENCE = 0.95
_MOST_RANKS = 64
MIN_CYCLES = 6
"""Fewer cycles give no interval of CONFIDENCE: 2 · 0.5⁶ is the first power below 5 %."""


@dataclass(frozen=True)
class Estimate:
    """A median ratio (1.01: one per cent longer) and its confidence interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What tracing cost; the estimates are None if fewer than MIN_CYCLES cycles are comparable."""

    num_cycles: int
    num_traced: int
    num_untraced: int
    traced: Estimate | None
    """Ratio of a traced to an untraced iteration."""
    run: Estimate | None
    """Ratio of the run, windows and the iterations between them, to an untraced run."""
    granularity: str = ""
    interval: int = 0


@dataclass(frozen=True)
class _Cycle:
    traced_ratio: float
    run_ratio: float


def measure(
    timings: Iterable[Timing], interval: int, *, confidence: float = CONFIDENCE
) -> Overhead:
    """Measure the cost of tracing from the timings of one rank."""
    timings = list(timings)
    cycles = _cycles(timings, interval)
    return _overhead([timings], list(cycles.values()), confidence)


def measure_job(windows: Mapping[int, Sequence[WindowRecord]]) -> Overhead:
    """Measure the cost of tracing from the records of all ranks, at the level of most windows.

    A cycle's ratios are the medians over ranks: iterations of a synchronous job take equally long
    on all ranks, so ranks are not independent measurements, and of many ranks some suffice.
    """
    ranks = sorted(windows)
    windows = {rank: windows[rank] for rank in ranks[:: math.ceil(len(ranks) / _MOST_RANKS) or 1]}
    settings = [
        (record.granularity, record.interval) for part in windows.values() for record in part
    ]
    if not settings:
        return _overhead([], [], CONFIDENCE)
    granularity, interval = max(set(settings), key=settings.count)
    chosen = [_timings_at(records, granularity, interval) for records in windows.values()]
    by_cycle: dict[int, list[_Cycle]] = {}
    for timings in chosen:
        for number, cycle in _cycles(timings, interval).items():
            by_cycle.setdefault(number, []).append(cycle)
    cycles = [
        _Cycle(
            statistics.median(cycle.traced_ratio for cycle in ranks),
            statistics.median(cycle.run_ratio for cycle in ranks),
        )
        for ranks in by_cycle.values()
    ]
    return _overhead(chosen, cycles, CONFIDENCE, granularity, interval)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the median and the sign test's interval; None if there are too few values."""
    ordered, num_values = sorted(values), len(values)
    tail, left_out = 0.0, 0
    for successes in range(num_values // 2 + 1):
        tail += math.comb(num_values, successes) / 2**num_values
        if 2 * tail > 1 - confidence:
            break
        left_out = successes + 1
    if not left_out:
        return None
    return Estimate(statistics.median(ordered), ordered[left_out - 1], ordered[-left_out])


def _overhead(
    ranks: Sequence[Sequence[Timing]],
    cycles: Sequence[_Cycle],
    confidence: float,
    granularity: str = "",
    interval: int = 0,
) -> Overhead:
    activities = [activity for timings in ranks for _, activity, _ in timings]
    num_ranks = max(1, len(ranks))
    return Overhead(
        num_cycles=len(cycles),
        num_traced=activities.count(Activity.TRACED) // num_ranks,
        num_untraced=(len(activities) - activities.count(Activity.TRACED)) // num_ranks,
        traced=estimate([cycle.traced_ratio for cycle in cycles], confidence),
        run=estimate([cycle.run_ratio for cycle in cycles], confidence),
        granularity=granularity,
        interval=interval,
    )


def _cycles(timings: Iterable[Timing], interval: int) -> dict[int, _Cycle]:
    """Return the comparable cycles by number, without the first cycle."""
    found: dict[int, dict[int, list[int]]] = {}
    for iteration, activity, duration_ns in timings:
        if interval > 0:
            by_activity = found.setdefault((iteration - 1) // interval, {})
            by_activity.setdefault(activity, []).append(duration_ns)
    return {
        number: cycle
        for number, durations in found.items()
        if number != min(found) and (cycle := _compare(durations, interval)) is not None
    }


def _compare(durations: Mapping[int, Sequence[int]], interval: int) -> _Cycle | None:
    writing = durations.get(Activity.WRITING, ())
    untraced = durations.get(Activity.NONE, writing)
    traced = durations.get(Activity.TRACED, ())
    if not traced or not untraced:
        return None
    usual = statistics.median(untraced)
    if usual <= 0:
        return None
    traced_ratio = statistics.median(traced) / usual
    writing_ratio = statistics.median(writing) / usual if writing else 1.0
    extra = len(traced) * (traced_ratio - 1) + len(writing) * (writing_ratio - 1)
    return _Cycle(traced_ratio, 1 + extra / interval)


def _timings_at(records: Sequence[WindowRecord], granularity: str, interval: int) -> list[Timing]:
    """Return timings of iterations that follow a window of this granularity and interval.

    A record has the timings before its end, also of iterations that follow the window before it.
    """
    windows = sorted(records, key=lambda record: record.first_iteration)
    chosen: list[Timing] = []
    for position, record in enumerate(windows):
        earlier = windows[position - 1] if position else record
        for timing in record.timings:
            own = record if timing[0] >= record.first_iteration else earlier
            if (own.granularity, own.interval) == (granularity, interval):
                chosen.append(timing)
    return chosen
