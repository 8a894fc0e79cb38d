"""A trainer on plain PyTorch: DDP, FSDP2, a pipeline of torch.distributed, or tensor parallelism.

torchrun … plain_trainer.py ddp|fsdp|pipeline|tensor --losses FILE [--slow RANK --slow-from I]
                            [--trace …]
torchrun … plain_trainer.py --plan FILE    several jobs, a line of arguments each
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, gelu

import megascan

WIDTH, CLASSES, BATCH, NUM_MICROBATCHES, NUM_LAYERS = 192, 8, 96, 2, 4
NUM_REPEATS = 5  # how many times the slow rank does the work of a layer again


class Block(torch.nn.Module):
    """One layer; a slow one does the same work again and adds nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.is_slow = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x + self.outer(gelu(self.inner(x)))
        for _ in range(NUM_REPEATS if self.is_slow else 0):
            result = result + 0.0 * self.outer(gelu(self.inner(x)))
        return result


class Network(torch.nn.Module):
    def __init__(self, num_layers: int = NUM_LAYERS, has_head: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(num_layers))
        self.head = torch.nn.Linear(WIDTH, CLASSES) if has_head else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class DataParallel:
    """Every rank trains a replica; gradients are accumulated over the microbatches."""

    mesh = None

    def __init__(self, kind: str) -> None:
        self.network = Network()
        self.model: torch.nn.Module = self.network
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(self.network)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in self.network.layers:
                fully_shard(layer)
            fully_shard(self.network)
        random = torch.Generator().manual_seed(dist.get_rank())
        samples = torch.randn(50 * BATCH, WIDTH, generator=random)
        labels = torch.randint(CLASSES, (50 * BATCH,), generator=random)
        dataset = torch.utils.data.TensorDataset(samples, labels)
        self.batches = iter(torch.utils.data.DataLoader(dataset, batch_size=BATCH))

    def step(self) -> float:
        """Gradients are reduced with the last microbatch; then the model is evaluated."""
        for microbatch in range(NUM_MICROBATCHES):
            samples, labels = next(self.batches)
            with self._reducing(microbatch == NUM_MICROBATCHES - 1):
                loss = cross_entropy(self.model(samples), labels)
                loss.backward()
        with torch.no_grad():
            return cross_entropy(self.model(samples), labels).item()

    def _reducing(self, now: bool) -> AbstractContextManager[None]:
        if now or not isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()


class Pipeline:
    """Every rank holds one stage."""

    def __init__(self) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
        self.is_last = rank == size - 1
        self.network = Network(NUM_LAYERS // size, has_head=self.is_last)
        self.model = self.network
        stage = PipelineStage(self.network, rank, size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=cross_entropy)
        self.random = torch.Generator().manual_seed(0)

    def step(self) -> float:
        samples = torch.randn(BATCH, WIDTH, generator=self.random)
        labels = torch.randint(CLASSES, (BATCH,), generator=self.random)
        losses: list[torch.Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(samples)
        else:
            self.schedule.step(target=labels, losses=losses)
        return sum(loss.item() for loss in losses)


class Tensor:
    """Every layer is split over all ranks by DTensor."""

    def __init__(self) -> None:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        self.network = self.model = Network()
        for layer in self.network.layers:
            plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
            parallelize_module(layer, self.mesh, plan)
        self.random = torch.Generator().manual_seed(0)

    def step(self) -> float:
        losses = []
        for _ in range(NUM_MICROBATCHES):
            samples = torch.randn(BATCH, WIDTH, generator=self.random)
            labels = torch.randint(CLASSES, (BATCH,), generator=self.random)
            loss = cross_entropy(self.model(samples), labels)
            loss.backward()
            losses.append(loss.item())
        return sum(losses)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["ddp", "fsdp", "pipeline", "tensor"])
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--slow-from", type=int, default=1)
    megascan.add_trace_arguments(parser)
    return parser.parse_args(arguments)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    kinds = {"pipeline": Pipeline, "tensor": Tensor}
    job = kinds[options.kind]() if options.kind in kinds else DataParallel(options.kind)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3, foreach=False)
    config = megascan.TraceConfig.from_arguments(options)
    tracer = megascan.start(config, model=job.model, mesh=job.mesh)
    losses = []
    for iteration in range(1, options.iterations + 1):
        for layer in job.network.layers:
            layer.is_slow = dist.get_rank() == options.slow and iteration >= options.slow_from
        with tracer.iteration(iteration):
            optimizer.zero_grad()
            losses.append(job.step())
            optimizer.step()
    tracer.close()
    weights = [float(weight.detach().sum()) for weight in job.model.parameters()
               if not hasattr(weight, "to_local")]  # fmt: skip
    path = options.losses.with_suffix(f".{dist.get_rank()}.json")
    path.write_text(json.dumps({"losses": losses, "weights": weights}))


def main() -> None:
    if sys.argv[1] == "--plan":
        plan = [parse(line.split()) for line in Path(sys.argv[2]).read_text().splitlines()]
    else:
        plan = [parse()]
    dist.init_process_group("gloo")
    for options in plan:
        train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
