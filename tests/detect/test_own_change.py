"""A rank is blamed for a change only if it changed itself: else it is its peers that did."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Owner
from detect.causes.compute_owner import CHANGED
from detect.stats.search import peers_changed
from megascan.topology import Layout

CHANGE = 16


def test_peers_that_become_slow_do_not_accuse_the_one_that_stays_as_it_was(job):
    """Rank 2 takes a fifth longer than the others until these slow down, each by its own factor."""
    later = {0: 1.7, 1: 1.2, 2: 1.15, 3: 1.6}

    def cores(slot):
        if slot.rank == 2:
            return 1.15
        return later[slot.rank] if slot.iteration >= CHANGE else 1.0

    report = job(layout=Layout(dp=4), work=cores, iterations=30).report()
    assert not [one for one in report.findings if 2 in one.ranks and one.owner == Owner.NODE]


def test_a_fault_that_ends_is_still_the_ranks(job, slow):
    report = job(layout=Layout(dp=4), work=slow(2, 1.2, last=CHANGE - 1), iterations=30).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((2,), Owner.NODE)
    assert finding.last_iteration == CHANGE - 1


def test_one_of_a_pair_that_is_slow_beside_all_stages_is_named_whatever_its_peer_does(job):
    """Rank 2 is slow throughout, its only peer from the change on."""

    def both(slot):
        slows = slot.rank == 2 or (slot.rank == 3 and slot.iteration >= 8)
        return 1.6 if slows else 1.0

    report = job(layout=Layout(dp=2, pp=4), layers=2, work=both, iterations=30).report()
    (found,) = [one for one in report.findings if one.owner == Owner.NODE]
    assert found.ranks == (2,)
    assert found.slowdown == pytest.approx(1.6, rel=0.02)


@pytest.mark.parametrize(("own", "by_peers"), [
    ([0.0] * 10, True),
    ([0.3] * 5 + [0.0] * 5, False),
    ([0.0] * 5 + [0.3] * 5, True),  # the other way round
    ([0.9, -0.8, 0.7, -0.9, 0.1, -0.7, 0.9, -0.8, 0.8, -0.3], False),  # data vary: nothing is shown
])  # fmt: skip
def test_what_a_rank_shows_itself_decides(own, by_peers):
    value = np.array([0.3] * 5 + [0.0] * 5)
    noise = 0.01 * np.random.default_rng(0).standard_normal(10)
    assert peers_changed(value, np.array(own) + noise, value > 0) == by_peers


def test_a_whole_window_has_no_change():
    value = np.full(6, 0.3)
    assert not peers_changed(value, np.zeros(6), value > 0)


@pytest.mark.parametrize("is_device", [True, False])
def test_documents_that_are_longer_in_some_iterations_differ_from_each_other(job, is_device):
    """The rank's step tells nothing. Its documents lengthen both passes of a microbatch, each by as
    much as it is longer; a device, all by one factor.
    """

    def work(slot):
        if slot.rank != 5 or slot.iteration < CHANGE or slot.name == "optimizer":
            return 1.0
        place = (slot.iteration, slot.microbatch)
        return 1.25 if is_device else float(np.random.default_rng(place).uniform(1.05, 1.45))

    report = job(layout=Layout(dp=8), work=work, iterations=24).report()
    words = " ".join(sentence for one in report.findings for sentence in one.evidence)
    assert (CHANGED in words) is is_device
