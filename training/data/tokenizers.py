"""Text to token ids and back, under Megatron-LM's tokenizer names and flags.

Importing this module needs neither torch nor megatron.core, so that preprocessing workers
start quickly.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from megascan.errors import InputError, UsageError
from training.data.subword import load_gpt2, load_hugging_face, tokenizer_identifiers


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
        """Number of ids, the end-of-document id included; ids lie in [0, vocab_size)."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What megatron.core writes into the key of its index caches."""

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, without an end-of-document id; InputError when it cannot be coded."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids; the inverse of `tokenize` up to the tokenizer's own normalisation."""


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
        """Take over what `add_tokenizer_arguments` declared; UsageError without a type."""
        if arguments.tokenizer_type is None:
            raise UsageError(f"no tokenizer is chosen: pass --tokenizer-type, one of {_choices()}")
        return cls(
            tokenizer_type=TokenizerType(arguments.tokenizer_type),
            vocab_file=arguments.vocab_file,
            merge_file=arguments.merge_file,
            tokenizer_model=arguments.tokenizer_model,
            vocab_size=arguments.vocab_size,
        )

    def flags(self) -> list[str]:
        """Give the settings back as command line arguments, for a command to be typed next."""
        named = {
            "--tokenizer-type": self.tokenizer_type.value,
            "--vocab-file": self.vocab_file,
            "--merge-file": self.merge_file,
            "--tokenizer-model": self.tokenizer_model,
            "--vocab-size": self.vocab_size,
        }
        return [
            part
            for flag, value in named.items()
            if value is not None
            for part in (flag, str(value))
        ]


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
    """Texts that are already ids: integers separated by blanks, ``0 … num_ids-1``.

    As in Megatron-LM the end-of-document id is ``num_ids`` and the vocabulary one larger.
    """

    def __init__(self, num_ids: int) -> None:
        if num_ids < 1:
            raise UsageError(f"--vocab-size is {num_ids}, expected at least 1 for NullTokenizer")
        self.vocab_size = num_ids + 1
        self.eod = num_ids
        self.unique_identifiers = tokenizer_identifiers("NullTokenizer", self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Read the integers; InputError for a word that is none or lies outside the range."""
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
        """Write the integers with one blank between them."""
        return " ".join(str(token) for token in ids)


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids, 256 as the end of a document; needs no files."""

    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self.unique_identifiers = tokenizer_identifiers("ByteTokenizer", self.vocab_size)

    def tokenize(self, text: str) -> list[int]:
        """Give the bytes of the text."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Give the text of the bytes; end-of-document ids vanish, broken UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token < self.eod).decode("utf-8", errors="replace")


def _check_flags(settings: TokenizerSettings) -> None:
    """Ask for exactly the flags that the type reads: an ignored flag would be a silent error."""
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


def _choices() -> str:
    return ", ".join(kind.value for kind in TokenizerType)


def _shortened(text: str, num_characters: int = 40) -> str:
    return repr(text if len(text) <= num_characters else text[:num_characters] + "…")
