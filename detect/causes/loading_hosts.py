"""Find hosts whose ranks all load for far longer than those of other hosts.

Problem: what a rank loses to its loader says little of its host: the longest loader of all is
waited for, and the others lose nothing while they wait.

Idea: how long loading lasts is compared, of ranks at the same place (stage and TP rank). A load is
long that takes three times as long as nine in ten on other hosts. A host all of whose loaders have
long loads, in half of all or more, has slow loaders, or slow storage of its own, if that costs a
twentieth of the step. Not where loading takes others as long now and then: storage that all share
is slow for all. Where no other host has these places, the loaders of the other end of the pipeline
count, which load the same from the same storage.

Example: 8 loaders of one host take 100 to 1,300 ms an iteration, 8 of the other one 1 ms; the
slowest costs 17 % of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detect.causes.finding import UNDECIDED_WHOSE, Answer, Claim, Inquiry, build_finding
from detect.causes.hits import chance
from detect.causes.searches import (
    ADVICE,
    LOADING_AXES,
    load_as_long,
    loading_of,
    ranks_that_load,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_share
from detect.stats.stretches import Course
from detect.text import counted, milliseconds
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.hosts import HOSTS
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

IN_STEP = (
    "its loaders take equally long in each iteration, as what all read from at its limit makes "
    "them, and no other host loads the same: storage that all share may be the reason as well"
)


@dataclass(frozen=True, kw_only=True)
class _LoadingHost:
    """A host whose ranks load for far longer than those of other hosts."""

    name: str
    rows: Integers
    """All rows of the host."""
    loaders: Integers
    others: Integers
    """Rows of other hosts at the places of these loaders."""
    long: Flags
    """(loader, iteration)"""
    lost: Floats
    """(iteration,): share of the step that its slowest loader costs."""
    q_value: float
    doubt: str = ""
    """Why the host need not be at fault, as a sentence."""


def _loading_hosts(seen: Observations, rate: float) -> Iterator[_LoadingHost]:
    """Yield the hosts all of whose loaders take far longer than those of other hosts, or whose
    loaders alone take long now and then.
    """
    members, loading = seen.members, np.nan_to_num(loading_of(seen))
    hosts, place = np.array(members.hosts), members.numbered(*LOADING_AXES)
    step_ns, num_hosts = float(np.median(seen.iteration_ns)), len(np.unique(hosts))
    for name, loaders, others in _sides_that_load(seen):
        own_ns, others_ns = loading[loaders], loading[others]
        usual_ns = float(np.quantile(others_ns, HOSTS.usual_loads_share))
        most_ns = max(HOSTS.loading_ratio * usual_ns, BURSTS.margin_share * step_ns)
        long, others_long = own_ns > most_ns, others_ns > most_ns
        is_other_end = not np.isin(place[loaders], place[others]).any()
        is_first = is_other_end and bool((members.stage[loaders] == members.stage.min()).any())
        are_late = _load_late(long) or (not is_first and _load_late_alone(own_ns, long, others_ns))
        if not np.isin(place[loaders], place[others]).all():
            are_late = are_late and _are_unlike(own_ns, long, others_ns)
        num_others = len(np.unique(hosts[others]))
        q_value = min(1.0, _chance_of_loads(long, others_long, num_others) * num_hosts)
        if not are_late or q_value > rate:
            continue
        if load_as_long(float(np.median(own_ns[long])), others_ns):
            continue
        lost_ns = np.nan_to_num(seen.lost(Cause.LOADER))
        usually_lost_ns = robust.median(lost_ns[others], axis=0)
        lost = (lost_ns[loaders].max(axis=0) - usually_lost_ns) / step_ns
        if is_first and not _are_waited_for(seen, loaders, lost * step_ns):
            continue
        if lost.mean() >= (HOSTS.unlike_share if is_first else BURSTS.sure_host_share):
            yield _LoadingHost(
                name=name,
                rows=np.flatnonzero(hosts == name),
                loaders=np.flatnonzero(loaders),
                others=np.flatnonzero(others),
                long=long,
                lost=np.maximum(lost, 0.0),
                q_value=q_value,
                doubt=IN_STEP if is_first and _load_in_step(own_ns) else "",
            )


def _sides_that_load(seen: Observations) -> Iterator[tuple[str, Flags, Flags]]:
    """Yield each host that has several loaders, with these and the loaders elsewhere that they are
    compared with, (row,) each: at their places, or else at the other end of the pipeline.
    """
    loading, members = loading_of(seen), seen.members
    hosts, place = np.array(members.hosts), members.numbered(*LOADING_AXES)
    least_ns = BURSTS.margin_share * float(np.median(seen.iteration_ns))
    long_there = np.unique(place[(np.nan_to_num(loading) > least_ns).any(axis=1)])
    loads = np.isfinite(loading).any(axis=1) & np.isin(place, long_there)
    for name in np.unique(hosts):
        others = loads & (hosts != name)
        loaders = loads & (hosts == name) & np.isin(place, place[others])
        others &= np.isin(place, place[loaders])
        if not loaders.any():
            loaders, others = _at_both_ends(seen, loads, hosts == name)
        if min(int(loaders.sum()), int(others.sum())) >= HOSTS.min_ranks:
            yield str(name), loaders, others


def _load_late(long: Flags) -> bool:
    """Return whether all loaders of a host have `long` loads, (loader, iteration), half of all and
    more.
    """
    is_most = long.mean() >= HOSTS.most_of_host_share
    return bool(is_most and long.mean(axis=1).min() >= BURSTS.others_share)


def _load_late_alone(own_ns: Floats, long: Flags, others_ns: Floats) -> bool:
    """Return whether most loaders of a host, (loader, iteration), have `long` loads now and then,
    and none elsewhere one that is nearly as long: what all read from would be slow there, too. Not
    asked of a first stage alone, which may have inputs of its own to load.

    Example: of 24 loads of the four ranks of a host eleven take 26 to 62 ms, those of twelve ranks
    elsewhere 0.4 ms at most.
    """
    late = long.any(axis=1)
    if late.sum() < HOSTS.min_ranks or late.mean() < HOSTS.most_of_host_share:
        return False
    return bool(others_ns.max() * LOSSES.loader_ratio < np.median(own_ns[long]))


def _are_unlike(own_ns: Floats, long: Flags, others_ns: Floats) -> bool:
    """Return whether all loaders of a host, (loader, iteration), take about as long as each other,
    and `others_ns`, those of another place, far less in any iteration.
    """
    usual = own_ns.mean(axis=1)
    are_alike = usual.max() < HOSTS.unlike_ratio * usual.min()
    least = LOSSES.other_end_share * float(np.median(own_ns[long]))
    return bool(are_alike and others_ns.max() <= least)


def _chance_of_loads(long: Flags, others_long: Flags, num_others: int) -> float:
    """Return how probable so many `long` loads, (loader, iteration), are at the others' rate: each
    by itself where most are long, or else iterations with some of them, on `num_others` hosts.
    """
    if _load_late(long):
        return chance(int(long.sum()), long.size, int(others_long.sum()), others_long.size)
    hits = long.any(axis=0)
    other_hits = int(others_long.any(axis=0).sum())
    return chance(int(hits.sum()), hits.size, other_hits, hits.size * num_others)


def _load_in_step(loading_ns: Floats) -> bool:
    """Return whether several loaders, (loader, iteration), take equally long in each iteration, as
    what all read from at its limit makes them; loaders that are slow themselves differ.

    Example: 71.0 to 71.4 ms on four ranks. Loaders of a slow host: 57 and 61 ms, or 145 to 466.
    """
    apart = (loading_ns.max(axis=0) - loading_ns.min(axis=0)) / loading_ns.mean(axis=0)
    return len(loading_ns) > 1 and float(np.median(apart)) <= HOSTS.in_step_share


def _at_both_ends(seen: Observations, loads: Flags, own: Flags) -> tuple[Flags, Flags]:
    """Return the loaders of a host whose places no other host has, and those of other hosts at the
    same place in their TP group and another stage, (row,) each.

    The last stage needs the labels of the tokens that the first one embeds: both ends load the same
    from the same storage, and what is slow for one end alone is its host, or its own storage.
    Example: 280 to 740 ms an iteration on the four ranks of the first stage, 1.2 ms on those of the
    last one. A first stage may have inputs to load that the last one does without, so it has to
    lose more: 8 to 35 ms of 270 may be these.
    """
    loading_ns = np.nan_to_num(robust.median(loading_of(seen), axis=1))
    loaders = loads & own
    tp = seen.members.place["tp"]
    others = ~own & (loading_ns >= LOSSES.least_load_ns) & np.isin(tp, tp[loaders])
    return loaders, others


def _are_waited_for(seen: Observations, loaders: Flags, lost_ns: Floats) -> bool:
    """Return whether all other ranks wait longer than some of these `loaders`, (row,), by a good
    part of what they lose, (iteration,): a stage that waits for others anyway loads meanwhile. True
    where no waiting was recorded.

    Example: loading takes a first stage 30 ms of 120, and its ranks wait for 31 ms and more, those
    of the slow third stage for 43.
    """
    if seen.waiting_ns is None:
        return True
    lead_ns = seen.waiting_ns[~loaders].min(axis=0) - seen.waiting_ns[loaders].min(axis=0)
    return float(lead_ns.mean()) >= LOSSES.awaited_share * float(lost_ns.mean())


def _finding_of_loading(seen: Observations, slow: _LoadingHost) -> Finding:
    loading = loading_of(seen)
    ranks, share = ranks_that_load(seen, slow.rows), float(slow.lost.mean())
    own_ns, others_ns = (float(np.nanmedian(loading[rows])) for rows in (slow.loaders, slow.others))
    error = robust.standard_error(slow.lost)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(slow.rows.tolist()),
            cause=Cause.LOADER,
            owner=Owner.UNDECIDED if slow.doubt else Owner.NODE,
            slowdown=1.0 + share,
            interval=interval_of_share(share, error),
            course=Course.of(np.ones(len(slow.lost), dtype=bool), share, error),
            q_value=slow.q_value,
            num_peers=len(slow.others),
            saved_ns=slow.lost * float(np.median(seen.iteration_ns)),
            subject=f"host {slow.name} (ranks {listed(ranks)})",
            predicate=f"keeps its ranks waiting for data: loading takes {milliseconds(own_ns)} "
            f"there, {milliseconds(others_ns)} on other hosts,{UNDECIDED_WHOSE * bool(slow.doubt)}",
            evidence=(
                f"{counted(int(slow.long.sum()), 'load')} of {slow.long.size} of its "
                f"{counted(len(slow.loaders), 'loader')} take {HOSTS.loading_ratio:.0f} times as "
                f"long as nine in ten of the {counted(len(slow.others), 'loader')} at their places "
                "on other hosts, and none there takes as long",
                *((slow.doubt,) if slow.doubt else ()),
            ),
            advice=ADVICE[Cause.LOADER],
        ),
    )


def search_loading(inquiry: Inquiry) -> Answer:
    """Search hosts all of whose ranks load for far longer than those of other hosts."""
    seen = inquiry.seen
    is_known = Cause.LOADER in seen.lost_ns and len(seen.iterations) > 0
    if seen.members.device_kind == "cpu" or not is_known:
        return Answer()
    known = inquiry.named_for(Cause.LOADER)
    found = _loading_hosts(seen, inquiry.settings.false_discovery_rate)
    slow = [one for one in found if not known[one.loaders].all()]
    named = {rank for one in slow for rank in seen.members.ranks_of(one.rows)}
    return Answer(
        findings=tuple(_finding_of_loading(seen, one) for one in slow),
        explains=lambda other: (
            other.cause is Cause.LOADER
            and other.owner is not Owner.NODE
            and set(other.ranks) <= named
        ),
    )
