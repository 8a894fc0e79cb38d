"""Comparing schedules: several trainings in one set of processes, in exact digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests import ranks

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
    --lr 5e-3 --train-iters 3 --log-interval 1 --num-workers 0 --eval-iters 0
    --distributed-backend gloo --distributed-timeout-minutes 3
"""

Found = dict[str, list[dict[str, object]]]
"""By run: losses, norms and hash of the parameters on each rank."""
TrainTraced = Callable[[Path, Sequence[str]], None]
Compare = Callable[[int, Sequence[str], Mapping[str, Sequence[str]]], Found]
CompareIn = Callable[[Path, int, Sequence[str], Mapping[str, Sequence[str]]], Found]


@pytest.fixture
def compare(tmp_path: Path, compare_in: CompareIn) -> Compare:
    """Train all runs on some ranks; `flags` are those that all have, after the model's."""
    return partial(compare_in, tmp_path)


@pytest.fixture(scope="session")
def compare_in() -> CompareIn:
    """The same in a folder that is named, for fixtures that several tests share."""

    def train(
        folder: Path, num_ranks: int, flags: Sequence[str], runs: Mapping[str, Sequence[str]]
    ) -> Found:
        named = {name: [*MODEL.split(), *flags, *own] for name, own in runs.items()}
        (folder / "runs.json").write_text(json.dumps(named), encoding="utf-8")
        program = Path(__file__).with_name("compare_ranks.py")
        words = (program, folder / "runs.json", folder / "found")
        ranks.run(*words, num_ranks=num_ranks, timeout_s=900, check=True)
        of_rank = [
            json.loads((folder / f"found.{rank}.json").read_text(encoding="utf-8"))
            for rank in range(num_ranks)
        ]
        return {name: [found[name] for found in of_rank] for name in runs}

    return train


@pytest.fixture
def train_traced() -> TrainTraced:
    """Train six iterations on four ranks, two stages and two replicas, all of them traced."""

    def train(folder: Path, flags: Sequence[str]) -> None:
        words = ["--trace", "--trace-dir", str(folder), "--trace-interval", "6"]
        words += ["--continuous-trace-iterations", "6", "--train-iters", "6"]
        words += ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8"]
        program = ["-m", "training.pretrain_gpt", *MODEL.split(), *words, *flags]
        done = ranks.run(*program, num_ranks=4, check=True)
        assert "tracing stopped" not in done.stderr

    return train
