"""Where two explanations survive nobody is blamed; where one is excluded the other is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, Owner, Verdict
from detect.causes.bursts import _over_place
from detect.causes.hits import lone_pause
from detect.causes.imbalance import LONE_GROUP
from detect.causes.one_of_two import pair_burst
from detect.detector import judge
from detect.observe.extract import observe
from detect.text import render_text
from detect.thresholds.adjustable import DetectorSettings
from megascan.topology import Layout


def _in_turn(num_microbatches: int):
    """Return phase and microbatch of passes: forward and backward of each microbatch in turn."""
    return np.tile([0, 1], num_microbatches), np.repeat(np.arange(num_microbatches), 2)


def waiting_mates(slow_rank: int, group: range):
    """All-reduces of the backward pass are hidden: there the mates are as slow as the slow rank."""

    def effect(slot):
        if slot.rank == slow_rank:
            return 1.05 if slot.name == "optimizer" else 1.3
        return 1.3 if slot.rank in group and slot.phase == "backward" else 1.0

    return effect


def test_the_slow_one_of_a_tensor_group_stands_out_and_its_mates_are_not_named(job):
    report = job(layout=Layout(tp=4, dp=4), work=waiting_mates(6, range(4, 8))).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((6,), Owner.NODE)]


def test_a_tensor_group_that_is_slow_alike_is_one_undecided_finding_of_its_host(job):
    def alike(slot):
        return 1.3 if 4 <= slot.rank < 8 and slot.name != "optimizer" else 1.0

    (finding,) = job(layout=Layout(tp=4, dp=4), hosts=4, work=alike).report().findings
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.UNDECIDED)
    assert any("hidden" in one or "in which all wait for one" in one for one in finding.evidence)


def last_is(factor: float):
    return lambda slot: factor if slot.stage == 1 and slot.name != "optimizer" else 1.0


@pytest.mark.parametrize(
    ("layout", "hosts", "verdict"),
    [
        (Layout(pp=2), 8, Verdict.UNDECIDED),  # a slow device shows the same
        (Layout(dp=4, pp=2), 4, Verdict.UNDECIDED),  # and a host that holds nothing else
        (Layout(dp=4, pp=2), 8, Verdict.JOB),  # other ranks of that host are not slow
        (Layout(dp=8, pp=2), 4, Verdict.JOB),  # two hosts agree
    ],
)
def test_a_stage_that_takes_longer_is_the_jobs_where_hardware_is_excluded(
    job, layout, hosts, verdict
):
    report = job(layout=layout, hosts=hosts, work=last_is(1.25)).report()
    (finding,) = report.findings
    assert (report.verdict, finding.cause) == (verdict, Cause.STAGE_IMBALANCE)
    assert ("no node is at fault" in render_text(report)) == (verdict == Verdict.JOB)


@pytest.mark.parametrize(("device", "num_replicas", "owner"), [
    ("cpu", 2, Owner.UNDECIDED),  # two of four processes have a slow core easily
    ("cpu", 6, Owner.JOB),
    ("cuda", 2, Owner.JOB),  # GPUs of one model do not differ by as much
])  # fmt: skip
def test_a_stage_of_few_devices_that_differ_by_as_much_may_be_slow_by_chance(
    job, device, num_replicas, owner
):
    report = job(layout=Layout(dp=num_replicas, pp=2), device=device, hosts=12, work=last_is(1.2))
    (finding,) = report.report().findings
    assert (finding.cause, finding.owner) == (Cause.STAGE_IMBALANCE, owner)
    assert any("may be chance" in one for one in finding.evidence) == (owner == Owner.UNDECIDED)


@pytest.mark.parametrize(("dp", "owner"), [(1, Owner.UNDECIDED), (2, Owner.JOB)])
def test_a_stage_of_one_group_that_waits_inside_its_passes_may_have_one_slow_device(job, dp, owner):
    made = job(layout=Layout(tp=2, dp=dp, pp=2), work=last_is(1.4))
    unsplit = replace(observe(made.timeline()), splits_tensor_groups=False)
    (finding,) = judge(unsplit, DetectorSettings()).findings
    assert (finding.cause, finding.owner) == (Cause.STAGE_IMBALANCE, owner)
    assert (LONE_GROUP in finding.evidence) == (owner == Owner.UNDECIDED)


def test_layers_that_are_slow_when_the_stage_is_do_not_make_it_the_jobs(job):
    """The layers of either stage are as quick as ever in most iterations: that acquits nobody."""

    def changing(slot):
        now = slot.iteration % 10
        if slot.rank == 1:
            return 1.3 if now < 4 else 1.0
        return 1 / 1.3 if now in (4, 5) else 1.0

    report = job(layout=Layout(pp=2), layers=2, work=changing).report()
    (finding,) = [one for one in report.findings if one.cause == Cause.STAGE_IMBALANCE]
    assert finding.owner == Owner.UNDECIDED


def test_throttling_of_one_of_two_is_told_by_its_own_times():
    random = np.random.default_rng(0)
    hits = random.random((38, 8)) < 0.3
    own = 16.0 + 0.005 * random.standard_normal((2, 38, 8))
    own[1, hits] += 0.17
    found = pair_burst(own, rate=0.01)
    assert found is not None and found.row == 1
    assert found.hits.tolist() == hits.any(axis=1).tolist()
    mirrored = own.copy()  # now the one, now the other: data
    mirrored[:, ::2] = own[::-1, ::2]
    assert pair_burst(mirrored, rate=0.01) is None
    quicker = own.copy()  # the other one is quick now and then
    quicker[0, hits] -= 0.17
    quicker[1] -= np.where(hits, 0.17, 0.0)
    assert pair_burst(quicker, rate=0.01) is None


@pytest.mark.parametrize("is_split", [True, False])
def test_of_one_of_two_no_data_are_slow_in_one_pass_of_a_microbatch_only(is_split):
    hits = np.random.default_rng(0).random((38, 4)) < 0.3
    slow = np.zeros((38, 4, 2), dtype=bool)
    slow[:, :, 0] = hits
    slow[:, :, 1] = hits & (not is_split)  # longer data lengthen both passes
    own = 16.0 + 0.005 * np.random.default_rng(1).standard_normal((2, 38, 8))
    own[1, slow.reshape(38, 8)] += 0.17
    found = pair_burst(own, 0.01, places=_in_turn(4))
    assert found is not None and found.row == 1
    assert found.splits_microbatches == is_split


@pytest.mark.parametrize(
    ("is_no_data", "of_other", "is_found"),
    [(True, 0.0, True), (False, 0.0, False), (True, 0.2, False)],
    ids=["no data", "longer data may be why", "the other has one as well"],
)
def test_one_stretch_of_one_speed_tells_of_two_where_no_data_are_why(
    is_no_data, of_other, is_found
):
    own = 16.0 + 0.002 * np.random.default_rng(0).standard_normal((2, 10, 8))
    own[1, 8:] += 0.4
    own[0, 3, :2] += of_other
    places = _in_turn(4)
    found = pair_burst(own, 0.01, places, is_no_data=is_no_data)
    assert (found is not None and found.row == 1 and found.is_sure) == is_found


@pytest.mark.parametrize(
    ("is_no_data", "slow_of_other", "is_found"),
    [(True, 0, True), (False, 0, False), (True, 4, False)],
    ids=["even data", "longer data may be why", "both have two speeds"],
)
def test_of_two_on_even_data_the_one_with_two_speeds_is_slow_in_most_passes(
    is_no_data, slow_of_other, is_found
):
    own = 16.0 + 0.003 * np.random.default_rng(0).standard_normal((2, 8, 4))
    own[1, [1, 3, 4, 6, 7]] += 0.36
    own[0, 2:4, :slow_of_other] += 0.36
    places = _in_turn(2)
    found = pair_burst(own, 0.01, places, is_no_data=is_no_data)
    assert (found is not None and found.row == 1 and found.is_sure) == is_found


def test_passes_that_follow_each_other_are_one_burst():
    own = 16.0 + 0.002 * np.random.default_rng(0).standard_normal((2, 10, 8))
    own[1, 3:5] += 0.2  # once for two iterations: no more than a coin that fell once
    assert pair_burst(own, rate=0.01) is None
    own[1, [0, 8], 2:5] += 0.2
    doubtful = pair_burst(own, rate=0.01)
    assert doubtful is not None and not doubtful.is_sure
    own[0, 7] += 0.2  # the other has one as well
    assert pair_burst(own, rate=0.01) is None


def test_pauses_of_any_size_are_the_rows_that_has_them_alone():
    def lone(value, places):
        return lone_pause(_over_place(value, places), margin=0.02, rate=0.01)

    value = np.full((8, 6), 0.001)
    value[7] = [0.8, 0.3, 0.3, 0.3, 0.9, 0.9]
    found = lone(value, [np.arange(8)])
    assert found is not None and found.row == 7 and found.is_sure
    assert lone(value, [np.array([row]) for row in range(8)]) is None  # nobody else has to load
    few = np.full((2, 6), 0.001)
    few[0, [0, 1, 4]] = 0.4
    doubtful = lone(few, [np.arange(2)])
    assert doubtful is not None and not doubtful.is_sure
    few[1, [2, 3, 5]] = 0.4
    assert lone(few, [np.arange(2)]) is None


def test_a_twentieth_of_all_time_in_three_pauses_is_worth_a_word_if_nobody_else_has_any():
    value = np.full((4, 10), 0.001)
    value[1, [6, 7, 9]] = [0.12, 0.22, 0.29]
    found = lone_pause(value, margin=0.02, rate=0.01)
    assert found is not None and found.row == 1 and not found.is_sure
    of_others = value.copy()
    of_others[2, 3] = 0.1
    assert lone_pause(of_others, margin=0.02, rate=0.01) is None
    value[1, 6] = 0.0  # two pauses that cost as much
    value[1, [7, 9]] = 0.3
    assert lone_pause(value, margin=0.02, rate=0.01) is None


@pytest.mark.parametrize(
    ("what", "paused_ms", "is_told"),
    [("gc_ms", 900.0, True), ("gc_ms", 100.0, True), ("loading_ms", 100.0, False)],
    ids=["most of an iteration", "less", "not for a loader"],
)
def test_a_lone_collection_counts_wherever_the_rank_stands(job, what, paused_ms, is_told):
    """No other rank has its stage and place in a TP group; collectors everywhere have as much to
    do. Of 1,500 ms it stops for 100 in all: a load that long may be chance.
    """

    def pauses(slot):
        is_it = (slot.rank, slot.iteration) == (3, 7) and (what == "gc_ms" or not slot.microbatch)
        return paused_ms if is_it else 0.0

    report = job(layout=Layout(tp=4, pp=2), iterations=6, **{what: pauses}).report()
    found = [(one.ranks, one.cause, one.owner) for one in report.findings]
    assert found == [((3,), Cause.GC, Owner.UNDECIDED)] * is_told


@pytest.mark.parametrize(("ratio", "owner"), [(1.4, Owner.UNDECIDED), (2.5, Owner.NODE)])
def test_one_of_two_processes_on_shared_cores(job, ratio, owner):
    """Passes alone are longer: a neighbour on the core does as much, up to 1.7 times."""

    def slower(slot):
        return ratio if slot.rank == 1 and slot.name != "optimizer" else 1.0

    (finding,) = job(layout=Layout(tp=2), device="cpu", work=slower).report().findings
    assert (finding.ranks, finding.owner) == ((1,), owner)


def test_a_change_on_even_data_is_the_devices_and_on_uneven_ones_undecided(job):
    """Passes slower by 8 % from iteration 10 on, the optimizer as ever; one rank a replica."""
    random = np.random.default_rng(4)
    lengths = np.exp(0.15 * random.standard_normal((8, 64, 8)))

    def slower(slot):
        is_pass = slot.name in ("forward", "backward")
        return 1.08 if is_pass and slot.rank == 3 and slot.iteration >= 10 else 1.0

    def uneven(slot):
        long = lengths[slot.rank, slot.iteration, slot.microbatch]
        return slower(slot) * (long if slot.name != "optimizer" else 1.0)

    (even,) = job(layout=Layout(dp=8), work=slower).report().findings
    assert (even.ranks, even.owner) == ((3,), Owner.NODE)
    assert any("data are not the reason" in one for one in even.evidence)
    found = job(layout=Layout(dp=8), work=uneven).report().findings
    assert not [one for one in found if one.owner == Owner.NODE]


@pytest.mark.parametrize("others", [(), (5,)], ids=["alone", "another comes and goes, too"])
def test_a_change_on_even_data_is_the_devices_where_no_other_rank_changes(job, others):
    """What several ranks show by turns is rather exchanged between them where nobody records it:
    tokens for experts, waiting for one of them.
    """

    def later(slot):
        hit = slot.iteration >= 14 if slot.rank == 3 else slot.iteration % 3 > 0
        return 1.4 if slot.rank in (3, *others) and hit and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=8), work=later).report()
    found = {one.ranks: one.owner for one in report.findings}
    assert found[(3,)] is (Owner.UNDECIDED if others else Owner.NODE)
    assert Owner.NODE not in [found.get((rank,)) for rank in others]
