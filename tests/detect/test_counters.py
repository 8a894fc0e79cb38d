"""Device readings beside the peers': reasons are a mask, temperatures differ by their slot."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.ordinary import _clock_stands_out
from detect.causes.readings import braked, held_down
from detect.detector import judge
from detect.observe.extract import observe
from megascan.topology import Layout

NORMAL = {
    "sm_clock_mhz": 1980.0,
    "clock_event_reasons": 4.0,
    "temperature_c": 38.0,
    "power_w": 610.0,
}
HOT = 0x40


@pytest.mark.parametrize(
    ("reading", "sentence"),
    [
        ({"clock_event_reasons": 0.0}, "equal its peers'"),
        ({"clock_event_reasons": 1.0}, "equal its peers'"),
        ({"temperature_c": 49.0}, "equal its peers'"),
        ({"temperature_c": 80.0}, "temperature_c is 80 against its peers' 38"),
        ({"clock_event_reasons": 72.0}, "hardware slowdown and hardware thermal slowdown"),
        ({"sm_clock_mhz": 1200.0}, "sm_clock_mhz is 1200 against its peers' 1980"),
    ],
)
def test_only_telling_readings_are_evidence(job, slow, reading, sentence):
    counters = {rank: dict(NORMAL) for rank in range(4)}
    counters[1] |= reading
    report = job(layout=Layout(dp=4), work=slow(1, 1.5), counters=counters, iterations=8).report()
    assert sentence in " ".join(report.findings[0].evidence)


@pytest.mark.parametrize(
    ("reading", "owner"),
    [
        ({"sm_clock_mhz": 1380.0, "clock_event_reasons": 8.0}, Owner.NODE),
        ({"sm_clock_mhz": 1380.0}, Owner.UNDECIDED),  # at its power limit: the work may be why
        ({"sm_clock_mhz": 1380.0, "clock_event_reasons": 12.0}, Owner.NODE),  # and a brake
        ({"sm_clock_mhz": 1380.0, "clock_event_reasons": 1.0}, Owner.UNDECIDED),  # at rest
        ({"sm_clock_mhz": 1890.0, "clock_event_reasons": 8.0}, Owner.UNDECIDED),  # by 5 % of 43 %
        ({"clock_event_reasons": 8.0}, Owner.UNDECIDED),
        ({"sm_clock_mhz": 1380.0, "power_w": 420.0}, Owner.NODE),  # at a limit that is lower
        ({"sm_clock_mhz": 1380.0, "power_w": 580.0}, Owner.UNDECIDED),
        ({"sm_clock_mhz": 1380.0, "power_w": 420.0, "clock_event_reasons": 1.0}, Owner.UNDECIDED),
        (
            {"sm_clock_mhz": 800.0, "clock_event_reasons": 128.0},
            Owner.NODE,
        ),  # by 147 % now and then
        ({"sm_clock_mhz": 800.0, "clock_event_reasons": 0.0}, Owner.UNDECIDED),
    ],
)
def test_a_clock_as_low_as_the_passes_are_slow_is_the_devices(job, reading, owner):
    """Passes 1.4 times longer and an optimizer as quick as ever: else the data may be why."""

    def longer(slot):
        return 1.4 if slot.rank == 1 and slot.name != "optimizer" else 1.0

    counters = {rank: dict(NORMAL) for rank in range(4)}
    counters[1] |= reading
    for layout in (Layout(dp=4), Layout(dp=2)):
        report = job(layout=layout, work=longer, counters=counters, iterations=8).report()
        assert [(one.ranks, one.owner) for one in report.findings] == [((1,), owner)]


@pytest.mark.parametrize(
    ("reasons", "owner"), [(0.0, Owner.UNDECIDED), (32.0, Owner.NODE)], ids=["chips", "heat"]
)
@pytest.mark.parametrize(("num_replicas", "factor"), [(2, 1.07), (3, 1.045)])
def test_a_lower_clock_alone_does_not_tell_a_fault_from_a_slower_chip(
    job, slow, num_replicas, factor, reasons, owner
):
    """One of two chips may be 7 % slower, one of three 4.5 %, by a clock that is as much lower."""
    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(num_replicas)}
    counters[1] |= {"sm_clock_mhz": 1980.0 / factor, "clock_event_reasons": reasons}
    made = job(layout=Layout(dp=num_replicas), work=slow(1, factor), counters=counters)
    assert [(one.ranks, one.owner) for one in made.report().findings] == [((1,), owner)]


@pytest.mark.parametrize(
    ("reasons", "owner"), [(0.0, Owner.UNDECIDED), (64.0, Owner.NODE)], ids=["chips", "heat"]
)
def test_heat_that_holds_down_half_of_the_devices_is_no_slower_chips(job, reasons, owner):
    """Both devices of a host, of two hosts: what holds one down is no usual reason for the other.
    Of one host alone two chips may be 7 % slower than two others.
    """
    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(4)}
    for rank in (0, 1):
        counters[rank] |= {"sm_clock_mhz": 1850.0, "clock_event_reasons": reasons}

    def work(slot):
        return 1.07 if slot.rank < 2 and slot.name != "optimizer" else 1.0

    made = job(layout=Layout(dp=4), counters=counters, work=work)
    found = [(one.ranks, one.owner) for one in made.report().findings]
    assert sorted(found) == [((0,), owner), ((1,), owner)]


@pytest.mark.parametrize(
    ("clocks", "stands_out"),
    [
        ((1980, 1965, 1980, 1995, 1980, 1965, 1980), True),
        ((1980, 1830, 2040, 1905, 2100, 1860, 1995), False),
        ((1980, 1965, 1980), True),
        ((1930, 1915, 1930), False),
        ((1980, 1920, 1995), False),
        ((1980, 1980), False),
    ],
    ids=[
        "seven alike",
        "as different as chips are",
        "three alike",
        "7 %",
        "three that differ",
        "two",
    ],
)
def test_a_clock_that_stands_out_from_others_is_no_slower_chips(clocks, stands_out):
    """1800 MHz: 9 % below the others' median. Beside fewer than seven it must be 8 %."""
    counters = {rank: {"sm_clock_mhz": float(one)} for rank, one in enumerate((1800, *clocks))}
    workers = tuple((rank,) for rank in counters)
    case = SimpleNamespace(
        seen=SimpleNamespace(counters=counters, members=SimpleNamespace(workers=workers))
    )
    assert _clock_stands_out(case, 0) is stands_out


@pytest.mark.parametrize(
    ("typical", "own", "owner"),
    [
        ({"sm_clock_max_mhz": 2100.0}, {"sm_clock_mhz": 1480.0}, Owner.NODE),
        ({"sm_clock_max_mhz": 1980.0}, {"sm_clock_mhz": 1480.0}, Owner.UNDECIDED),
        ({}, {"sm_clock_mhz": 1480.0, "power_w": 540.0}, Owner.NODE),
        ({}, {"sm_clock_mhz": 1480.0, "power_w": 585.0}, Owner.UNDECIDED),
    ],
    ids=["all are held down", "the others may rest", "a lower limit", "as much power"],
)
def test_at_its_limit_a_device_must_stand_out_from_others_that_are_held_down(
    job, typical, own, owner
):
    """Its clock, or the power that it draws at its limit, lies far below what all others show."""

    def longer(slot):
        return 1.3 if slot.rank == 3 and slot.name != "optimizer" else 1.0

    counters = {
        rank: NORMAL
        | typical
        | {"sm_clock_mhz": 1965.0 + 15.0 * (rank % 3), "power_w": 600.0 + rank}
        for rank in range(8)
    }
    counters[3] = counters[3] | own
    report = job(layout=Layout(dp=8), work=longer, counters=counters, iterations=8).report()
    assert [(one.ranks, one.owner) for one in report.findings] == [((3,), owner)]


def test_a_brake_that_meets_one_pass_only_is_the_devices(job):
    """It comes and goes: the forward passes are longer, the backward passes are not."""

    def braked(slot):
        return 1.3 if slot.rank == 1 and slot.phase == "forward" else 1.0

    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(4)}
    run = job(layout=Layout(dp=4), work=braked, counters=counters, iterations=30)
    assert [one.owner for one in run.report().findings] == [Owner.UNDECIDED]
    counters[1] = counters[1] | {"sm_clock_mhz": 990.0, "clock_event_reasons": 128.0}
    (finding,) = run.but(counters=counters).report().findings
    assert (finding.ranks, finding.owner, finding.cause) == ((1,), Owner.NODE, Cause.COMPUTE)


@pytest.mark.parametrize(
    ("changes", "owner", "cause"),
    [
        ({"sm_clock_mhz": 1350.0, "clock_event_reasons": 128.0}, Owner.NODE, Cause.COMPUTE),
        ({"sm_clock_mhz": 1350.0}, Owner.UNDECIDED, Cause.HOST),
        ({}, Owner.UNDECIDED, Cause.HOST),
    ],
    ids=["a brake", "a low clock, as of a device with little to do", "nothing"],
)
def test_a_braked_device_is_no_fault_of_hosts_that_are_all_late(job, changes, owner, cause):
    """All work comes just in time on all ranks, and one takes 1.42 times as long as its peers: more
    than hosts of one model differ by.
    """
    usual = {"sm_clock_mhz": 1980.0, "clock_event_reasons": 0.0}
    counters = {rank: usual | (changes if rank == 5 else {}) for rank in range(8)}
    longer = job(layout=Layout(dp=8), counters=counters,
                 work=lambda slot: 1.42 if slot.rank == 5 else 1.0)  # fmt: skip
    seen = observe(longer.timeline())
    starved = np.full(seen.busy_ns.shape, 1.0)
    found = judge(replace(seen, starved_share=starved), DetectorSettings()).findings
    assert [(one.ranks, one.owner, one.cause) for one in found] == [((5,), owner, cause)]


def test_a_brake_that_holds_in_a_part_of_each_iteration_is_the_devices(job):
    """Three of eight microbatches take 1.5 times as long: no typical pass, and no burst either."""

    def braked(slot):
        return 1.5 if slot.rank == 5 and slot.microbatch in (0, 1, 2) else 1.0

    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(8)}
    run = job(layout=Layout(dp=8), work=braked, counters=counters, iterations=10)
    (finding,) = run.report().findings
    assert (finding.ranks, finding.owner) == ((5,), Owner.UNDECIDED)
    counters[5] = counters[5] | {"sm_clock_mhz": 990.0, "clock_event_reasons": 128.0}
    (finding,) = run.but(counters=counters).report().findings
    assert (finding.ranks, finding.owner, finding.cause) == ((5,), Owner.NODE, Cause.COMPUTE)
    assert "on the mean" in finding.headline


def test_a_host_whose_clocks_are_low_is_given_no_longer_data(job):
    """It holds whole replicas, whose documents may be longer, until its clocks are read."""

    def longer(slot):
        return 1.2 if slot.rank in (4, 5, 6, 7) and slot.name != "optimizer" else 1.0

    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(16)}
    run = job(layout=Layout(dp=16), hosts=4, work=longer, counters=counters, iterations=8)
    assert not [one for one in run.report().findings if one.owner == Owner.NODE]
    hot = {"sm_clock_mhz": 1650.0, "clock_event_reasons": 64.0}
    counters |= {rank: counters[rank] | hot for rank in (4, 5, 6, 7)}
    (finding,) = run.but(counters=counters).report().findings
    assert (finding.ranks, finding.owner) == ((4, 5, 6, 7), Owner.NODE)
    assert any("1650 MHz against 1980 MHz" in one for one in finding.evidence)
    counters[6] = counters[6] | {"sm_clock_mhz": 1980.0}
    found = run.but(counters=counters).report().findings
    assert not [one for one in found if 6 in one.ranks and one.owner == Owner.NODE]


def test_of_a_group_that_waits_for_one_its_clock_tells_which(job):
    """Granularity base: all of a TP group take as long in their passes as the slowest of them."""

    def longer(slot):
        return 1.4 if slot.rank in (2, 3) and slot.name != "optimizer" else 1.0

    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(8)}
    run = job(layout=Layout(tp=2, dp=4), work=longer, counters=counters, iterations=8)

    def named(low, mates_mhz=1980.0):
        read = counters | {2: counters[2] | {"sm_clock_mhz": mates_mhz}}
        read |= {rank: counters[rank] | {"sm_clock_mhz": 1380.0} for rank in low}
        seen = replace(observe(run.but(counters=read).timeline()), splits_tensor_groups=False)
        return [(one.ranks, one.owner) for one in judge(seen, DetectorSettings()).findings]

    assert named([]) == named([2, 3]) == [((2, 3), Owner.UNDECIDED)]
    assert named([3]) == [((3,), Owner.NODE)]
    # lower still, by more than the passes are slow: who waits for whom is not known
    assert named([3], mates_mhz=700.0) == [((2, 3), Owner.UNDECIDED)]


def test_a_stage_with_a_low_clock_is_no_heavy_stage(job):
    def slower(slot):
        return 1.4 if slot.rank == 1 else 1.0

    counters = {rank: NORMAL | {"clock_event_reasons": 0.0} for rank in range(4)}
    pipeline = job(layout=Layout(pp=4), layers=3, work=slower, counters=counters)
    assert not [one for one in pipeline.report().findings if one.owner == Owner.NODE]
    counters[1] = counters[1] | {"sm_clock_mhz": 1420.0}
    (finding,) = pipeline.but(counters=counters).report().findings
    assert (finding.ranks, finding.owner) == ((1,), Owner.NODE)
    assert any("1420 MHz against 1980 MHz" in one for one in finding.evidence)


@pytest.mark.parametrize(
    ("clock", "theirs", "reason", "is_held"),
    [
        (1500.0, 0, HOT, True),
        (1500.0, HOT, HOT, True),  # far below them, whatever holds all of them down
        (1900.0, 0, HOT, True),
        (1900.0, HOT, HOT, False),
        (1900.0, 0, 0, False),
    ],
)
def test_what_holds_down_sound_devices_as_well_is_no_reason(job, clock, theirs, reason, is_held):
    readings = {rank: NORMAL | {"clock_event_reasons": float(theirs)} for rank in range(4)}
    readings[1] = NORMAL | {"sm_clock_mhz": clock, "clock_event_reasons": float(reason)}
    seen = observe(job(layout=Layout(dp=4), iterations=4, counters=readings).timeline())
    slow = np.arange(4) == 1
    assert held_down(seen, slow, 1) is is_held
    assert braked(seen, slow, 1) is (reason == HOT and not theirs)
