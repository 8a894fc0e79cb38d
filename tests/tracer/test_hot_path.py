"""The benchmark of traced calls measures every kind and compares with another checkout."""

from __future__ import annotations

import pytest

from benchmarks import hot_path


def test_every_kind_of_call_is_measured(monkeypatch):
    monkeypatch.setattr(hot_path, "NUM_CALLS", 60)
    monkeypatch.setattr(hot_path, "NUM_REPEATS", 3)
    costs = hot_path.measure()
    assert len(costs) == 20
    assert any(name.startswith("behind an exchange") for name in costs)
    assert all(100 < cost_ns < 1_000_000 for cost_ns in costs.values())
    backward = costs["forward and backward of a module, CPU"]
    assert backward > costs["forward of a module, CPU"]


def test_a_comparison_shows_both_and_their_ratio():
    page = hot_path.render([{"collective": 4000.0}, {"collective": 3000.0}], "a command")
    assert "| call | before, µs | after, µs | ratio |" in page
    assert "| collective | 4.00 | 3.00 | 0.75 |" in page


def test_a_folder_that_is_no_checkout_is_said(tmp_path):
    with pytest.raises(SystemExit, match="is no checkout"):
        hot_path.least([tmp_path], 1)


def test_the_same_calls_are_measured_with_cold_caches(monkeypatch):
    monkeypatch.setattr(hot_path, "NUM_COLD_CALLS", 16)
    costs = hot_path.measure(1 << 20)
    assert len(costs) == 20 and costs["forward and backward of a module, GPU"] > 0
    assert "Caches cold" in hot_path.render([costs], "a command", cold=True)


def test_what_overwriting_the_caches_takes_is_not_counted(monkeypatch, clock):
    monkeypatch.setattr(hot_path, "NUM_COLD_CALLS", 5)
    now = [0]
    monkeypatch.setattr(hot_path.time, "thread_time_ns", lambda: now[0])
    caches = hot_path._Caches(8)
    monkeypatch.setattr(caches, "_memory", Slow(now))
    bench = hot_path._Bench(hot_path.CpuTimer(clock), caches)

    def call():
        caches.evict()
        now[0] += 70 if bench.tracer.active else 20

    assert bench.cost_ns(call) == 50


class Slow:
    """Memory that takes a second to write."""

    def __init__(self, now):
        self.now = now

    def __iadd__(self, other):
        self.now[0] += 10**9
        return self
