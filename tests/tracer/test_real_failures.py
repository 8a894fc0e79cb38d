"""What happens to real jobs: they go on or end as without tracing, and what was finished is read.

Every test starts the ranks of `failing_trainer.py` as processes of their own.
"""

from __future__ import annotations

import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from megascan.reader import read_trace
from tests import ranks
from tests.launcher import free_port

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
TRAINER = Path(__file__).with_name("failing_trainer.py")
LAST_GOOD, NUM_ITERATIONS = 20, 40
TOTAL = float(sum(2 * batch + 1 for batch in range(NUM_ITERATIONS)))


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    out: str
    err: str

    @property
    def warnings(self):
        return [line for line in self.err.splitlines() if "do not repeat it" in line]

    @property
    def totals(self):
        return [float(total) for total in re.findall(r"rank \d: ([\d.]+)", self.out)]


def run(trouble, folder):
    """Two ranks, each started by itself, so that each one's own end is seen."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            ranks.command_of(1, (TRAINER, trouble, folder)),
            env=ranks.environment(**place, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [one.communicate(timeout=120) for one in started]
    return Ended(
        [one.returncode for one in started],
        "".join(out for out, _ in outputs),
        "".join(err for _, err in outputs),
    )


def last_iterations(folder):
    trace = read_trace(folder, allow_missing_ranks=True)
    return [windows[-1].last_iteration for windows in trace.windows.values()]


def assert_trained(ended):
    assert ended.codes == [0, 0], ended.err[-3000:]
    assert ended.totals == [TOTAL, TOTAL]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 kB; None where one cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path, small_disk):
    """Of a real small disk, or else of a limit that fails every further write."""
    folder = small_disk or tmp_path / "trace"
    ended = run("none" if small_disk else "full_disk", folder)
    assert_trained(ended)
    (warning,) = ended.warnings
    assert warning.startswith("tracing stopped, training goes on without it: OSError")
    assert "No space left on device" in warning or "File too large" in warning
    assert all(0 < last < NUM_ITERATIONS for last in last_iterations(folder))


def test_a_folder_that_vanishes(tmp_path):
    """One rank may find its file gone and the other the folder: each trouble is said once."""
    ended = run("vanished_folder", tmp_path / "trace")
    assert_trained(ended)
    stopped = [line for line in ended.warnings if "tracing stopped" in line]
    troubles = [
        trouble
        for trouble in ("was removed while it was written", "No such file")
        if any(trouble in line for line in stopped)
    ]
    assert troubles and len(stopped) == len(troubles), ended.err[-3000:]


def test_a_folder_that_cannot_be_written_is_said_by_one_rank(tmp_path):
    (tmp_path / "file").write_text("no folder")
    ended = run("none", tmp_path / "file" / "trace")
    assert_trained(ended)
    assert len(ended.warnings) == 1
    assert ended.err.count("tracing stopped") == 1


@pytest.mark.alone
def test_a_disk_that_is_slow_holds_up_no_iteration(tmp_path):
    ended = run("slow_disk", tmp_path / "trace")
    assert_trained(ended)
    (warning,) = ended.warnings
    assert "the disk is 4 windows behind" in warning
    longest = [float(seconds) for seconds in re.findall(r"longest ([\d.]+) s", ended.out)]
    assert min(longest) < 0.29  # less than a single write takes; the machine may be slow itself
    trace = read_trace(tmp_path / "trace")
    for windows in trace.windows.values():
        assert 4 <= len(windows) < NUM_ITERATIONS // 2
        assert windows[-1].num_spans > 0


@pytest.mark.parametrize(
    ("trouble", "code"), [("killed", -signal.SIGKILL), ("terminated", -signal.SIGTERM)]
)
def test_a_rank_that_dies(tmp_path, trouble, code):
    ended = run(trouble, tmp_path / "trace")
    assert ended.codes == [1, code]  # rank 0 loses its peer, as it would without tracing
    assert ended.warnings == [] and ended.totals == []
    assert last_iterations(tmp_path / "trace") == [LAST_GOOD, LAST_GOOD]


def test_an_exception_in_mid_iteration(tmp_path):
    ended = run("exception", tmp_path / "trace")
    assert ended.codes == [1, 1]  # as without tracing
    assert "ValueError: the loss is not finite" in ended.err
    assert ended.warnings == []
    assert last_iterations(tmp_path / "trace") == [LAST_GOOD, LAST_GOOD]


def test_forked_loader_workers_write_nothing(tmp_path):
    folder = tmp_path / "trace"
    assert_trained(run("forked", folder))
    assert len(list(folder.iterdir())) == 2
    trace = read_trace(folder)
    assert last_iterations(folder) == [NUM_ITERATIONS, NUM_ITERATIONS]
    assert trace.completeness.notes == () and trace.completeness.num_unfinished_spans == 0


def test_a_restart_by_torchrun_appends_and_the_newest_run_is_read(tmp_path):
    folder = tmp_path / "trace"
    ranks.run(
        *("--max-restarts", "1", "--monitor-interval", "0.2", TRAINER, "restarted", folder),
        num_ranks=2,
        python=ranks.warm(),  # by torchrun
        # With the launcher's own store the second attempt meets the first one's addresses, and
        # gloo sometimes never connects; so with torch alone, traced or not.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        check=True,
    )
    trace = read_trace(folder)
    assert last_iterations(folder) == [NUM_ITERATIONS, NUM_ITERATIONS]
    (note,) = trace.completeness.notes
    earlier = re.search(r"also holds (\S+)", note)[1]
    first = read_trace(folder, run=earlier)
    lasts = [windows[-1].last_iteration for windows in first.windows.values()]
    assert all(0 < last <= LAST_GOOD for last in lasts)
