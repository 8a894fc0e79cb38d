"""Passes in which a rank's own time and its waiting cannot be told apart, and what can be measured.

Megatron-Core overlaps the reduction of input gradients over the TP group with the weight gradients.
The pass then waits for the group's slowest member inside its own compute spans:

    mlp-backward   |── own compute ──|── weight gradients ──| waiting |── own ──|
    all_reduce                       |───── wait ───── transfer ──────|
                   |───── lead ──────|

On a GPU a slow rank therefore makes the backward passes of its whole TP group look slow, and a rank
that is a little faster than its partners gathers a lead over them from module to module. Two lower
bounds of a module's own time exist, and the larger one counts:

    span − (collective − shortest) = exact for the last to arrive, whose collective is as short as
                                     they get; too short by what is hidden in the wait of others
    k · lead                       = start to the launch of the first collective, times the usual
                                     ratio of span to lead of those who arrive last; blind for
                                     what is slow only after the launch

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
SHORTEST = 0.05
"""Quantile of a module's collective time that stands for one without any waiting."""
LAST_REACH = 0.02
"""A collective that is longer than the shortest by up to this share of the lead did not wait."""
FEW = 5
"""Modules without waiting from which on a rank's ratio of span to lead is believed."""


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

    `phase` and `time_ns` are those of each pass, `module_kind` a number for the name of each
    module. Modules of a rank must not overlap each other.
    """

    passes: Bools
    phase: Ints
    time_ns: Floats
    modules: Bools
    module_kind: Ints
    overlapped: Bools


@dataclass(frozen=True)
class _Modules:
    """Modules that hold overlapped collectives, (module,) each."""

    row: Ints
    kind: Ints
    owner: Ints
    """Number of the pass, -1 for none."""
    span_ns: Floats
    lead_ns: Floats
    """Start to the launch of the first overlapped collective."""
    collective_ns: Floats


def own_times(spans: SpanTimes, marks: Entanglement) -> OwnTimes:
    """Own time of every pass, and which phases are entangled."""
    if not marks.overlapped.any() or not marks.modules.any():
        return OwnTimes((), marks.time_ns)
    modules = _modules(spans, marks)
    holds = np.zeros(len(marks.phase), dtype=bool)
    holds[modules.owner[modules.owner >= 0]] = True
    phases = tuple(
        int(one)
        for one in np.unique(marks.phase)
        if float(holds[marks.phase == one].mean()) > MIN_SHARE
    )
    waited = np.zeros(len(marks.phase))
    inside = modules.owner >= 0
    np.add.at(waited, modules.owner[inside], _waited(modules)[inside])
    waited[~np.isin(marks.phase, phases)] = 0.0
    return OwnTimes(phases, np.maximum(marks.time_ns - waited, 1.0))


def _modules(spans: SpanTimes, marks: Entanglement) -> _Modules:
    module = enclosing(spans, marks.modules, marks.overlapped)
    inside = module >= 0
    first = np.full(int(marks.modules.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first, module[inside], spans.start[marks.overlapped][inside])
    busy_ns = spans.duration[marks.overlapped].astype(np.float64)
    collective = enclosed_time(spans, marks.modules, marks.overlapped, busy_ns)
    use = first < np.iinfo(np.int64).max
    start, length = spans.start[marks.modules], spans.duration[marks.modules]
    return _Modules(
        row=spans.row[marks.modules][use],
        kind=marks.module_kind[use],
        owner=enclosing(spans, marks.passes, marks.modules)[use],
        span_ns=length[use].astype(np.float64),
        lead_ns=np.maximum(first - start, 1)[use].astype(np.float64),
        collective_ns=np.minimum(collective[use], length[use]),
    )


def _waited(modules: _Modules) -> Floats:
    """Time of each module that is not its rank's own."""
    waited = np.zeros(len(modules.row))
    for kind in np.unique(modules.kind):
        use = modules.kind == kind
        lead, span = modules.lead_ns[use], modules.span_ns[use]
        shortest = float(np.quantile(modules.collective_ns[use], SHORTEST))
        excess = np.maximum(modules.collective_ns[use] - shortest, 0.0)
        ratio = span / lead
        usual = _usual_ratio(modules.row[use], ratio, excess <= LAST_REACH * lead)
        waited[use] = np.minimum(excess, np.maximum(span - usual * lead, 0.0))
    return waited


def _usual_ratio(row: Ints, ratio: Floats, last: Bools) -> float:
    """Span over lead of those who arrive last: of each rank the median, of these the lower median.

    Where nobody ever arrives without waiting, the smallest ratios stand in.
    """
    order = np.lexsort((ratio[last], row[last]))
    ranks, values = row[last][order], ratio[last][order]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ranks) != 0]))
    sizes = np.diff(np.concatenate([starts, [len(ranks)]]))
    enough = sizes >= FEW
    if not enough.any():
        return float(np.quantile(ratio, SHORTEST))
    by_rank = np.sort(values[(starts + (sizes - 1) // 2)[enough]])
    return float(by_rank[(len(by_rank) - 1) // 2])
