"""Do memory and disk stay flat in a long run? Thousands of iterations, every one of them traced.

    python -m benchmarks.soak [--iterations 4000] [--max-bytes 2MB] [-o RESULT.md]

The same tiny GPT on two gloo ranks, run without tracing, with it, with `--trace-max-bytes`, and
with that and `--trace-compress`. The resident memory of the larger rank and the bytes in the trace
folder are read from outside ten times a second. Growth is Theil and Sen's slope over the second
half of the run, with its 95 % interval; it is taken over means of stretches, since neighbouring
samples are not independent. Exits 1 when the folder was ever above the limit, or when the lower end
of memory's growth is above 1 MB in 1000 iterations.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
from scipy import stats

from benchmarks.jobs import DEVICES, ROOT, environment_line, model, torchrun
from megascan.config import parse_size
from megascan.reader import read_trace

NUM_RANKS = 2
TORCHRUN = torchrun(NUM_RANKS)
_WINDOW = "10"
_PERIOD_S = 0.1
_NUM_STRETCHES, _MIN_SAMPLES = 20, 10
_MAX_GROWTH_BYTES = 1_000_000
"""Of memory in 1000 iterations: three million iterations of a month would take 3 GB."""
_ITERATION = re.compile(r"iteration\s+(\d+)/")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sample:
    """What was in use when training had come so far; memory is that of the largest rank."""

    iteration: int
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Soak:
    """One run: growth is in bytes per 1000 iterations, (median, low, high)."""

    name: str
    samples: tuple[Sample, ...]
    memory_growth: tuple[float, float, float]
    disk_growth: tuple[float, float, float]
    limit_bytes: int
    num_windows: int

    @property
    def most_disk_bytes(self) -> int:
        """The fullest that the folder was seen."""
        return max(sample.disk_bytes for sample in self.samples)

    def memory_at(self, share: float) -> int:
        """Memory when this share of the samples was taken; the last ones see the ranks end."""
        return self.samples[int(share * (len(self.samples) - 1))].memory_bytes

    @property
    def fault(self) -> str:
        """What is wrong with it, "" when nothing is."""
        if self.limit_bytes and self.most_disk_bytes > NUM_RANKS * self.limit_bytes:
            return f"{self.name}: {self.most_disk_bytes:,} bytes on disk, above the limit"
        if self.memory_growth[1] > _MAX_GROWTH_BYTES:
            return f"{self.name}: memory grows by {self.memory_growth[0]:,.0f} bytes"
        return ""


def soak(
    name: str,
    flags: Sequence[str],
    iterations: int,
    limit_bytes: int = 0,
    *,
    launcher: Sequence[str] = TORCHRUN,
) -> Soak:
    """Run the job with these flags and watch it; SystemExit with the output when it fails.

    `launcher` is what Python is given to start the ranks.
    """
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "trace"
        command = [
            *(sys.executable, *launcher, "-m", "training.pretrain_gpt"),
            *model(layers=1, hidden=16, heads=2, sequence=16),
            *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "128"),
            *("--eval-iters", "0", "--num-workers", "0", "--lr", "1e-4", *DEVICES["cpu"]),
            *("--global-batch-size", "2", "--train-iters", str(iterations)),
            *("--log-interval", "10"),
            *(flag.replace("FOLDER", str(folder)) for flag in flags),
        ]
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        samples = tuple(_watch(job, folder))
        traced = any(flag == "--trace" for flag in flags)
        num_windows = len(read_trace(folder).windows[0]) if traced else 0
    if len(samples) < _MIN_SAMPLES:
        raise SystemExit(f"{name}: too short to see anything, give more --iterations")
    return Soak(
        name=name,
        samples=samples,
        memory_growth=_growth(samples, [sample.memory_bytes for sample in samples]),
        disk_growth=_growth(samples, [sample.disk_bytes for sample in samples]),
        limit_bytes=limit_bytes,
        num_windows=num_windows,
    )


def _watch(job: subprocess.Popen[str], folder: Path) -> Iterator[Sample]:
    """Samples until the job ends."""
    assert job.stdout is not None  # asked for above
    log = _Log(job.stdout)
    while job.poll() is None:
        if log.iteration:
            memory_bytes = max(map(_memory_bytes, _descendants(job.pid)), default=0)
            if memory_bytes:  # else the ranks have ended and torchrun has not
                yield Sample(log.iteration, memory_bytes, _disk_bytes(folder))
        time.sleep(_PERIOD_S)
    log.join()
    if job.returncode:
        raise SystemExit(f"{job.args!r} failed:\n{''.join(log.lines)[-3000:]}")


class _Log(threading.Thread):
    """Reads what the job prints, and how far it has come."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.iteration = 0
        self.lines: list[str] = []
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Until the stream ends."""
        for line in self._stream:
            self.lines.append(line)
            if match := _ITERATION.search(line):
                self.iteration = int(match[1])


def _descendants(process_id: int) -> Iterator[int]:
    """Processes that torchrun started: the ranks."""
    try:
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _memory_bytes(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _disk_bytes(folder: Path) -> int:
    """Of all files, those that are being written too."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # replaced since it was listed
            continue
    return total


def _growth(samples: Sequence[Sample], values: Sequence[int]) -> tuple[float, float, float]:
    """Theil-Sen slope of the second half per 1000 iterations, over means of stretches."""
    half = len(samples) // 2
    iterations = np.array([sample.iteration for sample in samples[half:]], dtype=np.float64)
    parts = np.array_split(np.arange(len(iterations)), _NUM_STRETCHES)
    parts = [part for part in parts if len(part)]
    second = np.asarray(values[half:], dtype=np.float64)
    fit = stats.theilslopes(
        [second[part].mean() for part in parts], [iterations[part].mean() for part in parts]
    )
    return fit.slope * 1000, fit.low_slope * 1000, fit.high_slope * 1000


def runs(iterations: int, limit: str) -> Iterator[Soak]:
    """The four runs, one after the other."""
    trace = (
        *("--trace", "--trace-dir", "FOLDER", "--trace-interval", _WINDOW),
        *("--continuous-trace-iterations", _WINDOW),
    )
    bounded = (*trace, "--trace-max-bytes", limit)
    limit_bytes = parse_size(limit)
    yield soak("not traced", (), iterations)
    yield soak("traced", trace, iterations)
    yield soak(f"traced, at most {limit}", bounded, iterations, limit_bytes)
    compressed = (*bounded, "--trace-compress")
    yield soak(f"traced, at most {limit}, compressed", compressed, iterations, limit_bytes)


def render(found: Sequence[Soak], iterations: int, limit: str) -> str:
    """The result page."""
    lines: list[str] = [
        "# A long run",
        "",
        f"{environment_line('cpu')}. `python -m benchmarks.soak --iterations {iterations} "
        f"--max-bytes {limit}`: a tiny GPT on {NUM_RANKS} gloo ranks, every iteration traced at "
        f"`full` in windows of {_WINDOW}. Memory is the larger rank's resident set; growth is the "
        "Theil-Sen slope over the second half with its 95 % interval; disk is the trace folder, "
        f"files of both ranks, so that the limit is {NUM_RANKS} × {limit}.",
        "",
        "| run | memory at half, MB | at 95 %, MB | growth, kB per 1000 iterations | most on "
        "disk, kB | disk growth, kB per 1000 iterations | windows left |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in found:
        cells = (
            run.name,
            f"{run.memory_at(0.5) / 1e6:.1f}",
            f"{run.memory_at(0.95) / 1e6:.1f}",
            _interval(run.memory_growth),
            f"{run.most_disk_bytes / 1e3:,.0f}",
            _interval(run.disk_growth),
            str(run.num_windows or "–"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _interval(growth: tuple[float, float, float]) -> str:
    slope, low, high = (value / 1e3 for value in growth)
    return f"{slope:+,.0f} ({low:+,.0f} … {high:+,.0f})"


def main() -> int:
    """Run and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=4000)
    parser.add_argument("--max-bytes", default="2MB", metavar="SIZE")
    parser.add_argument("-o", "--output", type=Path, metavar="RESULT.md")
    arguments = parser.parse_args()
    found = []
    for run in runs(arguments.iterations, arguments.max_bytes):
        print(f"{run.name}: done", file=sys.stderr)
        found.append(run)
    page = render(found, arguments.iterations, arguments.max_bytes)
    print(page, end="")
    if arguments.output:
        arguments.output.write_text(page, encoding="utf-8")
    faults = [run.fault for run in found if run.fault]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
