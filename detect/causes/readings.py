"""What a device's readings say (clock, reasons to lower it, power, temperature), beside others'.

Longer data, heavier layers or hidden waiting lower no clock. A clock lower than those of all sound
devices of the model, by about as much as the rank is slower, is why the rank is slower. A clock
that is lower by more counts only if heat or a brake, which may come and go between readings, holds
down this device and no other. At its power limit a device lowers its clock for the work that it is
given, and at rest because it has none: these readings decide nothing. But a device that is at its
limit with far less power than sound devices draw has a lower limit, and no work lowers a limit.

Example: rank 3 computes 1.28 times slower, at 1545 MHz where all others run at 1980: log ratios
0.247 and 0.248. A clock of 1890 MHz (0.047, less than half) would leave most of it unexplained. At
its power limit with 605 W it is undecided, where others draw 610 W; with 452 W it is the device.
It is, too, where sound devices are held below their highest clocks as well, at 1695 to 1815 of 1965
MHz, and it alone runs at 1500: what the same work lowers clocks by is known then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from detect.observe.machines import (
    CLOCK_NAME,
    PORT_PREFIX,
    REASONS_NAME,
    is_at_rest,
    is_capped,
    peculiar_reasons,
)
from detect.observe.observations import Observations
from detect.text import times
from detect.thresholds.devices import ORDINARY, PAIRS
from detect.thresholds.observing import READINGS
from megascan.arrays import Flags
from megascan.errors import listed

HIGHEST_CLOCK_NAME, POWER_NAME = "sm_clock_max_mhz", "power_w"


def slow_clock(seen: Observations, slow: Flags, row: int, effect: float) -> tuple[int, str] | None:
    """Return the one rank of a row whose clock is as low as its passes are slow, and a sentence.

    A row may stand for a TP group whose ranks wait for each other unseen: None where no clock or
    several are low, and where a mate's is lower still, by more than the passes are slow: whose
    doing it is nobody knows then.
    """
    low = low_clocks(seen, slow, row, effect)
    if len(low) != 1:
        return None
    ((rank, words),) = low.items()
    ranks = seen.members.workers[row]
    clocks = [seen.counters.get(one, {}).get(CLOCK_NAME, 0.0) for one in ranks]
    is_lowest = not any(0.0 < clock < clocks[ranks.index(rank)] for clock in clocks)
    return (rank, words) if is_lowest else None


def low_clocks(seen: Observations, slow: Flags, row: int, effect: float) -> dict[int, str]:
    """Return the ranks of a row whose clocks are as low as its passes are slow, with a sentence.

    `effect` is the row's log slowdown; `slow` rows are no measure of a usual clock.
    """
    members, ranks = seen.members, seen.members.workers[row]
    sound = [
        seen.counters.get(rank, {})
        for place, of_row in enumerate(members.workers)
        if place != row and not slow[place] and members.devices[place] == members.devices[row]
        for rank in of_row
    ]
    found = {}
    # passes whose experts wait for others, and get other tokens, follow a clock by less
    most_times = READINGS.most_times if members.layout.ep > 1 else 1.0 / PAIRS.agrees_share
    for rank in ranks:
        words = _low_clock(seen.counters.get(rank, {}), sound, effect, most_times)
        if words:
            whose = "its clock" if len(ranks) == 1 else f"of rank {rank} alone the clock"
            found[rank] = f"{whose}, which neither data nor layers lower, is {words}"
    return found


def braked(seen: Observations, slow: Flags, rank: int) -> bool:
    """Return whether a reason that no sound device has holds a rank's clock down: heat, a brake."""
    theirs = [int(one.get(REASONS_NAME, 0)) for one in _of_sound(seen, slow)]
    own = int(seen.counters.get(rank, {}).get(REASONS_NAME, 0))
    return bool(peculiar_reasons(own, theirs))


def _of_sound(seen: Observations, slow: Flags) -> list[Mapping[str, float]]:
    return [
        seen.counters.get(one, {})
        for place in np.flatnonzero(~slow).tolist()
        for one in seen.members.workers[place]
    ]


def held_down(seen: Observations, slow: Flags, rank: int) -> bool:
    """Return whether no work of its own explains a rank's low clock: it is held down by a reason
    that no sound device has, or lies far below all of them, and not at its power limit.
    """
    if braked(seen, slow, rank):
        return True
    own, theirs = seen.counters.get(rank, {}), _of_sound(seen, slow)
    reasons = int(own.get(REASONS_NAME, 0))
    clocks = [one[CLOCK_NAME] for one in theirs if one.get(CLOCK_NAME, 0.0) > 0]
    least = min(clocks, default=0.0) / ORDINARY.little_ratio
    return 0.0 < own.get(CLOCK_NAME, 0.0) <= least and not is_capped(reasons)


def _low_clock(
    own: Mapping[str, float], sound: Sequence[Mapping[str, float]], effect: float, most_times: float
) -> str:
    """Say how low a clock is next to those of sound devices; "" where it is not low, where it is
    low by less than `effect` or by `most_times` as much, or where the device's work may lower it.
    """
    others = [readings.get(CLOCK_NAME, 0.0) for readings in sound]
    lowest, clock = min(others, default=0.0), own.get(CLOCK_NAME, 0.0)
    reasons = int(own.get(REASONS_NAME, 0))
    if min(clock, lowest) <= 0 or is_at_rest(reasons):
        return ""
    if work_lowers_clock(own, sound):
        return ""
    ratio, apart = np.log(float(np.median(others)) / clock), np.log(lowest / clock)
    if apart < -np.log1p(-READINGS.clock_share):
        return ""
    theirs = [int(readings.get(REASONS_NAME, 0)) for readings in sound]
    most = np.inf if peculiar_reasons(reasons, theirs) else effect * most_times
    if not PAIRS.agrees_share * effect <= ratio <= most:
        return ""
    return (
        f"{clock:.0f} MHz against {np.median(others):.0f} MHz of sound devices "
        f"({times(float(np.exp(ratio)))})"
    )


def work_lowers_clock(own: Mapping[str, float], sound: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a device at its power limit may have a lower clock than sound ones for the
    work that it is given: it draws no less than they do, they are not limited themselves, and
    nothing else holds it down, as heat or a brake would, that holds down none of them.
    """
    reasons = int(own.get(REASONS_NAME, 0))
    theirs = [int(one.get(REASONS_NAME, 0)) for one in sound]
    is_limited = is_capped(reasons) and not peculiar_reasons(reasons, theirs)
    return is_limited and not (_draws_less(own, sound) or _is_lowest_of_limited(own, sound))


def _draws_less(own: Mapping[str, float], sound: Sequence[Mapping[str, float]]) -> bool:
    """Return whether a device draws far less power than all sound ones: by a fixed share, or by
    more than these differ from each other.

    Example: 534 W at its limit, where seven sound devices draw 581 to 620 W (602 W, sigma 13).
    """
    powers = [readings.get(POWER_NAME, 0.0) for readings in sound]
    least, power = min(powers, default=0.0), own.get(POWER_NAME, 0.0)
    if not 0.0 < power < least:
        return False
    is_far = _is_far_below(power, powers, READINGS.power_share / 2)
    return power <= (1.0 - READINGS.power_share) * least or is_far


def _is_lowest_of_limited(own: Mapping[str, float], sound: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the clock of a device at its power limit lies far below those of sound devices
    that run below their highest clocks as well: the same work lowers those by less.

    Where others wait for a rank that has more to do, they rest, and run at their highest clocks.
    """
    clocks = [readings.get(CLOCK_NAME, 0.0) for readings in sound]
    highest = [readings.get(HIGHEST_CLOCK_NAME, 0.0) for readings in sound]
    typical = float(np.median(highest)) if highest else 0.0
    are_limited = np.median(clocks) <= (1.0 - READINGS.clock_share) * typical
    clock = own.get(CLOCK_NAME, 0.0)
    return bool(are_limited) and _is_far_below(clock, clocks, READINGS.clock_share)


def _is_far_below(value: float, others: Sequence[float], least_share: float) -> bool:
    """Return whether a reading lies further below those of sound devices than these differ from
    each other, and below the least of them by a share.
    """
    if len(others) < ORDINARY.min_peers:
        return False
    logs = np.log(np.array(others)) - float(np.log(value))
    is_apart = logs.mean() >= ORDINARY.rms_factor * np.std(logs, ddof=1)
    return bool(is_apart and logs.min() >= -np.log1p(-least_share))


def draws_more(seen: Observations, row: int) -> bool:
    """Return whether a device draws notably more power than its stage peers': it works for longer
    than they do, for whomever.

    Example: 484 W against 321 W of peers that wait in NCCL's kernels; another process copies within
    its memory.
    """
    own, peers = _own_and_theirs(seen, row)
    theirs = [one[POWER_NAME] for one in peers if POWER_NAME in one]
    if POWER_NAME not in own or not theirs:
        return False
    return own[POWER_NAME] > (1.0 + READINGS.power_share) * float(np.median(theirs))


def _own_and_theirs(
    seen: Observations, row: int
) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
    """Return the readings of a rank's device, and those of its stage peers' that have some."""
    members = seen.members
    others = [one for one in members.rows_of_stage(int(members.stage[row])) if one != row]
    peers = [seen.counters.get(int(members.ranks[one]), {}) for one in others]
    return seen.counters.get(int(members.ranks[row]), {}), [one for one in peers if one]


def reading_evidence(seen: Observations, row: int) -> list[str]:
    """Return sentences about a rank's device readings next to its stage peers' medians."""
    own, peers = _own_and_theirs(seen, row)
    own = {name: value for name, value in own.items() if not name.startswith(PORT_PREFIX)}
    sentences = []
    for name in sorted(own):
        theirs = [readings[name] for readings in peers if name in readings]
        if theirs:
            sentences += _reading_beside_peers(name, own[name], theirs)
    if peers and own and not sentences:
        sentences.append(
            "the device readings of the window (clock, reasons to lower it, power, temperature) "
            "equal its peers': it was not throttled when they were taken"
        )
    return sentences


def _reading_beside_peers(name: str, own: float, peers: Sequence[float]) -> list[str]:
    theirs = float(np.median(peers))
    if name == REASONS_NAME:
        special = peculiar_reasons(int(own), [int(mask) for mask in peers])
        words = f"its clock is held down by {listed(special)} (NVML), its peers' is not"
        return [words] if special else []
    if "temperature" in name:
        notable = abs(own - theirs) > READINGS.temperature_degrees
    elif "power" in name or "clock" in name:
        share = READINGS.power_share if "power" in name else READINGS.clock_share
        notable = theirs > 0 and abs(own / theirs - 1) > share
    else:
        return []
    whose = "peer's" if len(peers) == 1 else "peers'"
    return [f"counter {name} is {own:.0f} against its {whose} {theirs:.0f}"] if notable else []
