"""One training job, from a command line to its end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megascan.config import TraceConfig, add_trace_arguments
from training.arguments import (
    Settings,
    Sizes,
    build_parser,
    idle_flags,
    read_settings,
    resolve_sizes,
)
from training.arguments.settings import add_original_arguments, notes_on_original
from training.distributed import (
    Launch,
    choose_device,
    finalize,
    initialize,
    load_kernels_at_start,
    refusals_as_errors,
    seed_everything,
    silence,
)
from training.faults import (
    FaultCallback,
    FaultSpec,
    install_faults,
    parse_faults,
    write_planted_faults,
)
from training.pipeline.schedule import check_schedule, notes_on_plan, schedule_name
from training.scope import ScopeSettings, add_scope_arguments, scope_callbacks

if TYPE_CHECKING:
    from megascan.tracer import Tracer
    from training.callback import Callback
    from training.loop import Progress, Trainer, TrainState
    from training.pipeline.running import Pipeline


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job whose flags are known to fit together."""

    launch: Launch
    settings: Settings
    sizes: Sizes
    namespace: argparse.Namespace
    trace: TraceConfig
    scope: ScopeSettings
    faults: tuple[FaultSpec, ...]
    device: str
    notes: tuple[str, ...] = ()
    """Sentences on flags that are given and do nothing, and on sums in another order."""

    def run(self) -> None:
        """Join the other ranks and train; MegaScanError for what a user can mend."""
        if self.launch.rank == 0:
            for sentence in self.notes:
                print(f"note: {sentence}", file=sys.stderr, flush=True)
        with self.joined():
            self.train()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the job as one of its ranks, and leave it at the end of the context."""
        try:
            silence(self.device)
            initialize(self.settings, self.sizes, self.launch, self.device)
            yield
        finally:
            finalize()

    def train(self, watching: Sequence[Callback] = ()) -> None:
        """Train from the seed, or from a checkpoint, to the end; `watching` are told all moments.

        Call this inside `joined` of this job, or of a job with the same parallel sizes. Several
        jobs may train there one after the other, but faults, once installed, stay in the process.
        """
        seed_everything(self.settings.batch.seed)
        faults = install_faults(self.faults, self.launch.rank, self.settings.batch.seed)
        trainer, progress = self._prepare(watching, faults)
        try:
            progress = trainer.run(progress)
        finally:
            trainer.pipeline.close()
        self._announce_end(progress)

    def _prepare(
        self, watching: Sequence[Callback], faults: FaultCallback
    ) -> tuple[Trainer, Progress]:
        """Build everything, restore what a checkpoint holds, and start tracing."""
        from megascan.instrument import start
        from training.callback import Callbacks, TracingCallback
        from training.checkpoint import save_checkpoint
        from training.data.datasets import StreamBuilder
        from training.data.tokenizers import TokenizerSettings, build_tokenizer
        from training.log import TrainingLog, print_summary
        from training.loop import Trainer
        from training.origin import describe_run, model_vocab_size, start_from
        from training.pipeline.running import Pipeline
        from training.step import build_timers, connect

        settings, sizes = self.settings, self.sizes
        pipeline = Pipeline(settings, sizes)
        tokens = TokenizerSettings.from_arguments(self.namespace)
        tokenizer = build_tokenizer(tokens)
        vocab_size = model_vocab_size(settings, tokenizer.vocab_size)
        described = describe_run(settings, sizes, vocab_size, tokens)
        streams = StreamBuilder(settings, sizes, tokenizer, self.namespace, self.device)
        state = self._build(pipeline, vocab_size)
        print_summary(
            settings,
            sizes,
            state.chunks,
            vocab_size=vocab_size,
            datasets=streams.describe(),
            device=self.device,
        )
        connect(settings, state.chunks, state.optimizer)
        pipeline.start(self.device, state.chunks, self._description(vocab_size))
        timers = build_timers(settings, state.chunks, state.optimizer)
        progress = start_from(settings, sizes, state, described)
        tracer = start(self.trace, resumed=progress.iteration > 0)
        self._record_truth(tracer)
        scope = self._scope(state, vocab_size, progress)
        callback = Callbacks([*watching, *scope, TracingCallback(tracer), faults])
        trainer = Trainer(
            settings,
            sizes,
            state,
            streams.data(callback),
            log=TrainingLog(settings, sizes, vocab_size, self.launch.rank, timers),
            callback=callback,
            save=lambda done: save_checkpoint(settings, sizes, state, done, described),
            pipeline=pipeline,
        )
        return trainer, progress

    def _scope(self, state: TrainState, vocab_size: int, progress: Progress) -> Sequence[Callback]:
        return scope_callbacks(
            self.scope,
            self.sizes,
            state.chunks,
            device=self.device,
            vocab_size=vocab_size,
            done=progress.iteration,
        )

    def _description(self, vocab_size: int) -> dict[str, object]:
        """Return what a helper, which is no rank, must know to build a part of the model."""
        import torch

        return {
            "flags": vars(self.namespace),
            "world_size": self.sizes.world_size,
            "vocab_size": vocab_size,
            "num_threads": torch.get_num_threads(),
        }

    def _build(self, pipeline: Pipeline, vocab_size: int) -> TrainState:
        """Build the model of this rank, its optimizer and its learning-rate schedule."""
        from training.loop import TrainState
        from training.model import build_model, build_optimizer, build_schedule

        settings, sizes = self.settings, self.sizes
        with refusals_as_errors():
            chunks = build_model(settings, sizes, vocab_size, self.device, split=pipeline.split)
            optimizer = build_optimizer(settings, sizes, chunks)
            schedule = build_schedule(settings, sizes, optimizer)
        return TrainState(chunks=chunks, optimizer=optimizer, schedule=schedule)

    def _record_truth(self, tracer: Tracer) -> None:
        """Write the planted faults to a file next to the rank files."""
        if self.trace.enabled and self.launch.rank == 0:
            run_id: str | None = getattr(tracer, "run_id", None)
            write_planted_faults(self.trace.directory, run_id, self.sizes.world_size, self.faults)

    def _announce_end(self, progress: Progress) -> None:
        """Print, when all ranks are done, what was written and the next command to run."""
        import torch.distributed as dist

        dist.barrier()
        if self.launch.rank:
            return
        saved = self.settings.checkpoint.save
        if saved is not None:
            print(f"wrote checkpoints up to iteration {progress.iteration} to {saved}", flush=True)
        if self.trace.enabled:
            folder = self.trace.directory
            print(f"wrote the trace to {folder}; next: python aggregate.py -b {folder} -d")


def parse_job(arguments: Sequence[str], launch: Launch) -> Job:
    """Read the command line; UsageError or ConfigError, the same on all ranks."""
    from training.data.blend import add_data_arguments
    from training.data.tokenizers import add_tokenizer_arguments
    from training.origin import parse_with_origin

    parser = build_parser("python -m training.pretrain_gpt", "Train a GPT on Megatron-Core.")
    add_tokenizer_arguments(parser)
    add_data_arguments(parser)
    add_trace_arguments(parser)
    add_scope_arguments(parser)
    _add_fault_argument(parser)
    add_original_arguments(parser)
    namespace = parse_with_origin(parser, arguments)
    settings = read_settings(namespace)
    sizes = resolve_sizes(settings, launch.world_size)
    check_schedule(settings, sizes)
    if schedule_name(settings, sizes) is not None:
        load_kernels_at_start()
    return Job(
        launch=launch,
        settings=settings,
        sizes=sizes,
        namespace=namespace,
        trace=TraceConfig.from_arguments(namespace),
        scope=ScopeSettings.from_arguments(namespace),
        faults=parse_faults(namespace.inject_fault, sizes),
        device=choose_device(settings, launch),
        notes=(
            *idle_flags(parser, namespace),
            *notes_on_original(namespace),
            *notes_on_plan(settings, sizes),
        ),
    )


def _add_fault_argument(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("planted faults")
    group.add_argument(
        "--inject-fault",
        action="append",
        default=[],
        metavar="rank=R,kind=K,factor=F",
        help="make a rank slow; kinds compute, link, host, loader, gc; factor=F times as long, or "
        "delay=MS (link, loader, gc); from=I and to=I limit it to iterations; peer=R (link) to a "
        "pair of ranks; repeatable",
    )
