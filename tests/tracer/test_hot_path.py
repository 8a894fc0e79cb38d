"""The benchmark of traced calls measures every kind and compares with another checkout."""

from __future__ import annotations

import pytest

from benchmarks import hot_path


def test_every_kind_of_call_is_measured(monkeypatch):
    monkeypatch.setattr(hot_path, "NUM_CALLS", 60)
    monkeypatch.setattr(hot_path, "NUM_REPEATS", 3)
    costs = hot_path.measure()
    assert len(costs) == 11
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
