"""Write what ranks recorded as rank files, by clocks that are wrong as those of hosts are.

A host's clock is off by milliseconds, runs fast or slow by some millionths, wanders, and is set by
NTP now and then; a rank's device is tied to it anew in every window, within some microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.grounds.kinds import EXPERTS, kinds_of
from benchmarks.grounds.pod.engine import Outcome
from benchmarks.grounds.pod.faults import Fault, Law
from benchmarks.grounds.pod.job import Floats, Ints, Job
from benchmarks.grounds.pod.modules import recorded_layers
from benchmarks.grounds.pod.recording import Entry
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import CLOSING, SpanRecord, encode_header, encode_spans, encode_window
from megascan.schema import Granularity
from megascan.topology import rank_file_name
from megascan.vocabulary import group_id

EPOCH_NS = 1_795_300_000_000_000_000
TIE_ERROR_US = 6.0
_VERSIONS = {"python": "3.12.3", "megascan": "0.1.0", "torch": "2.9.1", "megatron-core": "0.16.1"}


def write_rank_files(
    job: Job, outcome: Outcome, directory: Path, faults: Sequence[Fault] = ()
) -> None:
    """Write the file of each rank that is not missing; of `faults`, longer data show in tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    longer = {r: one.factor for one in faults if one.law is Law.LENGTH for r in one.ranks}
    writer = _Writer(job, outcome, longer)
    for stage in range(job.layout.pp):
        writer.write_stage(stage, directory)


class _Clocks:
    """Tell what a rank's clock shows: nanoseconds since the epoch of the files."""

    def __init__(self, job: Job, window_starts: Sequence[float], end_s: float) -> None:
        rng = np.random.default_rng([job.seed, 47])
        disorder, count = job.disorder, len(job.cluster.hosts)
        self._marks = np.array([*window_starts, end_s + 1.0])
        shape = (count, len(self._marks))
        self._offset = rng.normal(0, disorder.clock_offset_ms * 1e-3, count)
        self._drift = rng.normal(0, disorder.clock_drift_ppm * 1e-6, count)
        self._wander = np.cumsum(rng.normal(0, disorder.clock_wander_us * 1e-6, shape), axis=1)
        self._steps = np.zeros(shape)
        for host in rng.permutation(count)[: disorder.clock_steps]:
            place = int(rng.integers(1, max(len(window_starts), 2)))
            back = job.tracing.window < job.tracing.interval and rng.random() < 0.5
            self._steps[host, place:] += rng.uniform(3e-3, 30e-3) * (-1 if back else 1)
        self._tie = rng.normal(0, TIE_ERROR_US * 1e-6, (job.num_ranks, len(self._marks)))

    def shown_ns(self, host: int, rank: int, window: int, time_s: Floats) -> Ints:
        """Return what the rank's clock shows at true times of a window."""
        wrong = self._offset[host] + self._drift[host] * time_s + self._tie[rank, window]
        wrong = wrong + np.interp(time_s, self._marks, self._wander[host])
        wrong = wrong + self._steps[host, window]
        return np.asarray(np.rint((time_s + wrong) * 1e9), dtype=np.int64)


class _Writer:
    """Write the files of one job's ranks."""

    def __init__(self, job: Job, outcome: Outcome, longer: Mapping[int, float]) -> None:
        assert outcome.recording is not None
        self._job, self._outcome, self._longer = job, outcome, longer
        self._entries = outcome.recording.entries
        self._windows = windows_of(job.tracing.iterations, job.tracing.interval)
        self._full = job.tracing.granularity == Granularity.FULL
        self._groups = groups_of(job)
        self._members_of = members_of(job)
        self._rng = np.random.default_rng([job.seed, 53])
        own = [entry for entry in self._entries[0] if entry.name == "iteration"]
        begins = {int(one.arguments["iteration"]): float(one.start_s.min()) for one in own}
        starts = [begins[window[0]] - 0.5 * 1e-3 for window in self._windows]
        self._clocks = _Clocks(job, starts, float(own[-1].end_s.max()))

    def write_stage(self, stage: int, directory: Path) -> None:
        """Write the files of a stage's ranks."""
        by_window = self._by_window(stage)
        for place, rank in enumerate(self._job.ranks[stage].tolist()):
            if rank in self._job.tracing.missing:
                continue
            header = self._header(rank)
            lines = encode_header(header)
            for number, entries in enumerate(by_window):
                spans = list(self._spans(entries, number, place, stage))
                lines += encode_spans(rank, spans)
                lines.append(encode_window(rank, self._mark(stage, rank, number, len(spans))))
            name = rank_file_name(header.layout, header.coordinates)
            (directory / name).write_bytes(b"[\n" + b",\n".join(lines) + CLOSING)

    def _by_window(self, stage: int) -> list[list[Entry]]:
        """Return the entries of each window, in the order in which they end as a tracer's do."""
        place = {number: at for at, window in enumerate(self._windows) for number in window}
        found: list[list[Entry]] = [[] for _ in self._windows]
        for entry in self._entries[stage]:
            found[place[int(entry.arguments["iteration"])]].append(entry)
        return found

    def _spans(
        self, entries: Sequence[Entry], window: int, place: int, stage: int
    ) -> Iterator[SpanRecord]:
        """Yield a rank's spans, by its clock."""
        own = [(entry, at) for entry in entries if (at := _index_of(entry, place)) >= 0]
        rank = int(self._job.ranks[stage, place])
        host = self._job.cluster.host_of(rank)
        starts, ends = (
            self._clocks.shown_ns(host, rank, window, np.array(times)).tolist()
            for times in (
                [float(entry.start_s[at]) for entry, at in own],
                [float(entry.end_s[at]) for entry, at in own],
            )
        )
        noise = self._rng.normal(1400.0, 500.0, len(own)).tolist()
        for (entry, at), begin, end, late in zip(own, starts, ends, noise, strict=True):
            arguments = dict(entry.arguments)
            if entry.axis:
                arguments["group"] = self._groups[rank, entry.axis]
            if entry.peer >= 0:
                arguments["peer"] = int(self._job.ranks[entry.peer][place])
            if entry.size_bytes is not None:
                arguments["size_bytes"] = int(entry.size_bytes[at])
            if entry.launch_s is not None and self._full:
                ahead = float(entry.launch_s[at] - entry.start_s[at]) * 1e9
                arguments["launch_ns"] = int(ahead + late)
            yield entry.kind, entry.name, entry.track, begin, max(end - begin, 0), arguments

    def _header(self, rank: int) -> RankHeader:
        job, tracing = self._job, self._job.tracing
        host = job.cluster.hosts[job.cluster.host_of(rank)]
        uuid = f"GPU-{job.seed & 0xFFFFFFFF:08x}-{rank:04x}-4a1b-9c2d-{rank * 7919 + 11:012x}"
        process = 4000 + rank % job.cluster.gpus_per_host * 3
        return RankHeader(
            run_id=f"20261120-{job.seed % 1_000_000:06d}-{job.seed % 65521:04x}",
            rank=rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(rank),
            groups=dict(self._members(rank)),
            host=host,
            process_id=process,
            device=Device(
                kind="cuda",
                name=job.cluster.chip.name,
                index=rank % job.cluster.gpus_per_host,
                uuid=uuid,
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:{uuid}:{process}", source="cuda-event", origin_unix_ns=EPOCH_NS
            ),
            trace=TraceSettings(
                granularity=Granularity(tracing.granularity),
                interval=tracing.interval,
                window=tracing.window,
                layer_stride=tracing.layer_stride if self._full else 1,
            ),
            versions=_VERSIONS,
        )

    def _members(self, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for axis in AXES:
            name = self._groups.get((rank, axis))
            if name:
                yield name, self._members_of[name]

    def _mark(self, stage: int, rank: int, number: int, num_spans: int) -> WindowRecord:
        job, window, tracing = self._job, self._windows[number], self._job.tracing
        layers = []
        for iteration in window:
            chosen = recorded_layers(job, stage, iteration)
            if chosen is not None and self._full:
                layers.append((iteration, tuple(sorted(chosen))))
        place = tracing.iterations.index(window[0])
        return WindowRecord(
            run_id=f"20261120-{job.seed % 1_000_000:06d}-{job.seed % 65521:04x}",
            window=number,
            first_iteration=window[0],
            last_iteration=window[-1],
            num_spans=num_spans,
            granularity=tracing.granularity,
            interval=tracing.interval,
            counters=self._counters(rank, place) if tracing.reads_device else {},
            tie_width_ns=int(self._rng.uniform(18_000, 42_000)),
            drift_ppm=0.0,
            tokens=self._tokens(rank, window),
            layers=tuple(layers),
            kinds=self._kinds(stage) if self._full else {},
            timings=self._timings(number),
        )

    def _timings(self, number: int) -> tuple[tuple[int, int, int], ...]:
        """Return how long iterations took since the last mark, traced ones and the others."""
        numbers = self._job.tracing.iterations
        times = dict(zip(numbers, self._outcome.iteration_s[0].tolist(), strict=True))
        first = self._windows[number - 1][-1] if number else numbers[0]
        found = []
        for iteration in range(first, self._windows[number][-1]):
            traced = iteration in times
            usual = times[iteration] if traced else 0.997 * times[self._windows[number - 1][-1]]
            noise = 1.0 if traced else 1 + 0.004 * self._rng.standard_normal()
            found.append((iteration, int(traced), int(usual * noise * 1e9)))
        return tuple(found[-32:])

    def _tokens(self, rank: int, window: Sequence[int]) -> tuple[int, ...]:
        """Return the fewest and the most tokens of a microbatch; none where more matters."""
        job, numbers = self._job, self._job.tracing.iterations
        if job.data.packed or job.model.num_experts or self._outcome.recording is None:
            return ()
        part = [
            (one - numbers[0]) / max(numbers[-1] - numbers[0], 1) for one in (window[0], window[-1])
        ]
        most = job.tokens * self._longer.get(rank, 1.0)
        counts = [int(most * (1 + (job.data.curriculum_ratio - 1) * each)) for each in part]
        return min(counts), max(counts)

    def _kinds(self, stage: int) -> dict[str, tuple[int, ...]]:
        model = self._job.model
        layers = []
        for chunk, count in enumerate(model.layers[stage]):
            first = model.first_layer(stage, chunk)
            for layer in range(first, first + count):
                words = f"attention {model.hidden} {model.attention_ratio} mlp {model.ffn}"
                layers.append((layer, EXPERTS if model.has_experts(layer) else words))
        return kinds_of(layers)

    def _counters(self, rank: int, place: int) -> dict[str, float]:
        chip = self._job.cluster.chip
        slow = float(self._outcome.slow_ratio[place, rank])
        return {
            "sm_clock_mhz": round(chip.clock_mhz * 0.9 / slow / 15) * 15.0,
            "sm_clock_max_mhz": chip.clock_mhz,
            "clock_event_reasons": 4.0 if slow > 1.02 else 0.0,
            "power_w": round(chip.power_w * (0.8 + 0.1 * self._rng.random()), 1),
            "temperature_c": float(math.floor(self._outcome.temperature[place, rank])),
        }


def _index_of(entry: Entry, place: int) -> int:
    """Return where a place stands in an entry's arrays; -1 if it has no such span."""
    if entry.places is None:
        return place
    found = np.flatnonzero(entry.places == place)
    return int(found[0]) if found.size else -1


AXES = (
    "tp", "pp", "dp", "dp_cp", "cp", "ep", "expt_dp", "tp_ep", "mp", "embd", "intra_dist_opt",
    "world",
)  # fmt: skip


def windows_of(iterations: Sequence[int], interval: int) -> list[list[int]]:
    """Split traced iterations into windows: those of one interval."""
    found: dict[int, list[int]] = {}
    for number in iterations:
        found.setdefault((number - 1) // interval, []).append(number)
    return list(found.values())


def _sets_of(job: Job, axis: str) -> list[tuple[int, ...]]:
    """Return the process groups of an axis."""
    layout, world = job.layout, tuple(range(job.num_ranks))
    if axis in ("world", "intra_dist_opt"):
        return [world]
    if axis == "embd":
        ends = sorted({0, layout.pp - 1})
        return [tuple(int(job.ranks[stage, at]) for stage in ends) for at in range(job.stage_size)]
    if axis in ("tp", "pp", "dp", "cp", "ep"):
        return sorted({layout.group(rank, axis) for rank in world})
    keys = {
        "dp_cp": lambda place, at: (place.pp, place.tp),
        "expt_dp": lambda place, at: (place.pp, at % layout.ep),
        "tp_ep": lambda place, at: (place.pp, at // layout.ep),
        "mp": lambda place, at: (place.dp, place.cp),
    }
    found: dict[tuple[int, int], list[int]] = {}
    for stage in range(layout.pp):
        for at, rank in enumerate(job.ranks[stage].tolist()):
            found.setdefault(keys[axis](layout.coordinates(rank), at), []).append(rank)
    return [tuple(sorted(each)) for each in found.values()]


def members_of(job: Job) -> dict[str, tuple[int, ...]]:
    """Return the members of each process group, by its id."""
    return {group_id(axis, each): each for axis in AXES for each in _sets_of(job, axis)}


def groups_of(job: Job) -> dict[tuple[int, str], str]:
    """Return the id of the group of each rank and axis."""
    return {
        (rank, axis): group_id(axis, each)
        for axis in AXES
        for each in _sets_of(job, axis)
        for rank in each
    }
