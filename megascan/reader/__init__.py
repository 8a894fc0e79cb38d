"""Read rank files of every known format, and merged timelines, as columns.

Owns everything between bytes on a disk and an Arrow table of spans (`megascan.timeline`). Fed by
the tracer's files, the original MegaScan's, the PyTorch profiler's, and `megascan.export`'s.

    trace.py            read_trace: find the format, read all files, make one run; start here
                        read_ends: read a large trace, whose spans stay in shards
    rank_files.py       our own rank files: short files together, long files alone; as shards, a
                        large file in stretches of windows
    growing.py          one of our rank files while its job runs: windows as they are finished
    flight_recorder.py  PyTorch's flight-recorder dumps: where each rank stood
    original.py         the original MegaScan's begin and end records; original_timeline.py its
                        merged timelines
    kineto/             the PyTorch profiler's traces
    timeline_files.py   merged timelines, Chrome JSON and Perfetto
    segments.py         what each of the above hands over: a rank's spans of a run, as a table
    lines.py            files as blocks of lines, lines as columns; templates.py: fast columns;
                        lines.c: both in compiled code, where an install could compile it
"""

from typing import TYPE_CHECKING

from megascan.reader.trace import MERGED_FORMATS, Format, holds_ranks, read_ends, read_trace, sniff

if TYPE_CHECKING:
    from megascan.reader.timeline_files import read_timeline

__all__ = [
    "MERGED_FORMATS",
    "Format",
    "holds_ranks",
    "read_ends",
    "read_timeline",
    "read_trace",
    "sniff",
]


def __getattr__(name: str) -> object:
    if name != "read_timeline":  # loaded late: folders of rank files do not need it
        raise AttributeError(f"module 'megascan.reader' has no attribute {name!r}")
    from megascan.reader.timeline_files import read_timeline

    return read_timeline
