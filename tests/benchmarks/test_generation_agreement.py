"""Where engines part is found, and only what rounding can do is put down to it."""

from __future__ import annotations

import pytest

from benchmarks.generation_agreement import (
    Comparison,
    Judged,
    Parting,
    comparisons,
    line_of,
    partings,
)

PROMPTS = [[1, 2], [3, 4]]


def test_engines_are_compared_with_the_reference_and_that_with_its_larger_batch() -> None:
    answers = {
        (1, "ours"): [[5, 6]],
        (1, "theirs"): [[5, 7]],
        (2, "ours"): [[5, 6], [8, 8]],
        (2, "theirs"): [[5, 6], [8, 9]],
    }
    found = comparisons(answers, "theirs")
    assert [(one.batch, one.name, one.others) for one in found] == [
        (1, "ours", [[5, 7]]),
        (1, "theirs in a batch of 2", [[5, 6]]),
        (2, "ours", [[5, 6], [8, 9]]),
    ]


def test_a_parting_is_the_first_token_that_differs() -> None:
    compared = Comparison(
        batch=2, name="ours", rows=[[5, 6, 7], [8, 9, 9]], others=[[5, 6, 7], [8, 1, 2]]
    )
    assert partings(compared, PROMPTS) == [Parting(place=1, prefix=[3, 4, 8], own=9, other=1)]


@pytest.mark.parametrize(("gap", "is_rounding"), [(0.0, True), (0.7, True), (0.9, False)])
def test_a_gap_of_many_errors_is_no_rounding(gap: float, is_rounding: bool) -> None:
    assert Judged(gap=gap, error=0.1).is_rounding == is_rounding


def test_the_line_counts_rows_and_gives_the_largest_gap() -> None:
    compared = Comparison(batch=2, name="ours", rows=[[5], [8]], others=[[6], [9]])
    found = partings(compared, PROMPTS)
    judged = [Judged(gap=0.25, error=0.1), Judged(gap=0.125, error=0.2)]
    assert line_of(compared, found, judged) == "| 2 | ours | 2 of 2 | 1, 1 | 0.2500 | 0.2000 |"
    same = Comparison(batch=2, name="ours", rows=[[5], [8]], others=[[5], [8]])
    assert line_of(same, partings(same, PROMPTS), []) == "| 2 | ours | 0 of 2 | | | |"
