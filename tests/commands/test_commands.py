"""What a user types, with good and bad input: exit codes, streams, files."""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megascan.cli import watch
from megascan.cli.main import COMMANDS, main
from megascan.cli.options import size_bytes
from megascan.export import write_timeline
from megascan.watch.delivery import SHAPES
from megascan.watch.ring import KEPT_ITERATIONS
from megascan.watch.watcher import CPU_SHARE, NODE

ROOT = Path(__file__).parents[2]


def one_line_error(done) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def findings_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())["findings"]


def test_top_level_help_lists_every_command(megascan):
    done = megascan("--help")
    assert done.returncode == 0
    assert [name for name in COMMANDS if name not in done.stdout] == []
    assert megascan().returncode == 0


def test_unknown_command_is_wrong_usage(megascan):
    done = megascan("agregate")
    assert done.returncode == 2
    assert "agregate" in done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(megascan, name):
    done = megascan(name, "--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout


@pytest.mark.parametrize("flag", ["-b", "--b", "--bench-dir", "--benchmark_dir"])
def test_every_spelling_of_the_trace_folder_is_taken(megascan, healthy, tmp_path, flag):
    done = megascan("aggregate", flag, healthy, "-o", tmp_path / "t.json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "t.json").read_text())) > 1000


@pytest.mark.parametrize("entry", [["aggregate.py"], ["-m", "aggregate"]])
def test_the_shim_and_the_package_are_the_same_command(healthy, tmp_path, entry):
    done = subprocess.run(
        [sys.executable, *entry, "-b", healthy, "-o", tmp_path / "t.json.gz", "-d"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "HEALTHY" in done.stdout
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))


def test_default_output_is_named_by_date_in_the_current_folder(megascan, healthy, tmp_path):
    done = megascan("aggregate", "-b", healthy, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("benchmark_*.json")
    assert done.stdout.splitlines()[-1].startswith(f"wrote {written.name}")
    assert "megascan view" in done.stdout.splitlines()[-1]


def test_the_default_output_of_a_large_trace_is_perfettos_own(healthy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megascan.cli.aggregate.LARGE_BYTES", size_bytes(healthy))
    assert main(["aggregate", "-b", str(healthy)]) == 0
    (written,) = tmp_path.iterdir()
    assert written.match("benchmark_*.pftrace")


def test_what_drawing_does_not_ask_for_is_let_go(healthy, tmp_path, monkeypatch):
    """Ends are most of what one process holds: they are half as large when the rest comes."""
    columns = []

    def watched(timeline, *arguments, **named):
        columns.append(timeline.ends.column_names)
        return write_timeline(timeline, *arguments, **named)

    monkeypatch.setattr("megascan.cli.aggregate.write_timeline", watched)
    assert main(["aggregate", "-b", str(healthy), "-o", str(tmp_path / "t.json"), "-d"]) == 0
    assert len(columns) == 1 and len(columns[0]) == 7


def test_detection_names_the_planted_rank_in_text_json_and_timeline(megascan, faulty, tmp_path):
    timeline, record = tmp_path / "t.json", tmp_path / "r.json"
    done = megascan("aggregate", "-b", faulty, "-o", timeline, "-d", "--json", record)
    assert done.returncode == 0, done.stderr
    assert "DEGRADED: rank 2" in done.stdout
    (finding,) = json.loads(record.read_text())["detect"]["findings"]
    assert (finding["ranks"], finding["cause"], finding["owner"]) == ([2], "compute", "node")
    assert finding["slowdown"] == pytest.approx(1.3, rel=0.02)
    assert any(
        event.get("name", "").startswith("compute 1.3")
        for event in json.loads(timeline.read_text())
    )


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_merged_timeline_gives_the_same_findings_as_its_folder(
    megascan, faulty, tmp_path, suffix
):
    timeline = tmp_path / f"t{suffix}"
    assert megascan("aggregate", "-b", faulty, "-o", timeline).returncode == 0
    for number, path in enumerate((faulty, timeline)):
        assert megascan("detect", path, "--json", tmp_path / f"{number}.json").returncode == 0
    assert findings_of(tmp_path / "0.json") == findings_of(tmp_path / "1.json")


def test_fail_on_finding_is_a_gate(megascan, faulty, healthy):
    assert megascan("detect", faulty).returncode == 0
    assert megascan("detect", faulty, "--fail-on-finding").returncode == 3
    assert megascan("detect", healthy, "--fail-on-finding").returncode == 0


def test_detection_never_reads_the_ground_truth(megascan, faulty, tmp_path):
    copy = tmp_path / "trace"
    shutil.copytree(faulty, copy)
    (copy / "ground-truth.json").write_text('{"faults": [{"rank": 0}]}')
    megascan("detect", faulty, "--json", tmp_path / "with.json")
    (copy / "ground-truth.json").unlink()
    megascan("detect", copy, "--json", tmp_path / "without.json")
    assert findings_of(tmp_path / "with.json") == findings_of(tmp_path / "without.json")


def test_min_slowdown_moves_the_floor(megascan, faulty, tmp_path):
    megascan("detect", faulty, "--min-slowdown", "1.5", "--json", tmp_path / "r.json")
    assert findings_of(tmp_path / "r.json") == []


def test_selection_writes_only_what_was_asked_for(megascan, healthy, tmp_path):
    done = megascan(
        "aggregate", "-b", healthy, "-o", tmp_path / "t.json",
        "--ranks", "1,3", "--iterations", "5-6", "--kinds", "compute,optimizer",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    spans = [event for event in json.loads((tmp_path / "t.json").read_text()) if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1, 3}
    assert {event["args"]["iteration"] for event in spans} == {5, 6}
    assert {event["cat"] for event in spans} == {"compute", "optimizer"}


def test_focus_keeps_the_suspect_and_its_groups(megascan, tmp_path):
    trace = tmp_path / "trace"
    words = ["--tp", 2, "--pp", 2, "--dp", 2, "--layers", 2, "--iterations", 10]
    words += ["--fault", "rank=3,kind=compute,factor=1.4"]
    assert megascan("simulate", *words, "-o", trace).returncode == 0
    done = megascan("aggregate", "-b", trace, "-o", tmp_path / "t.json", "-d", "--focus")
    assert done.returncode == 0, done.stderr
    ranks = {
        event["pid"]
        for event in json.loads((tmp_path / "t.json").read_text())
        if event["ph"] == "X"
    }
    assert 3 in ranks
    assert ranks < set(range(8))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ranks", "a"], "--ranks is 'a'"),
        (["--kinds", "magic"], "--kinds is 'magic'"),
        (["--focus"], "pass -d"),
        (["-o", "t.xml"], "suffix"),
    ],
)
def test_wrong_usage_exits_with_2_and_writes_nothing(megascan, healthy, tmp_path, words, says):
    done = megascan("aggregate", "-b", healthy, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept_unless_forced(megascan, healthy, tmp_path):
    output = tmp_path / "t.json"
    output.write_text("mine")
    assert str(output) in one_line_error(megascan("aggregate", "-b", healthy, "-o", output))
    assert output.read_text() == "mine"
    assert megascan("aggregate", "-b", healthy, "-o", output, "--force").returncode == 0
    assert output.read_text() != "mine"


def test_an_existing_findings_file_is_kept_unless_forced(megascan, healthy, tmp_path):
    output = tmp_path / "r.json"
    output.write_text("mine")
    one_line_error(megascan("detect", healthy, "--json", output))
    assert output.read_text() == "mine"


def test_missing_ranks_are_an_error_that_names_them_and_a_flag(megascan, healthy, tmp_path):
    trace = tmp_path / "trace"
    shutil.copytree(healthy, trace)
    (trace / "benchmark-data-1-pipeline-0-tensor-1.json").unlink()
    message = one_line_error(megascan("aggregate", "-b", trace, "-o", tmp_path / "t.json"))
    assert "rank 3" in message
    assert "--allow-missing-ranks" in message
    done = megascan("aggregate", "-b", trace, "-o", tmp_path / "t.json", "--allow-missing-ranks")
    assert done.returncode == 0, done.stderr
    assert "3" in done.stdout


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_no_trace_at_all(megascan, tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert name in one_line_error(megascan("detect", tmp_path / name))


def test_a_foreign_file_is_named(megascan, tmp_path):
    (tmp_path / "notes.json").write_text('{"hello": "world"}')
    assert "notes.json" in one_line_error(megascan("detect", tmp_path / "notes.json"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "2", "--fault", "rank=9,kind=compute,factor=2"], "rank"),
        (["--pp", "3", "--layers", "4"], "layers"),
        (["--tp", "0"], "tp"),
    ],
)
def test_impossible_simulations_are_said_in_a_sentence(megascan, tmp_path, words, says):
    assert says in one_line_error(megascan("simulate", *words, "-o", tmp_path / "s"))


def test_a_fault_that_cannot_be_read_is_wrong_usage(megascan, tmp_path):
    words = ["--tp", 2, "--fault", "rank=0,kind=magic,factor=2", "-o", tmp_path / "s"]
    done = megascan("simulate", *words)
    assert done.returncode == 2
    assert "magic" in done.stderr


def test_simulate_does_not_mix_with_files_that_are_there(megascan, healthy):
    assert "not empty" in one_line_error(megascan("simulate", "-o", healthy))


def test_query_wants_one_question(megascan, tmp_path):
    assert megascan("query", tmp_path / "t.json").returncode == 2


def test_view_wants_a_spot_of_two_numbers(megascan, tmp_path):
    assert megascan("view", tmp_path / "t.json", "--at", "five").returncode == 2


@pytest.mark.parametrize("command", [["view"], ["query", "--preset", "waits"]])
def test_viewing_a_file_that_is_not_there(megascan, tmp_path, command):
    name, *words = command
    one_line_error(megascan(name, tmp_path / "gone.json", *words))


@pytest.mark.parametrize("name", ["aggregate", "detect"])
def test_a_foreign_package_of_the_same_name_is_recognised(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    words = ["aggregate", "-b", "x", *(["-d"] if name == "detect" else [])]
    program = f"import sys; from megascan.cli.main import main; sys.exit(main({words}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert str(tmp_path / name) in done.stderr


def test_the_help_states_the_thresholds_that_the_detector_uses(megascan):
    from detect import DetectorSettings

    told = " ".join(megascan("detect", "--help").stdout.split())
    assert f"(default: {DetectorSettings().min_slowdown})" in told
    assert f"(default: {DetectorSettings().false_discovery_rate})" in told


def test_the_flags_of_the_watch_have_its_own_defaults():
    """They stand twice, as numpy would be imported for the help."""
    parser = argparse.ArgumentParser()
    watch.add_arguments(parser)
    default = parser.get_default
    assert (default("keep"), default("cpu_share")) == (KEPT_ITERATIONS, CPU_SHARE)
    assert default("notify") == NODE
    assert tuple(SHAPES) == watch._SHAPES
