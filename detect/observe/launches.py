"""How a host launches: how far it is ahead of its device, its pace, and when it stops.

Problem: a host that holds a whole pipeline stage or replica has no peer by what it computes, and a
device that waits for its host looks slow whatever the device.

Idea: how long a host needs from one launch to the next depends on no device, no data and no stage.
It is told by the times at which modules were launched.

    starved_share, launched_in_turn  operations launched only just in time, and which spans tell
    launches_of                      steps between launches, stops in them, pauses between passes
    launch_pace                      what steps take over what is usual in the job
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from detect.observe.axes import along
from detect.observe.operations import BACKWARD
from detect.observe.spans import WORK_NAMES, SpanIndex, cover_of, enclosing, idle_within
from detect.observe.work import layer_modules, phases_of
from detect.stats import robust
from detect.thresholds.observing import PACE, STARVATION
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    group_lengths,
    group_starts,
    median_by,
    numbered,
    order_within,
)
from megascan.schema import NOT_APPLICABLE, Kind, Track
from megascan.timeline import codes, numbers


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """For how long hosts launch nothing outside passes, (row, iteration) ns, and for how much of it
    their devices have nothing to do either.

    A host that is a little slower than the others is behind in all its launches; one that loads
    without a span, or whose core somebody else has, is late outside passes only. Hosts that are
    ahead of their devices spend that time, too, and no device stands still for it. Example: 70 ms
    before each of two forward passes, as long as the device stands still; at most 2 ms elsewhere.
    """

    opening_ns: Floats = field(metadata=along("row", "iteration"))
    """From the begin of an iteration to the first launch in its first pass."""
    idle_opening_ns: Floats = field(metadata=along("row", "iteration"))
    between_ns: Floats = field(metadata=along("row", "iteration"))
    """From the last launch in a pass to the first one in the next."""
    idle_between_ns: Floats = field(metadata=along("row", "iteration"))


def starved_share(index: SpanIndex, rows: Flags) -> Floats:
    """Return the share of operations launched just in time, (rank, iteration); NaN if unknown."""
    launched = rows & (numbers(index.table, "launch_ns") != NOT_APPLICABLE)
    is_late = launched_just_in_time(index, launched).astype(np.float64)
    late, known = (index.sums(launched, one) for one in (is_late, np.ones_like(is_late)))
    with np.errstate(invalid="ignore"):
        return late / known


def launched_just_in_time(index: SpanIndex, rows: Flags) -> Flags:
    """Flag the spans of `rows`, (span,), that are known to have begun as soon as launched."""
    launch = numbers(index.table, "launch_ns")[rows]
    enough = np.maximum(STARVATION.lead_ns, STARVATION.lead_share * index.self_time(rows))
    return np.asarray((launch != NOT_APPLICABLE) & (-launch < enough))


def launched_in_turn(index: SpanIndex) -> Flags:
    """Return which spans tell how far ahead of its device a host launches: modules, none of which
    begins before the modules launched earlier have ended.

    Where no modules were recorded (a compiled model), it is communication that passes stand still
    for.
    """
    modules = layer_modules(index)
    if modules.any():
        return modules
    blocking = index.blocking()
    inside = np.flatnonzero(blocking)
    blocking[inside[enclosing(index, index.named(WORK_NAMES), blocking) < 0]] = False
    return blocking


@dataclass(frozen=True, kw_only=True)
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
    launching_first_ns: Floats
    """(row, iteration): the part of it from the first launch of each pass to the second."""
    launching_step_ns: Floats
    """(row, iteration): what one launch behind the second takes in each pass; 0 without any."""
    """(row, iteration): the part of it from the second launch of each pass on."""
    pauses: Pauses


def launches_of(index: SpanIndex) -> Launches | None:
    """Return the steps of each rank, from the launch of one module of a pass to that of the next;
    None where launches or passes were not recorded.

    A host that holds a whole pipeline stage or replica has no peer by what it computes. But what a
    host needs to launch a module (Python, a fixed number of kernels) depends neither on how long
    the kernels run nor on whose turn it is. So the same step takes every host of the job as long:

        launches   |attention |mlp     |attention |mlp        host of stage 0
        launches   |attention        |mlp           |atten…   host of stage 1: 1.8 times slower

    A host that is far ahead of its device is held back by the device once the queue is full. So
    only launches count that are less ahead than a full queue lasts, and of each kind of step the
    lower quartile is taken. Steps of all launches (`log_held_ns`) accuse nobody, but may acquit a
    host that is hardly slower than hosts ahead of their devices.

    Limit: kernels that a module launches in one stage only lengthen its step there. So
    `launch_pace` takes the median over the kinds of steps that more than half of the ranks have.
    """
    passes = index.named(WORK_NAMES)
    if index.is_cpu or not passes.any():
        return None
    phases = phases_of(index, passes, WORK_NAMES)
    steps = _steps(index, passes, phases)
    if steps is None:
        return None
    place = index.cell[steps.ends_at] * len(steps.kinds) + steps.kind
    is_free = steps.lead_ns < PACE.most_lead_ns
    shape = *index.shape, len(steps.kinds)
    within = _launched_within(index, passes)
    launching_ns, first_ns, step_ns = _launching(index, passes, phases, within)
    return Launches(
        kinds=steps.kinds,
        log_ns=quick_steps(shape, place[is_free], steps.time_ns[is_free]),
        log_held_ns=quick_steps(shape, place, steps.time_ns),
        stopped_ns=_stops(index, steps),
        launching_ns=launching_ns,
        launching_first_ns=first_ns,
        launching_step_ns=step_ns,
        pauses=_pauses(index, passes, within),
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Steps from the launch of one module of a pass to that of the next, (step,) each."""

    kinds: tuple[str, ...]
    kind: Integers
    """Place in `kinds`."""
    ends_at: Integers
    """The span whose launch ends the step."""
    lead_ns: Integers
    """How long before its begin on the device that span was launched."""
    time_ns: Floats


def _steps(index: SpanIndex, passes: Flags, phases: Integers) -> _Steps | None:
    """Return the steps inside `passes`, whose phases are given; None where none was recorded."""
    is_module = launched_in_turn(index)
    modules = np.flatnonzero(is_module)  # of each rank in the order of their starts
    launch = numbers(index.table, "launch_ns")[modules]
    is_known = launch != NOT_APPLICABLE
    if not is_known.any():
        return None
    owner = enclosing(index, passes, is_module)
    time_ns = np.diff(index.axis[0][modules] + np.minimum(launch, 0))
    apart = np.abs(np.diff(numbers(index.table, "layer")[modules]))
    use = (owner[1:] == owner[:-1]) & (owner[1:] >= 0) & (time_ns > 0)
    use &= is_known[1:] & is_known[:-1]
    use &= apart <= 1  # where layers take turns in being recorded, neighbours only
    if not use.any():
        return None
    begins_at, ends_at = modules[:-1][use], modules[1:][use]
    is_backward = phases[owner[1:][use]] == BACKWARD
    name, texts = codes(index.table, "name")
    code = 2 * (name[begins_at] * len(texts) + name[ends_at]) + is_backward
    found, kind = np.unique(code.astype(np.int64), return_inverse=True)
    return _Steps(
        kinds=tuple(
            f"{texts[pair // len(texts)]} > {texts[pair % len(texts)]}"
            f"{', backward' if is_backward else ''}"
            for pair, is_backward in zip(*np.divmod(found, 2), strict=True)
        ),
        kind=kind.reshape(-1),
        ends_at=ends_at,
        lead_ns=-launch[1:][use],
        time_ns=time_ns[use].astype(float),
    )


@dataclass(frozen=True)
class _Within:
    """When a host made the first launch inside each pass, the second and the last, (pass,) each;
    infinite, minus infinity of the last, where there is none.
    """

    first: Floats
    second: Floats
    last: Floats
    num_later: Integers
    """Number of launches behind the first one, (pass,)."""


def _launched_within(index: SpanIndex, passes: Flags) -> _Within:
    is_launched = index.in_iteration & (index.track != Track.HOST) & ~passes
    launch = numbers(index.table, "launch_ns")
    is_launched &= launch != NOT_APPLICABLE
    owner = enclosing(index, passes, is_launched)
    inside = owner >= 0
    at = (index.axis[0] + np.minimum(launch, 0))[is_launched][inside]
    owner, num_passes = owner[inside], int(passes.sum())
    (first, second), last = np.full((2, num_passes), np.inf), np.full(num_passes, -np.inf)
    np.minimum.at(first, owner, at)
    np.maximum.at(last, owner, at)
    is_later = at > first[owner]
    np.minimum.at(second, owner[is_later], at[is_later])
    return _Within(first, second, last, np.bincount(owner[is_later], minlength=num_passes))


def _launching(
    index: SpanIndex, passes: Flags, phases: Integers, within: _Within
) -> tuple[Floats, Floats, Floats]:
    """Return how long each host takes to launch the passes of an iteration, the part of it up to
    the second launch of each pass, and what a launch behind that takes, all (row, iteration) ns;
    `phases` are those of the passes.

    That is the lower quartile, over a rank's passes of the same phase and chunk, of the time from
    the first to the last launch inside a pass: a host that is held up by a full queue, or stops, in
    most of them only, is known by the others. Example: a forward pass of 82 ms of work whose 34
    launches take 18 ms.
    """
    chunk = numbers(index.table, "chunk")[passes]
    kind = numbered(index.row[passes], chunk, phases)

    num_kinds = int(kind.max(initial=0)) + 1

    def usual(took_ns: Floats) -> Floats:
        return index.sums(passes, np.expm1(quick_steps((num_kinds,), kind, took_ns + 1.0))[kind])

    def between(since: Floats, until: Floats) -> Floats:
        with np.errstate(invalid="ignore"):  # passes without launches
            return np.where(until > since, until - since, 0.0)

    has_second = within.num_later > 0
    first_ns = np.where(has_second, between(within.first, within.second), 0.0)
    rest_ns = between(within.second, within.last)
    step_ns = rest_ns / np.maximum(within.num_later - 1, 1)
    return usual(between(within.first, within.last)), usual(first_ns), usual(step_ns)


def _pauses(index: SpanIndex, passes: Flags, within: _Within) -> Pauses:
    launch, (start, end) = numbers(index.table, "launch_ns"), index.axis
    is_whole, has_launches = index.of_kind(Kind.ITERATION), np.isfinite(within.first)
    whole = np.flatnonzero(is_whole & index.in_iteration)
    # an iteration begins as a pass ends: until its first pass its host launches nothing
    spans = np.r_[whole, np.flatnonzero(passes)[has_launches]]
    begins = np.r_[np.full(len(whole), -np.inf), within.first[has_launches]]
    ends = np.r_[start[whole] + np.minimum(launch[whole], 0), within.last[has_launches]]
    order = np.lexsort((begins, index.cell[spans]))
    spans, begins, ends = spans[order], begins[order], ends[order]
    follows = (np.diff(index.cell[spans]) == 0) & np.isfinite(begins[1:])
    opens, later = is_whole[spans[:-1][follows]], spans[1:][follows]
    since, until = ends[:-1][follows].astype(np.int64), begins[1:][follows].astype(np.int64)
    pause_ns = np.maximum(until - since, 0).astype(np.float64)
    idle_ns = idle_within(cover_of(start, end, ~is_whole), since, until)
    return Pauses(
        opening_ns=index.sums(later[opens], pause_ns[opens]),
        idle_opening_ns=index.sums(later[opens], idle_ns[opens]),
        between_ns=index.sums(later[~opens], pause_ns[~opens]),
        idle_between_ns=index.sums(later[~opens], idle_ns[~opens]),
    )


def _stops(index: SpanIndex, steps: _Steps) -> Floats:
    """Return for how long hosts stopped, (row, iteration) ns.

    A stop is a step that lasts three times as long as is typical of its rank and kind, and for
    whose end the device waited; it counts with what exceeds the typical time.

    A host that shares its core is as quick as ever while it runs and stands still while somebody
    else does: its quicker steps, by which a pace is told, do not show it. Example: one of 14 steps
    of 0.3 ms takes 4 ms, the other process's turn.
    """
    key = index.row[steps.ends_at] * len(steps.kinds) + steps.kind
    typical = median_by(key, steps.time_ns)
    is_awaited = steps.lead_ns < STARVATION.lead_ns
    is_stop = is_awaited & (steps.time_ns >= PACE.stop_ratio * typical)
    return index.sums(steps.ends_at[is_stop], (steps.time_ns - typical)[is_stop])


def quick_steps(shape: tuple[int, ...], place: Integers, time_ns: Floats) -> Floats:
    """Return the log of the lower quartile (`PACE.quick_share`) of each place's steps; NaN of a
    place without any.

    `place` is that of each step, a flat index into the `shape`; `time_ns` are the steps.
    """
    log_ns = np.full(shape, np.nan)
    order = order_within(place, time_ns)
    first = group_starts(place[order])
    quick = first + (group_lengths(first, len(order)) * PACE.quick_share).astype(np.int64)
    log_ns.reshape(-1)[place[order][first]] = np.log(time_ns[order][quick])
    return log_ns


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
