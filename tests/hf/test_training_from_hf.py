"""A run starts from a Hugging Face folder; its checkpoints know what they are and change layout."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.hf.round_trips import same_bits
from training.checkpoint_folder import checkpoint_folder, saved_settings

from .conftest import Run, RunAll

TRAINER = ["pretrain_gpt", "--distributed-backend", "gloo", "--mock-data", "--num-workers", "0"]
# A learning rate of zero keeps the weights, so that they can be compared bit by bit.
JOB = shlex.split(
    "--tokenizer-type NullTokenizer --vocab-size 202 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 0 --weight-decay 0 --eval-iters 0 --log-interval 1"
)
TP2_PP2_VPP2 = shlex.split(
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2"
)


# A checkpoint of the first trainer: sizes, and no flags of the model.
OLDER = """
from pathlib import Path
from types import SimpleNamespace as Of
from megascan.errors import InputError
from training.checkpoint import check_model

settings, here = Of(checkpoint=Of(finetune=False)), Of(model={"num_layers": 2, "swiglu": True})
for number in (2, 3):
    common = {"sizes": {"num_layers": number}, "flags": {"seed": 1}}
    try:
        check_model(settings, Path("older"), common, here)
        print("taken")
    except InputError as error:
        print(error)
"""


@pytest.mark.timeout(600)
@pytest.mark.distributed
def test_a_folder_is_trained_in_one_layout_resumed_in_two_others_and_exported(
    run_all: RunAll, models: Path, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    source, train = models / "llama31-tied", [*TRAINER, *JOB]
    again = ("--use-checkpoint-args", "--no-load-optim")
    # All in the same four Python processes: nothing of a job that is over may be left in them.
    done = run_all(
        [*train, *TP2_PP2_VPP2, "--load-hf", source, "--save", first, "--train-iters", 1],
        [*train, *again, "--load", first, "--save", second, "--train-iters", 2],
        [*train, *again, "--tensor-model-parallel-size", 4, "--load", second, "--save", third,
         "--train-iters", 3],
        num_ranks=4,
    )  # fmt: skip
    assert done.codes == [0, 0, 0], done.errors
    saved = saved_settings(third)
    assert saved.folder == checkpoint_folder(third, 3)
    assert saved.vocab_size == 203
    assert saved.model["rotary_base"] == 500000
    assert saved.model["use_rope_scaling"] is True
    done = run_all(["convert", "--load", third, "--to-hf", tmp_path / "back"])
    assert done.codes == [0], done.errors
    assert same_bits(source, tmp_path / "back")


def test_a_checkpoint_is_resumed_without_flags_of_its_model_and_refuses_those_of_another(
    run_all: RunAll, models: Path, tmp_path: Path
) -> None:
    checkpoint, older = tmp_path / "checkpoint", tmp_path / "older"
    done = run_all(["convert", "--from-hf", models / "qwen3", "--save", checkpoint])
    assert done.codes == [0], done.errors
    shutil.copytree(checkpoint, older)
    (checkpoint_folder(older, 0) / "settings.json").unlink()
    train = [*TRAINER, *JOB, "--train-iters", 1]
    from_checkpoint = [*train, "--use-checkpoint-args", "--load"]
    from_folder = [*train, "--load-hf", models / "gpt2"]
    done = run_all(
        [*from_checkpoint, checkpoint],
        [*from_checkpoint, checkpoint, "--rotary-base", 999],
        [*from_checkpoint, older],
        [*from_folder, "--hidden-size", 96],
        [*from_folder, "--vocab-size", 500],
    )
    assert done.codes == [0, 1, 1, 1, 1], done.errors
    sentences = (
        "has rotary base 10000 and this run 999",
        "written before checkpoints said what model they hold",
        "has hidden size 48 and this run 96; leave the flags",
        "the tokenizer has 501 ids and the model knows 203",
    )
    for sentence, text in zip(sentences, done.errors[1:], strict=True):
        assert sentence in text


def test_a_checkpoint_without_flags_of_its_model_is_compared_by_its_sizes(run: Run) -> None:
    done = run("-c", OLDER)
    assert done.stdout.splitlines() == [
        "taken",
        "the checkpoint older has num layers 3 and this run 2; give the model's flags as they were "
        "when it was saved",
    ], done.stderr


def test_a_checkpoint_that_is_moved_has_its_tokenizer_with_it(
    run_all: RunAll, models: Path, tmp_path: Path
) -> None:
    checkpoint, moved = tmp_path / "checkpoint", tmp_path / "moved"
    done = run_all(["convert", "--from-hf", models / "llama2", "--save", checkpoint])
    assert done.codes == [0], done.errors
    checkpoint.rename(moved)
    tokenizer = saved_settings(moved).tokenizer
    assert tokenizer is not None
    assert str(tokenizer.tokenizer_model).startswith(str(moved))


@pytest.mark.distributed
def test_ranks_that_share_a_group_of_keys_train_as_one_rank_does(
    run_all: RunAll, models: Path
) -> None:
    train = [*TRAINER, *JOB, "--lr", "1e-2", "--train-iters", 3]
    train += ["--load-hf", models / "one-group"]
    done = run_all(train, [*train, "--tensor-model-parallel-size", 2], num_ranks=2)
    assert done.codes == [0, 0], done.errors
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.output)]
    assert len(losses) == 6
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    assert losses[2] < losses[0]
