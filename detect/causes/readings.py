"""What device readings say of a rank: clock, reasons to lower it, power, temperature.

Problem: a rank computes slowly, and longer data, heavier layers or waiting that nobody recorded
would show the same. Its device's clock is lowered by none of them.

Idea: a clock that is lower than those of all sound devices of the model by about as much as the
rank is slower is why it is slower. At its power limit a device lowers its clock for the work that
it is given, and at rest because it has none: such readings decide nothing.

Example: rank 3 computes 1.28 times slower, at 1545 MHz where all others run at 1980: log ratios
0.247 and 0.248. A clock of 1890 MHz (0.047, less than half) would leave most of it unexplained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from detect.observe.devices import REASONS_NAME, is_usual, peculiar_reasons
from detect.observe.observations import Observations
from detect.text import times
from detect.thresholds import PAIRS, READINGS
from megascan.arrays import Flags
from megascan.errors import listed

CLOCK_NAME = "sm_clock_mhz"


def slow_clock(seen: Observations, slow: Flags, row: int, effect: float) -> str | None:
    """Return that the row's clock is as low as its passes are slow, None where that is not shown.

    `effect` is its log slowdown; `slow` rows are no measure of a usual clock. A row that stands for
    a whole TP group has no clock of its own.
    """
    members = seen.members
    own = seen.counters.get(int(members.ranks[row]), {})
    others = [
        seen.counters.get(int(rank), {}).get(CLOCK_NAME, 0.0)
        for place, rank in enumerate(members.ranks)
        if place != row and not slow[place] and members.devices[place] == members.devices[row]
    ]
    lowest, clock = min(others, default=0.0), own.get(CLOCK_NAME, 0.0)
    if min(clock, lowest) <= 0 or len(members.workers[row]) > 1:
        return None
    if is_usual(int(own.get(REASONS_NAME, 0))):
        return None
    ratio, apart = np.log(float(np.median(others)) / clock), np.log(lowest / clock)
    if apart < -np.log1p(-READINGS.clock_share):
        return None
    if not PAIRS.agrees_share * effect <= ratio <= effect / PAIRS.agrees_share:
        return None
    return (
        f"its clock, which neither data nor layers lower, is {clock:.0f} MHz against "
        f"{np.median(others):.0f} MHz of sound devices ({times(float(np.exp(ratio)))})"
    )


def reading_evidence(seen: Observations, row: int) -> list[str]:
    """Return sentences about a rank's device readings next to its stage peers' medians."""
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
        special = peculiar_reasons(int(own), [int(mask) for mask in peers])
        words = f"its clock is held down by {listed(special)} (NVML), its peers' is not"
        return [words] if special else []
    if "temperature" in name:
        notable = abs(own - theirs) > READINGS.temperature_degrees
    elif "power" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > READINGS.power_share
    elif "clock" in name:
        notable = theirs > 0 and abs(own / theirs - 1) > READINGS.clock_share
    else:
        return []
    return [f"counter {name} is {own:.0f} against its peers' {theirs:.0f}"] if notable else []
