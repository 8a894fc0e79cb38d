"""Planted regressions are found and named, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from detect.comparison import Outcome, Side, compare, render_text
from detect.comparison.changes import Direction, Quantity
from detect.comparison.measures import Role, RoleTimes, layers_of_all_stages, link_measures
from detect.observe.transfers import Transfers
from megascan.schema import Granularity
from megascan.simulate import Imbalance, Noise
from megascan.topology import Layout

MakeSide = Callable[..., Side]


def test_a_trace_does_not_differ_from_itself(healthy: Side) -> None:
    same = compare(healthy, healthy)
    assert same.outcome == Outcome.SAME
    assert [one for one in same.changes if one.direction != Direction.SAME] == []
    assert all(one.ratio == pytest.approx(1.0) for one in same.changes)
    assert same.findings.new == same.findings.gone == ()
    assert "slower" not in render_text(same).split("\n", 1)[1]


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_of_a_healthy_job_are_the_same(seed: int, side: MakeSide) -> None:
    layout = (Layout(tp=2, pp=2, dp=2), Layout(dp=4), Layout(pp=4), Layout(dp=2, cp=2))[seed % 4]
    uneven = Imbalance(
        gc_interval=5 if seed % 3 == 0 else 0,
        gc_ns=10e6,
        checkpoint_interval=6 if seed % 5 == 0 else 0,
        sequence_ratio=0.05 if seed % 7 == 0 else 0.0,
    )
    before = side(100 + seed, layout=layout, imbalance=uneven)
    after = side(200 + seed, layout=layout, imbalance=uneven, iterations=9)
    result = compare(before, after)
    assert result.outcome == Outcome.SAME, render_text(result)


@pytest.mark.parametrize("factor", [1.05, 1.3])
def test_a_slow_rank_is_named_alone(factor: float, healthy: Side, side: MakeSide) -> None:
    after = side(1, f"rank=5,kind=compute,factor={factor}")
    result = compare(healthy, after)
    assert result.outcome == Outcome.REGRESSED
    (rank,) = result.of_kind(Quantity.RANK, Direction.SLOWER)
    assert rank.ranks == (5,)
    assert rank.ratio == pytest.approx(factor, rel=0.02)
    assert rank.interval[0] < factor < rank.interval[1]
    assert result.of_kind(Quantity.ROLE, Direction.SLOWER) == ()
    assert "rank 5 (DP0 PP1 TP1, host n00, GPU 5)" in render_text(result).splitlines()[0]


def test_a_mended_rank_is_no_regression(healthy: Side, side: MakeSide) -> None:
    before = side(1, "rank=5,kind=compute,factor=1.3")
    result = compare(before, healthy)
    assert result.outcome == Outcome.FASTER
    assert result.regressions == ()
    assert [one.ranks for one in result.of_kind(Quantity.RANK, Direction.FASTER)] == [(5,)]
    assert [one.ranks for one in result.findings.gone] == [(5,)]
    assert render_text(result).startswith("FASTER: ")


def test_a_rank_that_was_slow_before_is_no_news(side: MakeSide) -> None:
    fault = "rank=5,kind=compute,factor=1.3"
    result = compare(side(1, fault), side(2, fault))
    assert result.outcome == Outcome.SAME, render_text(result)
    assert len(result.findings.same) >= 1


def test_two_of_a_pair_only_the_slower_one(side: MakeSide) -> None:
    """With one peer each differs from the other; only one has changed."""
    layout = Layout(dp=2)
    result = compare(
        side(1, layout=layout), side(2, "rank=1,kind=compute,factor=1.2", layout=layout)
    )
    assert [one.ranks for one in result.of_kind(Quantity.RANK, Direction.SLOWER)] == [(1,)]
    assert result.of_kind(Quantity.RANK, Direction.FASTER) == ()


def test_a_lone_rank_of_a_pipeline_is_judged_by_its_past(side: MakeSide) -> None:
    layout = Layout(pp=4)
    result = compare(
        side(1, layout=layout), side(2, "rank=2,kind=compute,factor=1.15", layout=layout)
    )
    assert [one.ranks for one in result.of_kind(Quantity.RANK, Direction.SLOWER)] == [(2,)]


def test_everybody_slower_is_the_operation_not_a_rank(healthy: Side, side: MakeSide) -> None:
    faults = [f"rank={rank},kind=compute,factor=1.1" for rank in range(8)]
    result = compare(healthy, side(3, *faults))
    assert result.of_kind(Quantity.RANK, Direction.SLOWER) == ()
    names = {one.subject for one in result.of_kind(Quantity.ROLE, Direction.SLOWER)}
    assert {f"{name} of stage PP{s}" for name in ("forward", "backward") for s in (0, 1)} <= names
    step = result.step
    assert step is not None and 1.05 < step.ratio < 1.11  # communication is as it was


def test_a_heavier_stage_is_its_operations(healthy: Side, side: MakeSide) -> None:
    heavy = Imbalance(stage_ratio={1: 1.4})
    result = compare(healthy, side(4, imbalance=heavy))
    slower = result.of_kind(Quantity.ROLE, Direction.SLOWER)
    assert slower and all("stage PP1" in one.subject for one in slower)
    assert result.of_kind(Quantity.RANK, Direction.SLOWER) == ()


def test_a_slow_link_is_named_with_its_ranks(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(5, "rank=1,peer=5,kind=link,factor=8"))
    links = result.of_kind(Quantity.LINK, Direction.SLOWER)
    assert (1, 5) in [one.ranks for one in links]
    assert all({1, 5} <= set(one.ranks) for one in links)


@pytest.mark.parametrize(
    ("members", "names"),
    [
        (((0, 1), (2, 3), (0, 2, 4, 6)), {"in groups of 2", "in groups of 4"}),
        (((0, 1), (2, 3), (4, 5)), {"dp all_reduce of 1 MB"}),
    ],
    ids=["groups of two and of four", "groups of two"],
)
def test_groups_of_unlike_size_are_no_one_kind(
    members: tuple[tuple[int, ...], ...], names: set[str]
) -> None:
    """Equal bytes take longer in a larger group; the name of their kind does not tell."""
    times = np.full((3, 6), 5e6) * np.linspace(1, 1.01, 6)
    transfers = Transfers(
        members=members,
        kinds=("dp all_reduce of 1 MB", "dp all_reduce of 1 MB"),
        kind=np.array([0, 0, int(len(members[2]) > 2)]),
        size_bytes=np.full(3, 10**6),
        transfer_ns=times,
        sum_ns=times,
        late_ns=np.zeros((8, 6)),
        quick_ns=np.zeros((8, 6)),
    )
    seen = SimpleNamespace(transfers=transfers, iteration_ns=np.full(6, 1e8))
    examined = SimpleNamespace(seen=seen, report=SimpleNamespace(alignment=None))
    side = cast("Side", SimpleNamespace(examined=examined))
    found = [one.subject for one in link_measures(side, side)]
    assert found
    assert all(any(name in one for one in found) for name in names)
    assert all(any(name in one for name in names) for one in found)


def test_a_slow_loader_is_named(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(6, "rank=4,kind=loader,factor=200"))
    (loss,) = result.of_kind(Quantity.LOSS, Direction.SLOWER)
    assert loss.subject.startswith("data loading of rank 4 ")
    assert "of the iteration more" in render_text(result).splitlines()[0]


def test_below_the_least_change_is_silence(healthy: Side, side: MakeSide) -> None:
    after = side(1, "rank=5,kind=compute,factor=1.3")
    result = compare(healthy, after, min_change=1.5)
    assert result.regressions == ()


def test_shares_move_from_computing_to_waiting(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(1, "rank=5,kind=compute,factor=1.3"))
    moved = {one.name: one.after - one.before for one in result.shares}
    assert moved["wait"] > 0.03
    assert moved["compute"] < -0.03


def test_json_holds_everything(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(1, "rank=5,kind=compute,factor=1.3"))
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["outcome"] == "regressed"
    assert [one["ranks"] for one in record["regressions"] if one["kind"] == "rank"] == [[5]]
    assert record["step"]["ratio"] > 1.1
    assert record["findings"]["new"][0]["ranks"] == [5]
    assert set(record["least_visible"]) == {"step", "role", "rank", "loss", "link"}
    assert len(record["changes"]) == len(result.changes)


@pytest.mark.parametrize(
    ("layout", "roles", "reason"),
    [
        (Layout(tp=2, pp=2, dp=4), {"forward of stage PP0", "attention of stage PP1"}, "DP2 PP2"),
        (Layout(tp=2, pp=4, dp=2), {"transformer_layer"}, "the layouts differ"),
        (Layout(pp=2, dp=4), set(), "different shares of the work"),
    ],
)
def test_other_layouts_are_compared_by_what_they_share(
    layout: Layout, roles: set[str], reason: str, healthy: Side, side: MakeSide
) -> None:
    result = compare(healthy, side(7, layout=layout, num_layers=8))
    assert result.step is None
    assert result.of_kind(Quantity.RANK) == ()
    assert roles <= {one.subject for one in result.of_kind(Quantity.ROLE)}
    assert reason in " ".join(result.not_compared)
    assert "not compared: " in render_text(result)
    assert [one for one in result.regressions if one.kind == Quantity.ROLE] == []


def test_more_layers_are_no_regression(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(8, num_layers=12))
    assert result.regressions == ()
    assert result.step is None
    assert "4 layers before, 6 after" in " ".join(result.not_compared)


def test_more_microbatches_are_no_regression(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(9, num_microbatches=8))
    assert result.step is None
    assert "4 microbatches before, 8 after" in " ".join(result.not_compared)
    assert [one.subject for one in result.regressions] == []


def test_another_granularity_is_said(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(10, granularity=Granularity.BASE))
    assert "operations that only one trace holds" in " ".join(result.not_compared)


def test_too_few_iterations_accuse_nobody(healthy: Side, side: MakeSide) -> None:
    result = compare(healthy, side(1, "rank=5,kind=compute,factor=1.3", iterations=2))
    assert result.regressions == ()
    assert any("say nothing about their noise" in note for note in result.notes)


def test_noise_widens_what_can_be_seen(side: MakeSide) -> None:
    calm, noisy = (
        compare(
            side(1, noise=Noise(compute_ratio=ratio)),
            side(2, noise=Noise(compute_ratio=ratio)),
            min_change=1.001,
        )
        for ratio in (0.01, 0.2)
    )
    assert noisy.least_visible[Quantity.RANK] > calm.least_visible[Quantity.RANK]
    assert noisy.outcome == Outcome.SAME


def test_layers_of_any_kind_are_compared_across_stages() -> None:
    times = RoleTimes(np.array([0]), np.ones((1, 4)), 2.0)
    layers = ("transformer_layer", "layer-backward", "attention", "moe", "moe-backward")
    roles = {
        Role(stage, 0, name): times for stage in range(2) for name in (*layers, "forward", "loss")
    }
    assert {role.name for role in layers_of_all_stages(roles)} == set(layers)
