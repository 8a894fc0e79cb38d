"""Report connections that transfer slowly, with what else may make them seem slow.

Each edge (p2p) or process group is compared with others of the same axis, operation, bytes,
members and hosts crossed; `slow_links.py` tells which connection makes those slow that are.

    _search_connections        the comparison, and a finding of each connection at fault
    _doubt                     others at its place, host or NIC are slow; launched late; too few
    _finding                   one of them: who is named, or why nobody is, words and evidence
    _undecided_beside_heavier  it costs next to nothing, and another rank of its replica more
    _is_at_its_end, _waits_behind   what was found earlier, and is explained by it
"""

from __future__ import annotations

import numpy as np

from detect.causes.connections import units_of, waiting_mates
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
from detect.causes.slow_links import SlowLink, clock_error_ns, links_at_fault
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats.noise import Usual
from detect.stats.search import SearchTask, interval_of_ratio, search
from detect.text import counted, milliseconds, place, times
from detect.thresholds.devices import ORDINARY
from detect.thresholds.networks import LINKS, NETWORKS
from detect.thresholds.observing import STARVATION
from megascan.arrays import Flags
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
    slow = links_at_fault(seen, units, compared, result.suspects, mates)
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


def _is_at_its_end(finding: Finding, link: SlowLink) -> bool:
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


def _doubt(seen: Observations, link: SlowLink, links: list[SlowLink]) -> str:
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


def _is_told_twice(link: SlowLink) -> bool:
    """Return whether several connections show that one rank is slow: what one of them meets at a
    port or a switch, or in a few iterations by chance, the others do not.

    Example: rank 1 in its TP pair and in its DP pair, which share no other member; or in a pair,
    and in a ring without transfer times, or in passes in which its TP pair exchanges unseen.
    """
    is_twice = len(link.units) > 1 or link.rings_ns > 0 or bool(link.mates)
    return (len(link.ranks) == 1 or link.are_told) and is_twice


def _is_launched_late(
    seen: Observations, link: SlowLink, least: float = STARVATION.starved_share
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


def _share_as_long(seen: Observations, link: SlowLink, links: list[SlowLink]) -> float:
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


def _are_at_one_place(seen: Observations, link: SlowLink, links: list[SlowLink]) -> bool:
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


def _are_parallel(seen: Observations, link: SlowLink, links: list[SlowLink]) -> bool:
    """Return whether other pairs between the two hosts of a slow pair are slow as well: then what
    the pairs share is slow, at either host or in between.
    """
    hosts_of = seen.members.hosts_of
    hosts = hosts_of(link.ranks)
    alike = [one for one in links if len(one.ranks) == 2 and hosts_of(one.ranks) == hosts]
    return len(link.ranks) == len(hosts) == 2 and len(alike) > 1


def _are_of_one_host(seen: Observations, link: SlowLink, links: list[SlowLink]) -> bool:
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


def _finding(seen: Observations, link: SlowLink, doubt: str) -> Finding:
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


def _subject(seen: Observations, link: SlowLink, rows: tuple[int, ...]) -> str:
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


def _evidence(seen: Observations, link: SlowLink) -> tuple[str, ...]:
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
        by_one = lost_ns <= LINKS.clock_errors * clock_error_ns(seen.alignment, seen, link.ranks)
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
