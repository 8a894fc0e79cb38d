"""Find groups that do not use their host's NVLinks, and slow pairs of a profile that names no
groups; say what a slow NVLink could hide in.

Inside a host a slow NVLink slows every transfer of its group alike, and the only group of a job has
no equal to compare it with. Then physics tells: what the NVLinks of a device carry one way is
published, and sound collectives of 16 MB and more reach a third of it:

    bus bandwidth = factor · bytes / time     factor  2 (n-1)/n   all_reduce
                                                      (n-1)/n     reduce_scatter, all_to_all
                                                      n-1         all_gather: the bytes of one rank

(the factors are those of nccl-tests, doc/PERFORMANCE.md; n is the size of the group). Below a fifth
the links are not used, or one of them is far from what it should be: undecided, since the machine
may be built so.

Example: 8 H100, whose NVLinks carry 450 GB/s. A reduce_scatter of 64 MB takes 2.9 ms from the last
member's arrival: 7/8 · 64 MB / 2.9 ms = 19 GB/s, below 90. Four H200 reach 364 GB/s.

Between a fifth and a half of what is published a group is sound, or one of its NVLinks is at half
its speed: without an equal nobody can tell. What that would cost is said beside the job's health.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from detect.causes.finding import (
    OTHERS_WAIT,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    ratio_of_half_speed,
    replayed_half_speed,
    rows_of_findings,
    undecided,
)
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers, UnmatchedIn, bus_factor, longest_of_a_rank
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import milliseconds, times
from detect.thresholds.networks import LINKS, NETWORKS, NVLINKS
from detect.thresholds.statistics import POWER
from megascan.errors import listed

ONE_WAY_GBYTES_PER_S = {
    "V100-SXM": 150,
    "A100-SXM": 300,
    "A800-SXM": 200,
    "H800": 200,
    "H100 80GB HBM3": 450,
    "H200": 450,
    "H20": 450,
    "B200": 900,
}
"""What all NVLinks of a device carry one way together, by a part of the device's name; the first
part that fits counts. Devices on PCIe cards (PCIe, NVL) may have no NVLinks.
"""
ON_CARDS = ("PCIe", "NVL")
NO_NVLINK = (
    "NVLink is not used, slower than it should be, or not there: the trace cannot tell which, nor "
    "which of these devices it is"
)
NVLINK_ADVICE = (
    "nvidia-smi topo -m and nvidia-smi nvlink --status -i GPU on that host: NV between all of "
    "these GPUs, and every link up at its full rate",
    "look for NCCL_P2P_DISABLE, NCCL_P2P_LEVEL or a container without the devices it needs; "
    "NCCL_DEBUG=INFO says over what a channel runs (P2P/CUMEM, or SHM)",
    "measure it with the job away: all_reduce_perf (nccl-tests) on that host, or "
    "python scripts/healthcheck.py --sweep",
)


@dataclass(frozen=True, kw_only=True)
class _Pace:
    """How quick a group of one host is in one of its operations."""

    unit: int
    time_ns: float
    """Time of one operation, counted from the last member's arrival."""
    gbytes_per_s: float
    full_gbytes_per_s: float

    @property
    def ratio(self) -> float:
        """Return how many times slower the group is than the slowest of sound groups."""
        return NVLINKS.least_share * self.full_gbytes_per_s / self.gbytes_per_s

    def lost_ns(self, transfers: Transfers) -> float:
        """Return what the group loses per iteration against the slowest of sound groups."""
        return float(transfers.total_ns[self.unit]) * (1.0 - 1.0 / self.ratio)


def one_way_gbytes_per_s(device: str) -> int | None:
    """Return what the NVLinks of a device carry one way, by the device's name; None where that is
    not known, or the device may have no NVLinks.
    """
    if any(word in device for word in ON_CARDS):
        return None
    return next((rate for name, rate in ONE_WAY_GBYTES_PER_S.items() if name in device), None)


def _slow_group(seen: Observations, transfers: Transfers, unit: int) -> _Pace | None:
    """Return a group, if its devices have NVLinks and it transfers at the pace of PCIe."""
    found = _pace_of(seen, transfers, unit)
    if found is None or found.ratio <= 1.0:
        return None
    least_ns = NVLINKS.min_step_share * float(np.median(seen.iteration_ns))
    return found if found.lost_ns(transfers) >= least_ns else None


def _pace_of(seen: Observations, transfers: Transfers, unit: int) -> _Pace | None:
    """Return how quick a group is; None where its devices have no NVLinks, or nobody can tell."""
    members = seen.members
    ranks, size_bytes = transfers.members[unit], int(transfers.size_bytes[unit])
    operation = transfers.kinds[int(transfers.kind[unit])].split()[1]
    rows = members.rows_with(ranks)
    if not rows or size_bytes < NETWORKS.min_scaled_bytes:
        return None
    factor = bus_factor(operation, len(ranks))
    full = one_way_gbytes_per_s(members.devices[rows[0]])
    time_ns = float(robust.median(transfers.transfer_ns[unit]))
    if factor is None or full is None or not (time_ns > 0 and members.are_inside_a_host(ranks)):
        return None
    return _Pace(
        unit=unit,
        time_ns=time_ns,
        gbytes_per_s=factor * size_bytes / time_ns,
        full_gbytes_per_s=full,
    )


def _pcie_finding(seen: Observations, transfers: Transfers, slow: _Pace) -> Finding:
    members = seen.members
    ranks = transfers.members[slow.unit]
    rows = members.rows_with(ranks)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.UNDECIDED,
            slowdown=slow.ratio,
            interval=(slow.ratio, slow.full_gbytes_per_s / slow.gbytes_per_s),
            course=None,
            q_value=0.0,
            num_peers=0,
            saved_ns=np.full(len(seen.iterations), slow.lost_ns(transfers)),
            subject=f"communication inside host {members.hosts[rows[0]]} (ranks {listed(ranks)})",
            predicate=f"runs at {slow.gbytes_per_s:.3g} GB/s, no quicker than PCIe",
            evidence=(
                f"one {transfers.kinds[int(transfers.kind[slow.unit])]} takes "
                f"{milliseconds(slow.time_ns)}, counted from the last member's arrival; the "
                f"NVLinks of {members.devices[rows[0]]} carry {slow.full_gbytes_per_s:.0f} GB/s "
                "one way, and sound ones show a third of it and more",
                NO_NVLINK,
            ),
            advice=NVLINK_ADVICE,
            is_replayed=False,
            is_bound=True,
        ),
    )


def _search(inquiry: Inquiry) -> Answer:
    """Report the slowest group of ranks of which none was named before: others may wait for a named
    rank.
    """
    seen, transfers = inquiry.seen, inquiry.seen.transfers
    if transfers is None or seen.members.device_kind == "cpu":
        return Answer()
    found = [
        slow
        for unit, ranks in enumerate(transfers.members)
        if not inquiry.named[list(seen.members.rows_with(ranks))].any()
        and (slow := _slow_group(seen, transfers, unit)) is not None
    ]
    if not found:
        return Answer(caveat=_unequalled(seen, transfers))
    slowest = max(found, key=lambda one: one.ratio)
    return Answer(findings=(_pcie_finding(seen, transfers, slowest),))


def _unequalled(seen: Observations, transfers: Transfers) -> str:
    """Say what it would cost if NVLinks of a group without equals ran at half their speed, as part
    of a sentence; empty where it would cost little.

    Example: eight GPUs, one TP group, 28 % of an iteration in its collectives: 1.16 times.
    """
    is_large = transfers.is_large
    num_alike = np.bincount(transfers.kind)[transfers.kind]
    blind = np.array([
        num_alike[unit] < NETWORKS.min_connections
        and seen.members.are_inside_a_host(ranks)
        and is_large[unit]
        and not _is_surely_full(seen, transfers, unit)
        for unit, ranks in enumerate(transfers.members)
    ], dtype=bool)  # fmt: skip
    share = longest_of_a_rank(transfers, blind) / float(np.median(seen.iteration_ns))
    cost = ratio_of_half_speed(share)
    if cost < POWER.caveat_ratio:  # a replay makes it smaller, and takes time
        return ""
    ranks = {one for unit in np.flatnonzero(blind) for one in transfers.members[unit]}
    replayed = replayed_half_speed(seen, tuple(sorted(ranks)), inside=True)
    cost = cost if replayed is None else min(cost, replayed)
    if cost < POWER.caveat_ratio:
        return ""
    return (
        "a connection inside a host at half its speed would look the same, and the step take "
        f"{times(cost)} what it must"
    )


def _is_surely_full(seen: Observations, transfers: Transfers, unit: int) -> bool:
    """Return whether a group is so quick that none of its NVLinks can be at half its speed."""
    pace = _pace_of(seen, transfers, unit)
    return (
        pace is not None and pace.gbytes_per_s >= NVLINKS.surely_full_share * pace.full_gbytes_per_s
    )


def _search_unmatched(inquiry: Inquiry) -> Answer:
    """Report ranks of one host whose quickest collectives take far longer than those of the others,
    where a profile does not say who communicates with whom.

    The quickest waited for nobody, and one slow connection slows two ranks at least. Only ranks
    that do as many of them, and are quick alike otherwise, say how long these should take.
    Example: the quickest of 146 all-reduces take 1.85 ms on ranks 0 and 1, and 0.23 on 2 and 3.
    """
    seen = inquiry.seen
    alike: dict[tuple[str, int], list[UnmatchedIn]] = defaultdict(list)
    for one in seen.unmatched:
        alike[one.what, one.size_bytes].append(one)
    found = [
        _unmatched_finding(seen, slow, kind)
        for kind in alike.values()
        if (slow := _slow_inside(seen, kind))
    ]
    worst = sorted(found, key=lambda one: one.step_time_cost_ratio)[-1:]
    accused = inquiry.slow | inquiry.named
    return Answer(
        findings=tuple(
            undecided(one, OTHERS_WAIT) if (accused & ~rows_of_findings(seen.members, [one])).any()
            else one
            for one in worst
        )
    )  # fmt: skip


def _slow_inside(seen: Observations, alike: list[UnmatchedIn]) -> list[UnmatchedIn]:
    """Return the slow ones of a kind, in order; [] where they are on several hosts, or their ranks
    compute longer than others, on longer data: of unknown sizes nobody knows then.
    """
    slow = sorted(_slow_of_kind(alike), key=lambda one: one.rank)
    ranks = [one.rank for one in slow]
    others = [one.rank for one in alike if one.rank not in ranks]
    if not slow or not seen.members.are_inside_a_host(tuple(ranks)):
        return []
    busy_ns, usual_ns = (
        float(np.median(seen.busy_ns[list(seen.members.rows_with(own))])) for own in (ranks, others)
    )
    return slow if busy_ns <= NVLINKS.alike_ratio * usual_ns else []


def _slow_of_kind(alike: list[UnmatchedIn]) -> list[UnmatchedIn]:
    """Return those whose quickest collectives are slow; [] where they and the others, at least as
    many, are not two even groups far from each other, or no group of ranks has their number: all
    members but one wait for that one, three of four.
    """
    ascending = sorted(alike, key=lambda one: one.quickest_ns)
    numbers = [one.number for one in alike]
    if len(alike) < 2 * NVLINKS.least_ranks or min(numbers) < NVLINKS.least_collectives:
        return []
    times_ns = np.maximum([one.quickest_ns for one in ascending], 1.0)
    steps = times_ns[1:] / times_ns[:-1]
    first = int(np.argmax(steps)) + 1
    quick, slow = times_ns[:first], times_ns[first:]
    spreads = (quick[-1] / quick[0], slow[-1] / slow[0], max(numbers) / min(numbers))
    is_clear = steps.max() >= LINKS.named_in_few and max(spreads) <= NVLINKS.alike_ratio
    is_group = NVLINKS.least_ranks <= len(slow) <= first and len(alike) % len(slow) == 0
    return ascending[first:] if is_clear and is_group else []


def _unmatched_finding(
    seen: Observations, slow: list[UnmatchedIn], alike: list[UnmatchedIn]
) -> Finding:
    ranks = tuple(sorted(one.rank for one in slow))
    rows = seen.members.rows_with(ranks)
    others = [one.quickest_ns for one in alike if one.rank not in ranks]
    own_ns = float(np.median([one.quickest_ns for one in slow]))
    usual_ns, ratios = float(np.median(others)), [one.quickest_ns / max(others) for one in slow]
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE,
            slowdown=own_ns / usual_ns,
            interval=(min(ratios), own_ns / min(others)),
            course=None,
            q_value=0.0,
            num_peers=len(others),
            saved_ns=np.full(len(seen.iterations), slow[0].an_iteration * (own_ns - usual_ns)),
            subject=f"communication of ranks {listed(ranks)} (host {seen.members.hosts[rows[0]]})",
            predicate=f"transfers {times(own_ns / usual_ns)} slower than that of others",
            evidence=(
                f"the quickest of {slow[0].number} {slow[0].what}, which waited for nobody, take "
                f"{milliseconds(own_ns)} against {milliseconds(usual_ns)} on {len(others)} other "
                "ranks, whose counterparts the trace does not know either",
            ),
            advice=NVLINK_ADVICE,
            is_replayed=False,
            is_bound=True,
            is_pair=len(ranks) == 2,
        ),
    )


UNMATCHED = CauseSpec(cause=Cause.LINK, search=_search_unmatched)
PACE_OF_PCIE = CauseSpec(cause=Cause.LINK, search=_search)
