"""Checkpoints in torch's distributed format, through Megatron-Core.

A folder ``iter_0000010`` per checkpoint, and ``latest_checkpointed_iteration.txt`` beside them,
as in Megatron-LM. A checkpoint is written under another name, renamed when every rank is done, and
named in the text file last: whatever happens in between, the file names a complete checkpoint.

A run that is resumed with the same flags on as many ranks continues exactly: weights, optimizer,
learning-rate schedule, loss scale, random states and the place in the data are restored.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.utils import unwrap_model

from megascan.errors import ConfigError, InputError, OutputError
from training.arguments import Settings, Sizes
from training.loop import Progress, TrainState

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import MegatronModule

LATEST_FILE = "latest_checkpointed_iteration.txt"

# The other sharding of the distributed optimizer that 0.16 can still write loses data when a
# gradient buffer has several buckets with padding between them.
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}

_MODEL_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
_LAYOUT_SIZES = ("tensor_size", "pipeline_size", "virtual_pipeline_size", "expert_size")
_ORDER_SIZES = ("train_iters", "global_batch_size")


def save_checkpoint(
    settings: Settings, sizes: Sizes, state: TrainState, progress: Progress
) -> None:
    """Write a checkpoint of `progress` into ``--save``; every rank calls it.

    Raises OutputError on rank 0 when the folder cannot be written.
    """
    folder = settings.checkpoint.save
    if folder is None:
        raise ConfigError("there is no folder to save to; give --save")
    final = _checkpoint_folder(folder, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        _make_empty(partial)
    dist.barrier()
    contents = _sharded_state(state, is_loading=False)
    contents |= {
        "rng_state": _rng_object(sizes, _rng_state()),
        "progress": asdict(progress),
        "sizes": asdict(sizes),
        "flags": _flags(settings),
    }
    dist_checkpointing.save(contents, str(partial), content_metadata=_METADATA)
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(partial, final, progress.iteration)
    dist.barrier()


def load_checkpoint(settings: Settings, sizes: Sizes, state: TrainState) -> Progress:
    """Restore `state` from ``--load`` and return how far it had come.

    Without a checkpoint there the run starts at the beginning, with a warning, unless
    ``--exit-on-missing-checkpoint`` is set. Raises InputError when the checkpoint is damaged or
    belongs to a model or layout that does not fit.
    """
    wanted = settings.checkpoint
    folder = None if wanted.load is None else _latest(wanted.load)
    if folder is None:
        if wanted.exit_on_missing_checkpoint:
            raise InputError(f"{wanted.load} has no {LATEST_FILE}; give --load another folder")
        if wanted.load is not None:
            _warn(f"{wanted.load} has no {LATEST_FILE}: starting at iteration 1")
        return Progress()
    try:
        return _load(settings, sizes, state, folder)
    except (CheckpointingException, OSError, pickle.UnpicklingError, KeyError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"cannot load the checkpoint {folder} ({first_line}); take an earlier one by writing "
            f"its iteration into {folder.parent / LATEST_FILE}"
        ) from error


def _load(settings: Settings, sizes: Sizes, state: TrainState, folder: Path) -> Progress:
    wanted = settings.checkpoint
    common = dist_checkpointing.load_common_state_dict(str(folder))
    saved_sizes: dict[str, object] = common["sizes"]
    _check_model(saved_sizes, sizes, folder)
    with_optimizer = wanted.load_optim and not wanted.finetune
    with_rng = wanted.load_rng and not wanted.finetune
    if with_optimizer:
        _check_layout(settings, sizes, common, folder)
        _prepare_optimizer(state.optimizer)
    if with_rng and saved_sizes["world_size"] != sizes.world_size:
        _warn("the checkpoint has random states of another number of ranks: seeded anew")
        with_rng = False
    template = _sharded_state(state, is_loading=True, with_optimizer=with_optimizer)
    if with_rng:
        template["rng_state"] = _rng_object(sizes, _rng_state())
    loaded = dist_checkpointing.load(template, str(folder))
    for name, chunk in _named_chunks(state):
        chunk.load_state_dict(loaded[name])
    if with_optimizer:
        with torch.no_grad():
            state.optimizer.load_state_dict(loaded["optimizer"])
        _restore_step(state.optimizer)
        state.schedule.load_state_dict(loaded["schedule"])
    else:
        state.optimizer.reload_model_params()
    if with_rng:
        _set_rng_state(loaded["rng_state"])
    if wanted.finetune:
        return Progress()
    _warn_about_order(settings, sizes, common)
    return Progress(**loaded["progress"])


def _sharded_state(
    state: TrainState, *, is_loading: bool, with_optimizer: bool = True
) -> dict[str, object]:
    """Model, optimizer and schedule, in the form that Megatron-Core saves and loads."""
    contents: dict[str, object] = {
        name: chunk.sharded_state_dict(metadata=_METADATA) for name, chunk in _named_chunks(state)
    }
    if with_optimizer:
        models = dict(contents)
        contents["optimizer"] = state.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=_METADATA
        )
        contents["schedule"] = state.schedule.state_dict()
    return contents


def _named_chunks(state: TrainState) -> list[tuple[str, MegatronModule]]:
    chunks = unwrap_model(state.chunks)
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def _single_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron-Core's."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.optimizer is not None:
            yield cast(torch.optim.Optimizer, part.optimizer)


def _prepare_optimizer(optimizer: MegatronOptimizer) -> None:
    """Make empty Adam states: Megatron-Core loads in place and reads the step before that."""
    for single in _single_optimizers(optimizer):
        if not isinstance(single, torch.optim.Adam):  # AdamW is one as well
            continue
        for group in single.param_groups:
            for parameter in group["params"]:
                single.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


def _restore_step(optimizer: MegatronOptimizer) -> None:
    """Set Adam's step again: the distributed optimizer loads it and then overwrites it by zero."""
    for single in _single_optimizers(optimizer):
        for group in single.param_groups:
            if group.get("step") is None:
                continue
            for parameter in group["params"]:
                single.state[parameter]["step"] = torch.tensor(
                    float(group["step"]), dtype=torch.float32
                )


def _rng_state() -> dict[str, object]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, object]) -> None:
    random.setstate(cast(tuple[object, ...], state["python"]))
    np.random.set_state(cast(dict[str, object], state["numpy"]))
    torch.cuda.set_rng_state(cast(torch.Tensor, state["device"]))
    torch.set_rng_state(cast(torch.Tensor, state["torch"]))
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _rng_object(sizes: Sizes, state: dict[str, object]) -> ShardedObject:
    """Every rank's own states: expert parallelism makes them differ even between replicas."""
    return ShardedObject("rng_state", state, (sizes.world_size,), (dist.get_rank(),))


def _flags(settings: Settings) -> dict[str, object]:
    """Flags that decide how optimizer state and data are cut, to compare when loading."""
    return {
        "use_distributed_optimizer": settings.parallel.use_distributed_optimizer,
        "overlap_grad_reduce": settings.parallel.overlap_grad_reduce,
        "ddp_bucket_size": settings.parallel.ddp_bucket_size,
        "optimizer": settings.optimizer.optimizer,
        "seed": settings.batch.seed,
    }


def _check_model(saved: dict[str, object], sizes: Sizes, folder: Path) -> None:
    for name in _MODEL_SIZES:
        here = getattr(sizes, name)
        if saved[name] != here:
            raise InputError(
                f"the checkpoint {folder} has {name.replace('_', ' ')} {saved[name]} and this run "
                f"{here}; give the sizes of the checkpoint"
            )


def _check_layout(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]], folder: Path
) -> None:
    """Optimizer state can be loaded only in the form it was saved in."""
    flags, saved = _flags(settings), common["flags"]
    names = ["use_distributed_optimizer", "optimizer"]
    pairs = [(name, saved[name], flags[name]) for name in names]
    if settings.parallel.use_distributed_optimizer and saved["use_distributed_optimizer"]:
        buckets = ("overlap_grad_reduce", "ddp_bucket_size")
        pairs += [(name, saved[name], flags[name]) for name in buckets]
        layout = common["sizes"]
        pairs += [(name, layout[name], getattr(sizes, name)) for name in _LAYOUT_SIZES]
    for name, there, here in pairs:
        if there != here:
            raise InputError(
                f"the optimizer state of {folder} was saved with {name.replace('_', ' ')} {there} "
                f"and this run has {here}; use the same, or --no-load-optim to load weights only"
            )


def _warn_about_order(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]]
) -> None:
    pairs = [(name, common["sizes"][name], getattr(sizes, name)) for name in _ORDER_SIZES]
    pairs.append(("seed", common["flags"]["seed"], settings.batch.seed))
    for name, there, here in pairs:
        if there != here:
            _warn(
                f"{name.replace('_', ' ')} was {there} in the checkpoint and is {here} now: the "
                "order of samples or the learning rate differs from an uninterrupted run"
            )


def _checkpoint_folder(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def _latest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a folder; None when there is none yet."""
    latest = folder / LATEST_FILE
    try:
        iteration = int(latest.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read an iteration from {latest} ({error}); mend it") from error
    found = _checkpoint_folder(folder, iteration)
    if not found.is_dir():
        raise InputError(f"{latest} names {found.name}, which is not there; mend it")
    return found


def _make_empty(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot write a checkpoint to {folder} ({error})") from error


def _publish(partial: Path, final: Path, iteration: int) -> None:
    """Give the complete checkpoint its name, then point to it."""
    if final.exists():
        replaced = final.with_name(final.name + ".replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    latest = final.parent / LATEST_FILE
    temporary = latest.with_name(latest.name + ".partial")
    with temporary.open("w") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(latest)


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)
