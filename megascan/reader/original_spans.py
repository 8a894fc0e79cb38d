"""Scopes of the original MegaScan in our columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.errors import InputError
from megascan.reader.building import running_numbers, span_table
from megascan.reader.original_names import Operation, operations_of
from megascan.reader.original_records import Recorded
from megascan.schema import COMMUNICATION_KINDS, NOT_APPLICABLE, Kind, Phase, Track
from megascan.topology import Layout

Integers = npt.NDArray[np.int64]

_DECODER = "decoder"


def original_spans(one: Recorded, layout: Layout, step_starts: Integers) -> pa.Table:
    """Spans of TRACE_SCHEMA; iteration k begins at `step_starts[k - 1]`.

    An exchange (send and receive at once) becomes two spans of the same times, each with half of
    the bytes. A message at the end of the pipeline, where nothing is sent, becomes host time.
    """
    microbatch, in_backward = _passes(one)
    scope, operation, table = _operations(one)
    shares = np.bincount(scope, minlength=len(one.row))[scope]
    data = one.data_bytes[scope]
    data = np.where(data > 0, data // shares, data)
    negative = one.end_ns < one.start_ns
    if negative.any():
        raise InputError(
            f"{one.path}: {int(negative.sum())} scopes end before they begin; the file is damaged, "
            "restore it or move it away and pass --allow-missing-ranks"
        )
    repeated = in_backward[scope] & _lookup(table, operation, "phase", Phase.FORWARD)
    phases = [item.phase for item in table]
    keys = one.step[scope] * len(table) + _channel(table)[operation]
    communicates = np.isin(operation, _communicating(table))
    members = [_group(layout, one.place.rank, item) for item in table]
    peers = np.array([_peer(layout, one.place.rank, item) for item in table], dtype=np.int64)
    return span_table(
        len(scope),
        {
            "rank": one.place.rank,
            "track": np.array([item.track for item in table], dtype=np.int64)[operation],
            "start_ns": step_starts[one.step[scope]] + one.start_ns[scope],
            "duration_ns": (one.end_ns - one.start_ns)[scope],
            "iteration": one.step[scope] + 1,
            "microbatch": microbatch[scope],
            "chunk": one.chunk[scope],
            "sequence": np.where(communicates, running_numbers(keys), NOT_APPLICABLE),
            "size_bytes": data,
            "peer": peers[operation],
        },
        {
            "kind": (operation, [str(item.kind) for item in table]),
            "name": (operation, [item.name for item in table]),
            "phase": (
                np.where(repeated, len(phases), operation),
                [*phases, str(Phase.RECOMPUTE)],
            ),
            "op": (operation, [item.op for item in table]),
            "group": (operation, members),
            "direction": (operation, [item.direction for item in table]),
        },
    )


def _operations(one: Recorded) -> tuple[Integers, Integers, list[Operation]]:
    """(scope of each span, its operation's number, operations), spans in the order of scopes."""
    table: list[Operation] = []
    first: list[list[int]] = []
    silent: list[int] = []
    for name in one.names:
        found = operations_of(name)
        first.append([*range(len(table), len(table) + len(found))])
        table += found
        silent.append(len(table))
        table.append(Operation(kind=Kind.HOST, name=name, track=Track.HOST))
    is_message = np.array([operations_of(name)[0].kind is Kind.P2P for name in one.names])
    is_silent = is_message[one.name] & (one.data_bytes <= 0)
    number = np.where(
        is_silent, np.array(silent)[one.name], np.array([a[0] for a in first])[one.name]
    )
    second = np.array([a[1] if len(a) > 1 else NOT_APPLICABLE for a in first])[one.name]
    twice = np.flatnonzero((second >= 0) & ~is_silent)
    scope = np.concatenate((np.arange(len(one.row)), twice))
    operation = np.concatenate((number, second[twice]))
    order = np.argsort(scope, kind="stable")
    return scope[order], operation[order], table


def _lookup(table: list[Operation], operation: Integers, field: str, value: str) -> Integers:
    return np.array([getattr(item, field) == value for item in table])[operation]


def _communicating(table: list[Operation]) -> list[int]:
    return [number for number, item in enumerate(table) if item.kind in COMMUNICATION_KINDS]


def _channel(table: list[Operation]) -> Integers:
    """Operations that are numbered together: of one group, op and direction."""
    channels = [(item.axis, item.op, item.direction) for item in table]
    return np.array([channels.index(channel) for channel in channels], dtype=np.int64)


def _group(layout: Layout, rank: int, operation: Operation) -> str:
    if not operation.axis:
        return ""
    return f"{operation.axis}@{min(layout.group(rank, operation.axis))}"


def _peer(layout: Layout, rank: int, operation: Operation) -> int:
    """The stage a message goes to or comes from."""
    if operation.kind is not Kind.P2P:
        return NOT_APPLICABLE
    ahead = (operation.direction == "forward") == (operation.op == "send")
    stages = layout.group(rank, "pp")
    return stages[(stages.index(rank) + (1 if ahead else -1)) % len(stages)]


def _passes(one: Recorded) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Microbatch of each scope, handed down from the pass it stands in; and which are in a
    backward pass. Files without passes count decoders within the step instead."""
    names = np.array([*one.names, ""])
    passes = np.isin(
        one.name, [n for n, text in enumerate(names) if text.startswith(("forward", "backward"))]
    )
    microbatch = one.microbatch.copy()
    if not passes.any():
        passes = (names[one.name] == _DECODER) & (one.depth == 1)
        microbatch[passes] = running_numbers(one.step[passes])
    if not passes.any():
        return microbatch, np.zeros(len(passes), dtype=np.bool_)
    begin, end = one.row[passes], one.row_end[passes]
    around = np.searchsorted(begin, one.row, side="right") - 1
    inside = (around >= 0) & (one.row <= end[around])
    within = np.where(inside, microbatch[passes][around], NOT_APPLICABLE)
    backward = np.char.startswith(names[one.name[passes]], "backward")[around]
    return np.where(microbatch < 0, within, microbatch), inside & backward & ~passes
