"""Score one verdict against the truth of its ground, and add scores up by family.

A finding whose owner is `node` is right when every rank that it names is at fault, and wrong when
it names any other. A fault is found when a right finding names one of its ranks; it is *due* when
it costs the job 5 % of an iteration or more (3 % for links), or makes computing 1.05 times slower
and costs 1 %: nobody can be blamed for silence about a fault that costs nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from aggregate import build_timeline
from benchmarks.detection.baselines import RULES, spans_of
from benchmarks.grounds.avoided import EVERYTHING, SHARED, TOLD, told_by_layout
from benchmarks.grounds.compared import ALONE, FEW, ONE_OTHER, UNSEEN, told_by_peers
from benchmarks.grounds.ground import Case, Planted
from detect import Finding, Owner, detect
from megascan.errors import MegaScanError
from megascan.reader import read_trace
from megascan.timeline import Timeline, narrow

DUE_COST = 1.05
DUE_COST_OF_LINKS = 1.03
DUE_SLOWDOWN, DUE_COST_OF_COMPUTE = 1.05, 1.01
CLEAR_SLOWDOWN = 1.08
"""From which slow devices have a row of their own."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """Keep of a finding what it is scored by."""

    ranks: tuple[int, ...]
    cause: str
    owner: str
    slowdown: float
    interval: tuple[float, float]
    first_iteration: int
    cost_ratio: float
    confidence: str = ""
    named_as: str = ""
    """With which other names it is counted; the `cause` where "", as in outcomes of before."""
    doubt: str = ""
    """Of an undecided finding: the last sentence of its evidence, mostly why it is undecided."""
    is_in_sound_job: bool = False
    """Of a finding that blames the job: whether the same job, simulated without what was planted,
    shows it as well. Then no fault was taken for the job's own doing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the detector said of one case, beside the truth."""

    ground: str
    name: str
    family: str
    num_ranks: int
    verdict: str
    planted: tuple[Planted, ...]
    findings: tuple[Named, ...]
    iterations: tuple[int, ...] = ()
    """Those that were traced, ascending."""
    power: float | None = None
    error: str = ""
    baselines: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    """For each planted fault what `avoided.told_by_layout` says of a network, and
    `compared.told_by_peers` of a device; "" for other causes. In outcomes of before "" for devices
    as well, or () throughout.
    """

    @property
    def at_fault(self) -> frozenset[int]:
        """Return the ranks that may be named."""
        return frozenset(r for one in self.planted if one.owner == "node" for r in one.ranks)

    @property
    def has_cause_of_job(self) -> bool:
        """Return whether a cause of the job was planted: a collector pauses for what its process
        allocates.
        """
        return any(one.owner == "job" or one.cause == "gc" for one in self.planted)

    @property
    def wrong(self) -> tuple[Named, ...]:
        """Return the findings that blame a node which is not at fault."""
        return tuple(
            one for one in self.findings if one.owner == "node" and set(one.ranks) - self.at_fault
        )

    @property
    def due(self) -> tuple[Planted, ...]:
        """Return the faults of hardware that cost enough to be missed."""
        return tuple(one for one in self.planted if one.owner == "node" and is_due(one))

    @property
    def doubtful_for_job(self) -> bool:
        """Return whether a finding blames a job in which only hardware is at fault, and this costs
        enough: the job may be as the finding says, beside its fault, or it may be taken for guilty.
        """
        blames_job = any(one.owner == "job" for one in self.findings)
        return blames_job and bool(self.due) and not self.has_cause_of_job

    def beside_sound(self, sound: Outcome) -> Outcome:
        """Return it with those findings marked that blame the job, and that the `sound` one, the
        same job without what was planted, shows as well: of that cause, on some of the same ranks.
        """

        def is_shown(one: Named) -> bool:
            return any(
                other.owner == one.owner == "job"
                and other.cause == one.cause
                and (not one.ranks or not other.ranks or bool(set(one.ranks) & set(other.ranks)))
                for other in sound.findings
            )

        return replace(
            self,
            findings=tuple(replace(one, is_in_sound_job=is_shown(one)) for one in self.findings),
        )

    def finding_of(self, planted: Planted) -> Named | None:
        """Return the right finding of a planted fault, the one of its own cause first."""
        right = [
            one
            for one in self.findings
            # a collector pauses for what its process allocates: named, and the job's
            if (one.owner == "node" or one.cause == planted.cause == "gc")
            and set(one.ranks) & set(planted.ranks)
            and not set(one.ranks) - self.at_fault
        ]
        return next((one for one in right if one.cause == planted.cause), next(iter(right), None))

    def points_at(self, planted: Planted) -> bool:
        """Tell whether any finding, whoever it blames, has a rank of this fault."""
        return any(set(named.ranks) & set(planted.ranks) for named in self.findings)

    def complaints(self) -> list[str]:
        """Say what went wrong, a line each: errors, wrong names, due faults that were missed."""
        lines = [self.error] if self.error else []
        lines += [
            f"WRONG {one.cause} {list(one.ranks)} {one.slowdown:.2f}x, at fault "
            f"{sorted(self.at_fault)} ({self.family})"
            for one in self.wrong
        ]
        lines += [
            f"MISSED {one.kind} {list(one.ranks)} {one.factor:.2f}x cost {one.cost_ratio:.3f}, "
            f"verdict {self.verdict} {[(n.owner, n.cause, list(n.ranks)) for n in self.findings]}"
            for one in self.due
            if self.finding_of(one) is None
        ]
        return lines

    def to_json(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outcome:
        """Return the outcome that `to_json` wrote down."""
        values = dict(record)
        values["planted"] = tuple(
            Planted(**{**one, "ranks": tuple(one["ranks"])}) for one in record["planted"]
        )
        values["findings"] = tuple(
            Named(**{**one, "ranks": tuple(one["ranks"]), "interval": tuple(one["interval"])})
            for one in record["findings"]
        )
        values["iterations"] = tuple(record["iterations"])
        values["told"] = tuple(record.get("told", ()))
        values["baselines"] = {k: tuple(v) for k, v in record["baselines"].items()}
        return cls(**values)


def is_due(planted: Planted) -> bool:
    """Tell whether a fault costs enough that silence about it is a miss."""
    if planted.cause == "link":
        return planted.cost_ratio >= DUE_COST_OF_LINKS
    if planted.cause == "compute" and planted.factor >= DUE_SLOWDOWN:
        return planted.cost_ratio >= DUE_COST_OF_COMPUTE
    return planted.cost_ratio >= DUE_COST


def judge_case(
    case: Case, planted: tuple[Planted, ...], folder: Path, *, with_baselines: bool
) -> Outcome:
    """Read the traced files in `folder` as the commands do, judge them, and keep what was said."""
    verdict, power, error = "", None, ""
    findings: tuple[Named, ...] = ()
    iterations: tuple[int, ...] = ()
    named: dict[str, tuple[int, ...]] = {}
    told: tuple[str, ...] = ()
    try:
        # ranks that are missing are passed over, as one does whom the reader has told of them
        trace = read_trace(folder, allow_missing_ranks=True)
        iterations = tuple(map(int, np.unique(narrow(trace.spans, "iteration"))))
        timeline = build_timeline(trace)
        told = _told(timeline, planted)
        report = detect(timeline)
        verdict, power = report.verdict.value, report.minimum_detectable.get("compute")
        findings = tuple(kept_of(one) for one in report.findings)
        if with_baselines:
            spans = spans_of(timeline)
            named = {k: tuple(sorted(rule(spans, timeline))) for k, rule in RULES.items()}
    except MegaScanError as problem:
        error = f"refused: {problem}"
    except Exception as problem:  # a crash is a result of the benchmark
        error = f"crashed: {type(problem).__name__}: {problem}"
    return Outcome(
        ground=case.ground,
        name=case.name,
        family=case.family,
        num_ranks=case.num_ranks,
        verdict=verdict,
        planted=planted,
        findings=findings,
        iterations=iterations,
        power=power,
        error=error,
        baselines=named,
        told=told,
    )


def _told(timeline: Timeline, planted: Sequence[Planted]) -> tuple[str, ...]:
    words = zip(told_by_layout(timeline, planted), told_by_peers(timeline, planted), strict=True)
    return tuple(of_network or of_device for of_network, of_device in words)


def kept_of(finding: Finding) -> Named:
    """Return of a finding what it is scored by."""
    interval = finding.slowdown_interval
    return Named(
        ranks=tuple(finding.ranks),
        cause=finding.cause.value,
        owner=finding.owner.value,
        slowdown=float(finding.slowdown),
        interval=(float(interval[0]), float(interval[1])),
        first_iteration=int(finding.first_iteration),
        cost_ratio=float(finding.step_time_cost_ratio),
        confidence=finding.confidence.value,
        named_as=finding.named_as,
        doubt=finding.evidence[-1] if finding.owner is Owner.UNDECIDED and finding.evidence else "",
    )


def table_of(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a ground and family: due faults, found, right cause, wrong names."""
    rows = [
        "| ground | family | jobs | due | found | right cause | found, not blamed | wrong name |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.ground, outcome.family].append(outcome)
        groups[outcome.ground, "all"].append(outcome)
    for (ground, family), group in sorted(groups.items()):
        rows.append(f"| {ground} | {family} | {_cells(group)} |")
    rows.append(f"| all | all | {_cells(outcomes)} |")
    healthy = [one for one in outcomes if not one.at_fault]
    wrong = sum(bool(one.wrong) for one in healthy)
    rows.append("")
    rows.append(
        f"{wrong} of {len(healthy)} jobs without a fault of hardware got a name; "
        f"{sum(bool(one.error) for one in outcomes)} of {len(outcomes)} could not be judged."
    )
    return "\n".join(rows)


def table_by_cause(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a cause of what is due: found, only pointed at, said to be none."""
    rows = [
        "| planted | due | found | found, not blamed | silent: `HEALTHY` | `JOB` | `UNDECIDED` |",
        "|---|---|---|---|---|---|---|",
    ]
    due = [(one, fault) for one in outcomes for fault in one.due]
    parts = {
        cause: [(one, fault) for one, fault in due if fault.cause == cause]
        for cause in {fault.cause for _, fault in due}
    }
    dear = [it for it in parts.get("compute", []) if it[1].cost_ratio >= DUE_COST]
    if dear:
        parts[f"compute that costs {DUE_COST - 1:.0%}"] = dear
    for name, part in [*sorted(parts.items()), ("all", due)]:
        missed = [(one, fault) for one, fault in part if one.finding_of(fault) is None]
        silent = [one.verdict for one, fault in missed if not one.points_at(fault)]
        counts = (silent.count(verdict) for verdict in ("healthy", "job", "undecided"))
        cells = [len(part), len(part) - len(missed), len(missed) - len(silent), *counts]
        rows.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def table_of_networks(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a kind of due network fault: how many the layout lets anybody tell
    (`avoided.told_by_layout`), and how many of these, and of the others, are found.
    """
    parts: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for fault, told, is_found in _due_and_told(outcomes, "link"):
        parts[fault.kind].append((told, is_found))
    return _table_of_told("slow network", (EVERYTHING, SHARED), parts)


def table_of_devices(outcomes: Sequence[Outcome]) -> str:
    """Return one Markdown row a kind of due slow device: how many the trace lets anybody tell
    (`compared.told_by_peers`), and how many of these, and of the others, are found.
    """
    parts: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for fault, told, is_found in _due_and_told(outcomes, "compute"):
        parts[_slowness(fault)].append((told, is_found))
    return _table_of_told("slow device", (UNSEEN, ALONE, ONE_OTHER, FEW), parts)


def _slowness(fault: Planted) -> str:
    if fault.share_of_time < 1.0:
        return "in bursts"
    if fault.factor >= CLEAR_SLOWDOWN:
        return f"lasting, {CLEAR_SLOWDOWN}x and more"
    if fault.factor >= DUE_SLOWDOWN:
        return f"lasting, {DUE_SLOWDOWN}x to {CLEAR_SLOWDOWN}x"
    return f"lasting, below {DUE_SLOWDOWN}x"


def _due_and_told(outcomes: Sequence[Outcome], cause: str) -> Iterator[tuple[Planted, str, bool]]:
    """Yield each due fault of a cause of which is known whether it can be told, what is said of it
    (`Outcome.told`), and whether it is found.
    """
    for one in outcomes:
        for fault, told in zip(one.planted, one.told, strict=bool(one.told)):
            if told and fault.cause == cause and fault in one.due:
                yield fault, told, one.finding_of(fault) is not None


def _table_of_told(
    what: str, hindrances: Sequence[str], parts: Mapping[str, Sequence[tuple[str, bool]]]
) -> str:
    """Return one Markdown row for each of `parts` and one for all: how many of its faults have each
    of the `hindrances` and how many none, and how many of these, and of the others, are found.
    """
    head = (what, "due", *hindrances, "can be told", "of these found", "others found")
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    every = [it for part in parts.values() for it in part]
    for name, part in [*sorted(parts.items()), ("all", every)]:
        words = [told for told, _ in part]
        found = [told for told, is_found in part if is_found]
        counts = (len(part), *map(words.count, (*hindrances, TOLD)))
        cells = (*counts, found.count(TOLD), len(found) - found.count(TOLD))
        rows.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def _cells(group: Sequence[Outcome]) -> str:
    due = [(one, fault) for one in group for fault in one.due]
    found = [(fault, one.finding_of(fault)) for one, fault in due]
    right = sum(named is not None and named.cause == fault.cause for fault, named in found)
    unnamed = sum(one.finding_of(fault) is None and one.points_at(fault) for one, fault in due)
    num_found = sum(named is not None for _, named in found)
    wrong = sum(bool(one.wrong) for one in group)
    return f"{len(group)} | {len(due)} | {num_found} | {right} | {unnamed} | {wrong}"
