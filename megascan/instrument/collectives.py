"""Record collectives of torch.distributed: group, running number, bytes; also coalesced and async.

Process groups have ids (`Groups`). megatron.core keeps its groups as module variables of
`parallel_state`; two communicators over the same ranks (data parallel with and without context
parallel, say) have different axes. A device mesh must name its dimensions as torch's own examples
and torchtitan do; several dimensions of data parallelism (replicated and sharded) are one axis.

The span of a synchronous collective brackets its execution; it stands on the overlapped track if
the collective runs on a separate stream, as FSDP's do. An asynchronous collective is recorded from
its launch to its completion on the overlapped track, and its caller gets a stand-in for the work,
which behaves as the work does.

DistributedDataParallel reduces its buckets in C++, where nothing can be seen. If it is given a
communication hook, it leaves them to Python. The hook here does what the reducer does by itself:
the same division, then the same all-reduce over the same group, asynchronous as before. NCCL does
the division on the way if that changes no bit.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from megascan.errors import ConfigError
from megascan.instrument.place import Call, Function, Position, around
from megascan.schema import Kind
from megascan.topology import DEFAULT_ORDER, Coordinates, Layout
from megascan.tracer import Arguments, AsyncWork, Mark, RecordingTracer, Span
from megascan.vocabulary import AXIS_OF_VARIABLE, MESH_AXES, group_id, is_data_parallel

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel


def axes_of(mesh: DeviceMesh) -> list[str]:
    """Return each mesh dimension's axis, outermost first. Raises ConfigError for unknown names."""
    names = mesh.mesh_dim_names
    unknown = [name for name in names or () if name not in MESH_AXES]
    if not names or unknown:
        raise ConfigError(
            f"the device mesh has dimensions {list(names or ())}, expected names out of "
            f"{', '.join(MESH_AXES)}; give init_device_mesh those as mesh_dim_names"
        )
    return [MESH_AXES[name] for name in names]


def topology_of(mesh: DeviceMesh, rank: int) -> tuple[Layout, Coordinates]:
    """Return the layout of a mesh over all ranks, and the place of a rank in it.

    Raises ConfigError if the mesh does not hold every rank in the order of a grid.
    """
    axes, sizes = axes_of(mesh), mesh.mesh.shape
    merged: dict[str, int] = {}
    for axis, size in zip(axes, sizes, strict=True):
        merged[axis] = merged.get(axis, 1) * size
    innermost_first = list(dict.fromkeys(reversed(axes)))
    rest = [axis for axis in DEFAULT_ORDER.split("-") if axis not in innermost_first]
    layout = Layout(**merged, order="-".join([*innermost_first, *rest]))
    members = mesh.mesh.flatten().tolist()
    if members != list(range(layout.world_size)) or _is_split(axes):
        raise ConfigError(
            f"the device mesh holds ranks {members} with dimensions {axes}, expected every rank of "
            "the job in ascending order and dimensions of one kind side by side"
        )
    return layout, layout.coordinates(rank)


def _is_split(axes: list[str]) -> bool:
    """Return whether an axis stands in two places with another axis between them."""
    runs = [axis for number, axis in enumerate(axes) if not number or axes[number - 1] != axis]
    return len(runs) != len(set(runs))


class Groups:
    """Names and members of the process groups this rank belongs to.

    Groups are read when tracing starts; a group made later is named when it is first used. A device
    mesh names the groups of its dimensions. `all_data_parallel` says that data parallelism is the
    only axis.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, all_data_parallel: bool = False) -> None:
        self._all_data_parallel = all_data_parallel
        self._names: dict[ProcessGroup, str] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._backends: dict[str, str] = {}
        self._read_registry()
        if mesh is not None:
            self._read_mesh(mesh)
        self._read_others()

    def _read_mesh(self, mesh: DeviceMesh) -> None:
        """Name the groups of the mesh; several dimensions of an axis add a name: `dp-dp_shard`."""
        names, axes = mesh.mesh_dim_names or (), axes_of(mesh)
        for name, axis in zip(names, axes, strict=True):
            self._enter(mesh.get_group(name), axis if axes.count(axis) == 1 else f"{axis}-{name}")

    def _read_registry(self) -> None:
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is None:  # the trainer does not use megatron.core
            return
        from torch.distributed import distributed_c10d

        alive = distributed_c10d._world.pg_names  # megatron.core keeps destroyed groups
        for variable, axis in AXIS_OF_VARIABLE.items():
            group = getattr(parallel_state, variable, None)
            if group is not None and not isinstance(group, list) and group in alive:
                self._enter(group, axis)

    def _read_others(self) -> None:
        """Name the world, and all groups that the trainer itself has made."""
        from torch.distributed import distributed_c10d, group

        if group.WORLD is not None:
            self._enter(group.WORLD, "dp" if self._all_data_parallel else "world")
        for other in list(distributed_c10d._world.pg_names):
            self.name(other)

    def _enter(self, group: ProcessGroup, axis: str) -> str:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        name = group_id(axis, ranks)
        if group not in self._names:
            self._names[group] = name
            self._members.setdefault(name, ranks)
            self._backends.setdefault(name, str(dist.get_backend(group)))
        return self._names[group]

    def name(self, group: ProcessGroup | None) -> str:
        """Return the id of a group; None is the world."""
        import torch.distributed as dist

        if group is None:
            group = dist.group.WORLD
        known = self._names.get(group)  # type: ignore[arg-type]
        if known is not None:
            return known
        assert group is not None  # a collective needs an initialised world
        description = getattr(group, "group_desc", "") or "group"
        axis = f"{description}-{group.group_name}".lower()
        # groups of some ranks only may have any purpose, experts for example
        is_whole = dist.get_world_size(group) == dist.get_world_size()
        return self._enter(group, f"dp-{axis}" if self._all_data_parallel and is_whole else axis)

    def follow(
        self,
        tracer: RecordingTracer,
        work: AsyncWork,
        name: str,
        begin: Mark,
        arguments: Arguments,
        *,
        lane: str,
        keep: object,
    ) -> PendingWork:
        """Record asynchronous communication until it is done; return what its caller gets as work.

        `keep` are the tensors of the communication.
        """
        kind = Kind.P2P if "peer" in arguments else Kind.COLLECTIVE
        backend = self._backends[str(arguments["group"])]
        span, watched = tracer.add_pending(
            work, kind, name, begin, arguments=arguments, lane=lane, backend=backend
        )
        return PendingWork(work, tracer, span, watched, keep)

    def num_members(self, name: str) -> int:
        """Return the size of a group."""
        return len(self._members[name])

    def is_data_parallel(self, name: str) -> bool:
        """Return whether gradients and parameters travel over a group."""
        return self._all_data_parallel or is_data_parallel(name)

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Return ordered global ranks by group id."""
        return dict(self._members)


ALL_TO_ALL = "all_to_all"
_NOWHERE = sys.maxsize
"""Position of a parameter that the function does not have."""


@dataclass(frozen=True)
class Operation:
    """A function of torch.distributed: our name for it, and the argument that is its payload.

    `result` is the argument that is complete afterwards, if that is one tensor. `coalesces` says
    that the function, inside a coalescing manager, only notes the call, to be launched later.
    """

    function: str
    name: str
    payload: str | None
    result: str | None = None
    coalesces: bool = False


OPERATIONS = (
    Operation("all_reduce", "all_reduce", "tensor", "tensor", True),
    Operation("all_gather_into_tensor", "all_gather", "input_tensor", "output_tensor", True),
    Operation("all_gather_single", "all_gather", "input_tensor", "output_tensor", True),
    Operation("_all_gather_base", "all_gather", "input_tensor", "output_tensor", True),
    Operation("reduce_scatter_tensor", "reduce_scatter", "input", "output", True),
    Operation("reduce_scatter_single", "reduce_scatter", "input", "output", True),
    Operation("_reduce_scatter_base", "reduce_scatter", "input", "output", True),
    Operation("all_gather", "all_gather", "tensor"),
    Operation("reduce_scatter", "reduce_scatter", "input_list"),
    Operation("all_to_all_single", ALL_TO_ALL, "input", "output"),
    Operation("all_to_all", ALL_TO_ALL, "input_tensor_list"),
    Operation("broadcast", "broadcast", "tensor", "tensor"),
    Operation("reduce", "reduce", "tensor"),
    Operation("gather", "gather", "tensor"),
    Operation("scatter", "scatter", "tensor"),
    Operation("barrier", "barrier", None),
    Operation("all_gather_object", "all_gather_object", None),
    Operation("broadcast_object_list", "broadcast_object_list", None),
)


def argument_reader(function: Function, name: str | None) -> Callable[[Call], object]:
    """Return a function that reads one argument of a call, by name or position, None if not given.

    Binding a call to the whole signature would take ten times as long.
    """
    position = _position(function, name)

    def read(call: Call) -> object:
        if name in call.named:
            return call.named[name]
        return call.positional[position] if position < len(call.positional) else None

    return read


def argument_writer(function: Function, name: str) -> Callable[[Call, object], None]:
    """Return a function that replaces one argument of a call, by name or position."""
    position = _position(function, name)

    def write(call: Call, value: object) -> None:
        if position < len(call.positional):
            before, after = call.positional[:position], call.positional[position + 1 :]
            call.positional = (*before, value, *after)
        else:
            call.named[name] = value

    return write


def _position(function: Function, name: str | None) -> int:
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(name) if name in parameters else _NOWHERE


def size_bytes_of(payload: object) -> int:
    """Return the bytes of a tensor or of a list of tensors."""
    if isinstance(payload, (list, tuple)):
        return sum(size_bytes_of(item) for item in payload)
    return int(getattr(payload, "nbytes", 0))


_Manager: TypeAlias = AbstractContextManager[object]


class PendingWork:
    """Stand-in for an asynchronous work; the caller's wait is the latest end of the work's span.

    It keeps the tensors alive until the caller's own wait: torch's protection of their memory ends
    when the timer waits for the work on another stream. If the work is `watched`, the timer ends
    its span; otherwise the caller's wait does.
    """

    def __init__(
        self, work: AsyncWork, tracer: RecordingTracer, span: Span, watched: bool, keep: object
    ) -> None:
        self._work = work
        self._tracer = tracer
        self._span = span
        self._watched = watched
        self._keep = keep
        self._result: object = None

    def keep_result(self, result: object) -> None:
        """Keep the tensor that is complete when the work is done."""
        self._result = result

    def wait(self, *arguments: object) -> object:
        """Wait for the work, and end its span if nothing has ended it yet."""
        done = self._work.wait(*arguments)
        self._keep, result, self._result = None, self._result, None
        if not self._watched and self._span.end is None:
            try:
                self._span.end = self._tracer.mark_after(result)
            except Exception as error:
                self._tracer.fail(error)
        return done

    def mark_done_here(self) -> None:
        """End the span now, as the current stream has waited for the work."""
        if self._watched or self._span.end is not None:
            return
        try:
            self._span.end = self._tracer.mark()
            self._span.arguments.pop("end_is_bound", None)
        except Exception as error:
            self._tracer.fail(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


@dataclass(slots=True)
class _Coalescing:
    """A coalesced set under way, and what was noted inside it."""

    group: ProcessGroup | None
    operation: str = ""
    size_bytes: int = 0
    keep: list[object] = field(default_factory=list)


@dataclass(eq=False)
class Collectives:
    """Wraps the collectives of torch.distributed.

    Granularity `base` records only collectives over data-parallel groups: the reduction of
    gradients and the gathering of parameters.
    """

    tracer: RecordingTracer
    position: Position
    groups: Groups
    _: KW_ONLY
    knows_experts: bool = True
    _coalescing: list[_Coalescing] = field(default_factory=list)
    _inside: threading.local = field(default_factory=threading.local)

    def wrap(self, operation: Operation, original: Function) -> Function:
        """Wrap one function of torch.distributed."""
        group_of = argument_reader(original, "group")
        payload_of = argument_reader(original, operation.payload)
        result_of = argument_reader(original, operation.result)
        tracer = self.tracer

        def enter(call: Call) -> bool:
            group = cast("ProcessGroup | None", group_of(call))
            self.note_exchange(operation.name)
            if operation.coalesces and self._note_down(operation, group, payload_of(call), call):
                return False
            name = self._name_if_wanted(group)
            if name is None:
                return False
            payload = payload_of(call)
            arguments = self._describe(operation.name, name, size_bytes_of(payload))
            call.memory = (arguments, tracer.mark_before(payload))
            return True

        def leave(call: Call, result: object) -> object:
            arguments, begin = cast("tuple[Arguments, Mark]", call.memory)
            if _is_work(result):
                keep = (call.positional, call.named)
                work = cast("AsyncWork", result)
                pending = self._follow(work, operation.name, begin, arguments, keep)
                pending.keep_result(result_of(call))
                return pending
            end = tracer.mark_after(result_of(call))
            tracer.add_collective(operation.name, begin, end, arguments, str(arguments["group"]))
            return result

        return self._outermost(original, around(tracer, original, enter, leave))

    def _outermost(self, original: Function, traced: Function) -> Function:
        """Record only outermost calls: a collective that another collective calls is part of it."""
        inside = self._inside

        @functools.wraps(original)
        def call(*positional: object, **named: object) -> object:
            if getattr(inside, "another", False):
                return original(*positional, **named)
            inside.another = True
            try:
                return traced(*positional, **named)
            finally:
                inside.another = False

        return call

    def buffers(self, original: Function) -> Function:
        """Wrap what DDP does at the begin of a forward: C++ sends the first rank's buffers to all
        ranks, and a rank that comes before the first rank waits for it inside its own forward.
        """
        tracer = self.tracer

        def enter(call: Call) -> bool:
            model = cast("DistributedDataParallel", call.positional[0])
            arguments = self.described(
                "broadcast", model.process_group, size_bytes_of(model.modules_buffers)
            )
            call.memory = (arguments, tracer.mark())
            return arguments is not None

        def leave(call: Call, result: object) -> object:
            arguments, begin = cast("tuple[Arguments, Mark]", call.memory)
            group = str(arguments["group"])
            tracer.add_collective("broadcast", begin, tracer.mark(), arguments, group)
            return result

        return around(tracer, original, enter, leave)

    def note_exchange(self, operation: str) -> None:
        """Note that the tokens of a pass are unknown if an all-to-all may belong to experts: a
        router may send more tokens to some ranks than to others.
        """
        if operation == ALL_TO_ALL and not self.knows_experts:
            self.tracer.note_tokens(0)

    def _note_down(
        self, operation: Operation, group: ProcessGroup | None, payload: object, call: Call
    ) -> bool:
        """Add a call to the coalesced set under way on its group; return False if none is."""
        for coalescing in self._coalescing:
            if _same_group(coalescing.group, group):
                coalescing.operation = operation.name
                coalescing.size_bytes += size_bytes_of(payload)
                coalescing.keep.append((call.positional, call.named))
                return True
        return False

    def _name_if_wanted(self, group: ProcessGroup | None) -> str | None:
        """Return the id of a group; None if it has one member, or `base` does not record it."""
        name = self.groups.name(group)
        if self.groups.num_members(name) < 2:
            return None
        return name if self.tracer.full or self.groups.is_data_parallel(name) else None

    def _describe(self, operation: str, group: str, size_bytes: int) -> Arguments:
        arguments = self.position.arguments()
        arguments["op"] = operation
        arguments["group"] = group
        arguments["sequence"] = self.position.number(group, operation)
        arguments["size_bytes"] = size_bytes
        return arguments

    def described(self, operation: str, group: ProcessGroup, size_bytes: int) -> Arguments | None:
        """Return the arguments of a collective of this group; None if it is not to be recorded.

        The collective gets the next running number, so the caller must record it.
        """
        name = self._name_if_wanted(group)
        return None if name is None else self._describe(operation, name, size_bytes)

    def _follow(
        self, work: AsyncWork, name: str, begin: Mark, arguments: Arguments, keep: object
    ) -> PendingWork:
        lane = str(arguments["group"])
        return self.groups.follow(self.tracer, work, name, begin, arguments, lane=lane, keep=keep)

    def coalescing_manager(self, original: Function) -> Function:
        """Wrap `_coalescing_manager`: all that is launched inside it becomes one span."""

        def traced(
            group: ProcessGroup | None = None, *positional: object, **named: object
        ) -> object:
            manager = cast("_Manager", original(group, *positional, **named))
            return _CoalescedSet(self, manager, group) if self.tracer.active else manager

        return traced

    def begin_set(self, coalescing: _Coalescing) -> None:
        """Begin a coalesced set: note all calls on its group from now on."""
        self._coalescing.append(coalescing)

    def leave_set(self, coalescing: _Coalescing) -> None:
        """End a coalesced set without recording it."""
        self._coalescing = [other for other in self._coalescing if other is not coalescing]

    def launch_set(self, coalescing: _Coalescing) -> tuple[Arguments, Mark] | None:
        """Return arguments and begin of a set that is about to be launched; None if it is not to be
        recorded.
        """
        name = self._name_if_wanted(coalescing.group)
        if name is None or not coalescing.operation or not self.tracer.active:
            return None
        arguments = self._describe(coalescing.operation, name, coalescing.size_bytes)
        return arguments, self.tracer.mark()

    def record_set(
        self, works: list[AsyncWork], arguments: Arguments, begin: Mark, coalescing: _Coalescing
    ) -> None:
        """Record the launched set now, or when its last work is done."""
        name = str(arguments["op"])
        if works:
            works[-1] = self._follow(works[-1], name, begin, arguments, coalescing)
        else:
            group = str(arguments["group"])
            self.tracer.add_collective(name, begin, self.tracer.mark(), arguments, group)

    def fail(self, error: Exception) -> None:
        """Stop tracing."""
        self.tracer.fail(error)


class _CoalescedSet:
    """A recorded coalescing manager, which behaves like the original."""

    def __init__(
        self, collectives: Collectives, manager: _Manager, group: ProcessGroup | None
    ) -> None:
        self._collectives = collectives
        self._manager = manager
        self._coalescing = _Coalescing(group)
        self._handle: object = None

    def __enter__(self) -> object:
        self._handle = self._manager.__enter__()
        self._collectives.begin_set(self._coalescing)
        return self._handle

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._collectives.leave_set(self._coalescing)
        launched = None
        try:
            if error is None:
                launched = self._collectives.launch_set(self._coalescing)
        except Exception as failure:
            self._collectives.fail(failure)
        swallowed = self._manager.__exit__(kind, error, traceback)
        try:
            if launched is not None:
                works = getattr(self._handle, "works", [])
                self._collectives.record_set(works, *launched, self._coalescing)
        except Exception as failure:
            self._collectives.fail(failure)
        return swallowed


def _is_work(result: object) -> bool:
    return result is not None and hasattr(result, "wait") and hasattr(result, "is_completed")


def _same_group(one: ProcessGroup | None, other: ProcessGroup | None) -> bool:
    if one is None or other is None:
        from torch.distributed import group

        return (one or group.WORLD) is (other or group.WORLD)
    return one is other


class _Bucket(Protocol):
    """The part of torch.distributed.GradBucket that is used here."""

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket as one flat tensor."""


logger = logging.getLogger("megascan")


def reduces_in_backward(model: torch.nn.Module) -> bool:
    """Return whether a backward pass of the model ends with waiting for reduced gradients."""
    from torch.nn.parallel import DistributedDataParallel

    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return isinstance(uncompiled(model), (DistributedDataParallel, sharded))


def reduces_now(model: torch.nn.Module) -> bool:
    """Return whether the backward pass under way reduces gradients: not inside DDP's `no_sync`."""
    return bool(getattr(uncompiled(model), "require_backward_grad_sync", True))


def replica_of(model: torch.nn.Module) -> torch.nn.Module:
    """Return the DDP model that wraps a model, or the model itself if there is none.

    Trainers hand out the inner model, but the DDP model around it reduces the gradients.
    """
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(uncompiled(model), DistributedDataParallel):
        return model
    inside = uncompiled(model)
    for wrapper in _wrappers_of(inside):
        if isinstance(wrapper, DistributedDataParallel):
            return wrapper
        for replica in _wrappers_of(wrapper):  # of a compiled model
            if isinstance(replica, DistributedDataParallel):
                return replica
    return model


def _wrappers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that wrap a model: those of DDP, and those that torch.compile made.

    The garbage collector is asked for referrers and not for all objects: a list of all objects
    holds each tuple that another thread is just building, too, and CPython stops that thread's
    `tuple(generator)` with a SystemError (bpo-15108).
    """
    import torch

    children = [
        holder
        for holder in gc.get_referrers(model)
        if isinstance(holder, dict)
        and (holder.get("module") is model or holder.get("_orig_mod") is model)
    ]
    if not children:
        return []
    holders = gc.get_referrers(*children)
    attributes = [holder for holder in holders if isinstance(holder, dict)]
    owners = gc.get_referrers(*attributes) if attributes else []
    return [one for one in (*holders, *owners) if isinstance(one, torch.nn.Module)]


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that `torch.compile` was given; return any other model as it is."""
    inside: torch.nn.Module = getattr(model, "_orig_mod", model)
    return inside


def reduce_visibly(model: torch.nn.Module) -> None:
    """Have a DDP model reduce its gradients through torch.distributed; ignore other models.

    The hook stays when tracing ends, as DDP has no way to remove it. A model that already has a
    hook keeps its hook.
    """
    from torch.nn.parallel import DistributedDataParallel

    model = uncompiled(model)
    if not isinstance(model, DistributedDataParallel):
        return
    if getattr(model, "_comm_hooks", None):
        logger.info("a DDP model has a communication hook of its own and keeps it")
        return
    # Without annotations: DDP compares them with its own class and takes no text for it.
    model.register_comm_hook(model, lambda state, bucket: _all_reduce(state, bucket))  # noqa: PLW0108


def _all_reduce(
    model: DistributedDataParallel, bucket: _Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group of the model."""
    import torch.distributed as dist

    group = model.process_group
    buffer, num_ranks = bucket.buffer(), dist.get_world_size(group)
    operation: object = dist.ReduceOp.SUM
    if _scales_exactly(buffer, group, num_ranks):
        operation = dist._make_nccl_premul_sum(1.0 / num_ranks)  # type: ignore[attr-defined]
    # The reducer multiplies while it copies into the bucket, and divides where gradients are
    # views of it: with a group size that is no power of two, the last bits differ.
    elif model.gradient_as_bucket_view:
        buffer.div_(num_ranks)
    else:
        buffer.mul_(1.0 / num_ranks)
    work = dist.all_reduce(buffer, op=operation, group=group, async_op=True)
    if work is None:
        raise RuntimeError("an asynchronous all-reduce returned no work")

    def first(reduced: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(work, PendingWork):  # the current stream waits for the work
            work.mark_done_here()
        return reduced[0]

    if buffer.is_cuda:
        return _reduced_aside(work.get_future(), first, buffer.device)
    on_cpu: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: first(future.value())
    )
    return on_cpu


def _reduced_aside(
    reduced: torch.futures.Future[list[torch.Tensor]],
    first: Callable[[list[torch.Tensor]], torch.Tensor],
    device: torch.device,
) -> torch.futures.Future[torch.Tensor]:
    """Return what `reduced.then(first)` would, on a stream that nobody else has.

    Callbacks of a future run on torch's 32 streams of usual priority, each on the next one, which
    then waits for the reduction. One of them may be the stream on which a trainer has its gradients
    accumulated (Lightning builds DDP on one): from then on each reduction would hold up the rest of
    the backward pass.
    """
    import torch

    result: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
    with torch.cuda.stream(_stream_aside(device)):
        result.set_result(first(reduced.wait()))  # the stream waits, not the host
    return result


@functools.cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of high priority, so that it is none of those that callbacks run on."""
    import torch

    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _scales_exactly(buffer: torch.Tensor, group: ProcessGroup, num_ranks: int) -> bool:
    """Return whether NCCL may scale what it reads, which saves a pass over all gradients.

    A product with a power of two is exact, so it does not matter who computes it. But in half
    precision, NCCL's sums of scaled values differ from sums of values scaled before (NCCL 2.28).
    """
    import torch
    import torch.distributed as dist

    is_exact = buffer.dtype is torch.float32 and num_ranks & (num_ranks - 1) == 0
    return is_exact and dist.get_backend(group) == "nccl"
