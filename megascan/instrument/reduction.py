"""The gradient reduction of DistributedDataParallel, done where it can be seen.

DDP reduces its buckets in C++. Given a communication hook it leaves them to Python; this hook does
what the reducer does by itself: the same division, then the same all-reduce over the same group,
asynchronous as before.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel


class _Bucket(Protocol):
    """What is used of torch.distributed.GradBucket."""

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, flat."""


logger = logging.getLogger("megascan")


def reduces_in_backward(model: torch.nn.Module) -> bool:
    """Whether a backward pass of the model ends with waiting for reduced gradients."""
    from torch.nn.parallel import DistributedDataParallel

    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return isinstance(uncompiled(model), (DistributedDataParallel, sharded))


def reduces_now(model: torch.nn.Module) -> bool:
    """Whether the backward under way does so: not within DDP's `no_sync`."""
    return bool(getattr(uncompiled(model), "require_backward_grad_sync", True))


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """What `torch.compile` was given, where it has wrapped a model."""
    inside: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inside


def reduce_visibly(model: torch.nn.Module) -> None:
    """Have a DDP model reduce its gradients through torch.distributed; others are left alone.

    The hook stays when tracing ends: DDP cannot be given its own way back. A model that has a hook
    already keeps it.
    """
    from torch.nn.parallel import DistributedDataParallel

    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        return
    if getattr(model, "_comm_hooks", None):
        logger.info("a DDP model has a communication hook of its own and keeps it")
        return
    # Without annotations: DDP compares them with its own class and takes no text for it.
    model.register_comm_hook(model, lambda state, bucket: _all_reduce(state, bucket))  # noqa: PLW0108


def _all_reduce(
    model: DistributedDataParallel, bucket: _Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group of the model."""
    import torch.distributed as dist

    group = model.process_group
    buffer, num_ranks = bucket.buffer(), dist.get_world_size(group)
    # The reducer multiplies while it copies into the bucket, and divides where gradients are
    # views of it: with a group size that is no power of two, the last bits differ.
    if model.gradient_as_bucket_view:
        buffer.div_(num_ranks)
    else:
        buffer.mul_(1.0 / num_ranks)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    if work is None:
        raise RuntimeError("an asynchronous all-reduce returned no work")
    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: future.value()[0]
    )
    return reduced
