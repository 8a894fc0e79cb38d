"""Modules that are called directly are called as torch calls them, whatever hooks they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from training.generation.lightening import caller


def halve(module: Any, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return inputs[0] / 2


def double_all(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(one * 2 for one in inputs)


def negate(module: Any, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return -output


def look(module: Any, inputs: object, output: object = None) -> None:
    return None


def add_one(
    module: Any, inputs: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return (inputs[0] + 1,), options


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], []), ([look], [look]), ([halve], []), ([double_all, halve, look], [negate]),
        ([halve], [negate, look, negate]), ([], [negate]),
    ],
)  # fmt: skip
def test_hooks_see_and_change_what_they_do_when_torch_calls(
    before: list[Any], after: list[Any]
) -> None:
    module = torch.nn.Linear(3, 2)
    states = torch.randn(4, 3)
    call = caller(module)
    for hook in before:
        module.register_forward_pre_hook(hook)
    for hook in after:
        module.register_forward_hook(hook)
    assert torch.equal(call(states), module(states))


def test_hooks_of_other_kinds_are_left_to_torch() -> None:
    module = torch.nn.Linear(3, 2)
    states = torch.randn(4, 3)
    call, plain = caller(module), module(states + 1)
    handle = module.register_forward_pre_hook(add_one, with_kwargs=True)
    assert torch.equal(call(states), plain)
    handle.remove()
    assert torch.equal(call(states + 1), plain)
