"""What ails whom, from when on, and what it stretches.

A fault stretches one quantity of some ranks: `clock` (products, and a little of all else),
`memory`, `launch` (what the host does), `loading`, `nic` (what a rank sends to other hosts),
`nvlink` (what it sends within its host), or adds: `pause`. Two more are the job's own, and nobody's
fault: `length` (documents are longer on some replicas) and `experts` (some get more tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.campus.hardware import Floats

CAUSES = {
    "gpu_clock": "compute", "gpu_memory": "compute", "throttling": "compute",
    "power_brake": "compute", "pcie": "link", "nvlink": "link", "nvlink_pair": "link",
    "nic": "link", "rail": "link", "flapping": "link", "host_cpu": "host", "neighbour": "host",
    "loader": "loader", "gc": "gc", "long_sequences": "sequence_imbalance",
    "hot_expert": "sequence_imbalance",
}  # fmt: skip
"""What each kind of fault is a cause of, in the words of verdicts."""
QUANTITIES = {
    "gpu_clock": "clock", "gpu_memory": "memory", "throttling": "clock", "power_brake": "clock",
    "pcie": "nic", "nvlink": "nvlink", "nvlink_pair": "nvlink", "nic": "nic", "rail": "nic",
    "flapping": "nic", "host_cpu": "launch", "neighbour": "launch", "loader": "loading",
    "gc": "pause", "long_sequences": "length", "hot_expert": "experts",
}  # fmt: skip
OF_THE_JOB = frozenset({"gc", "long_sequences", "hot_expert"})
OF_HOSTS = frozenset({"power_brake", "nic", "flapping", "host_cpu", "neighbour", "loader"})
"""Kinds whose unit is a whole host."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """State one fault: `ranks` are those whose quantity is stretched.

    `share` below 1: it comes in bursts, which last for `burst` passes on average and cover that
    share of the time. A `gc` has `factor` seconds, once in so many passes as `burst` says.
    """

    kind: str
    ranks: tuple[int, ...]
    factor: float
    first_iteration: int = 1
    last_iteration: int = 0
    share: float = 1.0
    burst: float = 6.0
    host: str = ""
    everywhere: bool = False  # a fault of links: within the host, too

    @property
    def quantities(self) -> tuple[str, ...]:
        """Return what is stretched."""
        return ("nic", "nvlink") if self.everywhere else (QUANTITIES[self.kind],)

    def holds(self, iterations: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return in which of the iterations it holds."""
        numbers = np.array(iterations)
        last = self.last_iteration or numbers.max()
        return (numbers >= self.first_iteration) & (numbers <= last)


def bursts(rng: np.random.Generator, shape: tuple[int, int], share: float, length: float) -> Floats:
    """Return (iteration, pass) of 0 and 1: a chain that is on for so many passes on average."""
    leaving = 1.0 / max(1.0, length)
    entering = min(1.0, leaving * share / (1.0 - share))
    chances = rng.random(shape[0] * shape[1])
    states = np.zeros(chances.size)
    on = rng.random() < share
    for place, chance in enumerate(chances):
        on = chance >= leaving if on else chance < entering
        states[place] = on
    return states.reshape(shape)


class Effects:
    """What the faults of a job stretch, for all variants: which faults each of these has.

    Passes of an iteration are numbered in the order in which a stage does them; the update is the
    last. One number is about the same time on all stages.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        variants: tuple[frozenset[int], ...],
        iterations: tuple[int, ...],
        num_passes: int,
        seed: int,
    ) -> None:
        self._variants = variants
        self._num_iterations = len(iterations)
        self._faults: dict[str, list[tuple[int, Fault, Floats]]] = {}
        shape = len(iterations), num_passes + 1
        for number, fault in enumerate(faults):
            rng = np.random.default_rng([seed, 21, number])
            amount = np.full(shape, fault.factor if fault.kind == "gc" else fault.factor - 1.0)
            if fault.share < 1.0:
                amount *= bursts(rng, shape, fault.share, fault.burst)
            if fault.kind == "gc":
                amount *= rng.random(shape) < 1.0 / fault.burst
            amount *= fault.holds(iterations)[:, None]
            for quantity in fault.quantities:
                self._faults.setdefault(quantity, []).append((number, fault, amount))

    def surplus(self, quantity: str, number: int, ranks: range) -> Floats | None:
        """Return (variant, iteration, rank): by how much a quantity is larger in a pass.

        None where no rank of these is concerned.
        """
        found: Floats | None = None
        for place, fault, amount in self._faults.get(quantity, ()):
            local = [rank - ranks.start for rank in fault.ranks if rank in ranks]
            if not local:
                continue
            if found is None:
                found = np.zeros((len(self._variants), self._num_iterations, len(ranks)))
            own = amount[:, min(number, amount.shape[1] - 1)]
            for row, has in enumerate(self._variants):
                if place in has:
                    before = found[row][:, local]
                    found[row][:, local] = (1 + before) * (1 + own[:, None]) - 1
        return found

    def factor(self, quantity: str, number: int, ranks: range) -> Floats | float:
        """Return (variant, iteration, rank): how many times a quantity is what it would be."""
        surplus = self.surplus(quantity, number, ranks)
        return 1.0 if surplus is None else 1.0 + surplus
