"""Data that are longer now and then are told from a device that is throttled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import DetectorSettings, Owner
from detect.causes.burst_owner import LENGTHS, MORE_DATA
from detect.causes.slow_modules import bursts_of_modules
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.modules import SlowRuns
from detect.observe.operations import Tokenwise
from megascan.topology import Layout

LONGER = (4, 6, 7, 9, 12)
"""Iterations."""
EFFECTS = dict(zip(LONGER, (1.12, 1.31, 1.20, 1.08, 1.17), strict=True))


def longer(ranks):
    """All passes of some ranks take longer in some iterations, by another factor in each."""

    def work(slot):
        is_slow = slot.rank in ranks and slot.name != "optimizer"
        return EFFECTS.get(slot.iteration, 1.0) if is_slow else 1.0

    return work


def owner_of(report, ranks):
    return {one.ranks: one.owner for one in report.findings if one.ranks}.get(ranks)


def with_lookups(seen, row, power):
    """Observations in which products of a row follow its passes, and lookups by a power of them."""
    ratio = np.ones(seen.busy_ns.shape)
    ratio[row] = [EFFECTS.get(int(one), 1.0) for one in seen.iterations]
    noise = np.random.default_rng(7).normal(1.0, 0.002, (*seen.busy_ns.shape, 2))
    return replace(
        seen,
        tokenwise=Tokenwise(
            dense_ns=2e8 * ratio, lookups_ns=2e5 * noise * ratio[:, :, None] ** power
        ),
    )


@pytest.mark.parametrize(
    ("power", "owner"), [(1.0, Owner.UNDECIDED), (0.25, Owner.NODE)], ids=["tokens", "clock"]
)
def test_lookups_tell_more_tokens_now_and_then_from_a_lower_clock(job, power, owner):
    made = job(layout=Layout(dp=4), iterations=14, noise=0.004, work=longer((2,)))
    seen = with_lookups(observe(made.timeline()), 2, power)
    report = judge(seen, DetectorSettings())
    assert owner_of(report, (2,)) is owner
    words = " ".join(sentence for one in report.findings for sentence in one.evidence)
    assert (MORE_DATA in words) == (owner is Owner.UNDECIDED)


@pytest.mark.parametrize(
    ("steps", "owner"),
    [(LONGER, Owner.NODE), ((3,), Owner.UNDECIDED), ((), Owner.UNDECIDED)],
    ids=["just then", "at another time", "never"],
)
def test_no_data_lengthen_the_optimizer_step(job, steps, owner):
    passes = longer((2,))

    def work(slot):
        is_step = slot.name == "optimizer" and slot.rank == 2 and slot.iteration in steps
        return 1.3 if is_step else passes(slot)

    made = job(layout=Layout(dp=4), iterations=14, noise=0.004, work=work)
    seen = with_lookups(observe(made.timeline()), 2, 1.0)
    assert owner_of(judge(seen, DetectorSettings()), (2,)) is owner


@pytest.mark.parametrize(
    ("ranks", "named"),
    [((1, 5), set()), ((1,), {(1,)})],
    ids=["both stages of a replica", "one stage alone"],
)
def test_longer_data_lengthen_all_stages_of_a_replica(job, ranks, named):
    made = job(layout=Layout(dp=4, pp=2), iterations=14, noise=0.004, work=longer(ranks))
    found = made.report().findings
    assert {one.ranks for one in found if one.owner is Owner.NODE} == named


@pytest.mark.parametrize(
    ("slow", "owner"),
    [
        (lambda slot: slot.microbatch in (2, 3), Owner.UNDECIDED),
        (lambda slot: (slot.microbatch + (slot.name == "backward")) % 4 == 2, Owner.NODE),
    ],
    ids=["whole microbatches", "one of the passes of each"],
)
def test_no_data_lengthen_one_pass_of_a_microbatch_only(job, slow, owner):
    def work(slot):
        is_slow = slot.rank == 2 and slot.iteration in EFFECTS and slot.name != "optimizer"
        return 1.0 + 2.0 * (EFFECTS[slot.iteration] - 1.0) if is_slow and slow(slot) else 1.0

    report = job(layout=Layout(dp=8), iterations=14, noise=0.004, work=work).report()
    assert owner_of(report, (2,)) is owner


def made_of(row, iterations, *, cuts):
    """Runs of 24 modules that take 1.3 times as long, one in each of some iterations."""
    number = len(iterations)
    return SlowRuns(
        row=np.full(number, row),
        iteration=np.array(iterations),
        num_modules=np.full(number, 24),
        num_passes=np.full(number, 3),
        size_log=np.full(number, np.log(1.3)),
        lost_ns=np.full(number, 3e7),
        cuts=np.full(number, cuts),
        starved_share=np.zeros(number),
    )


@pytest.mark.parametrize(
    ("layout", "owner"),
    [
        (Layout(dp=2), Owner.NODE),
        (Layout(pp=4), Owner.UNDECIDED),  # of a lone stage, and mending it would gain 0.6 %
    ],
    ids=["a pair", "lone stages"],
)
def test_modules_are_compared_with_those_of_their_own_rank(job, layout, owner):

    def work(slot):
        is_slow = slot.rank == 1 and slot.iteration in LONGER and slot.microbatch in (2, 3, 4)
        return 1.3 if is_slow and slot.name == "backward" else 1.0

    made = job(layout=layout, iterations=14, noise=0.004, work=work)
    seen = replace(observe(made.timeline()), slow_runs=made_of(1, LONGER, cuts=True))
    nobody = np.zeros(len(seen.members), dtype=bool)
    (burst,) = bursts_of_modules(seen, nobody, 0.01, 0.03)
    assert burst.row == 1 and burst.in_modules
    assert owner_of(judge(seen, DetectorSettings()), (1,)) is owner


def test_of_a_pair_whole_passes_of_any_speed_may_be_longer_data(job):
    made = job(layout=Layout(dp=2), iterations=14, noise=0.004)
    runs = made_of(1, LONGER, cuts=False)
    runs = replace(runs, size_log=np.log(np.array(list(EFFECTS.values()))))
    seen = replace(observe(made.timeline()), slow_runs=runs)
    assert owner_of(judge(seen, DetectorSettings()), (1,)) is Owner.UNDECIDED


@pytest.mark.parametrize(
    ("spread", "owner"), [(0.004, Owner.NODE), (0.08, Owner.UNDECIDED)], ids=["even", "uneven"]
)
def test_where_data_vary_whole_passes_of_one_speed_may_be_longer_data(job, spread, owner):
    """Modules of most ranks vary by too much there to show that they were as quick as ever."""
    length = np.random.default_rng(5).lognormal(0.0, spread, (40, 8, 4))

    def work(slot):
        longer = 1.3 if slot.rank in (1, 5) and slot.iteration in LONGER else 1.0
        is_optimizer = slot.name == "optimizer"
        return (
            1.0 if is_optimizer else longer * length[slot.iteration, slot.microbatch, slot.replica]
        )

    def of_one(slot):
        return 1.0 if slot.rank == 5 and slot.iteration in LONGER else work(slot)

    made = job(
        layout=Layout(dp=4, pp=2),
        iterations=14,
        noise=0.002,
        work=work if owner is Owner.UNDECIDED else of_one,
    )
    seen = replace(observe(made.timeline()), slow_runs=made_of(1, LONGER, cuts=False))
    named = {
        one.ranks for one in judge(seen, DetectorSettings()).findings if one.owner is Owner.NODE
    }
    assert ((1,) in named) == (owner is Owner.NODE)


@pytest.mark.parametrize(
    ("of_stage", "owner"), [(1.0, Owner.NODE), (1.3, Owner.UNDECIDED)], ids=["alone", "both stages"]
)
def test_steps_that_end_with_that_of_another_stage_wait_for_it(job, of_stage, owner):
    """Norms are summed over all stages: a sound rank ends its step with the slow one."""
    passes = longer((2, 6))

    def work(slot):
        if slot.name == "optimizer" and slot.iteration in LONGER:
            return {2: 1.3, 6: of_stage}.get(slot.rank, 1.0)
        return passes(slot)

    made = job(layout=Layout(dp=4, pp=2), iterations=14, noise=0.004, work=work)
    assert owner_of(made.report(), (2,)) is owner


@pytest.mark.parametrize(("step", "owner"), [(1.25, Owner.NODE), (1.0, Owner.UNDECIDED)])
def test_a_step_that_is_slower_with_a_few_passes_shows_the_device(job, step, owner):
    """In two iterations of 14, too few to judge the step by itself; lookups are slow as well."""

    def work(slot):
        if slot.rank != 2 or slot.iteration not in (4, 7):
            return 1.0
        return step if slot.name == "optimizer" else 1.2

    seen = observe(job(layout=Layout(dp=4), iterations=14, noise=0.004, work=work).timeline())
    slower = np.where(np.isin(seen.iterations, (4, 7)) & (np.arange(4) == 2)[:, None], 1.2, 1.0)
    told = Tokenwise(dense_ns=2e8 * slower, lookups_ns=2e5 * np.repeat(slower[:, :, None], 2, 2))
    report = judge(replace(seen, tokenwise=told), DetectorSettings())
    assert owner_of(report, (2,)) is owner


@pytest.mark.parametrize(("spread", "owner"), [(0.06, Owner.UNDECIDED), (0.0, Owner.NODE)])
def test_gaps_of_a_last_stage_may_come_from_data_that_vary(job, spread, owner):
    """It computes the loss, beside its passes. Rank 6 pauses before two passes, three times."""
    length = np.random.default_rng(5).lognormal(0.0, spread, (40, 8, 4))

    def work(slot):
        is_step = slot.name == "optimizer"
        return 1.0 if is_step else length[slot.iteration, slot.microbatch, slot.replica]

    def pause(slot):
        is_hit = slot.rank == 6 and slot.iteration in (4, 7, 12) and slot.microbatch in (0, 3)
        return 10.0 if is_hit else 0.0

    made = job(
        layout=Layout(dp=4, pp=2), iterations=14, noise=0.002, work=work, pause_ms=pause,
        gc_ms=lambda slot: 0.01,
    )  # fmt: skip
    report = made.report()
    assert owner_of(report, (6,)) is owner
    assert any(LENGTHS in one.evidence for one in report.findings) == (owner is Owner.UNDECIDED)
