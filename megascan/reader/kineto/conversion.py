"""Convert a profile's events to spans in our columns: iterations, kernels, communication, loading.

On a GPU an iteration lasts, on the device, until the next iteration begins; it begins when the host
has begun it and the device is done with the iteration before:

    host     |─ step 1 ─|─ step 2 ─|─ step 3 ─|
    device      |── kernels of 1 ──||── of 2 ──||── of 3 ──|
    spans       |─── iteration 1 ───|─── 2 ─────|─── 3 ────|

So the spans of all iterations cover the time from the first kernel to the last. A kernel belongs to
the iteration in which the host launched it. Kernels that a queue still held when the profile began,
on some ranks more than on others, belong to no iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Cover, Flags, Integers, combine, running_numbers
from megascan.header import Trainer
from megascan.reader.kineto.communication import Communication, communication_of
from megascan.reader.kineto.document import ON_DEVICE, OPERATOR, Profile, launch_shapes, times_ns
from megascan.reader.kineto.host_side import Host
from megascan.reader.kineto.steps import Steps, find_steps
from megascan.schema import NOT_APPLICABLE, Kind, Track
from megascan.timeline import span_table


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """Spans (TRACE_SCHEMA, unix time) of one profile and what its header needs."""

    spans: pa.Table
    groups: Mapping[str, tuple[int, ...]]
    on_gpu: bool
    first_iteration: int
    last_iteration: int
    trainer: Trainer
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Events:
    """A profile's events, (event,) each: start and end since the origin, iteration, and whether the
    event was launched before the profile began.
    """

    profile: Profile
    host: Host
    start: Integers
    end: Integers
    iteration: Integers
    left_behind: Flags

    def placed(self, rows: Integers, track: Integers | Track) -> dict[str, Integers | int]:
        """Return the integer columns that all spans of events have."""
        on_device = self.profile.of_category(*ON_DEVICE)[rows]
        launch, start = self.host.launch[rows], self.start[rows]
        known = on_device & (launch >= 0)
        return {
            "rank": self.profile.rank,
            "track": int(track) if isinstance(track, Track) else track,
            "start_ns": self.profile.origin_unix_ns + start,
            "duration_ns": self.end[rows] - start,
            "iteration": self.iteration[rows],
            "launch_ns": np.where(known, launch - start, NOT_APPLICABLE),
        }


def profiled_spans(profile: Profile) -> Profiled:
    """Return the iterations, communication, compute and loading of a profile.

    With a GPU these are all kernels and copies; without, communication (`record_param_comms`, or
    gloo's annotations) and operators of the profiled thread that no other operator encloses.
    """
    start, end = times_ns(profile)
    host = Host.of(profile, start, end)
    steps = find_steps(profile, start, end, host.launch)
    iteration = steps.iteration_at(np.where(host.launch >= 0, host.launch, start))
    left_behind = _left_behind(host)
    if len(steps.numbers) > 1:  # a single one is shown in full: there is nothing to compare
        iteration[left_behind] = NOT_APPLICABLE
    events = _Events(profile, host, start, end, iteration, left_behind)
    on_device = profile.of_category(*ON_DEVICE)
    on_gpu = bool(on_device.any())
    communication = communication_of(host)
    compute = on_device if on_gpu else _outermost(events, steps.thread) & ~host.in_loading()
    rows = np.flatnonzero(compute & ~communication.is_covered)
    spans = pa.concat_tables(
        [
            _iterations(events, steps, on_device),
            _communication(events, communication, rows if on_gpu else rows[:0]),
            _compute(events, rows),
            _loading(events),
        ]
    ).unify_dictionaries()
    numbers = steps.numbers if len(steps.numbers) else np.ones(1, dtype=np.int64)
    return Profiled(
        spans=spans,
        groups={
            group.id: group.ranks
            for group in (*profile.groups.values(), *communication.groups)
            if profile.rank in group.ranks
        },
        on_gpu=on_gpu,
        first_iteration=int(numbers.min()),
        last_iteration=int(numbers.max()),
        trainer=host.trainer(),
        notes=(*_notes(profile, spans.num_rows, steps, on_gpu), *communication.notes),
    )


def _left_behind(host: Host) -> Flags:
    """Mark events that were launched before the profile began: as streams keep order, all events
    on a stream before its first event with a recorded launch.
    """
    profile = host.profile
    stream = profile.events.column("stream").fill_null(NOT_APPLICABLE).to_numpy()
    on_device = profile.of_category(*ON_DEVICE) & (stream >= 0)
    result: Flags = np.zeros(len(stream), dtype=np.bool_)
    for one in np.unique(stream[on_device]):
        own = on_device & (stream == one)
        launched = own & (host.launch >= 0)
        if launched.any():
            result |= own & (host.start < host.start[launched].min())
    return result


def _notes(profile: Profile, num_spans: int, steps: Steps, on_gpu: bool) -> list[str]:
    rank = f"rank {profile.rank}"
    left_out = profile.events.num_rows - num_spans
    shown = "host events" if on_gpu else "inner operators and annotations"
    notes = [f"{rank}: {left_out} {shown} are not shown"] if left_out > 0 else []
    if steps.found_by:
        notes.append(
            f"{rank}: the profiler marked no steps; {len(steps.numbers)} iterations were found by "
            f"{steps.found_by}"
        )
    return notes


def _outermost(events: _Events, thread: int) -> Flags:
    """Mark the operators of a thread (of each thread, if it is -1) that begin after all earlier
    operators of their thread have ended.
    """
    threads, start, end = events.host.thread, events.start, events.end
    operators = events.profile.of_category(OPERATOR)
    rows = np.flatnonzero(operators & ((threads == thread) if thread >= 0 else True))
    order = rows[np.lexsort((-end[rows], start[rows], threads[rows]))]
    outermost: Flags = np.zeros(len(start), dtype=np.bool_)
    for one in np.unique(threads[order]):
        own = order[threads[order] == one]
        latest = np.maximum.accumulate(end[own])
        outermost[own[np.r_[True, start[own][1:] >= latest[:-1]]]] = True
    return outermost


def _iterations(events: _Events, steps: Steps, on_device: Flags) -> pa.Table:
    start, end = steps.start, steps.end
    if on_device.any() and len(start):
        start, end = _on_device(events, steps, np.flatnonzero(on_device))
    names = (np.zeros(len(start), dtype=np.int64), [str(Kind.ITERATION)])
    columns: dict[str, Integers | int] = {
        "rank": events.profile.rank,
        "track": int(Track.COMPUTE),
        "start_ns": events.profile.origin_unix_ns + start,
        "duration_ns": end - start,
        "iteration": steps.numbers,
    }
    return span_table(len(start), columns, {"kind": names, "name": names})


def _on_device(events: _Events, steps: Steps, rows: Integers) -> tuple[Integers, Integers]:
    """Return (start, end) of the iterations on the device: each lasts until the next one begins,
    the last one until its device and its host are done.
    """
    number = events.iteration[rows]
    rows, number = rows[number >= 0], number[number >= 0]
    if not len(rows):
        return steps.start, steps.end
    in_order = np.argsort(steps.numbers)
    place = in_order[np.searchsorted(steps.numbers, number, sorter=in_order)]
    until = np.full(len(steps.numbers), np.iinfo(np.int64).min)
    np.maximum.at(until, place, events.end[rows])
    until = np.maximum.accumulate(until)
    first = int(events.start[rows].min())
    begin = np.maximum(steps.start, np.r_[first, until[:-1]])
    begin[0] = first
    return begin, np.r_[begin[1:], max(int(until[-1]), int(begin[-1]), int(steps.end[-1]))]


def _compute(events: _Events, rows: Integers) -> pa.Table:
    """Make the spans of kernels, copies and operators; of kind OPTIMIZER in an optimizer's step."""
    profile = events.profile
    code, texts = _names(profile.events.take(pa.array(rows)))
    phase, phases = events.host.phases()
    optimizer = events.host.in_optimizer()[rows]
    kinds = [str(Kind.COMPUTE), str(Kind.OPTIMIZER)]
    return span_table(
        len(rows),
        events.placed(rows, _tracks(profile, rows)),
        {
            "kind": (optimizer.astype(np.int64), kinds),
            "name": (code, texts),
            "phase": (np.where(optimizer, 0, phase[rows]), phases),
        },
    )


def _names(events: pa.Table) -> tuple[Integers, list[str]]:
    """Return each event's name as a code, and the codes' texts: short name and launch shape."""
    names = pc.fill_null(events.column("name"), "").combine_chunks().dictionary_encode()
    shape, shapes = launch_shapes(events)
    code = np.asarray(names.indices, dtype=np.int64)
    pairs, number = np.unique(np.stack([code, shape]), axis=1, return_inverse=True)
    short = [_short(name) for name in names.dictionary.to_pylist()]
    texts = [f"{short[name]}{shapes[one]}" for name, one in pairs.T.tolist()]
    return number.reshape(-1).astype(np.int64), texts


def _short(kernel: str) -> str:
    """Return a kernel's name without its return type, template arguments and parameters."""
    return kernel.removeprefix("void ").partition("<")[0].partition("(")[0].strip() or kernel


def _communication(events: _Events, found: Communication, compute: Integers) -> pa.Table:
    """Make the spans of communication; `sequence` is as recorded, else in the order of starts.

    Without a recorded sequence, events launched before the profile began get none, as some ranks
    see more of them than others. Collectives of unknown groups never get one: collectives of
    different groups would be taken for one.
    """
    unlike = events.left_behind[found.rows] | (events.iteration[found.rows] < 0)
    order = np.argsort(events.start[found.rows], kind="stable")
    keys = combine(events.iteration[found.rows], found.channel, unlike.astype(np.int64))
    counted = np.empty(len(order), dtype=np.int64)
    counted[order] = running_numbers(keys[order])
    counted[unlike] = NOT_APPLICABLE
    sequence = found.integers["sequence"]
    integers = events.placed(found.rows, _beside(events, found.rows, compute))
    integers.update(found.integers)
    sequence = np.where(sequence < 0, counted, sequence)
    integers["sequence"] = np.where(found.is_matchable, sequence, NOT_APPLICABLE)
    kinds = [str(Kind.COLLECTIVE), str(Kind.P2P)]
    texts = {**found.texts, "kind": (found.is_message.astype(np.int64), kinds)}
    return span_table(len(found.rows), integers, texts)


def _beside(events: _Events, rows: Integers, compute: Integers) -> Integers:
    """Return the track of communication: overlapped where something else runs at the same time."""
    start, end = events.start, events.end
    own = np.unique(rows)  # messages of one batch are one event
    order = own[np.argsort(start[own], kind="stable")]
    others = compute[np.argsort(start[compute], kind="stable")]
    hidden = Cover.of(start[others], end[others]).length_within(start[order], end[order]) > 0
    latest = np.maximum.accumulate(end[order]) if len(order) else end[order]
    crosses = np.r_[False, start[order][1:] < latest[:-1]][: len(order)]
    hidden |= crosses | np.r_[crosses[1:], False][: len(order)]
    track = np.full(len(start), int(Track.COMMUNICATION), dtype=np.int64)
    track[order[hidden]] = int(Track.OVERLAPPED)
    return track[rows]


def _tracks(profile: Profile, rows: Integers) -> Integers:
    """Return each event's track: COMPUTE on the busiest stream, OVERLAPPED on all other streams."""
    streams = profile.events.column("stream").fill_null(-1).to_numpy()[rows]
    used, counts = np.unique(streams[streams >= 0], return_counts=True)
    busiest = used[np.argmax(counts)] if len(used) else -1
    on_main = (streams == busiest) | (streams < 0)
    return np.where(on_main, int(Track.COMPUTE), int(Track.OVERLAPPED))


def _loading(events: _Events) -> pa.Table:
    """Make the spans of waiting for a DataLoader's next batch."""
    rows = np.flatnonzero(events.host.is_loading)
    names = events.profile.events.column("name").take(pa.array(rows)).combine_chunks()
    encoded = names.dictionary_encode()
    texts = [name.partition("#")[2] for name in encoded.dictionary.to_pylist()]
    return span_table(
        len(rows),
        events.placed(rows, Track.HOST),
        {
            "kind": (np.zeros(len(rows), dtype=np.int64), [str(Kind.DATA)]),
            "name": (np.asarray(encoded.indices, dtype=np.int64), texts),
        },
    )
