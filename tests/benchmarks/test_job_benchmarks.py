"""The benchmarks that train: their statistics, their plans, how their output is read."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from benchmarks.hogs import core_hogged, core_hogged_in_bursts
from benchmarks.jobs import ROOT
from benchmarks.layout_cases import TRIALS, Case, all_cases
from benchmarks.layout_ranks import NUM_WARMUP, Stage
from benchmarks.layout_ranks import Plan as StagePlan
from benchmarks.layouts import Result
from benchmarks.losses import Curves, read_curves
from benchmarks.overhead import costs_of, modes_of
from benchmarks.overhead_ranks import Plan
from benchmarks.paired import OFF, Block, blocks_of, cost_in_cycles, cost_of


def times(modes, length, factors, drift=0.0, noise=0.002, seed=0):
    """Iterations of 100 ms that drift, times the factor of their mode; switches take 50 ms more."""
    random = np.random.default_rng(seed)
    result = []
    for number, mode in enumerate(modes):
        for within in range(length):
            ms = 100 * factors.get(mode, 1.0) * (1 + drift * number) * random.normal(1, noise)
            result.append(ms + (50 if within == 0 else 0))
    return result


def test_every_traced_block_stands_between_untraced_ones():
    modes = modes_of(3)
    assert modes[0] == modes[-1] == OFF
    assert set(modes[::2]) == {OFF}
    assert sorted(modes[1::2]) == ["base"] * 3 + ["full"] * 3
    assert modes[1] != modes[5]  # neither is always first


@pytest.mark.parametrize("drift", [0.0, 0.01, -0.01])
def test_a_planted_cost_is_measured_under_drift(drift):
    modes = modes_of(8)
    measured = times(modes, 4, {"base": 1.001, "full": 1.02}, drift)
    blocks = blocks_of(modes, measured, 4)
    full, base = cost_of("full", blocks), cost_of("base", blocks)
    assert full.low <= full.median <= full.high
    assert full.median == pytest.approx(1.02, abs=0.002)
    assert full.low > 1.015
    assert base.low < 1.001 < base.high + 0.001
    assert full.num_iterations == 8 * 3


def cycles_of(num_blocks, length, factors, *, first=8, wander=0.0, noise=0.002, seed=0):
    """Traced blocks of 100 ms an iteration, by places in a cycle of five; and each one's first."""
    random = np.random.default_rng(seed)
    blocks, firsts = [], []
    for number in range(num_blocks):
        begin = first + number * (length + 1)
        level = 100 * (1 + wander * np.sin(np.arange(length) / 40 + number))
        factor = [factors[(begin + place - 1) % 5] for place in range(length)]
        values = level * factor * random.normal(1, noise, length)
        blocks.append(Block(mode="default", times_ms=tuple(values)))
        firsts.append(begin)
    return blocks, firsts


@pytest.mark.parametrize("wander", [0.0, 0.01])
@pytest.mark.parametrize("cost", [0.0, 0.001, 0.005])
def test_a_cost_of_a_tenth_of_a_per_cent_shows_in_cycles_although_the_machine_wanders(cost, wander):
    factors = (1 + 2 * cost, 1 + 2 * cost, 1 + cost, 1.0, 1.0)
    blocks, firsts = cycles_of(6, 60, factors, wander=wander)
    found = cost_in_cycles("default", blocks, firsts, interval=5, num_quiet=2)
    assert found.mean == pytest.approx(1 + cost, abs=0.0006)
    assert found.mean_high - found.mean_low < 0.0015
    assert found.mean_low - 0.0002 < 1 + cost < found.mean_high + 0.0002
    assert found.untraced_ms == pytest.approx(100, rel=0.01)


def test_cycles_of_other_modes_are_left_out_and_the_first_cycle_has_none_before_it():
    blocks, firsts = cycles_of(2, 20, (1.1, 1.1, 1.0, 1.0, 1.0), first=1, noise=0)
    blocks[1] = Block(mode=OFF, times_ms=blocks[1].times_ms)
    found = cost_in_cycles("default", blocks, firsts, interval=5, num_quiet=2)
    assert found.num_iterations == 3  # cycles
    assert found.mean == pytest.approx(1.04)


def test_the_place_of_a_cycle_that_pays_is_told():
    blocks, firsts = cycles_of(4, 60, (1.01, 1.02, 1.03, 1.0, 1.0), noise=0)
    found = [
        cost_in_cycles("default", blocks, firsts, interval=5, num_quiet=2, place=place).mean
        for place in range(3)
    ]
    assert found == pytest.approx([1.01, 1.02, 1.03], abs=1e-6)


def test_without_cycles_there_are_traced_blocks_alone_and_costs_within_them():
    assert modes_of(0, ["default"]) == ["default"]
    plan = Plan(models={}, modes=["default"], num_warmup=4, block_length=41, window=1, folder="")
    times_ms = [500.0, *(100 + 10 * (iteration % 5 in {1, 2}) for iteration in range(6, 46))]
    found = {cost.mode: cost.mean for cost in costs_of(plan, ["default"], times_ms)}
    assert found == pytest.approx(
        {
            "default, by cycles": 1.04,
            "default, iteration 1 of a cycle": 1.1,
            "default, iteration 2 of a cycle": 1.1,
            "default, iteration 3 of a cycle": 1.0,
        }
    )


def test_a_rare_long_iteration_shows_in_the_mean_only():
    modes = modes_of(4)
    measured = times(modes, 4, {}, noise=0.0)
    measured[4 + 2] += 200  # in the first traced block
    cost = cost_of(modes[1], blocks_of(modes, measured, 4))
    assert cost.median == pytest.approx(1.0)
    assert cost.mean > 1.1


def test_plans_survive_the_way_to_the_ranks(tmp_path):
    plan = Plan(
        models={"a": ["--x", "1"]}, modes=[OFF, "full", OFF], num_warmup=2, block_length=3,
        window=1, folder="f",
    )  # fmt: skip
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert plan.num_iterations == 11
    stages = StagePlan(stages=(Stage(folder="a"), Stage(folder="b", hog="cpu", rank=3)),
                       num_iterations=5, layer_stride=4)  # fmt: skip
    stages.write(tmp_path / "stages.json")
    assert StagePlan.read(tmp_path / "stages.json") == stages


def test_iterations_belong_to_the_stage_that_its_faults_act_in():
    plan = StagePlan(stages=(Stage(folder="a"), Stage(folder="b")), num_iterations=5)
    assert plan.num_all_iterations == NUM_WARMUP + 12
    assert plan.place_of(NUM_WARMUP)[0] < 0
    for stage in range(2):
        first, last = plan.span_of(stage)
        assert plan.place_of(first) == (stage, 0)
        assert plan.place_of(last) == (stage, 5)
    assert plan.span_of(1)[1] == plan.num_all_iterations


def test_cases_name_ranks_that_can_have_their_fault():
    for device, trial in itertools.product(("cpu", "gpu"), TRIALS.values()):
        for num_ranks, first in ((2, "DP2"), (4, "TP2 DP2")):
            cases = all_cases(device, trial, num_ranks)
            assert len({case.file_name for case in cases}) == len(cases)
            assert {one.fault.name for one in cases if one.layout == first} >= {"loader", "gc"}
            assert any(case.fault.hog == "gpu" for case in cases) == (device == "gpu")
            assert {case.rank for case in cases} == set(range(num_ranks))
        assert all(case.rank in (0, 2) for case in cases if case.fault.cause == "loader")


def test_another_trial_has_another_model_and_other_faulty_ranks():
    first, second = (all_cases("gpu", trial, 4) for trial in TRIALS.values())
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.fault.cause == other.fault.cause
        assert one.fault.cause is None or one.rank != other.rank
    assert len({trial.models["gpu"] for trial in TRIALS.values()}) == len(TRIALS)


@pytest.mark.parametrize(
    ("fault", "accused", "causes", "right"),
    [
        ("healthy", (), (), True),
        ("healthy", ((1,),), ("compute",), False),
        ("GPU hog", ((1,),), ("compute",), True),
        ("GPU hog", ((1,),), ("host",), False),
        ("GPU hog", ((2,),), ("compute",), False),
        ("GPU hog", ((1,), (2,)), ("compute", "compute"), False),
        ("CPU hog", (), (), False),
    ],
)
def test_only_the_faulty_rank_with_its_cause_is_right(fault, accused, causes, right):
    (planted,) = (one for one in TRIALS["first"].faults("gpu") if one.name == fault)
    result = Result(
        case=Case(layout="DP4", fault=planted, rank=1), verdict="", accused=accused,
        causes=causes, slowdowns=(1.5,) * len(accused), alignment_p99_us=1.0, iteration_ms=2.0,
    )  # fmt: skip
    assert result.right is right
    assert ("NO" in result.row()) is not right


LOG = """run: one
 [x] iteration        1/       2 | lr | lm loss: 9.0E+00 | loss scale: 4.0 | grad norm: 1.5 | number of skipped iterations:   0 | number of nan iterations:   0 |
 [x] iteration        2/       2 | lr | loss scale: 2.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
run: two
"""  # noqa: E501


def test_curves_are_read_also_where_an_iteration_was_skipped():
    one, two = read_curves(LOG)
    assert one == ("one", (("9.0E+00", "4.0", "1.5", "0"), (None, "2.0", None, "1")))
    assert two == ("two", ())


def test_a_digit_decides():
    curve, other = ((("9", "1", "2", "0"),), (("8", "1", "2", "0"),))
    same = Curves(name="x", untraced=(curve, curve), traced=curve)
    assert (same.repeats, same.unchanged) == (True, True)
    changed = Curves(name="x", untraced=(curve, curve), traced=other)
    assert (changed.repeats, changed.unchanged) == (True, False)
    assert "NO" in changed.row()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_hogged_core_is_shared_and_given_back():
    before = os.sched_getaffinity(0)
    with core_hogged(2):
        assert len(os.sched_getaffinity(0)) == 1
        wall, cpu = time.perf_counter(), time.thread_time()
        while time.thread_time() - cpu < 0.2:
            pass
        wall = time.perf_counter() - wall
    assert os.sched_getaffinity(0) == before
    assert wall > 1.5 * 0.2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_bursts_are_another_process_on_our_last_core_while_inside():
    def others():
        return [one for one in psutil.Process().children() if "bursts" in one.cmdline()]

    with core_hogged_in_bursts():
        (hog,) = others()
        assert hog.cpu_affinity() == [max(os.sched_getaffinity(0))]
        begin = hog.cpu_times().user
        time.sleep(1.2)  # one burst at least, and one pause
        assert 0.01 <= hog.cpu_times().user - begin < 1.0
    assert not others()


@pytest.mark.parametrize("words", [[], ["gpu"], ["disk", "1"], ["cpu", "x"]])
def test_hogs_say_how_they_are_used(words):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.hogs", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "matrix products on GPU 2" in done.stderr
