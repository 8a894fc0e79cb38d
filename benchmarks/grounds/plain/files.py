"""Rank files of a run, by the clocks of its ranks, in the words of the real tracer.

Every GPU is a clock domain of its own: its host's clock, which is off by an offset and drifts, and
the tie of each window, which is off by a fraction of its width.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.plain.engine import Arguments, Row
from benchmarks.grounds.plain.job import Job, Model
from benchmarks.grounds.plain.machine import Floats, Ranks
from benchmarks.grounds.plain.run import Run
from benchmarks.grounds.plain.trouble import Hits, Trouble
from megascan.header import Activity, ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    CLOSING,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity

_EPOCH_NS = 1_790_000_000_000_000_000
_ORIGIN_S = 0.9
"""When tracing starts, in the time of a run."""
_VERSIONS = {"python": "3.11.9", "megascan": "0.1.0", "torch": "2.9.1+cu128"}
_MEASURED_DRIFT_PPM = 6.0


@dataclass(frozen=True, eq=False)
class _Clocks:
    """Turns true time into that of each rank's files."""

    offsets_s: Floats
    drifts: Floats
    ties_s: Floats
    """(rank, window)."""
    origins_s: Floats

    def ns(self, true_s: Floats, ranks: Ranks, window: int) -> Floats:
        """Return ns since the rank's origin."""
        past_s = true_s - self.origins_s[ranks]
        found = past_s * (1e9 + 1e3 * self.drifts[ranks]) + 1e9 * self.ties_s[ranks, window]
        return np.asarray(found, dtype=np.float64)


def write_files(job: Job, run: Run, troubles: tuple[Trouble, ...], directory: Path) -> None:
    """Write the file of every rank that is not missing."""
    draws = np.random.default_rng([job.seed, 3])
    clocks = _draw_clocks(job, draws)
    settings = job.tracing
    headers = list(_headers(job, clocks, draws))
    lines = [encode_header(header) for header in headers]
    for window in range(settings.num_windows):
        first = 1 + window * settings.interval
        last = first + settings.window - 1
        rows = [row for number in range(first, last + 1) for row in run.rows[number - 1]]
        spans = _spans(job, rows, clocks, window)
        counters = _counters(job, troubles, first, draws)
        widths_ns = job.machine.tie_width_s * draws.uniform(0.7, 1.6, job.num_ranks) * 1e9
        drifts = _MEASURED_DRIFT_PPM * draws.standard_normal(job.num_ranks)
        for rank in range(job.num_ranks):
            record = WindowRecord(
                run_id=headers[rank].run_id,
                window=window,
                first_iteration=first,
                last_iteration=last,
                num_spans=len(spans[rank]),
                granularity=settings.granularity.value,
                interval=settings.interval,
                counters=counters[rank],
                tie_width_ns=int(widths_ns[rank]),
                drift_ppm=round(float(drifts[rank]), 3) if settings.window > 4 else 0.0,
                tokens=_tokens(job, run, rank, first, last),
                layers=_layers(job, run, first, last),
                kinds=_kinds(job.model),
                timings=_timings(job, run, rank, first, last),
            )
            lines[rank] += [*encode_spans(rank, spans[rank]), encode_window(rank, record)]
    directory.mkdir(parents=True, exist_ok=True)
    for rank, header in enumerate(headers):
        if rank not in settings.missing:
            text = b"[\n" + b",\n".join(lines[rank]) + CLOSING
            data = gzip.compress(text, 3, mtime=0) if settings.compress else text
            rank_file_path(directory, header).write_bytes(data)


def _draw_clocks(job: Job, draws: np.random.Generator) -> _Clocks:
    machine, shape = job.machine, (job.num_ranks, job.tracing.num_windows)
    hosts = machine.host_of
    return _Clocks(
        offsets_s=np.array(machine.offsets_s)[hosts],
        drifts=np.array(machine.drifts_ppm)[hosts],
        ties_s=machine.tie_width_s * draws.uniform(-0.5, 0.5, shape),
        origins_s=_ORIGIN_S + draws.uniform(0.0, 0.02, job.num_ranks),
    )


def _headers(job: Job, clocks: _Clocks, draws: np.random.Generator) -> Iterator[RankHeader]:
    machine, settings, layout = job.machine, job.tracing, job.layout
    groups = job.groups()
    run_id = f"20261121-0845{job.seed % 60:02d}-{job.seed % 65536:04x}"
    boots = [f"{number:032x}" for number in draws.integers(1 << 62, size=machine.num_hosts)]
    for rank in range(job.num_ranks):
        host = int(machine.host_of[rank])
        uuid = f"GPU-{int(draws.integers(1 << 62)):016x}"
        process = 3000 + 7 * (rank % machine.gpus_per_host) + 100 * host
        name = machine.host_names[host]
        origin_s = float(clocks.origins_s[rank] + clocks.offsets_s[rank])
        yield RankHeader(
            run_id=run_id,
            rank=rank,
            world_size=job.num_ranks,
            layout=layout,
            coordinates=layout.coordinates(rank),
            groups={one.ids[rank]: one.members_of(rank) for one in groups.values()},
            host=name,
            process_id=process,
            device=Device(
                kind="cuda", name=machine.chip, index=rank % machine.gpus_per_host, uuid=uuid
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
                layer_stride=settings.layer_stride
                if settings.granularity is Granularity.FULL
                else 1,
            ),
            versions=_VERSIONS,
        )


def _spans(job: Job, rows: list[Row], clocks: _Clocks, window: int) -> list[list[SpanRecord]]:
    """Return the spans of each rank, in the order in which they were recorded."""
    numbers = np.arange(job.num_ranks)
    owners = [numbers[row.at] for row in rows]
    ranks: Ranks = np.concatenate(owners).astype(np.int64)
    begins = clocks.ns(np.concatenate([row.begin.at_s for row in rows]), ranks, window)
    ends = clocks.ns(np.concatenate([row.end_s for row in rows]), ranks, window)
    blank = np.zeros(job.num_ranks)
    launches = clocks.ns(
        np.concatenate(
            [
                blank[row.at] if row.begin.launched_s is None else row.begin.launched_s
                for row in rows
            ]
        ),
        ranks,
        window,
    )
    starts_ns = np.round(begins).astype(np.int64).tolist()
    durations = np.round(ends) - np.round(begins)
    durations_ns = np.maximum(durations, 0).astype(np.int64).tolist()
    relative_ns = np.round(launches - begins).astype(np.int64).tolist()
    found: list[list[SpanRecord]] = [[] for _ in numbers]
    place = 0
    is_full = job.tracing.granularity is Granularity.FULL
    for row, own in zip(rows, owners, strict=True):
        has_launch = is_full and row.begin.launched_s is not None
        kind, name, track = row.kind.value, row.name, int(row.track)
        for position, rank in enumerate(own.tolist()):
            if row.present is None or row.present[position]:
                arguments = _arguments(row, position, rank)
                if has_launch:
                    arguments["launch_ns"] = relative_ns[place]
                found[rank].append(
                    (kind, name, track, starts_ns[place], durations_ns[place], arguments)
                )
            place += 1
    return found


def _arguments(row: Row, position: int, rank: int) -> Arguments:
    arguments = dict(row.arguments)
    if row.groups is not None:
        arguments["group"] = row.groups.ids[rank]
    if row.sizes is not None:
        arguments["size_bytes"] = int(row.sizes[position])
    if row.peers:
        arguments["peer"] = row.peers[position]
    return arguments


def _tokens(job: Job, run: Run, rank: int, first: int, last: int) -> tuple[int, ...]:
    if not job.habits.tokens_known:
        return ()
    counts = [int(run.tokens[number - 1][rank]) for number in range(first, last + 1)]
    return min(counts), max(counts)


def _layers(job: Job, run: Run, first: int, last: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if job.tracing.granularity is not Granularity.FULL:
        return ()
    chosen = ((number, run.layers[number - 1]) for number in range(first, last + 1))
    return tuple((number, layers) for number, layers in chosen if layers is not None)


def _kinds(model: Model) -> dict[str, tuple[int, ...]]:
    """Return which layers of a rank are alike, also of a compiled model: those that cost alike.

    A plain model's layers are counted from 1 on every rank, and all stages of a pipeline have the
    same ones.
    """
    costs = zip(model.forward_s.tolist(), model.layer_bytes.tolist(), strict=True)
    return kinds_of(
        (number, EXPERTS if has_experts else f"Block of {size} bytes, {forward_s} s")
        for number, ((forward_s, size), has_experts) in enumerate(
            zip(costs, model.has_experts, strict=True), start=1
        )
    )


def _timings(
    job: Job, run: Run, rank: int, first: int, last: int
) -> tuple[tuple[int, int, int], ...]:
    """Return durations since the last record: the window's own last iteration comes next time."""
    tracing, found = job.tracing, []
    since = max(1, first - tracing.interval + tracing.window - 1)
    for number in range(since, last):
        activity = Activity.TRACED
        if not tracing.is_traced(number):
            is_next = tracing.is_traced(number - 1)
            activity = Activity.WRITING if is_next else Activity.NONE
        took_s = run.ends_s[number - 1][rank] - run.begins_s[number - 1][rank]
        found.append((number, int(activity), round(float(took_s) * 1e9)))
    return tuple(found)


def _counters(
    job: Job, troubles: tuple[Trouble, ...], iteration: int, draws: np.random.Generator
) -> list[dict[str, float]]:
    """Return what NVML says of each device, at a moment when it is idle or not."""
    if not job.tracing.has_counters:
        return [{} for _ in range(job.num_ranks)]
    clocks = job.machine.clock_mhz * draws.uniform(0.9, 1.0, job.num_ranks)
    warmth = draws.uniform(48, 66, job.num_ranks)
    reasons = np.zeros(job.num_ranks)
    for trouble in troubles:
        planted = trouble.planted
        if Hits.CLOCK in trouble.hits and trouble.holds(iteration) and planted.owner == "node":
            is_seen = draws.random() < planted.share_of_time
            for rank in trouble.ranks if is_seen else ():
                clocks[rank] /= planted.factor
                reasons[rank] = 0x20 if planted.kind == "throttling" else 0x8
    return [
        {
            "sm_clock_mhz": float(round(clocks[rank] / 15) * 15),
            "sm_clock_max_mhz": job.machine.clock_mhz,
            "clock_event_reasons": float(reasons[rank]),
            "power_w": round(float(draws.uniform(180, 640)), 3),
            "temperature_c": float(round(warmth[rank])),
        }
        for rank in range(job.num_ranks)
    ]
