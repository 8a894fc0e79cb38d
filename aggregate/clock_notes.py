"""What is said about an alignment: how it was made, and what speaks against it."""

from __future__ import annotations

import numpy as np

from aggregate.causality import Contradictions
from aggregate.fitting import LARGEST_DRIFT_ERROR
from aggregate.keys import FloatArray, IntArray
from aggregate.robust import Lines
from aggregate.steps import ClockStep

_NUM_WORST_RANKS = 3
_WORTH_A_NOTE_NS = 1e3


def fit_method(lines: Lines, component: IntArray, *, with_messages: bool) -> str:
    """One sentence on how clocks were aligned."""
    num_domains = len(component)
    if num_domains == 1:
        return "one host clock: all ranks share it and nothing is moved"
    alone = np.bincount(component)[component] == 1
    if alone.all():
        return "host clocks: no matched communication links the clock domains"
    means = "ends of collectives" + (" and bounds from messages" if with_messages else "")
    return (
        f"{means}: robust least squares over {num_domains} clock domains with "
        f"{len(lines.weights)} anchors, noise {lines.noise_ns / 1e3:.1f} µs; "
        f"{_fitted(lines, alone)}"
    )


def _fitted(lines: Lines, alone: np.typing.NDArray[np.bool_]) -> str:
    """What was fitted for how many domains; a reference has no drift of its own."""
    linked = int(np.count_nonzero(~alone))
    drifting = int(np.count_nonzero(lines.drift[~alone]))
    if drifting == linked:
        return f"offset and drift for {'all' if linked == len(alone) else linked} domains"
    if not drifting:
        return f"offsets alone for {'all' if linked == len(alone) else linked} domains"
    return f"offset and drift for {drifting} domains, offset alone for {linked - drifting}"


def fit_notes(lines: Lines, component: IntArray, rank: IntArray) -> tuple[str, ...]:
    """What limits a fit; `rank` (anchor,) are global ranks."""
    notes: list[str] = []
    num_components = int(component.max(initial=0)) + 1
    if num_components > 1:
        alone = np.flatnonzero(np.bincount(component) == 1)
        notes.append(
            f"collectives and messages link the clocks in {num_components} separate sets "
            f"({len(alone)} of a single clock): between them host clocks are believed and no "
            "wait is claimed"
        )
    fixed = int(np.count_nonzero((lines.drift == 0) & (lines.num_anchors > 0)))
    if len(component) > 1 and fixed:
        notes.append(
            f"the traced time is too short to determine the drift of {fixed} clocks to "
            f"{LARGEST_DRIFT_ERROR * 1e6:.0f} ppm; taken as 0"
        )
    rejected = np.flatnonzero(lines.weights == 0)
    if len(rejected):
        notes.append(
            f"{len(rejected)} of {len(lines.weights)} anchors lie too far off and were not "
            f"believed, most on {_worst_ranks(rank[rejected])}"
        )
    return tuple(notes)


def _worst_ranks(rank: IntArray) -> str:
    ranks, counts = np.unique(rank, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_NUM_WORST_RANKS]
    return ", ".join(f"rank {ranks[place]} ({counts[place]})" for place in order)


def step_note(name: str, step: ClockStep) -> str:
    """What was done about a clock that jumped."""
    when = np.datetime64(step.at_ns, "ns").astype("datetime64[ms]")
    return (
        f"clock {name} jumped by {step.jump_ns / 1e3:+,.1f} µs while it was traced (at {when} by "
        "itself); its later times were put back by as much"
    )


def order_notes(shift_ns: FloatArray, remaining: Contradictions) -> tuple[str, ...]:
    """What was done for causality, and what was left."""
    notes: list[str] = []
    moved = np.abs(shift_ns) > _WORTH_A_NOTE_NS
    if moved.any():
        notes.append(
            f"{np.count_nonzero(moved)} clocks were moved by up to "
            f"{np.abs(shift_ns).max() / 1e3:.1f} µs beyond the fit, so that messages end after "
            "they were sent and nobody leaves a collective before its last member has entered"
        )
    worst = float(remaining.error_ns.max(initial=0.0))
    if worst > _WORTH_A_NOTE_NS:
        notes.append(
            f"{np.count_nonzero(remaining.error_ns > _WORTH_A_NOTE_NS)} clocks still let something "
            f"end before it can have begun, by up to {worst / 1e3:.1f} µs: their error bars are at "
            "least that wide"
        )
    if remaining.worst_disbelieved_ns > _WORTH_A_NOTE_NS:
        notes.append(
            f"{remaining.num_disbelieved} matches cannot be right (one side ends up to "
            f"{remaining.worst_disbelieved_ns / 1e3:.1f} µs before the other begins) and were not "
            "believed"
        )
    return tuple(notes)
