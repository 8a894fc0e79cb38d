"""What a rank file's header says about the job, read from torch.distributed and megatron.core."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from megascan.config import TraceConfig
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings
from megascan.instrument.mesh import topology_of
from megascan.topology import DEFAULT_ORDER, Coordinates, Layout
from megascan.tracer import Timer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megascan.instrument.groups import Groups

_PACKAGES = ("megascan", "torch", "megatron-core", "transformer-engine")


def describe(
    config: TraceConfig,
    groups: Groups,
    timer: Timer,
    *,
    run_id: str,
    origin_unix_ns: int,
    mesh: DeviceMesh | None = None,
) -> RankHeader:
    """Header of this rank."""
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
        ),
        versions=dict(_versions()),
    )


def read_topology() -> tuple[Layout, Coordinates]:
    """Sizes and this rank's place; a job without megatron.core is data parallel all over."""
    import torch.distributed as dist

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return Layout(dp=dist.get_world_size()), Coordinates(dp=dist.get_rank())
    layout = Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        etp=_expert_tensor_size(parallel_state),
    )
    coordinates = Coordinates(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
    )
    return replace(layout, order=find_order(layout, own_groups(), dist.get_rank())), coordinates


def _expert_tensor_size(parallel_state: ModuleType) -> int:
    """1 without expert parallelism, where it says nothing."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return 1
    size: int = parallel_state.get_expert_tensor_parallel_world_size()
    return size


def own_groups() -> dict[str, tuple[int, ...]]:
    """Ordered members of this rank's group on each axis."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
    }
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        groups["ep"] = parallel_state.get_expert_model_parallel_group()
    return {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in groups.items()}


def find_order(layout: Layout, groups: dict[str, tuple[int, ...]], rank: int) -> str:
    """The rank order that explains this rank's groups; the default one if it does.

    megatron.core takes the order as an argument and does not keep it.
    """
    for order in _orders():
        candidate = replace(layout, order=order)
        if all(candidate.group(rank, axis) == ranks for axis, ranks in groups.items()):
            return order
    return DEFAULT_ORDER


def _orders() -> Iterator[str]:
    yield DEFAULT_ORDER
    for axes in itertools.permutations(DEFAULT_ORDER.split("-")):
        yield "-".join(axes)


def read_device() -> Device:
    """What this rank computes on."""
    import torch

    if not uses_cuda():
        name = platform.processor() or platform.machine()
        return Device(kind="cpu", name=name)
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuid = f"GPU-{properties.uuid}"  # as NVML and nvidia-smi write it
    return Device(kind="cuda", name=properties.name, index=index, uuid=uuid)


def uses_cuda() -> bool:
    """Whether this rank computes on a GPU: NCCL needs one, other backends may use one."""
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
