"""Write down what a tracer would have recorded: each rank by the clock of its device and host.

A host's clock has an offset (milliseconds by NTP, microseconds by PTP), runs a little fast or slow,
wanders, and is set now and then. A device's time is tied to it within some microseconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.yard.jobs import Job
from benchmarks.grounds.yard.launching import Span
from benchmarks.grounds.yard.network import groups_of
from benchmarks.grounds.yard.scenario import Reading, Run
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    CLOSING,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity

_EPOCH_NS = 1_774_000_000_000_000_000
_KNOT_S = 0.5
_OFFSET_S = {"ntp": 2e-3, "ptp": 3e-6, "wandering": 1e-3, "stepping": 4e-3}
_DRIFT = {"ntp": 8e-6, "ptp": 1e-8, "wandering": 2e-5, "stepping": 1.5e-5}
_WANDER = {"ntp": 4e-7, "ptp": 1e-8, "wandering": 3e-6, "stepping": 4e-7}
_MOST_TIMINGS = 3  # of iterations that are not traced, after each window


@dataclass(frozen=True)
class _Clock:
    """A host's clock: knots of its error over the true time, and a step between two windows."""

    knots_s: NDArray[np.float64]
    errors_s: NDArray[np.float64]
    steps_at_s: float
    step_s: float

    def local(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the clock shows at true times."""
        error = np.interp(times_s, self.knots_s, self.errors_s)
        return np.asarray(times_s + error + self.step_s * (times_s > self.steps_at_s), np.float64)


def _clock_of(run: Run, host: int) -> _Clock:
    site, bounds = run.scenario.job.site, run.bounds
    kind = site.clocks
    rng = np.random.default_rng([run.scenario.seed, host, 7])
    knots = np.arange(0.0, bounds[-1][1] + 2 * _KNOT_S, _KNOT_S)
    rates = rng.normal() * _DRIFT[kind] + np.cumsum(rng.normal(size=len(knots))) * _WANDER[kind]
    errors = rng.normal() * _OFFSET_S[kind] + np.cumsum(rates) * _KNOT_S
    windows = _windows(run)
    steps_at, step = np.inf, 0.0
    if kind == "stepping" and host % 2 and len(windows) > 2:
        first = windows[len(windows) // 2][0]
        steps_at = (bounds[first - 1][1] + bounds[first][0]) / 2
        step = float(rng.choice([-1, 1])) * float(rng.uniform(0.3e-3, 0.9e-3))
    return _Clock(knots, errors, float(steps_at), step)


def _windows(run: Run) -> list[list[int]]:
    """Return the places of the iterations of each window."""
    found: dict[int, list[int]] = {}
    for place, number in enumerate(run.scenario.job.iterations):
        found.setdefault((number - 1) // run.scenario.job.interval, []).append(place)
    return list(found.values())


def _header(run: Run, rank: int, run_id: str) -> RankHeader:
    job, seed = run.scenario.job, run.scenario.seed
    layout, host = job.layout, job.site.host_of(rank)
    name = job.site.host_name(host, seed)
    rng = np.random.default_rng([seed, rank, 8])
    device = f"GPU-{uuid.UUID(bytes=rng.bytes(16))}"
    boot = uuid.UUID(bytes=np.random.default_rng([seed, host, 9]).bytes(16))
    process = 3000 + int(rng.integers(90)) + rank % job.site.ranks_per_host * 131
    settings = TraceSettings(
        granularity=Granularity(job.granularity), interval=job.interval, window=job.window
    )
    clock = ClockOrigin(
        domain=f"{name}:{boot}:{device}:{process}", source="cuda-event",
        origin_unix_ns=_EPOCH_NS + int(rng.integers(2_000_000)),
    )  # fmt: skip
    index = rank % job.site.ranks_per_host
    return RankHeader(
        run_id=run_id, rank=rank, world_size=job.num_ranks, layout=layout,
        coordinates=layout.coordinates(rank), host=name, process_id=process, backend="nccl",
        groups={f"{axis}@{each[0]}": each for axis, each in groups_of(layout, rank).items()},
        device=Device(kind="cuda", name=job.site.gpu.name, index=index, uuid=device),
        clock=clock, trace=settings,
        versions={"python": "3.12.3", "torch": "2.7.1", "megatron-core": "0.16.1"},
    )  # fmt: skip


def _records(
    spans: Sequence[Span], clock: _Clock, tie_s: float, origin_unix_ns: int
) -> Iterator[SpanRecord]:
    """Yield spans in the order in which they ended, by the clock of their rank."""
    ordered = sorted(spans, key=lambda span: span[4])
    times = np.array([span[3:5] for span in ordered]).reshape(-1, 2)
    shown = np.round((clock.local(times) + tie_s) * 1e9).astype(np.int64)
    shown += _EPOCH_NS - origin_unix_ns + 1_000_000_000
    for (kind, name, track, _, _, arguments), (start, end) in zip(
        ordered, shown.tolist(), strict=True
    ):
        yield kind, name, track, start, end - start, arguments


def _timings(run: Run, places: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return how long iterations took since the last window ended, traced ones and others."""
    job = run.scenario.job
    found = []
    if places[0]:
        before = places[0] - 1
        number = job.iterations[before]
        untraced = range(number + 1, job.iterations[places[0]])[:_MOST_TIMINGS]
        lasted = run.iteration_s[before]
        wander = np.random.default_rng([run.scenario.seed, number, 10]).normal(size=_MOST_TIMINGS)
        found = [
            (each, 2 if each == number + 1 else 0, int(lasted * (1 + 0.003 * luck) * 1e9))
            for each, luck in zip(untraced, wander, strict=False)
        ]
    found += [(job.iterations[each], 1, int(run.iteration_s[each] * 1e9)) for each in places[:-1]]
    return tuple(found)


def _tokens(run: Run, rank: int, places: Sequence[int]) -> tuple[int, ...]:
    """Return the fewest and the most tokens of a pass; none where sequences are packed."""
    job = run.scenario.job
    if job.lengths == "packed":
        return ()
    shares = run.load.tokens[job.layout.coordinates(rank).dp, list(places)]
    return round(shares.min() * job.tokens), round(shares.max() * job.tokens)


def _kinds(job: Job, stage: int) -> dict[str, tuple[int, ...]]:
    """Return which layers of a stage are alike: all, however many a stage has; experts are not."""
    words = f"TransformerLayer {job.hidden} {job.hidden_ffn} tp {job.tp}"
    return kinds_of(
        (layer, EXPERTS if job.experts else words)
        for chunk in range(job.vpp)
        for layer in job.layers_of(stage, chunk)
    )


def _counters(reading: Reading, highest_mhz: float) -> dict[str, float]:
    return {
        "sm_clock_mhz": reading.clock_mhz,
        "sm_clock_max_mhz": highest_mhz,
        "clock_event_reasons": reading.reasons,
        "power_w": reading.power_w,
        "temperature_c": reading.temperature_c,
    }


def _window(run: Run, rank: int, number: int, places: Sequence[int], run_id: str) -> WindowRecord:
    job = run.scenario.job
    reading = run.readings[places[-1]][rank]
    counters = _counters(reading, job.site.gpu.clock_mhz) if job.has_counters else {}
    return WindowRecord(
        run_id=run_id, window=number, granularity=job.granularity, interval=job.interval,
        first_iteration=job.iterations[places[0]], last_iteration=job.iterations[places[-1]],
        num_spans=sum(len(run.spans[rank][place]) for place in places),
        counters=counters, tie_width_ns=18_000 + (rank * 977 + number * 313) % 9_000,
        tokens=_tokens(run, rank, places),
        kinds=_kinds(job, job.layout.coordinates(rank).pp), timings=_timings(run, places),
    )  # fmt: skip


def _lines(run: Run, rank: int, header: RankHeader, clock: _Clock) -> list[bytes]:
    """Return a rank's file line by line."""
    ties = np.random.default_rng([run.scenario.seed, rank, 11])
    lines = encode_header(header)
    for number, places in enumerate(_windows(run)):
        spans = [span for place in places for span in run.spans[rank][place]]
        tie_s = float(ties.normal()) * 2e-6
        records = _records(spans, clock, tie_s, header.clock.origin_unix_ns)
        lines += encode_spans(rank, records)
        lines.append(encode_window(rank, _window(run, rank, number, places, header.run_id)))
    return lines


def write_files(run: Run, directory: Path) -> None:
    """Write the rank files of a run; some are lost or end in the middle of a line."""
    job, seed = run.scenario.job, run.scenario.seed
    directory.mkdir(parents=True, exist_ok=True)
    run_id = f"20260320-{seed % 240000:06d}-{seed % 65536:04x}"
    unlucky = np.random.default_rng([seed, 12]).permutation(job.num_ranks).tolist()
    missing, cut = unlucky[: job.missing], unlucky[job.missing : job.missing + job.cut]
    clocks = {
        host: _clock_of(run, host)
        for host in {job.site.host_of(rank) for rank in range(job.num_ranks)}
    }
    for rank in range(job.num_ranks):
        if rank in missing:
            continue
        header = _header(run, rank, run_id)
        body = b"[\n" + b",\n".join(_lines(run, rank, header, clocks[job.site.host_of(rank)]))
        body = body[: int(len(body) * 0.83)] if rank in cut else body + CLOSING
        rank_file_path(directory, header).write_bytes(body)
