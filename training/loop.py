"""The training loop: iterations, evaluations and checkpoints at their intervals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from training.arguments import Settings, Sizes
from training.callback import Callback
from training.log import IterationResult, TrainingLog
from training.pipeline.rebalance import Deal
from training.step import Microbatch, run_schedule

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from training.pipeline.running import Pipeline

Streams = list[Iterator[Microbatch] | None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training has come; `iteration` is the last one done, 0 before the first."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_validation_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a training changes, and what a checkpoint must hold."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler


@dataclass(frozen=True, kw_only=True)
class Data:
    """Makes streams of microbatches, one a model chunk, that start after a number of samples.

    `training` deals a step's microbatches to the replicas by a `Deal`, evenly where that is None.
    """

    training: Callable[[int, Deal | None], Streams]
    validation: Callable[[int], Streams]


class Trainer:
    """Runs iterations until the last one.

    `save` writes a checkpoint of a `Progress`; it is called at the intervals of the flags.
    `pipeline` runs the training's steps; evaluations run Megatron-Core's schedule.
    """

    def __init__(
        self,
        settings: Settings,
        sizes: Sizes,
        state: TrainState,
        data: Data,
        *,
        log: TrainingLog,
        callback: Callback,
        save: Callable[[Progress], None],
        pipeline: Pipeline,
    ) -> None:
        self._settings = settings
        self._sizes = sizes
        self._state = state
        self._data = data
        self._log = log
        self._callback = callback
        self._save = save
        self.pipeline = pipeline
        self._streams: Streams = []

    def run(self, progress: Progress) -> Progress:
        """Train from `progress` to the end; return how far the training came."""
        for chunk in self._state.chunks:
            chunk.train()
        # Objects built so far live to the end: later garbage collections need not visit them.
        gc.collect()
        gc.freeze()
        with self._callback.training():
            self._streams = self._data.training(progress.consumed_samples, self.pipeline.deal)
            self._log.begin()
            saved = progress
            while progress.iteration < self._sizes.train_iters:
                progress = self._iterate(progress)
                progress = self._evaluate_if_due(progress)
                if _is_due(self._settings.checkpoint.save_interval, progress):
                    self._write_checkpoint(progress)
                    saved = progress
                if _is_due(self._settings.batch.exit_interval, progress):
                    break
            if self._settings.checkpoint.save is not None and saved != progress:
                self._write_checkpoint(progress)
        self._log.close()
        return progress

    def _iterate(self, progress: Progress) -> Progress:
        iteration = progress.iteration + 1
        with self._callback.iteration(iteration):
            result = self._train_step(iteration)
        progress = replace(
            progress,
            iteration=iteration,
            consumed_samples=progress.consumed_samples + self._sizes.global_batch_size,
        )
        self._log.add(result, progress.consumed_samples)
        if self.pipeline.deals_anew():
            self._streams = self._data.training(progress.consumed_samples, self.pipeline.deal)
        return progress

    def _train_step(self, iteration: int) -> IterationResult:
        state, batch_size = self._state, self._sizes.global_batch_size
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        loss = run_schedule(
            self._sizes,
            state.chunks,
            self._streams,
            num_microbatches=self._sizes.num_microbatches,
            forward_backward=self.pipeline.forward_backward,
        )
        with self._callback.optimizer():
            stepped, grad_norm, _ = state.optimizer.step()
        if stepped:  # an overflow of fp16 skips the step, the schedule then stands still
            state.schedule.step(increment=batch_size)
        return IterationResult(
            iteration=iteration,
            loss=loss,
            skipped=not stepped,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=_learning_rate(state.optimizer),
            loss_scale=state.optimizer.get_loss_scale(),
        )

    def _evaluate_if_due(self, progress: Progress) -> Progress:
        batch = self._settings.batch
        if batch.eval_iters == 0 or progress.iteration % batch.eval_interval:
            return progress
        with self._callback.evaluation(progress.iteration):
            loss = self._evaluate(progress)
        self._log.evaluation(progress.iteration, loss)
        self._log.begin()
        samples = batch.eval_iters * self._sizes.global_batch_size
        return replace(
            progress,
            consumed_validation_samples=progress.consumed_validation_samples + samples,
        )

    def _evaluate(self, progress: Progress) -> torch.Tensor | None:
        """Return the mean loss over an evaluation's iterations; None without the last stage."""
        streams = self._data.validation(progress.consumed_validation_samples)
        for chunk in self._state.chunks:
            chunk.eval()
        forward_only = partial(get_forward_backward_func(), forward_only=True)
        losses: list[torch.Tensor] = []
        with torch.no_grad():
            for _ in range(self._settings.batch.eval_iters):
                loss = run_schedule(
                    self._sizes,
                    self._state.chunks,
                    streams,
                    num_microbatches=self._sizes.num_microbatches,
                    forward_backward=forward_only,
                )
                if loss is not None:
                    losses.append(loss)
        for chunk in self._state.chunks:
            chunk.train()
        return torch.stack(losses).mean() if losses else None

    def _write_checkpoint(self, progress: Progress) -> None:
        with self._callback.checkpoint(progress.iteration):
            self._save(progress)
        self._log.begin()


def _is_due(interval: int | None, progress: Progress) -> bool:
    """Return whether something is due that is done every `interval` iterations; None: never."""
    return interval is not None and progress.iteration % interval == 0


def _learning_rate(optimizer: MegatronOptimizer) -> float:
    """Return the learning rate of the parameters that follow the schedule."""
    for group in optimizer.param_groups:
        if group["default_config"]:
            return float(group["lr"])
    return float(optimizer.param_groups[0]["lr"])
