"""Real training of a tiny model in real processes over gloo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyarrow.compute as pc
import pytest

from aggregate import build_timeline
from detect.whatif import replay_of_timeline
from detect.whatif.path import critical_path
from megascan.reader import read_trace
from megascan.timeline import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Launch, Start

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
DIST_OPT = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


def test_layouts_that_must_agree_do_and_the_loss_falls(
    launch: Launch, tiny: list[str], log_line: re.Pattern[str]
) -> None:
    """Weights made on the CPU do not depend on TP or DP, so without dropout neither do losses."""
    flags = [*tiny, *NO_DROPOUT, "--train-iters", "8"]
    alone = launch(1, flags)
    assert alone.exit_code == 0, alone.stderr
    assert alone.stderr == ""
    assert alone.stdout.startswith("using world size: 1, data-parallel size: 1, ")
    assert "parallel rank (0, 0): 206208\n > datasets: training 32 of " in alone.stdout
    assert list(alone.losses) == list(range(1, 9))
    assert alone.losses[8] < alone.losses[1] - 0.3
    line = log_line.search(alone.stdout)
    assert line is not None
    assert (line["samples"], line["batch"], line["skipped"], line["nan"]) == ("4", "4", "0", "0")
    tensor = launch(2, [*flags, "--tensor-model-parallel-size", "2", "--sequence-parallel"])
    assert tensor.exit_code == 0, tensor.stderr
    data = launch(2, [*flags, *DIST_OPT])
    assert data.exit_code == 0, data.stderr
    for other in (tensor, data):
        assert other.stderr == ""
        assert other.losses == pytest.approx(alone.losses, rel=2e-3)


def test_interleaved_pipeline_is_deterministic_and_learns(
    launch: Launch, tiny: list[str], tmp_path: Path
) -> None:
    """Dropout included: the same layout and seed give the same digits."""
    flags = [*tiny, "--pipeline-model-parallel-size", "2", "--train-iters", "6"]
    flags += ["--num-layers-per-virtual-pipeline-stage", "1"]
    first = launch(2, flags)
    assert first.exit_code == 0, first.stderr
    evaluated = ["--eval-interval", "3", "--eval-iters", "1"]
    events = ["--tensorboard-dir", str(tmp_path / "events")]
    second = launch(2, [*flags, *evaluated, *events])
    assert second.exit_code == 0, second.stderr
    assert first.losses == second.losses
    assert first.losses[6] < first.losses[1]
    assert "validation loss at iteration 3 | lm loss value: " in second.stdout
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("layout", [DIST_OPT, ["--tensor-model-parallel-size", "2"]])
def test_a_resumed_run_continues_exactly(
    launch: Launch, tiny: list[str], tmp_path: Path, layout: list[str]
) -> None:
    """With dropout and Adam's state, loss by loss; also when an interruption left a ruin."""
    flags = [*tiny, *layout, "--train-iters", "6"]
    saving = ["--save", str(tmp_path), "--save-interval", "3"]
    (tmp_path / "iter_0000003.partial").mkdir()
    whole = launch(2, [*flags, *saving])
    assert whole.exit_code == 0, whole.stderr
    assert f"wrote checkpoints up to iteration 6 to {tmp_path}" in whole.stdout
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == "6\n"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003", "iter_0000006"]
    latest.write_text("3\n")
    resumed = launch(2, [*flags, "--load", str(tmp_path)])
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.losses == {i: whole.losses[i] for i in (4, 5, 6)}


def test_four_ranks_with_a_fault_traced(launch: Launch, tiny: list[str], tmp_path: Path) -> None:
    """3D layout, every kind of fault, one after the other; tracing changes no loss."""
    flags = [*tiny, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    flags += ["--train-iters", "5"]
    healthy = launch(4, flags)
    assert healthy.exit_code == 0, healthy.stderr
    faults = [
        "rank=3,kind=compute,factor=2,from=1,to=1",
        "rank=1,kind=link,factor=2,from=2,to=2",
        "rank=2,kind=host,factor=2,from=3,to=3",
        "rank=0,kind=loader,delay=5,from=4,to=4",
        "rank=0,kind=gc,delay=5,from=5,to=5",
    ]
    for fault in faults:
        flags += ["--inject-fault", fault]
    faulty = launch(4, [*flags, "--trace", "--trace-dir", str(tmp_path)])
    assert faulty.exit_code == 0, faulty.stderr
    assert faulty.losses == healthy.losses
    assert f"next: python aggregate.py -b {tmp_path}" in faulty.stdout
    assert len(list(tmp_path.glob("benchmark-data-*.json"))) == 4
    truth = json.loads((tmp_path / "ground-truth.json").read_text())
    assert [fault["kind"] for fault in truth["faults"]] == [
        "compute", "link", "host", "loader", "gc",
    ]  # fmt: skip
    _check_path(tmp_path)


def _check_path(folder: Path) -> None:
    """The critical path is what-if's replay, hop by hop, from a rank's begin of the step to an end.

    How well the replay holds is another matter: ranks that take turns on a core wait where no span
    of theirs says so, which the path shows as idle time. Nor do ranks begin together.
    """
    timeline = build_timeline(read_trace(folder))
    replay = replay_of_timeline(timeline)
    path = critical_path(replay)
    spans = timeline.spans.filter(pc.equal(timeline.spans["name"], "iteration"))
    iterations, begins_ns = numbers(spans, "iteration"), numbers(spans, "start_ns")
    ends_ns = begins_ns + numbers(spans, "duration_ns")
    assert path.steps
    for number, step in enumerate(path.steps):
        weights_s = replay.weights[step.nodes, step.lanes, number]
        assert weights_s.sum() == pytest.approx(replay.traced_s[number])
        assert step.work_ns.sum() + step.idle_ns.sum() == step.length_ns
        own = iterations == step.iteration
        assert begins_ns[own].min() <= step.begin_ns <= begins_ns[own].max()
        assert step.begin_ns < step.ends_ns[-1] <= ends_ns[own].max()


def test_wrong_sizes_are_one_sentence_from_one_rank(launch: Launch, tiny: list[str]) -> None:
    done = launch(3, [*tiny, "--train-iters", "1", "--tensor-model-parallel-size", "2"])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.count("error: the world size 3 is not divisible") == 1
    assert "training/" not in done.stderr.replace("training/pretrain", "")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train-iters 1 --inject-fault rank=9,kind=gc,factor=2", ("rank 9 is not one of", 1)),
        ("--train-iters 1 --distributed-backend nccl", ("needs a GPU and there is none", 1)),
        ("--train-iters 1 --load {folder} --exit-on-missing-checkpoint", ("has no latest_", 1)),
        ("--train-iters 1 --trace --trace-interval 0", ("--trace-interval is 0", 1)),
        ("--train-iters one", ("invalid int value: 'one'", 2)),
    ],
)
def test_one_rank_alone_says_what_is_wrong(
    launch: Launch, tiny: list[str], tmp_path: Path, flags: str, expected: tuple[str, int]
) -> None:
    message, exit_code = expected
    done = launch(1, [*tiny, *flags.format(folder=tmp_path).split()])
    assert done.exit_code == exit_code
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_does_not_fit_is_one_sentence(
    launch: Launch, tiny: list[str], tmp_path: Path
) -> None:
    flags = [*tiny, "--disable-bias-linear", "--train-iters", "1", "--load", str(tmp_path)]
    assert launch(1, [*flags, "--save", str(tmp_path)]).exit_code == 0
    foreign = launch(1, [*flags, "--num-experts", "2"])
    assert foreign.exit_code == 1
    assert "has num experts None and this run 2; give the model's" in foreign.stderr
    shard = next((tmp_path / "iter_0000001").glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    cut_off = launch(1, flags)
    assert cut_off.exit_code == 1
    assert cut_off.stderr.startswith("error: cannot load the checkpoint")
    assert cut_off.stderr.count("\n") == 1
    (tmp_path / "iter_0000001" / "common.pt").write_bytes(b"damaged")
    damaged = launch(1, flags)
    assert damaged.exit_code == 1
    assert "cannot load the checkpoint" in damaged.stderr
    assert "Traceback" not in damaged.stderr


def test_traced_losses_are_those_of_a_plain_loop(
    launch: Launch,
    plain_loop: Callable[[], list[str]],
    tiny: list[str],
    log_line: re.Pattern[str],
    tmp_path: Path,
) -> None:
    """To the last printed digit, dropout included."""
    expected = plain_loop()
    assert len(expected) == 4
    flags = [*tiny, "--tensor-model-parallel-size", "2", "--train-iters", "4"]
    done = launch(2, [*flags, "--trace", "--trace-dir", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert [(line["loss"], line["norm"]) for line in log_line.finditer(done.stdout)] == expected


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks(
    launch: Launch, tiny: list[str], tmp_path: Path
) -> None:
    """Rank 0 alone meets the error, in mid-run, while the others wait for it."""
    (tmp_path / "file").write_text("")
    saving = ["--save", str(tmp_path / "file" / "checkpoints"), "--save-interval", "1"]
    done = launch(2, [*tiny, "--train-iters", "3", *saving], timeout_s=60)
    assert done.exit_code == 1
    assert list(done.losses) == [1]
    assert done.stderr.count("error: cannot write a checkpoint to") == 1
    assert "[rank" not in done.stderr


def test_when_a_rank_is_killed_the_job_ends(under_way: Start, tiny: list[str]) -> None:
    process = under_way(2, [*tiny, "--train-iters", "100000"])
    assert process.stdout is not None
    assert any(" iteration " in line for line in process.stdout)
    victim, *others = psutil.Process(process.pid).children()
    victim.kill()
    assert process.wait(60) == 1
    assert not any(rank.is_running() for rank in others)
    assert "Traceback" not in process.stdout.read().split("torch/distributed/elastic")[0]
