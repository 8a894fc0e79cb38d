from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megascan.arrays import by_name, combine, group_lengths, group_starts

integers = st.integers(min_value=-(2**62), max_value=2**62)


@settings(deadline=None)
@given(st.lists(st.tuples(integers, integers, st.integers(0, 3)), min_size=1, max_size=40))
def test_a_combined_key_orders_and_separates_rows_as_their_columns_do(rows):
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    key = combine(*columns)
    for one, first in enumerate(rows):
        for other, second in enumerate(rows):
            assert (key[one] < key[other]) == (first < second)


def test_an_empty_key():
    empty = np.zeros(0, dtype=np.int64)
    assert len(combine(empty, empty)) == len(group_starts(empty)) == 0


def test_groups_of_a_sorted_key():
    key = np.array([3, 3, 5, 9, 9, 9])
    starts = group_starts(key)
    assert starts.tolist() == [0, 2, 3]
    assert group_lengths(starts, 6).tolist() == [2, 1, 3]


def test_codes_by_name_follow_the_alphabet():
    assert by_name(np.array([0, 1, 2, 0]), ["tp@0", "dp@0", "pp@0"]).tolist() == [2, 0, 1, 2]
