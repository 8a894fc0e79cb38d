"""Merged timelines as `megascan.export` writes them in Perfetto's protobuf, read back.

A span is a slice whose category is a kind: its begin holds the columns, its end closes what is
innermost on its track. Curves, arrows, summary rows and marks are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from megascan.errors import InputError
from megascan.reader.bytestream import read_pieces
from megascan.reader.merged_record import AGAIN, MergedRecord, merged_record
from megascan.reader.protobuf import Wire
from megascan.reader.track_events import BEGIN, END, Events, read_events
from megascan.schema import NOT_APPLICABLE, TIMELINE_COLUMNS, TIMELINE_EVENT, Column, Kind
from megascan.timeline import TIMELINE_SCHEMA, Timeline, with_column

Integers = npt.NDArray[np.int64]

_PIECE_BYTES = 4 << 20
_LONGEST_NS = 1 << 60
"""36 years: times beyond it are damage."""


def read_protobuf(path: Path) -> Timeline:
    """Read a merged timeline (.pftrace or .pftrace.gz), equal to what was written.

    Raises InputError for traces of other tools, a newer schema, and files that are damaged or cut
    off.
    """
    reading = _Reading(path)
    for events in _pieces(path):
        reading.add(events)
    return reading.timeline()


def _pieces(path: Path) -> Iterator[Events]:
    """Events of a few megabytes at a time, in whole packets."""
    rest = b""
    for piece, torn in read_pieces(path, _PIECE_BYTES):
        if torn:
            raise InputError(f"{path} is cut off inside its compressed data; {AGAIN}")
        wire = Wire(rest + piece)
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


class _Reading:
    """Gathers the record, the texts and the spans piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._texts = _Texts({}, {}, {}, {})
        self._record: MergedRecord | None = None
        self._is_ours = False
        self._spans: list[pa.Table] = []
        self._edges: list[tuple[Integers, Integers, Integers]] = []
        """(track, time, number of the span that begins or -1 where one ends) of each piece."""
        self._num_spans = 0

    def add(self, events: Events) -> None:
        """Take a piece."""
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
        """Texts and the record; what else is no event is passed over."""
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
        """A text of a message; where it is no UTF-8, protobuf gives it as bytes."""
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
        """Columns of the spans that begin in a piece; durations are not known yet."""
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
        return time_ns + (self._record.origin_ns if self._record else 0)

    def _text(self, numbers: Integers, texts: dict[int, str], what: str) -> pa.Array:
        """Numbers of interned texts as a coded column."""
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
        limits = np.iinfo(kind.to_pandas_dtype())
        if len(values) and (values.min() < limits.min or values.max() > limits.max):
            raise InputError(
                f"{self._path}: the {column.name} of a slice does not fit ({values.max()}); {AGAIN}"
            )
        if column.name == "rank" and len(values) and values.min() < 0:
            raise InputError(f"{self._path}: a slice has no rank; {AGAIN}")
        return pa.array(values).cast(kind)

    def timeline(self) -> Timeline:
        """Everything, after the last piece."""
        if self._record is None:
            raise self._foreign()
        spans = pa.concat_tables(self._spans) if self._spans else TIMELINE_SCHEMA.empty_table()
        spans = with_column(spans, "duration_ns", self._durations())
        return self._record.timeline([spans], self._path)

    def _durations(self) -> Integers:
        """(span,) how long after a slice's begin its end stands.

        In the order of time (that of the file at a tie) a track's begins and ends are brackets, and
        on each level of depth they take turns.
        """
        if not self._edges:
            return np.empty(0, dtype=np.int64)
        track, time_ns, number = (np.concatenate(each) for each in zip(*self._edges, strict=True))
        kept = np.isin(track, np.unique(track[number >= 0]))
        track, time_ns, number = track[kept], time_ns[kept], number[kept]
        order = np.lexsort((time_ns, track))
        track, time_ns, number = track[order], time_ns[order], number[order]
        step = np.where(number >= 0, 1, -1)
        depth = np.cumsum(step) - (step > 0)  # of a begin before it, of an end after it
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
