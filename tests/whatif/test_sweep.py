"""Graphs small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from detect.whatif.graph import Graph, partition_of, sweep
from megascan.errors import InputError


def constant(weights: list[object]) -> Callable[[int], np.ndarray]:
    """Weights by node: a number, or one number a lane."""
    return lambda node: np.atleast_1d(np.asarray(weights[node], dtype=float))[:, None, None]


def test_a_chain_adds_up(graph: Callable[..., Graph]) -> None:
    chain = graph([(0, "a"), (0, "b"), (0, "c")], [(0, 1), (1, 2)])
    assert sweep(chain, constant([1, 2, 4])).item() == 7


def test_a_fork_takes_its_longest_branch(graph: Callable[..., Graph]) -> None:
    fork = graph([(0, "a"), (0, "b"), (0, "c"), (0, "d")], [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert sweep(fork, constant([1, 5, 2, 1])).item() == 7


def test_a_message_waits_for_both_ends(graph: Callable[..., Graph]) -> None:
    """Stage 0 sends after 3, stage 1 receives after 1 and then computes 2."""
    pair = graph(
        [(0, "forward"), (0, "send"), (1, "other"), (1, "recv"), (1, "forward")],
        [(0, 1), (2, 3), (3, 4)],
        groups=[((1, 3), "")],
    )
    times = {}
    sweep(
        pair,
        constant([3, 0.5, 1, 0.5, 2]),
        observe=lambda node, start, end: times.update({node: (start.item(), end.item())}),
    )
    assert times[1] == times[3] == (3, 3.5)
    assert times[4] == (3.5, 5.5)


def test_a_collective_waits_for_its_lanes_only(graph: Callable[..., Graph]) -> None:
    """Four lanes in two groups: (0, 1) and (2, 3)."""
    two = graph(
        [(0, "work"), (0, "all_reduce")],
        [(0, 1)],
        groups=[((1,), "tp")],
        lanes={"tp": [0, 0, 1, 1]},
    )
    ends = {}
    sweep(
        two,
        constant([[1, 5, 2, 3], 1]),
        observe=lambda node, start, end: ends.update({node: end.ravel().tolist()}),
    )
    assert ends[1] == [6, 6, 4, 4]


def test_lanes_of_one_group_need_not_be_neighbours(graph: Callable[..., Graph]) -> None:
    crossed = graph(
        [(0, "work"), (0, "all_reduce")],
        [(0, 1)],
        groups=[((1,), "dp")],
        lanes={"dp": [0, 1, 0, 1]},
    )
    ends = {}
    sweep(
        crossed,
        constant([[1, 5, 2, 3], 0]),
        observe=lambda node, start, end: ends.update({node: end.ravel().tolist()}),
    )
    assert ends[1] == [2, 5, 2, 5]


def test_scenarios_and_steps_do_not_mix(graph: Callable[..., Graph]) -> None:
    chain = graph([(0, "a"), (0, "b")], [(0, 1)])
    weights = np.arange(12.0).reshape(2, 1, 2, 3)  # node, lane, scenario, step
    assert sweep(chain, lambda node: weights[node]).tolist() == (weights.sum(axis=0)[0]).tolist()


def test_a_circle_is_an_error(graph: Callable[..., Graph]) -> None:
    with pytest.raises(InputError, match=r"2 operations wait for one another in a circle.*stage 0"):
        graph([(0, "a"), (0, "b")], [(0, 1), (1, 0)])


def test_partition_numbers_sets_in_order_of_appearance() -> None:
    assert partition_of(["b", "a", "b"]).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("sets", "ends"), [([0, 0, 0], [5, 5, 5]), ([0, 1, 2], [1, 5, 2]), ([0, 1, 0], [2, 5, 2])]
)
def test_lanes_wait_for_those_of_their_set(
    graph: Callable[..., Graph], sets: list[int], ends: list[int]
) -> None:
    """All of them are one set, each is one, or two of three."""
    nodes = [(0, "work"), (0, "all_reduce")]
    chain = graph(nodes, [(0, 1)], groups=[((1,), "dp")], lanes={"dp": sets})
    found = {}
    sweep(
        chain,
        constant([[1, 5, 2], 0]),
        observe=lambda node, start, end: found.update({node: np.broadcast_to(end, (3, 1, 1))}),
    )
    assert found[1].ravel().tolist() == ends
