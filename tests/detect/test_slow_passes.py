"""A device that is throttled now and then is found by its passes, one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, Owner, detect
from detect.causes.bursts import _undecided
from detect.causes.hits import as_large
from detect.causes.pass_hits import slow_passes
from detect.observe.extract import observe
from megascan.topology import Layout

RATE, FLOOR = 0.01, 0.03
QUIET = 0.005


def found_in(seen):
    nobody = np.zeros(len(seen.members), dtype=bool)
    return slow_passes(seen, nobody, RATE, FLOOR)


def owners(report):
    return {one.ranks: (one.cause, one.owner) for one in report.findings}


def throttled(rank, iterations, microbatches=range(8), factor=1.24):
    """Passes of these microbatches are slow in these iterations."""

    def work(slot):
        hit = slot.iteration in iterations and slot.microbatch in microbatches
        return factor if slot.rank == rank and hit and slot.name != "optimizer" else 1.0

    return work


def test_one_pass_in_eight_of_every_iteration(job):
    """No iteration is without it, and the median pass is as quick as ever."""

    def work(slot):
        hit = slot.rank == 5 and slot.microbatch == slot.iteration * 3 % 8
        return 1.5 if hit and slot.name != "optimizer" else 1.0

    every = job(layout=Layout(dp=16), iterations=10, noise=QUIET, work=work)
    assert owners(every.report()) == {(5,): (Cause.COMPUTE, Owner.NODE)}


def test_a_microbatch_that_always_takes_longer_is_no_throttling_for_sure(job):
    """The device may be as quick as ever, but the rank loses 6 % of its time: undecided."""
    always = job(layout=Layout(dp=16), iterations=10, noise=QUIET)
    always = always.but(work=throttled(5, range(99), {3}, 1.5))
    report = always.report()
    assert owners(report) == {(5,): (Cause.COMPUTE, Owner.UNDECIDED)}
    (finding,) = report.findings
    assert "on the mean" in finding.headline
    assert any("its typical pass is as quick" in line for line in finding.evidence)
    assert finding.slowdown == pytest.approx(1 + 0.5 / 8, rel=0.01)


@pytest.mark.parametrize(("slow", "reason"), [
    ((5,), "its typical pass is as quick"),
    ((5, 13), "the other stages of its replica are as slow"),
])  # fmt: skip
def test_a_microbatch_that_takes_longer_on_all_stages_of_a_replica_is_longer(job, slow, reason):
    def work(slot):
        hit = slot.rank in slow and slot.microbatch == 3 and slot.name != "optimizer"
        return 1.5 if hit else 1.0

    made = job(layout=Layout(pp=2, dp=8), iterations=10, noise=QUIET, work=work)
    found = [one for one in made.report().findings if one.ranks]
    assert sorted(one.ranks for one in found) == [(rank,) for rank in slow]
    for finding in found:
        assert "on the mean" in finding.headline and finding.owner is Owner.UNDECIDED
        assert any(line.startswith(reason) for line in finding.evidence)


@pytest.mark.parametrize(
    ("iterations", "named"), [({5, 9}, {(5,)}), ({8, 9}, {(5,)}), ({9}, set())]
)
def test_two_iterations_at_one_speed_are_no_noise_but_one_may_be_chance(job, iterations, named):
    report = job(
        layout=Layout(dp=8), iterations=10, noise=QUIET, work=throttled(5, iterations)
    ).report()
    assert set(owners(report)) == named


EVEN = {"tokens": lambda rank: (4096, 4096)}


def stretch(slot):
    """The last three microbatches but one of iteration 8, and of iteration 3 on rank 6."""
    at = {5: 8, 6: 3}.get(slot.rank)
    is_hit = slot.iteration == at and slot.microbatch in (4, 5, 6) and slot.name != "optimizer"
    return 1.3 if is_hit else 1.0


@pytest.mark.parametrize(
    ("ranks", "phases", "even", "named"),
    [
        ((5,), ("forward", "backward"), True, {(5,)}),
        ((5,), ("forward", "backward"), False, set()),
        ((5,), ("backward",), True, set()),
        ((5, 6), ("forward", "backward"), True, set()),
    ],
    ids=["a stretch", "longer data may be why", "of one kind", "of two ranks"],
)
def test_a_single_stretch_of_one_speed_is_enough_where_no_data_are_why(
    job, ranks, phases, even, named
):
    def work(slot):
        return stretch(slot) if slot.rank in ranks and slot.phase in phases else 1.0

    made = job(layout=Layout(dp=16), iterations=10, noise=QUIET, work=work)
    report = made.but(**EVEN).report() if even else made.report()
    assert {one.ranks for one in report.findings if one.owner is Owner.NODE} == named


@pytest.mark.parametrize(("first", "is_found"), [(9, True), (8, False)])
def test_what_goes_on_at_the_end_is_a_levels_to_tell_from_its_fourth_iteration_on(
    job, first, is_found
):
    made = job(layout=Layout(dp=8), iterations=9, noise=QUIET, work=throttled(5, range(first, 12)))
    seen = observe(made.but(**EVEN).timeline())
    assert [one.row for one in found_in(seen)] == [5] * is_found


@pytest.mark.parametrize(("num_passes", "is_one_speed"), [(1, True), (4, False)])
def test_a_single_pass_of_another_rank_does_not_make_it_a_speed_of_others(
    job, num_passes, is_one_speed
):
    """Six passes of rank 5 have one speed; one of rank 1 is as slow, or four of them at once."""

    def work(slot):
        if slot.rank == 1 and slot.iteration == 7 and slot.phase == "forward":
            return 1.3 if slot.microbatch < num_passes else 1.0
        hit = slot.iteration in (5, 9, 10) and slot.microbatch == 3 and slot.name != "optimizer"
        return 1.3 if hit and slot.rank == 5 else 1.0

    made = job(layout=Layout(dp=16), iterations=10, noise=QUIET, work=work)
    found = found_in(observe(made.timeline()))
    assert any(one.row == 5 and one.is_one_speed for one in found) == is_one_speed


def test_forward_and_backward_passes_may_have_a_speed_each(job):
    def work(slot):
        hit = slot.rank == 5 and slot.iteration in (5, 9) and slot.name != "optimizer"
        return {"forward": 1.42, "backward": 1.3}[slot.phase] if hit else 1.0

    made = job(layout=Layout(dp=8), iterations=10, noise=0.001, work=work)
    (burst,) = found_in(observe(made.timeline()))
    assert burst.row == 5 and burst.is_one_speed


@pytest.mark.parametrize(
    ("num_microbatches", "owner"), [(2, Owner.UNDECIDED), (4, Owner.NODE)], ids=["two", "four"]
)
def test_both_passes_of_few_microbatches_have_one_speed_by_their_data(job, num_microbatches, owner):
    """Their lookups were not recorded, so only several of one length speak against longer data."""

    def work(slot):
        hit = slot.iteration in (5, 9) and slot.microbatch < num_microbatches // 2
        return 1.6 if slot.rank == 5 and hit and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=16), iterations=10, noise=QUIET, work=work).report()
    assert owners(report) == {(5,): (Cause.COMPUTE, owner)}


@pytest.mark.parametrize(("shift", "is_split"), [(3, True), (0, False)])
def test_parts_of_a_profile_at_one_place_of_both_phases_are_one_microbatch(job, shift, is_split):
    """Data that lengthen parts of the forward phase lengthen those of the backward phase, too."""

    def work(slot):
        place = (slot.microbatch + (shift if slot.phase == "backward" else 0)) % 8
        hit = slot.iteration in (4, 7, 9, 11) and place in (2, 3) and slot.name != "optimizer"
        return 1.3 if slot.rank == 5 and hit else 1.0

    seen = observe(job(layout=Layout(dp=8), iterations=12, noise=QUIET, work=work).timeline())
    parts = replace(seen.work, microbatch=np.zeros_like(seen.work.microbatch))
    (burst,) = found_in(replace(seen, work=parts, tells_passes=False))
    assert burst.row == 5 and burst.splits_microbatches == is_split


def test_hits_of_any_size_are_counted_as_events(job):
    random = np.random.default_rng(4)
    sizes = {(at, one): random.uniform(1.2, 2.5) for at in (5, 9) for one in range(8)}

    def work(slot):
        return sizes.get((slot.iteration, slot.microbatch), 1.0) if slot.rank == 5 else 1.0

    (burst,) = found_in(observe(job(layout=Layout(dp=8), iterations=10).but(noise=QUIET,
                        work=throttled(5, {5, 9})).timeline()))  # fmt: skip
    assert burst.is_one_speed and burst.row == 5
    assert found_in(observe(job(layout=Layout(dp=8), iterations=10, work=work).timeline())) == []


@pytest.mark.parametrize(
    ("phases", "owner"),
    [(("forward",), Owner.UNDECIDED), (("forward", "backward"), Owner.NODE)],
    ids=["one kind", "both"],
)
def test_slow_passes_of_one_kind_only_are_no_slow_devices(job, phases, owner):
    random = np.random.default_rng(5)
    sizes = {
        (3 + 2 * n, (3 * n) % 8, phases[n % len(phases)]): random.uniform(1.3, 1.7)
        for n in range(8)
    }

    def work(slot):
        key = slot.iteration, slot.microbatch, slot.phase
        return sizes.get(key, 1.0) if slot.rank == 5 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=16), noise=QUIET, work=work).report()
    assert owners(report) == {(5,): (Cause.COMPUTE, owner)}


def test_small_hits_of_others_are_no_events_of_the_same_kind(job):
    """Rank 5 has six passes of up to twice the time; all others have as many of 1.05 times."""
    random = np.random.default_rng(7)
    large = {
        (at, one): random.uniform(1.5, 2.0)
        for at, one in zip(range(4, 16, 2), (0, 5, 2, 7, 1, 4), strict=True)
    }
    small = {
        (rank, 3 + (rank + 2 * n) % 14, (rank * 3 + n) % 8) for rank in range(8) for n in range(6)
    }

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        if slot.rank == 5:
            return large.get((slot.iteration, slot.microbatch), 1.0)
        return 1.05 if (slot.rank, slot.iteration, slot.microbatch) in small else 1.0

    made = job(layout=Layout(dp=8), iterations=16, noise=QUIET, work=work)
    (burst,) = found_in(observe(made.timeline()))
    assert (burst.row, burst.other_hits, burst.is_noise) == (5, 0, False)


def test_hits_stay_together_where_one_of_them_is_large():
    hits = np.array([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 1, 0]], dtype=bool)
    size = np.array([[0, 4.0, 1.0, 0, 4.0, 0], [1.0, 0, 0, 1.0, 3.0, 0]])
    expected = [[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0]]
    assert as_large(hits, size, 0).astype(int).tolist() == expected
    assert as_large(hits & False, size, 0).sum() == 0


def test_the_mate_that_waits_in_the_backward_pass_is_not_named(job):
    def work(slot):
        hit = slot.iteration in (5, 9, 12) and slot.name != "optimizer"
        waits = slot.rank == 7 and slot.phase == "backward"
        return 1.3 if hit and (slot.rank == 6 or waits) else 1.0

    report = job(layout=Layout(tp=2, dp=8), iterations=14, noise=QUIET, work=work).report()
    assert owners(report)[6,] == (Cause.COMPUTE, Owner.NODE)
    assert owners(report).get((7,), (None, None))[1] != Owner.NODE


def test_passes_that_their_launches_held_up_are_the_hosts(job):
    seen = observe(
        job(layout=Layout(dp=8), iterations=10, noise=QUIET, work=throttled(5, {5, 9})).timeline()
    )
    starved = np.zeros((8, 10))
    assert [one.row for one in found_in(replace(seen, starved_share=starved))] == [5]
    starved[5] = 0.6
    assert found_in(replace(seen, starved_share=starved)) == []


def test_a_peer_that_was_quicker_makes_nobody_slow(job):
    quicker = throttled(1, {5, 9, 12}, factor=0.6)
    layout = Layout(dp=2, pp=2)
    assert found_in(observe(job(layout=layout, iterations=14, work=quicker).timeline())) == []
    slower = throttled(1, {5, 9, 12}, factor=1.5)
    (burst,) = found_in(observe(job(layout=layout, iterations=14, work=slower).timeline()))
    assert burst.row == 1


@pytest.mark.parametrize(
    ("noisy", "is_noise"), [(set(), False), (set(range(16)), True), ({4, 6, 7}, True)]
)
def test_slow_passes_that_peers_have_in_half_as_many_iterations_are_noise(job, noisy, is_noise):
    """Those of rank 5 come one by one, three in an iteration; those of others in a row of three."""
    random = np.random.default_rng(7)
    size = {(rank, at, one): random.uniform(1.2, 1.9)
            for rank in range(16) for at in range(3, 17) for one in range(8)}  # fmt: skip

    def work(slot):
        hit = slot.iteration in (4, 7, 10, 13) and slot.microbatch in (1, 4, 6)
        if slot.rank != 5:
            hit = slot.rank in noisy and (slot.iteration + slot.rank) % 7 == 0
            hit = hit and slot.microbatch < 3
        if slot.name == "optimizer" or not hit:
            return 1.0
        return size[slot.rank, slot.iteration, slot.microbatch]

    layout = Layout(dp=4, pp=4)
    seen = observe(job(layout=layout, iterations=14, noise=QUIET, work=work).timeline())
    (burst,) = found_in(seen)
    assert burst.row == 5 and int(burst.hits.sum()) == 4 and not burst.is_one_speed
    assert burst.is_noise == is_noise


def stopped(rank, factor=6.0):
    """One forward in sixteen takes several times as long; all passes around it are as usual."""

    def work(slot):
        hit = (slot.iteration * 5 + slot.microbatch) % 16 == 3 and slot.phase == "forward"
        return factor if slot.rank == rank and hit and slot.name != "optimizer" else 1.0

    return work


def test_who_stands_still_in_single_passes_is_held_up_by_its_host(job):
    """No device is six times slower for one pass and as quick as ever in the next."""
    made = job(layout=Layout(dp=16), iterations=12, noise=QUIET, work=stopped(5))
    report = made.report()
    assert owners(report) == {(5,): (Cause.HOST, Owner.NODE)}
    assert "stands still in single passes" in report.findings[0].headline


@pytest.mark.parametrize(
    ("is_factor", "cause"), [(True, Cause.COMPUTE), (False, Cause.GC)], ids=["factor", "time"]
)
def test_single_passes_of_both_kinds_that_one_factor_lengthens_are_a_slow_device(
    job, is_factor, cause
):
    """Other passes run between those of two microbatches; pauses last as long in either kind."""

    def work(slot):
        hit = (slot.iteration * 5 + slot.microbatch) % 8 == 3 and slot.name != "optimizer"
        hit = hit and (slot.phase == "forward") == bool(slot.iteration % 2)
        if not (hit and slot.rank == 5):
            return 1.0
        return 2.8 if is_factor or slot.phase == "forward" else 1.9

    made = job(layout=Layout(dp=16), iterations=16, noise=QUIET, work=work)
    (finding,) = detect(made.original_timeline()).findings
    assert (finding.ranks, finding.cause) == ((5,), cause)


def test_where_collections_were_not_traced_they_may_be_why_a_rank_stands_still(job):
    made = job(layout=Layout(dp=16), iterations=12, noise=QUIET, work=stopped(5))
    report = detect(made.original_timeline())
    assert owners(report) == {(5,): (Cause.GC, Owner.UNDECIDED)}
    (finding,) = report.findings
    assert any("garbage, which was not traced" in each for each in finding.evidence)
    assert any("gc.disable" in step for step in finding.next_steps)
    assert any("memory pressure" in step for step in finding.next_steps)


@pytest.mark.parametrize("factor", [1.24, 2.5])
def test_a_device_that_is_throttled_for_some_passes_does_not_stand_still(job, factor):
    """A lowered clock lasts for longer than a pass, or does not double it."""
    slow = throttled(5, {4, 7, 11}, range(2, 7), factor)
    made = job(layout=Layout(dp=16), iterations=12, noise=QUIET, work=slow)
    report = detect(made.original_timeline())
    assert owners(report) == {(5,): (Cause.COMPUTE, Owner.NODE)}


def test_silence_about_collections_means_nothing_where_they_were_not_traced(job):
    made = job(layout=Layout(dp=8), iterations=6, noise=QUIET)
    told, untold = made.report(), detect(made.original_timeline())
    assert "gc" in told.minimum_detectable and "gc" not in untold.minimum_detectable
    assert any("garbage collection was not traced" in note for note in untold.notes)


def test_what_groups_transfer_says_nothing_of_single_passes(job):
    """A slow connection that nobody can be named for does not keep its ranks from being searched
    for slow passes; one that is named does.
    """
    made = job(layout=Layout(dp=4))
    left, told = (
        SimpleNamespace(ranks=ranks, owner=owner, cause=Cause.LINK)
        for ranks, owner in (((1, 3), Owner.UNDECIDED), ((2, 3), Owner.NODE))
    )
    assert _undecided(observe(made.timeline()), (left, told)).tolist() == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("layout", "share", "factor", "owner"),
    [
        (Layout(pp=2), 0.03, 1.5, Owner.UNDECIDED),
        (Layout(pp=2), 0.1, 1.5, Owner.UNDECIDED),
        (Layout(pp=2), 0.2, 1.5, Owner.NODE),
        (Layout(pp=2, dp=4), 0.03, 1.5, Owner.NODE),
    ],
    ids=["gains 0.7 %", "gains 2.6 %", "gains more", "beside ranks of its stage"],
)
def test_slow_passes_of_a_lone_stage_that_cost_next_to_nothing_name_nobody(
    job, layout, share, factor, owner
):
    """Passes here and there: what sound ones of a stage vary by only other ranks of it show."""
    random = np.random.default_rng(1)
    slow = {
        (iteration, microbatch, phase)
        for iteration in range(1, 40)
        for microbatch in range(16)
        for phase in ("forward", "backward")
        if random.random() < share
    }

    def work(slot):
        is_slow = (slot.iteration, slot.microbatch, slot.phase) in slow
        return factor if is_slow and slot.rank == 1 and slot.name != "optimizer" else 1.0

    report = job(layout=layout, iterations=20, microbatches=8, work=work).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((1,), owner)]
