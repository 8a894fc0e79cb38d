"""Check the host: room on disk and in shared memory, versions of packages, the clock.

MegaScan itself aligns the hosts' clocks; but logs of several hosts can be compared only if the
clocks are synchronised, and certificates and job limits depend on the clock.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from health.check import Check, Status
from megascan.header import Json

_GB = 1e9
# Docker gives 64 MB, with which NCCL and loader processes fail; together they need a gigabyte.
_LEAST_SHARED_BYTES, _GOOD_SHARED_BYTES = 128e6, 1e9
_SHARED_MEMORY = Path("/dev/shm")
_PACKAGES = ("megascan", "torch", "megatron-core", "transformer-engine", "numpy", "pyarrow")


def check_disk(folder: Path, least_gb: float) -> Check:
    """Check that traces and checkpoints can be written to `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room")
        free_gb = shutil.disk_usage(folder).free / _GB
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}); choose another with --path"
        return Check(name="disk", status=Status.PROBLEM, text=text)
    enough = free_gb >= least_gb
    text = f"{free_gb:.1f} GB free at {folder}" + (
        "" if enough else f", less than {least_gb:g}; free some or choose another with --path"
    )
    return Check(
        name="disk",
        status=Status.OK if enough else Status.PROBLEM,
        text=text,
        values={"free_bytes": int(free_gb * _GB), "folder": str(folder)},
    )


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Check:
    """Check that processes of this host can pass data to one another."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"{folder} is not there ({error.strerror}); loaders and NCCL need it"
        return Check(name="shared memory", status=Status.PROBLEM, text=text)
    status, advice = Status.OK, ""
    if free_bytes < _GOOD_SHARED_BYTES:
        status = Status.PROBLEM if free_bytes < _LEAST_SHARED_BYTES else Status.WARNING
        advice = "; in a container raise it: --shm-size 8g, or an emptyDir of medium Memory"
    text = f"{free_bytes / _GB:.2f} GB free at {folder}{advice}"
    return Check(name="shared memory", status=status, text=text, values={"free_bytes": free_bytes})


def check_versions() -> Check:
    """Say what is installed, without importing it; nothing here can fail."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check(name="versions", status=Status.OK, text=text, values=dict(versions))


_TIMEOUT_S = 5
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC of <sys/timex.h>
_TIME_ERROR = 5
_FAR_S = 0.1  # synchronised, but still being corrected


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """What a source says of the clock; `offset_s` is None if the source does not tell it."""

    source: str
    synchronised: bool
    offset_s: float | None = None


def check_clock(sources: tuple[Callable[[], ClockState | None], ...] | None = None) -> Check:
    """Ask chrony, then timedatectl, then the kernel: the first source that answers counts."""
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
    """Ask `chronyc -c tracking`: the 5th field is the offset, the last the leap status."""
    fields = _output("chronyc", "-c", "tracking").strip().split(",")
    try:
        offset_s = float(fields[4])
    except (IndexError, ValueError):
        return None
    synchronised = fields[-1] != "Not synchronised"
    return ClockState(source="chrony", synchronised=synchronised, offset_s=offset_s)


def ask_timedatectl() -> ClockState | None:
    """Ask `timedatectl` whether NTP has synchronised the clock."""
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
    """Ask the kernel for its flag; this works in containers, where daemons cannot be asked."""
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
    """Return what a program prints; "" if the program is missing, slow or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
