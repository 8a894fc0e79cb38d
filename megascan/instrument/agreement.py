"""What all ranks must agree on before tracing: the run, what becomes of an earlier one, the time.

Agreed through the key-value store by which the job found together, so that not a byte goes over
the training network.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from megascan.clock import HostClock, host_domain, measure_offset_ns, now_ns

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=60)
_RESUMED, _FRESH = "resumed", "fresh"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Equal on all ranks: `run_id`, `resumed`. On all of a host: the clock, less origin."""

    run_id: str
    resumed: bool
    clock: HostClock
    board: StoreBoard


class StoreBoard:
    """What rank 0 announces during a run, in the job's key-value store; nobody waits for it.

    A store that is gone (the job is ending, its host died) holds no announcements.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def publish(self, number: int, text: str) -> None:
        """Announcement `number`, from 0."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._prefix}/announcement/{number}", text)

    def claim(self, topic: str) -> bool:
        """Whether this rank is the first with a topic; where that cannot be told, it is."""
        with contextlib.suppress(RuntimeError):
            return self._store.add(f"{self._prefix}/claim/{topic}", 1) == 1
        return True

    def read(self, number: int) -> str | None:
        """The announcement, None when there is none."""
        key = f"{self._prefix}/announcement/{number}"
        with contextlib.suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else None
        return None


def new_run_id() -> str:
    """UTC time and a few random digits: ``20261121-084512-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def agree(store: Store, rank: int, world_size: int, *, resumed: bool) -> Agreement:
    """Agree with the other ranks, which all must come here. Raises when one of them does not.

    The job goes on from an earlier run as soon as one rank says so: where torchrun has put a new
    host in the place of a lost one, only the launchers of the old hosts count the restart. Every
    start counts in the store, so that a second one of the same job agrees anew.
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
