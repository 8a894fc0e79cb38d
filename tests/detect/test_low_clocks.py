"""A clock far below those of all other devices names its device, whatever its passes show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout

HEAT, POWER_CAP, AT_REST = 0x40, 0x4, 0x1


def _readings(low, num_ranks=8, **changes):
    """Return readings of so many devices, those of `low` ranks changed."""
    usual = {
        "sm_clock_max_mhz": 1980.0, "clock_event_reasons": 0.0, "power_w": 600.0,
    }  # fmt: skip
    readings = {
        rank: usual | {"sm_clock_mhz": 1965.0 + 15.0 * (rank % 2), "power_w": 600.0 + rank}
        for rank in range(num_ranks)
    }
    for rank in low:
        readings[rank] |= changes
    return readings


def _varied(slow=(), factor=1.0):
    """Documents whose lengths differ by a half from one iteration and replica to the next; `slow`
    ranks take so many times as long in passes.
    """

    def work(slot):
        if slot.name == "optimizer":
            return 1.0
        documents = np.random.default_rng(100 * slot.iteration + slot.rank).uniform(1.0, 1.5)
        return documents * (factor if slot.rank in slow else 1.0)

    return work


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({"sm_clock_mhz": 1725.0}, True),
        ({"sm_clock_mhz": 1725.0, "clock_event_reasons": POWER_CAP, "power_w": 480.0}, True),
        ({"sm_clock_mhz": 1725.0, "clock_event_reasons": POWER_CAP, "power_w": 640.0}, False),
        ({"sm_clock_mhz": 1725.0, "clock_event_reasons": AT_REST}, False),
        ({"sm_clock_mhz": 1935.0}, False),
    ],
    ids=["far lower", "and draws less", "works more", "rests", "hardly lower"],
)
def test_a_clock_far_below_all_others_names_its_device(job, changes, is_named):
    report = job(
        layout=Layout(dp=8), iterations=14, work=_varied([3], 1.15),
        counters=_readings([3], **changes),
    ).report()  # fmt: skip
    of_node = [(one.ranks, one.cause) for one in report.findings if one.owner == Owner.NODE]
    assert of_node == ([((3,), Cause.COMPUTE)] if is_named else [])


@pytest.mark.parametrize(("holds_waits", "named"), [(False, []), (True, [(3,)])])
def test_a_low_clock_that_slows_nothing_names_nobody(job, holds_waits, named):
    """All ranks compute alike within 2 %: the reading was of another time, unless all wait for the
    slow one inside their passes.
    """
    seen = observe(job(layout=Layout(dp=8), iterations=14).timeline())
    told = replace(
        seen,
        counters=_readings([3], sm_clock_mhz=1725.0),
        waits_between_layers=holds_waits,
    )
    found = judge(told, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner == Owner.NODE] == named


@pytest.mark.parametrize(
    ("reason", "hosts", "named"),
    [(HEAT, 4, {0, 1, 2, 3}), (0, 4, set()), (HEAT, 2, set())],
    ids=["of one host, hot", "no reason", "of two hosts"],
)
def test_devices_of_a_host_that_are_held_down_together_are_named(job, reason, hosts, named):
    changes = {"sm_clock_mhz": 1500.0, "clock_event_reasons": reason}
    report = job(
        layout=Layout(dp=8), iterations=14, hosts=hosts, work=_varied(range(4), 1.3),
        counters=_readings(range(4), **changes),
    ).report()  # fmt: skip
    found = {rank for one in report.findings if one.owner == Owner.NODE for rank in one.ranks}
    assert found == named


@pytest.mark.parametrize(("clock", "is_named"), [(1620.0, True), (1665.0, False)])
def test_the_lowest_clock_of_many_that_differ_may_be_a_sound_ones(job, clock, is_named):
    clocks = (1830, 1725, 1770, 1740, 1815, 1770, 1755, 1800, 1740, 1770, 1770, clock, 1725, 1800)
    readings = {rank: {"sm_clock_mhz": float(one)} for rank, one in enumerate(clocks)}
    work = _varied([11], 1755 / clock)
    report = job(layout=Layout(dp=14), iterations=14, work=work, counters=readings).report()
    of_node = [one.ranks for one in report.findings if one.owner == Owner.NODE]
    assert of_node == ([(11,)] if is_named else [])


@pytest.mark.parametrize(("clock", "is_named"), [(1600.0, True), (1850.0, False)])
def test_beside_few_others_a_clock_must_be_a_tenth_lower(job, clock, is_named):
    readings = _readings([3], num_ranks=4, sm_clock_mhz=clock)
    report = job(
        layout=Layout(dp=4), iterations=14, work=_varied([3], 1.2), counters=readings
    ).report()  # fmt: skip
    of_node = [one.ranks for one in report.findings if one.owner == Owner.NODE]
    assert of_node == ([(3,)] if is_named else [])


@pytest.mark.parametrize(
    ("clock", "reason", "is_named"),
    [(1600.0, HEAT, True), (1600.0, 0, False), (1600.0, POWER_CAP, False), (1850.0, HEAT, False)],
    ids=["hot", "no reason", "at its power limit", "hardly lower"],
)
def test_one_of_two_is_named_by_a_reason_that_only_it_has(job, clock, reason, is_named):
    """Passes hold waiting for the slower one, so that both look alike."""
    readings = _readings([1], 2, sm_clock_mhz=clock, clock_event_reasons=reason)
    made = job(layout=Layout(dp=2), iterations=14, counters=readings)
    seen = replace(observe(made.timeline()), hides_waiting=True)
    found = judge(seen, DetectorSettings()).findings
    assert [one.ranks for one in found if one.owner is Owner.NODE] == ([(1,)] if is_named else [])
    words = "its clock is 1600 MHz, beside 1 device of its model at 1965 MHz"
    assert any(words in one.evidence[0] for one in found) == is_named


@pytest.mark.parametrize(
    ("layout", "slow"), [(Layout(dp=8), (5,)), (Layout(pp=2, dp=4), (4, 5, 6, 7))],
    ids=["its own passes", "those of its stage"],
)  # fmt: skip
def test_a_low_clock_explains_passes_that_may_hold_waiting_for_its_device(job, layout, slow):
    """They take less longer than it is low by, and all of its stage wait inside them."""
    factor = 1.1 if len(slow) == 1 else 1.15

    def work(slot):
        return factor if slot.rank in slow and slot.name != "optimizer" else 1.0

    seen = observe(job(layout=layout, iterations=14, work=work).timeline())
    told = replace(seen, counters=_readings([5], sm_clock_mhz=1500.0), waits_between_layers=True)
    (finding,) = judge(told, DetectorSettings()).findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.NODE)
