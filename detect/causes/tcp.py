"""Name hosts whose network is slow by what their TCP connections carry while they are busy.

Problem: a collective over a ring takes as long on each rank, whichever port is slow: durations say
that the ring is slow, and nothing of where.

Idea: Linux counts of each connection the bytes that have arrived and for how long some were on
their way while the receiver had room (`megascan/tracer/sockets.py`). Their ratio is what the way
carries, whoever waits for whom. Ways that carry about as many bytes do the same for the job, and
are compared.

* A way is slow if it carries at most three quarters of what most of those ways do that neither
  begin nor end at its sender, or at its receiver.
* A host is named where all that it sends is slow, or all that it receives, or both, and two other
  hosts at least are at the other ends.
* Ways between two hosts only may be slow at either end, or between: undecided, unless the sender
  sends as quickly as others elsewhere, and the receiver receives so: then it is the connection.

The step would be shorter by what the slowest of these ways takes beyond what the others would, but
not shorter than ranks compute.

Example: a ring of four hosts at 400 Mbit/s; the port of the third one runs at 200. Each of 20
collectives takes 0.6 s on all ranks. What the fourth sends to it and what it sends to the second
are carried at 190 and 180 Mbit/s, the other two at 400 and 404.

Limits: gloo, and NCCL over sockets. RDMA goes past the kernel; there the rates of ports may tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from scipy import stats

from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
    rows_of_findings,
    undecided_if_no_gain,
)
from detect.observe.observations import Carried, Observations
from detect.report import Cause, Finding, Owner
from detect.stats.search import interval_of_ratio
from detect.text import counted, times
from detect.thresholds.networks import TCP
from megascan.arrays import Floats
from megascan.errors import listed

BITS_PER_BYTE, NS_PER_US = 8, 1000
EITHER_END = (
    "it shows on the way from one host to one other only: the port of either may be slow, or what "
    "lies between"
)
EXPLAINED = (Cause.LINK, Cause.UNKNOWN)
"""What ranks that wait for a slow network may be taken for."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """From a host to another one: what all connections have carried."""

    sender: str
    receiver: str
    num_bytes: int
    busy_ns: int
    of_ns: int
    """The time over which that was counted."""

    @property
    def speed(self) -> float:
        """Return bytes per ns."""
        return self.num_bytes / self.busy_ns

    @property
    def ends(self) -> frozenset[str]:
        return frozenset((self.sender, self.receiver))

    def is_like(self, other: _Way) -> bool:
        """Return whether both carry about as much, as ways of one kind do."""
        most, least = max(self.num_bytes, other.num_bytes), min(self.num_bytes, other.num_bytes)
        return most <= TCP.alike_ratio * least


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """Ways that are slow, and whose they are."""

    hosts: tuple[str, ...]
    """One, or the sender and the receiver of a single connection."""
    ways: tuple[_Way, ...]
    others: tuple[_Way, ...]
    is_told: bool
    """Whether that is at fault: the host's port, or the connection."""

    @property
    def ratio_log(self) -> float:
        return float(np.log(_usual(self.others) / _usual(self.ways)))

    @property
    def sigma_log(self) -> float:
        """Return by how much sound ways differ, log: at least by what is always so."""
        logs = np.log([way.speed for way in self.others])
        return max(float(np.std(logs, ddof=1)), TCP.spread_log)


def search_tcp(inquiry: Inquiry) -> Answer:
    """Name hosts and connections whose TCP carries little for the time that it takes."""
    seen, members = inquiry.seen, inquiry.seen.members
    ways = _ways(seen.carried)
    slow = _slow_hosts(ways) or list(_slow_connections(ways))
    found = [
        finding
        for one in slow
        if (finding := _finding(inquiry, one)) is not None
        and not inquiry.blamed[list(members.rows_with(finding.ranks))].all()
    ]
    named = [one for one in found if one.owner is Owner.NODE]
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, named),
        explains=lambda one: _explains(seen, named, one),
    )


def _explains(seen: Observations, named: list[Finding], other: Finding) -> bool:
    """Return whether an open finding is what others wait for a network that was named."""
    is_open = other.owner is Owner.UNDECIDED and other.cause in EXPLAINED
    hosts = seen.members.hosts_of(chain.from_iterable(one.ranks for one in named))
    return bool(named) and is_open and (
        not other.ranks or bool(hosts & seen.members.hosts_of(other.ranks))
    )  # fmt: skip


def _ways(carried: Iterable[Carried]) -> list[_Way]:
    """Return what went between each two hosts that kept a connection busy for long enough."""
    parts: dict[tuple[str, str], list[Carried]] = defaultdict(list)
    for one in carried:
        parts[one.sender, one.receiver].append(one)
    ways = [
        _Way(
            sender=sender,
            receiver=receiver,
            num_bytes=sum(one.num_bytes for one in each),
            busy_ns=sum(one.busy_ns for one in each),
            of_ns=sum(one.of_ns for one in each),
        )
        for (sender, receiver), each in parts.items()
    ]
    return [way for way in ways if way.busy_ns >= TCP.least_busy_ns]


def _usual(ways: Iterable[_Way]) -> float:
    """Return the median speed, bytes per ns."""
    return float(np.median([way.speed for way in ways]))


def _is_slow(way: _Way, others: list[_Way]) -> bool:
    like = _like([way], others)
    return bool(like) and way.speed * TCP.named_ratio <= _usual(like)


def _like(some: list[_Way], others: list[_Way]) -> tuple[_Way, ...]:
    """Return those of other ways that carry about as much as some."""
    return tuple(way for way in others if any(way.is_like(one) for one in some))


def _slow_hosts(ways: list[_Way]) -> list[_Slow]:
    """Return the hosts all of whose sending or receiving is slow, with two other hosts at least,
    beside ways that touch none of them.
    """
    found = list(_candidates(ways))
    touched = {host for one in found for host in one.hosts}
    return [
        replace(one, others=tuple(w for w in one.others if not w.ends & touched)) for one in found
    ]


def _candidates(ways: list[_Way]) -> Iterator[_Slow]:
    for host in dict.fromkeys(chain.from_iterable((way.sender, way.receiver) for way in ways)):
        own = [way for way in ways if host in way.ends]
        others = [way for way in ways if host not in way.ends]
        slow = [way for way in own if _is_slow(way, others)]
        quick = [way for way in own if way not in slow]
        whole = [
            way
            for way in slow
            if not any((way.sender == host) == (one.sender == host) for one in quick)
        ]
        if len(frozenset().union(*(way.ends for way in whole))) > 2:  # itself, and two others
            yield _Slow(hosts=(host,), ways=tuple(whole), others=_like(whole, others), is_told=True)


def _slow_connections(ways: list[_Way]) -> Iterator[_Slow]:
    """Yield the ways between two hosts that alone are slow."""
    for way in ways:
        others = [one for one in ways if one.sender != way.sender and one.receiver != way.receiver]
        if not _is_slow(way, others):
            continue
        beside = [one for one in ways if one != way and way.is_like(one)]
        sends = [one for one in beside if one.sender == way.sender]
        receives = [one for one in beside if one.receiver == way.receiver]
        are_quick = [
            bool(each) and not any(_is_slow(one, others) for one in each)
            for each in (sends, receives)
        ]
        yield _Slow(
            hosts=(way.sender, way.receiver),
            ways=(way,),
            others=_like([way], others),
            is_told=all(are_quick),
        )


def _finding(inquiry: Inquiry, slow: _Slow) -> Finding | None:
    """Return what is said of slow ways; None where chance is not excluded, or nobody waits."""
    seen, members = inquiry.seen, inquiry.seen.members
    if len(slow.others) < TCP.least_others:
        return None
    rows = tuple(row for row, host in enumerate(members.hosts) if host in slow.hosts)
    error = slow.sigma_log * np.sqrt(1.0 / len(slow.ways) + 1.0 / len(slow.others))
    chance = float(stats.norm.sf(slow.ratio_log / error)) * len(set(members.hosts))
    saved_ns = _saved_ns(seen, slow)
    if chance > inquiry.settings.false_discovery_rate or not rows:
        return None
    if float(saved_ns.mean()) < TCP.least_share * float(seen.iteration_ns.mean()):
        return None
    ranks, is_one = members.ranks_of(rows), len(slow.hosts) == 1
    whose = (
        f"host {slow.hosts[0]}" if is_one else f"the way from host {' to host '.join(slow.hosts)}"
    )
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE if slow.is_told else Owner.UNDECIDED,
            slowdown=float(np.exp(slow.ratio_log)),
            interval=interval_of_ratio(slow.ratio_log, error),
            course=None,
            q_value=chance,
            num_peers=len(slow.others),
            saved_ns=saved_ns,
            subject=f"the network of {whose} (ranks {listed(ranks)})",
            predicate=f"carries {times(float(np.exp(slow.ratio_log)))} less than that between "
            "other hosts while it is busy",
            evidence=(_evidence(slow), *([] if slow.is_told else [EITHER_END])),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
            is_border=is_one,
            is_pair=not is_one,
        ),
    )
    return undecided_if_no_gain(finding)


def _saved_ns(seen: Observations, slow: _Slow) -> Floats:
    """Return by how much iterations would be shorter if the slowest way were as quick as others,
    (iteration,): no shorter than ranks compute.
    """
    share = max(
        (way.busy_ns - way.num_bytes / _usual(slow.others)) / way.of_ns for way in slow.ways
    )
    computing_ns = np.nan_to_num(seen.busy_ns).max(axis=0)
    most_ns = np.maximum(seen.iteration_ns - computing_ns, 0.0)
    return np.asarray(np.minimum(share * seen.iteration_ns, most_ns))


def _evidence(slow: _Slow) -> str:
    quick = [_megabits(way) for way in slow.others]
    return (
        "Linux counts what TCP connections carry and for how long something is on its way: "
        + listed(
            [f"{way.sender} to {way.receiver} {_megabits(way):.0f} Mbit/s" for way in slow.ways]
        )
        + f"; {counted(len(quick), 'way')} between other hosts {min(quick):.0f} to "
        f"{max(quick):.0f} Mbit/s, with about as many bytes"
    )


def _megabits(way: _Way) -> float:
    return way.speed * BITS_PER_BYTE * NS_PER_US  # bits in a µs are megabits in a second
