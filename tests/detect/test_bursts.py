"""Pauses in few iterations are found by counting; where everybody has them, nobody is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, detect
from detect.causes import burst_owner
from detect.causes.burst_owner import _others_pause
from detect.causes.bursts import (
    _beside_mates,
    _is_usual_there,
    _mirror_each_other,
    _pauses,
    _undecided,
)
from detect.causes.hits import FEW, Burst, bursts
from detect.causes.launching import WANDERS
from detect.causes.one_of_two import pair_pause
from detect.causes.paused_hosts import (
    NOISY,
    ROUTED,
    PausedHost,
    _is_of_one_stage,
    _may_wait_for_loaders,
    _pausing_host,
    in_turn,
)
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout


def test_pauses_in_three_of_ten_iterations_are_one_finding(job):
    def pauses(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, gap_ms=pauses).report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (5,))
    assert "in 3 of 10 iterations" in finding.headline
    assert finding.episodes == ((4, 4), (7, 7), (11, 11))


def test_pauses_of_one_rank_may_be_its_collectors_where_these_were_not_traced(job):
    def pauses(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    made = job(layout=Layout(dp=16), iterations=10, gap_ms=pauses)
    (finding,) = detect(made.original_timeline()).findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.GC, Owner.UNDECIDED, (5,))
    assert any("garbage collection was not traced" in one for one in finding.evidence)


@pytest.mark.parametrize(
    ("rank", "hits", "pause_ms", "owner"),
    [
        (0, (4, 7, 11), 60.0, Owner.NODE),
        (0, (4, 7, 10), 60.0, Owner.UNDECIDED),  # every third iteration
        (0, (4, 7, 11), 600.0, Owner.UNDECIDED),  # more than twice what an iteration takes
        (5, (4, 7, 10), 600.0, Owner.NODE),
    ],
)
def test_what_stops_the_first_rank_for_long_or_regularly_may_be_a_checkpoint(
    job, rank, hits, pause_ms, owner
):
    def pauses(slot):
        return pause_ms if slot.rank == rank and slot.iteration in hits else 0.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, gap_ms=pauses).report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, owner, (rank,))
    assert any("writes checkpoints" in one for one in finding.evidence) == (owner != Owner.NODE)


@pytest.mark.parametrize(("elsewhere", "owner"), [(0, Owner.NODE), (2, Owner.UNDECIDED)])
def test_pauses_that_others_have_as_well_if_less_often_may_be_noise(job, elsewhere, owner):
    """Rank 5 stands still in 9 of 30 iterations, each other rank in two of its own, or in none."""

    def pauses(slot):
        if slot.rank == 5:
            return 60.0 if slot.iteration % 10 in (3, 6, 8) else 0.0
        return 60.0 if (slot.iteration * 7 + slot.rank * 3) % 30 < elsewhere else 0.0

    findings = job(layout=Layout(dp=16), iterations=30, gap_ms=pauses).report().findings
    (finding,) = [one for one in findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert any("comes to everybody" in one for one in finding.evidence) == bool(elsewhere)


@pytest.mark.parametrize(("rank", "owner"), [(0, Owner.UNDECIDED), (5, Owner.NODE)])
def test_of_a_profile_nobody_knows_what_the_first_rank_stops_for(job, rank, owner):
    def pauses(slot):
        return 60.0 if slot.rank == rank and slot.iteration in (4, 7, 11) else 0.0

    made = job(layout=Layout(dp=16), iterations=10, gap_ms=pauses)
    told = replace(observe(made.timeline()), tells_passes=False)
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, owner, (rank,))


def test_windows_that_repeat_have_a_period_of_their_own(job):
    """The second iteration of each window of three is slow, and there is one in ten iterations."""

    def pauses(slot):
        return 60.0 if slot.rank == 0 and slot.iteration in (4, 7, 10) else 0.0

    seen = observe(job(layout=Layout(dp=16), iterations=10, gap_ms=pauses).timeline())
    repeated = replace(seen, iterations=np.array([5, 6, 7, 15, 16, 17, 25, 26, 27, 35]))
    (finding,) = judge(repeated, DetectorSettings()).findings
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.HOST, Owner.NODE, (0,))


def test_collections_of_one_rank_are_the_jobs(job):
    def collects(slot):
        return 60.0 if slot.rank == 5 and slot.iteration in (4, 7, 11) else 0.0

    findings = job(layout=Layout(dp=16), iterations=10, gc_ms=collects).report().findings
    assert {(one.cause, one.owner, one.ranks) for one in findings} == {(Cause.GC, Owner.JOB, (5,))}


@pytest.mark.parametrize("is_host_open", [False, True])
def test_a_rank_collects_for_itself_whatever_its_host_may_be(job, is_host_open):
    """Of its host too little is known for a name: its ranks may pause in turn."""
    seen = observe(job(layout=Layout(dp=16), iterations=13).timeline())
    collecting = np.zeros_like(seen.busy_ns)
    collecting[7, [3, 4, 8, 9, 12]] = 60e6
    seen = replace(seen, lost_ns={**seen.lost_ns, Cause.GC: collecting})
    nobody, open_rows = np.zeros(16, dtype=bool), (np.arange(16) < 8) & is_host_open
    inquiry = SimpleNamespace(
        seen=seen,
        settings=DetectorSettings(),
        slow=nobody,
        blamed=nobody,
        named=open_rows,
        found=(),
    )
    (burst,) = _pauses(inquiry)
    assert burst.row == 7 and burst.is_sure


def test_few_throttled_passes_are_one_finding(job):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 5 and hit else 1.0

    (finding,) = job(layout=Layout(dp=16), iterations=10, work=throttled).report().findings
    assert (finding.cause, finding.ranks) == (Cause.COMPUTE, (5,))
    assert 1.02 < finding.slowdown < 1.06


class _Cost:
    """A replay that always says the same."""

    def __init__(self, ratio):
        self.ratio = lambda *_: ratio


@pytest.mark.parametrize(("ratio", "owner"), [(1.0, Owner.UNDECIDED), (1.02, Owner.NODE)])
def test_throttling_that_nobody_waits_for_may_be_waiting(job, ratio, owner):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 5 and hit else 1.0

    seen = observe(job(layout=Layout(dp=16), iterations=10, work=throttled).timeline())
    (finding,) = judge(replace(seen, costs=_Cost(ratio)), DetectorSettings()).findings
    assert (finding.cause, finding.ranks, finding.owner) == (Cause.COMPUTE, (5,), owner)


def test_which_rank_of_a_group_pauses_is_not_told_where_its_communication_is_hidden(job):
    def pauses(slot):
        return 60.0 if slot.rank in (4, 5) and slot.iteration in (4, 7, 11) else 0.0

    seen = observe(job(layout=Layout(tp=2, dp=8), iterations=10, gap_ms=pauses).timeline())
    findings = judge(replace(seen, splits_tensor_groups=False), DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in findings] == [((4, 5), Owner.UNDECIDED)]


def test_pauses_that_everybody_has_name_nobody():
    value = np.zeros((16, 10))
    random = np.random.default_rng(1)
    value[random.random((16, 10)) < 0.2] = 0.2
    assert bursts(value, np.zeros(16, dtype=bool), rate=0.01) == []


def test_rate_of_the_others_decides():
    value = np.zeros((16, 10))
    value[5, [1, 4, 8]] = 0.2
    nobody = np.zeros(16, dtype=bool)
    (found,) = bursts(value, nobody, rate=0.01)
    assert found.row == 5 and found.other_hits == 0 and found.q_value < 1e-3
    value[:, 2] += 0.2  # everybody at once is no excess
    assert len(bursts(value, nobody, rate=0.01)) == 1
    assert bursts(value, np.arange(16) == 5, rate=0.01) == []


def test_a_row_that_always_loses_more_has_no_bursts():
    value = 0.002 * np.random.default_rng(3).standard_normal((16, 20))
    value[5] += 0.03
    nobody = np.zeros(16, dtype=bool)
    assert bursts(value, nobody, rate=0.01) == []
    value[5, ::3] += 0.1
    (found,) = bursts(value, nobody, rate=0.01)
    assert found.row == 5 and found.hits.tolist() == [slot % 3 == 0 for slot in range(20)]


def test_short_throttling_is_found_by_what_its_hits_show(job):
    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return 1.25 if slot.rank == 5 and hit else 1.0

    findings = job(layout=Layout(dp=16), iterations=14, work=throttled).report().findings
    assert [(one.cause, one.ranks) for one in findings] == [(Cause.COMPUTE, (5,))]


def test_passes_slow_now_and_then_on_a_device_that_waits_for_launches_may_show_its_host(job):
    """Half of them are launched just in time on all ranks; fewer on none."""

    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return 1.25 if slot.rank == 5 and hit else 1.0

    seen = observe(job(layout=Layout(dp=16), iterations=14, work=throttled).timeline())
    for share, owner in ((0.3, Owner.NODE), (0.6, Owner.UNDECIDED)):
        told = replace(seen, starved_share=np.full(seen.busy_ns.shape, share))
        (finding,) = judge(told, DetectorSettings()).findings
        assert (finding.ranks, finding.owner) == ((5,), owner)


def test_a_device_whose_host_launches_late_now_and_then_names_no_host(job):
    """Load that comes and goes, on any host, looks like this."""
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        return 1.3 if slot.rank == 5 and hits[slot.iteration - 3] else 1.0

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    starved = np.full(seen.busy_ns.shape, 0.05)
    starved[5] = 0.9
    told = replace(seen, starved_share=starved)
    (finding,) = [one for one in judge(told, DetectorSettings()).findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.HOST, Owner.UNDECIDED)
    assert any(WANDERS in one for one in finding.evidence)


@pytest.mark.parametrize(("ep", "owner"), [(1, Owner.NODE), (4, Owner.UNDECIDED)])
def test_a_late_host_now_and_then_is_not_told_from_busy_experts(job, monkeypatch, ep, owner):
    """The device is starved in all iterations, and slow in some: by its experts?"""
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True
    monkeypatch.setattr(burst_owner, "starvation", lambda *_: (Owner.NODE, "launched just in time"))

    def work(slot):
        is_hit = slot.rank == 5 and hits[slot.iteration - 3]
        return 1.3 if is_hit and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=8, ep=ep), work=work).report()
    (finding,) = [one for one in report.findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.HOST, owner)
    assert (burst_owner.EXPERTS in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize("idle_share", [0.8, 0.2])
def test_who_stands_idle_in_its_slow_passes_may_be_launched_late(job, idle_share):
    """Passes 1.3 times as long in five of twenty iterations, in which the device stands idle: it is
    the node, by its device or by its host.
    """
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        return 1.3 if slot.rank == 5 and hits[slot.iteration - 3] else 1.0

    seen = observe(job(layout=Layout(dp=8), work=work).timeline())
    longer_ns = seen.busy_ns[5][hits].mean() * 0.3 / 1.3
    lost = np.zeros((8, 20))
    lost[:, hits] = idle_share * longer_ns  # of one rank alone it would be a pause
    told = replace(seen, lost_ns={**seen.lost_ns, Cause.HOST: lost})
    (finding,) = [one for one in judge(told, DetectorSettings()).findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, Owner.NODE)
    assert any("had nothing to do" in one for one in finding.evidence) == (idle_share > 0.5)


@pytest.mark.parametrize(
    ("then", "otherwise", "of_peers", "owner"),
    [
        (0.4, 0.0, 0.0, Owner.UNDECIDED),
        (0.4, 0.4, 0.0, Owner.NODE),
        (0.4, 0.0, 0.4, Owner.NODE),
        (0.03, 0.0, 0.0, Owner.NODE),
    ],
    ids=["then only", "as ever", "as its peers'", "hardly"],
)
def test_passes_that_were_launched_late_now_and_then_are_not_surely_the_devices(
    job, then, otherwise, of_peers, owner
):
    hits = np.zeros(20, dtype=bool)
    hits[[2, 5, 9, 14, 18]] = True

    def work(slot):
        hit = hits[slot.iteration - 3] and slot.microbatch < 4
        return 1.3 if slot.rank == 5 and hit and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=Layout(dp=16), noise=0.004, work=work).timeline())
    starved = np.zeros(seen.busy_ns.shape)
    starved[:, hits] = of_peers
    starved[5] = np.where(hits, then, otherwise)
    report = judge(replace(seen, starved_share=starved), DetectorSettings())
    (finding,) = [one for one in report.findings if one.ranks == (5,)]
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, owner)
    assert (burst_owner.LATE_THEN in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(("usual", "is_usual"), [(0.2, False), (0.5, True)])
def test_a_row_with_slow_passes_in_all_iterations_has_them_more_often_than_its_others(
    usual, is_usual
):
    """By its iterations it has hits in one of ten alone, as its level there is already high."""
    hits = np.zeros((4, 10), dtype=bool)
    hits[1:, : int(10 * usual)] = True
    hits[0, 0] = True
    burst = Burst(
        row=0, hits=np.ones(10, dtype=bool), excess=np.full(10, 0.05), q_value=0.0,
        others=np.arange(4) > 0, other_hits=0,
    )  # fmt: skip
    assert _is_usual_there(hits, np.ones(4, dtype=bool), burst) == is_usual


def test_experts_may_get_more_tokens_now_and_then(job):
    def busy(slot):
        is_hit = slot.rank == 5 and slot.iteration in (4, 7, 11)
        return 1.3 if is_hit and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=Layout(dp=16, ep=2), iterations=10, work=busy).timeline())
    (finding,) = judge(seen, DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.UNDECIDED)
    attention = np.full(seen.busy_ns.shape, 1e7)  # no routing of tokens lengthens it
    (finding,) = judge(replace(seen, attention_ns=attention), DetectorSettings()).findings
    assert finding.owner == Owner.UNDECIDED
    attention[5, np.isin(seen.iterations, (4, 7, 11))] *= 1.3
    (finding,) = judge(replace(seen, attention_ns=attention), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.NODE)


@pytest.mark.parametrize(
    ("mate", "owner"),
    [
        ((1.0, 1.0), Owner.NODE),
        ((1.0, 1.3), Owner.NODE),
        ((1.2, 1.2), Owner.UNDECIDED),
    ],
    ids=["as quick", "waits in backward passes", "slow, too"],
)
def test_mates_on_the_same_microbatches_tell_a_throttled_device_from_long_ones(job, mate, owner):
    """Lengths vary by microbatch and replica; now and then passes of rank 2 take 1.3 times as long,
    forward passes of its TP mate 3, with the same documents, as long as ever.
    """
    random = np.random.default_rng(5)
    length = random.lognormal(0.0, 0.08, (24, 8, 4))

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        hit = slot.iteration in (4, 7, 11, 13, 16, 18) and slot.rank in (2, 3)
        by_rank = {2: 1.3, 3: mate[slot.phase == "backward"]} if hit else {}
        return by_rank.get(slot.rank, 1.0) * length[slot.iteration, slot.microbatch, slot.rank // 2]

    findings = job(layout=Layout(tp=2, dp=4), work=work).report().findings
    found = {one.ranks: one.owner for one in findings if one.cause == Cause.COMPUTE}
    assert found.get((2,)) == owner


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


@pytest.mark.parametrize(
    ("at_once", "collects", "cause"),
    [(True, False, Cause.GC), (False, False, Cause.COMPUTE), (True, True, Cause.HOST)],
    ids=["stands still", "slow for an iteration", "collections were traced"],
)
def test_one_that_stands_still_in_too_few_passes_may_collect_garbage(job, at_once, collects, cause):
    """In one iteration of four a pass of rank 5 takes 25 times as long, or all take 2.5 times."""

    def work(slot):
        if slot.rank != 5 or slot.iteration != 3 or slot.name == "optimizer":
            return 1.0
        is_hit = slot.microbatch == 2 and slot.phase == "forward"
        return (25.0 if is_hit else 1.0) if at_once else 2.5

    seen = observe(job(layout=Layout(dp=8), iterations=6, work=work, noise=0.005).timeline())
    lost_ns = dict(seen.lost_ns)
    lost_ns.pop(Cause.GC, None)
    if collects:
        lost_ns[Cause.GC] = np.zeros_like(seen.busy_ns)
    found = judge(replace(seen, lost_ns=lost_ns), DetectorSettings()).findings
    assert [(one.ranks, one.cause, one.owner) for one in found] == [((5,), cause, Owner.UNDECIDED)]


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
        lost=lambda cause: lost_ns, iteration_ns=np.full(6, 1e8), hidden_axes=hidden_axes
    )
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


def test_bursts_of_most_ranks_of_a_stage_name_no_node(job):
    def throttled(slot):
        return 1.3 if slot.stage == 0 and slot.rank != 7 and slot.iteration in (4, 9, 15) else 1.0

    report = job(layout=Layout(pp=2, dp=8), iterations=18, work=throttled).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE]


def test_a_row_is_not_quiet_while_its_peers_have_bursts():
    """Some have bursts in most iterations and raise the median, below which the others fall."""
    random = np.random.default_rng(2)
    value = 0.002 * random.standard_normal((16, 30))
    hits = random.random(30) < 0.6
    for row in range(4, 8):
        value[row, hits] += random.uniform(0.15, 0.4, int(hits.sum()))
    value[:4, hits] -= 0.1  # as against a median that the bursts raise
    known = np.arange(16) == 6
    assert sorted(one.row for one in bursts(value, known, 0.01)) == [4, 5, 7]


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


def test_which_of_two_mates_waits_for_the_other_is_not_told(job):
    """Nobody recorded the reductions in which one of ranks 2 and 3, a TP group, waits."""

    def throttled(slot):
        hit = slot.iteration in (4, 7, 11, 13) and slot.microbatch in (2, 5)
        return {3: 1.5, 2: 1.3}.get(slot.rank, 1.0) if hit else 1.0

    findings = job(layout=Layout(tp=2, dp=8), iterations=14, work=throttled).report().findings
    assert {one.ranks: one.owner for one in findings} == {
        (3,): Owner.UNDECIDED,
        (2,): Owner.UNDECIDED,
    }


@pytest.mark.parametrize(("slow_rank", "owner"), [(3, Owner.UNDECIDED), (9, Owner.NODE)])
def test_pauses_beside_a_slow_mate_name_no_host(job, slow, slow_rank, owner):
    """Rank 2 stands still in three iterations; it may wait for its mate 3, and not for rank 9."""
    made = job(
        layout=Layout(tp=2, dp=8),
        iterations=20,
        work=slow(slow_rank, 1.3),
        gap_ms=lambda slot: 400.0 if slot.rank == 2 and slot.iteration in (4, 9, 14) else 0.0,
    )
    found = {one.ranks: one for one in made.report().findings if one.cause is Cause.HOST}
    assert found[(2,)].owner is owner


def test_a_mate_that_is_slow_for_long_may_be_who_is_waited_for(job):
    """Rank 3 is 1.2 times slower in the second half, in some of which its mate has bursts."""

    def slowed(slot):
        if slot.rank == 3 and slot.iteration >= 10:
            return 1.2
        hit = slot.iteration in (11, 13, 14, 16) and slot.microbatch in (2, 5)
        return 1.5 if slot.rank == 2 and hit else 1.0

    findings = job(layout=Layout(tp=2, dp=8), iterations=14, work=slowed).report().findings
    assert {one.ranks: one.owner for one in findings}[2,] is Owner.UNDECIDED


@pytest.mark.parametrize(
    ("planted", "cause", "owner"),
    [
        ("gc_ms", Cause.GC, Owner.UNDECIDED),
        ("gap_ms", Cause.HOST, Owner.UNDECIDED),
        ("work", Cause.COMPUTE, Owner.UNDECIDED),
    ],
)
def test_one_heavy_pause_in_a_short_window_is_a_finding_of_nobodys(job, planted, cause, owner):
    def once(slot):
        hit = slot.rank == 5 and slot.iteration == 5
        return (4.0 if hit else 1.0) if planted == "work" else (200.0 if hit else 0.0)

    short = job(layout=Layout(dp=8), iterations=4)
    (finding,) = short.but(**{planted: once}).report().findings
    assert (finding.cause, finding.owner, finding.ranks) == (cause, owner, (5,))
    assert "so few iterations may be chance" in " ".join(finding.evidence)
    assert short.report().findings == ()
    if planted != "gc_ms":  # what the job does itself has no floor
        unasked = short.but(**{planted: once}).report(DetectorSettings(min_slowdown=3.0))
        assert unasked.findings == ()


def test_a_mate_that_recorded_nothing_may_be_who_is_waited_for(job):
    """Rank 3 is throttled; then its TP mate's file lacks the same iterations."""
    hit = (4, 7, 11, 13)

    def throttled(slot):
        return 1.5 if slot.rank == 3 and slot.iteration in hit and slot.microbatch in (2, 5) else 1

    seen = observe(job(layout=Layout(tp=2, dp=8), iterations=14, work=throttled).timeline())
    log_ns = seen.work.log_ns.copy()
    log_ns[2, np.isin(seen.iterations, hit)] = np.nan
    lacking = replace(seen, work=replace(seen.work, log_ns=log_ns))
    owners = [judge(one, DetectorSettings()).findings[0].owner for one in (seen, lacking)]
    assert owners == [Owner.NODE, Owner.UNDECIDED]


def test_a_second_speed_of_one_of_two_is_no_noise(job):
    """Two passes of every third iteration 1.2 times slower; then by anything from 1.1 to 1.5, and
    the other rank's once as well.
    """
    random = np.random.default_rng(5)
    sizes = 1.0 + random.uniform(0.1, 0.5, (64, 8))

    def at_times(slot, size):
        is_hit = slot.rank == 1 and slot.iteration % 3 == 0 and slot.microbatch in (2, 5)
        return size if is_hit and slot.name != "optimizer" else 1.0

    pair = job(layout=Layout(dp=2), iterations=30, noise=0.005)
    (finding,) = pair.but(work=lambda slot: at_times(slot, 1.2)).report().findings
    assert (finding.cause, finding.ranks, finding.owner) == (Cause.COMPUTE, (1,), Owner.NODE)

    def uneven(slot):
        is_others = slot.rank == 0 and slot.iteration == 16 and slot.microbatch == 4
        return 1.3 if is_others else at_times(slot, sizes[slot.iteration, slot.microbatch])

    assert not [one for one in pair.but(work=uneven).report().findings if one.owner == Owner.NODE]


def test_mates_that_wait_are_no_rate_of_sound_rows():
    """Row 1 waits for row 0 in its bursts; two more of row 9 would be too many beside them."""
    value = np.zeros((16, 14))
    value[0, [1, 4, 8, 11]] = 0.1
    value[1, [1, 4, 8]] = 0.06
    value[9, [2, 12]] = 0.05
    nobody, group = np.zeros(16, dtype=bool), np.arange(16) // 2
    found = bursts(value, nobody, rate=0.01, group=group)
    assert [one.row for one in found if one.row == 0] == [0] and found[0].other_hits == 2
    assert bursts(value, nobody, rate=0.01) == []


@pytest.mark.parametrize(
    ("pause_ms", "inside", "owner"),
    [(13.0, True, Owner.UNDECIDED), (40.0, True, Owner.NODE), (13.0, False, Owner.NODE)],
)
def test_short_pauses_inside_uneven_passes_are_undecided(job, pause_ms, inside, owner):
    """Iterations of 280 ms, in which microbatches of a replica take up to 1.6 times as long."""
    lengths = np.exp(0.2 * np.random.default_rng(4).standard_normal((16, 64, 8)))

    def uneven(slot):
        if slot.name == "optimizer":
            return 1.0
        return lengths[slot.replica, slot.iteration, slot.microbatch]

    seen = observe(job(layout=Layout(dp=16), iterations=12, work=uneven).timeline())
    lost_ns = np.zeros((16, 12))
    lost_ns[5, [1, 5, 10]] = pause_ms * 1e6
    seen = replace(
        seen, lost_ns={**seen.lost_ns, Cause.HOST: lost_ns}, costs=None,
        stalled_ns=lost_ns if inside else np.zeros_like(lost_ns),
    )  # fmt: skip
    found = judge(seen, DetectorSettings()).findings
    assert [(one.ranks, one.owner) for one in found if one.cause == Cause.HOST] == [((5,), owner)]


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


@pytest.mark.parametrize(
    ("others_wait", "is_shared"),
    [((4, 5, 6, 7), True), ((1, 2, 3), False), ((4,), False)],
    ids=["on another host", "on the same host", "rarely"],
)
def test_loaders_of_other_hosts_that_wait_as_long_share_the_storage(job, others_wait, is_shared):
    """Four hosts of four ranks; those of the first two stages load."""
    seen = observe(job(layout=Layout(dp=4, pp=4), hosts=4, iterations=10).timeline())
    loading = np.full((16, 10), np.nan)
    loading[:8], hits = 1e6, np.arange(10) % 3 == 0
    loading[0, hits] = 60e6
    loading[list(others_wait), 4] = 40e6
    seen = replace(seen, lost_ns={**seen.lost_ns, Cause.LOADER: loading})
    burst = Burst(
        row=0, hits=hits, excess=np.where(hits, 0.1, 0.0), q_value=1e-4,
        others=np.arange(16) != 0, other_hits=0,
    )  # fmt: skip
    assert _others_pause(seen, burst) == is_shared


@pytest.mark.parametrize("forward", [1.0, 1.06])
def test_a_loader_that_pauses_is_found_whatever_caches_do_to_the_pass_behind_it(job, forward):
    """A forward pass alone that is a little longer is nobody's fault, and hides nobody's."""

    def cold(slot):
        return forward if slot.rank == 1 and slot.name == "forward" else 1.0

    run = job(
        layout=Layout(tp=2, dp=2, pp=2), iterations=40, work=cold,
        loading_ms=lambda slot: 90.0 if slot.rank == 1 and slot.iteration % 3 == 0 else 1.0,
    )  # fmt: skip
    (found,) = run.report().findings
    assert (found.ranks, found.cause, found.owner) == ((1,), Cause.LOADER, Owner.NODE)


def _pausing_pair(job, ranks_of, waits=1.0, *, slower=1.0, axis="tp"):
    """Observe two ranks of which those of `ranks_of(iteration)` stand still for 60 ms, while the
    other one waits for that long, times `waits`; their passes take `slower` times as long then.
    """

    def work(slot):
        is_pass = slot.name != "optimizer"
        return slower if is_pass and slot.rank in ranks_of(slot.iteration) else 1.0

    def pauses(slot):
        return 60.0 if slot.rank in ranks_of(slot.iteration) else 8.0

    seen = observe(job(layout=Layout(**{axis: 2}), gap_ms=pauses, work=work).timeline())
    waiting = np.full((2, 20), 2e6)
    for place, iteration in enumerate(seen.iterations.tolist()):
        for rank in ranks_of(iteration):
            waiting[1 - rank, place] += waits * 52e6
    return replace(seen, waiting_ns=waiting, split_wait_ns=None)


@pytest.mark.parametrize(
    ("ranks_of", "waits", "owner"),
    [
        (lambda iteration: (1,) if iteration % 5 < 2 else (), 1.0, Owner.NODE),
        (lambda iteration: (1,) if iteration % 5 < 2 else (), 0.0, None),  # nobody waits for it
        (lambda iteration: (iteration % 5,) if iteration % 5 < 2 else (), 1.0, None),  # by turns
        (lambda iteration: (0, 1) if iteration % 5 < 2 else (), 1.0, None),  # together
        (lambda iteration: (1,) if iteration in (5, 9, 14) else (), 1.0, Owner.UNDECIDED),
        (lambda iteration: (1,) if iteration in (5, 9) else (), 1.0, None),
    ],
    ids=["one", "unawaited", "by turns", "together", "three times", "twice"],
)
def test_of_two_ranks_the_one_that_pauses_is_the_one_for_whom_the_other_waits(
    job, ranks_of, waits, owner
):
    seen = _pausing_pair(job, ranks_of, waits)
    found = pair_pause(seen, 0.01)
    assert (found is not None) == (owner is not None)
    if found is not None:
        assert (found.row, found.is_sure) == (1, owner is Owner.NODE)
        findings = judge(seen, DetectorSettings()).findings
        assert [(one.cause, one.owner, one.ranks) for one in findings] == [
            (Cause.HOST, owner, (1,))
        ]


@pytest.mark.parametrize(("slower", "cause"), [(1.0, Cause.HOST), (1.5, Cause.COMPUTE)])
def test_too_few_pauses_of_one_of_two_do_not_hide_a_second_speed(job, slower, cause):
    often = (5, 6, 9, 12, 14, 17)
    seen = _pausing_pair(job, lambda it: (1,) if it in often else (), slower=slower, axis="dp")
    assert not pair_pause(seen, 0.01).is_sure
    (finding,) = judge(replace(seen, has_even_data=True), DetectorSettings()).findings
    is_node = finding.owner is Owner.NODE
    assert (finding.cause, finding.ranks, is_node) == (cause, (1,), slower > 1.0)


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ({}, (4,)),
        ({5: (3, 9), 6: (14,)}, (4, 5, 6, 7)),
        ({5: (3, 9), 6: (14,), 12: (7,)}, ()),
        ({5: (9,)}, (4,)),
    ],
    ids=["nobody", "as often as it", "elsewhere as well", "once"],
)
def test_loaders_of_neighbours_that_take_as_long_speak_for_their_host(job, others, ranks):
    """Rank 4 waits 60 ms in 5 of 20 iterations; others of its host wait as long in some."""

    def loading(slot):
        hits = (4, 8, 10, 15, 19) if slot.rank == 4 else others.get(slot.rank, ())
        return 60.0 if slot.iteration in hits and slot.microbatch == 0 else 0.5

    report = job(layout=Layout(dp=16), hosts=4, loading_ms=loading).report()
    found = [one for one in report.findings if one.cause is Cause.LOADER]
    assert [one.ranks for one in found if one.owner is Owner.NODE] == ([ranks] if ranks else [])
    doubts = [words for one in found for words in one.evidence if "ranks of its host" in words]
    assert bool(doubts) == (not ranks)


@pytest.mark.parametrize(
    ("ranks", "named"), [((4,), {4}), ((4, 9), set())], ids=["one host", "two hosts"]
)
def test_loaders_of_several_hosts_that_pause_are_rather_their_storage(job, ranks, named):
    pauses = ((4, 8, 10, 15, 19), (5, 9, 12, 16, 20))
    hits = dict(zip(ranks, pauses, strict=False))

    def loading(slot):
        is_hit = slot.iteration in hits.get(slot.rank, ()) and slot.microbatch == 0
        return 60.0 if is_hit else 0.5

    report = job(layout=Layout(dp=16), hosts=8, loading_ms=loading).report()
    blamed = {rank for one in report.findings if one.owner is Owner.NODE for rank in one.ranks}
    assert blamed & set(ranks) == named


@pytest.mark.parametrize(("dp", "is_judged"), [(2, False), (3, True)])
def test_one_of_a_pair_that_was_left_undecided_is_nobodys_peer_now_and_then(job, dp, is_judged):
    """Its only peer would seem slow in the iterations in which it is not."""
    made = job(layout=Layout(pp=2, dp=dp), work=lambda slot: 1.2 if slot.rank == 0 else 1.0)
    (finding,) = made.report().findings
    open_one = replace(finding, owner=Owner.UNDECIDED)
    seen = observe(made.timeline())
    left = _undecided(seen, [open_one]) & ~_mirror_each_other(seen)
    assert left.tolist() == [is_judged, *[False] * (2 * dp - 1)]


@pytest.mark.parametrize(
    ("starved", "owner"), [(0.9, Owner.UNDECIDED), (0.3, Owner.NODE)], ids=["host-bound", "fed"]
)
def test_where_all_devices_wait_for_their_hosts_an_idle_one_is_no_slow_node(
    monkeypatch, starved, owner
):
    """A device stands idle in its bursts: in a host-bound job some host is always the latest."""
    monkeypatch.setattr(burst_owner, "starvation", lambda *_: None)
    monkeypatch.setattr(burst_owner, "_doubt", lambda *_: "")
    monkeypatch.setattr(burst_owner, "_stands_idle", lambda *_: True)
    seen = SimpleNamespace(lost_ns={Cause.GC: None}, starved_share=np.full((4, 9), starved))
    burst = SimpleNamespace(row=1, hits=np.arange(9) < 4, is_stops=False)
    cause, blamed, _ = burst_owner.cause_and_owner(seen, burst, Cause.COMPUTE)
    assert (cause, blamed) == (Cause.COMPUTE, owner)


@pytest.mark.parametrize(
    ("losses", "outstanding"),
    [((0.3, 0.1), [True, False]), ((0.1, 0.1), [False, False]), ((0.3, 0.0), [True])],
    ids=["the one that loses more", "neither of two alike", "alone"],
)
def test_of_two_mates_with_bursts_the_one_that_loses_more_stands_out(job, losses, outstanding):
    seen = observe(job(layout=Layout(tp=2, dp=2)).timeline())
    hits = np.arange(len(seen.iterations)) == 2
    found = [
        Burst(
            row=row, hits=hits, excess=np.where(hits, loss, 0.0), q_value=1e-6,
            others=np.ones(4, dtype=bool), other_hits=0, stands_out=True,
        )
        for row, loss in enumerate(losses)
        if loss
    ]  # fmt: skip
    assert [one.stands_out for one in _beside_mates(seen, found)] == outstanding
