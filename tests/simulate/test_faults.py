from __future__ import annotations

import pytest

from megascan.errors import ConfigError, UsageError
from megascan.simulate import Fault, FaultKind, parse_fault, simulate_trace
from megascan.topology import Layout


def durations(frame, rank: int, name: str, iteration: int = 1) -> list[int]:
    chosen = frame[(frame["rank"] == rank) & (frame["iteration"] == iteration)]
    return chosen[chosen["name"] == name]["duration_ns"].tolist()


def test_a_fault_is_read_from_text():
    fault = parse_fault("rank=3,kind=link,factor=1.5,from=5,to=10,peer=7,period=2")
    assert fault == Fault(
        rank=3,
        kind=FaultKind.LINK,
        factor=1.5,
        first_iteration=5,
        last_iteration=10,
        peer=7,
        period=2,
    )
    assert fault.to_json() == {
        "rank": 3,
        "kind": "link",
        "factor": 1.5,
        "from": 5,
        "to": 10,
        "peer": 7,
        "period": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=3,kind=compute", "missing factor"),
        ("rank=3,kind=compute,factor=1.5,until=4", "unknown until"),
        ("rank=3,rank=4,kind=compute,factor=1.5", "cannot read 'rank=4'"),
        ("rank=x,kind=compute,factor=1.5", "'x'"),
        ("rank=3,kind=heat,factor=1.5", "expected one of compute, link, host, loader, gc"),
        ("", "cannot read ''"),
    ],
)
def test_text_that_cannot_be_read_is_said_to_be_so(text, message):
    with pytest.raises(UsageError, match=message):
        parse_fault(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=3,kind=compute,factor=0.5", "factor is 0.5"),
        ("rank=3,kind=compute,factor=nan", "factor is nan"),
        ("rank=3,kind=compute,factor=2,from=0", "count from 1"),
        ("rank=3,kind=compute,factor=2,from=5,to=4", "before it begins"),
        ("rank=3,kind=compute,factor=2,peer=1", "kind=link only"),
        ("rank=3,kind=link,factor=2,peer=3", "another rank"),
        ("rank=3,kind=compute,factor=2,period=0", "period is 0"),
    ],
)
def test_values_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_fault(text)


def test_when_a_fault_is_active():
    steady = parse_fault("rank=0,kind=compute,factor=2,from=3,to=5")
    flapping = parse_fault("rank=0,kind=compute,factor=2,from=2,period=2")
    assert [i for i in range(1, 10) if steady.active(i)] == [3, 4, 5]
    assert [i for i in range(1, 10) if flapping.active(i)] == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=4,kind=compute,factor=2", "ranks 0 to 3"),
        ("rank=0,kind=link,factor=2,peer=9", "rank 9"),
        ("rank=1,kind=loader,factor=2", "loads no data"),
    ],
)
def test_a_fault_the_job_cannot_have_is_refused(exact_job, text, message):
    with pytest.raises(ConfigError, match=message):
        simulate_trace(exact_job(Layout(tp=2, dp=2)), [parse_fault(text)])


def test_compute_faults_multiply_every_computation_of_one_rank(exact_job, frame):
    job = exact_job(Layout(dp=4), costs={"optimizer_ns": 8_000.0}, iterations=3)
    spans = frame(simulate_trace(job, [parse_fault("rank=2,kind=compute,factor=1.25,from=2,to=2")]))
    for name in ("forward", "backward", "attention", "optimizer"):
        for rank in (0, 1, 3):
            assert durations(spans, rank, name, 2) == durations(spans, rank, name, 1)
        slow, normal = durations(spans, 2, name, 2), durations(spans, 2, name, 1)
        assert slow == [round(1.25 * value) for value in normal]
        assert durations(spans, 2, name, 3) == normal


def test_a_slow_pair_slows_its_messages_only(exact_job, frame):
    job = exact_job(Layout(pp=2, dp=2), num_microbatches=1, costs={"pipeline_ns": 1_000.0})
    spans = frame(simulate_trace(job, [parse_fault("rank=0,kind=link,factor=4,peer=2")]))
    assert durations(spans, 0, "send_forward") == durations(spans, 2, "send_backward") == [4_000]
    assert durations(spans, 1, "send_forward") == durations(spans, 3, "send_backward") == [1_000]


def test_a_slow_nic_slows_the_collectives_of_its_groups(exact_job, frame):
    job = exact_job(
        Layout(tp=2, dp=2), costs={"tensor_ns": 1_000.0, "gradient_ns": 6_000.0}, num_microbatches=1
    )
    spans = frame(simulate_trace(job, [parse_fault("rank=3,kind=link,factor=3")]))
    reduce = spans[(spans["name"] == "all_reduce") & (spans["sequence"] == 0)]
    by_group = reduce.groupby("group", observed=True)["duration_ns"].min()
    assert by_group["tp@2"] == 3 * by_group["tp@0"] == 3_000
    assert by_group["dp_cp@1"] == 3 * 12_000


def test_loader_and_gc_faults_show_in_their_own_spans(exact_job, frame):
    job = exact_job(Layout(dp=2), costs={"load_ns": 2_000.0})
    faults = [parse_fault("rank=0,kind=loader,factor=5"), parse_fault("rank=1,kind=gc,factor=1.5")]
    spans = frame(simulate_trace(job, faults))
    assert durations(spans, 0, "batch-generator") == [10_000] * 2
    assert durations(spans, 1, "batch-generator") == [2_000] * 2
    assert durations(spans, 0, "gc-generation-2") == []
    assert durations(spans, 1, "gc-generation-2") == [30_000]


def test_loading_is_hidden_while_the_host_is_ahead_of_its_gpu(exact_job, frame):
    def forwards(device: str, load_ns: float) -> list[int]:
        job = exact_job(Layout(), device=device, costs={"load_ns": load_ns}, num_microbatches=3)
        return durations(frame(simulate_trace(job)), 0, "forward")

    assert forwards("cuda", 20_000.0) == [30_000, 10_000, 10_000]
    assert forwards("cuda", 35_000.0) == [45_000, 15_000, 15_000]
    assert forwards("cpu", 20_000.0) == [30_000] * 3


def test_a_slow_host_starves_its_gpu(exact_job, frame):
    job = exact_job(Layout(dp=2), costs={"dispatch_ratio": 0.1, "mlp_ns": 10_000.0})
    spans = frame(simulate_trace(job, [parse_fault("rank=1,kind=host,factor=1.5")]))
    mlp = spans[spans["name"].isin(["mlp", "mlp-backward"])]
    assert (mlp[mlp["rank"] == 1]["launch_ns"] >= -200).all()  # the previous module's last kernel
    assert (mlp[mlp["rank"] == 0]["launch_ns"] <= -9_000).all()
    assert durations(spans, 0, "forward") == [20_000] * 2
    assert all(30_000 <= value <= 30_100 for value in durations(spans, 1, "forward"))


def test_a_busy_host_takes_wall_time_but_no_cpu_time(exact_job, frame):
    job = exact_job(Layout(dp=2), device="cpu")
    spans = frame(simulate_trace(job, [parse_fault("rank=1,kind=host,factor=1.5")]))
    attention = spans[(spans["rank"] == 1) & (spans["name"] == "attention")]
    assert set(attention["duration_ns"]) == {15_000}
    assert set(attention["cpu_ns"]) == {10_000}
    assert (spans["launch_ns"] == -1).all()
