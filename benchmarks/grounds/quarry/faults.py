"""Say what can go wrong in a job, and which of its draws it changes, and how.

A fault never writes a time: it makes products, memory, threads, loaders or links slower, from an
iteration on, in bursts or more and more, or it stops a device or a thread for a while. What its
neighbours see of it follows from the simulation. Causes of the job itself (a heavy stage, a replica
with long documents, an expert that many tokens want) are faults of kinds that change its work.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from benchmarks.grounds.ground import Planted

CAUSES = {
    "gpu_clock": "compute", "throttling": "compute", "thermal_ramp": "compute", "hbm": "compute",
    "row_remap": "compute", "contention": "compute", "fan": "compute",
    "nvlink": "link", "nic": "link", "rail": "link", "nic_flap": "link", "switch_port": "link",
    "host_cpu": "host", "host_thread": "host", "host_memory": "host",
    "storage": "loader", "loader": "loader", "gc": "gc",
    "heavy_stage": "stage_imbalance", "long_sequences": "sequence_imbalance",
    "hot_expert": "sequence_imbalance",
}  # fmt: skip
"""What causes each kind's slowness, in the words of `Planted.cause`."""

OF_JOB = ("heavy_stage", "long_sequences", "hot_expert")
OF_LINKS = ("nvlink", "nic", "rail", "nic_flap", "switch_port")
OF_HOSTS = ("nic", "nic_flap", "host_cpu", "host_memory", "storage", "fan")
"""Kinds of which the unit at fault is a whole host."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """State one fault of a job.

    `ranks` feel it at their own device, thread or link; `nameable` may be named for it. `factor` is
    how many times slower what it concerns becomes; where `factors` are given, each rank has its
    own. It holds from `first_iteration` to `last_iteration` (0: the last), in bursts of
    `burst_iterations` on average that cover `share` of the time, and it grows for
    `ramp_iterations`. Links: `card` is that of one rail (-1: all cards), `hosts` are those
    at both ends of a slow port.
    """

    kind: str
    ranks: tuple[int, ...]
    nameable: tuple[int, ...]
    factor: float
    factors: tuple[float, ...] = ()
    hosts: tuple[int, ...] = ()
    card: int = -1
    first_iteration: int = 1
    last_iteration: int = 0
    share: float = 1.0
    burst_iterations: float = 0.0
    ramp_iterations: float = 0.0

    def planted(self, host: str) -> Planted:
        """Return it as the truth of a case, not yet priced; `host` is that of its first rank."""
        is_one_host = self.kind in OF_HOSTS and (
            self.kind not in OF_LINKS or self.nameable == self.ranks
        )
        return Planted(
            kind=self.kind,
            cause=CAUSES[self.kind],
            owner="job" if self.kind in OF_JOB else "node",
            ranks=self.nameable,
            host=host if is_one_host else "",
            factor=self.factor,
            first_iteration=self.first_iteration,
            last_iteration=self.last_iteration,
            share_of_time=self.share,
        )

    def strength(self, iteration: int) -> float:
        """Return how much of it there is in an iteration, 0 to 1."""
        if iteration < self.first_iteration or 0 < self.last_iteration < iteration:
            return 0.0
        if not self.ramp_iterations:
            return 1.0
        return min(1.0, (iteration - self.first_iteration) / self.ramp_iterations)

    def factor_of(self, rank: int, iteration: int) -> float:
        """Return how many times slower what it concerns is on a rank in an iteration."""
        if rank not in self.ranks:
            return 1.0
        whole = self.factors[self.ranks.index(rank)] if self.factors else self.factor
        return 1 + (whole - 1) * self.strength(iteration)


Bursts = list[tuple[float, float, float]]
"""(begin, end, how many times slower) in ascending order, seconds of traced time."""


def stretched(start: float, work: float, bursts: Bursts, share: float) -> float:
    """Return how long `work` seconds take from `start` on, if bursts slow `share` of it.

    Example: 5 s of work from 0 on, a burst from 2 to 4 that makes all of it twice as slow: 2 s are
    done before, 1 s within, 2 s behind it, so that it takes 6 s.
    """
    now, left = start, work
    place = max(0, bisect_left(bursts, (start,)) - 1)
    while place < len(bursts):
        begin, end, factor = bursts[place]
        place += 1
        if now + left <= begin:
            break
        if end <= now:
            continue
        if now < begin:
            left -= begin - now
            now = begin
        slower = 1 + (factor - 1) * share
        if now + left * slower <= end:
            return now + left * slower - start
        left -= (end - now) / slower
        now = end
    return now + left - start
