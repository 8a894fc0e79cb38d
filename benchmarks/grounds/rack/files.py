"""Write rank files as the tracer would, by the clocks of the ranks."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import numpy as np

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.rack.clocks import Clocks, draw_clocks
from benchmarks.grounds.rack.engine import Arguments, Row
from benchmarks.grounds.rack.hardware import Floats
from benchmarks.grounds.rack.job import Job
from benchmarks.grounds.rack.places import header_groups
from benchmarks.grounds.rack.readings import counters_of
from benchmarks.grounds.rack.run import Run
from benchmarks.grounds.rack.trouble import Trouble
from megascan.header import Activity, ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    CLOSING,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity, Track

_EPOCH_NS = 1_791_000_000_000_000_000
_VERSIONS = {
    "python": "3.12.3",
    "megascan": "0.1.0",
    "torch": "2.8.0+cu128",
    "megatron-core": "0.16.1",
}


def write_files(run: Run, troubles: tuple[Trouble, ...], directory: Path) -> None:
    """Write the file of every rank that is not missing."""
    job, clocks = run.job, draw_clocks(run.job)
    headers = list(_headers(job, clocks))
    lines = [encode_header(header) for header in headers]
    left: list[Row] = []
    for window in range(job.tracing.num_windows):
        records = _records(run, troubles, window)
        spans, left = _spans(run, clocks, window, left)
        for rank in range(job.num_ranks):
            record = _window(run, clocks, records[rank], (rank, window), len(spans[rank]))
            lines[rank] += [*encode_spans(rank, spans[rank]), encode_window(rank, record)]
    directory.mkdir(parents=True, exist_ok=True)
    for rank, header in enumerate(headers):
        if rank not in job.tracing.missing:
            text = b"[\n" + b",\n".join(lines[rank]) + CLOSING
            data = gzip.compress(text, 3, mtime=0) if job.tracing.compress else text
            rank_file_path(directory, header).write_bytes(data)


def _headers(job: Job, clocks: Clocks) -> Iterator[RankHeader]:
    draws = np.random.default_rng([job.seed, 8])
    rack, settings = job.rack, job.tracing
    boots = [UUID(bytes=draws.bytes(16)) for _ in range(rack.num_hosts)]
    for rank in range(job.num_ranks):
        host = rack.host_of(rank)
        uuid = f"GPU-{UUID(bytes=draws.bytes(16))}"
        process = 2400 + 3 * (rank % rack.gpus_per_host) + 500 * host
        origin_s = float(clocks.origins_s[rank] + clocks.offsets_s[rank])
        name = rack.host_names[host]
        is_full = settings.granularity is Granularity.FULL
        yield RankHeader(
            run_id=_run_id(job),
            rank=rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(rank),
            groups=header_groups(job.layout, rank),
            host=name,
            process_id=process,
            device=Device(
                kind="cuda", name=rack.chip.name, index=rank % rack.gpus_per_host, uuid=uuid
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{name}:{boots[host]}:{uuid}:{process}",
                source="cuda-event",
                origin_unix_ns=_EPOCH_NS + round(origin_s * 1e9),
            ),
            trace=TraceSettings(
                granularity=settings.granularity,
                interval=settings.interval,
                window=settings.window,
                compress=settings.compress,
                layer_stride=settings.layer_stride if is_full else 1,
            ),
            versions=_VERSIONS,
        )


def _span_of(run: Run, window: int) -> tuple[float, float]:
    """Return when a window begins and ends, true time."""
    size = run.job.tracing.window
    own = run.iterations[window * size : (window + 1) * size]
    return float(own[0].begin_s.min()) - 1e-3, float(own[-1].end_s.max()) + 1e-3


def _spans(
    run: Run, clocks: Clocks, window: int, left: list[Row]
) -> tuple[list[list[SpanRecord]], list[Row]]:
    """Return the spans of each rank in a window, and what is written with the next one.

    What happens behind a window's last iteration comes with the next window.
    """
    size = run.job.tracing.window
    own = run.iterations[window * size : (window + 1) * size]
    rows = list(left)
    for number, iteration in enumerate(own):
        for row in iteration.rows:
            row.arguments = {"iteration": iteration.number, **row.arguments}
        for row in iteration.between:
            row.arguments = {"iteration": iteration.number, **row.arguments}
        rows += iteration.rows
        if number < len(own) - 1:
            rows += iteration.between
    return _encoded(run, clocks, rows, window), own[-1].between


def _encoded(run: Run, clocks: Clocks, rows: list[Row], window: int) -> list[list[SpanRecord]]:
    """Return rows as spans by rank, in times of each rank."""
    ranks_of = np.array(run.where.ranks, dtype=np.int64)
    ranks = ranks_of[np.concatenate([row.places for row in rows])]
    blank = np.zeros(run.job.num_ranks)
    launched = [blank[: row.places.size] if row.launched is None else row.launched for row in rows]
    span = _span_of(run, window)

    def ns(times: list[Floats]) -> Floats:
        return np.round(clocks.ns(np.concatenate(times), ranks, window, span))

    begins = ns([row.begin for row in rows])
    durations = np.maximum(ns([row.end for row in rows]) - begins, 0.0).astype(np.int64).tolist()
    launches = (ns(launched) - begins).astype(np.int64).tolist()
    starts = begins.astype(np.int64).tolist()
    owners = ranks.tolist()
    found: list[list[SpanRecord]] = [[] for _ in range(run.job.num_ranks)]
    at = 0
    for row in rows:
        kind, name, track = row.kind.value, row.name, int(row.track)
        has_launch = row.launched is not None and row.track is not Track.HOST
        for place in range(row.places.size):
            arguments = _arguments(row, place)
            if has_launch:
                arguments["launch_ns"] = launches[at]
            found[owners[at]].append((kind, name, track, starts[at], durations[at], arguments))
            at += 1
    return found


def _arguments(row: Row, place: int) -> Arguments:
    arguments = dict(row.arguments)
    if row.groups is not None:
        arguments["group"] = row.groups[place]
    if row.peers is not None:
        arguments["peer"] = int(row.peers[place])
    if row.sizes is not None:
        arguments["size_bytes"] = round(int(arguments["size_bytes"]) * float(row.sizes[place]))
    return arguments


def _records(run: Run, troubles: tuple[Trouble, ...], window: int) -> list[dict[str, float]]:
    """Return the readings of each rank at a window's end; empty without `nvidia-ml-py`."""
    if not run.job.tracing.has_counters:
        return [{} for _ in range(run.job.num_ranks)]
    size = run.job.tracing.window
    return counters_of(run, troubles, (window + 1) * size - 1)


def _window(
    run: Run, clocks: Clocks, counters: dict[str, float], at: tuple[int, int], num_spans: int
) -> WindowRecord:
    rank, window = at
    settings = run.job.tracing
    numbers = settings.windows[window]
    begin, end = _span_of(run, window)
    drift = (clocks.ties_s[rank, window, 1] - clocks.ties_s[rank, window, 0]) / (end - begin)
    return WindowRecord(
        run_id=_run_id(run.job),
        window=window,
        first_iteration=numbers[0],
        last_iteration=numbers[-1],
        num_spans=num_spans,
        granularity=settings.granularity.value,
        interval=settings.interval,
        counters=counters,
        tie_width_ns=int(1e9 * clocks.widths_s[rank, window]),
        drift_ppm=round(float(1e6 * drift), 3) if end - begin > 2.0 else 0.0,
        tokens=_tokens(run, rank, window),
        layers=_layers(run, rank, window),
        kinds=_kinds(run, rank),
        timings=_timings(run, window),
    )


def _run_id(job: Job) -> str:
    seed = job.seed
    return f"20261005-{seed % 24:02d}{seed % 60:02d}{seed // 60 % 60:02d}-{seed % 65536:04x}"


def _tokens(run: Run, rank: int, window: int) -> tuple[int, ...]:
    """Return the fewest and the most tokens that the first chunk saw; none of packed sequences."""
    job = run.job
    if job.habits.is_packed:
        return ()
    size = job.tracing.window
    part = run.conditions.tokens[0, run.where.place_of[rank], window * size : (window + 1) * size]
    whole = job.model.tokens // job.layout.cp
    if job.layout.coordinates(rank).pp and job.habits.sequence_parallel:
        whole //= job.layout.tp
    return max(1, round(whole * float(part.min()))), max(1, round(whole * float(part.max())))


def _own_layers(job: Job, rank: int) -> list[int]:
    stage = job.layout.coordinates(rank).pp
    return [layer for chunk in job.model.layers[stage] for layer in chunk]


def _layers(run: Run, rank: int, window: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    size = run.job.tracing.window
    own, found = _own_layers(run.job, rank), []
    for at in range(window * size, (window + 1) * size):
        recorded = run.recorded[at]
        if recorded is not None:
            layers = tuple(layer for layer in own if layer in recorded)
            found.append((run.iterations[at].number, layers))
    return tuple(found)


def _kinds(run: Run, rank: int) -> dict[str, tuple[int, ...]]:
    """Return which layers of a rank are alike; those of a heavy stage are of another kind."""
    job, model = run.job, run.job.model
    more = run.conditions.stage[0, job.layout.coordinates(rank).pp]
    words = f"attention {model.hidden} by {model.kv_share}, gated mlp {model.ffn} x {more}"
    return kinds_of(
        (layer, EXPERTS if model.has_experts(layer) else words) for layer in _own_layers(job, rank)
    )


def _timings(run: Run, window: int) -> tuple[tuple[int, int, int], ...]:
    """Return durations since the last record; the window's own last iteration comes next time."""
    size = run.job.tracing.window
    found = []
    first = run.iterations[window * size]
    if window:
        last = run.iterations[window * size - 1]
        found.append((last.number, int(Activity.TRACED), _ns(last.end_s - last.begin_s)))
        shown = range(last.number + 1, first.number)[:32]
        for number in shown:
            is_next = number == last.number + 1
            activity = Activity.WRITING if is_next else Activity.NONE
            wobble = 1.0 + 0.004 * ((number * 2654435761 % 1000) / 500.0 - 1.0)
            found.append((number, int(activity), round(1e9 * first.skipped_s * wobble)))
    for iteration in run.iterations[window * size : (window + 1) * size - 1]:
        took = _ns(iteration.end_s - iteration.begin_s)
        found.append((iteration.number, int(Activity.TRACED), took))
    return tuple(found)


def _ns(times_s: Floats) -> int:
    return round(1e9 * float(np.median(times_s)))
