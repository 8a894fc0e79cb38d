"""One text through Megatron-Core's model of a checkpoint and transformers' of a folder."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from megascan.errors import InputError, MissingError
from training.arguments import resolve_sizes
from training.checkpoint import load_weights
from training.checkpoint_folder import SavedSettings, settings_to_use
from training.model import build_bare_model

_NUM_TEXTS, _NUM_TOKENS = 2, 48
# Both compute in float32, in another order of additions.
_TOLERANCE_RATIO = 1e-5


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far the logits of two models are apart."""

    largest_difference: float
    largest_logit: float
    num_tokens: int

    @property
    def agrees(self) -> bool:
        """Return whether they are equal but for the order of additions."""
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
