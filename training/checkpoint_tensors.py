"""A checkpoint tensor by tensor: reading one layer of any layout, writing a model as it is filled.

In a checkpoint all layers are one tensor with the layers on its first axis, and all experts are on
its second. Reading one layer of it costs that layer.

Megatron-Core's own way of writing wants all weights in memory before it begins, and writes them
from processes that it forks. `write_weights` writes the same format by torch's own writer: a tensor
is made, is written, and is let go of, so that a model may be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from megascan.errors import InputError, MegaScanError, OutputError
from training.checkpoint import DAMAGES, content_metadata, reason_of

if TYPE_CHECKING:
    from megatron.core.transformer import MegatronModule


# The last where what is unpickled is something else.
_DAMAGES: tuple[type[BaseException], ...] = (*DAMAGES, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A tensor of a checkpoint at a place: (), or (layer,), or (layer, expert)."""

    key: str
    place: tuple[int, ...] = ()


class CheckpointTensors:
    """The tensors of one checkpoint; raises InputError for damage and for what it does not hold."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except _DAMAGES as error:
            raise self._damage(error) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shape(self, wanted: Wanted) -> tuple[int, ...]:
        """Return the shape of what is wanted."""
        return tuple(self._stored(wanted).size)[len(wanted.place) :]

    def read(self, wanted: Sequence[Wanted], dtype: torch.dtype) -> list[torch.Tensor]:
        """Read some tensors in a number format, together."""
        targets = [torch.empty((1,) * len(w.place) + self.shape(w), dtype=dtype) for w in wanted]
        items = [
            item
            for index, one in enumerate(wanted)
            for item in self._items(one, str(index), targets[index])
        ]
        planner = _IntoTensors(targets)
        try:
            plan = self._reader.prepare_local_plan(LoadPlan(items))
            self._reader.read_data(plan, planner).wait()
        except DAMAGES as error:
            raise self._damage(error) from error
        return [
            target.reshape(self.shape(one)) for one, target in zip(wanted, targets, strict=True)
        ]

    def _items(self, wanted: Wanted, name: str, target: torch.Tensor) -> list[ReadItem]:
        stored = self._stored(wanted)
        offsets = torch.Size([*wanted.place, *(0 for _ in self.shape(wanted))])
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=target.shape)
        items = create_read_items_for_chunk_list(wanted.key, stored, [chunk])
        return [replace(item, dest_index=MetadataIndex(fqn=name)) for item in items]

    def _stored(self, wanted: Wanted) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata.get(wanted.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise InputError(
                f"the checkpoint {self._folder} has no {wanted.key}, which its settings.json asks "
                "for; take another one"
            )
        return stored

    def _damage(self, error: BaseException) -> InputError:
        return InputError(
            f"cannot read the checkpoint {self._folder} ({reason_of(error)}); take another one"
        )


class _IntoTensors(DefaultLoadPlanner):
    """Tells torch's reader where each piece goes: into the tensor whose number it is named by."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a target that a piece fills."""
        target = self._targets[int(read_item.dest_index.fqn)]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: it is in its place."""


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
