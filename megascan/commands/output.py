"""Results: text on stdout, and small files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megascan.errors import OutputError
from megascan.header import Json


def say(text: object) -> None:
    """Print a result at once; a reader that has gone (`| head`) does not stop the command.

    What the command still has to write is written. Raises OutputError when stdout is refused for
    another reason, such as a full disk.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        raise OutputError(
            f"standard output cannot be written ({error.strerror or error}); "
            "free some space or send it elsewhere"
        ) from error


def _silence_stdout() -> None:
    """Let what is printed from now on, and at the interpreter's exit, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_bytes(path: Path, content: bytes, *, force: bool) -> None:
    """Write a file whole or not at all; OutputError as `megascan.export.check_free`."""
    from megascan.export.destination import replacing  # heavy; most commands write nothing

    with replacing(path, force=force) as file:
        file.write(content)


def write_json(path: Path, record: Mapping[str, Json], *, force: bool) -> None:
    """Write a JSON document; errors as `write_bytes`."""
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    write_bytes(path, f"{text}\n".encode(), force=force)
