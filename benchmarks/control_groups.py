"""Control groups of CPU time, memory and disks, in which troubles of `benchmarks.trainers` put a
rank.

The kernel has two versions of them. In the first one (`/sys/fs/cgroup/memory`) a group is made
below that of the process; in the second one, where only groups without processes pass a controller
on, beside it. A machine that allows neither raises `RefusedError`, which says what it said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PROCESSES, PASSED_ON = "cgroup.procs", "cgroup.subtree_control"
PATIENCE_S, LOOK_S = 5.0, 0.05
"""A group can be removed once the kernel has taken its last process apart."""


class RefusedError(Exception):
    """This machine does not allow something; the message says why."""


class Controller(StrEnum):
    """What a group limits, as the first version calls it."""

    CPU = "cpu"
    MEMORY = "memory"
    DISK = "blkio"

    @property
    def unified(self) -> str:
        """As the second version calls it."""
        return "io" if self is Controller.DISK else self.value


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """Where the groups of a controller are, and that of a process among them."""

    version: int
    top: Path
    own: Path

    @property
    def parents(self) -> tuple[Path, ...]:
        """Of a new group: those that may be allowed, the nearest first."""
        near = self.own if self.version == 1 or self.own == self.top else self.own.parent
        return (near,) if near == self.top else (near, self.top)


def hierarchy_of(controller: Controller, mounts: str, memberships: str) -> Hierarchy:
    """Find it in `/proc/mounts` and a process's `/proc/…/cgroup`: the first version, if mounted."""
    paths_of = [line.split(":", 2)[1:] for line in memberships.splitlines()]
    for version, kind in ((1, "cgroup"), (2, "cgroup2")):
        for _, folder, this, options, *_ in map(str.split, mounts.splitlines()):
            if this != kind or (version == 1 and controller not in options.split(",")):
                continue
            paths = [
                path
                for names, path in paths_of
                if (controller in names.split(",") if version == 1 else not names)
            ]
            top = Path(folder)
            own = top / paths[0].lstrip("/") if paths else top
            return Hierarchy(version=version, top=top, own=own if own.is_dir() else top)
    raise RefusedError("no control groups are mounted")


@dataclass(frozen=True, kw_only=True)
class Group:
    """A control group that was made for some processes, and where they go afterwards."""

    path: Path
    home: Path
    version: int

    def add(self, process: int) -> None:
        """Move a process, with all its threads; what it has is charged to where it comes from."""
        (self.path / PROCESSES).write_text(str(process))

    def allocated_bytes(self) -> int:
        """Return what its processes have allocated in it, in memory and in swap."""
        stat = dict(map(str.split, (self.path / "memory.stat").read_text().splitlines()))
        if self.version == 1:
            return int(stat["rss"]) + int(stat["swap"])
        return int(stat["anon"]) + int((self.path / "memory.swap.current").read_text())

    def limit_cpu(self, quota_us: int, period_us: int) -> None:
        """Have its processes stand still once they ran for so long, all together, in a period."""
        if self.version == 1:
            (self.path / "cpu.cfs_period_us").write_text(str(period_us))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.path / "cpu.max").write_text(f"{quota_us} {period_us}")

    def limit_memory(self, size_bytes: int) -> None:
        """Have pages go out above so many bytes; the second version kills nobody for them."""
        self._limit.write_text(str(size_bytes))

    def ease_memory(self, by_bytes: int) -> None:
        """Raise the limit, if there is one."""
        if (limit := self._limit.read_text().strip()) != "max":
            self.limit_memory(int(limit) + by_bytes)

    @property
    def _limit(self) -> Path:
        return self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.high")

    def wait_for_room(self) -> None:
        """Let a process wait, where the first version would kill it when no page can go out."""
        if self.version == 1:
            (self.path / "memory.oom_control").write_text("1")

    @property
    def lacks_room(self) -> bool:
        """Whether a process waits so."""
        if self.version == 2:
            return False
        return "under_oom 1" in (self.path / "memory.oom_control").read_text()

    def throttle(self, disk: str, *, read_bps: int = 0, write_bps: int = 0) -> None:
        """Have a disk, by its numbers, give its processes so many bytes/s in all; 0: any."""
        for name, short, rate in (("read", "rbps", read_bps), ("write", "wbps", write_bps)):
            if rate and self.version == 1:
                setting = self.path / f"blkio.throttle.{name}_bps_device"
                setting.write_text(f"{disk} {rate}")
            elif rate:
                (self.path / "io.max").write_text(f"{disk} {short}={rate}")

    def remove(self) -> None:
        """Move its processes home; it is gone once they are."""
        end = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError):  # a process may end meanwhile
                for process in (self.path / PROCESSES).read_text().split():
                    (self.home / PROCESSES).write_text(process)
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK_S)


@contextmanager
def group_around(controller: Controller, process: int) -> Iterator[Group]:
    """Have a process in a new group while inside."""
    memberships = Path(f"/proc/{process}/cgroup").read_text()
    where = hierarchy_of(controller, Path("/proc/mounts").read_text(), memberships)
    with ExitStack() as stack:
        group = _first_allowed(controller, where, f"of-{process}-{os.getpid()}", stack)
        group.add(process)
        yield group


def _first_allowed(controller: Controller, where: Hierarchy, name: str, stack: ExitStack) -> Group:
    """Make a group that is removed with the stack, in the first place that allows it."""
    reasons = []
    for parent in where.parents:
        group = Group(path=parent / name, home=where.own, version=where.version)
        try:
            if where.version == 2:
                stack.enter_context(_passed_on(controller, parent))
            group.path.mkdir()
        except OSError as error:
            reasons.append(str(error))
        else:
            stack.callback(group.remove)
            return group
    raise RefusedError(f"no control group of {controller} can be made: {'; '.join(reasons)}")


@contextmanager
def _passed_on(controller: Controller, parent: Path) -> Iterator[None]:
    """Have groups below one of the second version limit this while inside."""
    passed = parent / PASSED_ON
    before = passed.read_text().split()
    if controller.unified not in before:
        passed.write_text(f"+{controller.unified}")
    yield
    if controller.unified not in before:
        with suppress(OSError):  # another one needs it now
            passed.write_text(f"-{controller.unified}")


def disk_of(folder: Path) -> str:
    """Return the numbers of the whole disk on which a folder lies, as control groups take them."""
    device = folder.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not block.exists():
        raise RefusedError(f"{folder} lies on no disk here: give TMPDIR a folder that does")
    block = block.resolve()
    return ((block.parent if (block / "partition").exists() else block) / "dev").read_text().strip()
