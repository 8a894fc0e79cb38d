"""Ranks that dropped different windows, and windows of different granularity, are cut alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from megascan.header import WindowRecord
from megascan.reader.segments import Segment
from megascan.reader.trace import comparable
from megascan.schema import Granularity
from megascan.timeline import numbers, span_table


def segment(folder, rank, levels, *, dropped=0):
    """Windows of two iterations every five, one a level; `dropped` of them are gone."""
    header = folder.header(rank)
    windows = tuple(
        WindowRecord(
            run_id=header.run_id,
            window=number,
            first_iteration=5 * number + 1,
            last_iteration=5 * number + 2,
            num_spans=2,
            granularity=level,
            interval=5,
        )
        for number, level in enumerate(levels)
    )[dropped:]
    iterations = np.array(
        [i for w in windows for i in (w.first_iteration, w.last_iteration)], dtype=np.int64
    )
    spans = span_table(len(iterations), {"rank": rank, "iteration": iterations}, {})
    if dropped:
        header = replace(
            header,
            num_windows_dropped=dropped,
            last_iteration_dropped=5 * (dropped - 1) + 2,
            trace=replace(header.trace, max_bytes=1_000_000),
        )
    return Segment(path=Path(f"rank{rank}.json"), header=header, windows=windows, spans=spans)


def iterations_of(part):
    return sorted(set(numbers(part.spans, "iteration").tolist()))


def test_ranks_that_recorded_alike_are_left_alone(folder):
    ranks = {rank: segment(folder, rank, ["full"] * 3) for rank in (0, 1)}
    cut = comparable(ranks)
    assert cut.by_rank == ranks and cut.notes == ()


def test_all_ranks_begin_where_the_one_that_dropped_most_begins(folder):
    ranks = {
        0: segment(folder, 0, ["full"] * 6, dropped=1),
        1: segment(folder, 1, ["full"] * 6, dropped=3),
        2: segment(folder, 2, ["full"] * 6),
    }
    cut = comparable(ranks)
    for part in cut.by_rank.values():
        assert iterations_of(part) == [16, 17, 21, 22, 26, 27]
        assert [window.window for window in part.windows] == [3, 4, 5]
    (note,) = cut.notes
    assert "after iteration 12" in note and "--trace-max-bytes 1,000,000" in note


def test_the_granularity_of_most_iterations_is_kept_and_named_by_the_headers(folder):
    levels = ["full", "full", "base", "base", "base", "base"]
    cut = comparable({rank: segment(folder, rank, levels) for rank in (0, 1)})
    for part in cut.by_rank.values():
        assert iterations_of(part) == [11, 12, 16, 17, 21, 22, 26, 27]
        assert part.header.trace.granularity is Granularity.BASE
    (note,) = cut.notes
    assert "8 iterations of base are analysed, 4 of another granularity (1 to 7)" in note


def test_a_rank_that_changed_late_takes_its_iterations_from_the_others(folder):
    ranks = {
        0: segment(folder, 0, ["full", "base", "base", "base"]),
        1: segment(folder, 1, ["full", "full", "base", "base"]),
    }
    cut = comparable(ranks)
    assert {tuple(iterations_of(part)) for part in cut.by_rank.values()} == {(11, 12, 16, 17)}


def test_windows_that_do_not_say_have_the_header_s_granularity(folder):
    cut = comparable({0: segment(folder, 0, ["", "", "full"])})
    assert len(cut.by_rank[0].windows) == 3 and cut.notes == ()


def test_fewer_windows_are_said_and_nothing_is_left_out(folder):
    part = segment(folder, 0, ["base"] * 4)
    windows = tuple(
        replace(window, interval=5 if number < 2 else 20)
        for number, window in enumerate(part.windows)
    )
    cut = comparable({0: replace(part, windows=windows)})
    assert len(cut.by_rank[0].windows) == 4
    assert cut.notes == (
        "a window every 20 instead of 5 iterations from iteration 11 on, as tracing cost "
        "too much (--trace-budget)",
    )
