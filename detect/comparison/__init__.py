"""Say what changed between two traces: step, roles, ranks, links, shares of time, findings.

`measures` takes two `Side`s (examined traces), measures every quantity in both and tells whether
both are of one job; `compare` judges which quantities moved beyond noise and pairs the findings;
`changes` holds the result, its JSON and its text for `megascan diff`. Start reading at `compare`.
"""

from detect.comparison.changes import Comparison, Outcome, render_text
from detect.comparison.compare import compare
from detect.comparison.measures import Side, side_of_op_table, side_of_timeline

__all__ = [
    "Comparison",
    "Outcome",
    "Side",
    "compare",
    "render_text",
    "side_of_op_table",
    "side_of_timeline",
]
