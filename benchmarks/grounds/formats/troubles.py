"""State what is wrong with a job, and lengthen what it touches.

A trouble is told by its kind and place; `Effects` turns all troubles of a job into factors on the
device's kernels, on what the host thread does and on transfers, iteration by iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.hardware import Cluster, Links
from benchmarks.grounds.formats.program import Bound

Floats = NDArray[np.float64]
CLOCKS = {Bound.PRODUCT: 1.0, Bound.ATTENTION: 1.0, Bound.MEMORY: 0.25, Bound.STATE: 0.2}
HBM = {Bound.PRODUCT: 0.12, Bound.ATTENTION: 0.2, Bound.MEMORY: 1.0, Bound.STATE: 1.0}
"""How much of a slowdown reaches kernels that are bound by this or that."""
OF_CHIPS = ("gpu_clock", "throttling", "flapping", "hbm", "host_power")
OF_LINKS = ("nvlink", "pcie", "nic", "one_nic", "lossy", "rail", "network")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One thing that is wrong: its kind, the ranks it touches, how bad it is, and when.

    `factor` is how many times longer something takes; `amount_ms` how long a host thread stands.
    """

    kind: str
    touched: tuple[int, ...]
    factor: float = 1.0
    amount_ms: float = 0.0
    first: int = 1
    last: int = 0
    share: float = 1.0
    burst: float = 1.0  # mean length of a burst, in iterations
    node: int = -1
    nic: int = -1

    def holds(self, iteration: int) -> bool:
        """Tell whether it is there in an iteration."""
        return iteration >= self.first and (not self.last or iteration <= self.last)

    def links(self, cluster: Cluster) -> Links:
        """Return which links are slower while it lasts."""
        if self.kind == "nvlink" and len(self.touched) == 2:
            return Links(of_pair={(self.touched[0], self.touched[1]): self.factor})
        if self.kind in ("nvlink", "pcie"):
            return Links(of_gpu=dict.fromkeys(self.touched, self.factor))
        nics = {cluster.nic_of(rank) for rank in range(cluster.num_ranks)}
        if self.kind in ("nic", "lossy"):
            return Links(of_nic={nic: self.factor for nic in nics if nic[0] == self.node})
        if self.kind == "one_nic":
            return Links(of_nic={(self.node, self.nic): self.factor})
        if self.kind == "rail":
            return Links(of_nic={nic: self.factor for nic in nics if nic[1] == self.nic})
        return Links(fabric=self.factor)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What is known of a program's operations, one entry each."""

    rank: NDArray[np.int64]
    bound: NDArray[np.int64]
    moment: Floats  # how far into the iteration it stands, from 0 to 1
    is_expert: NDArray[np.bool_]
    is_loader: NDArray[np.bool_]
    pauses: dict[int, NDArray[np.int64]]  # rank: operations at which its host may be held up
    busy: dict[int, NDArray[np.int64]]  # rank: operations that cost its host time


@dataclass
class Effects:
    """What the troubles of a job make of its costs, in the iterations that are simulated."""

    troubles: tuple[Trouble, ...]
    seed: int
    num_iterations: int
    bursts: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bursts = [self._bursts(one, number) for number, one in enumerate(self.troubles)]

    def _bursts(self, trouble: Trouble, number: int) -> Floats:
        """Return (burst, [begin, end]) in iterations, a share of the time in all."""
        if trouble.share >= 1:
            return np.array([[0.0, 1e9]])
        rng = np.random.default_rng((self.seed, 77, number))
        quiet = trouble.burst * (1 - trouble.share) / trouble.share
        spans, now = [], trouble.first + rng.uniform(0, 0.6 * quiet)
        while now < trouble.first + 2 * self.num_iterations + 200:
            length = trouble.burst * rng.uniform(0.7, 1.3)
            spans.append((now, now + length))
            now += length + quiet * rng.uniform(0.6, 1.4)
        return np.array(spans)

    def device(self, iteration: int, known: Layer) -> Floats:
        """Return by what each kernel's duration is multiplied."""
        factors = np.ones(len(known.rank))
        for one, bursts in zip(self.troubles, self.bursts, strict=True):
            if not one.holds(iteration):
                continue
            mine = np.isin(known.rank, one.touched)
            if one.kind in OF_CHIPS:
                weights = np.zeros(len(Bound))
                for bound, weight in (HBM if one.kind == "hbm" else CLOCKS).items():
                    weights[bound] = weight
                when = iteration + known.moment
                inside = ((when[:, None] >= bursts[:, 0]) & (when[:, None] < bursts[:, 1])).any(1)
                factors *= np.where(mine & inside, 1 + weights[known.bound] * (one.factor - 1), 1)
            elif one.kind == "hot_expert":
                factors *= np.where(mine & known.is_expert, one.factor, 1.0)
        return factors

    def host(self, iteration: int, known: Layer, host_ns: Floats) -> tuple[Floats, dict[int, str]]:
        """Return what the host operations cost with it all, and which pauses have a name."""
        changed, notes = host_ns.copy(), dict[int, str]()
        for number, one in enumerate(self.troubles):
            if not one.holds(iteration):
                continue
            rng = np.random.default_rng((self.seed, 78, number, iteration))
            if one.kind == "host_cpu":
                changed[np.isin(known.rank, one.touched)] *= one.factor
            elif one.kind in ("loader", "storage"):
                loads = np.isin(known.rank, one.touched) & known.is_loader
                shared = rng.gamma(4.0, 0.25) if one.kind == "storage" else 1.0
                changed[loads] += one.amount_ms * 1e6 * shared * rng.gamma(6.0, 1 / 6, loads.sum())
            elif one.kind in ("gc", "collector"):
                self._collect(one, rng, known, changed, notes)
            elif one.kind in ("neighbour", "host_memory"):
                _stall(one, rng, known, changed)
        return changed, notes

    def _collect(
        self, one: Trouble, rng: np.random.Generator, known: Layer, changed: Floats,
        notes: dict[int, str],
    ) -> None:  # fmt: skip
        for rank in one.touched:
            if rng.random() > one.share:
                continue
            place = int(rng.choice(known.pauses[rank]))
            changed[place] += one.amount_ms * 1e6 * rng.lognormal(0, 0.15)
            notes[place] = "gc-generation-2"


def _stall(one: Trouble, rng: np.random.Generator, known: Layer, changed: Floats) -> None:
    """Hold up the host threads of a node: often and briefly by a neighbour, seldom by swapping."""
    for rank in one.touched:
        places = known.busy[rank]
        if one.kind == "neighbour":
            count = rng.poisson(one.factor)  # preemptions an iteration
            hit = rng.choice(places, count)
            np.add.at(changed, hit, rng.exponential(one.amount_ms * 1e6, count))
            changed[places] *= rng.lognormal(0.1, 0.3, len(places))
        elif rng.random() < one.share:
            count = 1 + rng.poisson(1.0)
            hit = rng.choice(places, count)
            np.add.at(changed, hit, rng.gamma(2.0, one.amount_ms * 5e5, count))
            loads = (known.rank == rank) & known.is_loader
            changed[loads] *= 4
