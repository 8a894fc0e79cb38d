"""Do jobs over really slow NICs get the right verdict? Several hosts of one machine.

    python -m benchmarks.wires [--only TEXT] [--seeds N] [--first-seed S] [--seconds T]
                               [--keep DIR] [--keep-right] [-o RESULT.md]
    python -m benchmarks.wires --judge DIR          (what --keep packed again, on any machine)

Hosts are network namespaces whose NICs have real rates (`wire_hosts.py`); what happens to these is
in `wire_troubles.py`. On each host a launcher of torch's starts the ranks: plain loops of
`benchmarks.trainers`, all cases of a job in one process group. Every job is tried healthy, with
some troubles, other ones at the next seed, and with something that is nobody's fault.

- right: ranks of the host at fault are named, and no others, with the cause `link`; of a slow
  connection, ranks of either end; where nobody is at fault, nobody
- other cause: those ranks, with another cause
- undecided: no node is named, and the verdict is undecided
- missed: no node is named, and the verdict is another one
- WRONG NAME: a node is named that is not at fault

Exit 1 when there was a wrong name, a job failed, or hosts cannot be made here.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, environment_line, publish
from benchmarks.trainer_faults import HEALTHY
from benchmarks.trainer_ranks import DONE, Plan, Stage
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
from benchmarks.wire_hosts import NIC, Network, NoHostsHereError, end
from benchmarks.wire_ranks import GO, HALFWAY
from benchmarks.wire_troubles import FAULTS, NOBODYS, NOTHING, TROUBLES, Site

NUM_FAULTS = 3
"""Of a job, besides being healthy and one thing that is nobody's fault."""
NUM_ITERATIONS = 30
MASTER_PORT = 29511
START_S, CASE_S = 120.0, 120.0
"""What the start of a job's ranks, and a case, take at most."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training loop on hosts whose NICs have a rate."""

    loop: str
    num_hosts: int
    ranks_per_host: int
    rate_mbit: float
    sizes: dict[str, int] = field(hash=False)
    """Of the model and the training, by the names of `trainer_loops.Run`."""

    @property
    def name(self) -> str:
        """Shown in the table."""
        return f"{self.loop} of {self.num_hosts} x {self.ranks_per_host}"


def _sizes(hidden: int, layers: int, sequence: int, microbatches: int) -> dict[str, int]:
    return {
        **{"hidden": hidden, "heads": 4, "layers": layers},
        **{"sequence": sequence, "microbatches": microbatches},
    }


JOBS = (
    Job(loop="ddp in buckets", num_hosts=4, ranks_per_host=1, rate_mbit=400,
        sizes=_sizes(256, 2, 64, 2)),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with something wrong with one of its hosts."""

    job: str
    num_hosts: int
    ranks_per_host: int
    rate_mbit: float
    trouble: str
    host: int
    peer: int
    """The other end of a connection."""
    ratio: float
    """Of the full rate, what is left."""
    seed: int

    @property
    def name(self) -> str:
        """Shown in the table."""
        where = "" if not self.at_fault else f" host {self.host}"
        if TROUBLES[self.trouble].is_between_two:
            where = f" hosts {self.host} and {self.peer}"
        return f"{self.job}, {self.trouble}{where} x{self.ratio:.2f}, seed {self.seed}"

    @property
    def file_name(self) -> str:
        """The same for files."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def at_fault(self) -> set[int]:
        """Return the ranks that may be named: those of the host, or of a connection's ends."""
        trouble = TROUBLES[self.trouble]
        if not trouble.causes:
            return set()
        hosts = (self.host, self.peer) if trouble.is_between_two else (self.host,)
        each = self.ranks_per_host
        return {rank for host in hosts for rank in range(host * each, (host + 1) * each)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the verdict says of a case."""

    case: Case
    result: str
    verdict: str
    named: str
    iteration_ms: float

    def text(self, healthy_ms: float = math.nan) -> str:
        """As a row of the table."""
        at_fault = ",".join(map(str, sorted(self.case.at_fault)))
        return (
            f"| {self.case.name} | {at_fault or '–'} | {self.verdict} | {self.named or '–'} "
            f"| {self.iteration_ms:,.0f} | {self.iteration_ms / healthy_ms:.2f} | {self.result} |"
        )


def cases_of(job: Job, seed: int) -> list[Case]:
    """Draw a job's cases: healthy, the next troubles of the list at the next job and seed, each at
    a host of its own as long as there are some, and one that is nobody's fault.
    """
    draw = random.Random(f"{job.name} {seed}")
    place = JOBS.index(job) + seed
    first = NUM_FAULTS * place
    faults = [FAULTS[(first + number) % len(FAULTS)] for number in range(NUM_FAULTS)]
    hosts = draw.sample(range(job.num_hosts), job.num_hosts)
    cases = []
    for number, trouble in enumerate((NOTHING, *faults, NOBODYS[place % len(NOBODYS)])):
        host = hosts[number % len(hosts)]
        cases.append(
            Case(
                job=job.name,
                num_hosts=job.num_hosts,
                ranks_per_host=job.ranks_per_host,
                rate_mbit=job.rate_mbit,
                trouble=trouble.name,
                host=host,
                peer=(host + draw.randrange(1, job.num_hosts)) % job.num_hosts,
                ratio=1.0 if trouble.of_ranks != HEALTHY.name or trouble == NOTHING
                else draw.choice(trouble.ratios),
                seed=seed,
            )
        )  # fmt: skip
    return cases


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
        iteration_ms=report["iteration_ns"] / 1e6,
    )


def judge_kept(packed: Path) -> Row:
    """Detect again in what `--keep` packed."""
    with unpacked(packed) as (case, trace):
        return judge(Case(**case), trace, None)


class JobFailedError(Exception):
    """A job's launcher ended early, or took too long; the text is what it said."""


class RunningJob:
    """A job on its hosts, whose cases begin when they are told to."""

    def __init__(self, job: Job, cases: Sequence[Case], network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder
        self._output = folder / "output.txt"
        plan = folder / "plan.json"
        _plan_of(job, cases, folder).write(plan)
        words = ("-m", "benchmarks.wire_ranks", str(plan))
        with self._output.open("w") as stream:
            self._launchers = [
                subprocess.Popen(
                    [*host.prefix, sys.executable, *_launcher(job, network, host.number), *words],
                    cwd=ROOT,
                    env={**os.environ, **_variables()},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for host in network.hosts
            ]

    def run(self, case: Case) -> Path:
        """Make a case's trouble, and wait until its files are complete; return their folder."""
        network, trace = self._network, self._folder / case.file_name
        halfway = self._marker(trace, HALFWAY)
        site = Site(
            network=network,
            host=network.hosts[case.host],
            peer=network.hosts[case.peer],
            ratio=case.ratio,
            is_halfway=halfway.exists,
        )
        with TROUBLES[case.trouble].acting(site):
            self._marker(trace, GO).touch()
            self._wait(self._marker(trace, DONE))
        network.reset()
        return trace

    @staticmethod
    def _marker(trace: Path, name: str) -> Path:
        return trace.parent / f"{trace.name}.{name}"

    def _wait(self, marker: Path) -> None:
        end_s = time.monotonic() + START_S + CASE_S
        while not marker.exists():
            ended = any(launcher.poll() for launcher in self._launchers)
            if ended or time.monotonic() > end_s:
                raise JobFailedError(self._output.read_text(errors="replace")[-3000:])
            time.sleep(0.1)

    def close(self) -> None:
        """End what still runs."""
        end(self._launchers)


def _plan_of(job: Job, cases: Sequence[Case], folder: Path) -> Plan:
    return Plan(
        device="cpu",
        sizes=job.sizes,
        cores=(),
        seed=1000 * cases[0].seed,
        stages=tuple(
            Stage(
                loop=job.loop,
                fault=TROUBLES[case.trouble].of_ranks,
                rank=0,
                folder=str(folder / case.file_name),
            )
            for case in cases
        ),
        num_traced=NUM_ITERATIONS,
    )


def _launcher(job: Job, network: Network, node_rank: int) -> tuple[str, ...]:
    """Return what Python is given on a host before `-m` and a module."""
    return (
        *("-m", "torch.distributed.run", "--nnodes", str(job.num_hosts)),
        *("--node-rank", str(node_rank), "--nproc-per-node", str(job.ranks_per_host)),
        *("--master-addr", network.hosts[0].address, "--master-port", str(MASTER_PORT)),
    )


def _variables() -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": NIC,
        "TP_SOCKET_IFNAME": NIC,
    }


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
            with _running(job, cases, folder) as running:
                for case in cases:
                    if time.monotonic() > self._end:
                        break
                    complete.append((case, running.run(case)))
        except JobFailedError as error:
            self.failed.append(cases[len(complete)].name)
            print(f"{self.failed[-1]} failed:\n{error}", file=sys.stderr, flush=True)
        for case, trace in complete:  # once the ranks have left the cores
            row = judge(case, trace, self._given.keep, keeps_right=self._given.keep_right)
            self.rows.append(row)
            print(row.text(), flush=True)
        shutil.rmtree(folder)


@contextmanager
def _running(job: Job, cases: Sequence[Case], folder: Path) -> Iterator[RunningJob]:
    """Start a job on hosts of its own, which are removed after it."""
    with Network(job.num_hosts, job.rate_mbit) as network:
        running = RunningJob(job, cases, network, folder)
        try:
            yield running
        finally:
            running.close()


def render(rows: Sequence[Row], failed: Sequence[str], environment: str, command: str) -> str:
    """Return the result page."""
    healthy_ms: defaultdict[tuple[str, int], float] = defaultdict(lambda: math.nan)
    for row in rows:
        if row.case.trouble == NOTHING.name:
            healthy_ms[row.case.job, row.case.seed] = row.iteration_ms
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
            "Iterations beside those of the same job while healthy; x: what is left of a rate.",
            "",
            "| case | at fault | verdict | findings | iteration, ms | beside healthy | result |",
            "|---|---|---|---|---|---|---|",
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
