"""Rows that compute slowly: who is slower than its peers, by how much, and when.

Peers are the other ranks of the stage (DP, TP, CP). A stage with one or two ranks has too few; then
transformer layers of other stages, which have the same shape, join in. Whose fault a slow row is,
`detect.causes.compute` judges.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from detect.causes.device import optimizer_residuals
from detect.causes.spec import Inquiry, mask_of
from detect.observe.observations import BACKWARD, FORWARD, Members, Observations, Work
from detect.stats import robust
from detect.stats.noise import Noise, Usual
from detect.stats.residuals import Residuals, compare_within, data_of, peer_groups
from detect.stats.search import SearchTask, Suspect, search
from detect.thresholds import COMPUTE as LIMITS
from detect.thresholds import SEARCH, DetectorSettings
from megascan.arrays import Flags, Floats, Integers


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A row that computes slowly, and against whom it was compared."""

    suspect: Suspect
    peers: Integers
    """Rows that it was compared with."""
    across_stages: bool
    """Compared by transformer layers with other stages."""
    by_phase: tuple[float, float]
    """Log slowdown of forward and of backward."""
    optimizer: float
    """Log slowdown of the optimizer step; NaN when not comparable."""

    @property
    def num_peers(self) -> int:
        """Return how many rows it was compared with."""
        return len(self.peers)


@dataclass(frozen=True, kw_only=True)
class ComputeSearch:
    """Result over all rows. `residuals` is with the slow rows out of everybody's peers."""

    slow: tuple[SlowRow, ...]
    noise: Noise
    num_compared: int
    """Rows that have at least one peer."""
    residuals: Residuals
    optimizer: Floats
    """(row, iteration): log optimizer time minus that of the stage's other rows."""
    pool: Residuals | None
    """Against all stages' transformer layers; None where not needed or not traced."""

    @property
    def slow_rows(self) -> Flags:
        """Flag who computes slowly, (row,)."""
        return mask_of([one.suspect.row for one in self.slow], len(self.residuals.value))


def search_compute(inquiry: Inquiry) -> ComputeSearch:
    """Search the rows of each stage; the rows of lonely stages by the layers of all stages."""
    seen = inquiry.seen
    groups = peer_groups(seen.work, seen.members)
    everybody = [np.arange(len(seen.members))]
    smallest = min(len(rows) for rows in groups)
    # kernels of one name and launch are the same work on both of two stages, layers need not be
    least = LIMITS.min_pool if seen.tells_passes or smallest > 1 else 2
    if seen.layers is None or smallest >= LIMITS.min_pool or len(seen.members) < least:
        return _search_field(inquiry, _Field(seen.work, groups, across_stages=False))
    if smallest == 1:
        return _search_field(inquiry, _Field(seen.layers, everybody, across_stages=True))
    nobody = np.zeros(len(seen.members), dtype=bool)
    level = robust.centre(compare_within(seen.layers, seen.members, everybody, nobody).value)
    shown = np.asarray(level >= LIMITS.lone_floor_log)
    found = _search_field(inquiry, _Field(seen.work, groups, across_stages=False), shown)
    pool = compare_within(seen.layers, seen.members, everybody, found.slow_rows)
    return replace(found, pool=pool)


@dataclass(frozen=True)
class _Field:
    """Operations to compare, and the groups of rows to compare within."""

    work: Work
    groups: list[Integers]
    across_stages: bool
    known: dict[bytes, Residuals] = field(default_factory=dict)
    """By who is excluded: whoever is found was compared so in the search."""

    def compare(self, members: Members, excluded: Flags) -> Residuals:
        key = excluded.tobytes()
        if key not in self.known:
            self.known[key] = compare_within(self.work, members, self.groups, excluded)
        return self.known[key]


def _search_field(inquiry: Inquiry, field: _Field, shown: Flags | None = None) -> ComputeSearch:
    """Search one field; `shown` rows are slow beside all stages, too, and need no change of their
    own to be suspected when their peer changes.
    """
    seen = inquiry.seen
    members, num_rows = seen.members, len(seen.members)
    is_cpu = members.device_kind == "cpu"
    own = robust.median(field.work.log_ns, axis=2)
    if shown is not None:
        own[shown] = np.nan
    task = SearchTask(
        compare=lambda excluded: field.compare(members, excluded).value,
        num_rows=num_rows,
        num_tests=inquiry.num_tests,
        floor=float(np.log(least_slowdown(seen, inquiry.settings))),
        usual=_usual(inquiry, field),
        forbidden=np.zeros(num_rows, dtype=bool),
        groups=tuple(field.groups),
        own=own,
        patience=SEARCH.patience_for_hosts,
    )
    result = search(task, inquiry.settings)
    excluded = mask_of([one.row for one in result.suspects], num_rows)
    residuals = field.compare(members, excluded)
    optimizer = np.full_like(seen.optimizer_ns, np.nan)
    if not field.across_stages:
        optimizer = optimizer_residuals(seen, field.groups, excluded)
    described = [_describe(one, residuals, optimizer, field, excluded) for one in result.suspects]
    return ComputeSearch(
        slow=tuple(one for one in described if not (is_cpu and _is_cache_effect(one))),
        noise=result.noise,
        num_compared=int((residuals.num_peers > 0).sum()),
        residuals=residuals,
        optimizer=optimizer,
        pool=residuals if field.across_stages else None,
    )


def _usual(inquiry: Inquiry, field: _Field) -> Usual:
    """Return what is known of sound devices before looking."""
    seen = inquiry.seen
    is_cpu = seen.members.device_kind == "cpu"
    floor = float(np.log(least_slowdown(seen, inquiry.settings)))
    spread = LIMITS.cpu_spread_log if is_cpu else LIMITS.gpu_spread_log
    data = data_of(field.work, seen.members, field.groups)
    return Usual(
        floor=LIMITS.cpu_noise_log if is_cpu else LIMITS.gpu_noise_log,
        spread=min(spread, floor * LIMITS.spread_of_floor_share),
        level_error=data.level_error,
        most=LIMITS.cpu_most_log if is_cpu else LIMITS.gpu_most_log,
        tail_degrees=LIMITS.tail_degrees,
        scattered=not data.used,
    )


def _is_cache_effect(slow: SlowRow) -> bool:
    """Return whether passes of a CPU process are a little slower while its optimizer is not."""
    effect = slow.suspect.course.effect
    return effect < np.log(LIMITS.cache_ratio) and slow.optimizer < LIMITS.cache_share * effect


def _describe(
    suspect: Suspect, residuals: Residuals, optimizer: Floats, field: _Field, excluded: Flags
) -> SlowRow:
    row, active = suspect.row, suspect.course.active
    phases = [
        float(robust.median(residuals.by_phase[phase, row][active]))
        for phase in (FORWARD, BACKWARD)
    ]
    group = next(rows for rows in field.groups if row in rows)
    return SlowRow(
        suspect=suspect,
        peers=group[~excluded[group] & (group != row)],
        across_stages=field.across_stages,
        by_phase=(phases[0], phases[1]),
        optimizer=float(robust.median(optimizer[row][active])),
    )


def least_slowdown(seen: Observations, settings: DetectorSettings) -> float:
    """Return the effect floor of compute: higher where communication is mixed into the CPU time."""
    return max(settings.min_slowdown, LIMITS.mixed_ratio if seen.mixes_communication else 1.0)
