"""Find hosts whose network is slow: everything that crosses their border.

Problem: the eight GPUs of a host share its NICs. A NIC at half speed slows every message and every
ring that enters or leaves the host. Link by link that is a majority of the messages of two stages,
which nothing stands out from; and a ring that crosses all hosts is as slow for everybody.

Idea: take what crosses hosts, kind by kind (same operation, bytes, members), and split it by one
host after the other into what touches the host (A) and what does not (B):

    effect = median log(A) - median log(B)
    clear if quarter(A) - three quarters(B) >= effect / 2

The host's network is slow when the effect is clear and as large as the floor in one kind at least,
and in no other kind is what touches it as quick as the rest. Two hosts that only talk to each other
cannot be told apart, and stay undecided; rings through all hosts have no B, and say nothing.

Example: PP4 x DP4 on 4 hosts. Messages 0-1 take 3.2 ms, 1-2 and 2-3 take 13.1 ms. Host 2 touches
8 messages, all slow; the 4 others are quick: effect log 4.0. Of host 1's 8 messages half are quick.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import Claim, build_finding, connection_advice
from detect.causes.spec import Answer, CauseSpec, Inquiry
from detect.observe.observations import Observations, Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import counted, milliseconds, times
from detect.thresholds import LINKS, NETWORKS, SEARCH
from megascan.arrays import Floats, Integers
from megascan.errors import listed

NOT_TOLD_APART = (
    "these hosts exchange with each other only: the trace cannot tell which of them is slow"
)


@dataclass(frozen=True, kw_only=True)
class SlowNetwork:
    """A host, or hosts that cannot be told apart, whose border is crossed slowly."""

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    split: _Split
    """In the kind of transfers that shows it best."""
    q_value: float
    excess_ns: float
    """Transfer time lost an iteration by the rank that loses most."""


@dataclass(frozen=True, kw_only=True)
class _Crossings:
    """All transfers, and the hosts that each of them touches."""

    transfers: Transfers
    level: Floats
    """(unit,): log ns"""
    hosts: tuple[frozenset[str], ...]
    """Of each unit; more than one where it crosses a border."""


@dataclass(frozen=True, kw_only=True)
class _Split:
    """One kind of transfers, split into those that touch a host and the others."""

    kind: str
    effect: float
    error: float
    p_value: float
    slow: Integers
    quick: Integers
    all_slow: Integers
    """Units of every kind in which the host is slow."""


def slow_networks(inquiry: Inquiry) -> list[SlowNetwork]:
    """Return the hosts whose network is slow: one, or several that nothing tells apart."""
    seen, settings = inquiry.seen, inquiry.settings
    if seen.transfers is None:
        return []
    crossings = _crossings(seen, seen.transfers)
    names = sorted({name for hosts in crossings.hosts if len(hosts) > 1 for name in hosts})
    least = settings.min_link_slowdown
    if seen.members.device_kind == "cpu":
        least = max(least, LINKS.cpu_min_slowdown)
    splits = {name: _clearest(crossings, name, float(np.log(least))) for name in names}
    sure = {
        name: one
        for name, one in splits.items()
        if one and one.p_value * len(names) <= settings.false_discovery_rate
    }
    if not sure:
        return []
    most = max(len(one.all_slow) for one in sure.values())
    best = tuple(name for name, one in sure.items() if len(one.all_slow) == most)
    split = sure[best[0]]
    rows = [row for row, host in enumerate(seen.members.hosts) if host in best]
    ranks = tuple(sorted(rank for row in rows for rank in seen.members.workers[row]))
    excess_ns = _excess_ns(seen.transfers, split, ranks)
    if excess_ns < NETWORKS.min_step_share * float(np.median(seen.iteration_ns)):
        return []
    q_value = min(1.0, split.p_value * len(names))
    return [SlowNetwork(hosts=best, ranks=ranks, split=split, q_value=q_value, excess_ns=excess_ns)]


def _crossings(seen: Observations, transfers: Transfers) -> _Crossings:
    members = seen.members
    host_of = {
        rank: host for row, host in enumerate(members.hosts) for rank in members.workers[row]
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ns = np.where(transfers.transfer_ns > 0, np.log(transfers.transfer_ns), np.nan)
    return _Crossings(
        transfers=transfers,
        level=robust.median(log_ns, axis=1),
        hosts=tuple(
            frozenset(host_of[rank] for rank in unit if rank in host_of)
            for unit in transfers.members
        ),
    )


def _clearest(crossings: _Crossings, name: str, floor: float) -> _Split | None:
    """Return the clearest kind in which what touches the host is slow; None if any kind objects."""
    transfers, level = crossings.transfers, crossings.level
    crosses = np.array([len(hosts) > 1 for hosts in crossings.hosts]) & np.isfinite(level)
    touches = np.array([name in hosts for hosts in crossings.hosts])
    found: list[_Split] = []
    for kind in np.unique(transfers.kind[crosses]).tolist():
        of_kind = crosses & (transfers.kind == kind)
        mine, others = np.flatnonzero(of_kind & touches), np.flatnonzero(of_kind & ~touches)
        size = int(transfers.size_bytes[mine].max(initial=-1))
        if not len(mine) or not len(others) or 0 <= size < NETWORKS.min_bytes:
            continue
        split = _split(level, transfers.kinds[kind], mine, others)
        if split.effect < NETWORKS.unharmed_share * floor:
            return None
        if split.effect >= floor and _is_clear(level, split):
            found.append(split)
    if sum(len(one.slow) for one in found) < NETWORKS.min_connections:
        return None
    best = min(found, key=lambda one: one.p_value)
    return _Split(
        kind=best.kind, effect=best.effect, error=best.error, p_value=best.p_value,
        slow=best.slow, quick=best.quick,
        all_slow=np.unique(np.concatenate([one.slow for one in found])),
    )  # fmt: skip


def _split(level: Floats, kind: str, mine: Integers, others: Integers) -> _Split:
    effect = float(np.median(level[mine]) - np.median(level[others]))
    spread = max(float(np.std(level[others])), NETWORKS.spread_log)
    error = spread * float(np.sqrt(1 / len(mine) + 1 / len(others)))
    degrees = max(1.0, len(mine) + len(others) - 2.0)
    p_value = float(special.stdtr(degrees, -effect / error))
    return _Split(
        kind=kind, effect=effect, error=error, p_value=p_value,
        slow=mine, quick=others, all_slow=mine,
    )  # fmt: skip


def _is_clear(level: Floats, split: _Split) -> bool:
    low = np.quantile(level[split.slow], NETWORKS.outer_share)
    high = np.quantile(level[split.quick], 1 - NETWORKS.outer_share)
    apart = bool(low - high >= 0.5 * split.effect)
    return apart and split.effect >= NETWORKS.sure_sigmas * split.error


def _excess_ns(transfers: Transfers, split: _Split, ranks: tuple[int, ...]) -> float:
    share = 1.0 - float(np.exp(-split.effect))
    by_rank = dict.fromkeys(ranks, 0.0)
    for unit in split.all_slow.tolist():
        for rank in set(transfers.members[unit]) & set(ranks):
            by_rank[rank] += float(transfers.total_ns[unit]) * share
    return max(by_rank.values(), default=0.0)


def _finding(seen: Observations, slow: SlowNetwork) -> Finding:
    is_one = len(slow.hosts) == 1
    who = f"host {slow.hosts[0]}'s network" if is_one else f"the network of {listed(slow.hosts)}"
    split, slowdown = slow.split, float(np.exp(slow.split.effect))
    reach = SEARCH.interval_sigmas * split.error
    rows = tuple(row for row, host in enumerate(seen.members.hosts) if host in slow.hosts)
    return build_finding(
        seen,
        Claim(
            ranks=slow.ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE if is_one else Owner.UNDECIDED,
            slowdown=slowdown,
            interval=(slowdown * float(np.exp(-reach)), slowdown * float(np.exp(reach))),
            course=None,
            q_value=slow.q_value,
            num_peers=len(split.quick),
            saved_ns=np.full(len(seen.iterations), slow.excess_ns),
            subject=f"{who} (ranks {listed(slow.ranks)})",
            predicate=f"transfers {times(slowdown)} slower than between other hosts",
            evidence=(_evidence(seen, split), *(() if is_one else (NOT_TOLD_APART,))),
            advice=connection_advice(seen, slow.ranks),
        ),
    )


def _evidence(seen: Observations, split: _Split) -> str:
    assert seen.transfers is not None
    typical = robust.median(seen.transfers.transfer_ns, axis=1)
    slow_ns, quick_ns = (float(np.median(typical[units])) for units in (split.slow, split.quick))
    return (
        f"one {split.kind} takes {milliseconds(slow_ns)} on "
        f"{counted(len(split.slow), 'connection')} of it against {milliseconds(quick_ns)} on "
        f"{counted(len(split.quick), 'connection')} between other hosts, counted from the last "
        "member's arrival"
    )


def _search(inquiry: Inquiry) -> Answer:
    found = slow_networks(inquiry)
    notes = () if found else _hidden_by_rings(inquiry.seen)
    ranks = {rank for one in found for rank in one.ranks}
    return Answer(
        findings=tuple(_finding(inquiry.seen, one) for one in found),
        explains=lambda finding: finding.cause == Cause.LINK and bool(ranks & set(finding.ranks)),
        notes=notes,
    )


def _hidden_by_rings(seen: Observations) -> tuple[str, ...]:
    """Say which slow network could not have been seen: that of a host which every ring crosses."""
    hosts = {name for name in seen.members.hosts if name}
    if len(hosts) < 2:
        return ()
    crossed: list[frozenset[str]] = []
    if seen.transfers is not None:
        crossed = [one for one in _crossings(seen, seen.transfers).hosts if len(one) > 1]
    if any(one != hosts for one in crossed):
        return ()
    return (
        "all communication between hosts runs through every one of them, or was not recorded: a "
        "slow network of one host slows all alike and cannot be seen here; an all_reduce_perf "
        "(nccl-tests) between pairs of hosts shows it",
    )


NETWORK = CauseSpec(cause=Cause.LINK, search=_search)
