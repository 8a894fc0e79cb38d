"""run_single_gpt.sh, run_master_gpt.sh and run_worker_gpt.sh: their options, and what they run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ranks

if TYPE_CHECKING:
    from conftest import Run

SINGLE, MASTER, WORKER = "run_single_gpt.sh", "run_master_gpt.sh", "run_worker_gpt.sh"
BACKEND = "--distributed-backend"


@pytest.fixture
def plan(run: Run, gpus: None, addresses: None, recorder: str) -> Callable[..., dict[str, str]]:
    """The flags of a dry run, `--name: value`, on a machine with four GPUs and address 10.1.0.2."""

    def dry_run(script: str, *words: str, **variables: str | None) -> dict[str, str]:
        done = run(script, "--dry-run", *words, MEGASCAN_PYTHON=recorder, **variables)
        assert done.returncode == 0, done.stderr
        return read_plan(done.stdout)

    return dry_run


def read_plan(text: str) -> dict[str, str]:
    words = shlex.split(text)
    plan: dict[str, str] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            following = words[i + 1] if i + 1 < len(words) else ""
            plan[word] = "" if following.startswith("-") else following
        elif re.fullmatch(r"[A-Z_]+=.*", word):
            name, _, value = word.partition("=")
            plan[name] = value
    return plan


@pytest.mark.parametrize("script", [SINGLE, MASTER, WORKER, "collect_traces.sh", "slurm/submit.sh"])
def test_help_names_every_option_that_the_script_takes(run: Run, script: str) -> None:
    done = run(script, "--help", MEGASCAN_PYTHON="/nowhere")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith(f"usage: bash scripts/{script}")
    for option in re.findall(r"^ +(--[a-z-]+)\b", done.stdout, re.MULTILINE):
        said = run(script, option, "--no-such-option").stderr
        assert f"unknown option '{option}'" not in said, option


def test_every_option_that_is_taken_stands_in_the_help(run: Run) -> None:
    libraries = Path(__file__).parents[2] / "scripts/lib"
    text = "".join((libraries / name).read_text() for name in ("job.sh", "nodes.sh"))
    taken = set(re.findall(r"^    (--[a-z-]+(?: \| --[a-z-]+)*)\)", text, re.MULTILINE))
    options = {option for group in taken for option in group.split(" | ")} - {"--"}
    help_text = run(MASTER, "--help").stdout
    assert len(options) > 20
    assert {option for option in options if option not in help_text} == set()


def test_defaults_suit_one_machine_with_four_gpus(plan: Callable[..., dict[str, str]]) -> None:
    flags = plan(SINGLE)
    assert flags["--nproc-per-node"] == "4"
    assert (flags["--tensor-model-parallel-size"], flags["--pipeline-model-parallel-size"]) == (
        "2",
        "1",
    )
    assert flags["--distributed-backend"] == "nccl"
    assert flags["--trace-dir"] == "trace_output"
    assert (flags["--trace-interval"], flags["--continuous-trace-iterations"]) == ("5", "2")
    assert (flags["--trace-granularity"], flags["--transformer-impl"]) == ("full", "local")
    assert flags["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert {"--trace", "--mock-data", "--bf16", "--standalone"} <= set(flags)


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ((), {"NUM_GPUS": "8"}, {"--nproc-per-node": "8", "--global-batch-size": "32"}),
        ((), {"NUM_GPUS": "1"}, {"--nproc-per-node": "1", "--tensor-model-parallel-size": "1"}),
        ((), {"CUDA_VISIBLE_DEVICES": "1,3"}, {"--nproc-per-node": "2"}),
        ((), {"CUDA_VISIBLE_DEVICES": ""}, {"--nproc-per-node": "4", BACKEND: "gloo"}),
        (("--cpu", "--num-gpus", "6"), {}, {"--nproc-per-node": "6", BACKEND: "gloo"}),
        (("--tp", "2", "--pp", "2"), {}, {"--pipeline-model-parallel-size": "2"}),
        (("--cp", "2", "--tp", "1"), {}, {"--context-parallel-size": "2"}),
        (("--save", "c k"), {}, {"--save": "c k", "--load": "c k", "--save-interval": "100"}),
        (("--max-restarts", "3"), {}, {"--max-restarts": "3"}),
        (("--max-restarts=3", "--tp=1"), {}, {"--max-restarts": "3"}),
        (("--trace-dir=a=b",), {}, {"--trace-dir": "a=b"}),
        (("--num-gpus", "2", "--num-gpus", "4"), {}, {"--nproc-per-node": "4"}),
        (("--", "--trace-interval", "1"), {}, {"--trace-interval": "1"}),
        (("--model", "8b"), {}, {"--ffn-hidden-size": "14336", "--num-query-groups": "8"}),
        (("--model", "8b", "--tp", "1"), {}, {"--num-layers": "32", "--rotary-base": "500000"}),
    ],
)  # fmt: skip
def test_what_a_single_node_would_run(
    plan: Callable[..., dict[str, str]],
    words: tuple[str, ...],
    variables: dict[str, str],
    expected: dict[str, str],
) -> None:
    flags = plan(SINGLE, *words, **variables)
    assert expected.items() <= flags.items()


def test_the_pipeline_is_planned_where_that_is_asked_for(
    plan: Callable[..., dict[str, str]],
) -> None:
    assert "--use-dpp" in plan(SINGLE, "--tp", "1", "--pp", "4", "--use-dpp")
    assert "--use-dpp" not in plan(SINGLE, "--tp", "1", "--pp", "4")


def test_no_trace_means_no_trace_flag(plan: Callable[..., dict[str, str]]) -> None:
    assert not [flag for flag in plan(SINGLE, "--no-trace") if "trace" in flag]


def test_real_data_replaces_mock_data(plan: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    for name in ("c.bin", "c.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    prefix = str(tmp_path / "c")
    bpe = (
        "--vocab-file",
        str(tmp_path / "vocab.json"),
        "--merge-file",
        str(tmp_path / "merges.txt"),
    )
    flags = plan(SINGLE, "--data-path", prefix, *bpe)
    assert flags["--data-path"] == prefix
    assert flags["--tokenizer-type"] == "GPT2BPETokenizer"
    assert "--mock-data" not in flags
    flags = plan(SINGLE, "--data-path", prefix, "--tokenizer-model", str(tmp_path))
    assert flags["--tokenizer-type"] == "HuggingFaceTokenizer"


def test_nodes_in_rank_order(plan: Callable[..., dict[str, str]]) -> None:
    worker = plan(WORKER, "--multi-node", "--node-ips", "10.1.0.9,10.1.0.2,10.1.0.4")
    assert (worker["--nnodes"], worker["--node-rank"]) == ("3", "1")
    assert (worker["--master-addr"], worker["--master-port"]) == ("10.1.0.9", "29500")
    assert worker["GLOO_SOCKET_IFNAME"] == worker["NCCL_SOCKET_IFNAME"] == "ib0"
    assert worker["--global-batch-size"] == "48"
    master = plan(
        MASTER, "--node-ips", "fd00::2,10.1.0.4", "--master-port", "6000", "--num-gpus", "2"
    )
    assert (master["--nnodes"], master["--node-rank"], master["--nproc-per-node"]) == (
        "2",
        "0",
        "2",
    )
    assert (master["--master-addr"], master["--master-port"]) == ("fd00::2", "6000")
    named = plan(WORKER, "--node-ips", "first.invalid,second.invalid", "--node-rank", "1")
    assert named["--node-rank"] == "1"
    assert "NCCL_SOCKET_IFNAME" not in named
    own = plan(WORKER, "--node-ips", "10.1.0.9,10.1.0.2", NCCL_SOCKET_IFNAME="bond0")
    assert (own["NCCL_SOCKET_IFNAME"], own["GLOO_SOCKET_IFNAME"]) == ("bond0", "ib0")


def test_elastic_rendezvous(plan: Callable[..., dict[str, str]]) -> None:
    flags = plan(
        WORKER, "--elastic", "--nnodes", "1:4", "--max-restarts", "3", "--rdzv-endpoint", "10.1.0.9"
    )
    assert (flags["--nnodes"], flags["--max-restarts"]) == ("1:4", "3")
    assert (flags["--rdzv-backend"], flags["--rdzv-endpoint"]) == ("c10d", "10.1.0.9:29500")
    assert "--node-rank" not in flags
    # 2 to 8 replicas of two ranks: the batch can be split for 1, 2, 3 and 4 nodes.
    assert int(flags["--global-batch-size"]) % (2 * 24) == 0
    listed = plan(MASTER, "--elastic", "--node-ips", "10.1.0.2,10.1.0.9", "--save", "c")
    assert (listed["--nnodes"], listed["--local-addr"]) == ("1:2", "10.1.0.2")
    meeting = ("--elastic", "--nnodes", "2")
    for words, endpoint in (
        (["--rdzv-endpoint", "[fd00::9]:7000"], "[fd00::9]:7000"),
        (["--rdzv-endpoint", "fd00::9"], "[fd00::9]:29500"),
        (["--rdzv-endpoint", "first:7000"], "first:7000"),
        (["--master-addr", "first", "--master-port", "7001"], "first:7001"),
    ):
        assert plan(WORKER, *meeting, *words)["--rdzv-endpoint"] == endpoint


@pytest.mark.usefixtures("addresses")
def test_a_master_under_another_address_says_so(run: Run) -> None:
    """Behind an address of the network, or with names of a scheduler, it goes on."""
    words = ["--dry-run", "--node-ips", "10.9.0.1,10.9.0.2", "--master-addr", "10.9.0.1"]
    done = run(MASTER, *words, MEGASCAN_PYTHON="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "none of 10.9.0.1,10.9.0.2 is an address of this machine (127.0.0.1 " in done.stderr
    assert "--node-rank 0" in done.stdout


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (SINGLE, ["--num-gpus", "2", "--", "--seed", "7"]),
        (MASTER, ["--node-ips", "127.0.0.1,10.1.0.9", "--master-port", "29417", "--trace-dir",
                  "a folder/tr'ace"]),
        (WORKER, ["--node-ips", "10.1.0.9,10.1.0.2", "--master-port", "6000"]),
        (
            WORKER,
            ["--elastic", "--rdzv-endpoint", "10.1.0.9:7000", "--nnodes", "2", "--save", "$HOME"],
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpus", "addresses")
def test_what_a_dry_run_prints_is_what_is_run(
    run: Run, recorder: str, tmp_path: Path, script: str, words: list[str]
) -> None:
    """The printed text, given to bash, starts the same program with the same words."""
    printed = run(script, "--dry-run", *words, MEGASCAN_PYTHON=recorder).stdout
    by_variable = run(script, *words, MEGASCAN_PYTHON=recorder, MEGASCAN_DRY_RUN="1").stdout
    assert printed == by_variable
    real, copied = tmp_path / "real", tmp_path / "copied"
    assert run(script, *words, MEGASCAN_PYTHON=recorder, RECORD=str(real)).returncode == 0
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RECORD": str(copied)}
    subprocess.run(["bash", "-c", printed], check=True, env=plain, timeout=30)
    assert real.read_text() == copied.read_text()
    assert "<training.pretrain_gpt>" in real.read_text()


def test_the_exit_code_is_the_launchers(run: Run, recorder: str, tmp_path: Path) -> None:
    done = run(SINGLE, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"), CODE="7")
    assert done.returncode == 7
    assert "next" not in done.stdout
    done = run(SINGLE, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith("aggregate.py -b trace_output -d")


def test_the_8b_flags_fit_together(run: Run) -> None:
    words = ["--model", "8b", "--num-gpus", "4", "--tp", "4", "--dry-run"]
    done = run(SINGLE, *words, MEGASCAN_PYTHON=ranks.warm())
    assert done.returncode == 0, done.stderr
    assert "meant for GPUs" in done.stderr


def test_the_next_command_can_be_pasted(run: Run, recorder: str, tmp_path: Path) -> None:
    words = ["--node-ips", "127.0.0.1,10.1.0.9", "--master-port", "29417", "--trace-dir", "a b"]
    done = run(MASTER, *words, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"))
    judge, gather = (shlex.split(line) for line in done.stdout.splitlines())
    assert judge[-3:] == ["-b", "a b", "-d"]
    assert gather[-3:-1] == ["gathered", "a b"]
    assert gather[-1] == f"10.1.0.9:{tmp_path}/work/a b"
