"""Rows that end free their slots, and only rows that go on are moved."""

from __future__ import annotations

import pytest

from training.generation.request import Request, Sampling, TokenScore
from training.generation.scheduler import Scheduler


def run_step(scheduler: Scheduler) -> list[int]:
    """Compute one step, each token being 1; gives the requests that have ended."""
    step = scheduler.plan()
    scores = [TokenScore(token=1, logprob=None) for _ in step.targets]
    answers = scheduler.record(step, scores)
    return [one.identifier for one in answers if one.finish_reason is not None]


@pytest.mark.parametrize(
    ("lengths", "moved", "left"),
    [
        ((1, 1, 1, 1), [], []),
        ((1, 2, 1, 2), [(3, 0)], [3, 1]),
        ((2, 2, 1, 1), [], [0, 1]),
        ((1, 1, 1, 2), [(3, 0)], [3]),
    ],
)
def test_only_rows_that_go_on_are_moved_and_each_once(
    lengths: tuple[int, ...], moved: list[tuple[int, int]], left: list[int]
) -> None:
    moves = []
    scheduler = Scheduler(
        num_slots=4,
        max_prompt_tokens=100,
        move=lambda source, target, length: moves.append((source, target)),
    )
    for row, length in enumerate(lengths):
        scheduler.add(
            Request(identifier=row, prompt=(5, 6), max_tokens=length, sampling=Sampling())
        )
    ended = run_step(scheduler)
    assert ended == [row for row, length in enumerate(lengths) if length == 1]
    assert [row.request.identifier for row in scheduler.rows] == left
    assert moves == moved
