"""Write what was simulated as rank files, by the clocks of the hosts and as a tracer sees it."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.mill.engine import Engine, Turn
from benchmarks.grounds.mill.job import Job
from benchmarks.grounds.mill.program import Span
from benchmarks.grounds.mill.troubles import Floats
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity, Kind, Track
from megascan.vocabulary import collection_of, group_id

_ORIGIN_NS = 1_772_000_000_000_000_000
_CLOCK_MHZ = 1980.0
_POWER_CAP, _THERMAL, _POWER_BRAKE = 0x4, 0x20, 0x80  # reasons of low clocks, as NVML says them


def host_name(job: Job, host: int) -> str:
    """Return the name of a host."""
    return f"node{(job.seed * 7 + host * 3) % 4096:04d}"


class Writer:
    """Writes the files of one simulated job."""

    def __init__(self, engine: Engine, turns: Sequence[Turn]) -> None:
        self.engine, self.job, self.turns = engine, engine.job, turns
        job = self.job
        rng = np.random.default_rng((job.seed, 4))
        self.run_id = f"20260{1 + job.seed % 9}14-10{job.seed % 50:02d}00-{job.seed % 65536:04x}"
        offsets = rng.normal(0, job.offset_s, job.num_hosts)
        drifts = rng.normal(0, job.drift_ppm, job.num_hosts)
        hosts = [job.host_of(rank) for rank in range(job.num_ranks)]
        self.offset_s = offsets[hosts] + rng.normal(0, 8e-6, job.num_ranks)
        self.drift_ppm = drifts[hosts] + rng.normal(0, 0.2, job.num_ranks)
        self.phase = rng.uniform(0, 6.3, (2, job.num_hosts))[:, hosts]
        self.period_s = rng.uniform(8, 90, (2, job.num_hosts))[:, hosts]
        self.tie_s = rng.normal(0, 6e-6, (job.num_ranks, job.num_windows))
        self.rng = rng
        self.group_ids = {
            (axis, rank): group_id(axis, ranks)
            for axis, parts in engine.groups.items()
            for ranks in parts
            for rank in ranks
        }

    def write(self, folder: Path, spared: Sequence[int] = ()) -> None:
        """Write all files; what is lost is lost of a rank that is not among `spared`."""
        job = self.job
        losable = [rank for rank in range(job.num_ranks) if rank not in spared]
        victim = int(self.rng.choice(losable)) if job.lost and len(losable) > 2 else -1
        for rank in range(job.num_ranks):
            if rank == victim and (job.lost == "missing" or job.num_windows < 2):
                continue
            header = self._header(rank)
            windows = [self._window(rank, at) for at in range(job.num_windows)]
            parts = [b"[\n" + b",\n".join(encode_header(header))]
            parts += [b",\n" + b",\n".join(lines) for lines in windows]
            if rank == victim:  # killed in the middle of an append
                parts[-1] = parts[-1][: int(len(parts[-1]) * self.rng.uniform(0.2, 0.9))]
            else:
                parts.append(b"\n]\n")
            if job.compress:
                parts = [gzip.compress(part, 1, mtime=0) for part in parts]
            rank_file_path(folder, header).write_bytes(b"".join(parts))

    def _header(self, rank: int) -> RankHeader:
        job = self.job
        host = host_name(job, job.host_of(rank))
        uuid = f"GPU-{(job.seed * 2654435761 + rank) % 2**32:08x}-0000-4000-8000-{rank:012x}"
        groups = {
            group_id(axis, ranks): ranks
            for axis, parts in self.engine.groups.items()
            for ranks in parts
            if rank in ranks
        }
        versions = {"python": "3.12.3", "torch": "2.7.1"}
        return RankHeader(
            run_id=self.run_id,
            rank=rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(rank),
            groups=groups,
            host=host,
            process_id=2000 + rank,
            device=Device(
                kind="cuda", name="NVIDIA H100", index=rank % job.gpus_per_host, uuid=uuid
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:boot:{uuid}:{2000 + rank}",
                source="cuda-event",
                origin_unix_ns=_ORIGIN_NS + round(self.offset_s[rank] * 1e9),
            ),
            trace=TraceSettings(
                granularity=Granularity(job.granularity),
                interval=job.interval,
                window=job.window,
                compress=job.compress,
                layer_stride=job.layer_stride,
            ),
            versions=versions | ({"megatron-core": "0.16.1"} if job.is_megatron else {}),
        )

    def _clock(self, rank: int, times_s: Floats) -> list[int]:
        """Return what a rank's clock shows, in ns."""
        wander = np.zeros_like(times_s)
        for phase, period in zip(self.phase[:, rank], self.period_s[:, rank], strict=True):
            wander += np.sin(phase + times_s * (2 * np.pi / period)) - np.sin(phase)
        shown = times_s * (1 + 1e-6 * self.drift_ppm[rank]) + self.job.wander_s / 2 * wander
        return cast("list[int]", np.rint(shown * 1e9 + 1e6).astype(np.int64).tolist())

    def _window(self, rank: int, window: int) -> list[bytes]:
        turns = [turn for turn in self.turns if turn.window == window]
        records = [record for turn in turns for record in self._records(rank, turn)]
        stage = self.job.layout.coordinates(rank).pp
        chosen = {turn.number: self._recorded_layers(turn, stage) for turn in turns}
        layers = tuple((number, its) for number, its in chosen.items() if its is not None)
        lines = encode_spans(rank, records)
        first, last = turns[0].number, turns[-1].number
        return [
            *lines,
            encode_window(
                rank,
                WindowRecord(
                    run_id=self.run_id,
                    window=window,
                    first_iteration=first,
                    last_iteration=last,
                    num_spans=len(lines),
                    granularity=self.job.granularity,
                    interval=self.job.interval,
                    counters=self._counters(rank, turns),
                    tie_width_ns=int(self.rng.integers(20_000, 40_000)),
                    drift_ppm=float(self.drift_ppm[rank] * 0.05),
                    tokens=self._tokens(rank, turns),
                    layers=layers if self.job.granularity == "full" else (),
                    kinds=self._kinds(stage) if self.job.granularity == "full" else {},
                ),
            ),
        ]

    def _records(self, rank: int, turn: Turn) -> Iterator[SpanRecord]:
        job = self.job
        at = job.layout.coordinates(rank).pp
        stage, program = self.engine.stages[at], turn.programs[at]
        local = stage.place_of[rank]
        begins = self._clock(rank, turn.starts[at][:, local])
        ends = self._clock(rank, turn.ends[at][:, local])
        launched = self._clock(rank, turn.launched[at][:, local])
        tie_ns = round(self.tie_s[rank, turn.window] * 1e9)
        is_full = job.granularity == "full"
        layers = self._recorded_layers(turn, at)
        for span in program.spans:
            if not is_full and not span.is_base:
                continue
            if span.layer and layers is not None and span.layer not in layers:
                continue
            if span.kind is Kind.DATA and not stage.loads[local]:
                continue
            start = begins[span.first]
            args = {"iteration": turn.number, **span.args, **self._partners(rank, span)}
            if is_full and span.track != Track.HOST:
                args["launch_ns"] = launched[span.first] - start + tie_ns
            yield span.kind, span.name, span.track, start, ends[span.last] - start, args
        if is_full:
            yield from self._on_host(rank, turn)

    def _on_host(self, rank: int, turn: Turn) -> Iterator[SpanRecord]:
        number = {"iteration": turn.number}
        for who, generation, start, length in turn.collections:
            if who == rank:
                begin, end = self._clock(rank, np.array([start, start + length]))
                name = collection_of(generation)
                yield Kind.GC, name, Track.HOST, begin, end - begin, number
        for who, start, length in turn.saves:
            if who == rank:
                begin, end = self._clock(rank, np.array([start, start + length]))
                yield Kind.CHECKPOINT, "save-checkpoint", Track.HOST, begin, end - begin, number

    def _partners(self, rank: int, span: Span) -> dict[str, int | str]:
        """Return the arguments that differ between the ranks of a stage."""
        if not span.axis:
            return {}
        found: dict[str, int | str] = {"group": self.group_ids[span.axis, rank]}
        if span.peer >= 0:
            local = self.engine.stages[self.job.layout.coordinates(rank).pp].place_of[rank]
            found["peer"] = int(self.engine.stages[span.peer].ranks[local])
        return found

    # marks of windows

    def _numbers(self, stage: int) -> Iterator[list[tuple[int, str]]]:
        """Yield the layers of each chunk of a stage, with what they are."""
        job = self.job
        for number in range(stage, len(job.chunks), job.layout.pp):
            before = sum(map(len, job.chunks[:number]))
            yield list(enumerate(job.chunks[number], start=before + 1))

    def _recorded_layers(self, turn: Turn, stage: int) -> tuple[int, ...] | None:
        """Return the layers whose turn it is in an iteration; None: all."""
        stride = self.job.layer_stride
        if stride == 1 or turn is self.turns[0]:
            return None
        found: list[int] = []
        for layers in self._numbers(stage):
            own = [layer for layer, _ in layers]
            count = max(-(-len(own) // stride), min(2, len(own)))
            begin = turn.number * count
            found += sorted({own[(begin + it) % len(own)] for it in range(count)} if own else ())
        return tuple(found)

    def _kinds(self, stage: int) -> dict[str, tuple[int, ...]]:
        job = self.job
        if not job.has_kinds or any("m" in chunk for chunk in job.chunks):
            return {}
        extra = job.stage_extra[stage] if job.stage_extra else 1.0
        return kinds_of(
            (layer, EXPERTS if letter == "e" else f"{letter} {job.hidden} {extra}")
            for chunk in self._numbers(stage)
            for layer, letter in chunk
        )

    def _tokens(self, rank: int, turns: Sequence[Turn]) -> tuple[int, ...]:
        if not self.job.has_tokens or self.job.lengths == "packed":
            return ()
        own = self.job.tokens / self.job.layout.cp
        fewest = min(turn.tokens[0, rank] for turn in turns)
        return int(own * fewest), int(own * max(turn.tokens[1, rank] for turn in turns))

    def _counters(self, rank: int, turns: Sequence[Turn]) -> dict[str, float]:
        """Return what the device says at the end of a window: bursts may be over by then."""
        job, engine = self.job, self.engine
        if not job.has_counters:
            return {}
        at = job.layout.coordinates(rank).pp
        now = float(turns[-1].ends[at][-1, engine.stages[at].place_of[rank]])
        slow, reasons, heat = 1.0, 0, 0.0
        for fault in engine.worlds[0].faults:
            if rank in fault.ranks and "clock" in fault.rates and not fault.stops:
                own = fault.factor if fault.share == 1.0 and fault.holds(turns[-1].number) else 1.0
                for world, who, line, whose in engine.bursts.by_rate.get("clock", ()):
                    if world == 0 and who == rank and whose is fault:
                        own = 1 / line.rate_at(now)
                slow *= own
                if own > 1:
                    reasons |= _POWER_BRAKE if fault.host >= 0 else _THERMAL
                    heat = 12.0
        busy = 0.6 + 0.3 * self.rng.random()
        return {
            "sm_clock_mhz": float(15 * round(_CLOCK_MHZ / slow / 15)),
            "sm_clock_max_mhz": _CLOCK_MHZ,
            "clock_event_reasons": float(reasons or _POWER_CAP * (self.rng.random() < 0.2)),
            "power_w": round(120 + 560 * busy / slow, 3),
            "temperature_c": float(round(48 + 22 * busy + heat + self.rng.normal(0, 2))),
        }
