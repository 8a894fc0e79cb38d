"""All flags of the trainer in one value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from megascan.errors import UsageError
from training.arguments.flags import add_group, read_group
from training.arguments.model import ModelSettings, MoeSettings, RecomputeSettings
from training.arguments.output import CheckpointSettings, LogSettings
from training.arguments.parallel import ParallelSettings
from training.arguments.schedule import BatchSettings, OptimizerSettings, PrecisionSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for on the command line, unchecked; `sizes.resolve_sizes` checks it."""

    model: ModelSettings
    moe: MoeSettings
    recompute: RecomputeSettings
    parallel: ParallelSettings
    batch: BatchSettings
    optimizer: OptimizerSettings
    precision: PrecisionSettings
    checkpoint: CheckpointSettings
    log: LogSettings


_GROUPS: tuple[tuple[str, str, type], ...] = (
    ("model", "model", ModelSettings),
    ("moe", "mixture of experts", MoeSettings),
    ("recompute", "activation recomputation", RecomputeSettings),
    ("parallel", "parallelism", ParallelSettings),
    ("batch", "batches and length", BatchSettings),
    ("optimizer", "optimizer", OptimizerSettings),
    ("precision", "precision", PrecisionSettings),
    ("checkpoint", "checkpoints", CheckpointSettings),
    ("log", "reports", LogSettings),
)


class TrainerParser(argparse.ArgumentParser):
    """A parser whose mistakes are errors like all others, so that one rank can report them."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage on every rank."""
        raise UsageError(f"{message}; see --help")


def build_parser(prog: str, description: str) -> TrainerParser:
    """A parser with the trainer's own flags; other parts add theirs to it."""
    parser = TrainerParser(prog=prog, description=description, allow_abbrev=False)
    for _, title, group in _GROUPS:
        add_group(parser, title, group)
    return parser


def read_settings(namespace: argparse.Namespace) -> Settings:
    """The trainer's own flags out of a parsed command line."""
    values = vars(namespace)
    return Settings(**{name: read_group(group, values) for name, _, group in _GROUPS})


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse the trainer's own flags alone (tests, tools)."""
    return read_settings(build_parser("training", "trainer flags").parse_args(arguments))
