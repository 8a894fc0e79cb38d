"""`megascan report` as it is typed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.op_tables import PRODUCTION, needs_production

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def folder(megascan: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traced") / "trace"
    flags = ("--dp", 4, "--layers", 4, "--iterations", 12, "--fault")
    done = megascan("simulate", *flags, "rank=2,kind=compute,factor=1.3", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def test_a_folder_becomes_a_page(megascan: Run, folder: Path, tmp_path: Path, document) -> None:
    done = megascan("report", folder, "-o", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DEGRADED: rank 2 (DP2, host n00, GPU 2)")
    assert done.stdout.splitlines()[-1].startswith(f"wrote {tmp_path / 'report.html'} (")
    page = document((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.problems == []
    assert "rank 2 (DP2, host n00, GPU 2)" in page.text


def test_a_timeline_becomes_a_page(megascan: Run, folder: Path, tmp_path: Path, document) -> None:
    timeline = tmp_path / "timeline.json.gz"
    assert megascan("aggregate", "-b", folder, "-o", timeline).returncode == 0
    done = megascan("report", timeline, "-o", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    assert "rank 2 (DP2" in document((tmp_path / "report.html").read_text()).text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("-o", "report.pdf"), 2, "expected a name in .html"),
        (("-o", "nowhere/report.html"), 1, "does not exist"),
        ((), 2, "required: -o/--output"),
        (("-o", "report.html", "--min-slowdown", "0.5"), 2, "min_slowdown is 0.5"),
    ],
)
def test_bad_usage_is_refused_in_a_line(
    megascan: Run, folder: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    at = [str(tmp_path / word) if word.endswith((".html", ".pdf")) else word for word in words]
    done = megascan("report", folder, *at)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_not_replaced_unasked(megascan: Run, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    refused = megascan("report", folder, "-o", page)
    assert refused.returncode == 1 and "--force" in refused.stderr
    assert page.read_text() == "mine"
    assert megascan("report", folder, "-o", page, "--force").returncode == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_file_that_is_no_trace_is_refused(megascan: Run, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    done = megascan("report", tmp_path / "t.json", "-o", tmp_path / "r.html")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@needs_production
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("AR", "DEGRADED: rank 0 (DP0 PP0) computes"),
        ("ST", "JOB (no node is at fault): last stage"),
    ],
)
def test_production_traces_have_pages(
    megascan: Run, name: str, answer: str, tmp_path: Path, document
) -> None:
    done = megascan("report", PRODUCTION / f"trace-{name}.parquet", "-o", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    page = document((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert page.problems == []
    assert done.stdout.startswith(answer) and answer.partition(": ")[2] in page.text
    assert "an op table holds no bytes, groups or host spans" in page.text
