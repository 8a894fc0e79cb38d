from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregate.intervals import Cover, TimeAxis

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
