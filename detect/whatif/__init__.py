"""Replay the step to say what it would cost without each rank's, operation's, stage's slowness.

Fed by timelines (`traced`, cut at `marks`) and by op tables (`optable`); both become a `Replay`, a
dependency graph with traced and ideal weights (`graph`). From it `metrics` computes the figures of
`megascan whatif` and what mending single ranks saves; `render` writes text, JSON and the heat map,
`ideal` the timeline of the ideal run. `path` walks back through it: the chain of operations that
determines a step's end, put into words by `path_text`. Start reading at `graph`.

This package gives what a verdict's costs need; the rest is taken from its own modules.
"""

from detect.whatif.graph import Replay
from detect.whatif.metrics import (
    Saving,
    WhatIf,
    analyze,
    saved_by_fixing,
    saved_by_quicker_border,
    savings_of,
    savings_of_standouts,
    worst_ranks,
)
from detect.whatif.optable import OpTable, is_op_table, read_op_table, replay_of_op_table
from detect.whatif.traced import replay_of_timeline

__all__ = [
    "OpTable",
    "Replay",
    "Saving",
    "WhatIf",
    "analyze",
    "is_op_table",
    "read_op_table",
    "replay_of_op_table",
    "replay_of_timeline",
    "saved_by_fixing",
    "saved_by_quicker_border",
    "savings_of",
    "savings_of_standouts",
    "worst_ranks",
]
