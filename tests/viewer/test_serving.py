"""The local server that hands a timeline to the UI."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megascan import viewer
from megascan.errors import InputError, MissingError, UsageError
from megascan.viewer import PERFETTO_UI, Spot, offline_server, online_server, serve


@pytest.fixture
def running():
    """Runs a server until it is done or the test is over."""
    started = []

    def run(server, forever=False):
        worker = threading.Thread(target=server.serve_until_fetched, kwargs={"forever": forever})
        worker.start()
        started.append((server, worker))
        return worker

    yield run
    for server, worker in started:
        server.fetched.set()
        server.shutdown()
        worker.join(10)
        server.server_close()
        assert not worker.is_alive()


def get(url: str, method: str = "GET"):
    return urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10)


def status_of(url: str, method: str = "GET") -> int:
    try:
        return get(url, method).status
    except urllib.error.HTTPError as error:
        return error.code


def test_online_server_hands_the_file_to_the_ui_and_ends(timeline_file, running):
    path = timeline_file("mein trace.json")
    server = online_server(path, port=0)
    worker = running(server)
    assert server.file_url.endswith("/trace/mein%20trace.json")
    answer = get(server.file_url)
    assert answer.headers["Access-Control-Allow-Origin"] == PERFETTO_UI
    assert answer.read() == path.read_bytes()
    worker.join(10)
    assert not worker.is_alive()


def test_online_server_has_nothing_else(timeline_file, running):
    server = online_server(timeline_file("t.json"), port=0)
    running(server)
    for path in ("/", "/status", "/trace/other.json", "/trace/../../etc/passwd"):
        assert status_of(server.own_url + path) == 404
    assert status_of(server.own_url + "/", "HEAD") == 404


def test_browsers_may_ask_first(timeline_file, running):
    server = online_server(timeline_file("t.json"), port=0)
    running(server)
    answer = get(server.file_url, "OPTIONS")
    assert answer.status == 204
    assert answer.headers["Access-Control-Allow-Private-Network"] == "true"


def test_offline_server_carries_the_ui(timeline_file, tmp_path, running):
    ui = tmp_path / "ui"
    ui.mkdir()
    (ui / "index.html").write_text("<title>UI</title>")
    (tmp_path / "secret.txt").write_text("secret")
    path = timeline_file("t.pftrace")
    server = offline_server(path, ui)
    running(server, forever=True)
    assert get(server.own_url + "/").read() == b"<title>UI</title>"
    assert get(server.own_url + "/index.html", "HEAD").status == 200
    assert get(server.file_url).read() == path.read_bytes()
    assert status_of(server.own_url + "/../secret.txt") == 404
    assert status_of(server.own_url + "/%2e%2e/secret.txt") == 404
    assert get(server.file_url).status == 200  # a second look: it does not end by itself


def test_taken_port_is_told(timeline_file):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MissingError, match=f"port {port} is in use.*--offline"):
            online_server(timeline_file("t.json"), port=port)


def test_offline_without_the_package(timeline_file, monkeypatch):
    monkeypatch.setattr("megascan.viewer._package", lambda name: None)
    with pytest.raises(MissingError, match=r"pip install 'megascan\[offline\]'"):
        serve(timeline_file("t.json"), offline=True, open_browser=False)


def test_missing_file_and_missing_spot(timeline_file, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        serve(tmp_path / "none.json")
    with pytest.raises(UsageError, match="no iteration 99"):
        serve(timeline_file("t.json"), at=Spot(rank=0, iteration=99))


def test_serve_opens_the_browser_at_the_spot(timeline_file, monkeypatch, capsys):
    path = timeline_file("t.json.gz")
    opened: list[str] = []
    served: list[Path] = []

    def fetch(server, *, forever):
        served.append(server.path)
        assert not forever

    monkeypatch.setattr(viewer, "PERFETTO_PORT", 0)
    monkeypatch.setattr(viewer, "online_server", lambda path: online_server(path, port=0))
    monkeypatch.setattr(viewer.TimelineServer, "serve_until_fetched", fetch)
    monkeypatch.setattr(viewer.webbrowser, "open", opened.append)
    serve(path, at=Spot(rank=1, iteration=6))
    assert served == [path]
    assert opened[0].startswith(PERFETTO_UI + "/#!/?url=http%3A%2F%2F127.0.0.1%3A")
    assert "visStart=300000" in opened[0]
    assert opened[0] in capsys.readouterr().out
