"""The same tokens on every replica must give the same bits: checksums that find who is wrong.

    probe = Probe(chunks)
    sums = probe.run(lambda: model(tokens, positions, None))     # a word a point of `probe.points`

A point is a parameter, what a place computes, or a tensor-parallel rank's part of a sum before it
is summed: afterwards all ranks of the group have the same wrong bits. A checksum is two sums of the
bit patterns, plain and weighted by position: one flipped bit changes the first by a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from megascan.probes import WEIGHT, Point
from megascope.capture import Capture, Sight
from megascope.places import BY_NAME, Spot, find_spots

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_PLACES = tuple(BY_NAME)
_SUMMED = ("embedding", "attention_out", "fc2")
"""Places that tensor-parallel ranks sum up."""
_REDUCTIONS = (
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)
_BLOCK, _BLOCK_ON_GPU = 1 << 20, 1 << 23
"""Words of 64 bits that are weighted at a time: what a cache holds, or what is worth a kernel."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return two sums (int64, of the tensor's device) of the bit patterns of a tensor.

    Its bytes count as words of 64 bits. Sums of these wrap around and do not depend on the order of
    additions; weights are odd, so that any one wrong word changes both.
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
    """Return the same bytes as words of 64 bits, the last one filled up with zeros."""
    missing = -flat.nbytes % 8 // flat.element_size()
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


class Probe:
    """Checksums of one rank's part of a model; hooks are there only while it runs."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = list(chunks)
        self._spots = find_spots(self._chunks, _PLACES)
        self._last = _last_layer(self._spots)
        self._sums: dict[Point, torch.Tensor] = {}
        self.points: tuple[Point, ...] = ()
        """Known after the first run, the same for all runs."""

    def run(self, forward: Callable[[], object]) -> tuple[str, ...]:
        """Let `forward` compute, without gradients; return a checksum a point, in hex.

        `forward` may run several microbatches of the same tokens; their checksums are added.
        """
        self._sums = {}
        with torch.no_grad(), _partial_sums(self._spots, self._add_partial):
            for layer, name, parameter in _parameters(self._chunks, self._last):
                self._add(Point(layer, name + WEIGHT), parameter)
            with Capture(self._spots, self._take):
                forward()
        ordered = sorted(self._sums, key=lambda point: (point.layer, not point.is_weight))
        self.points = tuple(ordered)
        if not ordered:
            return ()
        table = torch.stack([self._sums[point] for point in ordered]).cpu().numpy()
        return tuple(row.tobytes().hex() for row in table)

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


def _last_layer(spots: Sequence[Spot]) -> int:
    """Return a layer number behind all layers, for what follows them."""
    layers = [spot.module for spot in spots if spot.place.name == "residual"]
    total = [int(cast(Any, layer).config.num_layers) for layer in layers]
    return max(total, default=0) + 1


def _parameters(
    chunks: Sequence[torch.nn.Module], last: int
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield all parameters of this rank with the layer that they belong to."""
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
    """Show what the ranks of a tensor-parallel group are about to sum up, while inside.

    Megatron-Core's row-parallel layers call these functions by their module's names; what other
    layers call is passed on unseen.
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
