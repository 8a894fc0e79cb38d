"""What makes a job uneven by its own making: a heavy stage, microbatches of unequal length.

Both are findings of the job, not of a node.

A heavy stage computes 10 % longer for a microbatch than the median stage, on all replicas alike.
Example: 44 ms against 40 ms on 4 replicas, on 4 hosts: an output layer, no slow device.

The job is only blamed where nothing else is left: slow hardware, a stage's only device or the host
that it alone uses, multiplies what the stage has to compute, whether it is heavier by itself or
not. Slow hardware is excluded by layers which take as long as those of the other stages, by
replicas on several hosts that agree, or by other stages' ranks on the same host that are not slow.

For stages between the first and the last, the two passes tell more. Extra work takes twice as long
backward as forward, or as long where its weights are frozen; a host that launches late delays the
forward more, whose kernels are shorter. Example: stage 2 of 4, alone on its host, takes 4.0 ms
longer forward and 1.5 ms longer backward: the host.

Uneven sequences: the same microbatch takes different times on different replicas, on all ranks of a
replica together, and other replicas are the longest in other iterations. Example: a spread of 12 %
between replicas, rank correlation 0.9 within them, 0.05 from one iteration to the next.

Devices whose speed comes and goes (cores that others use, too) show the same. But data are drawn
for every microbatch, and no optimizer step sees them; the speed of a core is that of all that it
computes meanwhile. So where the microbatches of an iteration are slow together, or the optimizer
goes along, or neither can be asked, the finding is undecided. Example: of four processes on shared
cores the two microbatches of an iteration correlate by 0.7 over 120 samples: undecided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from detect.causes.device import DATA_ADVICE, HOST_ADVICE, STAGE_ADVICE, optimizer_residuals
from detect.causes.finding import Answer, CauseSpec, Claim, Inquiry, build_finding
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.residuals import data_effects, deviations, rank_correlation, stage_groups, t_tail
from detect.stats.search import interval_of_ratio
from detect.text import counted, milliseconds, percent, times
from detect.thresholds.devices import COMPUTE, PAIRS
from detect.thresholds.observing import STARVATION
from detect.thresholds.statistics import SEARCH
from detect.thresholds.verdicts import IMBALANCE
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import listed

DOUBTFUL_ADVICE = (
    "run the same GEMM benchmark on a device of this stage and on one of another: slower there, "
    "too, means the hardware; as fast means more work",
    "if it is more work: " + STAGE_ADVICE,
)

DEVICES_ADVICE = (
    "look at what else runs on the ranks' cores (top, taskset -p PID), or at the GPUs' clocks, "
    "while the job runs; record the lengths of the microbatches beside their times",
)


LONE_RANK = (
    "no other rank shares the stage, so a slow device would show the same: a benchmark of "
    "it and of another stage's, a second replica, or rank files at granularity full decide"
)
LONE_GROUP = (
    "its ranks wait for each other inside their passes, which was not recorded, and no other TP "
    "group shares the stage: one slow device of them would show the same; rank files at "
    "granularity full, a benchmark of them and of another stage's, or a second replica decide"
)
OF_KERNELS = (
    "all kernels of an iteration together, without the optimizer's: a profile does not tell "
    "forward and backward passes"
)
UNKNOWN_HOST = (
    "the trace does not say on which hosts its ranks run: were it one that no other stage "
    "uses, a slow host would show the same"
)


@dataclass(frozen=True, kw_only=True)
class HeavyStage:
    """A stage that computes longer than the others do."""

    stage: int
    ratio: float
    interval: tuple[float, float]
    p_value: float
    excess_forward_ns: float
    """Of a microbatch; NaN in profiles, as the three that follow."""
    excess_backward_ns: float
    ratio_forward: float
    ratio_backward: float
    layer_ratio: float
    """Time of the stage's transformer layers over that of other stages'; NaN when not traced."""
    num_replicas: int
    """Ranks of the stage whose times are known."""
    num_ranks: int
    replica_spread: float
    saved_ns: Floats
    """(iteration,): time saved if the work were spread evenly over the stages."""
    doubt: str = ""
    """Why hardware may be the reason as well, as a sentence; empty where it is excluded."""
    host: str = ""
    """The one host of the stage's ranks, if none but ranks of other heavy stages run there, too."""

    def has_normal_layers(self, least: float) -> bool:
        """Return whether its layers were traced and take hardly longer than those of other stages.

        Layers that are `least` times as long would make a stage heavy by themselves, and are not
        normal however heavy the rest is.
        """
        most = 1 + IMBALANCE.normal_layers_share * (self.ratio - 1)
        return self.layer_ratio < min(most, least)

    @property
    def is_late(self) -> bool:
        """Return whether the forward is longer by more than the backward: launches come late."""
        low, high = (
            one * self.excess_forward_ns
            for one in (IMBALANCE.least_late_backward, IMBALANCE.most_late_backward)
        )
        return self.ratio >= IMBALANCE.least_late_ratio and low <= self.excess_backward_ns <= high

    @property
    def who_agrees(self) -> str:
        """Return how many of the stage's ranks are compared: "all 4", "3 of 4"."""
        if self.num_replicas == self.num_ranks:
            return f"all {self.num_ranks}"
        return f"{self.num_replicas} of {self.num_ranks}"

    @property
    def is_multiplied(self) -> bool:
        """Return whether forward and backward are longer by the same ratio, or nobody knows."""
        difference = abs(np.log(self.ratio_forward) - np.log(self.ratio_backward))
        return not difference >= IMBALANCE.multiplicative_log


def _search_stages(inquiry: Inquiry) -> Answer:
    """Name stages above the floor that cost the step something, heaviest first."""
    seen, settings = inquiry.seen, inquiry.settings
    least_ns = (settings.min_slowdown - 1) * seen.iteration_ns.mean()
    heavy = [
        one
        for one in _heavy_stages(seen, inquiry.slow, settings.min_stage_excess)
        if one.ratio >= settings.min_stage_excess and float(np.mean(one.saved_ns)) > least_ns
    ]
    late = {
        one.host: (one, why)
        for one in reversed(heavy)
        if one.host and (why := _why_late(seen, one))
    }
    late_hosts = tuple(_late_host_finding(seen, one, why) for one, why in late.values())
    ranks = {rank for finding in late_hosts for rank in finding.ranks}
    return Answer(
        findings=(
            *late_hosts,
            *(_stage_finding(seen, one) for one in heavy if one.host not in late),
        ),
        explains=lambda finding: (
            finding.owner != Owner.NODE and bool(finding.ranks) and set(finding.ranks) <= ranks
        ),
    )


def _heavy_stages(seen: Observations, faulty: Flags, least: float) -> list[HeavyStage]:
    """Return the stages that take longer than the others; `faulty` ranks do not count.

    Stages above the ratio `least` are no witnesses for a host that they share. Example: a last
    stage takes 1.85 times as long for its output layer, and its layers 1.18 times: its host is hot.
    """
    groups = stage_groups(seen.members)
    if len(groups) < 2:
        return []
    times = [_stage_times(seen, rows[~faulty[rows]]) for rows in groups]
    found = []
    for number, rows in enumerate(groups):
        if not np.isfinite(times[number]).any():
            continue
        others = [robust.median(times[one], axis=1) for one in range(len(groups)) if one != number]
        stage = int(seen.members.stage[rows[0]])
        heavy = _heavy_stage(seen, stage, times[number], np.stack(others), faulty)
        if heavy is not None:
            found.append(heavy)
    slow = {one.stage for one in found if one.ratio >= least}
    for place, one in enumerate(found):
        if not one.has_normal_layers(least):
            doubt, host = _doubt(seen.members, one, slow, faulty)
            found[place] = replace(one, doubt=doubt, host=host)
    return sorted(found, key=lambda one: -one.ratio)


def _stage_times(seen: Observations, sound: Integers) -> Floats:
    """Return what a stage's `sound` rows compute, (part, row, iteration) ns: the forward and the
    backward of a microbatch through all of its chunks, or in a profile all kernels but the
    optimizer's as one part.
    """
    if not seen.tells_passes:
        work_ns = (seen.busy_ns - np.nan_to_num(seen.optimizer_ns))[sound]
        return np.where(work_ns > 0, work_ns, np.nan)[None]
    work = seen.work
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


def _heavy_stage(
    seen: Observations, stage: int, own: Floats, others: Floats, faulty: Flags
) -> HeavyStage | None:
    """Return the stage, if it takes longer than the others and its replicas agree; else None.

    `own` are its times, (part, row, iteration), `others` (stage, part, iteration).
    """
    level = robust.median(own, axis=1)
    expected = robust.median(others, axis=0)
    total, expected_total = level.sum(axis=0), expected.sum(axis=0)
    logs = np.log(total / expected_total)
    effect = float(robust.median(logs))
    if not np.isfinite(effect) or effect <= 0:
        return None
    by_replica = robust.median(own.sum(axis=0), axis=1)
    by_replica = by_replica[np.isfinite(by_replica)]  # pauses may leave a replica without times
    replica_spread = float(np.log(by_replica.max() / by_replica.min()))
    if replica_spread > IMBALANCE.replicas_agree_share * effect and len(by_replica) > 1:
        return None
    error = float(np.nan_to_num(np.std(logs) / np.sqrt(len(logs)))) + IMBALANCE.error_floor_ratio
    own_ns, expected_ns = (
        robust.median(one, axis=1) if seen.tells_passes else np.full(2, np.nan)
        for one in (level, expected)
    )
    return HeavyStage(
        stage=stage,
        ratio=float(np.exp(effect)),
        interval=interval_of_ratio(effect, error),
        p_value=t_tail(effect / error, max(len(logs) - 1, 1)),
        excess_forward_ns=float(own_ns[FORWARD] - expected_ns[FORWARD]),
        excess_backward_ns=float(own_ns[BACKWARD] - expected_ns[BACKWARD]),
        ratio_forward=float(own_ns[FORWARD] / expected_ns[FORWARD]),
        ratio_backward=float(own_ns[BACKWARD] / expected_ns[BACKWARD]),
        layer_ratio=_layer_ratio(seen, stage, faulty),
        num_replicas=len(by_replica),
        num_ranks=own.shape[1],
        replica_spread=replica_spread,
        saved_ns=_saved_by_even_work(seen, total, others),
    )


def _doubt(members: Members, heavy: HeavyStage, slow: set[int], faulty: Flags) -> tuple[str, str]:
    """Return why slow hardware may make the stage slow, as a sentence, and which host if it is one;
    empty where it cannot.

    Stages in `slow`, and `faulty` ranks of others, are no witnesses for a host. Unequal ratios of
    forward and backward acquit no known host: a host that launches late delays the pass with the
    shorter kernels more. Where hosts are not known, the ratios are all there is to go by.
    """
    stage = heavy.stage
    rows = members.rows_of_stage(stage)
    hosts = {members.hosts[row] for row in rows}
    num_ranks = sum(len(members.workers[row]) for row in rows)
    if len(rows) == 1:
        return LONE_RANK if num_ranks == 1 else LONE_GROUP, ""
    if hosts == {""}:
        is_one_host = num_ranks <= IMBALANCE.most_ranks_of_host and heavy.is_multiplied
        return UNKNOWN_HOST if is_one_host else "", ""
    elsewhere = [
        row
        for row, host in enumerate(members.hosts)
        if host in hosts and members.stage[row] != stage
    ]
    is_acquitted = any(not faulty[row] and int(members.stage[row]) not in slow for row in elsewhere)
    if len(hosts) > 1 or is_acquitted:
        return _chance_doubt(members, heavy), ""
    (host,) = hosts
    beside = " but others that are slow as well" if elsewhere else ""
    return (
        f"its ranks run on host {host} and no others do{beside}, so a slow host would show the "
        "same: a benchmark of that host and of another, or rank files at granularity full, decide"
    ), host


def _chance_doubt(members: Members, heavy: HeavyStage) -> str:
    """Say that all ranks of the stage may be slow by chance, each for itself; empty where that is
    improbable. Two devices are slow together by chance more often than four.
    """
    is_cpu = members.device_kind == "cpu"
    if not is_cpu and not heavy.is_multiplied:
        return ""
    most = COMPUTE.cpu_most_log if is_cpu else COMPUTE.gpu_most_log
    one_slow = float(special.ndtr(-np.log(heavy.ratio) / most))
    num_stages = len(np.unique(members.stage))
    if one_slow**heavy.num_replicas * num_stages < IMBALANCE.least_chance:
        return ""
    return (
        f"it has {heavy.num_replicas} ranks only, and sound devices may differ by as much: that "
        "all of them are slow may be chance, and a benchmark of them and of others decides"
    )


def _layer_ratio(seen: Observations, stage: int, faulty: Flags) -> float:
    """Return the time of the stage's layers over that of other stages' layers, NaN if not traced.

    An iteration counts with the mean of its layers, as with the mean of its passes: a few layers
    that are slow when the stage is slow must show, even if most layers are as quick as ever.
    """
    if seen.layers is None:
        return float("nan")
    level = robust.mean(np.exp(seen.layers.log_ns), axis=2)
    inside = (seen.members.stage == stage) & ~faulty
    outside = (seen.members.stage != stage) & ~faulty
    if not inside.any() or not outside.any():
        return float("nan")
    ratio = robust.median(level[inside], axis=0) / robust.median(level[outside], axis=0)
    return float(robust.median(ratio))


def _saved_by_even_work(seen: Observations, total: Floats, others: Floats) -> Floats:
    """Return the time saved without the excess, (iteration,): what the stage takes above the mean
    stage, once for each microbatch.
    """
    all_stages = np.concatenate([total[None], others.sum(axis=1)])
    num_microbatches = int(seen.work.microbatch.max()) + 1 if seen.tells_passes else 1
    lost = np.maximum(total - all_stages.mean(axis=0), 0.0)
    return np.asarray(lost * num_microbatches)


@dataclass(frozen=True, kw_only=True)
class SequenceSkew:
    """Microbatches of unequal length."""

    spread: float
    """Log spread of a microbatch's time between replicas."""
    correlation: float
    """Rank correlation between ranks of one replica, or else between forward and backward."""
    across_ranks: bool
    """Whether `correlation` is between ranks of one replica."""
    ratio: float
    """Longest replica of an iteration over the mean replica."""
    longest: Integers
    """(iteration,): the replica that is the longest."""
    num_replicas: int
    interval: tuple[float, float]
    p_value: float
    saved_ns: Floats
    doubt: str = ""
    """Why the devices may be the reason as well, as a sentence; empty where it is the data."""


def _search_sequences(inquiry: Inquiry) -> Answer:
    """Report replicas that take unequal time by turns, if that costs more than the floor."""
    seen, least = inquiry.seen, inquiry.settings.min_slowdown
    skew = _sequence_skew(seen, inquiry.slow)
    least_ns = (least - 1) * float(np.mean(seen.iteration_ns))
    if skew is None or skew.ratio < least or float(np.mean(skew.saved_ns)) < least_ns:
        return Answer()
    return Answer(findings=(_sequence_finding(seen, skew),))


def _sequence_skew(seen: Observations, faulty: Flags) -> SequenceSkew | None:
    members, groups = seen.members, stage_groups(seen.members)
    if len(np.unique(members.replica)) < 2 or faulty.all():
        return None
    deviation = deviations(seen.work, groups, faulty)
    deviation[faulty] = np.nan
    deviation = deviation - robust.median(deviation.reshape(len(members), -1), axis=1).reshape(
        -1, 1, 1
    )
    spread = float(robust.spread(deviation))
    if not spread >= IMBALANCE.min_sequence_spread_log:
        return None
    correlation, across_ranks = _data_correlation(seen, deviation, faulty)
    if correlation < IMBALANCE.min_sequence_correlation or _repeats(deviation):
        return None
    ratio, saved, longest = _uneven_replicas(seen, faulty)
    typical = float(robust.median(ratio))
    error = float(np.std(ratio) / np.sqrt(len(ratio))) + IMBALANCE.error_floor_ratio
    return SequenceSkew(
        spread=spread,
        correlation=correlation,
        across_ranks=across_ranks,
        ratio=typical,
        longest=np.unique(members.replica)[longest],
        num_replicas=len(np.unique(members.replica)),
        interval=(
            max(1.0, typical - SEARCH.interval_sigmas * error),
            typical + SEARCH.interval_sigmas * error,
        ),
        p_value=t_tail((typical - 1) / error, max(len(ratio) - 1, 1)),
        saved_ns=saved,
        doubt=_device_doubt(seen, deviation, faulty),
    )


def _device_doubt(seen: Observations, deviation: Floats, faulty: Flags) -> str:
    """Say why devices whose speed comes and goes may be the reason; empty where it is the data.

    `deviation` (row, iteration, operation) is what a row's passes take over its peers'.
    """
    if seen.rules_data_out:
        return (
            "all passes got as many tokens as each other, so the lengths of the data are not the "
            "reason: cores that others use as well, or clocks that come and go, would show the same"
        )
    numbers = np.unique(seen.work.microbatch)
    by_microbatch = np.stack(
        [robust.mean(deviation[:, :, seen.work.microbatch == one], axis=2) for one in numbers]
    )
    half = len(numbers) // 2
    first, second = (robust.mean(part, axis=0) for part in np.split(by_microbatch, [half]))
    together = _going_together(first, second)
    optimizer = optimizer_residuals(seen, stage_groups(seen.members), faulty)
    optimizer[faulty] = np.nan
    along = _going_together(optimizer, robust.mean(by_microbatch, axis=0))
    ways = "; cores that others use as well, or clocks that come and go, would show the same"
    if together is None and along is None:
        return (
            "one microbatch an iteration, and no optimizer step, tell nothing of the reason" + ways
        )
    if together:
        return (
            "the microbatches of an iteration are slow together (rank correlation "
            f"{together:.2f}), which data drawn for each of them are not{ways}"
        )
    if along:
        return (
            "the optimizer step, which no data can lengthen, is slow in the same iterations (rank "
            f"correlation {along:.2f}){ways}"
        )
    return ""


def _going_together(one: Floats, other: Floats) -> float | None:
    """Return the rank correlation of two kinds of times, (row, iteration) each, within the rows; 0
    where it may be chance, None where there are too few to tell.
    """
    use = np.isfinite(one) & np.isfinite(other)
    if int(use.sum()) < IMBALANCE.min_samples:
        return None
    centred = [
        np.where(use, times - robust.median(np.where(use, times, np.nan), axis=1)[:, None], np.nan)
        for times in (one, other)
    ]
    correlation = rank_correlation(centred[0][use], centred[1][use])
    # rows are measured against each other, so the values of one row are not free
    num_free = int(use.sum()) * (1.0 - 1.0 / max(int(use.any(axis=1).sum()), 2))
    chance = IMBALANCE.together_sigmas / np.sqrt(num_free)
    return correlation if correlation > max(IMBALANCE.min_together, chance) else 0.0


def _data_correlation(seen: Observations, deviation: Floats, faulty: Flags) -> tuple[float, bool]:
    """Return how closely times of the same data go together, and whether they are those of several
    ranks of a replica; else forward and backward are compared.
    """
    elsewhere = data_effects(seen.work, seen.members, stage_groups(seen.members), faulty)
    if (np.isfinite(elsewhere) & np.isfinite(deviation)).any():
        return _correlation(elsewhere, deviation), True
    forward = deviation[:, :, seen.work.phase == FORWARD]
    backward = deviation[:, :, seen.work.phase == BACKWARD]
    if forward.shape != backward.shape:  # not every stretch between communications has its pass
        forward, backward = robust.mean(forward, axis=2), robust.mean(backward, axis=2)
    return _correlation(forward, backward), False


def _repeats(deviation: Floats) -> bool:
    """Return whether rows that are long in one iteration are long in the next: then ranks changed,
    and data are not the reason.
    """
    level = robust.mean(deviation, axis=2)
    return _correlation(level[:, :-1], level[:, 1:]) > IMBALANCE.max_sequence_repetition


def _correlation(one: Floats, other: Floats) -> float:
    """Return the rank correlation of what is known of both; 0 where that is too little."""
    use = np.isfinite(one) & np.isfinite(other)
    return rank_correlation(one[use], other[use]) if use.sum() >= IMBALANCE.min_samples else 0.0


def _uneven_replicas(seen: Observations, faulty: Flags) -> tuple[Floats, Floats, Integers]:
    """Return the time of the longest replica over the mean of all, the difference of the two, and
    the index of the longest replica, (iteration,) each.
    """
    busy = np.where(faulty[:, None], np.nan, seen.busy_ns)
    replica = seen.members.replica
    by_stage = [
        np.stack(
            [robust.mean(busy[rows[replica[rows] == one]], axis=0) for one in np.unique(replica)]
        )
        for rows in stage_groups(seen.members)
    ]
    total = robust.mean(np.stack(by_stage), axis=0)  # (replica, iteration)
    longest, typical = np.nanmax(total, axis=0), robust.mean(total, axis=0)
    return longest / typical, longest - typical, np.argmax(np.nan_to_num(total), axis=0)


def _stage_finding(seen: Observations, heavy: HeavyStage) -> Finding:
    """Report a heavy stage; undecided where slow hardware may be the reason as well."""
    rows = seen.members.rows_of_stage(heavy.stage)
    ranks = tuple(rank for row in rows for rank in seen.members.workers[row])
    last = heavy.stage == int(seen.members.stage.max())
    which = "last stage" if last else "first stage" if heavy.stage == 0 else "stage"
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=tuple(rows.tolist()),
            cause=Cause.STAGE_IMBALANCE,
            owner=Owner.UNDECIDED if heavy.doubt else Owner.JOB,
            slowdown=heavy.ratio,
            interval=heavy.interval,
            course=None,
            q_value=min(1.0, heavy.p_value * len(np.unique(seen.members.stage))),
            num_peers=len(seen.members) - len(rows),
            saved_ns=heavy.saved_ns,
            subject=f"{which} PP{heavy.stage} ({counted(len(ranks), 'rank')})",
            predicate=f"takes {times(heavy.ratio)} the time of the other stages, undecided whether "
            "it has more work or slow hardware"
            if heavy.doubt
            else f"has {times(heavy.ratio)} the work of the other stages",
            evidence=_stage_evidence(heavy),
            advice=DOUBTFUL_ADVICE if heavy.doubt else (STAGE_ADVICE,),
            is_replayed=False,
        ),
    )


def _why_late(seen: Observations, heavy: HeavyStage) -> tuple[str, ...]:
    """Say how it shows that a stage's host launches late; () where it does not. The ends of a
    pipeline have passes of their own.
    """
    is_between = 0 < heavy.stage < int(seen.members.stage.max())
    starved = _starved_by_its_host(seen, heavy)
    if starved or not (heavy.is_late and is_between):
        return starved
    longer = [milliseconds(one) for one in (heavy.excess_forward_ns, heavy.excess_backward_ns)]
    return (
        f"the stage's forward is longer by {longer[0]} a microbatch, its backward by "
        f"{longer[1]}: of whatever a stage has more to compute the backward takes as long "
        "as the forward at least, and mostly twice as long",
        "launches that come late delay the forward more, whose kernels are shorter",
    )


def _starved_by_its_host(seen: Observations, heavy: HeavyStage) -> tuple[str, ...]:
    """Say that the devices of a heavy stage's host wait for their launches, while those of other
    hosts do not, and that its optimizer steps are slower as well; () where that is not so. More
    work of a stage keeps its devices busy, and many small kernels are no optimizer's.

    Example: 73 to 100 % of operations launched just in time on one host, none on the other; stage 0
    takes 2.1 times as long there, and its optimizer steps 3.7 times.
    """
    own = np.array(seen.members.hosts) == heavy.host
    if seen.starved_share is None or own.all():
        return ()
    starved = np.nan_to_num(robust.median(seen.starved_share, axis=1))
    least, most = float(starved[own].min()), float(starved[~own].max())
    optimizer = robust.median(np.where(seen.optimizer_ns > 0, seen.optimizer_ns, np.nan), axis=1)
    slower_log = float(np.log(robust.median(optimizer[own]) / robust.median(optimizer[~own])))
    is_slower = slower_log >= PAIRS.agrees_share * np.log(heavy.ratio)
    is_starved = least >= STARVATION.starved_share and most <= STARVATION.fed_share
    if not (is_starved and is_slower):
        return ()
    return (
        f"{least:.0%} of the operations of its ranks and more were launched only just in time, "
        f"{most:.0%} at most on other hosts: a stage that has more to compute keeps its devices "
        "busy",
        "its optimizer steps are slower than those of other hosts as well",
    )


def _late_host_finding(seen: Observations, heavy: HeavyStage, why: tuple[str, ...]) -> Finding:
    """Report the host of a stage that is heavy because it is launched late."""
    members = seen.members
    rows = tuple(row for row, host in enumerate(members.hosts) if host == heavy.host)
    ranks = members.ranks_of(rows)
    return build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=rows,
            cause=Cause.HOST,
            owner=Owner.NODE,
            slowdown=heavy.ratio,
            interval=heavy.interval,
            course=None,
            q_value=min(1.0, heavy.p_value * len(np.unique(members.stage))),
            num_peers=len(members) - len(rows),
            saved_ns=heavy.saved_ns,
            subject=f"host {heavy.host} (ranks {listed(ranks)})",
            predicate=f"launches late: stage PP{heavy.stage}, which it holds, takes "
            f"{times(heavy.ratio)} the time of the other stages",
            evidence=why,
            advice=HOST_ADVICE,
            is_replayed=False,
        ),
    )


def _stage_evidence(heavy: HeavyStage) -> tuple[str, ...]:
    sentences = []
    if heavy.num_replicas > 1:
        sentences.append(
            f"{heavy.who_agrees} ranks of the stage agree within "
            f"{percent(float(np.exp(heavy.replica_spread)))}, so no single device is the reason"
        )
    sentences.append(_by_pass(heavy) if np.isfinite(heavy.ratio_forward) else OF_KERNELS)
    if heavy.doubt:
        sentences.append(heavy.doubt)
    if np.isfinite(heavy.layer_ratio):
        sentences.append(
            f"its transformer layers take {times(heavy.layer_ratio)} the time of the other stages'"
        )
    return tuple(sentences)


def _by_pass(heavy: HeavyStage) -> str:
    """Say how much longer forward and backward are, and what that means."""
    means = {  # whether hardware may be the reason, and whether both passes are longer alike
        (True, True): "the same ratio, as slow hardware would show",
        (True, False): "extra work of its own kind, on hardware slow or not",
        (False, True): "extra work shared by the stage",
        (False, False): "extra work, not a slow device, which would multiply both alike",
    }
    return (
        f"forward {times(heavy.ratio_forward)} (+{milliseconds(heavy.excess_forward_ns)} a "
        f"microbatch), backward {times(heavy.ratio_backward)} "
        f"(+{milliseconds(heavy.excess_backward_ns)}): "
        f"{means[bool(heavy.doubt), bool(heavy.is_multiplied)]}"
    )


def _who_is_longest(skew: SequenceSkew) -> str:
    """Say how many replicas take turns at being the longest, and which one is most often."""
    which, counts = np.unique(skew.longest, return_counts=True)
    most = int(np.argmax(counts))
    often = f"DP{which[most]} in {counts[most]} of {len(skew.longest)}"
    if len(which) == 1:
        return f"the same replica is the longest in every iteration ({often})"
    return (
        f"{len(which)} of {skew.num_replicas} replicas are the longest in one iteration or another "
        f"({often})"
    )


def _sequence_finding(seen: Observations, skew: SequenceSkew) -> Finding:
    """Report uneven replicas; no rank is named, because no rank is always the slow one."""
    spread = percent(float(np.exp(skew.spread)))
    where = (
        "ranks of the same replica are slow on the same microbatches"
        if skew.across_ranks
        else "forward and backward of a microbatch are slow together"
    )
    subject = "the replicas" if skew.doubt else "the microbatches"
    predicate = f"are uneven: the longest replica computes {times(skew.ratio)} the mean"
    if skew.doubt:
        predicate = f"do not keep step: the longest computes {times(skew.ratio)} the mean"
    return build_finding(
        seen,
        Claim(
            ranks=(),
            rows=(),
            cause=Cause.UNKNOWN if skew.doubt else Cause.SEQUENCE_IMBALANCE,
            owner=Owner.UNDECIDED if skew.doubt else Owner.JOB,
            slowdown=skew.ratio,
            interval=skew.interval,
            course=None,
            q_value=skew.p_value,
            num_peers=len(seen.members),
            saved_ns=skew.saved_ns,
            subject=subject,
            predicate=predicate,
            whose=", undecided whether their data or their devices vary" if skew.doubt else "",
            evidence=(
                f"the same microbatch slot differs between replicas by {spread} (robust standard "
                f"deviation), and {_who_is_longest(skew)}",
                f"{where} (rank correlation {skew.correlation:.2f})",
                *((skew.doubt,) if skew.doubt else ()),
            ),
            advice=(*(DEVICES_ADVICE if skew.doubt else ()), DATA_ADVICE),
            is_replayed=False,
        ),
    )


STAGES = CauseSpec(cause=Cause.STAGE_IMBALANCE, search=_search_stages)
SEQUENCES = CauseSpec(cause=Cause.SEQUENCE_IMBALANCE, search=_search_sequences)
