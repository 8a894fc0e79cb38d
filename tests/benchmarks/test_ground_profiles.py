"""The ground of profiles: what is claimed of a case is so, and its files are those of Kineto."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.grounds.profiles import cases, write
from benchmarks.grounds.profiles.catalogue import Scenario
from benchmarks.grounds.profiles.engine import Engine, Trouble
from benchmarks.grounds.profiles.files import ERAS, Dress
from benchmarks.grounds.profiles.job import Job

QUIET = Job(
    dp=4, iterations=3, chip_spread=0.0, kernel_noise=0.002, wander=0.0, contention=0.0,
    gpus_per_host=4,
)  # fmt: skip
SLOW = Trouble(kind="gpu_clock", ranks=(2,), factor=1.5)


def written(folder, job, *troubles, dress=None):
    dress = dress or Dress(name="rank", informed="head")
    scenario = Scenario(
        name="here", family="here", seed=5, job=job, dress=dress, troubles=troubles
    )  # fmt: skip
    return scenario.write(folder)


def document(folder, rank=0):
    return json.loads((folder / f"rank{rank}.json").read_text())


def events_of(folder, rank, category):
    found = [each for each in document(folder, rank)["traceEvents"] if each["ph"] == "X"]
    return [each for each in found if each.get("cat") == category]


def reductions(folder, rank):
    return [each for each in events_of(folder, rank, "kernel") if "AllReduce" in each["name"]]


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases() if case.num_ranks == 2 and case.planted)
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    priced = {"cost_ratio": 1.0, "held_cost_ratio": 1.0}
    assert [replace(each, **priced) for each in planted] == list(case.planted)
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_each_kernel_follows_its_launch_and_streams_keep_order(tmp_path):
    written(tmp_path, QUIET)
    launches = {
        each["args"]["correlation"]: each for each in events_of(tmp_path, 0, "cuda_runtime")
    }
    kernels = events_of(tmp_path, 0, "kernel") + events_of(tmp_path, 0, "gpu_memcpy")
    own = [each for each in kernels if each["args"]["correlation"] in launches]
    assert len(own) > 0.7 * len(kernels)  # the others were launched before the profile began
    assert all(launches[each["args"]["correlation"]]["ts"] < each["ts"] for each in own)
    by_stream = {}
    for each in sorted(kernels, key=lambda each: each["ts"]):
        by_stream.setdefault(each["tid"], []).append(each)
    assert set(by_stream) == {7, 20}
    for stream in by_stream.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(stream))
    flows = [each for each in document(tmp_path)["traceEvents"] if each["ph"] in "sf"]
    sides = [{each["id"] for each in flows if each["ph"] == side} for side in "sf"]
    assert sides[0] == sides[1] == {each["args"]["correlation"] for each in own}


def test_operators_lie_within_each_other(tmp_path):
    written(tmp_path, QUIET)
    for thread in {each["tid"] for each in events_of(tmp_path, 1, "cpu_op")}:
        found = [each for each in events_of(tmp_path, 1, "cpu_op") if each["tid"] == thread]
        ends = []
        for each in sorted(found, key=lambda each: (each["ts"], -each["dur"])):
            while ends and ends[-1] <= each["ts"] + 0.002:
                ends.pop()
            assert not ends or each["ts"] + each["dur"] <= ends[-1] + 0.01
            ends.append(each["ts"] + each["dur"])


def test_mates_spin_in_the_reduction_until_the_slow_gpu_comes(tmp_path):
    (planted,) = written(tmp_path, QUIET, SLOW)
    assert 1.25 < planted.cost_ratio < 1.5
    spun = [sum(each["dur"] for each in reductions(tmp_path, rank)) for rank in range(4)]
    assert min(spun[0], spun[1], spun[3]) > 3 * spun[2]
    ends = [
        [each["ts"] + each["dur"] for each in reductions(tmp_path, rank)[-3:]] for rank in range(4)
    ]
    assert np.ptp(ends, axis=0).max() < 3.0  # one host, one clock


def test_a_slow_stage_makes_its_neighbours_wait(tmp_path):
    job = replace(QUIET, dp=1, pp=4, style="megatron", num_microbatches=6, layers=2)
    (planted,) = written(tmp_path, job, replace(SLOW, ranks=(1,)))
    assert 1.1 < planted.cost_ratio < 1.5
    waits = [
        sum(each["dur"] for each in events_of(tmp_path, rank, "kernel") if each["tid"] in (32, 36))
        for rank in range(4)
    ]
    assert min(waits[0], waits[2], waits[3]) > 1.5 * waits[1]


@pytest.mark.parametrize("style", ["fsdp", "moe", "tp"])
def test_all_styles_run_and_a_slow_gpu_costs(style):
    job = {
        "fsdp": replace(QUIET, style="fsdp"),
        "moe": replace(QUIET, model="moe"),
        "tp": replace(QUIET, dp=2, tp=2, style="megatron"),
    }[style]
    assert Engine(job, 5, (SLOW,)).run() > 1.15 * Engine(job, 5).run()


def test_a_fault_after_the_profile_costs_nothing(tmp_path):
    (planted,) = written(tmp_path, QUIET, replace(SLOW, iterations=(1000,)))
    assert planted.cost_ratio == 1.0


def test_a_slow_gpu_hides_behind_a_slower_host(tmp_path):
    (planted,) = written(tmp_path, replace(QUIET, launch_ratio=2.0), replace(SLOW, factor=1.2))
    assert planted.cost_ratio < 1.03


def test_slow_memory_leaves_products_alone(tmp_path):
    written(tmp_path, QUIET, Trouble(kind="gpu_memory", ranks=(1,), factor=2.0))

    def total(rank, words):
        kernels = events_of(tmp_path, rank, "kernel")
        return sum(each["dur"] for each in kernels if words in each["name"])

    assert total(1, "gemm") == pytest.approx(total(0, "gemm"), rel=0.02)
    assert total(1, "multi_tensor") > 1.8 * total(0, "multi_tensor")


@pytest.mark.parametrize("era", ERAS)
def test_each_version_writes_its_own_dialect(era, tmp_path):
    written(tmp_path, replace(QUIET, era=era), dress=Dress(name="rank", informed="tail"))
    trace = document(tmp_path, 1)
    events = trace["traceEvents"]
    assert trace.get("distributedInfo", {}).get("rank") == (None if era == "1.8" else 1)
    assert ("baseTimeNanoseconds" in trace) == (era in {"2.4", "2.7"})
    whole = era in {"1.8", "1.12", "2.0"}
    assert all(isinstance(each["ts"], int) == whole for each in events)
    nccl = [each for each in events if each["ph"] == "X" and each["name"].startswith("nccl")]
    nccl = [each for each in nccl if each["cat"].lower() == "kernel"]
    assert len(nccl) >= 9
    assert ("Collective name" in nccl[0]["args"]) == (era in {"2.2", "2.4", "2.7"})
    ranks = nccl[0]["args"].get("Process Group Ranks")
    assert ranks == ("[0, 1, 2, 3]" if era in {"2.4", "2.7"} else None)


def test_files_may_be_compressed_rewritten_and_named_after_hosts(tmp_path):
    dress = Dress(name="tensorboard", informed="head", zipped=True, rewritten=True)
    written(tmp_path, replace(QUIET, annotated=False), dress=dress)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 4
    assert all(path.name.startswith("node00_") and path.suffix == ".gz" for path in paths)
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    assert {each["distributedInfo"]["rank"] for each in traces} == {0, 1, 2, 3}
    assert "ProfilerStep" not in json.dumps(traces[0])


@pytest.mark.parametrize(
    ("kind", "job", "hit", "nameable"),
    [
        ("nvlink", Job(tp=2, dp=2), (2, 3), (2, 3)),
        ("nvlink", Job(tp=4, dp=2), (0, 1), (0, 1, 2, 3)),  # one ring goes over the pair
        ("nic", Job(pp=4, gpus_per_host=1), (0,), (0, 1)),  # the first host has but one neighbour
        ("nic", Job(pp=4, gpus_per_host=1), (1,), (1,)),
        ("gpu_clock", Job(dp=4), (1,), (1,)),
    ],
)
def test_ranks_that_share_all_slow_links_are_all_nameable(kind, job, hit, nameable):
    trouble = Trouble(kind=kind, ranks=hit, factor=2.0)
    scenario = Scenario(
        name="here", family="here", seed=1, job=job, troubles=(trouble,),
        dress=Dress(name="rank", informed="head"),
    )  # fmt: skip
    assert scenario.case().planted[0].ranks == nameable


def test_launches_grow_with_the_data_and_gradients_of_weights_do_not(tmp_path):
    written(tmp_path, replace(QUIET, long_replica=(1, 1.5)))

    def grids(rank, words):
        kernels = events_of(tmp_path, rank, "kernel")
        return {tuple(each["args"]["grid"]) for each in kernels if words in each["name"]}

    assert not grids(0, "flash_fwd") & grids(1, "flash_fwd")
    assert grids(0, "_nt_") == grids(1, "_nt_")
    assert grids(0, "multi_tensor") == grids(1, "multi_tensor")


def test_the_group_of_a_pipeline_is_listed(tmp_path):
    written(tmp_path, replace(QUIET, dp=2, pp=2, style="megatron", num_microbatches=4))
    groups = document(tmp_path, 3)["distributedInfo"]["pg_config"]
    assert [each["ranks"] for each in groups if each["pg_desc"] == "mesh_pp"] == [[1, 3]]
