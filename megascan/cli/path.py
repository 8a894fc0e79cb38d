"""What an iteration is made of: the chain of operations that determines when it ends.

PATH is a folder of rank files, a merged timeline, or an op table in Parquet. Walked back from the
end of each iteration, the chain passes from rank to rank where one waited for another. Its time is
compute (by rank), transfer (by link), host or idle; shortening anything else makes no iteration
shorter. `megascan aggregate --path` draws the chain in the timeline.

examples:
  megascan path trace_output
  megascan path timeline.json.gz --json path.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.options import add_run_arguments, is_op_table, load_timeline
from megascan.cli.output import check_outputs, require, say, stage, write_json

if TYPE_CHECKING:
    from detect.whatif import Replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("path", type=Path, metavar="PATH", help="trace folder, timeline, op table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write shares and chains as JSON")
    parser.add_argument("--force", action="store_true", help="replace an existing output file")
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, walk back, print, and write the files that flags name."""
    require("detect")
    from detect.whatif.path import critical_path
    from detect.whatif.render import path_to_json, render_path

    check_outputs([arguments.json], read=[arguments.path], force=arguments.force)
    replay = _replay(arguments)
    with stage("walking back from the ends of iterations"):
        path = critical_path(replay)
    say(render_path(path))
    if arguments.json:
        write_json(arguments.json, path_to_json(path), force=arguments.force)
        say(f"wrote {arguments.json}")
    return 0


def _replay(arguments: argparse.Namespace) -> Replay:
    from detect.whatif import replay_of_timeline

    if is_op_table(arguments.path):
        from detect.optable import read_op_table, replay_of_op_table

        return replay_of_op_table(read_op_table(arguments.path))
    timeline = load_timeline(arguments.path, arguments)
    with stage("replaying the step"):
        return replay_of_timeline(timeline)
