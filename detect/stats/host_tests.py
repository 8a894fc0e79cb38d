"""Compare the ranks of one host with those of the others that do the same, channel by channel.

    compute      own time of passes                       log ratio to the others
    optimizer    time of the optimizer step               log ratio
    pace         time from launch to launch               log ratio
    host         time lost between and inside operations  share of the iteration
    loader       time lost to loading                     share of the iteration

The k ranks of a host are a sample, compared with the n ranks of the other hosts:

    t = (mean of the host's ranks - mean of the others) / (s · sqrt(1/k + 1/n))

with s the spread of the n others (that of whole hosts where it is larger), n - 1 degrees of
freedom. Two ranks on other hosts show no spread: lost time is then compared iteration by iteration,
and must be far more (`_test_of_few`).

Leaving out one host's ranks changes what the rows at the same places are compared with, and nothing
else. So every channel is compared once with all hosts in it, and then, for each host, again only at
the places where the host has ranks (`Channel`).

Since when a host exceeds the others, `clearest_split` says: the split of the window at which it
rises most, in errors of the rise. `since_it_began` dates by it what is known to be slow. What a
host's devices lose to its slow launching says `launches_slowly`.

Example: 4 hosts of 4 ranks, DP 16. The optimizer takes 2.12 ms on the ranks of one host and 0.92 ms
on the 12 others (spread 0.4 %): log ratio 0.84 at s = 0.004, t above 300.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from scipy import special

from detect.observe.observations import Observations
from detect.report import Cause
from detect.stats import robust
from detect.stats.residuals import stage_groups
from detect.stats.stretches import Course
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.devices import DEVICE, ORDINARY, PAIRS
from detect.thresholds.hosts import HOSTS
from detect.thresholds.observing import PACE as SLOW_PACE
from detect.thresholds.observing import STARVATION
from detect.thresholds.statistics import PERSISTENCE, SEARCH
from detect.whatif.traced import joined_groups
from megascan.arrays import Flags, Floats, Integers, mask_of

COMPUTE, OPTIMIZER, PACE = "compute", "optimizer", "pace"
LOADER = "loader"
LOST = {"host": Cause.HOST, LOADER: Cause.LOADER}


@dataclass(frozen=True)
class HostTest:
    """By how much a host exceeds the others in a channel, and how likely that is by chance."""

    effect: float
    """Log ratio of compute and optimizer, or share of the iteration that is lost."""
    error: float
    p_value: float


@dataclass(frozen=True)
class Over:
    """What rows exceed others by in one channel."""

    value: Floats
    """(row, iteration); NaN where a row has nobody to be compared with."""
    level: Floats
    """(row,): one number for the whole window."""


@dataclass(frozen=True)
class Place:
    """Rows that do the same, and `candidates` to compare them with, (row,) flags each: the first
    candidate with a control row in it counts.
    """

    rows: Integers
    candidates: tuple[Flags, ...]

    def peers(self, control: Flags) -> Flags:
        """Return the control rows to compare with, (row,); none where no candidate has any."""
        found = (one & control for one in self.candidates)
        return next((one for one in found if one.any()), np.zeros_like(control))


class Channel:
    """A quantity of every row minus the median of the control rows that do the same as the row.

    `value` is (row, iteration), or (row, iteration, operation), of whose operations the median
    counts; `level` makes one number of a row's iterations.
    """

    def __init__(
        self,
        value: Floats,
        places: Sequence[Place],
        control: Flags,
        level: Callable[[Floats], Floats],
    ) -> None:
        self._value, self._places, self._control, self._level = value, places, control, level
        self._peers = np.stack([place.peers(control) for place in places])
        over = np.full(value.shape[:2], np.nan)
        for place, peers in zip(places, self._peers, strict=True):
            over[place.rows] = self._beyond(place.rows, peers)
        self._everybody = Over(over, level(over))

    def without(self, own: Flags) -> Over:
        """Return what rows exceed the control rows by, without a host's `own` rows, (row,)."""
        over, level = self._everybody.value.copy(), self._everybody.level.copy()
        control = self._control & ~own
        moved = np.zeros(len(over), dtype=bool)
        for number in np.flatnonzero(self._peers[:, own].any(axis=1)).tolist():
            place = self._places[number]
            over[place.rows] = self._beyond(place.rows, place.peers(control))
            moved[place.rows] = True
        level[moved] = self._level(over[moved])
        return Over(over, level)

    def _beyond(self, rows: Integers, peers: Flags) -> Floats:
        beyond = self._value[rows] - robust.median(self._value[peers], axis=0)
        return beyond if beyond.ndim == 2 else robust.median(beyond, axis=2)


class Channels:
    """All channels of some observations; `control`, (row,), flags hosts not found so far."""

    def __init__(self, seen: Observations, control: Flags) -> None:
        optimizer = robust.log_of(seen.optimizer_ns)
        everybody, step_ns = np.ones_like(control), float(np.median(seen.iteration_ns))
        mean = partial(robust.mean, axis=1)
        self._by_name = {OPTIMIZER: Channel(optimizer, places_of(seen), control, mean)}
        of_all = [Place(np.arange(len(control)), (everybody,))]
        if seen.launch_pace is not None:
            self._by_name[PACE] = Channel(seen.launch_pace, of_all, control, robust.centre)
        for name, cause in LOST.items():
            lost, places = seen.lost(cause) / step_ns, places_of(seen, everybody)
            self._by_name[name] = Channel(lost, places, control, mean)
        stages = [
            Place(rows, (mask_of(rows.tolist(), len(control)),))
            for rows in stage_groups(seen.members)
        ]
        self._passes = Channel(seen.work.log_ns, stages, control, robust.centre)
        self._layers = None
        if seen.layers is not None:
            self._layers = Channel(seen.layers.log_ns, of_all, control, robust.centre)

    def without(self, own: Flags, *, by_layers: bool) -> dict[str, Over]:
        """Return what rows exceed the control rows by, without a host's `own` rows, by channel.

        Passes are compared within stages. With `by_layers`, layers of all stages are compared
        instead, and there is no COMPUTE where none was traced.
        """
        compute = self._layers if by_layers else self._passes
        found = {} if compute is None else {COMPUTE: compute.without(own)}
        return found | {name: one.without(own) for name, one in self._by_name.items()}


def places_of(seen: Observations, everybody: Flags | None = None) -> list[Place]:
    """Return the rows of each stage and TP rank, compared among themselves, or with their stage.

    With `everybody` (row,), a stage without control rows is compared with those of all stages.
    """
    stage, tp = seen.members.stage, seen.members.place["tp"]
    found = []
    for one, other in sorted({*zip(stage.tolist(), tp.tolist(), strict=True)}):
        of_stage = stage == one
        rows = of_stage & (tp == other)
        last = () if everybody is None else (everybody,)
        found.append(Place(np.flatnonzero(rows), (rows, of_stage, *last)))
    return found


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The ranks of one host, and those of other hosts that it is compared with."""

    seen: Observations
    host: Integers
    """(row,): a number for each row's host."""
    own: Flags
    control: Flags
    channels: Channels

    @cached_property
    def over(self) -> dict[str, Over]:
        """Return what each row exceeds the others by, channel by channel.

        Computing is compared by layers of all stages where the host holds a whole stage.
        """
        return self.channels.without(self.own, by_layers=self.lacks_peers(self.own))

    def lacks_peers(self, rows: Flags) -> bool:
        """Return whether some stage of these rows has no row to compare with."""
        stage = self.seen.members.stage
        return any(not self.control[stage == one].any() for one in np.unique(stage[rows]))

    def is_one_group(self) -> bool:
        """Return whether the host's ranks are of one TP group, or of one that exchanges tokens for
        experts unseen, or hold the shards of one model and gather them beside their passes: all
        wait for one rank inside these. Not where passes hold no waiting and no data are longer.
        """
        members, hidden = self.seen.members, self.seen.hidden_axes
        group = members.tensor_group
        if "ep" in hidden:
            group = joined_groups(members.layout, members.ranks, hidden)
        is_one = len(np.unique(group[self.own])) == 1 and int(self.own.sum()) > 1
        if is_one and (self.seen.holds_waiting or not self.seen.rules_data_out):
            return True
        if not self.seen.hides_waiting or self.seen.transfers is None:
            return False
        ranks = self.seen.members.ranks_of(np.flatnonzero(self.own).tolist())
        return any(tuple(sorted(one)) == ranks for one in self.seen.transfers.members)

    def holds_whole_units(self) -> bool:
        """Return whether the host's ranks are whole replicas, whole stages, or one TP group.

        In a TP group whose communication is hidden in its passes, all ranks are as slow as one.
        Replicas do not count if no data are longer than others, nor stages if all layers are equal.
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


def channel_tests(sides: Sides) -> Iterator[tuple[str, HostTest]]:
    """Yield the test of every channel that the trace has on both sides."""
    for name, over in sides.over.items():
        test = _test(sides, name, over) or _test_of_few(sides, name, over)
        if test is not None:
            yield name, test


def _test(sides: Sides, name: str, over: Over) -> HostTest | None:
    """Return the t test of a channel's level; None for too few ranks on either side.

    Most of the host's ranks must share half of the excess, and the others half of the mean without
    its slowest (four ranks at 12, 5, 3 and -4 % are one slow rank beside chips that differ); of
    lost time all of them, or each must exceed every other rank: pauses hit some ranks of a host
    more often than others, but next to no rank of other hosts. Nor may most of it be one pause of
    each rank, which any rank may have.
    Example: two ranks lose 30 and 39 % of one iteration each, not of the same one, and nothing in
    nine others.

    Where each rank has one rank to be compared with, the others show no spread. So the optimizer's
    mean must exceed the error that its own ranks show. Example: 0.97 to 1.04 times as long on eight
    ranks, 1.014 on the mean, is no more than chance.
    """
    is_log, level = name not in LOST, over.level
    known = np.isfinite(level)
    mine, others = level[sides.own & known], level[sides.control & known]
    if len(mine) < HOSTS.min_ranks or len(others) < HOSTS.min_control:
        return None
    centre = float(np.median(others))
    effect = float(np.mean(mine)) - centre
    error, degrees = _error(name, len(mine), others, sides.host[sides.control & known])
    least = HOSTS.most_of_host_share if is_log else 1.0
    is_shared = float(np.mean(mine - centre >= 0.5 * effect)) >= least
    if is_log:  # nor may one rank carry the mean of several
        is_shared &= float(np.mean(np.sort(mine)[:-1])) - centre >= PAIRS.agrees_share * effect
    is_apart = not is_log and float(mine.min() - others.max()) >= HOSTS.least_apart_share
    # a loader far slower than others on its host is the fault of one rank, not of the host
    is_apart &= name != LOADER or float(mine.max()) < HOSTS.unlike_ratio * float(mine.min())
    if is_log:
        is_lasting = _holds_in_each_of_few(sides, over.value, effect)
    else:
        is_lasting = not _is_one_pause_each(over.value[sides.own & known], effect)
    counts = (is_shared or is_apart) and is_lasting
    if name == OPTIMIZER:
        counts &= effect >= SEARCH.interval_sigmas * robust.standard_error(mine)
        counts &= effect >= DEVICE.sure_sigmas * _spread_of_hosts(sides, level)
    p_value = float(special.stdtr(degrees, -effect / error)) if counts else 1.0
    return HostTest(effect, error, p_value)


def _spread_of_hosts(sides: Sides, level: Floats) -> float:
    """Return sigma of the medians of the other hosts' ranks, of `level` (row,); 0 of few hosts.

    Hosts launch the many short kernels of a step at speeds of their own. Example: steps take 0.90
    to 1.10 times as long on hosts whose passes are all as quick as each other.
    """
    known = sides.control & np.isfinite(level)
    medians = [float(np.median(level[known & (sides.host == one)]))
               for one in np.unique(sides.host[known])]  # fmt: skip
    return float(robust.spread(np.array(medians))) if len(medians) >= ORDINARY.min_peers else 0.0


def _holds_in_each_of_few(sides: Sides, value: Floats, effect: float) -> bool:
    """Return whether a host is slow by half of its `effect` in each iteration, where there are too
    few for a median; `value`, (row, iteration), is what rows exceed the others by, log.

    Example: of two iterations 0.04 and 0.78 on ranks that all wait for one document or collector.
    """
    if value.shape[1] >= PERSISTENCE.min_normal:
        return True
    with np.errstate(invalid="ignore"):
        excess = robust.mean(value[sides.own], axis=0) - robust.median(value[sides.control], axis=0)
    return bool((excess >= PAIRS.agrees_share * effect).all())


def _is_one_pause_each(value: Floats, effect: float) -> bool:
    """Return whether next to nothing of the `effect`, or of any row, is left of `value`, (row,
    iteration), without each row's largest, and these lie in different iterations: a host stops all
    its ranks at once. Example of more than one pause each: a loader takes 986, 0, 0, 53, 0 and 0
    ms, its neighbour 0, 81, 6, 72, 209 and 121.
    """
    if value.shape[1] < PERSISTENCE.min_normal or not np.isfinite(value).all():
        return False
    rest = np.sort(value, axis=1)[:, :-1].mean(axis=1)
    at_once = float(np.bincount(value.argmax(axis=1)).max()) / len(value)
    is_one = float(rest.mean()) < HOSTS.least_rest_share * effect
    is_one &= bool((rest < HOSTS.least_rest_share * value.mean(axis=1)).all())
    return is_one and at_once < HOSTS.most_of_host_share


def _error(name: str, num_own: int, others: Floats, host: Integers) -> tuple[float, float]:
    """Return the standard error of a host's excess, and its degrees of freedom.

    It is that of the `num_own` ranks' mean by the spread of the `others` (row,), or by the spread
    of the means of their `host` (row,), whichever is larger. That of paces is drawn towards what
    hosts usually differ by. Example: three hosts at -0.13, -0.10 and 0.08 have a spread of 0.11 by
    themselves, and 0.07 together with what is usual.
    """
    usual = SLOW_PACE.spread_log if name == PACE else _usual_spread(name)
    spread = max(float(np.std(others, ddof=1)), usual)
    error, degrees = spread * float(np.sqrt(1 / num_own + 1 / len(others))), len(others) - 1.0
    num_ranks = np.bincount(host)
    means = (np.bincount(host, weights=others) / np.maximum(num_ranks, 1))[num_ranks > 0]
    if len(means) < HOSTS.min_control:
        return error, degrees
    variance, degrees_of_hosts = float(np.var(means, ddof=1)), len(means) - 1.0
    if name == PACE:  # two or three means hardly show how much hosts differ, and that is known
        sum_of_squares = degrees_of_hosts * variance + SLOW_PACE.prior_degrees * usual**2
        degrees_of_hosts += SLOW_PACE.prior_degrees
        variance = sum_of_squares / degrees_of_hosts
    by_hosts = float(np.sqrt(variance * (1 + 1 / len(means))))
    return (by_hosts, degrees_of_hosts) if by_hosts > error else (error, degrees)


def _usual_spread(name: str) -> float:
    """Return by how much sound hosts differ at least in a channel."""
    return HOSTS.spread_share if name in LOST else HOSTS.spread_log


def _test_of_few(sides: Sides, name: str, over: Over) -> HostTest | None:
    """Return the test of lost time, or of launching, against too few other ranks to have a spread;
    None where the host's ranks do not lose far more than the others, or launch far more slowly.

    If all ranks were alike, the host's k ranks would be the top k of k + n in an iteration with
    probability 1 / C(k + n, k). Examples: two loaders take 480 ms of 700 and two 0.3 ms, in all of
    10 iterations: 6^-10. Or two ranks take 1.35 and 1.38 times as long from launch to launch as the
    two of the only other host: in 18 of 19 iterations both take longer than either of these.
    """
    own, others = over.value[sides.own], over.value[sides.control]
    is_few = len(own) >= HOSTS.min_ranks and HOSTS.min_control > len(others) > 0
    if not (is_few and np.isfinite(own).all() and np.isfinite(others).all()):
        return None
    level = over.level
    effect = float(np.mean(level[sides.own])) - float(np.median(level[sides.control]))
    if name == PACE:
        is_far = least_lead(sides) >= SLOW_PACE.slow_host_log
    elif name in LOST:
        lost = robust.mean(sides.seen.lost(LOST[name]), axis=1)
        least, most = float(lost[sides.own].min()), float(lost[sides.control].max())
        is_far = effect >= HOSTS.unlike_share and least >= HOSTS.unlike_ratio * most
    else:
        is_far = False
    if not is_far:
        return None
    hits = own.min(axis=0) > others.max(axis=0)
    chance = 1.0 / float(special.comb(len(own) + len(others), len(own)))
    error = robust.standard_error(own.mean(axis=0))
    return HostTest(effect, error, float(special.bdtrc(int(hits.sum()) - 1, len(hits), chance)))


def beside_others(sides: Sides, over: Floats) -> Floats:
    """Return what the host's ranks exceed those of other hosts by, (iteration,)."""
    return robust.median(over[sides.own], axis=0) - robust.median(over[sides.control], axis=0)


def clearest_split(
    series: Floats, name: str, lasts: int, least: int = PERSISTENCE.min_normal
) -> tuple[Course, float] | None:
    """Return the course of a rise inside the window, and its p-value; None for short windows.

    `series`, (iteration,), is of the channel `name`; the later part lasts for `lasts` iterations at
    least, the one before it for `least`: fewer will do to date what is known to be slow.
    """
    length = len(series)
    if length < least + lasts or not np.isfinite(series).all():
        return None
    parts = [(series[:first], series[first:]) for first in range(least, length - lasts + 1)]
    rises = np.array([after.mean() - before.mean() for before, after in parts])
    within = np.array([before.var() * len(before) + after.var() * len(after)
                       for before, after in parts])  # fmt: skip
    sigma = np.maximum(np.sqrt(within / (length - 2)), _usual_spread(name))
    errors = sigma * [np.sqrt(1 / len(before) + 1 / len(after)) for before, after in parts]
    place = int(np.argmax(rises / errors))
    first, rise, error = place + least, float(rises[place]), float(errors[place])
    p_value = float(special.stdtr(length - 2.0, -rise / error)) * len(parts)
    return Course.of(np.arange(length) >= first, rise, error), p_value


def since_it_began(series: Floats, name: str, settings: DetectorSettings) -> Course | None:
    """Return the iterations in which something that is known to be slow is slow, from the one at
    which that began; None where it is slow from the first on, or was not sound before.

    `series` (iteration,) is what it exceeds others by, in the channel `name`.
    """
    split = clearest_split(series, name, settings.min_iterations, PAIRS.min_normal_iterations)
    if split is None or not split[1] <= settings.false_discovery_rate:
        return None
    active = split[0].active
    was_sound = series[~active].mean() <= HOSTS.sound_before_share * series[active].mean()
    return split[0] if was_sound else None


def rise_in(values: Floats, first: int) -> Floats:
    """Return how much higher `values`, (row, iteration), are from slot `first` on, (row,)."""
    return np.asarray(
        robust.mean(values[:, first:], axis=1) - robust.mean(values[:, :first], axis=1)
    )


def as_recorded(sides: Sides, name: str) -> Floats:
    """Return a channel as the host's ranks recorded it, without comparison, (row, iteration)."""
    seen = sides.seen
    if name == COMPUTE:
        return robust.median(seen.work.log_ns[sides.own], axis=2)
    return np.asarray(seen.lost(LOST[name])[sides.own] / float(np.median(seen.iteration_ns)))


def passes_over(sides: Sides) -> Floats:
    """Return log time of each row's passes minus the median of other hosts, (row, iteration).

    Stages are ignored. All are NaN where the other hosts' passes change by themselves, as all
    passes do when sequences get longer.
    """
    level = robust.median(sides.seen.work.log_ns, axis=2)
    others = robust.median(level[sides.control], axis=0)
    if float(np.nan_to_num(np.ptp(others))) > HOSTS.steady_log:
        return np.full_like(level, np.nan)
    return np.asarray(level - others)


def launches_slowly(sides: Sides, sure: Mapping[str, HostTest], alone: Flags) -> HostTest | None:
    """Return what a host's devices lose to its slow launching; None where it is not slow.

    None, too, where the devices lose next to nothing: launching slowly harms nobody as long as no
    device stands still for it. The p-value is that of the pace test.

    Others wait for rows that are slow `alone`, (row,), whatever their host does: beside such rows
    it has to lose more. Example: one of eight ranks computes 1.3 times slower, all others of the
    job wait for it for a fifth of the iteration, and its host launches 1.7 times slower.
    """
    pace = sure.get(PACE)
    if pace is None:
        return None
    level = sides.over[PACE].level
    own, others = level[sides.own], level[sides.control]
    is_by_stage = sides.lacks_peers(sides.own) and not _is_no_stage(sides)
    least = SLOW_PACE.other_stage_log if is_by_stage else SLOW_PACE.slow_host_log
    if not float(np.nan_to_num(own).min()) - float(np.nanmax(others)) >= least:
        return None
    lost = sides.over[Cause.HOST.value].level
    effect = float(np.nanmean(lost[sides.own])) - float(np.nanmedian(lost[sides.control]))
    is_beside = bool(alone[sides.own].any())
    least = HOSTS.least_doubtful_share if is_beside else SLOW_PACE.least_share
    effect = effect if effect >= least else _lost_inside(sides)
    effect = effect if effect >= least else _waited_for(sides, alone)
    if not effect >= least:
        return None
    return HostTest(effect, effect * pace.error / pace.effect, pace.p_value)


def _is_no_stage(sides: Sides) -> bool:
    """Return whether slow launching of a host whose stages are on no other is not what these ask of
    it: it has several, as the others do, and a stage by itself makes no other one slow; or it loads
    slowly as well, where both ends of a pipeline load the same.

    Example: stages 2 and 3 take 1.65 times as long from launch to launch as stages 0 and 1, and the
    last stage loads for 2.68 ms, the first one for 1.56.
    """
    stage = sides.seen.members.stage
    num_stages = [len(np.unique(stage[rows])) for rows in (sides.own, sides.control)]
    return min(num_stages) > 1 or _loads_slowly(sides)


def _loads_slowly(sides: Sides) -> bool:
    """Return whether several loaders of the host, and all of them, take longer in quiet iterations
    than any of other hosts: what they do in these takes a processor its time, whatever the storage.
    """
    if sides.seen.loading_ns is None:
        return False
    usual_ns = np.nan_to_num(np.quantile(sides.seen.loading_ns, BURSTS.quiet_share, axis=1))
    loads = usual_ns >= LOSSES.least_load_ns
    own_ns, others_ns = usual_ns[sides.own & loads], usual_ns[sides.control & loads]
    if min(len(own_ns), len(others_ns)) < HOSTS.min_ranks:
        return False
    return float(np.log(own_ns.min() / others_ns.max())) >= SLOW_PACE.slow_host_log


def _waited_for(sides: Sides, alone: Flags) -> float:
    """Return for how much longer everybody else waits than some rank of this host that is not slow
    `alone`, as a share of the iteration, on the mean; 0 where no waiting was recorded.

    What slow launching costs may lie anywhere: in the optimizer, in loading, in collecting garbage,
    or with a TP mate that is launched a little later than the others. Example: from launch to
    launch a host takes 1.47 times as long as the other; loading takes its ranks 1.7 % of the
    iteration more, gaps 1.1 %, and the others wait for 11.5 % longer than its busiest rank.

    0, too, if it takes no longer by all launches, those included that the device held back: then
    what others wait for, such as a slow link, spaces the few launches that tell its pace.
    """
    waiting_ns, held_pace = sides.seen.waiting_ns, sides.seen.held_pace
    if waiting_ns is None:
        return 0.0
    if held_pace is not None:
        held = robust.centre(held_pace)  # as the pace that it is compared with
        held_lead = float(robust.median(held[sides.own]) - robust.median(held[sides.control]))
        if not held_lead >= PAIRS.agrees_share * pace_lead(sides):
            return 0.0
    own = sides.own & ~alone
    lead_ns = waiting_ns[sides.control].min(axis=0) - waiting_ns[own].min(axis=0)
    return float(lead_ns.mean() / np.median(sides.seen.iteration_ns))


def _lost_inside(sides: Sides) -> float:
    """Return how much longer this host's passes are than those at the same place on other hosts, as
    a share of the step (the least of its TP groups).

    Return 0 if this host launched as quickly as others for a time, if some TP group of it is not
    starved, or if other hosts' devices are starved too and launching does not explain the passes.

    A small model waits for its launches inside its passes. Example: 8 forward passes take 4.0 ms
    each, with every operation launched just in time, on other hosts 2.75 ms: 10 of 65 ms are lost.
    """
    seen, own, control = sides.seen, sides.own, sides.control
    if seen.starved_share is None or not _is_steady(_pace_lead(sides)):
        return 0.0
    starved = np.nan_to_num(robust.median(seen.starved_share, axis=1))
    if starved[control].max() >= STARVATION.fed_share and not _follows_launching(sides):
        return 0.0
    busy = robust.median(np.nan_to_num(seen.busy_ns), axis=1) / float(np.median(seen.iteration_ns))
    longer = np.full(len(own), -np.inf)
    for place in places_of(seen):
        peers = place.peers(control)
        if peers.any():
            longer[place.rows] = busy[place.rows] - float(np.median(busy[peers]))
    tensor_group, found = seen.members.tensor_group, []
    for one in np.unique(tensor_group[own]):
        group = own & (tensor_group == one)
        if starved[group].max() < STARVATION.fed_share:
            return 0.0
        found.append(float(longer[group].max()))
    return min(found)


def _follows_launching(sides: Sides) -> bool:
    """Return whether the passes of each of the host's ranks are longer by about as much as its
    time from launch to launch.

    In a job whose devices all wait for their hosts, a pass takes as long as its launches. Example:
    passes 2.24 times as long on all four ranks, time from launch to launch 2.09 times. False with
    expert parallelism: hosts wait for devices to tell the experts their tokens, so neither time
    says who is slow.
    """
    over = sides.over.get(COMPUTE)
    if over is None or sides.seen.members.layout.ep > 1:
        return False
    pace, longer = float(np.median(_pace_lead(sides))), over.level[sides.own]
    least = SLOW_PACE.follows_share
    return bool((longer >= least * pace).all() and (least * longer <= pace).all())


def keeps_its_pace(sides: Sides) -> bool:
    """Return whether the host launches slowly by about the same lead in all iterations, or since an
    iteration before which it had no lead to speak of, or is far slower in some and has none in the
    rest. Load from other processes comes and goes.

    Example: 0.8, 1.1, 0.9, 1.0 varies by an eighth of its median; 0.7, 0.3, 0.1, 1.0, 0.9, 0.0 by
    two thirds. 0.4, 0.1, 0.3, 0.4, 1.0 and 0.9 are no onset: it was slower than others before.
    """
    lead = _pace_lead(sides)
    if _is_steady(lead) or _is_far_slower_at_times(sides, lead):
        return True
    for first in range(PAIRS.min_normal_iterations, len(lead) - PERSISTENCE.min_normal + 1):
        before, since = lead[:first], lead[first:]
        least = min(SLOW_PACE.wander_share * float(np.median(since)), SLOW_PACE.sound_log)
        if _is_steady(since) and before.mean() <= least:
            return True
    return False


def _is_far_slower_at_times(sides: Sides, lead: Floats) -> bool:
    """Return whether each of the host's ranks launches several times more slowly than any other
    ever does, in several iterations, and in the rest they have no lead to speak of: no load that
    comes and goes on any host, but what stops this one.

    Example: 9.0 and 9.0 times as long in two of five iterations, 0.95 to 1.0 times in the others,
    and 1.13 times at most on three other hosts.
    """
    pace = sides.over[PACE].value
    ahead = pace[sides.own].min(axis=0) - np.nanmax(pace[sides.control])
    far = ahead >= float(np.log(SLOW_PACE.stop_ratio))
    is_sound_else = bool((lead[~far] <= SLOW_PACE.sound_log).all())
    return int(far.sum()) >= BURSTS.min_hits and is_sound_else


def _pace_lead(sides: Sides) -> Floats:
    """Return the host's log time from launch to launch minus that of the others, (iteration,)."""
    return beside_others(sides, sides.over[PACE].value)


def has_more_to_launch(sides: Sides) -> bool:
    """Return whether the host's ranks take longer from launch to launch, by what stages of sound
    jobs differ. Example: 1.61 times as long, gaps of 8 to 51 % of an iteration, by turns, against 3
    to 9 %, and passes of all hosts that vary alike.
    """
    return SLOW_PACE.slow_log <= pace_lead(sides) < SLOW_PACE.other_stage_log


def least_lead(sides: Sides) -> float:
    """Return how much longer the host's quickest rank takes from launch to launch than the slowest
    of the others, log; launches must have been recorded.
    """
    pace = sides.over[PACE].level
    return float(np.nan_to_num(pace[sides.own]).min()) - float(np.nanmax(pace[sides.control]))


def pace_lead(sides: Sides) -> float:
    """Return how much longer the host takes from launch to launch than others, log; 0 where no
    launches were recorded.
    """
    if PACE not in sides.over:
        return 0.0
    pace = sides.over[PACE].level
    return float(robust.median(pace[sides.own]) - robust.median(pace[sides.control]))


def _is_steady(lead: Floats) -> bool:
    return bool(np.std(lead) <= SLOW_PACE.wander_share * np.median(lead))


def waits_for_launches(sides: Sides, compute: HostTest) -> bool:
    """Return whether most of what a host's devices do is launched just in time, and either its
    launches take longer as well, by a good part of what passes do, or other hosts' devices wait for
    far fewer. A slow device lets its host get ahead, and its optimizer step is launched as well.

    Examples: of the operations 75 % come just in time, on other hosts 69 %, passes take 1.09 times
    as long, and 1.14 times from launch to launch; or 81 % and 44 %, and passes take 1.39 times.
    """
    if sides.seen.starved_share is None:
        return False
    level = robust.median(sides.seen.starved_share, axis=1)
    mine, others = (float(robust.median(level[rows])) for rows in (sides.own, sides.control))
    if not mine >= STARVATION.fed_share:
        return False
    pace = float(np.median(_pace_lead(sides))) if PACE in sides.over else 0.0
    is_late = pace >= STARVATION.slower_share * compute.effect
    return is_late or mine - others >= STARVATION.more_share


def is_starved(sides: Sides) -> bool:
    """Return whether all devices of the host wait for their launches, and no other host's does.

    Longer data and heavier layers do the opposite: they let the host get further ahead.
    """
    if sides.seen.starved_share is None:
        return False
    level = robust.median(sides.seen.starved_share, axis=1)
    known = np.isfinite(level)
    mine, others = level[sides.own & known], level[sides.control & known]
    if not len(mine) or not len(others):
        return False
    return bool(mine.min() >= STARVATION.starved_share and others.max() <= STARVATION.fed_share)


def are_all_starved(sides: Sides) -> bool:
    """Return whether all devices of the host wait for their launches, and more than others do."""
    if sides.seen.starved_share is None:
        return False
    level = robust.median(sides.seen.starved_share, axis=1)
    mine, others = float(level[sides.own].min()), float(np.nanmax(level[sides.control]))
    return mine >= STARVATION.starved_share and mine - others >= STARVATION.more_share
