"""A device that waits for its host: who is starved, and whether that is one host or the job.

A device is starved where most of its operations begin as soon as they are launched: its queue is
empty. A job whose hosts can hardly keep up starves first the ranks that also load data. They are
therefore compared with the most starved rank of every other TP group; one host is at fault only if
those are fed.

Example: 92 % of rank 3's operations were launched just in time, and of the most starved ranks of
the other groups 10 %: the host of rank 3. If of theirs 85 %: the job is host-bound.
"""

from __future__ import annotations

import numpy as np

from detect.causes.device import mates_of
from detect.observe.observations import Observations
from detect.report import Cause, Owner
from detect.stats import robust
from detect.thresholds import PACE, STARVATION
from megascan.arrays import Flags, Floats

HOST_ADVICE = (
    "on that host: read the load (top, pidstat -t), CPU frequency and affinity of the "
    "rank's process, and what else runs there",
    "if nothing else runs there, restart the rank on another host",
)

JOB_ADVICE = (
    "the hosts launch too late everywhere: fewer and larger kernels (fused layers and optimizer, "
    "torch.compile, CUDA graphs), less Python between them",
    "on this rank, see what its process does besides (logging, loading)",
)


def host_advice(owner: Owner) -> tuple[str, ...]:
    """Return what to do about devices that wait for their hosts: on that host, or in the job."""
    return JOB_ADVICE if owner == Owner.JOB else HOST_ADVICE


def is_host_bound(seen: Observations) -> bool:
    """Return whether devices wait for their hosts nearly all the time, on the usual rank."""
    if seen.starved_share is None:
        return False
    share = float(np.nan_to_num(np.nanmedian(seen.starved_share)))
    return share >= STARVATION.host_bound_share


def hosts_are_all_late(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a starved device is nothing special: other TP groups have one as well."""
    if seen.starved_share is None:
        return False
    others = _starved_groups(seen, seen.starved_share, row, active)
    own = float(robust.median(seen.starved_share[row][active]))
    return own >= STARVATION.starved_share and _are_starved(others)


def launches_slowly(seen: Observations, row: int) -> bool:
    """Return whether the row's host takes longer from launch to launch than those of all others."""
    if seen.launch_pace is None or len(seen.launch_pace) < 2:
        return False
    level = robust.centre(seen.launch_pace)
    others = np.delete(level, row)
    known = np.isfinite(others)
    return bool(known.any() and level[row] - others[known].max() >= PACE.slow_log)


def starvation(seen: Observations, row: int, active: Flags) -> tuple[Owner, str] | None:
    """Return owner and sentence where the device waits for its host; None where it does not."""
    if seen.starved_share is None:
        return None
    own = float(robust.median(seen.starved_share[row][active]))
    if not own >= STARVATION.starved_share:
        return None
    others = _starved_groups(seen, seen.starved_share, row, active)
    theirs = float(robust.median(seen.starved_share[_stage_peers(seen, row)][:, active]))
    words = (
        f"{own:.0%} of its operations were launched only just in time, so the device waited for "
        f"the host; of its peers' {theirs:.0%}"
    )
    if _are_starved(others):
        return Owner.JOB, (
            f"{words}; but other TP groups have a starved rank too: the job is host-bound, "
            "whatever the node"
        )
    doubt = _doubt(seen, row, num_others=len(others))
    if not len(others) and theirs > STARVATION.fed_share:
        return Owner.JOB, f"{words}: the job is host-bound, whatever the node"
    return (Owner.UNDECIDED, f"{words}; {doubt}") if doubt else (Owner.NODE, words)


def _doubt(seen: Observations, row: int, *, num_others: int) -> str:
    """Return why a starved device need not be its host's fault; empty where it is."""
    if not num_others and _loads_most(seen, row):
        return (
            "it alone loads data for its TP group, which delays its launches too: a second "
            "replica, or a trace with data loaded beforehand, decides"
        )
    if _are_incomplete(seen):
        return (
            "of the other TP groups some ranks were not recorded, which may be starved as well: a "
            "trace of all ranks decides"
        )
    return ""


def _are_incomplete(seen: Observations) -> bool:
    """Return whether there are other TP groups, of each of which some rank was not recorded."""
    groups = np.stack([seen.members.stage, seen.members.replica])
    num_rows = np.unique(groups, axis=1, return_counts=True)[1]
    return len(num_rows) > 1 and int((num_rows == num_rows.max()).sum()) < 2


def _are_starved(groups: Floats) -> bool:
    return len(groups) > 0 and float(np.median(groups)) > STARVATION.fed_share


def _starved_groups(seen: Observations, starved: Floats, row: int, active: Flags) -> Floats:
    """Return the starved share of the most starved rank of every other TP group, (group,)."""
    members = seen.members
    group = members.stage * (int(members.replica.max()) + 1) + members.replica
    level = robust.median(starved[:, active], axis=1)
    return np.array(
        [np.nanmax(level[group == one]) for one in np.unique(group[group != group[row]])]
    )


def _stage_peers(seen: Observations, row: int) -> Flags:
    """Flag the other rows of the stage, or where there are none all other rows."""
    everyone: Flags = np.arange(len(seen.members)) != row
    others = everyone & (seen.members.stage == seen.members.stage[row])
    return others if others.any() else everyone


def _loads_most(seen: Observations, row: int) -> bool:
    """Return whether the rank's loading takes most of its TP group's."""
    loading = np.nan_to_num(robust.median(seen.lost(Cause.LOADER), axis=1))
    mates = loading[mates_of(seen.members, row)]
    return bool(len(mates) and loading[row] > STARVATION.loads_most_ratio * mates.max())
