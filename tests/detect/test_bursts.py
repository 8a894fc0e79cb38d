"""Pauses in few iterations are found by counting; where everybody has them, nobody is named."""

from __future__ import annotations

import numpy as np

from detect import Cause, Owner
from detect.causes.bursts import bursts
from megascan.topology import Layout


def test_pauses_in_three_of_ten_iterations_are_one_finding(job):
    def pauses(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, gap_ms=pauses).report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (5,))
    assert "in 3 of 10 iterations" in finding.headline
    assert finding.episodes == ((4, 4), (7, 7), (11, 11))


def test_collections_of_one_rank_are_the_jobs(job):
    def collects(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    findings = job(layout=Layout(dp=16), iterations=10, gc_ms=collects).report().findings
    assert {(one.cause, one.owner, one.ranks) for one in findings} == {(Cause.GC, Owner.JOB, (5,))}


def test_few_throttled_passes_are_one_finding(job):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 5 and hit else 1.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, work=throttled).report().findings
    assert (finding.cause, finding.ranks) == (Cause.COMPUTE, (5,))
    assert 1.02 < finding.slowdown < 1.06


def test_pauses_that_everybody_has_name_nobody():
    value = np.zeros((16, 10))
    random = np.random.default_rng(1)
    value[random.random((16, 10)) < 0.2] = 0.2
    assert bursts(value, np.zeros(16, dtype=bool), rate=0.01, least_share=0.01) == []


def test_rate_of_the_others_decides():
    value = np.zeros((16, 10))
    value[5, [1, 4, 8]] = 0.2
    nobody = np.zeros(16, dtype=bool)
    (found,) = bursts(value, nobody, rate=0.01, least_share=0.01)
    assert found.row == 5 and found.other_hits == 0 and found.q_value < 1e-3
    value[:, 2] += 0.2  # everybody at once is no excess
    assert len(bursts(value, nobody, rate=0.01, least_share=0.01)) == 1
    assert bursts(value, np.arange(16) == 5, rate=0.01, least_share=0.01) == []
