"""Which ranks a profile says are a group: all of them, or none."""

from __future__ import annotations

import pytest

from megascan.reader.kineto.document import ProcessGroup, configured_groups, process_group

NOT_KNOWN = ProcessGroup("", ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[0, 1, 2]", (0, 1, 2)),
        ("[3]", (3,)),
        (str(list(range(512))), tuple(range(512))),
    ],
)
def test_a_complete_list(text: str, expected: tuple[int, ...]) -> None:
    group = process_group("5", "mesh_pp", text, {})
    assert group == ProcessGroup(f"pp@{expected[0]}", expected)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[0, 1, 2, ...]", id="shortened at its end"),
        pytest.param("[0, 1, ..., 7]", id="shortened within"),
        pytest.param(str(list(range(2000))), id="longer than any of the profiler's"),
        pytest.param(str([0] * 1332 + [123456]), id="one that a cut would end within a number"),
        pytest.param("", id="not said"),
    ],
)
def test_a_part_of_a_list_is_no_group(text: str) -> None:
    assert process_group("5", "mesh_pp", text, {}) == NOT_KNOWN


def test_the_header_knows_what_a_shortened_list_does_not_say() -> None:
    known = {"5": ProcessGroup("pp@0", (0, 1, 2, 3))}
    assert process_group("5", "mesh_pp", "[0, ...]", known) == known["5"]


def test_ranks_of_the_header_may_be_text() -> None:
    """A script that writes "rank" as text does so here, too."""
    entry = {"pg_name": "5", "pg_desc": "mesh_pp", "ranks": ["0", "1"]}
    assert configured_groups([entry]) == {"5": ProcessGroup("pp@0", (0, 1))}


@pytest.mark.parametrize("ranks", [["0", "x"], [0, -1], [0, None], [], "01", [True, [1]]])
def test_entries_that_do_not_list_ranks_are_passed_over(ranks: object) -> None:
    assert configured_groups([{"pg_name": "5", "pg_desc": "mesh_pp", "ranks": ranks}]) == {}
