"""Help a training job that is running: compute forward passes of its pipeline (MegaFBD).

    python -m training.helper --join 10.0.0.1:29777

Start the job with --forward-backward-disaggregating; it prints the address for --join. The helper
needs no flags of the job: it gets them there, and in each step the weights and the data.

It is no rank of the job. It computes forward passes of all pipeline stages but the last, and sends
each stage its input earlier than the previous stage does. It may be started, ended or killed at any
moment: that changes how long a step takes, and nothing else. It ends when the job ends.
"""

from __future__ import annotations

import argparse
import io
import os
import socket
import statistics
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, InputError, UsageError, report_errors
from training.arguments import Settings, Sizes, read_settings, resolve_sizes
from training.distributed import (
    ONLY_RANK,
    choose_device,
    finalize,
    initialize,
    seed_everything,
    silence,
)

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel

    from training.pipeline.reception import Connection, Frame

WAIT_S = 600.0
"""How long a job may take until helpers can connect, by default: it loads its data first."""

_RETRY_S = 0.5


@dataclass(kw_only=True)
class Todo:
    """What the job has said of one step: what the helper runs, and with which weights and data."""

    microbatches: list[int] | None = None
    weights: dict[int, Frame] = field(default_factory=dict)
    """Frames with a stage's weights, by stage."""
    batches: dict[int, Frame] = field(default_factory=dict)
    """Frames with a microbatch's data, by microbatch."""


class Orders:
    """What the ranks have said, sorted by step; filled by the connections' threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: dict[int, Todo] = {}
        self._newest = 0
        self._is_over = False

    def take(self, stage: int, frame: Frame) -> None:
        """Note a frame that the rank of a stage has sent."""
        from training.pipeline.reception import FrameKind

        with self._changed:
            todo = self._steps.setdefault(frame.step, Todo())
            if frame.kind is FrameKind.STEP:
                found = frame.said()["microbatches"]
                todo.microbatches = [int(m) for m in found]  # type: ignore[attr-defined]
                self._newest = max(self._newest, frame.step)
            elif frame.kind is FrameKind.WEIGHTS:
                todo.weights[stage] = frame
            elif frame.kind is FrameKind.BATCH:
                todo.batches[frame.microbatch] = frame
            self._changed.notify_all()

    def end(self) -> None:
        """Note that the job has ended or lets this helper go, and wake whoever waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def next_step(self) -> tuple[int, list[int]] | None:
        """Wait for a step to begin and return the newest with its microbatches; None at the end."""
        with self._changed:
            while not self._is_over:
                todo = self._steps.get(self._newest)
                if todo is not None and todo.microbatches is not None:
                    for step in [step for step in self._steps if step < self._newest]:
                        del self._steps[step]
                    microbatches, todo.microbatches = todo.microbatches, None
                    return self._newest, microbatches
                self._changed.wait()
            return None

    def weights(self, step: int, stage: int) -> Frame | None:
        """Wait for a stage's weights of a step; None when the step or the job is over."""
        return self._wait(step, lambda todo: todo.weights.pop(stage, None))

    def batch(self, step: int, microbatch: int) -> Frame | None:
        """Wait for a microbatch's data of a step; None when the step or the job is over."""
        return self._wait(step, lambda todo: todo.batches.pop(microbatch, None))

    def _wait(self, step: int, find: Callable[[Todo], Frame | None]) -> Frame | None:
        with self._changed:
            while not self._is_over and self._newest == step:
                found = find(self._steps[step])
                if found is not None:
                    return found
                self._changed.wait()
            return None


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """What the job tells a helper that joins."""

    number: int
    settings: Settings
    sizes: Sizes
    vocab_size: int
    num_threads: int
    ranks: list[tuple[str, int]]
    """Addresses of the pipeline's ranks, in the order of its stages."""


class Helper:
    """Runs forwards for one pipeline until its job ends."""

    def __init__(self, job: JobDescription, device: str) -> None:
        self._job = job
        self._device = device
        self._orders = Orders()
        self._connections: list[Connection] = []
        self._stages: list[GPTModel] = []

    def join(self) -> None:
        """Connect to the pipeline's ranks, build all stages but the last, and tell the first rank
        that this helper is ready.
        """
        from training.pipeline.reception import Connection, Frame, FrameKind

        ends = [_connect(address) for address in self._job.ranks]
        for stage, end in enumerate(ends):
            welcome = _ask(end, Frame.of(FrameKind.HELLO, {"number": self._job.number}))
            if stage < len(ends) - 1:
                self._stages.append(self._build_stage(stage, welcome))
        for stage, end in enumerate(ends):
            connection = Connection(end)
            connection.start(
                lambda frame, stage=stage: self._orders.take(stage, frame),  # type: ignore[misc]
                self._orders.end,
            )
            self._connections.append(connection)
        self._connections[0].send(Frame(FrameKind.READY))

    def run(self) -> int:
        """Help until the job ends; returns how many forwards of a stage were run."""
        num_forwards = 0
        while (begun := self._orders.next_step()) is not None:
            num_forwards += self._help(*begun)
        for connection in self._connections:
            connection.close()
        return num_forwards

    def _build_stage(self, stage: int, welcome: dict[str, object]) -> GPTModel:
        """Build a stage; ConfigError if the job's stage, as `welcome` says, is another."""
        from training.model import build_stage

        job = self._job
        model = build_stage(
            job.settings, job.sizes, job.vocab_size, self._device,
            layers=int(str(welcome["num_layers"])), is_first=stage == 0,
        )  # fmt: skip
        shapes = [[*parameter.shape] for parameter in model.parameters()]
        if shapes != welcome["shapes"]:
            raise ConfigError(
                f"stage {stage} of the job has other parameters than the one built here from its "
                "flags; start the helper with the job's version of MegaScan and megatron-core"
            )
        return model

    def _help(self, step: int, microbatches: Sequence[int]) -> int:
        """Help with one step and return the number of forwards.

        End early when the job has gone on to the next step.
        """
        from training.pipeline.reception import Frame, FrameKind

        times_s: list[float] = []
        fresh: set[int] = set()
        for microbatch in microbatches:
            data = self._orders.batch(step, microbatch)
            output = None
            for stage in range(len(self._stages)):
                if data is None or not self._refresh(step, stage, fresh):
                    break
                began_s = time.perf_counter()
                output = self._forward(stage, output, data)
                times_s.append(time.perf_counter() - began_s)
                self._hand_over(step, microbatch, stage + 1, output)
        said = {"forward_s": statistics.median(times_s) if times_s else 0.0}
        self._connections[0].send(Frame.of(FrameKind.DONE, said, step=step))
        return len(times_s)

    def _refresh(self, step: int, stage: int, fresh: set[int]) -> bool:
        """Load a stage's weights of this step, once; return whether they arrived."""
        if stage in fresh:
            return True
        frame = self._orders.weights(step, stage)
        if frame is not None:
            load_weights(self._stages[stage], frame.body)
            fresh.add(stage)
        return frame is not None

    def _forward(self, stage: int, inputs: torch.Tensor | None, data: Frame) -> torch.Tensor:
        return forward(self._stages[stage], inputs, read_batch(data.body, self._device))

    def _hand_over(self, step: int, microbatch: int, stage: int, output: torch.Tensor) -> None:
        from training.pipeline.reception import Frame, FrameKind, bytes_of

        frame = Frame(FrameKind.INPUT, bytes_of(output), step, microbatch)
        self._connections[stage].send(frame)


def forward(
    model: GPTModel, inputs: torch.Tensor | None, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Run a stage forward without a graph; the first stage reads `batch`, others `inputs`."""
    import torch

    with torch.no_grad():
        if inputs is None:
            mask = batch.get("attention_mask")
            output: torch.Tensor = model(batch["tokens"], batch["position_ids"], mask)
        else:
            model.set_input_tensor(inputs)
            output = model(None, None, None)
    return output


def load_weights(model: GPTModel, body: bytes | bytearray | memoryview) -> None:
    """Fill a stage's parameters in order from `body`, which holds the bytes of all of them."""
    import torch

    room = memoryview(body)
    expected = sum(p.numel() * p.element_size() for p in model.parameters())
    if room.nbytes != expected:
        raise InputError(f"weights of {room.nbytes} bytes came where {expected} were expected")
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.numel() * parameter.element_size()
            values = torch.frombuffer(room[:size], dtype=parameter.dtype)
            parameter.copy_(values.view(parameter.shape))
            room = room[size:]


def read_batch(body: bytes | bytearray | memoryview, device: str) -> dict[str, torch.Tensor]:
    """Return what `training.pipeline.helped.batch_bytes` has packed."""
    import torch

    found: dict[str, torch.Tensor] = torch.load(io.BytesIO(body), weights_only=True)
    return {name: part.to(device) for name, part in found.items()}


def ask_for_job(address: tuple[str, int], wait_s: float) -> JobDescription:
    """Ask the job's first rank what the job is; wait up to `wait_s` for the rank to listen."""
    from training.pipeline.reception import Frame, FrameKind

    end_s = time.monotonic() + wait_s
    while True:
        try:
            end = _connect(address)
            break
        except InputError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)
    with end:
        said = _ask(end, Frame(FrameKind.JOIN))
    settings = read_settings(Namespace(**said["flags"]))  # type: ignore[arg-type]
    return JobDescription(
        number=int(str(said["number"])),
        settings=settings,
        sizes=resolve_sizes(settings, int(str(said["world_size"]))),
        vocab_size=int(str(said["vocab_size"])),
        num_threads=int(str(said["num_threads"])),
        ranks=[(str(host), int(port)) for host, port in said["ranks"]],  # type: ignore[attr-defined]
    )


def _ask(end: socket.socket, question: Frame) -> dict[str, object]:
    """Send a frame and return the answer; InputError where no job with helpers answers."""
    from training.pipeline.reception import read_frame, write_frame

    try:
        write_frame(end, question)
        return read_frame(end).said()
    except (EOFError, OSError, ValueError):
        raise InputError(
            "what answered is no job that takes helpers, or has just ended; give the address that "
            "the job prints at its start"
        ) from None


def _connect(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        return socket.create_connection(address, timeout=30)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"no job answers at {host}:{port} ({reason}); start it first with "
            "--forward-backward-disaggregating, and give the address that it prints"
        ) from None


def _clear_launcher_variables() -> None:
    """Remove the launcher's variables: a job may have started this helper, which is no rank."""
    of_ranks = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    for name in [*os.environ]:
        if name in of_ranks or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def help_job(job: JobDescription) -> int:
    """Help a job until it ends; returns the number of forwards."""
    import torch

    _clear_launcher_variables()
    device = choose_device(job.settings, ONLY_RANK)
    torch.set_num_threads(job.num_threads)  # another number would sum products in another order
    sizes = replace(
        job.sizes, world_size=1, data_size=1, pipeline_size=1, virtual_pipeline_size=None
    )
    try:
        silence(device)
        initialize(job.settings, sizes, ONLY_RANK, device)
        seed_everything(job.settings.batch.seed)
        helper = Helper(job, device)
        helper.join()
        return helper.run()
    finally:
        finalize()


def main(arguments: Sequence[str]) -> int:
    """Join a job and help it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.helper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT",
        help="address of the job, as the job prints it when it starts",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="SECONDS",
        help="how long to try to connect, for a job that is still loading its data "
        f"(default: {WAIT_S:g})",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    host, _, port = given.join.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--join is {given.join!r}, expected an address as in 10.0.0.1:29777")
    job = ask_for_job((host, int(port)), given.wait)
    num_forwards = help_job(job)
    print(f"the job is over for helper {job.number}: {num_forwards} forwards of a stage were run")
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(sys.argv[1:])))
