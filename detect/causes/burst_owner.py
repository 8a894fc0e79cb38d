"""Decide whose fault it is that a rank loses time now and then: node, job, or undecided, and why.

    cause_and_owner     launched late then? stands idle then? otherwise what `_doubt` says
    _doubt              what else may be the reason: few hits, mates, noise of others, longer data
    _doubt_of_loader    storage that all load from, its host, what the first rank does
    _doubt_of_host      launching, its place, the loop's own writing, the warm-up, uneven data
    longer_in_hits_ns   what a row that computes slowly takes longer then

Whether longer data may be the reason is asked in `burst_data.py`. The node is at fault where no
sentence of these holds, the job for garbage that was recorded as collected.

Example: rank 0 stops for 2.0 s in iterations 6 and 12, and its 31 peers do nothing meanwhile: it
may write a checkpoint (`_may_write`), so that nobody is named.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from detect.causes.burst_data import are_uneven, may_be_its_experts, may_be_longer_data, varies
from detect.causes.device import waits_beside
from detect.causes.hits import FEW, Burst
from detect.causes.host_data import stall_by_their_data
from detect.causes.launching import (
    is_host_bound,
    launches_as_quickly,
    may_wait_for_launches,
    may_wait_unseen,
    starvation,
    waits_for_launches,
)
from detect.causes.searches import (
    OF_FIRST,
    OF_GROUP,
    OF_PLACE,
    load_as_long,
    loading_of,
    loses_as_its_place,
    mates_that_load,
    others_load_as_long,
)
from detect.observe.observations import Observations
from detect.report import Cause, Owner
from detect.stats import robust
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.devices import PAIRS
from detect.thresholds.observing import STARVATION
from megascan.arrays import Floats, mask_of

SHARED = (
    "most ranks of its stage have such bursts: waiting for one of them, which the trace does not "
    "show, may be the reason as well"
)
MATE = (
    "a rank of its TP group stands still or computes slowly as well, or recorded "
    "nothing: waiting for it, which the trace does not show, may be the reason as well"
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


def cause_and_owner(
    seen: Observations, burst: Burst, cause: Cause
) -> tuple[Cause, Owner, tuple[str, ...]]:
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
    longer_ns = np.maximum(longer_in_hits_ns(seen, burst)[burst.hits], 1.0)
    return float(np.median(idle_ns / longer_ns)) >= BURSTS.idle_share


def longer_in_hits_ns(seen: Observations, burst: Burst) -> Floats:
    """Return what a row that computes slowly takes longer in its hits, (iteration,) ns."""
    busy_ns = np.nan_to_num(seen.busy_ns[burst.row])
    return np.asarray(busy_ns * burst.excess / (1.0 + burst.excess))


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
    is_whole = np.sum(seen.within([(hits[0], hits[-1])])) > np.ptp(hits)
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
