"""Say what the step itself shows where no other search has said why.

Every other search compares one kind of time of a rank, host or link with that of others. In two
cases none of these searches finds anything though the job is not healthy. In a third one all wait
for one rank in all iterations (`detect.causes.awaited`).

**The step became longer.** Some faults slow all ranks alike: the only TP group of a job, a busy
host for which the others wait inside passes that nobody recorded in parts. Then no rank stands out
in any comparison; but iterations 1 to 5 took 104 ms, and the later ones take 260. The trace is then
compared with its own earlier iterations. Log step times are split where they rise most, by the t of
two samples, whose p-value is multiplied by the number of splits:

    before                  since                rise = mean(since) - mean(before)
    104 105 106 104   |   261 258 269 270        most of `since` lie rise / 2 above most of `before`

Then each kind of time is checked: did it rise at the same iteration, by enough to explain the step?

    gaps of a host   on all its ranks, on none elsewhere     the host: nothing else holds back its
                                                             launches since then
    passes           of one stage, on one rank               its node: all stages have the same
                                                             data, and work as much as before
    passes           of most ranks                           their data, or a device that all wait
                                                             for inside their passes: undecided
    nothing                                                  undecided, too

Transfers that became slower have a search of their own (`detect.causes.everywhere`).

**All wait for one now and then.** Two of seven iterations that take 1.7 times as long are too few
for a search of levels or of bursts, and may be mere chance. But where the own time of one rank,
host or group grew by as much as the step in nearly all long iterations, while the others waited,
that is where to look. Why it grew is not shown: undecided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from detect.causes.device import HOST_ADVICE
from detect.causes.finding import (
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    is_costly,
    ratio_without,
)
from detect.causes.launching import starvation
from detect.causes.searches import ADVICE
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.search import interval_of_ratio
from detect.stats.stretches import Course, episodes_of
from detect.text import counted, milliseconds, ranks_text, subject_of, times
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.hosts import CHANGES, HOSTS
from detect.thresholds.statistics import POWER, SEARCH
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

LONGER_OR_ONE = (
    "longer sequences since then, lower clocks of all, or one slow device that the others wait for "
    "inside their passes: any of them would look like this"
)
ONE_OR_ALL = (
    "all passes got as many tokens before and since, so no data are longer: lower clocks of all, "
    "or one slow device that the others wait for inside their passes"
)
NOTHING_ELSE = (
    "neither the gaps of one host nor the passes of ranks grew by enough to be why: what took the "
    "time may not be recorded"
)
COMPARE = (
    "compare the time before with the time since: megascan diff on two traces, or the timeline at "
    "that iteration",
    "look into what happened then: logs of scheduler, network and hosts (dmesg, NCCL, switch "
    "ports), throttle reasons, a change of data or batch size",
)
NOW_AND_THEN = (
    "look at one of these iterations in the timeline: a pause between its operations is its "
    "process or host, longer operations are its device, or longer data",
    "read throttle reasons and clocks of its device, and what else ran on its host (checkpoints, "
    "other jobs, page faults); trace more iterations in a row to see how often it comes back",
)
GROWS = {
    Cause.COMPUTE: "passes",
    Cause.HOST: "gaps between operations",
    Cause.LOADER: "waits for batches",
    Cause.GC: "collections of garbage",
}
"""What each kind of a rank's own time is called in the evidence."""


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """Since when the step is longer, and by how much."""

    course: Course
    """The iterations since the change; the effect is the rise of the log step time."""
    p_value: float

    @property
    def num_before(self) -> int:
        """Return the number of iterations before the change."""
        return self.course.episodes[0][0]

    def rise(self, value: Floats) -> Floats:
        """Return by how much the median over iterations, the last axis of `value`, rose."""
        before, since = value[..., : self.num_before], value[..., self.num_before :]
        return np.asarray(robust.median(since, axis=-1) - robust.median(before, axis=-1))


@dataclass(frozen=True, kw_only=True)
class _Explanation:
    """What rose at the same place as the step."""

    cause: Cause
    owner: Owner
    rows: Integers
    q_value: float
    subject: str
    predicate: str
    evidence: tuple[str, ...]
    advice: tuple[str, ...]
    slower_log: float | None = None
    """Log slowdown of these rows themselves; None where only that of the step is known."""


def step_change(iteration_ns: Floats, settings: DetectorSettings) -> StepChange | None:
    """Return where step times, (iteration,), rise most for good; None where they do not.

    The later part has at least `settings.min_iterations` iterations. The earlier part has at least
    two: the first iteration of a profile starts with empty queues and is quicker than the rest.
    """
    log_ns, length = np.log(np.maximum(iteration_ns, 1.0)), len(iteration_ns)
    firsts = np.arange(SEARCH.min_own_iterations, length - settings.min_iterations + 1)
    if not len(firsts):
        return None
    parts = [(log_ns[:first], log_ns[first:]) for first in firsts]
    rises = np.array([since.mean() - before.mean() for before, since in parts])
    within = [before.var() * len(before) + since.var() * len(since) for before, since in parts]
    sigma = np.maximum(np.sqrt(np.array(within) / (length - 2)), CHANGES.step_noise_log)
    errors = sigma * np.sqrt(1.0 / firsts + 1.0 / (length - firsts))
    place = int(np.argmax(rises / errors))
    rise, error = float(rises[place]), float(errors[place])
    before, since = parts[place]
    p_value = float(special.stdtr(length - 2.0, -rise / error)) * len(parts)
    outer = CHANGES.outer_share
    highest = np.quantile(before, 1.0 - outer, method="higher")
    is_apart = np.quantile(since, outer) - highest >= rise / 2
    is_sure = p_value <= settings.false_discovery_rate
    if rise < np.log(CHANGES.least_ratio) or not (is_sure and is_apart):
        return None
    first = int(firsts[place])
    course = Course.of(np.arange(length) >= first, rise, error)
    return StepChange(course=course, p_value=p_value)


def _host_that_lags(seen: Observations, change: StepChange, rate: float) -> _Explanation | None:
    """Return the host on all of whose ranks the gaps between operations grew, while they grew on no
    rank of other hosts; None where there is no such host.

    If all n ranks were alike, the host's k ranks would be the top k with probability 1 / C(n, k).

    Example: on the 8 ranks of host 0 the gaps between operations grow from 0.1 to 0.4 ms an
    iteration, on the 8 of host 1 they stay at 0.1. Host 0 is named, though its ranks' passes are as
    long as those of host 1, whose ranks wait for them in the all-gathers of FSDP.
    """
    names, host = np.unique(seen.members.hosts, return_inverse=True)
    rise = change.rise(np.log(np.maximum(seen.lost(Cause.HOST), CHANGES.least_gap_ns)))
    if not np.isfinite(rise).all():
        return None
    for number, name in enumerate(names.tolist()):
        own = host == number
        num_own, num_others = int(own.sum()), int((~own).sum())
        if min(num_own, num_others) < HOSTS.min_ranks:
            continue
        least = float(rise[own].min())
        if least < np.log(CHANGES.gap_ratio) or rise[~own].max() > CHANGES.elsewhere_share * least:
            continue
        ratio = float(np.exp(np.median(rise[own])))
        chance = len(names) / float(special.comb(num_own + num_others, num_own))
        q_value = min(1.0, max(change.p_value, chance))
        ranks = seen.members.ranks_of(np.flatnonzero(own))
        return _Explanation(
            cause=Cause.HOST,
            owner=Owner.NODE if q_value <= rate else Owner.UNDECIDED,
            rows=np.flatnonzero(own),
            q_value=q_value,
            subject=f"host {name} (ranks {listed(ranks)})",
            predicate="holds back its ranks, for which all wait",
            evidence=(
                f"the gaps between operations are {times(ratio)} as long since then on the median "
                f"of its {counted(num_own, 'rank')}, and "
                f"{times(float(np.exp(least)))} at least; on the "
                f"{num_others} others {times(float(np.exp(rise[~own].max())))} at most",
            ),
            advice=HOST_ADVICE,
        )
    return None


def _longer_on_one_stage(
    seen: Observations, change: StepChange, rise: Floats
) -> _Explanation | None:
    """Return the row whose passes alone rose at the change, if other stages compute the same
    microbatches as quickly as before; None where there is none, or a router sends tokens to
    experts. `rise` (row,) is that of each row's passes at the change, log.

    Example: a pipeline of four ranks. Since iteration 21 the passes of the last one take 1.50 times
    as long, those of the others 1.00 times, and the step 1.29 times.
    """
    members = seen.members
    row = int(np.argmax(rise))
    same_data = members.other_stages(row)
    elsewhere = float(np.delete(rise, row).max(initial=0.0))
    is_alone = (
        rise[row] >= change.course.effect and elsewhere <= CHANGES.elsewhere_share * rise[row]
    )
    if members.layout.ep > 1 or not same_data.any() or not is_alone:
        return None
    starved = starvation(seen, row, change.course.active, float(rise[row]))
    ratio, others = times(float(np.exp(rise[row]))), times(float(np.exp(elsewhere)))
    return _Explanation(
        cause=Cause.COMPUTE if starved is None else Cause.HOST,
        owner=Owner.NODE if len(members.workers[row]) == 1 else Owner.UNDECIDED,
        rows=np.array([row]),
        q_value=min(1.0, change.p_value),
        subject=subject_of(members, row),
        predicate=f"takes {ratio} as long for its passes as before, and all wait for it,",
        evidence=(
            f"the passes of the other stages, with the same microbatches, take {others} as long as "
            "before at most: neither are data longer, nor does a stage get more to do",
            *(starved[1:] if starved else ()),
        ),
        advice=ADVICE[Cause.COMPUTE] if starved is None else HOST_ADVICE,
        slower_log=float(rise[row]),
    )


def _longer_on_most(seen: Observations, change: StepChange, rise: Floats) -> _Explanation | None:
    """Return the ranks whose passes rose by half of the step's rise or more; `rise` (row,), log."""
    rows = np.flatnonzero(rise >= CHANGES.explains_share * change.course.effect)
    if len(rows) < HOSTS.min_ranks:
        return None
    members = seen.members
    ratio = float(np.exp(np.median(rise[rows])))
    return _Explanation(
        cause=Cause.COMPUTE,
        owner=Owner.UNDECIDED,
        rows=rows,
        q_value=min(1.0, change.p_value),
        subject=f"{counted(len(rows), 'rank')} of {len(members)}",
        predicate=f"compute {times(ratio)} slower than before",
        evidence=(ONE_OR_ALL if seen.rules_data_out else LONGER_OR_ONE,),
        advice=COMPARE,
    )


def _nothing_else(change: StepChange) -> _Explanation:
    return _Explanation(
        cause=Cause.UNKNOWN,
        owner=Owner.UNDECIDED,
        rows=np.zeros(0, dtype=np.int64),
        q_value=min(1.0, change.p_value),
        subject="the step",
        predicate=f"takes {times(float(np.exp(change.course.effect)))} as long as before, while "
        "nobody stands out,",
        evidence=(NOTHING_ELSE,),
        advice=COMPARE,
    )


def _no_health(seen: Observations, change: StepChange) -> Answer:
    """Refuse health to a job whose step became longer for good by a reason that was not found."""
    ratio, first = float(np.exp(change.course.effect)), int(seen.iterations[change.num_before])
    if ratio < POWER.healthy_ratio:
        return Answer()
    text = (
        f"since iteration {first} the step takes {times(ratio)} as long as before, while nobody "
        "stands out: what else runs on these cores since then, or what was not recorded"
    )
    return Answer(notes=(text,), hides=text)


def _change_finding(seen: Observations, change: StepChange, one: _Explanation) -> Finding:
    course = change.course
    effect = course.effect if one.slower_log is None else one.slower_log
    before, since = (
        float(np.median(seen.iteration_ns[part])) for part in (~course.active, course.active)
    )
    return build_finding(
        seen,
        Claim(
            ranks=seen.members.ranks_of(one.rows),
            rows=tuple(one.rows.tolist()),
            cause=one.cause,
            owner=one.owner,
            slowdown=float(np.exp(effect)),
            interval=interval_of_ratio(effect, course.standard_error),
            course=course,
            q_value=one.q_value,
            num_peers=len(seen.members) - len(one.rows),
            saved_ns=np.where(course.active, np.maximum(seen.iteration_ns - before, 0.0), 0.0),
            subject=one.subject,
            predicate=one.predicate,
            evidence=(
                f"the step took {milliseconds(before)} before and takes {milliseconds(since)} "
                "since then, on the median",
                *one.evidence,
            ),
            advice=one.advice,
            is_replayed=False,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _LongIterations:
    """Iterations that take far longer than the usual iteration."""

    active: Flags
    """(iteration,): the long ones."""
    usual_ns: float
    """Time of the usual iteration."""
    excess_ns: Floats
    """(iteration,): time beyond the usual iteration; 0 where the iteration is not long."""
    lost_share: float
    """Excess of all long iterations as a share of all time."""
    ratio: float
    """Time of the longest iteration over the usual one."""

    @property
    def text(self) -> str:
        """Return how many iterations are long and what they cost, as part of a sentence."""
        number = int(self.active.sum())
        take, lose = ("takes", "loses") if number == 1 else ("take", "lose")
        return (
            f"{number} of {counted(len(self.active), 'iteration')} {take} up to "
            f"{times(self.ratio)} the usual step and {lose} {self.lost_share:.0%} of all time"
        )


def _long_iterations(seen: Observations) -> _LongIterations | None:
    """Return the iterations that are far longer than the usual one.

    None where they cost little, or where checkpoints or known losses of ranks (GC, loader, host)
    explain half of the excess. Example: 3 of 20 steps of 100 ms take 200 ms: 300 of 2,300 ms are
    lost, 13 %.
    """
    iteration_ns, usual = seen.iteration_ns, _usual_iteration_ns(seen.iteration_ns)
    is_long = iteration_ns > CHANGES.long_ratio * usual
    excess_ns = np.where(is_long, iteration_ns - usual, 0.0)
    lost = _share_of_all_time(seen, excess_ns)
    # ranks collect one after the other, so their pauses add up
    known_ns = float(np.nan_to_num(seen.lost(Cause.GC))[:, is_long].sum())
    known_ns += sum(
        float(np.nan_to_num(seen.lost(cause)).max(axis=0)[is_long].sum())
        for cause in (Cause.LOADER, Cause.HOST)
    )
    if seen.saving_ns is not None:
        known_ns += float(seen.saving_ns.max(axis=0)[is_long].sum())
    if lost < CHANGES.lost_share or known_ns >= CHANGES.explains_share * float(excess_ns.sum()):
        return None
    return _LongIterations(
        active=is_long,
        usual_ns=usual,
        excess_ns=excess_ns,
        lost_share=lost,
        ratio=float(iteration_ns.max()) / max(usual, 1.0),
    )


def _share_of_all_time(seen: Observations, lost_ns: Floats) -> float:
    """Return (iteration,) times as a share of the time of all iterations."""
    return float(lost_ns.sum()) / max(float(seen.iteration_ns.sum()), 1.0)


def _usual_iteration_ns(iteration_ns: Floats) -> float:
    """Return the time of the usual iteration: the median, or that of the shorter half where the
    median lies between two kinds. Example: of 83, 83, 585 and 617 ms it is 83, not 334.
    """
    usual = float(np.median(iteration_ns))
    ratio = CHANGES.long_ratio
    is_near = (iteration_ns <= ratio * usual) & (ratio * iteration_ns >= usual)
    shorter = iteration_ns[iteration_ns < usual]
    return usual if is_near.any() or not len(shorter) else float(np.median(shorter))


def _kept_waiting_by(seen: Observations, long: _LongIterations) -> Integers:
    """Return the rows for which all others wait in the long iterations.

    These are one row, or rows of one host or one process group; none where different rows hold up
    different long iterations. A row's own time is what is left of an iteration without its waiting.
    A row holds up a long iteration if its own time grows by half of the excess or more.

    Example, own times in ms: rank 0 holds up the job in both long iterations.

                    usual    iteration 7    iteration 16
        step        262      453            454
        rank 0      253      443            444
        rank 1      180      181            182
    """
    nobody = np.zeros(0, dtype=np.int64)
    if seen.waiting_ns is None or int(long.active.sum()) < CHANGES.min_long:
        return nobody
    own_ns = seen.iteration_ns - seen.waiting_ns
    grown_ns = own_ns - _usual(own_ns, long.active)
    holds_up = grown_ns >= CHANGES.explains_share * long.excess_ns
    share = holds_up[:, long.active].mean(axis=1)
    rows = np.flatnonzero(share >= CHANGES.mostly_share)
    others = np.delete(share, rows)
    is_few = 0 < len(rows) <= len(others)
    if not is_few or others.max() > 1.0 - CHANGES.mostly_share or not _stand_together(seen, rows):
        return nobody
    return rows


def _stand_together(seen: Observations, rows: Integers) -> bool:
    """Return whether the rows are one row, or all of one host, or of one process group (they differ
    in one coordinate only).
    """
    members = seen.members
    num_axes = sum(len(np.unique(place[rows])) > 1 for place in members.place.values())
    return num_axes <= 1 or len({members.hosts[row] for row in rows.tolist()}) == 1


def _long_finding(seen: Observations, long: _LongIterations, rows: Integers) -> Finding:
    members, active = seen.members, long.active
    ranks = members.ranks_of(rows)
    excess = np.log1p(long.excess_ns[active] / long.usual_ns)
    effect = float(robust.median(excess))
    error = float(np.std(excess) / np.sqrt(len(excess)))
    subject = f"ranks {listed(ranks)}"
    if len(rows) == 1:
        subject = subject_of(members, int(rows[0]))
    cause, why = _what_grew(seen, long, rows)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows.tolist()),
            cause=cause,
            owner=Owner.UNDECIDED,
            slowdown=float(np.exp(effect)),
            interval=interval_of_ratio(effect, error),
            course=Course(active, effect, error, 1.0, episodes_of(active)),
            # some rows always hold up the first long iteration; that the same rows hold up the
            # others as well is what counts
            q_value=float((len(rows) / len(members)) ** (int(active.sum()) - 1)),
            num_peers=len(members) - len(rows),
            saved_ns=long.excess_ns,
            subject=subject,
            predicate=f"{'hold' if len(rows) > 1 else 'holds'} up all others",
            evidence=(f"{long.text}; all others wait longer in them", why),
            advice=NOW_AND_THEN,
            is_replayed=False,
        ),
    )


def _what_grew(seen: Observations, long: _LongIterations, rows: Integers) -> tuple[Cause, str]:
    """Return which kind of time of these rows grew by half of the excess or more, and say so;
    `Cause.UNKNOWN` where none did.
    """
    active, kinds = long.active, {Cause.COMPUTE: seen.busy_ns, **seen.lost_ns}
    own_ns = {cause: np.nan_to_num(kinds[cause][rows]) for cause in GROWS if cause in kinds}
    grown = {
        cause: float(robust.median(one[:, active] - _usual(one, active)))
        for cause, one in own_ns.items()
    }
    cause = max(grown, key=lambda one: grown[one], default=Cause.UNKNOWN)
    excess_ns = float(np.median(long.excess_ns[active]))
    if grown.get(cause, 0.0) < CHANGES.explains_share * excess_ns:
        return Cause.UNKNOWN, (
            "neither passes nor gaps between operations grew by as much: transfers did, or "
            "what was not recorded"
        )
    usual = milliseconds(float(_usual(own_ns[cause], active).max()))
    now = milliseconds(float(np.median(own_ns[cause][:, active].max(axis=0))))
    return cause, f"{GROWS[cause]} take {now} there, otherwise {usual}"


def _usual(time_ns: Floats, active: Flags) -> Floats:
    """Return the median of `time_ns`, (row, iteration), over inactive iterations, (row, 1)."""
    return np.asarray(robust.median(time_ns[:, ~active], axis=1)[:, None])


def _search_changes(inquiry: Inquiry) -> Answer:
    """Report a step that became longer, or long iterations, only where nobody was named.

    On CPUs, where processes take time from each other by chance, a longer step is nobody's finding;
    but a job whose step is far longer since is not called healthy.
    """
    seen = inquiry.seen
    if inquiry.named.any():
        return Answer()
    change = step_change(seen.iteration_ns, inquiry.settings)
    if seen.members.device_kind == "cpu":
        return _logged(seen, _saves(seen)) if change is None else _no_health(seen, change)
    if change is None:
        return _search_long(seen)
    rate = inquiry.settings.false_discovery_rate
    # ask for the host first: ranks that wait for it have longer passes
    rise = np.nan_to_num(change.rise(robust.median(seen.work.log_ns, axis=2)))
    why = (
        _host_that_lags(seen, change, rate)
        or _longer_on_one_stage(seen, change, rise)
        or _longer_on_most(seen, change, rise)
        or _nothing_else(change)
    )
    return Answer(findings=(_change_finding(seen, change, why),))


def _search_long(seen: Observations) -> Answer:
    """Name who holds up the job in its long iterations, or just say that some are long."""
    long = _long_iterations(seen)
    if long is None:
        return _logged(seen, _saves(seen))
    rows = _kept_waiting_by(seen, long)
    if len(rows):
        return Answer(findings=(_long_finding(seen, long, rows),))
    hides = is_costly(long.lost_share) and int(long.active.sum()) >= CHANGES.min_long
    return Answer(
        notes=(
            f"{long.text}, while nobody stands out in them: checkpoints, evaluations, or somebody "
            "for whom the others wait where nothing is recorded; the timeline of one of them shows "
            "which",
        ),
        hides=long.text if hides else "",
        caveat=long.text if ratio_without(long.lost_share) >= POWER.caveat_ratio else "",
    )


def _saves(seen: Observations) -> tuple[str, ...]:
    """Say which iterations hold checkpoints, who saves them, and what they take of all time; empty
    where that is little.
    """
    if seen.saving_ns is None:
        return ()
    longest_ns = seen.saving_ns.max(axis=0)
    share = _share_of_all_time(seen, longest_ns)
    if share < CHANGES.lost_share:
        return ()
    saves = longest_ns > 0.0
    slowest = seen.members.ranks_of(np.unique(seen.saving_ns[:, saves].argmax(axis=0)))
    return (
        f"checkpoints are saved at {counted(int(saves.sum()), 'iteration')} "
        f"({listed(seen.iterations[saves].tolist())}) and take {share:.0%} of all time, longest on "
        f"{ranks_text(slowest)}: {milliseconds(float(longest_ns.max()))}",
    )


def _logged(seen: Observations, notes: tuple[str, ...]) -> Answer:
    """Say for how long the job's first rank, or its last, does something at the end of iterations
    that the others do not do, and what that takes of all time; with other `notes`.

    A slow disk or a busy host would show the same, so what costs a tenth is said beside health, and
    beyond `POWER.healthy_ratio` there is no health. Example: rank 0 takes 95 ms for it in 5 of 10
    iterations of 186 ms: 26 % of all time, without which a step would be 1.35 times as fast.
    """
    loggers = np.flatnonzero(seen.members.log_for_all)
    if seen.ending_ns is None or not len(loggers):
        return Answer(notes=notes)
    over_ns = robust.beyond_most(seen.ending_ns)[loggers]
    place = int(over_ns.sum(axis=1).argmax())
    row, own_ns = int(loggers[place]), over_ns[place]
    share = _share_of_all_time(seen, own_ns)
    if share < CHANGES.lost_share:
        return Answer(notes=notes)
    does = own_ns >= CHANGES.lost_share * seen.iteration_ns
    is_cpu = seen.members.device_kind == "cpu"
    rests = "in no recorded operation" if is_cpu else "with nothing left to do on its device"
    text = (
        f"{ranks_text(seen.members.workers[row])} does something else at the end of "
        f"{counted(int(does.sum()), 'iteration')} ({listed(seen.iterations[does].tolist())}), "
        f"{milliseconds(float(np.median(own_ns[does])))} each, {rests}, while all others wait: "
        f"{share:.0%} of all time; logging, metrics or saving of the loop's own, if no slow disk"
    )
    return Answer(
        notes=(*notes, text),
        hides=text if is_costly(share) else "",
        caveat=text if ratio_without(share) >= POWER.caveat_ratio else "",
    )


STEP_CHANGE = CauseSpec(cause=Cause.UNKNOWN, search=_search_changes)
