"""python -m benchmarks.detection.thresholds: what moving each threshold by a half does.

Moves every number of `detect.thresholds` down and up by 50 %, one at a time, judges some cases of
the quick detection benchmark again, and counts the faults found and the wrong names. What has been
measured is kept in a file, so that a run that was stopped goes on where it was; the page lists
every threshold, and says of those without figures that they are not measured.

examples:
  nice -n 19 python -m benchmarks.detection.thresholds
  python -m benchmarks.detection.thresholds --subject pairs --every 40
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from aggregate import build_timeline
from benchmarks.detection.cases import QUICK, cases
from benchmarks.detection.jobs import Case
from benchmarks.detection.scoring import score
from detect import DetectorSettings, detect
from detect.thresholds import TABLES, Origin, Threshold, thresholds
from megascan.errors import ConfigError, report_errors
from megascan.simulate import simulate_trace
from megascan.timeline import Timeline

FACTORS = {"as it is": 1.0, "half less": 0.5, "half more": 1.5}
RESULTS = Path(__file__).parents[1] / "results"

Judged = Sequence[tuple[Case, Timeline]]
Figures = dict[str, str]
"""What was found, by "subject.name column"."""


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


def outcome(row: Threshold, factor: float, judged: Judged) -> str:
    """Return the faults found and the wrong names with the threshold moved, in words."""
    try:
        with moved(row, factor) as settings:
            scores = [score(case, detect(timeline, settings)) for case, timeline in judged]
    except ConfigError:
        return "out of range"
    except (ValueError, IndexError, ZeroDivisionError) as error:
        return f"fails ({type(error).__name__})"
    found, planted = sum(one.num_found for one in scores), sum(one.num_faults for one in scores)
    return f"{found} of {planted} found, {sum(one.num_false for one in scores)} wrong"


def page(figures: Figures, num_cases: int) -> str:
    """Return the table of all thresholds."""
    lines = [
        "# What each threshold of a verdict decides",
        "",
        "`python -m benchmarks.detection.thresholds` writes this page from `detect/thresholds.py`. "
        + (
            f"Figures are of {num_cases} cases of the quick detection benchmark. "
            if figures
            else ""
        )
        + "A dash means that nobody has measured it yet, `fixed` that the number follows from a "
        "definition.",
        "",
        "| threshold | value | unit | origin | meaning | as it is | half less | half more |",
        "|---|---|---|---|---|---|---|---|",
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
    parser.add_argument("--every", type=int, default=20, metavar="N", help="take every Nth case")
    parser.add_argument("--subject", metavar="NAME", help="move the thresholds of one table only")
    parser.add_argument("--page-only", action="store_true", help="write the page, measure nothing")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "thresholds.md")
    return parser


def main() -> int:
    """Measure what is left to measure, and write the page."""
    arguments = _parser().parse_args()
    chosen = cases(QUICK)[:: arguments.every]
    kept = arguments.output.with_suffix(".json")
    figures: Figures = orjson.loads(kept.read_bytes()) if kept.exists() else {}
    judged = []
    if not arguments.page_only:
        for case in chosen:
            trace = simulate_trace(case.job, case.faults, case.seed)
            judged.append((case, build_timeline(trace)))
    for row in thresholds() if judged else ():
        if row.origin == Origin.MATHEMATICS or arguments.subject not in (None, row.subject):
            continue
        for column, factor in FACTORS.items():
            name = f"{row.subject}.{row.name} {column}"
            if name not in figures:
                figures[name] = outcome(row, factor, judged)
                print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
                kept.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
    arguments.output.write_text(page(figures, len(chosen)), encoding="utf-8")
    print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
