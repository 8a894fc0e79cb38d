"""Do jobs over really slow NICs get the right verdict? Several hosts of one machine.

    python -m benchmarks.wires [--only TEXT] [--seeds N] [--first-seed S] [--seconds T]
                               [--keep DIR] [--keep-right] [-o RESULT.md]
    python -m benchmarks.wires --judge DIR          (what --keep packed again, on any machine)

Hosts are network namespaces whose NICs have real rates (`wire_hosts.py`); what happens to these is
in `wire_troubles.py`. On each host a launcher of torch's starts the ranks (`wire_runs.py`): loops
of `benchmarks.trainers`, all cases of a job in one process group, or the repository's own engine,
anew for each case. Every job (`wire_jobs.py`) is tried healthy, with some troubles, other ones at
the next seed, and with something that is nobody's fault. Jobs run one after the other.

- right: ranks of the host at fault are named, and no others, with the cause `link`; of a slow
  connection, ranks of either end; where nobody is at fault, nobody
- other cause: those ranks, with another cause
- undecided: no node is named, and the verdict is undecided
- missed: no node is named, and the verdict is another one
- WRONG NAME: a node is named that is not at fault

Of two hosts no trace can tell whose NIC is slow, for all that one sends the other receives: that a
verdict is undecided is then all that can be wished for.

Exit 1 when there was a wrong name, a job failed, or hosts cannot be made here.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs import environment_line, publish
from benchmarks.trainers import (
    RESULTS,
    RIGHT,
    WRONG,
    count_table,
    described,
    is_wanted,
    pack,
    report_of,
    result_of,
    unpacked,
)
from benchmarks.wire_hosts import NoHostsHereError
from benchmarks.wire_jobs import JOBS, Case, Job, cases_of
from benchmarks.wire_runs import JobFailedError, running
from benchmarks.wire_troubles import NOTHING, TROUBLES
from megascan.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the verdict says of a case."""

    case: Case
    result: str
    verdict: str
    named: str

    def text(self, healthy_ms: float = math.nan) -> str:
        """As a row of the table."""
        at_fault = ",".join(map(str, sorted(self.case.at_fault)))
        return (
            f"| {self.case.name} | {at_fault or '–'} | {self.verdict} | {self.named or '–'} "
            f"| {self.case.mean_ms:,.0f} | {self.case.mean_ms / healthy_ms:.2f} "
            f"| {self.case.job_cores_ratio:.2f} + {self.case.other_cores_ratio:.2f} "
            f"| {self.result} |"
        )


def score(case: Case, findings: Sequence[dict[str, Any]], verdict: str) -> str:
    """Compare what is named with what was done."""
    blamed = [one for one in findings if one["owner"] == "node"]
    return result_of(blamed, case.at_fault, TROUBLES[case.trouble].causes, verdict)


def judge(case: Case, trace: Path, keep: Path | None, *, keeps_right: bool = False) -> Row:
    """Detect in the files of a case, as the command does; packs them into `keep`."""
    report = report_of(trace)
    result = score(case, report["findings"], report["verdict"])
    if keep is not None and (keeps_right or result != RIGHT):
        pack(asdict(case), case.file_name, trace, keep / result.replace(" ", "-"))
    return Row(
        case=case,
        result=result,
        verdict=report["verdict"],
        named=described(report["findings"]),
    )


def judge_kept(packed: Path) -> Row:
    """Detect again in what `--keep` packed."""
    with unpacked(packed) as (case, trace):
        return judge(Case(**case), trace, None)


class Campaign:
    """One job after the other, for they share the machine's cores."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._end = time.monotonic() + given.seconds
        self.rows: list[Row] = []
        self.failed: list[str] = []

    def run(self) -> None:
        """Try all jobs, those at the end first at the next seed."""
        for seed in range(self._given.first_seed, self._given.first_seed + self._given.seeds):
            first = 5 * seed % len(JOBS)
            for job in (*JOBS[first:], *JOBS[:first]):
                cases = [one for one in cases_of(job, seed) if self._is_wanted(one)]
                if cases and time.monotonic() < self._end:
                    self._try(job, cases)

    def _is_wanted(self, case: Case) -> bool:
        return is_wanted(case.name, self._given.only)

    def _try(self, job: Job, cases: list[Case]) -> None:
        folder = self._folder / f"{job.name}-{cases[0].seed}".replace(" ", "-")
        folder.mkdir()
        complete: list[tuple[Case, Path]] = []
        try:
            with running(job, cases, folder) as run:
                for case in cases:
                    if time.monotonic() > self._end:
                        break
                    complete.append(run(case))
        except JobFailedError as error:
            self.failed.append(cases[len(complete)].name)
            print(f"{self.failed[-1]} failed:\n{error}", file=sys.stderr, flush=True)
        for case, trace in complete:  # once the ranks have left the cores
            self._judge(case, trace)
        shutil.rmtree(folder)

    def _judge(self, case: Case, trace: Path) -> None:
        try:
            row = judge(case, trace, self._given.keep, keeps_right=self._given.keep_right)
        except InputError as error:  # a rank's trace is missing: its job has failed
            self.failed.append(case.name)
            print(f"{case.name} failed: {error}", file=sys.stderr, flush=True)
            return
        self.rows.append(row)
        print(row.text(), flush=True)


def render(rows: Sequence[Row], failed: Sequence[str], environment: str, command: str) -> str:
    """Return the result page."""
    healthy_ms: defaultdict[tuple[str, int], float] = defaultdict(lambda: math.nan)
    for row in rows:
        if row.case.trouble == NOTHING.name:
            healthy_ms[row.case.job, row.case.seed] = row.case.mean_ms
    head = f"| {' | '.join(RESULTS)} | all |\n{'|---' * (len(RESULTS) + 2)}|"
    texts = [row.text(healthy_ms[row.case.job, row.case.seed]) for row in sorted(rows, key=_order)]
    return "\n".join(
        [
            "# Jobs over slow NICs",
            "",
            f"`{command}` on {environment}.",
            "",
            *([f"Failed: {'; '.join(failed)}.", ""] if failed else ()),
            f"| trouble {head}",
            *count_table(Counter((row.case.trouble, row.result) for row in rows)),
            "",
            f"| job {head}",
            *count_table(Counter((row.case.job, row.result) for row in rows)),
            "",
            "Iterations: mean of all but the first two, beside that of the same job while healthy; "
            "x: what is left of a rate; cores: how much of them the job used + what others did.",
            "",
            "| case | at fault | verdict | findings | iterations, ms | beside healthy | cores "
            "| result |",
            "|---|---|---|---|---|---|---|---|",
            *texts,
            "",
        ]
    )


def _order(row: Row) -> tuple[int, str]:
    return -RESULTS.index(row.result), row.case.name


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wires",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose name holds TEXT; repeatable"
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of every job")
    parser.add_argument("--first-seed", type=int, default=1, metavar="S", help="the first of them")
    parser.add_argument(
        "--seconds", type=float, default=3600, metavar="T", help="no case begins later (3600)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="pack files of cases there")
    parser.add_argument("--keep-right", action="store_true", help="also where all is right")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge those again")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    return parser.parse_args()


def _judge_all(folder: Path, only: Sequence[str] | None) -> list[Row]:
    rows = []
    for path in sorted(folder.rglob("*.tar.xz")):
        if is_wanted(path.name, only):
            rows.append(judge_kept(path))
            print(rows[-1].text(), flush=True)
    return rows


def _interrupted(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Run the campaign and print the page."""
    given = parse()
    failed: list[str] = []
    if given.judge:
        rows = _judge_all(given.judge, given.only)
    else:
        signal.signal(signal.SIGTERM, _interrupted)  # hosts are removed then, too
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"wires-{os.getpid()}"
        folder.mkdir()
        campaign = Campaign(given, folder)
        try:
            campaign.run()
        except NoHostsHereError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows, failed = campaign.rows, campaign.failed
    command = f"python -m benchmarks.wires {' '.join(sys.argv[1:])}"
    publish(render(rows, failed, environment_line("cpu"), command), given.output)
    return 1 if failed or any(row.result == WRONG for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
