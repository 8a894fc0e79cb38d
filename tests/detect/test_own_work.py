"""Who is slow now and then, by steps and output layers that are longer then: nobody waits there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import OUTPUT_OF_MODULES
from megascan.topology import Layout

AT_TIMES = (10, 13, 14, 17)
"""Iterations in which rank 2, and with it its TP group, is slow."""
LAYOUT = Layout(tp=4, dp=2)


def nodes(seen):
    findings = judge(seen, DetectorSettings()).findings
    return [(one.ranks, one.cause) for one in findings if one.owner is Owner.NODE]


def observed(job, layout, steps, passes=1.1):
    """Observe a job of which the passes of rank 2 and its mates take `passes` times as long in some
    iterations, and the steps of some ranks what `steps` gives them, by rank.
    """
    mates = range(layout.tp)

    def work(slot):
        if slot.iteration not in AT_TIMES:
            return 1.0
        if slot.name == "optimizer":
            return steps.get(slot.rank, 1.0)
        return passes if slot.rank in mates else 1.0

    seen = observe(job(layout=layout, work=work, noise=0.002).timeline())
    return replace(seen, splits_tensor_groups=layout.tp == 1)


@pytest.mark.parametrize(
    ("steps", "passes", "named"),
    [
        ({2: 1.5}, 1.1, [((2,), Cause.COMPUTE)]),
        ({}, 1.1, []),
        ({2: 1.5, 6: 1.5}, 1.1, []),
        ({2: 1.5}, 1.0, []),
        ({2: 5.0}, 1.1, []),
        ({0: 1.5, 1: 1.5, 3: 1.5}, 1.1, []),
    ],
    ids=[
        "steps longer",
        "no step longer",
        "another rank's as well",
        "no passes longer",
        "a pause",
        "mates that wait",
    ],
)
def test_the_rank_whose_steps_are_longer_at_times_is_named(job, steps, passes, named):
    assert nodes(observed(job, LAYOUT, steps, passes)) == named


def test_steps_that_become_longer_for_good_are_not_told_here(job):
    def work(slot):
        return 1.5 if slot.rank == 2 and slot.iteration >= 15 else 1.0

    (finding,) = judge(
        observe(job(layout=LAYOUT, work=work, noise=0.002).timeline()), DetectorSettings()
    ).findings
    assert finding.ranks == (2,) and not any("waits for nobody" in one for one in finding.evidence)


def test_steps_of_one_of_two_mates_do_not_tell_who_waits_in_them(job):
    seen = observed(job, Layout(tp=2, dp=4), {1: 1.5})
    said = [" ".join(one.evidence) for one in judge(seen, DetectorSettings()).findings]
    assert not any("waits for nobody" in one for one in said)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [([1.3] * 4, [((2,), Cause.COMPUTE)]), ([1.1, 1.3, 1.6, 2.0], [])],
    ids=["of one speed", "of any"],
)
def test_the_rank_whose_output_layer_is_longer_at_times_is_named(job, sizes, named):
    seen = observed(job, LAYOUT, {})
    modules_ns = np.full((*seen.busy_ns.shape, 3), np.nan)
    output_ns = 1e6 * np.random.default_rng(1).normal(1.0, 0.002, seen.busy_ns.shape)
    output_ns[2, np.isin(seen.iterations, AT_TIMES)] *= sizes
    modules_ns[:, :, OUTPUT_OF_MODULES] = output_ns
    assert nodes(replace(seen, modules_ns=modules_ns)) == named
