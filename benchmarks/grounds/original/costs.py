"""Draw what each module, launch and transfer costs on each rank, in microseconds.

A module takes the longer of its kernels' and its launches' time. Kernels cost what the table says,
times the model's scale, the load, the chip, its drift, its host's and its power state, and a gamma
draw; launches cost what the table says times the host's slowness. Natural draws and those of a
planted effect come from different generators: a job without the effect repeats the natural ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from benchmarks.grounds.original.job import Effect, Flags, Floats, Job, Kind, Ranks


@dataclass(frozen=True, kw_only=True)
class Module:
    """State what a module runs, and how much of it follows the clock and the tokens."""

    gpu_us: float  # kernels of one layer and microbatch
    clock_share: float
    launch_us: float
    tokens_power: float = 0.0  # how kernels grow with the tokens of a sequence


MODULES = {
    "embedding": Module(gpu_us=90, clock_share=0.3, launch_us=40, tokens_power=1),
    "norm": Module(gpu_us=30, clock_share=0.2, launch_us=12, tokens_power=1),
    "attention": Module(gpu_us=620, clock_share=0.75, launch_us=85, tokens_power=1.4),
    "residual": Module(gpu_us=25, clock_share=0.2, launch_us=10, tokens_power=1),
    "mlp": Module(gpu_us=880, clock_share=0.9, launch_us=45, tokens_power=1),
    "router": Module(gpu_us=60, clock_share=0.3, launch_us=50, tokens_power=1),
    "head": Module(gpu_us=420, clock_share=0.9, launch_us=60, tokens_power=1),
    "loss": Module(gpu_us=45, clock_share=0.3, launch_us=35),
    "head_backward": Module(gpu_us=800, clock_share=0.9, launch_us=60, tokens_power=1),
    "mlp_backward": Module(gpu_us=1750, clock_share=0.9, launch_us=90, tokens_power=1),
    "attention_backward": Module(gpu_us=1300, clock_share=0.8, launch_us=150, tokens_power=1.4),
    "embedding_backward": Module(gpu_us=120, clock_share=0.3, launch_us=30, tokens_power=1),
    "gradient_norm": Module(gpu_us=500, clock_share=0.25, launch_us=120),
    "optimizer": Module(gpu_us=2600, clock_share=0.25, launch_us=400),
}
LAYER_MODULES = frozenset(
    {"norm", "attention", "residual", "mlp", "router", "mlp_backward", "attention_backward"}
)
EXPERT_MODULES = frozenset({"mlp", "mlp_backward"})
EXPOSED_LAUNCH_US = 6.0  # until the first kernel starts; barriers keep the host from running ahead
PREEMPTION_US = 400.0  # a busy host takes the launching thread off its core for so long
PREEMPTED_SHARE = 0.02  # of the time, for each unit of slowness
STALL_US = 4000.0  # reclaiming pages, mean
REGIME_SWITCH_PROBABILITY = 0.15
DRIFT_MEMORY = 0.9  # AR(1), from traced step to traced step


def job_steps(job: Job) -> Floats:
    """Return each traced step's number in the training run, from 0, shape (step,)."""
    gaps = [1 + job.tracing.num_steps_before(step) for step in range(job.num_steps)]
    return np.cumsum(np.array(gaps, dtype=np.float64)) - gaps[0]


def generator(seed: int, *key: object) -> np.random.Generator:
    """Return the generator of one purpose, the same in every process."""
    return np.random.default_rng([seed, crc32(repr(key).encode())])


def gamma(rng: np.random.Generator, variation: float, shape: tuple[int, ...]) -> Floats:
    """Draw gamma values of mean 1 with this coefficient of variation."""
    if variation <= 0:
        return np.ones(shape)
    order = variation**-2
    return rng.gamma(order, 1 / order, shape)


def _wander(rng: np.random.Generator, deviation: float, num: int, steps: int) -> Floats:
    """Draw `num` stationary AR(1) series around 1, shape (num, steps)."""
    fresh = rng.normal(size=(num, steps)) * deviation
    series = np.empty((num, steps))
    series[:, 0] = fresh[:, 0]
    for step in range(1, steps):
        series[:, step] = DRIFT_MEMORY * series[:, step - 1] + fresh[:, step] * np.sqrt(
            1 - DRIFT_MEMORY**2
        )
    return 1 + series


def natural_slowness(job: Job) -> Floats:
    """Draw how slow each healthy chip is in each step, shape (rank, step)."""
    rng, noise, ranks = generator(job.seed, "chips"), job.noise, job.shape.num_ranks
    chips = 1 + noise.chip_spread_ratio * rng.random((ranks, 1))
    drift = _wander(rng, noise.drift_ratio, ranks, job.num_steps)
    hosts = _wander(rng, noise.host_ratio, job.shape.num_hosts, job.num_steps)
    switches = rng.random((ranks, job.num_steps)) < REGIME_SWITCH_PROBABILITY
    switches[:, 0] = rng.random(ranks) < 0.5
    regime = 1 + noise.regime_ratio * (np.cumsum(switches, axis=1) % 2)
    return np.asarray(chips * drift * hosts[job.shape.hosts().ravel()] * regime, dtype=np.float64)


def link_slowness(job: Job, members: Ranks, effects: tuple[Effect, ...]) -> Floats:
    """Return how many times slower each group transfers; the last axis of `members` is a group."""
    hosts = members // job.shape.gpus_per_host
    crosses = (hosts != hosts[..., :1]).any(axis=-1)
    slowness = np.ones((*members.shape[:-1], job.num_steps))
    for effect in effects:
        if effect.kind is Kind.NVLINK:
            struck = ~crosses & (members == effect.place).any(axis=-1)
        elif effect.kind is Kind.NIC:
            struck = crosses & (hosts == effect.place).any(axis=-1)
        elif effect.kind is Kind.RAIL:
            rails = members % job.shape.gpus_per_host
            struck = crosses & (rails == effect.place).any(axis=-1)
        else:
            continue
        late_enough = np.arange(job.num_steps) + 1 >= effect.first_step
        slowness[struck[..., None] & late_enough] *= effect.factor
    return slowness


class Costs:
    """Draw the durations of one stage's ranks; all arrays have the shape (dp, tp, step)."""

    def __init__(self, job: Job, stage: int, calm_us: float) -> None:
        """Prepare the stage; `calm_us` is the mean step without effects, for what lasts so long."""
        self.job, self.stage, self.calm_us = job, stage, calm_us
        self.ranks = job.shape.grid()[stage]
        self.hosts = job.shape.hosts()[stage]
        self.shape = (job.shape.dp, job.shape.tp, job.num_steps)
        self.rng = generator(job.seed, "stage", stage)
        self.transfer_rng = generator(job.seed, "transfers", stage)
        self.natural = natural_slowness(job)[self.ranks]
        self.effect_rngs = [generator(job.seed, e.kind, e.place, stage) for e in job.effects]
        self.host_slowness = self._host_slowness()
        self._bursts = {e: self._burst_edges_us(e) for e in job.effects}
        self._paused = np.zeros(self.shape, dtype=bool)
        self._sequences = {e: self._sequence_lengths(e) for e in job.effects}
        self._own = {e: generator(job.seed, e.kind, stage) for e in job.effects}

    def _host_slowness(self) -> Floats:
        slowness = np.ones(self.shape)
        for effect in self.job.effects:
            if effect.kind is Kind.HOST_CPU:
                slowness[self._concerned(effect, self.hosts)] *= effect.factor
        return slowness

    def _concerned(self, effect: Effect, places: Ranks) -> Flags:
        """Tell which cells an effect on one place concerns, from its first step on."""
        steps = np.arange(self.job.num_steps) + 1 >= effect.first_step
        return np.asarray((places == effect.place)[..., None] & steps, dtype=np.bool_)

    def _burst_edges_us(self, effect: Effect) -> Floats:
        """Draw the job times at which bursts begin and end by turns."""
        if effect.kind is not Kind.THROTTLING:
            return np.empty(0)
        rng = generator(self.job.seed, effect.kind, effect.place, "bursts")
        cycle_us = effect.period * self.calm_us
        num = int(3 * (job_steps(self.job)[-1] + 2) / effect.period) + 8
        calm = rng.gamma(2, (1 - effect.share) * cycle_us / 2, num)
        burst = rng.gamma(2, effect.share * cycle_us / 2, num)
        return np.cumsum(np.stack([calm, burst], axis=1).ravel()) - rng.random() * cycle_us

    def _sequence_lengths(self, effect: Effect) -> Floats:
        """Draw each microbatch's length relative to the mean, shape (microbatch, dp, 1, step)."""
        if effect.kind is not Kind.LONG_SEQUENCES:
            return np.empty(0)
        rng = generator(self.job.seed, effect.kind)
        deviation = effect.factor - 1
        size = (self.job.num_microbatches, self.job.shape.dp, 1, self.job.num_steps)
        return rng.lognormal(-(deviation**2) / 2, deviation, size)

    def compute(self, name: str, now_us: Floats, microbatch: int) -> Floats:
        """Return how long module `name` takes on each rank when it starts at `now_us`."""
        module, noise = MODULES[name], self.job.noise
        kernels = module.gpu_us * self.job.gpu_scale * self.natural
        kernels = kernels * gamma(self.rng, noise.module_ratio, self.shape)
        launches = module.launch_us + EXPOSED_LAUNCH_US * gamma(self.rng, 0.5, self.shape)
        launches = launches * self.job.launch_scale * self.host_slowness
        exposed = EXPOSED_LAUNCH_US * self.job.launch_scale * self.host_slowness
        spiked = self.rng.random(self.shape) < noise.spike_probability
        spikes = spiked * noise.spike_us * gamma(self.rng, 0.7, self.shape)
        for effect in self.job.effects:
            kernels = kernels * self._load(effect, name, microbatch)
            kernels = kernels * self._chip_slowness(effect, module, now_us)
        taken = exposed + np.maximum(kernels, launches)
        for effect, rng in zip(self.job.effects, self.effect_rngs, strict=True):
            taken = taken + self._stall(effect, rng, now_us, taken)
        return np.asarray(taken + spikes, dtype=np.float64)

    def _chip_slowness(self, effect: Effect, module: Module, now_us: Floats) -> Floats | float:
        """Return how many times slower kernels run where an effect holds the clock down."""
        if effect.kind not in {Kind.GPU_CLOCK, Kind.THROTTLING}:
            return 1.0
        struck = self._concerned(effect, self.ranks)
        if effect.kind is Kind.THROTTLING:
            job_us = job_steps(self.job) * self.calm_us + now_us
            struck = struck & (np.searchsorted(self._bursts[effect], job_us) % 2 == 1)
        return np.where(struck, 1 + (effect.factor - 1) * module.clock_share, 1.0)

    def _load(self, effect: Effect, name: str, microbatch: int) -> Floats | float:
        """Return how much more than usual a module has to do, by the job's own doing."""
        module, job = MODULES[name], self.job
        load: Floats | float = 1.0
        match effect.kind:
            case Kind.HEAVY_HEAD if name.startswith("head"):
                load = effect.factor
            case Kind.HEAVY_STAGE if name in LAYER_MODULES and self.stage == effect.place:
                load = effect.factor
            case Kind.LONG_SEQUENCES:
                load = np.power(self._sequences[effect][microbatch], module.tokens_power)
            case Kind.HEAVY_REPLICA:
                heavy = np.arange(job.shape.dp)[:, None, None] == effect.place
                load = np.where(heavy, effect.factor**module.tokens_power, 1.0)
            case Kind.WARM_UP if microbatch == 0:
                extra = (effect.factor - 1) * gamma(self._own[effect], 0.2, self.shape)
                load = 1 + extra * (np.arange(job.num_steps) == 0)
            case Kind.PAUSE if microbatch == 0:
                load = np.where(paused_before(job, effect), effect.factor, 1.0)
            case Kind.HOT_EXPERT | Kind.MOVING_EXPERT if name in EXPERT_MODULES:
                load = self._expert_load(effect)
        return load

    def _expert_load(self, effect: Effect) -> Floats:
        """Return each expert's share of the tokens: what one has more the others have less."""
        num, steps = self.job.shape.dp, self.job.num_steps
        hot = np.full(steps, effect.place)
        if effect.kind is Kind.MOVING_EXPERT:
            hot = self._own[effect].integers(num, size=steps)
        is_hot = np.arange(num)[:, None] == hot
        return np.where(is_hot, effect.factor, (num - effect.factor) / (num - 1))[:, None, :]

    def _stall(
        self, effect: Effect, rng: np.random.Generator, now_us: Floats, taken: Floats
    ) -> Floats | float:
        """Return for how long the launching thread stands still during a module."""
        if effect.kind is Kind.GC:
            return self._gc_pause(effect, now_us + taken)
        if effect.kind is Kind.HOST_CPU:
            mean_us, share = PREEMPTION_US, PREEMPTED_SHARE * (effect.factor - 1)
        elif effect.kind is Kind.HOST_MEMORY:
            mean_us, share = STALL_US, effect.factor - 1
        else:
            return 0.0
        hit = rng.random(self.shape) < share * taken / mean_us
        lasting = mean_us * gamma(rng, 0.8, self.shape)
        hit &= self._concerned(effect, self.hosts)
        if effect.kind is Kind.HOST_MEMORY:
            pressure = generator(self.job.seed, effect.kind, effect.place, "pressure")
            hit &= pressure.random(self.job.num_steps) < effect.share
        return hit * lasting

    def _gc_pause(self, effect: Effect, end_us: Floats) -> Floats:
        """Return the pause of a collection, once in the steps that have one, at a drawn moment."""
        rng = generator(self.job.seed, effect.kind, effect.place)
        has_one = rng.random(self.job.num_steps) < effect.share
        moment_us = rng.random(self.job.num_steps) * 0.8 * self.calm_us
        length_us = (effect.factor - 1) * self.calm_us * gamma(rng, 0.15, (self.job.num_steps,))
        due = self._concerned(effect, self.ranks) & has_one & (end_us > moment_us) & ~self._paused
        self._paused |= due
        return np.where(due, length_us, 0.0)

    def data_stall(self) -> Floats | float:
        """Return how long a microbatch waits for data; one loader serves all ranks of a replica."""
        stall: Floats | float = 0.0
        for effect, rng in zip(self.job.effects, self.effect_rngs, strict=True):
            if effect.kind is Kind.SLOW_FILES:
                size = (self.shape[0], 1, self.shape[2])
                hit = rng.random(size) < effect.share
                stall = stall + hit * (effect.factor - 1) * 1000 * gamma(rng, 0.8, size)
        return stall

    def transfer(self, mean_us: float, slowness: Floats) -> Floats:
        """Return how long a transfer takes once all are there; `slowness` has the groups' shape."""
        drawn = gamma(self.transfer_rng, self.job.noise.transfer_ratio, slowness.shape)
        return np.asarray(mean_us * drawn * slowness, dtype=np.float64)


def paused_before(job: Job, effect: Effect) -> Flags:
    """Tell before which traced steps the whole job evaluated or saved, shape (step,)."""
    every = int(effect.period)
    return np.asarray(np.arange(job.num_steps) % every == every - 1, dtype=np.bool_)
