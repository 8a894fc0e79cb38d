"""PREFIX.json: what the ids of a data set mean, which Megatron's own two files do not say."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import orjson

from megascan.errors import InputError
from training.data.index_writer import DataSize, reported
from training.data.tokenizers import Tokenizer, TokenizerSettings


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What must be equal for the ids of two data sets to mean the same.

    ``files`` has the SHA-256 of each of the tokenizer's files by flag, so that a tokenizer may be
    moved but not changed.
    """

    tokenizer_type: str
    vocab_size: int
    eod: int
    files: dict[str, str]
    append_eod: bool

    @classmethod
    def of(cls, settings: TokenizerSettings, tokenizer: Tokenizer, *, append_eod: bool) -> Meaning:
        """Read the tokenizer's files; InputError when one cannot be read."""
        named = {
            "--vocab-file": settings.vocab_file,
            "--merge-file": settings.merge_file,
            "--tokenizer-model": settings.tokenizer_model,
        }
        return cls(
            tokenizer_type=settings.tokenizer_type.value,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            files={flag: _digest(Path(name)) for flag, name in named.items() if name is not None},
            append_eod=append_eod,
        )

    def difference(self, other: Meaning) -> str | None:
        """Say where two differ first, as ``append_eod (True and False)``; None when they agree."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs and field.name == "files":
                return f"the contents of {' and '.join(_unequal(ours, theirs))}"
            if ours != theirs:
                return f"{field.name} ({ours} and {theirs})"
        return None


def write_description(path: Path, meaning: Meaning, size: DataSize) -> None:
    """Write ``PREFIX.json``."""
    content = orjson.dumps(
        {"meaning": asdict(meaning), **asdict(size)},
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
    )
    with reported(path):
        path.write_bytes(content)


def read_description(prefix: str) -> Meaning | None:
    """Read ``PREFIX.json``; None when there is none, InputError when it is damaged."""
    path = Path(f"{prefix}.json")
    if not path.exists():
        return None
    try:
        return Meaning(**orjson.loads(path.read_bytes())["meaning"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} does not describe a data set ({error}): remove it, or write it again with "
            "python -m training.preprocess_data"
        ) from error


def _digest(path: Path) -> str:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _unequal(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return sorted(flag for flag in {*ours, *theirs} if ours.get(flag) != theirs.get(flag))
