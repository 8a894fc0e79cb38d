"""Ctrl-C, SIGTERM and a terminal that closes: one line, the shell's exit code, nothing half."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascan.cli.main import main
from megascan.errors import report_errors
from megascan.overwriting import replacing
from megascan.simulate import folder as folders
from training import sample_corpus

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
SMALL = ("--dp", "3", "--layers", "2", "--iterations", "3")


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever runs the tests may ignore signals (nohup, a shell's background) or be a rank."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    usual = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)
    before = [signal.signal(*pair) for pair in zip(SIGNALS, usual, strict=True)]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def ask_to_end(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)  # the exception comes at once


@pytest.mark.parametrize("number", SIGNALS)
def test_what_is_half_written_goes_and_the_code_is_the_shells(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)

    def command() -> int:
        with replacing(tmp_path / "t.json", force=False) as file:
            file.write(b"half")
            ask_to_end(number)
        return 0

    assert report_errors(command) == 128 + number
    (line,) = capsys.readouterr().err.splitlines()
    assert line == ("interrupted" if number == signal.SIGINT else f"ended by {number.name}")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


def test_a_second_sigterm_does_not_end_the_cleaning_up(tmp_path: Path) -> None:
    """`timeout` sends it to the process and to its group."""

    def command() -> int:
        try:
            ask_to_end(signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "cleaned").touch()
        return 0

    assert report_errors(command) == 143
    assert (tmp_path / "cleaned").exists()


def test_who_was_told_to_go_on_goes_on() -> None:
    """nohup ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def command() -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    assert report_errors(command) == 0


def test_a_rank_leaves_sigterm_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    found: list[object] = []

    def command() -> int:
        found.append(signal.getsignal(signal.SIGTERM))
        return 0

    assert report_errors(command) == 0
    assert found == [signal.SIG_DFL]


def interrupted_at(call: int, work: Callable[..., object], number: int) -> Callable[..., object]:
    calls: list[int] = []

    def counted(*arguments: object) -> object:
        calls.append(1)
        made = work(*arguments)
        if len(calls) == call:
            ask_to_end(number)
        return made

    return counted


@pytest.mark.parametrize("number", SIGNALS)
def test_a_simulation_that_is_ended_leaves_no_rank_file(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        folders.RankFile, "append", interrupted_at(2, folders.RankFile.append, number)
    )
    assert main(["simulate", *SMALL, "-o", str(tmp_path / "trace")]) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_that_is_ended_leaves_the_earlier_job_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    assert main(["simulate", *SMALL, "-o", str(trace)]) == 0
    before = contents(trace)
    append = interrupted_at(3, folders.RankFile.append, signal.SIGTERM)
    monkeypatch.setattr(folders.RankFile, "append", append)
    assert main(["simulate", *SMALL, "--seed", "1", "-o", str(trace), "--force"]) == 143
    assert contents(trace) == before


def test_a_sample_corpus_that_is_ended_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-o", str(tmp_path / "data"), "--vocab-size", "300", "--max-megabytes", "0.01"]
    documents = [sample_corpus.Document(text="A text about nothing much. " * 8, source="s")]
    monkeypatch.setattr(sample_corpus, "installed_documents", lambda: iter(documents))
    with monkeypatch.context() as patch:
        write = interrupted_at(1, sample_corpus._write_corpus, signal.SIGTERM)
        patch.setattr(sample_corpus, "_write_corpus", write)
        assert report_errors(lambda: sample_corpus.main(words)) == 143
    assert list(tmp_path.iterdir()) == []
    assert report_errors(lambda: sample_corpus.main(words)) == 0
    names = {path.name for path in (tmp_path / "data").iterdir()}
    assert names == {"corpus.jsonl", "vocab.json", "merges.txt"}
