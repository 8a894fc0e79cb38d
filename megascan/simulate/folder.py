"""Make the trace of a simulated job: span table, headers and windows, and a folder of rank files.

Spans have the declared columns and whole nanoseconds, by each rank's own clock. Next to the rank
files stands the ground truth: what was planted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.arrays import Floats, Integers
from megascan.errors import OutputError
from megascan.header import ClockOrigin, Device, Json, RankHeader, TraceSettings, WindowRecord
from megascan.overwriting import workplace
from megascan.rankfile import (
    RankFile,
    SpanRecord,
    encode_header,
    encode_spans,
    encode_window,
    rank_file_path,
    set_earlier_run_aside,
)
from megascan.schema import NOT_APPLICABLE, SPAN_COLUMNS, Column, Kind, Track
from megascan.simulate.execution import Draws, Engine, Recording, empty_recording
from megascan.simulate.job import Fault, JobModel, RankClocks
from megascan.simulate.program import (
    CROSS_STAGE_AXES,
    STAGE_AXES,
    Grid,
    SpanTemplate,
    StageProgram,
    compile_job,
)
from megascan.timeline import (
    TRACE_SCHEMA,
    Completeness,
    Trace,
    in_order,
    narrow_codes,
    number_type,
    text_column,
)

_TEXT_FIELDS = ("kind", "name", "phase", "op", "direction")
_NUMBER_FIELDS = ("track", "microbatch", "chunk", "layer", "sequence", "size_bytes")

Code32 = npt.NDArray[np.int32]


def _codes(known: dict[str, int], texts: Iterable[str]) -> Code32:
    """Return the code of each text; texts that are not yet known get the next codes."""
    return np.array([known.setdefault(text, len(known)) for text in texts], np.int32)


@dataclass(frozen=True)
class _Rows:
    """Place, iteration and span from which each row of a stage comes, in the order of the table."""

    place: Integers
    iteration: Integers
    """Index among the traced iterations."""
    span: Integers

    @classmethod
    def of(cls, start: Floats, recorded_places: npt.NDArray[np.bool_]) -> _Rows:
        """Return the present spans, by start within each iteration; parents before children.

        The host of a GPU is ahead of the GPU, so its spans can start before earlier spans.
        """
        span = np.argsort(start, axis=2, kind="stable")
        there = ~np.isnan(np.take_along_axis(start, span, axis=2))
        there[~recorded_places] = False
        place, iteration, _ = np.nonzero(there)
        return cls(place, iteration, span[there])

    def pick(self, values: Floats) -> Floats:
        """Return (row,) values out of an array of shape (place, iteration, span)."""
        picked: Floats = values[self.place, self.iteration, self.span]
        return picked


class TableBuilder:
    """Assembles the span table of a job, stage by stage."""

    def __init__(self, job: JobModel, grid: Grid, clocks: RankClocks) -> None:
        self.job, self.grid, self.clocks = job, grid, clocks
        self.texts: dict[str, dict[str, int]] = {name: {} for name in (*_TEXT_FIELDS, "group")}
        self.columns: dict[str, list[npt.NDArray[np.generic]]] = {
            column.name: [] for column in SPAN_COLUMNS
        }
        used = [axis for axis in (*STAGE_AXES, *CROSS_STAGE_AXES) if grid.size(axis) > 1]
        self.smallest = {axis: grid.smallest_members(axis) for axis in used}
        self.sampled: dict[int, dict[int, tuple[int, ...]]] = {}
        """Layers whose modules are recorded, by stage and iteration; all layers if none are named.
        """

    def add_stage(
        self, program: StageProgram, iterations: list[int], recordings: list[Recording]
    ) -> None:
        """Add the spans of a stage's ranks; `recordings` hold one traced iteration each."""
        ranks = self.grid.ranks[program.stage]
        start, end, launch, cpu = (
            np.stack([getattr(recording, name) for recording in recordings]).transpose(2, 0, 1)
            for name in ("start", "end", "launch", "cpu")
        )
        self._leave_modules_out(program, iterations, start)
        rows = _Rows.of(start, ~np.isin(ranks, self.job.missing_ranks))
        of_row = ranks[rows.place]
        begin_ns = self.clocks.local(rows.pick(start), of_row)
        self._put("rank", of_row)
        self._put("iteration", np.array(iterations)[rows.iteration])
        self._put("start_ns", begin_ns + self.clocks.origins()[of_row])
        self._put("duration_ns", self.clocks.local(rows.pick(end), of_row) - begin_ns)
        launch[:, :, [span.track == Track.HOST for span in program.spans]] = np.nan
        self._device_times(rows.pick(launch - start), rows.pick(cpu))
        self._template_columns(program.spans, rows)
        self._place_columns(program, rows)

    def _leave_modules_out(
        self, program: StageProgram, iterations: list[int], start: Floats
    ) -> None:
        """Remove modules that the tracer does not record, as it is not their layer's turn."""
        config = self.job.trace_config()
        chunks: dict[int, set[int]] = {}
        layer = np.array(
            [span.layer if span.kind == Kind.COMPUTE else NOT_APPLICABLE for span in program.spans]
        )
        for span, number in zip(program.spans, layer.tolist(), strict=True):
            if number != NOT_APPLICABLE:
                chunks.setdefault(span.chunk, set()).add(number)
        for place, iteration in enumerate(iterations[1:], start=1):  # the first has all
            turn = config.layers_in_turn(iteration, chunks)
            if turn is None:
                continue
            chosen = sorted(turn)
            self.sampled.setdefault(program.stage, {})[iteration] = tuple(chosen)
            start[:, place, (layer != NOT_APPLICABLE) & ~np.isin(layer, chosen)] = np.nan

    def _put(self, name: str, values: npt.NDArray[np.generic]) -> None:
        field_type = TRACE_SCHEMA.field(name).type
        is_text = pa.types.is_dictionary(field_type)
        dtype = np.int32 if is_text else number_type(field_type)
        self.columns[name].append(values.astype(dtype, copy=False))

    def _device_times(self, launch: Floats, cpu: Floats) -> None:
        """Add CPU times in CPU runs, launch times in GPU runs."""
        absent = np.full(len(launch), NOT_APPLICABLE, dtype=np.int64)
        self._put("end_is_bound", absent)  # a model knows when its communication ends
        if self.job.device == "cpu":
            self._put("cpu_ns", np.rint(cpu).astype(np.int64))
            self._put("launch_ns", absent)
            return
        values = np.rint(np.nan_to_num(launch)).astype(np.int64)
        values[values == NOT_APPLICABLE] = 0  # -1 ns would mean "does not apply"
        values[np.isnan(launch)] = NOT_APPLICABLE
        self._put("cpu_ns", absent)
        self._put("launch_ns", values)

    def _template_columns(self, spans: list[SpanTemplate], rows: _Rows) -> None:
        for name in _TEXT_FIELDS:
            codes = _codes(self.texts[name], (str(getattr(span, name)) for span in spans))
            self._put(name, codes[rows.span])
        for name in _NUMBER_FIELDS:
            numbers = np.array([int(getattr(span, name)) for span in spans], np.int64)
            self._put(name, numbers[rows.span])

    def _place_columns(self, program: StageProgram, rows: _Rows) -> None:
        """Add peer and group, whose names differ between the ranks of a stage."""
        shape, texts = (self.grid.num_places, len(program.spans)), self.texts["group"]
        peers = np.full(shape, NOT_APPLICABLE, dtype=np.int64)
        groups = np.full(shape, _codes(texts, [""]), dtype=np.int32)
        axes: dict[str, Code32] = {}
        for number, span in enumerate(program.spans):
            if span.peer_stage != NOT_APPLICABLE:
                peers[:, number] = self.grid.ranks[span.peer_stage]
            if span.axis:
                if span.axis not in axes:
                    smallest = self.smallest[span.axis][program.stage]
                    axes[span.axis] = _codes(texts, (f"{span.axis}@{first}" for first in smallest))
                groups[:, number] = axes[span.axis]
        self._put("peer", peers[rows.place, rows.span])
        self._put("group", groups[rows.place, rows.span])

    def table(self) -> pa.Table:
        """Return all spans, ordered by (rank, start_ns, -duration_ns)."""
        columns = []
        for column in SPAN_COLUMNS:
            values = np.concatenate(self.columns.pop(column.name))
            texts = self.texts.get(column.name)
            columns.append(pa.array(values) if texts is None else text_column(values, list(texts)))
        return in_order(pa.Table.from_arrays(columns, schema=TRACE_SCHEMA))


def rank_headers(
    job: JobModel, grid: Grid, clocks: RankClocks, run_id: str
) -> dict[int, RankHeader]:
    """Make the headers of the recorded ranks."""
    groups: dict[int, dict[str, tuple[int, ...]]] = {}
    for axis in (*STAGE_AXES, *CROSS_STAGE_AXES):
        for name, ranks in grid.members(axis).items() if grid.size(axis) > 1 else ():
            for rank in ranks:
                groups.setdefault(rank, {})[name] = ranks
    return {
        rank: _rank_header(job, clocks, run_id=run_id, rank=rank, groups=groups.get(rank, {}))
        for rank in job.recorded_ranks
    }


def _rank_header(
    job: JobModel, clocks: RankClocks, *, run_id: str, rank: int, groups: dict[str, tuple[int, ...]]
) -> RankHeader:
    number, index = divmod(rank, job.ranks_per_host)
    host, on_gpu = f"n{number:02d}", job.device == "cuda"
    return RankHeader(
        run_id=run_id,
        rank=rank,
        world_size=job.layout.world_size,
        layout=job.layout,
        coordinates=job.layout.coordinates(rank),
        groups=groups,
        host=host,
        process_id=10_000 + rank,
        device=Device(
            kind=job.device,
            name="simulated GPU" if on_gpu else "simulated CPU",
            index=index if on_gpu else 0,
            uuid=f"SIM-{rank:06d}" if on_gpu else "",
        ),
        backend="nccl" if on_gpu else "gloo",
        clock=ClockOrigin(
            domain=host, source="simulated", origin_unix_ns=int(clocks.origins()[rank])
        ),
        trace=TraceSettings(
            granularity=job.granularity,
            interval=job.interval,
            window=job.window,
            layer_stride=job.layer_stride,
        ),
        versions={"simulator": "1"},
    )


def rank_windows(
    job: JobModel,
    run_id: str,
    iterations: list[int],
    table: pa.Table,
    sampled: Mapping[int, Mapping[int, tuple[int, ...]]],
) -> dict[int, tuple[WindowRecord, ...]]:
    """Make the finished windows of every recorded rank, with their span counts.

    `sampled` has the layers whose modules were recorded, by stage and iteration.
    """
    ranks = table.column("rank").to_numpy().astype(np.int64)
    windows = (table.column("iteration").to_numpy() - 1) // job.interval
    num_windows = (iterations[-1] - 1) // job.interval + 1
    counts = np.bincount(
        ranks * num_windows + windows, minlength=job.layout.world_size * num_windows
    ).reshape(-1, num_windows)
    traced = [
        [i for i in iterations if (i - 1) // job.interval == window]
        for window in range(num_windows)
    ]

    def record(rank: int, window: int) -> WindowRecord:
        layers = sampled.get(job.layout.coordinates(rank).pp, {})
        return WindowRecord(
            run_id=run_id,
            window=window,
            first_iteration=traced[window][0],
            last_iteration=traced[window][-1],
            num_spans=int(counts[rank, window]),
            layers=tuple((i, layers[i]) for i in traced[window] if i in layers),
        )

    return {
        rank: tuple(record(rank, window) for window in range(num_windows))
        for rank in job.recorded_ranks
    }


def trace_of(builder: TableBuilder, run_id: str, iterations: list[int]) -> Trace:
    """Return the finished trace of the stages that were added."""
    job, table = builder.job, builder.table()
    return Trace(
        run_id=run_id,
        layout=job.layout,
        headers=rank_headers(job, builder.grid, builder.clocks, run_id),
        spans=table,
        windows=rank_windows(job, run_id, iterations, table, builder.sampled),
        completeness=Completeness(
            world_size=job.layout.world_size,
            ranks=job.recorded_ranks,
            missing_ranks=tuple(sorted(set(job.missing_ranks))),
            num_spans=table.num_rows,
        ),
    )


def simulate_trace(job: JobModel, faults: Sequence[Fault] = (), seed: int = 0) -> Trace:
    """Run a job and return what its ranks would have recorded.

    The same arguments give the same trace. Raises ConfigError for a job whose sizes do not fit
    together, or a fault that does not fit the job.

        job = JobModel(layout=layout, costs=compute_bound(layout))
        trace = simulate_trace(job, [parse_fault("rank=3,kind=compute,factor=1.5")], seed=1)
    """
    for fault in faults:
        fault.check(job.layout)
    grid = Grid(job.layout)
    programs = compile_job(job)
    engine = Engine(grid, programs, host_is_device=job.device == "cpu")
    draws = Draws(job, programs, tuple(faults), seed)
    config = job.trace_config()
    traced: list[int] = []
    recorded: list[list[Recording]] = [[] for _ in programs]
    for iteration in range(1, job.iterations + 1):
        recordings = [empty_recording(len(p.spans), grid.num_places) for p in programs]
        engine.run(draws.iteration(iteration), recordings)
        if config.traces(iteration):
            traced.append(iteration)
            for stage, recording in enumerate(recordings):
                recorded[stage].append(recording)
    digest = hashlib.sha256(repr((job, tuple(faults), seed)).encode()).hexdigest()
    builder = TableBuilder(job, grid, RankClocks.draw(job, seed))
    for stage, program in enumerate(programs):
        builder.add_stage(program, traced, recorded[stage])
        recorded[stage].clear()
    return trace_of(builder, f"simulated-{digest[:12]}", traced)


_FRAME = ("rank", "kind", "name", "track", "start_ns", "duration_ns")
_ARGUMENTS = tuple(column for column in SPAN_COLUMNS if column.name not in _FRAME)


def write_rank_files(trace: Trace, folder: Path) -> list[Path]:
    """Write one file a rank, as the tracer would have; return their paths.

    Files get their names when all are complete; if this ends early, no file is left. An earlier
    run's files in the folder are then moved aside. Raises OutputError if the folder or a file
    cannot be written.
    """
    try:
        with workplace(folder) as place:
            made = [_write_rank(trace, place, rank) for rank in sorted(trace.headers)]
            return [_take_over(file, folder) for file in made]
    except OSError as error:
        raise OutputError(
            f"cannot write rank files to {folder}: {error.strerror or error}; "
            "choose another folder with -o"
        ) from error


def _take_over(file: Path, folder: Path) -> Path:
    path = folder / file.name
    set_earlier_run_aside(path)
    return file.replace(path)


def _write_rank(trace: Trace, folder: Path, rank: int) -> Path:
    header = trace.headers[rank]
    path = rank_file_path(folder, header)
    first, last = trace.spans.column("rank").to_numpy().searchsorted([rank, rank + 1])
    spans = trace.spans.slice(first, last - first)
    iterations = spans.column("iteration").to_numpy()
    file, opening = RankFile(path), encode_header(header)
    for window in trace.windows[rank]:
        inside = (iterations >= window.first_iteration) & (iterations <= window.last_iteration)
        records = _span_records(spans.filter(pa.array(inside)), header.clock.origin_unix_ns)
        file.append([*opening, *encode_spans(rank, records), encode_window(rank, window)])
        opening = []
    file.close()
    return path


def _span_records(spans: pa.Table, origin_unix_ns: int) -> list[SpanRecord]:
    """Return rows as records for the writer; arguments that do not apply are absent."""
    arguments: list[dict[str, int | str]] = [{} for _ in range(spans.num_rows)]
    for column in _ARGUMENTS:
        _add_argument(arguments, spans, column)
    kinds, names = (_texts_of(spans, name) for name in ("kind", "name"))
    tracks, starts, durations = (
        spans.column(name).to_numpy() for name in ("track", "start_ns", "duration_ns")
    )
    starts = starts - origin_unix_ns
    numbers = (tracks.tolist(), starts.tolist(), durations.tolist())
    return list(zip(kinds, names, *numbers, arguments, strict=True))


def _texts_of(spans: pa.Table, name: str) -> list[str]:
    row_codes, texts = narrow_codes(spans, name)
    return [texts[code] for code in row_codes.tolist()]


def _add_argument(arguments: list[dict[str, int | str]], spans: pa.Table, column: Column) -> None:
    """Add a column to the arguments of the rows that it applies to."""
    name = column.name
    if column.type == "text":
        row_codes, texts = narrow_codes(spans, name)
        applies = np.array([text != "" for text in texts] or [False])[row_codes]
        values = [texts[code] for code in row_codes[applies].tolist()]
    else:
        numbers = spans.column(name).to_numpy()
        applies = numbers != NOT_APPLICABLE
        values = numbers[applies].tolist()
    for row, value in zip(np.flatnonzero(applies).tolist(), values, strict=True):
        arguments[row][name] = value


def ground_truth(
    trace: Trace, job: JobModel, faults: Sequence[Fault], seed: int
) -> Mapping[str, Json]:
    """Return what is really wrong with a simulated job; no analysis ever reads it."""
    return {
        "schema": 1,
        "run_id": trace.run_id,
        "layout": dict(job.layout.to_json()),
        "iterations": job.iterations,
        "seed": seed,
        "faults": [fault.to_json() for fault in faults],
        "imbalances": job.imbalance.to_json(),
    }
