"""A summary as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

from aggregate.shares import SHARES
from aggregate.summary import Summary
from megascan.overhead import MIN_CYCLES, Estimate, Overhead
from megascan.timeline import ClockFit

_MOST_RANKS = 16
_MOST_CLOCKS = 8
_RARE = ("preempted", "unsplit", "dispatch")
"""Shares whose column is left out where no rank has any."""

_HOW_TO_READ = (
    "median iteration, and shares of the time of all; the rank that waits least stands first, the",
    "others wait for it.",
    "Compare ranks of one stage (PP): stages with more work wait less in a healthy job, too.",
)
_WIDTH = 100


def render_text(summary: Summary, most_ranks: int = _MOST_RANKS) -> str:
    """Table of shares, worst rank first, then alignment, completeness and notes.

    At most `most_ranks` rows; longer tables say how many ranks are left out.
    """
    sections = (_heading(summary), _table(summary, most_ranks), _alignment(summary), _rest(summary))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _heading(summary: Summary) -> list[str]:
    num_spans = sum(summary.num_spans.values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(summary.num_spans.items()))
    return [
        f"run {summary.run_id}: {len(summary.clocks)} of {summary.completeness.world_size} ranks, "
        f"{num_spans:,} spans, {summary.num_matches:,} matched communications",
        f"spans by kind: {kinds}",
    ]


def _table(summary: Summary, most_ranks: int) -> list[str]:
    shares = [share for share in SHARES if share not in _RARE or _any(summary, share)]
    head = ("rank", "place", "median", *shares)
    rows = [
        (
            str(row["rank"]),
            summary.layout.label(row["rank"]),
            f"{row['iteration_median_ns'] / 1e6:.2f} ms",
            *(f"{100 * row[f'{share}_ratio']:.1f} %" for share in shares),
        )
        for row in summary.ranks.slice(0, most_ranks).to_pylist()
    ]
    if not rows:
        return ["no iteration was traced: no shares to show"]
    lines = [*_HOW_TO_READ, *_aligned([head, *rows])]
    left_out = summary.ranks.num_rows - len(rows)
    return lines + ([f"… and {left_out} more ranks"] if left_out else [])


def _any(summary: Summary, share: str) -> bool:
    return bool(np.any(summary.ranks.column(f"{share}_ns").to_numpy()))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, the second to the left and the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _alignment(summary: Summary) -> list[str]:
    domains = list(_domains(summary))
    lines = textwrap.wrap(f"clocks: {summary.clock_method}", _WIDTH, subsequent_indent="  ")
    if len(domains) == 1 and len(domains[0]) > 1:
        return lines + _one_clock(domains[0])
    if len(domains) > _MOST_CLOCKS:
        return lines + _compact(domains)
    rows: list[tuple[str, ...]] = [
        ("ranks", "clock", "offset", "drift", "residual", "p99", "error", "anchors")
    ]
    rows += [_domain_row(fits, summary.clock_names[fits[0].rank]) for fits in domains]
    return lines + _aligned(rows)


def _domains(summary: Summary) -> Iterator[list[ClockFit]]:
    """Fits of the ranks of each clock domain, by lowest rank."""
    by_domain: dict[str, list[ClockFit]] = {}
    for rank in sorted(summary.clocks):
        by_domain.setdefault(summary.clocks[rank].domain, []).append(summary.clocks[rank])
    yield from by_domain.values()


def _one_clock(fits: list[ClockFit]) -> list[str]:
    median_ns = float(np.median([fit.residual_median_ns for fit in fits]))
    p99_ns = max(fit.residual_p99_ns for fit in fits)
    if not any(fit.num_anchors for fit in fits):
        return []
    return [
        f"  ranks leave a collective within {_time(median_ns)} of each other (median; "
        f"p99 {_time(p99_ns)}):",
        "  with one clock that is the job's own timing (cores shared, late wake-ups), not an error",
    ]


def _time(time_ns: float) -> str:
    return f"{time_ns / 1e6:.1f} ms" if time_ns >= 1e6 else f"{time_ns / 1e3:.1f} µs"


def _domain_row(fits: list[ClockFit], name: str) -> tuple[str, ...]:
    ranks = [fit.rank for fit in fits]
    return (
        f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}…{ranks[-1]} ({len(ranks)})",
        name,
        f"{fits[0].offset_ns / 1e6:+.4f} ms",
        f"{fits[0].drift_ppm:+.3f} ppm",
        f"{np.median([fit.residual_median_ns for fit in fits]) / 1e3:.1f} µs",
        f"{max(fit.residual_p99_ns for fit in fits) / 1e3:.1f} µs",
        f"{max(fit.error_ns for fit in fits) / 1e3:.1f} µs",
        f"{sum(fit.num_anchors for fit in fits):,}",
    )


def _compact(domains: list[list[ClockFit]]) -> list[str]:
    fits = [fit for group in domains for fit in group]
    offsets = [fit.offset_ns / 1e6 for fit in fits]
    drifts = [fit.drift_ppm for fit in fits]
    worst = max(fits, key=lambda fit: fit.residual_p99_ns)
    widest = max(fits, key=lambda fit: fit.error_ns)
    fewest = min(fits, key=lambda fit: fit.num_anchors)
    return [
        f"{len(domains)} clocks of {len(fits)} ranks: offset {min(offsets):+.3f} … "
        f"{max(offsets):+.3f} ms, drift {min(drifts):+.2f} … {max(drifts):+.2f} ppm",
        f"residual: median {np.median([fit.residual_median_ns for fit in fits]) / 1e3:.1f} µs, "
        f"p99 up to {worst.residual_p99_ns / 1e3:.1f} µs (rank {worst.rank}); "
        f"error bars up to {_time(widest.error_ns)} (rank {widest.rank}); "
        f"fewest anchors: {fewest.num_anchors} (rank {fewest.rank})",
    ]


def _tracing(cost: Overhead) -> list[str]:
    """What tracing cost; nothing for traces that do not tell how long untraced iterations took."""
    if cost.traced is None or cost.run is None:
        why = _why_unknown(cost)
        return textwrap.wrap(f"tracing: {why}", _WIDTH, subsequent_indent="  ") if why else []
    text = (
        f"tracing: a traced iteration takes {_times(cost.traced)} an untraced one, the whole run "
        f"{_times(cost.run)} an untraced run (95 % intervals; {cost.num_cycles} windows at "
        f"{cost.granularity}, one every {cost.interval} iterations)"
    )
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _times(estimate: Estimate) -> str:
    return f"{estimate.ratio:.4f} times ({estimate.low:.4f} … {estimate.high:.4f})"


def _why_unknown(cost: Overhead) -> str:
    if not cost.num_traced:
        return ""
    if not cost.num_untraced:
        return (
            "its cost is not known, every iteration was traced; make --trace-interval longer than "
            "--continuous-trace-iterations to have some to compare with"
        )
    return (
        f"its cost is not known: {cost.num_cycles} windows can be compared with the untraced "
        f"iterations after them, {MIN_CYCLES} are needed"
    )


def _rest(summary: Summary) -> list[str]:
    there = summary.completeness
    lines = []
    if there.missing_ranks:
        named = ", ".join(str(rank) for rank in there.missing_ranks[:_MOST_RANKS])
        more = ", …" if len(there.missing_ranks) > _MOST_RANKS else ""
        many = "s" if len(there.missing_ranks) > 1 else ""
        lines.append(f"missing: {len(there.missing_ranks)} rank{many} ({named}{more})")
    if there.num_unfinished_spans:
        lines.append(f"left out: {there.num_unfinished_spans:,} spans of unfinished windows")
    unmatched = ", ".join(
        f"{count:,} {kind}" for kind, count in there.num_unmatched.items() if count
    )
    lines.append(f"unmatched: {unmatched or 'none'}; duplicates: {there.num_duplicates:,}")
    lines += _tracing(summary.tracing)
    return lines + [
        line
        for note in there.notes
        for line in textwrap.wrap(
            f"note: {note}", _WIDTH, subsequent_indent="  ", break_long_words=False
        )
    ]
