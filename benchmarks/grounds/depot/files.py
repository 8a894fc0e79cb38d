"""Write what ran as rank files: headers, spans and marks of windows, as the tracer has them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.clocks import Clocks, Tie
from benchmarks.grounds.depot.counters import counters_of
from benchmarks.grounds.depot.faults import Trouble
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.luck import Fortune
from benchmarks.grounds.depot.operations import Traced
from benchmarks.grounds.depot.places import members_across, members_in_stage
from benchmarks.grounds.depot.prices import share_of_bytes
from benchmarks.grounds.depot.record import Pause, Recorded, Run
from benchmarks.grounds.kinds import EXPERTS, kinds_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import (
    CLOSING,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
)
from megascan.schema import Granularity, Track

IN_STAGE = (
    "tp", "dp", "dp_cp", "cp", "ep", "expt_dp", "expt_tp", "tp_ep", "tp_dp", "tp_dp_cp", "tp_cp",
)  # fmt: skip
ACROSS = ("pp", "mp", "embd", "intra_dist_opt", "world")
ALIASES = {"dp_gloo": "dp", "dp_cp_gloo": "dp_cp", "expt_dp_gloo": "expt_dp"}
_LEAST_S_BETWEEN_READINGS = 0.5


@dataclass(frozen=True)
class Story:
    """All that files are made of."""

    job: Job
    fortune: Fortune
    trouble: Trouble
    run: Run
    seed: int


def write_files(story: Story, directory: Path) -> None:
    """Write one file a rank."""
    directory.mkdir(parents=True, exist_ok=True)
    groups, clocks = _Groups(story.job), Clocks(story.job, story.seed)
    windows = _windows_of(story.job)
    for rank in range(story.job.num_ranks):
        scribe = _Scribe(story, groups, clocks, rank)
        appends = [scribe.window(number, window) for number, window in enumerate(windows)]
        appends[0] = encode_header(scribe.header) + appends[0]
        _save(rank_file_path(directory, scribe.header), appends, story.job.gzip)


def _save(path: Path, appends: Sequence[list[bytes]], zipped: bool) -> None:
    texts = [
        (b",\n" if number else b"[\n") + b",\n".join(lines) for number, lines in enumerate(appends)
    ]
    if zipped:
        texts = [gzip.compress(text, 3, mtime=0) for text in (*texts, CLOSING)]
        path.write_bytes(b"".join(texts))
    else:
        path.write_bytes(b"".join(texts) + CLOSING)


def _windows_of(job: Job) -> list[tuple[int, ...]]:
    windows: dict[int, list[int]] = {}
    for iteration in job.traced:
        windows.setdefault((iteration - 1) // job.interval, []).append(iteration)
    return [tuple(each) for each in windows.values()]


class _Groups:
    """Process groups of all ranks, by axis."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.of: dict[str, dict[int, tuple[int, ...]]] = {}
        for axis in IN_STAGE:
            places = members_in_stage(job, axis)
            rows = [row + s * job.ranks_of_stage for s in range(job.pp) for row in places]
            self.of[axis] = _by_rank(rows)
        for axis in ACROSS:
            self.of[axis] = _by_rank(list(members_across(job, axis)))
        self.of["tp_ep_pp"] = _by_rank(self._across_experts())
        self.of["pos_embd"] = {rank: (rank,) for rank in range(job.ranks_of_stage)}
        if job.gather == "pass":
            self.of["dp_cp_ag"] = self.of["dp_cp"]
        self.of |= {name: self.of[axis] for name, axis in ALIASES.items()}

    def _across_experts(self) -> list[NDArray[np.int64]]:
        job = self.job
        rows = members_in_stage(job, "tp_ep")
        return [
            np.concatenate([row + stage * job.ranks_of_stage for stage in range(job.pp)])
            for row in rows
        ]

    def members(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the groups of a rank by their ids."""
        own = ((axis, groups.get(rank)) for axis, groups in self.of.items())
        return {f"{axis}@{min(ranks)}": ranks for axis, ranks in own if ranks}

    def id_of(self, axis: str, rank: int) -> str:
        """Return the id of a rank's group."""
        return f"{axis}@{min(self.of[axis][rank])}"


def _by_rank(rows: Sequence[NDArray[np.int64]]) -> dict[int, tuple[int, ...]]:
    groups: dict[int, tuple[int, ...]] = {}
    for row in rows:
        ranks = tuple(map(int, row))
        groups |= dict.fromkeys(ranks, ranks)
    return groups


class _Scribe:
    """Writes the file of one rank."""

    def __init__(self, story: Story, groups: _Groups, clocks: Clocks, rank: int) -> None:
        self.story, self.job, self.rank = story, story.job, rank
        self.groups, self.clocks = groups, clocks
        self.stage = self.job.stage_of(rank)
        self.place = rank % self.job.ranks_of_stage
        self._ids = {axis: groups.id_of(axis, rank) for axis in groups.of if self._has(axis)}
        self.header = self._header()
        self._read_at_s = -1e9
        self._windows = _windows_of(self.job)

    def _has(self, axis: str) -> bool:
        return self.rank in self.groups.of[axis]

    def _header(self) -> RankHeader:
        job, host = self.job, f"node{int(self.job.hosts[self.rank]):03d}"
        digest = sha256(f"{self.story.seed} {self.rank}".encode()).hexdigest()
        boot = sha256(f"{self.story.seed} {host}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        boot = f"{boot[:8]}-{boot[8:12]}-{boot[12:16]}-{boot[16:20]}-{boot[20:32]}"
        process = 2000 + int(digest[32:36], 16)
        return RankHeader(
            run_id=f"20260114-093012-{sha256(str(self.story.seed).encode()).hexdigest()[:4]}",
            rank=self.rank,
            world_size=job.num_ranks,
            layout=job.layout,
            coordinates=job.layout.coordinates(self.rank),
            groups=self.groups.members(self.rank),
            host=host,
            process_id=process,
            device=Device(
                kind="cuda",
                name=job.hardware.chip.name,
                index=self.rank % job.gpus_used,
                uuid=uuid,
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:{boot}:{uuid}:{process}",
                source="cuda-event",
                origin_unix_ns=self.clocks.origin_unix_ns(self.rank),
            ),
            trace=TraceSettings(
                granularity=Granularity(job.granularity),
                interval=job.interval,
                window=job.window,
                compress=job.gzip,
            ),
            versions={
                "python": "3.12.3",
                "megascan": "0.1.0",
                "torch": "2.8.0+cu128",
                "megatron-core": "0.16.1",
            },
        )

    # --- windows -----------------------------------------------------------------------------

    def window(self, number: int, iterations: tuple[int, ...]) -> list[bytes]:
        """Return the lines of one window."""
        recorded = [
            one
            for one in self.story.run.recorded
            if one.program.stage == self.stage and one.iteration in iterations
        ]
        tie = self.clocks.tie_of(self.rank, number, self._bounds(iterations))
        spans: list[SpanRecord] = []
        for one in recorded:
            spans += self._spans(one, tie)
        if self.job.granularity == "full":
            spans += self._pauses(number, iterations)
        record = self._record(number, iterations, len(spans), tie, recorded)
        return [*encode_spans(self.rank, spans), encode_window(self.rank, record)]

    def _bounds(self, iterations: tuple[int, ...]) -> tuple[float, float]:
        run, first = self.story.run, self.job.first_iteration
        begin = run.begins_s[iterations[0] - first][self.rank]
        return float(begin), float(run.ends_s[iterations[-1] - first][self.rank])

    def _spans(self, one: Recorded, tie: Tie) -> Iterator[SpanRecord]:
        """Yield the spans of one iteration."""
        true_s = one.reached_s[:, self.place]
        device = self.clocks.host_ns(tie.seen_s(true_s), self.rank)
        host = self.clocks.host_ns(true_s, self.rank)
        launched = self.clocks.host_ns(one.launched_s[:, self.place], self.rank)
        scales = {
            (number, experts): float(share_of_bytes(one.luck, number, experts=experts)[self.place])
            for number in range(-1, self.job.microbatches)
            for experts in (False, True)
        }
        is_full = self.job.granularity == "full"
        on_device, on_host = device.tolist(), host.tolist()
        launches = launched.tolist()
        for span in one.program.spans:
            times = on_host if span.is_on_host else on_device
            start = times[span.begin]
            arguments = self._arguments(span, one.iteration, scales)
            if is_full and not span.is_on_host:
                arguments["launch_ns"] = launches[span.begin] - start
            duration = max(0, times[span.end] - start)
            yield span.kind, span.name, span.track, start, duration, arguments

    def _arguments(
        self, span: Traced, iteration: int, scales: dict[tuple[int, bool], float]
    ) -> dict[str, int | str]:
        arguments = dict(span.arguments)
        if span.axis:
            arguments["group"] = self._ids[span.axis]
            size = span.size_bytes * scales[span.microbatch, span.is_of_experts]
            arguments["size_bytes"] = max(1, round(size))
        if span.peer >= 0:
            arguments["peer"] = span.peer * self.job.ranks_of_stage + self.place
        arguments["iteration"] = iteration
        return arguments

    def _pauses(self, number: int, iterations: tuple[int, ...]) -> Iterator[SpanRecord]:
        """Yield collections of these iterations, and checkpoints since the window before."""
        before = self._windows[number - 1][-1] if number else iterations[0] - 1
        for pause in self.story.run.pauses:
            if pause.rank != self.rank:
                continue
            is_saved = pause.name == "save-checkpoint"
            first = before if is_saved else iterations[0]
            last = iterations[-1] - 1 if is_saved else iterations[-1]
            if first <= pause.iteration <= last and (is_saved or pause.iteration in iterations):
                yield self._pause(pause, "checkpoint" if is_saved else "gc")

    def _pause(self, pause: Pause, kind: str) -> SpanRecord:
        begin, end = self.clocks.host_ns(np.array([pause.begin_s, pause.end_s]), self.rank)
        arguments: dict[str, int | str] = {"iteration": pause.iteration}
        return kind, pause.name, Track.HOST, int(begin), int(end - begin), arguments

    def _record(
        self, number: int, iterations: tuple[int, ...], num_spans: int, tie: Tie,
        recorded: Sequence[Recorded],
    ) -> WindowRecord:  # fmt: skip
        return WindowRecord(
            run_id=self.header.run_id,
            window=number,
            first_iteration=iterations[0],
            last_iteration=iterations[-1],
            num_spans=num_spans,
            granularity=self.job.granularity,
            interval=self.job.interval,
            counters=self._counters(iterations),
            tie_width_ns=tie.width_ns,
            drift_ppm=tie.drift_ppm,
            tokens=self._tokens(recorded),
            kinds=kinds_of(self._layers()),
            timings=tuple(self._timings(number, iterations)),
        )

    def _counters(self, iterations: tuple[int, ...]) -> dict[str, float]:
        now = self._bounds(iterations)[1]
        if not self.job.has_counters or now - self._read_at_s < _LEAST_S_BETWEEN_READINGS:
            return {}
        self._read_at_s = now
        story = self.story
        return counters_of(story.fortune, story.trouble, self.rank, iterations[-1], now)

    def _tokens(self, recorded: Sequence[Recorded]) -> tuple[int, ...]:
        """Return the fewest and the most tokens of a microbatch; none of packed documents."""
        if self.job.lengths == "packed":
            return ()
        split = self.job.cp
        if self.stage and self.job.sequence_parallel:
            split *= self.job.tp
        shares = np.concatenate([one.luck.tokens[:, self.place] for one in recorded])
        counts = np.round(shares * self.job.sequence / split).astype(int)
        return int(counts.min()), int(counts.max())

    def _layers(self) -> Iterator[tuple[int, str]]:
        job, heavy = self.job, dict(self.job.heavy)
        for chunk in range(job.vpp):
            part = chunk * job.pp + self.stage
            words = f"layer of {job.hidden}, {heavy.get(part, 1.0):.3f} as wide"
            for layer in job.layers_of(part):
                yield layer, EXPERTS if job.experts else words

    def _timings(self, number: int, iterations: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
        """Yield how long iterations since the window before took: traced, written in, neither."""
        run, first = self.story.run, self.job.first_iteration
        begin = self._windows[number - 1][-1] if number else iterations[0]
        for iteration in range(begin, iterations[-1]):
            lasted = run.ends_s[iteration - first] - run.begins_s[iteration - first]
            since = iteration - begin
            activity = 1 if iteration in self.job.traced else 2 if since == 1 else 0
            yield iteration, activity, round(float(lasted[self.rank]) * 1e9)
