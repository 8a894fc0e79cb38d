"""Find which spans of different ranks are one communication.

A collective's members are the spans with the same (iteration, group, op, sequence), one from each
rank of the group. A send and a receive belong together by (iteration, source, destination,
direction, sequence), where `sequence` counts the messages of one such channel. Chunk and
microbatch are no part of the key: a sender names the chunk it computed and a receiver the one it
will compute, and either may be unknown; where both name a microbatch they must agree.

    rank 0  all_reduce tp@0 iteration 1 sequence 0 ┐
    rank 1  all_reduce tp@0 iteration 1 sequence 0 ┘ match 0
    rank 0  all_reduce tp@0 iteration 1 sequence 1   no match: rank 1 is there, its span is not

Every key begins with the iteration, so ends are matched some iterations at a time, and by threads:
the memory for matching does not grow with the trace, apart from the ends themselves.

Order of arrival never decides. What has no complete counterpart keeps match = -1 and is counted.
A communication span without `op` is a bracket around other spans and is not matched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from megascan.arrays import (
    Flags,
    Integers,
    Narrow,
    RowNumbers,
    by_name,
    combine,
    group_lengths,
    group_starts,
    parted,
)
from megascan.header import RankHeader
from megascan.parallel import over_blocks
from megascan.schema import NOT_APPLICABLE, Kind
from megascan.timeline import equals, narrow, narrow_codes

_MOST_RANKS_SAID = 3
_BLOCK_ENDS = 1 << 16
"""About how many ends (of whole iterations) are matched together."""
_MOST_BLOCKS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Result of matching.

    match    (span,) id of the match of each span of the table, -1 for a span without a match
    members  rows of the table that have a match, in the order of ids: collectives first, the
             members of each by rank; then messages, the send of each before its receive
    """

    match: RowNumbers
    members: RowNumbers
    num_collective_members: int
    num_matches: int
    num_unmatched: Mapping[str, int]
    num_duplicates: int
    notes: tuple[str, ...]

    def reordered(self, order: RowNumbers) -> Matches:
        """Return the matches of a table whose rows have been put into another order."""
        place = np.empty(len(order), dtype=np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return replace(self, match=self.match[order], members=place[self.members])


@dataclass(frozen=True)
class _Part:
    """Matching of some rows: the members of each match, in order, and how many each match has; rows
    without a match, and rows that repeat the key and member of an earlier row.
    """

    members: RowNumbers
    lengths: RowNumbers
    unmatched: RowNumbers
    duplicates: RowNumbers


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Columns that keys are made of, (span,) each; texts are codes into lists of names."""

    rank: Narrow
    iteration: Narrow
    sequence: Narrow
    microbatch: Narrow
    peer: Narrow
    group: Narrow
    op: Narrow
    direction: Narrow
    group_names: list[str]
    op_names: list[str]
    direction_names: list[str]
    is_collective: Flags
    is_message: Flags

    @classmethod
    def of(cls, spans: pa.Table) -> _Columns:
        group, group_names = narrow_codes(spans, "group")
        op, op_names = narrow_codes(spans, "op")
        direction, direction_names = narrow_codes(spans, "direction")
        return cls(
            rank=narrow(spans, "rank"),
            iteration=narrow(spans, "iteration"),
            sequence=narrow(spans, "sequence"),
            microbatch=narrow(spans, "microbatch"),
            peer=narrow(spans, "peer"),
            group=group,
            op=op,
            direction=direction,
            group_names=group_names,
            op_names=op_names,
            direction_names=direction_names,
            is_collective=equals(spans, "kind", Kind.COLLECTIVE),
            is_message=equals(spans, "kind", Kind.P2P) & equals(spans, "op", "send", "recv"),
        )

    def wide(self, name: str, rows: Narrow) -> Integers:
        """Return some rows of a column as 64-bit integers, for arithmetic."""
        column: Narrow = getattr(self, name)
        return column[rows].astype(np.int64)


def match_spans(spans: pa.Table, headers: Mapping[int, RankHeader]) -> Matches:
    """Match collectives and messages of a trace's span table (schema TRACE_SCHEMA).

    Ids are numbered in the order of the keys, collectives first: the same trace gives the same
    ids however its files were read.
    """
    columns = _Columns.of(spans)
    groups = _Groups.of(columns, headers)
    found = list(_matched_blocks(columns, groups))
    collectives, messages = [block[0] for block in found], [block[1] for block in found]
    parts = {str(Kind.COLLECTIVE): collectives, str(Kind.P2P): messages}
    notes = list(_unmatched_notes(columns.rank, parts))
    if num_contradictions := sum(block[2] for block in found):
        notes.append(
            f"{num_contradictions} send/recv pairs name different microbatches and are left "
            "unmatched"
        )
    match = np.full(spans.num_rows, NOT_APPLICABLE, dtype=np.int32)
    members = _concatenated(part.members for part in chain(collectives, messages))
    lengths = _concatenated(part.lengths for part in chain(collectives, messages))
    match[members] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return Matches(
        match=match,
        members=members,
        num_collective_members=sum(len(part.members) for part in collectives),
        num_matches=len(lengths),
        num_unmatched={kind: sum(len(part.unmatched) for part in parts[kind]) for kind in parts},
        num_duplicates=sum(len(part.duplicates) for part in chain(collectives, messages)),
        notes=(*notes, *groups.notes),
    )


def _concatenated(arrays: Iterable[RowNumbers]) -> RowNumbers:
    return np.concatenate([np.empty(0, dtype=np.int32), *arrays])


_Block: TypeAlias = tuple[_Part, _Part, int]
"""Matching of some iterations: collectives, messages, number of pairs with two microbatches."""


def _matched_blocks(columns: _Columns, groups: _Groups) -> Iterable[_Block]:
    def matched(rows: RowNumbers) -> _Block:
        op_is_known = columns.op[rows] != _code_of("", columns.op_names)
        collectives = rows[columns.is_collective[rows] & op_is_known]
        return (
            _match_collectives(columns, groups, collectives),
            *_match_messages(columns, rows[columns.is_message[rows]]),
        )

    return over_blocks(matched, _blocks(columns.iteration))


def _code_of(text: str, texts: list[str]) -> int:
    return texts.index(text) if text in texts else -1


def _blocks(iteration: Narrow) -> Sequence[RowNumbers]:
    """Split rows into blocks of whole iterations, in their order; rows of a block are ascending."""
    num_rows = len(iteration)
    first, last = int(iteration.min(initial=0)), int(iteration.max(initial=0))
    if num_rows <= _BLOCK_ENDS or last - first >= num_rows:
        return [np.arange(num_rows, dtype=np.int32)]
    place = np.subtract(iteration, first, dtype=np.int32)
    reached = np.cumsum(np.bincount(place))
    size = max(_BLOCK_ENDS, num_rows // _MOST_BLOCKS + 1)
    return parted(((reached - 1) // size).astype(np.uint16)[place])


@dataclass(frozen=True)
class _Groups:
    """Process groups by code of the span table's `group` column.

    expected  (group,) how many of the group's ranks are in the trace
    members   code · num_ranks + rank, for each of these ranks of all groups
    """

    expected: Integers
    members: Integers
    num_ranks: int
    alone: Flags
    """(group,) whether the trace has only one of its several ranks, whose spans match nothing."""
    notes: tuple[str, ...]

    @classmethod
    def of(cls, columns: _Columns, headers: Mapping[int, RankHeader]) -> _Groups:
        names = columns.group_names
        declared = {  # as the first rank says that declares it
            name: tuple(members)
            for rank in sorted(headers, reverse=True)
            for name, members in headers[rank].groups.items()
        }
        recorded = _recorded_members(columns, declared)
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
        note = (
            f"{num_partial} process groups have members without a file: their waits are lower "
            "bounds and their transfers upper bounds"
        )
        notes = (note,) * bool(num_partial)
        return cls(expected, np.array(members, dtype=np.int64), num_ranks, alone, notes)


def _recorded_members(
    columns: _Columns, declared: Mapping[str, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return the members of groups that no header declares: all ranks that record the group."""
    unknown = np.array([name not in declared for name in columns.group_names], dtype=np.bool_)
    rows = np.flatnonzero(columns.is_collective & unknown[columns.group])
    rank = columns.wide("rank", rows)
    num_ranks, num_groups = int(rank.max(initial=0)) + 1, len(unknown)
    pairs = np.unique(columns.wide("group", rows) * num_ranks + rank)
    ends = np.searchsorted(pairs, np.arange(num_groups) * num_ranks + num_ranks)
    members = np.split(pairs % num_ranks, ends)
    return {code: tuple(members[code].tolist()) for code in np.flatnonzero(unknown).tolist()}


def _match_collectives(columns: _Columns, groups: _Groups, rows: RowNumbers) -> _Part:
    group, rank = columns.wide("group", rows), columns.wide("rank", rows)
    sequence = columns.wide("sequence", rows)
    key = combine(
        columns.wide("iteration", rows),
        by_name(group, columns.group_names),
        by_name(columns.wide("op", rows), columns.op_names),
        sequence,
    )
    usable = np.isin(group * groups.num_ranks + rank, groups.members)
    usable &= (sequence >= 0) & ~groups.alone[group]
    return _match_keys(rows, key, rank, usable, groups.expected[group])


def _match_messages(columns: _Columns, rows: RowNumbers) -> tuple[_Part, int]:
    """Match sends with receives; count the pairs that name different microbatches."""
    receives = columns.op[rows] == _code_of("recv", columns.op_names)
    rank, peer = columns.wide("rank", rows), columns.wide("peer", rows)
    sequence = columns.wide("sequence", rows)
    key = combine(
        columns.wide("iteration", rows),
        np.where(receives, peer, rank),
        np.where(receives, rank, peer),
        by_name(columns.wide("direction", rows), columns.direction_names),
        sequence,
    )
    usable = (sequence >= 0) & (peer >= 0)
    needed = np.full(len(rows), 2, dtype=np.int64)
    side = receives.astype(np.int64)
    part = _match_keys(rows, key, side, usable, needed)
    contradicting = _contradicting(part.members, columns.microbatch)
    if not len(contradicting):
        return part, 0
    usable &= np.isin(rows, contradicting, invert=True)
    return _match_keys(rows, key, side, usable, needed), len(contradicting) // 2


def _contradicting(pairs: RowNumbers, microbatch: Narrow) -> RowNumbers:
    """Return the rows of pairs whose sides name different microbatches."""
    send, receive = microbatch[pairs[0::2]], microbatch[pairs[1::2]]
    differ = (send >= 0) & (receive >= 0) & (send != receive)
    contradicting: RowNumbers = pairs[np.repeat(differ, 2)]
    return contradicting


def _match_keys(
    rows: RowNumbers, key: Integers, member: Integers, usable: Flags, needed: Integers
) -> _Part:
    """Match the usable rows with the same key where they have exactly the needed members.

    key, member, usable, needed  (row,) for each of `rows`

    Of rows with the same key and member the first in the table counts; later rows are duplicates.
    """
    candidates = np.flatnonzero(usable)
    member_key = combine(key[candidates], member[candidates])
    order = np.argsort(member_key, kind="stable")
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = np.diff(member_key[order]) != 0
    order = candidates[order]
    kept = order[first]
    starts = group_starts(key[kept])
    lengths = group_lengths(starts, len(kept))
    complete = lengths == needed[kept[starts]]
    found = np.repeat(complete, lengths)
    unmatched = np.r_[np.flatnonzero(~usable), kept[~found]]
    return _Part(
        members=rows[kept[found]],
        lengths=lengths[complete].astype(np.int32),
        unmatched=rows[unmatched],
        duplicates=rows[order[~first]],
    )


def _unmatched_notes(rank: Narrow, parts: Mapping[str, Sequence[_Part]]) -> Iterator[str]:
    for kind, blocks in parts.items():
        for what, chosen in (
            ("without a counterpart", _concatenated(part.unmatched for part in blocks)),
            ("recorded twice", _concatenated(part.duplicates for part in blocks)),
        ):
            if len(chosen):
                worst = most_frequent_ranks(rank[chosen])
                spans = "span" if len(chosen) == 1 else "spans"
                yield f"{len(chosen)} {kind} {spans} {what}, most on {worst}"


def by_rank(ranks: Integers, values: Integers) -> RowNumbers:
    """Return a table of `values` (position,) by rank, for the `ranks` (position,)."""
    table = np.zeros(int(ranks.max(initial=0)) + 1, dtype=np.int32)
    table[ranks] = values
    return table


def most_frequent_ranks(rank: Narrow) -> str:
    """Say which ranks occur most among `rank` (row,): "rank 5 (12), rank 3 (1)"."""
    ranks, counts = np.unique(rank, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_RANKS_SAID]
    return ", ".join(f"rank {ranks[place]} ({counts[place]})" for place in order)
