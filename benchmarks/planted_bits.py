"""Single wrong bits in a model: in weights that stay damaged, or once in what a module computes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megascope.capture import Side, Spot, find_spots
from megascope.interventions import flip_bits

MANTISSA_BITS = 23
BFLOAT16_MANTISSA_BITS = 7


def is_named(planted: str, words: str) -> bool:
    """Whether a probe's point means a planted fault; what follows the layers has a number there."""
    return words == planted or words.endswith(f" {planted}")


@contextmanager
def flipped_weight(parameter: torch.Tensor, place: int, bit: int) -> Iterator[None]:
    """Have one bit of a parameter wrong while inside."""
    with flip_bits(parameter, torch.tensor([place]), torch.tensor([bit])):
        yield


@contextmanager
def flipped_activation(spot: Spot, place: int, bit: int) -> Iterator[None]:
    """One bit of what a module puts out (or is given) is wrong, once."""

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        flip_bits(tensor, torch.tensor([place % tensor.numel()]), torch.tensor([bit]))
        return tensor

    def after(module: object, inputs: object, output: Any) -> Any:
        return flip(output) if isinstance(output, torch.Tensor) else (flip(output[0]), *output[1:])

    def before(module: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        at = spot.place.index
        return (*inputs[:at], flip(inputs[at]), *inputs[at + 1 :])

    if spot.place.side is Side.IN:
        handle = spot.module.register_forward_pre_hook(before, prepend=True)
    else:
        handle = spot.module.register_forward_hook(after, prepend=True)
    yield
    handle.remove()


def trials(
    model: Any, number: int, *, seed: int = 11, num_bits: int = MANTISSA_BITS
) -> Iterator[tuple[str, ExitStack]]:
    """Planted faults with what they are called: half weights, half activations, all kinds alike.

    `num_bits` is that of the mantissa of the model's number format.
    """
    draws = random.Random(seed)
    parameters = list(model.named_parameters())
    places = ("embedding", "qkv", "query", "key", "value", "context", "attention_out", "fc1",
              "neurons", "fc2", "residual", "logits")  # fmt: skip
    spots = find_spots([model], places)
    for trial in range(number):
        bit = draws.randrange(num_bits)
        planted = ExitStack()
        if trial % 2:
            name, parameter = draws.choice(parameters)
            place = draws.randrange(parameter.numel())
            planted.enter_context(flipped_weight(parameter, place, bit))
            index = name.removeprefix("decoder.layers.").split(".")[0]
            layer = int(index) + 1 if index.isdigit() else None
            called = name.split(".", 3)[3] if layer else name
            yield (f"layer {layer} {called} (weight)" if layer else f"{called} (weight)"), planted
        else:
            spot = draws.choice(spots)
            planted.enter_context(flipped_activation(spot, draws.randrange(1 << 20), bit))
            yield spot.name, planted
