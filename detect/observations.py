"""What the detector looks at, whatever it was read from: matrices by rank, iteration, operation.

Every matrix has one row a recorded rank, in the order of `Members.ranks`; NaN stands where a rank
did not record a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from detect.report import Alignment, Cause
from megascan.header import Json
from megascan.topology import Coordinates, Layout

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FORWARD, BACKWARD = 0, 1
PHASE_NAMES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Members:
    """The recorded ranks: where they sit and what they run on; row order of all matrices."""

    layout: Layout
    ranks: Ints
    place: Mapping[str, Ints]
    """Coordinates by axis (tp, cp, ep, dp, pp), each (rank,)."""
    labels: tuple[str, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    device_index: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...]
    """Global ranks that a row stands for: itself, or its TP group where that cannot be split."""
    device_kind: str = "cpu"

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def stage(self) -> Ints:
        """Pipeline stage of each row."""
        return self.place["pp"]

    @property
    def replica(self) -> Ints:
        """Data-parallel rank of each row: rows of one replica work on the same data."""
        return self.place["dp"]

    def row(self, rank: int) -> int:
        """Row of a global rank."""
        return int(np.flatnonzero(self.ranks == rank)[0])

    def rows_of_stage(self, stage: int) -> Ints:
        """Rows of one pipeline stage: a role's peers."""
        return np.flatnonzero(self.stage == stage)

    def taken(self, rows: Ints, workers: tuple[tuple[int, ...], ...]) -> Members:
        """Only some rows, standing for these workers."""

        def texts(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[row] for row in rows)

        return replace(
            self,
            ranks=self.ranks[rows],
            place={axis: values[rows] for axis, values in self.place.items()},
            labels=texts(self.labels),
            hosts=texts(self.hosts),
            devices=texts(self.devices),
            device_index=tuple(self.device_index[row] for row in rows),
            workers=workers,
        )

    def coordinates(self, row: int) -> dict[str, int]:
        """Place of one row on the axes that the job uses."""
        used = [axis for axis in ("dp", "pp", "cp", "ep", "tp") if getattr(self.layout, axis) > 1]
        return {axis: int(self.place[axis][row]) for axis in used}


def place_of(coordinates: list[Coordinates]) -> dict[str, Ints]:
    """Coordinates of the rows by axis."""
    return {
        axis: np.array([getattr(place, axis) for place in coordinates], dtype=np.int64)
        for axis in ("tp", "cp", "ep", "dp", "pp")
    }


@dataclass(frozen=True, kw_only=True)
class Work:
    """Self times of one class of operations, as logarithms of ns.

    An operation is (phase, chunk, microbatch); ranks of one stage do the same operations.
    """

    log_ns: Floats
    """(rank, iteration, operation)"""
    phase: Ints
    """(operation,): FORWARD or BACKWARD"""
    microbatch: Ints
    """(operation,)"""

    def restricted(self, keep: Bools) -> Work:
        """Only some of the iterations."""
        return Work(log_ns=self.log_ns[:, keep, :], phase=self.phase, microbatch=self.microbatch)


@dataclass(frozen=True)
class LateIn:
    """A rank's lateness in the operations of one edge or group, ns an iteration."""

    rank: int
    members: tuple[int, ...]
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfer times of communication, one row an edge (p2p) or a process group (collective).

    Rows of one `kind` (operation, axis and size alike) are comparable with each other.
    """

    members: tuple[tuple[int, ...], ...]
    """Global ranks of each row."""
    kinds: tuple[str, ...]
    kind: Ints
    """(row,): index into `kinds`"""
    size_bytes: Ints
    """(row,): -1 where unknown"""
    transfer_ns: Floats
    """(row, iteration): median of the row's transfers in the iteration."""
    total_ns: Floats
    """(row,): sum of the row's transfers an iteration."""
    late_ns: Floats
    """(rank, iteration): how much longer than the quickest member of the same operations the
    rank's own transfers take, summed over the iteration."""
    quick_ns: Floats
    """(rank, iteration): transfers of the quickest members of the rank's operations, summed."""
    late_in: tuple[LateIn, ...] = ()
    """Where that lateness arose."""


class Costs(Protocol):
    """Knows what findings cost the step."""

    def ratio(self, ranks: tuple[int, ...], cause: Cause) -> float | None:
        """Iteration time now over that without the finding; None where it cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Observations:
    """All that is known of a window, ready for comparison."""

    members: Members
    iterations: Ints
    iteration_ns: Floats
    """(iteration,): longest over the ranks."""
    work: Work
    layers: Work | None = None
    """Transformer layers only: the same shape on every stage."""
    busy_ns: Floats
    """(rank, iteration): self time of all compute, the optimizer included."""
    optimizer_ns: Floats
    """(rank, iteration)"""
    host_gap_ns: Floats
    """(rank, iteration): time that no span covers."""
    loader_ns: Floats
    """(rank, iteration)"""
    gc_ns: Floats
    """(rank, iteration)"""
    gc_traced: bool = False
    stalled_ns: Floats
    """(rank, iteration), GPU runs: the device stood still inside passes, its queue empty."""
    stolen_ns: Floats
    """(rank, iteration), CPU runs: wall less CPU time of compute; 0 elsewhere."""
    starved_share: Floats | None = None
    """(rank, iteration), GPU runs: share of operations that began as soon as they were launched:
    the device waited for the host. None where launches were not recorded."""
    entangled_phases: tuple[int, ...] = ()
    """Phases whose compute spans contain waiting for the TP group; measured up to its launch."""
    mixes_communication: bool = False
    """CPU runs at base granularity with TP: CPU time of compute holds that of communication."""
    splits_tensor_groups: bool = True
    """False when communication inside TP groups was not traced: their members' times are one."""
    transfers: Transfers | None = None
    counters: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Device readings by rank, median over windows."""
    alignment: Alignment | None = None
    completeness: Mapping[str, Json] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""
    costs: Costs | None = None
    """Costs by replay, where the observations come from a timeline."""

    @property
    def host_ns(self) -> Floats:
        """(rank, iteration): all time lost to the host: between spans and inside passes."""
        return self.host_gap_ns + self.stalled_ns + self.stolen_ns
