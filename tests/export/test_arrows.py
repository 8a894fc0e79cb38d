"""Arrows between ends: found some matches at a time, their times made from the ends' own."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascan.export.arrows import bind, find_arrows
from megascan.export.perfetto import _Ends
from megascan.schema import Kind


@pytest.fixture
def crowd() -> pa.Table:
    """Collectives of four members, some without length, some on clocks that cannot be right."""
    random = np.random.default_rng(5)
    match = random.permutation(np.repeat(np.arange(-1, 40), 4))
    start = 100 * match + random.integers(0, 60, len(match))
    duration = random.integers(0, 40, len(match))
    kinds = [str(Kind.COLLECTIVE)] * len(match)
    return pa.table(
        {
            "match": match,
            "start_ns": start,
            "duration_ns": duration,
            "kind": pa.array(kinds).dictionary_encode(),
            "op": pa.array(["all_reduce"] * len(match)).dictionary_encode(),
        }
    )


def test_matches_looked_at_in_parts_give_the_arrows_of_all_together(crowd, monkeypatch):
    together = find_arrows(crowd)
    monkeypatch.setattr("megascan.export.arrows._BLOCK_ENDS", 9)
    apart = find_arrows(crowd)
    for name in ("group", "source", "target"):
        assert getattr(apart, name).tolist() == getattr(together, name).tolist()
        assert getattr(apart, name).dtype == np.int32
    assert len(together.group) > 80
    begin = crowd.column("start_ns").to_numpy()
    assert (begin[together.source] >= begin[together.target]).all()  # from who came last


def test_arrows_leave_and_arrive_inside_slices(crowd, monkeypatch):
    monkeypatch.setattr("megascan.export.arrows._BLOCK_ENDS", 7)
    arrows = find_arrows(crowd)
    bound = bind(arrows, crowd)
    every = np.arange(len(bound.start))
    start_ns, finish_ns = bound.start_ns(every), bound.finish_ns(every)
    begin = crowd.column("start_ns").to_numpy()
    end = begin + crowd.column("duration_ns").to_numpy()
    assert bound.turned.any() and not bound.turned.all()
    assert (start_ns <= finish_ns).all()
    for row, time_ns in ((bound.start_row, start_ns), (bound.finish_row, finish_ns)):
        assert ((begin[row] <= time_ns) & (time_ns < end[row])).all()
    assert (bound.start_row == np.where(bound.turned, arrows.target, arrows.source)).all()


def test_every_start_is_said_once_in_the_order_of_numbers(crowd):
    bound = bind(find_arrows(crowd), crowd)
    first = bound.distinct_starts()
    assert bound.start[first].tolist() == np.unique(bound.start).tolist()
    straight = ~bound.turned[first]
    assert straight.any() and not straight.all()


@given(st.lists(st.integers(0, 24), max_size=40), st.integers(1, 9))
def test_ends_of_a_shard_are_those_of_its_blocks(drawn: list[int], size: int) -> None:
    """Each row's ids in their order, wherever blocks are cut."""
    rows, ids = np.array(drawn, dtype=np.int32), np.arange(len(drawn), dtype=np.int32) + 1
    blocks = [slice(low, min(low + size, 25)) for low in range(0, 25, size)]
    found: list[list[int]] = []
    for block, own in zip(blocks, _Ends(rows=rows, ids=ids).of_blocks(blocks), strict=True):
        num_rows = block.stop - block.start
        ends = own.by_row(num_rows)
        for row in range(num_rows):
            places = range(int(ends.num[row]))
            found.append([int(ends.of_rows(np.array([row]), place)[0]) for place in places])
    assert found == [ids[rows == row].tolist() for row in range(25)]
