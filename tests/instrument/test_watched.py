"""Hooks on models: what counts as a layer, what a device mesh says, and that nothing stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megascan.errors import ConfigError
from megascan.instrument.collectives import reduces_in_backward, topology_of
from megascan.instrument.plain_torch import layers_of


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 8)


def test_layers_are_the_members_of_the_outermost_lists():
    model = Decoder()
    assert layers_of(model) == list(model.layers)
    assert layers_of(Wrapper(Wrapper(model))) == list(model.layers)


def test_layers_of_a_sequence_and_of_a_model_without_lists():
    sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert layers_of(sequence) == list(sequence)
    assert layers_of(Wrapper(sequence)) == list(sequence)
    parts = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.LayerNorm(4)})
    assert layers_of(parts) == list(parts.values())
    assert layers_of(nn.Linear(4, 4)) == []


def test_layers_that_lie_deeper_are_found():
    """As in models of Hugging Face, nanoGPT's and torchtitan's."""
    both = nn.Transformer(8, 2, 2, 3, 8)
    assert layers_of(both) == [*both.encoder.layers, *both.decoder.layers]
    model = Decoder()
    outer = nn.ModuleDict({"body": model, "head": nn.Linear(4, 4)})
    assert layers_of(outer) == list(model.layers)
    by_name = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(3)})
    titan = nn.ModuleDict({"embedding": nn.Embedding(4, 4), "layers": by_name})
    assert layers_of(titan) == list(by_name.values())


def test_a_bare_model_reduces_nothing():
    assert not reduces_in_backward(Decoder())


class Mesh:
    """As much of a DeviceMesh as is looked at."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
        self.mesh = torch.arange(torch.Size(shape).numel()).reshape(shape)
        self.mesh_dim_names = names


def test_a_mesh_becomes_a_layout():
    layout, place = topology_of(Mesh((2, 2, 2), ("pp", "dp_shard", "tp")), 5)
    assert (layout.pp, layout.dp, layout.tp, layout.world_size) == (2, 2, 2, 8)
    assert (place.pp, place.dp, place.tp) == (1, 0, 1)
    assert layout.group(5, "pp") == (1, 5)


def test_replicated_and_sharded_are_one_axis():
    layout, place = topology_of(Mesh((2, 3, 2), ("dp_replicate", "dp_shard", "tp")), 11)
    assert (layout.dp, layout.tp) == (6, 2)
    assert (place.dp, place.tp) == (5, 1)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2,), None, r"has dimensions \[\]"),
        ((2, 2), ("dp", "seq"), "expected names out of dp"),
        ((2, 2, 2), ("dp", "tp", "fsdp"), "side by side"),
    ],
)
def test_a_mesh_that_says_too_little(shape, names, message):
    with pytest.raises(ConfigError, match=message):
        topology_of(Mesh(shape, names), 0)


def test_a_mesh_of_some_ranks_only():
    mesh = Mesh((2,), ("dp",))
    mesh.mesh = mesh.mesh + 2
    with pytest.raises(ConfigError, match=r"holds ranks \[2, 3\]"):
        topology_of(mesh, 2)
