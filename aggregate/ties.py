"""What ties the clocks of a trace together, and into which sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from aggregate.anchors import Anchors, Members, Messages, matched_messages, message_anchors
from aggregate.causality import Causality
from aggregate.keys import IntArray, group_starts
from aggregate.match import Matches


@dataclass(frozen=True, kw_only=True)
class Ties:
    """All that ties the clocks of a trace together.

    domain    (rank,) clock domain of each rank, one of num_domains
    anchors   of collectives first, then of messages in pairs
    member_rows  (collective anchor,) rows of the collectives' members
    start_ns  (anchor,) starts of the collectives: no part of the fit, but bounds of its error
    """

    domain: IntArray
    num_domains: int
    anchors: Anchors
    member_rows: IntArray
    start_ns: IntArray
    causality: Causality

    @property
    def num_collective(self) -> int:
        """How many anchors are of collectives."""
        return len(self.member_rows)


def tie(spans: pa.Table, matches: Matches, ranks: IntArray, domain: IntArray) -> Ties:
    """Everything in a trace that ties the clock domains (rank,) together."""
    members = Members.of(spans, matches, ranks)
    return tied(members, matched_messages(spans, matches, ranks), domain)


def tied(members: Members, messages: Messages, domain: IntArray) -> Ties:
    """From members and messages whose ranks are positions in `domain`."""
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


def components(anchors: Anchors, domain: IntArray, num_domains: int) -> IntArray:
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


def references(domain: IntArray, component: IntArray) -> IntArray:
    """(component,) the domain with most ranks, then the one of the lowest rank."""
    num_ranks = np.bincount(domain, minlength=len(component))
    order = np.lexsort((np.arange(len(component)), -num_ranks, component))
    return order[group_starts(component[order])]
