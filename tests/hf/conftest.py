"""Random models that transformers has written, once for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models of all families, each with its logits (see models.py)."""
    folder = tmp_path_factory.mktemp("models")
    made = subprocess.run(
        [sys.executable, str(HERE / "models.py"), str(folder)],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def run() -> Run:
    """Run Python with some words, on one rank or by torchrun on several."""

    def start(
        *words: object, num_ranks: int = 1, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        launcher: Sequence[str] = ()
        if num_ranks > 1:
            launcher = ("-m", "torch.distributed.run", "--standalone")
            launcher = (*launcher, "--nproc-per-node", str(num_ranks))
        return subprocess.run(
            [sys.executable, *launcher, *map(str, words)],
            cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    return start
