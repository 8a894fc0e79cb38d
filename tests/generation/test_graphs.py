"""Which steps are replayed, on what memory, and how many recordings are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from training.generation.engine import ReplayedSteps, round_up
from training.generation.request import Limits, Request, Sampling
from training.generation.scheduler import Row, RowTokens, Step, StepTokens, Target

LIMITS = Limits(num_rows=5, max_length=1000, max_prompt_tokens=16)


class CountingStage:
    """In place of a model: the logits of a row are its numbers, as the layers would see them."""

    device = "cpu"
    dtype = torch.float32
    is_watched = False

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        """Of the last step, by row: which places it sees, 0 or -inf."""

    def run(self, layout: StepTokens, wanted: torch.Tensor | None) -> torch.Tensor:
        assert wanted is None
        assert layout.decoding is not None
        assert layout.decoding.visible is not None
        assert layout.decoding.slots == slice(0, layout.decoding.num_rows)
        self.seen = layout.decoding.visible[:, 0, 0].tolist()
        return torch.stack((layout.tokens[0], layout.positions[0], layout.places), dim=1)


class Listed:
    """Keeps what is recorded, and computes again."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_recorded += 1
        return compute


def share_of(slot: int, end: int, num_tokens: int = 1) -> RowTokens:
    return RowTokens(slot=slot, start=end - num_tokens, tokens=(70 + slot,) * num_tokens)


def step_of(*shares: RowTokens, num_targets: int | None = None) -> Step:
    request = Request(identifier=1, prompt=(1,), max_tokens=3, sampling=Sampling())
    row = Row(request=request, tokens=[1, 2], random=np.random.default_rng(0))
    target = Target(row=row, index=0, given=None, choice=None)
    count = len(shares) if num_targets is None else num_targets
    return Step(shares=shares, targets=(target,) * count, num_logprobs=None, num_prompt_tokens=0)


def replay_of(stage: Any, recorder: Listed | None = None) -> ReplayedSteps:
    return ReplayedSteps(stage, LIMITS, recorder or Listed())


@pytest.mark.parametrize(
    ("count", "rounded"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (9, 12), (13, 16), (300, 384),
     (385, 512), (512, 512)],
)  # fmt: skip
def test_sizes_are_rounded_up_by_half_at_most(count: int, rounded: int) -> None:
    assert round_up(count) == rounded


def test_rows_get_their_own_numbers_and_what_fills_up_harms_nobody() -> None:
    stage = CountingStage()
    replay = replay_of(stage)
    logits = replay.run([share_of(0, 3), share_of(1, 130)])
    assert logits.tolist() == [[70, 2, 2], [71, 129, 1129]]
    five = [share_of(slot, 7) for slot in range(5)]
    assert replay.run(five[:4]).tolist() == [[70 + slot, 6, 1000 * slot + 6] for slot in range(4)]
    # One row more than a recording has: six are wanted, the limit is five.
    assert len(replay.run(five)) == 5
    assert len(stage.seen) == 5
    numbers = replay._fill([share_of(0, 3)], 3).tolist()
    assert numbers == [[70, 0, 0], [2, 0, 0], [2, 1999, 2999], [3, 1, 1]]


def test_each_row_sees_the_places_before_its_end() -> None:
    stage = CountingStage()
    replay_of(stage).run([share_of(0, 3), share_of(1, 130)])
    hidden = float("-inf")
    assert stage.seen == [[0.0] * 3 + [hidden] * 189, [0.0] * 130 + [hidden] * 62]
    replay_of(stage).run([share_of(0, 900)])
    assert stage.seen == [[0.0] * 900 + [hidden] * 100]  # no more places than the cache has


def test_only_steps_of_one_token_a_row_are_taken_and_only_unwatched() -> None:
    stage = CountingStage()
    replay = replay_of(stage)
    assert replay.takes(step_of(share_of(0, 5), share_of(1, 9)))
    assert not replay.takes(step_of(share_of(0, 5), share_of(1, 9, num_tokens=2)))
    assert not replay.takes(step_of(share_of(0, 5), share_of(2, 9)))  # a slot is left out
    assert not replay.takes(step_of(share_of(0, 5), share_of(1, 9), num_targets=1))
    stage.is_watched = True
    assert not replay.takes(step_of(share_of(0, 5)))


def test_one_recording_a_size_and_the_least_used_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.generation.engine._MOST_RECORDINGS", 2)
    recorder = Listed()
    replay = replay_of(CountingStage(), recorder)
    short, long, longer = ([share_of(0, end)] for end in (5, 200, 700))
    for shares in (short, long, short, long):
        replay.run(shares)
    assert recorder.num_recorded == 2
    replay.run(short)
    replay.run(longer)  # takes the place of `long`
    replay.run(short)
    assert recorder.num_recorded == 3
    replay.run(long)
    assert recorder.num_recorded == 4
    assert replay.num_recorded == 2
    replay.forget()
    assert replay.num_recorded == 0
