"""Read merged timelines as `megascan.export` writes them, Chrome JSON and Perfetto's protobuf.

Everything but the spans is one record at the head of the file (`MergedRecord`).

In the protobuf a packet is a time and an event; an event has a type, a track and, where it begins a
slice, a name, a category and arguments, all by the numbers of interned texts. All packets are read
in parallel, one field after the other (`Wire`: numbers at an array of places, eight bytes at a
time; encoding: protobuf.dev/programming-guides/encoding). Packets of another form (descriptors,
texts, marks) go to Perfetto's own classes.

A span is a slice whose category is a kind: its begin holds the columns, its end closes the
innermost slice on the track. Curves, arrows, summary rows and marks are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa

from megascan.arrays import Integers, Words
from megascan.errors import ConfigError, InputError
from megascan.header import (
    LATEST_NS,
    Json,
    RankHeader,
    WindowRecord,
    checked,
    layout_from_json,
    shown,
)
from megascan.parallel import num_workers
from megascan.reader.lines import EventBlock, parsed_blocks, read_pieces
from megascan.reader.segments import event_schema, faulty_rows, rows_of, span_columns
from megascan.reader.templates import Templates
from megascan.reader.trace import Format, sniff
from megascan.schema import (
    NOT_APPLICABLE,
    SCHEMA_VERSION,
    TIMELINE_COLUMNS,
    TIMELINE_EVENT,
    Column,
    Kind,
)
from megascan.timeline import (
    TIMELINE_SCHEMA,
    ClockFit,
    Completeness,
    Timeline,
    equals,
    in_order,
    number_type,
    numbers,
    shifted,
    with_column,
)

AGAIN = "write it again with megascan aggregate"


@dataclass(frozen=True)
class MergedRecord:
    """A timeline without its spans; `num_spans` is None for files that do not say the number."""

    frame: Timeline
    num_spans: int | None

    def timeline(self, spans: Sequence[pa.Table], path: Path) -> Timeline:
        """Return the timeline with its spans; raises InputError unless they are complete."""
        table = pa.concat_tables(spans) if spans else TIMELINE_SCHEMA.empty_table()
        if self.num_spans is not None and table.num_rows != self.num_spans:
            raise InputError(
                f"{path} was written with {self.num_spans:,} spans and holds {table.num_rows:,}: "
                f"it is damaged; {AGAIN}"
            )
        if not table.num_rows:
            raise InputError(f"{path} holds no spans; {AGAIN}")
        self._check_ranks(table, path)
        return replace(self.frame, spans=in_order(table.unify_dictionaries()))

    def _check_ranks(self, table: pa.Table, path: Path) -> None:
        """Check that spans and headers are of ranks that the layout has."""
        frame, world_size = self.frame, self.frame.layout.world_size
        highest = max([int(numbers(table, "rank").max(initial=0)), *frame.headers, *frame.clocks])
        if highest >= world_size:
            raise InputError(
                f"{path} speaks of rank {highest} in a world of {world_size} ranks: it is damaged; "
                f"{AGAIN}"
            )


def merged_record(found: object, path: Path) -> MergedRecord:
    """Decode a timeline's record. Raises InputError for a newer schema, and for damage."""
    record: Mapping[str, Any] = found if isinstance(found, dict) else {}
    version = record.get("schema")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            f"{path}: timeline of schema {shown(version)}, this MegaScan reads up to "
            f"{SCHEMA_VERSION}; update MegaScan"
        )
    try:
        return _decoded(record, str(path))
    except (
        KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, ConfigError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{path}: damaged {TIMELINE_EVENT} event ({error!s:.200}); {AGAIN}"
        ) from error


def _decoded(record: Mapping[str, Any], where: str) -> MergedRecord:
    headers = [RankHeader.from_json(_whole(item, record), where) for item in record["headers"]]
    num_spans, origin_ns = record.get("num_spans"), int(record["origin_ns"])
    if not 0 <= origin_ns < LATEST_NS:
        raise ValueError(f"origin_ns is {shown(origin_ns)}, expected unix time")
    frame = Timeline(
        run_id=str(record["run_id"]),
        layout=layout_from_json(record["layout"]),
        headers={header.rank: header for header in headers},
        spans=TIMELINE_SCHEMA.empty_table(),
        clocks={
            int(item["rank"]): checked(ClockFit(**{"error_ns": item["residual_p99_ns"], **item}))
            for item in record["clocks"]
        },
        windows={
            int(rank): tuple(WindowRecord.from_json(item, where) for item in items)
            for rank, items in record["windows"].items()
        },
        clock_method=str(record["clock_method"]),
        origin_ns=origin_ns,
        completeness=_completeness(record["completeness"]),
    )
    return MergedRecord(frame, None if num_spans is None else int(num_spans))


def _whole(header: Mapping[str, Json], record: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a header by values that stand once for all ranks; older files repeat them."""
    whole: dict[str, Any] = {**record.get("common_header", {}), **header}
    if isinstance(whole["groups"], list):
        whole["groups"] = {name: record["groups"][name] for name in whole["groups"]}
    return whole


def _completeness(record: Mapping[str, Json]) -> Completeness:
    fields = cast("dict[str, Any]", dict(record))
    for name in ("ranks", "missing_ranks", "notes"):
        fields[name] = tuple(fields.get(name, ()))
    return checked(Completeness(**fields))


_COLUMNS = tuple(
    replace(column, event_key="args.track") if column.name == "track" else column
    for column in TIMELINE_COLUMNS
)
"""Columns of a merged event; tid is the viewer's track, so the recorded track is an argument."""


def read_timeline(path: Path) -> Timeline:
    """Read a merged timeline, Chrome JSON or protobuf, with its clocks, windows and completeness.

    A timeline holds the ranks, iterations and kinds that were selected when it was written. Raises
    InputError for other formats, a newer schema, and files that are damaged or cut off.
    """
    found = sniff(path)
    if found is Format.PERFETTO:
        return read_protobuf(path)
    if found is not Format.TIMELINE:
        raise InputError(
            f"{path} holds {found.value.replace('_', ' ')}, expected a merged timeline; "
            "make one with megascan aggregate"
        )
    record: MergedRecord | None = None
    spans: list[pa.Table] = []
    for events in _blocks(path):
        record = record or _record(events, path)
        spans += _spans(events, record, path)
    if record is None:
        raise InputError(f"{path} holds no {TIMELINE_EVENT} event; {AGAIN}")
    return record.timeline(spans, path)


def _blocks(path: Path) -> Iterator[EventBlock]:
    """Yield parsed blocks. Raises InputError for damage, and if the file does not end regularly."""
    end = b""
    parser = Templates(event_schema(_COLUMNS))
    for block, events in parsed_blocks(path, parser, num_workers()):
        if block.torn:
            raise InputError(f"{path} is cut off inside its compressed data; {AGAIN}")
        end = bytes(block.text[-8:]).strip() or end
        if events is not None:
            if events.damages:
                damage = events.damages[0]
                raise InputError(f"{path}: line {damage.line} {damage.reason}; {AGAIN}")
            yield events
    if not end.endswith((b"]", b"]}")):
        raise InputError(f"{path} is cut off, its last bracket is missing; {AGAIN}")


def _spans(events: EventBlock, record: MergedRecord, path: Path) -> Iterator[pa.Table]:
    """Yield a block's spans, if there are any; arrows, curves and names are skipped."""
    table = events.table
    rows = np.flatnonzero(equals(table, "ph", "X") & equals(table, "cat", *map(str, Kind)))
    if not len(rows):
        return
    table = rows_of(table, rows)
    spans = span_columns(table, _COLUMNS)
    for row, reason in faulty_rows(spans, table, rank=None):
        line = events.numbers[int(rows[row])]
        raise InputError(f"{path}: line {line} {reason}; {AGAIN}")
    yield shifted(spans, record.frame.origin_ns)


def _record(events: EventBlock, path: Path) -> MergedRecord:
    """Return the timeline's record, which stands before all spans."""
    found = np.flatnonzero(equals(events.table, "name", TIMELINE_EVENT))
    if not len(found):
        raise InputError(f"{path}: no {TIMELINE_EVENT} event before the first span; {AGAIN}")
    try:
        record = orjson.loads(events.rows_text([int(found[0])])[0]).get("args")
    except orjson.JSONDecodeError as error:  # a number that no double holds, too many brackets
        raise InputError(f"{path}: damaged {TIMELINE_EVENT} event ({error}); {AGAIN}") from error
    return merged_record(record, path)


VARINT, FIXED64, LENGTH = 0, 1, 2
_PACKET_TAG = 0x0A
_LARGEST_PACKET = 1 << 30
_LONGEST_VARINT = 10
_PAD = bytes(_LONGEST_VARINT + 8)

_CONTINUES = np.uint64(0x8080808080808080)
_SEPTETS = np.uint64(0x7F7F7F7F7F7F7F7F)
_STEPS = tuple(
    (np.uint64(low), np.uint64(high), np.uint64(shift))
    for low, high, shift in (
        (0x007F007F007F007F, 0x7F007F007F007F00, 1),
        (0x00003FFF00003FFF, 0x3FFF00003FFF0000, 2),
        (0x000000000FFFFFFF, 0x0FFFFFFF00000000, 4),
    )
)
"""Steps that join septets pair by pair: masks of the lower and the upper part, and the shift."""


class Wire:
    """Bytes to read numbers from, at many places at once."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size = len(data)
        padded = data + _PAD
        self._words: Words = np.ndarray(
            (len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,)
        )

    def varints(self, at: Integers) -> tuple[Integers, Integers]:
        """Return (value, place of the next field) of the varints at some places.

        For a varint that never ends, the place of the next field is -1.
        """
        word = self._words[at]
        stop = ~word & _CONTINUES
        stop &= np.negative(stop)  # the lowest byte that does not continue
        num_bytes = (np.frexp(stop.astype(np.float64))[1] >> 3).astype(np.int64)
        value = word & ((stop << np.uint64(1)) - np.uint64(1)) & _SEPTETS
        for low, high, shift in _STEPS:
            value = (value & low) | ((value & high) >> shift)
        following = at + num_bytes
        rows = np.flatnonzero(num_bytes == 0)
        if len(rows):
            value[rows], following[rows] = self._long_varints(at[rows], value[rows])
        return value.view(np.int64), following

    def _long_varints(self, at: Integers, value: Words) -> tuple[Words, Integers]:
        """Add the ninth and tenth byte, as negative numbers have them."""
        more = self._words[at + 8]
        ninth, tenth = more & np.uint64(0xFF), more >> np.uint64(8) & np.uint64(0xFF)
        ends = ninth < 0x80
        value = value | (ninth & np.uint64(0x7F)) << np.uint64(56)
        value = np.where(ends, value, value | (tenth & np.uint64(1)) << np.uint64(63))
        following = np.where(ends, at + 9, np.where(tenth <= 1, at + 10, -1))
        return value, following

    def packets(self) -> Packets | None:
        """Return the bounds of the whole packets in the data; None if the data are no packets."""
        if not self.size:
            none = np.empty(0, dtype=np.int64)
            return Packets(none, none, 0)
        tags = np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) == _PACKET_TAG)
        if not len(tags) or tags[0] != 0:
            return None
        length, body = self.varints(tags + 1)
        good = (body > 0) & (length >= 0) & (length <= _LARGEST_PACKET)
        end = np.where(good, body + length, -1)
        chain = _chain(tags, end)
        last = int(chain[-1])
        if end[last] < 0 or (end[last] < self.size and self.data[int(end[last])] != _PACKET_TAG):
            return None
        whole = chain if end[last] <= self.size else chain[:-1]
        rest = int(end[last]) if end[last] <= self.size else int(tags[last])
        return Packets(body[whole], end[whole], rest)


@dataclass(frozen=True)
class Packets:
    """Bounds of whole packets, (packet,) each; `rest` is where the first incomplete one begins."""

    start: Integers
    end: Integers
    rest: int


def _chain(tags: Integers, end: Integers) -> Integers:
    """Return the places in `tags` that are reached from the first if each leads to the tag at its
    `end`.

    A packet's end is known only once its begin is known. To avoid a loop over packets, steps are
    doubled: places are reached by 1, 2, 4, … steps at a time.
    """
    stop = len(tags)
    place = np.searchsorted(tags, end)
    found = np.append(tags, -1)[place] == end
    step = np.append(np.where(found, place, stop), stop)
    reached = np.zeros(stop + 1, dtype=np.bool_)
    reached[0] = True
    while not reached[stop]:
        reached[step[np.flatnonzero(reached)]] = True
        step = step[step]
    return np.flatnonzero(reached[:stop])


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
"""Fields with a curve's value and the ends of arrows, which are skipped."""
_ARGUMENT_NAME, _INTEGER, _REAL, _TEXT = (
    _tag(1, VARINT), _tag(4, VARINT), _tag(5, FIXED64), _tag(17, VARINT),
)  # fmt: skip


@dataclass(frozen=True)
class Events:
    """Events of a piece of a file, in its order.

    time_ns, type, track, name, category  (event,) numbers, -1 if absent
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
    """Read every packet as an event, or keep its bytes if it is no event."""
    reading = _PacketReading(wire, packets)
    for _ in range(_MOST_FIELDS):
        if not reading.step():
            break
    return reading.events()


class _PacketReading:
    """Reading of all packets of a piece in parallel, each up to a place of its own."""

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
        """Read the next field of every packet; return False if all packets were read already."""
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
        """Read an argument's name and value, which must fill the argument to its end."""
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
            own_rows, own_name, own_value = rows[chosen], name[chosen], value[chosen]
            for each in np.unique(own_name).tolist():
                here = own_name == each
                values.setdefault(each, []).append((own_rows[here], own_value[here]))

    def events(self) -> Events:
        """Return the events that were read; packets without time, type or track are `others`."""
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


def _of_kept(
    values: dict[int, list[tuple[Integers, Integers]]], place: Integers
) -> dict[int, tuple[Integers, Integers]]:
    joined = {}
    for name, parts in values.items():
        rows = place[np.concatenate([rows for rows, _ in parts])]
        value = np.concatenate([value for _, value in parts])
        joined[name] = rows[rows >= 0], value[rows >= 0]
    return joined


_PIECE_BYTES = 4 << 20
_LONGEST_NS = 1 << 60
"""36 years; larger times are damage."""


def read_protobuf(path: Path) -> Timeline:
    """Read a merged timeline (.pftrace or .pftrace.gz), equal to the timeline that was written.

    Raises InputError for traces of other tools, a newer schema, and files that are damaged or cut
    off.
    """
    reading = _ProtobufReading(path)
    for events in _pieces(path):
        reading.add(events)
    return reading.timeline()


def _pieces(path: Path) -> Iterator[Events]:
    """Yield the events of a few megabytes at a time, in whole packets."""
    rest = b""
    for piece in read_pieces(path, _PIECE_BYTES):
        if piece.torn:
            raise InputError(f"{path} is cut off inside its compressed data; {AGAIN}")
        wire = Wire(rest + piece.data)
        packets = wire.packets()
        if packets is None:
            raise InputError(f"{path}: its packets are damaged; {AGAIN}")
        rest = wire.data[packets.rest :]
        yield read_events(wire, packets)
    if rest:
        raise InputError(f"{path} is cut off inside a packet; {AGAIN}")


@dataclass(frozen=True)
class _Texts:
    """Interned texts by number."""

    names: dict[int, str]
    categories: dict[int, str]
    arguments: dict[int, str]
    values: dict[int, str]


class _ProtobufReading:
    """Gathers the record, the texts and the spans piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts = _Texts({}, {}, {}, {})
        self._record: MergedRecord | None = None
        self._is_ours = False
        self._spans: list[pa.Table] = []
        self._edges: list[tuple[Integers, Integers, Integers]] = []
        """(track, time, number of the span that begins, or -1 if a span ends) of each piece."""
        self._num_spans = 0

    def add(self, events: Events) -> None:
        """Take the events of a piece."""
        for packet in events.others:
            self._take_packet(packet)
        if self._record is None:
            if events.time_ns.size:
                raise self._foreign()
            return
        kinds = [number for number, text in self._texts.categories.items() if text in set(Kind)]
        begins = np.flatnonzero((events.type == BEGIN) & np.isin(events.category, kinds))
        ends = np.flatnonzero(events.type == END)
        rows = np.sort(np.r_[begins, ends])
        number = np.where(events.type[rows] == END, -1, 0)
        number[number == 0] = self._num_spans + np.arange(len(begins))
        self._edges.append((events.track[rows], events.time_ns[rows], number))
        if len(begins):
            self._spans.append(self._table(events, begins))
            self._num_spans += len(begins)

    def _foreign(self) -> InputError:
        if self._is_ours:
            return InputError(f"{self._path} holds no {TIMELINE_EVENT} record; {AGAIN}")
        return InputError(
            f"{self._path} is a Perfetto trace of another tool, expected a merged timeline; "
            "make one with megascan aggregate"
        )

    def _take_packet(self, data: bytes) -> None:
        """Take the texts and the record from a packet that is no event; skip other packets."""
        from google.protobuf.message import DecodeError  # heavy, and only this format needs them
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

        try:
            packet = TracePacket.FromString(data)
        except DecodeError as error:
            raise InputError(f"{self._path}: a packet is damaged; {AGAIN}") from error
        self._is_ours |= self._whole(packet.track_descriptor.name).startswith("run ")
        interned, texts = packet.interned_data, self._texts
        for known, entries in (
            (texts.names, interned.event_names),
            (texts.categories, interned.event_categories),
            (texts.arguments, interned.debug_annotation_names),
        ):
            known.update((each.iid, self._whole(each.name)) for each in entries)
        for value in interned.debug_annotation_string_values:
            texts.values[value.iid] = self._whole(value.str)
        event = packet.track_event
        if event.name == TIMELINE_EVENT and event.debug_annotations:
            self._record = self._decoded(event.debug_annotations[0].string_value)

    def _whole(self, text: str | bytes) -> str:
        """Return a text of a message; protobuf gives a text that is no UTF-8 as bytes."""
        try:
            return text if isinstance(text, str) else text.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path}: a text is damaged ({error}); {AGAIN}") from error

    def _decoded(self, text: str) -> MergedRecord:
        try:
            record = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise InputError(f"{self._path}: damaged {TIMELINE_EVENT} record; {AGAIN}") from error
        return merged_record(record, self._path)

    def _table(self, events: Events, begins: Integers) -> pa.Table:
        """Make a table of the spans that begin in a piece; their durations are not known yet."""
        place = np.full(len(events.type), -1, dtype=np.int64)
        place[begins] = np.arange(len(begins))
        columns = [self._column(column, events, begins, place) for column in TIMELINE_COLUMNS]
        return pa.Table.from_arrays(columns, schema=TIMELINE_SCHEMA)

    def _column(
        self, column: Column, events: Events, begins: Integers, place: Integers
    ) -> pa.Array:
        texts = self._texts
        if column.name == "kind":
            return self._text(events.category[begins], texts.categories, "category")
        if column.name == "name":
            return self._text(events.name[begins], texts.names, "name")
        if column.name == "start_ns":
            return self._integer(column, self._start(events.time_ns[begins]))
        is_text = column.type == "text"
        values = np.full(len(begins), 0 if is_text else NOT_APPLICABLE, dtype=np.int64)
        for number, name in texts.arguments.items():
            if name == column.name:
                found = (events.texts if is_text else events.integers).get(number)
                rows, value = found or (values[:0], values[:0])
                mine = place[rows] >= 0
                values[place[rows[mine]]] = value[mine]
        if is_text:
            return self._text(values, {0: "", **texts.values}, column.name)
        return self._integer(column, values)

    def _start(self, time_ns: Integers) -> Integers:
        if (time_ns > _LONGEST_NS).any():
            raise InputError(f"{self._path}: a slice has no usable time; {AGAIN}")
        return time_ns + (self._record.frame.origin_ns if self._record else 0)

    def _text(self, numbers: Integers, texts: dict[int, str], what: str) -> pa.Array:
        """Turn numbers of interned texts into a dictionary column."""
        used, codes = np.unique(numbers, return_inverse=True)
        missing = [each for each in used.tolist() if each not in texts]
        if missing:
            raise InputError(
                f"{self._path}: the {what} of a slice is text {missing[0]}, which the file does "
                f"not hold; {AGAIN}"
            )
        words = pa.array([texts[each] for each in used.tolist()], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), words)

    def _integer(self, column: Column, values: Integers) -> pa.Array:
        kind = TIMELINE_SCHEMA.field(column.name).type
        limits = np.iinfo(number_type(kind))
        if len(values) and (values.min() < limits.min or values.max() > limits.max):
            raise InputError(
                f"{self._path}: the {column.name} of a slice does not fit ({values.max()}); {AGAIN}"
            )
        if column.name == "rank" and len(values) and values.min() < 0:
            raise InputError(f"{self._path}: a slice has no rank; {AGAIN}")
        return pa.array(values).cast(kind)

    def timeline(self) -> Timeline:
        """Return the whole timeline; call it after the last piece."""
        if self._record is None:
            raise self._foreign()
        spans = pa.concat_tables(self._spans) if self._spans else TIMELINE_SCHEMA.empty_table()
        spans = with_column(spans, "duration_ns", self._durations())
        return self._record.timeline([spans], self._path)

    def _durations(self) -> Integers:
        """Return (span,) the time from each slice's begin to its end.

        In the order of time (at equal times, of the file) a track's begins and ends are brackets,
        which alternate on each level of depth.
        """
        if not self._edges:
            return np.empty(0, dtype=np.int64)
        track, time_ns, number = (np.concatenate(each) for each in zip(*self._edges, strict=True))
        kept = np.isin(track, np.unique(track[number >= 0]))
        track, time_ns, number = track[kept], time_ns[kept], number[kept]
        order = np.lexsort((time_ns, track))
        track, time_ns, number = track[order], time_ns[order], number[order]
        step = np.where(number >= 0, 1, -1)
        depth = np.cumsum(step) - (step > 0)  # before a begin, after an end
        turn = np.lexsort((depth, track))
        begin, end = turn[0::2], turn[1::2]
        paired = len(begin) == len(end) and bool(
            ((number[begin] >= 0) & (number[end] < 0)).all()
            and ((track[begin] == track[end]) & (depth[begin] == depth[end])).all()
        )
        if not paired or (depth < 0).any():
            raise InputError(f"{self._path}: slices begin that do not end; {AGAIN}")
        durations = np.empty(len(begin), dtype=np.int64)
        durations[number[begin]] = time_ns[end] - time_ns[begin]
        return durations
