"""Rank files of the original MegaScan: flat begin and end records without header or clock.

Each rank's times count from its own step begin, so steps are put on a common axis by their index:
step k begins where step k - 1 ends (its longest wall time over ranks) plus the longest pause before
it. That makes ranks comparable up to the spread of their step begins behind a barrier; each rank
is its own clock domain, so that alignment ties them by the ends of collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.errors import InputError
from megascan.header import (
    RESTARTING_CLOCK,
    ClockOrigin,
    Device,
    RankHeader,
    TraceSettings,
    WindowRecord,
)
from megascan.pipeline import Spread, across_threads
from megascan.reader.original_records import RECORD_SCHEMA, Place, Recorded, read_records
from megascan.reader.original_spans import original_spans
from megascan.reader.runs import listed
from megascan.reader.segments import Packed, Segment
from megascan.reader.templates import Templates
from megascan.schema import Granularity
from megascan.topology import Layout

RUN_ID = "original"
_MOST_TENSOR_RANKS = 4096

Integers = npt.NDArray[np.int64]


def read_original(paths: Sequence[Path], spread: Spread = across_threads) -> list[Segment]:
    """Every rank's file as a segment of one run.

    Sizes of the parallel axes are the smallest that fit all files, for they name no sizes.
    Raises InputError for files whose ranks do not fit Megatron's order.
    """
    read = partial(read_records, templates=Templates(RECORD_SCHEMA))
    recorded = [one for one in spread(read, paths) if one is not None]
    if not recorded:
        return []
    layout = _layout(recorded)
    starts = _step_starts(recorded)
    place = partial(_segment, layout=layout, starts=starts)
    return [segment for part in spread(place, recorded) for segment in part.segments]


def _layout(recorded: Sequence[Recorded]) -> Layout:
    """The smallest sizes that hold all coordinates and give every file the rank it says."""
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
    """Data-parallel size that a later stage's rank tells; else what its coordinate asks for."""
    if not place.pp:
        return place.dp + 1
    return max(((place.rank - place.tp) // tp - place.dp) // place.pp, place.dp + 1)


def _step_starts(recorded: Sequence[Recorded]) -> Integers:
    """Begin of each step on the common axis, and the end of the last."""
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
        f"{axis}@{min(members)}": members
        for axis in ("tp", "dp", "pp")
        if len(members := layout.group(place.rank, axis)) > 1
    }
    return RankHeader(
        run_id=RUN_ID,
        rank=place.rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(place.rank),
        groups=groups,
        host="",
        process_id=0,
        device=Device(kind="cuda", name="", index=place.device),
        backend="nccl",
        clock=ClockOrigin(domain=f"rank {place.rank}", source=RESTARTING_CLOCK, origin_unix_ns=0),
        trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
    )
