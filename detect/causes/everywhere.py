"""Find what slows the whole job, so that no rank stands out beside another.

Problem: every other search compares ranks, or connections. Where all ranks wait for their data by
turns, pause for their collectors in iterations of their own, or get uneven work in every pass, or
where all connections of a kind become slower, each looks like the others, and the job would be
called healthy at half its speed.

Idea: an iteration lasts as long as its slowest rank. What all would gain together is the longest
loss of each iteration, whoever's it is:

    cost = sum of iterations / sum of (iteration - longest loss in it)

Example, ms that ranks wait for their data; without, the job would be 1.5 times as fast:

                   iteration     1     2     3
        rank 0                  10    70    20
        rank 1                  60    15    10
        rank 2                  25    20    80
        longest                 60    70    80      210 of 630

Late data are the job's where ranks of several hosts take turns. Where one of them has the longest
waits, or all wait alike, nobody knows whether storage, the job's own loaders or somebody for whom
the others wait is the reason. Pauses of collectors are always the job's.

Hosts that stop all together now and then are told by the typical rank: for how much longer than in
a quiet iteration its device has nothing to do. It is said only where nothing else is found: what
the program itself does there (evaluation, a checkpoint, logging) looks the same as something else
on its host.

Uneven work is told by replay: the step in which passes (or transfers) last as long as they did on
each rank, over the step in which every operation takes its typical time on all ranks. It blames
nobody, and is said only where nothing else is.

**Connections.** A ring through all hosts, or the only group of a host, has no equal. If a NIC or
switch falls to half its speed at iteration 17, every connection of the kind is slower, and none
stands out. Such a kind is compared with itself. The iterations are split in two where that leaves
the least variance of the log transfer times, the median of the kind's connections in each:

    effect = median(after) - median(before)
    clear if quarter(after) - three quarters(before) >= effect / 2

and nearly all connections of the kind must have changed by as much. The bytes are the same before
and after, so no data explains it. The trace cannot tell which member is to blame, nor, between
hosts, whether others use the network: undecided. Example: an all-gather of 8 GPUs takes 1.1 ms
until iteration 16 and 8.6 ms from then on.

A link that flaps has two speeds: the iterations, sorted by their transfer times, have a gap of
effect / 2 and more somewhere. Any choice of as many iterations might have been the slow ones, so
the p-value is multiplied by the number of choices, C(all, slow).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.finding import (
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
    is_costly,
    ratio_without,
)
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import Longest, chance_of_mean, compare_within, peer_groups
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, percent, ranks_of, times
from detect.thresholds.bursts import BURSTS
from detect.thresholds.hosts import CHANGES
from detect.thresholds.networks import LINKS, NETWORKS
from detect.thresholds.statistics import POWER, SEARCH
from detect.thresholds.verdicts import EVERYWHERE
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed
from megascan.timeline import rows_alike

ADVICE_ON_DATA = (
    "give the loaders more workers and let them read further ahead (num_workers, "
    "prefetch_factor), then trace again",
    "time one loader alone on an idle host: if it is as slow there, read fewer and larger files, "
    "or copy them to local disks; if not, look at the storage that all share",
)
ADVICE_ON_COLLECTORS = (
    "call gc.freeze() when the model is built, gc.disable() before the loop, and gc.collect() on "
    "all ranks in the same iteration, every few hundred of them",
)
ADVICE_ON_STOPS = (
    "look at one of these iterations in the timeline: what the program does between its operations "
    "(evaluation, checkpoints, metrics) stands in its log at that time",
    "if it does nothing there, see what else runs on these hosts then: agents, cron jobs, page "
    "faults (pidstat -t 1, vmstat 1, /proc/pressure)",
)
ADVICE_ON_WORK = (
    "count what ranks get in a pass (tokens, lengths of documents, tokens of each expert), record "
    "it with the trace, and compare it with the passes that take long",
    "look at one iteration of the timeline: who arrives last changes from pass to pass",
)
ADVICE_ON_TRANSFERS = (
    "look at one iteration of the timeline: which transfers last longer than others of their kind, "
    "and between which hosts",
    "read the ports' error and congestion counters (ethtool -S, ibstat, perfquery) on these hosts",
)
STORAGE = (
    "ranks of several hosts take turns, so no single host is the reason: storage that all share, "
    "or loaders too slow for the job"
)
ONE_HOST = (
    "ranks take turns, so no single rank is the reason: loaders too slow for the job, the host on "
    "which they run, or storage elsewhere"
)
TOGETHER = (
    "all stand still together: the program does something there that no span shows, or something "
    "else holds up its hosts, or all wait where nothing is recorded for one of them"
)
SOMEBODY = (
    "the job's own loaders, storage that all share, or somebody for whom the others wait: which of "
    "them, the trace cannot tell"
)


@dataclass(frozen=True, kw_only=True)
class _Everywhere:
    """Time that a job loses in each of its iterations, whoever loses it."""

    longest_ns: Floats
    """(iteration,): of the rank that loses most."""
    typical_ns: Floats
    """(iteration,): of the median rank."""
    shares: Floats
    """(iteration,): the longest loss as a share of the mean iteration."""
    least_ratio: float
    """The least ratio that is worth saying."""

    @property
    def share(self) -> float:
        """Return what is lost of all time."""
        return float(self.shares.mean())

    @property
    def ratio(self) -> float:
        """Return the time of all iterations over what they would take without."""
        return ratio_without(self.share)

    @property
    def p_value(self) -> float:
        """Return how probable as high a share is in a job that loses a part of `least_ratio`."""
        return chance_of_mean(self.shares, (1.0 - 1.0 / self.least_ratio) * EVERYWHERE.proven_share)


def _lost_everywhere(inquiry: Inquiry, lost_ns: Floats, least_ratio: float) -> _Everywhere | None:
    """Return what the job loses, from what each of its ranks loses, (row, iteration); None where
    iterations without that would be hardly shorter, or differ too much to say so.
    """
    if len(inquiry.seen.iterations) < 2:
        return None
    found = _sum_of_longest(inquiry, lost_ns, least_ratio)
    return found if found is not None and found.p_value <= EVERYWHERE.chance else None


def _sum_of_longest(inquiry: Inquiry, lost_ns: Floats, least_ratio: float) -> _Everywhere | None:
    """Return what the longest loss of each of two or more iterations comes to, of what each of the
    ranks loses, (row, iteration); None where iterations without that would be hardly shorter.
    """
    longest_ns = lost_ns.max(axis=0)
    found = _Everywhere(
        longest_ns=longest_ns,
        typical_ns=np.median(lost_ns, axis=0),
        shares=longest_ns / float(np.mean(inquiry.seen.iteration_ns)),
        least_ratio=max(least_ratio, inquiry.settings.min_slowdown),
    )
    return found if found.ratio >= found.least_ratio else None


def _search_data(inquiry: Inquiry) -> Answer:
    """Say that the whole job waits for its data, and whether one host may be the reason."""
    seen = inquiry.seen
    lost_ns = np.nan_to_num(seen.lost(Cause.LOADER))
    if (lost_ns.max(axis=1) > 0).sum() < 2:  # whoever loads for all is told by who waits for it
        return Answer()
    in_turn = _take_turns(lost_ns)
    least_ratio = EVERYWHERE.data_ratio if in_turn else POWER.healthy_ratio
    lost = _lost_everywhere(inquiry, lost_ns, least_ratio)
    is_jobs = in_turn and _is_of_no_host(seen.members, lost_ns)
    if lost is None or (not is_jobs and _is_found(inquiry, Cause.LOADER)):
        return Answer()
    finding = _finding(
        seen,
        lost,
        cause=Cause.LOADER,
        owner=Owner.JOB if is_jobs else Owner.UNDECIDED,
        predicate="waits for its data",
        evidence=(
            _who_loses_most(seen, lost_ns),
            STORAGE if is_jobs else ONE_HOST if in_turn else SOMEBODY,
        ),
        advice=ADVICE_ON_DATA,
    )

    def explains(other: Finding) -> bool:
        is_undecided = other.cause is Cause.LOADER and other.owner is Owner.UNDECIDED
        return is_jobs and is_undecided

    return Answer(findings=(finding,), explains=explains)


def _is_found(inquiry: Inquiry, cause: Cause) -> bool:
    return any(one.cause is cause for one in inquiry.found)


def _take_turns(lost_ns: Floats) -> bool:
    """Return whether ranks take turns at losing most, (rank, iteration), so that no single one is
    the reason: none loses about as much as whoever loses most in most iterations.

    Not where all lose alike, nor where one always loses and another one as much now and then.
    """
    longest_ns = lost_ns.max(axis=0)
    is_near = lost_ns >= EVERYWHERE.near_share * longest_ns
    near = (is_near * longest_ns).sum(axis=1) / max(float(longest_ns.sum()), 1.0)
    return bool(near.max() <= EVERYWHERE.most_of_one)


def _is_of_no_host(members: Members, lost_ns: Floats) -> bool:
    """Return whether without any one host the ranks of the others would still lose a good part,
    (rank, iteration).
    """
    hosts = np.asarray(members.hosts)
    total = max(float(lost_ns.max(axis=0).sum()), 1.0)
    left = [float(lost_ns[hosts != one].max(axis=0, initial=0.0).sum()) for one in set(hosts)]
    return min(left) / total >= EVERYWHERE.left_share


def _search_pauses(inquiry: Inquiry) -> Answer:
    """Say that the collectors of all ranks stop the job, each in iterations of its own."""
    seen = inquiry.seen
    lost_ns = np.nan_to_num(seen.lost(Cause.GC))
    lost = _lost_everywhere(inquiry, lost_ns, EVERYWHERE.pauses_ratio)
    if lost is None or _is_found(inquiry, Cause.GC):
        return Answer()
    finding = _finding(
        seen,
        lost,
        cause=Cause.GC,
        owner=Owner.JOB,
        predicate="stands still for garbage collection",
        evidence=(_who_loses_most(seen, lost_ns), "every rank waits for whoever collects"),
        advice=ADVICE_ON_COLLECTORS,
    )
    return Answer(findings=(finding,))


def _search_stops(inquiry: Inquiry) -> Answer:
    """Say that all devices have nothing to do at once now and then, where nothing else was found.

    Not on CPUs, where processes take time from each other by chance.
    """
    seen = inquiry.seen
    if inquiry.found or seen.members.device_kind == "cpu":
        return Answer()
    lost_ns = np.nan_to_num(seen.lost(Cause.HOST))
    quiet_ns = np.quantile(lost_ns, BURSTS.quiet_share, axis=1, keepdims=True)
    typical_ns = np.median(np.maximum(lost_ns - quiet_ns, 0.0), axis=0, keepdims=True)
    stops = typical_ns[0] >= CHANGES.lost_share * seen.iteration_ns
    if int(stops.sum()) < CHANGES.min_long:
        return Answer()
    lost = _sum_of_longest(inquiry, typical_ns, EVERYWHERE.pauses_ratio)
    if lost is None:
        return Answer()
    finding = _finding(
        seen,
        lost,
        cause=Cause.HOST,
        owner=Owner.UNDECIDED,
        predicate=f"stands still in {int(stops.sum())} of {counted(len(stops), 'iteration')}, with "
        "nothing to do on its devices,",
        evidence=(
            f"in iterations {listed(seen.iterations[stops].tolist())}, beyond the "
            f"{milliseconds(float(np.median(quiet_ns)))} for which it stands still in a quiet one",
            TOGETHER,
        ),
        advice=ADVICE_ON_STOPS,
    )
    return Answer(findings=(finding,))


def _who_loses_most(seen: Observations, lost_ns: Floats) -> str:
    """Say how many ranks lose most in one iteration or another, and which one does most often."""
    active = lost_ns.max(axis=0) > 0
    rows, counts = np.unique(lost_ns.argmax(axis=0)[active], return_counts=True)
    most = int(np.argmax(counts))
    return (
        f"{len(rows)} of {len(seen.members)} ranks lose most of it in one iteration or another, "
        f"{ranks_of(seen.members, int(rows[most]))} most often: in {counts[most]} of "
        f"{int(active.sum())}"
    )


def _finding(
    seen: Observations,
    lost: _Everywhere,
    *,
    cause: Cause,
    owner: Owner,
    predicate: str,
    evidence: tuple[str, ...],
    advice: tuple[str, ...],
) -> Finding:
    """Report what the whole job loses; no rank is named."""
    effect = float(np.log(lost.ratio))
    longest, typical = (
        milliseconds(float(one.mean())) for one in (lost.longest_ns, lost.typical_ns)
    )
    each = (
        f"on the mean that is {longest} of an iteration of "
        f"{milliseconds(float(np.mean(seen.iteration_ns)))}"
    )
    if typical != longest:
        each += f", on whichever rank loses most, and {typical} on the typical rank"
    return build_finding(
        seen,
        Claim(
            ranks=(),
            rows=(),
            cause=cause,
            owner=owner,
            slowdown=lost.ratio,
            interval=interval_of_ratio(effect, robust.standard_error(lost.shares) * lost.ratio),
            course=None,
            q_value=lost.p_value,
            num_peers=len(seen.members),
            saved_ns=lost.longest_ns,
            subject="the whole job",
            predicate=f"{predicate} for {percent(1.0 + lost.share)} of its time",
            evidence=(each, *evidence),
            advice=advice,
            is_replayed=False,
        ),
    )


def _search_uneven(inquiry: Inquiry) -> Answer:
    """Say that ranks take unlike times for the same work in most iterations, now one and now
    another, where nothing else was found.
    """
    seen = inquiry.seen
    if inquiry.found or seen.costs is None or not seen.tells_passes:
        return Answer()
    uneven = seen.costs.unevenness((int(seen.iterations[0]), int(seen.iterations[-1])))
    if uneven is None:
        return Answer()
    kinds = (uneven.computing, _WORK), (uneven.transfers, _TRANSFERS)
    ratio, words = max(kinds, key=lambda kind: float(np.median(kind[0])))
    if float(np.median(ratio)) < max(EVERYWHERE.uneven_ratio, inquiry.settings.min_slowdown):
        return Answer()
    return Answer(findings=(_uneven_finding(seen, ratio, words),))


NONE_IS_LONGEST = "though none of a rank's are always the longest"
LOOK_FIRST = "what sound ranks differ by here may explain that rank, or not: look there first"


@dataclass(frozen=True, kw_only=True)
class _Words:
    """How a finding speaks of what is uneven."""

    what: str
    reason: str
    advice: tuple[str, ...]


_WORK = _Words(
    what="passes",
    reason="documents of unlike length do this, experts that get more tokens than others, or "
    "devices that vary",
    advice=ADVICE_ON_WORK,
)
_TRANSFERS = _Words(
    what="transfers",
    reason="a network that is busy or slow now and then does this, or one that is slow for some",
    advice=ADVICE_ON_TRANSFERS,
)


def _uneven_finding(seen: Observations, ratio: Floats, words: _Words) -> Finding:
    """Report uneven work by its `ratio`, (iteration,). No rank is blamed: where one is the longest
    nearly always, what sound ranks differ by may explain it, or others would have named it.
    """
    typical, logs = float(np.median(ratio)), np.log(ratio)
    longest = _always_longest(seen, float(np.log(typical))) if words is _WORK else None
    rows = (longest.row,) if longest else ()
    whose = _whose_are_longest(seen.members, longest) if longest else NONE_IS_LONGEST
    least = float(np.log(EVERYWHERE.uneven_ratio)) * EVERYWHERE.proven_share
    return build_finding(
        seen,
        Claim(
            ranks=seen.members.ranks_of(np.array(rows, dtype=np.int64)),
            rows=rows,
            cause=Cause.UNKNOWN,
            owner=Owner.UNDECIDED,
            slowdown=typical,
            interval=interval_of_ratio(float(np.log(typical)), robust.standard_error(logs)),
            course=None,
            q_value=chance_of_mean(logs, least),
            num_peers=len(seen.members),
            saved_ns=seen.iteration_ns * (1.0 - 1.0 / typical),
            subject=f"the {words.what} of the job",
            predicate=f"are uneven, {whose}: they make the step {times(typical)} as long",
            evidence=(
                f"the typical step, replayed with all {words.what} as they were, over one in which "
                "operations take their typical time on all ranks",
                words.reason,
                *((LOOK_FIRST,) if longest else ()),
            ),
            advice=words.advice,
            is_replayed=False,
        ),
    )


def _always_longest(seen: Observations, effect: float) -> Longest | None:
    """Return the row whose passes are nearly always longer than its peers', by half of what they
    make the step longer, log, and more; None where there is none.
    """
    nobody = np.zeros(len(seen.members), dtype=bool)
    groups = peer_groups(seen.work, seen.members)
    longest = Longest.of(compare_within(seen.work, seen.members, groups, nobody).value)
    is_why = longest.level >= EVERYWHERE.longest_share * effect
    return longest if longest.lasts and is_why else None


def _whose_are_longest(members: Members, longest: Longest) -> str:
    """Say whose passes are nearly always the longest, as part of a sentence."""
    return (
        f"those of {ranks_of(members, longest.row)} longer than its peers' in {longest.num_above} "
        f"of {counted(longest.num_known, 'iteration')} ({times(float(np.exp(longest.level)))})"
    )


BETWEEN_HOSTS = (
    "the network of any of these hosts may be slow then, or others use it: the trace cannot tell"
)


SLOWER_TOGETHER = (
    "all connections of the kind become slower together, so none stands out beside others"
)
OF_ONE_HOST = (
    "the job runs on this host alone, and messages of one size take longer from then on to the "
    "end: its NVLinks or switches, whichever of its devices it is"
)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A kind of transfers that is slower in some iterations than in the others."""

    units: Integers
    """Rows of the transfers."""
    active: Flags
    """(iteration,): the slow ones."""
    effect: float
    error: float
    p_value: float
    usual_ns: float
    """Time of one transfer in the other iterations."""

    @property
    def lasts(self) -> bool:
        """Return whether the kind stays slow from its first slow iteration on."""
        return bool(self.active[int(np.argmax(self.active)) :].all())


def _search_links(inquiry: Inquiry) -> Answer:
    """Report the one kind that loses most time.

    A kind that is slow now and then must lose as large a share of the step as long iterations must
    to be reported (`CHANGES.lost_share`).
    """
    seen, transfers = inquiry.seen, inquiry.seen.transfers
    if transfers is None or seen.members.device_kind == "cpu":
        return Answer()
    kinds = rows_alike(transfers.kind)
    large = [one for one in kinds if transfers.size_bytes[one[0]] >= NETWORKS.min_bytes]
    step_ns, rate = float(np.median(seen.iteration_ns)), inquiry.settings.false_discovery_rate
    found = []
    for units in large:
        change = _change_of_kind(transfers, units)
        if change is None or change.p_value * len(large) > rate:
            continue
        lost_ns = _lost_by(transfers, change)
        least_share = NETWORKS.min_step_share if change.lasts else CHANGES.lost_share
        if lost_ns.mean() >= least_share * step_ns:
            found.append((change, lost_ns))
    if not found:
        return Answer()
    worst, lost_ns = max(found, key=lambda one: float(one[1].mean()))
    return Answer(findings=(_slower_links(seen, worst, lost_ns, len(large)),))


def _change_of_kind(transfers: Transfers, units: Integers) -> _Change | None:
    """Return when a kind is slower; None where it never is, or not as a whole."""
    log_ns = robust.log_of(transfers.transfer_ns[units])
    level = robust.median(log_ns, axis=0)
    num = len(level)
    if num < 2 * SEARCH.min_own_iterations or not np.isfinite(level).all():
        return None
    split = _split_in_time(level) or _two_speeds(level)
    if split is None:
        return None
    active, num_choices = split
    slow, others = level[active], level[~active]
    effect = float(np.median(slow) - np.median(others))
    change = robust.median(log_ns[:, active], axis=1) - robust.median(log_ns[:, ~active], axis=1)
    if np.mean(change >= effect / 2) < LINKS.all_of_a_rank_share:
        return None
    spread = max(float(np.hypot(others.std(), slow.std())), LINKS.noise_log)
    error = spread * float(np.sqrt(1 / len(others) + 1 / len(slow)))
    return _Change(
        units=units, active=active, effect=effect, error=error,
        p_value=num_choices * float(special.stdtr(num - 2.0, -effect / error)),
        usual_ns=float(np.exp(np.median(others))),
    )  # fmt: skip


def _split_in_time(level: Floats) -> tuple[Flags, float] | None:
    """Return the iterations from the largest rise of log times, (iteration,), on, and how many
    places the rise might have had; None where it is small next to what times vary by.
    """
    num = len(level)
    splits = range(LINKS.min_before, num - SEARCH.min_own_iterations + 1)
    first = min(splits, key=lambda one: level[:one].var() * one + level[one:].var() * (num - one))
    before, after = level[:first], level[first:]
    effect = float(np.median(after) - np.median(before))
    apart = np.quantile(after, NETWORKS.outer_share) - np.quantile(before, 1 - NETWORKS.outer_share)
    if effect < np.log(NETWORKS.min_scaled_slowdown) or apart < effect / 2:
        return None
    return np.arange(num) >= first, float(len(splits))


def _two_speeds(level: Floats) -> tuple[Flags, float] | None:
    """Return the slow iterations of log times, (iteration,), with two levels, and how many choices
    of as many iterations there are; None where no gap between sorted times is wide enough.
    """
    least = SEARCH.min_own_iterations
    ascending = np.sort(level)
    gaps = np.diff(ascending)[least - 1 : len(level) - least]
    num_quick = int(np.argmax(gaps)) + least
    quick, slow = ascending[:num_quick], ascending[num_quick:]
    effect = float(np.median(slow) - np.median(quick))
    if effect < np.log(NETWORKS.min_scaled_slowdown) or gaps.max() < effect / 2:
        return None
    return level >= slow[0], float(special.comb(len(level), len(slow)))


def _lost_by(transfers: Transfers, change: _Change) -> Floats:
    """Return the transfer time that a rank loses to a change in each iteration, (iteration,)."""
    units = change.units
    mean_ns = robust.mean(transfers.transfer_ns[units], axis=1)
    times_an_iteration = float(np.median(transfers.total_ns[units] / mean_ns))
    lost_ns = times_an_iteration * change.usual_ns * np.expm1(change.effect)
    return np.where(change.active, lost_ns, 0.0)


def _slower_links(seen: Observations, change: _Change, lost_ns: Floats, num_kinds: int) -> Finding:
    assert seen.transfers is not None
    transfers, members = seen.transfers, seen.members
    ranks = tuple(sorted({rank for unit in change.units for rank in transfers.members[unit]}))
    is_inside = members.are_inside_a_host(ranks)
    of_one_host = is_inside and change.lasts and len(ranks) == len(members.recorded)
    slowdown, active = float(np.exp(change.effect)), change.active
    rows = members.rows_with(ranks)
    kind = transfers.kinds[int(transfers.kind[change.units[0]])]
    where = f"inside host {members.hosts[rows[0]]}".rstrip() if is_inside else "between hosts"
    count = f"{int(active.sum())} of {counted(len(active), 'iteration')}"
    why = (OF_ONE_HOST,) if of_one_host else (SLOWER_TOGETHER, *[BETWEEN_HOSTS] * (not is_inside))
    then, before, than = "from then on", "before", "before"
    if not change.lasts:
        then, before, than = f"in {count}", "in the others", "in other iterations"
    evidence = (
        f"one {kind} takes {milliseconds(change.usual_ns * slowdown)} {then} against "
        f"{milliseconds(change.usual_ns)} {before}, counted from the last member's arrival"
    )
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE if of_one_host else Owner.UNDECIDED,
            slowdown=slowdown,
            interval=interval_of_ratio(change.effect, change.error),
            course=Course.of(active, change.effect, change.error),
            q_value=min(1.0, change.p_value * num_kinds),
            num_peers=0,
            saved_ns=lost_ns,
            subject=f"communication {where} (ranks {listed(ranks)})",
            predicate=f"transfers {times(slowdown)} slower than {than}",
            evidence=(evidence, *why),
            advice=connection_advice(seen, ranks),
            is_replayed=False,
        ),
    )  # fmt: skip


LATE_DATA = CauseSpec(cause=Cause.LOADER, search=_search_data)
PAUSES = CauseSpec(cause=Cause.GC, search=_search_pauses)
STOPS = CauseSpec(cause=Cause.HOST, search=_search_stops)
UNEVEN = CauseSpec(cause=Cause.UNKNOWN, search=_search_uneven)


def _search_unsplit(inquiry: Inquiry) -> Answer:
    """Say that the trace cannot tell waiting from transfer in much of the communication; nothing
    where the iteration would be hardly shorter without what goes on alone.

    Not of rank files of CPUs: their asynchronous communication has no end that can be timed.
    """
    seen = inquiry.seen
    is_untimed = seen.tells_passes and seen.members.device_kind == "cpu"
    if seen.unsplit_ns is None or is_untimed or len(seen.members) < 2:
        return Answer()
    share = float(np.median(seen.unsplit_ns / np.maximum(seen.iteration_ns, 1.0)))
    if ratio_without(share) < POWER.caveat_ratio:
        return Answer()
    text = (
        f"communication in which waiting cannot be told from transfer takes {share:.0%} of the "
        "iteration: a slow link, or somebody for whom others wait in it, would not be seen"
    )
    return Answer(hides=text) if is_costly(share) else Answer(caveat=text)


UNSPLIT = CauseSpec(cause=Cause.LINK, search=_search_unsplit)
CHANGED_LINKS = CauseSpec(cause=Cause.LINK, search=_search_links)
