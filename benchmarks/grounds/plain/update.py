"""What stands between passes: batches, copies, the optimizer, evaluations, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.grounds.plain.engine import EVERYBODY, At, Engine
from benchmarks.grounds.plain.job import PIPELINES, SHARDED, Trainer
from benchmarks.grounds.plain.machine import GroupSet
from benchmarks.grounds.plain.passes import Passes
from benchmarks.grounds.plain.trouble import Hits
from megascan.schema import Kind
from megascan.vocabulary import BATCH_GENERATOR, OPTIMIZER

_FETCH_RATIO = 0.25
_PAGEABLE_RATIO = 2.5
"""By how much slower a copy is whose memory is not pinned."""
_NUM_EVALUATED = 2
_OPTIMIZER_MEMORY_SHARE = 0.97


@dataclass
class Update:
    """Everything of an iteration that is no pass."""

    engine: Engine
    passes: Passes

    def fetch(self, at: At = EVERYBODY) -> None:
        """Fetch a batch and copy it to the device."""
        engine, habits = self.engine, self.engine.job.habits
        self.passes.draw_lengths()
        begin = engine.mark_host(at)
        took = habits.fetch_s * np.exp(_FETCH_RATIO * engine.draws.normal())
        took = took + engine.conditions.added_s(Hits.FETCHES, engine.draws.even())
        engine.host[at] += took[at]
        if habits.has_loader:
            engine.span(Kind.DATA, BATCH_GENERATOR, begin, engine.host[at].copy(), {}, at=at)
        self._copy(at)

    def _copy(self, at: At) -> None:
        engine, habits = self.engine, self.engine.job.habits
        factor = engine.conditions.factor(Hits.COPIES, engine.device)[at]
        slower = _PAGEABLE_RATIO if habits.copies_wait else 1.0
        took = slower * habits.input_bytes / engine.job.machine.pcie_bytes_per_s * factor
        engine.device[at] = np.maximum(engine.device[at], engine.host[at] + 1e-5) + took + 8e-6
        engine.host[at] += 1.5e-5
        if habits.copies_wait:
            engine.host[at] = np.maximum(engine.host[at], engine.device[at])

    def finish(self) -> None:
        """End an iteration: norm, step, and what some iterations do besides."""
        engine, habits, model = self.engine, self.engine.job.habits, self.engine.job.model
        trainer = engine.job.trainer
        if habits.clips:
            engine.compute(
                0.15 * model.optimizer_s + 2e-5,
                kernels=8,
                memory_share=_OPTIMIZER_MEMORY_SHARE,
                is_of_pass=False,
            )
            if trainer in SHARDED:
                engine.blocking("all_reduce", self._sharding, 4.0, {})
        self._step()
        if trainer in (Trainer.ZERO1, Trainer.ZERO2):
            groups = engine.groups["deepspeed"]
            weights = float(model.layer_bytes.sum()) + model.ends_bytes
            engine.blocking("all_gather", groups, weights / groups.size, {})
        if habits.evaluates_within:
            self._evaluate()
            self._save()
        if habits.logs_loss and trainer not in PIPELINES:
            engine.blocking("all_reduce", engine.groups["world"], 4.0, {})
        if habits.waits_at_end:
            engine.synchronize()

    @property
    def _sharding(self) -> GroupSet:
        names = {Trainer.HSDP: "dp_shard", Trainer.FSDP_TP: "fsdp"}
        return self.engine.groups[names.get(self.engine.job.trainer, "world")]

    def _step(self) -> None:
        engine, model = self.engine, self.engine.job.model
        begin = engine.mark()
        uneven = self.engine.job.habits.uneven_ratio
        places = np.linspace(1.0 + uneven, 1.0 - uneven, engine.job.num_ranks)
        kernels = 4 * model.num_layers
        engine.compute(
            model.optimizer_s,
            kernels=kernels,
            memory_share=_OPTIMIZER_MEMORY_SHARE,
            weights=places,
            is_of_pass=False,
        )
        engine.span(Kind.OPTIMIZER, OPTIMIZER, begin, engine.device.copy(), {})
        engine.host += 2e-5

    def between(self) -> None:
        """Do what some loops do outside of their iterations; nobody records it."""
        recorder = self.engine.recorder
        was_on, recorder.is_on = recorder.is_on, False
        if not self.engine.job.habits.evaluates_within:
            self._evaluate()
            self._save()
        self.engine.host += 3e-5
        recorder.is_on = was_on

    def _evaluate(self) -> None:
        """Evaluate: forward passes without gradients, which are no passes of training."""
        engine, habits, model = self.engine, self.engine.job.habits, self.engine.job.model
        if not habits.evaluates_every or engine.iteration % habits.evaluates_every:
            return
        for _ in range(_NUM_EVALUATED):
            for place in range(model.num_layers):
                if engine.job.trainer in SHARDED:
                    size_bytes = float(model.layer_bytes[place]) / self._sharding.size
                    ready = engine.mark()
                    ends = engine.beside_stream("all_gather", self._sharding, size_bytes, ready, {})
                    engine.wait(ends)
                engine.compute(
                    float(model.forward_s[place]), kernels=model.num_kernels, is_of_pass=False
                )
            if engine.job.trainer not in PIPELINES:
                engine.blocking("all_reduce", engine.groups["world"], 4.0, {})

    def _save(self) -> None:
        engine, habits = self.engine, self.engine.job.habits
        if not habits.saves_every or engine.iteration % habits.saves_every:
            return
        ranks = slice(0, 1) if habits.saves_alone else EVERYBODY
        engine.synchronize(ranks)
        engine.host[ranks] += habits.save_s * (0.8 + 0.4 * engine.draws.even()[ranks])
