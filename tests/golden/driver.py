"""The process of golden.py in which commands run: a line of its input is one, its answer the code.

What a command writes to the descriptors 1 and 2 goes to one file a stream, whoever writes it.

Six commands of a case judge the same trace, and half of what a verdict takes is the search for
its power. It runs once for all verdicts that are given the same: what does not come out of a
timeline as it came out of the rank files is searched anew, and is said.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from detect.causes import compute
from megascan.cli.main import main


def content_of(value: object) -> object:
    """Return a value as nested tuples to the bit, without what was derived from it; of what is no
    data (the replay that costs are computed with, and no power) its kind.
    """
    if is_dataclass(value):
        compared = [field.name for field in fields(value) if field.compare]
        return type(value), tuple(content_of(getattr(value, name)) for name in compared)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return tuple((key, content_of(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(content_of, value))
    return type(value) if type(value).__repr__ is object.__repr__ else repr(value)


def once(search: Callable[..., object]) -> Callable[..., object]:
    """Let a search run once for all that is equal."""
    found: dict[str, object] = {}

    def search_once(*given: object) -> object:
        key = hashlib.sha256(repr(content_of(given)).encode()).hexdigest()
        if key not in found:
            found[key] = search(*given)
        return found[key]

    return search_once


def run() -> None:
    """Run command after command until there is none."""
    compute.planted_power = once(compute.planted_power)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        folder, argv = json.loads(line)
        os.chdir(folder)
        for descriptor, name in ((1, "../stdout"), (2, "../stderr")):
            file = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(file, descriptor)
            os.close(file)
        try:
            code = main(argv)
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
        sys.stderr.flush()
        print(code, file=answers)


if __name__ == "__main__":
    run()
