"""Hosts that load slowly: told from their loaders one by one, and from storage that all share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.hosts import _is_noisier_of_two
from detect.detector import judge
from detect.observe.extract import observe
from detect.stats.host_tests import HostTest
from megascan.topology import Layout


@pytest.mark.parametrize(("others_ms", "is_noisier"), [(2.0, False), (40.0, True)])
def test_of_two_hosts_one_that_loads_twice_as_long_is_no_noisier_one(others_ms, is_noisier):
    own, test = np.arange(8) < 4, HostTest(effect=0.035, error=0.003, p_value=1e-6)
    loading_ns = np.where(own, 55e6, others_ms * 1e6)[:, None] * np.ones(6)
    seen = SimpleNamespace(lost=lambda cause: loading_ns, held_pace=None)
    sides = SimpleNamespace(seen=seen, own=own, control=~own, host=own.astype(int))
    reason = SimpleNamespace(cause=Cause.LOADER, test=test, tests={"loader": test})
    assert _is_noisier_of_two(sides, reason) is is_noisier


def test_a_stage_that_waits_for_its_data_alone_is_no_slow_host(job):
    """Its devices are through with what it has to do before the next data are there."""
    waits = job(layout=Layout(pp=4, dp=4), hosts=4).but(
        loading_ms=lambda slot: 3.0 if slot.stage == 0 else 0.02
    )
    (found,) = [one for one in waits.report().findings if one.cause == Cause.LOADER]
    assert (found.ranks, found.owner) == ((0, 1, 2, 3), Owner.UNDECIDED)
    for stage, owner in ((0, Owner.UNDECIDED), (3, Owner.NODE)):  # others load while they wait

        def far(slot, stage=stage):
            return 12.0 if slot.stage == stage else 0.02

        findings = waits.but(loading_ms=far).report().findings
        assert [one.owner for one in findings if one.cause == Cause.LOADER] == [owner]


def loads(slow_ranks, slow_ms=20.0, first=0, others_in=(), else_ms=0.1):
    def effect(slot):
        is_slow = slot.rank in slow_ranks and slot.iteration >= first
        return slow_ms if is_slow or slot.iteration in others_in else else_ms

    return effect


def test_two_loaders_of_one_host_against_two_of_the_other(job):
    made = job(layout=Layout(dp=4), hosts=2, loading_ms=loads((0, 1)))
    (finding,) = made.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((0, 1), Cause.LOADER, Owner.NODE)
    shared = made.but(loading_ms=loads((0, 1), others_in=(5, 9, 20))).report().findings
    assert [one.owner for one in shared if one.ranks == (0, 1)] == [Owner.UNDECIDED]
    apart = made.but(loading_ms=loads((0, 2))).report()
    assert not [one for one in apart.findings if len(one.ranks) > 1]


LOADING = np.random.default_rng(11).lognormal(0.0, 0.9, (64, 16))
"""Of iterations and ranks: loaders differ from batch to batch and from each other."""


@pytest.mark.parametrize(
    ("slow_ms", "layout", "named"),
    [
        (dict.fromkeys(range(4, 8), 50.0), Layout(dp=16), {(4, 5, 6, 7)}),
        (dict.fromkeys(range(4, 8), 50.0), Layout(tp=2, dp=8), {(4, 6)}),
        (dict.fromkeys(range(4, 8), 0.5), Layout(dp=16), set()),
        (dict.fromkeys((4, 6), 50.0), Layout(dp=16), {(4, 6)}),
        (dict.fromkeys(range(16), 50.0), Layout(dp=16), set()),
        (dict.fromkeys((4, 5, 6, 7, 9, 12), 50.0), Layout(dp=16), set()),
    ],
    ids=[
        "all loaders",
        "one of each TP group",
        "too little",
        "half of them",
        "all hosts",
        "others",
    ],
)
def test_a_host_all_of_whose_loaders_are_slow_is_named(job, slow_ms, layout, named):
    """The device waits for the slowest of them; what the others lose tells nothing of them. Ranks
    that load for others are named alone.
    """

    def loading(slot):
        if slot.rank % layout.tp or slot.microbatch:
            return 0.02
        return slow_ms.get(slot.rank, 0.5) * LOADING[slot.iteration, slot.rank]

    findings = job(layout=layout, hosts=4, iterations=12, loading_ms=loading).report().findings
    whole = {
        one.ranks
        for one in findings
        if one.cause == Cause.LOADER and one.owner == Owner.NODE and len(one.ranks) > 1
    }
    assert whole == named


@pytest.mark.parametrize(
    ("most_ms", "least_ms", "owner"),
    [(1.2, 0.1, Owner.NODE), (1.2, 0.7, Owner.UNDECIDED)],
    ids=["far longer", "as documents differ"],
)
def test_of_two_hosts_one_is_always_noisier_but_not_by_far(job, most_ms, least_ms, owner):
    """Loading takes the ranks of one host 10 ms of 255, those of the other 1 or 6 ms."""

    def loading(slot):
        usual_ms = most_ms if slot.rank < 4 else least_ms
        return usual_ms * (0.5 + (slot.iteration * 7 + slot.rank * 3) % 5 / 4)

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    found = [one.owner for one in report.findings if one.ranks == (0, 1, 2, 3)]
    assert found == [owner] or (not found and owner is Owner.UNDECIDED)


@pytest.mark.parametrize(("late_ms", "owner"), [((1.5,) * 4, Owner.NODE), ((1.5, 0, 0, 0), None)])
def test_loaders_of_a_host_that_are_named_one_by_one_are_the_hosts(job, late_ms, owner):
    """12 ms of 255 each, which two hosts may differ by: but each is late beside its peers."""

    def loading(slot):
        return 0.1 + (late_ms[slot.rank] if slot.rank < 4 else 0.0)

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    whole = [one for one in report.findings if one.ranks == (0, 1, 2, 3)]
    assert [(one.cause, one.owner) for one in whole] == [(Cause.LOADER, owner)] * (
        owner is not None
    )


@pytest.mark.parametrize(("others", "owner"), [((1,), Owner.NODE), ((5,), Owner.UNDECIDED)])
def test_what_is_slow_for_one_host_alone_is_no_storage_of_all(job, others, owner):
    """Rank 0's loader is late, and another's as late in every other iteration: on its own host, or
    on the other one.
    """

    def loading(slot):
        return 12.0 if slot.rank == 0 or (slot.rank in others and slot.iteration % 2) else 0.1

    report = job(layout=Layout(dp=8), hosts=4, loading_ms=loading).report()
    assert [one.owner for one in report.findings if one.ranks == (0,)] == [owner]


@pytest.mark.parametrize(
    ("factor", "owner"), [(1.0, Owner.UNDECIDED), (1.3, Owner.NODE)], ids=["loads late", "and slow"]
)
def test_storage_of_all_makes_no_passes_longer(job, factor, owner):
    """Loading takes ranks 4 to 7 half a pass longer, and those of the other hosts now and then;
    passes of these ranks are slower by 1.18 to 1.43 times, as longer documents may make them.
    """

    def loading(slot):
        is_late = slot.rank in range(4, 8) or (slot.rank + slot.iteration) % 7 == 0
        return 40.0 if is_late else 1.0

    def work(slot):
        is_slow = slot.rank in range(4, 8) and slot.name != "optimizer"
        return factor ** (1.0 + (slot.rank - 5.5) / 4.0) if is_slow else 1.0

    made = job(layout=Layout(dp=16), hosts=4, loading_ms=loading, work=work)
    found = [one for one in made.report().findings if one.ranks == (4, 5, 6, 7)]
    assert [(one.cause, one.owner) for one in found] == [(Cause.LOADER, owner)]


def test_a_first_stage_loads_for_all_others_unless_it_changes(job):
    made = job(layout=Layout(dp=2, pp=2), hosts=2, loading_ms=loads((0, 1), else_ms=0.02))
    assert Owner.NODE not in {one.owner for one in made.report().findings}
    changed = made.but(loading_ms=loads((0, 1), first=12)).report()
    finding = next(one for one in changed.findings if one.owner is Owner.NODE)
    assert (finding.ranks, finding.cause, finding.first_iteration) == ((0, 1), Cause.LOADER, 12)


def test_a_loader_far_slower_than_its_neighbours_is_no_hosts(job):
    def effect(slot):
        return 60.0 if slot.rank == 1 else 2.0 if slot.rank < 4 else 0.1

    made = job(layout=Layout(dp=4, pp=4), hosts=4, loading_ms=effect)
    assert not [one for one in made.report().findings if len(one.ranks) == 4
                and one.cause is Cause.LOADER]  # fmt: skip


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "apart", "owner"),
    [
        (24.0, 0.2, 0.2, Owner.NODE),
        (24.0, 8.0, 0.2, Owner.UNDECIDED),
        (2.5, 0.2, 0.2, Owner.UNDECIDED),
        (24.0, 0.2, 0.001, Owner.UNDECIDED),
    ],
    ids=[
        "the other end is quick",
        "both ends are slow",
        "inputs of the first stage",
        "all take as long as each other",
    ],
)
def test_a_host_loads_slowly_if_the_other_end_of_the_pipeline_does_not(
    job, first_ms, last_ms, apart, owner
):
    """Both ends load the same from the same storage; the first may have inputs of its own."""

    def loading(slot):
        wobble = LOADING[slot.iteration, slot.rank] ** apart
        return wobble * {0: first_ms, 3: last_ms}.get(slot.stage, 0.0)

    made = job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading)
    found = [one for one in made.report().findings if one.ranks == (0, 1, 2, 3)]
    assert {one.owner for one in found if one.cause == Cause.LOADER} <= {owner}
    assert bool(found) or owner is Owner.UNDECIDED


@pytest.mark.parametrize(
    ("late_in", "elsewhere", "ranks"),
    [
        ((range(12, 16),), (), {(12, 13, 14, 15)}),
        ((range(12, 16),), range(4), set()),
        ((range(4),), (), set()),
    ],
    ids=["labels", "both ends", "inputs"],
)
def test_loaders_of_the_last_stage_that_are_late_now_and_then(job, late_in, elsewhere, ranks):
    """By turns two of them load for 60 ms of 380; the first stage may have more to load."""

    def loading(slot):
        is_late = slot.rank in late_in[0] and (slot.rank + slot.iteration // 2) % 2 == 0
        is_late |= slot.rank in elsewhere and slot.iteration % 5 == 0
        return 60.0 if is_late and slot.microbatch == 0 else 0.1 if slot.stage in (0, 3) else 0.0

    report = job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading).report()
    named = {one.ranks for one in report.findings if one.owner is Owner.NODE}
    assert {one for one in named if len(one) > 1} == ranks


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_first_stage_that_loads_while_it_waits_anyway_is_no_slow_host(job, is_waited_for):
    """Ranks 0 to 3 load for 200 ms of an iteration, those of the last stage for 2 ms."""

    def loading(slot):
        return LOADING[slot.iteration, slot.rank] ** 0.2 * {0: 24.0, 3: 0.2}.get(slot.stage, 0.0)

    seen = observe(job(layout=Layout(pp=4, dp=4), hosts=4, loading_ms=loading).timeline())
    waiting = np.full_like(seen.busy_ns, 150e6)
    waiting[:4] = 1e6 if is_waited_for else 140e6
    report = judge(replace(seen, waiting_ns=waiting), DetectorSettings())
    named = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert named == ([(0, 1, 2, 3)] if is_waited_for else [])
