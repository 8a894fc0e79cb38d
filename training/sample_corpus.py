"""Build a small real corpus and its tokenizer from the texts of the installed Python.

Writes DIR/corpus.jsonl, one document a line under "text" with its "source", and DIR/vocab.json
and DIR/merges.txt, a byte-level BPE of GPT-2's kind trained on it.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from megascan.errors import InputError, MissingError, OutputError, UsageError, report_errors
from training.data.corpus import Document, installed_documents
from training.data.subword import END_OF_TEXT
from training.data.tokenizers import TokenizerSettings, TokenizerType

_NUM_BYTES = 256
_FILES = ("corpus.jsonl", "vocab.json", "merges.txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.vocab_size <= _NUM_BYTES:
        raise UsageError(
            f"--vocab-size is {options.vocab_size}, expected at least {_NUM_BYTES + 1}: "
            f"the {_NUM_BYTES} bytes and {END_OF_TEXT}"
        )
    if not 0 < options.max_megabytes < math.inf:
        raise UsageError(f"--max-megabytes is {options.max_megabytes:g}, expected more than 0")
    folder = Path(options.output)
    _prepare(folder, force=options.force)
    documents = list(first_documents(installed_documents(), int(options.max_megabytes * 1e6)))
    if not documents:
        raise InputError("this Python has no texts that fit: pass a larger --max-megabytes")
    print(f"{len(documents)} documents, training a tokenizer on them", file=sys.stderr)
    try:
        num_tokens = _train_tokenizer(documents, options.vocab_size, folder)
        size_bytes = _write_corpus(documents, folder / "corpus.jsonl")
    except OSError as error:
        raise OutputError(f"cannot write to {folder} ({error.strerror})") from error
    print(
        f"wrote {folder / 'corpus.jsonl'} ({len(documents)} documents, {size_bytes / 1e6:.2f} MB), "
        f"vocab.json ({num_tokens} tokens) and merges.txt; next: {_next_command(folder)}"
    )
    return 0


def first_documents(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Documents up to the one that would pass ``max_bytes`` of UTF-8 text."""
    total_bytes = 0
    for document in documents:
        total_bytes += len(document.text.encode())
        if total_bytes > max_bytes:
            return
        yield document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.sample_corpus", description=__doc__)
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--vocab-size", type=int, default=4096, metavar="N", help="tokens to learn, default 4096"
    )
    parser.add_argument(
        "--max-megabytes", type=float, default=4.0, metavar="M", help="size of the text, default 4"
    )
    parser.add_argument("--force", action="store_true", help="replace files that exist")
    return parser


def _prepare(folder: Path, *, force: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder} ({error.strerror})") from error
    for name in _FILES:
        if (folder / name).exists() and not force:
            raise OutputError(f"{folder / name} exists: pass --force to replace it")


def _train_tokenizer(documents: Sequence[Document], vocab_size: int, folder: Path) -> int:
    """Write vocab.json and merges.txt; returns the number of tokens learned."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingError(
            'the package tokenizers is not installed: pip install "megascan[train]"'
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    tokenizer.model.save(str(folder))
    return int(tokenizer.get_vocab_size())


def _write_corpus(documents: Iterable[Document], path: Path) -> int:
    """Write the documents under a name of their own, then the final one; returns the bytes."""
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with temporary.open("wb") as file:
        for document in documents:
            line = {"text": document.text, "source": document.source}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        size_bytes = file.tell()
    temporary.replace(path)
    return size_bytes


def _next_command(folder: Path) -> str:
    tokenizer = TokenizerSettings(
        tokenizer_type=TokenizerType.GPT2_BPE,
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    files = ["--input", str(folder / "corpus.jsonl"), "--output-prefix", str(folder / "corpus")]
    flags = shlex.join([*files, "--append-eod", "--workers", "2", *tokenizer.flags()])
    return f"python -m training.preprocess_data {flags}"


if __name__ == "__main__":
    sys.exit(report_errors(main))
