"""Figures from outcomes: recall, precision, confusion, errors, false alarms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.outcomes import Outcome
from benchmarks.detection.scoring import Score
from megascan.header import Json


@dataclass(frozen=True)
class Share:
    """So many of so many, with the 95 % interval of Wilson."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """The share itself; not a number where there is nothing."""
        return self.hits / self.total if self.total else math.nan

    def interval(self) -> tuple[float, float]:
        """Wilson's score interval."""
        if not self.total:
            return math.nan, math.nan
        z, n, p = 1.96, self.total, self.value
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def text(self) -> str:
        """`0.98 (49/50, 0.90 to 1.00)`."""
        if not self.total:
            return "-"
        low, high = self.interval()
        return f"{self.value:.3f} ({self.hits}/{self.total}, {low:.2f} to {high:.2f})"

    def to_json(self) -> dict[str, Json]:
        """As numbers."""
        return {"hits": self.hits, "total": self.total}


Key = Callable[[Outcome], str]


def _scored(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, Score]]:
    return [(outcome, outcome.score) for outcome in outcomes if outcome.score is not None]


def recall(outcomes: Iterable[Outcome]) -> Share:
    """Planted faults that were named exactly; a crash finds nothing."""
    found = total = 0
    for outcome in outcomes:
        total += len(outcome.case.faults)
        found += outcome.score.num_found if outcome.score else 0
    return Share(found, total)


def precision(outcomes: Iterable[Outcome]) -> Share:
    """Node findings that name a faulty rank and nobody else."""
    scores = [found for _, found in _scored(outcomes)]
    named = sum(found.num_named for found in scores)
    return Share(named - sum(found.num_false for found in scores), named)


def right_cause(outcomes: Iterable[Outcome]) -> Share:
    """Faults that were named and whose cause is right."""
    scores = [found for _, found in _scored(outcomes)]
    return Share(
        sum(found.num_right_cause for found in scores), sum(found.num_found for found in scores)
    )


def top_one(outcomes: Iterable[Outcome]) -> Share:
    """Faulty jobs whose first finding is right."""
    faulty = [outcome for outcome in outcomes if outcome.case.faults]
    return Share(sum(bool(o.score and o.score.top_is_right) for o in faulty), len(faulty))


def alarmed(outcomes: Iterable[Outcome]) -> Share:
    """Jobs in which an innocent rank is named."""
    chosen = list(outcomes)
    return Share(sum(bool(o.score and o.score.num_false) for o in chosen), len(chosen))


def job_cause(outcomes: Iterable[Outcome]) -> Share:
    """Uneven jobs that are called so."""
    expected = [outcome for outcome in outcomes if outcome.case.job_cause]
    return Share(sum(bool(o.score and o.score.job_cause_found) for o in expected), len(expected))


def grouped(outcomes: Sequence[Outcome], key: Key) -> dict[str, list[Outcome]]:
    """Outcomes by a key, in order of first appearance."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups


def confusion(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], int]:
    """(planted, reported) causes of right names."""
    return dict(Counter(pair for _, found in _scored(outcomes) for pair in found.causes))


def onset_errors(outcomes: Iterable[Outcome]) -> list[int]:
    """Iterations by which transient faults are dated wrongly."""
    scores = [found for _, found in _scored(outcomes)]
    return [found.onset_error for found in scores if found.onset_error is not None]


def slowdown_errors(outcomes: Iterable[Outcome]) -> list[float]:
    """Errors of reported slowdowns of compute faults, as ratios."""
    scores = [found for _, found in _scored(outcomes)]
    return [abs(found.slowdown_error) for found in scores if found.slowdown_error is not None]


def cost_errors(outcomes: Iterable[Outcome]) -> list[float]:
    """Errors of reported step-time costs of lasting faults, as ratios."""
    scores = [found for _, found in _scored(outcomes)]
    return [abs(found.cost_error) for found in scores if found.cost_error is not None]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {
        "median": round(float(np.median(array)), 5),
        "p95": round(float(np.quantile(array, 0.95)), 5),
        "largest": round(float(array.max()), 5),
    }


def baseline(outcomes: Sequence[Outcome], name: str) -> tuple[Share, Share, Share]:
    """(recall, precision, share of fault-free jobs with a name) of another tool's rule, by rank."""
    faulty_ranks = hits = names = alarms = nulls = 0
    for outcome in outcomes:
        right, wrong = outcome.baselines[name]
        truth = {r for f in outcome.case.faults for r in (f.rank, f.peer) if r is not None}
        faulty_ranks += len(truth)
        hits += right
        names += right + wrong
        if not truth:
            nulls += 1
            alarms += wrong > 0
    return Share(hits, faulty_ranks), Share(hits, names), Share(alarms, nulls)
