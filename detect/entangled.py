"""Passes in which a rank's own time and its waiting cannot be told apart, and what can be measured.

Megatron-Core overlaps the reduction of input gradients over the TP group with the weight gradients.
The pass then waits for the group's slowest member inside its own compute spans:

    mlp-backward   |── own compute ──|── weight gradients ──| waiting |
    all_reduce                       |───── wait ───── transfer ──────|

On a GPU a slow rank therefore makes the backward passes of its whole TP group look slow. What stays
the rank's own is the time from the start of a module to the launch of its first overlapped
collective. CPU runs do not need this: a thread that waits uses no CPU time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.cover import SpanTimes, enclosing
from detect.observations import Bools, Floats, Ints

MIN_SHARE = 0.5
"""Share of a phase's passes that must hold such collectives before they are measured this way."""


@dataclass(frozen=True)
class Leads:
    """Own time of entangled passes, by pass."""

    phases: tuple[int, ...]
    """Phases that are entangled."""
    time_ns: Floats
    """(pass,): summed leads of the pass; 0 where it has none."""


def measure_leads(
    spans: SpanTimes, passes: Bools, phase: Ints, modules: Bools, overlapped: Bools
) -> Leads:
    """Sum of module start to first overlapped collective, for each pass.

    `passes`, `modules` and `overlapped` mark spans; `phase` is that of each pass. Modules of a rank
    must not overlap each other.
    """
    none = Leads((), np.zeros(len(phase)))
    if not overlapped.any() or not modules.any():
        return none
    module = enclosing(spans, modules, overlapped)
    inside = module >= 0
    first = np.full(int(modules.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first, module[inside], spans.start[overlapped][inside])
    module_start = spans.start[modules]
    lead = np.where(first < np.iinfo(np.int64).max, first - module_start, 0)
    owner = enclosing(spans, passes, modules)
    total = np.zeros(len(phase))
    np.add.at(total, owner[owner >= 0], lead[owner >= 0])
    entangled = tuple(
        int(one) for one in np.unique(phase) if float((total[phase == one] > 0).mean()) > MIN_SHARE
    )
    return Leads(entangled, total)
