"""Header, spans and windows as lines: one JSON event each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson

from megascan.header import Json, RankHeader, WindowRecord
from megascan.schema import HEADER_EVENT, WINDOW_EVENT, Track
from megascan.topology import rank_file_name

SpanRecord = tuple[str, str, int, int, int, Mapping[str, int | str]]
"""(kind, name, track, start_ns, duration_ns, arguments): times relative to the header's clock
origin.

Arguments use the names of `schema.SPAN_COLUMNS` and hold only what applies.
"""


def rank_file_path(folder: Path, header: RankHeader) -> Path:
    """Where a rank's file lies in a trace folder; `.json.gz` when it is compressed."""
    name = rank_file_name(header.layout, header.coordinates)
    return folder / (f"{name}.gz" if header.trace.compress else name)


def _metadata(name: str, pid: int, arguments: Mapping[str, Json], tid: int = 0) -> bytes:
    return orjson.dumps({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments})


def encode_header(header: RankHeader) -> list[bytes]:
    """Lines that open a run.

    The header and the names Perfetto shows when the file is opened by itself.
    """
    rank = header.rank
    label = f"rank {rank} {header.layout.label(rank)} {header.host}"
    lines = [
        _metadata(HEADER_EVENT, rank, header.to_json()),
        _metadata("process_name", rank, {"name": label}),
    ]
    lines += [
        _metadata("thread_name", rank, {"name": track.name.lower()}, tid=track) for track in Track
    ]
    return lines


def encode_spans(rank: int, spans: Iterable[SpanRecord]) -> Iterator[bytes]:
    """One Chrome `X` event a span.

    Μs with three decimals, so that a double keeps the nanosecond.
    """
    for kind, name, track, start_ns, duration_ns, arguments in spans:
        yield orjson.dumps(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": start_ns / 1000,
                "dur": duration_ns / 1000,
                "pid": rank,
                "tid": int(track),
                "args": arguments,
            }
        )


def encode_window(rank: int, record: WindowRecord) -> bytes:
    """The line that makes a window count."""
    return _metadata(WINDOW_EVENT, rank, record.to_json())
