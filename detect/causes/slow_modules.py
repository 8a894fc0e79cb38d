"""Devices that are slow for parts of passes: runs of slow modules, counted.

Problem: throttling that lasts for less than a pass, or meets documents of any length, hardly shows
in passes. `detect.observe.modules` finds modules in a row that are slow by one factor.

Idea: count passes that such runs meet. Sound ranks of this very job show how often that happens
without a fault (`chance`); nearly always never, which is known of sound jobs at large, too. So many
of one row must be improbable at that rate, in two iterations at least, and be the row's alone. One
run is enough if it is long and begins or ends in the middle of a pass: in jobs at large no sound
rank has any, for neither pauses nor data make eight modules slow by one factor and leave alone the
others of the pass. Where another rank has a long one as well, or more than a third of the others
have some that are half as slow, this job is not like these, and nobody is told. Runs are left out
that say nothing of a device:

    began as soon as launched     the host was late, whose delay lengthens what follows as well
    smaller than a TP mate's      where passes hold waiting: the mate is slow, and this rank waits

Example: 16 ranks, 6 iterations of one forward and one backward pass. In five of them all 17 modules
of rank 4 from some moment on take 1.38 times as long; no other rank has a run.

A rank is compared with itself, so one of two, or one that is alone on its stage, is searched, too;
somebody else has to be there who shows no runs.

Limits: where communication inside TP or CP groups was not recorded, mates wait in each other's
modules; such ranks are not searched.
"""

from __future__ import annotations

import numpy as np

from detect.causes.device import mates_of
from detect.causes.hits import Burst, Tally, heaviest_first, num_runs
from detect.observe.modules import SlowRuns
from detect.observe.observations import Observations
from detect.thresholds.bursts import BURSTS, RUNS
from detect.thresholds.devices import PAIRS
from megascan.arrays import Flags, Floats, Integers


def bursts_of_modules(seen: Observations, known: Flags, rate: float, floor: float) -> list[Burst]:
    """Return the bursts of rows of which modules are slow in a row, the heaviest first.

    `known` rows have been named already; `rate` is the false-discovery rate; the runs must be
    slower by `floor`.
    """
    runs, members = seen.slow_runs, seen.members
    waits_inside = {"tp", "cp"} & {*seen.hidden_axes} or not seen.splits_tensor_groups
    if runs is None or waits_inside or int((~known).sum()) < 2:
        return []
    row, slot, kept = _placed(seen, runs, floor)
    lost, passes = np.zeros((2, *seen.busy_ns.shape))
    np.add.at(lost, (row[kept], slot[kept]), runs.lost_ns[kept])
    np.add.at(passes, (row[kept], slot[kept]), runs.num_passes[kept])
    busy_ns = np.maximum(np.nan_to_num(seen.busy_ns), 1.0)
    excess = lost / np.maximum(busy_ns - lost, RUNS.least_left_share * busy_ns)
    share, num_passes = excess.mean(axis=1), seen.work.log_ns.shape[2]
    counts, hits = np.minimum(passes, num_passes).sum(axis=1).astype(np.int64), passes > 0
    is_long = kept & (runs.num_modules >= RUNS.long_modules)
    left, found = ~known, list[Burst]()
    for one in heaviest_first(share, ~known & (share >= RUNS.least_share)):
        others = left & (np.arange(len(known)) != one)
        own, is_single = kept & (row == one), int(hits[one].sum()) < BURSTS.min_hits
        tally = _tally(counts, one, others, hits.shape[1] * num_passes, is_single)
        q_value = tally.by_chance * len(known) / (len(found) + 1)
        is_alone = tally.is_alone and Tally.of(hits, one, others).is_alone
        goes_on = hits[one, -1] and num_runs(hits[one]) == 1  # a level's to tell
        are_told = (is_long & runs.cuts)[own].all() and not is_long[others[row] & ~own].any()
        is_accident = is_single and not are_told
        is_usual = _have_some(row, kept, runs.size_log, one, others) > BURSTS.others_share
        if q_value > rate or not is_alone or goes_on or is_accident or is_usual:
            continue
        left = others
        found.append(
            Burst(
                row=one,
                hits=hits[one],
                excess=excess[one],
                q_value=min(1.0, q_value),
                others=others,
                other_hits=int(hits[others].sum()),
                is_one_speed=_is_one_speed(runs, own) and not hits[others].any(),
                stands_out=not (hits[mates_of(members, one)] & hits[one]).any(),
                in_modules=True,
                cuts_passes=bool(runs.cuts[own].mean() >= RUNS.mostly_cut),
                size=float(np.exp(np.median(runs.size_log[own]))),
            )
        )
    return found


def _tally(counts: Integers, one: int, others: Flags, length: int, is_single: bool) -> Tally:
    """Return how many passes of a row and of the `others` have runs, `counts` (row,), of `length`
    passes each; of jobs at large it is known how seldom sound ones have some.
    """
    usual = RUNS.sound_passes_of_long if is_single else RUNS.sound_passes
    return Tally(
        num_hits=int(counts[one]),
        num_iterations=length,
        other_hits=int(counts[others].sum()),
        num_others=max(int(others.sum()) * length, usual),
    )


def _have_some(row: Integers, kept: Flags, size_log: Floats, one: int, others: Flags) -> float:
    """Return what share of the `others`, (row,), have runs half as slow as `one`'s and more; `row`,
    `kept` and `size_log` are (run,).
    """
    least = PAIRS.agrees_share * float(np.median(size_log[kept & (row == one)]))
    with_some = np.unique(row[kept & (size_log >= least)])
    return float(np.isin(np.flatnonzero(others), with_some).mean())


def _placed(seen: Observations, runs: SlowRuns, floor: float) -> tuple[Integers, Integers, Flags]:
    """Return row and place of the iteration of each run, and whether it tells of its device."""
    ranks = np.array(seen.members.recorded, dtype=np.int64)[runs.row]
    row = np.searchsorted(seen.members.ranks, ranks)
    slot = np.minimum(np.searchsorted(seen.iterations, runs.iteration), len(seen.iterations) - 1)
    kept = seen.iterations[slot] == runs.iteration
    kept &= ~(runs.starved_share > RUNS.most_starved) & (runs.size_log >= np.log1p(floor))
    if seen.entangled_phases:
        kept &= ~_wait_for_mates(seen, runs, row, slot, kept)
    return row, slot, kept


def _wait_for_mates(
    seen: Observations, runs: SlowRuns, row: Integers, slot: Integers, kept: Flags
) -> Flags:
    """Flag the runs, (run,), of rows that a TP mate's run in the same iteration is not smaller than
    by far: one of the two waits for the other.

    Example: modules of rank 8 take 2.05 times as long, those of its mates 1.48 times.
    """
    largest = np.zeros(seen.busy_ns.shape)
    np.maximum.at(largest, (row[kept], slot[kept]), runs.size_log[kept])
    of_mates = np.zeros_like(largest)
    for one in np.unique(row[kept]).tolist():
        mates = mates_of(seen.members, one)
        if len(mates):
            of_mates[one] = largest[mates].max(axis=0)
    return np.asarray(of_mates[row, slot] > RUNS.mates_share * runs.size_log)


def _is_one_speed(runs: SlowRuns, own: Flags) -> bool:
    """Return whether most of these runs, (run,), are slow by about the same factor."""
    sizes: Floats = runs.size_log[own]
    near = np.abs(sizes - np.median(sizes)) <= RUNS.one_factor_share * np.median(sizes)
    return len(sizes) >= BURSTS.min_hits and float(near.mean()) >= RUNS.mostly_cut
