"""Faults that come and go faster than any stretch of slow iterations."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Owner
from detect.stats.noise import Usual, estimate_noise
from detect.stats.stretches import scattered_stretches
from megascan.topology import Layout

USUAL = Usual(floor=0.001, spread=0.003)


def on_and_off(rank, factor, period):
    def effect(slot):
        slow = slot.rank == rank and (slot.iteration // period) % 2 == 0
        return factor if slow else 1.0

    return effect


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize("factor", [1.05, 1.3])
def test_every_few_iterations(job, period, factor):
    report = job(layout=Layout(dp=4), work=on_and_off(2, factor, period)).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((2,), Owner.NODE)]
    finding = report.findings[0]
    assert finding.slowdown == pytest.approx(factor, rel=0.01)
    assert len(finding.episodes) >= 3
    assert "on and off" in finding.headline


def test_one_of_a_pair(job):
    report = job(layout=Layout(dp=2), work=on_and_off(1, 1.3, 2)).report()
    assert [one.ranks for one in report.findings] == [(1,)]


def test_odd_iterations_of_everybody_are_nobodys_fault(job):
    def odd(slot):
        return 1.5 if (7 * slot.iteration + 3 * slot.rank) % 5 == 0 else 1.0

    (finding,) = job(layout=Layout(dp=4), work=odd).report().findings
    assert (finding.ranks, finding.owner) == ((), Owner.UNDECIDED)


@pytest.mark.parametrize("seed", range(40))
def test_noise_has_one_heap(seed):
    random = np.random.default_rng(seed)
    value = 0.01 * random.standard_t(4, (4, 20))
    nobody = np.zeros(4, dtype=bool)
    found = scattered_stretches(value, estimate_noise(value, nobody, USUAL), 4, nobody)
    assert all(one is None or one.p_value > 1e-3 for one in found)


def test_a_rank_that_is_now_and_then_faster_is_not_slow():
    random = np.random.default_rng(1)
    value = 0.002 * random.standard_normal((4, 20))
    value[1, ::3] -= 0.1
    nobody = np.zeros(4, dtype=bool)
    found = scattered_stretches(value, estimate_noise(value, nobody, USUAL), 4, nobody)
    assert found[1] is None
