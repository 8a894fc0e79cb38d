"""For how long Linux says that processes stood still for memory or for a disk, and what was moved.

No span shows that a page of a process was taken away and has to be read back, or that a disk is
slow. Linux counts for how long somebody stood still for either (pressure stall information; kernel
documentation, accounting/psi): of the control group (version 2) that the process is in, which is
its container, or else of the whole host. Where many processors are busy, less is counted than a
single process waits.

    memory_waited_percent     of the time since the last reading, for memory: pages that come back
                              from swap, that were thrown away too early, that nobody has free
    disk_waited_percent       the same for disks and shared file systems
    memory_own_gbytes         pages that this process alone has, swapped ones among them
    memory_swapped_gbytes     of them, those that were taken away
    disk_read_mbytes_per_s    what this process and its children (loaders) had read from disks
    disk_written_mbytes_per_s  what they had written there

The last two tell a slow disk from one that has more to do. Read by the writer's thread after a
window, at most twice a second. What the kernel does not tell is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megascan.tracer.timer import Spacing, Step, no_step

_PROC = Path("/proc")
_RESOURCES = {"memory": "memory", "disk": "io"}
"""By how readings are called: how the kernel's files are."""
_OWN = "0::/"
"""Begins the line of `/proc/self/cgroup` that names a group of version 2."""
_FLOWS = {"read": "read_bytes", "written": "write_bytes"}
_LEAST_NS_BETWEEN_READINGS = 500_000_000
_KB_A_GBYTE = 1e9 / 1024
_DECIMALS = 3


class Pressure:
    """Reads what has come since the last reading, or since `begin`."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._waited_us: dict[str, int] = {}
        self._moved: dict[tuple[str, str], int] = {}
        """Bytes at the last reading, by process and flow."""
        self._spacing = Spacing(_LEAST_NS_BETWEEN_READINGS)

    def begin(self) -> None:
        """Note what has been counted so far."""
        self._spacing.begin()
        self._files = _pressure_files()
        self._waited_us = self._waits(no_step)
        self._moved = _moved_bytes(no_step)

    def read(self, step: Step = no_step) -> dict[str, float]:
        """Return the readings; none within half a second of the last ones. Calls `step` after each
        file.
        """
        of_ns = self._spacing.passed_ns()
        if of_ns is None:
            return {}
        waited_before, self._waited_us = self._waited_us, self._waits(step)
        moved_before, self._moved = self._moved, _moved_bytes(step)
        readings = {
            f"{name}_waited_percent": 100_000 * (waited_us - waited_before[name]) / of_ns
            for name, waited_us in self._waited_us.items()
            if name in waited_before
        }
        for flow in dict.fromkeys(flow for _, flow in self._moved):
            num_bytes = sum(
                count - moved_before.get(key, 0)
                for key, count in self._moved.items()
                if key[1] == flow
            )
            readings[f"disk_{flow}_mbytes_per_s"] = 1000 * num_bytes / of_ns
        return {name: round(value, _DECIMALS) for name, value in (readings | _own_memory()).items()}

    def _waits(self, step: Step) -> dict[str, int]:
        """Return for how many µs anybody has waited so far, by resource."""
        waits = {}
        for name, file in self._files.items():
            with suppress(OSError, ValueError, IndexError):
                some = file.read_text().splitlines()[0]
                waits[name] = int(some.rpartition("total=")[2])
            step()
        return waits


def _pressure_files() -> dict[str, Path]:
    """Return where the kernel counts waiting, by resource: of the process's own group if it can."""
    folder = _own_group()
    files = {}
    for name, resource in _RESOURCES.items():
        own = folder / f"{resource}.pressure" if folder else None
        of_host = _PROC / "pressure" / resource
        files[name] = own if own is not None and own.exists() else of_host
    return files


def _own_group() -> Path | None:
    """Return the folder of the process's control group (version 2); None where none is shown."""
    with suppress(OSError, IndexError):
        groups = (_PROC / "self/cgroup").read_text().splitlines()
        path = next((line[len(_OWN) :] for line in groups if line.startswith(_OWN)), None)
        for line in (_PROC / "self/mountinfo").read_text().splitlines():
            fields, _, kind = line.partition(" - ")
            if kind.startswith("cgroup2 ") and path is not None:
                return Path(fields.split()[4]) / path
    return None


def _moved_bytes(step: Step) -> dict[tuple[str, str], int]:
    """Return what this process and its children have read and written so far."""
    moved = {}
    for process in ("self", *_children()):
        with suppress(OSError, ValueError, KeyError):
            counts = dict(
                line.split(": ") for line in (_PROC / process / "io").read_text().splitlines()
            )
            for flow, name in _FLOWS.items():
                moved[process, flow] = int(counts[name])
        step()
    return moved


def _children() -> Iterator[str]:
    """Yield the processes that threads of Python have started."""
    for thread in threading.enumerate():
        with suppress(OSError):
            yield from (_PROC / f"self/task/{thread.native_id}/children").read_text().split()


def _own_memory() -> dict[str, float]:
    """Return what memory this process alone has, and how much of it was taken away."""
    kbytes = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (_PROC / "self/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "VmSwap:")):
                kbytes[line.split(":")[0]] = int(line.split()[1])
    if len(kbytes) < 2:
        return {}
    return {
        "memory_own_gbytes": sum(kbytes.values()) / _KB_A_GBYTE,
        "memory_swapped_gbytes": kbytes["VmSwap"] / _KB_A_GBYTE,
    }
