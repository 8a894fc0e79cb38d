"""Random models that transformers has written, once for all tests."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ranks
from tests.launcher import free_ports

HERE = Path(__file__).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of some commands."""

    codes: list[int]
    errors: list[str]
    """What each wrote to stderr."""
    output: str
    """What all wrote to stdout."""


RunAll = Callable[..., Ran]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models of all families, each with its logits (see models.py)."""
    folder = tmp_path_factory.mktemp("models")
    ranks.run(HERE / "models.py", folder, check=True, PYTHONWARNINGS="ignore")
    return folder


@pytest.fixture(scope="session")
def run() -> Run:
    """Run Python with some words, on one rank or by torchrun on several."""

    def start(
        *words: object, num_ranks: int = 1, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        return ranks.run(*words, num_ranks=num_ranks, timeout_s=timeout_s, PYTHONWARNINGS="ignore")

    return start


@pytest.fixture(scope="session")
def run_all(run: Run) -> RunAll:
    """Run commands (a module of `training` and its words) one after the other in the same ranks."""

    def start(*commands: Sequence[object], num_ranks: int = 1) -> Ran:
        words = json.dumps([[str(word) for word in command] for command in commands])
        ports = free_ports(len(commands))
        done = run(HERE / "commands.py", json.dumps(ports), words, num_ranks=num_ranks)
        parts = re.split(r"^CODE (\d+)\n", done.stderr, flags=re.MULTILINE)
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(parts) == 2 * len(commands) + 1, done.stderr[-3000:]
        return Ran(codes=[*map(int, parts[1::2])], errors=parts[:-1:2], output=done.stdout)

    return start
