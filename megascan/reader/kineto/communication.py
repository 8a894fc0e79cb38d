"""Find communication among a profile's events: the operation, between whom, how many bytes.

An NCCL kernel is described by the first of these that is found:

    its own arguments                torch 2.3 and newer: collective, group, ranks, elements
    `record_param_comms` around      torch 2.0 and newer: these arguments on the operator that
                                     launched the kernel
    operators before                 the messages of a batch that one kernel carries out: one event
    `nccl:coalesced`                 each, with the kernel's times
    `nccl:all_to_all` around         the annotation of torch 1.8 and newer: the operation only
    its name                         ncclKernel_AllReduce_…; a `SendRecv` may be anything

Without a GPU `record_param_comms` stands for the operation, and if a profile has none of these,
gloo's own annotation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megascan.arrays import Flags, Integers
from megascan.reader.kineto.document import (
    ANNOTATION,
    ON_DEVICE,
    ProcessGroup,
    Profile,
    is_rank,
    process_group,
    text_of,
)
from megascan.reader.kineto.host_side import Host
from megascan.schema import NOT_APPLICABLE
from megascan.vocabulary import COLLECTIVES, RECV, SEND, SEND_RECV, group_id

_OPERATIONS = tuple(
    (op, op.replace("_", "")) for op in sorted((*COLLECTIVES, SEND, RECV), key=len, reverse=True)
)
"""Our operations and their spelling within other names, the longest first: `reduce_scatter` before
`scatter`."""
_PEER_TO_PEER = "sendrecv"
"""NCCL runs batched sends and receives as one kernel of this name."""
_ITEM_BYTES = {
    "double": 8, "long": 8, "int": 4, "float": 4, "short": 2, "half": 2, "bfloat16": 2,
    "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip
_DEVICE_WORDS = (
    r"(?i)nccl|nvshmem|mscclpp|userbuffers|deep_ep|cross_device_reduce|multimem_"
    r"|(one|two)_shot_all_?reduce"
)
"""Kernels that communicate, and so may wait for other ranks: kernels of NCCL and RCCL, and of
libraries that write into other ranks' memory, whose kernels cannot be matched."""
_BATCH = "nccl:coalesced"
"""Torch's annotation around the launch of messages that were noted down before."""
_A_PAIR = re.compile(r"[0-9]+\s*(?:->|<-)\s*([0-9]{1,9})")
_MESSAGES = (SEND, RECV)
_A_RANK = re.compile(r"[0-9]{1,9}")
_MOST_ELEMENTS = 1 << 50
_DESCRIBED = (
    "Collective name", "Process Group Name", "Process Group Description", "Process Group Ranks",
    "dtype", "Src Rank", "Dst Rank", "Group size",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Communication events by row of the profile's table; messages of one batch share a row.

    `channel` numbers the events that are counted together (group and operation, or peer and
    direction); `is_matchable` marks events that may have a counterpart: messages, and collectives
    of known groups. `is_covered` marks all events that are communication or part of it, also if
    they are not among `rows`.
    """

    rows: Integers
    is_message: Flags
    is_matchable: Flags
    channel: Integers
    integers: Mapping[str, Integers]
    texts: Mapping[str, tuple[Integers, list[str]]]
    groups: tuple[ProcessGroup, ...]
    is_covered: Flags
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Operation:
    """Description of the communication of all events with the same arguments."""

    op: str
    group: ProcessGroup
    peer: int
    """The partner's global rank (until `_with_ranks_as_peers`: what is stated of it)."""
    item_bytes: int

    @property
    def name(self) -> str:
        return self.op or SEND_RECV


def communication_of(host: Host) -> Communication:
    """Find communication kernels; without a GPU `record_param_comms`, or else gloo's spans.

    The host's events around communication are covered, too.
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
    """Return whether a span stands for an operation of gloo: an annotation for collectives, the
    operator around it for messages, as only the operator says the peer.
    """
    return name.startswith("c10d::") or name not in ("gloo:send", "gloo:recv")


def _described(host: Host, rows: Integers, covered: Flags) -> Communication:
    """Describe events by their arguments, looking once at each distinct set of arguments."""
    profile = host.profile
    rows, says = _with_batches(host, rows, _describing(host, rows))
    events = profile.events.take(pa.array(says))
    keys = [pc.fill_null(events.column(name).cast(pa.string()), "") for name in _DESCRIBED]
    keys[0] = pc.if_else(pc.equal(keys[0], ""), _annotations(host, rows), keys[0])
    kernels = profile.events.column("name").take(pa.array(rows))
    joined = pc.binary_join_element_wise(*keys, kernels, "\x1f").combine_chunks()
    distinct = joined.dictionary_encode()
    everybody = _everybody(profile, rows)
    described = [one.split("\x1f") for one in distinct.dictionary.to_pylist()]
    operations = _with_ranks_as_peers(
        [_operation_of(words, profile, everybody) for words in described], profile.rank
    )
    code = np.asarray(distinct.indices, dtype=np.int64)
    elements = events.column("In msg nelems").fill_null(NOT_APPLICABLE).to_numpy()
    sizes = np.array([each.item_bytes for each in operations] or [0], dtype=np.int64)[code]
    stated = (elements >= 0) & (elements < _MOST_ELEMENTS) & (sizes > 0)
    sizes = np.where(stated, np.where(stated, elements, 0) * sizes, NOT_APPLICABLE)
    sequence = events.column("Seq").fill_null(NOT_APPLICABLE).to_numpy().copy()
    unsaid = [bool(each.op) and not each.group.id and each.peer < 0 for each in operations]
    unnamed = np.array([*unsaid, False])[code] & _of_profile(host, rows)
    notes = (
        f"rank {profile.rank}: communication does not say its process group (torch before 2.3) and "
        "runs on several streams: it is not matched",
    ) * bool(unnamed.any())
    return _communication(rows, (code, operations), (sizes, sequence), covered, notes)


def _of_profile(host: Host, rows: Integers) -> Flags:
    """Mark the events that were launched while the profile was recorded; all of them where no
    launches were. Of a kernel that was launched before, nothing but its name is recorded.
    """
    launched = host.launch[rows] != NOT_APPLICABLE
    return np.asarray(launched | ~launched.any())


def _describing(host: Host, rows: Integers) -> Integers:
    """Return the row whose arguments describe each event: its own, or the operator around it."""
    unsaid = np.asarray(pc.is_null(host.profile.events.column("Collective name")))[rows]
    around = host.enclosing(np.flatnonzero(_stated(host.profile)), rows)
    return np.where(unsaid & (around >= 0), around, rows)


def _with_batches(host: Host, rows: Integers, says: Integers) -> tuple[Integers, Integers]:
    """Return the events `rows` and the event that describes each; for a kernel that carries out a
    batch of messages, one entry for each message that its thread noted since the batch before.

        thread 1   send to 1, recv from 1, |── nccl:coalesced ──|      launches one SendRecv
    """
    profile = host.profile
    names = pc.fill_null(profile.events.column("name"), "")
    marks = np.flatnonzero(np.asarray(pc.equal(names, _BATCH)) & profile.of_category(ANNOTATION))
    batch = host.enclosing(marks, rows)
    launches = np.flatnonzero((says == rows) & (batch >= 0))
    if not len(launches):
        return rows, says
    said = pc.fill_null(profile.events.column("Collective name").cast(pa.string()), "")
    stated = np.asarray(pc.is_in(said, value_set=pa.array(_MESSAGES))) & _stated(profile)
    stated[says] = False  # they have kernels of their own
    notes = np.flatnonzero(stated)
    parts = {int(rows[place]): _noted(host, notes, marks, int(batch[place])) for place in launches}
    told = [
        noted if len(noted := parts.get(row, notes[:0])) else np.array([own])
        for row, own in zip(rows.tolist(), says.tolist(), strict=True)
    ]
    return np.repeat(rows, [len(each) for each in told]), np.concatenate(told)


def _noted(host: Host, notes: Integers, marks: Integers, batch: int) -> Integers:
    """Return the `notes` of messages that a batch carries out: on the batch's thread, since the
    batch before. `marks` are the rows of all batches.
    """
    begin = host.start[batch]
    earlier = marks[(host.thread[marks] == host.thread[batch]) & (host.start[marks] < begin)]
    since = host.end[earlier].max(initial=np.iinfo(np.int64).min)
    own = notes[host.thread[notes] == host.thread[batch]]
    return np.asarray(own[(host.start[own] >= since) & (host.start[own] < begin)])


def _annotations(host: Host, rows: Integers) -> pa.ChunkedArray:
    """Return the annotation that each event was launched in: `nccl:all_to_all`, or ""."""
    names = pc.fill_null(host.profile.events.column("name"), "")
    marks = np.asarray(pc.starts_with(names, "nccl:")) & host.profile.of_category(ANNOTATION)
    around = host.enclosing(np.flatnonzero(marks), rows)
    return pc.fill_null(names.take(pa.array(around, mask=around < 0)), "")


def _everybody(profile: Profile, rows: Integers) -> ProcessGroup:
    """Return the group of collectives that name no group: all ranks, if they run on one stream.

    Each communicator of a process has a stream of its own.
    """
    streams = profile.events.column("stream").take(pa.array(rows)).drop_null()
    return _world(profile) if len(streams.unique()) == 1 else ProcessGroup("", ())


def _world(profile: Profile) -> ProcessGroup:
    return ProcessGroup(group_id("world", [0]), tuple(range(profile.world_size or 0)))


def _unnamed(size: str, profile: Profile, everybody: ProcessGroup) -> ProcessGroup:
    """Return the group of a collective that names no group. If it gives the size (torch 2.1 and
    2.2), and the size is that of the job, the group is all ranks, on any stream.
    """
    if not size:
        return everybody
    return _world(profile) if size == str(profile.world_size) else ProcessGroup("", ())


def _operation_of(words: list[str], profile: Profile, everybody: ProcessGroup) -> _Operation:
    collective, name, description, ranks, dtype, source, target, size, kernel = words
    group = process_group(name, description, ranks, profile.groups)
    op = operation_name(collective) or operation_name(kernel)
    if op not in _MESSAGES:
        named = group if group.id or not op else _unnamed(size, profile, everybody)
        return _Operation(op, named, NOT_APPLICABLE, item_bytes(dtype))
    value = (target if op == SEND else source) or _partner(collective)
    return _Operation(op, group, _stated_number(value), item_bytes(dtype))


def _partner(annotation: str) -> str:
    """Return the other side's place in the group from `nccl:send 0->1`."""
    pair = _A_PAIR.search(annotation)
    return pair[1] if pair is not None else ""


def _with_ranks_as_peers(operations: list[_Operation], rank: int) -> list[_Operation]:
    """Return the operations of a `rank` with the global ranks of their partners, which a profile
    states by their places in the group or by their ranks: by their ranks if, in any message of the
    group, no other member has such a place.

    Example: rank 6 of the group {2, 6, 10, 14} receives from 2 and sends to 10. There is no place
    10, so 2 is the rank, too, and not the place of rank 10.
    """
    stated = {(one.group, one.peer) for one in operations if one.peer >= 0}
    by_rank = {group for group, number in stated if not _is_place(number, group, rank)}
    return [
        replace(one, peer=peer_rank(one.peer, one.group, rank, by_rank=one.group in by_rank))
        for one in operations
    ]


def _annotated(profile: Profile, rows: Integers, covered: Flags) -> Communication:
    """Describe gloo's spans, which name no group: they have one if all of the rank's are equal."""
    group = only_group(profile.groups.values(), profile.rank)
    names = profile.events.column("name")
    operations: dict[_Operation, int] = {}
    code, sizes = np.zeros((2, len(rows)), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        arguments = profile.shapes[row]
        op = operation_name(names[row].as_py().removeprefix("gloo:").removeprefix("c10d::"))
        peer = _stated_peer(arguments, group, profile.rank) if op in _MESSAGES else NOT_APPLICABLE
        operation = _Operation(op, group, peer, NOT_APPLICABLE)
        code[place] = operations.setdefault(operation, len(operations))
        sizes[place] = _stated_bytes(arguments)
    unnamed = bool(len(rows)) and not group.id
    notes = (f"rank {profile.rank}: gloo's spans do not say their process group",) * unnamed
    sequence = np.full(len(rows), NOT_APPLICABLE, dtype=np.int64)
    return _communication(rows, (code, list(operations)), (sizes, sequence), covered, notes)


def _stated_peer(arguments: Mapping[str, object], group: ProcessGroup, rank: int) -> int:
    """Read the third input of c10d::send and c10d::recv_: the partner's place in the group."""
    inputs = cast("list[object]", arguments.get("Concrete Inputs") or [])
    value = text_of(inputs[2]) if len(inputs) > 2 else ""
    return peer_rank(_stated_number(value), group, rank)


def _stated_number(text: str) -> int:
    return int(text) if _A_RANK.fullmatch(text) else NOT_APPLICABLE


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
    coded: tuple[Integers, list[_Operation]],
    numbers: tuple[Integers, Integers],
    covered: Flags,
    notes: tuple[str, ...] = (),
) -> Communication:
    (code, operations), (sizes, sequence) = coded, numbers
    is_message = np.array([each.op in (*_MESSAGES, "") for each in operations] or [False])[code]
    is_named = np.array([bool(each.group.id) for each in operations] or [False])[code]
    channels = [(each.op, each.group.id, each.peer) for each in operations]
    peers = np.array([each.peer for each in operations] or [0], dtype=np.int64)
    return Communication(
        rows=rows,
        is_message=is_message,
        is_matchable=is_message | is_named,
        channel=np.array([channels.index(one) for one in channels] or [0], dtype=np.int64)[code],
        integers={
            "size_bytes": sizes,
            "sequence": np.where(is_message, NOT_APPLICABLE, sequence),
            "peer": peers[code],
        },
        texts={
            "name": (code, [each.name for each in operations]),
            "op": (code, [each.op for each in operations]),
            "group": (code, [each.group.id for each in operations]),
        },
        groups=tuple({each.group for each in operations if each.group.id}),
        is_covered=covered,
        notes=notes,
    )


def operation_name(name: str) -> str:
    """Return our operation for a collective's or NCCL kernel's name; "" for a batch of messages."""
    plain = re.sub(r"[^a-z]", "", name.lower().removeprefix("nccldevkernel").removeprefix("nccl"))
    if _PEER_TO_PEER in plain:
        return ""
    return next((ours for ours, sign in _OPERATIONS if sign in plain), "")


def only_group(groups: Iterable[ProcessGroup], rank: int) -> ProcessGroup:
    """Return the group of a span that names no group, if all groups of the rank have the same
    members; else an empty group.
    """
    mine = [group for group in groups if rank in group.ranks]
    unlike = {group.ranks for group in mine}
    return mine[0] if len(unlike) == 1 else ProcessGroup("", ())


def peer_rank(value: int, group: ProcessGroup, rank: int, *, by_rank: bool = False) -> int:
    """Return the global rank of a message's partner, given its place in the group, or its rank if
    the group has no other member at that place, or if it goes `by_rank`.
    """
    if not by_rank and _is_place(value, group, rank):
        return group.ranks[value]
    return value if is_rank(value) and value != rank else NOT_APPLICABLE


def _is_place(value: int, group: ProcessGroup, rank: int) -> bool:
    """Return whether another member than `rank` has the place `value` in the group."""
    return 0 <= value < len(group.ranks) and group.ranks[value] != rank


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; NOT_APPLICABLE for a type we do not know."""
    if dtype.lower().startswith("float8"):
        return 1
    return _ITEM_BYTES.get(dtype.lower(), NOT_APPLICABLE)
