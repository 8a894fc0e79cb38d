"""The process of golden.py in which commands run: a line of its input is one, its answer the code.

What a command writes to the descriptors 1 and 2 goes to one file a stream, whoever writes it.

Six commands of a case judge the same trace. It is judged once for all that observe the same and
replay the same: what does not come out of a timeline as it came out of the rank files is judged
anew, and is said. The search for a verdict's power, half of what that takes, asks no replay.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

import numpy as np

from detect import detector
from detect.causes import compute
from detect.observe.observations import Observations
from detect.whatif.graph import Replay
from detect.whatif.savings import ReplayedCosts
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


def replay_behind(observations: Observations, *_: object) -> bytes:
    """Return what findings' costs are computed with, to the bit; when its operations took place is
    read from the trace, and no cost depends on it.
    """
    assert isinstance(observations.costs, ReplayedCosts)
    replay = observations.costs._replay  # None where none can be built
    names = [field.name for field in fields(Replay) if field.name != "instants"]
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.fast = True  # equal objects are written alike, whether they are one or several
    pickler.dump([getattr(replay, name, None) for name in names])
    return written.getvalue()


def once(
    search: Callable[..., object], beside: Callable[..., bytes] = lambda *_: b""
) -> Callable[..., object]:
    """Let a search run once for all that is equal: what is given, and what lies `beside` it."""
    found: dict[str, object] = {}

    def search_once(*given: object) -> object:
        content = repr((content_of(given), beside(*given)))
        key = hashlib.sha256(content.encode()).hexdigest()
        if key not in found:
            found[key] = search(*given)
        return found[key]

    return search_once


def run() -> None:
    """Run command after command until there is none."""
    compute.planted_power = once(compute.planted_power)
    detector.judge = once(detector.judge, replay_behind)
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
