"""The ground of clusters: what is claimed of a case is so, and its files are those of a tracer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.grounds.cluster import cases, write
from benchmarks.grounds.cluster.hardware import MS, Trouble, shared_finish
from benchmarks.grounds.cluster.jobs import Job
from benchmarks.grounds.cluster.scenario import Scenario
from benchmarks.grounds.kinds import EXPERTS
from megascan.reader import read_trace

QUIET = Job(
    tp=2, dp=2, num_traced=4, warm_up_ratio=1.0, layer_ns=3 * MS, output_layer_ratio=0.1,
)  # fmt: skip


def spans_of(folder, rank, name=None):
    for path in folder.iterdir():
        events = json.loads(path.read_text())
        if events[0]["args"]["rank"] == rank:
            return [each for each in events if each["ph"] == "X" and name in (None, each["name"])]
    raise AssertionError(f"no file of rank {rank}")


def written(folder, job, *troubles, seed=5):
    scenario = Scenario(name="here", family="here", seed=seed, job=job, troubles=troubles)
    return scenario.write(folder)


def mean_us(spans):
    return float(np.mean([each["dur"] for each in spans]))


@pytest.mark.parametrize(
    "name",
    [
        "gpu-clock-tp2dp2pp2vpp2-s1014",
        "invisible-ep-ep4dp8-s15000",
        "healthy-fsdp8-s17017",
        "nic-tp4dp2pp2n-s7002",
        "pauses-ddp2-s29001",
        "gc-dp2-s12010",
    ],
)  # fmt: skip
def test_files_are_read_without_complaint(name, tmp_path):
    case = next(case for case in cases() if case.name == name)
    planted = write(case, tmp_path / "traces")
    unpriced = [replace(each, cost_ratio=1.0, held_cost_ratio=1.0) for each in planted]
    assert unpriced == list(case.planted)
    command = ["aggregate", "-b", tmp_path / "traces", "-o", tmp_path / "timeline.json"]
    done = subprocess.run(
        [sys.executable, "-m", "megascan", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{case.num_ranks} of {case.num_ranks} ranks" in done.stdout
    assert "unmatched: none; duplicates: 0" in done.stdout


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases() if case.name == "gpu-clock-tp2dp2pp2vpp2-s1014")
    assert write(case, tmp_path / "once") == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_mates_wait_for_the_slow_gpu(tmp_path):
    slow = Trouble(kind="gpu_clock", ranks=(3,), factor=1.5)
    (planted,) = written(tmp_path, QUIET, slow)
    assert 1.3 < planted.cost_ratio < 1.5
    reductions = [
        [span for span in spans_of(tmp_path, rank, "all_reduce") if span["args"]["group"] == group]
        for rank, group in ((2, "tp@2"), (3, "tp@2"), (0, "tp@0"))
    ]
    mate, culprit, other = map(mean_us, reductions)
    assert mate > 2 * culprit
    assert mate > 2 * other
    gradients = [spans_of(tmp_path, rank, "all_reduce") for rank in (1, 3)]
    waits = [
        mean_us([each for each in found if "dp_cp" in each["args"]["group"]]) for found in gradients
    ]
    assert waits[0] > waits[1] + 5000  # the other replica has come long before


def test_unrecorded_reductions_hide_the_slow_gpu_within_its_group(tmp_path):
    slow = Trouble(kind="gpu_clock", ranks=(3,), factor=1.5)
    written(tmp_path, replace(QUIET, tp_recorded=False), slow)
    passes = [mean_us(spans_of(tmp_path, rank, "forward")) for rank in range(4)]
    assert passes[2] == pytest.approx(passes[3], rel=0.05)
    assert passes[2] > 1.3 * passes[0]
    groups = {span["args"].get("group", "")[:3] for span in spans_of(tmp_path, 2)}
    assert "tp@" not in groups


def test_later_stages_wait_for_a_slow_first_one(tmp_path):
    job = replace(QUIET, tp=1, dp=1, pp=4, num_microbatches=8)
    (planted,) = written(tmp_path, job, Trouble(kind="gpu_clock", ranks=(0,), factor=2.0))
    assert planted.cost_ratio > 1.3
    waits = [mean_us(spans_of(tmp_path, rank, "recv_forward")) for rank in (1, 2, 3)]
    assert min(waits) > 2000  # about the 3 ms that the first stage takes longer
    assert not spans_of(tmp_path, 0, "recv_forward")


def test_a_fault_after_the_trace_costs_nothing(tmp_path):
    late = Trouble(kind="gpu_clock", ranks=(0,), factor=3.0, first_iteration=1000)
    (planted,) = written(tmp_path, QUIET, late)
    assert planted.cost_ratio == 1.0


def test_a_slow_gpu_hides_behind_a_host_that_is_slower_still(tmp_path):
    bound = replace(QUIET, tp=1, launch_ratio=2.0)
    (planted,) = written(tmp_path, bound, Trouble(kind="gpu_clock", ranks=(0,), factor=1.3))
    assert planted.cost_ratio < 1.05


@pytest.mark.parametrize(
    ("kind", "job", "hit", "nameable"),
    [
        ("nvlink", Job(tp=2), (1,), (0, 1)),  # nothing tells the ends of one link apart
        ("nvlink", Job(tp=2, dp=2), (1,), (1,)),
        ("nvlink", Job(pp=4), (2,), (2,)),
        ("nvlink", Job(pp=4), (3,), (2, 3)),  # the last stage has but one link
        ("gpu_clock", Job(tp=2), (1,), (1,)),
    ],
)
def test_ranks_that_share_all_slow_links_are_all_nameable(kind, job, hit, nameable):
    trouble = Trouble(kind=kind, ranks=hit, factor=2.0)
    case = Scenario(name="here", family="here", seed=1, job=job, troubles=(trouble,)).case()
    assert case.planted[0].ranks == nameable


def test_flows_share_a_nic_by_processor_sharing():
    starts = np.array([0.0, 5.0, 100.0, 0.0])
    nic = np.array([0, 0, 0, 1])
    ends = shared_finish(starts, 10.0, np.ones(4), nic)
    assert ends.tolist() == [15.0, 20.0, 110.0, 10.0]


def kinds_of(folder, job):
    """Return the kinds of each rank's layers: the same in all windows, of the layers in spans."""
    written(folder, job)
    windows = read_trace(folder).windows
    for rank, own in windows.items():
        assert all(window.kinds == own[0].kinds for window in own)
        seen = {each["args"]["layer"] for each in spans_of(folder, rank) if "layer" in each["args"]}
        if own[0].kinds and job.granularity == "full":
            assert seen == {layer for numbers in own[0].kinds.values() for layer in numbers}
    return [windows[rank][0].kinds for rank in range(job.num_ranks)]


@pytest.mark.parametrize("granularity", ["full", "base"])
def test_all_layers_of_an_even_model_are_of_one_kind(tmp_path, granularity):
    job = replace(QUIET, dp=1, pp=2, vpp=2, output_layer_ratio=2.0, granularity=granularity)
    kinds = kinds_of(tmp_path, job)
    (kind,) = kinds[0]
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert kinds == [{kind: (1, 2, 5, 6)}] * 2 + [{kind: (3, 4, 7, 8)}] * 2


def test_a_heavier_stage_has_layers_of_its_own_kind(tmp_path):
    job = replace(QUIET, tp=1, dp=1, pp=3, heavy_stage=(1, 1.25))
    first, heavier, third = kinds_of(tmp_path, job)
    assert list(first) == list(third) != list(heavier)


def test_layers_with_experts_have_no_digest(tmp_path):
    assert kinds_of(tmp_path, replace(QUIET, tp=1, ep=2)) == [{EXPERTS: (1, 2)}] * 2


def test_nothing_is_known_of_a_hybrid_of_megatron_but_of_a_plain_one(tmp_path):
    hybrid = replace(QUIET, tp=1, pattern="MA", layers=4)
    assert kinds_of(tmp_path / "megatron", hybrid) == [{}] * 2
    (path, *_) = (tmp_path / "megatron").iterdir()
    assert "kinds" not in path.read_text()
    one, other = kinds_of(tmp_path / "plain", replace(hybrid, style="fsdp"))
    assert one == other and sorted(one.values()) == [(1, 3), (2, 4)]
