"""Two real launchers, as on two machines: their own folders, gathered, aggregated, judged."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pyarrow.compute as pc
import pytest

from megascan.reader import read_trace
from tests import ranks
from tests.launcher import free_port

if TYPE_CHECKING:
    from conftest import Run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"
LIMIT_S = 200


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of two machines: how to run a command on it, and a disk of its own."""

    address: str
    prefix: tuple[str, ...]
    disk: Path
    host: str


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A started script, and the file that it prints to."""

    process: subprocess.Popen[str]
    output: Path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Start a script on a node; whatever is left of it is ended."""
    ranks.forget_early_variables()
    started: list[Launcher] = []

    def launch(node: Node, script: str, *words: str) -> Launcher:
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("MEGASCAN", "SLURM", "TORCHELASTIC"))}  # fmt: skip
        variables = {**kept, "MEGASCAN_PYTHON": ranks.warm(), "CUDA_VISIBLE_DEVICES": ""}
        node.disk.mkdir(exist_ok=True)
        output = node.disk / f"output-{len(started)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*node.prefix, "bash", str(SCRIPTS / script), *words], cwd=node.disk, text=True,
                env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        started.append(Launcher(process=process, output=output))
        return started[-1]

    yield launch
    end_all_in(tmp_path)
    for launcher in started:
        launcher.process.wait(20)


def end_all_in(folder: Path) -> None:
    """End launchers, ranks, and what a killed rank has left behind, by where they run."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                process.kill()
        except psutil.Error:
            continue


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Two network namespaces with an address each on one wire, and a host name each.

    Where a machine forbids that: two addresses of this machine, which share its host name.
    """
    names = [f"megascan{os.getpid()}{letter}" for letter in "ab"]
    try:
        nodes = make_wire(names, tmp_path)
        yield nodes[0], nodes[1]
    except (OSError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"no network namespaces here ({error}): both nodes are one host", stacklevel=1
        )
        host = socket.gethostname()
        addresses = [("127.0.0.1", 0), ("127.0.0.2", 1)]
        first, second = (Node(address=address, prefix=(), disk=tmp_path / f"disk-{rank}", host=host)
                         for address, rank in addresses)  # fmt: skip
        yield first, second
    finally:
        for name in names if shutil.which("ip") else []:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def make_wire(names: list[str], folder: Path) -> list[Node]:
    """Raises OSError or CalledProcessError where that cannot be."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], capture_output=True, check=True)

    ip("netns", "add", names[0])
    ends = [f"ms{os.getpid()}{letter}" for letter in "ab"]
    ip("netns", "add", names[1])
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    nodes = []
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")
        host = f"node-{name[-1]}"
        prefix = ("ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c",
                  f'hostname {host} && exec "$@"', "bash")  # fmt: skip
        nodes.append(
            Node(address=f"10.77.0.{number}", prefix=prefix, disk=folder / host, host=host)
        )
        subprocess.run([*prefix, "true"], capture_output=True, check=True)
    return nodes


def finish(launcher: Launcher) -> str:
    code = launcher.process.wait(timeout=LIMIT_S)
    printed = launcher.output.read_text()
    assert code == 0, printed
    return printed


def gather_and_judge(run: Run, *disks: Path) -> dict[str, object]:
    """What the last lines of the two launchers tell to type next."""
    gathered = disks[0].parent / "gathered"
    done = run(
        "collect_traces.sh", "-o", str(gathered), *(str(disk / "trace_output") for disk in disks)
    )
    assert done.returncode == 0, done.stderr
    assert len(list(gathered.glob("benchmark-data-*.json"))) == 4
    verdict = gathered / "verdict.json"
    command = [sys.executable, "aggregate.py", "-b", str(gathered), "-d", "--json", str(verdict)]
    command += ["-o", str(gathered.with_suffix(".json"))]
    judged = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert judged.returncode == 0, judged.stderr
    found: dict[str, object] = json.loads(verdict.read_text())["detect"]
    return found


def test_a_fault_on_the_second_machine_is_named_with_its_host(
    two_machines: tuple[Node, Node], start: Callable[..., Launcher], run: Run
) -> None:
    """The worker finds its rank by its address; nothing but the wire joins the two."""
    first, second = two_machines
    words = ["--multi-node", "--node-ips", f"{first.address},{second.address}", "--num-gpus", "2",
             "--master-port", str(free_port()), "--train-iters", "22",
             "--global-batch-size", "4", "--",
             "--inject-fault", "rank=3,kind=compute,factor=4"]  # fmt: skip
    rank = [] if second.prefix else ["--node-rank", "1"]  # one machine has both addresses
    worker = start(second, "run_worker_gpt.sh", *rank, *words)  # before the first: it waits
    master = start(first, "run_master_gpt.sh", *words)
    said, _ = finish(master), finish(worker)
    assert f"collect_traces.sh -o gathered trace_output {second.address}:" in said
    for disk in (first.disk, second.disk):
        assert len(list((disk / "trace_output").glob("benchmark-data-*.json"))) == 2
    verdict = gather_and_judge(run, first.disk, second.disk)
    assert verdict["verdict"] == "degraded", verdict
    (finding,) = [found for found in verdict["findings"] if found["owner"] == "node"]  # type: ignore[attr-defined]
    assert (finding["ranks"], finding["cause"], finding["host"]) == ([3], "compute", second.host)


def test_a_killed_rank_restarts_the_job_and_both_attempts_can_be_read(
    start: Callable[..., Launcher], tmp_path: Path
) -> None:
    """Elastic, two launchers, a common disk: the second attempt resumes from the checkpoint."""
    node = Node(address="127.0.0.1", prefix=(), disk=tmp_path / "common", host="")
    words = ["--elastic", "--nnodes", "2", "--max-restarts", "1", "--num-gpus", "1", "--tp", "1",
             "--rdzv-endpoint", f"localhost:{free_port()}", "--train-iters", "40",
             "--save", "checkpoints", "--save-interval", "5"]  # fmt: skip
    launchers = [start(node, f"run_{role}_gpt.sh", *words)
                 for role in ("master", "worker")]  # fmt: skip
    marker = node.disk / "checkpoints" / "latest_checkpointed_iteration.txt"
    wait_for(lambda: marker.exists() and int(marker.read_text()) >= 10, launchers)
    kill_a_rank(node.disk, 1)
    reached = int(marker.read_text())
    for launcher in launchers:
        assert "next, name" in finish(launcher) or launcher is not launchers[0]
    attempts = runs_of(node.disk / "trace_output")
    assert [len(ranks) for ranks in attempts.values()] == [2, 2]
    last = [last_iteration(node.disk / "trace_output", run_id) for run_id in attempts]
    assert last[0] <= reached + 5 < last[1] <= 40


def wait_for(condition: Callable[[], bool], launchers: list[Launcher]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        for launcher in launchers:
            assert launcher.process.poll() is None, launcher.output.read_text()
        assert time.monotonic() < until_s, "nothing happened in time"
        time.sleep(0.2)


def kill_a_rank(folder: Path, group_rank: int) -> None:
    """Kill a rank of a launcher that runs in the folder; forked ones have another parent."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_rank = "training.pretrain_gpt" in words and "--nnodes" not in words
            if not is_rank or Path(process.cwd()) != folder:
                continue
            if process.environ()["GROUP_RANK"] == str(group_rank):
                process.kill()
                return
    raise AssertionError(f"no rank of launcher {group_rank} runs in {folder}")


def runs_of(folder: Path) -> dict[str, set[int]]:
    """Ranks of every run in the rank files of a folder, the runs in order of time."""
    found: dict[str, set[int]] = {}
    for path in folder.glob("benchmark-data-*.json"):
        for line in path.read_text().splitlines():
            if '"name":"megascan",' in line:
                header = json.loads(line.rstrip(","))["args"]
                found.setdefault(header["run_id"], set()).add(header["rank"])
    return dict(sorted(found.items()))


def last_iteration(folder: Path, run_id: str) -> int:
    """The last iteration of an attempt's trace, as any command reads it."""
    spans = read_trace(folder, run=run_id).spans
    return int(pc.max(spans["iteration"]).as_py())
