"""Which host a rank runs on, where the trace says so and where its devices' numbers do.

Launchers number the ranks host by host and give the n-th of a host its n-th device:

    rank     0  1  2  3  4  5  6  7
    device   0  1  2  3  0  1  2  3        two hosts, #0 and #1

So a trace that names no hosts tells them all the same, if all of its ranks keep to that.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascan.header import RankHeader


def hosts_of(headers: Mapping[int, RankHeader]) -> dict[int, str]:
    """Return the name of each rank's host; by the devices where none is named, "" if unknown."""
    named = {rank: header.host for rank, header in headers.items()}
    if any(named.values()):
        return named
    devices = {rank: header.device.index for rank, header in headers.items()}
    size = max(devices.values(), default=0) + 1
    regular = all(rank % size == device for rank, device in devices.items())
    numbers = {rank: rank // size for rank in devices}
    if size < 2 or not regular or len(set(numbers.values())) < 2:
        return named
    return {rank: f"#{number}" for rank, number in numbers.items()}


def are_guessed(headers: Mapping[int, RankHeader]) -> bool:
    """Return whether hosts are told by the numbers of devices."""
    return not any(header.host for header in headers.values()) and any(hosts_of(headers).values())
