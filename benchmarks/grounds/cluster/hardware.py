"""The cluster: GPUs as chains of speed states, hosts whose cores and NICs are shared, links
between them.

Nothing here knows of a job's passes. All times are float nanoseconds of true time; every number is
drawn from streams of the case's seed that do not depend on what is planted, so that a case with its
cause and the same case without it meet the same weather.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MS = 1e6
_STALLS = ("gc", "gc_everywhere", "host_memory")
_GRID = 8192  # steps of a GPU's speed path before it begins again
_SPEED_STREAM, _CHIP_STREAM, _CLOCK_STREAM, _WEATHER_STREAM, _STALL_STREAM = 1, 2, 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """State one cause physically: what it hits, how hard and when.

    `share_of_time` below 1 means bursts of `burst_ratio` nominal iterations' mean length. `index`
    is the NIC of a rail, the stage of a heavy stage, the replica of long sequences or the hot
    expert's rank.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    factor: float = 1.0
    first_iteration: int = 1
    share_of_time: float = 1.0
    burst_ratio: float = 0.0
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Describe the hosts that a job runs on and how noisy they are."""

    gpus_per_host: int = 8
    nics_per_host: int = 8
    nvlink_bytes_per_ns: float = 160.0
    nic_bytes_per_ns: float = 45.0
    chip_spread: float = 0.01  # fixed difference between chips, uniform between 0 and this
    kernel_noise: float = 0.006  # scale of Student's t with 4 degrees of freedom
    drift_noise: float = 0.003  # stationary deviation of the AR(1) of a host and of a chip
    host_noise: float = 0.15  # shape of the noise of launches and loaders
    spike_share: float = 0.0005  # share of kernels with a gamma-distributed spike


@dataclass(kw_only=True)
class Weather:
    """Hold what drifts from iteration to iteration: AR(1) of chips and hosts, load of cores and
    file server.
    """

    chip: Floats  # (rank,) factor of compute times
    cores: Floats  # (rank,) factor of host work, the same on a host but for a small part
    file_server: float = 1.0


@dataclass(kw_only=True)
class Cluster:
    """Hold the GPUs and hosts of one case, with or without its troubles."""

    num_ranks: int
    machines: Machines
    seed: int
    nominal_iteration_ns: float
    troubles: tuple[Trouble, ...] = ()
    chip: Floats = field(init=False)
    host_of: NDArray[np.int64] = field(init=False)
    _speed: Floats = field(init=False)
    _step_ns: float = field(init=False)

    def __post_init__(self) -> None:
        ranks = np.arange(self.num_ranks)
        self.host_of = ranks // self.machines.gpus_per_host
        self.nic_of = (
            ranks % self.machines.gpus_per_host * self.machines.nics_per_host
        ) // self.machines.gpus_per_host
        self.num_hosts = int(self.host_of[-1]) + 1
        spread = np.random.default_rng([self.seed, _CHIP_STREAM])
        self.chip = 1.0 + self.machines.chip_spread * spread.random(self.num_ranks)
        self._step_ns = self.nominal_iteration_ns / 128
        self._speed = self._speed_paths()
        self._hosts_drift = np.zeros(self.num_hosts)
        self._chips_drift = np.zeros(self.num_ranks)
        self._load = np.zeros(self.num_hosts)

    def _speed_paths(self) -> Floats:
        """Return each GPU's factor on compute time along a grid of time, shape (rank, step).

        A continuous-time Markov chain per GPU: normal, power-capped (1.2 % slower, a tenth of the
        time on a quarter of the chips), a rare pause of an ECC retry; troubles add a state of their
        own.
        """
        paths = np.ones((self.num_ranks, _GRID))
        for rank in range(self.num_ranks):
            draws = np.random.default_rng([self.seed, _SPEED_STREAM, rank])
            if draws.random() < 0.25:
                capped = _alternating(draws, share=0.1, mean_steps=40.0)
                paths[rank, capped] = 1.012
            retries = draws.integers(0, _GRID, size=3)
            paths[rank, retries] *= 2.0
            self._add_planted_states(paths, rank)
        return paths

    def _add_planted_states(self, paths: Floats, rank: int) -> None:
        for number, trouble in enumerate(self.troubles):
            if trouble.kind not in ("throttling", "ecc") or rank not in trouble.ranks:
                continue
            draws = np.random.default_rng([self.seed, _SPEED_STREAM, rank, 77, number])
            slow = _alternating(
                draws, share=trouble.share_of_time, mean_steps=max(trouble.burst_ratio * 128, 0.6)
            )
            paths[rank, slow] *= trouble.factor

    def speed(self, ranks: NDArray[np.int64], times: Floats) -> Floats:
        """Return the factor on compute-bound work of `ranks`, each at its own time."""
        steps = (times / self._step_ns).astype(np.int64) % _GRID
        return self._speed[ranks, steps]

    def active(self, kind: str, iteration: int) -> list[Trouble]:
        """Return the troubles of a kind that have begun by this iteration."""
        return [
            each
            for each in self.troubles
            if each.kind == kind and iteration >= each.first_iteration
        ]

    def factor(self, kind: str, iteration: int) -> Floats:
        """Return the product of a kind's factors on each rank in this iteration."""
        factors = np.ones(self.num_ranks)
        for trouble in self.active(kind, iteration):
            factors[list(trouble.ranks)] *= trouble.factor
        return factors

    def weather(self, iteration: int) -> Weather:
        """Move all drifts on to this iteration and return them."""
        draws = np.random.default_rng([self.seed, _WEATHER_STREAM, iteration])
        noise = self.machines.drift_noise
        keep = 0.85
        fresh = np.sqrt(1 - keep**2)
        self._hosts_drift = keep * self._hosts_drift + fresh * draws.normal(size=self.num_hosts)
        self._chips_drift = keep * self._chips_drift + fresh * draws.normal(size=self.num_ranks)
        self._load = keep * self._load + fresh * draws.normal(size=self.num_hosts)
        drift = self._chips_drift + 0.5 * self._hosts_drift[self.host_of]
        scatter = draws.gamma(200.0, 1 / 200.0, size=self.num_ranks)
        # the cores that launch threads, loaders and strangers share: never faster than unshared
        shared = 1 + self.machines.host_noise * np.maximum(self._load, 0.0) ** 1.5
        cores = shared[self.host_of] * scatter * self.factor("host_cpu", iteration)
        return Weather(
            chip=np.exp(noise * drift),
            cores=cores,
            file_server=float(draws.gamma(20.0, 1 / 20.0)) * self._file_server(iteration),
        )

    def _file_server(self, iteration: int) -> float:
        slow = self.active("file_server", iteration)
        return slow[0].factor if slow else 1.0

    def nvlink(self, iteration: int) -> Floats:
        """Return bytes per ns that each GPU moves over its host's switch."""
        return self.machines.nvlink_bytes_per_ns / self.factor("nvlink", iteration)

    def nic(self, iteration: int) -> Floats:
        """Return bytes per ns of the NIC that each rank uses, before it is shared."""
        slower = self.factor("nic", iteration) * self.factor("rail", iteration)
        return self.machines.nic_bytes_per_ns / slower

    def clocks(self) -> tuple[Floats, Floats]:
        """Return (offset_ns, drift_ppm) of each rank's clock: a host's share, and little of its
        own.
        """
        draws = np.random.default_rng([self.seed, _CLOCK_STREAM])
        host_offset = draws.normal(0, 12 * MS, size=self.num_hosts)
        host_drift = draws.normal(0, 8.0, size=self.num_hosts)
        own_offset = draws.normal(0, 20e3, size=self.num_ranks)
        own_drift = draws.normal(0, 0.4, size=self.num_ranks)
        return host_offset[self.host_of] + own_offset, host_drift[self.host_of] + own_drift


@dataclass(frozen=True, kw_only=True)
class Stall:
    """State when a rank's launching thread stands still, and whether Python's collector is why."""

    start_ns: float
    duration_ns: float
    collection: bool


def stalls_of(cluster: Cluster, iteration: int, begins: Floats) -> dict[int, list[Stall]]:
    """Return the stalls of each rank's host thread in one iteration, in order of time.

    Stalls of a host under memory pressure hit most of its ranks at once, collections one rank each.
    """
    found: dict[int, list[Stall]] = {}
    for number, trouble in enumerate(cluster.troubles):
        if trouble.kind not in _STALLS or iteration < trouble.first_iteration:
            continue
        alone = trouble.kind != "host_memory"
        for lot in trouble.ranks if alone else trouble.ranks[:1]:
            draws = np.random.default_rng([cluster.seed, _STALL_STREAM, iteration, number, lot])
            mean_ns = trouble.burst_ratio * cluster.nominal_iteration_ns
            for _ in range(draws.poisson(trouble.share_of_time / trouble.burst_ratio)):
                # collections come while Python runs, which is ahead of the GPU
                fraction = draws.random() * (0.4 if alone else 1.0)
                duration_ns = mean_ns * draws.lognormal(-0.125, 0.5)
                for rank in (lot,) if alone else trouble.ranks:
                    if alone or draws.random() < 0.8:
                        start_ns = float(begins[rank]) + fraction * cluster.nominal_iteration_ns
                        stall = Stall(start_ns=start_ns, duration_ns=duration_ns, collection=alone)
                        found.setdefault(rank, []).append(stall)
    for stalls in found.values():
        stalls.sort(key=lambda each: each.start_ns)
    return found


def _alternating(
    draws: np.random.Generator, *, share: float, mean_steps: float
) -> NDArray[np.bool_]:
    """Return where along the grid a two-state chain is in its rarer state."""
    state = np.zeros(_GRID, dtype=bool)
    at = draws.exponential(mean_steps * (1 - share) / share)
    while at < _GRID:
        end = at + draws.exponential(mean_steps)
        state[int(at) : max(int(end), int(at) + 1)] = True
        at = end + draws.exponential(mean_steps * (1 - share) / share)
    return state


def shared_finish(
    starts: Floats, size_bytes: float, bytes_per_ns: Floats, pipe: NDArray[np.int64]
) -> Floats:
    """Return when flows of one size end that share pipes by processor sharing.

    All flows of a pipe that are under way get equal parts of its capacity: two flows of 10 bytes
    that begin at 0 and 5 ns on a pipe of 1 byte/ns end at 15 and 20 ns.
    """
    ends = starts + size_bytes / bytes_per_ns
    order = np.argsort(pipe, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(pipe[order])) + 1):
        if len(members) > 1:
            ends[members] = _fluid(starts[members], size_bytes, float(bytes_per_ns[members].min()))
    return ends


def _fluid(starts: Floats, size_bytes: float, bytes_per_ns: float) -> Floats:
    """Return the ends of equal flows on one pipe: who came first ends first, so a queue is
    enough.
    """
    order = np.argsort(starts, kind="stable")
    arrivals = starts[order].tolist()
    ends = np.empty(len(arrivals))
    now, served, first = (
        arrivals[0],
        0.0,
        0,
    )  # bytes that each flow under way has got since the start
    targets: list[float] = []
    while first < len(arrivals):
        next_arrival = arrivals[len(targets)] if len(targets) < len(arrivals) else np.inf
        if len(targets) == first:  # idle
            now = max(now, next_arrival)
            targets.append(served + size_bytes)
            continue
        done = now + (targets[first] - served) * (len(targets) - first) / bytes_per_ns
        if next_arrival < done:
            served += (next_arrival - now) * bytes_per_ns / (len(targets) - first)
            now = next_arrival
            targets.append(served + size_bytes)
        else:
            served, now = targets[first], done
            ends[order[first]] = done
            first += 1
    return ends
