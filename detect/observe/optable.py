"""Op tables (Parquet, one row an operation of a rank) as observations.

The format is that of public production traces, see `detect.whatif.optable`. They record one rank of
each TP group, no bytes, no groups and no host; so a finding is good up to the TP group, and links,
loading and the host cannot be judged.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from detect.observe.observations import BACKWARD, FORWARD, Members, Observations, Work, place_of
from detect.report import Cause
from detect.whatif.optable import OpTable, replay_of_op_table
from detect.whatif.savings import ReplayedCosts
from megascan.arrays import Flags, Floats, Integers
from megascan.errors import InputError
from megascan.header import Json
from megascan.timeline import first_rows
from megascan.topology import Layout

NS_PER_SECOND = 1e9
PHASE_OF = {"forward-compute": FORWARD, "backward-compute": BACKWARD}


def observe_op_table(table: OpTable) -> Observations:
    """Compute of every recorded rank by step, direction and microbatch."""
    steps, slot = np.unique(np.asarray(table.step, dtype=np.int64), return_inverse=True)
    ranks, row = np.unique(np.asarray(table.rank, dtype=np.int64), return_inverse=True)
    row, slot = row.reshape(-1), slot.reshape(-1)
    shape = (len(ranks), len(steps))
    duration = table.duration.astype(np.float64) * NS_PER_SECOND
    named = {name: _is(table, name) for name in (*PHASE_OF, "optimizer", "gc")}
    gc = named["gc"]
    compute = named["forward-compute"] | named["backward-compute"]
    if not compute.any():
        raise InputError(f"{table.source} has no forward-compute or backward-compute operations")
    optimizer = _summed(row, slot, duration, named["optimizer"], shape)
    members = _members(table, ranks, row)
    return Observations(
        members=members,
        iterations=steps,
        iteration_ns=_step_times(table, slot, len(steps)),
        work=_work(table, row, slot, duration, shape),
        busy_ns=_summed(row, slot, duration, compute, shape) + optimizer,
        optimizer_ns=np.where(optimizer > 0, optimizer, np.nan),
        lost_ns={Cause.GC: _summed(row, slot, duration, gc, shape)} if gc.any() else {},
        host_gap_ns=np.full(shape, np.nan),
        stalled_ns=np.zeros(shape),
        stolen_ns=np.zeros(shape),
        completeness=_completeness(members, len(table)),
        notes=_notes(table),
        source=table.source,
        costs=ReplayedCosts(partial(replay_of_op_table, table)),
    )


def _is(table: OpTable, name: str) -> Flags:
    if name not in table.optypes:
        return np.zeros(len(table), dtype=bool)
    return np.asarray(table.optype == table.optypes.index(name))


def _summed(
    row: Integers, slot: Integers, duration: Floats, use: Flags, shape: tuple[int, int]
) -> Floats:
    flat = row[use] * shape[1] + slot[use]
    total = np.bincount(flat, weights=duration[use], minlength=shape[0] * shape[1])
    return np.asarray(total.reshape(shape), dtype=np.float64)


def _step_times(table: OpTable, slot: Integers, num_steps: int) -> Floats:
    """Return how long each step took: starts are relative to its first, so it ends with its last
    operation.
    """
    end = (table.start_ts + table.duration).astype(np.float64) * NS_PER_SECOND
    longest = np.zeros(num_steps)
    np.maximum.at(longest, slot, end)
    return longest


def _work(
    table: OpTable, row: Integers, slot: Integers, duration: Floats, shape: tuple[int, int]
) -> Work:
    microbatch = np.asarray(table.seq_id, dtype=np.int64)
    forward, backward = (_is(table, name) for name in PHASE_OF)
    num_microbatches = int(microbatch[forward | backward].max()) + 1
    log_ns = np.full((*shape, 2 * num_microbatches), np.nan)
    for phase, use in ((FORWARD, forward), (BACKWARD, backward)):
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


def _completeness(members: Members, num_spans: int) -> dict[str, Json]:
    return {
        "world_size": members.layout.world_size,
        "ranks": [int(rank) for rank in members.ranks],
        "num_spans": num_spans,
    }


def _notes(table: OpTable) -> tuple[str, ...]:
    notes = ["an op table holds no bytes, groups or host spans: links and hosts are not judged"]
    if table.gpus_per_worker > 1:
        notes.append(
            f"each recorded rank stands for {table.gpus_per_worker} GPUs (a TP group): a named "
            "rank may be any of the group that begins with it"
        )
    return tuple(notes)
