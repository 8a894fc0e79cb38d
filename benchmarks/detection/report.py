"""Outcomes as text for people and as JSON for comparison over time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.detection import figures
from benchmarks.detection.baselines import RULES
from benchmarks.detection.jobs import FEW_PEERS
from benchmarks.detection.outcomes import Outcome
from benchmarks.detection.targets import targets
from megascan.header import Json

HIDDEN = 0.01
_ELSEWHERE = """## Elsewhere

- [Noise that nobody simulated](detection_laws.md): other laws, from a second generator.
- [At 1,024 ranks](detection_scale.md): time and memory.
- [Is the simulator like a real run?](detection_reality.md): step time and waits, rank by rank.
- [Real runs on four H200](layouts_h200.md) and [of the quickstart](quickstart.md), with and without
  injected faults.
"""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(head) + " |"]
    lines.append("|" + "---|" * len(head))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _rate_rows(outcomes: Sequence[Outcome], key: figures.Key) -> list[list[str]]:
    return [
        [
            name,
            figures.recall(chosen).text(),
            figures.precision(chosen).text(),
            figures.right_cause(chosen).text(),
            figures.top_one(chosen).text(),
        ]
        for name, chosen in figures.grouped(outcomes, key).items()
    ]


_RATES = ("recall", "precision", "right cause", "top 1")


def to_text(outcomes: Sequence[Outcome], setting: str) -> str:
    """Markdown: targets first, then by class and severity, layout, duration; look-alikes; rules.

    `setting` says how the figures were come by: command, hardware, versions, time.
    """
    few = [outcome for outcome in outcomes if outcome.case.group == FEW_PEERS]
    faulty = [outcome for outcome in outcomes if outcome.case.faults and outcome not in few]
    innocent = [outcome for outcome in outcomes if not outcome.case.faults]
    parts = [
        "# Detection on simulated jobs\n",
        f"{setting}\n",
        f"{len(faulty)} jobs with faults, {len(few)} with too few peers, {len(innocent)} without a "
        f"fault ({len(innocent) / max(1, len(outcomes)):.0%}). 20 iterations, 2 % noise of each "
        "operation, chips that differ by 0.3 %, hosts' clocks up to 50 ms and 20 ppm apart. Of "
        "shares: hits of cases, and the 95 % interval.\n",
        _targets_table(faulty, innocent),
        _table("All faults", ("", *_RATES), _rate_rows(faulty, lambda outcome: "all")),
        _table(
            "By class and severity",
            ("class", *_RATES),
            _rate_rows(faulty, lambda o: f"{o.case.group} {o.case.severity:.0%}"),
        ),
        _table("By duration", ("", *_RATES), _rate_rows(faulty, _duration)),
        _table("By layout", ("", *_RATES), _rate_rows(faulty, lambda o: o.case.layout_name)),
        _table("By cost model", ("", *_RATES), _rate_rows(faulty, lambda o: o.case.cost_name)),
        _table(
            "At most two ranks with the same work",
            ("layout", *_RATES),
            _rate_rows(few, lambda o: f"{o.case.layout_name} {o.case.severity:.0%}"),
        ),
        _hidden_table(faulty),
        _innocent_table(innocent),
        _error_lines(outcomes),
        _confusion_table(faulty),
    ]
    if any(outcome.baselines for outcome in outcomes):
        parts.append(_baseline_table(outcomes))
    return "\n".join([*parts, _ELSEWHERE])


def _targets_table(faulty: Sequence[Outcome], innocent: Sequence[Outcome]) -> str:
    rows = [
        [one.name, f"{one.least:g}", one.figure.text(), one.reached]
        for one in targets(faulty, innocent)
    ]
    return _table("Targets", ("", "aimed at", "reached", "met"), rows)


def _hidden_table(faulty: Sequence[Outcome]) -> str:
    """What a host does behind its device's back costs nothing, and shows little."""
    rows = []
    for name, chosen in figures.grouped(faulty, lambda o: o.case.group).items():
        cheap = [one for one in chosen if one.cost_ratio < 1 + HIDDEN]
        dear = [one for one in chosen if one.cost_ratio >= 1 + HIDDEN]
        rows.append([name, figures.recall(cheap).text(), figures.recall(dear).text()])
    head = ("class", f"recall where the step takes less than {HIDDEN:.0%} longer", "otherwise")
    return _table("Faults that cost the step nothing", head, rows)


def _duration(outcome: Outcome) -> str:
    return f"{outcome.case.group} {outcome.case.duration}"


def _innocent_table(innocent: Sequence[Outcome]) -> str:
    rows = [
        [name, figures.alarmed(chosen).text(), figures.job_cause(chosen).text()]
        for name, chosen in [
            ("all", list(innocent)),
            *figures.grouped(innocent, lambda outcome: outcome.case.group).items(),
        ]
    ]
    return _table("Jobs without a fault", ("job", "a node is named", "job's cause named"), rows)


def _error_lines(outcomes: Sequence[Outcome]) -> str:
    onset = figures.quantiles(figures.onset_errors(outcomes))
    slowdown = figures.quantiles(figures.slowdown_errors(outcomes))
    cost = {
        group: errors
        for group, chosen in figures.grouped(outcomes, lambda o: o.case.group).items()
        if (errors := figures.quantiles(figures.cost_errors(chosen)))
    }
    spans = sum(outcome.num_spans for outcome in outcomes)
    timeline = sum(outcome.timeline_s for outcome in outcomes)
    judging = sum(outcome.detect_s for outcome in outcomes)
    crashes = [outcome for outcome in outcomes if outcome.error]
    lines = [
        "## Errors",
        "",
        f"- onset of transients, iterations: {onset or 'none found'}",
        f"- slowdown of compute faults, relative: {slowdown or 'none found'}",
        *(f"- step-time cost of {name} faults, relative: {each}" for name, each in cost.items()),
        f"- {spans:,} spans: aligned in {timeline:.1f} s, judged in {judging:.1f} s (CPU)",
        f"- crashes of the detector: {len(crashes)}",
    ]
    lines += [f"  - seed {o.case.seed}, {o.case.group}: {o.error}" for o in crashes[:5]]
    return "\n".join(lines) + "\n"


def _confusion_table(faulty: Sequence[Outcome]) -> str:
    counts = figures.confusion(faulty)
    reported = sorted({cause for _, cause in counts})
    rows = [
        [kind, *(str(counts.get((kind, cause), 0)) for cause in reported)]
        for kind in sorted({kind for kind, _ in counts})
    ]
    return _table("Planted (rows) and reported causes", ("", *reported), rows)


def _baseline_table(outcomes: Sequence[Outcome]) -> str:
    compute = [o for o in outcomes if o.case.group in ("compute", "several")]
    innocent = [o for o in outcomes if not o.case.faults]
    chosen = compute + innocent
    rows = []
    for name in RULES:
        recall, precision, alarms = figures.baseline(chosen, name)
        rows.append([name, recall.text(), precision.text(), alarms.text()])
    rows.append(
        [
            "MegaScan",
            figures.recall(compute).text(),
            figures.precision(chosen).text(),
            figures.alarmed(innocent).text(),
        ]
    )
    return _table(
        "Other tools' rules on the same spans (compute faults and fault-free jobs)",
        ("rule", "recall", "precision", "fault-free jobs with a name"),
        rows,
    )


def to_json(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Json]:
    """All figures, and every case that went wrong, with the seed that repeats it."""
    few = [outcome for outcome in outcomes if outcome.case.group == FEW_PEERS]
    faulty = [outcome for outcome in outcomes if outcome.case.faults and outcome not in few]
    innocent = [outcome for outcome in outcomes if not outcome.case.faults]
    cells = figures.grouped(faulty, _cell)
    return {
        "schema": 1,
        "num_cases": len(outcomes),
        "num_innocent": len(innocent),
        "seconds": round(seconds, 1),
        "recall": figures.recall(faulty).to_json(),
        "precision": figures.precision(outcomes).to_json(),
        "right_cause": figures.right_cause(faulty).to_json(),
        "top_one": figures.top_one(faulty).to_json(),
        "false_alarms": figures.alarmed(innocent).to_json(),
        "job_cause": figures.job_cause(innocent).to_json(),
        "onset_error": dict(figures.quantiles(figures.onset_errors(outcomes))),
        "slowdown_error": dict(figures.quantiles(figures.slowdown_errors(outcomes))),
        "few_peers": {
            "recall": figures.recall(few).to_json(),
            "precision": figures.precision(few).to_json(),
        },
        "cost_error": dict(figures.quantiles(figures.cost_errors(outcomes))),
        "cells": {name: figures.recall(chosen).to_json() for name, chosen in cells.items()},
        "wrong": [_wrong(outcome) for outcome in outcomes if _is_wrong(outcome)],
    }


def _cell(outcome: Outcome) -> str:
    case = outcome.case
    return f"{case.group} {case.severity:.0%} {case.duration} {case.layout_name} {case.cost_name}"


def _is_wrong(outcome: Outcome) -> bool:
    found = outcome.score
    if found is None or found.num_false:
        return True
    return found.num_right_cause < found.num_faults


def _wrong(outcome: Outcome) -> dict[str, Json]:
    case, found = outcome.case, outcome.score
    return {
        "seed": case.seed,
        "case": _cell(outcome),
        "faults": [fault.to_json() for fault in case.faults],
        "missed": len(case.faults) - (found.num_found if found else 0),
        "false": found.num_false if found else 0,
        "error": outcome.error,
    }
