"""Names, groups and sizes of communication in PyTorch profiler traces, in our words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megascan.header import MOST_RANKS
from megascan.schema import NOT_APPLICABLE

_AXES = {
    "default_pg": "world",
    "tensor_model_parallel_group": "tp",
    "pipeline_model_parallel_group": "pp",
    "data_parallel_group": "dp",
    "data_parallel_group_with_cp": "dp_cp",
    "context_parallel_group": "cp",
    "expert_model_parallel_group": "ep",
    "model_parallel_group": "mp",
    "embedding_group": "embd",
}
"""Megatron's group descriptions; others keep their own words."""

_OPERATIONS = (
    ("reduce_scatter", ("reducescatter",)),
    ("all_reduce", ("allreduce",)),
    ("all_gather", ("allgather",)),
    ("all_to_all", ("alltoall",)),
    ("broadcast", ("broadcast",)),
    ("barrier", ("barrier",)),
    ("gather", ("gather",)),
    ("scatter", ("scatter",)),
    ("reduce", ("reduce",)),
    ("send", ("send",)),
    ("recv", ("recv",)),
)
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
    """Our operation of a collective's or NCCL kernel's name; "" for a batch of several."""
    plain = re.sub(r"[^a-z]", "", name.lower().removeprefix("nccldevkernel").removeprefix("nccl"))
    if _PEER_TO_PEER in plain:
        return ""
    return next((ours for ours, signs in _OPERATIONS if any(s in plain for s in signs)), "")


def axis_name(description: str, name: str) -> str:
    """First part of a group's id."""
    words = description.strip("_ ").lower()
    return _AXES.get(words) or (words if words not in ("", "undefined") else f"pg{name}")


def process_group(
    name: str, description: str, ranks: str, configured: Mapping[str, ProcessGroup]
) -> ProcessGroup:
    """The group of a kernel's arguments; ranks that are not listed in full come from the header."""
    members = _ranks(ranks)
    known = configured.get(name)
    if known is not None:
        return known
    axis = axis_name(description, name)
    return ProcessGroup(f"{axis}@{min(members)}", members) if members else ProcessGroup("", ())


def configured_groups(config: object) -> dict[str, ProcessGroup]:
    """Groups by name out of a header's `pg_config`; what is not in the known shape is left out."""
    groups = {}
    for entry in config if isinstance(config, list) else []:
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if ranks and isinstance(ranks, list) and all(map(_is_rank, ranks)):
            name = text_of(entry.get("pg_name"))
            axis = axis_name(text_of(entry.get("pg_desc")), name)
            groups[name] = ProcessGroup(f"{axis}@{min(ranks)}", tuple(ranks))
    return groups


def text_of(value: object) -> str:
    """A text or number as text; nothing for what else a damaged file may hold in its place."""
    return str(value) if isinstance(value, str | int) else ""


def only_group(groups: Iterable[ProcessGroup], rank: int) -> ProcessGroup:
    """The group of a span that names none: unambiguous only if all of a rank's have one make-up."""
    mine = [group for group in groups if rank in group.ranks]
    unlike = {group.ranks for group in mine}
    return mine[0] if len(unlike) == 1 else ProcessGroup("", ())


def peer_rank(value: int, group: ProcessGroup, rank: int) -> int:
    """Global rank of a p2p partner, which is given by its place in the group."""
    if 0 <= value < len(group.ranks) and group.ranks[value] != rank:
        return group.ranks[value]
    return value if _is_rank(value) and value != rank else NOT_APPLICABLE


def item_bytes(dtype: str) -> int:
    """Bytes of one element; NOT_APPLICABLE for a type we do not know."""
    if dtype.lower().startswith("float8"):
        return 1
    return _ITEM_BYTES.get(dtype.lower(), NOT_APPLICABLE)


def _ranks(text: str) -> tuple[int, ...]:
    """Members of "[0, 1, 2]"; none of a list that was shortened by dots."""
    if "..." in text:
        return ()
    ranks = tuple(int(number) for number in re.findall(r"[0-9]+", text[:_LONGEST_LIST]))
    return ranks if all(map(_is_rank, ranks)) else ()


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MOST_RANKS
