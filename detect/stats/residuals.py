"""Tell how much slower than its peers a rank was, in each iteration.

Problem: a span's duration mixes the rank's speed with its role (a heavier stage), its data (a
longer sequence) and the moment (a slow iteration for everybody).

Idea, in logarithms, so that a fault of 20 % is the same number on every operation:

    residual = own time − median of the OTHER ranks of the role, same iteration and microbatch
             − what the other ranks of the replica say about this microbatch's data
    value of (rank, iteration) = mean over forward, backward of the median over operations

The role removes stage and chunk; equal iteration and microbatch remove common effects. The share of
the data is learnt by regression on the rest of the replica (other stages and TP ranks see the same
documents), so it is nil where sequences are alike. A constant difference of a position (TP 0 of
every replica) is the job's and is removed too.

`t_tail` and `rank_correlation` are in scipy.stats, too, but its import takes 0.7 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from scipy import special

from detect.observe.members import Members
from detect.observe.operations import BACKWARD, FORWARD, Work
from detect.stats import robust
from detect.thresholds.observing import DATA, OCCUPANCY
from detect.thresholds.statistics import ROBUST
from megascan.arrays import Flags, Floats, Integers, combine


@dataclass(frozen=True)
class Residuals:
    """Log slowdown of each rank against its peers; 0.18 is 20 % slower."""

    value: Floats
    """(rank, iteration)"""
    by_phase: Floats
    """(phase, rank, iteration)"""
    num_peers: Integers
    """(rank,): number of peers that the rank was compared with."""


@dataclass(frozen=True)
class Longest:
    """The row of some residuals that is farthest above its peers."""

    row: int
    level: float
    """Log, centre over the iterations."""
    num_above: int
    """Iterations in which it is above its peers."""
    num_known: int

    @classmethod
    def of(cls, value: Floats) -> Longest:
        """Return the one of (row, iteration)."""
        level = np.nan_to_num(robust.centre(value))
        row = int(np.argmax(level))
        known = value[row][np.isfinite(value[row])]
        return cls(row, float(level[row]), int((known > 0).sum()), len(known))

    @property
    def lasts(self) -> bool:
        """Return whether it is above its peers in nearly all iterations."""
        return self.num_above > 0 and self.num_above >= OCCUPANCY.mostly_share * self.num_known


def stage_groups(members: Members) -> list[Integers]:
    """Return the rows of each pipeline stage."""
    return [members.rows_of_stage(int(stage)) for stage in np.unique(members.stage)]


def compare_within(
    work: Work, members: Members, groups: list[Integers], excluded: Flags
) -> Residuals:
    """Return residuals of every rank against the ranks of its group that are not `excluded`.

    An excluded rank (a fault that is already known) is nobody's peer but is still compared.
    """
    residual, data = pass_residuals(work, members, groups, excluded)
    num_ranks, num_iterations, num_ops = residual.shape
    num_peers = np.zeros(num_ranks, dtype=np.int64)
    for rows in groups:
        num_peers[rows] = int((~excluded[rows]).sum()) - (~excluded[rows])
    forward, backward = (work.phase == phase for phase in (FORWARD, BACKWARD))
    parts = [robust.median(residual[:, :, use], axis=2) for use in (forward, backward)]
    by_phase = np.stack(parts)
    by_phase = by_phase - _position_effect(by_phase, members, excluded)
    if data.used and data.told_apart:
        by_phase = by_phase - _group_level(by_phase, groups, excluded)
    elif data.used:
        reach = DATA.level_sigmas * data.spread / np.sqrt(num_iterations * num_ops / 2)
        by_phase = by_phase - _data_level(by_phase, members, excluded, reach)
    return Residuals(robust.mean(by_phase, axis=0), by_phase, num_peers)


def pass_residuals(
    work: Work, members: Members, groups: list[Integers], excluded: Flags
) -> tuple[Floats, DataShare]:
    """Return each pass's log time minus that of the group's other ranks that are not `excluded`,
    (rank, iteration, operation), with data taken out, and what share of data was taken out.
    """
    log_ns, data = _without_data(work, members, groups, excluded)
    residual = np.full_like(log_ns, np.nan)
    for rows in groups:
        residual[rows] = log_ns[rows] - robust.expected_from_others(log_ns[rows], excluded[rows])
    return residual, data


def peer_groups(work: Work, members: Members) -> list[Integers]:
    """Return the groups of rows to compare: of a stage, or, where data would blur a stage, of a
    stage and replica, whose ranks (TP, CP) work on the same data.
    """
    groups = stage_groups(members)
    if data_of(work, members, groups).level_error == 0.0:
        return groups
    together = [
        rows[members.replica[rows] == replica]
        for rows in groups
        for replica in np.unique(members.replica[rows])
    ]
    return together if min(len(rows) for rows in together) > 1 else groups


def deviations(work: Work, groups: list[Integers], excluded: Flags) -> Floats:
    """Return log time minus the group's median of the same operation, (rank, iteration, operation).

    Excluded ranks do not count in the median.
    """
    deviation = np.full_like(work.log_ns, np.nan)
    for rows in groups:
        peers = rows[~excluded[rows]]
        if len(peers):
            deviation[rows] = work.log_ns[rows] - robust.median(work.log_ns[peers], axis=0)
    return deviation


def data_effects(
    work: Work, members: Members, groups: list[Integers], excluded: Flags, centred: bool = True
) -> Floats:
    """Return what the rest of a rank's replica says about the data of each operation.

    (rank, iteration, operation) in logarithms: +0.3 where the other stages and TP ranks of the
    replica took 30 % longer than other replicas did on this microbatch. NaN without such ranks.
    `centred` takes each rank's own level away first, so that a lasting fault is not taken for data.
    """
    deviation = deviations(work, groups, excluded)
    key = combine(work.phase, work.microbatch)
    _, first, slot = np.unique(key, return_index=True, return_inverse=True)
    by_data = deviation[:, :, first]
    if len(first) < len(slot):  # several chunks work on the same data
        parts = [robust.mean(deviation[:, :, slot == n], axis=2) for n in range(len(first))]
        by_data = np.stack(parts, axis=2)
    for phase in (FORWARD, BACKWARD) if centred else ():
        of_phase = work.phase[first] == phase
        flat = by_data[:, :, of_phase].reshape(len(members), -1)
        by_data[:, :, of_phase] -= robust.median(flat, axis=1)[:, None, None]
    effect = np.full_like(by_data, np.nan)
    for replica in np.unique(members.replica):
        rows = np.flatnonzero(members.replica == replica)
        effect[rows] = robust.expected_from_others(by_data[rows], excluded[rows])
    return effect[:, :, slot]


@dataclass(frozen=True)
class DataShare:
    """Whether the data's share was taken out, how, and how much the data vary."""

    used: bool = False
    told_apart: bool = False
    spread: float = 0.0
    num_samples: int = 1
    """Samples of a rank in the window: iterations times microbatches."""

    @property
    def level_error(self) -> float:
        """Return the standard error of a rank's level that comes from the rank's data, log units.

        Where few replicas of few ranks work on varying data, the mean length of a rank's own data
        over the window is known by chance only: the spread of the data over the root of their
        number.
        """
        if not self.used or self.told_apart:
            return 0.0
        return float(2.0 * ROBUST.centre_loss_ratio * self.spread / np.sqrt(self.num_samples))


def data_of(work: Work, members: Members, groups: list[Integers]) -> DataShare:
    """Return what the work of all ranks, slow ones included, tells about the data."""
    nobody = np.zeros(len(members), dtype=bool)
    return _without_data(work, members, groups, nobody)[1]


def _without_data(
    work: Work, members: Members, groups: list[Integers], excluded: Flags
) -> tuple[Floats, DataShare]:
    """Return log times minus the data's share, and that share.

    The last result is kept, and the last with nobody excluded.
    """
    name = "without data" if excluded.any() else "without data, nobody excluded"
    key = (id(members), excluded.tobytes(), *(rows.tobytes() for rows in groups))
    known = work.derived.get(name)
    if known is None or known[0] != key:
        known = (key, members, _taken_out(work, members, groups, excluded))
        work.derived[name] = known  # holds the members, so that no other object gets their id
    return cast("tuple[Floats, DataShare]", known[2])


def _taken_out(
    work: Work, members: Members, groups: list[Integers], excluded: Flags
) -> tuple[Floats, DataShare]:
    """Compute log times minus the data's share, and that share."""
    within_replicas = all(len(np.unique(members.replica[rows])) < 2 for rows in groups)
    if within_replicas or len(members) < DATA.min_ranks:
        return work.log_ns, DataShare()
    told_apart = _faults_are_told_apart(members, excluded)
    effect = data_effects(work, members, groups, excluded)
    spread = float(robust.spread(effect))
    if not spread >= DATA.min_spread_log:
        return work.log_ns, DataShare()
    deviation = deviations(work, groups, excluded)
    taken = data_effects(work, members, groups, excluded, centred=not told_apart)
    result = work.log_ns.copy()
    used = False
    for phase in (FORWARD, BACKWARD):
        ops = work.phase == phase
        slope = _slope(effect[:, :, ops], deviation[:, :, ops])
        used = used or slope > 0
        result[:, :, ops] -= slope * np.nan_to_num(taken[:, :, ops])
    num_samples = work.log_ns.shape[1] * len(np.unique(work.microbatch))
    return result, DataShare(used, told_apart, spread, num_samples)


def _group_level(by_phase: Floats, groups: list[Integers], excluded: Flags) -> Floats:
    """Return what all ranks of a group of four and more have in common, (phase, rank, 1).

    Where data vary, a fault moves the group's median and with it all other ranks alike.
    """
    common = np.zeros((*by_phase.shape[:2], 1))
    for rows in groups:
        kept = rows[~excluded[rows]]
        if len(kept) >= DATA.min_ranks:
            level = robust.median(robust.median(by_phase[:, kept], axis=2), axis=1)
            common[:, rows, 0] = np.nan_to_num(level)[:, None]
    return common


def _faults_are_told_apart(members: Members, excluded: Flags) -> bool:
    """Return whether a lasting fault cannot pass for data: three replicas, or three ranks in each.

    With two replicas of two ranks each, one slow rank and the opposite one look the same.
    """
    _, num_rows = np.unique(members.replica[~excluded], return_counts=True)
    if len(num_rows) >= DATA.min_replicas:
        return True
    return len(num_rows) > 0 and int(num_rows.min()) >= DATA.min_ranks


def _data_level(by_phase: Floats, members: Members, excluded: Flags, reach: float) -> Floats:
    """Return what all ranks of a replica have in common over the window, (phase, rank, 1).

    Data effects are centred, so that a lasting fault of one rank does not pass for data of the
    others. Therefore the little by which a replica's data happen to be longer over the whole window
    remains. It shows on every rank of the replica, while a fault shows on one: so the smaller of
    the rank's own level and the others' level is taken, where their signs agree.
    """
    level = robust.median(by_phase, axis=2)
    common = np.zeros_like(level)
    for replica in np.unique(members.replica):
        rows = np.flatnonzero(members.replica == replica)
        for phase in (FORWARD, BACKWARD):
            others = robust.expected_from_others(level[phase, rows], excluded[rows])
            common[phase, rows] = np.nan_to_num(others)
    shared = np.sign(level) * np.minimum(np.abs(level), np.minimum(np.abs(common), reach))
    return np.where(np.sign(level) == np.sign(common), shared, 0.0)[:, :, None]


def _slope(cause: Floats, outcome: Floats) -> float:
    """Return the slope of centred values through the origin; 0 where they hardly correlate."""
    centred = outcome - robust.median(outcome.reshape(len(outcome), -1), axis=1).reshape(-1, 1, 1)
    use = np.isfinite(cause) & np.isfinite(centred)
    x, y = cause[use], centred[use]
    if len(x) < DATA.min_samples or not x.any() or not y.any():
        return 0.0
    limits = [DATA.max_sigmas * robust.spread(one) + 1e-12 for one in (x, y)]
    x, y = np.clip(x, -limits[0], limits[0]), np.clip(y, -limits[1], limits[1])
    correlation = float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / (x * x).sum()) if correlation > DATA.min_correlation else 0.0


def _position_effect(by_phase: Floats, members: Members, excluded: Flags) -> Floats:
    """Return what a (TP, CP, EP) position costs wherever it occurs, (phase, rank, 1): the job's own
    doing.

    This is, with three replicas and more, the position's median within its stage; with fewer, what
    all ranks of the position in all stages and replicas have in common, if they agree.
    """
    effect = np.zeros((*by_phase.shape[:2], 1))
    place = members.place
    position = combine(place["tp"], place["cp"], place["ep"])
    if len(np.unique(position)) < 2:
        return effect
    level = robust.median(by_phase, axis=2)
    for name in np.unique(position):
        everywhere = position == name
        shared = _slowdown_of_all(level[:, everywhere & ~excluded])
        for stage in np.unique(members.stage):
            same = everywhere & (members.stage == stage)
            kept = same & ~excluded
            if kept.sum() >= DATA.min_replicas:
                effect[:, same, 0] = np.nan_to_num(robust.median(level[:, kept], axis=1))[:, None]
            else:
                effect[:, same, 0] = shared[:, None]
    return effect


def _slowdown_of_all(level: Floats) -> Floats:
    """Return the least `level`, (phase, rank), of ranks, if two and more are slow alike; or 0."""
    typical = robust.mean(level, axis=0)
    typical = typical[np.isfinite(typical)]
    if len(typical) < 2 or not typical.min() >= DATA.alike_share * typical.max() > 0:
        return np.zeros(len(level))
    return np.asarray(np.fmin.reduce(level, axis=1))


def t_tail(score: float, degrees: float) -> float:
    """Return P(T > score) of Student's law."""
    return float(special.stdtr(degrees, -score))


def chance_of_mean(values: Floats, least: float = 0.0) -> float:
    """Return how probable so high a mean, (iteration,), is by chance if the true one is `least`."""
    error = max(robust.standard_error(values), 1e-9)
    return t_tail((float(values.mean()) - least) / error, max(len(values) - 1, 1))


def rank_correlation(one: Floats, other: Floats) -> float:
    """Return Spearman's correlation of two samples of one length; 0 where one does not vary."""
    x, y = _ranks(one), _ranks(other)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else 0.0


def _ranks(values: Floats) -> Floats:
    """Return places in order, equal values sharing their mean place."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2.0)[number.reshape(-1)])
