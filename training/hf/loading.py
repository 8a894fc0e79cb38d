"""Filling the model chunks of this rank from a Hugging Face folder, layer by layer.

Each rank reads its own share, whatever the layout: tensor, pipeline, interleaved and expert
parallelism, layers of Megatron-Core or of Transformer Engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from megascan.errors import InputError
from training.hf.families import describe, read_config
from training.hf.rules import Attention, Form, Place, Rule, TensorRank, join_norms, rules_of, share
from training.hf.weights import Weights, open_weights

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_layer import TransformerLayer

# Constants that older versions of transformers saved beside the weights.
_CONSTANTS = re.compile(r"\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def load_hf(folder: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill the chunks of this rank's model in place; each rank calls it for itself.

    Raises InputError when the folder is damaged or its model is not the one that was built.
    """
    for fill in fillings(folder, chunks).values():
        fill()


def fillings(
    folder: Path, chunks: Sequence[torch.nn.Module]
) -> dict[torch.Tensor, Callable[[], None]]:
    """Return what fills each parameter of this rank in place, in the order of the layers.

    Raises InputError when the folder's model is not the one that was built; filling raises one when
    a tensor is damaged.
    """
    from megatron.core.utils import unwrap_model

    weights, rules, values = check_folder(folder)
    found: dict[torch.Tensor, Callable[[], None]] = {}
    for chunk in unwrap_model(list(chunks)):
        found |= dict(_fillings_of(chunk, weights, rules, cast(int, values["model_vocab_size"])))
    return found


def check_folder(folder: Path) -> tuple[Weights, tuple[Rule, ...], Mapping[str, object]]:
    """Return a folder's weights, the rules of its family and the values of its configuration.

    Raises InputError where its tensors are not those of the model that its config.json describes.
    Called before the model is built: with a wrong number of layers that would end with the memory.
    """
    config = read_config(folder)
    values = describe(folder / "config.json", config)
    rules = rules_of(str(config["model_type"]), values)
    weights = open_weights(folder)
    check_names(weights, rules, values)
    (source,) = next(rule for rule in rules if rule.form is Form.VOCABULARY).sources
    shape = weights.read([source])[0].shape
    if shape[1:] != (values["hidden_size"],):
        raise InputError(
            f"{folder} has {source} of {tuple(shape)}, and its config.json says hidden size "
            f"{values['hidden_size']}; mend the one that is wrong"
        )
    return weights, rules, values


def check_names(weights: Weights, rules: Sequence[Rule], values: Mapping[str, object]) -> None:
    """Raise InputError for a tensor that is missing, and for one that no rule reads: the model
    would be another without it.
    """
    known = {
        weights.require(source)
        for rule in rules
        for layer, expert in _places(rule, values)
        for source in rule.sources_of(layer, expert)
    }
    extra = {name for name in weights.file_of if not _CONSTANTS.search("." + name)} - known
    if "lm_head.weight" in extra:  # tied, and saved a second time
        embedding = next(rule for rule in rules if rule.name == "output_layer.weight").sources
        head, tied = weights.read(["lm_head.weight", *embedding])
        if not torch.equal(head, tied):
            raise InputError(
                f"{weights.folder} ties its output layer to the embedding (tie_word_embeddings), "
                "but has another lm_head.weight; say in config.json which is right"
            )
        extra.remove("lm_head.weight")
    if extra:
        raise InputError(
            f"{weights.folder} has tensors that its config.json does not ask for: "
            f"{', '.join(sorted(extra)[:5])}; this model cannot be taken over"
        )


def _places(rule: Rule, values: Mapping[str, object]) -> Iterator[tuple[int, int]]:
    layers = range(cast(int, values["num_layers"]))
    experts = range(cast(int, values.get("num_experts") or 0))
    match rule.place:
        case Place.LAYER:
            yield from ((layer, 0) for layer in layers)
        case Place.EXPERT:
            yield from ((layer, expert) for layer in layers for expert in experts)
        case _:
            yield 0, 0


def read_sources(
    weights: Weights, rule: Rule, sources: Sequence[str], vocab_size: int
) -> list[torch.Tensor]:
    """Read what a parameter is made of; InputError when it is for another vocabulary."""
    tensors = weights.read(sources)
    num_rows = tensors[0].shape[0] if tensors[0].dim() else 0
    if rule.form is Form.VOCABULARY and num_rows != vocab_size:
        raise InputError(
            f"{weights.folder} has {sources[0]} for {num_rows} ids, and its config.json says "
            f"vocab_size {vocab_size}; mend the one that is wrong"
        )
    return tensors


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """One parameter of this rank, and how it is made of the folder's tensors."""

    weights: Weights
    rule: Rule
    sources: Sequence[str]
    name: str
    parameter: torch.Tensor
    attention: Attention
    own: TensorRank
    vocab_size: int

    @torch.no_grad()
    def __call__(self) -> None:
        """Fill the parameter in place; raises InputError where the folder has another shape."""
        folder, parameter = self.weights.folder, self.parameter
        tensors = read_sources(self.weights, self.rule, self.sources, self.vocab_size)
        try:
            made = share(self.rule, tensors, self.attention, self.own, parameter.shape[0])
        except (RuntimeError, IndexError) as error:  # a shape that the model cannot divide
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise InputError(
                f"{folder} has {', '.join(self.sources)} of {shapes}, which its config.json "
                "does not describe; copy the folder anew"
            ) from error
        if not made.is_floating_point():
            raise InputError(
                f"{folder} has {self.sources[0]} in {str(made.dtype).removeprefix('torch.')}, "
                "expected a floating-point format; copy the folder anew"
            )
        if made.shape != parameter.shape:
            raise InputError(
                f"{folder} makes {self.name} of {tuple(made.shape)} and this run's model has it "
                f"of {tuple(parameter.shape)}; leave the model's flags away"
            )
        parameter.copy_(made)


def _fillings_of(
    chunk: GPTModel, weights: Weights, rules: Sequence[Rule], vocab_size: int
) -> Iterator[tuple[torch.Tensor, _Filling]]:
    """Return what fills the parameters of a chunk; each must be made by exactly one rule."""
    from megatron.core import parallel_state

    dense = TensorRank(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    of_expert = TensorRank(
        rank=parallel_state.get_expert_tensor_parallel_rank(),
        size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    attention = Attention(
        num_heads=chunk.config.num_attention_heads,
        num_groups=chunk.config.num_query_groups,
        num_channels=chunk.config.kv_channels,
    )
    left = dict(chunk.named_parameters())
    for rule, name, sources in _targets(chunk, rules):
        parameter = left.pop(name_in_memory(name, left), None)
        if parameter is None:
            if rule.name == "output_layer.weight":  # the embedding itself, on the same rank
                continue
            raise InputError(
                f"this run's model has no {name}, which {weights.folder} has weights for"
            )
        yield (
            parameter,
            _Filling(
                weights=weights,
                rule=rule,
                sources=sources,
                name=name,
                parameter=parameter,
                attention=attention,
                own=of_expert if rule.place is Place.EXPERT else dense,
                vocab_size=vocab_size,
            ),
        )
    if left:
        raise InputError(
            f"{weights.folder} has nothing for {', '.join(sorted(left)[:3])}, which this run's "
            "model has; leave the model's flags away"
        )


def _targets(chunk: GPTModel, rules: Sequence[Rule]) -> Iterator[tuple[Rule, str, Sequence[str]]]:
    """Return the parameters of a chunk, layer by layer: rule, name, and the folder's tensors."""
    for rule in rules:
        is_here = (rule.place is Place.FIRST and chunk.pre_process) or (
            rule.place is Place.LAST and chunk.post_process
        )
        if is_here:
            yield rule, rule.name, rule.sources_of()
    for index, module in enumerate(chunk.decoder.layers):
        layer = module.layer_number - 1
        for rule in rules:
            if rule.place is Place.LAYER:
                yield rule, f"decoder.layers.{index}.{rule.name}", rule.sources_of(layer)
            elif rule.place is Place.EXPERT:
                for local, expert in enumerate(_experts_of(module)):
                    name = f"decoder.layers.{index}.mlp.experts.local_experts.{local}.{rule.name}"
                    yield rule, name, rule.sources_of(layer, expert)


def _experts_of(layer: TransformerLayer) -> Iterable[int]:
    """Return the experts of a layer that this rank has, counted over all ranks."""
    return cast(Iterable[int], layer.mlp.local_expert_indices)


def name_in_memory(name: str, parameters: Mapping[str, object]) -> str:
    """Return the name of a parameter in Megatron-Core's layers, or that in Transformer Engine's."""
    if name in parameters:
        return name
    # All experts of a rank in one module: experts.local_experts.3.linear_fc1.weight
    return re.sub(
        r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$",
        r"experts.\2.weight\1",
        join_norms(name),
    )
