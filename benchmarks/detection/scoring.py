"""A report against the truth of its case."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.detection.jobs import Case
from detect.report import Finding, Owner, Report
from megascan.simulate import Fault


@dataclass(frozen=True, kw_only=True)
class Score:
    """What became of one case.

    A node finding is right when it names a faulty rank and no other; for a link, exactly its two
    ends. Collector pauses of one rank may also be laid at the job's door, if the rank is named.
    """

    num_faults: int
    num_found: int
    num_right_cause: int
    num_named: int
    """Findings whose owner is the node, and right ones."""
    num_false: int
    """Those of them that are not right."""
    top_is_right: bool
    causes: tuple[tuple[str, str], ...]
    """(true kind, cause in the finding) of every right finding."""
    onset_error: int | None
    """Iterations between the true onset and the one reported, where the fault begins late."""
    slowdown_error: float | None
    """Reported over true slowdown, less 1, for compute faults."""
    cost_error: float | None
    """Reported over true step-time cost, less 1, for a single lasting fault."""
    job_cause_found: bool
    undecided: int


def matches(finding: Finding, fault: Fault) -> bool:
    """Whether a finding names the fault's rank, or pair, and nobody else."""
    if finding.owner is not Owner.NODE and not (
        finding.owner is Owner.JOB and fault.kind == finding.cause.value == "gc"
    ):
        return False
    truth = {fault.rank} if fault.peer is None else {fault.rank, fault.peer}
    return set(finding.ranks) == truth


def score(case: Case, report: Report, true_cost_ratio: float = 1.0) -> Score:
    """Compare a report with what was planted; `true_cost_ratio` is step time over that of the
    same job without its faults."""
    pairs = [
        (fault, next((each for each in report.findings if matches(each, fault)), None))
        for fault in case.faults
    ]
    found = [(fault, finding) for fault, finding in pairs if finding is not None]
    right = [finding for _, finding in found]
    named = [each for each in report.findings if each.owner is Owner.NODE or each in right]
    return Score(
        num_faults=len(case.faults),
        num_found=len(found),
        num_right_cause=sum(finding.cause.value == fault.kind for fault, finding in found),
        num_named=len(named),
        num_false=sum(finding not in right for finding in named),
        top_is_right=bool(named) and named[0] in right,
        causes=tuple((str(fault.kind), finding.cause.value) for fault, finding in found),
        onset_error=_onset_error(case, found),
        slowdown_error=_slowdown_error(found),
        cost_error=_cost_error(case, found, true_cost_ratio),
        job_cause_found=any(
            finding.cause.value == case.job_cause and finding.owner is Owner.JOB
            for finding in report.findings
        ),
        undecided=sum(finding.owner is Owner.UNDECIDED for finding in report.findings),
    )


def _onset_error(case: Case, found: list[tuple[Fault, Finding]]) -> int | None:
    if case.duration != "transient" or not found:
        return None
    fault, finding = found[0]
    return abs(finding.first_iteration - fault.first_iteration)


def _cost_error(
    case: Case, found: list[tuple[Fault, Finding]], true_cost_ratio: float
) -> float | None:
    if case.duration != "permanent" or len(case.faults) != 1 or not found:
        return None
    return found[0][1].step_time_cost_ratio / true_cost_ratio - 1.0


def _slowdown_error(found: list[tuple[Fault, Finding]]) -> float | None:
    errors = [
        finding.slowdown / fault.factor - 1.0
        for fault, finding in found
        if fault.kind == "compute" and finding.cause.value == "compute"
    ]
    return max(errors, key=abs) if errors else None
