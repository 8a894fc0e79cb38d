"""Megatron's log line, evaluation lines and TensorBoard points."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import torch

from megascan.errors import OutputError
from training.arguments import Settings, Sizes
from training.flops import iteration_flops
from training.memory import memory_line
from training.model import padded_vocab_size

if TYPE_CHECKING:
    from megatron.core.timers import Timers
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, kw_only=True)
class IterationResult:
    """What one training iteration came to.

    `loss` is a scalar on the device, None on ranks without the last pipeline stage; it is not read
    before it is logged, so that logging seldom costs no synchronization. `grad_norm` is None where
    the optimizer does not compute it or skipped the iteration.
    """

    iteration: int
    loss: torch.Tensor | None
    skipped: bool
    grad_norm: float | None
    learning_rate: float
    loss_scale: torch.Tensor
    """On the device: reading it makes the host wait, so it is read when it is logged."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """The values of one log line; `format` writes it as Megatron-LM does."""

    iteration: int
    train_iters: int
    consumed_samples: int
    iteration_ms: float
    tflops_per_gpu: float
    learning_rate: float
    global_batch_size: int
    loss: float | None
    loss_scale: float
    grad_norm: float | None
    num_skipped: int
    num_nan: int

    def format(self) -> str:
        """The line, without the time in front of it."""
        throughput = self.tflops_per_gpu
        digits = 1 if throughput >= 1 else 6
        parts = [
            f"iteration {self.iteration:8d}/{self.train_iters:8d}",
            f"consumed samples: {self.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.iteration_ms:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {throughput:.{digits}f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
        ]
        if self.loss is not None:
            parts.append(f"lm loss: {self.loss:.6E}")
        parts.append(f"loss scale: {self.loss_scale:.1f}")
        if self.grad_norm is not None:
            parts.append(f"grad norm: {self.grad_norm:.3f}")
        parts.append(f"number of skipped iterations: {self.num_skipped:3d}")
        parts.append(f"number of nan iterations: {self.num_nan:3d}")
        return " | ".join(parts) + " |"


class TrainingLog:
    """Collects iterations on every rank; the last rank writes.

    The last rank is the one Megatron-LM writes from: it belongs to the last pipeline stage, the
    only one that knows the loss.
    """

    def __init__(
        self, settings: Settings, sizes: Sizes, vocab_size: int, rank: int, timers: Timers | None
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._sizes = sizes
        self._writes = rank == sizes.world_size - 1
        self._rank = rank
        self._reports_memory = rank % (sizes.world_size // sizes.pipeline_size) < sizes.tensor_size
        padded_size = padded_vocab_size(settings, sizes, vocab_size)
        self._flops = iteration_flops(settings, sizes, padded_size)
        self._tensorboard = _open_tensorboard(settings) if self._writes else None
        self._since: list[IterationResult] = []
        self._interval_start_s = time.perf_counter()

    def begin(self) -> None:
        """Start the clock of the first interval."""
        self._interval_start_s = time.perf_counter()

    def add(self, result: IterationResult, consumed_samples: int) -> None:
        """Take an iteration in; at the end of an interval, write the line."""
        self._since.append(result)
        log = self._settings.log
        if self._tensorboard is not None and result.iteration % log.tensorboard_log_interval == 0:
            self._write_points(self._tensorboard, result)
        if result.iteration % log.log_interval == 0:
            line = self._line(result, consumed_samples)
            self._report_timers(len(self._since))
            self._since = []
            if self._writes:
                say(line.format())
                if self._tensorboard is not None:
                    self._write_interval_points(self._tensorboard, line)
            if self._reports_memory:  # once, and of one replica: the others hold the same
                print(memory_line(self._rank, result.iteration), flush=True)
                self._reports_memory = False
            self.begin()

    def _report_timers(self, num_iterations: int) -> None:
        """Megatron-Core's timers, ms an iteration; all ranks take part, the last one writes."""
        if self._timers is None:
            return
        text = self._timers.get_all_timers_string(normalizer=num_iterations)
        if self._writes and text is not None:
            print(text, flush=True)

    def evaluation(self, iteration: int, loss: torch.Tensor | None) -> None:
        """Write the validation loss."""
        if not self._writes or loss is None:
            return
        value = float(loss)
        perplexity = math.exp(min(20.0, value))
        say(
            f"validation loss at iteration {iteration} | lm loss value: {value:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |"
        )
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("lm loss validation", value, iteration)

    def close(self) -> None:
        """Flush the TensorBoard events."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _line(self, last: IterationResult, consumed_samples: int) -> LogLine:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed_s = (time.perf_counter() - self._interval_start_s) / len(self._since)
        losses = [
            float(result.loss)
            for result in self._since
            if result.loss is not None and not result.skipped
        ]
        finite = [loss for loss in losses if math.isfinite(loss)]
        return LogLine(
            iteration=last.iteration,
            train_iters=self._sizes.train_iters,
            consumed_samples=consumed_samples,
            iteration_ms=elapsed_s * 1e3,
            tflops_per_gpu=self._flops / elapsed_s / 1e12 / self._sizes.world_size,
            learning_rate=last.learning_rate,
            global_batch_size=self._sizes.global_batch_size,
            loss=sum(finite) / len(finite) if finite else None,
            loss_scale=float(last.loss_scale),
            grad_norm=last.grad_norm,
            num_skipped=sum(result.skipped for result in self._since),
            num_nan=len(losses) - len(finite),
        )

    def _write_points(self, writer: SummaryWriter, result: IterationResult) -> None:
        points = {
            "learning-rate": result.learning_rate,
            "loss-scale": float(result.loss_scale),
            "batch-size": float(self._sizes.global_batch_size),
        }
        if result.grad_norm is not None:
            points["grad-norm"] = result.grad_norm
        if result.loss is not None:
            points["lm loss"] = float(result.loss)
        for name, value in points.items():
            writer.add_scalar(name, value, result.iteration)

    @staticmethod
    def _write_interval_points(writer: SummaryWriter, line: LogLine) -> None:
        writer.add_scalar("iteration-time", line.iteration_ms / 1e3, line.iteration)
        writer.add_scalar("throughput", line.tflops_per_gpu, line.iteration)


def say(text: str) -> None:
    """Print a line of the training log, with the time in front of it."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    print(f" [{now}] {text}", flush=True)


def _open_tensorboard(settings: Settings) -> SummaryWriter | None:
    folder = settings.log.tensorboard_dir
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(log_dir=str(folder))
    except OSError as error:
        raise OutputError(
            f"cannot write TensorBoard events to {folder} ({error.strerror}); give another "
            "--tensorboard-dir"
        ) from error
