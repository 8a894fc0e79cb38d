"""The statistics of a shift, on plain numbers."""

from __future__ import annotations

import numpy as np
import pytest

from detect.comparison.measures import q_values, shift


def sample(seed: int, rows: int, number: int, level: float = 0.0) -> np.ndarray:
    return level + 0.02 * np.random.default_rng(seed).standard_normal((rows, number))


def test_false_alarms_are_as_rare_as_they_say() -> None:
    """Of 4,000 rows that did not move, about 1 % lie below p = 0.01 (fewer: between > 0)."""
    moved = shift(sample(1, 4000, 15), sample(2, 4000, 11), between=0.0)
    assert (moved.p_value < 0.01).mean() < 0.015


@pytest.mark.parametrize("number", [3, 5, 20])
def test_a_shift_is_measured(number: int) -> None:
    moved = shift(sample(1, 200, number), sample(2, 200, number, level=0.1))
    assert np.median(moved.effect) == pytest.approx(0.1, abs=0.005)
    inside = np.abs(moved.effect - 0.1) < moved.reach
    assert inside.mean() > 0.93


def test_two_iterations_say_nothing() -> None:
    moved = shift(sample(1, 5, 2), sample(2, 5, 20, level=1.0))
    assert (moved.p_value == 1.0).all()


def test_what_was_not_recorded_has_no_effect() -> None:
    before, after = sample(1, 3, 10), sample(2, 3, 10)
    after[1] = np.nan
    moved = shift(before, after)
    assert np.isnan(moved.effect[1]) and moved.p_value[1] == 1.0
    assert np.isfinite(moved.effect[[0, 2]]).all()


def test_a_still_trace_still_has_a_floor() -> None:
    moved = shift(np.zeros((2, 10)), np.full((2, 10), 0.004))
    assert (moved.p_value > 0.05).all()


def test_neighbours_that_repeat_each_other_count_less() -> None:
    random = np.random.default_rng(3)
    steps = 0.02 * random.standard_normal((50, 40))
    repeated = np.repeat(steps[:, ::4], 4, axis=1)
    assert np.median(shift(repeated, repeated).error) > np.median(shift(steps, steps).error)


def test_q_values_are_those_of_benjamini_and_hochberg() -> None:
    assert q_values(np.array([0.01, 0.04, 0.03, 0.5])).tolist() == pytest.approx(
        [0.04, 0.16 / 3, 0.16 / 3, 0.5]
    )
