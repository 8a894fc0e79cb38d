"""MegaScope in the trainer: its flags, and the callbacks that look into the model.

The trainer knows only callbacks. They are made here, and MegaScope is imported only where a flag
asks for it.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import ConfigError
from training.arguments import Sizes
from training.callback import Callback

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from megascan.topology import Layout
    from megascope.recorder import Recorder
    from training.step import Microbatch


LEAST_BYTES = 1 << 20
"""Least value of --scope-max-bytes: some frames must fit."""
MOST_BUDGET = 100.0
"""Highest --scope-budget: looking may take 100 times as long as training, in effect no bound."""


@dataclass(frozen=True, kw_only=True)
class ScopeSettings:
    """What MegaScope does in a run; raises ConfigError for what makes no sense."""

    folder: Path
    is_armed: bool = False
    """Whether requests to look into the model are heeded."""
    interventions: bool = False
    budget_ratio: float = 0.05
    max_bytes: int = 1 << 30
    probe_interval: int = 0
    """Iterations between two probes; 0: none."""

    def __post_init__(self) -> None:
        if self.probe_interval < 0:
            raise ConfigError(f"--probe-interval is {self.probe_interval}, expected 0 or more")
        if not 0 < self.budget_ratio <= MOST_BUDGET:
            raise ConfigError(f"--scope-budget is {self.budget_ratio}, expected a share like 0.05")
        if self.max_bytes < LEAST_BYTES:
            raise ConfigError(f"--scope-max-bytes is {self.max_bytes}, expected {LEAST_BYTES} on")
        if self.interventions and not self.is_armed:
            raise ConfigError("--scope-interventions needs --scope")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> ScopeSettings:
        """Make the settings from the flags that `add_scope_arguments` declares."""
        return cls(
            folder=arguments.trace_dir,
            is_armed=arguments.scope,
            interventions=arguments.scope_interventions,
            budget_ratio=arguments.scope_budget,
            max_bytes=arguments.scope_max_bytes,
            probe_interval=arguments.probe_interval,
        )


def add_scope_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare MegaScope's flags on a parser."""
    group = parser.add_argument_group("looking into the model")
    group.add_argument(
        "--scope", action="store_true",
        help="write the model's health to --trace-dir, and what a viewer asks for: "
        "megascan scope DIR",
    )  # fmt: skip
    group.add_argument(
        "--scope-interventions", action="store_true",
        help="let viewers change what is computed (noise, flipped bits): experiments only",
    )  # fmt: skip
    group.add_argument(
        "--scope-budget", type=float, default=0.05, metavar="SHARE",
        help="share of the time that looking may cost; above it fewer iterations are looked at "
        "(default: 0.05)",
    )  # fmt: skip
    group.add_argument(
        "--scope-max-bytes", type=int, default=1 << 30, metavar="N",
        help="what a rank's recordings take on disk at most; the oldest are dropped (default: "
        "1 GiB)",
    )  # fmt: skip
    group.add_argument(
        "--probe-interval", type=int, default=0, metavar="N",
        help="after every N iterations let all data-parallel replicas compute the same tokens and "
        "write checksums to --trace-dir: megascan probe names who computes wrongly (default: "
        "never)",
    )  # fmt: skip


def scope_callbacks(
    settings: ScopeSettings,
    sizes: Sizes,
    chunks: Sequence[DistributedDataParallel],
    *,
    device: str,
    vocab_size: int,
    done: int,
) -> list[Callback]:
    """Return the callbacks that the flags ask for; `done` iterations were trained before."""
    made: list[Callback] = []
    if settings.is_armed:
        made.append(ScopeCallback(settings, sizes, chunks, first_iteration=done + 1))
    if settings.probe_interval:
        forward = partial(_compute_fixed_tokens, sizes, list(chunks), device, vocab_size)
        made.append(ProbeCallback(settings, sizes, chunks, forward, device))
    return made


class ScopeCallback(Callback):
    """Captures what the request file asks for."""

    def __init__(
        self,
        settings: ScopeSettings,
        sizes: Sizes,
        chunks: Sequence[DistributedDataParallel],
        *,
        first_iteration: int,
    ) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megascope.frames import encode
        from megascope.interventions import TensorShares
        from megascope.recorder import DataFile, Limits, Recorder
        from megascope.request import RequestFile

        rank = dist.get_rank()
        file = DataFile(settings.folder, rank, max_bytes=settings.max_bytes)
        header: dict[str, object] = {
            "kind": "run", "schema": 1, "rank": rank, "layout": asdict(layout_of(sizes)),
            "model": _described(sizes), "first_iteration": first_iteration,
            "may_change": settings.interventions,
        }  # fmt: skip
        self._recorder: Recorder | None = None
        try:
            file.open(
                encode({**header, "is_continued": False}),
                continued=encode({**header, "is_continued": True}),
            )
        except OSError as error:
            print(
                f"warning: rank {rank} records nothing of the model: {settings.folder} cannot be "
                f"written ({error})", file=sys.stderr, flush=True,
            )  # fmt: skip
            return
        self._recorder = Recorder(
            chunks,
            file,
            RequestFile(settings.folder),
            shares=TensorShares(
                rank=parallel_state.get_tensor_model_parallel_rank(), size=sizes.tensor_size
            ),
            limits=Limits(budget_ratio=settings.budget_ratio, interventions=settings.interventions),
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Write what is left when training ends, even by an exception."""
        try:
            yield
        finally:
            if self._recorder is not None:
                self._recorder.close()

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Capture an iteration while it is computed, if the request says so."""
        if self._recorder is None:
            yield
            return
        self._recorder.begin(iteration)
        try:
            yield
        finally:
            self._recorder.end()

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Capture what the optimizer changes."""
        if self._recorder is None:
            yield
            return
        self._recorder.before_step()
        yield
        self._recorder.after_step()


def _described(sizes: Sizes) -> dict[str, int]:
    """Return the model's sizes, for the page."""
    return {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_heads": sizes.num_attention_heads,
        "num_groups": sizes.num_query_groups,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "seq_length": sizes.seq_length,
    }


class ProbeCallback(Callback):
    """After every N iterations writes checksums of what this rank computes from fixed tokens."""

    def __init__(
        self,
        settings: ScopeSettings,
        sizes: Sizes,
        chunks: Sequence[DistributedDataParallel],
        forward: Callable[[], None],
        device: str,
    ) -> None:
        from megascope.probe import Probe
        from megascope.recorder import ProbeFile

        self._interval = settings.probe_interval
        self._chunks = list(chunks)
        self._forward = forward
        self._probe = Probe(chunks)
        self._file = ProbeFile(
            settings.folder, layout=layout_of(sizes), device=_device_name(device)
        )

    @contextmanager
    def iteration(self, iteration: int) -> Iterator[None]:
        """Probe after the iteration when a probe is due; all ranks do so at the same iterations."""
        yield
        if iteration % self._interval:
            return
        for chunk in self._chunks:
            chunk.eval()
        sums = self._probe.run(self._forward)
        for chunk in self._chunks:
            chunk.train()
        self._file.append(iteration, self._probe.points, sums)


def layout_of(sizes: Sizes) -> Layout:
    """Return the job's layout, as rank files declare it."""
    from megascan.topology import Layout

    return Layout(
        tp=sizes.tensor_size,
        cp=sizes.context_size,
        ep=sizes.expert_size,
        dp=sizes.data_size,
        pp=sizes.pipeline_size,
        vpp=sizes.model_chunks,
        etp=sizes.tensor_size if sizes.expert_size > 1 else 1,
    )


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"cpu {platform.processor() or platform.machine()}"
    import torch

    return torch.cuda.get_device_name(device)


def _compute_fixed_tokens(
    sizes: Sizes, chunks: list[DistributedDataParallel], device: str, vocab_size: int
) -> None:
    """Run every chunk forward over the same tokens, on all ranks of the job."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from training.step import run_schedule

    # An interleaved schedule wants as many microbatches as there are stages.
    num_microbatches = sizes.pipeline_size if len(chunks) > 1 else 1
    batch = _fixed_microbatch(sizes, device, vocab_size)
    run_schedule(
        sizes,
        chunks,
        [iter([batch] * num_microbatches) for _ in chunks],
        num_microbatches=num_microbatches,
        forward_backward=partial(get_forward_backward_func(), forward_only=True),
    )


def _fixed_microbatch(sizes: Sizes, device: str, vocab_size: int) -> Microbatch:
    """Return a microbatch whose tokens step through the vocabulary; the same on every rank."""
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    from training.step import Microbatch

    shape = (sizes.micro_batch_size, sizes.seq_length)
    places = torch.arange(sizes.micro_batch_size * sizes.seq_length, device=device).view(shape)
    tokens = places * 7919 % vocab_size
    positions = torch.arange(sizes.seq_length, device=device).expand(shape)
    parts: dict[str, torch.Tensor | None] = {
        "tokens": tokens,
        "labels": tokens.roll(-1, dims=1),
        "loss_mask": torch.ones(shape, device=device),
        "position_ids": positions.contiguous(),
        "attention_mask": None,
    }
    return Microbatch(**get_batch_on_this_cp_rank(parts))
