"""The timeline's own record at the head of a file, without reading the rest."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import orjson
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

from megascan.errors import InputError
from megascan.header import Json
from megascan.schema import TIMELINE_EVENT

_GZIP_MAGIC = b"\x1f\x8b"
_PACKET_TAG = b"\x0a"
_LARGEST_PACKET = 1 << 30


def read_record(path: Path) -> Mapping[str, Json]:
    """The record of a timeline file. Raises InputError for anything that is not one of ours."""
    try:
        with path.open("rb") as raw:
            gzipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if gzipped else raw
            record = _found(file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: cannot be read ({error}); check its path and permissions"
        ) from error
    if record is None:
        raise InputError(f"{path}: is not a merged timeline; make one with megascan aggregate")
    return record


def _found(file: BinaryIO) -> Mapping[str, Json] | None:
    head = file.read(1)
    if head == b"[":
        file.readline()
        return _chrome_record(file.readline())
    if head != _PACKET_TAG:
        return None
    for packet in _packets(file):
        event = packet.track_event
        if event.name == TIMELINE_EVENT and event.debug_annotations:
            return _mapping(event.debug_annotations[0].string_value)
        if packet.HasField("track_event"):
            return None
    return None


def _chrome_record(line: bytes) -> Mapping[str, Json] | None:
    event = _mapping(line.strip().rstrip(b","))
    if event is None or event.get("name") != TIMELINE_EVENT:
        return None
    args = event.get("args")
    return args if isinstance(args, dict) else None


def _mapping(text: str | bytes) -> Mapping[str, Json] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _packets(file: BinaryIO) -> Iterator[TracePacket]:
    """Packets of a trace whose first tag has been read, as long as they make sense."""
    while True:
        packet = file.read(_length(file))
        try:
            yield TracePacket.FromString(packet)
        except DecodeError:
            return
        if file.read(1) != _PACKET_TAG:
            return


def _length(file: BinaryIO) -> int:
    """A varint; 0 at the end of the file and for more than any packet holds."""
    value = 0
    for shift in range(0, 35, 7):
        byte = file.read(1)
        if not byte:
            return 0
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            break
    return value if value <= _LARGEST_PACKET else 0
