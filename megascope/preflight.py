"""Let every GPU, or core, of this host compute the same, and compare the bits: before a job begins.

A stack of transformer layers of plain torch, with weights from a seed, computes the same tokens on
each device, round after round. Each device is a replica of the others; the checksums are compared
as those of a training job's probes are.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from megascan.errors import MissingError
from megascan.probes import WEIGHT, Point, Prober, Probes
from megascan.topology import Layout
from megascope.probe import checksum


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model that every device computes."""

    num_layers: int
    hidden: int
    heads: int
    num_tokens: int
    dtype: torch.dtype


CPU_SIZE = Size(num_layers=2, hidden=256, heads=4, num_tokens=128, dtype=torch.float32)
GPU_SIZE = Size(num_layers=8, hidden=4096, heads=32, num_tokens=4096, dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Something that computes: its name, where torch finds it, and the core it is."""

    name: str
    kind: str
    torch_name: str
    core: int | None = None

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Compute on this device, and no other core, while inside."""
        if self.core is None:
            yield
            return
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, {self.core})
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, before)


def find_devices(*, use_cpu: bool) -> list[Device]:
    """Return the GPUs of this host, or its cores. MissingError when there is nothing to compare."""
    num_gpus = 0 if use_cpu else torch.cuda.device_count()
    if num_gpus:
        devices = [
            Device(name=f"GPU {n}", kind=torch.cuda.get_device_name(n), torch_name=f"cuda:{n}")
            for n in range(num_gpus)
        ]
    elif hasattr(os, "sched_getaffinity"):
        devices = [
            Device(name=f"core {core}", kind="cpu", torch_name="cpu", core=core)
            for core in sorted(os.sched_getaffinity(0))
        ]
    else:
        raise MissingError("cores cannot be chosen on this system; run the probe on Linux")
    if len(devices) < 2:
        raise MissingError(
            f"this host has one {devices[0].name.split()[0]} to use: bits need two to be compared; "
            "probe it inside a training job (--probe-interval)"
        )
    return devices


@dataclass
class Stack:
    """The layers on one device; `spoil` may change what a point computes (tests plant faults)."""

    size: Size
    device: Device
    spoil: Callable[[Point, torch.Tensor], torch.Tensor] = lambda point, tensor: tensor
    weights: dict[Point, torch.Tensor] = field(default_factory=dict)
    _sums: dict[Point, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        hidden = self.size.hidden
        shapes = {"qkv": (3 * hidden, hidden), "projection": (hidden, hidden),
                  "fc1": (4 * hidden, hidden), "fc2": (hidden, 4 * hidden)}  # fmt: skip
        for layer in range(1, self.size.num_layers + 1):
            for name, shape in shapes.items():
                drawn = torch.randn(shape, generator=generator) * hidden**-0.5
                self.weights[Point(layer, name)] = drawn.to(
                    device=self.device.torch_name, dtype=self.size.dtype
                )
        drawn = torch.randn((self.size.num_tokens, hidden), generator=generator)
        self._tokens = drawn.to(device=self.device.torch_name, dtype=self.size.dtype)

    def run(self) -> dict[Point, str]:
        """Compute once; returns a checksum a point."""
        self._sums = {}
        for point, weight in self.weights.items():
            self._sums[Point(point.layer, point.name + WEIGHT)] = checksum(weight)
        stream = self._tokens
        with self.device.chosen(), torch.no_grad():
            for layer in range(1, self.size.num_layers + 1):
                stream = self._layer(layer, stream)
            points = sorted(self._sums, key=lambda point: (point.layer, not point.is_weight))
            table = torch.stack([self._sums[point] for point in points]).cpu().numpy()
        return {point: row.tobytes().hex() for point, row in zip(points, table, strict=True)}

    def _layer(self, layer: int, stream: torch.Tensor) -> torch.Tensor:
        size = self.size
        normal = layer_norm(stream, (size.hidden,))
        qkv = self._product(layer, "qkv", normal).view(size.num_tokens, 3, size.heads, -1)
        query, key, value = qkv.permute(1, 2, 0, 3).unsqueeze(1)
        context = scaled_dot_product_attention(query, key, value, is_causal=True)
        context = self._note(layer, "attention", context[0].transpose(0, 1).reshape(stream.shape))
        stream = stream + self._product(layer, "projection", context)
        inner = gelu(self._product(layer, "fc1", layer_norm(stream, (size.hidden,))))
        return self._note(layer, "stream", stream + self._product(layer, "fc2", inner))

    def _product(self, layer: int, name: str, inputs: torch.Tensor) -> torch.Tensor:
        return self._note(layer, name, linear(inputs, self.weights[Point(layer, name)]))

    def _note(self, layer: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        point = Point(layer, name)
        tensor = self.spoil(point, tensor)
        self._sums[point] = checksum(tensor)
        return tensor


def sweep(stacks: Sequence[Stack], num_rounds: int) -> Probes:
    """Let every device compute `num_rounds` times; ranks stand for devices, iterations for rounds.

    All devices go through one round before the next: what heats up during the sweep shows.
    """
    layout = Layout(dp=len(stacks))
    sums: dict[int, dict[int, tuple[str, ...]]] = {rank: {} for rank in range(len(stacks))}
    points: tuple[Point, ...] = ()
    for number in range(1, num_rounds + 1):
        for rank, stack in enumerate(stacks):
            found = stack.run()
            points = tuple(found)
            sums[rank][number] = tuple(found.values())
    host = socket.gethostname()
    probers = {
        rank: Prober(rank=rank, layout=layout, host=host, device=stack.device.kind, points=points)
        for rank, stack in enumerate(stacks)
    }
    return Probes(probers=probers, sums=sums)
