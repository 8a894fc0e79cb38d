"""Tokenizers of the ``tokenizers`` library: GPT-2's byte-level BPE, and any tokenizer.json."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import InputError, MissingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

END_OF_TEXT = "<|endoftext|>"
# Asked in this order when a Hugging Face tokenizer does not say what its end token is.
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library with a known end-of-document id."""

    def __init__(self, library: LibraryTokenizer, *, eod: int, name: str) -> None:
        self._library = library
        self.eod = eod
        self.vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values())
        self.unique_identifiers = tokenizer_identifiers(name, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Code the text, with what the tokenizer's own template adds (a first token, say)."""
        # The same ids as `encode`, a fifth faster: it leaves out where each one stood.
        ids: list[int] = self._library.encode_batch_fast([text])[0].ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Decode the ids, special tokens included."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text


def tokenizer_identifiers(name: str, vocab_size: int) -> OrderedDict[str, str]:
    """What megatron.core writes into the key of its index caches."""
    return OrderedDict(tokenizer=name, vocab_size=str(vocab_size))


def load_gpt2(vocab_file: str, merge_file: str) -> SubwordTokenizer:
    """Byte-level BPE of a vocab.json and a merges.txt; InputError when they are not one."""
    _require_library()
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    vocab = _read_vocab(_existing_file(Path(vocab_file), "--vocab-file"))
    _existing_file(Path(merge_file), "--merge-file")
    lost = set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys()
    if lost:
        raise InputError(
            f"{vocab_file} lacks {len(lost)} of the 256 byte symbols, so some texts would lose "
            "letters: take the vocab.json of a byte-level BPE (GPT-2's kind)"
        )
    try:
        library = Library(models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises bare Exception for every damage
        raise InputError(
            f"{merge_file} does not fit to {vocab_file} ({error}): take both of one tokenizer"
        ) from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    eod = vocab.get(END_OF_TEXT)
    if eod is None:
        raise InputError(f"{vocab_file} has no {END_OF_TEXT}, which ends a document: add it")
    return SubwordTokenizer(library, eod=eod, name="GPT2BPETokenizer")


def load_hugging_face(path: Path) -> SubwordTokenizer:
    """A tokenizer.json, or the folder of one; InputError when it is damaged or has no end."""
    _require_library()
    from tokenizers import Tokenizer as Library

    file = _existing_file(path / "tokenizer.json" if path.is_dir() else path, "--tokenizer-model")
    try:
        library = Library.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every damage
        raise InputError(
            f"{file} is not a tokenizer of the tokenizers library ({error})"
        ) from error
    # Saved truncation would cut documents silently, saved padding would fill them.
    library.no_truncation()
    library.no_padding()
    candidates = [*_declared_end_tokens(file.parent), *_KNOWN_END_TOKENS]
    for candidate in candidates:
        eod = library.token_to_id(candidate)
        if eod is not None:
            return SubwordTokenizer(library, eod=eod, name="HuggingFaceTokenizer")
    raise InputError(
        f"{file} has no end-of-document token (looked for {', '.join(candidates)}): "
        "put a tokenizer_config.json with its eos_token beside it"
    )


def _declared_end_tokens(folder: Path) -> Iterable[str]:
    """The ``eos_token`` of the files that Hugging Face keeps beside a tokenizer.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            declared = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file} is not JSON ({error}): mend or remove it") from error
        token = declared.get("eos_token") if isinstance(declared, dict) else None
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content


def _read_vocab(file: Path) -> dict[str, int]:
    try:
        vocab = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}): expected a vocab.json") from error
    if not isinstance(vocab, dict) or not all(isinstance(index, int) for index in vocab.values()):
        raise InputError(f"{file} is not a table from tokens to ids: expected a vocab.json")
    return vocab


def _existing_file(path: Path, flag: str) -> Path:
    if not path.is_file():
        raise InputError(f"{path}, given or looked for by {flag}, is not a file: check the path")
    return path


def _require_library() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise MissingError(
            'the package tokenizers is not installed: pip install "megascan[train]"'
        ) from error
