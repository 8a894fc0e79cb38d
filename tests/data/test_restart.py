"""A run that was killed is continued by the same command, to the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from training.data.documents import Position, read_line_batches
from training.preprocess_data import main

Command = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "training.preprocess_data"
# The command itself, with checkpoints so often that little data is enough.
OFTEN = """
import sys
from megascan.errors import report_errors
from training import preprocess_data
from training.data import preprocessing as restart
restart.CHECKPOINT_INTERVAL_S = 0.1
sys.exit(report_errors(preprocess_data.main))
"""
BYTES = ("--tokenizer-type", "ByteTokenizer")


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OFTEN, *arguments, "--log-interval", "1000000"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_after_checkpoint(process: subprocess.Popen[str], state: Path, newer_than: float) -> None:
    """kill -9 of the command alone, as the kernel does when memory is short."""
    for _ in range(3000):
        if state.exists() and state.stat().st_mtime > newer_than:
            break
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.stderr is not None
    process.stderr.read()  # returns when the workers are gone, too
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("packed", "workers"), [(False, "2"), (True, "1")])
def test_killed_twice_the_same_command_gives_the_same_bytes(
    tmp_path: Path, texts: list[str], packed: bool, workers: str, command: Command
) -> None:
    lines = "".join(json.dumps({"text": text, "title": text[:12]}) + "\n" for text in texts)
    (tmp_path / "first.jsonl").write_text(lines)
    content = (lines * 15).encode()
    (tmp_path / "long").write_bytes(lzma.compress(content, preset=0) if packed else content)
    arguments = ("--input", "first.jsonl", "long", *BYTES, "--append-eod", "--workers", workers,
                 "--json-keys", "text", "title", "--output-prefix")  # fmt: skip
    state = tmp_path / "out.partial" / "checkpoint"
    newer_than, seen = 0.0, []
    for _ in range(2):
        kill_after_checkpoint(start(tmp_path, *arguments, "out"), state, newer_than)
        assert not list(tmp_path.glob("out_*"))
        newer_than = state.stat().st_mtime
        seen.append(json.loads(state.read_text())["checkpoint"]["sizes"][0]["num_documents"])
    assert 0 < seen[0] < seen[1]

    resumed = command(MODULE, *arguments, "out")
    assert resumed.returncode == 0, resumed.stderr
    assert f"going on after the {seen[1]} documents of an interrupted run" in resumed.stderr
    assert f"({16 * len(texts)} documents," in resumed.stdout
    assert not (tmp_path / "out.partial").exists()
    assert command(MODULE, *arguments, "whole").returncode == 0
    for key in ("text", "title"):
        whole = pair(tmp_path / f"whole_{key}_document")
        assert pair(tmp_path / f"out_{key}_document") == whole


@pytest.fixture
def interrupted(tmp_path: Path, jsonl: Path, command: Command) -> Path:
    """A run over `jsonl` that a broken line near the end of a second file has ended."""
    (tmp_path / "second.jsonl").write_bytes(jsonl.read_bytes() + b"broken\n")
    run = command(MODULE, "--input", "in.jsonl", "second.jsonl", "--output-prefix", "out", *BYTES)
    assert run.returncode == 1
    *_, kept, error = run.stderr.splitlines()
    assert kept == "what was done is kept in out.partial: the same command goes on from there"
    assert error.startswith("error: second.jsonl:701: not a JSON document")
    assert (tmp_path / "out.partial" / "checkpoint").exists()
    return tmp_path


def test_an_error_keeps_what_was_done_and_leaving_lines_out_goes_on(
    interrupted: Path, command: Command
) -> None:
    arguments = (MODULE, "--input", "in.jsonl", "second.jsonl", *BYTES, "--skip-invalid")
    resumed = command(*arguments, "--output-prefix", "out")
    assert "going on after the" in resumed.stderr
    assert "left out 1 invalid lines" in resumed.stdout
    command(*arguments, "--output-prefix", "whole")
    whole = pair(interrupted / "whole_text_document")
    assert pair(interrupted / "out_text_document") == whole


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        (("second.jsonl", *BYTES, "--append-eod"), "append_eod (False and True)"),
        (("second.jsonl", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
         "tokenizer_type (ByteTokenizer and NullTokenizer)"),
        (("second.jsonl", *BYTES, "--json-keys", "title"), "--json-keys (text and title)"),
        (("in.jsonl", *BYTES), "--input (second.jsonl and in.jsonl)"),
        (("second.jsonl", "in.jsonl", *BYTES), "--input (2 and 3 files)"),
    ],
)  # fmt: skip
def test_other_settings_are_refused_until_forced(
    interrupted: Path, command: Command, arguments: tuple[str, ...], difference: str
) -> None:
    state = (interrupted / "out.partial" / "checkpoint").read_bytes()
    refused = command(MODULE, "--output-prefix", "out", "--input", "in.jsonl", *arguments)
    assert "the same command" not in refused.stderr  # it would not go on
    assert refused.returncode == 1
    assert f"an interrupted run that differs from this one in {difference}:" in refused.stderr
    assert (interrupted / "out.partial" / "checkpoint").read_bytes() == state


def test_force_drops_a_run_with_other_settings(interrupted: Path, command: Command) -> None:
    (interrupted / "second.jsonl").write_text('{"text": "mended"}\n')
    arguments = (MODULE, "--input", "in.jsonl", "second.jsonl", "--output-prefix", "out", *BYTES)
    refused = command(*arguments)
    assert "the input file second.jsonl, which was changed" in refused.stderr
    forced = command(*arguments, "--force")
    assert "going on" not in forced.stderr
    assert "(701 documents," in forced.stdout


def test_damaged_leftovers_are_one_sentence(interrupted: Path, command: Command) -> None:
    arguments = (MODULE, "--input", "in.jsonl", "second.jsonl", "--output-prefix", "out", *BYTES)
    data = interrupted / "out.partial" / "text.bin"
    os.truncate(data, 10)
    run = command(*arguments)
    assert run.returncode == 1
    assert "text.bin has 10 bytes of the" in run.stderr
    assert "remove the folder out.partial" in run.stderr
    (interrupted / "out.partial" / "checkpoint").write_text('{"settings": 3}')
    run = command(*arguments)
    assert "checkpoint is damaged" in run.stderr
    assert "Traceback" not in run.stderr


def test_no_name_of_a_key_meets_a_file_of_the_run(tmp_path: Path) -> None:
    keys = ["checkpoint", "lock", "state"]
    (tmp_path / "in.jsonl").write_text(json.dumps(dict.fromkeys(keys, "text")) + "\n")
    output = ["--output-prefix", str(tmp_path / "out"), *BYTES]
    assert main(["--input", str(tmp_path / "in.jsonl"), *output, "--json-keys", *keys]) == 0
    assert len(list(tmp_path.glob("out_*_document.*"))) == 9


def test_two_runs_at_once_are_refused(tmp_path: Path, jsonl: Path, command: Command) -> None:
    (tmp_path / "long.jsonl").write_bytes(jsonl.read_bytes() * 60)
    process = start(tmp_path, "--input", "long.jsonl", "--output-prefix", "out", *BYTES)
    try:
        while not (tmp_path / "out.partial" / "text.bin").exists():
            assert process.poll() is None
            time.sleep(0.02)
        second = command(MODULE, "--input", "in.jsonl", "--output-prefix", "out", *BYTES)
    finally:
        process.kill()
        process.communicate()
    assert second.returncode == 1
    assert "another process is writing to out.partial" in second.stderr


def test_killed_between_the_final_names_the_rest_is_given_out(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--input", str(jsonl), "--output-prefix", str(tmp_path / "out"), *BYTES]
    replace = Path.replace

    def no_index(self: Path, target: str) -> Path:
        if self.suffix == ".idx":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", no_index)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    assert not (tmp_path / "out_text_document.idx").exists()
    assert main(arguments) == 0
    assert main([*arguments[:-3], str(tmp_path / "whole"), *BYTES]) == 0
    whole = pair(tmp_path / "whole_text_document")
    assert pair(tmp_path / "out_text_document") == whole


@pytest.mark.parametrize("packed", [False, True])
def test_reading_goes_on_at_any_position(tmp_path: Path, jsonl: Path, packed: bool) -> None:
    second = tmp_path / "second"
    content = b"\xef\xbb\xbf" + jsonl.read_bytes()
    second.write_bytes(lzma.compress(content) if packed else content)
    batches = list(read_line_batches([jsonl, second], batch_bytes=60_000))
    lines = [(batch.path, line) for batch in batches for line in batch.lines]
    assert len(lines) == 1400
    ends = [Position(), *(batch.end for batch in batches)]
    for num_before, end in enumerate(ends):
        rest = read_line_batches([jsonl, second], start=end, batch_bytes=50_000)
        num_lines = sum(len(batch.lines) for batch in batches[:num_before])
        assert [(batch.path, line) for batch in rest for line in batch.lines] == lines[num_lines:]
