"""Running the scripts as a user does: real bash, with stand-ins for what this machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Writes its variables and words to a file instead of training.
RECORDER = """#!/usr/bin/env bash
[[ $* != *check_flags.py* && $1 != -c ]] || exit 0
{ env | grep -E '^(OMP_|CUDA_DEV|GLOO|NCCL|PYTHON(PATH|UNB))' | sort; pwd
  printf '<%s>\\n' "$@"; } > "$RECORD"
exit "${CODE:-0}"
"""
GPUS = """#!/usr/bin/env bash
for ((i = 0; i < ${NUM_GPUS:-4}; i++)); do echo "GPU $i: Stand-in (UUID: GPU-$i)"; done
"""
ADDRESSES = """#!/usr/bin/env bash
echo "1: lo    inet 127.0.0.1/8 scope host lo\\\\ valid_lft forever"
echo "2: ib0    inet 10.1.0.2/24 brd 10.1.0.255 scope global ib0\\\\ valid_lft forever"
echo "2: ib0    inet6 fd00::2/64 scope global ib0\\\\ valid_lft forever"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Callable[[str, str], Path]:
    """Put a stand-in program first on the PATH of `run`: its name, and its text."""
    folder = tmp_path / "programs"
    folder.mkdir()

    def write(name: str, text: str) -> Path:
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)
        return program

    return write


@pytest.fixture
def gpus(programs: Callable[[str, str], Path]) -> None:
    """A machine with four GPUs, or as many as the variable NUM_GPUS says."""
    programs("nvidia-smi", GPUS)


@pytest.fixture
def addresses(programs: Callable[[str, str], Path]) -> None:
    """A machine whose address is 10.1.0.2."""
    programs("ip", ADDRESSES)


@pytest.fixture
def recorder(programs: Callable[[str, str], Path]) -> str:
    """An interpreter that trains nothing."""
    return str(programs("recorder", RECORDER))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script of scripts/ in an empty folder; variables given as None are taken away."""
    work = tmp_path / "work"
    work.mkdir()

    def start(
        script: str, *words: str, timeout_s: int = 100, cwd: Path = work, **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        path = REPOSITORY / "scripts" / script
        command = [sys.executable if script.endswith(".py") else "bash", str(path), *words]
        return subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s,
            env=environment(tmp_path, variables), stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return start


def environment(folder: Path, variables: dict[str, str | None]) -> dict[str, str]:
    """This interpreter, one thread a rank, no leftovers of another job."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("MEGASCAN", "SLURM", "TORCHELASTIC", "CUDA"))
            and name not in ("TP", "PP", "CP", "MODEL", "RUN_DIR", "DATA_PATH")}  # fmt: skip
    chosen = {
        "PATH": f"{folder / 'programs'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "MEGASCAN_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    kept.update({name: value for name, value in chosen.items() if value is not None})
    return kept
