from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascan.arrays import (
    Cover,
    TimeAxis,
    group_lengths,
    group_numbers,
    group_starts,
    per_group,
    united,
)

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)
window = st.tuples(st.integers(-5, 95), st.integers(0, 50))


def cover_of(pairs, amounts=None):
    ordered = sorted((start, start + length) for start, length in pairs)
    start, end = np.array(ordered, dtype=np.int64).reshape(-1, 2).T
    return Cover.of(start, end, amounts), ordered


@settings(deadline=None)
@given(intervals, window)
def test_length_within_a_window_counts_each_nanosecond_once(pairs, place):
    cover, ordered = cover_of(pairs)
    begin, end = place[0], place[0] + place[1]
    covered = {at for low, high in ordered for at in range(low, high)}
    expected = len(covered & set(range(begin, end)))
    assert cover.length_within(np.array([begin]), np.array([end])).tolist() == [expected]


@settings(deadline=None)
@given(intervals)
def test_an_amount_is_counted_for_what_an_interval_adds(pairs):
    """With an amount equal to its length, each interval's share is the length it adds."""
    ordered = sorted((start, start + length) for start, length in pairs)
    lengths = np.array([high - low for low, high in ordered], dtype=np.float64)
    cover, _ = cover_of(pairs, lengths)
    begin, end = np.array([10]), np.array([40])
    amount, length = cover.amount_within(begin, end), cover.length_within(begin, end)
    np.testing.assert_allclose(amount, length, atol=1e-9)


def test_a_nested_intervals_amount_is_inside_its_bracket():
    cover, _ = cover_of([(0, 100), (20, 10)], np.array([50.0, 10.0]))
    assert cover.amount_within(np.array([0, 0]), np.array([100, 50])).tolist() == [50.0, 25.0]


def test_ranks_do_not_overlap_on_the_axis():
    rank = np.array([2, 2, 5])
    start, end = np.array([10**18, 10**18 + 50, 7]), np.array([10**18 + 100, 10**18 + 60, 9])
    axis = TimeAxis.of(rank, start, end)
    low, high = axis.place(rank, start), axis.place(rank, end)
    assert (high - low).tolist() == (end - start).tolist()
    assert low[2] > high[:2].max()


@settings(deadline=None)
@given(intervals)
def test_a_union_covers_what_any_interval_covers_in_parts_that_do_not_touch(pairs):
    start, end = np.array([(at, at + length) for at, length in pairs], int).reshape(-1, 2).T
    low, high = united(start, end)
    covered = {at for begin, length in pairs for at in range(begin, begin + length)}
    found = [at for begin, stop in zip(low, high, strict=True) for at in range(begin, stop)]
    assert found == sorted(covered)
    assert (low[1:] > high[:-1]).all()


def test_runs_of_one_column_and_of_two():
    key, other = np.array([4, 4, 4, 7, 7, 9]), np.array([1, 1, 2, 2, 2, 2])
    starts = group_starts(key)
    assert starts.tolist() == [0, 3, 5]
    assert group_starts(key, other).tolist() == [0, 2, 3, 5]
    assert group_lengths(starts, 6).tolist() == [3, 2, 1]
    assert group_numbers(starts, 6).tolist() == [0, 0, 0, 1, 1, 2]
    assert per_group(np.add, key, starts).tolist() == [12, 14, 9]


def test_no_rows_have_no_runs():
    none = np.empty(0, dtype=np.int64)
    assert group_starts(none, none).tolist() == []
    assert group_lengths(group_starts(none), 0).tolist() == []
    assert per_group(np.maximum, none, none).tolist() == []
