"""Earlier runs' files: moved into a subfolder, never overwritten."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import orjson

RANK_FILE_PATTERNS = ("benchmark-data-*.json", "benchmark-data-*.json.gz")


def set_earlier_run_aside(path: Path) -> None:
    """Move an existing rank file into a subfolder named by its run id; nothing is overwritten."""
    if not path.exists():
        return
    folder = path.parent / _run_id_of(path)
    folder.mkdir(exist_ok=True)
    name, dot, suffixes = path.name.partition(".")
    target = folder / path.name
    number = 1
    while target.exists():
        number += 1
        target = folder / f"{name}.{number}{dot}{suffixes}"
    path.rename(target)


def _run_id_of(path: Path) -> str:
    """Run id of a file's first header, or "unknown-run" for a file that is not ours."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in (file.readline(), file.readline()):
                try:
                    record = orjson.loads(line.strip().rstrip(b","))
                    return str(record["args"]["run_id"])
                except (orjson.JSONDecodeError, KeyError, TypeError):
                    continue
    except (EOFError, gzip.BadGzipFile, zlib.error):  # cut off before its header was whole
        pass
    return "unknown-run"
