"""Helpers that run forwards: what they bring, and plans that end with and without them."""

import random
from collections import Counter

import pytest

from megascan.errors import ConfigError
from training.pipeline.costs import StageCost, peak_memory
from training.pipeline.disaggregation import MOST_AHEAD, best_share
from training.pipeline.plan import ActionKind
from training.pipeline.simulator import check

RECOMPUTING = (
    StageCost(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, recompute_s=1.0),
) * 4
ONE_F_ONE_B_S = 44.0
"""PP4, 8 microbatches: 11 slots of 4 s."""


def best(microbatches=8, *, speeds=(1.0,), splits=False, stages=RECOMPUTING):
    return best_share(stages, microbatches, speeds=speeds, splits_backward=splits)


@pytest.mark.parametrize(
    ("speeds", "splits", "ratio"),
    [
        ((1.0,), False, 0.75),
        ((0.5,), False, 0.773),
        ((1.0,), True, 0.659),
        ((1.0,) * 3, True, 0.659),
    ],
)
def test_a_helper_saves_the_repeated_forward(speeds, splits, ratio):
    outcome = best(speeds=speeds, splits=splits)
    assert outcome.pipeline_s / ONE_F_ONE_B_S == pytest.approx(ratio, abs=1e-3)


def test_a_slow_helper_gets_a_smaller_share():
    assert best(32, speeds=(0.25,)).share < best(32, speeds=(1.0,)).share


def test_of_two_helpers_the_faster_gets_more():
    counts = Counter(best(16, speeds=(0.25, 1.0)).helper_of)
    assert 0 < counts[0] < counts[1]


def test_more_helpers_are_never_slower():
    assert best(16, speeds=(1.0,) * 3).pipeline_s <= best(16).pipeline_s


def test_plans_end_without_their_helpers_and_hold_two_microbatches():
    """Their inputs then come from the stage before; `check` follows the plan's own messages."""
    draw = random.Random(7)
    for _ in range(60):
        stages = tuple(
            StageCost(
                forward_s=draw.uniform(0.5, 2.0),
                input_gradient_s=draw.uniform(0.5, 2.0),
                weight_gradient_s=draw.uniform(0.5, 2.0),
            )
            for _ in range(draw.randint(2, 6))
        )
        speeds = [draw.uniform(0.1, 3.0) for _ in range(draw.randint(1, 3))]
        splits = draw.random() < 0.5
        made = best(draw.randint(1, 12), speeds=speeds, splits=splits, stages=stages)
        check(made.plan)
        assert max(peak_memory(made.plan)) <= MOST_AHEAD


def test_helped_forwards_are_not_repeated():
    made = best(8)
    last = len(RECOMPUTING) - 1
    for rank, listed in enumerate(made.plan.actions):
        repeated = {a.microbatch for a in listed if a.kind is ActionKind.RECOMPUTE}
        own = {m for m, helper in enumerate(made.helper_of) if helper is None}
        assert repeated == (set() if rank == last else own)
    assert made.microbatches_of(0) == tuple(m for m, h in enumerate(made.helper_of) if h == 0)


def test_what_is_no_helper_is_refused():
    for speeds in ((), (0.0,), (1.0, -1.0)):
        with pytest.raises(ConfigError, match="expected at least 1 helper"):
            best(speeds=speeds)
    with pytest.raises(ConfigError, match="1 pipeline stages"):
        best(stages=RECOMPUTING[:1])
