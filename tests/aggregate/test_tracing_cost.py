"""The summary says what tracing cost, with its interval, or why that is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aggregate import build_timeline, render_text, summarise
from megascan.header import Activity, WindowRecord

MS = 1_000_000


@pytest.fixture
def summary_of(build):
    """Summary of a run of two ranks whose windows hold these timings."""

    def summary(records):
        rows = [build.span(rank, "iteration", "iteration", 0, 100) for rank in (0, 1)]
        timeline = build_timeline(build.trace(rows, {"tp@0": (0, 1)}))
        return summarise(replace(timeline, windows=dict.fromkeys((0, 1), records)))

    return summary


def records(num_windows, *, untraced=True, cost=1.02):
    """A window of one iteration every four."""
    return tuple(
        WindowRecord(
            run_id="r",
            window=number,
            first_iteration=4 * number + 1,
            last_iteration=4 * number + 1,
            num_spans=1,
            granularity="full",
            interval=4,
            timings=tuple(
                (i, Activity.NONE if i % 4 != 1 else Activity.TRACED, ms)
                for i in range(max(1, 4 * number - 2), 4 * number + 2)
                for ms in [round(10 * MS * (cost if i % 4 == 1 else 1))]
                if untraced or i % 4 == 1
            ),
        )
        for number in range(num_windows)
    )


def test_the_cost_stands_in_the_summary_with_its_interval(summary_of):
    summary = summary_of(records(20))
    text = " ".join(render_text(summary).split())
    assert "a traced iteration takes 1.0200 times (1.0200 … 1.0200) an untraced one" in text
    assert "the whole run 1.0050 times (1.0050 … 1.0050)" in text
    assert "18 windows at full, one every 4 iterations" in text
    cost = summary.to_json()["tracing"]
    assert cost["traced"]["ratio"] == pytest.approx(1.02) and cost["num_cycles"] == 18


def test_too_few_windows_are_said(summary_of):
    text = " ".join(render_text(summary_of(records(5))).split())
    assert "its cost is not known: 3 windows can be compared" in text
    assert "6 are needed" in text


def test_a_run_without_untraced_iterations_is_said(summary_of):
    text = render_text(summary_of(records(20, untraced=False)))
    assert "its cost is not known, every iteration was traced" in text
    assert "--trace-interval" in text


def test_traces_that_tell_no_timings_have_no_such_line(summary_of):
    assert "tracing:" not in render_text(summary_of(()))
