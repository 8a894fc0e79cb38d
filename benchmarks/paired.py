"""Ratios of traced iterations to the untraced ones beside them, with an interval.

`cost_of` compares blocks: one mode against the untraced blocks before and after it.
`cost_in_cycles` compares inside one traced job whose windows leave iterations in between: what a
cycle takes beyond its last iterations, in which neither training is traced nor the writer's thread
works. A machine that wanders by half a per cent from one minute to the next hides a cost of 0.1 %
from the first, not from the second; what tracing costs where nothing is traced is seen by the first
alone.
"""

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


def cost_in_cycles(
    mode: str,
    blocks: Sequence[Block],
    first_iterations: Sequence[int],
    *,
    interval: int,
    num_quiet: int,
    place: int | None = None,
    seed: int = 0,
) -> Cost:
    """Compare each cycle of the blocks of `mode` with its quiet iterations and those before it.

    A block's times begin at its iteration of `first_iterations` (from 1); windows begin at
    iteration 1, 1 + interval, …, and the last `num_quiet` iterations of a cycle are quiet. A
    cycle's ratio is its time over `interval` times the mean of the quiet iterations on both sides
    of its others, so that a steady drift cancels. `median` is that of the cycles' ratios. With
    `place`, the iteration at this place of each cycle (from 0) is compared instead of the cycle.

    Example: quiet 10, 10 | cycle 11, 10, 10, 10, 10: 51 / (5 · 10) = 1.02; at place 0 1.1.
    """
    ratios, usual = [], []
    for block, first in zip(blocks, first_iterations, strict=True):
        if block.mode != mode:
            continue
        start = (1 - first) % interval
        num_cycles = (len(block.times_ms) - start) // interval
        cycles = np.reshape(block.times_ms[start : start + num_cycles * interval], (-1, interval))
        quiet = cycles[:, -num_quiet:].mean(axis=1)
        beside = (quiet[:-1] + quiet[1:]) / 2
        busy = cycles[1:, :-num_quiet] / beside[:, None]
        whole = (busy.sum(axis=1) + num_quiet) / interval
        ratios.extend(whole if place is None else busy[:, place])
        usual.extend(beside)
    of_cycles = np.array(ratios)
    return _cost(mode, of_cycles[:, None], of_cycles, np.array(usual), seed)


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
    means = np.array([traced.mean() / untraced.mean() for traced, untraced in pairs])
    untraced = np.concatenate([untraced for _, untraced in pairs])
    return _cost(mode, ratios, means, untraced, seed)


def _cost(
    mode: str, ratios: np.ndarray, means: np.ndarray, untraced_ms: np.ndarray, seed: int
) -> Cost:
    """Return the cost of samples: ratios (sample, iteration), and each sample's ratio of means."""
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(NUM_RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn].reshape(NUM_RESAMPLES, -1), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    mean_low, mean_high = np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])
    return Cost(
        mode=mode,
        median=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        mean=float(means.mean()),
        mean_low=float(mean_low),
        mean_high=float(mean_high),
        num_iterations=ratios.size,
        untraced_ms=float(np.median(untraced_ms)),
    )
