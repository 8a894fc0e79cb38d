"""`megascan whatif` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.op_tables import PRODUCTION, needs_production

ROOT = Path(__file__).parents[2]


def test_a_slow_rank_costs_what_it_saves(megascan, faulty, tmp_path):
    done = megascan("whatif", faulty, "--json", tmp_path / "w.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "w.json").read_text())
    assert record["S"] > 1.1
    assert max(record["S_w"], key=record["S_w"].__getitem__) == "2"


def test_a_healthy_job_has_little_to_gain(megascan, healthy, tmp_path):
    megascan("whatif", healthy, "--json", tmp_path / "w.json")
    assert json.loads((tmp_path / "w.json").read_text())["S"] == pytest.approx(1.0, abs=0.05)


def test_pictures_and_ideal_timeline_are_written(megascan, faulty, tmp_path):
    svg, png, ideal = tmp_path / "h.svg", tmp_path / "h.png", tmp_path / "ideal.json"
    done = megascan("whatif", faulty, "--heat-map", svg, "--ideal", ideal)
    assert done.returncode == 0, done.stderr
    assert svg.read_text().startswith("<svg")
    assert any(event["ph"] == "X" for event in json.loads(ideal.read_text()))
    assert megascan("whatif", faulty, "--heat-map", png).returncode == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bad_outputs_are_refused_before_any_work(megascan, faulty, tmp_path):
    assert megascan("whatif", faulty, "--heat-map", tmp_path / "h.gif").returncode == 2
    (tmp_path / "w.json").write_text("mine")
    assert megascan("whatif", faulty, "--json", tmp_path / "w.json").returncode == 1
    assert (tmp_path / "w.json").read_text() == "mine"


@needs_production
@pytest.mark.parametrize(
    ("name", "ranks", "cause", "owner"),
    [("AR", [0], "compute", "node"), ("ST", [6, 7], "stage_imbalance", "job")],
)
def test_production_traces_get_the_right_owner(megascan, tmp_path, name, ranks, cause, owner):
    table = PRODUCTION / f"trace-{name}.parquet"
    done = megascan("detect", table, "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stderr
    (finding,) = json.loads((tmp_path / "r.json").read_text())["findings"]
    assert (finding["ranks"], finding["cause"], finding["owner"]) == (ranks, cause, owner)


@needs_production
@pytest.mark.parametrize("flag", ["--detect", "--no-detect"])
@pytest.mark.parametrize(("name", "ranks"), [("AR", [0]), ("ST", [6, 7])])
def test_op_tables_say_what_mending_saves(megascan, tmp_path, flag, name, ranks):
    table = PRODUCTION / f"trace-{name}.parquet"
    done = megascan("whatif", table, flag, "--json", tmp_path / "w.json")
    assert done.returncode == 0, done.stderr
    (saving,) = json.loads((tmp_path / "w.json").read_text())["savings"]
    assert saving["ranks"] == ranks
    assert bool(saving["causes"]) is (flag == "--detect")
    assert saving["gpu_hours_per_day"] > 0


def test_a_replay_of_an_op_table_needs_no_statistics():
    """What takes long to import is not imported for what does not use it."""
    code = "import detect.whatif, megascan.cli.whatif, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert {"scipy", "pandas", "megascan.reader"} & set(done.stdout.split()) == set()
