from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from megascan.arrays import by_name, combine, group_lengths, group_starts, linked_sets, order_within

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


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e9, 1e9)), max_size=40), st.booleans())
@settings(max_examples=50)
def test_an_order_within_keys_is_that_of_a_sort_by_both_columns(rows, many_keys):
    key = np.array([key for key, _ in rows], dtype=np.int64) * (2**20 if many_keys else 1)
    value = np.array([value for _, value in rows], dtype=np.float64)
    order, expected = order_within(key, value), np.lexsort((value, key))
    assert sorted(order.tolist()) == list(range(len(rows)))
    assert (key[order] == key[expected]).all() and (value[order] == value[expected]).all()


@pytest.mark.parametrize("num_links", [0, 5, 40, 100, 400])
def test_linked_sets_are_those_of_a_library_by_their_smallest_members(num_links):
    random = np.random.default_rng(num_links)
    one, other = random.integers(0, 100, (2, num_links))
    graph = coo_array((np.ones(num_links), (one, other)), (100, 100))
    expected = connected_components(graph, directed=False)[1]
    assert linked_sets(one, other, 100).tolist() == expected.tolist()


def test_a_long_chain_is_one_set():
    order = np.random.default_rng(0).permutation(5_000)
    assert not linked_sets(order[:-1], order[1:], 5_000).any()


def test_what_only_the_fit_needs_is_loaded_when_it_is_asked_for():
    code = (
        "import sys, aggregate; before = 'scipy' in sys.modules; aggregate.load_solver(); "
        "sys.exit(before or 'scipy.sparse' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
