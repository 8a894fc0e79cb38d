"""Start the tracer: the one call a trainer makes, and what all ranks must agree on before it.

The ranks agree on the run, on the files of an earlier run and on the time, through the job's
key-value store: not a byte goes over the training network. The file's header says what
torch.distributed and megatron.core know of the job.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import logging
import os
import platform
import secrets
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from megascan.config import TraceConfig
from megascan.header import (
    ClockOrigin,
    Device,
    RankHeader,
    TraceSettings,
    Trainer,
    WindowRecord,
)
from megascan.instrument.collectives import Groups, topology_of
from megascan.instrument.table import install
from megascan.schema import Granularity
from megascan.topology import DEFAULT_ORDER, Coordinates, Layout
from megascan.tracer import CpuTimer, Lookout, RecordingTracer, Timer, Tracer, TraceWriter, Voice
from megascan.tracer.timer import HostClock, host_domain, measure_offset_ns, now_ns

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

    from megascan.tracer.switch import Switch


_TIMEOUT = timedelta(seconds=60)
_RESUMED, _FRESH = "resumed", "fresh"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What ranks agree on: `run_id` and `resumed` on all ranks, the clock's domain and offset on
    the ranks of a host.
    """

    run_id: str
    resumed: bool
    clock: HostClock
    board: StoreBoard


@dataclass(frozen=True)
class StoreBoard:
    """Announcements of rank 0 during a run, in the job's key-value store; no rank waits for them.

    A store that is gone (the job is ending, its host died) has no announcements.
    """

    store: Store
    prefix: str

    def topic(self, name: str) -> StoreBoard:
        """Return a board with separate announcements for a topic."""
        return StoreBoard(self.store, f"{self.prefix}/{name}")

    def publish(self, number: int, text: str) -> None:
        """Write announcement `number`, from 0."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{self.prefix}/announcement/{number}", text)

    def claim(self, topic: str) -> bool:
        """Return whether this rank is the first with a topic; true if the store cannot tell."""
        with contextlib.suppress(RuntimeError):
            return self.store.add(f"{self.prefix}/claim/{topic}", 1) == 1
        return True

    def read(self, number: int) -> str | None:
        """Return announcement `number`; None if it is not written yet."""
        key = f"{self.prefix}/announcement/{number}"
        with contextlib.suppress(RuntimeError):
            return self.store.get(key).decode() if self.store.check([key]) else None
        return None


def new_run_id() -> str:
    """Return a new id from UTC time and a few random digits: ``20261121-084512-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def agree(store: Store, rank: int, world_size: int, *, resumed: bool) -> Agreement:
    """Agree on run and clock with all other ranks, which must call this, too; raise if one does
    not.

    The job goes on from an earlier run if any rank says so: when torchrun has replaced a lost host
    by a new host, only the launchers of the old hosts count the restart. The store counts starts,
    so that a second start in the same job agrees anew.
    """
    start = store.add(f"megascan/starts/{rank}", 1)
    prefix = f"megascan/{start}"
    if resumed:
        store.set(f"{prefix}/resumed", "")
    if store.add(f"{prefix}/arrived", 1) == world_size:
        mode = _RESUMED if store.check([f"{prefix}/resumed"]) else _FRESH
        store.set(f"{prefix}/run", f"{mode} {new_run_id()}")
    try:
        store.wait([f"{prefix}/run"], _TIMEOUT)
    except RuntimeError as error:
        raise RuntimeError(
            f"not all {world_size} ranks started tracing within {_TIMEOUT.seconds} s; every rank "
            f"must call megascan.start ({error})"
        ) from error
    mode, run_id = store.get(f"{prefix}/run").decode().split()
    domain = host_domain()
    own_offset = str(measure_offset_ns())
    offset_ns = int(store.compare_set(f"{prefix}/offset/{domain}", "", own_offset))
    clock = HostClock(domain=domain, offset_ns=offset_ns, origin_ns=now_ns())
    board = StoreBoard(store, prefix)
    return Agreement(run_id=run_id, resumed=mode == _RESUMED, clock=clock, board=board)


_PACKAGES = ("megascan", "torch", "megatron-core", "transformer-engine")


def make_header(
    config: TraceConfig,
    groups: Groups,
    timer: Timer,
    *,
    run_id: str,
    origin_unix_ns: int,
    mesh: DeviceMesh | None = None,
) -> RankHeader:
    """Make the header of this rank."""
    import torch.distributed as dist

    layout, coordinates = read_topology() if mesh is None else topology_of(mesh, dist.get_rank())
    return RankHeader(
        run_id=run_id,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        layout=layout,
        coordinates=coordinates,
        groups=groups.members,
        host=socket.gethostname(),
        process_id=os.getpid(),
        device=read_device(),
        backend=str(dist.get_backend()),
        clock=ClockOrigin(domain=timer.domain, source=timer.source, origin_unix_ns=origin_unix_ns),
        trace=TraceSettings(
            granularity=config.granularity,
            interval=config.interval,
            window=config.window,
            compress=config.compress,
            max_bytes=config.max_bytes,
            budget_ratio=config.budget_ratio,
            layer_stride=config.layer_stride if config.granularity is Granularity.FULL else 1,
        ),
        versions=dict(_versions()),
        trainer=Trainer.MEGATRON if _parallel_state() else Trainer.TORCH,
    )


def read_topology() -> tuple[Layout, Coordinates]:
    """Return layout and this rank's place; without megatron.core all ranks are data parallel."""
    import torch.distributed as dist

    parallel_state = _parallel_state()
    if parallel_state is None:
        return Layout(dp=dist.get_world_size()), Coordinates(dp=dist.get_rank())
    sizes, places = (
        {
            axis: getattr(parallel_state, f"get_{name}_parallel_{what}")()
            for axis, name in _NAMES_OF_AXES.items()
        }
        for what in ("world_size", "rank")
    )
    layout = Layout(
        **sizes,
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        etp=parallel_state.get_expert_tensor_parallel_world_size() if sizes["ep"] > 1 else 1,
    )
    order = find_order(layout, own_groups(), dist.get_rank())
    return replace(layout, order=order), Coordinates(**places)


def _parallel_state() -> Any | None:
    """Return megatron.core's parallel state if the trainer has initialised it, else None."""
    module = sys.modules.get("megatron.core.parallel_state")
    return module if module is not None and module.model_parallel_is_initialized() else None


_NAMES_OF_AXES = {
    "tp": "tensor_model",
    "cp": "context",
    "ep": "expert_model",
    "dp": "data",
    "pp": "pipeline_model",
}
"""Axes in the names of parallel_state's functions: `get_tensor_model_parallel_group`, …"""


def own_groups() -> dict[str, tuple[int, ...]]:
    """Return ordered members of this rank's group on each axis; of EP's only if it is used."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    is_used = {"ep": parallel_state.get_expert_model_parallel_world_size() > 1}
    return {
        axis: tuple(
            dist.get_process_group_ranks(getattr(parallel_state, f"get_{name}_parallel_group")())
        )
        for axis, name in _NAMES_OF_AXES.items()
        if is_used.get(axis, True)
    }


def find_order(layout: Layout, groups: dict[str, tuple[int, ...]], rank: int) -> str:
    """Find a rank order that explains this rank's groups, the default order first.

    megatron.core takes the order as an argument and does not keep it.
    """
    orders = map("-".join, itertools.permutations(DEFAULT_ORDER.split("-")))
    for order in (DEFAULT_ORDER, *orders):
        candidate = replace(layout, order=order)
        if all(candidate.group(rank, axis) == ranks for axis, ranks in groups.items()):
            return order
    return DEFAULT_ORDER


def read_device() -> Device:
    """Describe the device on which this rank computes."""
    import torch

    if not uses_cuda():
        name = platform.processor() or platform.machine()
        return Device(kind="cpu", name=name)
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuid = f"GPU-{properties.uuid}"  # as NVML and nvidia-smi write it
    return Device(kind="cuda", name=properties.name, index=index, uuid=uuid)


def uses_cuda() -> bool:
    """Return whether this rank computes on a GPU: NCCL needs a GPU, other backends may use one."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return False
    return "nccl" in str(dist.get_backend()) or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


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

    With `enabled` False nothing is installed and the returned tracer does nothing. If any rank says
    `resumed` (or torchrun has restarted it), all ranks append to the files of the earlier run under
    a new run id; otherwise an earlier run's files are moved aside first. A start that fails is
    logged once and leaves training without a trace; it never raises.

    A trainer on plain PyTorch gives its `model` (or a model for each pipeline chunk of this rank),
    whose passes are then seen through hooks, and, unless all ranks are data parallel, its device
    `mesh`.
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
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by torchrun
        _begin(started, config, models, mesh, resumed=resumed or restarted)
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
    header = make_header(
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
    if config.armed:
        tracer.switch_with(_switch_of(tracer, config, agreement.board))
    tracer.listen(install(tracer, groups, models))
    tracer.listen(Lookout(config.directory, header, lambda: tracer.current_iteration))


def _budget_of(
    tracer: RecordingTracer, config: TraceConfig, board: StoreBoard
) -> Callable[[WindowRecord], None] | None:
    """Return the callback of a budget; None if there are no untraced iterations to compare with."""
    import torch.distributed as dist

    if config.window == config.interval:
        return None
    from megascan.tracer.budget import Budget

    return Budget(
        config,
        board,
        decides=dist.get_rank() == 0,
        lower=tracer.lower,
        current_iteration=lambda: tracer.current_iteration,
        largest_stride=tracer.layers.largest_stride,
        last_stride=tracer.layers.last_stride,
    ).window_written


def _switch_of(tracer: RecordingTracer, config: TraceConfig, board: StoreBoard) -> Switch:
    """Return the switch of an armed run, which obeys the signal."""
    import torch.distributed as dist

    from megascan.tracer.switch import Switch

    switch = Switch(
        config.directory,
        board.topic("switch"),
        decides=dist.get_rank() == 0,
        interval=config.interval,
        announce=tracer.announce,
    )
    switch.obey_signal()
    return switch


def make_timer(clock: HostClock, *, full: bool) -> Timer:
    """Make the timer for the device on which this rank computes."""
    if not uses_cuda():
        return CpuTimer(clock)
    from megascan.tracer.cuda import CudaTimer, TorchDevice

    return CudaTimer(clock, TorchDevice(), record_launches=full)
