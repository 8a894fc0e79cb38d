"""`--ranks`, `--iterations`, `--kinds`: what part of a timeline is written."""

from __future__ import annotations

import argparse

from megascan.errors import UsageError
from megascan.export import Selection
from megascan.schema import Kind
from megascan.timeline import Timeline

_LONGEST_RANGE = 1_000_000
"""Numbers of a range are held one by one."""


def add_selection_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the selection flags."""
    parser.add_argument("--ranks", metavar="LIST", help="write these ranks only: 0,3,8-15")
    parser.add_argument("--iterations", metavar="LIST", help="write these iterations only: 5-6,45")
    parser.add_argument(
        "--kinds", metavar="LIST", help=f"write these kinds only, of {', '.join(Kind)}"
    )


def selection_from(arguments: argparse.Namespace) -> Selection:
    """The selection asked for; UsageError for what cannot be understood."""
    return Selection(
        ranks=_numbers(arguments.ranks, "--ranks"),
        iterations=_numbers(arguments.iterations, "--iterations"),
        kinds=_kinds(arguments.kinds),
    )


def check_ranks(selection: Selection, timeline: Timeline) -> None:
    """Raise UsageError when ranks are selected that the job does not have."""
    world_size = timeline.completeness.world_size
    unknown = sorted(rank for rank in selection.ranks or () if rank >= world_size)
    if unknown:
        raise UsageError(
            f"--ranks names rank {unknown[0]}, but the job has {world_size} ranks, "
            f"0 to {world_size - 1}"
        )


def _numbers(text: str | None, flag: str) -> frozenset[int] | None:
    """ "0,3,8-11" → {0, 3, 8, 9, 10, 11}."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        try:
            first, last = int(low), int(high or low)
        except ValueError as error:
            raise UsageError(
                f"{flag} is {text!r}, expected numbers and ranges like 0,3,8-15"
            ) from error
        if not first <= last < first + _LONGEST_RANGE:
            raise UsageError(
                f"{flag} has the range {part}, expected one that goes upwards, over at most "
                f"{_LONGEST_RANGE:,} numbers"
            )
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def _kinds(text: str | None) -> frozenset[Kind] | None:
    if text is None:
        return None
    try:
        return frozenset(Kind(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--kinds is {text!r}, expected some of {', '.join(Kind)}") from error
