"""Whether the spans of a track lie in each other or beside each other."""

from __future__ import annotations

import numpy as np
import pandas as pd

from megascan.arrays import Integers
from megascan.schema import Track


def assert_nested(spans: pd.DataFrame) -> None:
    """Assert it of every track of every rank on which spans do not overlap by their nature."""
    for (_, track), own in spans.groupby(["rank", "track"]):
        if track != Track.OVERLAPPED:
            assert _nest(own["start_ns"].to_numpy(), own["duration_ns"].to_numpy())


def _nest(starts: Integers, durations: Integers) -> bool:
    open_ends: list[int] = []
    for place in np.lexsort((-durations, starts)):
        begin, end = starts[place], starts[place] + durations[place]
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + 1:
            return False
        open_ends.append(end)
    return True
