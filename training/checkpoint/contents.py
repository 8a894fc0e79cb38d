"""What a checkpoint holds, in the form that Megatron-Core saves and loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.utils import unwrap_model

from training.loop import TrainState

if TYPE_CHECKING:
    from megatron.core.transformer import MegatronModule

# The other sharding of the distributed optimizer that 0.16 can still write loses data when a
# gradient buffer has several buckets with padding between them.
METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def sharded_state(
    state: TrainState, *, is_loading: bool, with_optimizer: bool = True
) -> dict[str, object]:
    """Model, optimizer and schedule, in the form that Megatron-Core saves and loads."""
    contents: dict[str, object] = {
        name: chunk.sharded_state_dict(metadata=METADATA) for name, chunk in named_chunks(state)
    }
    if with_optimizer:
        models = dict(contents)
        contents["optimizer"] = state.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=METADATA
        )
        contents["schedule"] = state.schedule.state_dict()
    return contents


def named_chunks(state: TrainState) -> list[tuple[str, MegatronModule]]:
    """The model chunks of this rank under their names in the checkpoint."""
    chunks = unwrap_model(state.chunks)
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]
