"""Small simulated jobs for the commands."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SMALL = ("--layers", 2, "--microbatches", 2)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def simulated(megascan: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Simulate a job of TP2 DP2 with these flags; gives its folder of rank files."""

    def make(name: str, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "trace"
        done = megascan("simulate", "--tp", 2, "--dp", 2, *SMALL, *flags, "-o", folder)
        assert done.returncode == 0, done.stderr
        return folder

    return make


@pytest.fixture(scope="session")
def faulty(simulated: Callable[..., Path]) -> Path:
    """Rank 2 of TP2 DP2 computes 1.3 times slower."""
    return simulated("faulty", "--fault", "rank=2,kind=compute,factor=1.3")


@pytest.fixture(scope="session")
def healthy(simulated: Callable[..., Path]) -> Path:
    return simulated("healthy")
