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
that is slow in nearly all iterations is left to other searches.

Example: 16 ranks, 10 iterations. Rank 5 loses more than 2 % of an iteration in 4 of 10, the others
in none of 150: p = 2.2e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from detect.causes.burst_data import (
    are_uneven,
    compute_excess,
    may_be_its_experts,
    may_be_longer_data,
    varies,
    with_twins,
)
from detect.causes.device import beyond_others, mates_of, waits_beside
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
    FEW,
    Burst,
    as_large,
    bursts,
    course_of,
    hits_of,
    interval_of,
    lone_pause,
    lost_share,
    microbatches_of,
    slow_passes,
    stands_out_then,
    stops_in_passes,
)
from detect.causes.host_data import stall_by_their_data
from detect.causes.launching import (
    is_host_bound,
    launches_as_quickly,
    may_wait_for_launches,
    may_wait_unseen,
    starvation,
    waits_for_launches,
)
from detect.causes.one_of_two import pair_burst, pair_pause
from detect.causes.searches import (
    ADVICE,
    LOADING_AXES,
    OF_FIRST,
    OF_GROUP,
    OF_PLACE,
    load_as_long,
    loading_of,
    loses_as_its_place,
    mates_that_load,
    others_load_as_long,
)
from detect.observe.observations import Members, Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import counted, milliseconds, percent, subject_of
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.devices import ORDINARY, PAIRS
from detect.thresholds.observing import STARVATION
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.timeline import rows_alike

SHARED = (
    "most ranks of its stage have such bursts: waiting for one of them, which the trace does not "
    "show, may be the reason as well"
)
MATE = (
    "a rank of its TP group stands still or computes slowly as well, or recorded "
    "nothing: waiting for it, which the trace does not show, may be the reason as well"
)
NOBODY_WAITS = (
    "nobody waits for this time, so the rank may itself wait in it for what the trace does not show"
)
LONGER = "its microbatches vary in length, and longer ones may be the reason as well"
MORE_DATA = (
    "in these iterations it may get longer data: neither ranks on the same data nor what moves "
    "memory for each token, where these are known, were as quick as ever"
)
EXPERTS = "now and then its experts may get more tokens, which would show the same"
FEW_OTHERS = "with so few ranks beside it, noise of its own may be the reason as well"
IDLE = (
    "in these iterations the device had nothing to do for most of that time: its host, which "
    "launched too late, may be the reason as well as the device"
)
LATE_THEN = (
    "in these iterations more of its operations come just in time than in its others, for about as "
    "many as are slow: its host, which launches them too late, may be the reason"
)
ALL_LATE = "all devices wait for their hosts here, and some host is late by more now and then"
ALONE = (
    "no other rank shares its stage, so that nobody knows what sound passes of it vary by, and "
    "mending it would gain next to nothing: no reason to change a node"
)
HARDLY_SURE = (
    "mending it would gain next to nothing, and chance is hardly excluded: trace more iterations"
)
OTHERS_TOO = (
    "its peers have such passes in iterations of their own, if in fewer: noise that comes to "
    "everybody may be the reason as well"
)
ONE_KIND = (
    "all slow passes are of one kind, forward or backward: a slow device slows both, so this is "
    "rather something that the program does in these"
)
PAUSES_ELSEWHERE = (
    "other ranks stand still for as long now and then, if in fewer iterations: noise that comes to "
    "everybody, and to some more often, may be the reason as well"
)
EARLY = (
    "it stands still in the first iterations after the run's warm-up, and no more: it may compile "
    "and allocate for longer than others"
)
WRITES = (
    "the job's first rank alone writes checkpoints, logs and evaluations in most trainers, which "
    "would stop it in the same way: look at what the loop does in these iterations first"
)
LENGTHS = (
    "its microbatches vary in length, and so does what the last stage alone computes, which may be "
    "the reason as well"
)
OF_NEIGHBOURS = (
    "other ranks of its host load as long now and then: that host, or the storage that all load "
    "from, may be the reason as well as this one's loader"
)
STORAGE = (
    "loaders elsewhere have such pauses, too, if fewer: storage that all share may be the reason "
    "as well as this one's host"
)
COLLECTOR = (
    "single passes take twice as long and more, and the next one is as quick as ever, so the rank "
    "stands still in them: mostly to collect garbage, which was not traced, but its host and its "
    "device could show the same"
)
COLLECTS = (
    "garbage collection was not traced, for which one rank stops now and then more often than for "
    "its host"
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
    if cause == Cause.COMPUTE:
        excess_ns = _longer_ns(seen, burst)
        saved_ns = saved_by_compute(seen, row, excess_ns)
    else:
        excess_ns = burst.excess * float(np.median(seen.iteration_ns))
        saved_ns = np.maximum(excess_ns, _over_others_ns(seen.lost(cause), burst))
    share = float(burst.excess.mean())
    what = "its passes" if cause == Cause.COMPUTE else "the window"
    cause, owner, reasons = _blamed(seen, burst, cause)
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
            predicate=f"{does} in {num_hits} of {num_iterations} iterations, "
            f"{milliseconds(float(excess_ns[burst.hits].mean()))} each on the mean,",
            evidence=(
                f"that is {percent(1 + share)[:-2]} % of {what}; of "
                f"{counted(int(burst.others.sum()) * num_iterations, 'iteration')} of the other "
                f"ranks {burst.other_hits} lost as much",
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
    return undecided(finding, ALONE) if is_alone and cost < ORDINARY.small_gain_ratio else finding


def _longer_ns(seen: Observations, burst: Burst) -> Floats:
    """Return what a row that computes slowly takes longer in its hits, (iteration,) ns."""
    busy_ns = np.nan_to_num(seen.busy_ns[burst.row])
    return np.asarray(busy_ns * burst.excess / (1.0 + burst.excess))


def _blamed(seen: Observations, burst: Burst, cause: Cause) -> tuple[Cause, Owner, tuple[str, ...]]:
    """Return cause and owner of a burst, with the sentences that carry them."""
    starved = starvation(seen, burst.row, burst.hits) if cause == Cause.COMPUTE else None
    if starved is not None:
        owner, why = starved
        if owner is Owner.JOB:  # hosts that are always late do not choose these iterations
            return Cause.HOST, Owner.UNDECIDED, (why, ALL_LATE)
        is_node = owner is Owner.NODE
        reasons = {
            FEW: not burst.is_sure,
            WRITES: is_node and _may_write(seen, burst),
            EXPERTS: is_node and may_be_its_experts(seen, burst),
        }
        doubt = _first_of(reasons)
        return Cause.HOST, Owner.UNDECIDED if doubt else owner, (why, doubt) if doubt else (why,)
    doubt = _doubt(seen, burst, cause)
    if doubt in (COLLECTOR, COLLECTS) or (burst.is_stops and Cause.GC not in seen.lost_ns):
        cause = Cause.GC
    elif burst.is_stops:
        cause = Cause.HOST
    if doubt:
        return cause, Owner.UNDECIDED, (doubt,)
    # its device or its host: the node in either case, unless it collects garbage unseen
    is_idle = cause == Cause.COMPUTE and _stands_idle(seen, burst)
    if is_idle and (Cause.GC not in seen.lost_ns or is_host_bound(seen)):
        return cause, Owner.UNDECIDED, (IDLE, ALL_LATE if is_host_bound(seen) else COLLECTS)
    return cause, Owner.JOB if cause == Cause.GC else Owner.NODE, (IDLE,) if is_idle else ()


def _first_of(reasons: Mapping[str, bool]) -> str:
    """Return the first sentence that holds; empty where none does."""
    return next((reason for reason, holds in reasons.items() if holds), "")


def _doubt(seen: Observations, burst: Burst, cause: Cause) -> str:
    """Return the sentence that says what else may be the reason of a burst; empty if nothing is."""
    is_group = cause != Cause.GC and len(seen.members.workers[burst.row]) > 1
    known = {FEW: not burst.is_sure, OF_GROUP: is_group, SHARED: burst.is_shared}
    doubt = _first_of({**known, MATE: burst.is_mates})
    if doubt or cause == Cause.GC:
        return doubt
    if cause == Cause.LOADER:
        return _doubt_of_loader(seen, burst)
    if Cause.GC not in seen.lost_ns and (cause == Cause.HOST or burst.is_stops):
        return COLLECTOR if burst.is_stops else COLLECTS
    if cause == Cause.HOST:
        return _doubt_of_host(seen, burst, are_uneven(seen))
    launches = may_wait_for_launches(seen)
    if not _waits_no_more(seen, burst):
        launches = launches or waits_for_launches(seen, burst.row, burst.hits)
    waits = _waits_beside(seen, burst)
    reasons = {
        FEW_OTHERS: _may_be_noisier(burst),
        OTHERS_TOO: burst.is_noise and not burst.cuts_passes,
        ONE_KIND: burst.is_one_kind and not burst.is_one_speed and not burst.cuts_passes,
        MORE_DATA: may_be_longer_data(seen, burst),
        launches: bool(launches),
        LATE_THEN: _is_launched_late(seen, burst),
        waits: bool(waits),
        EXPERTS: may_be_its_experts(seen, burst),
    }
    return _first_of(reasons)


def _waits_no_more(seen: Observations, burst: Burst) -> bool:
    """Return whether half of the row's work comes just in time, and no more in its bursts than in
    its other iterations, and than of its peers' work: a host that is late now and then is late for
    more.

    Example: half of what is launched begins a pass, and comes just in time on every rank, whether
    its passes take 1.0 or 1.3 times as long.
    """
    starved, stage = seen.starved_share, seen.members.stage
    peers = burst.others & (stage == stage[burst.row])
    others = peers if peers.any() else burst.others
    if starved is None or burst.hits.all() or not others.any():
        return False
    own, usual = (float(robust.median(starved[burst.row][at])) for at in (burst.hits, ~burst.hits))
    least = min(usual, float(robust.median(starved[others][:, burst.hits])))
    is_half = own < STARVATION.fed_share + BURSTS.alike_starved
    return is_half and own - least < BURSTS.alike_starved


def _is_launched_late(seen: Observations, burst: Burst) -> bool:
    """Return whether more of the row's operations come just in time in its bursts than in its other
    iterations, and than its peers', by half of those that are slow: a device that is slow by itself
    lets its host get ahead.

    Example: an eighth of the passes take 1.2 to 1.4 times as long, and 16 % of the operations come
    just in time; in iterations without such passes none do.
    """
    starved, stage = seen.starved_share, seen.members.stage
    peers = burst.others & (stage == stage[burst.row])
    others = peers if peers.any() else burst.others
    if starved is None or burst.hits.all() or burst.size <= 1.0 or not others.any():
        return False
    own, usual = (float(robust.median(starved[burst.row][at])) for at in (burst.hits, ~burst.hits))
    rise = own - max(usual, float(robust.median(starved[others][:, burst.hits])))
    slow_share = float(burst.excess[burst.hits].mean()) / (burst.size - 1.0)
    return rise >= max(BURSTS.alike_starved, PAIRS.agrees_share * slow_share)


def _waits_beside(seen: Observations, burst: Burst) -> str:
    """Say that the row's passes may be slow in its bursts because collectives beside them wait for
    others; empty where they do not wait as long.
    """
    stage = seen.members.stage
    own = mask_of([burst.row], len(stage))
    others = burst.others & (stage == stage[burst.row])
    return waits_beside(seen, own, others, burst.hits, burst.effect)


def _stands_idle(seen: Observations, burst: Burst) -> bool:
    """Return whether a device that computes slowly now and then stands idle in most of its slow
    iterations for a good part of what they take longer. A slow device lets its host get ahead.

    Example: 2.3 ms longer in seven of ten iterations; in five of them 1.2 ms or more idle.
    """
    idle_ns = np.nan_to_num(seen.lost(Cause.HOST)[burst.row])[burst.hits]
    longer_ns = np.maximum(_longer_ns(seen, burst)[burst.hits], 1.0)
    return float(np.median(idle_ns / longer_ns)) >= BURSTS.idle_share


def _may_be_noisier(burst: Burst) -> bool:
    """Return whether so few ranks are compared that one of them may only be the noisiest: unless it
    always slows to one speed, or none of the others ever does and chance hardly explains that.
    """
    is_sure = burst.other_hits == 0 and burst.q_value <= BURSTS.certain_q
    is_few = int(burst.others.sum()) < BURSTS.sure_others
    return is_few and not burst.is_one_speed and not is_sure


def _doubt_of_loader(seen: Observations, burst: Burst) -> str:
    is_shared = burst.usual_rate >= BURSTS.shared_storage_share or _others_pause(seen, burst)
    others = np.flatnonzero(burst.others)
    if is_shared or others_load_as_long(seen, burst.row, others, burst.hits):
        return STORAGE
    if _neighbours_load_as_long(seen, burst):
        return OF_NEIGHBOURS
    is_first = int(seen.members.place["tp"][burst.row]) == 0
    return OF_FIRST if is_first and mates_that_load(seen) is not None else ""


def _neighbours_load_as_long(seen: Observations, burst: Burst) -> bool:
    """Return whether the other ranks of the row's host load about as long nearly as often, all
    taken together.

    Example: a rank waits for its loader in 4 of 8 iterations; three others of its host load as
    long in one or two of them each.
    """
    loading = loading_of(seen)
    hosts = np.array(seen.members.hosts)
    mates = hosts == hosts[burst.row]
    mates[burst.row] = False
    own = float(np.median(np.nan_to_num(loading[burst.row])[burst.hits]))
    as_long = np.nan_to_num(loading[mates]) >= own / LOSSES.loader_ratio
    return int(as_long.sum()) >= BURSTS.others_share * int(burst.hits.sum())


def _others_pause(seen: Observations, burst: Burst) -> bool:
    """Return whether ranks of other hosts that load at the same TP rank wait about as long now and
    then.
    """
    loading, tp_rank = seen.lost(Cause.LOADER), seen.members.place["tp"]
    hosts = np.array(seen.members.hosts)
    others = burst.others & (tp_rank == tp_rank[burst.row]) & (hosts != hosts[burst.row])
    own = float(np.median(np.nan_to_num(loading[burst.row])[burst.hits]))
    return load_as_long(own, loading[others])


def _doubt_of_host(seen: Observations, burst: Burst, is_uneven: bool) -> str:
    """Return how launching, noise, or uneven data, may explain what a rank lost to its host; empty
    where they cannot. Time between passes does not depend on the data.
    """
    stage = seen.members.stage
    row, step_ns = burst.row, float(np.median(seen.iteration_ns))
    share = float(burst.excess[burst.hits].mean())
    launches = launches_as_quickly(seen, row, burst.hits, share, least_starved=STARVATION.fed_share)
    unseen = may_wait_unseen(seen, np.array([row]), burst.hits)
    reasons = {
        launches: bool(launches),
        unseen: bool(unseen),
        OF_PLACE: loses_as_its_place(seen, row, burst.hits, share * step_ns),
        WRITES: _may_write(seen, burst),
        EARLY: _may_warm_up(seen, burst),
        PAUSES_ELSEWHERE: burst.usual_rate >= BURSTS.elsewhere_share * float(burst.hits.mean()),
        LENGTHS: is_uneven and 0 < int(stage[row]) == int(stage.max()),
        LONGER: _stalls_by_its_data(seen, burst, share)
        or stall_by_their_data(seen, np.array([row])),
    }
    return _first_of(reasons)


def _stalls_by_its_data(seen: Observations, burst: Burst, share: float) -> bool:
    """Return whether longer data may look like the stalls of a row, which lose `share` of the step:
    they lie in passes, are small, and the microbatches of the job differ.

    What a pass takes besides its layers does not follow the layers' length.
    """
    stalled_ns = float(np.nan_to_num(seen.stalled_ns[burst.row][burst.hits]).mean())
    stalled = stalled_ns / float(np.median(seen.iteration_ns))
    if share >= BURSTS.least_uneven_share or stalled < BURSTS.most_of_host_share * share:
        return False
    return varies(seen, burst)


def _may_write(seen: Observations, burst: Burst) -> bool:
    """Return whether what stops a rank may be what the loop does there now and then: it is the
    job's first one, and stops for longer than an iteration takes, or every so many iterations. Of a
    profile it may be whatever the rank stops for, since nothing of the loop's own is marked there.

    Example: rank 0 stops for 2.0 s in iterations 6 and 12, whose 31 peers do nothing meanwhile.
    """
    if 0 not in seen.members.workers[burst.row]:
        return False
    if not seen.tells_passes:
        return True
    hits = seen.iterations[burst.hits]
    apart = np.diff(hits)
    # windows that repeat have a period of their own, which says nothing
    is_whole = np.sum((seen.iterations >= hits[0]) & (seen.iterations <= hits[-1])) > np.ptp(hits)
    is_regular = len(apart) > 1 and apart[0] > 1 and bool((apart == apart[0]).all())
    is_long = float(burst.excess[burst.hits].mean()) >= BURSTS.written_share
    return is_long or bool(is_regular and is_whole)


def _may_warm_up(seen: Observations, burst: Burst) -> bool:
    """Return whether a rank stands still from a run's first iterations on, and no more later.

    Example: 66 ms each in iterations 3 and 4, nothing in iteration 5.
    """
    is_first = seen.iterations[0] <= seen.num_warmup_iterations + 1
    num_hits = int(burst.hits.sum())
    return bool(is_first and num_hits < len(burst.hits) and burst.hits[:num_hits].all())


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
    waiting = _wait_for_one_of(seen, found)
    hits = hits_of(compute_excess(seen, known), known)
    return [
        replace(
            one,
            is_shared=_has_most_of(stage == at, rows, waiting)
            or (
                not (one.in_modules and one.cuts_passes)
                and _is_usual_there(_alike(seen, *hits, one), ~known & (stage == at), one)
            ),
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


def _has_most_of(of_stage: Flags, rows: Integers, waiting: Flags) -> bool:
    """Return whether most ranks of a stage of several, (row,) flags, are among the `rows` that have
    bursts and are not `waiting` for a mate.
    """
    num_bursts, num_ranks = int(of_stage[rows][~waiting[rows]].sum()), int(of_stage.sum())
    return num_ranks > 1 and 2 * num_bursts > num_ranks


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


def _wait_for_one_of(seen: Observations, found: list[Burst]) -> Flags:
    """Flag the TP mates of rows that are slower than these in their bursts, (row,)."""
    clear = [mates_of(seen.members, one.row).tolist() for one in found if one.stands_out]
    return mask_of([row for mates in clear for row in mates], len(seen.members))


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
