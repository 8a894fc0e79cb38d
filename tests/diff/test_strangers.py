"""Traces of different jobs are no regression of one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from detect.comparison import Outcome, Side, compare, render_text
from detect.comparison.measures import differences
from megascan.simulate import ModelSize, compute_bound
from megascan.topology import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)
MakeSide = Callable[..., Side]


def on(side: Side, device: str) -> Side:
    """The same trace on other devices."""
    members = replace(side.members, devices=(device,) * len(side.members))
    seen = replace(side.examined.seen, members=members)
    return replace(side, examined=replace(side.examined, seen=seen))


@pytest.mark.parametrize(
    "layout", [LAYOUT, Layout(dp=4), Layout(pp=4), Layout(tp=4)], ids=["all", "dp", "pp", "tp"]
)
def test_another_size_of_model_is_another_job(layout: Layout, side: MakeSide) -> None:
    wide = compute_bound(layout, ModelSize(hidden_size=8192, num_layers=4 * layout.pp))
    narrow = compute_bound(layout, ModelSize(hidden_size=4096, num_layers=4 * layout.pp))
    result = compare(side(1, layout=layout, costs=narrow), side(2, layout=layout, costs=wide))
    assert result.outcome is Outcome.INCOMPARABLE
    assert not result.regressions
    text = render_text(result)
    assert text.startswith("INCOMPARABLE: the traces are of different jobs, by their ")
    assert "slower" not in text


def test_other_devices_are_another_job(healthy: Side) -> None:
    result = compare(on(healthy, "NVIDIA H100"), on(healthy, "NVIDIA H200"))
    assert result.outcome is Outcome.INCOMPARABLE
    assert "devices (NVIDIA H100 before, NVIDIA H200 after)" in render_text(result)
    assert result.to_json()["regressions"] == []


def test_devices_that_are_not_known_say_nothing(healthy: Side) -> None:
    assert not list(differences(on(healthy, ""), healthy))


@pytest.mark.parametrize(
    "change",
    [
        {"num_microbatches": 8},
        {"num_layers": 12},
        {"layout": Layout(tp=2, pp=2, dp=4), "num_layers": 8},
        {"distributed_optimizer": False},
    ],
    ids=["microbatches", "layers", "replicas", "optimizer"],
)
def test_a_job_that_changed_is_still_that_job(
    change: dict[str, object], healthy: Side, side: MakeSide
) -> None:
    assert not list(differences(healthy, side(3, **change)))
