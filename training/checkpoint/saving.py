"""Writing a checkpoint."""

from __future__ import annotations

from dataclasses import asdict

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megascan.errors import ConfigError, OutputError
from training.arguments import Settings, Sizes
from training.checkpoint.contents import METADATA, sharded_state
from training.checkpoint.damage import DAMAGES, reason_of
from training.checkpoint.fit import flags_of
from training.checkpoint.folder import checkpoint_folder, make_empty, publish
from training.checkpoint.random_state import sharded_random_state
from training.loop import Progress, TrainState


def save_checkpoint(
    settings: Settings, sizes: Sizes, state: TrainState, progress: Progress
) -> None:
    """Write a checkpoint of `progress` into ``--save``; every rank calls it.

    Raises OutputError, at least on rank 0, when the folder cannot be written.
    """
    folder = settings.checkpoint.save
    if folder is None:
        raise ConfigError("there is no folder to save to; give --save")
    final = checkpoint_folder(folder, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    if dist.get_rank() == 0:
        make_empty(partial)
    dist.barrier()
    contents = sharded_state(state, is_loading=False)
    contents |= {
        "rng_state": sharded_random_state(sizes),
        "progress": asdict(progress),
        "sizes": asdict(sizes),
        "flags": flags_of(settings),
    }
    try:
        dist_checkpointing.save(contents, str(partial), content_metadata=METADATA)
        dist.barrier()
        if dist.get_rank() == 0:
            publish(partial, final, progress.iteration)
    except DAMAGES as error:
        raise OutputError(
            f"cannot write the checkpoint {final} ({reason_of(error)}); make room, or give --save "
            "another folder"
        ) from error
    dist.barrier()
