"""Write what a tracer on every rank would have written: each in the time of its own host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.grounds.fleet.hardware import host_clocks
from benchmarks.grounds.fleet.jobs import AXES, MS, US, Job
from benchmarks.grounds.fleet.trainer import Rank, Run, Span
from benchmarks.grounds.kinds import EXPERTS, kinds_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity

_STARTED_NS = 1_790_000_000_000_000_000
_RUN_ID = "20260921-140000-f1ee"
_TIE_NS = 28_000
_POWER_CAP = 0x4
_REASONS = {"hot_host": 0x40, "power_brake": 0x80}
"""NVML's bits for what holds a clock down: heat, the power supply's brake."""
_HOT_C = 88


def write_files(run: Run, seed: int, directory: Path) -> None:
    """Write the rank files of a run that was recorded; missing ranks leave none."""
    directory.mkdir(parents=True, exist_ok=True)
    clocks = host_clocks(run.job, seed)
    for rank in run.ranks:
        if rank.number in run.job.missing:
            continue
        draws = np.random.default_rng((seed, rank.number, 3))
        clock = clocks[run.job.host_of(rank.number)]
        begun = rank.begins[0] - 300 * MS * (1 + draws.random())
        origin = clock.shown(begun)
        header = _header(run.job, rank.number, _STARTED_NS + int(origin), draws)
        lines = encode_header(header)
        for number, spans in enumerate(rank.spans):
            tie = draws.uniform(-8, 8) * US if run.job.on_gpus else 0.0
            lines += encode_spans(
                rank.number,
                [_record(span, clock.shown, origin - tie) for span in _as_ended(spans)],
            )
            lines.append(encode_window(rank.number, _window(rank, number, len(spans), draws)))
        path = rank_file_path(directory, header)
        path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


def _as_ended(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.end)


def _record(span: Span, shown: Callable[[float], float], origin: float) -> SpanRecord:
    start = int(shown(span.start) - origin)
    end = int(shown(span.end) - origin)
    if "launch_ns" in span.args:
        span.args["launch_ns"] = int(span.launch - span.start + 7 * US)
    return span.kind, span.name, span.track, start, end - start, span.args


def _header(job: Job, rank: int, origin_ns: int, draws: np.random.Generator) -> RankHeader:
    host = f"node-{job.host_of(rank):02d}"
    process = 4100 + int(draws.integers(20000))
    uuid = f"GPU-{rank:08x}-5c1e-4f02-9a31-{rank * 7919:012x}" if job.on_gpus else ""
    boot = f"{host}:6b1d2c9a-0000-4000-8000-{job.host_of(rank):012d}"
    return RankHeader(
        run_id=_RUN_ID,
        rank=rank,
        world_size=job.num_ranks,
        layout=job.layout,
        coordinates=job.places[rank],
        groups={job.group(rank, axis): job.members(rank, axis) for axis in AXES},
        host=host,
        process_id=process,
        device=Device(
            kind="cuda" if job.on_gpus else "cpu",
            name=job.chip.name,
            index=rank % job.ranks_per_host if job.on_gpus else 0,
            uuid=uuid,
        ),
        backend="nccl" if job.on_gpus else "gloo",
        clock=ClockOrigin(
            domain=f"{boot}:{uuid}:{process}" if job.on_gpus else boot,
            source="cuda-event" if job.on_gpus else "monotonic",
            origin_unix_ns=origin_ns,
        ),
        trace=TraceSettings(
            granularity=Granularity(job.granularity),
            interval=job.interval,
            window=job.window,
            compress=False,
        ),
        versions={"python": "3.11.7", "torch": "2.11.0", "megatron-core": "0.16.1"},
    )


def _tokens(rank: Rank, number: int) -> tuple[int, ...]:
    """Return the fewest and the most tokens of a pass; none of packed data and hybrid models, where
    they are not all that counts, or of a class that nobody asks.
    """
    if rank.job.packed or "mamba" in rank.job.layers:
        return ()
    return min(rank.tokens[number]), max(rank.tokens[number])


def _kinds(job: Job, stage: int) -> dict[str, tuple[int, ...]]:
    """Return which layers of a stage are alike; nothing of hybrid models, whose class nobody
    asks.
    """
    if "mamba" in job.layers:
        return {}
    words = {"moe": EXPERTS, "dense": f"TransformerLayer {job.hidden} tp {job.tp}"}
    return kinds_of(
        (layer, words[job.layers[layer - 1]])
        for chunk in job.chunks[stage :: job.pp]
        for layer in chunk
    )


def _window(rank: Rank, number: int, num_spans: int, draws: np.random.Generator) -> WindowRecord:
    job, iterations = rank.job, rank.windows[number]
    lasted = dict(zip(job.iterations, zip(rank.begins, rank.ends, strict=True), strict=True))
    counters = {}
    if job.on_gpus and job.counters:
        moment = iterations[-1], lasted[iterations[-1]][1]
        slower, held_by = rank.clock_ratio(*moment), rank.clock_held_by(*moment)
        reasons = sum({_REASONS.get(kind, _POWER_CAP) for kind in held_by})
        counters = {
            "sm_clock_mhz": float(round(job.chip.clock_mhz / max(slower, 1.0) / 15) * 15),
            "sm_clock_max_mhz": job.chip.clock_mhz,
            "clock_event_reasons": 0.0 if slower < 1.03 else float(reasons or _POWER_CAP),
            "power_w": round(float(draws.normal(610, 25)) / max(slower, 1.0), 1),
            "temperature_c": float(round(draws.normal(_HOT_C if "hot_host" in held_by else 62, 4))),
        }
    return WindowRecord(
        run_id=_RUN_ID,
        window=number,
        first_iteration=iterations[0],
        last_iteration=iterations[-1],
        num_spans=num_spans,
        num_dropped=0,
        granularity=job.granularity,
        interval=job.interval,
        counters=counters,
        tie_width_ns=_TIE_NS if job.on_gpus else 0,
        drift_ppm=0.0,
        tokens=_tokens(rank, number),
        kinds=_kinds(job, rank.place.pp),
        timings=tuple((each, 1, int(lasted[each][1] - lasted[each][0])) for each in iterations),
    )
