"""One clock for all ranks: an offset and a drift for each clock domain, and how good they are.

Ranks of one domain read the same physical clock and are moved together. In each set of domains
that share events (a component) one domain is the reference and stays as it is: the one with most
ranks, then the lowest rank. Between components nothing is known but what the host clocks say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from aggregate.anchors import (
    Anchors,
    Messages,
    collective_anchors,
    matched_messages,
    message_anchors,
)
from aggregate.keys import FloatArray, IntArray, group_starts
from aggregate.line_problem import LineProblem
from aggregate.match import Matches
from aggregate.message_order import order_shifts
from aggregate.robust import Lines, estimate_noise, fit_lines, unmoved_lines
from megascan.header import RankHeader
from megascan.timeline import ClockFit

LARGEST_DRIFT_ERROR = 10e-6
"""A drift whose standard error is larger is not claimed but set to 0 (a ratio)."""
_LONGEST_RESIDUAL_NS = 2**40


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
    method: str
    notes: tuple[str, ...] = ()

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

        0 within a clock domain, the larger 99th percentile residual across domains, infinite
        across components.
        """
        error = np.maximum(self.residual_p99_ns[one], self.residual_p99_ns[other])
        error = np.where(self.component[one] == self.component[other], error, np.inf)
        return np.where(self.domain[one] == self.domain[other], 0.0, error)

    def fits(self, reference_ns: int) -> dict[int, ClockFit]:
        """As a timeline carries them, the offset being that at `reference_ns`."""
        offset = self.offset_ns + self.drift * (reference_ns - self.centre_ns)
        return {
            int(rank): ClockFit(
                rank=int(rank),
                domain=self.domain_names[self.domain[place]],
                offset_ns=float(offset[place]),
                drift_ppm=float(self.drift[place] * 1e6),
                residual_median_ns=float(self.residual_median_ns[place]),
                residual_p99_ns=float(self.residual_p99_ns[place]),
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
    anchors = collective_anchors(spans, matches, ranks)
    messages = matched_messages(spans, matches, ranks)
    by_collectives = _components(anchors, domain, len(numbered))
    num_collective = len(anchors.event)
    anchors = anchors.joined(message_anchors(messages, domain, by_collectives))
    component = _components(anchors, domain, len(numbered))
    lines = _fit(anchors, domain, len(numbered), num_collective)
    offset, drift = _relative(lines, _references(domain, component), component)
    alignment = Alignment(
        ranks=ranks,
        domain=domain,
        domain_names=tuple(numbered),
        component=component[domain],
        offset_ns=offset[domain],
        drift=drift[domain],
        centre_ns=lines.centre_ns[domain],
        **_residuals(anchors, lines, len(ranks)),
        method="",
    )
    alignment, order_notes = _in_message_order(alignment, messages)
    return replace(
        alignment,
        method=_method(lines, component, with_messages=len(anchors.event) > num_collective),
        notes=order_notes + _notes(lines, component),
    )


def _components(anchors: Anchors, domain: IntArray, num_domains: int) -> IntArray:
    """(domain,) number of the set of domains that share events, by first domain."""
    same_event = anchors.event[1:] == anchors.event[:-1]
    links = domain[anchors.rank]
    one, other = links[:-1][same_event], links[1:][same_event]
    pairs = np.unique(one * num_domains + other)
    graph = coo_array(
        (np.ones(len(pairs)), (pairs // num_domains, pairs % num_domains)),
        shape=(num_domains, num_domains),
    )
    _, labels = connected_components(graph, directed=False)
    _, first, number = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number].astype(np.int64)


def _fit(anchors: Anchors, domain: IntArray, num_domains: int, num_collective: int) -> Lines:
    """Lines of all domains; a drift that the window cannot determine is left out."""
    domain_of_anchor = domain[anchors.rank]
    problem = LineProblem.of(anchors, domain_of_anchor, num_domains)
    if num_domains == 1 or not len(anchors.event):
        return unmoved_lines(problem)
    apart = _messages_apart(anchors, domain_of_anchor, num_domains, num_collective)
    noise = estimate_noise(
        LineProblem.of(anchors, apart, int(apart.max()) + 1), anchors.label, anchors.slack_ns
    )
    drifting = np.bincount(problem.domain, minlength=num_domains) > 2
    while True:
        lines = fit_lines(problem, noise, drifting)
        certain = drifting & (lines.drift_error <= LARGEST_DRIFT_ERROR)
        if (certain == drifting).all():
            return lines
        drifting = certain


def _messages_apart(
    anchors: Anchors, domain: IntArray, num_domains: int, num_collective: int
) -> IntArray:
    """(anchor,) domains in which the messages of each pair of domains have two of their own.

    `num_collective` anchors come from collectives, the others in pairs from messages.
    """
    pairs = domain[num_collective:].reshape(-1, 2)
    _, pair = np.unique(pairs[:, 0] * num_domains + pairs[:, 1], return_inverse=True)
    own = num_domains + 2 * pair[:, None] + np.arange(2)
    apart: IntArray = np.r_[domain[:num_collective], own.ravel()]
    return apart


def _references(domain: IntArray, component: IntArray) -> IntArray:
    """(component,) the domain with most ranks, then the one of the lowest rank."""
    num_ranks = np.bincount(domain, minlength=len(component))
    order = np.lexsort((np.arange(len(component)), -num_ranks, component))
    return order[group_starts(component[order])]


def _relative(
    lines: Lines, references: IntArray, component: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Offset (at each domain's centre) and drift of each domain against its reference's clock."""
    reference = references[component]
    rate = 1.0 + lines.drift[reference]
    drift = (1.0 + lines.drift) / rate - 1.0
    offset = (lines.offset_ns - lines.offset_ns[reference]) / rate
    offset += lines.centre_ns[reference] - lines.centre_ns
    return offset, drift


def _residuals(anchors: Anchors, lines: Lines, num_ranks: int) -> _Residuals:
    """Median and 99th percentile of each rank's distances over the anchors that were believed."""
    believed = np.flatnonzero(lines.weights > 0)
    distance = np.maximum(np.abs(lines.residual_ns), anchors.slack_ns)[believed]
    whole_ns = np.minimum(np.rint(distance), _LONGEST_RESIDUAL_NS).astype(np.int64)
    rank = anchors.rank[believed]
    distance = np.sort(rank * (_LONGEST_RESIDUAL_NS + 1) + whole_ns) % (_LONGEST_RESIDUAL_NS + 1)
    count = np.bincount(rank, minlength=num_ranks)
    first = np.cumsum(count) - count

    def quantile(share: float) -> FloatArray:
        place = first + np.ceil(share * np.maximum(count - 1, 0)).astype(np.int64)
        return np.where(count > 0, np.r_[distance, 0][np.where(count > 0, place, 0)], 0.0)

    return {
        "residual_median_ns": quantile(0.5),
        "residual_p99_ns": quantile(0.99),
        "num_anchors": count.astype(np.int64),
    }


def _in_message_order(
    alignment: Alignment, messages: Messages
) -> tuple[Alignment, tuple[str, ...]]:
    """Move clocks within their error bars so that no message ends before it was sent."""
    if len(alignment.domain_names) == 1 or not len(messages.source):
        return alignment, ()
    num_domains = len(alignment.domain_names)
    limit = np.zeros(num_domains)
    np.maximum.at(limit, alignment.domain, alignment.residual_p99_ns)
    shift = order_shifts(
        alignment.domain[messages.source],
        alignment.domain[messages.destination],
        alignment.correct(messages.destination, messages.receive_end_ns)
        - alignment.correct(messages.source, messages.send_start_ns),
        limit,
    )
    if not shift.any():
        return alignment, ()
    component = np.zeros(num_domains, dtype=np.int64)
    component[alignment.domain] = alignment.component
    shift -= shift[_references(alignment.domain, component)][component]
    note = (
        f"{np.count_nonzero(shift)} clocks were moved by up to {np.abs(shift).max() / 1e3:.1f} µs "
        "beyond the fit, so that messages end after they were sent"
    )
    return replace(alignment, offset_ns=alignment.offset_ns + shift[alignment.domain]), (note,)


def _method(lines: Lines, component: IntArray, *, with_messages: bool) -> str:
    num_domains = len(component)
    if num_domains == 1:
        return "one host clock: all ranks share it and nothing is moved"
    alone = np.bincount(component)[component] == 1
    if alone.all():
        return "host clocks: no matched communication links the clock domains"
    means = "ends of collectives" + (" and bounds from messages" if with_messages else "")
    return (
        f"{means}: robust least squares over {num_domains} clock domains with "
        f"{len(lines.weights)} anchors, noise {lines.noise_ns / 1e3:.1f} µs; "
        f"offset and drift for {np.count_nonzero(lines.drift)} domains, offset alone for the rest"
    )


def _notes(lines: Lines, component: IntArray) -> tuple[str, ...]:
    notes: list[str] = []
    num_components = int(component.max(initial=0)) + 1
    if num_components > 1:
        alone = np.flatnonzero(np.bincount(component) == 1)
        notes.append(
            f"collectives and messages link the clocks in {num_components} separate sets "
            f"({len(alone)} of a single clock): between them host clocks are believed and no "
            "wait is claimed"
        )
    fixed = int(np.count_nonzero((lines.drift == 0) & (lines.num_anchors > 0)))
    if len(component) > 1 and fixed:
        notes.append(
            f"the traced time is too short to determine the drift of {fixed} clocks to "
            f"{LARGEST_DRIFT_ERROR * 1e6:.0f} ppm; taken as 0"
        )
    rejected = int(np.count_nonzero(lines.weights == 0))
    if rejected:
        notes.append(
            f"{rejected} of {len(lines.weights)} anchors lie too far off and were not believed"
        )
    return tuple(notes)
