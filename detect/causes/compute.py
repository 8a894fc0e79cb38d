"""Ranks whose computation is slow.

Peers are the other ranks of the stage (DP, TP, CP). A stage with one or two ranks has too few; then
transformer layers of other stages, which have the same shape, join in, and a pair is decided by
`detect.causes.pairs` or left undecided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.observations import BACKWARD, FORWARD, Bools, Floats, Ints, Observations, Work
from detect.settings import DetectorSettings
from detect.stats import robust
from detect.stats.noise import Noise, Usual
from detect.stats.persistence import Course
from detect.stats.residuals import (
    Residuals,
    compare_within,
    data_of,
    peer_groups,
)
from detect.stats.search import SearchTask, Suspect, search

GPU_NOISE_FLOOR = 0.001
CPU_NOISE_FLOOR = 0.003
"""Log units an iteration's value always varies by, however still the trace looks."""
GPU_SPREAD = 0.004
CPU_SPREAD = 0.01
"""Lasting differences between sound devices (log units) that are usual."""
MOST_OF_FLOOR = 1.0 / 6.0
"""Who asks for small slowdowns takes what is usual for at most this share of them."""
MIXED_FLOOR = 1.3
"""Processes that wait for each other over gloo poll and copy by a fifth of their CPU time."""
CACHE_SHARE = 0.4
MIN_POOL = 3


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A row that computes slowly, and against whom it was compared."""

    suspect: Suspect
    num_peers: int
    across_stages: bool
    """Compared by transformer layers with other stages."""
    by_phase: tuple[float, float]
    """Log slowdown of forward and of backward."""
    optimizer: float
    """Log slowdown of the optimizer step; NaN when not comparable."""


@dataclass(frozen=True, kw_only=True)
class ComputeSearch:
    """Result over all rows. `residuals` is with the slow rows out of everybody's peers."""

    slow: tuple[SlowRow, ...]
    noise: Noise
    num_compared: int
    """Rows that have at least one peer."""
    residuals: Residuals
    pool: Residuals | None
    """Against all stages' transformer layers; None where not needed or not traced."""

    @property
    def slow_rows(self) -> Bools:
        """(row,) who computes slowly."""
        mask = np.zeros(len(self.residuals.value), dtype=bool)
        mask[[one.suspect.row for one in self.slow]] = True
        return mask


def search_compute(seen: Observations, settings: DetectorSettings, num_tests: int) -> ComputeSearch:
    """Slow rows by role; rows of lonely stages by the layers of all stages."""
    groups = peer_groups(seen.work, seen.members)
    smallest = min(len(rows) for rows in groups)
    use_pool = seen.layers is not None and smallest < MIN_POOL <= len(seen.members)
    if smallest == 1 and use_pool and seen.layers is not None:
        field = _Field(seen.layers, [np.arange(len(seen.members))], across_stages=True)
        return _search(seen, field, settings, num_tests)
    found = _search(seen, _Field(seen.work, groups, across_stages=False), settings, num_tests)
    if not use_pool or seen.layers is None:
        return found
    everybody = [np.arange(len(seen.members))]
    pool = compare_within(seen.layers, seen.members, everybody, found.slow_rows)
    return replace(found, pool=pool)


@dataclass(frozen=True)
class _Field:
    """Operations to compare, and the groups of rows to compare within."""

    work: Work
    groups: list[Ints]
    across_stages: bool


def _search(
    seen: Observations, field: _Field, settings: DetectorSettings, num_tests: int
) -> ComputeSearch:
    work, groups, across_stages = field.work, field.groups, field.across_stages
    num_rows = len(seen.members)
    is_cpu = seen.members.device_kind == "cpu"
    floor = float(np.log(least_slowdown(seen, settings)))
    spread = CPU_SPREAD if is_cpu else GPU_SPREAD
    data = data_of(work, seen.members, groups)
    task = SearchTask(
        compare=lambda excluded: compare_within(work, seen.members, groups, excluded).value,
        num_rows=num_rows,
        num_tests=num_tests,
        floor=floor,
        usual=Usual(
            floor=CPU_NOISE_FLOOR if is_cpu else GPU_NOISE_FLOOR,
            spread=min(spread, floor * MOST_OF_FLOOR),
            level_error=data.level_error,
            scattered=not data.used,
        ),
        forbidden=np.zeros(num_rows, dtype=bool),
        groups=tuple(groups),
    )
    result = search(task, settings)
    excluded = np.zeros(num_rows, dtype=bool)
    excluded[[one.row for one in result.suspects]] = True
    residuals = compare_within(work, seen.members, groups, excluded)
    optimizer = np.full_like(seen.optimizer_ns, np.nan)
    if not across_stages:
        optimizer = optimizer_residuals(seen, groups, excluded)
    described = [_describe(one, residuals, optimizer, across_stages) for one in result.suspects]
    slow = tuple(one for one in described if not (is_cpu and _is_cache_effect(one)))
    compared = int((residuals.num_peers > 0).sum())
    return ComputeSearch(
        slow=slow,
        noise=result.noise,
        num_compared=compared,
        residuals=residuals,
        pool=residuals if across_stages else None,
    )


def _is_cache_effect(slow: SlowRow) -> bool:
    """Passes of a CPU process that are a little slower while its optimizer is not.

    CPU time grows with cold caches after sleeping and with memory shared by neighbours, by up to a
    fifth; a slow core slows the optimizer as well.
    """
    effect = slow.suspect.course.effect
    return effect < np.log(MIXED_FLOOR) and slow.optimizer < CACHE_SHARE * effect


def optimizer_residuals(seen: Observations, groups: list[Ints], excluded: Bools) -> Floats:
    """Log optimizer time less that of the stage's other ranks, (rank, iteration)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(seen.optimizer_ns > 0, np.log(seen.optimizer_ns), np.nan)
    residual = np.full_like(log_ns, np.nan)
    for rows in groups:
        expected = robust.expected_from_others(log_ns[rows], excluded[rows])
        residual[rows] = log_ns[rows] - expected
    return residual


def _describe(
    suspect: Suspect, residuals: Residuals, optimizer: Floats, across_stages: bool
) -> SlowRow:
    row, active = suspect.row, suspect.course.active
    phases = [
        float(robust.median(residuals.by_phase[phase, row][active]))
        for phase in (FORWARD, BACKWARD)
    ]
    return SlowRow(
        suspect=suspect,
        num_peers=int(residuals.num_peers[row]),
        across_stages=across_stages,
        by_phase=(phases[0], phases[1]),
        optimizer=float(robust.median(optimizer[row][active])),
    )


def least_slowdown(seen: Observations, settings: DetectorSettings) -> float:
    """Effect floor of compute: higher where communication is mixed into the CPU time."""
    return max(settings.min_slowdown, MIXED_FLOOR if seen.mixes_communication else 1.0)


def excess_compute_ns(seen: Observations, row: int, course: Course) -> Floats:
    """Compute time that the row spends above its peers in each iteration, (iteration,)."""
    share = 1.0 - float(np.exp(-course.effect))
    return np.where(course.active, np.nan_to_num(seen.busy_ns[row]) * share, 0.0)
