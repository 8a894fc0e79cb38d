"""Keep what ranks record: one entry for a span of all ranks of a stage, of the first variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.pod.job import Floats, Ints, Job
from megascan.schema import Granularity, Kind, Track
from megascan.vocabulary import is_data_parallel

ALWAYS = ("iteration", "forward", "backward", "loss", "batch-generator", "grad-sync", "optimizer")


@dataclass(slots=True)
class Entry:
    """One span on each rank of a stage, or on those at some `places`.

    `axis` names the process group whose id differs from rank to rank, `peer` the stage at the other
    end of a message.
    """

    kind: str
    name: str
    track: int
    arguments: Mapping[str, int | str]
    start_s: Floats  # (place,)
    end_s: Floats
    launch_s: Floats | None
    axis: str = ""
    peer: int = -1
    places: Ints | None = None
    size_bytes: Ints | None = None  # where it differs from rank to rank


class Recording:
    """All entries of a run, by stage."""

    def __init__(self, job: Job) -> None:
        self._full = job.tracing.granularity == Granularity.FULL
        self.entries: list[list[Entry]] = [[] for _ in range(job.layout.pp)]

    def wants_collective(self, axis: str) -> bool:
        """Tell whether collectives over an axis are recorded."""
        return self._full or is_data_parallel(f"{axis}@0")

    def wants(self, name: str) -> bool:
        """Tell whether spans of a name are recorded at all."""
        return self._full or name in ALWAYS

    def add(self, stage: int, entry: Entry) -> None:
        """Keep an entry."""
        self.entries[stage].append(entry)


def on_host(
    name: str, kind: Kind, arguments: Mapping[str, int | str], start: Floats, end: Floats
) -> Entry:
    """Return an entry of the host's track for the ranks whose span has a length, in variant 0."""
    places = np.flatnonzero(end[0] > start[0])
    return Entry(
        kind, name, Track.HOST, arguments, start[0][places], end[0][places], None, places=places
    )
