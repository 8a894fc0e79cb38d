"""Which events of a profile are communication: the operation, between whom, how many bytes.

What describes an NCCL kernel, first found, first taken:

    its own arguments                torch 2.3 and newer: collective, group, ranks, elements
    `record_param_comms` around      torch 2.0 and newer: the same on the operator that launched it
    `nccl:all_to_all` around         the annotation of torch 1.8 and newer: the operation only
    its name                         ncclKernel_AllReduce_…; a `SendRecv` may be anything

Without a GPU `record_param_comms` stands for the operation, without that gloo's own annotation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers
from megascan.reader.kineto.document import ANNOTATION, ON_DEVICE, Profile
from megascan.reader.kineto.groups import (
    ProcessGroup,
    item_bytes,
    only_group,
    operation_name,
    peer_rank,
    process_group,
)
from megascan.reader.kineto.host import Host
from megascan.schema import NOT_APPLICABLE
from megascan.vocabulary import RECV, SEND, SEND_RECV, group_id

_DEVICE_WORDS = (
    r"(?i)nccl|nvshmem|mscclpp|userbuffers|deep_ep|cross_device_reduce|multimem_"
    r"|(one|two)_shot_all_?reduce"
)
"""Kernels that communicate, and so may wait for other ranks: of NCCL and RCCL, and of libraries
that write into each other's memory; nothing of the latter can be matched."""
_A_PAIR = re.compile(r"[0-9]+\s*(?:->|<-)\s*([0-9]{1,9})")
_MESSAGES = (SEND, RECV)
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
        return self.op or SEND_RECV


def communication_of(host: Host) -> Communication:
    """Find communication kernels; without a GPU `record_param_comms`, without these gloo's spans.

    Also covered are what a rank's host does around them.
    """
    profile = host.profile
    events, on_device = profile.events, profile.of_category(*ON_DEVICE)
    names = pc.fill_null(events.column("name"), "")
    kernels = np.asarray(pc.match_substring_regex(names, _DEVICE_WORDS)) & on_device
    params = _stated(profile)
    gloo = np.zeros(events.num_rows, dtype=np.bool_)
    gloo[[row for row in profile.shapes if _is_gloo(names[row].as_py())]] = True
    covered = kernels | params | gloo | np.asarray(pc.starts_with(names, "c10d::"))
    if on_device.any():
        return _described(host, np.flatnonzero(kernels), covered)
    if params.any():
        return _described(host, np.flatnonzero(params), covered)
    return _annotated(profile, np.flatnonzero(gloo), covered)


def _stated(profile: Profile) -> Flags:
    """Mark the operators of torch.distributed that say what they do."""
    events = profile.events
    params = np.asarray(pc.equal(pc.fill_null(events.column("name"), ""), "record_param_comms"))
    return np.asarray(params & np.asarray(pc.is_valid(events.column("Collective name"))))


def _is_gloo(name: str) -> bool:
    """Tell collectives by gloo's annotation, messages by the operator around it, which says the
    peer.
    """
    return name.startswith("c10d::") or name not in ("gloo:send", "gloo:recv")


def _described(host: Host, rows: Integers, covered: Flags) -> Communication:
    """Describe events by their collective's arguments: one look at each distinct set of them."""
    profile = host.profile
    says = _describing(host, rows)
    events = profile.events.take(pa.array(says))
    keys = [pc.fill_null(events.column(name).cast(pa.string()), "") for name in _DESCRIBED]
    keys[0] = pc.if_else(pc.equal(keys[0], ""), _annotations(host, rows), keys[0])
    kernels = profile.events.column("name").take(pa.array(rows))
    joined = pc.binary_join_element_wise(*keys, kernels, "\x1f").combine_chunks()
    distinct = joined.dictionary_encode()
    everybody = _everybody(profile, rows)
    sorts = [
        _sort(one.split("\x1f"), profile, everybody) for one in distinct.dictionary.to_pylist()
    ]
    code = np.asarray(distinct.indices, dtype=np.int64)
    elements = events.column("In msg nelems").fill_null(NOT_APPLICABLE).to_numpy()
    sizes = np.array([sort.item_bytes for sort in sorts] or [0], dtype=np.int64)[code]
    stated = (elements >= 0) & (elements < _MOST_ELEMENTS) & (sizes > 0)
    sizes = np.where(stated, np.where(stated, elements, 0) * sizes, NOT_APPLICABLE)
    sequence = events.column("Seq").fill_null(NOT_APPLICABLE).to_numpy().copy()
    unnamed = any(sort.op and not sort.group.id and sort.peer < 0 for sort in sorts)
    notes = (
        f"rank {profile.rank}: communication does not say its process group (torch before 2.3) and "
        "runs on several streams: it is not matched",
    ) * unnamed
    return _communication(rows, (code, sorts), (sizes, sequence), covered, notes)


def _describing(host: Host, rows: Integers) -> Integers:
    """Return whose arguments describe each event: its own, or those of the operator around it."""
    unsaid = np.asarray(pc.is_null(host.profile.events.column("Collective name")))[rows]
    around = host.enclosing(np.flatnonzero(_stated(host.profile)), rows)
    return np.where(unsaid & (around >= 0), around, rows)


def _annotations(host: Host, rows: Integers) -> pa.ChunkedArray:
    """Return the annotation that each event was launched in: `nccl:all_to_all`, or ""."""
    names = pc.fill_null(host.profile.events.column("name"), "")
    marks = np.asarray(pc.starts_with(names, "nccl:")) & host.profile.of_category(ANNOTATION)
    around = host.enclosing(np.flatnonzero(marks), rows)
    return pc.fill_null(names.take(pa.array(around, mask=around < 0)), "")


def _everybody(profile: Profile, rows: Integers) -> ProcessGroup:
    """Return the group of collectives that name none: all ranks, if they run on one stream.

    Each of a process's communicators has a stream of its own.
    """
    streams = profile.events.column("stream").take(pa.array(rows)).drop_null()
    if len(streams.unique()) != 1:
        return ProcessGroup("", ())
    return ProcessGroup(group_id("world", [0]), tuple(range(profile.world_size or 0)))


def _sort(words: list[str], profile: Profile, everybody: ProcessGroup) -> _Sort:
    collective, name, description, ranks, dtype, source, target, kernel = words
    group = process_group(name, description, ranks, profile.groups)
    op = operation_name(collective) or operation_name(kernel)
    if op not in _MESSAGES:
        return _Sort(
            op, group if group.id or not op else everybody, NOT_APPLICABLE, item_bytes(dtype)
        )
    value = (target if op == SEND else source) or _partner(collective)
    return _Sort(op, group, _peer(value, group, profile.rank), item_bytes(dtype))


def _partner(annotation: str) -> str:
    """Return the other side of `nccl:send 0->1`, its place in the group."""
    pair = _A_PAIR.search(annotation)
    return pair[1] if pair is not None else ""


def _annotated(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Describe gloo's spans, which name no group: all of this rank's must be equal."""
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
    """Read the third input of c10d::send and c10d::recv_: the partner's place in the group."""
    inputs = cast("list[object]", arguments.get("Concrete Inputs") or [])
    value = str(inputs[2]) if len(inputs) > 2 else ""
    return _peer(value, group, rank)


def _peer(text: str, group: ProcessGroup, rank: int) -> int:
    return peer_rank(int(text), group, rank) if _A_RANK.fullmatch(text) else NOT_APPLICABLE


def _stated_bytes(arguments: Mapping[str, object]) -> int:
    """Count the bytes of the first input that has a shape (recorded with record_shapes)."""
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
