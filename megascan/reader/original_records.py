"""One file of the original MegaScan: records as columns, folded into scopes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from megascan.errors import InputError
from megascan.reader.documents import open_document
from megascan.reader.folding import Folded, fold
from megascan.reader.lines import EventBlock, parse_block
from megascan.reader.original_names import STEP
from megascan.reader.templates import Templates
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import codes, equals

Integers = npt.NDArray[np.int64]

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


@dataclass(frozen=True)
class Place:
    """Whose file it is, as its records say."""

    rank: int
    dp: int
    pp: int
    tp: int
    device: int


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Scopes of one file in the order of their begins; times in ns since their step's begin.

    `wall_ns` and `pad_before_ns` hold a value a step: its length, and the pause before it.
    `row` is the scope's begin among the file's records, `row_end` its end.
    """

    path: Path
    place: Place
    names: tuple[str, ...]
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
    wall_ns: Integers
    pad_before_ns: Integers
    num_unfinished_spans: int
    notes: tuple[str, ...]


def read_records(path: Path, templates: Templates) -> Recorded | None:
    """Scopes of a file; None when it holds no scope that says which rank it belongs to.

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
    return _recorded(path, place, pa.concat_tables(tables).unify_dictionaries(), torn=torn)


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


def _recorded(path: Path, place: Place, table: pa.Table, *, torn: bool) -> Recorded:
    scopes = equals(table, "ph", "B", "E")
    num_instants = int(np.sum(~scopes))
    if num_instants:
        table = table.filter(pa.array(scopes))
    name, names = codes(table, "name")
    texts = tuple(names)
    is_begin = equals(table, "ph", "B")
    step_code = texts.index(STEP) if STEP in texts else NOT_APPLICABLE
    folded = fold(is_begin, name == step_code, name)
    times = [_integers(table, key) for key in ("rel_ts", "pad_before", "duration_wall")]
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
        wall_ns=wall[end[is_first]],
        pad_before_ns=_integers(table, "pad_before", missing=0)[begin[is_first]],
        num_unfinished_spans=folded.num_open_spans,
        notes=_notes(path, place, folded, int(copies.sum()), num_instants, torn=torn),
    )


def _integers(table: pa.Table, name: str, missing: int = NOT_APPLICABLE) -> Integers:
    """A column of times or numbers; `missing` where a record has none."""
    values: Integers | npt.NDArray[np.float64] = table.column(name).to_numpy()
    if missing == NOT_APPLICABLE and values.dtype == np.int64:
        return values.astype(np.int64, copy=False)
    absent = np.isnan(values) if values.dtype.kind == "f" else values == NOT_APPLICABLE
    return np.where(absent, missing, values).astype(np.int64)


def _copied_steps(folded: Folded, name: Integers, times: Integers) -> npt.NDArray[np.bool_]:
    """Steps that repeat an earlier one to the nanosecond: copies, which one tracer wrote.

    `times` are (kind of time, record).
    """
    bounds = np.searchsorted(folded.step, np.arange(folded.num_steps + 1))
    seen: set[bytes] = set()
    copies = np.zeros(folded.num_steps, dtype=np.bool_)
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
