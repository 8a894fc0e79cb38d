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

from detect.observe.launches import launched_just_in_time
from detect.observe.spans import SpanIndex
from detect.observe.work import HEADS, layer_modules
from detect.thresholds.bursts import BURSTS, RUNS
from detect.thresholds.devices import PAIRS
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    combine,
    group_lengths,
    group_numbers,
    group_starts,
    order_within,
)
from megascan.timeline import codes, numbers

QUARTERS = (BURSTS.quiet_share, 0.5, 1.0 - BURSTS.quiet_share)
"""Shares of what is below the quartiles and the median."""


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
    lost_ns: Floats
    cuts: Flags
    """Whether it begins or ends inside a pass, or between a forward pass and the backward pass that
    follows, and the rest of that pass is as quick as ever."""
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
        kind = name[rows].astype(np.int64)
        layer, chunk, microbatch = (
            numbers(index.table, one)[rows] for one in ("layer", "chunk", "microbatch")
        )
        time_ns = index.self_time(rows)
        log_ns = np.log(time_ns)
        (quiet,) = _quantiles(log_ns, combine(row, kind, layer, chunk), BURSTS.quiet_share)
        over = log_ns - quiet
        margin = _margins(over, combine(row, kind))
        order = np.argsort(index.axis[0][rows], kind="stable")
        order = order[np.isfinite(margin[order])]
        return cls(
            row=row[order],
            iteration=iteration[order],
            kind=kind[order],
            a_pass=combine(row, iteration, chunk, microbatch)[order],
            time_ns=time_ns[order],
            over=over[order],
            margin=margin[order],
            just_in_time=launched_just_in_time(index, rows)[order],
        )


def _quantiles(value: Floats, group: Integers, *shares: float) -> list[Floats]:
    """Return what each of the shares of all values of a value's group keep below, (value,) each;
    groups are numbers from 0.
    """
    order = order_within(group, value)
    ordered, starts = value[order], group_starts(group[order])
    slot = np.empty(len(value), dtype=np.int64)
    slot[order] = group_numbers(starts, len(value))
    last = group_lengths(starts, len(value)) - 1
    quantiles = []
    for share in shares:
        low = starts + (share * last).astype(np.int64)
        high = np.minimum(low + 1, starts + last)
        part = share * last - (low - starts)
        quantiles.append((ordered[low] + part * (ordered[high] - ordered[low]))[slot])
    return quantiles


def _margins(over: Floats, kind: Integers) -> Floats:
    """Return by how much modules of a `kind` (of a rank) may vary, from the half that is quickest,
    which a device that is slow now and then does not reach, (module,).
    """
    quarter, half = _quantiles(over, kind, BURSTS.quiet_share, 0.5)
    sigma = (half - quarter) / BURSTS.half_sigmas
    margin = half + np.maximum(RUNS.margin_log, RUNS.margin_sigmas * sigma)
    return np.where(sigma <= RUNS.most_sigma_log, margin, np.inf)


def slow_runs_of(index: SpanIndex) -> SlowRuns:
    """Return the runs of slow modules of some ranks, all of whose layers are recorded."""
    modules = _Modules.of(index)
    first, end = _stretches(modules.over > modules.margin, combine(modules.row, modules.iteration))
    kept = _are_runs(modules, first, end)
    return _described(modules, first[kept], end[kept])


def _stretches(slow: Flags, iteration: Integers) -> tuple[Integers, Integers]:
    """Return where stretches of slow places begin and end, (stretch,) each: slow places that follow
    each other within an iteration of a rank, a single other one between them left in.
    """
    places = np.flatnonzero(slow)
    if not len(places):
        return places, places
    apart = (np.diff(places) > RUNS.most_gap + 1) | (np.diff(iteration[places]) != 0)
    firsts = np.r_[0, np.flatnonzero(apart) + 1]
    lasts = np.r_[firsts[1:] - 1, len(places) - 1]
    enough = lasts - firsts + 1 >= RUNS.least_modules
    return places[firsts[enough]], places[lasts[enough]] + 1


def _laid_out(first: Integers, end: Integers) -> tuple[Integers, Integers]:
    """Return the modules of all stretches, one stretch after the other, and whose each of them is,
    (module of a stretch,) both.
    """
    length = end - first
    run = np.repeat(np.arange(len(first)), length)
    return np.arange(len(run)) + (first - np.cumsum(length) + length)[run], run


def _are_runs(modules: _Modules, first: Integers, end: Integers) -> Flags:
    """Flag the stretches, (stretch,), nearly all of whose modules are slow, of several kinds where
    the rank has several, by one factor.
    """
    place, run = _laid_out(first, end)
    place, run = (one[(modules.over > modules.margin)[place]] for one in (place, run))
    begins = group_starts(run)
    low, size, high = (one[begins] for one in _quantiles(modules.over[place], run, *QUARTERS))
    is_one_factor = high - low <= RUNS.one_factor_share * size
    of_rank = _num_kinds(modules.kind, modules.row)[modules.row[first]]
    is_several = _num_kinds(modules.kind[place], run) >= np.minimum(RUNS.least_kinds, of_rank)
    share = np.bincount(run, minlength=len(first)) / (end - first)
    return np.asarray(is_one_factor & is_several & (share >= RUNS.least_slow_share))


def _num_kinds(kind: Integers, group: Integers) -> Integers:
    """Return of how many kinds the modules of each group, numbered from 0, are, (group,)."""
    found = np.zeros((int(group.max(initial=-1)) + 1, int(kind.max(initial=-1)) + 1), dtype=bool)
    found[group, kind] = True
    return np.asarray(found.sum(axis=1))


def _described(modules: _Modules, first: Integers, end: Integers) -> SlowRuns:
    """Return what is known of the runs from `first` to before `end`, (run,) each."""
    place, run = _laid_out(first, end)
    over, num_runs, num_modules = modules.over[place], len(first), end - first
    lost_ns = modules.time_ns[place] * -np.expm1(-np.maximum(over, 0.0))
    _, one_a_pass = np.unique(combine(run, modules.a_pass[place]), return_index=True)
    size_log = _quantiles(over, run, 0.5)[0][group_starts(run)]
    rest = _rest_of_passes(modules, first, end)
    return SlowRuns(
        row=modules.row[first],
        iteration=modules.iteration[first],
        num_modules=num_modules,
        num_passes=np.bincount(run[one_a_pass], minlength=num_runs),
        size_log=size_log,
        lost_ns=np.bincount(run, lost_ns, num_runs).astype(np.float64),
        cuts=rest < PAIRS.agrees_share * size_log,
        starved_share=np.bincount(run, modules.just_in_time[place], num_runs) / num_modules,
    )


def _rest_of_passes(modules: _Modules, first: Integers, end: Integers) -> Floats:
    """Return the mean excess of those modules, (run,) log, that the passes in which runs begin and
    end hold beside them; infinite where there are none: runs of whole passes cut none.

    Example: of a pass on longer data 1.15 times as long the nine modules of the backward half are
    1.10 to 1.13 times as long, too little to count as slow: 0.11 beside 0.14, one longer pass.
    """
    begins = group_starts(modules.a_pass)
    number, last = group_numbers(begins, len(modules.a_pass)), np.r_[begins[1:], len(modules.over)]
    before, after = begins[number[first]], last[number[end - 1]]
    total = np.r_[0.0, np.cumsum(modules.over)]
    over = total[first] - total[before] + total[after] - total[end]
    num = first - before + after - end
    return np.where(num > 0, over / np.maximum(num, 1), np.inf)
