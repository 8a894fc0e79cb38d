"""What makes a job uneven by its own making: a heavy stage, microbatches of unequal length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from detect.observations import BACKWARD, FORWARD, Bools, Floats, Observations, Work
from detect.settings import DetectorSettings
from detect.stats import robust
from detect.stats.laws import rank_correlation, t_tail
from detect.stats.residuals import data_effects, deviations, stage_groups

AGREEING_REPLICAS = 0.5
"""Replicas of a heavy stage may differ among themselves by at most this share of its excess."""
MIN_SEQUENCE_SPREAD = 0.06
"""Log spread over microbatches; an even job shows 0.01 to 0.03, production skew 0.3 and more."""
MIN_SEQUENCE_CORRELATION = 0.6
MAX_SEQUENCE_REPETITION = 0.6
"""Rank correlation of a replica's time with that of the next iteration: data are drawn anew."""
MULTIPLICATIVE = 0.06
"""Forward and backward ratios this close (log units) look like a slow device, not a heavy stage."""


@dataclass(frozen=True, kw_only=True)
class HeavyStage:
    """A stage that computes longer than the others do."""

    stage: int
    ratio: float
    interval: tuple[float, float]
    p_value: float
    excess_forward_ns: float
    excess_backward_ns: float
    ratio_forward: float
    ratio_backward: float
    layer_ratio: float
    """Of its transformer layers against those of the other stages; NaN when not traced."""
    num_replicas: int
    replica_spread: float
    at_an_end: bool
    """First or last: the embedding or the output layer is known extra work."""
    saved_ns: Floats
    """(iteration,) if the work were spread evenly over the stages."""

    @property
    def looks_like_device(self) -> bool:
        """In the middle, without a replica, and everything is slower by the same ratio."""
        same = abs(np.log(self.ratio_forward) - np.log(self.ratio_backward)) < MULTIPLICATIVE
        layers_normal = self.layer_ratio < 1 + (self.ratio - 1) / 3
        alone = self.num_replicas < 2 and not self.at_an_end
        return alone and bool(same) and not layers_normal


def heavy_stages(seen: Observations, settings: DetectorSettings, faulty: Bools) -> list[HeavyStage]:
    """Stages above the floor, heaviest first; ranks that are `faulty` do not speak for theirs."""
    groups = stage_groups(seen.members)
    if len(groups) < 2:
        return []
    times = [_stage_times(seen.work, rows, faulty) for rows in groups]
    found = []
    for number, rows in enumerate(groups):
        if not np.isfinite(times[number]).any():
            continue
        others = [robust.median(times[one], axis=1) for one in range(len(groups)) if one != number]
        stage = int(seen.members.stage[rows[0]])
        heavy = _heavy(seen, stage, times[number], np.stack(others), faulty)
        if heavy is not None and heavy.ratio >= settings.min_stage_excess:
            found.append(heavy)
    return sorted(found, key=lambda one: -one.ratio)


def _stage_times(work: Work, rows: np.ndarray, faulty: Bools) -> Floats:
    """Time of a microbatch through the stage, (phase, row, iteration), ns; all chunks together."""
    sound = rows[~faulty[rows]]
    num_chunks = max(1, len(work.phase) // (2 * (int(work.microbatch.max()) + 1)))
    if not len(sound):
        return np.full((2, 1, work.log_ns.shape[1]), np.nan)
    time_ns = np.exp(work.log_ns[sound])
    return np.stack(
        [
            robust.mean(time_ns[:, :, work.phase == phase], axis=2) * num_chunks
            for phase in (FORWARD, BACKWARD)
        ]
    )


def _heavy(
    seen: Observations, stage: int, own: Floats, others: Floats, faulty: Bools
) -> HeavyStage | None:
    """`own` is (phase, row, iteration), `others` (stage, phase, iteration)."""
    level = robust.median(own, axis=1)
    expected = robust.median(others, axis=0)
    total, normal = level.sum(axis=0), expected.sum(axis=0)
    logs = np.log(total / normal)
    effect = float(robust.median(logs))
    if not np.isfinite(effect) or effect <= 0:
        return None
    by_replica = robust.median(own.sum(axis=0), axis=1)
    replica_spread = float(np.log(by_replica.max() / by_replica.min()))
    if replica_spread > AGREEING_REPLICAS * effect and len(by_replica) > 1:
        return None
    error = float(np.nan_to_num(np.std(logs) / np.sqrt(len(logs)))) + 1e-4
    forward, backward = robust.median(level, axis=1), robust.median(expected, axis=1)
    return HeavyStage(
        stage=stage,
        ratio=float(np.exp(effect)),
        interval=(float(np.exp(effect - 1.96 * error)), float(np.exp(effect + 1.96 * error))),
        p_value=t_tail(effect / error, max(len(logs) - 1, 1)),
        excess_forward_ns=float(forward[FORWARD] - backward[FORWARD]),
        excess_backward_ns=float(forward[BACKWARD] - backward[BACKWARD]),
        ratio_forward=float(forward[FORWARD] / backward[FORWARD]),
        ratio_backward=float(forward[BACKWARD] / backward[BACKWARD]),
        layer_ratio=_layer_ratio(seen, stage, faulty),
        num_replicas=len(by_replica),
        replica_spread=replica_spread,
        at_an_end=stage in (0, int(seen.members.stage.max())),
        saved_ns=_saved(seen, total, others),
    )


def _layer_ratio(seen: Observations, stage: int, faulty: Bools) -> float:
    if seen.layers is None:
        return float("nan")
    level = robust.median(robust.median(seen.layers.log_ns, axis=2), axis=1)
    inside = (seen.members.stage == stage) & ~faulty
    outside = (seen.members.stage != stage) & ~faulty
    if not inside.any() or not outside.any():
        return float("nan")
    return float(np.exp(robust.median(level[inside]) - robust.median(level[outside])))


def _saved(seen: Observations, total: Floats, others: Floats) -> Floats:
    """Steps shrink by what the stage is above the mean stage, once a microbatch."""
    all_stages = np.concatenate([total[None], others.sum(axis=1)])
    num_microbatches = int(seen.work.microbatch.max()) + 1
    lost = np.maximum(total - all_stages.mean(axis=0), 0.0)
    return np.asarray(lost * num_microbatches)


@dataclass(frozen=True, kw_only=True)
class SequenceSkew:
    """Microbatches of unequal length."""

    spread: float
    """Log spread of a microbatch's time between replicas."""
    correlation: float
    """Between the ranks of one replica, or between forward and backward where it has one rank."""
    across_ranks: bool
    ratio: float
    """Longest replica of an iteration over the mean replica."""
    interval: tuple[float, float]
    p_value: float
    saved_ns: Floats


def sequence_skew(
    seen: Observations, settings: DetectorSettings, faulty: Bools
) -> SequenceSkew | None:
    """Skew between replicas that costs more than the floor and that no rank keeps."""
    members, groups = seen.members, stage_groups(seen.members)
    if len(np.unique(members.replica)) < 2 or faulty.all():
        return None
    deviation = deviations(seen.work, groups, faulty)
    deviation[faulty] = np.nan
    deviation = deviation - robust.median(deviation.reshape(len(members), -1), axis=1).reshape(
        -1, 1, 1
    )
    spread = float(robust.spread(deviation))
    if not spread >= MIN_SEQUENCE_SPREAD:
        return None
    correlation, across_ranks = _data_correlation(seen, deviation, faulty)
    if correlation < MIN_SEQUENCE_CORRELATION or _lasts(deviation):
        return None
    ratio, saved = _uneven_replicas(seen, faulty)
    typical = float(robust.median(ratio))
    least_ns = (settings.min_slowdown - 1) * float(np.mean(seen.iteration_ns))
    if typical < settings.min_slowdown or float(np.mean(saved)) < least_ns:
        return None
    error = float(np.std(ratio) / np.sqrt(len(ratio))) + 1e-4
    return SequenceSkew(
        spread=spread,
        correlation=correlation,
        across_ranks=across_ranks,
        ratio=typical,
        interval=(max(1.0, typical - 1.96 * error), typical + 1.96 * error),
        p_value=t_tail((typical - 1) / error, max(len(ratio) - 1, 1)),
        saved_ns=saved,
    )


def _data_correlation(seen: Observations, deviation: Floats, faulty: Bools) -> tuple[float, bool]:
    groups = stage_groups(seen.members)
    elsewhere = data_effects(seen.work, seen.members, groups, faulty)
    use = np.isfinite(elsewhere) & np.isfinite(deviation)
    if use.any():
        return _correlation(elsewhere[use], deviation[use]), True
    forward = deviation[:, :, seen.work.phase == FORWARD]
    backward = deviation[:, :, seen.work.phase == BACKWARD]
    use = np.isfinite(forward) & np.isfinite(backward)
    return _correlation(forward[use], backward[use]), False


def _lasts(deviation: Floats) -> bool:
    """Whether who is long now is long in the next iteration: a rank that changed, no data."""
    level = robust.mean(deviation, axis=2)
    now, then = level[:, :-1], level[:, 1:]
    use = np.isfinite(now) & np.isfinite(then)
    return _correlation(now[use], then[use]) > MAX_SEQUENCE_REPETITION


def _correlation(one: Floats, other: Floats) -> float:
    if len(one) < 8:
        return 0.0
    return rank_correlation(one, other)


def _uneven_replicas(seen: Observations, faulty: Bools) -> tuple[Floats, Floats]:
    """Longest over mean replica, and the time between them, (iteration,) each."""
    busy = np.where(faulty[:, None], np.nan, seen.busy_ns)
    replicas = np.unique(seen.members.replica)
    by_stage = []
    for rows in stage_groups(seen.members):
        of_replica = [
            robust.mean(busy[rows[seen.members.replica[rows] == one]], axis=0) for one in replicas
        ]
        by_stage.append(np.stack(of_replica))
    total = robust.mean(np.stack(by_stage), axis=0)  # (replica, iteration)
    longest, typical = np.nanmax(total, axis=0), robust.mean(total, axis=0)
    return longest / typical, longest - typical
