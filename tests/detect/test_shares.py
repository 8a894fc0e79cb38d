"""Ranks that always have more to compute, while the others of their stage wait for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.shares import OF_EXPERTS, OF_ONE_PLACE, OF_SOMETHING
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout

EXPERTS = Layout(dp=8, ep=4)
"""Ranks 1 and 5 hold the same experts, as 0 and 4 do, 2 and 6, 3 and 7."""


def busier(ranks, factor, *, by_turns=False):
    """These ranks have `factor` times the work, or one after the other in turn."""

    def work(slot):
        if slot.name == "optimizer" or slot.rank not in ranks:
            return 1.0
        is_turn = ranks[slot.iteration % len(ranks)] == slot.rank
        return factor if is_turn or not by_turns else 1.0

    return work


def with_attention(seen, ranks, factor):
    """The same with attention recorded: 100 ms, on some ranks longer."""
    attention_ns = np.full_like(seen.busy_ns, 1e8)
    attention_ns[list(ranks)] *= factor
    return replace(seen, attention_ns=attention_ns)


def judged(seen):
    """What is said of them, and why."""
    report = judge(seen, DetectorSettings())
    return report, [
        one for one in report.findings if "others of the stage, who wait" in one.headline
    ]


@pytest.mark.parametrize(
    ("attention", "owner", "why"),
    [(None, Owner.JOB, OF_ONE_PLACE), (1.0, Owner.JOB, OF_EXPERTS),
     (1.5, Owner.UNDECIDED, OF_SOMETHING)],
)  # fmt: skip
def test_experts_that_everybody_wants_are_the_jobs(job, attention, owner, why):
    seen = observe(job(layout=EXPERTS, work=busier((1, 5), 1.6)).timeline())
    if attention is not None:
        seen = with_attention(seen, (1, 5), attention)
    report, (finding,) = judged(seen)
    assert report.verdict is (Verdict.JOB if owner is Owner.JOB else Verdict.UNDECIDED)
    assert (finding.ranks, finding.owner) == ((1, 5), owner)
    assert why in finding.evidence
    # that they have more to do is said where that is known
    assert ("as much to compute as" in finding.headline) == (owner is Owner.JOB)
    assert ("always compute for 1.59x as long" in finding.headline) == (owner is Owner.UNDECIDED)
    assert ("undecided why" in finding.headline) == (owner is Owner.UNDECIDED)
    assert finding.slowdown == pytest.approx(1.6, rel=0.03)
    assert finding.slowdown_interval[0] <= finding.slowdown <= finding.slowdown_interval[1]


def test_the_cost_is_what_an_even_spread_would_save(job):
    """240 ms of passes an iteration, 384 ms on two of eight ranks: 276 ms on the mean."""
    seen = observe(job(layout=EXPERTS, work=busier((1, 5), 1.6)).timeline())
    _, (finding,) = judged(seen)
    step_ms = float(seen.iteration_ns.mean()) / 1e6
    assert finding.step_time_cost_ratio == pytest.approx(step_ms / (step_ms - 108), rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        {"work": busier((1, 5), 1.08)},  # hardly anything to gain
        {"work": busier(tuple(range(8)), 1.6)},  # nobody has less
        {"work": busier((1, 5, 2, 6), 1.6, by_turns=True)},  # now one and now another
        {"work": busier((1, 5), 1.6), "device": "cpu"},
        {},
    ],
    ids=["little", "all", "turns", "cpu", "even"],
)
def test_nothing_is_said_without_ranks_that_always_have_more(job, changes):
    assert judged(observe(job(layout=EXPERTS, **changes).timeline()))[1] == []


def test_a_slow_device_is_no_larger_share(job):
    """One of eight replicas that do the same: named, and not said twice."""
    report, said = judged(observe(job(layout=Layout(dp=8), work=busier((3,), 1.6)).timeline()))
    assert said == []
    assert [(one.ranks, one.cause) for one in report.findings] == [((3,), Cause.COMPUTE)]


def test_the_busiest_of_a_heavy_stage_is_told_from_its_own_stage(job):
    """The last stage takes 1.3 times as long; in both stages one of four places has more."""
    layout = Layout(dp=8, ep=4, pp=2)

    def work(slot):
        heavy = 1.3 if slot.stage == 1 else 1.0
        return heavy * (1.8 if slot.rank % 4 == 2 and slot.name != "optimizer" else 1.0)

    _, said = judged(observe(job(layout=layout, work=work).timeline()))
    assert [one.ranks for one in said] in ([(2, 6, 10, 14)], [(10, 14)])
