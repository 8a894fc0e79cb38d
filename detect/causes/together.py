"""Say what findings mean for each other: consequences, ranks of one host, joint costs.

Searches know nothing of each other's findings. Once all have answered:

    folded            what follows from a heavier finding becomes its evidence
    with_joint_costs  what mending several slow ranks together would save
    gathered          ranks of one host that are named for it one by one become one finding

**One fault, one finding.** A rank that leaves its communications late makes the link to its
partners look slow; a slow device also loads its data a little slower. Example: rank 5 computes 1.30
times slower, and its loading takes 1.35 times that of its peers: one finding (compute), whose last
sentence says that loading is slower to match. Loading that took 8 times as long would be a second
fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detect.causes.device import host_advice
from detect.causes.finding import (
    cost_ratio,
    counted_window,
    devices_of,
    faster,
    gain,
    rows_of_findings,
    shared_place,
    slowed_by,
    spanning,
    undecided,
)
from detect.causes.searches import OF_ITS_HOST
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.text import counted, percent, ranks_text, times
from detect.thresholds.devices import ORDINARY
from detect.thresholds.hosts import HOSTS
from detect.thresholds.verdicts import CONSEQUENCES, COSTS
from detect.whatif.savings import slowdown_of
from megascan.errors import listed

BESIDE_LARGER = (
    "another device is slow by far more: mend that first, then trace again and see whether this "
    "remains"
)


WAITS_FOR_CONNECTION = (
    "ranks for which it waits inside its passes, in communication that was not traced, are at a "
    "connection that is slow: mend that first, then trace again and see whether this remains"
)


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings of which none is a consequence of another; the heavier of two explains."""

    def order(finding: Finding) -> tuple[bool, bool, bool, float]:
        own_time = finding.cause in (Cause.COMPUTE, Cause.HOST)
        # late exits of a rank whose connections are slow, and cost the same, tell less than these
        is_vague = finding.cause is Cause.LINK and finding.owner is not Owner.NODE
        cost = -finding.step_time_cost_ratio
        return _comes_after(finding, findings), not own_time, is_vague, cost

    result: list[Finding] = []
    for finding in sorted(_of_stopping_hosts(findings), key=order):
        place = next((i for i, one in enumerate(result) if _explains(one, finding)), None)
        if place is None:
            result.append(finding)
        else:
            main = result[place]
            result[place] = replace(main, evidence=(*main.evidence, what_follows(finding)))
    return result


def _of_stopping_hosts(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; late loaders whose hosts stop between launches as well have these as
    their cause.
    """
    return [
        replace(one, cause=Cause.HOST, next_steps=host_advice(one.owner))
        if one.owner is Owner.NODE and one.cause is Cause.LOADER and OF_ITS_HOST in one.evidence
        else one
        for one in findings
    ]


def _comes_after(finding: Finding, findings: Sequence[Finding]) -> bool:
    return _is_waiting(finding, findings) or any(
        _is_behind_collections(one, finding) or _is_held_up(finding, one) for one in findings
    )


def _is_held_up(finding: Finding, link: Finding) -> bool:
    """Return whether a host looks slow because it launches on what a slow group of all its ranks
    sends, as experts that wait for counts of tokens do: the group is far slower, and costs more.

    Example: a host launches 1.08 times as late as another, 3 % of the step; messages among its
    eight devices, counted from the last one's arrival, take seven times as long, 13 % of it.
    """
    return (
        finding.cause is Cause.HOST
        and _excess(finding) <= CONSEQUENCES.minor_share * _excess(link)
        and _is_awaited(link, finding)
    )


def _is_behind_collections(main: Finding, other: Finding) -> bool:
    """Return whether a device that is a little slower, at no cost, is that of a rank which stops to
    collect garbage: it finds cold caches, and a clock that has fallen, after each pause.

    Example: 1.05 times, in an iteration of 320 ms of which collections take 250.
    """
    return (
        main.cause == Cause.GC
        and other.cause == Cause.COMPUTE
        and set(main.ranks) >= set(other.ranks)
        and other.step_time_cost_ratio < COSTS.least_of_host_ratio <= main.step_time_cost_ratio
    )


def _is_waiting(finding: Finding, findings: Sequence[Finding]) -> bool:
    """Return whether a group's slow link explains why the group's members look slow: they wait for
    the link inside their passes. A slow device would slow its transfers by no more than its work.
    """
    return (
        finding.cause in (Cause.COMPUTE, Cause.UNKNOWN)
        and finding.owner == Owner.UNDECIDED
        and any(_is_awaited(link, finding) for link in findings)
    )


def _is_awaited(link: Finding, finding: Finding) -> bool:
    is_told = link.owner == Owner.NODE or (link.host != "" and "," not in link.host)
    much_slower = link.slowdown - 1.0 >= CONSEQUENCES.awaited_ratio * (finding.slowdown - 1.0)
    return (
        link.cause == Cause.LINK
        and is_told
        and set(link.ranks) >= set(finding.ranks)
        and much_slower
    )


def _explains(main: Finding, other: Finding) -> bool:
    """Return whether `other` is what the fault of `main` looks like elsewhere."""
    is_before = main.last_iteration < other.first_iteration
    if is_before or other.last_iteration < main.first_iteration:
        return False
    minor = _excess(other) <= CONSEQUENCES.minor_share * _excess(main)
    if minor and (_launches_late(main, other) or _is_behind(main, other)):
        return True
    if not set(main.ranks) & set(other.ranks):
        return False
    if _is_waiting(other, [main]) or _is_behind_collections(main, other):
        return True
    return _goes_with(main, other, minor=minor)


def _goes_with(main: Finding, other: Finding, *, minor: bool) -> bool:
    """Return whether `other` follows from `main`, with which it shares ranks; `minor` says that
    `other` costs little next to `main`.
    """
    same = set(main.ranks) >= set(other.ranks)
    if _tells_who(other, main) or _is_open(main, other):
        return False
    no_slower = other.slowdown <= CONSEQUENCES.alike_ratio * main.slowdown
    follows = False
    match main.cause, other.cause:
        case (Cause.HOST, Cause.HOST):
            follows = same and main.owner == Owner.NODE  # its pauses, beside what it loses anyhow
        case (Cause.COMPUTE | Cause.HOST, Cause.COMPUTE | Cause.HOST):
            follows = same and main.cause != other.cause
        case (Cause.HOST, Cause.LINK) | (Cause.LINK, Cause.HOST):
            follows = same
        case (Cause.LINK, Cause.LINK):
            follows = True
        case (Cause.COMPUTE, Cause.LINK):
            # from the last arrival on a device slows its transfers by no more than its work
            is_shown = other.owner is Owner.NODE and other.slowdown > main.slowdown
            follows = same or (not is_shown and (minor or no_slower))
        case (Cause.STAGE_IMBALANCE, Cause.LINK):
            # a stage of one rank, whose device may be slow and slow its transfers as well
            least = CONSEQUENCES.alike_ratio * (main.slowdown - 1.0)
            follows = main.owner == Owner.UNDECIDED and same and other.slowdown - 1.0 <= least
        case (Cause.COMPUTE, Cause.LOADER):
            follows = same and (no_slower or minor)  # a batch may wait for its device, too
        case (Cause.HOST, Cause.LOADER):
            follows = same and minor and main.owner == Owner.NODE  # what loads runs on that host
    return follows


def _tells_who(link: Finding, waiting: Finding) -> bool:
    """Return whether the slow connection of one rank says for whom a group waits that computes
    slowly, nobody knows because of whom.

    Example: passes of ranks 12 to 15 take 1.64 times as long as others, and the ring of rank 12
    twice as long; a slow device slows what it transfers by no more than what it computes.
    """
    return (
        link.cause is Cause.LINK
        and waiting.cause is Cause.COMPUTE
        and link.owner is Owner.NODE
        and waiting.owner is Owner.UNDECIDED
        and len(link.ranks) == 1 < len(waiting.ranks)
    )


def _is_open(main: Finding, other: Finding) -> bool:
    """Return whether nobody knows what makes some ranks slow or lets them stand still, but why one
    of them is: an open question explains no fault that is named.

    Example: a host may stop now and then, at a cost of 8.6 % of the step. The memory of one of its
    devices is slow, for 7.1 %, and the other ranks wait for it.
    """
    may_be = main.owner is Owner.UNDECIDED and main.cause in (Cause.COMPUTE, Cause.HOST)
    return may_be and other.owner is Owner.NODE and other.cause is not Cause.LINK


def _launches_late(main: Finding, other: Finding) -> bool:
    """Return whether a host that launches late holds up its partners' messages, too."""
    return main.cause == Cause.HOST and len(main.ranks) > 1 and other.cause == Cause.LINK


def _is_behind(main: Finding, other: Finding) -> bool:
    """Return whether a link between two hosts may suffer from the slow network of a third host:
    what comes late from the third host meets other messages at the NICs behind it.
    """
    are_links = main.cause == other.cause == Cause.LINK
    is_network = len(main.ranks) > 1 and main.owner == Owner.NODE and "," not in main.host
    return are_links and is_network and "," in other.host and len(other.ranks) < len(main.ranks)


def _excess(finding: Finding) -> float:
    return finding.step_time_cost_ratio - 1.0


def what_follows(finding: Finding) -> str:
    """Say that a finding is part of another one, and what it costs at most."""
    loads = finding.cause is Cause.LOADER or OF_ITS_HOST in finding.evidence
    what = {
        Cause.LOADER: "its data loading is slower to match",
        Cause.COMPUTE: "what it delays looks like slower computing, too",
        Cause.UNKNOWN: f"{ranks_text(finding.ranks)} wait for it inside their passes",
        Cause.HOST: "the time lost between its operations goes with it",
        Cause.LINK: f"the communication of {ranks_text(finding.ranks)} suffers with it",
    }[Cause.LOADER if loads else finding.cause]
    most = percent(finding.step_time_cost_ratio)
    much = "next to nothing" if most == percent(1.0) else f"{most} of the step at most"
    return f"{what} ({much}): no fault apart"


def with_joint_costs(seen: Observations, findings: list[Finding]) -> list[Finding]:
    """Return the findings; where several nodes are slow, add what mending them together would save.

    Ranks that hide behind each other cost nothing one by one: four that compute 1.3 times slower
    cost the step 26 %, but each of them next to nothing as long as the other three are slow. Add up
    a host's findings; add up those of all hosts where that saves far more.
    """
    blamed = [
        one for one in findings
        if one.owner == Owner.NODE and one.cause in (Cause.COMPUTE, Cause.HOST, Cause.LINK)
    ]  # fmt: skip
    if len(blamed) < 2:
        return findings
    everybody = _joint_cost(seen, blamed)
    by_host = {host: _joint_cost(seen, [one for one in blamed if one.host == host])
               for host in {one.host for one in blamed if one.host}}  # fmt: skip
    result = list(findings)
    for place, finding in enumerate(findings):
        if finding not in blamed:
            continue
        group, cost = [one for one in blamed if one.host == finding.host], by_host.get(finding.host)
        if cost is None or (everybody or 1.0) - 1.0 > COSTS.most_elsewhere * (cost - 1.0):
            group, cost = blamed, everybody
        if cost is not None and len(group) > 1 and cost > finding.step_time_cost_ratio:
            result[place] = _mended_with(seen, finding, _ranks_of(group), cost)
    return result


def _mended_with(
    seen: Observations, finding: Finding, ranks: tuple[int, ...], cost: float
) -> Finding:
    others = tuple(rank for rank in ranks if rank not in finding.ranks)
    slowed = slowed_by(seen, finding.first_iteration, finding.last_iteration)
    statement = finding.statement
    if cost >= COSTS.next_to_nothing_ratio and others:
        together = f"without it and {ranks_text(others)} {slowed} would be {faster(cost)}"
        alone = gain(slowed, finding.step_time_cost_ratio, is_replayed=finding.cost_is_replayed)
        statement = statement.replace(alone, together)
    return replace(finding, joint_ranks=ranks, joint_cost_ratio=cost, statement=statement)


def _joint_cost(seen: Observations, group: list[Finding]) -> float | None:
    """Return iteration time divided by iteration time without the findings; None if unknown."""
    within = counted_window(seen, *_reach(group))
    if seen.costs and all(one.cost_is_replayed for one in group):
        causes = {one.cause for one in group}
        slowdown = slowdown_of(group)
        replayed = seen.costs.ratio(_ranks_of(group), causes, within, slowdown=slowdown)
        if replayed is not None:
            return replayed
    if any(one.cause != Cause.COMPUTE for one in group):
        return None
    busy = np.nan_to_num(seen.busy_ns)
    better = busy.copy()
    for one in group:
        rows = rows_of_findings(seen.members, (one,))
        better[rows[:, None] & seen.within(one.episodes)] /= one.slowdown
    return cost_ratio(seen, np.maximum(busy.max(axis=0) - better.max(axis=0), 0.0), within)


def _ranks_of(group: Sequence[Finding]) -> tuple[int, ...]:
    return tuple(sorted({rank for one in group for rank in one.ranks}))


def _reach(group: Sequence[Finding]) -> tuple[int, int]:
    """Return the first and the last iteration in which any finding of a group holds."""
    first = min(one.first_iteration for one in group)
    return first, max(one.last_iteration for one in group)


def gathered(seen: Observations, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; where a host is blamed for its ranks one by one, one finding on it.

    A host serves all its ranks: what slows it delays one of them in this iteration and another in
    that. Each is judged by itself, and they hide behind each other. So findings that blame one host
    become one, if they name at least `HOSTS.least_named_share` of its ranks; not where the job has
    no other host. Example: ranks 16 to 20, 22 and 23 of a host's eight, each 2 to 14 % of an
    iteration: one finding on that host.
    """
    result = list(findings)
    for host in dict.fromkeys(seen.members.hosts):
        group = [one for one in result if _blames(one, host)]
        rows = [row for row, name in enumerate(seen.members.hosts) if name == host]
        ranks = seen.members.ranks_of(rows)
        is_host = len(_ranks_of(group)) >= HOSTS.least_named_share * len(ranks)
        if len(group) > 1 and is_host and len(rows) < len(seen.members):
            result = [one for one in result if one not in group]
            result.append(_of_the_host(seen, host, ranks, group))
    return result


def _blames(finding: Finding, host: str) -> bool:
    """Return whether a finding says that a host makes its ranks lose time, and no other host."""
    return finding.cause is Cause.HOST and finding.owner is Owner.NODE and finding.host == host


def _of_the_host(
    seen: Observations, host: str, ranks: tuple[int, ...], group: Sequence[Finding]
) -> Finding:
    """Return one finding for a group that blames a host, which has these ranks.

    It names all of them if most are in the group. Its slowdown is that of the widest, or dearest.
    """
    widest = max(group, key=lambda one: (len(one.ranks), one.step_time_cost_ratio))
    if set(widest.ranks) == set(ranks):
        minor = (one for one in group if one is not widest)
        return replace(widest, evidence=(*widest.evidence, *map(what_follows, minor)))
    named = _ranks_of(group)
    blamed = ranks if len(named) >= HOSTS.most_of_host_share * len(ranks) else named
    first, last = _reach(group)
    timing = spanning(seen.iterations, first, last)
    ratios = [one.step_time_cost_ratio for one in group]
    ratios += [one.joint_cost_ratio for one in group if set(one.joint_ranks) <= set(ranks)]
    cost, is_replayed = max(ratios), all(one.cost_is_replayed for one in group)
    saved = gain(slowed_by(seen, first, last), cost, is_replayed=is_replayed)
    each = ", ".join(f"{ranks_text(one.ranks)} {times(one.slowdown)}" for one in group)
    rows = seen.members.rows_with(blamed)
    return replace(
        widest,
        ranks=blamed,
        first_iteration=first,
        last_iteration=last,
        share_of_iterations=max(one.share_of_iterations for one in group),
        episodes=timing.episodes,
        q_value=max(one.q_value for one in group),
        step_time_cost_ratio=cost,
        cost_is_replayed=is_replayed,
        joint_ranks=(),
        joint_cost_ratio=1.0,
        statement=f"host {host} makes {len(named)} of its {counted(len(ranks), 'rank')} "
        f"({listed(named)}) lose time {timing.words}; {saved}",
        evidence=(f"one by one: {each}; of {ranks_text(widest.ranks)}:", *widest.evidence),
        coordinates=shared_place(seen, rows),
        device=devices_of(seen.members, rows),
        num_peers=len(seen.members) - len(rows),
        onset_in_trace=timing.begins,
    )


def undecided_beside_connection(
    seen: Observations, finding: Finding, others: Sequence[Finding]
) -> Finding:
    """Return the finding, undecided where it names a device of a TP group whose communication was
    not traced, and another rank of that group is at a slow connection: who waits for late messages
    there holds up all of its group inside their passes.

    Example: rail 7 is four times slower; of each TP group of GPUs 6 and 7 passes take 1.4 times as
    long, and the optimizer step of GPU 6 is a little slower in one of them.
    """
    if finding.cause is not Cause.COMPUTE or finding.owner is not Owner.NODE or finding.is_read:
        return finding
    own = set(finding.ranks)
    groups = (set(ranks) for ranks in seen.members.workers)
    mates = set().union(*(ranks for ranks in groups if ranks & own)) - own
    is_late = any(
        one.cause is Cause.LINK and one.owner is Owner.NODE and mates & set(one.ranks)
        for one in others
    )
    return undecided(finding, WAITS_FOR_CONNECTION) if is_late else finding


def undecided_beside_larger(
    finding: Finding, others: Sequence[Finding], min_slowdown: float
) -> Finding:
    """Return the finding, undecided where a device is hardly slower than `min_slowdown`, costs next
    to nothing by itself, and another is slower by far: a device that waits for it is late, too.

    Example: 1.025x and 0.4 % of the step, next to a device that is 1.38x slower.
    """
    hardly = finding.slowdown < min_slowdown**ORDINARY.small_floors
    is_free = finding.step_time_cost_ratio < ORDINARY.worthwhile_ratio
    is_named = finding.owner is Owner.NODE and finding.cause is Cause.COMPUTE
    least = ORDINARY.far_slower_times * (finding.slowdown - 1.0)
    larger = [one for one in others if one.owner is Owner.NODE and one.slowdown - 1.0 >= least]
    if not (is_named and hardly and is_free and larger) or finding.is_read:
        return finding
    return undecided(finding, BESIDE_LARGER)
