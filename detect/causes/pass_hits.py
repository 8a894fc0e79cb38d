"""Count the passes in which somebody is slow (`slow_passes`).

Problem: a device that is throttled for 300 ms in every few seconds slows one pass in five, or all
passes of one iteration in ten. The level of an iteration hardly shows the first, and iterations are
too few to count for the second.

Idea: count passes. Each is compared with the same pass of its peers, and with its row's own quiet
level; a hit exceeds both by far more than sound passes vary. Consecutive hits are one event, since
whatever holds a rank up may last for any time. So many events must be improbable at the rate that
the other rows show. A device that is throttled has a second speed: where a row's hits are slow by
one and the same factor, and no other row's by as much, they are no noise, and each of them counts.
One stretch of them, be it in one iteration, is enough where no data can be the reason.

Where data vary, or a rank has no peer, a pass is compared with its *twin*, the other pass of its
microbatch (`twins`): data lengthen both, a device that comes and goes now this one and now that.

Example: 16 ranks, 10 iterations of 8 passes that vary by 0.4 %. All passes of rank 8 are 1.24 times
as long in iterations 7 and 8, and no other pass of anybody is longer by 3 %: one event, by chance
once in 30 times, but 16 hits of one speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.device import Slowness, is_isolated, mates_of
from detect.causes.hits import Burst, Tally, as_large, chance, half_width, heaviest_first, num_runs
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD
from detect.stats import robust
from detect.stats.residuals import pass_residuals, peer_groups, stage_groups
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import DEVICE, PAIRS
from detect.thresholds.observing import STARVATION
from megascan.arrays import Flags, Floats, Integers


@dataclass(frozen=True)
class _Passes:
    """All rows' passes in the order in which they run, (row, iteration, operation) or (row,)."""

    over: Floats
    """Log time over the peers' and the row's own quiet level; 0 where nothing was recorded."""
    hits: Flags
    phase: Integers
    microbatch: Integers
    own: Floats
    """Log time over what the row itself takes for the same operation in quiet iterations."""
    num_known: Integers
    forward_share: Floats
    """(row,): share of forward passes in the time of all; NaN where one kind was not recorded."""
    noise: Floats
    """(row,): sigma around the quiet level, log."""

    @classmethod
    def of(cls, seen: Observations, known: Flags) -> _Passes | None:
        """Compare all passes; None where some row has no peer."""
        groups = peer_groups(seen.work, seen.members)
        if min(len(rows) for rows in groups) < 2:
            return None
        order = np.argsort(seen.work.microbatch, kind="stable")
        phase = seen.work.phase[order]
        residual, _ = pass_residuals(seen.work, seen.members, groups, known)
        beside_peers = residual[:, :, order]
        level, sigma = _quiet_level(beside_peers, phase)
        over = np.nan_to_num(beside_peers - level[:, None, :])
        usual = robust.median(sigma[~known], axis=0)
        margin = np.maximum(BURSTS.margin_share, BURSTS.margin_sigmas * np.fmax(sigma, usual))
        log_ns = seen.work.log_ns[:, :, order]
        return cls(
            over=over,
            hits=_while_fed(seen, over > margin[:, None, :]),
            phase=phase,
            microbatch=microbatches_of(seen)[order],
            own=np.nan_to_num(over_quiet(log_ns, BURSTS.quiet_share)),
            num_known=np.isfinite(beside_peers).sum(axis=(1, 2)),
            forward_share=_forward_share(log_ns, phase),
            noise=sigma.max(axis=1),
        )

    @classmethod
    def beside_twins(cls, seen: Observations, known: Flags) -> _Passes | None:
        """Compare each pass with the other one of its microbatch, which the same data lengthen;
        None of a profile, in which these are not told apart.

        Neither peers nor even data are needed, and what a rank takes longer for good does not show,
        nor what it always does in a microbatch (the first of a step may load). Noise is that of the
        stage: whoever has more of it is what is looked for.
        """
        if not seen.tells_passes:
            return None
        order = np.argsort(seen.work.microbatch, kind="stable")
        phase, log_ns = seen.work.phase[order], seen.work.log_ns[:, :, order]
        twin = _twins(phase, seen.work.microbatch[order])
        apart = np.where(twin == np.arange(len(twin)), np.nan, log_ns - log_ns[:, :, twin])
        level, sigma = _quiet_level(apart, phase)
        over = np.nan_to_num(apart - level[:, None, :])
        usual = np.broadcast_to(robust.median(sigma[~known], axis=0), sigma.shape).copy()
        for rows in stage_groups(seen.members):
            of_stage = robust.median(sigma[rows[~known[rows]]], axis=0)
            usual[rows] = np.fmax(usual[rows], of_stage)
        hits = over > np.maximum(BURSTS.margin_share, BURSTS.margin_sigmas * usual)[:, None, :]
        hits &= ~_of_one_slot(hits)
        return cls(
            over=over,
            hits=_while_fed(seen, hits),
            phase=phase,
            microbatch=seen.work.microbatch[order],
            own=over,
            num_known=np.isfinite(apart).sum(axis=(1, 2)),
            forward_share=_forward_share(log_ns, phase),
            noise=sigma.max(axis=1),
        )

    def excess(self) -> Floats:
        """Return what the hits lose, as a share of the passes, (row, iteration)."""
        lost = np.where(self.hits, np.expm1(self.over), 0.0)
        kinds = [lost[:, :, self.phase == one] for one in (FORWARD, BACKWARD)]
        return np.asarray(np.mean([one.mean(axis=2) for one in kinds if one.shape[2]], axis=0))

    def may_burst(self, floor: float) -> Flags:
        """Flag the rows of which few passes are slow, by `floor` on the mean, (row,)."""
        sizes = np.where(self.hits, np.expm1(self.over), 0.0).sum(axis=(1, 2))
        is_large = sizes >= floor * self.hits.sum(axis=(1, 2))
        return np.asarray(is_large & ~(self.hits.mean(axis=(1, 2)) > BURSTS.max_pair_share))

    def tally(self, hits: Flags, row: int, others: Flags, *, by_pass: bool) -> Tally:
        """Count `hits`, (row, iteration, operation), pass by pass, or consecutive ones as one."""
        counts = hits.sum(axis=(1, 2)) if by_pass else np.array([num_runs(one) for one in hits])
        return Tally(
            num_hits=int(counts[row]),
            num_iterations=int(self.num_known[row]),
            other_hits=int(counts[others].sum()),
            num_others=int(self.num_known[others].sum()),
        )

    def counted(self, row: int, mates: Integers, *, stands_out: bool) -> Flags:
        """Return the hits of all rows that count when `row` is judged, (row, iteration, operation).

        Where the row and one of its `mates` have a hit in the same pass, either may wait for the
        other: neither hit counts, except that the row's does if it is twice as large, or the row
        `stands_out` from its mates, which then wait for it.
        """
        hits = self.hits.copy()
        together = hits[mates] & hits[row]
        larger = self.over[mates] >= PAIRS.agrees_share * self.over[row]
        if not stands_out:
            hits[row] &= ~(together & larger).any(axis=0)
        hits[mates] &= ~together
        return hits

    def rose(self, row: int) -> bool:
        """Return whether the row's own times rose in its hits: otherwise its peers' times fell."""
        hits = self.hits[row]
        change = float(np.median(self.own[row][hits]))
        return change >= PAIRS.agrees_share * float(np.median(self.over[row][hits]))

    def is_one_speed(self, row: int) -> bool:
        """Return whether the hits of a row are slow by one and the same factor, beside its peers or
        its own quiet times: the first hold the noise of few peers, the second that of its data.
        """
        sizes, own = (one[row][self.hits[row]] for one in (self.over, self.own))
        if len(sizes) < BURSTS.least_of_one_speed:
            return False
        widths = [half_width(one)[0] for one in (sizes, own, self._over_phases(row)) if len(one)]
        return min(widths) <= BURSTS.one_speed_share * float(np.median(sizes))

    def _is_one_factor(self, row: int) -> bool:
        """Return whether several hits of a row of either kind are slow by about the same factor: a
        pause lengthens a backward pass by a smaller one, for it takes longer.

        Example: passes of 10 and 21 ms, of which some take 28 and 59.
        """
        hits = [self.hits[row] & (self.phase == one) for one in (FORWARD, BACKWARD)]
        if min(int(one.sum()) for one in hits) < BURSTS.least_of_one_speed:
            return False
        forward, backward = (float(np.median(self.over[row][one])) for one in hits)
        return abs(forward - backward) <= BURSTS.one_speed_share * max(forward, backward)

    def _over_phases(self, row: int) -> Floats:
        """Return the sizes of a row's hits less what is typical of their phase, (hit,): kernels of
        forward and of backward passes need not depend on the clock alike. Empty where a phase has
        few hits.

        Example: forward passes take 1.37 times as long, backward passes 1.31 times.
        """
        hits = [self.hits[row] & (self.phase == one) for one in (FORWARD, BACKWARD)]
        if min(int(one.sum()) for one in hits) < BURSTS.least_of_one_speed:
            return np.zeros(0)
        sizes = [self.over[row][one] for one in hits]
        return np.concatenate([one - np.median(one) for one in sizes])

    def has_few_lengths(self, row: int) -> bool:
        """Return whether the hits of a row that are of one speed are of few microbatches, and of
        all of their passes.
        """
        hits, size = self.hits[row], self.over[row]
        typical = float(np.median(size[hits])) if hits.any() else 0.0
        near = hits & (np.abs(size - typical) <= BURSTS.one_speed_share * typical)
        num_slow = sum(np.unique(self.microbatch[one]).size for one in near)
        splits = _split(near, size, self.phase, self.microbatch).any()
        return num_slow < BURSTS.least_of_one_speed and not splits

    def are_enough(self, seen: Observations, row: int, hits: Flags, *, is_one_speed: bool) -> bool:
        """Return whether the `hits` of a row, (iteration, operation), are too many for an accident:
        of two iterations, apart from each other or of one speed.

        A single stretch of one speed, be it in one iteration, is enough where no data are the
        reason, and passes of both kinds are slow. What goes on at the end is a level's to tell.

        Example: the last five passes but one of four iterations take 1.7 times as long.
        """
        by_iteration: Flags = np.asarray(hits.any(axis=1))
        is_told = is_one_speed and not is_level(by_iteration)
        is_no_data = seen.rules_data_out or self.splits_microbatches(row)
        if is_told and is_no_data and are_of_both_kinds(self.hits[row], self.phase):
            return bool(by_iteration.any())
        num_iterations = int(by_iteration.sum())
        num_events = num_iterations if is_told else num_runs(hits)
        return min(num_events, num_iterations) >= BURSTS.min_hits

    def are_stops(self, row: int) -> bool:
        """Return whether the slow passes of a row are single ones that take twice as long and more,
        the next one being as quick as ever: no device slows so, whoever runs it stands still. What
        lengthens forward and backward passes by one factor is a device, whatever ran between them.

        Example: forwards of 12 ms, of which one in twenty takes 70 to 95.
        """
        hits = self.hits[row]
        is_single = num_runs(hits) >= BURSTS.single_share * int(hits.sum())
        if self.is_one_speed(row) and self._is_one_factor(row):
            return False
        return is_single and float(np.median(self.over[row][hits])) >= np.log(BURSTS.stop_ratio)

    def is_of_one_kind(self, seen: Observations, row: int) -> bool:
        """Return whether all hits of a row are forward passes, or backward ones, by more than
        chance: a device slows both, and what a program does in one of them does not. Not on a
        stage whose other ranks all may wait for it.

        Example: six of six in forward passes, which take a third of the time: once in 730 times.
        """
        stage, num_mates = seen.members.stage, len(mates_of(seen.members, row))
        if int((stage == stage[row]).sum()) <= 1 + num_mates:
            return False
        hits, share = self.hits[row], float(self.forward_share[row])
        is_forward = bool(hits[:, self.phase == FORWARD].any())
        if is_forward == bool(hits[:, self.phase == BACKWARD].any()):
            return False
        return bool((share if is_forward else 1.0 - share) ** num_runs(hits) < BURSTS.one_kind_p)

    def splits_microbatches(self, row: int) -> bool:
        """Return whether of microbatches with slow passes of a row others are as quick as ever."""
        return split_microbatches(self.hits[row], self.over[row], self.phase, self.microbatch)

    def is_of_others(self, row: int, hits: Flags, others: Flags) -> bool:
        """Return whether some other row has `hits` about as large, and a good part of as many, in
        all or in one iteration: then any row may have them. A few single ones every job has.

        Examples: 56 hits of one speed, and a single pass of another rank that takes as long: not of
        others. All passes of two iterations, and all of one on another rank: of others.
        """
        alike = as_large(hits, self.over, row)[others].sum(axis=2)
        own = hits[row].sum(axis=1)
        if not own.any():
            return False
        is_often = alike.sum(axis=1).max(initial=0) > BURSTS.others_share * own.sum()
        most_at_once = alike.max(initial=0)
        at_once = most_at_once > max(1, BURSTS.others_share * float(np.median(own[own > 0])))
        return bool(is_often or at_once)

    def is_noise(self, row: int, hits: Flags, others: Flags, stage: Integers) -> bool:
        """Return whether the others, or those of them on its stage, have `hits` in nearly as many
        iterations as the row: then the slow passes may be noise.

        Two rows may have single hits in as many iterations, though one of them in fewer runs.
        """
        often = as_large(hits, self.over, row).any(axis=2).mean(axis=1)
        peers = others & (stage == stage[row])
        usual = [float(often[rows].mean()) for rows in (others, peers) if rows.any()]
        return max(usual, default=0.0) >= BURSTS.others_share * float(often[row])

    def is_noisy(self, row: int) -> bool:
        """Return whether the hits of a row are no larger than its own noise may make them.

        Example: twins that differ by a sigma of 10 % in all microbatches, and by 20 % in a third.
        """
        size = float(np.median(self.over[row][self.hits[row]]))
        return size < BURSTS.margin_sigmas * float(self.noise[row])

    def stands_out(self, seen: Observations, row: int) -> bool:
        """Return whether the row is slower in its hits than all other rows of its TP group."""
        by_phase = [
            robust.median(self.over[:, self.hits[row] & (self.phase == one)], axis=1)
            for one in (FORWARD, BACKWARD)
        ]
        return _is_isolated_by(seen, np.stack(by_phase), row)


def _of_one_slot(hits: Flags) -> Flags:
    """Flag those of `hits`, (row, iteration, operation), in slots of the schedule which have most
    of their row's: in nearly every iteration, or in more than chance explains by its other slots. A
    device that comes and goes chooses no slot; what a program does in one, or the time that it
    always takes there besides its data, makes it differ from its twin.

    Example: in 18 of 22 iterations the first forward pass of a step differs from its backward pass,
    and none of the eleven other passes.
    """
    num_iterations, num_slots = hits.shape[1:]
    counts = hits.sum(axis=1)
    usual = counts > BURSTS.max_hit_share * num_iterations
    for row, slot in np.argwhere(2 * counts > counts.sum(axis=1, keepdims=True)).tolist():
        elsewhere = int(counts[row].sum() - counts[row, slot])
        by_chance = chance(
            int(counts[row, slot]), num_iterations, elsewhere, num_iterations * (num_slots - 1)
        )
        usual[row, slot] |= num_slots * by_chance <= BURSTS.one_slot_p
    are_most = 2 * (counts * usual).sum(axis=1) > counts.sum(axis=1)
    return np.asarray(hits & (usual & are_most[:, None])[:, None, :])


def are_of_both_kinds(hits: Flags, phase: Integers) -> bool:
    """Return whether forward and backward passes are among hits, (iteration, operation)."""
    return all(bool(hits[:, phase == one].any()) for one in (FORWARD, BACKWARD))


def is_level(hits: Flags) -> bool:
    """Return whether hits, (iteration,), go on at the end and began so long before it that this is
    a level's to tell.
    """
    return bool(hits[-1] and hits[: -BURSTS.max_late].any())


def _while_fed(seen: Observations, hits: Flags) -> Flags:
    """Return the hits, (row, iteration, operation), of devices that do not wait for their hosts."""
    if seen.starved_share is None:
        return hits
    return hits & ~(seen.starved_share > STARVATION.fed_share)[:, :, None]


def _twins(phase: Integers, microbatch: Integers) -> Integers:
    """Return where the other pass of each operation's microbatch and chunk stands, (operation,);
    itself where there is none.
    """
    twin = np.arange(len(phase))
    for one in np.unique(microbatch):
        places = [np.flatnonzero((microbatch == one) & (phase == it)) for it in (FORWARD, BACKWARD)]
        num = min(map(len, places))
        forward, backward = (at[:num] for at in places)
        twin[forward], twin[backward] = backward, forward
    return twin


def _forward_share(log_ns: Floats, phase: Integers) -> Floats:
    """Return the share of forward passes in the time of all, (row,); NaN where it is not known."""
    kinds = [np.exp(log_ns[:, :, phase == one]) for one in (FORWARD, BACKWARD)]
    forward, backward = (robust.mean(one.reshape(len(one), -1), axis=1) for one in kinds)
    return np.asarray(forward / (forward + backward))


def split_microbatches(hits: Flags, size: Floats, phase: Integers, microbatch: Integers) -> bool:
    """Return whether beside a good part of a row's slow passes, `hits` (iteration, operation),
    others of their microbatches are as quick as ever: longer data would lengthen forward and
    backward passes.

    Example: 44 slow passes, 17 of them backward passes of microbatches whose forward passes ran
    before the device slowed down, or the other way round.
    """
    num_split = int(_split(hits, size, phase, microbatch).sum())
    is_enough = num_split >= BURSTS.least_of_one_speed
    return is_enough and num_split >= BURSTS.split_share * float(hits.sum())


def _split(hits: Flags, size: Floats, phase: Integers, microbatch: Integers) -> Flags:
    """Flag those slow passes of a row, `hits` (iteration, operation), whose microbatch is as quick
    as ever in its other passes.
    """
    pairs = (microbatch == microbatch[:, None]) & (phase != phase[:, None])
    quick = (size[:, None, :] < DEVICE.quick_part_share * size[:, :, None]) | ~pairs
    return np.asarray(hits & pairs.any(axis=1) & quick.all(axis=2))


def _quiet_level(beside_peers: Floats, phase: Integers) -> tuple[Floats, Floats]:
    """Return each row's level in quiet times, and the noise around it, both (row, operation), and
    the same for all operations of a phase.
    """
    level, sigma = np.zeros((2, len(beside_peers), len(phase)))
    for one in (FORWARD, BACKWARD):
        operations = np.flatnonzero(phase == one)
        for row, of_row in enumerate(beside_peers):
            width, level[row, operations] = half_width(of_row[:, operations])
            sigma[row, operations] = width / 2 / BURSTS.half_sigmas
    return level, sigma


def microbatches_of(seen: Observations) -> Integers:
    """Return which microbatch each operation belongs to, (operation,); of a profile, in which these
    are not told apart, its place among the parts of its phase: longer data of one of several
    microbatches lengthen the parts at one place of both phases, and of a single one all parts.
    """
    work = seen.work
    if seen.tells_passes:
        return work.microbatch
    place = np.zeros_like(work.microbatch)
    for one in (FORWARD, BACKWARD):
        of_phase = work.phase == one
        place[of_phase] = np.arange(int(of_phase.sum()))
    return place


def over_quiet(log_ns: Floats, share: float) -> Floats:
    """Return what `log_ns`, (row, iteration, operation), exceeds its row's quiet iterations by: the
    level that a `share` of them keep below.
    """
    quiet = int(share * (log_ns.shape[1] - 1))
    return np.asarray(log_ns - np.sort(log_ns, axis=1)[:, quiet : quiet + 1])


def slow_passes(
    seen: Observations, known: Flags, rate: float, floor: float, *, twins: bool = False
) -> list[Burst]:
    """Return the bursts of rows of which single passes are slow, the heaviest first.

    `known` rows are named and nobody's peers; `rate` is the false-discovery rate; hits must be
    slower by `floor` on the mean. Where all hits have one speed, a single stretch is enough if it
    reaches over two iterations and is over before the last one. `twins` show each other, not peers.
    """
    compare, least = (_Passes.beside_twins, 2) if twins else (_Passes.of, BURSTS.min_rows)
    passes = compare(seen, known) if int((~known).sum()) >= least else None
    if passes is None:
        return []
    excess, num_rows, stage = passes.excess(), len(known), seen.members.stage
    share = excess.mean(axis=1)
    candidates = ~known & passes.may_burst(floor) & (share >= BURSTS.least_share)
    left, found = ~known, list[Burst]()
    for row in heaviest_first(share, candidates):
        others = left & (np.arange(num_rows) != row)
        mates, stands_out = mates_of(seen.members, row), passes.stands_out(seen, row)
        hits = as_large(passes.counted(row, mates, stands_out=stands_out), passes.over, row)
        by_iteration: Flags = np.asarray(hits.any(axis=2))
        is_one_speed = passes.is_one_speed(row) and not passes.is_of_others(row, hits, others)
        if not passes.are_enough(seen, row, hits[row], is_one_speed=is_one_speed):
            continue
        tally = passes.tally(hits, row, others, by_pass=is_one_speed)
        q_value = tally.by_chance * num_rows / (len(found) + 1)
        if q_value > rate or not tally.is_alone or not passes.rose(row):
            continue
        left = others
        found.append(
            Burst(
                row=row,
                hits=by_iteration[row],
                excess=excess[row],
                q_value=min(1.0, q_value),
                others=others,
                other_hits=int(by_iteration[others].sum()),
                is_one_speed=is_one_speed,
                stands_out=stands_out,
                is_noise=not is_one_speed and passes.is_noise(row, hits, others, stage),
                is_noisy=passes.is_noisy(row),
                is_stops=passes.are_stops(row),
                is_one_kind=passes.is_of_one_kind(seen, row),
                splits_microbatches=passes.splits_microbatches(row),
                has_few_lengths=passes.has_few_lengths(row),
                size=float(np.exp(np.median(passes.over[row][passes.hits[row]]))),
            )
        )
    return found


def stops_in_passes(seen: Observations, row: int) -> bool:
    """Return whether the slow passes of a row are single ones in which it stands still."""
    passes = _Passes.of(seen, np.zeros(len(seen.members), dtype=bool))
    return passes is not None and passes.hits[row].any() and passes.are_stops(row)


def stands_out_then(seen: Observations, known: Flags, burst: Burst) -> bool:
    """Return whether the row of a burst is slower in its slow passes, or in its iterations, beside
    its others, than all other rows of its TP group; `known` rows are nobody's peers.

    Example: forward and backward passes take 1.23 times as long, those of its mate 1.00 and 1.23
    times, which waits in the second.
    """
    if not len(mates_of(seen.members, burst.row)):
        return False
    passes = _Passes.of(seen, known)
    if passes is not None and passes.stands_out(seen, burst.row):
        return True
    if burst.hits.all():
        return False
    over, _ = pass_residuals(seen.work, seen.members, peer_groups(seen.work, seen.members), known)
    change = robust.median(over[:, burst.hits], axis=1) - robust.median(
        over[:, ~burst.hits], axis=1
    )
    phases = (change[:, seen.work.phase == one] for one in (FORWARD, BACKWARD))
    return _is_isolated_by(
        seen, np.stack([robust.median(one, axis=1) for one in phases]), burst.row
    )


def _is_isolated_by(seen: Observations, by_phase: Floats, row: int) -> bool:
    """Return whether a row stands out from its mates by how slow rows are, (phase, row), log."""
    slow = np.zeros(by_phase.shape[1], dtype=bool)
    passes = Slowness(effects=robust.mean(by_phase, axis=0), slow=slow, by_phase=by_phase)
    return is_isolated(seen.members, passes, row)
