"""Sum a timeline up: where each rank's time went, clocks and completeness, as tables and as text.

Every nanosecond of an iteration counts once. Spans of a rank overlap: a forward pass has
communication and garbage collection inside, and a transfer next to it. Kinds are therefore laid
over one another like layers, and each moment belongs to the topmost layer that covers it:

    transfer                 ▐██▌             split of synchronous communication
    wait                 ▐███░░░▌
    unsplit                                   communication without a match
    host            ▐█▌                       on the CPU, where it interrupts the rank's one thread
    compute      ▐██░░░██░░░░░░░██▌
    overlapped transfer, wait, unsplit        asynchronous communication that nothing hides
    compute                        ▐██▌       `grad-sync`, except for the gradients' transfer
    copy                         ▐█▌          copies between memories that nothing hides (profiles)
    host                          ░▐█▌        on a GPU, where it runs next to the device
    dispatch                ▐███▌             GPU: nothing to do, for the host launched too late
    idle         what no layer covers

The layers' visible lengths add up to the iteration exactly: in 10 ms, compute over 8 ms with an
all-reduce of 3 ms inside it, 2 ms of them wait, makes compute 5, wait 2, transfer 1, idle 2. Of
visible compute, the time that the thread did not spend on the CPU is shown separately (CPU runs):
as `wait` while other communication is under way, for which DistributedDataParallel waits inside the
backward pass, otherwise as `preempted`.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from megascan.arrays import (
    Cover,
    Flags,
    Floats,
    Integers,
    TimeAxis,
    combine,
    group_lengths,
    group_starts,
    new_parts,
    per_group,
    united,
)
from megascan.header import Json, RankHeader
from megascan.overhead import MIN_CYCLES, Estimate, Overhead, measure_job
from megascan.schema import COMMUNICATION_KINDS, SCHEMA_VERSION, Kind, Track
from megascan.timeline import (
    ClockFit,
    Completeness,
    Timeline,
    codes,
    equals,
    is_launched,
    is_sampled,
    numbers,
)
from megascan.topology import Layout
from megascan.vocabulary import GRAD_SYNC, is_copy

SHARES = (
    "compute", "preempted", "transfer", "wait", "unsplit", "copy", "host", "dispatch", "idle",
)  # fmt: skip
COMPUTE_KINDS = (Kind.COMPUTE, Kind.OPTIMIZER)
HOST_KINDS = (Kind.DATA, Kind.GC, Kind.CHECKPOINT, Kind.HOST)


def ranks_on_cpu(headers: Mapping[int, RankHeader]) -> frozenset[int]:
    """Return the ranks that compute without a device of their own."""
    return frozenset(rank for rank, header in headers.items() if header.device.kind == "cpu")


@dataclass(frozen=True)
class Sums:
    """Sums of some ranks' spans: iterations as in a Summary, numbers of spans by kind, and
    operations that are not matched (kind, rank, num_spans).
    """

    iterations: pa.Table
    num_spans: Mapping[str, int]
    unmatched: pa.Table


def sums_of(spans: pa.Table, on_cpu: Collection[int], busy_until_ns: int | None = None) -> Sums:
    """Sum up all spans of some ranks, or some spans of one rank (schema TIMELINE_SCHEMA).

    `busy_until_ns` is when the rank's device had done what was launched before these spans.
    """
    kind_codes, kinds = codes(spans, "kind")
    counts = np.bincount(kind_codes, minlength=len(kinds))
    return Sums(
        iterations=_shares_of(spans, on_cpu, busy_until_ns),
        num_spans={kind: int(counts[code]) for code, kind in enumerate(kinds) if counts[code]},
        unmatched=_unmatched(spans),
    )


def _shares_of(
    table: pa.Table, on_cpu: Collection[int], busy_until_ns: int | None = None
) -> pa.Table:
    spans = _Spans.of(table, busy_until_ns)
    windows = _Windows.of(table, spans)
    lengths = dict.fromkeys(SHARES, np.zeros(len(windows.start), dtype=np.int64))
    covered = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    before = lengths["idle"]
    for share, start, end in _layers(on_cpu, spans):
        if not len(start):
            continue
        covered = united(np.r_[covered[0], start], np.r_[covered[1], end])
        visible = Cover.of(*covered).length_within(windows.start, windows.end)
        lengths[share] = lengths[share] + visible - before
        before = visible
    lengths["idle"] = windows.end - windows.start - before
    awaited, preempted = _off_core(on_cpu, spans, windows)
    awaited = np.minimum(awaited, lengths["compute"])
    preempted = np.minimum(preempted, lengths["compute"] - awaited)
    lengths["compute"] = lengths["compute"] - awaited - preempted
    lengths["wait"], lengths["preempted"] = lengths["wait"] + awaited, preempted
    columns = {
        "rank": windows.rank,
        "iteration": windows.iteration,
        "duration_ns": windows.end - windows.start,
    }
    return pa.table(columns | {f"{share}_ns": lengths[share] for share in SHARES})


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """Columns that the layers need; start and end are positions on a TimeAxis of all ranks."""

    busy_until: Integers
    """When the device had done what was launched before these spans, (1,); (0,) if not known."""
    rank: Integers
    start: Integers
    end: Integers
    cpu_ns: Integers
    launch_ns: Integers
    launched: Flags
    wait_ns: Integers
    transfer_ns: Integers
    communication: Flags
    overlapped: Flags
    compute: Flags
    sync: Flags
    """Spans that wait for gradients, which may be under way at that time, and compute a little."""
    copy: Flags
    host: Flags

    @classmethod
    def of(cls, table: pa.Table, busy_until_ns: int | None) -> _Spans:
        rank, start = numbers(table, "rank"), numbers(table, "start_ns")
        duration = numbers(table, "duration_ns")
        axis = TimeAxis.of(rank, start, start + duration)
        place = axis.place(rank, start)
        name, names = codes(table, "name")
        copies = np.array([is_copy(text) for text in names] or [False], dtype=np.bool_)[name]
        compute = equals(table, "kind", *COMPUTE_KINDS)
        sync = compute & equals(table, "name", GRAD_SYNC)
        return cls(
            busy_until=start[:0] if busy_until_ns is None else busy_until_ns + axis.shift[:1],
            rank=rank,
            start=place,
            end=place + duration,
            cpu_ns=numbers(table, "cpu_ns"),
            launch_ns=numbers(table, "launch_ns"),
            launched=is_launched(table),
            wait_ns=numbers(table, "wait_ns"),
            transfer_ns=numbers(table, "transfer_ns"),
            communication=equals(table, "kind", *COMMUNICATION_KINDS),
            overlapped=numbers(table, "track") == Track.OVERLAPPED,
            compute=compute & ~copies & ~sync,
            sync=sync,
            copy=compute & copies,
            host=equals(table, "kind", *HOST_KINDS),
        )

    def chosen(self, rows: Flags) -> tuple[Integers, Integers]:
        return self.start[rows], self.end[rows]


@dataclass(frozen=True)
class _Windows:
    """Iterations of all ranks, ordered by rank and iteration; start and end as in _Spans."""

    rank: Integers
    iteration: Integers
    start: Integers
    end: Integers

    @classmethod
    def of(cls, table: pa.Table, spans: _Spans) -> _Windows:
        iteration = numbers(table, "iteration")
        rows = np.flatnonzero(iteration >= 1)
        key = combine(spans.rank[rows], iteration[rows])
        order = np.argsort(key, kind="stable")
        rows, starts = rows[order], group_starts(key[order])
        if not len(rows):
            return cls(rows, rows, rows, rows)
        whole = equals(table, "kind", Kind.ITERATION)[rows]
        named = np.logical_or.reduceat(whole, starts)
        counted = whole | ~np.repeat(named, group_lengths(starts, len(rows)))
        limits = np.iinfo(np.int64)
        start = np.minimum.reduceat(np.where(counted, spans.start[rows], limits.max), starts)
        end = np.maximum.reduceat(np.where(counted, spans.end[rows], limits.min), starts)
        return cls(spans.rank[rows[starts]], iteration[rows[starts]], start, end)


def _layers(on_cpu: Collection[int], spans: _Spans) -> Iterator[tuple[str, Integers, Integers]]:
    """Yield (share, start, end) from the topmost layer down."""
    interrupted = np.isin(spans.rank, sorted(on_cpu))
    yield from _communication_layers(spans, spans.communication & ~spans.overlapped)
    yield "host", *spans.chosen(spans.host & interrupted)
    yield "compute", *spans.chosen(spans.compute)
    yield from _communication_layers(spans, spans.communication & spans.overlapped)
    yield "compute", *spans.chosen(spans.sync)
    yield "copy", *spans.chosen(spans.copy)
    yield "host", *spans.chosen(spans.host & ~interrupted)
    yield "dispatch", *_dispatch_gaps(spans)


def _communication_layers(spans: _Spans, rows: Flags) -> Iterator[tuple[str, Integers, Integers]]:
    if not rows.any():
        return
    split = rows & (spans.wait_ns >= 0)
    end = spans.end[split]
    yield "transfer", end - spans.transfer_ns[split], end
    yield "wait", *spans.chosen(split)
    yield "unsplit", *spans.chosen(rows)


def _dispatch_gaps(spans: _Spans) -> tuple[Integers, Integers]:
    """Return (start, end) of gaps before device spans launched after all earlier ones had ended."""
    rows = np.flatnonzero(spans.launched)
    if not len(rows):
        return rows, rows
    rank = np.r_[spans.rank[rows[: len(spans.busy_until)]], spans.rank[rows]]
    finished = np.maximum.accumulate(np.r_[spans.busy_until, spans.end[rows]])[:-1]
    rows = rows[len(rows) - len(finished) :]  # not the first, if nothing is known before it
    start = spans.start[rows]
    launched = start + np.minimum(spans.launch_ns[rows], 0)
    late = (finished < start) & (launched >= finished) & (rank[1:] == rank[:-1])
    return finished[late], start[late]


def _off_core(
    on_cpu: Collection[int], spans: _Spans, windows: _Windows
) -> tuple[Integers, Integers]:
    """Return the ns of visible compute, (window,), in which its thread was not on the CPU.

    The first array is the time in which the thread waited, as overlapped communication was under
    way; the second is all other time.
    """
    compute = np.flatnonzero(spans.compute)
    timed = spans.cpu_ns[compute] >= 0
    if not timed.any():  # on a GPU
        return np.zeros_like(windows.start), np.zeros_like(windows.start)
    hidden = spans.communication & ~spans.overlapped
    hidden |= spans.host & np.isin(spans.rank, sorted(on_cpu))
    above = Cover.of(*spans.chosen(hidden), np.maximum(spans.cpu_ns[hidden], 0).astype(np.float64))
    low, high = new_parts(spans.start[compute], spans.end[compute])
    kept = (high > low) & timed
    compute, low, high = compute[kept], low[kept], high[kept]
    visible = high - low - above.length_within(low, high)
    share = (high - low) / (spans.end[compute] - spans.start[compute])
    cpu = spans.cpu_ns[compute] * share - above.amount_within(low, high)
    away = np.clip(np.rint(visible - cpu), 0, visible)
    beside = Cover.of(*spans.chosen(spans.communication & spans.overlapped))
    awaited = np.minimum(away, beside.length_within(low, high))
    window = np.searchsorted(windows.start, low, side="right") - 1
    inside = (window >= 0) & (high <= np.r_[windows.end, 0][window])

    def total(part: Floats) -> Integers:
        sums = np.bincount(window[inside], part[inside], minlength=len(windows.start))
        return sums.astype(np.int64)

    return total(awaited), total(away - awaited)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sums of one timeline.

    iterations  one row a rank and iteration: rank, iteration, duration_ns, `<share>_ns`. An
                iteration lasts as long as its ITERATION span, or from its first span to its last
                where that span is missing
    ranks       one row a rank, worst first: rank, num_iterations, iteration_median_ns (the first
                iteration of a job, which loads and compiles, must not stand for the others),
                duration_ns (of all its iterations), `<share>_ns` and `<share>_ratio` of duration_ns

    The ns of a row's shares add up to its duration. The worst rank is the one that waits least: all
    other ranks wait for it.
    """

    run_id: str
    layout: Layout
    iterations: pa.Table
    ranks: pa.Table
    num_spans: Mapping[str, int]
    """Numbers of spans by kind."""
    num_matches: int
    unmatched: pa.Table
    """Operations without a counterpart, or recorded twice: kind, rank, num_spans."""
    clocks: Mapping[int, ClockFit]
    clock_method: str
    clock_names: Mapping[int, str]
    """Short clock names by rank: the host, and the GPU where the GPU has a clock of its own."""
    completeness: Completeness
    tracing: Overhead
    """What tracing cost, by the run's own untraced iterations."""
    has_turns: bool
    """Whether layers took turns in having their modules recorded."""

    def to_json(self) -> dict[str, Json]:
        """Return the summary as JSON, tables as lists of records."""
        record = {
            "schema": SCHEMA_VERSION,
            "run_id": self.run_id,
            "layout": self.layout.to_json(),
            "num_spans": dict(self.num_spans),
            "num_matches": self.num_matches,
            "unmatched": self.unmatched.to_pylist(),
            "ranks": _without_copies(self.ranks).to_pylist(),
            "iterations": _without_copies(self.iterations).to_pylist(),
            "alignment": {
                "method": self.clock_method,
                "clocks": [asdict(self.clocks[rank]) for rank in sorted(self.clocks)],
            },
            "completeness": asdict(self.completeness),
            "tracing": {**asdict(self.tracing), "has_turns": self.has_turns},
        }
        return cast("dict[str, Json]", record)


def _without_copies(table: pa.Table) -> pa.Table:
    """Leave the columns of copies out where there are no copies: only profiles record them."""
    if np.any(table.column("copy_ns").to_numpy()):
        return table
    return table.drop_columns([name for name in table.column_names if name.startswith("copy_")])


def summarise(timeline: Timeline) -> Summary:
    """Sum up the shares of every rank and iteration, and what tells how far to trust the shares."""
    num_matches = int(numbers(timeline.spans, "match").max(initial=-1)) + 1
    sums = sums_of(timeline.spans, ranks_on_cpu(timeline.headers))
    return summary_of(timeline, [sums], num_matches)


def summary_of(timeline: Timeline, sums: Sequence[Sums], num_matches: int) -> Summary:
    """Return the summary of a timeline from the sums of its shards; its spans are not needed."""
    iterations = pa.concat_tables([one.iterations for one in sums])
    if len(sums) > 1:
        iterations = iterations.sort_by([("rank", "ascending"), ("iteration", "ascending")])
    num_spans: Counter[str] = Counter()
    for one in sums:
        num_spans.update(one.num_spans)
    return Summary(
        run_id=timeline.run_id,
        layout=timeline.layout,
        iterations=iterations,
        ranks=_by_rank(iterations),
        num_spans=dict(num_spans),
        num_matches=num_matches,
        unmatched=_all_unmatched([one.unmatched for one in sums], list(num_spans)),
        clocks=timeline.clocks,
        clock_method=timeline.clock_method,
        clock_names={
            rank: _clock_name(timeline.headers[rank]) if rank in timeline.headers else fit.domain
            for rank, fit in timeline.clocks.items()
        },
        completeness=timeline.completeness,
        tracing=measure_job(timeline.windows),
        has_turns=is_sampled(timeline),
    )


def _unmatched(spans: pa.Table) -> pa.Table:
    alone = equals(spans, "kind", *COMMUNICATION_KINDS) & ~equals(spans, "op", "")
    rows = np.flatnonzero(alone & (numbers(spans, "match") < 0))
    kind_codes, kinds = codes(spans, "kind")
    rank = numbers(spans, "rank")[rows]
    num_ranks = int(rank.max(initial=0)) + 1
    key, count = np.unique(kind_codes[rows] * num_ranks + rank, return_counts=True)
    named = [kinds[code] for code in (key // num_ranks).tolist()]
    return pa.table(
        {"kind": pa.array(named, pa.string()), "rank": key % num_ranks, "num_spans": count}
    )


def _all_unmatched(tables: Sequence[pa.Table], kinds: list[str]) -> pa.Table:
    """Put the tables of shards together, ordered by rank within the order of `kinds`."""
    table = pa.concat_tables(tables)
    place = np.array([kinds.index(kind) for kind in table.column("kind").to_pylist()], np.int64)
    return table.take(pa.array(np.lexsort((numbers(table, "rank"), place))))


def _clock_name(header: RankHeader) -> str:
    """Return a clock domain's name without boot, card and process ids, which only JSON shows."""
    domain = header.clock.domain
    if not domain.startswith(f"{header.host}:"):
        return domain
    on_device = bool(header.device.uuid) and header.device.uuid in domain
    return f"{header.host} GPU {header.device.index}" if on_device else header.host


def _medians(values: Integers, rank: Integers, starts: Integers, count: Integers) -> Integers:
    """Return (rank,) medians of `values`, which are ordered by rank; halves are rounded down."""
    ordered = values[np.lexsort((values, rank))]
    low, high = ordered[starts + (count - 1) // 2], ordered[starts + count // 2]
    medians: Integers = low + (high - low) // 2
    return medians


def _by_rank(iterations: pa.Table) -> pa.Table:
    rank = numbers(iterations, "rank")
    starts = group_starts(rank)
    count = group_lengths(starts, len(rank))
    columns = {
        "rank": rank[starts],
        "num_iterations": count,
        "iteration_median_ns": _medians(numbers(iterations, "duration_ns"), rank, starts, count),
    }
    for name in ("duration_ns", *(f"{share}_ns" for share in SHARES)):
        values = numbers(iterations, name)
        columns[name] = per_group(np.add, values, starts)
    whole = np.maximum(columns["duration_ns"], 1)
    ratios = {f"{share}_ratio": columns[f"{share}_ns"] / whole for share in SHARES}
    order = np.lexsort((columns["rank"], ratios["wait_ratio"]))
    return pa.table({name: values[order] for name, values in (columns | ratios).items()})


_MOST_RANKS = 16
_MOST_CLOCKS = 8
_RARE = ("preempted", "unsplit", "copy", "dispatch")
"""Shares whose column is left out where no rank has any."""

_HOW_TO_READ = (
    "median iteration, and shares of the time of all; the rank that waits least stands first, the",
    "others wait for it.",
    "Compare ranks of one stage (PP): stages with more work wait less in a healthy job, too.",
)
_MEANINGS = {
    "preempted": "computing, but taken off its core",
    "unsplit": "communication whose partners are not in the trace: waiting or transfer",
    "dispatch": "device idle, for the host launched its work too late",
}
_WIDTH = 100
_TURNS = (
    "layers take turns: of each iteration the modules of some are recorded, of all with "
    "--trace-layer-stride 1"
)


def render_text(summary: Summary, most_ranks: int = _MOST_RANKS) -> str:
    """Render the table of shares, worst rank first, then alignment, completeness and notes.

    The table has at most `most_ranks` rows; a longer table says how many ranks are left out.
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
        *([_TURNS] if summary.has_turns else []),
    ]


def _table(summary: Summary, most_ranks: int) -> list[str]:
    shares = [
        share
        for share in SHARES
        if share not in _RARE or np.any(summary.ranks.column(f"{share}_ns").to_numpy())
    ]
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
    meanings = [f"{share}: {_MEANINGS[share]}." for share in shares if share in _MEANINGS]
    lines = [*_HOW_TO_READ, *meanings, *_aligned([head, *rows])]
    left_out = summary.ranks.num_rows - len(rows)
    return lines + ([f"… and {left_out} more ranks"] if left_out else [])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns to equal width, the second to the left and all others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if place == 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _alignment(summary: Summary) -> list[str]:
    by_domain: dict[str, list[ClockFit]] = {}
    for _, fit in sorted(summary.clocks.items()):
        by_domain.setdefault(fit.domain, []).append(fit)
    domains = list(by_domain.values())
    lines = _wrapped(f"clocks: {summary.clock_method}")
    if len(domains) == 1 and len(domains[0]) > 1:
        return lines + _one_clock(domains[0])
    if len(domains) > _MOST_CLOCKS:
        return lines + _compact(domains)
    rows: list[tuple[str, ...]] = [
        ("ranks", "clock", "offset", "drift", "residual", "p99", "error", "anchors")
    ]
    rows += [_domain_row(fits, summary.clock_names[fits[0].rank]) for fits in domains]
    return lines + _aligned(rows)


def _one_clock(fits: list[ClockFit]) -> list[str]:
    if not any(fit.num_anchors for fit in fits):
        return []
    median_ns = float(np.median([fit.residual_median_ns for fit in fits]))
    return [
        f"  ranks leave a collective within {_time(median_ns)} of each other (median; "
        f"p99 {_time(max(fit.residual_p99_ns for fit in fits))}):",
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


def _tracing(cost: Overhead) -> str:
    """Say what tracing cost, or why that is unknown; nothing if nothing was traced."""
    if cost.traced is not None and cost.run is not None:
        return (
            f"tracing: a traced iteration takes {_times(cost.traced)} an untraced one, the whole "
            f"run {_times(cost.run)} an untraced run (95 % intervals; {cost.num_cycles} windows at "
            f"{cost.granularity}, one every {cost.interval} iterations)"
        )
    if not cost.num_traced:
        return ""
    if not cost.num_untraced:
        return (
            "tracing: its cost is not known, every iteration was traced; make --trace-interval "
            "longer than --continuous-trace-iterations to have some to compare with"
        )
    return (
        f"tracing: its cost is not known: {cost.num_cycles} windows can be compared with the "
        f"untraced iterations after them, {MIN_CYCLES} are needed"
    )


def _times(estimate: Estimate) -> str:
    return f"{estimate.ratio:.4f} times ({estimate.low:.4f} … {estimate.high:.4f})"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False)


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
    unsplit = int(summary.ranks.column("unsplit_ns").to_numpy().sum())
    nothing = "none" if not unsplit else "none that names its partners, but see unsplit"
    lines.append(f"unmatched: {unmatched or nothing}; duplicates: {there.num_duplicates:,}")
    lines += _wrapped(_tracing(summary.tracing))
    return lines + [line for note in there.notes for line in _wrapped(f"note: {note}")]
