"""Hosts whose TCP connections carry little while busy, of rings that take as long for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Owner, Report
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.machines import Carried
from detect.observe.observations import Observations
from megascan.simulate import JobModel, compute_bound, simulate_trace
from megascan.topology import Layout

MBIT = 1e6 / 8 / 1e9
"""Bytes per ns of a Mbit/s."""


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


def replicas(num_hosts: int, ranks_each: int = 1) -> Observations:
    """Replicas on hosts n00, n01, …; a fifth of each iteration is computing."""
    layout = Layout(dp=num_hosts * ranks_each)
    job = JobModel(layout=layout, costs=compute_bound(layout), ranks_per_host=ranks_each)
    seen = observe(build_timeline(simulate_trace(job, seed=1)))
    return replace(seen, busy_ns=seen.busy_ns * 0.2)


@pytest.fixture(scope="module")
def four() -> Observations:
    return replicas(4)


def host(number: int) -> str:
    return f"n{number:02d}"


Speeds = dict[tuple[int, int], float]


def ring(num_hosts: int, *, usual: float = 400.0, **slow: float) -> Speeds:
    """Mbit/s of a ring 0 > 1 > 2 …, of which `_1_2=200` is one way."""
    speeds = {(one, (one + 1) % num_hosts): usual for one in range(num_hosts)}
    for name, speed in slow.items():
        _, sender, receiver = name.split("_")
        speeds[int(sender), int(receiver)] = speed
    return speeds


def carried(
    speeds: Speeds, *, share: float = 0.5, num_bytes: dict[tuple[int, int], float] | None = None
) -> tuple[Carried, ...]:
    """What ways carry over 10 s: of the fastest way for `share` of the time, each as many bytes."""
    of_ns, noise = 10_000_000_000, np.random.default_rng(1)
    most = share * of_ns * max(speeds.values()) * MBIT
    found = []
    for ends, speed in speeds.items():
        count = (num_bytes or {}).get(ends, 1.0) * most
        busy_ns = count / (speed * MBIT * noise.normal(1.0, 0.02))
        found.append(
            Carried(
                rank=ends[0],
                iterations=(1, 20),
                sender=host(ends[0]),
                receiver=host(ends[1]),
                num_bytes=int(count),
                busy_ns=int(busy_ns),
                of_ns=of_ns,
            )
        )
    return tuple(found)


def judged(seen: Observations, *each: tuple[Carried, ...]) -> Report:
    told = tuple(one for some in each for one in some)
    return judge(replace(seen, carried=told), DetectorSettings())


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


def test_the_slow_port_of_a_ring_is_the_host_between_two_slow_ways(four):
    report = judged(four, carried(ring(4, _1_2=200, _2_3=190), share=0.2))
    assert owners(report) == [((2,), Cause.LINK, Owner.NODE)]
    (finding,) = report.findings
    assert finding.slowdown == pytest.approx(2.05**0.5, rel=0.03)
    assert finding.host == "n02"
    assert "the network of host n02 (ranks 2) carries 2.01x less" in finding.headline
    (words,) = [one for one in finding.evidence if "Linux counts" in one]
    assert "n01 to n02 19" in words or "n01 to n02 20" in words
    assert "what is not slow 39" in words or "what is not slow 4" in words
    # busy for 42 % of the time, of which less than half is for the port
    assert finding.step_time_cost_ratio == pytest.approx(
        1 / (1 - 0.42 * (1 - 2.05**-0.5)), rel=0.03
    )
    assert not finding.cost_is_replayed


def test_all_ranks_of_the_host_are_one_finding():
    seen = replicas(4, ranks_each=2)
    report = judged(seen, carried(ring(4, _1_2=200, _2_3=190)))
    assert owners(report) == [((4, 5), Cause.LINK, Owner.NODE)]


@pytest.mark.parametrize(
    ("speeds", "why"),
    [
        (ring(4), "all as quick"),
        (ring(4, usual=50), "all as slow"),
        (ring(4, _1_2=330, _2_3=330), "slower by a little"),
        (ring(2, _0_1=100), "of two hosts either may be it"),
        ({(0, 1): 100.0, (1, 0): 100.0, (1, 2): 400.0, (2, 1): 400.0}, "a neighbour only"),
        (ring(4, _1_2=100, _3_0=100), "two ways without a host in common"),
    ],
)
def test_nobody_is_named(four, speeds, why):
    report = judged(four, carried(speeds))
    assert not [one for one in report.findings if one.owner is Owner.NODE], why


def test_one_slow_way_may_be_either_ends(four):
    report = judged(four, carried(ring(4, _1_2=200)))
    assert owners(report) == [((1, 2), Cause.LINK, Owner.UNDECIDED)]
    assert any("the port of either may be slow" in one for one in report.findings[0].evidence)


@pytest.mark.parametrize(
    "speeds",
    [
        ring(4, _2_3=34, _1_2=108, _0_1=370, _3_0=620),
        ring(4, _0_1=50, _3_0=142, _2_3=290, _1_2=390),
    ],
)
def test_beside_a_slow_connection_of_a_ring_the_way_to_its_sender_rests(four, speeds):
    """Recorded: connections at a third. A port holds both of its ways back as much."""
    report = judged(four, carried(speeds))
    slow = min(speeds, key=speeds.__getitem__)
    assert owners(report) == [(slow, Cause.LINK, Owner.UNDECIDED)]


def test_two_slow_ways_between_the_same_hosts_may_be_either_ends(four):
    """Recorded: two pipelines of two hosts; one port sends slowly, and what confirms is late."""
    speeds = {(0, 1): 192.0, (1, 0): 195.0, (2, 3): 75.0, (3, 2): 70.0}
    report = judged(four, carried(speeds))
    assert owners(report) == [((2, 3), Cause.LINK, Owner.UNDECIDED)]


def mesh(num_hosts: int, usual: float = 400.0) -> Speeds:
    return {
        (one, other): usual
        for one in range(num_hosts)
        for other in range(num_hosts)
        if one != other
    }


def test_a_way_whose_ends_are_quick_elsewhere_is_the_connection(four):
    report = judged(four, carried(mesh(4) | {(1, 2): 200.0}))
    assert owners(report) == [((1, 2), Cause.LINK, Owner.NODE)]
    assert report.findings[0].is_pair


@pytest.mark.parametrize("direction", ["sends", "receives"])
def test_a_port_that_is_slow_one_way(four, direction):
    slow = {ends: 200.0 for ends in mesh(4) if (ends[0] if direction == "sends" else ends[1]) == 3}
    report = judged(four, carried(mesh(4) | slow))
    assert owners(report) == [((3,), Cause.LINK, Owner.NODE)]


def test_two_slow_ports_of_eight():
    seen = replicas(8)
    slow = {"_1_2": 200, "_2_3": 190, "_5_6": 210, "_6_7": 200}
    report = judged(seen, carried(ring(8, **slow)))
    assert sorted(owners(report)) == [
        ((2,), Cause.LINK, Owner.NODE),
        ((6,), Cause.LINK, Owner.NODE),
    ]


PIPELINE = {
    (0, 1): 68.0, (3, 2): 74.0, (1, 2): 76.0, (2, 1): 117.0, (2, 3): 126.0, (1, 0): 150.0,
}  # fmt: skip
"""Of four sound hosts, each a stage of a pipeline over gloo: its messages."""
SENDS_SLOWLY = {
    (1, 2): 133.0, (2, 0): 133.0, (2, 1): 148.0, (0, 2): 150.0, (0, 1): 332.0, (1, 0): 426.0,
}  # fmt: skip
"""Of three hosts with FSDP, host 2's port sends at half its rate: what confirms is late, too."""
AT_A_THIRD = {(2, 1): 35.0, (3, 2): 35.0, (0, 3): 201.0, (1, 0): 595.0}
"""A ring of four hosts, host 2's port at a third: the others are quicker the longer they rested."""


RING_OF_THREE = {(0, 2): 65.0, (2, 1): 63.0, (1, 0): 335.0}
"""Host 2's port at half its rate: with three hosts one way only is left to compare with."""
RECEIVES_SLOWLY = {
    (0, 1): 23.0, (2, 1): 21.0, (1, 2): 56.0, (1, 0): 62.0, (3, 2): 98.0, (2, 3): 137.0,
}  # fmt: skip
"""A pipeline of four hosts, of which host 1's port receives at a third; host 2 alone also receives
from two.
"""
LAST_STAGE_QUICK = {
    (1, 2): 74.0, (3, 2): 78.0, (0, 1): 81.0, (2, 1): 142.0, (1, 0): 150.0, (2, 3): 256.0,
}  # fmt: skip
"""The same pipeline, all its ports sound."""


@pytest.mark.parametrize(
    ("num_hosts", "speeds", "named"),
    [
        (4, PIPELINE, None),
        (4, PIPELINE | {(0, 1): 25.0}, None),
        (3, SENDS_SLOWLY, 2),
        (4, AT_A_THIRD, 2),
        (4, dict.fromkeys(ring(4), 115.0) | {(3, 2): 122.0}, None),
        (3, RING_OF_THREE, 2),
        (3, RING_OF_THREE | {(1, 0): 140.0}, None),
        (3, {(1, 0): 31.0, (2, 1): 118.0, (0, 2): 349.0}, None),
        (4, RECEIVES_SLOWLY, 1),
        (4, RECEIVES_SLOWLY | {(1, 2): 45.0}, None),
        (4, LAST_STAGE_QUICK, None),
    ],
)
def test_speeds_of_recorded_jobs(num_hosts, speeds, named):
    report = judged(replicas(num_hosts), carried(speeds))
    found = [one.ranks for one in report.findings if one.owner is Owner.NODE]
    assert found == ([] if named is None else [(named,)])


def test_the_port_is_slower_by_less_than_what_its_ways_are(four):
    """The others rest while they wait, and carry more at once than all the time."""
    (finding,) = judged(four, carried(ring(4, _1_2=100, _2_3=100))).findings
    assert finding.slowdown == pytest.approx(2.0, rel=0.03)
    assert finding.slowdown_interval == (1.0, pytest.approx(4.0, rel=0.03))


def test_of_several_gaps_the_one_that_a_host_explains_counts(four):
    """Recorded: host 0's port at a third; what its neighbour gets is slower than what is far."""
    speeds = {(0, 3): 88.0, (1, 0): 92.0, (2, 1): 245.0, (3, 2): 1251.0}
    assert owners(judged(four, carried(speeds))) == [((0,), Cause.LINK, Owner.NODE)]


def test_slow_ways_that_no_host_explains_name_nobody(four):
    """One of them begins and ends elsewhere."""
    speeds = ring(8, _1_2=200, _2_3=200, _5_6=200)
    assert not judged(replicas(8), carried(speeds)).findings


def test_ways_of_another_kind_are_no_measure(four):
    """Small messages between two stages are slow for their latency, and carry little."""
    messages = {(0, 2): 100.0, (2, 0): 100.0, (0, 3): 90.0, (3, 0): 90.0}
    few = dict.fromkeys(messages, 0.1)
    report = judged(four, carried(ring(4) | messages, num_bytes=few))
    assert not report.findings


def test_a_slow_way_that_is_hardly_used_costs_nothing(four):
    assert not judged(four, carried(ring(4, _1_2=200, _2_3=190), share=0.02)).findings


def test_a_way_that_computing_hides_costs_nothing(four):
    busy = replace(four, busy_ns=np.broadcast_to(four.iteration_ns, four.busy_ns.shape))
    assert not judged(busy, carried(ring(4, _1_2=200, _2_3=190))).findings


def test_ways_that_are_hardly_busy_say_nothing(four):
    short = carried(ring(4, _1_2=200, _2_3=190), share=0.004)
    assert not judged(four, short).findings


def test_windows_are_added_up(four):
    parts = [carried(ring(4, _1_2=200, _2_3=190), share=0.2)] * 3
    assert owners(judged(four, *parts)) == [((2,), Cause.LINK, Owner.NODE)]


def windows_of(*speeds: Speeds) -> tuple[Carried, ...]:
    """What ways carry in windows of as many iterations each, of the 20 of a job."""
    length = 20 // len(speeds)
    return tuple(
        replace(one, iterations=(place * length + 1, (place + 1) * length))
        for place, each in enumerate(speeds)
        for one in carried(each)
    )


SOUND = {(0, 1): 69.0, (3, 2): 70.0, (2, 1): 87.0, (1, 2): 88.0, (2, 3): 122.0, (1, 0): 157.0}
"""Of a pipeline of four hosts: its messages differ by their direction."""


@pytest.mark.parametrize("layout", ["ring", "pipeline"])
@pytest.mark.parametrize("slow_windows", [(2,), (1, 3), (2, 3, 4)])
def test_a_port_that_is_slow_at_times_is_told_by_its_own_past(four, layout, slow_windows):
    sound = ring(4) if layout == "ring" else SOUND
    slow = {ends: speed / 2 if 2 in ends else 1.2 * speed for ends, speed in sound.items()}
    each = [slow if place in slow_windows else sound for place in range(5)]
    (finding,) = judged(four, windows_of(*each)).findings
    assert (finding.ranks, finding.owner) == ((2,), Owner.NODE)
    assert finding.slowdown == pytest.approx(2.0, rel=0.1)
    assert (finding.first_iteration, finding.last_iteration) == (
        4 * slow_windows[0] + 1,
        4 * slow_windows[-1] + 4,
    )
    assert "less than at other times while it is busy" in finding.headline
    assert any("in other windows" in one for one in finding.evidence)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({ends: speed / 2 for ends, speed in ring(4).items()}, "all are slow then"),
        ({(1, 2): 200.0}, "either end of one way"),
        ({(1, 2): 200.0, (3, 0): 200.0}, "two ways without a host in common"),
        ({(1, 2): 320.0, (2, 3): 320.0}, "by a little"),
    ],
)
def test_nobody_is_named_for_what_changed(four, changed, why):
    report = judged(four, windows_of(ring(4), ring(4), ring(4) | changed, ring(4), ring(4)))
    assert not [one for one in report.findings if one.owner is Owner.NODE], why


def test_who_becomes_quicker_beside_a_slow_port_was_not_slow_before(four):
    """Recorded: host 1's port since the third window; hosts 0, 2 and 3 rest and burst since."""
    sound = {(3, 2): 144.0, (0, 3): 154.0, (2, 1): 158.0, (1, 0): 173.0}
    since = {(2, 1): 75.0, (1, 0): 83.0, (3, 2): 270.0, (0, 3): 400.0}
    report = judged(four, windows_of(sound, sound, since, since, since))
    assert owners(report) == [((1,), Cause.LINK, Owner.NODE)]
    assert report.findings[0].first_iteration == 9


def test_a_ring_of_three_hosts_is_told_by_its_past_or_where_the_third_way_is_quick_by_far():
    seen = replicas(3)
    sound, slow = ring(3), ring(3, _0_1=200, _1_2=200)
    assert not judged(seen, windows_of(slow, slow, slow, slow, slow)).findings
    report = judged(seen, windows_of(sound, sound, slow, slow, slow))
    assert owners(report) == [((1,), Cause.LINK, Owner.NODE)]


def test_of_two_hosts_the_past_tells_that_the_network_is_slow_but_not_whose():
    """Recorded: since iteration 13 the port of either runs at half."""
    seen = replicas(2, ranks_each=2)
    sound, slow = {(0, 1): 55.0, (1, 0): 58.0}, {(0, 1): 29.0, (1, 0): 30.0}
    report = judged(seen, windows_of(sound, sound, sound, slow, slow))
    assert owners(report) == [((0, 1, 2, 3), Cause.LINK, Owner.UNDECIDED)]
    (finding,) = report.findings
    assert finding.first_iteration == 13
    assert finding.slowdown == pytest.approx(1.9, rel=0.05)
    assert any("in other windows 5" in one for one in finding.evidence)
    assert not any("what is not slow" in one for one in finding.evidence)
    assert not judged(seen, windows_of(*[sound] * 5)).findings
    assert not judged(seen, windows_of(*[slow] * 5)).findings


def test_one_way_that_is_slow_at_times_is_either_ends(four):
    sound, slow = ring(4), ring(4, usual=430.0, _1_2=200)
    report = judged(four, windows_of(sound, sound, slow, slow, sound))
    assert owners(report) == [((1, 2), Cause.LINK, Owner.UNDECIDED)]
    assert (report.findings[0].first_iteration, report.findings[0].last_iteration) == (9, 16)


def test_what_was_carried_before_the_run_was_warm_is_left_out(four):
    """Then one way waits for a rank that still builds its model."""
    late = replace(four, iterations=four.iterations + 4)
    begin = tuple(replace(one, iterations=(1, 2)) for one in carried(ring(4, _1_2=20, _2_3=20)))
    usual = tuple(replace(one, iterations=(3, 24)) for one in carried(ring(4)))
    assert not judged(late, begin, usual).findings


def test_addresses_are_told_by_who_has_them():
    layout = Layout(dp=3)
    job = JobModel(layout=layout, costs=compute_bound(layout), ranks_per_host=1)
    timeline = build_timeline(simulate_trace(job, seed=1))
    own = {0: "10.0.0.1", 1: "10.0.0.2", 2: "fe80::3"}
    for rank, address in own.items():
        others = [other for other in (*own.values(), "10.9.9.9") if other != address]
        timeline.windows[rank] = [
            replace(
                window,
                connections=tuple((address, other, 1000, 20, 0, 500) for other in others),
            )
            for window in timeline.windows[rank][:1]
        ]
    found = observe(timeline).carried
    assert {(one.sender, one.receiver) for one in found} == {
        (host(one), host(other)) for one in range(3) for other in range(3) if one != other
    }
    assert {(one.num_bytes, one.busy_ns, one.of_ns) for one in found} == {(1000, 20_000, 500_000)}
