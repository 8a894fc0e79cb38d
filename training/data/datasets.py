"""Turn indexed files, or made-up data, into samples, and samples into each rank's microbatches.

Samples come from megatron.core's builder. Everything a user can get wrong is checked here, on every
rank and with the same result, before the builder runs. The builder's own checks are assertions, and
for a split without documents it computes the number of epochs for ever. The builder makes the
sample indices on rank 0; the other ranks read them after a barrier.

Samplers deal samples to the data-parallel ranks in order, from any sample on. `StreamBuilder` makes
the streams of microbatches that the model chunks of this rank read.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch.utils.data import DataLoader, Dataset

from megascan.errors import ConfigError, OutputError
from training.arguments import Settings, Sizes
from training.callback import Callback
from training.data.blend import SPLIT_NAMES, DataSettings, data_settings, parse_blend, split_bounds
from training.data.indexed import IndexSummary, read_index
from training.data.tokenizers import Tokenizer
from training.loop import Data, Streams
from training.pipeline.rebalance import Deal, HillOrder
from training.step import BatchShape, Microbatch, MicrobatchStream


class TokenDataset(Protocol):
    """Samples by number: tokens, labels, loss_mask, position_ids (seq_length,), attention_mask."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class Datasets(NamedTuple):
    """One dataset for each split; None for a split without samples."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


def build_datasets(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> Datasets:
    """Build training, validation and test datasets; call this on every rank.

    Ranks where ``is_built_on_rank`` is false get None (rank 0 must build). Raises UsageError,
    ConfigError or InputError, the same on all ranks, when flags and data do not fit together, and
    OutputError when the index cache cannot be written on rank 0 or read on another rank.
    """
    weights, prefixes = parse_blend(settings.data_path) if settings.data_path else (None, [])
    indices = [read_index(prefix) for prefix in prefixes]
    for index in indices:
        _check_splits(settings, index)
        _check_vocabulary(tokenizer, index)
    config = _configuration(settings, tokenizer, weights, indices)
    kind = MockGPTDataset if settings.mock_data else _CachedGPTDataset
    try:
        built = BlendedMegatronDatasetBuilder(
            kind, list(settings.num_samples), is_built_on_rank, config
        ).build()
    except Exception as error:
        # The builder wraps what the operating system said into a bare Exception.
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise OutputError(
            f"cannot write or read the sample indices ({cause}): pass a folder that every rank "
            "can reach as --data-cache-path"
        ) from error
    datasets = Datasets(*built)
    _check_sizes(settings, datasets)
    return datasets


@dataclass
class _CachedConfig(GPTDatasetConfig):  # type: ignore[misc]  # megatron.core has no types
    """Settings of megatron.core's datasets, with a checksum of the data."""

    data_key: str = field(default="")


class _CachedGPTDataset(GPTDataset):  # type: ignore[misc]  # megatron.core has no types
    """A GPTDataset whose cached indices belong to the data, not only to its path.

    megatron.core caches indices by path and settings: after other data was written to the same
    path, it would cut samples at the old documents' places, or read past the end.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "data_key"]


def _configuration(
    settings: DataSettings,
    tokenizer: Tokenizer,
    weights: list[float] | None,
    indices: Sequence[IndexSummary],
) -> _CachedConfig:
    checksum = 0
    for index in indices:
        checksum = zlib.crc32(index.fingerprint().to_bytes(4, "little"), checksum)
    config = _CachedConfig(
        random_seed=settings.seed,
        sequence_length=settings.seq_length,
        blend=([index.prefix for index in indices], weights) if indices else None,
        split=settings.split if indices else None,
        path_to_cache=_cache_path(settings, indices),
        tokenizer=tokenizer,
        reset_position_ids=settings.reset_position_ids,
        reset_attention_mask=settings.reset_attention_mask,
        eod_mask_loss=settings.eod_mask_loss,
        create_attention_mask=settings.create_attention_mask,
        data_key=f"{checksum:08x}",
    )
    # Building a split without documents never ends, even when no samples of it are wanted.
    config.split_matrix = [
        bounds if num_samples else None
        for bounds, num_samples in zip(config.split_matrix, settings.num_samples, strict=True)
    ]
    return config


def _cache_path(settings: DataSettings, indices: Sequence[IndexSummary]) -> str | None:
    """Return the folder of the sample indices; None for made-up data, and for a blend outside of a
    job.
    """
    if settings.mock_data:
        return None
    if len(indices) > 1 and not torch.distributed.is_initialized():
        return None  # a blend's cache needs a rank
    if settings.data_cache_path is None:
        return str(Path(indices[0].prefix) / "cache" / "GPTDataset_indices")
    return settings.data_cache_path


def _check_splits(settings: DataSettings, index: IndexSummary) -> None:
    """Check that every split of which samples are wanted has tokens."""
    bounds = split_bounds(settings.split, index.num_documents)
    for name, (begin, end), num_samples in zip(
        SPLIT_NAMES, bounds, settings.num_samples, strict=True
    ):
        if num_samples and not index.lengths[begin:end].any():
            raise ConfigError(
                f"--split {settings.split} gives {name} none of the {index.num_documents} "
                f"documents of {index.prefix}, but {num_samples} samples are asked of it: "
                "choose another --split, add documents, or ask for no samples (--eval-iters 0 for "
                "validation and test)"
            )


def _check_vocabulary(tokenizer: Tokenizer, index: IndexSummary) -> None:
    """Raise ConfigError for data with ids that the tokenizer does not have."""
    largest = index.largest_id()
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"{index.prefix} has the id {largest}, but the tokenizer has {tokenizer.vocab_size}: "
            "pass the tokenizer that the data was preprocessed with"
        )


def _check_sizes(settings: DataSettings, datasets: Datasets) -> None:
    """Check that there are as many samples as wanted: a blend without weights has one epoch."""
    for name, dataset, num_samples in zip(SPLIT_NAMES, datasets, settings.num_samples, strict=True):
        if dataset is not None and len(dataset) < num_samples:
            raise ConfigError(
                f"the {name} data has {len(dataset)} samples and {num_samples} are asked: a blend "
                "without weights is read once, so give weights (--data-path 1 A 1 B)"
            )


class SequentialSampler:
    """Yields the sample numbers of each microbatch of one data-parallel rank.

    The samples from ``consumed_samples`` on are cut into groups of ``micro_batch_size × dp_size``;
    of each group rank r gets the r-th part. The order depends on nothing else, so a run that
    is resumed with the same sizes sees exactly what the uninterrupted run would have seen.

    Example: 8 samples, microbatch 2, 2 ranks, none consumed: rank 0 gets [0, 1] and [4, 5],
    rank 1 gets [2, 3] and [6, 7].

    An incomplete last group is dropped. With ``drop_last=False`` it is dealt out as a smaller
    microbatch of the same size for each rank, and only the rest, fewer than ``dp_size`` samples, is
    dropped: all ranks must run the same number of microbatches.
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


class DealtSampler:
    """Yields the sample numbers of each microbatch of a replica, for replicas of unequal shares.

    `positions` are the numbers of the replica's microbatches within a step of `step_microbatches`.
    From ``consumed_samples`` on, each step takes as many samples as its microbatches hold.

    Example: 8 samples, microbatch 1, steps of 4, positions 0, 2, 3: [0], [2], [3], [4], [6], [7].
    """

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        positions: Sequence[int],
        step_microbatches: int,
        consumed_samples: int,
    ) -> None:
        self._step_size = step_microbatches * micro_batch_size
        self._begins = range(consumed_samples, num_samples - self._step_size + 1, self._step_size)
        self._positions = tuple(positions)
        self._micro_batch_size = micro_batch_size

    def __len__(self) -> int:
        return len(self._begins) * len(self._positions)

    def __iter__(self) -> Iterator[list[int]]:
        size = self._micro_batch_size
        for begin in self._begins:
            for position in self._positions:
                first = begin + position * size
                yield list(range(first, first + size))


def build_dealt_iterator(
    dataset: TokenDataset, sampler: DealtSampler, *, num_workers: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Return an iterator over the microbatches that `sampler` names, as `build_data_iterator`."""
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
        _as_torch_dataset(dataset), batch_sampler=sampler, num_workers=num_workers
    )
    return iter(loader)


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
    """Return an iterator over the microbatches of one data-parallel rank.

    A microbatch is a dict of tensors on the CPU with the leading shape (micro_batch_size,):
    tokens, labels, loss_mask, position_ids (…, seq_length) and, unless it is left to the kernel,
    attention_mask (…, 1, seq_length, seq_length). The first follows ``consumed_samples``, counted
    over all ranks. ``num_workers`` processes read ahead. Raises ConfigError for numbers that do not
    fit.
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
    """Return `dataset` under torch's type: megatron.core's datasets are torch datasets."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"{type(dataset).__name__} is not a torch dataset")
    return dataset


class StreamBuilder:
    """Builds datasets once, and streams of microbatches from any sample on.

    Only chunks that hold the first or the last layers need data, and only the first rank of each
    tensor-parallel group loads data.
    """

    def __init__(
        self,
        settings: Settings,
        sizes: Sizes,
        tokenizer: Tokenizer,
        namespace: argparse.Namespace,
        device: str,
    ) -> None:
        self._sizes = sizes
        self._num_workers: int = namespace.num_workers
        self._loads = parallel_state.get_tensor_model_parallel_rank() == 0
        self._shape = BatchShape(
            num_samples=sizes.micro_batch_size,
            seq_length=sizes.seq_length,
            has_attention_mask=namespace.create_attention_mask_in_dataloader,
            device=device,
        )
        self._num_samples = _num_samples(settings, sizes)
        ordered = settings.pipeline.order_microbatches is not None
        self._order = HillOrder(_length, _say_on_first_rank) if ordered else None
        self._datasets: Datasets = build_datasets(
            data_settings(
                namespace,
                seq_length=sizes.seq_length,
                seed=settings.batch.seed,
                num_samples=self._num_samples,
            ),
            tokenizer,
            is_built_on_rank=lambda: self._loads and any(_chunks_with_data(sizes)),
        )

    def describe(self) -> str:
        """Return a text: how many samples the run draws of each split, and how many there are."""
        parts = [
            f"{name} {num_samples} of {len(dataset)} samples"
            for name, dataset, num_samples in zip(
                SPLIT_NAMES, self._datasets, self._num_samples, strict=True
            )
            if dataset is not None and num_samples
        ]
        return ", ".join(parts) or "none on this rank"

    def data(self, callback: Callback) -> Data:
        """Return what makes streams that begin after the samples that were consumed."""
        return Data(
            training=lambda consumed, deal: self._streams(
                self._datasets.train, consumed, callback, self._order, deal
            ),
            # Loading for an evaluation is not loading of the training: it gets no callback.
            validation=lambda consumed: self._streams(
                self._datasets.valid, consumed, Callback(), order=None
            ),
        )

    def _streams(
        self,
        dataset: TokenDataset | None,
        consumed_samples: int,
        callback: Callback,
        order: HillOrder[dict[str, torch.Tensor]] | None,
        deal: Deal | None = None,
    ) -> Streams:
        return [
            self._stream(dataset, consumed_samples, callback, order, deal) if needed else None
            for needed in _chunks_with_data(self._sizes)
        ]

    def _stream(
        self,
        dataset: TokenDataset | None,
        consumed_samples: int,
        callback: Callback,
        order: HillOrder[dict[str, torch.Tensor]] | None,
        deal: Deal | None,
    ) -> Iterator[Microbatch]:
        samples = None
        if dataset is not None and self._loads:
            # A loader draws a seed for its workers, which must not move the training's generators.
            with torch.random.fork_rng(devices=[]):
                samples = self._samples(dataset, consumed_samples, deal)
                if order is not None:
                    samples = order.steps(samples, self._num_microbatches(deal))
        group = parallel_state.get_tensor_model_parallel_group()
        return MicrobatchStream(samples, self._shape, group, callback)

    def _num_microbatches(self, deal: Deal | None) -> int:
        """Return how many microbatches of a step this replica runs."""
        if deal is None:
            return self._sizes.num_microbatches
        replica: int = parallel_state.get_data_parallel_rank()
        return deal.shares[replica]

    def _samples(
        self, dataset: TokenDataset, consumed_samples: int, deal: Deal | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        replica = parallel_state.get_data_parallel_rank()
        if deal is None or deal.is_even:
            return build_data_iterator(
                dataset,
                micro_batch_size=self._sizes.micro_batch_size,
                dp_rank=replica,
                dp_size=self._sizes.data_size,
                consumed_samples=consumed_samples,
                num_workers=self._num_workers,
            )
        sampler = DealtSampler(
            num_samples=len(dataset),
            micro_batch_size=self._sizes.micro_batch_size,
            positions=deal.positions(replica),
            step_microbatches=sum(deal.shares),
            consumed_samples=consumed_samples,
        )
        return build_dealt_iterator(dataset, sampler, num_workers=self._num_workers)


def _length(batch: dict[str, torch.Tensor]) -> int:
    """Return the length in tokens of a microbatch's longest sample, without padding.

    A sample ends at the last token whose label counts.
    """
    counts: list[bool] = batch["loss_mask"].bool().any(dim=0).tolist()
    return max((place for place, counting in enumerate(counts, start=1) if counting), default=0)


def _say_on_first_rank(sentence: str) -> None:
    if dist.get_rank() == 0:
        print(f"note: {sentence}", file=sys.stderr, flush=True)


def _num_samples(settings: Settings, sizes: Sizes) -> tuple[int, int, int]:
    """Return the samples that training, validation and test draw in the whole run."""
    batch = settings.batch
    evaluations = sizes.train_iters // batch.eval_interval
    validation = evaluations * batch.eval_iters * sizes.global_batch_size
    return sizes.train_iters * sizes.global_batch_size, validation, 0


def _chunks_with_data(sizes: Sizes) -> list[bool]:
    """Return, by chunk of this rank, whether it holds the first or the last layers of the model."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    final_chunk = sizes.model_chunks - 1
    return [
        bool((first and chunk == 0) or (last and chunk == final_chunk))
        for chunk in range(sizes.model_chunks)
    ]
