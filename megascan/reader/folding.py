"""Begin and end records folded into spans, step by step, without a loop over records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Folded:
    """Spans as rows of their begin and end records, in the order of begins.

    `step` numbers the steps of the file from 0; `depth` is 0 for the step itself, 1 for scopes
    directly in it. Records of steps that never closed, or whose scopes do not nest, are not among
    them: `num_open_steps` and `num_broken_steps` count those, `num_open_spans` the begin records in
    steps that never closed, `num_outside` those outside of any step (evaluation).
    """

    begin: Integers
    end: Integers
    step: Integers
    depth: Integers
    num_steps: int
    num_open_steps: int
    num_broken_steps: int
    num_open_spans: int
    num_outside: int


def fold(is_begin: Flags, is_step: Flags, name: Integers) -> Folded:
    """Pair every begin with its end; `is_step` marks the records that open and close a step.

    In a well-nested sequence the records of one level alternate begin, end, begin, end. So: number
    the levels by a running sum, sort stably by (step, level), and neighbours are pairs.

        record   B step  B a  B b  E b  E a  E step        level 1: B step, E step
        level      1      2    3    3    2     1           level 2: B a, E a …
    """
    rows = np.arange(len(is_begin), dtype=np.int64)
    step_begin, step_end = _steps(is_begin & is_step, ~is_begin & is_step)
    if not len(step_begin):
        none = rows[:0]
        return Folded(none, none, none, none, 0, 0, 0, 0, int(np.sum(is_begin)))
    segment = np.cumsum(is_begin & is_step) - 1
    inside = (segment >= 0) & (rows <= step_end[np.maximum(segment, 0)])
    level = np.cumsum(np.where(is_begin, 1, -1)) + ~is_begin
    level = level - level[step_begin][np.maximum(segment, 0)]
    kept = rows[inside]
    kept = kept[np.lexsort((level[kept], segment[kept]))]
    broken = np.zeros(len(step_begin), dtype=np.bool_)
    broken[np.bincount(segment[kept], minlength=len(step_begin)) % 2 == 1] = True
    even = kept[~broken[segment[kept]]]
    first, second = even[::2], even[1::2]
    wrong = ~is_begin[first] | is_begin[second] | (level[first] != level[second])
    broken[segment[first[wrong | (name[first] != name[second])]]] = True
    kept = kept[~broken[segment[kept]]]
    begin, end = kept[::2], kept[1::2]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    closed = step_end >= 0
    good = np.cumsum(closed & ~broken) - 1
    return Folded(
        begin=begin,
        end=end,
        step=good[segment[begin]],
        depth=level[begin],
        num_steps=int(np.sum(closed & ~broken)),
        num_open_steps=int(np.sum(~closed)),
        num_broken_steps=int(np.sum(closed & broken)),
        num_open_spans=int(np.sum(is_begin & (segment >= 0) & ~closed[segment])),
        num_outside=int(np.sum(is_begin & ~inside & ((segment < 0) | closed[segment]))),
    )


def _steps(begins: Flags, ends: Flags) -> tuple[Integers, Integers]:
    """Row of each step's begin, and of the first end before the next step begins (-1: none)."""
    begin, end = np.flatnonzero(begins), np.flatnonzero(ends)
    following = np.append(begin[1:], len(begins))
    at = np.searchsorted(end, begin)
    first_end = np.append(end, len(begins))[at]
    return begin.astype(np.int64), np.where(first_end < following, first_end, -1).astype(np.int64)
