"""Restoring a run from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from megascan.errors import InputError
from training.arguments import Settings, Sizes
from training.checkpoint.contents import named_chunks, sharded_state
from training.checkpoint.damage import DAMAGES, reason_of
from training.checkpoint.fit import check_layout, check_model, warn, warn_about_order
from training.checkpoint.folder import LATEST_FILE, latest_checkpoint
from training.checkpoint.optimizer_state import prepare_optimizer, restore_step
from training.checkpoint.random_state import set_random_state, sharded_random_state
from training.loop import Progress, TrainState


def load_checkpoint(settings: Settings, sizes: Sizes, state: TrainState) -> Progress:
    """Restore `state` from ``--load`` and return how far it had come.

    Without a checkpoint there the run starts at the beginning, with a warning, unless
    ``--exit-on-missing-checkpoint`` is set. Raises InputError when the checkpoint is damaged or
    belongs to a model or layout that does not fit.
    """
    wanted = settings.checkpoint
    folder = None if wanted.load is None else latest_checkpoint(wanted.load)
    if folder is None:
        if wanted.exit_on_missing_checkpoint:
            raise InputError(f"{wanted.load} has no {LATEST_FILE}; give --load another folder")
        if wanted.load is not None:
            warn(f"{wanted.load} has no {LATEST_FILE}: starting at iteration 1")
        return Progress()
    try:
        return _load(settings, sizes, state, folder)
    except DAMAGES as error:
        raise InputError(
            f"cannot load the checkpoint {folder} ({reason_of(error)}); take an earlier one by "
            "writing "
            f"its iteration into {folder.parent / LATEST_FILE}"
        ) from error


def _load(settings: Settings, sizes: Sizes, state: TrainState, folder: Path) -> Progress:
    wanted = settings.checkpoint
    common = dist_checkpointing.load_common_state_dict(str(folder))
    saved_sizes: dict[str, object] = common["sizes"]
    check_model(settings, sizes, common, folder)
    with_optimizer = wanted.load_optim and not wanted.finetune
    with_rng = wanted.load_rng and not wanted.finetune
    if with_optimizer:
        check_layout(settings, sizes, common, folder)
        prepare_optimizer(state.optimizer)
    if with_rng and saved_sizes["world_size"] != sizes.world_size:
        warn("the checkpoint has random states of another number of ranks: seeded anew")
        with_rng = False
    template = sharded_state(state, is_loading=True, with_optimizer=with_optimizer)
    if with_rng:
        template["rng_state"] = sharded_random_state(sizes)
    loaded = dist_checkpointing.load(template, str(folder))
    for name, chunk in named_chunks(state):
        chunk.load_state_dict(loaded[name])
    if with_optimizer:
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded["optimizer"])
        restore_step(state.optimizer)
        state.schedule.load_state_dict(loaded["schedule"])
    else:
        state.optimizer.reload_model_params()
    if with_rng:
        set_random_state(loaded["rng_state"])
    if wanted.finetune:
        return Progress()
    warn_about_order(settings, sizes, common)
    return Progress(**loaded["progress"])
