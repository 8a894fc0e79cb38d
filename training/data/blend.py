"""What data to train on: the flags, a blend's parts, a split's bounds. Needs no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megascan.errors import ConfigError, UsageError

SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What to train on. Field names are Megatron-LM's flags.

    ``data_path`` is one prefix, or weights and prefixes in turn. ``num_samples`` is how many
    samples (sequences) training, validation and test draw.
    """

    data_path: tuple[str, ...] = ()
    mock_data: bool = False
    split: str = "969,30,1"
    seq_length: int
    seed: int = 1234
    num_samples: tuple[int, int, int]
    data_cache_path: str | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = True

    def __post_init__(self) -> None:
        if self.mock_data and self.data_path:
            raise UsageError("--data-path and --mock-data exclude each other: leave one out")
        if not self.mock_data and not self.data_path:
            raise UsageError("no data: pass --data-path PREFIX, or --mock-data")
        if self.reset_attention_mask and not self.create_attention_mask:
            raise UsageError(
                "--reset-attention-mask changes a mask that "
                "--no-create-attention-mask-in-dataloader leaves out: drop one of them"
            )
        if self.seq_length < 1 or min(self.num_samples) < 0:
            raise ConfigError(
                f"expected a sequence length of at least 1 and sample counts of at least 0, got "
                f"{self.seq_length} and {self.num_samples}"
            )
        split_shares(self.split)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare Megatron-LM's data flags, with its names and defaults, on a parser."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        metavar="PREFIX",
        help="one .bin/.idx pair without its ending, or a blend: WEIGHT PREFIX WEIGHT PREFIX …",
    )
    group.add_argument("--mock-data", action="store_true", help="made-up sequences, no files")
    group.add_argument(
        "--split",
        default="969,30,1",
        metavar="T,V,T",
        help="shares of training, validation and test documents, default 969,30,1",
    )
    group.add_argument(
        "--data-cache-path",
        metavar="DIR",
        help="folder for sample indices that every rank can read, default: beside the data",
    )
    group.add_argument(
        "--num-workers", type=int, default=2, metavar="N", help="loader processes a rank, default 2"
    )
    group.add_argument(
        "--reset-position-ids", action="store_true", help="count positions anew after each document"
    )
    group.add_argument(
        "--reset-attention-mask", action="store_true", help="no attention across document ends"
    )
    group.add_argument(
        "--eod-mask-loss", action="store_true", help="no loss for the end-of-document id"
    )
    group.add_argument(
        "--no-create-attention-mask-in-dataloader",
        dest="create_attention_mask_in_dataloader",
        action="store_false",
        help="leave the mask to the attention kernel",
    )


def data_settings(
    arguments: argparse.Namespace, *, seq_length: int, seed: int, num_samples: tuple[int, int, int]
) -> DataSettings:
    """Return the data settings from the flags that `add_data_arguments` declares."""
    return DataSettings(
        data_path=tuple(arguments.data_path),
        mock_data=arguments.mock_data,
        split=arguments.split,
        seq_length=seq_length,
        seed=seed,
        num_samples=num_samples,
        data_cache_path=arguments.data_cache_path,
        reset_position_ids=arguments.reset_position_ids,
        reset_attention_mask=arguments.reset_attention_mask,
        eod_mask_loss=arguments.eod_mask_loss,
        create_attention_mask=arguments.create_attention_mask_in_dataloader,
    )


def parse_blend(data_path: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Return weights and prefixes of --data-path; weights are None when only prefixes are given.

    ``["30", "a", "70", "b"]`` gives ``[30, 70]`` and ``["a", "b"]``. Raises UsageError.
    """
    weights = [_number(word) for word in data_path[::2]]
    if len(data_path) == 1 or all(weight is None for weight in map(_number, data_path)):
        return None, list(data_path)
    if len(data_path) % 2 or not all(weight is not None and weight > 0 for weight in weights):
        raise UsageError(
            f"--data-path {' '.join(data_path)}: expected one prefix, or positive weights and "
            "prefixes in turn"
        )
    return [weight for weight in weights if weight is not None], list(data_path[1::2])


def split_shares(split: str) -> tuple[float, float, float]:
    """Return the shares of training, validation and test, with sum 1; UsageError for no shares."""
    numbers = [_number(word) for word in split.split(",")]
    shares = [number for number in numbers if number is not None and number >= 0]
    if len(shares) != len(numbers) or len(shares) > len(SPLIT_NAMES) or sum(shares) <= 0:
        raise UsageError(f"--split is {split!r}, expected up to three shares as in 949,50,1")
    train, valid, test = (*shares, 0.0, 0.0)[: len(SPLIT_NAMES)]
    return train / sum(shares), valid / sum(shares), test / sum(shares)


def split_bounds(split: str, num_documents: int) -> list[tuple[int, int]]:
    """Return (first, past the last) document of each split, rounded as megatron.core does."""
    bounds = []
    begin = 0.0
    for share in split_shares(split):
        bounds.append((round(begin * num_documents), round((begin + share) * num_documents)))
        begin += share
    return bounds


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
