"""Results of the scale benchmark as text: Markdown tables, as they stand in benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.aggregate_scale.cases import (
    ORIGINAL_PEAK_MIB,
    ORIGINAL_RECORDS,
    ORIGINAL_SECONDS,
    Case,
)
from benchmarks.aggregate_scale.measuring import Measurement
from benchmarks.aggregate_scale.worker import STAGES
from benchmarks.jobs import machine_line

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run: `num_events` are spans, or begin and end records of the original's format."""

    case: Case
    suffix: str
    num_events: int
    input_bytes: int
    measured: Measurement
    turns: tuple[tuple[Measurement, Measurement], ...] = ()
    """(this checkout, the other one) of each turn where two are compared."""
    original: tuple[tuple[Measurement, Measurement], ...] = ()
    """(this checkout, the original's aggregator) of each turn where that was run beside it."""

    @property
    def events_per_second(self) -> float:
        """End to end, process start included."""
        return self.num_events / self.measured.seconds

    def to_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "job": self.case.name,
            "source": self.case.source,
            "num_ranks": self.case.num_ranks,
            "num_events": self.num_events,
            "input_bytes": self.input_bytes,
            "output": self.suffix,
            **asdict(self.measured),
        }


@dataclass(frozen=True, kw_only=True)
class CoresRow:
    """One run on some of the machine's cores."""

    case: Case
    suffix: str
    num_events: int
    num_cores: int
    measured: Measurement


def to_markdown(rows: Sequence[Row], reference_seconds: float) -> str:
    """All tables and what they were measured on."""
    load = os.getloadavg()[0]
    head = [
        f"Measured on {machine_line()}; sorting and adding up 4 M integers took "
        f"{reference_seconds:.2f} s before, and the load average was {load:.1f} at the end. "
        "Seconds are those of the whole process, imports included; CPU is user + system over all "
        "cores.",
        "",
    ]
    tables = [*_speed(rows), "", *_shares(rows), "", *_against_original(rows)]
    return "\n".join([*head, *tables, *_against_other(rows)])


def to_cores(rows: Sequence[CoresRow], reference_seconds: float) -> str:
    """Return a table of speed by cores; efficiency is speed / (cores · speed on the fewest)."""
    lines = [
        f"Measured on {machine_line()}; the sort took {reference_seconds:.2f} s before, load "
        f"average {os.getloadavg()[0]:.1f} at the end.",
        "",
        "| job | ranks | spans | output | cores | s | CPU s | spans/s | efficiency | peak MiB | "
        + " | ".join(STAGES)
        + " |",
        "|---" * (10 + len(STAGES)) + "|",
    ]
    for row in rows:
        first = next(
            one for one in rows if (one.case.name, one.suffix) == (row.case.name, row.suffix)
        )
        speed = first.measured.seconds * first.num_cores / row.measured.seconds
        it = row.measured
        stages = " | ".join(f"{it.stages[name]:.2f}" for name in STAGES)
        lines.append(
            f"| {row.case.name} | {row.case.num_ranks:,} | {row.num_events:,} | {row.suffix} "
            f"| {row.num_cores} | {it.seconds:.2f} | {it.cpu_seconds:.2f} "
            f"| {row.num_events / it.seconds:,.0f} | {100 * speed / row.num_cores:.0f} % "
            f"| {it.peak_bytes / _MIB:.0f} | {stages} |"
        )
    return "\n".join(lines)


def _speed(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| source | job | ranks | events | input MB | output | MB | s | CPU s | events/s | "
        "CPU µs/event | peak MiB | B/event at peak |",
        "|---" * 13 + "|",
    ]
    for row in rows:
        it = row.measured
        lines.append(
            f"| {row.case.source} | {row.case.name} | {row.case.num_ranks:,} | {row.num_events:,} "
            f"| {row.input_bytes / 1e6:.0f} | {row.suffix} | {it.output_bytes / 1e6:.0f} "
            f"| {it.seconds:.2f} | {it.cpu_seconds:.2f} | {row.events_per_second:,.0f} "
            f"| {it.cpu_seconds / row.num_events * 1e6:.2f} | {it.peak_bytes / _MIB:.0f} "
            f"| {it.peak_bytes / row.num_events:.0f} |"
        )
    return lines


def _shares(rows: Sequence[Row]) -> list[str]:
    """Share of each stage in the time on the wall; `rest` is the start and what is between."""
    stages = ("import", *STAGES)
    lines = [
        f"| ranks | events | output | {' | '.join(stages)} | rest |",
        "|---" * (len(stages) + 4) + "|",
    ]
    for row in rows:
        shares = [row.measured.stages[name] / row.measured.seconds for name in stages]
        cells = " | ".join(f"{100 * share:.0f} %" for share in [*shares, 1 - sum(shares)])
        lines.append(f"| {row.case.num_ranks:,} | {row.num_events:,} | {row.suffix} | {cells} |")
    return lines


def _against_original(rows: Sequence[Row]) -> list[str]:
    """How many times faster, and how much of the memory, a record.

    In turns where the original was run beside it, else against what it took elsewhere.
    """
    lines = []
    for row in rows:
        if row.original:
            cells = ", ".join(
                f"{what} {_ratios(row.original, name)}"
                for what, name in (("wall", "seconds"), ("CPU", "cpu_seconds"))
            )
            lines.append(
                f"- original format, {row.num_events:,} records, {row.suffix}: the original's "
                f"aggregator beside it took, times ours: {cells}, memory "
                f"{_ratios(row.original, 'peak_bytes')} (median and extremes of "
                f"{len(row.original)} turns; the original's fastest "
                f"{min(theirs.seconds for _, theirs in row.original):.1f} s)"
            )
        elif row.case.source == "original":
            scale = row.num_events / ORIGINAL_RECORDS
            faster = ORIGINAL_SECONDS * scale / row.measured.seconds
            memory = row.measured.peak_bytes / _MIB / (ORIGINAL_PEAK_MIB * scale)
            lines.append(
                f"- original format, {row.num_events:,} records, {row.suffix}: {faster:.1f} times "
                f"faster than the original's {ORIGINAL_SECONDS} s for {ORIGINAL_RECORDS:,} "
                f"records, with {memory:.2f} of its {ORIGINAL_PEAK_MIB:,} MiB"
            )
    return lines


def _against_other(rows: Sequence[Row]) -> list[str]:
    """How this checkout compares with the other: ratios above 1 are better here."""
    compared = [row for row in rows if row.turns]
    if not compared:
        return []
    lines = [
        "",
        f"The other checkout over this one, {len(compared[0].turns)} turns: median (extremes).",
        "",
        "| source | ranks | events | output | wall s | CPU s | peak memory |",
        "|---" * 7 + "|",
    ]
    for row in compared:
        cells = " | ".join(
            _ratios(row.turns, name) for name in ("seconds", "cpu_seconds", "peak_bytes")
        )
        lines.append(
            f"| {row.case.source} | {row.case.num_ranks:,} | {row.num_events:,} | {row.suffix} "
            f"| {cells} |"
        )
    return [*lines, *_cpu_by_stage(compared)]


def _cpu_by_stage(rows: Sequence[Row]) -> list[str]:
    """CPU µs an event of the command's own process by stage, the other checkout's first."""
    stages = ("import", *STAGES)
    lines = [
        "",
        "CPU µs an event of the process that is the command, the other checkout → this one, "
        "medians.",
        "",
        f"| source | ranks | events | output | {' | '.join(stages)} |",
        "|---" * (len(stages) + 4) + "|",
    ]
    for row in rows:
        cells = []
        for stage in stages:
            pair = (
                median(one.cpu_stages.get(stage, float("nan")) for one in side)
                for side in zip(*((theirs, own) for own, theirs in row.turns), strict=True)
            )
            cells.append(" → ".join(f"{each / row.num_events * 1e6:.2f}" for each in pair))
        lines.append(
            f"| {row.case.source} | {row.case.num_ranks:,} | {row.num_events:,} | {row.suffix} "
            f"| {' | '.join(cells)} |"
        )
    return lines


def _ratios(turns: Sequence[tuple[Measurement, Measurement]], name: str) -> str:
    """Median and extremes of the second's figure over the first's."""
    ratios = [getattr(other, name) / getattr(own, name) for own, other in turns]
    return f"{median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
