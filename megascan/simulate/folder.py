"""A simulated trace as a folder: ordinary rank files, and the ground truth beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pyarrow as pa

from megascan.errors import OutputError
from megascan.header import Json
from megascan.rankfile import (
    RankFile,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
    set_earlier_run_aside,
)
from megascan.schema import NOT_APPLICABLE, SPAN_COLUMNS
from megascan.simulate.faults import Fault
from megascan.simulate.job import JobModel
from megascan.timeline import Trace

GROUND_TRUTH_FILE = "ground-truth.json"
_FRAME = ("rank", "kind", "name", "track", "start_ns", "duration_ns")
_ARGUMENTS = tuple(column for column in SPAN_COLUMNS if column.name not in _FRAME)


def write_rank_files(trace: Trace, folder: Path) -> list[Path]:
    """Write one file a rank, as the tracer would have; return their paths.

    An earlier run's files in the folder are moved aside. Raises OutputError when the folder or a
    file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write_rank(trace, folder, rank) for rank in sorted(trace.headers)]
    except OSError as error:
        raise OutputError(
            f"cannot write rank files to {folder}: {error.strerror or error}; "
            "choose another folder with -o"
        ) from error


def _write_rank(trace: Trace, folder: Path, rank: int) -> Path:
    header = trace.headers[rank]
    path = rank_file_path(folder, header)
    set_earlier_run_aside(path)
    spans = _rows_of(trace.spans, rank)
    iterations = spans.column("iteration").to_numpy()
    file = RankFile(path)
    lines = encode_header(header)
    for window in trace.windows[rank]:
        inside = (iterations >= window.first_iteration) & (iterations <= window.last_iteration)
        records = _span_records(spans.filter(pa.array(inside)), header.clock.origin_unix_ns)
        lines.extend(encode_spans(rank, records))
        lines.append(encode_window(rank, window))
        file.append(lines)
        lines = []
    file.close()
    return path


def _rows_of(spans: pa.Table, rank: int) -> pa.Table:
    """A rank's rows; the table is ordered by rank."""
    ranks = spans.column("rank").to_numpy()
    first, last = ranks.searchsorted([rank, rank + 1])
    return spans.slice(first, last - first)


def _span_records(spans: pa.Table, origin_unix_ns: int) -> list[SpanRecord]:
    """Rows as the writer takes them: arguments hold only what applies."""
    columns = {name: spans.column(name).to_pylist() for name in spans.column_names}
    arguments: list[dict[str, int | str]] = [{} for _ in range(spans.num_rows)]
    for column in _ARGUMENTS:
        absent = "" if column.type == "text" else NOT_APPLICABLE
        for record, value in zip(arguments, columns[column.name], strict=True):
            if value != absent:
                record[column.name] = value
    return [
        (kind, name, track, start - origin_unix_ns, duration, values)
        for kind, name, track, start, duration, values in zip(
            *(columns[name] for name in _FRAME[1:]), arguments, strict=True
        )
    ]


def ground_truth(
    trace: Trace, job: JobModel, faults: Sequence[Fault], seed: int
) -> Mapping[str, Json]:
    """What is really wrong with a simulated job; no analysis ever reads it."""
    return {
        "schema": 1,
        "run_id": trace.run_id,
        "layout": dict(job.layout.to_json()),
        "iterations": job.iterations,
        "seed": seed,
        "faults": [fault.to_json() for fault in faults],
        "imbalances": job.imbalance.to_json(),
    }


def write_ground_truth(truth: Mapping[str, Json], folder: Path) -> Path:
    """Write `ground-truth.json` beside the rank files. Raises OutputError when it cannot."""
    path = folder / GROUND_TRUTH_FILE
    try:
        path.write_bytes(orjson.dumps(truth, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    return path
