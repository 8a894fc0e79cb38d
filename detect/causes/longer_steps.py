"""Which rank of a group is slow, where nobody recorded what its ranks send each other.

    Steps        the optimizer steps of all ranks: whose is longer than those of its mates
    longer_step  the same of a row that stands for its TP group
    longer_host  the host on all of whose ranks the steps of such a row are longer

Problem: all ranks of the group wait for the slowest inside their passes, which last equally long on
all of them. In the optimizer step nobody waits for a mate, and a slow device takes longer for it.
But steps of mates are not equal: the first one updates the parameters that are not split, and adds
up the norm. And a step holds what it waits for unseen: the norm of a pipeline is known when the
first stage has come to its end, so steps of later stages are longer by hundreds of milliseconds.

Idea: ranks at the same place (stage, TP and CP rank) of other replicas update as many parameters
and wait as long. So compare with them first, and in time, which waiting does not dilute as it does
a ratio; what the rank then takes longer than its mates is its *lead*. Sound groups show how large a
lead is without a fault. They are few, so what sound devices usually differ by counts as well.

    lead   = (step - step at the same place elsewhere) - the same of its mates
    sigma² = (degrees · rms² of sound leads + few · usual²) / (degrees + few)

By Student's law with so many degrees of freedom the lead must be improbable on a sound device, and
so must it be by the noise of its iterations. Where it is not improbable enough by itself, embedding
and loss tell, too, which only move memory for each token, as many on all mates: if the same rank
leads in all of them, their chances are taken together.

Of leads in sound groups of n ranks, n - 1 a group are independent, and those of one group of each
stage follow from the others. Of four mates and more, the others of the slow group count as well.
Where no other replica shows what a place takes (no DP), leads are those beside the mates, and no
spread is usual: places differ by anything.

Example: steps of four groups of two, in us; the second group's passes take 1.43 times as long.

    2442 1426   2452 1539   2446 1425   2447 1424      second beside others at its place: +5, +114
    lead of its second rank 109 us, of sound ranks 14; 1.08 times what a step takes: named

Longer data, a slow link or a busy expert lengthen the passes of a group as well, and no step. But a
slow link may let a mate come to its step later, where it then waits less: a lead beyond what the
passes are slower by is the device's only if its own step is longer than at its place elsewhere.
Example: beside 75.73 and 74.51 ms at their places two mates take 75.73 and 71.97 ms, 2.65 times
what a step takes that waits for nobody: the second one's rail is slow.

A slow host has longer steps on all of its ranks, by about as much, and on no mate elsewhere: the
first rank's mates then do not wait for it, they are slow themselves. Example: of a group on two
hosts four ranks take 1.14 times as long as at their places in other groups, the other four 1.00.

Two slow mates are told apart where the step of one is far longer, as slow memory makes it, and that
of the other stands out from those that are left. Example: 2,008 us longer than at its place
elsewhere, 85 us, and at most 3 us on six mates.

Limits: two of two mates, or of several alike, hide each other. Of two replicas of two or three
mates on one stage nothing shows what leads are without a fault but what is usual, so these must be
longer by 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.causes.device import Suspicion, beyond_others, over_others, stages_alike
from detect.observe.groups import EachRank
from detect.observe.members import Members
from detect.stats import robust
from detect.stats.noise import step_noise
from detect.thresholds.devices import COMPUTE, DEVICE, ORDINARY, PAIRS
from detect.thresholds.statistics import ROBUST
from megascan.arrays import Flags, Floats, Integers
from megascan.timeline import rows_alike


@dataclass(frozen=True, kw_only=True)
class LongerStep:
    """The rank of a group whose optimizer step alone is longer."""

    rank: int
    lead_ns: float
    """By how much it is longer than those of its mates, what their places take taken out."""
    slower_log: float
    """The lead beside what a step takes that waits for nobody, log."""
    p_value: float
    """How probable so long a lead is on a sound device."""
    further: LongerStep | None = None
    """The mate whose step is longer beside all that are left without this one."""

    @property
    def every(self) -> tuple[LongerStep, ...]:
        """Return it, and the ones that are longer without it."""
        return (self, *(self.further.every if self.further else ()))


@dataclass(frozen=True)
class _Spread:
    """By how much leads of sound ranks vary, and how well that is known."""

    variance: float = np.inf
    degrees: float = 0.0

    @classmethod
    def of(cls, leads: Floats, degrees: int) -> _Spread:
        """Return the spread of the leads of sound ranks, (rank,), so many of them independent."""
        return cls(float(np.mean(leads**2)), degrees) if degrees else cls()

    @property
    def sigma(self) -> float:
        return float(np.sqrt(self.variance))

    def p_value(self, lead_ns: float) -> float:
        """Return how probable so long a lead is on a sound device."""
        if not self.variance > 0:
            return 0.0 if lead_ns > 0 else 1.0
        return float(special.stdtr(max(self.degrees, 1.0), -lead_ns / self.sigma))

    def beside(self, other: _Spread) -> _Spread:
        """Return both in one, each counted by its degrees of freedom."""
        known = [one for one in (self, other) if one.degrees]
        degrees = sum(one.degrees for one in known)
        if not known:
            return self
        return _Spread(sum(one.degrees * one.variance for one in known) / degrees, degrees)


@dataclass(frozen=True, kw_only=True)
class _Lead:
    """Which rank of a group takes longest for something, and how sure that is."""

    first: int
    """Its place in the group."""
    lead_ns: float
    least_ns: float
    """What the quickest rank of all takes: it waits for nobody meanwhile."""
    spreads: tuple[_Spread, _Spread]
    """By how much leads of sound ranks vary, for good and in time."""
    is_alone: bool
    """Whether no mate is half as far behind those at its place elsewhere."""
    is_own: bool
    """Whether half of the lead and more is what it is behind those at its place elsewhere: the rest
    is what its mates are ahead of those at theirs."""

    @property
    def slower(self) -> float:
        """Return the lead beside what it takes without any waiting, log."""
        return float(np.log1p(max(self.lead_ns, 0.0) / self.least_ns))

    @property
    def p_value(self) -> float:
        """Return how probable it is on a sound device, by the less certain of the spreads."""
        return max(one.p_value(self.lead_ns) for one in self.spreads)

    @property
    def is_sure(self) -> bool:
        """Return whether it is improbable on a sound device, by whichever spread."""
        is_far = all(self.lead_ns >= DEVICE.sure_sigmas * one.sigma for one in self.spreads)
        return is_far and self.p_value <= 1.0 - ORDINARY.sound_share


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Optimizer steps of all ranks, and which ranks are mates."""

    members: Members
    time_ns: Floats
    """(rank, iteration)"""
    group: Integers
    """(rank,): equal for mates."""
    lookups_ns: Floats
    """(rank, iteration, kind): embedding and loss, which move memory for each token, as many on
    all mates; NaN where none were recorded."""
    slow: Flags
    """(rank,): those that show nothing of what is usual."""

    def longest(self, group: int, effect: float, share: float) -> LongerStep | None:
        """Return the rank whose step is longer than those of its mates in a `group`, by a `share`
        of the log `effect` at least; None where none stands out, by its step alone or by that and
        all of its lookups together. Without it, the same is asked of the mates that are left.
        """
        own = self.group == group
        by_step = self._lead(self.time_ns, own)
        if by_step is None or not by_step.is_alone:
            return None
        if not share * effect <= by_step.slower <= effect + DEVICE.most_optimizer_log:
            return None
        if by_step.slower > effect and not by_step.is_own:
            return None
        kinds = [self._lead(self.lookups_ns[:, :, one], own) for one in self._kinds(own)]
        agree = [one for one in kinds if one and one.is_alone and one.first == by_step.first]
        p_value = by_step.p_value
        if not by_step.is_sure:
            p_value = chance_of_all([p_value, *(one.p_value for one in agree)])
            if not kinds or len(agree) < len(kinds) or p_value > 1.0 - ORDINARY.sound_share:
                return None
        at = int(np.flatnonzero(own)[by_step.first])
        left = self.group.copy()
        left[at] = left.max() + 1
        return LongerStep(
            rank=int(self.members.ranks[at]),
            lead_ns=by_step.lead_ns,
            slower_log=by_step.slower,
            p_value=p_value,
            further=self._further(at, replace(self, group=left).longest(group, effect, share)),
        )

    def _further(self, first: int, other: LongerStep | None) -> LongerStep | None:
        """Return the next rank whose step is longer, if it does not wait in it for the `first` one:
        two others and more would, that stand to this as it does, and do not.

        Example: of TP 2 and CP 2 one rank has slow memory, 14.4 ms, and its TP mate waits for it in
        a part of its step, 1.6 ms; those that it exchanges keys and values with do not.
        """
        if other is None:
            return None
        at, place = self.members.row(other.rank), self.members.place
        apart = [axis for axis in ("tp", "cp") if place[axis][at] != place[axis][first]]
        alike = self.group == self.group[at]
        for axis in ("tp", "cp"):
            differs = place[axis] != place[axis][first]
            alike &= differs if axis in apart else ~differs
        return other if alike.sum() > DEVICE.least_beside_further else None

    def of_host(self, group: int, least: float) -> tuple[tuple[int, ...], float] | None:
        """Return all ranks of a host, those of a `group` whose steps are longer by `least` (log)
        and more than at their places in other groups, and by how much; None where such ranks are
        not all of one host, one stands out from the others, or there are no such places.
        """
        own, hosts = self.group == group, np.array(self.members.hosts)
        places = rows_alike(self.members.numbered("pp", "tp", "cp"))
        time_ns = np.where(self.time_ns > 0, self.time_ns, np.nan)
        level = robust.centre(over_others(time_ns, places, self.slow))
        if not np.isfinite(level[own]).all():
            return None
        sound = level[~self.slow & np.isfinite(level)]
        usual = _Spread(COMPUTE.gpu_spread_log**2, DEVICE.usual_mates)
        sigma = _Spread.of(sound, len(sound)).beside(usual).sigma
        longer = own & (level >= max(least, DEVICE.sure_sigmas * sigma))
        if longer.sum() < 2 or ((hosts == hosts[np.argmax(longer)]) != longer).any():
            return None
        steps = np.sort(level[longer])
        slower = float(np.median(steps[:-1]))
        are_alike = steps[-1] - slower < PAIRS.agrees_share * slower <= steps[0]
        is_quick = level[own & ~longer].max(initial=0.0) < PAIRS.agrees_share * slower
        ranks = tuple(self.members.ranks[longer].tolist())
        return (ranks, slower) if are_alike and is_quick else None

    def _kinds(self, own: Flags) -> list[int]:
        """Return the kinds of lookups that all of `own` ranks have, and that are long enough to
        tell of the device.
        """
        lengths = robust.median(self.lookups_ns[own], axis=1)
        is_long = (lengths >= DEVICE.least_lookup_ns).all(axis=0)
        return [int(one) for one in np.flatnonzero(is_long)]

    def _lead(self, time_ns: Floats, own: Flags) -> _Lead | None:
        """Return which of `own` ranks takes longest for something that all do alike, (rank,
        iteration), and by how much; None where that was not recorded of all.
        """
        time_ns = np.where(time_ns > 0, time_ns, np.nan)
        least_ns = float(np.nanmin(robust.median(time_ns, axis=1), initial=np.inf))
        beside_ns, are_compared = self._beside(time_ns, own)
        leads = beyond_others(beside_ns, rows_alike(self.group), np.zeros(len(own), dtype=bool))
        level = robust.centre(leads)
        if not np.isfinite(level[own]).all():
            return None
        first = int(np.argmax(level[own]))
        sound = ~self.slow & np.isfinite(level)
        degrees = _degrees(self.group[sound], self.members.stage[sound], are_compared=are_compared)
        usual = _Spread((COMPUTE.gpu_spread_log * least_ns) ** 2, DEVICE.usual_mates)
        for_good = _Spread.of(level[sound], degrees).beside(usual if are_compared else _Spread())
        if are_compared:
            for_good = for_good.beside(_of_mates(robust.centre(beside_ns[own]), first))
        over_ns = robust.centre(beside_ns[own]) if are_compared else level[own]
        return _Lead(
            first=first,
            lead_ns=float(level[own].max()),
            least_ns=least_ns,
            spreads=(for_good, _in_time(leads)),
            is_alone=bool(np.delete(over_ns, first).max() < PAIRS.agrees_share * over_ns[first]),
            is_own=bool(over_ns[first] >= PAIRS.agrees_share * level[own].max()),
        )

    def _beside(self, time_ns: Floats, own: Flags) -> tuple[Floats, bool]:
        """Return what steps take, (rank, iteration), longer than at their places in other groups
        that are not slow, and whether there are such ones; where there are none for `own` ranks,
        what they take.
        """
        places = rows_alike(self.members.numbered("pp", "tp", "cp"))
        beside_ns = beyond_others(time_ns, places, self.slow)
        are_compared = bool(np.isfinite(beside_ns[own]).any(axis=1).all())
        return (beside_ns if are_compared else time_ns), are_compared


def _degrees(group: Integers, stage: Integers, *, are_compared: bool) -> int:
    """Return how many leads of sound ranks are independent; both arguments are (rank,).

    In each group one follows from the others. Where places were compared, one group of each stage
    does, too: of two replicas each is what the other is measured by.
    """
    degrees = 0
    for rows in rows_alike(stage):
        num_groups = len(np.unique(group[rows]))
        degrees += (len(rows) // num_groups - 1) * (num_groups - are_compared)
    return degrees


def _of_mates(beside_ns: Floats, first: int) -> _Spread:
    """Return by how much the mates of the `first` rank differ, who are believed to be sound: of
    three and more, their distances from each other; `beside_ns` is (mate,).
    """
    mates = np.delete(beside_ns, first)
    if len(mates) < ORDINARY.min_peers:
        return _Spread()
    degrees = len(mates) - 1
    return _Spread(float(((mates - mates.mean()) ** 2).sum()) / degrees, degrees)


def chance_of_all(p_values: Sequence[float]) -> float:
    """Return how probable it is that independent tests all say so by chance (Fisher, 1925)."""
    logs = np.log(np.maximum(p_values, np.finfo(float).tiny))
    return float(special.chdtrc(2 * len(logs), -2.0 * logs.sum()))


def _in_time(leads: Floats) -> _Spread:
    """Return by how much the level of leads, (rank, iteration), is off by noise in time: that of
    all ranks, of whom each knows half as much, since leads mirror each other.
    """
    num_ranks, num_iterations = leads.shape
    if num_iterations < 2:
        return _Spread(0.0, 1.0)
    noise = ROBUST.centre_loss_ratio * step_noise(leads)
    degrees = (num_iterations - 1) * num_ranks / 2
    return _Spread(float(np.nanmean(noise**2)) / num_iterations, degrees)


def longer_step(of: Suspicion, every: EachRank, effects: Floats) -> LongerStep | None:
    """Return which of the ranks that a slow row stands for has a longer optimizer step; None where
    none stands out, optimizers were not recorded, or other stages of its replica are slow alike.

    `every` rank is observed beside the rows; `effects` is the log slowdown of all rows, (row,).
    """
    members = of.seen.members
    if len(members.workers[of.row]) < 2 or stages_alike(members, effects, of.row):
        return None
    return _steps(of, every).longest(of.row, of.effect, DEVICE.optimizer_share)


def longer_host(of: Suspicion, every: EachRank) -> tuple[tuple[int, ...], float] | None:
    """Return all ranks of a host, if of those that a slow row stands for these alone have longer
    optimizer steps, and by how much (log); None where there is no such host.
    """
    if len(of.seen.members.workers[of.row]) < 2:
        return None
    return _steps(of, every).of_host(of.row, DEVICE.optimizer_share * of.effect)


def _steps(of: Suspicion, every: EachRank) -> Steps:
    """Return the optimizer steps of all ranks while a row that stands for several is slow."""
    row_of = {rank: row for row, ranks in enumerate(of.seen.members.workers) for rank in ranks}
    group = np.array([row_of[int(rank)] for rank in every.members.ranks], dtype=np.int64)
    return Steps(
        members=every.members,
        time_ns=every.optimizer_ns[:, of.active],
        lookups_ns=every.lookups_ns[:, of.active],
        group=group,
        slow=of.excluded[group],
    )
