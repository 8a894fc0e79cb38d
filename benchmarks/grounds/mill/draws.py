"""Draw all that is random in one iteration of one stage, the same in every world."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from benchmarks.grounds.mill.program import ATTENTION, EXPERTS, TOKENS, Code, Program
from benchmarks.grounds.mill.troubles import RATES, Floats

if TYPE_CHECKING:
    from benchmarks.grounds.mill.engine import Engine, Stage

Integers = NDArray[np.int64]


class Draws:
    """Durations of everything, (operation, world, rank of the stage) where worlds differ."""

    def __init__(
        self, engine: Engine, stage: Stage, program: Program, rates: dict[str, Floats], number: int
    ) -> None:
        job = self.job = engine.job
        self.engine, self.stage, self.program, self.number = engine, stage, program, number
        ops, warm = program.operations, job.warm_up if number <= 2 else 1.0
        shape = (len(ops), len(stage.ranks))
        rng = np.random.default_rng((job.seed, 3, number, program.stage))
        self.of = {name: np.array([getattr(op, name) for op in ops]) for name in (
            "kernels", "clock_s", "memory_s", "data", "microbatch", "layer", "in_pass",
        )}  # fmt: skip
        here = {name: rates[name][:, stage.ranks] for name in RATES}
        noise = np.exp(job.kernel_noise * rng.normal(size=shape)) * self._data(rng) * warm**0.1
        noise *= np.exp(0.25 * job.kernel_noise * rng.normal(size=shape[1]))
        chips = engine.chips[:, stage.ranks]
        self.clock = (self.of["clock_s"][:, None] * noise)[:, None] * (here["clock"] * chips)
        self.memory = (self.of["memory_s"][:, None] * noise)[:, None] * here["memory"] * chips**0.3
        self.own = (self.clock + self.memory)[self.of["in_pass"]].sum(0)
        unlike = engine.unlike[stage.ranks]
        launch = np.exp(job.host_noise * unlike * rng.normal(size=shape)) * (job.launch_s * warm)
        launch *= self.of["kernels"][:, None]
        stalls = rng.random(shape) < job.stall_share * unlike
        launch += stalls * rng.exponential(job.stalls_s, shape) * unlike
        self.launch = launch[:, None] * here["host"]
        self.links = np.exp(job.link_noise * rng.normal(size=shape))
        self.links *= 1 + (rng.random(shape) < job.tenants) * rng.exponential(2.0, shape)
        self.batches = self._batches(rng, here["loader"])
        self.pauses = self._pauses(rng)

    def _data(self, rng: Generator) -> Floats:
        """Return how many times longer operations take by what is in the data, (operation, rank).

        What a replica's microbatch has is the same on all its ranks.
        """
        job, data = self.job, self.of["data"]
        most, microbatch = self.program.num_microbatches, self.of["microbatch"]
        common = np.random.default_rng((job.seed, 5, self.number))
        noise = np.clip(common.normal(size=(most, job.layout.dp)), -3, 3)
        replicas = np.ones_like(noise)
        if job.lengths in {"uneven", "packed"}:
            replicas = np.exp(job.length_spread * noise)
        elif job.lengths == "long":
            replicas[:, job.long_replica] += job.length_spread
        own = replicas[:, self.stage.replica]
        result = np.ones((len(data), own.shape[1]))
        self.tokens = np.ones((2, own.shape[1]))
        longer = 1.0
        if job.lengths != "packed":
            result[data >= TOKENS] *= own[microbatch[data >= TOKENS]]
            self.tokens, longer = np.stack([own.min(0), own.max(0)]), 0.3
        result[data == ATTENTION] *= own[microbatch[data == ATTENTION]] ** longer
        if job.has_experts:
            result[data == EXPERTS] *= self._experts(rng)[data == EXPERTS]
        return result

    def _experts(self, rng: Generator) -> Floats:
        """Return how many times more tokens than others each rank's experts get."""
        job, (members, inverse) = self.job, self.stage.members["ep"]
        shape = (self.program.num_microbatches, sum(map(len, job.chunks)) + 1)
        load = np.exp(job.expert_spread * rng.normal(size=(*shape, len(inverse))))
        hot = job.hot_place + (self.number // 3 if job.hot_moves else 0)
        load *= np.where(self.stage.expert == hot % job.layout.ep, 1 + job.hot_expert, 1.0)
        load /= load[..., members].mean(-1)[..., inverse]
        found: Floats = load[self.of["microbatch"], self.of["layer"]]
        return found

    def _batches(self, rng: Generator, rate: Floats) -> dict[int, Floats]:
        """Return how long the workers of each loader need for a batch, by operation."""
        job = self.job
        places = [at for at, op in enumerate(self.program.operations) if op.code == Code.LOAD]
        passes_s = ((self.of["clock_s"] + self.of["memory_s"]) * self.of["in_pass"]).sum()
        forward_s = passes_s / 3 / self.program.num_microbatches
        drawn = np.exp(0.2 * rng.normal(size=(len(places), rate.shape[1]))) * job.batch_share
        drawn += (rng.random(drawn.shape) < job.storage_hiccups) * job.hiccup
        return {place: forward_s * drawn[at] * rate for at, place in enumerate(places)}

    def _pauses(self, rng: Generator) -> dict[int, list[tuple[int, float, int, Integers]]]:
        """Return where Python collects: by operation (rank, seconds, generation, worlds)."""
        job, engine, num = self.job, self.engine, len(self.program.operations)
        found: dict[int, list[tuple[int, float, int, Integers]]] = {}
        everywhere = np.arange(engine.num_worlds)
        lengths = rng.lognormal(0, 0.15, len(self.stage.ranks))
        young = rng.integers(0, num, (2, len(lengths)))
        for local, rank in enumerate(self.stage.ranks.tolist()):
            for place in young[:, local].tolist():
                found.setdefault(place, []).append((local, 1.5e-4 * lengths[local], 0, everywhere))
            plans = [(job.collects_every, job.collection_s, everywhere)]
            for fault in dict.fromkeys(it for one in engine.worlds for it in one.faults):
                if fault.pause_every and rank in fault.ranks and fault.holds(self.number):
                    at = np.array([w for w, it in enumerate(engine.worlds) if fault in it.faults])
                    plans.append((fault.pause_every, fault.pause_s, at))
            for every, seconds, worlds in plans:
                since = engine.phase[rank] + self.number * num
                places = np.arange(every - since % every, num, every) if every else np.zeros(0)
                for place in places.astype(int).tolist():
                    length = float(seconds * lengths[local])
                    found.setdefault(place, []).append((local, length, 2, worlds))
        return found
