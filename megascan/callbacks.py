"""Callbacks for trainers that own their loop: Hugging Face's Trainer and Lightning.

    Trainer(…, callbacks=[for_transformers(config)])            transformers
    Trainer(…, callbacks=[for_lightning(config)])               lightning

An iteration lasts from the end of one step to the end of the next, so that fetching the batches is
part of it. What a trainer does between two steps (evaluations, checkpoints) belongs to no
iteration: the next iteration begins again after that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megascan.config import TraceConfig
from megascan.tracer import Tracer

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import TrainerCallback, TrainerState


class Steps:
    """Iterations of a loop that only tells when a step has ended."""

    def __init__(self, config: TraceConfig, mesh: DeviceMesh | None) -> None:
        self._config = config
        self._mesh = mesh
        self._tracer = Tracer()
        self._open: AbstractContextManager[None] | None = None
        self._number = 0

    def begin(self, model: torch.nn.Module, num_done: int) -> None:
        """Start tracing a run that has done `num_done` steps, and begin its next iteration."""
        from megascan.instrument import start

        self._tracer = start(self._config, resumed=num_done > 0, model=model, mesh=self._mesh)
        self._enter(num_done + 1)

    def has_ended(self, num_done: int) -> None:
        """End the iteration of step `num_done` of the run, and begin the next iteration."""
        if self._open is not None and num_done == self._number:
            self._open.__exit__(None, None, None)
            self._enter(num_done + 1)

    def begin_anew(self) -> None:
        """Begin the current iteration again, without what was done in it so far."""
        if self._open is not None:
            self._abandon()
            self._enter(self._number)

    def end(self) -> None:
        """Forget the last iteration, which has no step, and end tracing."""
        if self._open is not None:
            self._abandon()
        self._tracer.close()

    def _enter(self, number: int) -> None:
        self._number = number
        self._open = self._tracer.iteration(number)
        self._open.__enter__()

    def _abandon(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(StopIteration, StopIteration(), None)


def for_transformers(config: TraceConfig, *, mesh: DeviceMesh | None = None) -> TrainerCallback:
    """Return a callback that traces a run of Hugging Face's Trainer; `mesh` is that of `start`."""
    from transformers import TrainerCallback

    steps = Steps(config, mesh)

    class MegaScan(TrainerCallback):  # type: ignore[misc]
        """Traces steps of the optimizer, which may be several batches each."""

        def on_train_begin(
            self, _: object, state: TrainerState, *given: object, **known: object
        ) -> None:
            """Start, with the model that is trained."""
            steps.begin(known["model"], state.global_step)  # type: ignore[arg-type]

        def on_step_end(
            self, _: object, state: TrainerState, *given: object, **known: object
        ) -> None:
            """End an iteration."""
            steps.has_ended(state.global_step)

        def between(self, *given: object, **known: object) -> None:
            """Begin the iteration after what the trainer has done between two steps."""
            steps.begin_anew()

        on_epoch_begin = on_log = on_save = on_evaluate = between

        def on_train_end(self, *given: object, **known: object) -> None:
            """End tracing."""
            steps.end()

    return MegaScan()


def for_lightning(config: TraceConfig, *, mesh: DeviceMesh | None = None) -> Callback:
    """Return a callback that traces a fit of Lightning's Trainer; `mesh` is that of `start`.

    Lightning is installed as `lightning` or as `pytorch-lightning`; either will do.
    """
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback  # type: ignore[assignment]

    steps = Steps(config, mesh)

    class MegaScan(Callback):
        """Traces steps of the optimizer, which may be several batches each."""

        def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
            """Start, with the model that is trained."""
            steps.begin(pl_module, trainer.global_step)

        def on_train_batch_end(
            self, trainer: LightningTrainer, *given: object, **known: object
        ) -> None:
            """End an iteration, if the batch was the last of a step."""
            steps.has_ended(trainer.global_step)

        def between(self, *given: object, **known: object) -> None:
            """Begin the iteration after what the trainer has done between two steps."""
            steps.begin_anew()

        on_train_epoch_start = on_validation_end = on_save_checkpoint = between

        def on_train_end(self, *given: object, **known: object) -> None:
            """End tracing."""
            steps.end()

    return MegaScan()
