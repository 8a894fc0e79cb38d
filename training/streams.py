"""Streams of microbatches for the model chunks of this rank."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from training.arguments import Settings, Sizes
from training.callback import Callback
from training.data.blend import SPLIT_NAMES, data_settings
from training.data.datasets import (
    Datasets,
    DealtSampler,
    TokenDataset,
    build_data_iterator,
    build_datasets,
    build_dealt_iterator,
)
from training.data.tokenizers import Tokenizer
from training.loop import Data, Streams
from training.pipeline.rebalance import Deal, HillOrder
from training.step import BatchShape, Microbatch, MicrobatchStream


class StreamBuilder:
    """Builds datasets once and streams from any sample on.

    Only chunks that hold the first or the last layers need data, and only the first rank of each
    tensor-parallel group loads it.
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
            is_built_on_rank=lambda: self._loads and _has_data_stage(),
        )

    def describe(self) -> str:
        """Say how many samples the run draws of each split, and how many there are."""
        parts = [
            f"{name} {num_samples} of {len(dataset)} samples"
            for name, dataset, num_samples in zip(
                SPLIT_NAMES, self._datasets, self._num_samples, strict=True
            )
            if dataset is not None and num_samples
        ]
        return ", ".join(parts) or "none on this rank"

    def data(self, callback: Callback) -> Data:
        """Make streams that go on after the samples that were consumed."""
        return Data(
            training=lambda consumed, deal: self._streams(
                self._datasets.train, consumed, callback, self._order, deal
            ),
            # Evaluations are not the training's loading: they get no callback.
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
            # A loader draws a seed for its workers; training must not see that.
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
    """Return the tokens of a microbatch before padding: up to the last whose label counts.

    That of the longest sample, as all are computed together.
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


def _has_data_stage() -> bool:
    """Tell whether this rank holds the first or the last pipeline stage."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return bool(first or last)


def _chunks_with_data(sizes: Sizes) -> list[bool]:
    """Tell which chunks of this rank hold the first or the last layers of the model."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    final_chunk = sizes.model_chunks - 1
    return [
        bool((first and chunk == 0) or (last and chunk == final_chunk))
        for chunk in range(sizes.model_chunks)
    ]
