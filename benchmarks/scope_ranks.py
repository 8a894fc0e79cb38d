"""One rank of `benchmarks.scope --device gpu`: trains, is looked at in every second block, probed.

    torchrun … -m benchmarks.scope_ranks FOLDER FLAGS…

Rank 0 writes `times.json` into the folder: milliseconds of every iteration after the warm-up, and
of every probe. The probes themselves lie in the folder as in any job's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.overhead_ranks import CpuClock, GpuClock
from benchmarks.paired import OFF
from training import scope
from training.distributed import read_launch
from training.job import parse_job

NUM_WARMUP, BLOCK_LENGTH, NUM_PROBES = 6, 5, 8
MODES = [OFF, "statistics"] * 8 + [OFF]
NUM_MEASURED = NUM_WARMUP + BLOCK_LENGTH * len(MODES)


class Alternating(scope.ScopeCallback):
    """Looks in every second block; marks the begin of each iteration."""

    clock: ClassVar[CpuClock | GpuClock]

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Look while it is computed, if its block is looked at."""
        if iteration <= NUM_MEASURED + 1:
            self.clock.mark()
        block = (iteration - 1 - NUM_WARMUP) // BLOCK_LENGTH
        if 0 <= block < len(MODES) and MODES[block] != OFF:
            with super().iteration(iteration):
                yield
        else:
            yield


class Timed(scope.ProbeCallback):
    """Probes after the measured iterations, and says how long it takes."""

    times_ms: ClassVar[list[float]] = []

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        run, wait = self._probe.run, _waiting(str(given[-1]))

        def timed(forward: Any) -> tuple[str, ...]:
            wait()
            begun = time.perf_counter()
            sums = run(forward)
            wait()
            self.times_ms.append(1000 * (time.perf_counter() - begun))
            return sums

        self._probe.run = timed  # type: ignore[method-assign]

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Leave the measured iterations alone."""
        if iteration <= NUM_MEASURED:
            yield
        else:
            with super().iteration(iteration):
                yield


def _waiting(device: str) -> Any:
    """What waits until the device has done all that was launched."""
    import torch

    return (lambda: None) if device == "cpu" else torch.cuda.synchronize


def main() -> None:
    """Train; rank 0 writes the times."""
    folder, *flags = sys.argv[1:]
    launch = read_launch(os.environ)
    flags += ["--train-iters", str(NUM_MEASURED + NUM_PROBES), "--log-interval", str(2**30)]
    flags += ["--scope", "--scope-budget", "100", "--probe-interval", "1", "--trace-dir", folder]
    job = parse_job(flags, launch)
    Alternating.clock = CpuClock() if job.device == "cpu" else GpuClock()
    scope.ScopeCallback, scope.ProbeCallback = Alternating, Timed  # type: ignore[misc,assignment]
    with job.joined():
        job.train()
        times = Alternating.clock.lengths_ms()[NUM_WARMUP:]
    if launch.rank == 0:
        text = json.dumps({"iterations_ms": times, "probes_ms": Timed.times_ms})
        (Path(folder) / "times.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
