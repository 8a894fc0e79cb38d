"""Whether longer data, or tokens for experts, may be why a rank is slow now and then.

Problem: a replica that gets longer sequences in some iterations computes longer in these, as a
device does that is throttled. Nobody else shows it, so the noise of the job does not tell.

Idea: ask what else longer data would lengthen, and what a slow device would not.

    the same data      TP mates, or else the other stages of the replica, get the same microbatches:
                       where they are as quick as ever, it is no data
    lookups            embedding and loss grow with the tokens as products of matrices do; a lower
                       clock lengthens them by a quarter of that
    one speed          a device has two speeds; sequences have any length, but both passes of one
                       are slow alike, so several microbatches must be
    the optimizer      no data lengthen its step
    cut passes         a device slows down inside a pass, or between the two of a microbatch; data
                       are those of all of it

Who passes none of them may have longer data, whether the microbatches of other ranks vary or not.

Example: in 14 of 24 iterations the passes of one of four replicas take 1.02 to 1.15 times as long,
its products of matrices 1.19 times, its embedding 1.20 and its loss 1.19 times: longer data. Beside
a lower clock that makes products 1.30 times as long, lookups take 1.07 times.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detect.causes.device import (
    Suspicion,
    attention_residuals,
    lookups_follow,
    mates_of,
    optimizer_residuals,
    spares_lookups,
)
from detect.causes.hits import Burst
from detect.causes.searches import averaged
from detect.observe.observations import Observations
from detect.stats import robust
from detect.stats.residuals import (
    Residuals,
    compare_within,
    data_of,
    deviations,
    peer_groups,
    stage_groups,
)
from detect.thresholds.bursts import BURSTS
from detect.thresholds.devices import PAIRS
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import Flags, Floats


def compute_excess(seen: Observations, known: Flags) -> Floats:
    """Return the mean of each row's passes over that of its peers, less 1, (row, iteration).

    A row that is `known` to be slow is nobody's peer. NaN where some row has no peer.
    """
    compared = _compared(seen, known)
    if compared is None:
        return np.full((len(seen.members), len(seen.iterations)), np.nan)
    return np.asarray(np.expm1(compared.value))


def _compared(seen: Observations, known: Flags) -> Residuals | None:
    groups = peer_groups(seen.work, seen.members)
    if min(len(rows) for rows in groups) < 2:
        return None
    return compare_within(averaged(seen.work, groups, known), seen.members, groups, known)


def may_be_longer_data(seen: Observations, burst: Burst) -> bool:
    """Return whether longer data may be why the row of a burst computes slowly in its hits."""
    of = _suspicion(seen, burst)
    if burst.cuts_passes or burst.splits_microbatches or seen.rules_data_out:
        return False
    if spares_lookups(of) or _others_spare_the_data(seen, burst) or _slows_its_step(seen, burst):
        return False
    if are_uneven(seen) or varies(seen, burst):
        return True
    shares_data = int((seen.members.replica == seen.members.replica[burst.row]).sum()) > 1
    if burst.in_modules and shares_data:
        return False  # modules of all that share them would be slow, and those of others are not
    return not burst.is_one_speed or burst.has_few_lengths or lookups_follow(of)


def may_be_its_experts(seen: Observations, burst: Burst) -> bool:
    """Return whether the row's experts may get more tokens in its bursts: nothing that no router
    lengthens is slow as well. Both passes of a microbatch go to the same experts; but whoever waits
    unseen for another rank of its stage that is slow, and shares its experts, does so now in this
    pass and now in that.
    """
    stage = seen.members.stage
    known = ~burst.others & (stage == stage[burst.row])
    known[burst.row] = False
    may_wait = "ep" in seen.hidden_axes and bool(known.any())
    is_cut = burst.splits_microbatches and not may_wait
    if seen.members.layout.ep < 2 or burst.cuts_passes or is_cut:
        return False
    return not spares_lookups(_suspicion(seen, burst)) and not _shows_in_attention(seen, burst)


def are_uneven(seen: Observations) -> bool:
    """Return whether data lengthen passes of all ranks of a replica together."""
    return bool(data_of(seen.work, seen.members, stage_groups(seen.members)).used)


def varies(seen: Observations, burst: Burst) -> bool:
    """Return whether the same microbatch slot differs between the other rows as uneven data do."""
    spread = robust.spread(deviations(seen.work, stage_groups(seen.members), ~burst.others))
    return float(spread) >= IMBALANCE.min_sequence_spread_log


def with_twins(seen: Observations, found: list[Burst], twins: list[Burst]) -> list[Burst]:
    """Return the bursts, those marked of whose microbatches one pass alone is slow, and after them
    the ones that only `twins`, the two passes of a microbatch, tell.

    Where several ranks have such passes these are rather their machines' noise, and a rank that is
    noisy all the while must be longer than its peers on the mean. Whoever stands still in single
    passes, or is slow in those of one kind alone, is no slow device.
    """
    split = {one.row for one in twins if one.splits_microbatches}
    marked = [
        replace(one, splits_microbatches=one.splits_microbatches or one.row in split)
        for one in found
    ]
    if len(twins) != 1 or twins[0].is_stops or twins[0].is_one_kind:
        return marked
    (lone,) = twins
    groups = seen.members.tensor_group[[one.row for one in found]]
    if np.isin(seen.members.tensor_group[lone.row], groups):
        return marked  # it is told of, or waits for a mate in passes of one kind
    return [*marked, replace(lone, is_noise=lone.is_noise or _may_be_its_noise(seen, lone))]


def _may_be_its_noise(seen: Observations, burst: Burst) -> bool:
    """Return whether the row of a burst is noisy all the while and no longer than its peers on the
    mean: noise makes passes shorter as often.
    """
    if not burst.is_noisy:
        return False
    if are_uneven(seen) or varies(seen, burst):
        return True
    over = compute_excess(seen, ~burst.others)[burst.row]
    return not float(np.mean(over)) >= PAIRS.agrees_share * float(burst.excess.mean())


def _suspicion(seen: Observations, burst: Burst) -> Suspicion:
    return Suspicion(
        seen=seen, excluded=~burst.others, row=burst.row, active=burst.hits, effect=burst.effect
    )


def _others_spare_the_data(seen: Observations, burst: Burst) -> bool:
    """Return whether ranks that compute the same microbatches (TP mates, or the other stages of the
    replica) are as quick as their peers in the bursts, in passes of one kind at least: longer data
    would slow all passes of these, while mates may be slow in some because they wait.
    """
    members, compared = seen.members, _compared(seen, ~burst.others)
    if compared is None:
        return False
    over = np.expm1(np.nan_to_num(compared.by_phase[:, :, burst.hits], nan=np.inf)).mean(axis=2)
    same = (mates_of(members, burst.row), np.flatnonzero(members.other_stages(burst.row)))
    return any(
        len(rows) > 0
        and float(robust.median(of_kind[rows])) < PAIRS.elsewhere_share * of_kind[burst.row]
        for of_kind in over
        for rows in same
    )


def _slows_its_step(seen: Observations, burst: Burst) -> bool:
    """Return whether the row's optimizer step is slower in just its hits, by half of what passes
    are and by far more than steps vary.

    Example: steps take 2.5 times as long in the two iterations whose passes take 1.2 times as long,
    and 1.00 times in the four others.
    """
    if burst.hits.all():
        return False
    over = optimizer_residuals(seen, stage_groups(seen.members), ~burst.others)
    change = robust.median(over[burst.row][burst.hits]) - robust.median(
        over[burst.row][~burst.hits]
    )
    others = over[burst.others] - robust.median(over[burst.others], axis=1)[:, None]
    noise = BURSTS.margin_sigmas * float(robust.spread(others))
    least = max(PAIRS.agrees_share * burst.effect, noise)
    return float(change) >= least


def _shows_in_attention(seen: Observations, burst: Burst) -> bool:
    """Return whether attention, which no routing of tokens lengthens, is slow in the hits, too."""
    over = attention_residuals(seen, ~burst.others)
    if over is None or burst.hits.all():
        return False
    change = robust.mean(over[burst.row][burst.hits]) - robust.median(over[burst.row][~burst.hits])
    return bool(change >= PAIRS.agrees_share * burst.effect)
