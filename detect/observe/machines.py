"""What machines count themselves: clocks, power and work of devices, ports of hosts, TCP.

Ranks record a sample of each counter of their device at a window's end, twice a second at most;
what counts is the median over the windows, and of the mask of reasons for a lowered clock the bits
that are set in more than half of them: 0x4, 0x44, 0x44 over three windows are 0x44, power cap and
thermal slowdown. What a network port counts from one reading to the next is summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from statistics import fmean, median, median_high

import numpy as np

from megascan.timeline import Timeline

REASONS_NAME = "clock_event_reasons"
OTHERS_NAME = "others_sm_percent"
CLOCK_NAME, TENSOR_NAME, DRAM_NAME = "sm_clock_mhz", "tensor_percent", "dram_percent"
PORT_PREFIX, RATE_NAME = "nic.", "gbps"
"""Readings of the host's network ports are called `nic.<port>.<reading>`."""
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


def typical_readings(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the typical readings of every rank that recorded any."""
    readings: dict[int, dict[str, float]] = {}
    for rank, windows in timeline.windows.items():
        values = defaultdict(list)
        for window in windows:
            for name, value in window.counters.items():
                values[name].append(value)
        if values:
            readings[rank] = {name: _typical(name, values[name]) for name in sorted(values)}
    return readings


def _typical(name: str, values: Sequence[float]) -> float:
    """Return the median; the mean of a share of time, which comes and goes; of the mask of reasons
    the bits that are set in more than half of them, and so the higher one of two middle clocks; of
    what a port counts the sum.
    """
    if name == OTHERS_NAME:
        return fmean(values)
    if name.startswith(PORT_PREFIX) and not name.endswith(f".{RATE_NAME}"):
        return float(sum(values))
    if name == CLOCK_NAME:
        return float(median_high(values))
    if name != REASONS_NAME:
        return float(median(values))
    masks = np.array(values, dtype=np.int64)
    return float(sum(bit for bit in REASONS if 2 * np.sum((masks & bit) > 0) > len(masks)))


def peculiar_reasons(own: int, peers: Sequence[int]) -> list[str]:
    """Return the names of reasons that no peer has, unless they are usual."""
    expected = reduce(or_, peers, USUAL_REASONS)
    return [name for bit, name in REASONS.items() if own & ~expected & bit]


def is_at_rest(mask: int) -> bool:
    """Return whether a mask of reasons says that the device has no work."""
    return bool(mask & IDLE)


def is_capped(mask: int) -> bool:
    """Return whether a mask of reasons says that the device is at its power limit."""
    return bool(mask & POWER_CAP)


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """What a device has done from a window to the next one, as it counts itself."""

    window: int
    multiplied: float
    """Cycles in which it multiplied matrices, in units that devices of a model share."""
    moved: float
    """What its memory carried, likewise."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a rank's TCP connections have carried from its host to another one, over some time."""

    rank: int
    iterations: tuple[int, int]
    """The first and the last of the window, about whose time it is."""
    sender: str
    receiver: str
    num_bytes: int
    busy_ns: int
    """For which some were on their way, and the receiver had room."""
    of_ns: int
