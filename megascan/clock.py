"""This host's monotonic clock: its ties to unix time and the name of its domain.

Every process of a host reads the same physical clock (CLOCK_MONOTONIC), which no time daemon steps.
A `HostClock` ties it once to unix time; ranks of one host that share the tie (`offset_ns`) have
comparable times without any alignment.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIE_ATTEMPTS = 20

now_ns = time.monotonic_ns
"""Host time in ns since an arbitrary start; only differences mean something."""


@dataclass(frozen=True, kw_only=True)
class HostClock:
    """`offset_ns` is unix time minus monotonic time; `origin_ns` is the monotonic time of zero."""

    domain: str
    offset_ns: int
    origin_ns: int

    @property
    def origin_unix_ns(self) -> int:
        """Return the unix time of the origin by this host's tie."""
        return self.origin_ns + self.offset_ns


def host_domain() -> str:
    """Name of this host's clock: host name and boot, since a reboot starts another clock."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux: the host name must do
        boot = "unknown-boot"
    return f"{socket.gethostname()}:{boot}"


def measure_offset_ns() -> int:
    """Return unix time minus monotonic time, from the reading that was interrupted least."""
    best_width_ns, best_offset_ns = 1 << 62, 0
    for _ in range(_TIE_ATTEMPTS):
        before_ns = now_ns()
        unix_ns = time.time_ns()
        after_ns = now_ns()
        if after_ns - before_ns < best_width_ns:
            best_width_ns = after_ns - before_ns
            best_offset_ns = unix_ns - (before_ns + after_ns) // 2
    return best_offset_ns
