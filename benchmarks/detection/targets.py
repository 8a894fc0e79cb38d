"""What is aimed at, and what was reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection import figures
from benchmarks.detection.outcomes import Outcome

WITHIN = 0.02
"""Share of the true slowdown within which the reported one ought to lie."""


@dataclass(frozen=True)
class Target:
    """One line: what, the least share, and the figure; None where nothing was run."""

    name: str
    least: float
    figure: figures.Share

    @property
    def reached(self) -> str:
        """Yes or no."""
        if not self.figure.total:
            return "-"
        return "yes" if self.figure.value >= self.least else "no"


def targets(faulty: Sequence[Outcome], innocent: Sequence[Outcome]) -> list[Target]:
    """All of them."""

    def chosen(use: Callable[[Outcome], bool]) -> list[Outcome]:
        return [outcome for outcome in faulty if use(outcome)]

    compute = chosen(lambda o: o.case.group == "compute" and o.case.severity >= 0.05)
    small = chosen(lambda o: o.case.group == "compute" and o.case.severity == 0.03)
    halved = chosen(lambda o: o.case.group == "link" and o.case.severity >= 1.0)
    several = chosen(lambda o: o.case.group == "several")
    silent = figures.alarmed(innocent)
    onsets = figures.onset_errors(chosen(lambda o: o.case.group == "compute"))
    slowdowns = figures.slowdown_errors(faulty)
    return [
        Target("compute of 5 % and more: recall", 0.99, figures.recall(compute)),
        Target("compute of 5 % and more: precision", 0.99, figures.precision(compute)),
        Target("compute of 5 % and more: right cause", 0.99, figures.right_cause(compute)),
        Target("compute of 3 %: recall", 0.90, figures.recall(small)),
        Target(
            "jobs without a fault in which no node is named",
            1.0,
            figures.Share(silent.total - silent.hits, silent.total),
        ),
        Target("links at half the bandwidth and less: right pair", 0.95, figures.recall(halved)),
        Target(
            "transients of 5 of 20 iterations that are found: onset within one iteration",
            0.99,
            figures.Share(int(np.sum(np.array(onsets) <= 1)), len(onsets)),
        ),
        Target("three slow ranks at once: named", 0.99, figures.recall(several)),
        Target(
            "reported slowdown within 2 % of the true one",
            0.99,
            figures.Share(int(np.sum(np.array(slowdowns) <= WITHIN)), len(slowdowns)),
        ),
    ]
