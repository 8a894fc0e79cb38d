"""When: onset, end, on and off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.compute import SLOW_AT_THE_END
from detect.detector import _inquiry
from detect.observe.extract import observe
from detect.observe.warmup import steady
from detect.stats.noise import Usual, estimate_noise
from detect.stats.stretches import Course, best_stretches, follow, rise_to
from megascan.topology import Layout

USUAL = Usual(floor=0.001, spread=0.003)
NOBODY = np.zeros(8, dtype=bool)


@pytest.mark.parametrize("factor", [1.05, 1.2])
@pytest.mark.parametrize("first", [5, 10, 18])
def test_five_of_twenty_iterations(job, slow, factor, first):
    report = job(layout=Layout(dp=2, tp=2), work=slow(2, factor, first, first + 4)).report()
    assert [finding.ranks for finding in report.findings] == [(2,)]
    finding = report.findings[0]
    assert abs(finding.first_iteration - first) <= 1
    assert abs(finding.last_iteration - (first + 4)) <= 1
    assert finding.slowdown == pytest.approx(factor, rel=0.02)


def test_onset_is_in_the_headline(job, slow):
    report = job(layout=Layout(dp=4), work=slow(0, 1.2, 13)).report()
    assert "since iteration 13" in report.findings[0].headline


def test_on_and_off(job, slow, together):
    effects = together(slow(1, 1.2, 5, 8), slow(1, 1.2, 13, 16))
    report = job(layout=Layout(dp=4), work=effects).report()
    finding = report.findings[0]
    assert finding.episodes == ((5, 8), (13, 16))
    assert "on and off" in finding.headline


def test_a_single_bad_iteration_is_nothing(job, slow):
    report = job(layout=Layout(dp=4), work=slow(1, 3.0, 10, 10)).report()
    assert report.verdict == Verdict.HEALTHY


def test_a_stretch_at_one_speed_is_a_burst_and_one_bad_iteration_is_none(job, slow):
    stretch = job(layout=Layout(dp=4), work=slow(1, 3.0, 10, 11)).report()
    (finding,) = stretch.findings
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.COMPUTE, Owner.NODE)
    assert job(layout=Layout(dp=4), work=slow(1, 3.0, 10, 10)).report().verdict == Verdict.HEALTHY


@pytest.mark.parametrize(
    ("first", "last", "passes", "named"),
    [
        (4, 5, 1.3, [(1,)]),
        (2, 3, 1.3, []),  # and quick again
        (5, 5, 1.3, []),
        (4, 5, 1.06, []),
        (4, 5, None, []),  # some passes only
    ],
)
def test_a_rank_that_is_slow_in_the_last_two_of_few_iterations(job, first, last, passes, named):
    def work(slot):
        if slot.rank != 1 or not first <= slot.iteration - 10 <= last:
            return 1.0
        return passes or (2.0 if slot.microbatch == 0 else 1.0)

    made = job(layout=Layout(dp=4), work=work, iterations=6, first_iteration=10)
    inquiry = _inquiry(steady(observe(made.timeline()), DetectorSettings()), DetectorSettings())
    found = SLOW_AT_THE_END.search(inquiry).findings
    assert [one.ranks for one in found] == named
    assert all((one.owner, one.first_iteration) == (Owner.NODE, 14) for one in found)


def test_warm_up_of_the_run_is_left_out(job):
    def warming(slot):
        return 1.0 + (1.0 + slot.rank) * {1: 1.0, 2: 0.3}.get(slot.iteration, 0.0)

    report = job(layout=Layout(dp=4), work=warming, first_iteration=1).report()
    assert report.verdict == Verdict.HEALTHY
    assert any("warm-up" in note for note in report.notes)


def test_two_state_path_follows_a_clean_step():
    rng = np.random.default_rng(0)
    value = 0.01 * rng.standard_normal((4, 30))
    value[2, 12:20] += 0.2
    noise = estimate_noise(value, np.zeros(4, dtype=bool), USUAL)
    stretches = best_stretches(value, noise, 3, NOBODY[: len(value)])
    course = follow(value[2], stretches[2], noise)
    assert course.episodes == ((12, 19),)
    assert course.effect == pytest.approx(0.2, abs=0.01)
    assert course.share == 1.0


def test_noise_alone_yields_no_small_p_values():
    rng = np.random.default_rng(1)
    least = []
    for _ in range(200):
        value = 0.02 * rng.standard_normal((8, 20))
        noise = estimate_noise(value, np.zeros(8, dtype=bool), USUAL)
        least.append(
            min(one.p_value for one in best_stretches(value, noise, 3, NOBODY[: len(value)])) * 8
        )
    assert np.mean(np.array(least) < 0.01) < 0.03


def test_bursts_that_everybody_has_accuse_nobody():
    """The fourth of four bursts in a row is no fault where every rank bursts every third time."""
    rng = np.random.default_rng(4)
    value = 0.005 * rng.standard_normal((8, 20)) + 0.3 * (rng.random((8, 20)) < 0.3)
    value[2, 8:12] = 0.3
    noise = estimate_noise(value, NOBODY, USUAL)
    assert best_stretches(value, noise, 4, NOBODY)[2].p_value > 0.01
    quiet = 0.005 * rng.standard_normal((8, 20))
    quiet[2, 8:12] = 0.3
    noise = estimate_noise(quiet, NOBODY, USUAL)
    assert best_stretches(quiet, noise, 4, NOBODY)[2].p_value < 1e-4


@pytest.mark.parametrize("num_rising", [1, 3, 8, 12])
def test_a_slowdown_that_grows_begins_where_it_begins_to_grow(job, num_rising):
    """A device that gets hotter: half of what it is slower by in the end is reached later."""

    def hotter(slot):
        share = min(1.0, max(0.0, (slot.iteration - 8) / num_rising))
        return 1.0 + 0.25 * share if slot.rank == 3 else 1.0

    report = job(layout=Layout(dp=8), work=hotter, iterations=24, noise=0.01).report()
    (finding,) = (one for one in report.findings if one.owner is Owner.NODE)
    assert finding.ranks == (3,)
    assert abs(finding.first_iteration - 9) <= 1
    assert finding.onset_in_trace
    if num_rising == 12:
        assert "(rising until 2" in finding.headline


def test_rises_and_steps_are_told_apart():
    noise = np.random.default_rng(3).normal(0.0, 0.002, (200, 20))
    at = np.arange(20)
    step = np.where(at >= 10, 0.1, 0.0) + noise
    slope = np.clip((at - 5) / 10, 0.0, 1.0) * 0.1 + noise
    course = Course.of(at >= 10, 0.1, 0.001)
    told = [rise_to(one, course) for one in step]
    assert sum(one is not None for one in told) <= 8  # of 200, at a hundredth
    found = [rise_to(one, course) for one in slope]
    assert sum(one is not None and abs(one[0] - 6) <= 1 for one in found) >= 190
    assert sum(one is not None and abs(one[1] - 15) <= 1 for one in found) >= 190
    long = np.arange(1500)
    hotter = np.clip((long - 400) / 600, 0.0, 1.0) * 0.1
    hotter += np.random.default_rng(4).normal(0.0, 0.002, 1500)
    start, level = rise_to(hotter, Course.of(long >= 700, 0.1, 0.001))  # not all ways are tried
    assert abs(start - 400) <= 20 and abs(level - 1000) <= 40
    flapping = replace(course, episodes=((2, 4), (8, 9)))
    assert rise_to(slope[0], flapping) is None
    assert rise_to(slope[0], Course.of(at >= 0, 0.1, 0.001)) is None  # never seen below
