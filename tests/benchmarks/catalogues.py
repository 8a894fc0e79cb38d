"""Whether a ground lists the same cases in each process."""

from __future__ import annotations

import subprocess
import sys


def assert_alike_in_each_process(ground: str) -> None:
    """Assert it of the first draw: nothing of it depends on how a process hashes or orders."""
    code = (
        f"from zlib import crc32; from benchmarks.grounds import {ground}; "
        f"print(crc32(repr(list({ground}.cases())).encode()))"
    )
    told = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(told) == 1
