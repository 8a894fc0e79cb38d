"""Passes that wait inside for other ranks, where nobody recorded the waiting or passes hold it all.

Jobs of the ground `pod`: rings of keys and values that are not recorded (CP), and fully sharded
parameters on Megatron-Core.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.__main__ import ground_named
from benchmarks.grounds.ground import Planted
from detect import Owner, Report, detect
from detect.observe.operations import BACKWARD, FORWARD
from detect.observe.work import Parts, as_whole_passes
from megascan.reader import read_trace

DRAW = 283


@cache
def judged(name: str) -> tuple[Report, tuple[Planted, ...]]:
    """Return the report on a job, and what was planted."""
    pod = ground_named("pod")
    case = next(one for one in pod.cases(DRAW) if one.name.startswith(name))
    with TemporaryDirectory() as folder:
        planted = pod.write(case, Path(folder))
        return detect(build_timeline(read_trace(Path(folder)))), planted


@pytest.mark.parametrize(
    "name",
    [
        "gpu_clock-14-r12",  # CP 4 x DP 3
        "hbm-1-r4",  # CP 4 alone
        "gpu_clock-6-r8",  # fully sharded, DP 8
    ],
)
def test_who_is_behind_is_named_with_what_it_costs(name):
    report, (fault,) = judged(name)
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == (fault.ranks, Owner.NODE)
    assert not finding.cost_is_replayed  # a replay takes the others' waiting for work
    assert finding.step_time_cost_ratio == pytest.approx(fault.held_cost_ratio, abs=0.02)


@pytest.mark.parametrize("name", ["healthy-long_context-2-r4", "healthy-sharded-1-r4"])
def test_sound_jobs_that_wait_unseen_stay_silent(name):
    report, planted = judged(name)
    assert not planted
    assert not [one for one in report.findings if one.owner is Owner.NODE]


class TestParts:
    parts = Parts(
        attention_ns=np.array([6.0, 7.0]), experts_ns=np.zeros(2), others_ns=np.array([6.0, 5.0])
    )

    @pytest.mark.parametrize(
        ("hidden", "outside"),
        [
            ((), [12.0, 12.0]),
            (("cp",), [6.0, 5.0]),
            (("tp", "cp"), [0.0, 0.0]),  # along TP all modules wait
            (("ep",), [0.0, 0.0]),  # where experts are was not recorded
        ],
    )
    def test_what_lies_outside_of_waiting(self, hidden, outside):
        assert self.parts.outside(hidden).tolist() == outside

    def test_the_slowest_rank_says_what_attention_adds(self):
        outside = np.array([6.0, 5.0, 3.0, np.nan])
        whole = as_whole_passes(
            outside, np.array([12.0, 12.0, 9.0, 7.0]), np.array([0, 1, 1, 0]),
            np.array([FORWARD, FORWARD, BACKWARD, BACKWARD]),
        )  # fmt: skip
        assert whole[:3].tolist() == [12.0, 10.0, 9.0]
        assert np.isnan(whole[3])
