"""Runs of slow modules: what a device that is slow for a while leaves inside passes.

Problem: a device that is throttled for 30 ms slows a part of a pass. The pass is a little longer
then, as one on longer data is, and the iteration hardly at all.

Idea: each module (attention, MLP, experts, output layer) of a rank takes about as long as the same
module of the same layer in other microbatches. Longer data lengthen all modules of a pass, a pause
lengthens one. Only a slow device lengthens several that follow each other, of different kinds, by
one factor, and may begin or end with it in the middle of a pass.

    over(module) = log (time / the time that a quarter of its like on the rank keep below)
    run          = modules in a row, of one iteration, that exceed what is usual by far

Example: 34 modules of a forward pass that vary by 0.4 %; the first 17 take 1.55 times their time.

The kinds of modules that vary by more than a few per cent (experts, attention on documents of any
length) tell nothing and are left out; where all do, there are no runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observe.spans import SpanIndex
from detect.observe.stalls import launched_just_in_time
from detect.observe.work import HEADS, layer_modules
from detect.thresholds import BURSTS, RUNS
from megascan.arrays import Flags, Floats, Integers, numbered
from megascan.timeline import codes, numbers


@dataclass(frozen=True, kw_only=True)
class SlowRuns:
    """Runs of slow modules, (run,) each."""

    row: Integers
    """Among all recorded ranks, whatever rows are merged later."""
    iteration: Integers
    num_modules: Integers
    num_passes: Integers
    """Microbatches that it reaches over."""
    size_log: Floats
    """How much slower its modules are, typically, log."""
    spread_log: Floats
    """The range in which half of its modules lie."""
    lost_ns: Floats
    cuts: Flags
    """Whether it begins or ends inside a pass, or between a forward pass and the backward pass that
    follows."""
    starved_share: Floats
    """Share of its modules that began as soon as they were launched."""


@dataclass(frozen=True)
class _Modules:
    """The modules of some ranks in the order in which they run, (module,) each; those of kinds that
    vary by much are left out.
    """

    row: Integers
    iteration: Integers
    kind: Integers
    a_pass: Integers
    time_ns: Floats
    over: Floats
    """Log time over the rank's quiet time of the same module."""
    margin: Floats
    """How much of that sound modules of the kind may vary by."""
    just_in_time: Flags

    @classmethod
    def of(cls, index: SpanIndex) -> _Modules:
        """Take the modules of layers and the output layers."""
        rows = layer_modules(index) | index.named(HEADS)
        rows &= numbers(index.table, "self_ns") > 0
        name, _ = codes(index.table, "name")
        row, iteration = index.row[rows], numbers(index.table, "iteration")[rows]
        kind, start = name[rows].astype(np.int64), index.start[rows]
        layer, chunk, microbatch = (
            numbers(index.table, one)[rows] for one in ("layer", "chunk", "microbatch")
        )
        time_ns = index.self_time(rows)
        over = _over_quiet(np.log(time_ns), numbered(row, kind, layer, chunk))
        margin = _margins(over, numbered(row, kind))
        order = np.lexsort((start, iteration, row))
        order = order[np.isfinite(margin[order])]
        return cls(
            row=row[order],
            iteration=iteration[order],
            kind=kind[order],
            a_pass=numbered(row, iteration, chunk, microbatch)[order],
            time_ns=time_ns[order],
            over=over[order],
            margin=margin[order],
            just_in_time=launched_just_in_time(index, rows)[order],
        )


def _quantiles(value: Floats, group: Integers, share: float) -> Floats:
    """Return what a `share` of the values of each value's group keep below, (value,)."""
    order = np.lexsort((value, group))
    _, first, slot, num = np.unique(
        group[order], return_index=True, return_inverse=True, return_counts=True
    )
    quantile = value[order][first + (share * (num - 1)).astype(np.int64)]
    result = np.empty_like(value)
    result[order] = quantile[slot]
    return result


def _over_quiet(log_ns: Floats, like: Integers) -> Floats:
    """Return log times over what a quarter of those `like` them keep below, (module,)."""
    return log_ns - _quantiles(log_ns, like, BURSTS.quiet_share)


def _margins(over: Floats, kind: Integers) -> Floats:
    """Return by how much modules of a `kind` (of a rank) may vary, from the half that is quickest,
    which a device that is slow now and then does not reach, (module,).
    """
    quarter, half = (_quantiles(over, kind, share) for share in (0.25, 0.5))
    sigma = (half - quarter) / BURSTS.half_sigmas
    margin = half + np.maximum(RUNS.margin_log, RUNS.margin_sigmas * sigma)
    return np.where(sigma <= RUNS.most_sigma_log, margin, np.inf)


def slow_runs_of(index: SpanIndex) -> SlowRuns:
    """Return the runs of slow modules of some ranks; none on CPUs, and where layers are recorded by
    turns.
    """
    if index.is_cpu or index.is_sampled:
        return _none()
    modules = _Modules.of(index)
    stretch = numbered(modules.row, modules.iteration)
    runs = _runs(modules.over > modules.margin, stretch)
    kept = [run for low, high in runs if _is_run(modules, run := np.arange(low, high))]
    return _described(modules, kept) if kept else _none()


def _runs(slow: Flags, stretch: Integers) -> list[tuple[int, int]]:
    """Return from where to where slow places follow each other within a stretch, a single other
    one between them left in.
    """
    places = np.flatnonzero(slow)
    if not len(places):
        return []
    apart = (np.diff(places) > RUNS.most_gap + 1) | (np.diff(stretch[places]) != 0)
    firsts = np.r_[0, np.flatnonzero(apart) + 1]
    lasts = np.r_[firsts[1:] - 1, len(places) - 1]
    return [
        (int(places[first]), int(places[last]) + 1)
        for first, last in zip(firsts, lasts, strict=True)
        if last - first + 1 >= RUNS.least_modules
    ]


def _is_run(modules: _Modules, run: Integers) -> bool:
    """Return whether nearly all modules of a run are slow, of several kinds where the rank has
    several, by one factor.
    """
    over = modules.over[run]
    slow = over > modules.margin[run]
    size = float(np.median(over[slow]))
    is_one_factor = float(np.subtract(*np.quantile(over[slow], (0.75, 0.25)))) <= (
        RUNS.one_factor_share * size
    )
    same = modules.row == modules.row[run[0]]
    num_kinds = len(np.unique(modules.kind[same]))
    is_several = len(np.unique(modules.kind[run][slow])) >= min(RUNS.least_kinds, num_kinds)
    return is_one_factor and is_several and float(slow.mean()) >= RUNS.least_slow_share


def _described(modules: _Modules, runs: list[Integers]) -> SlowRuns:
    """Return what is known of each run."""
    first, last = (np.array([run[place] for run in runs]) for place in (0, -1))
    begins = np.r_[True, np.diff(modules.a_pass) != 0]
    ends = np.r_[begins[1:], True]
    over = [modules.over[run] for run in runs]
    quartiles = np.array([np.quantile(one, (0.25, 0.5, 0.75)) for one in over])
    lost = [
        float((modules.time_ns[run] * -np.expm1(-np.maximum(one, 0.0))).sum())
        for run, one in zip(runs, over, strict=True)
    ]
    return SlowRuns(
        row=modules.row[first],
        iteration=modules.iteration[first],
        num_modules=np.array([len(run) for run in runs], dtype=np.int64),
        num_passes=np.array([len(np.unique(modules.a_pass[run])) for run in runs], dtype=np.int64),
        size_log=quartiles[:, 1],
        spread_log=quartiles[:, 2] - quartiles[:, 0],
        lost_ns=np.array(lost),
        cuts=~(begins[first] & ends[last]),
        starved_share=np.array([modules.just_in_time[run].mean() for run in runs]),
    )


def _none() -> SlowRuns:
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0)
    return SlowRuns(
        row=whole,
        iteration=whole,
        num_modules=whole,
        num_passes=whole,
        size_log=real,
        spread_log=real,
        lost_ns=real,
        cuts=np.zeros(0, dtype=bool),
        starved_share=real,
    )
