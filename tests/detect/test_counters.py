"""Device readings beside the peers': reasons are a mask, temperatures differ by their slot."""

from __future__ import annotations

import pytest

from megascan.topology import Layout

NORMAL = {"sm_clock_mhz": 1980.0, "clock_event_reasons": 4.0, "temperature_c": 38.0}


@pytest.mark.parametrize(
    ("reading", "sentence"),
    [
        ({"clock_event_reasons": 0.0}, "equal its peers'"),
        ({"clock_event_reasons": 1.0}, "equal its peers'"),
        ({"temperature_c": 49.0}, "equal its peers'"),
        ({"temperature_c": 80.0}, "temperature_c is 80 against its peers' 38"),
        ({"clock_event_reasons": 72.0}, "hardware slowdown and hardware thermal slowdown"),
        ({"sm_clock_mhz": 1200.0}, "sm_clock_mhz is 1200 against its peers' 1980"),
    ],
)
def test_only_telling_readings_are_evidence(job, slow, reading, sentence):
    counters = {rank: dict(NORMAL) for rank in range(4)}
    counters[1] |= reading
    report = job(layout=Layout(dp=4), work=slow(1, 1.5), counters=counters, iterations=8).report()
    assert sentence in " ".join(report.findings[0].evidence)
