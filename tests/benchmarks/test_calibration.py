"""The judge of figures: grounds know their chips, and what is judged is what was planted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import calibration_simulator
from benchmarks.calibration import Figure, figures_of, table_of
from benchmarks.calibration import _cases as calibration_cases
from benchmarks.grounds.__main__ import GROUNDS, ground_named
from benchmarks.grounds.ground import Planted, Variation


def faulty_case(name):
    cases = ground_named(name).cases()
    return next(
        one for one in cases
        if one.family == "gpu_clock" and len(one.planted) == 1 and one.num_ranks <= 16
    )  # fmt: skip


@pytest.mark.parametrize("name", GROUNDS)
def test_a_ground_knows_which_chip_is_slow(name):
    case = faulty_case(name)
    level = np.median(ground_named(name).slowness(case)[:, -4:], axis=1)
    assert int(np.argmax(level)) in case.planted[0].ranks
    sound = np.delete(level, case.planted[0].ranks)
    assert np.all((sound > 0.98) & (sound < 1.06))


@pytest.mark.parametrize("name", GROUNDS)
def test_a_varied_job_has_the_slow_chip_and_no_other_change(name, tmp_path):
    ground, case = ground_named(name), faulty_case(name)
    usual = ground.write_varied(case, Variation(), None)
    slow = ground.write_varied(case, Variation(slow_rank=1, factor=1.5), tmp_path)
    ratio = np.median(slow / usual, axis=1)
    assert ratio[1] > 1.1
    assert np.delete(ratio, 1) == pytest.approx(1.0, abs=0.02)
    assert list(tmp_path.iterdir())


def test_the_own_simulator_is_a_ground_too():
    case = next(one for one in calibration_simulator.cases() if one.family == "compute")
    level = calibration_simulator.slowness(case)[:, 0]
    assert int(np.argmax(level)) == case.planted[0].ranks[0]


@pytest.mark.parametrize(
    ("ground", "name", "least"),
    [
        ("original", "two-clocks-tp2pp4dp2-june-base-148", 1.2),  # waiting inside loss and backward
        ("cluster", "host-cpu-ddp16-s9010", 1.3),  # buckets reduced beside the backward pass
    ],
)
def test_costs_of_jobs_whose_waiting_is_hidden(ground, name, least):
    case = next(one for one in ground_named(ground).cases() if one.name == name)
    costs = [one for one in figures_of(case, ("costs",)) if one.true > 1.1]
    assert costs
    assert all(one.stated > least for one in costs)


def test_a_cost_is_that_of_the_settled_iterations_in_which_a_fault_holds():
    fault = Planted(kind="x", cause="compute", owner="node", ranks=(0,), first_iteration=4)
    sound = np.array([30.0, 10.0, 10.0, 10.0, 10.0])
    slow = sound * [1.0, 1.0, 1.0, 2.0, 2.0]
    priced = fault.priced([1, 2, 3, 4, 5], slow, sound)
    assert priced.held_cost_ratio == 2.0
    assert priced.cost_ratio == pytest.approx(90 / 70)
    lasting = replace(fault, first_iteration=1).priced([1, 2, 3], 1.5 * slow[:3], sound[:3])
    assert lasting.held_cost_ratio == 1.5


def test_a_draw_has_other_cases_and_none_unseen():
    cases = calibration_cases(draw=7, every=50)
    assert len(cases) > 10 and not any(case.unseen for case in cases)
    assert not {case.name for case in cases} & {case.name for case in calibration_cases(0, 1)}


def test_the_table_counts_right_figures_by_ground():
    made = {"question": "costs", "group": "link", "name": "x", "stated": 1.0, "true": 1.0}
    figures = [
        Figure(ground="kernels", right=True, **made),
        Figure(ground="cluster", right=False, **made),
    ]
    line = table_of(figures).splitlines()[-1]
    assert "0.500 (1/2" in line
    assert "1 of 1" in line and "0 of 1" in line


def test_the_command_prints_a_table_and_goes_on_from_its_file(tmp_path):
    kept = tmp_path / "kept.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.calibration", "--every", "2000", "--ask", "power",
        "--keep", str(kept), "--workers", "1",
    ]  # fmt: skip
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("| figure | of | right |")
    assert all(json.loads(line)["case"] for line in kept.read_text().splitlines())
