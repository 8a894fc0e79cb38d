"""Shares of microbatches: who runs which, when they change, and when not."""

from __future__ import annotations

from itertools import chain

import pytest

from training.data.datasets import DealtSampler, SequentialSampler
from training.pipeline.rebalance import (
    REVIEW_INTERVAL,
    Deal,
    Rebalancer,
    best_deal,
    even_deal,
)


@pytest.mark.parametrize("shares", [(3, 1), (1, 3), (2, 2), (5, 2, 2), (1, 1, 7), (4, 1, 1)])
def test_every_microbatch_of_a_step_is_run_once(shares: tuple[int, ...]) -> None:
    deal = Deal(shares=shares)
    dealt = [deal.positions(replica) for replica in range(len(shares))]
    assert tuple(map(len, dealt)) == shares
    assert sorted(chain.from_iterable(dealt)) == list(range(sum(shares)))


def test_each_replica_keeps_its_own_first_ones() -> None:
    deal = Deal(shares=(3, 1))
    assert deal.positions(0) == [0, 2, 3]
    assert deal.positions(1) == [1]


@pytest.mark.parametrize("replica", [0, 1])
def test_an_even_deal_is_what_the_plain_sampler_gives(replica: int) -> None:
    plain = SequentialSampler(
        num_samples=16, micro_batch_size=2, dp_rank=replica, dp_size=2, consumed_samples=8
    )
    dealt = DealtSampler(
        num_samples=16,
        micro_batch_size=2,
        positions=even_deal(2, 2).positions(replica),
        step_microbatches=4,
        consumed_samples=8,
    )
    assert list(dealt) == list(plain)
    assert len(dealt) == 2


def test_the_slowest_replica_ends_as_early_as_it_can() -> None:
    assert best_deal([1.0, 1.3], 32, 0.0).shares == (18, 14)
    assert best_deal([1.0, 1.0], 32, 3.0).shares == (16, 16)
    assert best_deal([1.0, 100.0], 8, 1.0).shares == (7, 1)


def reviews(rebalancer: Rebalancer, number: int) -> list[Deal | None]:
    """Run so many reviews; what each decided."""
    steps = [rebalancer.after_step(1.0, 1) for _ in range(number * REVIEW_INTERVAL)]
    assert not any(steps[n] for n in range(len(steps)) if (n + 1) % REVIEW_INTERVAL)
    return steps[REVIEW_INTERVAL - 1 :: REVIEW_INTERVAL]


def test_microbatches_move_when_two_reviews_agree_and_stay_there() -> None:
    rebalancer = Rebalancer(even_deal(2, 16), lambda _: [1.0, 1.4], fill=1.0)
    first, second, *later = reviews(rebalancer, 5)
    assert first is None
    assert second == best_deal([1.0, 1.4], 32, 1.0)
    assert second.shares[0] > second.shares[1]
    assert later == [None, None, None]


def test_small_differences_and_passing_ones_move_nothing() -> None:
    rebalancer = Rebalancer(even_deal(2, 16), lambda _: [1.0, 1.02], fill=1.0)
    assert reviews(rebalancer, 4) == [None] * 4
    measured = iter([[1.0, 1.4], [1.0, 1.0]] * 3)
    rebalancer = Rebalancer(even_deal(2, 16), lambda _: next(measured), fill=1.0)
    assert reviews(rebalancer, 6) == [None] * 6


def test_they_come_back_when_the_replica_has_recovered() -> None:
    measured = iter([[1.0, 1.4]] * 2 + [[1.0, 1.0]] * 2)
    rebalancer = Rebalancer(even_deal(2, 16), lambda _: next(measured), fill=1.0)
    reviews(rebalancer, 4)
    assert rebalancer.deal == even_deal(2, 16)


def test_what_is_exchanged_is_the_time_of_one_microbatch() -> None:
    given: list[float] = []

    def exchange(own_s: float) -> list[float]:
        given.append(own_s)
        return [own_s, own_s]

    rebalancer = Rebalancer(even_deal(2, 4), exchange, fill=0.0)
    for busy_s in (8.0, 4.0, 4.0, 4.0, 40.0):
        rebalancer.after_step(busy_s, 4)
    assert given == [1.0]
