"""python -m benchmarks.detection.thresholds: what moving each threshold by a half does.

Moves every number of `detect.thresholds` down and up by 50 %, one at a time, judges one case of
each kind of the quick detection benchmark again (the weakest fault of its kind, where a threshold
decides most), and counts the faults found and the wrong names. A case is judged again only where
it reads the number at all, and without saying what would have been found, which takes most of the
time and decides nothing (but for the thresholds of that). What has been measured is kept in a file,
so that a run that was stopped goes on where it was, unless `--anew` forgets it; the page says which
numbers no case reads, and which are not measured.

examples:
  nice -n 10 python -m benchmarks.detection.thresholds
  python -m benchmarks.detection.thresholds --anew --workers 16
  python -m benchmarks.detection.thresholds --subject pairs --layout dp4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from aggregate import build_timeline
from benchmarks.detection.cases import QUICK, cases
from benchmarks.detection.jobs import ALL_LAYOUTS, Case
from benchmarks.detection.scoring import score
from detect import DetectorSettings, detect
from detect.causes import compute
from detect.causes.power import Power
from detect.thresholds import Origin
from detect.thresholds.tables import TABLES, Threshold, thresholds
from megascan.errors import ConfigError, report_errors
from megascan.simulate import simulate_trace
from megascan.timeline import Timeline

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FACTORS = {"half less": 0.5, "half more": 1.5}
RESULTS = Path(__file__).parents[1] / "results"

Figures = dict[str, str]
"""What was found, by "subject.name column"; that of no threshold moved under AS_IT_IS."""

AS_IT_IS = "as it is"
DUMPED = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS

LADDER = "power.rung_ratio"
"""Moved below 1 it leads down: the search along it would never end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Counts over some cases."""

    num_faults: int
    num_found: int
    num_false: int

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            num_faults=self.num_faults + other.num_faults,
            num_found=self.num_found + other.num_found,
            num_false=self.num_false + other.num_false,
        )

    def __str__(self) -> str:
        return f"{self.num_found} of {self.num_faults} found, {self.num_false} wrong"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A case with its outcome as the thresholds are, and the names of those it reads."""

    case: Case
    timeline: Timeline
    outcome: Outcome
    reads: frozenset[str]

    @classmethod
    def of(cls, case: Case) -> Judged:
        """Simulate a case, judge it, and note which thresholds are read on the way."""
        timeline = build_timeline(simulate_trace(case.job, case.faults, case.seed))
        with noted_reads() as (settings, reads):
            outcome = outcome_of(case, timeline, settings)
        return cls(case=case, timeline=timeline, outcome=outcome, reads=frozenset(reads))


def outcome_of(case: Case, timeline: Timeline, settings: DetectorSettings) -> Outcome:
    """Judge a case and count."""
    one = score(case, detect(timeline, settings))
    return Outcome(num_faults=one.num_faults, num_found=one.num_found, num_false=one.num_false)


def weakest_cases(layout_name: str) -> list[Case]:
    """Return one case of each kind on a layout, and of those with few peers: the weakest faults."""
    weakest: dict[tuple[str, str, str, str], Case] = {}
    for case in cases(QUICK):
        few_peers = case.layout_name if case.group == "few_peers" else ""
        key = case.group, case.duration, case.job_cause, few_peers
        if (few_peers or case.layout_name == layout_name) and (
            key not in weakest or case.severity < weakest[key].severity
        ):
            weakest[key] = case
    return list(weakest.values())


@contextmanager
def without_power() -> Iterator[None]:
    """Have verdicts not say what would have been found: no finding rests on it."""
    original = compute.planted_power  # type: ignore[attr-defined]
    compute.planted_power = lambda inquiry, first, slow, judged: Power(first, first)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        compute.planted_power = original  # type: ignore[attr-defined]


@contextmanager
def noted_reads() -> Iterator[tuple[DetectorSettings, set[str]]]:
    """Have all tables note which of their numbers are read; yield settings that do so, too."""
    reads: set[str] = set()
    originals = {subject: type(table) for subject, table in TABLES.items()}
    settings = DetectorSettings()
    try:
        for subject, table in (("settings", settings), *TABLES.items()):
            object.__setattr__(table, "__class__", _noting(subject, table, reads))
        yield settings, reads
    finally:
        for subject, original in originals.items():
            object.__setattr__(TABLES[subject], "__class__", original)


def _noting(subject: str, table: DataclassInstance, reads: set[str]) -> type:
    names = {one.name for one in fields(table)}

    class Noting(type(table)):  # type: ignore[misc]  # of the class that it stands for
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                reads.add(f"{subject}.{name}")
            return super().__getattribute__(name)

    return Noting


@contextmanager
def moved(row: Threshold, factor: float) -> Iterator[DetectorSettings]:
    """Multiply a threshold while the block runs; yield the settings to judge with."""
    value = type(row.value)(row.value * factor)
    if row.subject == "settings":
        yield DetectorSettings(**{row.name: value})  # type: ignore[arg-type]
        return
    table = TABLES[row.subject]
    object.__setattr__(table, row.name, value)  # frozen for everybody but this measurement
    try:
        yield DetectorSettings()
    finally:
        object.__setattr__(table, row.name, row.value)


def effect(row: Threshold, factor: float, judged: Sequence[Judged]) -> str:
    """Say what is found, and wrongly named, with the threshold moved."""
    name = f"{row.subject}.{row.name}"
    if not any(name in one.reads for one in judged):
        return "not read"
    if name == LADDER and row.value * factor <= 1.0:
        return "out of range"
    try:
        says_power = "power" in (row.subject, row.name)
        with moved(row, factor) as settings, nullcontext() if says_power else without_power():
            outcomes = [
                outcome_of(one.case, one.timeline, settings) if name in one.reads else one.outcome
                for one in judged
            ]
    except ConfigError:
        return "out of range"
    except (ValueError, IndexError, ZeroDivisionError) as error:
        if row.unit.startswith("share") and row.value * factor > 1.0:
            return "out of range"
        return f"fails ({type(error).__name__})"
    before = [one.outcome for one in judged]
    return (
        "same" if outcomes == before else f"{total(outcomes)} (unmoved {total(before).num_found})"
    )


def total(outcomes: Sequence[Outcome]) -> Outcome:
    """Add outcomes up."""
    return sum(outcomes, Outcome(num_faults=0, num_found=0, num_false=0))


def page(figures: Figures) -> str:
    """Return the table of all thresholds."""
    lines = [
        "# What each threshold of a verdict decides",
        "",
        "`python -m benchmarks.detection.thresholds` writes this page from `detect/thresholds/`. "
        f"{figures.get(AS_IT_IS, 'Nothing has been measured yet.')} `same` means that every case "
        "comes out as before, `not read` that none of these cases uses the number, a dash that it "
        "was not measured, `fixed` that it follows from a definition. `unmoved` is how many were "
        "found with no threshold moved when the figure was measured.",
        "",
        "| threshold | value | unit | origin | meaning | half less | half more |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in thresholds():
        name = f"{row.subject}.{row.name}"
        fixed = "fixed" if row.origin == Origin.MATHEMATICS else "–"
        cells = [figures.get(f"{name} {column}", fixed) for column in FACTORS]
        value = f"{row.value:.4g}"
        lines.append(
            f"| `{name}` | {value} | {row.unit} | {row.origin} | {row.meaning} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection.thresholds")
    parser.add_argument(
        "--layout", default="tp2-pp2-dp2", choices=ALL_LAYOUTS, help="take the cases on this one"
    )
    parser.add_argument("--subject", metavar="NAME", help="move the thresholds of one table only")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="processes that judge (2)"
    )
    parser.add_argument("--page-only", action="store_true", help="write the page, measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "thresholds.md")
    return parser


def measure(kept: Path, arguments: argparse.Namespace) -> None:
    """Measure what is left to measure, and keep each figure in the file as soon as it is there."""
    is_kept = kept.exists() and not arguments.anew
    figures: Figures = orjson.loads(kept.read_bytes()) if is_kept else {}
    wanted = [
        (f"{row.subject}.{row.name} {column}", row, factor)
        for row in thresholds()
        if row.origin != Origin.MATHEMATICS and arguments.subject in (None, row.subject)
        for column, factor in FACTORS.items()
    ]
    left = [(name, row, factor) for name, row, factor in wanted if name not in figures]
    spawn, layout = get_context("spawn"), arguments.layout
    with ProcessPoolExecutor(arguments.workers, spawn, _prepare, (layout,)) as pool:
        figures[AS_IT_IS] = pool.submit(_words, layout).result()
        running = {pool.submit(_effect, row, factor): name for name, row, factor in left}
        for done in as_completed(running):
            figures[running[done]] = done.result()
            print(f"{running[done]}: {done.result()}", file=sys.stderr, flush=True)
            kept.write_bytes(orjson.dumps(figures, option=DUMPED) + b"\n")


_JUDGED: list[Judged] = []
"""Each process has its own: all cases as they come out with no threshold moved."""


def _prepare(layout_name: str) -> None:
    _JUDGED.extend(Judged.of(case) for case in weakest_cases(layout_name))


def _words(layout_name: str) -> str:
    return (
        f"Judged are {len(_JUDGED)} cases of the quick detection benchmark, the weakest of each "
        f"kind on {layout_name}; as the numbers are, {total([one.outcome for one in _JUDGED])}."
    )


def _effect(row: Threshold, factor: float) -> str:
    return effect(row, factor, _JUDGED)


def main() -> int:
    """Measure what is left to measure, and write the page."""
    arguments = _parser().parse_args()
    kept = arguments.output.with_suffix(".json")
    if not arguments.page_only:
        measure(kept, arguments)
    figures: Figures = orjson.loads(kept.read_bytes()) if kept.exists() else {}
    arguments.output.write_text(page(figures), encoding="utf-8")
    print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
