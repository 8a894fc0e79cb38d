"""Whether this host's clock is kept in time.

MegaScan ties the hosts' clocks together by itself; but logs of several hosts can be read side by
side only when they are synchronised, and certificates and job limits depend on it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from health.check import Check, Status
from megascan.header import Json

_TIMEOUT_S = 5
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC of <sys/timex.h>
_TIME_ERROR = 5
_FAR_S = 0.1  # synchronised, but not yet there


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """What a source says; `offset_s` is None when it does not tell how far the clock is off."""

    source: str
    synchronised: bool
    offset_s: float | None = None


def check_clock(sources: tuple[Callable[[], ClockState | None], ...] | None = None) -> Check:
    """Ask chrony, then timedatectl, then the kernel: the first that answers counts."""
    for ask in sources or (ask_chrony, ask_timedatectl, ask_kernel):
        state = ask()
        if state is not None:
            return _judge(state)
    text = "nobody on this host says whether the clock is synchronised; install chrony"
    return Check(name="clock", status=Status.WARNING, text=text)


def _judge(state: ClockState) -> Check:
    offset = "" if state.offset_s is None else f", {state.offset_s * 1e3:+.3f} ms off"
    status, text = Status.OK, f"synchronised by {state.source}{offset}"
    if not state.synchronised:
        status = Status.WARNING
        text = f"not synchronised, says {state.source}; start chronyd or systemd-timesyncd"
    elif state.offset_s is not None and abs(state.offset_s) > _FAR_S:
        status, text = (
            Status.WARNING,
            f"{text}, more than {_FAR_S * 1e3:.0f} ms; see chronyc tracking",
        )
    values: dict[str, Json] = {
        "synchronised": state.synchronised,
        "source": state.source,
        "offset_s": state.offset_s,
    }
    return Check(name="clock", status=status, text=text, values=values)


def ask_chrony() -> ClockState | None:
    """`chronyc -c tracking`: the 5th field is the offset, the last the leap status."""
    fields = _output("chronyc", "-c", "tracking").strip().split(",")
    try:
        offset_s = float(fields[4])
    except (IndexError, ValueError):
        return None
    synchronised = fields[-1] != "Not synchronised"
    return ClockState(source="chrony", synchronised=synchronised, offset_s=offset_s)


def ask_timedatectl() -> ClockState | None:
    """`timedatectl`'s word on NTP."""
    answer = _output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip()
    if answer not in ("yes", "no"):
        return None
    return ClockState(source="timedatectl", synchronised=answer == "yes")


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` of <sys/timex.h>; the rest is not read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def ask_kernel() -> ClockState | None:
    """The kernel's own flag; works in containers, where the daemons cannot be asked."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):  # not Linux
        return None
    timex = _Timex()
    state = adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    synchronised = state != _TIME_ERROR and not timex.status & _UNSYNCHRONISED
    return ClockState(source="the kernel", synchronised=synchronised)


def _output(*command: str) -> str:
    """What a program prints; nothing when it is missing, slow or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
