"""Keep the findings of many jobs by host and device: "this GPU was named in 3 of 5 jobs".

The verdict quotes it as evidence (`--history FILE` of megascan watch and megascan detect); it never
accuses by itself.

examples:
  megascan history add findings.db trace_output
  megascan history show findings.db --host n07
  megascan history merge findings.db other-cluster.db
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megascan.cli.options import add_detector_arguments, add_run_arguments, settings_from
from megascan.cli.output import say
from megascan.errors import OutputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sub-commands and their flags."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="add|show|merge")
    add = commands.add_parser("add", help="judge a job and book what was found, or nothing")
    add.add_argument("file", type=Path, metavar="FILE", help="the history; made when not there")
    add.add_argument("path", type=Path, metavar="PATH", help="trace folder or timeline")
    add_run_arguments(add)
    add_detector_arguments(add)
    show = commands.add_parser("show", help="print what is known of devices, worst first")
    show.add_argument("file", type=Path, metavar="FILE", help="the history")
    show.add_argument("--host", metavar="NAME", help="devices that were last on this host")
    show.add_argument("--device", metavar="UUID", help="this device")
    show.add_argument("--all", action="store_true", help="devices that were never named, too")
    show.add_argument("--json", action="store_true", help="print JSON")
    merge = commands.add_parser("merge", help="take other histories' jobs into FILE")
    merge.add_argument("file", type=Path, metavar="FILE", help="the history; made when not there")
    merge.add_argument("others", type=Path, nargs="+", metavar="OTHER", help="read, not changed")


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command."""
    return {"add": _add, "show": _show, "merge": _merge}[arguments.action](arguments)


def _add(arguments: argparse.Namespace) -> int:
    from megascan.cli.options import detect_in, load_timeline
    from megascan.watch.history import History, named_in

    settings = settings_from(arguments)
    _check_place(arguments.file)
    timeline = load_timeline(arguments.path, arguments)
    report = detect_in(timeline, settings, arguments.path)
    is_new = not arguments.file.exists()
    try:
        history = History(arguments.file)
        history.add(timeline.headers, named_in(report), timeline.origin_ns / 1e9)
    except OutputError:
        if is_new:
            arguments.file.unlink(missing_ok=True)
        raise
    say(
        f"booked run {timeline.run_id} ({report.verdict}, {len(report.findings)} findings) as one "
        f"of {history.num_jobs} jobs in {arguments.file}; "
        f"next: megascan history show {arguments.file}"
    )
    return 0


def _check_place(file: Path) -> None:
    """Raise, before any work is done, if a file is no history and cannot become one.

    A new history is made when jobs are booked, so an input that is refused leaves no empty history.
    """
    from megascan.overwriting import check_free
    from megascan.watch.history import History

    check_free(file, force=True)
    if file.exists():
        History(file)


def _show(arguments: argparse.Namespace) -> int:
    from megascan.watch.history import History

    history = History(arguments.file, must_exist=True)
    found = [
        past
        for past in history.past([arguments.device] if arguments.device else ())
        if (past.num_named or arguments.all or arguments.device)
        and arguments.host in (None, past.host)
    ]
    if arguments.json:
        say(json.dumps([past.to_json() for past in found], indent=1))
        return 0
    for past in found:
        say(
            f"{past.device}  host {past.host}  named in {past.num_named} of {past.num_jobs} jobs"
            + (
                f"  {', '.join(past.causes)} up to {past.worst_slowdown:.2f}x, "
                f"{past.gpu_hours:.3g} GPU-hours"
                if past.num_named
                else ""
            )
        )
    say(f"{len(found)} devices of {history.num_jobs} jobs")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from megascan.watch.history import History

    for other in arguments.others:
        History(other, must_exist=True)
    history = History(arguments.file)
    for other in arguments.others:
        say(f"took {history.merge(other)} jobs from {other}")
    say(f"{arguments.file} holds {history.num_jobs} jobs")
    return 0
