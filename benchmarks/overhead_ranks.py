"""One rank of `benchmarks.overhead`: trains models while tracing is switched on and off.

    torchrun … -m benchmarks.overhead_ranks PLAN.json

All models are trained one after the other in the same process group. Times are those between the
beginnings of iterations: on a GPU by CUDA events on the stream that computes, so that nothing is
synchronized for the sake of the measurement.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.paired import OFF
from megascan.config import TraceConfig
from megascan.errors import report_errors
from megascan.instrument import start
from megascan.schema import Granularity
from megascan.tracer import Tracer
from training.callback import Callback
from training.distributed import read_launch
from training.job import parse_job


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks are to do: trainer flags by model, and the modes of successive blocks."""

    models: dict[str, list[str]]
    modes: list[str]
    num_warmup: int
    block_length: int
    window: int
    folder: str

    @property
    def num_iterations(self) -> int:
        """Of each model."""
        return self.num_warmup + self.block_length * len(self.modes)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


DEFAULT, ARMED = "default", "armed"


def tracing_in(mode: str, window: int, directory: Path) -> TraceConfig:
    """Return the settings of a traced mode; ValueError if it is none.

    `base` and `full/4` are a granularity and a layer stride, with windows that follow on one
    another; `default` is what the flags do where nothing is said, `armed` what `--trace-armed` does
    until it is switched on.
    """
    if mode in {DEFAULT, ARMED}:
        return TraceConfig(enabled=True, directory=directory, armed=mode == ARMED)
    granularity, _, stride = mode.partition("/")
    return TraceConfig(
        enabled=True,
        directory=directory,
        interval=window,
        window=window,
        granularity=Granularity(granularity),
        layer_stride=int(stride or 1),
    )


class _Clock(Protocol):
    def mark(self) -> None: ...

    def lengths_ms(self) -> list[float]: ...


class CpuClock:
    """Marks on this host's clock."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Now."""
        self._marks.append(time.perf_counter())

    def lengths_ms(self) -> list[float]:
        """From each mark to the next."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(end - begin) * 1e3 for begin, end in pairs]


class GpuClock:
    """Marks on the current stream of the GPU."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """When the stream gets here."""
        self._marks.append(self._cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._marks[-1].record()

    def lengths_ms(self) -> list[float]:
        """From each mark to the next; waits for the device."""
        self._cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [begin.elapsed_time(end) for begin, end in pairs]


class Alternation(Callback):
    """Switches tracing at the begin of each block and marks the begin of each iteration."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        clock: _Clock,
        start: Callable[[TraceConfig], Tracer] = start,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._clock = clock
        self._start = start
        self._tracer = Tracer()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Mark the end of the last iteration as well."""
        yield
        self._clock.mark()
        self._tracer.close()

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Trace it if its block is traced."""
        self._clock.mark()
        block, within = divmod(iteration - 1 - self._plan.num_warmup, self._plan.block_length)
        if block >= 0 and within == 0:
            self._switch(block)
        with self._tracer.iteration(iteration):
            yield

    def _switch(self, block: int) -> None:
        self._tracer.close()
        mode = self._plan.modes[block]
        if mode == OFF:
            self._tracer = Tracer()
        else:
            directory = self._folder / f"block-{block}"
            self._tracer = self._start(tracing_in(mode, self._plan.window, directory))

    def times_ms(self) -> list[float]:
        """Of every iteration after the warm-up."""
        return self._clock.lengths_ms()[self._plan.num_warmup :]


def main(arguments: Sequence[str]) -> int:
    """Train every model of the plan; rank 0 writes `times.json` into the plan's folder."""
    plan = Plan.read(Path(arguments[0]))
    folder = Path(plan.folder)
    launch = read_launch(os.environ)
    length = ("--train-iters", str(plan.num_iterations), "--log-interval", str(2**30))
    jobs = {name: parse_job([*flags, *length], launch) for name, flags in plan.models.items()}
    times = {}
    with next(iter(jobs.values())).joined():
        for name, job in jobs.items():
            clock = CpuClock() if job.device == "cpu" else GpuClock()
            alternation = Alternation(plan, folder / name, clock)
            job.train([alternation])
            times[name] = alternation.times_ms()
            gc.unfreeze()  # the trainer froze the model that is to go now
            gc.collect()
    if launch.rank == 0:
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
