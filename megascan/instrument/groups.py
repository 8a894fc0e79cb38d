"""Process groups by id, and the layout of a job that keeps its ranks in a torch DeviceMesh.

megatron.core keeps its groups as module variables of `parallel_state`; two communicators over the
same ranks (data parallel with and without context parallel, say) are told apart by their axis.

A device mesh names its dimensions as torch's own examples and torchtitan do; several dimensions of
data parallelism (replicated and sharded) are one axis to us.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megascan.errors import ConfigError
from megascan.topology import DEFAULT_ORDER, Coordinates, Layout
from megascan.vocabulary import AXIS_OF_VARIABLE, MESH_AXES, group_id, is_data_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def axes_of(mesh: DeviceMesh) -> list[str]:
    """Return the axis of each mesh dimension, outermost first; ConfigError for unknown names."""
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

    Raises ConfigError when the mesh does not hold every rank, or not in the order of a grid.
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
    """Tell whether an axis stands in two places with another between."""
    runs = [axis for number, axis in enumerate(axes) if not number or axes[number - 1] != axis]
    return len(runs) != len(set(runs))


class Groups:
    """Names and members of the process groups this rank belongs to.

    Read once, when tracing starts; a group made later is named when it is first used. A device
    mesh names the groups of its dimensions; `all_data_parallel` says that there is no other axis.
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
        """Name the groups of the mesh; dimensions of one axis differ: `dp`, `dp-dp_shard`."""
        names, axes = mesh.mesh_dim_names or (), axes_of(mesh)
        for name, axis in zip(names, axes, strict=True):
            self._enter(mesh.get_group(name), axis if axes.count(axis) == 1 else f"{axis}-{name}")

    def _read_registry(self) -> None:
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is None:  # a trainer without megatron.core
            return
        from torch.distributed import distributed_c10d

        alive = distributed_c10d._world.pg_names  # megatron.core keeps some that were destroyed
        for variable, axis in AXIS_OF_VARIABLE.items():
            group = getattr(parallel_state, variable, None)
            if group is not None and not isinstance(group, list) and group in alive:
                self._enter(group, axis)

    def _read_others(self) -> None:
        """Name the world, and groups that the trainer made itself."""
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
        if group is None:
            from torch.distributed import group as groups

            group = groups.WORLD
        known = self._names.get(group)  # type: ignore[arg-type]
        if known is not None:
            return known
        assert group is not None  # a collective needs an initialised world
        description = getattr(group, "group_desc", "") or "group"
        return self._enter(group, f"{description}-{group.group_name}".lower())

    def backend(self, name: str) -> str:
        """Return the backend of a group's communication: nccl, gloo, …"""
        return self._backends[name]

    def num_members(self, name: str) -> int:
        """Return the size of a group."""
        return len(self._members[name])

    def is_data_parallel(self, name: str) -> bool:
        """Tell whether gradients and parameters travel over this group."""
        return self._all_data_parallel or is_data_parallel(name)

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Return ordered global ranks by group id."""
        return dict(self._members)
