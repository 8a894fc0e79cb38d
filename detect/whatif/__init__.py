"""Replay the step to say what it would cost without each rank's, operation's, stage's slowness.

    timeline ── marks.py ── traced.py ──┐                       ┌── savings.py   what mending saves
                                        ├── Replay (graph.py) ──┼── slowness.py  S, M: where it sits
    op table ────── detect/optable.py ──┘                       ├── ideal.py     the ideal timeline
                                                                └── path.py      the critical path

A `Replay` is a dependency graph with traced and ideal weights. `render.py` puts the figures of
`megascan whatif` into text, JSON and the heat map, and the chain of operations that determines a
step's end into text and JSON. Start reading at graph.py.

This package gives what a verdict's costs need; the rest is taken from its own modules.
"""

from detect.whatif.graph import Replay
from detect.whatif.savings import Saving, saved_by_fixing, saved_by_quicker_transfers, savings_of
from detect.whatif.traced import replay_of_timeline

__all__ = [
    "Replay",
    "Saving",
    "replay_of_timeline",
    "saved_by_fixing",
    "saved_by_quicker_transfers",
    "savings_of",
]
