"""The writer's thread leaves the interpreter to training."""

from __future__ import annotations

import threading
import time

import pytest

from megascan.tracer import writer as pace
from megascan.tracer.writer import Pace


@pytest.fixture
def rests(monkeypatch):
    taken = []
    monkeypatch.setattr(pace.time, "sleep", taken.append)
    return taken


def work(ns):
    end = time.perf_counter_ns() + ns
    while time.perf_counter_ns() < end:
        pass


def calm():
    return Pace(hurried=lambda: False, pause=pace.time.sleep)


@pytest.mark.parametrize(("iteration_s", "rest_s"), [(0.001, 0.02), (0.5, 0.3), (60.0, 1.0)])
def test_it_starts_when_most_of_an_iteration_is_launched(rests, iteration_s, rest_s):
    calm().begin(iteration_s)
    assert rests == [pytest.approx(rest_s)]


def test_it_rests_between_slices(rests):
    steady = calm()
    steady.begin(0.0)
    for _ in range(10):
        work(2 * pace.SLICE_NS)
        steady.step()
    assert rests == [pace.LEAST_FIRST_REST_S, *[pace.REST_S] * 10]


def test_short_steps_do_not_rest_each_time(rests):
    steady = calm()
    steady.begin(0.0)
    began_ns = time.perf_counter_ns()
    num_steps = 0
    while time.perf_counter_ns() - began_ns < 20 * pace.SLICE_NS:
        steady.step()
        num_steps += 1
    assert 1 <= len(rests) - 1 <= 21 < num_steps


def test_in_a_hurry_it_never_rests(rests):
    hasty = Pace(hurried=lambda: True, pause=pace.time.sleep)
    hasty.begin(60.0)
    for _ in range(5):
        work(2 * pace.SLICE_NS)
        hasty.step()
    assert rests == []


@pytest.mark.flaky(reruns=4)  # which thread gets a core, and when, is the system's to say
def test_a_thread_that_asks_often_is_let_in_at_once():
    """Without rests every request waits for the interpreter's 5 ms."""

    def asking_ms(steady):
        stop = threading.Event()

        def writer():
            steady.begin(0.0)
            while not stop.is_set():
                work(5_000)
                steady.step()

        thread = threading.Thread(target=writer)
        thread.start()
        time.sleep(2 * pace.LEAST_FIRST_REST_S)
        begin = time.perf_counter()
        for _ in range(50):
            time.sleep(0)  # gives the interpreter away and asks for it again
        lasted_ms = (time.perf_counter() - begin) * 1e3
        stop.set()
        thread.join()
        return lasted_ms

    hasty = Pace(hurried=lambda: True, pause=time.sleep)
    alone = min(asking_ms(calm()) for _ in range(3))
    assert alone < 0.5 * min(asking_ms(hasty) for _ in range(3))


def test_more_to_write_and_the_end_cut_the_first_rest_short(
    make_tracer, read_rank_file, monkeypatch
):
    monkeypatch.setattr(pace, "LEAST_FIRST_REST_S", 30.0)
    monkeypatch.setattr(pace, "LONGEST_FIRST_REST_S", 30.0)
    tracer, path = make_tracer(interval=1, window=1)
    begin = time.monotonic()
    for iteration in (1, 2, 3):
        with tracer.iteration(iteration):
            pass
    tracer.close()
    assert time.monotonic() - begin < 10.0
    assert len(read_rank_file(path).windows) == 3
