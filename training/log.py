"""What a run prints: a summary at its start, Megatron-LM's log lines, TensorBoard points.

print_summary    layout, parameters of each rank, sizes of the datasets
TrainingLog      a line every so many iterations; evaluations; timers
iteration_flops  operations of an iteration, for the throughput in a log line
memory_line      memory of a rank, once after the first log line
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megascan.errors import OutputError
from training.arguments import Settings, Sizes
from training.model import padded_vocab_size

if TYPE_CHECKING:
    from megatron.core.timers import Timers
    from torch.utils.tensorboard import SummaryWriter


def iteration_flops(settings: Settings, sizes: Sizes, padded_vocab_size: int) -> float:
    """Return the operations of one iteration's matrix products: both passes, all ranks.

    A product of (m, k) and (k, n) takes 2mkn operations; the backward pass takes twice the forward
    pass. Per token and layer, with h the hidden size, q = heads x head size, r the ratio of
    key-value groups to heads, s the sequence length and f the MLP's inner size:

        attention  2 h q (1 + r) x 2  (query, output; key, value)  +  2 s q  (scores and their sum
                   over values, of which the causal mask keeps half)
        MLP        2 h f x 2, x 3 with SwiGLU, x top-k with experts

    and 2 h v for the output layer. Recomputed operations are not counted (model FLOPs), as in
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
    """
    hidden, inner = sizes.hidden_size, sizes.ffn_hidden_size
    query = sizes.num_attention_heads * sizes.kv_channels
    ratio = sizes.num_query_groups / sizes.num_attention_heads
    attention = 4 * hidden * query * (1 + ratio) + 2 * sizes.seq_length * query
    experts = settings.moe.moe_router_topk if settings.moe.num_experts else 1
    mlp = 2 * hidden * inner * (3 if settings.model.swiglu else 2) * experts
    forward = sizes.num_layers * (attention + mlp) + 2 * hidden * padded_vocab_size
    return 3.0 * forward * sizes.seq_length * sizes.global_batch_size


_BYTES_PER_MB = 1024 * 1024


def memory_line(rank: int, iteration: int) -> str:
    """Return a line with allocated and reserved memory of the GPU, on the CPU resident memory."""
    if torch.cuda.is_available():
        values = {
            "allocated": torch.cuda.memory_allocated(),
            "max allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "max reserved": torch.cuda.max_memory_reserved(),
        }
    else:
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        values = {"max resident": peak_kb * 1024}
    parts = [f"{name}: {size / _BYTES_PER_MB:.1f}" for name, size in values.items()]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class IterationResult:
    """Results of one training iteration.

    `loss` is a scalar on the device, None on ranks without the last pipeline stage. It is read only
    when it is logged, so that iterations without a log line need no synchronization. `grad_norm` is
    None where the optimizer does not compute it or has skipped the iteration.
    """

    iteration: int
    loss: torch.Tensor | None
    skipped: bool
    grad_norm: float | None
    learning_rate: float
    loss_scale: torch.Tensor
    """A scalar on the device; to read it makes the host wait, so it is read only when logged."""


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
        """Return the line, without the time in front of it."""
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

    Megatron-LM writes from the last rank too: it belongs to the last pipeline stage, the only stage
    that knows the loss.
    """

    def __init__(
        self, settings: Settings, sizes: Sizes, vocab_size: int, rank: int, timers: Timers | None
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._sizes = sizes
        self._writes = rank == sizes.world_size - 1
        self._rank = rank
        ranks_of_stage = sizes.world_size // sizes.pipeline_size
        # The first replica's ranks of each stage: other replicas hold the same.
        self._reports_memory = rank % ranks_of_stage < sizes.tensor_size
        padded_size = padded_vocab_size(settings, sizes, vocab_size)
        self._flops = iteration_flops(settings, sizes, padded_size)
        self._tensorboard = _open_tensorboard(settings) if self._writes else None
        self._since: list[IterationResult] = []
        self._interval_start_s = time.perf_counter()

    def begin(self) -> None:
        """Start the clock of the first interval."""
        self._interval_start_s = time.perf_counter()

    def add(self, result: IterationResult, consumed_samples: int) -> None:
        """Take in an iteration; at the end of an interval, write a log line."""
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
            if self._reports_memory:  # once, and for one replica: other replicas hold the same
                print(memory_line(self._rank, result.iteration), flush=True)
                self._reports_memory = False
            self.begin()

    def _report_timers(self, num_iterations: int) -> None:
        """Write Megatron-Core's timers in ms an iteration; all ranks call this, the last writes."""
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


@dataclass(frozen=True, kw_only=True, order=True)
class RankParameters:
    """Number of parameters that each rank at one place in the model holds."""

    pipeline_rank: int
    tensor_rank: int
    num_parameters: int


def print_summary(
    settings: Settings,
    sizes: Sizes,
    chunks: Iterable[torch.nn.Module],
    *,
    vocab_size: int,
    datasets: str,
    device: str,
) -> None:
    """Print layout, parameters of each model-parallel rank and sizes of the datasets on rank 0.

    Every rank calls this; rank 0 prints its own `datasets`.
    """
    own = RankParameters(
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        num_parameters=sum(weight.numel() for chunk in chunks for weight in chunk.parameters()),
    )
    shares: list[RankParameters | None] = [None] * sizes.world_size
    dist.all_gather_object(shares, own)
    if dist.get_rank() == 0:
        padded_size = padded_vocab_size(settings, sizes, vocab_size)
        lines = [
            layout_line(sizes, device),
            f" > padded vocab (size: {vocab_size}) with {padded_size - vocab_size} dummy tokens "
            f"(new size: {padded_size})",
            *parameter_lines(share for share in shares if share is not None),
            f" > datasets: {datasets}",
        ]
        print("\n".join(lines), flush=True)


def layout_line(sizes: Sizes, device: str) -> str:
    """Return the parallel sizes in words; sizes that few jobs set are left out where they are 1."""
    parts = [
        f"using world size: {sizes.world_size}",
        f"data-parallel size: {sizes.data_size}",
        f"tensor-model-parallel size: {sizes.tensor_size}",
        f"pipeline-model-parallel size: {sizes.pipeline_size}",
    ]
    if sizes.virtual_pipeline_size is not None:
        parts.append(f"model chunks on a rank: {sizes.virtual_pipeline_size}")
    if sizes.context_size > 1:
        parts.append(f"context-parallel size: {sizes.context_size}")
    if sizes.expert_size > 1:
        parts.append(f"expert-model-parallel size: {sizes.expert_size}")
    parts.append(f"number of microbatches: {sizes.num_microbatches}")
    parts.append("gloo on the CPU" if device == "cpu" else "nccl on GPUs")
    return ", ".join(parts)


def parameter_lines(shares: Iterable[RankParameters]) -> list[str]:
    """Return one line for each place in the model, stage by stage; replicas share a line."""
    return [
        " > number of parameters on (tensor, pipeline) model parallel rank "
        f"({share.tensor_rank}, {share.pipeline_rank}): {share.num_parameters}"
        for share in sorted(set(shares))
    ]
