"""Guards against namesakes and needless imports.

`training`, `aggregate` and `detect` are also other people's package names.
"""

from __future__ import annotations

import importlib
import sys

from megascan.errors import MissingError


def require(name: str) -> None:
    """Make sure that `import name` finds MegaScan's package.

    MissingError says which other one it found.
    """
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise MissingError(
                f"MegaScan's package {name!r} needs {error.name!r}, which is not installed; "
                "install MegaScan again with pip"
            ) from error
        raise MissingError(
            f"MegaScan's package {name!r} is not installed; install MegaScan with pip, "
            "or run from its checkout"
        ) from error
    if not getattr(package, "__megascan__", False):
        place = getattr(package, "__file__", None) or "an unknown place"
        raise MissingError(
            f"`import {name}` finds another package at {place}, not MegaScan's; "
            "uninstall that one or put MegaScan's checkout first on PYTHONPATH"
        )


def leave_out_pandas() -> None:
    """Keep Arrow from importing pandas with the first array it makes, which takes 0.25 s.

    It would recognise pandas' types, of which no command makes use. Arrow's own conversions to
    pandas are gone for the rest of the process, so this is for one that is a command and no more.
    """
    import pyarrow as pa

    absent = _Absent()
    sys.meta_path.insert(0, absent)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(absent)


class _Absent:
    """Says that pandas is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        """Part of the import system's protocol."""
        if name == "pandas":
            raise ModuleNotFoundError(name=name)
