"""Helpers that run forwards: what they bring to jobs that recompute, and to those that do not."""

import pytest

from megascan.errors import ConfigError
from training.pipeline.costs import StageCost
from training.pipeline.helper_model import best_share

RECOMPUTING = (
    StageCost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, recompute_s=1.0),
) * 4
ONE_F_ONE_B_S = 44.0
"""PP4, 8 microbatches: 11 slots of 4 s."""


def best(microbatches=8, *, helpers=1, speed=1.0, splits=False):
    return best_share(
        RECOMPUTING,
        microbatches,
        num_helpers=helpers,
        speed_ratio=speed,
        splits_backward=splits,
    )


@pytest.mark.parametrize(
    ("helpers", "speed", "splits", "ratio"),
    [(1, 1.0, False, 0.75), (1, 0.5, False, 0.773), (1, 1.0, True, 0.659), (3, 1.0, True, 0.659)],
)
def test_a_helper_saves_the_repeated_forward(helpers, speed, splits, ratio):
    outcome = best(helpers=helpers, speed=speed, splits=splits)
    assert outcome.pipeline_s / ONE_F_ONE_B_S == pytest.approx(ratio, abs=1e-3)


def test_a_slow_helper_gets_a_smaller_share():
    assert best(32, speed=0.25).share < best(32, speed=1.0).share


def test_more_helpers_are_never_slower():
    assert best(16, helpers=3).pipeline_s <= best(16, helpers=1).pipeline_s


def test_what_is_no_helper_is_refused():
    for helpers, speed in ((0, 1.0), (1, 0.0), (1, -1.0)):
        with pytest.raises(ConfigError, match="expected at least 1 helper"):
            best(helpers=helpers, speed=speed)
    with pytest.raises(ConfigError, match="1 pipeline stages"):
        best_share(RECOMPUTING[:1], 8, num_helpers=1, speed_ratio=1.0, splits_backward=False)
