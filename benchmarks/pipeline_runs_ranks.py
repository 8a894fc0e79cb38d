"""One rank of `benchmarks.pipeline_runs`: jobs whose compute is slept, one after the other.

    torchrun … -m benchmarks.pipeline_runs_ranks CASES.json OUT

Every pass runs as always and then sleeps until it has taken what the case says: F, 2 F backward, or
1.05 F and 0.95 F for its halves, divided by the chunks of a rank. So real processes, transport and
choices are measured, and cores that are shared cost nothing as long as the passes are short.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megascan.errors import report_errors
from training.distributed import read_launch
from training.job import Job, parse_job


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule under one disturbance; times in seconds."""

    name: str
    flags: list[str]
    forward_s: float
    slow: dict[str, float] = field(default_factory=dict)
    """Global rank (as JSON has it) to how many times as long it takes."""
    late_ratio: float = 0.0
    """Share of messages that come late, by two forwards; plans only."""
    repeats: bool = False
    """Whether every forward is repeated: in the backward pass, or as an action of its own."""
    helper_speed: float = 1.0
    """Of the helpers that the flags start, over that of a rank."""
    helper_dies_after: int = 0
    """Forwards of a stage after which a helper ends in the middle of one; 0: never."""


class _Diary:
    """When this rank did what in each step, by the host's one clock.

    `passes_s` and `overheads_s` (of an action, beside its pass and its wait) are durations; `sent`
    and `waited` are messages (direction, stage, microbatch) with the time when they left or, where
    this rank stood waiting, came; `begins_s` and `ends_s` are those of steps, `last_s` of the last
    action of each.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin another case."""
        self.passes_s: dict[str, list[float]] = {"forward": [], "backward": [], "weights": []}
        self.overheads_s: list[float] = []
        self.sent: list[tuple[str, float]] = []
        self.waited: list[tuple[str, float]] = []
        self.begins_s: list[float] = []
        self.ends_s: list[float] = []
        self.last_s: list[float] = []
        self._inside_s = 0.0

    def note_pass(self, name: str, seconds: float) -> None:
        """A pass has ended."""
        self.passes_s[name].append(seconds)
        self._inside_s += seconds

    def install(self) -> None:
        """Watch every action and message of plans."""
        from training.pipeline import channels, executor

        do, send, take = executor.Step.do, channels.SendQueue.send, channels.Inbox.take

        def watched_do(step: executor.Step, action: object) -> None:
            self._inside_s, begin_s = 0.0, time.perf_counter()
            do(step, action)  # type: ignore[arg-type]
            end_s = time.perf_counter()
            self.overheads_s.append(end_s - begin_s - self._inside_s)
            self.last_s[len(self.begins_s) - 1 :] = [end_s]

        def watched_send(box: object, message: tuple[object, ...], *rest: object) -> None:
            self.sent.append((self._name(message), time.perf_counter()))
            send(box, message, *rest)  # type: ignore[arg-type]

        def watched_take(box: object, message: tuple[object, ...]) -> object:
            begin_s = time.perf_counter()
            tensor = take(box, message)  # type: ignore[arg-type]
            end_s = time.perf_counter()
            self._inside_s += end_s - begin_s
            if end_s - begin_s > _STOOD_S:
                self.waited.append((self._name(message), end_s))
            return tensor

        executor.Step.do = watched_do  # type: ignore[method-assign,assignment]
        channels.SendQueue.send = watched_send  # type: ignore[method-assign,assignment]
        channels.Inbox.take = watched_take  # type: ignore[method-assign,assignment]

    def _name(self, message: tuple[object, ...]) -> str:
        return f"{len(self.begins_s)} {' '.join(map(str, message))}"


_STOOD_S = 2e-3
"""A rank that got its message sooner has not waited for it."""


class _Sleeper:
    """Stretches passes to the case's times."""

    def __init__(self, diary: _Diary) -> None:
        self.diary = diary
        self.forward_s = 0.0
        self.split = False
        self.repeats_inside = False

    def take(self, case: Case, rank: int, num_chunks: int) -> None:
        """Sleep as a case says from now on."""
        self.forward_s = case.forward_s * case.slow.get(str(rank), 1.0) / num_chunks
        self.split = False

    def stretch(
        self, name: str, original: Callable[..., object], ratio: Callable[[], float]
    ) -> object:
        """A pass that takes `ratio` forwards."""

        def stretched(*positional: object, **named: object) -> object:
            begin_s = time.perf_counter()
            result = original(*positional, **named)
            wanted_s = self.forward_s * ratio() if torch.is_grad_enabled() else 0.0
            time.sleep(max(0.0, wanted_s - (time.perf_counter() - begin_s)))
            self.diary.note_pass(name, time.perf_counter() - begin_s)
            return result

        return stretched

    def stretch_weights(self, original: Callable[..., None]) -> Callable[..., None]:
        """The second half of a backward pass."""

        def stretched(owner: object, microbatch: int, chunk: int) -> None:
            begin_s = time.perf_counter()
            original(owner, microbatch, chunk)
            wanted_s = self.forward_s * 0.95
            time.sleep(max(0.0, wanted_s - (time.perf_counter() - begin_s)))
            self.diary.note_pass("weights", time.perf_counter() - begin_s)

        return stretched


class _LateWork:
    """Stands for a send that leaves late."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def wait(self) -> None:
        """Wait until it has left."""
        self.left.wait()

    def is_completed(self) -> bool:
        """Whether it has left."""
        return self.left.is_set()


class _LateSends:
    """Sends on a thread a channel, so that a late one holds up those behind it and nothing else."""

    def __init__(self, original: Callable[..., object]) -> None:
        self._original = original
        self._queues: dict[object, queue.Queue[tuple[object, ...]]] = {}
        self._random = random.Random(11 + int(os.environ.get("RANK", "0")))
        self.late_ratio = 0.0
        self.late_s = 0.0

    def start(self, transfer: object, tensor: torch.Tensor, group: object) -> object:
        """In place of `channels.start`."""
        if not self.late_ratio or str(transfer.operation) != "send":  # type: ignore[attr-defined]
            return self._original(transfer, tensor, group)
        wait_s = self.late_s if self._random.random() < self.late_ratio else 0.0
        work = _LateWork()
        if group not in self._queues:
            self._queues[group] = queue.Queue()
            threading.Thread(target=self._run, args=(self._queues[group],), daemon=True).start()
        self._queues[group].put((wait_s, work, transfer, tensor, group))
        return work

    def _run(self, todo: queue.Queue[tuple[object, ...]]) -> None:
        while True:
            wait_s, work, transfer, tensor, group = todo.get()
            time.sleep(wait_s)  # type: ignore[arg-type]
            self._original(transfer, tensor, group).wait()  # type: ignore[attr-defined]
            work.left.set()  # type: ignore[attr-defined]


class _Bench:
    """Everything put in place of parts of the trainer."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import schedules

        from training import loop
        from training.log import TrainingLog
        from training.pipeline import channels, dynamic
        from training.pipeline.split_backward import WeightGradients

        self.diary = _Diary()
        self.diary.install()
        self.sleeper = _Sleeper(self.diary)
        self.steps_s: list[float] = []
        self.losses: list[float] = []
        sleeper = self.sleeper
        schedules.forward_step = sleeper.stretch("forward", schedules.forward_step, lambda: 1.0)
        schedules.backward_step = sleeper.stretch(
            "backward",
            schedules.backward_step,
            lambda: (1.05 if sleeper.split else 2.0) + sleeper.repeats_inside,
        )
        compute = WeightGradients.compute
        WeightGradients.compute = sleeper.stretch_weights(compute)  # type: ignore[method-assign]
        self.sends = _LateSends(channels.start)
        channels.start = self.sends.start  # type: ignore[assignment]
        dynamic.start = self.sends.start  # type: ignore[attr-defined,assignment]
        loop.run_schedule = self._timed(loop.run_schedule)  # type: ignore[attr-defined,assignment]
        add = TrainingLog.add

        def note(log: TrainingLog, result: object, consumed: int) -> None:
            loss = result.loss  # type: ignore[attr-defined]
            self.losses.append(float("nan") if loss is None else float(loss))
            add(log, result, consumed)  # type: ignore[arg-type]

        TrainingLog.add = note  # type: ignore[method-assign,assignment]

    def _timed(self, original: Callable[..., object]) -> Callable[..., object]:
        import torch.distributed as dist

        def timed(*positional: object, **named: object) -> object:
            dist.barrier()
            begin_s = time.perf_counter()
            self.diary.begins_s.append(begin_s)
            result = original(*positional, **named)
            dist.barrier()
            self.diary.ends_s.append(time.perf_counter())
            self.steps_s.append(self.diary.ends_s[-1] - begin_s)
            return result

        return timed

    def run(self, case: Case, job: Job) -> dict[str, object]:
        """Train one case."""
        from megatron.core import parallel_state

        from training.pipeline import running
        from training.pipeline.schedule import plan_for

        settings, sizes = job.settings, job.sizes
        parallel_state.set_virtual_pipeline_model_parallel_world_size(sizes.virtual_pipeline_size)
        plan = plan_for(settings, sizes, sizes.num_microbatches)
        self.sleeper.take(case, job.launch.rank, sizes.model_chunks)
        self.sleeper.split = plan is not None and plan.splits_backward
        self.sleeper.repeats_inside = case.repeats and (plan is None or not plan.recomputes)
        helper = (case.forward_s / case.helper_speed, case.helper_dies_after)
        running.HELPER = ("-m", "benchmarks.pipeline_runs_helper", *map(str, helper))
        self.sends.late_ratio = case.late_ratio
        self.sends.late_s = 2 * case.forward_s
        self.steps_s.clear()
        self.diary.clear()
        self.losses.clear()
        job.train()
        gc.unfreeze()
        gc.collect()
        return {
            "steps_s": list(self.steps_s),
            "losses": list(self.losses),
            "diary": {k: v for k, v in vars(self.diary).items() if not k.startswith("_")},
        }


def main(arguments: Sequence[str]) -> int:
    """Train all cases in one process group."""
    cases = [Case(**c) for c in json.loads(Path(arguments[0]).read_text(encoding="utf-8"))]
    launch = read_launch(os.environ)
    jobs = [parse_job(case.flags, launch) for case in cases]
    results = []
    with jobs[0].joined():
        bench = _Bench()
        for case, job in zip(cases, jobs, strict=True):
            results.append(bench.run(case, job))
    out = Path(f"{arguments[1]}.{launch.rank}.json")
    out.write_text(json.dumps(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
