"""Jobs on plain PyTorch for `benchmarks.plain_torch`: blocks like those of a transformer, trained
by DDP, by FSDP2, under torch.compile, and in a pipeline of torch.distributed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from training.faults.compute import burn_cpu_time, spin, spin_cycles_per_ms

EXCESS = 0.5
"""A slow rank takes so much longer for each layer, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a model, and of what each replica trains in an iteration."""

    num_layers: int
    hidden: int
    num_heads: int
    sequence: int
    num_microbatches: int
    num_classes: int = 1024

    def words(self) -> str:
        """For a result page."""
        return (
            f"{self.num_layers} layers of {self.hidden}, {self.num_heads} heads, "
            f"{self.num_microbatches} microbatches of {self.sequence} tokens a replica"
        )


class Block(torch.nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self._num_heads = sizes.num_heads
        self.attention_norm = torch.nn.LayerNorm(sizes.hidden)
        self.query_key_value = torch.nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.projection = torch.nn.Linear(sizes.hidden, sizes.hidden)
        self.norm = torch.nn.LayerNorm(sizes.hidden)
        self.inner = torch.nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.outer = torch.nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape `(sample, token, hidden)` in and out."""
        mixed = self.query_key_value(self.attention_norm(x))
        heads = mixed.unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.outer(gelu(self.inner(self.norm(x))))
        return result


class Network(torch.nn.Module):
    """Some blocks, and a classification of every token after the last one."""

    def __init__(self, sizes: Sizes, num_layers: int, *, has_head: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(sizes) for _ in range(num_layers))
        self.head = torch.nn.Linear(sizes.hidden, sizes.num_classes) if has_head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each token, or what goes to the next stage."""
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Drag:
    """What makes a rank slow: after a module, forward and backward, it works for nothing.

    On a GPU a kernel spins on the stream, as long as `EXCESS` of a layer takes; on the CPU the
    thread burns as much CPU time. A layer is timed alone, before the training.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.acts = False
        layer = Block(sizes).to(device, _dtype_on(device))
        x = torch.randn(1, sizes.sequence, sizes.hidden, device=device, dtype=_dtype_on(device))
        with torch.no_grad():
            if device.type == "cuda":
                self._forward = _gpu_work(layer, x)
            else:
                self._forward = _cpu_work(layer, x)

    def hold_up(self, module: torch.nn.Module, num_layers: int = 1) -> None:
        """Slow a module of so many layers down, whenever `acts` is set."""

        def after(_: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
            del inputs
            if not self.acts or not torch.is_grad_enabled():
                return None
            return cast(torch.Tensor, _Dragged.apply(output, self, num_layers))  # type: ignore[no-untyped-call]

        module.register_forward_hook(after)

    def spend(self, num_forwards: int) -> None:
        """The excess of so many forward passes of a layer."""
        self._forward(EXCESS * num_forwards)


class _Dragged(torch.autograd.Function):
    """The identity, whose backward takes twice as long as its forward."""

    @staticmethod
    def forward(ctx: _Context, tensor: torch.Tensor, drag: Drag, num_layers: int) -> torch.Tensor:
        ctx.drag, ctx.num_layers = drag, num_layers
        drag.spend(num_layers)
        return tensor.clone()

    @staticmethod
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.drag.spend(2 * ctx.num_layers)
        return gradient, None, None


class _Context(Protocol):
    drag: Drag
    num_layers: int


def _gpu_work(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[float], None]:
    """Spin for a multiple of what a layer takes on the GPU."""
    layer(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(10):
        layer(x)
    end.record()
    end.synchronize()
    cycles = begin.elapsed_time(end) / 10 * spin_cycles_per_ms()
    return lambda times: spin(int(times * cycles))


def _cpu_work(layer: torch.nn.Module, x: torch.Tensor) -> Callable[[float], None]:
    """Burn a multiple of the CPU time that a layer takes."""
    layer(x)
    begin_ns = time.thread_time_ns()
    for _ in range(10):
        layer(x)
    cost_ns = (time.thread_time_ns() - begin_ns) / 10
    return lambda times: burn_cpu_time(times * cost_ns)


class Job(Protocol):
    """Something that trains."""

    @property
    def model(self) -> torch.nn.Module:
        """What `megascan.start` is given."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """Its layout, None where all ranks are data parallel."""

    def backpropagate(self) -> torch.Tensor | None:
        """Leave the gradients of one iteration; the sum of its losses where they are known."""


class DataParallelJob:
    """Every rank trains a replica, whole (DDP) or in shards (FSDP2)."""

    mesh: DeviceMesh | None = None

    def __init__(
        self, sizes: Sizes, device: torch.device, drag: Drag, *, sharded: bool, compiled: bool
    ) -> None:
        self._sizes = sizes
        with device:
            network = Network(sizes, sizes.num_layers)
        for layer in () if compiled else network.layers:
            drag.hold_up(layer)
        self._replica: DistributedDataParallel | None = None
        if sharded:
            self.model = _sharded(network, device)
        else:
            network.to(_dtype_on(device))
            self.model = self._replica = DistributedDataParallel(network)
        self._input_dtype = torch.float32 if sharded else _dtype_on(device)
        if compiled:
            self.model = cast(torch.nn.Module, torch.compile(self.model))
            drag.hold_up(self.model, sizes.num_layers)
        self._random = torch.Generator(device).manual_seed(dist.get_rank())

    def backpropagate(self) -> torch.Tensor | None:
        """Gradients are reduced with the last microbatch (DDP), or with each (FSDP2)."""
        total = None
        for number in range(self._sizes.num_microbatches):
            samples, labels = draw(self._sizes, 1, self._random, self._input_dtype)
            with self._reducing(number == self._sizes.num_microbatches - 1):
                loss = loss_of(self.model(samples), labels)
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        return total

    def _reducing(self, now: bool) -> AbstractContextManager[None]:
        if now or self._replica is None:
            return nullcontext()
        return self._replica.no_sync()


class PipelineJob:
    """Two stages under 1F1B, each of them data parallel (DDP) over the other ranks."""

    def __init__(self, sizes: Sizes, device: torch.device, drag: Drag) -> None:
        self._sizes, num_stages = sizes, 2
        shape = (num_stages, dist.get_world_size() // num_stages)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
        pipeline, replicas = self.mesh.get_group("pp"), self.mesh.get_group("dp")
        place = dist.get_rank(pipeline)
        self._is_first, self._is_last = place == 0, place == num_stages - 1
        with device:
            network = Network(sizes, sizes.num_layers // num_stages, has_head=self._is_last)
        network.to(_dtype_on(device))
        for layer in network.layers:
            drag.hold_up(layer)
        # Otherwise its reducer counts the weights of every microbatch when it orders its buckets
        # anew in the second iteration, and refuses.
        self.model = DistributedDataParallel(
            network, process_group=replicas, find_unused_parameters=True
        )
        stage = PipelineStage(self.model, place, num_stages, device, group=pipeline)
        self._schedule = Schedule1F1B(stage, sizes.num_microbatches, loss_fn=loss_of)
        self._random = torch.Generator(device).manual_seed(dist.get_rank(replicas))

    def backpropagate(self) -> torch.Tensor | None:
        """All microbatches through this stage."""
        dtype = next(self.model.parameters()).dtype
        samples, labels = draw(self._sizes, self._sizes.num_microbatches, self._random, dtype)
        losses: list[torch.Tensor] = []
        if self._is_first:
            self._schedule.step(samples)
        else:
            self._schedule.step(target=labels, losses=losses)
        return torch.stack(losses).sum() if self._is_last else None


def make_job(layout: str, sizes: Sizes, device: torch.device, drag: Drag) -> Job:
    """A job of this layout with weights of its own, equal on every call."""
    torch.manual_seed(0)
    if layout == PIPELINE:
        return PipelineJob(sizes, device, drag)
    return DataParallelJob(sizes, device, drag, sharded=layout == FSDP, compiled=layout == COMPILED)


DDP, FSDP, COMPILED, PIPELINE = "DDP", "FSDP2", "DDP compiled", "PP2 DP2"


def draw(
    sizes: Sizes, num_samples: int, random: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples `(sample, token, hidden)` and labels `(sample, token)`."""
    device, shape = random.device, (num_samples, sizes.sequence)
    samples = torch.randn(*shape, sizes.hidden, generator=random, device=device, dtype=dtype)
    return samples, torch.randint(sizes.num_classes, shape, generator=random, device=device)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy over all tokens."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _sharded(network: Network, device: torch.device) -> torch.nn.Module:
    """Weights in float32; on a GPU computed with in bfloat16 and reduced in float32."""
    policy = MixedPrecisionPolicy()
    if device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in network.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(network, mp_policy=policy)
    return network


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32
