"""One PyTorch profiler file: its header, and its events as columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from megascan.errors import InputError
from megascan.header import MOST_RANKS, Json
from megascan.reader.bytestream import Block
from megascan.reader.columns import true_rows
from megascan.reader.documents import open_document
from megascan.reader.kineto_comms import ProcessGroup, configured_groups, text_of
from megascan.reader.lines import GeneralParser, parse_block
from megascan.typed import shown

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


def read_profile(path: Path) -> Profile:
    """Read a file. Raises InputError for damage, and for one that does not say its rank."""
    document = open_document(path)
    header = _header(document.preamble)
    distributed = _mapping(header.get("distributedInfo"))
    rank = _rank(path, distributed)
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
    """What stands before the events; an unreadable header counts as none."""
    try:
        header = orjson.loads(preamble + b"[]}")
    except orjson.JSONDecodeError:
        return {}
    return header if isinstance(header, dict) else {}


def _rank(path: Path, distributed: dict[str, Json]) -> int:
    rank = _whole_number(path, distributed, "rank", MOST_RANKS - 1)
    if rank is not None:
        return rank
    named = _RANK_IN_NAME.search(path.name)
    if named is None:
        raise InputError(
            f"{path} does not say its rank (no distributedInfo: the profiler ran before "
            "init_process_group); put it into the file's name, as in rank3.json"
        )
    return int(named[1])


def _mapping(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _whole_number(path: Path, record: dict[str, Json], name: str, most: int) -> int | None:
    """A number of the header, None without it. Raises InputError for anything else."""
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


def times_ns(profile: Profile) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(start, end) of events relative to the origin, each rounded to whole nanoseconds.

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
    """(row, number) of the profiler's step marks on the host."""
    names = pc.fill_null(events.column("name"), "")
    is_step = pc.and_(
        pc.starts_with(names, "ProfilerStep#"), pc.equal(events.column("cat"), "user_annotation")
    )
    for row in true_rows(is_step).to_pylist():
        number = names[row].as_py().partition("#")[2]
        if _STEP_NUMBER.fullmatch(number):
            yield row, int(number)
