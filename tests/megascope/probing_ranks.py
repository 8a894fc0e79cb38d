"""Train with probes and planted bits: `torchrun … probing_ranks.py PLANTED FLAGS…`.

PLANTED names faults as JSON: rank, iteration after which it is there, and either a weight (its name
and that the bit stays flipped) or a module whose output has a wrong bit in that iteration's probe.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megascope.interventions import flip_bits
from training import scope
from training.distributed import read_launch
from training.job import parse_job


class Planted(scope.ProbeCallback):
    """Plants before it probes."""

    faults: list[dict[str, Any]]

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        with super().iteration(iteration):
            yield
            due = [one for one in self.faults
                   if (one["rank"], one["after"]) == (dist.get_rank(), iteration)]  # fmt: skip
            for one in due:
                self._plant(one)

    def _plant(self, fault: dict[str, Any]) -> None:
        from megatron.core.utils import unwrap_model

        (model,) = unwrap_model(self._chunks)
        if "weight" in fault:
            parameter = dict(model.named_parameters())[fault["weight"]]
            flip_bits(parameter, torch.tensor([17]), torch.tensor([3]))
            return
        module = model.get_submodule(fault["module"])

        def flip(_: object, inputs: object, output: Any) -> Any:
            handle.remove()
            first = output[0].clone()
            flip_bits(first, torch.tensor([17]), torch.tensor([3]))
            return (first, *output[1:])

        handle = module.register_forward_hook(flip, prepend=True)


def main() -> None:
    Planted.faults = json.loads(sys.argv[1])
    scope.ProbeCallback = Planted  # type: ignore[misc]
    torch.set_num_threads(1)
    parse_job(sys.argv[2:], read_launch(os.environ)).run()


if __name__ == "__main__":
    main()
