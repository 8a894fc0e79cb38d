"""What trainers on plain PyTorch do: DDP's buckets, FSDP's gathered layers. Ranks are all alike."""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.campus.crew import Crew
from benchmarks.grounds.campus.habits import Chance, adam, set_lengths
from benchmarks.grounds.campus.hardware import Floats
from benchmarks.grounds.campus.job import FSDP
from benchmarks.grounds.campus.megatron import BESIDE_COMPUTE
from benchmarks.grounds.campus.model import Cost

BUCKET_BYTES = 25e6
HALF_BYTES, FULL_BYTES = 2, 4


class Replicas:
    """All ranks of a job at work on an iteration."""

    def __init__(self, crew: Crew) -> None:
        self.crew, self.job, self.parts = crew, crew.world.job, crew.world.job.parts
        self.chance = Chance(crew)
        self.layers = self.job.layers_of(0, 0)
        self.is_sharded = self.job.trainer == FSDP
        self.everybody = np.ones(crew.size)
        self._gathered: dict[int, Floats] = {}
        self._done: list[Floats] = []
        self._pending = 0.0

    def run(self) -> None:
        """Do all passes of an iteration."""
        count = self.crew.world.num_microbatches
        for number in range(count):
            self._forward(number)
            self._backward(number, is_last=number == count - 1)

    def finish(self) -> None:
        """Update: after the last reduction nobody waits for anybody."""
        parameters, _ = self.job.parameters_of(0)
        begin = self.crew.mark()
        self.crew.where = {}
        adam(self.crew, parameters / (self.job.num_ranks if self.is_sharded else 1))
        self.crew.keep_compute("optimizer", begin, kind="optimizer", module=False)
        self.crew.waits_for_device()

    # Passes

    def _forward(self, microbatch: int) -> None:
        crew = self.crew
        self.chance.begin(2 * microbatch)
        set_lengths(crew, microbatch)
        crew.where = {"microbatch": microbatch, "chunk": 0}
        self.chance.fetch(2 * microbatch, self.everybody)
        crew.where = {"microbatch": microbatch, "chunk": 0, "phase": "forward"}
        begin = crew.mark()
        self._gathered = {}
        if self.is_sharded:
            self._gather(0)
            self._await(0)
        crew.compute(self.parts.embedding)
        for place, (number, kind) in enumerate(self.layers, start=1):
            crew.where["layer"] = number
            if self.is_sharded:
                self._gather(place)
                self._await(place)
            inner = crew.mark()
            self._layer(kind, 1.0)
            crew.keep_compute("layer", inner)
            self._done.append(crew.device)
        crew.where.pop("layer", None)
        crew.compute(self.parts.output)
        crew.keep_compute("forward", begin, module=False)
        crew.compute(self.parts.loss)

    def _backward(self, microbatch: int, *, is_last: bool) -> None:
        crew = self.crew
        self.chance.begin(2 * microbatch + 1)
        crew.where = {"microbatch": microbatch, "chunk": 0, "phase": "backward"}
        reduces = is_last or self.is_sharded
        crew.contention = BESIDE_COMPUTE if reduces else 1.0
        begin = crew.mark()
        self._gathered, self._done = {}, []
        crew.compute(self.parts.loss, 0.5)
        crew.compute(self.parts.output, 2.0)
        for place in range(len(self.layers), 0, -1):
            number, kind = self.layers[place - 1]
            crew.where["layer"] = number
            if self.is_sharded:
                self._gather(place)
                self._await(place)
            inner = crew.mark()
            if self.job.habits.recompute:
                crew.where["phase"] = "recompute"
                self._layer(kind, 1.0)
                crew.keep_compute("layer-recompute", inner)
                crew.where["phase"] = "backward"
                inner = crew.mark()
            self._layer(kind, 2.0)
            crew.keep_compute("layer-backward", inner)
            self._done.append(crew.device)
            if reduces:
                self._reduce(self.parts.parameters[kind])
        crew.where.pop("layer", None)
        crew.compute(self.parts.embedding)
        if reduces:
            self._reduce(2 * self.parts.parameters["embedding"], ends=True)
        crew.keep_compute("backward", begin, module=False)
        crew.contention = 1.0
        if reduces:
            begin = crew.mark()
            crew.where = {}
            crew.device = np.maximum(crew.device, crew.lanes["dp"])
            crew.keep_compute("grad-sync", begin, kind="optimizer", module=False)

    def _layer(self, kind: str, times: float) -> None:
        parts = self.parts
        both = Cost(
            matrix_s=parts.mixers[kind].matrix_s + parts.feeds[kind].matrix_s,
            square_s=parts.mixers[kind].square_s,
            memory_s=parts.mixers[kind].memory_s
            + parts.feeds[kind].memory_s
            + 2 * parts.norm.memory_s,
            kernels=parts.mixers[kind].kernels + parts.feeds[kind].kernels + 4,
        )
        self.crew.compute(both, times)

    # Communication

    def _gather(self, place: int) -> None:
        """Gather the parameters of a layer beside the layer before; 0: those of the ends.

        Memory is kept for two layers: gathering waits until the one before the last is computed.
        """
        crew = self.crew
        amount = (
            self.parts.parameters[self.layers[place - 1][1]]
            if place
            else 2 * self.parts.parameters["embedding"]
        )
        device = crew.device
        crew.device = self._done[-2] if len(self._done) > 1 else crew.start
        self._gathered[place] = crew.collective("dp", "all_gather", HALF_BYTES * amount, lane="dp")
        crew.device = device

    def _await(self, place: int) -> None:
        self.crew.device = np.maximum(self.crew.device, self._gathered[place])

    def _reduce(self, amount: float, *, ends: bool = False) -> None:
        if self.is_sharded:
            self.crew.collective("dp", "reduce_scatter", FULL_BYTES * amount, lane="dp")
            return
        self._pending += FULL_BYTES * amount
        if self._pending >= BUCKET_BYTES or ends:
            self.crew.collective("dp", "all_reduce", self._pending, lane="dp")
            self._pending = 0.0
