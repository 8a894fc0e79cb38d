"""The ground "foundry": its files are read, its times are those on paper, its truth is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from aggregate import build_timeline
from benchmarks.grounds.foundry import Factory, cases, slowness, write, write_varied
from benchmarks.grounds.foundry.catalogue import scenario_of
from benchmarks.grounds.foundry.faults import Fault
from benchmarks.grounds.foundry.files import write_files
from benchmarks.grounds.foundry.hardware import H100, Machines
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.simulation import _stretched
from benchmarks.grounds.ground import Variation
from megascan.reader import read_trace

EVEN = Machines(
    chip_spread_ratio=0.0,
    wander_ratio=0.0,
    kernel_noise_ratio=1e-6,
    host_noise_ratio=0.0,
    daemons_per_s=0.0,
    clock_error_s=0.0,
    ranks_per_host=4,
    num_nics=4,
)
QUIET = Job(machines=EVEN, num_iterations=4, first_iteration=101, num_microbatches=4)
LAYOUTS = {
    "replicas": replace(QUIET, dp=4),
    "tensor": replace(QUIET, tp=2, dp=2, overlap_grads=False, distributed_optimizer=False),
    "no sequence parallelism": replace(QUIET, tp=4, dp=2, sequence_parallel=False),
    "pipeline": replace(QUIET, pp=4, dp=2, layers=(2,) * 4, num_microbatches=8),
    "interleaved": replace(QUIET, pp=4, vpp=2, dp=2, layers=(1,) * 8, num_microbatches=8),
    "interleaved pair": replace(QUIET, pp=2, vpp=3, layers=(1,) * 6, num_microbatches=6),
    "experts": replace(QUIET, dp=8, ep=4, experts=8),
    "context": replace(QUIET, cp=2, tp=2, dp=2, lengths="packed", sequence=16384),
    "recompute": replace(QUIET, pp=2, dp=2, layers=(2, 2), recompute="full"),
    "selective": replace(QUIET, dp=2, recompute="selective", collections="heavy"),
    "base": replace(QUIET, tp=2, pp=2, layers=(2, 2), granularity="base"),
    "rings": replace(QUIET, tp=4, dp=4, layers=(8,), num_microbatches=1, hidden=2048),
    "windows": replace(QUIET, dp=2, num_iterations=12, window=2, first_iteration=1),
}


def run_s(job: Job, *faults: Fault) -> float:
    return float(np.median(Factory(job, 3).run(faults).iteration_s))


def cost(job: Job, kind: str, ranks: tuple[int, ...], factor: float, share: float = 1.0) -> float:
    fault = Fault(kind=kind, ranks=ranks, factor=factor, share=share)
    return run_s(job, fault) / run_s(job)


def spans_of(job: Job, folder, *faults: Fault) -> pd.DataFrame:
    factory = Factory(job, 3)
    run = factory.run(faults, recording=True)
    write_files(factory.draws, run, factory.effects(faults), folder)
    return build_timeline(read_trace(folder)).spans.to_pandas()


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_files_are_read_and_all_that_ranks_tell_each_other_is_matched(job, tmp_path):
    spans = spans_of(job, tmp_path)
    assert set(spans["rank"]) == set(range(job.num_ranks))
    talks = spans[spans["kind"].isin(("collective", "p2p"))]
    assert len(talks) and (talks["match"] >= 0).all() and (talks["transfer_ns"] >= 0).all()
    traced = spans.loc[spans["kind"] == "iteration", "iteration"]
    assert set(traced) == set(job.iterations)
    assert not talks["op"].eq("recv").any() or _ends_agree(talks)


def _ends_agree(talks: pd.DataFrame) -> bool:
    """Tell whether every message has two ends of one microbatch."""
    messages = talks[talks["kind"] == "p2p"].groupby("match")
    sizes, microbatches = messages["rank"].nunique(), messages["microbatch"].nunique()
    return bool((sizes == 2).all() and (microbatches == 1).all())


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases(5) if case.family == "throttling")
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert list(cases(5)) == list(cases(5)) and list(cases(5)) != list(cases(6))


def test_the_catalogue_is_large_enough_and_a_good_third_is_unseen():
    drawn = list(cases())
    assert len(drawn) > 280 and len({case.name for case in drawn}) == len(drawn)
    assert 0.25 < np.mean([case.unseen for case in drawn]) < 0.42
    assert 0.4 < np.mean([not case.at_fault for case in drawn]) < 0.55
    assert {case.num_ranks for case in drawn} >= {2, 8, 16, 32, 64}


@pytest.mark.parametrize("draw", [0, 7])
def test_the_truth_names_whom_one_may_name_and_when(draw):
    for case in cases(draw):
        job, sound = scenario_of(case).job, case.family.startswith(("healthy", "look_alike"))
        assert sound == (not case.at_fault)
        assert not case.family.startswith("healthy") or not case.planted
        for truth in case.planted:
            assert set(truth.ranks) <= set(range(case.num_ranks)) - set(job.missing)
            assert truth.first_iteration <= job.iterations[-2] and 0 < truth.share_of_time <= 1
            assert not truth.last_iteration or truth.last_iteration > job.iterations[0]
            assert not truth.host or len({job.machines.host_of(r) for r in truth.ranks}) == 1


def test_a_layer_takes_what_its_operations_take(tmp_path):
    """4096 tokens of 4096 numbers: 2·4096·(2.5 + 10.5)·4096² operations and causal attention."""
    spans = spans_of(replace(QUIET, dp=2, layers=(1,)), tmp_path)
    products_s = 2 * 4096 * 13 * 4096**2 / H100.product_flops
    attention_s = 2 * 4096**3 / H100.attention_flops
    memory_s = 15 * 2 * 4096**2 / H100.memory_bytes
    layers = spans.loc[spans["name"] == "transformer_layer", "duration_ns"]
    assert layers.median() * 1e-9 == pytest.approx(products_s + attention_s + memory_s, rel=0.02)


def test_a_ring_between_hosts_takes_the_bytes_of_its_slowest_card(tmp_path):
    """Eight ranks, two hosts of four cards: each card carries a quarter of 7/8 of the gradients."""
    job = replace(QUIET, dp=8, layers=(1,), overlap_grads=False)
    size = 4 * (13 * 4096**2 + 2 * 128_000 * 4096)
    alone_s = size * 7 / 8 / 4 / H100.nic_bytes
    for factor, folder in ((1.0, "sound"), (2.0, "slow")):
        fault = Fault(kind="nic", ranks=(0, 1, 2, 3), factor=factor)
        spans = spans_of(job, tmp_path / folder, fault)
        reduced = spans[(spans["name"] == "reduce_scatter")]
        sums = reduced.groupby(["iteration", "rank"])["transfer_ns"].sum().median() * 1e-9
        assert sums == pytest.approx(alone_s * factor, rel=0.08)


def test_a_pipeline_of_equal_stages_idles_as_long_as_it_fills_and_drains():
    """Four stages, eight microbatches: 3 of 11 turns are idle."""
    job = replace(QUIET, pp=4, layers=(4,) * 4, num_microbatches=8, vocabulary=1000, hidden=6144)
    run = Factory(job, 3).run()
    busy = run.own_s[:, 1:].mean() / run.iteration_s[1:].mean()
    assert busy == pytest.approx(8 / 11, abs=0.05)


def test_a_slow_clock_shows_in_its_kernels_and_in_the_waits_of_its_mates(tmp_path):
    job = replace(QUIET, tp=2, dp=2)
    spans = spans_of(job, tmp_path, Fault(kind="gpu_clock", ranks=(2,), factor=1.5))
    mlp = spans[spans["name"] == "mlp"]
    own = (mlp["self_ns"]).groupby(mlp["rank"]).median()
    assert own[2] / own[3] == pytest.approx(1.5, rel=0.03)
    assert own[0] / own[1] == pytest.approx(1.0, rel=0.01)
    within = spans[(spans["op"] == "reduce_scatter") & spans["group"].eq("tp@2")]
    waits = within["wait_ns"].groupby(within["rank"]).median()
    assert waits[3] > 20 * max(waits[2], 1_000)


def test_a_slow_clock_costs_the_share_that_computing_has():
    job = replace(QUIET, dp=4, machines=replace(EVEN, launch_us=0.5))
    run = Factory(job, 3).run()
    busy = run.own_s.mean() / run.iteration_s.mean()
    assert cost(job, "gpu_clock", (2,), 1.5) == pytest.approx(1 + 0.5 * busy, rel=0.06)
    assert 1.01 < cost(job, "hbm", (2,), 2.0) < 1.3


def test_a_slow_stage_hides_behind_a_slower_one():
    job = replace(QUIET, pp=4, layers=(2, 2, 2, 4), num_microbatches=8)
    assert cost(job, "gpu_clock", (1,), 1.3) < 1.08 < cost(job, "gpu_clock", (3,), 1.3)


def test_slow_threads_and_loaders_cost_where_devices_wait_for_them():
    job = replace(QUIET, dp=4)
    assert cost(job, "host_cpu", (0,), 2.0) < 1.05
    assert cost(replace(job, hidden=512, sequence=1024), "host_cpu", (0,), 2.0) > 1.5
    assert cost(replace(job, load_ratio=0.1), "loader", (1,), 2.0) < 1.02
    assert cost(replace(job, load_ratio=0.5), "loader", (1,), 4.0) > 1.4


def test_links_cost_where_something_goes_through_them():
    job = replace(QUIET, tp=4, dp=2)
    assert cost(job, "nvlink", (1,), 4.0) > 1.2
    assert cost(replace(QUIET, dp=2), "nvlink_pair", (2, 3), 8.0) == 1.0
    assert cost(replace(QUIET, dp=4), "nic", (0, 1, 2, 3), 3.0) == 1.0


def test_work_is_stretched_by_what_a_burst_covers_of_it():
    assert _stretched(0.0, 5.0, [(2.0, 4.0, 2.0)], 1.0) == 6.0
    assert _stretched(0.0, 5.0, [(2.0, 4.0, float("inf"))], 1.0) == 7.0
    assert _stretched(0.0, 1.0, [(2.0, 4.0, 2.0)], 1.0) == 1.0
    assert _stretched(3.0, 0.25, [(2.0, 4.0, 3.0)], 0.5) == 0.5


def test_slowness_is_that_of_chips_and_faults():
    case = next(case for case in cases() if case.family == "gpu_clock 100%")
    (culprit,) = case.planted[0].ranks
    ratios = slowness(case).mean(axis=1)
    assert 1.5 < ratios[culprit] < 2.15
    assert np.delete(ratios, culprit) == pytest.approx(1.0, abs=0.08)


def test_a_varied_job_has_the_chips_that_were_asked_for(tmp_path):
    case = next(case for case in cases() if case.family == "two faults")
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    varied = Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.5)
    slow = write_varied(case, varied, tmp_path)
    assert even.shape == (case.num_ranks, len(scenario_of(case).job.iterations))
    ratios = (slow / even).mean(axis=1)
    assert 1.25 < ratios[1] < 1.5 and np.delete(ratios, 1) == pytest.approx(1.0, abs=0.02)
    assert len(list(tmp_path.iterdir())) == case.num_ranks


def test_missing_ranks_leave_no_file(tmp_path):
    case = next(case for case in cases() if case.family == "look_alike: missing ranks")
    assert write(case, tmp_path) == ()
    missing = len(scenario_of(case).job.missing)
    assert missing and len(list(tmp_path.iterdir())) == case.num_ranks - missing
