"""Single tensors out of a checkpoint, one layer at a time, whatever layout it was saved in.

In a checkpoint all layers are one tensor with the layers on its first axis, and all experts are on
its second. Reading one layer of it costs that layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megascan.errors import InputError
from training.checkpoint import DAMAGES, reason_of

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
