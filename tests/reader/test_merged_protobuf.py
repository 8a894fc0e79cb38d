"""Timelines in Perfetto's protobuf come back as they were written, or not at all."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as PerfettoTrace

from aggregate import build_timeline
from megascan.errors import InputError
from megascan.export import Mark, Selection, write_timeline
from megascan.export.protobuf import matrix, varint, varints
from megascan.reader import read_timeline
from megascan.reader import timeline_files as merged_protobuf
from megascan.reader.timeline_files import Wire
from megascan.schema import Kind
from megascan.simulate import Clocks, JobModel, compute_bound, simulate_trace
from megascan.timeline import Timeline
from megascan.topology import Layout

if TYPE_CHECKING:
    from conftest import Folder

LAYOUTS = {
    "dp": Layout(dp=4),
    "tp pp": Layout(tp=2, pp=2),
    "interleaved": Layout(pp=2, vpp=2, dp=2),
    "experts and context": Layout(ep=2, cp=2, dp=2),
}


def simulated(layout: Layout) -> Timeline:
    model = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=4,
        interval=2,
        window=2,
        num_microbatches=2,
        num_layers=4,
        clocks=Clocks(offset_ms=50.0, drift_ppm=20.0),
    )
    return build_timeline(simulate_trace(model, seed=3))


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS.keys())
def timeline(request: pytest.FixtureRequest) -> Timeline:
    return simulated(request.param)


def plain(spans: pa.Table) -> pa.Table:
    """The same with texts as such: their dictionaries may differ."""
    types = [getattr(field.type, "value_type", field.type) for field in spans.schema]
    return spans.cast(pa.schema(list(zip(spans.column_names, types, strict=True))))


def in_one_order(spans: pa.Table) -> list[str]:
    """Rows that are alike in their key may stand in either order."""
    return sorted(map(str, spans.to_pylist()))


@pytest.mark.parametrize("suffix", [".pftrace", ".pftrace.gz"])
def test_everything_survives(timeline: Timeline, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    rank = max(timeline.headers)
    mark = Mark(
        rank=rank, start_ns=timeline.origin_ns, end_ns=timeline.origin_ns + 10**6, label="slow"
    )
    write_timeline(timeline, path, marks=[mark])
    other = read_timeline(path)
    assert other.spans.schema == timeline.spans.schema
    assert other.spans.to_pylist() == timeline.spans.to_pylist()
    for field in ("run_id", "layout", "headers", "windows", "clocks", "clock_method", "origin_ns"):
        assert getattr(other, field) == getattr(timeline, field)
    assert other.completeness == timeline.completeness


def test_both_formats_hold_the_same(timeline: Timeline, tmp_path: Path) -> None:
    found = []
    for suffix in (".json", ".pftrace"):
        selection = Selection(ranks={0, 1}, kinds={Kind.COLLECTIVE, Kind.P2P})
        write_timeline(timeline, tmp_path / f"t{suffix}", selection=selection)
        found.append(read_timeline(tmp_path / f"t{suffix}"))
    assert in_one_order(found[0].spans) == in_one_order(found[1].spans)
    assert 0 < found[1].spans.num_rows < timeline.spans.num_rows


def test_pieces_may_end_anywhere(
    tmp_path: Path, timeline: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.pftrace"
    write_timeline(timeline, path)
    expected = plain(timeline.spans)
    for size in (997, 4096, 70_001):
        monkeypatch.setattr(merged_protobuf, "_PIECE_BYTES", size)
        assert plain(read_timeline(path).spans).equals(expected)


def test_overlaps_and_spans_of_no_length(merged: Path, folder: Folder) -> None:
    """Crossing spans lie on several tracks, and ends at one time close what is innermost."""
    timeline = read_timeline(merged)
    spans = timeline.spans
    random = np.random.default_rng(0)
    start = np.sort(random.integers(0, 40, spans.num_rows)) + timeline.origin_ns
    duration = random.choice([0, 0, 1, 5, 30], spans.num_rows)
    for name, values in (("start_ns", start), ("duration_ns", duration), ("rank", start * 0)):
        at = spans.schema.get_field_index(name)
        field = spans.schema.field(at)
        spans = spans.set_column(at, field, pa.array(values).cast(field.type))
    order = np.lexsort((-duration, start))
    timeline = Timeline(**{**vars(timeline), "spans": spans.take(pa.array(order))})
    path = merged.with_name("odd.pftrace")
    write_timeline(timeline, path)
    assert read_timeline(path).spans.to_pylist() == timeline.spans.to_pylist()


def test_what_was_cut_off_is_never_taken_for_whole(merged: Path) -> None:
    path = merged.with_name("t.pftrace")
    write_timeline(read_timeline(merged), path)
    whole = path.read_bytes()
    for content in (whole, gzip.compress(whole)):
        for cut in range(0, len(content) - 1, 7):
            path.write_bytes(content[:cut])
            with pytest.raises(InputError) as caught:
                read_timeline(path)
            assert "\n" not in str(caught.value)


def test_lost_packets_are_noticed(merged: Path) -> None:
    """A whole slice, begin and end, leaves no gap in its track: the count tells."""
    path = merged.with_name("t.pftrace")
    write_timeline(read_timeline(merged), path)
    trace = PerfettoTrace.FromString(path.read_bytes())
    forward = [
        place
        for place, packet in enumerate(trace.packet)
        if packet.track_event.type == packet.track_event.TYPE_SLICE_BEGIN
    ]
    lost = trace.packet[forward[0]]
    ends = [
        place
        for place, packet in enumerate(trace.packet)
        if packet.track_event.type == packet.track_event.TYPE_SLICE_END
        and packet.track_event.track_uuid == lost.track_event.track_uuid
    ]
    for place in sorted([forward[0], ends[0]], reverse=True):
        del trace.packet[place]
    path.write_bytes(trace.SerializeToString())
    with pytest.raises(InputError, match="was written with 16 spans and holds 15"):
        read_timeline(path)


def test_a_trace_of_another_tool(tmp_path: Path) -> None:
    trace = PerfettoTrace()
    for time_ns in (1000, 2000):
        packet = trace.packet.add(timestamp=time_ns, trusted_packet_sequence_id=7)
        packet.track_event.type = packet.track_event.TYPE_INSTANT
        packet.track_event.track_uuid = 1 << 60
    path = tmp_path / "foreign.pftrace"
    path.write_bytes(trace.SerializeToString())
    with pytest.raises(InputError, match="of another tool, expected a merged timeline"):
        read_timeline(path)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_numbers_come_back(values: list[int]) -> None:
    lone = [varint(value % 2**64) for value in values]
    ends = np.cumsum([len(each) for each in lone])
    found, following = Wire(b"".join(lone)).varints(ends - [len(each) for each in lone])
    assert (found.tolist(), following.tolist()) == (values, ends.tolist())
    padded = matrix(len(values), [varints(np.array(values, dtype=np.int64))])
    at = np.arange(len(values)) * padded.shape[1]
    found, following = Wire(padded.tobytes()).varints(at)
    assert (found.tolist(), following.tolist()) == (values, (at + padded.shape[1]).tolist())


def test_a_number_that_never_ends_is_none() -> None:
    assert Wire(b"\xff" * 12).varints(np.array([0]))[1].tolist() == [-1]


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 60), st.randoms())
def test_packets_are_found(packets: list[bytes], num_cut: int, random: Random) -> None:
    """Whatever stands in them, bytes that look like the begin of a packet among it."""
    packets = [each.replace(b"\x01", b"\x0a") for each in packets]
    text = b"".join(b"\x0a" + varint(len(each)) + each for each in packets)
    cut = max(len(text) - num_cut, 0)
    found = Wire(text[:cut]).packets()
    assert found is not None
    bounds = zip(found.start.tolist(), found.end.tolist(), strict=True)
    whole = [text[low:high] for low, high in bounds]
    assert whole == packets[: len(whole)]
    rest = b"".join(b"\x0a" + varint(len(each)) + each for each in packets[: len(whole)])
    assert found.rest == len(rest)
    assert len(whole) == len(packets) or len(rest) + len(packets[len(whole)]) + 2 > cut
