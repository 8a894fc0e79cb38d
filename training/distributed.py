"""Join the job, and leave it: device, backend, process groups, seeds; how a failed job ends.

`silence` leaves out messages of torch and Megatron-Core that nobody who trains could act on. Each
message is named by the text it begins with, so all other warnings are still seen. The causes are
known: optional packages that this trainer does not use, names that Megatron-Core takes from torch,
caches that made-up data do without, advice about GPUs on the CPU.

`hide_transformer_engine` and `allow_without_transformer_engine` make Megatron-Core work the same
with Transformer Engine, without it, and with a broken installation.

A job that cannot go on ends with one sentence, from the rank that knows why (`carry_out`).
`refusals_as_errors` turns what Megatron-Core itself refuses into a sentence as well.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

from megascan.errors import ConfigError, MegaScanError, MissingError
from training.arguments import Settings, Sizes

_WARNINGS = (
    r"Transformer Engine and Apex are not installed\. ",
    r"Apex is not installed\. ",
    r"full scope is deprecated\. ",
    r"moe_ffn_hidden_size is not set, ",
    r"When using expert parallelism and tensor parallelism for training, sequence ",
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated\. ",
    r"`torch\.distributed\._(all_gather|reduce_scatter)_base` is deprecated\. ",
    r"`load_state_dict` is deprecated and will be removed in future versions\. ",
    r"Please use DTensor instead and we are deprecating ShardedTensor\.",
)
# A useful warning elsewhere; Megatron-Core's optimizer only asks whether a slice has a gradient.
_WARNING_OF_OPTIMIZER = r"The \.grad attribute of a Tensor that is not a leaf Tensor is being "
_WARNINGS_OF_GPUS = (
    r"When using (sequence parallelism|async grad allreduce) it is recommended to set the "
    r"environment variable CUDA_DEVICE_MAX_CONNECTIONS ",
)
_DATASET_LOGGER = "megatron.core.datasets.gpt_dataset"
_DATASET_MESSAGE = re.compile("Unable to save MockGPTDataset indexes because path_to_cache is None")


def silence(device: str) -> None:
    """Hide the known messages in this process; call this before importing megatron.core."""
    for message in _WARNINGS + (_WARNINGS_OF_GPUS if device == "cpu" else ()):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings(
        "ignore", message=_WARNING_OF_OPTIMIZER, module=r"megatron\.core\.optimizer\."
    )
    logging.getLogger(_DATASET_LOGGER).addFilter(_is_worth_saying)


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return _DATASET_MESSAGE.match(record.getMessage()) is None


def allow_without_transformer_engine() -> None:
    """Let the router of megatron.core multiply with torch where Transformer Engine is missing.

    megatron.core 0.16.1 asks whether `te_general_gemm` is None, but defines the name only with
    Transformer Engine: without the package every router ends in a NameError.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launcher says about this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


ONLY_RANK = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
"""A process that no launcher has started: a job of one rank."""


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read torchrun's variables; a process started without a launcher is a job of one rank."""
    try:
        return Launch(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        )
    except ValueError as error:
        raise ConfigError(
            f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers ({error}); start with torchrun"
        ) from None


def choose_device(settings: Settings, launch: Launch) -> str:
    """Return where this process computes, ``cpu`` or ``cuda:N``; ConfigError or MissingError.

    ``--distributed-backend gloo`` means the CPU, even on a machine with GPUs, which are then hidden
    from this process.
    """
    backend = settings.parallel.distributed_backend
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        if backend == "nccl":
            raise MissingError(
                "--distributed-backend nccl needs a GPU and there is none; use gloo or leave it out"
            )
        _check_cpu(settings)
        return "cpu"
    # Not only this rank's number is checked, so that all ranks of a host raise the same error.
    if max(launch.local_rank + 1, launch.local_world_size) > num_gpus:
        raise ConfigError(
            f"{launch.local_world_size} ranks are started on a host that has {num_gpus} GPUs; "
            "start fewer ranks, or add --distributed-backend gloo to train on the CPU"
        )
    return f"cuda:{launch.local_rank}"


def load_kernels_at_start() -> None:
    """Have CUDA load all kernels when the process starts; call this before torch uses a GPU.

    By default a kernel is loaded when it is first launched, which may wait until all running work
    has ended. In a planned step messages run concurrently with compute and may wait for another
    rank. If that rank waits for the kernel, both wait for ever (CUDA programming guide, lazy
    loading).
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def _check_cpu(settings: Settings) -> None:
    if settings.model.transformer_impl == "transformer_engine":
        raise MissingError(
            "--transformer-impl transformer_engine needs a GPU and there is none; use local"
        )
    if settings.optimizer.optimizer_cpu_offload:
        raise MissingError("--optimizer-cpu-offload needs a GPU and there is none; leave it out")
    if settings.moe.moe_grouped_gemm:
        raise MissingError("--moe-grouped-gemm needs a GPU and there is none; leave it out")
    moe, parallel = settings.moe, settings.parallel
    if (
        moe.num_experts is not None
        and moe.moe_token_dispatcher_type == "alltoall"
        and parallel.tensor_model_parallel_size > 1
        and parallel.expert_model_parallel_size > 1
    ):
        raise MissingError(
            "--moe-token-dispatcher-type alltoall with both tensor and expert parallelism gathers "
            "unequal shares, which needs a GPU and there is none; use allgather"
        )


def initialize(settings: Settings, sizes: Sizes, launch: Launch, device: str) -> None:
    """Join the job and build Megatron-Core's process groups."""
    import torch
    import torch.distributed as dist

    if settings.model.transformer_impl == "local":
        hide_transformer_engine()
    if device == "cpu":
        from training import cpu_backend

        cpu_backend.install()
    else:
        torch.cuda.set_device(device)
    from megatron.core import parallel_state

    _set_launch_defaults(launch)
    dist.init_process_group(
        backend="gloo" if device == "cpu" else "nccl",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=settings.parallel.distributed_timeout_minutes),
        device_id=None if device == "cpu" else torch.device(device),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_size,
        pipeline_model_parallel_size=sizes.pipeline_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_size,
        context_parallel_size=sizes.context_size,
        expert_model_parallel_size=sizes.expert_size,
        distributed_timeout_minutes=settings.parallel.distributed_timeout_minutes,
        create_gloo_process_groups=True,  # the distributed optimizer's checkpoints go over gloo
    )
    if settings.moe.num_experts:
        allow_without_transformer_engine()


def hide_transformer_engine() -> None:
    """Make megatron.core find no Transformer Engine; call this before importing megatron.core.

    megatron.core imports the package wherever it is installed and uses its optimizers and norms.
    But local layers must be the same with and without the package, and a broken installation must
    not harm a run that does not use it.
    """
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


def _set_launch_defaults(launch: Launch) -> None:
    """Set the address at which a job of one rank without a launcher meets."""
    if launch.world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")


def seed_everything(seed: int) -> None:
    """Seed all generators as Megatron-LM does: each stage has its own seed, so its own weights."""
    import numpy as np
    import torch
    from megatron.core import parallel_state, tensor_parallel

    own = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own)


def finalize() -> None:
    """Leave the job."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


# Long enough for a launcher to end this rank after another rank has failed.
_GRACE_S = 5.0
_told_to_end = threading.Event()

# What gloo and NCCL say when the other side of a connection has ended.
_LOST = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|socket closed|"
    r"remote process exited",
    re.IGNORECASE,
)
# What gloo says when the other side is there but sends nothing.
_TIMED_OUT = re.compile(r"timed out waiting (\d+)ms for (send|recv) operation", re.IGNORECASE)


def end_on_shared_error(launch: Launch, error: MegaScanError) -> int:
    """End after an error that every rank raises by itself: only rank 0 prints it.

    The other ranks wait, so that a launcher that ends the job with the first failing rank does not
    end rank 0 before it has printed. Return the exit code.
    """
    if launch.rank == 0:
        _say(str(error))
    else:
        _wait(error.exit_code, _GRACE_S)
    return error.exit_code


def end_on_own_error(launch: Launch, error: MegaScanError) -> int:
    """End after an error of this rank, or of every rank, during the work; return the exit code.

    When all ranks fail, rank 0 prints the error at once and the launcher ends the others while they
    wait; when another rank fails alone, it prints the error after the wait.
    """
    if launch.rank:
        _wait(error.exit_code, _GRACE_S)
        _say(f"rank {launch.rank}: {error}")
    else:
        _say(str(error))
    return error.exit_code


def carry_out(launch: Launch, work: Callable[[], object]) -> int:
    """Do a rank's work as part of a job; print a failure and return the exit code (0: done)."""
    try:
        work()
    except MegaScanError as error:
        return end_on_own_error(launch, error)
    except RuntimeError as error:
        if is_lost_connection(error):
            return end_on_lost_rank(launch)
        waited = _TIMED_OUT.search(str(error))
        if waited is None:
            raise
        _say(
            f"rank {launch.rank}: another rank has said nothing for {int(waited[1]) / 60e3:g} min "
            "(--distributed-timeout-minutes) and stands still; see what it wrote, or its host"
        )
        return 1
    return 0


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether communication failed because another rank has ended."""
    return _LOST.search(str(error)) is not None


def end_on_lost_rank(launch: Launch) -> int:
    """End because another rank has ended; return the exit code.

    The rank that ended first knows why, so this rank prints only if nobody ends it for long.
    """
    _wait(1, 2 * _GRACE_S)
    _say(f"rank {launch.rank}: another rank has ended in mid-run; see what it wrote, or its host")
    return 1


def end_on_interrupt(launch: Launch) -> int:
    """End after Ctrl-C, which every rank gets; return the exit code that shells expect."""
    if launch.rank == 0:
        print("interrupted", file=sys.stderr, flush=True)
    return 130


def end_later(then: Callable[[], object] | None = None) -> None:
    """Have SIGINT and SIGTERM call `then`, which ends the work in order, and end nothing here.

    A launcher sends a signal once: a rank that fails after it waits for nobody to end it.
    """

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        _told_to_end.set()
        if then is not None:
            then()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def _say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _wait(exit_code: int, duration_s: float) -> None:
    """Wait for the launcher to end this rank; then leave with `exit_code`."""

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(exit_code)

    signal.signal(signal.SIGTERM, leave)
    if _told_to_end.is_set():
        sys.exit(exit_code)
    time.sleep(duration_s)


@contextmanager
def refusals_as_errors() -> Iterator[None]:
    """While inside, turn errors by which Megatron-Core refuses flags into ConfigErrors.

    `training.arguments` checks the rules that it knows; Megatron-Core checks hundreds of further
    combinations, by assertions and ValueErrors, with the same result on every rank.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ConfigError(
            f"Megatron-Core refuses these flags: {reason}; change the flags that it names"
        ) from error
