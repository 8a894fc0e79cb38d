"""Put all ranks on one clock: an offset and a drift for each clock domain, and how good they are.

Ranks of one domain read the same physical clock and are moved together. In each set of domains
that share events (a component) one domain is the reference and stays as it is: the one with most
ranks, of equals that of the lowest rank. Between components only the host clocks say anything.

    anchors ─ fit (aggregate.fitting) ─ shifts that causality asks for ─ error bars ─ Alignment

**Error bars** say how far two ranks' clocks may still be apart. That is not the residual of all
anchors together: a rank may have thousands of exact ends inside its node, and a dozen poor ends
that tie the node to other nodes; only the poor ends tell how far the nodes may be apart. So classes
of anchors are taken from the most exact to the least, each with the 99th percentile of its own
distances. The error bar of two clocks is that of the first class that joins their sets:

    tp  1 µs   {0 1} {2 3}         0 and 1 within 1 µs
    dp 15 µs   {0 1 2 3}           0 and 2 within 15 µs
    mp 50 µs                       not needed: all clocks are joined already

Error bars are percentiles, not standard errors: an end that is late by its place in a ring is late
every time, and no number of anchors averages it away. What contradicts causality on the final
clocks widens an error bar further (`aggregate.causality`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aggregate.anchors import Anchors
from aggregate.causality import (
    BELIEVED_VIOLATION,
    Causality,
    Contradictions,
    Orders,
    Ties,
    Trust,
    believed_gap,
    bounded_solution,
    components,
    contradictions,
    references,
    tie,
)
from aggregate.fitting import LineProblem, Lines, estimate_noise, fit_lines, unmoved_lines
from aggregate.match import Matches, most_frequent_ranks
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    Narrow,
    combine,
    group_lengths,
    group_starts,
    linked_sets,
)
from megascan.header import RankHeader
from megascan.timeline import ClockFit, numbers, shifted

if TYPE_CHECKING:
    from aggregate.jumps import ClockStep

LARGEST_DRIFT_ERROR = 10e-6
"""A drift whose standard error is larger is not claimed but set to 0 (a ratio)."""
_QUANTILE = 0.99
_WORTH_A_NOTE_NS = 1e3
_MANY_REFUSED = 4
"""A clock with fewer refused ends is not taken for one that jumps."""
_MOST_STEPS = 64
_MOST_FITS = 12
"""Fits without jumps, each as long as the first one: where all clocks jump again and again, more of
them would take minutes for little."""
_MENDED_SHARE = 0.8
"""A jump is believed if the fit without it refuses at most this part of the clock's ends that were
refused before."""


MORE_JUMPS = (
    "more clocks seem to jump than were put back: what is said of links and of who waits for whom "
    "is less sure by that"
)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Error bars between clock domains.

    level_ns      (level,) error within the sets of a level, rising
    set_at_level  (level, domain) number of the set that a domain is in
    violation_ns  (domain,) how far a clock breaks causality
    level_of      (domain,) the level at which a domain joins its component's reference
    level_of_class  (label,) level of each class of anchors; the number of levels if the class joins
                    no domains
    """

    level_ns: Floats
    set_at_level: Integers
    violation_ns: Floats
    level_of: Integers
    level_of_class: Integers

    def between(self, one: Narrow, other: Narrow) -> Floats:
        """Return the error bar, ns, between domains: 0 within one, infinite where no class joins
        the two.
        """
        result = np.zeros(np.broadcast(one, other).shape)
        apart = np.flatnonzero(one != other)  # few: most matches are within a host
        one, other = one[apart], other[apart]
        error = np.full(len(apart), np.inf)
        for level in range(len(self.level_ns) - 1, -1, -1):
            joined = self.set_at_level[level][one] == self.set_at_level[level][other]
            error[joined] = self.level_ns[level]
        widest = np.maximum(self.violation_ns[one], self.violation_ns[other])
        result[apart] = np.maximum(error, widest)
        return result

    def of_domains(self) -> Floats:
        """Return (domain,) error bar to the component's reference, 0 for a domain without links."""
        levels = np.r_[self.level_ns, 0.0]
        error: Floats = np.maximum(levels[self.level_of], self.violation_ns)
        return error


def distances(anchors: Anchors, lines: Lines, rows: Integers) -> Floats:
    """Return (row,) how far an end lies from other ends of its event, or may lie by its slack."""
    return np.maximum(np.abs(lines.residual_ns[rows]), anchors.slack_ns[rows])


def assess(
    anchors: Anchors, lines: Lines, domain: Integers, extent_ns: Floats, references: Integers
) -> Accuracy:
    """Measure the levels of a fit's accuracy.

    domain      (rank,) clock domain of each rank
    extent_ns   (anchor,) from the first start to the last end of the anchor's event, which bounds
                any error where a class has too few ends for a statistic
    references  (domain,) reference of each domain's component
    """
    num_domains = len(lines.offset_ns)
    classes = sorted(
        _classes(anchors, lines, domain[anchors.rank], extent_ns), key=lambda each: each.error_ns
    )
    sets = np.arange(num_domains)
    rows: list[Integers] = []
    level_of_class = np.full(int(anchors.label.max(initial=-1)) + 1, len(classes))
    for level, each in enumerate(classes):
        one, other = sets[each.links].T
        sets = linked_sets(one, other, num_domains)[sets]
        rows.append(sets)
        level_of_class[each.label] = level
    set_at_level = np.array(rows, dtype=np.int64).reshape(len(rows), num_domains)
    return Accuracy(
        level_ns=np.array([each.error_ns for each in classes], dtype=np.float64),
        set_at_level=set_at_level,
        violation_ns=np.zeros(num_domains),
        level_of=_levels(set_at_level, references),
        level_of_class=level_of_class,
    )


@dataclass(frozen=True)
class _Class:
    """A class of anchors: the domains that it links, in pairs (link, 2), and how well."""

    label: int
    error_ns: float
    links: Integers


def _classes(
    anchors: Anchors, lines: Lines, domain: Integers, extent_ns: Floats
) -> Iterator[_Class]:
    believed = lines.weights > 0
    num_domains = len(lines.offset_ns)
    for label in range(int(anchors.label.max(initial=-1)) + 1):
        rows = np.flatnonzero(believed & (anchors.label == label))
        links = _links(anchors.event[rows], domain[rows], num_domains)
        if len(links):
            error = _error(anchors, lines, rows, domain[rows], float(extent_ns[rows].max()))
            yield _Class(label, error, links)


def _links(event: Integers, domain: Integers, num_domains: int) -> Integers:
    same = (event[1:] == event[:-1]) & (domain[1:] != domain[:-1])
    pairs = np.unique(domain[:-1][same] * num_domains + domain[1:][same])
    return np.stack([pairs // num_domains, pairs % num_domains], axis=1)


def _error(
    anchors: Anchors, lines: Lines, rows: Integers, domain: Integers, bound_ns: float
) -> float:
    """Return the 99th percentile of a class's distances, widened for the parameters of the fit.

    Where its ends are too few to fix more than the parameters, only `bound_ns` is certain.
    """
    distance = distances(anchors, lines, rows)
    num_free = len(rows) - len(group_starts(anchors.event[rows]))
    used = np.flatnonzero(np.bincount(domain))
    num_parameters = len(used) - 1 + int(np.count_nonzero(lines.drift[used]))
    left = num_free - num_parameters
    if (anchors.slack_ns[rows] > 0).any():  # messages: tight bounds weigh more
        error = _weighted_quantile(distance, lines.weights[rows])
    else:
        place = int(np.ceil(_QUANTILE * (len(rows) - 1)))
        error = float(np.partition(distance, place)[place])
    if left <= 0:
        return max(error, bound_ns)
    return error * float(np.sqrt(num_free / left))


def _weighted_quantile(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    place = int(np.searchsorted(reached, _QUANTILE * reached[-1]))
    return float(values[order[min(place, len(order) - 1)]])


def _levels(set_at_level: Integers, references: Integers) -> Integers:
    """Return (domain,) first level that joins a domain to its reference; -1 if no level does.

    For a reference it is the first level that joins it to any other domain.
    """
    num_levels, num_domains = set_at_level.shape
    level = np.full(num_domains, -1, dtype=np.int64)
    own = references == np.arange(num_domains)
    for number in range(num_levels - 1, -1, -1):
        sets = set_at_level[number]
        alone: Flags = np.bincount(sets, minlength=num_domains)[sets] == 1
        level[np.where(own, ~alone, sets == sets[references])] = number
    return level


_ORDERING_ROUNDS = 200


def ordering_shift(accuracy: Accuracy, orders: Orders, delay_ns: Floats) -> Floats:
    """Return (domain,) shifts that put orders right; delay_ns (order,) is by the fitted clocks.

    Collectives whose ends the fit believes move clocks without limit: if they break an order, the
    ends of one side are late every time. Then, from the coarsest level to the finest, all orders
    move the sets of the next finer level against one another, each set as a whole and by at most
    half of the level's error. Matches whose ends disagree (Trust.DOUBTFUL) move nothing.
    """
    num_domains = len(accuracy.violation_ns)
    usable = orders.trust > Trust.DOUBTFUL
    orders, delay_ns = orders.at(usable), delay_ns[usable]
    early, late = orders.early_domain, orders.late_domain
    firm = orders.trust == Trust.FIRM
    unlimited = np.full(num_domains, np.inf)
    shift = order_shifts(early[firm], late[firm], delay_ns[firm], unlimited)
    sets = [np.arange(num_domains), *accuracy.set_at_level[:-1]]
    for level in range(len(accuracy.level_ns) - 1, -1, -1):
        unit = sets[level]
        limit = np.full(num_domains, accuracy.level_ns[level] / 2)
        delay = delay_ns + shift[late] - shift[early]
        shift += order_shifts(unit[early], unit[late], delay, limit)[unit]
    return shift


def order_shifts(
    source: Integers, destination: Integers, delay_ns: Floats, limit_ns: Floats
) -> Floats:
    """Return (domain,) shifts, about as small as can be, that let each late time come after the
    early time, as far as the limits allow.

    source, destination  (order,) clock domains of the early and the late time
    delay_ns             (order,) late time minus early time on the fitted clocks
    limit_ns             (domain,) how far a clock may move at most

    Each pair of domains gives one bound, shift[destination] − shift[source] ≥ −delay, with the
    third-worst delay, so that one or two bad matches move nothing. Bounds are met by relaxation: in
    each round every violated bound asks its two domains to move by half of what is missing each. A
    domain moves by the mean of what it is asked for, but not beyond its limit. Starting from 0,
    this comes near the smallest shifts but need not reach them. It ends when less than 1 ns is
    missing, or after _ORDERING_ROUNDS rounds: what is missing then stays.
    """
    shift = np.zeros(len(limit_ns))
    bounds = _bounds(source, destination, delay_ns)
    if not (bounds[2] > 0).any():
        return shift
    early, late, least = bounds
    for _ in range(_ORDERING_ROUNDS):
        missing = np.maximum(least - (shift[late] - shift[early]), 0.0)
        if missing.max() < 1.0:
            break
        pulled = np.flatnonzero(missing)
        ends = np.r_[late[pulled], early[pulled]]
        pull = np.bincount(ends, np.r_[missing[pulled], -missing[pulled]] / 2, len(shift))
        shift += pull / np.maximum(np.bincount(ends, minlength=len(shift)), 1)
        shift = np.clip(shift, -limit_ns, limit_ns)
    return shift


def _bounds(
    source: Integers, destination: Integers, delay_ns: Floats
) -> tuple[Integers, Integers, Floats]:
    """Return (source, destination, least difference of shifts) of domains with enough orders."""
    rows = np.flatnonzero(source != destination)
    pair = combine(source[rows], destination[rows]) if len(rows) else rows
    order = rows[np.lexsort((delay_ns[rows], pair))]
    starts = group_starts(np.sort(pair))
    chosen = starts + np.minimum(BELIEVED_VIOLATION, group_lengths(starts, len(rows))) - 1
    enough = group_lengths(starts, len(rows)) >= BELIEVED_VIOLATION
    worst = order[chosen[enough]]
    return source[worst], destination[worst], -delay_ns[worst].astype(np.float64)


def fit_method(ties: Ties, lines: Lines, component: Integers) -> str:
    """Say in one sentence how clocks were aligned."""
    num_domains = len(component)
    if num_domains == 1:
        return "one host clock: all ranks share it and nothing is moved"
    alone = np.bincount(component)[component] == 1
    if alone.all():
        return "host clocks: no matched communication links the clock domains"
    with_messages = len(ties.anchors.event) > ties.num_collective
    means = "ends of collectives" + (" and bounds from messages" if with_messages else "")
    drawn = f" (drawn evenly, {ties.num_left_out} left out)" if ties.num_left_out else ""
    return (
        f"{means}: robust least squares over {num_domains} clock domains with "
        f"{len(lines.weights)} anchors{drawn}, noise {lines.noise_ns / 1e3:.1f} µs; "
        f"{_fitted(lines, alone)}"
    )


def _fitted(lines: Lines, alone: Flags) -> str:
    """Say for how many domains a drift was fitted, and for how many the offset alone."""
    linked = int(np.count_nonzero(~alone))
    drifting = int(np.count_nonzero(lines.drift[~alone]))
    if 0 < drifting < linked:
        return f"offset and drift for {drifting} domains, offset alone for {linked - drifting}"
    fitted = "offset and drift" if drifting else "offsets alone"
    return f"{fitted} for {'all' if linked == len(alone) else linked} domains"


def fit_notes(lines: Lines, component: Integers, rank: Integers) -> Iterator[str]:
    """Say what limits a fit; `rank` (anchor,) is the global rank of each anchor."""
    num_components = int(component.max(initial=0)) + 1
    if num_components > 1:
        num_alone = np.count_nonzero(np.bincount(component) == 1)
        yield (
            f"collectives and messages link the clocks in {num_components} separate sets "
            f"({num_alone} of a single clock): between them host clocks are believed and no "
            "wait is claimed"
        )
    fixed = int(np.count_nonzero((lines.drift == 0) & (lines.num_anchors > 0)))
    if len(component) > 1 and fixed:
        yield (
            f"the traced time is too short to determine the drift of {fixed} clocks to "
            f"{LARGEST_DRIFT_ERROR * 1e6:.0f} ppm; taken as 0"
        )
    rejected = np.flatnonzero(lines.weights == 0)
    if len(rejected):
        yield (
            f"{len(rejected)} of {len(lines.weights)} anchors lie too far off and were not "
            f"believed, most on {most_frequent_ranks(rank[rejected])}"
        )


def _counted(number: int, one: str, several: str) -> str:
    """Return a number with what is counted."""
    return f"{number} {one if number == 1 else several}"


def order_notes(shift_ns: Floats, remaining: Contradictions) -> Iterator[str]:
    """Say what was done for causality, and what was left."""
    moved = np.abs(shift_ns) > _WORTH_A_NOTE_NS
    if moved.any():
        yield (
            f"{_counted(int(moved.sum()), 'clock was', 'clocks were')} moved by up to "
            f"{np.abs(shift_ns).max() / 1e3:.1f} µs beyond the fit, so that messages end after "
            "they were sent and nobody leaves a collective before its last member has entered"
        )
    worst = float(remaining.error_ns.max(initial=0.0))
    if worst > _WORTH_A_NOTE_NS:
        num_wide = int((remaining.error_ns > _WORTH_A_NOTE_NS).sum())
        yield (
            f"{_counted(num_wide, 'clock still lets', 'clocks still let')} something end before it "
            f"can have begun, by up to {worst / 1e3:.1f} µs: their error bars are at least that "
            "wide"
        )
    if remaining.worst_disbelieved_ns > _WORTH_A_NOTE_NS:
        yield (
            f"{_counted(remaining.num_disbelieved, 'match', 'matches')} cannot be right (one side "
            f"ends up to {remaining.worst_disbelieved_ns / 1e3:.1f} µs before the other begins): "
            "not believed"
        )


_GROSS_SIGMAS = 5.0


def fit_clocks(ties: Ties, *, with_drift: bool = True) -> Lines:
    """Fit lines of all domains; a drift that the window cannot determine is left out.

    Where the lines break causality grossly, the robust fit has settled on wrong ends (half of a
    class may be late by a slow link). It is then begun again from a solution that keeps causality,
    and the new result is taken only if its anchors agree better. So a handful of wrong matches
    cannot force another result.
    """
    anchors = ties.anchors
    problem = LineProblem.of(anchors, ties.domain[anchors.rank], ties.num_domains)
    if ties.num_domains == 1 or not len(anchors.event):
        return unmoved_lines(problem)
    drifting = np.full(ties.num_domains, with_drift)
    noise = _noise(ties, problem, drifting)
    lines = _certain_lines(ties, problem, noise, drifting)
    orders = ties.causality.orders(lines.common)
    if believed_gap(orders, orders.delay_ns(lines.common)) <= _GROSS_SIGMAS * lines.noise_ns:
        return lines
    drifting = lines.drift != 0
    start = bounded_solution(problem, noise, drifting, lines.solution, ties.causality)
    noise_there = _noise(ties, problem, drifting, start)
    if np.log(noise_there).sum() >= np.log(noise).sum():
        return lines
    return _certain_lines(ties, problem, noise_there, drifting, start)


def _certain_lines(
    ties: Ties,
    problem: LineProblem,
    noise: Floats,
    drifting: Flags,
    start: Floats | None = None,
) -> Lines:
    """Return fitted lines; drifts that are not known well enough (LARGEST_DRIFT_ERROR) are 0.

    Ends of collectives may tell the drifts of a set of clocks against each other, and messages
    alone tie the set to others: what these cannot tell is the drift of the whole set. So one clock
    of it keeps its own rate then, and the others drift against that one.
    """
    drifting = drifting & (np.bincount(problem.domain, minlength=problem.num_domains) > 2)
    while True:
        lines = fit_lines(problem, noise, drifting, start)
        certain = drifting & (lines.drift_error <= LARGEST_DRIFT_ERROR)
        certain[_of_loose_sets(ties, problem, noise, certain)] = False
        if (certain == drifting).all():
            return lines
        drifting = certain


def _of_loose_sets(ties: Ties, problem: LineProblem, noise: Floats, drifting: Flags) -> Integers:
    """Return the first clock of each set of `drifting` clocks, (domain,), that collectives tie
    together, and messages too loosely to others to tell how it drifts against these.

    Example: three messages in 55 s bound the clocks of two stages to 3 ms, so their drift to
    3 ms / 39 s = 77 ppm, while the rings of each stage agree within a microsecond.
    """
    num = ties.num_collective
    starts = group_starts(problem.event[:num])
    lengths = group_lengths(starts, num)
    first = np.repeat(problem.domain[starts], lengths)
    tied = linked_sets(first, problem.domain[:num], ties.num_domains)
    ends = tied[problem.domain[num:]].reshape(-1, 2)
    crosses = ends[:, 0] != ends[:, 1]
    told = np.square(problem.age[num:] * problem.span_ns / noise[num:]).reshape(-1, 2)
    information = np.bincount(ends[crosses].ravel(), told[crosses].ravel(), tied.max() + 1)
    is_loose = (information > 0) & (information * LARGEST_DRIFT_ERROR**2 < 1.0)
    all_drift = np.bincount(tied, ~drifting) == 0
    clocks = np.unique(tied, return_index=True)[1]
    return np.asarray(clocks[is_loose & all_drift & (np.bincount(tied) > 1)], dtype=np.int64)


def _noise(
    ties: Ties, problem: LineProblem, drifting: Flags, start: Floats | None = None
) -> Floats:
    """Return (anchor,) standard deviations of collectives and of messages about separate lines.

    The messages of each pair of domains have two lines to themselves, so that a slow link does not
    make collectives look inexact.
    """
    anchors, num_collective = ties.anchors, ties.num_collective
    parts = []
    if num_collective:
        rows = np.arange(num_collective)
        collectives = problem.thinned(rows) if num_collective < len(anchors.event) else problem
        label, slack = anchors.label[rows], anchors.slack_ns[rows]
        parts.append(estimate_noise(collectives, label, slack, drifting, start))
    if num_collective < len(anchors.event):
        messages = anchors.rows(np.arange(num_collective, len(anchors.event)))
        pairs = ties.domain[messages.rank].reshape(-1, 2)
        _, pair = np.unique(pairs[:, 0] * ties.num_domains + pairs[:, 1], return_inverse=True)
        own: Integers = (2 * pair[:, None] + np.arange(2)).ravel()
        apart = LineProblem.of(messages, own, int(own.max()) + 1)
        parts.append(estimate_noise(apart, messages.label, messages.slack_ns))
    return np.concatenate(parts)


def relative_lines(lines: Lines, reference: Integers) -> tuple[Floats, Floats]:
    """Return (domain,) offsets, at each domain's centre, and drifts against the clock of its
    `reference` (domain,).
    """
    rate = 1.0 + lines.drift[reference]
    drift = (1.0 + lines.drift) / rate - 1.0
    offset = (lines.offset_ns - lines.offset_ns[reference]) / rate
    offset += lines.centre_ns[reference] - lines.centre_ns
    return offset, drift


def _extents_ns(ties: Ties, lines: Lines) -> Floats:
    """Return (anchor,) time from the first start to the last end of the anchor's event."""
    anchors = ties.anchors
    if not len(anchors.event):
        return np.zeros(0)
    domain, starts = ties.domain[anchors.rank], group_starts(anchors.event)
    first = np.minimum.reduceat(lines.common(domain, ties.start_ns), starts)
    last = np.maximum.reduceat(lines.common(domain, anchors.end_ns), starts)
    return np.asarray(last - first)[anchors.event]


_LONGEST_RESIDUAL_NS = 2**40
_PICOSECONDS = 3  # decimals of a nanosecond
_FEMTOSECONDS_A_SECOND = 9  # decimals of a drift in parts per million
_ORDER_ROUNDS = 4


@dataclass(frozen=True)
class ClockLines:
    """The line of each rank's clock: common = local + offset_ns + drift · (local − centre_ns)."""

    offset_ns: Floats
    drift: Floats
    centre_ns: Integers

    def only(self, chosen: Integers) -> ClockLines:
        """Return the lines of some ranks, given by their places."""
        return ClockLines(self.offset_ns[chosen], self.drift[chosen], self.centre_ns[chosen])

    def common(self, position: Integers, time_ns: Integers) -> Integers:
        """Return the common time of each time; `position` (time,) is the place of its rank.

        The times of a rank keep their order, so spans that nest still nest.
        """
        if not self.offset_ns.any() and not self.drift.any():
            return time_ns
        age = (time_ns - self.centre_ns[position]).astype(np.float64)
        shift = self.offset_ns[position] + self.drift[position] * age
        return time_ns + np.rint(shift).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Corrections of all ranks' clocks, and how good they are.

    Arrays are (rank,) in the order of `ranks`, unless another shape is given.
    """

    ranks: Integers
    domain: Integers
    domain_names: tuple[str, ...]
    component: Integers
    lines: ClockLines
    residual_median_ns: Floats
    residual_p99_ns: Floats
    num_anchors: Integers
    accuracy: Accuracy
    method: str
    notes: tuple[str, ...] = ()
    num_refused: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(domain,) how many ends of collectives were not believed."""
    steps: tuple[ClockStep, ...] = ()
    """Jumps of clocks that no line fits, one a clock, the largest first; times are still as they
    were recorded (`without_steps`)."""

    def of_domains(self, domain: Integers, time_ns: Integers) -> Floats:
        """Return common times (time,) of clock domains (time,), ns from the first rank's centre."""
        position = np.unique(self.domain, return_index=True)[1][domain]
        common: Integers = self.lines.common(position, time_ns) - self.lines.centre_ns[0]
        return common.astype(np.float64)

    def fits(self, reference_ns: int) -> dict[int, ClockFit]:
        """Return the fits as a timeline carries them, with the offset at `reference_ns`.

        Offsets are rounded to picoseconds, far finer than can be measured: later digits depend on
        the processor, and the same trace would not give the same file on every machine.
        """
        lines = self.lines
        offset = lines.offset_ns + lines.drift * (reference_ns - lines.centre_ns)
        error_ns = self.accuracy.of_domains()[self.domain]
        return {
            int(rank): ClockFit(
                rank=int(rank),
                domain=self.domain_names[self.domain[place]],
                offset_ns=round(float(offset[place]), _PICOSECONDS),
                drift_ppm=round(float(lines.drift[place] * 1e6), _FEMTOSECONDS_A_SECOND),
                residual_median_ns=round(float(self.residual_median_ns[place]), _PICOSECONDS),
                residual_p99_ns=round(float(self.residual_p99_ns[place]), _PICOSECONDS),
                error_ns=round(float(error_ns[place]), _PICOSECONDS),
                num_anchors=int(self.num_anchors[place]),
                component=int(self.component[place]),
            )
            for place, rank in enumerate(self.ranks)
        }


def align_clocks(spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader]) -> Alignment:
    """Estimate every domain's clock from the ends of collectives and the order of messages."""
    ranks = np.array(sorted(headers), dtype=np.int64)
    names = [headers[int(rank)].clock.domain for rank in ranks]
    numbered = {name: number for number, name in enumerate(dict.fromkeys(names))}
    domain = np.array([numbered[name] for name in names], dtype=np.int64)
    ties = tie(spans, matches, ranks, domain)
    component = components(ties.anchors, domain, ties.num_domains)
    reference = references(domain, component)[component]
    lines = fit_clocks(ties)
    offset, drift = relative_lines(lines, reference)
    accuracy = assess(ties.anchors, lines, domain, _extents_ns(ties, lines), reference)
    median_ns, p99_ns, num_anchors = _residuals(ties, lines, accuracy)
    refused = _num_refused(ties, lines)
    steps: tuple[ClockStep, ...] = ()
    least_ns = np.zeros(ties.num_domains)
    if ties.num_domains > 1 and (refused >= _MANY_REFUSED).any():
        from aggregate.jumps import jumps_of  # few clocks jump

        steps, least_ns = jumps_of(ties, lines, refused, spans=spans, matches=matches, ranks=ranks)
    alignment = Alignment(
        ranks=ranks,
        domain=domain,
        domain_names=tuple(numbered),
        component=component[domain],
        lines=ClockLines(offset[domain], drift[domain], lines.centre_ns[domain]),
        residual_median_ns=median_ns,
        residual_p99_ns=p99_ns,
        num_anchors=num_anchors,
        accuracy=accuracy,
        method=fit_method(ties, lines, component),
        num_refused=refused,
        steps=steps,
    )
    believed = np.zeros(len(ties.causality.members.event), dtype=np.bool_)
    believed[ties.member_rows] = lines.weights[: ties.num_collective] > 0
    causality = replace(ties.causality, believed=believed)
    alignment, shifted_notes = _in_order(alignment, causality, reference)
    violation_ns = np.maximum(alignment.accuracy.violation_ns, least_ns)
    return replace(
        alignment,
        accuracy=replace(alignment.accuracy, violation_ns=violation_ns),
        notes=(*shifted_notes, *fit_notes(lines, component, ranks[ties.anchors.rank])),
    )


def _num_refused(ties: Ties, lines: Lines) -> Integers:
    """Return (domain,) how many ends of collectives were not believed."""
    refused = np.flatnonzero(lines.weights[: ties.num_collective] == 0)
    domain = ties.domain[ties.anchors.rank[refused]]
    return np.bincount(domain, minlength=ties.num_domains).astype(np.int64)


def _residuals(ties: Ties, lines: Lines, accuracy: Accuracy) -> tuple[Floats, Floats, Integers]:
    """Return (rank,) median and 99th percentile of the distances of believed anchors, and how many
    anchors are believed.

    With several clocks, classes noisier than the one that joins the rank to the reference, and
    classes that join no clocks, are left out of the distances.
    """
    anchors, num_ranks = ties.anchors, len(ties.domain)
    believed = np.flatnonzero(lines.weights > 0)
    counted = believed
    if ties.num_domains > 1:
        level = accuracy.level_of[ties.domain[anchors.rank[believed]]]
        counted = believed[accuracy.level_of_class[anchors.label[believed]] <= level]
    whole_ns = np.minimum(np.rint(distances(anchors, lines, counted)), _LONGEST_RESIDUAL_NS)
    rank = anchors.rank[counted]
    key = np.sort(rank * (_LONGEST_RESIDUAL_NS + 1) + whole_ns.astype(np.int64))
    distance = key % (_LONGEST_RESIDUAL_NS + 1)
    count = np.bincount(rank, minlength=num_ranks)
    first = np.cumsum(count) - count

    def quantile(share: float) -> Floats:
        place = first + np.ceil(share * np.maximum(count - 1, 0)).astype(np.int64)
        return np.where(count > 0, np.r_[distance, 0][np.where(count > 0, place, 0)], 0.0)

    num_believed = np.bincount(anchors.rank[believed], minlength=num_ranks).astype(np.int64)
    return quantile(0.5), quantile(0.99), num_believed


def without_steps(
    spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader], clocks: Alignment
) -> tuple[tuple[ClockStep, ...], Alignment]:
    """Return (jumps, alignment without them), as long as taking jumps out improves the fit.

    `clocks` is the alignment of the spans as they are. The jumps are to be taken out in turn. All
    clocks that seem to jump are tried together, as those of a host do, then those of them that it
    mended, then the largest jump alone. Ends after `_MOST_FITS` fits, and says then that more seem
    to jump.
    """
    domain = clocks.domain[np.searchsorted(clocks.ranks, numbers(spans, "rank"))]
    taken: list[ClockStep] = []
    tried, num_fits = clocks.steps, 0
    while tried and len(taken) < _MOST_STEPS and num_fits < _MOST_FITS:
        moved = spans
        for step in tried:  # one a clock, so none moves the times of another
            moved = shifted(moved, -step.excess_ns(domain, numbers(moved, "start_ns")))
        fit = align_clocks(moved, matches, headers)
        num_fits += 1
        before, after = clocks.num_refused, fit.num_refused
        mended = tuple(one for one in tried if _is_mended(one.domain, before, after))
        if mended == tried:
            spans, clocks, tried = moved, fit, fit.steps
            taken += mended
        else:
            tried = (mended or clocks.steps[:1]) if len(tried) > 1 else ()
    notes = [one.note(clocks.domain_names[one.domain]) for one in taken]
    if tried:
        notes.append(MORE_JUMPS)
    return tuple(taken), replace(clocks, notes=(*notes, *clocks.notes))


def _is_mended(domain: int, before: Integers, after: Integers) -> bool:
    """Return whether a fit without a jump of one domain refuses fewer ends of that domain, and
    hardly more of all: other clocks, as those of all ranks of a host, may have jumped as well, and
    which of their ends are refused is chance. Ends refused are (domain,).

    Example: 12 of 32 clocks have jumped, and 672 ends are refused, 30 of them the first one's.
    Without its jump it is 7 of 649.
    """
    is_better = after[domain] <= _MENDED_SHARE * before[domain]
    return bool(is_better and _MENDED_SHARE * after.sum() <= before.sum())


def _in_order(
    alignment: Alignment, causality: Causality, reference: Integers
) -> tuple[Alignment, tuple[str, ...]]:
    """Move clocks so that nothing is received before it was sent; `reference` is (domain,).

    How far clocks had to be moved, and what then remains impossible, widens the error bars.
    """
    total = np.zeros(len(reference))
    if len(total) == 1:
        return alignment, ()
    for last in (*[False] * _ORDER_ROUNDS, True):
        orders = causality.orders(alignment.of_domains)
        delay = orders.delay_ns(alignment.of_domains)
        if last or believed_gap(orders, delay) < 1.0:
            break
        shift = ordering_shift(alignment.accuracy, orders, delay)
        shift -= shift[reference]
        total += shift
        lines = alignment.lines
        lines = replace(lines, offset_ns=lines.offset_ns + shift[alignment.domain])
        alignment = replace(alignment, lines=lines)
    remaining = contradictions(orders, delay, causality)
    error_ns = np.maximum(remaining.error_ns, np.abs(total))
    accuracy = replace(alignment.accuracy, violation_ns=error_ns)
    return replace(alignment, accuracy=accuracy), tuple(order_notes(total, remaining))
