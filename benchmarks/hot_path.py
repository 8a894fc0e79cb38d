"""What one traced call costs the thread that trains: ns of CPU time, by kind of call.

    python -m benchmarks.hot_path [--against FOLDER] [--runs N] [--cold] [-o RESULT.md]

Every wrapped call is made many times with tracing off and on; the difference is what a span costs.
CUDA events and streams are stand-ins that do nothing, so that of a GPU run only our own Python is
measured. `--against` compares with another checkout of this repository: its processes and ours take
turns, and of each the least of all runs counts, which a busy machine disturbs least.

In a loop everything is in the processor's caches. In a step it is not: between two of torch's calls
a span costs ten times as much on some hosts. `--cold` overwrites the caches before every call, and
between a module's forward and backward; medians of calls with and without tracing.

An exchange between stages ends with a wait for the device, which has nothing to do until training
launches the next pass. So of what tracing does there, a device-bound job pays what lies between the
end of an exchange and the begin of the next pass: "behind an exchange", "before a pass".
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.jobs import environment_line, publish
from megascan.config import TraceConfig
from megascan.instrument.collectives import OPERATIONS, Collectives
from megascan.instrument.megatron import BackwardSpans, Modules, Passes, PointToPoint
from megascan.instrument.place import Position
from megascan.instrument.updates import Updates
from megascan.schema import Phase
from megascan.tracer import CpuTimer, RecordingTracer, Timer
from megascan.tracer.cuda import CudaTimer, TorchDevice
from megascan.tracer.timer import HostClock, now_ns

ROOT = Path(__file__).parents[1]
NUM_CALLS, NUM_REPEATS, NUM_MODULES = 1000, 15, 8
NUM_COLD_CALLS, COLD_BYTES = 160, 48 << 20
"""More bytes than the last cache has."""
Costs = dict[str, float]


class _Idle:
    """Stands for a device, its events, a writer, groups: does nothing and costs next to nothing."""

    name, can_wait_aside, run_id, num_steps = "GPU-0", True, "run", 0

    def new_event(self) -> _Idle:
        return self

    def record(self, event: object = None) -> None:
        del event

    def stream(self) -> int:
        return 0

    def __getattr__(self, name: str) -> object:
        return getattr(TorchDevice, name)  # what a device says of tensors, in any version

    def submit(self, window: object) -> bool:
        del window
        return True

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        return True


class _Groups:
    """One tensor-parallel group of two."""

    def name(self, group: object) -> str:
        del group
        return "tp@0"

    def num_members(self, name: str) -> int:
        del name
        return 2


class _Stage:
    """The communicator of a stage between two others."""

    prev_rank, next_rank, pp_group = 0, 2, "pp"


class _Layer:
    def __init__(self) -> None:
        self.layer_number = 3

    def forward(self, value: Any) -> Any:
        return value


class _Caches:
    """Overwrites the processor's caches, if it is to, and knows how long that took."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.ones(num_bytes // 8)
        self.is_cold = num_bytes > 0
        self.spent_ns = 0

    def evict(self) -> None:
        if self.is_cold:
            begin_ns = time.thread_time_ns()
            self._memory += 1
            self.spent_ns += time.thread_time_ns() - begin_ns


class _Moments:
    """When a wrapped function began and ended; it leaves nothing of ours in the caches."""

    def __init__(self, caches: _Caches) -> None:
        self._caches = caches
        self.begin_ns = self.end_ns = 0

    def note(self) -> None:
        self.begin_ns = time.thread_time_ns()
        self._caches.evict()
        self.end_ns = time.thread_time_ns()


class _Clone(torch.autograd.Function):
    """What a module computes; forward and backward leave nothing of ours in the caches."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, caches: _Caches) -> torch.Tensor:
        ctx.caches = caches
        caches.evict()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.caches.evict()
        return gradients[0].clone(), None


class _Bench:
    """A tracer with a timer, in the middle of a forward pass."""

    def __init__(self, timer: Timer, caches: _Caches) -> None:
        self.caches = caches
        config = TraceConfig(enabled=True, directory=Path(tempfile.gettempdir()))
        self.tracer = RecordingTracer(config)
        self.tracer.record_with(timer, cast(Any, _Idle()))
        self.position = Position(slot=(1, 0), phase=Phase.FORWARD)
        self.spans = BackwardSpans(self.tracer, self.position)
        self.moments = _Moments(caches)

    def cost_ns(self, call: Callable[[], object], num_parts: int = 1) -> float:
        """Time of a call with tracing on less that with tracing off; long ones have parts."""
        gc.disable()
        if self.caches.is_cold:
            off, on = self._cold_ns(call, NUM_COLD_CALLS // num_parts)
        else:
            num_calls = NUM_CALLS // num_parts
            off, on = (self._least_ns(call, num_calls, active=active) for active in (False, True))
        self.tracer.active = False
        gc.enable()
        return on - off

    def part_ns(self, call: Callable[[], object], *, behind: bool) -> float:
        """Median time of a traced call behind, or before, what it wraps, which notes `moments`."""
        moments, times = self.moments, []
        gc.disable()
        self.tracer.active = True
        for _ in range(NUM_COLD_CALLS if self.caches.is_cold else NUM_CALLS):
            self.tracer._spans.clear()
            self.position.iteration_begins()
            self.caches.evict()
            begin_ns = time.thread_time_ns()
            call()
            end_ns = time.thread_time_ns()
            times.append(end_ns - moments.end_ns if behind else moments.begin_ns - begin_ns)
        self.tracer.active = False
        gc.enable()
        return statistics.median(times)

    def _least_ns(self, call: Callable[[], object], num_calls: int, *, active: bool) -> float:
        self.tracer.active = active
        times = []
        for _ in range(NUM_REPEATS):
            self.tracer._spans.clear()
            begin_ns = time.thread_time_ns()
            for _ in range(num_calls):
                call()
            times.append((time.thread_time_ns() - begin_ns) / num_calls)
        return min(times)

    def _cold_ns(self, call: Callable[[], object], num_calls: int) -> tuple[float, float]:
        """Median time of a call without and with tracing, in turns; caches empty before each."""
        times: dict[bool, list[int]] = {False: [], True: []}
        for number in range(2 * num_calls):
            self.tracer.active = bool(number % 2)
            self.tracer._spans.clear()
            self.caches.evict()
            spent_ns, begin_ns = self.caches.spent_ns, time.thread_time_ns()
            call()
            elapsed_ns = time.thread_time_ns() - begin_ns
            times[self.tracer.active].append(elapsed_ns - self.caches.spent_ns + spent_ns)
        return statistics.median(times[False]), statistics.median(times[True])


def measure(num_bytes: int = 0) -> Costs:
    """Costs of this checkout, ns; so many bytes are overwritten between calls."""
    torch.set_num_threads(1)
    caches = _Caches(num_bytes)
    clock = HostClock(domain="host", offset_ns=0, origin_ns=now_ns())
    cuda = CudaTimer(clock, cast(Any, _Idle()), record_launches=True)
    timers: dict[str, Timer] = {"CPU": CpuTimer(clock), "GPU": cuda}
    costs = {}
    for device, timer in timers.items():
        for measured in (_calls, _parts):
            for name, cost_ns in measured(_Bench(timer, caches)).items():
                costs[f"{name}, {device}"] = cost_ns
    for device, timer in timers.items():
        name = f"forward and backward of a module, {device}"
        costs[name] = _with_backward(_Bench(timer, caches))
    return costs


def _calls(bench: _Bench) -> Costs:
    tracer, position = bench.tracer, bench.position
    layer, tensor, config = _Layer(), torch.ones(4), SimpleNamespace(finalize_model_grads_func=None)
    module = Modules(tracer, position, bench.spans).forward_of("mlp", _Layer.forward)
    reduce = Collectives(tracer, position, cast(Any, _Groups())).wrap(OPERATIONS[0], _all_reduce)
    passes = Passes(tracer, position, bench.spans, Updates(tracer))
    forward, backward = passes.forward_step(_forward_step), passes.backward_step(_backward_step)

    def own_span() -> None:
        with tracer.span("own", "compute", microbatch=1):
            pass

    def of_threads() -> None:
        if tracer.active:
            tracer.threads.begin()
            tracer.threads.end()

    calls: dict[str, Callable[[], object]] = {
        "forward of a module": lambda: module(layer, 1),
        "collective": lambda: reduce(tensor, group=config),
        "span of the trainer's own": own_span,
        "forward step of the schedule": lambda: forward(None, None, 1, config, 2),
        "backward step of the schedule": lambda: backward(None, 1, None, 1, config),
        "what threads do, an iteration": of_threads,
    }
    return {name: bench.cost_ns(call) for name, call in calls.items()}


def _parts(bench: _Bench) -> Costs:
    """Parts of calls in which the device has nothing to do, from an exchange to the next pass."""
    tracer, position, note = bench.tracer, bench.position, bench.moments.note
    passes = Passes(tracer, position, bench.spans, Updates(tracer))
    messages = PointToPoint(tracer, position, cast(Any, _Groups()))
    tensor, stage = torch.ones(4), _Stage()
    config = SimpleNamespace(finalize_model_grads_func=note)

    def forward_step(
        input_tensor: object, config: object, current_microbatch: int
    ) -> tuple[object, int]:
        del config, current_microbatch
        note()
        return input_tensor, 1

    def backward_step(output_tensor: object, output_tensor_grad: object) -> None:
        del output_tensor, output_tensor_grad
        note()

    def communicate(own: object, **exchange: object) -> tuple[object, object, None]:
        del own, exchange
        note()
        return tensor, None, None

    forward, backward = passes.forward_step(forward_step), passes.backward_step(backward_step)
    exchange = messages.communicate(communicate)
    sent = {"tensor_send_prev": tensor, "tensor_send_next": None}
    asked = {"recv_prev": True, "recv_next": False}
    return {
        "behind an exchange of two messages": bench.part_ns(
            lambda: exchange(stage, **sent, **asked), behind=True
        ),
        "before a forward step": bench.part_ns(lambda: forward(tensor, config, 1), behind=False),
        "before a backward step": bench.part_ns(lambda: backward(tensor, tensor), behind=False),
    }


def _with_backward(bench: _Bench) -> float:
    """Of each of some modules one after the other, the hooks on their tensors included."""
    layer = _Layer()
    module = Modules(bench.tracer, bench.position, bench.spans).forward_of(
        "mlp",
        lambda own, value: cast(torch.Tensor, _Clone.apply(value, bench.caches)),  # type: ignore[no-untyped-call]
    )
    source, gradient = torch.ones(2, requires_grad=True), torch.ones(2)

    def step() -> None:
        value = source * 1
        for _ in range(NUM_MODULES):
            value = cast(torch.Tensor, module(layer, value))
        value.backward(gradient)  # type: ignore[no-untyped-call]
        bench.spans.iteration_begins()

    return bench.cost_ns(step, NUM_MODULES) / NUM_MODULES


def _all_reduce(tensor: object, op: object = None, group: object = None) -> None:
    del tensor, op, group


def _forward_step(
    forward_step_func: object,
    data_iterator: object,
    input_tensor: object,
    config: object,
    current_microbatch: int,
) -> tuple[object, int]:
    del forward_step_func, data_iterator, config, current_microbatch
    return input_tensor, 1


def _backward_step(
    input_tensor: object,
    output_tensor: object,
    output_tensor_grad: object,
    model_type: object,
    config: object,
) -> None:
    del input_tensor, output_tensor, output_tensor_grad, model_type, config


def least(folders: Sequence[Path], num_runs: int, *, cold: bool = False) -> list[Costs]:
    """The least of several runs of each checkout, whose processes take turns."""
    for folder in folders:
        if not (folder / "megascan" / "__init__.py").is_file():
            raise SystemExit(f"{folder} is no checkout of MegaScan; give the root of one")
    found: list[list[Costs]] = [[] for _ in folders]
    for _ in range(num_runs):
        for runs, folder in zip(found, folders, strict=True):
            environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--one", *["--cold"][:cold]],
                env=environment, cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(done.stderr)
            runs.append(json.loads(done.stdout))
    return [{name: min(run[name] for run in runs) for name in runs[0]} for runs in found]


def render(costs: Sequence[Costs], command: str, *, cold: bool = False) -> str:
    """The result page."""
    how = f"Caches cold: CPU time behind {COLD_BYTES >> 20} MiB of others', medians, with tracing"
    head = ["µs a call"] if len(costs) == 1 else ["before, µs", "after, µs", "ratio"]
    rows = []
    for name, own in costs[-1].items():
        cells = [f"{run[name] / 1000:.2f}" for run in costs]
        if len(costs) > 1:
            cells.append(f"{own / costs[0][name]:.2f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "# What a traced call costs the training thread",
            "",
            f"`{command}` on {environment_line('cpu')}. {how if cold else 'CPU time with tracing'} "
            "on less that with tracing off; on a GPU without what CUDA itself takes.",
            "",
            f"| call | {' | '.join(head)} |",
            f"|---{'|---' * len(head)}|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Measure and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="an earlier checkout")
    parser.add_argument("--runs", type=int, default=5, help="processes of each checkout (5)")
    parser.add_argument("--cold", action="store_true", help="with empty caches before each call")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write the result page here, too")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(COLD_BYTES if arguments.cold else 0)))
        return 0
    folders = [arguments.against.resolve()] if arguments.against else []
    costs = least([*folders, ROOT], arguments.runs, cold=arguments.cold)
    command = f"python -m benchmarks.hot_path --runs {arguments.runs}"
    command += " --cold" if arguments.cold else ""
    page = render(costs, command + (" --against CHECKOUT" if folders else ""), cold=arguments.cold)
    publish(page, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
