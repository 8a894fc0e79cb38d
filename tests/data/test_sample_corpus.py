"""The sample corpus: real, large enough, the same each time, and usable by the next command."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from training.data.tokenizers import TokenizerSettings, TokenizerType, build_tokenizer
from training.sample_corpus import (
    Document,
    distinct,
    docstrings_of,
    documents_under,
    first_documents,
    is_prose,
    pieces_of,
)

Command = Callable[..., subprocess.CompletedProcess[str]]

MODULE = "training.sample_corpus"
PROSE = "The quick brown fox jumps over the lazy dog while the rain falls on the green hills. "


def test_two_runs_write_the_same_real_corpus(command: Command, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = command(MODULE, "-o", name, "--vocab-size", "1000", "--max-megabytes", "3")
        assert run.returncode == 0, run.stderr
    for file in ("corpus.jsonl", "vocab.json", "merges.txt"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    lines = (tmp_path / "one" / "corpus.jsonl").read_text().splitlines()
    documents = [json.loads(line) for line in lines]
    assert len(documents) >= 600  # pieces of 4,000 characters at most, by what is installed
    assert 1.5e6 < sum(len(document["text"]) for document in documents) < 3e6
    assert all(set(document) == {"text", "source"} for document in documents)
    folder = sysconfig.get_path("stdlib")
    assert not any(document["source"].startswith(("/", folder)) for document in documents)
    vocab = json.loads((tmp_path / "one" / "vocab.json").read_text())
    assert len(vocab) == 1000
    assert "<|endoftext|>" in vocab
    tokenizer = build_tokenizer(
        TokenizerSettings(
            tokenizer_type=TokenizerType.GPT2_BPE,
            vocab_file=str(tmp_path / "one" / "vocab.json"),
            merge_file=str(tmp_path / "one" / "merges.txt"),
        )
    )
    text = documents[0]["text"]
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert len(ids) < len(text) / 2


def test_the_next_command_works_as_printed(command: Command, tmp_path: Path) -> None:
    first = command(MODULE, "-o", "dir with blank", "--vocab-size", "300", "--max-megabytes", "0.2")
    typed = re.search(r"next: python -m (training\.\S+) (.*)", first.stdout.splitlines()[-1])
    assert typed is not None
    assert "'dir with blank/corpus.jsonl'" in typed[2]
    arguments = typed[2].replace("'dir with blank", "dir@with@blank").replace("'", "").split()
    second = command(typed[1], *(argument.replace("@", " ") for argument in arguments))
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "dir with blank" / "corpus_text_document.idx").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-o", "out", "--vocab-size", "256"), 2, "--vocab-size is 256, expected at least 257"),
        (("-o", "out", "--max-megabytes", "0"), 2, "--max-megabytes is 0"),
        (("-o", "out", "--max-megabytes", "nan"), 2, "--max-megabytes is nan"),
        (("-o", "out", "--max-megabytes", "inf"), 2, "--max-megabytes is inf"),
        (("-o", "out", "--max-megabytes", "0.00001"), 1, "pass a larger --max-megabytes"),
        (("-o", "file"), 1, "file is a file: name a folder"),
        (("-o", "full"), 1, "merges.txt exists: pass --force"),
        ((), 2, "-o/--output"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "merges.txt").touch()
    run = command(MODULE, *arguments)
    assert (run.returncode, run.stdout) == (code, "")
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_docstrings_are_read_without_running_the_module() -> None:
    source = f'"""{PROSE}"""\nraise SystemExit\nclass A:\n    def f(self):\n        """{PROSE}"""\n'
    assert [name for name, _ in docstrings_of(source.encode())] == ["", "A.f"]
    assert list(docstrings_of(b"def broken(:")) == []
    assert list(docstrings_of(b"\x00")) == []


def test_texts_of_folders_have_a_fixed_order_and_a_source(tmp_path: Path) -> None:
    standard, packages = tmp_path / "lib", tmp_path / "packages"
    for file, text in {
        standard / "b.py": f'"""{PROSE} b"""',
        standard / "a.py": f'"""{PROSE} a"""',
        standard / "test" / "c.py": f'"""{PROSE} c"""',
        standard / "pydoc_data" / "topics.py": f'topics = {{"with": "{PROSE} topic"}}',
        packages / "p-1.dist-info" / "METADATA": f"Name: p\n\n{PROSE} p",
        packages / "p" / "data.txt": f"{PROSE} data",
        packages / "p" / "x.py": f'"""{PROSE} x"""',
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    documents = list(documents_under(standard, [packages, tmp_path / "absent"]))
    assert [(document.source, document.text.removeprefix(PROSE)) for document in documents] == [
        ("stdlib/topics:with", " topic"),
        ("packages/p-1.dist-info/METADATA", " p"),
        ("stdlib/a.py", " a"),
        ("stdlib/b.py", " b"),
        ("packages/p/x.py", " x"),
    ]


def test_the_same_text_counts_once() -> None:
    variants = [PROSE, PROSE.upper(), PROSE.replace(" ", "\n"), f"Copyright 2001 Me\n{PROSE}"]
    documents = [Document(text=text, source=str(i)) for i, text in enumerate(variants)]
    assert [document.source for document in distinct(documents)] == ["0"]


@pytest.mark.parametrize("text", ["short", "0x1f " * 50, "| - | - |\n" * 20, PROSE + "\ud800"])
def test_what_is_no_prose(text: str) -> None:
    assert is_prose(PROSE)
    assert not is_prose(text)


def test_long_texts_are_cut_at_blank_lines() -> None:
    paragraphs = [f"paragraph {i} " + "x" * 30 for i in range(20)]
    pieces = list(pieces_of("\n\n".join(paragraphs), max_characters=100))
    assert "\n\n".join(pieces) == "\n\n".join(paragraphs)
    assert max(map(len, pieces)) <= 104
    assert len(pieces) == 10


def test_the_limit_counts_bytes_and_cuts_the_end() -> None:
    documents = [Document(text="é" * 10, source=str(i)) for i in range(5)]
    assert [document.source for document in first_documents(documents, 59)] == ["0", "1"]
