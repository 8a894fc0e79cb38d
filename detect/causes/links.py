"""Connections that transfer slowly.

Each edge (p2p) or process group is compared with others of the same axis, operation, bytes,
members and hosts crossed. Which connection is bad then follows by elimination: a rank is named
alone only if at least two of its edges or groups are slow and next to none of its others is fine;
otherwise the ranks that all the slow groups share, otherwise the smallest slow group. Example: of
{0,4}, {1,5}, {4,8}, {5,9} the edges {0,4} and {4,8} are slow: rank 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from detect.causes.connections import (
    Units,
    guilty_end,
    lost_in_rings,
    met_by_mates,
    row_of,
    told_by_elimination,
    typical_times,
    units_of,
    waiting_mates,
    where_groups_meet,
)
from detect.causes.finding import (
    NO_GAIN,
    OTHERS_WAIT,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
    rows_of_findings,
    undecided,
    undecided_if_free,
    undecided_if_little,
)
from detect.causes.hits import FEW
from detect.causes.launching import IN_DOUBT_LAUNCH, launches_explain
from detect.observe.observations import Observations
from detect.report import Cause, ClockAgreement, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import Usual
from detect.stats.search import Course, SearchTask, Suspect, interval_of_ratio, search
from detect.text import counted, milliseconds, place, times
from detect.thresholds.devices import ORDINARY
from detect.thresholds.networks import LINKS, NETWORKS
from detect.thresholds.observing import STARVATION
from megascan.arrays import Flags, Floats, mask_of
from megascan.errors import listed

IN_DOUBT_ENDS = (
    "one of its ends has no other connection that is fine: the link, or that end, may be slow"
)
EITHER_END = (
    "either of its ends may be at fault, or what lies between: look at both, and drain neither for "
    "this alone"
)
INSIDE_A_HOST = (
    "either of its ends may be at fault, or what lies between: all that is of this one host, which "
    "is to be drained in either case"
)
IN_DOUBT_BETWEEN = (
    "other pairs between the same two hosts are slow as well: what they share is, the network of "
    "either host or what lies between"
)
IN_DOUBT_END = (
    "either of its ends may be at fault, and one of them is sound: no host is drained for so little"
)
IN_DOUBT_PLACE = (
    "pairs at the same place of all other replicas are slow as well: what that place does beside "
    "its messages (loading, logging), or how late they are launched, is likelier than as many links"
)
IN_DOUBT_PORT = (
    "a larger group with both of them is slow as well, so it is no wire between the two but all "
    "that one of them sends: the other one is sound, and which, the trace cannot tell"
)
IN_DOUBT_INSIDE = (
    "all that carries as much inside this host is slow: it may be built so (no NVLink between its "
    "GPUs), or what they share is at fault; compare nvidia-smi topo -m with that of another host"
)
IN_DOUBT_HOST = (
    "connections of other ranks inside this host are slow as well, of several: what they share is, "
    "such as how late the host launches them, or they are built so"
)
IN_DOUBT_TINY = (
    "so few bytes show how late the operation was launched, not how much the connection carries"
)
IN_DOUBT_SHARED = (
    "equal connections that are not slow for good take as long in {share:.0%} of their transfers: "
    "those that share a NIC find it free or taken, and one of them may always come second"
)
BY_MATES = (
    "of the ranks {unit} it alone is one of {mates} too, whose passes all take longer: they "
    "exchange in them, unrecorded"
)
BY_ONE_CLOCK = "; the span of whoever came last to it is longer by as much, by one clock"
IN_DOUBT_NOW_AND_THEN = (
    "it comes and goes and costs the step nothing: messages that share a NIC find it free or "
    "taken, and one of them may be the unlucky one"
)


@dataclass(frozen=True, kw_only=True)
class _SlowLink:
    """One bad connection: `ranks` is one (its NIC or host), two (a pair) or a group."""

    ranks: tuple[int, ...]
    course: Course
    q_value: float
    units: tuple[tuple[int, ...], ...]
    """Members of the edges and groups that are slow because of it."""
    num_peers: int
    kind: str
    size_bytes: int
    """Of one transfer of that kind; -1 where it was not recorded."""
    normal_ns: float
    actual_ns: float
    excess_ns: Floats
    """(iteration,): transfer time lost."""
    is_isolated: bool
    """Whether other connections, which are fine, leave these ranks alone to blame."""
    is_deduced: bool = False
    """Whether no other connection of these ranks leaves them alone to blame: they are where slow
    groups meet."""
    is_inside: bool = False
    """Whether they are a pair inside a host of which nothing tells the end."""
    rings_ns: float = 0.0
    """What collectives that have no transfer time lose besides in an iteration."""
    mates: tuple[int, ...] = ()
    """The group of the only rank named, where longer passes of that group told which it is."""
    are_told: bool = False
    """Whether there are several ranks, of one host, each of which is told by itself."""

    @property
    def is_pair(self) -> bool:
        """Return whether it is the connection of two ranks."""
        return len(self.ranks) == 2 and not self.are_told


def _search_connections(inquiry: Inquiry) -> Answer:
    """Compare equal connections; needs two of a kind."""
    seen, settings = inquiry.seen, inquiry.settings
    if seen.transfers is None:
        return Answer(notes=("no matched communication in the trace: links cannot be judged",))
    if not len(seen.transfers.members):
        return Answer()
    units = units_of(seen.transfers, seen.members)
    nobody = np.zeros(len(units.members), dtype=bool)
    compared: Flags = np.asarray(np.isfinite(units.values(nobody)).any(axis=1))
    if compared.sum() < 2:
        return Answer()
    is_cpu = seen.members.device_kind == "cpu"
    task = SearchTask(
        compare=units.values,
        num_rows=len(units.members),
        num_tests=inquiry.num_tests + int(compared.sum()),
        floor=float(np.log(inquiry.least_of_links)),
        usual=Usual(
            floor=LINKS.noise_log,
            spread=LINKS.spread_log,
            tail_degrees=0.0 if is_cpu else LINKS.tail_degrees,
        ),
        forbidden=~compared,
    )
    result = search(task, settings)
    step_ns = float(np.median(seen.iteration_ns))
    least_ns = LINKS.cpu_min_step_share * step_ns if is_cpu else 0.0
    mates = waiting_mates(seen, inquiry.found)
    slow = _links_at_fault(seen, units, compared, result.suspects, mates)
    heavy = [one for one in slow if float(np.mean(one.excess_ns)) >= least_ns]
    effect = inquiry.detectable_effect(result.noise)
    findings = [_finding(seen, one, _doubt(seen, one, heavy)) for one in heavy]
    return Answer(
        findings=tuple(
            _undecided_beside_heavier(seen, one, findings, inquiry.slow) for one in findings
        ),
        explains=lambda finding: any(
            _is_at_its_end(finding, link)
            or _waits_behind(seen, finding, one)
            or (link.mates == finding.ranks and finding.owner is Owner.UNDECIDED)
            for link, one in zip(heavy, findings, strict=True)
        ),
        least_slowdown=max(settings.min_link_slowdown, float(np.exp(effect))),
        least_because=inquiry.limited_by(result.noise),
    )


def _links_at_fault(
    seen: Observations,
    units: Units,
    compared: Flags,
    suspects: tuple[Suspect, ...],
    mates: tuple[tuple[int, ...], ...] = (),
) -> list[_SlowLink]:
    """Return the connections that make the suspected units slow, the worst unit's first. `mates`
    are groups whose ranks all have longer passes, in which they exchange unseen.

    Of two groups that lose the same, one of which waits for the other, neither tells which end of
    another connection is slow, unless one of the two alone has a member in what else is slow.
    Example: of the slow pair (5, 13) each end is in a ring of its stage that lasts 94 ms longer
    than an equal one, of unknown size, and nobody knows which ring waits.
    """
    left = [one for one in suspects if _exceeds_clock_errors(seen, units, one)]
    # what loses too little to be named tells where a slow group meets it, by one clock
    beside = [one for one in suspects if one not in left and _is_long_by_one_clock(units, one)]
    waiting = [(one, other) for one in left for other in left if _waits_for(units, one, other)]
    left = [one for one in left if not any(one is waits for waits, _ in waiting)]
    slow = mask_of([one.row for one in suspects], len(units.members))
    values = units.values(slow)
    unsettled = [pair for pair in waiting if not _is_settled(units, suspects, waiting, *pair)]
    tell_nothing = mask_of([one.row for pair in unsettled for one in pair], len(slow))
    found = []
    while left:
        worst = left[0]
        over = np.nan_to_num(robust.median(values[:, worst.course.active], axis=1))
        over[tell_nothing] = np.nan
        known = np.where(compared, over, np.nan)
        fine = compared & ~slow & (over < LINKS.fine_share * worst.course.effect)
        whole_host = _whole_host(seen, units, compared, left)
        blamed = _Blamed(whole_host or units.members[worst.row])
        if not whole_host and not tell_nothing[worst.row]:
            telling = [one for one in left if not tell_nothing[one.row]]
            blamed = _several_of_a_host(seen, units, fine, telling) or _blamed(
                seen, units, fine, known, slow=telling, beside=beside, mates=mates
            )
        explained = [one for one in left if blamed.explains(units.members[one.row], whole_host)]
        is_isolated = blamed.are_told or _is_isolated(seen, units, fine, blamed.ranks, worst)
        is_inside = not is_isolated and _is_inside(seen, units, fine, blamed.ranks, worst)
        link = _link(units, blamed, explained, compared, is_isolated=is_isolated or is_inside)
        found.append(replace(link, is_deduced=blamed.is_met, is_inside=is_inside))
        left = [one for one in left if one not in explained]
    return found


@dataclass(frozen=True)
class _Blamed:
    """The ranks whose connection is slow, as far as is known."""

    ranks: tuple[int, ...]
    is_met: bool = False
    """Whether they are where slow groups meet."""
    rings_ns: float = 0.0
    """As `_SlowLink.rings_ns`."""
    mates: tuple[int, ...] = ()
    """As `_SlowLink.mates`."""
    are_told: bool = False
    """As `_SlowLink.are_told`."""

    def explains(self, members: tuple[int, ...], whole_host: tuple[int, ...]) -> bool:
        """Return whether a slow unit with these members is slow because of them, or lies inside a
        host that is slow as a whole.
        """
        own, unit = set(self.ranks), set(members)
        return own <= unit or unit <= set(whole_host) or (self.are_told and bool(own & unit))


def _blamed(
    seen: Observations,
    units: Units,
    fine: Flags,
    over: Floats,
    *,
    slow: list[Suspect],
    beside: list[Suspect],
    mates: tuple[tuple[int, ...], ...],
) -> _Blamed:
    """Return what the `slow` units, the worst first, have in common, or less of it where what is
    slow `beside` them, longer passes of `mates`, or the other connections of a pair's ends tell.
    """
    ranks = _shared_ranks(units, np.isfinite(over), slow)
    met = where_groups_meet(units, fine, slow + beside) if len(ranks) > 1 else ()
    group: tuple[int, ...] = ()
    if not met and seen.members.are_inside_a_host(ranks):
        met, group = met_by_mates(ranks, mates)
    if met or len(ranks) != 2 or not set(seen.members.recorded).issuperset(ranks):
        return _Blamed(met or ranks, is_met=bool(met), mates=group)
    ends = guilty_end(units, over, ranks, slow[0])
    rings_ns = lost_in_rings(units, ends[0], ranks, slow[0]) if len(ends) == 1 else 0.0
    return _Blamed(ends, rings_ns=rings_ns)


def _several_of_a_host(
    seen: Observations, units: Units, fine: Flags, slow: list[Suspect]
) -> _Blamed | None:
    """Return several ranks of one host whose connections with others are slow, each told by
    elimination: neighbours share a NIC. One by one, mending them gains nothing.
    """
    ranks = told_by_elimination(units, fine, slow) if units.crosses[slow[0].row] else ()
    are_known = set(seen.members.recorded).issuperset(ranks)
    if len(ranks) < 2 or not are_known or not seen.members.are_inside_a_host(ranks):
        return None
    return _Blamed(ranks, are_told=True)


def _whole_host(
    seen: Observations, units: Units, compared: Flags, slow: list[Suspect]
) -> tuple[int, ...]:
    """Return the ranks of the worst unit's host if all connections inside the host are slow; () if
    one is fine, or if one rank is in all of them.

    Connections that are not slow but carry less than the worst unit do not count as fine.
    """
    worst, rates = slow[0].row, units.rates
    are_slow = mask_of([one.row for one in slow], len(rates))
    host, _ = seen.members.device_of(units.members[worst][0])
    inside = [
        unit for unit in np.flatnonzero(compared & (are_slow | ~(rates < rates[worst]))).tolist()
        if seen.members.are_inside_a_host(units.members[unit])
        and seen.members.device_of(units.members[unit][0])[0] == host
    ]  # fmt: skip
    ranks = [set(units.members[unit]) for unit in inside]
    if worst not in inside or set.intersection(*ranks) or not are_slow[inside].all():
        return ()
    return tuple(sorted(set.union(*ranks)))


def _is_isolated(
    seen: Observations, units: Units, fine: Flags, ranks: tuple[int, ...], worst: Suspect
) -> bool:
    """Return whether the connection of these ranks alone is to blame; `fine` units are not slow.

    A single rank's connection is. A pair's is if each end has another connection of the same way as
    the `worst` unit that is fine and carries more, or if the ports of two hosts serve nothing else
    that would tell. A larger group's never is, inside a host as on a rail: nobody can tell which
    member is slow.
    """
    if len(ranks) == 1:
        return True
    if len(ranks) > 2 or not set(seen.members.recorded).issuperset(ranks):
        return False
    clear = fine & (units.rates >= units.least_of_witness(worst))
    if all(clear[units.witnesses(rank, worst.row)].any() for rank in ranks):
        return True
    others = {
        unit
        for rank in ranks
        for unit in units.of_rank(rank, worst.row)
        if units.members[unit] != ranks and not units.carry_little[unit]
    }
    return bool(units.crosses[worst.row]) and not others


def _is_inside(
    seen: Observations, units: Units, fine: Flags, ranks: tuple[int, ...], worst: Suspect
) -> bool:
    """Return whether a pair lies inside one host, which is the one to drain whichever end it is,
    and is slower than two equal pairs that are `fine`, or far slower than the only one.

    Example: the TP pairs of a job of two take 178 us for an all-reduce, and 703.
    """
    is_pair = len(ranks) == 2 and set(seen.members.recorded).issuperset(ranks)
    if not is_pair or seen.hidden_axes or not seen.members.are_inside_a_host(ranks):
        return False  # of what else either end sends its mates nobody knows
    kind = units.transfers.kind
    num_equal = int(fine[np.unique(units.unit[kind == kind[row_of(units, worst)]])].sum())
    least = LINKS.named_in_few if num_equal > 1 else LINKS.named_beside_one
    return num_equal > 0 and worst.course.effect >= float(np.log(least))


def _exceeds_clock_errors(seen: Observations, units: Units, suspect: Suspect) -> bool:
    """Return whether the lost time exceeds what clock errors could feign.

    A transfer is never longer than the span of its shortest member, which one clock measures; but
    clock errors may make the transfers that it is compared with too short. The error is the typical
    one inside a host, where members meet hundreds of times an iteration, otherwise the p99. Where a
    slow link is all that joins two clocks, their error is as long as the link's transfers: then
    spans measured by one clock decide, if the loss matters to the step.
    """
    if seen.alignment is None:
        return True
    actual, normal = typical_times(units, suspect)
    error_ns = _clock_error_ns(seen.alignment, seen, units.members[suspect.row])
    if actual - normal > LINKS.clock_errors * error_ns:  # each end has its own error
        return not _are_others_quicker(units, suspect)
    if actual <= 0.0:  # clocks are off by more than a transfer takes
        return False
    lost_ns = float(units.transfers.total_ns[row_of(units, suspect)]) * (1.0 - normal / actual)
    if lost_ns < NETWORKS.min_step_share * float(np.median(seen.iteration_ns)):
        return False
    return _is_long_by_one_clock(units, suspect)


def _are_others_quicker(units: Units, suspect: Suspect) -> bool:
    """Return whether a suspect takes as long while it is slow as before or after, or by one clock
    as long as others: then the times of those are too short, as clocks drift.

    Example: all-reduces of a pair take 65 us in each iteration, those of three others 65, and 27 to
    35 in some iterations in a row; the span of whoever comes last is 65 us everywhere.
    """
    row, active = row_of(units, suspect), suspect.course.active
    actual, normal = typical_times(units, suspect)
    longer, least = _longer_by_one_clock(units, suspect), LINKS.fine_share * (actual - normal)
    is_as_quick = np.isfinite(longer) and longer < least
    if is_as_quick or active.all():
        return bool(is_as_quick)
    before = float(robust.median(units.transfers.transfer_ns[row][~active]))
    return actual - before < least


def _clock_error_ns(clocks: ClockAgreement, seen: Observations, ranks: tuple[int, ...]) -> float:
    is_inside = seen.members.are_inside_a_host(ranks)
    return clocks.residual_median_ns if is_inside else clocks.residual_p99_ns


def _longer_by_one_clock(units: Units, suspect: Suspect) -> float:
    """Return how much longer the suspect's shortest member spans last than those of units of the
    same kind, ns; -inf where that is not known.

    The member that comes last to an operation is in it for as long as the transfer lasts, by its
    own clock. Example: messages take 1.1 ms, and one 4.5 ms: 3.4 ms, however far clocks are off.
    """
    row, transfers = row_of(units, suspect), units.transfers
    if transfers.shortest_ns is None:
        return -np.inf
    alike = (transfers.kind == transfers.kind[row]) & (units.unit != suspect.row)
    if not alike.any():
        return -np.inf
    typical_ns = robust.median(transfers.shortest_ns[:, suspect.course.active], axis=1)
    return float(typical_ns[row] - robust.median(typical_ns[alike]))


def _is_long_by_one_clock(units: Units, suspect: Suspect) -> bool:
    """Return whether a suspect's shortest member spans show half of what it loses, and more."""
    actual, normal = typical_times(units, suspect)
    return actual > 0.0 and _longer_by_one_clock(units, suspect) >= 0.5 * (actual - normal)


def _is_at_its_end(finding: Finding, link: _SlowLink) -> bool:
    """Return whether a finding names ranks only for leaving late what they do over a slow link."""
    ends = {rank for unit in link.units for rank in unit} - set(link.ranks)
    return finding.cause == Cause.LINK and link.is_isolated and set(finding.ranks) <= ends


def _waits_behind(seen: Observations, finding: Finding, link: Finding) -> bool:
    """Return whether a rank is named for leaving late while a slow link of its pipeline costs more:
    what comes late over that link is late for all stages behind it.
    """
    members = seen.members
    own, its = (members.replica[list(members.rows_with(one.ranks))] for one in (finding, link))
    is_lighter = finding.step_time_cost_ratio < link.step_time_cost_ratio
    return finding.cause == Cause.LINK and is_lighter and bool(np.isin(own, its).all())


def _doubt(seen: Observations, link: _SlowLink, links: list[_SlowLink]) -> str:
    """Return why it is doubtful that `link`, one of the slow `links`, is at fault, or that it is
    slow at all; empty where it is not doubtful.
    """
    is_nested = any(set(unit) > set(link.ranks) for unit in link.units)
    is_inside = link.is_pair and seen.members.are_inside_a_host(link.ranks)
    reasons = {
        IN_DOUBT_BETWEEN: _are_parallel(seen, link, links),
        IN_DOUBT_HOST: _are_of_one_host(seen, link, links),
        IN_DOUBT_PLACE: _are_at_one_place(seen, link, links),
        IN_DOUBT_PORT: is_nested and is_inside,
        IN_DOUBT_LAUNCH: _is_launched_late(seen, link),
    }
    if doubt := next((reason for reason, holds in reasons.items() if holds), ""):
        return doubt
    as_long = _share_as_long(seen, link, links)
    if as_long >= LINKS.shared_share:
        return IN_DOUBT_SHARED.format(share=as_long)
    active = link.course.active
    is_few = len(active) < ORDINARY.few_iterations and not active.all()
    is_told_twice = _is_told_twice(link) and bool(active[int(np.argmax(active)) :].all())
    return FEW if is_few and not is_told_twice else ""


def _is_told_twice(link: _SlowLink) -> bool:
    """Return whether several connections show that one rank is slow: what one of them meets at a
    port or a switch, or in a few iterations by chance, the others do not.

    Example: rank 1 in its TP pair and in its DP pair, which share no other member; or in a pair,
    and in a ring without transfer times, or in passes in which its TP pair exchanges unseen.
    """
    is_twice = len(link.units) > 1 or link.rings_ns > 0 or bool(link.mates)
    return (len(link.ranks) == 1 or link.are_told) and is_twice


def _is_launched_late(
    seen: Observations, link: _SlowLink, least: float = STARVATION.starved_share
) -> bool:
    """Return whether the device of one of its ends waits for its host in the `least` share of its
    operations, and a transfer loses no more than late launches take, or is compared with one other
    connection only.

    Example: of two pairs of replicas in a job bound by its hosts the pair with the last host takes
    199 us, the other one 79.
    """
    rows = seen.members.rows_with(rank for ranks in link.units for rank in ranks)
    lost_ns = link.actual_ns - link.normal_ns if link.num_peers > 1 else 0.0
    return launches_explain(seen, rows, lost_ns, least)


def _share_as_long(seen: Observations, link: _SlowLink, links: list[_SlowLink]) -> float:
    """Return in what share of their transfers equal connections that are none of the slow `links`
    lose about as much as `link` does.

    Example: of 16 pairs that send 0.7 MB one takes 0.11 ms in each iteration, where others take
    0.05 ms, and 0.11 in 16 of 90: two pairs share a NIC, and meet there or do not.
    """
    transfers = seen.transfers
    assert transfers is not None
    slow = {unit for one in links for unit in one.units}
    is_equal = transfers.kind == transfers.kinds.index(link.kind)
    is_equal &= np.array([unit not in slow for unit in transfers.members])
    least_ns = link.normal_ns * np.exp(LINKS.as_long_share * link.course.effect)
    as_long = transfers.transfer_ns[is_equal][:, link.course.active] >= least_ns
    return float(as_long.mean()) if as_long.size else 0.0


def _are_at_one_place(seen: Observations, link: _SlowLink, links: list[_SlowLink]) -> bool:
    """Return whether the pairs of the same stages and TP ranks are slow in all replicas, each
    inside a host.

    Example: messages between stages take 92 us from each first rank of a TP group to the next, on
    two hosts, and 29 us between the second ranks.
    """
    members = seen.members
    places = members.numbered("pp", "tp", "cp")

    def place_of(pair: tuple[int, ...]) -> list[int]:
        return sorted(int(places[row]) for row in members.rows_with(pair))

    pairs = {
        one.ranks for one in links if len(one.ranks) == 2 and members.are_inside_a_host(one.ranks)
    }
    if link.ranks not in pairs:
        return False
    own = place_of(link.ranks)
    num_alike = sum(place_of(pair) == own for pair in pairs)
    return num_alike == len(np.unique(members.replica)) > 1


def _are_parallel(seen: Observations, link: _SlowLink, links: list[_SlowLink]) -> bool:
    """Return whether other pairs between the two hosts of a slow pair are slow as well: then what
    the pairs share is slow, at either host or in between.
    """
    hosts_of = seen.members.hosts_of
    hosts = hosts_of(link.ranks)
    alike = [one for one in links if len(one.ranks) == 2 and hosts_of(one.ranks) == hosts]
    are_several = len(link.ranks) == len(hosts) == 2 and len(alike) > 1
    return are_several and not _share_a_nic(seen, link, alike)


def _are_of_one_host(seen: Observations, link: _SlowLink, links: list[_SlowLink]) -> bool:
    """Return whether connections inside the host of a slow one, which lies inside it as well, are
    slow of two other ranks or pairs: one device has one or two of them slow.

    Example: all four TP pairs of the last of four hosts take 46 to 58 us, those of others 24 to 29.
    """
    members = seen.members
    alike = [
        one
        for one in links
        if all(map(members.are_inside_a_host, one.units))
        and members.hosts_of(one.ranks) == members.hosts_of(link.ranks)
        and (one is link or not {*one.ranks} & {*link.ranks})
    ]
    return any(one is link for one in alike) and len(alike) > LINKS.least_of_a_host


def _share_a_nic(seen: Observations, link: _SlowLink, alike: list[_SlowLink]) -> bool:
    """Return whether the slow pairs between two hosts are those of neighbours, which share one NIC
    at each, while at least twice as many others between these hosts are fine.

    Example: of eight pairs between two hosts (6, 14) and (7, 15) take four times as long.
    """
    transfers, nic_size = seen.transfers, LINKS.devices_of_a_nic
    assert transfers is not None
    devices = [[seen.members.device_of(rank)[1] for rank in one.ranks] for one in alike]
    nics = {tuple(device // nic_size for device in sorted(own)) for own in devices}
    hosts, kind = seen.members.hosts_of(link.ranks), transfers.kinds.index(link.kind)
    num_between = sum(
        len(ranks) == 2 and seen.members.hosts_of(ranks) == hosts
        for ranks, own in zip(transfers.members, transfers.kind.tolist(), strict=True)
        if own == kind
    )
    is_known = min(min(own) for own in devices) >= 0
    num_fine = num_between - len(alike)
    return is_known and len(nics) == 1 and num_fine >= 2 * len(alike) and len(alike) <= nic_size


def _waits_for(units: Units, suspect: Suspect, other: Suspect) -> bool:
    """Return whether a group loses what another stage's group of the same operation loses.

    Where sizes were not recorded, an operation may include what follows it: a stage's reduction
    that ends with a reduction over stages includes the wait for the slow stage. The waiting group
    then loses the same time, but is slower by a smaller ratio.
    """
    mine, its = (units.transfers.kind[row_of(units, one)] for one in (suspect, other))
    kinds, members = units.transfers.kinds, units.members
    if mine == its or kinds[mine] != kinds[its] or suspect.course.effect >= other.course.effect:
        return False
    if set(members[suspect.row]) & set(members[other.row]):
        return False
    lost, others = (actual - normal for actual, normal in
                    (typical_times(units, one) for one in (suspect, other)))  # fmt: skip
    return abs(lost / others - 1.0) <= LINKS.same_loss_share


def _is_settled(
    units: Units,
    suspects: tuple[Suspect, ...],
    waiting: list[tuple[Suspect, Suspect]],
    waits: Suspect,
    other: Suspect,
) -> bool:
    """Return whether of a group that `waits` and the `other` one the latter alone has a member in
    further slow connections: then it is known which of the two waits.

    Example: rings (2, 6) and (10, 14) of two stages lose 20 ms each, and the TP group of ranks 4 to
    7 is four times as slow as others: (10, 14) waits, and what is slow is rank 6.
    """
    rows = {one.row for pair in waiting for one in pair}
    further = {
        rank for one in suspects if one.row not in rows for rank in units.members[one.row]
    }  # fmt: skip
    own, its = (set(units.members[one.row]) for one in (waits, other))
    return bool(its & further) and not own & further


def _shared_ranks(units: Units, compared: Flags, slow: list[Suspect]) -> tuple[int, ...]:
    """Return what the `slow` units, the worst first, have in common: one rank or two of which
    nearly all units are slow; else those ranks of the worst unit that other slow units share with
    it, by twos and more.
    """
    worst, slow_units = slow[0].row, {one.row for one in slow}
    counts = {
        rank: _num_slow_of(units, compared, slow_units, rank, worst)
        for rank in units.members[worst]
    }
    most = max(counts.values())
    ranks = tuple(sorted(rank for rank, count in counts.items() if count == most))
    if most and len(ranks) <= 2:
        return ranks
    shared = set(units.members[worst])
    for members in sorted((set(units.members[one.row]) for one in slow), key=len):
        if len(shared & members) >= 2:
            shared &= members
    return tuple(sorted(shared))


def _num_slow_of(units: Units, compared: Flags, slow_units: set[int], rank: int, worst: int) -> int:
    """Return how many units of a rank are slow, if nearly all are: of all its units, or of those
    that take the same way as the `worst`; otherwise 0.
    """
    of_rank = [unit for unit, ranks in enumerate(units.members) if rank in ranks]
    for candidates in (of_rank, units.of_rank(rank, worst)):
        mine = [unit for unit in candidates if compared[unit]]
        num_slow = sum(unit in slow_units for unit in mine)
        if num_slow >= 2 and num_slow >= LINKS.all_of_a_rank_share * len(mine):
            return num_slow
    return 0


def _link(
    units: Units,
    blamed: _Blamed,
    explained: list[Suspect],
    compared: Flags,
    *,
    is_isolated: bool,
) -> _SlowLink:
    transfers, slow = units.transfers, [one.row for one in explained]
    best = min(explained, key=lambda one: (one.q_value, -one.course.effect))
    share = 1.0 - float(np.exp(-best.course.effect))
    lost_ns: dict[int, float] = {}  # by rank: units of different ranks transfer at the same time
    for one in np.flatnonzero(np.isin(units.unit, slow)).tolist():
        for rank in transfers.members[one]:
            lost_ns[rank] = lost_ns.get(rank, 0.0) + float(transfers.total_ns[one]) * share
    actual, normal = typical_times(units, best)
    row = row_of(units, best)
    peers = set(units.unit[transfers.kind == transfers.kind[row]].tolist()).difference(slow)
    return _SlowLink(
        ranks=blamed.ranks,
        course=best.course,
        q_value=best.q_value,
        units=tuple(units.members[one.row] for one in explained),
        num_peers=sum(bool(compared[one]) for one in peers),
        kind=transfers.kinds[int(transfers.kind[row])],
        size_bytes=int(transfers.size_bytes[row]),
        normal_ns=normal,
        actual_ns=actual,
        excess_ns=np.where(best.course.active, max(lost_ns.values(), default=0.0), 0.0),
        is_isolated=is_isolated,
        rings_ns=blamed.rings_ns,
        mates=blamed.mates,
        are_told=blamed.are_told,
    )


def _finding(seen: Observations, link: _SlowLink, doubt: str) -> Finding:
    """Report a slow connection; undecided where there is a `doubt`."""
    members = seen.members
    known = set(members.ranks.tolist())
    rows = tuple(members.row(rank) for rank in link.ranks if rank in known)
    slowdown = float(np.exp(link.course.effect))
    finding = build_finding(
        seen,
        Claim(
            ranks=link.ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE if link.is_isolated and not doubt else Owner.UNDECIDED,
            slowdown=slowdown,
            interval=interval_of_ratio(link.course.effect, link.course.standard_error),
            course=link.course,
            q_value=link.q_value,
            num_peers=link.num_peers,
            saved_ns=link.excess_ns + np.where(link.course.active, link.rings_ns, 0.0),
            subject=_subject(seen, link, rows),
            predicate=f"transfers {times(slowdown)} slower than equal connections",
            evidence=(*_evidence(seen, link), *((doubt,) if doubt else ())),
            advice=connection_advice(seen, link.ranks[:1] if link.are_told else link.ranks),
            is_pair=link.is_pair,
            is_border=link.are_told,
        ),
    )
    num_iterations = len(link.course.active)
    is_few = num_iterations < ORDINARY.few_iterations and not _is_told_twice(link)
    if not _is_told_twice(link) or finding.step_time_cost_ratio < ORDINARY.small_gain_ratio:
        finding = undecided_if_little(finding, is_few=is_few)
    is_cheap = finding.step_time_cost_ratio < ORDINARY.worthwhile_ratio
    is_doubted = is_cheap and finding.owner is Owner.NODE
    if is_doubted and (link.is_deduced or _is_launched_late(seen, link, STARVATION.fed_share)):
        finding = undecided(finding, NO_GAIN)
    is_node = finding.owner is Owner.NODE
    if link.is_inside and is_node and finding.step_time_cost_ratio < LINKS.drained_ratio:
        finding = undecided(finding, IN_DOUBT_END)
    if 0 <= link.size_bytes < NETWORKS.min_bytes:
        is_short = link.actual_ns - link.normal_ns < LINKS.late_launch_ns
        doubted = undecided if is_short else undecided_if_free
        return doubted(finding, IN_DOUBT_TINY)
    lasts = len(link.course.episodes) == 1 and link.course.share == 1.0
    return finding if lasts else undecided_if_free(finding, IN_DOUBT_NOW_AND_THEN)


def _undecided_beside_heavier(
    seen: Observations, finding: Finding, others: list[Finding], slow: Flags
) -> Finding:
    """Return the finding, undecided where it costs next to nothing and another rank of the same
    replica is slow or costs more: messages that are posted together end together.

    Example: rank 11 transfers 3.7x slower, 10 % of the step; messages between ranks 3 and 7 of the
    same replica take 3.1x as long, 0.2 % of it.
    """
    cost, replica = finding.step_time_cost_ratio, seen.members.replica
    if finding.owner is not Owner.NODE or cost >= ORDINARY.worthwhile_ratio:
        return finding
    own = rows_of_findings(seen.members, [finding])
    hosts = seen.members.hosts_of(finding.ranks)
    heavier = [
        one
        for one in others
        if one.step_time_cost_ratio > cost
        # what shares a NIC with it hides it
        and not (len(hosts) == 2 and hosts == seen.members.hosts_of(one.ranks))
    ]
    accused = (slow | rows_of_findings(seen.members, heavier)) & ~own
    if not np.isin(replica[accused], replica[own]).any():
        return finding
    return undecided(finding, OTHERS_WAIT)


def _subject(seen: Observations, link: _SlowLink, rows: tuple[int, ...]) -> str:
    host, _ = seen.members.device_of(link.ranks[0])
    if len(link.ranks) == 1:
        where = place(seen.members, rows[0]) if rows else ""
        return f"everything that rank {link.ranks[0]} ({where}) sends and receives"
    if link.are_told:
        return f"everything that ranks {listed(link.ranks)} (host {host}) send and receive"
    if link.is_pair:
        places = " and ".join(place(seen.members, row) for row in rows)
        return f"the link between ranks {link.ranks[0]} and {link.ranks[1]} ({places})"
    group = f"the group of ranks {listed(link.ranks)}"
    is_inside = host and seen.members.are_inside_a_host(link.ranks)
    return f"{group} (host {host})" if is_inside else group


def _evidence(seen: Observations, link: _SlowLink) -> tuple[str, ...]:
    sentences = [
        f"one {link.kind} takes {milliseconds(link.actual_ns)} against "
        f"{milliseconds(link.normal_ns)} on {counted(link.num_peers, 'equal connection')}, counted "
        "from the last member's arrival",
        f"slower in {link.course.share:.0%} of these iterations",
    ]
    if link.mates:
        sentences.append(BY_MATES.format(unit=listed(link.units[0]), mates=listed(link.mates)))
    if len(link.units) > 1:
        groups = listed(f"{{{listed(ranks)}}}" for ranks in link.units)
        shared = set.intersection(*map(set, link.units))
        sentences.append(f"slow among {groups}; what they share is named" if shared else
                         f"slow among {groups}; {IN_DOUBT_INSIDE}")  # fmt: skip
    elif len(link.ranks) > 2 and seen.members.are_inside_a_host(link.ranks):
        sentences.append(
            "it lies inside one host; which of its GPUs is slow, one group alone cannot tell"
        )
    elif len(link.ranks) > 2:
        sentences.append("which link inside the group is slow, one group alone cannot tell")
    if link.is_pair:
        is_inside = seen.members.are_inside_a_host(link.ranks)
        either = INSIDE_A_HOST if is_inside else EITHER_END
        sentences.append(either if link.is_isolated else IN_DOUBT_ENDS)
    if seen.alignment is not None:
        lost_ns = link.actual_ns - link.normal_ns
        by_one = lost_ns <= LINKS.clock_errors * _clock_error_ns(seen.alignment, seen, link.ranks)
        sentences.append(
            f"the loss is {milliseconds(lost_ns)} a transfer, clocks agree within "
            f"{milliseconds(seen.alignment.residual_p99_ns)} (p99){BY_ONE_CLOCK if by_one else ''}"
        )
    return tuple(sentences)


LINK = CauseSpec(
    cause=Cause.LINK,
    search=_search_connections,
    power_words="a connection transfers slower than equal ones",
)
