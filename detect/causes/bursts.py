"""Find ranks that lose time now and then: pauses too rare, or too short, for a level.

Problem: a rank that stands still for 100 ms in every fourth iteration is no slower than its peers
in the median iteration, and a host under memory pressure stalls whenever it likes. Levels and
stretches see neither.

Idea: count. An iteration is a hit of a row when it loses more than a margin over its peers, in all
kinds of lost time together (collector, host, loader). Healthy rows have hits, too, at a rate that
the other rows show. So many hits in so many iterations must be improbable at that rate:

    p = P(BetaBinomial(iterations; hits of the others + 1/2, their misses + 1/2) >= hits)

and the mean cost of the hits must reach the floor. The cause is the kind that most of the time was
lost to. Pauses that are too few for this proof, but cost a tenth of all time and are one row's
alone, are a finding all the same: undecided. Pauses may be of any size, 90 ms now and 570 ms then.

Slow computing is counted in the same way, by the mean over the passes of an iteration: a device
that is throttled during a fifth of the passes shows in their mean, not in their median. Computing
that is slow in nearly all iterations is left to other searches. Whose fault the lost time is,
`burst_owner.py` decides.

Example: 16 ranks, 10 iterations. Rank 5 loses more than 2 % of an iteration in 4 of 10, the others
in none of 150: p = 2.2e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from detect.causes.burst_data import compute_excess, with_twins
from detect.causes.burst_owner import STORAGE, cause_and_owner, longer_in_hits_ns
from detect.causes.device import beyond_others, mates_of
from detect.causes.finding import (
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    rows_of_findings,
    saved_by_compute,
    undecided,
    undecided_if_free,
)
from detect.causes.hits import (
    Burst,
    as_large,
    bursts,
    course_of,
    hits_of,
    how_often,
    interval_of,
    lone_pause,
    lost_share,
)
from detect.causes.one_of_two import pair_burst, pair_pause
from detect.causes.pass_hits import microbatches_of, slow_passes, stands_out_then, stops_in_passes
from detect.causes.searches import ADVICE, LOADING_AXES, mates_that_load
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import counted, milliseconds, percent, subject_of
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import ORDINARY
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.timeline import rows_alike

NOBODY_WAITS = (
    "nobody waits for this time, so the rank may itself wait in it for what the trace does not show"
)
ALONE = (
    "no other rank shares its stage, so that nobody knows what sound passes of it vary by, and "
    "mending it would gain next to nothing: no reason to change a node"
)
HARDLY_SURE = (
    "mending it would gain next to nothing, and chance is hardly excluded: trace more iterations"
)
PAUSES = (Cause.GC, Cause.LOADER, Cause.HOST)
WORDS = {
    Cause.COMPUTE: "computes slowly",
    Cause.GC: "stands still for garbage collection",
    Cause.HOST: "is held up by its host",
    Cause.LOADER: "waits for its data loader",
}
STOPS = "stands still in single passes"
STOPS_UNSEEN = "stands still, to collect garbage or for its host,"


def _over_place(value: Floats, places: list[Integers]) -> Floats:
    """Return how much more each row loses than the other rows of its place, (row, iteration); 0
    where it is alone there: rows of other places may have nothing to load.
    """
    nobody = np.zeros(len(value), dtype=bool)
    return np.asarray(np.nan_to_num(beyond_others(value, places, nobody)))


def _margin(value: Floats) -> float:
    """Return the least size of a pause, by the noise of the quietest row of (row, iteration)."""
    quiet = float(np.nan_to_num(robust.spread(value, axis=1)).min())
    return max(BURSTS.margin_share, BURSTS.margin_sigmas * quiet)


def _places(seen: Observations) -> list[Integers]:
    """Return the rows of each place, at which all load the same (`LOADING_AXES`).

    All ranks of the job's only TP group are one place if each of them loads for itself.
    """
    number = seen.members.numbered(*LOADING_AXES)
    mates = mates_that_load(seen)
    if mates is not None:
        number[mates] = number[mates[0]]
    return rows_alike(number)


def _main_cause(lost_ns: Mapping[Cause, Floats], burst: Burst) -> Cause:
    """Return the cause to which the burst's row lost most time beyond the other rows."""

    def total(cause: Cause) -> float:
        return float(_over_others_ns(lost_ns[cause], burst).sum())

    return max((cause for cause in PAUSES if cause in lost_ns), key=total)


def _over_others_ns(lost_ns: Floats, burst: Burst) -> Floats:
    """Return what a row loses in its hits above what others typically do, (iteration,), ns.

    That is what the step gains without it. What it has above its own quiet iterations is less where
    it loses time in these as well. Example: loading takes 25 ms at least and 280 ms at most, that
    of all others 1 ms.
    """
    time_ns = np.nan_to_num(lost_ns)
    over = time_ns[burst.row] - robust.median(time_ns[burst.others], axis=0)
    return np.where(burst.hits, np.maximum(over, 0.0), 0.0)


def _finding(seen: Observations, burst: Burst, cause: Cause) -> Finding:
    members, row = seen.members, burst.row
    num_hits, num_iterations = int(burst.hits.sum()), len(burst.hits)
    several = num_hits > 1
    if cause == Cause.COMPUTE:
        excess_ns = longer_in_hits_ns(seen, burst)
        saved_ns = saved_by_compute(seen, row, excess_ns)
    else:
        excess_ns = burst.excess * float(np.median(seen.iteration_ns))
        saved_ns = np.maximum(excess_ns, _over_others_ns(seen.lost(cause), burst))
    share = float(burst.excess.mean())
    what = "its passes" if cause == Cause.COMPUTE else "the usual step"
    cause, owner, reasons = cause_and_owner(seen, burst, cause)
    is_told = cause is not Cause.GC or cause in seen.lost_ns
    does = STOPS if burst.is_stops else WORDS[cause] if is_told else STOPS_UNSEEN
    finding = build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=cause,
            owner=owner,
            slowdown=1.0 + share,
            interval=interval_of(burst, share),
            course=course_of(burst, share),
            q_value=burst.q_value,
            num_peers=int(burst.others.sum()),
            saved_ns=saved_ns,
            subject=subject_of(members, row),
            predicate=f"{does} {how_often(burst)}, "
            f"{milliseconds(float(excess_ns[burst.hits].mean()))}{' each on the mean' * several},",
            evidence=(
                f"that adds {percent(1 + share)[:-2]} % to {what} on the mean of all iterations; "
                f"of the others' {counted(int(burst.others.sum()) * num_iterations, 'iteration')} "
                f"{burst.other_hits or 'none'} lost as much",
                *reasons,
            ),
            advice=ADVICE[cause] if is_told else (*ADVICE[cause], *ADVICE[Cause.HOST][:1]),
            slow_passes_ratio=burst.size,
            recurs=cause is Cause.GC and is_told,  # by what the code allocates
        ),
    )
    is_usual = cause == Cause.COMPUTE and burst.usual_rate >= BURSTS.usual_share
    finding = undecided_if_free(finding, NOBODY_WAITS, is_estimated=is_usual)
    return _worth_naming(members, burst, finding)


def _worth_naming(members: Members, burst: Burst, finding: Finding) -> Finding:
    """Return the finding, undecided where a device is named although mending it gains little, and
    chance, or what sound passes of a lone stage vary by, is not excluded.
    """
    if finding.owner is not Owner.NODE or finding.cause is not Cause.COMPUTE:
        return finding
    cost, is_sure = finding.step_time_cost_ratio, burst.q_value <= BURSTS.certain_q
    if cost < ORDINARY.worthwhile_ratio and not (is_sure or burst.is_one_speed):
        return undecided(finding, HARDLY_SURE)
    is_alone = len(members.rows_of_stage(int(members.stage[burst.row]))) == 1
    is_little = cost < ORDINARY.small_gain_ratio or finding.slowdown < BURSTS.least_of_lone_ratio
    return undecided(finding, ALONE) if is_alone and is_little else finding


def _pauses(inquiry: Inquiry) -> list[Burst]:
    """Return the bursts of rows that pause now and then.

    Loading is compared among rows of one place only. A row that computes slowly may wait for its
    loader all the same, so for loading only named rows are left out, else slow ones, too.
    """
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    named = inquiry.named
    known = inquiry.slow | named
    if len(seen.members) == 2 and not known.any() and (lone := pair_pause(seen, rate)):
        return [lone]
    slow = np.flatnonzero(inquiry.slow)
    mates = [] if seen.tells_passes else [mates_of(seen.members, int(row)) for row in slow]
    waits = mask_of(np.concatenate([np.zeros(0, dtype=np.int64), *mates]).tolist(), len(known))
    places = _places(seen)
    found = bursts(lost_share(seen, (Cause.GC, Cause.HOST)), known | waits, rate)
    loading = lost_share(seen, (Cause.LOADER,))
    for rows in places:
        elsewhere = ~mask_of(rows.tolist(), len(known))
        found += bursts(loading, named | elsewhere, rate)
    collecting = lost_share(seen, (Cause.GC,))
    if named.any():  # a rank collects for itself, whatever its host may be
        told = inquiry.blamed | inquiry.slow | mask_of([one.row for one in found], len(known))
        collectors = [one for one in inquiry.found if one.cause is Cause.GC]
        told |= rows_of_findings(seen.members, collectors)
        found += bursts(collecting, told | waits, rate)
    if found:
        return found
    if seen.members.device_kind == "cpu":  # batches may come late where no span shows it
        loading = loading + lost_share(seen, (Cause.HOST,))
    lost = loading + collecting  # garbage is collected where it is made, whatever the place
    over_collecting = _over_place(collecting, [np.arange(len(known))])
    # a collection was recorded as such, so that a single one is no noise
    collects = lone_pause(over_collecting, _margin(lost), rate, BURSTS.lone_share)
    if named.any():
        return [collects] if collects and not told[collects.row] else []
    lone = lone_pause(_over_place(loading, places) + over_collecting, _margin(lost), rate)
    lone = lone or collects
    return [lone] if lone else []


def _throttled(inquiry: Inquiry, known: Flags, told: Flags, blamed: Flags) -> list[Burst]:
    """Return the bursts of rows whose passes are slow now and then, by `min_slowdown` in the hits.

    `known` rows are slow or stand still now and then, so other rows may wait for them; of these
    others have `told` some, and `blamed` some. Modules are compared with those of their own rank,
    so there rows that nobody has told of are searched, whoever is their peer.
    """
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    floor = inquiry.settings.min_slowdown - 1.0
    found = _in_passes(inquiry, known, blamed)
    if seen.slow_runs is not None:
        from detect.causes.slow_modules import bursts_of_modules  # needed only by traces in full

        found = _with_modules(found, bursts_of_modules(seen, told, rate, floor))
    stage, rows = seen.members.stage, np.array([one.row for one in found], dtype=np.int64)
    hits = hits_of(compute_excess(seen, known), known)
    return [
        replace(
            one,
            is_shared=not (one.in_modules and one.cuts_passes)
            and _is_usual_there(_alike(seen, *hits, one), ~known & (stage == at), one),
            is_mates=(not one.in_modules or bool(seen.entangled_phases))
            and _waits_for_mate(seen, one, known | _far_slower(inquiry), rows),
        )
        for one, at in zip(found, stage[rows], strict=True)
    ]


def _far_slower(inquiry: Inquiry) -> Flags:
    """Flag the rows that compute far slower than their peers, (row,), whoever is at fault for that:
    their TP mates wait for them.
    """
    far = [
        one
        for one in inquiry.found
        if one.cause is Cause.COMPUTE and one.slowdown >= ORDINARY.plain_ratio
    ]
    return rows_of_findings(inquiry.seen.members, far)


def _in_passes(inquiry: Inquiry, known: Flags, blamed: Flags) -> list[Burst]:
    """Return the bursts of rows whose passes are slow beside those of their peers, or beside the
    other ones of their microbatches: for these only rows that are `blamed` are known.
    """
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    floor = inquiry.settings.min_slowdown - 1.0
    of_two = len(seen.members) == 2
    found = _of_two(seen, known, rate) if of_two else _beside_peers(seen, known, rate, floor)
    twins = slow_passes(seen, blamed, rate, floor, twins=True)
    return _beside_mates(seen, with_twins(seen, found, twins))


def _of_two(seen: Observations, known: Flags, rate: float) -> list[Burst]:
    """Return the burst of one of two rows, if there is one and neither is `known`."""
    if known.any():
        return []
    work = seen.work
    order = np.argsort(work.microbatch, kind="stable")
    places = work.phase[order], microbatches_of(seen)[order]
    is_no_data = seen.rules_data_out
    lone = pair_burst(work.log_ns[:, :, order], rate, places, is_no_data=is_no_data)
    return [lone] if lone else []


def _beside_peers(seen: Observations, known: Flags, rate: float, floor: float) -> list[Burst]:
    """Return the bursts of rows of which passes, or iterations, are slow beside their peers'."""
    found = slow_passes(seen, known, rate, floor)
    more = known | mask_of([one.row for one in found], len(known))
    over, group = compute_excess(seen, known), seen.members.tensor_group
    by_iteration = bursts(over, more, rate, least_hit=floor, group=group)
    found += [replace(one, stands_out=stands_out_then(seen, more, one)) for one in by_iteration]
    return found


def _beside_mates(seen: Observations, found: list[Burst]) -> list[Burst]:
    """Return the bursts, of which none stands out from a TP mate that loses as much in its own.

    Example: rank 1 loses 2.9 % of its passes, its mate rank 3 1.0 %, waiting for it here and there.
    """
    lost = {one.row: float(one.excess.sum()) for one in found}
    return [
        replace(
            one,
            stands_out=one.stands_out
            and all(
                lost.get(mate, 0.0) < lost[one.row]
                for mate in mates_of(seen.members, one.row).tolist()
            ),
        )
        for one in found
    ]


def _with_modules(found: list[Burst], of_modules: list[Burst]) -> list[Burst]:
    """Return the bursts of passes, those of which parts are slow marked so, and after them the
    bursts of rows that only modules tell.
    """
    by_row = {one.row: one for one in of_modules}
    marked = [
        replace(
            one,
            cuts_passes=by_row[one.row].cuts_passes,
            is_one_speed=one.is_one_speed or by_row[one.row].is_one_speed,
            stands_out=one.stands_out or by_row[one.row].stands_out,
            in_modules=True,
        )
        if one.row in by_row
        else one
        for one in found
    ]
    rows = {one.row for one in found}
    return [*marked, *(one for one in of_modules if one.row not in rows)]


def _undecided(seen: Observations, found: Sequence[Finding]) -> Flags:
    """Flag the rows that searches found slow and could not name, (row,), or the transfers of their
    groups, which say nothing of their passes.

    Being slow now and then raises a level a little, too little for one that lasts; and whoever is a
    little slower for good, as chips are, shows all the same when others are slow now and then.

    Example: 1.22 times as long in eight stretches of three passes, 1.03 times on the mean.
    """
    causes = (Cause.COMPUTE, Cause.UNKNOWN, Cause.LINK)
    left = [one for one in found if one.owner is Owner.UNDECIDED and one.cause in causes]
    told = [one for one in found if one not in left]
    rows_left, rows_told = (rows_of_findings(seen.members, some) for some in (left, told))
    return rows_left & ~rows_told


def _mirror_each_other(seen: Observations) -> Flags:
    """Flag the rows of stages of two: the only peer of one, which mirrors it, would seem slow
    whenever it is not. Two rows that get even data are told by their own times.
    """
    if len(seen.members) == 2 and seen.rules_data_out:
        return np.zeros(2, dtype=bool)
    return np.asarray(np.bincount(seen.members.stage)[seen.members.stage] == 2)


def _without_turns(seen: Observations, found: Sequence[Burst], open_rows: Flags) -> list[Burst]:
    """Return the bursts without those of `open_rows` of which a stage has several: what ranks show
    by turns is rather exchanged between them where nobody records it.
    """
    stage = seen.members.stage
    turns = np.array([stage[one.row] for one in found if open_rows[one.row]], dtype=np.int64)
    several = np.flatnonzero(np.bincount(turns) > 1)
    return [one for one in found if not (open_rows[one.row] and np.isin(stage[one.row], several))]


def _alike(seen: Observations, hits: Flags, lost: Floats, burst: Burst) -> Flags:
    """Return the hits, (row, iteration), in which rows lose about as much as the burst's row does,
    without those of TP mates that only wait for it, since it stands out from them.
    """
    kept = as_large(hits, lost, burst.row)
    if burst.stands_out:
        kept[mates_of(seen.members, burst.row)] &= ~burst.hits
    return kept


def _is_usual_there(hits: Flags, of_stage: Flags, burst: Burst) -> bool:
    """Return whether the other rows of a row's stage, (row,) flags, have `hits`, (row, iteration),
    nearly as often as the row of a burst has them, or has slow passes: in each of its iterations a
    row may have some. Rows of other stages do not count: they may have nothing to load.
    """
    rate = hits.mean(axis=1)
    others = of_stage & (np.arange(len(of_stage)) != burst.row)
    own = max(float(rate[burst.row]), float(burst.hits.mean()))
    return bool(others.any() and rate[others].mean() > BURSTS.others_share * own)


def _too_few(inquiry: Inquiry) -> Finding | None:
    """Return an undecided finding about the one row that loses a tenth of all time to its host, or
    in slow passes, in too few iterations for a proof; None where there is none.

    The row must lose time in some iterations, not in nearly all, which other searches have judged,
    and at least `min_slowdown` on the mean.
    """
    seen, rate = inquiry.seen, inquiry.settings.false_discovery_rate
    floor, most = inquiry.settings.min_slowdown - 1.0, BURSTS.max_hit_share
    places = _places(seen)
    values = {
        Cause.HOST: lost_share(seen, (Cause.HOST,)),
        Cause.COMPUTE: np.nan_to_num(compute_excess(seen, np.zeros(len(seen.members), dtype=bool))),
    }
    lone = [
        (cause, one)
        for cause, value in values.items()
        if (one := lone_pause(_over_place(value, places), _margin(value), rate)) is not None
        and one.hits.mean() <= most
        and one.excess.mean() >= floor
    ]
    if not lone:
        return None
    cause, burst = max(lone, key=lambda one: float(one[1].excess.mean()))
    is_stops = cause is Cause.COMPUTE and stops_in_passes(seen, burst.row)
    return _finding(seen, replace(burst, is_sure=False, is_stops=is_stops), cause)


def _waits_for_mate(seen: Observations, burst: Burst, known: Flags, found: Integers) -> bool:
    """Return whether the burst's row may only wait for a mate, another row of its TP group.

    It may if a mate is `known` to be slow or to pause, if a mate has bursts, too (`found`), from
    which this one does not stand out, or if a mate recorded nothing in most of the hits. Who waits
    for whom is then not known, and the row that waits may lose more.
    """
    mates = mates_of(seen.members, burst.row)
    if known[mates].any() or (not burst.stands_out and np.isin(mates, found).any()):
        return True
    absent = ~np.isfinite(seen.work.log_ns[mates][:, burst.hits]).any(axis=2)
    return bool((absent.mean(axis=1) > BURSTS.most_of_host_share).any())


def _of_pause(inquiry: Inquiry, burst: Burst) -> Finding:
    """Return the finding of pauses. A mate of a slow device may only wait for it."""
    seen = inquiry.seen
    cause = _main_cause(seen.lost_ns, burst)
    slow = inquiry.named_for(Cause.COMPUTE)[mates_of(seen.members, burst.row)]
    is_mates = burst.is_mates or (cause == Cause.HOST and bool(slow.any()))
    return _finding(seen, replace(burst, is_mates=is_mates), cause)


def _search(inquiry: Inquiry) -> Answer:
    """Search passes on GPUs only: on CPUs, processes take time from each other in bursts all the
    while, and pauses alone tell.
    """
    seen = inquiry.seen
    if len(seen.iterations) < BURSTS.min_hits:
        return Answer()
    paused = _pauses(inquiry) if seen.lost_ns else []
    of_pauses = [_of_pause(inquiry, one) for one in paused]
    if seen.members.device_kind == "cpu":
        return Answer(findings=tuple(_loaders_on_several_hosts(of_pauses)))
    known = inquiry.slow | inquiry.named
    # of two, a second speed looks like a few pauses, too, for which the other one waits
    pausing = mask_of([one.row for one in paused if one.is_sure or len(known) > 2], len(known))
    known |= pausing
    left = known & _undecided(seen, (*inquiry.found, *of_pauses))
    open_rows = left & ~_mirror_each_other(seen)
    throttled = _throttled(inquiry, known & ~open_rows, known & ~left, inquiry.blamed | pausing)
    throttled = _without_turns(seen, throttled, open_rows)
    is_told = bool(known.any() or paused or throttled)
    if not is_told and len(seen.iterations) <= BURSTS.short_window:
        doubtful = _too_few(inquiry)
        return Answer(findings=(doubtful,) if doubtful else ())
    of_pauses = _loaders_on_several_hosts(of_pauses)
    told = {one.ranks for one in (*inquiry.found, *of_pauses)}
    of_devices = [_finding(seen, one, Cause.COMPUTE) for one in throttled]
    of_devices = [one for one in of_devices if one.owner is Owner.NODE or one.ranks not in told]
    named = {one.ranks for one in of_devices if one.owner is Owner.NODE}
    of_pauses = [one for one in of_pauses if one.ranks not in named]
    return Answer(
        findings=(*of_pauses, *of_devices),
        explains=lambda one: one.owner is Owner.UNDECIDED and one.ranks in named,
    )


def _loaders_on_several_hosts(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, undecided where loaders of several hosts pause now and then: that is
    rather what all of them load from.
    """
    named = [one for one in findings if one.cause is Cause.LOADER and one.owner is Owner.NODE]
    are_several = len({one.host for one in named}) > 1
    return [undecided(one, STORAGE) if are_several and one in named else one for one in findings]


BURST = CauseSpec(cause=Cause.HOST, search=_search)
