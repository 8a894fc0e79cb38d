"""Loader, collector, host: time that a rank loses beside compute; gaps and what they may be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.finding import undecided_if_free, undecided_if_no_gain
from detect.causes.searches import OF_PLACE
from detect.detector import judge
from detect.observe.extract import observe
from detect.text import render_text
from megascan.topology import Layout


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


def test_of_two_hosts_the_one_that_always_loses_more_is_named_however_it_varies(job):
    """10 to 150 ms of iterations of 260, and 0.5 to 2 on the other: noise as large as the level."""
    own, other = (np.random.default_rng(seed).uniform(*span, 20)
                  for seed, span in ((3, (10.0, 150.0)), (4, (0.5, 2.0))))  # fmt: skip
    made = job(layout=Layout(dp=2), iterations=10,
               gap_ms=lambda slot: (own if slot.rank else other)[slot.iteration])  # fmt: skip
    (finding,) = judge(observe(made.timeline()), DetectorSettings()).findings
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.HOST, Owner.NODE)


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


@pytest.mark.parametrize(("gap_ms", "cause"), [(200.0, Cause.HOST), (60.0, Cause.COMPUTE)])
def test_who_loses_more_than_it_computes_is_held_up_whatever_its_device_does(
    job, slow, gap_ms, cause
):
    """Its passes take 1.3 times as long as well: 18 of 60 ms."""
    report = job(
        layout=Layout(dp=8), microbatches=2, work=slow(3, 1.3),
        gap_ms=lambda slot: gap_ms if slot.rank == 3 else 0.1,
    ).report()  # fmt: skip
    assert [(one.ranks, one.cause) for one in report.findings] == [((3,), cause)]


@pytest.mark.parametrize(("starved", "owner"), [(0.9, Owner.JOB), (0.6, Owner.NODE)])
def test_a_late_host_is_the_jobs_where_all_hosts_are_late(job, starved, owner):
    made = job(layout=Layout(dp=8), gap_ms=lambda slot: 25.0 if slot.rank == 3 else 0.1)
    seen = observe(made.timeline())
    told = replace(seen, starved_share=np.full_like(seen.busy_ns, starved))
    found = judge(told, DetectorSettings()).findings
    assert [(one.ranks, one.cause, one.owner) for one in found] == [((3,), Cause.HOST, owner)]
