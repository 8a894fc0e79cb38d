"""The span table of a simulated job: declared columns, whole nanoseconds, each rank's own clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascan.schema import NOT_APPLICABLE, SPAN_COLUMNS, Track
from megascan.simulate.clocks import RankClocks
from megascan.simulate.engine import Recording
from megascan.simulate.grid import CROSS_STAGE_AXES, STAGE_AXES, Floats, Grid, Integers
from megascan.simulate.job import JobModel
from megascan.simulate.program import SpanTemplate, StageProgram
from megascan.timeline import TRACE_SCHEMA

_TEXT_FIELDS = ("kind", "name", "phase", "op", "direction")
_NUMBER_FIELDS = ("track", "microbatch", "chunk", "layer", "sequence", "size_bytes")

Code32 = npt.NDArray[np.int32]


class _Texts:
    """Codes of a text column, in order of first use."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def code(self, text: str) -> int:
        return self.values.setdefault(text, len(self.values))

    def array(self, codes: npt.NDArray[np.generic]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(
            pa.array(codes), pa.array(list(self.values), pa.string())
        )


@dataclass(frozen=True)
class _Rows:
    """Where each row of a stage comes from, in the order of the table."""

    place: Integers
    iteration: Integers
    """Index among the traced iterations."""
    span: Integers

    @classmethod
    def of(cls, start: Floats, recorded_places: npt.NDArray[np.bool_]) -> _Rows:
        """Spans that are there, by start within each iteration; parents stay before children.

        The host of a GPU is ahead of it, so that its spans can start before earlier ones.
        """
        span = np.argsort(start, axis=2, kind="stable")
        there = ~np.isnan(np.take_along_axis(start, span, axis=2))
        there[~recorded_places] = False
        place, iteration, _ = np.nonzero(there)
        return cls(place, iteration, span[there])

    def pick(self, values: Floats) -> Floats:
        """Values of shape (place, iteration, span), one a row."""
        picked: Floats = values[self.place, self.iteration, self.span]
        return picked


class TableBuilder:
    """Assembles the span table of a job, stage by stage."""

    def __init__(self, job: JobModel, grid: Grid, clocks: RankClocks) -> None:
        self.job, self.grid, self.clocks = job, grid, clocks
        self.texts = {name: _Texts() for name in (*_TEXT_FIELDS, "group")}
        self.columns: dict[str, list[npt.NDArray[np.generic]]] = {
            column.name: [] for column in SPAN_COLUMNS
        }
        used = [axis for axis in (*STAGE_AXES, *CROSS_STAGE_AXES) if grid.size(axis) > 1]
        self.smallest = {axis: grid.smallest_members(axis) for axis in used}

    def add_stage(
        self, program: StageProgram, iterations: list[int], recordings: list[Recording]
    ) -> None:
        """Spans of a stage's ranks; `recordings` hold one traced iteration each."""
        ranks = self.grid.ranks[program.stage]
        start, end, launch, cpu = (
            np.stack([getattr(recording, name) for recording in recordings]).transpose(2, 0, 1)
            for name in ("start", "end", "launch", "cpu")
        )
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

    def _put(self, name: str, values: npt.NDArray[np.generic]) -> None:
        field_type = TRACE_SCHEMA.field(name).type
        is_text = pa.types.is_dictionary(field_type)
        dtype = np.int32 if is_text else field_type.to_pandas_dtype()
        self.columns[name].append(values.astype(dtype, copy=False))

    def _device_times(self, launch: Floats, cpu: Floats) -> None:
        """CPU runs know CPU time, GPU runs when a span was launched."""
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
            texts = self.texts[name]
            codes = np.array([texts.code(str(getattr(span, name))) for span in spans], np.int32)
            self._put(name, codes[rows.span])
        for name in _NUMBER_FIELDS:
            numbers = np.array([int(getattr(span, name)) for span in spans], np.int64)
            self._put(name, numbers[rows.span])

    def _place_columns(self, program: StageProgram, rows: _Rows) -> None:
        """Peer and group: the same operation has other names for every rank of the stage."""
        shape = (self.grid.num_places, len(program.spans))
        peers = np.full(shape, NOT_APPLICABLE, dtype=np.int64)
        groups = np.full(shape, self.texts["group"].code(""), dtype=np.int32)
        axes: dict[str, Code32] = {}
        for number, span in enumerate(program.spans):
            if span.peer_stage != NOT_APPLICABLE:
                peers[:, number] = self.grid.ranks[span.peer_stage]
            if span.axis:
                if span.axis not in axes:
                    axes[span.axis] = self._group_codes(span.axis, program.stage)
                groups[:, number] = axes[span.axis]
        self._put("peer", peers[rows.place, rows.span])
        self._put("group", groups[rows.place, rows.span])

    def _group_codes(self, axis: str, stage: int) -> Code32:
        texts = self.texts["group"]
        return np.array(
            [texts.code(f"{axis}@{first}") for first in self.smallest[axis][stage]], np.int32
        )

    def table(self) -> pa.Table:
        """All spans, ordered by (rank, start_ns, -duration_ns)."""
        merged = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        order = _order(merged["rank"], merged["start_ns"], merged["duration_ns"])
        arrays = []
        for column in SPAN_COLUMNS:
            values = merged.pop(column.name)
            if order is not None:
                values = values[order]
            texts = self.texts.get(column.name)
            arrays.append(pa.array(values) if texts is None else texts.array(values))
        return pa.Table.from_arrays(arrays, schema=TRACE_SCHEMA)


def _order(
    ranks: npt.NDArray[np.generic],
    starts: npt.NDArray[np.generic],
    durations: npt.NDArray[np.generic],
) -> Integers | None:
    """Row order of a trace, or None when the rows are in order already."""
    rank, start = ranks.astype(np.int64), starts.astype(np.int64)
    duration = durations.astype(np.int64)
    same = rank[1:] == rank[:-1]
    later = start[1:] > start[:-1]
    tie = (start[1:] == start[:-1]) & (duration[1:] <= duration[:-1])
    if bool(np.all((rank[1:] > rank[:-1]) | (same & (later | tie)))):
        return None
    return np.lexsort((-duration, start, rank))
