"""A clock that is held down tells whether a stage is slow, or has more to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.warmup import steady
from megascan.topology import Layout

BRAKE, POWER_CAP = 0x80, 0x4


@pytest.mark.parametrize(
    ("clock", "reason", "named"),
    [
        (1600.0, 0, (2,)),
        (1670.0, BRAKE, (2,)),
        (1670.0, 0, None),
        (1600.0, POWER_CAP, None),
        (1800.0, 0, None),
    ],
    ids=["far lower", "a reason", "hardly lower", "at its power limit", "as high"],
)
def test_a_low_clock_tells_a_slow_stage_from_a_heavy_one(job, slow, clock, reason, named):
    timeline = job(layout=Layout(pp=4), work=slow(2, 1.15)).timeline()
    seen = replace(steady(observe(timeline), DetectorSettings()), layers=None)
    readings = {
        rank: {"sm_clock_mhz": 1800.0 + rank, "clock_event_reasons": 0.0} for rank in range(4)
    }
    readings[2] = {"sm_clock_mhz": clock, "clock_event_reasons": float(reason)}
    findings = judge(replace(seen, counters=readings), DetectorSettings()).findings
    of_node = [one for one in findings if one.owner == Owner.NODE]
    assert [(one.ranks, one.cause) for one in of_node] == (
        [(named, Cause.COMPUTE)] if named else []
    )
    if named is None:
        assert [one.owner for one in findings] == [Owner.UNDECIDED]
