"""Build a small real corpus and its tokenizer from the texts of the installed Python.

Writes DIR/corpus.jsonl, one document a line under "text" with its "source", and DIR/vocab.json
and DIR/merges.txt, a byte-level BPE of GPT-2's kind trained on it.

For a machine without data: documentation strings, manuals, licences, read-me files. Modules are
parsed with `ast`, never imported. The order is fixed (topics of the language reference, texts of
the installed packages, documentation strings of the standard library, then of the packages, each
sorted by path), so one installation always gives the same corpus; a limit on its size cuts the end.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import math
import re
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from megascan.errors import InputError, MissingError, OutputError, UsageError, report_errors
from megascan.overwriting import workplace
from training.data.tokenizers import END_OF_TEXT, TokenizerSettings, TokenizerType

MIN_CHARACTERS = 80
PIECE_CHARACTERS = 4000
"""Long texts are cut at blank lines into documents of about this length."""

MIN_LETTER_RATIO = 0.7
"""Prose has more letters and blanks than this; tables, lists of hashes and ASCII art have less."""

# Folders whose strings describe nothing (tests) or are tables of letters (encodings).
_LEFT_OUT = frozenset(
    {"test", "tests", "testing", "lib2to3", "turtledemo", "encodings", "idlelib", "__pycache__"}
    | {"site-packages", "dist-packages", "_vendor", "pydoc_data"}
)
_TEXT_NAME = re.compile(
    r"(?i)^(metadata|(license|licence|copying|notice|readme)\b.*|.*\.(md|rst))$"
)
_TEXT_SUFFIXES = frozenset({"", ".txt", ".md", ".rst", ".apache", ".bsd", ".mit"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its source, as in ``stdlib/json/decoder.py:JSONDecoder``; never a full path."""

    text: str
    source: str


def installed_documents() -> Iterator[Document]:
    """Yield all documents of the running Python in a fixed order, equal texts once."""
    standard = Path(sysconfig.get_path("stdlib"))
    packages = sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})
    return distinct(documents_under(standard, packages))


def documents_under(standard: Path, packages: Iterable[Path]) -> Iterator[Document]:
    """Yield all documents of a standard library folder and of package folders, even repeated."""
    roots = [root for root in packages if root.is_dir()]
    yield from _topics(standard / "pydoc_data" / "topics.py")
    for root in roots:
        yield from _texts(root)
    yield from _docstrings(standard, "stdlib")
    for root in roots:
        yield from _docstrings(root, "packages")


def distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents that are prose and that differ from all before.

    Texts are compared without case, blanks, numbers and lines with a copyright: the same licence of
    two authors is one text.
    """
    seen: set[bytes] = set()
    for document in documents:
        key = _comparison_key(document.text)
        if key not in seen and is_prose(document.text):
            seen.add(key)
            yield document


def is_prose(text: str) -> bool:
    """Return whether a text is long enough, mostly letters, and can be written as UTF-8."""
    letters = sum(
        character.isascii() and (character.isalpha() or character == " ") for character in text
    )
    surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    return len(text) >= MIN_CHARACTERS and letters >= MIN_LETTER_RATIO * len(text) and not surrogate


def docstrings_of(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield qualified name and cleaned documentation string of everything a module defines.

    A module that this Python cannot parse gives nothing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's modules
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from _docstrings_in(tree, "")


def pieces_of(text: str, *, max_characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield pieces of a text, cut at blank lines; only a single paragraph may be longer than
    `max_characters`.
    """
    piece: list[str] = []
    length = 0
    for paragraph in re.split(r"\n\s*\n", text):
        if piece and length + len(paragraph) > max_characters:
            yield "\n\n".join(piece)
            piece, length = [], 0
        piece.append(paragraph.rstrip())
        length += len(paragraph)
    if piece:
        yield "\n\n".join(piece)


def _docstrings_in(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and len(text) >= MIN_CHARACTERS:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_in(child, f"{name}.{child.name}" if name else child.name)


def _docstrings(root: Path, label: str) -> Iterator[Document]:
    for path, relative in _files(root, ".py"):
        source = _read(path)
        # Parsing takes most of the time: look for any documentation string first.
        if b'"""' not in source and b"'''" not in source:
            continue
        for name, text in docstrings_of(source):
            yield Document(text=text, source=f"{label}/{relative}:{name}".rstrip(":"))


def _topics(path: Path) -> Iterator[Document]:
    """Yield the language reference that `help()` shows: a dictionary of long strings."""
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(_read(path))):
        if isinstance(node, ast.Dict):
            for topic, text in zip(node.keys, node.values, strict=True):
                if isinstance(topic, ast.Constant) and isinstance(text, ast.Constant):
                    for piece in pieces_of(str(text.value)):
                        yield Document(text=piece, source=f"stdlib/topics:{topic.value!s}")


def _texts(root: Path) -> Iterator[Document]:
    for path, relative in _files(root, ""):
        if not _TEXT_NAME.match(path.name) or path.suffix.lower() not in _TEXT_SUFFIXES:
            continue
        text = _read(path).decode("utf-8", errors="replace").replace("\r\n", "\n")
        if path.name == "METADATA":
            text = text.partition("\n\n")[2]  # the description follows the header
        for piece in pieces_of(inspect.cleandoc(text)):
            yield Document(text=piece, source=f"packages/{relative}")


def _files(root: Path, suffix: str) -> Iterator[tuple[Path, str]]:
    """Yield files below a folder, sorted by relative path, without those in `_LEFT_OUT` folders."""
    found = []
    for path in root.rglob(f"*{suffix}"):
        relative = path.relative_to(root)
        if not _LEFT_OUT.intersection(relative.parts) and path.is_file():
            found.append((relative.as_posix(), path))
    for relative_name, path in sorted(found):
        yield path, relative_name


def _read(path: Path) -> bytes:
    """Return a file's bytes; none when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _comparison_key(text: str) -> bytes:
    lines = [line for line in text.lower().splitlines() if "copyright" not in line]
    words = re.findall(r"[a-z]+", " ".join(lines))
    return hashlib.blake2b(" ".join(words).encode(), digest_size=16).digest()


_NUM_BYTES = 256
_FILES = ("vocab.json", "merges.txt", "corpus.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.vocab_size <= _NUM_BYTES:
        raise UsageError(
            f"--vocab-size is {options.vocab_size}, expected at least {_NUM_BYTES + 1}: "
            f"the {_NUM_BYTES} bytes and {END_OF_TEXT}"
        )
    if not 0 < options.max_megabytes < math.inf:
        raise UsageError(f"--max-megabytes is {options.max_megabytes:g}, expected more than 0")
    folder = Path(options.output)
    _check_free(folder, force=options.force)
    documents = list(first_documents(installed_documents(), int(options.max_megabytes * 1e6)))
    if not documents:
        raise InputError("this Python has no texts that fit: pass a larger --max-megabytes")
    print(f"{len(documents)} documents, training a tokenizer on them", file=sys.stderr)
    try:
        with workplace(folder) as place:
            num_tokens = _train_tokenizer(documents, options.vocab_size, place)
            size_bytes = _write_corpus(documents, place / "corpus.jsonl")
            for name in _FILES:
                (place / name).replace(folder / name)
    except OSError as error:
        raise OutputError(f"cannot write to {folder} ({error.strerror})") from error
    print(
        f"wrote {folder / 'corpus.jsonl'} ({len(documents)} documents, {size_bytes / 1e6:.2f} MB), "
        f"vocab.json ({num_tokens} tokens) and merges.txt; next: {_next_command(folder)}"
    )
    return 0


def first_documents(documents: Iterable[Document], max_bytes: int) -> Iterator[Document]:
    """Yield documents up to the one that would pass ``max_bytes`` of UTF-8 text."""
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


def _check_free(folder: Path, *, force: bool) -> None:
    if folder.is_file():
        raise OutputError(f"{folder} is a file: name a folder")
    for name in _FILES:
        if (folder / name).exists() and not force:
            raise OutputError(f"{folder / name} exists: pass --force to replace it")


def _train_tokenizer(documents: Sequence[Document], vocab_size: int, folder: Path) -> int:
    """Write vocab.json and merges.txt; return the number of tokens learned."""
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
    """Write the documents as JSON Lines; return the size in bytes."""
    with path.open("wb") as file:
        for document in documents:
            line = {"text": document.text, "source": document.source}
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return file.tell()


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
