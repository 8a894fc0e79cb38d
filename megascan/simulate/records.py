"""What frames the spans of a simulated trace: headers, windows, completeness, run id."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.simulate.clocks import RankClocks
from megascan.simulate.grid import CROSS_STAGE_AXES, STAGE_AXES, Grid
from megascan.simulate.job import JobModel
from megascan.simulate.table import TableBuilder
from megascan.timeline import Completeness, Trace


def rank_headers(
    job: JobModel, grid: Grid, clocks: RankClocks, run_id: str
) -> dict[int, RankHeader]:
    """Headers of the recorded ranks."""
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for axis in (*STAGE_AXES, *CROSS_STAGE_AXES):
        for name, ranks in grid.members(axis).items() if grid.size(axis) > 1 else ():
            for rank in ranks:
                groups.setdefault(rank, {})[name] = ranks
    settings = TraceSettings(granularity=job.granularity, interval=job.interval, window=job.window)
    return {
        rank: _rank_header(
            job, clocks, run_id=run_id, rank=rank, groups=groups.get(rank, {}), settings=settings
        )
        for rank in range(job.layout.world_size)
        if rank not in job.missing_ranks
    }


def _rank_header(
    job: JobModel,
    clocks: RankClocks,
    *,
    run_id: str,
    rank: int,
    groups: dict[str, tuple[int, ...]],
    settings: TraceSettings,
) -> RankHeader:
    host, index = divmod(rank, job.ranks_per_host)
    on_gpu = job.device == "cuda"
    name = f"n{host:02d}"
    return RankHeader(
        run_id=run_id,
        rank=rank,
        world_size=job.layout.world_size,
        layout=job.layout,
        coordinates=job.layout.coordinates(rank),
        groups=groups,
        host=name,
        process_id=10_000 + rank,
        device=Device(
            kind=job.device,
            name="simulated GPU" if on_gpu else "simulated CPU",
            index=index if on_gpu else 0,
            uuid=f"SIM-{rank:06d}" if on_gpu else "",
        ),
        backend="nccl" if on_gpu else "gloo",
        clock=ClockOrigin(
            domain=name, source="simulated", origin_unix_ns=int(clocks.origins()[rank])
        ),
        trace=settings,
        versions={"simulator": "1"},
    )


def rank_windows(
    job: JobModel, run_id: str, iterations: list[int], table: pa.Table
) -> dict[int, tuple[WindowRecord, ...]]:
    """Finished windows of every recorded rank, with their span counts."""
    ranks = table.column("rank").to_numpy()
    numbers = (table.column("iteration").to_numpy() - 1) // job.interval
    num_windows = (iterations[-1] - 1) // job.interval + 1
    counts = np.bincount(
        ranks.astype(np.int64) * num_windows + numbers,
        minlength=job.layout.world_size * num_windows,
    ).reshape(-1, num_windows)
    spans = [
        [i for i in iterations if (i - 1) // job.interval == window]
        for window in range(num_windows)
    ]
    return {
        rank: tuple(
            WindowRecord(
                run_id=run_id,
                window=window,
                first_iteration=traced[0],
                last_iteration=traced[-1],
                num_spans=int(counts[rank, window]),
            )
            for window, traced in enumerate(spans)
        )
        for rank in range(job.layout.world_size)
        if rank not in job.missing_ranks
    }


def run_id_of(job: JobModel, faults: object, seed: int) -> str:
    """The same job, faults and seed have the same run id."""
    digest = hashlib.sha256(repr((job, faults, seed)).encode()).hexdigest()
    return f"simulated-{digest[:12]}"


def completeness_of(job: JobModel, num_spans: int) -> Completeness:
    """What the trace holds."""
    world = job.layout.world_size
    missing = tuple(sorted(set(job.missing_ranks)))
    return Completeness(
        world_size=world,
        ranks=tuple(rank for rank in range(world) if rank not in missing),
        missing_ranks=missing,
        num_spans=num_spans,
    )


def trace_of(builder: TableBuilder, run_id: str, iterations: list[int]) -> Trace:
    """The finished trace of the stages that were added."""
    job = builder.job
    table = builder.table()
    return Trace(
        run_id=run_id,
        layout=job.layout,
        headers=rank_headers(job, builder.grid, builder.clocks, run_id),
        spans=table,
        windows=rank_windows(job, run_id, iterations, table),
        completeness=completeness_of(job, table.num_rows),
    )
