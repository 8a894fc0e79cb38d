"""Say what NVML tells of the devices when a window ends.

Clocks are read between iterations, when a chip may be idle and its clock high; a lower clock is
seen only while it lasts. The bits of the reasons are those of nvmlClocksEventReasons: 0x4 software
power cap, 0x8 hardware slowdown, 0x20 software thermal, 0x40 hardware thermal, 0x80 power brake.
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.rack.run import Run
from benchmarks.grounds.rack.trouble import Trouble, holding

_REASONS = {"gpu_clock": 0x8, "throttling": 0x20, "power_brake": 0x80}
_STEP_MHZ = 15.0


def counters_of(run: Run, troubles: tuple[Trouble, ...], at: int) -> list[dict[str, float]]:
    """Return the readings of each rank behind the traced iteration `at`, counted from 0."""
    job = run.job
    draws = np.random.default_rng([job.seed, 9, at])
    highest = job.rack.chip.clock_mhz
    is_capped = draws.random(job.num_ranks) < 0.4
    clocks = highest * np.where(is_capped, draws.uniform(0.86, 0.98, job.num_ranks), 1.0)
    reasons = np.where(is_capped, 0x4, 0)
    for number, trouble in enumerate(troubles):
        kind = trouble.planted.kind
        lasts = holding(job, trouble, np.random.default_rng([job.seed, 2, number]))
        if kind in _REASONS and lasts[at, -1]:
            for rank in trouble.touched:
                clocks[rank] /= trouble.planted.factor
                reasons[rank] |= _REASONS[kind]
    warmth = 58.0 + 14.0 * (1.0 - np.exp(-job.tracing.iterations[at] / 15.0))
    return [
        {
            "sm_clock_mhz": float(_STEP_MHZ * round(clocks[rank] / _STEP_MHZ)),
            "sm_clock_max_mhz": highest,
            "clock_event_reasons": float(reasons[rank]),
            "power_w": round(float(draws.uniform(0.35, 0.95) * 700.0), 3),
            "temperature_c": float(round(warmth + draws.normal(0.0, 3.0))),
        }
        for rank in range(job.num_ranks)
    ]
