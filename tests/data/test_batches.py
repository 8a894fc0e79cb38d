"""Microbatches: every sample once over the ranks, in order, and exactly resumable."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

from megascan.errors import ConfigError
from training.data.datasets import SequentialSampler, build_data_iterator


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Sample i holds the number i, seven times."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((7,), index)}


def batches_of(
    num_samples: int, dp_size: int, consumed: int = 0, **more: int
) -> list[list[list[int]]]:
    """Sample numbers as (rank, microbatch, sample)."""
    return [
        [
            batch["tokens"][:, 0].tolist()
            for batch in build_data_iterator(
                Numbers(num_samples),
                micro_batch_size=2,
                dp_rank=dp_rank,
                dp_size=dp_size,
                consumed_samples=consumed,
                **more,
            )
        ]
        for dp_rank in range(dp_size)
    ]


def test_ranks_take_turns() -> None:
    assert batches_of(8, dp_size=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_shapes_are_microbatch_by_sequence() -> None:
    batch = next(build_data_iterator(Numbers(8), micro_batch_size=4, dp_rank=0, dp_size=2))
    assert batch["tokens"].shape == (4, 7)


@pytest.mark.parametrize("consumed", [4, 8, 12, 20])
def test_resuming_goes_on_exactly(consumed: int) -> None:
    whole, rest = batches_of(20, dp_size=2), batches_of(20, dp_size=2, consumed=consumed)
    assert rest == [rank[consumed // 4 :] for rank in whole]


def test_resuming_with_another_data_parallel_size_leaves_none_out() -> None:
    before = [
        number for rank in batches_of(16, dp_size=2) for batch in rank[:2] for number in batch
    ]
    after = [number for rank in batches_of(16, dp_size=4, consumed=8) for b in rank for number in b]
    assert sorted(before + after) == list(range(16))


def test_reading_ahead_changes_nothing() -> None:
    assert batches_of(20, dp_size=2, num_workers=2) == batches_of(20, dp_size=2)


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (11, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
        (9, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    ],
)
def test_the_rest_is_dealt_evenly_or_dropped(
    num_samples: int, expected: list[list[list[int]]]
) -> None:
    assert batches_of(num_samples, dp_size=2, drop_last=False) == expected
    assert batches_of(num_samples, dp_size=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", range(12))
def test_all_ranks_have_as_many_batches_as_they_say(num_samples: int, drop_last: bool) -> None:
    samplers = [
        SequentialSampler(
            num_samples=num_samples,
            micro_batch_size=2,
            dp_rank=dp_rank,
            dp_size=3,
            drop_last=drop_last,
        )
        for dp_rank in range(3)
    ]
    assert {len(list(sampler)) for sampler in samplers} == {len(samplers[0])}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"consumed_samples": 9}, "9 samples are consumed already, but the data has 8"),
        ({"consumed_samples": -1}, "-1 samples are consumed"),
        ({"dp_rank": 2}, "rank 2 of 2"),
        ({"micro_batch_size": 0}, "microbatch 0"),
        ({"num_workers": -1}, "--num-workers is -1"),
    ],
)
def test_sizes_that_do_not_fit(wrong: dict[str, int], message: str) -> None:
    sizes = {"micro_batch_size": 2, "dp_rank": 0, "dp_size": 2, **wrong}
    with pytest.raises(ConfigError, match=message):
        build_data_iterator(Numbers(8), **sizes)
