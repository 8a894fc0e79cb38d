"""A run starts from a Hugging Face folder; its checkpoints know what they are and change layout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.checkpoint_folder import checkpoint_folder, saved_settings
from training.hf.weights import open_weights

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TRAINER = [
    "-m",
    "training.pretrain_gpt",
    "--distributed-backend",
    "gloo",
    "--mock-data",
    "--num-workers",
    "0",
]
# A learning rate of zero keeps the weights, so that they can be compared bit by bit.
JOB = [
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "202",
    "--seq-length",
    "32",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--lr",
    "0",
    "--weight-decay",
    "0",
    "--eval-iters",
    "0",
    "--log-interval",
    "1",
]
TP2_PP2_VPP2 = [
    "--tensor-model-parallel-size",
    "2",
    "--pipeline-model-parallel-size",
    "2",
    "--num-virtual-stages-per-pipeline-rank",
    "2",
]


def same_weights(one: Path, other: Path) -> bool:
    here, there = open_weights(one), open_weights(other)
    return set(here.file_of) == set(there.file_of) and all(
        torch.equal(here.read([name])[0], there.read([name])[0]) for name in here.file_of
    )


@pytest.mark.timeout(900)
@pytest.mark.distributed
def test_a_folder_is_trained_in_one_layout_resumed_in_two_others_and_exported(
    run: Run, models: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    source = models / "llama31-tied"

    def train(num_ranks: int, *flags: object) -> None:
        done = run(*TRAINER, *JOB, *flags, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr[-3000:]

    train(4, *TP2_PP2_VPP2, "--load-hf", source, "--save", first, "--train-iters", 1)
    again = ("--use-checkpoint-args", "--no-load-optim")
    train(1, *again, "--load", first, "--save", second, "--train-iters", 2)
    train(
        4, *again, "--tensor-model-parallel-size", 4, "--load", second, "--save", third,
        "--train-iters", 3,
    )  # fmt: skip
    saved = saved_settings(third)
    assert saved.folder == checkpoint_folder(third, 3)
    assert saved.vocab_size == 203
    assert saved.model["rotary_base"] == 500000
    assert saved.model["use_rope_scaling"] is True
    done = run("-m", "training.convert", "--load", third, "--to-hf", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    assert same_weights(source, tmp_path / "back")


def test_a_checkpoint_is_resumed_without_flags_of_its_model_and_refuses_those_of_another(
    run: Run, models: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    made = run("-m", "training.convert", "--from-hf", models / "qwen3", "--save", checkpoint)
    assert made.returncode == 0, made.stderr
    words = [*TRAINER, *JOB, "--load", checkpoint, "--use-checkpoint-args", "--train-iters", 1]
    done = run(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    other = run(*words, "--rotary-base", 999)
    assert other.returncode == 1
    assert "has rotary base 10000 and this run 999" in other.stderr
    (checkpoint_folder(checkpoint, 0) / "settings.json").unlink()
    older = run(*words)
    assert older.returncode == 1
    assert "written before checkpoints said what model they hold" in older.stderr


def test_flags_of_another_model_than_the_folder_holds_are_refused(run: Run, models: Path) -> None:
    words = [*TRAINER, *JOB, "--train-iters", 1, "--load-hf", models / "gpt2"]
    done = run(*words, "--hidden-size", 96)
    assert done.returncode == 1
    assert "has hidden size 48 and this run 96; leave the flags" in done.stderr
    done = run(*words, "--vocab-size", 500)
    assert done.returncode == 1
    assert "the tokenizer has 501 ids and the model knows 203" in done.stderr


def test_a_checkpoint_takes_the_files_of_its_tokenizer_along(
    run: Run, models: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds

    source = tmp_path / "source"
    source.mkdir()
    for file in (models / "llama2").iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    Tokenizer(kinds.WordLevel({"hello": 0, "</s>": 1}, "hello")).save(
        str(source / "tokenizer.json")
    )
    (source / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"})
    )
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    assert run("-m", "training.convert", "--from-hf", source, "--save", checkpoint).returncode == 0
    moved = tmp_path / "moved"
    checkpoint.rename(moved)
    tokenizer = saved_settings(moved).tokenizer
    assert tokenizer is not None
    assert str(tokenizer.tokenizer_model).startswith(str(moved))
    assert run("-m", "training.convert", "--load", moved, "--to-hf", back).returncode == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
