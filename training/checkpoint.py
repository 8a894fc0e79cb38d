"""Checkpoints in torch's distributed format, through Megatron-Core.

Each checkpoint has a folder like ``iter_0000010``, and ``latest_checkpointed_iteration.txt`` lies
next to these folders, as in Megatron-LM. A checkpoint is written under another name, renamed when
every rank is done, and named in the text file last: whatever happens in between, the file names a
complete checkpoint.

A run that is resumed with the same flags on as many ranks continues exactly: weights, optimizer,
learning-rate schedule, loss scale, random states and the place in the data are restored.

`checkpoint_folder` reads and writes what a checkpoint says of its model and tokenizer; here that is
compared with the run that loads it.

**Tensor by tensor.** In a checkpoint a parameter of all layers is one tensor, with layers on the
first axis and experts on the second. `CheckpointTensors` reads one layer at the cost of one layer.
Megatron-Core's own writer needs all weights in memory before it begins, and writes them from forked
processes. `write_weights` writes the same format by torch's own writer: each tensor is made,
written and dropped, so that a model may be larger than the memory.
"""

from __future__ import annotations

import pickle
import queue
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.utils import unwrap_model
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

from megascan.errors import ConfigError, InputError, MegaScanError, OutputError
from training.arguments import Settings, Sizes
from training.checkpoint_folder import (
    LATEST_FILE,
    SavedSettings,
    checkpoint_folder,
    differences,
    latest_checkpoint,
    make_empty,
    publish,
    read_saved,
    saved_settings,
    write_saved,
)
from training.loop import Progress, TrainState

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.transformer import MegatronModule

__all__ = ["load_checkpoint", "load_weights", "save_checkpoint", "saved_settings"]


# torch gathers errors of all ranks into a CheckpointException, which is no Exception; a file that
# is cut off or overwritten raises any of the others.
DAMAGES: tuple[type[BaseException], ...] = (
    CheckpointException,
    CheckpointingException,
    pickle.UnpicklingError,
    EOFError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def reason_of(error: BaseException) -> str:
    """Return the reason of an error in one line; of gathered errors, the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        _, (error, _) = min(error.failures.items())
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _single_optimizers(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield torch's optimizers inside Megatron-Core's."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.optimizer is not None:
            yield cast(torch.optim.Optimizer, part.optimizer)


def prepare_optimizer(optimizer: MegatronOptimizer) -> None:
    """Make empty Adam states, because Megatron-Core reads `step` and then loads in place."""
    for single in _single_optimizers(optimizer):
        if not isinstance(single, torch.optim.Adam):  # AdamW is a subclass
            continue
        for group in single.param_groups:
            for parameter in group["params"]:
                single.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }


def restore_step(optimizer: MegatronOptimizer) -> None:
    """Set Adam's step, which the distributed optimizer loads and then overwrites by zero."""
    for single in _single_optimizers(optimizer):
        for group in single.param_groups:
            if group.get("step") is None:
                continue
            for parameter in group["params"]:
                single.state[parameter]["step"] = torch.tensor(
                    float(group["step"]), dtype=torch.float32
                )


def _states() -> dict[str, object]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_random_state(state: dict[str, object]) -> None:
    """Set the generators of this rank to the states in a checkpoint."""
    random.setstate(cast(tuple[object, ...], state["python"]))
    np.random.set_state(cast(dict[str, object], state["numpy"]))
    torch.cuda.set_rng_state(cast(torch.Tensor, state["device"]))
    torch.set_rng_state(cast(torch.Tensor, state["torch"]))
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def sharded_random_state(sizes: Sizes) -> ShardedObject:
    """Return this rank's random states as one part of all ranks' states.

    Every rank saves its own, because expert parallelism makes them differ between replicas.
    """
    return ShardedObject("rng_state", _states(), (sizes.world_size,), (dist.get_rank(),))


def content_metadata() -> dict[str, object]:
    """Return how Megatron-Core is to put states into checkpoints.

    Return a new dict each time: Megatron-Core writes the job's process group into it, which means
    nothing to the next job of this Python process. The other sharding of the distributed optimizer
    that 0.16 can write loses data when a gradient buffer has several buckets with padding between
    them.
    """
    return {"distrib_optim_sharding_type": "dp_reshardable"}


def sharded_state(
    state: TrainState, *, is_loading: bool, with_optimizer: bool = True
) -> dict[str, object]:
    """Return model, optimizer and schedule in the form that Megatron-Core saves and loads."""
    metadata = content_metadata()
    contents: dict[str, object] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in named_chunks(state)
    }
    if with_optimizer:
        models = dict(contents)
        contents["optimizer"] = state.optimizer.sharded_state_dict(
            models, is_loading=is_loading, metadata=metadata
        )
        contents["schedule"] = state.schedule.state_dict()
    return contents


def named_chunks(state: TrainState) -> list[tuple[str, MegatronModule]]:
    """Return the model chunks of this rank under their names in the checkpoint."""
    chunks = unwrap_model(state.chunks)
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]


_MODEL_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "max_position_embeddings",
)  # fmt: skip
_MODEL_FLAGS = (
    "normalization", "position_embedding_type", "qk_layernorm", "swiglu", "add_bias_linear",
    "add_qkv_bias", "untie_embeddings_and_output_weights",
)  # fmt: skip
_LAYOUT_SIZES = ("tensor_size", "pipeline_size", "virtual_pipeline_size", "expert_size")
_ORDER_SIZES = ("train_iters", "global_batch_size")


def flags_of(settings: Settings) -> dict[str, object]:
    """Return the settings that decide which weights a model has and how states are cut."""
    return {
        **{name: getattr(settings.model, name) for name in _MODEL_FLAGS},
        "num_experts": settings.moe.num_experts,
        "use_distributed_optimizer": settings.parallel.use_distributed_optimizer,
        "overlap_grad_reduce": settings.parallel.overlap_grad_reduce,
        "ddp_bucket_size": settings.parallel.ddp_bucket_size,
        "optimizer": settings.optimizer.optimizer,
        "seed": settings.batch.seed,
    }


# What fine-tuning may change on purpose, for example to read longer texts.
_CHANGED_BY_FINETUNING = frozenset(
    {
        "rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling",
        "rope_scaling_factor", "norm_epsilon",
    }
)  # fmt: skip


def check_model(
    settings: Settings, folder: Path, common: dict[str, dict[str, object]], here: SavedSettings
) -> None:
    """Raise InputError for a checkpoint of another model than this run's."""
    saved = read_saved(folder)
    there: Mapping[str, object]
    if saved is not None:
        there = saved.model
    else:  # older checkpoints name only what decides the shapes of weights, or less
        names = {"sizes": _MODEL_SIZES, "flags": (*_MODEL_FLAGS, "num_experts")}
        there = {
            name: common[kind][name]
            for kind, wanted in names.items()
            for name in wanted
            if name in common[kind]
        }
    for name, value, own in differences(there, here.model):
        text = f"the checkpoint {folder} has {name.replace('_', ' ')} {value} and this run {own}"
        if settings.checkpoint.finetune and name in _CHANGED_BY_FINETUNING:
            warn(f"{text}: it is fine-tuned to that")
            continue
        way = "" if saved is None else ", or --use-checkpoint-args"
        raise InputError(f"{text}; give the model's flags as they were when it was saved{way}")


def check_layout(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]], folder: Path
) -> None:
    """Raise InputError if the optimizer state was saved in another form than this run uses."""
    flags, saved = flags_of(settings), common["flags"]
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


def warn_about_order(
    settings: Settings, sizes: Sizes, common: dict[str, dict[str, object]]
) -> None:
    """Warn on rank 0 of differences that keep a resumed run from continuing exactly."""
    pairs = [(name, common["sizes"][name], getattr(sizes, name)) for name in _ORDER_SIZES]
    pairs.append(("seed", common["flags"]["seed"], settings.batch.seed))
    for name, there, here in pairs:
        if there != here:
            warn(
                f"{name.replace('_', ' ')} was {there} in the checkpoint and is {here} now: the "
                "order of samples or the learning rate differs from an uninterrupted run"
            )


def warn(text: str) -> None:
    """Print a warning on rank 0."""
    if dist.get_rank() == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def save_checkpoint(
    settings: Settings,
    sizes: Sizes,
    state: TrainState,
    progress: Progress,
    described: SavedSettings,
) -> None:
    """Write a checkpoint of `progress` into ``--save``; every rank calls this.

    `described` is what the checkpoint says of itself. Raises OutputError, at least on rank 0, when
    the folder cannot be written.
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
        _save(contents, partial)
        dist.barrier()
        if dist.get_rank() == 0:
            write_saved(replace(described, folder=partial))
            publish(partial, final, progress.iteration)
    except DAMAGES as error:
        raise OutputError(
            f"cannot write the checkpoint {final} ({reason_of(error)}); make room, or give --save "
            "another folder"
        ) from error
    dist.barrier()


def _save(contents: dict[str, object], folder: Path) -> None:
    """Write what all ranks hold into a folder, and wait until it is written.

    Megatron-Core collects a save's results by a queue in a separate process, which each rank starts
    at its first save: an interpreter with torch, which takes seconds to start and stays. Only saves
    in the background need it; here a queue of this process takes its place.
    """
    if hasattr(filesystem_async, "_results_queue") and filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(contents, str(folder), content_metadata=content_metadata())


def load_checkpoint(
    settings: Settings, sizes: Sizes, state: TrainState, described: SavedSettings
) -> Progress:
    """Restore `state` from ``--load`` and return how far its run had come.

    Where ``--load`` has no checkpoint the run starts at the beginning, with a warning; with
    ``--exit-on-missing-checkpoint`` raise InputError. Also raises InputError when the checkpoint is
    damaged or belongs to a model or layout that does not fit.
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
        return _load(settings, sizes, state, folder, described)
    except DAMAGES as error:
        raise InputError(
            f"cannot load the checkpoint {folder} ({reason_of(error)}); take an earlier one by "
            f"writing its iteration into {folder.parent / LATEST_FILE}"
        ) from error


def load_weights(folder: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Fill this rank's chunks with the weights of one checkpoint, whatever layout it was saved in.

    Raises InputError when the checkpoint is damaged or holds another model.
    """
    bare = unwrap_model(list(chunks))
    template = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(bare)}
    try:
        loaded = dist_checkpointing.load(template, str(folder))
        for index, chunk in enumerate(bare):
            chunk.load_state_dict(loaded[f"model{index}"])
    except DAMAGES as error:
        raise InputError(
            f"cannot load the checkpoint {folder} ({reason_of(error)}); take another one"
        ) from error


def _load(
    settings: Settings, sizes: Sizes, state: TrainState, folder: Path, described: SavedSettings
) -> Progress:
    wanted = settings.checkpoint
    common = dist_checkpointing.load_common_state_dict(str(folder))
    check_model(settings, folder, common, described)
    saved = read_saved(folder)
    weights_only = wanted.finetune or (saved is not None and not saved.has_training_state)
    with_optimizer = wanted.load_optim and not weights_only
    with_rng = wanted.load_rng and not weights_only
    if with_optimizer:
        check_layout(settings, sizes, common, folder)
        prepare_optimizer(state.optimizer)
    if with_rng and common["sizes"]["world_size"] != sizes.world_size:
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
    if weights_only:
        return Progress()
    warn_about_order(settings, sizes, common)
    return Progress(**loaded["progress"])


# AttributeError comes where something else than a checkpoint's metadata is unpickled.
_DAMAGES: tuple[type[BaseException], ...] = (*DAMAGES, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A tensor to read: its key in the checkpoint, and place (), (layer,) or (layer, expert)."""

    key: str
    place: tuple[int, ...] = ()


class CheckpointTensors:
    """Reads the tensors of one checkpoint; InputError for damage and for a missing tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except _DAMAGES as error:
            raise self._damage(error) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def shape(self, wanted: Wanted) -> tuple[int, ...]:
        """Return the shape of a wanted tensor."""
        return tuple(self._stored(wanted).size)[len(wanted.place) :]

    def read(self, wanted: Sequence[Wanted], dtype: torch.dtype) -> list[torch.Tensor]:
        """Read several tensors at once, in the number format `dtype`."""
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
    """Tells torch's reader where each piece goes: its name is the index of the target tensor."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a target tensor that a piece fills."""
        target = self._targets[int(read_item.dest_index.fqn)]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the piece was read into its place."""


Fillings = Mapping[torch.Tensor, Callable[[], None]]
"""Callables that fill a parameter in place, by parameter."""


def write_weights(folder: Path, model: torch.nn.Module, fillings: Fillings) -> None:
    """Write only the weights of a model on one rank into a checkpoint's folder.

    Each parameter is filled right before it is written and is empty afterwards. Raises OutputError
    when the folder cannot be written, and what filling raises.
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
    """Return gate and up projection as one tensor to save, where this rank has all of both.

    Megatron-Core saves them as two, for tensor parallelism. In the checkpoint's tensor the two are
    neighbours when no other rank has a part of them.
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
    """Makes `dist_checkpointing` write tensors one by one, on a job of one rank."""

    can_handle_sharded_objects = True

    def __init__(self, fillings: Fillings) -> None:
        super().__init__("torch_dist", 1)
        self._fillings = fillings

    def save(self, sharded_state_dict: dict[str, object], checkpoint_dir: Path) -> None:
        """Write all tensors and objects into a folder."""
        parts = [
            part for part in nested_values(sharded_state_dict) if is_main_replica(part.replica_id)
        ]
        save(
            {},
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=_Planner(parts, self._fillings),
        )


class _Planner(DefaultSavePlanner):
    """Tells torch's writer what to write, and makes each tensor when its turn comes."""

    def __init__(self, parts: Sequence[ShardedTensor | ShardedObject], fillings: Fillings) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {_index(part): part for part in parts}
        self._fillings = fillings
        self._filled: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        """Return the plan of all tensors and objects, with their places in the checkpoint."""
        self.plan = SavePlan([_item(index, part) for index, part in self._parts.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        """Make and return what is written next; drop what was written before."""
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
    """Return the shape of a rank's part in the checkpoint, where layers and experts are axes."""
    return torch.Size([*(1 for _ in range(part.prepend_axis_num)), *part.local_shape])
