"""Forward and backward passes of one iteration, through Megatron-Core's schedules.

Microbatches are loaded on one rank of each tensor-parallel group and broadcast to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from training.arguments import Settings, Sizes
from training.callback import Callback

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.timers import Timers

_T = TypeVar("_T")
_PARTS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Input and target of one forward pass; tensors are ``(sample, position)``.

    `tokens`, `labels`, `position_ids` are int64; `loss_mask` is float32, 1 where a label counts.
    `attention_mask`, ``(sample, 1, position, position)``, is true where attention is forbidden;
    without it attention is causal.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of a microbatch, whether it has an attention mask, and its device."""

    num_samples: int
    seq_length: int
    has_attention_mask: bool
    device: str


class MicrobatchStream(Iterator[Microbatch]):
    """Iterates over the microbatches of this rank.

    `samples` is the data loader on the first rank of each tensor-parallel group, and None on the
    others, which receive what the first rank has loaded, as in Megatron-LM.
    """

    def __init__(
        self,
        samples: Iterator[Mapping[str, torch.Tensor]] | None,
        shape: BatchShape,
        group: dist.ProcessGroup,
        callback: Callback,
    ) -> None:
        self._samples = samples
        self._shape = shape
        self._group = group
        self._callback = callback

    def __next__(self) -> Microbatch:
        """Load or receive the next microbatch."""
        if self._samples is None:
            packed, mask = self._room()
        else:
            with self._callback.loading():
                packed, mask = self._load(self._samples)
        self._broadcast(packed)
        self._broadcast(mask)
        parts: dict[str, torch.Tensor | None] = dict(zip(_PARTS, packed.unbind(), strict=True))
        parts["loss_mask"] = packed[_PARTS.index("loss_mask")].float()
        parts["attention_mask"] = mask.bool() if self._shape.has_attention_mask else None
        # Each rank of a context-parallel group keeps its two pieces of the sequence.
        return Microbatch(**get_batch_on_this_cp_rank(parts))

    def _load(
        self, samples: Iterator[Mapping[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Load a microbatch as two tensors to broadcast: integers and mask.

        The integers are ``(part, sample, position)``.
        """
        loaded = next(samples)
        packed = torch.stack([loaded[part].to(torch.int64) for part in _PARTS])
        mask = self._empty_mask("cpu")
        if self._shape.has_attention_mask:
            mask = loaded["attention_mask"].to(torch.uint8)
        return self._moved(packed), self._moved(mask)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, copied from pinned memory.

        A copy from other memory would wait for all work that the device has queued.
        """
        if self._shape.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self._shape.device, non_blocking=True)

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return empty tensors to receive integers and mask into."""
        shape, device = self._shape, self._shape.device
        size = (len(_PARTS), shape.num_samples, shape.seq_length)
        return torch.empty(size, dtype=torch.int64, device=device), self._empty_mask(device)

    def _empty_mask(self, device: str) -> torch.Tensor:
        shape = self._shape
        num_samples = shape.num_samples if shape.has_attention_mask else 0
        size = (num_samples, 1, shape.seq_length, shape.seq_length)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if tensor.numel() and dist.get_world_size(self._group) > 1:
            dist.broadcast(tensor, dist.get_global_rank(self._group, 0), group=self._group)


LossParts = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
ForwardBackward = Callable[..., list[dict[str, torch.Tensor]]]
LOSS_NAME = "lm loss"


def connect(
    settings: Settings, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Tell the schedule how gradients are scaled, synchronized and finished."""
    config = get_model_config(chunks[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    parallel = settings.parallel
    if parallel.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if parallel.overlap_param_gather and len(chunks) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]


def build_timers(
    settings: Settings, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> Timers | None:
    """Make Megatron-Core's timers and put them where its schedules look; None at level 0."""
    from megatron.core.timers import Timers

    if settings.log.timing_log_level == 0:
        return None
    timers = Timers(settings.log.timing_log_level, "minmax")
    optimizer.config.timers = timers
    for chunk in chunks:
        get_model_config(chunk).timers = timers
    return timers


def _one_or_all(by_chunk: list[_T]) -> _T | list[_T]:
    """Return what Megatron-Core's schedules take: a list only where there are several chunks."""
    return by_chunk[0] if len(by_chunk) == 1 else by_chunk


def run_schedule(
    sizes: Sizes,
    chunks: list[DistributedDataParallel],
    streams: list[Iterator[Microbatch] | None],
    *,
    num_microbatches: int,
    forward_backward: ForwardBackward,
) -> torch.Tensor | None:
    """Run all microbatches of one iteration by the schedule `forward_backward`.

    Return the loss averaged over the tokens of all microbatches and data-parallel ranks, as a
    scalar tensor on the device; None on ranks that are not in the last pipeline stage.
    """
    reports = forward_backward(
        forward_step_func=_forward_step,
        data_iterator=_one_or_all(streams),
        model=_one_or_all(chunks),
        num_microbatches=num_microbatches,
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return _average(reports)


def _average(reports: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the sum of losses over the number of tokens, for all microbatches and replicas."""
    total = torch.stack([report[LOSS_NAME] for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1]


def _forward_step(
    stream: Iterator[Microbatch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossParts]]:
    """Run one microbatch through one chunk; chunks in the middle of the pipeline need no data."""
    if stream is None:
        return model(None, None, None), _no_loss
    batch = next(stream)
    output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output, partial(_loss, batch.loss_mask)


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> LossParts:
    """Return the sum of the losses that count, the number of them, and a report with both.

    The schedule divides the sum by the number of losses and by the number of microbatches, as in
    Megatron-LM.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach()
    report = torch.stack([loss.detach(), num_tokens])
    return loss, num_tokens.to(torch.int), {LOSS_NAME: report}


def _no_loss(output: torch.Tensor) -> LossParts:
    raise AssertionError(f"asked for the loss of a middle stage, of shape {tuple(output.shape)}")
