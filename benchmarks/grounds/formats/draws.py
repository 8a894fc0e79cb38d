"""Draw how long everything takes in a job without trouble: chips, noise, hosts, data, networks.

All draws of an iteration come from its own generator, so that a job with a cause and the same job
without it share them.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.formats.engine import Costs
from benchmarks.grounds.formats.hardware import Cluster, Links
from benchmarks.grounds.formats.job import Job
from benchmarks.grounds.formats.program import Bound, Code, Program
from benchmarks.grounds.formats.trainer import LOADER, LOG, PAUSE
from benchmarks.grounds.formats.troubles import OF_LINKS, Effects, Layer, Trouble

Floats = NDArray[np.float64]
TAIL_FREEDOM = 5  # Student's t of kernel noise
SPIKES = 4e-4  # of kernels that last longer for no reason
PREEMPTION = 3e-5  # of host operations
TEMPERATURE_SD, TEMPERATURE_MEMORY = 0.003, 0.9


class Chips:
    """How the chips of a job differ, from each other and with time."""

    def __init__(self, job: Job, seed: int, spread: float) -> None:
        rng = np.random.default_rng((seed, 1))
        count = job.shape.world
        self.clock = np.exp(spread * rng.standard_normal(count))
        self.memory = np.exp(0.3 * spread * rng.standard_normal(count))
        steps = rng.standard_normal((len(job.iterations), count)) * TEMPERATURE_SD
        warming = 0.004 * rng.random(count)
        self.drift = np.ones((len(job.iterations), count))
        now = steps[0]
        for place, number in enumerate(job.iterations):
            now = TEMPERATURE_MEMORY * now + np.sqrt(1 - TEMPERATURE_MEMORY**2) * steps[place]
            self.drift[place] = np.exp(now + warming * (1 - np.exp(-number / 4)))

    def factors(self, place: int, known: Layer) -> Floats:
        """Return by what each kernel's duration is multiplied in the place-th iteration."""
        memory = (known.bound == Bound.MEMORY) | (known.bound == Bound.STATE)
        clock = self.clock[known.rank] * self.drift[place][known.rank]
        return np.where(memory, self.memory[known.rank], clock)


class Draws:
    """Draws the costs of one program, iteration by iteration."""

    def __init__(self, job: Job, cluster: Cluster, program: Program, seed: int) -> None:
        self.job, self._cluster, self._program, self._seed = job, cluster, program, seed
        operations = program.operations
        self.host_ns = np.array([one.host_ns for one in operations])
        self.device_ns = np.array([one.cost_ns for one in operations])
        self._microbatch = np.array([one.microbatch for one in operations])
        replicas = [job.shape.place(rank)["dp"] for rank in range(job.shape.world)]
        self.known = _known(program, self.device_ns)
        self._replica = np.array(replicas)[self.known.rank]
        self._loads = self.known.is_loader.nonzero()[0]
        self._sharing = _sharing(job, cluster)
        self.transfer_ns = self.transfers(Links())
        rng = np.random.default_rng((seed, 2))
        self._hosts = np.exp(0.04 * rng.standard_normal(cluster.num_nodes))
        self._threads = np.exp(0.02 * rng.standard_normal(job.shape.world))
        nodes = [cluster.node(rank) for rank in range(job.shape.world)]
        self._host_factor = (self._hosts[nodes] * self._threads)[self.known.rank]
        self._sigma = np.array(
            [0.08 if cluster.crosses(one.members) else 0.03 for one in program.communications]
        )

    def transfers(self, links: Links) -> Floats:
        """Return how long each communication's data takes over links in this state."""
        found: dict[tuple[str, str, int, tuple[int, ...]], float] = {}
        times = []
        for one in self._program.communications:
            key = one.group, one.op, one.size_bytes, one.members
            if key not in found:
                axis = one.group.partition("@")[0]
                bandwidth = self._cluster.bandwidth(one.members, self._sharing[axis], links)
                found[key] = self._cluster.transfer_ns(
                    one.op, one.size_bytes, one.members, bandwidth
                )
            times.append(found[key])
        return np.array(times)

    def lengths(self, number: int, troubles: tuple[Trouble, ...]) -> Floats:
        """Return how many times the usual tokens each microbatch of a replica has."""
        job = self.job
        rng = np.random.default_rng((self._seed, 3, number))
        lengths = np.exp(job.varied_lengths * rng.standard_normal(
            (job.shape.dp, job.num_microbatches)
        )).clip(0.35, 2.2)  # fmt: skip
        if job.same_batch_everywhere:
            lengths[:] = lengths[0]
        for one in troubles:
            if one.kind == "long_sequences" and one.holds(number):
                replicas = {job.shape.place(rank)["dp"] for rank in one.touched}
                lengths[sorted(replicas)] *= one.factor
            elif one.kind == "shuffled_sequences":
                lengths[rng.integers(job.shape.dp)] *= one.factor
        return lengths

    def noise(self, number: int) -> Floats:
        """Return the noise of all kernels in an iteration."""
        job, count = self.job, len(self.device_ns)
        rng = np.random.default_rng((self._seed, 4, number))
        own = rng.standard_t(TAIL_FREEDOM, count).clip(-8, 8)
        of_rank = rng.standard_normal(job.shape.world)[self.known.rank]
        spikes = np.where(rng.random(count) < SPIKES, rng.lognormal(0.5, 0.4, count), 1.0)
        experts = np.where(self.known.is_expert, np.exp(0.05 * rng.standard_normal(count)), 1.0)
        noise = np.exp(job.kernel_noise * (0.75 * own + 0.3 * of_rank)) * spikes * experts
        return np.asarray(noise)

    def scale(self, number: int, troubles: tuple[Trouble, ...]) -> Floats:
        """Return by what the tokens of a microbatch multiply each kernel."""
        lengths = self.lengths(number, troubles)[self._replica, self._microbatch.clip(0)]
        lengths = np.where(self._microbatch < 0, 1.0, lengths)
        return np.where(self.known.bound == Bound.ATTENTION, lengths**2, lengths)

    def kernels(self, place: int, chips: Chips | None, effects: Effects) -> Floats:
        """Return how long each kernel takes in the place-th iteration."""
        number = self.job.iterations[place]
        costs = self.device_ns * self.scale(number, effects.troubles) * self.noise(number)
        if chips is not None:
            costs *= chips.factors(place, self.known)
        if number == 1:
            costs *= 1.06  # kernels are chosen, caches are cold
        return np.asarray(costs * effects.device(number, self.known))

    def costs(self, place: int, chips: Chips, effects: Effects) -> tuple[Costs, dict[int, str]]:
        """Return what everything costs in the place-th iteration, and pauses that have a name."""
        number = self.job.iterations[place]
        planned: dict[int, str] = {}
        host_ns, notes = effects.host(number, self.known, self._hosts_of(number, planned))
        costs = Costs(
            host_ns=host_ns,
            device_ns=self.kernels(place, chips, effects),
            transfer_ns=self._transfers_of(number, effects),
            exit_ns=np.random.default_rng((self._seed, 6, number)).exponential(
                500.0, len(self.device_ns)
            ),
        )
        return costs, planned | notes

    def _transfers_of(self, number: int, effects: Effects) -> Floats:
        rng = np.random.default_rng((self._seed, 7, number))
        count = len(self.transfer_ns)
        times = self.transfer_ns * np.exp(self._sigma * rng.standard_normal(count))
        times *= np.where(rng.random(count) < 0.002, rng.lognormal(0.7, 0.5, count), 1.0)
        for place, one in enumerate(effects.troubles):
            if one.kind not in OF_LINKS or not one.holds(number):
                continue
            ratio = self.transfers(one.links(self._cluster)) / self.transfer_ns
            if one.kind == "lossy":
                luck = np.random.default_rng((self._seed, 8, place, number))
                hit = luck.random(count) < 0.5
                ratio = np.where(hit, 1 + (ratio - 1) * luck.gamma(2.0, 1.0, count), 1.0)
            times *= ratio
        return np.asarray(times)

    def _hosts_of(self, number: int, notes: dict[int, str]) -> Floats:
        """Return what the hosts' threads take: noise, preemptions, daemons, planned pauses."""
        job, known = self.job, self.known
        rng = np.random.default_rng((self._seed, 5, number))
        count = len(self.host_ns)
        costs = self.host_ns * self._host_factor
        costs *= np.exp(job.host_noise * rng.standard_normal(count))
        preempted = (rng.random(count) < PREEMPTION) & (self.host_ns > 0)
        costs[preempted] += rng.exponential(1.2e6, preempted.sum())
        late = rng.random(len(self._loads)) < 0.01
        costs[self._loads[late]] += rng.exponential(2e6, late.sum())
        for node in range(self._cluster.num_nodes):
            if rng.random() < 0.15:  # a daemon wakes up
                rank = int(rng.choice(self._cluster.ranks_on(node)))
                costs[int(rng.choice(known.busy[rank]))] += rng.uniform(3e5, 1.5e6)
        if number <= 2:
            costs *= 2.5 if number == 1 else 1.15
        if job.collect_every and number % job.collect_every == 0:
            for places in known.pauses.values():
                costs[places[0]] += rng.uniform(3e7, 5e7)
                notes[int(places[0])] = "gc-generation-2"
        return np.asarray(costs)


def _known(program: Program, device_ns: Floats) -> Layer:
    operations = program.operations
    ranks = np.array([one.rank for one in operations])
    moment = np.zeros(len(operations))
    pauses, busy = defaultdict(list), defaultdict(list)
    for number, one in enumerate(operations):
        if one.code is Code.HOST and one.name in (PAUSE, LOG):
            pauses[one.rank].append(number)
        elif one.host_ns > 0:
            busy[one.rank].append(number)
    for rank in set(ranks.tolist()):
        mine = ranks == rank
        passed = np.cumsum(device_ns[mine])
        moment[mine] = passed / max(passed[-1], 1.0)
    return Layer(
        rank=ranks,
        bound=np.array([int(one.bound) for one in operations]),
        moment=moment,
        is_expert=np.array([one.expert for one in operations]),
        is_loader=np.array([one.code is Code.HOST and one.name == LOADER for one in operations]),
        # an iteration's own pause comes after its begin
        pauses={rank: np.array(places[1:]) for rank, places in pauses.items()},
        busy={rank: np.array(places) for rank, places in busy.items()},
    )


def _sharing(job: Job, cluster: Cluster) -> dict[str, dict[tuple[int, int], int]]:
    """Count, for each axis, the groups that take a NIC at the same time."""
    sharing: dict[str, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    for group, members in job.shape.groups.items():
        axis = group.partition("@")[0]
        if cluster.crosses(members):
            for nic in {cluster.nic_of(rank) for rank in members}:
                sharing[axis][nic] += 1
    return sharing
