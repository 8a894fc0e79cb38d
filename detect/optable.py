"""Read an op table (one Parquet row for each operation of each rank): as a replay, as observations.

The format is that of the public traces of "Understanding Stragglers in Large Model Training Using
What-if Analysis" (OSDI 2025); `docs/whatif.md` lists its columns. Arrow's own conversion to numpy
imports pandas, which takes longer than the whole analysis, so column buffers are read as they are,
and rows are placed in blocks that fit a processor's cache.

The dependencies come from one replica in one step and serve all. Rules, after that artifact:

    compute        one chain: all forwards and backwards
    p2p            four chains, one a type; the k-th receive comes before the k-th compute of its
                   direction, the k-th send after it; the k-th receive waits for compute k - 1
    parameters     params-all-gather of a chunk before its first forward; one chain with the
                   grads-reduce-scatters
    end            last compute, gc, layernorm, embedding, reduce-scatters, clip, optimizer

Such tables record one rank of each TP group, no bytes, no groups and no host; so a finding is good
up to the TP group, and links, loading and the host cannot be judged (`observe_op_table`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from detect.observe import operations
from detect.observe.members import Members, place_of
from detect.observe.observations import Observations
from detect.observe.operations import Work
from detect.observe.spans import sums_by_cell
from detect.report import Cause
from detect.whatif.graph import (
    BACKWARD,
    EACH_LANE,
    FORWARD,
    GC,
    NS_PER_S,
    OPTIMIZER,
    Graph,
    Group,
    Node,
    Replay,
    partition_of,
)
from detect.whatif.savings import ReplayedCosts
from megascan.arrays import Flags, Floats, Integers, Singles
from megascan.errors import InputError
from megascan.schema import NOT_APPLICABLE
from megascan.timeline import first_rows, number_type
from megascan.topology import Layout

_NUMBERS = ("dp_rank", "stage", "rank", "step", "seq_id", "mc")
_TIMES = ("start_ts", "duration")
_SIZES = ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size")

Column = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """Columns of an op table, (row,) each; `optype` codes into `optypes`, times in seconds.

    `gpus_per_worker` is how many GPUs one recorded rank stands for (a TP group records one of its
    members); `has_data_parallelism` whether gradients are reduced at all.
    """

    dp_rank: Column
    stage: Column
    rank: Column
    step: Column
    seq_id: Column
    mc: Column
    optype: Column
    optypes: tuple[str, ...]
    start_ts: Singles
    duration: Singles
    source: str = "op table"
    gpus_per_worker: int = 1
    has_data_parallelism: bool = True

    def __len__(self) -> int:
        return len(self.rank)


def read_op_table(path: Path) -> OpTable:
    """Read an op table, and the job's sizes from `meta-<name>.yaml` next to it if there is one.

    Raises InputError for a file that is not Parquet, lacks a column, has missing values or no rows.
    """
    table = _read(path)
    if not table.num_rows:
        raise InputError(f"{path} has no rows; record at least one step")
    columns = {name: _buffer(path, table, name) for name in _NUMBERS}
    start, duration = (_buffer(path, table, name).astype(np.float32, copy=False) for name in _TIMES)
    _check_values(path, columns, duration)
    codes, texts = _texts(path, table)
    sizes = _sizes(path, int(columns["dp_rank"].max()) + 1)
    return OpTable(
        **columns,
        optype=codes,
        optypes=texts,
        start_ts=start,
        duration=duration,
        source=path.name,
        gpus_per_worker=sizes["tp_size"] * sizes["dsp_size"],
        has_data_parallelism=sizes["dp_size"] * sizes["dsp_size"] > 1,
    )


def _check_values(path: Path, columns: dict[str, Column], duration: Singles) -> None:
    for name in ("dp_rank", "stage", "rank", "seq_id"):
        if columns[name].min() < 0:
            raise InputError(
                f"{path}: column {name!r} has {columns[name].min()}, expected 0 or more; every row "
                "is one operation of one rank"
            )
    if duration.min() < 0:
        raise InputError(
            f"{path}: an operation lasts {duration.min():.6f} s, expected 0 or more seconds"
        )


def _read(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    wanted = [*_NUMBERS, *_TIMES, "optype"]
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            table = file.read(columns=wanted)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}") from error
    for name in wanted:
        if name not in present:
            raise InputError(
                f"{path} has no column {name!r}, it has {', '.join(present)}; an op table has the "
                "columns that docs/whatif.md lists"
            )
    return table


def _chunk(path: Path, table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    array = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    if array.null_count:
        raise InputError(
            f"{path}: column {name!r} has {array.null_count} missing values in {len(array)} rows; "
            "an op table has none"
        )
    return array


def _view(array: pa.Array) -> Column:
    kind = number_type(array.type)
    values = np.frombuffer(array.buffers()[1], dtype=kind)
    return values[array.offset : array.offset + len(array)]


def _buffer(path: Path, table: pa.Table, name: str) -> Column:
    array = _chunk(path, table, name)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise InputError(f"{path}: column {name!r} is {array.type}, expected a number")
    return _view(array)


def _texts(path: Path, table: pa.Table) -> tuple[Column, tuple[str, ...]]:
    array = _chunk(path, table, "optype")
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.dictionary_encode()
    if not pa.types.is_dictionary(array.type):
        raise InputError(f"{path}: column 'optype' is {array.type}, expected text")
    return _view(array.indices), tuple(array.dictionary.to_pylist())


def _sizes(path: Path, num_replicas: int) -> dict[str, int]:
    """Read sizes from the `key: value` lines of the file next to the table; 1 where absent."""
    sizes = dict.fromkeys(_SIZES, 1) | {"dp_size": num_replicas}
    meta = path.with_name(path.name.replace("trace-", "meta-")).with_suffix(".yaml")
    if meta == path or not meta.is_file():
        return sizes
    for line in meta.read_text(encoding="utf-8").splitlines():
        key, _, value = map(str.strip, line.partition(":"))
        if key not in _SIZES:
            continue
        if not value.isdigit() or int(value) < 1:
            raise InputError(f"{meta}: {key} is {value!r}, expected 1 or more")
        sizes[key] = int(value)
    return sizes


_BLOCK_ROWS = 1 << 17
_MOST_COUNTED = 10_000_000


@dataclass(frozen=True)
class Steps:
    """Distinct step ids in order, how many rows each has, and the number of each row's step."""

    ids: Integers
    num_rows: Integers
    number: Integers
    """(row,): place in `ids`."""

    @classmethod
    def of(cls, step: Column) -> Steps:
        """Return the steps of a column."""
        first = int(step.min())
        offset = step.astype(np.int64) - first
        if offset.max() > _MOST_COUNTED:  # too far apart to be counted
            ids, number, num_rows = np.unique(offset, return_inverse=True, return_counts=True)
        else:
            counts = np.bincount(offset)
            ids, number = np.flatnonzero(counts), (np.cumsum(counts > 0) - 1)[offset]
            num_rows = counts[ids]
        return cls(ids + first, num_rows, number)

    @property
    def usual(self) -> int:
        """Return the id of the first step with the most common number of rows."""
        sizes, counts = np.unique(self.num_rows, return_counts=True)
        return int(self.ids[np.argmax(self.num_rows == sizes[np.argmax(counts)])])


def template(table: OpTable, step: int) -> tuple[list[Operation], Integers]:
    """Return the first replica's operations in a step; nodes by (stage, type, ordinal), or -1."""
    rows = np.flatnonzero((table.step == step) & (table.dp_rank == table.dp_rank.min()))
    sizes = int(table.stage.max()) + 1, len(table.optypes), int(table.seq_id.max()) + 1
    lookup = np.full(sizes, -1)
    operations = []
    for number, row in enumerate(rows):
        stage, code, ordinal = table.stage[row], table.optype[row], table.seq_id[row]
        lookup[stage, code, ordinal] = number
        start = float(table.start_ts[row])
        operation = Operation(
            number=number,
            stage=int(stage),
            optype=table.optypes[code],
            ordinal=int(ordinal),
            chunk=int(table.mc[row]),
            start_s=start,
            end_s=start + float(table.duration[row]),
        )
        operations.append(operation)
    return operations, lookup


def scatter(
    table: OpTable, lookup: Integers, steps: Steps, shape: tuple[int, int, int]
) -> tuple[Flags, Singles, Singles]:
    """Return (complete steps (step,), start, duration), the latter (node, lane, step) in seconds.

    A step with a missing, an extra or a repeated operation is not complete.
    """
    start = np.full(int(np.prod(shape)), np.nan, dtype=np.float32)
    duration = start.copy()
    odd = np.zeros(shape[2], dtype=np.bool_)
    for first in range(0, len(table), _BLOCK_ROWS):
        block = slice(first, first + _BLOCK_ROWS)
        node = lookup[table.stage[block], table.optype[block], table.seq_id[block]]
        number = steps.number[block]
        cell = (node * shape[1] + table.dp_rank[block]) * shape[2] + number
        begin, length = table.start_ts[block], table.duration[block]
        if node.min() < 0:
            odd[number[node < 0]] = True
            known = node >= 0
            cell, begin, length = cell[known], begin[known], length[known]
        start[cell], duration[cell] = begin, length
    odd |= steps.num_rows != shape[0] * shape[1]
    complete: Flags = np.asarray(~np.isnan(duration.reshape(shape)).any(axis=(0, 1)) & ~odd)
    return complete, start.reshape(shape), duration.reshape(shape)


GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE, EMBEDDING = "separate-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, LAYERNORM = "optimizer-clip-main-grad", "layernorm-grads-all-reduce"
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")
LOCAL_TYPES = frozenset((FORWARD, BACKWARD, OPTIMIZER, GC, LAYERNORM))
MEAN_TYPES = frozenset((FORWARD, BACKWARD, OPTIMIZER, GC))
"""Types whose ideal time is the mean; for all other types it is the median."""
TYPES = frozenset((*LOCAL_TYPES, *P2P, GATHER, SCATTER, SEPARATE, EMBEDDING, CLIP))

_TOLERANCE_S = 50e-6
_ALL_LANES = "all"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A row of the template replica; `number` is its node."""

    number: int
    stage: int
    optype: str
    ordinal: int
    chunk: int
    start_s: float
    end_s: float


def build_graph(operations: list[Operation], num_lanes: int, *, reduces_gradients: bool) -> Graph:
    """Return the graph of a step from one replica's `operations`, numbered from 0 without gaps."""
    stages = _stages(operations)
    edges: dict[int, set[int]] = {operation.number: set() for operation in operations}
    for stage in stages:
        for before, after in _edges(stage, len(stages), reduces_gradients):
            edges[after.number].add(before.number)
    return Graph(
        nodes=tuple(
            Node(
                stage=o.stage,
                optype=o.optype,
                is_local=o.optype in LOCAL_TYPES,
                microbatch=o.ordinal if o.optype in (FORWARD, BACKWARD) else -1,
                chunk=o.chunk,
            )
            for o in operations
        ),
        dependencies=tuple(tuple(sorted(edges[o.number])) for o in operations),
        groups=tuple(_groups(operations, stages)),
        partitions={_ALL_LANES: partition_of([0] * num_lanes)},
        finish=tuple(o.number for o in operations if o.optype == OPTIMIZER),
    )


class _Stage:
    """Operations of one stage by type, in order."""

    def __init__(self, number: int, operations: list[Operation]) -> None:
        self.number = number
        self.by_type: dict[str, list[Operation]] = defaultdict(list)
        for operation in operations:
            self.by_type[operation.optype].append(operation)
        self.computes = [o for o in operations if o.optype in (FORWARD, BACKWARD)]

    def __getitem__(self, optype: str) -> list[Operation]:
        return self.by_type.get(optype, [])

    def computes_of(self, optype: str) -> list[Operation]:
        """Return the computes of a p2p type's direction."""
        return self[FORWARD if optype.startswith("forward") else BACKWARD]


def _stages(operations: list[Operation]) -> list[_Stage]:
    by_stage: dict[int, list[Operation]] = defaultdict(list)
    for operation in sorted(operations, key=lambda o: (o.start_s, o.ordinal, o.optype)):
        by_stage[operation.stage].append(operation)
    return [_Stage(number, by_stage[number]) for number in range(max(by_stage) + 1)]


Edge = tuple[Operation, Operation]


def _edges(stage: _Stage, num_stages: int, reduces_gradients: bool) -> Iterator[Edge]:
    yield from pairwise(stage.computes)
    for optype in P2P:
        yield from pairwise(stage[optype])
        yield from _p2p_edges(stage, optype, num_stages)
    # the first backward exchanges are posted after the compute two before the first backward
    first = next((n for n, o in enumerate(stage.computes) if o.optype == BACKWARD), 0)
    if first >= 2:
        exchanges = stage["backward-send"][:1] + stage["backward-recv"][:1]
        yield from product([stage.computes[first - 2]], exchanges)
    yield from _parameter_edges(stage)
    yield from _tail(stage, stage[SCATTER] if reduces_gradients else [])


def _p2p_edges(stage: _Stage, optype: str, num_stages: int) -> Iterator[Edge]:
    computes = stage.computes_of(optype)
    if len(computes) != len(stage[optype]):
        computes = [o for o in computes if not _is_model_end(stage, optype, o.chunk, num_stages)]
    if optype.endswith("send"):
        yield from zip(computes, stage[optype], strict=False)
        return
    yield from zip(stage[optype], computes, strict=False)
    yield from zip(computes, stage[optype][1:], strict=False)


def _is_model_end(stage: _Stage, optype: str, chunk: int, num_stages: int) -> bool:
    """Return whether a compute lies at the end of the model where no such message is sent."""
    if optype in ("forward-recv", "backward-send"):
        return (stage.number, chunk) == (0, 0)
    last_chunk = max((o.chunk for o in stage.computes), default=0)
    return (stage.number, chunk) == (num_stages - 1, last_chunk)


def _parameter_edges(stage: _Stage) -> Iterator[Edge]:
    shared = sorted(stage[GATHER] + stage[SCATTER], key=lambda o: (o.start_s, o.ordinal, o.optype))
    yield from pairwise(shared)
    for gather in stage[GATHER]:
        first = next((o for o in stage[FORWARD] if o.chunk == gather.chunk), None)
        if first is not None:
            yield gather, first


def _chain(*parts: list[Operation]) -> Iterator[Edge]:
    """Yield edges that put each part after the one before it; empty parts are left out."""
    for before, after in pairwise([part for part in parts if part]):
        yield from product(before, after)


def _tail(stage: _Stage, scatters: list[Operation]) -> Iterator[Edge]:
    """Yield the end of a step; it may reduce a chunk's gradients right after its last backward."""
    ends = stage[CLIP], stage[OPTIMIZER]
    if not stage[SEPARATE]:
        reductions = stage[LAYERNORM], stage[EMBEDDING], scatters
        yield from _chain(stage.computes[-1:], stage[GC], *reductions, *ends)
        return
    for scatter in scatters:
        of_chunk = [o for o in stage[BACKWARD] if o.chunk == scatter.chunk]
        yield from _chain(of_chunk[-1:], [scatter])
    yield from _chain(stage.computes[-1:], stage[GC])
    before_layernorm = scatters[-1:] + (stage[GC] or stage.computes[-1:])
    reductions = stage[LAYERNORM], stage[EMBEDDING], stage[SEPARATE]
    yield from _chain(before_layernorm, *reductions, *ends)


def _groups(operations: list[Operation], stages: list[_Stage]) -> Iterator[Group]:
    groups = [*_pairs(stages), *_collectives(stages)]
    grouped = {node for group in groups for node in group.nodes}
    yield from groups
    for operation in operations:
        if operation.number not in grouped:
            yield Group(nodes=(operation.number,))


def _pairs(stages: list[_Stage]) -> Iterator[Group]:
    for number, stage in enumerate(stages):
        for direction, step in (("forward", 1), ("backward", -1)):
            peer = stages[(number + step) % len(stages)]
            sends = _valid(stage, f"{direction}-send", len(stages))
            receives = _valid(peer, f"{direction}-recv", len(stages))
            for send, receive in zip(sends, receives, strict=False):
                yield Group(nodes=(send.number, receive.number))


def _valid(stage: _Stage, optype: str, num_stages: int) -> list[Operation]:
    """Return the messages that carry something.

    A schedule may also log empty exchanges: a receive after its last compute has begun, a send
    before its first compute has ended, and, with several chunks, messages at the two ends of the
    model.
    """
    computes = stage.computes_of(optype)
    if not computes:
        return []
    if optype.endswith("recv"):
        limit = max(o.start_s for o in computes) + _TOLERANCE_S
        kept = [o for o in stage[optype] if o.start_s <= limit]
    else:
        limit = min(o.end_s for o in computes) - _TOLERANCE_S
        kept = [o for o in stage[optype] if o.end_s >= limit]
    chunks = [o.chunk for o in computes]
    if max(chunks) < 1 or len(stage[optype]) != len(computes):
        return kept
    return [o for o in kept if not _is_model_end(stage, optype, chunks[o.ordinal], num_stages)]


def _collectives(stages: list[_Stage]) -> Iterator[Group]:
    for stage in stages:
        for optype in (GATHER, SCATTER, SEPARATE):
            for operation in stage[optype]:
                yield Group(nodes=(operation.number,), partition=_ALL_LANES)
    for optype, partition in ((EMBEDDING, EACH_LANE), (CLIP, _ALL_LANES)):
        by_ordinal: dict[int, list[int]] = defaultdict(list)
        for stage in stages:
            for operation in stage[optype]:
                by_ordinal[operation.ordinal].append(operation.number)
        for nodes in by_ordinal.values():
            yield Group(nodes=tuple(nodes), partition=partition)


_CLOCK_GUARD_S = -0.010
"""A transfer that would have ended this long before its last member began is a clock error."""


def replay_of_op_table(table: OpTable) -> Replay:
    """Return graph and weights of an op table.

    Steps in which an operation of some rank is missing are left out and `notes` says so. Raises
    InputError when no step is complete or the table names an operation type that is not known.
    """
    used = np.flatnonzero(np.bincount(table.optype, minlength=len(table.optypes)))
    unknown = sorted({table.optypes[code] for code in used} - TYPES)
    if unknown:
        raise InputError(
            f"{table.source} has operations of type {', '.join(unknown)}, known are "
            f"{', '.join(sorted(TYPES))}; rename them in the op table"
        )
    steps = Steps.of(table.step)
    operations, lookup = template(table, steps.usual)
    num_lanes = int(table.dp_rank.max()) + 1
    shape = (len(operations), num_lanes, len(steps.ids))
    complete, start, duration = scatter(table, lookup, steps, shape)
    if not complete.any():
        raise InputError(
            f"{table.source} has no step with all {shape[0]} operations of all {num_lanes} "
            "replicas; record at least one complete step"
        )
    if not complete.all():
        start, duration = start[:, :, complete], duration[:, :, complete]
    end = start + duration
    graph = build_graph(operations, num_lanes, reduces_gradients=table.has_data_parallelism)
    ranks = np.full((graph.num_stages, num_lanes), -1, dtype=np.int64)
    ranks[table.stage, table.dp_rank] = table.rank
    gpus = "1 GPU" if table.gpus_per_worker == 1 else f"{table.gpus_per_worker} GPUs"
    weights = traced_weights(graph, start, duration)
    dropped = int((~complete).sum())
    return Replay(
        graph=graph,
        weights=weights,
        ideal=ideal_weights(graph, weights),
        ranks=ranks,
        steps=steps.ids[complete],
        measured=(end.max(axis=(0, 1)) - start.min(axis=(0, 1))).astype(np.float64),
        recorded=np.ones(ranks.shape, dtype=bool),
        instants=TableInstants(graph.stage, start, end),
        mates=np.arange(num_lanes),
        gpus_per_worker=table.gpus_per_worker,
        layout_text=f"DP {num_lanes} PP {graph.num_stages}, {gpus} to a recorded rank",
        labels={int(rank): f"DP{lane} PP{stage}" for (stage, lane), rank in np.ndenumerate(ranks)},
        columns=np.arange(num_lanes),
        row_labels=("",) * num_lanes,
        notes=(f"{dropped} incomplete steps left out",) if dropped else (),
    )


@dataclass(frozen=True)
class TableInstants:
    """When the operations of an op table took place; `stage` (node,), times (node, lane, step)."""

    stage: Integers
    start_s: Singles
    end_s: Singles

    def begin_ns(self, node: int, lane: int, step: int) -> int:
        """Return when the rank that ran a node began the step."""
        own = self.start_s[self.stage == self.stage[node], lane, step]
        return round(float(own.min()) * NS_PER_S)

    def ends_ns(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return when operations ended, from the step's begin."""
        ends = self.end_s[nodes, lanes, step].astype(np.float64)
        return np.asarray(np.rint(ends * NS_PER_S), dtype=np.int64)

    def rows(self, nodes: Integers, lanes: Integers, step: int) -> Integers:
        """Return -1: an op table holds no spans."""
        return np.full(len(nodes), NOT_APPLICABLE)


def traced_weights(graph: Graph, start: Singles, duration: Singles) -> Floats:
    """Return transfer times of communication, durations of all else, (node, lane, step).

    transfer = own end - last start of the group; what lies before it is waiting. Computed in
    float32, the resolution of the data, as the source does.
    """
    weights = duration.copy()
    for group in graph.groups:
        if graph.nodes[group.nodes[0]].is_local:
            continue
        last = start[list(group.nodes)].max(axis=0)
        if group.partition:
            last = last.max(axis=0, keepdims=True)  # op tables know all lanes or none
        for node in group.nodes:
            weights[node] = start[node] + duration[node] - last
    weights[weights <= _CLOCK_GUARD_S] = 0.0
    return weights.astype(np.float64)


def ideal_weights(graph: Graph, weights: Floats) -> Floats:
    """Return what each operation would take were all of its type alike, (node,).

    The mean over stages, microbatches, replicas and steps for what computes, the median for
    communication (and the layer norm's all-reduce), which a few late peers would distort.
    """
    ideal = np.zeros(len(graph.nodes))
    for optype in graph.optypes:
        nodes = graph.of_type(optype)
        pool = weights[nodes]
        ideal[nodes] = pool.mean() if optype in MEAN_TYPES else np.median(pool)
    return ideal


def observe_op_table(table: OpTable) -> Observations:
    """Return the compute of every recorded rank by step, direction and microbatch.

    Raises InputError for a table without compute operations.
    """
    steps, slot = np.unique(np.asarray(table.step, dtype=np.int64), return_inverse=True)
    ranks, row = np.unique(np.asarray(table.rank, dtype=np.int64), return_inverse=True)
    shape = (len(ranks), len(steps))
    duration = table.duration.astype(np.float64) * NS_PER_S
    is_compute = _is(table, FORWARD) | _is(table, BACKWARD)
    if not is_compute.any():
        raise InputError(f"{table.source} has no forward-compute or backward-compute operations")

    def sums(use: Flags) -> Floats:
        return sums_by_cell(row[use], slot[use], duration[use], shape)

    gc, optimizer = _is(table, GC), sums(_is(table, OPTIMIZER))
    members = _members(table, ranks, row)
    ends_ns = (table.start_ts + table.duration).astype(np.float64) * NS_PER_S
    longest_ns = np.zeros(len(steps))  # starts count from a step's first: it ends with its last end
    np.maximum.at(longest_ns, slot, ends_ns)
    return Observations(
        members=members,
        iterations=steps,
        iteration_ns=longest_ns,
        work=_work(table, row, slot, duration, shape),
        busy_ns=sums(is_compute) + optimizer,
        optimizer_ns=np.where(optimizer > 0, optimizer, np.nan),
        lost_ns={Cause.GC: sums(gc)} if gc.any() else {},
        host_gap_ns=np.full(shape, np.nan),
        stalled_ns=np.zeros(shape),
        stolen_ns=np.zeros(shape),
        completeness={
            "world_size": members.layout.world_size,
            "ranks": ranks.tolist(),
            "num_spans": len(table),
        },
        notes=_notes(table),
        source=table.source,
        costs=ReplayedCosts(partial(replay_of_op_table, table)),
    )


def _is(table: OpTable, name: str) -> Flags:
    code = table.optypes.index(name) if name in table.optypes else -1
    return np.asarray(table.optype == code)


def _work(
    table: OpTable, row: Integers, slot: Integers, duration: Floats, shape: tuple[int, int]
) -> Work:
    microbatch = np.asarray(table.seq_id, dtype=np.int64)
    forward, backward = _is(table, FORWARD), _is(table, BACKWARD)
    num_microbatches = int(microbatch[forward | backward].max()) + 1
    log_ns = np.full((*shape, 2 * num_microbatches), np.nan)
    for phase, use in ((operations.FORWARD, forward), (operations.BACKWARD, backward)):
        op = phase * num_microbatches + microbatch[use]
        log_ns[row[use], slot[use], op] = np.log(np.maximum(duration[use], 1.0))
    ops = np.arange(2 * num_microbatches)
    return Work(log_ns=log_ns, phase=ops // num_microbatches, microbatch=ops % num_microbatches)


def _members(table: OpTable, ranks: Integers, row: Integers) -> Members:
    first = first_rows(row, len(ranks))
    stage = np.asarray(table.stage, dtype=np.int64)[first]
    replica = np.asarray(table.dp_rank, dtype=np.int64)[first]
    layout = Layout(tp=table.gpus_per_worker, dp=int(replica.max()) + 1, pp=int(stage.max()) + 1)
    place = place_of([layout.coordinates(0)] * len(ranks)) | {"dp": replica, "pp": stage}
    blank = ("",) * len(ranks)
    return Members(
        layout=layout,
        ranks=ranks,
        place=place,
        labels=tuple(f"DP{d} PP{p}" for d, p in zip(replica, stage, strict=True)),
        hosts=blank,
        devices=blank,
        device_index=(0,) * len(ranks),
        workers=tuple((rank,) for rank in ranks.tolist()),
        device_kind="",
    )


def _notes(table: OpTable) -> tuple[str, ...]:
    notes = ["an op table holds no bytes, groups or host spans: links and hosts are not judged"]
    if table.gpus_per_worker > 1:
        notes.append(
            f"each recorded rank stands for {table.gpus_per_worker} GPUs (a TP group): a named "
            "rank may be any of the group that begins with it"
        )
    return tuple(notes)
