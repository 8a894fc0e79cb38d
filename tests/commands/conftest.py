"""The real commands in subprocesses, on a small simulated job."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def _megascan(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megascan", *map(str, words)],
        cwd=cwd or ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


@pytest.fixture(scope="session")
def megascan() -> Run:
    return _megascan


def _simulated(folder: Path, *flags: str) -> Path:
    done = _megascan("simulate", "--tp", 2, "--dp", 2, "--layers", 4, *flags, "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 2 of TP2 DP2 computes 1.3 times slower."""
    folder = tmp_path_factory.mktemp("faulty") / "trace"
    return _simulated(folder, "--fault", "rank=2,kind=compute,factor=1.3")


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _simulated(tmp_path_factory.mktemp("healthy") / "trace")
