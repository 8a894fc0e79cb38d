"""Find hosts that are slow as a whole, and name them as one.

Problem: a host that is starved, hot or busy slows all its ranks by a little. Each rank alone may
stay below what its noise allows to be named; eight findings for one host are seven too many; and
where a host *is* a pipeline stage or a replica, none of its ranks has a peer on another host.

Idea: pool the ranks of a host, and compare them as a sample with the ranks of the other hosts that
do the same work: their passes, their optimizer, the time they lose and how they launch
(`detect.stats.host_tests`). A host is named when the effect reaches its floor, q stays below the
false-discovery rate, and the host's ranks share the effect: most ranks (for lost time, all ranks)
are slower by at least half of the mean, or each rank loses more time than every rank of other
hosts. The floor of lost time is higher where stages are compared with each other, or where another
rank is named, for which others may be waiting.

A host is never blamed for what the data could also have done. Where the host holds whole replicas
or whole stages, or where the same replicas are as slow on other hosts, slower passes count only if

* the optimizer, which neither data nor the partition of the microbatches lengthens, is slower too;
* or the clocks of all devices of the host are as low as the host is slow;
* or all devices of the host are starved and those of other hosts are fed (longer work lets a host
  get ahead, it does not hold it back).

How long a host takes from one launch to the next depends neither on data nor on what a stage
computes, so slow launching decides whose fault lost time is, even if no other host has the stage: a
host is at fault if all of its ranks launch slower than all others, in nearly all iterations, and
its devices stand still for longer.

A change inside the window decides what a level does not: neither a stage's layers nor the length of
a replica's documents change in the middle of a trace. The series "the host's ranks less the
others", (iteration,), is split where its two parts differ most:

    t = (mean of the later part - mean of the earlier one) / (s · sqrt(1/later + 1/earlier))

and the p-value of t is multiplied by the number of splits. No change is looked for where the host
is one TP group, in which all wait for one rank, nor where experts may get other tokens from one
iteration to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from detect.causes.device import HOST_ADVICE, UNKNOWN_ROLES, waits_beside
from detect.causes.finding import (
    Answer,
    Claim,
    Inquiry,
    build_finding,
)
from detect.causes.host_data import may_be_its_data, stall_by_their_data, wait_for_mates
from detect.causes.launching import WANDERS, is_host_bound, is_nearly_bound, may_wait_unseen
from detect.causes.readings import low_clocks
from detect.causes.searches import load_as_long, loading_of, ranks_that_load, tells_no_storage
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.host_tests import (
    COMPUTE,
    LOST,
    OPTIMIZER,
    PACE,
    Channels,
    HostTest,
    Sides,
    are_all_starved,
    as_recorded,
    beside_others,
    channel_tests,
    clearest_split,
    has_more_to_launch,
    is_starved,
    keeps_its_pace,
    launches_slowly,
    least_lead,
    passes_over,
    rise_in,
    since_it_began,
    waits_for_launches,
)
from detect.stats.stretches import Course, active_in
from detect.text import counted, milliseconds, times
from detect.thresholds.bursts import LOSSES
from detect.thresholds.devices import DEVICE, PAIRS
from detect.thresholds.hosts import HOSTS
from detect.thresholds.observing import PACE as SLOW_PACE
from detect.thresholds.statistics import SEARCH
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.errors import listed

DEVICE_ADVICE = (
    "read the clocks, throttle reasons and temperatures of all GPUs of that host (nvidia-smi -q -d "
    "CLOCK,PERFORMANCE,TEMPERATURE,POWER), its power supplies and its fans",
    "measure the host with the job away: python scripts/healthcheck.py --sweep",
)
CHANGED = (
    "it changed inside the trace: what a stage has to compute, and how long a replica's documents "
    "are, does not"
)
OF_STORAGE = (
    "loading takes ranks of other hosts as long now and then: storage that all share may be the "
    "reason as well as this host"
)
CHIPS_DIFFER = (
    "neither its optimizer steps nor clocks confirm it: the chips of one host may differ from "
    "those of others by as much"
)
NOISIER = (
    "there is one other host only, which loses a little less: of two hosts one is always the "
    "noisier one"
)
NOT_SHOWN = (
    "its ranks share what no other host has (a replica's data, a stage's layers, or a TP group in "
    "which all wait for one): that may be the reason as well as the host"
)


@dataclass(frozen=True, kw_only=True)
class _Reason:
    """Why a host is slow, and what shows it."""

    cause: Cause
    test: HostTest
    """The test that shows the cause."""
    tests: Mapping[str, HostTest]
    """The host's tests by channel, for the evidence."""
    excess_ns: Floats
    """(iteration,): time lost on the host's slowest rank."""
    doubt: str = ""
    """Why the host need not be at fault, as a sentence; empty where nobody else can be."""
    course: Course | None = None
    """When the host is slow; None is the whole window."""
    is_by_change: bool = False
    """Whether it is the change that shows the host."""


@dataclass(frozen=True, kw_only=True)
class SlowHost:
    """A host whose ranks are slow together."""

    rows: Integers
    q_value: float
    reason: _Reason

    @property
    def is_shown(self) -> bool:
        """Return whether the host is at fault."""
        return not self.reason.doubt


@dataclass(frozen=True, kw_only=True)
class _Change:
    """Since when a host is slower than before, and in which channel."""

    channel: str
    test: HostTest
    course: Course


def slow_hosts(inquiry: Inquiry) -> list[SlowHost]:
    """Return the hosts that are slow as a whole, the clearest first."""
    names, host = np.unique(inquiry.seen.members.hosts, return_inverse=True)
    if len(names) < 2:
        return []
    large = np.flatnonzero(np.bincount(host) >= HOSTS.min_ranks).tolist()
    found: list[SlowHost] = []
    excluded = np.zeros(len(host), dtype=bool)
    for _ in large:
        slow = list(_slow_beside_the_rest(inquiry, host, large, excluded))
        if not slow:
            break
        clearest = min(slow, key=lambda one: one.q_value)
        found.append(clearest)
        excluded[clearest.rows] = True
    return found


def _slow_beside_the_rest(
    inquiry: Inquiry, host: Integers, large: list[int], excluded: Flags
) -> Iterator[SlowHost]:
    """Yield the `large` hosts, by number, that are slower than all that are not `excluded`, (row,):
    hosts found so far.
    """
    channels = Channels(inquiry.seen, ~excluded)
    for number in large:
        own = host == number
        control = ~own & ~excluded
        if excluded[own].any() or int(control.sum()) < HOSTS.min_ranks:
            continue
        sides = Sides(seen=inquiry.seen, host=host, own=own, control=control, channels=channels)
        slow = _judge(inquiry, sides, len(large))
        if slow is not None:
            yield slow


def _judge(inquiry: Inquiry, sides: Sides, num_hosts: int) -> SlowHost | None:
    """Return how one host is slower than the others; None where nothing stands out.

    Ask in turn for slow launching, a slow level, a change inside the window, and most ranks found
    slow one by one. Go on only where the answers so far leave doubt (the last: where there are
    none), or, to a change, where few other ranks are there to compare with.
    """
    tests = dict(channel_tests(sides))
    num_tests = num_hosts * max(len(tests), 1)
    rate = inquiry.settings.false_discovery_rate
    sure = {name: one for name, one in tests.items() if one.p_value * num_tests <= rate}
    reason = _by_launching(inquiry, sides, tests, sure)
    if reason is None or reason.doubt:
        wanders = reason is not None
        reason = _by_level(inquiry, sides, tests, sure, wanders=wanders) or reason
    is_sure = reason is not None and not reason.doubt
    if not is_sure or int(sides.control.sum()) < HOSTS.min_control:
        reason = _by_change(inquiry, sides, num_tests) or reason
    reason = reason or _by_its_ranks(inquiry, sides, tests, sure)
    if reason is None or (reason.doubt and _waits_for_a_named_mate(inquiry, sides)):
        return None
    if reason.course is None:
        reason = _since_it_began(inquiry, sides, reason)
    return SlowHost(
        rows=np.flatnonzero(sides.own),
        q_value=min(1.0, reason.test.p_value * num_tests),
        reason=replace(reason, doubt=reason.doubt or _doubt(inquiry, sides, reason)),
    )


def _waits_for_a_named_mate(inquiry: Inquiry, sides: Sides) -> bool:
    """Return whether the host is one TP group of which a rank is named as slow: all wait for it."""
    return sides.is_one_group() and bool(inquiry.named_for(Cause.COMPUTE)[sides.own].any())


def _by_launching(
    inquiry: Inquiry, sides: Sides, tests: Mapping[str, HostTest], sure: Mapping[str, HostTest]
) -> _Reason | None:
    alone = inquiry.named_for(Cause.COMPUTE) & sides.own
    if float(np.mean(alone[sides.own])) > HOSTS.least_named_share:  # then it is their host
        alone = np.zeros_like(alone)
    late = launches_slowly(sides, sure, alone)
    if late is None:
        return None
    return _Reason(
        cause=Cause.HOST,
        test=late,
        tests=tests,
        excess_ns=_late_ns(sides, tests[COMPUTE].effect if COMPUTE in tests else 0.0),
        doubt="" if keeps_its_pace(sides) else WANDERS,
    )


def _by_level(
    inquiry: Inquiry,
    sides: Sides,
    tests: Mapping[str, HostTest],
    sure: Mapping[str, HostTest],
    *,
    wanders: bool,
) -> _Reason | None:
    named = _cause_of_level(inquiry, sides, sure, wanders=wanders)
    if named is None:
        return None
    cause, test = named
    is_shown = True
    if cause in LOST.values():
        is_shown = not (
            _may_be_of_its_stage(sides, cause, test)
            or _may_wait_for_a_mate(inquiry, sides, sure)
            or stall_by_their_data(sides.seen, np.flatnonzero(sides.own))
        )
    by_compute = cause == Cause.COMPUTE or test is tests.get(COMPUTE)
    return _Reason(
        cause=cause,
        test=test,
        tests=tests,
        excess_ns=_excess_ns(sides, test, by_compute=by_compute),
        doubt="" if is_shown else NOT_SHOWN,
    )


def _by_change(inquiry: Inquiry, sides: Sides, num_tests: int) -> _Reason | None:
    change = _clearest_change(inquiry, sides, num_tests)
    if change is None:
        return None
    cause = LOST.get(change.channel, Cause.COMPUTE)
    return _Reason(
        cause=cause,
        test=change.test,
        tests={change.channel: change.test},
        excess_ns=_excess_ns(sides, change.test, by_compute=cause == Cause.COMPUTE),
        course=change.course,
        is_by_change=True,
    )


def _by_its_ranks(
    inquiry: Inquiry, sides: Sides, tests: Mapping[str, HostTest], sure: Mapping[str, HostTest]
) -> _Reason | None:
    """Report a host of which most ranks were found slow one by one: they are one finding."""
    compute = _slower_passes(inquiry, sure)
    share_found = float(np.mean(inquiry.slow[sides.own]))
    if compute is None or not share_found >= HOSTS.most_of_host_share:
        return None
    if wait_for_mates(sides):
        return None
    return _Reason(
        cause=Cause.COMPUTE,
        test=compute,
        tests=tests,
        excess_ns=_excess_ns(sides, compute, by_compute=True),
        doubt=NOT_SHOWN,
    )


def _doubt(inquiry: Inquiry, sides: Sides, reason: _Reason) -> str:
    """Return why the host need not be at fault for what makes it slow; empty where it is."""
    if reason.cause in LOST.values() and not sides.seen.knows_roles:
        return UNKNOWN_ROLES
    if reason.cause == Cause.LOADER and _others_load_as_long(sides):
        return "" if _computes_slowly_as_well(inquiry, reason) else OF_STORAGE
    if reason.cause == Cause.COMPUTE and (doubt := _doubt_of_devices(inquiry, sides, reason)):
        return doubt
    is_level, active = reason.course is None, active_in(reason.course, len(sides.seen.iterations))
    if reason.test is reason.tests.get(Cause.HOST.value):
        waits = may_wait_unseen(sides.seen, np.flatnonzero(sides.own), active)
        if waits:
            return waits
    return NOISIER if is_level and _is_noisier_of_two(sides, reason) else ""


def _doubt_of_devices(inquiry: Inquiry, sides: Sides, reason: _Reason) -> str:
    """Say that collectives beside the host's passes wait for longer than these are slow, or that
    sound devices may differ by as much; empty where its devices show that they are slow.
    """
    if _shows_in_devices(sides, reason.test, reason.tests.get(OPTIMIZER)):
        return ""
    is_little = reason.test.effect < HOSTS.least_unconfirmed_log
    if is_little and not reason.is_by_change and not _loses_time_as_well(inquiry, reason):
        return CHIPS_DIFFER
    active = active_in(reason.course, len(sides.seen.iterations))
    return waits_beside(sides.seen, sides.own, sides.control, active, reason.test.effect)


def _loses_time_as_well(inquiry: Inquiry, reason: _Reason) -> bool:
    """Return whether the host loses time outside of its passes, too, which no chip explains.

    Example: passes are 1.04 times slower, and loading takes 4.3 % of the iteration more.
    """
    lost = [reason.tests[name] for name in LOST if name in reason.tests]
    rate = inquiry.settings.false_discovery_rate
    return any(one.p_value <= rate and one.effect >= HOSTS.least_share for one in lost)


def _computes_slowly_as_well(inquiry: Inquiry, reason: _Reason) -> bool:
    """Return whether the passes of a host that loads late are slower, too, which no storage makes.

    Example: loading takes 8.8 % of the iteration more, and passes take 1.29 times as long.
    """
    compute, settings = reason.tests.get(COMPUTE), inquiry.settings
    if compute is None or compute.p_value > settings.false_discovery_rate:
        return False
    return compute.effect >= float(np.log(settings.min_slowdown))


def _is_noisier_of_two(sides: Sides, reason: _Reason) -> bool:
    """Return whether a host loses only a little more than the only other host; where launching
    takes most of an iteration, and hardly longer than there, not much more: the devices of
    whichever host is a little slower wait for it. Twice as much loading is not a little.

    Example: launching takes 6.1 of 7.9 ms, from launch to launch one host takes 1.13 times as long
    as the other, and gaps are 1.35 ms and 0.95.
    """
    seen, own = sides.seen, sides.own
    is_lost = any(reason.test is reason.tests.get(name) for name in LOST)
    is_only = len(np.unique(sides.host[sides.control])) < 2
    if not (is_lost and is_only) or _loads_for_far_longer(sides, reason):
        return False
    most = HOSTS.least_doubtful_share
    if seen.held_pace is not None and is_nearly_bound(seen, np.flatnonzero(own)):
        pace = robust.median(seen.held_pace, axis=1)
        lead = float(robust.median(pace[own]) - robust.median(pace[sides.control]))
        most = HOSTS.unlike_share if lead < SLOW_PACE.slow_host_log else most
    return reason.test.effect < most


def _loads_for_far_longer(sides: Sides, reason: _Reason) -> bool:
    """Return whether a host loses more to its loaders than the others, and by more than loading
    differs between sound hosts: that is no noise of one of two.

    Example: 7 ms an iteration against 0.7 ms, of iterations of 94.
    """
    if reason.test is not reason.tests.get(Cause.LOADER.value):
        return False
    lost_ns = np.nan_to_num(sides.seen.lost(Cause.LOADER))
    own_ns, others_ns = (float(lost_ns[rows].mean()) for rows in (sides.own, sides.control))
    return own_ns >= LOSSES.loader_ratio * others_ns


def _others_load_as_long(sides: Sides) -> bool:
    """Return whether ranks of other hosts load now and then for as long as this host's ranks do.

    Then the storage that all load from is slow, and the other hosts' devices only wait less for it.
    """
    loading = loading_of(sides.seen)
    own_ns, others_ns = loading[sides.own], loading[~sides.own]
    if tells_no_storage(own_ns[np.isfinite(own_ns)], others_ns):
        return False
    return load_as_long(float(np.nanmean(own_ns)), others_ns)  # the median of pauses is no pause


def _clearest_change(inquiry: Inquiry, sides: Sides, num_tests: int) -> _Change | None:
    """Return the clearest lasting change of the host inside the window, None where there is none.

    The floors are those of levels; for lost time it is the higher `HOSTS.least_doubtful_share`.
    """
    if sides.is_one_group() or sides.seen.members.layout.ep > 1:
        return None
    over = {name: one.value for name, one in sides.over.items()}
    if COMPUTE not in over or np.isnan(over[COMPUTE]).all():
        over[COMPUTE] = passes_over(sides)
    floors = dict.fromkeys(LOST, HOSTS.least_doubtful_share)
    if int(sides.control.sum()) >= HOSTS.min_control:
        floors[COMPUTE] = float(np.log(inquiry.settings.min_slowdown))
    rate, lasts = inquiry.settings.false_discovery_rate, inquiry.settings.min_iterations
    changes = (_split_in_time(sides, name, over[name], lasts) for name in floors)
    found = (
        one
        for one in changes
        if one and one.test.effect >= floors[one.channel] and one.test.p_value * num_tests <= rate
    )
    return max(found, key=lambda one: one.test.effect, default=None)


def _split_in_time(sides: Sides, name: str, over: Floats, lasts: int) -> _Change | None:
    """Return the split of the window at which the host's ranks rise most over the others.

    `over` is (row, iteration); the later part has at least `lasts` iterations. None where some rank
    of the host does not rise, or where the host itself did not and only the others fell.
    """
    split = clearest_split(beside_others(sides, over), name, lasts)
    if split is None:
        return None
    course, p_value = split
    rise, first = course.effect, course.episodes[0][0]
    if not (rise_in(over, first)[sides.own] >= HOSTS.least_rise_share * rise).all():
        return None
    # where a fault of other hosts has ended, a sound host looks slower than before next to them
    of_itself = float(np.median(rise_in(as_recorded(sides, name), first)))
    if not of_itself >= HOSTS.least_rise_share * rise:
        return None
    test = HostTest(rise, course.standard_error, p_value)
    return _Change(channel=name, test=test, course=course)


def _since_it_began(inquiry: Inquiry, sides: Sides, reason: _Reason) -> _Reason:
    """Return the reason of a host that is slow over the whole window, from the iteration on from
    which it is slow; as it is where that is the first.

    Example: its ranks launch as quickly as others in 5 of 18 iterations, and 2.5 times slower in
    the 13 after these. On the mean of all it costs less than it does now.
    """
    name = next((one for one, test in reason.tests.items() if test is reason.test), PACE)
    if name not in sides.over:
        return reason
    series = beside_others(sides, sides.over[name].value)
    course = since_it_began(series, name, inquiry.settings)
    if course is None:
        return reason
    lost = Cause.HOST.value if name == PACE else name  # slow launching counts by what it costs
    effect = float(np.nanmean(beside_others(sides, sides.over[lost].value)[course.active]))
    if not effect > reason.test.effect:
        return replace(reason, course=course)
    error = reason.test.error * effect / reason.test.effect
    test = HostTest(effect, error, reason.test.p_value)
    return replace(reason, course=course, test=test, tests={**reason.tests, lost: test})


def _may_be_of_its_stage(sides: Sides, cause: Cause, test: HostTest) -> bool:
    """Return whether the host's ranks may lose time to their place in the pipeline.

    Where all devices wait for their hosts, gaps show what a stage has to launch; so they do where
    one takes longer from launch to launch, by what stages may differ. Elsewhere every stage has
    gaps of its own, some more than others, but no stage has many where the others have next to
    none: the first and the last one, which also embed and compute the loss, may both have many.
    Loading is different: a stage that computes little may be the only one to wait for its data, and
    the first stage may wait for any time, since others load while they wait for it.
    """
    if not sides.lacks_peers(sides.own):
        return False
    if is_host_bound(sides.seen):
        return True
    if is_starved(sides):
        return False
    if cause == Cause.LOADER:
        holds_first = bool((sides.seen.members.stage[sides.own] == 0).any())
        return holds_first or test.effect < HOSTS.unlike_share
    lost = np.nan_to_num(robust.mean(sides.seen.lost(cause), axis=1))
    own, largest = float(lost[sides.own].mean()), float(lost[sides.control].max())
    if PAIRS.agrees_share * own < float(lost[~sides.own].max()) or has_more_to_launch(sides):
        return True
    return test.effect < HOSTS.unlike_share and own < HOSTS.unlike_ratio * largest


def _may_wait_for_a_mate(inquiry: Inquiry, sides: Sides, sure: Mapping[str, HostTest]) -> bool:
    """Return whether the host's ranks may lose time to one slow rank among them: in one TP group
    all wait for one rank, between passes and inside them.
    """
    if not sides.is_one_group() or is_starved(sides):
        return False
    if _slower_passes(inquiry, sure) is not None:
        return True
    return bool(inquiry.slow[sides.own].any() and not sides.seen.tells_passes)


def _slower_passes(inquiry: Inquiry, sure: Mapping[str, HostTest]) -> HostTest | None:
    """Return the test of the host's passes, if they are slower by as much as a finding needs."""
    compute = sure.get(COMPUTE)
    if compute is None or not compute.effect >= np.log(inquiry.settings.min_slowdown):
        return None
    return compute


def _cause_of_level(
    inquiry: Inquiry, sides: Sides, sure: Mapping[str, HostTest], *, wanders: bool
) -> tuple[Cause, HostTest] | None:
    """Return why the host is slow by its level, and the test that shows it; None if it is not.

    Where its lead in launching `wanders`, what comes and goes on any host may be all that it loses.
    Example: 1.05, 1.6, 1.3, 1.8, 2.3 and 2.5 times as long from launch to launch, and 3 % lost.
    """
    is_doubtful = wanders or sides.lacks_peers(sides.own) or _named_elsewhere(inquiry, sides)
    least_share = HOSTS.least_doubtful_share if is_doubtful else HOSTS.least_share
    return _cause_of_passes(inquiry, sides, sure) or _heaviest_loss(sure, least_share)


def _cause_of_passes(
    inquiry: Inquiry, sides: Sides, sure: Mapping[str, HostTest]
) -> tuple[Cause, HostTest] | None:
    """Blame slower passes on the devices or on starving; None where data may be the reason."""
    compute = _slower_passes(inquiry, sure)
    if compute is None or wait_for_mates(sides):
        return None
    if _slow_clocks(sides.seen, sides.own, compute.effect):
        return Cause.COMPUTE, compute
    if not waits_for_launches(sides, compute):
        if _shows_in_steps(compute, sure.get(OPTIMIZER)):
            return Cause.COMPUTE, compute
        # where all devices wait for their hosts, a pass takes as long as its launches
        if not (may_be_its_data(sides, compute) or is_host_bound(sides.seen)):
            return Cause.COMPUTE, compute
    is_late = is_starved(sides) or _launches_late(sides, compute, sure)
    return (Cause.HOST, compute) if is_late else None


def _launches_late(sides: Sides, compute: HostTest, sure: Mapping[str, HostTest]) -> bool:
    """Return whether each of the host's ranks takes far longer from launch to launch than all
    others, throughout, and something else than longer data or busy experts shows it: optimizer
    steps are slower, too, or nearly all that its devices do is launched just in time, and less of
    what others do. Where hosts ask a router's counts of their devices, the steps alone tell.

    Examples: experts get their tokens from all ranks of the host, passes take 1.68 times as long,
    steps 1.34 times, and launches 2.00 times. Or launches take 3.2 times as long, and all of them
    come just in time, on other hosts 60 %.
    """
    if PACE not in sure or sides.lacks_peers(sides.own) or not keeps_its_pace(sides):
        return False
    lead = least_lead(sides)
    if lead < SLOW_PACE.slow_host_log:
        return False
    if _shows_in_steps(compute, sure.get(OPTIMIZER)):
        return True
    is_routed = sides.seen.members.layout.ep > 1
    return lead >= SLOW_PACE.slow_log and not is_routed and are_all_starved(sides)


def _shows_in_devices(sides: Sides, compute: HostTest, optimizer: HostTest | None) -> bool:
    """Return whether the optimizer, or the clocks of all devices, are as slow as the passes."""
    return _shows_in_steps(compute, optimizer) or bool(
        _slow_clocks(sides.seen, sides.own, compute.effect)
    )


def _shows_in_steps(compute: HostTest, optimizer: HostTest | None) -> bool:
    """Return whether the optimizer is as slow as the passes."""
    return optimizer is not None and optimizer.effect >= DEVICE.optimizer_share * compute.effect


def _heaviest_loss(
    sure: Mapping[str, HostTest], least_share: float
) -> tuple[Cause, HostTest] | None:
    """Return the kind of lost time that the host loses most of, if at least `least_share`."""
    heavy = [name for name in LOST if name in sure and sure[name].effect >= least_share]
    if not heavy:
        return None
    heaviest = max(heavy, key=lambda name: sure[name].effect)
    return LOST[heaviest], sure[heaviest]


def _slow_clocks(seen: Observations, own: Flags, effect: float) -> str:
    """Say that the clocks of all devices of a host are as low as the host is slow; "" where they
    are not, or were not read.
    """
    members = seen.members
    low: dict[int, str] = {}
    for row in np.flatnonzero(own).tolist():
        low |= low_clocks(seen, own, row, effect)
    if not set(low).issuperset(members.ranks_of(np.flatnonzero(own).tolist())):
        return ""
    rank = min(low)
    return f"of rank {rank}, and of all others of it alike: {low[rank]}"


def _named_elsewhere(inquiry: Inquiry, sides: Sides) -> bool:
    return bool(((inquiry.slow | inquiry.named) & ~sides.own).any())


def _late_ns(sides: Sides, longer: float = 0.0) -> Floats:
    """Return the time that the host's slowest rank loses, (iteration,): its device stands still
    between operations, and inside passes, which are `longer` for it (log).
    """
    seen, own = sides.seen, sides.own
    lost = np.nan_to_num(seen.lost(Cause.HOST)) + np.nan_to_num(seen.lost(Cause.LOADER))
    inside = np.nan_to_num(seen.busy_ns) * (1.0 - float(np.exp(-max(longer, 0.0))))
    excess = (lost + inside)[own].max(axis=0) - robust.median(lost[~own], axis=0)
    return np.asarray(np.clip(excess, 0.0, seen.iteration_ns))


def _excess_ns(sides: Sides, test: HostTest, *, by_compute: bool) -> Floats:
    """Return the time that the host's slowest rank loses in each iteration, (iteration,)."""
    if not by_compute:
        return _late_ns(sides)
    busy = np.nan_to_num(sides.seen.busy_ns)
    better = np.where(sides.own[:, None], busy * np.exp(-test.effect), busy)
    if sides.seen.waits_between_layers:  # passes of all others are as long: they wait inside them
        busy, better = busy[sides.own], better[sides.own]
    excess = busy.max(axis=0) - better.max(axis=0)
    return np.asarray(np.clip(excess, 0.0, sides.seen.iteration_ns))


def _finding(seen: Observations, slow: SlowHost) -> Finding:
    members, reason, rows = seen.members, slow.reason, slow.rows.tolist()
    test, num_peers = reason.test, len(members) - len(rows)
    ranks = members.ranks_of(rows)
    if reason.cause == Cause.LOADER:
        ranks = ranks_that_load(seen, slow.rows)
    is_log = test == reason.tests.get(COMPUTE)
    reach = SEARCH.interval_sigmas * test.error
    slowdown, low, high = (
        float(np.exp(one)) if is_log else 1.0 + max(one, 0.0)
        for one in (test.effect, test.effect - reach, test.effect + reach)
    )
    active = active_in(reason.course, len(seen.iterations))
    lost = milliseconds(float(np.mean(reason.excess_ns[active])))
    clocks = ""
    if reason.cause == Cause.COMPUTE and slow.is_shown:
        clocks = _slow_clocks(seen, mask_of(rows, len(members)), test.effect)
    measured = ", ".join(_in_words(name, one.effect) for name, one in reason.tests.items())
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows),
            cause=reason.cause,
            owner=Owner.NODE if slow.is_shown else Owner.UNDECIDED,
            slowdown=slowdown,
            interval=(low, high),
            course=reason.course,
            q_value=slow.q_value,
            num_peers=num_peers,
            saved_ns=reason.excess_ns,
            subject=f"host {members.hosts[rows[0]]} (ranks {listed(ranks)})",
            predicate={
                Cause.COMPUTE: f"computes {times(slowdown)} slower than the other hosts",
                Cause.LOADER: f"loads data late, for up to {lost} an iteration",
            }.get(reason.cause, f"holds up all its ranks, up to {lost} an iteration"),
            evidence=(
                f"{measured}, against the ranks of other hosts that do the same work",
                *((CHANGED,) if reason.is_by_change else ()),
                *((clocks,) if clocks else ()),
                f"{counted(len(ranks), 'rank')} of this host against "
                f"{counted(num_peers, 'rank')} of others",
                *((reason.doubt,) if reason.doubt else ()),
            ),
            advice=DEVICE_ADVICE if reason.cause == Cause.COMPUTE else HOST_ADVICE,
        ),
    )


def _in_words(channel: str, effect: float) -> str:
    if channel in LOST:
        return f"time lost to the {channel} {effect:+.1%} of the iteration"
    what = "time from launch to launch" if channel == PACE else channel
    return f"{what} {times(float(np.exp(effect)))}"


def search_hosts(inquiry: Inquiry) -> Answer:
    """Search hosts that are slow as a whole."""
    found = slow_hosts(inquiry)
    workers = inquiry.seen.members.workers

    def ranks_on(hosts: list[SlowHost]) -> set[int]:
        return {rank for one in hosts for row in one.rows for rank in workers[int(row)]}

    ranks, ranks_at_fault = ranks_on(found), ranks_on([one for one in found if one.is_shown])

    def explains(finding: Finding) -> bool:
        if finding.owner != Owner.NODE and finding.cause in (Cause.COMPUTE, Cause.UNKNOWN):
            return set(finding.ranks) <= ranks
        return finding.cause != Cause.LINK and set(finding.ranks) <= ranks_at_fault

    # flag the host's rows as slow, so that no later search takes its stage for a heavy one
    lengthens = [one.rows for one in found if one.reason.cause in (Cause.COMPUTE, Cause.HOST)]
    slow = [int(row) for rows in lengthens for row in rows]
    return Answer(
        findings=tuple(_finding(inquiry.seen, one) for one in found),
        slow=mask_of(slow, len(inquiry.seen.members)),
        explains=explains,
    )
