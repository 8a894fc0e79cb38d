"""Name hosts whose network is slow by what their TCP connections carry while they are busy.

Problem: a collective over a ring takes as long on each rank, whichever port is slow: durations say
that the ring is slow, and nothing of where.

Idea: Linux counts of each connection the bytes that have arrived and for how long some were on
their way while the receiver had room (`megascan/tracer/sockets.py`). Their ratio is what the way
carries, whoever waits for whom. Ways that carry about as many bytes do the same for the job, and
are compared.

* Some of them are slow if they lie apart: the quickest of them carries at most three quarters of
  what the slowest of the others does. Of several such gaps the first one is taken above which all
  is explained: next to a slow port others are slower than far from it.
* A host is named where all that it sends and all that it receives is slow; or one of both, to or
  from two hosts at least, while two others do as much and none of that is slow. All that is slow
  must begin or end at such hosts: messages of a healthy pipeline differ by their direction.
  One other host, or in a ring of three the one other way, is enough where it is quicker by more
  than ways are that share a port (`lone_ratio`).
* What is slow between two hosts only may be slow at either end, or between: undecided, unless the
  ends send and receive as quickly as others elsewhere: then it is the connection. In a ring the way
  to its sender carries less, too, and that to the sender's sender, for who waits rests; a slow port
  holds back the two ways beside it alike.

While the others wait for a slow way they rest, and then carry more at once than all the time: what
ports hold back is there for them, and what connections that share a port take of each other is not.
So the port is slower by something between nothing and what its ways are, and the geometric mean of
both is said: of real ports at a half and a third of their speed it was 1.6 to 3.4. The step would
be shorter by what the slow way that is busy longest takes beyond that, but not shorter than ranks
compute.

Example: a ring of four hosts at 400 Mbit/s; the port of the third one runs at 200. Each of 20
collectives takes 0.6 s on all ranks. What the fourth sends to it and what it sends to the second
are carried at 190 and 180 Mbit/s, the other two at 400 and 404.

**Now and then.** A port that is slow for a part of the time is told by the past of its own ways: in
a window they carry at most three quarters of what they carry in their better windows, and of what
all others do then, which carry as much as ever. By as much the port is slower.
What so changes between two hosts only, as all does in a job of two, is slow at either end.
Example: of four hosts' ways at 380 to 413 Mbit/s, those to and from host 3 carry 196 and 202 in one
of six windows, and the others 509.

Limits: gloo, and NCCL over sockets. RDMA goes past the kernel; there the rates of ports may tell. A
host that alone is farther than others, behind a narrower way of its own, looks like a slow port.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from detect.observe.machines import Carried
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats.stretches import Course
from detect.text import times
from detect.thresholds.networks import TCP
from megascan.arrays import Flags, Floats
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
    def ends(self) -> tuple[str, str]:
        return self.sender, self.receiver


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """Ways that are slow, and whose they are."""

    hosts: tuple[str, ...]
    """One, or the sender and the receiver of a single connection."""
    ways: tuple[_Way, ...]
    others: tuple[_Way, ...]
    """All ways that do the same and are not slow."""
    is_told: bool
    """Whether that is at fault: the host's port, or the connection."""
    slower: tuple[float, ...]
    """Log of how much slower each is than others usually are, or than itself in better windows."""
    gap_log: float
    """Log of how far they lie apart at least."""
    spread_log: float
    """Log of what ways of one port differ by, which carry what they can, or these ways in better
    windows: others are quicker the more they rest.
    """
    windows: tuple[tuple[int, int], ...] = ()
    """Those in which they are slow, by first and last iteration; none: all."""

    @property
    def ratio_log(self) -> float:
        """Return how much slower they are while they are busy, log."""
        return float(np.median(self.slower))

    @property
    def port_log(self) -> float:
        """Return how much slower the port is, log: as much as its ways beside their own past, else
        the middle between not at all and as much.
        """
        return self.ratio_log if self.windows else self.ratio_log / 2

    @property
    def chance(self) -> float:
        """Return the chance that ways of one speed lie so far apart."""
        return float(stats.norm.sf(self.gap_log / max(self.spread_log, TCP.spread_log)))


@dataclass(frozen=True, kw_only=True)
class _Hit:
    """A window in which some ways are slow beside their own past."""

    window: tuple[int, int]
    slow: tuple[_Way, ...]
    others: tuple[_Way, ...]


def search_tcp(inquiry: Inquiry) -> Answer:
    """Name hosts and connections whose TCP carries little for the time that it takes."""
    seen, members = inquiry.seen, inquiry.seen.members
    carried = [one for one in seen.carried if one.iterations[1] >= seen.iterations.min()]
    found = [
        finding
        for one in _slow(carried, _most_chance(inquiry))
        if (finding := _finding(inquiry, one)) is not None
        and not inquiry.blamed[list(members.rows_with(finding.ranks))].all()
    ]
    named = [one for one in found if one.owner is Owner.NODE]
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, named),
        explains=lambda one: _explains(seen, named, one),
    )


def _most_chance(inquiry: Inquiry) -> float:
    """Return the chance up to which ways are slow, of one of all hosts."""
    return inquiry.settings.false_discovery_rate / len(set(inquiry.seen.members.hosts))


def _slow(carried: Sequence[Carried], most_chance: float) -> list[_Slow]:
    """Return what is slow all the time; of the same hosts when, where their own past tells it; and
    what is slow now and then where nothing is all the time.
    """
    always = [one for kind in _kinds(_ways(carried)) for one in _slow_of(kind, most_chance)]
    at_times = {one.hosts: one for one in _slow_at_times(carried)}
    return [at_times.get(one.hosts, one) for one in always] or [*at_times.values()]


def _explains(seen: Observations, named: list[Finding], other: Finding) -> bool:
    """Return whether an open finding is what others wait for a network that was named."""
    is_open = other.owner is Owner.UNDECIDED and other.cause in EXPLAINED
    hosts = seen.members.hosts_of(chain.from_iterable(one.ranks for one in named))
    touches = not other.ranks or bool(hosts & seen.members.hosts_of(other.ranks))
    return bool(named) and is_open and touches


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
    return [way for way in ways if way.busy_ns >= TCP.least_busy_ns and way.num_bytes > 0]


def _slow_at_times(carried: Sequence[Carried]) -> Iterator[_Slow]:
    """Yield the hosts all of whose ways are slow in some windows, beside their own past, while all
    others carry as much as ever; and the two hosts between which alone that is so.
    """
    by_window: dict[tuple[int, int], list[Carried]] = defaultdict(list)
    for one in carried:
        by_window[one.iterations].append(one)
    windows = {window: _ways(each) for window, each in sorted(by_window.items())}
    usual = _usual_speeds(chain.from_iterable(windows.values()))
    hits: dict[tuple[str, ...], list[_Hit]] = defaultdict(list)
    for window, ways in windows.items():
        slow = tuple(way for way in ways if _is_slower(way, usual))
        others = tuple(way for way in ways if way not in slow)
        if (hosts := _slow_ends(slow, others)) is not None:
            hits[hosts].append(_Hit(window=window, slow=slow, others=others))
    for hosts, each in hits.items():
        if len(each) < len(windows):
            quick = [
                np.log(way.speed / usual[way.ends])
                for way in chain.from_iterable(windows.values())
                if _begins_or_ends(way, hosts) and not _is_slower(way, usual)
            ]
            yield _at_times(hosts, each, usual, _spread(quick))


def _at_times(
    hosts: tuple[str, ...],
    hits: Sequence[_Hit],
    usual: Mapping[tuple[str, str], float],
    spread_log: float,
) -> _Slow:
    """Return what is slow in the windows of some hits, beside the usual speed of its ways."""
    ways = tuple(way for one in hits for way in one.slow)
    slower = tuple(float(np.log(usual[way.ends] / way.speed)) for way in ways)
    return _Slow(
        hosts=hosts,
        ways=ways,
        others=tuple(way for one in hits for way in one.others),
        is_told=len(hosts) == 1,
        slower=slower,
        gap_log=min(slower),
        spread_log=spread_log,
        windows=tuple(one.window for one in hits),
    )


def _slow_ends(slow: Sequence[_Way], others: Sequence[_Way]) -> tuple[str, ...] | None:
    """Return the host where all begins or ends that is slower than its past, or the two hosts
    between which all of it goes; None where others are as slow, or it is of several hosts.
    """
    pairs = {tuple(sorted(way.ends)) for way in slow}
    if not others:
        return next(iter(pairs)) if len(pairs) == 1 else None
    if not _are_apart(slow, others):
        return None
    hosts = [*_slow_hosts(slow, others)]
    if len(hosts) == 1 and all(hosts[0] in way.ends for way in slow):
        return (hosts[0],)
    return next(iter(pairs)) if len(pairs) == 1 else None


def _begins_or_ends(way: _Way, hosts: tuple[str, ...]) -> bool:
    """Return whether a way is of the host, or between the two hosts."""
    return hosts[0] in way.ends if len(hosts) == 1 else {*way.ends} == {*hosts}


def _is_slower(way: _Way, usual: Mapping[tuple[str, str], float]) -> bool:
    return way.speed * TCP.named_ratio <= usual[way.ends]


def _are_apart(slow: Sequence[_Way], others: Sequence[_Way]) -> bool:
    """Return whether some ways are slower than all others: next to a port that became slow others
    become quicker, so that they were slower before beside their own past alone.
    """
    if not slow:
        return False
    quickest = max(way.speed for way in slow)
    return quickest * TCP.named_ratio <= min(way.speed for way in others)


def _usual_speeds(ways: Iterable[_Way]) -> dict[tuple[str, str], float]:
    """Return what each way carries in its better windows: the median of the quicker half."""
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for way in ways:
        speeds[way.ends].append(way.speed)
    return {ends: float(np.median(sorted(each)[len(each) // 2 :])) for ends, each in speeds.items()}


def _kinds(ways: list[_Way]) -> Iterator[list[_Way]]:
    """Yield ways that carry about as many bytes each, and so do the same for the job."""
    kind: list[_Way] = []
    for way in sorted(ways, key=lambda way: way.num_bytes):
        if kind and way.num_bytes > TCP.alike_ratio * kind[0].num_bytes:
            yield kind
            kind = []
        kind.append(way)
    yield kind


def _slow_of(kind: list[_Way], most_chance: float) -> list[_Slow]:
    """Return what is slow of ways of one kind: hosts, or a connection; nothing where not all that
    is slow is explained.
    """
    kind = sorted(kind, key=lambda way: way.speed)
    gaps = [place for place in range(1, len(kind)) if _is_gap(kind, place)]
    for place in gaps:
        slow, others = kind[:place], kind[place:]
        hosts = list(_slow_hosts(slow, others))
        if all({*way.ends} & {*hosts} for way in slow):
            found = [
                _beside((host,), [way for way in slow if host in way.ends], others)
                for host in hosts
            ]
            if all(one.chance <= most_chance for one in found):
                return found
            break
    which = gaps[:1] if _is_ring(kind) else gaps[-1:]
    return [one for place in which for one in _slow_connection(kind[:place], kind[place:])]


def _is_gap(kind: list[_Way], place: int) -> bool:
    """Return whether ways from a place on are quicker than those before it, which one way alone
    shows by much only, and of a ring: there it would be as busy as those.
    """
    ratio, num_others = kind[place].speed / kind[place - 1].speed, len(kind) - place
    if num_others >= TCP.least_others:
        return ratio >= TCP.named_ratio
    return ratio >= TCP.lone_ratio and place >= TCP.least_others and _is_ring(kind)


def _is_ring(kind: list[_Way]) -> bool:
    """Return whether each host sends to one other and receives from one: next to a slow way of a
    ring others carry less, too, for who waits there sends on later.
    """
    senders, receivers = ({way.ends[end] for way in kind} for end in (0, 1))
    return len(senders) == len(receivers) == len(kind)


def _beside(
    hosts: tuple[str, ...], slow: list[_Way], others: list[_Way], *, is_told: bool = True
) -> _Slow:
    """Return slow ways beside others that do the same."""
    logs, quick = (np.log([way.speed for way in each]) for each in (slow, others))
    return _Slow(
        hosts=hosts,
        ways=tuple(slow),
        others=tuple(others),
        is_told=is_told,
        slower=tuple((np.median(quick) - logs).tolist()),
        gap_log=float(quick.min() - logs.max()),
        spread_log=_spread(logs),
    )


def _spread(logs: Iterable[float]) -> float:
    """Return the standard deviation of some logs; 0 of a single one."""
    values = np.array([*logs])
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _slow_hosts(slow: Sequence[_Way], others: Sequence[_Way]) -> Iterator[str]:
    """Yield the hosts of which all that they send and receive is slow, with two hosts; or all that
    they send, or receive, while two others do as much and none of that is slow.
    """
    peers: dict[str, set[str]] = defaultdict(set)
    for way in slow:
        peers[way.sender].add(way.receiver)
        peers[way.receiver].add(way.sender)
    quick = {end for way in others for end in way.ends}
    one_way = {host for end in (0, 1) for host in _slow_one_way(slow, others, end)}
    for host in sorted(peers):
        is_whole = host not in quick and len(peers[host]) >= TCP.least_others
        if is_whole or host in one_way:
            yield host


def _slow_one_way(slow: Sequence[_Way], others: Sequence[_Way], end: int) -> set[str]:
    """Return the hosts all of whose ways begin, or end, slowly, of two and more; beside two others
    that do as much, or one by much.
    """
    slowly, quickly = (Counter(way.ends[end] for way in each) for each in (slow, others))
    as_much = {host for host, count in quickly.items() if count >= TCP.least_others} - {*slowly}
    ratio = min(way.speed for way in others) / max(way.speed for way in slow)
    if len(as_much) < TCP.least_others and not (as_much and ratio >= TCP.lone_ratio):
        return set()
    return {
        host for host, count in slowly.items() if count >= TCP.least_others and host not in quickly
    }


def _slow_connection(slow: list[_Way], others: list[_Way]) -> list[_Slow]:
    """Return the ways between two hosts that alone are slow, one or both; told where the ends are
    quick elsewhere.
    """
    if len({frozenset(way.ends) for way in slow}) > 1:
        return []
    senders, receivers = ({way.ends[end] for way in others} for end in (0, 1))
    are_quick = all(way.sender in senders and way.receiver in receivers for way in slow)
    found = _beside(slow[0].ends, slow, others, is_told=are_quick)
    return [replace(found, spread_log=0.0)]  # the two directions may differ


def _finding(inquiry: Inquiry, slow: _Slow) -> Finding | None:
    """Return what is said of slow ways; None where chance is not excluded, or nobody waits."""
    seen, members = inquiry.seen, inquiry.seen.members
    rows = tuple(row for row, host in enumerate(members.hosts) if host in slow.hosts)
    is_slow = _when(seen, slow)
    saved_ns = np.where(is_slow, _saved_ns(seen, slow), 0.0)
    if slow.chance > _most_chance(inquiry) or not rows or not is_slow.any():
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
            slowdown=float(np.exp(slow.port_log)),
            interval=(1.0, float(np.exp(slow.ratio_log))),
            course=None if is_slow.all() else Course.of(is_slow, slow.port_log, TCP.spread_log),
            q_value=slow.chance * len(set(members.hosts)),
            num_peers=len(slow.others),
            saved_ns=saved_ns,
            subject=f"the network of {whose} (ranks {listed(ranks)})",
            predicate=f"carries {times(float(np.exp(slow.ratio_log)))} less than "
            f"{'at other times' if slow.windows else 'that of other hosts'} while it is busy",
            evidence=(_evidence(slow), *([] if slow.is_told else [EITHER_END])),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
            is_border=is_one,
            is_pair=not is_one,
        ),
    )
    return undecided_if_no_gain(finding)


def _when(seen: Observations, slow: _Slow) -> Flags:
    """Flag the iterations in whose windows ways are slow, (iteration,)."""
    if not slow.windows:
        return np.ones(len(seen.iterations), dtype=bool)
    return seen.within(slow.windows)


def _saved_ns(seen: Observations, slow: _Slow) -> Floats:
    """Return by how much iterations would be shorter if the way that is busy longest were as quick
    as others, (iteration,): no shorter than ranks compute.
    """
    busiest = max(way.busy_ns / way.of_ns for way in slow.ways)
    share = -busiest * float(np.expm1(-slow.port_log))
    computing_ns = np.nan_to_num(seen.busy_ns).max(axis=0)
    most_ns = np.maximum(seen.iteration_ns - computing_ns, 0.0)
    return np.asarray(np.minimum(share * seen.iteration_ns, most_ns))


def _evidence(slow: _Slow) -> str:
    quick = [_megabits(way) for way in slow.others]
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for way in slow.ways:
        parts[way.ends].append(_megabits(way))
    ways = [
        f"{sender} to {receiver} {' and '.join(f'{one:.0f}' for one in speeds)} Mbit/s"
        for (sender, receiver), speeds in parts.items()
    ]
    usual = [_megabits(way) * np.exp(log) for way, log in zip(slow.ways, slow.slower, strict=True)]
    past = f", in other windows {min(usual):.0f} to {max(usual):.0f}" if slow.windows else ""
    beside = f"; what is not slow {min(quick):.0f} to {max(quick):.0f} Mbit/s" if quick else ""
    return (
        "Linux counts what TCP connections carry and for how long something is on its way: "
        f"{listed(ways)}{past}{beside}"
    )


def _megabits(way: _Way) -> float:
    return way.speed * BITS_PER_BYTE * NS_PER_US  # bits in a µs are megabits in a second
