"""run_single_gpt.sh, run_master_gpt.sh and run_worker_gpt.sh: what they refuse, in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ranks

if TYPE_CHECKING:
    from conftest import Run

SINGLE, MASTER, WORKER = "run_single_gpt.sh", "run_master_gpt.sh", "run_worker_gpt.sh"


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
@pytest.mark.usefixtures("gpus", "addresses")
def test_bad_arguments_are_said_in_one_sentence(
    run: Run, script: str, words: list[str], code: int, says: str
) -> None:
    done = run(script, *words, MEGASCAN_PYTHON="/nowhere/python")
    assert says in done.stderr
    assert done.returncode == code
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: ")][1:] == []


def test_flags_of_the_trainer_are_checked_before_a_rank_starts(run: Run) -> None:
    python, two = ranks.warm(), ("--num-gpus", "2", "--")
    words = [*two, "--num-layers", "3", "--hidden-size", "30"]
    wrong = run(SINGLE, *words, MEGASCAN_PYTHON=python)
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith("error: --hidden-size 30 is not divisible by")
    unknown = run(SINGLE, "--dry-run", *two, "--no-such-flag", MEGASCAN_PYTHON=python)
    assert unknown.returncode == 2
    assert "--no-such-flag" in unknown.stderr
    assert "Traceback" not in wrong.stderr + unknown.stderr


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
    run: Run, programs: Callable[[str, str], Path], recorder: str, tmp_path: Path
) -> None:
    """Names of a cluster may come late; one that never comes is no puzzle for torchrun."""
    programs("sleep", '#!/bin/bash\necho "$1" >> "$WAITED"\n')
    waited = tmp_path / "waited"
    words = ["--node-ips", "127.0.0.1,10.1.0.9", "--master-addr", "gone.invalid"]
    done = run(MASTER, *words, MEGASCAN_PYTHON=recorder, WAITED=str(waited))
    assert done.returncode == 1
    assert "gone.invalid has no address yet; waiting a minute" in done.stderr
    assert "error: the nodes cannot meet at gone.invalid" in done.stderr.splitlines()[-1]
    assert sum(map(int, waited.read_text().split())) == 60


def test_a_taken_port_is_said_before_anything_starts(run: Run) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = run(MASTER, "--node-ips", "127.0.0.1,b.invalid", "--master-port", port)
    assert done.returncode == 1
    assert f"port {port} of this machine is taken" in done.stderr
