"""The ground of published incidents: what its cases are, that its files hold, and its truth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.grounds import incidents
from benchmarks.grounds.ground import Case

CASES = list(incidents.cases())


def case_of(family: str) -> Case:
    """The smallest case of a family."""
    return min((one for one in CASES if one.family == family), key=lambda one: one.num_ranks)


def test_a_planted_clock_costs_something(tmp_path: Path) -> None:
    (planted,) = incidents.write(case_of("gpu_clock"), tmp_path)
    assert planted.cost_ratio > 1.0
    assert any(tmp_path.iterdir())


def test_slowness_is_that_of_the_planted_clock() -> None:
    case = case_of("gpu_clock")
    (planted,) = case.planted
    slowness = incidents.slowness(case)
    assert slowness.shape[0] == case.num_ranks
    (slow,) = planted.ranks
    assert float(np.median(slowness[slow])) == pytest.approx(planted.factor, rel=0.08)
