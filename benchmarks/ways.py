"""python -m benchmarks.ways: how much of the code one way through it touches.

Somebody who wants to know what happens in `megascan aggregate` opens the files that it loads. Each
way is walked in a process of its own, on a small simulated job, and the project's own files among
the loaded modules are counted, with their lines (files without a statement but imports and exports
count, too). "of them called" are the files of which a function has run.

    megascan aggregate        rank files → timeline, without and with the verdict (-d)
    megascan detect           a timeline → a report
    starting the tracer       `megascan.start` in a job of one rank, and a window written
    reading Kineto            a folder of PyTorch profiler traces → a trace
    a span to its verdict     the tracer's files, then read, aligned, judged, worded

At the beginning all files of the product are counted, and those of subjects that stood in the house
before it was rebuilt (commit 693a432): without MegaScope, generation, Hugging Face folders, the
watch, pipeline schedules, and the commands and causes that came with or after them.

examples:
  python -m benchmarks.ways
  python -m benchmarks.ways --root /tmp/older-checkout
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import ROOT
from megascan.errors import MissingError, report_errors

_START = """
import os, torch.distributed as dist, megascan
from pathlib import Path
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tracer = megascan.start(megascan.TraceConfig(enabled=True, directory=Path("traced")))
for iteration in range(1, 4):
    with tracer.iteration(iteration):
        pass
tracer.close()
"""
_COMMAND = """
import contextlib, runpy, sys
sys.argv = ["megascan", *{arguments!r}]
with contextlib.suppress(SystemExit):
    runpy.run_module("megascan", run_name="__main__")
"""
_KINETO = """
from pathlib import Path
from megascan.reader import read_trace
read_trace(Path("kineto"))
"""

WAYS = {
    "megascan aggregate": _COMMAND.format(arguments=["aggregate", "-b", "job", "-o", "a.json"]),
    "megascan aggregate -d": _COMMAND.format(
        arguments=["aggregate", "-b", "job", "-o", "b.json", "-d"]
    ),
    "megascan detect": _COMMAND.format(arguments=["detect", "timeline.json"]),
    "starting the tracer": _START,
    "reading Kineto": _KINETO,
    "a span to its verdict": _START + _COMMAND.format(arguments=["detect", "job"]),
}
_WALK = """
import os, sys
from pathlib import Path
root = Path({root!r})
sys.path.insert(0, str(root))
called = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # no module, no body of a class
        called.add(frame.f_code.co_filename)
sys.setprofile(note)
import threading
threading.setprofile(note)
shown = os.dup(1)
silent = os.open(os.devnull, os.O_WRONLY)
os.dup2(silent, 1)
os.dup2(silent, 2)
loaded = set()
try:
    exec({walk!r})
finally:
    sys.setprofile(None)
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and Path(path).is_relative_to(root) and ".venv" not in Path(path).parts:
            loaded.add(path)
    with os.fdopen(shown, "w") as answer:
        for path in sorted(loaded):
            answer.write(f"{{path}}\\t{{path in called}}\\n")
"""
PACKAGES = ("aggregate", "detect", "megascan", "megascope", "training")
LATER = (
    *("megascope/", "megascan/watch/", "megascan/probes.py", "megascan/connection.py"),
    *("training/generation/", "training/hf/", "training/pipeline/", "training/scope.py"),
    *(f"training/{name}.py" for name in ("convert", "generate", "helper", "origin", "serve")),
    *(f"megascan/cli/{name}.py" for name in ("history", "path", "plan", "probe", "scope", "watch")),
    *(f"megascan/reader/{name}.py" for name in ("flight_recorder", "growing", "original_timeline")),
    *(f"megascan/tracer/{name}.py" for name in ("lookout", "switch")),
    "detect/whatif/path.py",
    *(f"detect/causes/{name}.py" for name in ("bursts", "corruption", "networks", "unexplained")),
    *(f"detect/causes/{name}.py" for name in ("memory", "optimizer", "paused_hosts", "power")),
    "detect/causes/spells.py",
)
"""Subjects of the product that came after the commit that the ways are compared with."""
_SIMULATE = "simulate --tp 2 --dp 2 --iterations 8 -o job --fault rank=1,kind=compute,factor=1.3"


def prepare(root: Path, folder: Path) -> None:
    """Make what the ways begin with: a job's rank files, its timeline, a folder of profiles."""
    for arguments in (_SIMULATE, "aggregate -b job -o timeline.json"):
        subprocess.run(
            [sys.executable, "-m", "megascan", *arguments.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
        )
    write_profiles(folder / "kineto")


def write_profiles(folder: Path) -> None:
    """Write small PyTorch profiler traces of two ranks."""
    folder.mkdir()
    for rank in range(2):
        profile = json.dumps(_profile(rank), indent=1)
        (folder / f"rank{rank}.json").write_text(profile)


def _profile(rank: int) -> dict[str, object]:
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{k}", "pid": 1, "tid": 1,
         "ts": 2000.0 * k, "dur": 1900.0, "args": {}} for k in range(4)
    ]  # fmt: skip
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1000.0 * k,
         "dur": 500.0, "args": {"device": 0, "stream": 7}} for k in range(8)
    ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": []},
        "deviceProperties": [{"id": 0, "name": "GPU"}],
        "traceEvents": [*kernels, *steps],
    }


@dataclass(frozen=True, kw_only=True)
class Way:
    """What one way loads of the project's own files."""

    files: tuple[str, ...]
    """Relative to the checkout."""
    num_lines: int
    num_called: int


def walk(name: str, root: Path, folder: Path) -> Way:
    """Walk one way in a process of its own. Raises MissingError when it does not end well."""
    done = subprocess.run(
        [sys.executable, "-c", _WALK.format(root=str(root), walk=WAYS[name])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MissingError(f"the way {name} cannot be walked in {root}:\n{done.stderr[-2000:]}")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return Way(
        files=tuple(str(Path(path).relative_to(root)) for path, _ in rows),
        num_lines=sum(len(Path(path).read_text().splitlines()) for path, _ in rows),
        num_called=sum(was_called == "True" for _, was_called in rows),
    )


def product_files(root: Path) -> list[str]:
    """Return the product's Python files, relative to the checkout."""
    return [
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    ]


def print_files(root: Path) -> None:
    """Print how many files and lines the product has, and those of subjects of before."""
    files = product_files(root)
    before = [one for one in files if not one.startswith(LATER)]
    for label, some in (("product", files), ("its subjects of before", before)):
        num_lines = sum(len((root / one).read_text().splitlines()) for one in some)
        print(f"{label}: {len(some)} files, {num_lines:,} lines")


def main() -> int:
    """Count files, then walk all ways and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ways",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout to measure")
    root = parser.parse_args().root.resolve()
    print_files(root)
    print("| way | files | lines | of them called |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(root, folder)
        for way in WAYS:
            one = walk(way, root, folder)
            print(
                f"| {way} | {len(one.files)} | {one.num_lines:,} | {one.num_called} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
