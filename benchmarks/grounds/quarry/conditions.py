"""Draw what one run of a job meets: its chips, its noise, its data, pauses; and apply its faults.

Each quantity has a generator of its own, seeded by the case and the quantity's name, so that two
simulations of a case that differ by a fault or by a chip have everything else in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from benchmarks.grounds.ground import Variation
from benchmarks.grounds.quarry.estimates import usual_iteration_s, usual_pass_s
from benchmarks.grounds.quarry.faults import Bursts, Fault
from benchmarks.grounds.quarry.jobs import Job
from benchmarks.grounds.quarry.machines import Floats, Rng, chip_slowness
from benchmarks.grounds.quarry.network import Network

Pauses = dict[tuple[int, int], tuple[float, str]]
"""(turn, operation) → (seconds, name of the span, "" for none), of one rank."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """State what a job meets that is nobody's fault at its nodes.

    `noisy_ranks` have kernels `noise_factor` times as uneven, for the same mean; `busy_factor`
    slows the threads of all hosts; from `shift_iteration` on all data are `shift_factor` longer.
    """

    congestion_factor: float = 1.0
    congestion_share: float = 0.0
    hiccups: int = 0  # iterations in which no loader gets its batches in time
    stalls: int = 0  # moments at which some device stands still
    stall_s: float = 0.0
    noisy_ranks: tuple[int, ...] = ()
    noise_factor: float = 1.0
    busy_factor: float = 1.0
    shift_iteration: int = 0
    shift_factor: float = 1.0
    warms_up_ratio: float = 0.0  # how much faster the chips are while they are cold
    pauses_s: float = 0.5  # of checkpoints and evaluations
    collection_s: float = 0.05
    collections_per_iteration: float = 0.03


def _at(places: Sequence[int], share: float) -> int:
    """Return which operation stands that far in an iteration."""
    return places[int(share * len(places))]


@dataclass
class Conditions:
    """What each rank meets in each traced iteration, ready to be looked up."""

    products: list[list[float]]  # times slower, by rank and turn
    memory: list[list[float]]
    threads: list[list[float]]
    passes: list[float]  # heavier stages, by rank
    bursts: list[Bursts]  # of devices, by rank
    burst_shares: list[tuple[float, float]]  # how much of products and of memory they slow
    device_stops: list[dict[tuple[int, int], float]]
    pauses: list[Pauses]
    lengths: Floats  # (replica, turn, microbatch, tokens and squares)
    experts: list[list[float]]  # by expert-parallel place and turn
    batch_s: list[Floats]  # how long a worker makes each batch, by rank
    copy_s: list[float]
    noise_ratio: list[float]
    network: Network
    between_s: list[float] = field(default_factory=list)  # evaluations and saves behind each turn
    saves: list[bool] = field(default_factory=list)


class Drawer:
    """Draws the conditions of one case, again for each simulation."""

    def __init__(
        self,
        job: Job,
        surroundings: Surroundings,
        seed: int,
        launches: Sequence[Sequence[int]],
        works: Sequence[Sequence[int]],
    ) -> None:
        self.job, self.around, self.seed = job, surroundings, seed
        self.launches, self.works = launches, works
        """Numbers of each rank's operations that are launched, and of those that are kernels."""
        self.usual_s = usual_iteration_s(job)
        self.turns = len(job.iterations)

    def rng(self, *names: object) -> Rng:
        """Return the generator of one quantity."""
        text = "/".join(str(name) for name in names)
        return np.random.default_rng(np.random.SeedSequence([self.seed, crc32(text.encode())]))

    def conditions(self, faults: Sequence[Fault], variation: Variation) -> Conditions:
        """Return what a run with these faults meets."""
        job, ranks = self.job, range(self.job.num_ranks)
        chips = self.chips(variation)
        bursts = {
            number: self._bursts(("burst", fault.kind, *fault.ranks[:1]), fault)
            for number, fault in enumerate(faults)
            if fault.burst_iterations and fault.kind != "row_remap"
        }
        products = [
            self._by_turn(chips[rank], faults, ("gpu_clock", "thermal_ramp", "fan"), rank)
            for rank in ranks
        ]
        own = [self._own_bursts(rank, faults, bursts) for rank in ranks]
        links = {n: each for n, each in bursts.items() if faults[n].kind == "nic_flap"}
        return Conditions(
            products=products,
            memory=[self._by_turn(np.ones(self.turns), faults, ("hbm",), rank) for rank in ranks],
            threads=[self._threads(rank, faults) for rank in ranks],
            passes=[self._product(faults, "heavy_stage", rank) for rank in ranks],
            bursts=[each for each, _ in own],
            burst_shares=[each for _, each in own],
            device_stops=[self._stops(rank, faults) for rank in ranks],
            pauses=[self._pauses(rank, faults) for rank in ranks],
            lengths=self._lengths(faults),
            experts=self._experts(faults),
            batch_s=[self._batches(rank, faults) for rank in ranks],
            copy_s=[
                float(self.rng("copy").uniform(5e-5, 4e-4)) * self._product(faults, "host_cpu", r)
                for r in ranks
            ],
            noise_ratio=[
                job.machines.kernel_noise_ratio
                * (self.around.noise_factor if rank in self.around.noisy_ranks else 1)
                for rank in ranks
            ],
            network=Network(job, faults, links, self._congestion()),
            between_s=self._between(),
            saves=[self._due(job.checkpoint_every, turn) for turn in range(self.turns)],
        )

    def chips(self, variation: Variation) -> Floats:
        """Return how many times slower products are on each chip, (rank, turn), without faults."""
        job, machines = self.job, self.job.machines
        spread = chip_slowness(machines, job.num_ranks, self.rng("chips"))
        if variation.chip_spread_ratio is not None:
            scale = variation.chip_spread_ratio / machines.chip_spread_ratio
            spread = 1 + (spread - 1) * scale
        if variation.slow_rank >= 0:
            spread[variation.slow_rank] *= variation.factor
        return spread[:, None] * self.weather()

    def weather(self) -> Floats:
        """Return how chips stray in the course of a run, (rank, turn), and warm up at its start."""
        job, rng = self.job, self.rng("wander")
        steps = rng.normal(size=(job.num_ranks, self.turns))
        strayed = np.empty_like(steps)
        strayed[:, 0] = steps[:, 0]
        for turn in range(1, self.turns):
            strayed[:, turn] = 0.8 * strayed[:, turn - 1] + 0.6 * steps[:, turn]
        seconds = (np.array(job.iterations) - 1) * self.usual_s
        warm = 1 + self.around.warms_up_ratio * (1 - np.exp(-seconds / 90))
        first = np.where(np.array(job.iterations) == 1, 1.05, 1.0)
        return (1 + job.machines.wander_ratio * strayed) * (warm * first)[None, :]

    def _by_turn(
        self, base: Floats, faults: Sequence[Fault], kinds: tuple[str, ...], rank: int
    ) -> list[float]:
        numbers = self.job.iterations
        slower = base.copy()
        for fault in faults:
            if fault.kind in kinds:
                slower *= [fault.factor_of(rank, number) for number in numbers]
        return [float(each) for each in slower]

    def _product(self, faults: Sequence[Fault], kind: str, rank: int) -> float:
        factors = [f.factor for f in faults if f.kind == kind and rank in f.ranks]
        return float(np.prod(factors)) if factors else 1.0

    def _threads(self, rank: int, faults: Sequence[Fault]) -> list[float]:
        job = self.job
        host = job.machines.host_of(rank)
        level = 1 + 0.03 * self.rng("host level", host).normal()
        drift = 1 + 0.01 * self.rng("host drift", host).normal(size=self.turns).cumsum() / 3
        starts = {1: 4.0, 2: 1.3}  # the first iterations allocate and compile
        warm = np.array([starts.get(number, 1.0) for number in job.iterations])
        base = self.around.busy_factor * abs(level) * np.clip(drift, 0.9, 1.1) * warm
        return self._by_turn(base, faults, ("host_cpu", "host_thread"), rank)

    # --- bursts, stops and pauses --------------------------------------------------------------

    def _bursts(self, names: tuple[object, ...], fault: Fault) -> Bursts:
        """Return bursts and rests of exponential lengths that cover the fault's share of time."""
        rng, mean_s = self.rng(*names), fault.burst_iterations * self.usual_s
        rest_s = mean_s * (1 - fault.share) / fault.share
        horizon = 6 * self.usual_s * self.turns * max(1.0, fault.factor)
        now, bursts = -float(rng.exponential(rest_s)), Bursts()
        while now < horizon and len(bursts) < 20_000:
            now += float(rng.exponential(rest_s))
            length = float(rng.exponential(mean_s))
            bursts.append((now, now + length, fault.factor))
            now += length
        return bursts

    def _own_bursts(
        self, rank: int, faults: Sequence[Fault], bursts: dict[int, Bursts]
    ) -> tuple[Bursts, tuple[float, float]]:
        """Return the bursts of a device: of its clock, or of another process that has turns."""
        for number, fault in enumerate(faults):
            if number in bursts and rank in fault.ranks:
                if fault.kind == "throttling":
                    return bursts[number], (1.0, 0.0)
                if fault.kind == "contention":
                    return bursts[number], (1.0, 1.0)
        return [], (0.0, 0.0)

    def _congestion(self) -> Bursts:
        """Return episodes in which other jobs' traffic takes a part of all ways between hosts."""
        if self.around.congestion_share == 0:
            return []
        episode = Fault(
            kind="congestion", ranks=(), nameable=(), factor=self.around.congestion_factor,
            share=self.around.congestion_share, burst_iterations=1.5,
        )  # fmt: skip
        return self._bursts(("congestion",), episode)

    def _stops(self, rank: int, faults: Sequence[Fault]) -> dict[tuple[int, int], float]:
        """Return when the device stands still: now and then anywhere, often if rows are failing."""
        stops: dict[tuple[int, int], float] = {}
        rng = self.rng("stalls")
        for _ in range(self.around.stalls):
            whom, turn = int(rng.integers(self.job.num_ranks)), int(rng.integers(self.turns))
            place = rng.random()
            if whom == rank:
                stops[turn, _at(self.works[rank], place)] = self.around.stall_s
        for fault in faults:
            if fault.kind == "row_remap" and rank in fault.ranks:
                stops.update(self._scattered(rank, fault, self.works[rank]))
        return stops

    def _scattered(
        self, rank: int, fault: Fault, places: Sequence[int]
    ) -> dict[tuple[int, int], float]:
        """Return moments at which something stops, in the iterations in which a fault holds."""
        rng = self.rng("scattered", fault.kind, rank)
        per_iteration = fault.share / fault.burst_iterations
        length_s = fault.burst_iterations * self.usual_s
        found = {}
        for turn, number in enumerate(self.job.iterations):
            moments = rng.random(int(rng.poisson(per_iteration)))
            lengths = rng.exponential(length_s, len(moments))
            if fault.strength(number):
                for moment, length in zip(moments, lengths, strict=True):
                    found[turn, _at(places, moment)] = float(length)
        return found

    def _due(self, every: int, turn: int) -> bool:
        return every > 0 and self.job.iterations[turn] % every == 0

    def _between(self) -> list[float]:
        """Return how long evaluations and saves take behind each iteration."""
        job, rng = self.job, self.rng("between")
        drawn = self.around.pauses_s * rng.lognormal(0, 0.15, size=(2, self.turns))
        return [
            float(
                drawn[0, turn] * self._due(job.checkpoint_every, turn)
                + drawn[1, turn] * self._due(job.evaluates_every, turn)
            )
            for turn in range(self.turns)
        ]

    def _pauses(self, rank: int, faults: Sequence[Fault]) -> Pauses:
        """Return when a rank's thread pauses: to collect garbage, or because it gets no memory."""
        pauses: Pauses = {}
        job, around, steps = self.job, self.around, self.launches[rank]
        rng = self.rng("collections", rank)
        for turn, number in enumerate(job.iterations):
            whole, small = rng.random(), rng.random(2)
            length = around.collection_s * rng.lognormal(0, 0.2)
            places = rng.random(3)
            if job.collections == "frequent":
                if small[0] < 0.7:
                    at = turn, _at(steps, places[0])
                    pauses[at] = (1e-4 + 1e-4 * small[0], "gc-generation-0")
                if small[1] < 0.1:
                    at = turn, _at(steps, places[1])
                    pauses[at] = (1e-3 * small[1] + 4e-4, "gc-generation-1")
                if whole < around.collections_per_iteration:
                    pauses[turn, _at(steps, places[2])] = (length, "gc-generation-2")
            elif job.collections == "planned" and number % 5 == 0:
                pauses[turn, steps[-1]] = (length, "gc-generation-2")
        for fault in faults:
            if rank in fault.ranks and fault.kind in {"gc", "host_memory"}:
                name = "gc-generation-2" if fault.kind == "gc" else ""
                found = self._scattered(rank, fault, steps)
                pauses.update({at: (seconds, name) for at, seconds in found.items()})
        return pauses

    # --- data ----------------------------------------------------------------------------------

    def _lengths(self, faults: Sequence[Fault]) -> Floats:
        """Return how much work each microbatch is, (replica, turn, microbatch, [linear, squares]).

        Lengths of documents have a tail of a power law: a few fill a whole sequence.
        """
        job, rng = self.job, self.rng("lengths")
        shape = (job.layout.dp, self.turns, job.num_microbatches)
        tokens, squares = np.ones(shape), np.ones(shape)
        # of a sequence packed with documents, attention costs the mean square of their shares
        share = np.clip(0.12 * (1 + rng.pareto(3.2 - 1.6 * job.length_ratio, shape)), 0.0, 1.0)
        if job.lengths == "packed":
            squares = share
        elif job.lengths == "ragged":
            tokens = np.clip(share * 3, 0.25, 1.0)
            squares = tokens**2
        for fault in faults:
            if fault.kind == "long_sequences":
                replica = job.layout.coordinates(fault.ranks[0]).dp
                holds = [fault.factor_of(fault.ranks[0], number) for number in job.iterations]
                longer = np.array(holds)[:, None]
                tokens[replica] *= longer if job.lengths == "ragged" else 1.0
                squares[replica] *= longer**2 if job.lengths == "ragged" else longer
        if self.around.shift_iteration:
            later = np.array(job.iterations) >= self.around.shift_iteration
            factor = np.where(later, self.around.shift_factor, 1.0)[None, :, None]
            squares = squares * factor
            tokens = tokens * (factor if job.lengths == "ragged" else 1.0)
        return np.stack([tokens, squares], axis=-1)

    def _experts(self, faults: Sequence[Fault]) -> list[list[float]]:
        """Return how many tokens each expert-parallel place gets, of an even share."""
        job, rng = self.job, self.rng("experts")
        size = job.layout.ep
        level = rng.lognormal(0, 0.03 + 0.1 * rng.random(), size=(size, 1))
        wander = rng.lognormal(0, 0.04, size=(size, self.turns))
        load = level * wander
        for fault in faults:
            if fault.kind == "hot_expert":
                hot = self.job.layout.coordinates(fault.ranks[0]).ep
                holds = np.array([fault.strength(number) for number in job.iterations])
                load[hot] = np.where(holds, load.max(axis=0) * fault.factor, load[hot])
        load /= load.mean(axis=0)
        return [[float(each) for each in row] for row in load]

    def _batches(self, rank: int, faults: Sequence[Fault]) -> Floats:
        """Return how long a worker makes each batch of a rank, (batch,)."""
        job, rng = self.job, self.rng("batches", rank)
        turns = job.num_microbatches
        usual = job.load_ratio * job.num_workers * usual_pass_s(job)
        made = usual * rng.lognormal(0, 0.2, size=(self.turns, turns))
        hiccups = self.rng("hiccups").integers(self.turns, size=self.around.hiccups)
        made[hiccups] *= 6.0
        for fault in faults:
            if fault.kind in {"storage", "loader", "host_cpu", "host_memory"}:
                slower = [fault.factor_of(rank, number) for number in job.iterations]
                made *= np.array(slower)[:, None]
        batches: Floats = made.ravel()
        return batches
