"""What a run leaves behind: checkpoints, log lines, TensorBoard events."""

# ruff: noqa: RUF009 - `flag` makes an immutable field, as dataclasses.field does

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.arguments.flags import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Where and when the state of the training is written and read."""

    save: Path | None = flag(None, "folder to write checkpoints to, also at the end of the run")
    save_interval: int | None = flag(None, "iterations between two checkpoints")
    load: Path | None = flag(None, "folder to resume from; empty or missing: start at 1")
    exit_on_missing_checkpoint: bool = flag(False, "end when --load holds no checkpoint")
    finetune: bool = flag(False, "take only the weights from --load and start at iteration 1")
    load_optim: bool = flag(
        True, "do not load the optimizer and its schedule", option="--no-load-optim"
    )
    load_rng: bool = flag(True, "do not load random states", option="--no-load-rng")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is reported while training."""

    log_interval: int = flag(100, "iterations between two log lines")
    timing_log_level: int = flag(
        0,
        "Megatron-Core's timers: 0 none, 1 coarse, 2 fine (they synchronize the device)",
        choices=(0, 1, 2),
    )
    tensorboard_dir: Path | None = flag(None, "folder for TensorBoard events")
    tensorboard_log_interval: int = flag(1, "iterations between two TensorBoard points")
