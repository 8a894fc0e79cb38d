"""Find the iterations of a profile by the first of these that it has:

    ProfilerStep#7      the mark of `profiler.step()`: iteration 8
    Optimizer.step#…    an iteration ends where the optimizer has stepped
    repeated kernels    an iteration is what is launched again and again in the same order
    none                everything is iteration 1

Iterations that are not marked are numbered from 1, so that they start alike on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers
from megascan.reader.kineto.document import ANNOTATION, Profile
from megascan.reader.segments import true_rows
from megascan.schema import NOT_APPLICABLE

STEP = "ProfilerStep#"
OPTIMIZER_STEP = "Optimizer.step#"
_STEP_NUMBER = re.compile(r"[0-9]{1,9}")
_NONE: Integers = np.zeros(0, dtype=np.int64)
_MIN_REPEATS = 2
_LEAST_ALIKE = 0.95
"""Share of a repetition's kernels that must equal those of the repetition before."""
_MOST_ANCHORS = 24
"""How many kernels are tried as the mark of an iteration, the rarest first."""
_MOST_IN_ONE = 64
"""How often the kernel that marks iterations may come in one iteration."""
_MIN_KERNELS = 8
"""Least kernels of an iteration that is found by repetition: fewer repeat by chance."""


@dataclass(frozen=True)
class Steps:
    """Iterations in the order of time: numbers, host times, and their thread (-1: any).

    `found_by` says how the iterations were found, "" if the profiler marked them.
    """

    numbers: Integers
    start: Integers
    end: Integers
    thread: int
    found_by: str = ""

    def iteration_at(self, times: Integers) -> Integers:
        """Return each time's iteration: 1 if there are no steps, NOT_APPLICABLE outside of all."""
        if not len(self.numbers):
            return np.ones(len(times), dtype=np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        inside = (at >= 0) & (times <= self.end[at])
        return np.where(inside, self.numbers[at], NOT_APPLICABLE)


def find_steps(profile: Profile, start: Integers, end: Integers, launch: Integers) -> Steps:
    """Return the iterations; `launch` (event,) is the host time of each event's launch, or -1."""
    return (
        _marked(profile, start, end)
        or _by_optimizer(profile, start, end)
        or _by_kernels(profile, start, end, launch)
        or Steps(_NONE, _NONE, _NONE, NOT_APPLICABLE)
    )


def _marked(profile: Profile, start: Integers, end: Integers) -> Steps | None:
    found = np.array([*_iterate_marks(profile.events)], dtype=np.int64).reshape(-1, 2)
    if not len(found):
        return None
    found = found[np.argsort(start[found[:, 0]], kind="stable")]
    rows, numbers = found[np.sort(np.unique(found[:, 1], return_index=True)[1])].T
    return Steps(numbers + 1, start[rows], end[rows], _thread(profile, int(rows[0])))


def _iterate_marks(events: pa.Table) -> Iterator[tuple[int, int]]:
    """Yield (row, number) of the profiler's step marks on the host."""
    names = pc.fill_null(events.column("name"), "")
    is_mark = pc.and_(pc.starts_with(names, STEP), pc.equal(events.column("cat"), ANNOTATION))
    for row in true_rows(is_mark).to_pylist():
        number = names[row].as_py().partition("#")[2]
        if _STEP_NUMBER.fullmatch(number):
            yield row, int(number)


def _thread(profile: Profile, row: int) -> int:
    thread = profile.events.column("tid")[row].as_py()
    return NOT_APPLICABLE if thread is None else int(thread)


def _by_optimizer(profile: Profile, start: Integers, end: Integers) -> Steps | None:
    """Find iterations by the optimizer that steps least often; others may step more than once."""
    names = pc.fill_null(profile.events.column("name"), "")
    steps = np.asarray(pc.starts_with(names, OPTIMIZER_STEP)) & profile.of_category(ANNOTATION)
    rows = np.flatnonzero(steps)
    code = names.take(pa.array(rows)).combine_chunks().dictionary_encode().indices
    count = np.bincount(np.asarray(code, dtype=np.int64)) if len(rows) else np.zeros(0)
    count = np.where(count < _MIN_REPEATS, np.inf, count)
    if not np.isfinite(count).any():
        return None
    chosen = rows[np.asarray(code) == np.argmin(count)]
    ends = np.sort(end[chosen])
    begins = np.r_[start.min(), ends[:-1] + 1]
    numbers = np.arange(1, len(ends) + 1)
    return Steps(
        numbers, begins, ends, _thread(profile, int(chosen[0])), "the steps of the optimizer"
    )


def _by_kernels(profile: Profile, start: Integers, end: Integers, launch: Integers) -> Steps | None:
    kernels = np.flatnonzero(profile.of_category("kernel"))
    begin = np.where(launch[kernels] >= 0, launch[kernels], start[kernels])
    order = np.argsort(begin, kind="stable")
    kernels, begin = kernels[order], begin[order]
    names = profile.events.column("name").take(pa.array(kernels)).combine_chunks()
    code = np.asarray(names.dictionary_encode().indices.fill_null(0), dtype=np.int64)
    firsts = _repetitions(code)
    if len(firsts) < _MIN_REPEATS:
        return None
    begins = begin[firsts]
    last = max(int(end[kernels].max()), int(begin[-1]))
    return Steps(
        np.arange(1, len(begins) + 1),
        begins,
        np.r_[begins[1:] - 1, last],
        NOT_APPLICABLE,
        "kernels that repeat in the same order",
    )


def _repetitions(code: Integers) -> Integers:
    """Return where the repetitions of a sequence begin; the last counts only if nearly complete.

    >>> _repetitions(np.tile([1, 2, 2, 3, 2, 4, 5, 5, 6], 3))
    array([ 0,  9, 18])
    """
    count = np.bincount(code) if len(code) else np.zeros(0, dtype=np.int64)
    anchors = np.flatnonzero(count >= _MIN_REPEATS)
    anchors = anchors[np.argsort(count[anchors], kind="stable")][:_MOST_ANCHORS]
    for anchor in anchors.tolist():
        places = np.flatnonzero(code == anchor)
        for number in range(1, min(len(places) // _MIN_REPEATS, _MOST_IN_ONE) + 1):
            length = int(np.median(places[number:] - places[:-number]))
            if length >= _MIN_KERNELS and _is_alike(code, length):
                return _beginnings(places[::number], length, len(code))
    return np.zeros(0, dtype=np.int64)


def _beginnings(places: Integers, length: int, num_kernels: int) -> Integers:
    """Return where repetitions begin, given the places of the same kernel in each repetition."""
    firsts = places - places[0] % length
    firsts = np.r_[np.arange(0, firsts[0], length), firsts]
    return np.asarray(firsts[firsts + _LEAST_ALIKE * length <= num_kernels])


def _is_alike(code: Integers, length: int) -> bool:
    alike: Flags = code[length:] == code[:-length]
    return bool(len(alike)) and float(alike.mean()) >= _LEAST_ALIKE
