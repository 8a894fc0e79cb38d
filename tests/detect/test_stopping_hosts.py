"""A host that stands still between launches, ahead of passes or at the end of iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.launching import most_cost_of_host, stands_still, starvation
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.launches import Pauses
from megascan.header import Trainer
from megascan.topology import Layout


def stopping(job, own_ms, theirs_ms=0.0, *, stopping_ranks=(3,), lost_ms=40.0, **changes):
    """Observe a job of four replicas whose hosts stop so long an iteration while devices wait."""
    seen = observe(job(layout=Layout(dp=4), **changes).timeline())
    stopped, lost = np.full((4, 20), theirs_ms * 1e6), np.zeros((4, 20))
    stopped[list(stopping_ranks)] = own_ms * 1e6
    lost[list(stopping_ranks)] = lost_ms * 1e6
    starved = np.zeros((4, 20))
    starved[list(stopping_ranks)] = 0.3
    return replace(seen, stopped_ns=stopped, starved_share=starved,
                   lost_ns={**seen.lost_ns, Cause.HOST: lost})  # fmt: skip


def test_stops_of_a_host_are_long_steps_between_launches_that_its_device_waits_for(job):
    """One of the eight forward passes takes 30 times as long; rank 2's host is far ahead of it."""

    def late(slot):
        is_late = slot.name == "forward" and slot.microbatch == 3
        return 30.0 if is_late and slot.rank in (2, 3) else 1.0

    made = job(layout=Layout(dp=4), work=late, iterations=6,
               launch_lead_ns=lambda rank: 10**8 if rank == 2 else 1_000)  # fmt: skip
    stopped = observe(made.timeline()).stopped_ns
    assert stopped[3] / 1e6 == pytest.approx(np.full(6, 145.0), rel=0.1)  # a half of 300 ms, less 5
    assert not stopped[[0, 1, 2]].any()


@pytest.mark.parametrize(
    ("own_ms", "theirs_ms", "stands"),
    [(20.0, 0.0, True), (3.0, 0.0, False), (20.0, 12.0, False)],
    ids=["alone", "hardly", "all hosts"],
)
def test_a_host_stands_still_where_its_peers_do_not(job, own_ms, theirs_ms, stands):
    seen, active = stopping(job, own_ms, theirs_ms), np.ones(20, dtype=bool)
    assert stands_still(seen, 3, active) == stands
    assert not stands_still(replace(seen, stopped_ns=None), 3, active)
    starved = np.where(np.arange(4) == 3, 0.9, 0.0)[:, None] * np.ones(20)
    pace = np.zeros((4, 20))  # its launches are as quick as its peers'
    told = replace(seen, starved_share=starved, held_pace=pace)
    owner, why = starvation(told, 3, active, np.log(1.1))
    assert (owner is Owner.NODE) == stands
    assert ("stopped between launches" in why) == stands


@pytest.mark.parametrize(
    ("own_ms", "own_share", "theirs_share", "stands"),
    [
        (550.0, 0.5, 0.0, True),
        (140.0, 0.5, 0.0, False),
        (550.0, 0.1, 0.0, False),
        (550.0, 0.9, 0.8, False),
    ],
    ids=["half of its core", "hardly slower", "held up by a full queue", "all devices wait"],
)
def test_a_host_that_takes_long_to_launch_its_passes_stops(
    job, own_ms, own_share, theirs_share, stands
):
    seen, active = observe(job(layout=Layout(dp=4)).timeline()), np.ones(20, dtype=bool)
    launching, starved = np.full((4, 20), 90e6), np.full((4, 20), theirs_share)
    launching[3], starved[3] = own_ms * 1e6, own_share
    told = replace(seen, launching_ns=launching, starved_share=starved)
    told = replace(told, lost_ns={**seen.lost_ns, Cause.HOST: starved * 100e6})
    assert stands_still(told, 3, active) == stands
    if stands:
        owner, why = starvation(told, 3, active, np.log(1.1))
        assert owner is Owner.NODE
        assert "550 ms an iteration to launch its passes, those of its peers 90 ms" in why


@pytest.mark.parametrize(
    ("first_ms", "step_ms", "prepares"),
    [(465.0, 3.0, True), (200.0, 3.0, False), (465.0, 85.0, False), (550.0, 0.0, False),
     (np.nan, np.nan, False)],
    ids=["ahead of the second launch", "anywhere", "between the first two of few", "two a pass",
         "a profile"],
)  # fmt: skip
def test_what_a_program_prepares_ahead_of_each_pass_is_no_fault_of_its_host(
    job, first_ms, step_ms, prepares
):
    """Of 550 ms of launching (peers 90) 465 lie between a pass's first launch and its second, and
    3 behind each later one: kernels that are planned for each new shape. Another process would come
    anywhere, and slow each launch.
    """
    seen, active = observe(job(layout=Layout(dp=4)).timeline()), np.ones(20, dtype=bool)
    launching, first, step = np.full((3, 4, 20), 90e6)
    launching[3], first[3], step[3] = 550e6, first_ms * 1e6, step_ms * 1e6
    is_profile = np.isnan(first_ms)
    starved = np.zeros((4, 20))
    starved[3] = 0.9
    told = replace(
        seen,
        launching_ns=launching,
        launching_first_ns=None if is_profile else first,
        launching_step_ns=None if is_profile else step,
        starved_share=starved,
        held_pace=np.zeros((4, 20)),
        lost_ns={**seen.lost_ns, Cause.HOST: starved * 100e6},
    )
    assert stands_still(told, 3, active) is not prepares
    owner, why = starvation(told, 3, active, np.log(1.5))
    assert owner is (Owner.UNDECIDED if prepares else Owner.NODE)
    assert ("465 ms come ahead of the second launch" in why) is prepares
    # what it costs is what its device stands still, not what its pace would tell
    assert most_cost_of_host(told, 3, active) == np.inf
    # kernels leave nothing that a replay could make shorter than by these gaps, of 90 ms of 245
    profile = replace(told, tells_passes=False)
    assert most_cost_of_host(profile, 3, active) == pytest.approx(1.58, abs=0.01)


def test_how_long_launching_takes_is_told_by_the_quicker_passes(job):
    """Launches follow the work by a fixed lead. Rank 3's passes take twice as long, and two of rank
    2's eight, which do not count.
    """

    def longer(slot):
        is_held = slot.rank == 2 and slot.microbatch in (1, 2)
        return 2.0 if slot.rank == 3 or is_held else 1.0

    made = job(layout=Layout(dp=4), work=longer, iterations=6,
               launch_lead_ns=lambda rank: 1_000_000)  # fmt: skip
    seen = observe(made.timeline())
    usual_ns = seen.launching_ns[0, 0]
    assert seen.launching_ns[:3] == pytest.approx(np.full((3, 6), usual_ns), rel=0.01)
    assert seen.launching_ns[3] == pytest.approx(np.full(6, 2 * usual_ns), rel=0.01)
    assert seen.launching_first_ns == pytest.approx(seen.launching_ns)  # two launches a pass
    assert (seen.launching_step_ns < 1.0).all()
    assert observe(job(layout=Layout(dp=4)).timeline()).launching_ns is None


def test_a_late_loader_of_a_host_that_stops_is_the_hosts(job):
    """It loads 40 ms more and loses 12 ms beside; its host takes six times as long to launch."""

    def late(slot):
        return 43.0 if slot.rank == 3 else 3.0

    def gaps(slot):
        return 14.0 if slot.rank == 3 else 2.0

    seen = observe(job(layout=Layout(dp=4), loading_ms=late, gap_ms=gaps).timeline())
    starved, launching = np.zeros((4, 20)), np.full((4, 20), 20e6)
    starved[3], launching[3] = 0.5, 120e6
    causes = {one.cause: one.owner for one in judge(seen, DetectorSettings()).findings}
    assert causes == {Cause.LOADER: Owner.NODE}
    told = replace(seen, launching_ns=launching, starved_share=starved)
    causes = {one.cause: one.owner for one in judge(told, DetectorSettings()).findings}
    assert causes == {Cause.HOST: Owner.NODE}


def test_passes_that_a_stopping_host_lengthens_are_its_own_doing(job, slow):
    """Of 1.2 times the work 40 ms an iteration are gaps; a slow device leaves none."""

    def causes(seen):
        report = judge(seen, DetectorSettings())
        return [(one.cause, one.ranks) for one in report.findings if one.owner is Owner.NODE]

    assert causes(stopping(job, 20.0, work=slow(3, 1.2))) == [(Cause.HOST, (3,))]
    assert causes(stopping(job, 20.0, lost_ms=2.0, work=slow(3, 1.2))) == [(Cause.COMPUTE, (3,))]


@pytest.mark.parametrize("stopped_ms", [0.0, 20.0])
def test_loading_and_the_optimizer_are_not_to_blame_where_the_host_stops(job, stopped_ms):
    def late(slot):
        return 60.0 if slot.rank == 3 else 3.0

    def work(slot):
        return 4.0 if slot.rank == 3 and slot.name == "optimizer" else 1.0

    def named(seen):
        findings = judge(seen, DetectorSettings()).findings
        return {one.cause for one in findings if one.owner is Owner.NODE and one.ranks == (3,)}

    loading = stopping(job, stopped_ms, lost_ms=30.0, loading_ms=late)
    assert named(loading) == {Cause.HOST if stopped_ms else Cause.LOADER}
    stepping = stopping(job, stopped_ms, lost_ms=30.0, work=work)
    waiting = np.full((4, 20), 200e6)
    waiting[3] = 0.0
    found = named(replace(stepping, waiting_ns=waiting))
    assert (Cause.COMPUTE in found) == (not stopped_ms)


@pytest.mark.parametrize(
    ("rank", "ending_ms", "stands"),
    [(2, 30.0, True), (2, 1.0, False), (0, 30.0, False), (3, 30.0, False)],
    ids=["held up", "hardly", "the first rank logs", "the last rank logs"],
)
def test_a_host_that_is_held_up_at_the_end_stands_still(job, rank, ending_ms, stands):
    seen = observe(job(layout=Layout(dp=4)).timeline())
    ending = np.full((4, 20), 0.1e6)
    ending[rank] = ending_ms * 1e6
    told = replace(seen, ending_ns=ending)
    assert stands_still(told, rank, np.ones(20, dtype=bool)) == stands


@pytest.mark.parametrize(
    ("trainer", "pp", "logging"),
    [
        (Trainer.UNKNOWN, 1, [0, 3]),
        (Trainer.MEGATRON, 2, [0, 3]),
        (Trainer.TORCH, 1, [0]),
        (Trainer.TORCH, 2, [0, 2, 3]),
    ],
)
def test_who_logs_for_all_depends_on_whose_loop_trains(job, trainer, pp, logging):
    """Loops on plain PyTorch log on the first rank, or where the losses are."""
    members = observe(job(layout=Layout(dp=4 // pp, pp=pp)).timeline()).members
    logs = replace(members, trainer=trainer).log_for_all
    assert np.flatnonzero(logs).tolist() == logging


@pytest.mark.parametrize("trainer", list(Trainer))
def test_what_the_last_rank_does_at_the_end_is_its_host_s_where_it_does_not_log(job, trainer):
    seen = observe(job(layout=Layout(dp=4)).timeline())
    ending = np.full((4, 20), 0.1e6)
    ending[3] = 30e6
    told = replace(seen, ending_ns=ending, members=replace(seen.members, trainer=trainer))
    stands = stands_still(told, 3, np.ones(20, dtype=bool))
    assert stands == (trainer is Trainer.TORCH)


@pytest.mark.parametrize(
    ("share", "is_healthy", "caveats"), [(0.05, True, 0), (0.15, True, 1), (0.4, False, 1)]
)
def test_what_the_first_rank_does_at_the_end_is_said_beside_health(job, share, is_healthy, caveats):
    """Logging or a slow disk: nobody knows which, so there is no health where it costs much."""
    seen = observe(job(layout=Layout(dp=4)).timeline())
    ending = np.zeros((4, 20))
    ending[0] = share * seen.iteration_ns
    report = judge(replace(seen, ending_ns=ending), DetectorSettings())
    assert (report.verdict is Verdict.HEALTHY) == is_healthy
    assert len(report.caveats) == caveats
    assert any("at the end of 20 iterations" in one for one in report.notes)


def paused(job, rank, between_ms, *, opening_ms=0.0, ahead=True):
    """Observe two passes an iteration on two ranks; the host of one launches nothing for so long
    before them. The other's host, if it is `ahead` of its device, is as slow and nobody waits.
    """
    seen = observe(job(layout=Layout(dp=2)).timeline())
    shape = seen.busy_ns.shape
    idle_opening, idle_between, opening, between = np.full((4, *shape), 1e6)
    idle_opening[rank], idle_between[rank] = opening_ms * 1e6, between_ms * 1e6
    opening[rank], between[rank] = opening_ms * 1e6, between_ms * 1e6
    if ahead:
        opening[1 - rank], between[1 - rank] = opening_ms * 1e6, between_ms * 1e6
    starved = np.full(shape, 0.9)
    return replace(
        seen,
        members=replace(seen.members, trainer=Trainer.TORCH),
        pauses=Pauses(idle_opening_ns=idle_opening, idle_between_ns=idle_between,
                      opening_ns=opening, between_ns=between),
        starved_share=starved, held_pace=np.zeros(shape), launching_ns=np.full(shape, 80e6),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "places", "stands"),
    [
        (1, {"between_ms": 80.0, "ahead": False}, True),
        (1, {"between_ms": 80.0}, False),
        (1, {"between_ms": 3.0, "ahead": False}, False),
        (1, {"between_ms": 1.0, "opening_ms": 80.0, "ahead": False}, True),
        (0, {"between_ms": 1.0, "opening_ms": 80.0, "ahead": False}, False),
        (0, {"between_ms": 80.0, "ahead": False}, True),
    ],
    ids=["alone", "the other host, too, behind its device", "hardly", "before the first pass",
         "which logs there", "which logs elsewhere"],
)  # fmt: skip
def test_a_host_that_launches_nothing_between_passes_stands_still(job, rank, places, stands):
    seen, active = paused(job, rank, **places), np.ones(20, dtype=bool)
    assert stands_still(seen, rank, active) == stands
    assert not stands_still(replace(seen, pauses=None), rank, active)
    # its pace, that of all other hosts, bounds the cost only where it explains the gaps
    assert (most_cost_of_host(seen, rank, active) == np.inf) == stands


def test_pauses_are_what_a_host_launches_nothing_for_outside_passes(job):
    """Rank 1's host is late by 20 ms ahead of each pass, of which one opens the iteration; rank 0's
    is ahead by 3 ms.
    """
    made = job(layout=Layout(dp=2), iterations=6, microbatches=8,
               pause_ms=lambda slot: 20.0 * slot.rank,
               launch_lead_ns=lambda rank: 1_000 if rank else 3_000_000)  # fmt: skip
    pauses = observe(made.timeline()).pauses
    assert pauses.opening_ns[1] == pytest.approx(np.full(6, 20e6), rel=0.01)
    assert pauses.idle_opening_ns[1] == pytest.approx(np.full(6, 20e6), rel=0.01)
    assert (pauses.idle_between_ns[1] >= 0.95 * 15 * 20e6).all()
    assert (pauses.between_ns[0] > 50e6).all()
    assert not pauses.idle_between_ns[0].any()
    assert (pauses.idle_between_ns <= pauses.between_ns).all()
