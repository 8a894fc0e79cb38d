"""One of the two traces: its verdict, what was judged, and the times of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from detect.comparison.roles import Role, RoleTimes, roles_of_observations, roles_of_timeline
from detect.examination import Examination, examine, examine_op_table
from detect.observations import Members
from detect.settings import DetectorSettings
from megascan.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Side:
    """A trace, by the name that the user gave it.

    `shares` has the columns rank and `<share>_ratio`, one row a rank; None where the trace tells
    compute only (op tables).
    """

    name: str
    examined: Examination
    roles: dict[Role, RoleTimes]
    shares: pa.Table | None = None

    @property
    def members(self) -> Members:
        """The recorded ranks."""
        return self.examined.seen.members


def side_of_timeline(
    name: str, timeline: Timeline, shares: pa.Table, settings: DetectorSettings
) -> Side:
    """A side from a timeline and the shares of its ranks' time."""
    examined = examine(timeline, settings)
    return Side(
        name=name,
        examined=examined,
        roles=roles_of_timeline(timeline, examined.seen),
        shares=shares,
    )


def side_of_op_table(name: str, path: Path, settings: DetectorSettings) -> Side:
    """A side from an op table. Raises InputError for a bad file."""
    examined = examine_op_table(path, settings)
    return Side(name=name, examined=examined, roles=roles_of_observations(examined.seen))
