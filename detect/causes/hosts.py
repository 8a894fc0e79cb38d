"""Find hosts that are slow as a whole, and name them as one.

Problem: a host that is starved, hot or busy slows all its ranks by a little. Each rank alone may
stay below what its noise allows to be named; eight findings for one host are seven too many; and
where a host *is* a pipeline stage or a replica, none of its ranks has a peer on another host.

Idea: pool the ranks of a host, and compare them as a sample with the ranks of the other hosts that
do the same work, in one channel after the other:

    compute      own time of passes                       log ratio to the others
    optimizer    time of the optimizer step               log ratio
    host         time lost between and inside operations  share of the iteration
    loader       time lost to loading                     share of the iteration

    t = (mean of the host's ranks - mean of the others) / (s · sqrt(1/k + 1/n))

with s the spread of the n other ranks (that of whole hosts where it is larger), n - 1 degrees of
freedom. A host is named when its ranks are slower by at least half of the mean (most of them in
computing, all in lost time, or there each of them beyond every other rank), the effect reaches its
floor and q stays below the false-discovery rate. The floor of lost time is higher where stages are
compared with each other, or where another rank is named, whose slowness others may be waiting for.
Two ranks on other hosts show no spread: lost time is then compared iteration by iteration, and must
be far more (`_test_of_few`).

What the data could also have done is never blamed on a host: where the host holds whole replicas or
whole stages, or the same replicas are as slow on other hosts, slower passes count only if the
optimizer, which no data and no partition of the microbatches lengthens, is slower as well, if the
clocks of all its devices are as low as it is slow, or if all its devices are starved and the
others' are fed: longer work lets a host get ahead, it does not hold it back.

How long a host takes from one launch to the next depends neither on data nor on what a stage
computes, so slow launching decides whose fault lost time is, whoever shares the stage: a host is at
fault if all of its ranks launch slower than all others, in nearly all iterations, and its devices
stand still for longer.

A change inside the window decides what a level does not: neither the layers of a stage nor the
length of a replica's documents begin in the middle of a trace. The host's ranks minus the others,
(iteration,), are split where the two parts differ most:

    t = (mean of the later part - mean of the earlier one) / (s · sqrt(1/later + 1/earlier))

charged with the number of splits. In one TP group all wait for one, so its change says nothing, and
experts may get other tokens from one iteration to the next.

Whoever leaves out one host's ranks moves what the rows of their places are compared with, and
nothing else. So every channel is compared once with all hosts in it, and for each host only where
it has ranks (`_Channel`).

Example: 4 hosts of 4 ranks, DP 16. The optimizer takes 2.12 ms on the ranks of one host and 0.92 ms
on the 12 others (spread 0.4 %), the iteration 400 ms: log ratio 0.84 at s = 0.004, t above 300.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy import special

from detect.causes.device import HOST_ADVICE, UNKNOWN_ROLES, is_host_bound, low_clocks
from detect.causes.finding import Answer, CauseSpec, Claim, Inquiry, build_finding
from detect.causes.searches import load_as_long
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import stage_groups
from detect.stats.search import Course
from detect.text import counted, milliseconds, times
from detect.thresholds import HOSTS, PERSISTENCE, SEARCH, STARVATION
from detect.thresholds import PACE as SLOW_PACE
from megascan.arrays import Flags, Floats, Integers, mask_of
from megascan.errors import listed

COMPUTE, OPTIMIZER, PACE = "compute", "optimizer", "pace"
LOADER = "loader"
LOST = {"host": Cause.HOST, LOADER: Cause.LOADER}
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
WANDERS = (
    "it launches slowly in some iterations and hardly slower than others in the rest: load that "
    "comes and goes, on any host, looks like this in a short window"
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
class SlowHost:
    """A host whose ranks are slow together."""

    rows: Integers
    cause: Cause
    test: _Test
    q_value: float
    excess_ns: Floats
    """(iteration,): lost on the slowest of its ranks."""
    tests: Mapping[str, _Test]
    """By channel, the others among them, for the evidence."""
    num_peers: int
    doubt: str = ""
    """Why it need not be the host, as a sentence: data and hidden communication are not excluded.
    """
    course: Course | None = None
    """Since when; None for the whole window."""

    @property
    def is_shown(self) -> bool:
        """Return whether the host is at fault."""
        return not self.doubt


@dataclass(frozen=True)
class _Test:
    effect: float
    """Log ratio of compute and optimizer, or share of the iteration that is lost."""
    error: float
    p_value: float


@dataclass(frozen=True, kw_only=True)
class _Change:
    """Since when a host is slower than before, and of what."""

    name: str
    test: _Test
    course: Course


@dataclass(frozen=True)
class _Over:
    """What rows exceed others by in one channel."""

    value: Floats
    """(row, iteration); NaN where a row has nobody to be compared with."""
    level: Floats
    """(row,): of the whole window."""


@dataclass(frozen=True)
class _Place:
    """Rows that do the same, and whom they are compared with: of `candidates`, (row,) flags each,
    the first with a control row in it.
    """

    rows: Integers
    candidates: tuple[Flags, ...]

    def peers(self, control: Flags) -> Flags:
        """Return the control rows to compare with, (row,); none where no candidate has any."""
        found = (one & control for one in self.candidates)
        return next((one for one in found if one.any()), np.zeros_like(control))


class _Channel:
    """A quantity of every row less the median of those control rows that do the same.

    `value` is (row, iteration), or (row, iteration, operation), of which the median counts; `level`
    makes one number of a row's iterations.
    """

    def __init__(
        self,
        value: Floats,
        places: Sequence[_Place],
        control: Flags,
        level: Callable[[Floats], Floats],
    ) -> None:
        self._value, self._places, self._control, self._level = value, places, control, level
        self._peers = np.stack([place.peers(control) for place in places])
        over = np.full(value.shape[:2], np.nan)
        for place, peers in zip(places, self._peers, strict=True):
            over[place.rows] = self._beyond(place.rows, peers)
        self._everybody = _Over(over, level(over))

    def without(self, own: Flags) -> _Over:
        """Return what rows exceed those control rows by that are not a host's `own`, (row,)."""
        over, level = self._everybody.value.copy(), self._everybody.level.copy()
        control = self._control & ~own
        moved = np.zeros(len(over), dtype=bool)
        for number in np.flatnonzero(self._peers[:, own].any(axis=1)).tolist():
            place = self._places[number]
            over[place.rows] = self._beyond(place.rows, place.peers(control))
            moved[place.rows] = True
        level[moved] = self._level(over[moved])
        return _Over(over, level)

    def _beyond(self, rows: Integers, peers: Flags) -> Floats:
        beyond = self._value[rows] - robust.median(self._value[peers], axis=0)
        return beyond if beyond.ndim == 2 else robust.median(beyond, axis=2)


class _Channels:
    """All channels of some observations; `control` (row,) are ranks of hosts not found so far."""

    def __init__(self, seen: Observations, control: Flags) -> None:
        with np.errstate(divide="ignore", invalid="ignore"):
            optimizer = np.where(seen.optimizer_ns > 0, np.log(seen.optimizer_ns), np.nan)
        everybody, step_ns = np.ones_like(control), float(np.median(seen.iteration_ns))
        mean = partial(robust.mean, axis=1)
        self._by_name = {OPTIMIZER: _Channel(optimizer, _places(seen), control, mean)}
        of_all = [_Place(np.arange(len(control)), (everybody,))]
        if seen.launch_pace is not None:
            self._by_name[PACE] = _Channel(seen.launch_pace, of_all, control, robust.centre)
        for name, cause in LOST.items():
            lost, places = seen.lost(cause) / step_ns, _places(seen, everybody)
            self._by_name[name] = _Channel(lost, places, control, mean)
        stages = [
            _Place(rows, (mask_of(rows.tolist(), len(control)),))
            for rows in stage_groups(seen.members)
        ]
        self._passes = _Channel(seen.work.log_ns, stages, control, robust.centre)
        self._layers = None
        if seen.layers is not None:
            self._layers = _Channel(seen.layers.log_ns, of_all, control, robust.centre)

    def without(self, own: Flags, *, by_layers: bool) -> dict[str, _Over]:
        """Return what rows exceed those control rows by that are not a host's `own`, by channel.

        Passes are compared within stages, or `by_layers` of all stages: {} without any traced.
        """
        compute = self._layers if by_layers else self._passes
        found = {} if compute is None else {COMPUTE: compute.without(own)}
        return found | {name: one.without(own) for name, one in self._by_name.items()}


def _places(seen: Observations, everybody: Flags | None = None) -> list[_Place]:
    """Return the rows of each stage and TP rank, compared among themselves, or with their stage.

    With `everybody` (row,), a stage without control rows is compared with those of all stages.
    """
    stage, tp = seen.members.stage, seen.members.place["tp"]
    found = []
    for one, other in sorted({*zip(stage.tolist(), tp.tolist(), strict=True)}):
        of_stage = stage == one
        rows = of_stage & (tp == other)
        last = () if everybody is None else (everybody,)
        found.append(_Place(np.flatnonzero(rows), (rows, of_stage, *last)))
    return found


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """The ranks of one host, and those of other hosts that it is compared with."""

    seen: Observations
    host: Integers
    """(row,): a number for the host of each."""
    own: Flags
    control: Flags
    channels: _Channels

    @cached_property
    def over(self) -> dict[str, _Over]:
        """Return what each row exceeds the others by, channel by channel.

        Computing is compared by layers of all stages where the host holds a whole one.
        """
        return self.channels.without(self.own, by_layers=self.lacks_peers(self.own))

    def lacks_peers(self, rows: Flags) -> bool:
        """Return whether some stage of these rows has no row to compare with."""
        stage = self.seen.members.stage
        return any(not self.control[stage == one].any() for one in np.unique(stage[rows]))

    def is_one_group(self) -> bool:
        """Return whether the host's ranks are of one TP group."""
        members = self.seen.members
        places = {*zip(members.replica[self.own], members.stage[self.own], strict=True)}
        return len(places) == 1 and int(self.own.sum()) > 1

    def holds_whole_units(self) -> bool:
        """Return whether the host's ranks are all of a replica or stage, or one TP group.

        Of a TP group whose communication is hidden in its passes, all are as slow as one. Replicas
        do not count where no data are longer than others, nor stages whose layers are of one kind.
        """
        members = self.seen.members
        if self.is_one_group():
            return True
        units = [] if self.seen.rules_data_out else [members.replica]
        units += [] if self.seen.has_equal_layers else [members.stage]
        return any(
            len(np.unique(unit)) > 1 and not np.isin(unit[~self.own], unit[self.own]).any()
            for unit in units
        )


def slow_hosts(inquiry: Inquiry) -> list[SlowHost]:
    """Return the hosts that are slow as a whole, the clearest first."""
    names, host = np.unique(inquiry.seen.members.hosts, return_inverse=True)
    if len(names) < 2:
        return []
    large = np.flatnonzero(np.bincount(host) >= HOSTS.min_ranks).tolist()
    found: list[SlowHost] = []
    excluded = np.zeros(len(host), dtype=bool)
    for _ in large:
        left = [own for one in large if not excluded[own := host == one].any()]
        channels = _Channels(inquiry.seen, ~excluded)
        sides = (  # one at a time: each holds all rows
            _Sides(seen=inquiry.seen, host=host, own=own, control=control, channels=channels)
            for own in left
            if int((control := ~own & ~excluded).sum()) >= HOSTS.min_ranks
        )
        judged = [_judge(inquiry, one, len(large)) for one in sides]
        best = min((one for one in judged if one), key=lambda one: one.q_value, default=None)
        if best is None:
            break
        found.append(best)
        excluded[best.rows] = True
    return found


def _judge(inquiry: Inquiry, sides: _Sides, num_hosts: int) -> SlowHost | None:
    """Compare one host with the others in every channel; None where nothing stands out."""
    tests = dict(_tests(sides))
    num_tests = num_hosts * max(len(tests), 1)
    rate = inquiry.settings.false_discovery_rate
    sure = {name: one for name, one in tests.items() if one.p_value * num_tests <= rate}
    late = _launches_slowly(sides, sure)
    wanders = late is not None and not _lasts(sides)
    by_level = None if late and not wanders else _named(inquiry, sides, tests, sure)
    named = by_level or late
    is_shown = named is not None and (named is late or not _of_its_stage(sides, *named))
    is_shown = is_shown and not (named is late and wanders)
    if named is not None and named is not late and named[0] in LOST.values():
        slower = COMPUTE in sure and sure[COMPUTE].effect >= np.log(inquiry.settings.min_slowdown)
        slower = slower or bool(inquiry.slow[sides.own].any() and not sides.seen.tells_passes)
        # of one TP group all wait for one, between passes and in them
        is_shown = is_shown and not (slower and sides.is_one_group() and not _is_starved(sides))
    is_noisier = named is not None and _is_noisier_of_two(sides, tests, named[1])
    is_level = is_shown and int(sides.control.sum()) >= HOSTS.min_control
    change = None if is_level else _change(inquiry, sides, num_tests)
    if change is not None:
        named, is_shown = (LOST.get(change.name, Cause.COMPUTE), change.test), True
    if named is None:
        compute = sure.get(COMPUTE)
        if compute is None or not _all_suspected(inquiry, sides, compute):
            return None
        named = Cause.COMPUTE, compute
    cause, test = named
    return SlowHost(
        rows=np.flatnonzero(sides.own),
        cause=cause,
        doubt=WANDERS
        if named is late and not is_shown
        else _doubt(sides, cause, is_shown=is_shown) or NOISIER * (is_noisier and not change),
        test=test,
        q_value=min(1.0, test.p_value * num_tests),
        excess_ns=_late_ns(sides, tests)
        if named is late
        else _excess_ns(
            sides, test, by_compute=cause == Cause.COMPUTE or test is tests.get(COMPUTE)
        ),
        tests=tests if change is None else {change.name: change.test},
        num_peers=int((~sides.own).sum()),
        course=None if change is None else change.course,
    )


def _doubt(sides: _Sides, cause: Cause, *, is_shown: bool) -> str:
    """Return why it need not be the host, as a sentence; empty where it is."""
    if not is_shown:
        return NOT_SHOWN
    if cause in LOST.values() and not sides.seen.knows_roles:
        return UNKNOWN_ROLES
    return OF_STORAGE if cause == Cause.LOADER and _others_load_as_long(sides) else ""


def _is_noisier_of_two(sides: _Sides, tests: dict[str, _Test], test: _Test) -> bool:
    """Return whether a host loses a little more than the only other one."""
    is_lost = any(test is tests.get(name) for name in LOST)
    is_only = len(np.unique(sides.host[sides.control])) < 2
    return is_lost and is_only and test.effect < HOSTS.least_doubtful_share


def _others_load_as_long(sides: _Sides) -> bool:
    """Return whether loading takes ranks of other hosts about as long now and then: what all of
    them load from is slow, and their devices only have less to wait for.
    """
    loading = sides.seen.loading_ns
    if loading is None:
        loading = sides.seen.lost(Cause.LOADER)
    own = float(np.nanmedian(loading[sides.own]))
    return load_as_long(own, np.nan_to_num(loading[~sides.own]))


def _change(inquiry: Inquiry, sides: _Sides, num_tests: int) -> _Change | None:
    """Return the clearest lasting change of the host inside the window, None where there is none.

    The floors are those of levels; that of lost time is the higher one.
    """
    if sides.is_one_group() or sides.seen.members.layout.ep > 1:
        return None
    over = {name: one.value for name, one in sides.over.items()}
    if COMPUTE not in over or np.isnan(over[COMPUTE]).all():
        over[COMPUTE] = _passes_over(sides)
    floors = dict.fromkeys(LOST, HOSTS.least_doubtful_share)
    if int(sides.control.sum()) >= HOSTS.min_control:
        floors[COMPUTE] = float(np.log(inquiry.settings.min_slowdown))
    rate, lasts = inquiry.settings.false_discovery_rate, inquiry.settings.min_iterations
    found = [
        one
        for name, least in floors.items()
        if (one := _split_in_time(sides, name, over[name], lasts)) is not None
        and one.test.effect >= least
        and one.test.p_value * num_tests <= rate
    ]
    return max(found, key=lambda one: one.test.effect, default=None)


def _split_in_time(sides: _Sides, name: str, over: Floats, lasts: int) -> _Change | None:
    """Split the window where the host's ranks, (row, iteration) over the others, rise most; the
    later part has `lasts` iterations at least.
    """
    least = PERSISTENCE.min_normal
    series = robust.median(over[sides.own], axis=0) - robust.median(over[sides.control], axis=0)
    length = len(series)
    if length < least + lasts or not np.isfinite(series).all():
        return None
    parts = [(series[:first], series[first:]) for first in range(least, length - lasts + 1)]
    rises = np.array([after.mean() - before.mean() for before, after in parts])
    within = np.array([before.var() * len(before) + after.var() * len(after)
                       for before, after in parts])  # fmt: skip
    usual = HOSTS.spread_share if name in LOST else HOSTS.spread_log
    sigma = np.maximum(np.sqrt(within / (length - 2)), usual)
    errors = sigma * [np.sqrt(1 / len(before) + 1 / len(after)) for before, after in parts]
    place = int(np.argmax(rises / errors))
    first, rise, error = place + least, float(rises[place]), float(errors[place])
    if not (_rise(over, first)[sides.own] >= HOSTS.least_rise_share * rise).all():
        return None
    # where a fault of others has ended, a sound host is slower than before beside them
    as_recorded = float(np.median(_rise(_recorded(sides, name), first)))
    if not as_recorded >= HOSTS.least_rise_share * rise:
        return None
    p_value = float(special.stdtr(length - 2.0, -rise / error)) * len(parts)
    active = np.arange(length) >= first
    course = Course(active, rise, error, 1.0, ((first, length - 1),))
    return _Change(name=name, test=_Test(rise, error, p_value), course=course)


def _passes_over(sides: _Sides) -> Floats:
    """Return the log time of each row's passes over the other hosts', (row, iteration), whatever
    the stages; NaN where the others' change by themselves, as all do when sequences get longer.
    """
    level = robust.median(sides.seen.work.log_ns, axis=2)
    others = robust.median(level[sides.control], axis=0)
    if float(np.nan_to_num(np.ptp(others))) > HOSTS.steady_log:
        return np.full_like(level, np.nan)
    return np.asarray(level - others)


def _rise(values: Floats, first: int) -> Floats:
    """Return (row,) how much higher (row, iteration) values are from place `first` on."""
    return np.asarray(
        robust.mean(values[:, first:], axis=1) - robust.mean(values[:, :first], axis=1)
    )


def _recorded(sides: _Sides, name: str) -> Floats:
    """Return a channel as the host's ranks recorded it, (row, iteration), compared with nobody."""
    seen = sides.seen
    if name == COMPUTE:
        return robust.median(seen.work.log_ns[sides.own], axis=2)
    return np.asarray(seen.lost(LOST[name])[sides.own] / float(np.median(seen.iteration_ns)))


def _of_its_stage(sides: _Sides, cause: Cause, test: _Test) -> bool:
    """Return whether the place in the pipeline may cost the host's ranks that time.

    Where all devices wait for their hosts, the gaps show what a stage has to launch. Elsewhere
    stages have gaps of their own, some more than others; but none has many where others have next
    to none. That is no rule of loading: a stage that computes little waits for its data alone, and
    the first one however long, since others load while they wait for it.
    """
    if cause not in LOST.values() or not sides.lacks_peers(sides.own):
        return False
    if is_host_bound(sides.seen):
        return True
    if _is_starved(sides):
        return False
    if cause == Cause.LOADER:
        is_first = bool((sides.seen.members.stage[sides.own] == 0).all())
        return is_first or test.effect < HOSTS.unlike_share
    lost = robust.mean(sides.seen.lost(cause), axis=1)
    largest = float(np.nan_to_num(lost[sides.control]).max())
    own = float(np.nan_to_num(lost[sides.own]).mean())
    return test.effect < HOSTS.unlike_share and own < HOSTS.unlike_ratio * largest


def _all_suspected(inquiry: Inquiry, sides: _Sides, compute: _Test) -> bool:
    """Whether most of the host's ranks were found slow one by one: they are one finding."""
    slow = float(np.mean(inquiry.slow[sides.own]))
    floor = float(np.log(inquiry.settings.min_slowdown))
    return slow >= HOSTS.most_of_host_share and compute.effect >= floor


def _named(
    inquiry: Inquiry, sides: _Sides, tests: dict[str, _Test], sure: dict[str, _Test]
) -> tuple[Cause, _Test] | None:
    """Return what the host is slow of, and the test that shows it."""
    compute, optimizer = sure.get(COMPUTE), sure.get(OPTIMIZER)
    if compute and compute.effect >= np.log(inquiry.settings.min_slowdown):
        least = HOSTS.device_share * compute.effect
        is_device = optimizer is not None and optimizer.effect >= least
        is_device = is_device or bool(_slow_clocks(sides.seen, sides.own, compute.effect))
        is_data = sides.holds_whole_units() or _share_their_data(sides, compute)
        # where all devices wait for their hosts, what a pass takes is what its launches take
        if is_device or not (is_data or is_host_bound(sides.seen)):
            return Cause.COMPUTE, compute
        if _is_starved(sides):
            return Cause.HOST, compute
    is_doubtful = sides.lacks_peers(sides.own) or _named_elsewhere(inquiry, sides)
    least = HOSTS.least_doubtful_share if is_doubtful else HOSTS.least_share
    heavy = [name for name in LOST if name in sure and sure[name].effect >= least]
    if heavy:
        name = max(heavy, key=lambda one: sure[one].effect)
        return LOST[name], sure[name]
    computes_slowly = COMPUTE in sure and sure[COMPUTE].effect > 0
    if optimizer and optimizer.effect >= HOSTS.starving_log and not computes_slowly:
        seen, own = sides.seen, sides.own
        slower_ns = float(np.nanmean(seen.optimizer_ns[own])) * (1 - np.exp(-optimizer.effect))
        lost_ns = np.nan_to_num(seen.lost(Cause.HOST)[own]).mean(axis=1).max()
        if slower_ns + float(lost_ns) >= least * float(np.median(seen.iteration_ns)):
            return Cause.HOST, optimizer
    return None


def _slow_clocks(seen: Observations, own: Flags, effect: float) -> str:
    """Say that the clocks of all of a host's devices are as low as it is slow; "" where they are
    not, or nobody read them.
    """
    members = seen.members
    low: dict[int, str] = {}
    for row in np.flatnonzero(own).tolist():
        low |= low_clocks(seen, own, row, effect)
    if not set(low).issuperset(members.ranks_of(np.flatnonzero(own).tolist())):
        return ""
    rank = min(low)
    return f"of rank {rank}, and of all others of it alike: {low[rank]}"


def _share_their_data(sides: _Sides, compute: _Test) -> bool:
    """Return whether the same replicas are as slow on other hosts: no hardware chooses those.

    host 0: stage 0 of replicas 0, 1     host 1: stage 0 of replicas 2, 3   1.05x
    host 2: stage 1 of replicas 0, 1     host 3: stage 1 of replicas 2, 3   1.05x
    """
    replica = sides.seen.members.replica
    same = np.isin(replica, replica[sides.own])
    over = sides.channels.without(same, by_layers=sides.lacks_peers(same)).get(COMPUTE)
    level = np.empty(0) if over is None else over.level[same & ~sides.own]
    if not np.isfinite(level).any():
        return False
    return float(np.nanmedian(level)) >= HOSTS.shared_data_share * compute.effect


def _launches_slowly(sides: _Sides, sure: dict[str, _Test]) -> tuple[Cause, _Test] | None:
    """Return what its devices lose to a host that launches slowly, None where it does not.

    As long as its devices stand still for it: what is launched late and computed early harms
    nobody. The certainty is that of the launching.
    """
    pace = sure.get(PACE)
    if pace is None:
        return None
    level = sides.over[PACE].level
    own, others = level[sides.own], level[sides.control]
    least = SLOW_PACE.other_stage_log if sides.lacks_peers(sides.own) else SLOW_PACE.slow_log
    if not float(np.nan_to_num(own).min()) - float(np.nanmax(others)) >= least:
        return None
    lost = sides.over[Cause.HOST.value].level
    effect = float(np.nanmean(lost[sides.own])) - float(np.nanmedian(lost[sides.control]))
    if not effect >= SLOW_PACE.least_share:
        effect = _lost_inside(sides)
    if not effect >= SLOW_PACE.least_share:
        return None
    return Cause.HOST, _Test(effect, effect * pace.error / pace.effect, pace.p_value)


def _lost_inside(sides: _Sides) -> float:
    """Return by what share of the step the passes of each of its TP groups are longer at least than
    those of its like on other hosts; 0 where devices of these are starved as well, though longer by
    something else, or its are not, or where it launched as quickly as others for a time.

    A small model waits for its launches within its passes. Example: forward passes take 4.0 ms with
    each operation launched just in time, on other hosts 2.75 ms: 8 of them lose 10 of 65 ms.
    """
    seen, own, control = sides.seen, sides.own, sides.control
    if seen.starved_share is None or not _is_steady(_lead(sides)):
        return 0.0
    starved = np.nan_to_num(robust.median(seen.starved_share, axis=1))
    if starved[control].max() >= STARVATION.fed_share and not _follows_launching(sides):
        return 0.0
    busy = robust.median(np.nan_to_num(seen.busy_ns), axis=1) / float(np.median(seen.iteration_ns))
    longer = np.full(len(own), -np.inf)
    for place in _places(seen):
        peers = place.peers(control)
        if peers.any():
            longer[place.rows] = busy[place.rows] - float(np.median(busy[peers]))
    members, found = seen.members, []
    for replica, stage in {*zip(members.replica[own], members.stage[own], strict=True)}:
        group = own & (members.replica == replica) & (members.stage == stage)
        if starved[group].max() < STARVATION.fed_share:
            return 0.0
        found.append(float(longer[group].max()))
    return min(found)


def _follows_launching(sides: _Sides) -> bool:
    """Tell whether the passes of each of its ranks are longer as its launching is: in a job whose
    devices all wait for their hosts, launching is what a pass takes.

    Example: passes 2.24 times as long, on all four ranks, time from launch to launch 2.09 times.
    Where experts are told their tokens, hosts wait for devices: then neither says who is slow.
    """
    over = sides.over.get(COMPUTE)
    if over is None or sides.seen.members.layout.ep > 1:
        return False
    pace, longer = float(np.median(_lead(sides))), over.level[sides.own]
    least = SLOW_PACE.follows_share
    return bool((longer >= least * pace).all() and (least * longer <= pace).all())


def _lasts(sides: _Sides) -> bool:
    """Return whether the lead of a host's ranks over the others, in the time from launch to launch,
    is about the same in all iterations, or since one before which there was next to none: load of
    others comes and goes.

    Example: 0.8, 1.1, 0.9, 1.0 varies by an eighth of its median; 0.7, 0.3, 0.1, 1.0, 0.9, 0.0 by
    two thirds.
    """
    lead = _lead(sides)
    since = range(1, len(lead) - PERSISTENCE.min_normal + 1)
    return _is_steady(lead) or any(
        _is_steady(lead[first:])
        and lead[:first].mean() <= SLOW_PACE.wander_share * np.median(lead[first:])
        for first in since
    )


def _lead(sides: _Sides) -> Floats:
    """Return by how much longer its ranks take from launch to launch than others, (iteration,)."""
    pace = sides.over[PACE].value
    return np.asarray(
        robust.median(pace[sides.own], axis=0) - robust.median(pace[sides.control], axis=0)
    )


def _is_steady(lead: Floats) -> bool:
    return bool(np.std(lead) <= SLOW_PACE.wander_share * np.median(lead))


def _is_starved(sides: _Sides) -> bool:
    """Whether all of the host's devices wait for their launches, and those of the others do not.

    Longer data and heavier layers do the opposite: the host gets further ahead.
    """
    if sides.seen.starved_share is None:
        return False
    level = robust.median(sides.seen.starved_share, axis=1)
    known = np.isfinite(level)
    mine, others = level[sides.own & known], level[sides.control & known]
    if not len(mine) or not len(others):
        return False
    return bool(mine.min() >= STARVATION.starved_share and others.max() <= STARVATION.fed_share)


def _named_elsewhere(inquiry: Inquiry, sides: _Sides) -> bool:
    return bool(((inquiry.slow | inquiry.named) & ~sides.own).any())


def _tests(sides: _Sides) -> Iterator[tuple[str, _Test]]:
    """Yield the test of every channel that the trace has on both sides."""
    for name, over in sides.over.items():
        test = _test(sides, name, over.level) or _test_of_few(sides, name, over)
        if test is not None:
            yield name, test


def _test(sides: _Sides, name: str, level: Floats) -> _Test | None:
    is_log = name not in LOST
    known = np.isfinite(level)
    mine, others = level[sides.own & known], level[sides.control & known]
    if len(mine) < HOSTS.min_ranks or len(others) < HOSTS.min_control:
        return None
    centre = float(np.median(others))
    effect = float(np.mean(mine)) - centre
    usual = HOSTS.spread_log if is_log else HOSTS.spread_share
    usual = SLOW_PACE.spread_log if name == PACE else usual
    spread = max(float(np.std(others, ddof=1)), usual)
    error, degrees = spread * float(np.sqrt(1 / len(mine) + 1 / len(others))), len(others) - 1.0
    host = sides.host[sides.control & known]
    num_ranks = np.bincount(host)
    means = (np.bincount(host, weights=others) / np.maximum(num_ranks, 1))[num_ranks > 0]
    if len(means) >= HOSTS.min_control:
        by_hosts = float(np.std(means, ddof=1) * np.sqrt(1 + 1 / len(means)))
        if by_hosts > error:
            error, degrees = by_hosts, len(means) - 1.0
    least = HOSTS.most_of_host_share if is_log else 1.0
    is_shared = float(np.mean(mine - centre >= 0.5 * effect)) >= least
    # pauses meet one rank more often than another, but those of other hosts next to never
    is_apart = not is_log and float(mine.min() - others.max()) >= HOSTS.least_apart_share
    # but a loader that is far slower than its neighbours is a rank's own
    is_apart &= name != LOADER or float(mine.max()) < HOSTS.unlike_ratio * float(mine.min())
    p_value = float(special.stdtr(degrees, -effect / error)) if is_shared or is_apart else 1.0
    return _Test(effect, error, p_value)


def _test_of_few(sides: _Sides, name: str, over: _Over) -> _Test | None:
    """Return the test of lost time against too few ranks to have a spread; None where the host's
    do not lose far more than these.

    Were all ranks alike, its k would be the k that lose most of k + n by a chance of 1 in (k + n
    over k), in each iteration. Example: two loaders take 480 ms of 700 and two 0.3 ms, in all of 10
    iterations: 6^-10.
    """
    own, others = over.value[sides.own], over.value[sides.control]
    if name not in LOST or len(own) < HOSTS.min_ranks or not np.isfinite(own).all():
        return None
    if len(others) >= HOSTS.min_control or not np.isfinite(others).all():
        return None
    lost = robust.mean(sides.seen.lost(LOST[name]), axis=1)
    least, most = float(lost[sides.own].min()), float(lost[sides.control].max())
    effect = float(np.mean(over.level[sides.own])) - float(np.median(over.level[sides.control]))
    if effect < HOSTS.unlike_share or least < HOSTS.unlike_ratio * most:
        return None
    hits = own.min(axis=0) > others.max(axis=0)
    chance = 1.0 / float(special.comb(len(own) + len(others), len(own)))
    error = float(np.std(own.mean(axis=0), ddof=1)) / float(np.sqrt(len(hits)))
    return _Test(effect, error, float(special.bdtrc(int(hits.sum()) - 1, len(hits), chance)))


def _late_ns(sides: _Sides, tests: Mapping[str, _Test]) -> Floats:
    """Time lost an iteration by the slowest rank of a host that launches slowly, (iteration,): its
    device stands still between operations, and inside them, which makes its passes longer.
    """
    seen, own = sides.seen, sides.own
    lost = np.nan_to_num(seen.lost(Cause.HOST)) + np.nan_to_num(seen.lost(Cause.LOADER))
    longer = tests[COMPUTE].effect if COMPUTE in tests else 0.0
    inside = np.nan_to_num(seen.busy_ns) * (1.0 - float(np.exp(-max(longer, 0.0))))
    excess = (lost + inside)[own].max(axis=0) - robust.median(lost[~own], axis=0)
    return np.asarray(np.clip(excess, 0.0, seen.iteration_ns))


def _excess_ns(sides: _Sides, test: _Test, *, by_compute: bool) -> Floats:
    """Time lost an iteration by the host's slowest rank, (iteration,)."""
    seen, own = sides.seen, sides.own
    if by_compute:
        busy = np.nan_to_num(seen.busy_ns)
        better = np.where(own[:, None], busy * np.exp(-test.effect), busy)
        excess = busy.max(axis=0) - better.max(axis=0)
    else:
        lost = np.nan_to_num(seen.lost(Cause.HOST)) + np.nan_to_num(seen.lost(Cause.LOADER))
        excess = lost[own].max(axis=0) - robust.median(lost[~own], axis=0)
    return np.asarray(np.clip(excess, 0.0, seen.iteration_ns))


def _finding(seen: Observations, slow: SlowHost) -> Finding:
    members, test = seen.members, slow.test
    ranks = members.ranks_of(slow.rows)
    is_log = test in (slow.tests.get(COMPUTE), slow.tests.get(OPTIMIZER))
    reach = SEARCH.interval_sigmas * test.error
    slowdown, low, high = (
        float(np.exp(one)) if is_log else 1.0 + max(one, 0.0)
        for one in (test.effect, test.effect - reach, test.effect + reach)
    )
    lost = milliseconds(float(np.mean(slow.excess_ns)))
    clocks = ""
    if slow.cause == Cause.COMPUTE and slow.is_shown:
        clocks = _slow_clocks(seen, mask_of(slow.rows.tolist(), len(members)), test.effect)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(int(row) for row in slow.rows),
            cause=slow.cause,
            owner=Owner.NODE if slow.is_shown else Owner.UNDECIDED,
            slowdown=slowdown,
            interval=(low, high),
            course=slow.course,
            q_value=slow.q_value,
            num_peers=slow.num_peers,
            saved_ns=slow.excess_ns,
            subject=f"host {members.hosts[int(slow.rows[0])]} (ranks {listed(ranks)})",
            predicate={
                Cause.COMPUTE: f"computes {times(slowdown)} slower than the other hosts",
                Cause.LOADER: f"loads data late on all its ranks, up to {lost} an iteration",
            }.get(slow.cause, f"holds up all its ranks, up to {lost} an iteration"),
            evidence=(
                f"{_measured(slow.tests)}, against the ranks of other hosts that do the same work",
                *((CHANGED,) if slow.course is not None else ()),
                *((clocks,) if clocks else ()),
                f"{counted(len(ranks), 'rank')} of this host against "
                f"{counted(slow.num_peers, 'rank')} of others",
                *((slow.doubt,) if slow.doubt else ()),
            ),
            advice=DEVICE_ADVICE if slow.cause == Cause.COMPUTE else HOST_ADVICE,
        ),
    )


def _measured(tests: Mapping[str, _Test]) -> str:
    words = [
        f"time lost to the {name} {test.effect:+.1%} of the iteration"
        if name in LOST
        else f"time from launch to launch {times(float(np.exp(test.effect)))}"
        if name == PACE
        else f"{name} {times(float(np.exp(test.effect)))}"
        for name, test in tests.items()
    ]
    return ", ".join(words)


def _search(inquiry: Inquiry) -> Answer:
    found = slow_hosts(inquiry)
    workers = inquiry.seen.members.workers
    ranks, doubtful = (
        {rank for one in found if one.is_shown == is_shown for row in one.rows
         for rank in workers[int(row)]}
        for is_shown in (True, False)
    )  # fmt: skip

    def explains(finding: Finding) -> bool:
        if finding.owner != Owner.NODE and finding.cause in (Cause.COMPUTE, Cause.UNKNOWN):
            return set(finding.ranks) <= ranks | doubtful
        return finding.cause != Cause.LINK and set(finding.ranks) <= ranks

    # whether a stage on such a host is heavy by itself is not shown: nobody is told that it is
    lengthens = [one.rows for one in found if one.cause in (Cause.COMPUTE, Cause.HOST)]
    slow = [int(row) for rows in lengthens for row in rows]
    return Answer(
        findings=tuple(_finding(inquiry.seen, one) for one in found),
        slow=mask_of(slow, len(inquiry.seen.members)),
        explains=explains,
    )


WHOLE_HOSTS = CauseSpec(cause=Cause.HOST, search=_search)
