"""Make the first packets of a Perfetto file, and the few of the chain, by Perfetto's own classes.

Only the process that writes a file loads these classes, which takes longer than many a block: the
workers, who make blocks of millions of equal packets (`megascan.export.perfetto`), do without.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    DebugAnnotation,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

from megascan.export.arrows import CHAIN_TRACK, Hop
from megascan.export.perfetto import (
    RECORD_ARGUMENT,
    RECORD_CATEGORY,
    ROOT,
    Interned,
    TrackTree,
    chain_flow,
)
from megascan.export.protobuf import SEQUENCE, STARTS_STATE
from megascan.export.tracks import MARK_TRACK, Drawing, Mark
from megascan.export.writing import timeline_record
from megascan.header import Json
from megascan.schema import TIMELINE_EVENT


def head(drawing: Drawing, tree: TrackTree, interned: Interned) -> Trace:
    """Return the first packets of the file: tracks, texts, the timeline's record, marks."""
    trace = Trace(packet=_descriptor_packets(tree))
    _add_texts(trace, interned)
    _add_record(trace, drawing)
    for mark in drawing.marks:
        _add_mark(trace, mark, tree.marks[mark.rank], drawing.timeline.origin_ns)
    return trace


def _descriptor_packets(tree: TrackTree) -> Iterator[TracePacket]:
    """Yield track descriptors, parents before children."""
    for node in tree.nodes:
        packet = TracePacket(trusted_packet_sequence_id=SEQUENCE)
        track = packet.track_descriptor
        track.uuid, track.name = node.uuid, node.name
        if node.parent:
            track.parent_uuid = node.parent
        track.child_ordering = TrackDescriptor.EXPLICIT
        track.sibling_order_rank = node.order
        track.sibling_merge_behavior = TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
        if node.unit is not None:
            track.counter.unit_name = node.unit
        yield packet


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
    _begin_slice(trace, start_ns, track, MARK_TRACK, mark)
    end_ns = max(mark.end_ns - origin_ns, start_ns)
    _add_event(trace, end_ns, TrackEvent.TYPE_SLICE_END, track)


def chain_block(drawing: Drawing, track: int) -> bytes:
    """Make the chain's slices, each hop inside the slice of its iteration; arrows end in hops.

    They stand after all spans: for equal times the engine keeps the file's order, and an arrow must
    have left before it arrives.
    """
    trace, origin_ns = Trace(), drawing.timeline.origin_ns
    open_until_ns: list[int] = []
    for number, hop in enumerate(drawing.chain):
        while open_until_ns and open_until_ns[-1] <= hop.start_ns:
            _add_event(trace, open_until_ns.pop() - origin_ns, TrackEvent.TYPE_SLICE_END, track)
        event = _begin_slice(trace, hop.start_ns - origin_ns, track, CHAIN_TRACK, hop)
        if hop.row >= 0:
            event.terminating_flow_ids.append(chain_flow(drawing, number))
        open_until_ns.append(hop.end_ns)
    for end_ns in reversed(open_until_ns):
        _add_event(trace, end_ns - origin_ns, TrackEvent.TYPE_SLICE_END, track)
    return bytes(trace.SerializeToString())


def _begin_slice(
    trace: Trace, time_ns: int, track: int, category: str, drawn: Mark | Hop
) -> TrackEvent:
    event = _add_event(trace, time_ns, TrackEvent.TYPE_SLICE_BEGIN, track)
    event.name = drawn.label
    event.categories.append(category)
    for name, value in drawn.args.items():
        _annotate(event.debug_annotations.add(name=name), value)
    return event


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
