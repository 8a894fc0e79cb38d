"""Write what a run recorded as rank files: each rank by its own clock, a window at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.grounds.foundry.draws import Draws, Floats
from benchmarks.grounds.foundry.programs import Program, groups_of
from benchmarks.grounds.foundry.simulation import Effects, Recorded, Run
from megascan.header import (
    ClockOrigin,
    Device,
    RankHeader,
    TraceSettings,
    WindowRecord,
)
from megascan.rankfile import SpanRecord, encode_header, encode_spans, encode_window
from megascan.schema import Granularity
from megascan.topology import rank_file_name
from megascan.vocabulary import group_id

BEGIN_UNIX_NS = 1_780_000_000_000_000_000
_TIE_S = 12e-6  # how well a window's device clock is tied to the host's
_SLOW_RATIO = 1.08  # beyond which a low clock is more than the power cap
_POWER_CAP = 0x4
_WHY_SLOW = ((0x28, 20), (0x28, 20), (0x88, 0), (0x2, 0), (0x0, 0))
"""Reasons of a low clock, and degrees above the others: heat, a power brake, a limit that somebody
has set, none that is told."""


def write_files(draws: Draws, run: Run, effects: Effects, directory: Path) -> None:
    """Write the files of all ranks but the missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for program in draws.programs:
        if program.rank not in draws.job.missing:
            _RankWriter(draws, run, effects, program).write(directory)


class _RankWriter:
    """One rank's file."""

    def __init__(self, draws: Draws, run: Run, effects: Effects, program: Program) -> None:
        self.draws, self.run, self.effects, self.program = draws, run, effects, program
        self.job, self.rank = draws.job, program.rank
        self.host = self.job.machines.host_of(self.rank)
        self.run_id = f"foundry-{draws.seed:x}"

    def header(self) -> RankHeader:
        """Return the rank's header."""
        job, rank, layout = self.job, self.rank, self.job.layout
        groups = {group_id(axis, m): m for axis, m in groups_of(job, rank).items()}
        groups["world@0"] = tuple(range(job.num_ranks))
        uuid = f"GPU-{self.draws.seed & 0xFFFFFFFF:08x}-{rank:04x}"
        return RankHeader(
            run_id=self.run_id,
            rank=rank,
            world_size=job.num_ranks,
            layout=layout,
            coordinates=layout.coordinates(rank),
            groups=groups,
            host=f"node{self.host:03d}",
            process_id=4000 + rank % job.machines.ranks_per_host,
            device=Device(
                kind="cuda",
                name=job.machines.gpu.name,
                index=rank % job.machines.ranks_per_host,
                uuid=uuid,
            ),
            backend="nccl",
            clock=ClockOrigin(
                domain=f"node{self.host:03d}:{uuid}",
                source="cuda-event",
                origin_unix_ns=BEGIN_UNIX_NS + rank * 31_337,
            ),
            trace=TraceSettings(
                granularity=Granularity(job.granularity), interval=job.interval, window=job.window
            ),
            versions={"python": "3.12.3", "torch": "2.11.0", "megatron-core": "0.16.1"},
        )

    def clock(self, times_s: Floats, windows: list[int]) -> Floats:
        """Return times by the rank's clock: the host's error, and that of each window's tie.

        A host's clock is off, runs a few ppm too fast, wanders by some microseconds, and may be
        set once in the middle of the job, between two windows.
        """
        machines = self.job.machines
        stream = self.draws.stream(13, self.host)
        offset, drift = machines.clock_error_s * stream.uniform(-1, 1), 3e-6 * stream.normal()
        end_s = float(self.run.ends_s[-1])
        knots = np.linspace(0.0, end_s + 1.0, 24)
        wandering = np.cumsum(2e-6 * stream.standard_normal(24))
        step_s, is_stepping = machines.clock_step_s * stream.choice([-1, 1]), stream.random() < 0.4
        ties = _TIE_S * self.draws.stream(14, self.rank).standard_normal(max(windows) + 1)
        window = np.array(windows)
        steps = step_s * (window > max(windows) // 2) if is_stepping else 0.0
        off = offset + drift * times_s + np.interp(times_s, knots, wandering)
        return np.asarray(times_s + off + ties[window] + steps)

    def write(self, directory: Path) -> None:
        """Write the file."""
        job, header = self.job, self.header()
        recorded = sorted(
            self.run.recorded[self.rank], key=lambda each: (each[1], each[2], -each[3])
        )
        lines = encode_header(header)
        spans = self.spans(recorded)
        iterations = job.iterations
        windows = sorted({self.window_of(each) for each in iterations})
        for number, window in enumerate(windows):
            inside = [each for each in iterations if self.window_of(each) == window]
            chosen = [
                span for span in spans if inside[0] <= int(span[5]["iteration"]) <= inside[-1]
            ]
            lines += encode_spans(self.rank, chosen)
            lines.append(encode_window(self.rank, self.window(number, inside, len(chosen))))
        path = directory / rank_file_name(header.layout, header.coordinates)
        path.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")

    def window_of(self, iteration: int) -> int:
        """Return the number of the window of an iteration."""
        return (iteration - 1) // self.job.interval

    def spans(self, recorded: list[Recorded]) -> list[SpanRecord]:
        """Return spans by the rank's clock."""
        numbers = self.job.all_iterations
        times = np.array([each[2:] for each in recorded])
        first = self.window_of(numbers[0])
        windows = [self.window_of(numbers[each[1]]) - first for each in recorded]
        origin_ns = self.rank * 31_337
        own = [self.clock(times[:, column], windows) for column in range(3)]
        starts, ends = (np.round(each * 1e9).astype(np.int64) - origin_ns for each in own[:2])
        launches = np.round(np.nan_to_num((own[2] - own[0]) * 1e9)).astype(np.int64)
        templates = self.program.templates
        spans: list[SpanRecord] = []
        for each, start, end, launch in zip(
            recorded, starts.tolist(), ends.tolist(), launches.tolist(), strict=True
        ):
            kind, name, track, arguments = templates[each[0]]
            told = {"iteration": numbers[each[1]], **arguments}
            if each[4] == each[4] and self.job.granularity == "full":  # not of the host's spans
                told["launch_ns"] = launch
            spans.append((kind, name, track, start, end - start, told))
        return spans

    def window(self, number: int, iterations: list[int], num_spans: int) -> WindowRecord:
        """Return the record of a window."""
        job, place = self.job, self.job.layout.coordinates(self.rank)
        tokens: tuple[int, ...] = ()
        shares = self.draws.lengths[0][place.dp]
        if job.lengths != "packed":
            rows = shares[[each - job.first_iteration for each in iterations]]
            tokens = tuple(int(job.tokens * bound) for bound in (rows.min(), rows.max()))
        return WindowRecord(
            run_id=self.run_id,
            window=number,
            first_iteration=iterations[0],
            last_iteration=iterations[-1],
            num_spans=num_spans,
            granularity=job.granularity,
            interval=job.interval,
            counters=self.readings(iterations[-1] - job.first_iteration),
            tie_width_ns=24_000,
            tokens=tokens,
        )

    def readings(self, place: int) -> dict[str, float]:
        """Return what the device says of itself at the end of an iteration: a moment's clock.

        Half of how chips differ is their clock under the power cap, the other half is not seen.
        """
        machines, gpu = self.job.machines, self.job.machines.gpu
        if not machines.readings:
            return {}
        stream = self.draws.stream(15, self.rank, place)
        slow = float(self.draws.clocks[self.rank, place] * self.effects.clock[self.rank, place])
        slow *= machines.slow_alike_ratio**0.5 * float(self.draws.chips[self.rank]) ** 0.5
        end_s = self.run.ends_s[place]
        if self.rank not in self.effects.feels_all:  # a neighbour leaves the clock alone
            bursts = self.effects.bursts.get(self.rank, ())
            slow *= max(
                (slower for begin, end, slower in bursts if begin <= end_s < end), default=1
            )
        clock = min(gpu.max_clock_mhz, gpu.max_clock_mhz * 0.95 / slow + 12 * stream.normal())
        temperature = 58 + self.host % 4 + 3 * stream.normal()
        reasons = _POWER_CAP if clock < gpu.max_clock_mhz else 0
        if slow > _SLOW_RATIO * machines.slow_alike_ratio:
            reasons, heat = _WHY_SLOW[int(self.draws.stream(17, self.rank).integers(5))]
            temperature += heat
        return {
            "sm_clock_mhz": float(15 * round(clock / 15)),
            "sm_clock_max_mhz": float(gpu.max_clock_mhz),
            "clock_event_reasons": float(reasons),
            "power_w": round(gpu.power_w * (0.88 / slow + 0.02 * stream.normal()), 3),
            "temperature_c": float(round(temperature)),
        }
