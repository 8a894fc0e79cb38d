"""Trainers that stand between the user and torch: what they hide is found all the same."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from megascan.callbacks import for_lightning
from megascan.config import TraceConfig
from tests import ranks
from tests.instrument import called_back_trainer as called_back
from tests.instrument.wrapped_trainer import (
    NUM_LAYERS,
    SAVE_TOGETHER,
    SAVES_ALONE,
    WAIT_S,
    WIDTH,
)

TRAINER = Path(__file__).with_name("wrapped_trainer.py")
CALLED_BACK = Path(__file__).with_name("called_back_trainer.py")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


class Run:
    """The trace of both jobs, and what was said."""

    def __init__(self, directory: Path, trainer: Path = TRAINER, num_ranks: int = 2) -> None:
        done = ranks.run(trainer, directory, num_ranks=num_ranks, check=True)
        self.said = done.stderr
        self.directory = directory

    def events(self, kind: str) -> list[list[dict]]:
        """All events, by rank."""
        files = sorted((self.directory / kind).glob("benchmark-data-*.json"))
        assert len(files) == 2
        return [json.loads(path.read_text()) for path in files]

    def spans(self, kind: str, iteration: int = 2) -> list[list[dict]]:
        """The spans of one iteration, by rank."""
        return [
            [
                event
                for event in of_rank
                if event["ph"] == "X" and event["args"]["iteration"] == iteration
            ]
            for of_rank in self.events(kind)
        ]


@pytest.fixture
def run(once, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return once("run", lambda: Run(tmp_path_factory.mktemp("wrapped")))


def test_nothing_goes_wrong(run):
    assert "tracing stopped" not in run.said


@pytest.mark.parametrize("kind", ["inner", "zero", "fsdp"])
def test_layers_that_lie_deep_are_layers(run, kind):
    for spans in run.spans(kind):
        names = Counter(span["name"] for span in spans)
        assert names["forward"] == names["backward"] == names["optimizer"] == 1
        assert names["layer"] == names["layer-backward"] == NUM_LAYERS


def test_reductions_of_a_replica_are_seen_from_the_model_inside(run):
    for spans in run.spans("inner"):
        reductions = [span for span in spans if span["name"] == "all_reduce"]
        assert reductions
        assert {span["args"]["group"] for span in reductions} == {"dp@0"}
        assert [span["name"] for span in spans].count("grad-sync") == 1


def test_buffers_that_ddp_sends_are_seen_in_their_forward(run):
    """In C++: who comes before rank 0 waits for it there, and does not compute."""
    for spans in run.spans("inner"):
        (sent,) = (span for span in spans if span["name"] == "broadcast")
        (forward,) = (span for span in spans if span["name"] == "forward")
        assert (sent["args"]["group"], sent["args"]["size_bytes"]) == ("dp@0", 4 * WIDTH)
        assert forward["ts"] <= sent["ts"]
        assert sent["ts"] + sent["dur"] <= forward["ts"] + forward["dur"]


def test_saves_within_an_iteration_are_recorded_once_each(run):
    """The others wait for a rank that saves alone: that is not its host's fault."""
    for iteration, expected in ((2, [0, 0]), (SAVES_ALONE, [1, 0]), (SAVE_TOGETHER, [1, 1])):
        saves = [
            [span for span in spans if span["cat"] == "checkpoint"]
            for spans in run.spans("inner", iteration)
        ]
        assert [len(of_rank) for of_rank in saves] == expected
        assert all(one["name"] == "save-checkpoint" for of_rank in saves for one in of_rank)


def test_what_fsdp_waits_for_at_last_is_no_backward(run):
    for spans in run.spans("fsdp"):
        durations = {span["name"]: span["dur"] / 1e6 for span in spans}
        assert durations["grad-sync"] >= WAIT_S
        assert durations["backward"] < WAIT_S
        assert all(span["dur"] / 1e6 < WAIT_S for span in spans if span["name"] == "layer-backward")


def test_functions_that_an_engine_has_kept_are_seen_once_each(run):
    for spans in run.spans("zero"):
        travels = [span for span in spans if span["cat"] == "collective"]
        assert Counter(span["name"] for span in travels) == {"reduce_scatter": 1, "all_gather": 2}
        assert all(span["args"]["group"].startswith("dp-") for span in travels)
        assert sorted(span["args"]["sequence"] for span in travels) == [0, 0, 1]
        assert travels[-1]["args"]["size_bytes"] == 4 * (4 + 8)


def test_batches_fetched_between_iterations_are_spoken_of(run):
    assert "none of them within tracer.iteration" in run.said
    assert run.said.count("batches were fetched from data loaders") == 1


@pytest.fixture
def called_back_run(once, tmp_path_factory: pytest.TempPathFactory) -> Run:
    def train() -> Run:  # which forks its ranks itself
        return Run(tmp_path_factory.mktemp("called"), CALLED_BACK, num_ranks=1)

    return once("called back", train)


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_callbacks_make_an_iteration_of_every_step(called_back_run, kind):
    assert "tracing stopped" not in called_back_run.said
    for number in range(1, called_back.NUM_STEPS + 1):
        for spans in called_back_run.spans(kind, number):
            names = Counter(span["name"] for span in spans)
            assert names["iteration"] == names["optimizer"] == 1
            assert names["forward"] == names["backward"] == called_back.NUM_BATCHES
            if 1 < number < called_back.NUM_STEPS:  # both are one batch ahead
                assert names["batch-generator"] == called_back.NUM_BATCHES
            assert names["layer"] == called_back.NUM_BATCHES * called_back.NUM_LAYERS
            assert names["all_reduce"] >= 1


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_no_iteration_has_an_evaluation_in_it(called_back_run, kind):
    """Every third step is followed by one, and by a checkpoint."""
    for rank, events in enumerate(called_back_run.events(kind)):
        file = called_back_run.directory / kind / f"evaluations-{rank}.json"
        evaluations = json.loads(file.read_text())
        assert len(evaluations) >= called_back.NUM_STEPS // called_back.EVERY
        origin = events[0]["args"]["clock"]["origin_unix_ns"]
        for event in events:
            if event["name"] == "iteration":
                begin = origin + 1e3 * event["ts"]
                end = begin + 1e3 * event["dur"]
                assert all(end < begun or ended < begin for begun, ended in evaluations)


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_no_iteration_follows_the_last_step(called_back_run, kind):
    assert called_back_run.spans(kind, called_back.NUM_STEPS + 1) == [[], []]


def test_lightning_may_be_installed_under_its_other_name(monkeypatch, tmp_path):
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    callback = for_lightning(TraceConfig(enabled=True, directory=tmp_path))
    assert type(callback).__mro__[1].__module__.startswith("pytorch_lightning.")
