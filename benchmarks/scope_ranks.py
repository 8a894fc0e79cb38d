"""One rank of `benchmarks.scope --device gpu`: trains, is looked at in every second block, probed.

    torchrun … -m benchmarks.scope_ranks FOLDER NUM_SOUND NUM_PLANTED FLAGS…

Rank 0 writes `times.json` into the folder: milliseconds of every iteration after the warm-up, and
of every probe. The probes themselves lie in the folder as in any job's: some between iterations,
then `NUM_SOUND` in a row, then some while one bit of rank 1 is wrong, which rank 1 names in
`planted.json`, by the number of the iteration that the probe bears.
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
from benchmarks.planted_bits import BFLOAT16_MANTISSA_BITS, MANTISSA_BITS, trials
from training import scope
from training.distributed import read_launch
from training.job import parse_job

NUM_WARMUP, BLOCK_LENGTH, NUM_PROBES = 6, 5, 8
MODES = [OFF, "statistics"] * 8 + [OFF]
NUM_MEASURED = NUM_WARMUP + BLOCK_LENGTH * len(MODES)
FIRST_SOUND = 1000
FIRST_PLANTED = 1_000_000
WRONG_RANK = 1


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
    """Probes after the measured iterations, says how long it takes, and goes on probing."""

    times_ms: ClassVar[list[float]] = []
    planted: ClassVar[dict[int, str]] = {}
    num_sound: ClassVar[int]
    num_planted: ClassVar[int]

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
            return
        with super().iteration(iteration):
            yield
        if iteration == NUM_MEASURED + NUM_PROBES:
            self._go_on()

    def _go_on(self) -> None:
        """Probe sound replicas, then with one of them wrong."""
        from megatron.core.utils import unwrap_model

        for number in range(self.num_sound):
            self._probe_as(FIRST_SOUND + number)
        model = unwrap_model(self._chunks)[0]
        kind = next(model.parameters()).dtype
        num_bits = MANTISSA_BITS if kind.itemsize == 4 else BFLOAT16_MANTISSA_BITS
        is_wrong = int(os.environ["RANK"]) == WRONG_RANK
        faults = trials(model, self.num_planted, seed=23, num_bits=num_bits) if is_wrong else None
        for number in range(FIRST_PLANTED, FIRST_PLANTED + self.num_planted):
            if faults is None:
                self._probe_as(number)
                continue
            self.planted[number], fault = next(faults)
            with fault:
                self._probe_as(number)

    def _probe_as(self, iteration: int) -> None:
        for chunk in self._chunks:
            chunk.eval()
        self._file.append(iteration, self._probe.points, self._probe.run(self._forward))


def _waiting(device: str) -> Any:
    """What waits until the device has done all that was launched."""
    import torch

    return (lambda: None) if device == "cpu" else torch.cuda.synchronize


def main() -> None:
    """Train; rank 0 writes the times."""
    folder, num_sound, num_planted, *flags = sys.argv[1:]
    Timed.num_sound, Timed.num_planted = int(num_sound), int(num_planted)
    launch = read_launch(os.environ)
    flags += ["--train-iters", str(NUM_MEASURED + NUM_PROBES), "--log-interval", str(2**30)]
    flags += ["--scope", "--scope-budget", "100", "--probe-interval", "1", "--trace-dir", folder]
    job = parse_job(flags, launch)
    Alternating.clock = CpuClock() if job.device == "cpu" else GpuClock()
    scope.ScopeCallback, scope.ProbeCallback = Alternating, Timed  # type: ignore[misc,assignment]
    with job.joined():
        job.train()
        times = Alternating.clock.lengths_ms()[NUM_WARMUP:]
    if launch.rank == WRONG_RANK:
        text = json.dumps(Timed.planted)
        (Path(folder) / "planted.json").write_text(text, encoding="utf-8")
    if launch.rank == 0:
        text = json.dumps({"iterations_ms": times, "probes_ms": Timed.times_ms})
        (Path(folder) / "times.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
