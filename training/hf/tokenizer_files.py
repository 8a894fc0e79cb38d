"""The tokenizer of a checkpoint as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

from training.checkpoint_folder import TOKENIZER_FOLDER, SavedSettings, copy_tokenizer_files
from training.data.tokenizers import SubwordTokenizer, build_tokenizer


def write_tokenizer(saved: SavedSettings, folder: Path) -> None:
    """Copy the tokenizer's files into a Hugging Face folder, and add what is missing there.

    Of tokenizers that have no files (bytes, plain numbers) transformers knows nothing: none is
    written.
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
