"""One rank of `benchmarks.pipeline_runs --device gpu`: jobs one after the other, timed by events.

    torchrun … -m benchmarks.pipeline_runs_gpu_ranks FOLDER

FOLDER holds cases.json; every rank writes found.<rank>.json beside it anew after each case.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.jobs import run_python
from benchmarks.losses_ranks import be_deterministic
from megascan.errors import report_errors
from training.distributed import load_kernels_at_start, read_launch
from training.job import Job, parse_job
from training.pipeline.plan import Action

Function = Callable[..., object]
TIMELINE = "timeline.json.gz"
"""In the folder of the run's files; flags of cases name it without the folder."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule."""

    name: str
    flags: list[str]
    traced: bool = False
    """Whether its trace becomes the timeline that other cases plan from."""
    late_ratio: float = 0.0
    """Share of messages that come late, by two forwards of a rank; plans only."""
    by_nccl: bool = False
    """Whether messages of plans go by NCCL, as between hosts."""

    def flags_in(self, folder: Path) -> list[str]:
        """Return the flags with the timeline found in the folder of the run's files."""
        return [str(folder / TIMELINE) if word == TIMELINE else word for word in self.flags]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank measured in one case; times in seconds."""

    steps_s: list[float]
    iterations_s: list[float]
    losses: list[str]
    """Exact digits; of the last rank only."""
    passes_s: dict[str, float]
    """Median by kind and stage, as in ``F0``."""
    last_s: float
    """End of the step, after the last pass."""
    message_s: float
    peak_gib: float


@dataclass
class _Notes:
    """What is noted while a case runs."""

    steps_s: list[float] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    passes: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        """Median of what was timed under a name, without the first quarter."""
        times = [begin.elapsed_time(end) / 1e3 for begin, end in self.passes[name]]
        return float(statistics.median(times[len(times) // 4 :]))


_LAST = "last"
_SLEEP_HZ = 1.7e9
"""Cycles of `torch.cuda._sleep` in a second, about."""


class _Bench:
    """Everything put in place of parts of the trainer."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        from training import loop, step
        from training.log import TrainingLog
        from training.pipeline import channels, copies, dynamic, executor
        from training.pipeline.split_backward import WeightGradients

        self.notes = _Notes()
        self._rank = int(os.environ["RANK"])
        self._action: Action | None = None
        self._late_ratio = 0.0
        self._late_s = 0.0
        self._draw = random.Random(11 + self._rank)
        self._device_for = copies.device_for
        self._start = channels.start
        schedules.forward_step = self._timed("F", schedules.forward_step)
        schedules.backward_step = self._timed("B", schedules.backward_step)
        compute = WeightGradients.compute
        WeightGradients.compute = self._timed("W", compute)  # type: ignore[method-assign,assignment]
        step.finalize_model_grads = self._timed(_LAST, step.finalize_model_grads)  # type: ignore[attr-defined]
        loop.run_schedule = self._step(loop.run_schedule)  # type: ignore[attr-defined,assignment]
        channels.start = dynamic.start = self._begin  # type: ignore[attr-defined,assignment]
        do, add = executor.Step.do, TrainingLog.add

        def watched_do(step: executor.Step, action: Action) -> None:
            self._action = action
            do(step, action)

        def note(log: TrainingLog, result: object, consumed: int) -> None:
            loss = result.loss  # type: ignore[attr-defined]
            if loss is not None:
                self.notes.losses.append(float(loss).hex())
            add(log, result, consumed)  # type: ignore[arg-type]

        executor.Step.do = watched_do  # type: ignore[method-assign,assignment]
        TrainingLog.add = note  # type: ignore[method-assign,assignment]

    def _timed(self, kind: str, original: Function) -> Function:
        """Put events around a pass."""

        @wraps(original)  # the tracer looks for arguments by their names
        def timed(*positional: object, **named: object) -> object:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            result = original(*positional, **named)
            end.record()
            self.notes.passes.setdefault(self._name(kind), []).append((begin, end))
            return result

        return timed

    def _name(self, kind: str) -> str:
        """The pass under way, as in ``I3``; Megatron-Core's are those of one stage a rank."""
        if kind == _LAST:
            return kind
        if self._action is None:
            return f"{kind}{self._rank}"
        own = self._action.kind if kind == "B" else kind
        return f"{own}{self._action.stage}"

    def _step(self, original: Function) -> Function:
        """Time a step from an idle device to an idle device."""
        import torch.distributed as dist

        def timed(*positional: object, **named: object) -> object:
            torch.cuda.synchronize()
            dist.barrier()
            self._action = None
            begin_s = time.perf_counter()
            self.notes.begins_s.append(begin_s)
            result = original(*positional, **named)
            torch.cuda.synchronize()
            dist.barrier()
            self.notes.steps_s.append(time.perf_counter() - begin_s)
            return result

        return timed

    def _begin(self, transfer: object, tensor: torch.Tensor, way: object) -> object:
        """In place of `channels.start`: some messages leave late, those behind them too."""
        sends = str(transfer.operation) == "send"  # type: ignore[attr-defined]
        if sends and self._late_ratio and self._draw.random() < self._late_ratio:
            with way._device.aside(tensor):  # type: ignore[attr-defined]
                torch.cuda._sleep(round(self._late_s * _SLEEP_HZ))  # type: ignore[no-untyped-call]
        return self._start(transfer, tensor, way)  # type: ignore[arg-type]

    def run(self, case: Case, job: Job, late_s: float) -> Found:
        """Train one case."""
        from megatron.core import parallel_state

        from training.pipeline import copies

        parallel_state.set_virtual_pipeline_model_parallel_world_size(
            job.sizes.virtual_pipeline_size
        )
        self.notes, self._action = _Notes(), None
        self._late_ratio, self._late_s = case.late_ratio, late_s
        copies.device_for = _none if case.by_nccl else self._device_for
        torch.cuda.reset_peak_memory_stats()
        job.train()
        torch.cuda.synchronize()
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        notes = self.notes
        begins = notes.begins_s
        return Found(
            steps_s=notes.steps_s,
            iterations_s=[after - before for before, after in pairwise(begins)],
            losses=notes.losses,
            passes_s={name: notes.median_s(name) for name in notes.passes if name != _LAST},
            last_s=notes.median_s(_LAST),
            message_s=_message_s(job),
            peak_gib=peak_gib,
        )


def _none(device: str) -> None:
    """No copies."""


def _message_s(job: Job) -> float:
    """Half of a round trip of one message between neighbours, all pairs of them at once."""
    import torch.distributed as dist

    model = job.settings.model
    assert model.seq_length is not None and model.hidden_size is not None
    shape = (model.seq_length, 1, model.hidden_size)
    message = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    rank = dist.get_rank()
    is_first, mate = rank % 2 == 0, rank ^ 1
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for sends in (is_first, not is_first):
            (dist.send if sends else dist.recv)(message, mate)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin_s) / 2)
    return statistics.median(times)


def _tracing(folder: Path) -> tuple[str, ...]:
    """Flags that trace half of the iterations."""
    every = ("--trace-interval", "4", "--continuous-trace-iterations", "2")
    return ("--trace", "--trace-dir", str(folder), *every)


def _aggregate(folder: Path, timeline: Path) -> None:
    """Make a timeline of a trace, on the first rank."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        run_python(["aggregate.py", "-b", str(folder), "-o", str(timeline)])
    dist.barrier()


def main(arguments: Sequence[str]) -> int:
    """Train all cases in one process group."""
    folder = Path(arguments[0])
    cases = [Case(**c) for c in json.loads((folder / "cases.json").read_text(encoding="utf-8"))]
    launch = read_launch(os.environ)
    load_kernels_at_start()
    be_deterministic()
    results: list[Found] = []
    with parse_job(cases[0].flags, launch).joined():
        bench = _Bench()
        for case in cases:
            trace = folder / "trace"
            words = [*case.flags_in(folder), *(_tracing(trace) if case.traced else ())]
            job = parse_job(words, launch)
            late_s = 2 * results[0].passes_s[f"F{launch.rank}"] if results else 0.0
            results.append(bench.run(case, job, late_s))
            if case.traced:
                _aggregate(trace, folder / TIMELINE)
            out = folder / f"found.{launch.rank}.json"
            out.write_text(json.dumps([asdict(one) for one in results]), encoding="utf-8")
            if launch.rank == 0:
                print(f"{case.name}: {statistics.median(results[-1].steps_s):.4f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
