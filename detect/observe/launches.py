"""Launches: how long a host needs from one launch to the next, and when it stops in between.

Fed by spans that tell when they were launched; feeds the searches for hosts, whose pace needs no
peer that computes the same.

    launched_in_turn             which spans tell how far a host is ahead of its device
    launches_of, Launches        steps between launches, and stops
    launch_pace                  steps over what is usual in the job
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observe.observations import BACKWARD
from detect.observe.spans import WORK_NAMES, SpanIndex, axis_of, enclosing
from detect.observe.work import layer_modules, phases_of
from detect.stats import robust
from detect.thresholds import PACE, STARVATION
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    group_lengths,
    group_starts,
    median_by,
    order_within,
)
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Track
from megascan.timeline import codes, equals, numbers


def launched_in_turn(index: SpanIndex) -> Flags:
    """Return which spans tell how far ahead of its device a host launches: modules, none of which
    begins before the modules launched earlier have ended.

    Where no modules were recorded (a compiled model), it is communication that passes stand still
    for.
    """
    modules = layer_modules(index)
    if modules.any():
        return modules
    blocking = equals(index.table, "kind", *COMMUNICATION_KINDS) & index.counts
    blocking &= index.track != Track.OVERLAPPED
    inside = np.flatnonzero(blocking)
    blocking[inside[enclosing(index, index.named(WORK_NAMES), blocking) < 0]] = False
    return blocking


@dataclass(frozen=True)
class Launches:
    """How long the quicker steps of each rank took from one launch to the next."""

    kinds: tuple[str, ...]
    """From which module to which, in which pass; as texts, since codes of names differ by shard."""
    log_ns: Floats
    """(row, iteration, kind); NaN where a rank has no step of the kind."""
    log_held_ns: Floats
    """(row, iteration, kind): of all launches, also of hosts that a full queue may hold back."""
    stopped_ns: Floats
    """(row, iteration): for how long a host stood still between two launches while the device
    waited for the second one; see `_stops`."""
    launching_ns: Floats
    """(row, iteration): how long the host takes to launch the passes, if nothing holds it up; see
    `_launching`."""


def launches_of(index: SpanIndex) -> Launches | None:
    """Return the steps of each rank, from the launch of one module of a pass to that of the next;
    None where launches or passes were not recorded.

    Problem: a host that holds a whole pipeline stage or replica has no peer. What its devices lose
    may be due to the stage as well: more work, longer documents, the place in the pipeline.

    Idea: what a host needs to launch a module (Python, a fixed number of kernels) depends neither
    on how long the kernels run nor on whose turn it is. So the same step takes every host of the
    job as long:

        launches   |attention |mlp     |attention |mlp        host of stage 0
        launches   |attention        |mlp           |atten…   host of stage 1: 1.8 times slower

    A host that is far ahead of its device is held back by the device once the queue is full. So
    only launches count that are less ahead than a full queue lasts, and of each kind of step the
    lower quartile is taken. Steps of all launches (`log_held_ns`) accuse nobody, but may acquit a
    host that is hardly slower than hosts ahead of their devices.

    Limit: kernels that a module launches in one stage only lengthen its step there. So the median
    over the kinds of steps is taken, of kinds that more than half of the ranks have
    (`launch_pace`).
    """
    passes, is_module = index.named(WORK_NAMES), launched_in_turn(index)
    modules = np.flatnonzero(is_module)  # of each rank in the order of their starts
    launch = numbers(index.table, "launch_ns")[modules]
    if index.is_cpu or not passes.any() or (launch == NOT_APPLICABLE).all():
        return None
    owner = enclosing(index, passes, is_module)
    phases = phases_of(index, passes, WORK_NAMES)
    phase = phases[np.maximum(owner, 0)][1:]
    name, texts = codes(index.table, "name")
    kind = 2 * (name[modules][:-1] * len(texts) + name[modules][1:]) + (phase == BACKWARD)
    step_ns = np.diff(axis_of(index)[0][modules] + np.minimum(launch, 0))
    apart = np.abs(np.diff(numbers(index.table, "layer")[modules]))
    use = (owner[1:] == owner[:-1]) & (owner[1:] >= 0) & (step_ns > 0)
    use &= (launch[1:] != NOT_APPLICABLE) & (launch[:-1] != NOT_APPLICABLE)
    use &= apart <= 1  # where layers take turns in being recorded, neighbours only
    if not use.any():
        return None
    found, numbers_of_kinds = np.unique(kind[use].astype(np.int64), return_inverse=True)
    number = numbers_of_kinds.reshape(-1)
    ends_at = modules[1:][use]  # the span whose launch ends the step
    place = index.cell[ends_at] * len(found) + number
    step_ns = step_ns[use].astype(float)
    own = -launch[1:][use] < PACE.most_lead_ns
    log_ns, log_held_ns = np.full((2, *index.shape, len(found)), np.nan)
    put_quick_steps(log_ns.reshape(-1), place[own], step_ns[own])
    put_quick_steps(log_held_ns.reshape(-1), place, step_ns)
    is_awaited = -launch[1:][use] < STARVATION.lead_ns
    stopped_ns = _stops(index, ends_at, number, step_ns, is_awaited)
    steps = [(texts[pair // len(texts)], texts[pair % len(texts)]) for pair in found // 2]
    kinds = [
        f"{first} > {second}{', backward' if is_backward else ''}"
        for (first, second), is_backward in zip(steps, found % 2, strict=True)
    ]
    launching_ns = _launching(index, passes, phases)
    return Launches(tuple(kinds), log_ns, log_held_ns, stopped_ns, launching_ns)


def _launching(index: SpanIndex, passes: Flags, phases: Integers) -> Floats:
    """Return how long each host takes to launch the passes of an iteration, (row, iteration) ns;
    `phases` are those of the passes.

    That is the lower quartile, over a rank's passes of the same phase and chunk, of the time from
    the first to the last launch inside a pass: a host that is held up by a full queue, or stops, in
    most of them only, is known by the others. Example: a forward pass of 82 ms of work whose 34
    launches take 18 ms.
    """
    is_launched = index.counts & (index.track != Track.HOST) & ~passes
    launch = numbers(index.table, "launch_ns")
    is_launched &= launch != NOT_APPLICABLE
    owner = enclosing(index, passes, is_launched)
    inside = owner >= 0
    at = (axis_of(index)[0] + np.minimum(launch, 0))[is_launched][inside]
    num_passes = int(passes.sum())
    first, last = np.full(num_passes, np.inf), np.full(num_passes, -np.inf)
    np.minimum.at(first, owner[inside], at)
    np.maximum.at(last, owner[inside], at)
    took_ns = np.where(last > first, last - first, 0.0)
    rows = index.row[passes]
    chunk = numbers(index.table, "chunk")[passes]
    kinds = np.unique(np.stack([rows, chunk, phases]), axis=1, return_inverse=True)
    kind = kinds[1].reshape(-1)
    quick_log_ns = np.full(kind.max(initial=0) + 1, np.nan)
    put_quick_steps(quick_log_ns, kind, took_ns + 1.0)
    return index.sums(passes, np.exp(quick_log_ns)[kind])


def _stops(
    index: SpanIndex, ends_at: Integers, kind: Integers, step_ns: Floats, is_awaited: Flags
) -> Floats:
    """Return for how long hosts stopped, (row, iteration) ns.

    Each step ends at the launch of the span `ends_at`. A stop is a step that lasts three times as
    long as is typical of its rank and `kind`, and for whose end the device waited; it counts with
    what exceeds the typical time.

    A host that shares its core is as quick as ever while it runs and stands still while somebody
    else does: its quicker steps, by which a pace is told, do not show it. Example: one of 14 steps
    of 0.3 ms takes 4 ms, the other process's turn.
    """
    typical = median_by(index.row[ends_at] * (int(kind.max()) + 1) + kind, step_ns)
    is_stop = is_awaited & (step_ns >= PACE.stop_ratio * typical)
    return index.sums(ends_at[is_stop], (step_ns - typical)[is_stop])


def put_quick_steps(log_ns: Floats, place: Integers, time_ns: Floats) -> None:
    """Write the log of the lower quartile (`PACE.quick_share`) of each place's steps to `log_ns`.

    `place` is that of each step, an index into `log_ns`; `time_ns` are the steps.
    """
    order = order_within(place, time_ns)
    first = group_starts(place[order])
    quick = first + (group_lengths(first, len(order)) * PACE.quick_share).astype(np.int64)
    log_ns[place[order][first]] = np.log(time_ns[order][quick])


def launch_pace(log_ns: Floats) -> Floats | None:
    """Return the log time between launches over that of all ranks, (row, iteration).

    `log_ns` is by kind of step, (row, iteration, kind). 0.7 is a host that takes twice as long as
    is usual in the job. None where ranks have no step in common.
    """
    usual = 2 * np.isfinite(log_ns).any(axis=1).sum(axis=0) > len(log_ns)
    if not usual.any():
        return None
    by_rank = robust.median(log_ns[:, :, usual], axis=1)
    return robust.median(log_ns[:, :, usual] - robust.median(by_rank, axis=0), axis=2)
