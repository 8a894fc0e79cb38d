"""The scale benchmark at tiny size: its traces are right, its figures are there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson
import pytest

from aggregate import build_timeline
from benchmarks.aggregate_scale.__main__ import main
from benchmarks.aggregate_scale.cases import cases
from benchmarks.aggregate_scale.original_files import write_original_files
from benchmarks.aggregate_scale.rank_files import ScaleJob, simulated, write_rank_files
from megascan.reader import Format, read_trace, sniff
from megascan.timeline import numbers
from megascan.topology import Layout
from tests import ranks

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(tp=2, pp=2, dp=2)
JOB = ScaleJob(layout=LAYOUT, num_spans=3_000, num_microbatches=2, num_layers=4)


@pytest.fixture
def forked(monkeypatch):
    """Have the commands that are measured forked with their imports: no figure is looked at."""
    for name in os.environ.keys() - ranks.COMMAND.keys():
        monkeypatch.delenv(name)
    for name, value in ranks.COMMAND.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", ranks.warm_command())


def test_rank_files_hold_the_simulated_spans(tmp_path):
    num_spans = write_rank_files(JOB, tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert trace.spans.num_rows == num_spans >= 3_000
    simulation = simulated(JOB, iterations=num_spans // simulated(JOB, 1).spans.num_rows)
    assert trace.spans.to_pylist() == simulation.spans.to_pylist()


def test_repeated_windows_follow_one_another_and_match(tmp_path):
    job = ScaleJob(
        layout=LAYOUT, num_spans=3_000, num_microbatches=2, num_layers=4, most_simulated=1
    )
    write_rank_files(job, tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    assert len(trace.windows[0]) > 1
    assert [window.last_iteration for window in trace.windows[0]] == list(
        range(1, len(trace.windows[0]) + 1)
    )
    timeline = build_timeline(trace)
    assert sum(timeline.completeness.num_unmatched.values()) == 0
    assert max(fit.residual_p99_ns for fit in timeline.clocks.values()) < 20_000


def test_original_files_nest_and_match(tmp_path):
    num_records = write_original_files(JOB, tmp_path / "trace")
    assert sniff(tmp_path / "trace") is Format.ORIGINAL
    records = [
        record
        for path in sorted((tmp_path / "trace").iterdir())
        for record in orjson.loads(path.read_bytes())
    ]
    assert len(records) == num_records
    trace = read_trace(tmp_path / "trace")
    assert trace.layout == LAYOUT
    assert trace.spans.num_rows == num_records // 2
    assert not [note for note in trace.completeness.notes if "left out" in note]
    assert sum(build_timeline(trace).completeness.num_unmatched.values()) == 0
    assert numbers(trace.spans, "duration_ns").min() > 0


def test_cases_reach_from_8_to_16384_ranks_and_to_20_million_spans():
    found = cases((0.1, 20.0), 10**9)
    assert {case.num_ranks for case in found} == {8, 64, 1_024, 16_384}
    assert max(case.num_events for case in found) == 20_000_000
    assert [case.num_events for case in cases((0.1, 20.0), 100_000)] == [100_000, 200_000]


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_the_benchmark_prints_its_tables(tmp_path, capsys):
    code = main(
        ["--sizes", "0.004", "--max-spans", "4000", "--json", str(tmp_path / "r.json"),
         "--work-dir", str(tmp_path), "--against", str(ROOT), "--turns", "1"]
    )  # fmt: skip
    text = capsys.readouterr().out
    assert code == 0
    rows = orjson.loads((tmp_path / "r.json").read_bytes())
    assert [(row["source"], row["output"]) for row in rows] == [
        ("rank files", ".json.gz"),
        ("rank files", ".pftrace"),
        ("original", ".json.gz"),
        ("original", ".pftrace"),
    ]
    for row in rows:
        assert row["peak_bytes"] > 10 << 20
        assert row["output_bytes"] > 1_000
        assert 0 < sum(row["stages"].values()) < row["seconds"]
        assert f"{row['num_events']:,}" in text
    assert "times faster than the original's 26.8 s" in text
    behind = text.partition("The other checkout over this one, 1 turns")[2]
    compared, _, by_stage = behind.partition("CPU µs an event")
    assert by_stage.count("| rank files |") == by_stage.count("| original |") == 2
    assert by_stage.count(" → ") == 1 + 4 * 8 and "nan" not in by_stage
    assert compared.count("| rank files |") == compared.count("| original |") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_the_original_runs_beside_ours(tmp_path, capsys):
    """A stand-in for it: takes the same words and writes the file."""
    script = tmp_path / "original.py"
    script.write_text("import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('[]')")
    words = ["--sizes", "0.004", "--max-spans", "4000", "--only", "original", "--turns", "1"]
    command = f"{sys.executable} {script}"
    assert main([*words, "--suffixes", ".json.gz", "--original", command]) == 0
    text = capsys.readouterr().out
    assert "| rank files |" not in text
    assert "took, times ours: wall 0." in text
    assert "the original's fastest 0." in text


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_speed_by_cores_is_printed(tmp_path, capsys):
    words = ["--cores", "1,4096", "--sizes", "0.004", "--only", "64", "--suffixes", ".pftrace"]
    assert main([*words, "--turns", "2", "--work-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    rows = [line for line in out.splitlines() if line.startswith("| TP4")]
    assert err.count("1 cores …") == 2
    assert len(rows) == 1  # this machine has fewer than 4,096
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells[3:5] == [".pftrace", "1"] and cells[8] == "100 %"
    assert not list(tmp_path.iterdir())


def test_sizes_that_are_no_numbers_are_refused():
    with pytest.raises(Exception, match="expected millions of spans"):
        main(["--sizes", "many"])
