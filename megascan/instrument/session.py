"""Starting the tracer: the one call a trainer makes."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megascan.clock import HostClock
from megascan.config import TraceConfig
from megascan.header import WindowRecord
from megascan.instrument.agreement import StoreBoard, agree
from megascan.instrument.groups import Groups
from megascan.instrument.job import describe, uses_cuda
from megascan.instrument.place import Installation
from megascan.instrument.table import install
from megascan.tracer import (
    Budget,
    CpuTimer,
    IterationListener,
    RecordingTracer,
    Timer,
    Tracer,
    TraceWriter,
    Voice,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("megascan")

_active: list[weakref.ref[RecordingTracer]] = []
"""The tracer of this process, if one is active: instrumentation must not be installed twice."""


def start(
    config: TraceConfig,
    *,
    resumed: bool = False,
    model: torch.nn.Module | Sequence[torch.nn.Module] = (),
    mesh: DeviceMesh | None = None,
) -> Tracer:
    """Trace this job as `config` says; every rank calls it, after its process groups are there.

        tracer = megascan.start(TraceConfig(enabled=True, directory=Path("trace_output")))
        for iteration in range(1, num_iterations + 1):
            with tracer.iteration(iteration):
                train_step()
        tracer.close()

    With `enabled` False nothing is installed and the tracer returned does nothing. Where one rank
    says `resumed` (or torchrun has restarted it), all append to the files of the earlier run under
    a new run id; otherwise an earlier run's files are set aside first. A start that fails is logged
    once and leaves training without a trace; it never raises.

    A trainer on plain PyTorch gives its `model` (one, or one a pipeline chunk of this rank), whose
    passes are then seen through hooks, and, unless all ranks are data parallel, its device `mesh`.
    """
    if not config.enabled:
        return Tracer()
    for earlier in _active:
        if (tracer := earlier()) is not None:
            tracer.close()
    _active.clear()
    started = RecordingTracer(config)
    try:
        models = tuple(model) if isinstance(model, Sequence) else (model,)
        _begin(started, config, models, mesh, resumed=resumed or _restarted())
    except Exception as error:
        started.fail(error)
        started.close()
        return Tracer()
    _active.append(weakref.ref(started))
    return started


def _begin(
    tracer: RecordingTracer,
    config: TraceConfig,
    models: Sequence[torch.nn.Module],
    mesh: DeviceMesh | None,
    *,
    resumed: bool,
) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; start tracing after it is")
    store = distributed_c10d._get_default_store()
    agreement = agree(store, dist.get_rank(), dist.get_world_size(), resumed=resumed)
    voice = Voice(dist.get_rank(), agreement.board.claim)
    tracer.speak_with(voice)
    timer = make_timer(agreement.clock, full=tracer.full)
    groups = Groups(mesh, all_data_parallel=bool(models) and mesh is None)
    header = describe(
        config,
        groups,
        timer,
        run_id=agreement.run_id,
        origin_unix_ns=agreement.clock.origin_unix_ns,
        mesh=mesh,
    )
    writer = TraceWriter(
        config.directory,
        header,
        timer,
        resumed=agreement.resumed,
        on_failure=tracer.fail,
        on_written=_budget_of(tracer, config, agreement.board),
        voice=voice,
    )
    tracer.record_with(timer, writer)
    tracer.listen(_Removal(install(tracer, groups, models)))


def _budget_of(
    tracer: RecordingTracer, config: TraceConfig, board: StoreBoard
) -> Callable[[WindowRecord], None] | None:
    """What looks after the budget, if there is one."""
    import torch.distributed as dist

    if not config.budget_ratio:
        return None
    return Budget(
        config,
        board,
        decides=dist.get_rank() == 0,
        lower=tracer.lower,
        current_iteration=lambda: tracer.current_iteration,
    ).window_written


def make_timer(clock: HostClock, *, full: bool) -> Timer:
    """The timer for what this rank computes on."""
    if not uses_cuda():
        return CpuTimer(clock)
    from megascan.tracer.cuda import CudaTimer
    from megascan.tracer.torch_device import TorchDevice

    return CudaTimer(clock, TorchDevice(), record_launches=full)


def _restarted() -> bool:
    """Whether torchrun, as far as the launcher of this host knows, has restarted the job."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class _Removal(IterationListener):
    """Takes the instrumentation away when it is no longer wanted."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    def granularity_lowered(self) -> None:
        """Put back what only `full` records."""
        self._installation.remove_full()

    def tracing_ends(self) -> None:
        """Put every wrapped place back."""
        self._installation.remove()
