"""What hooks show is what transformers sees, in every layout, and looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from megascope import reductions
from megascope.capture import PLACES, Capture, Share, Sight, entropy, find_spots, probabilities
from megascope.interventions import flip_bits
from megascope.probe import Probe
from megascope.reductions import REDUCTIONS, join, join_shares, reduce

from .conftest import FAMILIES, PROGRAM, Written, run_ranks
from .scoped_model import CHANGES, NUM_TOKENS, changed, run, see

Model = Callable[[str], Any]
Seen = dict[tuple[str, int], Any]


def check_against_transformers(seen: dict[tuple[str, int], torch.Tensor], them: Written) -> None:
    """Embedding, residual stream, attention and logits, within 1e-5."""
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(seen["embedding", 0][:, 0], them.hidden[0][0], **close)
    for layer in range(1, 4):  # transformers' last hidden state is normalized
        torch.testing.assert_close(seen["residual", layer][:, 0], them.hidden[layer][0], **close)
    for layer, theirs in enumerate(them.attentions, start=1):
        query, key = seen["query", layer][:, 0], seen["key", layer][:, 0]
        torch.testing.assert_close(probabilities(query, key), theirs[0], **close)
    logits = seen["logits", 0][:, 0, :203]
    torch.testing.assert_close(logits.softmax(-1), them.logits[0].softmax(-1), **close)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_seen_is_what_transformers_computes(
    family: str, model_of: Model, written: dict[str, Written]
) -> None:
    seen = {key: tensor for key, (tensor, _) in see(model_of(family)).items()}
    check_against_transformers(seen, written[family])
    dense = {place.name for place in PLACES if place.name not in ("router", "experts", "loss")}
    assert {name for name, _ in seen} == dense
    assert [layer for name, layer in seen if name == "neurons"] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def on_two_ranks(
    written: dict[str, Written], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[dict[str, Any]]]:
    """What both ranks saw, by layout and model."""
    out = tmp_path_factory.mktemp("ranks")
    folders = [one.folder for one in written.values()]
    run_ranks(2, PROGRAM, out, "2,1", "2,1,sequence", "1,2", "--", *folders)
    return lambda layout, family: [
        torch.load(out / f"{layout}-{family}-{rank}.pt") for rank in range(2)
    ]


def joined(ranks: list[Seen], layout: str) -> dict[tuple[str, int], torch.Tensor]:
    """What the viewer makes of the ranks' shares: stages put side by side, shares joined."""
    if layout == "1,2":
        return {key: tensor for rank in ranks for key, (tensor, _) in rank.items()}
    return {
        key: torch.from_numpy(
            join_shares([rank[key][0].numpy() for rank in ranks], ranks[0][key][1])
        )
        for key in ranks[0]
    }


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["2,1", "2,1,sequence", "1,2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_and_stages_joined_are_the_whole(
    family: str,
    layout: str,
    on_two_ranks: Callable[[str, str], list[dict[str, Any]]],
    model_of: Model,
    written: dict[str, Written],
) -> None:
    ranks = on_two_ranks(layout, family)
    whole = joined([rank["seen"] for rank in ranks], layout)
    check_against_transformers(whole, written[family])
    for key, (tensor, _) in see(model_of(family)).items():
        if key[0] != "logits":  # padded to another size of vocabulary
            torch.testing.assert_close(whole[key], tensor, rtol=0, atol=2e-5)
    assert all(rank["same"] for rank in ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_an_intervention_is_the_same_in_every_layout(
    family: str, on_two_ranks: Callable[[str, str], list[dict[str, Any]]], model_of: Model
) -> None:
    model = model_of(family)
    untouched = run(model)
    halves = [rank["changed"] for rank in on_two_ranks("2,1", family)]
    sequences = [rank["changed"] for rank in on_two_ranks("2,1,sequence", family)]
    (_, last) = [rank["changed"] for rank in on_two_ranks("1,2", family)]
    for name, change in CHANGES.items():
        alone = changed(model, change)[..., :203]
        assert float((alone - untouched[..., :203]).abs().max()) > 1e-4, name
        within = 1e-6 * float(alone.abs().max())  # another order of additions in float32
        for both in (halves, sequences):
            wide = torch.cat([rank[name] for rank in both], dim=-1)[..., :203]
            assert float((wide - alone).abs().max()) < within, name
        assert float((last[name][..., :203] - alone).abs().max()) < within, name


def test_looking_changes_no_bit_and_leaves_no_hook(model_of: Model) -> None:
    model = model_of("llama")
    before = run(model)
    with Capture(find_spots([model]), lambda sight: None):
        during = run(model)
    assert torch.equal(before, during) and torch.equal(before, run(model))
    hooks = [
        module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks
    ]
    assert hooks == []


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """A stand-in for Transformer Engine's norm and linear layer in one module.

    Its names and what it returns are those of Megatron-Core's wrapper: the norm's weights lie
    beside the linear layer's, and a bias is returned beside where the caller adds it.
    """

    def __init__(self, norm: Any, linear: Any) -> None:
        super().__init__()
        self.config, self.eps, self.te_return_bias = linear.config, norm.eps, linear.skip_bias_add
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, getattr(norm, "bias", None)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape, weight = x.shape[-1:], self.layer_norm_weight
        if self.layer_norm_bias is None:
            x = functional.rms_norm(x, shape, weight, self.eps)
        else:
            x = functional.layer_norm(x, shape, weight, self.layer_norm_bias, self.eps)
        if self.te_return_bias:
            return functional.linear(x, self.weight), self.bias
        return functional.linear(x, self.weight, self.bias), None


class TERowParallelLinear(torch.nn.Module):
    """A stand-in for Transformer Engine's linear layer, whose bias the caller adds."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.config, self.te_return_bias = linear.config, linear.skip_bias_add
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return functional.linear(x, self.weight), self.bias


class TEDotProductAttention(torch.nn.Module):
    """A stand-in for Transformer Engine's attention, which returns no probabilities."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: object = None,
    ) -> torch.Tensor:
        by_head = [one.permute(1, 2, 0, 3) for one in (query, key, value)]
        context = functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
        return context.permute(2, 0, 1, 3).flatten(2)


def as_transformer_engine(model: Any) -> None:
    """Give the layers the modules of Transformer Engine's specs, which need a GPU."""
    for layer in model.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv = TELayerNormColumnParallelLinear(
            layer.input_layernorm, attention.linear_qkv
        )
        mlp.linear_fc1 = TELayerNormColumnParallelLinear(layer.pre_mlp_layernorm, mlp.linear_fc1)
        layer.input_layernorm = layer.pre_mlp_layernorm = torch.nn.Identity()
        attention.linear_proj = TERowParallelLinear(attention.linear_proj)
        mlp.linear_fc2 = TERowParallelLinear(mlp.linear_fc2)
        attention.core_attention = TEDotProductAttention()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_of_transformer_engines_kind_show_the_same_at_every_place(
    family: str, model_of: Model, written: dict[str, Written]
) -> None:
    model = model_of(family)
    plain, changes = see(model), {name: changed(model, CHANGES[name]) for name in CHANGES}
    as_transformer_engine(model)
    shown = see(model)
    assert shown.keys() == plain.keys()
    check_against_transformers({key: one for key, (one, _) in shown.items()}, written[family])
    for key, (tensor, share) in plain.items():
        torch.testing.assert_close(shown[key][0], tensor, rtol=1e-5, atol=1e-4)
        assert shown[key][1] == share, key
    for name, logits in changes.items():
        torch.testing.assert_close(changed(model, CHANGES[name]), logits, rtol=1e-4, atol=1e-3)


def test_a_fused_norm_is_probed_as_a_weight_of_its_linear_layer(model_of: Model) -> None:
    model = model_of("llama")
    as_transformer_engine(model)
    probe = Probe([model])
    sound = probe.run(lambda: run(model))
    weight = model.decoder.layers[1].mlp.linear_fc1.layer_norm_weight
    with flip_bits(weight, torch.tensor([5]), torch.tensor([9])):
        wrong = probe.run(lambda: run(model))
    apart = [point.words for point, one, two in zip(probe.points, sound, wrong, strict=True)
             if one != two]  # fmt: skip
    assert apart[:2] == ["layer 2 mlp.linear_fc1.layer_norm_weight (weight)", "layer 2 fc1"]


def test_places_and_layers_are_chosen(model_of: Model) -> None:
    spots = find_spots([model_of("gpt2")], ["fc2", "residual", "logits"], (2, 4))
    assert [spot.name for spot in spots] == [
        "layer 2 fc2", "layer 2 residual", "layer 4 fc2", "layer 4 residual", "logits",
    ]  # fmt: skip


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "residual": lambda layer: layer,
    "attention_out": lambda layer: layer.self_attention.linear_proj,
    "fc1": lambda layer: layer.mlp.linear_fc1,
    "fc2": lambda layer: layer.mlp.linear_fc2,
}


@pytest.mark.parametrize("place", GRADIENTS)
def test_gradients_are_shown_and_are_autograds(place: str, model_of: Model) -> None:
    """Those of layers whose bias is added later, too: GPT-2 has one everywhere."""
    model = model_of("gpt2")
    model.requires_grad_(True)
    from .scoped_model import TOKENS

    shown: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []

    def take(sight: Sight) -> None:
        if sight.is_gradient:
            shown[sight.spot.layer] = sight.tensor.clone()

    keep = GRADIENTS[place](model.decoder.layers[1]).register_forward_hook(
        lambda module, inputs, output: kept.append(output[0].retain_grad() or output[0])
    )
    with Capture(find_spots([model], [place]), take, gradients=True):
        positions = torch.arange(NUM_TOKENS)[None]
        model(TOKENS, positions, None).square().mean().backward()
    keep.remove()
    assert sorted(shown) == [1, 2, 3, 4]
    assert torch.equal(shown[2], kept[0].grad)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("broken", [1.0, float("nan"), float("inf"), float("-inf")])
def test_one_pass_on_a_gpu_is_what_two_are(broken: float) -> None:
    from megascope.one_pass import Magnitudes

    magnitudes = Magnitudes(torch.device("cuda"))
    x = torch.randn(70, 2, 384, device="cuda", dtype=torch.bfloat16)
    x[3, 1, 7] = broken
    bias = torch.randn(384, device="cuda", dtype=torch.bfloat16)
    found = [magnitudes.of(x), magnitudes.of(x, bias)]
    magnitudes.finish()
    for (energy, largest), tensor in zip(found, (x, x + bias), strict=True):
        same = {"rtol": 1e-4, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(energy, reduce("rms", tensor, per_token=False), **same)
        assert largest.equal(reduce("max", tensor, per_token=False)) or np.isnan(broken)


@pytest.mark.parametrize("name", [reduction.name for reduction in REDUCTIONS])
def test_joined_partial_numbers_are_those_of_the_whole(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(5, 2, 256, generator=generator).exp() - 1
    whole[0, 0, 3] = 0
    parts = whole.split(128, dim=-1)
    together = join(name, [reduce(name, part).numpy() for part in parts], [128, 128])
    alone = join(name, [reduce(name, whole).numpy()], [256])
    np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_reductions_are_what_their_names_say() -> None:
    x = torch.tensor([[[3.0, -4.0, 0.0, 0.0]]])
    found = {
        one.name: join(one.name, [reduce(one.name, x).numpy()], [4])[0, 0] for one in REDUCTIONS
    }
    assert found["rms"] == pytest.approx(2.5)
    assert found["max"] == 4 and found["mean"] == -0.25
    assert found["zeros"] == 0.5 and found["finite"] == 1
    shares = np.array([9, 16]) / 25
    assert found["entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert found["histogram"][[0, 21, 22]] == pytest.approx([0.5, 0.25, 0.25])
    assert found["top"].tolist()[:2] == [-4, 3] and found["top"].tolist()[4:6] == [1, 0]
    assert found["pixels"].tolist() == [3, -4, 0, 0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_and_breaks_nothing(broken: float) -> None:
    x = torch.ones(2, 1, 8)
    x[1, 0, 5] = broken
    for one in REDUCTIONS:
        join(one.name, [reduce(one.name, x).numpy()], [8])
    finite = join("finite", [reduce("finite", x).numpy()], [8])
    assert finite[:, 0].tolist() == [1, 7 / 8]
    assert not np.isfinite(join("max", [reduce("max", x).numpy()], [8])[1, 0])
    assert join("top", [reduce("top", x).numpy()], [8])[1, 0, 8] == 5


def test_attention_of_some_heads_and_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key = (torch.randn(6, heads, 4, generator=generator) for heads in (4, 2))
    whole = probabilities(query, key)
    some = probabilities(query, key, heads=[3, 1], rows=[5, 2])
    assert torch.equal(some, whole[[3, 1]][:, [5, 2]])
    later = probabilities(query[4:], key)  # the last queries, of a cache
    torch.testing.assert_close(later, whole[:, 4:])
    assert entropy(whole)[:, 0].tolist() == [0, 0, 0, 0]  # the first token sees itself alone


def test_join_shares_by_kind() -> None:
    one, two = np.arange(8.0).reshape(2, 1, 4), np.arange(8.0).reshape(2, 1, 4) + 10
    assert join_shares([one, two], Share.GATED)[0, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert join_shares([one, two], Share.TOKENS).shape == (4, 1, 4)
    assert join_shares([one, two], Share.WHOLE) is one
    assert reductions.BY_NAME.keys() >= {"rms", "top"}
