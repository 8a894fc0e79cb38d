"""Time for which a device stands still inside its passes, its host late with the next launch.

A slow device multiplies every operation. A slow host lets the device run dry now and then: in a few
modules, or between them, while most modules take as long as ever:

    slow device  |── attention ────|── mlp ───|── attention ────|── mlp ───|
    slow host    |─ attention ─|  ·  |─ mlp ─|    ·    |─ attention ─|─ mlp ─|
                 · the queue is empty

So what a pass should take follows from its own modules. A module's typical time is its median over
the rank's passes, times the pass's median ratio to such medians (a longer sequence, a slow phase:
all modules of the pass alike). The rest of a pass (embedding, loss, norms) is the rank's own
median, unless that is more than twice what a rank of its stage typically needs, in proportion to
their modules. What the pass took beyond all this, it stood still. That needs no peers: a stage of
one rank shows it, too.

Waiting for the TP group inside modules is no standing still: it is part of what is typical, and not
of the pass's own time (see `detect.observe.entangled`).

Launch times do not tell it as well: a host that lost its core for 20 ms catches up within a few
launches, so the queue is long again at nearly every start that was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats, Ints
from detect.observe.cover import SpanTimes, enclosing

LEAST_MODULES = 4
"""Modules of a pass from which on their median says what is typical."""
TOLERANCE = 0.1
"""Share by which a pass may exceed what follows from its modules."""
MOST_REST = 2.0
"""Ranks of a stage differ in the rest of a pass (the first of a TP group sums the losses), but
hardly by more than this."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Passes and the modules inside them.

    `role`, `time_ns`, `own_ns`: of each pass, a number for what it is comparable with (phase,
    chunk), its time, and that less all waiting. `module_kind`, `module_ns`: of each module, a
    number for name and layer, and its time.
    """

    passes: Bools
    role: Ints
    stage: Ints
    """(pass,): pipeline stage of its rank."""
    time_ns: Floats
    own_ns: Floats
    modules: Bools
    module_kind: Ints
    module_ns: Floats


def stalled_time(spans: SpanTimes, pieces: Pieces) -> Floats:
    """Time that each pass stood still, (pass,) ns; 0 where it holds too few modules to tell."""
    owner = enclosing(spans, pieces.passes, pieces.modules)
    inside = owner >= 0
    num_passes = len(pieces.time_ns)
    count = np.bincount(owner[inside], minlength=num_passes)
    if not (count >= LEAST_MODULES).any():
        return np.zeros(num_passes)
    row = spans.row[pieces.modules][inside]
    module_ns, owner = pieces.module_ns[inside], owner[inside]
    typical = _median_by(row * (int(pieces.module_kind.max()) + 1) + pieces.module_kind[inside],
                         module_ns)  # fmt: skip
    scale = _median_by(owner, module_ns / np.maximum(typical, 1.0))
    expected: Floats = np.zeros(num_passes)
    np.add.at(expected, owner, typical * scale)
    rest = pieces.time_ns - np.bincount(owner, weights=module_ns, minlength=num_passes)
    told = (count >= LEAST_MODULES) & (expected > 0)
    whole = expected + _usual_rest(spans, pieces, told, np.maximum(rest, 0.0), expected)
    over = pieces.own_ns - whole
    return np.where(told & (over > TOLERANCE * whole), over, 0.0)


def _usual_rest(
    spans: SpanTimes, pieces: Pieces, told: Bools, rest: Floats, expected: Floats
) -> Floats:
    """Rest of a pass as it should be, (pass,) ns."""
    num_roles = int(pieces.role.max(initial=0)) + 1
    by_rank = (spans.row[pieces.passes] * num_roles + pieces.role)[told]
    by_stage = (pieces.stage * num_roles + pieces.role)[told]
    usual = _median_by(by_rank, rest[told])
    modules = _median_by(by_rank, expected[told])
    fewest = _lowest_by(by_stage, modules)
    most = MOST_REST * _lowest_by(by_stage, usual) * modules / np.maximum(fewest, 1.0)
    result = np.zeros(len(rest))
    result[told] = np.where(usual > most, most / MOST_REST, usual)
    return result


def _lowest_by(key: Ints, values: Floats) -> Floats:
    """For each value the lowest of the values of its key."""
    lowest = np.full(int(key.max(initial=0)) + 1, np.inf)
    np.minimum.at(lowest, key, values)
    return np.asarray(lowest[key])


def _median_by(key: Ints, values: Floats) -> Floats:
    """For each value the median of the values of its key."""
    order = np.lexsort((values, key))
    ordered = key[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    last = np.concatenate([first[1:], [len(key)]])
    sorted_values = values[order]
    middle = 0.5 * (sorted_values[(first + last - 1) // 2] + sorted_values[(first + last) // 2])
    result = np.empty(len(values))
    result[order] = np.repeat(middle, last - first)
    return result
