"""`megascan path` and `megascan aggregate --path` as they are typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.op_tables import PRODUCTION, needs_production

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "h200-pp2-dp2-rank-2-slow.json.gz"
Run = Callable[..., object]


def test_a_slow_rank_has_most_of_the_path(megascan: Run, faulty: Path, tmp_path: Path) -> None:
    done = megascan("path", faulty, "--json", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "p.json").read_text())
    assert next(iter(record["mean"]["compute"])) == "2"
    assert "rank 2 (DP1 TP0)" in done.stdout
    for one in record["iterations"]:
        assert sum(one["shares"].values()) == pytest.approx(1)
        lengths = [piece["duration_ns"] for piece in one["chain"]]
        assert sum(lengths) == one["length_ns"] and one["chain"][0]["start_ns"] == 0
        assert one["replayed_ns"] == pytest.approx(one["length_ns"], rel=0.02)


def test_a_real_trace(megascan: Run) -> None:
    done = megascan("path", EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "compute   94.9 %" in done.stdout and "PP1, which has most of the path" in done.stdout


@needs_production
def test_an_op_table(megascan: Run) -> None:
    done = megascan("path", PRODUCTION / "trace-AR.parquet")
    assert done.returncode == 0, done.stderr
    assert "93.8 %  rank 0 (DP0 PP0)" in done.stdout


@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_the_timeline_holds_it_and_reads_as_before(
    megascan: Run, faulty: Path, tmp_path: Path, name: str
) -> None:
    plain, drawn = tmp_path / f"plain-{name}", tmp_path / name
    assert megascan("aggregate", "-b", faulty, "-o", plain).returncode == 0
    done = megascan("aggregate", "-b", faulty, "-o", drawn, "--path")
    assert done.returncode == 0, done.stderr
    assert drawn.stat().st_size > plain.stat().st_size
    told = [megascan("path", one).stdout for one in (plain, drawn, faulty)]
    assert told[0] == told[1] == told[2] != ""


def test_what_cannot_be_replayed_is_one_sentence(
    megascan: Run, simulated: Callable[..., Path], tmp_path: Path
) -> None:
    folder = simulated("lost", "--iterations", 2, "--missing-rank", 1)
    for words in (("path", folder), ("aggregate", "-b", folder, "-o", tmp_path / "t.json")):
        flags = ["--path"] if words[0] == "aggregate" else []
        done = megascan(*words, *flags)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert done.stderr.count("error: ") == 1
    assert not (tmp_path / "t.json").exists()
    assert megascan("path", folder, "--allow-missing-ranks").returncode == 0


def test_bad_input_is_one_sentence(megascan: Run, faulty: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.json.gz"
    half.write_bytes(EXAMPLE.read_bytes()[:20_000])
    empty = tmp_path / "empty.json"
    empty.write_text("")
    page = tmp_path / "page.parquet"
    page.write_bytes(b"PAR1 and nothing of it")
    for path in (tmp_path / "nowhere", tmp_path, half, empty, page):
        done = megascan("path", path)
        assert done.returncode == 1, (path, done.stdout)
        assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    (tmp_path / "p.json").write_text("mine")
    assert megascan("path", faulty, "--json", tmp_path / "p.json").returncode == 1
    assert (tmp_path / "p.json").read_text() == "mine"
    assert megascan("path").returncode == 2


def test_a_file_cut_off_in_mid_window_still_has_a_path(
    megascan: Run, faulty: Path, tmp_path: Path
) -> None:
    """The window under way is lost, for all ranks."""
    folder = tmp_path / "cut"
    shutil.copytree(faulty, folder)
    file = next(folder.glob("benchmark-data-*.json"))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 9 // 10])
    done = megascan("path", folder, "--json", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "p.json").read_text())
    assert 0 < len(record["iterations"]) < 18
