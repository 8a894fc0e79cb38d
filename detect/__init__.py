"""Turn a timeline into findings: which rank is slow, why, how sure, at what cost, whose fault.

Owns the verdict. Fed with a `megascan.timeline.Timeline` (or an op table) by `megascan.cli` and
`megascan.watch`; hands them a `Report`. Start reading at detector.py.

    detector.py    the way of a verdict: observe, search each cause, fold consequences, judge
    observe/       spans to matrices by rank and iteration
    stats/         how far a rank is from its peers, and whether that is more than noise
    causes/        one file a cause: its search, words and advice
    thresholds/    every number that decides, by subject
    report.py      the result; text.py says it, page/ draws it
    whatif/        a replay of the step: what slowness costs
    optable.py     op tables of production traces: their replay, their observations
    comparison/    what changed between two traces

Names are loaded when they are first used: a replay of the step needs no statistics, and is done
before the statistics would be imported.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from detect.detector import detect, detect_op_table
    from detect.report import Cause, Finding, Owner, Report, Verdict
    from detect.text import render_text
    from detect.thresholds.adjustable import DetectorSettings

__megascan__ = True

__all__ = [
    "Cause",
    "DetectorSettings",
    "Finding",
    "Owner",
    "Report",
    "Verdict",
    "detect",
    "detect_op_table",
    "render_text",
]

_HOMES = {
    "Cause": "detect.report",
    "DetectorSettings": "detect.thresholds.adjustable",
    "Finding": "detect.report",
    "Owner": "detect.report",
    "Report": "detect.report",
    "Verdict": "detect.report",
    "detect": "detect.detector",
    "detect_op_table": "detect.detector",
    "render_text": "detect.text",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'detect' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
