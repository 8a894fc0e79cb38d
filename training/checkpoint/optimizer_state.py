"""Adam's states around Megatron-Core's loading, which needs them there and forgets their step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from megatron.core.optimizer import ChainedOptimizer

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def _single_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron-Core's."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.optimizer is not None:
            yield cast(torch.optim.Optimizer, part.optimizer)


def prepare_optimizer(optimizer: MegatronOptimizer) -> None:
    """Make empty Adam states: Megatron-Core loads in place and reads the step before that."""
    for single in _single_optimizers(optimizer):
        if not isinstance(single, torch.optim.Adam):  # AdamW is one as well
            continue
        for group in single.param_groups:
            for parameter in group["params"]:
                single.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


def restore_step(optimizer: MegatronOptimizer) -> None:
    """Set Adam's step again: the distributed optimizer loads it and then overwrites it by zero."""
    for single in _single_optimizers(optimizer):
        for group in single.param_groups:
            if group.get("step") is None:
                continue
            for parameter in group["params"]:
                single.state[parameter]["step"] = torch.tensor(
                    float(group["step"]), dtype=torch.float32
                )
