"""Writing the weights of a model that is filled as it is written, one tensor at a time.

Megatron-Core's own way wants all weights in memory before it begins, and writes them from processes
that it forks. Here this process writes the same format by torch's own writer: a tensor is made, is
written, and is let go of, so that a model may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megascan.errors import MegaScanError, OutputError
from training.checkpoint import DAMAGES, content_metadata, reason_of

if TYPE_CHECKING:
    from megatron.core.transformer import MegatronModule

Fillings = Mapping[torch.Tensor, Callable[[], None]]
"""What fills each parameter in place."""


def write_weights(folder: Path, model: torch.nn.Module, fillings: Fillings) -> None:
    """Write the weights of a model on one rank into the folder of one checkpoint; nothing else.

    Each parameter is filled when it is its turn and is empty afterwards. Raises OutputError when
    the folder cannot be written, and what filling raises.
    """
    contents = {"model0": cast("MegatronModule", model).sharded_state_dict()}
    dict_list_map_inplace(_leave_whole, contents)
    try:
        dist_checkpointing.save(
            contents,
            str(folder),
            sharded_strategy=_OneByOne(fillings),
            content_metadata=content_metadata(),
        )
    except DAMAGES as error:
        if isinstance(error, CheckpointException):
            for own, _ in error.failures.values():
                if isinstance(own, MegaScanError):
                    raise own from error
        raise OutputError(
            f"cannot write the checkpoint {folder} ({reason_of(error)}); make room"
        ) from error


def _leave_whole(value: object) -> object:
    """Keep gate and up projection of a matrix as one tensor, where this rank has all of both.

    Megatron-Core saves them as two, for the sake of tensor parallelism. The two are neighbours in
    the checkpoint's tensor when nobody else has a part of them.
    """
    if not isinstance(value, ShardedTensorFactory):
        return value
    gate, up = value.build()
    axis = gate.prepend_axis_num
    if gate.key != up.key or gate.axis_fragmentations[axis] != 2:
        return value
    fragments = list(gate.axis_fragmentations)
    fragments[axis] = 1
    return replace(
        gate,
        data=value.data,
        local_shape=tuple(value.data.shape),
        axis_fragmentations=tuple(fragments),
    )


class _OneByOne(SaveShardedStrategy):  # type: ignore[misc]
    """How `dist_checkpointing` has the tensors of a rank written that is alone."""

    can_handle_sharded_objects = True

    def __init__(self, fillings: Fillings) -> None:
        super().__init__("torch_dist", 1)
        self._fillings = fillings

    def save(self, sharded_state_dict: dict[str, object], checkpoint_dir: Path) -> None:
        """Write all tensors and objects."""
        parts = [
            part for part in nested_values(sharded_state_dict) if is_main_replica(part.replica_id)
        ]
        save(
            {},
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=_Planner(parts, self._fillings),
        )


class _Planner(DefaultSavePlanner):
    """Tells torch's writer what there is to be written, and makes it when it is its turn."""

    def __init__(self, parts: Sequence[ShardedTensor | ShardedObject], fillings: Fillings) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {_index(part): part for part in parts}
        self._fillings = fillings
        self._filled: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Return all tensors and objects with their places."""
        self.plan = SavePlan([_item(index, part) for index, part in self._parts.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        """Make what is written next; what was written last is let go of."""
        part = self._parts[index]
        if isinstance(part, ShardedObject):
            return [part.data]
        if self._filled is not None:
            self._filled.data = torch.empty(0, dtype=self._filled.dtype)
        fill = self._fillings.get(part.data)
        if fill is not None:
            fill()
            self._filled = part.data
        return part.data.detach().view(_shape(part))


def _index(part: ShardedTensor | ShardedObject) -> MetadataIndex:
    if isinstance(part, ShardedObject):
        return MetadataIndex(fqn=part.unique_key)
    return MetadataIndex(fqn=part.key, offset=torch.Size(part.global_offset))


def _item(index: MetadataIndex, part: ShardedTensor | ShardedObject) -> WriteItem:
    if isinstance(part, ShardedObject):
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(offsets=cast(torch.Size, index.offset), sizes=_shape(part))
    described = TensorWriteData(
        chunk=chunk,
        properties=TensorProperties.create_from_tensor(part.data.detach()),
        size=torch.Size(part.global_shape),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=described)


def _shape(part: ShardedTensor) -> torch.Size:
    """Return the shape of a tensor in the checkpoint, where layers and experts are axes."""
    return torch.Size([*(1 for _ in range(part.prepend_axis_num)), *part.local_shape])
