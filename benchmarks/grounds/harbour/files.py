"""Write what was simulated as rank files, each by the clock of its host and the tie of its GPU.

Hosts differ by milliseconds and drift by some ppm; a GPU's time is tied to its host's clock once a
window, within some microseconds. A checkpoint's span lies on the host, before its iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.harbour.engine import Recorded
from benchmarks.grounds.harbour.hardware import generator
from benchmarks.grounds.harbour.jobs import Job
from benchmarks.grounds.harbour.network import group_size, members
from benchmarks.grounds.harbour.scenario import Outcome
from benchmarks.grounds.kinds import kinds_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import SpanRecord, encode_header, encode_spans, encode_window, rank_file_path
from megascan.schema import Granularity, Kind, Track

_EPOCH_NS = 1_790_000_000_000_000_000
_AXES = ("tp", "cp", "dp_cp", "ep", "expt_dp")
_BASE_AXES = ("dp_cp", "expt_dp")  # whose collectives granularity base keeps
_MODULES = ("transformer_layer", "attention", "mlp", "moe", "embedding", "output_layer",
            "core_attention")  # fmt: skip
_TIE_US = 6.0  # how far a GPU's time is off its host's, standard deviation
_CLOCK_MHZ, _SLOWEST_MHZ = 1980.0, 345.0
_TYPICAL_MHZ = 1755.0  # under full load, below the power cap


@dataclass(frozen=True)
class _Written:
    """Hold one operation's spans as they are recorded: ns, (iteration, rank of the stage)."""

    span: Recorded
    start: list[list[int]]
    duration: list[list[int]]
    launch: list[list[int]] | None
    there: list[list[bool]]


def write_files(outcome: Outcome, directory: Path) -> None:
    """Write the rank files of a job; ranks that are missing have none."""
    job = outcome.scenario.job
    directory.mkdir(parents=True, exist_ok=True)
    clocks = _Clocks(outcome)
    size = job.stage_size
    for stage in range(job.pp):
        kept = [one for one in outcome.spans[stage] if _is_kept(job, one)]
        written = [clocks.read(one, stage) for one in kept]
        for place in range(size):
            rank = stage * size + place
            if rank not in job.missing:
                _write_rank(outcome, rank, written, clocks, directory)


def _is_kept(job: Job, span: Recorded) -> bool:
    """Return whether a span is recorded at the job's granularity."""
    if job.granularity == "full" or span.kind is Kind.P2P:
        return True
    if span.kind is Kind.COLLECTIVE:
        return span.axis in _BASE_AXES
    return span.kind not in (Kind.GC, Kind.CHECKPOINT) and span.name.split("-")[0] not in _MODULES


class _Clocks:
    """Turn seconds of the simulation into what the clocks of hosts and GPUs say."""

    def __init__(self, outcome: Outcome) -> None:
        job = outcome.scenario.job
        site, num_ranks = job.site, job.num_ranks
        random = generator(outcome.scenario.seed, "clocks")
        host_of = np.arange(num_ranks) // site.ranks_per_host
        num_hosts = int(host_of[-1]) + 1
        offsets = site.clock_offset_ms * 1e6 * random.standard_normal(num_hosts)
        drifts = site.clock_drift_ppm * 1e-6 * random.standard_normal(num_hosts)
        ties = _TIE_US * 1e3 * random.standard_normal((len(job.iterations), num_ranks))
        window = np.array([_window_of(job, number) for number in job.iterations])
        self._offset = offsets[host_of]
        self._rate = 1 + drifts[host_of]
        self._tie = ties[np.searchsorted(window, window)]  # one a window
        self._begins_s = outcome.begins_s + 30.0
        self._size = job.stage_size
        self._tells_launches = job.granularity == "full"

    def read(self, span: Recorded, stage: int) -> _Written:
        """Return an operation's spans by the clocks of its ranks."""
        on_host = span.track is Track.HOST
        start, end = (self._ns(each, stage, on_host) for each in (span.start, span.end))
        launch = None
        if span.launch is not None and self._tells_launches and not on_host:
            launch = (self._ns(span.launch, stage, True) - start).tolist()
        there = ~np.isnan(span.start)
        return _Written(
            span, start.tolist(), np.maximum(0, end - start).tolist(), launch, there.tolist()
        )

    def _ns(self, times: NDArray[np.float64], stage: int, on_host: bool) -> NDArray[np.int64]:
        mine = slice(stage * self._size, (stage + 1) * self._size)
        ns = (np.nan_to_num(times) + self._begins_s[:, None]) * 1e9 * self._rate[mine]
        ns = ns + self._offset[mine] + (0.0 if on_host else self._tie[:, mine])
        return np.rint(ns).astype(np.int64)


def _window_of(job: Job, iteration: int) -> int:
    """Return the number of the window in which an iteration is traced."""
    return (iteration - 1) // job.interval if job.window < job.interval else (iteration - 1) // 2


def _write_rank(
    outcome: Outcome, rank: int, written: list[_Written], clocks: _Clocks, directory: Path
) -> None:
    job = outcome.scenario.job
    header = _header(outcome, rank)
    lines = encode_header(header)
    numbers = list(enumerate(job.iterations))
    by_window = groupby(numbers, key=lambda pair: _window_of(job, pair[1]))
    for count, (_, iterations) in enumerate(by_window):
        traced = list(iterations)
        spans = [record for one in traced for record in _records(job, rank, written, one)]
        spans.sort(key=lambda record: record[3] + record[4])
        lines += encode_spans(rank, spans)
        lines.append(encode_window(rank, _mark(outcome, rank, count, traced, len(spans))))
    rank_file_path(directory, header).write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")


def _records(
    job: Job, rank: int, written: list[_Written], traced: tuple[int, int]
) -> Iterator[SpanRecord]:
    """Yield the spans of one rank in one iteration, given its place and its number."""
    own, (place, number), groups = rank % job.stage_size, traced, _ids_of_groups(job, rank)
    for one in written:
        if not one.there[place][own]:
            continue
        span = one.span
        before = span.kind is Kind.CHECKPOINT  # the trainer's last iteration is still current
        arguments: dict[str, int | str] = {**span.facts, "iteration": number - before}
        if span.axis:
            arguments["group"] = groups[span.axis]
        if span.kind is Kind.P2P:
            arguments["peer"] = rank + span.peer
        if one.launch is not None:
            arguments["launch_ns"] = one.launch[place][own]
        yield (
            span.kind, span.name, span.track, one.start[place][own], one.duration[place][own],
            arguments,
        )  # fmt: skip


def _groups(job: Job, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the members of each group of a rank that is used, by axis."""
    stage = rank // job.stage_size
    found = {
        axis: next(group for group in members(job, axis, stage) if rank in group)
        for axis in _AXES
        if group_size(job, axis) > 1 and (axis not in ("ep", "expt_dp") or job.experts)
    }
    place, size = rank % job.stage_size, job.stage_size
    stages = range(job.pp)
    found["pp"] = tuple(one * size + place for one in stages)
    first = place - place % job.tp
    found["mp"] = tuple(
        one * size + each for one in stages for each in range(first, first + job.tp)
    )
    found["world"] = found["intra_dist_opt"] = tuple(range(job.num_ranks))
    return found


@lru_cache(maxsize=256)
def _ids_of_groups(job: Job, rank: int) -> dict[str, str]:
    """Return the ids of a rank's groups by axis."""
    return {axis: f"{axis}@{group[0]}" for axis, group in _groups(job, rank).items()}


def _header(outcome: Outcome, rank: int) -> RankHeader:
    job, seed = outcome.scenario.job, outcome.scenario.seed
    host = host_name(job, rank)
    return RankHeader(
        run_id=f"20270301-080000-{seed % 65536:04x}",
        rank=rank,
        world_size=job.num_ranks,
        layout=job.layout,
        coordinates=job.layout.coordinates(rank),
        groups={f"{axis}@{group[0]}": group for axis, group in _groups(job, rank).items()},
        host=host,
        process_id=2000 + rank,
        device=Device(
            kind="cuda",
            name=job.chip.name,
            index=rank % job.site.ranks_per_host,
            uuid=f"GPU-{seed & 0xFFFFFFFF:08x}-{rank:04x}",
        ),
        backend="nccl",
        clock=ClockOrigin(
            domain=f"{host}:{job.chip.name}:{2000 + rank}",
            source="cuda-event",
            origin_unix_ns=_EPOCH_NS,
        ),
        trace=TraceSettings(
            granularity=Granularity(job.granularity), interval=job.interval, window=job.window
        ),
    )


def host_name(job: Job, rank: int) -> str:
    """Return the name of a rank's host."""
    return f"quay{job.host_of(rank):02d}"


def _mark(
    outcome: Outcome, rank: int, window: int, traced: list[tuple[int, int]], num_spans: int
) -> WindowRecord:
    """Return the end mark of a window."""
    job = outcome.scenario.job
    places = [place for place, _ in traced]
    tokens: tuple[int, ...] = (job.sequence, job.sequence)
    if job.lengths == "packed":
        tokens = ()
    elif job.lengths:
        own = outcome.lengths[:, places, rank] * job.sequence
        tokens = (int(own.min()), int(own.max()))
    counters: dict[str, float] = {}
    if job.reads_devices:
        slow = float(outcome.felt.products[places[-1], rank])
        clock = min(_CLOCK_MHZ, max(_SLOWEST_MHZ, _TYPICAL_MHZ / slow))
        counters = {"sm_clock_mhz": float(round(clock / 15) * 15), "sm_clock_max_mhz": _CLOCK_MHZ}
    return WindowRecord(
        run_id=f"20270301-080000-{outcome.scenario.seed % 65536:04x}",
        window=window,
        first_iteration=traced[0][1],
        last_iteration=traced[-1][1],
        num_spans=num_spans,
        granularity=job.granularity,
        interval=job.interval,
        counters=counters,
        tie_width_ns=int(4 * _TIE_US * 1e3),
        tokens=tokens,
        kinds=kinds_of(
            job.words(rank // job.stage_size, float(outcome.felt.layer[places[0], rank]))
        ),
    )
