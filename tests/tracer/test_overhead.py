"""The cost of tracing by the run's own iterations: planted costs, none, and too little to tell."""

from __future__ import annotations

import random

import pytest

from megascan.header import Activity, WindowRecord
from megascan.overhead import estimate, measure, measure_job

MS = 1_000_000


def timings(num_cycles, interval=5, window=2, *, traced=1.0, writing=1.0, noise=0.0, drift=0.0):
    """Iterations of 10 ms; the first after each window pays for the writer."""
    rng = random.Random(1)
    for iteration in range(1, num_cycles * interval + 1):
        place = (iteration - 1) % interval
        activity = (
            Activity.TRACED
            if place < window
            else Activity.WRITING
            if place == window
            else Activity.NONE
        )
        factor = {Activity.TRACED: traced, Activity.WRITING: writing}.get(activity, 1.0)
        usual = 10 * MS * (1 + drift * iteration / interval) * (1 + noise * abs(rng.gauss(0, 1)))
        yield iteration, activity, round(usual * factor)


def test_a_planted_cost_is_measured_and_weighed_by_its_share_of_the_run():
    cost = measure(timings(40, traced=1.05, writing=1.02, noise=0.01), 5)
    assert cost.traced.low < 1.05 < cost.traced.high
    assert cost.traced.ratio == pytest.approx(1.05, abs=0.01)
    assert cost.run.ratio == pytest.approx(1 + (2 * 0.05 + 0.02) / 5, abs=0.005)
    assert (cost.num_cycles, cost.num_traced, cost.num_untraced) == (39, 80, 120)


def test_a_run_that_pays_nothing_has_an_interval_around_one():
    cost = measure(timings(60, noise=0.03), 5)
    assert cost.traced.low < 1 < cost.traced.high
    assert cost.run.low < 1 < cost.run.high


def test_drift_of_the_machine_is_no_cost():
    cost = measure(timings(30, drift=0.05), 5)
    assert cost.traced.ratio == pytest.approx(1, abs=0.02)


def test_one_iteration_out_of_line_moves_nothing():
    measured = list(timings(20, traced=1.01))
    measured[30] = (31, Activity.TRACED, 10_000 * MS)
    measured[33] = (34, Activity.NONE, 10_000 * MS)
    assert measure(measured, 5).traced.ratio == pytest.approx(1.01, abs=1e-6)


def test_the_first_cycle_warms_up_and_does_not_count():
    measured = [(i, a, d * (100 if i <= 5 else 1)) for i, a, d in timings(7, traced=1.01)]
    cost = measure(measured, 5)
    assert cost.num_cycles == 6 and cost.traced.high == pytest.approx(1.01)


def test_too_few_cycles_give_no_estimate():
    cost = measure(timings(6), 5)
    assert cost.num_cycles == 5 and cost.traced is None and cost.run is None


def test_a_run_that_traces_every_iteration_has_nothing_to_compare_with():
    cost = measure(timings(50, interval=2, window=2), 2)
    assert (cost.num_cycles, cost.num_untraced) == (0, 0) and cost.traced is None


def test_iterations_beside_the_writer_stand_in_where_there_are_no_others():
    cost = measure(timings(20, interval=2, window=1, traced=1.1, writing=1.0), 2)
    assert cost.traced.ratio == pytest.approx(1.1)
    assert cost.run.ratio == pytest.approx(1.05)


def test_the_interval_is_the_sign_test_s():
    # P(Bin(10, ½) ≤ 1) = 1.07 %, ≤ 2 = 5.5 %: one value goes at each end for 95 %
    assert estimate([float(n) for n in range(1, 11)]).low == 2.0
    assert estimate([float(n) for n in range(1, 11)]).high == 9.0
    assert estimate([1.0] * 5) is None
    assert estimate([1.0, 2, 3, 4, 5, 6]).low == 1.0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    rng = random.Random(7)
    held = 0
    for _ in range(400):
        found = estimate([rng.expovariate(1) for _ in range(30)])
        held += found.low <= 0.6931 <= found.high
    assert held / 400 > 0.93


def records(parts, granularity="full", interval=5, first_window=0):
    """One record a window, each with the timings since the one before it."""
    return tuple(
        WindowRecord(
            run_id="r",
            window=number,
            first_iteration=number * interval + 1,
            last_iteration=number * interval + 2,
            num_spans=1,
            granularity=granularity,
            interval=interval,
            timings=tuple(
                timing
                for timing in parts
                if (number - 1) * interval + 2 < timing[0] <= number * interval + 2
            ),
        )
        for number in range(first_window, first_window + 20)
    )


def test_ranks_of_a_job_are_no_independent_measurements():
    one = list(timings(20, traced=1.03, noise=0.01))
    windows = {rank: records(one) for rank in range(8)}
    job, alone = measure_job(windows), measure_job({0: windows[0]})
    assert job.traced == alone.traced and job.num_cycles == alone.num_cycles
    assert (job.granularity, job.interval) == ("full", 5)


def test_of_many_ranks_some_are_taken():
    parts = records(list(timings(20, traced=1.03)))
    assert measure_job(dict.fromkeys(range(1000), parts)) == measure_job({0: parts})


def test_granularities_are_measured_apart():
    dear = records(list(timings(20, traced=1.2)), "full")[:8]
    cheap = records(list(timings(40, traced=1.01)), "base", first_window=8)
    cost = measure_job({0: dear + cheap})
    assert cost.granularity == "base"
    assert cost.traced.ratio == pytest.approx(1.01, abs=1e-6)


def test_traces_without_timings_tell_nothing():
    assert measure_job({}).traced is None
    assert measure_job({0: records([])}).num_traced == 0
