"""The jobs that benchmarks train: models, layouts, and how their ranks are started."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_FOUR: dict[str, tuple[str, ...]] = {
    "TP2 DP2": ("--tensor-model-parallel-size", "2"),
    "PP2 DP2": ("--pipeline-model-parallel-size", "2"),
    "TP2 PP2": ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
    "DP4": (),
    "PP2 VPP2 DP2": (
        *("--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "2"),
    ),
    "TP2 SP DP2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
OF_TWO: dict[str, tuple[str, ...]] = {
    "DP2": (),
    "TP2": ("--tensor-model-parallel-size", "2"),
    "PP2": ("--pipeline-model-parallel-size", "2"),
    "PP2 VPP2": (
        *("--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "2"),
    ),
    "TP2 SP": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}
LAYOUTS = {2: OF_TWO, 4: OF_FOUR}
"""By the number of ranks; the first of each has its peers over the data-parallel axis."""
DATA = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "8192"),
    *("--eval-iters", "0", "--num-workers", "0", "--lr", "1e-4"),
)
DEVICES: dict[str, tuple[str, ...]] = {
    "cpu": ("--distributed-backend", "gloo"),
    "gpu": ("--distributed-backend", "nccl", "--bf16"),
}


def model(
    *, layers: int, hidden: int, heads: int, sequence: int, micro_batch: int = 1
) -> tuple[str, ...]:
    """The flags of a GPT's sizes."""
    return (
        *("--num-layers", str(layers), "--hidden-size", str(hidden)),
        *("--num-attention-heads", str(heads), "--seq-length", str(sequence)),
        *("--micro-batch-size", str(micro_batch)),
    )


def torchrun(num_ranks: int) -> tuple[str, ...]:
    """Return what Python is given before a program, or `-m` and a module, to start its ranks."""
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))


def run_ranks(num_ranks: int, words: Sequence[str]) -> str:
    """Start a module on some ranks of this host; its stdout.

    SystemExit with the output when it fails, or when training went on without its trace.
    """
    done = run_python([*torchrun(num_ranks), "-m", *words])
    lost = [line for line in done.stderr.splitlines() if line.startswith("tracing stopped")]
    if lost:
        raise SystemExit(f"{' '.join(words)}\n{lost[0]}")
    return done.stdout


def run_python(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; SystemExit with all output on failure."""
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\nfailed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done


def machine_line() -> str:
    """Return cores and Python, for pages on which neither torch nor a GPU has a part."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def environment_line(device: str) -> str:
    """Hardware and versions, for the head of a result page."""
    software = f"Python {platform.python_version()}, torch {version('torch')}, megatron-core " + (
        version("megatron-core")
    )
    if device == "cpu":
        return f"{os.cpu_count()} cores ({platform.machine()}), gloo, {software}"
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return f"{len(listing)} × {listing[0]}, NCCL, {software}"


def publish(page: str, output: Path | None) -> None:
    """Print a result page, and write it to a file where one is asked for."""
    print(page)
    if output:
        output.write_text(page, encoding="utf-8")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a recorded trace into a folder."""
    with tarfile.open(archive) as opened:
        # Python 3.11.4 and newer know filters, and 3.14 asks for one
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(folder)
