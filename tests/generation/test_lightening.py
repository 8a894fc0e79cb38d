"""Modules that are called directly are called as torch calls them, whatever hooks they have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.generation.stage import _MANY_TOKENS, _mlp_forward, caller


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


class Linear(torch.nn.Linear):
    """Gives its bias beside its output, as Megatron-Core's layers do; counts its calls."""

    num_calls = 0

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        self.num_calls += 1
        return super().forward(inputs), None


def gated_mlp() -> Any:
    """What a light forward pass needs of an MLP."""
    mlp: Any = torch.nn.Module()
    mlp.linear_fc1, mlp.linear_fc2 = Linear(8, 12, bias=False), Linear(6, 8, bias=False)
    mlp.activation_func = torch.nn.functional.silu
    mlp.config = SimpleNamespace(gated_linear_unit=True)
    return mlp


@pytest.mark.parametrize(("num_tokens", "num_calls"), [(3, 1), (_MANY_TOKENS, 0)])
@torch.inference_mode()
def test_an_mlp_of_many_tokens_computes_the_same_in_two_products(
    num_tokens: int, num_calls: int
) -> None:
    mlp = gated_mlp()
    states = torch.randn(num_tokens, 1, 8)
    gate, up = (states @ mlp.linear_fc1.weight.T).chunk(2, dim=-1)
    expected = (gate * gate.sigmoid() * up) @ mlp.linear_fc2.weight.T
    output, _ = _mlp_forward(mlp)(states)
    torch.testing.assert_close(output, expected)
    assert mlp.linear_fc1.num_calls == num_calls


@torch.inference_mode()
def test_whoever_looks_at_the_first_product_sees_it_whole() -> None:
    mlp = gated_mlp()
    forward = _mlp_forward(mlp)
    seen = []
    mlp.linear_fc1.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    states = torch.randn(_MANY_TOKENS, 1, 8)
    forward(states)
    torch.testing.assert_close(seen, [states @ mlp.linear_fc1.weight.T])
