"""One `megascan aggregate` in a process of its own: seconds, memory, stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run of the command took; `stages` are (wall, CPU) seconds by stage.

    `seconds` and `cpu_seconds` are those of the whole process, interpreter and imports included;
    `peak_bytes` is its largest resident set.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output_bytes: int
    stages: dict[str, tuple[float, float]]


def measure(folder: Path, suffix: str) -> Measurement:
    """Aggregate a trace folder to a file of that suffix. RuntimeError with its words on failure."""
    with TemporaryDirectory(dir=folder.parent) as place:
        output, report = Path(place) / f"timeline{suffix}", Path(place) / "report.json"
        words = [str(report), "-b", str(folder), "-o", str(output)]
        log = Path(place) / "log.txt"
        began = time.perf_counter()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.aggregate_scale.worker", *words],
                cwd=ROOT,
                stdout=file,
                stderr=file,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise RuntimeError(f"megascan aggregate failed: {log.read_text()[-2000:]}")
        timed = json.loads(report.read_text())
        return Measurement(
            seconds=seconds,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_bytes=timed["peak_bytes"],
            output_bytes=output.stat().st_size,
            stages={name: (timed["seconds"][name], cpu) for name, cpu in timed["cpu"].items()},
        )


def reference_seconds() -> float:
    """Seconds of a fixed piece of work: how fast, and how busy, the machine is at the moment."""
    values = np.random.default_rng(0).integers(0, 1 << 40, 4_000_000)
    began = time.perf_counter()
    np.cumsum(np.sort(values))
    return time.perf_counter() - began
