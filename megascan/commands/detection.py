"""Running the detector from a command: its flags, and its findings as marks in a timeline.

Commands call `packages.require("detect")` before they import this module.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from detect import DetectorSettings, Finding, Report, detect
from megascan.commands.progress import stage
from megascan.errors import ConfigError, UsageError
from megascan.export import Mark
from megascan.schema import Kind
from megascan.timeline import Timeline, equals, numbers


def add_detector_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the detector's thresholds; the defaults are its own."""
    defaults = DetectorSettings()
    group = parser.add_argument_group("detection")
    group.add_argument(
        "--min-slowdown",
        type=float,
        default=defaults.min_slowdown,
        metavar="RATIO",
        help="smallest slowdown that is reported, 1.03 is 3 %% (default: %(default)s)",
    )
    group.add_argument(
        "--false-discovery-rate",
        type=float,
        default=defaults.false_discovery_rate,
        metavar="Q",
        help="share of false names accepted among all names (default: %(default)s)",
    )


def settings_from(arguments: argparse.Namespace) -> DetectorSettings:
    """The detector's settings asked for; UsageError for values that mean nothing."""
    try:
        return DetectorSettings(
            min_slowdown=arguments.min_slowdown,
            false_discovery_rate=arguments.false_discovery_rate,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def detect_in(timeline: Timeline, settings: DetectorSettings) -> Report:
    """Findings of a timeline."""
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
    """The suspects and everybody who shares a process group with one of them, the world aside."""
    world = timeline.completeness.world_size
    suspects = {rank for finding in report.findings for rank in finding.ranks}
    members = {
        member
        for rank in suspects & timeline.headers.keys()
        for group in timeline.headers[rank].groups.values()
        if len(group) < world
        for member in group
    }
    return frozenset(suspects | members)
