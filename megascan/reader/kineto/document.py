"""Read a profile's file: the header, wherever its keys stand, the groups, the events as columns.

torch 1.8 to 2.13 write the same events in several ways, and scripts rewrite them by `json.dump`:

    header     before `traceEvents` (2.x), after it (1.x), on both sides, or not at all
    cat        Operator, Kernel, Runtime, Memcpy, Memset; later cpu_op, kernel, cuda_runtime, …
    ts         whole µs of unix time; later fractions, relative to baseTimeNanoseconds
    pid, tid   numbers or text ("stream 7")
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers
from megascan.errors import InputError
from megascan.header import MOST_RANKS, Json, shown
from megascan.reader.lines import (
    Block,
    Document,
    EventBlock,
    GeneralParser,
    open_document,
    parse_block,
)
from megascan.reader.segments import true_rows
from megascan.vocabulary import AXIS_OF_VARIABLE, MESH_AXES, group_id

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_.]?(\d+)", re.IGNORECASE)
_TEXT_PLACE = re.compile(rb'"(pid|tid)"\s*:\s*"[^"]*"')
_DIGITS = re.compile(r"[0-9]{1,19}")
_TEXT_TIME = re.compile(rb'"(ts|dur)"(\s*:\s*)"([0-9.eE+-]+)"')
_BARE_LIST = re.compile(rb'"Process Group Ranks"\s*:\s*(\[[^\]"]*\])')

_ARGUMENTS = (
    ("Collective name", pa.string()),
    ("Process Group Name", pa.string()),
    ("Process Group Description", pa.string()),
    ("Process Group Ranks", pa.string()),
    ("dtype", pa.string()),
    ("In msg nelems", pa.int64()),
    ("Group size", pa.int64()),
    ("Seq", pa.int64()),
    ("Src Rank", pa.int64()),
    ("Dst Rank", pa.int64()),
    ("device", pa.int64()),
    ("stream", pa.int64()),
    ("correlation", pa.int64()),
    ("grid", pa.list_(pa.int64())),
    ("block", pa.list_(pa.int64())),
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

KERNEL, COPY, FILL = "kernel", "gpu_memcpy", "gpu_memset"
ON_DEVICE = (KERNEL, COPY, FILL)
LAUNCH, OPERATOR, ANNOTATION = "cuda_runtime", "cpu_op", "user_annotation"
_CATEGORIES = {
    **{name: name for name in (*ON_DEVICE, LAUNCH, OPERATOR, ANNOTATION)},
    "operator": OPERATOR,
    "runtime": LAUNCH,
    "cuda_driver": LAUNCH,
    "xpu_runtime": LAUNCH,
    "xpu_driver": LAUNCH,
    "memcpy": COPY,
    "memset": FILL,
}
"""Categories of all versions in lower case; all others (gpu_user_annotation, python_function,
flows, the profiler's own) are not needed."""
_ANNOTATED = r"^(ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)#|nccl:|gloo:)"
"""Names of events that are annotations, although older versions call them operators."""
_SHAPED = r"^(gloo:|c10d::(send|recv))"
LARGEST_MICROS = 2.0**52
"""Largest time; absolute unix time in µs, as older versions write it, is smaller."""
_LONGEST_NS = 1 << 62
_NUM_EXTENTS = 3
"""Dimensions of a launch's grid or block: x, y, z."""


_AXIS_OF_DESCRIPTION = {
    "default_pg": "world",
    **{variable.strip("_").lower(): axis for variable, axis in AXIS_OF_VARIABLE.items()},
}
"""Our axes by Megatron's group descriptions; other descriptions keep their own words."""
_LONGEST_LIST = 4000
"""Most characters of a list of ranks; the profiler itself shortens longer lists, by dots."""


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator: our id for it, and its ordered global ranks (empty: not known)."""

    id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A file's header and events.

    `events` has the columns ph, cat, name, ts, dur, tid and one for each argument (null where
    absent); `shapes` holds the arguments of CPU communication by row of `events`. `rank` is -1 if
    neither header nor file name tells the rank.
    """

    path: Path
    rank: int
    world_size: int | None
    origin_unix_ns: int
    host: str
    backend: str
    device: str
    device_index: int
    groups: dict[str, ProcessGroup]
    events: pa.Table
    shapes: dict[int, dict[str, Json]]
    notes: tuple[str, ...]

    def of_category(self, *categories: str) -> Flags:
        """Mark the events of some categories."""
        return np.asarray(pc.is_in(self.events.column("cat"), value_set=pa.array(categories)))


@dataclass(frozen=True)
class _Content:
    events: pa.Table
    shapes: dict[int, dict[str, Json]]
    num_misfits: int
    torn: bool


def read_profile(path: Path) -> Profile:
    """Read a profile's file. Raises InputError if it is damaged."""
    document = open_document(path)
    content = _content(path, document)
    header = _header(document)
    distributed = _mapping(header.get("distributedInfo"))
    rank, device = _rank(path, distributed), _busiest_device(content.events)
    return Profile(
        path=path,
        rank=rank,
        world_size=_whole_number(path, distributed, "world_size", MOST_RANKS),
        origin_unix_ns=_whole_number(path, header, "baseTimeNanoseconds", _LONGEST_NS) or 0,
        host=text_of(header.get("host_name")),
        backend=text_of(distributed.get("backend")),
        device=_device_name(header.get("deviceProperties"), device),
        device_index=device,
        groups=stated_groups(content.events) | configured_groups(distributed.get("pg_config")),
        events=content.events,
        shapes=content.shapes,
        notes=_notes(rank, path, content.num_misfits, torn=content.torn),
    )


def _content(path: Path, document: Document) -> _Content:
    tables: list[pa.Table] = []
    shapes: dict[int, dict[str, Json]] = {}
    num_rows, num_misfits, torn = 0, 0, False
    for block in document.blocks:
        torn = torn or block.torn
        events = parse_block(_plain_events(block), _PARSER)
        if events is None:
            continue
        num_misfits += _count_misfits(path, events)
        categories = _categories(events.table)
        kept = true_rows(pc.and_(pc.equal(events.table.column("ph"), "X"), pc.is_valid(categories)))
        place = events.table.schema.get_field_index("cat")
        table = events.table.set_column(place, "cat", categories).take(kept)
        rows = true_rows(pc.match_substring_regex(table.column("name"), _SHAPED)).to_pylist()
        texts = events.rows_text([kept[row].as_py() for row in rows]) if rows else []
        shapes |= {
            num_rows + row: _mapping(orjson.loads(text).get("args"))
            for row, text in zip(rows, texts, strict=True)
        }
        tables.append(_flat(table))
        num_rows += table.num_rows
    whole = pa.concat_tables(tables) if tables else _flat(_SCHEMA.empty_table())
    return _Content(whole, shapes, num_misfits, torn)


def _count_misfits(path: Path, events: EventBlock) -> int:
    for damage in events.damages:
        if not damage.is_json:
            raise InputError(f"{path}: event {damage.line} {damage.reason}; restore the file")
    return len(events.damages)


def _header(document: Document) -> dict[str, Json]:
    """Read the header, which stands around the events; in a file that is cut off, before them.

    An unreadable header counts as empty.
    """
    for text in (document.preamble + b"[]" + document.tail, document.preamble + b"[]}"):
        try:
            header = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        return header if isinstance(header, dict) else {}
    return {}


def _rank(path: Path, distributed: dict[str, Json]) -> int:
    rank = _whole_number(path, distributed, "rank", MOST_RANKS - 1)
    if rank is not None:
        return rank
    named = _RANK_IN_NAME.search(path.name)
    return int(named[1]) if named is not None else -1


def _mapping(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _whole_number(path: Path, record: dict[str, Json], name: str, most: int) -> int | None:
    """Read a number of the header, or None; "3" is 3, as launchers' variables are text.

    Raises InputError for anything else.
    """
    value = record.get(name)
    if value is None:
        return None
    value = _number_of(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise InputError(
            f"{path}: its header says {name} {shown(value)}, expected a number from 0 to {most}; "
            "restore the file"
        )
    return value


def _number_of(value: Json) -> Json:
    """Return a number that is written as text as a number; anything else as it is."""
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value


def _plain_events(block: Block) -> Block:
    """Give each key one JSON type: some versions write text for pid and tid, lists for ranks; times
    are text in files that were rewritten with exact decimals.
    """
    block = block.one_a_line()
    text = _TEXT_PLACE.sub(rb'"\1":-1', block.text)
    if any(begin in text for begin in (b'"ts":"', b'"ts": "')):
        text = _TEXT_TIME.sub(rb'"\1"\2\3', text)
    text = _BARE_LIST.sub(rb'"Process Group Ranks":"\1"', text)
    return Block(bytearray(text), block.first_line, block.torn)


def _categories(table: pa.Table) -> pa.Array:
    """Return each event's category by its current name; null for categories that are not needed."""
    lower = pc.utf8_lower(table.column("cat")).combine_chunks()
    place = pc.index_in(lower, value_set=pa.array(list(_CATEGORIES)))
    category = pa.array(list(_CATEGORIES.values())).take(place)
    is_operator = pc.fill_null(pc.equal(category, OPERATOR), False)
    annotated = pc.and_(is_operator, pc.match_substring_regex(table.column("name"), _ANNOTATED))
    return pc.if_else(pc.fill_null(annotated, False), ANNOTATION, category)


def _flat(table: pa.Table) -> pa.Table:
    arguments = table.column("args").combine_chunks()
    if isinstance(arguments, pa.ChunkedArray):
        arguments = pa.array([], _SCHEMA.field("args").type)
    flat = table.drop_columns(["args"])
    for name, _ in _ARGUMENTS:
        flat = flat.append_column(name, pc.struct_field(arguments, name))
    return flat


def _busiest_device(events: pa.Table) -> int:
    """Return the number of the device that most kernels ran on; 0 if no kernel names its device."""
    kernels = events.filter(pc.is_in(events.column("cat"), value_set=pa.array(ON_DEVICE)))
    counts = kernels.column("device").drop_null().value_counts()
    if not len(counts):
        return 0
    return int(max(counts.to_pylist(), key=lambda one: one["counts"])["values"])


def _device_name(properties: Json, device: int) -> str:
    """Return the name of a device, or of the first listed device if it is not listed itself."""
    entries = properties if isinstance(properties, list) else []
    known = [entry for entry in entries if isinstance(entry, dict)]
    own = [entry for entry in known if entry.get("id") == device]
    return text_of((own or known)[0].get("name")) if known else ""


def _notes(rank: int, path: Path, num_misfits: int, *, torn: bool) -> tuple[str, ...]:
    notes = []
    if num_misfits:
        notes.append(f"rank {rank}: {num_misfits} events of unknown shape were left out")
    if torn:
        notes.append(f"rank {rank}: {path.name} is cut off")
    return tuple(notes)


def process_group(
    name: str, description: str, ranks: str, configured: Mapping[str, ProcessGroup]
) -> ProcessGroup:
    """Return the group that a kernel's arguments name: from the header, or else by the listed ranks
    if they are listed in full.
    """
    members = _listed_ranks(ranks)
    known = configured.get(name)
    if known is not None:
        return known
    axis = axis_name(description, name)
    return ProcessGroup(group_id(axis, members), members) if members else ProcessGroup("", ())


def axis_name(description: str, name: str) -> str:
    """Return a group's axis, the first part of its id; torch calls mesh dimensions `mesh_tp`."""
    words = description.strip("_ ").lower()
    dimension = words.removeprefix("mesh_")
    if dimension != words and dimension in MESH_AXES:
        axis = MESH_AXES[dimension]
        return axis if axis in (dimension, "tp", "cp", "pp") else f"{axis}-{dimension}"
    return _AXIS_OF_DESCRIPTION.get(words) or (
        words if words not in ("", "undefined") else f"pg{name}"
    )


def configured_groups(config: object) -> dict[str, ProcessGroup]:
    """Return groups by name from a header's `pg_config`; entries of another form are passed over:
    the arguments of communication name the groups as well.
    """
    groups = {}
    for entry in config if isinstance(config, list) else []:
        listed = entry.get("ranks") if isinstance(entry, dict) else None
        numbers = [_number_of(one) for one in listed] if isinstance(listed, list) else []
        ranks = [one for one in numbers if is_rank(one)]
        if ranks and len(ranks) == len(numbers):
            name = text_of(entry.get("pg_name"))
            axis = axis_name(text_of(entry.get("pg_desc")), name)
            groups[name] = ProcessGroup(group_id(axis, ranks), tuple(ranks))
    return groups


def stated_groups(events: pa.Table) -> dict[str, ProcessGroup]:
    """Return groups by name from the arguments of communication."""
    names = ("Process Group Name", "Process Group Description", "Process Group Ranks")
    said = events.select(names).filter(pc.is_valid(events.column(names[2])))
    distinct = said.group_by(list(names)).aggregate([]).to_pylist()
    found = {
        row[names[0]] or "": process_group(
            row[names[0]] or "", row[names[1]] or "", row[names[2]], {}
        )
        for row in distinct
    }
    return {name: group for name, group in found.items() if group.ranks}


def _listed_ranks(text: str) -> tuple[int, ...]:
    """Read the members of "[0, 1, 2]"; return none for a list that is shortened by dots, or longer
    than any list that the profiler writes: a part of the members would be a wrong group.
    """
    if "..." in text or len(text) > _LONGEST_LIST:
        return ()
    ranks = tuple(int(number) for number in re.findall(r"[0-9]+", text))
    return ranks if all(map(is_rank, ranks)) else ()


def is_rank(value: object) -> TypeGuard[int]:
    """Return whether a value of a profile can be the number of a rank."""
    return isinstance(value, int) and 0 <= value < MOST_RANKS


def text_of(value: object) -> str:
    """Return a text or number as text; "" for other values, which a damaged file may hold."""
    return str(value) if isinstance(value, str | int) else ""


def times_ns(profile: Profile) -> tuple[Integers, Integers]:
    """Return (start, end) of events relative to the origin, each rounded to whole nanoseconds.

    Raises InputError for impossible times, and for events that end before they begin.
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


def launch_shapes(events: pa.Table) -> tuple[Integers, list[str]]:
    """Return (event,) the number of each event's launch text, and the distinct launch texts.

    A text is as in CUDA, `<<<64x4, 128>>>`, and "" for events without grid or block.
    """
    extents = np.column_stack([_extents(events.column(name)) for name in ("grid", "block")])
    distinct, number = np.unique(extents, axis=0, return_inverse=True)
    return number.reshape(-1).astype(np.int64), [_launch(row) for row in distinct.tolist()]


def _extents(column: pa.ChunkedArray) -> Integers:
    """Return (event, 3) sizes; 1 in dimensions that a list lacks, 0 for events without a list."""
    lists = column.combine_chunks()
    length = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    values = pc.fill_null(pc.list_flatten(lists), 1).to_numpy(zero_copy_only=False)
    first = np.cumsum(length) - length
    sizes = np.tile((length > 0).astype(np.int64)[:, None], (1, _NUM_EXTENTS))
    for axis in range(_NUM_EXTENTS):
        has = length > axis
        sizes[has, axis] = values[first[has] + axis]
    return sizes


def _launch(sizes: list[int]) -> str:
    grid, block = sizes[:_NUM_EXTENTS], sizes[_NUM_EXTENTS:]
    return f"<<<{_extent(grid)}, {_extent(block)}>>>" if any(grid) and any(block) else ""


def _extent(sizes: list[int]) -> str:
    used = max((axis for axis, size in enumerate(sizes) if size != 1), default=0)
    return "x".join(map(str, sizes[: used + 1]))
