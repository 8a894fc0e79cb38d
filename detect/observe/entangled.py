"""Passes in which a rank's own time and its waiting cannot be told apart, and what can be measured.

Megatron-Core overlaps the reduction of input gradients over the TP group with the weight gradients.
The pass then waits for the group's slowest member inside its own compute spans:

    mlp-backward   |── own compute ──|── weight gradients ──| waiting |── own ──|
    all_reduce                       |───── wait ───── transfer ──────|
                   |───── lead ──────|

On a GPU a slow rank therefore makes the backward passes of its whole TP group look slow, and a rank
that is a little faster than its partners gathers a lead over them from module to module. Between
launch and end of the collective a rank's own work cannot be seen where the transfer hides it; what
counts for it there is the same for all ranks, h. Two measures of a module's own time exist:

    span − collective + h   = exact for the last to arrive; too short by what is hidden in the wait
                              of others, or behind a transfer that takes longer than that work
    k · lead                = start to the launch of the first collective, times the usual ratio of
                              the first measure to the lead; blind for what is slow only afterwards

The larger one of their sums over an iteration counts. A device that is f times slower has f times
the lead, so f comes out whatever h and k are, even where the transfer hides all weight gradients.

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
"""Modules without waiting from which on a rank's ratio is believed."""
MOST_HIDDEN = 1.15
"""Weight gradients that end within a wait shorten a module by no more than this."""


@dataclass(frozen=True)
class OwnTimes:
    """Own time of entangled passes, by pass."""

    phases: tuple[int, ...]
    """Phases that are entangled."""
    time_ns: Floats
    """(pass,): the estimate; the pass's whole time where its phase is not entangled."""
    unwaited_ns: Floats
    """(pass,): what the pass took, less the waiting for others; transfers are part of it."""


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
    place: Ints
    """Row and iteration as one number."""
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
        return OwnTimes((), marks.time_ns, marks.time_ns)
    modules = _modules(spans, marks)
    holds = np.zeros(len(marks.phase), dtype=bool)
    holds[modules.owner[modules.owner >= 0]] = True
    phases = tuple(
        int(one)
        for one in np.unique(marks.phase)
        if float(holds[marks.phase == one].mean()) > MIN_SHARE
    )
    inside = modules.owner >= 0
    differences = []
    for part_ns in _parts(modules):
        difference = np.zeros(len(marks.phase))
        np.add.at(difference, modules.owner[inside], (part_ns - modules.span_ns)[inside])
        difference[~np.isin(marks.phase, phases)] = 0.0
        differences.append(np.maximum(marks.time_ns + difference, 1.0))
    return OwnTimes(phases, differences[0], differences[1])


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
        place=(spans.row * spans.shape[1] + spans.slot)[marks.modules][use],
        kind=marks.module_kind[use],
        owner=enclosing(spans, marks.passes, marks.modules)[use],
        span_ns=length[use].astype(np.float64),
        lead_ns=np.maximum(first - start, 1)[use].astype(np.float64),
        collective_ns=np.minimum(collective[use], length[use]),
    )


def _parts(modules: _Modules) -> tuple[Floats, Floats]:
    """Of each module the rank's own time, and its span less the waiting for others."""
    own, unwaited = modules.span_ns.copy(), modules.span_ns.copy()
    for kind in np.unique(modules.kind):
        use = modules.kind == kind
        shortest = float(np.quantile(modules.collective_ns[use], SHORTEST))
        lead = modules.lead_ns[use]
        hidden = min(shortest, _middle(_medians(modules.row[use], lead, 1)))
        own[use] = _own(modules, use, shortest, hidden)
        unwaited[use] = np.minimum(own[use] + shortest - hidden, modules.span_ns[use])
    return own, unwaited


def _own(modules: _Modules, use: Bools, shortest: float, hidden: float) -> Floats:
    """Own time of the modules of one kind."""
    row, lead = modules.row[use], modules.lead_ns[use]
    collective = modules.collective_ns[use]
    after = modules.span_ns[use] - collective + hidden
    exact = collective - shortest <= LAST_REACH * lead
    rest = after - lead - hidden
    ratio = after / lead
    if not exact.any() or np.median(rest[exact]) <= LAST_REACH * np.median(lead):
        # the transfer ends last, whoever arrives last: exact for all, low for slow ranks
        usual = _middle(_medians(row, ratio, 1), upper=True)
    else:
        usual = _usual_ratio(row, ratio, exact)
    place = modules.place[use]
    more = np.bincount(place, weights=usual * lead - after)
    return np.where(more[place] > 0, usual * lead, after)


def _usual_ratio(row: Ints, ratio: Floats, exact: Bools) -> float:
    """Of the modules whose ratio is exact: of each rank the median, of these the lower median.

    Where few ranks have any, all modules of the others stand in, unless what is hidden in their
    waits explains the difference.
    """
    known = _medians(row[exact], ratio[exact], FEW)
    others = ~np.isin(row, list(known))
    if not others.any() or 2 * len(known) >= len(np.unique(row)):
        return _middle(known)
    waiting = _middle(_medians(row[others], ratio[others], 1))
    explained = known and waiting <= _middle(known) <= MOST_HIDDEN * waiting
    return _middle(known) if explained else waiting


def _medians(row: Ints, values: Floats, least: int) -> dict[int, float]:
    """Lower median of the values of every rank that has so many at least."""
    order = np.lexsort((values, row))
    ranks, ordered = row[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(ranks) != 0])[: len(ranks)])
    sizes = np.diff(np.concatenate([starts, [len(ranks)]]))
    middle = starts + (sizes - 1) // 2
    enough = sizes >= least
    return dict(zip(ranks[starts][enough].tolist(), ordered[middle][enough].tolist(), strict=True))


def _middle(values: dict[int, float], *, upper: bool = False) -> float:
    """Lower median of the values, or the upper one."""
    ordered = sorted(values.values())
    return ordered[(len(ordered) - (0 if upper else 1)) // 2]
