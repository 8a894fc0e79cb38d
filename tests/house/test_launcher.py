"""The launcher of tests: ranks know who they are, and none outlives the others or the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import ranks

# A rank says a line in one piece, whatever another one says.
TOLD = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
os.write(1, (" ".join(os.environ[name] for name in names) + chr(10)).encode())
"""
STAYS = "import os, time; os.write(1, f'{os.getpid()}{chr(10)}'.encode()); time.sleep(60)"


def launcher(num_ranks: int, program: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-IS", str(ranks.LAUNCHER), sys.executable, str(num_ranks), "-c"]
    return subprocess.Popen([*words, program], stdout=subprocess.PIPE, text=True)


def test_ranks_are_told_who_they_are() -> None:
    process = launcher(2, TOLD)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert sorted(said.splitlines()) == ["0 0 2", "1 1 2"]


def test_a_rank_that_fails_ends_the_others() -> None:
    begun = time.monotonic()
    process = launcher(2, f"import os\nif os.environ['RANK'] == '1': os._exit(7)\n{STAYS}")
    process.communicate(timeout=50)
    assert process.returncode == 1
    assert time.monotonic() - begun < 30


def test_a_launcher_that_is_killed_takes_its_ranks_along() -> None:
    process = launcher(2, STAYS)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=50)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
