"""Read rank files of the original MegaScan: flat begin and end records without header or clock.

    read_records      one file: its records as columns, folded into scopes
    fold              pair begins with ends, step by step, without a loop over records
    original_spans    scopes in our columns; OPERATIONS has our names for theirs
    read_original     all files: the smallest layout that fits them, steps on a common axis
    keep_original     all files by shards: scopes, and then spans, stay with the workers

Each rank's times count from its own step begin, so steps are put on a common axis by their index:
step k begins where step k - 1 ends (by the longest wall time of any rank), plus the longest pause
before step k. That makes ranks comparable up to the spread of their step begins after a barrier;
each rank is a clock domain of its own, so that alignment ties ranks by the ends of collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from megascan.arrays import Flags, Floats, Integers, running_numbers, stable_order
from megascan.errors import InputError, listed
from megascan.header import (
    RESTARTING_CLOCK,
    ClockOrigin,
    Device,
    RankHeader,
    WindowRecord,
    foreign_header,
)
from megascan.parallel import Here, Kept, Workers
from megascan.reader.lines import EventBlock, open_document, parse_block
from megascan.reader.segments import Packed, Segment, settled_shard
from megascan.reader.templates import Templates
from megascan.schema import NOT_APPLICABLE, OWN_END, Granularity, Kind, Phase, Track
from megascan.timeline import codes, equals, numbers, span_table
from megascan.topology import Layout
from megascan.vocabulary import (
    ATTENTION,
    BACKWARD,
    DECODER,
    FORWARD,
    GRAD_SYNC,
    ITERATION,
    LOSS_SYNC,
    MLP,
    OPTIMIZER,
    TRANSFORMER_LAYER,
    group_id,
    message_name,
)

STEP = ITERATION


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Our columns for an original event; `axis` names the parallel group that works on it."""

    kind: Kind
    name: str
    track: Track = Track.COMPUTE
    phase: str = ""
    op: str = ""
    axis: str = ""
    direction: str = ""
    size_bytes: int = NOT_APPLICABLE
    """What it always moves; most records say it themselves."""
    holds_embeddings: bool = False
    """On a pipeline's first and last stage, whether what a replica does by itself follows in it."""


def _work(name: str, phase: Phase = Phase.FORWARD) -> tuple[Operation, ...]:
    return (Operation(kind=Kind.COMPUTE, name=name, phase=phase),)


def _collective(
    op: str, axis: str = "tp", *, holds_embeddings: bool = False
) -> tuple[Operation, ...]:
    return (
        Operation(
            kind=Kind.COLLECTIVE,
            name=op,
            track=Track.COMMUNICATION,
            op=op,
            axis=axis,
            holds_embeddings=holds_embeddings,
        ),
    )


def _message(op: str, direction: str) -> Operation:
    return Operation(
        kind=Kind.P2P,
        name=message_name(op, direction),
        track=Track.COMMUNICATION,
        op=op,
        axis="pp",
        direction=direction,
    )


_LOSS = Operation(
    kind=Kind.COLLECTIVE,
    name=LOSS_SYNC,
    track=Track.COMMUNICATION,
    op="all_reduce",
    axis="dp",
    phase=Phase.FORWARD,
    size_bytes=4,
)
OPERATIONS: dict[str, tuple[Operation, ...]] = {
    STEP: (Operation(kind=Kind.ITERATION, name=ITERATION),),
    "recv-warmup": (_message("recv", "forward"),),
    "recv-extra": (_message("recv", "forward"),),
    "send-warmup": (_message("send", "forward"),),
    "exchange-next": (_message("send", "forward"), _message("recv", "backward")),
    "exchange-prev": (_message("send", "backward"), _message("recv", "forward")),
    "send-extra": (_message("send", "backward"),),
    "recv-cooldown": (_message("recv", "backward"),),
    "send-cooldown": (_message("send", "backward"),),
    "forward-warmup": _work(FORWARD),
    "forward": _work(FORWARD),
    "backward": _work(BACKWARD, Phase.BACKWARD),
    "backward-cooldown": _work(BACKWARD, Phase.BACKWARD),
    "loss": (_LOSS,),
    "decoder": _work(DECODER),
    "transformer_layer": _work(TRANSFORMER_LAYER),
    "attention": _work(ATTENTION),
    "mlp": _work(MLP),
    "recompute_mlp": _work(MLP, Phase.RECOMPUTE),
    "_reduce": _collective("all_reduce"),
    "_gather_along_last_dim": _collective("all_gather"),
    "_gather_along_first_dim": _collective("all_gather"),
    "_reduce_scatter_along_last_dim": _collective("reduce_scatter"),
    "_reduce_scatter_along_first_dim": _collective("reduce_scatter"),
    "allreduce": _collective("all_reduce", "dp", holds_embeddings=True),
    "optimizer": (Operation(kind=Kind.OPTIMIZER, name=OPTIMIZER),),
    "grad-sync": (Operation(kind=Kind.OPTIMIZER, name=GRAD_SYNC),),
}
"""Our spans for the original's events, by name.

An event that is two messages at once becomes two spans of the same times, as in our own traces.
`_reduce` is labelled with a larger group than it works on: it is a tensor-parallel all-reduce.
`allreduce` (gradients, then a device synchronisation) ends together on data-parallel peers, but for
the first and the last stage, whose embeddings are added within it, each replica's by itself. `loss`
contains the reduction of the logged loss over the replicas, one number of 4 bytes: it may be
waiting as well as work, and ends together.
"""

MISNUMBERED = "send-extra"
"""Event that sends back the last gradient of the steady state. It names the step's last microbatch,
but on stages with a warm-up the microbatch is an earlier one."""


_OF_A_LAYER = re.compile(
    r"(transformer_layer|_forward_attention|_forward_mlp|mlp|recompute_mlp)_(\d{1,6})"
)
"""Names before 24 July 2025 (commit b2ff6e24), which end with the layer's number from 1."""


def operations_of(name: str) -> tuple[Operation, ...]:
    """Return our operations for an original event; unknown events are compute of the same name."""
    bare, _ = _without_layer(name)
    return OPERATIONS.get(bare) or _work(bare)


def _without_layer(name: str) -> tuple[str, int]:
    """Return an original event's name without its layer, and the layer or -1: ("mlp", 3)."""
    numbered = _OF_A_LAYER.fullmatch(name)
    return (numbered[1], int(numbered[2])) if numbered else (name, NOT_APPLICABLE)


@dataclass(frozen=True)
class Folded:
    """Spans as rows of their begin and end records, in the order of begins.

    `step` numbers the steps of the file from 0; `depth` is 0 for the step itself, 1 for scopes
    directly in it. Steps that never closed (`num_open_steps`), or whose scopes do not nest
    (`num_broken_steps`), are left out. `num_open_spans` counts the begin records in steps that
    never closed, `num_outside` the begin records outside of any step (evaluation).
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

    In a well-nested sequence the records of one level alternate begin, end, begin, end. So levels
    are numbered by a running sum, records are sorted stably by (step, level), and neighbours are
    pairs.

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
    kept = kept[_in_order(segment[kept], level[kept])]
    broken = np.zeros(len(step_begin), dtype=np.bool_)
    broken[np.bincount(segment[kept], minlength=len(step_begin)) % 2 == 1] = True
    even = kept[~broken[segment[kept]]]
    first, second = even[::2], even[1::2]
    wrong = ~is_begin[first] | is_begin[second] | (level[first] != level[second])
    broken[segment[first[wrong | (name[first] != name[second])]]] = True
    kept = kept[~broken[segment[kept]]]
    end_of = np.full(len(rows), NOT_APPLICABLE)
    end_of[kept[::2]] = kept[1::2]
    begin = np.flatnonzero(end_of >= 0)
    end = end_of[begin]
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


def _in_order(segment: Integers, level: Integers) -> Integers:
    """Return the order of records by segment and, within it, by level, equal ones as they stand."""
    low = level.min(initial=0)
    num_levels = level.max(initial=0) - low + 1
    return stable_order(segment * num_levels + (level - low))


def _steps(begins: Flags, ends: Flags) -> tuple[Integers, Integers]:
    """Return the row of each step's begin, and the row of the first end after it, or -1 if the next
    step begins before any end.
    """
    begin, end = np.flatnonzero(begins), np.flatnonzero(ends)
    following = np.append(begin[1:], len(begins))
    at = np.searchsorted(end, begin)
    first_end = np.append(end, len(begins))[at]
    return begin.astype(np.int64), np.where(first_end < following, first_end, -1).astype(np.int64)


RECORD_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("ph", pa.string()),
        ("rel_ts", pa.int64()),
        ("pad_before", pa.float64()),
        ("duration_wall", pa.float64()),
        ("micro_batch_index", pa.int64()),
        ("microbatch", pa.int64()),
        ("model_chunk", pa.int64()),
        ("data", pa.int64()),
    ]
)


PLACE_AT_END = re.compile(
    rb'(?:,\s*"(?:dp_rk|pp_rk|tp_rk|dev|g_rk)"\s*:\s*(?:0|[1-9][0-9]*))+\s*\}\s*\Z'
)
"""Where a file's records come from, which most of them end with."""


def record_templates() -> Templates:
    """Return templates of records, which do without what all records of a file say alike."""
    return Templates(RECORD_SCHEMA, PLACE_AT_END)


@dataclass(frozen=True)
class Place:
    """Rank, coordinates and device of a file, as its records say."""

    rank: int
    dp: int
    pp: int
    tp: int
    device: int


@dataclass(frozen=True, kw_only=True)
class Scopes:
    """Scopes of a file in the order of their begins; times in ns since the begin of their step.

    `name` is an index into the file's names; `row` and `row_end` are the rows of the scope's begin
    and end record.
    """

    name: Integers
    row: Integers
    row_end: Integers
    step: Integers
    depth: Integers
    start_ns: Integers
    end_ns: Integers
    microbatch: Integers
    chunk: Integers
    data_bytes: Integers


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Content of one file; `wall_ns` (step,) is the length of each step, `pad_before_ns` (step,)
    the pause before it.
    """

    path: Path
    place: Place
    names: tuple[str, ...]
    scopes: Scopes
    wall_ns: Integers
    pad_before_ns: Integers
    num_unfinished_spans: int
    notes: tuple[str, ...]


def read_records(path: Path, templates: Templates) -> Recorded | None:
    """Read the scopes of a file; return None if no record says which rank the file belongs to.

    Raises InputError for a record that is damaged before the end of the file.
    """
    tables: list[pa.Table] = []
    place: Place | None = None
    torn = False
    for block in open_document(path).blocks:
        events = parse_block(block, templates)
        torn = torn or block.torn
        if events is not None:
            for damage in events.damages:
                raise InputError(
                    f"{path}: record {damage.line} {damage.reason}; restore the file or move it "
                    "away and pass --allow-missing-ranks"
                )
            place = place or _place(events, path)
            tables.append(events.table)
    if place is None:
        return None
    return recorded_of(path, place, pa.concat_tables(tables).unify_dictionaries(), torn=torn)


def _place(events: EventBlock, path: Path) -> Place | None:
    at = np.flatnonzero(_integers(events.table, "rel_ts") != NOT_APPLICABLE)
    if not len(at):
        return None
    try:
        record = orjson.loads(events.rows_text([int(at[0])])[0])
        return Place(*(int(record[key]) for key in ("g_rk", "dp_rk", "pp_rk", "tp_rk", "dev")))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: a record of the original MegaScan without its rank ({error}); the file is "
            "damaged, restore it"
        ) from error


def recorded_of(path: Path, place: Place, table: pa.Table, *, torn: bool) -> Recorded:
    """Fold a rank's records, with the columns of RECORD_SCHEMA, into scopes."""
    scopes = equals(table, "ph", "B", "E")
    num_instants = int(np.sum(~scopes))
    if num_instants:
        table = table.filter(pa.array(scopes))
    name, names = codes(table, "name")
    texts = tuple(names)
    is_begin = equals(table, "ph", "B")
    step_code = texts.index(STEP) if STEP in texts else NOT_APPLICABLE
    folded = fold(is_begin, name == step_code, name)
    times = [_integers(table, key) for key in ("rel_ts", "pad_before")]
    copies = _copied_steps(folded, name, np.stack(times))
    kept = ~copies[folded.step]
    step = (np.cumsum(~copies) - 1)[folded.step[kept]]
    begin, end = folded.begin[kept], folded.end[kept]
    is_first = folded.depth[kept] == 0
    rel_ts = _integers(table, "rel_ts", missing=0)
    wall = np.maximum(_integers(table, "duration_wall", missing=0), rel_ts)
    microbatch = np.maximum(
        _integers(table, "micro_batch_index")[end], _integers(table, "microbatch")[end]
    )
    return Recorded(
        path=path,
        place=place,
        names=texts,
        scopes=Scopes(
            name=name[begin],
            row=begin,
            row_end=end,
            step=step,
            depth=folded.depth[kept],
            start_ns=rel_ts[begin],
            end_ns=rel_ts[end],
            microbatch=microbatch,
            chunk=_integers(table, "model_chunk")[end],
            data_bytes=_integers(table, "data")[end],
        ),
        wall_ns=wall[end[is_first]],
        pad_before_ns=_integers(table, "pad_before", missing=0)[begin[is_first]],
        num_unfinished_spans=folded.num_open_spans,
        notes=_notes(path, place, folded, int(copies.sum()), num_instants, torn=torn),
    )


def _integers(table: pa.Table, name: str, missing: int = NOT_APPLICABLE) -> Integers:
    """Return a column of times or numbers; `missing` where a record has no value."""
    values: Integers | Floats = table.column(name).to_numpy()
    if missing == NOT_APPLICABLE and values.dtype == np.int64:
        return values.astype(np.int64, copy=False)
    absent = np.isnan(values) if values.dtype.kind == "f" else values == NOT_APPLICABLE
    return np.where(absent, missing, values).astype(np.int64)


def _copied_steps(folded: Folded, name: Integers, times: Integers) -> Flags:
    """Mark steps that repeat an earlier step to the nanosecond: copies by the same tracer.

    `times` are (kind of time, record), without `duration_wall`: this is the host's time since the
    tracer last looked at the clock, and differs between copies.
    """
    bounds = np.searchsorted(folded.step, np.arange(folded.num_steps + 1))
    copies = np.zeros(folded.num_steps, dtype=np.bool_)
    ends = zip(*times[:, folded.end[bounds[:-1]]].tolist(), strict=True)
    if len(set(ends)) == folded.num_steps:  # copies of a step end at its time, too
        return copies
    seen: set[bytes] = set()
    for step, (first, stop) in enumerate(pairwise(bounds)):
        begin, end = folded.begin[first:stop], folded.end[first:stop]
        content = b"".join(part.tobytes() for part in (name[begin], times[:, begin], times[:, end]))
        copies[step] = content in seen
        seen.add(content)
    return copies


def _notes(
    path: Path, place: Place, folded: Folded, num_copies: int, num_instants: int, *, torn: bool
) -> tuple[str, ...]:
    counted = {
        "steps that never end": folded.num_open_steps,
        "steps whose scopes do not nest": folded.num_broken_steps,
        "identical copies of a step": num_copies,
        "scopes outside of steps": folded.num_outside,
        "instants": num_instants,
    }
    notes = [f"{count} {what}" for what, count in counted.items() if count]
    found = [f"rank {place.rank}: left out {', '.join(notes)}"] if notes else []
    return (*found, f"rank {place.rank}: {path.name} is cut off") if torn else tuple(found)


def original_spans(one: Recorded, layout: Layout, step_starts: Integers) -> pa.Table:
    """Return spans of TRACE_SCHEMA; iteration k begins at `step_starts[k - 1]`.

    An exchange (send and receive at once) becomes two spans of the same times, each with half of
    the bytes. A message at the end of the pipeline, where nothing is sent, becomes host time.
    """
    scopes = one.scopes
    microbatch, in_backward = _passes(one.names, scopes)
    scope, operation, table = _operations(one.names, scopes)
    shares = np.bincount(scope, minlength=len(scopes.row))[scope]
    data = scopes.data_bytes[scope]
    data = np.where(data > 0, data // shares, data)
    always = np.array([item.size_bytes for item in table], dtype=np.int64)[operation]
    negative = scopes.end_ns < scopes.start_ns
    if negative.any():
        raise InputError(
            f"{one.path}: {int(negative.sum())} scopes end before they begin; the file is damaged, "
            "restore it or move it away and pass --allow-missing-ranks"
        )
    phases = [item.phase for item in table]
    repeated = in_backward[scope] & np.array([it == Phase.FORWARD for it in phases])[operation]
    keys = scopes.step[scope] * len(table) + _channel(table)[operation]
    communicates = np.array([bool(item.op) for item in table])[operation]
    members = [_group(layout, one.place.rank, item) for item in table]
    peers = np.array([_peer(layout, one.place.rank, item) for item in table], dtype=np.int64)
    return span_table(
        len(scope),
        {
            "rank": one.place.rank,
            "track": np.array([item.track for item in table], dtype=np.int64)[operation],
            "start_ns": step_starts[scopes.step[scope]] + scopes.start_ns[scope],
            "duration_ns": (scopes.end_ns - scopes.start_ns)[scope],
            "iteration": scopes.step[scope] + 1,
            "microbatch": microbatch[scope],
            "chunk": scopes.chunk[scope],
            "layer": np.array([_without_layer(name)[1] for name in one.names])[scopes.name][scope],
            "sequence": np.where(communicates, running_numbers(keys), NOT_APPLICABLE),
            "size_bytes": np.maximum(data, always),
            "peer": peers[operation],
            "end_is_bound": _own_ends(layout, one.place, table)[operation],
        },
        {
            "kind": (operation, [str(item.kind) for item in table]),
            "name": (operation, [item.name for item in table]),
            "phase": (np.where(repeated, len(phases), operation), [*phases, str(Phase.RECOMPUTE)]),
            "op": (operation, [item.op for item in table]),
            "group": (operation, members),
            "direction": (operation, [item.direction for item in table]),
        },
    )


def _operations(names: Sequence[str], scopes: Scopes) -> tuple[Integers, Integers, list[Operation]]:
    """Return (scope of each span, its operation's number, operations), in the order of scopes."""
    table: list[Operation] = []
    first: list[list[int]] = []
    silent: list[int] = []
    for name in names:
        found = operations_of(name)
        first.append([*range(len(table), len(table) + len(found))])
        table += found
        silent.append(len(table))
        table.append(Operation(kind=Kind.HOST, name=name, track=Track.HOST))
    is_message = np.array([operations_of(name)[0].kind is Kind.P2P for name in names])
    is_silent = is_message[scopes.name] & (scopes.data_bytes <= 0)
    number = np.where(
        is_silent, np.array(silent)[scopes.name], np.array([a[0] for a in first])[scopes.name]
    )
    second = np.array([a[1] if len(a) > 1 else NOT_APPLICABLE for a in first])[scopes.name]
    twice = np.flatnonzero((second >= 0) & ~is_silent)
    scope = np.concatenate((np.arange(len(scopes.row)), twice))
    operation = np.concatenate((number, second[twice]))
    order = np.argsort(scope, kind="stable")
    return scope[order], operation[order], table


def _channel(table: list[Operation]) -> Integers:
    """Return each operation's channel: operations of one group, op and direction share a number."""
    channels = [(item.axis, item.op, item.direction) for item in table]
    return np.array([channels.index(channel) for channel in channels], dtype=np.int64)


def _own_ends(layout: Layout, place: Place, table: list[Operation]) -> Integers:
    """Return OWN_END for each operation, (operation,), in which work of the rank's own follows."""
    is_end = layout.pp > 1 and place.pp in (0, layout.pp - 1)
    follows = [is_end and item.holds_embeddings for item in table]
    return np.where(np.array(follows, dtype=np.bool_), OWN_END, NOT_APPLICABLE)


def _group(layout: Layout, rank: int, operation: Operation) -> str:
    if not operation.axis:
        return ""
    return group_id(operation.axis, layout.group(rank, operation.axis))


def _peer(layout: Layout, rank: int, operation: Operation) -> int:
    """Return the rank that a message goes to or comes from, -1 for other operations."""
    if operation.kind is not Kind.P2P:
        return NOT_APPLICABLE
    ahead = (operation.direction == "forward") == (operation.op == "send")
    stages = layout.group(rank, "pp")
    return stages[(stages.index(rank) + (1 if ahead else -1)) % len(stages)]


def _passes(names: Sequence[str], scopes: Scopes) -> tuple[Integers, Flags]:
    """Return the microbatch of each scope, if need be that of the pass around it, and which scopes
    are in a backward pass. In files without passes, decoders count as passes, numbered by step.
    """

    def named(*starts: str) -> Flags:
        return np.array([name.startswith(starts) for name in names], dtype=np.bool_)

    def are(whole: str) -> Flags:
        return np.array([name == whole for name in names], dtype=np.bool_)[scopes.name]

    passes = named(FORWARD, BACKWARD)[scopes.name]
    microbatch = np.where(are(MISNUMBERED), NOT_APPLICABLE, scopes.microbatch)
    if not passes.any():
        passes = are(DECODER) & (scopes.depth == 1)
        microbatch[passes] = running_numbers(scopes.step[passes])
    if not passes.any():
        return microbatch, np.zeros(len(passes), dtype=np.bool_)
    end = scopes.row_end[passes]
    around = np.cumsum(passes) - 1  # scopes stand in the order of their begins
    inside = (around >= 0) & (scopes.row <= end[around])
    within = np.where(inside, microbatch[passes][around], NOT_APPLICABLE)
    backward = named(BACKWARD)[scopes.name[passes]][around]
    return np.where(microbatch < 0, within, microbatch), inside & backward & ~passes


RUN_ID = "original"
_MOST_TENSOR_RANKS = 4096


def read_original(paths: Sequence[Path], workers: Workers | None = None) -> list[Segment]:
    """Read every rank's file as a segment of one run.

    Files name no sizes of the parallel axes, so these are the smallest that fit all files.
    Raises InputError for files whose ranks do not fit Megatron's order.
    """
    read = partial(read_records, templates=record_templates())
    workers = workers or Here()
    recorded = workers.results(read, ((path,) for path in paths))
    return segments_of([one for one in recorded if one is not None], workers)


def keep_original(
    shards: Sequence[Sequence[Path]], workers: Workers, meanwhile: Callable[[], None]
) -> Iterator[tuple[Kept, Packed]]:
    """Read shards of files as `read_original` does; return only the ends of their spans.

    `meanwhile` is called in this process when the workers have begun.
    """
    read = partial(_read_scopes, templates=record_templates())
    reading = workers.keep(read, ((files,) for files in shards))
    meanwhile()
    parts = list(reading)
    recorded = [one for _, shelved in parts for one in shelved.files]
    if recorded:
        place = partial(_settled, layout=_layout(recorded), starts=_step_starts(recorded))
        tasks = ((kept, shelved, number) for number, (kept, shelved) in enumerate(parts))
        yield from workers.keep(place, tasks)


_SMALL = ("name", "row", "row_end", "step", "depth")
_SCOPE_COLUMNS = {
    one.name: pa.int32() if one.name in _SMALL else pa.int64() for one in fields(Scopes)
}
_NO_SCOPES = Scopes(**dict.fromkeys(_SCOPE_COLUMNS, np.zeros(0, dtype=np.int64)))


@dataclass(frozen=True)
class _Shelved:
    """Files of a shard without their scopes; one table has the scopes, file i from bounds[i] on."""

    files: tuple[Recorded, ...]
    bounds: tuple[int, ...]


def _read_scopes(paths: Sequence[Path], templates: Templates) -> tuple[pa.Table, _Shelved]:
    """Return the scopes of some files as one table, and everything else that the files hold."""
    found = [one for path in paths if (one := read_records(path, templates)) is not None]
    columns = {
        name: pa.chunked_array(
            [pa.array(getattr(one.scopes, name)).cast(kind) for one in found], kind
        )
        for name, kind in _SCOPE_COLUMNS.items()
    }
    bounds = accumulate((len(one.scopes.row) for one in found), initial=0)
    bare = tuple(replace(one, scopes=_NO_SCOPES) for one in found)
    return pa.table(columns), _Shelved(bare, tuple(bounds))


def _settled(
    table: pa.Table, shelved: _Shelved, number: int, layout: Layout, starts: Integers
) -> tuple[pa.Table, Packed]:
    """Place a shard's scopes on the common axis, as spans."""
    columns = {name: numbers(table, name) for name in _SCOPE_COLUMNS}
    segments: list[Segment] = []
    for one, (begin, end) in zip(shelved.files, pairwise(shelved.bounds), strict=True):
        scopes = Scopes(**{name: column[begin:end] for name, column in columns.items()})
        segments += _segment(replace(one, scopes=scopes), layout, starts).segments
    return settled_shard(segments, number)


def segments_of(recorded: Sequence[Recorded], workers: Workers) -> list[Segment]:
    """Put the steps of all ranks on a common axis; raises InputError as `read_original`."""
    if not recorded:
        return []
    layout = _layout(recorded)
    starts = _step_starts(recorded)
    place = partial(_segment, layout=layout, starts=starts)
    parts = workers.results(place, ((one,) for one in recorded))
    return [segment for part in parts for segment in part.segments]


def _layout(recorded: Sequence[Recorded]) -> Layout:
    """Find the smallest sizes that hold all coordinates and give every file the rank it says."""
    places = [one.place for one in recorded]
    pp = 1 + max(place.pp for place in places)
    highest = max(place.rank for place in places)
    most = min(highest + 1, _MOST_TENSOR_RANKS)
    for tp in range(1 + max(place.tp for place in places), most + 1):
        dp = max(_data_size(place, tp) for place in places)
        if all(place.rank == place.tp + tp * (place.dp + dp * place.pp) for place in places):
            return Layout(tp=tp, dp=dp, pp=pp)
    said = {f"rank {p.rank} at DP {p.dp}, PP {p.pp}, TP {p.tp}" for p in places}
    raise InputError(
        f"{recorded[0].path.parent}: {listed(sorted(said))} fit no TP×DP×PP job together; files of "
        "different jobs are mixed, put each job into a folder of its own"
    )


def _data_size(place: Place, tp: int) -> int:
    """Return the data-parallel size that a later stage's rank implies; in the first stage, the
    least size that the file's coordinate needs.
    """
    if not place.pp:
        return place.dp + 1
    return max(((place.rank - place.tp) // tp - place.dp) // place.pp, place.dp + 1)


def _step_starts(recorded: Sequence[Recorded]) -> Integers:
    """Return the begin of each step on the common axis."""
    num_steps = max(len(one.wall_ns) for one in recorded)
    pause, length = np.zeros((2, num_steps), dtype=np.int64)
    for one in recorded:
        steps = slice(0, len(one.wall_ns))
        pause[steps] = np.maximum(pause[steps], one.pad_before_ns)
        length[steps] = np.maximum(length[steps], one.wall_ns)
    return np.cumsum(pause) + np.r_[0, np.cumsum(length)[:-1]] if num_steps else pause


def _segment(one: Recorded, layout: Layout, starts: Integers) -> Packed:
    header = _header(one.place, layout)
    num_steps = len(one.wall_ns)
    try:
        spans = original_spans(one, layout, starts)
    except pa.ArrowInvalid as error:
        raise InputError(f"{one.path}: a value out of range ({error}); restore the file") from error
    window = WindowRecord(
        run_id=RUN_ID,
        window=0,
        first_iteration=1,
        last_iteration=num_steps,
        num_spans=spans.num_rows,
    )
    segment = Segment(
        path=one.path,
        header=header,
        windows=(window,) if num_steps else (),
        spans=spans,
        num_unfinished_spans=one.num_unfinished_spans,
        notes=one.notes,
    )
    return Packed((segment,))


def _header(place: Place, layout: Layout) -> RankHeader:
    groups = {
        group_id(axis, members): members
        for axis in ("tp", "dp", "pp")
        if len(members := layout.group(place.rank, axis)) > 1
    }
    return foreign_header(
        RUN_ID,
        place.rank,
        layout,
        Device(kind="cuda", name="", index=place.device),
        ClockOrigin(domain=f"rank {place.rank}", source=RESTARTING_CLOCK, origin_unix_ns=0),
        granularity=Granularity.FULL,
        groups=groups,
        backend="nccl",
    )
