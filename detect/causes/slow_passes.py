"""Find ranks of which single passes are slow by far: a device that is throttled now and then.

Problem: a device that is throttled for 300 ms in every few seconds slows one pass in five, or all
passes of one iteration in ten. The level of an iteration hardly shows the first, and iterations are
too few to count for the second.

Idea: count passes. Each is compared with the same pass of its peers, and with its row's own quiet
level; a hit exceeds both by far more than sound passes vary. Hits side by side are one event, for
whatever held the rank up lasts as long as it likes. So many events must be improbable at the rate
that the other rows show. A device that is throttled has a second speed: where hits are slow by one
and the same factor, and nobody else's by as much, they are no noise, and each of them counts.

Example: 16 ranks, 10 iterations of 8 passes that vary by 0.4 %. All passes of rank 8 are 1.24 times
as long in iterations 7 and 8, and no other pass of anybody is longer by 3 %: one event, by chance
once in 30 times, but 16 hits of one speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.causes.device import Slowness, is_isolated, mates_of
from detect.causes.hits import Burst, chance, half_width, num_runs
from detect.observe.observations import BACKWARD, FORWARD, Observations
from detect.stats import robust
from detect.stats.residuals import pass_residuals, peer_groups
from detect.thresholds import BURSTS, PAIRS, STARVATION
from megascan.arrays import Flags, Floats, Integers


@dataclass(frozen=True)
class _Passes:
    """All rows' passes in the order in which they run, (row, iteration, operation) or (row,)."""

    over: Floats
    """Log time over the peers' and the row's own quiet level; 0 where nothing was recorded."""
    hits: Flags
    phase: Integers
    own: Floats
    """Log time over what the row itself takes for the same operation in quiet iterations."""
    num_known: Integers

    @classmethod
    def of(cls, seen: Observations, known: Flags) -> _Passes | None:
        """Compare all passes; None where some row has no peer."""
        groups = peer_groups(seen.work, seen.members)
        if min(len(rows) for rows in groups) < 2 or not (~known).any():
            return None
        order = np.argsort(seen.work.microbatch, kind="stable")
        phase = seen.work.phase[order]
        residual, _ = pass_residuals(seen.work, seen.members, groups, known)
        over, sigma = residual[:, :, order], np.zeros((len(known), len(phase)))
        for one in (FORWARD, BACKWARD):
            ops = np.flatnonzero(phase == one)
            for row in range(len(over)):
                width, level = half_width(over[row][:, ops])
                over[row][:, ops] -= level
                sigma[row, ops] = width / 2 / BURSTS.half_sigmas
        usual = robust.median(sigma[~known], axis=0)
        margin = np.maximum(BURSTS.margin_share, BURSTS.margin_sigmas * np.fmax(sigma, usual))
        num_known = np.isfinite(over).sum(axis=(1, 2))
        over = np.nan_to_num(over)
        hits = over > margin[:, None, :]
        if seen.starved_share is not None:
            hits &= ~(seen.starved_share > STARVATION.fed_share)[:, :, None]
        log_ns = seen.work.log_ns[:, :, order]
        low = int(BURSTS.quiet_share * (log_ns.shape[1] - 1))
        own = log_ns - np.sort(log_ns, axis=1)[:, low : low + 1]
        return cls(over, hits, phase, np.nan_to_num(own), num_known)

    def excess(self) -> Floats:
        """Return what the hits lose, as a share of the passes, (row, iteration)."""
        lost = np.where(self.hits, np.expm1(self.over), 0.0)
        kinds = [lost[:, :, self.phase == one] for one in (FORWARD, BACKWARD)]
        return np.asarray(np.mean([one.mean(axis=2) for one in kinds if one.shape[2]], axis=0))

    def counted(self, row: int, mates: Integers) -> Flags:
        """Return the hits of all rows that tell of this row, (row, iteration, operation).

        Where it and one of its `mates` have a hit in the same pass, either may wait for the other:
        neither counts, unless this row's is twice as large.
        """
        hits = self.hits.copy()
        together = hits[mates] & hits[row]
        larger = self.over[mates] >= PAIRS.agrees_share * self.over[row]
        hits[row] &= ~(together & larger).any(axis=0)
        hits[mates] &= ~together
        return hits

    def rose(self, row: int) -> bool:
        """Return whether the row's own times rose in its hits: else it is its peers' that fell."""
        hits = self.hits[row]
        change = float(np.median(self.own[row][hits]))
        return change >= PAIRS.agrees_share * float(np.median(self.over[row][hits]))

    def is_one_speed(self, row: int) -> bool:
        """Return whether the hits of a row are slow by one and the same factor."""
        sizes = self.over[row][self.hits[row]]
        if len(sizes) < BURSTS.least_of_one_speed:
            return False
        return half_width(sizes)[0] <= BURSTS.one_speed_share * float(np.median(sizes))

    def is_of_others(self, row: int, others: Flags) -> bool:
        """Return whether other rows have hits about as large: then such events come to anybody."""
        size = PAIRS.agrees_share * float(np.median(self.over[row][self.hits[row]]))
        return bool((self.hits[others] & (self.over[others] >= size)).any())

    def stands_out(self, seen: Observations, row: int) -> bool:
        """Return whether the row is slower in its hits than all of its TP group."""
        by_phase = np.stack(
            [
                robust.median(self.over[:, self.hits[row] & (self.phase == one)], axis=1)
                for one in (FORWARD, BACKWARD)
            ]
        )
        slow = np.zeros(len(self.over), dtype=bool)
        passes = Slowness(effects=robust.mean(by_phase, axis=0), slow=slow, by_phase=by_phase)
        return is_isolated(seen.members, passes, row)


def slow_passes(seen: Observations, known: Flags, rate: float, floor: float) -> list[Burst]:
    """Return rows of which single passes are slow, the heaviest first.

    `known` rows have been named already and are nobody's peers; `rate` is the false-discovery rate;
    hits must be slower by `floor` on the mean.
    """
    passes = _Passes.of(seen, known)
    if passes is None or int((~known).sum()) < BURSTS.min_rows:
        return []
    excess, num_rows = passes.excess(), len(known)
    share = excess.mean(axis=1)
    sizes = np.where(passes.hits, np.expm1(passes.over), 0.0).sum(axis=(1, 2))
    is_large = sizes >= floor * passes.hits.sum(axis=(1, 2))
    often = passes.hits.mean(axis=(1, 2)) > BURSTS.max_pair_share
    candidates = np.flatnonzero(~known & ~often & (share >= BURSTS.least_share) & is_large)
    left, found = ~known, list[Burst]()
    for row in candidates[np.argsort(-share[candidates], kind="stable")].tolist():
        hits = passes.counted(row, mates_of(seen.members, row))
        others = left & (np.arange(num_rows) != row)
        is_one_speed = passes.is_one_speed(row) and not passes.is_of_others(row, others)
        count = hits.sum(axis=(1, 2)) if is_one_speed else np.array([num_runs(one) for one in hits])
        num_own, num_others = int(passes.num_known[row]), int(passes.num_known[others].sum())
        own, theirs = int(count[row]), int(count[others].sum())
        q_value = chance(own, num_own, theirs, num_others) * num_rows / (len(found) + 1)
        alone = theirs * num_own <= BURSTS.others_share * own * num_others
        num_events = min(num_runs(hits[row]), int(hits[row].any(axis=1).sum()))
        if num_events < BURSTS.min_hits or q_value > rate or not alone or not passes.rose(row):
            continue
        left = others
        of_row = hits[row].any(axis=1)
        found.append(
            Burst(
                row=row, hits=of_row, excess=excess[row], q_value=min(1.0, q_value),
                others=others, other_hits=int(hits[others].any(axis=2).sum()),
                is_one_speed=is_one_speed, stands_out=passes.stands_out(seen, row),
            )
        )  # fmt: skip
    return found
