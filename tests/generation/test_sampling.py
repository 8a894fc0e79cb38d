"""How a token is chosen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training.generation.request import Sampling
from training.generation.sampling import TokenChoice, choose

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).log_softmax(-1)


def drawn(sampling: Sampling, draws: list[float], generated: tuple[int, ...] = ()) -> list[int]:
    choices = [TokenChoice(sampling=sampling, draw=draw, generated=generated) for draw in draws]
    chosen: list[int] = choose(LOGITS.repeat(len(draws), 1), choices).tolist()
    return chosen


def test_temperature_0_takes_the_likeliest() -> None:
    assert drawn(Sampling(), [0.0, 0.5, 0.999]) == [3, 3, 3]


def test_draws_follow_the_probabilities() -> None:
    draws = np.random.default_rng(0).random(20_000).tolist()
    shares = np.bincount(drawn(Sampling(temperature=1.0), draws), minlength=4) / len(draws)
    assert shares == pytest.approx(LOGITS.exp()[0].numpy(), abs=0.01)


def test_a_high_temperature_levels_and_a_low_one_sharpens() -> None:
    draws = np.random.default_rng(0).random(5_000).tolist()
    level = np.bincount(drawn(Sampling(temperature=100.0), draws), minlength=4) / len(draws)
    assert level == pytest.approx([0.25] * 4, abs=0.03)
    assert set(drawn(Sampling(temperature=0.01), draws)) == {3}


def test_top_k_keeps_the_k_likeliest() -> None:
    draws = np.linspace(0, 0.9999, 200).tolist()
    assert set(drawn(Sampling(temperature=1.0, top_k=2), draws)) == {2, 3}
    assert set(drawn(Sampling(temperature=1.0, top_k=100), draws)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, {3}), (0.6, {3}), (0.7, {2, 3}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    # Probabilities 0.03, 0.09, 0.24, 0.64.
    draws = np.linspace(0, 0.9999, 200).tolist()
    assert set(drawn(Sampling(temperature=1.0, top_p=top_p), draws)) == kept


def test_top_p_among_more_tokens_than_are_guessed_at_first() -> None:
    logits = torch.zeros(1, 1000)  # all alike: the nucleus of 0.5 needs 500, equals stay
    logits[0, :500] += 0.001
    choices = [TokenChoice(sampling=Sampling(temperature=1.0, top_p=0.5), draw=0.9999)]
    assert choose(logits, choices).item() == 499


def test_penalties_put_off_what_was_generated() -> None:
    assert drawn(Sampling(presence_penalty=1.5), [0.5], generated=(3,)) == [2]
    assert drawn(Sampling(frequency_penalty=0.6), [0.5], generated=(3,)) == [3]
    assert drawn(Sampling(frequency_penalty=0.6), [0.5], generated=(3, 3)) == [2]
    assert drawn(Sampling(presence_penalty=-2.0), [0.5], generated=(2,)) == [2]


def test_each_row_follows_its_own_rule() -> None:
    rules = [
        Sampling(),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0),
        Sampling(presence_penalty=2.0),
    ]
    choices = [TokenChoice(sampling=rule, draw=0.0, generated=(3,)) for rule in rules]
    assert choose(LOGITS.repeat(4, 1), choices).tolist() == [3, 3, 0, 2]
