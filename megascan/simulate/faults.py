"""Planted faults: what is wrong with which rank, how much, and in which iterations.

rank=3,kind=compute,factor=1.5,from=5,to=10
rank=3,kind=link,peer=7,factor=4           only the connection of ranks 3 and 7
rank=3,kind=host,factor=1.4,period=4       on for four iterations, off for four, and so on
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascan.errors import ConfigError, UsageError
from megascan.fault_kinds import FaultKind
from megascan.header import Json
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of one rank, in iterations first..last (from 1; both included, None: to the end).

    COMPUTE multiplies every computation of the rank. LINK multiplies the transfer time of the
    rank's communications, or of those with one peer. HOST makes the host need `factor` times the
    device time to launch an operation, which starves the device (on the CPU: takes the thread away
    for the excess). LOADER multiplies the time to load a microbatch. GC adds collector pauses of
    `factor` - 1 times the rank's computation.

    `peer` (links only) restricts it to one pair; `period` switches it on and off every so many
    iterations. Raises ConfigError for values that mean nothing.
    """

    rank: int
    kind: FaultKind
    factor: float
    first_iteration: int = 1
    last_iteration: int | None = None
    peer: int | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        if not 1.0 <= self.factor < float("inf"):
            raise ConfigError(f"fault factor is {self.factor}, expected 1 or more (1.5: slower)")
        if self.first_iteration < 1:
            raise ConfigError(f"fault begins at {self.first_iteration}, iterations count from 1")
        if self.last_iteration is not None and self.last_iteration < self.first_iteration:
            raise ConfigError(
                f"fault ends at iteration {self.last_iteration}, before it begins at "
                f"{self.first_iteration}"
            )
        if self.peer is not None and (self.kind != FaultKind.LINK or self.peer == self.rank):
            raise ConfigError(f"fault peer is {self.peer}: give another rank, for kind=link only")
        if self.period is not None and self.period < 1:
            raise ConfigError(f"fault period is {self.period}, expected 1 iteration or more")

    def active(self, iteration: int) -> bool:
        """Whether the fault slows an iteration (from 1)."""
        last = self.last_iteration
        inside = self.first_iteration <= iteration and (last is None or iteration <= last)
        if not inside or self.period is None:
            return inside
        return (iteration - self.first_iteration) // self.period % 2 == 0

    def check(self, layout: Layout) -> None:
        """Raise ConfigError when the job has no such rank, or the rank nothing to slow."""
        for rank in (self.rank, self.peer):
            if rank is not None and not 0 <= rank < layout.world_size:
                raise ConfigError(
                    f"fault names rank {rank}, the job has ranks 0 to {layout.world_size - 1}"
                )
        place = layout.coordinates(self.rank)
        loads = place.tp == 0 and place.pp in (0, layout.pp - 1)
        if self.kind == FaultKind.LOADER and not loads:
            raise ConfigError(
                f"rank {self.rank} loads no data, so that its loader cannot be slow; choose TP "
                "rank 0 of the first or last stage"
            )

    def to_json(self) -> dict[str, Json]:
        """As it stands in the ground truth, with the keys of `parse_fault`."""
        record: dict[str, Json] = {
            "rank": self.rank,
            "kind": str(self.kind),
            "factor": self.factor,
            "from": self.first_iteration,
            "to": self.last_iteration,
        }
        optional: dict[str, Json] = {"peer": self.peer, "period": self.period}
        return record | {name: value for name, value in optional.items() if value is not None}


def parse_fault(text: str) -> Fault:
    """A fault from `rank=3,kind=compute,factor=1.5[,from=5][,to=10][,peer=7][,period=4]`.

    Raises UsageError naming the part that cannot be read.
    """
    example = "expected for example rank=3,kind=compute,factor=1.5,from=5,to=10"
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in values:
            raise UsageError(f"fault {text!r}: cannot read {part!r}, {example}")
        values[name] = value.strip()
    unknown = sorted(set(values) - {"rank", "kind", "factor", "from", "to", "peer", "period"})
    missing = [name for name in ("rank", "kind", "factor") if name not in values]
    if unknown or missing:
        problem = f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
        raise UsageError(f"fault {text!r}: {problem}, {example}")
    if values["kind"] not in list(FaultKind):
        raise UsageError(
            f"fault {text!r}: unknown kind {values['kind']!r}, expected one of "
            f"{', '.join(FaultKind)}"
        )
    try:
        return _fault_of(values)
    except ValueError as error:
        raise UsageError(f"fault {text!r}: {error}, {example}") from error


def _fault_of(values: dict[str, str]) -> Fault:
    def number(name: str) -> int | None:
        return int(values[name]) if name in values else None

    return Fault(
        rank=int(values["rank"]),
        kind=FaultKind(values["kind"]),
        factor=float(values["factor"]),
        first_iteration=int(values.get("from", "1")),
        last_iteration=number("to"),
        peer=number("peer"),
        period=number("period"),
    )


def rank_factors(
    faults: Iterable[Fault], kind: FaultKind, iteration: int, world_size: int
) -> npt.NDArray[np.float64]:
    """Product of the active whole-rank faults of a kind, shape (rank,); 1 where there is none."""
    factors = np.ones(world_size)
    for fault in faults:
        if fault.kind == kind and fault.peer is None and fault.active(iteration):
            factors[fault.rank] *= fault.factor
    return factors
