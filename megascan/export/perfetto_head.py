"""The first packets of a protobuf: tracks, texts, the timeline's record, marks.

They are few, so they are made message by message with Perfetto's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, Trace, TrackEvent

from megascan.export.drawing import Drawing
from megascan.export.naming import MARK_TRACK
from megascan.export.perfetto_packets import SEQUENCE, STARTS_STATE
from megascan.export.perfetto_summary import SummarySlices
from megascan.export.perfetto_tracks import ROOT, TrackTree, descriptor_packets
from megascan.export.selection import Mark
from megascan.export.timeline_record import timeline_record
from megascan.header import Json
from megascan.schema import TIMELINE_COLUMNS, TIMELINE_EVENT
from megascan.timeline import codes

Integers = npt.NDArray[np.int64]

SUMMARY_CATEGORY = "summary"
"""Category of the slices that are no spans: iterations of ranks and groups."""
RECORD_CATEGORY = "megascan"
RECORD_ARGUMENT = "json"
"""The timeline's record is the text of this argument of an instant on the root track."""

SPAN_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.name not in {"kind", "name", "start_ns", "duration_ns"}
)
TEXT_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.type == "text" and column.name in SPAN_ARGUMENTS
)
SUMMARY_ARGUMENTS = ("iteration", "num_ranks", "wait_ratio", "least_waiting_rank")


class Texts:
    """Texts of one sort that packets refer to by number, from 1."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.number = {text: place for place, text in enumerate(dict.fromkeys(texts), start=1)}

    def column(self, table: pa.Table, name: str) -> Integers:
        """Numbers of a text column of the span table, 0 for an empty text."""
        code, row_texts = codes(table, name)
        numbers = [self.number[text] if text else 0 for text in row_texts]
        return np.array(numbers or [0], dtype=np.int64)[code]


@dataclass(frozen=True, kw_only=True)
class Interned:
    """All texts of a file."""

    names: Texts
    categories: Texts
    arguments: Texts
    values: Texts


def intern(spans: pa.Table, summary: SummarySlices) -> Interned:
    """Texts of the spans and of the summary slices."""
    iterations = map(iteration_name, np.unique(summary.iteration).tolist())
    return Interned(
        names=Texts([*codes(spans, "name")[1], *iterations]),
        categories=Texts([*codes(spans, "kind")[1], SUMMARY_CATEGORY]),
        arguments=Texts([*SPAN_ARGUMENTS, *SUMMARY_ARGUMENTS]),
        values=Texts([text for name in TEXT_ARGUMENTS for text in codes(spans, name)[1]]),
    )


def iteration_name(iteration: int) -> str:
    """Name of a summary slice."""
    return f"iteration {iteration}"


def head(drawing: Drawing, tree: TrackTree, interned: Interned) -> Trace:
    """The packets that stand first."""
    trace = Trace(packet=descriptor_packets(tree))
    _add_texts(trace, interned)
    _add_record(trace, drawing)
    for mark in drawing.marks:
        _add_mark(trace, mark, tree.marks[mark.rank], drawing.timeline.origin_ns)
    return trace


def _add_texts(trace: Trace, interned: Interned) -> None:
    packet = trace.packet.add(trusted_packet_sequence_id=SEQUENCE, sequence_flags=STARTS_STATE)
    data = packet.interned_data
    for text, number in interned.names.number.items():
        data.event_names.add(iid=number, name=text)
    for text, number in interned.categories.number.items():
        data.event_categories.add(iid=number, name=text)
    for text, number in interned.arguments.number.items():
        data.debug_annotation_names.add(iid=number, name=text)
    for text, number in interned.values.number.items():
        data.debug_annotation_string_values.add(iid=number, str=text.encode())


def _add_record(trace: Trace, drawing: Drawing) -> None:
    event = _add_event(trace, 0, TrackEvent.TYPE_INSTANT, ROOT)
    event.name = TIMELINE_EVENT
    event.categories.append(RECORD_CATEGORY)
    text = orjson.dumps(timeline_record(drawing)).decode()
    event.debug_annotations.add(name=RECORD_ARGUMENT, string_value=text)


def _add_mark(trace: Trace, mark: Mark, track: int, origin_ns: int) -> None:
    start_ns = max(mark.start_ns - origin_ns, 0)
    event = _add_event(trace, start_ns, TrackEvent.TYPE_SLICE_BEGIN, track)
    event.name = mark.label
    event.categories.append(MARK_TRACK)
    for name, value in mark.args.items():
        _annotate(event.debug_annotations.add(name=name), value)
    end_ns = max(mark.end_ns - origin_ns, start_ns)
    _add_event(trace, end_ns, TrackEvent.TYPE_SLICE_END, track)


def _add_event(trace: Trace, time_ns: int, kind: int, track: int) -> TrackEvent:
    packet = trace.packet.add(timestamp=time_ns, trusted_packet_sequence_id=SEQUENCE)
    packet.track_event.type, packet.track_event.track_uuid = kind, track
    return packet.track_event


def _annotate(annotation: DebugAnnotation, value: Json) -> None:
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    elif isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, list):
        for each in value:
            _annotate(annotation.array_values.add(), each)
    elif isinstance(value, dict):
        for name, each in value.items():
            _annotate(annotation.dict_entries.add(name=name), each)
