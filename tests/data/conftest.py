"""The real commands, run as a user runs them, and small corpora."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ranks

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Run ``python -m MODULE ARGUMENTS…`` in an empty folder."""

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return ranks.run("-m", module, *arguments, cwd=tmp_path, timeout_s=120)

    return run


@pytest.fixture
def texts() -> list[str]:
    """Several batches' worth of documents of very different lengths."""
    return [f"document {i} " + f"word{i} " * (1 + i * 37 % 400) for i in range(700)]


@pytest.fixture
def jsonl(tmp_path: Path, texts: list[str]) -> Path:
    """The texts as JSON Lines."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
