"""The verdict as JSON and as text."""

from __future__ import annotations

import json

import pytest

from detect import DetectorSettings, render_text
from megascan.errors import ConfigError
from megascan.topology import Layout

pytestmark = pytest.mark.power

KEYS = {
    "ranks",
    "cause",
    "owner",
    "slowdown",
    "slowdown_interval",
    "first_iteration",
    "last_iteration",
    "share_of_iterations",
    "q_value",
    "step_time_cost_ratio",
    "coordinates",
    "host",
    "device",
    "evidence",
}


@pytest.fixture
def degraded(job, slow):
    return job(layout=Layout(dp=2, tp=2, pp=2), work=slow(5, 1.31), hosts=4).report()


def test_json_has_the_contracts_keys(degraded):
    record = json.loads(json.dumps(degraded.to_json()))
    assert record["schema"] == 1
    assert record["world_size"] == 8
    assert record["iterations"] == [3, 22]
    assert record["verdict"] == "degraded"
    assert record["alignment"]["residual_p99_ns"] == 2000.0
    assert record["completeness"]["world_size"] == 8
    (finding,) = record["findings"]
    assert set(finding) >= KEYS
    assert finding["ranks"] == [5]
    assert finding["coordinates"] == {"dp": 0, "pp": 1, "tp": 1}
    assert finding["host"] == "n01"


def test_healthy_json(job):
    record = job(layout=Layout(dp=4)).report().to_json()
    assert (record["verdict"], record["findings"]) == ("healthy", [])
    assert record["minimum_detectable_slowdown"] == pytest.approx(1.03, abs=0.01)


def test_first_line_is_the_answer(degraded):
    first = render_text(degraded).splitlines()[0]
    for part in (
        "DEGRADED",
        "rank 5 (DP0 PP1 TP1, host n01, GPU 5)",
        "1.31x slower than its 3 peers",
        "faster",
        "confidence high",
    ):
        assert part in first


def test_text_says_what_to_do_and_what_was_not_seen(degraded):
    text = render_text(degraded)
    assert "nvidia-smi" in text
    assert "megascan view" not in text  # only who has read the file knows its name
    looked_at = degraded.with_look(
        lambda rank, iteration: f"megascan view t --at {rank}:{iteration}"
    )
    assert "look at the spot: megascan view t --at 5:3" in render_text(looked_at)
    assert "look at the spot" not in render_text(degraded.with_look(lambda rank, iteration: None))
    assert "smallest lasting slowdown" in text


def test_healthy_text_says_so_first(job):
    text = render_text(job(layout=Layout(dp=4)).report())
    assert text.startswith("HEALTHY")
    assert "power" in text


def test_too_few_iterations_is_undecided_not_healthy(job):
    report = job(layout=Layout(dp=4), iterations=1).report()
    assert report.verdict == "undecided"
    assert "needs 2 at least" in render_text(report)


def test_noisier_or_shorter_windows_say_that_they_see_less(job):
    def least(**changes):
        return job(layout=Layout(dp=4), **changes).report().minimum_detectable_slowdown

    assert least(noise=0.1, iterations=5) > least(noise=0.1, iterations=20)
    assert least(noise=0.2) > least(noise=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_slowdown": 1.0},
        {"false_discovery_rate": 0.0},
        {"power": 1.5},
        {"min_iterations": 1},
        {"max_findings": 0},
    ],
)
def test_settings_out_of_range_are_one_sentence(wrong):
    with pytest.raises(ConfigError, match="expected"):
        DetectorSettings(**wrong)
