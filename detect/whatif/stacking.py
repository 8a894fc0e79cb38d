"""Which iterations and ranks of a trace share a program, and their marks as dense arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from detect.whatif.graph import Bools, Ints
from detect.whatif.marks import Marks, Words, marks_of, programs
from megascan.errors import InputError
from megascan.timeline import Timeline

NUM_WARMUP_ITERATIONS = 2
"""The first iterations of a run compile and allocate; they are left out where others remain."""
_LEAST_SHARE = 0.5
"""A rank that ran its stage's usual program in fewer iterations is taken as missing."""


@dataclass(frozen=True, kw_only=True)
class StageMarks:
    """Marks of one stage: `index` (lane, iteration, mark) into Marks; -1 where a lane is missing.

    `present` (lane,) are lanes that were recorded.
    """

    index: Ints
    present: Bools


@dataclass(frozen=True, kw_only=True)
class Stack:
    """All stages over the iterations they share; `ranks` (stage, lane), `iterations` their ids.

    `bounds` (stage, lane, iteration, 2) are begin and end of every rank's iterations, ns.
    """

    marks: Marks
    stages: tuple[StageMarks, ...]
    ranks: Ints
    iterations: Ints
    bounds: Ints
    notes: tuple[str, ...]

    @property
    def complete_lane(self) -> int:
        """A lane that was recorded on every stage.

        Raises InputError when there is none: messages between stages could not be paired.
        """
        whole = np.logical_and.reduce([stage.present for stage in self.stages])
        if not whole.any():
            raise InputError(
                "no replica of the model has a usable record of every pipeline stage; aggregate "
                "a trace in which at least one replica is complete"
            )
        return int(np.argmax(whole))


def stack_marks(timeline: Timeline) -> Stack:
    """Find what is common. Raises InputError when no iteration ran the same on all ranks."""
    marks = marks_of(timeline)
    ranks = ranks_by_stage(timeline)
    rows = {int(rank): row for row, rank in enumerate(marks.ranks)}
    grid = np.array([[rows.get(int(rank), -1) for rank in lanes] for lanes in ranks])
    usual = _runs_usual_program(programs(marks), grid)
    present = usual.mean(axis=2) >= _LEAST_SHARE
    kept = np.all(usual | ~present[:, :, None], axis=(0, 1)) & present.any()
    kept, num_warmup = _without_warmup(kept, marks.iterations)
    if not kept.any():
        raise InputError(
            f"none of the {len(marks.iterations)} traced iterations ran the same operations on "
            "all ranks of a stage, so there is no step to replay; trace more iterations"
        )
    chosen = np.flatnonzero(kept)
    size = len(marks.iterations)
    first = np.searchsorted(marks.segment, np.arange(len(marks.ranks) * size))
    lengths = np.bincount(marks.segment, minlength=len(first))
    segments = np.where(grid[:, :, None] < 0, -1, grid[:, :, None] * size + chosen)
    stages = tuple(
        _stage(first, lengths, segments[number], present[number]) for number in range(len(ranks))
    )
    bounds = marks.bounds.reshape(-1, 2)[segments]
    bounds[~present] = 0
    return Stack(
        marks=marks,
        stages=stages,
        ranks=ranks,
        iterations=marks.iterations[chosen],
        bounds=bounds,
        notes=_notes(ranks[~present], len(marks.iterations) - len(chosen), num_warmup),
    )


def ranks_by_stage(timeline: Timeline) -> Ints:
    """Global ranks as (stage, lane); lanes in order of rank, so that one lane is one replica."""
    layout = timeline.layout
    stages: Mapping[int, list[int]] = {number: [] for number in range(layout.pp)}
    for rank in range(layout.world_size):
        stages[layout.coordinates(rank).pp].append(rank)
    return np.array([stages[number] for number in range(layout.pp)])


def _runs_usual_program(fingerprints: Words, grid: Ints) -> Bools:
    """Whether each (stage, lane, iteration) has the row of marks most common in its stage."""
    usual = np.zeros((*grid.shape, fingerprints.shape[1]), dtype=np.bool_)
    for number, lanes in enumerate(grid):
        found = fingerprints[lanes[lanes >= 0]]
        values, counts = np.unique(found[found != 0], return_counts=True)
        if len(values):
            same = fingerprints[lanes] == values[np.argmax(counts)]
            usual[number] = same & (lanes >= 0)[:, None]
    return usual


def _without_warmup(kept: Bools, iterations: Ints) -> tuple[Bools, int]:
    later = kept & (iterations > NUM_WARMUP_ITERATIONS)
    if later.sum() < 2:
        return kept, 0
    return later, int((iterations <= NUM_WARMUP_ITERATIONS).sum())


def _stage(first: Ints, lengths: Ints, segments: Ints, present: Bools) -> StageMarks:
    length = int(lengths[segments[int(np.argmax(present)), 0]]) if present.any() else 0
    index = first[segments][:, :, None] + np.arange(length)
    index[~present] = -1
    return StageMarks(index=index, present=present)


def _notes(missing: Ints, num_left_out: int, num_warmup: int) -> tuple[str, ...]:
    notes = []
    if len(missing):
        names = ", ".join(str(rank) for rank in np.sort(missing)[:8])
        more = ", …" if len(missing) > 8 else ""
        notes.append(
            f"{len(missing)} rank(s) without a usable record ({names}{more}) are replayed like "
            "the median of their peers"
        )
    if num_warmup:
        notes.append(f"{num_warmup} first iteration(s) of the run are left out (warm-up)")
    if num_left_out > num_warmup:
        notes.append(
            f"{num_left_out - num_warmup} traced iteration(s) with other or lost operations are "
            "left out"
        )
    return tuple(notes)
