"""Trainers that put themselves between the user and torch, as Hugging Face's and DeepSpeed do.

torchrun … wrapped_trainer.py DIR

inner  DDP, of which the trainer hands out the model inside only; batches are fetched between steps;
       one step saves a checkpoint on rank 0, the next one on all ranks together
zero   gradients and parameters travel by functions that an engine has kept before tracing begins,
       and in sets that it coalesces itself
fsdp   FSDP2, which waits for its last reduction when autograd has ended: half a second here
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.nn.functional import cross_entropy

import megascan

WIDTH, CLASSES, BATCH, NUM_LAYERS, NUM_STEPS = 64, 8, 16, 3, 4
WAIT_S = 0.5
SAVES_ALONE, SAVE_TOGETHER = 3, 4
"""Steps in which rank 0, and in which all ranks save."""


class Nested(torch.nn.Module):
    """Layers lie two modules deep, beside others: nanoGPT's `transformer.h`."""

    def __init__(self) -> None:
        super().__init__()
        blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.transformer = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(WIDTH), "h": blocks})
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.transformer["norm"](x) * self.scale
        for block in self.transformer["h"]:
            x = x + block(x).relu()
        return self.head(x)


class Backend:
    """Chooses its functions once, as DeepSpeed's does."""

    def __init__(self) -> None:
        self.gather = dist.all_gather_into_tensor
        self.scatter = dist.reduce_scatter_tensor


class Zero:
    """Splits gradients over ranks, and gathers what each has updated."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.backend = Backend()
        self.group = dist.new_group([*range(dist.get_world_size())])

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        gradients = torch.cat([weight.grad.flatten() for weight in self.model.parameters()])
        size = dist.get_world_size()
        gradients = torch.nn.functional.pad(gradients, (0, -len(gradients) % size))
        self.part = torch.empty(len(gradients) // size)
        self.backend.scatter(self.part, gradients, group=self.group)
        whole = torch.empty_like(gradients)
        self.backend.gather(whole, self.part, group=self.group)
        self.model.head.bias.grad = whole[-CLASSES:].clone()

    def gather(self) -> None:
        """Gather some tensors in one go."""
        parts = [torch.ones(4), torch.ones(8)]
        wholes = [torch.empty(len(part) * dist.get_world_size()) for part in parts]
        with distributed_c10d._coalescing_manager(self.group, async_ops=True) as manager:
            for whole, part in zip(wholes, parts, strict=True):
                distributed_c10d.all_gather_into_tensor(whole, part, group=self.group)
        manager.wait()


def train_inner(directory: Path) -> None:
    model = Nested()
    replica = torch.nn.parallel.DistributedDataParallel(model)
    data = torch.utils.data.TensorDataset(torch.randn(400, WIDTH), torch.randint(CLASSES, (400,)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer = megascan.start(config_of(directory / "inner"), model=model)
    for iteration in range(1, NUM_STEPS + 1):
        samples, labels = next(batches)
        with tracer.iteration(iteration):
            cross_entropy(replica(samples), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            if iteration == SAVES_ALONE and dist.get_rank() == 0:
                torch.save(model.state_dict(), directory / "alone.pt")
            if iteration == SAVE_TOGETHER:  # which calls torch.save for its parts
                dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "together")
    tracer.close()


def train_zero(directory: Path) -> None:
    engine = Zero(Nested())
    kept = dict(vars(engine.backend))
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.1)
    tracer = megascan.start(config_of(directory / "zero"), model=engine.model)
    for iteration in range(1, NUM_STEPS + 1):
        with tracer.iteration(iteration):
            samples = torch.randn(BATCH, WIDTH)
            engine.backward(cross_entropy(engine.model(samples), torch.zeros(BATCH).long()))
            optimizer.step()
            optimizer.zero_grad()
            engine.gather()
    tracer.close()
    assert vars(engine.backend) == kept, "what an engine has kept is put back"


def train_fsdp(directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    wait = FSDPState._root_post_backward_final_callback

    def wait_long(self: FSDPState) -> None:
        time.sleep(WAIT_S)
        wait(self)

    FSDPState._root_post_backward_final_callback = wait_long
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer = megascan.start(config_of(directory / "fsdp"), model=model)
    for iteration in range(1, NUM_STEPS + 1):
        with tracer.iteration(iteration):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    tracer.close()
    FSDPState._root_post_backward_final_callback = wait


def config_of(directory: Path) -> megascan.TraceConfig:
    return megascan.TraceConfig(enabled=True, directory=directory, interval=NUM_STEPS,
                                window=NUM_STEPS)  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train_inner(Path(sys.argv[1]))
    train_zero(Path(sys.argv[1]))
    train_fsdp(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
