"""Traces in which no passes are marked: what a slow rank costs, and by how much it is slower."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.__main__ import ground_named
from detect import Report, detect
from detect.observe.extract import observe
from detect.report import Cause
from detect.text import NOT_SHOWN, render_text
from megascan.reader import read_trace

DRAW = 228


@cache
def judged(ground: str, name: str) -> tuple[Report, float, tuple[int, ...]]:
    """Return the report on a case, its first fault's true cost, and the ranks of that."""
    case = next(one for one in ground_named(ground).cases(DRAW) if one.name == name)
    with TemporaryDirectory() as folder:
        fault = ground_named(ground).write(case, Path(folder))[0]
        report = detect(build_timeline(read_trace(Path(folder))))
    return report, fault.held_cost_ratio, fault.ranks


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("clock-1.3-dp8-june-full-2280004", "transformer layers are compared"),
        ("clock-2.0-tp8dp4-june-full-2280020", "transformer layers are compared"),
        ("clock-3.0-tp8-head-full-2280007", "transformer layers are compared"),
        ("clock-2.0-from-11-tp2dp4-july-full-2280027", "transformer layers are compared"),
        ("clock-1.5-tp2dp4-june-base-2280005", "what lies between communications is compared"),
        ("clock-1.3-from-9-dp2-june-base-2280025", "what lies between communications is compared"),
    ],
)
def test_a_slow_gpu_costs_what_its_backward_passes_take_longer_too(name, what):
    report, true, ranks = judged("original", name)
    costs = {one.ranks: one.step_time_cost_ratio for one in report.findings if one.ranks == ranks}
    assert any(what in note for note in report.notes)
    # between 0.65 and 1.15 of it: layers are not all, and a backward pass takes twice as long
    assert 0.65 < np.log(costs[ranks]) / np.log(true) < 1.15, (costs, true)


def test_layers_that_are_named_by_number_are_no_kernels():
    report, _, ranks = judged("original", "clock-2.0-tp8dp4-june-full-2280020")
    assert [(one.cause, one.ranks) for one in report.findings] == [(Cause.COMPUTE, ranks)]
    assert not any("profile" in note for note in report.notes)


def test_replicas_of_unmarked_passes_that_are_the_longest_by_turns_are_the_jobs():
    report, _, _ = judged("original", "sequences-tp2dp4-head-full-2280267")
    assert [one.cause for one in report.findings] == [Cause.SEQUENCE_IMBALANCE]


def test_a_cost_that_nobody_knows_is_not_called_nothing():
    report, true, _ = judged("original", "clock-1.1-pp8dp8-head-full-2280023")
    text = " ".join(render_text(report).split())
    assert true < 1.005
    assert text.count(NOT_SHOWN) == 2  # the headline and the cost
    assert "next to nothing" not in text


class TestProfiles:
    @pytest.mark.parametrize(
        ("name", "least"),
        [("gpu-clock-ddp8-s22801008", 1.817), ("gpu-clock-tp4dp4x2-s22801018", 1.755)],
    )
    def test_the_interval_holds_all_kernels_as_well_as_the_typical_ones(self, name, least):
        report, _, ranks = judged("profiles", name)
        (finding,) = report.findings
        low, high = finding.slowdown_interval
        assert finding.ranks == ranks
        assert low <= least < finding.slowdown <= 2.0 <= high

    def test_a_step_gets_no_shorter_than_what_others_wait(self):
        report, true, _ = judged("profiles", "gpu-clock-ddp16x2-s22801017")
        (finding,) = report.findings
        assert finding.step_time_cost_ratio == pytest.approx(true, abs=0.02)
        assert finding.slowdown > 1.25  # by its work alone the step would be 14 % shorter

    def test_a_replay_without_kernels_says_nothing_of_them(self):
        report, true, _ = judged("profiles", "gpu-clock-no-steps-marked-fsdp8-s22802001")
        (finding,) = report.findings
        assert not finding.cost_is_replayed
        assert finding.step_time_cost_ratio == pytest.approx(true, abs=0.05)

    def test_hosts_launch_for_a_part_of_the_iteration(self):
        """Loading, and steps that no launching takes as long as, are none of it."""
        ground, name = ground_named("profiles"), "host-cpu-fsdp4-s22806007"
        case = next(one for one in ground.cases(DRAW) if one.name == name)
        with TemporaryDirectory() as folder:
            ground.write(case, Path(folder))
            seen = observe(build_timeline(read_trace(Path(folder))))
        assert seen.launching_ns.shape == seen.busy_ns.shape
        share = seen.launching_ns / seen.iteration_ns
        assert (share > 0.2).all() and (share < 1.0).all()

    @pytest.mark.parametrize(
        ("name", "ranks"),
        [("host-cpu-ddp8x2-s22806008", (0, 1, 2, 3)), ("host-bound-ddp4-s22812004", ())],
    )
    def test_launches_of_kernels_tell_how_quick_hosts_are(self, name, ranks):
        """A host that is 1.7 times slower, and hosts that all can hardly keep up."""
        ground = ground_named("profiles")
        case = next(one for one in ground.cases(DRAW) if one.name == name)
        with TemporaryDirectory() as folder:
            ground.write(case, Path(folder))
            seen = observe(build_timeline(read_trace(Path(folder))))
        pace = np.median(seen.launch_pace, axis=1)
        slow = np.isin(np.arange(len(pace)), ranks)
        assert np.ptp(pace[~slow]) < np.log(1.15)
        assert not ranks or np.log(1.4) < pace[slow].min() - pace[~slow].max() < np.log(1.9)
