"""Draw the ends that clocks are fitted to, where a trace has far more than a fit needs.

A line through a thousand ends is as good as one through a hundred thousand, as long as they are
spread over the whole time and over all that ties a clock to others. So collectives are drawn as a
whole, from each **kind** of them (group, operation, size; within one clock or between clocks) by
itself:

    kind's collectives, in order of time   ●●●●●●●● ●●●●●●●● ●●●●●●●● ●●●●●
    one of each stride, at a drawn place   ..●..... ●....... ......●. ...●.

Every kind keeps as many, or all that it has: the few collectives that tie two hosts together are
all kept beside the thousands within them. Within a stride the place is drawn, because work repeats:
every eighth collective may be that of the same layer, every time. It is drawn from the numbers of
kind and stride, so the same trace gives the same clocks anywhere.

Collectives within one clock tell nothing of clocks, only how much their ends scatter: a few do.
Where the ends are no more than ENOUGH_ENDS, all are taken.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megascan.arrays import (
    Flags,
    Integers,
    RowNumbers,
    by_name,
    combine,
    group_lengths,
    group_numbers,
    group_starts,
)
from megascan.timeline import narrow, narrow_codes

ENOUGH_ENDS = 200_000
"""Ends of collectives of which none is left out, and how many are drawn of more at least."""
_ENDS_A_CLOCK = 1_000
"""More are drawn where there are more than 200 clocks."""
_SHARE_WITHIN = 4
"""A quarter as many are drawn of collectives within one clock."""
_SIZE_BITS = 6
"""Sizes differ by factors of 2**6, as in the classes of anchors."""


def drawn_members(
    spans: pa.Table, match: RowNumbers, rows: RowNumbers, domain: RowNumbers
) -> RowNumbers:
    """Return the rows of whole collectives to fit clocks to, in their order.

    match   (span,) id of its collective
    rows    (member,) rows of collectives' members, in the order of their ids
    domain  (member,) clock domain of each
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
    """Return (collective,) number of its kind, from 0; `rows` are those of first members."""
    size_bytes = np.maximum(narrow(spans, "size_bytes")[rows], 0).astype(np.float64)
    group, groups = narrow_codes(spans, "group")
    op, ops = narrow_codes(spans, "op")
    key = combine(
        by_name(group[rows], groups),
        by_name(op[rows], ops),
        np.frexp(size_bytes)[1].astype(np.int64) // _SIZE_BITS,
        joins.astype(np.int64),
    )
    return np.unique(key, return_inverse=True)[1].astype(np.int64)


def _strides(kind: Integers, lengths: Integers, budget: int) -> Integers:
    """Return (kind,) one of how many is drawn, so that all kinds keep as many within the budget.

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
    """Return (collective,) whether it is the one of its stride; collectives are in order of time.

    A last stride that is not full may have none.
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
