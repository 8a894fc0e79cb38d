from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregate import build_timeline
from aggregate.clocks import ClockLines
from aggregate.summary import summarise
from megascan.arrays import rank_blocks
from megascan.errors import InputError
from megascan.timeline import TIMELINE_SCHEMA, TRACE_SCHEMA, numbers
from megascan.topology import Layout


def small_job(build, seed=0):
    layout = Layout(tp=2, dp=2)
    random = np.random.default_rng(seed)
    offset = random.uniform(-1e8, 1e8, 4)
    drift = random.uniform(-5e-5, 5e-5, 4)
    return build.skewed_job(layout, 50, offset_ns=offset, drift=drift, jitter_ns=2e4, seed=seed)[0]


def test_a_timeline_has_its_schema_order_and_origin(build):
    timeline = build_timeline(small_job(build))
    assert timeline.spans.schema.equals(TIMELINE_SCHEMA)
    rank, start = numbers(timeline.spans, "rank"), numbers(timeline.spans, "start_ns")
    key = list(zip(rank, start, -numbers(timeline.spans, "duration_ns"), strict=True))
    assert key == sorted(key)
    assert timeline.origin_ns == start.min()
    assert sorted(timeline.clocks) == [0, 1, 2, 3]


def test_a_clock_fit_maps_recorded_starts_to_the_timeline(build):
    trace = small_job(build)
    timeline = build_timeline(trace)
    for rank, fit in timeline.clocks.items():
        recorded = numbers(trace.spans, "start_ns")[numbers(trace.spans, "rank") == rank]
        age = recorded - timeline.origin_ns
        shift = fit.offset_ns + fit.drift_ppm * 1e-6 * age
        common = numbers(timeline.spans, "start_ns")[numbers(timeline.spans, "rank") == rank]
        assert np.abs(recorded + np.rint(shift).astype(np.int64) - common).max() <= 1


def test_nothing_recorded_is_lost_or_changed(build):
    trace = small_job(build)
    timeline = build_timeline(trace)
    kept = [name for name in TRACE_SCHEMA.names if name not in ("start_ns", "duration_ns")]
    assert timeline.spans.select(kept).equals(trace.spans.select(kept))


def test_the_same_trace_gives_the_same_timeline_whatever_its_row_order(build):
    trace = small_job(build)
    shuffled = np.random.default_rng(1).permutation(trace.spans.num_rows)
    other = build.trace(
        trace.spans.take(pa.array(shuffled)),
        {name: ranks for h in trace.headers.values() for name, ranks in h.groups.items()},
        trace.layout,
        device="cuda",
    )
    first, second = build_timeline(trace), build_timeline(other)
    assert first.spans.equals(second.spans)
    assert first.clocks == second.clocks


@given(
    times=st.lists(st.integers(0, 10**15), min_size=2, max_size=30),
    offset=st.floats(-1e9, 1e9),
    drift=st.floats(-2e-4, 2e-4),
)
@settings(max_examples=200, deadline=None)
def test_correcting_a_clock_keeps_nesting(times, offset, drift):
    """A monotone map of starts and ends: what lies within stays within."""
    one = np.zeros(1)
    centre_ns = one.astype(np.int64) + 1_750_000_000_000_000_000
    lines = ClockLines(one + offset, one + drift, centre_ns)
    ordered = np.sort(np.array(times, dtype=np.int64)) + 1_750_000_000_000_000_000
    near = np.sort(np.r_[ordered, ordered + 1])
    common = lines.common(np.zeros(len(near), dtype=np.int64), near)
    assert (np.diff(common) >= 0).all()


def test_counts_and_notes_reach_the_completeness(build):
    rows = [
        build.collective(0, "tp@0", 0, 10),
        build.collective(0, "tp@0", 20, 30, sequence=1),
        build.collective(0, "tp@0", 40, 50, sequence=1),
        build.collective(1, "tp@0", 0, 10),
        build.send(0, 1, 60, 70),
    ]
    there = build_timeline(build.trace(rows, {"tp@0": (0, 1)})).completeness
    assert there.num_unmatched == {"collective": 1, "p2p": 1}
    assert there.num_duplicates == 1
    assert any("most on rank 0" in note for note in there.notes)


def test_a_trace_without_spans_is_an_error(build):
    with pytest.raises(InputError, match="has no spans"):
        build_timeline(build.trace(TRACE_SCHEMA.empty_table()))


def test_a_negative_duration_is_an_error(build):
    with pytest.raises(InputError, match="lasts -5 ns"):
        build_timeline(build.trace([build.span(0, "compute", "forward", 10, 5)]))


def test_a_span_of_an_unknown_rank_is_an_error(build):
    with pytest.raises(InputError, match="rank 7, which has no header"):
        build_timeline(build.trace([build.span(7, "compute", "forward", 0, 5)]))


def test_working_on_some_ranks_at_a_time_changes_nothing(build, monkeypatch):
    trace = small_job(build)
    whole = build_timeline(trace)
    monkeypatch.setattr("aggregate.merge.BLOCK_ROWS", 60)
    parts = build_timeline(trace)
    assert len(rank_blocks(numbers(parts.spans, "rank"), 60)) == 3
    assert parts.spans.equals(whole.spans)
    shares = summarise(parts).iterations
    monkeypatch.undo()
    assert shares.equals(summarise(whole).iterations)


def test_blocks_hold_whole_ranks():
    rank = np.repeat([0, 3, 4], [5, 2, 9])
    assert rank_blocks(rank, 100) == [slice(0, 16)]
    assert rank_blocks(rank, 6) == [slice(0, 7), slice(7, 16)]
    assert rank_blocks(rank[:0], 100) == []
