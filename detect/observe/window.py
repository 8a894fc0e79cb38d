"""Which iterations and which rows are compared: without warm-up, one row for what cannot be split.

Example: of iterations 1 to 20 the run's first two are left out, and the third, too, if everybody
computes 15 % longer in it than in the rest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detect.observe.observations import Observations, cut
from detect.stats import robust
from detect.thresholds import WINDOW, DetectorSettings
from megascan.arrays import Flags


def steady(observations: Observations, settings: DetectorSettings) -> Observations:
    """Return the observations without warm-up.

    Left out are the run's first iterations, and leading ones that are slow for everybody. At least
    `WINDOW.min_kept` iterations, and of more than nine two thirds, are always kept.
    """
    keep = _warm(observations, settings)
    if keep.all():
        return observations
    dropped = observations.iterations[~keep]
    note = (
        f"iterations {dropped[0]} to {dropped[-1]} were left out as warm-up"
        if len(dropped) > 1
        else f"iteration {dropped[0]} was left out as warm-up"
    )
    kept = cut(observations, "iteration", keep)
    return replace(kept, notes=(*observations.notes, note))


def _warm(observations: Observations, settings: DetectorSettings) -> Flags:
    iterations = observations.iterations
    keep = iterations > settings.num_warmup_iterations
    level = robust.median(robust.median(observations.work.log_ns, axis=2), axis=0)
    typical = float(robust.median(level[keep])) if keep.any() else float(robust.median(level))
    for slot in range(len(level) // 3):
        if keep[slot] and not level[slot] >= typical + np.log(WINDOW.warm_ratio):
            break
        keep[slot] = False
    if keep.sum() < min(WINDOW.min_kept, len(keep)):
        num_early = max(0, len(keep) - WINDOW.min_kept)
        keep = np.ones(len(keep), dtype=bool)
        keep[:num_early] = iterations[:num_early] > 1
    return np.asarray(keep, dtype=bool)


def one_row_a_worker(seen: Observations) -> Observations:
    """Return one row for each TP (CP, EP) group whose inner communication was not traced.

    Inside such a group everybody waits for the slowest within its own passes, so their times are
    the same and only the group as a whole can be compared.
    """
    if seen.splits_tensor_groups:
        return seen
    members = seen.members
    keys = np.stack([members.replica, members.stage])
    _, first, of_row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    of_row = of_row.reshape(-1)
    rows = np.sort(first)
    workers = tuple(tuple(members.ranks[of_row == of_row[row]].tolist()) for row in rows)
    note = (
        "communication inside TP groups was not traced (granularity base): a slow rank can be told "
        "only up to its TP group; trace with --trace-granularity full to split it"
    )
    kept = cut(seen, "row", rows)
    return replace(kept, members=replace(kept.members, workers=workers), notes=(*seen.notes, note))
