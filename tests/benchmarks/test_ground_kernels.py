"""The ground of jobs simulated kernel by kernel: what its cases are and that its files hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.grounds.kernels import cases, write
from benchmarks.grounds.kernels.cluster import Trouble
from benchmarks.grounds.kernels.job import Job, Message, Pass, schedule
from benchmarks.grounds.kernels.run import Plan
from benchmarks.grounds.kinds import EXPERTS
from megascan.reader import read_trace

SMALL = Job(name="small", vocabulary=8192, windows=2, layers=1)


def _job(**fields) -> Job:
    return Job(**{**vars(SMALL), **fields})


def _spans(directory: Path, rank: int) -> list[dict]:
    for path in directory.glob("benchmark-data-*.json"):
        events = json.loads(path.read_text())
        if events[0]["args"]["rank"] == rank:
            return [event for event in events if event["ph"] == "X"]
    raise AssertionError(f"no file of rank {rank}")


def _time(spans: list[dict], name: str, first_iteration: int = 2) -> float:
    return sum(
        span["dur"]
        for span in spans
        if span["name"] == name and span["args"]["iteration"] >= first_iteration
    )


def _slow(rank: int, factor: float = 2.0) -> Trouble:
    return Trouble(kind="gpu_clock", cause="compute", ranks=(rank,), factor=factor)


def test_there_are_some_hundred_cases_with_different_names():
    names = [case.name for case in cases()]
    assert 250 <= len(names) <= 350
    assert len(set(names)) == len(names)


def test_cases_are_the_same_in_every_process():
    code = "from benchmarks.grounds.kernels import cases; print(list(cases()))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(list(cases()))


def test_about_a_third_of_the_cases_is_unseen():
    unseen = sum(case.unseen for case in cases())
    assert 0.25 < unseen / len(list(cases())) < 0.42


def test_only_families_of_faults_have_ranks_at_fault():
    innocent = ("healthy", "noisy healthy", "host-bound healthy", "look_alike")
    for case in cases():
        guilty = not case.family.startswith(innocent)
        assert bool(case.at_fault) is guilty, case.name
        assert all(0 <= rank < case.num_ranks for rank in case.at_fault), case.name


def test_a_fault_never_strikes_the_whole_job():
    for case in cases():
        assert len(case.at_fault) < case.num_ranks, case.name


def test_worlds_reach_from_two_ranks_to_128():
    sizes = Counter(case.num_ranks for case in cases())
    assert min(sizes) == 2
    assert sizes[128] >= 3
    assert set(sizes) >= {2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    "job",
    [
        _job(pp=4, microbatches=8),
        _job(pp=4, microbatches=2),
        _job(pp=4, vpp=2, microbatches=8),
        _job(pp=2, vpp=3, microbatches=4),
    ],
    ids=["1F1B", "fewer microbatches than stages", "interleaved", "three chunks"],
)
def test_every_message_of_a_schedule_has_both_ends_and_every_pass_happens_once(job):
    halves: Counter[tuple] = Counter()
    for stage in range(job.pp):
        actions = schedule(job, stage)
        passes = [action for action in actions if isinstance(action, Pass)]
        assert len(set(passes)) == len(passes) == 2 * job.microbatches * job.vpp
        for message in (each for action in actions if not isinstance(action, Pass)
                        for each in action):  # fmt: skip
            assert isinstance(message, Message)
            ends = (stage, message.peer) if message.sends else (message.peer, stage)
            halves[*ends, message.direction, message.microbatch, message.sends] += 1
    sent = {key[:-1]: count for key, count in halves.items() if key[-1]}
    received = {key[:-1]: count for key, count in halves.items() if not key[-1]}
    assert sent == received != {}


@pytest.mark.parametrize(
    "job",
    [
        _job(tp=2, pp=2, dp=2, gpus_per_host=4),
        _job(pp=2, vpp=2, dp=2),
        _job(dp=4, ep=2, tp=2, experts=True, recompute=True),
        _job(dp=4, fsdp=True),
        _job(dp=2, overlap_gradients=True, pinned=False),
    ],
    ids=["3D", "interleaved", "experts", "sharded", "overlapped"],
)
def test_files_are_aggregated_without_complaint(job, tmp_path):
    trouble = Trouble(kind="gc", cause="gc", ranks=(1,), pause_probability=0.3, pause_ns=1e7)
    Plan(job=job, troubles=(trouble,)).write(5, tmp_path / "trace")
    merged = tmp_path / "merged.json"
    command = [sys.executable, "-m", "megascan", "aggregate", "-b", str(tmp_path / "trace")]
    done = subprocess.run([*command, "-o", str(merged)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads(merged.read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    timeline = next(event for event in events if event["name"] == "megascan_timeline")["args"]
    completeness = timeline["completeness"]
    assert completeness["ranks"] == list(range(job.num_ranks))
    assert completeness["num_unmatched"] == {"collective": 0, "p2p": 0}
    assert completeness["num_unfinished_spans"] == completeness["num_duplicates"] == 0
    assert all(clock["residual_median_ns"] < 5e3 for clock in timeline["clocks"])


def test_tensor_parallel_peers_wait_for_a_slow_chip(tmp_path):
    Plan(job=_job(tp=4), troubles=(_slow(2),)).write(1, tmp_path)
    waits = {rank: _time(_spans(tmp_path, rank), "reduce_scatter") for rank in range(4)}
    assert min(waits, key=waits.__getitem__) == 2
    assert sorted(waits.values())[1] > 3 * waits[2]


def test_a_pipeline_waits_for_its_slow_stage(tmp_path):
    Plan(job=_job(pp=4, microbatches=8), troubles=(_slow(1),)).write(1, tmp_path)
    passes = [_time(_spans(tmp_path, rank), "forward") for rank in range(3)]
    received = [_time(_spans(tmp_path, rank), "recv_forward") for rank in range(4)]
    assert passes[1] > 1.6 * passes[2]
    assert received[2] > 2 * received[1]


def test_replicas_wait_in_the_gradient_reduction(tmp_path):
    Plan(job=_job(dp=4), troubles=(_slow(3),)).write(1, tmp_path)
    waits = [_time(_spans(tmp_path, rank), "reduce_scatter") for rank in range(4)]
    assert min(waits) == waits[3]
    assert min(waits[:3]) > 1.3 * waits[3]


def test_a_slow_clock_strikes_products_more_than_the_memory_bound_optimizer(tmp_path):
    job = _job(dp=2, distributed_optimizer=False)
    Plan(job=job, troubles=(_slow(1, 1.5),)).write(1, tmp_path)
    usual, slow = _spans(tmp_path, 0), _spans(tmp_path, 1)
    assert _time(slow, "mlp") > 1.35 * _time(usual, "mlp")
    assert _time(slow, "optimizer") < 1.2 * _time(usual, "optimizer")


def test_a_late_loader_delays_its_own_replica_only(tmp_path):
    trouble = Trouble(kind="loader", cause="loader", ranks=(1,), factor=100.0)
    Plan(job=_job(dp=4), troubles=(trouble,)).write(1, tmp_path)
    loads = [_time(_spans(tmp_path, rank), "batch-generator") for rank in range(4)]
    assert loads[1] > 20 * max(loads[0], loads[2], loads[3])


def test_an_onset_leaves_the_iterations_before_as_they_were(tmp_path):
    later = Trouble(kind="gpu_clock", cause="compute", ranks=(1,), factor=2.0, first_iteration=6)
    job = _job(dp=2)
    Plan(job=job, troubles=(later,)).write(1, tmp_path / "with")
    Plan(job=job).write(1, tmp_path / "without")
    struck, usual = (_spans(tmp_path / each, 1) for each in ("with", "without"))
    assert [_length(s) for s in struck if _early(s)] == [_length(s) for s in usual if _early(s)]
    assert _time(struck, "forward", 6) > 1.6 * _time(usual, "forward", 6)


def _early(span: dict) -> bool:
    return span["args"]["iteration"] < 6


def _length(span: dict) -> tuple[str, float]:
    return span["name"], round(span["dur"], 2)


def test_what_a_cause_costs_grows_with_it_and_nothing_costs_nothing(tmp_path):
    costs = []
    for factor in (1.0, 1.1, 1.5):
        plan = Plan(job=_job(dp=2, pp=2), troubles=(_slow(1, factor),))
        whole, (without,) = plan.write(9, tmp_path / f"{factor}")
        costs.append(float(whole.mean() / without.mean()))
    assert costs[0] == 1.0
    assert 1.0 < costs[1] < costs[2] < 1.6


def test_the_same_case_is_written_byte_by_byte_the_same(tmp_path):
    case = next(case for case in cases() if case.num_ranks == 4 and case.family == "two faults")
    planted = [write(case, tmp_path / each) for each in ("one", "two")]
    assert planted[0] == planted[1]
    assert all(cause.cost_ratio > 0.9 for cause in planted[0])
    files = [sorted((tmp_path / each).iterdir()) for each in ("one", "two")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    assert len(files[0]) == 4


def _kinds(directory: Path, job: Job, *troubles: Trouble) -> list[dict[str, tuple[int, ...]]]:
    """Return the kinds of each rank's layers: the same in all windows, of the layers in spans."""
    Plan(job=job, troubles=troubles).write(5, directory)
    windows = read_trace(directory).windows
    for rank, own in windows.items():
        assert all(window.kinds == own[0].kinds for window in own)
        layers = {layer for numbers in own[0].kinds.values() for layer in numbers}
        spans = _spans(directory, rank)
        assert layers == {span["args"]["layer"] for span in spans if "layer" in span["args"]}
    return [windows[rank][0].kinds for rank in range(job.num_ranks)]


def test_all_layers_of_an_even_model_are_of_one_kind(tmp_path):
    kinds = _kinds(tmp_path, _job(tp=2, pp=2, vpp=2), _slow(1))
    (kind,) = kinds[0]
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert kinds == [{kind: (1, 3)}] * 2 + [{kind: (2, 4)}] * 2


def test_a_heavier_stage_has_layers_of_its_own_kind_but_a_heavy_output_none(tmp_path):
    job = _job(pp=3, layers=2)
    for kind, num_kinds in (("heavy_stage", 2), ("heavy_output", 1)):
        trouble = Trouble(kind=kind, cause="stage_imbalance", owner="job", ranks=(2,), factor=1.2)
        first, second, third = (tuple(one) for one in _kinds(tmp_path / kind, job, trouble))
        assert first == second and len({*first, *third}) == num_kinds


def test_layers_with_experts_have_no_digest(tmp_path):
    assert _kinds(tmp_path, _job(dp=2, ep=2, experts=True)) == [{EXPERTS: (1,)}] * 2
