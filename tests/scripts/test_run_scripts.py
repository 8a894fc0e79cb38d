"""run_single_gpt.sh, run_master_gpt.sh and run_worker_gpt.sh: options, plans, refusals."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Run

SINGLE, MASTER, WORKER = "run_single_gpt.sh", "run_master_gpt.sh", "run_worker_gpt.sh"
BACKEND = "--distributed-backend"
# Writes its variables and words to a file instead of training.
RECORDER = """#!/usr/bin/env bash
[[ $* != *check_flags.py* && $1 != -c ]] || exit 0
{ env | grep -E '^(OMP_|CUDA_DEV|GLOO|NCCL|PYTHON(PATH|UNB))' | sort; pwd
  printf '<%s>\\n' "$@"; } > "$RECORD"
exit "${CODE:-0}"
"""
GPUS = """#!/usr/bin/env bash
for ((i = 0; i < ${NUM_GPUS:-4}; i++)); do echo "GPU $i: Stand-in (UUID: GPU-$i)"; done
"""
ADDRESSES = """#!/usr/bin/env bash
echo "1: lo    inet 127.0.0.1/8 scope host lo\\\\ valid_lft forever"
echo "2: ib0    inet 10.1.0.2/24 brd 10.1.0.255 scope global ib0\\\\ valid_lft forever"
echo "2: ib0    inet6 fd00::2/64 scope global ib0\\\\ valid_lft forever"
"""


@pytest.fixture
def plan(run: Run, programs: Callable[[str, str], Path]) -> Callable[..., dict[str, str]]:
    """The flags of a dry run, `--name: value`, on a machine with four GPUs and address 10.1.0.2."""
    programs("nvidia-smi", GPUS)
    programs("ip", ADDRESSES)
    recorder = programs("recorder", RECORDER)

    def dry_run(script: str, *words: str, **variables: str | None) -> dict[str, str]:
        done = run(script, "--dry-run", *words, MEGASCAN_PYTHON=str(recorder), **variables)
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


def test_a_master_under_another_address_says_so(
    run: Run, programs: Callable[[str, str], Path]
) -> None:
    """Behind an address of the network, or with names of a scheduler, it goes on."""
    programs("ip", ADDRESSES)
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
def test_what_a_dry_run_prints_is_what_is_run(
    run: Run, programs: Callable[[str, str], Path], tmp_path: Path, script: str, words: list[str]
) -> None:
    """The printed text, given to bash, starts the same program with the same words."""
    programs("nvidia-smi", GPUS)
    programs("ip", ADDRESSES)
    recorder = str(programs("recorder", RECORDER))
    printed = run(script, "--dry-run", *words, MEGASCAN_PYTHON=recorder).stdout
    by_variable = run(script, *words, MEGASCAN_PYTHON=recorder, MEGASCAN_DRY_RUN="1").stdout
    assert printed == by_variable
    real, copied = tmp_path / "real", tmp_path / "copied"
    assert run(script, *words, MEGASCAN_PYTHON=recorder, RECORD=str(real)).returncode == 0
    plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RECORD": str(copied)}
    subprocess.run(["bash", "-c", printed], check=True, env=plain, timeout=30)
    assert real.read_text() == copied.read_text()
    assert "<training.pretrain_gpt>" in real.read_text()


def test_the_exit_code_is_the_launchers(
    run: Run, programs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    recorder = str(programs("recorder", RECORDER))
    done = run(SINGLE, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"), CODE="7")
    assert done.returncode == 7
    assert "next" not in done.stdout
    done = run(SINGLE, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].endswith("aggregate.py -b trace_output -d")


@pytest.mark.parametrize(
    ("script", "words", "code", "says"),
    [
        (SINGLE, ["--num-gpus", "x"], 2, "--num-gpus is 'x', expected a whole number"),
        (SINGLE, ["--num-gpus", "0"], 2, "--num-gpus is '0'"),
        (SINGLE, ["--num-gpus", "-1"], 2, "--num-gpus is '-1'"),
        (SINGLE, ["--num-gpus", "1;reboot"], 2, "--num-gpus is '1;reboot'"),
        (SINGLE, ["--num-gpus", "08"], 2, "--num-gpus is '08'"),
        (SINGLE, ["--num-gpus"], 2, "--num-gpus needs a value"),
        (SINGLE, ["--num-gpus", "5"], 1, "--num-gpus is 5 and this machine has 4 GPUs"),
        (SINGLE, ["--trace-dir", "--dry-run"], 2, "needs a value and is followed by --dry-run"),
        (SINGLE, ["--trace-dir", ""], 2, "--trace-dir needs a value"),
        (SINGLE, ["--model", "70b"], 2, "--model is '70b', expected small or 8b"),
        (SINGLE, ["--model", "small 8b"], 2, "--model is 'small 8b', expected small or 8b"),
        (SINGLE, ["--cpu", "--num-gpus", "900000"], 1, "(32 a core); ask for fewer"),
        (SINGLE, ["--trace-dir", "/dev/null/x"], 1, "and /dev/null is no folder"),
        (SINGLE, ["--save", "/dev/null"], 1, "--save is /dev/null, and /dev/null is no folder"),
        (SINGLE, ["--no-trace", "--trace-dir", "x"], 2, "exclude each other; keep one"),
        (SINGLE, ["--save-interval", "5"], 2, "--save-interval belongs to --save DIR; add it"),
        (SINGLE, ["--dry-run=yes"], 2, "'yes' is no option"),
        (SINGLE, ["--global-batch-size", "6"], 1, "is not divisible by 4, the micro-batch size 2"),
        (SINGLE, [""], 2, "'' is no option"),
        (SINGLE, ["--tp", "3"], 1, "4 ranks (1 x 4) cannot be split into replicas of tensor 3"),
        (SINGLE, ["--pp", "8"], 1, "cannot be split into replicas"),
        (SINGLE, ["--num-layers", "4"], 2, "put flags of the trainer after --"),
        (SINGLE, ["four"], 2, "'four' is no option"),
        (SINGLE, ["--data-path", "nowhere/c"], 1, "there is no nowhere/c.bin with nowhere/c.idx"),
        (SINGLE, ["--vocab-file", "v"], 2, "a tokenizer is given and no --data-path"),
        (SINGLE, ["--", "--train-iters=3"], 2, "--train-iters is an option of this script"),
        (SINGLE, ["--", "--mock-data"], 2, "--mock-data is an option of this script"),
        (SINGLE, ["--node-ips", "a,b"], 2, "unknown option '--node-ips'"),
        (MASTER, ["--multi-node"], 2, "--multi-node needs --node-ips with two nodes or more"),
        (MASTER, ["--multi-node", "--node-ips", "10.1.0.2"], 2, "--multi-node needs --node-ips"),
        (MASTER, ["--node-ips", "10.1.0.2,,10.1.0.3"], 2, "expected addresses with a comma"),
        (MASTER, ["--node-ips", "10.1.0.2, 10.1.0.3"], 2, "expected addresses with a comma"),
        (MASTER, ["--node-ips", "10.1.0.2,$(id)"], 2, "--node-ips holds '$(id)'"),
        (MASTER, ["--node-ips", "10.1.0.2,10.1.0.2"], 2, "--node-ips names 10.1.0.2 twice"),
        (MASTER, ["--node-ips", "10.1.0.2,10.1.0.300"], 2, "--node-ips holds '10.1.0.300'"),
        (MASTER, ["--node-ips", "10.1.0.2,10.1.0"], 2, "--node-ips holds '10.1.0'"),
        (MASTER, ["--node-ips", "10.1.0.2:29500,10.1.0.3"], 2, "expected an address like"),
        (MASTER, ["--node-ips", "10.1.0.2,-b"], 2, "--node-ips holds '-b'"),
        (MASTER, ["--node-ips", "10.1.0.8,10.1.0.9"], 1, "none of 10.1.0.8,10.1.0.9 is an address"),
        (MASTER, ["--node-ips", "10.1.0.2,b", "--master-addr", "a b"], 2, "--master-addr holds"),
        (MASTER, ["--master-addr", "10.1.0.2"], 2, "--master-addr belongs to --node-ips"),
        (MASTER, ["--node-ips", "10.1.0.2,b", "--rdzv-id", "x"], 2, "belong to --elastic"),
        (MASTER, ["--node-ips", "10.1.0.9,10.1.0.2"], 1, "this machine is node 1 of 10.1.0.9,"),
        (MASTER, ["--node-ips", "10.1.0.2,b", "--max-restarts", "2"], 2, "needs --elastic"),
        (MASTER, ["--node-ips", "10.1.0.2,b", "--master-port", "70000"], 2, "from 1 to 65535"),
        (MASTER, ["--node-ips", "10.1.0.2,b", "--nnodes", "2"], 2, "belong to --elastic"),
        (WORKER, ["--elastic", "--rdzv-endpoint", "a"], 2, "needs --nnodes MIN:MAX"),
        (MASTER, ["--elastic"], 2, "needs a place to meet"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "4:1"], 2, "the smaller"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "many"], 2, "expected MIN:MAX"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a:b", "--nnodes", "2"], 2, "with a port from 1"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a:0", "--nnodes", "2"], 2, "with a port from 1"),
        (MASTER, ["--elastic", "--rdzv-endpoint", ":1", "--nnodes", "2"], 2, "endpoint holds ''"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--master-addr", "b", "--nnodes", "2"], 2,
         "--rdzv-endpoint and --master-addr exclude each other"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "1:30"], 1, "a smaller range"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "1:2", "--tp", "8"], 1,
         "4 ranks (1 x 4) cannot be split"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "2:4", "--tp", "8"], 1,
         "12 ranks (3 x 4) cannot be split"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "1:3", "--global-batch-size",
                  "16"], 1, "is not divisible by 12"),
        (MASTER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "1", "--multi-node"], 2,
         "--multi-node needs"),
        (WORKER, ["--elastic", "--rdzv-endpoint", "a", "--nnodes", "2", "--node-rank", "1"], 2,
         "--node-rank is a place in --node-ips"),
        (MASTER, ["--node-rank", "1"], 2, "unknown option '--node-rank'"),
        (WORKER, [], 2, "a worker needs --node-ips with two nodes or more"),
        (WORKER, ["--node-ips", "10.1.0.2"], 2, "a worker needs --node-ips with two nodes or more"),
        (WORKER, ["--node-ips", "10.1.0.2,10.1.0.9"], 1, "start scripts/run_master_gpt.sh here"),
        (WORKER, ["--node-ips", "10.1.0.8,10.1.0.9"], 1, "none of 10.1.0.8,10.1.0.9 is an address"),
        (WORKER, ["--node-ips", "127.0.0.1,10.1.0.2"], 1, "say which one this is with --node-rank"),
        (WORKER, ["--node-ips", "10.1.0.9,10.1.0.2", "--node-rank", "2"], 2, "has 2 nodes"),
        (WORKER, ["--node-ips", "10.1.0.9,10.1.0.2", "--node-rank", "x"], 2, "--node-rank is 'x'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_said_in_one_sentence(
    run: Run,
    programs: Callable[[str, str], Path],
    script: str,
    words: list[str],
    code: int,
    says: str,
) -> None:
    programs("nvidia-smi", GPUS)
    programs("ip", ADDRESSES)
    done = run(script, *words, MEGASCAN_PYTHON="/nowhere/python")
    assert says in done.stderr
    assert done.returncode == code
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")][1:] == []


def test_flags_of_the_trainer_are_checked_before_a_rank_starts(run: Run) -> None:
    wrong = run(SINGLE, "--num-gpus", "2", "--", "--num-layers", "3", "--hidden-size", "30")
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith("error: --hidden-size 30 is not divisible by")
    unknown = run(SINGLE, "--dry-run", "--num-gpus", "2", "--", "--no-such-flag")
    assert unknown.returncode == 2
    assert "--no-such-flag" in unknown.stderr
    assert "Traceback" not in wrong.stderr + unknown.stderr


def test_the_8b_flags_fit_together(run: Run) -> None:
    done = run(SINGLE, "--model", "8b", "--num-gpus", "4", "--tp", "4", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "meant for GPUs" in done.stderr


def test_without_gpus_and_without_python(run: Run) -> None:
    done = run(SINGLE, "--dry-run", MEGASCAN_PYTHON="/nowhere/python", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "no GPU found on this machine; training with 4 processes on the CPU" in done.stderr
    assert "the training flags are not checked" in done.stderr
    done = run(SINGLE, MEGASCAN_PYTHON="/nowhere/python", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "MEGASCAN_PYTHON is /nowhere/python, which cannot be run" in done.stderr


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("exit 1", "which is no Python 3.11 or newer"),
        ('exec "$REAL" -S "$@"', "has no torch and no megatron.core: install MegaScan with the"),
    ],
)
def test_a_python_that_will_not_do(
    run: Run, programs: Callable[[str, str], Path], python: str, says: str
) -> None:
    """Too old, or without torchrun: a sentence, and no rank is started."""
    program = str(programs("bare-python", f"#!/bin/bash\n{python}\n"))
    done = run(SINGLE, "--num-gpus", "2", MEGASCAN_PYTHON=program, REAL=sys.executable)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_name_without_an_address_is_waited_for_and_then_said(
    run: Run, programs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Names of a cluster may come late; one that never comes is no puzzle for torchrun."""
    recorder = str(programs("recorder", RECORDER))
    programs("sleep", '#!/bin/bash\necho "$1" >> "$WAITED"\n')
    waited = tmp_path / "waited"
    words = ["--node-ips", "127.0.0.1,10.1.0.9", "--master-addr", "gone.invalid"]
    done = run(MASTER, *words, MEGASCAN_PYTHON=recorder, WAITED=str(waited))
    assert done.returncode == 1
    assert "gone.invalid has no address yet; waiting a minute" in done.stderr
    assert "error: the nodes cannot meet at gone.invalid" in done.stderr.splitlines()[-1]
    assert sum(map(int, waited.read_text().split())) == 60


def test_the_next_command_can_be_pasted(
    run: Run, programs: Callable[[str, str], Path], tmp_path: Path
) -> None:
    recorder = str(programs("recorder", RECORDER))
    words = ["--node-ips", "127.0.0.1,10.1.0.9", "--master-port", "29417", "--trace-dir", "a b"]
    done = run(MASTER, *words, MEGASCAN_PYTHON=recorder, RECORD=str(tmp_path / "r"))
    judge, gather = (shlex.split(line) for line in done.stdout.splitlines())
    assert judge[-3:] == ["-b", "a b", "-d"]
    assert gather[-3:-1] == ["gathered", "a b"]
    assert gather[-1] == f"10.1.0.9:{tmp_path}/work/a b"


def test_a_taken_port_is_said_before_anything_starts(run: Run) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = run(MASTER, "--node-ips", "127.0.0.1,b.invalid", "--master-port", port)
    assert done.returncode == 1
    assert f"port {port} of this machine is taken" in done.stderr
