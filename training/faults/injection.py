"""Put the faults of this rank in place, and turn them on and off by iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from megascan.vocabulary import FaultKind
from training.callback import Callback
from training.faults.fault import FaultSpec
from training.faults.host import GarbagePressure, SlowLoader


class ActiveFault(Protocol):
    """An installed fault, which is told for each iteration whether to act."""

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""


class FaultCallback(Callback):
    """Turns faults on and off as iterations begin."""

    def __init__(self, faults: Sequence[tuple[FaultSpec, ActiveFault]]) -> None:
        self._faults = tuple(faults)

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Turn on the faults that act in this iteration, and all others off."""
        for spec, fault in self._faults:
            fault.begin_iteration(acts=spec.acts_in(iteration))
        yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load slowly where a loader fault acts."""
        with ExitStack() as stack:
            for _, fault in self._faults:
                if isinstance(fault, SlowLoader):
                    stack.enter_context(fault.loading())
            yield


def install_faults(faults: Sequence[FaultSpec], rank: int, seed: int) -> FaultCallback:
    """Put the faults of a rank in place and return what turns them on and off.

    Call this after Megatron-Core's process groups are made and before models are built and tracing
    starts. Ranks without a fault are not changed.
    """
    own = [fault for fault in faults if fault.rank == rank]
    return FaultCallback([(fault, _install(fault, seed)) for fault in own])


def _install(fault: FaultSpec, seed: int) -> ActiveFault:
    """Put one fault in place, turned off."""
    import torch

    from training.faults import compute, host, link
    from training.faults.compute import CpuSlowness, GpuSlowness

    match fault.kind:
        case FaultKind.COMPUTE:
            kind = GpuSlowness if torch.cuda.is_available() else CpuSlowness
            slowness = kind(fault.excess)
            compute.install(slowness)
            return slowness
        case FaultKind.LINK:
            slow_link = link.SlowLink(fault)
            link.install(slow_link)
            return slow_link
        case FaultKind.HOST:
            busy_host = host.BusyHost(fault.excess, seed)
            host.install(busy_host)
            return busy_host
        case FaultKind.LOADER:
            return SlowLoader(fault)
        case FaultKind.GC:
            return GarbagePressure(fault)
