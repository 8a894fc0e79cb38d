"""Bytes and texts of columns: the same as one by one."""

from __future__ import annotations

import gzip
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from megascan.export import write_timeline
from megascan.export.chrome import coded_numbers, microsecond_texts, number_texts, row_texts
from megascan.export.protobuf import (
    begin,
    int_argument,
    interleaved,
    matrix,
    packets,
    real_argument,
    unsigned,
    varint,
    varints,
)
from megascan.export.writing import Block, _written, gzip_member
from megascan.overwriting import GrowingFile
from megascan.parallel import Here, across_threads

MADE_HERE = Block(2, b"two")
MADE_BY_WORKERS = Block(3, bytes, (b"three",))
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64))
def test_number_texts(values):
    texts = number_texts(np.array(values, dtype=np.int64)).to_pylist()
    assert texts == [f"{value}," for value in values]


@given(st.lists(st.integers(0, 50 * 86_400 * 10**9), min_size=1))
def test_microseconds_are_exact_for_fifty_days(values):
    texts = microsecond_texts(np.array(values, dtype=np.int64)).to_pylist()
    assert [round(json.loads(text[:-1]) * 1000) for text in texts] == values
    assert all(len(text[:-1].partition(".")[2]) <= 3 for text in texts)


@given(st.lists(st.tuples(INT64, st.integers(-1, 5), st.integers(0, 10**6)), min_size=1))
def test_fragments_are_the_texts_in_order(rows):
    columns = [
        coded_numbers(np.array(column, dtype=np.int64), lambda value, name=name: f"{name}{value} ")
        for name, column in zip("abc", zip(*rows, strict=True), strict=True)
    ]
    texts = [
        "".join(parts) for parts in zip(*(t.to_pylist() for t in row_texts(columns)), strict=True)
    ]
    assert texts == [f"a{a} b{b} c{c} " for a, b, c in rows]


@given(st.lists(INT64, min_size=1))
def test_packets_are_what_perfettos_own_classes_read(values):
    numbers = np.array(values, dtype=np.int64)
    times, tracks = np.abs(numbers // 2), np.arange(len(values)) + 1
    event = begin(tracks, tracks + 1, tracks + 2)
    event += int_argument(3, numbers) + real_argument(4, numbers / 3.0)
    trace = Trace.FromString(packets(times, event).tobytes())
    assert [packet.timestamp for packet in trace.packet] == times.tolist()
    for packet, value, track in zip(trace.packet, values, tracks.tolist(), strict=True):
        read = packet.track_event
        assert (read.type, read.track_uuid, read.name_iid) == (
            TrackEvent.TYPE_SLICE_BEGIN,
            track,
            track + 1,
        )
        assert list(read.category_iids) == [track + 2]
        whole, real = read.debug_annotations
        assert (whole.name_iid, whole.int_value) == (3, value)
        assert (real.name_iid, real.double_value) == (4, value / 3.0)


@given(st.lists(INT64), st.integers(1, 8))
def test_fewer_bytes_make_the_same_varints(values, num_bytes):
    numbers = np.array(values, dtype=np.int64) >> 8 * (8 - num_bytes)
    applies = numbers != -1
    plain = matrix(applies.sum(), [varints(numbers[applies])])
    assert np.array_equal(matrix(applies.sum(), [varints(unsigned(numbers)[applies])]), plain)


def test_varints_are_padded_to_one_width():
    assert varint(300) == b"\xac\x02"
    assert matrix(2, [b"x", varints(np.array([1, 300]))]).tobytes() == b"x\x81\x00x\xac\x02"


def test_interleaving_follows_the_row_numbers():
    odd = (np.array([1, 3]), np.array([[1, 1], [3, 3]], dtype=np.uint8))
    even = (np.array([0, 2]), np.array([[0], [2]], dtype=np.uint8))
    assert bytes(interleaved([odd, even])) == bytes([0, 1, 1, 2, 3, 3])
    assert bytes(interleaved([])) == b""


def test_protobuf_is_one_trace_for_perfettos_own_classes(tmp_path, make_timeline):
    path = tmp_path / "t.pftrace"
    count = write_timeline(make_timeline(), path)
    trace = Trace.FromString(path.read_bytes())
    assert len(trace.packet) == count
    uuids = [
        packet.track_descriptor.uuid
        for packet in trace.packet
        if packet.HasField("track_descriptor")
    ]
    assert len(set(uuids)) == len(uuids)
    used = {
        packet.track_event.track_uuid for packet in trace.packet if packet.HasField("track_event")
    }
    assert used <= set(uuids)


def test_members_in_a_row_are_one_file():
    blocks = [b"eins " * 1000, b"", b"zwei" * 10]
    assert gzip.decompress(b"".join(map(gzip_member, blocks))) == b"".join(blocks)
    assert gzip_member(blocks[0]) == gzip_member(blocks[0])


def test_across_threads_keeps_order_and_a_bounded_number_in_flight():
    asked = 0
    done = 0
    lock = threading.Lock()
    most = 0

    def items():
        nonlocal asked, most
        for number in range(50):
            asked += 1
            with lock:
                most = max(most, asked - done)
            yield number

    for place, result in enumerate(across_threads(lambda number: number * number, items(), 2)):
        done += 1
        assert result == place * place
    assert (done, most <= 5) == (50, True)


def test_across_threads_passes_errors_on():
    def work(number: int) -> int:
        return 1 // (3 - number)

    with pytest.raises(ZeroDivisionError):
        list(across_threads(work, range(10), 2))


@pytest.mark.parametrize(
    "blocks", [[], [MADE_HERE], [MADE_BY_WORKERS], [MADE_BY_WORKERS, MADE_HERE, MADE_BY_WORKERS]]
)
def test_the_head_stands_first_and_once(tmp_path, blocks):
    path = tmp_path / "written"
    with path.open("wb") as file:
        counts = list(_written(lambda: (1, b"one"), blocks, Here(1), False, GrowingFile(file)))
    assert counts == [1, *(block.num_events for block in blocks)]
    words = {2: b"two", 3: b"three"}
    assert path.read_bytes() == b"one" + b"".join(words[block.num_events] for block in blocks)
