"""The ground "harbour": its files are read, its physics and its truth are what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate.merge import build_timeline
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.harbour import cases, slowness, write, write_varied
from benchmarks.grounds.harbour.catalogue import scenario_of
from benchmarks.grounds.harbour.files import write_files
from benchmarks.grounds.harbour.hardware import Site
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.network import suspects
from benchmarks.grounds.harbour.scenario import Scenario, simulate
from benchmarks.grounds.harbour.trouble import Trouble
from megascan.reader import read_trace

EVEN = Site(chip_spread_ratio=0.0, wander_ratio=0.0, host_wander_ratio=0.0, ranks_per_host=4)
QUIET = Job(site=EVEN, num_iterations=4)


def step_s(job, *troubles):
    return float(np.median(simulate(Scenario(job=job, seed=3, troubles=troubles)).iteration_s))


def cost(job, kind, ranks, factor, **more):
    return step_s(job, Trouble(kind=kind, ranks=ranks, factor=factor, **more)) / step_s(job)


@pytest.mark.parametrize(
    "job",
    [
        replace(QUIET, tp=2, pp=2, vpp=2, dp=2, layers=(1,) * 4),
        replace(QUIET, pp=4, layers=(1,) * 4, num_microbatches=6, overlap_grads=False),
        replace(QUIET, tp=2, dp=2, sequence_parallel=False, recompute="selective"),
        replace(QUIET, dp=4, ep=2, experts=4, recompute="full", distributed_optimizer=False),
        replace(QUIET, tp=2, cp=2, dp=2, lengths="counted", length_spread_ratio=0.2),
        replace(QUIET, dp=4, overlap_params=True, checkpoint_every=2, collections="scattered"),
        replace(QUIET, pp=2, dp=2, layers=(2, 1), granularity="base", interval=5, window=2),
    ],
    ids=["interleaved", "pipeline", "tensor", "experts", "context", "checkpoints", "base"],
)
def test_files_are_read_without_complaint(job, tmp_path):
    write_files(simulate(Scenario(job=job, seed=3), recording=True), tmp_path)
    trace = read_trace(tmp_path)
    spans = build_timeline(trace).spans.to_pandas()
    assert set(spans["rank"]) == set(range(job.num_ranks))
    talks = spans["kind"].isin(("collective", "p2p"))
    assert talks.any() and (spans.loc[talks, "match"] >= 0).all()
    traced = spans.loc[spans["kind"] == "iteration", "iteration"]
    assert set(traced) == set(job.iterations)


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases(5) if case.family == "gpu_clock 20%")
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    unpriced = [replace(each, cost_ratio=1.0, held_cost_ratio=1.0) for each in planted]
    assert unpriced == list(case.planted) and planted[0].cost_ratio > 1.0


def test_missing_ranks_leave_no_file(tmp_path):
    case = next(case for case in cases() if case.family == "healthy: missing rank")
    assert write(case, tmp_path) == ()
    assert len(list(tmp_path.iterdir())) == case.num_ranks - 1


@pytest.mark.parametrize("draw", [0, 7])
def test_the_truth_names_whom_one_may_name_and_when(draw):
    for case in cases(draw):
        job, truths = scenario_of(case).job, case.planted
        assert all(set(truth.ranks) <= set(range(case.num_ranks)) for truth in truths)
        assert not case.at_fault & set(job.missing)
        for trouble, truth in zip(scenario_of(case).troubles, truths, strict=True):
            assert set(trouble.ranks) <= set(truth.ranks)
            assert truth.first_iteration <= job.iterations[-2]
            assert truth.owner == "node" or case.family.startswith("look_alike")


def test_a_slow_gpu_costs_what_it_computes_in_a_job_of_one_stage():
    job = replace(QUIET, dp=4, site=replace(EVEN, launch_us=0.5), layers=(4,))
    own = simulate(Scenario(job=job, seed=3))
    busy = own.own_s.mean() / own.iteration_s.mean()
    assert cost(job, "gpu_clock", (2,), 1.5) == pytest.approx(1 + 0.5 * busy, rel=0.08)
    assert 1.02 < cost(job, "hbm", (2,), 1.5) < 1.2


def test_a_slow_stage_hides_in_a_pipeline_behind_a_slower_one():
    job = replace(QUIET, pp=4, layers=(2, 2, 2, 4), num_microbatches=8)
    assert cost(job, "gpu_clock", (1,), 1.3) < 1.06 < cost(job, "gpu_clock", (3,), 1.3)


def test_half_a_nic_shows_in_the_rings_of_replicas():
    job = replace(QUIET, dp=8, overlap_grads=False, site=replace(EVEN, num_nics=1))
    assert cost(job, "nic", (0, 1, 2, 3), 2.0) > 1.2
    assert cost(replace(job, dp=4), "nic", (0, 1, 2, 3), 2.0) == pytest.approx(1.0)


def test_a_slow_thread_costs_where_launches_bound_the_job():
    assert cost(replace(QUIET, dp=4), "host_cpu", (0,), 2.0) < 1.1
    assert cost(replace(QUIET, dp=4, hidden=512, sequence=1024), "host_cpu", (0,), 2.0) > 1.5


def test_a_loader_that_keeps_up_costs_nothing():
    job = replace(QUIET, dp=4)
    assert cost(job, "loader", (1,), 1.5) == pytest.approx(1.0, abs=0.02)
    assert cost(job, "loader", (1,), 5.0) > 1.3


def test_links_that_look_alike_are_named_together():
    ring, line = replace(QUIET, tp=4, dp=2), replace(QUIET, tp=4, pp=3, layers=(1,) * 3)
    assert suspects(ring, "nic", (0, 1, 2, 3)) == tuple(range(8))
    assert suspects(line, "nic", (0, 1, 2, 3)) == (0, 1, 2, 3)
    assert suspects(line, "nvlink", (5,)) == (4, 5, 6, 7)


def test_slowness_is_that_of_chips_and_faults():
    case = next(case for case in cases() if case.family == "gpu_clock 100%")
    (culprit,) = case.planted[0].ranks
    ratios = slowness(case).mean(axis=1)
    assert 1.5 < ratios[culprit] < 2.1
    assert np.delete(ratios, culprit) == pytest.approx(1.0, abs=0.08)


def test_a_varied_job_has_the_chips_that_were_asked_for(tmp_path):
    case = next(case for case in cases() if case.family == "two faults: chips")
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    varied = Variation(chip_spread_ratio=0.0, slow_rank=2, factor=1.5)
    slow = write_varied(case, varied, tmp_path)
    assert even.shape == (case.num_ranks, len(scenario_of(case).job.iterations))
    ratios = (slow / even).mean(axis=1)
    assert 1.2 < ratios[2] < 1.5 and np.delete(ratios, 2) == pytest.approx(1.0, abs=0.02)
    assert len(list(tmp_path.iterdir())) == case.num_ranks
