"""Communication of a PyTorch profile: which events, between whom, how many bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megascan.reader.kineto_comms import (
    ProcessGroup,
    item_bytes,
    only_group,
    operation_name,
    peer_rank,
    process_group,
)
from megascan.reader.kineto_events import Profile
from megascan.schema import NOT_APPLICABLE

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_MESSAGES = ("send", "recv")
_A_RANK = re.compile(r"[0-9]{1,9}")
_MOST_ELEMENTS = 1 << 50
_DESCRIBED = (
    "Collective name", "Process Group Name", "Process Group Description", "Process Group Ranks",
    "dtype", "Src Rank", "Dst Rank",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication events by row of the profile's table.

    `channel` numbers what is counted together (group and operation, or peer and direction);
    `is_covered` marks every event that is communication or part of it, also those not chosen.
    """

    rows: Integers
    is_message: Flags
    channel: Integers
    integers: Mapping[str, Integers]
    texts: Mapping[str, tuple[Integers, list[str]]]
    groups: tuple[ProcessGroup, ...]
    is_covered: Flags
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Sort:
    """What all events with the same arguments share."""

    op: str
    group: ProcessGroup
    peer: int
    item_bytes: int

    @property
    def name(self) -> str:
        return self.op or "send_recv"


def communication_of(profile: Profile, on_device: Flags) -> Communication:
    """NCCL kernels; without a GPU the host's `record_param_comms`, without these gloo's spans."""
    events = profile.events
    names = pc.fill_null(events.column("name"), "")
    nccl = np.asarray(pc.match_substring(names, "nccl", ignore_case=True)) & on_device
    params = np.asarray(pc.equal(names, "record_param_comms"))
    params &= np.asarray(pc.is_valid(events.column("Collective name")))
    gloo = np.zeros(events.num_rows, dtype=np.bool_)
    gloo[[row for row in profile.shapes if _is_gloo(names[row].as_py())]] = True
    covered = nccl | params | gloo | np.asarray(pc.starts_with(names, "c10d::"))
    if on_device.any():
        return _described(profile, np.flatnonzero(nccl), covered)
    if params.any():
        return _described(profile, np.flatnonzero(params), covered)
    return _annotated(profile, np.flatnonzero(gloo), covered)


def _is_gloo(name: str) -> bool:
    """Collectives by gloo's annotation; messages by the operator around it, which says the peer."""
    return name.startswith("c10d::") or name not in ("gloo:send", "gloo:recv")


def _described(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Events that carry their collective's arguments: one look at each distinct set of them."""
    events = profile.events.take(pa.array(rows))
    keys = [pc.fill_null(events.column(name).cast(pa.string()), "") for name in _DESCRIBED]
    joined = pc.binary_join_element_wise(*keys, events.column("name"), "\x1f").combine_chunks()
    distinct = joined.dictionary_encode()
    sorts = [_sort(text.split("\x1f"), profile) for text in distinct.dictionary.to_pylist()]
    code = np.asarray(distinct.indices, dtype=np.int64)
    elements = events.column("In msg nelems").fill_null(NOT_APPLICABLE).to_numpy()
    sizes = np.array([sort.item_bytes for sort in sorts] or [0], dtype=np.int64)[code]
    stated = (elements >= 0) & (elements < _MOST_ELEMENTS) & (sizes > 0)
    sizes = np.where(stated, np.where(stated, elements, 0) * sizes, NOT_APPLICABLE)
    sequence = events.column("Seq").fill_null(NOT_APPLICABLE).to_numpy().copy()
    return _communication(rows, (code, sorts), (sizes, sequence), covered)


def _sort(words: list[str], profile: Profile) -> _Sort:
    collective, name, description, ranks, dtype, source, target, kernel = words
    group = process_group(name, description, ranks, profile.groups)
    op = operation_name(collective or kernel)
    value = target if op == "send" else source
    peer = _peer(value, group, profile.rank) if op in _MESSAGES else NOT_APPLICABLE
    return _Sort(op, group, peer, item_bytes(dtype))


def _annotated(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Gloo's spans, which name no group: theirs is the one that all of this rank's groups equal."""
    group = only_group(profile.groups.values(), profile.rank)
    names = profile.events.column("name")
    sorts: dict[_Sort, int] = {}
    code, sizes = np.zeros((2, len(rows)), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        arguments = profile.shapes[row]
        op = operation_name(names[row].as_py().removeprefix("gloo:").removeprefix("c10d::"))
        peer = _stated_peer(arguments, group, profile.rank) if op in _MESSAGES else NOT_APPLICABLE
        code[place] = sorts.setdefault(_Sort(op, group, peer, NOT_APPLICABLE), len(sorts))
        sizes[place] = _stated_bytes(arguments)
    unnamed = bool(len(rows)) and not group.id
    notes = (f"rank {profile.rank}: gloo's spans do not say their process group",) * unnamed
    sequence = np.full(len(rows), NOT_APPLICABLE, dtype=np.int64)
    return _communication(rows, (code, list(sorts)), (sizes, sequence), covered, notes)


def _stated_peer(arguments: Mapping[str, object], group: ProcessGroup, rank: int) -> int:
    """Third input of c10d::send and c10d::recv_: the partner's place in the group."""
    inputs = cast("list[object]", arguments.get("Concrete Inputs") or [])
    value = str(inputs[2]) if len(inputs) > 2 else ""
    return _peer(value, group, rank)


def _peer(text: str, group: ProcessGroup, rank: int) -> int:
    return peer_rank(int(text), group, rank) if _A_RANK.fullmatch(text) else NOT_APPLICABLE


def _stated_bytes(arguments: Mapping[str, object]) -> int:
    """Bytes of the first input that has a shape (recorded with record_shapes)."""
    shapes = cast("list[list[object]]", arguments.get("Input Dims") or [])
    types = cast("list[str]", arguments.get("Input type") or [])
    for shape, dtype in zip(shapes, types, strict=False):
        sizes = shape[0] if shape and isinstance(shape[0], list) else shape
        if sizes and all(isinstance(size, int) for size in sizes):
            width = item_bytes({"c10::BFloat16": "bfloat16", "c10::Half": "half"}.get(dtype, dtype))
            width = item_bytes("float") if dtype == "TensorList" else width
            count = math.prod(cast("list[int]", sizes))
            return count * width if width > 0 and 0 <= count < _MOST_ELEMENTS else NOT_APPLICABLE
    return NOT_APPLICABLE


def _communication(
    rows: Integers,
    sorted_by: tuple[Integers, list[_Sort]],
    numbers: tuple[Integers, Integers],
    covered: Flags,
    notes: tuple[str, ...] = (),
) -> Communication:
    (code, sorts), (sizes, sequence) = sorted_by, numbers
    is_message = np.array([sort.op in (*_MESSAGES, "") for sort in sorts] or [False])[code]
    channels = [(sort.op, sort.group.id, sort.peer) for sort in sorts]
    peers = np.array([sort.peer for sort in sorts] or [0], dtype=np.int64)
    return Communication(
        rows=rows,
        is_message=is_message,
        channel=np.array([channels.index(one) for one in channels] or [0], dtype=np.int64)[code],
        integers={
            "size_bytes": sizes,
            "sequence": np.where(is_message, NOT_APPLICABLE, sequence),
            "peer": peers[code],
        },
        texts={
            "name": (code, [sort.name for sort in sorts]),
            "op": (code, [sort.op for sort in sorts]),
            "group": (code, [sort.group.id for sort in sorts]),
        },
        groups=tuple({sort.group for sort in sorts if sort.group.id}),
        is_covered=covered,
        notes=notes,
    )
