"""Ranks whose optimizer step alone is slow: memory, PCIe, a host's cores."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.device import GPU_ADVICE, HOST_ADVICE
from detect.causes.optimizer import ADVICE, END_TOGETHER, MATE, NOBODY_WAITS, NOT_ALONE, ONE_PEER
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.operations import Tokenwise
from megascan.topology import Layout

MS = 1e6


def slow_step(rank, factor, first=0):
    def effect(slot):
        is_it = slot.rank == rank and slot.name == "optimizer" and slot.iteration >= first
        return factor if is_it else 1.0

    return effect


def report_of(made, waits_ms, **changes):
    """Judge a job in which each rank waits so long for others, by rank."""
    seen = observe(made.timeline())
    waiting = np.repeat(np.array(waits_ms)[:, None] * MS, len(seen.iterations), axis=1)
    return judge(replace(seen, waiting_ns=waiting, **changes), DetectorSettings())


def named(report):
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


def test_a_slow_step_that_all_wait_for_is_the_nodes(job):
    made = job(layout=Layout(dp=4), work=slow_step(2, 3.0))
    report = report_of(made, [9.0, 9.0, 0.0, 9.0])
    assert named(report) == [((2,), Cause.COMPUTE, Owner.NODE)]
    (finding,) = report.findings
    assert finding.slowdown == pytest.approx(3.0, rel=0.03)
    assert "for its optimizer step in all traced iterations" in finding.headline
    assert "14.9 ms an iteration against 5.01 ms of its 3 peers" in finding.evidence[0]
    assert finding.next_steps == ADVICE
    assert report.verdict is Verdict.DEGRADED


def test_one_that_begins_inside_the_trace_has_an_onset(job):
    made = job(layout=Layout(dp=4), work=slow_step(1, 4.0, first=12))
    (finding,) = report_of(made, [15.0, 0.0, 15.0, 15.0]).findings
    assert (finding.ranks, finding.first_iteration) == ((1,), 12)
    assert finding.onset_in_trace


@pytest.mark.parametrize(("share", "owner"), [(0.3, Owner.NODE), (0.8, Owner.UNDECIDED)])
def test_a_step_of_kernels_launched_just_in_time_may_show_the_host(job, share, owner):
    made = job(layout=Layout(dp=4), work=slow_step(2, 3.0))
    starved = np.where(np.arange(4) == 2, share, 0.0)[:, None] * np.ones(20)
    (finding,) = report_of(made, [9.0, 9.0, 0.0, 9.0], starved_share=starved).findings
    assert (finding.ranks, finding.owner) == ((2,), owner)
    if owner == Owner.UNDECIDED:
        assert "80% of its operations were launched only just in time" in finding.evidence[-1]
        assert finding.next_steps == (HOST_ADVICE[0], *ADVICE)


def test_a_step_that_nobody_waits_for_may_itself_wait(job):
    made = job(layout=Layout(dp=4), work=slow_step(2, 3.0))
    for waits in ([0.0] * 4, [9.0] * 4):
        (finding,) = report_of(made, waits).findings
        assert finding.owner is Owner.UNDECIDED
        assert finding.evidence[-1] == NOBODY_WAITS


@pytest.mark.parametrize(
    ("slow_ranks", "owner"), [((2,), Owner.NODE), ((2, 3), Owner.UNDECIDED)], ids=["one", "mates"]
)
def test_slow_memory_slows_passes_as_well_whoever_waits(job, slow_ranks, owner):
    """Of two mates with slow passes one may wait for the other, in its step as well."""

    def effect(slot):
        passes = 1.2 if slot.rank in slow_ranks else 1.0
        return slow_step(2, 3.0)(slot) if slot.name == "optimizer" else passes

    found = report_of(job(layout=Layout(tp=2, dp=4), work=effect), [0.0] * 8).findings
    (finding,) = [one for one in found if one.ranks == (2,)]
    assert finding.owner == owner
    assert finding.next_steps == (GPU_ADVICE[0], *ADVICE), "it may be the device as a whole"


def test_a_slow_step_that_costs_nothing_is_nobodys_fault(job):
    """By the replay; the others wait in it for a group that is slow, in what was not recorded."""
    made = job(layout=Layout(dp=4), work=slow_step(2, 3.0))
    free = SimpleNamespace(ratio=lambda *_: 1.0, ratio_of_transfers=lambda *_: 1.0)
    (finding,) = report_of(made, [9.0, 9.0, 0.0, 9.0], costs=free).findings
    assert (finding.owner, finding.evidence[-1]) == (Owner.UNDECIDED, NOBODY_WAITS)


def test_waiting_beside_passes_for_parameters_is_waiting_too(job):
    """Parameters gathered beside forward passes: the others' passes last as long as these take."""
    made = job(layout=Layout(dp=4), work=slow_step(2, 3.0))
    hidden = np.repeat(np.array([9.0, 9.0, 0.0, 9.0])[:, None] * MS, made.iterations, axis=1)
    (finding,) = report_of(made, [0.0] * 4, split_wait_ns=hidden).findings
    assert (finding.ranks, finding.owner) == ((2,), Owner.NODE)


@pytest.mark.parametrize(("factor", "owner"), [(1.45, Owner.UNDECIDED), (2.5, Owner.NODE)])
def test_of_two_the_slower_one_is_named_where_hosts_do_not_explain_it(job, factor, owner):
    made = job(layout=Layout(dp=2), noise=0.005, microbatches=4, work=slow_step(0, factor))
    (finding,) = report_of(made, [0.0, 30.0]).findings
    assert (finding.ranks, finding.owner) == ((0,), owner)
    assert (ONE_PEER in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("factor", "changes"),
    [
        (1.25, {}),  # launches of sound hosts differ by as much
        (1.45, {"microbatches": 32}),  # 0.2 % of a step
        (3.0, {"device": "cpu"}),  # shared cores
    ],
)
def test_small_differences_and_shared_cores_are_silent(job, factor, changes):
    made = job(layout=Layout(dp=4), work=slow_step(2, factor), **changes)
    assert named(report_of(made, [9.0, 9.0, 0.0, 9.0])) == []


def test_a_device_that_is_slow_at_everything_computes_slowly(job, slow):
    made = job(layout=Layout(dp=4), work=slow(2, 1.6))
    (finding,) = report_of(made, [100.0, 100.0, 0.0, 100.0]).findings
    assert "computes 1.6" in finding.headline


def test_a_tp_rank_that_has_more_to_update_has_no_slow_step(job):
    made = job(layout=Layout(tp=2, dp=4), work=lambda slot: slow_step(slot.rank & ~1, 2.0)(slot))
    assert named(report_of(made, [0.0, 9.0] * 4)) == []


def test_one_rank_of_a_group_whose_communication_is_hidden_is_told(job):
    made = job(layout=Layout(tp=2, dp=4), work=slow_step(5, 3.0))
    report = report_of(made, [9.0] * 4 + [0.0, 0.0] + [9.0] * 2, splits_tensor_groups=False)
    assert named(report) == [((5,), Cause.COMPUTE, Owner.NODE)]


@pytest.mark.parametrize("other", [4, 6])
def test_a_rank_whose_mate_has_a_far_longer_step_may_wait_for_it(job, other):
    """Rank 5's step takes 3 times as long; that of its mate, or of another rank, 1.9 times."""

    def both(slot):
        return slow_step(5, 3.0)(slot) * slow_step(other, 1.9)(slot)

    waits = [9.0] * 4 + [0.0] * 4
    report = report_of(job(layout=Layout(tp=2, dp=4), work=both), waits)
    found = {one.ranks: one for one in report.findings}
    assert found[5,].owner is Owner.NODE and MATE not in found[5,].evidence
    assert (MATE in found[other,].evidence) == (other == 4)


def test_steps_of_two_pairs_that_are_slow_alike_may_wait(job):
    """Beside one peer each; a single one of them is the node's."""

    def both(slot):
        return slow_step(1, 2.0)(slot) * slow_step(5, 2.2)(slot)

    layout = Layout(tp=2, pp=2, dp=2)
    waits = [9.0, 0.0, 9.0, 9.0, 9.0, 0.0, 9.0, 9.0]
    alone = report_of(job(layout=layout, work=slow_step(5, 2.2)), waits)
    assert [(one.ranks, one.owner) for one in alone.findings] == [((5,), Owner.NODE)]
    two = report_of(job(layout=layout, work=both), waits).findings
    assert {(one.ranks, one.owner) for one in two} == {
        ((1,), Owner.UNDECIDED), ((5,), Owner.UNDECIDED)
    }  # fmt: skip
    assert all(NOT_ALONE in one.evidence for one in two)


@pytest.mark.parametrize(("other", "together"), [(3.0, True), (9.0, False)])
def test_stages_of_a_replica_that_lose_the_same_time_may_wait_for_one_rank(job, other, together):
    """Ranks 2 and 8 are of replica 2 of six; one that loses far more is no victim."""
    layout = Layout(pp=2, dp=6)

    def both(slot):
        return slow_step(2, 3.0)(slot) * slow_step(8, other)(slot)

    waits = [60.0] * 12
    waits[2] = waits[8] = 0.0
    found = report_of(job(layout=layout, work=both), waits).findings
    assert {one.ranks for one in found} == {(2,), (8,)}
    assert all((END_TOGETHER in one.evidence) == together for one in found)
    assert together == all(one.owner is Owner.UNDECIDED for one in found)


def slow_at_both(step, passes, slow=2, mate=1.0):
    """Return the effect of a rank that is slower in its step and in its passes; `mate` of rank 3's
    passes.
    """

    def effect(slot):
        if slot.rank == 3 and slot.name != "optimizer":
            return mate
        if slot.rank != slow:
            return 1.0
        return step if slot.name == "optimizer" else passes

    return effect


@pytest.mark.parametrize(
    ("step", "passes", "mate", "is_named"),
    [
        (1.3, 1.04, 1.0, True),
        (1.3, 1.04, 1.05, False),  # another rank's passes are slower still
        (1.04, 1.025, 1.0, False),  # hosts launch at speeds that differ by as much
    ],
)
def test_slow_memory_is_told_by_a_step_beside_passes_that_are_slower_than_all(
    job, step, passes, mate, is_named
):
    """A fifth of a pass moves memory: steps of 1.3 times the time go with passes of 1.04."""
    made = job(layout=Layout(dp=6), work=slow_at_both(step, passes, mate=mate))
    steps = [one for one in made.report().findings if "optimizer step" in one.headline]
    assert [(one.ranks, one.owner) for one in steps] == [((2,), Owner.NODE)] * is_named


def test_a_step_tells_a_slow_device_where_uneven_data_hide_its_passes(job):
    """Documents differ by a quarter from one iteration to the next, steps by nothing."""
    data = np.random.default_rng(5).lognormal(0.0, 0.25, size=(8, 400))

    def effect(slot):
        own = slow_at_both(1.12, 1.3)(slot)
        return own if slot.name == "optimizer" else own * data[slot.rank, slot.iteration]

    (finding,) = [one for one in job(layout=Layout(dp=8), work=effect).report().findings
                  if one.owner is Owner.NODE]  # fmt: skip
    assert finding.ranks == (2,)
    assert "and for its passes 1." in finding.headline
    assert finding.step_time_cost_ratio > 1.05


@pytest.mark.parametrize("num_replicas", [3, 4])
@pytest.mark.parametrize(
    ("lookups", "passes", "expected"),
    [
        (1.25, 1.015, [((2,), Cause.COMPUTE, Owner.NODE)]),
        (1.0, 1.015, []),
    ],
    ids=["slow memory", "a step alone"],
)
def test_a_step_is_believed_where_lookups_are_as_slow(job, lookups, passes, expected, num_replicas):
    """Its step takes 1.3 times as long, less than hosts of one model may make of it."""

    def work(slot):
        if slot.rank != 2:
            return 1.0
        return 1.3 if slot.name == "optimizer" else passes

    seen = observe(job(layout=Layout(dp=num_replicas), work=work, noise=0.002).timeline())
    lookups_ns = np.full((*seen.busy_ns.shape, 2), 5.0 * MS)
    lookups_ns[2] *= lookups
    told = Tokenwise(dense_ns=np.full(seen.busy_ns.shape, np.nan), lookups_ns=lookups_ns)
    found = named(judge(replace(seen, tokenwise=told), DetectorSettings()))
    assert [one for one in found if one[2] is Owner.NODE] == expected


@pytest.mark.parametrize(
    ("steps", "layout", "gathered", "expected"),
    [
        ({2: 1.13}, Layout(dp=8, ep=8), False, [((2,), Cause.COMPUTE, Owner.NODE)]),
        ({2: 1.13}, Layout(dp=8), True, [((2,), Cause.COMPUTE, Owner.NODE)]),
        ({2: 1.13}, Layout(dp=8), False, []),
        ({2: 1.13, 5: 0.96, 6: 1.05}, Layout(dp=8, ep=8), False, []),
        ({}, Layout(dp=8), True, []),
    ],
    ids=["one", "parameters", "passes that wait for nobody", "steps that differ", "none"],
)
def test_a_step_tells_whom_all_wait_for_unseen(job, steps, layout, gathered, expected):
    """Nobody recorded what experts of all replicas exchange, or layers wait for parameters that
    are gathered: all passes are as long as the slowest rank's.
    """

    def work(slot):
        return steps.get(slot.rank, 1.0) if slot.name == "optimizer" else 1.5

    seen = observe(job(layout=layout, work=work, noise=0.002).timeline())
    seen = replace(seen, waits_between_layers=gathered)
    found = named(judge(seen, DetectorSettings()))
    assert [one for one in found if one[2] is Owner.NODE] == expected


@pytest.mark.parametrize(("other", "is_named"), [(1.0, True), (1.04, True), (1.2, False)])
def test_other_pairs_tell_by_how_much_two_sound_steps_differ(job, other, is_named):
    """Its passes, 1.028 times, are slower by too little to tell a device by themselves."""

    def work(slot):
        if slot.rank == 5 and slot.name == "optimizer":
            return other
        if slot.rank != 2:
            return 1.0
        return 1.45 if slot.name == "optimizer" else 1.028

    run = job(layout=Layout(pp=4, dp=2), work=work, noise=0.002)
    found = named(report_of(run, [0.0] * 8))
    assert (((2,), Cause.COMPUTE, Owner.NODE) in found) == is_named


def test_a_few_that_wait_for_a_step_are_enough_if_the_replay_gains_without_it(job):
    """Two of seven others, as in a pipeline; the median of them waits for nobody."""
    made = job(layout=Layout(dp=8), work=slow_step(3, 2.5))
    waits = np.where(np.isin(np.arange(8), (5, 6)), 60.0, 0.0)
    for ratio, owner in ((1.05, Owner.NODE), (1.0, Owner.UNDECIDED)):
        gains = SimpleNamespace(ratio=lambda *_: ratio, ratio_of_transfers=lambda *_: ratio)  # noqa: B023
        (finding,) = report_of(made, waits, costs=gains).findings
        assert (finding.ranks, finding.owner) == ((3,), owner)
