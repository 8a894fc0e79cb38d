"""Passes in which a rank's own time and its waiting cannot be told apart, and what can be measured.

Megatron-Core overlaps the reduction of input gradients over the TP group with the weight gradients.
The pass then waits for the group's slowest member inside its own compute spans:

    mlp-backward   |── own compute ──|── weight gradients ──| waiting |── own ──|
    all_reduce                       |───── wait ───── transfer ──────|
                   |───── lead ──────|

On a GPU a slow rank therefore makes the backward passes of its whole TP group look slow. Two lower
bounds of a rank's own time exist, and the larger one counts:

    rest   = the pass less its overlapped collectives; exact where weight gradients do not run
             beside them, too short by what is hidden in the wait where they do
    k·lead = module starts to the launch of their first overlapped collective, times the job's usual
             ratio of rest to lead; blind for what is slow only after the launch

Limit: in a TP group that has no equal anywhere in the job, k comes from the suspects themselves.
CPU runs do not need this: a thread that waits uses no CPU time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats, Ints
from detect.observe.cover import SpanTimes, enclosed_time, enclosing

MIN_SHARE = 0.5
"""Share of a phase's passes that must hold such collectives before they are measured this way."""


@dataclass(frozen=True)
class OwnTimes:
    """Own time of entangled passes, by pass."""

    phases: tuple[int, ...]
    """Phases that are entangled."""
    time_ns: Floats
    """(pass,): the lower bound; the pass's whole time where its phase is not entangled."""


@dataclass(frozen=True, kw_only=True)
class Entanglement:
    """Marks of spans: passes, their modules, and the collectives that overlap them.

    `phase` and `time_ns` are those of each pass. Modules of a rank must not overlap each other.
    """

    passes: Bools
    phase: Ints
    time_ns: Floats
    modules: Bools
    overlapped: Bools


def own_times(spans: SpanTimes, marks: Entanglement) -> OwnTimes:
    """Own time of every pass, and which phases are entangled."""
    if not marks.overlapped.any() or not marks.modules.any():
        return OwnTimes((), marks.time_ns)
    lead = _leads(spans, marks)
    phases = tuple(
        int(one)
        for one in np.unique(marks.phase)
        if float((lead[marks.phase == one] > 0).mean()) > MIN_SHARE
    )
    busy_ns = spans.duration[marks.overlapped].astype(np.float64)
    rest = marks.time_ns - enclosed_time(spans, marks.passes, marks.overlapped, busy_ns)
    rest = np.maximum(rest, np.maximum(lead, 1.0))
    row = spans.row[marks.passes]
    own = marks.time_ns.copy()
    for phase in phases:
        use = marks.phase == phase
        usual = _usual_ratio(row[use], rest[use], lead[use])
        own[use] = np.minimum(np.maximum(rest[use], usual * lead[use]), marks.time_ns[use])
    return OwnTimes(phases, own)


def _leads(spans: SpanTimes, marks: Entanglement) -> Floats:
    """Sum of module start to first overlapped collective, for each pass; 0 where it has none."""
    module = enclosing(spans, marks.modules, marks.overlapped)
    inside = module >= 0
    first = np.full(int(marks.modules.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first, module[inside], spans.start[marks.overlapped][inside])
    module_start = spans.start[marks.modules]
    lead = np.where(first < np.iinfo(np.int64).max, first - module_start, 0)
    owner = enclosing(spans, marks.passes, marks.modules)
    total = np.zeros(len(marks.phase))
    np.add.at(total, owner[owner >= 0], lead[owner >= 0])
    return total


def _usual_ratio(row: Ints, rest: Floats, lead: Floats) -> float:
    """Rest over lead, of each rank its median, of these the lower median: the job's usual one."""
    use = lead > 0
    row, ratio = row[use], rest[use] / lead[use]
    order = np.lexsort((ratio, row))
    starts = np.flatnonzero(np.concatenate([[True], np.diff(row[order]) != 0]))
    sizes = np.diff(np.concatenate([starts, [len(row)]]))
    by_rank = np.sort(ratio[order][starts + (sizes - 1) // 2])
    return float(by_rank[(len(by_rank) - 1) // 2])
