"""Small differences that sound devices and places in the job have: undecided, not a node."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, render_text
from detect.causes.compute_owner import _perhaps_not_slow
from detect.causes.finding import undecided_if_small_and_free
from detect.causes.ordinary import _sigma_of_pairs, reach_of_sound
from detect.causes.together import undecided_beside_larger
from detect.observe.extract import observe
from megascan.topology import Layout


def chips(levels):
    return lambda slot: levels[slot.rank]


def owners(report):
    return [(one.ranks, one.owner) for one in report.findings]


def test_the_slowest_of_uneven_chips_is_undecided(job):
    levels = (1.0, 0.988, 1.012, 1.034)
    report = job(layout=Layout(dp=4), work=chips(levels)).report()
    assert owners(report) in ([], [((3,), Owner.UNDECIDED)])


def test_the_same_slowness_among_even_chips_is_the_node(job):
    even = [1.0 + 0.002 * (rank % 3 - 1) for rank in range(7)]
    report = job(layout=Layout(dp=8), work=chips((*even, 1.04))).report()
    assert owners(report) == [((7,), Owner.NODE)]


@pytest.mark.parametrize(("level", "owner"), [(1.05, Owner.UNDECIDED), (1.08, Owner.NODE)])
def test_three_peers_within_two_per_cent_show_little_of_what_chips_differ_by(job, level, owner):
    report = job(layout=Layout(dp=4), work=chips((1.0, 0.99, 1.01, level))).report()
    assert owners(report) == [((3,), owner)]


def test_a_large_slowness_among_uneven_chips_is_the_node(job):
    report = job(layout=Layout(dp=4), work=chips((1.0, 0.988, 1.012, 1.1))).report()
    assert owners(report) == [((3,), Owner.NODE)]


@pytest.mark.parametrize(
    ("slow", "named"),
    [({3: 1.055}, [(3,)]), ({3: 1.035}, []), ({3: 1.055, 6: 1.045}, [])],
    ids=["far beyond", "beyond", "not the only one"],
)
def test_a_lone_slow_rank_far_beyond_all_others_is_the_node(job, slow, named):
    """Chips differ by up to 2 %, evenly: a quarter of their pairs says sigma 1.5 %."""
    levels = [0.99 + 0.02 * (rank % 8) / 7 for rank in range(16)]
    levels = [slow.get(rank, level) for rank, level in enumerate(levels)]
    report = job(layout=Layout(dp=8, pp=2), work=chips(levels), noise=0.002).report()
    assert [one.ranks for one in report.findings if one.owner is Owner.NODE] == named


@pytest.mark.parametrize(("data", "is_named"), [(1.0, True), (1.06, False)])
def test_what_the_other_stages_of_its_replica_take_longer_is_no_chips(job, data, is_named):
    """Chips differ by 1 %; rank 4's is 6 % slower, or 2 % beside data that take all of them 6 %."""
    chip = {4: 1.06 if data == 1.0 else 1.02}

    def work(slot):
        level = 1.0 + 0.01 * ((3 * slot.rank) % 7 - 3) / 3
        longer = data if slot.replica == 2 and slot.name != "optimizer" else 1.0
        return chip.get(slot.rank, level) * longer

    report = job(layout=Layout(tp=2, dp=8, pp=2), work=work, noise=0.002).report()
    assert any(one.owner is Owner.NODE for one in report.findings) is is_named


UNEVEN = (0.99, 0.97, 0.96, 1.04, 1.01, 0.99, 1.0, 1.05, 0.97, 1.02, 0.985, 1.025)


def test_of_chips_that_differ_all_over_the_job_none_is_named(job):
    """Sigma 3 %, and the slowest of each four far from the three that happen to be alike."""
    run = job(layout=Layout(dp=12), work=chips(UNEVEN))
    assert not [one for one in run.report().findings if one.owner == Owner.NODE]
    slow = [level * (1.3 if rank == 4 else 1.0) for rank, level in enumerate(UNEVEN)]
    named = [one for one in run.but(work=chips(slow)).report().findings if one.owner == Owner.NODE]
    assert [one.ranks for one in named] == [(4,)]


def test_three_slow_ones_among_even_chips_are_no_spread(job):
    levels = [1.08 if rank in (1, 6, 9) else 1.0 + 0.001 * (rank % 3) for rank in range(12)]
    report = job(layout=Layout(dp=12), work=chips(levels)).report()
    assert sorted(owners(report)) == [((rank,), Owner.NODE) for rank in (1, 6, 9)]


def test_a_small_difference_from_two_peers_is_undecided(job):
    report = job(layout=Layout(dp=3), work=chips((1.0, 1.0005, 1.04))).report()
    assert owners(report) == [((2,), Owner.UNDECIDED)]
    assert any("may differ by as much" in one for one in report.findings[0].evidence)


@pytest.mark.parametrize(
    ("level", "num_replicas", "owner"),
    [(1.045, 3, Owner.UNDECIDED), (1.13, 3, Owner.NODE), (1.08, 4, Owner.NODE)],
    ids=["two peers", "far more than chips differ", "three peers"],
)
def test_two_peers_alone_do_not_show_how_much_devices_differ(job, level, num_replicas, owner):
    levels = [1.0, 1.002, *[0.999] * (num_replicas - 3), level]

    def work(slot):  # the optimizer moves memory, which a lower clock does not slow
        return 1.0 if slot.name == "optimizer" else levels[slot.rank]

    made = job(layout=Layout(dp=num_replicas), work=work, tokens=lambda rank: (4096, 4096))
    report = made.report()
    assert owners(report) == [((num_replicas - 1,), owner)]


def test_three_that_happen_to_be_alike_are_no_measure_of_a_small_difference(job):
    """3.9 % over ranks within 1 %: less than 7.5 root mean squares of three of them."""
    three = job(layout=Layout(dp=4), work=chips((0.993, 1.006, 0.99, 1.038)))
    assert not [one for one in three.report().findings if one.owner is Owner.NODE]


@pytest.mark.parametrize("optimizer", [1.0, 1.03], ids=["passes alone", "its optimizer, too"])
@pytest.mark.parametrize(
    ("levels", "named"),
    [
        ((1.0, 1.003, 1.065, 1.075), []),
        ((1.0, 1.003, 1.0, 1.075), [(3,)]),
        ((1.0, 1.003, 1.045, 1.2), [(3,)]),
        ((1.0, 1.003, 1.19, 1.2), [(2,), (3,)]),
    ],
    ids=["two of four", "one of four", "far more than chips differ", "two that no chip is as slow"],
)
def test_two_of_four_that_are_a_little_slow_may_be_sound(job, levels, optimizer, named):
    """Tokens are counted, so data are not the reason: only how much chips differ is unknown, and
    a chip that is slower in its passes is slower in its steps as well.
    """

    def work(slot):
        if slot.name == "optimizer":
            return optimizer if slot.rank == 3 else 1.0
        return levels[slot.rank]

    report = job(layout=Layout(dp=4), work=work, tokens=lambda rank: (4096, 4096)).report()
    assert sorted(one.ranks for one in report.findings if one.owner is Owner.NODE) == named
    if not named:
        assert any("differ by as much" in one.evidence[-1] for one in report.findings)


@pytest.mark.parametrize(("in_steps", "named"), [(True, [(2,), (3,)]), (False, [])])
def test_two_of_four_whose_steps_are_as_slow_are_no_slower_chips(job, in_steps, named):
    """Steps move memory, which a slower chip has as quick as others."""
    levels = (1.0, 1.002, 1.1, 1.11)

    def work(slot):
        return levels[slot.rank] if in_steps or slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=4), work=work, tokens=lambda rank: (4096, 4096)).report()
    assert sorted(one.ranks for one in report.findings if one.owner is Owner.NODE) == named


@pytest.mark.parametrize(
    ("levels", "num_beside", "percent"),
    [
        ([[0.0]], 1, 8.5),
        ([[0.0, 0.0]], 2, 4.9),
        ([[0.0] * 3], 3, 2.2),
        ([[0.0] * 7], 7, 0.8),
        ([[-0.03, 0.0, 0.03]], 3, 18.1),
        ([[0.001, -0.001], [0.0]], 1, 5.9),
        ([[-0.05, 0.05], [-0.05, 0.05]], 2, 20.0),
    ],
)
def test_how_slow_one_more_sound_device_may_be(levels, num_beside, percent):
    """The fewer and the more uneven the others, the slower; never slower than any sound one is."""
    reach = reach_of_sound([np.array(one) for one in levels], num_beside)
    assert 100 * np.expm1(reach) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(
    ("level", "quiet", "owner"),
    [
        (1.07, (), Owner.UNDECIDED),
        (1.07, (6, 13, 20, 27), Owner.UNDECIDED),
        (1.07, tuple(range(9)), Owner.NODE),
        (1.11, (), Owner.NODE),
    ],
    ids=["from the start", "but for some", "became slow", "more than two chips differ"],
)
def test_one_of_a_pair_that_is_a_little_slow_may_be_the_slower_chip(job, level, quiet, owner):
    """Equal data and a slow optimizer step show that it is the device, not that it is faulty."""

    def work(slot):
        return level if slot.rank == 1 and slot.iteration not in quiet else 1.0

    pair = job(layout=Layout(dp=2), iterations=30, work=work, tokens=lambda rank: (4096, 4096))
    assert owners(pair.report()) == [((1,), owner)]


def test_a_small_difference_of_a_pair_is_undecided_and_says_why(job):
    report = job(layout=Layout(tp=2), work=chips((1.0, 1.035))).report()
    assert owners(report) == [((1,), Owner.UNDECIDED)]
    assert "two sound devices may differ by as much" in " ".join(render_text(report).split())


@pytest.mark.parametrize(("least", "owner"), [(1.03, Owner.NODE), (1.15, Owner.UNDECIDED)])
def test_what_is_ordinary_follows_the_floor_that_the_user_asks_for(job, least, owner):
    pair = job(layout=Layout(tp=2), work=chips((1.0, 1.2)))
    assert owners(pair.report(DetectorSettings(min_slowdown=least))) == [((1,), owner)]


@pytest.mark.parametrize(("factor", "owner"), [(1.05, Owner.UNDECIDED), (1.15, Owner.NODE)])
def test_the_first_rank_of_the_only_tensor_group(job, factor, owner):
    report = job(layout=Layout(tp=4), work=chips((factor, 1.0, 1.0, 1.0))).report()
    assert owners(report) == [((0,), owner)]


def test_another_rank_of_the_only_tensor_group_is_the_node(job):
    report = job(layout=Layout(tp=4), work=chips((1.0, 1.0, 1.065, 1.0))).report()
    assert owners(report) == [((2,), Owner.NODE)]


def test_two_slow_ranks_at_one_place_that_are_not_alike_are_nodes(job):
    report = job(layout=Layout(tp=4, dp=2), work=chips((1.2, 1, 1, 1, 1.1, 1, 1, 1))).report()
    assert sorted(owners(report)) == [((0,), Owner.NODE), ((4,), Owner.NODE)]


@pytest.mark.parametrize(("other", "owner"), [(1.3, Owner.UNDECIDED), (1.0, Owner.NODE)])
def test_where_all_others_at_its_place_are_slow_nobody_shows_what_the_place_takes(
    job, other, owner
):
    """The first TP rank of one group is 7 % slower; that of the other one is a slow device."""
    report = job(layout=Layout(tp=2, dp=2), work=chips((1.07, 1, other, 1))).report()
    assert dict(owners(report))[(0,)] is owner


def test_a_window_of_three_iterations_shows_a_large_fault(job):
    report = job(layout=Layout(dp=4), iterations=3, work=chips((1, 1, 1.2, 1))).report()
    assert owners(report) == [((2,), Owner.NODE)]


def test_two_small_ones_are_measured_by_each_other(job):
    """Of eight sound ones two lie 3 % off; two at 8 % are no longer sound."""
    small, large = (
        job(layout=Layout(dp=8), work=chips((high, 1, 1, 1, 1, 1, high + 0.004, 1))).report()
        for high in (1.032, 1.08)
    )
    assert sorted(owners(small)) == [((0,), Owner.UNDECIDED), ((6,), Owner.UNDECIDED)]
    assert sorted(owners(large)) == [((0,), Owner.NODE), ((6,), Owner.NODE)]


def test_a_place_that_is_slow_alike_in_all_groups_of_its_stage_is_the_work(job):
    """By half; as long as the optimizers are not slower, too, as those of two slow devices are."""
    place, layout = chips((1, 1, 1, 1, 1.5, 1, 1.5, 1)), Layout(tp=2, pp=2, dp=2)
    passes = job(
        layout=layout, work=lambda slot: 1 if slot.name == "optimizer" else place(slot)
    ).report()
    assert sorted(owners(passes)) == [((4,), Owner.UNDECIDED), ((6,), Owner.UNDECIDED)]
    devices = job(layout=layout, work=place).report()
    assert sorted(owners(devices)) == [((4,), Owner.NODE), ((6,), Owner.NODE)]


def test_a_small_one_of_a_pair_that_comes_and_goes_is_undecided(job):
    """3.9 % in two stretches of 8 of 40 iterations, as noise that wanders shows."""

    def wandering(slot):
        return 1.039 if slot.rank == 1 and slot.iteration // 8 in (1, 3) else 1.0

    (finding,) = (
        job(layout=Layout(tp=2), iterations=40, noise=0.01, work=wandering).report().findings
    )
    assert finding.owner == Owner.UNDECIDED and len(finding.episodes) > 1


def test_what_is_little_and_gains_nothing_is_no_reason_to_change_a_node(job, slow):
    made = job(layout=Layout(dp=4, pp=2), work=slow(3, 1.07), transfer=lambda *_: 1.0)
    (found,) = made.report().findings
    seen = observe(made.but(iterations=6).timeline())
    small = replace(found, slowdown=1.07, cost_is_replayed=True, step_time_cost_ratio=1.002)
    assert small.owner is Owner.NODE
    assert undecided_if_small_and_free(seen, small, [], 1.03).owner is Owner.UNDECIDED
    longer = observe(made.timeline())
    assert undecided_if_small_and_free(longer, small, [], 1.03).owner is Owner.NODE
    for q_value, owner in ((0.004, Owner.UNDECIDED), (1e-5, Owner.NODE)):  # chance leaves doubt
        unsure = replace(small, slowdown=1.04, q_value=q_value)
        assert undecided_if_small_and_free(longer, unsure, [], 1.03).owner is owner
    several = replace(small, ranks=(2, 3))
    assert undecided_if_small_and_free(seen, several, [], 1.03).owner is Owner.UNDECIDED
    pair = replace(small, num_peers=1)  # who is the usual one of the two?
    assert undecided_if_small_and_free(longer, pair, [], 1.03).owner is Owner.UNDECIDED
    silent = replace(seen, transfers=None)  # nobody knows who waits for whom
    assert undecided_if_small_and_free(silent, small, [], 1.03).owner is Owner.NODE
    for changes in (
        {"slowdown": 1.15},
        {"step_time_cost_ratio": 1.02},
        {"joint_cost_ratio": 1.02},  # it hides behind others that are slow
        {"ranks": (2, 3), "slowdown": 1.11},  # no two are the slowest of sound devices
        {"cost_is_replayed": False},
        {"cause": Cause.HOST},
    ):
        other = replace(small, **changes)
        assert undecided_if_small_and_free(seen, other, [], 1.03).owner is Owner.NODE
    # nobody knows what it costs, and it is hardly above the floor
    hardly = replace(small, cost_is_replayed=False, step_time_cost_ratio=1.0, slowdown=1.035)
    assert undecided_if_small_and_free(seen, hardly, [], 1.03).owner is Owner.UNDECIDED
    assert undecided_if_small_and_free(seen, hardly, [], 1.01).owner is Owner.NODE


@pytest.mark.parametrize(("changes", "iterations", "owner"), [
    ({}, 12, Owner.UNDECIDED),
    ({}, 20, Owner.NODE),
    ({"q_value": 1e-9}, 12, Owner.NODE),
    ({"slowdown": 1.25}, 12, Owner.NODE),
    ({"step_time_cost_ratio": 1.02}, 12, Owner.NODE),
    ({"joint_cost_ratio": 1.05}, 12, Owner.NODE),  # it hides behind others that are slow
    ({"is_read": True}, 12, Owner.NODE),  # its clock is low
    ({"ranks": (2, 3)}, 12, Owner.NODE),
    ({"cause": Cause.HOST}, 12, Owner.NODE),
])  # fmt: skip
def test_what_gains_little_must_be_beyond_doubt(job, slow, changes, iterations, owner):
    made = job(layout=Layout(dp=4, pp=2), work=slow(3, 1.1), transfer=lambda *_: 1.0)
    (found,) = made.report().findings
    seen = observe(made.but(iterations=iterations).timeline())
    doubtful = replace(found, slowdown=1.1, q_value=1e-6, step_time_cost_ratio=1.006)
    other = replace(doubtful, **changes)
    assert undecided_if_small_and_free(seen, other, [], 1.03).owner is owner


@pytest.mark.parametrize(("of_the_other", "owner"), [(1.0, Owner.NODE), (1.14, Owner.UNDECIDED)])
def test_what_another_finding_gains_alone_is_no_gain_of_both(job, slow, of_the_other, owner):
    made = job(layout=Layout(dp=4, pp=2), iterations=12, work=slow(3, 1.1), transfer=lambda *_: 1.0)
    (found,) = made.report().findings
    other = replace(found, ranks=(5,), step_time_cost_ratio=of_the_other)
    both = {"joint_ranks": (3, 5), "joint_cost_ratio": 1.145}
    small = replace(found, q_value=1e-6, step_time_cost_ratio=1.001, **both)
    seen = observe(made.timeline())
    assert undecided_if_small_and_free(seen, small, [small, other], 1.03).owner is owner


@pytest.mark.parametrize(
    ("slowdown", "cost", "other", "owner"),
    [
        (1.025, 1.002, 1.38, Owner.UNDECIDED),
        (1.025, 1.002, 1.08, Owner.NODE),  # no reason of both
        (1.025, 1.02, 1.38, Owner.NODE),
        (1.06, 1.002, 1.38, Owner.NODE),
    ],
)
def test_hardly_slower_beside_one_that_is_slow_by_far_more(job, slow, slowdown, cost, other, owner):
    (found,) = job(layout=Layout(dp=4), work=slow(3, 1.07)).report().findings
    small = replace(found, slowdown=slowdown, step_time_cost_ratio=cost)
    larger = replace(found, ranks=(0,), slowdown=other, step_time_cost_ratio=1.3)
    assert undecided_beside_larger(small, [small, larger], 1.03).owner is owner
    assert undecided_beside_larger(larger, [small, larger], 1.03).owner is Owner.NODE
    read = replace(small, is_read=True)  # its clock says so
    assert undecided_beside_larger(read, [read, larger], 1.03).owner is Owner.NODE


@pytest.mark.parametrize(("num", "share"), [(12, 0.8), (15, 1.0), (7, 0.0)])
def test_the_spread_of_few_pairs(num, share):
    """The quarter of 12 pairs is the third, of which more are sound ranks' than of many."""
    gaps = np.linspace(0.01, 0.01 * num, num)
    nearest = np.quantile(gaps, 0.25, method="lower")
    assert _sigma_of_pairs(gaps) == pytest.approx(share * nearest / 0.4506)


@pytest.mark.parametrize(("low", "is_doubtful"), [(0.4, True), (1.01, False)])
def test_an_interval_that_holds_what_is_usual_names_nobody(low, is_doubtful):
    slow = SimpleNamespace(suspect=SimpleNamespace(interval=(low, 6.3)))
    assert bool(_perhaps_not_slow(slow)) == is_doubtful


def test_a_small_difference_of_a_pair_is_measured_by_the_jobs_other_pair(job):
    """Of two stages of two ranks each, ranks 0 and 3 are 11 and 5 % slower than their peers."""
    small, alone = (
        job(layout=Layout(dp=2, pp=2), work=chips((1.11, 1.0, 1.0, other))).report()
        for other in (1.05, 1.0)
    )
    assert Owner.NODE not in {owner for _, owner in owners(small)}
    assert owners(alone) == [((0,), Owner.NODE)]


def test_chips_of_its_own_stage_that_differ_more_than_others_are_its_measure(job):
    """The second stage's vary by 3 %, the first one's by 0.3 %: sigma of all pairs is small."""
    even = [1.0 + 0.003 * (rank % 4 - 1.5) for rank in range(12)]
    levels = [*even, *UNEVEN]
    levels[12 + 7] = 1.075
    report = job(layout=Layout(dp=12, pp=2), work=chips(levels)).report()
    assert ((19,), Owner.NODE) not in owners(report)
    even_job = [*even, *even]
    even_job[19] = 1.075
    report = job(layout=Layout(dp=12, pp=2), work=chips(even_job)).report()
    assert owners(report) == [((19,), Owner.NODE)]


@pytest.mark.parametrize(
    ("slower", "named"),
    [
        ({16: 1.75, 20: 1.83, 24: 2.55, 28: 2.3}, set()),
        ({16: 1.75, 20: 1.83, 24: 2.55}, {16, 20, 24}),
        ({17: 1.75, 20: 1.83, 26: 2.55, 31: 2.3}, {17, 20, 26, 31}),
    ],
    ids=["the first of each group", "not all of them", "apart"],
)
def test_all_ranks_of_a_place_in_their_groups_need_not_be_slow_by_as_much(job, slower, named):
    """Of the second stage; none has a longer optimizer step."""

    def work(slot):
        return 1.0 if slot.name == "optimizer" else slower.get(slot.rank, 1.0)

    report = job(layout=Layout(tp=4, dp=4, pp=2), work=work).report()
    assert {one.ranks[0] for one in report.findings if one.owner is Owner.NODE} == named


@pytest.mark.parametrize(
    ("num", "percent"),
    [(3, 2.2), (7, 1.18), (15, 0.65)],
    ids=["too few to tell", "eight", "sixteen"],
)
def test_how_slow_the_slowest_of_many_sound_devices_may_be(num, percent):
    reach = reach_of_sound([np.zeros(num)], num, of_slowest=True)
    assert 100 * np.expm1(reach) == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize(("level", "owner"), [(1.047, Owner.UNDECIDED), (1.06, Owner.NODE)])
def test_the_slowest_of_sixteen_uneven_chips_is_undecided(job, level, owner):
    """Two of the others are 3.3 and 1.8 % slower, one 1.9 % quicker."""
    others = [1.002, 0.995, 1.002, 1.018, level, 0.981, 0.999, 0.989]
    others += [1.004, 1.005, 1.002, 0.992, 1.001, 0.999, 1.033, 0.996]
    found = owners(job(layout=Layout(dp=16), work=chips(others)).report())
    assert dict(found)[(4,)] is owner
