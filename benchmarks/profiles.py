"""python -m benchmarks.profiles: verdicts on PyTorch profiles of jobs on paper, as rates.

DDP, FSDP, TP, a pipeline and DLRM's exchange all to all; each with a slow GPU, a GPU that somebody
else uses too, a late loader and host, a healthy job on chips that differ, and longer data that look
like a slow GPU. Ten profiled iterations, and the two that many people profile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregate import build_timeline
from benchmarks.profile_jobs import JOBS, TOKENS, profile_job
from detect import Owner, Report, Verdict, detect
from megascan.errors import report_errors
from megascan.reader import read_trace

SLOW = 2
"""The rank that something is wrong with."""
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPU 1.1x": ("compute", {"gpu": {SLOW: 1.1}}),
    "GPU 1.15x": ("compute", {"gpu": {SLOW: 1.15}}),
    "GPU 1.3x": ("compute", {"gpu": {SLOW: 1.3}}),
    "GPU shared, 2x": ("compute", {"gpu": {SLOW: 2.0}}),
    "loader 60x": ("loader", {"loader": {SLOW: 60.0}}),
}
INNOCENT: dict[str, dict[str, Any]] = {
    "healthy": {},
    "healthy, chips 1 %": {"chips": 0.01},
    "longer data": {"tokens": lambda rank, iteration: TOKENS * (5 if rank == SLOW else 4) // 4},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was said of one job: the right thing, nothing certain, or a wrong name."""

    kind: str
    what: str
    is_named: bool
    is_undecided: bool
    is_wrong: bool


def judge(folder: Path, kind: str, what: str, cause: str, **changes: Any) -> Outcome:
    """Write the profiles of one job, read them as the commands do, and score the verdict."""
    profile_job(kind, **changes).write(folder)
    report = detect(build_timeline(read_trace(folder)))
    blamed = [one for one in report.findings if one.owner == Owner.NODE]
    right = [one for one in blamed if one.ranks == (SLOW,) and one.cause.value == cause]
    return Outcome(
        kind=kind,
        what=what,
        is_named=bool(right),
        is_undecided=not right and _is_undecided(report),
        is_wrong=len(blamed) > len(right),
    )


def _is_undecided(report: Report) -> bool:
    return report.verdict == Verdict.UNDECIDED


def outcomes(kinds: list[str], num_seeds: int) -> Iterator[Outcome]:
    """Yield the outcomes of all jobs of these kinds."""
    jobs = [(what, cause, changes) for what, (cause, changes) in FAULTS.items()]
    jobs += [(what, "", changes) for what, changes in INNOCENT.items()]
    for kind in kinds:
        for num_iterations in (10, 2):
            for what, cause, changes in jobs:
                for seed in range(1, num_seeds + 1):
                    with tempfile.TemporaryDirectory() as folder:
                        yield judge(
                            Path(folder) / "profiles", kind, f"{what}, {num_iterations} iterations",
                            cause, num_iterations=num_iterations, seed=seed, **changes,
                        )  # fmt: skip


def table_of(found: list[Outcome]) -> str:
    """Return one Markdown row a fault, one column a kind: named / undecided / wrong, of all."""
    kinds = list(dict.fromkeys(one.kind for one in found))
    cells: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in found:
        cells[one.what, one.kind].append(one)
    lines = [f"| job | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for what in dict.fromkeys(one.what for one in found):
        row = [_cell(cells[what, kind]) for kind in kinds]
        lines.append(f"| {what} | {' | '.join(row)} |")
    return "\n".join(lines)


def _cell(found: list[Outcome]) -> str:
    named, undecided, wrong = (
        sum(getattr(one, name) for one in found)
        for name in ("is_named", "is_undecided", "is_wrong")
    )
    return f"{named} / {undecided} / {wrong} of {len(found)}"


def main() -> int:
    """Run the campaign and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kind", choices=list(JOBS), action="append", help="only this; repeatable")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="jobs of each sort")
    arguments = parser.parse_args()
    print("named / undecided / with a wrong name, of all jobs:\n")
    print(table_of(list(outcomes(arguments.kind or list(JOBS), arguments.seeds))))
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
