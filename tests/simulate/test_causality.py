"""What must hold in every trace, noise and faults included."""

from __future__ import annotations

import numpy as np
import pytest

from megascan.simulate import JobModel, Noise, compute_bound, parse_fault, simulate_trace
from megascan.topology import Layout

LAYOUTS = [
    Layout(tp=2, pp=2, dp=2),
    Layout(pp=4, vpp=2, dp=2),
    Layout(tp=2, cp=2, pp=2, dp=2),
    Layout(tp=2, ep=2, dp=2, pp=2),
    Layout(dp=4),
    Layout(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp"),
    Layout(tp=2, pp=2, dp=2, order="dp-tp-cp-ep-pp"),
]
FAULTS = [parse_fault("rank=1,kind=compute,factor=1.4"), parse_fault("rank=0,kind=gc,factor=1.1")]


@pytest.fixture(
    params=LAYOUTS, ids=lambda layout: f"{layout.order}-{layout.world_size}-{layout.vpp}"
)
def spans(request, frame):
    layout = request.param
    job = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=2,
        num_microbatches=4,
        num_layers=8,
        noise=Noise(end_jitter_ns=0.0),
    )
    return frame(simulate_trace(job, FAULTS, seed=3))


def test_members_of_a_collective_end_together(spans):
    collectives = spans[spans["kind"] == "collective"]
    groups = collectives.groupby(["iteration", "group", "op", "sequence"], observed=True)
    assert (groups["end"].max() - groups["end"].min()).max() <= 1  # rounding to whole ns
    assert (groups["start"].max() <= groups["end"].min()).all()


def test_every_collective_has_all_members_of_its_group(spans, request):
    collectives = spans[spans["kind"] == "collective"]
    counts = collectives.groupby(["iteration", "group", "op", "sequence"], observed=True)["rank"]
    sizes = counts.nunique().groupby("group", observed=True)
    assert (sizes.min() == sizes.max()).all()
    assert (sizes.min() >= 2).all()
    names = [(int(name.partition("@")[2]), ranks.min()) for (_, name, *_), ranks in counts]
    assert all(named == smallest for named, smallest in names)


def test_no_receive_ends_before_its_send_starts(spans):
    p2p = spans[spans["kind"] == "p2p"]
    if p2p.empty:
        assert not spans["group"].str.startswith("pp@").any()
        return
    key = ["iteration", "direction", "sequence"]
    sends, receives = p2p[p2p["op"] == "send"], p2p[p2p["op"] == "recv"]
    there, back = [*key, "rank", "peer"], [*key, "peer", "rank"]
    paired = sends.merge(receives, left_on=there, right_on=back, suffixes=("_send", "_recv"))
    assert len(sends) == len(receives) == len(paired)
    assert (paired["end_recv"] > paired["start_send"]).all()
    assert (paired["end_send"] > paired["start_recv"]).all()
    assert (paired["microbatch_send"] == paired["microbatch_recv"]).all()


def test_spans_of_a_track_nest(spans):
    for _, track in spans.groupby(["rank", "track"]):
        open_ends: list[int] = []
        for start, end in zip(track["start"], track["end"], strict=True):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


def test_rows_are_in_the_declared_order(spans):
    order = np.lexsort((-spans["duration_ns"], spans["start_ns"], spans["rank"]))
    assert (order == np.arange(len(spans))).all()


def test_nothing_takes_negative_time(spans):
    assert (spans["duration_ns"] >= 0).all()
    assert (spans["launch_ns"] <= 0).all()
