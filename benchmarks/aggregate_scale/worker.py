"""One `megascan aggregate` under a stop watch: `python -m benchmarks.aggregate_scale.worker`.

    worker REPORT.json processes|threads -b DIR -o FILE

runs the real command, its shards worked on by one or the other, with the functions of its stages
timed, and writes to REPORT.json what they took on the wall, and of this process's CPU. (What the
processes of a pool compute counts when they have ended, behind the last stage; threads are of this
process.)
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from megascan.cli import options

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

STAGES = {
    "read": ("megascan.reader", "read_ends"),
    "match": ("aggregate.merge", "match_spans"),
    "align": ("aggregate", "align"),
    "waits": ("aggregate.merge", "split_waits"),
    "settle": ("aggregate", "build_shards"),
    "lay": ("megascan.export.writing", "make_drawing"),
    "export": ("megascan.cli.aggregate", "write_timeline"),
}
"""Stage and the name under which the command calls it."""
INSIDE = {"align": ("match", "waits"), "export": ("lay",)}
"""Stages that are taken out of the one that holds them."""


class StopWatch:
    """Seconds on the wall by stage, and of this process's CPU."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def timed(
        self, stage: str, function: Callable[Parameters, Result]
    ) -> Callable[Parameters, Result]:
        """The same function, its time added to a stage."""

        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            began, worked = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent, work = time.perf_counter() - began, time.process_time() - worked
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent
                self.cpu_seconds[stage] = self.cpu_seconds.get(stage, 0.0) + work

        return run


def by_stage(seconds: dict[str, float]) -> dict[str, float]:
    """Return seconds by stage, each less those inside it."""
    return {
        stage: seconds.get(stage, 0.0)
        - sum(seconds.get(inner, 0.0) for inner in INSIDE.get(stage, ()))
        for stage in ("import", *STAGES)
    }


def main(arguments: list[str]) -> int:
    """Run the command; its exit code."""
    report, by, words = Path(arguments[0]), arguments[1], arguments[2:]
    options.WORTH_PROCESSES_BYTES = {"processes": 0, "threads": sys.maxsize}[by]
    watch = StopWatch()
    command = watch.timed("command", importlib.import_module("megascan.cli.main").main)
    imported = watch.timed("import", importlib.import_module)
    for stage, (module_name, function) in STAGES.items():
        module = imported(module_name)
        setattr(module, function, watch.timed(stage, getattr(module, function)))
    sys.argv = ["megascan", "aggregate", *words]
    code: int = command()
    found = {"seconds": by_stage(watch.seconds), "cpu_seconds": by_stage(watch.cpu_seconds)}
    report.write_text(json.dumps({**found, "peak_bytes": peak_bytes()}))
    return code


def peak_bytes() -> int:
    """Largest resident set of this program.

    Not that of getrusage, which a process inherits from the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
