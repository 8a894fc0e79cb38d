"""Slices of one lane nest, whatever the spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascan.export.tracks import assign_lanes

SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=60
)


def ordered(spans: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Group, start and end of (group, start, duration) in the order that is asked for."""
    rows = sorted(spans, key=lambda row: (row[0], row[1], -row[2]))
    group, start, duration = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return [group, start, start + duration]


def crosses(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] < one[1] < other[1] or other[0] < one[0] < other[1] < one[1]


def overlaps(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def pairs_of_one_lane(group, start, end, lanes):
    rows = list(zip(zip(group, lanes, strict=True), zip(start, end, strict=True), strict=True))
    for place, (lane, extent) in enumerate(rows):
        for other_lane, other in rows[place + 1 :]:
            if lane == other_lane:
                yield extent, other


@given(SPANS)
def test_slices_of_a_lane_always_nest(spans):
    group, start, end = ordered(spans)
    lanes = assign_lanes(group, start, end)
    assert not any(crosses(*pair) for pair in pairs_of_one_lane(group, start, end, lanes))


@given(SPANS)
def test_lanes_that_flows_bind_to_are_disjoint(spans):
    group, start, end = ordered(spans)
    lanes = assign_lanes(group, start, end, disjoint=np.ones(len(group), dtype=bool))
    assert not any(overlaps(*pair) for pair in pairs_of_one_lane(group, start, end, lanes))


@given(SPANS)
def test_no_more_lanes_than_open_spans_and_one(spans):
    group, start, end = ordered(spans)
    lanes = assign_lanes(group, start, end)
    open_at = max(
        sum(s <= moment < e and g == here for g, s, e in zip(group, start, end, strict=True))
        for here, moment in zip(group, start, strict=True)
    )
    assert lanes.max() <= max(open_at, 1)


@given(SPANS)
def test_a_group_that_nests_keeps_one_lane(spans):
    group, start, end = ordered(spans)
    one = np.zeros(len(group), dtype=np.int64)
    lanes = assign_lanes(group, start, end)
    for number in set(group.tolist()):
        rows = group == number
        if not any(
            crosses(*pair)
            for pair in pairs_of_one_lane(group[rows], start[rows], end[rows], one[rows])
        ):
            assert not lanes[rows].any()


def test_only_what_outlives_an_earlier_span_moves():
    group, start, end = ordered([(0, 0, 10), (0, 2, 2), (0, 3, 3), (0, 20, 5)])
    assert assign_lanes(group, start, end).tolist() == [0, 0, 1, 0]


def test_a_chain_of_crossings_takes_lanes_in_turn():
    group, start, end = ordered([(0, begin, 15) for begin in range(0, 100, 10)])
    lanes = assign_lanes(group, start, end)
    assert not any(crosses(*pair) for pair in pairs_of_one_lane(group, start, end, lanes))
    assert lanes.max() == 1


def test_no_spans_have_no_lanes():
    nothing = np.empty(0, dtype=np.int64)
    assert len(assign_lanes(nothing, nothing, nothing)) == 0


@pytest.mark.parametrize("base", [0, 10**15, 4 * 10**18])
def test_large_times_do_not_matter(base):
    group, start, end = ordered([(number, 0, 10) for number in range(3)] + [(1, 5, 10)])
    assert assign_lanes(group, start + base, end + base).tolist() == [0, 0, 1, 0]
