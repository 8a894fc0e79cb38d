"""What changed between two traces of a job: step, roles, ranks, links, shares of time, findings."""

from detect.comparison.compare import compare
from detect.comparison.comparison import Comparison, Outcome
from detect.comparison.side import Side, side_of_op_table, side_of_timeline
from detect.comparison.text import render_text

__all__ = [
    "Comparison",
    "Outcome",
    "Side",
    "compare",
    "render_text",
    "side_of_op_table",
    "side_of_timeline",
]
