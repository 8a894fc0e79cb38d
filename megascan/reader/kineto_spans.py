"""Events of a PyTorch profile in our columns: kernels on a GPU, operations without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascan.reader.building import running_numbers, span_table
from megascan.reader.kineto_communication import Communication, communication_of
from megascan.reader.kineto_events import Profile, iterate_steps, times_ns
from megascan.schema import NOT_APPLICABLE, Kind, Track

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """Spans (TRACE_SCHEMA, unix time) of one profile and what its header needs."""

    spans: pa.Table
    groups: Mapping[str, tuple[int, ...]]
    on_gpu: bool
    first_iteration: int
    last_iteration: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Times:
    """Of every event: start and end after the origin, the host's launch of it, its iteration."""

    start: Integers
    end: Integers
    launch: Integers
    iteration: Integers


def profiled_spans(profile: Profile) -> Profiled:
    """Iterations, communication and compute of a profile.

    With a GPU: every kernel and copy, put into the iteration in which the host launched it.
    Without: communication (`record_param_comms`, or gloo's annotations), and operators of the
    profiled thread that no other operator encloses.
    """
    events = profile.events
    start, end = times_ns(profile)
    steps = _Steps.of(events, start, end)
    launch = _launches(events, start)
    iteration = steps.iteration_at(np.where(launch >= 0, launch, start))
    times = _Times(start, end, launch, iteration)
    on_device = _is_category(events, "kernel", "gpu_memcpy", "gpu_memset")
    on_gpu = bool(on_device.any())
    communication = communication_of(profile, on_device)
    compute = on_device if on_gpu else _outermost(events, start, end, steps.thread)
    compute_rows = np.flatnonzero(compute & ~communication.is_covered)
    spans = pa.concat_tables(
        [
            _iterations(profile, steps, times),
            _communication(profile, communication, times),
            _compute(profile, compute_rows, times),
        ]
    ).unify_dictionaries()
    left_out = events.num_rows - spans.num_rows
    shown = "host events" if on_gpu else "inner operators and annotations"
    notes = [f"rank {profile.rank}: {left_out} {shown} are not shown"] if left_out else []
    numbers = steps.numbers if len(steps.rows) else np.ones(1, dtype=np.int64)
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
        notes=(*notes, *communication.notes),
    )


@dataclass(frozen=True)
class _Steps:
    """The profiler's steps in the order of time: rows, iteration numbers, times; their thread."""

    rows: Integers
    numbers: Integers
    start: Integers
    end: Integers
    thread: int

    @classmethod
    def of(cls, events: pa.Table, start: Integers, end: Integers) -> _Steps:
        found = np.array([*iterate_steps(events)], dtype=np.int64).reshape(-1, 2)
        rows, numbers = found[np.argsort(start[found[:, 0]], kind="stable")].T
        thread = events.column("tid")[int(rows[0])].as_py() if len(rows) else None
        return cls(rows, numbers + 1, start[rows], end[rows], -1 if thread is None else thread)

    def iteration_at(self, times: Integers) -> Integers:
        """Iteration of each time: 1 without any step, NOT_APPLICABLE outside of steps."""
        if not len(self.rows):
            return np.ones(len(times), dtype=np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        inside = (at >= 0) & (times <= self.end[at])
        return np.where(inside, self.numbers[at], NOT_APPLICABLE)


def _is_category(events: pa.Table, *categories: str) -> Flags:
    return np.asarray(pc.is_in(events.column("cat"), value_set=pa.array(categories)))


def _outermost(events: pa.Table, start: Integers, end: Integers, thread: int) -> Flags:
    """Operators of a thread (any, if it is not known) that begin after all earlier ones ended."""
    threads = events.column("tid").fill_null(-1).to_numpy()
    operators = _is_category(events, "cpu_op")
    rows = np.flatnonzero(operators & ((threads == thread) if thread >= 0 else True))
    order = rows[np.lexsort((-end[rows], start[rows], threads[rows]))]
    outermost = np.zeros(events.num_rows, dtype=np.bool_)
    for one in np.unique(threads[order]):
        own = order[threads[order] == one]
        latest = np.maximum.accumulate(end[own])
        outermost[own[np.r_[True, start[own][1:] >= latest[:-1]]]] = True
    return outermost


def _launches(events: pa.Table, start: Integers) -> Integers:
    """Host time at which each kernel was launched, by correlation id; NOT_APPLICABLE without."""
    ids = events.column("correlation").fill_null(-1).to_numpy()
    calls = np.flatnonzero(_is_category(events, "cuda_runtime", "cuda_driver") & (ids > 0))
    calls = calls[np.argsort(ids[calls], kind="stable")]
    device = _is_category(events, "kernel", "gpu_memcpy", "gpu_memset")
    launches = np.full(events.num_rows, NOT_APPLICABLE, dtype=np.int64)
    if len(calls):
        at = np.minimum(np.searchsorted(ids[calls], ids), len(calls) - 1)
        found = device & (ids[calls][at] == ids)
        launches[found] = start[calls[at]][found]
    return launches


def _iterations(profile: Profile, steps: _Steps, times: _Times) -> pa.Table:
    names = (np.zeros(len(steps.rows), dtype=np.int64), [str(Kind.ITERATION)])
    placed = _placed(profile, steps.rows, times) | {"track": int(Track.COMPUTE)}
    placed["iteration"] = steps.numbers
    return span_table(len(steps.rows), placed, {"kind": names, "name": names})


def _compute(profile: Profile, rows: Integers, times: _Times) -> pa.Table:
    events = profile.events.column("name").take(pa.array(rows))
    names = pc.fill_null(events, "").combine_chunks().dictionary_encode()
    texts = [_short(name) for name in names.dictionary.to_pylist()]
    return span_table(
        len(rows),
        _placed(profile, rows, times) | {"track": _tracks(profile.events, rows, Track.COMPUTE)},
        {
            "kind": (np.zeros(len(rows), dtype=np.int64), [str(Kind.COMPUTE)]),
            "name": (np.asarray(names.indices, dtype=np.int64), texts),
        },
    )


def _communication(profile: Profile, found: Communication, times: _Times) -> pa.Table:
    """Spans of communication; sequence as recorded, else counted in the order of starts."""
    order = np.argsort(times.start[found.rows], kind="stable")
    keys = times.iteration[found.rows] * (found.channel.max(initial=0) + 1) + found.channel
    counted = np.empty(len(order), dtype=np.int64)
    counted[order] = running_numbers(keys[order])
    sequence = found.integers["sequence"]
    integers = _placed(profile, found.rows, times)
    integers.update(found.integers)
    integers["sequence"] = np.where(sequence < 0, counted, sequence)
    integers["track"] = _tracks(profile.events, found.rows, Track.COMMUNICATION)
    kinds = [str(Kind.COLLECTIVE), str(Kind.P2P)]
    texts = {**found.texts, "kind": (found.is_message.astype(np.int64), kinds)}
    return span_table(len(found.rows), integers, texts)


def _placed(profile: Profile, rows: Integers, times: _Times) -> dict[str, Integers | int]:
    launch, start = times.launch[rows], times.start[rows]
    return {
        "rank": profile.rank,
        "start_ns": profile.origin_unix_ns + start,
        "duration_ns": times.end[rows] - start,
        "iteration": times.iteration[rows],
        "launch_ns": np.where(launch >= 0, launch - start, NOT_APPLICABLE),
    }


def _short(kernel: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    return kernel.removeprefix("void ").partition("<")[0].partition("(")[0].strip() or kernel


def _tracks(events: pa.Table, rows: Integers, main: Track) -> Integers:
    """The busiest stream is the main track, what runs on others lies beside it."""
    streams = events.column("stream").fill_null(-1).to_numpy()[rows]
    used, counts = np.unique(streams[streams >= 0], return_counts=True)
    busiest = used[np.argmax(counts)] if len(used) else -1
    on_main = (streams == busiest) | (streams < 0)
    return np.where(on_main, int(main), int(Track.OVERLAPPED))
