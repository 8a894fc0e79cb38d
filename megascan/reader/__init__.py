"""Readers: rank files of every known format, and merged timelines, as columns."""

from megascan.reader.formats import MERGED_FORMATS, Format, sniff
from megascan.reader.merged import read_timeline
from megascan.reader.segments import Packed, Segment
from megascan.reader.short_files import file_batches
from megascan.reader.tables import RunTables, run_tables
from megascan.reader.trace import Loader, load_segments, read_trace

__all__ = [
    "MERGED_FORMATS",
    "Format",
    "Loader",
    "Packed",
    "RunTables",
    "Segment",
    "file_batches",
    "load_segments",
    "read_timeline",
    "read_trace",
    "run_tables",
    "sniff",
]
