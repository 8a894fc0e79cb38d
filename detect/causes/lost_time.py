"""Search for time that ranks lose next to computing, and the finding it makes.

Such times add up, so they are not compared as ratios: the measure is the excess over the peers'
time as a share of the iteration. Example: a rank that waits 12 ms for its data where its peers wait
2 ms, in steps of 200 ms, has 0.05: it loses 5 % of every step.

A cause says with a `Loss` who is compared with whom, and in which words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from detect.causes.finding import Claim, build_finding
from detect.causes.spec import Answer, Inquiry, mask_of
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Usual
from detect.stats.residuals import stage_groups
from detect.stats.search import SearchTask, Suspect, search
from detect.text import counted, milliseconds, percent, place, ranks_of
from detect.thresholds import BURSTS, LOSSES, POWER, SEARCH
from megascan.arrays import Flags, Floats, Integers

OF_FIRST = (
    "it is the first rank of the job's only TP group, which may load for all of it: a second "
    "replica, or the loader timed alone, decides"
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How one kind of lost time is searched, and its words. Rows of no group have no peers."""

    cause: Cause
    name: str
    groups: list[Integers]
    """Rows that are compared with each other."""
    owner: Callable[[Suspect], Owner]
    predicate: str
    """Of the headline; {time} is what the rank loses, {over} what it loses above its peers."""
    advice: Callable[[Suspect], tuple[str, ...]]
    bursty: bool = False
    """Comes in rare bursts on healthy ranks too (garbage collection)."""
    least_share: float = 0.0
    """Share of the iteration below which such a difference has other reasons."""
    excuses_slow: bool = False
    """Whether slow computing explains it: rows that are slow are not named."""
    base_ns: Callable[[int, float, float], float] | None = None
    """What the slowdown refers to, by row, own time and excess; without it the rank's compute."""
    stands_out: bool = False
    """Whether a row must lose more than the others of its group do in nearly any iteration, however
    many they are: where the reason is shared, such as storage, everybody has its turn."""
    evidence: Callable[[Suspect], tuple[str, ...]] = lambda suspect: ()
    without: Callable[[tuple[Suspect, ...]], tuple[Suspect, ...]] = lambda suspects: suspects
    """Leaves out suspects that other ones explain."""


@dataclass(frozen=True)
class _Lost:
    """A loss as it was found."""

    loss: Loss
    time_ns: Floats
    excess_ns: Floats
    """(row, iteration): above the peers."""


def lost_time(inquiry: Inquiry, loss: Loss) -> Answer:
    """Name the rows that lose more time of this kind than their peers."""
    seen = inquiry.seen
    num_rows, step_ns = len(seen.members), float(np.median(seen.iteration_ns))
    time_ns = seen.lost_ns[loss.cause]

    def compare(excluded: Flags) -> Floats:
        excess = np.full_like(time_ns, np.nan)
        for rows in loss.groups:
            expected = robust.expected_from_others(time_ns[rows], excluded[rows])
            excess[rows] = time_ns[rows] - expected
        return np.asarray(excess / step_ns)

    is_cpu = seen.members.device_kind == "cpu"
    share = LOSSES.cpu_floor_share if is_cpu else LOSSES.gpu_floor_share
    task = SearchTask(
        compare=compare,
        num_rows=num_rows,
        num_tests=inquiry.num_tests,
        floor=max((inquiry.settings.min_slowdown - 1.0) * share, loss.least_share),
        usual=Usual(floor=LOSSES.noise_share, spread=LOSSES.spread_share, bursty=loss.bursty),
        forbidden=inquiry.slow if loss.excuses_slow else np.zeros(num_rows, dtype=bool),
        groups=tuple(loss.groups),
        by_majority=True,
    )
    result = search(task, inquiry.settings)
    excluded = mask_of([one.row for one in result.suspects], num_rows)
    lost = _Lost(loss, time_ns, np.nan_to_num(compare(excluded) * step_ns))
    told = tuple(
        one
        for one in result.suspects
        if _told_apart(lost, one, excluded) and _mean_share(one) >= LOSSES.least_mean_share
    )
    least = 1.0 + max(inquiry.detectable_effect(result.noise), task.floor)
    because = inquiry.limited_by(result.noise)
    return Answer(
        findings=tuple(_finding(seen, lost, one) for one in loss.without(told)),
        least_slowdown=least,
        least_because=because,
        hides="" if is_cpu or loss.cause == Cause.GC else _hides(loss, least, because),
    )


def _hides(loss: Loss, least: float, because: str) -> str:
    """Say which fault of a node, of a size that matters, would not have been found; "" if none."""
    if least < POWER.healthy_ratio:
        return ""
    much = "all" if least >= POWER.blind_ratio else f"{least - 1.0:.0%}"
    return (
        f"a rank that loses {much} of an iteration to its {loss.cause.value} would not have been "
        f"found: {because}"
    )


def _finding(seen: Observations, lost: _Lost, suspect: Suspect) -> Finding:
    loss, row, course = lost.loss, suspect.row, suspect.course
    active = course.active
    own = float(np.nanmedian(lost.time_ns[row][active]))
    excess = np.where(active, np.maximum(lost.excess_ns[row], 0.0), 0.0)
    typical = float(np.median(excess[active]))
    base = loss.base_ns(row, own, typical) if loss.base_ns else float(np.median(seen.busy_ns[row]))
    slowdown = 1.0 + typical / max(base, 1.0)
    reach = SEARCH.interval_sigmas * course.standard_error / max(course.effect, 1e-9)
    members = seen.members
    over = f"{milliseconds(typical)} ({percent(1 + course.effect)[:-2]} % of the iteration)"
    return build_finding(
        seen,
        Claim(
            ranks=members.workers[row],
            rows=(row,),
            cause=loss.cause,
            owner=loss.owner(suspect),
            slowdown=slowdown,
            interval=(
                max(1.0, 1 + (slowdown - 1) * (1 - reach)),
                1 + (slowdown - 1) * (1 + reach),
            ),
            course=course,
            q_value=suspect.q_value,
            num_peers=_num_peers(loss, row),
            saved_ns=excess,
            subject=f"{ranks_of(members, row)} ({place(members, row)})",
            predicate=loss.predicate.format(time=milliseconds(own), over=over),
            evidence=(*_evidence(lost, suspect, own), *loss.evidence(suspect)),
            advice=loss.advice(suspect),
        ),
    )


def _mean_share(suspect: Suspect) -> float:
    """Return the share of all time in the window that a row loses above its peers."""
    return suspect.course.effect * float(np.mean(suspect.course.active))


def _told_apart(lost: _Lost, suspect: Suspect, excluded: Flags) -> bool:
    """Return whether a row loses more than its peers in nearly any two of their iterations.

    Two rows show no rate at which sound ones have bursts; such times have heavy tails, and one
    long pause of the one is no level. `excluded` rows are suspects, too, and no peers.
    """
    rows = next(rows for rows in lost.loss.groups if suspect.row in rows)
    if len(rows) != 2 and not lost.loss.stands_out:
        return True
    own = lost.time_ns[suspect.row][suspect.course.active]
    others = lost.time_ns[rows[(rows != suspect.row) & ~excluded[rows]]]
    other = others[np.isfinite(others)]
    more = np.searchsorted(np.sort(other), own) / max(len(other), 1)
    return not len(other) or float(np.mean(more)) >= LOSSES.separated_share


def _num_peers(loss: Loss, row: int) -> int:
    return next(len(rows) - 1 for rows in loss.groups if row in rows)


def _evidence(lost: _Lost, suspect: Suspect, own: float) -> tuple[str, ...]:
    active = suspect.course.active
    excess = float(np.median(lost.excess_ns[suspect.row][active]))
    peers = counted(_num_peers(lost.loss, suspect.row), "peer")
    return (
        f"{lost.loss.name}: {milliseconds(own)} an iteration against "
        f"{milliseconds(max(own - excess, 0.0))} of its {peers}",
        f"above them in {suspect.course.share:.0%} of these "
        f"{counted(int(active.sum()), 'iteration')}",
    )


def stage_peers(seen: Observations) -> list[Integers]:
    """Return the rows of each stage, or all rows together where a stage has only one."""
    groups = stage_groups(seen.members)
    smallest = min(len(rows) for rows in groups)
    return groups if smallest > 1 else [np.arange(len(seen.members))]


def others_load_as_long(seen: Observations, row: int, others: Integers, active: Flags) -> bool:
    """Return whether loading itself takes the `others` about as long, and only their devices had
    less to wait for: then what all of them load from is slow.
    """
    if seen.loading_ns is None or not len(others):
        return False
    own = float(robust.median(seen.loading_ns[row][active]))
    theirs = float(robust.median(seen.loading_ns[others][:, active]))
    return theirs * LOSSES.loader_ratio > own


def mates_that_load(seen: Observations) -> Integers | None:
    """Return the rows of the job's only TP group, where several of them load for themselves.

    Often the first rank alone loads and hands on what it has; the others then lose next to nothing
    in any iteration.
    """
    loading = np.nan_to_num(seen.lost(Cause.LOADER))
    quiet = np.quantile(loading, BURSTS.quiet_share, axis=1)
    rows = np.flatnonzero(quiet > LOSSES.noise_share * float(np.median(seen.iteration_ns)))
    places = {*zip(seen.members.replica.tolist(), seen.members.stage.tolist(), strict=True)}
    return rows if len(rows) > 1 and len(places) == 1 else None
