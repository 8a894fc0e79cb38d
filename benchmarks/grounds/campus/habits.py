"""What any trainer does around its passes: batches, collections of garbage, warming up, updates."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.campus.crew import Crew, Mark
from benchmarks.grounds.campus.hardware import Floats
from benchmarks.grounds.campus.model import Cost, passing_s
from megascan.schema import Track

FETCH_S = 2e-4  # taking a batch that is there
PIN_S = 3e-4  # and copying it to the device
ADAM_BYTES = 28.0  # read and written for each parameter: weight, gradient, two moments
PREFETCHED = 2  # batches that each worker of a loader has ready


class Chance:
    """Draws of one stage that belong to passes rather than kernels."""

    def __init__(self, crew: Crew) -> None:
        world = crew.world
        self._crew = crew
        self._rng = world.rng(51, crew.stage)
        self._shape = world.shape[1], crew.size
        self._numbers = np.array(world.numbers)

    def begin(self, number: int) -> None:
        """Begin a pass: what holds during it, and what the hosts do before it."""
        crew, habits = self._crew, self._crew.world.job.habits
        crew.begin_pass(number)
        planted = crew.world.effects.surplus("pause", number, crew.ranks)
        if planted is not None:
            crew.pause(planted, "gc-generation-2")
        if habits.gc_share:
            hits = self._rng.random(self._shape) < habits.gc_share / crew.world.num_passes
            lasts = habits.gc_s * self._rng.gamma(2.0, 0.5, self._shape)
            crew.pause((hits * lasts)[None], "gc-generation-2")
        if habits.collects_every and number == 0:
            due = self._numbers % habits.collects_every == 0
            lasts = habits.gc_s * self._rng.gamma(8.0, 1 / 8, self._shape)
            crew.pause((due[:, None] * lasts)[None], "gc-generation-2")
        if habits.warms_up and number <= 1:
            first, second = self._numbers == 1, self._numbers == 2
            typical = 0.7 * first + 0.06 * second
            lasts = typical[:, None] * np.exp(0.4 * self._rng.standard_normal(self._shape))
            crew.pause(lasts[None])

    def fetch(self, number: int, loads: Floats) -> None:
        """Have the hosts take a batch; `loads` says which ranks load it themselves, by 0 and 1."""
        crew, world = self._crew, self._crew.world
        loading = world.job.habits.loading
        seconds = loading.seconds * np.exp(
            loading.spread * np.clip(self._rng.standard_normal(self._shape), -3, 3)
        )
        tails = self._rng.random(self._shape) < loading.tail_share
        seconds = seconds * (1 + tails * self._rng.uniform(3, 12, self._shape))
        slower = world.effects.factor("loading", number, crew.ranks)
        prepared = seconds * world.storage[:, None] * slower
        if loading.num_workers:
            period = _period_s(crew)
            kept_up = prepared / loading.num_workers - period
            hidden = prepared - PREFETCHED * loading.num_workers * period
            prepared = np.maximum(0.0, np.maximum(kept_up, hidden))
        jitter = 1 + 0.2 * self._rng.random(self._shape)
        begun = crew.host
        crew.host = begun + (FETCH_S * crew.launching * jitter + prepared * loads)
        args = {key: crew.where[key] for key in ("microbatch", "chunk")}
        crew.keep(
            "data", "batch-generator", Mark(begun, begun), crew.host, args=args, track=Track.HOST,
            launches=False,
        )  # fmt: skip


def _period_s(crew: Crew) -> float:
    """Return about how much time a loader has for a batch."""
    job = crew.world.job
    kernels = sum(
        2 * job.parts.norm.kernels + job.parts.mixers[kind].kernels + job.parts.feeds[kind].kernels
        for chunk in range(job.layout.vpp)
        for _, kind in job.layers_of(crew.stage, chunk)
    )
    return max(job.pass_s(crew.stage), 3 * kernels * job.site.launch_s)


def set_lengths(crew: Crew, microbatch: int) -> None:
    """Have the passes of a microbatch take as long as their documents ask for."""
    linear, square = crew.world.lengths
    longer = crew.world.effects.factor("length", 0, crew.ranks)
    own = crew.replicas
    crew.linear = linear[microbatch][:, own] * longer
    crew.square = square[microbatch][:, own] * longer * longer


def adam(crew: Crew, num_parameters: float) -> None:
    """Update parameters: a few large kernels that only read and write."""
    chip = crew.world.job.site.chip
    lengths = crew.linear, crew.square
    crew.linear = crew.square = 1.0
    seconds = passing_s(chip, ADAM_BYTES * num_parameters)
    crew.compute(Cost(memory_s=seconds, kernels=24), counts=False)
    crew.linear, crew.square = lengths


def unscale(crew: Crew, num_parameters: float) -> None:
    """Read all gradients once: their norm, or their scaling."""
    crew.linear = crew.square = 1.0
    seconds = passing_s(crew.world.job.site.chip, 4.0 * num_parameters)
    crew.compute(Cost(memory_s=seconds, kernels=12), counts=False)
