"""Hosts are told by the numbers of devices where a trace names none."""

from __future__ import annotations

from dataclasses import replace

from detect import Owner, detect
from detect.observe.members import are_guessed, hosts_of
from megascan.topology import Layout


def _unnamed(timeline, device_of):
    """The same timeline without names of hosts."""
    headers = {
        rank: replace(header, host="", device=replace(header.device, index=device_of(rank)))
        for rank, header in timeline.headers.items()
    }
    return replace(timeline, headers=headers)


def test_devices_that_count_up_again_begin_a_host(job):
    timeline = job(layout=Layout(dp=8), iterations=1).timeline()
    headers = _unnamed(timeline, lambda rank: rank % 4).headers
    assert hosts_of(headers) == {rank: f"#{rank // 4}" for rank in range(8)}
    assert are_guessed(headers) and not are_guessed(timeline.headers)


def test_devices_in_no_order_tell_nothing(job):
    timeline = job(layout=Layout(dp=8), iterations=1).timeline()
    for device_of in (lambda rank: 0, lambda rank: rank, lambda rank: rank // 2):
        assert set(hosts_of(_unnamed(timeline, device_of).headers).values()) == {""}


def test_a_hot_host_is_named_by_its_number(job):
    hot = job(layout=Layout(dp=16), hosts=4, work=lambda slot: 1.1 if 8 <= slot.rank < 12 else 1.0)
    report = detect(_unnamed(hot.timeline(), lambda rank: rank % 4))
    (finding,) = report.findings
    assert (finding.owner, finding.ranks, finding.host) == (Owner.NODE, (8, 9, 10, 11), "#2")
    assert any("names no hosts" in note for note in report.notes)
