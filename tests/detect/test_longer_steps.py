"""Steps that become longer inside the trace while no rank stands out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.unexplained import (
    LONGER_OR_ONE,
    NOTHING_ELSE,
    ONE_OR_ALL,
    _usual_iteration_ns,
    step_change,
)
from detect.detector import judge
from detect.observe.extract import observe
from detect.text import render_text
from megascan.topology import Layout

SETTINGS = DetectorSettings()
HOSTS_OF_FOUR = Layout(dp=8)


def longer_from(seen, place, factor):
    """The same observations, whose steps take `factor` times as long from a place in the window on
    and whose passes do not show it.
    """
    since = np.arange(len(seen.iterations)) >= place
    return replace(seen, iteration_ns=np.where(since, factor, 1.0) * seen.iteration_ns)


def gaps_from(seen, place, factors):
    """The same, with 0.1 ms of gaps on each row, so many times as long from that place on."""
    since = np.arange(len(seen.iterations)) >= place
    gaps_ns = np.where(since, np.asarray(factors)[:, None], 1.0) * 1e5
    noise = np.exp(0.1 * np.random.default_rng(0).standard_normal(gaps_ns.shape))
    return replace(seen, lost_ns={**seen.lost_ns, Cause.HOST: gaps_ns * noise})


def told(report):
    """Cause, owner and ranks of each finding."""
    return [(one.cause, one.owner, one.ranks) for one in report.findings]


def test_a_host_whose_gaps_grow_with_the_step_is_named(job):
    """Its ranks' passes are as long as those of the others, who wait for them inside theirs."""
    seen = observe(job(layout=Layout(dp=16), hosts=8).timeline())
    slow = gaps_from(longer_from(seen, 12, 2.0), 12, [4.0] * 8 + [1.0] * 8)
    report = judge(slow, SETTINGS)
    assert told(report) == [(Cause.HOST, Owner.NODE, tuple(range(8)))]
    (finding,) = report.findings
    assert finding.first_iteration == seen.iterations[12] and finding.onset_in_trace
    assert finding.slowdown == pytest.approx(2.0, rel=0.05)
    assert finding.step_time_cost_ratio == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    "factors",
    [[4.0] * 3 + [1.0] * 5, [4.0] * 8, [1.3] * 4 + [1.0] * 4, [4.0] * 5 + [1.0] * 3],
    ids=["three of four", "both hosts", "a little", "one elsewhere, too"],
)
def test_gaps_that_are_not_one_hosts_name_nobody(job, factors):
    seen = observe(job(layout=HOSTS_OF_FOUR, hosts=4).timeline())
    report = judge(gaps_from(longer_from(seen, 12, 2.0), 12, factors), SETTINGS)
    assert told(report) == [(Cause.UNKNOWN, Owner.UNDECIDED, ())]


def test_four_ranks_against_four_may_be_chance(job):
    seen = observe(job(layout=HOSTS_OF_FOUR, hosts=4).timeline())
    slow = gaps_from(longer_from(seen, 12, 2.0), 12, [4.0] * 4 + [1.0] * 4)
    assert told(judge(slow, SETTINGS)) == [(Cause.HOST, Owner.UNDECIDED, (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("tokens", "words"), [(None, LONGER_OR_ONE), (lambda rank: (4096, 4096), ONE_OR_ALL)]
)
def test_passes_of_all_that_become_longer_are_undecided(job, tokens, words):
    def later(slot):
        return 1.2 if slot.iteration >= 15 else 1.0

    report = job(layout=Layout(tp=2, dp=2), work=later, tokens=tokens).report()
    assert told(report) == [(Cause.COMPUTE, Owner.UNDECIDED, (0, 1, 2, 3))]
    assert report.findings[0].first_iteration == 15
    assert words in report.findings[0].evidence


def test_a_step_that_nothing_explains_is_not_healthy(job):
    seen = observe(job(layout=HOSTS_OF_FOUR).timeline())
    report = judge(longer_from(seen, 12, 1.5), SETTINGS)
    assert told(report) == [(Cause.UNKNOWN, Owner.UNDECIDED, ())]
    assert report.verdict == Verdict.UNDECIDED and NOTHING_ELSE in report.findings[0].evidence


def test_whoever_is_named_explains_the_step(job, slow):
    """The other ranks wait for rank 3 from iteration 15 on: one finding, not two."""
    report = job(layout=Layout(dp=4), work=slow(3, 1.5, first=15)).report()
    assert told(report) == [(Cause.COMPUTE, Owner.NODE, (3,))]


def test_processes_on_cpus_take_time_from_each_other(job):
    seen = observe(job(layout=HOSTS_OF_FOUR, device="cpu").timeline())
    assert judge(longer_from(seen, 12, 1.5), SETTINGS).findings == ()


@pytest.mark.parametrize(
    "factors",
    [
        [1.0] * 20,
        [1.0] * 10 + [1.03] * 10,
        [1.5] * 10 + [1.0] * 10,
        [1.0] * 9 + [3.0] + [1.0] * 10,
        [1.0] * 18 + [1.5] * 2,
        [1.0, 1.4] * 10,
        [1.0, 1.0, 1.0, 1.5] * 5,
        [1.0] + [1.4] * 19,
    ],
    ids=[
        "even",
        "a little",
        "quicker",
        "one spike",
        "too late",
        "to and fro",
        "checkpoints",
        "the first",
    ],
)
def test_steps_that_do_not_rise_for_good(factors):
    noise = np.exp(0.005 * np.random.default_rng(1).standard_normal(20))
    assert step_change(np.array(factors) * noise * 1e8, SETTINGS) is None


@pytest.mark.parametrize("num_before", [2, 3, 10])
def test_a_rise_is_found_where_it_is(num_before):
    factors = np.array([1.0] * num_before + [1.2] * 8)
    noise = np.exp(0.005 * np.random.default_rng(2).standard_normal(len(factors)))
    change = step_change(factors * noise * 1e8, SETTINGS)
    assert change is not None and change.num_before == num_before
    assert change.course.effect == pytest.approx(np.log(1.2), abs=0.01)


def test_healthy_steps_seldom_rise_by_chance():
    """Noise of 5 % an iteration: 1 % of windows at most, by the false-discovery rate."""
    random = np.random.default_rng(3)
    steps = 1e8 * np.exp(0.05 * random.standard_normal((2000, 20)))
    assert sum(step_change(one, SETTINGS) is not None for one in steps) <= 20


@pytest.mark.parametrize(
    ("factor", "is_said"), [(1.0, False), (1.3, False), (2.0, True)], ids=["even", "a bit", "twice"]
)
def test_iterations_that_take_far_longer_are_a_note_and_no_finding(job, factor, is_said):
    """3 of 20: checkpoints take as long, and so does a rank for whom the others wait unseen."""
    seen = observe(job(layout=HOSTS_OF_FOUR).timeline())
    is_long = np.isin(np.arange(20), (4, 9, 15))
    spiky = replace(seen, iteration_ns=np.where(is_long, factor, 1.0) * seen.iteration_ns)
    report = judge(spiky, SETTINGS)
    assert report.verdict == Verdict.HEALTHY
    said = [note for note in report.notes if "usual step" in note]
    assert len(said) == len(report.caveats) == is_said
    if is_said:
        assert report.caveats[0] in said[0]
        assert "; but 3 of 20 iterations take up to" in render_text(report).splitlines()[0]
        assert said[0].startswith("3 of 20 iterations take up to 2.0") and "13%" in said[0]


@pytest.mark.parametrize(
    ("places", "verdict"), [((4, 9, 15), Verdict.UNDECIDED), ((4,), Verdict.HEALTHY)]
)
def test_a_step_that_is_mostly_lost_in_long_iterations_is_not_healthy(job, places, verdict):
    """Three of 20 that take five times as long lose 38 % of all time; one may be a checkpoint."""
    seen = observe(job(layout=HOSTS_OF_FOUR).timeline())
    is_long = np.isin(np.arange(20), places)
    spiky = replace(seen, iteration_ns=np.where(is_long, 5.0, 1.0) * seen.iteration_ns)
    report = judge(spiky, SETTINGS)
    assert (report.verdict, report.findings) == (verdict, ())
    assert any("usual step" in one for one in report.hides) == (verdict is Verdict.UNDECIDED)


@pytest.mark.parametrize(("times", "usual"), [
    ([83, 83, 617, 585], 83),  # the median, 334, is nobody's
    ([83, 84, 85, 617], 84.5),
    ([100, 110, 120, 130], 115),
    ([100, 100], 100),
    ([100, 300], 100),
])  # fmt: skip
def test_what_an_iteration_usually_takes(times, usual):
    assert _usual_iteration_ns(np.array(times, dtype=float)) == pytest.approx(usual)


def test_half_of_the_iterations_may_be_long(job):
    seen = observe(job(layout=HOSTS_OF_FOUR, iterations=8).timeline())
    spiky = replace(seen, iteration_ns=np.repeat([1.0, 7.0], 4) * seen.iteration_ns)
    assert judge(spiky, SETTINGS).verdict is not Verdict.HEALTHY
    spiky = replace(seen, iteration_ns=np.tile([1.0, 7.0], 4) * seen.iteration_ns)
    report = judge(spiky, SETTINGS)
    assert report.verdict is Verdict.UNDECIDED
    assert any("4 of 8 iterations take up to 7" in one for one in report.hides)


def held_up(seen, by, factor=1.8):
    """The same observations with some long iterations, {slot: rows that are busy then}; all other
    rows wait for these.
    """
    growth = np.zeros(len(seen.iterations))
    growth[list(by)] = (factor - 1.0) * np.median(seen.iteration_ns)
    waiting_ns = np.tile(growth, (len(seen.members), 1))
    busy_ns = seen.busy_ns.copy()
    for slot, rows in by.items():
        waiting_ns[list(rows), slot] -= growth[slot]
        busy_ns[list(rows), slot] += growth[slot]
    return replace(
        seen, iteration_ns=seen.iteration_ns + growth, waiting_ns=waiting_ns, busy_ns=busy_ns
    )


@pytest.mark.parametrize(
    ("by", "ranks"),
    [
        ({3: (2,), 6: (2,)}, (2,)),
        ({3: (2,)}, None),  # one iteration is chance
        ({3: (2,), 6: (5,)}, None),  # one now, another then
        ({3: (0, 1, 2, 3), 6: (0, 1, 2, 3)}, (0, 1, 2, 3)),  # a host
        ({3: range(8), 6: range(8)}, None),  # all alike: longer data, a checkpoint of all
    ],
    ids=["one rank", "once", "by turns", "host", "all"],
)
def test_who_holds_up_all_others_now_and_then_is_pointed_at(job, by, ranks):
    """Two of nine iterations are too few for bursts or levels; HEALTHY they are not."""
    run = job(layout=HOSTS_OF_FOUR, hosts=2, iterations=9)
    report = judge(held_up(observe(run.timeline()), by), SETTINGS)
    assert not [one for one in report.findings if one.owner == Owner.NODE]
    if ranks is None:
        assert report.verdict == Verdict.HEALTHY
        assert sum("usual step" in note for note in report.notes) == 1
        return
    assert told(report) == [(Cause.COMPUTE, Owner.UNDECIDED, ranks)]
    (finding,) = report.findings
    assert finding.episodes == ((6, 6), (9, 9)) and "all others on and off" in finding.headline
    assert "2 of 9 iterations" in finding.evidence[0], finding.evidence


def test_what_else_than_passes_grew_is_not_said_to_be_compute(job):
    seen = observe(job(layout=HOSTS_OF_FOUR, hosts=2, iterations=9).timeline())
    long = held_up(seen, {3: (2,), 6: (2,)})
    report = judge(replace(long, busy_ns=seen.busy_ns), SETTINGS)
    assert told(report) == [(Cause.UNKNOWN, Owner.UNDECIDED, (2,))]
    assert any("neither passes nor gaps" in one for one in report.findings[0].evidence)


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ({3: 1.5}, [(Cause.COMPUTE, Owner.NODE, (3,))]),
        ({3: 1.5, 1: 1.4}, [(Cause.COMPUTE, Owner.UNDECIDED, (1, 3))]),
        (dict.fromkeys(range(4), 1.5), [(Cause.COMPUTE, Owner.UNDECIDED, (0, 1, 2, 3))]),
    ],
    ids=["one stage", "two stages", "all stages"],
)
def test_a_lone_stage_that_becomes_slower_is_its_node(job, since, expected):
    """No layers were recorded, so stages cannot be compared; but one takes longer than before,
    while the others take as long for the same microbatches.
    """

    def later(slot):
        return since.get(slot.rank, 1.0) if slot.iteration >= 15 else 1.0

    report = job(layout=Layout(pp=4), work=later, iterations=24).report()
    changed = [one for one in report.findings if one.cause != Cause.STAGE_IMBALANCE]
    assert [(one.cause, one.owner, one.ranks) for one in changed] == expected
    (finding,) = changed
    assert finding.first_iteration == 15 and finding.onset_in_trace
    if finding.owner is Owner.NODE:
        assert finding.slowdown == pytest.approx(1.5, rel=0.02)
        assert any("with the same microbatches" in one for one in finding.evidence)
