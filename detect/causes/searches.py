"""Searches that several causes share: rows that compute slowly, and time that is lost.

A search finds suspects; the causes decide whose fault it is, and in which words to say it.

**Slow rows** (`search_compute`): who is slower than its peers, by how much, and when. Peers are the
other ranks of the stage (DP, TP, CP). A stage with one or two ranks has too few; then transformer
layers of other stages, which have the same shape, join in. Whose fault a slow row is,
`detect.causes.compute_owner` judges.

**Lost time** (`lost_time`): time that ranks lose besides computing, and the finding it makes. Lost
times add up, so they are not compared as ratios: the measure is the excess over the peers'
time as a share of the iteration. Example: a rank that waits 12 ms for its data where its peers wait
2 ms, in steps of 200 ms, has 0.05: it loses 5 % of every step.

A cause says with a `Loss` who is compared with whom, and in which words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from detect.causes.device import HOST_ADVICE, optimizer_residuals
from detect.causes.finding import Answer, Claim, Inquiry, build_finding, placed_at
from detect.observe.members import Members
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD, Work
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.stats.noise import Noise, Usual
from detect.stats.residuals import (
    Residuals,
    compare_within,
    data_of,
    deviations,
    peer_groups,
    stage_groups,
)
from detect.stats.search import SearchTask, Suspect, search
from detect.stats.stretches import Course
from detect.text import counted, milliseconds, peers_text, percent, subject_of
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.bursts import BURSTS, LOSSES
from detect.thresholds.devices import COMPUTE as LIMITS
from detect.thresholds.devices import PAIRS
from detect.thresholds.hosts import HOSTS
from detect.thresholds.observing import WINDOW
from detect.thresholds.statistics import PERSISTENCE, POWER, SEARCH
from megascan.arrays import Flags, Floats, Integers, mask_of


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """A row that computes slowly, and against whom it was compared."""

    suspect: Suspect
    peers: Integers
    """Rows that it was compared with."""
    across_stages: bool
    """Whether the row was compared with other stages, by transformer layers."""
    is_mean: bool
    """Whether the row is slow on the mean of its passes, not in its typical pass."""
    by_phase: tuple[float, float]
    """Log slowdown of forward and of backward."""
    optimizer: float
    """Log slowdown of the optimizer step; NaN when not comparable."""

    @property
    def num_peers(self) -> int:
        """Return how many rows the slow row was compared with."""
        return len(self.peers)


@dataclass(frozen=True, kw_only=True)
class ComputeSearch:
    """Result over all rows. In `residuals` slow rows are nobody's peers."""

    slow: tuple[SlowRow, ...]
    noise: Noise
    num_compared: int
    """Rows that have at least one peer."""
    residuals: Residuals
    optimizer: Floats
    """(row, iteration): log optimizer time less that of the stage's other rows."""
    pool: Residuals | None
    """Residuals against all stages' transformer layers; None where not needed or not traced."""

    @property
    def slow_rows(self) -> Flags:
        """Flag the rows that compute slowly, (row,)."""
        return mask_of([one.suspect.row for one in self.slow], len(self.residuals.value))


def search_compute(inquiry: Inquiry) -> ComputeSearch:
    """Search the rows of each stage; the rows of lonely stages by the layers of all stages."""
    seen = inquiry.seen
    groups = peer_groups(seen.work, seen.members)
    everybody = [np.arange(len(seen.members))]
    smallest = min(len(rows) for rows in groups)
    # kernels of one name and launch are the same work on both of two stages, layers need not be
    are_alike = not seen.tells_passes or seen.has_equal_layers
    least = 2 if are_alike and smallest == 1 else LIMITS.min_pool
    of_stages = _Comparison(seen.work, groups)
    if seen.layers is None or smallest >= LIMITS.min_pool or len(seen.members) < least:
        return _search_field(inquiry, of_stages)
    if smallest == 1:
        return _search_field(inquiry, _Comparison(seen.layers, everybody, across_stages=True))
    nobody = np.zeros(len(seen.members), dtype=bool)
    level = robust.centre(compare_within(seen.layers, seen.members, everybody, nobody).value)
    shown = np.asarray(level >= LIMITS.lone_floor_log)
    found = _search_field(inquiry, of_stages, shown)
    pool = compare_within(seen.layers, seen.members, everybody, found.slow_rows)
    return replace(found, pool=pool)


@dataclass(frozen=True)
class _Comparison:
    """Operations to compare, and the groups of rows to compare within."""

    work: Work
    groups: list[Integers]
    across_stages: bool = False
    is_mean: bool = False
    known: dict[bytes, Residuals] = field(default_factory=dict)
    """Residuals computed so far, by the excluded rows."""

    def compare(self, members: Members, excluded: Flags) -> Residuals:
        key = excluded.tobytes()
        if key not in self.known:
            self.known[key] = compare_within(self.work, members, self.groups, excluded)
        return self.known[key]


def _search_field(
    inquiry: Inquiry, field: _Comparison, shown: Flags | None = None
) -> ComputeSearch:
    """Search one field; `shown` rows are slow against all stages, too, so they may be suspected
    when a peer changes, even if they did not change themselves.
    """
    seen = inquiry.seen
    members, num_rows = seen.members, len(seen.members)
    is_cpu = members.device_kind == "cpu"
    own = robust.median(field.work.log_ns, axis=2)
    if shown is not None:
        own[shown] = np.nan
    task = SearchTask(
        compare=lambda excluded: field.compare(members, excluded).value,
        num_rows=num_rows,
        num_tests=inquiry.num_tests,
        floor=float(np.log(least_slowdown(seen, inquiry.settings))),
        usual=_usual(inquiry, field),
        forbidden=np.zeros(num_rows, dtype=bool),
        groups=tuple(field.groups),
        own=own,
        patience=SEARCH.patience_for_hosts,
    )
    result = search(task, inquiry.settings)
    excluded = mask_of([one.row for one in result.suspects], num_rows)
    residuals = field.compare(members, excluded)
    optimizer = np.full_like(seen.optimizer_ns, np.nan)
    if not field.across_stages:
        optimizer = optimizer_residuals(seen, field.groups, excluded)
    described = [_describe(one, residuals, optimizer, field, excluded) for one in result.suspects]
    return ComputeSearch(
        slow=tuple(one for one in described if not (is_cpu and _is_cache_effect(one))),
        noise=result.noise,
        num_compared=int((residuals.num_peers > 0).sum()),
        residuals=residuals,
        optimizer=optimizer,
        pool=residuals if field.across_stages else None,
    )


def search_means(inquiry: Inquiry) -> ComputeSearch | None:
    """Search the mean of all passes of an iteration instead of the typical one; None where some
    rank has no peer, or no iteration has two passes of a kind.

    A device that is throttled for a part of each iteration is as quick as ever in its typical pass.
    Example: of three forward and three backward passes the first of either kind and the last take
    1.3 to 1.7 times as long in every iteration, the others as long as those of peers.
    """
    seen = inquiry.seen
    groups = peer_groups(seen.work, seen.members)
    has_one = min(int((seen.work.phase == one).sum()) for one in (FORWARD, BACKWARD)) < 2
    if has_one or min(len(rows) for rows in groups) < 2:
        return None
    nobody = np.zeros(len(seen.members), dtype=bool)
    work = averaged(seen.work, groups, nobody)
    return _search_field(inquiry, _Comparison(work, groups, is_mean=True))


def averaged(work: Work, groups: list[Integers], known: Flags) -> Work:
    """Return work with one operation per phase: the mean of a row's passes over its group's."""
    ratio = np.exp(deviations(work, groups, known))
    phases = (FORWARD, BACKWARD)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = [np.log(robust.mean(ratio[:, :, work.phase == one], axis=2)) for one in phases]
    return Work(
        log_ns=np.stack(mean, axis=2),
        phase=np.array(phases, dtype=np.int64),
        microbatch=np.zeros(len(phases), dtype=np.int64),
    )


def in_all_passes(seen: Observations, rows: Sequence[int], effect: float, slow: Flags) -> bool:
    """Return whether nearly all passes of some rows are slow by half of a log `effect` and more."""
    least = PAIRS.agrees_share * effect
    over = deviations(seen.work, stage_groups(seen.members), slow)[rows]
    known = over[np.isfinite(over)]
    return bool(len(known)) and float(np.mean(known >= least)) >= WINDOW.passes_share


def _usual(inquiry: Inquiry, field: _Comparison) -> Usual:
    """Return what is known of sound devices before looking."""
    seen = inquiry.seen
    is_cpu = seen.members.device_kind == "cpu"
    floor = float(np.log(least_slowdown(seen, inquiry.settings)))
    spread = LIMITS.cpu_spread_log if is_cpu else LIMITS.gpu_spread_log
    data = data_of(field.work, seen.members, field.groups)
    return Usual(
        floor=LIMITS.cpu_noise_log if is_cpu else LIMITS.gpu_noise_log,
        spread=min(spread, floor * LIMITS.spread_of_floor_share),
        level_error=data.level_error,
        most=LIMITS.cpu_most_log if is_cpu else LIMITS.gpu_most_log,
        tail_degrees=LIMITS.tail_degrees,
        scattered=not data.used,
    )


def _is_cache_effect(slow: SlowRow) -> bool:
    """Return whether passes of a CPU process are a little slower while its optimizer is not."""
    effect = slow.suspect.course.effect
    return effect < np.log(LIMITS.cache_ratio) and slow.optimizer < LIMITS.cache_share * effect


def _describe(
    suspect: Suspect, residuals: Residuals, optimizer: Floats, field: _Comparison, excluded: Flags
) -> SlowRow:
    row, active = suspect.row, suspect.course.active
    phases = [
        float(robust.median(residuals.by_phase[phase, row][active]))
        for phase in (FORWARD, BACKWARD)
    ]
    group = next(rows for rows in field.groups if row in rows)
    return SlowRow(
        suspect=suspect,
        peers=group[~excluded[group] & (group != row)],
        across_stages=field.across_stages,
        is_mean=field.is_mean,
        by_phase=(phases[0], phases[1]),
        optimizer=float(robust.median(optimizer[row][active])),
    )


def least_slowdown(seen: Observations, settings: DetectorSettings) -> float:
    """Return the effect floor of compute: higher where communication is mixed into the CPU time."""
    return max(settings.min_slowdown, LIMITS.mixed_ratio if seen.mixes_communication else 1.0)


OF_ITS_HOST = (
    "its host stops between launches as well, and what loads in the rank's own process stands "
    "still with it"
)
OF_GROUP = (
    "communication inside its group was not recorded: which of these ranks it is, if not all, this "
    "trace cannot tell"
)
OF_PLACE = (
    "ranks at the same place in other TP groups lose time as well: what that place has to do (load "
    "a batch and hand it out), or a wait that the trace does not show, is likelier than as many "
    "slow hosts"
)
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
    predicate: str
    """Part of the statement; {time} is what the rank loses, {over} that above its peers."""
    advice: Callable[[Suspect, Owner], tuple[str, ...]]
    owner: Callable[[Suspect], Owner] = lambda suspect: Owner.NODE
    """Return whose fault the loss is where there is no doubt."""
    doubt: Callable[[Suspect], str] = lambda suspect: ""
    """Return why the fault may be another's, as evidence for an undecided finding; "" if none."""
    bursty: bool = False
    """Whether healthy ranks lose the time in rare bursts, too (garbage collection)."""
    least_share: float = 0.0
    """Share of the iteration below which a difference between ranks has other reasons."""
    excuses_slow: bool = False
    """Whether slow computing explains the loss, so that rows that compute slowly are not named."""
    base_ns: Callable[[int, float, float], float] | None = None
    """Return the time that the slowdown refers to, from row, own time and excess; None for the
    rank's compute."""
    most_cost: Callable[[Suspect], float] = lambda suspect: np.inf
    """Return what an iteration may cost at most by the loss, as a ratio."""
    stands_out: bool = False
    """Whether a row must lose more than the others of its group, however many, do in nearly any
    iteration: where the reason is shared, such as storage, everybody has its turn."""
    evidence: Callable[[Suspect], tuple[str, ...]] = lambda suspect: ()
    drop_explained: Callable[[tuple[Suspect, ...]], tuple[Suspect, ...]] = lambda suspects: suspects
    """Leave out suspects that other suspects explain."""

    def peers_of(self, row: int) -> Integers:
        """Return the rows that a row is compared with."""
        group = next(rows for rows in self.groups if row in rows)
        peers: Integers = group[group != row]
        return peers


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
    excused = np.zeros(num_rows, dtype=bool)
    if loss.excuses_slow and inquiry.slow.any():
        excused = inquiry.slow & ~_beyond_computing(seen, compare(excused))
    task = SearchTask(
        compare=compare,
        num_rows=num_rows,
        num_tests=inquiry.num_tests,
        floor=max((inquiry.settings.min_slowdown - 1.0) * share, loss.least_share),
        usual=Usual(floor=LOSSES.noise_share, spread=LOSSES.spread_share, bursty=loss.bursty),
        forbidden=excused,
        groups=tuple(loss.groups),
        by_majority=True,
    )
    result = search(task, inquiry.settings)
    excluded = mask_of([one.row for one in result.suspects], num_rows)
    lost = _Lost(loss, time_ns, np.nan_to_num(compare(excluded) * step_ns))
    told = tuple(
        one
        for one in result.suspects
        if _exceeds_nearly_always(lost, one, excluded, inquiry.settings.min_share)
        and one.course.effect * float(np.mean(one.course.active)) >= LOSSES.least_mean_share
    )
    if not result.suspects and (loss.stands_out or not is_cpu):
        told = tuple(_without_overlap(lost, task, inquiry.settings, step_ns))
    least = 1.0 + max(inquiry.detectable_effect(result.noise), task.floor)
    because = inquiry.limited_by(result.noise)
    return Answer(
        findings=tuple(_loss_finding(seen, lost, one) for one in loss.drop_explained(told)),
        least_slowdown=least,
        least_because=because,
        hides="" if is_cpu or loss.cause == Cause.GC else _hides(loss, least, because),
    )


def _beyond_computing(seen: Observations, excess: Floats) -> Flags:
    """Return the rows that lose more above their peers than they compute, (row,), whatever a slow
    device adds to it. `excess`, (row, iteration), are shares of the median iteration.

    Example: batches come 107 ms late, in an iteration with 52 ms of computing.
    """
    lost_ns = robust.median(excess, axis=1) * float(np.median(seen.iteration_ns))
    return np.asarray(lost_ns > robust.median(seen.busy_ns, axis=1))


def _hides(loss: Loss, least: float, because: str) -> str:
    """Say which fault of a node, of a size that matters, would not have been found; "" if none."""
    if least < POWER.healthy_ratio:
        return ""
    much = "all" if least >= POWER.blind_ratio else f"{least - 1.0:.0%}"
    return (
        f"a rank that loses {much} of an iteration to its {loss.cause.value} would not have been "
        f"found: {because}"
    )


def _loss_finding(seen: Observations, lost: _Lost, suspect: Suspect) -> Finding:
    loss, row, course = lost.loss, suspect.row, suspect.course
    active = course.active
    own = float(np.nanmedian(lost.time_ns[row][active]))
    excess = np.where(active, np.maximum(lost.excess_ns[row], 0.0), 0.0)
    typical = float(np.median(excess[active]))
    who, at = loader_of(seen, row, active) if loss.cause is Cause.LOADER else (seen.members, row)
    ranks = who.workers[at]
    doubt = loss.doubt(suspect) or OF_GROUP * (loss.cause is not Cause.GC and len(ranks) > 1)
    owner = Owner.UNDECIDED if doubt else loss.owner(suspect)
    evidence = (*_loss_evidence(lost, suspect, own), *loss.evidence(suspect))
    base = loss.base_ns(row, own, typical) if loss.base_ns else float(np.median(seen.busy_ns[row]))
    slowdown = 1.0 + typical / max(base, 1.0)
    reach = SEARCH.interval_sigmas * course.standard_error / max(course.effect, 1e-9)
    members = seen.members
    over = f"{milliseconds(typical)} ({percent(1 + course.effect)[:-2]} % of the iteration)"
    finding = build_finding(
        seen,
        Claim(
            ranks=ranks,
            rows=(row,),
            cause=loss.cause,
            owner=owner,
            slowdown=slowdown,
            interval=(
                max(1.0, 1 + (slowdown - 1) * (1 - reach)),
                1 + (slowdown - 1) * (1 + reach),
            ),
            course=course,
            q_value=suspect.q_value,
            num_peers=len(loss.peers_of(row)),
            saved_ns=excess,
            subject=subject_of(who, at),
            predicate=loss.predicate.format(time=milliseconds(own), over=over),
            evidence=(*evidence, doubt) if doubt else evidence,
            advice=loss.advice(suspect, owner),
            most_cost=loss.most_cost(suspect),
        ),
    )
    return finding if who is members else placed_at(finding, who, at)


def loader_of(seen: Observations, row: int, active: Flags) -> tuple[Members, int]:
    """Return the rank that loads for the group that a row stands for, where the trace tells: one
    that loads for far longer than all others of it, or alone loads. Else the row itself.

    Example: the first rank of a group of four loads for 840 ms, the others for nothing.
    """
    each, group = seen.workers, seen.members.workers[row]
    if each is None or len(group) < 2:
        return seen.members, row
    rows = list(each.members.rows_with(group))
    usual_ns = np.nan_to_num(robust.median(each.loading_ns[rows][:, active], axis=1))
    longest = usual_ns >= usual_ns.max() / HOSTS.loading_ratio
    if longest.sum() > 1:
        return seen.members, row
    return each.members, rows[int(np.argmax(usual_ns))]


def _exceeds_nearly_always(
    lost: _Lost, suspect: Suspect, excluded: Flags, min_share: float
) -> bool:
    """Return whether nearly any iteration of a row loses more than nearly any of its peers'.

    Asked of pairs and where `stands_out` is set. Two rows do not show how often sound rows have
    bursts; lost times have heavy tails, and one long pause of a row is no level. `excluded` rows
    are suspects, too, and no peers.

    Of several peers it is enough if most iterations of the row, `min_share`, lose more than any of
    theirs. Example: 107 to 121 ms in 8 of 10 iterations, and nothing in two, whose batches came
    while another rank saved a checkpoint; at most 0.9 ms in the 30 iterations of its peers.
    """
    peers = lost.loss.peers_of(suspect.row)
    if len(peers) != 1 and not lost.loss.stands_out:
        return True
    own = lost.time_ns[suspect.row][suspect.course.active]
    others = lost.time_ns[peers[~excluded[peers]]]
    other = others[np.isfinite(others)]
    more = np.searchsorted(np.sort(other), own) / max(len(other), 1)
    if not len(other) or float(np.mean(more)) >= LOSSES.separated_share:
        return True
    return len(peers) > 1 and float(np.mean(own > other.max())) >= min_share


def _without_overlap(
    lost: _Lost, task: SearchTask, settings: DetectorSettings, step_ns: float
) -> Iterator[Suspect]:
    """Yield the row of each group that loses more in nearly all its iterations than any other ever.

    A slow loader, or a host that others use, varies by far more than those that are in time:
    against its own noise half of a step may be chance, and a pair knows no other noise. But if all
    rows were alike, the k largest of their N values would all be among the n of one row with
    probability C(n, k) / C(N, k). Asked of pairs, and where `stands_out` is set.

    Example: 52 to 116 ms in 8 iterations, 0.8 to 1.2 ms on the one other rank: 1 in 12,870.

    Of a pair the row must lose more than all other rows of the job that lose such time as well.
    Example: 88 to 251 ms in 8 iterations, 2.0 to 3.1 on its peer, 0.6 to 1.8 on two ranks of the
    first stage: 1 in 10 million.
    """
    is_known: Flags = np.asarray(np.isfinite(lost.time_ns).all(axis=1))
    everybody = np.flatnonzero(is_known & (np.median(lost.time_ns, axis=1) > 0))
    for group in lost.loss.groups:
        is_asked = len(group) == 2 or (len(group) > 2 and lost.loss.stands_out)
        if not is_asked or not is_known[group].all():
            continue
        rows = group if len(group) > 2 else np.union1d(group, everybody)
        time_ns = lost.time_ns[rows]
        if rows[np.argmax(time_ns.sum(axis=1))] not in group:
            continue
        slow = int(np.argmax(time_ns.sum(axis=1)))
        own, others = time_ns[slow], np.delete(time_ns, slow, axis=0)
        share = (own - np.median(others, axis=0)) / step_ns
        effect, length = float(np.median(share)), len(own)
        num_more = int((own > others.max()).sum())
        least = length if len(rows) == 2 else settings.min_share * length
        chance = special.comb(length, num_more) / special.comb(time_ns.size, num_more)
        q_value = task.num_tests * len(rows) * float(chance)
        is_apart = num_more >= least and q_value <= settings.false_discovery_rate
        if is_apart and effect >= max(task.floor, settings.min_slowdown - 1.0):
            error = float(np.std(share) / np.sqrt(length))
            course = Course.of(np.ones(length, dtype=bool), effect, error)
            yield Suspect(int(rows[slow]), course, min(1.0, q_value), LOSSES.spread_share)


def _loss_evidence(lost: _Lost, suspect: Suspect, own: float) -> tuple[str, ...]:
    active = suspect.course.active
    excess = float(np.median(lost.excess_ns[suspect.row][active]))
    num_peers = len(lost.loss.peers_of(suspect.row))
    peers = peers_text(num_peers)
    return (
        f"{lost.loss.name}: {milliseconds(own)} an iteration against "
        f"{milliseconds(max(own - excess, 0.0))} of its {peers}",
        f"above {'it' if num_peers == 1 else 'them'} in {suspect.course.share:.0%} of these "
        f"{counted(int(active.sum()), 'iteration')}",
    )


def stage_peers(seen: Observations) -> list[Integers]:
    """Return the rows of each stage, or all rows together where a stage has only one."""
    groups = stage_groups(seen.members)
    smallest = min(len(rows) for rows in groups)
    return groups if smallest > 1 else [np.arange(len(seen.members))]


def loading_of(seen: Observations) -> Floats:
    """Return how long loading lasts, (row, iteration) ns, or what a row loses to it where only that
    is known; NaN for rows that never load.
    """
    return seen.lost(Cause.LOADER) if seen.loading_ns is None else seen.loading_ns


LOADING_AXES = ("pp", "tp")
"""Ranks at the same place on these load the same."""


def ranks_that_load(seen: Observations, rows: Integers) -> tuple[int, ...]:
    """Return the ranks of `rows` that load themselves: often the first one of a TP group loads for
    all, and the others are done in no time. All of them where nobody knows.
    """
    every, ranks = seen.each_rank, seen.members.ranks_of(rows.tolist())
    own = [int(row) for row in every.members.rows_with(ranks)]
    mean_ns = np.nan_to_num(every.loading_ns[own]).mean(axis=1)
    loads = mean_ns >= LOSSES.loads_share * mean_ns.max(initial=0.0)
    return every.members.ranks_of([row for row, one in zip(own, loads, strict=True) if one])


def load_as_long(own_ns: float, others_ns: Floats) -> bool:
    """Return whether loading of others, (row, iteration), takes about as long as `own_ns` now and
    then: then what all of them load from may be slow.

    Rows that never load, NaN throughout, do not count: of a TP group one rank may load for all.
    """
    loads = np.isfinite(others_ns).any(axis=1)
    waits = np.nan_to_num(others_ns[loads]) >= own_ns / LOSSES.loader_ratio
    return bool(waits.size) and float(waits.mean()) >= BURSTS.shared_storage_share


def _is_slow_everywhere(own_ns: float, others_ns: Floats, step_ns: float) -> bool:
    """Return whether loading takes others, (row, iteration), long anyway: a good part of an
    iteration, and a tenth of `own_ns` and more, some more than others. Where all have to wait for
    their data, some rank has to wait for longest. Ranks that only wait for it in a copy load
    equally long in each iteration.

    Example: 140 to 300 ms on the typical other rank, and 1,016 ms.
    """
    loads = others_ns[np.isfinite(others_ns).any(axis=1)]
    if not loads.size:
        return False
    usual, share = float(np.nanmedian(loads)), HOSTS.usual_loads_share
    are_many = len(loads) >= HOSTS.min_control
    ratio = loads / robust.median(loads, axis=0) if are_many else loads
    apart = LOSSES.loader_ratio if are_many else LOSSES.varies_ratio  # many: than by documents
    short, long = np.nanquantile(ratio, (1.0 - share, share))
    least = max(own_ns / LOSSES.most_of_cores_ratio, BURSTS.sure_host_share * step_ns)
    return bool(usual >= least and long >= apart * short)


def _became_slow_alone(own_ns: Floats, others_ns: Floats, active: Flags) -> bool:
    """Return whether a row, (iteration,), loads for longer than the others, (row, iteration), ever
    do in nearly all `active` iterations, and like them in the rest, in which they load as long as
    ever: storage that becomes slow does so for all that read from it.

    Example: 64 ms in four iterations and then 311, on three others 41 ms before and after.
    """
    if int((~active).sum()) < PERSISTENCE.min_normal or not is_beyond_all(
        own_ns[active], others_ns
    ):
        return False
    before, then = (float(robust.median(others_ns[:, one])) for one in (~active, active))
    was_alike = float(robust.median(own_ns[~active])) <= LOSSES.loader_ratio * before
    return was_alike and then <= LOSSES.varies_ratio * before


def tells_no_storage(own_ns: Floats, others_ns: Floats) -> bool:
    """Return whether long loads of others say nothing of what all load from: nearly all `own_ns`,
    (load,), are longer than any of theirs, (row, iteration), or theirs are all equally long. Hosts
    that are ahead of their devices wait in a copy for as long as an iteration takes; storage
    varies.

    Example: 26 loads of 302 to 322 ms, and 130 ms for which one other device stands idle.
    """
    known = others_ns[np.isfinite(others_ns)]
    if not len(known) or not len(own_ns):
        return False
    usual, long = np.median(known), np.quantile(known, HOSTS.usual_loads_share)
    are_long = usual >= np.median(own_ns) / LOSSES.loader_ratio
    are_waits = are_long and long <= LOSSES.held_back_ratio * usual
    return bool(are_waits) or is_beyond_all(own_ns, others_ns)


def is_beyond_all(own_ns: Floats, others_ns: Floats) -> bool:
    """Return whether nearly all loads `own_ns`, (load,), are longer than any of `others_ns`, (row,
    iteration), ever, and not by chance: if all loaded alike, the k of n own loads that are longer
    would be the k longest of all N with probability C(n, k) / C(N, k).

    A storage that all share is slow for one now and for another then. Example: 720 ms in 6
    iterations, 495 ms at most on the other rank, whose loading lasts while it waits for this one.
    """
    others_ns = others_ns[np.isfinite(others_ns)]
    if not len(own_ns) or not len(others_ns):
        return False
    num_longer, num_own = int((own_ns > others_ns.max()).sum()), len(own_ns)
    num_all = num_own + len(others_ns)
    chance = special.comb(num_own, num_longer) / special.comb(num_all, num_longer)
    is_nearly_all = num_longer >= LOSSES.separated_share * num_own
    return is_nearly_all and bool(chance <= LOSSES.beyond_all_chance)


def on_other_hosts(members: Members, row: int, others: Integers) -> Integers:
    """Return those of the `others` that run on other hosts than the row; all where none does.

    What is slow for all ranks of one host alone is no storage that hosts share.
    """
    hosts = np.array(members.hosts)
    elsewhere = others[hosts[others] != hosts[row]]
    return elsewhere if len(elsewhere) else others


def others_load_as_long(seen: Observations, row: int, others: Integers, active: Flags) -> bool:
    """Return whether loading takes the `others` about as long as the `row`, though their devices
    wait less for it: then what all of them load from is slow.

    The others as a whole must take as long in the `active` iterations, or now and then, or twice as
    long then as in the rest (who waits for a late batch has more time to load the next one); or one
    rank must take as long more often. Where some are on other hosts, these are asked. Example: a
    row loads for 950 ms in the iterations in which its device waits, and of 16 other loaders, none
    of which holds up its device, some take 500 to 1,200 ms in half of their iterations.
    """
    if seen.loading_ns is None or not len(others):
        return False
    others = on_other_hosts(seen.members, row, others)
    own, theirs = float(robust.median(seen.loading_ns[row][active])), seen.loading_ns[others]
    is_slow = _is_slow_everywhere(own, theirs, float(np.median(seen.iteration_ns)))
    if is_slow and not _became_slow_alone(seen.loading_ns[row], theirs, active):
        return True
    if tells_no_storage(seen.loading_ns[row][active], theirs):
        return False
    then = float(robust.median(theirs[:, active]))
    if then * LOSSES.loader_ratio > own or load_as_long(own, theirs):
        return True
    if not active.all() and then > LOSSES.loader_ratio * float(robust.median(theirs[:, ~active])):
        return True
    of_one = (np.nan_to_num(theirs) >= own / LOSSES.loader_ratio).mean(axis=1).max()
    return bool(of_one >= BURSTS.one_loader_share)


def loses_as_its_place(seen: Observations, row: int, active: Flags, over_ns: float) -> bool:
    """Return whether the ranks at the row's place in other TP groups, those of its stage or of all
    stages, lose most of the time to their hosts that the row loses over its peers.

    Examples: the first ranks of three TP groups lose 598, 571 and 529 us, the second ranks 172. The
    571 us are 397 above the peers, and the other first ranks' median, 563 us, is nearly as much. Or
    the first ranks of the two groups of a first stage, which load for their groups, lose 53 and 54
    ms, and nobody else loses anything.
    """
    members = seen.members
    if members.layout.tp < 2:
        return False
    level = robust.median(seen.lost(Cause.HOST)[:, active], axis=1)
    like = members.place["tp"] == members.place["tp"][row]
    like[row] = False
    of_stage = like & (members.stage == members.stage[row])
    theirs = [float(np.median(level[rows])) for rows in (like, of_stage) if rows.any()]
    return float(level[row]) - max(theirs, default=0.0) < LOSSES.place_share * over_ns


def mates_that_load(seen: Observations) -> Integers | None:
    """Return the rows of the job's only TP group, where several of them load for themselves.

    Often the first rank alone loads and hands on what it has: then the others lose next to nothing
    in any iteration, and the result is None.
    """
    loading = np.nan_to_num(seen.lost(Cause.LOADER))
    quiet = np.quantile(loading, BURSTS.quiet_share, axis=1)
    rows = np.flatnonzero(quiet > LOSSES.noise_share * float(np.median(seen.iteration_ns)))
    num_groups = len(np.unique(seen.members.tensor_group))
    return rows if len(rows) > 1 and num_groups == 1 else None


ADVICE: dict[Cause, tuple[str, ...]] = {
    Cause.COMPUTE: (
        "read that GPU's clock and throttle reasons while the job runs: nvidia-smi -i GPU -q -d "
        "CLOCK,PERFORMANCE,TEMPERATURE,POWER,PIDS",
    ),
    Cause.GC: (
        "collect on all ranks at the same iterations (gc.disable(), then gc.collect() every N "
        "iterations), and see what that rank allocates that its peers do not",
    ),
    Cause.HOST: (
        "read that host's memory pressure and swapping (vmstat 1, /proc/pressure/memory)",
        *HOST_ADVICE,
    ),
    Cause.LOADER: (
        "time the data loader alone on that host; read its disk and network file system latency "
        "(iostat -x 1) and the number of loader workers",
    ),
}
