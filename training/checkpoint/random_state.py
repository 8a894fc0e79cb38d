"""The random states of a rank: Python's, numpy's, torch's, and Megatron-Core's tracker."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from training.arguments import Sizes


def _states() -> dict[str, object]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, object]) -> None:
    """Go on drawing where the rank was when the checkpoint was written."""
    random.setstate(cast(tuple[object, ...], state["python"]))
    np.random.set_state(cast(dict[str, object], state["numpy"]))
    torch.cuda.set_rng_state(cast(torch.Tensor, state["device"]))
    torch.set_rng_state(cast(torch.Tensor, state["torch"]))
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def sharded_random_state(sizes: Sizes) -> ShardedObject:
    """Every rank's own states: expert parallelism makes them differ even between replicas."""
    return ShardedObject("rng_state", _states(), (sizes.world_size,), (dist.get_rank(),))
