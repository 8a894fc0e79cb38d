"""Microbatches by length: which order, what is said, and what becomes of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from megascan.errors import ConfigError
from training.arguments import parse_settings, resolve_sizes
from training.pipeline.rebalance import HillOrder, hill_order
from training.pipeline.schedule import check_schedule

if TYPE_CHECKING:
    from conftest import Compare

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
HILL = ("--order-microbatches", "hill")


def test_short_ones_are_outside() -> None:
    assert hill_order([3, 1, 6, 2, 5, 4]) == [1, 0, 4, 2, 5, 3]


def test_equal_ones_stay_as_the_data_has_them() -> None:
    assert hill_order([7, 7, 7, 7]) == [0, 1, 2, 3]
    assert hill_order([7, 7, 7, 1]) == [3, 1, 2, 0]


def test_every_step_keeps_its_own_microbatches_and_what_is_said_is_said_once() -> None:
    said: list[str] = []
    order: HillOrder[int] = HillOrder(int, said.append)
    assert list(order.steps(iter([3, 1, 2, 9, 8, 7, 4]), 3)) == [1, 3, 2, 7, 9, 8]
    assert len(said) == 1
    assert "1 to 3 tokens" in said[0]
    assert "another order" in said[0]


def test_one_length_is_said_to_make_the_flag_idle() -> None:
    said: list[str] = []
    order: HillOrder[int] = HillOrder(int, said.append)
    assert list(order.steps(iter([5, 5, 5, 5]), 2)) == [5, 5, 5, 5]
    assert len(said) == 1
    assert "does nothing" in said[0]
    assert "5 tokens each" in said[0]


def test_without_a_pipeline_it_is_refused() -> None:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
    rest = "--micro-batch-size 1 --train-iters 2 --global-batch-size 4 --order-microbatches hill"
    settings = parse_settings([*words.split(), *rest.split()])
    with pytest.raises(ConfigError, match="--order-microbatches hill needs --pipeline-model"):
        check_schedule(settings, resolve_sizes(settings, 1))


@pytest.mark.distributed
def test_losses_are_the_same_sums_in_another_order(compare: Compare) -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8", *NO_DROPOUT]
    runs = {
        "as it comes": (),
        "hill": HILL,
        "uneven": (),
        "uneven, hill": HILL,
        "uneven, hill, zb-h1": (*HILL, "--pipeline-schedule", "zb-h1"),
    }
    found = compare(2, flags, runs)
    assert found["hill"] == found["as it comes"]  # packed samples have one length
    plain, ordered = found["uneven"][-1], found["uneven, hill"][-1]
    assert ordered["parameters"] != plain["parameters"]
    for mine, other in zip(ordered["losses"], plain["losses"], strict=True):
        assert float.fromhex(mine) == pytest.approx(float.fromhex(other), rel=1e-6)
    assert found["uneven, hill, zb-h1"] == found["uneven, hill"]
