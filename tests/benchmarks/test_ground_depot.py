"""The ground "depot": its files are read, what waits waits, and its truth is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from aggregate import build_timeline
from benchmarks.grounds.depot import Workshop, cases, slowness, write, write_varied
from benchmarks.grounds.depot.catalogue import FAMILIES, scenario_of
from benchmarks.grounds.depot.faults import Fault, stretched
from benchmarks.grounds.depot.hardware import H100
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.ground import Variation
from megascan.reader import read_trace
from tests.benchmarks.catalogues import assert_alike_in_each_process
from tests.benchmarks.nesting import assert_nested

QUIET = Job(
    first_iteration=101,
    num_windows=1,
    window=3,
    chip_spread_ratio=0.0,
    kernel_noise_ratio=1e-6,
    host_noise_ratio=0.0,
    nic_noise_ratio=0.0,
    stalls_per_s=0.0,
    clock_error_s=0.0,
    clock_drift_ppm=0.0,
    load_s=1e-4,
)
FOUR = (2, 2, 2, 2)
LAYOUTS = {
    "replicas": replace(QUIET, dp=4),
    "tensor": replace(QUIET, tp=2, dp=2, overlap_grads=False, distributed_optimizer=False),
    "no sequence parallelism": replace(QUIET, tp=4, dp=2, sequence_parallel=False),
    "pipeline": replace(QUIET, pp=4, dp=2, layers=FOUR, microbatches=8),
    "interleaved": replace(QUIET, pp=4, vpp=2, dp=2, layers=(1,) * 8, microbatches=8),
    "as many as stages": replace(QUIET, pp=4, vpp=2, layers=(1,) * 8),
    "interleaved pair": replace(QUIET, pp=2, vpp=3, layers=(1,) * 6, microbatches=6),
    "experts": replace(QUIET, dp=8, ep=4, experts=8, expert_spread_ratio=0.1),
    "context": replace(QUIET, cp=2, tp=2, dp=2, lengths="packed", sequence=8192),
    "shards": replace(QUIET, dp=4, gather="pass"),
    "ahead": replace(QUIET, dp=4, gather="ahead", recompute=True),
    "base": replace(QUIET, tp=2, pp=2, layers=(2, 2), granularity="base", gzip=True),
    "padded": replace(QUIET, dp=4, lengths="padded to the batch", length_spread_ratio=0.3),
    "windows": replace(QUIET, dp=2, window=2, num_windows=3, first_iteration=1, warm_up=3.0),
    "clocks": replace(QUIET, dp=8, ranks_per_host=2, clock_error_s=0.1, clock_drift_ppm=40.0),
}


def run_s(job: Job, *faults: Fault) -> float:
    return float(np.median(Workshop(job, 3).run(faults).iteration_s))


def cost(job: Job, kind: str, ranks: tuple[int, ...], factor: float, **more: float) -> float:
    fault = Fault(kind=kind, ranks=ranks, factor=factor, **more)
    return run_s(job, fault) / run_s(job)


def spans_of(job: Job, folder, *faults: Fault) -> pd.DataFrame:
    workshop = Workshop(job, 3)
    workshop.write(faults, workshop.run(faults, recording=True), folder)
    return build_timeline(read_trace(folder)).spans.to_pandas()


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_files_are_read_and_all_that_ranks_tell_each_other_is_matched(job, tmp_path):
    spans = spans_of(job, tmp_path)
    assert_nested(spans)
    assert set(spans["rank"]) == set(range(job.num_ranks))
    talks = spans[spans["kind"].isin(("collective", "p2p"))]
    assert (talks["match"] >= 0).all() and (talks["transfer_ns"] >= 0).all()
    assert set(spans.loc[spans["kind"] == "iteration", "iteration"]) == set(job.traced)
    messages = talks[talks["kind"] == "p2p"].groupby("match")
    assert (messages["rank"].nunique() == 2).all() and (messages["microbatch"].nunique() == 1).all()


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases(5) if case.family == "throttling: bursts")
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_the_catalogue_is_the_same_in_each_process_and_another_in_each_draw():
    assert_alike_in_each_process("depot")
    first, second = list(cases(5)), list(cases(6))
    assert [case.family for case in first] == [case.family for case in second]
    assert not {case.seed for case in first} & {case.seed for case in second}
    assert not {case.name for case in first} & {case.name for case in second}


def test_the_catalogue_is_large_enough_and_a_good_third_is_unseen():
    drawn = list(cases())
    assert len(drawn) == sum(number for _, number, _ in FAMILIES) > 280
    assert len({case.name for case in drawn}) == len({case.seed for case in drawn}) == len(drawn)
    assert all(case.name.endswith(f"-s{case.seed}") for case in drawn)
    assert 0.25 < np.mean([case.unseen for case in drawn]) < 0.42
    assert 0.45 <= np.mean([not case.at_fault for case in drawn]) < 0.55
    assert {case.num_ranks for case in drawn} == {2, 4, 8, 16, 32, 64, 128}
    hosts = {scenario_of(case).job.num_hosts for case in drawn}
    assert hosts == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("draw", [0, 7])
def test_the_truth_names_whom_one_may_name_and_when(draw):
    for case in cases(draw):
        scenario = scenario_of(case)
        traced = scenario.job.traced
        sound = case.family.startswith(("healthy", "look_alike"))
        assert sound == (not case.at_fault), case.name
        assert not case.family.startswith("healthy") or not case.planted
        assert all(fault.holds(traced[0]) or fault.holds(traced[-1]) for fault in scenario.faults)
        for truth in case.planted:
            assert truth.ranks and set(truth.ranks) <= set(range(case.num_ranks))
            assert truth.first_iteration <= traced[-1] and 0 < truth.share_of_time <= 1
            assert not truth.last_iteration or truth.last_iteration >= traced[0]
            assert not truth.host or len({scenario.job.hosts[r] for r in truth.ranks}) == 1


def test_a_layer_takes_what_its_operations_take(tmp_path):
    """4,096 tokens of 4,096 numbers: 24·4096³ operations, and half of all pairs of tokens."""
    spans = spans_of(replace(QUIET, dp=2, layers=(1,)), tmp_path)
    products_s = 24 * 4096**3 / H100.product_flops + 2 * 4096**3 / H100.product_flops / 0.65
    memory_s = (14 + 6 + 12) * 2 * 4096**2 / H100.memory_bytes_per_s
    layers = spans.loc[spans["name"] == "transformer_layer", "duration_ns"]
    assert layers.median() * 1e-9 == pytest.approx(products_s + memory_s, rel=0.02)


def test_a_pipeline_of_equal_stages_idles_as_long_as_it_fills_and_drains():
    """Four stages, eight microbatches: 3 of 11 turns are idle."""
    job = replace(QUIET, pp=4, layers=(4,) * 4, microbatches=8, vocabulary=1000, hidden=6144)
    run = Workshop(job, 3).run()
    busy = np.mean(run.own_s) / run.iteration_s.mean()
    assert busy == pytest.approx(8 / 11, abs=0.04)


def test_a_ring_between_hosts_takes_the_bytes_of_its_slowest_card(tmp_path):
    """Eight ranks, one on each host: every card carries 7/8 of the gradients."""
    job = replace(QUIET, dp=8, ranks_per_host=1, overlap_grads=False, layers=(1,))
    size = 4 * (12 * 4096**2 + 2 * 64_000 * 4096)
    for factor, folder in ((1.0, "sound"), (2.0, "slow")):
        spans = spans_of(job, tmp_path / folder, Fault(kind="nic", ranks=(3,), factor=factor))
        seconds = spans.loc[spans["name"] == "reduce_scatter", "transfer_ns"].median() * 1e-9
        assert seconds == pytest.approx(size * 7 / 8 / 46e9 * factor, rel=0.02)


def test_a_slow_clock_shows_in_its_kernels_and_in_the_waits_of_its_mates(tmp_path):
    job = replace(QUIET, tp=2, dp=2, hidden=6144)
    spans = spans_of(job, tmp_path, Fault(kind="gpu_clock", ranks=(2,), factor=1.5))
    mlp = spans[spans["name"] == "mlp"]
    own = mlp["self_ns"].groupby(mlp["rank"]).median()
    assert 1.35 < own[2] / own[3] < 1.5 and own[0] / own[1] == pytest.approx(1.0, rel=0.01)
    within = spans[(spans["op"] == "reduce_scatter") & spans["group"].eq("tp@2")]
    within = within[within["phase"] == "forward"]
    waits = within["wait_ns"].groupby(within["rank"]).median()
    assert waits[3] > 20 * max(waits[2], 1_000)


def test_a_slow_clock_costs_what_its_work_takes_longer():
    job = replace(QUIET, dp=4)
    run = Workshop(job, 3).run()
    slow = Workshop(job, 3).run((Fault(kind="gpu_clock", ranks=(2,), factor=1.5),))
    longer_s = (slow.own_s[1] - run.own_s[1])[2]
    assert slow.iteration_s[1] - run.iteration_s[1] == pytest.approx(longer_s, rel=0.05)
    assert 1.3 < run_s(job, Fault(kind="gpu_clock", ranks=(2,), factor=1.5)) / run_s(job) < 1.5
    assert 1.01 < cost(job, "hbm", (2,), 2.0) < 1.4


def test_a_slow_stage_hides_behind_a_slower_one():
    job = replace(QUIET, pp=4, layers=FOUR, microbatches=8, vocabulary=1000, heavy=((3, 1.6),))
    assert cost(job, "gpu_clock", (1,), 1.3) < 1.08 < cost(job, "gpu_clock", (3,), 1.3)


def test_slow_threads_and_loaders_cost_where_devices_wait_for_them():
    job = replace(QUIET, dp=4)
    assert cost(job, "cores", (0,), 2.0) < 1.05
    assert cost(replace(job, hidden=512, sequence=512), "cores", (0,), 2.0) > 1.5
    assert cost(replace(job, load_s=0.01), "loader", (1,), 2.0) < 1.02
    assert cost(replace(job, load_s=0.04), "loader", (1,), 4.0) > 1.4


def test_links_cost_where_something_goes_through_them():
    assert cost(replace(QUIET, tp=4, dp=2), "nvlink", (1,), 4.0) > 1.1
    assert cost(replace(QUIET, dp=4), "nic", (0,), 3.0) == 1.0
    assert cost(replace(QUIET, dp=4, ranks_per_host=1), "nic", (0,), 3.0) > 1.05
    staged = replace(QUIET, pp=2, dp=2, layers=(2, 2), ranks_per_host=2, overlap_grads=False)
    assert cost(staged, "flapping", (1,), 30.0, share=0.5, seconds=0.02) > 1.02


def test_a_card_that_serves_one_pair_tells_no_end():
    pair = replace(QUIET, pp=2, layers=(2, 2), ranks_per_host=1)
    fault = Fault(kind="nic", ranks=(1,), factor=2.0)
    assert fault.named(pair) == (0, 1)
    assert fault.named(replace(QUIET, dp=4, ranks_per_host=1)) == (1,)


def test_work_is_stretched_by_what_a_burst_covers_of_it():
    assert stretched(0.0, 5.0, [(2.0, 4.0, 2.0)]) == 6.0
    assert stretched(0.0, 5.0, [(2.0, 4.0, float("inf"))]) == 7.0
    assert stretched(0.0, 1.0, [(2.0, 4.0, 2.0)]) == 1.0
    assert stretched(5.0, 1.0, [(2.0, 4.0, 2.0)]) == 6.0


def test_costs_are_those_of_the_job_with_and_without(tmp_path):
    case = next(case for case in cases(3) if case.family == "gpu_clock: onset")
    (truth,) = write(case, tmp_path)
    job = scenario_of(case).job
    with_it = Workshop(job, case.seed).run(scenario_of(case).faults).iteration_s
    without = Workshop(job, case.seed).run().iteration_s
    places = [each - job.first_iteration for each in job.traced]
    assert truth.cost_ratio == pytest.approx(with_it[places].mean() / without[places].mean())
    before = [p for p, each in zip(places, job.traced, strict=True) if each < truth.first_iteration]
    assert (with_it[before] == without[before]).all()


def test_slowness_is_that_of_chips_and_faults():
    case = next(case for case in cases() if case.family == "gpu_clock")
    (culprit,) = case.planted[0].ranks
    ratios = slowness(case).mean(axis=1)
    assert ratios[culprit] == ratios.max() and case.planted[0].factor * 1.05 > ratios[culprit]
    assert np.delete(ratios, culprit) == pytest.approx(1.0, abs=0.08)


def test_a_varied_job_has_the_chips_that_were_asked_for(tmp_path):
    case = next(case for case in cases() if case.family == "nvlink")
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    varied = Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.5)
    slow = write_varied(case, varied, tmp_path)
    assert even.shape == (case.num_ranks, len(scenario_of(case).job.traced))
    ratios = (slow / even).mean(axis=1)
    assert 1.2 < ratios[1] < 1.5 and np.delete(ratios, 1) == pytest.approx(1.0, abs=0.02)
    assert len(list(tmp_path.iterdir())) == case.num_ranks
