"""Device readings that corroborate or contradict a slow rank."""

from __future__ import annotations

import numpy as np

from detect.observations import Observations

NOTABLE = 0.04
"""A reading that differs from the peers' median by this share is worth a sentence."""
TELLING = ("clock", "throttle", "power", "temperature")


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
        if theirs and any(word in name.lower() for word in TELLING):
            sentences += _compared(name, own[name], float(np.median(theirs)))
    if peers and own and not sentences:
        sentences.append(
            "the device readings of the window (clock, power, temperature) equal its peers'"
        )
    return sentences


def _compared(name: str, own: float, theirs: float) -> list[str]:
    if "throttle" in name.lower():
        if own == theirs:
            return []
        return [f"counter {name} is {own:g} against its peers' {theirs:g}"]
    if theirs == 0 or abs(own / theirs - 1) < NOTABLE:
        return []
    return [f"counter {name} is {own:g} against its peers' {theirs:g} ({own / theirs:.2f}x)"]
