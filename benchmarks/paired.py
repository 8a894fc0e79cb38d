"""Ratios of blocks of traced iterations to the untraced blocks beside them, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

OFF = "off"
NUM_RESAMPLES = 4000


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive iterations under one mode (`off`, or a granularity): their times, ms.

    The first iteration of a block, in which the mode is switched, is not among them.
    """

    mode: str
    times_ms: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a mode costs: traced over untraced.

    `median` is that of all traced iterations over the median of their neighbouring untraced ones;
    `low` and `high` are its 95 % interval; `mean` is the same with means, so that a rare long
    iteration counts in full, `mean_low` and `mean_high` its interval.
    """

    mode: str
    median: float
    low: float
    high: float
    mean: float
    mean_low: float
    mean_high: float
    num_iterations: int
    untraced_ms: float


def blocks_of(modes: Sequence[str], times_ms: Sequence[float], length: int) -> list[Block]:
    """Cut the times of all iterations into blocks of `length`; each first one is left out."""
    return [
        Block(mode=mode, times_ms=tuple(times_ms[start + 1 : start + length]))
        for mode, start in zip(modes, range(0, len(times_ms), length), strict=True)
    ]


def cost_of(mode: str, blocks: Sequence[Block], seed: int = 0) -> Cost:
    """Compare each block of `mode` with the untraced blocks before and after it.

    The interval comes from drawing whole blocks anew with replacement: iterations of one block
    share what the machine does at that time, so they are no independent samples.
    """
    pairs = [
        (np.array(block.times_ms), np.array([*before.times_ms, *after.times_ms]))
        for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False)
        if block.mode == mode and before.mode == after.mode == OFF
    ]
    ratios = np.array([traced / np.median(untraced) for traced, untraced in pairs])
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn].reshape(NUM_RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    means = np.array([traced.mean() / untraced.mean() for traced, untraced in pairs])
    mean_low, mean_high = np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])
    untraced = np.concatenate([untraced for _, untraced in pairs])
    return Cost(
        mode=mode,
        median=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        mean=float(means.mean()),
        mean_low=float(mean_low),
        mean_high=float(mean_high),
        num_iterations=ratios.size,
        untraced_ms=float(np.median(untraced)),
    )
