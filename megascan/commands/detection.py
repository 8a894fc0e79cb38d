"""Running the detector from a command: its flags, and its findings as marks in a timeline.

The detector itself is imported when it runs: a command that may detect starts without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megascan.commands.packages import require
from megascan.commands.progress import stage
from megascan.errors import ConfigError, UsageError
from megascan.export import Mark
from megascan.schema import Kind
from megascan.timeline import Timeline, equals, numbers

if TYPE_CHECKING:
    from detect import DetectorSettings, Finding, Report


def add_detector_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the detector's thresholds; what is not given is the detector's own (a test compares
    these texts with it)."""
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--min-slowdown",
        type=float,
        metavar="RATIO",
        help="smallest slowdown that is reported, 1.03 is 3 %% (default: 1.03)",
    )
    group.add_argument(
        "--false-discovery-rate",
        type=float,
        metavar="Q",
        help="share of false names accepted among all names (default: 0.01)",
    )


def is_tuned(arguments: argparse.Namespace) -> bool:
    """Whether a threshold was given."""
    return not (arguments.min_slowdown is None and arguments.false_discovery_rate is None)


def settings_from(arguments: argparse.Namespace) -> DetectorSettings:
    """The detector's settings asked for; UsageError for values that mean nothing."""
    require("detect")
    from detect import DetectorSettings

    own, ratio, rate = DetectorSettings(), arguments.min_slowdown, arguments.false_discovery_rate
    try:
        return DetectorSettings(
            min_slowdown=own.min_slowdown if ratio is None else ratio,
            false_discovery_rate=own.false_discovery_rate if rate is None else rate,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def detect_in(timeline: Timeline, settings: DetectorSettings) -> Report:
    """Findings of a timeline."""
    from detect import detect

    with stage(f"comparing {len(timeline.headers)} ranks with their peers"):
        return detect(timeline, settings)


def marks_of(report: Report, timeline: Timeline) -> list[Mark]:
    """Every finding drawn on its ranks: one slice for each stretch of iterations it was active."""
    spans = timeline.spans.filter(equals(timeline.spans, "kind", Kind.ITERATION))
    ranks, iterations = numbers(spans, "rank"), numbers(spans, "iteration")
    starts = numbers(spans, "start_ns")
    ends = starts + numbers(spans, "duration_ns")
    marks = []
    for finding in report.findings:
        for rank in finding.ranks:
            for first, last in _stretches(finding):
                inside = (ranks == rank) & (iterations >= first) & (iterations <= last)
                if np.any(inside):
                    marks.append(_mark(finding, rank, starts[inside].min(), ends[inside].max()))
    return marks


def _stretches(finding: Finding) -> Iterator[tuple[int, int]]:
    yield from finding.episodes or [(finding.first_iteration, finding.last_iteration)]


def _mark(finding: Finding, rank: int, start_ns: np.int64, end_ns: np.int64) -> Mark:
    return Mark(
        rank=rank,
        start_ns=int(start_ns),
        end_ns=int(end_ns),
        label=f"{finding.cause} {finding.slowdown:.2f}x ({finding.owner})",
        args={"headline": finding.headline, "q_value": finding.q_value},
    )


def ranks_in_focus(report: Report, timeline: Timeline) -> frozenset[int]:
    """The suspects and everybody who shares a process group with one of them, the world aside.

    Findings of the job name whole stages; they are followed only where no node is suspected.
    """
    from detect import Owner

    world = timeline.completeness.world_size
    findings = [one for one in report.findings if one.owner != Owner.JOB] or report.findings
    suspects = {rank for finding in findings for rank in finding.ranks}
    members = {
        member
        for rank in suspects & timeline.headers.keys()
        for group in timeline.headers[rank].groups.values()
        if len(group) < world
        for member in group
    }
    return frozenset(suspects | members)
