"""A device that comes and goes lengthens one pass of a microbatch; its data lengthen both."""

from __future__ import annotations

import numpy as np
import pytest

from detect import Cause, Owner
from detect.causes.pass_hits import _of_one_slot
from megascan.topology import Layout

QUIET = 0.003
SLOW = 1.4


def uneven(slot):
    """Return how long the data of a pass are, the same for both passes of a microbatch."""
    place = (slot.rank, slot.iteration, slot.microbatch)
    return float(np.exp(np.random.default_rng(place).normal(0.0, 0.25)))


def is_hit(slot):
    """Return whether rank 3 is slow then: in a third of the passes, of whatever kind."""
    place = (slot.iteration, slot.microbatch, int(slot.phase == "backward"))
    return slot.rank == 3 and np.random.default_rng(place).random() < 1.0 / 3.0


def cut(slot):
    """Slow passes begin and end between the two of a microbatch."""
    return uneven(slot) * (SLOW if is_hit(slot) else 1.0)


def longer(slot):
    """Rank 3 gets longer data in a third of its microbatches."""
    place = (slot.iteration, slot.microbatch)
    is_long = slot.rank == 3 and np.random.default_rng(place).random() < 1.0 / 3.0
    return uneven(slot) * (SLOW if is_long else 1.0)


def noisy(slot):
    """Passes of rank 3 vary by themselves, all the while."""
    place = (slot.iteration, slot.microbatch, int(slot.phase == "backward"))
    own = np.random.default_rng(place).normal(0.0, 0.1) if slot.rank == 3 else 0.0
    return uneven(slot) * float(np.exp(own))


def several(slot):
    """Passes of ranks 3 and 5 are cut: of several ranks it is their machines."""
    place = (slot.rank, slot.iteration, slot.microbatch, int(slot.phase == "backward"))
    is_slow = slot.rank in (3, 5) and np.random.default_rng(place).random() < 1.0 / 3.0
    return uneven(slot) * (SLOW if is_slow else 1.0)


def but_optimizer(work):
    """Return the same, without the optimizer, which gets no data."""
    return lambda slot: 1.0 if slot.name == "optimizer" else work(slot)


@pytest.mark.parametrize("layout", [Layout(dp=6), Layout(dp=6, ep=2)], ids=["dense", "experts"])
def test_a_device_that_comes_and_goes_is_named_whatever_its_data(job, layout):
    made = job(layout=layout, iterations=8, noise=QUIET, work=but_optimizer(cut))
    report = made.report()
    assert [(one.ranks, one.cause) for one in report.findings if one.owner is Owner.NODE] == [
        ((3,), Cause.COMPUTE)
    ]


@pytest.mark.parametrize("work", [longer, noisy, several])
def test_what_data_and_noise_do_names_nobody(job, work):
    made = job(layout=Layout(dp=6), iterations=8, noise=QUIET, work=but_optimizer(work))
    assert not [one for one in made.report().findings if one.owner is Owner.NODE]


def test_who_waits_unseen_for_a_slow_rank_that_shares_its_experts_is_not_named(job, slow, together):
    """Rank 2 is slow for good; rank 3 waits for it now in this pass and now in that."""
    made = job(layout=Layout(dp=6, ep=2), iterations=8, noise=QUIET)
    work = together(slow(2, 1.5), but_optimizer(cut))
    named = [one.ranks for one in made.but(work=work).report().findings if one.owner is Owner.NODE]
    assert (2,) in named and (3,) not in named


@pytest.mark.parametrize(
    ("slots", "kept"),
    [([0] * 8, 0), ([0, 1, 2, 3, 4, 5, 0, 3], 8), ([0] * 9 + [3], 1)],
    ids=["one slot", "any", "mostly one"],
)
def test_a_device_that_comes_and_goes_chooses_no_slot_of_the_schedule(slots, kept):
    hits = np.zeros((1, 12, 6), dtype=bool)
    hits[0, np.arange(len(slots)), slots] = True
    assert (hits & ~_of_one_slot(hits)).sum() == kept
