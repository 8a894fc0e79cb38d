"""Process groups by name: `<axis>@<smallest member>`, the same on every member.

megatron.core keeps its groups as module variables of `parallel_state`; two communicators over the
same ranks (data parallel with and without context parallel, say) are told apart by their axis. A
group object that stands in two variables goes by the first of this table.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megascan.instrument.mesh import axes_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_AXES = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "inter_expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_DATA_PARALLEL_GROUP_GLOO": "dp_gloo",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp_cp_gloo",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "expt_dp_gloo",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "intra_dp_cp_gloo",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "intra_expt_dp_gloo",
}

_DATA_PARALLEL_AXES = ("dp", "dp_cp", "dp_cp_ag", "expt_dp", "intra_dp_cp", "intra_expt_dp")


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
        """Several dimensions of one axis have groups of their own names: `dp`, `dp-dp_shard`."""
        names, axes = mesh.mesh_dim_names or (), axes_of(mesh)
        for name, axis in zip(names, axes, strict=True):
            self._enter(mesh.get_group(name), axis if axes.count(axis) == 1 else f"{axis}-{name}")

    def _read_registry(self) -> None:
        parallel_state = sys.modules.get("megatron.core.parallel_state")
        if parallel_state is None:  # a trainer without megatron.core
            return
        for variable, axis in _AXES.items():
            group = getattr(parallel_state, variable, None)
            if group is not None and not isinstance(group, list):
                self._enter(group, axis)

    def _read_others(self) -> None:
        """The world, and groups that the trainer made itself."""
        from torch.distributed import distributed_c10d, group

        if group.WORLD is not None:
            self._enter(group.WORLD, "dp" if self._all_data_parallel else "world")
        for other in list(distributed_c10d._world.pg_names):
            self.name(other)

    def _enter(self, group: ProcessGroup, axis: str) -> str:
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        name = f"{axis}@{min(ranks)}"
        if group not in self._names:
            self._names[group] = name
            self._members.setdefault(name, ranks)
            self._backends.setdefault(name, str(dist.get_backend(group)))
        return self._names[group]

    def name(self, group: ProcessGroup | None) -> str:
        """Id of a group; None is the world."""
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
        """What carries a group's communication: nccl, gloo, …"""
        return self._backends[name]

    def num_members(self, name: str) -> int:
        """Size of a group."""
        return len(self._members[name])

    def is_data_parallel(self, name: str) -> bool:
        """Whether gradients and parameters travel over this group."""
        axis = name.partition("@")[0]
        named = axis in _DATA_PARALLEL_AXES or axis.startswith("dp-")
        return named or self._all_data_parallel

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Ordered global ranks by id."""
        return dict(self._members)
