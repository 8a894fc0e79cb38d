"""Track events of a Perfetto trace as columns, as `megascan.export` writes them.

A packet is a time and an event; an event has a type, a track and, where it begins a slice, a name,
a category and arguments, all by the numbers of interned texts. All packets are read side by side,
one field after the other. What is not written like that (descriptors, texts, marks) is given back
as it is, for Perfetto's own classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascan.reader.protobuf import FIXED64, LENGTH, VARINT, Packets, Wire

Integers = npt.NDArray[np.int64]

BEGIN, END = 1, 2

_MOST_FIELDS = 4096


def _tag(field: int, wire_type: int) -> int:
    return field << 3 | wire_type


_TIMESTAMP, _SEQUENCE_ID, _FLAGS = _tag(8, VARINT), _tag(10, VARINT), _tag(13, VARINT)
_TRACK_EVENT = _tag(11, LENGTH)
_TYPE, _NAME, _TRACK, _CATEGORY = (
    _tag(9, VARINT), _tag(10, VARINT), _tag(11, VARINT), _tag(3, VARINT),
)  # fmt: skip
_ANNOTATION = _tag(4, LENGTH)
_EIGHT_BYTES = (_tag(44, FIXED64), _tag(47, FIXED64), _tag(48, FIXED64))
"""A curve's value and the ends of arrows: nothing that a timeline is made of."""
_ARGUMENT_NAME, _INTEGER, _REAL, _TEXT = (
    _tag(1, VARINT), _tag(4, VARINT), _tag(5, FIXED64), _tag(17, VARINT),
)  # fmt: skip


@dataclass(frozen=True)
class Events:
    """Events of a piece of a file, in its order.

    time_ns, type, track, name, category  (event,) numbers, -1 where there is none
    integers, texts  by argument's number: (rows of events, values or numbers of texts)
    others           packets of another kind
    """

    time_ns: Integers
    type: Integers
    track: Integers
    name: Integers
    category: Integers
    integers: dict[int, tuple[Integers, Integers]]
    texts: dict[int, tuple[Integers, Integers]]
    others: list[bytes]


def read_events(wire: Wire, packets: Packets) -> Events:
    """Every packet either as an event or as it is."""
    reading = _Reading(wire, packets)
    for _ in range(_MOST_FIELDS):
        if not reading.step():
            break
    return reading.events()


class _Reading:
    """All packets of a piece, each read up to a place of its own."""

    def __init__(self, wire: Wire, packets: Packets) -> None:
        self._wire = wire
        self._packets = packets
        count = len(packets.start)
        self._at = packets.start.copy()
        self._event_end = np.full(count, -1, dtype=np.int64)
        self._plain = np.ones(count, dtype=np.bool_)
        self._fields = {
            tag: np.full(count, -1, dtype=np.int64)
            for tag in (_TIMESTAMP, _TYPE, _NAME, _TRACK, _CATEGORY)
        }
        self._integers: dict[int, list[tuple[Integers, Integers]]] = {}
        self._texts: dict[int, list[tuple[Integers, Integers]]] = {}

    def step(self) -> bool:
        """Read the next field of every packet that has one; whether there was any."""
        rows = np.flatnonzero(self._plain & (self._at < self._packets.end))
        if not len(rows):
            return False
        tag, at = self._wire.varints(self._at[rows])
        inside = self._at[rows] < self._event_end[rows]
        known = np.zeros(len(rows), dtype=np.bool_)
        for wanted, where, read in (
            ((_TIMESTAMP,), ~inside, self._number),
            ((_SEQUENCE_ID, _FLAGS), ~inside, self._skip),
            ((_TRACK_EVENT,), ~inside, self._enter),
            ((_TYPE, _NAME, _TRACK, _CATEGORY), inside, self._number),
            ((_ANNOTATION,), inside, self._argument),
            (_EIGHT_BYTES, inside, self._skip_eight),
        ):
            for each in wanted:
                chosen = (tag == each) & where & (at > 0)
                if chosen.any():
                    known |= chosen
                    read(rows[chosen], at[chosen], each)
        self._refuse(rows[~known])
        return True

    def _refuse(self, rows: Integers) -> None:
        self._plain[rows] = False

    def _advance(self, rows: Integers, at: Integers) -> None:
        before, event_end = self._at[rows], self._event_end[rows]
        limit = np.where(before < event_end, event_end, self._packets.end[rows])
        self._at[rows] = at
        self._refuse(rows[(at <= before) | (at > limit)])

    def _number(self, rows: Integers, at: Integers, tag: int) -> None:
        value, following = self._wire.varints(at)
        self._refuse(rows[self._fields[tag][rows] != -1])
        self._fields[tag][rows] = value
        self._advance(rows, following)

    def _skip(self, rows: Integers, at: Integers, tag: int) -> None:
        self._advance(rows, self._wire.varints(at)[1])

    def _skip_eight(self, rows: Integers, at: Integers, tag: int) -> None:
        self._advance(rows, at + 8)

    def _enter(self, rows: Integers, at: Integers, tag: int) -> None:
        length, following = self._wire.varints(at)
        end = following + length
        good = (following > 0) & (end >= following) & (end <= self._packets.end[rows])
        self._refuse(rows[~good | (self._event_end[rows] >= 0)])
        self._advance(rows, following)
        self._event_end[rows] = end

    def _argument(self, rows: Integers, at: Integers, tag: int) -> None:
        """Name and value of an argument, which fill it to its end."""
        length, at = self._wire.varints(at)
        end = at + length
        inside = (at > 0) & (end > at) & (end <= self._packets.end[rows])
        self._refuse(rows[~inside])
        rows, at, end = rows[inside], at[inside], end[inside]
        name_tag, at = self._wire.varints(at)
        name, at = self._wire.varints(np.maximum(at, 0))
        value_tag, at = self._wire.varints(np.clip(at, 0, self._wire.size))
        at = np.clip(at, 0, self._wire.size)
        value, following = self._wire.varints(at)
        following = np.where(value_tag == _REAL, at + 8, following)
        good = (name_tag == _ARGUMENT_NAME) & (name > 0) & (following == end)
        good &= np.isin(value_tag, (_INTEGER, _REAL, _TEXT))
        self._refuse(rows[~good])
        self._advance(rows[good], following[good])
        for values, wanted in ((self._integers, _INTEGER), (self._texts, _TEXT)):
            chosen = good & (value_tag == wanted)
            _gather(values, rows[chosen], name[chosen], value[chosen])

    def events(self) -> Events:
        """What was read; packets without a time, type or track are of another kind."""
        for tag in (_TIMESTAMP, _TYPE, _TRACK):
            self._refuse(np.flatnonzero(self._fields[tag] < 0))
        kept = np.flatnonzero(self._plain)
        place = np.full(len(self._plain), -1, dtype=np.int64)
        place[kept] = np.arange(len(kept))
        bounds = self._packets.start, self._packets.end
        others = np.flatnonzero(~self._plain)
        return Events(
            time_ns=self._fields[_TIMESTAMP][kept],
            type=self._fields[_TYPE][kept],
            track=self._fields[_TRACK][kept],
            name=self._fields[_NAME][kept],
            category=self._fields[_CATEGORY][kept],
            integers=_of_kept(self._integers, place),
            texts=_of_kept(self._texts, place),
            others=[
                self._wire.data[low:high]
                for low, high in zip(*(each[others].tolist() for each in bounds), strict=True)
            ],
        )


def _gather(
    values: dict[int, list[tuple[Integers, Integers]]],
    rows: Integers,
    name: Integers,
    value: Integers,
) -> None:
    for each in np.unique(name).tolist():
        chosen = name == each
        values.setdefault(each, []).append((rows[chosen], value[chosen]))


def _of_kept(
    values: dict[int, list[tuple[Integers, Integers]]], place: Integers
) -> dict[int, tuple[Integers, Integers]]:
    joined = {}
    for name, parts in values.items():
        rows = place[np.concatenate([rows for rows, _ in parts])]
        value = np.concatenate([value for _, value in parts])
        joined[name] = rows[rows >= 0], value[rows >= 0]
    return joined
