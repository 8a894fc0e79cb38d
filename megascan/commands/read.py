"""`megascan.read`: what the commands know, as tables for Python."""

from __future__ import annotations

from pathlib import Path

from megascan.commands.packages import require
from megascan.reader import MERGED_FORMATS, RunTables, read_timeline, read_trace, run_tables, sniff


def read(
    path: Path | str, *, run: str | None = None, allow_missing_ranks: bool = False
) -> RunTables:
    """Tables of a traced run: spans, collectives, messages, clocks.

    `path` is a folder of rank files (ours, the original MegaScan's, PyTorch profiler traces), which
    is aligned on the way, or a timeline that `megascan aggregate` wrote. Raises InputError for
    anything that cannot be used; see `megascan.reader.read_trace` for `run` and
    `allow_missing_ranks`.
    """
    path = Path(path)
    if path.is_file() and sniff(path) in MERGED_FORMATS:
        return run_tables(read_timeline(path))
    require("aggregate")
    from aggregate import build_timeline

    return run_tables(
        build_timeline(read_trace(path, run=run, allow_missing_ranks=allow_missing_ranks))
    )
