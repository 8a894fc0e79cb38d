"""Text to token ids and back, under Megatron-LM's tokenizer names and flags.

GPT-2's byte-level BPE and any tokenizer.json need the ``tokenizers`` library; ids as text and bytes
as ids need no library. Importing this module needs neither torch nor megatron.core, so that
preprocessing workers start quickly.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megascan.errors import InputError, MissingError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer


END_OF_TEXT = "<|endoftext|>"
# Tried in this order when a Hugging Face tokenizer does not say what its end token is.
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class SubwordTokenizer:
    """A tokenizer of the ``tokenizers`` library with a known end-of-document id."""

    def __init__(self, library: LibraryTokenizer, *, eod: int, name: str) -> None:
        self._library = library
        self.eod = eod
        self.vocab_size = 1 + max(library.get_vocab(with_added_tokens=True).values())
        self.unique_identifiers = tokenizer_identifiers(name, self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with what the tokenizer's template adds (a first token)."""
        # The same ids as `encode`, a fifth faster: the places of tokens in the text are left out.
        ids: list[int] = self._library.encode_batch_fast([text])[0].ids
        return ids

    def tokenize_plainly(self, text: str) -> list[int]:
        """Return the ids of a text that has its special tokens, as a chat template writes it."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, file: Path) -> None:
        """Write the tokenizer as a tokenizer.json."""
        self._library.save(str(file))


def tokenizer_identifiers(name: str, vocab_size: int) -> OrderedDict[str, str]:
    """Return what megatron.core writes into the key of its index caches."""
    return OrderedDict(tokenizer=name, vocab_size=str(vocab_size))


def load_gpt2(vocab_file: str, merge_file: str) -> SubwordTokenizer:
    """Load a byte-level BPE from vocab.json and merges.txt; InputError for other files."""
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
    """Load a tokenizer.json, given as file or folder.

    Raises InputError when the file is damaged or has no end-of-document token.
    """
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
    """Yield the ``eos_token`` of the files that Hugging Face keeps next to a tokenizer.json."""
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


class TokenizerType(StrEnum):
    """The values of ``--tokenizer-type``."""

    GPT2_BPE = "GPT2BPETokenizer"
    HUGGING_FACE = "HuggingFaceTokenizer"
    NULL = "NullTokenizer"
    BYTE = "ByteTokenizer"


class Tokenizer(Protocol):
    """What the trainer, the preprocessor and megatron.core's datasets need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, the end-of-document id included; ids lie in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """Return the id that ends a document."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Return what megatron.core writes into the key of its index caches."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document id; raise InputError."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ids: the inverse of `tokenize`, up to normalisation."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The tokenizer flags; hashable and picklable, so workers can build their own tokenizer."""

    tokenizer_type: TokenizerType
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> TokenizerSettings:
        """Return the settings from tokenizer flags; UsageError without --tokenizer-type."""
        if arguments.tokenizer_type is None:
            choices = ", ".join(kind.value for kind in TokenizerType)
            raise UsageError(f"no tokenizer is chosen: pass --tokenizer-type, one of {choices}")
        return cls(
            tokenizer_type=TokenizerType(arguments.tokenizer_type),
            vocab_file=arguments.vocab_file,
            merge_file=arguments.merge_file,
            tokenizer_model=arguments.tokenizer_model,
            vocab_size=arguments.vocab_size,
        )

    def flags(self) -> list[str]:
        """Return the settings as command-line arguments, for the next command of a user."""
        named = {
            "--tokenizer-type": self.tokenizer_type.value,
            "--vocab-file": self.vocab_file,
            "--merge-file": self.merge_file,
            "--tokenizer-model": self.tokenizer_model,
            "--vocab-size": self.vocab_size,
        }
        arguments: list[str] = []
        for flag, value in named.items():
            if value is not None:
                arguments += [flag, str(value)]
        return arguments


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare Megatron-LM's tokenizer flags on a parser."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=[kind.value for kind in TokenizerType],
        help="GPT2BPETokenizer needs --vocab-file and --merge-file, HuggingFaceTokenizer needs "
        "--tokenizer-model, NullTokenizer needs --vocab-size, ByteTokenizer needs nothing",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a GPT-2 style BPE")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of a GPT-2 style BPE")
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="a tokenizer.json, or the folder that holds one"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="NullTokenizer: texts are integers from 0 to N-1 between blanks, N ends a document",
    )


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """Make the tokenizer that the settings ask for.

    Raises UsageError for a flag that is missing or does not belong to the type, InputError for
    a file that is missing, damaged or lacks an end-of-document token.
    """
    _check_flags(settings)
    match settings.tokenizer_type:
        case TokenizerType.GPT2_BPE:
            return load_gpt2(str(settings.vocab_file), str(settings.merge_file))
        case TokenizerType.HUGGING_FACE:
            return load_hugging_face(Path(str(settings.tokenizer_model)))
        case TokenizerType.NULL:
            return NullTokenizer(int(settings.vocab_size or 0))
        case TokenizerType.BYTE:
            return ByteTokenizer()


class NullTokenizer:
    """Reads texts that are ids already: integers from 0 to ``num_ids`` - 1, separated by blanks.

    As in Megatron-LM the end-of-document id is ``num_ids``, so the vocabulary has one id more.
    """

    def __init__(self, num_ids: int) -> None:
        if num_ids < 1:
            raise UsageError(f"--vocab-size is {num_ids}, expected at least 1 for NullTokenizer")
        self.vocab_size = num_ids + 1
        self.eod = num_ids
        self.unique_identifiers = tokenizer_identifiers("NullTokenizer", self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Return the integers of a text; InputError for other words and for ids out of range."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise InputError(
                f"NullTokenizer takes integers separated by blanks, got {_shortened(text)}"
            ) from error
        for token in ids:
            if not 0 <= token < self.eod:
                raise InputError(f"id {token} is outside of NullTokenizer's 0 to {self.eod - 1}")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the ids as text, separated by blanks."""
        return " ".join(str(token) for token in ids)


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids, 256 as the end of a document; needs no files."""

    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self.unique_identifiers = tokenizer_identifiers("ByteTokenizer", self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; end-of-document ids are dropped, broken UTF-8 is U+FFFD."""
        return bytes(token for token in ids if token < self.eod).decode("utf-8", errors="replace")


def _check_flags(settings: TokenizerSettings) -> None:
    """Raise UsageError unless exactly the flags that the type reads are given.

    A flag that is ignored would be a silent error.
    """
    needed = {
        TokenizerType.GPT2_BPE: ("vocab_file", "merge_file"),
        TokenizerType.HUGGING_FACE: ("tokenizer_model",),
        TokenizerType.NULL: ("vocab_size",),
        TokenizerType.BYTE: (),
    }[settings.tokenizer_type]
    given = [
        name
        for name in ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")
        if getattr(settings, name) is not None
    ]
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"--tokenizer-type {settings.tokenizer_type} needs {_as_flags(missing)}")
    foreign = [name for name in given if name not in needed]
    if foreign:
        raise UsageError(
            f"{_as_flags(foreign)} does not belong to --tokenizer-type {settings.tokenizer_type}: "
            "leave it out"
        )


def _as_flags(names: Iterable[str]) -> str:
    return " and ".join("--" + name.replace("_", "-") for name in names)


def _shortened(text: str, num_characters: int = 40) -> str:
    return repr(text if len(text) <= num_characters else text[:num_characters] + "…")
