"""Samples to microbatches: in order, dealt to the data-parallel ranks, from any point on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from megascan.errors import ConfigError
from training.data.datasets import TokenDataset


class SequentialSampler:
    """Numbers of the samples of one data-parallel rank's microbatches.

    The samples ``consumed_samples, …`` are cut into groups of ``micro_batch_size × dp_size``;
    of each group rank r gets the r-th part. The order depends on nothing else, so a run that
    is resumed with the same sizes sees exactly what the uninterrupted run would have seen.

    Example: 8 samples, microbatch 2, 2 ranks, none consumed: rank 0 gets [0, 1] and [4, 5],
    rank 1 gets [2, 3] and [6, 7].

    What remains at the end is dropped; with ``drop_last=False`` it is dealt out as evenly
    sized smaller microbatches, and only the less than ``dp_size`` samples beyond are dropped,
    because all ranks must run the same number of microbatches.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        drop_last: bool = True,
    ) -> None:
        if micro_batch_size < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
            raise ConfigError(
                f"expected a microbatch of at least 1 and a rank below the data-parallel size, "
                f"got microbatch {micro_batch_size}, rank {dp_rank} of {dp_size}"
            )
        if not 0 <= consumed_samples <= num_samples:
            raise ConfigError(
                f"{consumed_samples} samples are consumed already, but the data has {num_samples}: "
                "resume with the data and --train-iters that the checkpoint was trained with"
            )
        self._range = range(consumed_samples, num_samples)
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._drop_last = drop_last

    def __len__(self) -> int:
        num_full, num_left = divmod(len(self._range), self._micro_batch_size * self._dp_size)
        return num_full + (not self._drop_last and num_left >= self._dp_size)

    def __iter__(self) -> Iterator[list[int]]:
        group_size = self._micro_batch_size * self._dp_size
        for begin in range(0, len(self) * group_size, group_size):
            group = self._range[begin : begin + group_size]
            share = len(group) // self._dp_size
            yield list(group[self._dp_rank * share : (self._dp_rank + 1) * share])


def build_data_iterator(
    dataset: TokenDataset,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    consumed_samples: int = 0,
    num_workers: int = 0,
    drop_last: bool = True,
) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of one data-parallel rank, starting after ``consumed_samples``.

    Each is a dict of tensors on the CPU with the leading shape (micro_batch_size,):
    tokens, labels, loss_mask, position_ids (…, seq_length) and, unless it is left to the kernel,
    attention_mask (…, 1, seq_length, seq_length). ``consumed_samples`` counts over all ranks.
    With ``num_workers`` that many processes read ahead. Raises ConfigError.
    """
    if num_workers < 0:
        raise ConfigError(f"--num-workers is {num_workers}, expected at least 0")
    sampler = SequentialSampler(
        num_samples=len(dataset),
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        consumed_samples=consumed_samples,
        drop_last=drop_last,
    )
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
        _as_torch_dataset(dataset),
        batch_sampler=sampler,
        num_workers=num_workers,
    )
    return iter(loader)


def _as_torch_dataset(dataset: TokenDataset) -> Dataset[dict[str, torch.Tensor]]:
    """The same object under torch's type; megatron.core's datasets are torch datasets."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{type(dataset).__name__} is not a torch dataset")
    return dataset
