"""Run what comes after the passes: gradients are reduced, their norm is taken, parameters change.

As in Megatron-Core: `finalize_model_grads` waits for the reductions or does them, sums the
gradients of shared embeddings and, with sequence parallelism, of norms; the optimizer sums the
squares over all ranks that hold different parameters, reads the norm on the host, and updates. A
distributed optimizer (ZeRO's first stage, arXiv 1910.02054) gathers the parameters afterwards.
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.rack.engine import LAUNCHES_A_COLLECTIVE, Arguments, Mark, Row
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.network import Network
from benchmarks.grounds.rack.passes import Stage
from benchmarks.grounds.rack.places import Map
from benchmarks.grounds.rack.roofline import BYTES, Work, passes_over
from megascan.schema import Kind, Track
from megascan.vocabulary import GRAD_SYNC, OPTIMIZER

_BYTES_UPDATED = 26
"""A parameter's: gradient, two moments, master copy and copy in bfloat16, read and written."""
_OFFLOADED_BYTES = 6
"""A parameter's over PCIe: its gradient to the host and its new value back."""
_CPU_UPDATE_S = 1.2e-10
"""What a host takes for one parameter, all its cores together."""
_PARAMETERS_A_KERNEL = 25e6


class Update:
    """The update of all stages."""

    def __init__(self, stages: list[Stage], network: Network, where: Map) -> None:
        self.stages = stages
        self.network = network
        self.where = where
        self.job = stages[0].job

    def run(self) -> None:
        """Run it, and note its spans."""
        for stage in self.stages:
            stage.moment = stage.lane.moment = self.job.num_slices - 1
        begins = [stage.lane.mark() for stage in self.stages]
        for stage in self.stages:
            self._reduce(stage)
        if self.job.num_stages > 1:
            self._together("embd", self._embedding_bytes())
        for stage, begin in zip(self.stages, begins, strict=True):
            self._sum_norms(stage)
            stage.lane.note(Kind.OPTIMIZER, GRAD_SYNC, begin, {})
        self._step()

    def _launch_s(self, stage: Stage) -> Floats:
        return stage.now(stage.conditions.launch_s)

    def _reduce(self, stage: Stage) -> None:
        """Wait for the gradients of all replicas, or reduce them now."""
        lane, habits = stage.lane, self.job.habits
        previous: Floats | None = None
        for pending in stage.reducing:
            lane.wait(pending, is_bound=habits.ends_are_bounds)
            row = pending.row
            if previous is not None:
                cut = np.maximum(row.begin, previous)
                row.begin = np.where(cut <= row.end, cut, row.begin)
            previous = row.end
        groups, launch_s = lane.groups["dp_cp"], self._launch_s(stage)
        if groups.size > 1 and not stage.reducing:
            op = "reduce_scatter" if habits.distributed_optimizer else "all_reduce"
            for chunk in range(self.job.num_chunks):
                for _ in range(stage.buckets_of(chunk)):
                    lane.meet("dp_cp", op, stage.gradient_bytes(chunk), launch_s, {})
        stage.reducing = []
        if self.job.model.num_experts and lane.groups["expt_dp"].size > 1:
            size = round(0.5 * stage.gradient_bytes(0))
            lane.meet("expt_dp", "all_reduce", size, launch_s, {})
        if habits.counts_tokens and groups.size > 1:
            lane.meet("dp_cp", "all_reduce", 8, launch_s, {})

    def _embedding_bytes(self) -> int:
        model = self.job.model
        return 4 * model.hidden * model.vocabulary // self.job.layout.tp

    def _sum_norms(self, stage: Stage) -> None:
        if self.job.layout.tp > 1 and self.job.habits.sequence_parallel:
            layers = sum(map(len, self.job.model.layers[stage.number]))
            size = 4 * 4 * self.job.model.hidden * layers
            stage.lane.meet("tp", "all_reduce", size, self._launch_s(stage), {})

    def _together(self, axis: str, size_bytes: int) -> None:
        """Run an all-reduce of groups that span stages."""
        groups = self.where.across[axis]
        if groups.size < 2:
            return
        lanes = [stage.lane for stage in self.stages]
        begins = [lane.mark() for lane in lanes]
        for stage in self.stages:
            stage.lane.stall(LAUNCHES_A_COLLECTIVE * self._launch_s(stage))
        ready = np.concatenate([np.maximum(lane.dev, lane.host) for lane in lanes], axis=1)
        moment = self.job.num_slices - 1
        seconds = self.network.collective(groups, "all_reduce", size_bytes, (-1, moment))
        through = groups.spread(groups.latest(ready) + seconds)
        through = through + self.network.jitter(through.shape[1])
        takes_part = np.zeros(through.shape[1], dtype=np.bool_)
        takes_part[groups.inside] = True
        for stage, begin in zip(self.stages, begins, strict=True):
            own = takes_part[stage.places]
            if own.any():
                stage.lane.dev = np.where(own, through[:, stage.places], stage.lane.dev)
                row = self._row(stage, axis, size_bytes, begin)
                row.groups = groups.ids[stage.places]
                if stage.lane.is_full:
                    stage.lane.rows.append(row)

    def _row(self, stage: Stage, axis: str, size_bytes: int, begin: Mark) -> Row:
        arguments: Arguments = {
            "op": "all_reduce",
            "sequence": stage.lane.number(axis, "all_reduce"),
            "size_bytes": size_bytes,
        }
        marks = (begin, stage.lane.mark())
        return stage.lane.row(Kind.COLLECTIVE, "all_reduce", Track.COMMUNICATION, marks, arguments)

    def _step(self) -> None:
        """Take the norm, which everybody waits for, and update."""
        habits = self.job.habits
        begins = [stage.lane.mark() for stage in self.stages]
        for stage in self.stages:
            held = self._held(stage)
            self._run(stage, passes_over(self.job.rack.chip, 4.0 * held, kernels=6))
        self._together("intra_dist_opt" if habits.distributed_optimizer else "mp", 4)
        for stage, begin in zip(self.stages, begins, strict=True):
            stage.lane.sync()  # the host reads the norm
            self._update(stage)
            if habits.distributed_optimizer and not habits.overlap_param_gather:
                self._gather(stage)
            stage.lane.note(Kind.OPTIMIZER, OPTIMIZER, begin, {})

    def _held(self, stage: Stage) -> float:
        """Return of how many parameters a rank holds the state."""
        shards = stage.lane.groups["dp_cp"].size if self.job.habits.distributed_optimizer else 1
        return sum(stage.num_parameters) / shards

    def _run(self, stage: Stage, work: Work) -> None:
        draws = np.random.default_rng([self.job.seed, 5, stage.iteration, stage.number])
        tail = 1.0 + self.job.weather.kernel_tail * np.abs(
            draws.standard_normal(stage.lane.places.size)
        )
        seconds = work.memory_s * stage.now(stage.conditions.memory) * tail
        stage.lane.run(seconds, work.num_kernels, self._launch_s(stage))

    def _update(self, stage: Stage) -> None:
        held = self._held(stage)
        kernels = 8 + round(held / _PARAMETERS_A_KERNEL)
        if not self.job.habits.offloads_optimizer:
            self._run(
                stage, passes_over(self.job.rack.chip, _BYTES_UPDATED * held, kernels=kernels)
            )
            return
        moment = self.job.num_slices - 1
        copied = self.network.copy(_OFFLOADED_BYTES * held, stage.places, moment)
        stage.lane.run(copied, kernels, self._launch_s(stage))
        stage.lane.sync()
        slow = self._launch_s(stage) / self.job.habits.launch_s
        stage.lane.stall(_CPU_UPDATE_S * held * slow)

    def _gather(self, stage: Stage) -> None:
        """Gather the parameters that other replicas have updated."""
        groups = stage.lane.groups["dp_cp"]
        if groups.size < 2:
            return
        for chunk in range(self.job.num_chunks):
            buckets = stage.buckets_of(chunk)
            size = round(BYTES * stage.num_parameters[chunk] / buckets / groups.size)
            for _ in range(buckets):
                stage.lane.meet("dp_cp", "all_gather", size, self._launch_s(stage), {})
