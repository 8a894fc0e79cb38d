"""A span while it is in memory, and on which track each kind belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from megascan.schema import Kind, Track

Arguments: TypeAlias = dict[str, int | str]
"""Arguments of a span by the names of `schema.SPAN_COLUMNS`; only those that apply."""

Mark: TypeAlias = object
"""A moment as its timer knows it; opaque to everybody else."""

_TRACKS = dict.fromkeys(Kind, Track.COMPUTE) | {
    Kind.COLLECTIVE: Track.COMMUNICATION,
    Kind.P2P: Track.COMMUNICATION,
    Kind.DATA: Track.HOST,
    Kind.HOST: Track.HOST,
    Kind.GC: Track.HOST,
    Kind.CHECKPOINT: Track.HOST,
}


def track_of(kind: Kind) -> Track:
    """Track of a synchronous span."""
    return _TRACKS[kind]


@dataclass(slots=True, eq=False)
class Span:
    """One recorded span; `end` is None while asynchronous communication is under way.

    `lane` names what executes asynchronous spans one after the other (a process group): on a
    device, the next one of a lane starts no earlier than the last one ended.
    """

    kind: Kind
    name: str
    track: Track
    begin: Mark
    end: Mark | None
    arguments: Arguments
    lane: str = ""
