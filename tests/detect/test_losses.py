"""Loader, collector, host: time that a rank loses beside compute."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.finding import undecided_if_free, undecided_if_no_gain
from detect.causes.launching import (
    half_starved,
    mate_starves,
    most_cost_of_host,
    stands_still,
    starvation,
)
from detect.causes.searches import OF_PLACE
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.observations import Pauses, cut
from detect.text import render_text
from megascan.header import Trainer
from megascan.topology import Layout


def slow_of_three(slot):
    return 1.3 if slot.rank == 3 else 1.0


@pytest.mark.parametrize(("share", "verdict"), [(0.7, Verdict.UNDECIDED), (0.3, Verdict.HEALTHY)])
def test_nothing_found_in_what_was_hardly_recorded_is_no_health(job, share, verdict):
    """Of some files of the original MegaScan nobody knows what the host did beside the layers."""
    seen = observe(job(layout=Layout(dp=4)).timeline())
    lost_ns = {cause: one for cause, one in seen.lost_ns.items() if cause != Cause.HOST}
    gaps = share * np.broadcast_to(seen.iteration_ns, seen.host_gap_ns.shape)
    report = judge(replace(seen, lost_ns=lost_ns, host_gap_ns=gaps), DetectorSettings())
    assert report.verdict == verdict
    assert ("nothing was recorded for 70%" in render_text(report)) == (verdict == Verdict.UNDECIDED)
    assert judge(replace(seen, host_gap_ns=gaps), DetectorSettings()).verdict == Verdict.HEALTHY


def test_collector_of_one_rank_is_the_jobs(job):
    report = job(layout=Layout(dp=4), gc_ms=lambda slot: 40.0 if slot.rank == 2 else 0.0).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((2,), Cause.GC, Owner.JOB)
    ]


def test_gaps_between_operations_are_the_hosts(job):
    report = job(layout=Layout(dp=4), gap_ms=lambda slot: 30.0 if slot.rank == 3 else 1.0).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((3,), Cause.HOST, Owner.NODE)
    ]


def test_short_gaps_in_few_of_many_iterations_are_not_worth_a_name(job):
    def short(slot):
        return 6.0 if slot.rank == 3 and 20 <= slot.iteration < 25 else 0.0

    assert job(layout=Layout(dp=8), iterations=60, gap_ms=short).report().findings == ()


def _on_cpu(timeline, *, reduces):
    """Times of a CPU job, of which rank 1 spends a half of its backward passes off its core; it
    `reduces` its gradients beside them, or not.
    """
    spans = timeline.spans.to_pylist()
    collectives = []
    for span in spans:
        if span["kind"] not in ("compute", "optimizer"):
            continue
        away = span["rank"] == 1 and span["name"] == "backward"
        span["self_cpu_ns"] = span["cpu_ns"] = span["self_ns"] // (2 if away else 1)
        if away and reduces:
            half = span["duration_ns"] // 2
            collectives.append(
                span | {
                    "kind": "collective", "name": "all_reduce", "op": "all_reduce",
                    "group": "dp@0", "track": 4, "start_ns": span["start_ns"] + half,
                    "duration_ns": half + 1, "self_ns": -1, "cpu_ns": -1, "self_cpu_ns": -1,
                }
            )  # fmt: skip
    ordered = sorted(
        [*spans, *collectives], key=lambda one: (one["rank"], one["start_ns"], -one["duration_ns"])
    )
    return replace(timeline, spans=pa.Table.from_pylist(ordered, schema=timeline.spans.schema))


def test_waiting_for_reductions_beside_a_pass_is_not_stolen(job):
    sound = job(layout=Layout(dp=4), device="cpu", iterations=6).timeline()
    waits = observe(_on_cpu(sound, reduces=True))
    assert np.abs(waits.stolen_ns).max() < 1e6
    stolen = observe(_on_cpu(sound, reduces=False))
    assert (stolen.stolen_ns[1] > 50e6).all() and stolen.stolen_ns[0].max() == 0.0


def test_lost_time_that_costs_nothing_accuses_nobody(job):
    """Whoever is waited for by nobody may wait himself, for what was not recorded."""
    gaps = job(layout=Layout(dp=4), gap_ms=lambda slot: 30.0 if slot.rank == 3 else 1.0)
    (finding,) = gaps.report().findings
    free = replace(finding, cost_is_replayed=True, step_time_cost_ratio=1.0)
    assert undecided_if_free(free, "why").owner == Owner.UNDECIDED
    assert undecided_if_free(replace(free, step_time_cost_ratio=1.05), "why").owner == Owner.NODE
    assert undecided_if_free(replace(free, cost_is_replayed=False), "why").owner == Owner.NODE


def test_a_host_or_a_network_that_costs_next_to_nothing_has_no_name(job):
    gaps = job(layout=Layout(dp=4), gap_ms=lambda slot: 30.0 if slot.rank == 3 else 1.0)
    (finding,) = gaps.report().findings
    cheap = replace(finding, cost_is_replayed=True, step_time_cost_ratio=1.0015)
    assert cheap.cause == Cause.HOST and cheap.owner == Owner.NODE
    network = replace(cheap, cause=Cause.LINK, ranks=(0, 1, 2, 3))
    estimated = replace(cheap, cost_is_replayed=False)
    of_two = replace(estimated, num_peers=1, step_time_cost_ratio=1.015)  # one is always slower
    of_a_pause = replace(cheap, step_time_cost_ratio=1.6, slowdown=1.014)  # one iteration of all
    of_all = replace(cheap, ranks=(2, 3), step_time_cost_ratio=1.025)  # a host of two
    for one in (cheap, network, estimated, of_two, of_a_pause, of_all):
        assert undecided_if_no_gain(one).owner == Owner.UNDECIDED
    for other in (
        replace(cheap, step_time_cost_ratio=1.03),
        replace(of_a_pause, share_of_iterations=0.5),
        replace(of_a_pause, episodes=((1, 2), (5, 6))),  # now and then, each time by far more
        replace(cheap, joint_cost_ratio=1.03),  # it hides behind others that lose as much
        replace(estimated, step_time_cost_ratio=1.01),
        replace(of_two, step_time_cost_ratio=1.03),
        replace(network, cost_is_replayed=False),
        replace(of_all, step_time_cost_ratio=1.035),
        replace(cheap, cause=Cause.LOADER),
        replace(network, step_time_cost_ratio=1.004),
        replace(network, ranks=(0, 1)),  # a pair is isolated by others
    ):
        assert undecided_if_no_gain(other) is other


@pytest.mark.parametrize(("factor", "owner"), [(2.0, Owner.UNDECIDED), (1.0, Owner.NODE)])
def test_gaps_of_a_stage_whose_replica_has_a_slow_device_name_no_host(job, slow, factor, owner):
    """Rank 2 of the first stage waits for rank 6 of the second, in part where nobody sees it."""
    made = job(
        layout=Layout(pp=2, dp=4),
        work=slow(6, factor),
        gap_ms=lambda slot: 30.0 if slot.rank == 2 else 1.0,
    )
    found = {one.ranks: one for one in made.report().findings if one.cause is Cause.HOST}
    assert found[(2,)].owner is owner
    assert any("another rank of its replica" in one for one in found[(2,)].evidence) == (
        owner is Owner.UNDECIDED
    )


@pytest.mark.parametrize(("slow_rank", "owner"), [(3, Owner.UNDECIDED), (5, Owner.NODE)])
def test_gaps_beside_a_slow_tp_mate_name_no_host(job, slow, slow_rank, owner):
    """Rank 2 may wait for rank 3, its mate, in reductions that nobody recorded; not for rank 5."""
    made = job(
        layout=Layout(tp=2, dp=4),
        work=slow(slow_rank, 1.2),
        gap_ms=lambda slot: 60.0 if slot.rank == 2 else 1.0,
    )
    found = {one.ranks: one for one in made.report().findings if one.cause is Cause.HOST}
    assert found[(2,)].owner is owner


def test_a_mate_of_one_that_waits_for_launches_may_take_turns_with_it(job):
    """Rank 4 waits for launches: whether 5 or 4 is behind may change. Rank 7 has no such mate."""
    seen = observe(job(layout=Layout(tp=2, dp=4), launch_lead_ns=lambda rank: 10**8).timeline())
    starved = np.zeros((8, 20))
    starved[[0, 2, 4]] = 0.9
    told, active = replace(seen, starved_share=starved), np.ones(20, dtype=bool)
    assert "90% of a TP mate's operations" in mate_starves(told, 5, active)
    assert not mate_starves(told, 7, active)
    assert not mate_starves(told, 4, active), "it starves itself, which other rules judge"
    assert not mate_starves(seen, 5, active)


@pytest.mark.parametrize(("iterations", "owner"), [(3, Owner.UNDECIDED), (8, Owner.NODE)])
def test_gaps_of_one_of_two_in_few_iterations_name_no_host(job, iterations, owner):
    two = job(layout=Layout(dp=2), iterations=iterations)
    (finding,) = two.but(gap_ms=lambda slot: 30.0 if slot.rank == 1 else 1.0).report().findings
    assert (finding.cause, finding.ranks, finding.owner) == (Cause.HOST, (1,), owner)


def test_a_stage_alone_may_have_gaps_of_its_own(job):
    """Undecided, unless its host launches slowly."""
    seen = observe(
        job(layout=Layout(pp=4), gap_ms=lambda slot: 40.0 if slot.rank == 2 else 1.0).timeline()
    )
    pace = np.where(np.arange(4)[:, None] == 2, np.log(1.8), 0.0) + np.zeros((4, 20))
    owners = [
        [one.owner for one in judge(each, DetectorSettings()).findings if one.cause == Cause.HOST]
        for each in (seen, replace(seen, launch_pace=pace))
    ]
    assert owners == [[Owner.UNDECIDED], [Owner.NODE]]


def test_what_was_not_recorded_is_no_time_that_nobody_lost(job):
    """Rank 2's file ends in the middle: what it lost then is not known."""
    timeline = job(layout=Layout(dp=3), gap_ms=lambda slot: 5.0).timeline()
    spans = timeline.spans
    ends = pc.and_(pc.equal(spans["rank"], 2), pc.greater(spans["iteration"], 12))
    seen = observe(replace(timeline, spans=spans.filter(pc.invert(ends))))
    lost = seen.lost(Cause.HOST)[2]
    assert np.isfinite(lost[:10]).all() and np.isnan(lost[10:]).all()


def test_a_starved_rank_beside_groups_that_lack_ranks_is_undecided(job):
    """Rank 3's device waits for launches; of the other TP group one rank is missing."""
    seen = observe(
        job(
            layout=Layout(tp=2, dp=2), launch_lead_ns=lambda rank: 1000 if rank == 3 else 10**8
        ).timeline()
    )  # fmt: skip
    active = np.ones(20, dtype=bool)
    assert starvation(seen, 3, active)[0] == Owner.NODE
    assert starvation(cut(seen, "row", np.array([0, 2, 3])), 2, active)[0] == Owner.UNDECIDED


def test_a_starved_rank_whose_host_is_hardly_slower_is_undecided(job):
    """Its peers' hosts are ahead, and would not be for long if its own were twice as slow."""
    seen = observe(
        job(
            layout=Layout(dp=4), launch_lead_ns=lambda rank: 1000 if rank == 3 else 10**8
        ).timeline()
    )  # fmt: skip
    active, effect = np.ones(20, dtype=bool), np.log(3.0)
    pace = np.zeros((4, 20))
    pace[3] = np.log(1.05)
    owner, why = starvation(replace(seen, held_pace=pace), 3, active, effect)
    assert owner is Owner.UNDECIDED and "1.05x the time of its peers'" in why
    pace[3] = np.log(2.5)
    assert starvation(replace(seen, held_pace=pace), 3, active, effect)[0] is Owner.NODE
    pace[3] = np.nan  # nobody knows
    assert starvation(replace(seen, held_pace=pace), 3, active, effect)[0] is Owner.NODE
    assert starvation(replace(seen, held_pace=None), 3, active, effect)[0] is Owner.NODE


@pytest.mark.parametrize(("starved", "named"), [(0.57, True), (0.0, False)])
def test_a_host_that_is_late_in_forward_passes_alone_is_named(job, starved, named):
    """Their kernels are shorter than those of backward passes; it began after three iterations."""

    def work(slot):
        is_late = slot.rank == 2 and slot.iteration > 5
        return {"forward": 2.4, "backward": 1.05}.get(slot.phase, 1.0) if is_late else 1.0

    seen = observe(job(layout=Layout(tp=2, dp=4), iterations=8, work=work).timeline())
    own = (np.arange(8) == 2)[:, None] & (seen.iterations > 5)
    told = replace(seen, starved_share=np.where(own, starved, 0.0))
    found = judge(told, DetectorSettings()).findings
    hosts = [one for one in found if one.owner is Owner.NODE and one.cause is Cause.HOST]
    assert [one.ranks for one in hosts] == [(2,)] * named


@pytest.mark.parametrize(("pace", "owner"), [(1.06, Owner.UNDECIDED), (1.5, Owner.NODE)])
def test_where_all_of_a_stage_wait_for_launches_one_host_is_the_last(job, pace, owner):
    """88 % of rank 7's operations come just in time, of its stage's others 78 %, of others none."""
    seen = observe(job(layout=Layout(pp=2, dp=4)).timeline())
    starved, paces = np.zeros_like(seen.busy_ns), np.zeros_like(seen.busy_ns)
    starved[4:], starved[7], paces[7] = 0.78, 0.88, np.log(pace)
    told = replace(seen, starved_share=starved, held_pace=paces)
    assert starvation(told, 7, np.ones(20, dtype=bool), 0.06)[0] is owner


@pytest.mark.parametrize(
    ("pace", "owner"), [(1.2, Owner.UNDECIDED), (2.0, Owner.NODE)], ids=["little", "twice"]
)
def test_a_host_that_takes_twice_as_long_is_no_little_slower_however_slow_its_device(
    job, pace, owner
):
    """Its device stands still for most of passes that seem 16 times as long."""
    lead = lambda rank: 1000 if rank == 3 else 10**8  # noqa: E731
    seen = observe(job(layout=Layout(dp=4), launch_lead_ns=lead).timeline())
    paces = np.log(pace) * (np.arange(4) == 3)[:, None] * np.ones(20)
    active = np.ones(20, dtype=bool)
    found = starvation(replace(seen, held_pace=paces), 3, active, np.log(16.0))
    assert found is not None and found[0] is owner


@pytest.mark.parametrize(("factor", "owner"), [(1.2, Owner.JOB), (3.0, Owner.NODE)])
def test_in_a_host_bound_job_one_rank_far_behind_all_others_is_its_hosts(job, factor, owner):
    """Each TP group has a starved rank; the work of rank 3 takes longer than that of the others."""
    made = job(
        layout=Layout(tp=2, dp=4),
        work=lambda slot: factor if slot.rank == 3 else 1.0,
        launch_lead_ns=lambda rank: 1000 if rank % 2 else 10**8,
    )
    seen, active = observe(made.timeline()), np.ones(20, dtype=bool)
    found = starvation(replace(seen, held_pace=None), 3, active, np.log(factor))
    assert found is not None and found[0] is owner


@pytest.mark.parametrize(
    ("idle_ms", "launching_ms", "owner"),
    [(8.0, 30.0, Owner.UNDECIDED), (100.0, 30.0, Owner.NODE), (100.0, 14.0, Owner.NODE),
     (8.0, 14.0, None)],
    ids=["little", "much", "much of short launching", "short launching is not why"],
)  # fmt: skip
def test_a_device_idle_for_longer_than_all_launching_takes_is_its_hosts(
    job, idle_ms, launching_ms, owner
):
    """Its host launches as quickly as those of its peers, and does something else; passes of 240 ms
    take 1.15 times as long.
    """
    seen, active = observe(job(layout=Layout(dp=4)).timeline()), np.ones(20, dtype=bool)
    starved = np.where(np.arange(4) == 3, 0.9, 0.0)[:, None] * np.ones(20)
    lost = np.full((4, 20), 2e6)
    lost[3] += idle_ms * 1e6
    told = replace(seen, starved_share=starved, held_pace=np.zeros((4, 20)),
                   launching_ns=np.full((4, 20), launching_ms * 1e6),
                   lost_ns={**seen.lost_ns, Cause.HOST: lost})  # fmt: skip
    found, why = starvation(told, 3, active, np.log(1.15)) or (None, "")
    assert found is owner
    assert ("100 ms an iteration longer than theirs" in why) == (owner is Owner.NODE)


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
    ("own", "theirs", "is_doubtful"),
    [
        (0.65, 0.4, True),
        (0.65, 0.5, False),
        (0.4, 0.3, False),
        (0.75, 0.4, False),
        (0.65, 0.1, False),
    ],
)
def test_who_waits_for_a_host_a_little_more_than_peers_that_wait_too(job, own, theirs, is_doubtful):
    """All hosts can hardly keep up; beside peers that are well fed half is enough to be starved."""
    seen = observe(job(layout=Layout(dp=4), launch_lead_ns=lambda rank: 10**8).timeline())
    starved = np.full((4, 20), theirs)
    starved[3] = own
    seen = replace(seen, starved_share=starved)
    assert bool(half_starved(seen, 3, np.ones(20, dtype=bool))) == is_doubtful
    pace = np.zeros((4, 20))
    pace[3] = np.log(2.0)  # its host is slow, whoever waits
    assert not half_starved(replace(seen, launch_pace=pace), 3, np.ones(20, dtype=bool))
    slow = job(layout=Layout(dp=4), work=slow_of_three, launch_lead_ns=lambda rank: 10**8)
    report = judge(replace(observe(slow.timeline()), starved_share=starved), DetectorSettings())
    named = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert named == ([] if is_doubtful else [(3,)])


def test_who_waits_for_a_slow_mate_unseen_is_held_up_by_no_host(job, slow):
    """Of a TP group whose communication was not recorded one waits inside its passes, off its core,
    for the other.
    """
    run = job(
        layout=Layout(tp=2, dp=2), device="cpu", work=slow(0, 1.6),
        gap_ms=lambda slot: 300.0 if slot.rank == 1 else 1.0,
    )  # fmt: skip
    seen = observe(run.timeline())
    named = {
        mixed: {(one.ranks, one.cause) for one in
                judge(replace(seen, mixes_communication=mixed), DetectorSettings()).findings}
        for mixed in (False, True)
    }  # fmt: skip
    assert named[False] == {((0,), Cause.COMPUTE), ((1,), Cause.HOST)}
    assert named[True] == {((0,), Cause.COMPUTE)}


@pytest.mark.parametrize(("gap_ms", "owner"), [(32.0, Owner.UNDECIDED), (60.0, Owner.NODE)])
def test_gaps_hardly_longer_than_its_peers_are_no_sick_host(job, gap_ms, owner):
    """All hosts work for 28 ms between the passes; cores are not equally fast."""
    report = job(
        layout=Layout(dp=2), gap_ms=lambda slot: gap_ms if slot.rank == 1 else 28.0
    ).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((1,), Cause.HOST, owner)
    ]
    assert ("for nearly as long" in render_text(report)) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(("loading_ms", "is_named"), [(80.0, False), (12.0, True)])
def test_a_queue_that_a_late_batch_leaves_empty_is_no_second_fault(job, loading_ms, is_named):
    """Rank 1's device has nothing to do for 20 ms more than the others', and waits for batches."""
    seen = observe(job(layout=Layout(dp=4)).timeline())
    lost = {cause: np.full_like(seen.busy_ns, 1e6) for cause in (Cause.LOADER, Cause.HOST)}
    lost[Cause.LOADER][1] = loading_ms * 1e6
    lost[Cause.HOST][1] = 21e6
    report = judge(replace(seen, lost_ns=lost), DetectorSettings())
    causes = {one.cause for one in report.findings if one.ranks == (1,)}
    assert (Cause.HOST in causes) == is_named
    assert Cause.LOADER in causes


@pytest.mark.parametrize(("late", "owner"), [({4}, Owner.NODE), ({0, 4, 8}, Owner.UNDECIDED)])
def test_what_the_first_ranks_of_all_groups_lose_is_their_places(job, late, owner):
    """They load and hand out; rank 4 a little longer than the others."""

    def gap(slot):
        return (60.0 if slot.rank == 4 else 50.0) if slot.rank in late else 1.0

    report = job(layout=Layout(tp=4, dp=3), gap_ms=gap).report()
    found = {one.ranks: one.owner for one in report.findings if one.cause == Cause.HOST}
    assert found[4,] == owner
    assert (OF_PLACE in " ".join(report.findings[0].evidence)) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("stalled_share", "recorded", "owner"),
    [(1.0, False, Owner.UNDECIDED), (1.0, True, Owner.NODE), (0.2, False, Owner.NODE)],
)
def test_a_device_that_stands_still_may_wait_for_mates_unseen(
    job, exchanging, stalled_share, recorded, owner
):
    """It stands still in its passes, or between them; CP ranks exchange keys and values."""
    layout = Layout(dp=4, cp=2)
    groups = [(layout.group(rank, "cp"), 10**7, 1.0) for rank in range(0, 8, 2)]
    seen = exchanging(job(layout=layout).timeline(), groups)
    kinds = tuple(one.replace("dp", "cp", 1) for one in seen.transfers.kinds)
    transfers = replace(seen.transfers, kinds=kinds) if recorded else None
    lost_ns = np.full(seen.busy_ns.shape, 1e6)
    lost_ns[3] = 60e6
    told = replace(
        seen,
        transfers=transfers,
        lost_ns={Cause.HOST: lost_ns, Cause.GC: np.zeros_like(lost_ns)},
        stalled_ns=stalled_share * lost_ns,
        host_gap_ns=(1.0 - stalled_share) * lost_ns,
    )
    assert told.hidden_axes == (() if recorded else ("cp",))
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.HOST, owner)
    unseen = any("CP ranks send each other was not recorded" in one for one in finding.evidence)
    assert unseen == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("stalled_share", "recorded", "owner"),
    [
        (1.0, "", Owner.UNDECIDED),
        (1.0, "collections", Owner.NODE),
        (1.0, "launches", Owner.NODE),
        (0.2, "", Owner.NODE),
    ],
)
def test_a_rank_that_stands_still_in_its_passes_may_collect_garbage(
    job, stalled_share, recorded, owner
):
    seen = observe(job(layout=Layout(dp=8)).timeline())
    lost_ns = np.full(seen.busy_ns.shape, 1e6)
    lost_ns[3] = 60e6
    collections = {Cause.GC: np.zeros_like(lost_ns)} if recorded == "collections" else {}
    starved = np.zeros_like(lost_ns) if recorded == "launches" else None
    told = replace(
        seen,
        lost_ns={Cause.HOST: lost_ns, **collections},
        stalled_ns=stalled_share * lost_ns,
        host_gap_ns=(1.0 - stalled_share) * lost_ns,
        starved_share=starved,
        costs=None,
    )
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((3,), Cause.HOST, owner)


@pytest.mark.parametrize(
    ("rank", "more_ms", "owner"),
    [(1, 10.0, Owner.NODE), (1, 1.0, Owner.UNDECIDED), (3, 1.0, Owner.UNDECIDED)],
    ids=["pauses between others", "as long every time", "an end"],
)
def test_pauses_of_a_stage_between_others_are_none_of_its_layers(job, rank, more_ms, owner):
    def gap_ms(slot):
        return 16.0 + more_ms * (slot.iteration % 3) if slot.rank == rank else 0.5

    (finding,) = [
        one for one in job(layout=Layout(pp=4), gap_ms=gap_ms).report().findings if one.ranks
    ]
    assert (finding.ranks, finding.cause, finding.owner) == ((rank,), Cause.HOST, owner)


@pytest.mark.parametrize("is_matched", [True, False])
def test_of_a_profile_without_any_match_nobody_knows_who_ought_to_be_alike(job, is_matched):
    """The rank that loses time may be a leader that loads for its group."""
    late = job(
        layout=Layout(dp=4), gap_ms=lambda slot: 60.0 if slot.rank == 1 else 1.0,
        transfer=lambda *_: 1.0,
    )  # fmt: skip
    seen = observe(late.timeline())
    seen = replace(
        seen,
        unsplit_ns=np.full_like(seen.busy_ns, 1e6),
        tells_passes=False,
        transfers=seen.transfers if is_matched else None,
    )
    assert seen.transfers is None or seen.knows_roles == bool(seen.transfers.members)
    report = judge(seen, DetectorSettings())
    found = [one for one in report.findings if one.cause == Cause.HOST]
    assert [one.owner for one in found] == [Owner.NODE if seen.knows_roles else Owner.UNDECIDED]


@pytest.mark.parametrize(
    ("own", "pace", "is_doubtful"),
    [
        (0.65, 0.25, True),
        (0.65, 0.05, False),  # its host is hardly slower than its device's work
        (0.4, 0.25, False),  # its host is mostly ahead
    ],
)
def test_work_that_a_slow_host_launches_late_may_be_as_slow_as_the_host(
    job, own, pace, is_doubtful
):
    """1.1 times the work of its peers, half of which come just in time as well."""

    def longer(slot):
        return 1.1 if slot.rank == 3 else 1.0

    made = job(layout=Layout(dp=4), work=longer, launch_lead_ns=lambda rank: 10**8)
    starved, paces = np.full((4, 20), 0.5), np.zeros((4, 20))
    starved[3], paces[3] = own, pace
    told = replace(observe(made.timeline()), starved_share=starved, held_pace=paces)
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause) == ((3,), Cause.COMPUTE)
    assert finding.owner is (Owner.UNDECIDED if is_doubtful else Owner.NODE)
    assert any("from launch to launch" in one for one in finding.evidence) == is_doubtful


@pytest.mark.parametrize(
    ("own", "owner"),
    [(0.25, Owner.NODE), (0.4, Owner.UNDECIDED), (0.6, Owner.UNDECIDED)],
    ids=["as often as its peers'", "more often", "starved"],
)
def test_a_device_that_hardly_waits_for_launches_loses_pauses_whatever_its_hosts_pace(
    job, own, owner
):
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: 40.0 if slot.rank == 2 else 2.0)
    starved, paces = np.full((4, 20), 0.25), np.zeros((4, 20))
    starved[2] = own
    told = replace(observe(made.timeline()), starved_share=starved, held_pace=paces)
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, owner)


@pytest.mark.parametrize(
    ("pace", "launching_ms", "owner"),
    [(0.08, 50.0, Owner.UNDECIDED), (0.45, 50.0, Owner.NODE), (0.08, 5.0, Owner.NODE)],
)
def test_gaps_cost_no_more_than_their_host_launches_more_slowly(job, pace, launching_ms, owner):
    """By replay the job would be 1.9 times as fast; but its peers' hosts have to launch, too."""
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: 16.0 if slot.rank == 2 else 0.1)
    starved, paces = np.full((4, 20), 0.1), np.zeros((4, 20))
    starved[2], paces[2] = 0.84, pace
    costs = SimpleNamespace(ratio=lambda *_: 1.9, ratio_of_transfers=lambda *_: 1.9)
    told = replace(
        observe(made.timeline()), starved_share=starved, held_pace=paces, costs=costs,
        launching_ns=np.full((4, 20), launching_ms * 1e6),
    )  # fmt: skip
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, owner)
    idles_beyond_launching = launching_ms < 10.0
    least = 1.9 if idles_beyond_launching else np.exp(pace)
    assert finding.step_time_cost_ratio == pytest.approx(least)


@pytest.mark.parametrize(
    ("pace", "launching_ms", "owner"),
    [
        (0.08, 50.0, Owner.UNDECIDED),  # 1.08 times 50 ms is no reason for 16 ms
        (0.45, 50.0, Owner.NODE),
        (0.2, 110.0, Owner.UNDECIDED),  # as much as the gaps, and as processors of one model differ
        (0.08, 5.0, Owner.NODE),  # it does something else for longer than it launches
    ],
)
def test_gaps_are_a_host_s_if_it_launches_slower_by_as_much(job, pace, launching_ms, owner):
    """A device of four has nothing to do for 16 ms an iteration, 84 % launched just in time."""
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: 16.0 if slot.rank == 2 else 0.1)
    seen = observe(made.timeline())
    starved, paces = np.zeros((4, 20)), np.zeros((4, 20))
    starved[2], paces[2] = 0.84, pace
    told = replace(seen, starved_share=starved, held_pace=paces,
                   launching_ns=np.full((4, 20), launching_ms * 1e6))  # fmt: skip
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, owner)


@pytest.mark.parametrize(
    ("launching_ms", "owner"),
    [
        (114.0, Owner.UNDECIDED),  # 1.37 times from launch to launch, 1.14 times in all
        (160.0, Owner.NODE),
    ],
)
def test_of_a_profile_all_that_a_host_launches_counts_as_well(job, launching_ms, owner):
    """The quicker steps of one host, and all of the others', which are held back while ahead."""
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: 16.0 if slot.rank == 2 else 0.1)
    starved, paces, launching = np.zeros((4, 20)), np.zeros((4, 20)), np.full((4, 20), 100e6)
    starved[2], paces[2], launching[2] = 0.18, 0.32, launching_ms * 1e6
    told = replace(
        observe(made.timeline()), tells_passes=False, starved_share=starved, held_pace=paces,
        launching_ns=launching,
    )  # fmt: skip
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((2,), Cause.HOST, owner)


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


def test_of_two_hosts_the_one_that_always_loses_more_is_named_however_it_varies(job):
    """10 to 150 ms of iterations of 260, and 0.5 to 2 on the other: noise as large as the level."""
    own, other = (np.random.default_rng(seed).uniform(*span, 20)
                  for seed, span in ((3, (10.0, 150.0)), (4, (0.5, 2.0))))  # fmt: skip
    made = job(layout=Layout(dp=2), iterations=10,
               gap_ms=lambda slot: (own if slot.rank else other)[slot.iteration])  # fmt: skip
    (finding,) = judge(observe(made.timeline()), DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.HOST, Owner.NODE)


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


@pytest.mark.parametrize(
    ("stops_ms", "owner"), [(40.0, Owner.NODE), (3.0, Owner.UNDECIDED)], ids=["pauses", "gaps"]
)
def test_of_a_profile_many_short_gaps_are_the_pace_of_a_host(job, stops_ms, owner):
    """40 ms of 290 more than on its peers, of whose kernels as many come just in time, and launches
    as quick as theirs: where the profile shows few stops somebody's host is the last.
    """
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: 42.0 if slot.rank == 2 else 2.0)
    starved, paces, stopped = np.full((4, 20), 0.4), np.zeros((4, 20)), np.full((4, 20), 0.5e6)
    stopped[2] = stops_ms * 1e6
    told = replace(observe(made.timeline()), tells_passes=False, starved_share=starved,
                   held_pace=paces, stopped_ns=stopped)  # fmt: skip
    found = judge(told, DetectorSettings()).findings
    assert [(one.ranks, one.cause, one.owner) for one in found] == [((2,), Cause.HOST, owner)]


@pytest.mark.parametrize(
    ("gaps_ms", "starved_share", "owner"),
    [
        (8.0, 0.06, Owner.UNDECIDED),  # some hundred gaps: the pace of a host that comes last
        (40.0, 0.02, Owner.NODE),  # a few long ones: it did something else
    ],
)
def test_of_a_profile_few_long_gaps_are_pauses(job, gaps_ms, starved_share, owner):
    made = job(layout=Layout(dp=4), gap_ms=lambda slot: gaps_ms if slot.rank == 2 else 0.1)
    starved, paces = np.zeros((4, 20)), np.zeros((4, 20))
    starved[2], paces[2] = starved_share, 0.1
    told = replace(observe(made.timeline()), tells_passes=False, starved_share=starved,
                   held_pace=paces, launching_ns=None)  # fmt: skip
    found = judge(told, DetectorSettings()).findings
    assert [(one.ranks, one.cause, one.owner) for one in found] == [((2,), Cause.HOST, owner)]


@pytest.mark.parametrize(
    ("pace", "launching_ms", "owner"),
    [
        (0.05, 120.0, Owner.UNDECIDED),
        (0.45, 120.0, Owner.NODE),
        (0.2, None, Owner.UNDECIDED),  # a profile: processors of one model differ by as much
        (0.45, None, Owner.NODE),
    ],
)
def test_gaps_now_and_then_are_a_host_s_if_it_launches_slower(job, pace, launching_ms, owner):
    """60 ms in six of twenty iterations, whose operations come just in time."""
    hits = {2, 3, 7, 8, 13, 17}

    def gaps(slot):
        return 60.0 if slot.rank == 1 and slot.iteration in hits else 0.1

    seen = observe(job(layout=Layout(dp=4), gap_ms=gaps).timeline())
    starved, paces = np.zeros((4, 20)), np.zeros((4, 20))
    starved[1], paces[1] = 0.8, pace
    launching = None if launching_ms is None else np.full((4, 20), launching_ms * 1e6)
    told = replace(seen, starved_share=starved, held_pace=paces, launching_ns=launching)
    report = judge(told, DetectorSettings(num_warmup_iterations=0))
    found = {one.cause: one.owner for one in report.findings if one.ranks == (1,)}
    assert found == {Cause.HOST: owner}


@pytest.mark.parametrize("effect", ["loading_ms", "gap_ms"])
def test_which_rank_of_a_group_loses_time_is_not_told_where_its_communication_is_hidden(
    job, effect
):
    slow = {effect: lambda slot: 30.0 if slot.rank in (4, 5) else 0.5}
    seen = observe(job(layout=Layout(tp=2, dp=8), **slow).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    assert [(one.ranks, one.owner) for one in report.findings] == [((4, 5), Owner.UNDECIDED)]
    assert report.findings[0].headline.startswith("the group of ranks 4 and 5 (")


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
