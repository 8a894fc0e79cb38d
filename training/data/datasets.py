"""Indexed files, or made-up ones, to training samples, through megatron.core's own builder.

Everything a user can get wrong is checked here, on every rank and with the same result, before
the builder runs: its own checks are assertions, and for a split without documents it computes
the number of epochs for ever. The builder makes the sample indices on rank 0 and lets the other
ranks read them after a barrier.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megascan.errors import ConfigError, OutputError
from training.data.indexed import IndexSummary, read_index
from training.data.settings import SPLIT_NAMES, DataSettings, parse_blend, split_bounds
from training.data.tokenizers import Tokenizer


class TokenDataset(Protocol):
    """Samples by number: tokens, labels, loss_mask, position_ids (seq_length,), attention_mask."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]: ...


class Datasets(NamedTuple):
    """One dataset a split; None where no samples are asked of it."""

    train: TokenDataset | None
    valid: TokenDataset | None
    test: TokenDataset | None


def build_datasets(
    settings: DataSettings,
    tokenizer: Tokenizer,
    *,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> Datasets:
    """Build training, validation and test datasets; call it on every rank.

    Ranks where ``is_built_on_rank`` is false get None (rank 0 must build). Raises UsageError,
    ConfigError or InputError, on all ranks alike, when flags and data do not fit together, and
    OutputError when the index cache cannot be written on rank 0, or not be read on another.
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
    """megatron.core's settings and a checksum of the data."""

    data_key: str = field(default="")


class _CachedGPTDataset(GPTDataset):  # type: ignore[misc]  # megatron.core has no types
    """A GPTDataset whose cached indices belong to the data, not only to its path.

    megatron.core keys them by path and settings: after writing other data to the same path it
    would cut samples at the old documents' places, or read past the end.
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
    # Building a split without documents never ends, even when no samples are asked of it.
    config.split_matrix = [
        bounds if num_samples else None
        for bounds, num_samples in zip(config.split_matrix, settings.num_samples, strict=True)
    ]
    return config


def _cache_path(settings: DataSettings, indices: Sequence[IndexSummary]) -> str | None:
    """Folder of the sample indices; None where megatron.core keeps none or chooses its own."""
    if settings.mock_data:
        return None
    if len(indices) > 1 and not torch.distributed.is_initialized():
        return None  # the blend's cache asks for a rank
    if settings.data_cache_path is None:
        return str(Path(indices[0].prefix) / "cache" / "GPTDataset_indices")
    return settings.data_cache_path


def _check_splits(settings: DataSettings, index: IndexSummary) -> None:
    """Every split that samples are asked of must have tokens."""
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
    """Data of another tokenizer would look past the end of the embedding, far into training."""
    largest = index.largest_id()
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"{index.prefix} has the id {largest}, but the tokenizer has {tokenizer.vocab_size}: "
            "pass the tokenizer that the data was preprocessed with"
        )


def _check_sizes(settings: DataSettings, datasets: Datasets) -> None:
    """A blend without weights is one epoch, however many samples are asked."""
    for name, dataset, num_samples in zip(SPLIT_NAMES, datasets, settings.num_samples, strict=True):
        if dataset is not None and len(dataset) < num_samples:
            raise ConfigError(
                f"the {name} data has {len(dataset)} samples and {num_samples} are asked: a blend "
                "without weights is read once, so give weights (--data-path 1 A 1 B)"
            )
