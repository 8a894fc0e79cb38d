"""A step that stands still says why, one that goes on nothing; the first step on GPUs is safe."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from training.pipeline import channels
from training.pipeline.executor import Watchdog
from training.pipeline.generators import breadth_first, depth_first
from training.pipeline.plan import PipelineShape
from training.pipeline.running import after_first_step


def test_a_rank_that_waits_says_once_what_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Watchdog(3, lambda: "next 1F2; inputs there: none", stall_s=0.1):
        time.sleep(0.5)
    printed = capsys.readouterr().err
    assert printed.startswith("rank 3 has waited for ")
    assert printed.endswith(" s: next 1F2; inputs there: none\n")
    assert printed.count("\n") == 1


def test_a_rank_that_works_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Watchdog(3, lambda: "next 1F2", stall_s=2.0) as watchdog:
        for _ in range(10):
            time.sleep(0.05)
            watchdog.beat()
    assert capsys.readouterr().err == ""


def test_the_first_step_on_gpus_is_in_megatron_cores_order() -> None:
    shape = PipelineShape(num_ranks=2, num_chunks=2, num_microbatches=4)
    plan = breadth_first(shape)
    plan_of_step = after_first_step(lambda _: plan)
    assert plan_of_step(4).actions == depth_first(shape).actions
    assert plan_of_step(4) is plan
    assert plan_of_step(4) is plan


def test_waiting_for_a_message_ends_at_the_job_s_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives a group 30 minutes where none are named, whatever the job's own timeout."""
    asked: list[object] = []
    monkeypatch.setattr(
        channels.dist, "new_group", lambda *_, timeout=None, **__: asked.append(timeout)
    )
    channels._new_group([0, 1], "cpu", timedelta(minutes=7))
    assert asked == [timedelta(minutes=7)]
