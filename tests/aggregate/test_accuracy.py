"""Error bars: as good as the classes that tie two clocks, and no better."""

from __future__ import annotations

import numpy as np
import pytest

from aggregate import build_timeline, render_text, summarise
from aggregate.clocks import align_clocks
from aggregate.match import match_spans
from megascan.topology import Layout

US, MS = 1_000, 1_000_000
LAYOUT = Layout(tp=2, dp=2)
GROUPS = {"tp@0": (0, 1), "tp@2": (2, 3), "dp@0": (0, 2), "dp@1": (1, 3)}


def error_between(fit, one, other):
    """Error bars, ns, of comparing times between ranks."""
    return fit.accuracy.between(fit.domain[one], fit.domain[other])


def aligned(trace):
    return align_clocks(trace.spans, match_spans(trace.spans, trace.headers), trace.headers)


def between(fit, one, other):
    return float(error_between(fit, np.array([one]), np.array([other]))[0])


def collectives(build, axis, count, jitter_ns, seed=0, **columns):
    """`count` collectives of every group of an axis, 4 ms long, whose ends scatter."""
    random, rows = np.random.default_rng(seed), []
    for name, members in GROUPS.items():
        if not name.startswith(axis):
            continue
        for n in range(count):
            for rank in members:
                end = 10 * MS * n + 5 * MS + random.normal(0, jitter_ns)
                rows.append(
                    build.collective(rank, name, 10 * MS * n + MS, round(end), sequence=n,
                                     **columns)
                )  # fmt: skip
    return rows


def test_thousands_of_exact_ends_inside_a_node_do_not_hide_poor_ones_between(build):
    rows = collectives(build, "tp", 600, 300) + collectives(build, "dp", 30, 60 * US, seed=1)
    fit = aligned(build.trace(rows, GROUPS, LAYOUT))
    assert between(fit, 0, 1) < 2 * US
    assert between(fit, 2, 3) < 2 * US
    assert 60 * US < between(fit, 0, 2) < 400 * US
    assert between(fit, 1, 2) == between(fit, 0, 2)


def test_a_class_that_nobody_needs_says_nothing(build):
    noisy = {"op": "all_gather", "size_bytes": 4}
    rows = collectives(build, "tp", 60, US) + collectives(build, "dp", 60, US)
    alone = aligned(build.trace(rows, GROUPS, LAYOUT))
    rows += collectives(build, "dp", 60, 80 * US, seed=3, **noisy)
    fit = aligned(build.trace(rows, GROUPS, LAYOUT))
    assert between(fit, 0, 3) < 10 * US
    assert fit.residual_p99_ns == pytest.approx(alone.residual_p99_ns, rel=0.5)
    assert fit.lines.offset_ns == pytest.approx(alone.lines.offset_ns, abs=US)


def test_one_collective_alone_is_known_no_better_than_it_is_long(build):
    rows = [build.collective(rank, "dp@0", 0, 4 * MS) for rank in (0, 1)]
    fit = aligned(build.trace(rows, {"dp@0": (0, 1)}))
    assert between(fit, 0, 1) >= 4 * MS
    assert fit.residual_p99_ns.tolist() == [0, 0]


def test_the_error_bar_is_that_of_every_later_stage(build):
    """No wait within the bar is claimed, and one beyond it is."""
    rows = collectives(build, "tp", 60, US) + collectives(build, "dp", 60, 30 * US, seed=2)
    probe = {"op": "all_gather", "sequence": 0}
    rows += [
        build.collective(rank, name, 700 * MS + late, 702 * MS, **probe)
        for rank, name, late in (
            (0, "tp@0", 0), (1, "tp@0", 40 * US), (0, "dp@0", 5 * MS), (2, "dp@0", 5 * MS),
            (1, "dp@1", 5 * MS), (3, "dp@1", 5 * MS + 40 * US),
        )
        if name.startswith("tp")
    ]  # fmt: skip
    rows += [
        build.collective(rank, "dp@1", 710 * MS + late, 712 * MS, **probe)
        for rank, late in ((1, 0), (3, 40 * US))
    ]
    timeline = build_timeline(build.trace(rows, GROUPS, LAYOUT))
    frame = timeline.spans.to_pandas()
    waits = frame[frame.op == "all_gather"].set_index(["group", "rank"]).wait_ns
    assert 35 * US < waits["tp@0", 0] < 45 * US
    assert waits["dp@1", 1] == 0
    assert timeline.clocks[3].error_ns > 40 * US


def test_the_summary_says_what_was_fitted_and_how_sure_it_is(build):
    rows = collectives(build, "tp", 200, US) + collectives(build, "dp", 200, US)
    timeline = build_timeline(build.trace(rows, GROUPS, LAYOUT))
    text = render_text(summarise(timeline))
    assert "offset and drift for all domains" in text
    assert "the rest" not in text
    assert "error" in text
    record = summarise(timeline).to_json()["alignment"]["clocks"]
    assert all(0 < clock["error_ns"] < 20 * US for clock in record)


def test_a_short_window_says_offsets_alone(build):
    rows = collectives(build, "tp", 4, 20 * US) + collectives(build, "dp", 4, 20 * US)
    fit = aligned(build.trace(rows, GROUPS, LAYOUT))
    assert "offsets alone for all domains" in fit.method


def test_what_stands_alone_is_listed_by_kind_and_rank(build):
    rows = [
        build.collective(0, "tp@0", 0, 10),
        build.collective(0, "tp@0", 20, 30, sequence=1),
        build.collective(0, "tp@0", 40, 50, sequence=1),
        build.collective(1, "tp@0", 0, 10),
        build.send(0, 1, 60, 70),
        build.send(1, 0, 60, 70, direction="backward"),
    ]
    record = summarise(build_timeline(build.trace(rows, {"tp@0": (0, 1)}))).to_json()
    assert record["unmatched"] == [
        {"kind": "collective", "rank": 0, "num_spans": 2},
        {"kind": "p2p", "rank": 0, "num_spans": 1},
        {"kind": "p2p", "rank": 1, "num_spans": 1},
    ]
