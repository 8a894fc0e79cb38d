"""Rank files as bytes: one line an event, appended a window at a time, valid after every append.

    [\\n header ,\\n names ,\\n spans … ,\\n window            ← after each append
    … \\n]\\n                                                 ← after a clean close

A separator stands before what it separates, so a process killed at any moment leaves at most one
incomplete line behind. Compressed, each append is one gzip member of the same text.
"""

from megascan.rankfile.aside import RANK_FILE_PATTERNS, set_earlier_run_aside
from megascan.rankfile.encoding import (
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.rankfile.file import RankFile
from megascan.rankfile.framing import DamagedError
from megascan.rankfile.limited import LimitedFile

__all__ = [
    "RANK_FILE_PATTERNS",
    "DamagedError",
    "LimitedFile",
    "RankFile",
    "SpanRecord",
    "encode_header",
    "encode_spans",
    "encode_window",
    "rank_file_path",
    "set_earlier_run_aside",
]
