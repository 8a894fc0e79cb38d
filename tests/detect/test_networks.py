"""A host's slow network is one finding; hosts that nothing tells apart stay undecided."""

from __future__ import annotations

from detect import Cause, Owner
from megascan.topology import Layout

MEGABYTE = 1 << 20


def crossing(hosts, factor):
    """Messages that touch a host of four ranks take `factor` times as long."""
    return lambda one, other, iteration: factor if {one // 4, other // 4} & hosts else 1.0


def test_slow_network_of_a_host_is_one_finding(job):
    report = job(
        layout=Layout(pp=4, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=crossing({2}, 2.0)
    ).report()
    (finding,) = report.findings
    assert (finding.cause, finding.owner) == (Cause.LINK, Owner.NODE)
    assert finding.ranks == (8, 9, 10, 11)
    assert "host n02's network" in finding.headline
    assert 1.9 < finding.slowdown < 2.1


def test_two_hosts_that_only_talk_to_each_other_stay_undecided(job):
    report = job(
        layout=Layout(pp=2, dp=8), hosts=4, message_bytes=MEGABYTE, transfer=crossing({0, 2}, 2.0)
    ).report()
    (finding,) = report.findings
    assert (finding.owner, finding.ranks) == (Owner.UNDECIDED, (0, 1, 2, 3, 8, 9, 10, 11))
    assert "which of them is slow" in " ".join(finding.evidence)


def test_slow_pair_of_hosts_accuses_neither(job):
    """Between hosts 1 and 2 everything is slow, and each of them is quick elsewhere."""
    report = job(
        layout=Layout(pp=4, dp=4),
        hosts=4,
        message_bytes=MEGABYTE,
        transfer=lambda one, other, iteration: 2.0 if {one // 4, other // 4} == {1, 2} else 1.0,
    ).report()
    assert not any("network" in one.headline for one in report.findings)


def test_messages_that_are_all_slow_name_nobody(job):
    report = job(
        layout=Layout(pp=2, dp=4), hosts=4, message_bytes=MEGABYTE, transfer=crossing({0, 1}, 4.0)
    ).report()
    assert report.findings == ()


def test_latency_of_short_messages_is_no_bandwidth(job):
    report = job(layout=Layout(pp=4, dp=4), hosts=4, transfer=crossing({2}, 2.0)).report()
    assert not any("network" in one.headline for one in report.findings)
