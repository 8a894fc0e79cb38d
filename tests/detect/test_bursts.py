"""Pauses in few iterations are found by counting; where everybody has them, nobody is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, detect
from detect.causes.burst_owner import _others_pause
from detect.causes.bursts import _pauses
from detect.causes.hits import Burst, bursts
from detect.causes.one_of_two import pair_pause
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
