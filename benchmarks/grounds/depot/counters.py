"""Read GPUs as NVML does at the end of a window: clocks, why they are low, power, heat."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.depot.faults import Trouble
from benchmarks.grounds.depot.luck import Fortune

POWER_CAP, SOFT_HEAT, HARD_HEAT, SLOWED = 0x4, 0x20, 0x40, 0x8
_OF_COUNTERS = 3001


def counters_of(
    fortune: Fortune, trouble: Trouble, rank: int, iteration: int, now_s: float
) -> dict[str, float]:
    """Return the readings of one GPU at one moment of the true clock."""
    rng = np.random.default_rng([fortune.seed, _OF_COUNTERS, rank, iteration])
    chip = fortune.job.hardware.chip
    slow, is_hot = _slowness(trouble, rank, iteration, now_s)
    own = chip.busy_mhz / fortune.clocks[rank]
    clock = min(float(chip.most_mhz), own + float(rng.normal(0, 8))) / slow
    clock = 15.0 * round(clock / 15)
    reasons = POWER_CAP if clock < chip.most_mhz else 0
    if slow > 1.02:
        reasons = (HARD_HEAT | SLOWED if is_hot else SOFT_HEAT) | (reasons if slow < 1.1 else 0)
    heat = rng.normal(62, 4) + (20 if slow > 1.02 else 0)
    power = chip.power_w * (1 - float(np.abs(rng.normal(0, 0.03)))) / slow**1.5
    return {
        "sm_clock_mhz": clock,
        "sm_clock_max_mhz": float(chip.most_mhz),
        "clock_event_reasons": float(reasons),
        "power_w": round(power, 3),
        "temperature_c": float(round(heat)),
    }


def _slowness(trouble: Trouble, rank: int, iteration: int, now_s: float) -> tuple[float, bool]:
    """Return how much lower a fault holds the clock now, and whether by throttling."""
    slow, is_hot = 1.0, False
    for number, fault in enumerate(trouble.faults):
        if rank not in fault.ranks or not fault.holds(iteration) or not fault.is_shown:
            continue
        if fault.kind == "gpu_clock":
            slow *= fault.factor
        elif fault.kind == "throttling":
            bursts = trouble.bursts_of(number)
            is_on = any(begin <= now_s < end for begin, end, _ in bursts)
            if is_on or (fault.in_whole_iterations and trouble.hits(number, iteration)):
                slow, is_hot = slow * fault.factor, True
    return slow, is_hot
