"""The campaign of other people's trainers: what it takes for right, its cases, and a job of it."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from benchmarks.jobs import run_ranks
from benchmarks.trainer_faults import FAULTS, HEALTHY, LONG, Disturbance
from benchmarks.trainer_ranks import Plan, Stage
from benchmarks.trainers import (
    MISSED,
    ON_CORES,
    ON_GPUS,
    OTHER,
    RIGHT,
    UNDECIDED,
    WRONG,
    Case,
    Row,
    _suspected,
    cases_of,
    judge,
    judge_kept,
    render,
    score,
)
from tests import ranks


def case_of(fault):
    return Case(loop="ddp", num_ranks=4, fault=fault, rank=2, seed=1)


def finding(ranks, cause="compute", owner="node"):
    return {"ranks": list(ranks), "cause": cause, "owner": owner}


@pytest.mark.parametrize(
    ("fault", "findings", "verdict", "result"),
    [
        ("slow x1.3", [finding([2])], "degraded", RIGHT),
        ("slow x1.3", [finding([2], "host")], "degraded", OTHER),
        ("slow x1.3", [finding([2], owner="undecided")], "undecided", UNDECIDED),
        ("slow x1.3", [], "healthy", MISSED),
        ("slow x1.3", [finding([2]), finding([3])], "degraded", WRONG),
        ("slow x1.3", [finding([2, 3])], "degraded", WRONG),
        ("healthy", [], "healthy", RIGHT),
        ("healthy", [finding([2])], "degraded", WRONG),
        ("longer data", [finding([2], "sequence_imbalance", "job")], "job", RIGHT),
        ("garbage", [finding([2], "gc", "job")], "job", RIGHT),
        ("garbage", [finding([1], "gc", "job")], "job", WRONG),
        ("garbage", [], "healthy", MISSED),
    ],
)
def test_only_the_faulty_rank_may_be_named(fault, findings, verdict, result):
    assert score(case_of(fault), findings, verdict) == result


def test_every_job_is_tried_healthy_and_each_fault_meets_some_job():
    tried = Counter()
    on_gpus = tuple((loops, num_ranks) for loops in ON_GPUS for num_ranks in (2, 4))
    for device, jobs in (("cpu", ON_CORES), ("gpu", on_gpus)):
        for loop, num_ranks in ((loop, number) for loops, number in jobs for loop in loops):
            cases = cases_of(loop, num_ranks, device, seed=1)
            assert cases[0].fault == HEALTHY.name
            assert all(0 <= case.rank < num_ranks for case in cases)
            assert len({case.file_name for case in cases}) == len(cases)
            tried.update(case.fault for case in cases)
    assert set(tried) == set(FAULTS)


def test_a_slow_rank_works_longer_forward_and_backward_and_others_do_not():
    """Counted in what it asks to be burnt, for times are noisy."""
    counts = {}
    for is_here in (False, True):
        asked = counts[is_here] = []
        device = torch.device("cpu")
        slow = Disturbance(FAULTS["slow x1.3"], is_here=is_here, device=device)
        slow._work = asked.append
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters())
        slow.burden(model, optimizer)
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert not counts[False]
    assert len(counts[True]) == 2 + 2 + 1  # parts forward, parts backward, the optimizer
    assert min(counts[True]) > 0


def test_one_replica_has_longer_data():
    long = Disturbance(LONG, is_here=False, device=torch.device("cpu"))
    assert [long.tokens(100, dp_rank) for dp_rank in range(3)] == [100, 125, 100]


def test_the_page_counts_by_fault_and_by_trainer():
    seen = (("healthy", RIGHT, 4.0), ("healthy", WRONG, 2.0), ("slow x1.3", MISSED, 3.0))
    rows = [
        Row(
            case=case_of(fault), result=result, verdict="v", named="", iteration_ms=iteration_ms,
            cores_ratio=1.0,
        )
        for fault, result, iteration_ms in seen
    ]  # fmt: skip
    page = render(rows, ["fsdp of 4"], "a machine", "command")
    assert "| healthy | 1 | 0 | 0 | 0 | 1 | 2 |" in page
    assert "| ddp | 1 | 0 | 0 | 1 | 1 | 3 |" in page
    assert "Failed: fsdp of 4." in page
    assert "Of 0 undecided cases" in page
    (slow,) = [line for line in page.splitlines() if "slow x1.3, rank" in line]
    assert "| 3 | 1.50 | 1.00 | missed |" in slow


@pytest.mark.parametrize(("findings", "notes", "suspected"), [
    ([finding([], owner="undecided"), finding([3], owner="undecided")], [], (3,)),
    ([finding([1], owner="job")], ["the slowest beside its peers is rank 2: 1.4x"], (2,)),
    ([], ["each rank has one peer only"], ()),
])  # fmt: skip
def test_whom_an_undecided_verdict_points_at_is_counted(findings, notes, suspected):
    assert _suspected(findings, notes) == suspected
    row = Row(
        case=case_of("slow x1.3"), result=UNDECIDED, verdict="undecided", named="",
        iteration_ms=1.0, cores_ratio=1.0, suspected=suspected,
    )  # fmt: skip
    counts = {(2,): "in 1, at nobody in 0, elsewhere in 0", (): "in 0, at nobody in 1"}
    assert counts.get(suspected, "elsewhere in 1") in render([row], [], "a machine", "command")


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_job_leaves_traces_that_can_be_judged_and_judged_again(tmp_path):
    case = Case(loop="fsdp", num_ranks=2, fault="late batches", rank=1, seed=1)
    trace = tmp_path / "trace"
    sizes = {"hidden": 32, "heads": 2, "layers": 2, "sequence": 16}
    plan = Plan(
        device="cpu", sizes={**sizes, "microbatches": 2}, cores=(), seed=1,
        stages=(Stage(loop=case.loop, fault=case.fault, rank=case.rank, folder=str(trace)),),
    )  # fmt: skip
    plan.write(tmp_path / "plan.json")
    with ranks.forked():
        run_ranks(2, ["benchmarks.trainer_ranks", str(tmp_path / "plan.json")])
    first = judge(case, trace, tmp_path / "kept", keeps_right=True)
    (packed,) = (tmp_path / "kept").rglob("*.tar.xz")
    assert judge_kept(packed) == first
    assert first.result != WRONG
    assert json.loads((trace / "case.json").read_text())["fault"] == "late batches"
