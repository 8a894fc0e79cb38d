"""Who runs the suite reads the name of a failing test when it fails, not at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAILING = """
import socket

import pytest

def test_right():
    pass

def test_counts_of_failures_are_sent_at_once(pytestconfig):
    counts = pytestconfig.failures_db.sock
    assert counts.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

def test_wrong():
    assert 1 == 2, "one line\\nthe last line"

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_without_disk(broken):
    pass
"""


def test_a_failure_is_named_once_when_it_happens(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_failing.py").write_text(FAILING)
    plugins = ("-p", "xdist", "-p", "pytest_rerunfailures", "-p", "pytest_timeout")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "1", "--reruns", "1", *plugins],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    before_the_end = done.stdout.partition("=== FAILURES")[0].partition("=== ERRORS")[0]
    named = [line for line in before_the_end.splitlines() if "test_failing.py::" in line]
    wrong = "test_failing.py::test_wrong (call): AssertionError: one line … assert 1 == 2"
    broken = "test_failing.py::test_without_disk (setup): OSError: no disk"
    assert named == [f"RERUN {wrong}", f"FAILED {wrong}", f"RERUN {broken}", f"FAILED {broken}"]
