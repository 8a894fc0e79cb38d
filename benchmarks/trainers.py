"""Do other people's trainers get the right verdict? Real processes, healthy and with faults.

    python -m benchmarks.trainers [--set classic|modern] [--device cpu|gpu] [--only TEXT]
                                  [--seeds N] [--seconds S] [--ranks N] [--profiles]
                                  [--keep DIR] [-o RESULT.md]
    python -m benchmarks.trainers --judge DIR       (what --keep packed again, on any machine)

The trainers are in `trainer_loops.py`, and in `trainer_libraries.py` those of libraries, which run
where these are installed (transformers, lightning, accelerate, deepspeed). What is wrong with their
ranks is in `trainer_faults.py`. `--set modern` runs those of `trainer_modern.py`, with the troubles
of `trainer_troubles.py`, of which each job has some, and other ones at the next seed. On the CPU
every rank has a core of its own, and jobs run side by side on the cores of this process; beside
GPUs it has several, none of which judges. Troubles of `trainer_storage.py` need control groups of
memory or of a disk, and swap: as root, outside of most containers. Where the machine allows none of
them, such cases are left out, and a line says why.

- right: exactly the faulty rank is named, with a cause of its fault; where none is, nobody
- other cause: that rank, with another cause
- undecided: no node is named, and the verdict is undecided
- missed: no node is named, and the verdict is another one
- WRONG NAME: a node is named that is not at fault

Exit 1 when there was a wrong name or a job failed.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

from benchmarks import trainer_libraries, trainer_modern
from benchmarks.jobs import ROOT, environment_line, publish, torchrun, unpack
from benchmarks.trainer_faults import FAULTS, HEALTHY, HEAVY, LOADER, LONG, Fault
from benchmarks.trainer_ranks import ALL_FAULTS, DONE, Plan, Stage
from benchmarks.trainer_troubles import TROUBLES, Trouble

RIGHT, OTHER, UNDECIDED, MISSED, WRONG = (
    "right",
    "other cause",
    "undecided",
    "missed",
    "WRONG NAME",
)
RESULTS = (RIGHT, OTHER, UNDECIDED, MISSED, WRONG)
LIBRARIES = tuple(filter(trainer_libraries.is_installed, trainer_libraries.LOOPS))
Jobs: TypeAlias = "tuple[tuple[tuple[str, ...], int], ...]"
"""The trainers that share a process group, and its ranks."""
ON_CORES: Jobs = (
    *((("megatron TP",), 2), (("megatron PP",), 2), (("ddp",), 4), (("fsdp",), 4)),
    *((("pipeline",), 4), (("tensor",), 4), (("hybrid",), 4), (("megatron TP",), 4)),
    *((("megatron PP",), 4), (("ddp",), 8), (("fsdp",), 8), (("ddp",), 2), (("fsdp",), 2)),
    *((("tensor",), 2), (("pipeline",), 2), (("hybrid",), 8)),
    *((LIBRARIES, 4), (LIBRARIES, 2)),
)
MODERN_ON_CORES: Jobs = tuple(((loop,), ranks) for ranks in (4, 2) for loop in trainer_modern.LOOPS)
ON_GPUS = (("ddp", "pipeline", "fsdp", "hybrid", "tensor"), LIBRARIES, ("megatron PP",))
"""The trainers that share a process group of `--ranks`."""
MODERN_ON_GPUS = (
    ("moe", "full fsdp", "lora", "context"),
    ("interleaved", "hsdp", "local sgd", "zero bubble"),
    ("vision", "recommender", "compiled ddp"),
)
NUM_TROUBLES = 4
"""Of a modern job, besides being healthy."""
SIZES = {
    "cpu": {"hidden": 192, "heads": 6, "layers": 4, "sequence": 256, "microbatches": 2},
    "gpu": {"hidden": 4096, "heads": 32, "layers": 4, "sequence": 2048, "microbatches": 2},
}
CASE = "case.json"
"""In the files of a packed case: what it is."""
HAS_STAGES = ("pipeline", "megatron PP")
HAS_REPLICAS = ("ddp", "fsdp", "hybrid", *LIBRARIES)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job with something wrong with one of its ranks."""

    loop: str
    num_ranks: int
    fault: str
    rank: int
    seed: int
    is_profiled: bool = False

    @property
    def name(self) -> str:
        """Shown in the table."""
        recorded = ", profile" if self.is_profiled else ""
        where = f"rank {self.rank}, seed {self.seed}{recorded}"
        return f"{self.loop} of {self.num_ranks}, {self.fault}, {where}"

    @property
    def file_name(self) -> str:
        """The same for files."""
        return self.name.replace(",", "").replace(" ", "-")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the verdict says of a case."""

    case: Case
    result: str
    verdict: str
    named: str
    iteration_ms: float
    cores_ratio: float
    """By how much the ranks' cores differed before the case or after it."""
    waited_ms: tuple[float, ...] = ()
    """For how long each rank's threads had no core; nothing where that is not measured."""
    suspected: tuple[int, ...] = ()
    """Whom an undecided verdict would have looked at first, if it says so."""

    def text(self, healthy_ms: float = math.nan) -> str:
        """As a row of the table."""
        return (
            f"| {self.case.name} | {self.verdict} | {self.named or '–'} | {self.iteration_ms:,.0f} "
            f"| {self.iteration_ms / healthy_ms:.2f} | {self.cores_ratio:.2f} "
            f"| {', '.join(f'{waited:,.0f}' for waited in self.waited_ms) or '–'} | {self.result} |"
        )


def cases_of(loop: str, num_ranks: int, device: str, seed: int) -> list[Case]:
    """Every fault that this job can have, each on another rank."""
    cases = []
    for place, fault in enumerate(FAULTS.values()):
        if device in fault.devices and _is_possible(fault, loop, num_ranks):
            rank = (place + seed) % num_ranks
            if loop == "pipeline" and fault == LOADER:
                rank = 0 if seed % 2 else num_ranks - 1  # the others use no batch
            case = Case(loop=loop, num_ranks=num_ranks, fault=fault.name, rank=rank, seed=seed)
            cases.append(case)
    return cases


def _is_possible(fault: Fault, loop: str, num_ranks: int) -> bool:
    if fault == HEAVY:
        return loop in HAS_STAGES
    if fault.num_kept:  # where all streams share a queue, what keeps them would stop it
        return not _connections(loop)
    if fault == LONG:
        return loop in HAS_REPLICAS or (num_ranks > 2 and loop != "pipeline")
    return True


def modern_cases_of(
    loop: str, num_ranks: int, device: str, seed: int, num_troubles: int = NUM_TROUBLES
) -> list[Case]:
    """Return a modern job while healthy, and with some of the troubles that it can have: the next
    ones in their list at the next loop and at the next seed.
    """
    possible = [
        (place, fault)
        for place, fault in enumerate(TROUBLES.values(), start=1)
        if device in fault.devices and _is_possible_modern(fault, loop, num_ranks)
    ]
    first = num_troubles * (seed + tuple(trainer_modern.LOOPS).index(loop)) % len(possible)
    chosen = [*possible[first:], *possible[:first]][:num_troubles]
    return [
        Case(
            loop=loop,
            num_ranks=num_ranks,
            fault=fault.name,
            rank=(place + seed) % num_ranks,
            seed=seed,
        )
        for place, fault in ((0, HEALTHY), *chosen)
    ]


def _is_possible_modern(fault: Fault, loop: str, num_ranks: int) -> bool:
    if fault.mixes_lengths:
        return loop not in trainer_modern.HAS_FIXED_SHAPES
    return fault != LONG or num_ranks > 2 or loop not in trainer_modern.SPLITS_PAIRS


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Hold the jobs of a set of trainers, and what happens to them."""

    on_cores: Jobs
    on_gpus: tuple[tuple[str, ...], ...]
    cases_of: Callable[[str, int, str, int], list[Case]]
    """Of a trainer, so many ranks, a device and a seed."""
    goes_on: bool
    """After a case that failed, with the others of its job."""


def ground_of(name: str, num_troubles: int = NUM_TROUBLES) -> Ground:
    """Return the set that is called so."""
    if name == "classic":
        return Ground(on_cores=ON_CORES, on_gpus=ON_GPUS, cases_of=cases_of, goes_on=False)
    return Ground(
        on_cores=MODERN_ON_CORES,
        on_gpus=MODERN_ON_GPUS,
        cases_of=partial(modern_cases_of, num_troubles=num_troubles),
        goes_on=True,
    )


def score(case: Case, findings: Sequence[dict[str, object]], verdict: str) -> str:
    """Compare what is named with what was done."""
    fault = ALL_FAULTS[case.fault]
    blamed = [one for one in findings if one["owner"] == "node"]
    if "gc" in fault.causes:  # the process's own doing: its owner is the job
        blamed += [one for one in findings if one["cause"] == "gc" and one["owner"] != "node"]
    at_fault = {case.rank}
    if fault.reaches_next:
        at_fault.add((case.rank + 1) % case.num_ranks)
    return result_of(blamed, at_fault, fault.causes, verdict)


def result_of(
    blamed: Sequence[dict[str, object]], at_fault: set[int], causes: Sequence[str], verdict: str
) -> str:
    """Compare findings that blame ranks with the ranks at fault; no causes: nobody is."""
    if any(not _names(one, at_fault) for one in blamed) or (blamed and not causes):
        return WRONG
    if not causes or any(one["cause"] in causes for one in blamed):
        return RIGHT
    if blamed:
        return OTHER
    return UNDECIDED if verdict == "undecided" else MISSED


def _names(finding: dict[str, object], at_fault: set[int]) -> bool:
    """Return whether a finding names ranks, and none that is not at fault."""
    ranks = cast("list[int]", finding["ranks"])
    return bool(ranks) and set(ranks) <= at_fault


def judge(case: Case, trace: Path, keep: Path | None, *, keeps_right: bool = False) -> Row:
    """Detect in the files of a case, as the command does; packs them into `keep`."""
    done = trace / DONE
    machine = json.loads(done.read_text(encoding="utf-8"))
    done.unlink()
    report = report_of(trace)
    findings = report["findings"]
    result = score(case, findings, report["verdict"])
    row = Row(
        case=case,
        result=result,
        verdict=report["verdict"],
        named=described(findings),
        iteration_ms=report["iteration_ns"] / 1e6,
        cores_ratio=max(max(times) / min(times) for times in machine["core_ms"]),
        waited_ms=tuple(machine["waited_ms"]),
        suspected=_suspected(findings, report["notes"]),
    )
    if keep is not None and (keeps_right or result != RIGHT):
        (trace / DONE).write_text(json.dumps(machine), encoding="utf-8")
        pack(asdict(case), case.file_name, trace, keep / result.replace(" ", "-"))
    return row


def report_of(trace: Path) -> dict[str, Any]:
    """Return what `detect --json` says of a folder."""
    from aggregate import build_timeline
    from detect import detect
    from megascan.reader import read_trace

    with redirect_stderr(io.StringIO()):  # notes, which the verdict holds, too
        report = json.loads(json.dumps(detect(build_timeline(read_trace(trace))).to_json()))
    return cast("dict[str, Any]", report)


def described(findings: Sequence[dict[str, Any]]) -> str:
    """Return a line that tells all findings."""
    return "; ".join(
        f"{','.join(map(str, one['ranks']))} {one['cause']} {one['slowdown']:.2f}x"
        f" ({one['owner']}, cost {one['step_time_cost_ratio']:.3f})"
        for one in findings
    )


def _suspected(findings: Sequence[dict[str, object]], notes: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks of the first undecided finding that has some, or the rank of the note."""
    for one in findings:
        if one["owner"] == "undecided" and one["ranks"]:
            return tuple(one["ranks"])  # type: ignore[arg-type]
    found = [re.search(r"slowest beside its peers is rank (\d+)", note) for note in notes]
    return next(((int(one[1]),) for one in found if one is not None), ())


def pack(case: dict[str, object], name: str, trace: Path, folder: Path) -> None:
    """Pack the files of a case, and what it is, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (trace / CASE).write_text(json.dumps(case), encoding="utf-8")
    with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=2) as archive:
        archive.add(trace, name)


def judge_kept(packed: Path) -> Row:
    """Detect again in what `--keep` packed."""
    with unpacked(packed) as (case, trace):
        return judge(Case(**case), trace, None)


@contextmanager
def unpacked(packed: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield what `pack` was given of a case, and the folder of its files."""
    with TemporaryDirectory() as temporary:
        unpack(packed, Path(temporary))
        (trace,) = Path(temporary).iterdir()
        case = json.loads((trace / CASE).read_text(encoding="utf-8"))
        (trace / CASE).unlink()
        yield case, trace


class Campaign:
    """Jobs side by side on the cores there are; verdicts on the cores they leave."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._ground = ground_of(given.set, given.troubles or NUM_TROUBLES)
        cores = sorted(os.sched_getaffinity(0))
        self._judging = cores[: max(1, len(cores) // 4)]
        left = cores[len(self._judging) :]
        training = left if len(left) > len(self._judging) else cores
        self._free = [[core] for core in training]
        if given.device == "gpu":
            each = len(training) // given.ranks
            self._free = [training[n * each : (n + 1) * each] for n in range(given.ranks)]
        self._num_places = len(self._free)
        self._changed = threading.Condition()
        self._end = time.monotonic() + given.seconds
        self.failed: list[str] = []
        self.refusals: dict[str, str] = {}
        """Of troubles that were to be made: why this machine does not allow them, or nothing."""
        self.rows: list[Row] = []
        self._verdicts: list[Future[Row]] = []

    def run(self) -> None:
        """Start all jobs, each when it finds room, and wait for their verdicts."""
        with ProcessPoolExecutor(
            len(self._judging),
            mp_context=get_context("spawn"),
            initializer=os.sched_setaffinity,
            initargs=(0, self._judging),
        ) as pool:
            threads = []
            for cases in self._jobs():
                places = self._take(min(cases[0].num_ranks, self._num_places))
                if places is None:
                    break
                threads.append(threading.Thread(target=self._job, args=(cases, places, pool)))
                threads[-1].start()
            for thread in threads:
                thread.join()
            for verdict in self._verdicts:
                if verdict.exception() is not None:
                    self.failed.append(f"a verdict: {verdict.exception()}")

    def _jobs(self) -> Iterable[list[Case]]:
        for seed in range(self._given.first_seed, self._given.first_seed + self._given.seeds):
            jobs = self._ground.on_cores
            if self._given.device == "gpu":
                jobs = tuple((loops, self._given.ranks) for loops in self._ground.on_gpus)
            first = 5 * seed % len(jobs)  # those at the end have their turn when time is short
            for loops, num_ranks in (*jobs[first:], *jobs[:first]):
                cases = [
                    replace(case, is_profiled=is_profiled)
                    for loop in loops
                    for case in self._ground.cases_of(loop, num_ranks, self._given.device, seed)
                    for is_profiled in (False, True)[: 1 + self._given.profiles]
                    if not (is_profiled and _is_traced_only(case))
                ]
                wanted = [case for case in cases if is_wanted(case.name, self._given.only)]
                if makeable := [case for case in wanted if self._is_makeable(case)]:
                    yield makeable

    def _is_makeable(self, case: Case) -> bool:
        """Tell whether this machine allows the trouble of a case; say it where it does not."""
        trouble = ALL_FAULTS[case.fault]
        if not isinstance(trouble, Trouble):
            return True
        if case.fault not in self.refusals:
            self.refusals[case.fault] = trouble.refusal(self._folder)
            if reason := self.refusals[case.fault]:
                print(f"left out: {case.fault}: {reason}", file=sys.stderr, flush=True)
        return not self.refusals[case.fault]

    def _take(self, number: int) -> list[list[int]] | None:
        """Wait until so many ranks have cores; None when the time is over."""
        with self._changed:
            while len(self._free) < number:
                if not self._changed.wait(self._end - time.monotonic()):
                    return None
            if time.monotonic() > self._end:
                return None
            taken, self._free = self._free[:number], self._free[number:]
            return taken

    def _job(self, cases: list[Case], places: list[list[int]], pool: ProcessPoolExecutor) -> None:
        name = f"{cases[0].loop} of {cases[0].num_ranks}, seed {cases[0].seed}"
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        waiting = list(cases)
        while waiting and time.monotonic() < self._end:
            output = self._run_ranks(waiting, places, folder, pool)
            if waiting and time.monotonic() < self._end:
                self.failed.append(f"{name} in {waiting[0].loop}, {waiting[0].fault}")
                print(f"{self.failed[-1]} failed:\n{output[-3000:]}", file=sys.stderr, flush=True)
                waiting = _without_failed(waiting) if self._ground.goes_on else []
        with self._changed:
            self._free += places
            self._changed.notify_all()

    @property
    def _alone(self) -> dict[str, str]:
        """Return variables that give each rank one thread, and on the CPU no GPU: FSDP2 would take
        one, wherever its model is.
        """
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._given.device == "cpu" else {}
        return {"OMP_NUM_THREADS": "1", **hidden}

    def _run_ranks(
        self, waiting: list[Case], places: list[list[int]], folder: Path, pool: ProcessPoolExecutor
    ) -> str:
        """Run a job until it ends, and take the cases that it completes from `waiting`.

        Return its output.
        """
        self._plan(waiting, places, folder).write(folder / "plan.json")
        words = [*torchrun(waiting[0].num_ranks), "-m", "benchmarks.trainer_ranks"]
        output = folder / "output.txt"
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *words, str(folder / "plan.json")],
                cwd=ROOT,
                env={**_connections(waiting[0].loop), **os.environ, **self._alone},
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        while process.poll() is None:
            time.sleep(0.5)
            self._submit(waiting, folder, pool)
            if time.monotonic() > self._end:
                process.terminate()
                process.wait()
                break
        self._submit(waiting, folder, pool)
        said = output.read_text(errors="replace")
        for line in sorted(
            {line for line in said.splitlines() if line.startswith(trainer_modern.NOTE)}
        ):
            print(line, file=sys.stderr, flush=True)
        return said

    def _plan(self, cases: list[Case], places: list[list[int]], folder: Path) -> Plan:
        given = self._given
        have_their_own = len(places) >= cases[0].num_ranks and all(places)
        return Plan(
            device=given.device,
            sizes=SIZES[given.device],
            cores=tuple(map(tuple, places)) if have_their_own else (),
            seed=1000 * cases[0].seed,
            stages=tuple(
                Stage(
                    loop=case.loop,
                    fault=case.fault,
                    rank=case.rank,
                    folder=str(folder / case.file_name),
                    is_profiled=case.is_profiled,
                )
                for case in cases
            ),
        )

    def _submit(self, waiting: list[Case], folder: Path, pool: ProcessPoolExecutor) -> None:
        """Have the cases judged that are complete."""
        while waiting and (folder / waiting[0].file_name / DONE).exists():
            case = waiting.pop(0)
            trace = folder / case.file_name
            given = self._given
            verdict = pool.submit(judge, case, trace, given.keep, keeps_right=given.keep_right)
            verdict.add_done_callback(self._judged)
            self._verdicts.append(verdict)

    def _judged(self, verdict: Future[Row]) -> None:
        if verdict.exception() is None:
            self.rows.append(verdict.result())
            print(verdict.result().text(), flush=True)


def _connections(loop: str) -> dict[str, str]:
    """Return what Megatron tells its users to set; other trainers leave it alone."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if loop.startswith("megatron") else {}


def _without_failed(waiting: list[Case]) -> list[Case]:
    """Leave out the first case, which failed, and where it was healthy all of its trainer."""
    failed, *others = waiting
    if failed.fault != HEALTHY.name:
        return others
    return [case for case in others if case.loop != failed.loop]


def _is_traced_only(case: Case) -> bool:
    """Tell whether a profile would not show its fault, or a callback of ours records it."""
    fault = ALL_FAULTS[case.fault]
    return fault.num_kept > 0 or fault.only_traced or case.loop in ("transformers", "lightning")


def is_wanted(name: str, only: Sequence[str] | None) -> bool:
    """Tell whether a name holds one of the texts of `--only`."""
    return not only or any(text in name for text in only)


def render(
    rows: Sequence[Row],
    failed: Sequence[str],
    environment: str,
    command: str,
    left_out: Sequence[str] = (),
) -> str:
    """The result page."""
    faults = Counter((row.case.fault, row.result) for row in rows)
    healthy_ms = defaultdict(lambda: math.nan)
    for row in rows:
        if row.case.fault == HEALTHY.name:
            healthy_ms[_job(row.case)] = row.iteration_ms
    loops = Counter((row.case.loop, row.result) for row in rows)
    head = f"| {' | '.join(RESULTS)} | all |\n{'|---' * (len(RESULTS) + 2)}|"
    return "\n".join(
        [
            "# Other people's trainers",
            "",
            f"`{command}` on {environment}.",
            "",
            *([f"Failed: {'; '.join(failed)}.", ""] if failed else ()),
            *([f"This machine does not allow {'; '.join(left_out)}.", ""] if left_out else ()),
            f"| fault {head}",
            *count_table(faults),
            "",
            f"| trainer {head}",
            *count_table(loops),
            "",
            _first_looks(rows),
            "",
            "Iterations beside those of the same job while healthy; cores: the slowest beside the "
            "fastest, before or after the case; waited: ms for which each rank had no core.",
            "",
            "| case | verdict | findings | iteration, ms | beside healthy | cores | waited "
            "| result |",
            "|---|---|---|---|---|---|---|---|",
            *(row.text(healthy_ms[_job(row.case)]) for row in sorted(rows, key=_order)),
            "",
        ]
    )


def _first_looks(rows: Sequence[Row]) -> str:
    """Say whom undecided verdicts point at."""
    undecided = [row for row in rows if row.result == UNDECIDED]
    right = sum(row.suspected == (row.case.rank,) for row in undecided)
    nobody = sum(not row.suspected for row in undecided)
    return (
        f"Of {len(undecided)} undecided cases with a faulty rank, the verdict points at that rank "
        f"in {right}, at nobody in {nobody}, elsewhere in {len(undecided) - right - nobody}."
    )


def _job(case: Case) -> Case:
    return replace(case, fault=HEALTHY.name, rank=0)


def _order(row: Row) -> tuple[int, str]:
    return -RESULTS.index(row.result), row.case.name


def count_table(counts: Counter[tuple[str, str]]) -> list[str]:
    """Return rows of how often each name had each result."""
    rows = []
    for name in sorted({name for name, _ in counts}):
        numbers = [counts[name, result] for result in RESULTS]
        rows.append(f"| {name} | {' | '.join(map(str, numbers))} | {sum(numbers)} |")
    return rows


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--set", choices=("classic", "modern"), default="classic")
    parser.add_argument(
        "--troubles", type=int, metavar="N", help=f"of each modern job ({NUM_TROUBLES})"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose name holds TEXT; repeatable"
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="of GPU jobs (2)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="of every job")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="the first of them")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="jobs that run longer are cut off (3600)"
    )
    parser.add_argument(
        "--profiles", action="store_true", help="record each case by torch's profiler, too"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="pack files of cases there")
    parser.add_argument("--keep-right", action="store_true", help="also where all is right")
    parser.add_argument("--judge", type=Path, metavar="DIR", help="judge those again")
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    given = parser.parse_args()
    if given.troubles is not None and given.set != "modern":
        parser.error(
            "--troubles needs --set modern; a classic job has every fault that it can have"
        )
    return given


def main() -> int:
    """Run the campaign and print the page."""
    given = parse()
    failed: list[str] = []
    left_out: list[str] = []
    if given.judge:
        packed = sorted(given.judge.rglob("*.tar.xz"))
        rows = []
        for path in packed:
            if is_wanted(path.name, given.only):
                rows.append(judge_kept(path))
                print(rows[-1].text(), flush=True)
    else:
        folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"trainers-{os.getpid()}"
        folder.mkdir()
        try:
            campaign = Campaign(given, folder)
            campaign.run()
            rows, failed = campaign.rows, campaign.failed
            left_out = [f"{name} ({why})" for name, why in campaign.refusals.items() if why]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    command = f"python -m benchmarks.trainers {' '.join(sys.argv[1:])}"
    environment = environment_line(given.device) + trainer_libraries.versions()
    publish(render(rows, failed, environment, command, left_out), given.output)
    return 1 if failed or any(row.result == WRONG for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
