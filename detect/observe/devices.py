"""Where ranks run, and how their devices fare: hosts, clocks, power, temperature.

Launchers number the ranks host by host and give the n-th of a host its n-th device:

    rank     0  1  2  3  4  5  6  7
    device   0  1  2  3  0  1  2  3        two hosts, #0 and #1

So a trace that names no hosts tells them all the same, if all of its ranks keep to that.

Ranks record a sample of each counter of their device at a window's end, twice a second at most;
what counts is the median over the windows, and of the mask of reasons for a lowered clock the bits
that are set in more than half of them: 0x4, 0x44, 0x44 over three windows are 0x44, power cap and
thermal slowdown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megascan.header import RankHeader
from megascan.timeline import Timeline

REASONS_NAME = "clock_event_reasons"
REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReason…)."""
IDLE, POWER_CAP = 0x1, 0x4
USUAL_REASONS = IDLE | POWER_CAP
"""A device under full load runs at its power limit, and rests between steps: no fault."""


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


def typical_readings(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the typical readings of every rank that recorded any."""
    readings: dict[int, dict[str, float]] = {}
    for rank, windows in timeline.windows.items():
        names = sorted({name for window in windows for name in window.counters})
        values = {
            name: _typical(name, [w.counters[name] for w in windows if name in w.counters])
            for name in names
        }
        if values:
            readings[rank] = values
    return readings


def _typical(name: str, values: Sequence[float]) -> float:
    if name != REASONS_NAME:
        return float(np.median(values))
    masks = [int(value) for value in values]
    return float(
        sum(bit for bit in REASONS if 2 * sum(bool(mask & bit) for mask in masks) > len(masks))
    )


def peculiar_reasons(own: int, peers: Sequence[int]) -> list[str]:
    """Return the names of reasons that no peer has, unless they are usual."""
    shared = 0
    for mask in peers:
        shared |= mask
    special = own & ~shared & ~USUAL_REASONS
    return [name for bit, name in REASONS.items() if special & bit]


def is_at_rest(mask: int) -> bool:
    """Return whether a mask of reasons holds that there is no work."""
    return bool(mask & IDLE)


def is_capped(mask: int) -> bool:
    """Return whether a mask of reasons holds that the power limit is reached."""
    return bool(mask & POWER_CAP)
