"""Declare what a trace is made of: kinds, phases, tracks, columns, header and window records.

Readers, writers, exporters and the format page follow these declarations; a column that is not
declared here does not exist. Times are int64 nanoseconds; Chrome's float microseconds appear only
in `megascan.rankfile`, `megascan.reader` and `megascan.export`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Literal

SCHEMA_VERSION = 1
HEADER_EVENT = "megascan"
WINDOW_EVENT = "megascan_window"
TIMELINE_EVENT = "megascan_timeline"

NOT_APPLICABLE = -1
"""Value of an integer column where it has no meaning (a forward pass has no peer).

Text columns have "" there.
"""
OWN_END = 2
"""In `end_is_bound`: what the rank does by itself follows a collective within its span."""


class Kind(StrEnum):
    """Kind of a span's work: the `cat` of its event, and its track in the timeline."""

    ITERATION = "iteration"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    P2P = "p2p"
    OPTIMIZER = "optimizer"
    DATA = "data"
    HOST = "host"
    GC = "gc"
    CHECKPOINT = "checkpoint"


COMMUNICATION_KINDS = (Kind.COLLECTIVE, Kind.P2P)


class Phase(StrEnum):
    """The pass that a compute span belongs to.

    RECOMPUTE is a forward repeated for activation checkpointing.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"


class Granularity(StrEnum):
    """How much is traced.

    FULL adds modules, every collective, garbage collection and checkpoints to BASE.
    """

    BASE = "base"
    FULL = "full"


class Track(IntEnum):
    """Thread id of a span in a rank file; no track has both device and host time.

    Spans of a track nest, except on OVERLAPPED, where communications of different groups cross.
    """

    COMPUTE = 1
    COMMUNICATION = 2
    HOST = 3
    OVERLAPPED = 4
    """Asynchronous communication, next to compute."""


ColumnType = Literal["int8", "int32", "int64", "text"]


@dataclass(frozen=True)
class Column:
    """One column of the span table.

    `event_key` is the column's place in an event of a rank file: a top-level key, or `args.<name>`.
    """

    name: str
    type: ColumnType
    unit: str
    meaning: str
    event_key: str


def _argument(name: str, column_type: ColumnType, unit: str, meaning: str) -> Column:
    return Column(name, column_type, unit, meaning, f"args.{name}")


SPAN_COLUMNS: tuple[Column, ...] = (
    Column("rank", "int32", "", "global rank that recorded the span", "pid"),
    Column("kind", "text", "", "kind of work, one of Kind", "cat"),
    Column(
        "name", "text", "", "operation: forward, attention, all_reduce, send_forward, …", "name"
    ),
    Column("track", "int8", "", "track in the rank file, one of Track", "tid"),
    Column(
        "start_ns",
        "int64",
        "ns",
        "start, unix time by the rank's own clock (`ts` is µs after clock.origin_unix_ns)",
        "ts",
    ),
    Column("duration_ns", "int64", "ns", "end minus start", "dur"),
    _argument(
        "iteration", "int32", "", "training iteration, from 1; none for saves between windows"
    ),
    _argument("microbatch", "int32", "", "microbatch within the iteration, from 0"),
    _argument("chunk", "int32", "", "model chunk (virtual pipeline stage) on this rank, from 0"),
    _argument(
        "layer", "int32", "", "global number of the transformer layer, from 1 as in Megatron"
    ),
    _argument("phase", "text", "", "forward, backward or recompute"),
    _argument("op", "text", "", "communication: all_reduce, all_gather, …, or send, recv for p2p"),
    _argument(
        "group", "text", "", "process group id: <axis>@<smallest member>, see RankHeader.groups"
    ),
    _argument(
        "sequence",
        "int64",
        "",
        "running number in the iteration, from 0: of the group and op, or of messages by "
        "sender, receiver and direction",
    ),
    _argument(
        "size_bytes",
        "int64",
        "byte",
        "payload handed to the operation by this rank (all-gather: its own part)",
    ),
    _argument("peer", "int32", "", "p2p: global rank at the other end"),
    _argument("direction", "text", "", "p2p: forward (activations) or backward (gradients)"),
    _argument(
        "cpu_ns", "int64", "ns", "CPU time of the launching thread during the span (CPU runs)"
    ),
    _argument(
        "end_is_bound",
        "int8",
        "",
        "1: asynchronous work whose completion cannot be timed; its end is the trainer's wait. 2: "
        "a collective and what the rank does by itself thereafter; members need not end together",
    ),
    _argument(
        "launch_ns", "int64", "ns", "GPU runs: host time of the launch, relative to start_ns"
    ),
)
"""Columns of a trace as recorded, in the order of the table."""

DERIVED_COLUMNS: tuple[Column, ...] = (
    _argument(
        "match", "int64", "", "id shared by the members of one collective or one send/recv pair"
    ),
    _argument("wait_ns", "int64", "ns", "communication: own start to last member's start"),
    _argument("transfer_ns", "int64", "ns", "communication: duration minus wait"),
    _argument("self_ns", "int64", "ns", "duration minus the synchronous communication inside"),
    _argument(
        "self_cpu_ns", "int64", "ns", "cpu_ns minus that of the communication inside (CPU runs)"
    ),
)
"""Columns that `aggregate` adds; `start_ns` is then on the job's common clock."""

TIMELINE_COLUMNS: tuple[Column, ...] = SPAN_COLUMNS + DERIVED_COLUMNS
