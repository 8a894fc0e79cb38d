"""With one peer: decided where something else decides, undecided otherwise, with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Cause, Owner, Verdict
from detect.causes.ordinary import _other_stages_differ_alike
from detect.observe.extract import observe
from detect.stats.noise import Usual, estimate_noise
from detect.stats.stretches import best_stretches
from megascan.topology import Layout


def data_like(rank: int, factor: float):
    """Slows the passes and leaves the optimizer alone, as longer data would."""
    return lambda slot: factor if slot.rank == rank and slot.name != "optimizer" else 1.0


def test_optimizer_that_agrees_decides(job, slow):
    report = job(layout=Layout(dp=2), work=slow(1, 1.2)).report()
    finding = report.findings[0]
    assert (finding.ranks, finding.owner) == ((1,), Owner.NODE)
    assert any("optimizer" in sentence for sentence in finding.evidence)


def test_passes_alone_leave_a_data_parallel_pair_undecided(job):
    report = job(layout=Layout(dp=2), work=data_like(1, 1.2)).report()
    assert report.verdict == Verdict.UNDECIDED
    finding = report.findings[0]
    assert (finding.cause, finding.owner) == (Cause.COMPUTE, Owner.UNDECIDED)
    assert any("decides" in sentence for sentence in finding.evidence)


def test_tensor_parallel_pair_shares_its_data(job):
    report = job(layout=Layout(tp=2), work=data_like(0, 1.2)).report()
    assert (report.findings[0].ranks, report.findings[0].owner) == ((0,), Owner.NODE)


@pytest.mark.parametrize(("ep", "owner"), [(1, Owner.NODE), (2, Owner.UNDECIDED)])
def test_onset_inside_the_trace_decides_where_no_router_sends_more(job, ep, owner):
    def late(slot):
        grows = slot.rank == 1 and slot.iteration >= 12 and slot.name != "optimizer"
        return 1.2 if grows else 1.0

    report = job(layout=Layout(dp=2, ep=ep), work=late).report()
    finding = report.findings[0]
    assert (finding.ranks, finding.owner, finding.first_iteration) == ((1,), owner, 12)
    assert finding.onset_in_trace


def test_other_stages_of_the_replica_exclude_the_data(job):
    report = job(layout=Layout(dp=2, pp=2), work=data_like(3, 1.2)).report()
    assert (report.findings[0].ranks, report.findings[0].owner) == ((3,), Owner.NODE)


def test_a_replica_that_is_slow_at_all_stages_stays_undecided(job):
    def replica(slot):
        return 1.2 if slot.replica == 1 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=2, pp=2), work=replica).report()
    assert report.verdict != Verdict.DEGRADED


def test_layers_of_other_stages_show_which_of_two_is_odd(job):
    report = job(layout=Layout(dp=2, pp=2), layers=2, work=data_like(2, 1.2)).report()
    finding = report.findings[0]
    assert (finding.ranks, finding.owner) == ((2,), Owner.NODE)
    assert any("transformer layers of all stages" in sentence for sentence in finding.evidence)


@pytest.mark.parametrize("seed", range(5))
def test_healthy_pairs_are_silent(job, seed):
    assert job(layout=Layout(dp=2), seed=seed).report().verdict == Verdict.HEALTHY


def test_layers_of_a_whole_replica_may_be_its_data(job):
    """Both ranks of the replica are 8 % slower than all others, and optimizers differ by 6 %."""

    def replica(slot):
        if slot.replica == 0:
            return 1.0
        return 1.06 if slot.name == "optimizer" else 1.08

    report = job(layout=Layout(dp=2, pp=2), layers=2, work=replica).report()
    assert report.findings and {one.owner for one in report.findings} == {Owner.UNDECIDED}


@pytest.mark.parametrize(("effect", "is_alike"), [(0.077, True), (0.2, False)])
def test_other_stages_are_compared_with_the_other_replica_s(job, effect, is_alike):
    """Against all stages they are above the typical by less than half of what the last one is."""
    members = observe(job(layout=Layout(dp=2, pp=4)).timeline()).members
    level = np.array([0.026, -0.013, 0.038, -0.033, 0.043, -0.011, 0.061, -0.036])
    assert _other_stages_differ_alike(members, level, 6, 7, effect) == is_alike
    sound = np.where(np.arange(8) == 6, level, 0.0)
    assert not _other_stages_differ_alike(members, sound, 6, 7, effect)


@pytest.mark.parametrize("rises", [True, False], ids=["gets hotter", "data drift"])
def test_one_of_two_that_gets_slower_all_over_the_window_is_named(job, rises):
    """Steps of a ramp are alike, those of noise are not; where both rise, no device is slower."""

    def hotter(slot):
        is_slow = slot.name != "optimizer" and (slot.rank == 1 or not rises)
        return 1.0 + 0.02 * max(0, slot.iteration - 10) if is_slow else 1.0

    report = job(layout=Layout(dp=2), work=hotter, noise=0.001).report()
    named = [one.ranks for one in report.findings if one.owner == Owner.NODE]
    assert named == ([(1,)] if rises else [])


def test_the_mirror_of_one_of_two_says_nothing_of_how_often_sound_ranks_are_slow():
    value = np.array([0.0, 0.0, 0.001, 0.08, 0.14, 0.195, 0.196, 0.195, 0.197])
    value = np.stack([-value, value])
    usual = Usual(floor=0.002, spread=0.004, tail_degrees=3)
    nobody = np.zeros(2, dtype=bool)
    noise = estimate_noise(value, nobody, usual)
    alone, paired = (
        best_stretches(value, noise, 4, nobody, groups=groups)[1].p_value
        for groups in ((), (np.array([0, 1]),))
    )
    assert paired < 1e-6 < alone
