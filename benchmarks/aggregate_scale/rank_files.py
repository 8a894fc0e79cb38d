"""Rank files of simulated jobs of any size, written column by column.

A job is simulated for a few iterations, which are then repeated with their times moved on, so that
a trace of 20 M spans needs neither the time nor the memory of a simulation that long. Spans stand
in the order in which they ended, as the tracer writes them; each repetition is a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Integers
from megascan.export.chrome import (
    coded_argument,
    coded_numbers,
    coded_texts,
    microsecond_texts,
    number_texts,
    row_texts,
)
from megascan.parallel import in_order, num_workers
from megascan.rankfile import encode_header, encode_window, rank_file_path
from megascan.schema import NOT_APPLICABLE, SPAN_COLUMNS, Column
from megascan.simulate import Clocks, JobModel, compute_bound, simulate_trace
from megascan.timeline import Trace, numbers
from megascan.topology import Layout

_BLOCK_ROWS = 1 << 19
"""Lines made at a time, all repetitions of some ranks."""
_SPANS_A_WORKER = 4_000_000
"""Fewer do not pay for the start of a process."""
_MANY_VALUED = ("sequence", "launch_ns", "cpu_ns")
_FRAME = ("rank", "kind", "name", "track", "start_ns", "duration_ns")


@dataclass(frozen=True, kw_only=True)
class ScaleJob:
    """A job's shape, and how many spans its trace has at least.

    `most_simulated` bounds the spans that are simulated before they are repeated; one iteration
    always is.
    """

    layout: Layout
    num_spans: int
    num_microbatches: int = 8
    num_layers: int = 16
    most_simulated: int = 1_000_000

    @property
    def name(self) -> str:
        """As tables show it."""
        layout = self.layout
        return f"TP{layout.tp} PP{layout.pp} DP{layout.dp}"


def write_rank_files(job: ScaleJob, folder: Path) -> int:
    """Write a rank file a rank into a new folder; the number of spans in them."""
    trace = simulated(job, iterations=1)
    num_rows = int(trace.spans.num_rows)
    wanted = -(-job.num_spans // num_rows)
    iterations = max(1, min(wanted, job.most_simulated // num_rows))
    if iterations > 1:
        trace = simulated(job, iterations)
    num_repeats = -(-wanted // iterations)
    folder.mkdir(parents=True)
    start_ns = numbers(trace.spans, "start_ns")
    length_ns = int((start_ns + numbers(trace.spans, "duration_ns")).max() - start_ns.min())
    shifts_ns = np.arange(num_repeats) * length_ns
    frame = replace(trace, spans=trace.spans.schema.empty_table())
    write = partial(_write_ranks, frame, folder, shifts_ns)
    parts = _some_ranks(trace, num_repeats)
    workers = min(num_workers(), job.num_spans // _SPANS_A_WORKER)
    if workers < 2:
        for part in parts:
            write(part)
    else:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            for _ in in_order(pool, write, parts, most_waiting=workers + 1):
                pass
    return num_repeats * int(trace.spans.num_rows)


def simulated(job: ScaleJob, iterations: int) -> Trace:
    """The trace of so many iterations, on host clocks that differ by up to 50 ms."""
    model = JobModel(
        layout=job.layout,
        costs=compute_bound(job.layout),
        iterations=iterations,
        interval=iterations,
        window=iterations,
        num_microbatches=job.num_microbatches,
        num_layers=job.num_layers,
        clocks=Clocks(offset_ms=50.0),
    )
    return simulate_trace(model, seed=1)


def _some_ranks(trace: Trace, num_repeats: int) -> Iterator[tuple[list[int], pa.Table]]:
    """Consecutive ranks with their spans, in the order in which they ended."""
    rank, ranks = numbers(trace.spans, "rank"), sorted(trace.headers)
    count = max(1, _BLOCK_ROWS // num_repeats * len(ranks) // len(rank))
    for first in range(0, len(ranks), count):
        chosen = ranks[first : first + count]
        low, high = np.searchsorted(rank, [chosen[0], chosen[-1] + 1])
        spans = trace.spans.slice(low, high - low)
        start = numbers(spans, "start_ns")
        end = start + numbers(spans, "duration_ns")
        order = np.lexsort((-start, end, numbers(spans, "rank")))
        yield chosen, spans.take(pa.array(order))


def _write_ranks(
    trace: Trace, folder: Path, shifts_ns: Integers, part: tuple[list[int], pa.Table]
) -> None:
    ranks, spans = part
    rank = numbers(spans, "rank")
    bounds = np.searchsorted(rank, [*ranks, ranks[-1] + 1])
    origin_ns = np.array([trace.headers[each].clock.origin_unix_ns for each in ranks])
    start_ns = numbers(spans, "start_ns") - origin_ns[rank - ranks[0]]
    contents = [bytearray(b"[\n" + b",\n".join(encode_header(trace.headers[r]))) for r in ranks]
    for repeat, shift_ns in enumerate(shifts_ns.tolist()):
        lines, ends = _lines(trace, spans, start_ns + shift_ns, repeat)
        for place, each in enumerate(ranks):
            contents[place] += lines[ends[bounds[place]] : ends[bounds[place + 1]]]
            contents[place] += b",\n" + _window(trace, each, repeat)
    for each, content in zip(ranks, contents, strict=True):
        rank_file_path(folder, trace.headers[each]).write_bytes(content + b"\n]\n")


def _window(trace: Trace, rank: int, repeat: int) -> bytes:
    record = trace.windows[rank][0]
    moved = repeat * record.last_iteration
    return encode_window(
        rank,
        replace(
            record,
            window=repeat,
            first_iteration=record.first_iteration + moved,
            last_iteration=record.last_iteration + moved,
        ),
    )


def _lines(
    trace: Trace, spans: pa.Table, start_ns: Integers, repeat: int
) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """Text of all rows, each behind its separator, and where each row's text begins and ends."""
    iteration = numbers(spans, "iteration")
    iteration = iteration + repeat * trace.windows[min(trace.headers)][0].last_iteration
    spans = spans.set_column(
        spans.schema.get_field_index("iteration"), "iteration", pa.array(iteration)
    )
    head = [
        coded_texts(spans, "name", ',\n{{"name":{}'),
        coded_texts(spans, "kind", ',"cat":{},"ph":"X"'),
    ]
    place = [
        coded_numbers(numbers(spans, "rank"), lambda rank: f'"pid":{rank},'),
        coded_numbers(numbers(spans, "track"), lambda track: f'"tid":{track},"args":{{'),
    ]
    few = [coded_argument(spans, column) for column in SPAN_COLUMNS if _has_few_values(column)]
    last = coded_numbers(iteration, lambda value: f'"iteration":{value}}}}}')
    parts: list[pa.StringArray | str] = [*row_texts(head), ',"ts":', microsecond_texts(start_ns)]
    parts += ['"dur":', microsecond_texts(numbers(spans, "duration_ns")), *row_texts(place)]
    parts += [_optional(spans, name) for name in _MANY_VALUED]
    parts += row_texts([*few, last])
    text = pc.binary_join_element_wise(*parts, "")
    return memoryview(text.buffers()[2]), np.frombuffer(text.buffers()[1], dtype=np.int32)


def _has_few_values(column: Column) -> bool:
    return column.name not in (*_FRAME, *_MANY_VALUED, "iteration")


def _optional(spans: pa.Table, name: str) -> pa.StringArray:
    """`"launch_ns":-5,` where it applies."""
    values = numbers(spans, name)
    text = pc.binary_join_element_wise(f'"{name}":', number_texts(values), "")
    return pc.if_else(pa.array(values != NOT_APPLICABLE), text, "")
