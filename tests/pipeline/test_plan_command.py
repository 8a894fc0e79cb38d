"""`megascan plan` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.pipeline.plan import read_plan
from training.pipeline.simulator import check

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def written(megascan, tmp_path_factory):
    """What is said of and written for a healthy job on two H200s by two."""
    folder = tmp_path_factory.mktemp("plan") / "faster"
    done = megascan(
        "plan", EXAMPLES / "h200-pp2-dp2-healthy.json.gz", "--memory-limit", 3, "--write", folder
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_model_is_set_beside_the_trace_before_anything_is_promised(written):
    _, text = written
    assert "model of the traced pipeline: 343.3 ms (-0.1% of the measured one)" in text
    assert "zb-h1" in text
    assert "take: planned for 3 microbatches, 2 chunks a rank" in text


def test_the_written_plan_can_be_carried_out_and_its_flags_name_it(written):
    folder, _ = written
    plan = read_plan(folder / "plan.csv")
    check(plan, memory_limit=3.0)
    flags = (folder / "flags.txt").read_text().split()
    assert flags == [
        "--num-virtual-stages-per-pipeline-rank", "2",
        "--pipeline-schedule", str(folder / "plan.csv"),
    ]  # fmt: skip
    record = json.loads((folder / "prediction.json").read_text())
    best = record["remedies"][record["best"]]
    assert best["step_s"] < 0.9 * record["step_s"]
    assert max(best["peak_by_rank"]) <= 3.0


def test_the_predicted_step_opens_as_a_timeline(megascan, written):
    folder, _ = written
    done = megascan("detect", folder / "timeline.json.gz")
    assert "2 ranks" in done.stdout + done.stderr, done


def test_a_prediction_is_set_beside_a_later_trace(megascan, written):
    folder, _ = written
    after = EXAMPLES / "h200-pp2-dp2-rank-2-slow.json.gz"
    done = megascan("plan", after, "--compare", folder / "prediction.json")
    assert done.returncode == 0, done.stderr
    assert "was 418.2 ms, predicted 363.8 ms, measured 550.3 ms" in done.stdout
    refused = megascan("plan", after, "--compare", folder / "plan.csv")
    assert refused.returncode == 1
    assert "is no prediction" in refused.stderr


def test_outputs_are_not_replaced_unasked(megascan, written):
    folder, _ = written
    path = EXAMPLES / "h200-pp2-dp2-healthy.json.gz"
    assert megascan("plan", path, "--write", folder).returncode == 1


def test_a_slow_rank_of_the_verdict_is_what_the_advice_is_about(megascan, tmp_path):
    path = EXAMPLES / "h200-pp2-dp2-rank-2-slow.json.gz"
    done = megascan("plan", path, "--json", tmp_path / "p.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["slow_ranks"] == [2]
    kinds = {remedy["kind"]: remedy for remedy in record["remedies"]}
    assert {"microbatches", "layers", "drain", "schedule"} <= set(kinds)
    assert "without a restart: 3,5 microbatches by replica" in done.stdout


def test_a_plan_file_is_checked_and_drawn(megascan, tmp_path):
    plan = tmp_path / "plan.csv"
    plan.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    done = megascan("plan", plan)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0   F0")
    assert "held at most, microbatches by rank: 2.00" in done.stdout
    assert "the same bit by bit" in done.stdout
    plan.write_text("0F0,0B0\n1B0,1F0\n")
    refused = megascan("plan", plan)
    assert refused.returncode == 1
    assert "hangs: rank 0 at 0B0 waits for 1B0, rank 1 at 1B0 waits for 1F0" in refused.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--memory-limit", "0"),
        ("--memory-limit", "nan"),
        ("--helpers", "2"),
        ("--fbd", "--helpers", "0"),
        ("--fbd", "--helper-speed", "-1"),
    ],
)
def test_wrong_usage_is_said_before_any_work(megascan, flags):
    done = megascan("plan", EXAMPLES / "h200-pp2-dp2-healthy.json.gz", *flags)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_job_without_a_pipeline_is_told_so(megascan):
    done = megascan("plan", EXAMPLES / "h200-dp4-rank-2-busy-host.json.gz")
    assert done.returncode == 1
    assert "pipeline size 1" in done.stderr


def test_planning_needs_neither_torch_nor_megatron():
    rooms = ROOT / "training" / "pipeline"
    names = [
        "costs", "disaggregation", "drawing", "generators", "guided",
        "measured", "plan", "planner", "rebalance", "remedies", "schedule", "simulator",
    ]  # fmt: skip
    assert all((rooms / f"{name}.py").is_file() for name in names)
    imports = ";".join(f"import training.pipeline.{name}" for name in names)
    code = f"import sys;{imports};sys.exit(bool({{'torch', 'megatron'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_plan_that_holds_more_than_the_limit_is_refused(megascan, tmp_path):
    plan = tmp_path / "own.csv"
    plan.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert megascan("plan", plan, "--memory-limit", 2).returncode == 0
    done = megascan("plan", plan, "--memory-limit", 1)
    assert done.returncode == 1
    assert "holds activations of 2 at most, the limit is 1" in done.stderr


def test_what_needs_a_trace_is_refused_beside_a_plan(megascan, tmp_path):
    plan = tmp_path / "own.csv"
    plan.write_text("0F0,0B0\n1F0,1B0\n")
    done = megascan("plan", plan, "--fbd", "--write", tmp_path / "out")
    assert done.returncode == 2
    assert "--fbd, --write would need a trace" in done.stderr
