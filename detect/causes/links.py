"""Connections that transfer slowly: a pair, a group, or everything one rank takes part in.

Each edge (p2p) or process group is compared with others of the same axis, operation, bytes,
members and hosts crossed. Which connection is bad then follows by elimination: a rank is named
alone only if at least two of its edges or groups are slow and next to none of its others is fine;
otherwise the ranks that all the slow groups share, otherwise the smallest slow group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats, Ints, Observations, Transfers
from detect.observe.transfers import log_residuals
from detect.settings import DetectorSettings
from detect.stats import robust
from detect.stats.noise import Noise, Usual
from detect.stats.persistence import Course
from detect.stats.search import SearchTask, Suspect, search

NOISE_FLOOR = 0.01
USUAL_SPREAD = 0.03
"""Log units by which equal links differ for good."""
CPU_MIN_SLOWDOWN = 1.5
"""On the CPU a transfer is mostly the operating system's scheduling."""
CPU_MIN_STEP_SHARE = 0.02
ALL_OF_A_RANK = 0.7
"""Share of a rank's edges and groups that must be slow before the rank itself is named."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """One bad connection: `ranks` is one (its NIC or host), two (a pair) or a group."""

    ranks: tuple[int, ...]
    course: Course
    q_value: float
    units: tuple[tuple[int, ...], ...]
    """Members of the edges and groups that are slow because of it."""
    num_peers: int
    kind: str
    normal_ns: float
    actual_ns: float
    excess_ns: Floats
    """(iteration,): transfer time lost."""


@dataclass(frozen=True, kw_only=True)
class LinkSearch:
    """Slow connections, and the noise of the others."""

    slow: tuple[SlowLink, ...]
    noise: Noise
    num_compared: int


@dataclass(frozen=True, kw_only=True)
class _Units:
    """Rows of transfers put together by members."""

    members: tuple[tuple[int, ...], ...]
    unit: Ints
    """(transfer row,)"""
    transfers: Transfers

    def values(self, excluded: Bools) -> Floats:
        """Log residual, (unit, iteration): mean over the unit's kinds."""
        residual = log_residuals(self.transfers, excluded[self.unit])
        return np.stack(
            [robust.mean(residual[self.unit == one], axis=0) for one in range(len(self.members))]
        )


def _units(transfers: Transfers) -> _Units:
    names = sorted(set(transfers.members))
    place = {name: number for number, name in enumerate(names)}
    unit = np.array([place[name] for name in transfers.members], dtype=np.int64)
    return _Units(members=tuple(names), unit=unit, transfers=transfers)


def search_links(
    seen: Observations, settings: DetectorSettings, num_tests: int
) -> LinkSearch | None:
    """Slow connections; None when no two can be compared."""
    if seen.transfers is None or not len(seen.transfers.members):
        return None
    units = _units(seen.transfers)
    nobody = np.zeros(len(units.members), dtype=bool)
    compared: Bools = np.asarray(np.isfinite(units.values(nobody)).any(axis=1))
    if compared.sum() < 2:
        return None
    is_cpu = seen.members.device_kind == "cpu"
    least = max(settings.min_link_slowdown, CPU_MIN_SLOWDOWN if is_cpu else 1.0)
    task = SearchTask(
        compare=units.values,
        num_rows=len(units.members),
        num_tests=num_tests + int(compared.sum()),
        floor=float(np.log(least)),
        usual=Usual(floor=NOISE_FLOOR, spread=USUAL_SPREAD),
        forbidden=~compared,
    )
    result = search(task, settings)
    slow = _attribute(seen, units, compared, result.suspects)
    least_ns = CPU_MIN_STEP_SHARE * float(np.median(seen.iteration_ns)) if is_cpu else 0.0
    kept = [one for one in slow if float(np.mean(one.excess_ns)) >= least_ns]
    return LinkSearch(slow=tuple(kept), noise=result.noise, num_compared=int(compared.sum()))


def _attribute(
    seen: Observations, units: _Units, compared: Bools, suspects: tuple[Suspect, ...]
) -> list[SlowLink]:
    error_ns = seen.alignment.residual_p99_ns if seen.alignment else 0.0
    left = [one for one in suspects if _above(units, one, error_ns)]
    found = []
    while left:
        ranks = _culprits(units, compared, left, left[0])
        explained = [one for one in left if set(ranks) <= set(units.members[one.row])]
        found.append(_link(units, ranks, explained, int(compared.sum())))
        left = [one for one in left if one not in explained]
    return found


def _above(units: _Units, suspect: Suspect, error_ns: float) -> bool:
    """Whether the lost time exceeds what clock errors could feign."""
    actual, normal = _times(units, suspect)
    return actual - normal > 2 * error_ns  # one of each end


def _times(units: _Units, suspect: Suspect) -> tuple[float, float]:
    rows = np.flatnonzero(units.unit == suspect.row)
    row = int(rows[np.argmax(units.transfers.total_ns[rows])])
    actual = float(robust.median(units.transfers.transfer_ns[row][suspect.course.active]))
    return actual, actual / float(np.exp(suspect.course.effect))


def _culprits(
    units: _Units, compared: Bools, slow: list[Suspect], worst: Suspect
) -> tuple[int, ...]:
    slow_rows = {one.row for one in slow}
    named: list[tuple[int, int]] = []
    for rank in units.members[worst.row]:
        mine = [
            unit for unit, ranks in enumerate(units.members) if rank in ranks and compared[unit]
        ]
        hit = [unit for unit in mine if unit in slow_rows]
        if len(hit) >= 2 and len(hit) >= ALL_OF_A_RANK * len(mine):
            named.append((len(hit), rank))
    if named:
        most = max(named)[0]
        ranks = tuple(sorted(rank for count, rank in named if count == most))
        if len(ranks) <= 2:
            return ranks
    touching = [set(units.members[one.row]) for one in slow]
    shared = set(units.members[worst.row])
    for ranks_of_unit in sorted(touching, key=len):
        if len(shared & ranks_of_unit) >= 2:
            shared &= ranks_of_unit
    return tuple(sorted(shared))


def _link(
    units: _Units,
    ranks: tuple[int, ...],
    explained: list[Suspect],
    num_compared: int,
) -> SlowLink:
    best = min(explained, key=lambda one: (one.q_value, -one.course.effect))
    rows = np.flatnonzero(np.isin(units.unit, [one.row for one in explained]))
    share = 1.0 - float(np.exp(-best.course.effect))
    lost = float(units.transfers.total_ns[rows].sum()) * share
    actual, normal = _times(units, best)
    row = int(np.flatnonzero(units.unit == best.row)[0])
    return SlowLink(
        ranks=ranks,
        course=best.course,
        q_value=best.q_value,
        units=tuple(units.members[one.row] for one in explained),
        num_peers=num_compared - len(explained),
        kind=units.transfers.kinds[int(units.transfers.kind[row])],
        normal_ns=normal,
        actual_ns=actual,
        excess_ns=np.where(best.course.active, lost, 0.0),
    )
