"""Ranks that lose time in every iteration: to data loader, garbage collector, host, late exits.

One search (`detect.causes.searches`) over `Observations.lost_ns`:

    loader      the device idle (GPU), or the thread busy (CPU), while data are loaded
    collector   garbage collection; a pause belongs to the job, whatever the node
    host        the device has nothing to do: between operations, or inside passes
    late exit   from communication: the transfer of an operation is that of its quickest member;
                what one member takes beyond that is its lateness

A rank is late by its own NIC, or by its host that launches what follows too late. But most late
ranks are victims: who communicates with a late rank is late with it, and along a pipeline everybody
waits for the slow stage. So the latest rank is kept first, and each further rank only if most of
its lateness arose in communications without the ranks kept so far. Example: rank 2 is 9 ms late,
rank 6 4 ms, of which 3.5 ms arose in messages with rank 2: only rank 2 is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from scipy import special

from detect.causes.device import UNKNOWN_ROLES, host_advice, mates_of
from detect.causes.finding import (
    OTHERS_WAIT,
    UNDECIDED_WHOSE,
    Answer,
    CauseSpec,
    Claim,
    Inquiry,
    build_finding,
    connection_advice,
    is_costly,
    placed_at,
    undecided_if_free,
)
from detect.causes.launching import (
    half_starved,
    hosts_are_all_late,
    is_host_bound,
    launches_as_quickly,
    launches_slowly,
    may_wait_unseen,
    most_cost_of_host,
    of_far_later_host,
    off_core_text,
    stands_still,
)
from detect.causes.searches import (
    ADVICE,
    OF_FIRST,
    OF_ITS_HOST,
    OF_PLACE,
    Loss,
    load_as_long,
    loader_of,
    loses_as_its_place,
    lost_time,
    mates_that_load,
    on_other_hosts,
    others_load_as_long,
    stage_peers,
)
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.transfers import Transfers
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import stage_groups
from detect.stats.search import Suspect
from detect.stats.stretches import Course
from detect.text import milliseconds, percent, ranks_text, subject_of
from detect.thresholds.bursts import LOSSES
from detect.thresholds.hosts import CHANGES
from detect.thresholds.networks import LINKS, NETWORKS
from detect.thresholds.observing import OCCUPANCY, PACE, STARVATION
from detect.thresholds.statistics import SEARCH
from detect.thresholds.verdicts import CONSEQUENCES
from megascan.arrays import Flags, Floats, Integers

AT_THE_END_ADVICE = (
    "see what its process does at the end of an iteration (py-spy dump --pid PID, several times): "
    "if it writes, time its disk (iostat -x 1)"
)


def _search_loading(inquiry: Inquiry) -> Answer:
    """Compare the loading of rows of the same stage and TP rank, or else of all rows that load.

    On a GPU a stage's place in the pipeline decides how long its device has to wait, so across
    stages a difference must be larger than what stages differ by anyway.
    """
    seen, members = inquiry.seen, inquiry.seen.members
    loading = seen.lost(Cause.LOADER)
    loads: Flags = np.asarray(np.isfinite(loading).any(axis=1))
    if not loads.any():
        return Answer()
    on_gpu = members.device_kind == "cuda"
    usual = np.nan_to_num(robust.median(loading, axis=1))
    groups, across = _rows_that_load(members, loads, usual)
    is_lone = len(groups[0]) == 1
    mates = mates_that_load(seen) if is_lone else None
    if mates is not None:
        groups, across = [mates], False
    elif is_lone:
        return _awaited_loading(seen, int(groups[0][0]))

    return lost_time(
        inquiry,
        Loss(
            cause=Cause.LOADER,
            name="the device idle while data were loaded" if on_gpu else "data loading",
            groups=groups,
            least_share=max(
                inquiry.settings.min_stage_excess - 1.0 if on_gpu and across else 0.0,
                LOSSES.host_bound_share if is_host_bound(seen) else 0.0,
            ),
            stands_out=True,
            doubt=partial(_doubt_of_loading, seen, groups, mates, on_gpu and across),
            base_ns=lambda row, own, excess: own - excess,
            evidence=partial(_stops_as_well, seen),
            predicate="waits {time} an iteration for its data loader, {over} over its peers",
            advice=lambda suspect, owner: ADVICE[Cause.LOADER],
        ),
    )


def _doubt_of_loading(
    seen: Observations,
    groups: Sequence[Integers],
    mates: Integers | None,
    is_of_stages: bool,
    suspect: Suspect,
) -> str:
    """Return why a suspect's loader need not be slow; empty where nothing else is likely.

    It is compared with the rows of its group among `groups`: with its TP `mates` where these load
    for themselves, or with other stages.
    """
    row, active = suspect.row, suspect.course.active
    if stands_still(seen, row, active):  # then it is its host, whatever storage does
        return OF_ITS_HOST if _may_be_collecting(seen, suspect) else ""
    rows = next(rows for rows in groups if row in rows)
    if shared := _shared_loading(seen, suspect, rows[rows != row]):
        return shared
    lasting = bool(active.all())
    if mates is not None and lasting and seen.members.place["tp"][row] == 0:
        return OF_FIRST
    is_open = is_of_stages and lasting and not _quicker_at_the_other_end(seen, row, active)
    return OF_STAGE if is_open else ""


def _stops_as_well(seen: Observations, suspect: Suspect) -> tuple[str, ...]:
    """Say that the host of a late loader stops between launches, too, where it is at fault."""
    stops = stands_still(seen, suspect.row, suspect.course.active)
    return (OF_ITS_HOST,) if stops and not _may_be_collecting(seen, suspect) else ()


def _may_be_collecting(seen: Observations, suspect: Suspect) -> bool:
    """Return whether a rank that loads late, and whose host stops between launches as well, may be
    collecting garbage all the while: its process, and not its host, would be the reason.
    """
    if Cause.GC not in seen.lost_ns:
        return True
    collecting = float(np.median(seen.lost(Cause.GC)[suspect.row][suspect.course.active]))
    own, _ = _lost_and_excess_ns(seen, suspect, Cause.LOADER)
    return collecting >= LOSSES.awaited_share * own


def _shared_loading(seen: Observations, suspect: Suspect, others: Integers) -> str:
    """Return why data, or storage that all share, may be the reason as well; empty if they aren't.

    The `others` are the rows that the suspect's loading is compared with.
    """
    loading, active = seen.lost_ns[Cause.LOADER], suspect.course.active
    own, over = _lost_and_excess_ns(seen, suspect, Cause.LOADER)
    if own < LOSSES.loader_ratio * (own - over):
        return SHARDS
    if load_as_long(own, loading[on_other_hosts(seen.members, suspect.row, others)]):
        return WAIT_TOO
    on_gpu = seen.members.device_kind == "cuda"
    if not on_gpu and len(others) == 1 and own < LOSSES.most_of_cores_ratio * (own - over):
        return OF_TWO
    return WAIT_TOO if on_gpu and others_load_as_long(seen, suspect.row, others, active) else ""


def _lost_and_excess_ns(seen: Observations, suspect: Suspect, cause: Cause) -> tuple[float, float]:
    """Return what a suspect loses to a cause in an iteration, and how much more that is than its
    peers lose, both ns.
    """
    own = float(np.nanmedian(seen.lost(cause)[suspect.row][suspect.course.active]))
    return own, suspect.course.effect * float(np.median(seen.iteration_ns))


def _rows_that_load(members: Members, loads: Flags, usual: Floats) -> tuple[list[Integers], bool]:
    """Return groups of rows that load alike, each of two and more; or one group of any size, that
    of all rows that load, and whether it is this one, which spans stages for want of peers.
    """
    tp_rank = members.place["tp"]
    groups = [
        rows[loads[rows] & (tp_rank[rows] == one)]
        for rows in stage_groups(members)
        for one in np.unique(tp_rank[rows])
    ]
    least = LOSSES.loads_share * usual.max(initial=0.0)
    groups = [rows for rows in groups if len(rows) and usual[rows].max() >= least]
    if groups and min(len(rows) for rows in groups) >= 2:
        return groups, False
    loading = np.concatenate([np.zeros(0, dtype=np.int64), *groups])
    leaders = loading[tp_rank[loading] == 0]  # where files are missing, their mates stand for them
    return [np.sort(leaders if len(leaders) else loading)], True


def _awaited_loading(seen: Observations, row: int) -> Answer:
    """Report the loading of the only rank that loads, where all others wait for it: in most
    iterations, or now and then for the same share of all time.

    Where the other end of the pipeline loads from the same storage, and far quicker, the rank's own
    loader or host is at fault. Else no other rank shows how long the loading ought to take, and
    whose fault it is stays undecided; its cost is plain. Example: 241 ms of every 510 ms, while the
    other stage waits for 280 ms; or 50 to 320 ms in 12 of 18 iterations of 490 ms, a fifth of all
    time.
    """
    members, least = seen.members, LOSSES.least_awaited_share
    others = np.arange(len(members)) != row
    if seen.waiting_ns is None or not others.any():
        return Answer()
    step_ns = float(np.median(seen.iteration_ns))
    own_ns = np.nan_to_num(seen.lost(Cause.LOADER)[row])
    lead_ns = seen.waiting_ns[others].min(axis=0) - seen.waiting_ns[row]
    is_long = own_ns >= least * step_ns
    hits = is_long & (lead_ns >= LOSSES.awaited_share * own_ns)
    saved_ns = np.where(hits, np.minimum(own_ns, np.maximum(lead_ns, 0.0)), 0.0)
    lasts = float(np.mean(hits)) >= OCCUPANCY.mostly_share
    is_awaited = is_long.any() and float(np.mean(hits[is_long])) >= OCCUPANCY.mostly_share
    costs = float(saved_ns.sum()) >= least * float(seen.iteration_ns.sum())
    answer = Answer(least_slowdown=1.0 + least, least_because=NOBODY_ELSE)
    if not lasts and not (is_awaited and costs):
        return answer
    num_long = len(hits) if lasts else int(is_long.sum())
    chance = float(special.bdtrc(int(hits.sum()) - 1, num_long, 1.0 / len(members)))
    finding = _awaited_finding(seen, row, hits, lasts=lasts, saved_ns=saved_ns, chance=chance)
    return replace(answer, findings=(finding,))


def _quicker_at_the_other_end(seen: Observations, row: int, hits: Flags) -> str:
    """Say that another stage loads what the row loads, and far quicker in every iteration; empty
    where none does, or nobody recorded how long that takes.

    The last stage needs the labels of the tokens that the first one embeds, from the same storage.
    It asks for them later, so workers that load ahead hide most of what a slow storage takes, but
    not all of it. Example: rank 0 loads for 488 ms an iteration, the first rank of the last stage
    for 2.2 at most.
    """
    if seen.loading_ns is None:
        return ""
    place = seen.members.place
    usual_ns = np.nan_to_num(robust.median(seen.loading_ns, axis=1))
    loads = (usual_ns >= LOSSES.least_load_ns) & (place["pp"] != place["pp"][row])
    ends = np.flatnonzero(loads & (place["tp"] == place["tp"][row]))
    there = seen.members.ranks_of(ends)
    longest_ns = float(np.nan_to_num(seen.loading_ns[ends]).max(initial=0.0))
    own_ns = float(robust.median(seen.loading_ns[row][hits]))
    if not len(ends) or longest_ns > LOSSES.other_end_share * own_ns:
        return ""
    takes = "needs" if len(there) == 1 else "need"
    return (
        f"at the other end of the pipeline {ranks_text(there)} {takes} "
        f"{milliseconds(longest_ns)} at most for the same loading: what both load from is not the "
        "reason"
    )


def _awaited_finding(
    seen: Observations, row: int, hits: Flags, *, lasts: bool, saved_ns: Floats, chance: float
) -> Finding:
    """Return the finding of a row whose loading all others wait for in the iterations `hits`."""
    assert seen.waiting_ns is not None
    members, step_ns = seen.members, float(np.median(seen.iteration_ns))
    own_ns = np.nan_to_num(seen.lost(Cause.LOADER)[row])[hits]
    waiting_ns = np.delete(seen.waiting_ns, row, axis=0)[:, hits]
    base_ns = max(float(np.median(seen.busy_ns[row])), 1.0)
    own = float(np.median(own_ns))
    error_ns = float(np.std(own_ns)) / float(np.sqrt(len(own_ns)))
    reach = SEARCH.interval_sigmas * error_ns
    who, at = loader_of(seen, row, hits)
    ranks = who.workers[at]
    quick = _quicker_at_the_other_end(seen, row, hits) if len(ranks) == 1 else ""
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=(row,),
            cause=Cause.LOADER,
            owner=Owner.NODE if quick else Owner.UNDECIDED,
            slowdown=1.0 + own / base_ns,
            interval=(1.0 + (own - reach) / base_ns, 1.0 + (own + reach) / base_ns),
            course=None if lasts else Course.of(hits, own / base_ns, error_ns / base_ns),
            q_value=min(1.0, chance),
            num_peers=0,
            saved_ns=saved_ns,
            subject=subject_of(who, at),
            predicate=f"loads data while all others wait{'' if quick else UNDECIDED_WHOSE}, for "
            f"{milliseconds(own)} ({percent(1.0 + own / step_ns)}) of an iteration",
            evidence=(
                f"the other ranks wait {milliseconds(float(np.median(waiting_ns)))} an iteration; "
                f"in {len(own_ns)} of {len(hits)} iterations each of them by at least half of that "
                "loading longer than this one",
                quick or NOBODY_ELSE_LOADS,
            ),
            advice=ADVICE[Cause.LOADER],
        ),
    )
    return finding if who is members else placed_at(finding, who, at)


def _search_collecting(inquiry: Inquiry) -> Answer:
    """Compare all ranks. The owner is the job: a collector pauses for what its code allocates."""
    seen = inquiry.seen
    if Cause.GC not in seen.lost_ns:
        untraced = (
            "garbage collection was not traced: it is not at granularity base, nor in files of the "
            "original MegaScan",
        )
        return Answer(notes=untraced if seen.tells_passes else ())
    return lost_time(
        inquiry,
        Loss(
            cause=Cause.GC,
            name="garbage collection",
            groups=[np.arange(len(seen.members))],
            bursty=True,
            owner=lambda suspect: Owner.JOB,
            predicate="stands still {time} an iteration for garbage collection, {over} over its "
            "peers",
            advice=lambda suspect, owner: ADVICE[Cause.GC],
        ),
    )


def _search_hosts(inquiry: Inquiry) -> Answer:
    """Compare the ranks of a stage by the time in which their devices had nothing to do."""
    seen = inquiry.seen
    notes = _bound_by_hosts(seen)
    if Cause.HOST not in seen.lost_ns:
        return Answer(notes=notes, hides=_unrecorded(seen))
    alone = _are_alone(seen)
    at_place: set[int] = set()  # rows whose TP rank loses as much in other TP groups

    def not_explained(suspects: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
        at_place.update(_alike_at_their_place(seen, suspects))
        waiting = _without_waiting(inquiry, suspects)
        return tuple(one for one in waiting if not _refills_its_queue(seen, one))

    def doubt(suspect: Suspect) -> str:
        return OF_PLACE if suspect.row in at_place else _doubt_of_host(inquiry, suspect)

    def owner(suspect: Suspect) -> Owner:
        all_late = hosts_are_all_late(seen, suspect.row, suspect.course.active)
        return Owner.JOB if all_late else Owner.NODE

    answer = lost_time(
        inquiry,
        Loss(
            cause=Cause.HOST,
            name="time outside operations",
            groups=stage_peers(seen),
            bursty=seen.members.device_kind == "cpu",
            least_share=LOSSES.host_bound_share if notes or alone else 0.0,
            excuses_slow=True,
            owner=owner,
            doubt=doubt,
            evidence=lambda suspect: _where_time_is_lost(seen, suspect.row, suspect.course.active),
            drop_explained=not_explained,
            predicate="loses {time} an iteration to its host, {over} over its peers",
            advice=lambda suspect, owner: (*_advice_on_endings(seen, suspect), *host_advice(owner)),
            most_cost=lambda suspect: most_cost_of_host(seen, suspect.row, suspect.course.active),
        ),
    )
    findings = map(of_far_later_host, answer.findings)
    told = tuple(undecided_if_free(one, NOBODY_WAITS) for one in findings)
    return replace(answer, findings=told, notes=notes)


def _unrecorded(seen: Observations) -> str:
    """Say that most of an iteration was not recorded, so that finding nothing does not mean health.

    Empty where the step would hardly be longer if that time doubled, or where it is not known (op
    tables). Example: files of the original MegaScan hold forward passes of layers and the
    optimizer, 1.5 of 9.1 ms. Hosts that launch slowly make a step 1.5 times as long, and no span
    longer.
    """
    gaps = seen.host_gap_ns / np.maximum(seen.iteration_ns, 1.0)
    share = float(np.median(np.nan_to_num(gaps)))
    if not is_costly(share * (1.0 - 1.0 / NETWORKS.half_speed_ratio)):
        return ""
    return (
        f"nothing was recorded for {share:.0%} of the iteration: a host or a network that takes "
        "twice as long in that time would look the same"
    )


def _are_alone(seen: Observations) -> bool:
    """Return whether some stage has one row only, so that stages are compared with each other."""
    return min(len(rows) for rows in stage_groups(seen.members)) < 2


def _is_far_more(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a stage between others, which has layers only, stands idle for far longer than
    any other, now more and now less: what the ends of a pipeline have to do besides is not why, nor
    what its own layers ask of its host, which takes as long in every iteration.

    Example: 75 to 196 ms of an iteration on the second stage of four, 0.03 ms on the others.
    """
    stage, idle = seen.members.stage, np.nan_to_num(seen.lost(Cause.HOST)[:, active])
    usual, others = robust.median(idle, axis=1), stage != stage[row]
    is_between = stage.min() < stage[row] < stage.max()
    varies = idle[row].max() >= LOSSES.varies_ratio * idle[row].min()
    return bool(
        is_between and varies and usual[row] >= PACE.stop_ratio * usual[others].max(initial=0.0)
    )


def _doubt_of_host(inquiry: Inquiry, suspect: Suspect) -> str:
    """Return why lost time need not be the fault of a rank's host; empty where it is."""
    seen, row, active = inquiry.seen, suspect.row, suspect.course.active
    if not seen.knows_roles:
        return UNKNOWN_ROLES
    if len(seen.members) == 2 and len(seen.iterations) < inquiry.settings.min_iterations:
        return FEW_OF_TWO
    if _are_alone(seen) and not (launches_slowly(seen, row) or _is_far_more(seen, row, active)):
        return OF_ITS_STAGE
    if _is_hardly_more(seen, suspect):
        return HARDLY_MORE
    if _waits_for_its_replica(inquiry, row):
        return OF_ITS_REPLICA
    share = suspect.course.effect
    many = LOSSES.many_gaps_share if seen.tells_passes else share / LOSSES.pause_ratio
    return (
        _may_collect(seen, row, active)
        or may_wait_unseen(seen, np.array([row]), active)
        or half_starved(seen, row, active)
        or launches_as_quickly(seen, row, active, share, least_starved=many)
    )


def _may_collect(seen: Observations, row: int, active: Flags) -> str:
    """Say that a rank whose GPU stands still inside its passes may be collecting garbage; empty
    where collections were recorded, or launches, which tell a process that stops from a slow host.
    """
    is_told = Cause.GC in seen.lost_ns or seen.starved_share is not None
    if is_told or seen.members.device_kind == "cpu":
        return ""
    stalled, lost = (
        float(np.median(np.nan_to_num(time_ns[row][active])))
        for time_ns in (seen.stalled_ns, seen.lost(Cause.HOST))
    )
    return MAY_COLLECT if stalled >= STARVATION.stopped_share * lost else ""


def _waits_for_its_replica(inquiry: Inquiry, row: int) -> bool:
    """Return whether another stage of the row's replica, or a TP mate, is named as a slow device:
    the row waits for it, and its gaps may hold what the trace does not show of that.

    Example: a throttled device and its mate, whose backward passes reduce in no span of their own.
    """
    members = inquiry.seen.members
    others = members.other_stages(row)
    others[mates_of(members, row)] = True
    return bool((inquiry.named_for(Cause.COMPUTE) & others).any())


def _refills_its_queue(seen: Observations, suspect: Suspect) -> bool:
    """Return whether a late loader explains why a device has nothing to do.

    After each late batch the device's queue is empty, while the hosts of ranks that wait for it run
    ahead. Example: in steps of 193 ms, 121 ms more of loading than its peer, and 7.5 ms more in
    which the device has nothing to do.
    """
    if seen.members.device_kind != "cuda" or Cause.LOADER not in seen.lost_ns:
        return False
    if stands_still(seen, suspect.row, suspect.course.active):
        return False
    loading = np.nan_to_num(seen.lost(Cause.LOADER)[:, suspect.course.active])
    usual = np.median(np.delete(loading, suspect.row, axis=0), axis=0)
    later = float(np.median(loading[suspect.row] - usual))
    _, over = _lost_and_excess_ns(seen, suspect, Cause.HOST)
    return over < LOSSES.refill_share * later


def _is_hardly_more(seen: Observations, suspect: Suspect) -> bool:
    """Return whether the devices of a suspect's peers have nothing to do for nearly as long.

    Example: gaps of 13.4 ms of 80 against 12.3 ms, in which every host gathers gradients.
    """
    own, over = _lost_and_excess_ns(seen, suspect, Cause.HOST)
    return own < LOSSES.host_ratio * (own - over)


def _bound_by_hosts(seen: Observations) -> tuple[str, ...]:
    """Say that all devices wait for their hosts; () where they do not."""
    if seen.starved_share is None or not is_host_bound(seen):
        return ()
    starved = float(np.nanmedian(seen.starved_share))
    return (
        f"the job is host-bound: {starved:.0%} of operations were launched only just in time, "
        "so device times partly show the hosts' speed",
    )


NOBODY_ELSE = "no other rank has the same loading to do"
NOBODY_ELSE_LOADS = (
    f"{NOBODY_ELSE}: the loader timed alone, there and on another host, "
    "tells whether the host, the storage or the loading itself is slow"
)
SHARDS = (
    "its loading takes a little longer only, as that of longer documents does: the loader timed "
    "alone on that host and on another decides"
)
OF_STAGE = (
    "the ranks that load are of different stages, and how long a device waits for its data depends "
    "on what its stage has to do: the loader timed alone decides"
)
OF_TWO = (
    "of two processes that share cores one may always lose more to what else runs there: a third "
    "rank that loads, or the loader timed alone, decides"
)
MAY_COLLECT = (
    "neither garbage collections nor launches were recorded: a process that collects stands still "
    "as well, whatever the host"
)
FEW_OF_TWO = (
    "two ranks in so few iterations: hosts of a job that can hardly keep up differ by as much, now "
    "the one and now the other"
)
OF_ITS_STAGE = (
    "it is compared with other stages, whose devices have gaps of their own: how quickly its host "
    "launches (a trace with launch times), or a second replica, decides"
)
OF_ITS_REPLICA = (
    "another rank of its replica computes slowly: waiting for that one, where the trace does not "
    "show it, may be the reason as well as its host"
)
HARDLY_MORE = (
    "its peers' devices have nothing to do for nearly as long: what all hosts do in that time "
    "takes a little longer on one core than on another"
)
NOBODY_WAITS = (
    "nobody waits for this time, so the rank may itself wait in it for what the trace does not "
    "show: nothing is gained by a look at its host before that costs anything"
)
LATE = (
    "its connection, clocks that are off by as much, more to receive, or a process that is woken "
    "late would show the same: of twenty ranks that stood out so in made-up jobs none was at fault"
)
WAIT_TOO = (
    "other ranks' loaders take as long now and then: storage that all share may be the reason as "
    "well as this one's host"
)


def _without_waiting(inquiry: Inquiry, suspects: tuple[Suspect, ...]) -> tuple[Suspect, ...]:
    """Leave out TP mates of slow ranks, unless all that a TP group waits for was recorded."""
    seen, slow = inquiry.seen, inquiry.slow
    if seen.tells_passes and not seen.mixes_communication:
        return suspects
    return tuple(one for one in suspects if not slow[mates_of(seen.members, one.row)].any())


def _alike_at_their_place(seen: Observations, suspects: tuple[Suspect, ...]) -> set[int]:
    """Return the rows of suspects whose TP rank loses about as much in other TP groups: a suspect
    of another stage has the same TP rank, or ranks at this place do (`loses_as_its_place`).
    """
    members, found = seen.members, set()
    if members.layout.tp < 2:
        return set()
    tp_rank = members.place["tp"]
    accused = np.array([one.row for one in suspects], dtype=np.int64)
    for one in suspects:
        elsewhere = members.stage[accused] != members.stage[one.row]
        is_like = tp_rank[accused] == tp_rank[one.row]
        _, over = _lost_and_excess_ns(seen, one, Cause.HOST)
        if (is_like & elsewhere).any() or loses_as_its_place(
            seen, one.row, one.course.active, over
        ):
            found.add(one.row)
    return found


def _where_time_is_lost(seen: Observations, row: int, active: Flags) -> tuple[str, ...]:
    """Say where the lost time lies: inside passes, and between operations; () where CPU times were
    not recorded, as in profiles.
    """
    gap_ns = float(np.median(seen.host_gap_ns[row][active]))
    gap = f"{milliseconds(gap_ns)} between operations"
    if ending_ns := _at_the_end_ns(seen, row, active, seen.host_gap_ns):
        gap += f" ({milliseconds(ending_ns)} at the end of an iteration)"
    if seen.members.device_kind == "cpu":
        if not seen.stolen_ns.any():
            return ()
        stolen = milliseconds(float(np.median(seen.stolen_ns[row][active])))
        return (
            f"of it {stolen} while computing (wall less CPU time: the thread was taken off its "
            f"core) and {gap}",
        )
    stalled_ns = float(np.median(seen.stalled_ns[row][active]))
    if not stalled_ns:
        return (f"of it {gap}, where the device had nothing to do: its host was late",)
    return (
        f"of it {milliseconds(stalled_ns)} inside passes whose modules mostly run as fast as ever "
        f"(the device had nothing to do: its host launched too late) and {gap}",
    )


def _at_the_end_ns(seen: Observations, row: int, active: Flags, of_ns: Floats) -> float:
    """Return what a row loses at the end of an iteration, if that is most `of_ns`, (row,
    iteration), of it; else 0.
    """
    if seen.ending_ns is None or seen.members.log_for_all[row]:
        return 0.0
    ending_ns = float(np.median(robust.beyond_most(seen.ending_ns)[row][active]))
    least_ns = CHANGES.explains_share * float(np.median(of_ns[row][active]))
    return ending_ns if ending_ns >= least_ns else 0.0


def _advice_on_endings(seen: Observations, suspect: Suspect) -> tuple[str, ...]:
    """Return what to do where a rank loses its time at the end of iterations; else nothing."""
    lost_ns, active = np.nan_to_num(seen.lost(Cause.HOST)), suspect.course.active
    is_ending = _at_the_end_ns(seen, suspect.row, active, lost_ns) > 0
    return (AT_THE_END_ADVICE,) if is_ending else ()


def _search_late_exits(inquiry: Inquiry) -> Answer:
    """Compare the ranks of a stage by how late they leave their communications; none is blamed."""
    seen, slow, transfers = inquiry.seen, inquiry.slow | inquiry.named, inquiry.seen.transfers
    if transfers is None or Cause.LINK not in seen.lost_ns:
        return Answer()
    step_ns = float(np.median(seen.iteration_ns))
    clock_error_ns = seen.alignment.residual_p99_ns if seen.alignment else 0.0

    answer = lost_time(
        inquiry,
        Loss(
            cause=Cause.LINK,
            name="late exit from communication",
            groups=stage_peers(seen),
            bursty=seen.members.device_kind == "cpu",
            excuses_slow=True,
            doubt=lambda suspect: OTHERS_WAIT if slow.any() and not slow[suspect.row] else LATE,
            base_ns=lambda row, own, excess: float(np.median(transfers.quick_ns[row])),
            drop_explained=lambda suspects: _without_victims(seen, transfers, suspects, slow),
            predicate="leaves its communications {time} an iteration later than the other "
            "members do",
            advice=lambda suspect, owner: connection_advice(
                seen, seen.members.workers[suspect.row]
            ),
        ),
    )
    if answer.findings and clock_error_ns >= LINKS.most_clock_share * step_ns:
        return Answer(notes=(_of_clocks_apart(clock_error_ns, step_ns),))
    findings = tuple(_blaming_host(seen, one) for one in answer.findings)
    return replace(answer, findings=findings, least_slowdown=None, least_because="")


def _of_clocks_apart(error_ns: float, step_ns: float) -> str:
    """Say that clocks which miss each other by so much were not put together at all."""
    return (
        f"clocks agree within {milliseconds(error_ns)} only (p99) of iterations of "
        f"{milliseconds(step_ns)}: who leaves communication late cannot be told"
    )


def _blaming_host(seen: Observations, finding: Finding) -> Finding:
    """Return the finding, with the host as its cause if all processes of a CPU job run on one host:
    no network lies between any two of them, and it is the host that wakes a process late.
    """
    members = seen.members
    if members.device_kind != "cpu" or len(set(members.hosts)) > 1 or not members.hosts[0]:
        return finding
    row = next(number for number, ranks in enumerate(members.workers) if ranks == finding.ranks)
    stolen = np.median(seen.stolen_ns, axis=1)
    theirs = float(np.median(np.delete(stolen, row)))
    return replace(
        finding,
        cause=Cause.HOST,
        evidence=(*finding.evidence, off_core_text(float(stolen[row]), theirs)),
        next_steps=host_advice(finding.owner),
    )


def _without_victims(
    seen: Observations, transfers: Transfers, suspects: tuple[Suspect, ...], slow: Flags
) -> tuple[Suspect, ...]:
    """Leave out late ranks whose partners explain their lateness; the latest is kept.

    `slow` are the rows that compute slowly, or lose time to loader, collector or host: a rank that
    is late with them only waits for them, and lateness is handed on along their pipeline.
    """
    workers = seen.members.workers
    accused = {rank for row in np.flatnonzero(slow) for rank in workers[row]}
    kept: list[Suspect] = []
    for suspect in sorted(suspects, key=lambda one: -one.course.effect):
        own = set(workers[suspect.row])
        if _in_pipeline(seen, suspect.row, slow):
            continue
        if _share_with(transfers, own, accused - own) <= CONSEQUENCES.victim_share:
            kept.append(suspect)
            accused |= own
    return tuple(kept)


def _in_pipeline(seen: Observations, row: int, slow: Flags) -> bool:
    """Return whether a slow row shares the row's pipeline: its replica and place, another stage."""
    place = seen.members.numbered("tp", "cp")
    return bool((slow & (place == place[row]) & seen.members.other_stages(row)).any())


def _share_with(transfers: Transfers, own: set[int], accused: set[int]) -> float:
    """Return the share of a worker's lateness that arose in communications with the accused."""
    mine = [one for one in transfers.late_in if one.rank in own]
    total = sum(one.time_ns for one in mine)
    with_accused = sum(one.time_ns for one in mine if accused & set(one.members))
    return with_accused / total if total > 0 else 0.0


LOADER = CauseSpec(
    cause=Cause.LOADER,
    search=_search_loading,
    tests_rows=lambda seen: Cause.LOADER in seen.lost_ns,
    power_words="a rank waits for its data (share of the iteration)",
    quantity="data loading in an iteration",
)
COLLECTOR = CauseSpec(
    cause=Cause.GC,
    search=_search_collecting,
    tests_rows=lambda seen: Cause.GC in seen.lost_ns,
    power_words="a rank stops for garbage collection (share of the iteration)",
    quantity="garbage collection in an iteration",
)
HOST = CauseSpec(
    cause=Cause.HOST,
    search=_search_hosts,
    tests_rows=lambda seen: Cause.HOST in seen.lost_ns,
    power_words="a rank loses time to its host (share of the iteration)",
    quantity="time outside operations in an iteration",
)
LATE_EXITS = CauseSpec(
    cause=Cause.LINK,
    search=_search_late_exits,
    tests_rows=lambda seen: Cause.LINK in seen.lost_ns,
    quantity="late exit from communication in an iteration",
)
