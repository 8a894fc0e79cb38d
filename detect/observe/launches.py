"""How quickly each host launches: the time from one launch to the next within a pass.

Problem: a host that holds a whole pipeline stage or replica has no peer. What its devices lose may
be the stage's own doing as well: more work, longer documents, its place in the pipeline.

Idea: what a host needs to launch a module (Python, a fixed number of kernels) depends neither on
how long the kernels run nor on whose turn it is. So the same step, from the launch of one module to
that of the next one of the pass, takes every host of the job as long:

    launches   |attention |mlp     |attention |mlp        host of stage 0
    launches   |attention        |mlp           |atten…   host of stage 1: 1.8 times slower

A host that is far ahead of its device is held back by it once the queue is full. So only launches
count that are less ahead than a full queue lasts, and of each kind the quicker ones (a quarter of
them is quicker than the value taken).

Limit: kernels that a module launches in one stage only lengthen its step there; the median over the
kinds of steps is taken, and only kinds that more than half of the ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observe.observations import BACKWARD
from detect.observe.spans import WORK_NAMES, SpanIndex, axis_of, enclosing
from detect.observe.work import layer_modules, phases_of
from detect.stats import robust
from detect.thresholds import PACE
from megascan.arrays import Floats, Integers, group_lengths, group_starts, order_within
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import codes, numbers


@dataclass(frozen=True)
class Launches:
    """How long the quicker steps of each rank took from one launch to the next."""

    kinds: tuple[str, ...]
    """From which module to which, in which pass; texts, for codes of names differ by shard."""
    log_ns: Floats
    """(row, iteration, kind); NaN where a rank has no such step."""


def launches_of(index: SpanIndex) -> Launches | None:
    """Return the steps of each rank; None where launches or passes were not recorded."""
    passes, is_module = index.named(WORK_NAMES), layer_modules(index)
    modules = np.flatnonzero(is_module)  # of each rank in the order of their starts
    launch = numbers(index.table, "launch_ns")[modules]
    if index.is_cpu or not passes.any() or (launch == NOT_APPLICABLE).all():
        return None
    owner = enclosing(index, passes, is_module)
    phase = phases_of(index, passes, WORK_NAMES)[np.maximum(owner, 0)][1:]
    name, texts = codes(index.table, "name")
    kind = 2 * (name[modules][:-1] * len(texts) + name[modules][1:]) + (phase == BACKWARD)
    step_ns = np.diff(axis_of(index)[0][modules] + np.minimum(launch, 0))
    apart = np.abs(np.diff(numbers(index.table, "layer")[modules]))
    use = (owner[1:] == owner[:-1]) & (owner[1:] >= 0) & (step_ns > 0)
    use &= (launch[1:] != NOT_APPLICABLE) & (launch[:-1] != NOT_APPLICABLE)
    use &= -launch[1:] < PACE.most_lead_ns
    use &= apart <= 1  # where layers take turns in being recorded, neighbours only
    if not use.any():
        return None
    found, number = np.unique(kind[use].astype(np.int64), return_inverse=True)
    cell = (index.row * index.shape[1] + index.slot)[modules][1:][use]
    log_ns = np.full((*index.shape, len(found)), np.nan)
    _fill(log_ns.reshape(-1), cell * len(found) + number.reshape(-1), step_ns[use].astype(float))
    steps = [(texts[pair // len(texts)], texts[pair % len(texts)]) for pair in found // 2]
    kinds = [
        f"{first} > {second}{', backward' if is_backward else ''}"
        for (first, second), is_backward in zip(steps, found % 2, strict=True)
    ]
    return Launches(tuple(kinds), log_ns)


def _fill(log_ns: Floats, place: Integers, time_ns: Floats) -> None:
    """Put the log of the quicker of the steps of one place there."""
    order = order_within(place, time_ns)
    first = group_starts(place[order])
    quick = first + (group_lengths(first, len(order)) * PACE.quick_share).astype(np.int64)
    log_ns[place[order][first]] = np.log(time_ns[order][quick])


def launch_pace(launches: Launches) -> Floats | None:
    """Return log times between launches over those of all ranks, (row, iteration).

    0.7 is a host that takes twice as long as is usual in the job. None where ranks have no step in
    common.
    """
    log_ns = launches.log_ns
    usual = 2 * np.isfinite(log_ns).any(axis=1).sum(axis=0) > len(log_ns)
    if not usual.any():
        return None
    by_rank = robust.median(log_ns[:, :, usual], axis=1)
    return robust.median(log_ns[:, :, usual] - robust.median(by_rank, axis=0), axis=2)
