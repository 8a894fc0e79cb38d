"""The layout of a job that keeps its ranks in a torch DeviceMesh instead of megatron.core.

Dimensions go by the names that torch's own examples and torchtitan give them; several dimensions of
data parallelism (replicated and sharded) are one axis to us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megascan.errors import ConfigError
from megascan.topology import DEFAULT_ORDER, Coordinates, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = {
    "dp": "dp",
    "ddp": "dp",
    "fsdp": "dp",
    "hsdp": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "replicate": "dp",
    "shard": "dp",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
}


def axes_of(mesh: DeviceMesh) -> list[str]:
    """The axis of each dimension, outermost first; ConfigError for names that mean nothing here."""
    names = mesh.mesh_dim_names
    unknown = [name for name in names or () if name not in AXES]
    if not names or unknown:
        raise ConfigError(
            f"the device mesh has dimensions {list(names or ())}, expected names out of "
            f"{', '.join(AXES)}; give init_device_mesh those as mesh_dim_names"
        )
    return [AXES[name] for name in names]


def topology_of(mesh: DeviceMesh, rank: int) -> tuple[Layout, Coordinates]:
    """Layout of a mesh over all ranks, and the place of a rank in it.

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
    """Whether an axis stands in two places with another between."""
    runs = [axis for number, axis in enumerate(axes) if not number or axes[number - 1] != axis]
    return len(runs) != len(set(runs))
