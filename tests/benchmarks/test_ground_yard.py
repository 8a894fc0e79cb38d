"""The ground "yard": its files are read, its physics and its truth are what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate.merge import build_timeline
from benchmarks.grounds.ground import Variation
from benchmarks.grounds.kinds import EXPERTS
from benchmarks.grounds.yard import cases, slowness, write, write_varied
from benchmarks.grounds.yard.catalogue import scenario_of
from benchmarks.grounds.yard.files import write_files
from benchmarks.grounds.yard.hardware import CHIPS, Chips, Site
from benchmarks.grounds.yard.jobs import Job, product_s
from benchmarks.grounds.yard.network import suspects
from benchmarks.grounds.yard.scenario import Scenario, simulate
from benchmarks.grounds.yard.trouble import Trouble
from megascan.reader import read_trace

EVEN = Site(chip_spread_ratio=0.0, ranks_per_host=4, num_nics=4)
QUIET = Job(
    site=EVEN, layers=(2,), hidden=2048, num_iterations=3, first_iteration=21, noise=0.1,
    loader_s=0.001,
)  # fmt: skip


def step_s(job, *troubles):
    return float(np.median(simulate(Scenario(job=job, seed=3, troubles=troubles)).iteration_s))


@pytest.mark.parametrize(
    "job",
    [
        replace(QUIET, tp=2, pp=2, vpp=2, dp=2, layers=(1,) * 4),
        replace(QUIET, pp=4, layers=(1,) * 4, num_microbatches=6, overlap=False),
        replace(QUIET, tp=2, dp=2, sequence_parallel=False, recompute="selective"),
        replace(QUIET, dp=4, ep=2, experts=4, recompute="full", distributed_optimizer=False),
        replace(QUIET, tp=2, cp=2, dp=2, lengths="unpacked", length_spread=0.3),
        replace(QUIET, pp=2, dp=2, layers=(2, 2), granularity="base"),
    ],
    ids=["interleaved", "pipeline", "tensor", "experts", "context", "base"],
)
def test_files_are_read_without_complaint(job, tmp_path):
    write_files(simulate(Scenario(job=job, seed=3), recording=True), tmp_path)
    spans = build_timeline(read_trace(tmp_path)).spans.to_pandas()
    assert set(spans["rank"]) == set(range(job.num_ranks))
    talks = spans["kind"].isin(("collective", "p2p"))
    assert talks.any() and (spans.loc[talks, "match"] >= 0).all()


def test_one_seed_gives_one_set_of_bytes(tmp_path):
    case = next(case for case in cases(5) if case.family == "gpu_clock 20%")
    planted = write(case, tmp_path / "once")
    assert planted == write(case, tmp_path / "again")
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    unpriced = [replace(each, cost_ratio=1.0, held_cost_ratio=1.0) for each in planted]
    assert unpriced == list(case.planted) and planted[0].cost_ratio > 1.02


def test_missing_ranks_leave_no_file(tmp_path):
    case = next(case for case in cases() if case.family == "healthy: missing ranks")
    write(case, tmp_path)
    assert len(list(tmp_path.iterdir())) == case.num_ranks - 1


def test_slowness_is_that_of_chips_and_faults():
    case = next(case for case in cases() if case.family == "gpu_clock 100%")
    (culprit,) = case.planted[0].ranks
    ratios = slowness(case).mean(axis=1)
    assert 1.5 < ratios[culprit] < 2.1
    assert np.delete(ratios, culprit) == pytest.approx(1.0, abs=0.05)


def test_a_varied_job_has_the_chips_that_were_asked_for():
    case = next(case for case in cases() if case.family == "two faults")
    even = write_varied(case, Variation(chip_spread_ratio=0.0), None)
    slow = write_varied(case, Variation(chip_spread_ratio=0.0, slow_rank=2, factor=1.5), None)
    assert even.shape == (case.num_ranks, len(scenario_of(case).job.iterations))
    ratios = (slow / even).mean(axis=1)
    assert 1.3 < ratios[2] < 1.5 and np.delete(ratios, 2) == pytest.approx(1.0, abs=0.02)


def test_products_go_in_whole_waves():
    chip = CHIPS["h100"]
    one_wave, a_tile_more = (product_s(chip, 128 * 12, 256 * n, 4096) for n in (11, 12))
    assert a_tile_more == pytest.approx(2 * one_wave)


def test_a_chip_at_its_cap_is_slower_when_hot_and_faster_when_it_waits():
    chips = Chips.drawn(Site(chip_spread_ratio=0.0), 2, seed=1)
    chips.temperature_c = np.array([45.0, 80.0])
    cool, hot = chips.settle(np.ones(2))
    assert hot < cool < chips.settle(np.full(2, 0.5))[0]


def test_slow_memory_costs_less_than_a_slow_clock():
    job = replace(QUIET, dp=2)
    sound, memory, clock = (
        step_s(job, *(Trouble(kind=kind, ranks=(1,), factor=2.0) for kind in kinds))
        for kinds in ((), ("gpu_memory",), ("gpu_clock",))
    )
    assert 1.02 < memory / sound < clock / sound < 2.0


def test_a_slow_host_costs_where_launches_bound_the_job():
    trouble = Trouble(kind="host_cpu", ranks=(0,), factor=4.0)
    for hidden, least, most in ((4096, 0.99, 1.15), (512, 1.8, 5.0)):
        job = replace(QUIET, dp=4, hidden=hidden, sequence=2048)
        assert least < step_s(job, trouble) / step_s(job) < most


def test_a_loader_that_keeps_up_costs_nothing():
    job = replace(QUIET, dp=2)
    for factor, dear in ((1.5, False), (400.0, True)):
        slow = step_s(job, Trouble(kind="loader", ranks=(0,), factor=factor))
        assert bool(slow > 1.2 * step_s(job)) is dear


def test_faults_that_look_alike_have_both_ends_named():
    pair, line = replace(QUIET, dp=2), replace(QUIET, pp=4, layers=(1,) * 4)
    apart = replace(EVEN, ranks_per_host=1, num_nics=1)
    assert suspects(replace(pair, site=apart), "nic", (1,)) == (0, 1)
    assert suspects(replace(line, site=apart), "nic", (1,)) == (1,)


def kinds_of(folder, job):
    """Return the kinds of each rank's layers: the same in all windows, of the layers in spans."""
    write_files(simulate(Scenario(job=job, seed=3), recording=True), folder)
    trace = read_trace(folder)
    spans = trace.spans.to_pandas()
    for rank, own in trace.windows.items():
        assert all(window.kinds == own[0].kinds for window in own)
        seen = set(spans["layer"][(spans["rank"] == rank) & (spans["layer"] > 0)])
        if job.granularity == "full":
            assert seen == {layer for numbers in own[0].kinds.values() for layer in numbers}
    return [trace.windows[rank][0].kinds for rank in range(job.num_ranks)]


@pytest.mark.parametrize("granularity", ["full", "base"])
def test_layers_are_of_one_kind_however_many_a_stage_has(tmp_path, granularity):
    job = replace(QUIET, tp=2, pp=2, vpp=2, layers=(1, 2, 1, 1), granularity=granularity)
    kinds = kinds_of(tmp_path, replace(job, vocabulary=128_000))
    (kind,) = kinds[0]
    assert len(kind) == 8 and set(kind) <= set("0123456789abcdef")
    assert kinds == [{kind: (1, 4)}] * 2 + [{kind: (2, 3, 5)}] * 2


def test_layers_with_experts_have_no_digest(tmp_path):
    assert kinds_of(tmp_path, replace(QUIET, dp=2, ep=2, experts=4)) == [{EXPERTS: (1, 2)}] * 2
