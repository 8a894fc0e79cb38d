"""`python -m training.preprocess_data`: what goes in comes out, and every way to be wrong."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megascan.errors import MissingError
from training.data.documents import EncodingSettings, encode_batches, read_line_batches
from training.data.indexed import read_index
from training.data.tokenizers import TokenizerSettings, TokenizerType
from training.preprocess_data import main

Command = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "training.preprocess_data"
BYTES = ("--tokenizer-type", "ByteTokenizer")
NULL = ("--tokenizer-type", "NullTokenizer")


def documents_of(prefix: Path) -> list[str]:
    """Read a pair back by megatron.core; the end of a document becomes a bar."""
    dataset = IndexedDataset(str(prefix))
    return [
        bytes(token for token in ids if token < 256).decode() + "|" * int(256 in ids)
        for ids in (dataset[index] for index in range(len(dataset)))
    ]


def preprocess(source: Path, prefix: Path, *arguments: str) -> int:
    """Run the command in this process, which has megatron.core loaded already."""
    return main(["--input", str(source), "--output-prefix", str(prefix), *BYTES, *arguments])


def test_documents_come_back(jsonl: Path, texts: list[str], tmp_path: Path) -> None:
    assert preprocess(jsonl, tmp_path / "out") == 0
    assert documents_of(tmp_path / "out_text_document") == texts
    index = read_index(str(tmp_path / "out_text_document"))
    assert index.lengths.tolist() == [len(text) for text in texts]
    assert index.id_type.itemsize == 2


def test_append_eod_ends_each_document(jsonl: Path, texts: list[str], tmp_path: Path) -> None:
    preprocess(jsonl, tmp_path / "out", "--append-eod")
    assert documents_of(tmp_path / "out_text_document") == [text + "|" for text in texts]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_packed_input_is_told_by_its_bytes_not_its_name(
    jsonl: Path, texts: list[str], tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    packed = tmp_path / "plain-name.jsonl"
    packed.write_bytes(pack(jsonl.read_bytes()))
    preprocess(packed, tmp_path / "out")
    assert documents_of(tmp_path / "out_text_document") == texts


def test_more_workers_write_the_same_bytes(jsonl: Path, tmp_path: Path, command: Command) -> None:
    preprocess(jsonl, tmp_path / "one", "--append-eod")
    run = command(
        *(MODULE, "--input", "in.jsonl", "--output-prefix", "three", *BYTES, "--append-eod"),
        *("--workers", "3", "--log-interval", "100"),
    )
    assert run.returncode == 0, run.stderr
    for suffix in ("bin", "idx"):
        one, three = (tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "three"))
        assert one.read_bytes() == three.read_bytes()
    last = run.stdout.splitlines()[-1]
    assert last.startswith("wrote three_text_document.bin and .idx (700 documents, ")
    assert "next: torchrun" in last
    assert "--data-path three_text_document --tokenizer-type ByteTokenizer" in last
    assert "documents/s" in run.stderr
    assert "MB/s" in run.stderr
    assert "Warning" not in run.stderr


def test_batches_keep_all_lines_and_their_numbers(jsonl: Path) -> None:
    lines = jsonl.read_bytes().splitlines(keepends=True)
    batches = list(read_line_batches([jsonl], batch_bytes=5000))
    assert [line for batch in batches for line in batch.lines] == lines
    assert len(batches) > 50
    assert all(batch.lines[0] == lines[batch.first_line - 1] for batch in batches)


def test_several_inputs_follow_one_another(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(json.dumps({"text": name}))
    inputs = [str(tmp_path / name) for name in "ab"]
    main(["--input", *inputs, "--output-prefix", str(tmp_path / "out"), *BYTES])
    assert documents_of(tmp_path / "out_text_document") == ["a", "b"]


def test_each_key_gets_its_pair(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"title": "t1", "body": "b1"}\n{"title": "", "body": "b2"}\n')
    preprocess(source, tmp_path / "out", "--json-keys", "title", "body")
    assert documents_of(tmp_path / "out_title_document") == ["t1"]
    assert documents_of(tmp_path / "out_body_document") == ["b1", "b2"]


def test_marks_blank_lines_and_a_missing_last_newline_are_no_matter(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": ""}\n{"text": "b"}')
    preprocess(source, tmp_path / "out")
    assert documents_of(tmp_path / "out_text_document") == ["a", "b"]


def test_skip_invalid_counts_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n{"text"\n{"other": "x"}\n{"text": 3}\n[]\n{"text": "b"}\n')
    preprocess(source, tmp_path / "out", "--skip-invalid")
    assert documents_of(tmp_path / "out_text_document") == ["a", "b"]
    assert "left out 4 invalid lines" in capsys.readouterr().out


def test_force_replaces_and_a_failure_does_not(tmp_path: Path, command: Command) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "old"}')
    preprocess(source, tmp_path / "out")
    arguments = (MODULE, "--input", "in.jsonl", "--output-prefix", "out", *BYTES)
    refused = command(*arguments)
    assert refused.returncode == 1
    assert refused.stderr == "error: out_text_document.bin exists: pass --force to replace it\n"

    source.write_text('{"text": "new"}\nbroken')
    assert command(*arguments, "--force").returncode == 1
    assert documents_of(tmp_path / "out_text_document") == ["old"]
    assert not list(tmp_path.glob("*.partial*"))

    source.write_text('{"text": "new"}')
    preprocess(source, tmp_path / "out", "--force")
    assert documents_of(tmp_path / "out_text_document") == ["new"]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', (), "in.jsonl:2: not a JSON document"),
        (b'{"text": "a"}\n\n"b"\n', (), "in.jsonl:3: expected a JSON object, got str"),
        (b'{"text": "\xff"}\n', (), "in.jsonl:1: not a JSON document"),
        (b'{"body": "a"}\n', (), "in.jsonl:1: no key 'text' (keys there: body)"),
        (b'{"text": null}\n', (), "in.jsonl:1: key 'text' holds NoneType"),
        (b'{"text": "a"}\n{"text": 1}\n', ("--workers", "2"), "in.jsonl:2: key 'text' holds int"),
        (b"", (), "no document for out_text_document, nothing was written"),
        (b'\n{"text": ""}\n', (), "no document for out_text_document"),
        (b"broken\n", ("--skip-invalid",), "no document for out_text_document"),
        (lzma.compress(b'{"text": "a"}\n' * 9)[:60], (), "cut off after line"),
        (gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], (), "cut off after line"),
        (b"\x28\xb5\x2f\xfd\x00\x00", (), "packed with Zstandard"),
    ],
)
def test_input_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, command: Command, content: bytes, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    run = command(MODULE, "--input", "in.jsonl", "--output-prefix", "out", *BYTES, *arguments)
    assert (run.returncode, run.stdout) == (1, "")
    assert message in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert len(run.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--input", "absent", "--output-prefix", "out", *BYTES), 1, "cannot read absent"),
        (("--input", ".", "--output-prefix", "out", *BYTES), 1, ". is a folder"),
        (("--input", "pipe", "--output-prefix", "out", *BYTES), 1, "pipe is a pipe or a device"),
        (
            ("--input", "in", "--output-prefix", "taken", *BYTES),
            1,
            "taken_text_document.json exists: pass --force",
        ),
        (
            ("--input", "in", "--output-prefix", "in/out", *BYTES),
            1,
            "cannot write in/out.partial (Not",
        ),
        (("--input", "in", "--output-prefix", "out"), 2, "pass --tokenizer-type"),
        (("--input", "in", "--output-prefix", "out", *BYTES, "--workers", "0"), 2, "--workers is"),
        (("--input", "in", "--output-prefix", "out", *BYTES, "--workers", "99999"), 2, "at most"),
        (("--input", "in", "--output-prefix", "", *BYTES), 2, "--output-prefix is empty"),
        (
            ("--input", "in", "--output-prefix", "out", *BYTES, "--log-interval", "0"),
            2,
            "--log-interval is 0",
        ),
        (
            ("--input", "in", "--output-prefix", "out", *BYTES, "--json-keys", "a", "a"),
            2,
            "names a key twice",
        ),
        (
            ("--input", "in", "--output-prefix", "out", *NULL),
            2,
            "needs --vocab-size",
        ),
        (
            ("--input", "in", "--output-prefix", "out", *NULL, "--vocab-size", "5"),
            1,
            "in:1: NullTokenizer takes integers",
        ),
        (("--output-prefix", "out", *BYTES), 2, "--input"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    tmp_path: Path, command: Command, arguments: tuple[str, ...], code: int, message: str
) -> None:
    (tmp_path / "in").write_text('{"text": "a"}')
    (tmp_path / "taken_text_document.json").touch()
    os.mkfifo(tmp_path / "pipe")
    run = command(MODULE, *arguments)
    assert (run.returncode, run.stdout) == (code, "")
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_workers_load_no_torch() -> None:
    """What a spawned worker imports is what the command imports: it must start quickly."""
    probe = (
        "import sys, training.preprocess_data, training.data.tokenizers\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment
    )
    assert run.stdout == "[]\n", run.stderr


def test_a_killed_worker_is_one_sentence(jsonl: Path) -> None:
    settings = EncodingSettings(
        tokenizer=TokenizerSettings(tokenizer_type=TokenizerType.BYTE),
        json_keys=("text",),
        append_eod=False,
    )
    endless = itertools.cycle(read_line_batches([jsonl], batch_bytes=5000))
    encoded = encode_batches(settings, endless, num_workers=2)
    next(encoded)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(MissingError, match="pass fewer --workers"):
        for _ in encoded:
            pass
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_command(tmp_path: Path, jsonl: Path, end: signal.Signals) -> None:
    often = [str(jsonl)] * 1000  # more than a gigabyte
    arguments = ("--input", *often, "--output-prefix", "out", *BYTES, "--workers", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments, "--log-interval", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    assert "documents/s" in process.stderr.readline()
    if end == signal.SIGINT:  # a terminal sends it to the whole group
        os.killpg(process.pid, end)
    else:
        process.send_signal(end)
    *_, last = process.stderr.read().splitlines()  # returns when no process holds it any more
    assert process.wait(timeout=30) == (130 if end == signal.SIGINT else -end)
    if end == signal.SIGINT:
        assert last == "interrupted"
    assert not list(tmp_path.glob("out_text*"))


def test_a_full_disk_is_one_sentence(jsonl: Path, tmp_path: Path) -> None:
    typed = shlex.join(
        [sys.executable, "-m", MODULE, "--input", str(jsonl), "--output-prefix", "out", *BYTES]
    )
    run = subprocess.run(
        ["bash", "-c", f"ulimit -f 64; exec {typed}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: cannot write out.partial/text.bin (")
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.glob("out*"))
