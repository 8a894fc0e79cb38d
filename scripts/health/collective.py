"""Check an all-reduce across this machine's GPUs (NCCL), or across processes on the CPU (gloo).

The processes find each other through a file, so no port is needed and no other job is disturbed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from health.check import Check, Status

_NUM_ROUNDS = 5
_SIZE = 4 * 1024 * 1024  # float32 elements: 16 MiB


def check_collective(num_ranks: int, device: str, timeout_s: float) -> Check:
    """Check that all ranks get the right sum within `timeout_s`; `device` is cpu or cuda."""
    backend = "nccl" if device == "cuda" else "gloo"
    name = f"{backend} all-reduce"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "health.collective", str(Path(folder) / "store"), backend]
        command += [str(num_ranks), str(timeout_s)]
        ranks = [_start([*command, str(rank)]) for rank in range(num_ranks)]
        try:
            answers = [rank.communicate(timeout=timeout_s + 30) for rank in ranks]
        except subprocess.TimeoutExpired:
            text = f"{num_ranks} ranks did not finish within {timeout_s:g} s"
            return Check(name=name, status=Status.PROBLEM, text=text)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return _judge(name, [rank.returncode for rank in ranks], answers)


def _start(command: list[str]) -> subprocess.Popen[str]:
    scripts = Path(__file__).parents[1]
    path = os.pathsep.join([str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _judge(name: str, codes: list[int], answers: list[tuple[str, str]]) -> Check:
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        said = [line for line in answers[failed[0]][1].splitlines() if line.strip()]
        last = said[-1] if said else f"exit code {codes[failed[0]]}"
        text = f"rank {failed[0]} of {len(codes)} failed: {last}"
        return Check(name=name, status=Status.PROBLEM, text=text)
    times_s = [float(json.loads(answer[0].splitlines()[-1])) for answer in answers]
    size_bytes = 4 * _SIZE
    # Each byte crosses the slowest link 2 (n - 1) / n times in a ring.
    bandwidth_gbps = size_bytes * 2 * (len(codes) - 1) / len(codes) / max(times_s) / 1e9
    text = f"{len(codes)} ranks, {size_bytes / 1e6:.0f} MB in {max(times_s) * 1e3:.1f} ms"
    values = {"num_ranks": len(codes), "time_s": max(times_s), "bus_gbytes_per_s": bandwidth_gbps}
    return Check(name=name, status=Status.OK, text=text, values=values)


def run_rank(store: str, backend: str, num_ranks: int, timeout_s: float, rank: int) -> float:
    """Return the best time of an all-reduce in s; raises RuntimeError for a wrong sum."""
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank,
                            world_size=num_ranks, timeout=timedelta(seconds=timeout_s))  # fmt: skip
    times_s = []
    for number in range(_NUM_ROUNDS):
        numbers = torch.full((_SIZE,), float(rank + number), device=device)
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_reduce(numbers)
        found = float(numbers[-1])  # waits for the device
        times_s.append(time.perf_counter() - started_s)
        expected = sum(range(num_ranks)) + num_ranks * number
        if found != expected or float(numbers.min()) != expected:
            raise RuntimeError(f"the sum of all ranks is {found}, expected {expected}")
    dist.destroy_process_group()
    return min(times_s)


if __name__ == "__main__":
    print(
        run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    )
