"""Guards against namesakes.

`training`, `aggregate` and `detect` are also other people's package names.
"""

from __future__ import annotations

import importlib

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
