"""What of a simulated job is recorded, by which clock, and how it stands in the files of its ranks.

All iterations of a rank have the same spans, but for pauses and saves. So a rank's events are one
text with places for numbers, which is filled in for each iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.grounds.campus.crew import Span
from benchmarks.grounds.campus.engine import Outcome
from benchmarks.grounds.campus.hardware import Clocks, Floats, drawn_clocks
from benchmarks.grounds.campus.job import MEGATRON, PACKED, PADDED, Job, groups_of
from benchmarks.grounds.campus.model import EXPERTS
from benchmarks.grounds.campus.world import World
from benchmarks.grounds.kinds import kinds_of
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.rankfile import encode_header, encode_window, rank_file_path
from megascan.schema import Granularity, Track

BEGAN_NS = 1_790_000_000_000_000_000
_NUMBER = "@@"  # stands where the number of the iteration will
_EVALUATION_S = 6.0
_VERSIONS = {"python": "3.12.9", "megascan": "0.1.0", "torch": "2.7.1+cu126"}


@dataclass(kw_only=True)
class Recorder:
    """Writes the files of one job."""

    job: Job
    seed: int
    outcome: Outcome
    world: World  # of the first iterations, for how long their documents are

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 71])
        tracing = self.job.tracing
        self.clocks: Clocks = drawn_clocks(
            self.job.site, self.job.num_ranks, tracing.windows, self.seed
        )
        self.begins_ns = self.rng.integers(0, 900_000_000, self.job.num_ranks)
        self.origins = self._origins()
        self._stacks = [
            [_Stack.of(spans) for spans in section.spans] for section in self.outcome.sections
        ]

    def write(self, folder: Path) -> None:
        """Write one file a rank."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.job.num_ranks):
            header = self._header(rank)
            lines = [b",\n".join(encode_header(header))]
            lines += self._windows(rank)
            rank_file_path(folder, header).write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")

    # Time

    def _origins(self) -> Floats:
        """Return when the iteration before each traced one was over for all, in true seconds."""
        job, numbers = self.job, self.job.tracing.iterations
        habits, lasted = job.habits, self.outcome.iteration_s[0]
        typical = float(np.median(lasted))
        found, now = [], 3.0
        for place, number in enumerate(numbers):
            if place:
                between = range(numbers[place - 1] + 1, number)
                now += lasted[place - 1] + len(between) * typical
                before = range(numbers[place - 1], number)
                saves = habits.save_every if not habits.saves_alone else 0
                now += habits.save_s * sum(bool(saves) and not n % saves for n in before)
                every = habits.evaluate_every
                now += _EVALUATION_S * sum(bool(every) and not n % every for n in before)
            found.append(now)
        return np.array(found)

    def _local_ns(self, rank: int, place: int, seconds: Floats | float) -> Floats:
        """Return nanoseconds by a rank's clock after the origin of its file."""
        at = np.asarray(seconds) + self.origins[place]
        offset = self.clocks.offset_s[rank, place] - self.clocks.offset_s[rank, 0]
        read = at * (1 + self.clocks.rate[rank]) + offset
        return np.asarray(np.rint(read * 1e9 - float(self.begins_ns[rank])))

    # Files

    def _header(self, rank: int) -> RankHeader:
        job, site = self.job, self.job.site
        host = f"node{site.host_of(rank) + 1:02d}"
        uuid = f"GPU-{self.seed:08x}-{rank:04x}"
        versions = dict(_VERSIONS)
        if job.trainer == MEGATRON:
            versions["megatron-core"] = "0.16.1"
        offset_ns = round(float(self.clocks.offset_s[rank, 0]) * 1e9)
        tracing = job.tracing
        return RankHeader(
            run_id=f"20261003-0912{self.seed % 60:02d}-{self.seed % 65521:04x}", rank=rank,
            world_size=job.num_ranks, layout=job.layout,
            coordinates=job.layout.coordinates(rank), groups=groups_of(job, rank), host=host,
            process_id=4000 + rank,
            device=Device(kind="cuda", name=site.chip.name, index=rank % site.ranks_per_host,
                          uuid=uuid),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"{host}:{uuid}:{4000 + rank}", source="cuda-event",
                origin_unix_ns=BEGAN_NS + int(self.begins_ns[rank]) + offset_ns,
            ),
            trace=TraceSettings(
                granularity=Granularity(tracing.granularity), interval=tracing.interval,
                window=tracing.window,
            ),
            versions=versions,
        )  # fmt: skip

    def _windows(self, rank: int) -> list[bytes]:
        stage, local = divmod(rank, self.job.ranks_a_stage)
        groups = {name.partition("@")[0]: name for name in groups_of(self.job, rank)}
        texts = [
            _text_of(section.spans[stage], self.job, rank, groups)
            for section in self.outcome.sections
        ]
        lines: list[bytes] = []
        windows = self.job.tracing.windows
        num_spans, first = 0, 0
        for place, window in enumerate(windows):
            own = self._iteration(rank, place, stage, local, texts)
            lines += own[0]
            num_spans += own[1]
            if place + 1 == len(windows) or windows[place + 1] != window:
                record = self._record(rank, range(first, place + 1), num_spans)
                lines.append(encode_window(rank, record))
                num_spans, first = 0, place + 1
        return lines

    def _iteration(
        self, rank: int, place: int, stage: int, local: int, texts: list[str]
    ) -> tuple[list[bytes], int]:
        """Return the events of a rank in an iteration, and how many they are."""
        number, lines, count = self.job.tracing.iterations[place], list[bytes](), 0
        for section, stacks, text in zip(self.outcome.sections, self._stacks, texts, strict=True):
            if place not in section.places or not section.spans[stage]:
                continue
            stack, within = stacks[stage], section.places.index(place)
            start = self._local_ns(rank, place, stack.start[:, within, local])
            until = stack.end[:, within, local].copy()
            until[stack.is_open] = self.outcome.end_s[place, rank]
            end = self._local_ns(rank, place, until)
            launch = self._local_ns(rank, place, stack.launched[:, within, local]) - start
            values = np.stack([start / 1e3, (end - start) / 1e3, launch], axis=1)
            filled = text % tuple(values[stack.wanted].tolist())
            lines.append(filled.replace(_NUMBER, str(number)).encode())
            count += len(start)
            for one in section.rare:
                if one.rank == rank and one.place == within:
                    lines.append(self._event(rank, place, (one.kind, one.name), one.start, one.end))
                    count += 1
        begun, over = self.outcome.start_s[place, rank], self.outcome.end_s[place, rank]
        lines.append(self._event(rank, place, ("iteration", "iteration"), begun, over))
        saved = self._save(rank, place)
        return lines + saved, count + 1 + len(saved)

    def _save(self, rank: int, place: int) -> list[bytes]:
        """Return the span of a save behind an iteration, if there is one."""
        habits, number = self.job.habits, self.job.tracing.iterations[place]
        due = habits.save_every and not number % habits.save_every
        if not due or not self.job.tracing.is_full or (habits.saves_alone and rank):
            return []
        begun = self.outcome.end_s[place, rank] + 1e-4
        lasts = habits.save_s * (0.78 if habits.saves_alone else 0.97)
        name = "checkpoint", "save-checkpoint"
        return [self._event(rank, place, name, begun, begun + lasts)]

    def _event(
        self, rank: int, place: int, what: tuple[str, str], start: float, end: float
    ) -> bytes:
        """Return the event of a kind and name."""
        kind, name = what
        begin_ns = float(self._local_ns(rank, place, start))
        end_ns = float(self._local_ns(rank, place, end))
        track = Track.COMPUTE if kind == "iteration" else Track.HOST
        args = {"iteration": self.job.tracing.iterations[place]}
        if kind == "iteration" and self.job.tracing.is_full:
            args["launch_ns"] = 0
        return orjson.dumps(
            {
                "name": name, "cat": kind, "ph": "X", "ts": begin_ns / 1e3,
                "dur": (end_ns - begin_ns) / 1e3, "pid": rank, "tid": int(track), "args": args,
            }
        )  # fmt: skip

    # Windows

    def _record(self, rank: int, places: range, num_spans: int) -> WindowRecord:
        tracing = self.job.tracing
        numbers = [tracing.iterations[place] for place in places]
        lasted = self.outcome.iteration_s[0]
        timings = [
            (n, 1, round(float(lasted[p]) * 1e9)) for n, p in zip(numbers, places, strict=True)
        ]
        return WindowRecord(
            run_id=self._header(rank).run_id, window=(numbers[0] - 1) // tracing.interval,
            first_iteration=numbers[0], last_iteration=numbers[-1], num_spans=num_spans,
            granularity=tracing.granularity, interval=tracing.interval,
            counters=self._counters(rank, places), timings=tuple(timings),
            tie_width_ns=round(self.job.site.tie_width_s * 1e9 * self.rng.uniform(0.5, 1.0)),
            drift_ppm=0.0, tokens=self._tokens(rank, places), kinds=self._kinds(rank),
        )  # fmt: skip

    def _counters(self, rank: int, places: range) -> dict[str, float]:
        """Return what the device says of itself at the end of a window."""
        if not self.job.tracing.has_counters:
            return {}
        chip = self.job.site.chip
        ratio = float(self.outcome.clock_ratio[rank, places[-1]])
        low = ratio > 1.1
        return {
            "sm_clock_mhz": float(15 * round(chip.clock_mhz / max(1.0, ratio) / 15)),
            "sm_clock_max_mhz": float(chip.clock_mhz),
            "clock_event_reasons": 32.0 if low else 4.0,
            "power_w": round(chip.power_w * float(self.rng.uniform(0.75, 0.99)) / ratio, 1),
            "temperature_c": float(round(self.rng.normal(84.0 if low else 62.0, 3.0))),
        }

    def _tokens(self, rank: int, places: range) -> tuple[int, ...]:
        """Return the fewest and the most tokens of a microbatch; none where documents matter."""
        job = self.job
        if (
            job.is_hybrid
            or job.habits.lengths == PACKED
            or (job.trainer != MEGATRON and job.has_experts)
        ):
            return ()
        stage, local = divmod(rank, job.ranks_a_stage)
        split = job.layout.tp if stage and job.habits.sequence_parallel else 1
        tokens = job.model.tokens / job.layout.cp / split
        longer = np.ones(1)
        if len(job.microbatches) == 1:
            row = self.world.replica_of()[local]
            factor = self.world.effects.factor("length", 0, range(rank, rank + 1))
            planted = np.broadcast_to(np.asarray(factor), (1, len(self.world.numbers), 1))[0]
            linear = self.world.lengths[0][:, :, row] * planted[:, 0]
            longer = linear[:, list(places)]
        elif job.habits.lengths == PADDED:
            return ()
        return round(tokens * float(longer.min())), round(tokens * float(longer.max()))

    def _kinds(self, rank: int) -> dict[str, tuple[int, ...]]:
        job = self.job
        if job.is_hybrid:
            return {}
        stage = rank // job.ranks_a_stage
        sizes = f"{job.model.hidden} {job.model.ffn_ratio} {job.layout.tp}"
        return kinds_of(
            (number, "" if kind == EXPERTS else f"{kind} {sizes}")
            for chunk in range(job.layout.vpp)
            for number, kind in job.layers_of(stage, chunk)
        )


@dataclass
class _Stack:
    """The times of a stage's spans as arrays: (span, iteration, rank)."""

    start: Floats
    end: Floats
    launched: Floats
    has_launch: list[bool]
    is_open: list[bool]

    @classmethod
    def of(cls, spans: list[Span]) -> _Stack:
        """Stack spans; an open one has no duration yet."""
        if not spans:
            return cls(np.empty((0, 0, 0)), np.empty((0, 0, 0)), np.empty((0, 0, 0)), [], [])
        launched = [span.start if span.launched is None else span.launched for span in spans]
        return cls(
            start=np.stack([span.start for span in spans]),
            end=np.stack([span.end for span in spans]),
            launched=np.stack(launched),
            has_launch=[span.launched is not None for span in spans],
            is_open=[
                one.name == "optimizer" and np.array_equal(one.start, one.end) for one in spans
            ],
        )

    @cached_property
    def wanted(self) -> Any:
        """Return (span, 3): which numbers of a span stand in its event."""
        return np.array([(True, True, has) for has in self.has_launch])


def _text_of(spans: list[Span], job: Job, rank: int, groups: dict[str, str]) -> str:
    """Return the events of a rank in any iteration, with places for their numbers."""
    local = rank % job.ranks_a_stage
    events = []
    for span in spans:
        args = dict(span.args)
        if span.axis:
            args["group"] = groups[span.axis]
        if span.peer >= 0:
            args["peer"] = span.peer * job.ranks_a_stage + local
        inside = orjson.dumps(args).decode()[1:-1]
        inside += "," if inside else ""
        launch = "" if span.launched is None else ',"launch_ns":%d'
        events.append(
            f'{{"name":"{span.name}","cat":"{span.kind}","ph":"X","ts":%.3f,"dur":%.3f,'
            f'"pid":{rank},"tid":{span.track},"args":{{{inside}"iteration":{_NUMBER}{launch}}}}}'
        )
    return ",\n".join(events)
