"""A rank whose link is slow.

Every message that the rank receives or sends, and every collective that it takes part in, takes
longer on this rank by ``(factor - 1) x estimate``, or by a fixed delay. The estimate is a fixed
latency plus the bytes over a fixed bandwidth (`GLOO`, `NCCL`). Measured times are not used, because
they contain waits for other ranks. The extra time comes

- for a received message, and for a collective, after the data are there: the call, or the wait for
  an asynchronous call, returns later on this rank;
- for a sent message, before it leaves, so that the receiver gets it later.

A real slow link would slow the whole ring of a collective. Here other members do not see the slow
link inside the collective; they see this rank arrive late at the next. With ``peer`` only messages
between the fault's rank and this peer, and collectives of just these two ranks, are slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist

from training.faults.compute import (
    Function,
    spin,
    spin_cycles_per_ms,
    wrap_attribute,
    wrap_everywhere,
)
from training.faults.fault import FaultSpec

_COLLECTIVES = (
    "all_reduce", "all_gather_into_tensor", "_all_gather_base", "all_gather_single",
    "reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single", "all_gather",
    "reduce_scatter", "all_to_all_single", "all_to_all", "broadcast", "reduce",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UsualTransfer:
    """Estimate of a transfer's time."""

    latency_ms: float
    bytes_per_ms: float

    def time_ms(self, num_bytes: int) -> float:
        """Return the time of a transfer: latency plus bytes over bandwidth."""
        return self.latency_ms + num_bytes / self.bytes_per_ms


GLOO = UsualTransfer(latency_ms=2.0, bytes_per_ms=1e6)  # processes that share the cores of one host
NCCL = UsualTransfer(latency_ms=0.05, bytes_per_ms=1e8)  # NVLink within a host, rounded


class PendingWork(Protocol):
    """An asynchronous operation of torch.distributed."""

    def wait(self, *arguments: object) -> object:
        """Wait until the operation is complete."""


class _Coalesced(Protocol):
    works: list[PendingWork]


class SlowLink:
    """The slow link of this rank: which transfers cross it, and the extra time of each."""

    def __init__(self, fault: FaultSpec) -> None:
        self._fault = fault
        self._acts = False
        self._is_cuda = torch.cuda.is_available()
        self._transfer = NCCL if self._is_cuda else GLOO
        self._cycles_per_ms = spin_cycles_per_ms() if self._is_cuda else 0.0
        self._coalesced_bytes: list[int] = []

    def begin_iteration(self, *, acts: bool) -> None:
        """Note whether the fault acts in the iteration that begins."""
        self._acts = acts
        self._coalesced_bytes.clear()

    def concerns(self, group: dist.ProcessGroup | None) -> bool:
        """Return whether collectives of a group cross the slow link now."""
        if not self._acts:
            return False
        members = set(dist.get_process_group_ranks(group))
        pair = {self._fault.rank, self._fault.peer}
        return len(members) > 1 and (self._fault.peer is None or members == pair)

    def concerns_peer(self, peer: int) -> bool:
        """Return whether messages from or to a rank cross the slow link now."""
        return self._acts and self._fault.peer in (None, peer)

    def take(self, num_bytes: int) -> None:
        """Spend the extra time of a transfer: the host sleeps, or the GPU spins."""
        extra_ms = self._fault.delay_ms
        if extra_ms is None:
            extra_ms = self._fault.excess * self._transfer.time_ms(num_bytes)
        if self._is_cuda:
            spin(int(extra_ms * self._cycles_per_ms))
        else:
            time.sleep(extra_ms * 1e-3)

    def note_coalesced(self, num_bytes: int) -> bool:
        """Note bytes that a coalescing manager will send; return False outside of a manager."""
        if not self._coalesced_bytes:
            return False
        self._coalesced_bytes[-1] += num_bytes
        return True

    @contextmanager
    def coalescing(self) -> Iterator[Callable[[], int]]:
        """Surround a coalescing manager; yield a callable that returns the bytes noted inside."""
        self._coalesced_bytes.append(0)
        depth = len(self._coalesced_bytes)
        total = 0

        def noted() -> int:
            return total

        try:
            yield noted
        finally:
            if len(self._coalesced_bytes) == depth:
                total = self._coalesced_bytes.pop()


class SlowWork:
    """An asynchronous operation that ends later than the real one.

    There is no `get_future`: a future would end without the delay.
    """

    def __init__(self, link: SlowLink, num_bytes: int, work: PendingWork | None) -> None:
        self._link = link
        self._num_bytes = num_bytes
        self._work = work
        self._is_late = True

    def wait(self, *arguments: object) -> object:
        """Wait for the operation and, at the first call, for the delay."""
        done = True if self._work is None else self._work.wait(*arguments)
        if self._is_late:
            self._is_late = False
            self._link.take(self._num_bytes)
        return done

    def is_completed(self) -> bool:
        """Return whether the operation and the delay were waited for."""
        return not self._is_late


def install(link: SlowLink) -> None:
    """Slow all communication of this process by `link`, for good."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    for name in _COLLECTIVES:
        wrap_everywhere(dist, name, lambda original: _slow_collective(original, link))
    wrap_everywhere(dist, "_coalescing_manager", lambda original: _slow_set(original, link))
    wrap_attribute(P2PCommunicator, "_communicate", lambda original: _slow_p2p(original, link))


def _slow_collective(original: Function, link: SlowLink) -> Function:
    def collective(*arguments: object, **options: object) -> object:
        values = (*arguments, *options.values())
        group = next((value for value in values if isinstance(value, dist.ProcessGroup)), None)
        if not link.concerns(group):
            return original(*arguments, **options)
        num_bytes = _largest_tensor_bytes(values)
        work = original(*arguments, **options)
        if link.note_coalesced(num_bytes):
            return work
        if work is None:
            link.take(num_bytes)
            return None
        return SlowWork(link, num_bytes, cast(PendingWork, work))

    return collective


def _slow_set(original: Function, link: SlowLink) -> Function:
    """Slow collectives that are launched together, as one transfer of all their bytes."""

    @contextmanager
    def manager(
        group: dist.ProcessGroup | None = None, *arguments: object, **options: object
    ) -> Iterator[object]:
        inner = cast("AbstractContextManager[object]", original(group, *arguments, **options))
        if not link.concerns(group):
            with inner as handle:
                yield handle
            return
        with link.coalescing() as noted, inner as handle:
            yield handle
        works = cast(_Coalesced, handle).works
        if works:
            works[-1] = SlowWork(link, noted(), works[-1])
        else:
            link.take(noted())

    return manager


def _slow_p2p(original: Function, link: SlowLink) -> Function:
    """Slow messages between pipeline stages, all of which go through one method."""

    def communicate(communicator: object, *arguments: object, **options: object) -> object:
        peers = {
            "prev": cast(int, getattr(communicator, "prev_rank")),  # noqa: B009 - untyped
            "next": cast(int, getattr(communicator, "next_rank")),  # noqa: B009 - untyped
        }
        for direction, peer in peers.items():
            sent = options.get(f"tensor_send_{direction}")
            if isinstance(sent, torch.Tensor) and link.concerns_peer(peer):
                link.take(sent.nbytes)
        result = original(communicator, *arguments, **options)
        received_prev, received_next, handles = cast(
            "tuple[object, object, dict[str, PendingWork] | list[PendingWork] | None]", result
        )
        for direction, received in (("prev", received_prev), ("next", received_next)):
            if isinstance(received, torch.Tensor) and link.concerns_peer(peers[direction]):
                _delay_receive(link, f"recv_{direction}", received.nbytes, handles)
        return result

    return communicate


def _delay_receive(
    link: SlowLink,
    name: str,
    num_bytes: int,
    handles: dict[str, PendingWork] | list[PendingWork] | None,
) -> None:
    if isinstance(handles, dict) and name in handles:
        handles[name] = SlowWork(link, num_bytes, handles[name])
    elif not handles:
        link.take(num_bytes)


def _largest_tensor_bytes(values: tuple[object, ...]) -> int:
    sizes = [0]
    for value in values:
        tensors = value if isinstance(value, list | tuple) else (value,)
        sizes.append(sum(item.nbytes for item in tensors if isinstance(item, torch.Tensor)))
    return max(sizes)
