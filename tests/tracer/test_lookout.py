from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megascan.tracer import Lookout
from megascan.tracer.lookout import read_standstills, standstill_path
from tests import ranks

RUN = "20261121-084512-3f9a"


class Training:
    """A lookout on this thread, looking fast; `iteration` is what the test sets."""

    def __init__(self, folder: Path, header) -> None:
        self.iteration, self.folder = 0, folder
        self.lookout = Lookout(
            folder, header, lambda: self.iteration, look_s=0.01, least_patience_s=0.3
        )

    def trains(self, num_iterations: int = 3) -> None:
        for _ in range(num_iterations):
            self.iteration += 1
            time.sleep(0.05)

    def said(self, wait_s: float = 3.0):
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            found = [each for each, _ in read_standstills([self.folder], RUN)]
            if found:
                return found[0]
            time.sleep(0.01)
        return None


@pytest.fixture
def training(tmp_path, make_header):
    made = Training(tmp_path, make_header(rank=1))
    yield made
    made.lookout.tracing_ends()


def test_nothing_is_written_while_training_goes_on(training):
    training.trains(20)
    assert list(training.folder.iterdir()) == []


def test_a_standstill_is_written_and_taken_away_when_training_goes_on(training):
    training.trains()
    found = training.said()
    assert (found.rank, found.iteration, found.run_id) == (1, 3, RUN)
    assert found.process_id == os.getpid()
    assert found.operation == ""
    assert found.frames[0].startswith("said (test_lookout.py:")
    assert found.words == f"in {found.frames[0]}, iteration 3"
    training.trains(1)
    deadline = time.monotonic() + 5.0
    while list(training.folder.iterdir()) and time.monotonic() < deadline:
        training.trains(1)
    assert list(training.folder.iterdir()) == []


def test_it_is_written_again_while_it_lasts_and_goes_with_the_end_of_tracing(training):
    training.trains()
    training.said()
    path = standstill_path(training.folder, 1)
    first = path.stat().st_mtime_ns
    deadline = time.monotonic() + 10.0
    while path.stat().st_mtime_ns == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.stat().st_mtime_ns > first
    training.lookout.tracing_ends()
    assert not path.exists()
    assert "megascan-lookout" not in {thread.name for thread in threading.enumerate()}


def test_a_folder_that_refuses_costs_nothing(make_header, tmp_path):
    made = Training(tmp_path / "not there", make_header(rank=1))
    made.trains()
    assert made.said(1.0) is None
    assert any(thread.name == "megascan-lookout" for thread in threading.enumerate())
    made.lookout.tracing_ends()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"schema": 2}', b'{"schema": 1, "run_id": "x"}', b"\xff" * 100_000],
)
def test_what_is_damaged_is_passed_over(tmp_path, content):
    standstill_path(tmp_path, 3).write_bytes(content)
    assert list(read_standstills([tmp_path], RUN)) == []


HANGING = """
import sys, threading, time
from dataclasses import replace
from pathlib import Path
import torch, torch.distributed as dist
from megascan.header import RankHeader
from megascan.tracer.lookout import read_standstills
from megascan.tracer import Lookout

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
pair = dist.new_group([0, 1])
header = RankHeader.from_json(__import__("json").loads((folder / "header").read_text()), "header")
header = replace(header, rank=rank, groups={"world@0": (0, 1, 2, 3), "tp@0": (0, 1)})
now = [1]
lookout = Lookout(folder, header, lambda: now[0], look_s=0.05, least_patience_s=0.5)
for _ in range(3):
    dist.all_reduce(torch.ones(3))
    time.sleep(0.2)
    now[0] += 1
if rank == 0:
    dist.all_reduce(torch.ones(3), group=pair)
elif rank == 1:
    dist.recv(torch.ones(3), src=2)
elif rank == 3:
    with dist._coalescing_manager(async_ops=False):
        dist.reduce_scatter_tensor(torch.ones(1), torch.ones(4))
else:
    time.sleep(600)
"""


def test_real_ranks_say_in_which_collective_they_stand(tmp_path, make_header):
    """Four ranks on gloo: in a collective of two, receiving, asleep, in a coalesced collective."""
    (tmp_path / "header").write_text(json.dumps(make_header().to_json()))
    started = [ranks.start("-c", HANGING, rank, tmp_path) for rank in range(4)]
    try:
        found = {}
        deadline = time.monotonic() + 120.0
        while len(found) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
            found = {each.rank: each for each, _ in read_standstills([tmp_path], RUN)}
        assert [each.returncode for each in started] == [None] * 4
        assert found[0].words == "in all_reduce of group tp@0, iteration 4"
        assert (found[1].operation, found[1].peer) == ("recv", 2)
        assert found[2].operation == ""
        assert found[2].frames[0].startswith("<module> (<string>:")
        assert found[3].words == "in coalescing_manager of group world@0, iteration 4"
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.communicate()
