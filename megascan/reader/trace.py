"""Reading a trace: the one entry that finds the format, reads all files and builds the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from megascan.errors import InputError
from megascan.pipeline import Spread, across_threads
from megascan.reader.formats import MERGED_FORMATS, Format, sniff, sniff_folder
from megascan.reader.kineto import read_kineto
from megascan.reader.original import read_original
from megascan.reader.rank_file import read_rank_files
from megascan.reader.runs import build_trace
from megascan.reader.segments import Importer, Segment
from megascan.timeline import Trace

Loader: TypeAlias = Callable[[Format, Sequence[Path]], list[Segment]]
"""Reads the files of a format, as `load_segments` does."""


def load_segments(
    found: Format, files: Sequence[Path], spread: Spread = across_threads
) -> list[Segment]:
    """What all files of one format hold, read on this machine."""
    return _IMPORTERS[found](files, spread)


def read_trace(
    path: Path,
    *,
    run: str | None = None,
    allow_missing_ranks: bool = False,
    load: Loader = load_segments,
) -> Trace:
    """Read a folder of rank files, or one rank's file, as its ranks recorded it.

    The format is found by looking at the content. Of several runs the newest (by clock origin) is
    taken unless `run` names one; a run that was set aside into a subfolder is found by its id. A
    single file may stand for its rank alone. What was left out stands in `completeness`. `load` may
    read the files elsewhere (`aggregate.cluster`).

    Raises InputError, in one sentence that says what to do, for paths that hold no trace, damage
    inside finished windows, runs without a finished window, contradicting headers, and missing
    ranks unless `allow_missing_ranks`.
    """
    if run is not None and any((path / run).glob("benchmark-data-*.json*")):
        return read_trace(path / run, run=run, allow_missing_ranks=allow_missing_ranks, load=load)
    found, files = sniff_folder(path) if path.is_dir() else (sniff(path), [path])
    _check_format(found, path)
    segments = load(found, files)
    if not segments:
        raise InputError(
            f"{path}: none of {len(files)} rank files has a complete header (training was killed "
            "before its first traced window ended); trace again"
        )
    return build_trace(
        path, segments, run, allow_missing_ranks=allow_missing_ranks or not path.is_dir()
    )


_IMPORTERS: dict[Format, Importer] = {
    Format.RANK_FILES: read_rank_files,
    Format.ORIGINAL: read_original,
    Format.KINETO: read_kineto,
}


def _check_format(found: Format, path: Path) -> None:
    if found not in _IMPORTERS:
        hint = (
            "; it is merged already: look at it with megascan view, or name the slow rank with "
            "megascan detect"
            if found in MERGED_FORMATS
            else ""
        )
        raise InputError(
            f"{path} holds {found.value.replace('_', ' ')}, expected the rank files of a run{hint}"
        )
