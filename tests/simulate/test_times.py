"""Times that can be worked out by hand, without noise."""

from __future__ import annotations

import pytest

from megascan.simulate import parse_fault, simulate_trace
from megascan.topology import Layout

US = 1_000


def spans_of(frame, name, **where):
    chosen = frame[frame["name"] == name]
    for column, value in where.items():
        chosen = chosen[chosen[column] == value]
    return chosen


def intervals(frame, name, **where) -> list[tuple[int, int]]:
    chosen = spans_of(frame, name, **where).sort_values("start")
    return [(s // US, e // US) for s, e in zip(chosen["start"], chosen["end"], strict=True)]


def test_two_stages_two_microbatches(exact_job, frame):
    job = exact_job(Layout(pp=2), costs={"pipeline_ns": 1_000.0})
    spans = frame(simulate_trace(job))
    assert intervals(spans, "forward", rank=0) == [(0, 10), (11, 21)]
    assert intervals(spans, "backward", rank=0) == [(42, 62), (73, 93)]
    assert intervals(spans, "forward", rank=1) == [(11, 21), (42, 52)]
    assert intervals(spans, "backward", rank=1) == [(21, 41), (52, 72)]
    assert intervals(spans, "recv_forward", rank=1) == [(0, 11), (41, 42)]
    assert intervals(spans, "send_forward", rank=0) == [(10, 11), (21, 42)]
    assert intervals(spans, "recv_backward", rank=0) == [(21, 42), (62, 73)]
    assert intervals(spans, "iteration", rank=0) == [(0, 93)]


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 4), (2, 2), (2, 5), (4, 4), (4, 9), (3, 1)]
)
def test_step_time_is_the_closed_form_of_1f1b(exact_job, frame, stages, microbatches):
    job = exact_job(Layout(pp=stages), num_microbatches=microbatches)
    spans = frame(simulate_trace(job))
    longest = spans_of(spans, "iteration")["duration_ns"].max()
    assert longest == (microbatches + stages - 1) * 30 * US


def test_interleaving_shortens_the_bubble_but_not_the_work(exact_job, frame):
    def step(vpp: int) -> int:
        job = exact_job(Layout(pp=4, vpp=vpp), num_layers=8, num_microbatches=8)
        return int(spans_of(frame(simulate_trace(job)), "iteration")["duration_ns"].max())

    work = 8 * 2 * 30 * US
    assert work < step(2) < step(1) == work + 3 * 2 * 30 * US


def test_iterations_follow_each_other_without_a_hole(exact_job, frame):
    job = exact_job(Layout(pp=2), iterations=3, costs={"between_iterations_ns": 5_000.0})
    first, second, third = intervals(frame(simulate_trace(job)), "iteration", rank=0)
    assert second[0] == first[1] + 5
    assert third[0] == second[1] + 5


def test_the_tensor_peer_of_a_slow_rank_waits_exactly_the_difference(exact_job, frame):
    job = exact_job(Layout(tp=2), num_microbatches=1, costs={"tensor_ns": 3_000.0})
    fault = parse_fault("rank=1,kind=compute,factor=1.5")
    spans = frame(simulate_trace(job, [fault]))
    attention = spans[spans["layer"] == 1]
    reduces = attention[attention["name"] == "all_reduce"]
    forward = reduces[reduces["phase"] == "forward"].groupby("rank")["duration_ns"].max()
    assert forward.to_dict() == {0: 3 * US + 5 * US, 1: 3 * US}
    ends = reduces.groupby(["sequence"])["end"].nunique()
    assert (ends == 1).all()


def test_a_slow_stage_makes_the_other_stages_wait_in_p2p_only(exact_job, frame):
    job = exact_job(Layout(pp=2), num_microbatches=4)
    healthy = frame(simulate_trace(job))
    slow = frame(simulate_trace(job, [parse_fault("rank=1,kind=compute,factor=2")]))
    for name in ("forward", "backward"):
        before = spans_of(healthy, name, rank=0)["duration_ns"]
        assert before.tolist() == spans_of(slow, name, rank=0)["duration_ns"].tolist()
    extra = 4 * 30 * US
    waits = spans_of(slow, "recv_backward", rank=0)["duration_ns"].sum()
    assert waits == spans_of(healthy, "recv_backward", rank=0)["duration_ns"].sum() + extra


def test_gradients_meet_across_replicas(exact_job, frame):
    job = exact_job(Layout(dp=2), costs={"gradient_ns": 4_000.0, "optimizer_ns": 2_000.0})
    spans = frame(simulate_trace(job, [parse_fault("rank=1,kind=compute,factor=1.5")]))
    reduce = spans_of(spans, "all_reduce", group="dp_cp@0")
    gradients = reduce[reduce["sequence"] == 0].set_index("rank")["duration_ns"]
    assert gradients.to_dict() == {0: 8 * US + 2 * 15 * US, 1: 8 * US}  # an all_reduce: twice
    assert spans_of(spans, "optimizer").set_index("rank")["duration_ns"].to_dict() == {
        0: 2 * US,
        1: 3 * US,
    }


def test_the_host_runs_ahead_of_the_device_until_it_must_wait(exact_job, frame):
    job = exact_job(Layout(), costs={"dispatch_ratio": 0.5, "mlp_ns": 10_000.0}, num_microbatches=1)
    spans = frame(simulate_trace(job))
    attention = spans_of(spans, "attention").iloc[0]
    mlp = spans_of(spans, "mlp").iloc[0]
    assert (attention["start"], attention["launch_ns"]) == (0, 0)
    assert (mlp["start"], mlp["launch_ns"]) == (10 * US, -5 * US)
    assert spans_of(spans, "forward")["duration_ns"].tolist() == [20 * US]


def test_backward_hides_its_all_reduce_behind_the_weight_gradients(exact_job, frame):
    job = exact_job(Layout(tp=2), num_microbatches=1, costs={"tensor_ns": 3_000.0})
    spans = frame(simulate_trace(job))
    reduce = spans[(spans["track"] == 4) & (spans["rank"] == 0)].sort_values("start").iloc[-1]
    backward = spans_of(spans, "attention-backward", rank=0).iloc[0]
    assert reduce["start"] - backward["start"] == 15 * US
    assert (reduce["duration_ns"], backward["duration_ns"]) == (3 * US, 20 * US)


def test_waiting_for_an_overlapped_all_reduce_lies_inside_the_backward(exact_job, frame):
    job = exact_job(Layout(tp=2), num_microbatches=1, costs={"tensor_ns": 3_000.0})
    spans = frame(simulate_trace(job, [parse_fault("rank=1,kind=compute,factor=1.5")]))
    backward = spans_of(spans, "attention-backward").set_index("rank")["duration_ns"]
    assert backward.to_dict() == {0: (22_500 + 3_000), 1: 30_000}
