"""`megascan.launch`: an unchanged script of Megatron-LM's structure, traced from outside."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

from megascan.errors import MissingError, UsageError
from megascan.launch import TrainSteps, _next_iteration, main, split_arguments
from megascan.schema import Granularity
from megascan.tracer import Tracer
from tests import ranks

HERE = Path(__file__).parent
STANDIN = HERE / "megatron_lm_standin"
SCRIPT = STANDIN / "pretrain_gpt.py"


def test_trace_flags_are_taken_and_the_rest_left_in_order():
    config, script, own = split_arguments(
        [
            *("--trace", str(SCRIPT), "--train-iters", "5", "--trace-interval", "3"),
            *("--bf16", "--data-path", "0.5", "a", "0.5", "b", "--trace-granularity", "base"),
        ]
    )
    assert (config.enabled, config.interval, config.granularity) == (True, 3, Granularity.BASE)
    assert script == SCRIPT
    assert own == ["--train-iters", "5", "--bf16", "--data-path", "0.5", "a", "0.5", "b"]


@pytest.mark.parametrize("arguments", [[], ["--trace"], ["--tensor-model-parallel-size", "2"]])
def test_without_a_script_it_says_how(arguments):
    with pytest.raises(UsageError, match=r"no script given.*pretrain_gpt\.py"):
        split_arguments(arguments)


def test_a_script_that_is_not_there():
    with pytest.raises(UsageError, match=r"there is no script absent\.py"):
        split_arguments(["absent.py"])


def test_a_script_without_megatron_lm_cannot_be_traced_unchanged(tmp_path, monkeypatch):
    script = tmp_path / "other.py"
    script.write_text("raise AssertionError('must not run')")
    # wheels of megatron-core from 0.18 on bring it
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(MissingError, match="tracing-your-job"):
        main([str(script), "--trace"])


def test_without_trace_the_script_runs_as_by_itself(tmp_path, monkeypatch, capsys):
    script = tmp_path / "other.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main([str(script), "--lr", "1"]) == 0
    assert capsys.readouterr().out == "__main__ ['--lr', '1']\n"


@pytest.fixture
def steps_of(monkeypatch):
    """Numbers the steps of a job as its arguments say; returns (numbers, resumed or not)."""

    def number(arguments, next_iteration, num_steps=2):
        training = types.ModuleType("megatron.training")
        training.get_args = lambda: arguments
        monkeypatch.setitem(sys.modules, "megatron.training", training)
        seen, started = [], []

        class Recorder(Tracer):
            def iteration(self, number):
                seen.append(number)
                return super().iteration(number)

        def start(config, *, resumed):
            started.append(resumed)
            return Recorder()

        monkeypatch.setattr("megascan.instrument.start", start)
        step = TrainSteps(None, _next_iteration).wrap(lambda x: x + 1)
        for _ in range(num_steps):
            next_iteration(arguments)
            assert step(1) == 2
        return seen, started

    return number


def test_iterations_go_on_from_where_the_job_resumes(steps_of):
    resumed = types.SimpleNamespace(iteration=40)
    assert steps_of(resumed, lambda arguments: None) == ([41, 42], [True])
    assert steps_of(types.SimpleNamespace(), lambda arguments: None) == ([1, 2], [False])


def test_iterations_are_those_that_the_job_counts_also_where_it_skips_some(steps_of):
    job = types.SimpleNamespace(iteration=0, curr_iteration=-3)

    def skip_two(arguments):
        arguments.curr_iteration += 3

    assert steps_of(job, skip_two, num_steps=3) == ([1, 4, 7], [False])


def test_a_script_without_a_known_step_is_said_to_be_untraced(caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    TrainSteps(None, _next_iteration).close()
    assert "nothing was traced: the script never called" in caplog.text


@pytest.fixture
def script(tmp_path):
    """A copy of the stand-in as the package that it stands for; no test folder is a package."""
    copy = shutil.copytree(STANDIN, tmp_path / "standin")
    training = copy / "megatron" / "training"
    (training / "exports.py").rename(training / "__init__.py")
    return copy / "pretrain_gpt.py"


def run(folder, *words, python=""):
    """Return the losses of two ranks, which start anew with that interpreter if one is given."""
    folder.mkdir()
    words = (*words, "--train-iters", "3", "--losses", folder / "losses")
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    if python:
        words = ("-IS", ranks.LAUNCHER, python, 2, *words)
    ranks.run(*words, num_ranks=1 if python else 2, check=True, python=python, PYTHONPATH=paths)
    return [json.loads((folder / f"losses.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.distributed
def test_an_unchanged_script_is_traced_and_trains_alike(script, tmp_path):
    plain = run(tmp_path / "plain", script)
    trace = tmp_path / "trace"
    traced = run(
        tmp_path / "traced",
        *("-m", "megascan.launch", script),
        *("--trace", "--trace-dir", trace, "--continuous-trace-iterations", "5"),
        python=ranks.PYTHON,  # what it changes is imported while it runs
    )
    assert traced == plain
    for rank in range(2):
        path = trace / f"benchmark-data-{rank}-pipeline-0-tensor-0.json"
        events = json.loads(path.read_text())
        names = [event["name"] for event in events]
        assert names.count("iteration") == 3
        assert names.count("forward") == names.count("backward") == 6
        (window,) = (event["args"] for event in events if event["name"] == "megascan_window")
        assert (window["first_iteration"], window["last_iteration"]) == (1, 3)
