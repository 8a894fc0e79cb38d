"""Price a stage's work of one iteration before it is done: kernels, launches, collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.faults import Effects
from benchmarks.grounds.depot.luck import Fortune, Luck
from benchmarks.grounds.depot.operations import Program, Talk
from benchmarks.grounds.depot.places import MOVED, Ways

Figures = NDArray[np.float64]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Talks:
    """The collectives of one axis in a program: their numbers, and what a member moves."""

    numbers: NDArray[np.int64]
    moved: Figures  # (collective, 1), as all below
    batches: NDArray[np.int64]
    is_plain: NDArray[np.bool_]
    is_of_experts: NDArray[np.bool_]


def talks_of(program: Program, sizes: Callable[[str], int]) -> dict[str, Talks]:
    """Return the collectives of a program by their axes."""
    by_axis: dict[str, list[Talk]] = {}
    for talk in program.talks:
        by_axis.setdefault(talk.axis, []).append(talk)
    return {
        axis: Talks(
            numbers=np.array([talk.number for talk in talks]),
            moved=np.array([[MOVED[t.op](sizes(axis)) * t.size_bytes] for t in talks]),
            batches=np.array([max(0, talk.microbatch) for talk in talks]),
            is_plain=np.array([[talk.microbatch < 0] for talk in talks]),
            is_of_experts=np.array([[talk.is_of_experts] for talk in talks]),
        )
        for axis, talks in by_axis.items()
    }


def prices_of_works(
    program: Program, luck: Luck, fortune: Fortune, effects: Effects, ranks: Ranks
) -> tuple[Figures, Figures]:
    """Return how long the kernels of each work take alone, and their launches."""
    job, works = fortune.job, program.works
    batches = np.array([max(0, work.microbatch) for work in works])
    plain = np.array([work.microbatch < 0 for work in works])[:, None]
    experts = np.array([work.is_of_experts for work in works])[:, None]
    figures = np.array([(w.linear_s, w.square_s, w.memory_s, w.launches) for w in works])
    linear, square, memory, launches = (figures[:, [column]] for column in range(4))
    tokens = np.where(plain, 1.0, luck.tokens[batches])
    tokens = tokens * np.where(experts, luck.loads[batches], 1.0)
    squares = np.where(plain, 1.0, luck.squares[batches])
    clock = fortune.clocks[ranks] * effects.clock[ranks]
    slow = fortune.memories[ranks] * effects.memory[ranks]
    kernels_s = (linear * tokens + square * squares) * clock + memory * tokens * slow
    each_s = job.hardware.launch_s * job.launch_ratio * luck.warmth
    launches_s = launches * each_s * effects.thread[ranks] * luck.threads + luck.stalls_s
    return kernels_s * luck.kernels, launches_s


def price_of_talks(talks: Talks, luck: Luck, ways: Ways, effects: Effects, ranks: Ranks) -> Figures:
    """Return how long each collective of an axis takes once all members are there."""
    sizes = talks.moved * np.where(talks.is_plain, 1.0, luck.tokens[talks.batches])
    sizes = sizes * np.where(talks.is_of_experts, luck.loads[talks.batches], 1.0)
    slow_s = np.maximum(ways.link_s * effects.link[ranks], ways.nic_s * effects.nic[ranks])
    noise = luck.talks[talks.numbers] ** np.where(ways.nic_s > 0, 1.0, 0.3)
    noise = noise[:, ways.members[:, 0]][:, ways.rows]
    alone_s = ways.gathered(sizes * slow_s) * noise + ways.least_s
    return np.asarray(alone_s + luck.ends_s[talks.numbers])


def share_of_bytes(luck: Luck, microbatch: int, *, experts: bool) -> Figures:
    """Return how many times a full microbatch's bytes there are, by rank."""
    if microbatch < 0:
        return np.ones(luck.tokens.shape[1])
    tokens = luck.tokens[microbatch]
    return np.asarray(tokens * luck.loads[microbatch] if experts else tokens)
