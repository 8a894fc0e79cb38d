"""One clock for all ranks: an offset and a drift for each clock domain, and how good they are.

Ranks of one domain read the same physical clock and are moved together. In each set of domains
that share events (a component) one domain is the reference and stays as it is: the one with most
ranks, then the lowest rank. Between components nothing is known but what the host clocks say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
import pyarrow as pa

from aggregate.accuracy import Accuracy, distances
from aggregate.causality import Causality, believed_gap, contradictions
from aggregate.clock_notes import fit_method, fit_notes, order_notes, step_note
from aggregate.fitting import accuracy_of, causality_of, fit_clocks, relative_lines
from aggregate.keys import FloatArray, IntArray
from aggregate.match import Matches
from aggregate.ordering import ordering_shift
from aggregate.robust import Lines
from aggregate.steps import (
    MENDED_SHARE,
    MOST_STEPS,
    ClockStep,
    find_step,
    num_refused,
    suspicious,
    unmended_ns,
)
from aggregate.ties import Ties, components, references, tie
from megascan.header import RankHeader
from megascan.timeline import ClockFit, numbers, shifted

_LONGEST_RESIDUAL_NS = 2**40
_ORDER_ROUNDS = 4


class _Residuals(TypedDict):
    residual_median_ns: FloatArray
    residual_p99_ns: FloatArray
    num_anchors: IntArray


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Corrections of all ranks; every array is (rank,) in the order of `ranks`.

    common = local + offset_ns + drift · (local − centre_ns).
    """

    ranks: IntArray
    domain: IntArray
    domain_names: tuple[str, ...]
    component: IntArray
    offset_ns: FloatArray
    drift: FloatArray
    centre_ns: IntArray
    residual_median_ns: FloatArray
    residual_p99_ns: FloatArray
    num_anchors: IntArray
    accuracy: Accuracy
    method: str
    notes: tuple[str, ...] = ()
    num_refused: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(domain,) ends of collectives that were not believed."""
    step: ClockStep | None = None
    """A jump of a clock that no line fits; times are still as recorded (`without_steps`)."""

    def correct(self, position: IntArray, time_ns: IntArray) -> IntArray:
        """Common time of each time; `position` is that of its rank in `ranks`.

        Each rank's map never reverses an order, so that what nests keeps nesting.
        """
        if not self.offset_ns.any() and not self.drift.any():
            return time_ns
        age = (time_ns - self.centre_ns[position]).astype(np.float64)
        shift = self.offset_ns[position] + self.drift[position] * age
        return time_ns + np.rint(shift).astype(np.int64)

    def error_between(self, one: IntArray, other: IntArray) -> FloatArray:
        """Error bar, ns, of a comparison of times between ranks (positions in `ranks`).

        0 within a clock domain, infinite across components; see `aggregate.accuracy`.
        """
        return self.accuracy.between(self.domain[one], self.domain[other])

    def of_domains(self, domain: IntArray, time_ns: IntArray) -> FloatArray:
        """Common times (time,) of clock domains (time,), ns from the first rank's centre."""
        position = np.unique(self.domain, return_index=True)[1][domain]
        common: IntArray = self.correct(position, time_ns) - self.centre_ns[0]
        return common.astype(np.float64)

    def fits(self, reference_ns: int) -> dict[int, ClockFit]:
        """As a timeline carries them, the offset being that at `reference_ns`."""
        offset = self.offset_ns + self.drift * (reference_ns - self.centre_ns)
        error_ns = self.accuracy.of_domains()[self.domain]
        return {
            int(rank): ClockFit(
                rank=int(rank),
                domain=self.domain_names[self.domain[place]],
                offset_ns=float(offset[place]),
                drift_ppm=float(self.drift[place] * 1e6),
                residual_median_ns=float(self.residual_median_ns[place]),
                residual_p99_ns=float(self.residual_p99_ns[place]),
                error_ns=float(error_ns[place]),
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
    lines = fit_clocks(ties)
    offset, drift = relative_lines(lines, references(domain, component), component)
    accuracy = accuracy_of(ties, lines, component)
    refused = num_refused(ties, lines)
    suspects = suspicious(ties, lines, refused)
    alignment = Alignment(
        ranks=ranks,
        domain=domain,
        domain_names=tuple(numbered),
        component=component[domain],
        offset_ns=offset[domain],
        drift=drift[domain],
        centre_ns=lines.centre_ns[domain],
        **_residuals(ties, lines, accuracy),
        accuracy=accuracy,
        method="",
        num_refused=refused,
        step=find_step(suspects),
    )
    alignment, shifted_notes = _in_order(alignment, causality_of(ties, lines), component)
    alignment = _widened(alignment, unmended_ns(suspects, ties.num_domains))
    with_messages = len(ties.anchors.event) > ties.num_collective
    return replace(
        alignment,
        method=fit_method(lines, component, with_messages=with_messages),
        notes=shifted_notes + fit_notes(lines, component, ranks[ties.anchors.rank]),
    )


def _residuals(ties: Ties, lines: Lines, accuracy: Accuracy) -> _Residuals:
    """Median and 99th percentile of each rank's distances over the anchors that were believed.

    Classes that are noisier than those that join a rank to the others are left out of the
    residuals, and with several clocks those that join none; num_anchors counts all.
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

    def quantile(share: float) -> FloatArray:
        place = first + np.ceil(share * np.maximum(count - 1, 0)).astype(np.int64)
        return np.where(count > 0, np.r_[distance, 0][np.where(count > 0, place, 0)], 0.0)

    return {
        "residual_median_ns": quantile(0.5),
        "residual_p99_ns": quantile(0.99),
        "num_anchors": np.bincount(anchors.rank[believed], minlength=num_ranks).astype(np.int64),
    }


def without_steps(
    spans: pa.Table, matches: Matches, headers: Mapping[int, RankHeader], clocks: Alignment
) -> tuple[pa.Table, Alignment]:
    """(spans, their alignment): times of clocks that jumped are put back, where that helps.

    `clocks` is the alignment of the spans as they are.
    """
    domain = clocks.domain[np.searchsorted(clocks.ranks, numbers(spans, "rank"))]
    notes: list[str] = []
    for _ in range(MOST_STEPS):
        step = clocks.step
        if step is None:
            break
        is_later = (domain == step.domain) & (numbers(spans, "start_ns") > step.at_ns)
        moved = shifted(spans, np.where(is_later, -step.jump_ns, 0))
        mended = align_clocks(moved, matches, headers)
        before, after = (int(each.num_refused.sum()) for each in (clocks, mended))
        if after > MENDED_SHARE * before:
            break
        spans, clocks = moved, mended
        notes.append(step_note(clocks.domain_names[step.domain], step))
    return spans, replace(clocks, notes=(*notes, *clocks.notes))


def _widened(alignment: Alignment, least_ns: FloatArray) -> Alignment:
    """Error bars that hold what the fit has refused of a clock."""
    if not least_ns.any():
        return alignment
    error_ns = np.maximum(alignment.accuracy.violation_ns, least_ns)
    return replace(alignment, accuracy=replace(alignment.accuracy, violation_ns=error_ns))


def _in_order(
    alignment: Alignment, causality: Causality, component: IntArray
) -> tuple[Alignment, tuple[str, ...]]:
    """Move clocks so that nothing is received before it was sent.

    How far they had to be moved, and what then remains impossible, widens the error bars.
    """
    num_domains = len(component)
    if num_domains == 1:
        return alignment, ()
    total, reference = np.zeros(num_domains), references(alignment.domain, component)[component]
    for last in (*[False] * _ORDER_ROUNDS, True):
        orders = causality.orders(alignment.of_domains)
        delay = orders.delay_ns(alignment.of_domains)
        if last or believed_gap(orders, delay) < 1.0:
            break
        shift = ordering_shift(alignment.accuracy, orders, delay)
        shift -= shift[reference]
        total += shift
        alignment = replace(alignment, offset_ns=alignment.offset_ns + shift[alignment.domain])
    remaining = contradictions(orders, delay, causality)
    error_ns = np.maximum(remaining.error_ns, np.abs(total))
    accuracy = replace(alignment.accuracy, violation_ns=error_ns)
    return replace(alignment, accuracy=accuracy), order_notes(total, remaining)
