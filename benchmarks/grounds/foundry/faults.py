"""What goes wrong in hardware, and how it shows: a fault becomes effects on one run of a job.

Rates and sizes follow what operators publish: chips that throttle by heat or a power brake, row
remapping and ECC pauses, hosts with busy or throttled CPUs, network cards that fall to a half or a
third of their rate or flap, NVLinks that are down (Meta's Llama 3 report, ByteDance's MegaScale,
Alibaba's C4, Azure's SuperBench).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.foundry.draws import Draws, Floats, Pause, collections_by
from benchmarks.grounds.foundry.jobs import Job
from benchmarks.grounds.foundry.simulation import Burst, Effects, Run
from benchmarks.grounds.ground import Planted

CAUSES = {
    "gpu_clock": "compute",
    "throttling": "compute",
    "hbm": "compute",
    "ecc": "compute",
    "shared_gpu": "compute",
    "host_cpu": "host",
    "cpu_limit": "host",
    "host_memory": "host",
    "loader": "loader",
    "gc": "gc",
    "nvlink": "link",
    "nvlink_pair": "link",
    "pcie": "link",
    "nic": "link",
    "nic_flap": "link",
    "rail": "link",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; `ranks` are those whose unit it is, and so who may be named."""

    kind: str
    ranks: tuple[int, ...]
    factor: float = 1.0
    pause_s: float = 0.0  # of one collection
    host: str = ""
    first_iteration: int = 1
    last_iteration: int = 0
    share: float = 1.0  # of the time, in bursts or stalls; of gc: collections an iteration
    burst_iterations: float = 0.3  # how long a burst is in the mean

    def planted(self, share_of_time: float | None = None) -> Planted:
        """Return the truth of it, without its cost."""
        share = self.share if self.kind != "gc" else 1.0
        return Planted(
            kind=self.kind,
            cause=CAUSES[self.kind],
            owner="node",
            ranks=self.ranks,
            host=self.host,
            factor=self.factor,
            first_iteration=self.first_iteration,
            last_iteration=self.last_iteration,
            share_of_time=share if share_of_time is None else share_of_time,
        )


def effects_of(draws: Draws, faults: tuple[Fault, ...], sound: Run) -> Effects:
    """Return what faults do to a job, whose run without any says how long iterations last."""
    effects = Effects.none(draws.job)
    for number, fault in enumerate(faults):
        _Applied(draws, fault, sound, draws.stream(20, number)).to(effects)
    return effects


@dataclass
class _Applied:
    """A fault on its way into the effects on a job."""

    draws: Draws
    fault: Fault
    sound: Run
    stream: np.random.Generator

    @property
    def job(self) -> Job:
        return self.draws.job

    @property
    def held(self) -> Floats:
        """Return 1 in iterations in which the fault holds, else 0."""
        numbers, fault = np.array(self.job.all_iterations), self.fault
        last = fault.last_iteration or numbers[-1]
        return np.asarray((numbers >= fault.first_iteration) & (numbers <= last), dtype=np.float64)

    @property
    def times(self) -> Floats:
        """Return how many times slower what it concerns is, (iteration,)."""
        return 1 + (self.fault.factor - 1) * self.held

    @property
    def span_s(self) -> tuple[float, float]:
        """Return from when to when it holds, at least: a job it slows takes longer."""
        ends = np.concatenate([[0.0], self.sound.ends_s])
        first = max(0, self.fault.first_iteration - self.job.first_iteration)
        last = self.fault.last_iteration - self.job.first_iteration + 1
        end = ends[last] if self.fault.last_iteration else 5 * ends[-1]
        return float(ends[first]), float(end)

    def to(self, effects: Effects) -> None:
        """Add it to effects."""
        ranks, kind = list(self.fault.ranks), self.fault.kind
        match kind:
            case "gpu_clock":
                effects.clock[ranks] *= self.times
            case "hbm":
                effects.memory[ranks] *= self.times
            case "host_cpu":
                jitter = np.exp(0.15 * self.stream.standard_normal(len(self.held)))
                effects.threads[ranks] *= 1 + (self.times * jitter - 1).clip(0) * self.held
            case "loader":
                effects.loading[ranks] *= self.times
            case "nvlink" | "pcie":
                effects.nvlink[ranks] *= self.times
            case "nvlink_pair":
                effects.pairs[ranks[0], ranks[1]] = self.times
            case "nic" | "rail" | "nic_flap":
                self._slow_cards(effects)
            case "gc":
                self._collect(effects)
            case "cpu_limit" | "host_memory":
                self._stall(effects)
            case _:
                self._burst(effects)

    def bursts(self) -> list[Burst]:
        """Return bursts that cover a share of the time, of exponential lengths."""
        begin, end = self.span_s
        mean_s = self.fault.burst_iterations * float(np.median(self.sound.iteration_s))
        idle_s = mean_s * (1 - self.fault.share) / self.fault.share
        bursts, now_s = [], begin + self.stream.random() * idle_s
        while now_s < end:
            length = mean_s * (0.4 + 0.6 * self.stream.exponential())
            strength = 1 + (self.fault.factor - 1) * (0.85 + 0.3 * self.stream.random())
            bursts.append((now_s, now_s + length, strength))
            now_s += length + self.stream.exponential(idle_s)
        return bursts

    def _burst(self, effects: Effects) -> None:
        """Add throttling, a neighbour's turns on the device, or pauses of the memory."""
        for rank in self.fault.ranks:
            bursts = self.bursts()
            if self.fault.kind == "ecc":
                bursts = [(begin, end, float("inf")) for begin, end, _ in bursts]
            if self.fault.kind != "throttling":
                effects.feels_all.add(rank)
            effects.bursts[rank] += bursts

    def _slow_cards(self, effects: Effects) -> None:
        cards = sorted({self.job.machines.nic_of(rank) for rank in self.fault.ranks})
        begin, end = self.span_s
        spans = (
            self.bursts() if self.fault.kind == "nic_flap" else [(begin, end, self.fault.factor)]
        )
        why = f"{self.fault.kind} {cards}"
        for card in cards:
            for start, stop, slow in spans:
                effects.cards += [(start, card, why, slow), (stop, card, why, 1.0)]

    def _collect(self, effects: Effects) -> None:
        """Add full collections of a process that holds millions of objects."""
        kinds = ((self.fault.pause_s, self.fault.share),)
        for rank in self.fault.ranks:
            for each in collections_by(self.stream, kinds, self.job.num_iterations):
                if self.held[each.iteration]:
                    effects.pauses[rank].append(
                        Pause(each.iteration, each.place, each.duration_s, 2)
                    )

    def _stall(self, effects: Effects) -> None:
        """Add stalls of launching threads: a quota that is used up, pages that must be reclaimed.

        A thread that stands still for `share` of the time does so in stalls of some 100 ms (a
        quota's period) or of a few to hundreds of ms (reclaiming).
        """
        iteration_s = float(np.median(self.sound.iteration_s))
        mean_s = 0.06 if self.fault.kind == "cpu_limit" else 0.04
        for rank in self.fault.ranks:
            for iteration in np.flatnonzero(self.held):
                for _ in range(self.stream.poisson(self.fault.share * iteration_s / mean_s)):
                    length = mean_s * float(np.exp(0.7 * self.stream.standard_normal() - 0.245))
                    place = float(self.stream.random())
                    effects.pauses[rank].append(Pause(int(iteration), place, length))
        if self.fault.kind == "cpu_limit":
            effects.threads[list(self.fault.ranks)] *= self.times
