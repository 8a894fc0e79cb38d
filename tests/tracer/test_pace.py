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


def test_it_starts_late_and_rests_between_slices(rests):
    steady = Pace(hurried=lambda: False)
    steady.begin()
    for _ in range(10):
        work(2 * pace.SLICE_NS)
        steady.step()
    assert rests == [pace.FIRST_REST_S, *[pace.REST_S] * 10]


def test_short_steps_do_not_rest_each_time(rests):
    steady = Pace(hurried=lambda: False)
    steady.begin()
    began_ns = time.perf_counter_ns()
    num_steps = 0
    while time.perf_counter_ns() - began_ns < 20 * pace.SLICE_NS:
        steady.step()
        num_steps += 1
    assert 1 <= len(rests) - 1 <= 21 < num_steps


def test_in_a_hurry_it_never_rests(rests):
    hasty = Pace(hurried=lambda: True)
    hasty.begin()
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
            steady.begin()
            while not stop.is_set():
                work(5_000)
                steady.step()

        thread = threading.Thread(target=writer)
        thread.start()
        time.sleep(2 * pace.FIRST_REST_S)
        begin = time.perf_counter()
        for _ in range(50):
            time.sleep(0)  # gives the interpreter away and asks for it again
        lasted_ms = (time.perf_counter() - begin) * 1e3
        stop.set()
        thread.join()
        return lasted_ms

    alone = min(asking_ms(Pace(hurried=lambda: False)) for _ in range(3))
    assert alone < 0.5 * min(asking_ms(Pace(hurried=lambda: True)) for _ in range(3))
