"""Hosts beside others: of fewer ranks, of other stages, on longer data, and in a run's warm-up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.burst_owner import _may_warm_up
from detect.causes.host_data import stall_by_their_data
from detect.causes.hosts import _launches_late
from detect.causes.paused_hosts import EARLY, _doubts, _pausing_host
from detect.detector import judge
from detect.observe.extract import observe
from detect.stats.host_tests import HostTest, _lost_inside, keeps_its_pace
from megascan.topology import Layout


@pytest.mark.parametrize(("elsewhere", "named"), [(8, True), (1, False)])
def test_a_host_of_one_rank_shows_little_of_how_often_ranks_pause(elsewhere, named):
    """In 8 of 12 iterations one or two of eight ranks pause: each by itself in two or three."""
    over, host = np.zeros((8 + elsewhere, 12)), np.repeat([0, 1], [8, elsewhere])
    for iteration in range(8):
        over[[iteration, (iteration + 3) % 8], iteration] = (0.09, 0.07)
    paused = _pausing_host(over, ["a", "b"], host, rate=0.01)
    assert (paused is not None and paused.burst.is_sure) is named


@pytest.mark.parametrize(("first", "is_early"), [(2, True), (12, False)])
def test_pauses_in_the_first_iterations_of_a_run_are_its_warm_up(job, first, is_early):
    """All ranks of a host pause in the first of six iterations, rank 0 in the others as well."""

    def pauses(slot):
        is_first = slot.iteration == 3 and slot.rank < 4
        return 40.0 + 5 * slot.rank if is_first or (slot.rank == 0 and slot.iteration < 7) else 0.0

    seen = observe(job(layout=Layout(dp=8), hosts=4, iterations=6, gap_ms=pauses).timeline())
    seen = replace(seen, iterations=np.arange(first, first + 6))
    paused = _pausing_host(
        seen.lost(Cause.HOST) / np.median(seen.iteration_ns),
        ["a", "b"], np.arange(8) // 4, rate=0.01,
    )  # fmt: skip
    assert paused is not None and (EARLY in _doubts(seen, paused)) is is_early


@pytest.mark.parametrize(
    ("first", "hits", "is_early"),
    [(3, (1, 1, 0), True), (3, (1, 0, 1), False), (3, (1, 1, 1), False), (40, (1, 1, 0), False)],
)
def test_a_rank_that_pauses_until_a_run_is_warm_need_have_no_slow_host(first, hits, is_early):
    seen = SimpleNamespace(iterations=np.arange(first, first + 3), num_warmup_iterations=2)
    assert _may_warm_up(seen, SimpleNamespace(hits=np.array(hits, dtype=bool))) is is_early


@pytest.mark.parametrize(("alike", "is_data"), [(1.0, True), (0.3, False)])
def test_a_last_stage_that_stands_still_for_longer_data_is_not_its_hosts(job, alike, is_data):
    """Passes of all stages vary by a tenth with the data; the last stage stands still besides."""
    seen = observe(job(layout=Layout(pp=4, dp=2), hosts=2, iterations=12).timeline())
    rng = np.random.default_rng(5)
    length, other = rng.normal(0.0, 0.1, (2, len(seen.iterations)))
    work = replace(seen.work, log_ns=seen.work.log_ns + length[None, :, None])
    stalled = np.zeros_like(seen.stalled_ns)
    stalled[6:] = 1e6 * (3.0 + 10.0 * (alike * length + (1.0 - alike) * other))
    told = replace(seen, work=work, stalled_ns=stalled)
    assert stall_by_their_data(told, np.array([6, 7])) is is_data
    assert not stall_by_their_data(seen, np.array([6, 7]))
    one_host = replace(seen.members, hosts=("n0",) * 8)
    assert not stall_by_their_data(replace(told, members=one_host), np.array([6, 7]))
    assert stall_by_their_data(replace(told, members=one_host), np.array([6])) is is_data


@pytest.mark.parametrize(
    ("ranks_on_host", "own_ms", "owner"),
    [
        (4, 1.0, Owner.UNDECIDED),
        (4, 1.6, Owner.NODE),
        (4, 0.7, Owner.UNDECIDED),
        (8, 1.0, Owner.NODE),
    ],
    ids=["a stage", "a stage that loads slowly", "a stage that loads quickly", "two stages"],
)
def test_a_host_whose_stages_no_other_has_is_told_by_what_stages_share(
    job, ranks_on_host, own_ms, owner
):
    """The last of four stages, or the last two, launch 1.5 times as slowly; both ends load."""
    own = range(16 - ranks_on_host, 16)
    made = job(
        layout=Layout(pp=4, dp=4),
        hosts=ranks_on_host,
        gap_ms=lambda slot: 23.0 if slot.rank in own else 8.0,
    )
    seen = observe(made.timeline())
    is_own = np.isin(seen.members.ranks, list(own))[:, None]
    noise = np.random.default_rng(3).normal(0.0, 0.03, seen.busy_ns.shape)
    loading = np.full_like(noise, np.nan)
    loading[:4], loading[12:] = 1e6, own_ms * 1e6
    told = replace(seen, launch_pace=noise + np.where(is_own, np.log(1.5), 0.0), loading_ns=loading)
    found = judge(told, DetectorSettings()).findings
    (finding,) = [one for one in found if one.cause is Cause.HOST]
    assert (finding.ranks, finding.owner) == (tuple(own), owner)


@pytest.mark.parametrize(("num_late", "named"), [(3, True), (0, False)])
def test_a_host_that_launches_slowly_in_the_last_iterations_is_told_by_what_it_costs(
    job, num_late, named
):
    """Three of eight iterations, in which its launches take 4.2 times as long, and passes as well;
    what hosts take for all their launches is read as what they take for free ones.
    """
    own, late = np.arange(16)[:, None] < 8, np.arange(8) >= 8 - num_late
    seen = observe(job(layout=Layout(dp=16), hosts=8, iterations=8).timeline())
    pace = 0.02 * np.random.default_rng(3).standard_normal((16, 8))
    pace += np.where(own & late, np.log(4.2), 0.0)
    waiting = np.where(own, 0.0, np.where(late, 1.4, 0.01)) * seen.iteration_ns
    told = replace(
        seen, launch_pace=pace, held_pace=pace, waiting_ns=waiting, split_wait_ns=None, costs=None,
        starved_share=np.where(own & late, 1.0, 0.6 * np.ones(8)),
    )  # fmt: skip
    found = judge(told, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [tuple(range(8))] * named


@pytest.mark.parametrize(("pace", "named"), [(1.37, True), (1.12, False)])
def test_of_two_hosts_of_two_ranks_launching_tells_which_is_slow(job, pace, named):
    seen = observe(job(layout=Layout(dp=4), hosts=2).timeline())
    own = np.arange(4)[:, None] < 2
    paces = 0.02 * np.random.default_rng(3).standard_normal(seen.busy_ns.shape)
    paces += np.where(own, np.log(pace), 0.0)
    lost = {**seen.lost_ns, Cause.HOST: np.where(own, 0.14, 0.07) * seen.iteration_ns}
    told = replace(seen, launch_pace=paces, held_pace=paces, lost_ns=lost, costs=None)
    found = judge(told, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == [(0, 1)] * named


@pytest.mark.parametrize(
    ("optimizer", "pace", "starved", "ep", "named"),
    [
        (1.3, 2.0, 0.6, 4, True),
        (1.0, 2.0, 0.6, 4, False),
        (1.3, 1.1, 0.6, 4, False),
        (1.0, 2.0, 1.0, 1, True),
        (1.0, 2.0, 1.0, 4, False),
        (1.0, 1.25, 1.0, 1, False),
    ],
    ids=[
        "late steps",
        "a router's doing",
        "as hosts differ",
        "all just in time",
        "hosts ask a router's counts",
        "somebody is the last",
    ],
)
def test_what_shows_beside_late_launches_that_no_longer_data_make_passes_slow(
    optimizer, pace, starved, ep, named
):
    """A router, or data, lengthen passes, but no optimizer step, and let a host get ahead."""
    own, noise = np.arange(8) < 4, np.random.default_rng(3)
    level = np.where(own, np.log(pace), 0.0) + 0.01 * noise.standard_normal(8)
    compute, test = (HostTest(effect=effect, error=0.01, p_value=1e-6) for effect in (0.5, 0.3))
    seen = SimpleNamespace(
        members=SimpleNamespace(layout=Layout(dp=8, ep=ep)),
        starved_share=np.where(own, starved, 0.6)[:, None] * np.ones(8),
    )
    sides = SimpleNamespace(
        seen=seen, own=own, control=~own, lacks_peers=lambda rows: False,
        over={"pace": SimpleNamespace(level=level, value=np.repeat(level[:, None], 8, axis=1))},
    )  # fmt: skip
    sure = {"compute": compute, "pace": test}
    sure |= {"optimizer": replace(test, effect=float(np.log(optimizer)))} if optimizer > 1 else {}
    assert _launches_late(sides, compute, sure) is named


@pytest.mark.parametrize(
    ("lead", "elsewhere", "keeps"),
    [
        ((0.0, 0.05, 2.2, 0.0, 2.2), 0.1, True),
        ((0.0, 0.05, 2.2, 0.0, 0.0), 0.1, False),
        ((0.05, 0.47, 0.26, 0.59, 0.83, 0.92), 0.1, False),
        ((0.0, 0.05, 2.2, 0.0, 2.2), 1.5, False),
    ],
    ids=["nine times in two", "once", "comes and goes", "other hosts have such a time"],
)
def test_a_host_that_launches_far_more_slowly_at_times_is_no_load_of_any_host(
    lead, elsewhere, keeps
):
    own = np.arange(12) < 4
    value = 0.02 * np.random.default_rng(3).standard_normal((12, len(lead)))
    value[:4] += lead
    value[7, 1] = elsewhere
    over = {"pace": SimpleNamespace(value=value)}
    assert keeps_its_pace(SimpleNamespace(own=own, control=~own, over=over)) is keeps


@pytest.mark.parametrize(
    ("longer", "ep", "loses"), [(2.0, 1, True), (1.1, 1, False), (4.5, 1, False), (2.0, 4, False)]
)
def test_passes_that_are_as_long_as_their_launches_lose_by_these(job, longer, ep, loses):
    """Launches take twice as long on one of two hosts, whose devices all wait for theirs. Passes
    that are not longer by as much say nothing, nor do those of ranks that wait for a router.
    """
    own = np.arange(8) < 4
    work = {True: longer, False: 1.0}
    made = job(layout=Layout(dp=8, ep=ep), hosts=4, work=lambda slot: work[slot.rank < 4])
    seen = observe(made.timeline())
    level = np.where(own, np.log(2.0), 0.0)
    over = {
        "pace": SimpleNamespace(level=level, value=np.repeat(level[:, None], 20, axis=1)),
        "compute": SimpleNamespace(level=np.where(own, np.log(longer), 0.0)),
    }
    sides = SimpleNamespace(
        seen=replace(seen, starved_share=np.ones_like(seen.busy_ns)),
        own=own, control=~own, over=over,
    )  # fmt: skip
    assert (_lost_inside(sides) > 0) is loses
