"""Find loaders that now and then take many times as long as any other loader ever does.

Problem: two loads in eight iterations are too few to count, whatever they cost; and whoever is
found slow for another reason is not compared any more.

Idea: how much longer they take tells. Processes that share cores, and storage that all read from,
make loading longer for others as well. A load is far longer that takes ten times as long as the
longest of all loads of others in the window. Two iterations with such loads of one rank, or of two
ranks and more of one host, are its own: the rank's loader, or its host. They must also be
improbable: if all loaded alike, the k of n own loads that are far longer would be the k longest of
all N loads with probability C(n, k) / C(N, k).

Others are loaders at the same place (stage and TP rank), and whoever else loads. A last stage of
its own is compared with the first one, which loads the same from the same storage and earlier. Not
the other way round: the last stage has time to load ahead, so that slow storage shows at the first
one alone.

Example: 8 loaders, 8 iterations. Rank 3 loads for 107 and 43 ms in two of them, nobody ever for
more than 3.2 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from detect.causes.finding import Answer, Claim, Inquiry, build_finding
from detect.causes.searches import (
    ADVICE,
    LOADING_AXES,
    loading_of,
    mates_that_load,
    ranks_that_load,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_share
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, ranks_text
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.hosts import HOSTS
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed


@dataclass(frozen=True, kw_only=True)
class _FarLoader:
    """Loaders of one rank, or of one host, some of whose loads are far longer than all others."""

    rows: Integers
    num_others: int
    far: Flags
    """(row, iteration)"""
    longest_ns: float
    """The longest load of the others."""
    lost: Floats
    """(iteration,): share of the step that the slowest of these loads costs."""
    chance: float


def _far_loaders(seen: Observations) -> Iterator[_FarLoader]:
    """Yield hosts of which several loaders have far longer loads, and single ranks."""
    members, loading = seen.members, loading_of(seen)
    loads: Flags = np.asarray(np.isfinite(loading).any(axis=1))
    usually = np.nan_to_num(robust.median(loading, axis=1)) >= LOSSES.least_load_ns
    place, hosts = members.numbered(*LOADING_AXES), np.array(members.hosts)
    mates = mates_that_load(seen)
    if mates is not None:
        place[mates] = place[mates[0]]
    for own in _sides(np.flatnonzero(loads), hosts):
        at_place = np.isin(place, place[own])
        may_load_for_all = mates is not None and members.place["tp"][own[0]] == 0
        if len(own) == 1 and (may_load_for_all or len(ranks_that_load(seen, own)) > 1):
            continue
        beside = np.ones(len(hosts), dtype=bool) if len(own) == 1 else hosts != hosts[own[0]]
        beside[own] = False
        peers = loads & beside & at_place
        is_last = (members.stage[own] == members.stage.max()).all() and members.stage.max() > 0
        if not peers.any() and not is_last:
            continue
        found = _beyond(seen, own, np.flatnonzero(peers | (usually & beside)))
        if found is not None:
            yield found


def _sides(rows: Integers, hosts: NDArray[np.str_]) -> Iterator[Integers]:
    """Yield those of `rows` that are on one of the `hosts`, (row,), for hosts of several, and then
    each row by itself.
    """
    for name in np.unique(hosts[rows]):
        if len(of_host := rows[hosts[rows] == name]) >= HOSTS.min_ranks:
            yield of_host
    yield from rows[:, None]


def _beyond(seen: Observations, own: Integers, others: Integers) -> _FarLoader | None:
    """Return what loads of `own` rows are far longer than all of `others`; None for too few."""
    loading, step_ns = np.nan_to_num(loading_of(seen)), float(np.median(seen.iteration_ns))
    longest_ns = max(float(loading[others].max(initial=0.0)), LOSSES.least_load_ns)
    far = loading[own] > LOSSES.most_of_cores_ratio * longest_ns
    num_far, num_own, of_one = int(far.sum()), far.size, int(far.sum(axis=1).max())
    beside = num_far - of_one if len(own) > 1 else num_far  # of a host more than one rank's
    if not len(others) or min(int(far.any(axis=0).sum()), beside) < BURSTS.min_hits:
        return None
    num_all = num_own + loading[others].size
    chance = float(special.comb(num_own, num_far) / special.comb(num_all, num_far))
    lost_ns = np.where(far, np.nan_to_num(seen.lost(Cause.LOADER))[own], 0.0)
    lost = lost_ns.max(axis=0) / step_ns
    if chance > BURSTS.without_one_q or lost.mean() < BURSTS.margin_share:
        return None
    return _FarLoader(
        rows=own[far.any(axis=1)],
        num_others=len(others),
        far=far[far.any(axis=1)],
        longest_ns=longest_ns,
        lost=lost,
        chance=chance,
    )


def _finding(seen: Observations, slow: _FarLoader) -> Finding:
    members, rows = seen.members, slow.rows.tolist()
    ranks = ranks_that_load(seen, slow.rows)
    hits: Flags = np.asarray(slow.far.any(axis=0))
    loading_ns = np.nan_to_num(loading_of(seen))[slow.rows]
    share, error = float(slow.lost.mean()), robust.standard_error(slow.lost)
    takes = milliseconds(float(np.median(loading_ns[slow.far])))
    hosts = sorted({members.hosts[row] for row in rows})
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows),
            cause=Cause.LOADER,
            owner=Owner.NODE,
            slowdown=1.0 + share,
            interval=interval_of_share(share, error),
            course=Course.of(hits, float(slow.lost[hits].mean()), error),
            q_value=min(1.0, slow.chance),
            num_peers=slow.num_others,
            saved_ns=slow.lost * float(np.median(seen.iteration_ns)),
            subject=f"{ranks_text(ranks)} (host {listed(hosts)})",
            predicate=f"wait for data in {int(hits.sum())} of {len(hits)} iterations: loading "
            f"takes {takes} then",
            evidence=(
                f"{counted(slow.num_others, 'other loader')} never "
                f"{'takes' if slow.num_others == 1 else 'take'} more than "
                f"{milliseconds(slow.longest_ns)}: neither sharing its cores nor storage that all "
                "read from makes loading of some longer by so much",
            ),
            advice=ADVICE[Cause.LOADER],
        ),
    )


def search_far_loaders(inquiry: Inquiry) -> Answer:
    """Search loaders that take many times as long as any other ever does."""
    seen = inquiry.seen
    if seen.members.device_kind == "cpu" or Cause.LOADER not in seen.lost_ns:
        return Answer()
    known = inquiry.named_for(Cause.LOADER)
    findings = list[Finding]()
    for slow in _far_loaders(seen):
        if not known[slow.rows].any():
            known[slow.rows] = True
            findings.append(_finding(seen, slow))
    named = {rank for one in findings for rank in one.ranks}
    return Answer(
        findings=tuple(findings),
        explains=lambda other: (
            other.cause is Cause.LOADER
            and other.owner is not Owner.NODE
            and not named.isdisjoint(other.ranks)
        ),
    )
