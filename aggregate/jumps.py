"""Mend clocks that jump: a time service sets a host's clock, or it begins again at every step.

**Jumps.** No line fits such a clock. A robust fit keeps to one side of the jump, or between both,
and takes the ends of the other side for wrong matches. These refused ends show the jump: they are
many, of one clock, and follow each other in time:

    distance of an end     ████████▏                 believed, before the jump
    from its event's                 ▁▁▁▁▁▁▁▁▁       not believed, after the jump
                           ─────────┴────────── time

The jump is the largest difference between the medians of the ends shortly before and after a
moment. Later times of that clock are moved back by the jump, and the fit is made anew; the new fit
is kept if it refuses at least a fifth fewer ends of that clock, and hardly more of all. What cannot
be mended widens the clock's error bar.

Where clocks are fitted to only some of the ends (`aggregate.anchors`), the moment is then looked
for among all ends near the two drawn ends around it (`located`): a span on the wrong side of the
moment would be off by the whole jump.

A link that becomes slow makes ends late, too, but in one group only, and spans become longer. A
clock that jumps moves the ends of all groups, and leaves every span but one as long as it was.

**Restarts.** The original MegaScan zeroes each rank's time at the begin of each step, so that no
single offset can be right for a rank: after the barrier before a step, ranks begin within some
spread that differs from step to step. A restarted clock is a new clock. Each (rank, iteration) gets
an offset of its own from what is matched in that iteration, by the robust fit and under the
causality that hold for all clocks:

                 as read (steps laid end to end)         after
    rank 0   |step 1 ......|step 2 ......|          |step 1 ......|step 2 ......|
    rank 1   |step 1 ......|step 2 ......|           |step 1 ......|   |step 2 ......|

How long after step 1 step 2 began is lost: it is what the files' pauses say, the same for all
ranks. Drift within a step is not estimated. An iteration in which a rank has nothing matched stays
as it was read, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aggregate.anchors import Members, Messages, joining_members, matched_messages
from aggregate.causality import Ties, components, references, tied
from aggregate.clocks import fit_clocks, relative_lines
from aggregate.fitting import Lines
from aggregate.match import Matches
from megascan.arrays import Flags, Floats, Integers, group_lengths, group_starts, lower_medians
from megascan.timeline import narrow, numbers

_SUSPICIOUS_SHARE = 0.1
_FAULTY_SHARE = 0.25
"""A clock is at fault if more than this part of its ends are refused: a rank that pauses for a
while has fewer refused ends, and a right clock."""
_FEWEST_ENDS = 40
_NEAR_ENDS = 15
"""Ends on each side of a moment whose medians are compared."""
_LINE_ENDS = 60
"""Ends on each side of a jump that say how far the clock has jumped."""
_NOISE_MULTIPLE = 8.0
_SMALLEST_NS = 10e3
_CERTAIN_QUANTILE = 0.99
_GAPS_AROUND = 3
"""All ends are looked at for this many gaps (`ClockStep.gap_ns`) on each side of a jump's gap."""


@dataclass(frozen=True, kw_only=True)
class ClockStep:
    """A jump of one clock domain: by its own clock, times after `at_ns` are `jump_ns` too large."""

    domain: int
    at_ns: int
    jump_ns: int
    gap_ns: int = 0
    """Time from the last end known to lie before the jump to the first known to lie after it."""

    def excess_ns(self, domain: Integers, start_ns: Integers) -> Integers:
        """Return (time,) by how much the times of `domain` (time,) are too large, ns."""
        is_later = (domain == self.domain) & (start_ns > self.at_ns)
        return np.where(is_later, self.jump_ns, 0)

    def note(self, name: str) -> str:
        """Say what was done about the clock of this name."""
        when = np.datetime64(self.at_ns, "ns").astype("datetime64[ms]")
        return (
            f"clock {name} jumped by {self.jump_ns / 1e3:+,.1f} µs while it was traced (at {when} "
            "by itself); its later times were put back by as much"
        )


@dataclass(frozen=True)
class Suspect:
    """A domain and its ends of events shared with other domains, (end,) in the order of time."""

    domain: int
    label: Integers
    time_ns: Integers
    length_ns: Integers
    distance_ns: Floats
    refused: Flags

    def at(self, low: int, high: int) -> Suspect:
        """Return the ends from place `low` to before place `high`."""
        part = slice(low, high)
        return Suspect(
            self.domain, self.label[part], self.time_ns[part], self.length_ns[part],
            self.distance_ns[part], self.refused[part],
        )  # fmt: skip

    def line_at(self, time_ns: int) -> float:
        """Return the distance at a time, on a line that medians lay through the ends."""
        half = len(self.time_ns) // 2
        age = (self.time_ns - time_ns).astype(np.float64)
        run = np.maximum(age[half : 2 * half] - age[:half], 1.0)
        slope = np.median((self.distance_ns[half : 2 * half] - self.distance_ns[:half]) / run)
        return float(np.median(self.distance_ns - slope * age))


def jumps_of(
    ties: Ties,
    lines: Lines,
    refused: Integers,
    *,
    spans: pa.Table,
    matches: Matches,
    ranks: Integers,
) -> tuple[tuple[ClockStep, ...], Floats]:
    """Return the largest jump of each clock that has one, the largest of all first, and (domain,)
    the least error bars, ns.

    `refused` is (domain,), how many ends of collectives were not believed.
    """
    suspects = tuple(_suspects(ties, lines, refused))
    steps = [step for each in suspects for step in _steps(each)]
    steps.sort(key=lambda each: -abs(each.jump_ns))
    if ties.num_left_out:
        around_each = [members_around(one, spans, matches, ranks, ties.domain) for one in steps]
        steps = [
            located(one, members, ties.domain[members.rank], lines)
            for one, members in zip(steps, around_each, strict=True)
        ]
    return tuple(steps), unmended_ns(suspects, ties.num_domains)


def unmended_ns(suspects: Sequence[Suspect], num_domains: int) -> Floats:
    """Return (domain,) the least error bar, ns: how far a faulty clock's ends scatter; else 0.

    A clock is at fault if many ends of every class of which it has enough ends are refused, and not
    because their spans are longer.
    """
    error = np.zeros(num_domains)
    for each in suspects:
        count = np.bincount(each.label)
        many = count >= _NEAR_ENDS
        shares = np.bincount(each.label, each.refused)[many] / count[many]
        longer = np.median(each.length_ns[each.refused]) - np.median(each.length_ns[~each.refused])
        late = np.median(each.distance_ns[each.refused])
        if len(shares) and (shares > _FAULTY_SHARE).all() and not 0 < late < 2 * longer:
            low, high = np.quantile(each.distance_ns, [1 - _CERTAIN_QUANTILE, _CERTAIN_QUANTILE])
            error[each.domain] = high - low
    return error


def _suspects(ties: Ties, lines: Lines, refused: Integers) -> Iterator[Suspect]:
    """Yield domains with many refused ends, ends of events that no other domain shares left out."""
    anchors, num_ends = ties.anchors, ties.num_collective
    domain, event = ties.domain[anchors.rank[:num_ends]], anchors.event[:num_ends]
    starts = group_starts(event)
    mixed = np.minimum.reduceat(domain, starts) != np.maximum.reduceat(domain, starts)
    shared = np.repeat(mixed, group_lengths(starts, num_ends))
    num_shared = np.bincount(domain[shared], minlength=ties.num_domains)
    enough = (num_shared >= _FEWEST_ENDS) & (refused > _SUSPICIOUS_SHARE * num_shared)
    enough &= refused < num_shared
    for each in np.flatnonzero(enough).tolist():
        rows = np.flatnonzero(shared & (domain == each))
        rows = rows[np.argsort(anchors.end_ns[rows], kind="stable")]
        yield Suspect(
            domain=each,
            label=anchors.label[rows],
            time_ns=anchors.end_ns[rows],
            length_ns=anchors.end_ns[rows] - ties.start_ns[rows],
            distance_ns=_level(anchors.end_ns[rows], _distances(ties, lines, rows)),
            refused=lines.weights[rows] == 0,
        )


def _distances(ties: Ties, lines: Lines, rows: Integers) -> Floats:
    """Return (row,) how far a domain's ends lie from the median of other domains in their events:
    the clocks of one host may all have jumped.
    """
    anchors = ties.anchors
    domain = ties.domain[anchors.rank]
    common = lines.common(domain, anchors.end_ns)
    others = np.flatnonzero(domain[: ties.num_collective] != domain[rows[0]])
    return _from_others(anchors.event, common, rows, others)


def _from_others(event: Integers, common: Floats, rows: Integers, others: Integers) -> Floats:
    usual = np.zeros(int(event.max(initial=-1)) + 1)
    events, medians = lower_medians(event[others], common[others])
    usual[events] = medians
    return np.asarray(common[rows] - usual[event[rows]])


def around(step: ClockStep) -> tuple[int, int]:
    """Return (begin, end), by the clock that jumped, of the ends that help to find the moment."""
    reach = step.gap_ns // 2 + _GAPS_AROUND * step.gap_ns
    return step.at_ns - reach, step.at_ns + reach


def members_around(
    step: ClockStep, spans: pa.Table, matches: Matches, ranks: Integers, domain: Integers
) -> Members:
    """Return all members of collectives that, by the clock that jumped, end near the jump."""
    rows = joining_members(spans, matches)
    low, high = around(step)
    start_ns = numbers(spans, "start_ns")[rows]
    end_ns = start_ns + numbers(spans, "duration_ns")[rows]
    own = domain[np.searchsorted(ranks, narrow(spans, "rank")[rows])] == step.domain
    near = matches.match[rows[own & (low <= end_ns) & (end_ns <= high)]]
    chosen = rows[np.isin(matches.match[rows], near)]
    return Members.of(spans, matches.match, chosen, ranks)


def located(step: ClockStep, members: Members, domain: Integers, lines: Lines) -> ClockStep:
    """Return the jump with its moment between two neighbouring ends of `members`.

    members must have all collectives `around` the jump, not only drawn ones
    domain  (member,) clock domain of each member

    The moment is where fewest ends lie on the wrong side of half the jump.
    """
    common = lines.common(domain, members.end_ns)
    others = np.flatnonzero(domain != step.domain)
    has_others = np.bincount(members.event[others], minlength=int(members.event.max()) + 1) > 0
    low, high = around(step)
    near = (domain == step.domain) & (members.end_ns >= low) & (members.end_ns <= high)
    rows = np.flatnonzero(near & has_others[members.event])
    rows = rows[np.argsort(members.end_ns[rows], kind="stable")]
    time_ns = members.end_ns[rows]
    distance_ns = _from_others(members.event, common, rows, others)
    early = time_ns <= step.at_ns - step.gap_ns // 2
    if not early.any() or early.all():
        return step
    beyond = (distance_ns - np.median(distance_ns[early])) / step.jump_ns > 0.5
    num_early = int(np.argmin(np.cumsum(np.r_[0, np.where(beyond, 1, -1)])))
    if not 0 < num_early < len(time_ns):
        return step
    last, first = int(time_ns[num_early - 1]), int(time_ns[num_early])
    return replace(step, at_ns=last + (first - last) // 2, gap_ns=first - last)


def _level(time_ns: Integers, distance_ns: Floats) -> Floats:
    """Return the distances minus their median slope and level.

    The fitted line of a clock that jumps may have any slope, for nearly all its ends are refused.
    """
    run = np.maximum(time_ns[_NEAR_ENDS:] - time_ns[:-_NEAR_ENDS], 1)
    slope = np.median((distance_ns[_NEAR_ENDS:] - distance_ns[:-_NEAR_ENDS]) / run)
    level: Floats = distance_ns - slope * (time_ns - time_ns[0]).astype(np.float64)
    return level - np.median(level)


def _steps(suspect: Suspect) -> Iterator[ClockStep]:
    """Yield the largest jump of one clock if it stands out from how the clock's ends scatter."""
    windows = np.lib.stride_tricks.sliding_window_view(suspect.distance_ns, _NEAR_ENDS)
    medians = np.median(windows, axis=1)
    place = int(np.argmax(np.abs(medians[_NEAR_ENDS:] - medians[:-_NEAR_ENDS])))
    first = place + _NEAR_ENDS  # the first end after the moment
    low, high = max(first - _LINE_ENDS, 0), first + _LINE_ENDS
    before, after = suspect.at(low, first), suspect.at(first, high)
    gap_ns = int(after.time_ns[0] - before.time_ns[-1])
    at_ns = int(before.time_ns[-1]) + gap_ns // 2
    jump = after.line_at(at_ns) - before.line_at(at_ns)
    scatter = float(np.median(np.abs(np.diff(suspect.at(low, high).distance_ns))))
    longer = float(np.median(after.length_ns) - np.median(before.length_ns))
    if abs(jump) > max(_NOISE_MULTIPLE * scatter, _SMALLEST_NS) and not 0 < jump < 2 * longer:
        yield ClockStep(domain=suspect.domain, at_ns=at_ns, jump_ns=round(jump), gap_ns=gap_ns)


@dataclass(frozen=True)
class Restarts:
    """Shifts of restarted clocks: shift_ns (iteration, rank) is to be added to starts.

    `iterations` and `ranks`, both ascending, name the rows and columns of shift_ns.
    """

    iterations: Integers
    ranks: Integers
    shift_ns: Integers
    note: str

    def of(self, rank: Integers, iteration: Integers) -> Integers:
        """Return (span,) what to add to starts; 0 in iterations in which no rank has an end."""
        if not len(self.iterations):
            return np.zeros(len(rank), dtype=np.int64)
        place = np.minimum(np.searchsorted(self.iterations, iteration), len(self.iterations) - 1)
        shift = self.shift_ns[place, np.searchsorted(self.ranks, rank)]
        return np.where(self.iterations[place] == iteration, shift, 0)

    def only(self, chosen: Integers) -> Restarts:
        """Return the shifts of some ranks, given by their places in `ranks`."""
        return replace(self, ranks=self.ranks[chosen], shift_ns=self.shift_ns[:, chosen])


def restarts_of(spans: pa.Table, matches: Matches, ranks: Integers) -> Restarts:
    """Return the shifts that align the `ranks`, ascending, in each iteration."""
    rank = np.searchsorted(ranks, numbers(spans, "rank"))
    iterations, iteration = np.unique(numbers(spans, "iteration"), return_inverse=True)
    members = Members.of(spans, matches.match, joining_members(spans, matches), ranks)
    messages = matched_messages(spans, matches, ranks, np.arange(len(ranks)))

    def clock(rank: Integers, iteration: Integers) -> Integers:
        return np.searchsorted(iterations, iteration) * len(ranks) + rank

    shift, linked = _shifts(
        replace(members, rank=clock(members.rank, members.iteration)),
        replace(
            messages,
            source=clock(messages.source, messages.iteration),
            destination=clock(messages.destination, messages.iteration),
        ),
        len(iterations) * len(ranks),
    )
    used = np.bincount(iteration * len(ranks) + rank, minlength=len(shift)) > 0
    return Restarts(
        iterations,
        ranks,
        np.rint(shift).astype(np.int64).reshape(len(iterations), len(ranks)),
        _note(shift[linked], int(np.count_nonzero(used & ~linked))),
    )


def _shifts(members: Members, messages: Messages, num_clocks: int) -> tuple[Floats, Flags]:
    """Return (clock,) shift to add to a clock's times, and whether other clocks are tied to it."""
    clocks = np.arange(num_clocks)
    ties = tied(members, messages, clocks)
    component = components(ties.anchors, clocks, num_clocks)
    lines = fit_clocks(ties, with_drift=False)
    shift, _ = relative_lines(lines, references(clocks, component)[component])
    linked = np.bincount(component)[component] > 1
    return np.where(linked, shift, 0.0), linked


def _note(shift_ns: Floats, num_alone: int) -> str:
    if not len(shift_ns):
        return (
            "clocks begin again at every iteration and nothing matched ties them: ranks are "
            "comparable up to the spread of their step begins only"
        )
    alone = f"; {num_alone} of a rank have nothing matched and stay as they were" * bool(num_alone)
    return (
        "clocks begin again at every iteration and were set anew in each, by up to "
        f"{np.abs(shift_ns).max() / 1e3:.1f} µs (median {np.median(np.abs(shift_ns)) / 1e3:.1f} µs)"
        f"{alone}; the time between iterations is not known better than the files' pauses say"
    )
