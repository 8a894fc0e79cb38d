"""Forward and backward pass of one iteration, through Megatron-Core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from training.arguments import Settings, Sizes
from training.microbatch import Microbatch

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.timers import Timers

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
    """Make Megatron-Core's timers, where its schedules look for them; None at level 0."""
    from megatron.core.timers import Timers

    if settings.log.timing_log_level == 0:
        return None
    timers = Timers(settings.log.timing_log_level, "minmax")
    optimizer.config.timers = timers
    for chunk in chunks:
        get_model_config(chunk).timers = timers
    return timers


def _one_or_all(calls: list[Callable[..., object]]) -> object:
    return calls[0] if len(calls) == 1 else calls


def run_schedule(
    sizes: Sizes,
    chunks: list[DistributedDataParallel],
    streams: list[Iterator[Microbatch] | None],
    *,
    num_microbatches: int,
    forward_backward: ForwardBackward,
) -> torch.Tensor | None:
    """Run all microbatches of one iteration by a schedule, `forward_backward`.

    Returns the loss averaged over the tokens of all microbatches and data-parallel ranks, as a
    scalar tensor on the device; None on ranks that are not in the last pipeline stage.
    """
    reports = forward_backward(
        forward_step_func=_forward_step,
        data_iterator=streams if len(streams) > 1 else streams[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=sizes.seq_length,
        micro_batch_size=sizes.micro_batch_size,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return _average(reports)


def _average(reports: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Return the sum of losses over the number of tokens, over microbatches and replicas."""
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
    """Return the sum of the losses that count, their number, and both again for the report.

    The schedule divides the sum by the number and by the microbatches, as in Megatron-LM.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach()
    report = torch.stack([loss.detach(), num_tokens])
    return loss, num_tokens.to(torch.int), {LOSS_NAME: report}


def _no_loss(output: torch.Tensor) -> LossParts:
    raise AssertionError(f"asked for the loss of a middle stage, of shape {tuple(output.shape)}")
