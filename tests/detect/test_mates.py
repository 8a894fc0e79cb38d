"""Which rank of a TP group is slow where the trace does not show who waits: its optimizer tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import Tokenwise
from megascan.topology import Layout

PLACES = {0: 1.7, 1: 1.0}
"""What the steps of the two ranks of a TP group take, whatever the devices."""


def job_of(job, layout, slow, step, **changes):
    """Make a job in which the passes of `slow` ranks take 1.43 times as long; `step` is what a
    slot's optimizer takes.
    """

    def work(slot):
        if slot.name == "optimizer":
            return step(slot)
        return 1.43 if slot.rank in slow else 1.0

    return job(layout=layout, work=work, **changes)


def merged(made):
    """Judge a job of which no communication within TP groups was recorded at granularity base."""
    seen = observe(made.timeline())
    return judge(replace(seen, splits_tensor_groups=False), DetectorSettings())


def nodes(report):
    return [one.ranks for one in report.findings if one.owner is Owner.NODE]


def of_place(slot, longer=()):
    return PLACES[slot.rank % 2] * dict(longer).get(slot.rank, 1.0)


def test_the_longer_step_at_its_place_tells_who_is_slow(job):
    made = job_of(job, Layout(tp=2, dp=4), {2, 3}, lambda slot: of_place(slot, {3: 1.08}.items()))
    (finding,) = merged(made).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.COMPUTE, Owner.NODE)


def test_waiting_in_the_step_does_not_hide_who_is_slow(job):
    """The last stage's steps wait for the norm of the first, for 60 times what a step takes."""

    def step(slot):
        return of_place(slot) + 60.0 * slot.stage + (0.1 if slot.rank == 11 else 0.0)

    made = job_of(job, Layout(tp=2, dp=4, pp=2), {10, 11}, step, noise=0.0002)
    assert nodes(merged(made)) == [(11,)]


@pytest.mark.parametrize(
    "longer",
    [
        {},
        {2: 1.08, 3: 1.08},  # both: longer data do no such thing, nor does one slow device
        dict.fromkeys((0, 2, 5, 6), 1.06),  # chips that differ by as much in other groups
    ],
    ids=["none", "both", "chips"],
)
def test_a_group_without_a_lone_longer_step_is_undecided(job, longer):
    made = job_of(job, Layout(tp=2, dp=4), {2, 3}, lambda slot: of_place(slot, longer.items()))
    (finding,) = merged(made).findings
    assert (finding.ranks, finding.owner) == ((2, 3), Owner.UNDECIDED)


@pytest.mark.parametrize(("factor", "named"), [(1.15, (3,)), (1.02, ())])
def test_of_two_replicas_the_step_must_be_longer_than_sound_chips_differ(job, factor, named):
    longer = {3: factor}.items()
    made = job_of(job, Layout(tp=2, dp=2, pp=1), {2, 3}, lambda slot: of_place(slot, longer))
    assert nodes(merged(made)) == ([named] if named else [])


@pytest.mark.parametrize(
    ("longer", "named"),
    [({2: 1.15}, [(2,)]), ({}, [])],
    ids=["one", "none"],
)
def test_mates_whose_waiting_nobody_recorded_are_told_apart(job, longer, named):
    made = job_of(job, Layout(tp=2, dp=2), {2, 3}, lambda slot: of_place(slot, longer.items()))
    seen = observe(made.timeline())
    assert seen.hidden_axes == ("tp",)
    report = judge(seen, DetectorSettings())
    assert nodes(report) == named
    if named:
        (finding,) = report.findings
        assert "it alone has a slower optimizer step" in finding.evidence[-1]
        assert np.isclose(finding.slowdown, 1.43, rtol=0.02)


@pytest.mark.parametrize(
    ("step", "lookups", "named"),
    [
        (1.15, {}, [(4,)]),
        (1.06, {4: 1.05}, [(4,)]),
        (1.06, {}, []),
        (1.06, {5: 1.05}, []),  # another one's
        (1.0, {4: 1.05}, []),
    ],
)
def test_mates_show_by_how_much_steps_and_lookups_of_sound_ranks_differ(job, step, lookups, named):
    """The four ranks of one of two groups are slow alike; steps of sound ones differ by 1 %."""
    sound = np.random.default_rng(4).normal(1.0, [[0.012], [0.003]], size=(2, 8))

    def steps(slot):
        return sound[0, slot.rank] * (step if slot.rank == 4 else 1.0)

    made = job_of(job, Layout(tp=4, dp=2), {4, 5, 6, 7}, steps, noise=0.002)
    seen = observe(made.timeline())
    lookups_ns = np.full((*seen.busy_ns.shape, 2), 5e5) * sound[1][:, None, None]
    for rank, factor in lookups.items():
        lookups_ns[rank] *= factor
    told = Tokenwise(dense_ns=np.full(seen.busy_ns.shape, np.nan), lookups_ns=lookups_ns)
    seen = replace(seen, tokenwise=told, splits_tensor_groups=False)
    assert nodes(judge(seen, DetectorSettings())) == named
