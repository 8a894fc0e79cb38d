"""Find which spans of different ranks are one communication.

A collective's members are the spans with the same (iteration, group, op, sequence), one from each
rank of the group. A send and a receive belong together by (iteration, source, destination,
direction, sequence), where `sequence` counts the messages of one such channel. Chunk and
microbatch are no part of the key: a sender names the chunk it computed and a receiver the one it
will compute, and either may be unknown; where both name a microbatch they must agree.

    rank 0  all_reduce tp@0 iteration 1 sequence 0 ┐
    rank 1  all_reduce tp@0 iteration 1 sequence 0 ┘ match 0
    rank 0  all_reduce tp@0 iteration 1 sequence 1   no match: rank 1 is there, its span is not

Order of arrival never decides. What has no complete counterpart keeps match = -1 and is counted.
A communication span without `op` is a bracket around others and is not to be matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megascan.arrays import Flags, Integers, by_name, combine, group_lengths, group_starts
from megascan.header import RankHeader
from megascan.schema import NOT_APPLICABLE, Kind
from megascan.timeline import codes, equals, numbers

_MOST_RANKS_SAID = 3


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Result of matching; `match` has one id a span of the table, -1 where there is none."""

    match: Integers
    num_matches: int
    num_unmatched: Mapping[str, int]
    num_duplicates: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """Matching of some rows: ids from 0, and which rows repeat a key of the same member."""

    rows: Integers
    match: Integers
    duplicate: Flags
    num_matches: int


def match_spans(spans: pa.Table, headers: Mapping[int, RankHeader]) -> Matches:
    """Match collectives and messages of a trace's span table (schema TRACE_SCHEMA).

    Ids are numbered in the order of the keys, collectives first: the same trace gives the same
    ids however its files were read.
    """
    groups = _Groups.of(spans, headers)
    collectives = _match_collectives(spans, groups)
    messages, num_contradictions = _match_messages(spans)
    match = np.full(spans.num_rows, NOT_APPLICABLE, dtype=np.int64)
    match[collectives.rows] = collectives.match
    match[messages.rows] = np.where(
        messages.match >= 0, messages.match + collectives.num_matches, NOT_APPLICABLE
    )
    parts = {str(Kind.COLLECTIVE): collectives, str(Kind.P2P): messages}
    notes = _unmatched_notes(numbers(spans, "rank"), parts)
    notes += _contradiction_notes(num_contradictions) + groups.notes
    return Matches(
        match=match,
        num_matches=collectives.num_matches + messages.num_matches,
        num_unmatched={
            kind: int(np.count_nonzero((part.match < 0) & ~part.duplicate))
            for kind, part in parts.items()
        },
        num_duplicates=sum(int(part.duplicate.sum()) for part in parts.values()),
        notes=notes,
    )


@dataclass(frozen=True)
class _Groups:
    """Process groups by code of the span table's `group` column.

    `expected` is how many of a group's ranks are in the trace, `members` holds
    code · num_ranks + rank of each of them.
    """

    expected: Integers
    members: Integers
    num_ranks: int
    alone: Flags
    """Groups of several ranks of which the trace has one: its spans have nobody to match."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, spans: pa.Table, headers: Mapping[int, RankHeader]) -> _Groups:
        group_codes, names = codes(spans, "group")
        declared = _declared_groups(headers)
        recorded = _recorded_members(spans, group_codes, len(names), declared, names)
        num_ranks = max(headers, default=0) + 1
        expected = np.zeros(len(names), dtype=np.int64)
        alone = np.zeros(len(names), dtype=np.bool_)
        members: list[int] = []
        num_partial = 0
        for code, name in enumerate(names):
            everyone = declared.get(name, recorded.get(code, ()))
            present = [rank for rank in everyone if rank in headers]
            expected[code] = len(present)
            alone[code] = len(present) == 1 < len(everyone)
            num_partial += 1 < len(present) < len(everyone)
            members += [code * num_ranks + rank for rank in present]
        notes = (
            (
                f"{num_partial} process groups have members without a file: their waits are lower "
                "bounds and their transfers upper bounds",
            )
            if num_partial
            else ()
        )
        return cls(expected, np.array(members, dtype=np.int64), num_ranks, alone, notes)


def _declared_groups(headers: Mapping[int, RankHeader]) -> dict[str, tuple[int, ...]]:
    """Return the members of every group by name: the first rank that declares one is believed."""
    declared: dict[str, tuple[int, ...]] = {}
    for rank in sorted(headers):
        for name, members in headers[rank].groups.items():
            declared.setdefault(name, tuple(members))
    return declared


def _recorded_members(
    spans: pa.Table,
    group_codes: Integers,
    num_groups: int,
    declared: Mapping[str, tuple[int, ...]],
    names: list[str],
) -> dict[int, tuple[int, ...]]:
    """Return the members of groups that no header declares: the ranks that ever record one."""
    unknown = np.array([name not in declared for name in names], dtype=np.bool_)
    rows = np.flatnonzero(unknown[group_codes] & equals(spans, "kind", Kind.COLLECTIVE))
    rank = numbers(spans, "rank")[rows]
    num_ranks = int(rank.max(initial=0)) + 1
    pairs = np.unique(group_codes[rows] * num_ranks + rank)
    ends = np.searchsorted(pairs, np.arange(num_groups) * num_ranks + num_ranks)
    members = np.split(pairs % num_ranks, ends)
    return {code: tuple(members[code].tolist()) for code in np.flatnonzero(unknown).tolist()}


def _match_collectives(spans: pa.Table, groups: _Groups) -> _Part:
    rows = np.flatnonzero(equals(spans, "kind", Kind.COLLECTIVE) & ~equals(spans, "op", ""))
    group_codes, group_names = codes(spans, "group")
    op_codes, op_names = codes(spans, "op")
    group, rank = group_codes[rows], numbers(spans, "rank")[rows]
    sequence = numbers(spans, "sequence")[rows]
    key = combine(
        numbers(spans, "iteration")[rows],
        by_name(group, group_names),
        by_name(op_codes[rows], op_names),
        sequence,
    )
    usable = np.isin(group * groups.num_ranks + rank, groups.members)
    usable &= (sequence >= 0) & ~groups.alone[group]
    return _match_keys(rows, key, rank, usable, groups.expected[group])


def _match_messages(spans: pa.Table) -> tuple[_Part, int]:
    """Match sends with receives; count the pairs that contradict each other's microbatch."""
    rows = np.flatnonzero(equals(spans, "kind", Kind.P2P) & equals(spans, "op", "send", "recv"))
    receives = equals(spans, "op", "recv")[rows]
    rank, peer = numbers(spans, "rank")[rows], numbers(spans, "peer")[rows]
    direction_codes, direction_names = codes(spans, "direction")
    sequence = numbers(spans, "sequence")[rows]
    key = combine(
        numbers(spans, "iteration")[rows],
        np.where(receives, peer, rank),
        np.where(receives, rank, peer),
        by_name(direction_codes[rows], direction_names),
        sequence,
    )
    usable = (sequence >= 0) & (peer >= 0)
    needed = np.full(len(rows), 2, dtype=np.int64)
    side = receives.astype(np.int64)
    part = _match_keys(rows, key, side, usable, needed)
    microbatch = numbers(spans, "microbatch")[rows]
    contradicting = _contradicting(part, microbatch)
    if not contradicting.any():
        return part, 0
    usable &= ~contradicting
    return _match_keys(rows, key, side, usable, needed), int(contradicting.sum()) // 2


def _contradicting(part: _Part, microbatch: Integers) -> Flags:
    """Return the rows of pairs in which both sides name a microbatch, and not the same."""
    known = (part.match >= 0) & (microbatch >= 0)
    lowest = np.full(part.num_matches, np.iinfo(np.int64).max)
    highest = np.full(part.num_matches, -1, dtype=np.int64)
    np.minimum.at(lowest, part.match[known], microbatch[known])
    np.maximum.at(highest, part.match[known], microbatch[known])
    bad = highest > lowest
    return (part.match >= 0) & bad[part.match] if part.num_matches else known


def _match_keys(
    rows: Integers, key: Integers, member: Integers, usable: Flags, needed: Integers
) -> _Part:
    """Give one id to each key that has exactly the needed members among its usable rows.

    Of rows with the same key and member the first in the table counts; the others are duplicates.
    """
    match = np.full(len(rows), NOT_APPLICABLE, dtype=np.int64)
    duplicate = np.zeros(len(rows), dtype=np.bool_)
    candidates = np.flatnonzero(usable)
    member_key = combine(key[candidates], member[candidates])
    order = candidates[np.argsort(member_key, kind="stable")]
    repeated = np.zeros(len(order), dtype=np.bool_)
    repeated[1:] = (key[order][1:] == key[order][:-1]) & (member[order][1:] == member[order][:-1])
    duplicate[order] = repeated
    kept = order[~repeated]
    starts = group_starts(key[kept])
    lengths = group_lengths(starts, len(kept))
    complete = lengths == needed[kept[starts]]
    ids = np.where(complete, np.cumsum(complete) - 1, NOT_APPLICABLE)
    match[kept] = np.repeat(ids, lengths)
    return _Part(rows, match, duplicate, int(complete.sum()))


def _unmatched_notes(rank: Integers, parts: Mapping[str, _Part]) -> tuple[str, ...]:
    notes: list[str] = []
    for kind, part in parts.items():
        for what, chosen in (
            ("without a counterpart", (part.match < 0) & ~part.duplicate),
            ("recorded twice", part.duplicate),
        ):
            if chosen.any():
                worst = most_frequent_ranks(rank[part.rows[chosen]])
                notes.append(f"{int(chosen.sum())} {kind} spans {what}, most on {worst}")
    return tuple(notes)


def most_frequent_ranks(rank: Integers) -> str:
    """Say which ranks occur most among `rank` (row,): "rank 5 (12), rank 3 (1)"."""
    ranks, counts = np.unique(rank, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_RANKS_SAID]
    return ", ".join(f"rank {ranks[place]} ({counts[place]})" for place in order)


def _contradiction_notes(num_contradictions: int) -> tuple[str, ...]:
    if not num_contradictions:
        return ()
    return (
        f"{num_contradictions} send/recv pairs name different microbatches and are left unmatched",
    )
