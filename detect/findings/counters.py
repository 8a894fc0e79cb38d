"""Device readings that corroborate or contradict a slow rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detect.findings.wording import listed
from detect.observations import Observations
from megascan.timeline import Timeline

NOTABLE = 0.04
"""A clock that differs from the peers' median by this share is worth a sentence."""
NOTABLE_POWER = 0.15
"""Power follows the load from sample to sample."""
NOTABLE_DEGREES = 15.0
"""Devices of one node differ by this much by their place in the air stream."""
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
USUAL_REASONS = 0x1 | 0x4
"""A device under full load runs at its power limit, and rests between steps: no fault."""


def typical_readings(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Readings by rank: medians over the windows, of reasons the bits of more than half of them."""
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


def counter_evidence(seen: Observations, row: int) -> list[str]:
    """Sentences about the readings of a rank beside its stage peers' medians; empty without any."""
    members = seen.members
    own = seen.counters.get(int(members.ranks[row]), {})
    peers = [
        seen.counters[int(members.ranks[other])]
        for other in members.rows_of_stage(int(members.stage[row]))
        if other != row and int(members.ranks[other]) in seen.counters
    ]
    sentences = []
    for name in sorted(own):
        theirs = [readings[name] for readings in peers if name in readings]
        if theirs:
            sentences += _compared(name, own[name], theirs)
    if peers and own and not sentences:
        sentences.append(
            "the device readings of the window (clock, reasons to lower it, power, temperature) "
            "equal its peers': it was not throttled when they were taken"
        )
    return sentences


def _compared(name: str, own: float, peers: Sequence[float]) -> list[str]:
    theirs = float(np.median(peers))
    if name == REASONS_NAME:
        return _reasons(int(own), [int(mask) for mask in peers])
    if "temperature" in name:
        notable = abs(own - theirs) > NOTABLE_DEGREES
    elif "power" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > NOTABLE_POWER
    elif "clock" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > NOTABLE
    else:
        return []
    return [f"counter {name} is {own:.0f} against its peers' {theirs:.0f}"] if notable else []


def _reasons(own: int, peers: Sequence[int]) -> list[str]:
    """Reasons of its own, unless usual: those that no peer has."""
    shared = 0
    for mask in peers:
        shared |= mask
    special = own & ~shared & ~USUAL_REASONS
    if not special:
        return []
    return [f"its clock is held down by {listed(_names(special))} (NVML), its peers' is not"]


def _names(mask: int) -> list[str]:
    return [name for bit, name in REASONS.items() if mask & bit]
