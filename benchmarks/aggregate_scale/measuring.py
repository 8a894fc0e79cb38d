"""One `megascan aggregate` in a process of its own and those it starts: seconds, memory, stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from benchmarks.jobs import ROOT

_REST = 20


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a run of the command took; `stages` are seconds on the wall by stage.

    `seconds` and `cpu_seconds` are those of the whole process and its children, interpreter and
    imports included; `peak_bytes` is the most memory that they have had together.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output_bytes: int
    stages: dict[str, float]
    cpu_stages: dict[str, float] = field(default_factory=dict)
    """Of the one process that the command is: all of its work only where it is done by threads."""


def measure(
    folder: Path,
    suffix: str,
    by: str = "processes",
    checkout: Path = ROOT,
    cores: Collection[int] | None = None,
) -> Measurement:
    """Aggregate a trace folder to a file of that suffix, by `processes` or `threads`.

    `checkout` is the MegaScan that does it, `cores` those it may use if not all. Raises
    RuntimeError with the command's words on failure.
    """
    words = [sys.executable, "-m", "benchmarks.aggregate_scale.worker"]
    if cores is not None:
        listed = ",".join(map(str, sorted(cores)))
        words = [sys.executable, "-c", _ON_CORES, listed, *words]
    with TemporaryDirectory(dir=folder.parent) as place:
        output, report = Path(place) / f"timeline{suffix}", Path(place) / "report.json"
        words += [str(report), by, "-b", str(folder), "-o", str(output)]
        measured = _measured(words, output, checkout)
        timed = json.loads(report.read_text())
        peak_bytes = max(timed["peak_bytes"], measured.peak_bytes)
        return replace(
            measured,
            peak_bytes=peak_bytes,
            stages=timed["seconds"],
            cpu_stages=timed.get("cpu_seconds", {}),  # an older checkout does not say
        )


def measure_original(folder: Path, command: Sequence[str]) -> Measurement:
    """Aggregate a folder by the original's own aggregator; `command` starts it. Without stages."""
    with TemporaryDirectory(dir=folder.parent) as place:
        output = Path(place) / "timeline.json"
        return _measured([*command, "-b", str(folder), "-o", str(output)], output, Path(place))


def _measured(words: Sequence[str], output: Path, inside: Path) -> Measurement:
    """Run a command in a folder; RuntimeError with its words when it fails."""
    log = output.parent / "log.txt"
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=inside, stdout=file, stderr=file)
        with Watch(process.pid) as watch:
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise RuntimeError(f"{words[0]} failed: {log.read_text()[-2000:]}")
    return Measurement(
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=watch.peak_bytes,
        output_bytes=output.stat().st_size,
        stages={},
    )


_ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class Watch:
    """Memory of a process and its children together, looked at a few times a second.

    Pages that they share count once (proportional set sizes). Looking at a large process takes
    long and holds it up, so it is done the more seldom.
    """

    def __init__(self, process_id: int) -> None:
        self.peak_bytes = 0
        self._process = psutil.Process(process_id)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        pause_s = 0.1
        while not self._ended.wait(pause_s):
            began = time.perf_counter()
            with suppress(psutil.Error):
                family = [self._process, *self._process.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(map(_share_bytes, family)))
            pause_s = max(0.1, _REST * (time.perf_counter() - began))


def _share_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended meanwhile
        return 0


def reference_seconds() -> float:
    """Seconds of a fixed piece of work: how fast, and how busy, the machine is at the moment."""
    values = np.random.default_rng(0).integers(0, 1 << 40, 4_000_000)
    began = time.perf_counter()
    np.cumsum(np.sort(values))
    return time.perf_counter() - began
