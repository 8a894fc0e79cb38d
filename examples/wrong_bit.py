"""Train as `training.pretrain_gpt` does, while rank 1 has one wrong bit from iteration 32 on.

    torchrun --nproc-per-node 3 examples/wrong_bit.py --probe-interval 8 FLAGS…

A bit in the middle of the mantissa of one weight flips, as in a memory that has lost it. The loss
says nothing, no number is infinite, and the job would go on: docs/scope.md finds the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megascope.interventions import flip_bits
from training import scope
from training.distributed import read_launch
from training.job import parse_job

RANK, ITERATION, WEIGHT = 1, 32, "decoder.layers.2.mlp.linear_fc1.weight"


class WrongBit(scope.ProbeCallback):
    """Flips the bit before it probes."""

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Do what the probe's callback does, with one more thing on one rank."""
        from megatron.core.utils import unwrap_model

        with super().iteration(iteration):
            yield
            if (dist.get_rank(), iteration) == (RANK, ITERATION):
                (model,) = unwrap_model(self._chunks)
                weight = model.get_parameter(WEIGHT)
                flip_bits(weight, torch.tensor([1000]), torch.tensor([12]))


if __name__ == "__main__":
    scope.ProbeCallback = WrongBit  # type: ignore[misc]
    parse_job(sys.argv[1:], read_launch(os.environ)).run()
