"""The `megascan` command: finds the sub-command, parses its arguments, prints its errors.

Each command is one module of `megascan.commands` with `add_arguments(parser)` and `run(arguments)
-> exit code`; it is imported only when asked for, so that `megascan --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from megascan.errors import InputError, MissingError, report_errors

COMMANDS = {
    "aggregate": "merge a trace folder into one aligned timeline, and with -d name the slow rank",
    "detect": "name the slow rank, its cause and its owner",
    "diff": "compare two traces: which role, rank or link got slower",
    "query": "ask a timeline in PerfettoSQL",
    "report": "write one self-contained page about a trace",
    "simulate": "write the rank files of a simulated job, with planted faults",
    "view": "open a timeline in Perfetto",
    "whatif": "what a step would cost without each slowness",
}

_USING_ARROW = {"aggregate", "detect", "diff", "report", "simulate", "whatif"}


class _Command(Protocol):
    __doc__: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None, *, own_process: bool = False) -> int:
    """Entry point; returns the exit code (0 fine, 1 an error said in one line, 2 wrong usage).

    `own_process` says that this process is the command and no more, as without `argv`.
    """
    own_process = own_process or argv is None
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return report_errors(lambda: _run(words[0], words[1:], own_process=own_process))
    _top_level_parser().parse_args(words or ["--help"])
    return 2


def _run(name: str, words: list[str], *, own_process: bool) -> int:
    command = cast(_Command, importlib.import_module(f"megascan.commands.{name}"))
    if own_process and name in _USING_ARROW:
        from megascan.commands.packages import leave_out_pandas

        leave_out_pandas()
    parser = argparse.ArgumentParser(
        prog=f"megascan {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return _guarded(command, parser.parse_args(words))


def _guarded(command: _Command, arguments: argparse.Namespace) -> int:
    """What the operating system refuses in an unforeseen place is still said in one line."""
    try:
        return command.run(arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(
            f"{where}{error.strerror or error}; check the current folder, the disk and permissions"
        ) from error
    except MemoryError as error:
        raise MissingError(
            "not enough memory; run on a larger machine or on fewer ranks of the trace"
        ) from error


def _top_level_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="megascan",
        description="MegaScan finds the slow GPU in a Megatron-Core training job.",
        epilog=f"commands:\n{listing}\n\n`megascan COMMAND --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=sorted(COMMANDS), metavar="COMMAND", help="see below")
    return parser
