"""A checkpoint as a Hugging Face folder, and the check that both compute the same.

The weights are read from the checkpoint layer by layer, whatever layout it was saved in, and
written as they come, so only one layer is in memory. `compare` runs the same tokens through
Megatron-Core's model of the checkpoint and through transformers' model of the folder.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megascan.errors import InputError, MissingError
from training.arguments import resolve_sizes
from training.checkpoint import CheckpointTensors, Wanted, load_weights
from training.checkpoint_folder import (
    TOKENIZER_FOLDER,
    SavedSettings,
    copy_tokenizer_files,
    settings_to_use,
)
from training.data.tokenizers import SubwordTokenizer, build_tokenizer
from training.hf.families import config_of
from training.hf.rules import Attention, ModelPart, Rule, join_norms, parts, rules_of
from training.hf.weights import CONFIG, plan, writing
from training.model import build_bare_model

DEFAULT_MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """One parameter of one layer and expert: place in the checkpoint, and names in the folder."""

    rule: Rule
    wanted: Wanted
    names: list[str]


def write_hf(
    saved: SavedSettings, folder: Path, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
) -> None:
    """Write a checkpoint's model as a Hugging Face folder; InputError for a damaged checkpoint."""
    config = config_of(saved)
    export = _Export(saved, str(config["model_type"]))
    blank = {name: tensor for piece in export.pieces() for name, tensor in export.blank(piece)}
    with writing(folder, plan(blank, max_file_bytes)) as writer:
        for group in export.layers():
            for name, tensor in export.real(group):
                writer.write(name, tensor)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    _write_tokenizer(saved, folder)


def _write_tokenizer(saved: SavedSettings, folder: Path) -> None:
    """Copy the tokenizer's files into a Hugging Face folder, and add files that are missing there.

    Nothing is written for tokenizers without files (bytes, plain numbers), which transformers does
    not know.
    """
    copy_tokenizer_files(saved.folder / TOKENIZER_FOLDER, folder)
    tokenizer = None if saved.tokenizer is None else build_tokenizer(saved.tokenizer)
    if not isinstance(tokenizer, SubwordTokenizer):
        return
    if not (folder / "tokenizer.json").exists():
        tokenizer.save(folder / "tokenizer.json")
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        end = tokenizer.detokenize([tokenizer.eod])
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
        settings.write_text(text + "\n", encoding="utf-8")


def _key(rule: Rule) -> str:
    """Return the key of a layer's parameter in a checkpoint, where all layers are one tensor."""
    if rule.place is ModelPart.EXPERT:
        return f"decoder.layers.mlp.experts.experts.{rule.name}"
    return f"decoder.layers.{join_norms(rule.name)}"


class _Export:
    """The tensors of one checkpoint under a family's rules."""

    def __init__(self, saved: SavedSettings, model_type: str) -> None:
        self._saved = saved
        self._rules = rules_of(model_type, saved.model)
        self._dtype: torch.dtype = getattr(torch, saved.dtype)
        self._tensors = CheckpointTensors(saved.folder)
        self._num_layers = cast(int, saved.model["num_layers"])
        self._num_experts = cast(int, saved.model["num_experts"] or 0)
        self._check_counts()
        self._attention = Attention(
            num_heads=cast(int, saved.model["num_attention_heads"]),
            num_groups=cast(int, saved.model["num_query_groups"]),
            num_channels=cast(int, saved.model["kv_channels"]),
        )

    def _check_counts(self) -> None:
        """Raise InputError where tensors have other numbers of layers or experts than settings."""
        counts_of_part: dict[ModelPart, tuple[int, ...]] = {
            ModelPart.LAYER: (self._num_layers,),
            ModelPart.EXPERT: (self._num_layers, self._num_experts),
        }
        for rule in self._rules:
            if rule.place not in counts_of_part:
                continue
            key, counts = _key(rule), counts_of_part[rule.place]
            stored = self._tensors.shape(Wanted(key=key))[: len(counts)]
            if stored != counts:
                raise InputError(
                    f"the checkpoint {self._saved.folder} has {key} for (layers, experts) {stored} "
                    f"and its settings.json says {counts}; take another one"
                )

    def pieces(self) -> Iterator[_Piece]:
        """Yield all parameters in the order in which they are written."""
        for group in self.layers():
            yield from group

    def layers(self) -> Iterator[list[_Piece]]:
        """Yield the parameters that are read together: before the layers, of each layer, behind."""
        yield [self._top(rule) for rule in self._rules if rule.place is ModelPart.FIRST]
        for layer in range(self._num_layers):
            yield list(self._of_layer(layer))
        untied = bool(self._saved.model["untie_embeddings_and_output_weights"])
        yield [
            self._top(rule)
            for rule in self._rules
            if rule.place is ModelPart.LAST and (untied or rule.name != "output_layer.weight")
        ]

    def _top(self, rule: Rule) -> _Piece:
        return _Piece(rule=rule, wanted=Wanted(key=rule.name), names=rule.sources_of())

    def _of_layer(self, layer: int) -> Iterator[_Piece]:
        for rule in self._rules:
            if rule.place is ModelPart.LAYER:
                wanted = Wanted(key=_key(rule), place=(layer,))
                yield _Piece(rule=rule, wanted=wanted, names=rule.sources_of(layer))
            elif rule.place is ModelPart.EXPERT:
                for expert in range(self._num_experts):
                    wanted = Wanted(key=_key(rule), place=(layer, expert))
                    yield _Piece(rule=rule, wanted=wanted, names=rule.sources_of(layer, expert))

    def blank(self, piece: _Piece) -> Iterator[tuple[str, torch.Tensor]]:
        """Return name and tensor (without contents) of each of a parameter's tensors."""
        shape = self._tensors.shape(piece.wanted)
        return self._parts(piece, torch.empty(shape, dtype=self._dtype, device="meta"))

    def real(self, pieces: Sequence[_Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each of some parameters' tensors, read at once."""
        read = self._tensors.read([piece.wanted for piece in pieces], self._dtype)
        for piece, tensor in zip(pieces, read, strict=True):
            yield from self._parts(piece, tensor)

    def _parts(self, piece: _Piece, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        taken = parts(piece.rule, tensor, self._attention, self._saved.vocab_size)
        return zip(piece.names, taken, strict=True)


_NUM_TEXTS, _NUM_TOKENS = 2, 48
# Both models compute in float32, but add up in different orders.
_TOLERANCE_RATIO = 1e-5


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far the logits of two models are apart."""

    largest_difference: float
    largest_logit: float
    num_tokens: int

    @property
    def agrees(self) -> bool:
        """Return whether the logits are equal up to the order of additions."""
        return self.largest_difference <= _TOLERANCE_RATIO * max(1.0, self.largest_logit)


def compare(saved: SavedSettings, folder: Path) -> Comparison:
    """Run both models on the same random tokens, one after the other, in float32."""
    generator = torch.Generator().manual_seed(1)
    longest = min(_NUM_TOKENS, int(str(saved.model["max_position_embeddings"])))
    tokens = torch.randint(0, saved.vocab_size, (_NUM_TEXTS, longest), generator=generator)
    theirs = _logits_of_transformers(folder, tokens)
    gc.collect()
    ours = _logits_of_megatron(saved, tokens)
    return Comparison(
        largest_difference=float((ours - theirs).abs().max()),
        largest_logit=float(theirs.abs().max()),
        num_tokens=tokens.numel(),
    )


def _logits_of_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    try:
        import transformers
    except ImportError as error:
        raise MissingError(
            "--check needs the package transformers: pip install transformers"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        raise InputError(f"transformers cannot load {folder} ({error})") from error
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tokens).logits
    return logits


def _logits_of_megatron(saved: SavedSettings, tokens: torch.Tensor) -> torch.Tensor:
    settings = settings_to_use(saved.model, "float32")
    sizes = resolve_sizes(settings, 1, is_trained=False)
    chunks = build_bare_model(settings, sizes, saved.vocab_size, "cpu")
    load_weights(saved.folder, chunks)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits: torch.Tensor = chunks[0](tokens, positions, None)
    return logits[..., : saved.vocab_size]
