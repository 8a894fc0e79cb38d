"""What a cause is: how it is searched, and what the report and the page say of it.

The detector walks over `detect.causes.registry.CAUSES`. Each search gets an `Inquiry` and returns
an `Answer`; rows that an earlier search found slow are handed to the later ones, because whoever
waits for a slow rank is not at fault.

A cause in one file:

    def _search(inquiry: Inquiry) -> Answer: ...

    FANS = CauseSpec(cause=Cause.FANS, search=_search)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from detect.observe.observations import Observations
from detect.report import Cause, Finding
from detect.stats.noise import Noise
from detect.stats.persistence import least_beyond_bursts
from detect.thresholds import DetectorSettings
from megascan.arrays import Flags


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What a search is given."""

    seen: Observations
    settings: DetectorSettings
    num_tests: int
    """Rows times causes that are tested: significance is controlled over all of them."""
    slow: Flags
    """(row,): who is already known to compute slowly."""
    named: Flags
    """(row,): whom a finding of an earlier search names, of whatever cause."""

    def detectable_effect(self, noise: Noise) -> float:
        """Return the smallest lasting effect that would have been found, in the values' units.

        The significance level is that of the first name among twice as many tests: whole window and
        stretches. Example: noise of 0.4 % over 18 iterations and 32 tests give 0.006; with lasting
        differences of 0.4 % between sound ranks, 0.026: most of that is not noise in time.
        """
        settings, num_iterations = self.settings, len(self.seen.iterations)
        p_value = settings.false_discovery_rate / max(2 * self.num_tests, 1)
        return max(
            noise.detectable(num_iterations, p_value, settings.power),
            least_beyond_bursts(noise, num_iterations, p_value),
        )

    def limited_by(self, noise: Noise) -> str:
        """Say what keeps the detectable effect from being smaller, as part of a sentence."""
        num_iterations = len(self.seen.iterations)
        if noise.between > noise.chance(num_iterations):
            return f"sound ranks differ by {noise.between:.1%} for good"
        varied = float(np.median(noise.sigma))
        return f"{num_iterations} iterations were traced, and a rank's vary by {varied:.0%} each"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search returns. The default says: nothing was found, nothing can be said."""

    findings: tuple[Finding, ...] = ()
    least_slowdown: float | None = None
    """Smallest slowdown that would have been found; None where the trace cannot tell."""
    least_named: float | None = None
    """Smallest slowdown for which a node would have been named; None where for none is shown."""
    least_because: str = ""
    """What makes that so large, as part of a sentence: "6 iterations that vary by 20 % each"."""
    unseen: tuple[int, ...] = ()
    """Ranks that would not be found however slow they were, while others would."""
    hides: str = ""
    """What of a size that matters could not have been seen, as part of a sentence: finding nothing
    is no health then."""
    slow: Flags | None = None
    """(row,): who computes slowly, for the searches that follow."""
    notes: tuple[str, ...] = ()
    """What this trace could not have shown, one sentence each."""
    explains: Callable[[Finding], bool] = lambda finding: False
    """Which findings of earlier searches are parts of the findings here, and are left out."""


def _never(seen: Observations) -> bool:
    del seen
    return False


@dataclass(frozen=True, kw_only=True)
class CauseSpec:
    """One cause as the detector, the report and the page use it."""

    cause: Cause
    search: Callable[[Inquiry], Answer]
    tests_rows: Callable[[Observations], bool] = _never
    """Whether every row is tested, which counts in `Inquiry.num_tests`."""
    power_words: str = ""
    """What would have been found, for the page's table of power: "a rank waits for its data"."""
    quantity: str = ""
    """What `Observations.lost_ns` of the cause is called on a chart: "data loading"."""


def mask_of(rows: list[int], num_rows: int) -> Flags:
    """Return flags that are set at the given rows."""
    mask = np.zeros(num_rows, dtype=bool)
    mask[rows] = True
    return mask
