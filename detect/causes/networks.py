"""Find hosts and rails whose network is slow, and hosts whose GPUs are slow among themselves.

Problem: the eight GPUs of a host share its NICs. A NIC at half speed slows every message and every
ring that enters or leaves the host. Compared link by link, most messages between two stages are
slow, so none stands out; and a ring that crosses all hosts is as slow for everybody.

Idea: take what crosses hosts, kind by kind (same operation, bytes, members), and split it by one
host after the other into what touches the host (A) and what does not (B):

    effect = median log(A) - median log(B)
    clear if quarter(A) - three quarters(B) >= effect / 2

The host's network is slow when the effect is clear and as large as the floor in at least one kind,
and A is as quick as B in no other kind. Two hosts that only talk to each other cannot be told
apart, and stay undecided; rings through all hosts have no B, and say nothing.

A rail is the same device of all hosts, whose NICs hang on one switch. It is split off in the same
way: what touches it against what does not. In a short window no single ring of a slow rail is sure
by itself; all of them together are.

What stays inside hosts (NVLinks through their switches) is split by host as well. Groups of one
host that have no member in common share nothing else.

Stages hold unlike numbers of parameters, so the rings of their gradients are of unlike sizes. Large
rings take time in proportion to their bytes: rings that differ only in size are also compared by
the time per byte, with a higher floor.

Example: PP4 x DP4 on 4 hosts. Messages 0-1 take 3.2 ms, 1-2 and 2-3 take 13.1 ms. Host 2 touches
8 messages, all slow; the 4 others are quick: effect log 4.0. Of host 1's 8 messages half are quick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from scipy import special

from detect.causes.crossings import (
    Crossings,
    Equals,
    crossings_of,
    kinds_inside,
    kinds_of,
)
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
    ratio_of_half_speed,
    replayed_half_speed,
    undecided_if_little,
)
from detect.causes.launching import IN_DOUBT_LAUNCH, launches_explain
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers, bus_factors, longest_of_a_rank
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.host_tests import since_it_began
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course, active_in
from detect.text import counted, milliseconds, times
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.devices import ORDINARY
from detect.thresholds.networks import LINKS, NETWORKS, NVLINKS
from detect.thresholds.observing import STARVATION
from detect.thresholds.statistics import POWER
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

ONE_RING = (
    "one ring alone shows it: the NIC of any one of these ranks slows the ring as much as their "
    "switch does; a transfer between pairs of them decides"
)
ONE_HOST_IN_ALL = (
    "one host is in all that is slow: its NIC may be slow as well as the switch of the rail; a "
    "transfer between two others of these hosts decides"
)
BETWEEN_TWO_HOSTS = (
    "it shows between two hosts only: the NIC of either may be at fault, or what lies between; "
    "look at both, and drain neither for this alone"
)
OF_TWO_HOSTS = (
    "one other host alone is quicker inside: this one may be built otherwise (compare nvidia-smi "
    "topo -m of both), or what is slow may be of one of its GPUs"
)
SHOWN_BYTES = 100_000_000
"""For how many bytes the times of transfers of unlike sizes are shown."""


class Way(Enum):
    """What connections share: `others` says with which they are compared, `doubt` why several of
    them that are slow are not blamed.
    """

    NETWORK = (
        "between other hosts",
        "these hosts exchange with each other only: the trace cannot tell which of them is slow",
    )
    RAIL = (
        "on other rails",
        "what takes one of these rails takes the others, too: either may be slow",
    )
    INSIDE = (
        "inside other hosts",
        "several hosts are slow alike: they may be built otherwise than the others; compare "
        "nvidia-smi topo -m of both",
    )

    def __init__(self, others: str, doubt: str) -> None:
        self.others, self.doubt = others, doubt


@dataclass(frozen=True, kw_only=True)
class _Port:
    """What many connections share: the NICs of a host, a rail, or the switches inside a host."""

    name: str
    """The name of the host, or the device number of the rail."""
    ranks: tuple[int, ...]
    touches: Flags
    """(unit,): whether one of `ranks` is a member of the unit."""


@dataclass(frozen=True, kw_only=True)
class SlowNetwork:
    """A host or a rail that is slow, or several that cannot be told apart."""

    names: tuple[str, ...]
    way: Way
    ranks: tuple[int, ...]
    split: _Split
    """The split of the kind of transfers that shows the slowness best."""
    q_value: float
    excess_ns: float
    """Transfer time lost an iteration by the rank that loses most."""
    num_shared: int
    """How many hosts all that is slow has in common."""
    is_alike: bool = False
    """Whether all kinds of transfers are slower by the same factor, and meet on one host only."""
    course: Course | None = None
    """Since when it is slow; None is the whole window."""
    is_told_twice: bool = False
    """Whether the rings of the host's stage tell the same as its messages."""


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
    effects: tuple[float, ...]
    """The effects in all kinds in which the host is slow."""


def _slow_network(inquiry: Inquiry, crossings: Crossings) -> SlowNetwork | None:
    """Return the slow host network, or else the slow rail, or else the host that is slow inside, if
    there is one; several that cannot be told apart are one. First by the mean times of transfers,
    then by the quickest, which met no others at a port.
    """
    floor = float(np.log(inquiry.least_of_links))
    for by in (crossings, crossings.by_quickest()):
        between, inside = kinds_of(by, by.crosses, floor), kinds_inside(by, floor)
        for way, ports, kinds in (
            (Way.NETWORK, _hosts(by), between),
            (Way.RAIL, _rails(by), between),
            (Way.INSIDE, _hosts(by), inside),
        ):
            slow = _slowest(inquiry, by, kinds, ports, way)
            if slow is not None:
                return slow
    return None


def _hosts(crossings: Crossings) -> list[_Port]:
    """Return the hosts that exchange with other hosts."""
    names = sorted({name for hosts in crossings.hosts if len(hosts) > 1 for name in hosts})
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, (host, _) in crossings.device_of.items():
        ranks[host].append(rank)
    return [
        _Port(name=name, ranks=tuple(sorted(ranks[name])), touches=crossings.touches(name))
        for name in names
    ]


def _rails(crossings: Crossings) -> list[_Port]:
    """Return the rails, and those of two neighbouring devices, which may share the NICs; none where
    device numbers, or hosts, are not known of all ranks.
    """
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, (host, device) in crossings.device_of.items():
        if not host or device < 0:
            return []
        ranks[device].append(rank)
    ports = []
    for device, own in sorted(ranks.items()):
        hosts = [crossings.device_of[rank][0] for rank in own]
        if len(set(hosts)) < len(hosts):
            return []  # two ranks with one number: the numbers are no rails
        if len(hosts) > 1:
            touches = crossings.touches_ranks(own)
            ports.append(_Port(name=str(device), ranks=tuple(sorted(own)), touches=touches))
    return [*ports, *_rails_of_two(crossings, ranks)]


def _rails_of_two(crossings: Crossings, ranks: Mapping[int, Collection[int]]) -> Iterator[_Port]:
    """Yield the rails of devices 0 and 1, 2 and 3 and so on, if there are several of them; none
    that exchanges with other devices.
    """
    if len(ranks) <= 2:
        return
    members = crossings.transfers.members
    for device, own in sorted(ranks.items()):
        if device % 2 == 0 and device + 1 in ranks:
            both = tuple(sorted((*own, *ranks[device + 1])))
            touches = crossings.touches_ranks(both)
            units = np.flatnonzero(touches & crossings.crosses & crossings.transfers.is_large)
            if all(set(members[unit]) <= set(both) for unit in units.tolist()):
                yield _Port(name=f"{device} and {device + 1}", ranks=both, touches=touches)


def _slowest(
    inquiry: Inquiry,
    crossings: Crossings,
    kinds: list[Equals],
    ports: list[_Port],
    way: Way,
) -> SlowNetwork | None:
    """Return the port that explains most slow connections (all that explain as many), if it costs
    enough; None otherwise.
    """
    seen, transfers = inquiry.seen, crossings.transfers
    rate = inquiry.settings.false_discovery_rate
    is_inside = way is Way.INSIDE
    clearest = ((port, _clearest(kinds, port.touches, spares_none=is_inside)) for port in ports)
    sure = [
        (port, split) for port, split in clearest if split and split.p_value * len(ports) <= rate
    ]
    if not sure:
        return None
    most = max(len(split.all_slow) for _, split in sure)
    best = [(port, split) for port, split in sure if len(split.all_slow) == most]
    told = _told_by_rings(crossings, best) if way is Way.NETWORK else None
    if told is not None:
        best = [told]
    split = best[0][1]
    ranks = tuple(sorted(rank for port, _ in best for rank in port.ranks))
    if len(best) == 1 and way is Way.NETWORK:
        ranks = _without_cleared(crossings, kinds, best[0][0], split)
    since, course = _since_it_began(transfers, split, inquiry.settings)
    rings = split.all_slow[crossings.are_unsized_rings[split.all_slow]]
    counted = replace(since, all_slow=rings) if len(rings) else since
    excess_ns = _excess_ns(transfers, counted, ranks, active_in(course, len(seen.iterations)))
    is_cheap = excess_ns < NETWORKS.min_step_share * float(np.median(seen.iteration_ns))
    if is_cheap or _is_of_a_rank(transfers, split, way) or _is_of_clocks(seen, transfers, split):
        return None
    num_shared = len(frozenset.intersection(*(crossings.hosts[one] for one in split.all_slow)))
    return SlowNetwork(
        names=tuple(port.name for port, _ in best),
        way=way,
        ranks=ranks,
        split=since,
        q_value=min(1.0, split.p_value * len(ports)),
        excess_ns=excess_ns,
        num_shared=num_shared,
        is_alike=way is Way.NETWORK and num_shared == 1 and _are_alike(split.effects),
        course=course,
        is_told_twice=told is not None,
    )


def _without_cleared(
    crossings: Crossings, kinds: list[Equals], port: _Port, split: _Split
) -> tuple[int, ...]:
    """Return a host's ranks but those all of whose messages with others, of a kind in which its
    other ranks' are slow, are as quick as other hosts'; all of them where some are in between.

    Each GPU may have a NIC, or a PCIe link, of its own. Example: rings of ranks 0 and 2 and of 1
    and 3 are slow, but of the host's messages those of ranks 0 and 1 only: these two.
    """
    over: dict[int, list[float]] = defaultdict(list)
    for kind in kinds:
        mine, others = kind.split(port.touches)
        if not len(mine) or not len(others):
            continue
        usual = float(np.median(kind.level[others]))
        for unit in mine.tolist():
            own = set(port.ranks) & set(crossings.transfers.members[unit])
            if len(crossings.transfers.members[unit]) == 2 and len(own) == 1:
                over[own.pop()].append(float(kind.level[unit]) - usual)
    least, most = LINKS.fine_share * split.effect, (1.0 - LINKS.fine_share) * split.effect
    cleared = {rank for rank, values in over.items() if max(values) < least}
    left = tuple(rank for rank in port.ranks if rank not in cleared)
    is_clear = all(rank in over and min(over[rank]) >= most for rank in left)
    return left if left and cleared and is_clear else port.ranks


def _are_alike(effects: tuple[float, ...]) -> bool:
    """Return whether there are several effects, all of one size: a port that lost a third of its
    rate slows messages and rings by one factor. What meets others at a port does not.

    Example: messages to one host take 1.285 times as long as others', three kinds of rings with
    another 1.282 to 1.286 times.
    """
    least = (1.0 - NETWORKS.rings_agree_share) * max(effects)
    return len(effects) > 1 and min(effects) >= least


def _told_by_rings(
    crossings: Crossings, best: list[tuple[_Port, _Split]]
) -> tuple[_Port, _Split] | None:
    """Return the host, of those whose messages are equally slow, whose rings are slower than those
    of other stages by as much as the messages, with the rings among what is slow; None where rings
    do not tell.

    Hosts of two stages exchange messages with each other only, but the rings of their gradients are
    each stage's own. Sizes are often not recorded, and differ from stage to stage: only the very
    factor of the messages counts. Example: messages between hosts 3 and 7 take 1.97 times as long
    as others, rings of 3's stage 30.4 ms and those of 7's 15.2: host 3.
    """
    effect, share = best[0][1].effect, NETWORKS.rings_agree_share
    names = [port.name for port, _ in best]
    levels = [_ring_level(crossings, [name], touch=True) for name in names]
    levels.append(_ring_level(crossings, names, touch=False))
    slower = []
    for number, own in enumerate(levels[:-1]):
        others = [*levels[:number], *levels[number + 1 :]]
        over = [own[like] - other[like] for other in others for like in own if like in other]
        slower.append(bool(over) and abs(float(np.median(over)) / effect - 1.0) <= share)
    if sum(slower) != 1:
        return None
    port, split = best[slower.index(True)]
    rings = np.flatnonzero(crossings.touches(port.name) & crossings.are_rings)
    return port, replace(split, all_slow=np.union1d(split.all_slow, rings))


def _ring_level(
    crossings: Crossings, names: Collection[str], *, touch: bool
) -> dict[tuple[str, int, int], float]:
    """Return the median log time, or log time per byte where bytes are known, of the rings that
    touch hosts, or that do not, by operation, members and hosts; of those without transfer times
    as well.
    """
    transfers = crossings.transfers
    level = crossings.level - np.log(np.maximum(transfers.size_bytes, 1))
    found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for unit in np.flatnonzero(crossings.are_rings & np.isfinite(level)).tolist():
        hosts = crossings.hosts[unit]
        if hosts.isdisjoint(names) != touch:
            what = transfers.kinds[int(transfers.kind[unit])].partition(" of ")[0]
            found[what, len(transfers.members[unit]), len(hosts)].append(float(level[unit]))
    for ring in transfers.untimed:
        hosts = crossings.hosts_of(ring.members)
        if ring.crosses and hosts.isdisjoint(names) != touch:
            rate = np.log(ring.shortest_ns / max(ring.size_bytes, 1))
            found[f"untimed {ring.what}", len(ring.members), len(hosts)].append(float(rate))
    return {like: float(np.median(values)) for like, values in found.items()}


def _is_of_a_rank(transfers: Transfers, split: _Split, way: Way) -> bool:
    """Return whether what is slow may be a single link or rank: a link between two ranks, there and
    back, is no rail; and if one rank is in all that is slow inside a host, it may be that rank.
    """
    units = {frozenset(transfers.members[unit]) for unit in split.all_slow}
    if way is Way.INSIDE:
        return bool(frozenset.intersection(*units))
    return way is Way.RAIL and len(units) == 1


def _since_it_began(
    transfers: Transfers, split: _Split, settings: DetectorSettings
) -> tuple[_Split, Course | None]:
    """Return the split of the iterations from the one on from which a port is slow, and these; of
    all, and None, where that is the first.

    Example: messages of a host take as long as others in 3 of 8 iterations, and four times as long
    in the 5 after these; on the mean of all 2.9 times.
    """
    rate = transfers.transfer_ns / np.maximum(transfers.size_bytes, 1)[:, None]
    level = np.log(np.where(rate > 0, rate, np.nan))
    slow, quick = (robust.median(level[units], axis=0) for units in (split.slow, split.quick))
    series = slow - quick
    course = since_it_began(series, Cause.LINK.value, settings)
    if course is None:
        return split, None
    return replace(split, effect=float(series[course.active].mean())), course


def _is_of_clocks(seen: Observations, transfers: Transfers, split: _Split) -> bool:
    """Return whether errors of clocks may feign that what touches the port is slower."""
    slow_ns, quick_ns = _typical_ns(transfers, split)
    if slow_ns < quick_ns * float(np.exp(split.effect / 2)):
        return True  # a few transfers that clock errors make vanish shorten the mean
    if _is_quick_by_one_clock(transfers, split):
        return True
    if seen.alignment is None:
        return False
    # one bad clock cannot fool so many connections, errors of most can
    typical = float(np.median(robust.median(transfers.transfer_ns[split.slow], axis=1)))
    lost_ns = typical * (1.0 - float(np.exp(-split.effect)))
    return lost_ns <= LINKS.clock_errors * seen.alignment.residual_median_ns


def _is_quick_by_one_clock(transfers: Transfers, split: _Split) -> bool:
    """Return whether what touches the port is slower only between clocks, or mostly.

    Where each host is a stage, one clock that is off by a millisecond moves all transfers of a host
    at once. But the member that comes last to a transfer is in it for as long as the transfer
    lasts, by its own clock. Means are compared, as those of transfers are.

    Example: a port is slow in two of four iterations: 1.3, 13.4, 1.2 and 14.3 ms.
    """
    if transfers.shortest_ns is None:
        return False
    mean_ns = robust.mean(transfers.shortest_ns, axis=1)
    by_the_byte = mean_ns / np.maximum(transfers.size_bytes, 1)
    slow, quick = (float(np.median(by_the_byte[units])) for units in (split.slow, split.quick))
    return slow < quick * max(NETWORKS.alike_ratio, float(np.exp(split.effect / 2)))


def _clearest(kinds: list[Equals], touches: Flags, *, spares_none: bool = False) -> _Split | None:
    """Return the clearest kind in which what touches the host is slow; None if in any kind it is
    as quick as the rest, or one of its connections is, where a slow port `spares_none`.

    Example: inside a host (4, 5), (4, 6) and (5, 7) take three times as long as inside another, and
    (6, 7) no longer: that is not what all its GPUs share.
    """
    found: list[_Split] = []
    for kind in kinds:
        mine, others = kind.split(touches)
        if not len(mine) or not len(others):
            continue
        split = _split(kind, mine, others)
        if split.effect < NETWORKS.unharmed_share * kind.floor:
            return None
        quickest = float((kind.level[mine] - np.median(kind.level[others])).min())
        if spares_none and quickest < NETWORKS.unharmed_share * kind.floor:
            return None
        if split.effect >= kind.floor and _is_clear(kind.level, split):
            found.append(split)
    all_slow = np.unique(np.concatenate([np.zeros(0, np.int64), *(one.slow for one in found)]))
    if len(all_slow) < NETWORKS.min_connections:
        return None
    effects = tuple(one.effect for one in found)
    return replace(min(found, key=lambda one: one.p_value), all_slow=all_slow, effects=effects)


def _split(kind: Equals, mine: Integers, others: Integers) -> _Split:
    level = kind.level
    effect = float(np.median(level[mine]) - np.median(level[others]))
    spread = max(float(np.std(level[others])), NETWORKS.spread_log)
    error = spread * float(np.sqrt(1 / len(mine) + 1 / len(others)))
    # the spread is known beforehand: a few connections do not tell less of it than one does
    degrees = max(LINKS.tail_degrees, len(mine) + len(others) - 2.0)
    p_value = float(special.stdtr(degrees, -effect / error))
    return _Split(
        kind=kind.name, effect=effect, error=error, p_value=p_value,
        slow=mine, quick=others, all_slow=mine, effects=(effect,),
    )  # fmt: skip


def _is_clear(level: Floats, split: _Split) -> bool:
    # take quantiles from the connections: with few, no value lies between a slow and a fine one
    low = np.quantile(level[split.slow], NETWORKS.outer_share, method="lower")
    high = np.quantile(level[split.quick], 1 - NETWORKS.outer_share, method="higher")
    apart = bool(low - high >= 0.5 * split.effect)
    return apart and split.effect >= NETWORKS.sure_sigmas * split.error


def _excess_ns(transfers: Transfers, split: _Split, ranks: tuple[int, ...], active: Flags) -> float:
    total_ns = transfers.sum_ns[:, active].mean(axis=1)
    share = 1.0 - float(np.exp(-split.effect))
    by_rank = dict.fromkeys(ranks, 0.0)
    for unit in split.all_slow.tolist():
        for rank in set(transfers.members[unit]) & set(ranks):
            by_rank[rank] += float(total_ns[unit]) * share
    return max(by_rank.values(), default=0.0)


def _finding(seen: Observations, transfers: Transfers, slow: SlowNetwork) -> Finding:
    is_one = len(slow.names) == 1
    is_rail = slow.way is Way.RAIL
    is_link = is_one and is_rail and slow.num_shared == 2  # of GPUs that share NICs
    split, slowdown = slow.split, float(np.exp(slow.split.effect))
    rows = seen.members.rows_with(slow.ranks)
    active = active_in(slow.course, len(seen.iterations))
    slow_ns, quick_ns = _typical_ns(transfers, split, active)
    lost_ns, least = slow_ns - quick_ns, STARVATION.fed_share
    is_late = slow.way is Way.INSIDE and launches_explain(seen, rows, lost_ns, least)
    known = {
        slow.way.doubt: not is_one,
        ONE_RING: is_rail and slow.num_shared > 2,
        ONE_HOST_IN_ALL: is_rail and slow.num_shared == 1,
        IN_DOUBT_LAUNCH: is_late,
        OF_TWO_HOSTS: is_one and slow.way is Way.INSIDE and _is_beside_one(seen, transfers, split),
    }
    doubts = [doubt for doubt, holds in known.items() if holds]
    finding = build_finding(
        seen,
        Claim(
            ranks=slow.ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.UNDECIDED if doubts else Owner.NODE,
            slowdown=slowdown,
            interval=interval_of_ratio(split.effect, split.error),
            course=slow.course,
            q_value=slow.q_value,
            num_peers=len(split.quick),
            saved_ns=np.where(active, slow.excess_ns, 0.0),
            subject=f"{_who(slow)} (ranks {listed(slow.ranks)})",
            predicate=f"transfers {times(slowdown)} slower than {slow.way.others}",
            evidence=(
                _evidence(split, slow.way.others, slow_ns, quick_ns),
                *doubts,
                *((BETWEEN_TWO_HOSTS,) if is_link else ()),
            ),
            advice=connection_advice(seen, slow.ranks),
            is_pair=is_link,
            is_border=is_one and slow.way is Way.NETWORK,
            is_inside=is_one and slow.way is Way.INSIDE,
        ),
    )
    if slow.is_alike:
        return finding
    is_few = len(seen.iterations) < ORDINARY.few_iterations and not slow.is_told_twice
    return undecided_if_little(finding, is_few=is_few)


def _is_beside_one(seen: Observations, transfers: Transfers, split: _Split) -> bool:
    """Return whether what is quick inside hosts is of one host only, which shows how that one is
    built, and not whether the slow one should be as quick: not where both carry more than PCIe can,
    since then both have NVLinks.

    Example: all-reduces of 50 MB take 2.66 ms between GPUs of a host without NVLink, and 0.2 ms on
    the job's other host; 136 GB/s beside 266 are NVLinks that lost half of their rate.
    """
    quick = {seen.members.device_of(transfers.members[unit][0])[0] for unit in split.quick.tolist()}
    if len(quick) >= NETWORKS.least_quick_hosts:
        return False
    kinds, slow = transfers.kind[split.slow], split.slow.tolist()
    factors = bus_factors(transfers.kinds, kinds, [transfers.members[unit] for unit in slow])
    typical_ns = robust.median(transfers.transfer_ns[slow], axis=1)
    rates = factors * transfers.size_bytes[slow] / typical_ns
    return float(np.median(rates)) <= NVLINKS.most_of_pcie


def _who(slow: SlowNetwork) -> str:
    """Name what is slow: "host n02's network", "the rail of GPU 3 of every host", "communication
    inside host n02".
    """
    is_one = len(slow.names) == 1
    if slow.way is Way.INSIDE:
        return f"communication inside {'host' if is_one else 'hosts'} {listed(slow.names)}"
    if slow.way is Way.RAIL:
        what = "the rail of GPU" if is_one else "the rails of GPU"
        are_several = not listed(slow.names).isdecimal()
        return f"{what}{'s' * are_several} {listed(slow.names)} of every host"
    return f"host {slow.names[0]}'s network" if is_one else f"the network of {listed(slow.names)}"


def _evidence(split: _Split, others: str, slow_ns: float, quick_ns: float) -> str:
    return (
        f"one {split.kind} takes {milliseconds(slow_ns)} on "
        f"{counted(len(split.slow), 'connection')} of it against {milliseconds(quick_ns)} on "
        f"{counted(len(split.quick), 'connection')} {others}, counted from the last member's "
        "arrival"
    )


def search_networks(inquiry: Inquiry) -> Answer:
    """Search hosts and rails whose network is slow, and hosts whose GPUs are among themselves."""
    seen = inquiry.seen
    crossings = None if seen.transfers is None else crossings_of(seen, seen.transfers)
    slow = None if crossings is None else _slow_network(inquiry, crossings)
    if crossings is None or slow is None:
        hidden = _hidden_hosts(seen, crossings)
        unseen = _unseen_network(seen, crossings, hidden)
        return Answer(
            notes=_notes(seen, crossings, hidden),
            hides=unseen.hides,
            caveat=unseen.caveat,
        )
    transfers, ranks = crossings.transfers, set(slow.ranks)
    units = [set(transfers.members[unit]) for unit in slow.split.all_slow.tolist()]
    beside = _slow_beside(inquiry, crossings, slow)
    own = _finding(seen, transfers, slow)

    def explains(finding: Finding) -> bool:
        named = set(finding.ranks)
        is_alone = finding.owner is Owner.NODE and len(named) == 1
        if own.owner is not Owner.NODE and is_alone and _is_in_most(named, units):
            return False
        is_part = named <= ranks or (named & ranks and any(named <= unit for unit in units))
        is_end = any(named & unit for unit in units) and not named & beside
        return finding.cause == Cause.LINK and bool(is_part or is_end)

    return Answer(findings=(own,), explains=explains)


def _is_in_most(named: set[int], units: list[set[int]]) -> bool:
    """Return whether a rank is in half of the slow `units` at least: then it may be what makes them
    slow, beside hosts that nobody can tell apart.

    Example: messages between hosts of eight ranks are all slow; rank 28 is in one of the eight.
    """
    num_with = sum(named <= unit for unit in units)
    return num_with >= NETWORKS.culprit_share * len(units)


def _slow_beside(inquiry: Inquiry, crossings: Crossings, slow: SlowNetwork) -> set[int]:
    """Return the ranks with slow connections that do not touch what is slow: another fault.

    All that is slow of the others ends there. Example: of rank 61's messages and rings those with
    host 5, whose network is slow, take twice as long as equal ones; its ring with host 6 does not.
    """
    if slow.way is Way.INSIDE:
        return set(crossings.device_of)
    floor = float(np.log(inquiry.least_of_links))
    touches = crossings.touches_ranks(slow.ranks)
    found: set[int] = set()
    for kind in kinds_of(crossings, crossings.crosses, floor):
        _, others = kind.split(touches)
        over = kind.level[others] - np.median(kind.level[others]) if len(others) else np.zeros(0)
        for unit in others[over >= max(kind.floor, LINKS.fine_share * slow.split.effect)].tolist():
            found.update(crossings.transfers.members[unit])
    return found


def _hidden_hosts(seen: Observations, crossings: Crossings | None) -> list[str]:
    """Return the hosts whose slow network could not have been seen: no kind of transfers between
    hosts that is large enough to tell has units both with and without the host.
    """
    hosts = sorted({name for name in seen.members.hosts if name})
    if len(hosts) < 2:
        return []
    if crossings is None:
        return hosts
    kinds = kinds_of(crossings, crossings.crosses, floor=0.0)
    return [
        name
        for name in hosts
        if not any(min(map(len, one.split(crossings.touches(name)))) for one in kinds)
    ]


def _notes(seen: Observations, crossings: Crossings | None, hidden: list[str]) -> tuple[str, ...]:
    """Say whose slow network could not have been seen."""
    if not hidden:
        return ()
    test = "an all_reduce_perf (nccl-tests) between pairs of hosts shows it"
    if crossings is not None:
        test += _paces(seen, crossings, hidden)
    if len(hidden) == len({name for name in seen.members.hosts if name}):
        return (
            "all communication between hosts runs through every one of them, or was not recorded: "
            f"a slow network of one host slows all alike and cannot be seen here; {test}",
        )
    return (
        f"a slow network of {listed(hidden)} cannot be seen here: whatever crosses between hosts "
        f"and is large enough to tell runs through {'them' if len(hidden) > 1 else 'it'}, or has "
        f"no equal; {test}",
    )


def _paces(seen: Observations, crossings: Crossings, hidden: list[str]) -> str:
    """Say how long transfers of `hidden` hosts take, to compare a test with: their share of the
    iteration, and the time of the largest operation; "" where bytes are not known.

    Example: ": such transfers take 9 % of the iteration here, one all_reduce of 2.13 GB 171 ms
    (12.5 GB/s)".
    """
    transfers = crossings.transfers
    which = crossings.crosses & crossings.touches(*hidden) & np.isfinite(crossings.level)
    size = np.where(which, transfers.size_bytes, -1)
    if size.max(initial=-1) < NETWORKS.min_bytes:
        return ""
    unit = int(np.argmax(size))
    share = longest_of_a_rank(transfers, which) / float(np.median(seen.iteration_ns))
    time_ns = float(np.exp(crossings.level[unit]))
    return (
        f": such transfers take {share:.0%} of the iteration here, one "
        f"{transfers.kinds[int(transfers.kind[unit])]} {milliseconds(time_ns)} "
        f"({float(size[unit]) / time_ns:.3g} GB/s)"
    )


@dataclass(frozen=True)
class _Unseen:
    """What the step may owe to what could not have been seen, as part of a sentence: so much that
    finding nothing is no health, or so much that it must be said beside it.
    """

    hides: str = ""
    caveat: str = ""


def _unseen_network(seen: Observations, crossings: Crossings | None, hidden: list[str]) -> _Unseen:
    """Say what it would cost if the network of a `hidden` host ran at half its speed; nothing on
    CPUs, and where it would cost little.

    Example: transfers between hosts last 41 % of an iteration, and by replay the step takes 1.26
    times what it would with twice as quick ones: a caveat, as from 1.05 on. From 1.3 times on the
    job is not called healthy.
    """
    members = seen.members
    if not hidden or crossings is None or members.device_kind == "cpu":
        return _Unseen()
    transfers, touched = crossings.transfers, crossings.touches(*hidden)
    blind_ns = longest_of_a_rank(transfers, transfers.is_large & crossings.crosses & touched)
    share = blind_ns / float(np.median(seen.iteration_ns))
    cost = ratio_of_half_speed(share)
    if cost < NETWORKS.caveat_ratio:  # a replay makes it smaller, and takes time
        return _Unseen()
    ranks = members.ranks_of([row for row, one in enumerate(members.hosts) if one == hidden[0]])
    replayed = replayed_half_speed(seen, ranks)
    # passes beside which transfers last for most of the iteration wait for them, and are replayed
    # as long as they were
    is_hidden = share >= NETWORKS.most_share and (replayed or 1.0) < NETWORKS.caveat_ratio
    cost = cost if replayed is None or is_hidden else min(cost, replayed)
    if cost >= POWER.healthy_ratio:
        return _Unseen(
            hides=f"transfers between hosts last {share:.0%} of the iteration and have no equals: "
            "a network at half its speed would look the same"
        )
    if cost >= NETWORKS.caveat_ratio:
        return _Unseen(
            caveat="a host whose network runs at half its speed would look the same, and the step "
            f"take {times(cost)} what it must"
        )
    return _Unseen()


def _typical_ns(
    transfers: Transfers, split: _Split, active: Flags | slice = slice(None)
) -> tuple[float, float]:
    """Return the time of a slow and of a quick transfer in the `active` iterations, of
    `SHOWN_BYTES` if sizes are unlike.
    """
    typical = robust.median(transfers.transfer_ns[:, active], axis=1)
    size = transfers.size_bytes
    if len(np.unique(size[np.concatenate([split.slow, split.quick])])) > 1:  # by the byte
        typical = typical / size * SHOWN_BYTES
    return float(np.median(typical[split.slow])), float(np.median(typical[split.quick]))
