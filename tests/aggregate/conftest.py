from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pytest

from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings
from megascan.schema import SPAN_COLUMNS, Granularity, Track
from megascan.timeline import TRACE_SCHEMA, Completeness, Trace
from megascan.topology import Layout

EPOCH_NS = 1_750_000_000_000_000_000
Row = Mapping[str, int | str]

_EMPTY: dict[str, int | str] = {
    column.name: "" if column.type == "text" else -1 for column in SPAN_COLUMNS
}


def span(rank: int, kind: str, name: str, start: int, end: int, **columns: int | str) -> Row:
    """A span from `start` to `end`, ns after EPOCH_NS, on the track its kind belongs to."""
    track = Track.COMMUNICATION if kind in ("collective", "p2p") else Track.COMPUTE
    return {
        **_EMPTY,
        "rank": rank,
        "kind": kind,
        "name": name,
        "track": int(track),
        "start_ns": EPOCH_NS + start,
        "duration_ns": end - start,
        "iteration": 1,
        **columns,
    }


def collective(rank: int, group: str, start: int, end: int, **columns: int | str) -> Row:
    defaults: dict[str, int | str] = {"op": "all_reduce", "group": group, "sequence": 0}
    return span(rank, "collective", "all_reduce", start, end, **(defaults | columns))


def send(rank: int, peer: int, start: int, end: int, **columns: int | str) -> Row:
    defaults: dict[str, int | str] = {"peer": peer, "op": "send", "direction": "forward"}
    return span(rank, "p2p", "send_forward", start, end, **(defaults | {"sequence": 0} | columns))


def receive(rank: int, peer: int, start: int, end: int, **columns: int | str) -> Row:
    defaults: dict[str, int | str] = {"peer": peer, "op": "recv", "direction": "forward"}
    return span(rank, "p2p", "recv_forward", start, end, **(defaults | {"sequence": 0} | columns))


def header(
    layout: Layout, rank: int, groups: Mapping[str, Sequence[int]], domain: str, device: str
) -> RankHeader:
    return RankHeader(
        run_id="run",
        rank=rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(rank),
        groups={name: tuple(members) for name, members in groups.items() if rank in members},
        host=domain,
        process_id=rank,
        device=Device(kind=device, name="test"),
        backend="gloo",
        clock=ClockOrigin(domain=domain, source="monotonic", origin_unix_ns=EPOCH_NS),
        trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
    )


def trace_of(
    spans: Sequence[Row] | pa.Table,
    groups: Mapping[str, Sequence[int]] | None = None,
    layout: Layout | None = None,
    *,
    domains: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    device: str = "cpu",
) -> Trace:
    """A trace of hand-made spans; every rank has a clock of its own unless `domains` says else."""
    layout = layout or Layout(dp=2)
    present = tuple(range(layout.world_size) if ranks is None else ranks)
    names = domains or [f"clock{rank}" for rank in range(layout.world_size)]
    table = spans if isinstance(spans, pa.Table) else table_of(spans)
    return Trace(
        run_id="run",
        layout=layout,
        headers={rank: header(layout, rank, groups or {}, names[rank], device) for rank in present},
        spans=table,
        windows={},
        completeness=Completeness(
            world_size=layout.world_size, ranks=present, num_spans=table.num_rows
        ),
    )


def table_of(rows: Sequence[Row]) -> pa.Table:
    ordered = sorted(rows, key=lambda row: (row["rank"], row["start_ns"], -int(row["duration_ns"])))
    columns = {name: [row[name] for row in ordered] for name in TRACE_SCHEMA.names}
    return pa.table({name: pa.array(values) for name, values in columns.items()}).cast(TRACE_SCHEMA)


def skewed_job(
    layout: Layout,
    num_events: int,
    *,
    period_ns: float = 5e6,
    offset_ns: np.ndarray | float = 0.0,
    drift: np.ndarray | float = 0.0,
    jitter_ns: float = 0.0,
    slow_rank: int = -1,
    seed: int = 0,
) -> tuple[Trace, np.ndarray]:
    """A job whose collectives alternate over the axes of its layout, in skewed clocks.

    Returns the trace and the true end of every event, ns after EPOCH_NS. The slow rank arrives
    late everywhere: its own spans are short and everybody else's long.
    """
    random = np.random.default_rng(seed)
    offset_ns = np.broadcast_to(offset_ns, layout.world_size)
    drift = np.broadcast_to(drift, layout.world_size)
    axes = [axis for axis in ("tp", "dp", "pp") if getattr(layout, axis) > 1]
    true_end = (np.arange(num_events) + 1) * period_ns
    groups, rows = {}, []
    for rank in range(layout.world_size):
        end = true_end + random.normal(0, jitter_ns, num_events)
        length = np.full(num_events, 0.1 if rank == slow_rank else 0.6) * period_ns
        for number in range(num_events):
            axis = axes[number % len(axes)]
            members = layout.group(rank, axis)
            name = f"{axis}@{min(members)}"
            groups[name] = members
            local_start, local_end = (
                round(time - offset_ns[rank] - drift[rank] * time)
                for time in (end[number] - length[number], end[number])
            )
            rows.append(
                collective(rank, name, local_start, local_end, sequence=number // len(axes))
            )
    return trace_of(rows, groups, layout, device="cuda"), true_end


class Build:
    """The functions of this file, for tests that cannot import it."""

    epoch_ns = EPOCH_NS
    span = staticmethod(span)
    collective = staticmethod(collective)
    send = staticmethod(send)
    receive = staticmethod(receive)
    table = staticmethod(table_of)
    trace = staticmethod(trace_of)
    skewed_job = staticmethod(skewed_job)


@pytest.fixture(scope="session")
def build() -> type[Build]:
    return Build
