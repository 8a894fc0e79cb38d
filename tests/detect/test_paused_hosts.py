"""Pauses of most ranks of a host, in turn, are the host's; those of a stage or in step are not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, Owner
from detect.causes.hits import FEW
from detect.causes.paused_hosts import (
    ALONE,
    NOISY,
    ROUTED,
    PausedHost,
    _are_those_that_load,
    _doubts,
    _is_of_one_stage,
    _may_wait_for_loaders,
    _paused_host,
    _pausing_host,
    in_turn,
)
from detect.observe.extract import observe
from megascan.topology import Layout


def _pressed(ranks):
    """Pauses that meet one rank of `ranks` after the other, in every second iteration."""

    def pauses(slot):
        is_hit = slot.iteration % 2 and slot.rank == ranks[slot.iteration // 2 % len(ranks)]
        return 40.0 if is_hit else 0.0

    return pauses


def test_pauses_of_most_ranks_of_a_host_are_the_hosts(job):
    pressed = _pressed(range(4, 8))
    (finding,) = job(layout=Layout(dp=16), hosts=4, iterations=20, gap_ms=pressed).report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    assert "4 of its 4 ranks" in finding.evidence[0]


@pytest.fixture
def paused_passes(job):
    """A job whose ranks 4 to 7, one host of two, pause inside passes of some iterations: each for
    itself, or all as long as rank 5. Those of the other host pause in the iterations `elsewhere`.
    """

    usual_hits = (5, 6, 9, 12, 13, 15)

    def make(
        *,
        together=False,
        hits=usual_hits,
        elsewhere=(),
        phases=("forward", "backward"),
        size=1.0,
        **settings,
    ):
        random = np.random.default_rng(3)
        is_hit = random.random((8, 24, 8, 2)) < 0.2
        longer = 1.0 + size * random.exponential(1.0, (8, 24, 8, 2)) * is_hit

        def pause(slot):
            hit = slot.iteration in (hits if slot.rank >= 4 else elsewhere)
            hit = hit and slot.phase in phases
            if not hit or slot.name == "optimizer":
                return 1.0
            rank = 5 if together else slot.rank
            return float(
                longer[rank, slot.iteration, slot.microbatch, int(slot.phase == "backward")]
            )

        usual = {"layout": Layout(dp=8), "iterations": 14, "noise": 0.005}
        return job(hosts=4, work=pause, **usual | settings)

    return make


def test_pauses_inside_passes_of_most_ranks_of_a_host_are_the_hosts(paused_passes):
    (finding,) = paused_passes().report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("layout", "named"),
    [(Layout(dp=16), [tuple(range(8, 16))]), (Layout(dp=8, cp=2), [])],
    ids=["nobody waits inside passes", "a ring may"],
)
def test_ranks_that_hardly_ever_lead_pause_for_their_host_if_nothing_ties_them(job, layout, named):
    random = np.random.default_rng(3)
    shape = (16, 24, 8, 2)
    size = np.where(np.arange(16) < 12, 1.0, 0.12)[:, None, None, None]
    longer = 1.0 + size * random.exponential(1.0, shape) * (random.random(shape) < 0.1)

    def pause(slot):
        if slot.rank < 8 or slot.name == "optimizer":
            return 1.0
        return float(
            longer[slot.rank, slot.iteration, slot.microbatch, int(slot.phase == "backward")]
        )

    made = job(layout=layout, hosts=8, iterations=14, work=pause, noise=0.005)
    found = [one for one in made.report().findings if one.owner is Owner.NODE]
    assert [one.ranks for one in found if len(one.ranks) > 1] == named


@pytest.mark.parametrize(
    ("noise", "owner"), [(0.0, Owner.NODE), (0.05, Owner.UNDECIDED)], ids=["quiet", "noisy"]
)
def test_gaps_of_a_stage_are_no_hosts_where_passes_of_all_hosts_are_as_noisy(job, noise, owner):
    """Only the middle stage, ranks 4 to 7, has gaps; passes of all are longer now and then."""
    random = np.random.default_rng(4)
    shape = (12, 24, 8, 2)
    longer = 1.0 + noise * random.exponential(8.0, shape) * (random.random(shape) < 0.2)

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        place = (slot.rank, slot.iteration, slot.microbatch, int(slot.phase == "backward"))
        return float(longer[place])

    layout, gaps = Layout(pp=3, dp=4), _pressed(range(4, 8))
    made = job(layout=layout, hosts=4, iterations=20, gap_ms=gaps, work=work, noise=0.005)
    (finding,) = (one for one in made.report().findings if one.ranks == (4, 5, 6, 7))
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert (NOISY in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("hits", "size", "owner"),
    [((5, 6), 1.0, Owner.NODE), ((5, 6), 0.25, Owner.UNDECIDED), ((5,), 1.0, Owner.UNDECIDED)],
    ids=["heavy", "light", "once"],
)
def test_two_iterations_with_pauses_are_no_chance_where_other_hosts_are_quiet(
    paused_passes, hits, size, owner
):
    """They cost 13 %, 3 % and 5 % of the iteration on the mean."""
    made = paused_passes(hits=hits, size=size, iterations=6)
    (finding,) = (one for one in made.report().findings if one.ranks == (4, 5, 6, 7))
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert (FEW in finding.evidence) == (owner is Owner.UNDECIDED)


def test_pauses_inside_passes_of_ranks_with_experts_may_be_their_tokens(paused_passes):
    (finding,) = paused_passes(layout=Layout(dp=8, ep=4)).report().findings
    assert (finding.cause, finding.owner) == (Cause.HOST, Owner.UNDECIDED)
    assert ROUTED in finding.evidence


def test_mates_that_wait_inside_their_passes_for_one_are_no_paused_host(paused_passes):
    mates = Layout(tp=4, dp=2)
    apart, together = (paused_passes(layout=mates, together=one).report() for one in (False, True))
    assert [(one.ranks, one.owner) for one in apart.findings] == [((4, 5, 6, 7), Owner.NODE)]
    assert not any(one.cause == Cause.HOST for one in together.findings)


@pytest.mark.parametrize(
    ("layout", "named"),
    [(Layout(tp=2, dp=8), [tuple(range(8))]), (Layout(tp=2, dp=4, cp=2), [])],
    ids=["none waits for another's", "a ring may"],
)
@pytest.mark.parametrize("num_pausing", [4, 1])
def test_tp_groups_whose_mates_pause_together_pause_for_their_host_if_several_do(
    job, layout, named, num_pausing
):
    """Mates pause alike, group 0 for longest; a single group may have a rank that stops."""
    random = np.random.default_rng(5)
    longer = random.exponential(1.0, (4, 24, 8)) * (random.random((4, 24, 8)) < 0.3)

    def pause(slot):
        group = slot.rank // 2
        hit = slot.iteration in (5, 6, 9, 12, 13, 15) and slot.name != "optimizer"
        if not hit or group >= num_pausing:
            return 1.0
        return float(1.0 + (3.0 if group == 0 else 1.0) * longer[group, slot.iteration, 0])

    made = job(layout=layout, hosts=8, iterations=14, work=pause, noise=0.002)
    found = [one for one in made.report().findings if one.owner is Owner.NODE]
    hosts = [one.ranks for one in found if len(one.ranks) == 8]
    assert hosts == (named if num_pausing > 1 else [])


@pytest.mark.parametrize(
    ("pausing", "owner"), [(range(8, 12), Owner.NODE), (range(8, 11), Owner.UNDECIDED)]
)
def test_pauses_at_an_end_of_a_pipeline_are_its_hosts_if_all_ranks_have_some(job, pausing, owner):
    """Ranks 8 to 11 are the last stage, which alone computes the loss, and loads."""
    layout, pauses = Layout(pp=3, dp=4), _pressed(pausing)
    report = job(layout=layout, hosts=4, iterations=20, gap_ms=pauses).report()
    assert [one.owner for one in report.findings if one.ranks == (8, 9, 10, 11)] == [owner]


def test_pauses_of_an_end_of_a_pipeline_are_its_hosts_where_loading_was_recorded(paused_passes):
    (finding,) = (
        paused_passes(layout=Layout(pp=2, dp=4), phases=("forward",), loading_ms=lambda slot: 0.1)
        .report()
        .findings
    )
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("pausing", "stages_elsewhere", "is_of_stage"),
    [((0, 1), (2, 3), True), ((0, 1), (0, 3), False), ((0, 2), (2, 3), False)],
    ids=["one stage", "which others have", "both stages"],
)
def test_a_host_that_stops_one_of_its_stages_alone_may_be_what_that_stage_does(
    pausing, stages_elsewhere, is_of_stage
):
    """A host has two ranks of stage 0 and two of stage 1."""
    members = SimpleNamespace(stage=np.array([0, 0, 1, 1, *stages_elsewhere]))
    pauses = np.isin(np.arange(4), pausing)
    paused = SimpleNamespace(rows=np.arange(4), pauses=pauses)
    assert _is_of_one_stage(members, paused) == is_of_stage


@pytest.mark.parametrize(
    ("pausing", "tp_ranks", "are_loaders"),
    [((0, 2), (0, 1, 0, 1), True), ((0, 1), (0, 1, 0, 1), False), ((0,), (0, 1, 0, 1), False),
     ((0, 1, 2, 3), (0, 0, 0, 0), False), ((0,), (0, 1, 1, 1), False)],
    ids=["those that load", "others", "not all of them", "all load", "one alone"],
)  # fmt: skip
def test_a_host_of_whose_ranks_just_those_that_load_stand_still_may_get_its_data_late(
    pausing, tp_ranks, are_loaders
):
    members = SimpleNamespace(place={"tp": np.array([*tp_ranks, 0, 1])})
    paused = SimpleNamespace(rows=np.arange(4), pauses=np.isin(np.arange(4), pausing))
    assert _are_those_that_load(members, paused) == are_loaders


@pytest.mark.parametrize(
    ("num_pauses", "is_sure", "are_several"),
    [((3, 1, 0, 1), True, True), ((3, 1, 0, 1), False, False), ((3, 1, 0, 0), True, False)],
    ids=["three ranks", "by chance", "two ranks"],
)
def test_what_stops_one_rank_by_itself_stops_no_two_others(num_pauses, is_sure, are_several):
    lost = np.where(np.arange(6) < np.array(num_pauses)[:, None], 0.1, 0.0)
    paused = PausedHost(
        name="", rows=np.arange(4), burst=SimpleNamespace(is_sure=is_sure), lost=lost,
        is_of_one=True,
    )  # fmt: skip
    assert paused.is_sure_of_several == are_several


@pytest.mark.parametrize(
    ("loading", "hidden_axes", "may_wait"),
    [(0.3, ("tp",), True), (0.3, (), False), (0.01, ("tp",), False)],
    ids=["storage", "waiting is recorded", "loaders are quick"],
)
def test_pauses_inside_passes_may_be_waiting_for_a_late_loader(loading, hidden_axes, may_wait):
    """A host loses 7 % of four iterations inside passes."""
    lost_ns = np.zeros((4, 6))
    lost_ns[2] = loading * 1e8
    seen = SimpleNamespace(
        lost=lambda cause: lost_ns, iteration_ns=np.full(6, 1e8), hidden_axes=hidden_axes,
        stolen_ns=np.zeros((4, 6)),
    )  # fmt: skip
    hits = np.arange(6) < 4
    burst = SimpleNamespace(hits=hits, excess=np.where(hits, 0.07, 0.0))
    assert _may_wait_for_loaders(seen, burst) == may_wait


def test_pauses_of_all_hosts_name_no_host(job):
    everywhere = _pressed(range(16))
    report = job(layout=Layout(dp=16), hosts=4, iterations=40, gap_ms=everywhere).report()
    assert not [one for one in report.findings if len(one.ranks) > 1]


def test_a_host_beside_one_that_pauses_half_as_often_is_no_exception():
    """Six hosts of two ranks, twenty iterations: one pauses in ten, another in six, the others not
    at all; all others together have few, so that chance alone would not explain the ten.
    """
    names, host = [f"n{number}" for number in range(6)], np.repeat(np.arange(6), 2)
    over = np.full((12, 20), 0.001)
    over[0, 0:10:2], over[1, 1:11:2] = 0.2, 0.2
    assert _pausing_host(over, names, host, rate=0.01).name == "n0"
    over[2, 10:16:2], over[3, 11:17:2] = 0.15, 0.15
    assert _pausing_host(over, names, host, rate=0.01) is None


def test_ranks_that_pause_together_may_wait_for_one_of_them():
    lost = np.zeros((4, 9))
    lost[[0, 1, 2, 0], [1, 3, 5, 7]] = 0.2
    assert in_turn(lost)
    assert not in_turn(np.where(lost.any(axis=0), 0.2, lost))
    assert not in_turn(lost[[0, 0, 0, 0]] * np.array([[1.0], [0.2], [0.1], [0.3]]))  # one's own


def test_ranks_of_one_tp_group_that_pause_in_turn_do_not_wait_for_each_other(job):
    pressed = job(layout=Layout(dp=4, tp=4), hosts=4, iterations=20, gap_ms=_pressed(range(4, 8)))
    (finding,) = pressed.report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))


def test_slow_files_stop_both_ends_of_a_pipeline(job):
    """Ranks 8 to 11 pause in every second iteration, ranks 0 to 3 in every sixth."""
    own, first = _pressed(range(8, 12)), _pressed(range(4))

    def pauses(slot):
        return own(slot) + (first(slot) if slot.iteration % 6 == 3 else 0.0)

    report = job(layout=Layout(pp=3, dp=4), hosts=4, iterations=20, gap_ms=pauses).report()
    assert not [one for one in report.findings if one.owner is Owner.NODE]


def test_pauses_of_a_host_in_the_middle_of_the_pipeline_are_its_own(job):
    """A stage between the ends has layers only."""
    middle = job(layout=Layout(pp=3, dp=4), hosts=4, iterations=20, gap_ms=_pressed(range(4, 8)))
    assert [one.owner for one in middle.report().findings] == [Owner.NODE]


@pytest.mark.parametrize(
    ("share", "elsewhere", "is_sure"),
    [(0.3, 0, True), (0.05, 0, False), (0.3, 2, False)],
    ids=["much is lost", "little is lost", "others pause, too"],
)
def test_pauses_of_a_hosts_ranks_are_counted_where_they_cost_much(share, elsewhere, is_sure):
    """9 pauses of 7 ranks in 4 of 6 iterations: as iterations of a host they may be chance."""
    over = np.zeros((16, 6))
    over[[0, 1, 2, 3, 4, 5, 6, 1, 4], [0, 0, 1, 1, 2, 2, 3, 2, 3]] = share
    over[[9, 11][:elsewhere], 5] = share
    paused = _pausing_host(over, ["a", "b"], np.arange(16) // 8, rate=0.01)
    assert paused is not None and paused.name == "a" and paused.burst.is_sure == is_sure


def test_ranks_of_a_host_that_pause_in_one_go_are_one_pause():
    """All 8 ranks in iterations 3 and 4 of 6, and one rank elsewhere in two: chance."""
    over = np.zeros((32, 6))
    over[:8, 3:5] = 0.4
    over[[9, 17], [0, 1]] = 0.4
    names, host = ["a", "b", "c", "d"], np.arange(32) // 8
    paused = _pausing_host(over, names, host, rate=0.01)
    assert paused is not None and paused.name == "a" and not paused.burst.is_sure
    spread = over.copy()
    spread[:8] = 0.0
    spread[np.arange(8), np.arange(8) % 6] = spread[np.arange(8), (np.arange(8) + 2) % 6] = 0.4
    paused = _pausing_host(spread, names, host, rate=0.01)
    assert paused is not None and paused.name == "a" and paused.burst.is_sure


def test_pauses_that_meet_ranks_of_one_host_unequally_are_the_hosts(job):
    """Four iterations: one rank loses a tenth of what another does, all more than anybody else."""
    pauses_ms = {4: (0, 0, 16, 0), 5: (40, 0, 78, 12), 6: (0, 15, 200, 20), 7: (160, 30, 165, 0)}

    def pauses(slot):
        return float(pauses_ms.get(slot.rank, (0, 0, 0, 0))[slot.iteration - 3])

    stages = job(layout=Layout(tp=4, dp=2), hosts=4, iterations=4, gap_ms=pauses)
    (finding,) = stages.report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (4, 5, 6, 7))
    spared = stages.but(gap_ms=lambda slot: 0.0 if slot.rank == 4 else pauses(slot))
    assert not any(len(one.ranks) == 4 for one in spared.report().findings)


def test_a_rank_that_pauses_for_reasons_of_its_own_is_not_its_host():
    """Rank 3 has a collector's pauses; ranks 0 and 2 have paused once each, by chance."""
    hosts, names = np.repeat([0, 1], 4), ["n0", "n1"]
    over = np.zeros((8, 20))
    over[3, :12], over[0, 15], over[2, 17] = 0.3, 0.06, 0.06
    assert _pausing_host(over, names, hosts, rate=0.01) is None
    over[0, :6], over[2, 4:9] = 0.3, 0.3  # now this one, now that one
    paused = _pausing_host(over, names, hosts, rate=0.01)
    assert paused is not None and paused.name == "n0" and paused.burst.is_sure


@pytest.mark.parametrize(("pace", "is_of_stage"), [(1.0, False), (1.6, True)])
def test_a_stage_that_launches_more_has_gaps_of_its_own(job, pace, is_of_stage):
    def pauses(slot):
        return 60.0 if slot.iteration % 4 == slot.rank % 4 and slot.rank < 8 else 0.0

    seen = observe(job(layout=Layout(dp=8, pp=2), hosts=8, gap_ms=pauses).timeline())
    own = np.arange(16)[:, None] < 8
    launch_pace = np.where(own, np.log(pace), 0.0) + np.zeros(seen.busy_ns.shape)
    seen = replace(seen, launch_pace=launch_pace)
    paused = _paused_host(seen, np.zeros(16, dtype=bool), 0.01)
    assert paused is not None and (ALONE in _doubts(seen, paused)) == is_of_stage


@pytest.mark.parametrize(
    ("elsewhere", "named"), [(0.025, True), (0.2, False)], ids=["short ones", "as long"]
)
def test_pauses_of_a_host_are_told_from_shorter_ones_of_other_hosts(elsewhere, named):
    """In 7 of 10 iterations two or three ranks of a host lose 10 to 30 %; each other host has 4."""
    over, host = np.zeros((16, 10)), np.arange(16) // 4
    for iteration in range(7):
        over[[12 + iteration % 4, 12 + (iteration + 1) % 4], iteration] = (0.3, 0.1)
    for rank in range(12):
        over[rank, (rank + 5) % 10] = elsewhere
    paused = _pausing_host(over, ["a", "b", "c", "d"], host, rate=0.01)
    assert (paused is not None and paused.name == "d" and paused.burst.is_sure) == named


def test_ranks_that_pause_in_passes_of_their_own_do_not_pause_in_one_go():
    """Six of eight ranks pause in four iterations of six, in one pass or each in its own."""
    over = np.zeros((16, 6))
    for iteration in range(4):
        over[(np.arange(6) + iteration) % 8, iteration] = 0.2
    together = np.repeat(over > 0, 8, axis=1)
    apart = together & (np.arange(48) % 8 == np.arange(16)[:, None] % 8)
    host = np.arange(16) // 8
    for events, is_sure in ((together, False), (apart, True)):
        paused = _pausing_host(over, ["a", "b"], host, rate=0.01, apart=events)
        assert paused is not None and paused.burst.is_sure == is_sure


@pytest.mark.parametrize(("collecting", "named"), [(0.0, True), (0.5, False)])
def test_a_host_whose_ranks_wait_for_who_collects_garbage_does_not_pause(job, collecting, named):
    def pauses(slot):
        return 60.0 if slot.iteration % 4 == slot.rank % 4 and slot.rank < 8 else 0.0

    seen = observe(job(layout=Layout(dp=16), hosts=8, gap_ms=pauses).timeline())
    collected = np.zeros(seen.busy_ns.shape)
    collected[12] = collecting * seen.iteration_ns
    seen = replace(seen, lost_ns={**seen.lost_ns, Cause.GC: collected}, costs=None)
    paused = _paused_host(seen, np.zeros(16, dtype=bool), 0.01)
    assert (paused is not None) == named


@pytest.mark.parametrize(("known", "is_found"), [((5,), True), ((1,), False), ((), True)])
def test_a_host_may_wait_for_who_is_known_on_another_one(paused_passes, known, is_found):
    """What is known of its own ranks does not say why they pause."""
    seen = observe(paused_passes().timeline())
    paused = _paused_host(seen, np.isin(np.arange(8), known), 0.01)
    assert (paused is not None) == is_found
