"""The DDP model around a model that a trainer hands out is found, and nobody is disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from megascan.instrument.collectives import replica_of

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)

def model():
    return torch.nn.Linear(2, 2)

lone, inside, inside_compiled, compiled = model(), model(), model(), torch.compile(model())
replica = DistributedDataParallel(inside)
around_compiled = DistributedDataParallel(torch.compile(inside_compiled))
replica_of_compiled = DistributedDataParallel(compiled)
then_compiled = torch.compile(DistributedDataParallel(model()))
holder = torch.nn.Sequential(lone)

assert replica_of(lone) is lone
assert replica_of(inside) is replica
assert replica_of(replica) is replica
assert replica_of(inside_compiled) is around_compiled
assert replica_of(compiled) is replica_of_compiled
assert replica_of(then_compiled) is then_compiled

failures, is_over = [], threading.Event()

def build_tuples():
    while not is_over.is_set():
        try:
            tuple(number for number in range(2000))
        except SystemError as error:
            failures.append(error)

heap = [{number: [number]} for number in range(200_000)]
thread = threading.Thread(target=build_tuples)
thread.start()
for _ in range(20):
    replica_of(lone)
is_over.set()
thread.join()
assert not failures, failures
dist.destroy_process_group()
"""


@pytest.mark.timeout(120)
def test_the_replica_around_a_model_is_found_while_other_threads_build_tuples(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
