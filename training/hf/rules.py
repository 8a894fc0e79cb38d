"""The table that says which tensors of a Hugging Face folder make which parameter of Megatron-Core.

A rule names a parameter of Megatron-Core, the folder's tensors that it is made of, and how it is
put together and cut over the tensor-parallel ranks:

    QKV     rows are ordered by query group: the group's queries, key and value; a rank has whole
            groups, or an equal part of all rows where there are fewer groups than ranks
    GATED   rows are the gate's, then the up projection's; a rank has its part of each
    ROWS, COLUMNS   a rank has its part of the rows, or of the columns
    VOCABULARY      ROWS, with rows of zeros up to the padded size
    WHOLE   every rank has the whole parameter

Example: 4 heads of 1 channel in 2 groups give rows q0 q1 k0 v0 | q2 q3 k1 v1; of two ranks the
first has the rows before the bar.

`share` puts together only a rank's own part; `parts` takes a full tensor apart again. Both work on
views where they can, so that only the needed pages of a mapped file are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.nn import functional


class Form(StrEnum):
    """How a parameter is made of a folder's tensors and cut over tensor-parallel ranks."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"
    QKV = "qkv"
    GATED = "gated"


class ModelPart(StrEnum):
    """The part of a model to which a parameter belongs."""

    FIRST = "first"
    LAYER = "layer"
    EXPERT = "expert"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One parameter: `name` within its part of the model, and names of the folder's tensors.

    `sources` may contain {layer} and {expert}.
    """

    place: ModelPart
    name: str
    sources: tuple[str, ...]
    form: Form
    is_transposed: bool = False

    def sources_of(self, layer: int = 0, expert: int = 0) -> list[str]:
        """Return the names of the folder's tensors for a layer and expert, counted from 0."""
        return [source.format(layer=layer, expert=expert) for source in self.sources]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Sizes by which queries, keys and values are interleaved."""

    num_heads: int
    num_groups: int
    num_channels: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Return the number of rows of all queries, keys and values."""
        keys = self.num_groups * self.num_channels
        return self.num_heads * self.num_channels, keys, keys


@dataclass(frozen=True, kw_only=True)
class TensorRank:
    """A tensor-parallel rank, and how many there are."""

    rank: int = 0
    size: int = 1

    def cut(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's equal part of a dimension, as a view."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


def share(
    rule: Rule, tensors: Sequence[torch.Tensor], attention: Attention, own: TensorRank, rows: int
) -> torch.Tensor:
    """Return this rank's part of a parameter, made of the folder's tensors; it has `rows` rows."""
    if rule.is_transposed:
        tensors = [tensor.t() for tensor in tensors]
    match rule.form:
        case Form.WHOLE:
            return tensors[0]
        case Form.ROWS:
            return own.cut(tensors[0])
        case Form.COLUMNS:
            return own.cut(tensors[0], 1)
        case Form.GATED:
            return torch.cat([own.cut(tensor) for tensor in tensors])
        case Form.VOCABULARY:
            start = min(own.rank * rows, tensors[0].shape[0])
            real = tensors[0][start : start + rows]
            return functional.pad(real, (0, 0, 0, rows - real.shape[0]))
        case Form.QKV:
            return _interleave(tensors, attention, own)


def _interleave(
    tensors: Sequence[torch.Tensor], attention: Attention, own: TensorRank
) -> torch.Tensor:
    if len(tensors) == 1:  # GPT-2 has queries, keys and values in one tensor
        tensors = torch.split(tensors[0], list(attention.rows))
    grouped = [_by_group(tensor, attention) for tensor in tensors]
    if attention.num_groups % own.size:  # fewer groups than ranks
        return own.cut(torch.cat(grouped, dim=1).flatten(0, 1))
    return torch.cat([own.cut(tensor) for tensor in grouped], dim=1).flatten(0, 1)


def parts(
    rule: Rule, tensor: torch.Tensor, attention: Attention, vocab_size: int
) -> list[torch.Tensor]:
    """Take a full parameter apart into the folder's tensors; the inverse of `share` on one rank."""
    match rule.form:
        case Form.GATED:
            taken = list(tensor.chunk(2))
        case Form.VOCABULARY:
            taken = [tensor[:vocab_size]]
        case Form.QKV:
            taken = _separate(tensor, attention)
            if len(rule.sources) == 1:
                taken = [torch.cat(taken)]
        case _:
            taken = [tensor]
    return [part.t() for part in taken] if rule.is_transposed else taken


def _separate(tensor: torch.Tensor, attention: Attention) -> list[torch.Tensor]:
    of_group = [rows // attention.num_groups for rows in attention.rows]
    grouped = torch.split(_by_group(tensor, attention), of_group, dim=1)
    return [part.flatten(0, 1) for part in grouped]


def _by_group(tensor: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Return rows as (group, row of the group, …), as a view."""
    groups = attention.num_groups
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])


# Transformer Engine joins a norm to the linear layer that follows; checkpoints use its names.
_JOINED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def join_norms(name: str) -> str:
    """Return the name of a norm within the linear layer behind it, and other names unchanged."""
    for norm, joined in _JOINED_NORMS.items():
        name = name.replace(norm, joined)
    return name


def rules_of(model_type: str, values: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return the rules of a family for a model with these values of the trainer's settings."""
    rules = _gpt2_rules() if model_type == "gpt2" else _llama_rules(values)
    untied = bool(values.get("untie_embeddings_and_output_weights"))
    return (*rules, *_output_rules(model_type, untied))


def _output_rules(model_type: str, untied: bool) -> Iterator[Rule]:
    """Yield the rule of the output layer: its own weights, or the embedding's if the two are tied
    (a last stage has a copy).
    """
    embedding = "transformer.wte.weight" if model_type == "gpt2" else "model.embed_tokens.weight"
    source = "lm_head.weight" if untied else embedding
    yield Rule(
        place=ModelPart.LAST, name="output_layer.weight", sources=(source,), form=Form.VOCABULARY
    )


def _gpt2_rules() -> Iterator[Rule]:
    top = (
        (ModelPart.FIRST, "embedding.word_embeddings.weight", "wte.weight", Form.VOCABULARY),
        (ModelPart.FIRST, "embedding.position_embeddings.weight", "wpe.weight", Form.WHOLE),
        (ModelPart.LAST, "decoder.final_layernorm.weight", "ln_f.weight", Form.WHOLE),
        (ModelPart.LAST, "decoder.final_layernorm.bias", "ln_f.bias", Form.WHOLE),
    )
    for place, name, source, form in top:
        yield Rule(place=place, name=name, sources=(f"transformer.{source}",), form=form)
    layer = (
        ("input_layernorm", "ln_1", Form.WHOLE, Form.WHOLE, False),
        ("self_attention.linear_qkv", "attn.c_attn", Form.QKV, Form.QKV, True),
        ("self_attention.linear_proj", "attn.c_proj", Form.COLUMNS, Form.WHOLE, True),
        ("pre_mlp_layernorm", "ln_2", Form.WHOLE, Form.WHOLE, False),
        ("mlp.linear_fc1", "mlp.c_fc", Form.ROWS, Form.ROWS, True),
        ("mlp.linear_fc2", "mlp.c_proj", Form.COLUMNS, Form.WHOLE, True),
    )
    for name, source, of_weight, of_bias, is_transposed in layer:
        where = f"transformer.h.{{layer}}.{source}"
        yield Rule(
            place=ModelPart.LAYER, name=f"{name}.weight", sources=(f"{where}.weight",),
            form=of_weight, is_transposed=is_transposed,
        )  # fmt: skip
        yield Rule(
            place=ModelPart.LAYER, name=f"{name}.bias", sources=(f"{where}.bias",), form=of_bias
        )


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_AND_UP = ("mlp.gate_proj", "mlp.up_proj")


def _llama_rules(values: Mapping[str, object]) -> Iterator[Rule]:
    yield Rule(
        place=ModelPart.FIRST, name="embedding.word_embeddings.weight",
        sources=("model.embed_tokens.weight",), form=Form.VOCABULARY,
    )  # fmt: skip
    yield Rule(
        place=ModelPart.LAST, name="decoder.final_layernorm.weight",
        sources=("model.norm.weight",), form=Form.WHOLE,
    )  # fmt: skip
    all_biases = bool(values.get("add_bias_linear", True))
    qkv_bias = all_biases or bool(values.get("add_qkv_bias"))
    yield from _layer("input_layernorm", ("input_layernorm",), Form.WHOLE)
    yield from _layer("self_attention.linear_qkv", _QKV, Form.QKV, Form.QKV if qkv_bias else None)
    if values.get("qk_layernorm"):
        yield from _layer("self_attention.q_layernorm", ("self_attn.q_norm",), Form.WHOLE)
        yield from _layer("self_attention.k_layernorm", ("self_attn.k_norm",), Form.WHOLE)
    bias = Form.WHOLE if all_biases else None
    yield from _layer("self_attention.linear_proj", ("self_attn.o_proj",), Form.COLUMNS, bias)
    yield from _layer("pre_mlp_layernorm", ("post_attention_layernorm",), Form.WHOLE)
    if values.get("num_experts"):
        yield from _expert_rules()
        return
    yield from _layer(
        "mlp.linear_fc1", _GATE_AND_UP, Form.GATED, Form.GATED if all_biases else None
    )
    yield from _layer("mlp.linear_fc2", ("mlp.down_proj",), Form.COLUMNS, bias)


def _layer(
    name: str, sources: Sequence[str], of_weight: Form, of_bias: Form | None = None
) -> Iterator[Rule]:
    """Yield the rules for the weight of a layer's module, and for its bias if it has one."""
    for suffix, form in (("weight", of_weight), ("bias", of_bias)):
        if form is not None:
            where = tuple(f"model.layers.{{layer}}.{source}.{suffix}" for source in sources)
            yield Rule(place=ModelPart.LAYER, name=f"{name}.{suffix}", sources=where, form=form)


def _expert_rules() -> Iterator[Rule]:
    yield from _layer("mlp.router", ("block_sparse_moe.gate",), Form.WHOLE)
    where = "model.layers.{layer}.block_sparse_moe.experts.{expert}."
    yield Rule(
        place=ModelPart.EXPERT, name="linear_fc1.weight",
        sources=(f"{where}w1.weight", f"{where}w3.weight"), form=Form.GATED,
    )  # fmt: skip
    yield Rule(
        place=ModelPart.EXPERT, name="linear_fc2.weight", sources=(f"{where}w2.weight",),
        form=Form.COLUMNS,
    )  # fmt: skip
