"""What a verdict is aimed at on any ground, and what was reached.

Recall counts due faults (`outcome`) that a finding names and no other rank with them; precision
counts findings with owner `node`. Owners are counted where one is given: `node` is right of ranks
that are at fault, `job` where a cause of the job was planted, a collector among them (it pauses for
what its process allocates), no fault of hardware is due, or the same job says so of itself without
its fault (a last stage that computes the loss is heavy, whatever else is wrong). An onset counts
where a lasting fault begins inside the trace, with two settled iterations before it.

    traced      3 4 5 6 | 11 12 13 14        the fault begins in iteration 8
    found from            11 or 12: right, at most one traced iteration off
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.figures import Share
from benchmarks.grounds.ground import NUM_WARMING_UP, Planted
from benchmarks.grounds.outcome import DUE_SLOWDOWN, Named, Outcome
from detect.report import Confidence
from detect.thresholds.verdicts import TRUST

SHORT_SHARE = 0.35
"""Of the time: what covers less comes in bursts."""
ONSET_ITERATIONS = 1
LEAST_BEFORE = 2
"""Iterations before an onset, or nobody can tell that there was one."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """One line: what, the share aimed at, and the one reached."""

    what: str
    share: float
    reached: Share
    at_most: bool = False

    def row(self) -> str:
        """As a row of the table."""
        met = self.reached.value <= self.share if self.at_most else self.reached.value >= self.share
        word = ("yes" if met else "no") if self.reached.total else "-"
        bound = "at most" if self.at_most else "at least"
        return f"| {self.what} | {bound} {self.share:g} | {self.reached.text()} | {word} |"


def table_of_aims(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row an aim."""
    rows = ["| aim | wanted | reached | met |", "|---|---|---|---|"]
    return "\n".join([*rows, *(one.row() for one in aims_of(outcomes))])


def aims_of(outcomes: Sequence[Outcome]) -> list[Aim]:
    """Return all aims with what was reached."""
    nodes = [(one, finding) for one in outcomes for finding in one.findings if _blames(finding)]
    compute = [(one, finding) for one, finding in nodes if finding.cause == "compute"]
    sound = [one for one in outcomes if not one.at_fault]
    return [
        Aim(
            what="slow devices, 5 % and more: recall", share=0.97, reached=_recall(outcomes, _slow)
        ),
        Aim(what="slow devices: precision", share=0.99, reached=_precision(compute)),
        Aim(what="all nodes named: precision", share=0.99, reached=_precision(nodes)),
        Aim(
            what="nodes named with high confidence: precision",
            share=0.99,
            reached=_precision([it for it in nodes if it[1].confidence == Confidence.HIGH]),
        ),
        Aim(what="throttling in bursts: recall", share=0.9, reached=_recall(outcomes, _bursting)),
        Aim(
            what="hosts, loaders, their memory: recall", share=0.9, reached=_recall(outcomes, _host)
        ),
        Aim(what="NICs of a host: recall", share=0.95, reached=_recall(outcomes, _network)),
        Aim(
            what="jobs without a fault of hardware with a name",
            share=0.005,
            reached=_share(bool(one.wrong) for one in sound),
            at_most=True,
        ),
        Aim(what="owners given: right", share=0.98, reached=_share(_owners(outcomes))),
        Aim(what="onset within one iteration", share=0.95, reached=_share(_onsets(outcomes))),
    ]


def table_of_confidence(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a confidence: how many names have it, and how many are right.

    A name is one of a node; a sound job is one without a fault of hardware. Below stand the names
    by what is named and its cost, by which `detect.thresholds.TRUST` says how sure a name can be.
    """
    nodes = [(one, finding) for one in outcomes for finding in one.findings if _blames(finding)]
    sound = [one for one in outcomes if not one.at_fault]
    rows = [
        "| confidence | names | right | sound jobs with such a name |",
        "|---|---|---|---|",
    ]
    for word in Confidence:
        part = [it for it in nodes if it[1].confidence == word]
        blamed = _share(any(one.confidence == word for one in job.wrong) for job in sound)
        rows.append(f"| {word} | {len(part)} | {_precision(part).text()} | {blamed.text()} |")
    rows += ["", "| named | cost | names | right |", "|---|---|---|---|"]
    parts: dict[tuple[str, bool], list[tuple[Outcome, Named]]] = defaultdict(list)
    for outcome, one in nodes:
        kind, is_costly = one.named_as or one.cause, one.cost_ratio >= TRUST.costly_ratio
        parts[kind, is_costly].append((outcome, one))
    for kind in sorted({kind for kind, _ in parts}):
        for is_costly in (True, False):
            part = parts[kind, is_costly]
            cost = f"{TRUST.costly_ratio - 1:.0%} {'and more' if is_costly else 'or less'}"
            rows.append(f"| {kind} | {cost} | {len(part)} | {_precision(part).text()} |")
    return "\n".join(rows)


def table_of_doubts(outcomes: Sequence[Outcome], num_rows: int = 25) -> str:
    """Return one Markdown row a doubt that leaves findings undecided: how often it does, how many
    of these findings hold ranks at fault and no others, and how many due faults they point at that
    no name finds. The most such faults first; numbers in sentences become N.
    """
    found: dict[tuple[str, str], list[tuple[Outcome, Named]]] = defaultdict(list)
    for outcome in outcomes:
        for one in outcome.findings:
            if one.owner == "undecided":
                found[one.cause, _NUMBERS.sub("N", one.doubt)].append((outcome, one))
    rows = []
    for (cause, doubt), part in found.items():
        right = sum(bool(one.ranks) and set(one.ranks) <= job.at_fault for job, one in part)
        missed = sum(
            any(job.finding_of(it) is None and set(it.ranks) & set(one.ranks) for it in job.due)
            for job, one in part
        )
        rows.append((missed, len(part), f"| {cause}: {doubt} | {len(part)} | {right} | {missed} |"))
    rows.sort(reverse=True)
    head = ["| undecided | findings | right ranks | due faults pointed at |", "|---|---|---|---|"]
    return "\n".join([*head, *(row for *_, row in rows[:num_rows])])


_NUMBERS = re.compile(r"#?\d[\d.,]*( and \d+( more)?)?")


def table_of_costs(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a cause: how far what findings are said to cost is from the truth.

    Counted are jobs with one planted fault that lasts, found as what it is. The truth is the time
    of the iterations in which it holds over that of the same iterations without it, both simulated
    from the same draws. A point is a hundredth of that ratio.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        lasting = [one for one in outcome.due if one.share_of_time == 1.0]
        for fault in lasting if len(outcome.planted) == 1 else ():
            finding = outcome.finding_of(fault)
            if finding is not None and finding.cause == fault.cause:
                errors[fault.cause].append(finding.cost_ratio - fault.held_cost_ratio)
    rows = [
        "| cost of | found | within 2 points | within 5 points | median error, points |",
        "|---|---|---|---|---|",
    ]
    for cause, of_cause in sorted(errors.items()):
        off = np.abs(of_cause)
        near = " | ".join(_share(iter(off <= points / 100)).text() for points in (2, 5))
        rows.append(f"| {cause} | {len(off)} | {near} | {100 * float(np.median(off)):.1f} |")
    return "\n".join(rows)


def _blames(finding: Named) -> bool:
    return finding.owner == "node"


def _slow(planted: Planted) -> bool:
    lasts = planted.share_of_time > SHORT_SHARE
    return planted.cause == "compute" and lasts and planted.factor >= DUE_SLOWDOWN


def _bursting(planted: Planted) -> bool:
    return planted.cause == "compute" and planted.share_of_time <= SHORT_SHARE


def _host(planted: Planted) -> bool:
    return planted.cause in ("host", "loader")


def _network(planted: Planted) -> bool:
    return planted.kind == "nic"


def _share(hits: Iterator[bool]) -> Share:
    counted = list(hits)
    return Share(sum(counted), len(counted))


def _recall(outcomes: Sequence[Outcome], counts: Callable[[Planted], bool]) -> Share:
    return _share(
        outcome.finding_of(fault) is not None
        for outcome in outcomes
        for fault in outcome.due
        if counts(fault)
    )


def _precision(named: Sequence[tuple[Outcome, Named]]) -> Share:
    return _share(not set(finding.ranks) - outcome.at_fault for outcome, finding in named)


def _owners(outcomes: Sequence[Outcome]) -> Iterator[bool]:
    """Yield for each finding that gives an owner whether it is the right one."""
    for outcome in outcomes:
        is_jobs = outcome.has_cause_of_job or not outcome.due
        for finding in outcome.findings:
            if _blames(finding):
                yield not set(finding.ranks) - outcome.at_fault
            elif finding.owner == "job":
                yield is_jobs or finding.is_in_sound_job


def _onsets(outcomes: Sequence[Outcome]) -> Iterator[bool]:
    """Yield for each found fault that begins inside the trace whether its onset is right."""
    for outcome in outcomes:
        settled = [number for number in outcome.iterations if number > NUM_WARMING_UP]
        for fault in outcome.due:
            finding = outcome.finding_of(fault)
            before = sum(number < fault.first_iteration for number in settled)
            is_inside = LEAST_BEFORE <= before < len(settled)
            if finding is not None and is_inside and fault.share_of_time == 1.0:
                found = sum(number < finding.first_iteration for number in settled)
                yield abs(found - before) <= ONSET_ITERATIONS
