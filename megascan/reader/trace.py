"""Reading a trace: the one entry that finds the format, reads all files and builds the run."""

from __future__ import annotations

from pathlib import Path

from megascan.errors import InputError
from megascan.reader.formats import Format, sniff, sniff_folder
from megascan.reader.kineto import read_kineto
from megascan.reader.original import read_original
from megascan.reader.rank_file import read_rank_files
from megascan.reader.runs import build_trace
from megascan.reader.segments import Importer
from megascan.timeline import Trace


def read_trace(path: Path, *, run: str | None = None, allow_missing_ranks: bool = False) -> Trace:
    """Read a folder of rank files, or one rank's file, as its ranks recorded it.

    The format is found by looking at the content. Of several runs the newest (by clock origin) is
    taken unless `run` names one; a run that was set aside into a subfolder is found by its id. A
    single file may stand for its rank alone. What was left out stands in `completeness`.

    Raises InputError, in one sentence that says what to do, for paths that hold no trace, damage
    inside finished windows, runs without a finished window, contradicting headers, and missing
    ranks unless `allow_missing_ranks`.
    """
    if run is not None and path.is_dir() and (path / run).is_dir():
        return read_trace(path / run, run=run, allow_missing_ranks=allow_missing_ranks)
    found, files = sniff_folder(path) if path.is_dir() else (sniff(path), [path])
    segments = _importer(found, path)(files)
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


def _importer(found: Format, path: Path) -> Importer:
    if found not in _IMPORTERS:
        hint = (
            "; it is merged already: look at it with megascan view, or name the slow rank with "
            "megascan detect"
            if found is Format.TIMELINE
            else ""
        )
        raise InputError(
            f"{path} holds {found.value.replace('_', ' ')}, expected the rank files of a run{hint}"
        )
    return _IMPORTERS[found]
