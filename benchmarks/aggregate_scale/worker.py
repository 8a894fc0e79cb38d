"""One `megascan aggregate` under a stop watch: `python -m benchmarks.aggregate_scale.worker`.

    worker REPORT.json processes|threads -b DIR -o FILE

runs the real command, which reads rank files by one or the other, with the functions of its stages
timed, and writes to REPORT.json what they took on the wall and on all cores.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

STAGES = {
    "read": ("megascan.reader", "read_trace"),
    "match": ("aggregate.merge", "match_spans"),
    "align": ("aggregate.merge", "align_clocks"),
    "decompose": ("aggregate.merge", "decompose"),
    "summarise": ("aggregate", "summarise"),
    "export": ("megascan.cli.aggregate", "write_timeline"),
}
"""Stage and the name under which the command calls it."""


def _cpu_seconds() -> float:
    """Of this process and of those it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class StopWatch:
    """Seconds by stage, on the wall and on all cores."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def timed(
        self, stage: str, function: Callable[Parameters, Result]
    ) -> Callable[Parameters, Result]:
        """The same function, its time added to a stage."""

        def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            began, cpu_began = time.perf_counter(), _cpu_seconds()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(stage, time.perf_counter() - began, _cpu_seconds() - cpu_began)

        return run

    def _add(self, stage: str, seconds: float, cpu_seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.cpu_seconds[stage] = self.cpu_seconds.get(stage, 0.0) + cpu_seconds


def main(arguments: list[str]) -> int:
    """Run the command; its exit code."""
    report, by, words = Path(arguments[0]), arguments[1], arguments[2:]
    workers = importlib.import_module("megascan.cli.options")
    workers.WORTH_PROCESSES_BYTES = {"processes": 0, "threads": sys.maxsize}[by]
    watch = StopWatch()
    command = watch.timed("command", importlib.import_module("megascan.cli.main").main)
    imported = watch.timed("import", importlib.import_module)
    for stage, (module_name, function) in STAGES.items():
        module = imported(module_name)
        setattr(module, function, watch.timed(stage, getattr(module, function)))
    sys.argv = ["megascan", "aggregate", *words]
    code: int = command()
    report.write_text(
        json.dumps({"seconds": watch.seconds, "cpu": watch.cpu_seconds, "peak_bytes": peak_bytes()})
    )
    return code


def peak_bytes() -> int:
    """Largest resident set of this program.

    Not that of getrusage, which a process inherits from the one that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
