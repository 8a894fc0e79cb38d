"""Tell whether a device waits for its host, and whether that host is to blame.

A device is starved where most of its operations begin as soon as they are launched: its queue is
empty. A job whose hosts can hardly keep up starves first the ranks that also load data. A starved
rank is therefore compared with the most starved rank of every other TP group; its host is at fault
only if the other groups' ranks are fed.

Example: 92 % of rank 3's operations were launched just in time, and 10 % of operations of the most
starved ranks of other groups: the host of rank 3. If it were 85 %, the job would be host-bound.

What all other searches ask here:

    starvation           is a slow device starved, and whose fault is it?
    launches_as_quickly  does the host launch as quickly as its peers, so that it is only the last?
    stands_still         does it stop, between launches or at the end of iterations?
    off_core_explains    is a process on a CPU taken off its core?
    most_cost_of_host    what may a host cost at most that launches slowly, or stops at the end?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from detect.causes.device import host_advice, mates_of
from detect.causes.finding import ratio_without
from detect.causes.hits import num_runs
from detect.causes.readings import draws_more
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import milliseconds
from detect.thresholds.bursts import BURSTS
from detect.thresholds.networks import LINKS
from detect.thresholds.observing import PACE, STARVATION
from detect.thresholds.verdicts import COSTS
from megascan.arrays import Flags, Floats, Integers

IN_DOUBT_LAUNCH = (
    "an end's device waits for its host, and what is lost is so little, or compared with so few "
    "connections, that launches which come a little late explain it"
)
FAR_LATER = (
    "but the step would be far shorter without this one: if its host were late only as all others "
    "are, the next one would hold up the step as much"
)
BEYOND_HOSTS = (
    "but hosts of one model differ by less than this rank and its peers: its host, or its device, "
    "may be slow"
)
WANDERS = (
    "it launches slowly in some iterations and hardly slower than others in the rest: load that "
    "comes and goes, on any host, looks like this in a short window"
)


def is_host_bound(seen: Observations) -> bool:
    """Return whether devices wait for their hosts nearly all the time, on the usual rank."""
    if seen.starved_share is None:
        return False
    share = float(np.nan_to_num(np.nanmedian(seen.starved_share)))
    return share >= STARVATION.host_bound_share


def passes_tell_of_devices(seen: Observations) -> bool:
    """Return whether how passes end tells of devices: of GPUs, whose passes were recorded, and that
    do not wait for their hosts anyway.
    """
    is_gpu = seen.members.device_kind != "cpu"
    return is_gpu and seen.tells_passes and not is_host_bound(seen)


def hosts_are_all_late(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a starved device is nothing special: other TP groups have one as well."""
    if seen.starved_share is None:
        return False
    others = _starved_groups(seen, seen.starved_share, row, active)
    own = float(robust.median(seen.starved_share[row][active]))
    return own >= STARVATION.starved_share and _are_starved(others)


def is_nearly_bound(seen: Observations, rows: Integers) -> bool:
    """Return whether launching takes the hosts of these rows most of an iteration, so that their
    devices' queues are hardly ever full. Example: 31 of 39 ms.
    """
    if seen.launching_ns is None:
        return False
    launching_ns = float(np.median(seen.launching_ns[rows]))
    return launching_ns >= PACE.busy_share * float(np.median(seen.iteration_ns))


def launches_slowly(seen: Observations, row: int) -> bool:
    """Return whether the row's host takes longer from launch to launch than those of all others."""
    if seen.launch_pace is None or len(seen.launch_pace) < 2:
        return False
    level = robust.centre(seen.launch_pace)
    others = np.delete(level, row)
    known = np.isfinite(others)
    return bool(known.any() and level[row] - others[known].max() >= PACE.slow_log)


def launches_explain(
    seen: Observations, rows: Sequence[int], lost_ns: float, least: float = STARVATION.starved_share
) -> bool:
    """Return whether the device of one of these rows waits for its host in the `least` share of its
    operations and more, and a transfer loses no more than late launches take.
    """
    if seen.starved_share is None or not lost_ns < LINKS.late_launch_ns:
        return False
    starved = robust.median(seen.starved_share[list(rows)], axis=1)
    return bool(np.nan_to_num(starved).max(initial=0.0) >= least)


def may_wait_unseen(seen: Observations, rows: Integers, active: Flags) -> str:
    """Say that devices which stand still in their passes may wait for mates there, in communication
    that nobody recorded; empty where all of it was, or they stand still elsewhere.
    """
    if not seen.hidden_axes:
        return ""
    stalled = np.nan_to_num(seen.stalled_ns[rows][:, active]).sum()
    lost = np.nan_to_num(seen.lost(Cause.HOST)[rows][:, active]).sum()
    if not stalled > STARVATION.stopped_share * lost:
        return ""
    axes = " and ".join(axis.upper() for axis in seen.hidden_axes)
    return (
        f"what {axes} ranks send each other was not recorded: waiting for a mate inside its passes "
        "looks like standing still"
    )


def starvation(
    seen: Observations, row: int, active: Flags, effect: float = 0.0
) -> tuple[Owner, str] | None:
    """Return owner and sentence where the device waits for its host; None where it does not.

    If its peers are well fed, half of the work launched just in time is enough: a slow device would
    let its host get ahead, unless the host waits for it itself (`_is_at_work`). A host that stands
    still need not be late for most of the work. `effect` is by how much longer the device's work
    takes, log; 0 where that is not known.
    """
    if seen.starved_share is None:
        return None
    if stands_still(seen, row, active) and _is_lost_to_its_host(seen, row, active, effect):
        return Owner.NODE, _stops_text(seen, row, active)
    own, theirs = _just_in_time(seen, row, active)
    if not own >= _least_starved(theirs) or _is_at_work(seen, row, active, effect):
        return None
    others = _starved_groups(seen, seen.starved_share, row, active)
    words = (
        f"{own:.0%} of its operations were launched only just in time, so the device waited for "
        f"the host; of its peers' {theirs:.0%}"
    )
    if _are_starved(others) and not _is_far_busier(seen, row, active):
        is_far = effect > PACE.slow_log
        words += "; but other TP groups have a starved rank too: the job is host-bound"
        return (Owner.UNDECIDED, f"{words}; {BEYOND_HOSTS}") if is_far else (Owner.JOB, words)
    words += _idle_beyond_launching(seen, row, active)
    least = STARVATION.slower_share * effect
    if theirs > STARVATION.fed_share:  # somebody's host is always the last, by what hosts differ by
        least = max(least, PACE.slow_log)
    doubt = (
        _doubt(seen, row, num_others=len(others))
        or _prepares_its_passes(seen, row, active)
        or _hardly_slower_host(seen, row, active, least)
        or (WANDERS if num_runs(active) > 1 else "")
    )
    if not len(others) and theirs > STARVATION.fed_share:
        return Owner.JOB, f"{words}: the job is host-bound, whatever the node"
    return (Owner.UNDECIDED, f"{words}; {doubt}") if doubt else (Owner.NODE, words)


def of_far_later_host(finding: Finding) -> Finding:
    """Return the finding on a starved rank of a job whose hosts are all late, on its node where the
    step would be far shorter without it, by replay: of hosts that are late alike the next one would
    hold it up as much.

    Example: starved ranks in four TP groups; without the first of them the step would be 2.26 times
    as fast, without another one 1.01 times.
    """
    least = float(np.exp(PACE.slow_log))
    is_of_job = finding.cause is Cause.HOST and finding.owner is Owner.JOB
    if not (is_of_job and finding.cost_is_replayed and finding.step_time_cost_ratio >= least):
        return finding
    return replace(
        finding,
        owner=Owner.NODE,
        evidence=(*finding.evidence, FAR_LATER),
        next_steps=host_advice(Owner.NODE),
    )


def _is_far_busier(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a rank is at work for far longer than any other of its stage: of ranks that
    their hosts hold up alike nobody is.

    Example: a host-bound job, one of whose hosts launches twice as slowly for one rank. Its work
    takes 16 times the time of its peers', who wait for it and so get ahead; the next one's 1.6.
    """
    peers = _stage_peers(seen, row)
    if not peers.any():
        return False
    own = float(robust.median(seen.busy_ns[row][active]))
    others = robust.median(seen.busy_ns[peers][:, active], axis=1)
    return own >= STARVATION.far_ratio * float(np.max(others))


def _is_at_work(seen: Observations, row: int, active: Flags, effect: float) -> bool:
    """Return whether a device whose work comes just in time is slow all the same: launching all of
    it takes a small part of the time for which the device works, and it does not stand still for
    something else that its host does; or it draws more power than its peers', and its optimizer
    step, which asks for nothing, is slower as well.

    Examples: a pipeline's hosts wait for each message, launch in 2.1 ms what devices work at for
    185 ms, and for 278 ms on one of them. Or each layer asks how many tokens its experts get, so no
    host gets ahead: passes take 2.98 times as long, by the log slowdown `effect`, the optimizer
    2.11 times, with 484 W for 321.
    """
    if _is_launched_in_no_time(seen, row, active):
        return not _is_lost_to_its_host(seen, row, active, effect)
    if not draws_more(seen, row):
        return False
    optimizer_ns = np.where(seen.optimizer_ns > 0, seen.optimizer_ns, np.nan)
    theirs = robust.median(optimizer_ns[_stage_peers(seen, row)], axis=0)
    slower = float(robust.median(np.log(optimizer_ns[row] / theirs)[active]))
    return slower >= STARVATION.slower_share * effect


def _is_launched_in_no_time(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether launching all of a device's work takes a small part of the time for which it
    works, whenever that is launched.
    """
    if seen.launching_ns is None:
        return False
    busy_ns = np.maximum(seen.busy_ns[row], 1.0)  # 0 where a file ends before the others
    share = float(robust.median((seen.launching_ns[row] / busy_ns)[active]))
    return share <= STARVATION.at_work_share


def may_wait_for_launches(seen: Observations) -> str:
    """Say that passes take about as long as launching them, of which nothing was recorded; empty
    where passes are longer, or where launches tell who waits.

    Example: a layer's forward of 50 us; its 20 kernels take a host 100 us to launch.
    """
    if seen.starved_share is not None or not seen.tells_passes:
        return ""
    typical_ns = float(np.exp(np.nanmedian(seen.work.log_ns)))
    if seen.members.device_kind == "cpu" or typical_ns >= STARVATION.launched_ns:
        return ""
    return (
        f"what is compared takes {milliseconds(typical_ns)}, about as long as launching it, and "
        "launches were not recorded: a host that is late shows the same"
    )


def waits_for_launches(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device waits for its host's launches half of the time and more, so that many short
    kernels, or slow passes now and then, may show the host; empty where it does not.

    Example: the optimizer step of an FSDP job, in which the rank whose host is the last by a little
    never waits for others: 7.2 ms in place of 3.5, all of its kernels launched just in time.
    """
    own, theirs = _just_in_time(seen, row, active)
    if not own >= STARVATION.fed_share or _is_launched_in_no_time(seen, row, active):
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time (of its peers' "
        f"{theirs:.0%}), so its host may be the reason as well as the device"
    )


def launched_by_slow_host(seen: Observations, row: int, active: Flags, effect: float) -> str:
    """Say that half of a device's operations come just in time, from a host that launches more
    slowly than its peers' hosts by as much as the device's work is slower, by the log slowdown
    `effect`: its host may be the reason. Empty elsewhere.

    Example: passes and optimizer 1.10 times as long, 62 % just in time (of its peers' 47 %), and
    1.27 times the time from launch to launch. A slow device lets its host get ahead.
    """
    if seen.held_pace is None:
        return ""
    own, theirs = _just_in_time(seen, row, active)
    over = _slower_to_launch(seen, seen.held_pace, row, active)
    if not (own >= STARVATION.fed_share and over >= effect):
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time (of its peers' {theirs:.0%}),"
        f" by a host that takes {np.exp(over):.2f}x as long as its peers' from launch to launch: "
        "that may be the reason as well as the device"
    )


def half_starved(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device waits for its host half of the time, and its peers' devices somewhat less:
    some host is always the slowest then. Empty where the device waits less, or starves.

    Example: 69 % of a device's operations come just in time, of its peers' 40 %; it takes 1.2x
    their time while its host launches 4 % more slowly.
    """
    own, theirs = _just_in_time(seen, row, active)
    waits_more = own - theirs >= STARVATION.more_share
    is_half = STARVATION.fed_share <= own < _least_starved(theirs)
    if not (waits_more and is_half) or launches_slowly(seen, row):
        return ""
    return (
        f"{own:.0%} of its operations were launched only just in time, and of its peers' "
        f"{theirs:.0%}: where all hosts can hardly keep up, the slowest by a little is the one "
        "that its device waits for"
    )


def mate_starves(seen: Observations, row: int, active: Flags) -> str:
    """Say that a TP mate of a device, which is fed, waits for its host's launches: where hosts can
    hardly keep up, which of two mates waits for the other may change. Empty elsewhere.

    Example: of four TP groups of two one mate waits for launches in each, the first in most. In one
    group the first takes a quarter of what other first mates take, and the second 1.7 times what
    other second mates do.
    """
    if seen.starved_share is None:
        return ""
    starved = robust.median(seen.starved_share[:, active], axis=1)
    others = starved[mates_of(seen.members, row)]
    if not others.size or starved[row] >= STARVATION.fed_share:
        return ""
    if not np.nan_to_num(others).max() >= STARVATION.starved_share:
        return ""
    return (
        f"{np.nanmax(others):.0%} of a TP mate's operations were launched only just in time: where "
        "hosts can hardly keep up, which of two mates waits for the other may change"
    )


def _just_in_time(seen: Observations, row: int, active: Flags) -> tuple[float, float]:
    """Return what share of the row's work comes just in time, and what share of its peers'; NaN
    where launches were not recorded.
    """
    starved = seen.starved_share
    if starved is None:
        return np.nan, np.nan
    theirs = starved[_stage_peers(seen, row)][:, active]
    return float(robust.median(starved[row][active])), float(robust.median(theirs))


def _least_starved(theirs: float) -> float:
    """Return the least share of just-in-time work at which a device counts as waiting for its host,
    if its peers' share is `theirs`.
    """
    is_fed = theirs <= STARVATION.well_fed_share
    return STARVATION.fed_share if is_fed else STARVATION.starved_share


def _doubt(seen: Observations, row: int, *, num_others: int) -> str:
    """Return why a starved device need not be its host's fault; empty where it is."""
    if not num_others and _loads_most(seen, row):
        return (
            "it alone loads data for its TP group, which delays its launches too: a second "
            "replica, or a trace with data loaded beforehand, decides"
        )
    if _are_incomplete(seen):
        return (
            "of the other TP groups some ranks were not recorded, which may be starved as well: a "
            "trace of all ranks decides"
        )
    return ""


def _hardly_slower_host(
    seen: Observations, row: int, active: Flags, least: float, *, least_starved: float = 0.0
) -> str:
    """Say why a starved device's host need not be to blame: it is hardly slower than its peers'
    hosts. Empty where that is not so.

    Problem: where hosts can hardly keep up, the one that is a little slower falls behind until its
    device waits for launches. The other ranks then wait for that device, which gives their hosts
    time to run ahead, and the device's work looks slower by all that it stands still. Example: two
    hosts take 106 and 100 ms to launch an iteration of 30 ms of work. The first device then
    seems to compute 3.5 times as long as the second, although its host is 6 % slower.

    So the host is to blame only where it launches slower than its peers' by `least` (log), a good
    part of what its device loses, or by half and more; 0 where that is not known. Empty then, too,
    where the trace does not tell launches, where the host stops now and then (`stands_still`) or
    does something else for longer than all its launching takes, and where the device is not starved
    (less than `least_starved` of its work comes just in time, by default `_least_starved`).
    """
    over = _behind_by_launching(seen, row, active, least_starved) if least else np.nan
    if not over < min(least, STARVATION.plain_pace_log):
        return ""
    return (
        f"but from launch to launch its host takes no more than {np.exp(over):.2f}x as long as its "
        "peers': theirs are nearly as slow, or are held back, and of hosts that hardly keep up the "
        "device of the slowest waits, however little slower it is"
    )


def _behind_by_launching(
    seen: Observations, row: int, active: Flags, least_starved: float = 0.0
) -> float:
    """Return how much longer the host of a starved device takes from launch to launch than its
    peers' (log), if nothing else holds the device up; NaN where something may, where the device is
    not starved (`least_starved`, by default `_least_starved`), and where launches are not told.

    A device that is fed, and waits for launches no more often than its peers', has no host that
    lags: what it loses are few long pauses. Example: 12 % of its work comes just in time, as on its
    peers, and it stands still for 33 to 71 ms an iteration in two or three passes. A profile tells
    such pauses: where they are a small part of what is lost, the gaps are many and short.
    """
    if seen.held_pace is None:
        return np.nan
    own, theirs = _just_in_time(seen, row, active)
    if not own >= (least_starved or _least_starved(theirs)):
        return np.nan
    is_alike = own - theirs < BURSTS.alike_starved
    if own < STARVATION.fed_share and is_alike and not _loses_in_short_gaps(seen, row, active):
        return np.nan
    is_held_up = stands_still(seen, row, active) or _prepares_its_passes(seen, row, active)
    if is_held_up or _idle_beyond_launching(seen, row, active):
        return np.nan
    over = _slower_to_launch(seen, seen.held_pace, row, active)
    if seen.tells_passes or seen.launching_ns is None:
        return over
    # A profile knows all launches. What they take together is bound from below: hosts that are
    # ahead are held back; their quicker steps say too much of a host whose slow ones are as usual.
    whole = _slower_to_launch(seen, np.log(np.maximum(seen.launching_ns, 1.0)), row, active)
    return min(over, (over + whole) / 2)


def _loses_in_short_gaps(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether a profile shows that the row's host hardly stops, for what its device loses
    more than its peers'.

    Example: 16 ms of 91 more than its peer, a thousand gaps of either, and stops of 2 ms more.
    """
    if seen.tells_passes or seen.stopped_ns is None:
        return False
    peers = _stage_peers(seen, row)
    lost, stopped = (
        robust.median(np.nan_to_num(time_ns[:, active]), axis=1)
        for time_ns in (seen.lost(Cause.HOST), seen.stopped_ns)
    )
    over, of_stops = (float(one[row] - robust.median(one[peers])) for one in (lost, stopped))
    return of_stops < STARVATION.stopped_in_each_share * over


def _slower_to_launch(seen: Observations, paces: Floats, row: int, active: Flags) -> float:
    """Return how much longer the row's host takes from launch to launch than its peers', log."""
    pace = robust.median(paces[:, active], axis=1)
    return float(pace[row] - robust.median(pace[_stage_peers(seen, row)]))


def most_cost_of_host(seen: Observations, row: int, active: Flags) -> float:
    """Return what an iteration may take at most, as a multiple of what it would take if the row's
    host launched as quickly as its peers', or was not held up at the end of iterations; infinite
    where something else may hold up the device. In a profile no more than without all its gaps.

    A replay brings the operations of a device that waits for its host to its peers' times. But the
    peers' hosts launch too, and are ahead only as long as they wait for this one: the step becomes
    shorter by what this host is slower, and no more. Example: operations five times as long, by
    replay 49 % of the step; its host takes 1.11 times its peers' from launch to launch: 11 %.
    """
    most = np.inf if seen.tells_passes else _without_its_gaps(seen, row, active)
    over = _behind_by_launching(seen, row, active)
    if np.isfinite(over):
        return min(most, float(np.exp(max(over, 0.0))))
    if not _stops_at_the_end(seen, row, active) or _stops_elsewhere(seen, row, active):
        return most
    assert seen.ending_ns is not None
    whole_ns = float(np.median(seen.iteration_ns[active]))
    share = float(np.median(seen.ending_ns[row][active])) / whole_ns
    return ratio_without(share)


def _without_its_gaps(seen: Observations, row: int, active: Flags) -> float:
    """Return what an iteration of a profile takes over what it would at least take without the gaps
    of the row's device, and what that is busy longer than its peers: by more than lies on one rank
    no path through a step gets shorter, whatever a replay says that takes waiting for work.

    Example: gaps of 69 ms of 212 are 1.48 times, and no 4.7.
    """
    busy_ns = robust.median(seen.busy_ns[:, active], axis=1)
    longer_ns = float(busy_ns[row]) - float(robust.median(busy_ns[_stage_peers(seen, row)]))
    gaps_ns = float(np.median(np.nan_to_num(seen.lost(Cause.HOST)[row])[active]))
    whole_ns = float(np.median(seen.iteration_ns[active]))
    return ratio_without((gaps_ns + max(longer_ns, 0.0)) / whole_ns)


def launches_as_quickly(
    seen: Observations, row: int, active: Flags, share: float, *, least_starved: float
) -> str:
    """Say why a host need not be to blame for gaps of its device, a `share` of the iteration: it
    launches hardly more slowly than its peers' hosts. Empty where that is not so, and where less
    than `least_starved` of the device's work comes just in time, since pauses are then few.

    What launching takes longer is a part of what it takes at all. Example: gaps of 16.3 ms of 81,
    and 49 ms to launch all passes, are 1.5 times the time; the host takes 1.1 times its peers'.
    Where that time is not known, it is the iteration's. The host is to blame only if it
    is slower by more than processors of one model differ (`PACE.slow_log`): where all devices wait
    for their hosts, somebody's host is the last, and looks as slow as all the others' waiting.
    """
    iteration_ns = float(np.median(seen.iteration_ns[active]))
    launching_ns = 0.0
    if seen.launching_ns is not None:
        launching_ns = float(robust.median(seen.launching_ns[row][active]))
    of_launching = min(share * iteration_ns / (launching_ns or iteration_ns), COSTS.max_saved_share)
    least = max(STARVATION.slower_share * -float(np.log1p(-of_launching)), PACE.slow_log)
    return _hardly_slower_host(seen, row, active, least, least_starved=least_starved)


def stands_still(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether the row's host stops between launches while its device waits for the next one,
    for a noticeable part of the iteration, and those of its peers do not.

    Another process has its core then: whatever the rank's process does takes longer, its loading
    and its optimizer as well, while each launch in between is as quick as ever.

    Stops are seen between modules, where few modules were recorded by how long the host takes from
    the first to the last launch of its passes (`_stops_in_passes`), between passes, where batches
    come late that no span shows, and at the end of iterations, where its process writes to a slow
    disk, say.
    """
    return _stops_at_the_end(seen, row, active) or _stops_elsewhere(seen, row, active)


def _stops_elsewhere(seen: Observations, row: int, active: Flags) -> bool:
    return (
        _stops_between_modules(seen, row, active)
        or _stops_between_passes(seen, row, active)
        or _stops_in_passes(seen, row, active)
    )


def _stops_at_the_end(seen: Observations, row: int, active: Flags) -> bool:
    logs = bool(seen.members.log_for_all[row])
    return not logs and _is_much_longer(seen, seen.ending_ns, row, active)


def _stops_between_passes(seen: Observations, row: int, active: Flags) -> bool:
    return _paused_ns(seen, row, active) > 0.0


def _paused_ns(seen: Observations, row: int, active: Flags) -> float:
    """Return for how long the row's device stands still outside passes, an iteration, because its
    host launches nothing; 0 where that is not far longer than its peers' hosts launch nothing.

    Hosts that are ahead of their devices spend that time, too, and no device waits for it: what
    they take, not what their devices wait, is what a sound host needs. Who logs for all may do so
    before the first pass. Example: the device waits for 148 ms an iteration, in two places, and its
    peer's host takes 12 ms there.
    """
    if seen.pauses is None:
        return 0.0
    pauses, peers = seen.pauses, _stage_peers(seen, row)
    places = [(pauses.idle_between_ns, pauses.between_ns)]
    if not seen.members.log_for_all[row]:
        places.append((pauses.idle_opening_ns, pauses.opening_ns))
    paused_ns = 0.0
    for idle_ns, pause_ns in places:
        own = float(np.median(idle_ns[row][active]))
        usual = float(robust.median(robust.median(pause_ns[peers][:, active], axis=1)))
        if own >= PACE.stop_ratio * usual and _is_noticeable(seen, own - usual, active):
            paused_ns += own
    return paused_ns


def _stops_between_modules(seen: Observations, row: int, active: Flags) -> bool:
    is_longer = _is_much_longer(seen, seen.stopped_ns, row, active)
    return is_longer and not _loses_in_short_gaps(seen, row, active)


def _is_much_longer(seen: Observations, stopped_ns: Floats | None, row: int, active: Flags) -> bool:
    """Return whether the row stops for much longer than its peers, for a noticeable time; not where
    that was not recorded.
    """
    if stopped_ns is None:
        return False
    stopped = robust.median(stopped_ns[:, active], axis=1)
    own, theirs = stopped[row], float(robust.median(stopped[_stage_peers(seen, row)]))
    return own >= PACE.stop_ratio * theirs and _is_noticeable(seen, own - theirs, active)


def stops_explain(seen: Observations, row: int, longer_ns: Floats) -> str:
    """Say that a row's host stops between launches, in all iterations, for most of the time that it
    is busy longer than its peers, `longer_ns` (iteration,); empty where it does not, and where the
    rank logs for all.

    In all of them for half of the usual and more, because a collection of garbage comes in some.
    Example: its kernels take 51.5 ms an iteration as its peers' do, and its host stops for 29 to 51
    ms, theirs for 8 at most.
    """
    everywhere = np.ones(len(seen.iterations), dtype=bool)
    if seen.members.log_for_all[row] or not _stops_between_modules(seen, row, everywhere):
        return ""
    assert seen.stopped_ns is not None
    stopped_ns = seen.stopped_ns[row]
    most = stopped_ns.sum() >= STARVATION.stopped_share * longer_ns.sum()
    each = stopped_ns.min() >= STARVATION.stopped_in_each_share * float(np.median(longer_ns))
    return _stops_text(seen, row, everywhere) if most and each else ""


def off_core_explains(seen: Observations, row: int, longer_ns: Floats) -> str:
    """Say that a process on a CPU is off its core for most of the time, (iteration,) ns, that it is
    busy for longer than its peers; empty where it is not.

    Example: in iterations of 335 ms a rank computes for 108 ms and its peer for 102; the thread of
    the one is off its core for 189 ms while it computes, that of the other for 0.1.
    """
    if seen.members.device_kind != "cpu":
        return ""
    off_ns = seen.stolen_ns[row]
    theirs_ns = robust.median(seen.stolen_ns[_stage_peers(seen, row)], axis=0)
    longer = float(np.median(longer_ns))
    if not float(np.median(off_ns - theirs_ns)) >= STARVATION.off_core_share * longer:
        return ""
    return off_core_text(float(np.median(off_ns)), float(np.median(theirs_ns)))


def off_core_text(own_ns: float, theirs_ns: float) -> str:
    """Say for how long a process on a CPU computes without having its core, and its peers."""
    return (
        f"while it computes, its thread is off its core for {milliseconds(own_ns)} an iteration, "
        f"the others' for {milliseconds(theirs_ns)}"
    )


def _stops_in_passes(seen: Observations, row: int, active: Flags) -> bool:
    """Return whether the row's host takes much longer to launch the same passes as its peers do,
    and its device waits more often for it than theirs.

    A device that is slow, or a full queue, holds up a host as well, but does not wait for it.
    Example: 553 ms an iteration against 81 to 91 ms of the three other replicas, and half of the
    operations launched just in time against none.
    """
    own, theirs = _just_in_time(seen, row, active)
    if not own - theirs >= STARVATION.more_share or _prepares_its_passes(seen, row, active):
        return False
    own_ns, theirs_ns = _own_and_longest(seen, seen.launching_ns, row, active)
    return own_ns >= PACE.held_up_ratio * theirs_ns and _is_noticeable(
        seen, own_ns - theirs_ns, active
    )


def _prepares_its_passes(seen: Observations, row: int, active: Flags) -> str:
    """Say that a host takes much longer than its peers' to launch its passes, and only from a
    pass's first launch to the second; empty where that is not so, and in profiles.

    Another process that has the host's core comes at any launch. What comes at the first one of
    every pass is the program's own: kernels that are compiled, planned or loaded for each new
    shape. Example: sequences of lengths that the process has not met; 47 ms from the first layer's
    launch to the second's, in each forward and backward pass, and 1.2 ms from layer to layer.
    """
    own_ns, theirs_ns = _own_and_longest(seen, seen.launching_ns, row, active)
    first_ns, _ = _own_and_longest(seen, seen.launching_first_ns, row, active)
    step_ns, _ = _own_and_longest(seen, seen.launching_step_ns, row, active)
    if not own_ns >= PACE.held_up_ratio * theirs_ns:
        return ""
    # its own later launches tell: those of its peers may be held back by their devices
    is_first = first_ns >= STARVATION.stopped_share * (own_ns - theirs_ns)
    if not (is_first and step_ns > 0 and first_ns >= PACE.prepares_steps * step_ns):
        return ""
    return (
        f"of the {milliseconds(own_ns)} that its host takes to launch an iteration's passes (its "
        f"peers' {milliseconds(theirs_ns)} at most), {milliseconds(first_ns)} come ahead "
        "of the second launch of each pass: what a program compiles, plans or loads for every new "
        "shape takes time there, on any host"
    )


def _own_and_longest(
    seen: Observations, time_ns: Floats | None, row: int, active: Flags
) -> tuple[float, float]:
    """Return what a row's host takes, and the longest that hosts of its stage peers take; NaN where
    that was not recorded, and where it has no peers.
    """
    peers = seen.members.stage == seen.members.stage[row]
    peers[row] = False
    if time_ns is None or not peers.any():
        return np.nan, np.nan
    usual = robust.median(time_ns[:, active], axis=1)
    return float(usual[row]), float(usual[peers].max())


def _is_noticeable(seen: Observations, time_ns: float, active: Flags) -> bool:
    return bool(time_ns >= PACE.least_share * float(np.median(seen.iteration_ns[active])))


def _idle_beyond_launching(seen: Observations, row: int, active: Flags) -> str:
    """Say that a device has nothing to do for so much longer than its peers' that launching all
    passes, at twice the time of their hosts, would not explain it; empty where it would.

    Example: 108 ms an iteration against 2, where launching its passes takes a host 14: batches that
    come late, and that no span shows.
    """
    if seen.launching_ns is None:
        return ""
    peers = _stage_peers(seen, row)
    level = robust.median(seen.lost(Cause.HOST)[:, active], axis=1)
    idle_ns = float(level[row] - robust.median(level[peers]))
    launching_ns = float(np.median(seen.launching_ns[peers][:, active]))
    if not launching_ns > 0 or not idle_ns >= PACE.held_up_ratio * launching_ns:
        return ""
    return (
        f"; it has nothing to do for {milliseconds(idle_ns)} an iteration longer than theirs, and "
        f"launching all passes takes them {milliseconds(launching_ns)}"
    )


def _is_lost_to_its_host(seen: Observations, row: int, active: Flags, effect: float) -> bool:
    """Return whether a device stands still for most of the time that its work takes longer, by the
    log slowdown `effect`.

    Example: 153 ms an iteration, and passes that take 500 ms in place of 385.
    """
    longer_ns = float(np.median(seen.busy_ns[row][active])) * -float(np.expm1(-effect))
    lost_ns = float(robust.median(seen.lost(Cause.HOST)[row][active]))
    return lost_ns >= STARVATION.stopped_share * longer_ns


def _stops_text(seen: Observations, row: int, active: Flags) -> str:
    """Say how a host's stops show, where `stands_still` is true."""
    if seen.stopped_ns is not None and _stops_between_modules(seen, row, active):
        stopped_ns = float(np.median(seen.stopped_ns[row][active]))
        return (
            f"its host stopped between launches for {milliseconds(stopped_ns)} an iteration while "
            "its device waited for the next one, and those of its peers did not: something else "
            "has its cores"
        )
    if seen.ending_ns is not None and _stops_at_the_end(seen, row, active):
        ending_ns = float(np.median(seen.ending_ns[row][active]))
        return (
            f"its host is held up for {milliseconds(ending_ns)} at the end of an iteration, with "
            "nothing left to do on its device, and those of its peers are not: it writes to a slow "
            "disk there, say"
        )
    if paused_ns := _paused_ns(seen, row, active):
        return (
            f"its host launches nothing for {milliseconds(paused_ns)} an iteration between passes, "
            "while its device has nothing to do, and those of its peers do not: batches that come "
            "late there and that no span shows, or something else that has its cores"
        )
    assert seen.launching_ns is not None
    launching = robust.median(seen.launching_ns[:, active], axis=1)
    theirs_ns = float(robust.median(launching[_stage_peers(seen, row)]))
    return (
        f"its host takes {milliseconds(float(launching[row]))} an iteration to launch its passes, "
        f"those of its peers {milliseconds(theirs_ns)}, and its device waits for it: something "
        "else has its cores"
    )


def _are_incomplete(seen: Observations) -> bool:
    """Return whether there are other TP groups, of each of which some rank was not recorded."""
    num_rows = np.bincount(seen.members.tensor_group)
    return len(num_rows) > 1 and int((num_rows == num_rows.max()).sum()) < 2


def _are_starved(groups: Floats) -> bool:
    return len(groups) > 0 and float(np.median(groups)) > STARVATION.fed_share


def _starved_groups(seen: Observations, starved: Floats, row: int, active: Flags) -> Floats:
    """Return the starved share of the most starved rank of every other TP group, (group,)."""
    group = seen.members.tensor_group
    level = robust.median(starved[:, active], axis=1)
    return np.array(
        [np.nanmax(level[group == one]) for one in np.unique(group[group != group[row]])]
    )


def _stage_peers(seen: Observations, row: int) -> Flags:
    """Flag the other rows of the stage, or all other rows where the stage has none."""
    everyone: Flags = np.arange(len(seen.members)) != row
    others = everyone & (seen.members.stage == seen.members.stage[row])
    return others if others.any() else everyone


def _loads_most(seen: Observations, row: int) -> bool:
    """Return whether the first rank of a TP group, which may load for all, loads longest in it.

    Another rank's loading is its wait for what the first hands on.
    """
    if seen.members.place["tp"][row] != 0:
        return False
    loading = np.nan_to_num(robust.median(seen.lost(Cause.LOADER), axis=1))
    mates = loading[mates_of(seen.members, row)]
    return bool(len(mates) and loading[row] > STARVATION.loads_most_ratio * mates.max())
