"""Connections that the hardware itself says are degraded, and what is open that they explain.

Problem: a slow connection has two ends, and a ring through all hosts is as slow for everybody:
whose port is to blame, times do not tell. A cable that sits loosely makes a port run on one lane of
four; an adapter or a GPU that was not seated well has half of its PCIe lanes; a transceiver that
wears out damages packets, which are sent again.

Idea: ports and links say so themselves (`megascan.tracer.nics`, `megascan.tracer.nvml`). Machines
of one kind have equal ones, and no data, layer or waiting changes them. One of them is degraded
where it reads worse than nearly all of its equals, which read alike:

    port        rate of the port of this name on the other hosts, or not active; damaged packets or
                lost links where the others have none. It must be one that the job uses, by what it
                sends on sound hosts, and the host's ports together must be slower, too: names may
                be dealt out otherwise. Connections that leave the host.
    NVLinks     fewer are up than on other GPUs of the model. Connections inside the host.
    PCIe        fewer lanes, or a lower generation, than it has at most, while other GPUs of the
                model have what they can. What leaves the host, or its GPUs where no NVLink is; and
                what a rank loses to its host or loader.

An open finding about such connections is the node's, unless they are slower by far more than the
reading explains: a port at half its rate makes nothing eight times slower. Of a pair of ranks that
is named because either may be at fault, the end that is degraded is.

**Rings.** A ring runs at the pace of its slowest port, and transfers would be shorter by what that
port's rate is short of the others'. The host is named without an open finding where

* no transfer between hosts goes without it, so that nothing tells which host is slow;
* in its rings the port carries what it can, no less than 0.7 of its rate (something else would
  limit them) and no more: what the rings carry, by the port's share in what the host sends;
* the step would be shorter by 3 %, by replay, or at least as long as the busiest rank computes.

Example: rings through four hosts take 20 % of the step, and carry 36 GB/s. Port mlx5_0/1 of host
n02, which sends half of what that host does, runs at 200 Gbit/s (25 GB/s), that of the others at
400: named, without it the job would be 12 % faster.

What is neither is a note of the report. Limits: readings are medians over windows; a port that is
degraded for a part of the time is seen where that is most of it. A fleet of two kinds of hosts, and
a job of two hosts, say nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from detect.causes.crossings import Crossings, crossings_of
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
    counted_window,
    decided,
    gain,
    rows_of_findings,
    slowed_by,
)
from detect.observe.machines import PORT_PREFIX, RATE_NAME, REASONS_NAME, is_at_rest
from detect.observe.observations import Observations
from detect.observe.transfers import bus_factor, bus_factors, longest_of_a_rank
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import counted, ranks_text
from detect.thresholds.devices import PAIRS
from detect.thresholds.networks import DEGRADED
from detect.whatif.savings import slowdown_of
from megascan.arrays import Flags, Floats
from megascan.errors import listed

T = TypeVar("T")

SENT, ERRORS, LOST = "sent_gbytes", "errors", "lost_links"
LANES, LANES_MOST = "pcie_lanes", "pcie_lanes_max"
GENERATION, GENERATION_MOST = "pcie_generation", "pcie_generation_max"
NVLINKS_UP = "nvlinks_up"
BITS_A_BYTE = 8
SHOWN_PORTS = 4
NS_A_SECOND, SECONDS_AN_HOUR = 1e9, 3600
LATEST_GENERATION = 16
"""Of PCIe, with much to spare: what reads higher is damaged."""
OF_A_RANK = (Cause.HOST, Cause.LOADER, Cause.UNKNOWN)
"""What slow copies between a device and its host may be taken for."""
PORT_ADVICE = (
    "look at the port on that host (ibstat, ethtool DEVICE, mlxlink -d DEVICE -c -e): rate, width, "
    "errors; clean and reseat its cable or transceiver, then replace it",
    "look at the other end as well: the port of the switch, and its cable's log",
)
PCIE_ADVICE = (
    "nvidia-smi -q -d PCIE and lspci -vv (LnkCap, LnkSta) on that host, with the GPU at work: "
    "reset it, reseat the board or its riser, then replace it",
)
NVLINK_ADVICE = (
    "nvidia-smi nvlink --status and nvidia-smi nvlink -e on that host; dmesg for NVLink's Xid "
    "(74): reset the GPU, then replace it",
)
READ = "read from the hardware while the job ran: neither data nor layers nor waiting change it"
HIDDEN_IN_RINGS = (
    "all that crosses between hosts runs through every one of them, and carries {flow:.3g} GB/s "
    "there: a ring runs at the pace of its slowest port"
)
ALSO = "{names}, too, has a slow port: only sound ports on all of them make the step shorter"
NO_COST = "nothing in this trace shows that it costs time"
HIDES_COST = (
    "it costs nothing that this trace shows; a ring through all hosts would hide whose port is slow"
)


@dataclass(frozen=True, kw_only=True)
class _Degraded:
    """A host's ports, or a GPU's link, that read worse than their equals."""

    host: str
    ranks: tuple[int, ...]
    words: str
    """What reads how, and how its equals read."""
    advice: tuple[str, ...]
    ratio: float = np.inf
    """By how much it makes connections slower at most; infinite where nobody can say."""
    is_port: bool = False
    is_pcie: bool = False
    lasts: bool = True
    """Whether it is so all the time, not now and then."""
    slow: _SlowPort | None = None


@dataclass(frozen=True, kw_only=True)
class _SlowPort:
    """The port that decides how quick a host's connections are: the slowest that the job uses, or,
    where one is not active, one of those that are left.
    """

    ratio: float
    """By how much it makes connections slower at most; infinite where nobody can say."""
    rate_share: float
    """What is left of its rate, or of all ports' rate where one is not active."""
    gbps: float
    sent_share: float
    """What it sends of all that its host does."""


def search_degraded(inquiry: Inquiry) -> Answer:
    """Let what ports and links say decide what is open, name hosts whose port holds up the rings of
    all, and note the rest.
    """
    seen, members = inquiry.seen, inquiry.seen.members
    found = [*_ports(seen), *_nvlinks(seen), *_pcie(seen)]
    if not found:
        return Answer()
    told, settled = _decide(inquiry, found)
    told += _behind_rings(inquiry, found, told)
    named = rows_of_findings(members, told) | inquiry.blamed
    notes = [
        _note(seen, one, named)
        for one in found
        if not any(one.words in finding.statement for finding in told)
    ]
    return Answer(
        findings=tuple(told),
        slow=rows_of_findings(members, told),
        notes=tuple(notes),
        explains=lambda one: one in settled,
    )


def _note(seen: Observations, one: _Degraded, named: Flags) -> str:
    """Return a sentence about what is degraded, whose finding, if any, says what that costs."""
    if named[list(seen.members.rows_with(one.ranks))].any():
        return one.words
    return f"{one.words}: {HIDES_COST if one.is_port else NO_COST}"


def _decide(inquiry: Inquiry, found: Sequence[_Degraded]) -> tuple[list[Finding], list[Finding]]:
    """Return a finding for each host, or device, that explains open ones, and what it explains."""
    seen = inquiry.seen
    explained: dict[tuple[_Degraded, ...], list[Finding]] = defaultdict(list)
    for one in inquiry.found:
        why = tuple(each for each in found if _explains(seen, each, one))
        if why:
            explained[why].append(one)
    settled = [one for alike in explained.values() for one in alike]
    blaming = [one for one in inquiry.found if one.owner is Owner.NODE and one not in settled]
    blamed = rows_of_findings(seen.members, blaming)
    told = []
    for why, alike in explained.items():
        whose = {rank for one in why for rank in one.ranks}
        ranks = tuple(sorted({rank for one in alike for rank in one.ranks if rank in whose}))
        if not blamed[list(seen.members.rows_with(ranks))].any():
            told.append(_decided(seen, alike, why, ranks))
    return told, settled


def _explains(seen: Observations, why: _Degraded, of: Finding) -> bool:
    """Return whether something degraded may be what an open finding is about, or that on a pair of
    ranks of which either may be at fault: by what it carries, by when, and by how much.
    """
    is_open = of.owner is Owner.UNDECIDED or (of.owner is Owner.NODE and of.is_pair)
    if not is_open or {*of.ranks}.isdisjoint(why.ranks):
        return False
    if why.lasts and _share_of_window(seen, of) < DEGRADED.least_lasting_share:
        return False
    if of.cause in OF_A_RANK:
        return why.is_pcie and of.ranks == why.ranks
    if of.cause is not Cause.LINK:
        return False
    is_inside = _stays_inside(seen, of)
    if why.is_pcie:
        carries = not (is_inside and _has_nvlinks(seen, why.ranks[0]))
    else:
        carries = is_inside is not why.is_port or len(of.ranks) == 1
    return carries and PAIRS.agrees_share * np.log(of.slowdown) <= np.log(why.ratio)


def _share_of_window(seen: Observations, of: Finding) -> float:
    """Return in what share of the window's iterations a finding holds."""
    return float(np.mean(seen.within(of.stretches)))


def _stays_inside(seen: Observations, of: Finding) -> bool:
    """Return whether a finding on connections is about what does not leave a host. All ranks of one
    host of several are its network, unless they are a group.
    """
    members = seen.members
    if not members.are_inside_a_host(of.ranks):
        return False
    (host,) = members.hosts_of(of.ranks)
    of_host = tuple(rank for rank in members.recorded if members.device_of(rank)[0] == host)
    groups = seen.transfers.members if seen.transfers is not None else ()
    is_host = of.ranks == of_host != members.recorded
    return of.is_inside or not is_host or of.ranks in {tuple(sorted(one)) for one in groups}


def _has_nvlinks(seen: Observations, rank: int) -> bool:
    return seen.counters.get(rank, {}).get(NVLINKS_UP, 0.0) > 0


def _decided(
    seen: Observations,
    alike: Sequence[Finding],
    why: tuple[_Degraded, ...],
    ranks: tuple[int, ...],
) -> Finding:
    """Return the costliest of some findings as that of what is degraded, at the cost of all."""
    of = max(alike, key=lambda one: one.step_time_cost_ratio)
    together = _joint_cost(seen, alike) if len(alike) > 1 else None
    cost = max(of.step_time_cost_ratio, together or 1.0)
    is_replayed = of.cost_is_replayed or cost == together
    first, last = of.first_iteration, of.last_iteration
    gained = gain(slowed_by(seen, first, last), cost, is_replayed=is_replayed)
    finding = decided(
        seen,
        of,
        ranks,
        cause=Cause.LINK,
        statement=f"connections of {ranks_text(ranks)} are slow, and "
        f"{'; '.join(one.words for one in why)} ({first} to {last}); {gained}",
        evidence=(READ,),
        advice=tuple(dict.fromkeys(line for one in why for line in one.advice)),
    )
    return replace(
        finding,
        step_time_cost_ratio=cost,
        cost_is_replayed=is_replayed,
        is_pair=False,
        is_inside=False,
    )


def _joint_cost(seen: Observations, alike: Sequence[Finding]) -> float | None:
    """Return what slow connections cost together, as messages of replicas hide behind each other;
    None where no replay tells.
    """
    if seen.costs is None:
        return None
    ranks = tuple(sorted({rank for one in alike for rank in one.ranks}))
    first = min(one.first_iteration for one in alike)
    last = max(one.last_iteration for one in alike)
    within = counted_window(seen, first, last)
    return seen.costs.ratio(ranks, (Cause.LINK,), within, slowdown=slowdown_of(alike))


def _behind_rings(
    inquiry: Inquiry, found: Sequence[_Degraded], told: Sequence[Finding]
) -> list[Finding]:
    """Return findings on hosts whose port holds up rings through all hosts; none where a network is
    named already, which may be why rings are slow.
    """
    seen = inquiry.seen
    named = [one for one in (*inquiry.found, *told) if one.cause is Cause.LINK]
    is_named = any(one.owner is Owner.NODE for one in named)
    slow = [
        (one, one.slow)
        for one in found
        if one.slow is not None and one.slow.rate_share <= DEGRADED.most_rate_share
    ]
    if is_named or seen.transfers is None or seen.members.device_kind == "cpu":
        return []
    crossings = crossings_of(seen, seen.transfers)
    findings = []
    for one, port in slow:
        held_up, flow = _held_up(crossings, one.host, port)
        if held_up.any():
            also = [each.host for each, _ in slow if each is not one]
            evidence = (
                READ,
                HIDDEN_IN_RINGS.format(flow=flow),
                *((ALSO.format(names=listed(f"host {name}" for name in also)),) if also else ()),
            )
            findings.append(_finding(seen, one, port, _lost_ns(seen, held_up), evidence))
    return [one for one in findings if one.step_time_cost_ratio >= DEGRADED.least_cost_ratio]


def _held_up(crossings: Crossings, host: str, port: _SlowPort) -> tuple[Flags, float]:
    """Return the transfers that a port holds up, (unit,), and how many bytes per ns leave its host
    in them: of collectives that never go without the host, and carry what the port lets through.
    """
    transfers, touches = crossings.transfers, crossings.touches(host)
    held_up, most = np.zeros(len(touches), dtype=bool), 0.0
    usable = crossings.crosses & (transfers.size_bytes > 0) & transfers.is_large
    time_ns = robust.median(transfers.transfer_ns, axis=1)
    factors = bus_factors(transfers.kinds, transfers.kind, transfers.members)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = factors * transfers.size_bytes / time_ns
    full = port.gbps / BITS_A_BYTE
    for kind in np.unique(transfers.kind[usable]).tolist():
        if bus_factor(transfers.kinds[kind].split()[1], 2) is None:
            continue  # of messages some leave the host, and some come to it
        units = usable & (transfers.kind == kind)
        flow = float(rate[units].sum())  # rings of a kind run side by side
        carried = flow * port.sent_share
        is_full = DEGRADED.least_flow_share <= carried / full <= DEGRADED.most_flow_share
        if touches[units].all() and is_full:
            held_up |= units
            most = max(most, flow)
    return held_up, most


def _lost_ns(seen: Observations, held_up: Flags) -> Floats:
    """Return what a rank spends in the transfers that are `held_up`, (unit,), in each iteration,
    (iteration,): no more than it would last without its busiest rank's computing.
    """
    assert seen.transfers is not None
    computing_ns = np.nan_to_num(seen.busy_ns).max(axis=0)
    beyond_ns = np.maximum(seen.iteration_ns - computing_ns, 0.0)
    return np.asarray(np.minimum(longest_of_a_rank(seen.transfers, held_up), beyond_ns))


def _finding(
    seen: Observations,
    one: _Degraded,
    port: _SlowPort,
    spent_ns: Floats,
    evidence: tuple[str, ...],
) -> Finding:
    slowdown = 1.0 / port.rate_share
    return build_finding(
        seen,
        Claim(
            ranks=one.ranks,
            rows=seen.members.rows_with(one.ranks),
            cause=Cause.LINK,
            owner=Owner.NODE,
            slowdown=slowdown,
            interval=(1.0, slowdown),
            course=None,
            q_value=0.0,
            num_peers=0,
            saved_ns=spent_ns * (1.0 - port.rate_share),
            subject="all hosts wait for one in what they exchange:",
            predicate=one.words,
            evidence=evidence,
            advice=one.advice,
            is_bound=True,
            is_border=True,
        ),
    )


Ports = Mapping[str, Mapping[str, float]]
"""Readings of a host, by port and reading."""


def _ports(seen: Observations) -> Iterator[_Degraded]:
    """Yield the hosts with degraded ports, with what is wrong with them."""
    hosts, ranks = _ports_by_host(seen)
    if not _are_most(len(hosts), len(ranks)):
        return
    names = sorted({name for ports in hosts.values() for name in ports})
    used = [name for name in names if _is_used(hosts, name)]
    yield from _slow_ports(hosts, used, ranks)
    for reading in (ERRORS, LOST):
        yield from _failing_ports(seen, hosts, used, reading, ranks)


def _ports_by_host(seen: Observations) -> tuple[dict[str, Ports], dict[str, tuple[int, ...]]]:
    """Return the readings of each host most of whose ranks took some, the median of its ranks', and
    the ranks of all hosts; nothing where a host is not known.
    """
    members, ranks = seen.members, defaultdict[str, list[int]](list)
    for rank in members.recorded:
        ranks[members.device_of(rank)[0]].append(rank)
    if "" in ranks:
        return {}, {}
    hosts: dict[str, Ports] = {}
    for host, own in ranks.items():
        values = defaultdict[str, list[float]](list)
        for rank in own:
            for name, value in seen.counters.get(rank, {}).items():
                if name.startswith(PORT_PREFIX) and np.isfinite(value) and value >= 0:
                    values[name.removeprefix(PORT_PREFIX)].append(value)
        ports: dict[str, dict[str, float]] = defaultdict(dict)
        for name, read in values.items():
            if _are_most(len(read), len(own)):
                port, _, reading = name.rpartition(".")
                ports[port][reading] = median(read)
        if ports:
            hosts[host] = ports
    return hosts, {host: tuple(own) for host, own in ranks.items()}


def _are_most(known: int, of_all: int) -> bool:
    return known > 0 and known >= DEGRADED.least_known_share * of_all


def _is_used(hosts: Mapping[str, Ports], name: str) -> bool:
    """Return whether the job uses the port of a name: on the typical host it sends a good part of
    what the busiest port does, or, where that is not counted, is one of the quickest.
    """
    shares = []
    for ports in hosts.values():
        port = ports.get(name, {})
        if port.get(RATE_NAME, 0.0) <= 0:
            continue
        reading = SENT if all(SENT in one for one in ports.values()) else RATE_NAME
        most = max(one.get(reading, 0.0) for one in ports.values())
        shares.append(port.get(reading, 0.0) / most if most > 0 else 0.0)
    return bool(shares) and float(np.median(shares)) >= DEGRADED.carrying_share


def _worse(values: Mapping[T, float]) -> tuple[float, list[T]]:
    """Return what nearly all of some equals read, and those that read less, one or a few; none
    where one reads more, as in a fleet of two kinds.
    """
    usual, number = Counter(values.values()).most_common(1)[0] if values else (0.0, 0)
    low = [name for name, value in values.items() if value < usual]
    is_told = number >= DEGRADED.least_sound and number + len(low) == len(values)
    return usual, low if is_told and _are_few(len(low), len(values)) else []


def _are_few(number: int, of_all: int) -> bool:
    return number <= max(1.0, DEGRADED.most_share * of_all)


def _slow_ports(
    hosts: Mapping[str, Ports], used: Sequence[str], ranks: Mapping[str, tuple[int, ...]]
) -> Iterator[_Degraded]:
    """Yield the hosts with ports whose rate is below that of the same port of the others; none
    whose ports together are as quick as another host's.
    """
    slow: dict[str, dict[tuple[float, float], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in used:
        rates = {one: ports[name][RATE_NAME] for one, ports in hosts.items()
                 if RATE_NAME in ports.get(name, {})}  # fmt: skip
        usual, low = _worse(rates)
        is_far = all(rates[one] <= DEGRADED.most_rate_share * usual for one in low)
        if is_far and _are_most(len(rates), len(hosts)):
            for host in low:
                slow[host][rates[host], usual].append(name)
    total = {one: sum(ports.get(name, {}).get(RATE_NAME, 0.0) for name in used)
             for one, ports in hosts.items()}  # fmt: skip
    least = min((total[one] for one in hosts if one not in slow), default=0.0)
    num_others = len(hosts) - len(slow)
    for host, found in slow.items():
        if total[host] < least:
            slowest = _slowest(hosts[host], found, used, total[host] / least)
            words = " and ".join(_rate_words(*rates, names) for rates, names in found.items())
            yield _Degraded(
                host=host,
                ranks=ranks[host],
                words=f"on host {host} {words} of {counted(num_others, 'other host')}",
                advice=PORT_ADVICE,
                ratio=slowest.ratio,
                is_port=True,
                slow=slowest,
            )


def _slowest(
    ports: Ports,
    found: Mapping[tuple[float, float], Sequence[str]],
    used: Sequence[str],
    share: float,
) -> _SlowPort:
    """Return the slowest of a host's ports that were `found`, by their own and the usual rate,
    which leave it that `share` of all ports' rate.
    """
    (own, usual), names = min(found.items(), key=lambda one: one[0][0] / one[0][1])
    active = [name for name in used if ports.get(name, {}).get(RATE_NAME, 0.0) > 0]
    sent = {name: ports[name].get(SENT, 0.0) for name in active}
    deciding = names if own > 0 else active
    total = sum(sent.values())
    shares = [sent[name] / total for name in deciding] if total > 0 else []
    without = DEGRADED.slower_ratio if active else np.inf
    return _SlowPort(
        ratio=usual / own if own > 0 else without,
        rate_share=own / usual if own > 0 else share,
        gbps=own or usual,
        sent_share=max(shares, default=1.0 / max(len(active), 1)),
    )


def _rate_words(own: float, usual: float, names: Sequence[str]) -> str:
    are_several = len(names) > 1
    ports = f"port{'s' * are_several} {listed(names, SHOWN_PORTS)}"
    if own > 0:
        return f"{ports} run{'s' * (not are_several)} at {own:g} Gbit/s, not {usual:g} as on each"
    return f"{ports} {'are' if are_several else 'is'} not active, but at {usual:g} Gbit/s on each"


def _failing_ports(
    seen: Observations,
    hosts: Mapping[str, Ports],
    used: Sequence[str],
    reading: str,
    ranks: Mapping[str, tuple[int, ...]],
) -> Iterator[_Degraded]:
    """Yield the hosts whose ports damage packets, or lose their links, where those of no other host
    do.
    """
    number = int(seen.iterations[-1] - seen.iterations[0]) + 1
    hours = number * float(np.median(seen.iteration_ns)) / NS_A_SECOND / SECONDS_AN_HOUR
    least = max(1.0, DEGRADED.lost_an_hour * hours)
    what = "lost links"
    if reading == ERRORS:
        least = max(DEGRADED.least_errors, DEGRADED.errors_an_hour * hours)
        what = "damaged packets"
    worst = {
        host: max((ports[name][reading], name) for name in used if reading in ports.get(name, {}))
        for host, ports in hosts.items()
        if any(reading in ports.get(name, {}) for name in used)
    }
    bad = [host for host, (value, _) in worst.items() if value >= least]
    others = [value for host, (value, _) in worst.items() if host not in bad]
    is_told = len(others) >= DEGRADED.least_sound and _are_most(len(worst), len(hosts))
    if not is_told or not _are_few(len(bad), len(worst)):
        return
    for host in bad:
        value, name = worst[host]
        if max(others) <= DEGRADED.others_share * value:
            yield _Degraded(
                host=host,
                ranks=ranks[host],
                words=f"port {name} of host {host} counted {value:,.0f} {what} meanwhile, the "
                f"ports of {counted(len(others), 'other host')} {max(others):,.0f} at most",
                advice=PORT_ADVICE,
                is_port=True,
                lasts=False,
            )


def _of_model(seen: Observations, *names: str) -> Iterator[dict[int, list[float]]]:
    """Yield some readings of the devices of each model, by rank, where most have them all."""
    members = seen.members
    models = defaultdict[str, list[int]](list)
    for row, model in enumerate(members.devices):
        models[model] += members.workers[row]
    for ranks in models.values():
        own = {
            rank: [seen.counters.get(rank, {}).get(one, -1.0) for one in names] for rank in ranks
        }
        known = {
            rank: values
            for rank, values in own.items()
            if np.isfinite(values).all() and min(values) >= 0
        }
        if _are_most(len(known), len(ranks)):
            yield known


def _nvlinks(seen: Observations) -> Iterator[_Degraded]:
    """Yield the GPUs with fewer NVLinks up than the others of their model."""
    for known in _of_model(seen, NVLINKS_UP):
        own = {rank: values[0] for rank, values in known.items()}
        usual, low = _worse(own)
        for rank in low:
            others = counted(len(own) - len(low), "other GPU")
            yield _Degraded(
                host=seen.members.device_of(rank)[0],
                ranks=(rank,),
                words=f"{_gpu(seen, rank)} has {own[rank]:.0f} NVLinks up, each of {others} of its "
                f"model {usual:.0f}",
                advice=NVLINK_ADVICE,
            )


def _pcie(seen: Observations) -> Iterator[_Degraded]:
    """Yield the GPUs whose PCIe link has fewer lanes, or is of a lower generation, than it can have
    and than those of the other GPUs of the model are. Links of a GPU at rest may slow down.
    """
    for known in _of_model(seen, LANES, LANES_MOST, GENERATION, GENERATION_MOST, REASONS_NAME):
        at_work = {rank: one for rank, one in known.items() if not is_at_rest(int(one[4]))}
        if len({(one[1], one[3]) for one in at_work.values()}) != 1:
            continue  # slots of two kinds
        paces = {rank: _pace_of_pcie(one[0], one[2]) for rank, one in at_work.items()}
        usual, low = _worse(paces)
        lanes, _, generation = next(iter(at_work.values()))[1:4]
        if usual != _pace_of_pcie(lanes, generation):
            continue  # all of them have less than they can
        for rank in low:
            own = at_work[rank]
            others = counted(len(paces) - len(low), "other GPU")
            yield _Degraded(
                host=seen.members.device_of(rank)[0],
                ranks=(rank,),
                words=f"{_gpu(seen, rank)} is linked to its host by {own[0]:.0f} of {lanes:.0f} "
                f"PCIe lanes of generation {own[2]:.0f} of {generation:.0f}, each of {others} of "
                "its model by all it can have",
                advice=PCIE_ADVICE,
                ratio=usual / paces[rank] if paces[rank] > 0 else np.inf,
                is_pcie=True,
            )


def _pace_of_pcie(lanes: float, generation: float) -> float:
    """Return what a link carries, in lanes of generation 0: each generation doubles it."""
    return lanes * float(np.exp2(min(generation, LATEST_GENERATION)))


def _gpu(seen: Observations, rank: int) -> str:
    host, number = seen.members.device_of(rank)
    return f"GPU {number} of host {host} (rank {rank})"
