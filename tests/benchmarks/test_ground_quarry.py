"""The ground "quarry": its files are read, its times are those on paper, its truth is true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from aggregate import build_timeline
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.quarry import Quarry, cases, slowness, write, write_varied
from benchmarks.grounds.quarry.catalogue import LOOK_ALIKES, Scenario, scenario_of
from benchmarks.grounds.quarry.conditions import Surroundings
from benchmarks.grounds.quarry.faults import Fault, stretched
from benchmarks.grounds.quarry.jobs import MOST_OPERATIONS, Job
from benchmarks.grounds.quarry.machines import Machines
from megascan.reader import read_trace
from megascan.topology import Layout
from tests.benchmarks.catalogues import assert_alike_in_each_process
from tests.benchmarks.nesting import assert_nested

EVEN = Machines(
    gpus_per_host=4,
    cards_per_host=4,
    product_flops=400e12,
    attention_flops=300e12,
    memory_bytes=2.4e12,
    nvlink_bytes=300e9,
    card_bytes=40e9,
    exchange_s=1e-5,
    exchange_far_s=3e-5,
    launch_s=1e-6,
    queue=1000,
    chip_spread_ratio=1e-9,
    slot_share=0.0,
    host_share=0.0,
    num_bins=0,
    wander_ratio=0.0,
    kernel_noise_ratio=1e-6,
    host_noise_ratio=1e-6,
    transfer_noise_ratio=1e-6,
    interference_ratio=0.0,
    offset_s=1e-4,
    drift_ppm=0.1,
    tie_s=1e-6,
    has_counters=True,
)
QUIET = Job(
    machines=EVEN,
    layout=Layout(dp=4),
    style="megatron",
    chunks=(("dd",),),
    hidden=4096,
    ffn_ratio=3.5,
    kv_ratio=0.25,
    vocabulary=32_000,
    experts_per_token=2,
    sequence=4096,
    tokens=8192,
    kernels_ratio=1.0,
    num_microbatches=4,
    num_iterations=5,
    first_iteration=101,
    interval=5,
    window=5,
    granularity="full",
    has_sizes=True,
    has_tokens=True,
    lengths="fixed",
    length_ratio=0.5,
    sequence_parallel=True,
    overlap_grads=False,
    overlap_gather=False,
    distributed_optimizer=True,
    tied=False,
    recompute=False,
    syncs=True,
    loads_everywhere=True,
    load_ratio=0.1,
    num_workers=2,
    collections="off",
    checkpoint_every=0,
    evaluates_every=0,
)
CALM = Surroundings(warms_up_ratio=0.0)
LAYOUTS = {
    "replicas": QUIET,
    "plain": replace(QUIET, style="ddp", overlap_grads=True),
    "shards": replace(QUIET, style="fsdp"),
    "tensor": replace(QUIET, layout=Layout(tp=2, dp=2), loads_everywhere=False),
    "no sequence parallelism": replace(QUIET, layout=Layout(tp=4), sequence_parallel=False),
    "pipeline": replace(QUIET, layout=Layout(pp=4, dp=2), chunks=(("dd",) * 4,), tied=True),
    "odd pipeline": replace(QUIET, layout=Layout(pp=3), chunks=(("d", "dd", "d"),)),
    "interleaved": replace(QUIET, layout=Layout(pp=2, vpp=2, dp=2), chunks=(("d", "d"),) * 2),
    "experts": replace(QUIET, layout=Layout(dp=8, ep=4), chunks=(("ed",),)),
    "context": replace(QUIET, layout=Layout(cp=2, tp=2, dp=2), lengths="packed"),
    "ragged": replace(QUIET, lengths="ragged", layout=Layout(tp=2, pp=2), chunks=(("d", "d"),)),
    "state space": replace(QUIET, chunks=(("dmm",),)),
    "recompute": replace(QUIET, recompute=True, overlap_grads=True, overlap_gather=True),
    "windows": replace(QUIET, interval=50, window=2, checkpoint_every=51),
    "base": replace(QUIET, granularity="base", layout=Layout(tp=2, dp=2), has_sizes=False),
}


def quarry_of(job: Job, around: Surroundings = CALM) -> Quarry:
    return Quarry(Scenario(job=job, around=around, faults=(), seed=3))


def spans_of(job: Job, folder, *faults: Fault) -> pd.DataFrame:
    quarry_of(job).run(faults, folder=folder)
    return build_timeline(read_trace(folder)).spans.to_pandas()


def slow(kind: str, ranks: tuple[int, ...], factor: float, **more) -> Fault:
    return Fault(kind=kind, ranks=ranks, nameable=ranks, factor=factor, **more)


def cost(job: Job, *faults: Fault) -> float:
    """Return how many times longer an iteration is with these faults."""
    quarry = quarry_of(job)
    return float(quarry.run(faults).iteration_s.mean() / quarry.run().iteration_s.mean())


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_files_are_read_and_all_that_ranks_tell_each_other_is_matched(job, tmp_path):
    spans = spans_of(job, tmp_path)
    assert set(spans["rank"]) == set(range(job.num_ranks))
    assert_nested(spans)
    talks = spans[spans["kind"].isin(("collective", "p2p"))]
    assert len(talks) and (talks["match"] >= 0).all() and (talks["transfer_ns"] >= 0).all()
    assert set(spans.loc[spans["kind"] == "iteration", "iteration"]) == set(job.iterations)
    ends = talks[talks["kind"] == "p2p"].groupby("match")
    assert (ends["rank"].nunique() == 2).all() and (ends["microbatch"].nunique() == 1).all()


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_members_of_a_collective_leave_it_together(job, tmp_path):
    spans = spans_of(job, tmp_path)
    talks = spans[spans["kind"] == "collective"]
    ends = (talks["start_ns"] + talks["duration_ns"]).groupby(talks["match"])
    assert ((ends.max() - ends.min()) < 20_000).all()
    assert not (talks.groupby("match")["size_bytes"].nunique() > 1).any()


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases(5) if case.family == "throttling")
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_each_process_lists_the_same_cases():
    assert_alike_in_each_process("quarry")


def test_the_catalogue_is_large_enough_and_a_good_third_is_unseen():
    drawn, other = list(cases()), list(cases(1))
    assert 230 < len(drawn) < 260 and len({case.name for case in drawn}) == len(drawn)
    assert [case.name for case in drawn] == [case.name for case in other]
    assert all(one.seed != two.seed for one, two in zip(drawn, other, strict=True))
    assert 0.25 < np.mean([case.unseen for case in drawn]) < 0.42
    sound = [case for case in drawn if not case.at_fault]
    assert 0.4 < len(sound) / len(drawn) < 0.5
    alike = [case for case in sound if case.family.startswith("look_alike")]
    assert 0.4 < len(alike) / len(sound) < 0.6
    assert {2, 64} <= {case.num_ranks for case in drawn}


def test_no_two_jobs_are_alike_and_all_are_small():
    jobs = [scenario_of(case).job for case in cases(2)]
    assert len({job.hidden * job.machines.launch_s for job in jobs}) == len(jobs)
    assert max(job.num_operations for job in jobs) <= MOST_OPERATIONS
    assert {job.style for job in jobs} == {"megatron", "ddp", "fsdp"}
    assert any(job.layout.vpp > 1 for job in jobs) and any(job.layout.cp > 1 for job in jobs)


@pytest.mark.parametrize("draw", [0, 7])
def test_the_truth_names_whom_one_may_name_and_when(draw):
    for case in cases(draw):
        scenario = scenario_of(case)
        job, sound = scenario.job, case.family.startswith(("healthy", "look_alike"))
        assert sound == (not case.at_fault)
        assert not case.family.startswith("healthy") or not case.planted
        for truth, fault in zip(case.planted, scenario.faults, strict=True):
            assert set(fault.ranks) <= set(truth.ranks) <= set(range(case.num_ranks))
            assert (truth.owner == "job") == (truth.kind in LOOK_ALIKES)
            assert truth.first_iteration <= job.iterations[-2] and 0 < truth.share_of_time <= 1
            assert not truth.last_iteration or truth.last_iteration > job.iterations[0]
            assert truth.factor > 1
            assert not truth.host or len({job.machines.host_of(r) for r in truth.ranks}) == 1


def test_a_layer_takes_what_its_operations_take(tmp_path):
    """8192 tokens of 4096 numbers, 13 squares of weights, and causal attention over 4096."""
    spans = spans_of(replace(QUIET, layout=Layout(dp=2)), tmp_path)
    products_s = 2 * 8192 * (2.5 + 3 * 3.5) * 4096**2 / EVEN.product_flops
    attention_s = 4 * 8192 * 2048 * 4096 / EVEN.attention_flops
    memory_s = 8192 * 8192 * (16 + 9 + 5 * 3.5) / EVEN.memory_bytes
    layers = spans.loc[spans["name"] == "transformer_layer", "duration_ns"]
    assert layers.median() * 1e-9 == pytest.approx(products_s + attention_s + memory_s, rel=0.01)


def test_a_ring_between_hosts_takes_the_bytes_of_its_slowest_card(tmp_path):
    """Eight ranks on two hosts of four cards: 7/8 of the gradients pass each host."""
    job = replace(QUIET, layout=Layout(dp=8), distributed_optimizer=False)
    weights = 2 * 13 * 4096**2 + 2 * 32_000 * 4096
    alone_s = 2 * 7 / 8 * 4 * weights / (4 * EVEN.card_bytes)
    hit = Fault(kind="rail", ranks=(1,), nameable=(1, 5), hosts=(0,), card=1, factor=2.0)
    for factor, faults in ((1.0, ()), (2.0, (hit,))):
        spans = spans_of(job, tmp_path / str(factor), *faults)
        reduced = spans.loc[spans["name"] == "all_reduce", "transfer_ns"]
        assert reduced.max() * 1e-9 == pytest.approx(alone_s * factor, rel=0.02)


def test_a_pipeline_of_equal_stages_idles_as_long_as_it_fills_and_drains():
    """Four stages, eight microbatches: 3 of 11 turns are idle."""
    job = replace(
        QUIET, layout=Layout(pp=4), chunks=(("dddd",) * 4,), num_microbatches=8, vocabulary=1000
    )
    run = quarry_of(job).run()
    assert run.own_s.mean() / run.iteration_s.mean() == pytest.approx(8 / 11, abs=0.04)


def test_interleaved_chunks_fill_a_pipeline_sooner():
    whole = replace(QUIET, layout=Layout(pp=4), chunks=(("dd",) * 4,), num_microbatches=8)
    halves = replace(whole, layout=Layout(pp=4, vpp=2), chunks=(("d",) * 4,) * 2)
    times = [quarry_of(job).run().iteration_s.mean() for job in (whole, halves)]
    assert 0.8 < times[1] / times[0] < 0.95


def test_sound_ranks_differ_as_their_chips_do():
    job = replace(QUIET, layout=Layout(dp=8), machines=replace(EVEN, chip_spread_ratio=0.04))
    quarry = quarry_of(job)
    chips = quarry.drawer.chips(Variation())
    ratios = quarry.run().own_s / quarry_of(replace(job, machines=EVEN)).run().own_s
    assert 0.01 < np.ptp(chips[:, 0]) <= 0.04
    shares = (ratios - 1) / (chips - 1)
    assert shares.min() > 0.7 and shares.max() < 1.0


def test_a_slow_clock_shows_in_its_kernels_and_in_the_waits_of_its_mates(tmp_path):
    job = replace(QUIET, layout=Layout(tp=2, dp=2))
    spans = spans_of(job, tmp_path, slow("gpu_clock", (2,), 1.5))
    mlp = spans[spans["name"] == "mlp"]
    own = mlp["self_ns"].groupby(mlp["rank"]).median()
    assert 1.4 < own[2] / own[3] < 1.5
    assert own[0] / own[1] == pytest.approx(1.0, abs=0.01)
    within = spans[(spans["op"] == "reduce_scatter") & spans["group"].eq("tp@2")]
    waits = within["wait_ns"].groupby(within["rank"]).median()
    assert waits[3] > 20 * max(waits[2], 1_000)


def test_a_slow_clock_costs_the_share_that_products_have():
    run = quarry_of(QUIET).run()
    busy = run.own_s.mean() / run.iteration_s.mean()
    assert 1 + 0.4 * busy < cost(QUIET, slow("gpu_clock", (2,), 1.5)) < 1 + 0.5 * busy
    assert 1.05 < cost(QUIET, slow("hbm", (2,), 2.0)) < 1.4
    late = slow("gpu_clock", (2,), 1.5, first_iteration=104)
    times = quarry_of(QUIET).run((late,)).iteration_s
    assert times[3:].min() > 1.2 * times[:3].max()


def test_bursts_cost_their_share_of_the_time():
    job = replace(QUIET, num_iterations=30)
    burst = slow("throttling", (2,), 1.6, share=0.3, burst_iterations=0.3)
    whole = cost(job, slow("gpu_clock", (2,), 1.6)) - 1
    assert 0.1 * whole < cost(job, burst) - 1 < 0.6 * whole
    stops = slow("row_remap", (1,), 1.1, share=0.1, burst_iterations=0.02)
    assert 1.02 < cost(job, stops) < 1.3


def test_a_slow_stage_hides_behind_a_slower_one():
    chunks = (("dd", "dd", "dd", "ddddd"),)
    job = replace(QUIET, layout=Layout(pp=4), chunks=chunks, num_microbatches=8)
    assert cost(job, slow("gpu_clock", (1,), 1.3)) < 1.06 < cost(job, slow("gpu_clock", (3,), 1.3))


def test_slow_threads_and_loaders_cost_where_devices_wait_for_them():
    threads = replace(EVEN, launch_s=6e-6)
    small = replace(
        QUIET, machines=threads, hidden=512, tokens=1024, sequence=1024, vocabulary=1000
    )
    assert cost(QUIET, slow("host_thread", (0,), 2.0)) < 1.03
    assert cost(small, slow("host_thread", (0,), 2.0)) > 1.5
    assert cost(replace(QUIET, load_ratio=0.1), slow("loader", (1,), 2.0)) < 1.02
    assert cost(replace(QUIET, load_ratio=0.5), slow("loader", (1,), 4.0)) > 1.4
    paused = slow("gc", (1,), 1.2, share=0.2, burst_iterations=0.05)
    assert cost(small, paused) > 1.05


def test_links_cost_where_something_goes_through_them():
    tensor = replace(QUIET, layout=Layout(tp=4, dp=2))
    near = replace(QUIET, layout=Layout(tp=1, dp=2))
    far = replace(QUIET, layout=Layout(dp=12), num_microbatches=1)
    card = slow("nic", (0, 1, 2, 3), 3.0, hosts=(0,))
    assert cost(tensor, slow("nvlink", (1,), 4.0)) > 1.2
    assert cost(near, card) == 1.0 and cost(far, card) > 1.2
    port = slow("switch_port", tuple(range(8)), 3.0, hosts=(0, 1))
    other = slow("switch_port", tuple(range(8)), 3.0, hosts=(1, 2))
    assert cost(far, port) == pytest.approx(cost(far, other)) and cost(far, port) > 1.2


def test_what_runs_beside_compute_makes_it_longer():
    job = replace(QUIET, layout=Layout(dp=8), overlap_grads=True, num_microbatches=1)
    beside = replace(job, machines=replace(EVEN, interference_ratio=0.2))
    alone, disturbed = (quarry_of(each).run().own_s.mean() for each in (job, beside))
    assert 1.01 < disturbed / alone < 1.2


def test_work_is_stretched_by_what_a_burst_covers_of_it():
    assert stretched(0.0, 5.0, [(2.0, 4.0, 2.0)], 1.0) == 6.0
    assert stretched(0.0, 1.0, [(2.0, 4.0, 2.0)], 1.0) == 1.0
    assert stretched(3.0, 0.25, [(2.0, 4.0, 3.0)], 0.5) == 0.5
    assert stretched(3.0, 2.0, [(0.0, 1.0, 9.0), (2.0, 4.0, 2.0)], 1.0) == 2.5


def test_slowness_is_that_of_chips_and_faults():
    case = next(
        case for case in cases() if case.family == "gpu_clock" and case.planted[0].factor > 1.2
    )
    (truth,) = case.planted
    ratios = slowness(case)
    assert ratios.shape == (case.num_ranks, len(scenario_of(case).job.iterations))
    held = ratios.max(axis=1)
    assert 1.03 < held[truth.ranks[0]] < truth.factor * 1.05
    assert np.delete(held, truth.ranks[0]) == pytest.approx(1.0, abs=0.12)


def test_a_varied_job_has_the_chips_that_were_asked_for(tmp_path):
    case = next(case for case in cases() if case.family == "two_faults")
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    varied = Variation(chip_spread_ratio=0.0, slow_rank=1, factor=1.5)
    slowed = write_varied(case, varied, tmp_path)
    ratios = (slowed / even).mean(axis=1)
    assert 1.1 < ratios[1] <= 1.5 and np.delete(ratios, 1) == pytest.approx(1.0, abs=0.05)
    assert len(list(tmp_path.iterdir())) == case.num_ranks
