"""The statistics by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from detect.stats import robust
from detect.stats.noise import Noise, Usual, estimate_noise, repetition, step_noise

USUAL = Usual(floor=0.001, spread=0.003)


def test_leave_one_out_median_by_hand():
    values = np.array([[1.0], [2.0], [9.0]])
    assert robust.leave_one_out_median(values)[:, 0].tolist() == [5.5, 5.0, 1.5]


@pytest.mark.parametrize("share_missing", [0.0, 0.3])
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_median_and_mean_are_numpys_digit_by_digit(axis, share_missing):
    draw = np.random.default_rng(5)
    for shape in ((4, 5, 6), (1, 2, 3), (3, 1, 40)):
        values = draw.normal(size=shape)
        values[draw.random(shape) < share_missing] = np.nan
        for each in (values, values.transpose(), values[:, ::-1]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # nothing there at all
                expected = np.nanmedian(each, axis=axis), np.nanmean(each, axis=axis)
            np.testing.assert_array_equal(robust.median(each, axis), expected[0])
            np.testing.assert_array_equal(robust.mean(each, axis), expected[1])


def test_leave_one_out_median_of_one_is_unknown():
    assert np.isnan(robust.leave_one_out_median(np.array([[3.0]]))).all()


@given(
    arrays(
        np.float64,
        st.tuples(st.integers(2, 7), st.integers(1, 4)),
        elements=st.one_of(st.floats(-9, 9), st.just(np.nan)),
    )
)
def test_leave_one_out_median_is_that_of_the_others(values):
    found = robust.leave_one_out_median(values)
    for row in range(len(values)):
        expected = robust.median(np.delete(values, row, axis=0), axis=0)
        np.testing.assert_allclose(found[row], expected)


def test_excluded_members_are_nobodys_peers_but_are_compared():
    values = np.array([[10.0], [1.0], [2.0]])
    expected = robust.expected_from_others(values, np.array([True, False, False]))
    assert expected[:, 0].tolist() == [1.5, 2.0, 1.0]


def test_step_noise_does_not_count_a_step():
    rng = np.random.default_rng(0)
    series = 0.01 * rng.standard_normal((1, 400))
    series[0, 200:] += 5.0
    assert step_noise(series)[0] == pytest.approx(0.01, rel=0.15)


def test_three_point_median_removes_one_odd_iteration():
    series = np.array([[0.0, 0.0, 7.0, 0.0, 0.0]])
    assert robust.three_point_median(series).tolist() == [[0.0] * 5]


def test_noise_is_pooled_and_a_noisy_rank_keeps_its_own():
    rng = np.random.default_rng(2)
    value = 0.01 * rng.standard_normal((8, 60))
    value[3] *= 10
    noise = estimate_noise(value, np.zeros(8, dtype=bool), USUAL)
    assert noise.sigma[0] == pytest.approx(0.01, rel=0.3)
    assert noise.sigma[3] > 0.06


def test_minimum_detectable_effect_has_the_promised_power():
    """Simulated: an effect of that size passes the critical value in about 95 % of trials."""
    rng = np.random.default_rng(3)
    noise = Noise(
        sigma=np.array([0.02]), between=0.0, inflation=1.0, degrees=60.0, between_degrees=60.0,
        usual=Usual(floor=0.02, spread=0.0),
    )  # fmt: skip
    effect = noise.detectable(25, 0.01 / 10, 0.95)
    error = float(noise.level_error(25.0)[0])
    levels = robust.centre(effect + 0.02 * rng.standard_normal((4000, 25)))
    passed = noise.change_p_value(levels / error) < 0.01 / 10
    assert passed.mean() == pytest.approx(0.95, abs=0.03)


def test_centre_is_the_mean_of_the_middle():
    values = np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 99.0], [1.0, np.nan, np.nan, 2.0, 9.0, np.nan]])
    assert robust.centre(values).tolist() == [3.5, 2.0]
    assert np.isnan(robust.centre(np.full((1, 3), np.nan))).all()


def test_noise_that_repeats_itself_is_told_from_noise_that_does_not():
    rng = np.random.default_rng(5)
    steps = rng.standard_normal((16, 40))
    assert repetition(steps) < 0.2
    wander = steps.copy()
    for slot in range(1, 40):
        wander[:, slot] = 0.8 * wander[:, slot - 1] + 0.6 * steps[:, slot]
    assert 0.5 < repetition(wander) < 1.0


def test_a_step_is_no_repetition():
    rng = np.random.default_rng(6)
    series = 0.01 * rng.standard_normal((8, 20))
    series[:, 10:] += 0.5
    assert repetition(series) < 0.4


def test_lasting_spread_is_weighed_against_what_is_usual():
    rng = np.random.default_rng(7)
    usual = Usual(floor=0.001, spread=0.005)
    levels = 0.02 * rng.standard_normal((64, 1))
    wide = levels + 0.001 * rng.standard_normal((64, 20))
    assert estimate_noise(wide, np.zeros(64, dtype=bool), usual).between > 0.014
    few = estimate_noise(wide[:3], np.zeros(3, dtype=bool), usual)
    assert few.between < 0.015
    assert few.between_degrees < 15
    pair = estimate_noise(np.array([[0.2], [-0.2]]) + wide[:2] * 0, np.zeros(2, dtype=bool), usual)
    assert pair.between == pytest.approx(0.005)


def test_beyond_what_half_of_the_rows_do_not_exceed():
    """Of two rows one has all that the other has not; of three the middle one is usual."""
    assert robust.beyond_most(np.array([[1.0], [9.0]])).tolist() == [[0.0], [8.0]]
    assert robust.beyond_most(np.array([[1.0], [3.0], [9.0]])).tolist() == [[0.0], [0.0], [6.0]]
    assert robust.beyond_most(np.array([[1.0], [1.0], [5.0], [9.0]])).max() == 8.0
