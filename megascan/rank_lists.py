"""Ordered ranks as they stand in JSON: few as a list, many as the text of their progressions.

    [0, 1, 2, 3]          →  [0, 1, 2, 3]
    0, 1, 2, … 16383      →  "0-16383"
    3, 11, 19, … 16379    →  "3-16379/8"
    0 … 31, 64 … 95       →  "0-31,64-95"

So the header of a rank among thousands stays as short as that of one among eight, although it
names the groups that hold them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from megascan.typed import shown

_LONGEST_LIST = 16
_MOST_RANKS = 1 << 24
_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")


def packed(ranks: Sequence[int]) -> list[int] | str:
    """Ranks in their order, for JSON."""
    if len(ranks) <= _LONGEST_LIST:
        return list(ranks)
    return _text(tuple(ranks))


@lru_cache(maxsize=4096)  # as below
def _text(ranks: tuple[int, ...]) -> str:
    return ",".join(_texts(ranks))


def _texts(ranks: Sequence[int]) -> Iterator[str]:
    place = 0
    while place < len(ranks):
        first, count = ranks[place], _progression(ranks, place)
        step = ranks[place + 1] - first if count > 1 else 1
        by = f"/{step}" if step > 1 else ""
        yield f"{first}-{ranks[place + count - 1]}{by}" if count > 1 else f"{first}"
        place += count


def _progression(ranks: Sequence[int], place: int) -> int:
    """How many ranks from `place` on rise by one step; 1 for fewer than three."""
    step = ranks[place + 1] - ranks[place] if place + 1 < len(ranks) else 0
    end = place + 1
    while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
        end += 1
    return end - place if end - place > 2 else 1


def unpacked(ranks: object) -> tuple[int, ...]:
    """Ranks from JSON, either way. Raises ValueError for anything else."""
    if isinstance(ranks, str):
        return _from_text(ranks)
    if (
        isinstance(ranks, list)
        and {type(rank) for rank in ranks} <= {int}
        and all(0 <= rank < _MOST_RANKS for rank in ranks)
    ):
        return tuple(ranks)
    raise ValueError(
        f"ranks of a group are {shown(ranks)}, expected a list or a text like 0-7,16-23"
    )


@lru_cache(maxsize=4096)  # the same groups stand in the headers of all their members
def _from_text(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"ranks of a group are {text!r}, expected a text like 0-7,16-23")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not step or not first <= last or (last - first) // step >= _MOST_RANKS - len(found):
            raise ValueError(f"ranks of a group are {text!r}, which is no rising progression")
        found += range(first, last + 1, step)
    return tuple(found)
