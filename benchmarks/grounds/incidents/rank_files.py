"""Write rank files, as the tracer of a Megatron-Core or plain PyTorch job on GPUs leaves them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.grounds.incidents.clocks import Clocks
from benchmarks.grounds.incidents.engine import Span, Spec
from benchmarks.grounds.incidents.hardware import Floats
from benchmarks.grounds.incidents.jobs import HSDP, MEGATRON, Job
from benchmarks.grounds.incidents.simulation import Outcome
from benchmarks.grounds.incidents.trainers import Data
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import encode_header, encode_window, rank_file_path
from megascan.schema import Granularity

_ORIGIN_S = 40.0
"""How long before its first traced iteration a process takes the origin of its clock."""
_AXES_OF_STAGE = ("tp", "cp", "dp", "dp_cp", "ep", "expt_dp")


def groups_of(job: Job) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return each rank's process groups by axis."""
    layout, lanes = job.layout, job.lanes
    found: dict[int, dict[str, tuple[int, ...]]] = {rank: {} for rank in range(job.num_ranks)}

    def note(axis: str, members: tuple[int, ...]) -> None:
        for rank in members:
            found[rank][axis] = members

    everybody = tuple(range(job.num_ranks))
    if job.trainer != MEGATRON:
        _note_plain(job, found)
        return found
    for stage in range(layout.pp):
        first = stage * lanes
        grid = np.arange(first, first + lanes)
        cube = grid.reshape(layout.dp, layout.cp, layout.tp)
        rows = {
            "tp": grid.reshape(-1, layout.tp),
            "cp": cube.transpose(0, 2, 1).reshape(-1, layout.cp),
            "dp": cube.transpose(1, 2, 0).reshape(-1, layout.dp),
            "dp_cp": grid.reshape(-1, layout.tp).T,
            "ep": grid.reshape(-1, layout.ep),
            "expt_dp": grid.reshape(-1, layout.ep).T,
        }
        for axis in _AXES_OF_STAGE:
            for row in rows[axis].tolist():
                note(axis, tuple(row))
    for lane in range(lanes):
        pipeline = tuple(lane + stage * lanes for stage in range(layout.pp))
        note("pp", pipeline)
        if layout.pp > 1:
            note("embd", (pipeline[0], pipeline[-1]))
    for first in range(0, lanes, layout.tp):
        note(
            "mp",
            tuple(
                stage * lanes + first + one
                for stage in range(layout.pp)
                for one in range(layout.tp)
            ),
        )
    note("intra_dist_opt", everybody)
    note("world", everybody)
    return found


def _note_plain(job: Job, found: dict[int, dict[str, tuple[int, ...]]]) -> None:
    everybody = tuple(range(job.num_ranks))
    hosts = job.cluster.hosts
    shard = max(int((hosts == hosts[0]).sum()), 2)
    for rank, own in found.items():
        if job.trainer != HSDP:
            own["dp"] = everybody
            continue
        first = rank - rank % shard
        own["shard"] = tuple(range(first, first + shard))
        own["replicate"] = tuple(range(rank % shard, job.num_ranks, shard))
        own["world"] = everybody


_PLAIN_AXES = {"shard": "dp-dp_shard", "replicate": "dp-dp_replicate"}


def windows_of(job: Job) -> list[list[int]]:
    """Return places of traced iterations by window."""
    windows: dict[int, list[int]] = {}
    for place, iteration in enumerate(job.tracing.iterations):
        windows.setdefault((iteration - 1) // job.tracing.interval, []).append(place)
    return list(windows.values())


class _Rows:
    """The spans of one stage in one window, as columns over its lanes."""

    def __init__(self, spans: list[Span]) -> None:
        self.specs = [span.spec for span in spans]
        self.iterations = [span.iteration for span in spans]
        self.begin = np.array([span.begin for span in spans])
        self.end = np.array([span.end for span in spans])
        none = np.full(self.begin.shape[1:], np.nan)
        self.launch = np.array([none if one.launch is None else one.launch for one in spans])
        self.sizes = {place: one.sizes for place, one in enumerate(spans) if one.sizes is not None}
        self.whom = {place: one.whom for place, one in enumerate(spans) if one.whom is not None}


def write_rank_files(job: Job, outcome: Outcome, directory: Path, *, goes_on: bool = False) -> None:
    """Write the files of all ranks but those that are missing, or append to those of an earlier
    run; `goes_on`: another run will.
    """
    windows = windows_of(job)
    whose = {job.tracing.iterations[place]: n for n, own in enumerate(windows) for place in own}
    groups = groups_of(job)
    first = min(float(spans[0].begin.min()) for spans in outcome.spans)
    begins = iteration_begins(job, outcome)
    clocks = Clocks(job, begins - first)
    for stage, spans in enumerate(outcome.spans):
        parts: list[list[Span]] = [[] for _ in windows]
        for span in spans:
            if span.spec.kind != "step":
                parts[whose[span.iteration]].append(span)
        rows = [_Rows(part) for part in parts]
        for lane, rank in enumerate(job.ranks_of(stage)):
            if rank in job.tracing.missing:
                continue
            writer = _Writer(job, outcome, rank, lane, groups[rank])
            pieces = [*writer.pieces(rows, windows, clocks, first)]
            if rank in job.tracing.torn:
                last = pieces.pop()
                pieces.append(last[: int(len(last) * 0.6)])
            elif not goes_on:
                pieces.append(b"\n]\n")
            path = rank_file_path(directory, writer.header)
            pieces[0] = (b",\n" if path.exists() else b"[\n") + pieces[0]
            packed = (gzip.compress(one, 3) if job.tracing.compress else one for one in pieces)
            with path.open("ab") as file:
                file.write(b"".join(packed))


def iteration_begins(job: Job, outcome: Outcome) -> Floats:
    """Return when each traced iteration begins, by the first stage's first rank."""
    found = {
        span.iteration: float(span.begin[0])
        for span in outcome.spans[0]
        if span.spec.kind == "iteration"
    }
    return np.array([found[iteration] for iteration in job.tracing.iterations])


class _Writer:
    """Writes the file of one rank."""

    def __init__(
        self, job: Job, outcome: Outcome, rank: int, lane: int, groups: dict[str, tuple[int, ...]]
    ) -> None:
        self.job, self.outcome, self.rank, self.lane = job, outcome, rank, lane
        self.groups = {
            axis: f"{_PLAIN_AXES.get(axis, axis)}@{min(ranks)}" for axis, ranks in groups.items()
        }
        self.header = self._header({self.groups[axis]: groups[axis] for axis in groups})
        self._known: dict[Spec, tuple[str, str]] = {}
        self._rng = np.random.default_rng([job.seed, 31, rank])

    def _header(self, groups: dict[str, tuple[int, ...]]) -> RankHeader:
        job, tracing = self.job, self.job.tracing
        host = job.cluster.name_of(self.rank)
        uuid = f"GPU-{job.seed % 0xFFFFFFFF:08x}-{self.rank:04x}"
        process = 4000 + 7 * int(job.cluster.slots[self.rank])
        return RankHeader(
            run_id=job.run_id,
            rank=self.rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(self.rank),
            groups=groups,
            host=host,
            process_id=process,
            device=Device(
                kind="cuda",
                name=job.chip_name(self.rank),
                index=int(job.cluster.slots[self.rank]),
                uuid=uuid,
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:{job.run_id}:{uuid}:{process}",
                source="cuda-event",
                origin_unix_ns=job.epoch_ns,
            ),
            trace=TraceSettings(
                granularity=Granularity.FULL,
                interval=tracing.interval,
                window=tracing.window,
                compress=tracing.compress,
                layer_stride=tracing.stride,
            ),
            versions={"python": "3.12.3", "megascan": "0.1.0", "torch": "2.7.1+cu128"},
        )

    def pieces(
        self, rows: list[_Rows], windows: list[list[int]], clocks: Clocks, first: float
    ) -> Iterator[bytes]:
        """Yield the header and the windows."""
        yield b",\n".join(encode_header(self.header))
        for number, (part, places) in enumerate(zip(rows, windows, strict=True)):
            shown = np.full(len(part.begin), places[0])
            begin = clocks.shown(self.rank, part.begin[:, self.lane] - first, shown) + _ORIGIN_S
            end = clocks.shown(self.rank, part.end[:, self.lane] - first, shown) + _ORIGIN_S
            lines = list(self._lines(part, begin, end))
            record = self._record(number, places, len(lines))
            text = ",\n".join(lines).encode()
            yield b",\n" + text + b",\n" + encode_window(self.rank, record)

    def _lines(self, rows: _Rows, begin: Floats, end: Floats) -> Iterator[str]:
        """Yield an event for each span of this rank, in the order in which they ended."""
        lane = self.lane
        launch = (rows.launch - rows.begin)[:, lane]
        launch_ns = launch * 1e9 + self._rng.normal(1500, 900, len(launch))
        has_launch = np.isfinite(launch).tolist()
        launches = np.nan_to_num(launch_ns).astype(np.int64).tolist()
        start_us, length_us = (begin * 1e6).tolist(), ((end - begin) * 1e6).tolist()
        specs, iterations = rows.specs, rows.iterations
        for place in np.argsort(end, kind="stable").tolist():
            if place in rows.whom and not rows.whom[place][lane]:
                continue
            spec = specs[place]
            known = self._known.get(spec) or self._texts(spec)
            extra = f',"launch_ns":{launches[place]}' if has_launch[place] else ""
            if place in rows.sizes:
                extra += f',"size_bytes":{rows.sizes[place][lane]}'
            yield (
                f'{known[0]}{start_us[place]:.3f},"dur":{max(length_us[place], 0.001):.3f},'
                f"{known[1]}{iterations[place]}{extra}}}}}"
            )

    def _texts(self, spec: Spec) -> tuple[str, str]:
        """Return what stands before a span's times, and between them and its iteration."""
        head = f'{{"name":"{spec.name}","cat":"{spec.kind}","ph":"X","ts":'
        numbers = {
            "microbatch": spec.microbatch,
            "chunk": spec.chunk,
            "layer": spec.layer,
            "sequence": spec.sequence,
        }
        if spec.size >= 0:
            numbers["size_bytes"] = spec.size
        if spec.peer_stage >= 0:
            numbers["peer"] = spec.peer_stage * self.job.lanes + self.lane
        texts = {"phase": spec.phase, "op": spec.op, "direction": spec.direction}
        if spec.kind == "data":
            texts["phase"] = ""
        if spec.axis:
            texts["group"] = self.groups[spec.axis]
        arguments = [f'"{name}":{value}' for name, value in numbers.items() if value >= 0]
        arguments += [f'"{name}":"{value}"' for name, value in texts.items() if value]
        inside = "".join(f"{one}," for one in arguments)
        tail = f'"pid":{self.rank},"tid":{spec.track},"args":{{{inside}"iteration":'
        self._known[spec] = head, tail
        return head, tail

    def _record(self, number: int, places: list[int], num_spans: int) -> WindowRecord:
        job, tracing = self.job, self.job.tracing
        numbers = [tracing.iterations[place] for place in places]
        layers = tuple(
            (tracing.iterations[place], tuple(sorted(self._own(recorded))))
            for place in places
            if (recorded := self.outcome.layers[place]) is not None
        )
        stage = job.stages[job.stage_of(self.rank)]
        own = tuple(layer for chunk in stage for layer in chunk)
        return WindowRecord(
            run_id=job.run_id,
            window=number,
            first_iteration=numbers[0],
            last_iteration=numbers[-1],
            num_spans=num_spans,
            granularity="full",
            interval=tracing.interval,
            counters=self._counters(places[-1]) if tracing.has_counters else {},
            tie_width_ns=int(self._rng.integers(15_000, 40_000)),
            tokens=self._tokens(places),
            layers=layers,
            kinds={self._kind(): own} if job.trainer == MEGATRON else {},
        )

    def _own(self, recorded: frozenset[int]) -> set[int]:
        stage = self.job.stages[self.job.stage_of(self.rank)]
        return {layer for chunk in stage for layer in chunk if layer in recorded}

    def _kind(self) -> str:
        """Return the digest of what a rank's layers are made of; a heavy stage has wider ones."""
        heavy = any(
            one.kind == "heavy_stage" and self.rank in one.ranks
            for one in self.outcome.conditions.troubles
        )
        return "" if self.job.model.experts else "3f9a02c1" if not heavy else "b170e26d"

    def _tokens(self, places: list[int]) -> tuple[int, ...]:
        """Return the fewest and the most tokens of a microbatch; none where they say too little."""
        job = self.job
        if not job.tracing.has_tokens or job.packs or job.model.experts:
            return ()
        split = job.layout.tp if job.costs.sequence_parallel and job.stage_of(self.rank) else 1
        more = [1.0] + [
            one.factor
            for one in self.outcome.conditions.troubles
            if one.kind == "long_sequences" and self.rank in one.ranks
        ]
        lengths = np.concatenate(
            [
                Data(job, job.tracing.iterations[place], job.microbatches[place]).lengths[
                    :, self.lane
                ]
                for place in places
            ]
        )
        count = job.costs.tokens / split * more[-1]
        return int(count * lengths.min()), int(count * lengths.max())

    def _counters(self, place: int) -> dict[str, float]:
        """Return what NVML reads at the end of a window: clocks come in steps of 15 MHz."""
        chip, rng = self.job.cluster.chip, self._rng
        ratio = self.outcome.conditions.clock_ratio(self.rank, place)
        clock = chip.clock_mhz * min(1.0, 0.93 * ratio * float(np.exp(0.012 * rng.normal())))
        capped = ratio < 0.95
        return {
            "sm_clock_mhz": float(15 * round(clock / 15)),
            "sm_clock_max_mhz": chip.clock_mhz,
            "clock_event_reasons": 32.0 if capped else 4.0,
            "power_w": round(chip.power_w * (0.9 if not capped else 0.72) + rng.normal(0, 9), 3),
            "temperature_c": float(round(64 + rng.normal(0, 4) + 14 * capped)),
        }
