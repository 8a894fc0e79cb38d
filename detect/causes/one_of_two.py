"""Which of two rows loses time now and then, where neither has another peer.

Two rows do not show the rate of sound rows (`detect.causes.hits`), since each is the other's only
peer. But two sound rows exceed each other equally often, so hits that all go one way are tested
like tosses of a coin, p = P(Binomial(hits of both, 1/2) >= hits). The slow row is the one whose own
passes are longer in the hits than in its other iterations; for pauses it is the row for which the
other waits.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from detect.causes.hits import Burst, chance, half_width, lost_share, num_runs
from detect.causes.pass_hits import are_of_both_kinds, is_level, over_quiet, split_microbatches
from detect.observe.observations import Observations
from detect.report import Cause
from detect.stats import robust
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.devices import PAIRS
from detect.thresholds.observing import OCCUPANCY
from megascan.arrays import Flags, Floats, Integers


def pair_burst(
    log_ns: Floats,
    rate: float,
    places: tuple[Integers, Integers] | None = None,
    *,
    is_no_data: bool = False,
) -> Burst | None:
    """Return the row of two that is slow now and then, None where that is not shown.

    `log_ns` (2, iteration, operation) are the rows' own times, operations in the order in which
    they run; `places` are the phase and the microbatch of each, where these are known. Slow passes
    in a row are one burst. Example: 17 bursts of row 0, none of row 1: p = 2^-16. Three bursts may
    be chance: the row is then returned as not sure. One burst of one speed is enough where it
    `is_no_data` that lengthen passes of both kinds.
    """
    over, (gap, longer) = _two_apart(log_ns, is_no_data=is_no_data)
    most = 1.0 - BURSTS.quiet_share if is_no_data else BURSTS.max_pair_share
    num_bursts = [num_runs(one) for one in longer]
    row = int(num_bursts[1] > num_bursts[0])
    slow, num_own = longer[row], num_bursts[row]
    if not num_own or slow.mean() > most:
        return None
    size = float(np.median(gap[slow]))
    if not _only_one_rose(over, row, slow, PAIRS.agrees_share * size):
        return None
    others_slow = longer[1 - row] & (gap >= PAIRS.agrees_share * size)
    is_one_speed = half_width(gap[slow])[0] <= BURSTS.one_speed_share * size
    is_both = places is not None and are_of_both_kinds(slow, places[0])
    is_one = is_no_data and is_both and is_one_speed and _is_one_stretch(slow, others_slow)
    if num_own < BURSTS.min_hits and not is_one:
        return None
    q_value = _chance_of_two(slow, others_slow, by_speed=is_one_speed, by_pass=is_one)
    excess = np.where(slow, np.expm1(gap), 0.0).mean(axis=1)
    is_sure = q_value <= rate
    is_alone = num_own >= BURSTS.min_pair and not others_slow.any()
    if not (is_sure or is_alone) or excess.mean() < BURSTS.least_share:
        return None
    return Burst(
        row=row,
        hits=slow.any(axis=1),
        excess=excess,
        q_value=min(1.0, q_value),
        others=np.arange(2) != row,
        other_hits=int(others_slow.any(axis=1).sum()),
        is_sure=is_sure,
        is_one_speed=is_one_speed,
        splits_microbatches=places is not None
        and split_microbatches(slow, np.where(longer[1 - row], 0.0, gap), *places),
    )


def pair_pause(seen: Observations, rate: float) -> Burst | None:
    """Return the row of two that stands still now and then while the other waits for it; None where
    that is not shown.

    Example: of two TP mates one stands still for 14 to 70 ms inside its passes in 26 of 58
    iterations, the other in none, and waits for as long in each: p = 2^-25.
    """
    value = lost_share(seen, (Cause.GC, Cause.HOST))
    gap, longer = _apart(value[0] - value[1])
    row = int(longer[1].sum() > longer[0].sum())
    pauses = longer[row]
    hits = _waits_as_long(seen, 1 - row, np.where(pauses, gap, 0.0))
    num_hits, other_hits = int(hits.sum()), int(longer[1 - row].sum())
    if num_hits < BURSTS.min_pair or hits.mean() > BURSTS.max_hit_share:
        return None
    excess = np.where(hits, gap, 0.0)
    is_awaited = num_hits >= OCCUPANCY.mostly_share * pauses.sum()
    if not is_awaited or excess.mean() < BURSTS.least_share:
        return None
    q_value = _chance_of_one_way(num_hits, other_hits)
    is_sure = q_value <= rate
    if not is_sure and other_hits:
        return None
    return Burst(
        row=row,
        hits=hits,
        excess=excess,
        q_value=min(1.0, q_value),
        others=np.arange(2) != row,
        other_hits=other_hits,
        is_sure=is_sure,
    )


def _apart(difference: Floats) -> tuple[Floats, Flags]:
    """Return how far two rows are apart beyond their `difference` in quiet times, and where the
    first takes longer, and where the second, by more than noise, stacked.
    """
    over, sigma = _off_quiet(difference)
    margin = max(BURSTS.margin_share, BURSTS.margin_sigmas * sigma)
    return np.abs(over), np.stack([over > margin, over < -margin])


def _two_apart(log_ns: Floats, *, is_no_data: bool) -> tuple[Floats, tuple[Floats, Flags]]:
    """Return by how much each of two rows exceeds its own quiet times, (2, iteration, operation),
    and the same as `_apart`.

    Where it `is_no_data` that lengthen passes, the quiet times are those of each row: three
    quarters may be slow. Example: passes of one row take 1.44 times as long in 16 of 24, those of
    the other do not vary.
    """
    if not is_no_data:
        return np.stack([_off_quiet(one)[0] for one in log_ns]), _apart(log_ns[0] - log_ns[1])
    over = np.nan_to_num(over_quiet(log_ns, BURSTS.quiet_share))
    difference = over[0] - over[1]
    sigma = min(half_width(one)[0] for one in over) / 2 / BURSTS.half_sigmas
    margin = max(BURSTS.margin_share, BURSTS.margin_sigmas * sigma)
    longer = np.stack([difference > margin, difference < -margin])
    return over, (np.abs(difference), longer)


def _chance_of_one_way(num_hits: int, other_hits: int) -> float:
    """Return the probability that two rows' hits are of one row by so much, whichever it is."""
    return 2 * float(special.bdtrc(num_hits - 1, num_hits + other_hits, 0.5))


def _is_one_stretch(slow: Flags, others_slow: Flags) -> bool:
    """Return whether one of two rows has several slow passes, (iteration, operation), and the other
    none, and they do not go on for so long that a level tells of them.
    """
    is_several = int(slow.sum()) >= BURSTS.least_of_one_speed
    by_iteration: Flags = np.asarray(slow.any(axis=1))
    return is_several and not others_slow.any() and not is_level(by_iteration)


def _chance_of_two(slow: Flags, others_slow: Flags, *, by_speed: bool, by_pass: bool) -> float:
    """Return the probability that slow passes, (iteration, operation), are so much more often one
    row's than the other's: by tosses of a coin; or where all have one speed, by iterations or
    bursts, for noise, of which one row may have more, does not keep to one speed; or pass by pass.
    """
    num_own, num_other = num_runs(slow), num_runs(others_slow)
    q_value = _chance_of_one_way(num_own, num_other)
    if by_speed:
        hits, other_hits = (int(one.any(axis=1).sum()) for one in (slow, others_slow))
        by_iteration = chance(hits, len(slow), other_hits, len(slow))
        by_burst = chance(num_own, slow.size, num_other, slow.size)
        q_value = min(q_value, 2 * by_iteration, 2 * by_burst)
    if by_pass:
        q_value = min(q_value, chance(int(slow.sum()), slow.size, 0, slow.size))
    return q_value


def _only_one_rose(over: Floats, row: int, slow: Flags, least: float) -> bool:
    """Return whether the own times of one row of two rise by more than `least` where it is slow,
    (iteration, operation), and those of the other do not; `over` is (2, iteration, operation).
    """
    own, other = (float(robust.median(over[one][slow])) for one in (row, 1 - row))
    return own > least > abs(other)


def _waits_as_long(seen: Observations, row: int, excess: Floats) -> Flags:
    """Flag the iterations in which `row` waits longer than in quiet ones, by half of what the other
    row loses in them or more.

    `excess`, (iteration,), is what the other row loses, as a share of the step. No iteration is
    flagged where waiting is not known.
    """
    waiting_ns = seen.waiting_ns if seen.waiting_ns is not None else seen.split_wait_ns
    if waiting_ns is None:
        return np.zeros(len(excess), dtype=bool)
    waits = np.nan_to_num(waiting_ns[row]) / float(np.median(seen.iteration_ns))
    longer = waits - np.quantile(waits, BURSTS.quiet_share)
    return np.asarray((excess > 0.0) & (longer >= LOSSES.awaited_share * excess))


def _off_quiet(value: Floats) -> tuple[Floats, float]:
    """Return `value`, (iteration, operation) or (iteration,), less each operation's level in quiet
    times, and the noise of these differences.

    The quiet half of the values is the densest: up to half of them may lie in bursts of one kind.
    """
    over = value - robust.median(value, axis=0)
    width, level = half_width(over)
    return np.nan_to_num(over - level), width / 2 / BURSTS.half_sigmas
