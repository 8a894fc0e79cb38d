"""The ground of old archives: its files are read, its truth holds, its physics is physics."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.grounds.archive import cases, slowness, write, write_varied
from benchmarks.grounds.archive.catalogue import FAMILIES, recipes
from benchmarks.grounds.archive.costs import layer_of, product_us
from benchmarks.grounds.archive.files import write_files
from benchmarks.grounds.archive.job import CAUSES, CHIPS, Effect, Kind, Tracer
from benchmarks.grounds.archive.noise import bursts, generator
from benchmarks.grounds.archive.schedule import simulate
from benchmarks.grounds.archive.settings import Layout, Wish, draw_job
from benchmarks.grounds.ground import Variation
from megascan.reader import read_trace

CASES = list(cases())
QUIET = {
    "chip_spread": 0.0, "wander": 0.0, "operation_cv": 0.0, "rank_cv": 0.0, "host_cv": 0.0,
    "launch_cv": 1e-9, "transfer_cv": 0.0, "hiccup_chance": 0.0,
}  # fmt: skip


def first_of(family, tracer=None):
    return next(
        case
        for case in CASES
        if case.family == family
        and tracer in {None, recipes()[case.name].job.habits.tracer}
        and case.num_ranks <= 16
    )


def quiet_job(*sizes, tracer=Tracer.JUNE):
    job = draw_job(7, Layout(*sizes), Wish(tracers=(tracer,)))
    model = replace(job.model, num_microbatches=6)
    habits = replace(job.habits, overlaps_gradients=False, has_layers=True, heats_up=0.0)
    return replace(
        job, site=replace(job.site, **QUIET), model=model, habits=habits, num_iterations=4
    )


def spans_us(run, stage, name):
    """Return the mean span of this name on each rank of a stage, (dp, tp)."""
    begins = [m.time_us for m in run.marks[stage] if m.name == name and m.phase == "B"]
    ends = [m.time_us for m in run.marks[stage] if m.name == name and m.phase == "E"]
    return np.mean(np.stack(ends) - np.stack(begins), axis=(0, -1))


def test_half_of_the_cases_have_no_fault_of_hardware():
    families = Counter(case.family for case in CASES)
    assert 230 <= len(CASES) <= 265 and min(families.values()) >= 3
    assert 0.45 <= sum(not case.at_fault for case in CASES) / len(CASES) <= 0.55
    assert sum(family.count for family in FAMILIES) == len(CASES)
    tracers = Counter(recipe.job.habits.tracer for recipe in recipes().values())
    assert set(tracers) == set(Tracer)


def test_truth_names_ranks_of_the_job_and_iterations_that_are_traced():
    for case in CASES:
        job = recipes()[case.name].job
        for effect, planted in zip(job.effects, case.planted, strict=True):
            assert (planted.cause, planted.owner) == CAUSES[effect.kind]
            assert set(effect.ranks) <= set(planted.ranks) <= set(range(case.num_ranks))
            assert 1 <= planted.first_iteration <= job.num_iterations
            assert planted.owner == "job" or len(planted.ranks) < case.num_ranks
        if "from then on" in case.family or "stretch" in case.family:
            assert 4 <= job.effects[0].first <= job.num_iterations - 2


@pytest.mark.parametrize("tracer", Tracer)
def test_files_are_the_originals(tmp_path, tracer):
    case = first_of("healthy" if tracer is Tracer.HEAD else "look_alike: heavy layers", tracer)
    once, again = tmp_path / "once", tmp_path / "again"
    assert write(case, once) == write(case, again)
    names = sorted(path.name for path in once.iterdir())
    assert len(names) == case.num_ranks
    for name in names:
        text = (once / name).read_text()
        assert text == (again / name).read_text()
        assert text == json.dumps(json.loads(text), indent=2)
    assert ('"exchange-next"' in text) == (tracer is not Tracer.HEAD)
    assert bool(re.search('"transformer_layer_[1-9][0-9]*"', text)) == (tracer is Tracer.JUNE)
    trace = read_trace(once)
    spans = trace.spans.to_pandas()
    assert spans["iteration"].nunique() == recipes()[case.name].job.num_iterations
    assert len(trace.headers) == case.num_ranks


def test_large_products_are_efficient_and_small_ones_are_not():
    best = 2 * 1024**3 / (CHIPS[1].tflops * 1e6)
    assert product_us(CHIPS[1], 8192, 8192, 8192) == pytest.approx(512 * best, rel=0.08)
    assert product_us(CHIPS[1], 128, 128, 128) > 5 * best / 512
    job = quiet_job(2, 2, 2, 4)
    whole, half = (layer_of(CHIPS[1], job.model, tp).whole().alone_us for tp in (1, 2))
    assert 0.5 < half / whole < 0.7


def test_bursts_cover_their_share_of_the_time():
    assert bursts(generator(1, "bursts"), 0.2, 8, 40_000).mean() == pytest.approx(0.2, abs=0.02)


def test_tensor_mates_wait_for_a_slow_chip_and_all_wait_for_a_slow_link():
    job = quiet_job(4, 2, 2, 8)
    calm = simulate(job, ())
    slow = simulate(job, (Effect(kind=Kind.GPU_CLOCK, factor=1.5, ranks=(2,)),))
    waits = spans_us(slow, 0, "_reduce") - spans_us(calm, 0, "_reduce")
    assert np.argmin(waits[0]) == 2 and waits[0, 0] > 100 and abs(waits[1]).max() < 60
    link = simulate(job, (Effect(kind=Kind.NVLINK, factor=4.0, ranks=(4, 5)),))
    waits = spans_us(link, 0, "_reduce") / spans_us(calm, 0, "_reduce")
    assert waits[1].min() > 2 and waits[0].max() < 1.05


def test_a_slow_stage_is_waited_for_by_its_neighbours_and_by_replicas():
    job = quiet_job(1, 4, 2, 4)
    slow_rank = job.shape.rank(1, 0, 0)
    calm = simulate(job, ())
    slow = simulate(job, (Effect(kind=Kind.GPU_CLOCK, factor=1.6, ranks=(slow_rank,)),))
    grown = [spans_us(slow, s, "forward") / spans_us(calm, s, "forward") for s in range(3)]
    assert grown[1][0, 0] > 1.4 and max(grown[0].max(), grown[2].max(), grown[1][1, 0]) < 1.05
    assert spans_us(slow, 0, "exchange-next")[0, 0] > spans_us(calm, 0, "exchange-next")[0, 0]
    waits = spans_us(slow, 1, "allreduce") - spans_us(calm, 1, "allreduce")
    assert waits[1, 0] > 1000 and waits[0, 0] < waits[1, 0]
    assert (slow.iteration_us > 1.1 * calm.iteration_us).all()


def test_a_busy_host_starves_small_models_only():
    def cost(is_small):
        job = draw_job(5, Layout(4, 2, 2, 8), Wish(is_small=is_small))
        busy = Effect(kind=Kind.HOST_CPU, factor=4.0, ranks=job.shape.host_ranks(1))
        return simulate(job, (busy,)).iteration_us.mean() / simulate(job, ()).iteration_us.mean()

    assert cost(True) > 1.03
    assert cost(True) - 1 > 4 * (cost(False) - 1)


def test_prices_and_slowness_compare_the_same_draws(tmp_path):
    case = first_of("gpu_clock, from then on")
    planted = write(case, tmp_path)[0]
    assert 1 < planted.cost_ratio < planted.held_cost_ratio < planted.factor
    slow = slowness(case)
    others = [rank for rank in range(case.num_ranks) if rank not in planted.ranks]
    before = slice(0, planted.first_iteration - 1)
    assert slow[planted.ranks[0], planted.first_iteration - 1 :].mean() > 1.15
    assert abs(slow[planted.ranks[0], before].mean() - 1) < 0.05
    assert abs(slow[others].mean() - 1) < 0.05


def test_variations_change_chips_and_nothing_else(tmp_path):
    case = first_of("healthy")
    same = write_varied(case, Variation(), None)
    slow = write_varied(case, Variation(slow_rank=1, factor=1.5), tmp_path)
    grown = (slow / same).mean(axis=1)
    assert np.argmax(grown) == 1 and grown[1] > 1.2 and np.delete(grown, 1).max() < 1.02
    assert len(list(tmp_path.iterdir())) == case.num_ranks
    wide = write_varied(case, Variation(chip_spread_ratio=0.2), None).mean(axis=1)
    assert np.ptp(wide / same.mean(axis=1)) > 0.05


def test_lost_files_are_missing_and_the_rest_is_read(tmp_path):
    case = first_of("look_alike: missing rank")
    job = recipes()[case.name].job
    write_files(job, simulate(job, ()), tmp_path)
    assert len(list(tmp_path.iterdir())) == case.num_ranks - len(job.habits.lost_ranks)
    trace = read_trace(tmp_path, allow_missing_ranks=True)
    assert set(trace.spans.to_pandas()["rank"]) == set(range(case.num_ranks)) - set(
        job.habits.lost_ranks
    )
