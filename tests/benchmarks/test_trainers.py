"""The campaign of other people's trainers: what it takes for right, its cases, and a job of it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from argparse import Namespace
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import trainer_modern, trainer_troubles
from benchmarks.jobs import run_ranks
from benchmarks.trainer_faults import FAULTS, HEALTHY, LONG, Disturbance
from benchmarks.trainer_ranks import DONE, Plan, Stage
from benchmarks.trainer_troubles import TROUBLES, Site, TroubledRank
from benchmarks.trainers import (
    MISSED,
    MODERN_ON_CORES,
    MODERN_ON_GPUS,
    ON_CORES,
    ON_GPUS,
    OTHER,
    RIGHT,
    UNDECIDED,
    WRONG,
    Campaign,
    Case,
    Row,
    _is_traced_only,
    _suspected,
    cases_of,
    ground_of,
    judge,
    judge_kept,
    modern_cases_of,
    render,
    score,
)
from megascan.reader import read_trace
from tests import ranks

HOGS = ("busy machine", "crowded core")
THIRD_TROUBLE = modern_cases_of("moe", 2, "gpu", 1)[3].fault
TINY = {"hidden": 32, "heads": 2, "layers": 4, "sequence": 16, "microbatches": 2}


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
        ("large heap", [finding([2], "gc", "job")], "job", RIGHT),
        ("quota of host", [finding([2], "host")], "degraded", RIGHT),
        ("quota of host", [finding([2])], "degraded", OTHER),
        ("link contention", [finding([2, 3], "link")], "degraded", RIGHT),
        ("link contention", [finding([3])], "degraded", RIGHT),
        ("link contention", [finding([1])], "degraded", WRONG),
        ("rank 0 saves", [finding([0], "host")], "degraded", WRONG),
        ("rank 0 saves", [finding([0], "checkpoint", "job")], "job", RIGHT),
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
    assert "| 3 | 1.50 | 1.00 | – | missed |" in slow


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


@pytest.mark.parametrize(("device", "num_ranks"), [("cpu", 2), ("cpu", 4), ("gpu", 2), ("gpu", 4)])
def test_modern_jobs_have_a_few_troubles_and_in_some_seeds_all(device, num_ranks):
    tried = Counter()
    for seed in range(1, 4):
        for loop in trainer_modern.LOOPS:
            cases = modern_cases_of(loop, num_ranks, device, seed)
            assert [case.fault for case in cases].count(HEALTHY.name) == 1
            assert len({case.file_name for case in cases}) == len(cases) == 5
            assert all(0 <= case.rank < num_ranks for case in cases)
            tried.update(case.fault for case in cases)
    possible = {name for name, trouble in TROUBLES.items() if device in trouble.devices}
    assert set(tried) == {HEALTHY.name, *possible}
    assert len(ground_of("modern", 2).cases_of("moe", num_ranks, device, 1)) == 3


def test_every_modern_loop_has_its_jobs():
    on_cores = {loop for loops, _ in MODERN_ON_CORES for loop in loops}
    on_gpus = [loop for loops in MODERN_ON_GPUS for loop in loops]
    assert on_cores == set(trainer_modern.LOOPS)
    assert sorted(on_gpus) == sorted(trainer_modern.LOOPS)
    assert ground_of("classic").on_cores == ON_CORES


def test_pipelines_have_no_mixed_lengths_and_a_single_replica_no_longer_data():
    faults = {
        (loop, num_ranks): {case.fault for case in modern_cases_of(loop, num_ranks, "cpu", 1, 99)}
        for loop in ("moe", "context", "interleaved")
        for num_ranks in (2, 4)
    }
    has_longer = {key for key, names in faults.items() if "longer data" in names}
    assert has_longer == {("moe", 2), ("moe", 4), ("context", 4), ("interleaved", 4)}
    assert {loop for (loop, _), names in faults.items() if "mixed lengths" in names} == {
        "moe", "context",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "broken", "left_out"),
    [
        ("modern", ("moe", HEALTHY.name), 5),
        ("modern", ("moe", THIRD_TROUBLE), 1),
        ("classic", ("moe", THIRD_TROUBLE), 7),
    ],
)
def test_a_modern_job_goes_on_without_what_failed(
    kind, broken, left_out, tmp_path, monkeypatch, capsys
):
    options = {"device": "cpu", "ranks": 2, "seconds": 60, "troubles": None}
    campaign = Campaign(Namespace(set=kind, **options), tmp_path)
    ran = []

    def run_ranks(waiting, *_):
        while waiting and (waiting[0].loop, waiting[0].fault) != broken:
            ran.append(waiting.pop(0))
        return "what went wrong"

    monkeypatch.setattr(campaign, "_run_ranks", run_ranks)
    cases = [case for loop in ("moe", "lora") for case in modern_cases_of(loop, 2, "gpu", 1)]
    campaign._job(cases, [], None)
    assert len(ran) == len(cases) - left_out
    assert len(campaign.failed) == 1
    assert "what went wrong" in capsys.readouterr().err


def test_bursts_are_not_looked_for_in_a_profile():
    assert _is_traced_only(case_of("bandwidth hog at times"))
    assert not _is_traced_only(case_of("bandwidth hog"))


class Silent:
    """A recorder that records nothing."""

    @contextmanager
    def iteration(self, number):
        yield

    def close(self):
        pass


def troubled(trouble, *, iterations, num_batches, is_here=True, scratch=Path()):
    """Go through the iterations of a training that does nothing else."""
    site = Site(device=torch.device("cpu"), is_here=is_here, scratch=scratch, iterations=iterations)
    rank = TroubledRank(trouble, site)
    with rank.acting():
        recorder = rank.reaching(lambda **_: Silent())(model=torch.nn.Linear(2, 2))
        for number in range(1, iterations + 1):
            with recorder.iteration(number):
                for _ in range(num_batches):
                    rank.load()
                    yield number, rank
        recorder.close()


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("late now and then", [6, 12, 18, 24, 30]),
        ("late from the middle on", [number for number in range(16, 31) for _ in range(2)]),
    ],
)
def test_loaders_are_late_in_these_iterations(name, late, monkeypatch):
    slept = []
    monkeypatch.setattr(trainer_troubles.time, "sleep", slept.append)
    seen = []
    for number, _ in troubled(TROUBLES[name], iterations=30, num_batches=2):
        seen += [number] * len(slept)
        slept.clear()
    assert seen == late
    list(troubled(TROUBLES[name], iterations=30, num_batches=2, is_here=False))
    assert not slept


def test_lengths_are_mixed_and_alike_within_a_replica():
    def lengths(dp_rank):
        site = {"iterations": 5, "num_batches": 3, "is_here": False}
        trouble = TROUBLES["mixed lengths"]
        return [rank.tokens(100, dp_rank) for _, rank in troubled(trouble, **site)]

    assert set(lengths(0)) == {75, 100, 125}
    assert lengths(0) == lengths(0) != lengths(1)


def test_the_first_rank_alone_saves_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_troubles.dist, "get_rank", lambda: 0)
    saved = []
    monkeypatch.setattr(torch, "save", lambda weights, _: saved.append(weights))
    for number, _ in troubled(TROUBLES["rank 0 saves"], iterations=30, num_batches=1):
        assert len(saved) == (number > 11) + (number > 21)
    assert [weight.shape for weight in saved[0]] == [(2, 2), (2,)]


def test_a_quota_stops_a_process_again_and_again_and_leaves_it_running():
    with ranks.forked(), subprocess.Popen(["sleep", "60"]) as process:
        state = psutil.Process(process.pid).status
        with trainer_troubles._helped("quota", str(process.pid)):
            seen = Counter(state() for _ in range(60) if time.sleep(0.01) is None)
        assert state() != psutil.STATUS_STOPPED
        process.send_signal(signal.SIGKILL)
    assert seen[psutil.STATUS_STOPPED] and len(seen) > 1


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_modern_loop_trains_and_is_traced_whatever_happens(tmp_path):
    """Each with one of its troubles that leave the cores of this machine alone, and its groups."""
    cases = [
        next(
            case
            for case in modern_cases_of(loop, 2, "cpu", 1)[1:]
            if case.fault not in HOGS and not getattr(TROUBLES[case.fault], "needs", "")
        )
        for loop in trainer_modern.LOOPS
    ]
    stages = tuple(
        Stage(loop=case.loop, fault=case.fault, rank=case.rank, folder=str(tmp_path / case.loop))
        for case in cases
    )
    plan = Plan(device="cpu", sizes=TINY, cores=(), seed=1, num_traced=7, stages=stages)
    plan.write(tmp_path / "plan.json")
    with ranks.forked():
        run_ranks(2, ["benchmarks.trainer_ranks", str(tmp_path / "plan.json")])
    for loop in trainer_modern.LOOPS:
        (tmp_path / loop / DONE).unlink()
        names = set(read_trace(tmp_path / loop).spans.column("name").to_pylist())
        assert {"forward", "backward", "optimizer", "layer"} <= names, loop
