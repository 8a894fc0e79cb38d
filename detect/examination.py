"""A verdict together with what it was reached from, for what shows or compares more than findings.

A report says what stands out. A page also shows how everybody else did, and a comparison of two
traces needs the values of every rank in both. Both take an `Examination`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from detect.detector import judge
from detect.observations import Bools, Floats, Observations
from detect.observe.extract import observe
from detect.observe.window import one_row_a_worker, steady
from detect.optable import observe_op_table
from detect.report import Cause, Report
from detect.settings import DetectorSettings
from detect.stats.residuals import compare_within, stage_groups
from detect.whatif.optable import read_op_table
from megascan.timeline import Timeline

RANK_CAUSES = (Cause.COMPUTE, Cause.HOST, Cause.UNKNOWN)
"""Causes that make a rank's own passes longer than those of its peers."""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The report, and the observations without warm-up that were judged."""

    report: Report
    seen: Observations

    @cached_property
    def suspects(self) -> Bools:
        """Rows that a finding names as slow themselves, (row,): nobody's peers."""
        named = {
            rank
            for finding in self.report.findings
            if finding.cause in RANK_CAUSES
            for rank in finding.ranks
        }
        workers = self.seen.members.workers
        return np.array([bool(named & set(ranks)) for ranks in workers], dtype=bool)

    @cached_property
    def across_stages(self) -> bool:
        """Whether ranks are compared by the transformer layers of all stages: no rank has peers."""
        return self.seen.layers is not None and all(
            len(rows) < 2 for rows in stage_groups(self.seen.members)
        )

    @cached_property
    def slowness(self) -> Floats:
        """How much slower each rank computes than its peers, (row, iteration), in logarithms.

        0.26 is 1.30 times the peers' median; NaN where a rank has no peer or recorded nothing.
        """
        members = self.seen.members
        work, groups = self.seen.work, stage_groups(members)
        if self.across_stages and self.seen.layers is not None:
            work, groups = self.seen.layers, [np.arange(len(members))]
        return compare_within(work, members, groups, self.suspects).value


def examine(timeline: Timeline, settings: DetectorSettings | None = None) -> Examination:
    """Judge a timeline, as `detect.detect` does, and keep what was judged."""
    return examine_observations(observe(timeline), settings or DetectorSettings())


def examine_op_table(path: Path, settings: DetectorSettings | None = None) -> Examination:
    """The same for an op table. Raises InputError for a bad file."""
    return examine_observations(
        observe_op_table(read_op_table(path)), settings or DetectorSettings()
    )


def examine_observations(observations: Observations, settings: DetectorSettings) -> Examination:
    """The same for observations from anywhere."""
    return Examination(
        report=judge(observations, settings),
        seen=steady(one_row_a_worker(observations), settings),
    )
