"""What a run says at its start, what it leaves out, and how it ends with an error."""

from __future__ import annotations

import logging
import subprocess
import warnings
from collections.abc import Callable

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from megascan.errors import ConfigError, MissingError
from tests import ranks
from training import pretrain_gpt
from training.arguments import parse_settings, resolve_sizes
from training.checkpoint import reason_of
from training.distributed import (
    Launch,
    carry_out,
    choose_device,
    end_on_own_error,
    end_on_shared_error,
    is_lost_connection,
    read_launch,
    refusals_as_errors,
    silence,
)
from training.log import RankParameters, layout_line, parameter_lines

Ranks = dict[str, "subprocess.Popen[str]"]
Once = Callable[[object, Callable[[], Ranks]], Ranks]

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 1 --lr 1 --tensor-model-parallel-size 2 "
)


def launch_of(rank: int) -> Launch:
    return Launch(rank=rank, local_rank=rank, world_size=4, local_world_size=4)


def test_the_layout_names_what_this_job_has() -> None:
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    sizes = resolve_sizes(parse_settings((FLAGS + flags + "--global-batch-size 4").split()), 8)
    assert layout_line(sizes, "cpu") == (
        "using world size: 8, data-parallel size: 2, tensor-model-parallel size: 2, "
        "pipeline-model-parallel size: 2, model chunks on a rank: 2, number of microbatches: 2, "
        "gloo on the CPU"
    )
    plain = resolve_sizes(parse_settings(FLAGS.split()), 2)
    assert "chunks" not in layout_line(plain, "cuda:0")
    assert layout_line(plain, "cuda:0").endswith("nccl on GPUs")


def test_replicas_are_counted_once_stage_by_stage() -> None:
    places = [(1, 0, 7), (0, 1, 5), (0, 0, 5), (0, 1, 5)]
    shares = [
        RankParameters(pipeline_rank=stage, tensor_rank=tensor, num_parameters=num)
        for stage, tensor, num in places
    ]
    assert [line.split(" rank ")[1] for line in parameter_lines(shares)] == [
        "(0, 0): 5", "(1, 0): 5", "(0, 1): 7",
    ]  # fmt: skip


def test_known_noise_is_left_out_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.datasets.gpt_dataset")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence("cpu")
        try:
            warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
            warnings.warn("full scope is deprecated. Use something", stacklevel=1)
            warnings.warn("Apex is on fire", stacklevel=1)
            logger.warning("Unable to save MockGPTDataset indexes because path_to_cache is None")
            logger.warning("Unable to save GPTDataset indexes because path_to_cache is None")
        finally:
            for own in list(logger.filters):
                logger.removeFilter(own)
    assert [str(warning.message) for warning in seen] == ["Apex is on fire"]
    assert [record.getMessage() for record in caplog.records] == [
        "Unable to save GPTDataset indexes because path_to_cache is None"
    ]


def test_advice_about_gpus_is_heard_on_gpus() -> None:
    advice = "When using async grad allreduce it is recommended to set the environment variable "
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        silence("cuda:0")
        warnings.warn(advice + "CUDA_DEVICE_MAX_CONNECTIONS to 1", stacklevel=1)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [AssertionError("a\n b."), ValueError("a b"), ValueError("a  b")])
def test_what_megatron_core_refuses_is_one_sentence(error: Exception) -> None:
    with pytest.raises(ConfigError, match=r"^Megatron-Core refuses these flags: a b; change"):  # noqa: SIM117
        with refusals_as_errors():
            raise error


def test_of_a_gathered_failure_the_first_rank_speaks() -> None:
    gathered = CheckpointException("x", {2: (OSError("late"), None), 1: (KeyError("first"), None)})  # type: ignore[dict-item]
    assert reason_of(gathered) == "'first'"
    assert reason_of(EOFError()) == "EOFError"
    assert reason_of(RuntimeError("one\ntwo")) == "one"


def test_rank_zero_speaks_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_on_shared_error(launch_of(0), ConfigError("wrong")) == 1
    assert end_on_own_error(launch_of(0), MissingError("gone")) == 1
    assert capsys.readouterr().err == "error: wrong\nerror: gone\n"


@pytest.mark.parametrize(
    ("how", "said"), [("shared_error", ""), ("own_error", "error: rank 1: wrong\n")]
)
def test_other_ranks_wait_and_speak_only_alone(how: str, said: str, once: Once) -> None:
    """Both wait at the same time, for some seconds."""
    started = once(
        "started",
        lambda: {
            each: ranks.start("-c", _ENDING.format(how=each, then=""))
            for each in ("shared_error", "own_error")
        },
    )
    heard, _ = started[how].communicate(timeout=60)
    assert (started[how].returncode, heard) == (1, said)


def test_a_rank_that_the_launcher_ends_has_failed_as_well() -> None:
    then = "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()"
    done = ranks.run("-c", _ENDING.format(how="own_error", then=then), timeout_s=60)
    assert (done.returncode, done.stderr) == (1, "")


_ENDING = """
import os, signal, sys, threading
from megascan.errors import ConfigError
from training.distributed import Launch
from training.distributed import end_on_{how}
{then}
launch = Launch(rank=1, local_rank=1, world_size=2, local_world_size=2)
sys.exit(end_on_{how}(launch, ConfigError("wrong")))
"""


def test_ctrl_c_is_one_word_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("training.job.parse_job", interrupted)
    codes = []
    for rank in range(2):
        monkeypatch.setattr(pretrain_gpt, "read_launch", lambda _, rank=rank: launch_of(rank))
        codes.append(pretrain_gpt.main([]))
    assert codes == [130, 130]
    assert capsys.readouterr().err == "interrupted\n"


def test_a_lost_connection_is_told_from_other_failures() -> None:
    lost = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    assert is_lost_connection(RuntimeError(lost))
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_rank_whose_peer_stands_still_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As gloo says it: of a message and of a collective alike."""

    def wait() -> None:
        raise RuntimeError(
            "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
            "180000ms for recv operation to complete"
        )

    assert carry_out(launch_of(1), wait) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1: another rank has said nothing for 3 min (--distributed-")


def test_a_launcher_that_speaks_nonsense_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="must be numbers"):
        read_launch({"RANK": "first"})
    assert read_launch({}).local_world_size == 1


def test_unequal_shares_of_tokens_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = "--num-experts 4 --expert-model-parallel-size 2 --distributed-backend gloo "
    settings = parse_settings((FLAGS + flags + "--moe-token-dispatcher-type alltoall").split())
    with pytest.raises(MissingError, match="use allgather"):
        choose_device(settings, launch_of(0))
    assert choose_device(parse_settings((FLAGS + flags).split()), launch_of(0)) == "cpu"
