"""Kill trials: a process that writes windows as fast as it can is killed, again and again."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import time

import pytest

from megascan.reader.rank_files import read_rank_files

LIMIT = 200_000
WRITER = """
import pickle, sys
from pathlib import Path
from megascan.header import WindowRecord
from megascan.rankfile import LimitedFile, encode_spans, encode_window

header, compress, max_bytes = pickle.loads(sys.stdin.buffer.read())
file = LimitedFile(Path(sys.argv[1]), compress=compress, max_bytes=max_bytes)
file.begin_run(header)
print("begun", flush=True)
for number in range(1_000_000):
    spans = [("compute", f"span {n * number % 997}", 1, n, 1, {"iteration": number + 1})
             for n in range(50)]
    record = WindowRecord(run_id=header.run_id, window=number, first_iteration=number + 1,
                          last_iteration=number + 1, num_spans=50)
    file.append([*encode_spans(0, spans), encode_window(0, record)], record)
    print(number, flush=True)
"""


def write_until_killed(path, message, seconds):
    """The number of the last window that was durable before the kill."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdin.write(pickle.dumps(message))
    process.stdin.close()
    assert process.stdout.readline() == b"begun\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    lines = process.stdout.read().split(b"\n")[:-1]
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    return int(lines[-1]) if lines else -1


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("max_bytes", [0, LIMIT])
def test_a_kill_at_any_moment_loses_no_finished_window_and_the_next_run_appends(
    tmp_path, make_header, compress, max_bytes
):
    path = tmp_path / ("rank.json.gz" if compress else "rank.json")
    rng = random.Random(f"{compress} {max_bytes}")
    for trial in range(3):
        message = (make_header(run_id=f"run-{trial}"), compress, max_bytes)
        durable = write_until_killed(path, message, rng.uniform(0.05, 0.3))
        segments = {segment.header.run_id: segment for segment in read_rank_files([path])}
        newest = segments[f"run-{trial}"]
        found = [window.window for window in newest.windows]
        first = newest.header.num_windows_dropped
        assert found == list(range(first, first + len(found)))
        last = first + len(found) - 1
        assert last in (durable, durable + 1)  # one may be on disk that was not reported yet
        assert newest.spans.num_rows == 50 * len(found)
        if max_bytes:
            files = [entry.stat().st_size for entry in tmp_path.iterdir()]
            assert sum(files) <= max_bytes
        else:
            assert len(segments) == trial + 1
