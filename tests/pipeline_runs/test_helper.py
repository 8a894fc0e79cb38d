"""A helper and the ranks it helps in one process: what each says, step after step."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megascan.errors import ConfigError
from training import helper
from training.helper import Helper, JobDescription
from training.pipeline.helped import batch_bytes
from training.pipeline.reception import Frame, FrameKind, Reception, bytes_of, tensor_of

PATIENCE_S = 20.0
Heard = queue.Queue[tuple[int, Frame]]


class Doors:
    """Three ranks of a pipeline, as a helper meets them; all they hear goes into `heard`."""

    def __init__(self) -> None:
        self.heard: Heard = queue.Queue()
        self.doors = [
            Reception(
                {"num_layers": 1, "shapes": [[2, 2]]},
                lambda number, frame, stage=stage: self.heard.put((stage, frame)),  # type: ignore[misc]
            )
            for stage in range(3)
        ]

    def say(self, stage: int, frame: Frame) -> None:
        """One rank says something to the helper."""
        self.doors[stage].send(0, frame)

    def begin(self, step: int, microbatches: list[int]) -> None:
        """A step begins: weights of `step` times one, data that are the microbatch's number."""
        self.say(0, Frame.of(FrameKind.STEP, {"microbatches": microbatches}, step=step))
        for stage in range(2):
            weights = torch.full((2, 2), float(step))
            self.say(stage, Frame(FrameKind.WEIGHTS, bytes_of(weights), step))
        for microbatch in microbatches:
            tokens = torch.full((1, 2), microbatch)
            batch = SimpleNamespace(tokens=tokens, position_ids=tokens, attention_mask=None)
            self.say(0, Frame(FrameKind.BATCH, batch_bytes(batch), step, microbatch))  # type: ignore[arg-type]

    def hear(self) -> tuple[int, Frame]:
        """What is said next, and to which rank."""
        return self.heard.get(timeout=PATIENCE_S)

    def hear_step(self, num_inputs: int) -> list[tuple[int, int, float]]:
        """All that is said of a step: inputs as (stage, microbatch, value), and its end.

        Each rank hears on a connection of its own, so they come in any order.
        """
        found: list[tuple[int, int, float]] = []
        for _ in range(num_inputs + 1):
            stage, frame = self.hear()
            if frame.kind is FrameKind.INPUT:
                value = tensor_of(frame.body, (2,), torch.float32)[0].item()
                found.append((stage, frame.microbatch, value))
        return sorted(found)

    def close(self) -> None:
        """The job ends."""
        for door in self.doors:
            door.close()


class Stage(torch.nn.Module):
    """Adds its weight to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))


def _forward(
    model: Stage, inputs: torch.Tensor | None, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    given = batch["tokens"].float()[0] if inputs is None else inputs
    return given + model.weight.detach()[0]


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    """Ranks, and a helper whose stages add."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(helper, "forward", _forward)
    monkeypatch.setattr(Helper, "_build_stage", lambda self, stage, welcome: Stage())
    return Doors()


def _helper_of(doors: Doors) -> Helper:
    job = SimpleNamespace(number=0, ranks=[door.address for door in doors.doors])
    return Helper(cast(JobDescription, job), "cpu")


def test_a_helper_runs_step_after_step_until_the_job_ends(doors: Doors) -> None:
    own = _helper_of(doors)
    own.join()
    assert doors.hear()[1].kind is FrameKind.READY
    counts: list[int] = []
    running = threading.Thread(target=lambda: counts.append(own.run()))
    running.start()
    for step in (1, 2, 5):
        doors.begin(step, [0, 3])
        assert doors.hear_step(4) == [
            (1, 0, float(step)), (1, 3, 3.0 + step), (2, 0, 2.0 * step), (2, 3, 3.0 + 2 * step),
        ]  # fmt: skip
    doors.close()
    running.join(PATIENCE_S)
    assert counts == [12]


def test_a_step_that_is_called_off_is_left(doors: Doors) -> None:
    """Its data never come; the next step begins, and both are answered."""
    own = _helper_of(doors)
    own.join()
    running = threading.Thread(target=own.run)
    running.start()
    assert doors.hear()[1].kind is FrameKind.READY
    doors.say(0, Frame.of(FrameKind.STEP, {"microbatches": [0]}, step=1))
    doors.say(0, Frame.of(FrameKind.STEP, {"microbatches": []}, step=2))
    steps = {doors.hear()[1].step}
    while 2 not in steps:
        steps.add(doors.hear()[1].step)
    doors.begin(3, [1])
    assert doors.hear_step(2) == [(1, 1, 4.0), (2, 1, 7.0)]
    doors.close()
    running.join(PATIENCE_S)
    assert not running.is_alive()


def test_a_stage_that_was_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from training import model

    monkeypatch.setattr(model, "build_stage", lambda *given, **options: Stage())
    job = SimpleNamespace(settings=None, sizes=None, vocab_size=8)
    own = Helper(cast(JobDescription, job), "cpu")
    welcome: dict[str, object] = {"num_layers": 1, "shapes": [[2, 3]]}
    with pytest.raises(ConfigError, match="stage 1 of the job has other parameters"):
        own._build_stage(1, welcome)
