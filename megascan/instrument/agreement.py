"""What all ranks must agree on before tracing: the run's id, and each host's tie to unix time.

Agreed through the key-value store by which the job found together, so that not a byte goes over
the training network.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from megascan.clock import HostClock, host_domain, measure_offset_ns, now_ns

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Equal on all ranks: `run_id`. Equal on all ranks of a host: the clock's domain and offset."""

    run_id: str
    clock: HostClock


def new_run_id() -> str:
    """UTC time and a few random digits: ``20261121-084512-3f9a``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def agree(store: Store, rank: int) -> Agreement:
    """Agree with the other ranks, which all must come here. Raises when rank 0 does not answer.

    Every start counts in the store, so that a second one of the same job agrees anew.
    """
    start = store.add(f"megascan/starts/{rank}", 1)
    prefix = f"megascan/{start}"
    if rank == 0:
        store.set(f"{prefix}/run_id", new_run_id())
    store.wait([f"{prefix}/run_id"], _TIMEOUT)
    run_id = store.get(f"{prefix}/run_id").decode()
    domain = host_domain()
    own_offset = str(measure_offset_ns())
    offset_ns = int(store.compare_set(f"{prefix}/offset/{domain}", "", own_offset))
    clock = HostClock(domain=domain, offset_ns=offset_ns, origin_ns=now_ns())
    return Agreement(run_id=run_id, clock=clock)
