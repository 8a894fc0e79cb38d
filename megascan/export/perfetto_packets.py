"""Packets of track events in bulk, on top of the wire format.

Field numbers: perfetto's trace_packet.proto, track_event.proto and debug_annotation.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from megascan.export.wire import (
    FIXED64,
    VARINT,
    Bytes,
    Part,
    fixed64,
    matrix,
    nested,
    tag,
    varint,
    varints,
)

Integers = npt.NDArray[np.int64]

SEQUENCE = 1
"""All packets are of one sequence: its first packet holds every text that the others refer to."""
STARTS_STATE, NEEDS_STATE = 3, 2


class EventType(IntEnum):
    """TrackEvent.Type."""

    BEGIN = 1
    END = 2
    COUNTER = 4


_PACKET, _TIMESTAMP, _SEQUENCE_ID, _TRACK_EVENT, _SEQUENCE_FLAGS = 1, 8, 10, 11, 13
_CATEGORY, _ANNOTATION, _TYPE, _NAME, _TRACK = 3, 4, 9, 10, 11
_COUNTER_VALUE, _FLOW, _TERMINATING_FLOW = 44, 47, 48
_ANNOTATION_NAME, _INT, _DOUBLE, _TEXT = 1, 4, 5, 17

_IN_SEQUENCE = (
    tag(_SEQUENCE_ID, VARINT)
    + varint(SEQUENCE)
    + tag(_SEQUENCE_FLAGS, VARINT)
    + varint(NEEDS_STATE)
)


def packets(time_ns: Integers, event: Sequence[Part]) -> Bytes:
    """Packets of one track event each, shape (packet, byte)."""
    body: list[Part] = [tag(_TIMESTAMP, VARINT), varints(time_ns), _IN_SEQUENCE]
    body += nested(_TRACK_EVENT, event)
    return matrix(len(time_ns), nested(_PACKET, body))


def begin(track: Integers, name: Integers, category: Integers) -> list[Part]:
    """A slice's begin on a track, by the numbers of its interned name and category."""
    parts = _event(EventType.BEGIN, track)
    parts += [tag(_NAME, VARINT), varints(name), tag(_CATEGORY, VARINT), varints(category)]
    return parts


def end(track: Integers) -> list[Part]:
    """The end of the innermost open slice of a track."""
    return _event(EventType.END, track)


def counter(track: Integers, value: npt.NDArray[np.float64]) -> list[Part]:
    """A curve's value."""
    return [*_event(EventType.COUNTER, track), tag(_COUNTER_VALUE, FIXED64), fixed64(value)]


def _event(kind: EventType, track: Integers) -> list[Part]:
    return [tag(_TYPE, VARINT) + varint(kind) + tag(_TRACK, VARINT), varints(track)]


def int_argument(name: int, value: Integers) -> list[Part]:
    """An argument with whole numbers; `name` is that of its interned name."""
    return _argument(name, tag(_INT, VARINT), varints(value))


def real_argument(name: int, value: npt.NDArray[np.float64]) -> list[Part]:
    """An argument with finite floats."""
    return _argument(name, tag(_DOUBLE, FIXED64), fixed64(value))


def text_argument(name: int, value: Integers) -> list[Part]:
    """An argument with texts, by their interned numbers."""
    return _argument(name, tag(_TEXT, VARINT), varints(value))


def _argument(name: int, wire_tag: bytes, value: Bytes) -> list[Part]:
    label = tag(_ANNOTATION_NAME, VARINT) + varint(name) + wire_tag
    return nested(_ANNOTATION, [label, value])


def leaving_flow(ids: Integers) -> list[Part]:
    """An arrow that leaves the event's slice."""
    return [tag(_FLOW, FIXED64), fixed64(ids)]


def arriving_flow(ids: Integers) -> list[Part]:
    """An arrow that ends in the event's slice."""
    return [tag(_TERMINATING_FLOW, FIXED64), fixed64(ids)]
