"""Read timelines that the original MegaScan's aggregator has merged, as rank files again.

The aggregator puts all ranks' scopes into one array of Chrome's complete events: `ts` and `dur` in
whole µs on a common axis, `pid` the global rank, `args` the step's number and the attributes of the
record at the scope's end. Here they are split by rank and step, turned into begin and end records,
and read as rank files are (`original.py`). Merging has lost three things: times below a
microsecond, the begin and end of each step itself (here the first begin and last end of any scope
in it), and, in files with the schedule's messages, a sender's wait: both ends of a message have the
shorter duration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Integers
from megascan.errors import InputError
from megascan.parallel import Here, Workers
from megascan.reader.lines import open_document, parse_block
from megascan.reader.original import RECORD_SCHEMA, STEP, Place, Recorded, recorded_of, segments_of
from megascan.reader.segments import Segment
from megascan.reader.templates import Templates
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import equals, numbers

_PLACE = ("g_rk", "dp_rk", "pp_rk", "tp_rk", "dev")
_ATTRIBUTES = ("micro_batch_index", "microbatch", "model_chunk", "data")
_ARGUMENTS = ("iteration", *_PLACE, *_ATTRIBUTES)
_EVENTS = pa.schema(
    [
        ("name", pa.string()),
        ("ph", pa.string()),
        ("ts", pa.int64()),
        ("dur", pa.int64()),
        ("args", pa.struct([(name, pa.int64()) for name in _ARGUMENTS])),
    ]
)
_NS_PER_US = 1000
_NOTE = (
    "merged by the original's aggregator: times are whole microseconds, and both ends of a message "
    "last as long as the shorter"
)


def read_original_timelines(paths: Sequence[Path], workers: Workers | None = None) -> list[Segment]:
    """Read merged timelines of the original MegaScan, every rank as a segment of one run.

    Raises InputError for events that are damaged or do not say their rank and step, and for ranks
    that do not fit Megatron's order.
    """
    recorded = [one for path in paths for one in _ranks_of(path)]
    segments = segments_of(recorded, workers or Here())
    return [replace(one, notes=(_NOTE, *one.notes)) for one in segments[:1]] + segments[1:]


def _ranks_of(path: Path) -> Iterator[Recorded]:
    events = _events(path)
    steps = _Steps.of(events)
    ranks = numbers(events, "args.g_rk")
    for rank in np.unique(ranks):
        own = events.filter(pa.array(ranks == rank))
        first = own.slice(0, 1)
        place = Place(*(int(numbers(first, f"args.{name}")[0]) for name in _PLACE))
        yield recorded_of(path, place, _records(own, steps), torn=False)


def _events(path: Path) -> pa.Table:
    """Return the complete events of a file, in the order of the file."""
    templates, tables, torn = Templates(_EVENTS), [], False
    for block in open_document(path).blocks:
        events = parse_block(block, templates)
        torn = torn or block.torn
        if events is not None:
            if events.damages:
                damage = events.damages[0]
                raise InputError(f"{path}: event {damage.line} {damage.reason}; restore the file")
            tables.append(events.table)
    if torn or not tables:
        raise InputError(f"{path}: is cut off; merge the rank files again")
    table = pa.concat_tables(tables).unify_dictionaries()
    table = table.filter(pa.array(equals(table, "ph", "X")))
    needed = ("ts", "dur", *(f"args.{name}" for name in ("iteration", *_PLACE)))
    for name in needed:
        values = numbers(table, name)
        if not len(values) or values.min() < 0:
            raise InputError(
                f"{path}: a scope does not say its {name.removeprefix('args.')}; restore the file, "
                "or merge the rank files again"
            )
    return table


@dataclass(frozen=True)
class _Steps:
    """When each step of the timeline begins and ends, ns, (step,) each."""

    start_ns: Integers
    end_ns: Integers

    @classmethod
    def of(cls, events: pa.Table) -> _Steps:
        """Take the first start and the last end of any rank in each step."""
        step = numbers(events, "args.iteration")
        start = numbers(events, "ts") * _NS_PER_US
        end = start + numbers(events, "dur") * _NS_PER_US
        starts = np.full(int(step.max()) + 1, np.iinfo(np.int64).max)
        ends = np.zeros_like(starts)
        np.minimum.at(starts, step, start)
        np.maximum.at(ends, step, end)
        return cls(np.where(ends > 0, starts, 0), ends)

    @property
    def pause_ns(self) -> Integers:
        """Return (step,) the time between each step and the step before."""
        pause_ns: Integers = np.maximum(self.start_ns - np.r_[0, self.end_ns[:-1]], 0)
        return pause_ns


def _records(events: pa.Table, steps: _Steps) -> pa.Table:
    """Return a rank's scopes and steps as begin and end records in the order of time.

    Of records at the same time, ends stand before begins, and inner ends before outer ends; but the
    end of a scope without length follows its begin.
    """
    step = numbers(events, "args.iteration")
    own_steps, first = np.unique(step, return_index=True)
    start = numbers(events, "ts") * _NS_PER_US - steps.start_ns[step]
    duration = numbers(events, "dur") * _NS_PER_US
    last = np.zeros(len(steps.start_ns), dtype=np.int64)
    np.maximum.at(last, step, start + duration)
    count = len(step)
    number = np.arange(count)
    place = np.concatenate(  # step, time, ends first, order of begins, begin before its own end
        [
            [own_steps, -np.ones_like(own_steps), own_steps * 0, own_steps * 0, own_steps * 0],
            [step, start, np.ones(count, dtype=np.int64), number, number * 0],
            [step, start + duration, (duration == 0).astype(np.int64),
             np.where(duration == 0, number, -number), number * 0 + 1],
            [own_steps, last[own_steps], own_steps * 0 + 2, own_steps * 0, own_steps * 0],
        ],
        axis=1,
    )  # fmt: skip
    order = np.lexsort(place[::-1])
    source = np.concatenate([first, number, number, first])[order]
    part = np.repeat([0, 1, 2, 3], [len(first), count, count, len(first)])[order]
    is_step, is_begin = (part == 0) | (part == 3), part < 2
    of_step = step[source]
    times = np.where(part == 0, 0, np.where(part == 3, last[of_step], place[1][order]))
    wall = np.where(part == 3, last[of_step], NOT_APPLICABLE)
    pause = np.where(part == 0, steps.pause_ns[of_step], NOT_APPLICABLE)
    taken = events.take(pa.array(source))
    names = pc.if_else(pa.array(is_step), STEP, taken.column("name").cast(pa.string()))
    columns: dict[str, object] = {
        "name": pc.dictionary_encode(names),
        "ph": pc.dictionary_encode(pc.if_else(pa.array(is_begin), "B", "E")),
        "rel_ts": times,
        "pad_before": pause.astype(np.float64),
        "duration_wall": wall.astype(np.float64),
    }
    columns |= {name: taken.column(f"args.{name}") for name in _ATTRIBUTES}
    return pa.table({name: columns[name] for name in RECORD_SCHEMA.names})
