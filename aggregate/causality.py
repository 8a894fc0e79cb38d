"""Find what no clock may contradict: nothing is received before it was sent.

`Ties` are what ties the clocks of a trace together; `components` are the sets of clocks so tied.

A receive ends after its send started; a collective that joins all its ranks lets none leave
before the last member has entered. So on a common clock

    start on the one rank  ≤  end on the other            for every pair of members

whichever rank was late or slow: a late start makes the bound looser, never wrong. These
inequalities do not estimate clocks. They show when an estimate cannot be right, and how far it must
be off:

    rank i   ├── all_reduce ──┤                     fitted clocks: i leaves before j has entered,
    rank j                        ├─ all_reduce ─┤  by the gap; one of the clocks is off by as much
                              ╰gap╯

One or two violations may come from wrong matches, so of each pair of clocks the third-worst
violation is the first that is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from aggregate.anchors import (
    Anchors,
    Members,
    Messages,
    drawn_members,
    joining_members,
    matched_messages,
    message_anchors,
)
from aggregate.fitting import LineProblem, thin_rows
from aggregate.match import Matches, by_rank
from megascan.arrays import (
    Flags,
    Floats,
    Integers,
    combine,
    group_lengths,
    group_starts,
    linked_sets,
)
from megascan.timeline import narrow

BELIEVED_VIOLATION = 3
"""The third-worst violation of a pair of clocks counts: one or two bad matches move nothing."""
_SLIGHT_NS = 2.0
"""Smaller violations are rounding: two times are rounded to whole ns each."""
_HELD_DEVIATION_NS = 1e3
_HELD_A_PAIR = 8
"""Most violations of a pair of clocks that count together."""
_ROUNDS = 20
_RARE_SHARE = 0.05
"""Part of the matches of two clocks that may be wrong."""
_MOST_PAIRS = 200


class Trust(IntEnum):
    """How far the fit trusts the match that an order comes from."""

    DOUBTFUL = 0
    """The ends of this collective lie too far apart and were not believed."""
    OPEN = 1
    """A message, or a collective whose ends are only bounds."""
    FIRM = 2
    """The ends of this collective agree."""


Clock: TypeAlias = Callable[[Integers, Integers], Floats]
"""Function of domains (time,) and local times (time,): their common times, ns from any origin."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Pairs of times, (order,) each: the late time must not come before the early time.

    `trust` is a Trust: a wrong match has ends that do not agree.
    """

    early_domain: Integers
    early_ns: Integers
    late_domain: Integers
    late_ns: Integers
    trust: Integers

    def delay_ns(self, clock: Clock) -> Floats:
        """Return how long the late time comes after the early time; negative is impossible."""
        late = clock(self.late_domain, self.late_ns)
        return late - clock(self.early_domain, self.early_ns)

    def at(self, rows: Integers | Flags) -> Orders:
        """Return the orders in some rows."""
        return Orders(**{name: column[rows] for name, column in vars(self).items()})

    def joined(self, other: Orders) -> Orders:
        """Return both sets of orders together."""
        columns = vars(other)
        return Orders(**{name: np.r_[column, columns[name]] for name, column in vars(self).items()})


@dataclass(frozen=True)
class Causality:
    """Everything in a trace that has an order across clock domains.

    members   of collectives, also those whose ends are only bounds
    domain    (rank,) clock domain of each rank
    believed  (member,) whether the fit has believed this end
    """

    members: Members
    messages: Messages
    domain: Integers
    believed: Flags

    def orders(self, clock: Clock) -> Orders:
        """Return an order for each message, and one for each collective: the pair of members that
        comes nearest to a contradiction.
        """
        return self._of_messages().joined(self._of_collectives(clock))

    def num_shared(self, one: int, other: int) -> int:
        """Count in how many collectives and messages two domains take part together."""
        domain = self.domain[self.members.rank]
        of_one, of_other = (np.unique(self.members.event[domain == each]) for each in (one, other))
        source, destination = self._ends_of_messages()
        both = (source == one) & (destination == other) | (source == other) & (destination == one)
        common = np.intersect1d(of_one, of_other, assume_unique=True)
        return len(common) + int(np.count_nonzero(both))

    def _ends_of_messages(self) -> tuple[Integers, Integers]:
        """Return the domains that send, and those that receive, (message,)."""
        return self.domain[self.messages.source], self.domain[self.messages.destination]

    def _of_messages(self) -> Orders:
        source, destination = self._ends_of_messages()
        everything = Orders(
            early_domain=source,
            early_ns=self.messages.send_start_ns,
            late_domain=destination,
            late_ns=self.messages.receive_end_ns,
            trust=np.full(len(source), Trust.OPEN),
        )
        return everything.at(source != destination)

    def _of_collectives(self, clock: Clock) -> Orders:
        """Return the order of each collective: the last member enters, then the first leaves."""
        domain, starts = self.domain[self.members.rank], group_starts(self.members.event)
        entered = _extreme(clock(domain, self.members.start_ns), self.members.event, starts)
        left = _extreme(-clock(domain, self.members.end_ns), self.members.event, starts)
        everything = Orders(
            early_domain=domain[entered],
            early_ns=self.members.start_ns[entered],
            late_domain=domain[left],
            late_ns=self.members.end_ns[left],
            trust=self._trust(entered, left),
        )
        return everything.at(domain[entered] != domain[left])

    def _trust(self, entered: Integers, left: Integers) -> Integers:
        certain = self.members.certain[entered] & self.members.certain[left]
        agreed = self.believed[entered] & self.believed[left]
        return np.where(certain, np.where(agreed, Trust.FIRM, Trust.DOUBTFUL), Trust.OPEN)


def _extreme(value: Floats, event: Integers, starts: Integers) -> Integers:
    """Return (event,) row of the largest value of each event, the first row of equal values."""
    if not len(value):
        return event
    rows = np.flatnonzero(value == np.maximum.reduceat(value, starts)[event])
    return rows[group_starts(event[rows])]


def believed_gap(orders: Orders, delay_ns: Floats) -> float:
    """Return the largest violation, ns, that is not among the two worst of a pair of clocks."""
    rows = believed_violations(orders, delay_ns)
    return float(-delay_ns[rows].min(initial=0.0))


def believed_violations(orders: Orders, delay_ns: Floats) -> Integers:
    """Return the rows of the worst violations of each ordered pair of clocks but the two worst."""
    rows = np.flatnonzero(delay_ns < -_SLIGHT_NS)
    if not len(rows):
        return rows
    pair = combine(orders.early_domain[rows], orders.late_domain[rows])
    order = np.lexsort((delay_ns[rows], pair))
    starts = group_starts(pair[order])
    place = np.arange(len(order)) - np.repeat(starts, group_lengths(starts, len(order)))
    first = BELIEVED_VIOLATION - 1
    return rows[order[(place >= first) & (place < first + _HELD_A_PAIR)]]


def bounded_solution(
    problem: LineProblem,
    deviation_ns: Floats,
    drifting: Flags,
    solution: Floats,
    causality: Causality,
) -> Floats:
    """Solve least squares over evenly drawn anchors, under the inequalities that `solution` breaks.

    Violated pairs become events of two members, which the solution must make equal; a pair that
    ends up in the right order is let go again (an active-set method).
    """
    rows = thin_rows(problem)
    part, weights = problem.thinned(rows), 1.0 / np.square(deviation_ns[rows])
    held: Orders | None = None
    for _ in range(_ROUNDS):
        clock = partial(problem.common, solution)
        orders = causality.orders(clock)
        found = orders.at(believed_violations(orders, orders.delay_ns(clock)))
        if not (found.delay_ns(clock) < -_HELD_DEVIATION_NS).any():
            break
        held = found if held is None else held.at(held.delay_ns(clock) < 0).joined(found)
        domain = np.stack([held.early_domain, held.late_domain], axis=1)
        time_ns = np.stack([held.early_ns, held.late_ns], axis=1)
        firm = np.full(2 * len(domain), 1.0 / _HELD_DEVIATION_NS**2)
        weighed = part.extended(domain, time_ns).weighed(np.r_[weights, firm])
        solution = weighed.solve(drifting, solution)
    return solution


@dataclass(frozen=True, kw_only=True)
class Contradictions:
    """What remains impossible on the final clocks.

    error_ns        (domain,) the largest violation in which a clock takes part
    num_disbelieved, worst_disbelieved_ns  violations taken for wrong matches
    """

    error_ns: Floats
    num_disbelieved: int
    worst_disbelieved_ns: float


def contradictions(orders: Orders, delay_ns: Floats, causality: Causality) -> Contradictions:
    """Sum violations up; a few between two clocks that have matched far more are disbelieved."""
    rows = np.flatnonzero(delay_ns < -_SLIGHT_NS)
    error = np.zeros(int(causality.domain.max(initial=-1)) + 1)
    if not len(rows):
        return Contradictions(error_ns=error, num_disbelieved=0, worst_disbelieved_ns=0.0)
    early, late, gap = orders.early_domain[rows], orders.late_domain[rows], -delay_ns[rows]
    rare = _rare(np.minimum(early, late), np.maximum(early, late), gap, causality)
    for ends in (early, late):
        np.maximum.at(error, ends[~rare], gap[~rare])
    return Contradictions(
        error_ns=error,
        num_disbelieved=int(rare.sum()),
        worst_disbelieved_ns=float(gap[rare].max(initial=0.0)),
    )


def _rare(lower: Integers, upper: Integers, gap_ns: Floats, causality: Causality) -> Flags:
    """Return (violation,) whether its pair of domains has few violations among its many matches.

    Only the worst pairs of domains are looked at; violations of all other pairs are believed.
    """
    _, first, pair = np.unique(combine(lower, upper), return_index=True, return_inverse=True)
    worst = np.zeros(len(first))
    np.maximum.at(worst, pair, gap_ns)
    allowed = np.zeros(len(first))
    for number in np.argsort(-worst, kind="stable")[:_MOST_PAIRS].tolist():
        one, other = int(lower[first[number]]), int(upper[first[number]])
        allowed[number] = _RARE_SHARE * causality.num_shared(one, other)
    rare: Flags = (np.bincount(pair) <= allowed)[pair]
    return rare


@dataclass(frozen=True, kw_only=True)
class Ties:
    """All that ties the clocks of a trace together.

    domain    (rank,) clock domain of each rank, one of num_domains
    anchors   of collectives first, then of messages in pairs
    member_rows  (collective anchor,) its row among the collectives' members
    start_ns  (anchor,) start of the collective (the end for messages): no part of the fit, but
              bounds the error of the fit
    """

    domain: Integers
    num_domains: int
    anchors: Anchors
    member_rows: Integers
    start_ns: Integers
    causality: Causality
    num_left_out: int = 0
    """Ends of collectives that were not drawn (`aggregate.anchors`)."""

    @property
    def num_collective(self) -> int:
        """Return how many anchors are of collectives."""
        return len(self.member_rows)


def tie(spans: pa.Table, matches: Matches, ranks: Integers, domain: Integers) -> Ties:
    """Gather everything in a trace that ties the clock domains (rank,) together."""
    rows = joining_members(spans, matches)
    domain_of_rank = by_rank(ranks, domain)
    drawn = drawn_members(spans, matches.match, rows, domain_of_rank[narrow(spans, "rank")[rows]])
    ties = tied(
        Members.of(spans, matches.match, drawn, ranks),
        matched_messages(spans, matches, ranks, domain),
        domain,
    )
    return replace(ties, num_left_out=len(rows) - len(drawn))


def tied(members: Members, messages: Messages, domain: Integers) -> Ties:
    """Return the ties from members and messages, whose ranks are positions in `domain`."""
    num_domains = int(domain.max(initial=-1)) + 1
    rows = members.in_company(members.certain)
    certain = members if members.certain.all() else members.at(rows)
    anchors = certain.anchors()
    by_collectives = components(anchors, domain, num_domains)
    between = message_anchors(messages, domain, by_collectives)
    return Ties(
        domain=domain,
        num_domains=num_domains,
        anchors=anchors.joined(between) if len(between.event) else anchors,
        member_rows=rows,
        start_ns=np.r_[certain.start_ns, between.end_ns],
        causality=Causality(members, messages, domain, members.certain),
    )


def components(anchors: Anchors, domain: Integers, num_domains: int) -> Integers:
    """Number the sets of domains that share events, (domain,), ordered by their first domains."""
    same_event = anchors.event[1:] == anchors.event[:-1]
    links = domain[anchors.rank]
    one, other = links[:-1][same_event], links[1:][same_event]
    pairs = np.unique(one * num_domains + other)
    return linked_sets(pairs // num_domains, pairs % num_domains, num_domains)


def references(domain: Integers, component: Integers) -> Integers:
    """Return (component,) the domain with the most ranks; of equals the first domain."""
    num_ranks = np.bincount(domain, minlength=len(component))
    order = np.lexsort((np.arange(len(component)), -num_ranks, component))
    return order[group_starts(component[order])]
