"""Simulated jobs of every kind of layout, as timelines."""

from __future__ import annotations

from aggregate import build_timeline
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout

LAYOUTS = {
    "plain": Layout(tp=2, pp=2, dp=2),
    "deep": Layout(pp=4, dp=2),
    "interleaved": Layout(pp=2, vpp=2, dp=2),
    "no pipeline": Layout(tp=2, dp=2),
    "context and experts": Layout(cp=2, dp=2, pp=2, ep=2),
    "other order": Layout(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp"),
    "single": Layout(),
}


def simulated(layout: Layout, *faults: str, **job: object) -> Timeline:
    """Simulate six iterations of four microbatches unless `job` says otherwise."""
    settings = {"iterations": 6, "num_microbatches": 4, "num_layers": 8, **job}
    model = JobModel(layout=layout, costs=compute_bound(layout), **settings)
    return build_timeline(simulate_trace(model, [parse_fault(one) for one in faults], seed=1))
