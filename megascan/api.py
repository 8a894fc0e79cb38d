"""Read a trace from Python: what the commands know, as Arrow tables.

`megascan.read(path)` gives a `RunTables`: spans, and collectives, messages and clocks, which follow
from the spans.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from megascan.arrays import Integers, group_lengths, group_numbers, group_starts, per_group
from megascan.cli.output import require
from megascan.reader import MERGED_FORMATS, read_timeline, read_trace, sniff
from megascan.schema import Kind
from megascan.timeline import ClockFit, Completeness, Timeline, equals, numbers
from megascan.topology import Layout


@dataclass(frozen=True, kw_only=True)
class RunTables:
    """One run on one clock, as Arrow tables (`.to_pandas()` makes frames of them).

    `spans`: a row a span, columns of the format page, times in unix ns on the common clock.

    `collectives`: a row a matched collective: match, iteration, op, group, sequence, num_members,
    size_bytes (largest member's), first_start_ns, last_start_ns, last_rank (who came last), end_ns
    (last end), transfer_ns (shortest of the members').

    `messages`: a row a matched send and receive: match, iteration, microbatch, direction, sender,
    receiver, size_bytes, send_start_ns, receive_start_ns, end_ns (of the receive), transfer_ns
    (the shorter).

    `clocks`: a row a rank, the fields of `megascan.timeline.ClockFit`.
    """

    run_id: str
    layout: Layout
    spans: pa.Table
    collectives: pa.Table
    messages: pa.Table
    clocks: pa.Table
    completeness: Completeness


def run_tables(timeline: Timeline) -> RunTables:
    """Make the tables of a timeline; spans without a match are only in `spans`."""
    clocks = [asdict(fit) for _, fit in sorted(timeline.clocks.items())]
    return RunTables(
        run_id=timeline.run_id,
        layout=timeline.layout,
        spans=timeline.spans,
        collectives=_collectives(timeline.spans),
        messages=_messages(timeline.spans),
        clocks=pa.Table.from_pylist(clocks, schema=_CLOCK_SCHEMA),
        completeness=timeline.completeness,
    )


def _collectives(spans: pa.Table) -> pa.Table:
    rows, starts = _matched(spans, Kind.COLLECTIVE)
    begin = numbers(spans, "start_ns")[rows]
    end = begin + numbers(spans, "duration_ns")[rows]
    lengths = group_lengths(starts, len(rows))
    last = np.lexsort((begin, group_numbers(starts, len(rows))))[starts + lengths - 1]
    first = spans.take(pa.array(rows[starts]))
    table = first.select(["match", "iteration", "op", "group", "sequence"])
    columns = {
        "num_members": lengths,
        "size_bytes": per_group(np.maximum, numbers(spans, "size_bytes")[rows], starts),
        "first_start_ns": per_group(np.minimum, begin, starts),
        "last_start_ns": per_group(np.maximum, begin, starts),
        "last_rank": numbers(spans, "rank")[rows[last]],
        "end_ns": per_group(np.maximum, end, starts),
        "transfer_ns": per_group(np.minimum, numbers(spans, "transfer_ns")[rows], starts),
    }
    return _with_columns(table, columns)


def _messages(spans: pa.Table) -> pa.Table:
    rows = _pairs(spans, *_matched(spans, Kind.P2P))
    is_send = equals(spans, "op", "send")[rows]
    send, receive = rows[is_send], rows[~is_send]
    begin = numbers(spans, "start_ns")
    transfer = numbers(spans, "transfer_ns")
    known = numbers(spans, "microbatch")
    table = spans.take(pa.array(send)).select(["match", "iteration", "direction"])
    columns = {
        "microbatch": np.maximum(known[send], known[receive]),
        "sender": numbers(spans, "rank")[send],
        "receiver": numbers(spans, "rank")[receive],
        "size_bytes": numbers(spans, "size_bytes")[send],
        "send_start_ns": begin[send],
        "receive_start_ns": begin[receive],
        "end_ns": begin[receive] + numbers(spans, "duration_ns")[receive],
        "transfer_ns": np.minimum(transfer[send], transfer[receive]),
    }
    return _with_columns(table, columns)


def _matched(spans: pa.Table, kind: Kind) -> tuple[Integers, Integers]:
    """Return the rows of a kind's matched spans, by match, and where each match starts."""
    match = numbers(spans, "match")
    rows = np.flatnonzero(equals(spans, "kind", kind) & (match >= 0))
    rows = rows[np.argsort(match[rows], kind="stable")]
    return rows, group_starts(match[rows])


def _pairs(spans: pa.Table, rows: Integers, starts: Integers) -> Integers:
    """Return the rows of matches that have both a send and a receive; a selection may lack one."""
    sends = equals(spans, "op", "send")[rows].astype(np.int64)
    lengths = group_lengths(starts, len(rows))
    whole = (lengths == 2) & (per_group(np.add, sends, starts) == 1)
    pairs: Integers = rows[np.repeat(whole, lengths)]
    return pairs


def _with_columns(table: pa.Table, columns: dict[str, Integers]) -> pa.Table:
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values, pa.int64()))
    return table


_CLOCK_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string()}
_CLOCK_SCHEMA = pa.schema(
    [(name, _CLOCK_TYPES[str(kind)]) for name, kind in ClockFit.__annotations__.items()]
)


def read(
    path: Path | str, *, run: str | None = None, allow_missing_ranks: bool = False
) -> RunTables:
    """Read the tables of a traced run: spans, collectives, messages, clocks.

    `path` is a folder of rank files (ours, the original MegaScan's, PyTorch profiler traces), which
    are aligned first, or a timeline that `megascan aggregate` wrote. Raises InputError for anything
    that cannot be used; see `megascan.reader.read_trace` for `run` and `allow_missing_ranks`.
    """
    path = Path(path)
    if path.is_file() and sniff(path) in MERGED_FORMATS:
        return run_tables(read_timeline(path))
    require("aggregate")
    from aggregate import build_timeline

    return run_tables(
        build_timeline(read_trace(path, run=run, allow_missing_ranks=allow_missing_ranks))
    )
