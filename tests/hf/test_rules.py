"""Tensors of a folder become those of a rank, and come apart again."""

from __future__ import annotations

import pytest
import torch

from training.hf.rules import Attention, Form, ModelPart, Rule, TensorRank, parts, rules_of, share
from training.hf.weights import name_in_memory

# Four heads of one channel in two groups, hidden size 5.
ATTENTION = Attention(num_heads=4, num_groups=2, num_channels=1)
LLAMA = {"add_bias_linear": False, "untie_embeddings_and_output_weights": True}


def rule(form: Form, sources: int = 1, is_transposed: bool = False) -> Rule:
    names = tuple(f"part{index}" for index in range(sources))
    return Rule(
        place=ModelPart.LAYER, name="x", sources=names, form=form, is_transposed=is_transposed
    )


def rows(*names: str) -> torch.Tensor:
    """One row for each name, so that an order can be read."""
    return torch.tensor([[float(ord(name[0]) * 100 + int(name[1]))] * 5 for name in names])


def test_queries_keys_and_values_go_by_group() -> None:
    q, k, v = rows("q0", "q1", "q2", "q3"), rows("k0", "k1"), rows("v0", "v1")
    whole = share(rule(Form.QKV, 3), [q, k, v], ATTENTION, TensorRank(), 8)
    assert torch.equal(whole, rows("q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"))


def test_a_rank_has_whole_groups() -> None:
    q, k, v = rows("q0", "q1", "q2", "q3"), rows("k0", "k1"), rows("v0", "v1")
    second = share(rule(Form.QKV, 3), [q, k, v], ATTENTION, TensorRank(rank=1, size=2), 4)
    assert torch.equal(second, rows("q2", "q3", "k1", "v1"))


def test_ranks_that_outnumber_the_groups_cut_their_rows_evenly() -> None:
    q, k, v = rows("q0", "q1", "q2", "q3"), rows("k0"), rows("v0")
    one_group = Attention(num_heads=4, num_groups=1, num_channels=1)
    shares = [
        share(rule(Form.QKV, 3), [q, k, v], one_group, TensorRank(rank=rank, size=2), 3)
        for rank in range(2)
    ]
    assert torch.equal(shares[0], rows("q0", "q1", "q2"))
    assert torch.equal(shares[1], rows("q3", "k0", "v0"))


@pytest.mark.parametrize(
    ("of_megatron_core", "of_transformer_engine"),
    [
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.bias", "self_attention.linear_qkv.layer_norm_bias"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.experts.local_experts.3.linear_fc1.weight", "mlp.experts.linear_fc1.weight3"),
    ],
)
def test_parameters_have_the_names_of_either_kind_of_layers(
    of_megatron_core: str, of_transformer_engine: str
) -> None:
    where = "decoder.layers.0."
    for there in (of_megatron_core, of_transformer_engine):
        found = name_in_memory(where + of_megatron_core, {where + there: None})
        assert found == where + there


def test_one_tensor_of_queries_keys_and_values_is_taken_as_three() -> None:
    q, k, v = rows("q0", "q1", "q2", "q3"), rows("k0", "k1"), rows("v0", "v1")
    fused = share(rule(Form.QKV, 1, True), [torch.cat([q, k, v]).t()], ATTENTION, TensorRank(), 8)
    assert torch.equal(fused, share(rule(Form.QKV, 3), [q, k, v], ATTENTION, TensorRank(), 8))


def test_a_rank_has_its_part_of_gate_and_of_up() -> None:
    gate, up = rows("g0", "g1", "g2", "g3"), rows("u0", "u1", "u2", "u3")
    second = share(rule(Form.GATED, 2), [gate, up], ATTENTION, TensorRank(rank=1, size=2), 4)
    assert torch.equal(second, rows("g2", "g3", "u2", "u3"))


def test_the_vocabulary_is_padded_with_zeros_on_the_ranks_that_it_does_not_fill() -> None:
    words = rows("w0", "w1", "w2")
    shares = [
        share(rule(Form.VOCABULARY), [words], ATTENTION, TensorRank(rank=rank, size=4), 2)
        for rank in range(4)
    ]
    assert torch.equal(shares[0], rows("w0", "w1"))
    assert torch.equal(shares[1], torch.cat([rows("w2"), torch.zeros(1, 5)]))
    assert torch.equal(torch.cat(shares[2:]), torch.zeros(4, 5))


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("is_transposed", [False, True])
def test_taking_apart_undoes_putting_together(form: Form, is_transposed: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = {Form.QKV: [(4, 6), (2, 6), (2, 6)], Form.GATED: [(4, 6), (4, 6)]}
    there = [torch.randn(shape, generator=generator) for shape in shapes.get(form, [(8, 6)])]
    if is_transposed:
        there = [tensor.t() for tensor in there]
    of = rule(form, len(there), is_transposed)
    made = share(of, there, ATTENTION, TensorRank(), 12 if form is Form.VOCABULARY else 8)
    back = parts(of, made, ATTENTION, vocab_size=8)
    assert len(back) == len(there)
    assert all(torch.equal(one, other) for one, other in zip(back, there, strict=True))


def test_shares_of_all_ranks_make_the_whole() -> None:
    whole = torch.randn(8, 6)
    for form, dim in ((Form.ROWS, 0), (Form.COLUMNS, 1)):
        shares = [
            share(rule(form), [whole], ATTENTION, TensorRank(rank=rank, size=2), 4)
            for rank in range(2)
        ]
        assert torch.equal(torch.cat(shares, dim), whole)


def test_only_an_untied_model_reads_an_output_layer_of_its_own() -> None:
    for untied, source in ((True, "lm_head.weight"), (False, "model.embed_tokens.weight")):
        rules = rules_of("llama", {**LLAMA, "untie_embeddings_and_output_weights": untied})
        output = next(rule for rule in rules if rule.name == "output_layer.weight")
        assert output.sources == (source,)


def test_each_parameter_has_one_rule() -> None:
    for model_type, values in (
        ("gpt2", {}),
        ("llama", LLAMA),
        ("llama", {**LLAMA, "add_bias_linear": True}),
        ("qwen3", {**LLAMA, "qk_layernorm": True}),
        ("mixtral", {**LLAMA, "num_experts": 4}),
    ):
        names = [
            rule.name for rule in rules_of(model_type, values) if rule.place != ModelPart.EXPERT
        ]
        assert len(names) == len(set(names))
