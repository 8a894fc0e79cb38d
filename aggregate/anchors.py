"""Find what ties clocks together: the ends of collectives, and bounds from messages.

No member leaves a collective before the last member has arrived, so all ends of a collective lie
together on a common clock, whichever member was late. Starts carry the lateness and are never used.
Operations with a root are left out: the source of a broadcast need not wait for any other rank.

For a message it is only certain that the receive ends after the send started. The fastest messages
of an iteration in both directions bound the difference of two clocks from both sides. The middle of
these bounds is an anchor, the weaker the wider they are, as in network time protocols:

    rank i  s1 ──────╮      ╭────▶ r2        j − i  ≤  r1 − s1       (clock j minus clock i)
    rank j       r1 ◀╯  s2 ─╯                j − i  ≥  s2 − r2

That is wide where a rank posts its send long before the other is there. But large messages meet
(NCCL and MPI call it a rendezvous): both sides leave together. So the ends are looked at as well:
if receives end behind their sends by as much in all messages, and by opposite amounts in the two
directions, that amount is the difference of the clocks:

    forward    r − s  =  j − i + lag         offset = (forward − backward) / 2
    backward   r − s  =  i − j + lag         wrong by (forward + backward) / 2 at most, and by how
                                             far messages differ in r − s

Where that is less than the bounds leave open, it counts. Example: sends that wait 0.5 to 1 ms for
their receivers; ends say 5 µs where the bounds said 3.9 ms. Buffered sends end long before
their receives in both directions, and so say nothing.

Anchors of one class scatter alike: the collectives of one parallel axis, operation and size. The
8 bytes of a flag end everywhere within a microsecond, a ring of gigabytes within tens of them.

A line through a thousand ends is as good as one through a hundred thousand, as long as the ends are
spread over the whole time and over all that ties a clock to others. So where a trace has far more
ends than a fit needs, only some collectives are drawn, each with all of its members
(`drawn_members`), from every **kind** of collective (group, operation, size; within one clock or
between clocks) by itself:

    kind's collectives, in order of time   ●●●●●●●● ●●●●●●●● ●●●●●●●● ●●●●●
    one of each stride, at a drawn place   ..●..... ●....... ......●. ...●.

Every kind keeps about the same number of collectives, or all that it has: the few collectives that
tie two hosts together are all kept, next to thousands within each host. The place within a stride
is drawn, because work repeats: every eighth collective may be that of the same layer, every time.
It is drawn from the numbers of kind and stride, so the same trace gives the same clocks anywhere.

Collectives within one clock tell nothing of clocks, only how much ends scatter: a few suffice.
Where there are no more than ENOUGH_ENDS ends, all are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from aggregate.match import Matches
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    RowNumbers,
    by_name,
    combine,
    group_lengths,
    group_numbers,
    group_starts,
    median_by,
    numbered,
)
from megascan.schema import NOT_APPLICABLE, OWN_END
from megascan.timeline import equals, narrow, narrow_codes, numbers
from megascan.vocabulary import ROOTED_OPS, axis_of_group

ONE_WAY_SLACK_NS = 100_000
"""Deviation given to a message where no message in the opposite direction bounds the clocks."""
ASYMMETRY = 0.05
"""How far the middle of two bounds lies off the truth, as a part of their half width.

Production pipelines on NCCL show 0.02 to 0.1 between stages whose clocks are good.
"""
LEAST_LAG_SLACK_NS = 2_000
"""How far apart the ends of a send and its receive may lie where all messages say they do not."""
_SIZE_BITS = 6
"""Sizes of one class or kind differ by less than a factor of 2**6."""
_FEWEST_OF_CLASS = 24


@dataclass(frozen=True)
class Anchors:
    """Times that a common clock must make equal, ordered by `event`.

    event   (anchor,) number of the collective, dense from 0
    rank    (anchor,) position of the rank among the trace's ranks
    end_ns  (anchor,) end of the communication by the rank's own clock
    slack_ns (anchor,) how far apart the times of an event may really be: for messages half the
             width of the bounds
    label   (anchor,) class of anchors with the same noise
    """

    event: Integers
    rank: Integers
    end_ns: Integers
    slack_ns: Floats
    label: Integers

    @property
    def num_events(self) -> int:
        """Number of distinct events."""
        return int(self.event[-1]) + 1 if len(self.event) else 0

    def rows(self, rows: Integers) -> Anchors:
        """Return some rows, which must be whole events; events and classes are numbered from 0."""
        label = self.label[rows]
        return Anchors(
            group_numbers(group_starts(self.event[rows]), len(rows)),
            self.rank[rows],
            self.end_ns[rows],
            self.slack_ns[rows],
            label - label.min(initial=np.iinfo(np.int64).max),
        )

    def joined(self, other: Anchors) -> Anchors:
        """Return both sets of anchors, the events of `other` numbered after this set's events."""
        return Anchors(
            np.r_[self.event, other.event + self.num_events],
            np.r_[self.rank, other.rank],
            np.r_[self.end_ns, other.end_ns],
            np.r_[self.slack_ns, other.slack_ns],
            np.r_[self.label, other.label + self.label.max(initial=-1) + 1],
        )


@dataclass(frozen=True)
class Messages:
    """Matched sends and receives, one row a message; each time by its rank's own clock."""

    iteration: Integers
    source: Integers
    destination: Integers
    send_start_ns: Integers
    send_end_ns: Integers
    receive_end_ns: Integers
    certain: Flags
    """False where the receive's end is only a bound."""


@dataclass(frozen=True)
class Members:
    """Every member of a matched collective that joins all its ranks, ordered by `event`.

    event, rank, label as in Anchors; start_ns and end_ns by the rank's own clock. `certain` is
    false where the end is only a bound (the trainer's own wait, or work of the rank's own): it says
    nothing about when other members ended, but like every end it comes after the last member's
    start.
    """

    event: Integers
    rank: Integers
    start_ns: Integers
    end_ns: Integers
    label: Integers
    certain: Flags
    iteration: Integers

    @classmethod
    def of(cls, spans: pa.Table, match: RowNumbers, rows: RowNumbers, ranks: Integers) -> Members:
        """Take the members of whole matches, in order, from `rows` of `spans`.

        Matches of a single member are left out. Ranks are given as positions in `ranks`.
        """
        start_ns = numbers(spans, "start_ns")[rows]
        everyone = cls(
            match[rows].astype(np.int64),
            np.searchsorted(ranks, narrow(spans, "rank")[rows]).astype(np.int64),
            start_ns,
            start_ns + numbers(spans, "duration_ns")[rows],
            _classes(spans, rows),
            _ends_together(spans, rows),
            narrow(spans, "iteration")[rows].astype(np.int64),
        )
        return everyone.at(everyone.in_company(np.ones(len(rows), dtype=np.bool_)))

    def in_company(self, chosen: Flags) -> Integers:
        """Return the rows of `chosen` members whose event has at least two chosen members."""
        num_members = np.bincount(self.event, chosen, int(self.event.max(initial=-1)) + 1)
        return np.flatnonzero(chosen & (num_members[self.event] > 1))

    def at(self, rows: Integers) -> Members:
        """Return the members in some rows, with their events numbered from 0."""
        chosen = Members(**{name: column[rows] for name, column in vars(self).items()})
        return replace(chosen, event=group_numbers(group_starts(chosen.event), len(rows)))

    def anchors(self) -> Anchors:
        """Return the ends of all members as anchors."""
        return Anchors(self.event, self.rank, self.end_ns, np.zeros(len(self.event)), self.label)


def joining_members(spans: pa.Table, matches: Matches) -> RowNumbers:
    """Return the rows of all members of matched collectives without a root, in order."""
    rows = matches.members[: matches.num_collective_members]
    joining: RowNumbers = rows[~equals(spans, "op", *ROOTED_OPS)[rows]]
    return joining


def _ends_together(spans: pa.Table, rows: RowNumbers) -> Flags:
    """Flag the rows, (row,), whose end is that of the collective.

    One that work of the rank's own follows is believed where no other collective of its axis is
    there to tie clocks: better a wrong tie than none.
    """
    bound = narrow(spans, "end_is_bound")[rows]
    certain: Flags = np.asarray(bound == NOT_APPLICABLE)
    own = bound == OWN_END
    if not own.any():  # so it is in all but the original's format
        return certain
    axis = _axes(spans, rows)
    return np.asarray(certain | (own & ~np.isin(axis, axis[certain])))


def _axes(spans: pa.Table, rows: RowNumbers) -> Integers:
    """Number the parallel axes of rows, (row,), in alphabetical order from 0: tp of tp@4."""
    group_codes, names = narrow_codes(spans, "group")
    axes = [axis_of_group(name) if "@" in name else "" for name in names]
    numbered = {axis: number for number, axis in enumerate(sorted({"", *axes}))}
    return np.array([numbered[axis] for axis in axes], dtype=np.int64)[group_codes[rows]]


def _classes(spans: pa.Table, rows: RowNumbers) -> Integers:
    """Number the classes of rows, (row,): the axis in the group's name (tp of tp@4), operation and
    size together.

    Sizes differ by factors of 2**_SIZE_BITS; a class of too few members joins the class of its
    axis.
    """
    op_codes, ops = narrow_codes(spans, "op")
    axis = _axes(spans, rows)
    size = _size_classes(spans, rows)
    num_sizes = 64 // _SIZE_BITS + 1
    op = by_name(op_codes[rows], ops)
    fine = (axis * max(len(ops), 1) + op) * num_sizes + size + int(axis.max(initial=0)) + 1
    counts = np.bincount(fine)
    label = np.where(counts[fine] >= _FEWEST_OF_CLASS, fine, axis) if len(rows) else fine
    used = np.flatnonzero(np.bincount(label))
    return np.searchsorted(used, label).astype(np.int64)


def _size_classes(spans: pa.Table, rows: RowNumbers) -> Integers:
    """Return (row,) a number for sizes that differ by less than a factor of 2**_SIZE_BITS."""
    size_bytes = np.maximum(narrow(spans, "size_bytes")[rows], 0).astype(np.float64)
    return np.frexp(size_bytes)[1].astype(np.int64) // _SIZE_BITS


def matched_messages(
    spans: pa.Table, matches: Matches, ranks: Integers, domain: Integers
) -> Messages:
    """Return every matched pair of send and receive between two clock domains as one row.

    ranks   (rank,) ranks of the trace; the result names their positions
    domain  (rank,) clock domain of each rank
    """
    pairs = matches.members[matches.num_collective_members :]
    rank = narrow(spans, "rank")
    source, destination = (np.searchsorted(ranks, rank[pairs[side::2]]) for side in (0, 1))
    apart = np.flatnonzero(domain[source] != domain[destination])
    sends, receipts = pairs[0::2][apart], pairs[1::2][apart]
    start_ns = numbers(spans, "start_ns")
    return Messages(
        narrow(spans, "iteration")[sends].astype(np.int64),
        source[apart].astype(np.int64),
        destination[apart].astype(np.int64),
        start_ns[sends],
        start_ns[sends] + numbers(spans, "duration_ns")[sends],
        start_ns[receipts] + numbers(spans, "duration_ns")[receipts],
        narrow(spans, "end_is_bound")[receipts] == NOT_APPLICABLE,
    )


def message_anchors(messages: Messages, domain: Integers, component: Integers) -> Anchors:
    """Return an event of two members for each iteration and pair of domains with messages.

    domain     (rank,) clock domain of each rank
    component  (domain,) which domains collectives link already

    Where collectives link the pair as well, the middle is taken to be wrong by ASYMMETRY of the
    bounds' half width; messages in one direction only, and receives whose end is only a bound, are
    left out. Where collectives do not link the pair, the whole half width counts, and if messages
    go in one direction only, the fastest is taken to have needed no time. Linked pairs are one
    class of anchors, unlinked pairs another.
    """
    source, destination = domain[messages.source], domain[messages.destination]
    tied = component[source] == component[destination]
    apart = np.flatnonzero((source != destination) & (messages.certain | ~tied))
    source, destination = source[apart], destination[apart]
    forward = source < destination
    pair = combine(
        np.minimum(source, destination), np.maximum(source, destination), messages.iteration[apart]
    )
    delay = messages.receive_end_ns[apart] - messages.send_start_ns[apart]
    one_way = combine(pair, (~forward).astype(np.int64))
    order = np.lexsort((delay, one_way))
    begins = group_starts(one_way[order])
    num_messages = group_lengths(begins, len(order))
    fastest = order[begins]
    starts = group_starts(pair[fastest])
    lengths = group_lengths(starts, len(fastest))
    fewest = np.minimum(num_messages[starts], num_messages[starts + lengths - 1])
    first, last = fastest[starts], fastest[starts + lengths - 1]
    linked = component[source[first]] == component[destination[first]]
    useful = (lengths == 2) | ~linked
    first, last, linked = first[useful], last[useful], linked[useful]
    return _middle(
        messages,
        apart[first],
        apart[last],
        forward=forward[first],
        linked=linked,
        lags=_lags(messages, apart, one_way, (first, last), fewest[useful]),
    )


@dataclass(frozen=True)
class _Lags:
    """By how much receives end behind their sends, ns, (pair,): the median of the messages of an
    iteration, in one direction and `back`, and how far messages differ in that.
    """

    out_ns: Floats
    back_ns: Floats
    spread_ns: Floats

    @property
    def offset_ns(self) -> Floats:
        """Return by how much the second clock is ahead."""
        return (self.out_ns - self.back_ns) / 2

    @property
    def slack_ns(self) -> Floats:
        """Return how far that may be off."""
        return np.abs(self.out_ns + self.back_ns) / 2 + self.spread_ns + LEAST_LAG_SLACK_NS


def _lags(
    messages: Messages,
    apart: Integers,
    one_way: Integers,
    ways: tuple[Integers, Integers],
    fewest: Integers,
) -> _Lags:
    """Return the lags of pairs, whose messages in one direction and back are `ways` of `apart`,
    `fewest` (pair,) in either direction. One message has nothing to agree with.
    """
    lag_ns = (messages.receive_end_ns[apart] - messages.send_end_ns[apart]).astype(np.float64)
    typical_ns = median_by(one_way, lag_ns)
    spread_ns = median_by(one_way, np.abs(lag_ns - typical_ns))
    first, last = ways
    spread_ns = np.where(fewest < 2, np.inf, np.maximum(spread_ns[first], spread_ns[last]))
    return _Lags(typical_ns[first], typical_ns[last], spread_ns)


def _middle(
    messages: Messages,
    one: Integers,
    other: Integers,
    *,
    forward: Flags,
    linked: Flags,
    lags: _Lags,
) -> Anchors:
    """Return events of two members from the fastest message of each direction, `one` and `other`,
    or from the ends of all messages where these tell more.

    `one` and `other` are the same message unless there are messages in both directions.
    """
    both = one != other
    rank_a = np.where(forward, messages.source[one], messages.destination[one])
    rank_b = np.where(forward, messages.destination[one], messages.source[one])
    time_a = np.where(forward, messages.send_start_ns[one], messages.receive_end_ns[one])
    time_b = np.where(forward, messages.receive_end_ns[one], messages.send_start_ns[one])
    back_a = np.where(both, messages.receive_end_ns[other], time_a)
    back_b = np.where(both, messages.send_start_ns[other], time_b)
    half_width = np.abs((time_b - time_a) + (back_a - back_b)) / 2
    slack = np.where(both, half_width, ONE_WAY_SLACK_NS) * np.where(linked, ASYMMETRY, 1.0)
    middle_a, middle_b = (time_a + back_a) // 2, (time_b + back_b) // 2
    together = both & (lags.slack_ns < slack)
    middle_b = np.where(together, middle_a + np.rint(lags.offset_ns).astype(np.int64), middle_b)
    num_events = len(one)
    return Anchors(
        np.repeat(np.arange(num_events), 2).astype(np.int64),
        np.stack([rank_a, rank_b], axis=1).ravel(),
        np.stack([middle_a, middle_b], axis=1).ravel(),
        np.repeat(np.where(together, lags.slack_ns, slack), 2),
        np.repeat(np.where(linked, 0, 1), 2).astype(np.int64),
    )


ENOUGH_ENDS = 200_000
"""Up to this number all ends of collectives are taken; of more ends, about this many are drawn."""
_ENDS_A_CLOCK = 1_000
"""Ends that are drawn for each clock where that makes more than ENOUGH_ENDS."""
_SHARE_WITHIN = 4
"""Of collectives within one clock a quarter of ENOUGH_ENDS ends are drawn."""


def drawn_members(
    spans: pa.Table, match: RowNumbers, rows: RowNumbers, domain: RowNumbers
) -> RowNumbers:
    """Return the rows of whole collectives to fit clocks to, in their order.

    match   (span,) id of the span's collective
    rows    (member,) rows of collectives' members, in the order of the collectives' ids
    domain  (member,) clock domain of each member
    """
    if len(rows) <= ENOUGH_ENDS:
        return rows
    starts = group_starts(match[rows])
    lengths = group_lengths(starts, len(rows))
    joins = np.minimum.reduceat(domain, starts) != np.maximum.reduceat(domain, starts)
    kind = _kinds(spans, rows[starts], joins)
    first = np.unique(kind, return_index=True)[1]
    num_clocks = int(np.count_nonzero(np.bincount(domain)))
    budget = max(ENOUGH_ENDS, _ENDS_A_CLOCK * num_clocks)
    if not joins.any():
        stride = _strides(kind, lengths, budget)
    else:
        between, within = (np.where(joins == joined, lengths, 0) for joined in (True, False))
        stride = np.where(
            joins[first],
            _strides(kind, between, budget),
            _strides(kind, within, ENOUGH_ENDS // _SHARE_WITHIN),
        )
    return rows[np.repeat(_drawn(kind, stride), lengths)]


def _kinds(spans: pa.Table, rows: RowNumbers, joins: Flags) -> Integers:
    """Number the kinds of collectives from 0, (collective,).

    rows   (collective,) row of the first member
    joins  (collective,) whether it joins several clocks
    """
    group, groups = narrow_codes(spans, "group")
    op, ops = narrow_codes(spans, "op")
    return numbered(
        by_name(group[rows], groups),
        by_name(op[rows], ops),
        _size_classes(spans, rows),
        joins.astype(np.int64),
    )


def _strides(kind: Integers, lengths: Integers, budget: int) -> Integers:
    """Return the stride of each kind, (kind,): one collective is drawn from each stride.

    All kinds keep about the same number of collectives, as many as the budget of ends allows.

    lengths  (collective,) members that count, 0 where they are not drawn from this budget
    """
    count = np.bincount(kind)
    length = np.bincount(kind, lengths) / count
    least, most = 1, int(count.max())
    while least < most:
        kept = (least + most + 1) // 2
        fits = float((np.minimum(count, kept) * length).sum()) <= budget
        least, most = (kept, most) if fits else (least, kept - 1)
    return -(-count // least)


def _drawn(kind: Integers, stride: Integers) -> Flags:
    """Return (collective,) whether it is the one drawn from its stride.

    Collectives are in the order of time. From a last stride that is not full, none may be drawn.
    """
    order = np.argsort(kind, kind="stable")
    starts = group_starts(kind[order])
    place = np.empty(len(kind), dtype=np.int64)
    place[order] = np.arange(len(kind)) - starts[group_numbers(starts, len(kind))]
    own = stride[kind]
    drawn: Flags = place % own == _scattered(kind, place // own) % own
    return drawn


def _scattered(one: Integers, other: Integers) -> Integers:
    """Return numbers without a pattern from pairs of numbers (the finaliser of splitmix64)."""
    mixed = (one << 32 | other).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(2)).astype(np.int64)
