"""What a run is made of, said once at its start, in Megatron-LM's words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state

from training.arguments import Settings, Sizes
from training.model import padded_vocab_size

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, order=True)
class Share:
    """Number of parameters that the ranks of one place in the model hold, each."""

    pipeline_rank: int
    tensor_rank: int
    num_parameters: int


def print_summary(
    settings: Settings,
    sizes: Sizes,
    chunks: Iterable[torch.nn.Module],
    *,
    vocab_size: int,
    datasets: str,
    device: str,
) -> None:
    """Print layout, parameters of each model-parallel rank and sizes of the datasets on rank 0.

    Every rank calls it; `datasets` is the text of rank 0.
    """
    own = Share(
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        num_parameters=sum(weight.numel() for chunk in chunks for weight in chunk.parameters()),
    )
    shares: list[Share | None] = [None] * sizes.world_size
    dist.all_gather_object(shares, own)
    if dist.get_rank() == 0:
        padded_size = padded_vocab_size(settings, sizes, vocab_size)
        lines = [
            layout_line(sizes, device),
            f" > padded vocab (size: {vocab_size}) with {padded_size - vocab_size} dummy tokens "
            f"(new size: {padded_size})",
            *parameter_lines(share for share in shares if share is not None),
            f" > datasets: {datasets}",
        ]
        print("\n".join(lines), flush=True)


def layout_line(sizes: Sizes, device: str) -> str:
    """The parallel sizes; those that only some jobs have are left out where they are 1."""
    parts = [
        f"using world size: {sizes.world_size}",
        f"data-parallel size: {sizes.data_size}",
        f"tensor-model-parallel size: {sizes.tensor_size}",
        f"pipeline-model-parallel size: {sizes.pipeline_size}",
    ]
    if sizes.virtual_pipeline_size is not None:
        parts.append(f"model chunks on a rank: {sizes.virtual_pipeline_size}")
    if sizes.context_size > 1:
        parts.append(f"context-parallel size: {sizes.context_size}")
    if sizes.expert_size > 1:
        parts.append(f"expert-model-parallel size: {sizes.expert_size}")
    parts.append(f"number of microbatches: {sizes.num_microbatches}")
    parts.append("gloo on the CPU" if device == "cpu" else "nccl on GPUs")
    return ", ".join(parts)


def parameter_lines(shares: Iterable[Share]) -> list[str]:
    """One line for each place in the model, stage by stage; replicas hold the same."""
    return [
        " > number of parameters on (tensor, pipeline) model parallel rank "
        f"({share.tensor_rank}, {share.pipeline_rank}): {share.num_parameters}"
        for share in sorted(set(shares))
    ]
