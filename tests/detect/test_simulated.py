"""The whole way on simulated jobs: waits come out of dependencies, and must accuse nobody."""

from __future__ import annotations

import pytest

from aggregate import build_timeline
from detect import Owner, detect
from megascan.schema import Granularity
from megascan.simulate import (
    Imbalance,
    JobModel,
    communication_heavy,
    compute_bound,
    parse_fault,
    simulate_trace,
)
from megascan.topology import Layout

SIZES = {"iterations": 22, "num_layers": 4, "num_microbatches": 4}
"""Most of a test here is simulating: four times as much model says the same."""
LARGE = {"num_layers": 16, "num_microbatches": 8}


def report_of(layout, *faults, costs=compute_bound, seed=0, **changes):
    job = JobModel(layout=layout, costs=costs(layout), **{**SIZES, **changes})
    trace = simulate_trace(job, [parse_fault(fault) for fault in faults], seed=seed)
    return detect(build_timeline(trace))


def on_nodes(report):
    return [(one.ranks, str(one.cause)) for one in report.findings if one.owner != Owner.JOB]


LAYOUTS = [Layout(dp=2, tp=2), Layout(tp=2, pp=2), Layout(pp=2, dp=2, vpp=2), Layout(tp=4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.to_json()))
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_compute_fault(layout, device):
    report = report_of(layout, "rank=1,kind=compute,factor=1.1", device=device)
    assert on_nodes(report) == [((1,), "compute")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout.to_json()))
@pytest.mark.parametrize("kind", ["even", "skew", "warm-up", "checkpoint", "collector"])
def test_lookalikes_name_no_node(layout, kind):
    imbalance = {
        "even": Imbalance(),
        "skew": Imbalance(sequence_ratio=0.3),
        "warm-up": Imbalance(warmup_ratio=2.0),
        "checkpoint": Imbalance(checkpoint_interval=5),
        "collector": Imbalance(gc_interval=4, gc_ns=3e8),
    }[kind]
    assert on_nodes(report_of(layout, imbalance=imbalance)) == []


EIGHT = Layout(tp=2, pp=2, dp=2)
EVERY_ITERATION = {"num_layers": 4, "num_microbatches": 4, "interval": 1, "window": 1}


@pytest.mark.parametrize(("num_iterations", "seed"), [(2, 39), (2, 67), (3, 1003), (3, 1007)])
def test_a_run_that_has_only_begun_names_nobody(num_iterations, seed):
    """Each rank takes its own time over slow first iterations: two behind them are needed."""
    warming = Imbalance(warmup_ratio=2.0)
    report = report_of(
        EIGHT, imbalance=warming, iterations=num_iterations, seed=seed, **EVERY_ITERATION
    )
    assert not [one for one in report.findings if one.owner == Owner.NODE]
    assert any("the others are the run warming up" in note for note in report.notes)


def test_even_first_iterations_are_judged_where_there_are_no_others():
    report = report_of(EIGHT, "rank=5,kind=compute,factor=1.3", iterations=2, **EVERY_ITERATION)
    assert [one.ranks for one in report.findings if one.cause == "compute"] == [(5,)]


def test_a_slow_rank_is_named_from_the_fourth_iteration_on():
    fault = "rank=5,kind=compute,factor=1.3"
    report = report_of(EIGHT, fault, iterations=4, seed=1, **EVERY_ITERATION)
    assert ((5,), "compute") in on_nodes(report)


@pytest.mark.parametrize("last", [8, 10])
def test_the_host_beside_a_fault_that_ends_is_not_named(last):
    """Rank 5 recovers inside the trace: beside its host the stage's other one is slower then."""
    layout = Layout(pp=2, dp=4)
    report = report_of(
        layout, f"rank=5,kind=compute,factor=1.3,from=1,to={last}", num_layers=4,
        num_microbatches=4, ranks_per_host=2,
    )  # fmt: skip
    assert on_nodes(report) == [((5,), "compute")]


def test_slow_link_names_the_pair():
    layout = Layout(tp=2, pp=2, dp=2)
    report = report_of(layout, "rank=1,kind=link,peer=5,factor=2", costs=communication_heavy)
    assert on_nodes(report) == [((1, 5), "link")]


def test_slow_host_starves_its_device():
    report = report_of(Layout(dp=4), "rank=2,kind=host,factor=1.3")
    assert on_nodes(report) == [((2,), "host")]


def test_optimizers_split_a_tensor_group_at_base_granularity():
    report = report_of(
        Layout(dp=4, tp=2), "rank=3,kind=compute,factor=1.2", granularity=Granularity.BASE,
        **LARGE,
    )  # fmt: skip
    assert on_nodes(report) == [((3,), "compute")]
    assert report.findings[0].owner == Owner.NODE
    assert any("granularity base" in note for note in report.notes)


def test_missing_rank_is_no_obstacle():
    report = report_of(Layout(dp=4, pp=2), "rank=6,kind=compute,factor=1.2", missing_ranks=(0, 5))
    assert on_nodes(report) == [((6,), "compute")]


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_slowdown_is_exact_where_transfers_hide_weight_gradients(factor):
    fault = f"rank=3,kind=compute,factor={factor}"
    report = report_of(Layout(tp=2, dp=2), fault, costs=communication_heavy)
    assert on_nodes(report) == [((3,), "compute")]
    assert report.findings[0].slowdown == pytest.approx(factor, rel=0.01)


def test_late_ranks_downstream_of_a_slow_one_are_not_named():
    layout = Layout(pp=4, vpp=2, dp=2)
    report = report_of(layout, "rank=1,kind=compute,factor=2.0", num_layers=16, num_microbatches=16)
    named = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert named == [(1,)]
    others = [one for one in report.findings if str(one.cause) == "link"]
    assert all("mend that first" in one.evidence[-1] for one in others)


def test_a_slowdown_in_an_untraced_tensor_group_is_a_lower_bound():
    fault = "rank=12,kind=compute,factor=1.3"
    report = report_of(Layout(tp=4, pp=2, dp=2), fault, granularity=Granularity.BASE, **LARGE)
    finding = report.findings[0]
    assert finding.ranks == (12,)
    assert finding.slowdown_is_bound
    assert finding.slowdown < 1.3
    assert "at least" in finding.headline
    assert finding.to_json()["slowdown_is_bound"] is True
