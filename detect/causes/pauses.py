"""Time that a rank loses beside compute: loading data, garbage collection, the host, late exits.

These are additive: the measure is the excess over the peers' time as a share of the iteration, so
0.05 means that the rank loses 5 % of every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import Bools, Floats, Ints, Observations
from detect.report import Cause
from detect.settings import DetectorSettings
from detect.stats import robust
from detect.stats.noise import Noise, Usual
from detect.stats.search import SearchTask, Suspect, search

NOISE_FLOOR = 2e-4
"""Share of an iteration by which such times always vary."""
USUAL_SPREAD = 0.003
"""Share of an iteration by which sound ranks differ for good."""
FLOOR_SHARE = 1.0 / 3.0
"""Directly measured losses are reported from a third of the compute floor on (1 % of a step)."""
HOST_BOUND = 0.8
HOST_BOUND_SHARE = 0.05
"""Where every device waits for its host, ranks differ in such gaps by more than 1 % of a step."""
CPU_FLOOR_SHARE = 1.0
"""Processes that share cores take time from each other all the while."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One class of lost time, (rank, iteration) ns, and who is compared with whom."""

    cause: Cause
    name: str
    time_ns: Floats
    groups: list[Ints]
    bursty: bool = False
    """Comes in rare bursts on healthy ranks too (garbage collection)."""
    least_share: float = 0.0
    """Share of the iteration below which such a difference has other reasons."""


@dataclass(frozen=True, kw_only=True)
class LossSearch:
    """Who loses time of one class."""

    loss: Loss
    suspects: tuple[Suspect, ...]
    noise: Noise
    floor: float
    """Share of the iteration from which on a loss is reported."""
    excess_ns: Floats
    """(rank, iteration) above the peers."""


def is_host_bound(seen: Observations) -> bool:
    """Whether devices wait for their hosts nearly all the time, on the usual rank."""
    if seen.starved_share is None:
        return False
    return float(np.nan_to_num(np.nanmedian(seen.starved_share))) >= HOST_BOUND


def losses(seen: Observations, settings: DetectorSettings) -> list[Loss]:
    """The classes that this trace can tell about."""
    members = seen.members
    everyone = [np.arange(len(members))]
    result = []
    if np.isfinite(seen.loader_ns).any():
        result.append(_loading(seen, settings))
    if seen.gc_traced:
        result.append(
            Loss(
                cause=Cause.GC,
                name="garbage collection",
                time_ns=seen.gc_ns,
                groups=everyone,
                bursty=True,
            )
        )
    stages = [members.rows_of_stage(int(stage)) for stage in np.unique(members.stage)]
    groups = stages if min(len(rows) for rows in stages) > 1 else everyone
    lost = seen.host_ns
    if np.isfinite(lost).any():
        result.append(
            Loss(
                cause=Cause.HOST,
                name="time outside operations",
                time_ns=lost,
                groups=groups,
                bursty=members.device_kind == "cpu",
                least_share=HOST_BOUND_SHARE if is_host_bound(seen) else 0.0,
            )
        )
    if seen.transfers is not None:
        result.append(
            Loss(
                cause=Cause.LINK,
                name="late exit from communication",
                time_ns=seen.transfers.late_ns,
                groups=groups,
                bursty=members.device_kind == "cpu",
            )
        )
    return result


def _loading(seen: Observations, settings: DetectorSettings) -> Loss:
    """Rows with the same loading to do: stage and TP rank alike, else all rows that load.

    On a GPU a stage's place in the pipeline decides how long its device has to wait, so across
    stages only differences count that stages do not have of their own.
    """
    members = seen.members
    on_gpu = members.device_kind == "cuda"
    loads = np.isfinite(seen.loader_ns).any(axis=1)
    key = members.stage * 4096 + members.place["tp"]
    groups = [np.flatnonzero(loads & (key == one)) for one in np.unique(key[loads])]
    across = not groups or min(len(rows) for rows in groups) < 2
    if across:
        groups = [np.flatnonzero(loads & (members.place["tp"] == 0))]
    return Loss(
        cause=Cause.LOADER,
        name="the device idle while data were loaded" if on_gpu else "data loading",
        time_ns=seen.loader_ns,
        groups=groups,
        least_share=settings.min_stage_excess - 1.0 if on_gpu and across else 0.0,
    )


def search_loss(
    seen: Observations, loss: Loss, settings: DetectorSettings, num_tests: int, forbidden: Bools
) -> LossSearch:
    """Rows that lose more time of this class than their peers."""
    step_ns = float(np.median(seen.iteration_ns))

    def compare(excluded: Bools) -> Floats:
        excess = np.full_like(loss.time_ns, np.nan)
        for rows in loss.groups:
            expected = robust.expected_from_others(loss.time_ns[rows], excluded[rows])
            excess[rows] = loss.time_ns[rows] - expected
        return np.asarray(excess / step_ns)

    is_cpu = seen.members.device_kind == "cpu"
    share = CPU_FLOOR_SHARE if is_cpu else FLOOR_SHARE
    task = SearchTask(
        compare=compare,
        num_rows=len(seen.members),
        num_tests=num_tests,
        floor=max((settings.min_slowdown - 1.0) * share, loss.least_share),
        usual=Usual(floor=NOISE_FLOOR, spread=USUAL_SPREAD, bursty=loss.bursty),
        forbidden=forbidden,
        groups=tuple(loss.groups),
        by_majority=True,
    )
    result = search(task, settings)
    excluded = np.zeros(len(seen.members), dtype=bool)
    excluded[[one.row for one in result.suspects]] = True
    return LossSearch(
        loss=loss,
        suspects=result.suspects,
        noise=result.noise,
        floor=task.floor,
        excess_ns=np.nan_to_num(compare(excluded) * step_ns),
    )
