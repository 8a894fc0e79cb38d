"""`megascan diff` as it is typed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.op_tables import PRODUCTION, needs_production

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def folders(megascan: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A healthy run, and one in which rank 2 computes 1.3 times slower."""
    room = tmp_path_factory.mktemp("runs")
    for name, flags in (
        ("before", ("--seed", 1)),
        ("after", ("--seed", 2, "--iterations", 10, "--fault", "rank=2,kind=compute,factor=1.3")),
    ):
        done = megascan("simulate", "--dp", 4, "--layers", 4, *flags, "-o", room / name)
        assert done.returncode == 0, done.stderr
    return room / "before", room / "after"


def test_a_regression_fails_the_gate(
    megascan: Run, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = folders
    done = megascan("diff", before, after, "--fail-on-regression", "--json", tmp_path / "d.json")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("REGRESSED: an iteration takes 1.2")
    assert re.search(r"rank 2 \(DP2, host n00, GPU 2\) 1\.(29|30|31)", done.stdout)
    assert done.stdout.splitlines()[-1] == f"wrote {tmp_path / 'd.json'}"
    assert done.stderr == ""
    record = json.loads((tmp_path / "d.json").read_text())
    assert (record["before"], record["after"]) == (str(before), str(after))


def test_without_the_flag_it_only_reports(megascan: Run, folders: tuple[Path, Path]) -> None:
    assert megascan("diff", *folders).returncode == 0


def test_a_trace_passes_its_own_gate(megascan: Run, folders: tuple[Path, Path]) -> None:
    done = megascan("diff", folders[0], folders[0], "--fail-on-regression")
    assert done.returncode == 0
    assert done.stdout.startswith("SAME: ")


def test_the_way_back_passes_the_gate(megascan: Run, folders: tuple[Path, Path]) -> None:
    done = megascan("diff", folders[1], folders[0], "--fail-on-regression")
    assert done.returncode == 0
    assert done.stdout.startswith("FASTER: ")


def test_op_tables_are_compared(megascan: Run, op_file: Callable[..., Path]) -> None:
    before, after = op_file("before", 1), op_file("after", 2, {3: 1.2}, steps=12)
    done = megascan("diff", before, after, "--fail-on-regression")
    assert done.returncode == 3, done.stderr
    assert "rank 3 (DP3 PP0) 1.2" in done.stdout.splitlines()[0]
    assert megascan("diff", before, before, "--fail-on-regression").returncode == 0


@needs_production
def test_two_different_production_jobs_are_not_mixed_up(megascan: Run) -> None:
    tables = [PRODUCTION / f"trace-{name}.parquet" for name in ("AR", "ST")]
    done = megascan("diff", *tables)
    assert done.returncode == 0, done.stderr
    assert "the layouts differ" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--min-change", "much"), 2, "--min-change is 'much', expected a number such as 3%"),
        (("--min-change", "0%"), 2, "--min-change is 0%"),
        (("--min-change", "3"), 2, "at most 100 %"),
        (("--min-change", "-1"), 2, "--min-change"),
        (("--json", "nowhere/d.json"), 1, "does not exist"),
    ],
)
def test_bad_usage_is_refused_in_a_line(
    megascan: Run, folders: tuple[Path, Path], words: tuple[str, ...], code: int, message: str
) -> None:
    done = megascan("diff", *folders, *words)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["50%", "0.5", "1.5"])
def test_three_ways_to_say_a_change(megascan: Run, folders: tuple[Path, Path], text: str) -> None:
    done = megascan("diff", *folders, "--min-change", text)
    assert "slower by 50 % or more" in done.stdout or done.stdout.startswith("REGRESSED: new:")


@pytest.mark.parametrize("which", [0, 1])
def test_a_trace_that_is_none_is_named(
    megascan: Run, folders: tuple[Path, Path], tmp_path: Path, which: int
) -> None:
    paths = list(folders)
    paths[which] = tmp_path / "nothing"
    done = megascan("diff", *paths)
    assert done.returncode == 1
    assert "nothing" in done.stderr and done.stderr.count("\n") == 1
