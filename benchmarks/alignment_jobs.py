"""Traces to align: jobs with planted skew, and production op tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.jobs import DATA, DEVICES, model, run_ranks
from megascan.arrays import Floats, Integers
from megascan.errors import InputError
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings
from megascan.reader import read_trace
from megascan.schema import SPAN_COLUMNS, Granularity, Track
from megascan.timeline import TRACE_SCHEMA, Completeness, Trace, numbers
from megascan.topology import Layout

EPOCH_NS = 1_750_000_000_000_000_000
MAX_OFFSET_NS, MAX_DRIFT = 100e6, 50e-6
JITTER_NS = 20e3
PERIOD_NS = 5_000_000
SLOW_RANK = 3


@dataclass(frozen=True)
class Skew:
    """Clocks of all ranks: local = true − offset_ns − drift · (true − origin_ns); (rank,)."""

    offset_ns: Floats
    drift: Floats
    origin_ns: int

    @classmethod
    def drawn(cls, num_ranks: int, seed: int, origin_ns: int = EPOCH_NS) -> Skew:
        """Uniform within the limits; the first rank's clock is the true one."""
        random = np.random.default_rng(seed)
        offset = random.uniform(-MAX_OFFSET_NS, MAX_OFFSET_NS, num_ranks)
        drift = random.uniform(-MAX_DRIFT, MAX_DRIFT, num_ranks)
        offset[0] = drift[0] = 0.0
        return cls(offset, drift, origin_ns)

    def local(self, rank: Integers, true_ns: Integers) -> Integers:
        """What the ranks' clocks show at true times."""
        age = (true_ns - self.origin_ns).astype(np.float64)
        shift = self.offset_ns[rank] + self.drift[rank] * age
        return true_ns - np.rint(shift).astype(np.int64)


def planted_job(layout: Layout, num_events: int, skew: Skew, seed: int) -> Trace:
    """Collectives that go round the axes of a layout, every 5 ms, as skewed clocks record them."""
    random = np.random.default_rng(seed + 1000)
    num_ranks = layout.world_size
    axes = [axis for axis in ("tp", "dp", "pp") if getattr(layout, axis) > 1]
    names = {
        (rank, axis): f"{axis}@{min(layout.group(rank, axis))}"
        for rank in range(num_ranks) for axis in axes
    }  # fmt: skip
    group_names = sorted(set(names.values()))
    code = {name: number for number, name in enumerate(group_names)}
    group = np.array([[code[names[rank, axis]] for axis in axes] for rank in range(num_ranks)])
    event, rank = np.arange(num_events), np.repeat(np.arange(num_ranks), num_events)
    end = (
        EPOCH_NS
        + (event + 1) * 5_000_000
        + np.rint(random.normal(0, JITTER_NS, (num_ranks, num_events))).astype(np.int64)
    )
    length = np.where(np.arange(num_ranks)[:, None] == SLOW_RANK, 300_000, 3_000_000)
    columns = {
        "rank": rank,
        "kind": _text("collective", len(rank)),
        "start_ns": skew.local(rank, (end - length).ravel()),
        "end_ns": skew.local(rank, end.ravel()),
        "iteration": np.tile(event // 100 + 1, num_ranks),
        "op": _text("all_reduce", len(rank)),
        "group": pa.DictionaryArray.from_arrays(
            pa.array(group[:, event % len(axes)].ravel().astype(np.int32)), group_names
        ),
        "sequence": np.tile(event, num_ranks),
    }
    groups = {name: layout.group(rank, axis) for (rank, axis), name in names.items()}
    return _trace(layout, range(num_ranks), groups, columns)


def gloo_run(folder: Path) -> Trace:
    """A small training on four processes of this host, traced in every iteration."""
    words = (
        *model(layers=4, hidden=64, heads=4, sequence=32),
        *("--tensor-model-parallel-size", "2", "--global-batch-size", "8"),
        *("--train-iters", "30", "--trace", "--trace-dir", str(folder), "--trace-interval", "1"),
        *("--continuous-trace-iterations", "1", "--transformer-impl", "local"),
    )
    run_ranks(4, ["training.pretrain_gpt", *words, *DATA, *DEVICES["cpu"]])
    return read_trace(folder)


def op_table_trace(path: Path) -> Trace:
    """A production op table as a trace; its steps, which have no absolute time, laid end to end.

    Data-parallel collectives join the ranks of a stage, the clipping norm all ranks, the embedding
    all-reduce the first and the last stage of a replica. Everything else is left out.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such op table; give a Parquet file of operations")
    table = pq.read_table(path)
    table = table.filter(pa.array(np.isin(strings(table, "optype"), [*_COLLECTIVES, *_MESSAGES])))
    optype, step = strings(table, "optype"), _integers(table, "step")
    dp_rank, stage = _integers(table, "dp_rank"), _integers(table, "stage")
    num_dp, num_stages = int(dp_rank.max()) + 1, int(stage.max()) + 1
    rank = stage * num_dp + dp_rank
    start_s, length_s = (table.column(name).to_numpy() for name in ("start_ts", "duration"))
    start_s, end_s = start_s.astype(np.float64), start_s.astype(np.float64) + length_s
    steps, number = np.unique(step, return_inverse=True)
    began_s = np.arange(len(steps)) * 1.1 * float(end_s.max())
    message = np.isin(optype, list(_MESSAGES))
    op = np.array([_MESSAGES.get(name, (name, "", 0))[0] for name in optype])
    hop = np.array([_MESSAGES.get(name, ("", "", 0))[2] for name in optype])
    columns = {
        "rank": rank,
        "kind": pa.array(np.where(message, "p2p", "collective")),
        "start_ns": EPOCH_NS + np.rint((began_s[number] + start_s) * 1e9).astype(np.int64),
        "end_ns": EPOCH_NS + np.rint((began_s[number] + end_s) * 1e9).astype(np.int64),
        "iteration": number + 1,
        "op": pa.array(op),
        "group": pa.array(_group_names(optype, dp_rank, stage)),
        "sequence": _integers(table, "seq_id"),
        "peer": np.where(message, rank + hop * num_dp, -1),
        "direction": pa.array([_MESSAGES.get(name, ("", "", 0))[1] for name in optype]),
    }
    layout = Layout(dp=num_dp, pp=num_stages)
    return _trace(layout, range(layout.world_size), _op_table_groups(layout), columns)


_COLLECTIVES = {
    "params-all-gather": "dp",
    "grads-reduce-scatter": "dp",
    "embedding-grads-all-reduce": "embedding",
    "optimizer-clip-main-grad": "world",
}
_MESSAGES = {
    "forward-send": ("send", "forward", 1),
    "forward-recv": ("recv", "forward", -1),
    "backward-send": ("send", "backward", -1),
    "backward-recv": ("recv", "backward", 1),
}


def _group_names(optype: np.ndarray, dp_rank: Integers, stage: Integers) -> list[str]:
    num_dp = int(dp_rank.max()) + 1
    place = {"dp": stage * num_dp, "embedding": dp_rank, "world": np.zeros_like(stage), "": stage}
    axes = [_COLLECTIVES.get(name, "") for name in optype]
    return [f"{axis}@{place[axis][row]}" if axis else "" for row, axis in enumerate(axes)]


def _op_table_groups(layout: Layout) -> dict[str, tuple[int, ...]]:
    groups = {"world@0": tuple(range(layout.world_size))}
    for rank in range(layout.world_size):
        members, stages = layout.group(rank, "dp"), layout.group(rank, "pp")
        groups[f"dp@{members[0]}"] = members
        groups[f"embedding@{stages[0]}"] = (stages[0], stages[-1])
    return groups


def _trace(
    layout: Layout,
    ranks: Sequence[int],
    groups: dict[str, tuple[int, ...]],
    columns: dict[str, npt.NDArray[np.int64] | pa.Array],
) -> Trace:
    """A trace from the columns that apply; `end_ns` stands for the duration."""
    columns["duration_ns"] = columns.pop("end_ns") - columns["start_ns"]
    num_rows = len(columns["rank"])
    table = pa.table(
        {
            column.name: columns[column.name]
            if column.name in columns
            else _text("", num_rows) if column.type == "text"
            else np.full(num_rows, Track.COMMUNICATION if column.name == "track" else -1)
            for column in SPAN_COLUMNS
        }
    ).cast(TRACE_SCHEMA)  # fmt: skip
    order = np.lexsort((numbers(table, "start_ns"), numbers(table, "rank")))
    members: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in ranks}
    for name, group in groups.items():
        for rank in group:
            members[rank][name] = group
    return Trace(
        run_id="benchmark",
        layout=layout,
        headers={rank: _header(layout, rank, members[rank]) for rank in ranks},
        spans=table.take(pa.array(order)),
        windows={},
        completeness=Completeness(world_size=layout.world_size, ranks=tuple(ranks)),
    )


def _header(layout: Layout, rank: int, groups: dict[str, tuple[int, ...]]) -> RankHeader:
    return RankHeader(
        run_id="benchmark",
        rank=rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(rank),
        groups=groups,
        host=f"host{rank}",
        process_id=rank,
        device=Device(kind="cuda", name="benchmark"),
        backend="nccl",
        clock=ClockOrigin(domain=f"clock {rank}", source="benchmark", origin_unix_ns=EPOCH_NS),
        trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
    )


def _text(value: str, num_rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, dtype=np.int32)), [value])


def strings(table: pa.Table, name: str) -> np.ndarray:
    """A text column as strings."""
    return np.asarray(table.column(name).cast(pa.string()).to_numpy())


def _integers(table: pa.Table, name: str) -> Integers:
    return np.asarray(table.column(name).to_numpy(), dtype=np.int64)
