"""Layers are of one kind where all that their modules are made of is alike."""

from __future__ import annotations

import pytest
import torch

from megascan.instrument.layers import UNLIKE, kind_of, kinds_of, numbered_layers


class Attention(torch.nn.Module):
    def __init__(self, width: int, number: int, window: tuple[int, int] | None) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.layer_number = number
        self.window_size = window


class Layer(torch.nn.Module):
    def __init__(self, number: int, *, width: int = 8, window: tuple[int, int] | None = None):
        super().__init__()
        self.attention = Attention(width, number, window)
        self.mlp = torch.nn.Linear(width, width)
        self.layer_number = number
        self.layer_idx = number - 1


class TopKRouter(torch.nn.Module):
    pass


def decoder_of(*layers: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList(layers)
    return model


def test_layers_that_differ_in_their_number_only_are_of_one_kind():
    first, second = Layer(3), Layer(4)
    torch.nn.init.zeros_(second.mlp.weight)  # other weights, the same work
    second._runs = 5  # what changes while it runs
    first.mlp.ds_id, second.mlp.ds_id = 7, 12  # DeepSpeed numbers all modules of a ZeRO-3 job
    model = decoder_of(first, second)
    kinds = kinds_of(numbered_layers(model))
    assert list(kinds) == [3, 4] and len(set(kinds.values())) == 1
    assert UNLIKE not in kinds.values()


def frozen(layer: Layer) -> Layer:
    layer.mlp.requires_grad_(False)
    return layer


def in_half(layer: Layer) -> Layer:
    layer.mlp = layer.mlp.half()
    return layer


def with_norm(layer: Layer) -> Layer:
    layer.norm = torch.nn.LayerNorm(8)
    return layer


@pytest.mark.parametrize(
    "other",
    [
        Layer(1, width=16),
        Layer(1, window=(128, 0)),
        frozen(Layer(1)),
        in_half(Layer(1)),
        with_norm(Layer(1)),
    ],
    ids=["width", "window", "frozen", "half", "norm"],
)
def test_what_makes_other_work_is_another_kind(other):
    assert kind_of(other) != kind_of(Layer(1))


def test_experts_have_no_kind():
    layer = Layer(1)
    layer.mlp = torch.nn.ModuleDict({"router": TopKRouter()})
    assert kind_of(layer) == UNLIKE


def test_a_model_without_numbered_layers_has_none():
    assert not kinds_of(numbered_layers(torch.nn.Linear(2, 2)))
    assert not kinds_of(numbered_layers(decoder_of(torch.nn.Linear(2, 2))))
