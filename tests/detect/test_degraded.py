"""Ports and links that read worse than their equals: what was open is their node's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from aggregate import build_timeline
from detect import Cause, DetectorSettings, Owner, Report, Verdict
from detect.causes.degraded import search_degraded
from detect.causes.finding import Inquiry
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.machines import typical_readings
from detect.observe.observations import Observations
from megascan.header import WindowRecord
from megascan.simulate import (
    Fault,
    FaultKind,
    JobModel,
    ModelSize,
    communication_heavy,
    simulate_trace,
)
from megascan.topology import Layout


def ports(**rates: float) -> dict[str, float]:
    """Readings of a host: `a=400.0` is a port of that rate which sends as much as the others."""
    return {
        f"nic.mlx5_{name}/1.{reading}": value
        for name, rate in rates.items()
        for reading, value in (("gbps", rate), ("sent_gbytes", 50.0 if rate else 0.0),
                               ("errors", 0.0), ("lost_links", 0.0))
    }  # fmt: skip


def of_hosts(seen: Observations, **other: dict[str, float]) -> Observations:
    """Give each rank the readings of its host: ports a and b at 400, but for those of `other`."""
    usual = ports(a=400.0, b=400.0)
    hosts = {rank: seen.members.device_of(rank)[0] for rank in seen.members.recorded}
    return replace(seen, counters={rank: other.get(one, usual) for rank, one in hosts.items()})


def devices(seen: Observations, other: dict[int, dict[str, float]]) -> Observations:
    """Give each rank the readings of a sound H100, but for those of `other` ranks."""
    return replace(seen, counters={rank: SOUND | other.get(rank, {}) for rank in
                                   seen.members.recorded})  # fmt: skip


SOUND = {
    "sm_clock_mhz": 1980.0, "clock_event_reasons": 0.0, "pcie_lanes": 16.0, "pcie_lanes_max": 16.0,
    "pcie_generation": 5.0, "pcie_generation_max": 5.0, "nvlinks_up": 18.0,
}  # fmt: skip


def judged(seen: Observations) -> Report:
    return judge(seen, DetectorSettings())


def owners(report: Report) -> list[tuple[tuple[int, ...], Cause, Owner]]:
    return [(one.ranks, one.cause, one.owner) for one in report.findings]


def notes(report: Report) -> list[str]:
    return [note for note in report.notes if "mlx5" in note or "GPU" in note]


# Rings through all hosts


@pytest.fixture(scope="module")
def rings() -> Observations:
    """Rings of eight through four hosts take 20 % of the step, and carry 36 GB/s together."""
    layout = Layout(dp=8, tp=4)
    job = JobModel(layout=layout, costs=communication_heavy(layout))
    return observe(build_timeline(simulate_trace(job, seed=1)))


HOST_2 = tuple(range(16, 24))


def test_a_slow_port_holds_up_rings_that_hide_it(rings):
    assert judged(rings).verdict == Verdict.HEALTHY
    report = judged(of_hosts(rings, n02=ports(a=200.0, b=400.0)))
    assert owners(report) == [(HOST_2, Cause.LINK, Owner.NODE)]
    (finding,) = report.findings
    assert (finding.host, finding.slowdown) == ("n02", pytest.approx(2.0))
    assert finding.step_time_cost_ratio == pytest.approx(1.12, abs=0.02)
    assert (
        "on host n02 port mlx5_a/1 runs at 200 Gbit/s, not 400 as on each of 3 other hosts"
        in finding.headline
    )
    assert any("carries 36.4 GB/s" in one for one in finding.evidence)
    assert any("mlxlink" in one for one in finding.next_steps)
    assert notes(report) == []


def test_a_port_that_is_down_leaves_half_of_the_rate_to_a_host(rings):
    report = judged(of_hosts(rings, n02=ports(a=0.0, b=400.0)))
    assert owners(report) == [(HOST_2, Cause.LINK, Owner.NODE)]
    assert "port mlx5_a/1 is not active, but at 400 Gbit/s on each" in report.findings[0].headline
    assert report.findings[0].slowdown == pytest.approx(2.0)


def test_two_hosts_of_eight_are_each_named():
    layout = Layout(dp=16, tp=4)
    job = JobModel(layout=layout, costs=communication_heavy(layout))
    seen = observe(build_timeline(simulate_trace(job, seed=1)))
    slow = ports(a=200.0, b=400.0)
    report = judged(of_hosts(seen, n02=slow, n05=slow))
    named = [(tuple(range(first, first + 8)), Cause.LINK, Owner.NODE) for first in (16, 40)]
    assert sorted(owners(report)) == named
    assert all("too, has a slow port" in " ".join(one.evidence) for one in report.findings)
    assert owners(judged(of_hosts(seen, n02=slow, n05=slow, n07=slow))) == []


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ({"a": 100.0, "b": 100.0}, "they carry more than such ports can: rings take another way"),
        ({"a": 320.0, "b": 400.0}, "a fifth less is no lane, and no generation"),
        (dict.fromkeys("bcdefghi", 400.0) | {"a": 200.0}, "nine ports carry too little"),
    ],
)  # fmt: skip
def test_rings_that_a_port_does_not_limit_are_not_its_host_s(rings, rates, why):
    hosts = dict.fromkeys(("n00", "n01", "n03"), ports(**dict.fromkeys(rates, 400.0)))
    assert owners(judged(of_hosts(rings, n02=ports(**rates), **hosts))) == [], why


def test_messages_that_all_touch_a_host_are_no_rings():
    """Of three stages the middle one's host is at each message: some leave it, some come."""
    layout, num_layers = Layout(pp=3, dp=8), 12
    costs = communication_heavy(layout, ModelSize(num_layers=num_layers))
    job = JobModel(layout=layout, costs=costs, num_layers=num_layers)
    seen = observe(build_timeline(simulate_trace(job, seed=1)))
    assert seen.transfers is not None
    kinds = {seen.transfers.kinds[kind] for kind in seen.transfers.kind.tolist()}
    assert any(one.startswith("p2p message") for one in kinds)
    for rate in (200.0, 100.0, 50.0, 25.0, 10.0):
        report = judged(of_hosts(seen, n01=ports(a=rate, b=400.0)))
        assert named(report) == []


def test_a_network_that_is_named_already_may_be_why_rings_are_slow(rings):
    one = judged(of_hosts(rings, n02=ports(a=200.0, b=400.0))).findings[0]
    seen = of_hosts(rings, n03=ports(a=200.0, b=400.0))
    inquiry = Inquiry(
        seen=seen, settings=DetectorSettings(), num_tests=1,
        slow=np.zeros(len(seen.members), dtype=bool), found=(one,),
    )  # fmt: skip
    assert search_degraded(inquiry).findings == ()
    assert len(search_degraded(replace(inquiry, found=())).findings) == 1


def test_rings_on_cpus_are_the_systems_scheduling(rings):
    members = replace(rings.members, device_kind="cpu")
    seen = of_hosts(replace(rings, members=members), n02=ports(a=200.0, b=400.0))
    assert owners(judged(seen)) == []


def test_what_costs_nothing_is_a_note(rings):
    """Computing takes the whole step, whatever is beside it."""
    busy = replace(
        rings, busy_ns=np.broadcast_to(rings.iteration_ns, rings.busy_ns.shape), costs=None
    )
    report = judged(of_hosts(busy, n02=ports(a=200.0, b=400.0)))
    assert owners(report) == []
    (note,) = notes(report)
    assert note == (
        "on host n02 port mlx5_a/1 runs at 200 Gbit/s, not 400 as on each of 3 other hosts: it "
        "costs nothing that this trace shows; a ring through all hosts would hide whose port is "
        "slow"
    )


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ({"n02": ports(a=200.0, b=400.0), "n03": ports(a=200.0, b=400.0)}, "half of the fleet"),
        ({"n02": ports(a=200.0, b=400.0), "n03": ports(a=800.0, b=400.0)}, "three kinds"),
        ({"n02": ports(a=200.0, b=800.0), "n03": ports(a=400.0, b=400.0)}, "b is quicker there"),
        ({"n02": ports(c=200.0, d=400.0)}, "ports have other names"),
        ({"n02": ports(a=200.0, b=400.0), "n00": {}, "n01": {}, "n03": {}}, "others do not tell"),
        ({"n02": ports(a=200.0, b=400.0), "n00": {}, "n01": {}}, "one other tells"),
        ({name: ports(a=200.0, b=400.0) for name in ("n00", "n01", "n02", "n03")}, "all alike"),
        ({"n02": {}}, "the host itself does not tell"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_hosts_that_may_be_built_otherwise_say_nothing(rings, hosts, why):
    report = judged(of_hosts(rings, **hosts))
    assert (owners(report), notes(report)) == ([], []), why


def test_ports_that_are_dealt_out_otherwise_say_nothing(rings):
    hosts = {name: ports(a=400.0, b=200.0) for name in ("n00", "n01", "n03")}
    report = judged(of_hosts(rings, n02=ports(a=200.0, b=400.0), **hosts))
    assert (owners(report), notes(report)) == ([], [])


def test_ports_that_the_job_does_not_use_say_nothing(rings):
    """A port for logins is down on one host, one for storage slow."""
    idle = {"nic.eno1.gbps": 25.0, "nic.eno1.sent_gbytes": 0.1}
    hosts = {name: ports(a=400.0, b=400.0) | idle for name in ("n00", "n01", "n03")}
    for rate in (0.0, 1.0):
        own = ports(a=400.0, b=400.0) | idle | {"nic.eno1.gbps": rate}
        report = judged(of_hosts(rings, n02=own, **hosts))
        assert (owners(report), notes(report)) == ([], [])


def test_ports_that_do_not_count_what_they_send_are_used_if_they_are_quick(rings):
    def without_counts(**rates: float) -> dict[str, float]:
        return {name: value for name, value in ports(**rates).items() if name.endswith("gbps")}

    slow = without_counts(a=200.0, b=400.0) | {"nic.eno1.gbps": 0.0}
    usual = without_counts(a=400.0, b=400.0) | {"nic.eno1.gbps": 25.0}
    report = judged(of_hosts(rings, n00=usual, n01=usual, n02=slow, n03=usual))
    assert owners(report) == [(HOST_2, Cause.LINK, Owner.NODE)]
    assert "eno1" not in report.findings[0].headline


def test_one_rank_of_a_host_does_not_tell(rings):
    whole = of_hosts(rings, n02=ports(a=200.0, b=400.0))
    counters = {rank: one for rank, one in whole.counters.items() if rank not in HOST_2[1:]}
    report = judged(replace(whole, counters=counters))
    assert (owners(report), notes(report)) == ([], [])


def test_a_rank_that_reads_otherwise_than_its_host_does_not_count(rings):
    whole = of_hosts(rings)
    counters = {**whole.counters, 17: ports(a=200.0, b=400.0)}
    report = judged(replace(whole, counters=counters))
    assert (owners(report), notes(report)) == ([], [])


@pytest.mark.parametrize("value", [math.nan, math.inf, -400.0, 1e300])
def test_damaged_readings_are_no_error(rings, value):
    damaged = dict.fromkeys(ports(a=1.0, b=1.0), value) | {"nic..gbps": value, "nic.": value}
    for hosts in ({"n02": damaged}, dict.fromkeys(("n00", "n01", "n02", "n03"), damaged)):
        report = judged(of_hosts(rings, **hosts))
        assert all(one.owner is not Owner.NODE for one in report.findings)


def test_damaged_readings_of_devices_are_no_error(rings):
    for value in (math.nan, math.inf, -1.0, 0.0, 1e300):
        for ranks in ([3], rings.members.recorded):
            other = dict.fromkeys(SOUND.keys() - {"sm_clock_mhz", "clock_event_reasons"}, value)
            report = judged(devices(rings, dict.fromkeys(ranks, other)))
            assert owners(report) == []


# Open findings


def simulated(
    layout: Layout, *pairs: tuple[int, int], factor: float, first: int = 1, per_host: int = 4
) -> Observations:
    """A job of which the connections of some pairs of ranks are slow."""
    costs = communication_heavy(layout)
    job = JobModel(layout=layout, costs=costs, ranks_per_host=per_host)
    faults = [
        Fault(rank=one, peer=other, kind=FaultKind.LINK, factor=factor, first_iteration=first)
        for one, other in pairs
    ]
    return observe(build_timeline(simulate_trace(job, faults, seed=1)))


STAGES = Layout(pp=4, dp=4)
BETWEEN = ((4, 8), (5, 9), (6, 10), (7, 11))
"""The messages between hosts 1 and 2: either may be to blame."""


@pytest.fixture(scope="module")
def between_hosts() -> Observations:
    return simulated(STAGES, *BETWEEN, factor=4.0)


@pytest.fixture(scope="module")
def far_between_hosts() -> Observations:
    return simulated(STAGES, *BETWEEN, factor=13.0)


@pytest.fixture(scope="module")
def slow_inside() -> Observations:
    """A TP group of four, inside a host of eight, is slow for one of its connections."""
    return simulated(Layout(tp=4, dp=4), (4, 5), factor=8.0, per_host=8)


def of_links(report: Report) -> list[tuple[tuple[int, ...], Owner]]:
    return [(one.ranks, one.owner) for one in report.findings if one.cause is Cause.LINK]


def named(report: Report) -> list[tuple[int, ...]]:
    return [ranks for ranks, owner in of_links(report) if owner is Owner.NODE]


def test_of_two_hosts_the_one_with_the_slow_port_is_at_fault(between_hosts):
    assert {owner for _, owner in of_links(judged(between_hosts))} == {Owner.UNDECIDED}
    report = judged(of_hosts(between_hosts, n02=ports(a=100.0, b=400.0)))
    assert of_links(report) == [((8, 9, 10, 11), Owner.NODE)]
    (finding, _) = report.findings
    assert (finding.host, finding.slowdown) == ("n02", pytest.approx(4.0, rel=0.05))
    assert "port mlx5_a/1 runs at 100 Gbit/s, not 400" in finding.headline
    assert any("left open" in one for one in finding.evidence)
    assert notes(report) == []


def test_pairs_that_hide_behind_each_other_cost_what_they_cost_together(between_hosts):
    alone = max(
        one.step_time_cost_ratio
        for one in judged(between_hosts).findings
        if one.cause is Cause.LINK
    )
    finding = judged(of_hosts(between_hosts, n02=ports(a=100.0, b=400.0))).findings[0]
    assert finding.step_time_cost_ratio > 1.02 > alone
    assert finding.cost_is_replayed


def test_without_a_replay_they_cost_what_the_costliest_does(between_hosts):
    seen = replace(between_hosts, costs=None)
    alone = max(
        one.step_time_cost_ratio for one in judged(seen).findings if one.cause is Cause.LINK
    )
    finding = judged(of_hosts(seen, n02=ports(a=100.0, b=400.0))).findings[0]
    assert finding.step_time_cost_ratio == alone
    assert not finding.cost_is_replayed


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ({"n02": ports(a=200.0, b=400.0)}, "half the rate makes nothing thirteen times slower"),
        ({"n02": ports(a=0.0, b=400.0)}, "nor does a port less of two"),
        ({"n03": ports(a=40.0, b=400.0)}, "another host's port"),
        ({"n01": ports(a=40.0, b=400.0), "n02": ports(a=40.0, b=400.0)}, "half of the hosts"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_it_stays_open_where_ports_do_not_tell(far_between_hosts, hosts, why):
    report = judged(of_hosts(far_between_hosts, **hosts))
    assert {owner for _, owner in of_links(report)} == {Owner.UNDECIDED}, why


def test_a_host_without_any_port_left_goes_another_way(far_between_hosts):
    report = judged(of_hosts(far_between_hosts, n02=ports(a=0.0, b=0.0)))
    assert of_links(report) == [((8, 9, 10, 11), Owner.NODE)]
    assert "ports mlx5_a/1 and mlx5_b/1 are not active" in report.findings[0].headline


@pytest.mark.parametrize(
    ("reading", "count", "others", "is_told"),
    [
        ("errors", 40_000.0, 0.0, True),
        ("errors", 40_000.0, 3.0, True),
        ("errors", 40_000.0, 500.0, False),
        ("errors", 30.0, 0.0, False),
        ("lost_links", 1.0, 0.0, True),
        ("lost_links", 2.0, 1.0, False),
    ],
)
def test_a_port_that_damages_what_it_gets(far_between_hosts, reading, count, others, is_told):
    """What is sent again may be slower by any factor."""
    bad = ports(a=400.0, b=400.0) | {f"nic.mlx5_b/1.{reading}": count}
    usual = ports(a=400.0, b=400.0) | {f"nic.mlx5_a/1.{reading}": others}
    report = judged(of_hosts(far_between_hosts, n00=usual, n01=usual, n02=bad, n03=usual))
    assert named(report) == [(8, 9, 10, 11)] * is_told
    if is_told:
        assert "port mlx5_b/1 of host n02 counted" in report.findings[0].headline


def test_errors_of_a_long_trace_must_be_as_many(far_between_hosts):
    bad = ports(a=400.0, b=400.0) | {"nic.mlx5_b/1.errors": 500.0}
    seen = of_hosts(far_between_hosts, n02=bad)
    assert named(judged(seen)) == [(8, 9, 10, 11)]
    assert named(judged(replace(seen, iterations=seen.iterations * 100_000))) == []


def test_what_was_slow_for_the_last_iterations_is_not_due_to_a_port_that_always_is():
    seen = simulated(STAGES, *BETWEEN, factor=4.0, first=15)
    assert {owner for _, owner in of_links(judged(seen))} == {Owner.UNDECIDED}
    assert named(judged(of_hosts(seen, n02=ports(a=100.0, b=400.0)))) == []
    bad = ports(a=400.0, b=400.0) | {"nic.mlx5_b/1.errors": 7e5}
    assert named(judged(of_hosts(seen, n02=bad))) == [(8, 9, 10, 11)]


def test_of_a_pair_the_end_with_the_slow_port_is_named():
    seen = simulated(STAGES, (5, 9), factor=8.0)
    assert of_links(judged(seen)) == [((5, 9), Owner.NODE)]
    report = judged(of_hosts(seen, n02=ports(a=50.0, b=400.0)))
    assert of_links(report) == [((9,), Owner.NODE)]
    assert not report.findings[0].is_pair
    assert of_links(judged(of_hosts(seen, n03=ports(a=50.0, b=400.0)))) == of_links(judged(seen))


def test_who_is_named_for_something_else_is_not_named_again(between_hosts):
    """A slow device of the host may be why its connections are slow."""
    work = replace(
        between_hosts.work,
        log_ns=between_hosts.work.log_ns.copy(),
    )
    work.log_ns[9] += np.log(2.0)
    seen = replace(between_hosts, work=work, layers=None)
    assert ((9,), Cause.COMPUTE, Owner.NODE) in owners(judged(seen))
    report = judged(of_hosts(seen, n02=ports(a=100.0, b=400.0)))
    assert ((9,), Cause.COMPUTE, Owner.NODE) in owners(report)
    assert named(report) == []
    assert len(notes(report)) == 1


def test_a_gpu_with_fewer_nvlinks_is_why_its_group_is_slow(slow_inside):
    assert of_links(judged(slow_inside)) == [((4, 5, 6, 7), Owner.UNDECIDED)]
    report = judged(devices(slow_inside, {5: {"nvlinks_up": 12.0}}))
    assert of_links(report) == [((5,), Owner.NODE)]
    headline = report.findings[0].headline
    assert "GPU 5 of host n00 (rank 5) has 12 NVLinks up, each of 15 other GPUs" in headline
    assert any("Xid" in one for one in report.findings[0].next_steps)


def test_a_gpu_without_nvlinks_has_pcie(slow_inside):
    none = {rank: {"nvlinks_up": 0.0} for rank in range(16)}
    report = judged(devices(slow_inside, none | {6: {"nvlinks_up": 0.0, "pcie_lanes": 2.0}}))
    assert of_links(report) == [((6,), Owner.NODE)]


@pytest.mark.parametrize(
    ("ranks", "readings", "why"),
    [
        (range(8), {"nvlinks_up": 12.0}, "a host that is built otherwise"),
        ([3], {"nvlinks_up": 12.0}, "a GPU of another group"),
        ([5], {"nvlinks_up": 24.0}, "it has more"),
        ([5], {"pcie_lanes": 2.0}, "what stays inside goes over NVLink"),
        (range(1, 16), {"nvlinks_up": math.nan}, "one alone is known"),
    ],
)
def test_groups_inside_a_host_stay_open_where_links_do_not_tell(slow_inside, ranks, readings, why):
    report = judged(devices(slow_inside, dict.fromkeys(ranks, readings)))
    assert of_links(report) == [((4, 5, 6, 7), Owner.UNDECIDED)], why


def test_ports_say_nothing_of_groups_inside_a_host(slow_inside):
    hosts = {"n00": ports(a=10.0, b=400.0)}
    assert of_links(judged(of_hosts(slow_inside, **hosts))) == of_links(judged(slow_inside))


def test_models_are_not_compared_with_each_other(rings):
    models = tuple("H100" if row < 16 else "H20" for row in range(32))
    seen = replace(rings, members=replace(rings.members, devices=models))
    half = {rank: {"nvlinks_up": 12.0} for rank in range(16)}
    assert notes(judged(devices(seen, half))) == []
    (note,) = notes(judged(devices(seen, half | {3: {"nvlinks_up": 11.0}})))
    assert "GPU 3 of host n00 (rank 3) has 11 NVLinks up, each of 15 other GPUs" in note


def test_pcie_lanes_explain_what_leaves_a_host():
    seen = simulated(STAGES, (5, 9), factor=8.0)
    report = judged(devices(seen, {9: {"pcie_lanes": 2.0}}))
    assert of_links(report) == [((9,), Owner.NODE)]
    headline = report.findings[0].headline
    assert "GPU 1 of host n02 (rank 9) is linked to its host by 2 of 16 PCIe lanes" in headline


@pytest.mark.parametrize(
    ("ranks", "readings", "why"),
    [
        ([9], {"pcie_generation": 1.0, "clock_event_reasons": 1.0}, "at rest its link is slower"),
        ([9], {"pcie_lanes": 2.0, "pcie_lanes_max": 2.0}, "a slot of another kind"),
        ([9], {"pcie_lanes": 8.0}, "half of the lanes make nothing eight times slower"),
        (range(16), {"pcie_generation": 1.0}, "all of them"),
        (range(8, 16), {"pcie_generation": 1.0}, "half of them"),
        (range(15), {"pcie_lanes": math.nan}, "one alone is known"),
    ],
)
def test_pcie_links_that_decide_nothing(ranks, readings, why):
    seen = simulated(STAGES, (5, 9), factor=8.0)
    report = judged(devices(seen, dict.fromkeys(ranks, readings)))
    assert of_links(report) == [((5, 9), Owner.NODE)], why
    assert len(notes(report)) == (why.startswith("half of the lanes"))


def test_a_gpu_that_lost_lanes_at_no_cost_is_a_note(rings):
    report = judged(devices(rings, {5: {"pcie_generation": 3.0}}))
    assert owners(report) == []
    (note,) = notes(report)
    assert note == (
        "GPU 5 of host n00 (rank 5) is linked to its host by 16 of 16 PCIe lanes of generation 3 "
        "of 5, each of 31 other GPUs of its model by all it can have: nothing in this trace shows "
        "that it costs time"
    )


def open_finding(seen: Observations, cause: Cause, *ranks: int) -> Inquiry:
    """An inquiry in which only this was found, and nobody knows why."""
    one = judged(seen).findings[0]
    found = replace(one, cause=cause, owner=Owner.UNDECIDED, ranks=ranks, is_pair=False)
    nobody = np.zeros(len(seen.members), dtype=bool)
    return Inquiry(seen=seen, settings=DetectorSettings(), num_tests=1, slow=nobody, found=(found,))


@pytest.mark.parametrize(
    ("cause", "ranks", "is_told"),
    [
        (Cause.HOST, (9,), True),
        (Cause.LOADER, (9,), True),
        (Cause.UNKNOWN, (9,), True),
        (Cause.HOST, (8, 9, 10, 11), False),
        (Cause.HOST, (10,), False),
        (Cause.COMPUTE, (9,), False),
        (Cause.GC, (9,), False),
    ],
)
def test_copies_over_pcie_may_look_like_a_late_host(between_hosts, cause, ranks, is_told):
    seen = devices(between_hosts, {9: {"pcie_lanes": 4.0}})
    answer = search_degraded(open_finding(seen, cause, *ranks))
    assert [one.ranks for one in answer.findings] == [(9,)] * is_told
    assert (len(answer.notes) == 1) is not is_told


def test_no_port_looks_like_a_late_host(between_hosts):
    seen = of_hosts(between_hosts, n02=ports(a=100.0, b=400.0))
    for cause in (Cause.HOST, Cause.LOADER, Cause.UNKNOWN, Cause.COMPUTE):
        assert not search_degraded(open_finding(seen, cause, 9)).findings


def test_all_ranks_of_a_host_are_its_network_unless_they_are_a_group(rings):
    seen = of_hosts(rings, n02=ports(a=200.0, b=400.0))
    (finding,) = search_degraded(open_finding(seen, Cause.LINK, *HOST_2)).findings
    assert (finding.ranks, finding.owner) == (HOST_2, Owner.NODE)
    assert "connections of ranks 16, 17" in finding.statement
    inquiry = open_finding(seen, Cause.LINK, *HOST_2)
    assert seen.transfers is not None
    transfers = replace(seen.transfers, members=(HOST_2, *seen.transfers.members[1:]))
    inquiry = replace(inquiry, seen=replace(seen, transfers=transfers))
    assert all("connections of" not in one.statement for one in search_degraded(inquiry).findings)


# How readings of windows are put together


def test_rates_are_typical_and_counts_are_summed(rings, job):
    timeline = job(layout=Layout(dp=2), iterations=4).timeline()
    (window,) = timeline.windows[0]
    readings = [(400.0, 3.0), (200.0, 0.0), (200.0, 4.0)]
    windows: tuple[WindowRecord, ...] = tuple(
        replace(window, window=number, counters={"nic.p.gbps": rate, "nic.p.errors": errors})
        for number, (rate, errors) in enumerate(readings)
    )
    read = typical_readings(replace(timeline, windows={0: windows}))
    assert read == {0: {"nic.p.gbps": 200.0, "nic.p.errors": 7.0}}


@pytest.mark.parametrize(
    ("clocks", "typical"),
    [((1350.0, 1980.0), 1980.0), ((1980.0, 1350.0, 1350.0), 1350.0), ((1350.0, 1380.0), 1380.0)],
)
def test_a_clock_is_low_where_most_readings_are(job, clocks, typical):
    """Each device of a job may be held down in turn."""
    timeline = job(layout=Layout(dp=2), iterations=4).timeline()
    (window,) = timeline.windows[0]
    windows: tuple[WindowRecord, ...] = tuple(
        replace(window, window=number, counters={"sm_clock_mhz": clock})
        for number, clock in enumerate(clocks)
    )
    read = typical_readings(replace(timeline, windows={0: windows}))
    assert read == {0: {"sm_clock_mhz": typical}}


def test_readings_of_ports_are_no_readings_of_a_device(job, slow):
    """Where no clock was read, no sentence says that clocks are equal."""
    counters = {rank: ports(a=400.0) for rank in range(4)}
    report = job(layout=Layout(dp=4), work=slow(1, 1.3), counters=counters).report()
    (finding,) = report.findings
    assert not any("device readings" in one for one in finding.evidence)
