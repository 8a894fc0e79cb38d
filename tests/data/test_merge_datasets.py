"""`python -m training.merge_datasets`: what preprocessing all at once gives, or a refusal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from training.merge_datasets import main as merge
from training.preprocess_data import main as preprocess

Command = Callable[..., subprocess.CompletedProcess[str]]

MODULE = "training.merge_datasets"
BYTES = ("--tokenizer-type", "ByteTokenizer")


@pytest.fixture
def shards(tmp_path: Path, texts: list[str]) -> list[str]:
    """Three data sets of the texts, of unequal size; returns their prefixes."""
    prefixes = []
    for name, part in {"a": texts[:1], "b": texts[1:500], "c": texts[500:]}.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        preprocess(["--input", str(source), "--output-prefix", str(tmp_path / name), *BYTES])
        prefixes.append(str(tmp_path / f"{name}_text_document"))
    return prefixes


def test_merged_is_what_preprocessing_all_at_once_gives(
    shards: list[str], jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(["--input", str(jsonl), "--output-prefix", str(tmp_path / "whole"), *BYTES])
    assert merge(["--input", *shards, "--output-prefix", str(tmp_path / "all")]) == 0
    for suffix in ("bin", "idx", "json"):
        merged = (tmp_path / f"all.{suffix}").read_bytes()
        assert merged == (tmp_path / f"whole_text_document.{suffix}").read_bytes()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"wrote {tmp_path / 'all'}.bin and .idx (700 documents, ")
    assert not list(tmp_path.glob("*.merging"))


@pytest.mark.parametrize("vocab_size", [65499, 65500])
def test_indices_are_those_of_megatrons_own_builder(tmp_path: Path, vocab_size: int) -> None:
    """For both types of id, by the library's writer and read back by the library."""
    lists = [[1, 2, 3], [vocab_size - 2], [7] * 1000]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "{" ".join(map(str, ids))}"}}\n' for ids in lists))
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size - 1)]
    preprocess(["--input", str(source), "--output-prefix", str(tmp_path / "ours"), *null])
    id_type = np.uint16 if vocab_size < 65500 else np.int32
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=id_type)
    for ids in lists:
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        ours = (tmp_path / f"ours_text_document.{suffix}").read_bytes()
        assert ours == (tmp_path / f"theirs.{suffix}").read_bytes()
    twice = [str(tmp_path / "theirs"), str(tmp_path / "ours_text_document.bin")]
    merge(["--input", *twice, "--output-prefix", str(tmp_path / "both")])
    assert [ids.tolist() for ids in IndexedDataset(str(tmp_path / "both"))] == lists * 2
    assert not (tmp_path / "both.json").exists()  # half of it is of unknown meaning


def test_data_without_a_description_is_merged_with_a_word_about_it(
    shards: list[str], tmp_path: Path, command: Command
) -> None:
    Path(f"{shards[1]}.json").unlink()
    run = command(MODULE, "--input", *shards, "--output-prefix", "all")
    assert run.returncode == 0
    assert f"{shards[1]}: no .json tells the tokenizer, so it was not compared" in run.stderr


def test_another_tokenizer_is_refused(shards: list[str], tmp_path: Path, command: Command) -> None:
    source = str(tmp_path / "a.jsonl")
    preprocess(["--input", source, "--output-prefix", str(tmp_path / "eod"), *BYTES,
                "--append-eod"])  # fmt: skip
    other = str(tmp_path / "eod_text_document")
    run = command(MODULE, "--input", *shards, other, "--output-prefix", "all")
    assert (run.returncode, run.stdout) == (1, "")
    assert f"{shards[0]} and {other} differ in append_eod (False and True)" in run.stderr
    description = json.loads(Path(f"{other}.json").read_text())
    description["meaning"] |= {"append_eod": False, "files": {"--vocab-file": "0" * 64}}
    Path(f"{other}.json").write_text(json.dumps(description))
    run = command(MODULE, "--input", *shards, other, "--output-prefix", "all")
    assert "differ in the contents of --vocab-file" in run.stderr
    Path(f"{other}.json").write_text('{"meaning": 3}')
    run = command(MODULE, "--input", *shards, other, "--output-prefix", "all")
    assert "does not describe a data set" in run.stderr
    assert not list(tmp_path.glob("all*"))


def test_another_type_of_id_is_refused(
    shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": "1 2 3"}\n')
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]
    preprocess(
        ["--input", str(tmp_path / "n.jsonl"), "--output-prefix", str(tmp_path / "n"), *null]
    )
    run = command(MODULE, "--input", *shards, "n_text_document", "--output-prefix", "all")
    assert run.returncode == 1
    assert "n_text_document stores ids as int32 and" in run.stderr


def test_sentences_are_refused(tmp_path: Path, command: Command) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "two.bin"), dtype=np.uint16)
    builder.add_document([1, 2, 3], [2, 1])
    builder.finalize(str(tmp_path / "two.idx"))
    run = command(MODULE, "--input", "two", "two", "--output-prefix", "all")
    assert run.returncode == 1
    assert "two.idx has 2 sequences in 1 documents" in run.stderr


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("a_text_document", 1, "a_text_document.bin: is what this command reads"),
        ("there", 1, "there.bin exists: pass --force to replace it"),
        ("notes", 1, "notes.json exists: pass --force to replace it"),
        ("shared", 1, "shared.merging would be this command's folder, and holds other files"),
        ("a.jsonl/all", 1, "cannot write a.jsonl/all.merging (Not a directory)"),
    ],
)
def test_wrong_outputs_are_one_sentence(
    shards: list[str], tmp_path: Path, command: Command, output: str, code: int, message: str
) -> None:
    (tmp_path / "there.bin").touch()
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "shared.merging").mkdir()
    (tmp_path / "shared.merging" / "notes").write_text("mine")
    run = command(MODULE, "--input", "a_text_document", "b_text_document.idx", "--output-prefix", output)  # fmt: skip  # noqa: E501
    assert (run.returncode, run.stdout) == (code, "")
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert (tmp_path / "notes.json").read_text() == "mine"
    assert (tmp_path / "shared.merging" / "notes").read_text() == "mine"


def test_damaged_and_missing_inputs_are_one_sentence(shards: list[str], command: Command) -> None:
    Path(f"{shards[2]}.bin").write_bytes(b"")
    run = command(MODULE, "--input", *shards, "--output-prefix", "all")
    assert "c_text_document.bin has 0 bytes and" in run.stderr
    run = command(MODULE, "--input", "nowhere", "--output-prefix", "all")
    assert "nowhere.bin is not there" in run.stderr
    assert run.returncode == 1


def test_force_replaces(shards: list[str], tmp_path: Path) -> None:
    output = ["--output-prefix", str(tmp_path / "all")]
    merge(["--input", *shards, *output])
    merge(["--input", *shards[:2], *output, "--force"])
    assert len(IndexedDataset(str(tmp_path / "all"))) == 500
