"""Microbatches: loaded on one rank of a tensor-parallel group, broadcast to the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank

from training.callback import Callback

_PARTS = ("tokens", "labels", "loss_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Input and target of one forward pass; all tensors ``(sample, position)``.

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
    """Shape of a microbatch, whether it has an attention mask, and where it is to lie."""

    num_samples: int
    seq_length: int
    has_attention_mask: bool
    device: str


class MicrobatchStream(Iterator[Microbatch]):
    """Iterates over the microbatches of this rank.

    `samples` is the rank's data loader on the first rank of each tensor-parallel group and None on
    the others, which receive what the first one loaded, as in Megatron-LM.
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
        """Load the integers, ``(part, sample, position)``, and the mask: two broadcasts."""
        loaded = next(samples)
        packed = torch.stack([loaded[part].to(torch.int64) for part in _PARTS])
        mask = self._empty_mask("cpu")
        if self._shape.has_attention_mask:
            mask = loaded["attention_mask"].to(torch.uint8)
        return self._moved(packed), self._moved(mask)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move to the device from pinned memory: other copies wait for all work queued there."""
        if self._shape.device == "cpu":
            return tensor
        return tensor.pin_memory().to(self._shape.device, non_blocking=True)

    def _room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make tensors to receive into."""
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
