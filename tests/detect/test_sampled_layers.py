"""Verdicts where modules of some layers only were recorded, in turns: the same as with all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aggregate import build_timeline, summarise
from detect import Report, detect
from detect.comparison.measures import roles_of_timeline
from detect.detector import examine
from detect.observe.spans import SpanIndex
from detect.whatif import replay_of_timeline
from megascan.export import write_timeline
from megascan.reader import read_timeline, read_trace
from megascan.simulate import (
    JobModel,
    compute_bound,
    parse_fault,
    simulate_trace,
    write_rank_files,
)
from megascan.timeline import Timeline, is_sampled, numbers
from megascan.topology import Layout

LAYOUTS = {
    "tensor and pipeline": Layout(tp=2, pp=2, dp=2),
    "replicas": Layout(dp=4),
    "one tensor group": Layout(tp=4),
}
FAULTS = {
    "healthy": (),
    "a little slow": ("rank=1,kind=compute,factor=1.06",),
    "busy host": ("rank=2,kind=host,factor=1.3",),
    "pauses": ("rank=2,kind=gc,factor=1.5",),
}


def job(layout: Layout, stride: int, device: str = "cuda") -> JobModel:
    return JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=14,
        num_layers=16,
        num_microbatches=4,
        device=device,
        layer_stride=stride,
    )


def timeline_of(name: str, fault: str, stride: int, device: str = "cuda") -> Timeline:
    faults = [parse_fault(one) for one in FAULTS[fault]]
    return build_timeline(simulate_trace(job(LAYOUTS[name], stride, device), faults, seed=5))


def names_of(report: Report) -> list[tuple[object, ...]]:
    return sorted((one.cause, one.ranks, one.owner) for one in report.findings)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_verdict_is_the_same(name: str, fault: str) -> None:
    whole, part = (detect(timeline_of(name, fault, stride)) for stride in (1, 8))
    assert names_of(part) == names_of(whole)
    slow = {one.cause: one.slowdown for one in whole.findings}
    for one in part.findings:
        assert one.slowdown - 1 == pytest.approx(slow[one.cause] - 1, rel=0.25)


@pytest.mark.power
@pytest.mark.parametrize("name", LAYOUTS)
def test_as_small_a_slowdown_would_be_found(name: str) -> None:
    whole, part = (detect(timeline_of(name, "healthy", stride)) for stride in (1, 8))
    assert part.minimum_detectable_slowdown == pytest.approx(
        whole.minimum_detectable_slowdown, abs=0.005
    )


@pytest.mark.parametrize("fault", ["healthy", "a little slow"])
def test_and_on_the_cpu(fault: str) -> None:
    whole, part = (
        detect(timeline_of("tensor and pipeline", fault, stride, "cpu")) for stride in (1, 8)
    )
    assert names_of(part) == names_of(whole)


@pytest.fixture
def both(once: Callable[..., object]) -> tuple[Timeline, Timeline]:
    def make() -> tuple[Timeline, Timeline]:
        whole, part = (timeline_of("tensor and pipeline", "healthy", s) for s in (1, 8))
        return whole, part

    return once("both", make)


def test_it_leaves_modules_out_and_nothing_else(both: tuple[Timeline, Timeline]) -> None:
    whole, part = both
    assert is_sampled(part) and not is_sampled(whole)
    kind_of = {len(one.spans): one for one in both}
    assert len(kind_of) == 2
    modules = [
        {
            (r, i, layer)
            for r, i, layer, kind in zip(
                numbers(one.spans, "rank").tolist(),
                numbers(one.spans, "iteration").tolist(),
                numbers(one.spans, "layer").tolist(),
                one.spans.column("kind").to_pylist(),
                strict=True,
            )
            if kind == "compute" and layer >= 0
        }
        for one in both
    ]
    named = {
        (rank, iteration): set(layers)
        for rank, windows in part.windows.items()
        for window in windows
        for iteration, layers in window.layers
    }
    assert {(r, i) for r, i, _ in modules[0]} - set(named) == {(r, 1) for r in range(8)}
    assert modules[1] == {
        (r, i, layer) for r, i, layer in modules[0] if layer in named.get((r, i), {layer})
    }
    others = [
        one.spans.filter(
            [kind not in ("compute",) for kind in one.spans.column("kind").to_pylist()]
        )
        for one in both
    ]
    assert others[0].num_rows == others[1].num_rows


def test_times_of_whole_passes_do_not_change(both: tuple[Timeline, Timeline]) -> None:
    """Nothing takes a module that is not there for time that was not needed."""
    whole, part = (examine(one).seen for one in both)
    np.testing.assert_allclose(part.work.log_ns, whole.work.log_ns, atol=0.06)
    by_rank = np.nanmean(part.work.log_ns - whole.work.log_ns, axis=(1, 2))
    np.testing.assert_allclose(by_rank - by_rank.mean(), 0, atol=0.002)
    for cause, lost in whole.lost_ns.items():
        iteration = np.nanmean(whole.iteration_ns)
        assert np.nanmean(np.abs(part.lost_ns[cause] - lost)) < 0.01 * iteration, cause


def test_the_replay_is_the_same(both: tuple[Timeline, Timeline]) -> None:
    whole, part = (replay_of_timeline(one) for one in both)
    np.testing.assert_allclose(part.traced_s, whole.traced_s, rtol=1e-6)
    assert part.graph.optypes == whole.graph.optypes


def test_a_comparison_sees_as_many_layers(both: tuple[Timeline, Timeline]) -> None:
    counts = [
        {role: times.count for role, times in roles_of_timeline(one, examine(one).seen).items()}
        for one in both
    ]
    assert counts[0] == counts[1]


def test_shares_of_the_summary_are_the_same(both: tuple[Timeline, Timeline]) -> None:
    whole, part = (summarise(one).ranks.to_pydict() for one in both)
    for name, values in whole.items():
        if name.endswith("_ratio"):
            np.testing.assert_allclose(part[name], values, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("suffix", [".json.gz", ".pftrace"])
def test_the_files_say_it(tmp_path: Path, suffix: str) -> None:
    trace = simulate_trace(job(Layout(dp=2), 8), (), seed=1)
    write_rank_files(trace, tmp_path / "ranks")
    again = read_trace(tmp_path / "ranks")
    assert again.windows == trace.windows and is_sampled(build_timeline(again))
    write_timeline(build_timeline(again), tmp_path / f"t{suffix}")
    assert SpanIndex.of(read_timeline(tmp_path / f"t{suffix}")).is_sampled
