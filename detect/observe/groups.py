"""One row for a TP (CP, EP) group whose members cannot be told apart, and what is known of each.

Where communication inside such groups was not traced, everybody waits for the slowest within its
own passes, so that the members' times are one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from detect.observe.axes import along, cut
from detect.observe.members import Members
from detect.observe.operations import OUTPUT_OF_MODULES
from detect.report import Cause
from detect.stats import robust
from megascan.arrays import Floats

if TYPE_CHECKING:
    from detect.observe.observations import Observations


@dataclass(frozen=True, kw_only=True)
class EachRank:
    """What is known of each rank where a row of the observations stands for its TP group."""

    members: Members
    optimizer_ns: Floats = field(metadata=along("worker", "iteration"))
    passes_ns: Floats = field(metadata=along("worker", "iteration"))
    """(worker, iteration, phase): a forward and a backward pass on the mean."""
    output_ns: Floats = field(metadata=along("worker", "iteration"))
    """A span of the output layer on the mean; NaN where none was traced."""
    lookups_ns: Floats = field(metadata=along("worker", "iteration"))
    """(worker, iteration, kind), as in `Tokenwise`."""
    loading_ns: Floats = field(metadata=along("worker", "iteration"))
    """What loading costs the rank; NaN where it loads nothing itself."""

    @classmethod
    def of(cls, seen: Observations) -> EachRank:
        """Take what is known of each rank before rows stand for groups."""
        work, shape = seen.work, seen.optimizer_ns.shape
        with np.errstate(over="ignore"):
            time_ns = np.exp(work.log_ns)
        phases = [robust.mean(time_ns[:, :, work.phase == one], axis=2) for one in range(2)]
        nothing, modules, told = np.full((*shape, 3), np.nan), seen.modules_ns, seen.tokenwise
        modules = nothing if modules is None else modules
        return cls(
            members=seen.members,
            optimizer_ns=seen.optimizer_ns,
            passes_ns=np.stack(phases, axis=2),
            output_ns=modules[:, :, OUTPUT_OF_MODULES],
            lookups_ns=nothing[:, :, :2] if told is None else told.lookups_ns,
            loading_ns=seen.lost(Cause.LOADER),
        )


def one_row_a_worker(seen: Observations) -> Observations:
    """Return one row for each TP (CP, EP) group whose inner communication was not traced.

    Inside such a group everybody waits for the slowest within its own passes, so their times are
    the same and only the group as a whole can be compared; it waits for the longest of its loaders.
    A group on several hosts is on none.
    """
    if seen.splits_tensor_groups:
        return seen
    members = seen.members
    group = members.tensor_group
    rows = np.sort(np.unique(group, return_index=True)[1])
    workers = tuple(tuple(members.ranks[group == group[row]].tolist()) for row in rows)
    note = (
        "communication inside TP groups was not traced (granularity base): a slow rank can be told "
        "only up to its TP group; trace with --trace-granularity full to split it"
    )
    kept = cut(seen, "row", rows)
    kept = replace(kept, workers=EachRank.of(seen))

    def longest(time_ns: Floats) -> Floats:
        return np.stack([np.fmax.reduce(time_ns[group == group[row]]) for row in rows])

    if Cause.LOADER in seen.lost_ns:
        lost_ns = longest(seen.lost(Cause.LOADER))
        kept = replace(kept, lost_ns={**kept.lost_ns, Cause.LOADER: lost_ns})
    if seen.loading_ns is not None:
        kept = replace(kept, loading_ns=longest(seen.loading_ns))
    places = {rank: members.device_of(rank) for rank in members.recorded}
    on = [{places[rank][0] for rank in ranks} for ranks in workers]
    merged = replace(
        kept.members,
        workers=workers,
        hosts=tuple(next(iter(hosts)) if len(hosts) == 1 else "" for hosts in on),
        own_places=places,
    )
    return replace(kept, members=merged, notes=(*seen.notes, note))
