"""Starting the tracer: the one call a trainer makes."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

from megascan.clock import HostClock
from megascan.config import TraceConfig
from megascan.instrument.agreement import agree
from megascan.instrument.groups import Groups
from megascan.instrument.job import describe, uses_cuda
from megascan.instrument.table import install
from megascan.tracer import (
    CpuTimer,
    IterationListener,
    RecordingTracer,
    Timer,
    Tracer,
    TraceWriter,
)

logger = logging.getLogger("megascan")

_active: list[weakref.ref[RecordingTracer]] = []
"""The tracer of this process, if one is active: instrumentation must not be installed twice."""


def start(config: TraceConfig, *, resumed: bool = False) -> Tracer:
    """Trace this job as `config` says; every rank calls it, after its process groups are there.

        tracer = megascan.start(TraceConfig(enabled=True, directory=Path("trace_output")))
        for iteration in range(1, num_iterations + 1):
            with tracer.iteration(iteration):
                train_step()
        tracer.close()

    With `enabled` False nothing is installed and the tracer returned does nothing. `resumed` (or a
    restart by torchrun) appends to the files of the earlier run under a new run id; otherwise an
    earlier run's files are set aside first. A start that fails is logged once and leaves training
    without a trace; it never raises.
    """
    if not config.enabled:
        return Tracer()
    for earlier in _active:
        if (tracer := earlier()) is not None:
            tracer.close()
    _active.clear()
    started = RecordingTracer(config)
    try:
        _begin(started, config, resumed=resumed or _restarted())
    except Exception as error:
        started.fail(error)
        started.close()
        return Tracer()
    _active.append(weakref.ref(started))
    return started


def _begin(tracer: RecordingTracer, config: TraceConfig, *, resumed: bool) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; start tracing after it is")
    agreement = agree(distributed_c10d._get_default_store(), dist.get_rank())
    timer = make_timer(agreement.clock, full=tracer.full)
    groups = Groups()
    header = describe(
        config,
        groups,
        timer,
        run_id=agreement.run_id,
        origin_unix_ns=agreement.clock.origin_unix_ns,
    )
    writer = TraceWriter(config.directory, header, timer, resumed=resumed, on_failure=tracer.fail)
    tracer.record_with(timer, writer)
    tracer.listen(_Removal(install(tracer, groups).remove))


def make_timer(clock: HostClock, *, full: bool) -> Timer:
    """The timer for what this rank computes on."""
    if not uses_cuda():
        return CpuTimer(clock)
    from megascan.tracer.cuda import CudaTimer
    from megascan.tracer.torch_device import TorchDevice

    return CudaTimer(clock, TorchDevice(), record_launches=full)


def _restarted() -> bool:
    """Whether torchrun has restarted the job after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


class _Removal(IterationListener):
    """Takes the instrumentation away when tracing ends."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def tracing_ends(self) -> None:
        """Put every wrapped place back."""
        self._remove()
