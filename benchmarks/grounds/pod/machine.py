"""Keep the state of chips, hosts and the network of a job, with and without what is planted.

All arrays begin with an axis of variants: the job with everything that is planted, the same job
without one of the causes, and so on. What chance decides is drawn once for all variants.

A chip's clock follows its temperature, which lags behind its power by about a minute:

    temperature' = (ambient + power x resistance - temperature) / lag
    slowdown     = chip x (1 + slope x (temperature - 55 degrees)), leakage taking power from work

Above 84 degrees the clock is lowered by 2 % a degree. A chip that waits in a collective spins at
about half of its power.

Hosts and the network drift from iteration to iteration (AR(1)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.pod.faults import Fault, Law
from benchmarks.grounds.pod.job import Floats, Job

LAG_S = 70.0
SLOPE_PER_DEGREE = 0.0006
WARM_C = 55.0
HOT_C = 84.0
SLOPE_ABOVE = 0.02
HEATING_C = 40.0  # over what surrounds it, at full power
WAITING_POWER = 0.45
SETTLED_ITERATIONS = 30  # a run that is older has warmed up
DRIFT_MEMORY = 0.8
FURTHER_FACTOR = 50.0
"""Of Law.FURTHER where a job has the MTP layer that it is said to have."""
_BLOCK = 256


class Noise:
    """Draw factors around 1 for the kernels of one stage: log-normal, some of them far longer."""

    def __init__(self, job: Job, stage: int) -> None:
        self.rng = np.random.default_rng([job.seed, 11, stage])
        self._size = job.stage_size
        self._sigma, self._share = job.disorder.kernel_sigma, job.disorder.tail_share
        self._place = _BLOCK
        self._block = np.ones((_BLOCK, self._size))

    def next(self) -> Floats:
        """Return factors of the next kernels, (place,)."""
        if self._place == _BLOCK:
            shape = (_BLOCK, self._size)
            self._block = np.exp(self._sigma * self.rng.standard_normal(shape))
            far = self.rng.random(shape) < self._share
            self._block[far] *= 1 + self.rng.exponential(0.6, int(far.sum()))
            self._place = 0
        self._place += 1
        return np.asarray(self._block[self._place - 1])


@dataclass(frozen=True)
class Bend:
    """Bend a law for one stage: where (variant, place), by how much, by which fault."""

    fault: Fault
    where: Floats
    gain: float


class Machine:
    """Answer how slow each rank's chip, host and links are at a moment of an iteration."""

    def __init__(
        self, job: Job, faults: Sequence[Fault], variants: Sequence[frozenset[int]], chips: Floats
    ) -> None:
        self.job = job
        self.num_variants = len(variants)
        self.chips = chips
        self._rng = np.random.default_rng([job.seed, 13])
        self._bends = [self._bends_of(stage, faults, variants) for stage in range(job.layout.pp)]
        self._active: list[dict[Law, list[Bend]]] = []
        self._steady: list[dict[Law, Floats]] = []
        num_hosts = len(job.cluster.hosts)
        self._host = np.zeros(num_hosts)
        self._nic = np.zeros(num_hosts)
        self.congestion = 1.0
        self._busy_network = 0.0
        places = np.arange(job.num_ranks) % job.cluster.gpus_per_host
        ambient = 30 + 6 * self._rng.random(num_hosts)[self._hosts()] + 1.2 * (places % 4)
        self._ambient = ambient
        settled = job.tracing.iterations[0] > SETTLED_ITERATIONS
        self.temperature = np.tile(ambient + (32 if settled else 22), (self.num_variants, 1))
        self.iteration = 0

    def _hosts(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.arange(self.job.num_ranks) // self.job.cluster.gpus_per_host

    def _bends_of(
        self, stage: int, faults: Sequence[Fault], variants: Sequence[frozenset[int]]
    ) -> dict[Law, list[Bend]]:
        bends: dict[Law, list[Bend]] = {}
        own = self.job.ranks[stage]
        for number, fault in enumerate(faults):
            concerned = np.isin(own, fault.ranks).astype(np.float64)
            held = np.array([number in variant for variant in variants], dtype=np.float64)
            where = held[:, None] * concerned[None, :]
            if not where.any():
                continue
            for law, factor in fault.laws():
                bends.setdefault(law, []).append(Bend(fault, where, factor - 1))
        return bends

    def begin(self, iteration: int) -> None:
        """Draw how hosts and the network are in this iteration, and note which faults hold."""
        self.iteration = iteration
        disorder, rng = self.job.disorder, self._rng
        rest = np.sqrt(1 - DRIFT_MEMORY**2)
        count = len(self.job.cluster.hosts)
        self._host = DRIFT_MEMORY * self._host + rest * rng.standard_normal(count)
        self._nic = DRIFT_MEMORY * self._nic + rest * rng.standard_normal(count)
        self._busy_network = 0.7 * self._busy_network + 0.7 * rng.standard_normal()
        self.congestion = 1 + disorder.congestion * float(np.exp(0.6 * self._busy_network))
        self._active = [
            {law: [one for one in each if one.fault.holds(iteration)] for law, each in own.items()}
            for own in self._bends
        ]
        self._steady = [self._steady_of(stage) for stage in range(self.job.layout.pp)]

    def _steady_of(self, stage: int) -> dict[Law, Floats]:
        """Return the factor of each law without what comes in bursts, (variant, place)."""
        own = self.job.ranks[stage]
        hosts = own // self.job.cluster.gpus_per_host
        disorder = self.job.disorder
        temperature = self.temperature[:, own]
        warmth = 1 + SLOPE_PER_DEGREE * (temperature - WARM_C)
        warmth = warmth * (1 + SLOPE_ABOVE * np.clip(temperature - HOT_C, 0, 20))
        shape = (self.num_variants, len(own))
        saving = self._saving()
        base = {law: np.ones(shape) for law in Law}
        base[Law.CLOCK] = self.chips[:, own] * warmth
        base[Law.FURTHER] = base[Law.FURTHER] / FURTHER_FACTOR
        base[Law.MEMORY] = base[Law.MEMORY] * (1 + 0.06 * saving)
        base[Law.LAUNCH] = base[Law.LAUNCH] * np.exp(disorder.host_drift * self._host[hosts])
        base[Law.LAUNCH] = base[Law.LAUNCH] * (1 + 0.4 * saving) * self._warming_up()
        base[Law.NIC] = base[Law.NIC] * np.exp(disorder.network_drift * self._nic[hosts])
        base[Law.NIC] = base[Law.NIC] * (1 + 0.35 * saving)
        for law, bends in self._active[stage].items():
            for bend in bends:
                if not bend.fault.in_bursts:
                    base[law] = base[law] * (1 + bend.gain * bend.where)
        return base

    def _saving(self) -> float:
        """Return 1 in the iterations in which an asynchronous checkpoint is written, else 0."""
        every = self.job.trainer.saves_every
        return float(bool(every) and (self.iteration - 1) % every < 2 < self.iteration)

    def _warming_up(self) -> float:
        ratio = self.job.disorder.warm_up_ratio
        return {1: ratio, 2: 1 + 0.1 * (ratio - 1)}.get(self.iteration, 1.0)

    def factor(self, law: Law, stage: int, time_s: Floats) -> Floats:
        """Return how many times longer what the law rules takes at a moment, (variant, place)."""
        found = self._steady[stage][law]
        for bend in self._active[stage].get(law, ()):
            if bend.fault.in_bursts:
                found = found * (1 + bend.gain * bend.where * bend.fault.is_on(time_s))
        return found

    def pauses(self, law: Law, stage: int, rng: np.random.Generator) -> Floats:
        """Return for how long each rank's host stands still at the start of a pass, in seconds."""
        total = np.zeros((self.num_variants, self.job.stage_size))
        for bend in self._bends[stage].get(law, ()):
            hits = rng.random(self.job.stage_size) < bend.fault.pause_share
            length = bend.fault.pause_ms * 1e-3 * rng.gamma(4.0, 0.25, self.job.stage_size)
            if bend.fault.holds(self.iteration):
                total = total + bend.where * hits * length
        return total

    def heat(self, busy: Floats, seconds: float) -> None:
        """Let the chips run at a share of their power, (variant, rank), for some time."""
        share = WAITING_POWER + (1 - WAITING_POWER) * np.clip(busy, 0, 1)
        resistance = np.ones_like(share)
        for stage, own in enumerate(self.job.ranks):
            resistance[:, own] = self._steady[stage][Law.HEAT]
        target = self._ambient + HEATING_C * share * resistance
        self.temperature += (target - self.temperature) * (1 - np.exp(-seconds / LAG_S))


def chips_of(job: Job, spread: float) -> Floats:
    """Return how many times longer products take on each chip, by the lottery of its making."""
    rng = np.random.default_rng([job.seed, 17])
    return np.asarray(np.exp(spread * np.clip(rng.standard_normal(job.num_ranks), -2.2, 2.2)))
