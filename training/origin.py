"""Where a run's model comes from: flags, an earlier checkpoint, or a Hugging Face folder.

With ``--use-checkpoint-args`` or ``--load-hf`` the checkpoint or the folder gives the defaults of
flags; a flag that is given is still heeded, and refused later where it makes another model. With
both ``--load`` and ``--load-hf`` a run begins with the Hugging Face folder, and resumes from
``--load`` as soon as that holds a checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, InputError
from training.arguments import Settings, Sizes
from training.checkpoint_folder import (
    SavedSettings,
    differences,
    latest_checkpoint,
    model_values,
    read_saved,
    saved_settings,
)
from training.data.tokenizers import TokenizerSettings, TokenizerType

if TYPE_CHECKING:
    from training.loop import Progress, TrainState

# Together these say which tokenizer it is; those of two tokenizers must not be mixed.
_TOKENIZER_FLAGS = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")


def parse_with_origin(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """Parse a command line whose flags may be left to a checkpoint or a Hugging Face folder."""
    given = parser.parse_args(arguments)
    defaults = _defaults(given)
    if not defaults:
        return given
    if given.tokenizer_type is not None:
        for name in ("tokenizer_type", *_TOKENIZER_FLAGS):
            defaults.pop(name, None)
    parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


def _defaults(given: argparse.Namespace) -> dict[str, object]:
    load: Path | None = given.load
    if given.use_checkpoint_args and load is None:
        raise ConfigError("--use-checkpoint-args needs --load, the folder of the checkpoint")
    if given.use_checkpoint_args and given.load_hf is None:
        return saved_settings(given.load).defaults()
    if given.load_hf is None:
        return {}
    if load is not None and latest_checkpoint(load) is not None:
        return saved_settings(load).defaults()
    return hugging_face_defaults(given.load_hf)


def hugging_face_defaults(folder: Path) -> dict[str, object]:
    """Return model and tokenizer of a Hugging Face folder as defaults of flags."""
    from training.hf.weights import check_folder

    _, _, values = check_folder(folder)
    tokenizer = hugging_face_tokenizer(folder)
    return {**values, **({} if tokenizer is None else asdict(tokenizer))}


def hugging_face_tokenizer(folder: Path) -> TokenizerSettings | None:
    """Return the tokenizer of a Hugging Face folder; None when it has none that can be read."""
    if (folder / "tokenizer.json").is_file():
        return TokenizerSettings(
            tokenizer_type=TokenizerType.HUGGING_FACE, tokenizer_model=str(folder)
        )
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return TokenizerSettings(
            tokenizer_type=TokenizerType.GPT2_BPE, vocab_file=str(vocab), merge_file=str(merges)
        )
    return None


def model_vocab_size(settings: Settings, of_tokenizer: int) -> int:
    """Return how many ids the model knows: --model-vocab-size, else those of the tokenizer."""
    wanted = settings.model.model_vocab_size
    if wanted is not None and wanted < of_tokenizer:
        raise ConfigError(
            f"the tokenizer has {of_tokenizer} ids and the model knows {wanted} (as its checkpoint "
            "or Hugging Face folder or --model-vocab-size says); choose the model's own tokenizer"
        )
    return wanted or of_tokenizer


def describe_run(
    settings: Settings, sizes: Sizes, vocab_size: int, tokenizer: TokenizerSettings
) -> SavedSettings:
    """Return what the checkpoints of this run say of themselves."""
    from training.model import parameter_dtype

    return SavedSettings(
        folder=settings.checkpoint.save or Path(),
        model=model_values(settings, sizes, vocab_size),
        dtype=str(parameter_dtype(settings)).removeprefix("torch."),
        tokenizer=tokenizer,
        hf_config=_inherited_config(settings),
    )


def _inherited_config(settings: Settings) -> dict[str, object] | None:
    """Return the configuration of the Hugging Face folder that the model comes from, if any."""
    from training.hf.families import read_config

    load, load_hf = settings.checkpoint.load, settings.checkpoint.load_hf
    folder = None if load is None else latest_checkpoint(load)
    saved = None if folder is None else read_saved(folder)
    if saved is not None:
        return None if saved.hf_config is None else dict(saved.hf_config)
    return None if load_hf is None else read_config(load_hf)


def start_from(
    settings: Settings, sizes: Sizes, state: TrainState, described: SavedSettings
) -> Progress:
    """Fill the model from what the flags name; return how far its training had come."""
    from training.checkpoint import load_checkpoint
    from training.hf.weights import load_hf

    folder, load = settings.checkpoint.load_hf, settings.checkpoint.load
    if folder is None or (load is not None and latest_checkpoint(load) is not None):
        return load_checkpoint(settings, sizes, state, described)
    check_same_model(folder, described)
    load_hf(folder, state.chunks)
    state.optimizer.reload_model_params()
    from training.loop import Progress

    return Progress()


def check_same_model(folder: Path, described: SavedSettings) -> None:
    """Raise InputError when the flags describe another model than a Hugging Face folder holds."""
    from training.hf.families import read_family

    for name, there, here in differences(read_family(folder), described.model):
        raise InputError(
            f"{folder} has {name.replace('_', ' ')} {there} and this run {here}; leave the flags "
            "of the model away"
        )
