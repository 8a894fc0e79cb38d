"""How reliable is the quickstart? Real runs with another slow rank each time, and healthy ones.

    python -m benchmarks.quickstart [--faulty 10] [--healthy 5] [--factor 1.5] [-o RESULT.md]

Every run is `bash scripts/quickstart.sh` itself. A faulty run counts as right when exactly the
injected rank is named, with cause compute and owner node; a healthy run when nobody is. Prints
one row a run and the two counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import ROOT, publish


@dataclass(frozen=True, kw_only=True)
class Run:
    """One quickstart: what was injected (None: nothing) and what the verdict says."""

    injected_rank: int | None
    named_ranks: tuple[int, ...]
    causes: tuple[str, ...]
    slowdown: float | None
    seconds: float

    @property
    def right(self) -> bool:
        """Exactly the injected rank, of compute; nobody in a healthy run."""
        if self.injected_rank is None:
            return not self.named_ranks
        return self.named_ranks == (self.injected_rank,) and self.causes == ("compute",)

    def row(self) -> str:
        """As a row of the result table."""
        injected = "none" if self.injected_rank is None else str(self.injected_rank)
        named = ", ".join(map(str, self.named_ranks)) or "none"
        slowdown = f"{self.slowdown:.2f}" if self.slowdown else "–"
        right = "yes" if self.right else "NO"
        causes = ", ".join(self.causes) or "–"
        return f"| {injected} | {named} | {causes} | {slowdown} | {self.seconds:.0f} | {right} |"


def quickstart(folder: Path, rank: int | None, factor: float) -> Run:
    """Run the real script into `folder` and read its findings."""
    words = ["--healthy"] if rank is None else ["--rank", str(rank), "--factor", str(factor)]
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", "-o", str(folder), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"quickstart failed with {done.returncode}:\n{done.stderr[-4000:]}")
    report = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))["detect"]
    accused = [finding for finding in report["findings"] if finding["owner"] == "node"]
    return Run(
        injected_rank=rank,
        named_ranks=tuple(rank for finding in accused for rank in finding["ranks"]),
        causes=tuple(finding["cause"] for finding in accused),
        slowdown=accused[0]["slowdown"] if accused else None,
        seconds=time.monotonic() - started,
    )


def render(runs: list[Run], factor: float) -> str:
    """The result page: machine, command, one row a run, the counts."""
    faulty = [run for run in runs if run.injected_rank is not None]
    healthy = [run for run in runs if run.injected_rank is None]
    num_right = sum(run.right for run in faulty)
    return "\n".join(
        [
            "# Quickstart, run again and again",
            "",
            f"`python -m benchmarks.quickstart --factor {factor}` on {os.cpu_count()} cores "
            f"({platform.machine()}, Python {platform.python_version()}).",
            "",
            f"- right rank and cause: {num_right} of {len(faulty)} faulty runs",
            f"- nobody accused: {sum(run.right for run in healthy)} of {len(healthy)} healthy runs",
            "",
            "| injected | named | cause | slowdown | seconds | right |",
            "|---|---|---|---|---|---|",
            *(run.row() for run in runs),
            "",
        ]
    )


def main() -> int:
    """Run all, print the page, exit 1 when a run was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faulty", type=int, default=10, help="runs with a slow rank")
    parser.add_argument("--healthy", type=int, default=5, help="runs without")
    parser.add_argument("--factor", type=float, default=1.5, help="slowdown of the slow rank")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here")
    arguments = parser.parse_args()
    ranks: list[int | None] = [number % 8 for number in range(arguments.faulty)]
    runs: list[Run] = []
    with TemporaryDirectory() as folder:
        for rank in [*ranks, *[None] * arguments.healthy]:
            runs.append(quickstart(Path(folder), rank, arguments.factor))
            print(runs[-1].row(), file=sys.stderr, flush=True)
    page = render(runs, arguments.factor)
    publish(page, arguments.output)
    return 0 if all(run.right for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
