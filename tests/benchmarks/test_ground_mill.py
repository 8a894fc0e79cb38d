"""The ground "mill": its files are read, faults slow what they concern, and others wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.mill import cases, slowness, write, write_varied
from benchmarks.grounds.mill.catalogue import FAMILIES, scenario_of
from benchmarks.grounds.mill.engine import Engine
from benchmarks.grounds.mill.files import Writer
from benchmarks.grounds.mill.job import draw
from benchmarks.grounds.mill.program import Program, merged
from benchmarks.grounds.mill.troubles import Fault, Timeline, World
from megascan.reader import read_trace
from megascan.topology import Layout
from tests.benchmarks.catalogues import assert_alike_in_each_process
from tests.benchmarks.nesting import assert_nested

PLAIN, _ = draw(np.random.default_rng(3), 3, lambda job: job.is_megatron, lambda job, rng: job)
QUIET = replace(
    PLAIN,
    layout=Layout(dp=4), chunks=(("d", "d"),), gpus_per_host=2, num_nics=2, hidden=4096,
    sequence=4096, tokens=4096, num_microbatches=4, product_flops=4e14, memory_bytes_s=2e12,
    nvlink_bytes_s=2e11, nic_bytes_s=4e10, launch_s=1e-6, queue=1000, kernel_noise=1e-6,
    chip_spread=0.0, host_noise=1e-6, stall_share=0.0, link_noise=1e-6, tenants=0.0,
    storage_hiccups=0.0, batch_share=0.1, collects_every=0.0, logger=-1, saves_every=0,
    evaluates_every=0, warm_up=1.0, lengths="even", recompute=False, overlap_grads=False,
    sequence_parallel=False, granularity="full", layer_stride=1, first_iteration=11, window=4,
    interval=4, num_windows=1, lost="", tied=False, vocabulary=32_000,
)  # fmt: skip
CLOCK = Fault(kind="gpu_clock", cause="compute", ranks=(1,), factor=1.5, rates=("clock",))
LAYOUTS = {
    "replicas": QUIET,
    "plain": replace(QUIET, style="ddp"),
    "shards": replace(QUIET, style="fsdp"),
    "tensor": replace(QUIET, layout=Layout(tp=2, dp=2), sequence_parallel=True),
    "pipeline": replace(QUIET, layout=Layout(pp=4, dp=2), chunks=(("d", "d"),) * 4, tied=True),
    "interleaved": replace(QUIET, layout=Layout(pp=2, vpp=2, dp=2), chunks=(("d",),) * 4),
    "other order": replace(
        QUIET, layout=Layout(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp"), chunks=(("d",),) * 2
    ),
    "experts": replace(QUIET, layout=Layout(dp=8, ep=4), chunks=(("e",),)),
    "context": replace(QUIET, layout=Layout(cp=2, tp=2, dp=2)),
    "overlap": replace(QUIET, overlap_grads=True, recompute=True, compress=True),
    "base": replace(QUIET, granularity="base", layout=Layout(tp=2, dp=2), has_sizes=False),
}


def run(job, *faults):
    """Return the times of passes and of iterations with faults, divided by those without."""
    result = Engine(job, [World(faults=faults), World()]).run()
    return result.own_s[0] / result.own_s[1], result.iteration_s[0] / result.iteration_s[1]


def spans_of(job, folder, *faults):
    engine = Engine(job, [World(faults=faults)])
    Writer(engine, engine.run().turns).write(folder)
    timeline = build_timeline(read_trace(folder))
    return timeline.spans.to_pandas(), timeline


def test_cases_are_the_same_in_each_process_and_half_of_them_are_sound():
    assert_alike_in_each_process("mill")
    listed = list(cases(2))
    assert 220 <= len(listed) <= 260
    assert len({case.name for case in listed}) == len(listed)
    assert not {case.seed for case in listed} & {case.seed for case in cases(3)}
    sound = [case for case in listed if not case.at_fault]
    assert 0.48 < len(sound) / len(listed) < 0.6
    assert all(it.family.startswith(("healthy", "look_alike")) for it in sound)
    assert all(set(one.ranks) <= set(range(it.num_ranks)) for it in listed for one in it.planted)


@pytest.mark.parametrize("family", list(FAMILIES)[::2])
def test_cases_are_read_and_cost_what_they_may(family, tmp_path):
    case = next(case for case in cases(7) if case.family == family)
    planted = write(case, tmp_path)
    trace = read_trace(tmp_path, allow_missing_ranks=True)
    assert_nested(build_timeline(trace).spans.to_pandas())
    assert all(one.cost_ratio > 0.98 for one in planted)
    assert [one.kind for one in planted] == [one.kind for one in case.planted]


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_all_that_ranks_tell_each_other_is_matched(job, tmp_path):
    spans, timeline = spans_of(job, tmp_path)
    assert_nested(spans)
    assert not any(timeline.completeness.num_unmatched.values())
    assert set(spans["rank"]) == set(range(job.num_ranks))


@pytest.mark.parametrize("job", LAYOUTS.values(), ids=LAYOUTS)
def test_a_slow_device_computes_longer_and_nobody_else_does(job):
    own, iterations = run(job, CLOCK)
    assert own[1] == pytest.approx(1.4, abs=0.1)  # what moves bytes is hardly slower
    assert np.delete(own, 1, axis=0) == pytest.approx(1.0)
    assert (iterations > 1.02).all()


def test_what_waits_for_a_slow_device_are_the_others(tmp_path):
    spans, _ = spans_of(QUIET, tmp_path, CLOCK)
    waits = spans[spans["kind"] == "collective"].groupby("rank")["wait_ns"].sum()
    assert waits.idxmin() == 1
    assert waits.drop(1).min() > 20 * max(waits[1], 1e5)
    assert spans[spans["name"] == "mlp"].groupby("rank")["duration_ns"].mean().idxmax() == 1


def test_iterations_of_sound_jobs_are_alike_when_nothing_is_noisy():
    times = Engine(QUIET, [World()]).run().iteration_s[0]
    assert times[1:] == pytest.approx(times[1], rel=1e-3)


def test_a_throttle_holds_from_its_iteration_on():
    own, _ = run(QUIET, replace(CLOCK, first=13))
    assert own[1, :2] == pytest.approx(1.0)
    assert (own[1, 2:] > 1.3).all()


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (QUIET, replace(CLOCK, kind="nic", rates=("nic",), ranks=(0, 1), factor=4.0)),
        (replace(QUIET, launch_s=2e-5), replace(CLOCK, rates=("host",), factor=20.0)),
        (QUIET, replace(CLOCK, rates=("loader",), factor=100.0)),
        (LAYOUTS["tensor"], replace(CLOCK, rates=("nvlink",), factor=10.0)),
        (replace(QUIET, queue=5), replace(CLOCK, rates=(), pause_s=0.2, pause_every=30)),
    ],
    ids=["nic", "host", "loader", "nvlink", "gc"],
)
def test_what_is_no_device_makes_iterations_longer_and_no_computing(job, fault):
    own, iterations = run(job, fault)
    assert own == pytest.approx(1.0)
    assert (iterations > 1.03).all()


def test_bursts_take_their_share_of_time():
    fault = replace(CLOCK, factor=2.0, share=0.2, burst_s=0.05)
    line = Timeline(np.random.default_rng(1), fault)
    assert line.end_of(0.0, 400.0) == pytest.approx(400 / 0.9, rel=0.02)
    assert line.end_of(10.0, 0.0) == 10.0
    halves = line.end_of(line.end_of(3.0, 1.0), 1.0)
    assert halves == pytest.approx(line.end_of(3.0, 2.0))


def test_schedules_of_many_shapes_come_to_an_end():
    for pp in (2, 3, 4):
        for vpp, num in ((1, 1), (1, 2), (1, 9), (2, pp), (2, 3 * pp)):
            layout = Layout(pp=pp, vpp=vpp, dp=2)
            job = replace(QUIET, layout=layout, chunks=(("d",),) * pp * vpp)
            programs = [Program(job, stage, num) for stage in range(pp)]
            assert len(merged(programs)) == sum(len(it.operations) for it in programs)


def test_slowness_and_variations_are_told(tmp_path):
    case = next(it for it in cases(1) if it.family == "gpu_clock" and it.planted[0].factor > 1.3)
    ratio, job = slowness(case), scenario_of(case).job
    (planted,) = case.planted
    assert ratio.shape == (case.num_ranks, len(job.iterations))
    assert ratio.mean(1).argmax() == planted.ranks[0]
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = write_varied(case, Variation(chip_spread_ratio=0.0, slow_rank=0, factor=1.5), tmp_path)
    assert (slow[0] / even[0]).mean() > 1.2
    assert slow[1:] == pytest.approx(even[1:])
    assert read_trace(tmp_path, allow_missing_ranks=True).headers


def test_shards_travel_beside_the_passes_while_the_network_is_fast_enough():
    job = replace(LAYOUTS["shards"], sequence=16384, tokens=16384)
    assert any(span.name == "reduce_scatter" for span in Program(job, 0, 2).spans)
    fast, slow = (Engine(replace(job, nic_bytes_s=rate), [World()]).run() for rate in (4e10, 4e9))
    assert fast.iteration_s.mean() < 1.25 * fast.own_s.mean()
    assert slow.iteration_s.mean() > 2 * slow.own_s.mean()
