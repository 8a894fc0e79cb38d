"""Run the `megascan` command: find the sub-command, parse its arguments, print its errors.

Each command is one module of `megascan.cli` with `add_arguments(parser)` and `run(arguments)
-> exit code`; only the module of the given command is imported, so that `megascan --help` answers
at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from megascan.errors import report_errors

COMMANDS = {
    "aggregate": "merge a trace folder into one aligned timeline, and with -d name the slow rank",
    "detect": "name the slow rank, its cause and its owner",
    "diff": "compare two traces: which role, rank or link got slower",
    "history": "findings of many jobs by host and device: add, show, merge",
    "path": "what an iteration is made of: the chain of spans that determines its end",
    "plan": "say what would make a traced pipeline's step faster, and write the plan for it",
    "probe": "say which rank or device computes wrongly: whose bits are not its peers'",
    "query": "ask a timeline in PerfettoSQL",
    "report": "write one self-contained page about a trace",
    "scope": "look into a model while it trains, or replay what was seen",
    "simulate": "write the rank files of a simulated job, with planted faults",
    "view": "open a timeline in Perfetto",
    "watch": "name the slow rank while the job runs",
    "whatif": "what a step would cost without each slowness",
}


class _Command(Protocol):
    __doc__: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code, 1 after an error in one line, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        atexit.register(gc.freeze)  # else the interpreter collects garbage at its exit
        return report_errors(lambda: _run(words[0], words[1:]))
    _top_level_parser().parse_args(words or ["--help"])
    return 2


def _run(name: str, words: list[str]) -> int:
    command = cast(_Command, importlib.import_module(f"megascan.cli.{name}"))
    parser = argparse.ArgumentParser(
        prog=f"megascan {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


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
