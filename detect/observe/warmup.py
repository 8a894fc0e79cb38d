"""Which iterations a verdict stands on: a run's first ones are warm-up, slow for everybody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detect.observe.axes import cut
from detect.observe.observations import Observations
from detect.stats import robust
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.observing import WINDOW
from megascan.arrays import Flags, Floats, Integers


def steady(observations: Observations, settings: DetectorSettings) -> Observations:
    """Return the observations without warm-up.

    The run's first iterations are left out, and leading iterations that are slow for everybody: of
    iterations 1 to 20 the first two, and the third, too, if everybody computes 15 % longer in it
    than in the rest. At least `WINDOW.min_kept` iterations, and of more than nine two thirds, are
    always kept; of three, two that are as quick as each other after a first one that is not.
    """
    observations = replace(observations, num_warmup_iterations=settings.num_warmup_iterations)
    keep = _after_warm_up(observations, settings)
    if keep.all():
        return observations
    dropped = observations.iterations[~keep]
    several = f"iterations {dropped[0]} to {dropped[-1]} were"
    which = several if len(dropped) > 1 else f"iteration {dropped[0]} was"
    kept = cut(observations, "iteration", keep)
    return replace(kept, notes=(*observations.notes, f"{which} left out as warm-up"))


def _after_warm_up(observations: Observations, settings: DetectorSettings) -> Flags:
    """Flag the iterations to keep, (iteration,)."""
    iterations = observations.iterations
    keep: Flags = iterations > settings.num_warmup_iterations
    level = _typical_level(observations)
    typical = float(robust.median(level[keep] if keep.any() else level))
    for slot in range(len(level) // 3):
        if keep[slot] and not level[slot] >= typical + np.log(WINDOW.warm_ratio):
            break
        keep[slot] = False
    if keep.sum() < min(WINDOW.min_kept, len(keep)):
        keep[:] = True
        num_early = max(0, len(keep) - WINDOW.min_kept)
        keep[:num_early] = iterations[:num_early] > 1
        is_settled = _settled(iterations, level, settings)
        keep &= is_settled | (is_settled[keep].sum() < WINDOW.min_iterations)
    return keep


def _typical_level(observations: Observations) -> Floats:
    """Return the log time that the typical rank computes, (iteration,)."""
    return robust.median(robust.median(observations.work.log_ns, axis=2), axis=0)


def num_judgeable(seen: Observations, settings: DetectorSettings) -> int:
    """Count the iterations that a verdict can stand on.

    `steady` keeps the run's first iterations where there are few others. If everybody is slow in
    them, they are warm-up, which takes each rank its own time and says nothing about the ranks.
    """
    early = seen.iterations <= settings.num_warmup_iterations
    if not early.any():  # nearly always, and asked for every slow rank
        return len(seen.iterations)
    return int(settled(seen, settings).sum())


def settled(seen: Observations, settings: DetectorSettings) -> Flags:
    """Flag the iterations, (iteration,), after the last early one that is slow for everybody."""
    return _settled(seen.iterations, _typical_level(seen), settings)


def _settled(iterations: Integers, level: Floats, settings: DetectorSettings) -> Flags:
    is_early = iterations <= settings.num_warmup_iterations
    warm = np.flatnonzero(is_early & (level >= level[-1] + np.log(WINDOW.warm_ratio)))
    last = int(warm.max(initial=-1))
    return np.asarray(np.arange(len(level)) > last)
