"""Loaders: ranks that wait for their data, storage that all share, the only rank that loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner, Verdict
from detect.causes.far_loaders import search_far_loaders
from detect.causes.losses import OF_TWO
from detect.causes.searches import (
    Loss,
    _Lost,
    _without_overlap,
    is_beyond_all,
    load_as_long,
    others_load_as_long,
)
from detect.detector import _inquiry, judge
from detect.observe.extract import observe
from detect.stats.noise import Usual
from detect.stats.search import SearchTask
from megascan.topology import Layout


def test_slow_loader_is_not_slow_compute(job):
    report = job(
        layout=Layout(dp=4), loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0
    ).report()
    assert [(one.ranks, one.cause, one.owner) for one in report.findings] == [
        ((1,), Cause.LOADER, Owner.NODE)
    ]
    assert report.findings[0].slowdown == pytest.approx(6.0, rel=0.05)


WILD_MS = (60.5, 59.8, 69.1, 90.4, 98.6, 51.5, 116.1, 67.8)
"""What a device lost to its loader in 8 iterations of 1.02 s, as one simulated job had it."""


def rows_apart(time_ns, step_ns, num_tests, *, stands_out=True):
    """Return suspects among loaders of one group that lose these times, (row, iteration)."""
    num_rows = len(time_ns)
    loss = Loss(
        cause=Cause.LOADER, name="", groups=[np.arange(num_rows)], predicate="",
        advice=lambda suspect, owner: (), stands_out=stands_out,
    )  # fmt: skip
    task = SearchTask(
        compare=lambda excluded: time_ns, num_rows=num_rows, num_tests=num_tests, floor=0.01,
        usual=Usual(floor=0.0, spread=0.0), forbidden=np.zeros(num_rows, dtype=bool),
    )  # fmt: skip
    lost = _Lost(loss, time_ns, time_ns)
    return list(_without_overlap(lost, task, DetectorSettings(), step_ns))


@pytest.mark.parametrize(
    ("lost_ms", "is_told"), [(WILD_MS, True), (WILD_MS[:4], False), ((0.9, *WILD_MS[1:]), False)]
)
def test_of_two_loaders_the_one_that_is_later_in_every_iteration(lost_ms, is_told):
    """It varies by far more than the other one: that all its values are the larger ones tells."""
    time_ns = 1e6 * np.array([np.linspace(0.8, 1.2, len(lost_ms)), lost_ms])
    assert [one.row for one in rows_apart(time_ns, 1.02e9, 24)] == [1] * is_told


def test_only_pairs_are_compared_by_overlap_where_others_show_the_noise():
    """A host that all use may be late in every iteration, a little: of several the level tells."""
    pair_ns = 1e6 * np.array([np.linspace(0.8, 1.2, len(WILD_MS)), WILD_MS])
    three_ns = np.concatenate([pair_ns, pair_ns[:1] + 1e5])
    of_pair, of_three = (
        rows_apart(time_ns, 1.02e9, 24, stands_out=False) for time_ns in (pair_ns, three_ns)
    )
    assert [one.row for one in of_pair] == [1]
    assert not of_three


@pytest.mark.parametrize(("own", "is_told"), [(10, True), (7, True), (5, False)])
def test_of_many_loaders_the_one_that_is_later_than_any_other_ever_is(own, is_told):
    """80 to 345 ms of steps of 260, so that each by itself may be chance; 31 others take 1 ms."""
    random = np.random.default_rng(3)
    time_ns = 1e6 * random.uniform(0.5, 1.5, (32, 10))
    time_ns[28, :own] = 1e6 * random.uniform(80.0, 345.0, own)
    found = rows_apart(time_ns, 2.6e8, 200)
    assert [one.row for one in found] == [28] * is_told
    assert all(one.course.active.all() for one in found)


def test_a_loader_that_is_always_late_by_something_else_is_so_throughout(job):
    late_ms = np.random.default_rng(7).uniform(2.0, 40.0, 64)

    def loads(slot):
        return late_ms[slot.iteration] if slot.rank == 3 else 0.1

    report = job(layout=Layout(dp=8), device="cuda", iterations=10, loading_ms=loads).report()
    (finding,) = [one for one in report.findings if one.cause == Cause.LOADER]
    assert finding.ranks == (3,) and finding.owner == Owner.NODE
    assert finding.episodes == ((3, 12),)


def test_loading_alike_is_silent(job):
    report = job(layout=Layout(dp=4), loading_ms=lambda slot: 6.0).report()
    assert report.verdict == Verdict.HEALTHY


@pytest.mark.parametrize(("other_end_ms", "owner"), [(30.0, Owner.UNDECIDED), (4.0, Owner.NODE)])
def test_a_loader_of_a_stage_is_told_by_the_other_end_of_the_pipeline(job, other_end_ms, owner):
    """What both load from is not the reason where the other end needs a fifteenth of the time."""

    def slow(slot):
        return 60.0 if slot.rank == 0 else other_end_ms if slot.stage == 3 else 0.0

    report = job(layout=Layout(pp=4), device="cuda", loading_ms=slow).report()
    assert [one.owner for one in report.findings if one.cause == Cause.LOADER] == [owner]


def test_loaders_that_share_slow_storage_have_their_turns(job):
    """Every loader has its long iterations; one has some more of them."""
    turns = np.random.default_rng(5).random((4, 64))

    def slow(slot):
        return 9.0 if turns[slot.rank, slot.iteration] < (0.8 if slot.rank == 2 else 0.3) else 1.0

    report = job(layout=Layout(dp=4), loading_ms=slow).report()
    assert not [one for one in report.findings if one.owner == Owner.NODE]


def test_loaders_of_a_lone_tp_group_are_compared_where_all_load(job):
    def loads(rank, first, last):
        return lambda slot: (
            9.0 if slot.rank == rank and first <= slot.iteration < last else 0.1
        )  # fmt: skip

    alone = job(layout=Layout(tp=4), iterations=30)
    for rank, first, last, owner in (
        (2, 0, 99, Owner.NODE),
        (2, 15, 99, Owner.NODE),
        (0, 15, 99, Owner.NODE),
        (0, 0, 99, Owner.UNDECIDED),  # it may load for all
    ):
        (finding,) = alone.but(loading_ms=loads(rank, first, last)).report().findings
        assert (finding.cause, finding.ranks, finding.owner) == (Cause.LOADER, (rank,), owner)
    first_loads = alone.but(loading_ms=lambda slot: 9.0 if slot.rank == 0 else 0.001).report()
    assert not [one for one in first_loads.findings if one.owner == Owner.NODE]


def test_where_others_load_as_long_storage_is_slow(job):
    """Rank 1's device waits for its data; then the others' loading takes as long as its own.

    Not where all loads are equally long: hosts that are ahead wait in them for their devices.
    """
    seen = observe(
        job(layout=Layout(dp=4), loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0).timeline()
    )
    scatter = np.random.default_rng(2).lognormal(0.0, 0.5, seen.busy_ns.shape)
    alike = replace(seen, loading_ns=5e7 * scatter)
    held_back = replace(seen, loading_ns=np.full_like(seen.busy_ns, 5e7))
    now_and_then = np.full_like(seen.busy_ns, 1e6)
    now_and_then[1], now_and_then[3, ::4] = 5e7, 8e7
    rarely = now_and_then.copy()
    rarely[3, 4:] = 1e6
    owners = [
        judge(one, DetectorSettings()).findings[0].owner
        for one in (
            *(seen, alike, held_back),
            *(replace(seen, loading_ns=ns) for ns in (now_and_then, rarely)),
        )
    ]
    # a quarter of one rank's iterations is a twelfth of all three: the tenth is not reached
    assert owners == [Owner.NODE, Owner.UNDECIDED, Owner.NODE, Owner.NODE, Owner.NODE]
    now_and_then[2, ::4] = 8e7
    often = replace(seen, loading_ns=now_and_then)
    assert judge(often, DetectorSettings()).findings[0].owner == Owner.UNDECIDED


@pytest.mark.parametrize(
    ("own_ms", "others_ms", "is_beyond"),
    [
        ([720.0] * 6, [495.0] * 6, True),  # the other one's loading lasts while it waits
        ([720.0] * 6, [495.0] * 5 + [730.0], False),  # storage is slow for both
        ([720.0] * 4 + [490.0] * 2, [495.0] * 6, False),  # and for one and then the other
        ([720.0] * 2, [495.0] * 2, False),  # chance
    ],
)
def test_storage_that_all_share_is_not_slow_for_one_rank_always(own_ms, others_ms, is_beyond):
    assert is_beyond_all(np.array(own_ms), np.array([others_ms])) == is_beyond


@pytest.mark.parametrize(("then_ms", "is_shared"), [(40.0, True), (20.0, False)])
def test_others_that_load_longer_in_just_these_iterations_share_the_storage(
    job, then_ms, is_shared
):
    """Rank 1 loads for 88 ms in three iterations, the others for 16 ms and then for 40 ms."""
    seen = observe(job(layout=Layout(tp=4)).timeline())
    active = np.arange(len(seen.iterations)) < 3
    loading = np.full_like(seen.busy_ns, 16e6)
    loading[:, active] = then_ms * 1e6
    loading[1, active], loading[2, 0] = 88e6, 89e6
    told = replace(seen, loading_ns=loading)
    assert others_load_as_long(told, 1, np.array([0, 2, 3]), active) == is_shared


@pytest.mark.parametrize(
    ("spread", "is_shared"), [(1.0, True), (0.02, False)], ids=["storage", "waiting"]
)
def test_where_loading_takes_all_long_somebody_waits_longest(job, spread, is_shared):
    """One rank loads for 1 s, three others for 100 to 300 ms; or all of these for equally long, as
    long as they wait for it.
    """
    seen = observe(job(layout=Layout(dp=4)).timeline())
    active = np.ones(len(seen.iterations), dtype=bool)
    share = np.random.default_rng(4).uniform(-1.0, 1.0, seen.busy_ns.shape)
    loading = 200e6 * np.exp(0.6 * spread * share)
    loading[1] = 1e9
    told = replace(seen, loading_ns=loading)
    assert others_load_as_long(told, 1, np.array([0, 2, 3]), active) == is_shared


@pytest.mark.parametrize(
    ("before_ms", "others_then_ms", "is_shared"),
    [(64.0, 1.0, False), (64.0, 2.0, True), (311.0, 1.0, True)],
    ids=["alone", "as others do", "it always took longer"],
)
def test_storage_that_becomes_slow_does_so_for_all(job, before_ms, others_then_ms, is_shared):
    """On the other host loading takes 29 to 58 ms, from iteration 10 on once or twice as long."""
    seen = observe(job(layout=Layout(dp=4), hosts=2).timeline())
    active = seen.iterations >= 10
    share = np.random.default_rng(4).uniform(-1.0, 1.0, seen.busy_ns.shape)
    loading = 41e6 * np.exp(0.35 * share) * np.where(active, others_then_ms, 1.0)
    loading[1] = np.where(active, 311e6, before_ms * 1e6)
    told = replace(seen, loading_ns=loading)
    assert others_load_as_long(told, 1, np.array([0, 2, 3]), active) == is_shared


@pytest.mark.parametrize(
    ("hosts", "often", "owner"),
    [
        (4, 3, Owner.UNDECIDED),  # in every third iteration, on another host
        (1, 3, Owner.UNDECIDED),  # the job has one host: that tells nothing
        (4, 5, Owner.NODE),  # in every fifth
    ],
)
def test_one_other_loader_that_often_takes_as_long_speaks_for_the_storage(job, hosts, often, owner):
    """Rank 7 loads as long as rank 1, whose device alone waits: a twentieth of all others."""
    slow = job(
        layout=Layout(dp=8), hosts=hosts, loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0
    )
    seen = observe(slow.timeline())
    loading = np.full_like(seen.busy_ns, 1e6)
    loading[1], loading[7, ::often] = 5e7, 8e7
    (finding,) = judge(replace(seen, loading_ns=loading), DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((1,), owner)


def test_ranks_that_never_load_do_not_hide_slow_storage():
    """Of two TP groups of four the first ranks load; the other one's takes as long in one of three
    iterations, which is a twelfth of what all four ranks would show.
    """
    theirs = np.full((4, 3), np.nan)
    theirs[0] = 600e6, 1e6, 1e6
    assert load_as_long(650e6, theirs)
    assert not load_as_long(5_000e6, theirs)
    assert not load_as_long(650e6, np.full((4, 3), np.nan))


@pytest.mark.parametrize(("loading_ms", "waits", "is_found"), [
    (240.0, True, True),
    (240.0, False, False),  # nobody waits for it
    (20.0, True, False),  # little of the iteration
])  # fmt: skip
def test_loading_of_the_one_rank_that_loads_is_told_by_who_waits(job, loading_ms, waits, is_found):
    """A pipeline of two ranks: no other rank has the same loading to do."""
    seen = observe(job(layout=Layout(pp=2), loading_ms=lambda slot: 0.0).timeline())
    loading = np.zeros_like(seen.busy_ns)
    loading[0] = loading_ms * 1e6
    waiting = np.full_like(loading, 30e6)
    waiting[1] += loading[0] * waits
    seen = replace(
        seen,
        lost_ns={Cause.LOADER: loading},
        waiting_ns=waiting,
        iteration_ns=seen.iteration_ns + loading[0],
    )
    report = judge(seen, DetectorSettings())
    found = [one for one in report.findings if one.cause == Cause.LOADER]
    assert [(one.ranks, one.owner) for one in found] == [((0,), Owner.UNDECIDED)] * is_found
    assert report.minimum_detectable[Cause.LOADER] == pytest.approx(1.1)


@pytest.mark.parametrize(("every", "is_found"), [(2, True), (20, False)])
def test_loading_that_all_wait_for_now_and_then(job, every, is_found):
    """Half of the iterations are 240 ms longer, or one: no level, and one is chance."""
    seen = observe(job(layout=Layout(pp=2), loading_ms=lambda slot: 0.0).timeline())
    loading = np.zeros_like(seen.busy_ns)
    loading[1, ::every] = 240e6
    waiting = np.full_like(loading, 30e6)
    waiting[0] += loading[1]
    report = judge(
        replace(
            seen,
            lost_ns={Cause.LOADER: loading},
            waiting_ns=waiting,
            iteration_ns=seen.iteration_ns + loading[1],
        ),
        DetectorSettings(),
    )
    found = [one for one in report.findings if one.cause == Cause.LOADER]
    assert [(one.ranks, one.owner) for one in found] == [((1,), Owner.UNDECIDED)] * is_found
    assert all(len(one.episodes) > 1 for one in found)


def test_a_window_in_which_no_loader_could_be_told_is_no_health(job):
    def by_turns(slot):
        return 60.0 if (slot.rank + slot.iteration) % 3 == 0 else 0.1

    report = job(layout=Layout(dp=4), iterations=3, loading_ms=by_turns).report()
    assert report.verdict is Verdict.UNDECIDED
    assert all(not one.ranks for one in report.findings)


@pytest.mark.parametrize(("own_ms", "owner"), [(40.0, Owner.UNDECIDED), (150.0, Owner.NODE)])
def test_shared_cores_make_loading_no_ten_times_longer(job, own_ms, owner):
    """Two processes load, on CPUs that they share with others; one takes 4 or 15 times as long."""
    report = job(
        layout=Layout(tp=2, dp=2),
        device="cpu",
        loading_ms=lambda slot: {0: 10.0, 2: own_ms}.get(slot.rank, 0.0),
    ).report()
    (finding,) = [one for one in report.findings if one.cause == Cause.LOADER]
    assert (finding.ranks, finding.owner) == ((2,), owner)
    assert (OF_TWO in finding.evidence) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2)])
def test_ranks_that_load_are_judged_without_a_first_rank_of_their_group(job, layout):
    """Only one rank loads, the second of its TP group: the first one was not traced."""
    made = job(layout=layout, loading_ms=lambda slot: 6.0 if slot.rank == 1 else 0.0)
    seen = observe(made.timeline())
    loading = np.where(np.arange(layout.world_size)[:, None] == 1, 6e6, np.nan)
    alone = replace(seen, lost_ns={**seen.lost_ns, Cause.LOADER: loading + 0 * seen.busy_ns})
    assert all(one.ranks == (1,) for one in judge(alone, DetectorSettings()).findings)
    nobody = replace(alone, lost_ns={**seen.lost_ns, Cause.LOADER: np.nan * seen.busy_ns})
    assert judge(nobody, DetectorSettings()).findings == ()


@pytest.mark.parametrize(("without", "is_told"), [(2, True), (5, False)])
def test_a_loader_that_is_late_but_where_all_wait_for_a_checkpoint(job, without, is_told):
    """115 ms in most of ten iterations, and nothing in those that another rank has held up."""
    late = np.full((4, 10), 0.9e6)
    late[:, 3] = late[:, 7] = 0.0
    late[2] = 115e6
    late[2, np.linspace(1, 9, without).astype(int)] = 0.0
    seen = observe(job(layout=Layout(dp=4), iterations=10).timeline())
    told = replace(seen, lost_ns={**seen.lost_ns, Cause.LOADER: late}, costs=None)
    found = [one for one in judge(told, DetectorSettings()).findings if one.cause is Cause.LOADER]
    lasting = [one for one in found if one.owner is Owner.NODE and len(one.episodes) == 1]
    assert [one.ranks for one in lasting] == [(2,)] * is_told


@pytest.mark.parametrize(
    ("other_ms", "once_ms", "owner"),
    [
        (2.0, 3.0, Owner.NODE),
        (0.1, 0.1, Owner.UNDECIDED),
        (200.0, 200.0, Owner.UNDECIDED),
        (2.0, 58.0, Owner.UNDECIDED),
    ],
    ids=[
        "the last stage loads quickly",
        "it does not load itself",
        "slow storage",
        "slow storage that loading ahead hides all but once",
    ],
)
def test_the_other_end_of_the_pipeline_tells_whose_loader_is_slow(job, other_ms, once_ms, owner):
    """Ranks 0 to 3 wait for rank 0, which loads for 240 ms; rank 3 of the last stage loads, too."""
    seen = observe(job(layout=Layout(pp=4), loading_ms=lambda slot: 0.0).timeline())
    lost, loading = np.zeros_like(seen.busy_ns), np.full_like(seen.busy_ns, np.nan)
    lost[0] = loading[0] = 240e6
    loading[3] = other_ms * 1e6
    loading[3, 1] = once_ms * 1e6
    waiting = np.full_like(lost, 30e6)
    waiting[1:] += lost[0]
    told = replace(
        seen,
        lost_ns={Cause.LOADER: lost},
        loading_ns=loading,
        waiting_ns=waiting,
        iteration_ns=seen.iteration_ns + lost[0],
    )
    report = judge(told, DetectorSettings())
    (finding,) = [one for one in report.findings if one.cause == Cause.LOADER]
    assert (finding.ranks, finding.owner) == ((0,), owner)
    assert ("undecided whose fault" in finding.headline) == (owner is Owner.UNDECIDED)
    if owner is Owner.NODE:
        assert "rank 3 needs 3 ms at most for the same loading" in finding.evidence[-1]


@pytest.mark.parametrize(("mate_ms", "ranks"), [(np.nan, (0,)), (200.0, (0, 1))])
def test_of_a_group_that_all_others_wait_for_the_rank_that_loads_is_named(job, mate_ms, ranks):
    seen = observe(job(layout=Layout(tp=2, pp=4), loading_ms=lambda slot: 0.0).timeline())
    lost, loading = np.zeros_like(seen.busy_ns), np.full_like(seen.busy_ns, np.nan)
    lost[0] = loading[0] = 240e6
    lost[1] = loading[1] = mate_ms * 1e6
    loading[6] = 2e6
    waiting = np.full_like(lost, 30e6)
    waiting[2:] += lost[0]
    told = replace(
        seen,
        lost_ns={Cause.LOADER: lost},
        loading_ns=loading,
        waiting_ns=waiting,
        iteration_ns=seen.iteration_ns + lost[0],
        splits_tensor_groups=False,
    )
    report = judge(told, DetectorSettings())
    (finding,) = [one for one in report.findings if one.cause == Cause.LOADER]
    assert finding.ranks == ranks
    assert (finding.owner is Owner.NODE) == (len(ranks) == 1)


@pytest.mark.parametrize("of_all", [False, True], ids=["one host", "storage that all share"])
def test_a_host_that_loads_late_now_and_then_is_told_from_storage_that_all_share(job, of_all):
    """In every fourth iteration the first host loads for 80 ms, the others in other ones."""

    def loading(slot):
        is_late = slot.iteration % 4 == 0 if slot.rank < 4 else of_all and slot.iteration % 4 == 2
        return 80.0 if is_late else 1.0

    report = job(layout=Layout(dp=8), hosts=4, iterations=24, loading_ms=loading).report()
    hosts = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert hosts == ([] if of_all else [(0, 1, 2, 3)])


@pytest.mark.parametrize(
    ("slow_ranks", "named", "owner"),
    [((4,), (4,), Owner.NODE), ((6,), (6,), Owner.NODE), ((5, 6), (4, 5, 6, 7), Owner.UNDECIDED)],
    ids=["the first rank", "another", "two of them"],
)
def test_of_a_group_that_waits_unseen_the_trace_tells_who_loads(job, slow_ranks, named, owner):
    """A row stands for four ranks; ranks that load in time take 0.1 ms."""

    def loading(slot):
        return 20.0 if slot.rank in slow_ranks else 0.1

    seen = observe(job(layout=Layout(tp=4, dp=4), hosts=4, loading_ms=loading).timeline())
    report = judge(replace(seen, splits_tensor_groups=False), DetectorSettings())
    (finding,) = [one for one in report.findings if one.cause is Cause.LOADER]
    assert (finding.ranks, finding.owner) == (named, owner)


@pytest.mark.parametrize(
    ("collecting_ms", "owner"),
    [(0.0, Owner.NODE), (40.0, Owner.UNDECIDED), (None, Owner.UNDECIDED)],
    ids=["its host", "collects", "nobody knows"],
)
def test_a_loader_that_stops_with_its_host_is_its_hosts_unless_it_collects(
    job, collecting_ms, owner
):
    """Rank 1 loads for 48 ms of an iteration, others now and then; its launches stop for 20 ms."""
    seen = observe(
        job(layout=Layout(dp=4), loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0).timeline()
    )
    loading, stopped = np.full_like(seen.busy_ns, 5e7), np.zeros_like(seen.busy_ns)
    stopped[1] = 20e6
    lost_ns = {**seen.lost_ns, Cause.GC: np.zeros_like(stopped)}
    if collecting_ms is None:
        del lost_ns[Cause.GC]
    else:
        lost_ns[Cause.GC][1] = collecting_ms * 1e6
    told = replace(seen, loading_ns=loading, stopped_ns=stopped, lost_ns=lost_ns)
    found = judge(told, DetectorSettings()).findings
    cause = Cause.HOST if owner is Owner.NODE else Cause.LOADER
    assert [one.owner for one in found if one.cause is cause] == [owner]


@pytest.mark.parametrize(
    ("own_ms", "others_ms", "is_told"),
    [
        ((1, 1, 60, 1, 1, 40, 1, 1), 1.0, True),
        ((1, 1, 60, 1, 1, 1, 1, 1), 1.0, False),  # a single load
        ((1, 1, 60, 1, 1, 40, 1, 1), 8.0, False),  # others have long ones, too
    ],
    ids=["far longer", "once", "longer elsewhere"],
)
def test_two_loads_that_are_far_longer_than_any_other_are_no_chance(
    job, own_ms, others_ms, is_told
):
    def loading(slot):
        if slot.rank == 2:
            return own_ms[slot.iteration % 8]
        return others_ms if slot.iteration % 8 == slot.rank else 1.0

    alone = job(layout=Layout(dp=8), device="cuda", iterations=8, loading_ms=loading)
    seen = replace(observe(alone.timeline()), num_warmup_iterations=0)
    answer = search_far_loaders(_inquiry(seen, DetectorSettings()))
    named = [(one.ranks, one.cause, one.owner) for one in answer.findings]
    assert named == ([((2,), Cause.LOADER, Owner.NODE)] if is_told else [])


@pytest.mark.parametrize(("stage", "is_told"), [(1, True), (0, False)], ids=["last", "first"])
def test_slow_storage_may_show_at_the_first_stage_alone(job, stage, is_told):
    """The last stage has time to load ahead; where it is late, the storage is not the reason."""

    def loading(slot):
        is_late = slot.iteration % 3 == 1 and slot.rank // 4 == stage
        return 60.0 + 9 * slot.rank if is_late else 1.0

    late = job(layout=Layout(pp=2, dp=4), hosts=4, device="cuda", iterations=9, loading_ms=loading)
    answer = search_far_loaders(_inquiry(observe(late.timeline()), DetectorSettings()))
    ranks = [one.ranks for one in answer.findings]
    assert ranks == ([(4, 5, 6, 7)] if is_told else [])


def test_time_lost_to_loading_is_judged_where_no_work_is_alike(job):
    """Kernels of other shapes on every rank: no computing can be compared, loading can."""
    slow = job(layout=Layout(dp=4), loading_ms=lambda slot: 6.0 if slot.rank == 1 else 1.0)
    seen = observe(slow.timeline())
    unlike = replace(seen.work, log_ns=np.full_like(seen.work.log_ns, np.nan))
    seen = replace(seen, work=unlike, layers=None, history=None)
    named = [one.ranks for one in judge(seen, DetectorSettings()).findings if one.owner == "node"]
    assert named == [(1,)]
