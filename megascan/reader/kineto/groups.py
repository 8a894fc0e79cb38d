"""Communicators of a profile by their arguments and the header: ids, members, operations, peers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from megascan.header import MOST_RANKS
from megascan.schema import NOT_APPLICABLE
from megascan.vocabulary import (
    AXIS_OF_VARIABLE,
    COLLECTIVES,
    MESH_AXES,
    RECV,
    SEND,
    group_id,
)

_AXES = {
    "default_pg": "world",
    **{variable.strip("_").lower(): axis for variable, axis in AXIS_OF_VARIABLE.items()},
}
"""Megatron's group descriptions; others keep their own words."""

_OPERATIONS = tuple(
    (op, op.replace("_", "")) for op in sorted((*COLLECTIVES, SEND, RECV), key=len, reverse=True)
)
"""Our operations and how other names contain them, the longest first: `reduce_scatter` before
`scatter`."""
_LONGEST_LIST = 4000
"""Characters of a list of ranks; the profiler shortens longer ones itself."""
_PEER_TO_PEER = "sendrecv"
"""NCCL runs batched sends and receives as one kernel of this name."""

_ITEM_BYTES = {
    "double": 8, "long": 8, "int": 4, "float": 4, "short": 2, "half": 2, "bfloat16": 2,
    "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ProcessGroup:
    """A communicator: our id for it, and its ordered global ranks (empty: not known)."""

    id: str
    ranks: tuple[int, ...]


def operation_name(name: str) -> str:
    """Return our operation of a collective's or NCCL kernel's name; "" for a batch of several."""
    plain = re.sub(r"[^a-z]", "", name.lower().removeprefix("nccldevkernel").removeprefix("nccl"))
    if _PEER_TO_PEER in plain:
        return ""
    return next((ours for ours, sign in _OPERATIONS if sign in plain), "")


def axis_name(description: str, name: str) -> str:
    """Return the first part of a group's id: a dimension of a device mesh is `mesh_tp` to torch."""
    words = description.strip("_ ").lower()
    dimension = words.removeprefix("mesh_")
    if dimension != words and dimension in MESH_AXES:
        axis = MESH_AXES[dimension]
        return axis if axis in (dimension, "tp", "cp", "pp") else f"{axis}-{dimension}"
    return _AXES.get(words) or (words if words not in ("", "undefined") else f"pg{name}")


def process_group(
    name: str, description: str, ranks: str, configured: Mapping[str, ProcessGroup]
) -> ProcessGroup:
    """Return the group of a kernel's arguments; ranks that are not listed in full come from the
    header.
    """
    members = _ranks(ranks)
    known = configured.get(name)
    if known is not None:
        return known
    axis = axis_name(description, name)
    return ProcessGroup(group_id(axis, members), members) if members else ProcessGroup("", ())


def configured_groups(config: object) -> dict[str, ProcessGroup]:
    """Return groups by name out of a header's `pg_config`; what is not in the known shape is left
    out.
    """
    groups = {}
    for entry in config if isinstance(config, list) else []:
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if ranks and isinstance(ranks, list) and all(map(_is_rank, ranks)):
            name = text_of(entry.get("pg_name"))
            axis = axis_name(text_of(entry.get("pg_desc")), name)
            groups[name] = ProcessGroup(group_id(axis, ranks), tuple(ranks))
    return groups


def stated_groups(events: pa.Table) -> dict[str, ProcessGroup]:
    """Return groups by name out of the arguments of communication."""
    names = ("Process Group Name", "Process Group Description", "Process Group Ranks")
    said = events.select(names).filter(pc.is_valid(events.column(names[2])))
    distinct = said.group_by(list(names)).aggregate([]).to_pylist()
    found = {
        row[names[0]] or "": process_group(
            row[names[0]] or "", row[names[1]] or "", row[names[2]], {}
        )
        for row in distinct
    }
    return {name: group for name, group in found.items() if group.ranks}


def text_of(value: object) -> str:
    """Return a text or number as text; nothing for what else a damaged file may hold."""
    return str(value) if isinstance(value, str | int) else ""


def only_group(groups: Iterable[ProcessGroup], rank: int) -> ProcessGroup:
    """Return the group of a span that names none: unambiguous only if all of a rank's have one
    make-up.
    """
    mine = [group for group in groups if rank in group.ranks]
    unlike = {group.ranks for group in mine}
    return mine[0] if len(unlike) == 1 else ProcessGroup("", ())


def peer_rank(value: int, group: ProcessGroup, rank: int) -> int:
    """Return the global rank of a p2p partner, which is given by its place in the group."""
    if 0 <= value < len(group.ranks) and group.ranks[value] != rank:
        return group.ranks[value]
    return value if _is_rank(value) and value != rank else NOT_APPLICABLE


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; NOT_APPLICABLE for a type we do not know."""
    if dtype.lower().startswith("float8"):
        return 1
    return _ITEM_BYTES.get(dtype.lower(), NOT_APPLICABLE)


def _ranks(text: str) -> tuple[int, ...]:
    """Read the members of "[0, 1, 2]"; none of a list that was shortened by dots."""
    if "..." in text:
        return ()
    ranks = tuple(int(number) for number in re.findall(r"[0-9]+", text[:_LONGEST_LIST]))
    return ranks if all(map(_is_rank, ranks)) else ()


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MOST_RANKS
