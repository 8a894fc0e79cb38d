"""Checksums that find a rank that computes wrongly: replicas must get equal bits for equal tokens.

    probe = Probe(chunks)
    sums = probe.run(lambda: model(tokens, positions, None))     # one for each of `probe.points`

A point is a parameter, what a place computes, or a tensor-parallel rank's addend before it is
summed: after the sum all ranks of the group have the same wrong bits. A checksum is two sums of the
bit patterns, plain and weighted by position: one flipped bit changes the plain sum by a power of
two.

Before a job begins, `sweep` lets every GPU, or core, of a host compute the same: a stack of
transformer layers of plain torch, with weights from a seed, the same tokens on each device, round
after round. Each device counts as a replica.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from megascan.errors import MissingError
from megascan.probes import WEIGHT, Point, Prober, Probes
from megascan.topology import Layout
from megascope.capture import BY_NAME, Capture, Sight, Spot, find_spots

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_PLACES = tuple(BY_NAME)
_SUMMED = ("embedding", "attention_out", "fc2")
"""Places whose output is a sum over the tensor-parallel ranks."""
_REDUCTIONS = (
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)
_BLOCK, _BLOCK_ON_GPU = 1 << 20, 1 << 23
"""64-bit words that are weighted at a time: what fits a cache, or what is worth a kernel launch."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums (int64, on the tensor's device) of the bit patterns of a tensor.

    The tensor's bytes count as 64-bit words. The sums wrap around and do not depend on the order of
    additions. Weights are odd, so that any single wrong word changes both sums.
    """
    words = _words(tensor.detach().contiguous().view(-1))
    size = min(_BLOCK_ON_GPU if words.is_cuda else _BLOCK, words.numel())
    weights = 2 * torch.arange(size, device=words.device) + 1
    blocks = []
    for start in range(0, words.numel(), max(1, size)):
        block = words[start : start + size]
        plain = block.sum()
        weighted = (block * weights[: block.numel()]).sum() + 2 * start * plain
        blocks.append(torch.stack((plain, weighted)))
    return torch.stack(blocks).sum(0) if blocks else words.new_zeros(2)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as 64-bit words, the last word filled up with zeros."""
    missing = -flat.nbytes % 8 // flat.element_size()
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


class Probe:
    """Computes checksums of one rank's part of a model; hooks are there only during `run`."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = list(chunks)
        self._spots = find_spots(self._chunks, _PLACES)
        self._last = _last_layer(self._spots)
        self._sums: dict[Point, torch.Tensor] = {}
        self.points: tuple[Point, ...] = ()
        """Points of all checksums; known after the first run, the same for all runs."""

    def run(self, forward: Callable[[], object]) -> tuple[str, ...]:
        """Call `forward` without gradients; return a checksum for each point, in hex.

        `forward` may run several microbatches of the same tokens; their checksums are added.
        """
        self._sums = {}
        with torch.no_grad(), _partial_sums(self._spots, self._add_partial):
            for layer, name, parameter in _parameters(self._chunks, self._last):
                self._add(Point(layer, name + WEIGHT), parameter)
            with Capture(self._spots, self._take):
                forward()
        found = _in_hex(self._sums)
        self.points = tuple(found)
        return tuple(found.values())

    def _take(self, sight: Sight) -> None:
        spot = sight.spot
        self._add(Point(self._layer_of(spot), spot.place.name), sight.tensor)

    def _add_partial(self, spot: Spot, tensor: torch.Tensor) -> None:
        self._add(
            Point(self._layer_of(spot), f"{spot.place.name} before its sum over tensor ranks"),
            tensor,
        )

    def _layer_of(self, spot: Spot) -> int:
        return self._last if spot.place.name in ("logits", "loss") else spot.layer

    def _add(self, point: Point, tensor: torch.Tensor) -> None:
        made = checksum(tensor)
        known = self._sums.get(point)
        self._sums[point] = made if known is None else known + made


def _in_hex(sums: Mapping[Point, torch.Tensor]) -> dict[Point, str]:
    """Return checksums in hex by layer, weights first; all leave the device by one transfer."""
    if not sums:
        return {}
    points = sorted(sums, key=lambda point: (point.layer, not point.is_weight))
    table = torch.stack([sums[point] for point in points]).cpu().numpy()
    return {point: row.tobytes().hex() for point, row in zip(points, table, strict=True)}


def _last_layer(spots: Sequence[Spot]) -> int:
    """Return the number of layers plus 1, as the layer of what follows all layers."""
    layers = [spot.module for spot in spots if spot.place.name == "residual"]
    total = [int(cast(Any, layer).config.num_layers) for layer in layers]
    return max(total, default=0) + 1


def _parameters(
    chunks: Sequence[torch.nn.Module], last: int
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (layer, name, parameter) for all parameters of this rank."""
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(list(chunks)):
        yield from _parameters_of(chunk, last)


def _parameters_of(model: GPTModel, last: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    numbers = {index: int(layer.layer_number) for index, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            yield numbers[int(parts[2])], ".".join(parts[3:]), parameter
        else:
            yield (0 if parts[0] == "embedding" else last), name, parameter


@contextmanager
def _partial_sums(
    spots: Sequence[Spot], take: Callable[[Spot, torch.Tensor], None]
) -> Iterator[None]:
    """While inside, pass to `take` what tensor-parallel ranks are about to sum up at some spots.

    Megatron-Core's row-parallel layers look up the reducing functions in their module, where these
    are replaced meanwhile; calls from other layers are passed on unseen.
    """
    from megatron.core.tensor_parallel import layers

    inside: list[Spot] = []

    def enter(spot: Spot) -> Callable[..., None]:
        return lambda *_: inside.append(spot)

    def leave(*_: object) -> None:
        inside.pop()

    def seen(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            if inside:
                take(inside[-1], tensor)
            return original(tensor, *arguments, **options)

        return reduce

    with ExitStack() as stack:
        for spot in spots:
            if spot.place.name in _SUMMED and _is_split(spot):
                before = spot.module.register_forward_pre_hook(enter(spot))
                after = spot.module.register_forward_hook(leave)
                stack.callback(before.remove)
                stack.callback(after.remove)
        for name in _REDUCTIONS:
            original = getattr(layers, name)
            stack.callback(setattr, layers, name, original)
            setattr(layers, name, seen(original))
        yield


def _is_split(spot: Spot) -> bool:
    config = cast(Any, spot.module).config
    return int(config.tensor_model_parallel_size) > 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the model that every device computes."""

    num_layers: int
    hidden: int
    heads: int
    num_tokens: int
    dtype: torch.dtype


CPU_SIZE = Size(num_layers=2, hidden=256, heads=4, num_tokens=128, dtype=torch.float32)
GPU_SIZE = Size(num_layers=8, hidden=4096, heads=32, num_tokens=4096, dtype=torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ProbedDevice:
    """A GPU or a core: its name, its model, torch's name of the device, and the core's number."""

    name: str
    kind: str
    torch_name: str
    core: int | None = None

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Compute on this core alone while inside; does nothing for a GPU."""
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


def find_devices(*, use_cpu: bool) -> list[ProbedDevice]:
    """Return the GPUs of this host, or else its cores; MissingError for fewer than two."""
    num_gpus = 0 if use_cpu else torch.cuda.device_count()
    if num_gpus:
        devices = [
            ProbedDevice(
                name=f"GPU {n}", kind=torch.cuda.get_device_name(n), torch_name=f"cuda:{n}"
            )
            for n in range(num_gpus)
        ]
    elif hasattr(os, "sched_getaffinity"):
        devices = [
            ProbedDevice(name=f"core {core}", kind="cpu", torch_name="cpu", core=core)
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
    """A stack of layers on one device; `spoil` may change what a point computes (for tests)."""

    size: Size
    device: ProbedDevice
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
        """Compute once; return a checksum for each point, in hex."""
        self._sums = {}
        for point, weight in self.weights.items():
            self._sums[Point(point.layer, point.name + WEIGHT)] = checksum(weight)
        stream = self._tokens
        with self.device.chosen(), torch.no_grad():
            for layer in range(1, self.size.num_layers + 1):
                stream = self._layer(layer, stream)
            return _in_hex(self._sums)

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
    """Let every device compute `num_rounds` times; in the result ranks are devices and iterations
    are rounds.

    All devices go through one round before the next, so that faults of heat show.
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
