"""Read PyTorch profiler (Kineto) JSON, a file a rank: kernels, or operators where there is no GPU.

    read_profile        one file: its header, and its events as columns
    communication_of    which events are communication, between whom, how many bytes
    profiled_spans      these and compute in our columns
    read_kineto         all files: parallel sizes from the process groups, one segment a rank

Kernels belong to the iteration in which the host launched them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers
from megascan.errors import InputError
from megascan.header import (
    MOST_RANKS,
    ClockOrigin,
    Device,
    Json,
    RankHeader,
    TraceSettings,
    WindowRecord,
    shown,
)
from megascan.parallel import Spread, across_threads
from megascan.reader.lines import Block, GeneralParser, open_document, parse_block
from megascan.reader.segments import Packed, Segment, running_numbers, span_table, true_rows
from megascan.schema import NOT_APPLICABLE, Granularity, Kind, Track
from megascan.topology import Layout
from megascan.vocabulary import (
    AXIS_OF_VARIABLE,
    COLLECTIVES,
    RECV,
    SEND,
    SEND_RECV,
    axis_of_group,
    group_id,
)

_AXES = {
    "default_pg": "world",
    **{variable.strip("_").lower(): axis for variable, axis in AXIS_OF_VARIABLE.items()},
}
"""Megatron's group descriptions; others keep their own words."""

_OPERATIONS = tuple(
    (op, op.replace("_", "")) for op in sorted((*COLLECTIVES, SEND, RECV), key=len, reverse=True)
)
"""Our operations and how other names contain them, the longest first: `reduce_scatter` before
`scatter`."""
_LONGEST_LIST = 4000
"""Characters of a list of ranks; the profiler shortens longer ones itself."""
_PEER_TO_PEER = "sendrecv"
"""NCCL runs batched sends and receives as one kernel of this name."""

_ITEM_BYTES = {
    "double": 8, "long": 8, "int": 4, "float": 4, "short": 2, "half": 2, "bfloat16": 2,
    "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator: our id for it, and its ordered global ranks (empty: not known)."""

    id: str
    ranks: tuple[int, ...]


def operation_name(name: str) -> str:
    """Return our operation of a collective's or NCCL kernel's name; "" for a batch of several."""
    plain = re.sub(r"[^a-z]", "", name.lower().removeprefix("nccldevkernel").removeprefix("nccl"))
    if _PEER_TO_PEER in plain:
        return ""
    return next((ours for ours, sign in _OPERATIONS if sign in plain), "")


def axis_name(description: str, name: str) -> str:
    """Return the first part of a group's id."""
    words = description.strip("_ ").lower()
    return _AXES.get(words) or (words if words not in ("", "undefined") else f"pg{name}")


def process_group(
    name: str, description: str, ranks: str, configured: Mapping[str, ProcessGroup]
) -> ProcessGroup:
    """Return the group of a kernel's arguments; ranks that are not listed in full come from the
    header.
    """
    members = _ranks(ranks)
    known = configured.get(name)
    if known is not None:
        return known
    axis = axis_name(description, name)
    return ProcessGroup(group_id(axis, members), members) if members else ProcessGroup("", ())


def configured_groups(config: object) -> dict[str, ProcessGroup]:
    """Return groups by name out of a header's `pg_config`; what is not in the known shape is left
    out.
    """
    groups = {}
    for entry in config if isinstance(config, list) else []:
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if ranks and isinstance(ranks, list) and all(map(_is_rank, ranks)):
            name = text_of(entry.get("pg_name"))
            axis = axis_name(text_of(entry.get("pg_desc")), name)
            groups[name] = ProcessGroup(group_id(axis, ranks), tuple(ranks))
    return groups


def text_of(value: object) -> str:
    """Return a text or number as text; nothing for what else a damaged file may hold."""
    return str(value) if isinstance(value, str | int) else ""


def only_group(groups: Iterable[ProcessGroup], rank: int) -> ProcessGroup:
    """Return the group of a span that names none: unambiguous only if all of a rank's have one
    make-up.
    """
    mine = [group for group in groups if rank in group.ranks]
    unlike = {group.ranks for group in mine}
    return mine[0] if len(unlike) == 1 else ProcessGroup("", ())


def peer_rank(value: int, group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a p2p partner, which is given by its place in the group."""
    if 0 <= value < len(group.ranks) and group.ranks[value] != rank:
        return group.ranks[value]
    return value if _is_rank(value) and value != rank else NOT_APPLICABLE


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; NOT_APPLICABLE for a type we do not know."""
    if dtype.lower().startswith("float8"):
        return 1
    return _ITEM_BYTES.get(dtype.lower(), NOT_APPLICABLE)


def _ranks(text: str) -> tuple[int, ...]:
    """Read the members of "[0, 1, 2]"; none of a list that was shortened by dots."""
    if "..." in text:
        return ()
    ranks = tuple(int(number) for number in re.findall(r"[0-9]+", text[:_LONGEST_LIST]))
    return ranks if all(map(_is_rank, ranks)) else ()


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MOST_RANKS


_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_TEXT_PLACE = re.compile(rb'"(pid|tid)"\s*:\s*"[^"]*"')
_BARE_LIST = re.compile(rb'"Process Group Ranks"\s*:\s*(\[[^\]"]*\])')

_ARGUMENTS = (
    ("Collective name", pa.string()),
    ("Process Group Name", pa.string()),
    ("Process Group Description", pa.string()),
    ("Process Group Ranks", pa.string()),
    ("dtype", pa.string()),
    ("In msg nelems", pa.int64()),
    ("Seq", pa.int64()),
    ("Src Rank", pa.int64()),
    ("Dst Rank", pa.int64()),
    ("stream", pa.int64()),
    ("correlation", pa.int64()),
)
_SCHEMA = pa.schema(
    [
        ("ph", pa.string()),
        ("cat", pa.string()),
        ("name", pa.string()),
        ("ts", pa.float64()),
        ("dur", pa.float64()),
        ("tid", pa.int64()),
        ("args", pa.struct(_ARGUMENTS)),
    ]
)
_PARSER = GeneralParser(_SCHEMA)
_USED = (
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation",
    "gpu_user_annotation", "cpu_op",
)  # fmt: skip
_STEP_NUMBER = re.compile(r"[0-9]{1,9}")
LARGEST_MICROS = 2.0**52
"""Absolute unix time in µs, as older versions write it, stays below."""
LONGEST_NS = 1 << 62
_SHAPED = re.compile(r"gloo:|c10d::(send|recv)")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A file's header and events.

    `events` has the columns ph, cat, name, ts, dur, tid and one a communication argument (null
    where absent); `shapes` holds the arguments of CPU communication by row of `events`.
    """

    path: Path
    rank: int
    world_size: int | None
    origin_unix_ns: int
    host: str
    backend: str
    device: str
    groups: dict[str, ProcessGroup]
    events: pa.Table
    shapes: dict[int, dict[str, Json]]
    notes: tuple[str, ...]


def read_profile(path: Path, *, alone: bool = False) -> Profile:
    """Read a file. Raises InputError for damage, and for one that does not say its rank.

    One that is `alone` need not say it: it may be of a job of a single process.
    """
    document = open_document(path)
    header = _header(document.preamble)
    distributed = _mapping(header.get("distributedInfo"))
    rank = _rank(path, distributed, default=0 if alone else None)
    tables: list[pa.Table] = []
    shapes: dict[int, dict[str, Json]] = {}
    num_rows, num_misfits, torn = 0, 0, False
    for block in document.blocks:
        torn = torn or block.torn
        events = parse_block(_plain(block), _PARSER)
        if events is None:
            continue
        for damage in events.damages:
            if not damage.is_json:
                raise InputError(f"{path}: event {damage.line} {damage.reason}; restore the file")
        num_misfits += len(events.damages)
        kept = true_rows(_wanted(events.table))
        table = events.table.take(kept)
        rows = _shaped_rows(table)
        texts = events.rows_text([kept[row].as_py() for row in rows]) if rows else []
        shapes |= {
            num_rows + row: _mapping(orjson.loads(text).get("args"))
            for row, text in zip(rows, texts, strict=True)
        }
        tables.append(_flat(table))
        num_rows += table.num_rows
    return Profile(
        path=path,
        rank=rank,
        world_size=_whole_number(path, distributed, "world_size", MOST_RANKS),
        origin_unix_ns=_whole_number(path, header, "baseTimeNanoseconds", LONGEST_NS) or 0,
        host=text_of(header.get("host_name")),
        backend=text_of(distributed.get("backend")),
        device=_device(header.get("deviceProperties")),
        groups=configured_groups(distributed.get("pg_config")),
        events=pa.concat_tables(tables) if tables else _flat(_SCHEMA.empty_table()),
        shapes=shapes,
        notes=_notes(rank, path, num_misfits, torn=torn),
    )


def _header(preamble: bytes) -> dict[str, Json]:
    """Read what stands before the events; an unreadable header counts as none."""
    try:
        header = orjson.loads(preamble + b"[]}")
    except orjson.JSONDecodeError:
        return {}
    return header if isinstance(header, dict) else {}


def _rank(path: Path, distributed: dict[str, Json], default: int | None) -> int:
    rank = _whole_number(path, distributed, "rank", MOST_RANKS - 1)
    if rank is not None:
        return rank
    named = _RANK_IN_NAME.search(path.name)
    if named is not None:
        return int(named[1])
    if default is None:
        raise InputError(
            f"{path} does not say its rank, as the other profiles beside it must; put it into the "
            "file's name, as in rank3.json (a profile of a job of one process is read by itself)"
        )
    return default


def _mapping(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _whole_number(path: Path, record: dict[str, Json], name: str, most: int) -> int | None:
    """Read a number of the header, None without it. Raises InputError for anything else."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InputError(
            f"{path}: its header says {name} {shown(value)}, expected a number from 0 to {most}; "
            "restore the file"
        )
    return value


def _plain(block: Block) -> Block:
    """Make columns of one type: some versions write text for pid and tid, lists for ranks."""
    text = _TEXT_PLACE.sub(rb'"\1":-1', block.text)
    text = _BARE_LIST.sub(rb'"Process Group Ranks":"\1"', text)
    return Block(bytearray(text), block.first_line, block.torn)


def _wanted(table: pa.Table) -> pa.ChunkedArray:
    of_use = pc.is_in(table.column("cat"), value_set=pa.array(_USED))
    return pc.and_(pc.equal(table.column("ph"), "X"), of_use)


def _shaped_rows(table: pa.Table) -> list[int]:
    matches = pc.match_substring_regex(table.column("name"), f"^({_SHAPED.pattern})")
    rows: list[int] = true_rows(matches).to_pylist()
    return rows


def _flat(table: pa.Table) -> pa.Table:
    arguments = table.column("args").combine_chunks()
    if isinstance(arguments, pa.ChunkedArray):
        arguments = pa.array([], _SCHEMA.field("args").type)
    flat = table.drop_columns(["args"])
    for name, _ in _ARGUMENTS:
        flat = flat.append_column(name, pc.struct_field(arguments, name))
    return flat


def _device(properties: Json) -> str:
    entries = properties if isinstance(properties, list) else []
    names = [str(entry.get("name", "")) for entry in entries if isinstance(entry, dict)]
    return names[0] if names else ""


def _notes(rank: int, path: Path, num_misfits: int, *, torn: bool) -> tuple[str, ...]:
    notes = []
    if num_misfits:
        notes.append(f"rank {rank}: {num_misfits} events of unknown shape were left out")
    if torn:
        notes.append(f"rank {rank}: {path.name} is cut off")
    return tuple(notes)


def times_ns(profile: Profile) -> tuple[Integers, Integers]:
    """Return (start, end) of events relative to the origin, each rounded to whole nanoseconds.

    Raises InputError for times that cannot be, and for events that end before they begin.
    """
    micros = profile.events.column("ts").fill_null(0.0).to_numpy()
    lengths = profile.events.column("dur").fill_null(0.0).to_numpy()
    usable = (np.abs(micros) < LARGEST_MICROS) & (np.abs(micros + lengths) < LARGEST_MICROS)
    for what, bad in (("no usable ts and dur", ~usable), ("a negative duration", lengths < 0)):
        if bad.any():
            raise InputError(
                f"{profile.path}: {np.count_nonzero(bad)} events have {what}; the file is damaged, "
                "restore it"
            )
    return (
        np.rint(micros * 1000).astype(np.int64),
        np.rint((micros + lengths) * 1000).astype(np.int64),
    )


def iterate_steps(events: pa.Table) -> Iterator[tuple[int, int]]:
    """Yield (row, number) of the profiler's step marks on the host."""
    names = pc.fill_null(events.column("name"), "")
    is_step = pc.and_(
        pc.starts_with(names, "ProfilerStep#"), pc.equal(events.column("cat"), "user_annotation")
    )
    for row in true_rows(is_step).to_pylist():
        number = names[row].as_py().partition("#")[2]
        if _STEP_NUMBER.fullmatch(number):
            yield row, int(number)


_MESSAGES = (SEND, RECV)
_A_RANK = re.compile(r"[0-9]{1,9}")
_MOST_ELEMENTS = 1 << 50
_DESCRIBED = (
    "Collective name", "Process Group Name", "Process Group Description", "Process Group Ranks",
    "dtype", "Src Rank", "Dst Rank",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication events by row of the profile's table.

    `channel` numbers what is counted together (group and operation, or peer and direction);
    `is_covered` marks every event that is communication or part of it, also those not chosen.
    """

    rows: Integers
    is_message: Flags
    channel: Integers
    integers: Mapping[str, Integers]
    texts: Mapping[str, tuple[Integers, list[str]]]
    groups: tuple[ProcessGroup, ...]
    is_covered: Flags
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Sort:
    """What all events with the same arguments share."""

    op: str
    group: ProcessGroup
    peer: int
    item_bytes: int

    @property
    def name(self) -> str:
        return self.op or SEND_RECV


def communication_of(profile: Profile, on_device: Flags) -> Communication:
    """Find NCCL kernels; without a GPU `record_param_comms`, without these gloo's spans."""
    events = profile.events
    names = pc.fill_null(events.column("name"), "")
    nccl = np.asarray(pc.match_substring(names, "nccl", ignore_case=True)) & on_device
    params = np.asarray(pc.equal(names, "record_param_comms"))
    params &= np.asarray(pc.is_valid(events.column("Collective name")))
    gloo = np.zeros(events.num_rows, dtype=np.bool_)
    gloo[[row for row in profile.shapes if _is_gloo(names[row].as_py())]] = True
    covered = nccl | params | gloo | np.asarray(pc.starts_with(names, "c10d::"))
    if on_device.any():
        return _described(profile, np.flatnonzero(nccl), covered)
    if params.any():
        return _described(profile, np.flatnonzero(params), covered)
    return _annotated(profile, np.flatnonzero(gloo), covered)


def _is_gloo(name: str) -> bool:
    """Tell collectives by gloo's annotation, messages by the operator around it, which says the
    peer.
    """
    return name.startswith("c10d::") or name not in ("gloo:send", "gloo:recv")


def _described(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Describe events by their collective's arguments: one look at each distinct set of them."""
    events = profile.events.take(pa.array(rows))
    keys = [pc.fill_null(events.column(name).cast(pa.string()), "") for name in _DESCRIBED]
    joined = pc.binary_join_element_wise(*keys, events.column("name"), "\x1f").combine_chunks()
    distinct = joined.dictionary_encode()
    sorts = [_sort(text.split("\x1f"), profile) for text in distinct.dictionary.to_pylist()]
    code = np.asarray(distinct.indices, dtype=np.int64)
    elements = events.column("In msg nelems").fill_null(NOT_APPLICABLE).to_numpy()
    sizes = np.array([sort.item_bytes for sort in sorts] or [0], dtype=np.int64)[code]
    stated = (elements >= 0) & (elements < _MOST_ELEMENTS) & (sizes > 0)
    sizes = np.where(stated, np.where(stated, elements, 0) * sizes, NOT_APPLICABLE)
    sequence = events.column("Seq").fill_null(NOT_APPLICABLE).to_numpy().copy()
    return _communication(rows, (code, sorts), (sizes, sequence), covered)


def _sort(words: list[str], profile: Profile) -> _Sort:
    collective, name, description, ranks, dtype, source, target, kernel = words
    group = process_group(name, description, ranks, profile.groups)
    op = operation_name(collective or kernel)
    value = target if op == SEND else source
    peer = _peer(value, group, profile.rank) if op in _MESSAGES else NOT_APPLICABLE
    return _Sort(op, group, peer, item_bytes(dtype))


def _annotated(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Describe gloo's spans, which name no group: all of this rank's must be equal."""
    group = only_group(profile.groups.values(), profile.rank)
    names = profile.events.column("name")
    sorts: dict[_Sort, int] = {}
    code, sizes = np.zeros((2, len(rows)), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        arguments = profile.shapes[row]
        op = operation_name(names[row].as_py().removeprefix("gloo:").removeprefix("c10d::"))
        peer = _stated_peer(arguments, group, profile.rank) if op in _MESSAGES else NOT_APPLICABLE
        code[place] = sorts.setdefault(_Sort(op, group, peer, NOT_APPLICABLE), len(sorts))
        sizes[place] = _stated_bytes(arguments)
    unnamed = bool(len(rows)) and not group.id
    notes = (f"rank {profile.rank}: gloo's spans do not say their process group",) * unnamed
    sequence = np.full(len(rows), NOT_APPLICABLE, dtype=np.int64)
    return _communication(rows, (code, list(sorts)), (sizes, sequence), covered, notes)


def _stated_peer(arguments: Mapping[str, object], group: ProcessGroup, rank: int) -> int:
    """Read the third input of c10d::send and c10d::recv_: the partner's place in the group."""
    inputs = cast("list[object]", arguments.get("Concrete Inputs") or [])
    value = str(inputs[2]) if len(inputs) > 2 else ""
    return _peer(value, group, rank)


def _peer(text: str, group: ProcessGroup, rank: int) -> int:
    return peer_rank(int(text), group, rank) if _A_RANK.fullmatch(text) else NOT_APPLICABLE


def _stated_bytes(arguments: Mapping[str, object]) -> int:
    """Count the bytes of the first input that has a shape (recorded with record_shapes)."""
    shapes = cast("list[list[object]]", arguments.get("Input Dims") or [])
    types = cast("list[str]", arguments.get("Input type") or [])
    for shape, dtype in zip(shapes, types, strict=False):
        sizes = shape[0] if shape and isinstance(shape[0], list) else shape
        if sizes and all(isinstance(size, int) for size in sizes):
            width = item_bytes({"c10::BFloat16": "bfloat16", "c10::Half": "half"}.get(dtype, dtype))
            width = item_bytes("float") if dtype == "TensorList" else width
            count = math.prod(cast("list[int]", sizes))
            return count * width if width > 0 and 0 <= count < _MOST_ELEMENTS else NOT_APPLICABLE
    return NOT_APPLICABLE


def _communication(
    rows: Integers,
    sorted_by: tuple[Integers, list[_Sort]],
    numbers: tuple[Integers, Integers],
    covered: Flags,
    notes: tuple[str, ...] = (),
) -> Communication:
    (code, sorts), (sizes, sequence) = sorted_by, numbers
    is_message = np.array([sort.op in (*_MESSAGES, "") for sort in sorts] or [False])[code]
    channels = [(sort.op, sort.group.id, sort.peer) for sort in sorts]
    peers = np.array([sort.peer for sort in sorts] or [0], dtype=np.int64)
    return Communication(
        rows=rows,
        is_message=is_message,
        channel=np.array([channels.index(one) for one in channels] or [0], dtype=np.int64)[code],
        integers={
            "size_bytes": sizes,
            "sequence": np.where(is_message, NOT_APPLICABLE, sequence),
            "peer": peers[code],
        },
        texts={
            "name": (code, [sort.name for sort in sorts]),
            "op": (code, [sort.op for sort in sorts]),
            "group": (code, [sort.group.id for sort in sorts]),
        },
        groups=tuple({sort.group for sort in sorts if sort.group.id}),
        is_covered=covered,
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """Spans (TRACE_SCHEMA, unix time) of one profile and what its header needs."""

    spans: pa.Table
    groups: Mapping[str, tuple[int, ...]]
    on_gpu: bool
    first_iteration: int
    last_iteration: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Times:
    """Of every event: start and end after the origin, the host's launch of it, its iteration."""

    start: Integers
    end: Integers
    launch: Integers
    iteration: Integers


def profiled_spans(profile: Profile) -> Profiled:
    """Return the iterations, communication and compute of a profile.

    With a GPU: every kernel and copy, put into the iteration in which the host launched it.
    Without: communication (`record_param_comms`, or gloo's annotations), and operators of the
    profiled thread that no other operator encloses.
    """
    events = profile.events
    start, end = times_ns(profile)
    steps = _Steps.of(events, start, end)
    launch = _launches(events, start)
    iteration = steps.iteration_at(np.where(launch >= 0, launch, start))
    times = _Times(start, end, launch, iteration)
    on_device = _is_category(events, "kernel", "gpu_memcpy", "gpu_memset")
    on_gpu = bool(on_device.any())
    communication = communication_of(profile, on_device)
    compute = on_device if on_gpu else _outermost(events, start, end, steps.thread)
    compute_rows = np.flatnonzero(compute & ~communication.is_covered)
    spans = pa.concat_tables(
        [
            _iterations(profile, steps, times),
            _communication_spans(profile, communication, times),
            _compute(profile, compute_rows, times),
        ]
    ).unify_dictionaries()
    left_out = events.num_rows - spans.num_rows
    shown = "host events" if on_gpu else "inner operators and annotations"
    notes = [f"rank {profile.rank}: {left_out} {shown} are not shown"] if left_out else []
    numbers = steps.numbers if len(steps.rows) else np.ones(1, dtype=np.int64)
    return Profiled(
        spans=spans,
        groups={
            group.id: group.ranks
            for group in (*profile.groups.values(), *communication.groups)
            if profile.rank in group.ranks
        },
        on_gpu=on_gpu,
        first_iteration=int(numbers.min()),
        last_iteration=int(numbers.max()),
        notes=(*notes, *communication.notes),
    )


@dataclass(frozen=True)
class _Steps:
    """The profiler's steps in the order of time: rows, iteration numbers, times; their thread."""

    rows: Integers
    numbers: Integers
    start: Integers
    end: Integers
    thread: int

    @classmethod
    def of(cls, events: pa.Table, start: Integers, end: Integers) -> _Steps:
        found = np.array([*iterate_steps(events)], dtype=np.int64).reshape(-1, 2)
        rows, numbers = found[np.argsort(start[found[:, 0]], kind="stable")].T
        thread = events.column("tid")[int(rows[0])].as_py() if len(rows) else None
        return cls(rows, numbers + 1, start[rows], end[rows], -1 if thread is None else thread)

    def iteration_at(self, times: Integers) -> Integers:
        """Return each time's iteration: 1 without any step, NOT_APPLICABLE outside of steps."""
        if not len(self.rows):
            return np.ones(len(times), dtype=np.int64)
        at = np.searchsorted(self.start, times, side="right") - 1
        inside = (at >= 0) & (times <= self.end[at])
        return np.where(inside, self.numbers[at], NOT_APPLICABLE)


def _is_category(events: pa.Table, *categories: str) -> Flags:
    return np.asarray(pc.is_in(events.column("cat"), value_set=pa.array(categories)))


def _outermost(events: pa.Table, start: Integers, end: Integers, thread: int) -> Flags:
    """Return the operators of a thread (any, if it is not known) that begin after all earlier ones
    ended.
    """
    threads = events.column("tid").fill_null(-1).to_numpy()
    operators = _is_category(events, "cpu_op")
    rows = np.flatnonzero(operators & ((threads == thread) if thread >= 0 else True))
    order = rows[np.lexsort((-end[rows], start[rows], threads[rows]))]
    outermost = np.zeros(events.num_rows, dtype=np.bool_)
    for one in np.unique(threads[order]):
        own = order[threads[order] == one]
        latest = np.maximum.accumulate(end[own])
        outermost[own[np.r_[True, start[own][1:] >= latest[:-1]]]] = True
    return outermost


def _launches(events: pa.Table, start: Integers) -> Integers:
    """Return host time at which each kernel was launched, by correlation id; NOT_APPLICABLE
    without.
    """
    ids = events.column("correlation").fill_null(-1).to_numpy()
    calls = np.flatnonzero(_is_category(events, "cuda_runtime", "cuda_driver") & (ids > 0))
    calls = calls[np.argsort(ids[calls], kind="stable")]
    device = _is_category(events, "kernel", "gpu_memcpy", "gpu_memset")
    launches = np.full(events.num_rows, NOT_APPLICABLE, dtype=np.int64)
    if len(calls):
        at = np.minimum(np.searchsorted(ids[calls], ids), len(calls) - 1)
        found = device & (ids[calls][at] == ids)
        launches[found] = start[calls[at]][found]
    return launches


def _iterations(profile: Profile, steps: _Steps, times: _Times) -> pa.Table:
    names = (np.zeros(len(steps.rows), dtype=np.int64), [str(Kind.ITERATION)])
    placed = _placed(profile, steps.rows, times) | {"track": int(Track.COMPUTE)}
    placed["iteration"] = steps.numbers
    return span_table(len(steps.rows), placed, {"kind": names, "name": names})


def _compute(profile: Profile, rows: Integers, times: _Times) -> pa.Table:
    events = profile.events.column("name").take(pa.array(rows))
    names = pc.fill_null(events, "").combine_chunks().dictionary_encode()
    texts = [_short(name) for name in names.dictionary.to_pylist()]
    return span_table(
        len(rows),
        _placed(profile, rows, times) | {"track": _tracks(profile.events, rows, Track.COMPUTE)},
        {
            "kind": (np.zeros(len(rows), dtype=np.int64), [str(Kind.COMPUTE)]),
            "name": (np.asarray(names.indices, dtype=np.int64), texts),
        },
    )


def _communication_spans(profile: Profile, found: Communication, times: _Times) -> pa.Table:
    """Make the spans of communication; sequence as recorded, else in the order of starts."""
    order = np.argsort(times.start[found.rows], kind="stable")
    keys = times.iteration[found.rows] * (found.channel.max(initial=0) + 1) + found.channel
    counted = np.empty(len(order), dtype=np.int64)
    counted[order] = running_numbers(keys[order])
    sequence = found.integers["sequence"]
    integers = _placed(profile, found.rows, times)
    integers.update(found.integers)
    integers["sequence"] = np.where(sequence < 0, counted, sequence)
    integers["track"] = _tracks(profile.events, found.rows, Track.COMMUNICATION)
    kinds = [str(Kind.COLLECTIVE), str(Kind.P2P)]
    texts = {**found.texts, "kind": (found.is_message.astype(np.int64), kinds)}
    return span_table(len(found.rows), integers, texts)


def _placed(profile: Profile, rows: Integers, times: _Times) -> dict[str, Integers | int]:
    launch, start = times.launch[rows], times.start[rows]
    return {
        "rank": profile.rank,
        "start_ns": profile.origin_unix_ns + start,
        "duration_ns": times.end[rows] - start,
        "iteration": times.iteration[rows],
        "launch_ns": np.where(launch >= 0, launch - start, NOT_APPLICABLE),
    }


def _short(kernel: str) -> str:
    """Return a kernel's name without its return type, template arguments and parameters."""
    return kernel.removeprefix("void ").partition("<")[0].partition("(")[0].strip() or kernel


def _tracks(events: pa.Table, rows: Integers, main: Track) -> Integers:
    """Return the main track for the busiest stream, the one next to it for what runs on others."""
    streams = events.column("stream").fill_null(-1).to_numpy()[rows]
    used, counts = np.unique(streams[streams >= 0], return_counts=True)
    busiest = used[np.argmax(counts)] if len(used) else -1
    on_main = (streams == busiest) | (streams < 0)
    return np.where(on_main, int(main), int(Track.OVERLAPPED))


RUN_ID = "kineto"


def read_kineto(paths: Sequence[Path], spread: Spread = across_threads) -> list[Segment]:
    """Read every rank's profile as a segment of one run.

    Iteration is the number of `ProfilerStep#N` plus one, or 1 throughout without such marks.
    Parallel sizes come from the descriptions of Megatron's process groups; without them all ranks
    count as data parallel. Raises InputError for damaged files and ones that do not say their rank.
    """
    profiles = list(spread(partial(read_profile, alone=len(paths) == 1), paths))
    layout = _layout(profiles)
    place = partial(_segment, layout=layout)
    return [segment for part in spread(place, profiles) for segment in part.segments]


def _layout(profiles: Sequence[Profile]) -> Layout:
    said = {profile.world_size for profile in profiles if profile.world_size}
    if len(said) > 1:
        raise InputError(
            f"{profiles[0].path.parent}: profiles of world sizes {sorted(said)} are mixed; put "
            "each job into a folder of its own"
        )
    world_size = said.pop() if said else 1 + max(profile.rank for profile in profiles)
    tp, cp, pp = (_largest(profiles, axis) for axis in ("tp", "cp", "pp"))
    if world_size % (tp * cp * pp):
        return Layout(dp=world_size)
    return Layout(tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp))


def _largest(profiles: Sequence[Profile], axis: str) -> int:
    return max(
        len(group.ranks) if axis_of_group(group.id) == axis else 1
        for profile in profiles
        for group in (*profile.groups.values(), ProcessGroup("", ()))
    )


def _segment(profile: Profile, layout: Layout) -> Packed:
    profiled = profiled_spans(profile)
    header = _run_header(profile, profiled, layout)
    window = WindowRecord(
        run_id=RUN_ID,
        window=0,
        first_iteration=profiled.first_iteration,
        last_iteration=profiled.last_iteration,
        num_spans=profiled.spans.num_rows,
    )
    segment = Segment(
        path=profile.path,
        header=header,
        windows=(window,) if profiled.spans.num_rows else (),
        spans=profiled.spans,
        notes=(*profile.notes, *profiled.notes),
    )
    return Packed((segment,))


def _run_header(profile: Profile, profiled: Profiled, layout: Layout) -> RankHeader:
    if profile.rank >= layout.world_size:
        raise InputError(
            f"{profile.path}: rank {profile.rank} is outside a world of {layout.world_size} ranks; "
            "files of different jobs are mixed, put each job into a folder of its own"
        )
    return RankHeader(
        run_id=RUN_ID,
        rank=profile.rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(profile.rank),
        groups=profiled.groups,
        host=profile.host,
        process_id=0,
        device=Device(
            kind="cuda" if profiled.on_gpu else "cpu",
            name=profile.device,
            index=0,
        ),
        backend=profile.backend,
        clock=ClockOrigin(
            domain=f"{profile.host} rank {profile.rank}".strip(),
            source="PyTorch profiler",
            origin_unix_ns=profile.origin_unix_ns,
        ),
        trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
    )
