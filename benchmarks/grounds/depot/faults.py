"""Say what each fault does to chips, threads, loaders and links, when, and what the truth is."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.ground import Planted

Figures = NDArray[np.float64]
Bursts = list[tuple[float, float, float]]
"""Begin and end, s, ascending, and how many times slower it is meanwhile (inf: stands still)."""

CAUSES = {
    "gpu_clock": "compute", "throttling": "compute", "hbm": "compute", "ecc": "compute",
    "daemon": "host", "cores": "host", "cgroup": "host", "host_memory": "host",
    "loader": "loader", "gc": "gc", "nvlink": "link", "pcie": "link", "nic": "link",
    "rail": "link", "flapping": "link",
}  # fmt: skip
KINDS = {"daemon": "host_cpu", "cores": "host_cpu", "cgroup": "host_cpu", "flapping": "nic"}
"""What a truth calls a fault, where it is not its own name."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One cause and when it holds; bursts cover `share` of that time."""

    kind: str
    ranks: tuple[int, ...]
    factor: float = 1.0
    first_iteration: int = 1
    last_iteration: int = 0
    share: float = 1.0
    is_of_host: bool = False
    in_whole_iterations: bool = False
    seconds: float = 0.0  # of a burst, or of a collector's pause
    is_shown: bool = True  # by the clock that the device reports

    @property
    def mark(self) -> int:
        """Return a number that its luck depends on, whatever other faults there are."""
        return crc32(f"{self.kind} {self.ranks}".encode())

    def holds(self, iteration: int) -> bool:
        """Tell whether it lasts in an iteration, bursts and breaks between them alike."""
        return self.first_iteration <= iteration and (
            not self.last_iteration or iteration <= self.last_iteration
        )

    def planted(self, job: Job, share: float) -> Planted:
        """Return the truth, without its cost."""
        return Planted(
            kind=KINDS.get(self.kind, self.kind),
            cause=CAUSES[self.kind],
            owner="job" if self.kind == "gc" else "node",
            ranks=self.named(job),
            host=f"node{int(job.hosts[self.ranks[0]]):03d}" if self.is_of_host else "",
            factor=self.factor,
            first_iteration=self.first_iteration,
            last_iteration=self.last_iteration,
            share_of_time=share,
        )

    def named(self, job: Job) -> tuple[int, ...]:
        """Return whom one may name: of a card that serves one pair only, either of the two."""
        if self.kind not in ("nic", "flapping", "pcie") or len(self.ranks) > 1:
            return self.ranks
        (rank,) = self.ranks
        mates = _mates(job, rank)
        return tuple(sorted({rank, *mates})) if len(mates) == 1 else self.ranks


def _mates(job: Job, rank: int) -> set[int]:
    """Return with whom a rank's card talks, on other hosts."""
    mates: set[int] = set()
    for axis in ("tp", "cp", "dp", "pp", "ep"):
        if getattr(job, axis) > 1:
            mates |= set(job.layout.group(rank, axis))
    return {each for each in mates if job.hosts[each] != job.hosts[rank]}


@dataclass
class Effects:
    """What holds in one iteration: how many times slower each rank's parts are, and bursts."""

    clock: Figures
    memory: Figures
    thread: Figures
    load: Figures
    link: Figures
    nic: Figures
    collect_s: Figures
    device_bursts: dict[int, Bursts] = field(default_factory=dict)
    thread_bursts: dict[int, Bursts] = field(default_factory=dict)
    nic_bursts: dict[int, Bursts] = field(default_factory=dict)


class Trouble:
    """All faults of one job. `length_s` is how long it would take without any."""

    def __init__(
        self, job: Job, faults: tuple[Fault, ...], seed: int, length_s: float = 0.0
    ) -> None:
        self.job, self.faults, self.seed = job, faults, seed
        self.iteration_s = length_s / max(1, job.last_iteration - job.first_iteration + 1)
        self._bursts = {
            (number, rank): self._drawn(fault, rank, length_s)
            for number, fault in enumerate(faults)
            for rank in fault.ranks
            if fault.kind in _BURSTING and not fault.in_whole_iterations
        }

    def bursts_of(self, number: int) -> Bursts:
        """Return the bursts of a fault's first rank."""
        return self._bursts.get((number, self.faults[number].ranks[0]), [])

    def hits(self, number: int, iteration: int) -> bool:
        """Tell whether a fault in whole iterations takes this one."""
        fault = self.faults[number]
        pairs = sorted({each // 2 for each in self.job.traced if fault.holds(each)})
        chances = np.random.default_rng([self.seed, 77, fault.mark]).random(len(pairs))
        chosen = np.argsort(chances)[: max(1, round(fault.share * len(pairs)))]
        return iteration // 2 in {pairs[each] for each in chosen}

    def effects(self, iteration: int) -> Effects:
        """Return what holds in an iteration."""
        number_of_ranks = self.job.num_ranks
        clock, memory, thread, load, link, nic = np.ones((6, number_of_ranks))
        collect_s = np.zeros(number_of_ranks)
        result = Effects(clock, memory, thread, load, link, nic, collect_s)
        for number, fault in enumerate(self.faults):
            if fault.holds(iteration):
                self._apply(number, fault, iteration, result)
        return result

    def _apply(self, number: int, fault: Fault, iteration: int, result: Effects) -> None:
        places = list(fault.ranks)
        if fault.kind in ("gpu_clock", "throttling") and self._is_steady(number, fault, iteration):
            result.clock[places] *= fault.factor
            result.memory[places] *= 1 + 0.15 * (fault.factor - 1)
        elif fault.kind == "gc":
            result.collect_s[places] += fault.seconds
        elif fault.kind == "cores":
            result.thread[places] *= fault.factor
        elif fault.kind == "host_memory":
            result.thread[places] *= 1 + 0.3 * (fault.factor - 1)
            result.load[places] *= fault.factor
        elif fault.kind in ("nic", "rail", "pcie"):
            result.nic[places] *= fault.factor
            if fault.kind == "pcie" and not self.job.hardware.has_nvlink:
                result.link[places] *= fault.factor
        for name, part in (("hbm", "memory"), ("loader", "load"), ("nvlink", "link")):
            if fault.kind == name:
                getattr(result, part)[places] *= fault.factor
        for rank in places:
            if bursts := self._bursts.get((number, rank)):
                kept: dict[int, Bursts] = getattr(result, _BURSTING[fault.kind])
                kept[rank] = sorted(kept.get(rank, []) + bursts)

    def _is_steady(self, number: int, fault: Fault, iteration: int) -> bool:
        if fault.kind == "gpu_clock":
            return True
        return fault.in_whole_iterations and self.hits(number, iteration)

    def _drawn(self, fault: Fault, rank: int, length_s: float) -> Bursts:
        """Draw bursts until well after the end of the run."""
        together = fault.kind == "cgroup"  # its limit holds for all processes of a host at once
        rng = np.random.default_rng([self.seed, 78, fault.mark, 0 if together else rank])
        length = fault.seconds or max(0.002, 0.1 * self.iteration_s)
        if fault.kind != "cgroup" and length_s:
            length = min(length, 0.25 * fault.share * length_s)  # several in each run
        factor = float("inf") if fault.kind in ("ecc", "cgroup", "host_memory") else fault.factor
        period = length / fault.share
        end, bursts = length_s * 4 + 1, []
        now = float(rng.uniform(0, period))
        while now < end:
            if fault.kind == "cgroup":
                lasts, pause = length, period - length
            else:
                lasts = length * float(rng.uniform(0.5, 1.5))
                pause = float(rng.gamma(2.0, (period - length) / 2))
            bursts.append((now, now + lasts, factor))
            now += lasts + max(1e-6, pause)
        return bursts


_BURSTING = {
    "throttling": "device_bursts",
    "ecc": "device_bursts",
    "daemon": "thread_bursts",
    "cgroup": "thread_bursts",
    "host_memory": "thread_bursts",
    "flapping": "nic_bursts",
}


def stretched(start_s: float, work_s: float, bursts: Bursts) -> float:
    """Return when work that would take `work_s` from `start_s` on ends, with bursts on the way.

    Work of 5 s from 0 on, a burst of factor 2 from 2 to 4: 2 s are done at 2, 3 at 4, all at 6.
    """
    now, left = start_s, work_s
    for place in range(_first_after(bursts, now), len(bursts)):
        begin, end, factor = bursts[place]
        if end <= now:
            continue
        if begin > now:
            if now + left <= begin:
                break
            left -= begin - now
            now = begin
        done = (end - now) / factor
        if left <= done:
            return now + left * factor
        left -= done
        now = end
    return now + left


def _first_after(bursts: Bursts, now: float) -> int:
    """Return the number of the first burst that ends after a moment."""
    low, high = 0, len(bursts)
    while low < high:
        middle = (low + high) // 2
        if bursts[middle][1] <= now:
            low = middle + 1
        else:
            high = middle
    return low
